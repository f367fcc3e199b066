# SPDX-License-Identifier: Apache-2.0
"""`fit` in loops that are not as even as those it plans for."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import offstage
from offstage.errors import ConfigError, HostMemoryError, StepLostError
from offstage.fitting.fitted import Stage
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from offstage.planning.choices import Choice
from tests.support.contract import assert_same_weights
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


def test_batches_that_have_grown_are_timed_again():
    """At the next look: neither are they taken for a link that is slower, nor is one overlooked from then on."""
    ran = Task(steps=80, rows=lambda step: 19 if step < 6 else 87).run(fitting("1GiB"), device())
    watcher = watcher_of(ran.optimizer)
    assert watcher.job.loop.input_elements == 87 * WIDTH
    assert watcher.stage is Stage.SETTLED
    assert watcher._settled_ms == pytest.approx(ran.times[-1], rel=1e-3)  # which has zero_grad(), too


class Counting(nn.Module):
    """Writes to a buffer, which changes what it makes."""

    def __init__(self):
        super().__init__()
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def test_layers_that_write_to_their_buffers_are_not_recomputed():
    runs = []
    for fits in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Counting() for _ in range(4)))
        made = torch.optim.AdamW(model.parameters())
        if fits:
            optimizer = offstage.fit(model, made, "1GiB", machine=machine(), **SMALL)
        else:
            optimizer = offstage.offload(made, model, fraction=0.0)
        train(model, optimizer, 6)
        optimizer.synchronize()
        runs.append(model)
        if fits:
            assert not any(layer.can_recompute for layer in optimizer.fitted.loop.layers)
    assert_same_weights(*runs)


def test_a_buffer_that_is_only_read_is_no_hindrance():
    model = Blocks(4)
    for layer in model.layers:
        layer.register_buffer("scale", torch.ones(2))
    optimizer = offstage.fit(model, torch.optim.AdamW(model.parameters()), "1GiB", machine=machine(), **SMALL)
    train(model, optimizer, 3)
    assert all(layer.can_recompute for layer in optimizer.fitted.loop.layers)


@pytest.mark.parametrize("clip", ["ours", "torch"])
def test_a_plan_of_a_loop_that_did_something_else_with_gradients(clip, caplog):
    """It may update in backward, and it counts on no second set."""
    plan = Task(steps=5).run(fitting(2_200_000), device()).optimizer.fitted
    assert plan.setting.update_in_backward
    ran = Task(steps=14, clip=clip).run(fitting(2_200_000, plan=plan), device())
    assert "is for a loop that does something else" in caplog.text
    assert max(ran.peaks) <= 2_200_000
    assert ran.optimizer.fitted.loop.clips == (clip == "ours")
    assert ran.optimizer.fitted.loop.reads_gradients == (clip == "torch")


def test_a_plan_that_recomputes_layers_that_write_to_their_buffers(caplog):
    plan = Task(steps=5, layers=4).run(fitting("1GiB"), device()).optimizer.fitted
    setting = dataclasses.replace(plan.setting, choices=(Choice.RECOMPUTE,) * 4)
    predicted = dataclasses.replace(plan.predicted, setting=setting)
    model = Blocks(4)
    for layer in model.layers:
        layer.register_buffer("calls", torch.zeros(()))
        layer.up.register_forward_pre_hook(lambda _, given, calls=layer.calls: (given[0] + 0 * calls.add_(1.0),))
    given = {"plan": dataclasses.replace(plan, predicted=predicted), "machine": machine(), **SMALL}
    optimizer = offstage.fit(model, torch.optim.AdamW(model.parameters()), "1GiB", **given)
    train(model, optimizer, 3)
    assert "is for a loop that does something else" in caplog.text
    assert Choice.RECOMPUTE not in optimizer.fitted.setting.choices
    assert [float(layer.calls) for layer in model.layers] == [3.0] * 4


def test_a_plan_of_the_same_loop_is_run_as_it_is():
    plan = Task(steps=5, clip="ours").run(fitting(2_200_000), device()).optimizer.fitted
    again = Task(steps=3, clip="ours").run(fitting(2_200_000, plan=plan), device())
    assert again.optimizer.fitted.setting == plan.setting


def test_a_step_that_is_skipped_behind_updates_in_backward_is_refused_as_by_offload():
    with device() as simulated:
        model = Blocks()
        simulated.adopt(model)
        made = torch.optim.AdamW(model.parameters())
        optimizer = fitting(2_200_000)(model, made, simulated)
        train(model, optimizer, 8)
        assert optimizer.fitted.setting.update_in_backward
        with pytest.raises(StepLostError, match=r"Expected step\(\) right after backward"):
            train(model, optimizer, 2, skipped=(0,))


def test_an_evaluation_that_forgot_no_grad_is_no_micro_batch():
    with device() as simulated:
        model = Blocks()
        simulated.adopt(model)
        optimizer = fitting(2_000_000)(model, torch.optim.AdamW(model.parameters()), simulated)
        train(model, optimizer, 24)
        setting = optimizer.fitted.setting
        for _ in range(3):
            model(torch.randn(ROWS, WIDTH))
            train(model, optimizer, 1)
        assert optimizer.fitted.setting == setting
        assert watcher_of(optimizer).job.loop.micro_batches == 1


def test_a_small_host_beside_a_large_device():
    """State that the host has no room for stays on the device, from the beginning."""
    ran = Task(steps=8).run(fitting("1GiB", host_budget=100_000), device())
    assert ran.optimizer.fitted.overrides["fraction"] == 0.0
    assert not ran.optimizer.receipt().host_state_bytes


@pytest.mark.parametrize("extra", [300_000, 600_000])
def test_what_takes_too_much_in_any_case_goes_on_with_the_least(extra):
    """Something else of the user's takes memory, and no plan fits any more."""
    with device() as simulated:
        model = Blocks()
        simulated.adopt(model)
        optimizer = fitting(2_000_000)(model, torch.optim.AdamW(model.parameters()), simulated)
        train(model, optimizer, 2)
        kept = torch.zeros(extra // 4)
        simulated.adopt(kept)
        train(model, optimizer, 26)
        simulated.reset_peak()
        train(model, optimizer, 1)
        assert simulated.peak_bytes < 1.1 * 2_000_000
        del kept


def test_a_forward_that_is_called_by_hand_is_left_alone():
    """Its hooks do not run: the job stays as it began, and looks at nothing."""
    model, optimizer = made()
    for _ in range(40):
        model.forward(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert watcher_of(optimizer).stage is Stage.SETTLED
    assert optimizer.fitted is None


def test_the_number_that_a_refusal_names_is_enough():
    task = Task(steps=4, rows=lambda step: 8 * ROWS)
    with pytest.raises(ConfigError, match=r"device_peak=1\.6 MiB is not enough") as caught:
        task.run(fitting(1_700_000), device())
    named = str(caught.value).partition("this job takes ")[2].partition(" on the device")[0].replace(" ", "")
    assert task.run(fitting(named), device()).optimizer.fitted is not None


def test_layers_that_are_unfrozen_are_planned_for_at_once():
    with device() as simulated:
        model = Blocks()
        simulated.adopt(model)
        model.layers.requires_grad_(False)
        optimizer = fitting(2_600_000)(model, torch.optim.AdamW(model.parameters()), simulated)
        train(model, optimizer, 8)
        assert optimizer.fitted.overrides["fraction"] == 0.0
        model.layers.requires_grad_(True)
        train(model, optimizer, 20)
        assert optimizer.fitted.state_bytes == 2 * sum(param.nbytes for param in model.parameters())
        simulated.reset_peak()
        train(model, optimizer, 2)
        assert simulated.peak_bytes <= 2_600_000


def test_frozen_weights_leave_also_where_all_state_is_small():
    """As by hand, with `weights="host"`: biases alone are trained."""
    with device() as simulated:
        model = Blocks(8)
        simulated.adopt(model)
        for name, param in model.named_parameters():
            param.requires_grad_("down.bias" in name)
        optimizer = fitting(1_150_000)(model, torch.optim.AdamW(model.parameters()), simulated)
        train(model, optimizer, 12)
        assert optimizer.fitted.setting.hosted > 0
        assert simulated.most_bytes <= 1_150_000


def test_the_optimizer_is_gone_and_the_model_goes_on():
    model, optimizer = made()
    train(model, optimizer, 6)
    del optimizer
    model(torch.randn(4 * ROWS, WIDTH)).sum().backward()
