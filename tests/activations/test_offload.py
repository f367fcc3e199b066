# SPDX-License-Identifier: Apache-2.0
"""Activations that leave and return: the same gradients, bit for bit, on lanes that run at once and on late ones."""

import contextlib
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offstage.activations.offload import offload_activations
from offstage.config import ActivationConfig
from offstage.errors import ConfigError, HostMemoryError, OffstageError
from tests.support.training import lazily

SEEDS = [None, 0, 1]
WIDTH = 16


class Block(nn.Module):
    """Attention-like: views of one projection, an expanded tensor, a transposed one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        scale = x.mean(-1, keepdim=True).expand_as(x)
        return x + self.out(weights @ v) * torch.sigmoid(scale)


class Stack(nn.Module):
    """Layers in a ModuleList, called one after the other."""

    def __init__(self, make, count=5):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(count))
        self.last = nn.Linear(WIDTH, 3)

    def call(self, layer, x):
        return layer(x)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.last(x).logsumexp(-1).sum()


class Checkpointed(Stack):
    reentrant = False

    def call(self, layer, x):
        return checkpoint(layer, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        y.relu_()
        z = y.view(-1, 4, WIDTH // 4).transpose(1, 2)
        return x + (z * z[:, :1]).transpose(1, 2).reshape(x.shape)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.norm(self.convolution(x.reshape(-1, 1, WIDTH)))
        return x + F.max_pool1d(y, 3, 1, 1).mean(1).view(x.shape)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.zeros_like(x[:, 0])
        states = []
        for position in range(x.shape[1]):
            hidden = self.cell(x[:, position], hidden)
            states.append(hidden)
        return torch.stack(states, 1)


class Experts(nn.Module):
    """Tokens go to some experts; others get none."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores, chosen = self.router(flat).softmax(-1)[:, :3].max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * scores[rows, None])
        return x + out.view(x.shape)


def tied():
    block = Block()
    return lambda: block


MODELS = {
    "transformer": lambda: Stack(Block),
    "checkpointed": lambda: Checkpointed(Block),
    "checkpointed, reentrant": lambda: Reentrant(Block),
    "in place, views": lambda: Stack(InPlace),
    "convolutions": lambda: Stack(Convolution),
    "recurrent": lambda: Stack(Recurrent),
    "experts": lambda: Stack(Experts),
    "one layer called five times": lambda: Stack(tied()),
}
CONFIGS = {
    "all": {},
    "two layers": {"layers": 2},
    "a half": {"fraction": 0.5},
    "two ahead, none kept": {"prefetch": 2, "keep_last": 0},
}


def gradients(make, config, iterations=3):
    torch.manual_seed(0)
    model = make()
    handle = offload_activations(model, min_bytes=0, **config) if config is not None else None
    found = []
    for number in range(iterations):
        model.zero_grad()
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2, 3 + number, WIDTH, generator=generator, requires_grad=True)
        loss = model(x)
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found, handle


