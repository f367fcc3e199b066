# SPDX-License-Identifier: Apache-2.0
"""The device to measure on; or the CPU, on which everything but its memory and its rates can be tried.

What benchmarks with several cases share: clocks, peaks, which cases were asked for, and what a row has to reach.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Row = dict[str, Any]


# The device


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Most device bytes since `reset_peak`; 0 without a device."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


class HostTime:
    """Stands in for an event where there is no device."""

    def __init__(self) -> None:
        self._s = time.perf_counter()

    def elapsed_time(self, later: HostTime) -> float:
        return 1e3 * (later._s - self._s)


def now() -> Any:
    """A moment of the device; `elapsed_time` of two is in milliseconds."""
    if DEVICE.type == "cpu":
        return HostTime()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# The command


def options_of(parser: argparse.ArgumentParser, cases: Collection[str], sizes: Collection[str]) -> argparse.Namespace:
    """What was asked for: `case` and `size` are there in every benchmark."""
    parser.add_argument("case", nargs="*", help=f"all of them unless named: {', '.join(cases)}")
    parser.add_argument("--size", choices=sizes, default="full")
    options = parser.parse_args()
    unknown = [name for name in options.case if name not in cases]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(cases)}")
    if DEVICE.type == "cpu":
        torch.backends.mkldnn.enabled = False  # some virtual machines report matrix units that they do not allow
    return options


# What a row has to reach


def at_most(limit: float, found: float) -> Row:
    return {"at_most": limit, "found": found, "met": found <= limit}


def at_least(limit: float, found: float | None) -> Row:
    return {"at_least": limit, "found": found, "met": found is not None and found >= limit}


def is_met(row: Row) -> bool:
    return all(one["met"] for one in row.get("must", {}).values())
