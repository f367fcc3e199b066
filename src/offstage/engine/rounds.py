# SPDX-License-Identifier: Apache-2.0
"""What one step has got so far on one device, and what is left of it to wait for. Kept by `engine.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offstage.engine.param_state import HeldState
from offstage.lanes.lanes import Mark, Place
from offstage.planning.layout import Chunk, Piece
from offstage.rules.rule import Turn


@dataclass(eq=False)
class Pending:
    """A parameter whose updates have all been given to the lanes and which the caller's stream has not waited for."""

    turn: Turn
    updated: Mark
    """Its last update on the device."""
    order: int
    """These follow each other on one lane, which stays failed once one has failed: whoever has waited for a larger
    number has waited for this one."""
    raised: list[Mark]
    """Updated on the host: when each of its pieces is on the device again. Nothing orders these."""
    place: Place
    """The stream in whose order the gradient's memory goes back."""
    lent: torch.Tensor | None
    """Device memory that holds the weights before, if they were kept there."""


@dataclass(eq=False)
class Round:
    """What one step has got so far."""

    to_spare: bool
    """Speculative: state goes to the spare arenas and old weights are kept."""
    ready: dict[HeldState, Turn] = field(default_factory=dict)
    """Taken and not settled yet."""
    left: dict[HeldState, int] = field(default_factory=dict)
    """Chunks that have still to be updated."""
    raised: dict[HeldState, list[Mark]] = field(default_factory=dict)
    """Updated on the host: its pieces so far."""
    done: set[tuple[Chunk, Piece]] = field(default_factory=set)
    """Pieces that have been updated."""
    carried: set[tuple[Chunk, Piece]] = field(default_factory=set)
    """Speculative: pieces that have only been moved to the spare set, with the others of their chunk."""
    travelling: bool = False
    """A trip has begun and is not given to the lanes as a whole: still so after a failure in the middle of one."""
    places: dict[HeldState, Place] = field(default_factory=dict)
    kept: dict[HeldState, torch.Tensor] = field(default_factory=dict)
    """Speculative: the weights before."""
    lent: dict[HeldState, torch.Tensor] = field(default_factory=dict)
    """Those of them that are in device memory of the lanes."""

    def forget(self, held: HeldState) -> None:
        """It was not taken after all."""
        for taken in (self.ready, self.left, self.raised, self.places, self.kept, self.lent):
            taken.pop(held, None)  # type: ignore[attr-defined]
