# SPDX-License-Identifier: Apache-2.0
"""`Window`: how many slots beyond the ring's own there may be, and when.

A window of a given size, or of the size that `device_peak` leaves, is allocated step by step during backward, in
proportion to how far backward has come and so has freed activations, and then kept. `"all"` is given back the same way
during the next forward, behind the stores.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from offstage.config import OffloadConfig, format_size
from offstage.engine.engine import Engine

logger = logging.getLogger("offstage")

_PLAIN_STEPS = 2
"""`window="auto"`: steps whose peak is looked at before the window opens. The first one has no slots yet."""


class Window:
    """The window of one optimizer, over all its devices."""

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self._steps = 0
        self._cues_in_backward = 0
        self._modules: set[str] = set()
        self._modules_in_forward = 0
        self._room: dict[Engine, int] = {}
        """`"auto"`: slots that fit under `device_peak`."""
        self._peak: dict[Engine, int] = {}
        self.fallbacks: list[str] = []
        """What is not as it was asked for."""

    def slots(self, engine: Engine) -> int:
        """The largest number of window slots."""
        window, slot = self._config.window, engine.transport.pipeline.slot_bytes
        if not window or not slot:
            return 0
        if window == "all":
            return engine.arenas.num_streamed_chunks
        allowed = self._room.get(engine, 0) if window == "auto" else int(window) // slot
        return min(allowed, engine.arenas.num_streamed_chunks)

    def _fit(self, engine: Engine) -> None:
        """The window that keeps the process's peak under `device_peak`: what is left above the peak without it."""
        budget, peak, slot = (
            int(self._config.device_peak or 0),
            engine.transport.lanes.peak_bytes(),
            engine.transport.pipeline.slot_bytes,
        )
        if not slot:
            return
        if engine not in self._room:
            self._room[engine] = max(0, budget - peak) // slot
            text = (
                f"window='auto': {format_size(self._room[engine] * slot)} on {engine.device}, what device_peak="
                f"{format_size(budget)} leaves above a peak of {format_size(peak)}"
            )
            if not self._room[engine]:
                text += ": no chunk fits. Raise device_peak by at least one slot, or lower the batch"
                self.fallbacks.append(text)
            logger.log(logging.INFO if self._room[engine] else logging.WARNING, text)
        elif peak > max(budget, self._peak[engine]):  # activations have grown
            self._room[engine] = max(0, self._room[engine] - -(-(peak - budget) // slot))
            engine.transport.pipeline.narrow(self._room[engine])
        self._peak[engine] = peak

    def in_backward(self, cue: int, engines: Sequence[Engine]) -> None:
        """The `cue`-th gradient is ready: widen in proportion."""
        if self._config.window and self._cues_in_backward:
            share = min(1.0, cue / self._cues_in_backward)
            for engine in engines:
                engine.transport.widen(int(share * self.slots(engine)))

    def in_forward(self, module: str, engines: Sequence[Engine]) -> None:
        """A module runs: with `"all"`, state leaves in proportion."""
        if self._config.window == "all" and module not in self._modules:
            self._modules.add(module)
            share = len(self._modules) / max(self._modules_in_forward, len(self._modules))
            for engine in engines:
                engine.transport.pipeline.narrow(int((1.0 - share) * self.slots(engine)))

    def end_step(self, cues: int, engines: Sequence[Engine], *, off: bool) -> None:
        """A step was made, after a backward with `cues` gradients. `off`: there will be no more cues."""
        self._steps += 1
        if self._config.window == "auto" and self._steps >= _PLAIN_STEPS and not off:
            for engine in engines:
                self._fit(engine)
        if off or (self._config.window == "all" and not self._modules):  # no forward will give it back
            for engine in engines:
                engine.transport.pipeline.narrow(0)
        self._cues_in_backward = cues
        self._modules_in_forward = len(self._modules)
        self._modules.clear()
