# SPDX-License-Identifier: Apache-2.0
"""`layers="auto"`: measured, planned, corrected, and in every phase the same gradients, bit for bit.

Lanes here say that every layer's forward takes a millisecond, and the link carries a layer's tensors in 1.5: plans are
then the same on every machine. What is saved is counted as it is.
"""

import contextlib
import itertools
import logging

import pytest
import torch
from torch import nn

from offstage.activations import device as activation_device
from offstage.activations.offload import offload_activations
from offstage.activations.plan import Choice
from offstage.errors import ConfigError, HostMemoryError
from offstage.lanes.lanes import ImmediateLanes
from offstage.lanes.link import Link, use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from tests.activations.test_offload import (
    WIDTH,
    Block,
    Checkpointed,
    Convolution,
    Experts,
    InPlace,
    Stack,
    assert_same,
    tied,
)
from tests.activations.test_remaking import Gated

SEEDS = [None, 0]
LAYERS = 6
BEFORE_THE_PLAN = 2
"""Passes that are measured."""


class Clock:
    """A millisecond between any two stamps."""

    def stamp(self, lane):
        return 0.0

    def elapsed_ms(self, start, stop):
        return 1.0


class Timed(Clock, ImmediateLanes):
    pass


class TimedLate(Clock, LazyLanes):
    pass


@pytest.fixture(autouse=True)
def link(monkeypatch):
    """What the link carries; a test may change it."""
    rate = [0.05]
    monkeypatch.setattr(Link, "gb_per_s", lambda self, lanes: rate[0])
    monkeypatch.setattr(activation_device, "measure_remaking", lambda lanes: 1.0)
    return rate


def on_lanes(seed):
    return use_lanes(Timed if seed is None else lambda device: TimedLate(device, seed=seed))


def transformer():
    return Stack(Block, LAYERS)


def batch(number, size=8, length=16):
    return torch.randn(size, length, WIDTH, generator=torch.Generator().manual_seed(number))


class Looking:
    """What the device holds whenever backward has passed a layer: parameters, gradients, and saved tensors."""

    def __init__(self, model, handle):
        self.model, self.handle, self.most = model, handle, 0
        for layer in model.layers:
            layer.register_forward_hook(self.look_in_backward)

    def look_in_backward(self, module, inputs, output):
        if output.requires_grad:
            output.register_hook(self.look)

    def look(self, gradient):
        params = list(self.model.parameters())
        held = sum(p.nbytes for p in params) + sum(p.grad.nbytes for p in params if p.grad is not None)
        held += sum(device.here_bytes for device in self.handle._devices.values())
        self.most = max(self.most, held)


def iterate(model, number):
    """All that must be the same after an iteration."""
    model.zero_grad()
    loss = model(batch(number))
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]


def run(peak, make=transformer, iterations=9, **config):
    """Iterations, and what each of them found and did: (tensors, choices, most bytes)."""
    torch.manual_seed(0)
    model = make()
    if peak is None:
        return [iterate(model, number) for number in range(iterations)], None, []
    handle = offload_activations(model, min_bytes=0, layers="auto", device_peak=peak, **config)
    looking = Looking(model, handle)
    found, most = [], []
    for number in range(iterations):
        found.append(iterate(model, number))
        most.append(looking.most)
        looking.most = 0
    return found, handle, most


def needs():
    """What keeping everything takes."""
    with on_lanes(None):
        torch.manual_seed(0)
        model = transformer()
        looking = Looking(model, offload_activations(model, min_bytes=0, layers=0))
        for number in range(2):
            iterate(model, number)
    return looking.most


