# SPDX-License-Identifier: Apache-2.0
"""`offload_activations(weights=True)`, for optimizers that are not offstage's: layers whose parameters live on the host
train to the same bits, on lanes that run at once and late.

What could end the process (memory that is not there) runs in one of its own: `ranks.run(1, ...)`.
"""

import contextlib
import copy
import gc
import io
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import offstage
from offstage.activations.offload import offload_activations
from offstage.config import format_size
from offstage.errors import ConfigError, HostMemoryError, OffstageError
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes, WaitLog
from offstage.weights import foreign_gradient
from tests.activations.test_offload import (
    WIDTH,
    Block,
    Checkpointed,
    Experts,
    InPlace,
    Recurrent,
    Reentrant,
    Stack,
    assert_same,
    on_lanes,
    tied,
)

SEEDS = [None, 0]
ON = {"min_bytes": 0, "weights": True}


def transformer():
    return Stack(Block, 4)


def batch(number, length=3):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(model):
    """Copies; an empty tensor where there is none, so that both runs must agree on that too."""
    return [torch.empty(0) if param.grad is None else param.grad.clone() for param in model.parameters()]


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def is_on_host(param):
    """Memory of an arena cannot be resized; a tensor that torch has made can."""
    return not param.untyped_storage().resizable()


def moved(model):
    """Parameters that live on the host."""
    return [param for layer in model.layers[:-1] for param in layer.parameters()]


def compared(loop, make=transformer, seed=None, **config):
    """`loop(model)` returns tensors: the same with weights on the host as without, bit for bit. Returns the handle."""
    torch.manual_seed(0)
    expected = loop(make())
    with on_lanes(seed):
        torch.manual_seed(0)
        model = make()
        handle = offload_activations(model, **ON, **config)
        found = loop(model)
    assert_same(found, expected)
    assert handle.receipt().weight_bytes_fetched > 0
    return handle


def trained(make_optimizer=adamw, steps=4, accumulate=1, clip=None, between=None):
    """A loop that trains, and returns all losses and the weights."""

    def loop(model):
        optimizer = make_optimizer(model.parameters())
        found = []
        for step in range(steps):
            for number in range(accumulate):
                loss = model(batch(10 * step + number))
                loss.backward()
                found.append(loss.detach())
            if clip is not None:
                found.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
            if between is not None:
                found += between(model, step) or []
        return found + weights(model)

    return loop


# Training


class Twice(Stack):
    """Every layer runs twice, far apart."""

    def forward(self, x):
        x = self.first(x)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.last(x).logsumexp(-1).sum()


class SideBySide(Stack):
    """All layers read the same input."""

    def forward(self, x):
        x = self.first(x)
        return self.last(sum(layer(x) for layer in self.layers)).logsumexp(-1).sum()


class Several(nn.Module):
    """Tensors in a dict and a list; parameters of odd kinds."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return {"one": self.one(x).tanh() * self.scale, "others": [self.two(x).tanh() + self.empty.sum()]}


class OfSeveral(Stack):
    def call(self, layer, x):
        found = layer(x)
        return x + found["one"] * found["others"][0]


class Reading(nn.Module):
    """Reads a child's weight itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.linear(x, self.linear.weight, self.linear.bias).tanh()


def tied_between_layers():
    """A weight of two layers, and one that the model's end uses too."""
    model = Stack(Block)
    model.layers[2].out.weight = model.layers[0].out.weight
    model.last = nn.Linear(WIDTH, WIDTH)
    model.last.weight = model.layers[1].out.weight
    return model


def frozen(which):
    def make():
        model = Stack(Block)
        for number, layer in enumerate(model.layers):
            for place, param in enumerate(layer.parameters()):
                if (which == "layers" and number in (1, 2)) or (which == "biases" and place % 2) or which == "all":
                    param.requires_grad_(False)
        return model

    return make


