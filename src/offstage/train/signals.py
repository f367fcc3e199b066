# SPDX-License-Identifier: Apache-2.0
"""`StopRequests`: Ctrl-C, SIGTERM or a failed save stop the run after the step under way, on all ranks after the same.

The signal handler only records the request, so that it interrupts no step, save or collective.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAILED = 1000
"""Larger than all signal numbers: it takes precedence."""
IMPATIENT_S = 2.0
"""A second Ctrl-C after this time ends the process at once. Sooner, it is the same one, forwarded by torchrun."""


class StopRequests:
    """Requests to stop this run."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: one of host tensors over all ranks, if there are several."""
        self._group = group
        self._asked = 0
        self._asked_at = 0.0
        self._flag = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._reducing: dist.Work | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Within: signals are requests. Handlers can be installed in the main thread only."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def ask(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Request a stop, as the signal does."""
        self._asked, self._asked_at = int(number), time.monotonic()

    def check(self) -> None:
        """Leave now if this process has got a request: for long work before the first step, which saves nothing."""
        if self._asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked:
            raise SystemExit(128 + self._asked)  # as shells report signals

    def begin_step(self, *, failed: bool = False) -> None:
        """Start to exchange the requests so far between ranks, without waiting.

        `failed`: this rank cannot continue, and reports the reason itself.
        """
        self._flag[0] = FAILED if failed else self._asked
        if self._group is not None:
            self._reducing = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def end_step(self) -> int:
        """The signal that some rank got, `FAILED`, or 0: the same on every rank, after the same step."""
        if self._group is None:
            return max(self._asked, int(self._flag))
        assert self._reducing is not None
        self._reducing.wait()
        self._reducing = None
        return int(self._flag)

    def _hear(self, number: int, _: FrameType | None) -> None:
        impatient = self._asked and number == signal.SIGINT and time.monotonic() - self._asked_at > IMPATIENT_S
        if impatient:
            raise KeyboardInterrupt
        if not self._asked:
            self.ask(signal.Signals(number))
