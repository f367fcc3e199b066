# SPDX-License-Identifier: Apache-2.0
"""`offload(optimizer, model, weights="host")`: weights that live on the host give the bits of the plain step, on lanes
that run at once and on late ones.
"""

import contextlib
import contextvars
import copy
import functools
import gc
import itertools
import random
import signal
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import offstage
from offstage import checkpoint
from offstage.activations.offload import offload_activations
from offstage.config import Placement
from offstage.engine.pipeline import Pipeline
from offstage.errors import ConfigError, HostMemoryError, OffloadIneffectiveError, OffstageError, StepLostError
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.modules import is_ours
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.left_gradient import LeftGradient
from offstage.planning.host_weights import LAYERS_ON_DEVICE, left_to_forward
from offstage.weights.host_layer import HostLayer
from offstage.weights.host_weights import host_weight_of
from tests.support import overlap
from tests.support.contract import SMALL, adamw, assert_same, assert_same_tree, snapshot
from tests.support.lives import assert_same_lives, clip_to, end_step, fail_at, inputs, iterate, loss_of
from tests.support.refusals import refused
from tests.support.runs import differences
from tests.support.training import lazily

pytestmark = pytest.mark.usefixtures("some_layers_are_late")

HOST = {**SMALL, "weights": "host"}
FORWARD = {**HOST, "overlap_forward": True}
BACKWARD = {**HOST, "update_in_backward": True}
BOTH = {**FORWARD, **BACKWARD}
MODES = {"in step": HOST, "under forward": FORWARD, "in backward": BACKWARD, "both": BOTH}
EACH = pytest.mark.parametrize("mode", MODES)
CLIPPED = pytest.mark.parametrize(
    ("mode", "clip"), [("in step", 1e4), ("under forward", None), ("in backward", 1e4), ("both", None), ("both", 1e4)]
)
SEEDS = (None, 0)
WIDTH, LAYERS = 48, 6
"""More layers than are on the device at once."""


class Layer(nn.Module):
    """Autograd saves one weight as it is and a view of the other; the state takes two chunks of 16 KiB."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    """What is in `layers` may leave."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.last = nn.Linear(WIDTH, 7)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def net(make=Net, dtype=torch.float32):
    torch.manual_seed(0)
    return make().to(dtype)


def offloaded(model=None, config=HOST, **more):
    model = net() if model is None else model
    return model, offstage.offload(adamw([p for p in model.parameters() if p.requires_grad]), model, **config, **more)


def is_on_host(param):
    """Memory of an arena cannot be resized; a tensor that torch has made can."""
    return not param.untyped_storage().resizable()


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def host_weights(optimizer):
    return runtime_of(optimizer).weights


def same(life, mode, seeds=(0,), make=net, **more):
    """`life` comes to the same as with weights on the device."""
    return assert_same_lives(life, {**MODES[mode], **more}, model=make, plain={**SMALL, **more}, seeds=seeds)


# Every mode, format, way of checkpointing and clipping


def covering(**factors):
    """Rows in which any two values of different factors meet, and all combinations of the first three."""
    rng, names = random.Random(0), list(factors)
    rows = [dict(zip(names[:3], row, strict=True)) for row in itertools.product(*(factors[one] for one in names[:3]))]
    met = set()

    def pairs(row):
        return set(itertools.combinations([(name, str(row[name])) for name in names], 2))

    for row in rows:
        tried = [{**row, **{name: rng.choice(factors[name]) for name in names[3:]}} for _ in range(40)]
        best = max(tried, key=lambda one: len(pairs(one) - met))
        row.update(best)
        met |= pairs(row)
    wanted = {
        frozenset([(a, str(x)), (b, str(y))])
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    assert {frozenset(pair) for pair in met} == wanted
    return rows


FORMATS = {
    "fp32": (torch.float32, {}),
    "fp32 masters": (torch.bfloat16, {"master_weights": "fp32"}),
    "split masters": (torch.bfloat16, {"master_weights": "split"}),
    "no masters, bf16 moments": (torch.bfloat16, {"master_weights": "none", "state_dtype": "bfloat16"}),
}
ROWS = covering(
    mode=list(MODES),
    clip=list(overlap.CLIPS),
    micro_batches=[1, 2],
    kind=list(FORMATS),
    checkpointing=["none", "nonreentrant", "reentrant"],
    frozen=["nothing", "layers", "biases"],
    seed=[None, 0, 1, 2],
)


def overlap_net(frozen, checkpointing):
    """Its first block is called twice, its head is tied to the embedding."""
    model = overlap.Net(checkpointing, blocks=4)
    for number, block in enumerate(model.blocks):
        for place, param in enumerate(block.parameters()):
            if (frozen == "layers" and number in (0, 2)) or (frozen == "biases" and place % 2):
                param.requires_grad_(False)
    return model


def trained(config, *, kind, frozen, **more):
    dtype, formats = FORMATS[kind]
    make = functools.partial(overlap_net, frozen)
    return overlap.train(config, dtype=dtype, base=formats, make_model=make, steps=5, **more)


@functools.cache
def plainly_trained(**more):
    return trained(None, **more)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(str(value) for value in row.values()))
def test_the_bits_of_the_plain_step(row):
    row = dict(row)
    mode, seed = row.pop("mode"), row.pop("seed")
    with lazily(seed):
        found = trained(MODES[mode], **row)
    assert differences(plainly_trained(**row), found) == []
    assert found.receipt.host_weight_bytes > 0
    assert (found.updated_in_backward > 0) == ("update_in_backward" in MODES[mode])
    assert (found.receipt.speculation_hits > 0) == (
        found.updated_in_backward > 0 and row["clip"] in ("never", "sometimes")
    )


CPU_ROWS = covering(
    mode=list(MODES),
    clip=list(overlap.CLIPS),
    by_cpu=[0.5, 1.0],
    micro_batches=[1, 2],
    kind=list(FORMATS),
    checkpointing=["none", "nonreentrant", "reentrant"],
    frozen=["nothing", "layers", "biases"],
    seed=[None, 0, 1, 2],
)


@pytest.mark.parametrize("row", CPU_ROWS, ids=lambda row: ", ".join(str(value) for value in row.values()))
def test_layers_that_the_cpu_updates_have_the_same_bits(row):
    """Where they are. The others are updated as without it: the norm decides for all of them."""
    row = dict(row)
    mode, seed, share = row.pop("mode"), row.pop("seed"), row.pop("by_cpu")
    with lazily(seed):
        found = trained({**MODES[mode], "host_fraction": share}, **row)
    assert differences(plainly_trained(**row), found) == []
    plan = found.optimizer.plan
    assert plan.bytes_of(Placement.HOST) > 0
    assert (plan.bytes_of(Placement.STREAMED) > 0) == (share < 1.0)
    assert found.receipt.host_weight_bytes > 0


def test_whole_layers_are_updated_by_the_cpu():
    """Those behind some that stream, so that it has time for them; what is in no layer streams."""
    for share, expected in ((0.5, {1, 3, 5}), (0.34, {2, 4}), (0.1, {5})):
        model, optimizer = offloaded(net(lambda: Net(6)), host_fraction=share)
        names = [name for name, _ in model.named_parameters()]
        placed = dict(zip(names, optimizer.plan.placements, strict=True))
        by_cpu = {name for name, where in placed.items() if where is Placement.HOST}
        assert {int(name.split(".")[1]) for name in by_cpu} == expected
        assert all(
            placed[f"layers.{number}.{name}"] is Placement.HOST
            for number in expected
            for name in ("norm.weight", "up.weight", "up.bias")
        )


