# SPDX-License-Identifier: Apache-2.0
"""`torch.set_flush_denormal`, which is a setting of one thread: the same bits for every plan."""

import functools

import pytest
import torch
from torch import nn

import offstage
from offstage.rules.denormals import flushes_denormals, run_flushing
from tests.support.params import ON_HOST, WHERE
from tests.support.training import THREADED, lazily, same_bits

NEVER, FROM_THE_START, LATER, ENDED = (), (0, 1, 2, 3), (2, 3), (0, 1)
"""In which steps it is on. Threads of the host start with the first step, and begin as the thread that starts them."""


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.set_flush_denormal(False)


def tensors(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(900, generator=generator) * scale for _ in range(4)]


@functools.cache
def trained(rule, place, on, lanes=None):
    """Weights and second moments, denormal because the gradients are about 1e-20."""
    params = [nn.Parameter(one) for one in tensors(0, 1e-3)]
    gradients = [tensors(1 + step, 1e-20) for step in range(4)]
    with lazily(lanes):
        optimizer = torch.optim.AdamW(params, lr=0.1)
        if place is not None:
            config = {**ON_HOST, "threads": 2 if rule == "auto" else None, **WHERE[place]}
            optimizer = offstage.offload(optimizer, rule=rule, **config)
        for step, given in enumerate(gradients):
            torch.set_flush_denormal(step in on)
            for param, gradient in zip(params, given, strict=True):
                param.grad = gradient
            optimizer.step()
        torch.set_flush_denormal(False)
        return [*(p.detach() for p in params), *(optimizer.state[p]["exp_avg_sq"] for p in params)]


def same(left, right):
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("lanes", [None, 0, THREADED], ids=str)
@pytest.mark.parametrize("place", WHERE)
@pytest.mark.parametrize("on", [FROM_THE_START, LATER, ENDED], ids=["from the start", "later", "ended"])
def test_the_same_bits_for_every_plan(on, place, lanes):
    """Adam of offstage keeps denormals, as on a GPU. The user's class does what it does in the caller's thread."""
    assert same(trained("auto", place, on, lanes), trained("auto", "resident", NEVER))
    assert same(trained("torch", place, on, lanes), trained("torch", None, on))


def test_that_it_matters():
    assert not same(trained("torch", None, FROM_THE_START), trained("torch", None, NEVER))
    assert any(0 < float(one.max()) < torch.finfo(torch.float32).tiny for one in trained("auto", "resident", NEVER)[4:])


@pytest.mark.parametrize("outside", [True, False])
def test_work_either_way_leaves_the_thread_as_it_was(outside):
    torch.set_flush_denormal(outside)

    def fail():
        raise KeyError

    assert [run_flushing(flush, flushes_denormals) for flush in (True, False)] == [True, False]
    with pytest.raises(KeyError):
        run_flushing(not outside, fail)
    assert flushes_denormals() == outside
