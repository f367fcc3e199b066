# SPDX-License-Identifier: Apache-2.0
"""Saved tensors that are remade instead of moved: the same bits, and what they are remade from moves once."""

import contextlib
import gc
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offstage.activations.offload import offload_activations
from offstage.errors import OffloadIneffectiveError, OffstageError
from tests.activations.test_offload import SEEDS, WIDTH, Stack, assert_same, gradients, on_lanes

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


class Apart(nn.Module):
    """The same as `Gated`, from two linear layers; the product's factors in another order."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x) * F.silu(self.gate(x)))


class Turned(nn.Module):
    """Parts that are turned round: with one token or one sequence some of their strides say nothing."""

    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        one, other = (part.transpose(0, 1) for part in self.both(x).chunk(2, -1))
        return x + self.out(F.silu(one) * other).transpose(0, 1)


class Halves(nn.Module):
    """A product of the two halves of what one linear layer has made, and a square of another."""

    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        one, other = self.both(x).chunk(2, -1)
        h = self.out(x)
        return x + self.out(one * other) + self.out(h * h)


MODELS = {
    "gated": Gated,
    "gated, of two": Apart,
    "halves": Halves,
    "turned": Turned,
    "gelu": Gelu,
    "gelu, tanh": lambda: Gelu("tanh"),
    "products": Scaled,
    "written to": Written,
    "a checkpoint inside": Inside,
}
NOTHING_REMADE = ("written to", "a checkpoint inside", "turned")
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
        assert bool(handle.receipt().bytes_remade) is (model not in NOTHING_REMADE)


def one_pass(layers, config=None, tokens=TOKENS):
    torch.manual_seed(0)
    model = Stack(layers, 3)
    handle = offload_activations(model, min_bytes=0, keep_last=0, **config or {})
    model(torch.randn(1, tokens, WIDTH)).backward()  # nothing is remade without a proof
    handle.bytes_offloaded = handle.bytes_returned = 0
    loss = model(torch.randn(1, tokens, WIDTH))
    return model, handle, loss


@pytest.mark.parametrize("seed", SEEDS)
def test_what_leaves_and_what_does_not(seed):
    with on_lanes(seed):
        _, handle, loss = one_pass(Gated)
        receipt = handle.receipt()
        hidden = TOKENS * 4 * WIDTH * FLOAT
        assert receipt.bytes_offloaded == 3 * (TOKENS * WIDTH * FLOAT + 2 * hidden)  # the input; gate and up together
        assert receipt.bytes_remade == 3 * 2 * hidden  # silu(gate), and the product
        assert "remade" in str(receipt)
        loss.backward()
        # Gate and up are asked for five times, by three operations, and come back once.
        assert handle.bytes_returned <= receipt.bytes_offloaded


@pytest.mark.parametrize("step", ["remaking.Recipe.make", "proofs._words"], ids=["to remake it", "to compare it"])
def test_no_memory_to_try(step, caplog, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("2 GiB are free, 3 GiB were asked for")

    def make():
        return Stack(Gated)

    expected, _ = gradients(make, None)
    monkeypatch.setattr(f"offstage.activations.{step}", fail)
    found, handle = gradients(make, {"keep_last": 0})
    assert_same(found, expected)
    assert not handle.receipt().bytes_remade
    assert "moves like everything else: 2 GiB are free" in caplog.text


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)])
def test_strides_that_say_nothing(shape):
    def run(offload):
        torch.manual_seed(0)
        model = Stack(Turned, 3)
        handle = offload_activations(model, min_bytes=0, keep_last=0) if offload else None
        for _ in range(3):
            model(torch.randn(*shape, WIDTH)).backward()
        assert handle is None or handle.receipt().bytes_remade
        return [param.grad for param in model.parameters()]

    assert_same(run(True), run(False))


class Remembers(Gated):
    """Keeps what its linear layer has made where user code finds it."""

    def forward(self, x):
        self.hidden = self.gate_up(x)
        gate, up = self.hidden.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@pytest.mark.parametrize("removed", [False, True])
def test_each_time_it_is_remade_it_is_compared(removed):
    """Inputs that change unseen between two backwards; and after `remove()`, when no forward reads the answer."""
    model, handle, loss = one_pass(Remembers, {"fraction": 1e-9})  # they stay on the device
    loss.backward(retain_graph=True)
    for layer in model.layers:
        layer.hidden.data.mul_(2)
    if removed:
        handle.remove()
    else:
        loss.backward()
    with pytest.raises(OffstageError, match=r"what (Mul|Silu) has made in a Remembers, was written to without"):
        loss.backward() if removed else iterate(model, torch.randn(1, TOKENS, WIDTH), 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_returns_twice(seed):
    """Whatever is remade from it: a second way over the link would cost what remaking was to save."""
    with on_lanes(seed):
        for layers in MODELS.values():
            _, handle, loss = one_pass(layers)
            loss.backward()
            assert handle.bytes_returned <= handle.bytes_offloaded
            del loss
            assert [device.here_bytes for device in handle._devices.values()] == [0]


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_twice_and_double_backward(seed):
    def run(offload):
        torch.manual_seed(0)
        model = Stack(Gated)
        handle = offload_activations(model, min_bytes=0, keep_last=0) if offload else None
        found = []
        for _ in range(2):  # moved, and remade
            x = torch.randn(2, 3, WIDTH, requires_grad=True)
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), x)
            found += [first.detach(), second]
        assert handle is None or handle.bytes_remade
        return [*found, *(param.grad for param in model.parameters())]

    expected = run(False)
    with on_lanes(seed):
        assert_same(run(True), expected)


# What is not remade


class Clamped(nn.Module):
    """Results that are written to without autograd's knowledge, in two ways."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = F.silu(self.one(x))
        y.data.clamp_(-0.1, 0.1)
        z = self.one(x) * self.other(x)
        z.detach().numpy()[:] += 1
        return x + self.other(y) + self.one(z) + self.other(F.gelu(self.one(x)))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_written_to_unseen_is_moved(seed, caplog):
    """Found in the first backward, and logged; what is not written to is remade from then on."""

    def make():
        return Stack(Clamped)

    expected, _ = gradients(make, None, iterations=4)
    with on_lanes(seed):
        found, handle = gradients(make, {"keep_last": 0}, iterations=4)
    assert_same(found, expected)
    assert handle.receipt().bytes_remade == 5 * 2 * 6 * WIDTH * FLOAT  # gelu, of five layers
    warnings = [record.getMessage() for record in caplog.records if "not made again" in record.getMessage()]
    assert sorted(text.split(" has made in a ")[0].split()[-1] for text in warnings) == ["Mul", "Silu"]
    assert all("Clamped" in text for text in warnings)