@pytest.mark.parametrize("change", ["a group", "more state"])
def test_layers_that_the_cpu_updates_stay_its_own(change):
    """When parameters are added, and when options need more state of those that are there."""

    def life(model, optimizer):
        iterate(model, optimizer, range(2), clip=1e-2)
        if change == "a group":
            torch.manual_seed(1)
            model.layers.append(Layer())
            optimizer.add_param_group({"params": [*model.layers[-1].parameters()]})
        else:
            optimizer.param_groups[0]["amsgrad"] = True
        iterate(model, optimizer, range(2, 5), clip=1e-2)
        placed = optimizer.plan.placements[: 2 + 3 * LAYERS + 2]
        if Placement.HOST in placed:
            assert placed == offloaded(host_fraction=0.5)[1].plan.placements

    assert_same_lives(life, {**FORWARD, "host_fraction": 0.5}, {**BOTH, "host_fraction": 0.5}, model=net, seeds=SEEDS)


def test_what_the_cpu_updates_does_not_travel():
    """Neither its state nor its gradient comes to the device: weights for forward and backward do."""

    def moved(**config):
        model, optimizer = offloaded(config=FORWARD, **config)
        iterate(model, optimizer, range(4))
        optimizer.synchronize()
        receipt = optimizer.receipt()
        assert (receipt.host_update_ms is not None) == bool(config)
        return receipt.moved

    streamed, half = moved(), moved(host_fraction=0.5)
    layers, layer = LAYERS, layer_bytes(net())
    assert streamed.state_up - half.state_up == pytest.approx(2 * layers // 2 * layer, rel=0.01)  # gaps travel, too
    assert streamed.gradients_up == layers * layer
    assert half.gradients_up == layers // 2 * layer
    assert streamed.gradients_down == half.gradients_down == layers * layer
    assert half.weights_down == layers // 2 * layer


@EACH
def test_torchs_own_clipping(mode):
    """Not beside updates in backward, which drop the gradients: there it says so."""

    def life(model, optimizer):
        norms = []
        for number in range(4):
            loss_of(model, number).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-2 if number % 2 else 1e4).clone())
            norms.append(nn.utils.get_total_norm([param.grad for param in model.parameters()], 1.0))
            end_step(optimizer)
        return norms

    if "update_in_backward" in MODES[mode]:
        refused(OffstageError, lambda: same(life, mode), "optimizer.clip_grad_norm_(max_norm)")
    else:
        same(life, mode)


@pytest.mark.parametrize("mode", ["in step", "under forward"])
def test_gradients_are_tensors_like_others(mode):
    """Read, scaled, added to, replaced, copied and compared, after one micro-batch and between two."""

    def use(model, number):
        gradients = [param.grad for param in model.parameters()]
        found = [gradient.clone() for gradient in gradients]
        found += [gradient.abs().max() for gradient in gradients]
        found += [torch.stack([gradient.isfinite().all() for gradient in gradients])]
        for gradient in gradients[number % 2 :: 2]:
            gradient.mul_(0.5)
            gradient += 0.001
        for param in list(model.parameters())[number % 3 :: 3]:
            param.grad = param.grad.clone() if number % 2 else torch.full_like(param, 0.01)
        found += [nn.utils.clip_grad_value_(model.parameters(), 0.02)] if number == 3 else []
        assert all(gradient.shape == param.shape for gradient, param in zip(gradients, model.parameters(), strict=True))
        assert all(
            gradient.device == param.device for gradient, param in zip(gradients, model.parameters(), strict=True)
        )
        return [one for one in found if one is not None]

    def life(model, optimizer):
        found = []
        for number in range(5):
            with optimizer.accumulate():
                loss_of(model, number).backward()
            found += use(model, number) if number % 2 else []
            loss_of(model, 10 + number).backward()
            found += use(model, number)
            clip_to(optimizer, 0.1 if number == 2 else None)
            end_step(optimizer)
        return found

    same(life, mode, seeds=SEEDS)


def test_a_gradient_that_left_is_on_the_host():
    model, optimizer = offloaded()
    loss_of(model, 0).backward()
    moved = [param for param in model.layers.parameters() if host_weight_of(param) is not None]
    assert len(moved) == 3 * LAYERS
    assert all(isinstance(param.grad, LeftGradient) for param in moved)
    assert repr(model.layers[0].up.weight.grad) == "LeftGradient('layers.0.up.weight')"
    receipt = optimizer.receipt()
    assert receipt.host_gradient_bytes == sum(param.nbytes for param in moved)
    optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("mode", "set_to_none"), [("in step", False), ("under forward", True), ("in backward", True), ("both", False)]
)
def test_a_gradient_that_is_zeroed(mode, set_to_none):
    """A backward whose gradients are not used, and zeros that decay what gets none. Clipped: updates are taken back."""

    def life(model, optimizer):
        for number in range(6):
            loss_of(model, number).backward()
            if number in (0, 3):
                optimizer.zero_grad(set_to_none)
                loss_of(model, 20 + number).backward()
            optimizer.clip_grad_norm_(1e4)
            optimizer.step()
            optimizer.zero_grad(set_to_none)

    same(life, mode)


# Which weights leave


def on_host_in(model):
    """The numbers of the layers whose large weights are on the host."""
    return [number for number, layer in enumerate(model.layers) if host_weight_of(layer.up.weight) is not None]


def layer_bytes(model):
    return sum(param.nbytes for param in model.layers[0].parameters())


def test_all_weights_of_the_layers_leave():
    model, optimizer = offloaded()
    assert all(is_on_host(param) for param in model.layers.parameters())
    assert not any(is_on_host(param) for param in [*model.first.parameters(), *model.last.parameters()])
    assert optimizer.receipt().host_weight_bytes >= LAYERS * layer_bytes(model)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_a_share_is_of_the_last_layers(share):
    """At least so much leaves: whole layers do."""
    model, _ = offloaded(weights=share, config=SMALL)
    found = on_host_in(model)
    assert found == list(range(found[0], LAYERS))
    assert share * LAYERS <= len(found) < share * LAYERS + 1


def test_a_size_is_the_most_device_memory_for_weights():
    """What is not in the layers, the layers that are on their way, and as many more as have room."""

    def made(weights):
        return offloaded(net(lambda: Net(8)), SMALL, weights=weights)

    model = net(lambda: Net(8))
    layer = layer_bytes(model)
    rest = sum(param.nbytes for param in model.parameters()) - 8 * layer
    for stay in range(3):
        model, _ = made(rest + (LAYERS_ON_DEVICE + stay) * layer)
        assert on_host_in(model) == list(range(stay, 8))
    too_small = rest + LAYERS_ON_DEVICE * layer - 1
    refused(ConfigError, lambda: made(too_small), "cannot hold what is not in the model's layers", "Raise it to")


def test_a_size_that_holds_all_weights_moves_none():
    """Said once, or refused: enabled and idle is an error."""
    model = net()
    refused(
        OffloadIneffectiveError,
        lambda: offloaded(model, weights="1GiB", config=SMALL),
        "moves no weight",
    )
    assert not any(is_on_host(param) for param in model.parameters())


def test_weights_on_the_device_are_no_setting():
    for value in ("device", 0.0):
        model, optimizer = offloaded(weights=value, config=SMALL)
        assert host_weights(optimizer) is None
        assert not any(is_on_host(param) for param in model.parameters())


