# SPDX-License-Identifier: Apache-2.0
"""Where does `window` win?

    python -m benchmarks.window                           every case, under four minutes on one H200
    python -m benchmarks.window --cases engine            one of them, 70 seconds
    python -m benchmarks.window --cases engine --reduce-ms 25
    python -m benchmarks.window --size small              a minute on any machine: does every case run?

The 2.70B workload, 8 x 2048 tokens, split masters, clipping outside. Each variant takes turns with resident state (fp32
masters) in one process; up to three variants are in memory at a time. The alternative to a window is a lower
`fraction`: as much state as the window holds is resident instead, which needs as much memory and moves fewer bytes.
`fraction_ratio_at_peak` is what that costs at the peak of the row, by linear interpolation between the measured points
without a window, with that fraction, and of resident state; `beats_fraction` says whether the row's ratio is lower.

activations   a plain loop with `overlap_forward` and nothing checkpointed: 47 GiB of activations are freed during
              backward. A window that is given back under the next forward (`"all"`, or a size and `evict()` after each
              step) uses memory that only activations need at other times. `auto` gets the peak without a window and one
              slot and a half
fsdp2         `fully_shard` on one rank, blocks checkpointed, updates in `step()`
engine        an engine like Megatron's: the optimizer has parameters of its own that share the model's memory, so that
              no hook sees backward (but in `window_some_hooks`). After backward all gradients are copied into one flat
              fp32 buffer, which is reduced and copied into gradients that are assigned by hand. The reduction is an
              all-reduce of the buffer in a group of one rank, where it has nothing to do, and a kernel that takes the
              time of a reduce-scatter of these bytes among 8 ranks at 50 GB/s each (`--reduce-ms`: another time). It
              uses no link to the host; a network adapter behind the same switch as the GPU would. `prefetch()` is
              called before the reduction

`step_ms` is the time of `step()` on the caller's stream, `exposed_ms` in `receipt` what that stream waited for updates
in all of an iteration. `peak_gib` is without the flat buffer.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import offstage
from benchmarks import harness, turns, workload
from benchmarks.common import DEVICE, ON_GPU, Row, allocated_bytes, gib, milliseconds, now
from benchmarks.fsdp2 import one_rank, sharded
from benchmarks.harness import Case
from benchmarks.workload import GPT, IN_STEP, MAX_NORM, OVERLAP_FORWARD, RESIDENT, SIZES, build
from offstage.config import parse_size

WINDOW = {"full": "8GiB", "small": "256KiB"}
STATE_BYTES = 10
"""Of a parameter, with split masters."""
WARM_UP = 3  # a window opens in the second iteration, and `"auto"` in the third
ITERATIONS = 2
RANKS, NETWORK_GB_PER_S = 8, 50.0


@dataclass(frozen=True)
class Variant:
    """A way to spend device memory."""

    name: str
    window: str | int = 0
    """`"some"` is the size that `fraction` is compared at."""
    evicts: bool = False
    """The window is given back after each step."""
    sees_backward: bool = False
    """The engine's optimizer has the model's own parameters: hooks fetch ahead in backward."""


WITHOUT, SIZED, ALL = Variant("window_0"), Variant("window_some", "some"), Variant("window_all", "all")
FRACTION = Variant("lower_fraction")
"""As much state is resident as the window of `"some"` holds."""
EVICTED, HOOKS = Variant("window_some_evicted", "some", evicts=True), Variant("window_some_hooks", "some", False, True)
SETS: dict[str, tuple[tuple[Variant, ...], ...]] = {
    "activations": (
        (WITHOUT, ALL, Variant("window_auto", "auto")),  # auto last: its peak counts what the others hold
        (SIZED, EVICTED, FRACTION),
    ),
    "fsdp2": ((WITHOUT, SIZED, FRACTION), (ALL,)),
    "engine": ((WITHOUT, SIZED, FRACTION), (Variant("window_all", "all", evicts=True), HOOKS)),
}
"""What takes turns: three sets of state are as much host memory as most machines have."""


# The loops


class Training(workload.Training):
    """The loop a user would write, with the time of `step()`, and with `evict()` where the variant asks for it."""

    def __init__(self, model: GPT, size_name: str, config: Mapping[str, Any], variant: Variant) -> None:
        self._variant = variant
        super().__init__(model, self.optimizer_of(model, config), SIZES[size_name])
        self._steps: list[tuple[Any, Any]] = []

    def optimizer_of(self, model: GPT, config: Mapping[str, Any]) -> offstage.OffloadedOptimizer:
        return offstage.offload(workload.adamw(model), model, **config)

    def step(self) -> None:
        start = now()
        self.optimizer.step()
        self._steps.append((start, now()))
        self.optimizer.zero_grad()
        if self._variant.evicts:
            self.optimizer.evict()

    def counted(self) -> Row:
        steps = [start.elapsed_time(stop) for start, stop in self._steps[WARM_UP:]]
        return {"step_ms": round(statistics.median(steps), 2), **super().counted()}


class Network:
    """The flat buffer of all gradients, and its reduction."""

    def __init__(self, size_name: str, reduce_ms: float | None) -> None:
        with torch.device("meta"):
            shapes = [param.shape for param in GPT(SIZES[size_name]).parameters()]
        self.buffer = torch.zeros(sum(shape.numel() for shape in shapes), device=DEVICE)
        parts = self.buffer.split([shape.numel() for shape in shapes])
        self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        usual_ms = self.buffer.nbytes * (RANKS - 1) / RANKS / NETWORK_GB_PER_S / 1e6
        self.reduce_ms = usual_ms if reduce_ms is None else reduce_ms
        self._cycles = 0
        if ON_GPU:
            cycles = 20_000_000
            self._cycles = int(cycles * self.reduce_ms / milliseconds(lambda: torch.cuda._sleep(cycles)))

    def reduce(self) -> None:
        dist.all_reduce(self.buffer)
        if self._cycles:
            torch.cuda._sleep(self._cycles)


class Engine(Training):
    """Backward, `prefetch()`, a reduction, and gradients that are assigned to the optimizer's own parameters."""

    def __init__(
        self, model: GPT, size_name: str, config: Mapping[str, Any], variant: Variant, network: Network
    ) -> None:
        self._network = network
        super().__init__(model, size_name, config, variant)

    def optimizer_of(self, model: GPT, config: Mapping[str, Any]) -> offstage.OffloadedOptimizer:
        self._params = self._own = list(model.parameters())
        if self._variant.sees_backward:
            return super().optimizer_of(model, config)
        self._own = [torch.nn.Parameter(param.detach()) for param in self._params]  # in the same memory
        return offstage.offload(workload.adamw(self._own), torch.nn.ParameterList(self._own), **config)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self.optimizer.config.window:
            self.optimizer.prefetch()
        views = self._network.views
        torch._foreach_copy_(views, [param.grad for param in self._params])
        for param in self._params:
            param.grad = None
        self._network.reduce()
        gradients = [torch.empty_like(own) for own in self._own]
        torch._foreach_copy_(gradients, views)
        for own, gradient in zip(self._own, gradients, strict=True):
            own.grad = gradient

    def clip_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._own, MAX_NORM)


