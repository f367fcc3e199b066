# SPDX-License-Identifier: Apache-2.0
"""The receipt: what was really moved, and what it cost. Filled by `optimizer.py`, shown by `optimizer.receipt()`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from offstage.config import format_size
from offstage.lanes import Lane, Lanes


@dataclass(frozen=True)
class Receipt:
    """Counted where the copies are made, not where they are planned."""

    steps: int
    """Steps counted so far."""
    bytes_fetched: int
    """Host → device, in the last step."""
    bytes_stored: int
    """Device → host, in the last step."""
    total_bytes_fetched: int
    total_bytes_stored: int
    device_state_bytes: int
    """State on the device now: resident state and slots."""
    host_state_bytes: int
    """Arenas, alignment included."""
    lane_ms: dict[str, float] = field(default_factory=dict)
    """From the moment the gradients were ready to the end of each lane's work, in the last step."""
    exposed_ms: float | None = None
    """How long the last step held up the caller's stream."""
    weights_written_by_others: int = 0
    """Elements whose weight no longer belonged to its master: the weight won."""

    @property
    def link_gb_per_s(self) -> dict[str, float]:
        """Rate of each direction over its lane's time."""
        moved = {"fetch": self.bytes_fetched, "store": self.bytes_stored}
        return {lane: size / self.lane_ms[lane] / 1e6 for lane, size in moved.items() if self.lane_ms.get(lane)}

    def __str__(self) -> str:
        rows = [
            ("steps", f"{self.steps}"),
            ("fetched / stored, last step", f"{format_size(self.bytes_fetched)} / {format_size(self.bytes_stored)}"),
            ("state on the device", format_size(self.device_state_bytes)),
            ("state on the host", format_size(self.host_state_bytes)),
        ]
        rates = self.link_gb_per_s
        for lane, milliseconds in self.lane_ms.items():
            rate = f", {rates[lane]:.1f} GB/s" if lane in rates else ""
            rows.append((f"{lane} lane", f"{milliseconds:.2f} ms{rate}"))
        if self.exposed_ms is not None:
            rows.append(("exposed", f"{self.exposed_ms:.2f} ms"))
        if self.weights_written_by_others:
            rows.append(("weights written by others", f"{self.weights_written_by_others} elements"))
        return "\n".join(f"{name:<28} {value}" for name, value in rows)


class StepTimer:
    """Stamps of one device's last step. Taking them makes nobody wait; reading them does."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._start: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._stops: dict[Lane, Any] = {}

    def start(self) -> None:
        """The caller's stream reaches the step: the gradients are ready."""
        self._start = self._lanes.stamp(Lane.CALLER)

    @contextlib.contextmanager
    def exposed(self) -> Iterator[None]:
        """The caller's stream waits for updates within."""
        before = self._lanes.stamp(Lane.CALLER)
        yield
        self._waits.append((before, self._lanes.stamp(Lane.CALLER)))

    def stop(self) -> None:
        self._stops = {lane: self._lanes.stamp(lane) for lane in Lane}

    def read(self) -> dict[Lane, float]:
        """Milliseconds from the start to each lane's end; empty before the first step."""
        # A lane may have been done before the gradients were ready: nothing of it was waited for.
        return {lane: max(0.0, self._lanes.elapsed_ms(self._start, stop)) for lane, stop in self._stops.items()}
