# SPDX-License-Identifier: Apache-2.0
"""Engines that wrap the optimizer in a subclass of its own class, and methods taken from it before `offload()`."""

import copy
import math

import pytest
import torch
from torch import nn

import offstage
from offstage import checkpoint
from tests.support.contract import SMALL, adamw, assert_same, loss_of, make_model, train, unchanged

IN_BACKWARD = {**SMALL, "overlap_forward": True, "update_in_backward": True}


# Wrappers that are of the class they wrap, as Lightning and Fabric build them


class Delegating:
    """As Lightning 2 and Fabric: attributes that the wrapper lacks are those of the optimizer within."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure if closure is not None else lambda: None)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copying:
    """As Lightning 1: the wrapper's attributes are those that the optimizer within had when it was wrapped."""

    def __init__(self, optimizer):
        self.__dict__ = {name: value for name, value in vars(optimizer).items() if name not in ("step", "__del__")}
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    def step(self, closure=None):
        return self._optimizer.step(closure)


WRAPPERS = [Delegating, Copying]
wrapped_by = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda one: one.__name__)


def wrapped_twin(wrapper, **config):
    """The same model twice with the same optimizer: used directly, and through a wrapper; and what is within that."""
    model = make_model()
    other = copy.deepcopy(model)
    direct = offstage.offload(adamw(model.parameters()), model, **config)
    inner = offstage.offload(adamw(other.parameters()), other, **config)
    outer = wrapper(inner)
    assert isinstance(outer, offstage.OffloadedOptimizer)
    return (model, direct), (other, outer), inner


def clipped(model, optimizer, number, *, scale=1.0):
    optimizer.zero_grad()
    (scale * loss_of(model, number)).backward()
    norm = optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    return norm


@wrapped_by
@pytest.mark.parametrize("config", [SMALL, IN_BACKWARD], ids=["in step", "in backward"])
def test_a_norm_that_is_not_finite_skips_the_step(wrapper, config):
    direct, (model, outer), inner = wrapped_twin(wrapper, **config)
    for number, scale in enumerate((1.0, 1.0, math.inf, 1.0, math.nan, 1.0)):
        norms = [clipped(*one, number, scale=scale) for one in (direct, (model, outer))]
        assert norms[0].isfinite() == norms[1].isfinite() == math.isfinite(scale)
    assert all(param.isfinite().all() for param in model.parameters())
    assert_same(*direct, model, outer)
    for one in (outer, inner, direct[1]):
        assert (one.receipt().steps, one.receipt().skipped_steps) == (4, 2)


@wrapped_by
def test_clipping_updates_in_backward_speculatively(wrapper):
    direct, through, inner = wrapped_twin(wrapper, **IN_BACKWARD)
    for number in range(6):
        for model, optimizer in (direct, through):
            clipped(model, optimizer, number, scale=1e-3)  # within bounds: updates in backward stay
    assert_same(*direct, *through)
    assert inner.receipt().speculation_hits == direct[1].receipt().speculation_hits > 0


@wrapped_by
def test_replan_moves_the_state_of_the_optimizer_within(wrapper):
    direct, (model, outer), inner = wrapped_twin(wrapper, **SMALL)
    for changes in ({"fraction": 0.5}, {"update_on": "host"}, {"fraction": 1.0, "update_on": "device"}):
        train(*direct, 2)
        train(model, outer, 2)
        assert direct[1].replan(**changes) == outer.replan(**changes) == inner.plan
        assert outer.config == inner.config == direct[1].config
    train(*direct, 2)
    train(model, outer, 2)
    assert_same(*direct, model, outer)
    assert_same(*direct, model, inner)


@wrapped_by
def test_state_and_groups_are_those_of_the_optimizer_within(wrapper):
    direct, (model, outer), inner = wrapped_twin(wrapper, **SMALL)
    train(*direct, 3)
    train(model, outer, 3)
    saved = copy.deepcopy(outer.state_dict())
    train(*direct, 2)
    train(model, outer, 2)
    saved["param_groups"][0]["lr"] = 0.003
    for optimizer in (direct[1], outer):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert outer.param_groups is inner.param_groups
    assert outer.defaults is inner.defaults
    assert inner.param_groups[0]["lr"] == 0.003
    assert_same(*direct, model, inner)
    first = next(model.parameters())
    outer.state[first] = {}
    assert first not in inner.state
    outer.state = {}
    assert not inner.state
    direct[1].state = {}
    train(*direct, 2)
    train(model, outer, 2)
    assert_same(*direct, model, inner)


