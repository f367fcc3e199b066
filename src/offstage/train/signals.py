# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM, a save that failed: reasons to stop after the step under way, on all ranks after the same one.

`loop.py` asks once per step. A handler does nothing but write the request down, so that no step, save or collective is
ever cut in two by it.
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
"""Above all signals: it counts more."""
IMPATIENT_S = 2.0
"""A second Ctrl-C ends the process at once. What comes sooner is the same one, which torchrun passes on."""


class StopRequests:
    """Whether somebody has asked this run to stop."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: one of host tensors over all ranks, if there are several."""
        self._group = group
        self._asked = 0
        self._asked_at = 0.0
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._reducing: dist.Work | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Within: signals are requests. Python delivers them to the main thread; elsewhere nothing is installed."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def ask(self, number: signal.Signals = signal.SIGTERM) -> None:
        """As if the signal had come."""
        self._asked, self._asked_at = int(number), time.monotonic()

    def begin_step(self, *, failed: bool = False) -> None:
        """Ranks begin to agree: what came before this counts. Nobody waits here.

        `failed`: this rank cannot go on, for a reason that it will tell itself.
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
