# SPDX-License-Identifier: Apache-2.0
"""The first iteration of `update_in_backward` learns which gradients are final, and is no larger than the others."""

import logging

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import offstage
from offstage.errors import OffstageError, StepLostError
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap import leaving
from offstage.optimizer.overlap.left_gradient import LeftGradient
from tests.support.contract import SMALL, adamw, assert_same
from tests.support.lives import end_step, iterate, loss_of, stack
from tests.support.overlap import train
from tests.support.runs import differences
from tests.support.training import lazily

BACKWARD = {**SMALL, "update_in_backward": True}
LAYERS = 8


@pytest.fixture
def nowhere(monkeypatch):
    """Neither memory has room for the gradients."""
    monkeypatch.setattr(leaving.LeavingGradients, "where_they_wait", lambda self: leaving.Wait.NOWHERE)


@pytest.fixture
def small_ones_leave(monkeypatch):
    """Gradients of resident state leave, however small."""
    monkeypatch.setattr(leaving, "LEAST_LEAVING", 0)


SETTINGS = pytest.mark.parametrize("settings", [{}, {"fraction": 0.5}, {"overlap_forward": True}], ids=str)


def most_gradients_at_once(settings):
    """On the device, in the first iteration."""
    model = stack()
    seen, most = [], []

    def look(param):
        seen.append(StorageWeakRef(param.grad.untyped_storage()))
        most.append(sum(not storage.expired() for storage in seen))

    for layer in model:  # before the optimizer's own hooks
        layer.weight.register_post_accumulate_grad_hook(look)
    optimizer = offstage.offload(adamw(model.parameters()), model, **{**BACKWARD, **settings})
    iterate(model, optimizer, range(1))
    return max(most)


@SETTINGS
def test_few_gradients_are_on_the_device_at_once(settings, small_ones_leave):
    assert most_gradients_at_once(settings) <= LAYERS / 2


@SETTINGS
def test_few_of_them_are_there_where_they_are_used_as_they_come(settings, nowhere):
    """Chunks that two layers share are updated with the later gradient: the earlier one goes then, not with step()."""
    assert most_gradients_at_once(settings) <= LAYERS / 2


@pytest.mark.parametrize("settings", [{}, {"fraction": 0.5}], ids=str)
def test_they_wait_on_the_host_until_their_memory_is_not_needed_any_more(settings, small_ones_leave):
    model = stack()
    optimizer = offstage.offload(adamw(model.parameters()), model, **{**BACKWARD, **settings})
    loss_of(model, 0).backward()
    assert all(isinstance(param.grad, LeftGradient) for param in model.parameters())
    assert optimizer.receipt().host_gradient_bytes == sum(param.nbytes for param in model.parameters())
    end_step(optimizer)
    iterate(model, optimizer, range(1, 3))
    assert optimizer.receipt().host_gradient_bytes == 0


@pytest.mark.parametrize("clip", ["none", "sometimes"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_gradients_of_resident_state_leave_too_and_give_the_same_bits(clip, micro_batches, seed, small_ones_leave):
    like = {"clip": clip, "micro_batches": micro_batches, "base": {"fraction": 0.5}}
    with lazily(seed):
        found = train({"update_in_backward": True, "overlap_forward": True}, **like)
    assert not differences(train(None, **like), found)


def test_torchs_functions_can_use_a_gradient_that_left():
    """Clipping, arithmetic and reading give what they give on the device."""
    plain, model = stack(), stack()
    expected = torch.optim.AdamW(plain.parameters())
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, **BACKWARD)
    for one in (plain, model):
        loss_of(one, 0).backward()
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 1e-3) for one in (plain, model)]
    assert torch.equal(*norms)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert isinstance(b.grad, LeftGradient)
        assert torch.equal(a.grad, b.grad)
        assert torch.equal(a.grad * 2 + 1, b.grad * 2 + 1)
        a.grad.mul_(0.5)
        b.grad.mul_(0.5)
        assert torch.equal(a.grad.sum(), b.grad.sum())
    expected.zero_grad(set_to_none=False)
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.count_nonzero() for param in model.parameters())


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("weights", ["device", "host"])
def test_without_room_gradients_are_used_as_they_come(checkpointing, weights, nowhere):
    like = {"checkpointing": checkpointing, "steps": 1}
    found = train({"update_in_backward": True, "weights": weights}, **like)
    assert not differences(train(None, **like), found)
    if checkpointing == "reentrant":  # it brings some of them in parts
        assert found.updated_in_backward <= 2
    else:
        assert found.updated_in_backward > 2


def test_without_room_another_backward_is_an_error(nowhere):
    model = stack()
    optimizer = offstage.offload(adamw(model.parameters()), model, **BACKWARD)  # which must live
    loss_of(model, 0).backward()
    with pytest.raises(OffstageError, match=r"accumulate\(\)"):
        loss_of(model, 1).backward()
    del optimizer


def test_without_room_clipping_is_an_error_before_the_step(nowhere):
    model = stack()
    optimizer = offstage.offload(adamw(model.parameters()), model, **BACKWARD)
    loss_of(model, 0).backward()
    with pytest.raises(OffstageError, match="first time after updates in backward"):
        optimizer.clip_grad_norm_(1.0)


def test_a_host_budget_keeps_them_on_the_device_and_says_so(caplog):
    """Where the device's free memory is not known it is taken to suffice."""
    model, other = stack(), stack()
    budget = offstage.offload(adamw(other.parameters()), other, **SMALL).receipt().host_state_bytes
    optimizer = offstage.offload(adamw(model.parameters()), model, **BACKWARD, host_budget=budget)
    with caplog.at_level(logging.WARNING, logger="offstage"):
        loss_of(model, 0).backward()
    assert not any(isinstance(param.grad, LeftGradient) for param in model.parameters())
    (told,) = (record.getMessage() for record in caplog.records if "first iteration" in record.getMessage())
    assert "keeps all gradients on the device" in told
    assert "host_budget" in told
    end_step(optimizer)


def test_a_plan_that_changes_between_backward_and_step_uses_them(small_ones_leave):
    """State that streamed is resident, and the other way round."""
    lives = []
    for settings in (SMALL, BACKWARD):
        model = stack()
        optimizer = offstage.offload(adamw(model.parameters()), model, **settings)
        loss_of(model, 0).backward()
        optimizer.replan(fraction=0.5)
        end_step(optimizer)
        lives.append((model, optimizer))
    assert runtime_of(lives[1][1]).steps == 1
    assert_same(*lives[0], *lives[1])


def test_a_failing_backward_leaves_weights_as_they_were():
    model = stack()
    optimizer = offstage.offload(adamw(model.parameters()), model, **BACKWARD)
    before = [param.detach().clone() for param in model.parameters()]

    def fail(_):
        raise RuntimeError("stop")

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        loss_of(model, 0).backward()
    handle.remove()
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    try:
        iterate(model, optimizer, range(3))
    except StepLostError:
        pytest.fail("nothing was updated before the failure")
