# SPDX-License-Identifier: Apache-2.0
"""A failure leaves weights and state as before the step or as after it, or says that the step is lost."""

import copy
import signal

import pytest
import torch
from torch import nn

import offstage
from offstage.engine.pipeline import Pipeline
from offstage.errors import StepLostError
from offstage.optimizer.optimizer import runtime_of
from tests.support.lives import fail_at
from tests.support.params import copy_weights, equal
from tests.support.params import result as snapshot
from tests.support.training import lazily


def make(**config):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(900)) for _ in range(8)]
    optimizer = offstage.offload(torch.optim.AdamW(params, lr=0.1), min_bytes=0, chunk_bytes="16KiB", **config)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, optimizer


def test_no_memory_for_slots_changes_nothing(monkeypatch):
    params, optimizer = make()
    before = snapshot(params, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "prepare", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
        with pytest.raises(torch.OutOfMemoryError) as error:
            optimizer.step()
    assert "3 slots of 16.0 KiB did not fit" in error.value.__notes__[0]
    assert "Nothing was changed" in error.value.__notes__[0]
    assert equal(snapshot(params, optimizer), before)
    optimizer.step()  # and it goes on


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_failure_half_way_says_the_step_is_lost(fraction):
    params, optimizer = make(fraction=fraction)
    saved_weights = [p.detach().clone() for p in params]
    saved = copy.deepcopy(optimizer.state_dict())
    undo = fail_at(5, runtime_of(optimizer).rule, "_update", ZeroDivisionError("in the middle"))
    with pytest.raises(StepLostError, match=r"Step 2 failed .*in the middle.*load_state_dict"):
        optimizer.step()
    undo()
    with pytest.raises(StepLostError):  # and does not go on as if nothing had happened
        optimizer.step()
    copy_weights(params, saved_weights)
    optimizer.load_state_dict(saved)
    optimizer.step()
    reference_params, reference = make(fraction=fraction)
    reference.step()
    assert equal(snapshot(params, optimizer), snapshot(reference_params, reference))


@pytest.mark.parametrize("lazy", [False, True])
def test_ctrl_c_in_a_step_comes_after_it(lazy, monkeypatch):
    reference_params, reference = make()
    reference.step()
    with lazily(3 if lazy else None):
        params, optimizer = make()
    update, calls = runtime_of(optimizer).rule._update, []

    def interrupted(share):
        calls.append(share)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        update(share)

    monkeypatch.setattr(runtime_of(optimizer).rule, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert len(calls) > 3  # the rest of the step ran
    assert equal(snapshot(params, optimizer), snapshot(reference_params, reference))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_counters_survive_larger_slots():
    _, optimizer = make()
    moved = optimizer.receipt().total_bytes_fetched
    assert moved > 0
    more = nn.Parameter(torch.randn(5000))
    optimizer.add_param_group({"params": [more]})
    assert optimizer.receipt().total_bytes_fetched == moved


def test_a_small_group_may_be_added():
    """Less state than `min_bytes`, so it stays resident; that is no idle plan, since other state is streamed."""
    optimizer = offstage.offload(torch.optim.AdamW([nn.Parameter(torch.randn(20_000))]))
    small = nn.Parameter(torch.randn(3))
    optimizer.add_param_group({"params": [small]})
    small.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[small]["step"] == 1


@pytest.mark.parametrize("lazy", [False, True])
def test_lanes_may_come_later(lazy):
    """Everything fits in the budget at first; a group added after some steps does not, and is streamed."""

    def run(budget):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(2000).bfloat16())]
        optimizer = offstage.offload(torch.optim.AdamW(params), min_bytes=0, chunk_bytes="16KiB", slots=2, **budget)
        for step in range(5):
            if step == 2:
                params.append(nn.Parameter(torch.randn(20_000).bfloat16()))
                optimizer.add_param_group({"params": [params[-1]]})
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        return optimizer, snapshot(params, optimizer)

    _, expected = run({"fraction": 0.0})
    with lazily(2 if lazy else None):
        optimizer, got = run({"device_budget": 120_000})
    assert [placement.value for placement in optimizer.plan.placements] == ["resident", "streamed"]
    assert equal(got, expected)
