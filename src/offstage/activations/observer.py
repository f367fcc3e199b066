# SPDX-License-Identifier: Apache-2.0
"""`LayerObserver`: what `ActivationOffload.observer` is told while a model trains.

Its methods run in the thread that runs forward or backward, which waits for them: they must not wait for the device,
nor for another thread. Nothing is told of forwards without gradients, nor of a model that is checkpointed as a whole.
"""

from __future__ import annotations

from typing import Protocol


class LayerObserver(Protocol):
    """`layer` is a layer's place in `ActivationOffload.layers`. `here_bytes`: of all that was told by `saved`, in all
    forwards, what is on the device now.

    Storages of less than `min_bytes` are not counted, nor what is saved outside the layers.
    """

    def begin_forward(self, in_flight: int) -> None:
        """A forward begins. `in_flight`: those that wait for their backward, and this one. What `replan()` is given
        here counts for this forward."""

    def enter(self, layer: int, here_bytes: int) -> None:
        """Its weights have arrived and its forward begins. A layer that is recomputed enters once."""

    def leave(self, layer: int, here_bytes: int) -> None:
        """Its forward has ended, or has raised."""

    def saved(self, layer: int, nbytes: int, *, is_remade: bool) -> None:
        """It has saved one more storage for backward, whatever becomes of it; of a layer that is recomputed these are
        its inputs. `is_remade`: nothing of it moves or stays. Each storage is told once, of the first that saves it."""

    def in_backward(self, layer: int | None, here_bytes: int) -> None:
        """Backward asks for a storage of the layer, or (`None`) for one that was saved outside the layers."""

    def end_forward(self) -> None:
        """The forward that began last in this thread has ended, or has raised."""