@pytest.mark.parametrize(("mode", "share"), [("under forward", 0.3), ("both", 0.7)])
def test_a_share_gives_the_same_bits(mode, share):
    def life(model, optimizer):
        iterate(model, optimizer, range(4), clip=1e-2)

    _, optimizer = assert_same_lives(life, {**MODES[mode], "weights": share}, model=net, seeds=(0,))
    assert 0 < len(host_weights(optimizer).layers) < LAYERS


class Shared(Net):
    """A weight of two layers, one that the end uses too, a buffer over a third, one with gaps, small ones."""

    def __init__(self):
        super().__init__()
        self.layers[3].up.weight = self.layers[1].up.weight
        self.end = nn.Linear(WIDTH, WIDTH)
        self.end.weight = self.layers[2].up.weight
        self.register_buffer("view", self.layers[0].up.weight.data.t())
        self.layers[4].up.weight = nn.Parameter(0.1 * torch.randn(WIDTH, 2 * WIDTH))
        self.layers[4].up.weight.data = self.layers[4].up.weight.data[:, ::2]

    def forward(self, x):
        return super().forward(x) + self.end(x).sum()


SHARED = ("layers.1.up.weight", "layers.2.up.weight", "layers.0.up.weight", "layers.4.up.weight")


@EACH
def test_shared_weights_and_small_ones_stay(mode):
    def life(model, optimizer):
        iterate(model, optimizer, range(4))

    config = {**MODES[mode], "min_bytes": "1KiB"}
    model, _ = assert_same_lives(life, config, model=functools.partial(net, Shared), seeds=(0,))
    for name, param in model.named_parameters():
        large = name.startswith("layers.") and param.dim() == 2
        assert (host_weight_of(param) is not None) == (large and name not in SHARED), name


# Frozen weights


class Adapted(nn.Module):
    """A frozen linear layer with a trained pair of small ones beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapters(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(LAYERS))
        self.first.requires_grad_(False)


def adapters():
    torch.manual_seed(0)
    return Adapters()


@EACH
@pytest.mark.parametrize("given", ["all parameters", "those that train"])
def test_frozen_weights_are_fetched_and_never_stored(mode, given):
    """As in LoRA, whether the optimizer has them or not."""

    def make(params):
        params = list(params)
        return adamw(params if given == "all parameters" else [param for param in params if param.requires_grad])

    def life(model, optimizer):
        iterate(model, optimizer, range(5), clip=1e4)
        optimizer.synchronize()

    model, optimizer = assert_same_lives(life, MODES[mode], model=adapters, make=make, seeds=(0,))
    frozen = [param for layer in model.layers for param in layer.base.parameters()]
    trained = [param for layer in model.layers for param in (layer.up.weight, layer.down.weight)]
    assert all(is_on_host(param) for param in (*frozen, *trained))
    moved = runtime_of(optimizer).moved()
    assert moved.weights_down == 5 * sum(param.nbytes for param in trained)
    assert moved.weights_up >= 5 * sum(param.nbytes for param in (*frozen, *trained))


@EACH
def test_only_frozen_layers(mode):
    """What trains is around them, and stays."""

    def make():
        model = net()
        model.layers.requires_grad_(False)
        return model

    def life(model, optimizer):
        iterate(model, optimizer, range(3))

    model, optimizer = assert_same_lives(life, MODES[mode], model=make, seeds=(0,))
    assert all(is_on_host(param) for param in model.layers.parameters())
    assert runtime_of(optimizer).moved().weights_down == 0


@EACH
def test_layers_frozen_and_thawed_on_the_way(mode):
    def life(model, optimizer):
        for number in range(8):
            model.layers[0].requires_grad_(number > 1)
            model.layers[3].requires_grad_(number < 4 or number == 6)
            loss_of(model, number).backward()
            end_step(optimizer)

    same(life, mode)


@EACH
def test_weights_of_another_optimizer(mode):
    """Some layers' weights are trained by torch's own optimizer: right, or refused."""

    def life(model, optimizer):
        other = torch.optim.SGD([param for layer in model.layers[::2] for param in layer.parameters()], lr=0.1)
        for number in range(4):
            loss_of(model, number).backward()
            other.step()
            other.zero_grad()
            end_step(optimizer)
            optimizer.synchronize()

    def make(params):
        params = list(params)
        return adamw([*params[:2], *params[5:8], *params[11:14], *params[17:]])  # without every other layer

    assert_same_lives(life, MODES[mode], model=net, make=make, seeds=(0,))


# Forwards


@EACH
def test_evaluation_and_generation_stream_too(mode):
    """Forwards without gradients, once and over and over, between steps and between forward and backward."""

    def life(model, optimizer):
        found = []
        for number in range(4):
            loss = loss_of(model, number)
            if number == 2 and "update_in_backward" not in MODES[mode]:
                with torch.no_grad():
                    found.append(loss_of(model, 30))
            loss.backward()
            end_step(optimizer)
            with torch.inference_mode() if number % 2 else torch.no_grad():
                model.eval()
                found += [loss_of(model, 40 + repeat).clone() for repeat in range(3)]
                model.train()
        return found

    same(life, mode, seeds=SEEDS)


@EACH
def test_evaluation_fetches_each_layer_once(mode):
    """And leaves nothing on the device."""
    model, optimizer = offloaded(config=MODES[mode])
    iterate(model, optimizer, range(3))
    optimizer.synchronize()
    weights, total = host_weights(optimizer), sum(param.nbytes for param in model.layers.parameters())
    before = weights.bytes_fetched
    for repeat in range(1, 4):
        with torch.no_grad():
            loss_of(model, 3)
        assert weights.bytes_fetched - before == repeat * total
        assert weights.device_bytes == 0


@EACH
def test_no_more_layers_than_needed_are_on_the_device(mode):
    """Outside of their layers the parameters are host tensors. Between steps none is there, unless forward waits."""
    model, optimizer = offloaded(net(lambda: Net(8)), MODES[mode])
    weights, here = host_weights(optimizer), []
    layer_nbytes = weights.layers[0].nbytes
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: here.append(weights.device_bytes))
        layer.register_full_backward_hook(lambda *_: here.append(weights.device_bytes))
    for number in range(4):
        loss = loss_of(model, number)
        assert all(is_on_host(param) for param in model.layers.parameters())
        loss.backward()
        assert all(is_on_host(param) for param in model.layers.parameters())
        here.append(weights.device_bytes)
        end_step(optimizer)
        here.append(weights.device_bytes)
        assert mode in ("under forward", "both") or weights.device_bytes == 0
    assert len(here) == 4 * 18
    assert max(here) <= weights.most_device_bytes == optimizer.receipt().device_weight_bytes
    assert weights.most_device_bytes <= 4 * layer_nbytes


class Calls(Net):
    """Layers are called as `used` says."""

    used = (0, 1, 2, 3, 4)

    def forward(self, x):
        x = self.first(x)
        for number in self.used:
            x = self.layers[number](x)
        return self.last(x)


@CLIPPED
def test_layers_called_twice_skipped_and_in_another_order(mode, clip):
    orders = [(0, 1, 2, 3, 4), (0, 1, 1, 2, 0), (4, 3, 2, 1, 0), (2,), (), (0, 1, 2, 3, 4), (3, 3, 3), (1, 4)]

    def life(model, optimizer):
        for number, used in enumerate(orders):
            model.used = used
            loss_of(model, number).backward()
            end_step(optimizer, clip)

    same(life, mode, make=functools.partial(net, Calls))


@EACH
def test_a_layer_runs_alone(mode):
    """Before the model's first forward and after it, with gradients and without, and in the middle of a step."""

    def life(model, optimizer):
        found = []
        for number in range(5):
            with torch.no_grad():
                found.append(model.layers[1](inputs(number)))
            if number % 2:
                model.layers[number % 4](inputs(number)).pow(2).mean().backward()
            else:
                with optimizer.accumulate():
                    model.layers[2](inputs(number)).pow(2).mean().backward()
                loss_of(model, number).backward()
            end_step(optimizer)
        return found

    same(life, mode)