def assert_same(left, right):
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def on_lanes(seed):
    return contextlib.nullcontext() if seed is None else lazily(seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_gradients(model, config, seed):
    expected, _ = gradients(MODELS[model], None)
    with on_lanes(seed):
        found, handle = gradients(MODELS[model], CONFIGS[config])
    assert_same(found, expected)
    if config != "a half":
        assert handle.bytes_offloaded > 0
        assert handle.bytes_returned > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_input_of_the_last_layer_leaves_with_either_checkpointing(seed):
    """Reentrant checkpointing saves it when no other layer follows."""
    offloaded, returned = [], []
    for make in (Checkpointed, Reentrant):
        with on_lanes(seed):
            _, handle = gradients(lambda make=make: make(Block), {"keep_last": 0})
        offloaded.append(handle.receipt().bytes_offloaded)
        returned.append(handle.bytes_returned)
    assert offloaded[0] == offloaded[1] > 0
    assert returned[0] == returned[1] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches_in_flight(seed):
    """Forwards and backwards interleaved as in a pipeline under 1F1B."""

    def run(config):
        torch.manual_seed(0)
        model = Stack(Block)
        if config is not None:
            model.handle = [offload_activations(model, min_bytes=0, **config)]
        losses = []
        for number in range(5):
            generator = torch.Generator().manual_seed(number)
            losses.append(model(torch.randn(2, 3, WIDTH, generator=generator)))
            if number >= 2:
                losses.pop(0).backward()
        for loss in losses:
            loss.backward()
        return [param.grad for param in model.parameters()]

    expected = run(None)
    with on_lanes(seed):
        assert_same(run({}), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_twice_and_double_backward(seed):
    def run(offload):
        torch.manual_seed(0)
        model = Stack(Block)
        handle = offload_activations(model, min_bytes=0) if offload else None
        x = torch.randn(2, 3, WIDTH, requires_grad=True)
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        del handle
        return [first.detach(), second, *(param.grad for param in model.parameters())]

    expected = run(False)
    with on_lanes(seed):
        assert_same(run(True), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_iterations_that_are_given_up(seed):
    """A forward without backward, one that raises, evaluation: what they leave is cleared away."""
    expected, _ = gradients(MODELS["transformer"], None)
    with on_lanes(seed):
        torch.manual_seed(0)
        model = Stack(Block)
        handle = offload_activations(model, min_bytes=0)
        x = torch.randn(2, 3, WIDTH)
        model(x)
        with torch.no_grad():
            before = handle.bytes_offloaded
            model(x)
            assert handle.bytes_offloaded == before
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.randn(2, 3, WIDTH + 1))
        model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        model.layers[3]._forward_pre_hooks.popitem()
        gc.collect()
        found = []
        for number in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(2, 3 + number, WIDTH, generator=generator, requires_grad=True)
            loss = model(x)
            loss.backward()
            found += [loss.detach(), x.grad, *(param.grad.clone() for param in model.parameters())]
        gc.collect()
        handle._begin()  # what is left of the last one is cleared away by the next
        handle._end()
        assert sum(device.pool.used_bytes for device in handle._devices.values()) == 0
    assert_same(found, expected)


def test_autocast_and_accumulation():
    def run(offload):
        torch.manual_seed(0)
        model = Stack(Block)
        handle = offload_activations(model, min_bytes=0) if offload else None
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(2, 3, WIDTH, generator=generator))
            loss.backward()
        del handle
        return [param.grad for param in model.parameters()]

    assert_same(run(True), run(False))


def test_the_pool_stays_as_it_is():
    """Sequence lengths vary 1:8; after the longest ones have been seen nothing grows."""
    torch.manual_seed(0)
    model = Stack(Block)
    handle = offload_activations(model, min_bytes=0)
    sizes = []
    for number in range(60):
        length = 1 + (number * 5) % 8
        model(torch.randn(2, 4 * length, WIDTH)).backward()
        sizes.append(handle.host_bytes)
    assert sizes[20] == sizes[-1]


def test_weights_stay_and_a_storage_leaves_once():
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.register_buffer("mask", torch.rand(WIDTH))

        def forward(self, x):
            y = x @ self.weight  # saves x and the weight
            return (y * y.t().t() * self.mask).sin() + x  # saves y twice, and the buffer

    torch.manual_seed(0)
    model = nn.ModuleList(Saves() for _ in range(2))
    model.forward = lambda x: model[1](model[0](x)).sum()
    handle = offload_activations(model, min_bytes=0, layers=[model[0]])
    x = torch.randn(WIDTH, WIDTH)
    model(x).backward()
    square = WIDTH * WIDTH * 4
    assert handle.bytes_offloaded == 3 * square  # x, y, and the argument of sin


def test_a_saved_tensor_that_is_changed_in_place_is_refused():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.linear(x).exp()  # saves its result
            y.add_(1)
            return y

    model = Stack(Changes)
    with pytest.raises(RuntimeError, match="inplace"):
        model(torch.randn(2, 3, WIDTH)).backward()
    offload_activations(model, min_bytes=0)
    with pytest.raises((OffstageError, RuntimeError), match=r"changed in place|inplace"):
        model(torch.randn(2, 3, WIDTH)).backward()


def test_removing_it_leaves_nothing_behind():
    model = Stack(Block)
    before = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    with offload_activations(model, min_bytes=0) as handle:
        model(torch.randn(2, 3, WIDTH)).backward()
        left = handle.bytes_offloaded
    model(torch.randn(2, 3, WIDTH)).backward()
    assert handle.bytes_offloaded == left
    assert {name: len(module._forward_pre_hooks) for name, module in model.named_modules()} == before
    reference = weakref.ref(handle)
    del handle
    gc.collect()
    assert reference() is None
    offload_activations(model).remove()


OPERATIONS = (
    lambda a, b: a * b,
    lambda a, b: a + b.sin(),
    lambda a, b: torch.cat([a, b], 0)[: len(a)],
    lambda a, b: a.t().contiguous().t() * b,
    lambda a, b: a.clone().tanh_(),
    lambda a, b: a.mean(0, keepdim=True).expand_as(b) * b,
    lambda a, b: checkpoint(lambda u, v: (u * v).cos(), a, b, use_reentrant=False),
    lambda a, b: F.silu(a) * b.t().t(),
    lambda a, b: F.gelu(a).reshape(-1)[: b.numel()].view_as(b) * b,
)
PLACES = st.integers(0, 30)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), PLACES, PLACES), min_size=1, max_size=12), st.booleans())
def test_random_graphs(operations, late):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

        def forward(self, x):
            values = [x, x * self.weight]
            for kind, left, right in operations:
                a, b = values[left % len(values)], values[right % len(values)]
                values.append(OPERATIONS[kind](a, b))
            return sum(values)

    def run(offload):
        torch.manual_seed(0)
        model = nn.ModuleList(Graph() for _ in range(3))
        model.forward = lambda x: model[2](model[1](model[0](x))).sum()
        handle = offload_activations(model, min_bytes=0, keep_last=0) if offload else None
        x = torch.randn(3, WIDTH, requires_grad=True)
        model(x).backward()
        del handle
        return [x.grad, *(param.grad for param in model.parameters())]

    expected = run(False)
    with on_lanes(0 if late else None):
        found = run(True)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) or (a.isnan() == b.isnan()).all()


