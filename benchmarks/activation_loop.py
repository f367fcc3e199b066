# SPDX-License-Identifier: Apache-2.0
"""The workload with some blocks checkpointed or none: its iterations, the row of one, and trials at a memory limit."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import offstage
from benchmarks import common, workload
from benchmarks.common import DEVICE, ON_GPU, Row, gib, synchronize
from benchmarks.harness import say
from benchmarks.workload import BATCH, GPT, IN_BACKWARD, Size, build, tokens
from offstage.activations.offload import ActivationOffload, offload_activations

SIZES = {"full": Size(), "small": Size(blocks=12, width=32, hidden=64, heads=2, vocabulary=128, sequence=32)}
SMALL_TENSORS = {"min_bytes": "1KiB"}
WARM_UP = 2
DEVICE_LIMIT = 24 * 2**30


# Iterations


class Loop(workload.Training):
    """Iterations of a model: with its optimizer, or with SGD that uses each gradient as soon as it is there."""

    def __init__(self, model: GPT, size: Size, optimizer: offstage.OffloadedOptimizer | None = None) -> None:
        super().__init__(model, optimizer, size)
        self.around: Callable[[], Any] = contextlib.nullcontext
        """What forward runs in."""
        self.forward_end_bytes = 0
        """Allocated when forward ended: weights, state, and what waits for backward."""
        if optimizer is None:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(_descend)  # type: ignore[no-untyped-call]

    def iterate_on(self, batch: torch.Tensor) -> None:
        self.batches = itertools.repeat(batch)
        self.iterate()

    def iterate(self) -> None:
        with self.around():
            loss = self.model(next(self.batches))
        self.forward_end_bytes = common.allocated_bytes()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses = [*self.losses[:1], loss.detach()]


@torch.no_grad()
def _descend(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.add_(param.grad, alpha=-1e-4)
    param.grad = None


# Measuring


@dataclass
class Bench:
    """One model for all cases that need no optimizer, and what failed."""

    size_name: str
    iterations: int
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
            self._loop = Loop(build(self.size), self.size)
        return self._loop

    def drop_model(self) -> None:
        """Before a case with a model of its own."""
        self._loop = None
        common.clean_up()

    def offloaded_training(self, config: Mapping[str, Any]) -> Loop:
        """The workload with every block checkpointed, under `offload()`."""
        model = build(self.size)
        config = {**config, **({} if self.is_full else SMALL_TENSORS)}
        return Loop(model, self.size, workload.offloaded(model, self.size_name, config))

    def attempt(self, name: str, work: Callable[[], Row]) -> Row | None:
        """A row, or `None`: what fails must not cost the others theirs."""
        say(name)
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
            self.loop.model.recomputed, self.loop.around = frozenset(recomputed), around
            named = None if layers is None else len(layers)
            about = {"case": name, "recomputed": len(recomputed), "named_layers": named}
            return about | self.row(self.loop, config, warm_up, iterations or self.iterations, layers)

        return self.attempt(name, work)

    def row(
        self,
        loop: Loop,
        config: Mapping[str, Any] | None,
        warm_up: int,
        iterations: int,
        layers: Sequence[nn.Module] | None = None,
    ) -> Row:
        """Warm up, measure, and count."""
        start_bytes = common.clean_up()
        loop.batches = itertools.cycle([tokens(self.size, BATCH, seed) for seed in range(4)])
        handle = None if config is None else self.offload_activations(loop.model, config, layers)
        try:
            row = {
                "size": self.size_name,
                "config": config,
                "allocated_at_start_gib": gib(start_bytes),
                **loop.measured(warm_up, iterations),
                "forward_end_gib": gib(loop.forward_end_bytes),
                "rss_gib": gib(common.rss_bytes()),
                "first_and_last_loss": [common.rounded(float(loss)) for loss in loop.losses],
            }
            return row if handle is None else row | moved(handle)
        finally:
            if handle is not None:
                handle.remove()


def moved(handle: ActivationOffload) -> Row:
    receipt = handle.receipt()
    return {
        "left_gib": gib(receipt.bytes_offloaded),
        "left_bytes": receipt.bytes_offloaded,
        "stayed_gib": gib(receipt.bytes_stayed),
        "remade_gib": gib(receipt.bytes_remade),
        "remade_bytes": receipt.bytes_remade,
        "returned_per_forward_gib": gib(receipt.total_bytes_returned // max(1, receipt.passes)),
        "host_pool_gib": gib(receipt.host_bytes),
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
        "peak_lower_share": common.share(peak - row["peak_gib"], row["left_gib"]),
        "forward_end_lower_share": common.share(forward_end - row["forward_end_gib"], row["left_gib"]),
    }


# At a limit of memory


@contextlib.contextmanager
def device_limit() -> Iterator[None]:
    if not ON_GPU:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(DEVICE_LIMIT / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Trial:
    """The workload in a limited device: state offloaded and updated in backward, one sequence at a time."""

    def __init__(self, bench: Bench, config: Mapping[str, Any] | None, learning_length: int) -> None:
        common.clean_up()
        self._bench = bench
        self._loop = bench.offloaded_training(IN_BACKWARD)
        self._handle = None if config is None else bench.offload_activations(self._loop.model, config)
        for _ in range(4):  # hook counts are learned in the first iterations, in which gradients stay
            self._loop.iterate_on(self._batch(learning_length))

    def _batch(self, length: int) -> torch.Tensor:
        generator = torch.Generator(DEVICE).manual_seed(length)
        vocabulary = self._bench.size.vocabulary
        return torch.randint(vocabulary, (1, length), generator=generator, device=DEVICE)

    def train(self, length: int) -> Row:
        """Two iterations, the second of which is timed."""
        try:
            return self._train(length)
        except (torch.OutOfMemoryError, offstage.OffstageError) as error:
            return {"failed": f"{type(error).__name__}: {str(error)[:80]}"}

    def _train(self, length: int) -> Row:
        common.clean_up()
        batch = self._batch(length)
        for _ in range(2):
            synchronize()
            start = time.perf_counter()
            self._loop.iterate_on(batch)
            synchronize()
            ms = 1e3 * (time.perf_counter() - start)
        left = 0 if self._handle is None else self._handle.receipt().bytes_offloaded
        return {
            "median_ms": round(ms, 1),
            "ms_per_1k_tokens": round(ms / length * 1e3, 3),
            "peak_gib": gib(common.peak_bytes()),
            "left_gib": gib(left),
        }

    def close(self) -> None:
        assert self._loop.optimizer is not None
        ends = (
            [self._loop.optimizer.close] if self._handle is None else [self._handle.remove, self._loop.optimizer.close]
        )
        for end in ends:
            with contextlib.suppress(offstage.OffstageError, RuntimeError):  # of an iteration that has failed
                end()
        del end, ends  # or common.clean_up() would find them held
        del self._loop, self._handle
        common.clean_up()
