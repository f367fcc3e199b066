# SPDX-License-Identifier: Apache-2.0
"""The workload with some blocks checkpointed or none, its iterations, and the row of one. For `activations.py`."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offstage
from benchmarks.anywhere import DEVICE, Row, allocated_bytes, now, peak_bytes, reset_peak, synchronize
from benchmarks.common import rss_bytes
from benchmarks.overlap import BATCH, gib, rounded
from benchmarks.workload import GPT, Size, build, tokens
from offstage.activations.offload import ActivationOffload, offload_activations

SIZES = {
    "full": Size(),
    "small": Size(blocks=12, width=32, hidden=64, heads=2, vocabulary=128, sequence=32),
}
SMALL_TENSORS = {"min_bytes": "1KiB"}
WARM_UP = 2


# The workload


class Mixed(GPT):
    """The workload with some blocks checkpointed, or none."""

    recomputed: frozenset[int] = frozenset()

    def _through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number in self.recomputed else block(x)
        return x


class Loop:
    """Iterations of a model: with its optimizer, or with SGD that uses each gradient as soon as it is there."""

    def __init__(self, model: Mixed, optimizer: offstage.OffloadedOptimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.forward_end_bytes = 0
        """Allocated when forward ended: weights, state, and what waits for backward."""
        self.losses: list[torch.Tensor] = []
        if optimizer is None:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(_descend)  # type: ignore[no-untyped-call]

    def iterate(self, batch: torch.Tensor, around: Callable[[], Any] = contextlib.nullcontext) -> None:
        with around():
            loss = self.model(batch)
        self.forward_end_bytes = allocated_bytes()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses = [*self.losses[:1], loss.detach()]

    def timed(self, batches: Iterator[torch.Tensor], iterations: int, around: Callable[[], Any]) -> Row:
        """Mean and median time of an iteration. The host waits before the first and after the last only."""
        synchronize()
        start = time.perf_counter()
        ends = [now()]
        for _ in range(iterations):
            self.iterate(next(batches), around)
            ends.append(now())
        synchronize()
        mean = 1e3 * (time.perf_counter() - start) / iterations
        median = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(ends))
        return {"iteration_ms": round(mean, 1), "median_ms": round(median, 1)}


@torch.no_grad()
def _descend(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.add_(param.grad, alpha=-1e-4)
    param.grad = None


def clean_up() -> int:
    """Free what nobody holds; the bytes that are still allocated, which would blur the peak."""
    gc.collect()  # hooks tie models and optimizers into cycles
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", int)()  # save_on_cpu's pinned memory: as much again as ours
        torch.cuda.reset_peak_memory_stats()
    return allocated_bytes()


# Measuring


@dataclass
class Bench:
    """One model for all cases that need no optimizer, and what failed."""

    size_name: str
    iterations: int
    begin: float = field(default_factory=time.perf_counter)
    failed: list[str] = field(default_factory=list)
    _loop: Loop | None = None

    @property
    def size(self) -> Size:
        return SIZES[self.size_name]

    @property
    def is_full(self) -> bool:
        return self.size_name == "full"  # a tiny model has other ratios, and nothing to prove

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.loop.model.blocks)

    @property
    def loop(self) -> Loop:
        if self._loop is None:
            self._loop = Loop(build(self.size, kind=Mixed))
        return self._loop

    def drop_model(self) -> None:
        """Before a case with a model of its own."""
        self._loop = None
        clean_up()

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self.begin:4.0f} s] {what}", flush=True)

    def attempt(self, name: str, work: Callable[[], Row]) -> Row | None:
        """A row, or `None`: what fails must not cost the others theirs."""
        self.say(name)
        try:
            return work()
        except Exception:
            traceback.print_exc()
            self.failed.append(name)
            return None

    def offload_activations(
        self, model: nn.Module, config: Mapping[str, Any], layers: Sequence[nn.Module] | None = None
    ) -> ActivationOffload:
        named = {} if layers is None else {"layers": layers}
        return offload_activations(model, **{**({} if self.is_full else SMALL_TENSORS), **config, **named})

    def measure(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        layers: Sequence[nn.Module] | None = None,
        recomputed: Sequence[int] = (),
        warm_up: int = WARM_UP,
        iterations: int | None = None,
        around: Callable[[], Any] = contextlib.nullcontext,
    ) -> Row | None:
        """The workload without an optimizer; activations leave unless `config` is `None`."""

        def work() -> Row:
            self.loop.model.recomputed = frozenset(recomputed)
            return self.row(
                self.loop,
                {"case": name, "recomputed": len(recomputed), "named_layers": None if layers is None else len(layers)},
                config,
                layers=layers,
                warm_up=warm_up,
                iterations=iterations or self.iterations,
                around=around,
            )

        return self.attempt(name, work)

    def row(
        self,
        loop: Loop,
        begins_with: Row,
        config: Mapping[str, Any] | None,
        *,
        layers: Sequence[nn.Module] | None = None,
        warm_up: int = WARM_UP,
        iterations: int,
        around: Callable[[], Any] = contextlib.nullcontext,
    ) -> Row:
        """Warm up, measure, and count."""
        start_bytes = clean_up()
        batches = itertools.cycle([tokens(self.size, BATCH, seed) for seed in range(4)])
        handle = None if config is None else self.offload_activations(loop.model, config, layers)
        try:
            for _ in range(warm_up):
                loop.iterate(next(batches), around)
            synchronize()
            before_peak = peak_bytes()
            reset_peak()
            found = loop.timed(batches, iterations, around)
            row = {
                **begins_with,
                "size": self.size_name,
                "config": config,
                "warm_up": warm_up,
                "iterations": iterations,
                **found,
                "allocated_at_start_gib": gib(start_bytes),
                "peak_gib": gib(peak_bytes()),
                "peak_gib_since_start": gib(max(before_peak, peak_bytes())),
                "forward_end_gib": gib(loop.forward_end_bytes),
                "rss_gib": gib(rss_bytes()),
                "first_and_last_loss": [rounded(float(loss)) for loss in loop.losses],
            }
            return row if handle is None else row | moved(handle)
        finally:
            if handle is not None:
                handle.remove()


def moved(handle: ActivationOffload) -> Row:
    receipt = handle.receipt()
    plan = receipt.plan
    return {
        "left_gib": gib(receipt.bytes_offloaded),
        "left_bytes": receipt.bytes_offloaded,
        "stayed_gib": gib(receipt.bytes_stayed),
        "remade_gib": gib(receipt.bytes_remade),
        "remade_bytes": receipt.bytes_remade,
        "returned_per_forward_gib": gib(receipt.total_bytes_returned // max(1, receipt.passes)),
        "host_pool_gib": gib(receipt.host_bytes),
        **({} if plan is None else {"plan": str(plan), "predicted_peak_gib": gib(plan.peak_bytes)}),
    }


def against(row: Row | None, *bases: Row | None) -> Row:
    """`row` over the same without offload."""
    found = [base for base in bases if base is not None]
    if row is None or not found:
        return {}
    median = statistics.mean(base["median_ms"] for base in found)
    peak = statistics.mean(base["peak_gib"] for base in found)
    forward_end = statistics.mean(base["forward_end_gib"] for base in found)
    return {
        "base_median_ms": round(median, 1),
        "ratio": round(row["median_ms"] / median, 4),
        "base_peak_gib": round(peak, 4),
        "peak_lower_share": share(peak - row["peak_gib"], row["left_gib"]),
        "forward_end_lower_share": share(forward_end - row["forward_end_gib"], row["left_gib"]),
    }


def share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
