# SPDX-License-Identifier: Apache-2.0
"""Activations offloaded together with everything else: our optimizer, compiled blocks, autocast, other hooks."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import offstage
from offstage.activations import storage as saved_storage
from offstage.activations.offload import offload_activations
from offstage.errors import ConfigError, OffloadIneffectiveError
from offstage.planning.choices import Choice
from tests.activations.test_offload import (
    CONFIGS,
    MODELS,
    WIDTH,
    Block,
    Checkpointed,
    Experts,
    Stack,
    assert_same,
    on_lanes,
)

SEEDS = [None, 0]


def transformer():
    return Stack(Block)


def batch(number, length=3):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(model):
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test may leave saved-tensor hooks to the next."""
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# Our optimizer


PLANS = {
    "streamed": {},
    "window": {"window": "all"},
    "window, forward": {"window": "48KiB", "overlap_forward": True},
    "in backward": {"update_in_backward": True},
    "in backward, clipped": {"update_in_backward": True, "window": "48KiB"},
    "in backward, forward": {"update_in_backward": True, "overlap_forward": True, "window": "48KiB"},
    "host": {"host_fraction": 0.5, "overlap_forward": True},
}


def trained(make, plan, activations, *, steps=4, autocast=False, first="optimizer", clip=None):
    """Losses, weights and state; with the handle."""
    torch.manual_seed(0)
    model = make()
    handle = None

    def offload():
        return offload_activations(model, min_bytes=0, **activations) if activations is not None else None

    if first == "activations":
        handle = offload()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = offstage.offload(optimizer, model, min_bytes=0, chunk_bytes="16KiB", slots=2, **plan)
    if first == "optimizer":
        handle = offload()
    found = []
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(batch(step, 3 + step % 3))
        loss.backward()
        if clip is not None:
            found.append(optimizer.clip_grad_norm_(clip[step % 2]))
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    optimizer.synchronize()
    state = optimizer.state_dict()["state"]
    found += weights(model) + [torch.as_tensor(value).clone() for one in state.values() for value in one.values()]
    return found, handle


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plan", PLANS)
def test_with_our_optimizer(plan, seed):
    """Both kinds of traffic on one link: the bits of the optimizer alone."""
    clip = (1e4, 1.0) if "clipped" in plan else None
    expected, _ = trained(transformer, PLANS[plan], None, clip=clip)
    with on_lanes(seed):
        for config, first in (({}, "optimizer"), ({"prefetch": 2}, "activations")):
            found, handle = trained(transformer, PLANS[plan], config, first=first, clip=clip)
            assert_same(found, expected)
            assert handle.bytes_returned > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", ["checkpointed", "checkpointed, reentrant", "experts"])
def test_models_with_our_optimizer(model, seed):
    plan = PLANS["window, forward"]
    expected, _ = trained(MODELS[model], plan, None)
    with on_lanes(seed):
        found, handle = trained(MODELS[model], plan, {})
    assert_same(found, expected)
    assert handle.bytes_returned > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", ["transformer", "checkpointed", "experts"])
def test_autocast(model, seed):
    """Casts of weights are cached and saved: they may leave, and what comes back is the same."""
    plan = PLANS["in backward, forward"] if model != "experts" else PLANS["window"]
    expected, _ = trained(MODELS[model], plan, None, autocast=True)
    with on_lanes(seed):
        found, handle = trained(MODELS[model], plan, {}, autocast=True)
    assert_same(found, expected)
    assert handle.bytes_returned > 0