def counts(handle):
    return tuple(handle.plan.count(choice) for choice in (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [1.1, 0.85, 0.7, 0.55, 0.45])
def test_every_phase_has_the_same_gradients_and_the_peak_is_kept(share, seed):
    peak = int(share * needs())
    expected, _, _ = run(None)
    with on_lanes(seed):
        found, handle, most = run(peak)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert max(most[-3:]) <= peak
    assert handle.plan.peak_bytes <= peak
    if share > 1:
        assert counts(handle) == (LAYERS, 0, 0)
        assert handle.receipt().bytes_offloaded == 0
    else:
        assert counts(handle)[0] < LAYERS
        assert handle.receipt().bytes_offloaded > 0


def test_from_keeping_to_the_least(link):
    """Less room, fewer layers that keep; a fast link offloads, a slow one recomputes."""
    needed = needs()
    for rate, other in ((5.0, Choice.RECOMPUTE), (0.002, Choice.OFFLOAD)):
        link[0] = rate
        kept = []
        with on_lanes(None):
            for share in (1.1, 0.85, 0.7, 0.55):
                _, handle, _ = run(int(share * needed))
                kept.append(counts(handle)[0])
                assert handle.plan.count(other) == 0, (rate, share, str(handle.plan))
        assert kept[0] == LAYERS
        assert kept == sorted(kept, reverse=True)
        assert kept[-1] < kept[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_measured_first(seed, caplog):
    """No plan in the first passes: the least memory of all, and the same bits. Then a plan that is said and stays."""
    with on_lanes(seed), caplog.at_level(logging.INFO, logger="offstage"):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, min_bytes=0, layers="auto", device_peak="1GiB")
        for number in range(BEFORE_THE_PLAN):
            iterate(model, number)
            assert handle.plan is None
            assert handle.receipt().plan is None
        iterate(model, 2)
        assert handle.plan is not None
        assert str(handle.plan) in caplog.text
        for number in range(8):
            iterate(model, number)
        settled = handle.plan
        iterate(model, 3)
        assert handle.plan is settled
    assert handle.receipt().plan is settled
    assert str(settled) in str(handle.receipt())
    for word in ("keep", "offload", "recompute", "predicted peak", "ms added per iteration", "GB/s"):
        assert word in str(settled)


@pytest.mark.parametrize("seed", SEEDS)
def test_too_small_a_peak_is_refused_with_numbers(seed):
    """When everything is known; the model is as before once it is removed."""
    with on_lanes(seed):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, min_bytes=0, layers="auto", device_peak="100KiB")
        for number in range(BEFORE_THE_PLAN):
            iterate(model, number)
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=r"device_peak=100\.0 KiB is not enough: .*predicted peak is still \d"
            ):
                iterate(model, 2)
        handle.remove()
        found = iterate(model, 3)
    torch.manual_seed(0)
    assert_same(found, iterate(transformer(), 3))


