# SPDX-License-Identifier: Apache-2.0
"""`replan(weights=...)`: weights go to the host and to the device between steps, layer by layer, and the bits stay."""

import copy
import gc
import itertools
import weakref
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import offstage
from offstage.activations.offload import offload_activations
from offstage.config import Placement
from offstage.engine import named_state
from offstage.errors import ConfigError, HostMemoryError, OffloadIneffectiveError, StepLostError
from offstage.memory.arena import Arena
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.optimizer.overlap.left_gradient import LeftGradient
from offstage.weights import moving
from offstage.weights.host_layer import HostLayer, HostWeight
from offstage.weights.host_weights import HostWeights, host_weight_of, host_weights_of
from tests.support.contract import SMALL, adamw, assert_same, assert_same_tree
from tests.support.refusals import refused
from tests.support.replanned import (
    CLIPS,
    FORMATS,
    LAYERS,
    WIDTH,
    iterate,
    loss_of,
    made,
    net,
    plainly_trained,
    replanned,
)
from tests.support.training import lazily

pytestmark = pytest.mark.usefixtures("some_layers_are_late")

LAYER = WIDTH * WIDTH + 2 * WIDTH
REST = WIDTH * WIDTH + WIDTH + 7 * WIDTH + 7
UPDATED_BY = [{"update_on": "device"}, {"update_on": "host"}, {"update_on": "auto", "host_fraction": 0.5}]
CUES = [{"overlap_forward": one, "update_in_backward": two} for one, two in itertools.product([False, True], repeat=2)]