class Routed(nn.Module):
    """A mixture whose layers leave a loss on themselves, and whose experts change with every batch."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        loss = 0.0
        for layer in self.layers:
            loss = loss + layer.router(x).softmax(-1).pow(2).mean()
            x = layer(x).tanh()
        return x.pow(2).mean() + 0.1 * loss


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mixture_of_experts(seed):
    expected, _ = trained(Routed, {"window": "all"}, None)
    with on_lanes(seed):
        found, handle = trained(Routed, {"window": "all"}, {}, first="activations")
        assert_same(found, expected)
        assert handle.bytes_returned > 0


# Compiled


def compiled(how, activations, when="before", iterations=5):
    """Losses and gradients of a model whose layers, or all of which, are compiled `when` activations are offloaded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = called = Stack(Block, 3)

    def compile_it():
        nonlocal called
        for number, layer in enumerate(model.layers):
            if how == "torch.compile(layer)":
                model.layers[number] = torch.compile(layer, backend="aot_eager")
            elif how == "layer.compile()":
                layer.compile(backend="aot_eager")
        if how == "torch.compile(model)":
            called = torch.compile(model, backend="aot_eager")

    if when == "before":
        compile_it()
    handle = offload_activations(model, min_bytes=0, **activations) if activations is not None else None
    if when == "after":
        compile_it()
    found = []
    for number in range(iterations):
        model.zero_grad()
        loss = called(batch(number))
        loss.backward()
        found += [loss.detach(), *gradients(model)]
    return found, handle


@pytest.mark.parametrize("seed", [None, 0])
def test_compiled_layers(seed):
    expected, _ = compiled("torch.compile(layer)", None)
    with on_lanes(seed):
        for config in ({}, {"keep_last": 0, "prefetch": 2}):
            found, handle = compiled("torch.compile(layer)", config)
            assert_same(found, expected)
            assert handle.bytes_returned > 0


@pytest.mark.parametrize(
    ("how", "when"),
    [("layer.compile()", "before"), ("layer.compile()", "after"), ("torch.compile(layer)", "after")],
)
def test_compiled_otherwise_it_is_refused(how, when):
    """Hooks that are compiled away would see nothing."""
    with pytest.raises(ConfigError, match=r"torch\.compile\(model\.layers"):
        compiled(how, {}, when)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_compiled_as_a_whole_is_refused(when):
    with pytest.raises(ConfigError, match="one by one, and before"):
        compiled("torch.compile(model)", {}, when)


# Other hooks


class Inside(Stack):
    """`save_on_cpu()` around one of the layers."""

    where = "around"

    def call(self, layer, x):
        with save_on_cpu() if layer is self.layers[2] and self.where == "around" else contextlib.nullcontext():
            return layer(x)


@pytest.mark.parametrize("seed", [None, 0])
def test_save_on_cpu_is_refused(seed):
    """Around the model or a layer: one of the two, with a message; without it everything goes on."""
    with on_lanes(seed):
        model = transformer()
        with offload_activations(model, min_bytes=0):
            for around in (save_on_cpu(), saved_tensors_hooks(lambda x: x, lambda x: x)):
                with around, pytest.raises(ConfigError, match=r"hooks .* are active around the model's forward"):
                    model(batch(0))
            model(batch(0)).backward()
        inside = Inside(Block)
        with offload_activations(inside, min_bytes=0) as handle:
            with pytest.raises(ConfigError, match=r"save_on_cpu\) are active around a Block.*Take off save_on_cpu"):
                inside(batch(0))
            inside.where = "nowhere"
            inside(batch(0)).backward()
            assert handle.bytes_returned > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("where", ["first", "in"])
def test_save_on_cpu_for_other_tensors(where, seed):
    """Around something that is no layer, or deep in one: right, or refused."""

    class Deep(Block):
        def forward(self, x):
            with save_on_cpu():
                scaled = x * x.sigmoid()
            return super().forward(scaled)

    class First(Stack):
        def forward(self, x):
            with save_on_cpu():
                x = x * x.sigmoid()
            return super().forward(x)

    def run(offload):
        torch.manual_seed(0)
        model = First(Block) if where == "first" else Stack(Deep)
        handle = offload_activations(model, min_bytes=0) if offload else None
        for number in range(2):
            model(batch(number)).backward()
        assert handle is None or handle.bytes_returned > 0
        return gradients(model)

    expected = run(False)
    with on_lanes(seed), contextlib.suppress(ConfigError):
        assert_same(run(True), expected)