BAD = [
    ({"layers": 5}, "the model has 5 layers"),
    ({"layers": -1}, "at least 0"),
    ({"layers": "some"}, "number of layers, or a list"),
    ({"layers": [nn.Linear(2, 2)]}, "not part of the model"),
    ({"fraction": 1.5}, "from 0 to 1"),
    ({"keep_last": -1}, "at least 0"),
    ({"prefetch": 0}, "at least 1"),
    ({"min_bytes": "much"}, "a number of bytes or a size"),
    ({"prefetsch": 1}, "did you mean 'prefetch'"),
    (
        {"layers": "auto"},
        r"found layers='auto'\. Use offstage\.fit\(model, optimizer, device_peak=\.\.\.\), which fits",
    ),
    ({"device_peak": "8GiB"}, r"found device_peak='8GiB'\. Use offstage\.fit\(model, optimizer, device_peak="),
    ({"layers": "auto", "device_peak": "8GiB"}, r"Use offstage\.fit\(model, optimizer, device_peak="),
]


@pytest.mark.parametrize(("config", "message"), BAD)
def test_bad_input(config, message):
    with pytest.raises(ConfigError, match=message):
        offload_activations(Stack(Block), **config)


def test_other_bad_input():
    with pytest.raises(ConfigError, match=r"expects a torch\.nn\.Module; found int"):
        offload_activations(3)
    with pytest.raises(ConfigError, match="has no ModuleList"):
        offload_activations(nn.Linear(2, 2))
    model = Stack(Block)
    handle = offload_activations(model)
    with pytest.raises(ConfigError, match="offloaded already"):
        offload_activations(model)
    handle.remove()
    offload_activations(model, ActivationConfig(layers=2), prefetch=2)
    with pytest.raises(ConfigError, match=r"offstage\.fit\(model, optimizer, device_peak="):
        ActivationConfig(device_peak="8GiB")


def test_host_budget():
    model = Stack(Block)
    handle = offload_activations(model, min_bytes=0, host_budget="2KiB")
    with pytest.raises(HostMemoryError, match=r"host_budget allows 2\.0 KiB"):
        model(torch.randn(2, 3, WIDTH))
    handle.remove()
    model(torch.randn(2, 3, WIDTH)).backward()
