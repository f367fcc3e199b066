# SPDX-License-Identifier: Apache-2.0
"""`Window`: how many slots beyond the ring's own there may be, and when.

- A size is allocated step by step during backward, in proportion to how far backward has come and so has freed
  activations, and then kept.
- `"all"` is allocated in the same way, and given back in proportion during the next forward, behind the stores.
- `"auto"` takes at each cue in backward what fits under the limit, beside all that the rest of the iteration takes
  (`Course`), and gives it back during the next forward. What fits at any time is kept. The limit is `device_peak`, or
  without one the peak of an iteration without a window. Where the backend does not count what is allocated, only what
  `device_peak` leaves above the peak is used, like a size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from offstage.config import OffloadConfig, format_size
from offstage.engine.engine import Engine
from offstage.modules import running_backward
from offstage.optimizer.overlap.course import Course

logger = logging.getLogger("offstage")

_PLAIN_STEPS = 2
"""`window="auto"`: steps whose peak is looked at before the window opens. The first one has no slots yet."""
_BACK_BY = 0.75
"""Share of the modules by whose forward `"auto"` is given back: the last layers and the loss need the memory, and each
slot that goes before its store is done makes forward wait."""


class Window:
    """The window of one optimizer, over all its devices."""

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self._steps = 0
        self._cue = 0
        """Gradients that were ready so far in this iteration."""
        self._cues_in_backward = 0
        self._modules: set[str] = set()
        self._modules_in_forward = 0
        self._room: dict[Engine, int] = {}
        """`"auto"`: slots that fit at any time."""
        self._limit: dict[Engine, int] = {}
        """`"auto"`: bytes that the process may have allocated."""
        self._peak: dict[Engine, int] = {}
        self._courses: dict[Engine, Course] = {}
        """`"auto"`: of engines whose lanes count what is allocated."""
        self._widest: dict[Engine, int] = {}
        """`"auto"`: slots when the last step ended."""
        self.fallbacks: list[str] = []
        """What is not as it was asked for."""

    def slots(self, engine: Engine) -> int:
        """The largest number of window slots, now."""
        window, slot = self._config.window, engine.transport.pipeline.slot_bytes
        if not window or not slot:
            return 0
        if window == "all":
            return engine.arenas.num_streamed_chunks
        course = self._courses.get(engine)
        if window != "auto":
            allowed = int(window) // slot
        elif course is None:
            allowed = self._room.get(engine, 0)
        else:
            growth = course.after_gradient(self._cue) if course.is_over else None
            allowed = 0 if growth is None else self._fitting(engine, growth)
        return max(0, min(allowed, engine.arenas.num_streamed_chunks))

    def _fitting(self, engine: Engine, growth: int) -> int:
        """Window slots that fit under the limit if the process takes `growth` more; one slot's room stays free."""
        pipeline = engine.transport.pipeline
        allocated = engine.transport.lanes.allocated_bytes() or 0
        free = self._limit[engine] - allocated - pipeline.missing_bytes - growth
        return pipeline.window_slots + free // _slot_bytes(engine) - 1

    def in_backward(self, cue: int, engines: Sequence[Engine]) -> None:
        """The `cue`-th gradient is ready: widen by what fits, or in proportion."""
        self._cue = cue
        for engine in engines if self._config.window else ():
            if (course := self._courses.get(engine)) is not None:
                course.note(cue)
                engine.transport.widen(self.slots(engine))
            elif self._cues_in_backward:
                share = min(1.0, cue / self._cues_in_backward)
                engine.transport.widen(int(share * self.slots(engine)))

    def in_forward(self, module: str, engines: Sequence[Engine]) -> None:
        """A module runs: with `"all"` and `"auto"`, state leaves in proportion."""
        if self._config.window not in ("all", "auto") or (
            self._config.window == "auto" and running_backward() is not None  # a checkpoint, not the next forward
        ):
            return
        is_first = module not in self._modules
        self._modules.add(module)
        share = len(self._modules) / max(self._modules_in_forward, len(self._modules))
        for engine in engines:
            if self._config.window == "auto":
                self._give_back(engine, module, share if is_first else 0.0)
            elif is_first:
                engine.transport.pipeline.narrow(int((1.0 - share) * self.slots(engine)))

    def _give_back(self, engine: Engine, module: str, share: float) -> None:
        """`module` is about to run, after `share` of the modules: have room for it."""
        course, pipeline = self._courses.get(engine), engine.transport.pipeline
        if course is None:
            return
        course.note(module)
        if not course.is_over or not pipeline.window_slots:
            return
        kept, widest = self._room[engine], self._widest.get(engine, 0)
        most = kept + int(max(0.0, 1.0 - share / _BACK_BY) * max(0, widest - kept)) if share else pipeline.window_slots
        most = max(0, min(most, self._fitting(engine, course.after_module(module)) + 1))
        pipeline.narrow(most)
        if pipeline.window_slots > most and pipeline.staged:  # for a step that was not made
            pipeline.discard_staged()
            pipeline.narrow(most)

    def begin_iteration(self) -> None:
        """What follows is a new forward and backward, even if the last one had no step."""
        self._cue = 0
        self._modules.clear()

    def end_step(self, cues: int, engines: Sequence[Engine], *, off: bool) -> None:
        """A step was made, after a backward with `cues` gradients. `off`: there will be no more cues."""
        self._steps += 1
        if self._config.window == "auto" and not off:
            for engine in engines:
                if engine.transport.lanes.allocated_bytes() is not None:
                    self._learn(engine, cues)
                elif self._steps >= _PLAIN_STEPS:
                    self._fit(engine)
        for engine in engines:
            self._widest[engine] = engine.transport.pipeline.window_slots
            if off or (self._config.window == "all" and not self._modules):  # no forward will give it back
                engine.transport.pipeline.narrow(0)
            elif engine in self._courses and not self._modules:
                engine.transport.pipeline.narrow(self._room.get(engine, 0))
        self._cues_in_backward, self._cue = cues, 0
        self._modules_in_forward = len(self._modules)
        self._modules.clear()

    # `"auto"`

    def _learn(self, engine: Engine, cues: int) -> None:
        """Watch one iteration without a window, then look whether the others are as it was."""
        course = self._courses.get(engine)
        if not engine.transport.pipeline.slot_bytes or self._steps < _PLAIN_STEPS - 1:
            return
        if course is None or (course.is_over and course.num_gradients != cues == self._cues_in_backward):
            engine.transport.pipeline.narrow(0)
            self._courses[engine] = Course(engine)
        elif not course.is_over:
            course.end()
            self._open(engine, course)
        else:
            self._follow_peak(engine)

    def _open(self, engine: Engine, course: Course) -> None:
        """From now on there is a window under the limit."""
        limit, slot = int(self._config.device_peak or course.peak), _slot_bytes(engine)
        self._limit[engine], self._room[engine] = limit, max(0, limit - course.peak) // slot
        self._peak[engine] = 0
        ring = engine.transport.pipeline.num_slots * slot
        most = max(0, (limit - course.after_last - ring) // slot - 1, self._room[engine])
        most = min(most, engine.arenas.num_streamed_chunks)
        self._tell(engine, f"up to {format_size(most * slot)} at the end of backward, with a limit", limit, most)

    def _fit(self, engine: Engine) -> None:
        """The window that keeps the process's peak under `device_peak`: what is left above the peak without it."""
        peak, slot = engine.transport.lanes.peak_bytes(), engine.transport.pipeline.slot_bytes
        if not slot:
            return
        if engine not in self._room:
            limit = self._limit[engine] = int(self._config.device_peak or peak)
            room = self._room[engine] = max(0, limit - peak) // slot
            self._tell(engine, f"{format_size(room * slot)} above a peak of {format_size(peak)}", limit, room)
            self._peak[engine] = peak
        else:
            self._follow_peak(engine)

    def _tell(self, engine: Engine, what: str, limit: int, slots: int) -> None:
        whose = "device_peak" if self._config.device_peak is not None else "the peak of the first steps"
        text = f"window='auto': {what} on {engine.device}, with {whose} of {format_size(limit)} as the limit"
        if not slots:
            text += ": no chunk fits. Raise device_peak by at least one slot, or lower the batch"
            self.fallbacks.append(text)
        logger.log(logging.INFO if slots else logging.WARNING, text)

    def _follow_peak(self, engine: Engine) -> None:
        """Where activations have grown, the window shrinks by as much."""
        peak, limit = engine.transport.lanes.peak_bytes(), int(self._config.device_peak or self._limit[engine])
        above = peak - max(limit, self._peak[engine])
        if above > 0:
            self._limit[engine] -= above
            self._room[engine] = max(0, self._room[engine] - -(-above // _slot_bytes(engine)))
            engine.transport.pipeline.narrow(self._room[engine])
        self._peak[engine] = peak


def _slot_bytes(engine: Engine) -> int:
    pipeline = engine.transport.pipeline
    return pipeline.slot_bytes + pipeline.gradient_bytes