@pytest.mark.parametrize("mode", ["in step", "under forward"])
def test_micro_batches_in_flight(mode):
    """Forwards and backwards interleaved, as in a pipeline."""

    def life(model, optimizer):
        for step in range(3):
            losses = []
            for number in range(4):
                losses.append(loss_of(model, 10 * step + number))
                if number >= 2:
                    with optimizer.accumulate():
                        losses.pop(0).backward()
            with optimizer.accumulate():
                losses.pop(0).backward()
            losses.pop(0).backward()
            end_step(optimizer, 1e-2)

    same(life, mode)


@EACH
def test_backward_again_and_gradients_asked_for(mode):
    def life(model, optimizer):
        found = []
        for number in range(3):
            loss = loss_of(model, number)
            with optimizer.accumulate():
                loss.backward(retain_graph=True)
            found += torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            end_step(optimizer)
        return found

    same(life, mode)


@pytest.mark.parametrize("mode", ["under forward", "in backward"])
def test_autocast(mode):
    """Its cache of 16-bit copies lasts a forward and its backward."""

    def life(model, optimizer):
        for number in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, number)
            loss.backward()
            end_step(optimizer, 1e4)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                loss_of(model, number)

    same(life, mode)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", ["under forward", "in backward"])
def test_layers_compiled_one_by_one(mode):
    def make():
        torch.compiler.reset()
        model = net(lambda: Net(3))
        for number, layer in enumerate(model.layers):
            model.layers[number] = torch.compile(layer, backend="aot_eager")
        return model

    def life(model, optimizer):
        iterate(model, optimizer, range(4), clip=1e4)

    same(life, mode, make=make, seeds=(0,))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_compiled_in_place_are_right_or_refused(when):
    """Hooks would be compiled into them."""

    def life(model, optimizer):
        if when == "after":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        iterate(model, optimizer, range(4))

    def make():
        torch.compiler.reset()
        model = net(lambda: Net(3))
        for layer in model.layers if when == "before" else ():
            layer.compile(backend="aot_eager")
        return model

    with contextlib.suppress(ConfigError):
        same(life, "under forward", make=make, seeds=(0,))
        return
    refused(
        ConfigError,
        lambda: same(life, "under forward", make=make, seeds=(0,)),
        "torch.compile(model.layers[i])",
        "offload(optimizer, model",
    )


@EACH
def test_a_layer_that_two_threads_run_at_the_same_time(mode):
    """One evaluates while the loop is in the middle of the same layer: its weights stay there until both have left."""

    def life(model, optimizer):
        found = []

        def evaluate():
            with torch.no_grad():
                found.append(model.layers[1](inputs(0)))

        def beside(layer, arguments):
            if threading.current_thread() is threading.main_thread() and torch.is_grad_enabled():
                thread = threading.Thread(target=contextvars.copy_context().run, args=(evaluate,))
                thread.start()
                thread.join()
                assert not is_on_host(layer.weight)

        for number in range(4):
            iterate(model, optimizer, [number])
            if number == 1:
                handle = model.layers[1].norm.register_forward_pre_hook(beside)
        handle.remove()
        return found

    same(life, mode)


class Forked(Net):
    """A layer that reads a child's weight itself, one that returns a view of its weight, an auxiliary loss."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.position = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
            self.router = nn.Linear(WIDTH, 4)

        def forward(self, x):
            y = x + nn.functional.linear(x, self.linear.weight, self.linear.bias).tanh()
            self.loss = self.router(y).softmax(-1).pow(2).sum()
            return y, self.position[:WIDTH]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            y, position = layer(x)
            x = y * position
        return self.last(x) + sum(layer.loss for layer in self.layers)


@pytest.mark.parametrize("mode", ["under forward", "in backward"])
def test_layers_of_odd_kinds(mode):
    """Right, or refused: a view of a weight outlives its layer's forward, a side loss is first in backward."""

    def life(model, optimizer):
        iterate(model, optimizer, range(4))

    with contextlib.suppress(OffstageError):
        same(life, mode, make=functools.partial(net, Forked))


# Activations of the same model


@pytest.mark.parametrize(
    ("first", "reentrant"),
    [("activations", None), ("optimizer", None), ("optimizer", False), ("activations", True)],
    ids=["activations first", "optimizer first", "non-reentrant", "reentrant"],
)
@EACH
def test_activations_leave_too(mode, first, reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = (
                    layer(x)
                    if reentrant is None
                    else torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
                )
            return self.last(x)

    def lived(config):
        model = net(Checkpointed)
        handle = offload_activations(model, min_bytes=0) if first == "activations" else None
        optimizer = offstage.offload(adamw(model.parameters()), model, **config)
        handle = offload_activations(model, min_bytes=0) if handle is None else handle
        iterate(model, optimizer, range(4), clip=1e4)
        handle.remove()
        iterate(model, optimizer, range(4, 6), clip=1e4)
        optimizer.synchronize()
        return model, optimizer, handle

    expected_model, expected, expected_handle = lived(SMALL)
    with lazily(0 if reentrant else 1):
        model, optimizer, handle = lived(MODES[mode])
    assert_same(expected_model, expected, model, optimizer)
    assert handle.bytes_offloaded == expected_handle.bytes_offloaded > 0
    assert handle.receipt().weight_bytes_fetched == 0


# State dicts and checkpoints


@CLIPPED
def test_state_dicts_of_the_model_in_between(mode, clip):
    """What is read is what the step has made, on the host; what is loaded is what runs next."""

    def life(model, optimizer):
        found = []
        for number in range(5):
            iterate(model, optimizer, [number], clip)
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            found += saved.values()
            if number == 1:
                model.load_state_dict({name: 0.9 * value for name, value in saved.items()})
            if number == 3:
                model.layers[2].load_state_dict(model.layers[1].state_dict())
        return found

    same(life, mode)


@EACH
def test_a_state_dict_holds_no_more_than_its_weights(mode):
    """`torch.save` writes whole storages; a copy does not follow training."""
    model, optimizer = offloaded(config=MODES[mode])
    iterate(model, optimizer, range(3))
    for name, value in model.state_dict().items():
        assert value.untyped_storage().nbytes() == value.nbytes, name
    twin = copy.deepcopy(model)
    optimizer.synchronize()
    before = weights(twin)
    iterate(model, optimizer, range(3, 5))
    assert_same_tree(weights(twin), before)
    assert host_weight_of(twin.layers[0].up.weight) is None
    loss_of(twin, 0).backward()


@EACH
def test_the_state_goes_to_torchs_own_optimizer_and_back(mode):
    def life(model, optimizer):
        iterate(model, optimizer, range(3))
        plain = adamw(model.parameters())
        plain.load_state_dict(snapshot(optimizer))
        before = snapshot(plain)
        optimizer.load_state_dict(plain.state_dict())
        iterate(model, optimizer, range(3, 6))
        return before["state"]

    same(life, mode)


@EACH
def test_an_optimizer_that_has_state_already(mode):
    """It was trained with plain torch, and goes on with its weights on the host."""

    def lived(config):
        model = net()
        plain = adamw(model.parameters())
        iterate(model, plain, range(3))
        optimizer = offstage.offload(plain, model, **config)
        iterate(model, optimizer, range(3, 6))
        optimizer.synchronize()
        return model, optimizer

    expected = lived(SMALL)
    with lazily(0):
        found = lived(MODES[mode])
    assert_same(*expected, *found)


@pytest.mark.parametrize(
    ("mode", "masters"), [("in step", "fp32"), ("under forward", "split"), ("in backward", "split"), ("both", "fp32")]
)
def test_checkpoints_equal_those_of_weights_on_the_device(mode, masters, tmp_path):
    """Saved and saved beside training, loaded into either."""

    def built(config):
        return offloaded(net(dtype=torch.bfloat16), {**config, "master_weights": masters})

    def everything(model, optimizer):
        optimizer.synchronize()
        return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})

    expected = built(SMALL)
    iterate(*expected, range(3), clip=1e4)
    saved = everything(*expected)
    with lazily(1):
        model, optimizer = built(MODES[mode])
        iterate(model, optimizer, range(3), clip=1e4)
        checkpoint.save(tmp_path / "saved", model, optimizer)
        running = checkpoint.async_save(tmp_path / "beside", model, optimizer)
        iterate(model, optimizer, range(3, 5), clip=1e4)
        running.result(60)
        for folder, config in (("saved", SMALL), ("beside", MODES[mode])):
            other = built(config)
            iterate(*other, range(20, 22), clip=1e4)
            checkpoint.load(tmp_path / folder, *other)
            assert_same_tree(everything(*other), saved)
            iterate(*other, range(3, 5), clip=1e4)
            assert_same_tree(everything(*other), everything(model, optimizer))


