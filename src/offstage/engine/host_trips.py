# SPDX-License-Identifier: Apache-2.0
"""Lower → update on the host → raise, over a ring of staging buffers in host memory. Called by `engine.py`.

The counterpart of `pipeline.py` for state that lives and is updated on the host: gradients and weights of a chunk come
down, threads of the CPU update the state where it is, and the new weights go up. The weights come down although the
host has their masters: whoever has written them in between must be heard, and nothing is kept twice.

Who touches what, and which mark separates them:

| buffer | written by | read by | separated by |
|---|---|---|---|
| staging buffer | lower, threads | threads, raise | `lowered`, `updated`; the next lower waits for `slot.free` |
| arena range | host threads | host threads | the caller waits for `raised` before the next step's gradients are taken |
| weight | raise | lower, the caller | a mark when its gradient is taken, `Pending.raised` after (both in `engine.py`) |
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offstage.engine.pipeline import HostState
from offstage.lanes.lanes import Lane, Lanes, Mark
from offstage.memory.arena import ALIGN_BYTES, Arena
from offstage.planning.layout import Chunk, Piece
from offstage.planning.plan import HOST_SLOTS
from offstage.rules.rule import Rule, Share, Turn

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(device, host) tensors to copy between."""


@dataclass(eq=False)
class _HostSlot:
    """A staging buffer on the host and the mark after which it may be written again."""

    buffer: Arena
    free: Mark


class HostTrips:
    """One device's staging buffers on the host."""

    def __init__(self, lanes: Lanes, rule: Rule, device: torch.device, *, pin: bool) -> None:
        self.bytes_lowered = 0
        self.bytes_raised = 0
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
        if self._slots and self._slots[0].buffer.nbytes >= slot_bytes:
            return
        self.close("place: the staging buffers are not in use")
        for _ in range(HOST_SLOTS):
            self._slots.append(_HostSlot(Arena(slot_bytes, torch.uint8, self._device, pin=self._pin), free=None))

    def send(self, host: HostState, chunk: Chunk, pieces: Sequence[tuple[Piece, Turn]], begun: Mark) -> Mark:
        """Send `pieces` of `chunk` on their trip. Returns the mark after which their weights are up again."""
        self.prepare(_staged_bytes(pieces))  # gradients may be wider than their weights
        slot = self._slots[0]
        self._slots.rotate(-1)
        shares = _stage(host, pieces, slot.buffer.flat)
        down, up = _copies(shares)
        lowered = self._lanes.submit(
            Lane.LOWER,
            functools.partial(_lower, down),
            after={"lower: the gradients are ready": begun, "lower: the staging buffer is free": slot.free},
            reads=[device for device, _ in down],
            writes=[staged for _, staged in down],
        )
        updated = self._lanes.submit_on_host(
            self._rule.slices(shares),
            after={
                "host: weights and gradients have come down": lowered,
                "host: the snapshot has its copy": host.preserve(chunk, host.arenas, self._lanes),
            },
            reads=[share.grad for share in shares],
            writes=[tensor for share in shares for tensor in (share.weight, *share.state.values())],
        )
        slot.free = self._lanes.submit(
            Lane.RAISE,
            functools.partial(self._raise, up, shares),
            after={"raise: the weights are updated": updated},
            reads=[staged for _, staged in up],
            writes=[device for device, _ in up],
        )
        self.bytes_lowered += sum(staged.nbytes for _, staged in down)
        self.bytes_raised += sum(staged.nbytes for _, staged in up)
        return slot.free

    def _raise(self, copies: Copies, shares: Sequence[Share]) -> None:
        for tensor, staged in copies:
            tensor.copy_(staged, non_blocking=True)
        for share in shares:
            with self._counting:  # pieces of one parameter may be raised by several threads
                share.turn.updated += share.stop - share.start
                complete = share.turn.updated == share.turn.weight.numel()
            if complete:
                self._rule.raised(self._device, share.turn)

    def forget(self) -> None:
        """Nothing is under way: the lanes have been drained."""
        for slot in self._slots:
            slot.free = None

    def close(self, reason: str) -> None:
        """Give the staging buffers back."""
        self._lanes.synchronize(reason)
        while self._slots:
            self._slots.pop().buffer.close()


def slot_bytes_of(chunk: Chunk, params: Sequence[torch.Tensor]) -> int:
    """What `chunk`, of these parameters, takes in a staging buffer, if gradients are in their parameters' format."""
    return sum(2 * _aligned((piece.stop - piece.start) * params[piece.index].itemsize) for piece in chunk.pieces)


def _staged_bytes(pieces: Sequence[tuple[Piece, Turn]]) -> int:
    return sum(
        _aligned((piece.stop - piece.start) * tensor.itemsize)
        for piece, turn in pieces
        for tensor in (turn.weight, turn.grad)
    )


def _stage(host: HostState, pieces: Sequence[tuple[Piece, Turn]], buffer: torch.Tensor) -> list[Share]:
    """The pieces' shares, with room for weights and gradients in `buffer`."""
    shares, offset = [], 0
    for piece, turn in pieces:
        lowered = []
        for tensor in (turn.weight, turn.grad):
            nbytes = (piece.stop - piece.start) * tensor.itemsize
            lowered.append(buffer[offset : offset + nbytes].view(tensor.dtype))
            offset += _aligned(nbytes)
        state = {key: arena.flat[slice(*host.layout.range_of(piece, key))] for key, arena in host.arenas.items()}
        shares.append(Share(turn, piece.start, piece.stop, state, lowered=(lowered[0], lowered[1])))
    return shares


def _copies(shares: Sequence[Share]) -> tuple[Copies, Copies]:
    """What comes down, and what goes up."""
    down, up = [], []
    for share in shares:
        part = slice(share.start, share.stop)
        weight = (share.turn.weight[part], share.weight)
        down += [weight, (share.turn.grad[part], share.grad)]
        up.append(weight)
    return down, up


def _lower(copies: Copies) -> None:
    for device, staged in copies:
        staged.copy_(device, non_blocking=True)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
