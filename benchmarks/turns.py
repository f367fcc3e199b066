# SPDX-License-Identifier: Apache-2.0
"""Trainings in one process that take turns with resident state, so that a slow minute of the machine hits all of them.

A `Contest` keeps resident state in memory. `measure` builds some more trainings beside it, and lets all of them train a
few iterations in turn. `ratio` is the median over the rounds of a training's time over that of resident state in the
same round. `peak_gib` is without what the others hold.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.common import Row, allocated_bytes, clean_up, gib, peak_bytes, reset_peak, synchronize
from benchmarks.workload import Training

Maker = Callable[[], Training]


class Contender:
    """One training, its rounds, and the device memory that is its own."""

    def __init__(self, make: Maker, warm_up: int) -> None:
        start_bytes = clean_up()
        self.training = make()
        self.rounds: list[list[float]] = []
        self.training.iterate()  # makes what stays, sometimes with more memory than any later iteration
        synchronize()
        reset_peak()
        for _ in range(warm_up - 1):
            self.training.iterate()
        synchronize()
        self.peak, self.warm_up_peak = 0, peak_bytes() - start_bytes
        self.rest()
        self._own_bytes = allocated_bytes() - start_bytes

    def turn(self, iterations: int) -> None:
        others = allocated_bytes() - self._own_bytes
        reset_peak()  # what the others took is not this one's peak, and nothing that window="auto" has to avoid
        self.rounds.append(self.training.turn(iterations))
        self.peak = max(self.peak, peak_bytes() - others)
        self.rest()

    def rest(self) -> None:
        """Leave the device idle, and to the others. A window opens again in the first iteration of the next turn."""
        self.training.optimizer.synchronize()
        if self.training.optimizer.config.window:
            self.training.optimizer.evict()
        synchronize()

    def row(self, resident: Contender) -> Row:
        medians, its = ([statistics.median(one) for one in which.rounds] for which in (self, resident))
        ratios = [mine / other for mine, other in zip(medians, its[-len(medians) :], strict=True)]
        return {
            **times_of(self.rounds),
            "resident_ms": round(statistics.median(its[-len(medians) :]), 1),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "ratio": round(statistics.median(ratios), 4),
            "peak_gib": gib(self.peak),
            **self.training.counted(),
        }


class Contest:
    """Resident state, and those that take turns with it."""

    def __init__(self, make_resident: Maker) -> None:
        self.resident = Contender(make_resident, warm_up=2)
        self.contenders: dict[str, Contender] = {}
        """Beside it, while they are measured."""

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: object) -> None:
        self.resident.training.close()
        del self.resident
        clean_up()

    def measure(self, makers: Mapping[str, Maker], rounds: int, *, iterations: int, warm_up: int) -> dict[str, Row]:
        """A row of each, after so many rounds."""
        contenders = self.contenders
        try:
            for name, make in makers.items():
                contenders[name] = Contender(make, warm_up)
            for _ in range(rounds):
                for one in (self.resident, *contenders.values()):
                    one.turn(iterations)
            return {name: one.row(self.resident) for name, one in contenders.items()}
        finally:
            one = self.resident  # or clean_up() would find the last one held
            while contenders:
                contenders.popitem()[1].training.close()
            clean_up()


def times_of(rounds: Sequence[Sequence[float]]) -> Row:
    every = [ms for one in rounds for ms in one]
    return {
        "rounds_ms": [round(statistics.median(one), 1) for one in rounds],
        "iteration_ms": round(statistics.mean(every), 1),
        "median_ms": round(statistics.median(every), 1),
    }
