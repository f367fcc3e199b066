# SPDX-License-Identifier: Apache-2.0
"""The contract's section "Loop and environment": exits, exceptions, Ctrl-C, threads, fork, and doing nothing."""

import copy
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before a test replaces torch.Stream, which it needs while it is imported
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offstage
from offstage.config import Placement
from offstage.engine.pipeline import Pipeline
from offstage.engine.transport import Moved, Transport
from offstage.errors import StepLostError
from offstage.optimizer import places as placing
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import (
    PLANS,
    SMALL,
    TORCH,
    Blocks,
    adamw,
    assert_same,
    assert_same_future,
    batch,
    chunk_count,
    loss_of,
    make_model,
    offloaded_model,
    snapshot,
    train,
    trained,
    twin,
    unchanged,
)

SOURCES = str(Path(offstage.__file__).parent.parent)


# Exit, exceptions, Ctrl-C


def run_python(code):
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


PREAMBLE = """
import torch, offstage
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
made = []
def lanes(device):
    made.append(LazyLanes(device, seed=0))
    return made[-1]
param = torch.nn.Parameter(torch.ones(8192))
with use_lanes(lanes):
    optimizer = offstage.offload(torch.optim.SGD([param], momentum=0.9, lr=0.1), min_bytes=0, chunk_bytes="16KiB")
param.grad = torch.ones_like(param)
optimizer.step()
assert made[0]._pending, "nothing is in flight"
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("raise SystemExit(7)", 7), ("raise ZeroDivisionError", 1), ("del optimizer, param", 0)],
    ids=["end of the program", "sys.exit", "exception", "dropped"],
)
def test_interpreter_exit_with_copies_in_flight(ending, code):
    """“Interpreter exit, exceptions … with copies in flight neither hang nor crash”."""
    result = run_python(PREAMBLE + ending)
    assert result.returncode == code, result.stderr
    if "ZeroDivisionError" in ending:
        assert result.stderr.strip().endswith("ZeroDivisionError")
    else:
        assert result.stderr == ""


@pytest.mark.parametrize("ending", ["", "optimizer.itself = optimizer"], ids=["end of the program", "in a cycle"])
def test_interpreter_exit_with_updates_that_wait_for_the_next_forward(ending):
    """Nothing is made, and nothing is said."""
    result = run_python(
        """