@wrapped_by
def test_groups_hooks_and_close_reach_the_optimizer_within(wrapper):
    direct, (model, outer), inner = wrapped_twin(wrapper, **SMALL)
    added = [nn.Parameter(torch.ones(48)) for _ in range(2)]
    calls = []
    for (_, optimizer), param in zip((direct, (model, outer)), added, strict=True):
        optimizer.add_param_group({"params": [param], "lr": 0.1})
        param.grad = torch.ones(48)
        optimizer.step()
    outer.register_step_pre_hook(lambda optimizer, *_: calls.append(optimizer))
    outer.step()
    direct[1].step()
    assert calls == [inner]
    assert not torch.equal(added[0], torch.ones(48))
    assert torch.equal(*added)
    assert outer.param_groups is inner.param_groups
    outer.close()
    added[1].grad = torch.ones(48)
    for optimizer in (outer, inner):
        with pytest.raises(offstage.OffstageError, match="closed"):
            optimizer.step()


@wrapped_by
def test_schedulers_and_checkpoints_through_a_wrapper(wrapper, tmp_path):
    direct, through, inner = wrapped_twin(wrapper, **SMALL)
    for model, optimizer in (direct, through):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for number in range(3):
            train(model, optimizer, range(number, number + 1))
            scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.01 / 8
    checkpoint.save(tmp_path / "c", *through)
    fresh = wrapped_twin(wrapper, **SMALL)[1]
    checkpoint.load(tmp_path / "c", *fresh)
    assert_same(*direct, *fresh)


# The optimizer that was given to offload()


def scaled_step(optimizer):
    """As accelerate patches an optimizer: its own function in the instance, around the method it found there."""
    method = optimizer.step

    def step(*args, **kwargs):
        return method(*args, **kwargs)

    optimizer.step = step
    return step


CAPTURED = {
    "bound method": lambda optimizer: optimizer.step,
    "patched": scaled_step,
    "of the class": lambda optimizer: lambda: type(optimizer).step(optimizer),
    "a scheduler's": lambda optimizer: (torch.optim.lr_scheduler.ConstantLR(optimizer), optimizer.step)[1],
}


@pytest.mark.parametrize("captured", CAPTURED)
def test_a_step_taken_before_raises(captured):
    model = make_model()
    given = adamw(model.parameters())
    step = CAPTURED[captured](given)
    optimizer = offstage.offload(given, model, **SMALL)
    loss_of(model, 0).backward()
    with (
        unchanged(model, optimizer),
        pytest.raises(offstage.OffstageError, match=r"Call step\(\) on the optimizer that"),
    ):
        step()
    assert not given.state
    optimizer.step()
    assert len(optimizer.state) == 4


def test_state_dicts_of_a_consumed_optimizer_raise():
    """It has no state any more: saving it would lose everything, loading it would change nothing."""
    model = make_model()
    given = adamw(model.parameters())
    train(model, given, 2)
    saved, save, load = copy.deepcopy(given.state_dict()), given.state_dict, given.load_state_dict
    optimizer = offstage.offload(given, model, **SMALL)
    for use in (save, given.state_dict, lambda: load(saved), lambda: given.load_state_dict(saved)):
        with unchanged(model, optimizer), pytest.raises(offstage.OffstageError, match=r"state_dict\(\)"):
            use()
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()


def test_hooks_groups_and_gradients_of_a_consumed_optimizer_are_ours():
    """Hooks registered before run with the new optimizer; a group added to the old one is trained by the new one."""
    model, more = make_model(), nn.Parameter(torch.ones(48))
    given = adamw(model.parameters())
    calls = []
    handle = given.register_step_pre_hook(lambda *_: calls.append("step"))
    given.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    given.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer = offstage.offload(given, model, **SMALL)
    given.add_param_group({"params": [more]})
    more.grad = torch.ones(48)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["step", "save", "load"]
    handle.remove()
    optimizer.step()
    assert len(calls) == 3
    assert more in optimizer.state
    given.zero_grad()
    assert more.grad is None
