# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake on real streams: the bits of never sleeping in every mode, memory that is really returned, training
that begins while most is still on its way."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import offstage
from benchmarks.overlap_bits import Checked, delayed_lanes, update_all_early
from offstage import asleep, offload_activations, sleep, wake
from offstage.errors import OffstageError
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from offstage.phases.parking import Stage, lot_for
from tests.support.gates import DEVICE, Elsewhere, Forgetful, is_a_race
from tests.support.params import equal
from tests.support.slow_writer import held_back

CYCLES = 20
WIDTH, NARROW, LAYERS = 20_011, 1_501, 5
SMALL = {"min_bytes": "4KiB", "chunk_bytes": "64KiB"}
CLIP = (1e4, 1e4, 1e-4)
"""Norms that most steps keep to, and that one in three does not: speculative updates that stay, and that do not."""
MIB = 2**20


@pytest.fixture(autouse=True)
def _each_by_itself() -> Iterator[None]:
    """Nothing but buffers is so small that `wake()` waits for it, and everything comes behind a mark of its own."""
    with mock.patch("offstage.phases.parking._SMALL", 0), mock.patch("offstage.phases.parking._BATCH", 4096):
        yield
    gc.collect()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(WIDTH))
        self.shift = nn.Parameter(0.1 * torch.randn(NARROW))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(x * self.weight)
        return torch.cat([x[:NARROW] + self.shift, x[NARROW:]])


class Net(nn.Module):
    """Elementwise: a weight that is read too early gives other bits, and nothing else does. A weight outside the layers
    is used twice under two names, one is frozen, and forward writes a buffer and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Gate(), Gate()
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(Gate() for _ in range(LAYERS))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        self.mean.lerp_(x.detach(), 0.25)
        return self.last(x - self.mean) * self.frozen


Build = Callable[[Net], Any]
Between = Callable[[Net, Any, int], None]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def plain(**options: Any) -> Build:
    return lambda model: torch.optim.AdamW(trained(model), lr=3e-3, weight_decay=0.1, **options)


def offloaded(**config: Any) -> Build:
    def build(model: Net) -> offstage.OffloadedOptimizer:
        made = offstage.offload(plain()(model), model, **SMALL, **config)
        if config.get("update_in_backward"):
            update_all_early(made)
        return made

    return build


MODES: dict[str, Build] = {
    "torch, fused": plain(fused=True),
    "default": offloaded(),
    "resident": offloaded(fraction=0.0),
    "half": offloaded(fraction=0.5),
    "updated on the host": offloaded(update_on="host"),
    "overlap_forward": offloaded(overlap_forward=True),
    "window all": offloaded(window="all"),
    "overlap_forward, window all": offloaded(overlap_forward=True, window="all", fraction=0.5),
    "update_in_backward": offloaded(update_in_backward=True),
    "update_in_backward, overlap_forward": offloaded(update_in_backward=True, overlap_forward=True, fraction=0.5),
    "weights on the host": offloaded(weights="host"),
    "weights on the host, overlap_forward": offloaded(weights="host", overlap_forward=True),
    "weights on the host, update_in_backward": offloaded(weights="host", update_in_backward=True),
}
SOME = ("torch, fused", "half", "overlap_forward", "update_in_backward, overlap_forward")


def build(mode: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Net, Any]:
    torch.manual_seed(0)  # made on the host: the same weights on every device
    model = Net().to(dtype).to(DEVICE)
    return model, MODES[mode](model)


def batches(number: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and the gradient of the output."""
    generator = torch.Generator().manual_seed(number)
    x, gradient = (torch.randn(WIDTH, generator=generator) for _ in range(2))
    return x.to(DEVICE, dtype), (gradient / WIDTH**0.5).to(DEVICE, dtype)


