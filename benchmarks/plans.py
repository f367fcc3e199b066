# SPDX-License-Identifier: Apache-2.0
"""Do the planner's predictions hold, and does it choose well?

    python -m benchmarks.plans                 everything, about five minutes on one H200
    python -m benchmarks.plans predictions     plans of every kind: predicted against measured
    python -m benchmarks.plans 4GiB 10GiB      budgets: the chosen plan against ten made by hand
    python -m benchmarks.plans --size small    anywhere: does it run? Budgets are as small as the model

The 2.70B workload, 8 x 2048 tokens. The machine is measured by `measure_machine`, forward and backward alone in the
same process, and every plan is predicted from these before it runs. Pairs in a row are measured and predicted; `error`
is predicted over measured, less one. `must` says whether bytes are within 2% and the iteration within 15%, and, for the
plan that was chosen for a budget, whether it is within 5% of the best of the others.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import offstage
from benchmarks import harness, workload
from benchmarks.common import Row, clean_up, milliseconds, peak_bytes, reset_peak, synchronize
from benchmarks.harness import Case
from benchmarks.workload import IN_BACKWARD, IN_STEP, MAX_NORM, OVERLAP_FORWARD, SIZES, Training, build, config_for
from offstage.config import OffloadConfig, parse_size
from offstage.planning.planner import choose_host_fraction
from offstage.planning.sizes import ParamSize

FULL_PARAMS = 2_702_000_000
WARM_UP, LEARNING_WARM_UP = 3, 4  # update_in_backward learns in its first iterations, and a window opens
FP32 = {"master_weights": "fp32"}
WORKLOAD_FIELDS = (
    "forward_ms",
    "backward_ms",
    "forward_launch_ms",
    "backward_launch_ms",
    "other_bytes",
    "activation_bytes",
)

PREDICTIONS: dict[str, Mapping[str, Any]] = {
    "in step": IN_STEP,
    "in step, fp32 masters": FP32,
    "half, in step": {**IN_STEP, "fraction": 0.5},
    "overlap_forward": OVERLAP_FORWARD,
    "window of 8 GiB": {**OVERLAP_FORWARD, "window": "8GiB"},
    "update_in_backward": IN_BACKWARD,
    "all by the CPU, fp32 masters": {**FP32, "update_on": "host"},
    "all by the CPU, overlap_forward": {**OVERLAP_FORWARD, "update_on": "host"},
    "all by the CPU, update_in_backward": {**IN_BACKWARD, "update_on": "host"},
    "30% by the CPU, in step": {**IN_STEP, "host_fraction": 0.3},
    "30% by the CPU, update_in_backward": {**IN_BACKWARD, "host_fraction": 0.3},
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
    """One model, which returns its loss, for all plans; what the device does besides updates is measured first."""

    def __init__(self, model: nn.Module, batches: Iterator[torch.Tensor], size_name: str, *, clips: bool) -> None:
        self.model, self.size_name = model, size_name
        self.num_params = sum(param.numel() for param in model.parameters())
        self._batches, self._clips = batches, clips
        self.machine = offstage.measure_machine()
        self.workload = self._measure_workload()

    def _measure_workload(self) -> offstage.Workload:
        loss: list[torch.Tensor] = []

        def forward() -> None:
            loss[:] = [self.model(next(self._batches))]

        def both() -> None:
            forward()
            loss.pop().backward()
            if self._clips:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.model.zero_grad()

        reset_peak()
        iteration = milliseconds(both)
        weights = sum(param.nbytes for param in self.model.parameters())
        other = max(0, peak_bytes() - 2 * weights)
        activations = max(0, self._peak_without_gradients(both) - weights)
        forward_ms = milliseconds(forward)
        launches = self._measure_launches()
        return offstage.Workload(
            forward_ms=round(forward_ms, 1),
            backward_ms=round(iteration - forward_ms, 1),
            other_bytes=other,
            activation_bytes=activations,
            forward_launch_ms=round(launches[0], 1),
            backward_launch_ms=round(launches[1], 1),
        )

    def _measure_launches(self) -> tuple[float, float]:
        """The host's time for forward and backward: with hardly any data the device does not hold it up."""
        batch = next(self._batches)
        tiny = batch[:1, :16] if batch.dim() == 2 else batch[:1]
        times = []
        for _ in range(6):
            synchronize()
            start = time.perf_counter()
            loss = self.model(tiny)
            middle = time.perf_counter()
            loss.backward()
            times.append((1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)))
            self.model.zero_grad()
        forward, backward = (statistics.median(column) for column in zip(*times[2:], strict=True))
        return forward, backward

    def _peak_without_gradients(self, both: Callable[[], None]) -> int:
        """With each gradient freed as it comes."""

        def free(param: torch.Tensor) -> None:
            param.grad = None

        hooks = [param.register_post_accumulate_grad_hook(free) for param in self.model.parameters()]
        reset_peak()
        both()
        for hook in hooks:
            hook.remove()
        return peak_bytes()

    def run(self, config: Mapping[str, Any], *, iterations: int) -> Row:
        """Predicted and measured."""
        in_backward = bool(config.get("update_in_backward"))
        clips = self._clips and not in_backward
        clean_up()
        start = time.perf_counter()
        config = config_for(self.size_name, config)
        optimizer = workload.offloaded(self.model, self.size_name, config)
        training = Training(self.model, optimizer, SIZES[self.size_name], clip="outside" if clips else None)
        training.batches = self._batches
        try:
            plan = self._predict(optimizer.plan.sizes, OffloadConfig(**config))
            assert plan.prediction is not None
            predicted = plan.prediction
            warm_up = LEARNING_WARM_UP if in_backward or config.get("window") else WARM_UP
            training.laps(warm_up, to_the_end=False)
            reset_peak()
            times = training.laps(iterations, to_the_end=False)
            measured_ms = statistics.median(times)
            peak = peak_bytes()
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

    def row(self, name: str, row: Row, **more: Any) -> Row:
        return {
            "plan_name": name,
            **more,
            **row,
            "workload": {key: getattr(self.workload, key) for key in WORKLOAD_FIELDS},
            "measured_machine": json.loads(self.machine.to_json()),
        }


