# SPDX-License-Identifier: Apache-2.0
"""Do updates on the host and a model whose Python is busy slow each other down?

    python -m benchmarks.beside                    six models, about two minutes on one H200
    python -m benchmarks.beside llama --threads 8  one model, other threads
    python -m benchmarks.beside --size small       anywhere with transformers: does it run?

The models of `benchmarks.models` run forward and backward in one thread, without an optimizer; in another thread an
optimizer with `update_on="host"` makes one step after the other for parameters of its own, so that neither waits for
the other's results. What they share is the interpreter, the CPUs, host memory and the link. Each is timed alone first.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from typing import Any

import torch
from torch import nn

import offstage
from benchmarks import harness
from benchmarks.common import DEVICE, Row, clean_up, now, synchronize
from benchmarks.harness import Case, at_least, at_most
from benchmarks.models import CASES, MODELS

NUM_PARAMS = {"full": 48 * 2**24, "small": 2**16}
MIN_RATE, MAX_MODEL = 0.85, 1.05


class Updates:
    """Steps on the host, one after the other, of parameters of their own."""

    def __init__(self, num_params: int, threads: int | None) -> None:
        self.num_params = num_params
        size = max(num_params // 48, 2**14)
        self._params = [
            nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=DEVICE)) for _ in range(num_params // size)
        ]
        for param in self._params:
            param.grad = torch.full_like(param, 1e-3)
        options: dict[str, Any] = {"update_on": "host", "min_bytes": 0, "threads": threads}
        self._optimizer = offstage.offload(torch.optim.AdamW(self._params, lr=1e-4), **options)
        self.steps = 0
        self._ended = False
        self.step()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.synchronize()
        self.steps += 1

    def until_ended(self) -> None:
        while not self._ended:
            self.step()

    def rate(self, steps: int, seconds: float) -> float:
        """Gparam/s."""
        return steps * self.num_params / seconds / 1e9

    def rate_alone(self, steps: int) -> float:
        self.step()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return self.rate(steps, time.perf_counter() - start)

    def end(self) -> None:
        self._ended = True

    def close(self) -> None:
        self._optimizer.close()


def measure(case: Case, size_name: str, threads: int | None) -> Row:
    model, batches = MODELS[case.name](size_name == "full")
    cycle = itertools.cycle(batches)

    def laps(iterations: int) -> list[float]:
        ends = [now()]
        for _ in range(iterations):
            model(next(cycle)).backward()
            model.zero_grad()
            ends.append(now())
        synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]

    laps(3)
    model_alone = statistics.median(laps(8))
    updates = Updates(NUM_PARAMS[size_name], threads)
    rate_alone = updates.rate_alone(5)
    thread = threading.Thread(target=updates.until_ended)
    thread.start()
    try:
        laps(2)
        steps, start = updates.steps, time.perf_counter()
        beside = laps(12)
        rate_beside = updates.rate(updates.steps - steps, time.perf_counter() - start)
    finally:
        updates.end()
        thread.join()
        updates.close()
    clean_up()
    row = {
        "case": case.name,
        "threads": threads,
        "model_ms": [round(model_alone, 1), round(statistics.median(beside), 1)],
        "model_times_ms": [round(one, 1) for one in beside],
        "gparam_per_s": [round(rate_alone, 2), round(rate_beside, 2)],
        "rate_kept": round(rate_beside / rate_alone, 3),
        "ratio": round(statistics.median(beside) / model_alone, 3),
    }
    row["must"] = {"rate": at_least(MIN_RATE, row["rate_kept"]), "model": at_most(MAX_MODEL, row["ratio"])}
    return row


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--threads", type=int)
    options = harness.parse(parser, CASES)
    harness.run("beside", options.cases, lambda case: measure(case, options.size, options.threads))


if __name__ == "__main__":
    main()
