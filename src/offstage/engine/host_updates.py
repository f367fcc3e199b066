# SPDX-License-Identifier: Apache-2.0
"""Gradients down → update on the host → weights up, over a ring of staging buffers in host memory.

For state that lives and is updated on the host: gradients and weights of a chunk come down, threads of the CPU update
the state where it is, and the new weights go up. The weights come down although the host has their masters: a weight
that was written from outside in between must win, and nothing is kept twice. Where weights and gradients live on the
host, too, the threads update them there (`update_in_place`), without staging buffers.

Who touches what, and which mark separates them:

| buffer | written by | read by | separated by |
|---|---|---|---|
| staging buffer | down, threads | threads, up | `down`, `updated`; the next copy down waits for `slot.free` |
| host weight | host threads | the fetch of its layer, host threads | `layer.read` before, `layer.updated` after |
| factor on the host | down | host threads | `arrived`; each step has its own |
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
from offstage.engine.gradients import HostGradient
from offstage.lanes.lanes import Lane, Lanes, Mark
from offstage.memory.arena import Arena, round_up
from offstage.planning.plan import HOST_SLOTS
from offstage.rules.rule import HostedLayer, ParamUpdate, PieceUpdate, Rule

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(device, host) tensors to copy between."""


@dataclass(eq=False)
class _HostSlot:
    """A staging buffer on the host and the mark after which it may be written again."""

    buffer: Arena
    free: Mark


@dataclass(eq=False)
class _Factor:
    """A number by which gradients on the host are still to be multiplied."""

    of: torch.Tensor
    dtype: torch.dtype
    """Of the gradients."""
    on_device: torch.Tensor
    on_host: torch.Tensor
    arrived: Mark


