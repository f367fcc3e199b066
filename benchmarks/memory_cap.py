# SPDX-License-Identifier: Apache-2.0
"""Does what dies of out-of-memory resident train offloaded, and what does the memory saved buy?

    python -m benchmarks.memory_cap

The 2.70B workload under a cap on device memory. Under the small cap resident state does not fit at all; under the
large one it fits, and the question is the largest batch each way.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

import offstage
from benchmarks.common import write_row
from benchmarks.workload import Size, adamw, build, tokens

SMALL_CAP_GIB = 24
LARGE_CAP_GIB = 48
BATCHES = (8, 16, 24, 32, 48, 64)


def cap_device_memory(gib: float) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)


def train(batch: int, iterations: int, config: dict[str, Any]) -> dict[str, Any]:
    """Iterations that ran, their time and peak; `died` names the iteration that ran out of memory."""
    size = Size()
    torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    died = None
    try:
        model = build(size)
        optimizer = offstage.offload(adamw(model), model, **config)
        for iteration in range(iterations):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = model(tokens(size, batch, seed=iteration))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - start)
        optimizer.close()
    except torch.OutOfMemoryError:
        died = len(times) + 1
    result = {
        "batch": batch,
        "iterations": len(times),
        "died_in_iteration": died,
        "iteration_ms": round(1e3 * statistics.median(times[2:]), 1) if len(times) > 2 else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_and_last_loss": [round(losses[0], 4), round(losses[-1], 4)] if losses else None,
    }
    model = optimizer = loss = None
    gc.collect()
    torch.cuda.empty_cache()
    return result


def larger_batches(name: str, config: dict[str, Any]) -> None:
    """One row per batch size, up to the first that does not fit."""
    for batch in BATCHES:
        result = train(batch, 5, config)
        if result["iteration_ms"]:
            result["tokens_per_s"] = round(batch * Size().sequence / result["iteration_ms"] * 1e3)
        write_row("memory_cap", {"cap_gib": LARGE_CAP_GIB, "state": name} | result)
        if result["died_in_iteration"]:
            return


def main() -> None:
    resident, offloaded = {"fraction": 0.0}, {"fraction": 1.0}
    cap_device_memory(SMALL_CAP_GIB)
    for name, config in (("resident", resident), ("offloaded", offloaded)):
        write_row("memory_cap", {"cap_gib": SMALL_CAP_GIB, "state": name} | train(8, 20, config))
    cap_device_memory(LARGE_CAP_GIB)
    for name, config in (("resident", resident), ("offloaded", offloaded)):
        larger_batches(name, config)


if __name__ == "__main__":
    main()