class Writes(nn.Module):
    """One of its results may be written to unseen; which, and whether the others are in its way, can be changed."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.factor = 1.0
        self.deep = False

    def forward(self, x):
        a, b = self.one(x), self.other(x)
        if self.deep:  # made from two others, which is too deep once those are remade themselves
            x = x + self.last(F.silu(a) * b * b)
        y = a * b
        if self.training:
            y.data.mul_(self.factor)
        return x + self.last(y)


def lives(seed, *changes, config=None):
    """Gradients of the same life with offload and without, with `changes` before each iteration."""
    found = {}
    for offload in (False, True):
        with on_lanes(seed):
            torch.manual_seed(0)
            model = Stack(Writes)
            handle = offload_activations(model, min_bytes=0, keep_last=0, **config or {}) if offload else None
            found[offload] = []
            for number, change in enumerate(changes):
                change(model)
                model.zero_grad()
                generator = torch.Generator().manual_seed(number)
                model(torch.randn(2, 4, WIDTH, generator=generator)).backward()
                found[offload] += [param.grad.clone() for param in model.parameters()]
    return found[True], found[False], handle


def same(model):
    """No change."""


def writing(factor, deep=False):
    def change(model):
        for layer in model.layers:
            layer.factor, layer.deep = factor, deep

    return change


def zeroed(model):
    for layer in model.layers:
        nn.init.zeros_(layer.one.weight)
        nn.init.zeros_(layer.one.bias)


def filled(model):
    for layer in model.layers:
        nn.init.constant_(layer.one.weight, 0.1)


def evaluating(model):
    model.eval()


def training(model):
    model.train()


CHANGES = {
    "another way through the layer": (writing(0.5, deep=True), same, writing(0.5), same, writing(0.5, deep=True), same),
    "from the second iteration on it is too deep": (writing(0.5, deep=True), same, same, same),
    "zeros at first": (writing(0.5), zeroed, same, filled, same, same),
    "zeros in the first iteration": (lambda model: (writing(0.5)(model), zeroed(model)), same, filled, same, same),
    "evaluated first": (lambda model: (writing(0.5)(model), evaluating(model)), same, training, same, evaluating, same),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("changes", CHANGES)
def test_a_proof_holds_for_what_was_proven(changes, seed):
    found, expected, handle = lives(seed, *CHANGES[changes])
    assert_same(found, expected)
    handle.remove()  # everything was looked at


def iterate(model, x, iterations):
    for _ in range(iterations):
        model(x).backward()


@pytest.mark.parametrize("seed", SEEDS)
def test_later_writes_are_found(seed):
    """Two forwards later, since the host does not wait for the answer; from then on it moves."""
    with on_lanes(seed):
        torch.manual_seed(0)
        model = Stack(Writes)
        handle = offload_activations(model, min_bytes=0, keep_last=0)
        x = torch.randn(2, 4, WIDTH)
        iterate(model, x, 3)
        assert handle.receipt().bytes_remade
        writing(0.5)(model)
        with pytest.raises(OffstageError, match=r"what Mul has made in a Writes, was .* That did not"):
            iterate(model, x, 3)
        for offloaded in (True, False):
            model.zero_grad()
            model(x).backward()
            if offloaded:
                found = [param.grad.clone() for param in model.parameters()]
                handle.remove()
        assert_same(found, [param.grad for param in model.parameters()])


def test_the_last_iteration_is_looked_at_when_it_ends():
    torch.manual_seed(0)
    model = Stack(Writes)
    handle = offload_activations(model, min_bytes=0, keep_last=0)
    for factor in (1.0, 1.0, 0.5):
        writing(factor)(model)
        model(torch.randn(2, 4, WIDTH)).backward()
    with pytest.raises(OffstageError, match="without autograd's knowledge"):
        handle.remove()
    offload_activations(model, min_bytes=0).remove()  # it was taken off all the same


def test_a_verdict_against_it_stays():
    """Micro-batches in flight: one shows that it is written to, another, tried before, has nothing to show."""
    torch.manual_seed(0)
    model = Stack(Writes)
    handle = offload_activations(model, min_bytes=0, keep_last=0)
    writing(0.5)(model)
    first = model(torch.randn(2, 4, WIDTH))
    writing(1.0)(model)
    second = model(torch.randn(2, 4, WIDTH))
    first.backward()
    model(torch.randn(2, 4, WIDTH))
    second.backward()
    model(torch.randn(2, 4, WIDTH)).backward()
    assert not handle.receipt().bytes_remade


def test_chains_are_not_followed_to_their_end():
    """Every result would be made from all before it."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = f = self.factor(x)
            for _ in range(300):
                y = y * f
            z = f
            for _ in range(20):
                z = z * z
            return x + y + z

    def make():
        return Stack(Chain)

    expected, _ = gradients(make, None)
    found, handle = gradients(make, {"keep_last": 0})
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert handle.bytes_remade
    assert handle.bytes_returned <= handle.bytes_offloaded