def _error(measured: int, predicted: int) -> float:
    return round(predicted / measured - 1, 4) if measured else float(predicted)


def holds(row: Mapping[str, Any]) -> dict[str, bool]:
    error = row["error"]
    return {
        "bytes within 2%": all(abs(error[name]) <= 0.02 for name in ("device_state_bytes", "host_bytes")),
        "iteration within 15%": abs(error["iteration"]) <= 0.15,
    }


def predictions(bench: Bench) -> Iterator[Row]:
    for name, config in PREDICTIONS.items():
        row = bench.run(config, iterations=3)
        yield bench.row(name, row, must=holds(row))


def budget(bench: Bench, size: str) -> Iterator[Row]:
    """The plan that the planner chooses for `size`, after ten made by hand."""
    times = {}
    given: int | str = size
    by_hand = BY_HAND
    if bench.size_name != "full":
        given = max(400 * 2**10, parse_size(size, "size") * bench.num_params // FULL_PARAMS)  # slots are not as small
        by_hand = {name: config for name, config in BY_HAND.items() if "window" not in config}  # larger than `given`
    for name, config in by_hand.items():
        row = bench.run({**OVERLAP_FORWARD, "device_budget": given, **config}, iterations=3)
        times[name] = row["measured_ms"]
        yield bench.row(name, row, device_budget=size, must=holds(row))
    row = bench.run({**OVERLAP_FORWARD, "device_budget": given, "update_on": "auto"}, iterations=3)
    best = min(times, key=lambda name: times[name])
    ratio = round(row["measured_ms"] / times[best], 4)
    must = {**holds(row), "within 5% of the best by hand": ratio <= 1.05}
    yield bench.row("chosen", row, device_budget=size, best_by_hand=best, ratio_to_best=ratio, must=must)


def main() -> None:
    others = [word for word in sys.argv[1:] if word.endswith("iB")]
    names = dict.fromkeys(["predictions", *BUDGETS, *others])
    options = harness.parse(harness.command(__doc__), harness.cases_of(names))
    model = build(SIZES[options.size])
    bench = Bench(model, Training(model, None, SIZES[options.size]).batches, options.size, clips=True)
    print(bench.machine, bench.workload, flush=True)

    def measure(case: Case) -> Iterator[Row]:
        return predictions(bench) if case.name == "predictions" else budget(bench, case.name)

    harness.run("plans", options.cases, measure)


if __name__ == "__main__":
    main()
