# SPDX-License-Identifier: Apache-2.0
"""Every public method may be called from a second thread while the loop trains: same bits, or one clear error."""

import contextlib
import inspect
import sys
import threading

import pytest
import torch

import offstage
from offstage import checkpoint
from offstage.checkpoint.manifest import MANIFEST
from offstage.errors import OffstageError
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from tests.support.contract import SMALL, adamw, assert_same, snapshot
from tests.support.lives import clip_to, loss_of, stack
from tests.support.second_thread import READS, WRITES, assert_clear, in_backward, second_thread
from tests.support.training import THREADED, lazily

KINDS = [None, 0, 1, 2, THREADED]
MODES = {
    "in step": {},
    "on the host": {"update_on": "host", "threads": 2},
    "in forward": {"overlap_forward": True, "window": "all"},
    "host, in forward": {"overlap_forward": True, "update_on": "host", "threads": 2},
    "in backward": {"update_in_backward": True, "overlap_forward": True},
    "in backward, clipped": {"update_in_backward": True, "clip": 1e4},
    "weights on the host": {"weights": "host", "overlap_forward": True},
    "weights on the host, in backward, clipped": {"weights": "host", "update_in_backward": True, "clip": 1e4},
}
STEPS = 12


def iterate(model, optimizer, numbers, clip=None):
    for number in numbers:
        loss = loss_of(model, number)
        with in_backward:
            loss.backward()
        clip_to(optimizer, clip)
        optimizer.step()
        optimizer.zero_grad()


def made(mode):
    settings = dict(MODES[mode])
    clip = settings.pop("clip", None)
    model = stack(layers=6)
    return model, offstage.offload(adamw(model.parameters()), model, **{**SMALL, **settings}), clip