def nowhere(moment: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def train(
    mode: str,
    between: Between | None = None,
    *,
    clips: tuple[float, ...] = (),
    micro_batches: int = 1,
    where: Callable[[str], contextlib.AbstractContextManager[Any]] = nowhere,
    prepare: Callable[[Net], Any] | None = None,
    cycles: int = CYCLES,
) -> list[torch.Tensor]:
    """What training leaves. `between` is called after every step; with micro-batches after their backwards instead."""
    model, optimizer = build(mode)
    is_ours = isinstance(optimizer, offstage.OffloadedOptimizer)
    handle = prepare(model) if prepare is not None else None
    max_norms = itertools.cycle(clips or (None,))
    for number in range(cycles):
        for part in range(micro_batches):
            is_last = part == micro_batches - 1
            with optimizer.accumulate() if is_ours and not is_last else contextlib.nullcontext():
                x, gradient = batches(micro_batches * number + part)
                with where("training"):
                    model(x).backward(gradient)
            if between is not None and not is_last:
                between(model, optimizer, number)
        with where("step"):
            if (max_norm := next(max_norms)) is not None:
                clip = optimizer.clip_grad_norm_ if is_ours else lambda norm: clip_by_torch(model, norm)
                clip(max_norm)
            optimizer.step()
            optimizer.zero_grad()
        if between is not None and micro_batches == 1:
            between(model, optimizer, number)
    found = values(model, optimizer)
    if is_ours and clips and optimizer.config.update_in_backward:
        receipt = optimizer.receipt()
        assert receipt.speculation_hits > 0
        assert receipt.speculation_misses > 0
    if handle is not None:
        handle.remove()
    return found


def clip_by_torch(model: nn.Module, max_norm: float) -> None:
    nn.utils.clip_grad_norm_(trained(model), max_norm)


def values(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Weights, buffers and state, on the host."""
    if isinstance(optimizer, offstage.OffloadedOptimizer):
        optimizer.synchronize()
    state = [value for one in optimizer.state_dict()["state"].values() for _, value in sorted(one.items())]
    return [torch.as_tensor(value).detach().cpu().clone() for value in (*model.state_dict().values(), *state)]


def whole(model: Net, optimizer: Any, number: int) -> None:
    report = sleep(model, optimizer)
    assert asleep(model, optimizer)
    assert all(device.still_ours_bytes == 0 for device in report.devices)
    wake(model, optimizer)
    assert not asleep(model)


def changing(model: Net, optimizer: Any, number: int) -> None:
    """Another way to sleep in every cycle."""
    ways = [
        lambda: (sleep(model, optimizer), wake(optimizer), wake(model)),
        lambda: (sleep(model, optimizer, keep=("weights", "buffers")), wake(model)),
        lambda: (sleep(optimizer), sleep(model), wake(model)),
        lambda: (sleep(model, optimizer), wake(model, optimizer), sleep(model, optimizer)),
        lambda: sleep(model, optimizer).__exit__(None, None, None),
        lambda: (sleep(model, optimizer), wake(model, optimizer).wait()),
        lambda: sleep(model, optimizer, keep="state"),
    ]
    ways[number % len(ways)]()
    wake(model, optimizer)


# The same bits


@pytest.mark.parametrize("way", [whole, changing])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_bits_of_never_sleeping(mode: str, way: Between) -> None:
    assert equal(train(mode, way), train(mode))


@pytest.mark.parametrize(
    "mode",
    [
        "torch, fused",
        "half",
        "update_in_backward",
        "update_in_backward, overlap_forward",
        "weights on the host, update_in_backward",
    ],
)
def test_clipped_now_and_then(mode: str) -> None:
    """With updates in backward: some that stay, and some that are taken back."""
    assert equal(train(mode, whole, clips=CLIP), train(mode, clips=CLIP))


@pytest.mark.parametrize("way", [whole, changing])
@pytest.mark.parametrize("mode", [*SOME, "weights on the host"])
def test_accumulated_gradients_are_kept(mode: str, way: Between) -> None:
    assert equal(train(mode, way, micro_batches=2), train(mode, micro_batches=2))


@pytest.mark.parametrize("mode", ["torch, fused", "half", "update_in_backward, overlap_forward"])
def test_activations_on_the_host(mode: str) -> None:
    def prepare(model: Net) -> Any:
        return offload_activations(model, min_bytes=0)

    assert equal(train(mode, whole, prepare=prepare), train(mode))


def test_ties_views_and_gradients_stay_the_same_objects() -> None:
    model, optimizer = build("half")
    x, gradient = batches(0)
    model(x).backward(gradient)
    half = model.frozen[: WIDTH // 2]  # nothing knows of this view: wake() waits for it
    expected = half.clone()
    objects = [*model.parameters(), *model.buffers(), *(param.grad for param in trained(model))]
    before = [tensor.detach().clone() for tensor in objects]
    for _ in range(CYCLES):
        sleep(model, optimizer)
        wake(model, optimizer)
        assert torch.equal(half, expected)
        found = [*model.parameters(), *model.buffers(), *(param.grad for param in trained(model))]
        assert all(a is b for a, b in zip(objects, found, strict=True))
        assert model.first.weight is model.last.weight
    assert equal([tensor.detach().cpu() for tensor in objects], [tensor.cpu() for tensor in before])


# Streams and lanes


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.STORE, Lane.UPDATE], ids=lambda lane: lane.value)
@pytest.mark.parametrize("mode", [*SOME, "resident", "weights on the host, update_in_backward"])
def test_delays_change_nothing(mode: str, lane: Lane) -> None:
    with delayed_lanes(lane):
        found = train(mode, whole)
    assert equal(found, train(mode))


@pytest.mark.parametrize("step_too", [False, True])
@pytest.mark.parametrize("mode", SOME)
def test_training_on_another_stream(mode: str, step_too: bool) -> None:
    """wake() allocates and begins on one stream, and another one is the first to need the weights."""
    with delayed_lanes(Lane.FETCH):
        found = train(mode, whole, where=Elsewhere(step_too=step_too))
    assert equal(found, train(mode))


@pytest.mark.parametrize("mode", SOME)
def test_sleep_and_wake_on_another_stream(mode: str) -> None:
    elsewhere = Elsewhere(step_too=True)

    def between(model: Net, optimizer: Any, number: int) -> None:
        with elsewhere("sleep"):
            whole(model, optimizer, number)

    with delayed_lanes(Lane.FETCH):
        found = train(mode, between)
    assert equal(found, train(mode))


@pytest.mark.parametrize("mode", [*SOME, "resident", "weights on the host, update_in_backward"])
def test_the_checker_finds_nothing_on_real_streams(mode: str) -> None:
    lanes = Checked()
    with use_lanes(lanes):
        found = train(mode, changing)
    assert lanes.accesses > 1000
    assert equal(found, train(mode))


@pytest.mark.parametrize(
    "wait", ["sleep: the tensors are made", "wake: the memory is free", "wake: the tensor is back"]
)
def test_the_checker_notices_a_missing_wait(wait: str) -> None:
    """The control of the test before."""
    with use_lanes(lambda device: Forgetful(device, wait)), pytest.raises(OffstageError) as caught:
        train("resident", whole)
    synchronize()  # the buffers are still there: the traceback holds them
    assert is_a_race(caught.value)


@pytest.mark.parametrize("mode", ["torch, fused", "resident", "half"])
def test_training_begins_before_everything_is_back(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy up is late by about 10 ms, and there are dozens: the first layer is done behind two or three."""
    late = slow_fetches(monkeypatch)
    begun = []

    def between(model: Net, optimizer: Any, number: int) -> None:
        sleep(model, optimizer)
        wake(model, optimizer)
        x, _ = batches(99)
        with torch.no_grad():
            out = model.first(x)
        torch.accelerator.current_stream().synchronize()
        lot = lot_for(x.device)
        coming = [one for one in list(lot.parked.values()) if one.stage is Stage.COMING]
        begun.append(sum(not lot.lanes.passed(one.coming) for one in coming))
        expected = torch.tanh(x * model.first.weight) + x
        expected[:NARROW] += model.first.shift
        assert torch.equal(out, expected)

    with late:
        found = train(mode, between, cycles=4)
    assert min(begun) > LAYERS
    assert equal(found, train(mode, cycles=4))


def slow_fetches(monkeypatch: pytest.MonkeyPatch) -> contextlib.AbstractContextManager[None]:
    monkeypatch.setattr("benchmarks.bits.DELAY_CYCLES", 20_000_000)
    return delayed_lanes(Lane.FETCH)


def synchronize() -> None:
    torch.accelerator.synchronize()


# Memory


def allocated() -> int:
    gc.collect()
    synchronize()
    return int(torch.accelerator.memory_allocated())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_ours_is_left_on_the_device(mode: str) -> None:
    data = [batches(number) for number in range(2)]
    before = allocated()
    model, optimizer = build(mode)
    for x, gradient in data:
        model(x).backward(gradient)
        optimizer.step()
    if not getattr(getattr(optimizer, "config", None), "update_in_backward", False):
        model(data[0][0]).backward(data[0][1])  # gradients that wait for their step
    found = []
    for _ in range(CYCLES):
        report = sleep(model, optimizer).devices[0]
        found.append((allocated() - before, torch.accelerator.memory_reserved(), report.host_bytes))
        assert report.still_ours_bytes == 0
        wake(model, optimizer).wait()
    assert [left for left, _, _ in found] == [0] * CYCLES
    assert len({reserved for _, reserved, _ in found[1:]}) == 1
    assert len({host_bytes for _, _, host_bytes in found}) == 1


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "options"), [(torch.optim.ASGD, {}), (torch.optim.RAdam, {"capturable": True})])
def test_numbers_that_a_class_keeps_on_the_device_go_too(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], fraction: float
) -> None:
    """They rest on the host, and the next update has them where the class wants them."""

    def trained(*, sleeps: bool) -> list[torch.Tensor]:
        before = allocated()
        model = stack(2, MIB)
        plain = kind(model.parameters(), **options)
        optimizer = offstage.offload(plain, model, **{**SMALL, "fraction": fraction})
        for number in range(4):
            for param in model.parameters():
                param.grad = torch.full_like(param, 1.0 + number)
            optimizer.step()
            if sleeps:
                sleep(model, optimizer)
                assert allocated() == before
                wake(model, optimizer)
        return weights_of(model)

    pairs = zip(trained(sleeps=True), trained(sleeps=False), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def stack(layers: int = 8, nbytes: int = 32 * MIB) -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList(torch.randn(nbytes // 4, device=DEVICE) for _ in range(layers))


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().cpu().clone() for param in model.parameters()]


def test_the_driver_gets_the_memory() -> None:
    torch.accelerator.empty_cache()
    model = stack()
    nbytes = sum(param.nbytes for param in model.parameters())
    expected = weights_of(model)
    for _ in range(3):
        synchronize()
        reserved, free = torch.accelerator.memory_reserved(), torch.accelerator.get_memory_info()[0]
        report = sleep(model).devices[0]
        assert report.parked_bytes == nbytes
        assert reserved - torch.accelerator.memory_reserved() >= nbytes
        assert torch.accelerator.get_memory_info()[0] - free >= 0.9 * nbytes  # pinning takes some page tables
        assert report.host_bytes <= 1.02 * nbytes
        wake(model)
        assert equal(weights_of(model), expected)


def test_wake_while_another_holds_the_memory() -> None:
    model = stack()
    nbytes = sum(param.nbytes for param in model.parameters())
    expected = weights_of(model)
    sleep(model)
    other = torch.empty(torch.accelerator.get_memory_info()[0] - nbytes // 2, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):
        with pytest.raises(OffstageError, match=r"wake\(\) needs .* free it and call wake\(\) again"):
            wake(model)
        assert asleep(model)
    del other
    wake(model)
    assert equal(weights_of(model), expected)
    del model
    torch.accelerator.empty_cache()  # almost all of the device is in the allocator's reserve now


def test_wake_when_the_memory_ends_on_the_way() -> None:
    """The driver has enough, and torch's allocator may not take it."""
    model = stack()
    nbytes = sum(param.nbytes for param in model.parameters())
    expected = weights_of(model)
    sleep(model)
    reserved, total = torch.accelerator.memory_reserved(), torch.accelerator.get_memory_info()[1]
    torch.cuda.set_per_process_memory_fraction((reserved + nbytes / 2) / total)
    try:
        for _ in range(2):
            with pytest.raises(OffstageError, match=r"wake\(\) needs"):
                wake(model)
            assert asleep(model)
            assert torch.accelerator.memory_reserved() == reserved
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    wake(model)
    assert equal(weights_of(model), expected)


def test_need_leaves_what_fits_and_takes_no_more_than_it_must() -> None:
    torch.accelerator.empty_cache()
    model = stack()
    nbytes = sum(param.nbytes for param in model.parameters())
    expected = weights_of(model)
    free = torch.accelerator.get_memory_info()[0]
    assert sleep(model, need=free // 2).freed_bytes == 0
    assert not asleep(model)
    with sleep(model, need=free + nbytes // 2) as report:
        assert nbytes // 2 <= report.freed_bytes < nbytes
        assert torch.accelerator.get_memory_info()[0] >= free + nbytes // 2
    assert equal(weights_of(model), expected)


def test_frozen_weights_are_copied_once() -> None:
    model = stack().requires_grad_(False)
    expected = weights_of(model)
    copied = []
    for _ in range(3):
        copied.append(sleep(model).devices[0].copied_bytes)
        wake(model)
    assert copied == [sum(param.nbytes for param in model.parameters()), 0, 0]
    assert equal(weights_of(model), expected)


# Asleep


@pytest.mark.parametrize("mode", ["torch, fused", "half", "resident"])
def test_use_is_refused_and_the_device_goes_on(mode: str) -> None:
    model, optimizer = build(mode)
    x, gradient = batches(0)
    model(x).backward(gradient)
    sleep(model, optimizer)
    uses: list[Callable[[], object]] = [
        lambda: model(x),
        lambda: model.first(x),
        lambda: model.frozen.sum(),
        lambda: model.first.weight.grad.sum(),
        lambda: model.mean.add_(1),
        optimizer.step,
    ]
    for use in uses:
        with pytest.raises(OffstageError, match="asleep"):
            use()
    synchronize()  # nothing was read from where nothing is
    wake(model, optimizer)
    optimizer.step()
    found = values(model, optimizer)
    model, optimizer = build(mode)
    model(x).backward(gradient)
    optimizer.step()
    assert equal(found, values(model, optimizer))


@pytest.mark.parametrize("mode", ["torch, fused", "default", "half", "resident", "weights on the host"])
def test_state_dicts_asleep(mode: str) -> None:
    model, optimizer = build(mode)
    x, gradient = batches(0)
    model(x).backward(gradient)
    optimizer.step()
    optimizer.zero_grad()
    expected = values(model, optimizer)
    sleep(model, optimizer)
    assert equal(values_asleep(model, optimizer), expected)
    wake(model, optimizer)
    assert equal(values(model, optimizer), expected)


def values_asleep(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The same as `values`, all of it on the host already."""
    state = [value for one in optimizer.state_dict()["state"].values() for _, value in sorted(one.items())]
    found = [torch.as_tensor(value) for value in (*model.state_dict().values(), *state)]
    assert all(value.device.type == "cpu" for value in found)
    return [value.detach().clone() for value in found]


def saved(folder: Path) -> list[torch.Tensor]:
    """What a fresh model and optimizer have after loading it."""
    model, optimizer = build("half")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    offstage.checkpoint.load(folder, model, optimizer)
    return values(model, optimizer)


@pytest.mark.parametrize("mode", ["default", "half", "resident", "overlap_forward"])
def test_a_checkpoint_saved_asleep_is_one_saved_awake(mode: str, tmp_path: Path) -> None:
    model, optimizer = build(mode)
    for number in range(3):
        x, gradient = batches(number)
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
    offstage.checkpoint.save(tmp_path / "awake", model, optimizer)
    sleep(model, optimizer)
    offstage.checkpoint.save(tmp_path / "asleep", model, optimizer)
    with held_back() as slow:
        beside = offstage.checkpoint.async_save(tmp_path / "woken meanwhile", model, optimizer)
        wake(model, optimizer)
        slow.finish(beside)
    with held_back() as slow:
        beside = offstage.checkpoint.async_save(tmp_path / "under way", model, optimizer)
        sleep(model, optimizer)
        slow.finish(beside)
    wake(model, optimizer)
    expected = saved(tmp_path / "awake")
    for name in ("asleep", "woken meanwhile", "under way"):
        assert equal(saved(tmp_path / name), expected)
    assert equal(values(model, optimizer), expected)


def test_a_capture_is_refused() -> None:
    model = stack(layers=2)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(OffstageError, match="graph is being captured"), torch.cuda.graph(graph):
        sleep(model)
    assert not asleep(model)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        out: torch.Tensor = self.layers[number](self.front(x))
        return out


@pytest.mark.parametrize("clip", [False, True])
def test_experts_without_a_gradient_between_two_sleeps(clip: bool) -> None:
    """What is known of their last gradients rests since an earlier sleep, that of the others does not."""

    def trained(*, sleeps: bool) -> list[torch.Tensor]:
        model = Experts().to(DEVICE)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = offstage.offload(plain, model, weights="host", min_bytes=0, chunk_bytes="16KiB")
        for number in range(6):
            x = torch.full((4, 64), 0.1 * (number + 1), device=DEVICE)
            model(x, number // 2 % 2).square().sum().backward()
            if clip:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            if sleeps:
                sleep(model, optimizer)
                wake(model, optimizer)
        return [param.detach().cpu().clone() for param in model.parameters()]

    pairs = zip(trained(sleeps=True), trained(sleeps=False), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