import torch, offstage
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
adamw = torch.optim.AdamW(model.parameters())
optimizer = offstage.offload(adamw, model, weights="host", overlap_forward=True, min_bytes=0, chunk_bytes="16KiB")
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
from offstage.optimizer.optimizer import runtime_of
assert runtime_of(optimizer).engines[0].postponed is not None
"""
        + ending
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_ctrl_c_from_outside():
    """“Ctrl-C with copies in flight”: a program that is interrupted between steps dies of KeyboardInterrupt, once."""
    result = run_python(PREAMBLE + "import signal\nsignal.raise_signal(signal.SIGINT)")
    assert result.returncode == -signal.SIGINT, result.stderr
    assert result.stderr.strip().endswith("KeyboardInterrupt")
    assert result.stderr.count("Traceback") == 1


def interrupt_update(monkeypatch, optimizer, at, action):
    """Make the `at`-th update of the next steps run `action` first."""
    update, calls = runtime_of(optimizer).rule.update, itertools.count(1)

    def interrupted(shares):
        if next(calls) == at:
            action()
        update(shares)

    monkeypatch.setattr(runtime_of(optimizer).rule, "update", interrupted)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("config", [SMALL, {**SMALL, "fraction": 0.5}, TORCH], ids=["all", "half", "torch rule"])
def test_ctrl_c_inside_a_step(monkeypatch, config, at):
    """“Ctrl-C”: inside a step it is raised after the step is complete, and training can go on."""
    reference_model, reference = offloaded_model(**config)
    model, optimizer = offloaded_model(**config)
    updates = chunk_count(optimizer) + any(p is Placement.RESIDENT for p in optimizer.plan.placements)
    at = min(at, updates)
    train(reference_model, reference, 2)
    train(model, optimizer, 1)
    interrupt_update(monkeypatch, optimizer, at, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1, 2))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(reference_model, reference, model, optimizer)
    assert optimizer.receipt().steps == 2
    assert_same_future((reference_model, reference), (model, optimizer), range(2, 4))


def test_ctrl_c_reaches_the_users_own_handler(monkeypatch):
    """“Ctrl-C”: a handler that the program installed is called after the step, and is still installed."""
    model, optimizer = offloaded_model()
    seen = []

    def handler(number, frame):
        seen.append((number, [float(state["step"]) for state in optimizer.state.values()]))

    interrupt_update(monkeypatch, optimizer, 2, lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, handler)
    try:
        train(model, optimizer, 1)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [(signal.SIGINT, [1.0] * 4)]


def test_steps_in_another_thread():
    """“Ctrl-C”: only the main thread may set signal handlers; a step elsewhere works all the same."""
    model, optimizer = offloaded_model()
    failures = []

    def work():
        try:
            train(model, optimizer, 2)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert_same(*trained(2), model, optimizer)


def test_an_exception_before_the_first_update_changes_nothing(monkeypatch):
    """“exceptions … with copies in flight”: before the first update all is as before; the step can be retried."""
    model, optimizer = trained(2)
    optimizer.zero_grad()
    loss_of(model, 2).backward()

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no room for a slot")

    with monkeypatch.context() as patch:
        patch.setattr(Transport, "prepare", fail)
        with unchanged(model, optimizer), pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.step()
    assert_same(*trained(3), model, optimizer)


@pytest.mark.parametrize("config", [SMALL, TORCH], ids=["own rule", "torch rule"])
def test_an_exception_in_the_first_fetch_changes_nothing(monkeypatch, config):
    """“exceptions … with copies in flight”: no update has been submitted yet, so the step is not lost."""
    model, optimizer = trained(2, **config)
    optimizer.zero_grad()
    loss_of(model, 2).backward()

    def fail(*_):
        raise RuntimeError("the first copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "fetch", fail)
        with unchanged(model, optimizer), pytest.raises(RuntimeError, match="the first copy failed") as info:
            optimizer.step()
    assert not isinstance(info.value, StepLostError)
    optimizer.step()
    assert_same(*trained(3, **config), model, optimizer)


@pytest.mark.parametrize("config", [SMALL, TORCH, {"fraction": 0.0}], ids=["own rule", "torch rule", "off"])
def test_an_exception_between_updates_says_that_the_step_is_lost(monkeypatch, config):
    """“exceptions”: in the middle of a step the error says so and how to go on; a checkpoint brings training back."""
    model, optimizer = trained(2, **config)
    saved, weights = snapshot(optimizer), copy.deepcopy(model.state_dict())

    def fail():
        raise ZeroDivisionError("in an update")

    with monkeypatch.context() as patch:
        interrupt_update(patch, optimizer, min(2, max(1, chunk_count(optimizer))), fail)
        with pytest.raises(StepLostError, match=r"in an update.*load_state_dict") as info:
            train(model, optimizer, range(2, 3))
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(StepLostError, match="load_state_dict"):
        train(model, optimizer, range(2, 3))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 4))
    assert_same(*trained(4, **config), model, optimizer)


# Threads


def test_no_threads_of_its_own():
    """“Threads: respects `torch.get_num_threads`”: with one thread allowed, a step starts no other."""
    assert torch.get_num_threads() == 1
    _first = trained(1)
    before = set(os.listdir("/proc/self/task"))
    _second = trained(2)
    assert set(os.listdir("/proc/self/task")) <= before  # another test's thread may end meanwhile


# fork


def arena_addresses(optimizer):
    return {
        arena.flat.data_ptr()
        for held in runtime_of(optimizer).all_states()
        if held.home is not None
        for arena in held.home.arenas.values()
    }


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False


def in_child(function):
    """The exit status of `function` in a forked child: 0 if it returned True."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_fork_does_not_copy_the_arenas():
    """“fork (DataLoader workers) neither copies nor corrupts the arenas”: the child does not have them at all."""
    model, optimizer = trained(2)
    addresses = arena_addresses(optimizer)
    assert len(addresses) == 2
    assert all(is_mapped(address) for address in addresses)
    assert in_child(lambda: not any(is_mapped(address) for address in addresses)) == 0
    assert in_child(lambda: any(is_mapped(address) for address in addresses)) == 1
    train(model, optimizer, range(2, 4))
    assert_same(*trained(4), model, optimizer)


@pytest.mark.parametrize("mode", [{}, {"overlap_forward": True, "weights": "host"}], ids=["in step", "host weights"])
def test_a_forked_child_may_drop_the_optimizer(mode, monkeypatch):
    """“fork neither copies nor corrupts the arenas”: also when the child's garbage collector finds them.

    With weights on the host a step leaves updates to the next forward, which the child cannot make.
    """

    def made():
        model = Blocks()
        return [model, offstage.offload(adamw(model.parameters()), model, **SMALL, **mode)]

    holder, expected = made(), made()
    train(*holder, 2)
    failed = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    gc.collect()  # what other tests and packages left behind is not the child's affair

    def drop():
        holder.clear()
        gc.collect()
        return not failed

    assert in_child(drop) == 0
    train(*holder, range(2, 3))
    train(*expected, 3)
    for _, optimizer in (holder, expected):
        optimizer.synchronize()
    assert_same(*expected, *holder)


