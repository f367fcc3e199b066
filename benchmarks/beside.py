# SPDX-License-Identifier: Apache-2.0
"""Do updates on the host and a model whose Python is busy slow each other down?

    python -m benchmarks.beside                    six models, about two minutes on one H200
    python -m benchmarks.beside llama --threads 8  one model, other threads
    python -m benchmarks.beside --size small       anywhere with transformers: does it run?

The models of `benchmarks.models` run forward and backward in one thread, without an optimizer; in another thread an
optimizer with `update_on="host"` makes one step after the other for parameters of its own, so that neither waits for
the other's results. What they share is the interpreter, the CPUs, host memory and the link. Each is timed alone first.
The rate counts the time in which the CPU was updating; the one with waits, also the time in which it had no gradients.
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
from offstage.optimizer.optimizer import runtime_of

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
        self._transport = runtime_of(self._optimizer).engines[0].transport
        self.step()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.synchronize()
        self.steps += 1

    def until_ended(self) -> None:
        while not self._ended:
            self.step()

    def seen(self) -> tuple[int, float, float]:
        """Steps, seconds, and seconds in which the CPU was updating, so far."""
        return self.steps, time.perf_counter(), self._transport.lanes.threads.busy_s

    def rates(self, before: tuple[int, float, float]) -> list[float]:
        """Gparam/s since then: while the CPU was updating, and with all that it waited for."""
        steps, seconds, busy = (now - then for now, then in zip(self.seen(), before, strict=True))
        return [round(steps * self.num_params / time / 1e9, 2) for time in (busy, seconds)]

    def rates_alone(self, steps: int) -> list[float]:
        self.step()
        before = self.seen()
        for _ in range(steps):
            self.step()
        return self.rates(before)

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
    alone = updates.rates_alone(5)
    thread = threading.Thread(target=updates.until_ended)
    thread.start()
    try:
        laps(2)
        before = updates.seen()
        laps_beside = laps(12)
        beside = updates.rates(before)
    finally:
        updates.end()
        thread.join()
        updates.close()
    clean_up()
    row = {
        "case": case.name,
        "threads": threads,
        "model_ms": [round(model_alone, 1), round(statistics.median(laps_beside), 1)],
        "model_times_ms": [round(one, 1) for one in laps_beside],
        "gparam_per_s": [alone[0], beside[0]],
        "gparam_per_s_with_waits": [alone[1], beside[1]],
        "rate_kept": round(beside[0] / alone[0], 3),
        "ratio": round(statistics.median(laps_beside) / model_alone, 3),
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
