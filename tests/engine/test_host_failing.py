# SPDX-License-Identifier: Apache-2.0
"""Updates on the host that fail, are interrupted, or are under way when everything ends.

A failure leaves weights and state as before the step or as after it, or says that the step is lost.
"""

import copy
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch import nn

import offstage
from offstage.errors import StepLostError
from offstage.optimizer.optimizer import runtime_of
from offstage.planning.plan import HOST_SLOTS
from tests.support.contract import saved_and_loaded
from tests.support.lives import CPU, end_step
from tests.support.params import (
    ON_HOST,
    RESIDENT,
    WHERE,
    copy_weights,
    equal,
    make_params,
    offloaded,
    resident_after,
    result,
    steps,
)
from tests.support.threaded_lanes import host_threads, wait_until, with_threads
from tests.support.training import THREADED, lazily

# Failing


class Failing:
    """A rule's slices of which one raises, in one chunk."""

    def __init__(self, optimizer, error, at=2):
        self._rule, self._error, self._at = runtime_of(optimizer).rule, error, at
        self._slices = self._rule.slices
        self.raised = 0

    def __enter__(self):
        calls = itertools.count()

        def slices(shares):
            made = self._slices(shares)
            return [self._fail, *made] if next(calls) == self._at else made

        self._rule.slices = slices
        return self

    def __exit__(self, *_):
        self._rule.slices = self._slices

    def _fail(self):
        self.raised += 1
        raise self._error


MANY = ((40, 40),) * 24
"""In fp32: seven chunks on the host."""


@pytest.mark.parametrize("kind", [None, 0, 1, THREADED])
@pytest.mark.parametrize("where", ["host", "mixed"])
def test_a_slice_that_fails_loses_the_step(where, kind):
    with lazily(kind):
        params = make_params(shapes=MANY)
        optimizer = offloaded(params, **WHERE[where])
    steps(params, optimizer, range(2))
    saved, weights = saved_and_loaded(optimizer.state_dict()), [param.detach().clone() for param in params]
    message = r"ZeroDivisionError: in a slice.*between two steps.*load_state_dict"
    with Failing(optimizer, ZeroDivisionError("in a slice"), at=1), pytest.raises(StepLostError, match=message):
        steps(params, optimizer, range(2, 3))
    for again in (lambda: steps(params, optimizer, range(2, 3)), optimizer.state_dict):
        with pytest.raises(StepLostError):
            again()
    copy_weights(params, weights)
    optimizer.load_state_dict(saved)
    steps(params, optimizer, range(2, 5))
    assert equal(result(params, optimizer), resident_after(range(5), shapes=MANY))


@pytest.mark.parametrize("kind", [None, 0, THREADED])
def test_failing_again_and_again_loses_no_staging_buffer(kind):
    with lazily(kind):
        params = make_params(shapes=MANY)
        optimizer = offloaded(params)
    steps(params, optimizer, range(1))
    saved = saved_and_loaded(optimizer.state_dict())
    for _ in range(3):
        with Failing(optimizer, ZeroDivisionError()), pytest.raises(StepLostError):
            steps(params, optimizer, range(1, 2))
        optimizer.load_state_dict(saved)
    steps(params, optimizer, range(1, 2))
    assert len(runtime_of(optimizer).places.engines[CPU].transport.host_updates._slots) == HOST_SLOTS


def make_model(kind=None, **config):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(24)))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with lazily(kind):
        return model, offstage.offload(inner, model, **{**ON_HOST, "threads": 4, **config})


def backward(model, step):
    model(torch.full((3, 40), 0.1 * (step + 1))).pow(2).mean().backward()


def iterate(model, optimizer, numbers):
    for step in numbers:
        backward(model, step)
        end_step(optimizer)


def after(numbers, **config):
    model, optimizer = make_model(**RESIDENT | {"update_on": "device"} | config)
    iterate(model, optimizer, numbers)
    return result(list(model.parameters()), optimizer)


LAST = 6
"""The last chunk: no other waits for its staging buffer, so that `step()` does not learn of its failure."""
FINDERS = {
    "forward": lambda model, optimizer: backward(model, 3),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "model.state_dict": lambda model, optimizer: model.state_dict(),
    "the next step": lambda model, optimizer: optimizer.step(),
}


