# SPDX-License-Identifier: Apache-2.0
"""`Course`: what one iteration without a window takes of a device's memory, from cue to cue.

What is allocated when a cue fires says little of what backward takes next: a layer that is recomputed needs all its
activations again, and much is free right before. So one iteration is watched, with the peak counted anew at each cue.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from offstage.engine.engine import Engine

_watching: weakref.WeakSet[Course] = weakref.WeakSet()
"""A device has one counter of its peak: who counts it anew tells the others what it was."""


@dataclass
class _Interval:
    """From one cue to the next."""

    cue: str | int
    """The name of a module before its forward, the number of a gradient, or nothing: from `step()` to the first cue."""
    allocated: int
    """When it begins, without slots."""
    slots: int
    """Bytes of slots when it begins."""
    peak: int = 0
    """Without slots."""


class Course:
    """One iteration on one device, from the end of a step to the end of the next."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._device = engine.device
        self._told = 0
        """What others have found since the last cue."""
        self._intervals: list[_Interval] = []
        self._after_gradient: dict[int, int] = {}
        self._after_module: dict[str, int] = {}
        self.peak = 0
        self.after_last = 0
        """The most from the last cue to the next forward, without slots."""
        self.num_gradients = 0
        self.is_over = False
        _watching.add(self)
        self._peak_so_far()
        self._begin("")

    def note(self, cue: str | int) -> None:
        """A module is about to run, or the `cue`-th gradient is ready."""
        if not self.is_over:
            self._close()
            self._begin(cue)

    def end(self) -> None:
        """The step is made: from now on it is known what comes after each cue."""
        self._close()
        self.is_over = True
        _watching.discard(self)
        # Until the next forward the window is as it was; where none is seen, `step()` has given it back.
        before_forward = self._intervals[0].peak if any(isinstance(one.cue, str) for one in self._intervals[1:]) else 0
        most_later = before_forward
        for interval in reversed(self._intervals):
            most_later = max(most_later, interval.peak)
            if isinstance(interval.cue, int):  # of an iteration that was begun again the last gradients count
                self._after_gradient.setdefault(interval.cue, most_later - interval.allocated)
            else:
                growth = interval.peak - interval.allocated
                self._after_module[interval.cue] = max(growth, self._after_module.get(interval.cue, 0))
        self.after_last = max(self._intervals[-1].peak, before_forward)
        self.num_gradients = max(self._after_gradient, default=0)
        self._after_gradient[0] = most_later - self._intervals[0].allocated
        self._intervals.clear()

    def after_gradient(self, cue: int) -> int | None:
        """By how much memory rises until the next forward; `None` if there were fewer gradients. 0: none yet."""
        return self._after_gradient.get(cue)

    def after_module(self, module: str) -> int:
        """By how much memory rises until the next cue, when `module` runs."""
        return self._after_module.get(module, max(self._after_module.values()))

    def _begin(self, cue: str | int) -> None:
        engine = self._engine()
        assert engine is not None
        slots = engine.transport.pipeline.device_bytes
        self._intervals.append(_Interval(cue, (engine.transport.lanes.allocated_bytes() or 0) - slots, slots))

    def _close(self) -> None:
        engine, interval, peak = self._engine(), self._intervals[-1], self._peak_so_far()
        assert engine is not None
        self.peak = max(self.peak, peak)
        # Slots that were there all the time, or the peak would be too low.
        interval.peak = peak - min(interval.slots, engine.transport.pipeline.device_bytes)

    def _peak_so_far(self) -> int:
        """Since the last cue. It is counted anew from now on."""
        engine = self._engine()
        assert engine is not None
        lanes = engine.transport.lanes
        counted = lanes.peak_bytes()
        lanes.reset_peak()
        for other in _watching:
            if other._device == self._device:
                other._told = max(other._told, counted)
        found, self._told = max(self._told, counted), 0
        return found