def test_offloading_a_part_of_what_is_offloaded_is_refused():
    """Both would take the same tensors: whichever comes second is told, at the latest when it runs."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([transformer(), transformer(), transformer(), transformer(), transformer()])
            self.more = nn.ModuleList(nn.Identity() for _ in range(9))

        def forward(self, x):
            return sum(part(x) for part in self.parts)

    model = Outer()
    offload_activations(model.parts[0], min_bytes=0)
    with pytest.raises(ConfigError, match="or of a part of it, are offloaded already"):
        offload_activations(model, min_bytes=0, layers=list(model.parts))
    model = Outer()
    outer = offload_activations(model, min_bytes=0, layers=list(model.parts))
    with pytest.raises(ConfigError, match=r"already|Other saved-tensor hooks"):
        offload_part_and_run(model, model.parts[0])
    outer.remove()


def offload_part_and_run(model, part):
    offload_activations(part, min_bytes=0)
    model(batch(0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("config", [{}, {"weights": True}])
def test_a_model_within_a_checkpoint(config, reentrant, seed):
    """All of it is computed again: nothing is saved that could leave, and it is right."""

    def run(offload):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, min_bytes=0, **config) if offload else None
        for number in range(5):
            x = batch(number).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).backward()
        if handle is not None and not reentrant:
            assert handle.bytes_offloaded == 0
        return [x.grad, *gradients(model)]

    expected = run(False)
    with on_lanes(seed):
        assert_same(run(True), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_models_and_one_that_calls_itself(seed):
    """As a generator and its critic, whose forwards and backwards are mixed."""

    class Again(Stack):
        def forward(self, x, depth=0):
            y = super().forward(x)
            return y + (self(x * 0.5, depth + 1) if depth < 2 else 0)

    def run(offload):
        torch.manual_seed(0)
        models = [transformer(), Again(Block)]
        handles = [offload_activations(model, min_bytes=0) for model in models] if offload else []
        for number in range(3):
            losses = [model(batch(number)) for model in models]
            (losses[0] * losses[1]).backward()
        assert all(handle.bytes_returned > 0 for handle in handles)
        return [gradient for model in models for gradient in gradients(model)]

    expected = run(False)
    with on_lanes(seed):
        assert_same(run(True), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_forward_in_another_thread(seed):
    """Forwards in threads of their own, one after the other, and one backward here."""

    def run(offload):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, min_bytes=0) if offload else None
        losses = []
        for number in range(3):
            thread = threading.Thread(target=lambda number=number: losses.append(model(batch(number))))
            thread.start()
            thread.join(30)
        sum(losses).backward()
        assert handle is None or handle.bytes_returned > 0
        return gradients(model)

    expected = run(False)
    with on_lanes(seed):
        assert_same(run(True), expected)


# Nothing happens


def test_enabled_and_idle_is_an_error():
    """After three forwards in which nothing moved, the fourth says why."""
    model = transformer()
    with offload_activations(model):  # tensors of a few KiB
        for number in range(3):
            model(batch(number)).backward()
        with pytest.raises(OffloadIneffectiveError, match=r"3 forwards of 5 layers: .*min_bytes=1\.0 MiB.*Lower"):
            model(batch(3))
        with torch.no_grad():
            model(batch(3))
    model(batch(3)).backward()


class NotSeen(Stack):
    """Calls what is in its layers, not the layers."""

    def call(self, layer, x):
        return layer.forward(x)


def test_layers_that_are_not_called_are_an_error():
    model = NotSeen(Block)
    with offload_activations(model, min_bytes=0):
        for number in range(3):
            model(batch(number)).backward()
        with pytest.raises(OffloadIneffectiveError, match="the forward of none of them was seen"):
            model(batch(3))


def test_layers_that_save_nothing_that_could_move_are_an_error():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x + self.scale

    model = Stack(Scaled)
    with offload_activations(model, layers=model.layers[1:], min_bytes=0):
        for number in range(3):
            model(batch(number)).backward()
        with pytest.raises(OffloadIneffectiveError, match="they save nothing but parameters and tensor subclasses"):
            model(batch(3))


@pytest.mark.parametrize("config", [{"layers": 0}, {"fraction": 0.0}, {"keep_last": 5}])
def test_asked_for_nothing_is_no_error(config):
    model = transformer()
    with offload_activations(model, min_bytes=0, **config) as handle:
        for number in range(5):
            model(batch(number)).backward()
        assert handle.bytes_offloaded == handle.host_bytes == 0


def test_evaluation_alone_is_no_error():
    model = transformer()
    with offload_activations(model, min_bytes=0) as handle:
        with torch.no_grad():
            for number in range(5):
                model(batch(number))
        assert handle.receipt().passes == 0


# Accounts


def cleared(handle):
    """What autograd has let go is given back when the next forward begins."""
    handle._begin()
    handle._end()
    return handle


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", ["transformer", "checkpointed", "checkpointed, reentrant", "in place, views"])
def test_nothing_is_left_of_an_iteration(model, config, seed):
    """Neither on the device nor in the pool; after backward, after two of them, and after none."""
    with on_lanes(seed):
        torch.manual_seed(0)
        made = MODELS[model]()
        handle = offload_activations(made, min_bytes=0, **CONFIGS[config])
        for number in range(3):
            loss = made(batch(number).requires_grad_())
            if number == 1:
                loss.backward(retain_graph=True)
            if number != 2:
                loss.backward()
            del loss
            made.zero_grad()
            assert [device.here_bytes for device in handle._devices.values()] == [0]
        assert [device.pool.used_bytes for device in cleared(handle)._devices.values()] == [0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_what_has_left_returns(config, seed, monkeypatch):
    """Counted where storages are let go: each comes back once, and only those."""
    gone = []
    let_go = saved_storage.SavedStorage.let_go

    def counting(storage):
        was_here = storage._bytes is not None and storage._range is not None
        let_go(storage)
        if was_here:
            gone.append(storage.nbytes)

    monkeypatch.setattr(saved_storage.SavedStorage, "let_go", counting)
    with on_lanes(seed):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, min_bytes=0, **CONFIGS[config])
        for number in range(4):
            model(batch(number)).backward()
            assert handle.bytes_returned == sum(gone) > 0
            receipt = handle.receipt()
            assert receipt.total_bytes_offloaded == handle.bytes_offloaded >= handle.bytes_returned
            assert receipt.total_bytes_returned == handle.bytes_returned
            assert receipt.passes == number + 1
        loss = model(batch(0))
        before = handle.bytes_returned
        loss.backward(retain_graph=True)
        once = handle.bytes_returned - before
        loss.backward()
        assert handle.bytes_returned - before >= 2 * once  # a second backward fetches it again


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("config", [name for name in CONFIGS if "none kept" not in name])
def test_nothing_leaves_in_vain(config, seed):
    """Every byte that leaves is let go and comes back, as far as there are layers behind it that stay."""
    with on_lanes(seed):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, min_bytes=0, **CONFIGS[config])
        model(batch(0)).backward()
        left, returned = handle.bytes_offloaded, handle.bytes_returned
        for number in range(3):
            model(batch(number)).backward()
        assert handle.bytes_offloaded - left == handle.bytes_returned - returned > 0


def test_the_receipt_of_a_forward():
    torch.manual_seed(0)
    model = Checkpointed(Block)
    handle = offload_activations(model, min_bytes=0, fraction=0.5)
    model(batch(0)).backward()
    receipt = handle.receipt()
    inputs = 2 * 3 * WIDTH * 4
    assert receipt.bytes_offloaded + receipt.bytes_stayed == 4 * inputs
    assert receipt.bytes_offloaded == 2 * inputs
    assert receipt.host_bytes == handle.host_bytes > 0
    for word in ("forwards", "offloaded", "kept on the device", "returned", "host memory"):
        assert word in str(receipt)
    assert receipt.choices == (Choice.OFFLOAD,) * 4 + (Choice.KEEP,)
    assert "1 keep, 4 offload" in str(receipt)
    for owner, old in ((receipt, "bytes_left"), (receipt, "total_bytes_left"), (handle, "bytes_left")):
        with pytest.warns(DeprecationWarning, match=rf"{old} is called \w*bytes_offloaded now"):
            assert getattr(owner, old) == 2 * inputs


def test_a_graph_outlives_its_handle():
    """Its tensors still return after `remove()`."""
    torch.manual_seed(0)
    model = transformer()
    model(batch(0)).backward()
    expected = gradients(model)
    model.zero_grad()
    handle = offload_activations(model, min_bytes=0)
    loss = model(batch(0))
    handle.remove()
    del handle
    loss.backward()
    assert_same(gradients(model), expected)