@CLIPPED
def test_replanned(mode, clip):
    def life(model, optimizer):
        for number, fraction in enumerate([0.5, 1.0, 1.0]):
            iterate(model, optimizer, [2 * number, 2 * number + 1], clip)
            optimizer.replan(fraction=fraction)

    model, _ = same(life, mode)
    assert all(is_on_host(param) for param in model.layers.parameters())


# Weights written by other code


@EACH
def test_weights_written_after_synchronize_win(mode):
    """In place, through `.data`, by another tensor in its place, and after a forward that had no backward."""

    def life(model, optimizer):
        for number in range(8):
            iterate(model, optimizer, [number], clip=1e4 if number < 5 else None)
            if number == 3:
                loss_of(model, 50)
            optimizer.synchronize()
            with torch.no_grad():
                for param in list(model.parameters())[number % 3 :: 3]:
                    if number % 4 == 0:
                        param.mul_(0.9)
                    elif number % 4 == 1:
                        param.data.add_(0.01)
                    elif number % 4 == 2:
                        param.data = 0.9 * param.data
                    else:
                        param.data.copy_(torch.full_like(param, 0.02))

    same(life, mode)


@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("mode", ["in step", "in backward"])
def test_weights_written_after_a_forward_without_backward(mode, layers):
    """Without `overlap_forward` they may be written at any time between steps."""

    def life(model, optimizer):
        for number in range(4):
            iterate(model, optimizer, [number])
            loss_of(model, 50)  # what backward would begin with is still on the device
            for param in model.parameters():
                param.data.mul_(0.9)

    same(life, mode, make=functools.partial(net, lambda: Net(layers)))


@EACH
def test_a_weight_that_changes_its_kind_is_refused(mode):
    model, optimizer = offloaded(config=MODES[mode])
    iterate(model, optimizer, range(2))
    optimizer.synchronize()
    model.double()
    with pytest.raises(ConfigError, match=r"lives on the host as .*float32, and was replaced by .*float64"):
        model(inputs(0).double())


@pytest.mark.parametrize("mode", ["under forward"])
def test_weights_read_in_another_way_are_never_old_ones(mode):
    """A weight is used without its layer's forward while its update may still be due.

    It waits by itself; where it cannot, because nothing is asked, there is one clear error.
    """
    model, optimizer = offloaded(config=MODES[mode])
    for number in range(3):
        iterate(model, optimizer, [number])
    optimizer.synchronize()
    x = inputs(3)
    for layer in model.layers[:3]:  # right after synchronize() it is allowed
        x = x + nn.functional.linear(x, layer.up.weight)
    x.pow(2).mean().backward()
    end_step(optimizer)
    iterate(model, optimizer, [4])
    x = inputs(5)
    for layer in model.layers[:3]:
        with torch._C.DisableTorchFunctionSubclass():
            x = x + nn.functional.linear(x, layer.up.weight)
    with pytest.raises(OffstageError, match=r"was not seen since the last step\(\)"):
        x.pow(2).mean().backward()


@pytest.mark.parametrize("which", [(0,), (1, 2), (5,)], ids=str)
@EACH
def test_weights_read_in_another_way_are_right(mode, which):
    """Also where the update is done on the device, and the host's tensor is not written yet."""

    def life(model, optimizer):
        for number in range(6):
            if number in (3, 5):
                x = inputs(number)
                for layer in which:
                    x = x + nn.functional.linear(x, model.layers[layer].up.weight)
                x.pow(2).mean().backward()
                end_step(optimizer)
            else:
                iterate(model, optimizer, [number])

    same(life, mode)


# What fails


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", [1, 2, 4, 7])
@pytest.mark.parametrize("cue", ["forward", "synchronize", "backward"])
@pytest.mark.parametrize("mode", ["under forward", "both"])
def test_no_room_for_a_layer_can_be_tried_again(mode, cue, at):
    """Updates that were left to the next forward are not lost with it."""
    cues = {
        "forward": lambda model, optimizer: loss_of(model, 50),
        "synchronize": lambda model, optimizer: optimizer.synchronize(),
        "backward": lambda model, optimizer: loss_of(model, 50).backward(),
    }
    fetch, calls = HostLayer._fetch, []

    def has_no_room(layer):
        calls.append(layer)
        if len(calls) == at:
            raise torch.OutOfMemoryError("no room")
        return fetch(layer)

    def life(model, optimizer):
        iterate(model, optimizer, range(3), clip=1e-3)
        if optimizer.config.moves_weights:
            with mock.patch.object(HostLayer, "_fetch", has_no_room), contextlib.suppress(torch.OutOfMemoryError):
                cues[cue](model, optimizer)
            calls.clear()
            optimizer.zero_grad()
        iterate(model, optimizer, range(3, 6), clip=1e-3)

    same(life, mode)


@pytest.mark.parametrize(("where", "error"), [("first", stop), ("layers.3.up", stop), ("layers.3.up", interrupt)])
@EACH
def test_a_forward_that_fails(mode, where, error):
    """What it leaves is cleared away, and weights and gradients of an earlier micro-batch are as before."""

    def life(model, optimizer):
        for number in range(4):
            with optimizer.accumulate():
                loss_of(model, number).backward()
            hook = model.get_submodule(where).register_forward_pre_hook(error)
            with pytest.raises((Stop, KeyboardInterrupt)):
                loss_of(model, 10 + number)
            hook.remove()
            loss_of(model, 20 + number).backward()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            end_step(optimizer, 1e4)

    same(life, mode)


def fail_in_backward(model, number):
    hook = model.layers[2].up.weight.register_hook(stop)
    with pytest.raises(Stop):
        loss_of(model, number).backward()
    hook.remove()


@pytest.mark.parametrize("mode", ["in step", "under forward"])
def test_a_backward_that_fails(mode):
    """Its gradients are zeroed, and training goes on."""

    def life(model, optimizer):
        for number in range(5):
            if number % 2:
                fail_in_backward(model, 10 + number)
                optimizer.zero_grad()
            loss_of(model, number).backward()
            end_step(optimizer)

    same(life, mode, seeds=(None, 0, 1))


