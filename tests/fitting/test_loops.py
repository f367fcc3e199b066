# SPDX-License-Identifier: Apache-2.0
"""`fit` in loops that are not as even as those it plans for."""

import pytest
import torch
from torch import nn

import offstage
from offstage.errors import ConfigError, HostMemoryError
from offstage.fitting.fitted import Stage
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from tests.support.machines import machine
from tests.support.simulated_jobs import ROWS, SMALL, WIDTH, Blocks, Task, device, fitting


def watcher_of(optimizer):
    return runtime_of(optimizer).watcher


@pytest.mark.parametrize("budget", [2_000_000, 2_600_000, 3_400_000])
def test_short_batches_do_not_lower_what_long_ones_were_seen_to_take(budget):
    """The second iteration is watched with long ones, what is tried has short ones, and long ones come again."""
    long = (1, 12, 13, 25)
    ran = Task(steps=28, rows=lambda step: ROWS if step in long else ROWS // 4).run(fitting(budget), device())
    assert max(ran.peaks) <= budget
    assert watcher_of(ran.optimizer).job.loop.input_elements == ROWS * WIDTH
    assert watcher_of(ran.optimizer).stage is Stage.SETTLED


def train(model, optimizer, steps, skipped=()):
    for step in range(steps):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad()


def made(**settings):
    model = Blocks(4)
    given = {"device_peak": "1GiB", "machine": machine(), **SMALL, **settings}
    return model, offstage.fit(model, torch.optim.AdamW(model.parameters()), **given)


def test_skipped_steps_are_no_micro_batches():
    model, optimizer = made()
    train(model, optimizer, 12, skipped=(5, 6, 9))
    assert watcher_of(optimizer).job.loop.micro_batches == 1


def test_fewer_micro_batches_than_there_were():
    model, optimizer = made()
    train(model, optimizer, 6)
    for number in (0, 1, 2):
        with optimizer.accumulate() if number < 2 else torch.enable_grad():
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert watcher_of(optimizer).job.loop.micro_batches == 3
    train(model, optimizer, 1)
    assert watcher_of(optimizer).job.loop.micro_batches == 1


def test_layers_that_save_nothing_that_is_large_enough_to_leave():
    """The default of `min_bytes` is larger than any tensor here: that is no error of the user's."""
    model = Blocks(4)
    optimizer = offstage.fit(model, torch.optim.AdamW(model.parameters()), "1GiB", machine=machine())
    train(model, optimizer, 10)
    assert watcher_of(optimizer).stage is not Stage.WATCHING
    handle = watcher_of(optimizer)._handle
    assert handle is None or handle.observer is None


def test_a_plan_that_takes_more_than_this_limit():
    plan = Task(steps=5).run(fitting("1GiB"), device()).optimizer.fitted
    with pytest.raises(ConfigError, match=r"plan takes .* on the device; expected one within device_peak=2\.0 MiB"):
        Task(steps=1).run(fitting("2MiB", plan=plan), device())


def test_activations_that_are_offloaded_already():
    model = Blocks(4)
    plain = torch.optim.AdamW(model.parameters())
    handle = offstage.offload_activations(model, min_bytes=1024)
    with pytest.raises(ConfigError, match=r"offloaded already, by offload_activations\(\) or by an earlier fit"):
        offstage.fit(model, plain, "1GiB", machine=machine(), **SMALL)
    handle.remove()
    train(model, plain, 1)  # it was not taken over
    train(model, offstage.fit(model, plain, "1GiB", machine=machine(), **SMALL), 5)


@pytest.mark.parametrize(
    "error", [HostMemoryError("none is left"), KeyboardInterrupt(), torch.OutOfMemoryError("none")]
)
def test_a_switch_that_fails_changes_nothing(error, monkeypatch):
    """Where there is too little memory for a move the job goes on as it is; other failures are the caller's."""
    expected = Blocks(4)
    torch.manual_seed(3)
    train(expected, offstage.offload(torch.optim.AdamW(expected.parameters()), expected, fraction=0.0), 8)
    model, optimizer = made()
    replan, failed = OffloadedOptimizer.replan, []

    def failing(self, **changes):
        if len(failed) < 2:
            failed.append(changes)
            raise error
        replan(self, **changes)

    monkeypatch.setattr(OffloadedOptimizer, "replan", failing)
    torch.manual_seed(3)
    for _ in range(8):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        try:
            optimizer.step()
        except type(error):
            assert not isinstance(error, HostMemoryError)
            assert watcher_of(optimizer).stage is Stage.WATCHING
            assert optimizer.fitted is None
        optimizer.zero_grad()
    optimizer.synchronize()
    assert failed
    assert watcher_of(optimizer).stage is not Stage.WATCHING
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True)
    )


def test_gradients_that_only_the_first_iteration_reads():
    """A log of every tenth step begins with it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    plain = torch.optim.AdamW(model.parameters())
    optimizer = offstage.fit(model, plain, "1GiB", machine=machine(), weights_on_host=False, **SMALL)
    for step in range(12):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        if step % 10 == 0:
            assert all(param.grad.norm() >= 0 for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert watcher_of(optimizer).job.loop.reads_gradients
