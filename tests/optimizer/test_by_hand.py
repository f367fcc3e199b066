# SPDX-License-Identifier: Apache-2.0
"""What engines do by hand: gradients that no backward made, state that is assigned, weights read past their modules."""

import copy
import logging

import pytest
import torch
from torch import nn

import offstage
from offstage.engine import named_state
from tests.support.contract import SMALL, TORCH, adamw, assert_same, assert_same_weights, loss_of, make_model, train

# Gradients


def by_hand(model, optimizer, steps):
    for step in range(steps):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1 * (step + 1))
        optimizer.step()


IDLE = {
    "update_in_backward": {"update_in_backward": True},
    "window": {"window": "64KiB"},
    "update_in_backward and window": {"update_in_backward": True, "window": "64KiB"},
}


@pytest.mark.parametrize("names", IDLE)
def test_settings_that_wait_for_backwards_say_that_there_are_none(names, caplog):
    model = make_model()
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, **IDLE[names])
    with caplog.at_level(logging.WARNING, "offstage"):
        by_hand(model, optimizer, 1)  # torch's checkpoint functions do so once
        assert not caplog.records
        by_hand(model, optimizer, 9)
    assert [record.getMessage() for record in caplog.records] == list(optimizer.receipt().fallbacks)
    assert optimizer.receipt().fallbacks[0].startswith(f"{names} did nothing so far")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(offstage.OffloadIneffectiveError, match=f"Leave {names} out"):
        by_hand(model, optimizer, 1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("mode", [{"update_in_backward": True}, {"window": "64KiB"}], ids=str)
def test_one_backward_is_enough(mode):
    model = make_model()
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, **mode)
    by_hand(model, optimizer, 3)
    assert optimizer.receipt().fallbacks
    train(model, optimizer, 1)
    by_hand(model, optimizer, 12)
    assert not any("did nothing" in text for text in optimizer.receipt().fallbacks)


def test_prefetch_is_a_cue():
    """What Megatron's loop does: gradients are assigned, and state is sent for under their reduction."""
    model = make_model()
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, window="all")
    for _ in range(12):
        optimizer.prefetch()
        by_hand(model, optimizer, 1)
    assert not any("did nothing" in text for text in optimizer.receipt().fallbacks)


def test_what_works_without_cues_of_backward_goes_on():
    model = make_model()
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, window="64KiB", overlap_forward=True)
    by_hand(model, optimizer, 12)
    assert any("window did nothing" in text for text in optimizer.receipt().fallbacks)


# State


FORMATS = {
    "our rule": (torch.float32, SMALL),
    "torch's": (torch.float32, TORCH),
    "fp32 masters": (torch.bfloat16, {**SMALL, "master_weights": "fp32"}),
    "split masters": (torch.bfloat16, {**SMALL, "master_weights": "split"}),
    "resident": (torch.float32, {"fraction": 0.0}),
}
in_every_format = pytest.mark.parametrize("kind", FORMATS)


def made(kind):
    dtype, config = FORMATS[kind]
    model = make_model(dtype)
    return model, offstage.offload(adamw(model.parameters()), model, **config)


@in_every_format
def test_zeros_assigned_to_a_fresh_optimizer_change_nothing(kind):
    """As Megatron creates state: the moments, one by one, and no step."""
    model, optimizer = made(kind)
    expected_model, expected = made(kind)
    for param in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[param][name] = torch.zeros_like(param, dtype=torch.float32)
    assert len(optimizer.state) == 4
    assert all(float(values["step"]) == 0 for values in optimizer.state.values())
    train(model, optimizer, 3)
    train(expected_model, expected, 3)
    assert_same(model, optimizer, expected_model, expected)


@in_every_format
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step", "master_weight"])
def test_a_value_that_is_assigned_is_kept_and_the_others_stay(kind, name):
    model, optimizer = made(kind)
    train(model, optimizer, 2)
    param = model[0].weight
    if name not in optimizer.state[param]:
        assert name == "master_weight"
        return
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    given = before[name] * 2 + 1
    if name == "master_weight":  # one of the same weight: otherwise the weight wins
        given = (before[name].view(torch.int32) ^ 1).view(torch.float32)
    view = optimizer.state[param]
    view[name] = given
    for values in (view, optimizer.state[param]):
        assert torch.equal(values[name], given)
        assert all(torch.equal(values[key], before[key]) for key in before.keys() - {name})


@pytest.mark.parametrize("mode", [{}, {"overlap_forward": True}], ids=["in step", "in forward"])
def test_a_view_from_before_the_first_step(mode):
    """The step is under way when a value is assigned: what it makes of the others stays."""
    model = make_model()
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, **mode)
    view = optimizer.state[model[0].weight]
    train(model, optimizer, 1)
    view["exp_avg"] = torch.ones_like(model[0].weight)
    assert float(view["step"]) == 1
    assert view["exp_avg_sq"].any()


def test_one_value_is_one_copy(monkeypatch):
    """Engines move every tensor of the state through such assignments."""
    model, optimizer = made("our rule")
    train(model, optimizer, 1)
    loads, copies = [], []
    load, copy_into = named_state.load, named_state.load_one
    monkeypatch.setattr(named_state, "load", lambda *given: loads.append(given) or load(*given))
    monkeypatch.setattr(named_state, "load_one", lambda *given: copies.append(given[1]) or copy_into(*given))
    for param in model.parameters():
        state = optimizer.state[param]
        for name, value in list(state.items()):
            state[name] = value.clone()
    assert not loads
    assert copies == ["step", "exp_avg", "exp_avg_sq"] * 4


@pytest.mark.parametrize(("name", "value"), [("exp_avg", torch.zeros(3)), ("step", -1), ("exp_avgs", torch.zeros(1))])
@pytest.mark.parametrize("steps", [0, 1])
def test_values_that_cannot_be_kept_are_refused(name, value, steps):
    model, optimizer = made("our rule")
    train(model, optimizer, steps)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(offstage.ConfigError, match=name):
        optimizer.state[model[0].weight][name] = value
    after = optimizer.state_dict()
    assert after["state"].keys() == before["state"].keys()
    assert all(
        torch.equal(after["state"][i][key], value) for i, one in before["state"].items() for key, value in one.items()
    )


# Weights that are read past their modules


class Functional(nn.Module):
    """Its training forward reads a layer's weight, its evaluation calls the layer: as a policy that also generates."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(48, 64), nn.Linear(64, 48)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if torch.is_grad_enabled():
            return nn.functional.linear(hidden, self.head.weight, self.head.bias)
        return self.head(hidden)


@pytest.mark.parametrize("mode", [{}, {"update_in_backward": True}], ids=["in forward", "in backward"])
def test_a_forward_without_gradients_is_not_the_one_that_trains(mode):
    """It waits for its weights; whether the next update may end in a forward is not known from it."""
    model, expected_model = Functional(), Functional()
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, overlap_forward=True, **mode)
    expected = offstage.offload(adamw(expected_model.parameters()), expected_model, **SMALL)
    for one, opt in ((model, optimizer), (expected_model, expected)):
        for number in range(4):
            with torch.no_grad():
                one(torch.ones(2, 48))
            opt.zero_grad()
            loss_of(one, number).backward()
            opt.step()
        opt.synchronize()
    assert_same_weights(model, expected_model)
    assert any("step() waits for 2 of 4 parameters" in text for text in optimizer.receipt().fallbacks)