# Measuring


@dataclass
class Question:
    """One case: how to build a training for it, and what was measured so far."""

    case: str
    size_name: str
    network: Network | None

    def make(self, config: Mapping[str, Any], variant: Variant) -> Training:
        model = build(SIZES[self.size_name])
        if self.case == "activations":
            model.recomputed = ()
        if self.case == "fsdp2":
            model = sharded(model)
        config = workload.config_for(self.size_name, config)
        if self.network is not None:
            return Engine(model, self.size_name, config, variant, self.network)
        return Training(model, self.size_name, config, variant)

    def config_of(self, variant: Variant, peak_without: int) -> Row:
        config: Row = {**(OVERLAP_FORWARD if self.case == "activations" else IN_STEP)}
        size = WINDOW[self.size_name]
        if variant is FRACTION:
            with torch.device("meta"):
                numel = sum(param.numel() for param in GPT(SIZES[self.size_name]).parameters())
            config["fraction"] = round(1.0 - parse_size(size, "window") / (STATE_BYTES * numel), 4)
        if variant.window:
            config["window"] = size if variant.window == "some" else variant.window
        if variant.window == "auto":
            chunk = workload.config_for(self.size_name, {}).get("chunk_bytes", "64MiB")
            config["device_peak"] = allocated_bytes() + peak_without + 3 * parse_size(chunk, "chunk_bytes") // 2
        return config

    def rows(self, rounds: int) -> Iterator[Row]:
        """Of all variants, when all of them have been measured."""
        rows: list[Row] = []
        with turns.Contest(lambda: self.make(RESIDENT, WITHOUT)) as contest:
            for variants in SETS[self.case]:
                configs: dict[str, Row] = {}
                makers = {one.name: self._maker(one, configs, contest) for one in variants}
                found = contest.measure(makers, rounds, iterations=ITERATIONS, warm_up=WARM_UP)
                rows += [self._row(one, configs[one.name], found[one.name]) for one in variants]
                harness.say(f"    {', '.join(one.name for one in variants)}")
            resident = (gib(contest.resident.peak), 1.0)
        points = [*(point_of(row) for row in rows if not row["window"]), resident]
        for row in rows:
            yield row | against_fraction(row, points)

    def _maker(self, variant: Variant, configs: dict[str, Row], contest: turns.Contest) -> Callable[[], Training]:
        def make() -> Training:
            without = contest.contenders.get(WITHOUT.name)
            configs[variant.name] = self.config_of(variant, without.warm_up_peak if without else 0)
            return self.make(configs[variant.name], variant)

        return make

    def _row(self, variant: Variant, config: Row, found: Row) -> Row:
        return {
            "case": self.case,
            "variant": variant.name,
            "size": self.size_name,
            "config": config,
            "window": config.get("window", 0),
            "evicts": variant.evicts,
            "sees_backward": variant.sees_backward or self.network is None,
            "prefetches": self.network is not None and bool(variant.window),
            "reduce_ms": None if self.network is None else round(self.network.reduce_ms, 1),
            "main_gradients_gib": None if self.network is None else gib(self.network.buffer.nbytes),
            **found,
        }