def test_data_loader_workers():
    """“fork (DataLoader workers)”: workers that start in the middle of training change nothing."""
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*(batch(number) for number in range(3)), strict=True)))
    plain_model, plain, model, optimizer = twin()
    for one_model, one, workers in ((plain_model, plain, 0), (model, optimizer, 2)):
        for _ in range(2):
            context = "fork" if workers else None
            for inputs, target in DataLoader(data, 16, num_workers=workers, multiprocessing_context=context):
                one.zero_grad()
                nn.functional.mse_loss(one_model(inputs), target).backward()
                one.step()
    assert_same(plain_model, plain, model, optimizer)


# OffloadIneffectiveError


@pytest.mark.parametrize(
    ("make", "config", "reason"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), SMALL, "no state"),
        (adamw, {}, "min_bytes"),
        (adamw, {"fraction": 0.9, "min_bytes": "1GiB"}, "min_bytes"),
    ],
    ids=["no state", "all small", "all small with a fraction"],
)
def test_nothing_to_offload_raises(make, config, reason):
    """“Nothing moved although something with a gradient should have: raise (`OffloadIneffectiveError`)”: at once."""
    model = make_model()
    inner = make(model.parameters())
    with pytest.raises(offstage.OffloadIneffectiveError, match=reason):
        offstage.offload(inner, model, **config)
    train(model, inner, 1)  # the optimizer given is still good


def test_a_budget_that_is_met_without_offloading_is_no_error():
    """“although something … should have”: with room for everything nothing should."""
    _model, optimizer = trained(1, device_budget="1GiB", min_bytes=0)
    assert optimizer.receipt().total_bytes_fetched == 0


def test_a_step_that_moves_nothing_raises(monkeypatch):
    """“Nothing moved although something with a gradient should have: raise … with the reason”: at the step itself."""
    model, optimizer = offloaded_model()
    monkeypatch.setattr(placing.Places, "moved", lambda self: Moved())
    with pytest.raises(offstage.OffloadIneffectiveError, match=r"0\.weight.*no byte moved"):
        train(model, optimizer, 1)


def test_a_step_without_streamed_gradients_moves_nothing_and_is_no_error():
    """“Nothing moved although something with a gradient should have”: here nothing should have."""
    model, optimizer = trained(1, **SMALL, fraction=0.5)
    optimizer.zero_grad()
    before = optimizer.receipt()
    loss_of(model, 1).backward()
    for param, placement in zip(model.parameters(), optimizer.plan.placements, strict=True):
        if placement is Placement.STREAMED:
            param.grad = None
    optimizer.step()
    after = optimizer.receipt()
    assert after.steps == before.steps + 1
    assert after.total_bytes_fetched == before.total_bytes_fetched


@pytest.mark.parametrize("plan", PLANS)
def test_receipt_counts_what_moved(plan):
    """“Nothing moved …”: the receipt's bytes are those of the plan's streamed parameters, every step."""
    _model, optimizer = trained(2, **PLANS[plan])
    receipt, streamed = optimizer.receipt(), optimizer.plan.bytes_of(Placement.STREAMED)
    assert streamed <= receipt.bytes_fetched <= optimizer.plan.host_bytes
    assert receipt.total_bytes_stored == 2 * receipt.bytes_stored == 2 * receipt.bytes_fetched


def test_receipt_totals_survive_larger_slots():
    """“Nothing moved …”: totals only grow, also when a group is added that needs larger slots."""
    small, large = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(8192))
    optimizer = offstage.offload(adamw([small]), **SMALL)
    small.grad = torch.ones(16)
    optimizer.step()
    first = optimizer.receipt()
    assert first.total_bytes_fetched == 128
    optimizer.add_param_group({"params": [large]})
    assert optimizer.receipt().total_bytes_fetched == 128
    large.grad = torch.ones(8192)
    optimizer.step()
    receipt = optimizer.receipt()
    assert receipt.bytes_fetched == 128 + 8192 * 8
    assert receipt.total_bytes_fetched == receipt.total_bytes_stored == 2 * 128 + 8192 * 8
