# SPDX-License-Identifier: Apache-2.0
"""The receipt: what was really moved, and what it cost. Filled by `optimizer.py`, shown by `optimizer.receipt()`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from offstage.config import format_size
from offstage.lanes import Lane, Lanes

_WORKING_LANES = (Lane.FETCH, Lane.UPDATE, Lane.STORE)


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
    """From the moment the gradients were ready to the end of each lane's work, in the last step that was timed."""
    exposed_ms: float | None = None
    """How long that step held up the caller's stream."""
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
    """Stamps of one device's steps, read only once they have passed: a timer must not make anyone wait."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._open: deque[dict[str, tuple[Any, Any]]] = deque(maxlen=8)
        self._start: Any = None
        self.lane_ms: dict[str, float] = {}
        self.exposed_ms: float | None = None

    def start(self) -> None:
        """The caller's stream reaches the step: the gradients are ready."""
        self._start = self._lanes.stamp(Lane.CALLER)

    def stop(self) -> None:
        stops = {lane.value: self._lanes.stamp(lane) for lane in (*_WORKING_LANES, Lane.CALLER)}
        self._open.append({lane: (self._start, stop) for lane, stop in stops.items()})

    def read(self) -> None:
        """Take over the newest step whose stamps have all passed."""
        while self._open:
            times = {lane: self._lanes.elapsed_ms(*pair) for lane, pair in self._open[0].items()}
            if any(time is None for time in times.values()):
                return
            self._open.popleft()
            self.exposed_ms = times.pop(Lane.CALLER.value)
            self.lane_ms = {lane: max(0.0, time) for lane, time in times.items() if time is not None}
