# SPDX-License-Identifier: Apache-2.0
"""`CpuUse`: how many of the CPU's cores this process keeps busy, through an iteration. Used by `observe.py`."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

from offstage.memory.cpus import usable_cpus

_EVERY_S = 0.004
_MOST_SAMPLES = 400


class CpuUse:
    """A thread that reads the process's CPU time every few milliseconds."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0

    def start(self, began: float) -> None:
        """`began`: when the iteration did, by `time.perf_counter`."""
        self._began = began
        self._look()
        self._thread = threading.Thread(target=self._run, name="offstage-observer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        every = _EVERY_S
        while not self._over.wait(every):
            self._look()
            if len(self._seen) >= _MOST_SAMPLES:  # a long iteration: half as often, from its beginning
                del self._seen[1::2]
                every *= 2

    def _look(self) -> None:
        self._seen.append((time.perf_counter(), time.process_time()))

    def stop(self) -> None:
        """The iteration is over."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._look()

    def used(self) -> dict[str, Any]:
        """The mean over each interval: `ms` are their ends, one more than `cores` with the first one's beginning."""
        ms = [1e3 * (wall - self._began) for wall, _ in self._seen]
        steps = list(pairwise(self._seen))
        cores = [(later[1] - sooner[1]) / max(later[0] - sooner[0], 1e-9) for sooner, later in steps]
        return {
            "ms": [round(value, 3) for value in ms],
            "cores": [round(value, 3) for value in cores],
            "available": usable_cpus(),
        }
