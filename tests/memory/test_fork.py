# SPDX-License-Identifier: Apache-2.0
"""Forked children: a state dict of the parent is readable, the optimizer refuses, and workers end by themselves."""

import gc
import os
import sys
import threading
from collections.abc import Callable

import pytest
import torch

import offstage
from offstage.memory.arena import Arena
from offstage.optimizer.optimizer import runtime_of
from tests.support.params import equal, make_params, offloaded, resident_after, result, steps
from tests.support.threaded_lanes import wait_until, with_threads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads


def in_child(act: Callable[[], object]) -> str:
    """What `act` returns or raises in a forked child, as text; or how the child ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = str(act())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    ended: list[int] = []

    def over() -> bool:
        if os.waitpid(child, os.WNOHANG)[0]:
            ended.append(child)
        return bool(ended)

    if not wait_until(over):
        os.kill(child, 9)
        os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read() or "the child died or hung"


@pytest.mark.parametrize("split", [False, True])
def test_a_state_dict_can_be_read_in_a_child(split):
    """“Fork-based asynchronous savers”: the tensors are there, and as they were at the fork."""
    params = make_params(torch.bfloat16 if split else torch.float32)
    optimizer = offloaded(params, master_weights="split" if split else "auto")
    steps(params, optimizer, range(2))
    state = optimizer.state_dict()["state"]
    total = sum(float(value.double().sum()) for one in state.values() for value in one.values())
    for _ in range(2):  # the memory stays with the parent, and the next child gets it too
        found = in_child(lambda: sum(float(v.double().sum()) for one in state.values() for v in one.values()))
        assert float(found) == total
    steps(params, optimizer, range(2, 3))
    expected = resident_after(range(3), params[0].dtype, master_weights="split" if split else "auto")
    assert equal(result(params, optimizer), expected)


def test_only_what_was_handed_out_is_inherited():
    taken, other = (Arena(100_000, torch.float32, torch.device("cpu"), pin=True) for _ in range(2))
    tensor, addresses = taken.tensor(0, 10).fill_(3), (taken.flat.data_ptr(), other.flat.data_ptr())

    def mapped() -> list[bool]:
        with open("/proc/self/maps") as maps:
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        return [any(low <= address < high for low, high in ranges) for address in addresses]

    assert in_child(mapped) == "[True, False]"
    del tensor
    assert in_child(mapped) == "[False, False]"
    assert mapped() == [True, True]


USES: dict[str, Callable[[torch.nn.Parameter, offstage.OffloadedOptimizer], object]] = {
    "state_dict": lambda param, optimizer: optimizer.state_dict(),
    "state": lambda param, optimizer: optimizer.state[param],
    "step": lambda param, optimizer: optimizer.step(),
    "synchronize": lambda param, optimizer: optimizer.synchronize(),
    "close": lambda param, optimizer: optimizer.close(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_optimizer_says_that_it_is_not_here(use, where):
    """With threads at work in the parent at the fork: the child has none that it could wait for."""
    gate, model = threading.Event(), torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    config = {"min_bytes": 0, "update_on": where, "threads": 2 if where == "host" else None, "overlap_forward": True}
    with with_threads():
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, **config)
    rule = runtime_of(optimizer).rule
    slices_of = rule.slices
    rule.slices = lambda pieces: [lambda: gate.wait(20), *slices_of(pieces)]
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    param = next(model.parameters())
    param.grad = torch.ones_like(param)
    found = in_child(lambda: USES[use](param, optimizer))
    gate.set()
    assert found.startswith("OffstageError: Host memory of offstage belongs to process"), found
    assert "state_dict() before the fork" in found


def test_a_child_may_have_an_optimizer_of_its_own():
    """Also one that has dropped its parent's, and with it the parent's threads and memory."""
    with with_threads():
        holder = [params := make_params(), offloaded(params, threads=2)]
    steps(*holder, range(1))
    params = []

    def train() -> bool:
        holder.clear()
        gc.collect()
        with with_threads():
            own = make_params()
            optimizer = offloaded(own, threads=2)
        steps(own, optimizer, range(2))
        return equal(result(own, optimizer), expected)

    expected = resident_after(range(2))
    assert in_child(train) == "True"


def test_a_child_that_ends_as_a_program_does_joins_no_thread_of_its_parent():
    """`sys.exit` runs finalizers, in a process that has none of the threads."""
    with with_threads():
        params = make_params()
        optimizer = offloaded(params, threads=2)
    steps(params, optimizer, range(1))
    child = os.fork()
    if child == 0:
        import atexit

        try:
            atexit._run_exitfuncs()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    assert wait_until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))
