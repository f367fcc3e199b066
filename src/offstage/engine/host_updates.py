# SPDX-License-Identifier: Apache-2.0
"""Gradients down → update on the host → weights up, over a ring of staging buffers in host memory.

For state that lives and is updated on the host: gradients and weights of a chunk come down, threads of the CPU update
the state where it is, and the new weights go up. The weights come down although the host has their masters: a weight
that was written from outside in between must win, and nothing is kept twice.

Who touches what, and which mark separates them:

| buffer | written by | read by | separated by |
|---|---|---|---|
| staging buffer | down, threads | threads, up | `down`, `updated`; the next copy down waits for `slot.free` |
| arena range | host threads | host threads | the caller waits for `up` before the next step's gradients are taken |
| weight | up | down, the caller | a mark when its gradient is taken, `Pending.up` after (both in `engine.py`) |
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offstage.engine.arenas import StateChunk, StatePiece
from offstage.lanes.lanes import Lane, Lanes, Mark
from offstage.memory.arena import Arena, round_up
from offstage.planning.plan import HOST_SLOTS
from offstage.rules.rule import ParamUpdate, PieceUpdate, Rule

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(device, host) tensors to copy between."""


@dataclass(eq=False)
class _HostSlot:
    """A staging buffer on the host and the mark after which it may be written again."""

    buffer: Arena
    free: Mark


class HostUpdates:
    """One device's staging buffers on the host."""

    def __init__(self, lanes: Lanes, rule: Rule, device: torch.device, *, pin: bool) -> None:
        self.bytes_down = 0
        self.bytes_up = 0
        self._lanes, self._rule, self._device, self._pin = lanes, rule, device, pin
        self._slots: deque[_HostSlot] = deque()
        self._counting = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self._slots)

    def prepare(self, slot_bytes: int) -> None:
        """Staging buffers of at least `slot_bytes`: before anything moves, so that running out of memory loses nothing.

        Larger ones take the place of those there are, after all that is under way.
        """
        if not slot_bytes or (self._slots and self._slots[0].buffer.nbytes >= slot_bytes):
            return
        self.close("place: the staging buffers are not in use")
        for _ in range(HOST_SLOTS):
            self._slots.append(_HostSlot(Arena(slot_bytes, torch.uint8, self._device, pin=self._pin), free=None))

    def send(self, chunk: StateChunk, pieces: Sequence[tuple[StatePiece, ParamUpdate]], begun: Mark) -> Mark:
        """Send `pieces` of `chunk` on their trip. Returns the mark after which their weights are up again."""
        self.prepare(_staged_bytes(pieces))  # gradients may be wider than their weights
        slot = self._slots[0]
        self._slots.rotate(-1)
        updates = _stage(chunk, pieces, slot.buffer.flat)
        down, up = _copies(updates)
        came_down = self._lanes.submit(
            Lane.GRADIENTS_DOWN,
            functools.partial(_send_down, down),
            after={"lower: the gradients are ready": begun, "lower: the staging buffer is free": slot.free},
            reads=[device for device, _ in down],
            writes=[staged for _, staged in down],
        )
        updated = self._lanes.submit_on_host(
            self._rule.slices(updates),
            after={
                "host: weights and gradients have come down": came_down,
                "host: the snapshot has its copy": chunk.home.preserve(chunk, chunk.home.arenas, self._lanes),
            },
            reads=[piece.grad for piece in updates],
            writes=[tensor for piece in updates for tensor in (piece.weight, *piece.state.values())],
        )
        slot.free = self._lanes.submit(
            Lane.WEIGHTS_UP,
            functools.partial(self._send_up, up, updates),
            after={"raise: the weights are updated": updated},
            reads=[staged for _, staged in up],
            writes=[device for device, _ in up],
        )
        self.bytes_down += sum(staged.nbytes for _, staged in down)
        self.bytes_up += sum(staged.nbytes for _, staged in up)
        return slot.free

    def _send_up(self, copies: Copies, pieces: Sequence[PieceUpdate]) -> None:
        for tensor, staged in copies:
            tensor.copy_(staged, non_blocking=True)
        for piece in pieces:
            with self._counting:  # pieces of one parameter may be sent up by several threads
                piece.update.updated += piece.stop - piece.start
                complete = piece.update.updated == piece.update.weight.numel()
            if complete:
                self._rule.weights_up(self._device, piece.update)

    def forget(self) -> None:
        """Nothing is under way: the lanes have been drained."""
        for slot in self._slots:
            slot.free = None

    def close(self, reason: str) -> None:
        """Give the staging buffers back."""
        self._lanes.synchronize(reason)
        while self._slots:
            self._slots.pop().buffer.close()


def _staged_bytes(pieces: Sequence[tuple[StatePiece, ParamUpdate]]) -> int:
    return sum(
        round_up((piece.stop - piece.start) * tensor.itemsize)
        for piece, update in pieces
        for tensor in (update.weight, update.grad)
    )


def _stage(
    chunk: StateChunk, pieces: Sequence[tuple[StatePiece, ParamUpdate]], buffer: torch.Tensor
) -> list[PieceUpdate]:
    """The pieces' updates, with room for weights and gradients in `buffer`."""
    updates, offset = [], 0
    for piece, update in pieces:
        staged = []
        for tensor in (update.weight, update.grad):
            nbytes = (piece.stop - piece.start) * tensor.itemsize
            staged.append(buffer[offset : offset + nbytes].view(tensor.dtype))
            offset += round_up(nbytes)
        state = {key: arena.flat[slice(*piece.ranges[key])] for key, arena in chunk.home.arenas.items()}
        updates.append(PieceUpdate(update, piece.start, piece.stop, state, host_copies=(staged[0], staged[1])))
    return updates


def _copies(pieces: Sequence[PieceUpdate]) -> tuple[Copies, Copies]:
    """What comes down, and what goes up."""
    down, up = [], []
    for piece in pieces:
        part = slice(piece.start, piece.stop)
        weight = (piece.update.weight[part], piece.weight)
        down += [weight, (piece.update.grad[part], piece.grad)]
        up.append(weight)
    return down, up


def _send_down(copies: Copies) -> None:
    for device, staged in copies:
        staged.copy_(device, non_blocking=True)
