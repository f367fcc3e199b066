# SPDX-License-Identifier: Apache-2.0
"""What each layer does may change between forwards, and an observer is told: the same gradients, bit for bit."""

import contextlib
import copy
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from offstage.activations.offload import offload_activations
from offstage.errors import ConfigError, OffloadIneffectiveError, OffstageError
from offstage.modules import Recomputing
from offstage.planning.choices import Choice
from tests.activations.test_offload import (
    SEEDS,
    WIDTH,
    Block,
    Checkpointed,
    Convolution,
    Experts,
    InPlace,
    Reentrant,
    Stack,
    assert_same,
    on_lanes,
    tied,
)
from tests.activations.test_remaking import Gated

LAYERS = 4
KEEP, REMAKE, OFFLOAD, RECOMPUTE = Choice.KEEP, Choice.REMAKE, Choice.OFFLOAD, Choice.RECOMPUTE
INPUT = 2 * 3 * WIDTH * 4
"""Bytes of what goes from layer to layer."""


def batch(number, length=3):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(model):
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def is_bound(model):
    """Whether layers are wrapped to be recomputed."""
    found = {isinstance(getattr(layer.forward, "__self__", None), Recomputing) for layer in model.layers}
    assert len(found) == 1
    return found.pop()


class Dropping(nn.Module):
    """Draws random numbers; a layer that is recomputed must draw the same."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, scale=1.0, mask=None):
        y = nn.functional.dropout(self.linear(x), 0.3)
        return x + y * scale + (0 if mask is None else mask)


class WithKeywords(Stack):
    def call(self, layer, x):
        return layer(x, scale=0.5, mask=x.detach().sign())


class SomeCheckpointed(Stack):
    """Two layers are checkpointed by the model itself, one in each way."""

    def call(self, layer, x):
        number = list(self.layers).index(layer)
        return layer(x) if number % 2 else checkpoint(layer, x, use_reentrant=number == 0)


class Skipping(Stack):
    """Takes another way each time."""

    number = 0

    def forward(self, x):
        self.number += torch.is_grad_enabled()
        return super().forward(x)

    def call(self, layer, x):
        return x if layer is self.layers[self.number % LAYERS] else layer(x)


def with_own_forward():
    """A layer whose forward was replaced, as libraries do."""
    model = Stack(Block, LAYERS)
    forward = model.layers[2].forward
    model.layers[2].forward = lambda x: forward(x) * 1.5
    return model


def of_several_kinds():
    kinds = itertools.cycle([Block, InPlace, Experts])
    return Stack(lambda: next(kinds)(), LAYERS)


MODELS = {
    "transformer": lambda: Stack(Block, LAYERS),
    "gated": lambda: Stack(Gated, LAYERS),
    "checkpointed": lambda: Checkpointed(Block, LAYERS),
    "checkpointed, reentrant": lambda: Reentrant(Block, LAYERS),
    "some checkpointed": lambda: SomeCheckpointed(Block, LAYERS),
    "experts": lambda: Stack(Experts, LAYERS),
    "in place, views": lambda: Stack(InPlace, LAYERS),
    "of several kinds": of_several_kinds,
    "one layer called four times": lambda: Stack(tied(), LAYERS),
    "random numbers": lambda: WithKeywords(Dropping, LAYERS),
    "a forward of its own": with_own_forward,
    "another way each time": lambda: Skipping(Block, LAYERS),
}
MIXES = st.lists(st.lists(st.sampled_from(list(Choice)), min_size=LAYERS, max_size=LAYERS), min_size=1, max_size=6)


def trained(make, mixes, *, plain=False, autocast=False, waiting=1, evaluate=False):
    """One forward for each mix, up to `waiting` of which wait for their backward while the next one is replanned. With
    `evaluate`, an evaluation and a forward that gets no backward come after each."""
    torch.manual_seed(0)
    model = make()
    handle = None if plain else offload_activations(model, min_bytes=0)
    found, losses = [], []

    def backward():
        losses.pop(0).backward()
        found.extend(gradients(model))

    for number, mix in enumerate(mixes):
        if handle is not None:
            handle.replan(mix)
            assert handle.choices == tuple(mix)
            assert is_bound(model) == (RECOMPUTE in mix)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            losses.append(model(batch(number, 3 + number % 2)))
        if evaluate:
            with torch.no_grad():
                found.append(model(batch(number)))
            model(batch(number))
        if len(losses) == waiting:
            backward()
    while losses:
        backward()
    if handle is not None:
        handle.remove()
        assert not is_bound(model)
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=12, deadline=None)
@given(mixes=MIXES, autocast=st.booleans(), waiting=st.integers(1, 3), evaluate=st.booleans(), seed=st.integers(0, 3))
def test_any_choices_have_the_same_gradients(model, late, mixes, autocast, waiting, evaluate, seed):
    how = {"autocast": autocast, "waiting": waiting, "evaluate": evaluate}
    expected = trained(MODELS[model], mixes, plain=True, **how)
    with on_lanes(seed if late else None):
        assert_same(trained(MODELS[model], mixes, **how), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("after", list(Choice))
@pytest.mark.parametrize("before", list(Choice))
def test_a_forward_keeps_to_its_choices(before, after, seed):
    """What is replanned between a forward and its backward counts for the next one."""
    torch.manual_seed(0)
    plain = Stack(Gated, LAYERS)
    for number in range(3):
        plain(batch(number)).backward()
    with on_lanes(seed):
        torch.manual_seed(0)
        model = Stack(Gated, LAYERS)
        with offload_activations(model, min_bytes=0) as handle:
            for number in range(3):
                handle.replan([before] * LAYERS)
                left = handle.bytes_offloaded
                loss = model(batch(number))
                moved = handle.bytes_offloaded - left
                handle.replan([after] * LAYERS)
                loss.backward()
                assert bool(moved) == (before in (OFFLOAD, RECOMPUTE))
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_user_s_checkpoint_that_waits_while_layers_are_bound(seed):
    """Its layers are called again in backward, when they may be recomputed in the next forward."""
    for make in (Checkpointed, Reentrant):
        torch.manual_seed(0)
        plain = make(Block, LAYERS)
        plain(batch(0)).backward()
        with on_lanes(seed):
            torch.manual_seed(0)
            model = make(Block, LAYERS)
            handle = offload_activations(model, min_bytes=0)
            loss = model(batch(0))
            handle.replan([RECOMPUTE] * LAYERS)
            loss.backward()
        assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("seed", SEEDS)
def test_with_weights_on_the_host_too(seed):
    """They stay where they live, whatever their layer does."""

    def run(plain):
        torch.manual_seed(0)
        model = Stack(Gated, LAYERS)
        handle = None if plain else offload_activations(model, min_bytes=0, weights=True)
        found = []
        for number in range(2 * len(Choice)):
            if handle is not None:
                handle.replan([list(Choice)[(number + layer) % len(Choice)] for layer in range(LAYERS)])
            model.zero_grad()
            model(batch(number)).backward()
            found += gradients(model)
        assert handle is None or handle.receipt().weight_bytes_fetched > 0
        return found

    expected = run(True)
    with on_lanes(seed):
        assert_same(run(False), expected)


# Refusals


def counting():
    """Layers with running statistics, between others."""
    kinds = iter([Block, Convolution, Block, Convolution])
    return Stack(lambda: next(kinds)(), LAYERS)


def test_layers_with_running_statistics_are_not_recomputed():
    model = counting()
    handle = offload_activations(model, min_bytes=0)
    before = handle.choices
    with pytest.raises(ConfigError, match=r"recompute layer 1, a Convolution, which has running statistics"):
        handle.replan([RECOMPUTE] * LAYERS)
    assert handle.choices == before
    assert not is_bound(model)


@pytest.mark.parametrize("seed", SEEDS)
def test_buffers_are_the_same(seed):
    """A layer that counts its batches does so once, also where another layer is skipped and is recomputed."""

    def buffers(choices):
        torch.manual_seed(0)
        model = counting()
        handle = None
        if choices is not None:
            handle = offload_activations(model, min_bytes=0)
            handle.replan(choices)
        for number in range(3):
            model.call = lambda layer, x, number=number: x if layer is model.layers[0] and number else layer(x)
            model(batch(number)).backward()
        del handle
        return [*gradients(model), *(buffer.clone() for buffer in model.buffers())]

    expected = buffers(None)
    with on_lanes(seed):
        assert_same(buffers([RECOMPUTE, OFFLOAD, RECOMPUTE, KEEP]), expected)
        assert_same(buffers([OFFLOAD, REMAKE, RECOMPUTE, OFFLOAD]), expected)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([KEEP] * 3, r"a Choice for each of 4 layers; found 3\. Give one"),
        ([], "found 0"),
        (["keep"] * 4, "found 4, .*'keep'"),
    ],
)
def test_bad_choices(choices, message):
    handle = offload_activations(Stack(Block, LAYERS), min_bytes=0)
    with pytest.raises(ConfigError, match=message):
        handle.replan(choices)


def test_when_there_is_nothing_to_choose():
    model = Stack(Block, LAYERS)
    handle = offload_activations(model, min_bytes=0, activations=False, weights=True)
    handle.replan([KEEP] * LAYERS)
    with pytest.raises(ConfigError, match="Leave out activations=False"):
        handle.replan([OFFLOAD] * LAYERS)
    handle.remove()
    with pytest.raises(OffstageError, match=r"after remove\(\)"):
        handle.replan([KEEP] * LAYERS)


def test_a_forward_in_another_thread_is_not_disturbed():
    """`replan()` in the middle of it is refused, and works when it has ended."""
    torch.manual_seed(0)
    model = Stack(Block, LAYERS)
    handle = offload_activations(model, min_bytes=0)
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        assert go_on.wait(30)

    hook = model.layers[1].register_forward_hook(wait)
    thread = threading.Thread(target=lambda: model(batch(0)).backward())
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(OffstageError, match=r"replan\(\) was called while a forward of the model was running"):
            handle.replan([RECOMPUTE] * LAYERS)
        assert not is_bound(model)
    finally:
        go_on.set()
        thread.join(30)
    hook.remove()
    handle.replan([RECOMPUTE] * LAYERS)
    assert is_bound(model)


# Off is off


def test_no_wrapper_is_left():
    model = with_own_forward()
    before = [vars(layer).get("forward") for layer in model.layers]
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    with offload_activations(model, min_bytes=0) as handle:
        for choices in ([OFFLOAD] * LAYERS, [KEEP] * LAYERS, [REMAKE] * LAYERS):
            handle.replan([KEEP, RECOMPUTE, OFFLOAD, KEEP])
            model(batch(0)).backward()
            assert is_bound(model)
            handle.replan(choices)
            assert [vars(layer).get("forward") for layer in model.layers] == before
        handle.replan([RECOMPUTE] * LAYERS)
    assert [vars(layer).get("forward") for layer in model.layers] == before
    assert {name: len(module._forward_pre_hooks) for name, module in model.named_modules()} == hooks
    model(batch(0)).backward()
    reference = weakref.ref(handle)
    del handle
    gc.collect()
    assert reference() is None


def test_a_forward_that_is_replaced_meanwhile_stays():
    """Other code wraps the layer while it is recomputed: neither loses the other's."""
    torch.manual_seed(0)
    plain = Stack(Block, LAYERS)
    plain(batch(0)).backward()
    torch.manual_seed(0)
    model = Stack(Block, LAYERS)
    handle = offload_activations(model, min_bytes=0)
    handle.replan([RECOMPUTE] * LAYERS)
    calls, inner = [], model.layers[0].forward
    model.layers[0].forward = lambda x: calls.append(1) or inner(x)
    for choices in ([KEEP] * LAYERS, [RECOMPUTE] * LAYERS, [KEEP] * LAYERS):
        handle.replan(choices)
        model.zero_grad()
        model(batch(0)).backward()
        assert_same(gradients(model), gradients(plain))
    assert len(calls) == 4  # the second forward ran twice
    handle.remove()
    assert model.layers[0].forward(batch(1)).shape == batch(1).shape
    assert len(calls) == 5


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_recomputes_nothing(how):
    torch.manual_seed(0)
    model = Stack(Block, LAYERS)
    handle = offload_activations(model, min_bytes=0)
    handle.replan([RECOMPUTE] * LAYERS)
    model(batch(0)).backward()
    expected, passes = gradients(model), handle.receipt().passes
    twin = how(model)
    runs = []
    for layer in twin.layers:
        layer.norm.register_forward_hook(lambda *_: runs.append(1))
    twin.zero_grad()
    twin(batch(0)).backward()
    assert len(runs) == LAYERS
    assert_same(gradients(twin), expected)
    assert handle.receipt().passes == passes