class Complex(nn.Module):
    """Numbers that are not those in memory until they are read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        z = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)))
        w = z.conj() * (0.1 * z).cos()
        return x + 0.1 * torch.view_as_real((w * z.conj().imag) * w.conj()).flatten(-2).tanh()


class Unsafe(nn.Module):
    """Parts of one storage whose versions are counted apart."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x):
        a, b, c, d = self.linear(x).unsafe_chunk(4, -1)
        a = a.sigmoid_() * b.tanh_()  # these are saved, and more than a half of the storage with them
        return x + a * (c.sigmoid_() + d.tanh_())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layer", [Complex, Unsafe])
def test_what_is_not_in_memory_as_it_is_saved(layer, seed):
    def make():
        return Stack(layer)

    expected, _ = gradients(make, None)
    with on_lanes(seed):
        found, handle = gradients(make, {"keep_last": 0})
    assert_same(found, expected)
    assert handle.bytes_offloaded


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_on_the_host_come_as_often_as_before(seed):
    """And as many activations leave as without: a weight's memory is not taken for that of a tensor made later."""

    def moved(layer, **config):
        with on_lanes(seed):
            torch.manual_seed(0)
            model = Stack(layer)
            handle = offload_activations(model, min_bytes=0, keep_last=0, **config)
            for _ in range(4):
                model(torch.randn(1, TOKENS, WIDTH)).backward()
            return handle.receipt()

    class Sum(Gated):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(x) + self.scale

    class Product(Sum):
        def forward(self, x):
            return Gated.forward(self, x) * self.scale  # saved by the next layer

    plain, both, product = moved(Gated), moved(Gated, weights=True), moved(Product, weights=True)
    assert both.total_bytes_offloaded == plain.total_bytes_offloaded
    assert product.weight_bytes_fetched == moved(Sum, weights=True).weight_bytes_fetched


def test_remaking_is_not_idle():
    """Where the fraction is too small for anything to leave: a layer that remakes is not idle, others are."""
    for layer, works in ((Gated, True), (Written, False)):
        torch.manual_seed(0)
        model = Stack(layer)
        handle = offload_activations(model, min_bytes=0, keep_last=0, fraction=1e-9)
        with contextlib.nullcontext() if works else pytest.raises(OffloadIneffectiveError, match="Raise fraction"):
            iterate(model, torch.randn(1, TOKENS, WIDTH), 5)
        assert handle.bytes_offloaded == 0
        assert bool(handle.bytes_remade) is works


def test_threads_that_begin_together():
    """Four forwards are under way before the first one is over: none of them is idle."""
    barrier = threading.Barrier(4)

    class Waiting(Gated):
        def forward(self, x):
            barrier.wait(60)
            return super().forward(x)

    model = Stack(Waiting, 2)
    handle = offload_activations(model, min_bytes=0, keep_last=0)
    losses = []

    def forward():
        losses.append(model(torch.randn(1, TOKENS, WIDTH)))

    threads = [threading.Thread(target=forward) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loss in losses:
        loss.backward()
    assert len(losses) == 4
    assert handle.bytes_offloaded


# How long it lives


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
        handle = offload_activations(model, min_bytes=0, layers=[model[0]]) if offload else None
        sum(model(torch.randn(3, WIDTH))).sum().backward()
        model.zero_grad()
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
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(2, 3, WIDTH))
                loss.backward()  # with autocast on: what is remade is not cast again
        assert handle is None or handle.receipt().bytes_remade
        return [param.grad for param in model.parameters()]

    assert_same(run(True), run(False))


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
    assert not handle.bytes_offloaded