def fail_after_step(kind):
    """With `overlap_forward`: `step()` has returned, and an update fails, or will."""
    model, optimizer = make_model(kind, overlap_forward=True)
    iterate(model, optimizer, range(2))
    saved, weights = saved_and_loaded(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    failing = Failing(optimizer, ZeroDivisionError("in a slice"), at=LAST)
    with failing:
        iterate(model, optimizer, range(2, 3))
    return model, optimizer, failing, saved, weights


@pytest.mark.parametrize("kind", [0, THREADED])
@pytest.mark.parametrize("model_first", [False, True])
@pytest.mark.parametrize("found_by", FINDERS)
def test_a_slice_that_fails_after_step(found_by, model_first, kind):
    """The call that waits for the weights raises, and nothing goes on before a checkpoint is loaded."""
    model, optimizer, failing, saved, weights = fail_after_step(kind)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(StepLostError, match=r"ZeroDivisionError: in a slice.*load_state_dict"):
        FINDERS[found_by](model, optimizer)
    assert failing.raised == 1
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StepLostError, match="in a slice"):
            refused()
    if model_first:
        model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    if not model_first:
        model.load_state_dict(weights)
    optimizer.zero_grad()
    iterate(model, optimizer, range(2, 5))
    optimizer.synchronize()
    assert equal(result(list(model.parameters()), optimizer), after(range(5)))