# Idle


def test_keeping_everything_is_no_error():
    model = Stack(Block, LAYERS)
    with offload_activations(model, min_bytes=0) as handle:
        handle.replan([KEEP] * LAYERS)
        for number in range(6):
            model(batch(number)).backward()
        assert handle.bytes_offloaded == handle.host_bytes == 0


@pytest.mark.parametrize("choice", [RECOMPUTE, REMAKE])
def test_layers_that_free_memory_otherwise_are_no_error(choice):
    model = Stack(Block, LAYERS)
    with offload_activations(model) as handle:  # tensors of a few KiB
        handle.replan([choice] * LAYERS)
        for number in range(6):
            model(batch(number)).backward()


def test_idle_since_the_last_plan_is_an_error():
    """Three forwards after the choices changed; the same choices once more change nothing."""
    model = Stack(Block, LAYERS)
    with offload_activations(model, min_bytes="4KiB") as handle:
        model(batch(0, 64)).backward()
        assert handle.bytes_offloaded
        handle.replan([KEEP] * LAYERS)
        for number in range(4):
            model(batch(number)).backward()
        for number in range(3):
            handle.replan([OFFLOAD] * LAYERS)
            model(batch(number)).backward()
        with pytest.raises(OffloadIneffectiveError, match=r"min_bytes=4\.0 KiB"):
            model(batch(3))


