# SPDX-License-Identifier: Apache-2.0
"""Twenty times sleep, wake and train: the bits of never sleeping, in every mode, on immediate and lazy lanes."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

import offstage
from offstage import asleep, offload_activations, sleep, wake
from tests.support.training import lazily, same_bits

CYCLES = 20
SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}
CLIP = [1e4, 1e4, 1e-3]
"""Most steps are not clipped, some are: speculative updates that stay, and some that are taken back."""


class Net(nn.Module):
    """A tied weight, buffers that training writes, a frozen layer, a parameter that is a view, and one without use."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(40, 48)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(3))
        self.norm = nn.BatchNorm1d(48)
        self.frozen = nn.Linear(48, 48).requires_grad_(False)
        flat = torch.randn(2 * 48)
        self.scale, self.shift = nn.Parameter(flat[:48]), nn.Parameter(flat[48:])
        self.unused = nn.Parameter(torch.ones(7))
        self.head = nn.Linear(48, 40, bias=False)
        self.to(dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x) + self.frozen(x)
        return self.head(x * self.scale + self.shift)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(40, (6,), generator=generator), torch.randint(40, (6,), generator=generator)


def loss_of(model, number):
    tokens, targets = batch(number)
    return nn.functional.cross_entropy(model(tokens).float(), targets)


def plain(make=torch.optim.AdamW, **options):
    def build(model):
        return make([p for p in model.parameters() if p.requires_grad], lr=0.01, **options)

    return build


def offloaded(**config):
    def build(model):
        return offstage.offload(plain()(model), model, **SMALL, **config)

    return build


MODES = {
    "plain": plain(),
    "plain_fused": plain(fused=True),
    "plain_sgd": plain(torch.optim.SGD, momentum=0.9),
    "resident": offloaded(fraction=0.0),
    "streamed": offloaded(),
    "half": offloaded(fraction=0.5),
    "on_host": offloaded(update_on="host"),
    "overlap_forward": offloaded(overlap_forward=True),
    "window": offloaded(window="all", overlap_forward=True, fraction=0.5),
    "in_backward": offloaded(update_in_backward=True, fraction=0.5),
    "both": offloaded(update_in_backward=True, overlap_forward=True),
    "weights_on_host": offloaded(weights="host"),
    "weights_on_host_postponed": offloaded(weights="host", overlap_forward=True),
    "weights_on_host_in_backward": offloaded(weights="host", update_in_backward=True),
}


def clip(model, optimizer, max_norm):
    if isinstance(optimizer, offstage.OffloadedOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)


def train(build, between=None, *, clips=None, micro_batches=1, dtype=torch.float32, cycles=CYCLES, prepare=None):
    """`between(model, optimizer, number)` after every step; or, with micro-batches, after each of their backwards."""
    torch.manual_seed(0)
    model = Net(dtype)
    optimizer = build(model)
    handle = prepare(model) if prepare is not None else None
    losses = []
    for number in range(cycles):
        for part in range(micro_batches):
            early = part < micro_batches - 1 and isinstance(optimizer, offstage.OffloadedOptimizer)
            with optimizer.accumulate() if early else contextlib.nullcontext():
                loss = loss_of(model, micro_batches * number + part)
                loss.backward()
            losses.append(loss.detach())
            if between is not None and part < micro_batches - 1:
                between(model, optimizer, number)
        if clips is not None:
            clip(model, optimizer, clips[number % len(clips)])
        optimizer.step()
        optimizer.zero_grad()
        if between is not None and micro_batches == 1:
            between(model, optimizer, number)
    if isinstance(optimizer, offstage.OffloadedOptimizer):
        optimizer.synchronize()
    del handle
    saved = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    found = [*losses, *model.state_dict().values(), *map(torch.as_tensor, saved)]
    return [value.detach().clone() for value in found]


def whole(model, optimizer, number):
    sleep(model, optimizer)
    assert asleep(model, optimizer)
    wake(model, optimizer)
    assert not asleep(model)


def changing(model, optimizer, number):
    """Another way to sleep in every cycle."""
    ways = [
        lambda: (sleep(model, optimizer), wake(optimizer), wake(model)),
        lambda: (sleep(model, optimizer, keep=("weights", "buffers")), model.eval(), evaluate(model), model.train()),
        lambda: (sleep(optimizer), sleep(model), sleep(model, optimizer), wake(model), wake(model)),
        lambda: sleep(model, optimizer, need="20KiB"),
        lambda: sleep(model, optimizer, keep="state"),
        lambda: nested(model, optimizer),
        lambda: (sleep(model, optimizer), wake(model, optimizer), sleep(model, optimizer)),
        lambda: (sleep(model, optimizer), wake(model, optimizer).wait()),
    ]
    ways[number % len(ways)]()
    wake(model, optimizer)


def evaluate(model):
    with torch.no_grad():
        return model(batch(99)[0])


def nested(model, optimizer):
    with sleep(model):
        with sleep(model, optimizer):
            assert asleep(model, optimizer)
        assert asleep(model)
        assert not asleep(optimizer)
    assert not asleep(model)


def assert_same(expected, found):
    assert len(expected) == len(found)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert same_bits(a, b), number


@pytest.fixture(autouse=True)
def _wait_late():
    """Nothing is so small that `wake()` waits for it, except buffers."""
    with mock.patch("offstage.phases.parking._SMALL", 0), mock.patch("offstage.phases.parking._BATCH", 4096):
        yield


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("way", [whole, changing])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode, way, seed):
    with lazily(seed):
        assert_same(train(MODES[mode]), train(MODES[mode], way))


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("mode", ["plain", "half", "in_backward", "both", "weights_on_host_in_backward"])
def test_clipped_now_and_then(mode, seed):
    with lazily(seed):
        assert_same(train(MODES[mode], clips=CLIP), train(MODES[mode], changing, clips=CLIP))


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("mode", ["plain", "half", "in_backward", "weights_on_host", "weights_on_host_postponed"])
def test_accumulated_gradients_are_kept(mode, seed):
    """Sleep between micro-batches."""
    with lazily(seed):
        expected = train(MODES[mode], micro_batches=2, clips=CLIP)
        assert_same(expected, train(MODES[mode], changing, micro_batches=2, clips=CLIP))


@pytest.mark.parametrize("mode", ["plain", "half", "overlap_forward"])
def test_accumulated_gradients_are_dropped(mode):
    def forget(model, optimizer, number):
        optimizer.zero_grad()

    def drop(model, optimizer, number):
        report = sleep(model, optimizer, drop=("gradients",))
        assert report.devices[0].freed_bytes > 0
        wake(model, optimizer)
        assert all(param.grad is None for param in model.parameters())

    expected = train(MODES[mode], forget, micro_batches=2)
    assert_same(expected, train(MODES[mode], drop, micro_batches=2))


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_masters(masters, seed):
    build = offloaded(master_weights=masters, fraction=0.5)
    with lazily(seed):
        expected = train(build, dtype=torch.bfloat16, clips=CLIP)
        assert_same(expected, train(build, changing, dtype=torch.bfloat16, clips=CLIP))


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("mode", ["plain", "both"])
def test_activations_offloaded(mode, seed):
    def prepare(model):
        return offload_activations(model, min_bytes=0)

    with lazily(seed):
        assert_same(train(MODES[mode], prepare=prepare), train(MODES[mode], changing, prepare=prepare))


def test_weights_on_the_host_for_another_optimizer():
    def prepare(model):
        return offload_activations(model, min_bytes=0, weights=True)

    with lazily(0):
        assert_same(train(MODES["plain"], prepare=prepare), train(MODES["plain"], changing, prepare=prepare))
