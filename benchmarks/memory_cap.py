# SPDX-License-Identifier: Apache-2.0
"""Does what dies of out-of-memory resident train offloaded, and what does the memory saved buy?

    python -m benchmarks.memory_cap
    python -m benchmarks.memory_cap --size small     anywhere: does it run? Without a GPU there is no cap

The 2.70B workload under a cap on device memory. Under the small cap resident state does not fit at all; under the
large one it fits, and the question is the largest batch each way.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks import harness, workload
from benchmarks.common import ON_GPU, Row, clean_up, gib, peak_bytes, synchronize
from benchmarks.harness import Case
from benchmarks.workload import SIZES, build, tokens

SMALL_CAP_GIB = 24
LARGE_CAP_GIB = 48
BATCHES = {"full": (8, 16, 24, 32, 48, 64), "small": (1, 2)}
STATES: Mapping[str, Mapping[str, Any]] = {"resident": {"fraction": 0.0}, "offloaded": {"fraction": 1.0}}


def cap_device_memory(cap_gib: float) -> None:
    if ON_GPU:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / total)


def train(batch: int, iterations: int, config: Mapping[str, Any], size_name: str) -> Row:
    """Iterations that ran, their time and peak; `died` names the iteration that ran out of memory."""
    clean_up()
    size = SIZES[size_name]
    times: list[float] = []
    losses: list[float] = []
    died = None
    try:
        model = build(size)
        training = workload.Training(model, workload.offloaded(model, size_name, config), size)
        training.batches = (tokens(size, batch, seed=iteration) for iteration in itertools.count())
        for _ in range(iterations):
            synchronize()
            start = time.perf_counter()
            training.iterate()
            losses.append(training.losses[-1].item())
            times.append(time.perf_counter() - start)
        training.close()
    except torch.OutOfMemoryError:
        died = len(times) + 1
    return {
        "batch": batch,
        "iterations": len(times),
        "died_in_iteration": died,
        "iteration_ms": round(1e3 * statistics.median(times[2:]), 1) if len(times) > 2 else None,
        "peak_gib": round(gib(peak_bytes()), 2),
        "first_and_last_loss": [round(losses[0], 4), round(losses[-1], 4)] if losses else None,
    }


def measure(case: Case, size_name: str) -> Iterator[Row]:
    """Under the small cap 20 iterations; under the large one a row per batch size, up to the first that dies."""
    is_small = case.name == "small_cap"
    cap = SMALL_CAP_GIB if is_small else LARGE_CAP_GIB
    cap_device_memory(cap)
    for state, config in STATES.items():
        for batch in BATCHES[size_name][:1] if is_small else BATCHES[size_name]:
            result = train(batch, 20 if is_small else 5, config, size_name)
            if result["iteration_ms"] and not is_small:
                result["tokens_per_s"] = round(batch * SIZES[size_name].sequence / result["iteration_ms"] * 1e3)
            yield {"cap_gib": cap, "state": state} | result
            if result["died_in_iteration"]:
                break


def main() -> None:
    options = harness.parse(harness.command(__doc__), harness.cases_of(("small_cap", "large_cap")))
    harness.run("memory_cap", options.cases, lambda case: measure(case, options.size))


if __name__ == "__main__":
    main()