@pytest.mark.parametrize("found_by", ["forward", "synchronize", "model.state_dict"])
def test_what_is_under_way_when_a_step_is_lost_does_not_overwrite_what_is_loaded(found_by):
    """One piece of a weight fails while others are still being updated: the caller that is told may load at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 400))
    with with_threads():
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = offstage.offload(inner, model, **{**ON_HOST, "threads": 4, "overlap_forward": True})
    (engine,) = runtime_of(optimizer).engines
    assert len(engine.arenas.chunks_of[runtime_of(optimizer).state_of(model[0].weight)]) > 1
    iterate(model, optimizer, range(2))
    rule = runtime_of(optimizer).rule
    weights, slices_of, chunks, others = copy.deepcopy(model.state_dict()), rule.slices, [], threading.Event()

    def fail():
        raise ZeroDivisionError("in a slice")

    def slices(pieces):
        chunks.append(pieces)
        return [fail] if len(chunks) == 1 else [lambda: others.wait(10), *slices_of(pieces)]

    rule.slices = slices
    iterate(model, optimizer, range(2, 3))
    rule.slices = slices_of
    later = threading.Timer(0.2, others.set)
    later.start()
    with pytest.raises(StepLostError, match="in a slice"):
        FINDERS[found_by](model, optimizer)
    model.load_state_dict(weights)
    later.join()
    for promise in engine.transport.lanes._promises:
        promise.wait()
    assert len(chunks) > 1
    assert equal([param.detach() for param in model.parameters()], list(weights.values()))


@pytest.mark.parametrize("kind", [0, THREADED])
def test_a_failure_does_not_hold_up_close(kind):
    _, optimizer, failing, *_ = fail_after_step(kind)
    optimizer.close()
    assert failing.raised == 1
    assert runtime_of(optimizer).places.engines[CPU].transport.host_updates.nbytes == 0


def test_a_failure_in_an_early_chunk_is_found_in_step():
    """A later one waits for its staging buffer: no stream is given anything behind a broken promise."""
    model, optimizer = make_model(THREADED, overlap_forward=True)
    iterate(model, optimizer, range(2))
    with Failing(optimizer, ZeroDivisionError("in a slice"), at=0), pytest.raises(StepLostError, match="in a slice"):
        iterate(model, optimizer, range(2, 4))
    with pytest.raises(StepLostError):
        optimizer.step()


@pytest.mark.parametrize("kind", [None, 0, THREADED])
def test_a_slice_that_fails_in_backward(kind):
    model, optimizer = make_model(kind, update_in_backward=True)
    iterate(model, optimizer, range(2))
    saved = saved_and_loaded(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    with Failing(optimizer, ZeroDivisionError("in a slice")), pytest.raises((ZeroDivisionError, StepLostError)):
        iterate(model, optimizer, range(2, 3))
    with pytest.raises(StepLostError):
        optimizer.step()
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    optimizer.zero_grad()
    iterate(model, optimizer, range(2, 5))
    assert equal(result(list(model.parameters()), optimizer), after(range(5)))


def slowly(optimizer, seconds=0.01):
    """Every slice takes a while. Returns what to put back."""
    rule = runtime_of(optimizer).rule
    slices_of = rule.slices

    def late(piece):
        time.sleep(seconds)
        piece()

    rule.slices = lambda pieces: [functools.partial(late, piece) for piece in slices_of(pieces)]
    return slices_of


@pytest.mark.parametrize("kind", [None, 3, THREADED])
def test_ctrl_c_in_a_step_comes_after_it(kind):
    with lazily(kind):
        params = make_params(shapes=MANY)
        optimizer = offloaded(params, threads=2)
    rule, calls = runtime_of(optimizer).rule, itertools.count()
    slices_of = rule.slices

    def interrupting(piece):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        piece()

    rule.slices = lambda pieces: [functools.partial(interrupting, piece) for piece in slices_of(pieces)]
    with pytest.raises(KeyboardInterrupt):
        steps(params, optimizer, range(1))
    steps(params, optimizer, range(1, 2))
    assert equal(result(params, optimizer), resident_after(range(2), shapes=MANY))


@pytest.mark.parametrize("waiting", ["forward", "synchronize"])
def test_ctrl_c_while_someone_waits_for_host_threads(waiting):
    """The updates go on; the next read gets them whole."""
    model, optimizer = make_model(THREADED, overlap_forward=True)
    iterate(model, optimizer, range(2))
    slices_of = slowly(optimizer, 0.05)
    iterate(model, optimizer, range(2, 3))
    runtime_of(optimizer).rule.slices = slices_of
    alarm = threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT))
    alarm.start()
    with pytest.raises(KeyboardInterrupt):
        FINDERS[waiting](model, optimizer)
    alarm.join()
    optimizer.zero_grad()
    iterate(model, optimizer, range(3, 5))
    optimizer.synchronize()
    assert equal(result(list(model.parameters()), optimizer), after(range(5)))


# The end


@pytest.mark.parametrize("how", ["close", "drop"])
def test_work_under_way_is_finished_first(how):
    before = host_threads()
    model, optimizer = make_model(THREADED, overlap_forward=True)
    iterate(model, optimizer, range(2))
    slowly(optimizer)
    iterate(model, optimizer, range(2, 3))
    ours = host_threads() - before
    assert len(ours) == 8  # of Python and native ones
    assert any(not promise.is_over for promise in runtime_of(optimizer).places.engines[CPU].transport.lanes._promises)
    if how == "close":
        optimizer.close()
        assert runtime_of(optimizer).places.engines[CPU].transport.host_updates.nbytes == 0
    del optimizer
    gc.collect()
    params = [param.detach() for param in model.parameters()]
    assert equal(params, after(range(3))[: len(params)])
    assert wait_until(lambda: not any(thread.is_alive() for thread in ours))


def test_threads_start_with_the_first_update_and_end_with_the_optimizer():
    before = host_threads()
    with with_threads():
        params = make_params()
        optimizer = offloaded(params, threads=3)
    assert host_threads() == before
    steps(params, optimizer)
    ours = host_threads() - before
    names = (f"offstage-host-{kind}{number}" for kind in ("", "native-") for number in range(3))
    assert {thread.name for thread in ours} == set(names)
    assert all(thread.daemon for thread in ours)
    del optimizer
    gc.collect()
    assert wait_until(lambda: not any(thread.is_alive() for thread in ours))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads: that is the point
def test_workers_are_forked_while_host_threads_are_alive():
    model, optimizer = make_model(THREADED, overlap_forward=True)
    batches = torch.utils.data.DataLoader(
        [torch.full((40,), 0.1 * (step + 1)) for step in range(6) for _ in range(3)],
        batch_size=3,
        num_workers=2,
        multiprocessing_context="fork",
    )
    slowly(optimizer, 0.002)
    iterate(model, optimizer, range(1))
    for number, x in enumerate(batches):  # workers are forked here, with updates under way
        if number > 0:
            model(x).pow(2).mean().backward()
            end_step(optimizer)
    optimizer.synchronize()
    assert equal(result(list(model.parameters()), optimizer), after(range(6)))


BUILD = """
import threading, time, torch
torch.set_num_threads(1)
import offstage
from tests.support.threaded_lanes import with_threads
model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(16)))
with with_threads():
    optimizer = offstage.offload(
        torch.optim.AdamW(model.parameters()), model, min_bytes=0, chunk_bytes="16KiB", update_on="host", threads=4,
        overlap_forward=True,
    )
from offstage.optimizer.optimizer import runtime_of
rule = runtime_of(optimizer).rule
slices_of = rule.slices
ran = []
def late(piece):
    time.sleep(0.05)
    piece()
    ran.append(1)
for step in range(2):
    if step:
        rule.slices = lambda pieces: [lambda piece=piece: late(piece) for piece in slices_of(pieces)]
    model(torch.ones(3, 40)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert not ran
"""
ENDS = {
    "exit": ("", 0),
    "exit with the model alone": ("del optimizer\n", 0),
    "an exception": ("raise KeyboardInterrupt\n", None),
}


def test_the_interpreter_ends_with_work_under_way():
    """It neither hangs nor crashes, nor does it hide how it ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    started = {
        end: subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(BUILD) + code], stderr=subprocess.PIPE, text=True, env=environment
        )
        for end, (code, _) in ENDS.items()
    }
    ends = {end: (process.communicate(timeout=60)[1], process.returncode) for end, process in started.items()}
    for end, (_, expected) in ENDS.items():
        errors, code = ends[end]
        if expected is None:
            assert errors.strip().endswith("KeyboardInterrupt")
            assert code != 0
        else:
            assert (code, errors) == (expected, ""), end