def point_of(row: Row) -> tuple[float, float]:
    return row["peak_gib"], row["ratio"]


def against_fraction(row: Row, points: Sequence[tuple[float, float]]) -> Row:
    """The row's ratio beside that of a lower `fraction` with the same peak, between the nearest measured points."""
    ordered = sorted(points)
    peak = min(max(row["peak_gib"], ordered[0][0]), ordered[-1][0])
    below = max(point for point in ordered if point[0] <= peak)
    above = min(point for point in ordered if point[0] >= peak)
    part = (peak - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
    expected = below[1] + part * (above[1] - below[1])
    return {
        "resident_peak_gib": points[-1][0],
        "fraction_ratio_at_peak": round(expected, 4),
        "beats_fraction": row["ratio"] < expected if row["window"] and ON_GPU else None,
        "times_fraction": round(row["ratio"] / expected, 4),
    }


# The command


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=2, help=f"of {ITERATIONS} iterations, after one that is not timed"
    )
    parser.add_argument("--reduce-ms", type=float, help="how long the engine's reduction takes")
    options = harness.parse(parser, harness.cases_of(SETS))

    def measure(case: Case) -> Iterator[Row]:
        with one_rank() if case.name != "activations" else contextlib.nullcontext():
            network = Network(options.size, options.reduce_ms) if case.name == "engine" else None
            yield from Question(case.name, options.size, network).rows(options.rounds)

    harness.run("window", options.cases, measure)


if __name__ == "__main__":
    main()