class HostUpdates:
    """One device's updates by the CPU: through staging buffers, or in place."""

    def __init__(self, lanes: Lanes, rule: Rule, device: torch.device, *, pin: bool) -> None:
        self.bytes_down = 0
        self.bytes_up = 0
        self._lanes, self._rule, self._device, self._pin = lanes, rule, device, pin
        self._slots: deque[_HostSlot] = deque()
        self._factors: list[_Factor] = []
        """What clipping has found in this step, each behind the one before."""
        self._last: dict[HostedLayer, Mark] = {}
        """Behind each, the updates in place of a layer in this step."""
        self._looked: Mark = None
        """Behind it the rule has looked at all weights in place that this step updates so far."""
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

    def begin_step(self) -> None:
        """The caller's stream waits for all of the step before; updates in place are of one step as a whole."""
        self._factors.clear()
        self._last.clear()
        self._looked = None

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

    def update_in_place(self, chunk: StateChunk, pieces: Sequence[tuple[StatePiece, ParamUpdate]], begun: Mark) -> Mark:
        """The same where weights and gradients live on the host, too: only what the rule itself keeps goes up.

        All of `pieces` are of one layer. What follows of it comes behind the mark that this returns.
        """
        hosted = pieces[0][1].of.hosted
        assert hosted is not None
        layer = hosted.layer
        layer.drop()  # what is on the device is old from now on
        looked = self._look(pieces, begun)
        factors = [self._factor_of(update.left) for _, update in pieces]
        updates = [
            _in_place(chunk, piece, update, None if factor is None else factor.on_host)
            for (piece, update), factor in zip(pieces, factors, strict=True)
        ]
        gradients = [update.left for _, update in pieces]
        clips = any(factor is not None for factor in factors)
        updated = self._lanes.submit_on_host(
            self._rule.slices(updates),
            after={
                "host: the weights were looked at": looked,
                "host: the gradients have left": max(gradients, key=lambda one: one.order).stored,
                "host: what clipping found has come down": self._factors[-1].arrived if clips else None,
                "host: no copy reads the weights": layer.read,
                "host: the snapshot has its copy": chunk.home.preserve(chunk, chunk.home.arenas, self._lanes),
            },
            reads=[*(piece.grad for piece in updates), *(piece.scale for piece in updates if piece.scale is not None)],
            writes=[tensor for piece in updates for tensor in (piece.weight, *piece.state.values())],
        )
        behind = self._lanes.submit(
            Lane.WEIGHTS_UP,
            functools.partial(self._send_up, (), updates),
            after={
                "raise: the weights are updated": updated,
                "raise: so is what came before of its layer": layer.updated,
            },
        )
        layer.was_updated(behind)
        self._last[layer] = behind
        for gradient in gradients:
            gradient.read = behind
        return behind

    def finish_in_place(self) -> None:
        """Other code is about to use gradients that updates in place read: these come first."""
        for mark in self._last.values():
            self._lanes.wait_on_host(mark, "gradient: the CPU has used it")
        self._last.clear()

    def _look(self, pieces: Sequence[tuple[StatePiece, ParamUpdate]], begun: Mark) -> Mark:
        """The mark behind which the step has begun, and the rule has looked at all weights of `pieces`, each once."""
        new = [update for piece, update in pieces if piece.start == 0]
        if slices := self._rule.looks(new):
            self._looked = self._lanes.submit_on_host(
                slices,
                after={
                    "look: the step has begun": begun,
                    "look: so were those before": self._looked,
                },
                reads=[update.weight for update in new],
            )
        return begun if self._looked is None else self._looked

    def _factor_of(self, gradient: HostGradient) -> _Factor | None:
        """What clipping has found for `gradient`, on its way to the host: once in a step."""
        if len(gradient.scales) > 1:  # each is rounded by itself
            gradient.on_device()
            gradient.leave_again()
        if not gradient.scales:
            return None
        (factor,) = gradient.scales
        known = next((one for one in self._factors if one.of is factor and one.dtype is gradient.dtype), None)
        if known is None:
            known = self._lower(factor, gradient.dtype)
            self._factors.append(known)
        return known

    def _lower(self, factor: torch.Tensor, dtype: torch.dtype) -> _Factor:
        on_device = factor.to(self._device)
        if self._device.type != "cpu":
            on_device = on_device.to(dtype)  # as kernels of the device take a number of another format
        self._lanes.touch(writes=[on_device])
        pin = self._pin and self._device.type != "cpu"
        on_host = torch.empty(on_device.shape, dtype=on_device.dtype, device="cpu", pin_memory=pin)
        arrived = self._lanes.submit(
            Lane.GRADIENTS_DOWN,
            functools.partial(_send_down, [(on_device, on_host)]),
            after={
                "lower: clipping has found it": self._lanes.mark(),
                "lower: so has what it found before": self._factors[-1].arrived if self._factors else None,
            },
            reads=[on_device],
            writes=[on_host],
        )
        return _Factor(factor, dtype, on_device, on_host, arrived)

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
        self._last.clear()

    def close(self, reason: str) -> None:
        """Give the staging buffers back."""
        self._lanes.synchronize(reason)
        while self._slots:
            self._slots.pop().buffer.close()


def _in_place(chunk: StateChunk, piece: StatePiece, update: ParamUpdate, scale: torch.Tensor | None) -> PieceUpdate:
    """The update of a piece whose weight and gradient live on the host."""
    copies = (update.weight[piece.start : piece.stop], update.left.flat[piece.start : piece.stop])
    return PieceUpdate(update, piece.start, piece.stop, _state_of(chunk, piece), host_copies=copies, scale=scale)


def _state_of(chunk: StateChunk, piece: StatePiece) -> dict[str, torch.Tensor]:
    return {key: arena.flat[slice(*piece.ranges[key])] for key, arena in chunk.home.arenas.items()}


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
        copies = (staged[0], staged[1])
        updates.append(PieceUpdate(update, piece.start, piece.stop, _state_of(chunk, piece), host_copies=copies))
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
