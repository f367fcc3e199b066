# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at a chosen step, a limit on threads at a chosen start, and a watchdog for calls that never return."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import offstage

SOURCE = Path(offstage.__file__).parent
_OTHERS = (threading.__file__, concurrent.futures.thread.__file__)
"""Ctrl-C arrives in these too: a thread is being started, or waited for."""


class HangError(AssertionError):
    """A call has not returned."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise in the main thread, wherever it waits, when the time is over."""

    def over(*_: object) -> None:
        raise HangError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Steps:
    """The moments within at which Python looks for signals in the main thread, in offstage, `threading` and pools.

    These are the beginning of a function and the return from one of C. Between other instructions Ctrl-C cannot come,
    so that nothing is tested which cannot happen.
    """

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.files: list[str] = []
        """The file of each, relative to the source."""
        self.called: set[str] = set()
        """`file:function` of what was called, in any thread."""
        self._interrupt_at = interrupt_at

    def __enter__(self) -> Steps:
        threading.setprofile(self._in_thread)
        sys.setprofile(self._in_main_thread)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _in_thread(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (place := _place(frame.f_code)).ours:
            self.called.add(str(place))

    def _in_main_thread(self, frame: FrameType, event: str, _: Any) -> None:
        self._in_thread(frame, event, _)
        if event in ("call", "c_return") and (place := _place(frame.f_code)).counts:
            self.files.append(place.file)
            if len(self.files) - 1 == self._interrupt_at:
                signal.raise_signal(signal.SIGINT)


@dataclass(frozen=True)
class _Place:
    file: str
    """Relative to the source."""
    function: str
    ours: bool
    counts: bool
    """Ctrl-C may arrive here."""

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


@functools.cache  # it is asked for at every call of every function
def _place(code: CodeType) -> _Place:
    name = code.co_filename
    ours = name.startswith(str(SOURCE))
    file = str(Path(name).relative_to(SOURCE)) if ours else Path(name).name
    return _Place(file, code.co_qualname.replace(".<locals>", ""), ours, ours or name in _OTHERS)


_START = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"


@contextlib.contextmanager
def thread_limit(allowed: int | None) -> Iterator[list[int]]:
    """So many threads more can be started, and then what CPython raises when the system refuses. Yields the starts.

    A real limit (RLIMIT_NPROC) does not bind the superuser, whom tests may run as.
    """
    start, starts = getattr(threading, _START), [0]

    def limited(*args: Any, **kwargs: Any) -> Any:
        if allowed is not None and starts[0] >= allowed:
            raise RuntimeError("can't start new thread")
        starts[0] += 1
        return start(*args, **kwargs)

    with mock.patch.object(threading, _START, limited):
        yield starts
