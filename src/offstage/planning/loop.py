# SPDX-License-Identifier: Apache-2.0
"""`Loop`: what was measured of a training loop: its layers' times and bytes, micro-batches, what it clips and reads.

Plain data: a plan that was made from it can be made again. Times are of one micro-batch on the device, without waiting
for copies. docs/internals/fit.md says how each is measured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from offstage.planning.choices import Choice


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """One layer in one micro-batch."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    """Without a second forward."""
    again_ms: float | None = None
    """How long the second forward takes if it is recomputed: not all of it is needed. `None`: as long as the first."""
    saved_bytes: int = 0
    """What it saves for backward if it keeps everything."""
    input_bytes: int = 0
    """What it saves if it is recomputed."""
    working_bytes: int = 0
    """The most that its backward takes beyond everything that is counted elsewhere."""
    remaking_bytes: int = 0
    """What its backward takes besides, if it is recomputed."""
    can_recompute: bool = True

    @property
    def recompute_ms(self) -> float:
        return self.forward_ms if self.again_ms is None else self.again_ms

    def kept_bytes(self, choice: Choice) -> int:
        """What of it is on the device until its backward."""
        return self.saved_bytes if choice in (Choice.KEEP, Choice.REMAKE) else 0

    def moved_bytes(self, choice: Choice) -> int:
        """What it sends to the host, and sends for again."""
        if choice is Choice.OFFLOAD:
            return self.saved_bytes
        return self.input_bytes if choice is Choice.RECOMPUTE else 0


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One iteration of a training loop."""

    layers: tuple[LayerLoad, ...] = ()
    front_ms: float = 0.0
    """Forward before the first layer."""
    turn_ms: float = 0.0
    """From the end of the last layer's forward to the beginning of its backward: the head and the loss, both ways."""
    end_ms: float = 0.0
    """From the end of the first layer's backward to the end of backward."""
    turn_bytes: int = 0
    """The most that the turn takes beyond everything that is counted elsewhere: logits."""
    base_bytes: int = 0
    """On the device all the time, and neither weights, gradients, state nor saved by layers: buffers, the batch."""
    micro_batches: int = 1
    clips: bool = False
    """`optimizer.clip_grad_norm_` clips the gradients."""
    reads_gradients: bool = False
    """Other code uses the gradients between backward and `step()`."""
    input_elements: int = 0
    """Elements of a micro-batch, for which all this was measured; 0 if it is not known."""

    @property
    def forward_ms(self) -> float:
        """Of one micro-batch, without the head."""
        return self.front_ms + sum(layer.forward_ms for layer in self.layers)

    @property
    def backward_ms(self) -> float:
        """Of one micro-batch, without the head, if nothing is recomputed."""
        return self.end_ms + sum(layer.backward_ms for layer in self.layers)

    @property
    def compute_ms(self) -> float:
        """All micro-batches, if nothing is recomputed and nothing waits."""
        return self.micro_batches * (self.forward_ms + self.turn_ms + self.backward_ms)

    def scaled(self, ratio: float) -> Loop:
        """The same loop with `ratio` times as many elements in a micro-batch: all that grows with them does."""
        if ratio == 1.0:
            return self
        layers = tuple(
            dataclasses.replace(
                layer,
                forward_ms=ratio * layer.forward_ms,
                backward_ms=ratio * layer.backward_ms,
                again_ms=None if layer.again_ms is None else ratio * layer.again_ms,
                saved_bytes=int(ratio * layer.saved_bytes),
                input_bytes=int(ratio * layer.input_bytes),
                working_bytes=int(ratio * layer.working_bytes),
                remaking_bytes=int(ratio * layer.remaking_bytes),
            )
            for layer in self.layers
        )
        return dataclasses.replace(
            self,
            layers=layers,
            front_ms=ratio * self.front_ms,
            turn_ms=ratio * self.turn_ms,
            end_ms=ratio * self.end_ms,
            turn_bytes=int(ratio * self.turn_bytes),
            input_elements=int(ratio * self.input_elements),
        )