def size(kind="fp32"):
    """Room for what is in no layer and the four layers that are on their way; the first one stays."""
    return FORMATS[kind][0].itemsize * (REST + 5 * LAYER + LAYER // 2)


def everything(kind):
    """Any change that is allowed, from any settings."""

    def draw(rng):
        weights = rng.choice(["device", "host", 0.5, size(kind)])
        fraction = rng.choice([0.5, 0.8, 1.0, 1.0])
        return {"weights": weights, **rng.choice(CUES), "fraction": fraction, **rng.choice(UPDATED_BY)}

    return draw


def weights_only(kind):
    return lambda rng: {"weights": rng.choice(["device", "host", 0.5, size(kind)])}


@pytest.mark.parametrize("change", [everything, weights_only])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_bits_stay(kind, micro_batches, clip, change):
    run = {"kind": kind, "micro_batches": micro_batches, "clip": clip}
    number = [*FORMATS].index(kind) + 3 * [*CLIPS].index(clip) + 12 * (micro_batches - 1)
    for lanes, seed in ((number, 100 + number), (None, number))[: 1 if change is weights_only else 2]:
        found = replanned(change(kind), lanes=lanes, seed=seed, **run, **CUES[number % 4])
        assert_same_tree(found, plainly_trained(**run))


@pytest.mark.parametrize("seed", range(4))
def test_the_bits_stay_on_many_lanes(seed):
    run = {"kind": "split masters", "micro_batches": 2, "clip": "both"}
    found = replanned(everything("split masters"), lanes=seed, seed=seed, **run)
    assert_same_tree(found, plainly_trained(**run))


# Where the weights are


def on_host(model):
    """The names of the weights that live on the host. Memory of an arena cannot be resized."""
    hosted = [name for name, param in model.named_parameters() if host_weight_of(param) is not None]
    for name, param in model.named_parameters():
        assert (name in hosted) == (not param.untyped_storage().resizable())
    return hosted


def names_of(layers):
    return [name for name, _ in net().named_parameters() if name.startswith(tuple(f"layers.{one}." for one in layers))]


@pytest.mark.parametrize("overlaps", [{}, {"update_in_backward": True}, {"overlap_forward": True}], ids=str)
def test_any_place_from_any_other(overlaps):
    """Places and hooks are those of an optimizer that was made with the settings; parameters are the same objects."""
    layers = {"device": [], "host": range(LAYERS), 0.5: [3, 4, 5], size(): [1, 2, 3, 4, 5]}
    places = {place: names_of(numbers) for place, numbers in layers.items()}
    fresh = {one: made(weights=one, **overlaps) for one in places}
    for before, after in itertools.permutations(places, 2):
        model, optimizer = made(weights=before, **overlaps)
        params, hooks = [*model.parameters()], number_of_hooks(fresh[after][0])
        iterate(model, optimizer)
        assert on_host(model) == places[before]
        optimizer.replan(weights=after)
        assert on_host(model) == places[after]
        assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
        assert number_of_hooks(model) == hooks
        runtime, like = runtime_of(optimizer), runtime_of(fresh[after][1])
        assert optimizer.plan == fresh[after][1].plan
        assert [len(one.transport.layers) for one in runtime.engines] == [
            len(one.transport.layers) for one in like.engines
        ]
        assert (runtime.weights is None) == (after == "device") == (host_weights_of(model) is None)
        streamed = [state.hosted is not None for state in runtime.all_states()]
        assert streamed == [host_weight_of(param) is not None for param in model.parameters()]
        iterate(model, optimizer)


def number_of_hooks(model):
    modules = sum(
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
    )
    return modules + sum(len(param._post_accumulate_grad_hooks or {}) for param in model.parameters())


def test_receipts_go_on():
    model, optimizer = made(weights="host")
    iterate(model, optimizer)
    before = optimizer.receipt().total_bytes_fetched
    optimizer.replan(weights="device")
    for _ in range(2):
        iterate(model, optimizer)
    after = optimizer.receipt()
    assert after.total_bytes_fetched > before
    assert 0 < after.bytes_fetched < before


def test_unchanged_weights_do_not_move():
    model, optimizer = made(weights="host")
    iterate(model, optimizer)
    layers, addresses = runtime_of(optimizer).weights.layers, [param.data_ptr() for param in model.parameters()]
    optimizer.replan(weights="host", chunk_bytes="32KiB", update_in_backward=True)
    optimizer.replan(weights=1.0, overlap_forward=True)
    assert runtime_of(optimizer).weights.layers == layers
    assert [param.data_ptr() for param in model.parameters()] == addresses
    assert all(param.untyped_storage().resizable() for param in model.first.parameters())


def test_layers_that_stay_on_the_host_do_not_move():
    model, optimizer = made(weights="host")
    iterate(model, optimizer)
    kept = runtime_of(optimizer).weights.layers[3:]
    with mock.patch.object(HostWeight, "release", autospec=True, side_effect=HostWeight.release) as released:
        optimizer.replan(weights=0.5)
    assert runtime_of(optimizer).weights.layers == kept
    assert released.call_count == 3 * 3
    optimizer.replan(weights="host")
    assert set(runtime_of(optimizer).weights.layers) > set(kept)


# Memory


class Watched(Arena):
    """Host memory that is counted as long as it is there."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        watched.add(self._memory)


watched = weakref.WeakSet()


def watched_bytes():
    gc.collect()
    return sum(len(memory) for memory in watched)


def test_layers_move_one_at_a_time(monkeypatch):
    """Host memory falls as layers go to the device, and is taken a layer at a time."""
    monkeypatch.setattr("offstage.weights.host_layer.Arena", Watched)
    watched.clear()
    model, optimizer = made(weights="device")
    iterate(model, optimizer)
    seen = []
    release, init = HostLayer.close, HostLayer.__init__

    def closing(self, device):
        seen.append(watched_bytes())
        release(self, device)

    def making(self, *arguments, **keywords):
        seen.append(watched_bytes())
        on_device = [host_weight_of(one) is None for one in arguments[1].values()]
        assert all(on_device)
        init(self, *arguments, **keywords)
        assert not any(param.untyped_storage().resizable() for param in arguments[1].values())

    monkeypatch.setattr(HostLayer, "close", closing)
    monkeypatch.setattr(HostLayer, "__init__", making)
    optimizer.replan(weights="host")
    a_layer = watched_bytes() // LAYERS
    assert a_layer
    assert seen == [number * a_layer for number in range(LAYERS)]
    iterate(model, optimizer)
    optimizer.synchronize()
    seen.clear()
    optimizer.replan(weights="device")
    assert seen == [number * a_layer for number in range(LAYERS, 0, -1)]
    assert watched_bytes() == 0


def test_state_leaves_the_device_before_weights_come():
    """And weights leave it before state comes: the device holds no more than before or after."""
    model, optimizer = made(weights=0.5, fraction=0.8)
    iterate(model, optimizer)
    runtime, told = runtime_of(optimizer), []
    bring_back, place = moving.ReplannedWeights.bring_back, named_state.allocate_resident

    def bringing(self):
        told.append(("weights come", [state for state in old if state.resident]))
        bring_back(self)

    def placing(state, existing):
        told.append(("state comes", on_host(model)))
        place(state, existing)

    old = runtime.all_states()
    assert any(state.resident for state in old)
    with (
        mock.patch.object(moving.ReplannedWeights, "bring_back", bringing),
        mock.patch.object(named_state, "allocate_resident", placing),
    ):
        optimizer.replan(weights="device", fraction=1.0)
        assert told == [("weights come", [])]
        told.clear()
        old = runtime.all_states()
        optimizer.replan(weights=0.5, fraction=0.8)
    assert told
    after = on_host(model)
    assert after
    assert all(event == ("state comes", after) for event in told if event[0] == "state comes")


# Gradients that are there


@pytest.mark.parametrize("weights", [("device", "host"), ("host", "device"), (0.5, "host"), ("host", 0.5)], ids=str)
@pytest.mark.parametrize("cues", CUES, ids=str)
@pytest.mark.parametrize("lanes", [None, 0])
def test_accumulated_gradients_are_not_lost(weights, cues, lanes):
    before, after = weights

    def run(changes, **config):
        model, optimizer = made(**config)
        iterate(model, optimizer)
        with optimizer.accumulate():
            loss_of(model, 1).backward()
        if changes:
            optimizer.replan(weights=after)
            for param in model.parameters():
                assert param.grad is not None
                assert isinstance(param.grad, LeftGradient) or host_weight_of(param) is None
        loss_of(model, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        iterate(model, optimizer, 3)
        optimizer.synchronize()
        return model, optimizer

    with lazily(lanes):
        ours = run(True, weights=before, **cues)
    assert_same(*run(False, fraction=0.0), *ours)


def test_a_gradient_is_where_its_weight_is():
    """Other code reads it as a host tensor beside a weight on the host, and as a device tensor otherwise."""
    model, optimizer = made(weights="host")
    with optimizer.accumulate():
        loss_of(model, 0).backward()
    param = model.layers[0].up.weight
    value = param.grad.clone()
    assert param.grad.stays_on_host
    optimizer.replan(weights="device")
    assert isinstance(param.grad, LeftGradient)
    assert not param.grad.stays_on_host
    assert torch.equal(param.grad + 0, value)


def test_a_forward_before_and_its_backward_after():
    def run(changes, **config):
        model, optimizer = made(**config)
        for number in range(4):
            loss = loss_of(model, number)
            if changes:
                optimizer.replan(weights=("device", "host", 0.5, "host")[number])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    assert_same(*run(False, fraction=0.0), *run(True, weights="host"))


def test_beside_offloaded_activations():
    def run(changes, **config):
        model, optimizer = made(**config)
        if changes:
            offload_activations(model, min_bytes=0, keep_last=0)
        for number in range(6):
            iterate(model, optimizer, number)
            if changes:
                optimizer.replan(weights=("device", "host", 0.5)[number % 3], overlap_forward=number % 2 == 0)
        optimizer.synchronize()
        return model, optimizer

    plain = run(False, fraction=0.0)
    for lanes in (None, 0):
        with lazily(lanes):
            assert_same(*plain, *run(True, weights="host"))


# Refused


def test_what_is_refused_changes_nothing():
    model, optimizer = made()
    iterate(model, optimizer)
    plan, config = optimizer.plan, optimizer.config
    cases = [
        (ConfigError, {"weights": "host", "window": "all"}, ["contradicts window='all'"]),
        (ConfigError, {"weights": "host", "fraction": 0.0}, ["fraction=0.0 switches offloading off"]),
        (ConfigError, {"weights": "17KiB"}, ["weights=17.0 KiB cannot hold", "Raise it to"]),
        (OffloadIneffectiveError, {"weights": "1GiB"}, ["moves no weight"]),
        (HostMemoryError, {"weights": "host", "host_budget": "32KiB"}, ["host_budget of 32.0 KiB cannot hold"]),
    ]
    for error, changes, parts in cases:
        refused(error, lambda changes=changes: optimizer.replan(**changes), *parts)
        assert (optimizer.plan, optimizer.config, on_host(model)) == (plan, config, [])
        assert number_of_hooks(model) == 0
        iterate(model, optimizer)


def test_weights_need_the_model_and_no_other_offload():
    model = net()
    optimizer = offstage.offload(adamw(model.parameters()), **SMALL)
    refused(ConfigError, lambda: optimizer.replan(weights="host"), "needs the model", "found no model")
    model, optimizer = made()
    with mock.patch.object(moving, "host_weights_of", return_value=object()):  # another optimizer's
        refused(ConfigError, lambda: optimizer.replan(weights="host"), "live on the host already")
    optimizer.replan(weights="host")
    assert on_host(model) == names_of(range(LAYERS))


@pytest.mark.usefixtures("process_group")
def test_ddp_and_dtensors_are_refused():
    ddp = DistributedDataParallel(net())
    optimizer = offstage.offload(adamw(ddp.parameters()), ddp, **SMALL)
    refused(ConfigError, lambda: optimizer.replan(weights="host"), "DistributedDataParallel", "FSDP2")
    iterate(ddp, optimizer)
    model = net()
    linear, mesh = model.layers[1].up, init_device_mesh("cpu", (1,))
    linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.data, mesh, [Replicate()]))
    sharded = offstage.offload(adamw(model.parameters()), model, **SMALL)
    refused(ConfigError, lambda: sharded.replan(weights="host"), "DTensor", "CPUOffloadPolicy")


# Failed


FAILURES = {
    "a layer that leaves": (HostLayer, "__init__", 3),
    "state": (named_state, "adopt", 4),
    "a weight that comes": (HostWeight, "release", 5),
}


def failing(owner, name, calls, error=MemoryError):
    inner, count = getattr(owner, name), itertools.count(1)

    def fail(*arguments, **keywords):
        if next(count) == calls:
            raise error("out of memory")
        return inner(*arguments, **keywords)

    return mock.patch.object(owner, name, fail)


@pytest.mark.parametrize("cues", CUES, ids=str)
@pytest.mark.parametrize("weights", [*itertools.permutations(["device", "host", 0.5], 2)], ids=str)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_leaves_everything_as_it_was(failure, weights, cues):
    before, after = weights
    fractions = {"fraction": 0.9 if before == "host" else 0.6}

    def run(fails, **config):
        model, optimizer = made(**config)
        for number in range(3):
            iterate(model, optimizer, number, clip=1e4)
        with optimizer.accumulate():
            loss_of(model, 3).backward()
        if fails:
            told = what_there_is(model, optimizer)
            with failing(*FAILURES[failure]) as failed:
                try:
                    optimizer.replan(weights=after, fraction=1.0, update_in_backward=False, overlap_forward=False)
                except MemoryError:
                    assert_same_tree(what_there_is(model, optimizer), told)
                    assert optimizer.config.weights == before
                else:  # nothing of the kind moves between these two
                    assert on_host(model) == runs[after]
            assert failed is not None
        loss_of(model, 4).backward()
        optimizer.clip_grad_norm_(1e4)
        optimizer.step()
        optimizer.zero_grad()
        for number in range(5, 8):
            iterate(model, optimizer, number, clip=1e-3 if number == 6 else 1e4)
        optimizer.synchronize()
        return model, optimizer

    runs = {one: on_host(made(weights=one, fraction=1.0)[0]) for one in (before, after)}
    assert_same(*run(False, fraction=0.0), *run(True, weights=before, **cues, **fractions))


def what_there_is(model, optimizer):
    runtime = runtime_of(optimizer)
    return {
        "plan": str(optimizer.plan),
        "config": str(optimizer.config),
        "hosted": on_host(model),
        "weights": [param.detach().clone() for param in model.parameters()],
        "gradients": [type(param.grad).__name__ for param in model.parameters()],
        "hooks": number_of_hooks(model),
        "layers": sum(len(engine.transport.layers) for engine in runtime.engines),
        "of states": [state.hosted is not None for state in runtime.all_states()],
        "resident": [sorted(state.resident) for state in runtime.all_states()],
        "possible": runtime.speculation.possible,
        "host": sum(engine.transport.host_bytes for engine in runtime.engines),
        "state": copy.deepcopy(optimizer.state_dict()["state"]),
    }


def test_a_way_back_that_fails_loses_the_step():
    model, optimizer = made(weights="host")
    iterate(model, optimizer)
    with (
        failing(HostWeight, "release", 5),
        mock.patch.object(HostLayer, "made_again", side_effect=lambda: broken),
        pytest.raises(StepLostError, match="so did the way back"),
    ):
        optimizer.replan(weights="device")
    with pytest.raises(StepLostError):
        optimizer.step()


def broken():
    raise OSError("no memory at all")


def test_host_memory_is_checked_before_anything_moves(monkeypatch):
    model, optimizer = made()
    iterate(model, optimizer)
    monkeypatch.setattr("offstage.memory.arena.mem_available", lambda: 60_000)
    with mock.patch.object(HostWeights, "add", side_effect=AssertionError("something moved")):
        refused(HostMemoryError, lambda: optimizer.replan(weights="host"), "of host memory")
    assert on_host(model) == []


def test_updates_in_backward_go_on_at_once():
    model, optimizer = made(update_in_backward=True)
    for number in range(2):
        iterate(model, optimizer, number)
    for weights in ("host", 0.5, "device"):
        optimizer.replan(weights=weights)
        loss_of(model, 2).backward()
        assert any(isinstance(param.grad, DroppedGradient) for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert set(optimizer.plan.placements) == {Placement.STREAMED}