def reference(mode):
    model, optimizer, clip = made(mode)
    iterate(model, optimizer, range(STEPS), clip)
    optimizer.synchronize()
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_reading_while_the_loop_trains_changes_no_bit(mode, kind):
    with lazily(kind):
        model, optimizer, clip = made(mode)
        with second_thread(READS, model, optimizer) as found:
            iterate(model, optimizer, range(STEPS), clip)
            for _ in range(1000):  # at least a round of calls was made
                if len(found) < len(READS):
                    optimizer.receipt()
        optimizer.synchronize()
    assert len(found) >= len(READS)
    assert_clear(found)
    assert_same(*reference(mode), model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_writing_while_the_loop_trains_is_clear_and_leaves_nothing_behind(mode, kind):
    """Both threads go on or get one of our errors, and the optimizer can be loaded and trained with afterwards."""
    expected_model, expected, clip = made(mode)
    iterate(expected_model, expected, range(4), clip)
    expected.synchronize()
    saved = {name: value.clone() for name, value in expected_model.state_dict().items()}, snapshot(expected)
    writes = {name: call for name, call in WRITES.items() if name not in ("close", "add_param_group")}
    with lazily(kind):
        model, optimizer, _ = made(mode)
        iterate(model, optimizer, range(2), clip)  # it is known from here on that the loop clips
        with second_thread(writes, model, optimizer) as found:
            for number in range(STEPS):
                try:
                    iterate(model, optimizer, [number], clip)
                except RuntimeError as error:
                    found.append(("iterate", error))
        assert_clear(found)
        optimizer.zero_grad()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        iterate(model, optimizer, range(4, 8), clip)
        optimizer.synchronize()
    iterate(expected_model, expected, range(4, 8), clip)
    expected.synchronize()
    assert_same(expected_model, expected, model, optimizer)


@pytest.mark.parametrize("kind", [None, 0, THREADED])
@pytest.mark.parametrize("name", ["close", "add_param_group"])
def test_closing_or_growing_while_the_loop_trains(name, kind):
    with lazily(kind):
        model, optimizer, clip = made("in forward")
        calls = {**READS, name: WRITES[name]}
        with second_thread(calls, model, optimizer) as found, contextlib.suppress(OffstageError):
            iterate(model, optimizer, range(STEPS), clip)
        assert_clear(found)


@pytest.mark.parametrize("kind", [None, 0, 1])
@pytest.mark.parametrize(
    ("mode", "clip"), [*((mode, clip) for mode in MODES if "weights" in mode for clip in (1e4, 1e-3))]
)
def test_a_layer_that_a_second_thread_runs_does_not_hold_up_the_loop(mode, clip, kind):
    """An evaluation is in the first layer while the loop steps, takes updates back and replans: same bits."""
    with lazily(kind):
        model, optimizer, _ = made(mode)
        iterate(model, optimizer, range(3), clip)
        inside, goes_on, loop = threading.Event(), threading.Event(), threading.get_ident()
        forward = model[0].forward

        def held(value):
            if threading.get_ident() != loop:
                inside.set()
                assert goes_on.wait(20)
            return forward(value)

        model[0].forward = held
        thread = threading.Thread(target=lambda: torch.no_grad()(model[0])(torch.zeros_like(model[0].weight)))
        thread.start()
        assert inside.wait(20)
        iterate(model, optimizer, [3], clip)
        optimizer.replan(fraction=1.0)
        iterate(model, optimizer, [4], clip)
        goes_on.set()
        thread.join(20)
        iterate(model, optimizer, [5, 6], clip)
        optimizer.synchronize()
        expected_model, expected, _ = made(mode)
        iterate(expected_model, expected, range(7), clip)
        expected.synchronize()
    assert_same(expected_model, expected, model, optimizer)


def test_every_public_method_is_among_them():
    """A method that is added is added here."""
    public = {name for name in vars(OffloadedOptimizer) if not name.startswith("_")}
    called = inspect.getsource(sys.modules[second_thread.__module__])
    assert all(f"optimizer.{name}" in called for name in public)


@pytest.mark.parametrize("name", [name for name in (*READS, *WRITES) if name != "config"])  # one attribute
def test_every_method_waits_for_its_turn(name):
    """While the loop is in one of ours, another thread waits; deterministic, unlike the tests above."""
    model, optimizer, _ = made("in forward")
    iterate(model, optimizer, range(2))
    loss_of(model, 2).backward()
    started, over = threading.Event(), threading.Event()

    def work():
        started.set()
        with contextlib.suppress(OffstageError):
            {**READS, **WRITES}[name](model, optimizer)
        over.set()

    thread = threading.Thread(target=work, daemon=True)
    with runtime_of(optimizer).turn:
        thread.start()
        assert started.wait(10)
        assert not over.wait(0.03)
    thread.join(60)
    assert over.is_set()


@pytest.mark.parametrize("kind", [None, 0, THREADED])
def test_checkpoints_from_a_second_thread_are_of_one_step(tmp_path, kind):
    """A save, blocking or not, holds the weights and the state of one step, and training goes on with the same bits."""
    numbers = iter(range(1000))

    def save(model, optimizer):
        checkpoint.save(tmp_path / str(next(numbers)), model, optimizer)

    def save_later(model, optimizer):
        checkpoint.async_save(tmp_path / str(next(numbers)), model, optimizer).result()

    with lazily(kind):
        model, optimizer, _ = made("in forward")
        with second_thread({"save": save, "async_save": save_later}, model, optimizer) as found:
            iterate(model, optimizer, range(STEPS))
        optimizer.synchronize()
    assert_clear(found)
    assert_same(*reference("in forward"), model, optimizer)
    steps = {}
    expected_model, expected, _ = made("in forward")
    for number in range(STEPS + 1):
        expected.synchronize()
        steps[number] = [param.detach().clone() for param in expected_model.parameters()], snapshot(expected)
        iterate(expected_model, expected, [number])
    complete = [folder for folder in tmp_path.iterdir() if (folder / MANIFEST).exists()]
    assert complete
    for folder in complete:
        other_model, other, _ = made("in forward")
        checkpoint.load(folder, other_model, other)
        number = max([int(values["step"]) for values in other.state_dict()["state"].values()], default=0)
        weights, state = steps[number]
        assert all(torch.equal(a, b) for a, b in zip(weights, other_model.parameters(), strict=True))
        assert_same_state(state, snapshot(other))


def assert_same_state(a, b):
    assert a["state"].keys() == b["state"].keys()
    for index, values in a["state"].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][index][key]))
            for key, value in values.items()
        )