# The observer


class Recorder:
    """All that an observer is told."""

    def __init__(self):
        self.told = []
        self.here = {}

    def begin_forward(self, in_flight):
        self.told.append(("begin_forward", in_flight))

    def enter(self, layer, here_bytes):
        self.told.append(("enter", layer))
        self.here["enter", layer] = here_bytes

    def leave(self, layer, here_bytes):
        self.told.append(("leave", layer))
        self.here["leave", layer] = here_bytes

    def saved(self, layer, nbytes, *, is_remade):
        assert nbytes > 0
        self.told.append(("remade" if is_remade else "saved", layer, nbytes))

    def in_backward(self, layer, here_bytes):
        self.told.append(("in_backward", layer, here_bytes))

    def end_forward(self):
        self.told.append(("end_forward",))

    def bytes_of(self, what, layer):
        return sum(one[2] for one in self.told if one[:2] == (what, layer))

    def named(self, *names):
        return [one for one in self.told if one[0] in names]


def observed(make, choices, iterations=1):
    """What the observer of the last of them was told, and the handle."""
    torch.manual_seed(0)
    model = make()
    handle = offload_activations(model, min_bytes=0)
    handle.replan(choices)
    recorder = None
    for number in range(iterations):
        handle.observer = recorder = Recorder()
        model(batch(number)).backward()
    return recorder, handle


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_that_layers_save(seed):
    """A gated layer saves its input, gate and up, what silu makes of the gate, and the product of the two."""
    hidden = 4 * INPUT
    choices = [KEEP, OFFLOAD, RECOMPUTE, REMAKE]
    with on_lanes(seed):
        first, _ = observed(lambda: Stack(Gated, LAYERS), choices)
        later, handle = observed(lambda: Stack(Gated, LAYERS), choices, iterations=3)
    everything = INPUT + 4 * hidden
    assert [first.bytes_of("saved", layer) for layer in range(LAYERS)] == [everything, everything, INPUT, everything]
    assert not first.named("remade")  # that needs a proof
    rest = INPUT + 2 * hidden
    assert [later.bytes_of("saved", layer) for layer in range(LAYERS)] == [everything, rest, INPUT, rest]
    assert [later.bytes_of("remade", layer) for layer in range(LAYERS)] == [0, 2 * hidden, 0, 2 * hidden]
    assert handle.receipt().bytes_offloaded == rest + INPUT
    assert handle.receipt().bytes_remade == 4 * hidden
    assert handle.receipt().choices == tuple(choices)


