# SPDX-License-Identifier: Apache-2.0
"""Parameters that are frozen, for a while or for ever, and parameters that others took the place of."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import offstage
from offstage import checkpoint
from offstage.config import Placement
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import (
    SMALL,
    TORCH,
    Blocks,
    adamw,
    assert_same,
    assert_same_optimizer,
    assert_same_weights,
    loss_of,
    make_model,
    train,
    trained,
)

MODES = {
    "in step": {},
    "half": {"fraction": 0.5},
    "by the CPU": {"update_on": "host"},
    "window": {"window": "all"},
    "in forward": {"overlap_forward": True},
    "in backward": {"update_in_backward": True, "overlap_forward": True},
    "weights on the host": {"weights": "host"},
}
in_every_mode = pytest.mark.parametrize("mode", MODES)


def freeze(model, number, *, trains=False):
    model.layers[number].requires_grad_(trains)


def twins(mode, **more):
    """The same model with plain AdamW and with the same class offloaded, its first two layers frozen."""
    plain_model = Blocks()
    for number in (0, 1):
        freeze(plain_model, number)
    model = copy.deepcopy(plain_model)
    config = {**TORCH, **MODES[mode], **more}
    return (
        plain_model,
        adamw(plain_model.parameters()),
        model,
        offstage.offload(adamw(model.parameters()), model, **config),
    )


def iterate(model, optimizer, steps, *, clip=None, between=None):
    for number in steps:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        if clip is not None and isinstance(optimizer, offstage.OffloadedOptimizer):
            optimizer.clip_grad_norm_(clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        if between is not None:
            between(model)
        optimizer.step()


def test_frozen_parameters_take_no_memory():
    """As in plain torch, which creates state with the first gradient."""
    _, _, model, optimizer = twins("in step")
    trained_bytes = sum(param.nbytes for param in model.layers[2].parameters())
    only = offstage.offload(adamw(Blocks().layers[2].parameters()), **TORCH).receipt().host_state_bytes
    assert optimizer.plan.bytes_of(Placement.STREAMED) == 2 * trained_bytes
    assert optimizer.receipt().host_state_bytes == only
    iterate(model, optimizer, range(2))
    assert len(optimizer.state) == 2
    assert optimizer.receipt().host_state_bytes == only


@in_every_mode
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_thawed_on_the_way(mode, seed, clip):
    """And frozen again: state stays, as it does in plain torch."""
    lanes = (lambda device: LazyLanes(device, seed=seed)) if seed is not None else None
    with use_lanes(lanes):
        plain_model, plain, model, optimizer = twins(mode)
    for one in ((plain_model, plain), (model, optimizer)):
        iterate(*one, range(3), clip=clip)
        freeze(one[0], 1, trains=True)
        iterate(*one, range(3, 6), clip=clip)
        freeze(one[0], 2)
        freeze(one[0], 0, trains=True)
        iterate(*one, range(6, 9), clip=clip)
    optimizer.synchronize()
    assert_same(model, optimizer, plain_model, plain)


@in_every_mode
def test_thawed_between_backward_and_step(mode):
    """Its first gradient comes in the next iteration; what backward has updated stays."""
    plain_model, plain, model, optimizer = twins(mode)
    for one in ((plain_model, plain), (model, optimizer)):
        iterate(*one, range(3))
        iterate(*one, range(3, 4), between=lambda model: freeze(model, 1, trains=True))
        iterate(*one, range(4, 7))
    optimizer.synchronize()
    assert_same(model, optimizer, plain_model, plain)


def test_a_gradient_assigned_to_a_frozen_parameter():
    plain_model, plain, model, optimizer = twins("in step")
    for one, opt in ((plain_model, plain), (model, optimizer)):
        weight = one.layers[0].weight
        for step in range(3):
            weight.grad = torch.full_like(weight, 0.1 * (step + 1))
            opt.step()
    assert_same(model, optimizer, plain_model, plain)


def test_state_of_a_frozen_parameter_is_loaded():
    """One that was trained before it was frozen."""
    trained_model = Blocks()
    source = offstage.offload(adamw(trained_model.parameters()), trained_model, **SMALL)
    iterate(trained_model, source, range(3))
    _, _, model, optimizer = twins("in step", rule="auto")
    optimizer.load_state_dict(source.state_dict())
    model.load_state_dict(trained_model.state_dict())
    assert_same(model, optimizer, trained_model, source)
    optimizer.state = {}
    weight, given = model.layers[0].weight, dict(source.state[trained_model.layers[0].weight])
    optimizer.state[weight] = given
    assert len(optimizer.state) == 1
    assert torch.equal(optimizer.state[weight]["exp_avg"], given["exp_avg"])


def test_state_of_a_frozen_parameter_in_a_folder(tmp_path):
    trained_model = Blocks()
    source = offstage.offload(adamw(trained_model.parameters()), trained_model, **SMALL)
    iterate(trained_model, source, range(3))
    checkpoint.save(tmp_path / "folder", trained_model, source)
    _, _, model, optimizer = twins("in step", rule="auto")
    checkpoint.load(tmp_path / "folder", model, optimizer)
    assert_same(model, optimizer, trained_model, source)
    checkpoint.save(tmp_path / "again", model, optimizer)
    other = Blocks()
    fresh = offstage.offload(adamw(other.parameters()), other, **SMALL)
    checkpoint.load(tmp_path / "again", other, fresh)
    assert_same_optimizer(fresh, source)


def test_frozen_parameters_in_a_folder(tmp_path):
    """They have no state there, and get none."""
    _, _, model, optimizer = twins("in step", rule="auto")
    iterate(model, optimizer, range(2))
    checkpoint.save(tmp_path / "folder", model, optimizer)
    other = Blocks()
    fresh = offstage.offload(adamw(other.parameters()), other, **SMALL)
    iterate(other, fresh, range(1))
    checkpoint.load(tmp_path / "folder", other, fresh)
    assert_same_optimizer(fresh, optimizer)


def test_a_frozen_parameter_may_be_of_any_kind():
    """One that could not be trained: split masters need bf16."""
    model = nn.Sequential(nn.Linear(64, 64).to(torch.float16), nn.Linear(64, 64).to(torch.bfloat16))
    model[0].requires_grad_(False)
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, master_weights="split")
    model[0].requires_grad_(True)
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    with pytest.raises(offstage.ConfigError, match=r"split.*bfloat16"):
        optimizer.step()


# Nothing to train


def test_an_optimizer_that_trains_nothing_says_so(caplog):
    model = make_model().requires_grad_(False)
    with caplog.at_level(logging.WARNING, "offstage"):
        optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL)
    assert "trains nothing" in caplog.text
    assert any("trains nothing" in text for text in optimizer.receipt().fallbacks)
    extra = nn.Parameter(torch.ones(64, 64))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(64, 64)
    optimizer.step()
    assert not any("trains nothing" in text for text in optimizer.receipt().fallbacks)


def test_frozen_behind_the_optimizer(caplog):
    """As PEFT does to a model whose optimizer was made before."""
    model, optimizer = trained(2)
    model.requires_grad_(False)
    optimizer.zero_grad()
    with caplog.at_level(logging.WARNING, "offstage"):
        optimizer.step()
        optimizer.step()
    assert caplog.text.count("step() changes nothing") == 1
    model.requires_grad_(True)
    train(model, optimizer, 1)
    assert not any("trains nothing" in text for text in optimizer.receipt().fallbacks)


# Parameters whose place others take


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "weights on the host"])  # they are the modules' own
def test_replaced_before_the_first_step(mode):
    """As accelerate does with a model that it shards: the old parameters leave nothing behind."""
    model, expected_model = Blocks(), Blocks()
    expected = offstage.offload(adamw(expected_model.parameters()), expected_model, **SMALL, **MODES[mode])
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, **MODES[mode])
    host_bytes = optimizer.receipt().host_state_bytes
    new = {}
    for layer in model.layers:
        for name, param in list(layer.named_parameters()):
            new[param] = nn.Parameter(param.detach().clone())
            setattr(layer, name, new[param])
    group = optimizer.param_groups[0]
    group["params"] = [new[param] for param in group["params"]]
    for one in ((model, optimizer), (expected_model, expected)):
        iterate(*one, range(4))
        one[1].synchronize()
    assert_same(model, optimizer, expected_model, expected)
    assert optimizer.receipt().host_state_bytes == host_bytes
    states = runtime_of(optimizer).places.states
    assert set(states) == set(model.parameters())
    assert [state.name for state in states.values()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("mode", ["in step", "in forward"])
@pytest.mark.parametrize("steps", [1, 2])
def test_parameters_with_state_keep_it_when_they_leave_for_a_while(mode, steps):
    """Nothing is lost that a step has made, or is still making."""
    with use_lanes(lambda device: LazyLanes(device, seed=0)):
        model, optimizer = trained(steps, **SMALL, **MODES[mode])
    expected_model, expected = trained(steps)
    group = optimizer.param_groups[0]
    params = list(group["params"])
    optimizer.zero_grad()
    group["params"] = [nn.Parameter(torch.ones(8)), *params[:2]]
    optimizer.step()  # without gradients
    group["params"] = params
    for one in ((model, optimizer), (expected_model, expected)):
        train(*one, range(2, 4))
    optimizer.synchronize()
    assert_same_weights(model, expected_model)


def test_replaced_parameters_are_let_go():
    """A model that was sharded must not be held whole beside its shards."""
    for settings in (SMALL, {**SMALL, **MODES["in forward"]}, {**SMALL, **MODES["in backward"]}):
        model = Blocks()
        optimizer = offstage.offload(adamw(model.parameters()), model, **settings)
        old = [weakref.ref(param) for param in model.parameters()]
        for layer in model.layers:
            for name, param in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(param.detach().clone()))
        optimizer.param_groups[0]["params"] = list(model.parameters())
        del param
        iterate(model, optimizer, range(2))
        gc.collect()
        assert [one() for one in old] == [None] * len(old)


def test_parameters_without_names_get_different_ones():
    optimizer = offstage.offload(adamw([nn.Parameter(torch.ones(64, 64)) for _ in range(3)]), **SMALL)
    group = optimizer.param_groups[0]
    group["params"] = [*group["params"][1:], nn.Parameter(torch.ones(64, 64))]
    names = [size.name for size in optimizer.plan.sizes]
    assert len(set(names)) == 3


# Trained one after the other


def head_first():
    """A small head on top of large layers that are frozen at first."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    model[:2].requires_grad_(False)
    return model


