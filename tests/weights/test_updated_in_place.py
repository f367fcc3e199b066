# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights live on the host and which the CPU updates there: what other code does, and failures."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from offstage.config import Placement
from offstage.errors import StepLostError
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.leaving import LeavingGradients, Wait
from offstage.rules.adamw import AdamRule
from tests.support.contract import SMALL
from tests.support.lives import assert_same_lives, end_step, iterate, loss_of
from tests.support.training import THREADED, lazily
from tests.weights.test_host_weights import BACKWARD, BOTH, FORWARD, HOST, Net, net, offloaded

pytestmark = pytest.mark.usefixtures("some_layers_are_late")

HALF, ALL = {"host_fraction": 0.5}, {"update_on": "host"}
SHARES = pytest.mark.parametrize("share", [HALF, ALL], ids=["half", "all"])
LANES = (None, THREADED, 0, 1, 2)


def same(life, *configs, model=net, **more):
    return assert_same_lives(life, *configs, model=model, plain={**SMALL, **more}, seeds=LANES)


def placed(optimizer):
    return Counter(optimizer.plan.placements)


@SHARES
def test_a_gradient_used_after_the_step_is_scaled_once(share):
    """Its norm, its values: the updates that read it come first."""

    def life(model, optimizer):
        found = []
        for number in range(4):
            loss_of(model, number).backward()
            gradients = [param.grad for param in model.parameters()]
            optimizer.clip_grad_norm_(1e-2)
            optimizer.step()
            found += [gradient.norm() for gradient in gradients] + [gradient.clone() for gradient in gradients]
            optimizer.zero_grad()
        return found

    same(life, {**FORWARD, **share})


@SHARES
@pytest.mark.parametrize("config", [FORWARD, BACKWARD, BOTH], ids=["forward", "backward", "both"])
def test_parts_of_layers_that_are_thawed_go_where_the_rest_is(config, share):
    def life(model, optimizer):
        small = [param for name, param in model.layers.named_parameters() if not name.endswith("up.weight")]
        for param in small:
            param.requires_grad_(False)
        iterate(model, optimizer, range(2))
        for param in small:
            param.requires_grad_(True)
        iterate(model, optimizer, range(2, 5))
        placements = dict(zip(model.parameters(), optimizer.plan.placements, strict=True))
        for layer in model.layers:
            assert len({placements[param] for param in layer.parameters()}) == 1

    def frozen():
        model = net()
        for name, param in model.layers.named_parameters():
            param.requires_grad_(name.endswith("up.weight"))
        return model

    same(life, {**config, **share}, model=frozen)


def test_replanning_keeps_and_changes_the_cpus_share():
    """Also where no weight moves. Bits alone would not show it."""
    _, half = offloaded(**HALF)
    _, everything = offloaded(**ALL)
    expected = {"half": placed(half), "all": placed(everything)}
    assert expected["half"][Placement.HOST] > 0 < expected["half"][Placement.STREAMED]
    _, optimizer = offloaded()
    for changes, found in (
        (HALF, "half"),
        ({"chunk_bytes": "32KiB"}, "half"),
        ({"overlap_forward": True}, "half"),
        (ALL, "all"),
        ({"threads": 2}, "all"),
        ({"update_in_backward": True}, "all"),
        (HALF, "half"),
    ):
        optimizer.replan(**changes)
        assert placed(optimizer) == expected[found], changes
    optimizer.replan(update_on="device")
    assert placed(optimizer) == {Placement.STREAMED: len(optimizer.plan.placements)}


class Wide(Net):
    """Weights of several chunks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 160), nn.Tanh(), nn.Linear(160, 48)) for _ in range(3))


@SHARES
@pytest.mark.parametrize("make", [Net, Wide])
def test_a_first_iteration_that_has_room_for_no_gradients(make, share):
    """The device updates with each gradient as it comes; the CPU not before `step()`."""

    def life(model, optimizer):
        for number in range(3):
            with optimizer.accumulate():
                loss_of(model, 10 + number).backward()
            loss_of(model, number).backward()
            end_step(optimizer)

    split = {"master_weights": "split"}
    with mock.patch.object(LeavingGradients, "where_they_wait", return_value=Wait.NOWHERE):
        same(life, {**BACKWARD, **split, **share}, model=lambda: net(make, torch.bfloat16), **split)


@SHARES
def test_forward_begins_before_the_cpu_is_done(share):
    """It waits for a layer's update when it comes to that layer."""
    model, optimizer = offloaded(config=FORWARD, **share)
    iterate(model, optimizer, range(3))
    by_cpu = {
        number
        for number, layer in enumerate(model.layers)
        if runtime_of(optimizer).places.states[layer.up.weight].placement is Placement.HOST
    }
    order = []
    engine = runtime_of(optimizer).engines[0]
    settle = engine.settle

    def noted(states, reason):
        waits = [state.name for state in states if state in engine.pending and state.placement is Placement.HOST]
        order.extend(("waits", name) for name in waits if name.endswith("up.weight") and "layers" in name)
        settle(states, reason)

    for number, layer in enumerate(model.layers):
        layer.norm.register_forward_pre_hook(lambda *_, number=number: order.append(("runs", number)))
    with mock.patch.object(engine, "settle", noted):
        loss_of(model, 3)
    for number in by_cpu - {0}:
        assert order.index(("waits", f"layers.{number}.up.weight")) > order.index(("runs", number - 1))


@pytest.mark.parametrize("found_by", ["forward", "a gradient"])
@pytest.mark.parametrize("config", [HOST, FORWARD], ids=["in step", "under forward"])
def test_an_update_that_fails_loses_the_step_and_nothing_else(config, found_by):
    """In a thread of the host: what is said is that the step is lost; a checkpoint brings everything back."""
    prepare, calls = AdamRule._prepare, []

    def fail(self, piece):
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError
        return prepare(self, piece)

    def use(model, optimizer):
        loss_of(model, 2).backward()
        gradients = [param.grad for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if found_by == "forward":
            loss_of(model, 3)
        else:
            [gradient.norm() for gradient in gradients]
        optimizer.synchronize()

    with lazily(THREADED):
        model, optimizer = offloaded(config=config, **ALL)
        iterate(model, optimizer, range(2))
        optimizer.synchronize()
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        with mock.patch.object(AdamRule, "_prepare", fail), pytest.raises(StepLostError):
            use(model, optimizer)
        optimizer.zero_grad()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        iterate(model, optimizer, range(2, 5))
        optimizer.synchronize()
        optimizer.replan(chunk_bytes="32KiB")
        iterate(model, optimizer, [5])
        found = [param.detach().clone() for param in model.parameters()]
        optimizer.close()
    model, optimizer = offloaded(config=config)
    iterate(model, optimizer, range(6))
    optimizer.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))