@pytest.mark.parametrize("mode", ["in backward", "both"])
def test_a_backward_that_fails_after_updates_loses_the_step(mode):
    """A checkpoint goes on."""
    model, optimizer = offloaded(config=SMALL)
    iterate(model, optimizer, range(6))
    for seed in SEEDS:
        with lazily(seed):
            found, ours = offloaded(config=MODES[mode])
            iterate(found, ours, range(3))
            saved = copy.deepcopy(found.state_dict()), snapshot(ours)
            fail_in_backward(found, 3)
            with pytest.raises(StepLostError, match="A backward failed"):
                ours.step()
            found.load_state_dict(saved[0])
            ours.load_state_dict(saved[1])
            ours.zero_grad()
            iterate(found, ours, range(3, 6))
            ours.synchronize()
        assert_same(model, optimizer, found, ours)


@pytest.mark.parametrize("mode", ["in backward", "both"])
def test_a_backward_that_fails_with_clipping_loses_nothing(mode):
    """Speculative updates are taken back: at the next forward, or when gradients are zeroed."""

    def life(model, optimizer):
        for number in range(6):
            if number in (3, 4):
                fail_in_backward(model, 10 + number)
                if number == 3:
                    optimizer.zero_grad()
                    assert all(torch.isfinite(param).all() for param in model.parameters())
                else:
                    with torch.no_grad():
                        loss_of(model, 0)
                    optimizer.zero_grad()
            loss_of(model, number).backward()
            end_step(optimizer, 1e4)

    same(life, mode)


def iterate_and_wait(model, optimizer, numbers, clip=None):
    iterate(model, optimizer, numbers, clip)
    optimizer.synchronize()


@EACH
@pytest.mark.parametrize(("calls", "model_first"), [(1, False), (4, True), (4, False)])
def test_an_update_that_fails_says_the_step_is_lost(mode, calls, model_first):
    """In backward, in `step()` or in the next forward. A checkpoint goes on, in whichever order it is loaded."""
    model, optimizer = offloaded(config=SMALL)
    iterate(model, optimizer, range(6))
    found, ours = offloaded(config=MODES[mode])
    iterate(found, ours, range(3))
    saved = copy.deepcopy(found.state_dict()), snapshot(ours)
    undo = fail_at(calls, runtime_of(ours).rule, "update", ZeroDivisionError("in the middle"))
    with pytest.raises((StepLostError, ZeroDivisionError)):
        iterate_and_wait(found, ours, range(3, 5))
    undo()
    with pytest.raises(StepLostError, match="load_state_dict"):
        ours.step()
    with pytest.raises(StepLostError):
        ours.state_dict()
    for load in range(2):
        if model_first == (load == 0):
            found.load_state_dict(saved[0])
        else:
            ours.load_state_dict(saved[1])
    ours.zero_grad()
    iterate_and_wait(found, ours, range(3, 6))
    assert_same(model, optimizer, found, ours)


@pytest.mark.parametrize("mode", ["in backward", "both"])
@pytest.mark.parametrize("calls", [1, 4])
def test_a_speculative_update_that_fails_loses_nothing(mode, calls):
    """What backward has updated is taken back."""
    model, optimizer = offloaded(config=SMALL)
    iterate(model, optimizer, range(6), 1e4)
    found, ours = offloaded(config=MODES[mode])
    iterate(found, ours, range(3), 1e4)
    undo = fail_at(calls, runtime_of(ours).rule, "update", ZeroDivisionError("in the middle"))
    with pytest.raises(ZeroDivisionError):
        loss_of(found, 3).backward()
    undo()
    ours.zero_grad()
    iterate(found, ours, range(3, 6), 1e4)
    ours.synchronize()
    assert_same(model, optimizer, found, ours)


@pytest.mark.parametrize("mode", ["in step", "under forward"])
@pytest.mark.parametrize("calls", [(20,), (5, 40)])
def test_ctrl_c_in_an_update_comes_after_it(mode, calls):
    """In `step()`, or in the next forward: a loop that catches it goes on."""
    model, optimizer = offloaded(config=SMALL)
    iterate(model, optimizer, range(6))
    found, ours = offloaded(config=MODES[mode])
    rule, made = runtime_of(ours).rule, []
    update = rule.update

    def interrupting(pieces):
        made.append(len(pieces))
        if len(made) in calls:
            signal.raise_signal(signal.SIGINT)
        update(pieces)

    rule.update = interrupting
    interrupts = 0

    def uninterrupted(action):
        nonlocal interrupts
        try:
            return action()
        except KeyboardInterrupt:
            interrupts += 1
            return None

    for number in range(6):
        loss = None
        while loss is None:
            loss = uninterrupted(functools.partial(loss_of, found, number))
        uninterrupted(loss.backward)
        uninterrupted(ours.step)
        uninterrupted(ours.zero_grad)
    uninterrupted(ours.synchronize)
    assert interrupts == len(calls)
    assert_same(model, optimizer, found, ours)


@pytest.mark.parametrize("mode", ["in backward", "both"])
def test_ctrl_c_in_backward_is_a_backward_that_failed(mode):
    """Said at the next step; with clipping it is taken back."""
    for clip in (None, 1e4):
        model, optimizer = offloaded(config=MODES[mode])
        iterate(model, optimizer, range(3), clip)
        before = weights(model), snapshot(optimizer)
        update = runtime_of(optimizer).rule.update
        runtime_of(optimizer).rule.update = lambda pieces, update=update: (
            signal.raise_signal(signal.SIGINT),
            update(pieces),
        )
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 3).backward()
        del runtime_of(optimizer).rule.update
        if clip is None:
            with pytest.raises(StepLostError, match="A backward failed"):
                optimizer.step()
        else:
            optimizer.zero_grad()
            optimizer.synchronize()
            assert_same_tree((weights(model), snapshot(optimizer)), before)


@EACH
def test_no_memory_for_slots_changes_nothing(mode, monkeypatch):
    def life(model, optimizer):
        iterate(model, optimizer, range(2))
        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "prepare", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
            if "update_in_backward" not in MODES[mode]:
                loss_of(model, 9).backward()
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
                optimizer.zero_grad()
        iterate(model, optimizer, range(2, 4))

    same(life, mode)


@pytest.mark.parametrize("mode", ["in step", "in backward"])
def test_no_memory_for_a_layer_changes_nothing(mode):
    """The forward that finds none raises torch's error; the next one may find some."""

    def life(model, optimizer):
        for number in range(4):
            if optimizer.config.moves_weights:
                full = mock.patch("offstage.weights.host_layer.torch.empty", side_effect=torch.OutOfMemoryError("no"))
                with full, pytest.raises(torch.OutOfMemoryError):
                    loss_of(model, 10 + number)
            iterate(model, optimizer, [number])

    same(life, mode)


# Bad input


def without_a_list():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.two(self.one(x))

    return net(Plain)