MODELS = {
    "transformer": transformer,
    "checkpointed": lambda: Checkpointed(Block),
    "checkpointed, reentrant": lambda: Reentrant(Block),
    "in place, views": lambda: Stack(InPlace),
    "recurrent": lambda: Stack(Recurrent),
    "experts": lambda: Stack(Experts),
    "one layer called five times": lambda: Stack(tied()),
    "every layer called twice": lambda: Twice(Block, 3),
    "side by side": lambda: SideBySide(Block, 3),
    "several outputs": lambda: OfSeveral(Several),
    "reads a child's weight": lambda: Stack(Reading),
    "tied between layers": tied_between_layers,
    "frozen layers": frozen("layers"),
    "frozen biases": frozen("biases"),
    "all layers frozen": frozen("all"),
}
CONFIGS = {
    "both": {},
    "weights alone": {"activations": False},
    "two ahead, none kept": {"prefetch": 2, "keep_last": 0},
    "two layers": {"layers": 2},
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", MODELS)
def test_models(model, seed):
    compared(trained(accumulate=2, steps=2), MODELS[model], seed)


@pytest.mark.parametrize("seed", [*SEEDS, 2])
@pytest.mark.parametrize("config", CONFIGS)
def test_configurations(config, seed):
    compared(trained(momentum), seed=seed, **CONFIGS[config])


@pytest.mark.parametrize("seed", SEEDS)
def test_clipping(seed):
    """Some steps are clipped and some are not; the norms are the same too."""
    compared(trained(clip=15.0, accumulate=2), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_sixteen_bits(seed):
    def loop(model):
        for number in range(3):
            model(batch(number).bfloat16()).backward()
        return gradients(model)

    compared(loop, lambda: Stack(Block).bfloat16(), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches_in_flight(seed):
    """Forwards and backwards interleaved as in a pipeline under 1F1B."""

    def loop(model):
        losses = []
        for number in range(5):
            losses.append(model(batch(number)))
            if number >= 2:
                losses.pop(0).backward()
        for loss in losses:
            loss.backward()
        return gradients(model)

    compared(loop, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_again(seed):
    def loop(model):
        loss = model(batch(0))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        asked_for = torch.autograd.grad(loss, list(model.parameters()))
        return [*gradients(model), *asked_for]

    compared(loop, seed=seed)
    compared(loop, seed=seed, activations=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_from_the_middle_and_within_backward(seed):
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, model):
            ctx.model = model
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                ctx.model(batch(7)).backward()
            return gradient, None

    def loop(model):
        middle = []
        hook = model.layers[2].register_forward_hook(lambda module, inputs, output: middle.append(output))
        model(batch(0))
        hook.remove()
        middle.pop().sum().backward()
        Inside.apply(model(batch(1)), model).backward()
        return gradients(model)

    compared(loop, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_layers_frozen_and_thawed_on_the_way(seed):
    def make():
        model = transformer()
        model.layers[0].requires_grad_(False)
        return model

    def loop(model):
        found = []
        for number in range(6):
            model.layers[0].requires_grad_(number > 1)
            model.layers[2].requires_grad_(number < 4)
            model(batch(number)).backward()
            found += gradients(model)
            model.zero_grad()
        return found

    compared(loop, make, seed)


# Between iterations


@pytest.mark.parametrize("seed", SEEDS)
def test_evaluation_in_between(seed):
    def between(model, step):
        model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            found = model(batch(90 + step)).clone()
        model.train()
        return [found]

    compared(trained(between=between), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_checkpoints_in_between(seed):
    """The state dict has the weights; what is loaded is what runs next."""

    def between(model, step):
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        if step == 1:
            model.load_state_dict({name: 0.5 * value for name, value in saved.items()})
        if step == 2:
            model.load_state_dict({name: value + 0.01 for name, value in saved.items()}, assign=False)
        return list(saved.values())

    compared(trained(between=between), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_written_in_place_in_between(seed):
    def between(model, step):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
                param.data.add_(0.01)

    compared(trained(between=between), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_replaced_in_between(seed):
    """`param.data = ...`, as `vector_to_parameters` does: taken over, or refused; never forgotten."""

    def between(model, step):
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(0.9 * vector, model.parameters())

    with contextlib.suppress(OffstageError):
        compared(trained(between=between), seed=seed)


def test_a_model_made_wider_in_between():
    """`model.double()`: followed, or refused with a message of ours."""

    def loop(model):
        model(batch(0)).backward()
        model.zero_grad()
        model.double()
        model(batch(1).double()).backward()
        return gradients(model)

    with contextlib.suppress(OffstageError):
        compared(loop)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_that_the_user_sets_and_clears(seed):
    def loop(model):
        found = []
        model(batch(0)).backward()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        for number in range(1, 5):
            model(batch(number)).backward()
            found += gradients(model)
            if number == 2:
                model.zero_grad(set_to_none=False)
            if number == 3:
                for param in list(model.parameters())[::2]:
                    param.grad = None
        return found

    compared(loop, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gradient_that_the_user_keeps_is_not_overwritten(seed):
    """The tensor, a view of it, an array of it."""
    torch.manual_seed(0)
    plain = transformer()
    with on_lanes(seed):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, **ON)
        kept, expected = [], []
        for number in range(6):
            for one, found in ((model, kept), (plain, expected)):
                one(batch(number)).backward()
                how = (lambda g: g, lambda g: g.view(-1)[1:], lambda g: g.numpy())[number % 3]
                found.append([how(param.grad) for param in one.parameters()])
                one.zero_grad()
        for a, b in zip(kept, expected, strict=True):
            assert_same([torch.as_tensor(x) for x in a], [torch.as_tensor(x) for x in b])
        del handle


def count_arenas(loop):
    made = []

    def counting(*args, **kwargs):
        made.append(args)
        return arena(*args, **kwargs)

    arena = foreign_gradient.Arena
    with mock.patch.object(foreign_gradient, "Arena", counting):
        loop()
    return len(made)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_no_memory_is_pinned_once_it_runs(accumulate):
    """Pinning takes longer than the copies."""
    model = transformer()
    handle = offload_activations(model, **ON)
    optimizer = momentum(model.parameters())

    def iterate():
        for number in range(accumulate):
            model(batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        iterate()
    before = handle.host_bytes
    assert count_arenas(lambda: [iterate() for _ in range(4)]) == 0
    assert handle.host_bytes == before


# Where the weights are


def test_parameters_are_where_they_should_be():
    """On the host between iterations, on the device in their layer's forward, and no more of them than needed."""
    torch.manual_seed(0)
    model = Stack(Block, 8)
    here, in_forward = [], []

    def on_device(*_):
        held = [layer for layer in handle._weights.layers if layer.copy is not None]
        here.append(sum(weight.nbytes for layer in held for weight in layer.weights))

    def look(layer, inputs):
        in_forward.extend(not is_on_host(param) for param in layer.parameters())
        on_device()

    handle = offload_activations(model, **ON)
    layer_bytes = sum(param.nbytes for param in model.layers[0].parameters())
    for layer in model.layers:
        layer.register_forward_pre_hook(look)
        layer.register_full_backward_hook(on_device)
    for number in range(3):
        assert all(is_on_host(param) for param in moved(model))
        assert not any(is_on_host(param) for param in [*model.first.parameters(), *model.layers[-1].parameters()])
        here.clear()
        loss = model(batch(number))
        assert len(here) == 8
        assert max(here) <= 3 * layer_bytes  # the one that ran before, the one that runs, and the next
        here.clear()
        loss.backward()
        assert max(here) <= 3 * layer_bytes
        on_device()
        assert here[-1] == 0
        for param in moved(model):
            assert is_on_host(param.grad)
            assert param.grad.shape == param.shape
    assert all(in_forward)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_receipt_counts_what_was_moved(seed):
    with on_lanes(seed):
        model = transformer()
        handle = offload_activations(model, **ON, activations=False)
        nbytes = sum(param.nbytes for param in moved(model))
        again = sum(param.nbytes for param in model.layers[0].parameters())  # the other two are there when it ends
        for number in range(1, 4):
            model(batch(number)).backward()
            receipt = handle.receipt()
            assert receipt.weight_bytes_fetched == number * (nbytes + again)  # for forward, and for backward
            assert receipt.gradient_bytes_stored == number * nbytes
            assert receipt.host_bytes == handle.host_bytes >= 2 * nbytes
        with torch.no_grad():
            model(batch(0))
        assert handle.receipt().weight_bytes_fetched == 3 * (nbytes + again) + nbytes
        assert "fetched" in str(handle.receipt())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("when", ["before anything ran", "between forward and backward", "after backward"])
def test_removed_in_the_middle(when, seed):
    """The parameters are device tensors again, with their values and gradients, and training goes on."""
    torch.manual_seed(0)
    plain = transformer()
    with on_lanes(seed):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, **ON)
        optimizers = [(one, momentum(one.parameters())) for one in (model, plain)]
        if when == "before anything ran":
            handle.remove()
        for one, optimizer in optimizers:
            for number in range(2):
                one(batch(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
            one(batch(2)).backward()
            loss = one(batch(3))
            if one is model and when == "between forward and backward":
                handle.remove()
            loss.backward()
        handle.remove()
        assert not any(is_on_host(param) for param in model.parameters())
        assert_same(gradients(model), gradients(plain))
        assert_same(weights(model), weights(plain))
        for one, optimizer in optimizers:
            optimizer.step()
            one(batch(4)).backward()
            optimizer.step()
        assert_same(weights(model), weights(plain))
        assert handle.receipt().weight_bytes_fetched == 0
        offload_activations(model, **ON).remove()


def test_removed_within_backward():
    """Right, or refused with a message; and what follows is right."""

    def loop(model, remove=None):
        model(batch(0)).backward()
        loss = model(batch(1))
        if remove is not None:
            model.layers[1].qkv.weight.register_hook(lambda gradient: remove())
        loss.backward()
        return gradients(model)

    torch.manual_seed(0)
    expected = loop(transformer())
    torch.manual_seed(0)
    model = transformer()
    handle = offload_activations(model, **ON)
    with contextlib.suppress(OffstageError):
        assert_same(loop(model, handle.remove), expected)
    handle.remove()
    assert not any(is_on_host(param) for param in model.parameters())


def dropped_without_a_word(config):
    """The caller drops the handle: it stays on, or the parameters come home; backward finds its weights."""
    torch.manual_seed(0)
    model = transformer()
    offload_activations(model, **ON, **config)
    gc.collect()
    model(batch(0)).backward()
    handle = offload_activations(plain := transformer(), **ON, **config)
    plain.load_state_dict(model.state_dict())
    loss = plain(batch(0))
    del handle
    gc.collect()
    loss.backward()
    return gradients(model), gradients(plain)


@pytest.mark.parametrize("config", [{}, {"activations": False}])
def test_a_handle_that_is_dropped(ranks, config):
    torch.manual_seed(0)
    model = transformer()
    model(batch(0)).backward()
    for found in ranks.run(1, dropped_without_a_word, config)[0]:
        assert_same(found, gradients(model))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_layer_on_its_own(seed):
    """Before the model's first forward, and after it; with gradients and without."""

    def loop(model):
        found = []
        for _ in range(2):
            with torch.no_grad():
                found.append(model.layers[0](batch(0)))
            loss = model.layers[1](batch(1)).pow(2).sum()
            loss.backward()
            model(batch(2)).backward()
            found += gradients(model)
            model.zero_grad()
        return found

    compared(loop, seed=seed)


def test_the_host_waits_for_fetches_of_a_layer_on_its_own():
    """An optimizer may write to the host's weight as soon as the layer has returned."""
    log = WaitLog()
    with use_lanes(lambda device: LazyLanes(device, seed=0, waits=log)):
        model = transformer()
        handle = offload_activations(model, **ON)
        model(batch(0)).backward()
        log.seen.clear()
        with torch.no_grad():
            model.layers[0](batch(0))
    assert "weights: the host may write" in log.seen
    del handle


# What fails


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("where", ["first", "layers.2", "last"])
def test_an_exception_in_forward(where, seed):
    """Whatever a failed forward leaves is cleared away; gradients of an earlier micro-batch stay."""

    def loop(model):
        model(batch(0)).backward()
        hook = model.get_submodule(where).register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            model(batch(1))
        hook.remove()
        found = gradients(model) + weights(model)
        model(batch(2)).backward()
        return found + gradients(model)

    compared(loop, seed=seed)
    compared(loop, seed=seed, activations=False)


def fail_in_backward(model):
    """An earlier micro-batch has left gradients; the next backward raises in the middle."""
    model(batch(0)).backward()
    hook = model.layers[1].qkv.weight.register_hook(stop)
    with pytest.raises(Stop):
        model(batch(1)).backward()
    hook.remove()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_exception_in_backward_and_gradients_cleared(set_to_none, seed):
    """What the failed backward had made does not come back."""

    def loop(model):
        fail_in_backward(model)
        model.zero_grad(set_to_none)
        found = weights(model)
        model(batch(2)).backward()
        return found + gradients(model)

    compared(loop, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_exception_in_backward_and_gradients_kept(seed):
    """They are what they were before it: at once, and when the next backward adds to them."""

    def moved(model):
        return [param.grad.clone() for layer in model.layers[:-1] for param in layer.parameters()]

    with on_lanes(seed):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, **ON)
        fail_in_backward(model)
        found = moved(model)
        model(batch(2)).backward()
        found += moved(model)
    torch.manual_seed(0)
    model = transformer()
    model(batch(0)).backward()
    expected = moved(model)
    model(batch(2)).backward()
    assert_same(found, expected + moved(model))
    assert handle.receipt().weight_bytes_fetched > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_changed_after_an_exception_in_backward(seed):
    """The parameters are the user's again."""

    def loop(model):
        optimizer = momentum(model.parameters())
        fail_in_backward(model)
        model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
        optimizer.zero_grad()
        found = weights(model)
        model(batch(2)).backward()
        return found + gradients(model) + weights(model)

    compared(loop, seed=seed)


def interrupted(config, seed):
    """Ctrl-C in forward, which torch's hooks do not hear of."""

    def loop(model):
        def interrupt(*_):
            raise KeyboardInterrupt

        hook = model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        hook.remove()
        found = []
        for number in range(2):
            model(batch(number)).backward()
            found += gradients(model)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return found

    compared(loop, seed=seed, **config)


@pytest.mark.parametrize("config", [{}, {"activations": False}])
def test_ctrl_c_in_forward(ranks, config):
    for seed in SEEDS:
        ranks.run(1, interrupted, config, seed)


def interrupted_and_removed():
    model = transformer()
    handle = offload_activations(model, **ON)
    hook = model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(batch(0))
    hook.remove()
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not any(is_on_host(param) for param in model.parameters())
    model(batch(0)).backward()


def test_removed_after_ctrl_c(ranks):
    ranks.run(1, interrupted_and_removed)


def differentiated_twice(seed, config):
    def loop(model):
        first = torch.autograd.grad(model(batch(0)), list(model.parameters()), create_graph=True)
        sum(gradient.pow(2).sum() for gradient in first).backward()
        return gradients(model)

    with contextlib.suppress(OffstageError):
        compared(loop, seed=seed, **config)


@pytest.mark.parametrize("config", [{}, {"activations": False}])
def test_double_backward_is_right_or_refused(ranks, config):
    for seed in SEEDS:
        ranks.run(1, differentiated_twice, seed, config)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("config", [{}, {"activations": False}])
def test_backward_after_a_step_is_refused_as_it_is_without(config, seed):
    """The weights that the forward had are gone: torch refuses it, and so do we."""
    for on in (False, True):
        with on_lanes(seed):
            model = transformer()
            if on:
                offload_activations(model, **ON, **config)
            optimizer = momentum(model.parameters())
            model(batch(0)).backward()
            loss = model(batch(1))
            optimizer.step()
            with pytest.raises((OffstageError, RuntimeError), match=r"changed in place|modified by an inplace"):
                loss.backward()
            optimizer.zero_grad()
            model(batch(2)).backward()


# Doors that are easily overlooked


class Auxiliary(nn.Module):
    """Leaves a loss on itself, computed last: backward comes to it before it comes to the output."""

    def __init__(self):
        super().__init__()
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        y = x + self.linear(x).tanh()
        self.loss = self.router(y).softmax(-1).pow(2).sum()
        return y


class WithAuxiliary(Stack):
    def forward(self, x):
        return super().forward(x) + sum(layer.loss for layer in self.layers)


class Position(nn.Module):
    """Returns a view of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x):
        return self.weight[: x.shape[1]]


class OfPositions(Stack):
    def call(self, layer, x):
        return torch.tanh(x * layer(x))


def aliased():
    """Another parameter, and a buffer, over the memory of a layer's weights."""
    model = Stack(Block)
    model.alias = nn.Parameter(model.layers[0].out.weight.data)
    model.register_buffer("view", model.layers[1].out.weight.data.t())
    forward = model.forward
    model.forward = lambda x: forward(x) + model.alias.pow(2).sum() + model.view.sum()
    return model


DOORS = {
    "auxiliary loss": lambda: WithAuxiliary(Auxiliary),
    "returns a view of its weight": lambda: OfPositions(Position),
    "aliased": aliased,
}


def through(door, seed, config):
    def loop(model):
        for number in range(3):
            model(batch(number)).backward()
        return gradients(model)

    with contextlib.suppress(OffstageError):  # refused, with a message: fine too
        compared(loop, DOORS[door], seed, **config)


@pytest.mark.parametrize("config", [{}, {"activations": False}])
@pytest.mark.parametrize("door", DOORS)
def test_other_doors(ranks, door, config):
    for seed in SEEDS:
        ranks.run(1, through, door, seed, config)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_penalty_on_the_weights(seed):
    """Parameters are read outside of any layer."""

    def loop(model):
        for number in range(2):
            (model(batch(number)) + sum(param.pow(2).sum() for param in model.parameters())).backward()
        return gradients(model)

    compared(loop, seed=seed)


def test_copies_of_the_model_are_their_own():
    """`copy.deepcopy`, as for averaged weights: the copy runs, and what it does has no effect on the model."""

    def loop(model):
        model(batch(0)).backward()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for param in twin.parameters():
                param.mul_(0.5)
        twin.zero_grad()
        twin(batch(1)).backward()
        model(batch(2)).backward()
        return gradients(model) + gradients(twin) + weights(model) + weights(twin)

    compared(loop)


@pytest.mark.parametrize("config", [{}, {"weights": True}])
def test_the_whole_model_saved(config):
    """`torch.save(model)`: works, or is refused with a message of ours."""
    model = transformer()
    handle = offload_activations(model, min_bytes=0, **config)
    model(batch(0)).backward()
    file = io.BytesIO()
    with contextlib.suppress(OffstageError):
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert_same(weights(loaded), weights(model))
        loaded(batch(1)).backward()
    handle.remove()


# Optimizers


@pytest.mark.parametrize("seed", SEEDS)
def test_an_optimizer_made_before(seed):
    def run(on):
        torch.manual_seed(0)
        model = transformer()
        optimizer = adamw(model.parameters())
        for number in range(5):
            if number == 2 and on:  # it has state by then
                model.handle = [offload_activations(model, **ON)]
            model(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    expected = run(False)
    with on_lanes(seed):
        assert_same(run(True), expected)


OURS = {
    "resident": {"fraction": 0.0},
    "streamed": {},
    "host": {"update_on": "host"},
    "overlapped": {"overlap_forward": True},
    "in backward": {"update_in_backward": True},
    "weights on the host": {"weights": "host"},
}


@pytest.mark.parametrize("plan", OURS)
def test_ours_beside_weights_on_the_host_is_refused(plan):
    """Nothing has changed: the loop goes on with the optimizer that was to be offloaded."""

    def loop(model):
        optimizer = adamw(model.parameters())
        before = [(param.data_ptr(), param.device) for param in model.parameters()]
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        if any(is_on_host(param) for param in model.parameters()):
            with pytest.raises(ConfigError) as caught:
                offstage.offload(optimizer, model, min_bytes=0, **OURS[plan])
            assert "offload_activations(weights=True)" in str(caught.value)
            assert "offload(optimizer, model, weights='host')" in str(caught.value)
        assert [(param.data_ptr(), param.device) for param in model.parameters()] == before
        assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
        for number in range(2):
            model(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    compared(loop)


@pytest.mark.parametrize("plan", OURS)
def test_weights_beside_an_optimizer_of_ours_are_refused(plan):
    """Nothing has changed: the loop goes on. After `close()` they may go."""

    def run(on):
        torch.manual_seed(0)
        model = transformer()
        optimizer = offstage.offload(adamw(model.parameters()), model, min_bytes=0, **OURS[plan])
        for number in range(4):
            if number == 2 and on:
                before = [(param.data_ptr(), param.device) for param in model.parameters()]
                hooks = [len(module._forward_pre_hooks) for module in model.modules()]
                with pytest.raises(ConfigError, match="weights=True") as caught:
                    offload_activations(model, **ON)
                assert "offload(optimizer, model, weights=" in str(caught.value)
                assert [(param.data_ptr(), param.device) for param in model.parameters()] == before
                assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
            model(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        found = weights(model)
        if on:
            del optimizer
            gc.collect()
            handle = offload_activations(model, **ON)
            assert all(is_on_host(param) for param in moved(model))
            model(batch(0)).backward()
            handle.remove()
        return found

    assert_same(run(True), run(False))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ["hooks first", "weights first"])
def test_an_optimizer_in_the_users_own_hooks_is_right_or_refused(order, seed):
    """One optimizer for each parameter, which steps as soon as its gradient is there."""

    def run(on):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, **ON) if on and order == "weights first" else None
        optimizers = {param: momentum([param]) for param in model.parameters()}

        def step(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        if on and order == "hooks first":
            handle = offload_activations(model, **ON)
        for number in range(4):
            model(batch(number)).backward()
        del handle
        return weights(model)

    expected = run(False)
    with on_lanes(seed), contextlib.suppress(OffstageError):
        assert_same(run(True), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ["hooks first", "weights first"])
def test_gradients_in_the_users_own_hooks_are_right_or_refused(order, seed):
    """Hooks that look at the gradient, as for logging norms: of one micro-batch, and of the sum of two."""

    def run(on):
        torch.manual_seed(0)
        model = transformer()
        if on and order == "weights first":
            offload_activations(model, **ON)
        seen = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.norm()))
        if on and order == "hooks first":
            offload_activations(model, **ON)
        for number in range(2):
            model(batch(number)).backward()
        return seen

    expected = run(False)
    with on_lanes(seed), contextlib.suppress(OffstageError):
        assert_same(run(True), expected)


# Anything after anything


class Life:
    """A model, with or without its weights on the host, and what may happen to it."""

    def __init__(self, config):
        torch.manual_seed(0)
        self.model, self.config, self.waiting, self.number = Stack(Block, 3), config, [], 0
        self.handle = None
        self.offload()
        self.optimizer = momentum(self.model.parameters())

    def offload(self):
        if self.config is not None:
            self.handle = offload_activations(self.model, **ON, **self.config)

    def batch(self):
        self.number += 1
        return batch(self.number, 2 + self.number % 3)

    def forward(self):
        self.waiting.append(self.model(self.batch()))

    def backward(self):
        if self.waiting:
            self.waiting.pop(0).backward()

    def iteration(self):
        self.forward()
        self.backward()

    def backward_twice(self):
        loss = self.model(self.batch())
        loss.backward(retain_graph=True)
        loss.backward()

    def ask_for_gradients(self):
        found = torch.autograd.grad(self.model(self.batch()), list(self.model.parameters()))
        assert all(
            gradient.shape == param.shape for gradient, param in zip(found, self.model.parameters(), strict=True)
        )

    def step(self):
        self.waiting.clear()  # torch would refuse their backward
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()

    def zero(self):
        self.optimizer.zero_grad(set_to_none=self.number % 2 == 0)

    def evaluate(self):
        with torch.no_grad():
            self.model(self.batch())

    def layer_alone(self):
        self.model.layers[1](self.batch()).sum().backward()

    def fail_forward(self):
        hook = self.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            self.model(self.batch())
        hook.remove()

    def fail_backward(self):
        hook = self.model.layers[1].qkv.weight.register_hook(stop)
        with pytest.raises(Stop):
            self.model(self.batch()).backward()
        hook.remove()
        self.model.zero_grad()  # where weights are on the host there is nothing of that backward, elsewhere parts of it

    def load(self):
        self.waiting.clear()
        self.model.load_state_dict({name: 0.9 * value for name, value in self.model.state_dict().items()})

    def freeze(self):
        self.waiting.clear()
        self.model.layers[0].requires_grad_(not self.model.layers[0].qkv.weight.requires_grad)

    def remove_and_offload(self):
        if self.handle is not None:
            self.handle.remove()
            assert not any(is_on_host(param) for param in self.model.parameters())
        self.offload()

    def look(self):
        return gradients(self.model) + weights(self.model)


HAPPENINGS = [name for name in vars(Life) if not name.startswith("_") and name not in ("offload", "batch", "look")]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(HAPPENINGS), min_size=3, max_size=12),
    st.sampled_from(["activations too", "weights alone", "none kept"]),
    st.sampled_from([None, 0, 1]),
)
def test_anything_after_anything(happenings, kind, seed):
    config = {"activations too": {}, "weights alone": {"activations": False}, "none kept": {"keep_last": 0}}[kind]
    plain = Life(None)
    with on_lanes(seed):
        life = Life(config)
        for number, name in enumerate(happenings):
            for one in (plain, life):
                if name == "ask_for_gradients" and not one.model.layers[0].qkv.weight.requires_grad:
                    continue
                getattr(one, name)()
            for found, expected in zip(life.look(), plain.look(), strict=True):
                assert torch.equal(found, expected), f"other bits after {happenings[: number + 1]}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_layer_runs_alone_after_a_backward_that_failed(seed):
    """What that backward had fetched is not what the parameter is now."""
    plain = Life(None)
    with on_lanes(seed):
        life = Life({})
        for name in ("fail_backward", "load", "layer_alone"):
            getattr(plain, name)()
            getattr(life, name)()
        assert all(map(torch.equal, life.look(), plain.look()))


# Refused


def test_a_host_budget_that_is_too_small():
    """Before anything moved, with what it would take."""
    model = transformer()
    before = [(param.data_ptr(), param.detach().clone()) for param in model.parameters()]
    need = 2 * sum(param.nbytes for param in moved(model))
    with pytest.raises(HostMemoryError, match=r"host_budget allows 1\.0 KiB\. Raise host_budget") as caught:
        offload_activations(model, **ON, host_budget="1KiB")
    assert format_size(need, up=True) in str(caught.value)
    for param, (address, value) in zip(model.parameters(), before, strict=True):
        assert param.data_ptr() == address
        assert torch.equal(param, value)
    model(batch(0)).backward()
    offload_activations(model, min_bytes=0)  # and nothing is left of it


def test_nothing_that_could_leave():
    with pytest.raises(ConfigError, match=r"no parameter of 3 layers can leave.*min_bytes=1\.0 MiB"):
        offload_activations(transformer(), weights=True)
    with pytest.raises(ConfigError, match="expected at least one of them"):
        offload_activations(transformer(), activations=False)
    with pytest.raises(ConfigError, match="weights expects True or False; found 'yes'"):
        offload_activations(transformer(), weights="yes")


def refusal_of_dtensors():
    mesh = init_device_mesh("cpu", (1,))
    model = transformer()
    linear = model.layers[1].out
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh, [Replicate()]))
    before = [id(param) for param in model.parameters()]
    with pytest.raises(ConfigError) as caught:
        offload_activations(model, **ON)
    assert [id(param) for param in model.parameters()] == before
    assert not any(is_on_host(param) for param in moved(model) if type(param) is nn.Parameter)
    return str(caught.value)


def test_dtensors_are_refused(ranks):
    (message,) = ranks.run(1, refusal_of_dtensors)
    assert "found a DTensor" in message
    assert "CPUOffloadPolicy" in message
