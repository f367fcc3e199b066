# SPDX-License-Identifier: Apache-2.0
"""`StepTimer`: when one device's last step began, waited and ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from offstage.lanes.lanes import Lane, Lanes


class StepTimer:
    """Stamps of one device's last step. Taking them waits for nothing; reading them does."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._start: Any = None
        self._step: Any = None
        self._waits_in_backward = 0
        self._stops: dict[Lane, Any] = {}
        self._waits: list[tuple[Any, Any]] = []
        self._waits_before: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """The caller's stream reaches the step's first gradients. Whatever waited for the step before has done so."""
        self._start = self._lanes.stamp(Lane.CALLER)
        self._waits_before, self._waits = self._waits, []

    def reach_step(self) -> None:
        """The caller's stream reaches `step()`: backward is over."""
        self._step, self._waits_in_backward = self._lanes.stamp(Lane.CALLER), len(self._waits)

    def backward_ms(self) -> float:
        """From the first update in backward to `step()`, without waiting for updates."""
        waits = self._waits[: self._waits_in_backward]
        waited = sum(self._lanes.elapsed_ms(before, after) for before, after in waits)
        return self._lanes.elapsed_ms(self._start, self._step) - waited

    @contextlib.contextmanager
    def exposed(self) -> Iterator[None]:
        """The caller's stream waits for updates within."""
        before = self._lanes.stamp(Lane.CALLER)
        yield
        self._waits.append((before, self._lanes.stamp(Lane.CALLER)))

    def stop(self) -> None:
        self._stops = {lane: self._lanes.stamp(lane) for lane in (Lane.FETCH, Lane.UPDATE, Lane.STORE)}

    def read(self) -> dict[Lane, float]:
        """Milliseconds from the start to each lane's end; empty before the first step."""
        # A lane may have been done before the gradients were ready: nothing of it was waited for.
        return {lane: max(0.0, self._lanes.elapsed_ms(self._start, stop)) for lane, stop in self._stops.items()}

    def exposed_ms(self, *, last: bool) -> float:
        """How long the caller's stream stood still for the last step, or for the one before."""
        waits = self._waits if last else self._waits_before
        return sum(max(0.0, self._lanes.elapsed_ms(before, after)) for before, after in waits)