def test_a_small_head_first():
    """What is trained now stays resident, and that is said; later layers leave."""
    model = head_first()
    optimizer = offstage.offload(adamw(model.parameters()), model, min_bytes="16KiB")
    assert any("nothing leaves the device" in text for text in optimizer.receipt().fallbacks)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(True)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert optimizer.receipt().bytes_fetched > 0
    assert not optimizer.receipt().fallbacks
    with pytest.raises(offstage.OffloadIneffectiveError, match="min_bytes"):  # nothing else can ever leave
        offstage.offload(adamw(head_first()[2].parameters()), min_bytes="16KiB")


def test_a_small_head_on_weights_that_leave():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(64, 64) for _ in range(3)]), "head": nn.Linear(64, 4)})
    model["layers"].requires_grad_(False)
    optimizer = offstage.offload(adamw(model.parameters()), model, weights="host", min_bytes="4KiB")
    assert optimizer.receipt().host_weight_bytes > 0


def test_a_budget_that_earlier_layers_have_filled_says_what_helps():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    model[:2].requires_grad_(False)
    optimizer = offstage.offload(adamw(model.parameters()), model, device_budget="1200KiB", chunk_bytes="64KiB")

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()

    step()
    model[1].requires_grad_(True)
    step()
    model[0].requires_grad_(True)
    with pytest.raises(offstage.ConfigError, match=r"Or call replan\(\) with the same settings"):
        step()
    optimizer.replan(device_budget="1200KiB")
    step()


