# SPDX-License-Identifier: Apache-2.0
"""Saved tensors that are made again instead of moved: the same bits, and what they are made of moves once."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offstage.activations import offload_activations
from offstage.errors import OffstageError
from tests.test_activations import SEEDS, WIDTH, Stack, assert_same, gradients, on_lanes

TOKENS = 6
FLOAT = 4


class Gated(nn.Module):
    """What most language models have between attention and attention."""

    def __init__(self, hidden=4 * WIDTH):
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Gelu(nn.Module):
    def __init__(self, approximate="none"):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.approximate = approximate

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x), approximate=self.approximate))


class Scaled(nn.Module):
    """Products with parameters and with themselves, of products, of broadcast factors; a square; a product twice."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.one(x) * self.scale
        z = (y * y) * y.mean(-1, keepdim=True)
        return x + self.other(z) + self.one(z) * self.other(y.transpose(0, 1)).transpose(0, 1)


class Written(nn.Module):
    """Results that are written to: after they were saved by none, and views of larger ones."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = F.silu(self.one(x))
        y.mul_(2)
        both = torch.cat([self.one(x), self.one(x)], -1)
        both[..., :WIDTH] *= 3
        z = F.silu(self.one(x), inplace=True)
        return x + self.other(y) + self.other(z) + self.other(both.sin()[..., :WIDTH])


class Inside(nn.Module):
    """A product whose factors another checkpoint keeps."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.other(checkpoint(lambda y: self.one(y) * self.other(y), x, use_reentrant=False))


MODELS = {
    "gated": Gated,
    "gelu": Gelu,
    "gelu, tanh": lambda: Gelu("tanh"),
    "products": Scaled,
    "written to": Written,
    "a checkpoint inside": Inside,
}
CONFIGS = {"all": {"keep_last": 0}, "two layers": {"layers": 2}, "a half": {"fraction": 0.5}}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_gradients(model, config, seed):
    def make():
        return Stack(MODELS[model])

    expected, _ = gradients(make, None)
    with on_lanes(seed):
        found, handle = gradients(make, CONFIGS[config])
        assert_same(found, expected)
        assert bool(handle.receipt().bytes_remade) is (model not in ("written to", "a checkpoint inside"))


def one_pass(layers, config=None, tokens=TOKENS):
    torch.manual_seed(0)
    model = Stack(layers, 3)
    handle = offload_activations(model, min_bytes=0, keep_last=0, **config or {})
    loss = model(torch.randn(1, tokens, WIDTH))
    return model, handle, loss


@pytest.mark.parametrize("seed", SEEDS)
def test_what_leaves_and_what_does_not(seed):
    with on_lanes(seed):
        _, handle, loss = one_pass(Gated)
        receipt = handle.receipt()
        hidden = TOKENS * 4 * WIDTH * FLOAT
        assert receipt.bytes_left == 3 * (TOKENS * WIDTH * FLOAT + 2 * hidden)  # the input; gate and up together
        assert receipt.bytes_remade == 3 * 2 * hidden  # silu(gate), and the product
        assert "made again" in str(receipt)
        loss.backward()
        # Gate and up are asked for five times, by three operations, and come back once.
        assert handle.bytes_returned <= receipt.bytes_left


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_returns_twice(seed):
    """Whatever is made of it: a second way over the link would cost what making again was to save."""
    with on_lanes(seed):
        for layers in MODELS.values():
            _, handle, loss = one_pass(layers)
            loss.backward()
            assert handle.bytes_returned <= handle.bytes_left
            del loss
            assert [side.here_bytes for side in handle._sides.values()] == [0]


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_twice_and_double_backward(seed):
    def run(offload):
        torch.manual_seed(0)
        model = Stack(Gated)
        handle = offload_activations(model, min_bytes=0, keep_last=0) if offload else None
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


def test_it_outlives_what_it_is_made_of():
    """A second loss that needs no gradient of the trunk, after the trunk's backward."""

    class Trunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.head, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            y = F.silu(self.one(x))
            return self.head(y), self.other(y)

    def run(offload):
        torch.manual_seed(0)
        model = nn.ModuleList([Trunk()])
        model.forward = lambda x: model[0](x)
        handle = offload_activations(model, min_bytes=0, layers=[model[0]], keep_last=0) if offload else None
        first, second = model(torch.randn(3, WIDTH))
        if handle is not None:
            assert handle.receipt().bytes_remade
        first.sum().backward()
        return [model[0].one.weight.grad, *torch.autograd.grad(second.sum(), [model[0].other.weight])]

    assert_same(run(True), run(False))


def test_autocast():
    def run(config):
        torch.manual_seed(0)
        model = Stack(Gated)
        handle = offload_activations(model, min_bytes=0, keep_last=0) if config else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(2, 3, WIDTH))
            loss.backward()  # with autocast on: what is made again is not cast again
        assert handle is None or handle.receipt().bytes_remade
        return [param.grad for param in model.parameters()]

    assert_same(run(True), run(False))


def test_a_factor_that_was_changed_is_refused():
    """As autograd would: the product would not be the one of forward."""
    model, _, loss = one_pass(Scaled)
    with torch.no_grad():
        model.layers[0].scale.add_(1)
    with pytest.raises(OffstageError, match=r"changed in place after it was saved \(version 1, expected 0\)"):
        loss.backward()


def test_a_parameter_that_was_changed_is_refused():
    model, _, loss = one_pass(Gated)
    with torch.no_grad():
        model.last.weight.add_(1)  # of no layer: what autograd saves of it comes to the hooks as well
    with pytest.raises(OffstageError, match="changed in place"):
        loss.backward()


def test_a_forward_without_backward_leaves_nothing():
    """Small outputs that an operation saves itself do not keep it alive, nor what it knows."""

    class Small(nn.Module):
        def forward(self, x):
            return x + torch.tanh(x.mean(-1, keepdim=True))

    torch.manual_seed(0)
    model = Stack(Small)
    offload_activations(model, min_bytes=TOKENS * FLOAT + 1)
    kept = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, x, y: kept.append(StorageWeakRef(y.untyped_storage())))
    model(torch.randn(TOKENS, WIDTH))
    gc.collect()
    assert len(kept) == 5
    assert all(reference.expired() for reference in kept)


def test_fraction_of_nothing():
    _, handle, loss = one_pass(Gated, {"fraction": 0.0})
    assert not handle.receipt().bytes_remade
    loss.backward()
    assert not handle.bytes_left