BAD = {
    "no model": (net, {"weights": "host", "model": None}, ConfigError, ["needs the model", "offload(optimizer, model"]),
    "a window": (net, {"weights": "host", "window": "all"}, ConfigError, ["contradicts window='all'"]),
    "no state leaves": (net, {"weights": "host", "fraction": 0.0}, ConfigError, ["contradicts weights='host'"]),
    "a share of 2": (net, {"weights": 2.0}, ConfigError, ["a share from 0.0 to 1.0", "found 2.0"]),
    "a word": (net, {"weights": "disk"}, ConfigError, ["'device', 'host'", "found 'disk'"]),
    "a truth": (net, {"weights": True}, ConfigError, ["weights expects", "found True"]),
    "nothing": (net, {"weights": None}, ConfigError, ["weights expects", "found None"]),
    "no layers": (without_a_list, {"weights": "host"}, ConfigError, ["no ModuleList"]),
    "only small weights": (net, {"weights": "host", "min_bytes": "1MiB"}, ConfigError, ["Lower min_bytes"]),
    "no room on the host": (net, {"weights": "host", "host_budget": "128KiB"}, HostMemoryError, ["Raise it to"]),
    "a part of each layer": (
        net,
        {"weights": "host", "device_budget": "10MiB"},
        OffloadIneffectiveError,
        ["moves no weight"],
    ),
}


@EACH
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["by the device", "half by the CPU"])
def test_a_host_budget_is_for_weights_and_state_together(mode, share):
    config = {**MODES[mode], "host_fraction": share}
    model, optimizer = offloaded(config=config)
    iterate(model, optimizer, range(2))
    receipt = optimizer.receipt()
    need = receipt.host_state_bytes + receipt.host_weight_bytes
    if "backward" not in mode and mode != "both":
        need += receipt.host_gradient_bytes
    else:  # the others are used at once
        states = runtime_of(optimizer).places.states
        need += sum(one.nbytes for one in model.layers.parameters() if states[one].placement is Placement.HOST)
    offloaded(config={**config, "host_budget": need})
    with pytest.raises(HostMemoryError, match=r"host_budget of .* of state, weights and gradients\. Raise it"):
        offloaded(config={**config, "host_budget": need - 4096})


def state_of(model):
    """All that `offload` could have changed."""
    hooks = [
        (len(module._forward_pre_hooks), len(module._forward_hooks), len(module._state_dict_pre_hooks))
        for module in model.modules()
    ]
    own = [hook for param in model.parameters() for hook in (param._post_accumulate_grad_hooks or {}).values()]
    tensors = [
        (param.data_ptr(), param.device, param.detach().clone(), is_on_host(param)) for param in model.parameters()
    ]
    return {
        "hooks": hooks,
        "own": [is_ours(hook) for hook in own],
        "tensors": tensors,
        "anchor": getattr(model, "_offstage_weights", None),
        "hosted": [host_weight_of(param) for param in model.parameters()],
    }


@pytest.mark.parametrize("case", BAD)
def test_bad_input_changes_nothing(case):
    make, settings, error, fragments = BAD[case]
    settings = dict(settings)
    model = make()
    given = settings.pop("model", model)
    before, plain = state_of(model), adamw(model.parameters())
    refused(error, lambda: offstage.offload(plain, given, **{**SMALL, **settings}), *fragments)
    assert_same_tree(state_of(model), before)
    iterate(model, plain, range(2))
    model, optimizer = model, offstage.offload(plain, model, **SMALL)
    iterate(model, optimizer, range(2))


@pytest.mark.usefixtures("process_group")
def test_ddp_and_dtensors_are_refused():
    model = net()
    before = state_of(model)
    ddp = DistributedDataParallel(model)
    refused(
        ConfigError, lambda: offstage.offload(adamw(ddp.parameters()), ddp, **HOST), "DistributedDataParallel", "FSDP2"
    )
    mesh = init_device_mesh("cpu", (1,))
    other = net()
    linear = other.layers[1].up
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh, [Replicate()]))
    refused(
        ConfigError, lambda: offstage.offload(adamw(other.parameters()), other, **HOST), "DTensor", "CPUOffloadPolicy"
    )
    after = state_of(model)
    assert_same_tree({**after, "hooks": None, "own": None}, {**before, "hooks": None, "own": None})
    assert not any(is_on_host(param) for param in other.parameters() if type(param) is nn.Parameter)


@pytest.mark.usefixtures("process_group")
def test_ddp_around_the_model_afterwards_is_refused():
    """Gradients that have left are not reduced."""
    model, _optimizer = offloaded()
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        loss_of(DistributedDataParallel(model), 0).backward()


def test_a_model_whose_weights_are_on_the_host_already():
    model = net()
    optimizer = offstage.offload(adamw(model.layers.parameters()), model, **HOST)
    before = state_of(model)
    refused(ConfigError, lambda: offstage.offload(adamw(model.parameters()), model, **HOST), "lives on the host")
    others = [*model.first.parameters(), *model.last.parameters()]
    refused(ConfigError, lambda: offstage.offload(adamw(others), model, **HOST), "live on the host already")
    assert_same_tree(state_of(model), before)
    beside = offstage.offload(adamw(others), model, **SMALL)  # one that leaves weights where they are is fine
    for number in range(2):
        loss_of(model, number).backward()
        for one in (optimizer, beside):
            end_step(one)


def test_hooks_of_other_code_on_gradients_are_refused():
    """They would see the gradient before it is there, or not at all."""
    model, optimizer = offloaded()
    handle = model.layers[1].up.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(ConfigError, match=r"layers\.1\.up\.weight.*lives on the host.*register_hook"):
        loss_of(model, 0)
    handle.remove()
    iterate(model, optimizer, range(2))


# Its end


@CLIPPED
def test_close_gives_ordinary_tensors_back(mode, clip):
    """With the weights of the last step; the model trains on with any optimizer."""
    expected, plain = offloaded(config=SMALL)
    iterate(expected, plain, range(4), clip)
    for seed in SEEDS:
        with lazily(seed):
            model, optimizer = offloaded(config=MODES[mode])
            iterate(model, optimizer, range(4), clip)
            optimizer.close()
        assert_same_tree(weights(model), weights(expected))
        found = state_of(model)
        assert found["hosted"] == [None] * len(found["tensors"])
        assert found["anchor"] is None
        assert not any(sum(counts) for counts in found["hooks"])
        assert not any(is_on_host(param) for param in model.parameters())
        assert all(param.device.type == "cpu" for param in model.parameters())
        iterate(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        refused(OffstageError, lambda model=model, optimizer=optimizer: iterate(model, optimizer, [0]), "was closed")


@EACH
def test_close_between_a_forward_and_its_backward(mode):
    """Weights are where `close()` has left them: where backward needs them, or not."""
    expected = net()
    model, optimizer = offloaded(config=MODES[mode])
    loss, again = loss_of(model, 0), loss_of(model, 1)
    there = host_weights(optimizer).weights
    optimizer.close()
    loss.backward()
    loss_of(expected, 0).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    for weight in there:
        weight.device = torch.device("meta")
    refused(OffstageError, again.backward, "closed, or replanned, between a forward and its backward", "backward first")


@pytest.mark.parametrize("config", [*MODES.values(), {**SMALL, "update_in_backward": True}])
def test_close_gives_gradients_back(config):
    """Those that have left, scaled by what clipping has found; the model trains on with them."""
    expected = net()
    loss_of(expected, 0).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 1e-3)
    for seed in SEEDS:
        with lazily(seed):
            model, optimizer = offloaded(config=config)
            loss_of(model, 0).backward()
            optimizer.clip_grad_norm_(1e-3)
            assert isinstance(model.layers[0].up.weight.grad, LeftGradient)
            optimizer.close()
        for (name, found), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert type(found.grad) is torch.Tensor
            assert torch.equal(found.grad, other.grad), name


