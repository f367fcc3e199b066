# SPDX-License-Identifier: Apache-2.0
"""Do the planner's predictions hold, and does it choose well?

    python -m benchmarks.plans                 everything, about five minutes on one H200
    python -m benchmarks.plans predictions     plans of every kind: predicted against measured
    python -m benchmarks.plans 4GiB 10GiB      budgets: the chosen plan against ten made by hand

The 2.70B workload, 8 x 2048 tokens. The machine is measured by `measure_machine`, forward and backward alone in the
same process, and every plan is predicted from these before it runs. Pairs in a row are measured and predicted; `error`
is predicted over measured, less one. `must` says whether bytes are within 2% and the iteration within 15%, and, for the
plan that was chosen for a budget, whether it is within 5% of the best of the others.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import offstage
from benchmarks.common import milliseconds, write_row
from benchmarks.workload import GPT, Size, adamw, build, tokens
from offstage.config import OffloadConfig
from offstage.planning.planner import choose_host_fraction
from offstage.planning.sizes import ParamSize

BATCH = 8
WARM_UP, LEARNING_WARM_UP = 3, 4  # update_in_backward learns in its first iterations, and a window opens
SPLIT = {"master_weights": "split"}
FORWARD = {**SPLIT, "overlap_forward": True}
BACKWARD = {**FORWARD, "update_in_backward": True}
FP32 = {"master_weights": "fp32"}

PREDICTIONS: dict[str, Mapping[str, Any]] = {
    "in step": SPLIT,
    "in step, fp32 masters": FP32,
    "half, in step": {**SPLIT, "fraction": 0.5},
    "overlap_forward": FORWARD,
    "window of 8 GiB": {**FORWARD, "window": "8GiB"},
    "update_in_backward": BACKWARD,
    "all by the CPU, fp32 masters": {**FP32, "update_on": "host"},
    "all by the CPU, overlap_forward": {**FORWARD, "update_on": "host"},
    "all by the CPU, update_in_backward": {**BACKWARD, "update_on": "host"},
    "30% by the CPU, in step": {**SPLIT, "host_fraction": 0.3},
    "30% by the CPU, update_in_backward": {**BACKWARD, "host_fraction": 0.3},
}
BUDGETS = ("3GiB", "8GiB", "16GiB")
BY_HAND: dict[str, Mapping[str, Any]] = {
    **{f"{share:.0%} by the CPU": {"host_fraction": share} for share in (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)},
    "a window of 2 GiB": {"window": "2GiB"},
    "a window of 2 GiB, 20% by the CPU": {"window": "2GiB", "host_fraction": 0.2},
    "chunks of 128 MiB": {"chunk_bytes": "128MiB"},
    "5 slots": {"slots": 5},
}


class Bench:
    """One model for all plans; what the device does besides updates is measured first."""

    def __init__(self) -> None:
        self.model: GPT = build(Size())
        self._batches = itertools.cycle([tokens(Size(), BATCH, seed) for seed in range(8)])
        self.machine = offstage.measure_machine()
        self.workload = self._measure_workload()

    def _measure_workload(self) -> offstage.Workload:
        loss: list[torch.Tensor] = []

        def forward() -> None:
            loss[:] = [self.model(next(self._batches))]

        def both() -> None:
            forward()
            loss.pop().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.model.zero_grad()

        torch.cuda.reset_peak_memory_stats()
        iteration = milliseconds(both)
        weights = sum(param.nbytes for param in self.model.parameters())
        other = torch.cuda.max_memory_allocated() - 2 * weights
        forward_ms = milliseconds(forward)
        return offstage.Workload(
            forward_ms=round(forward_ms, 1), backward_ms=round(iteration - forward_ms, 1), other_bytes=other
        )

    def run(self, config: Mapping[str, Any], *, iterations: int) -> dict[str, Any]:
        """Predicted and measured."""
        in_backward = bool(config.get("update_in_backward"))
        gc.collect()
        torch.cuda.empty_cache()
        start = time.perf_counter()
        optimizer = offstage.offload(adamw(self.model), self.model, **config)
        try:
            plan = self._predict(optimizer.plan.sizes, OffloadConfig(**config))
            assert plan.prediction is not None
            predicted = plan.prediction
            warm_up = LEARNING_WARM_UP if in_backward or config.get("window") else WARM_UP
            self._times(optimizer, warm_up, clip=not in_backward)
            torch.cuda.reset_peak_memory_stats()
            times = self._times(optimizer, iterations, clip=not in_backward)
            measured_ms = statistics.median(times)
            peak = torch.cuda.max_memory_allocated()
            receipt = optimizer.receipt()
            row = {
                "config": dict(config),
                "plan": optimizer.plan.summary(),
                "host_fraction": plan.candidates[0].host_fraction,
                "measured_ms": round(measured_ms, 1),
                "times_ms": [round(time, 1) for time in times],
                "predicted_ms": round(predicted.iteration_ms or 0.0, 1),
                "device_state_bytes": [receipt.device_state_bytes, predicted.device_state_bytes],
                "host_bytes": [receipt.host_state_bytes, predicted.host_bytes],
                "bytes_to_device": [receipt.bytes_fetched, predicted.bytes_up],
                "bytes_to_host": [receipt.bytes_stored, predicted.bytes_down],
                "peak_gib": [round(size / 2**30, 2) for size in (peak, predicted.device_peak_bytes)],
                "bottleneck": predicted.bottleneck,
                "seconds": round(time.perf_counter() - start, 1),
            }
        finally:
            optimizer.close()
        row["error"] = {
            "iteration": round(row["predicted_ms"] / row["measured_ms"] - 1, 4),
            **{name: _error(*row[name]) for name in ("device_state_bytes", "host_bytes")},
        }
        return row

    def _predict(self, sizes: Sequence[ParamSize], config: OffloadConfig) -> offstage.Plan:
        """What runs: `offload()` knows no workload, so its share for the CPU may be another than with one."""
        if config.update_on == "auto" and config.host_fraction is None:
            config = replace(config, host_fraction=choose_host_fraction(sizes, self.machine, config))
        return offstage.make_plan(sizes, self.machine, config, workload=self.workload)

    def _times(self, optimizer: offstage.OffloadedOptimizer, iterations: int, *, clip: bool) -> list[float]:
        """From the end of each iteration to the next, on the caller's stream, with the one before under way."""
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        ends[0].record()
        for end in ends[1:]:
            self.model(next(self._batches)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            end.record()
        ends[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]

    def write(self, name: str, row: Mapping[str, Any], **more: Any) -> None:
        workload = {name: getattr(self.workload, name) for name in ("forward_ms", "backward_ms", "other_bytes")}
        about = {
            "plan_name": name,
            **more,
            **row,
            "workload": workload,
            "measured_machine": json.loads(self.machine.to_json()),
        }
        write_row("plans", about)


def _error(measured: int, predicted: int) -> float:
    return round(predicted / measured - 1, 4) if measured else float(predicted)


def holds(row: Mapping[str, Any]) -> dict[str, bool]:
    error = row["error"]
    return {
        "bytes within 2%": all(abs(error[name]) <= 0.02 for name in ("device_state_bytes", "host_bytes")),
        "iteration within 15%": abs(error["iteration"]) <= 0.15,
    }


def predictions(bench: Bench) -> None:
    for name, config in PREDICTIONS.items():
        row = bench.run(config, iterations=3)
        bench.write(name, row, must=holds(row))


def budget(bench: Bench, size: str) -> None:
    """The plan that the planner chooses for `size`, after ten made by hand."""
    times = {}
    for name, config in BY_HAND.items():
        row = bench.run({**FORWARD, "device_budget": size, **config}, iterations=3)
        times[name] = row["measured_ms"]
        bench.write(name, row, device_budget=size, must=holds(row))
    row = bench.run({**FORWARD, "device_budget": size, "update_on": "auto"}, iterations=3)
    best = min(times, key=lambda name: times[name])
    ratio = round(row["measured_ms"] / times[best], 4)
    must = {**holds(row), "within 5% of the best by hand": ratio <= 1.05}
    bench.write("chosen", row, device_budget=size, best_by_hand=best, ratio_to_best=ratio, must=must)


def main() -> None:
    wanted = sys.argv[1:] or ["predictions", *BUDGETS]
    bench = Bench()
    print(bench.machine, bench.workload, flush=True)
    for part in wanted:
        if part == "predictions":
            predictions(bench)
        else:
            budget(bench, part)


if __name__ == "__main__":
    main()