class Dropping(nn.Module):
    """Draws random numbers; a layer that is computed again must draw the same."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, scale=1.0, mask=None):
        y = nn.functional.dropout(self.linear(x), 0.3)
        return x + y * scale + (0 if mask is None else mask)


class WithKeywords(Stack):
    def call(self, layer, x):
        return layer(x, scale=0.5, mask=x.detach().sign())


def with_own_forward():
    """A layer whose forward was replaced, as libraries do."""
    model = transformer()
    forward = model.layers[2].forward
    model.layers[2].forward = lambda x: forward(x) * 1.5
    return model


def of_several_kinds():
    kinds = itertools.cycle([Block, InPlace, Experts])
    return Stack(lambda: next(kinds)(), LAYERS)


MODELS = {
    "checkpointed": lambda: Checkpointed(Block, LAYERS),
    "experts": lambda: Stack(Experts, LAYERS),
    "in place, views": lambda: Stack(InPlace, LAYERS),
    "of several kinds": of_several_kinds,
    "one layer called six times": lambda: Stack(tied(), LAYERS),
    "random numbers": lambda: WithKeywords(Dropping, LAYERS),
    "a forward of its own": with_own_forward,
    "gated": lambda: Stack(Gated, LAYERS),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", MODELS)
def test_models(model, seed):
    """With little room: as near to the least that is accepted as it goes."""

    def draws(peak):
        torch.manual_seed(7)
        return run(peak, MODELS[model], iterations=6)

    expected, _, _ = draws(None)
    with on_lanes(seed):
        peak = 1 << 30
        for _ in range(12):  # downwards until it is refused: each one is right
            try:
                found, handle, _ = draws(peak)
            except ConfigError:
                break
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)
            peak = int(0.9 * handle.plan.peak_bytes)
    assert peak < 1 << 29, "nothing but the first was accepted"


@pytest.mark.parametrize("seed", SEEDS)
def test_kept_layers_make_again_what_they_can(seed, link):
    """Over a link that carries nothing, with room for a little less than everything."""
    link[0] = 1e-6

    def gated():
        return Stack(Gated, LAYERS)

    expected, _, _ = run(None, gated)
    with on_lanes(seed):
        everything, handle, _ = run(1 << 30, gated)
        assert set(handle.plan.choices) == {Choice.KEEP}
        assert handle.receipt().bytes_remade == 0
        peak = int(0.97 * handle.plan.peak_bytes)
        found, handle, most = run(peak, gated)
        assert handle.plan.count(Choice.REMAKE) > 0
        receipt = handle.receipt()
        hidden = 8 * 16 * 4 * WIDTH * 4
        assert receipt.bytes_remade == 2 * hidden * handle.plan.count(Choice.REMAKE)
        assert max(most[-3:]) <= peak
        for one, other, plain in zip(found, everything, expected, strict=True):
            assert_same(one, plain)
            assert_same(other, plain)


@pytest.mark.parametrize("seed", SEEDS)
def test_buffers_are_the_same(seed):
    """A layer that counts its batches, as BatchNorm does, and is computed again must not count them twice."""

    def buffers(peak):
        torch.manual_seed(0)
        model = Stack(Convolution, LAYERS)
        handle = None
        if peak is not None:
            handle = offload_activations(model, min_bytes=0, layers="auto", device_peak=peak)
        found = []
        for number in range(5):
            found += iterate(model, number)
        del handle
        return found + [buffer.clone() for buffer in model.buffers()]

    expected = buffers(None)
    with on_lanes(seed):
        assert_same(buffers("1GiB"), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_weights_on_the_host_too(seed):
    expected, _, _ = run(None)
    with on_lanes(seed):
        for share in (1.1, 0.6):
            found, handle, _ = run(int(share * needs()), weights=True)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)
            assert handle.receipt().weight_bytes_fetched > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_iterations_of_all_sorts(seed):
    """Micro-batches in flight, a forward without backward, evaluation, lengths that vary: in every phase."""

    def loop(model):
        found = []
        for number in range(10):
            model.zero_grad()
            size = 2 + number % 3
            losses = [model(batch(number, size)), model(batch(number + 50, size, 8))]
            model(batch(number, size))
            with torch.no_grad():
                found.append(model(batch(number, size)))
            for loss in losses:
                loss.backward()
            found += [param.grad.clone() for param in model.parameters()]
        return found

    torch.manual_seed(0)
    expected = loop(transformer())
    with on_lanes(seed):
        for peak in ("1GiB", int(0.5 * needs())):
            torch.manual_seed(0)
            model = transformer()
            handle = offload_activations(model, min_bytes=0, layers="auto", device_peak=peak)
            assert_same(loop(model), expected)
            assert handle.plan is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches_in_flight_are_planned_for(seed):
    """As in a pipeline: the plan counts what each of them keeps, before it has seen a peak of its own."""

    def loop(model, looking=None):
        waiting, most = [], []
        for number in range(16):
            waiting.append(model(batch(number)))
            if len(waiting) == 3:
                waiting.pop(0).backward()
            if looking is not None:
                planned = looking.handle.plan is not None
                most += [looking.most] if planned else []
                looking.most = 0
        for loss in waiting:
            loss.backward()
        return [param.grad for param in model.parameters()], most

    torch.manual_seed(0)
    expected, _ = loop(transformer())
    alone = needs()
    with on_lanes(seed):
        torch.manual_seed(0)
        model = transformer()
        handle = offload_activations(model, min_bytes=0, layers="auto", device_peak=int(1.1 * alone))
        found, most = loop(model, Looking(model, handle))
        assert_same(found, expected)
        assert handle._measurements.in_flight == 3
        assert handle.plan.count(Choice.KEEP) < LAYERS
        assert most
        assert max(most) <= 1.1 * alone
        _, handle, _ = run(int(1.1 * alone))
        assert handle._measurements.in_flight == 1
        assert handle.plan.count(Choice.KEEP) == LAYERS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_layer_that_is_skipped_at_first(seed):
    """A plan is made when all layers have been seen; until then it goes on measuring."""

    class Skipping(Stack):
        number = 0

        def call(self, layer, x):
            return x if layer is self.layers[3] and self.number < 4 else layer(x)

    def loop(model, handle=None):
        found = []
        for model.number in range(8):
            found += iterate(model, model.number)
            if handle is not None and model.number < 4:
                assert handle.plan is None
        return found

    torch.manual_seed(0)
    expected = loop(Skipping(Block, LAYERS))
    with on_lanes(seed):
        torch.manual_seed(0)
        model = Skipping(Block, LAYERS)
        handle = offload_activations(model, min_bytes=0, layers="auto", device_peak="1GiB")
        assert_same(loop(model, handle), expected)
        assert handle.plan is not None


def test_removing_it_puts_the_forwards_back():
    model = with_own_forward()
    before = [vars(layer).get("forward") for layer in model.layers]
    with on_lanes(None), offload_activations(model, min_bytes=0, layers="auto", device_peak="1GiB"):
        for number in range(3):
            iterate(model, number)
        assert all("forward" in vars(layer) for layer in model.layers)
    assert [vars(layer).get("forward") for layer in model.layers] == before
    iterate(model, 3)


def test_what_it_takes_to_measure_fits_a_small_host_budget(monkeypatch):
    """The real measurement of the link: within the budget, and not kept for good."""
    monkeypatch.undo()
    torch.manual_seed(0)
    model = transformer()
    handle = offload_activations(model, min_bytes=0, layers="auto", device_peak="1GiB", host_budget="4MiB")
    with contextlib.suppress(HostMemoryError):
        for number in range(4):
            iterate(model, number)
    assert handle.plan is not None
    assert handle.host_bytes <= 4 * 1024 * 1024


BAD = [
    ({"layers": "auto"}, "found no device_peak"),
    ({"device_peak": "1GiB"}, "Add layers='auto'"),
    ({"layers": "auto", "device_peak": "1GiB", "fraction": 0.5}, "contradicts fraction"),
    ({"layers": "auto", "device_peak": "1GiB", "activations": False, "weights": True}, "activations=False"),
    ({"layers": "auto", "device_peak": "much"}, "a number of bytes or a size"),
    ({"layers": "automatic", "device_peak": "1GiB"}, "or 'auto'; found 'automatic'"),
]


@pytest.mark.parametrize(("config", "message"), BAD)
def test_bad_input(config, message):
    with pytest.raises(ConfigError, match=message):
        offload_activations(transformer(), min_bytes=0, **config)