@pytest.mark.parametrize("in_a_cycle", ["nothing", "the optimizer", "the model, too"])
@EACH
def test_a_dropped_optimizer_has_made_its_last_update(mode, in_a_cycle):
    """Also those that wait for the next forward, and where nothing but the parameters is kept."""
    expected, plain = offloaded(config=SMALL)
    iterate(expected, plain, range(4))
    for seed in SEEDS:
        with lazily(seed):
            model, optimizer = offloaded(config=MODES[mode])
            iterate(model, optimizer, range(4))
            if in_a_cycle != "nothing":  # found by the garbage collector, which clears weak references first
                optimizer.cycle = optimizer
            if in_a_cycle == "the model, too":
                optimizer.trains, params, model = model, dict(model.named_parameters()), None
                del optimizer
                gc.collect()
                assert_same_tree(params, dict(expected.named_parameters()))
                continue
            del optimizer
            gc.collect()
            assert_same_tree(weights(model), weights(expected))
            with torch.no_grad():
                assert torch.equal(loss_of(model, 0), loss_of(expected, 0))


@EACH
def test_another_optimizer_after_one_that_was_dropped(mode):
    """As in a notebook. One that is still there is named."""

    def life(config):
        model, optimizer = offloaded(config=config)
        iterate(model, optimizer, range(3))
        if config is not SMALL:
            refused(
                ConfigError,
                lambda: offloaded(model, config),
                "another optimizer of offstage's",
                "Call its close() first",
            )
        del optimizer
        gc.collect()
        _, optimizer = offloaded(model, config)
        iterate(model, optimizer, range(3, 6))
        optimizer.synchronize()
        return weights(model)

    expected = life(SMALL)
    for seed in SEEDS:
        with lazily(seed):
            assert_same_tree(life(MODES[mode]), expected)


@pytest.mark.parametrize(
    ("mode", "order", "seed"),
    [
        ("in step", "optimizer first", None),
        ("under forward", "model first", 0),
        ("in backward", "model first", None),
        ("both", "optimizer first", 0),
    ],
)
def test_what_is_dropped_frees_its_memory(mode, order, seed):
    """Model and optimizer together, in either order."""
    with lazily(seed):
        model, optimizer = offloaded(config=MODES[mode])
        iterate(model, optimizer, range(3), clip=1e4)
        layers = host_weights(optimizer).layers
        gone = [weakref.ref(one) for one in (model, optimizer, *layers, *layers[0]._arenas.values())]
        gone += [weakref.ref(arena) for one in runtime_of(optimizer).engines for arena in one.arenas.sets]
        del layers
        if order == "model first":
            del model
            del optimizer
        else:
            del optimizer
            del model
        gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


# What is reported


class Counting(LazyLanes):
    """Counts what is copied, by lane."""

    copied: dict

    def submit(self, lane, work, **arguments):
        for piece in work if isinstance(work, list) else ():
            self.copied[lane] = self.copied.get(lane, 0) + piece.args[0].nbytes
        return super().submit(lane, work, **arguments)


@EACH
@pytest.mark.parametrize(("clip", "micro_batches"), [("none", 1), ("never", 2), ("sometimes", 1), ("sometimes", 2)])
def test_the_receipt_counts_what_was_copied(mode, clip, micro_batches):
    """Up and down, and each step's by what it was."""
    copied = {}

    def lanes(device):
        made = Counting(device, seed=1)
        made.copied = copied
        return made

    with use_lanes(lanes):
        model, optimizer = offloaded(config=MODES[mode])
        by_step = []
        for step in range(5):
            for number in range(micro_batches):
                loss = loss_of(model, 10 * step + number) * (1e-3 if step % 2 else 1.0)
                with optimizer.accumulate() if number < micro_batches - 1 else contextlib.nullcontext():
                    loss.backward()
            clip_to(optimizer, {"none": None, "never": 1e4, "sometimes": 1e-2}[clip])
            end_step(optimizer)
            by_step.append(optimizer.receipt().moved)
            up = copied.get(Lane.FETCH, 0) + copied.get(Lane.WEIGHTS_UP, 0)
            receipt = optimizer.receipt()
            assert (receipt.total_bytes_fetched, receipt.total_bytes_stored) == (up, copied.get(Lane.STORE, 0))
            assert (receipt.bytes_fetched, receipt.bytes_stored) == (by_step[-1].up, by_step[-1].down)
        # Some of the last step is still to come where it was left to the next forward; speculation leaves nothing.
        hits_only = clip != "none" and not receipt.speculation_misses
        nothing_left = mode in ("in step", "in backward") or (mode == "both" and hits_only)
        if nothing_left:
            assert sum(one.up for one in by_step) == receipt.total_bytes_fetched
            assert sum(one.down for one in by_step) == receipt.total_bytes_stored
        optimizer.synchronize()
    everything = sum(param.nbytes for param in model.layers.parameters())
    total = functools.reduce(lambda a, b: a + b, by_step)
    runtime = runtime_of(optimizer)
    hits, misses = receipt.speculation_hits, receipt.speculation_misses
    assert receipt.host_weight_bytes == host_weights(optimizer).host_bytes
    assert receipt.host_weight_bytes >= everything * (2 if runtime.speculation.possible else 1)
    assert receipt.host_gradient_bytes == sum(one.transport.gradients.nbytes for one in runtime.engines)
    if not misses and nothing_left:
        assert total.weights_down == 5 * everything
        assert total.state_down == pytest.approx(5 * sum(held.nbytes for held in runtime.all_states()), rel=0.03)
    assert (hits > 0) == ("update_in_backward" in MODES[mode] and clip != "none")
    text = str(receipt)
    assert "weights on the host" in text
    assert "gradients up / down" in text


@EACH
def test_the_bytes_of_a_steady_step(mode):
    """Not clipped: weights up twice less what waits on the device, down once; gradients only where they must."""
    model, optimizer = offloaded(net(lambda: Net(8)), MODES[mode])
    iterate(model, optimizer, range(6))
    moved = optimizer.receipt().moved
    everything = sum(param.nbytes for param in model.layers.parameters())
    state = sum(held.nbytes for held in runtime_of(optimizer).all_states())
    assert moved.state_up == moved.state_down == pytest.approx(state, rel=0.03)  # with gaps between parameters
    assert everything <= moved.weights_up <= 3 * everything
    assert moved.weights_down == everything
    late = {number for number in range(8) if "update_in_backward" not in MODES[mode]}
    late |= set(left_to_forward(8)) if mode == "both" else set()
    assert mode != "both" or late
    leaving = sum(param.nbytes for number in late for param in model.layers[number].parameters())
    assert moved.gradients_up == moved.gradients_down == leaving
    assert optimizer.receipt().host_gradient_bytes == leaving


@pytest.mark.parametrize("weights_on", ["device", "host"])
@pytest.mark.parametrize("clip", [None, 1e4], ids=["not clipped", "clipped"])
def test_the_first_iteration_keeps_few_gradients_on_the_device(weights_on, clip):
    """No more than the later ones: they leave for the host while it is learned which are final."""
    model = net(lambda: Net(8))
    matrices = [layer.up.weight for layer in model.layers]
    seen, most = [], []

    def look(param, gradient):
        seen.append(StorageWeakRef(gradient.untyped_storage()))
        most.append(sum(not storage.expired() for storage in seen))

    for param in matrices:
        param.register_hook(functools.partial(look, param))
    optimizer = offstage.offload(adamw(model.parameters()), model, **{**BACKWARD, "weights": weights_on})
    peaks = []
    for number in range(4):
        seen.clear()
        most.clear()
        loss_of(model, number).backward()
        assert len(most) == len(matrices)
        peaks.append(max(most))
        end_step(optimizer, clip)
    assert peaks[0] <= len(matrices) / 2
    assert peaks[0] <= max(peaks[1:]) + 4