@pytest.mark.parametrize("choice", list(Choice))
@pytest.mark.parametrize("make", [Checkpointed, Reentrant])
def test_bytes_of_layers_that_are_checkpointed(make, choice):
    """Their inputs, which either checkpointing saves outside the layer; reentrant, when the next one begins."""
    recorder, _ = observed(lambda: make(Block, LAYERS), [choice] * LAYERS)
    assert [recorder.bytes_of("saved", layer) for layer in range(LAYERS)] == [INPUT] * LAYERS
    asked = [layer for _, layer, _ in recorder.named("in_backward") if layer is not None]
    assert asked == [3, 2, 1, 0]


def test_a_small_part_of_something_large_counts():
    """It holds all of the storage, and does not leave."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, 8 * WIDTH)

        def forward(self, x):
            return x + self.linear(x)[..., :WIDTH].sin()

    recorder, handle = observed(lambda: Stack(First, LAYERS), [OFFLOAD] * LAYERS)
    assert [recorder.bytes_of("saved", layer) for layer in range(LAYERS)] == [INPUT + 8 * INPUT] * LAYERS
    assert handle.receipt().bytes_offloaded == LAYERS * INPUT


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("choice", list(Choice))
def test_order_and_what_is_here_in_backward(choice, seed):
    with on_lanes(seed):
        recorder, _ = observed(lambda: Stack(Gated, LAYERS), [choice] * LAYERS, iterations=3)
    turns = [("begin_forward", 1), *((what, n) for n in range(LAYERS) for what in ("enter", "leave")), ("end_forward",)]
    assert recorder.named("begin_forward", "enter", "leave", "end_forward") == turns
    in_forward = recorder.told.index(("end_forward",))
    assert all(one[0] != "in_backward" for one in recorder.told[:in_forward])
    asked = recorder.told[in_forward + 1 :]
    assert all(one[0] == "in_backward" for one in asked)
    layers = [layer for _, layer, _ in asked if layer is not None]
    assert layers == sorted(layers, reverse=True)
    assert set(layers) == set(range(LAYERS))
    assert next(layer for _, layer, _ in asked) is None  # the head
    saved = sum(recorder.bytes_of("saved", layer) for layer in range(LAYERS))
    most = max(here for _, _, here in asked)
    if choice in (KEEP, REMAKE):
        assert most == saved
    else:
        assert most < saved
    if choice is KEEP:  # each layer's go when it is done
        assert next(here for _, layer, here in asked if layer == 0) == recorder.bytes_of("saved", 0)


def test_what_is_here_in_forward():
    """What layers keep; what leaves does not stay behind the last one, if all leave: there the head begins."""
    recorder, _ = observed(lambda: Stack(Block, LAYERS), [KEEP] * LAYERS)
    saved = list(itertools.accumulate((recorder.bytes_of("saved", layer) for layer in range(LAYERS)), initial=0))
    assert [recorder.here["enter", layer] for layer in range(LAYERS)] == saved[:-1]
    assert [recorder.here["leave", layer] for layer in range(LAYERS)] == saved[1:]
    for choices in ([OFFLOAD] * LAYERS, [RECOMPUTE] * LAYERS, [RECOMPUTE] * (LAYERS - 1) + [OFFLOAD]):
        recorder, _ = observed(lambda: Stack(Block, LAYERS), choices)
        assert recorder.here["leave", LAYERS - 1] == 0


def test_no_layer_has_saved_what_the_head_holds():
    """What is saved outside the layers is nobody's to choose: it is neither told nor counted."""
    recorder, _ = observed(lambda: Stack(Block, LAYERS), [KEEP] * LAYERS)
    here = [here for _, layer, here in recorder.named("in_backward") if layer is None]
    assert here[0] == sum(recorder.bytes_of("saved", layer) for layer in range(LAYERS))
    assert here[-1] == 0