@pytest.mark.parametrize("clip", [None, 0.05, 1e4])
def test_a_gradient_of_a_frozen_parameter_after_updates_in_backward(clip):
    """It is updated in step(); what backward has updated stays."""
    plain_model, plain, model, optimizer = twins("in backward")

    def assign(model):
        model.layers[0].weight.grad = torch.full_like(model.layers[0].weight, 0.1)

    for one in ((plain_model, plain), (model, optimizer)):
        iterate(*one, range(4), clip=clip)
        iterate(*one, range(4, 6), between=assign)
    optimizer.synchronize()
    assert_same(model, optimizer, plain_model, plain)


def test_state_dict_asleep_after_a_thaw():
    _, _, model, optimizer = twins("in step")
    iterate(model, optimizer, range(2))
    with offstage.sleep(model, optimizer):
        freeze(model, 1, trains=True)
        assert len(optimizer.state_dict()["state"]) == 2


def test_state_of_whole_parameters_in_a_folder(tmp_path):
    """Adafactor's has shapes of its own."""
    model, other = Blocks(), Blocks()
    source = offstage.offload(torch.optim.Adafactor(model.parameters()), model, **SMALL)
    iterate(model, source, range(2))
    checkpoint.save(tmp_path / "folder", model, source)
    freeze(other, 0)
    target = offstage.offload(torch.optim.Adafactor(other.parameters()), other, **SMALL)
    checkpoint.load(tmp_path / "folder", other, target)
    assert_same(other, target, model, source)


def test_a_refused_assignment_makes_no_room():
    _, _, model, optimizer = twins("in step")
    before = optimizer.receipt().host_state_bytes
    with pytest.raises(offstage.ConfigError, match=r"keeps \['exp_avg', 'exp_avg_sq', 'step'\]"):
        optimizer.state[model.layers[0].weight]["nonsense"] = 1
    assert optimizer.receipt().host_state_bytes == before
