# SPDX-License-Identifier: Apache-2.0
"""What `sleep()` and `wake()` return: what moved, how fast beside the link, and what is still on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch

from offstage.config import format_size
from offstage.lanes.lanes import Lane
from offstage.phases.parking import Lot


@dataclass(frozen=True)
class DeviceReport:
    """One device after `sleep()`."""

    device: torch.device
    parked_bytes: int
    """Values that wait on the host now."""
    copied_bytes: int
    """Of these, what had to be copied: the host had the rest."""
    freed_bytes: int
    """Slots, the window, and gradients that were dropped."""
    host_bytes: int
    """Host memory for what sleeps, in all."""
    seconds: float
    copy_seconds: float
    still_ours_bytes: int
    """Of the objects given, kept or not needed to go."""
    other_bytes: int
    """Tensors of which nothing is known."""
    reserve_bytes: int
    """In the allocator's reserve: parts of blocks that are in use."""
    context_bytes: int
    """Neither free nor torch's: the driver's context, libraries, other processes."""
    link_gb_per_s: float
    """What the link carries this way when nothing goes the other way; 0 if unknown."""

    @property
    def gb_per_s(self) -> float:
        """Copied bytes over the time of the copies, new host memory included."""
        return self.copied_bytes / self.copy_seconds / 1e9 if self.copy_seconds else 0.0

    def __str__(self) -> str:
        left = {
            "offstage's": self.still_ours_bytes,
            "other tensors": self.other_bytes,
            "allocator's reserve": self.reserve_bytes,
            "context and others": self.context_bytes,
        }
        rows = [
            ("parked", f"{format_size(self.parked_bytes)}, {format_size(self.copied_bytes)} copied"),
            ("freed without a copy", format_size(self.freed_bytes)),
            ("time", f"{1e3 * self.seconds:.1f} ms, copies at {_beside(self.gb_per_s, self.link_gb_per_s)}"),
            ("host memory", format_size(self.host_bytes)),
            ("still on the device", ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in left.items())),
        ]
        return "\n".join([f"asleep on {self.device}", *(f"  {name:<22} {value}" for name, value in rows)])


class Sleep:
    """What one `sleep()` did. As a context manager, it wakes what it has put to sleep, and no more, at its end."""

    def __init__(self, devices: list[DeviceReport], wake: Callable[[], object]) -> None:
        self.devices = devices
        self._wake = wake

    @property
    def freed_bytes(self) -> int:
        """Device memory that was given up, on all devices."""
        return sum(one.parked_bytes + one.freed_bytes for one in self.devices)

    @property
    def seconds(self) -> float:
        return max((one.seconds for one in self.devices), default=0.0)

    def __enter__(self) -> Sleep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wake()

    def __str__(self) -> str:
        return "\n".join(map(str, self.devices)) or "nothing had to leave"


class Wake:
    """What one `wake()` began. Modules and optimizers wait for their own tensors; `wait()` waits for all."""

    def __init__(self, comings: list[tuple[Lot, int, object, object]], settle: Callable[[], None]) -> None:
        """`comings`: per device its lot, the bytes, and stamps of the fetch lane before and behind them."""
        self._comings, self._settle = comings, settle

    @property
    def nbytes(self) -> int:
        """What comes back."""
        return sum(nbytes for _, nbytes, _, _ in self._comings)

    @property
    def seconds(self) -> float:
        """How long the copies take. Waits for them."""
        return max((lot.lanes.elapsed_ms(start, stop) / 1e3 for lot, _, start, stop in self._comings), default=0.0)

    @property
    def gb_per_s(self) -> float:
        """Waits for the copies."""
        return self.nbytes / seconds / 1e9 if (seconds := self.seconds) else 0.0

    @property
    def link_gb_per_s(self) -> float:
        """What the link carries this way when nothing goes the other way; 0 if unknown."""
        return sum(lot.link.one_way_gb_per_s(lot.lanes, Lane.FETCH) for lot, *_ in self._comings)

    def wait(self) -> None:
        """The caller's stream waits for everything: for code that reads tensors in ways no hook sees."""
        self._settle()

    def __str__(self) -> str:
        rate = _beside(self.gb_per_s, self.link_gb_per_s)
        return f"woken: {format_size(self.nbytes)} in {1e3 * self.seconds:.1f} ms, {rate}"


def _beside(gb_per_s: float, link: float) -> str:
    return f"{gb_per_s:.1f} GB/s" + (f" ({gb_per_s / link:.0%} of the link's {link:.1f})" if link else "")