def test_forwards_in_flight_are_counted():
    model = Stack(Block, LAYERS)
    handle = offload_activations(model, min_bytes=0)
    waiting = [model(batch(0))]  # before there is an observer
    handle.observer = recorder = Recorder()
    for choices in ([KEEP] * LAYERS, [OFFLOAD] * LAYERS, [RECOMPUTE] * LAYERS):
        handle.replan(choices)
        waiting.append(model(batch(1)))
    for loss in waiting:
        loss.backward()
    del loss, waiting
    model(batch(2)).backward()
    with torch.no_grad():
        model(batch(3))
    assert [told for _, told in recorder.named("begin_forward")] == [2, 3, 4, 1]
    handle.observer = None
    before = len(recorder.told)
    model(batch(4)).backward()
    assert len(recorder.told) == before


def test_a_forward_that_raises_is_ended():
    model = Stack(Block, LAYERS)
    handle = offload_activations(model, min_bytes=0)
    handle.observer = recorder = Recorder()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(2, 3, WIDTH + 1))
    hook = model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(0))
    hook.remove()
    model(batch(0)).backward()
    alone = [("begin_forward", 1), ("end_forward",)]
    failed = [("begin_forward", 1), ("enter", 0), ("leave", 0), ("enter", 1), ("leave", 1), ("end_forward",)]
    turns = recorder.named("begin_forward", "enter", "leave", "end_forward")
    assert turns[: len(alone) + len(failed)] == alone + failed
    assert turns[-1] == ("end_forward",)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_observer_may_replan_when_a_forward_begins(seed):
    """It counts for that forward."""
    mixes = [[choice] * LAYERS for choice in (RECOMPUTE, KEEP, OFFLOAD, RECOMPUTE, KEEP)]

    def run(plain):
        torch.manual_seed(0)
        model = Stack(Block, LAYERS)
        if not plain:
            handle = offload_activations(model, min_bytes=0)

            class Planner(Recorder):
                def begin_forward(self, in_flight):
                    handle.replan(self.mix)

            handle.observer = planner = Planner()
        found = []
        for number, mix in enumerate(mixes):
            if not plain:
                planner.mix, left = mix, handle.bytes_offloaded
            model(batch(number)).backward()
            found += gradients(model)
            if not plain:
                assert is_bound(model) == (RECOMPUTE in mix)
                assert (handle.bytes_offloaded > left) == (KEEP not in mix)
        return found

    expected = run(True)
    with on_lanes(seed):
        assert_same(run(False), expected)


def test_layers_are_known_by_what_they_are():
    """Whichever of them run."""
    model = Skipping(Block, LAYERS)
    handle = offload_activations(model, min_bytes=0)
    assert handle.layers == list(model.layers)
    handle.observer = recorder = Recorder()
    for number in range(LAYERS):
        model(batch(number)).backward()
    entered = [layer for _, layer in recorder.named("enter")]
    assert entered == [0, 2, 3, 0, 1, 3, 0, 1, 2, 1, 2, 3]
    tied_model = Stack(tied(), LAYERS)
    handle = offload_activations(tied_model, min_bytes=0)
    handle.observer = recorder = Recorder()
    tied_model(batch(0)).backward()
    assert [layer for _, layer in recorder.named("enter")] == [0, 1, 2, 3]
