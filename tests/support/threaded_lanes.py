# SPDX-License-Identifier: Apache-2.0
"""`ThreadedLanes`: an accelerator's lanes without an accelerator. For tests.

Streams run what they are given at once, in the thread that gives it, and events have passed when they are made.
Everything else is that of `AcceleratorLanes`: updates on the host run in real threads, and work that follows them is
promised and given to its stream by the thread that ends them. What streams do later than they are told is the matter of
`LazyLanes`, and of tests on a real device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from offstage.lanes.accelerator import AcceleratorLanes
from offstage.lanes.link import use_lanes


class _Passed:
    """An event behind work that has run."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """Runs work where and when it is given."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_event(self, event: _Passed) -> None:
        assert isinstance(event, _Passed)  # not a promise: a stream cannot wait for the host

    def record_event(self) -> _Passed:
        return _Passed()

    def synchronize(self) -> None:
        pass


class ThreadedLanes(AcceleratorLanes):
    """`AcceleratorLanes` of the CPU."""

    def __init__(self, device: torch.device) -> None:
        with mock.patch("torch.Stream", side_effect=lambda device: _Stream()):
            super().__init__(device)
        self._only_caller: Any = _Stream()

    def _caller(self) -> Any:
        return self._only_caller

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def allocated_bytes(self) -> None:
        return None

    def free_bytes(self) -> int:
        return 0

    def _stamp(self, stream: Any) -> float:
        return time.perf_counter()


def with_threads() -> contextlib.AbstractContextManager[None]:
    """Within the context, optimizers are built on threaded lanes."""
    return use_lanes(ThreadedLanes)


def host_threads() -> set[threading.Thread]:
    """Those that update on the host now."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("offstage-host")}


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return met
