# SPDX-License-Identifier: Apache-2.0
"""`Arenas`: what one device's parameters have on the host.

`HostState` is one set of arenas, with a layout and the chunks that cover it; a chunk knows its parameters and the mark
after which the arenas hold its newest state. Speculative updates add a second set, and the old weights that are kept
here and not on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offstage.config import OffloadConfig, Placement
from offstage.engine.snapshot import Snapshot
from offstage.lanes.lanes import Lanes, Mark
from offstage.memory.arena import Arena, round_up
from offstage.planning.layout import Layout, make_layout
from offstage.planning.plan import Plan
from offstage.rules.rule import ParamState, Rule

Ranges = Mapping[str, tuple[int, int]]
"""Per key, elements `[start, stop)` of its arena."""


@dataclass(frozen=True, eq=False)
class StatePiece:
    """Elements `[start, stop)` of one parameter, and where their state lies in the arenas."""

    owner: ParamState
    index: int
    """The parameter's position in the arenas."""
    start: int
    stop: int
    ranges: Ranges


@dataclass(eq=False)
class StateChunk:
    """Pieces that are fetched, updated and stored together: one range in each arena."""

    home: HostState
    number: int
    pieces: tuple[StatePiece, ...]
    ranges: Ranges
    stored: Mark = None
    """Behind it the arenas hold the newest state."""

    @property
    def is_in_place(self) -> bool:
        """Whether the CPU updates it and its weights and gradients are on the host, too: all of them, or none."""
        return self.home.on_host and self.pieces[0].owner.hosted is not None


@dataclass(eq=False)
class HostState:
    """The arenas of one layout, and their chunks."""

    layout: Layout
    arenas: dict[str, Arena]
    members: Sequence[ParamState]
    on_host: bool = False
    """The CPU updates it where it is."""
    spare: dict[str, Arena] = field(default_factory=dict)
    """A second set, where speculative updates go."""
    snapshot: Snapshot | None = None
    """A writer saves the state of a moment to disk."""
    chunks: list[StateChunk] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = []
        for chunk in self.layout.chunks:
            pieces = tuple(
                StatePiece(
                    self.members[piece.index],
                    piece.index,
                    piece.start,
                    piece.stop,
                    {key: self.layout.range_of(piece, key) for key in self.arenas},
                )
                for piece in chunk.pieces
            )
            self.chunks.append(StateChunk(self, chunk.number, pieces, chunk.ranges))
        for index, state in enumerate(self.members):
            state.home, state.index = self, index

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in (*self.arenas.values(), *self.spare.values()))

    def tensor(self, index: int, key: str) -> torch.Tensor:
        """The flat tensor of `key` of the parameter at position `index`, in a storage of its own size."""
        return self.arenas[key].tensor(self.layout.offsets[index][key], self.layout.extents[index][key])

    def preserve(self, chunk: StateChunk, arenas: Mapping[str, Arena], lanes: Lanes) -> Mark | None:
        """Before `chunk` of `arenas` is overwritten: the mark after which a snapshot has no need of it."""
        if self.snapshot is None or self.snapshot.arenas is not arenas:
            return None
        return self.snapshot.preserve(chunk.number, lanes)

    def flip(self) -> None:
        """Every chunk has been stored to the spare set: it is the state from now on."""
        self.arenas, self.spare = self.spare, self.arenas

    def dissolve(self) -> None:
        """Let go of chunks and parameters, which know this object: without the cycle, memory goes back at once."""
        self.chunks, self.members = [], ()


class Arenas:
    """The arenas of one device."""

    def __init__(self, device: torch.device, rule: Rule, config: OffloadConfig) -> None:
        self.sets: list[HostState] = []
        self.chunks: list[StateChunk] = []
        """All of them, in the order in which forward needs them."""
        self.chunks_of: dict[ParamState, list[StateChunk]] = {}
        """In the order of the layout, which is that of forward."""
        self.staging_bytes = 0
        """What a staging buffer needs for any chunk that is updated on the host."""
        self.old_weights: dict[ParamState, Arena] = {}
        """Where speculative updates keep the weights before."""
        self._position: dict[ParamState, int] = {}
        self._device, self._rule, self._config = device, rule, config

    def add(self, states: Sequence[ParamState], plan: Plan) -> None:
        """Give parameters that are not resident their arenas, and chunks of the plan's size."""
        kinds: dict[tuple[Any, ...], list[ParamState]] = {}
        for state in states:
            self._position[state] = len(self._position)
            if state.placement is not Placement.RESIDENT:
                keys = ((key.name, key.dtype) for key in state.keys)
                kinds.setdefault((state.placement, state.hosted is not None, *keys), []).append(state)
        self.sets += [self._make(members, plan) for members in kinds.values()]
        self._order()

    def _make(self, members: Sequence[ParamState], plan: Plan) -> HostState:
        keys = members[0].keys
        on_host = members[0].placement is Placement.HOST
        layout = make_layout(
            [{key.name: key.numel(state.local) for key in state.keys} for state in members],
            {key.name: key.dtype.itemsize for key in keys},
            [state.local.numel() for state in members],
            chunk_bytes=plan.host_chunk_bytes if on_host else plan.chunk_bytes,
            split=self._rule.splits(torch.device("cpu") if on_host else self._device),
            firsts=_first_of_layers(members),
        )
        # What the CPU updates never travels, so the accelerator need not know its memory.
        arenas = self._arenas(layout, {key.name: key.dtype for key in keys}, pin=not on_host)
        return HostState(layout, arenas, members, on_host=on_host)

    def _arenas(self, layout: Layout, dtypes: dict[str, torch.dtype], *, pin: bool = True) -> dict[str, Arena]:
        return {key: self._arena(layout.arena_numel[key], dtype, pin=pin) for key, dtype in dtypes.items()}

    def _arena(self, numel: int, dtype: torch.dtype, *, pin: bool = True) -> Arena:
        return Arena(numel, dtype, self._device, pin=pin and self._config.pin_memory)

    def follow(self, config: OffloadConfig) -> None:
        """Other settings, with which everything stays where it is."""
        self._config = config

    def drop_unused(self, live: Iterable[ParamState]) -> None:
        """Close arenas none of whose parameters are kept there any more. The lanes have been drained."""
        alive = set(live)
        for unused in [host for host in self.sets if alive.isdisjoint(host.members)]:
            _close([*unused.arenas.values(), *unused.spare.values()])
            unused.dissolve()
            self.sets.remove(unused)
        _close([self.old_weights.pop(state) for state in self.old_weights.keys() - alive])
        self._position = {state: position for state, position in self._position.items() if state in alive}
        self._order()

    def _order(self) -> None:
        """Chunks in the order in which forward needs them, whether host or device updates them."""
        last = len(self._position)
        chunks = [chunk for host in self.sets for chunk in host.chunks]
        self.chunks = sorted(chunks, key=lambda chunk: self._position.get(chunk.pieces[0].owner, last))
        self.chunks_of = {}
        for chunk in self.chunks:
            for piece in chunk.pieces:
                if piece.owner in self._position:
                    self.chunks_of.setdefault(piece.owner, []).append(chunk)
        staged = [chunk for chunk in self.chunks if chunk.home.on_host and not chunk.is_in_place]
        self.staging_bytes = max(map(staging_bytes_of, staged), default=0)

    @property
    def hosted(self) -> list[ParamState]:
        """Those whose weights live on the host, too."""
        return [state for state in self._position if state.hosted is not None]

    @property
    def num_streamed_chunks(self) -> int:
        return sum(not chunk.home.on_host for chunk in self.chunks)

    def chunks_with(self, wanted: Collection[ParamState]) -> Iterator[tuple[StateChunk, list[StatePiece]]]:
        """Streamed chunks that hold state of `wanted`, with those of their pieces."""
        for chunk in self.chunks:
            pieces = [piece for piece in chunk.pieces if piece.owner in wanted]
            if pieces and not chunk.home.on_host:
                yield chunk, pieces

    def offloaded(self, params: Collection[torch.Tensor], placement: Placement) -> list[ParamState]:
        """Those of `params` that are placed so, in the order of forward."""
        return [state for state in self.chunks_of if state.param in params and state.placement is placement]

    @property
    def slot_bytes(self) -> int:
        """The size of a slot that can hold any streamed chunk."""
        return max((host.layout.slot_bytes for host in self.sets if not host.on_host), default=0)

    @property
    def gradient_bytes(self) -> int:
        """Room in a slot for the gradients of any streamed chunk."""
        return max((gradient_bytes_of(chunk) for chunk in self.chunks if not chunk.home.on_host), default=0)

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self.old_weights.values()) + sum(host.nbytes for host in self.sets)

    def forget_stores(self) -> None:
        """After a lost step: the marks behind stores may never come."""
        for chunk in self.chunks:
            chunk.stored = None

    def dissolve(self) -> None:
        """Nothing is under way any more, and this object is dropped."""
        for host in self.sets:
            host.dissolve()

    # Speculative updates

    @property
    def has_spare(self) -> bool:
        return any(host.spare for host in self.sets)

    @property
    def streamed_bytes(self) -> int:
        """What a second set of arenas takes."""
        return sum(host.nbytes for host in self.sets if not host.on_host)

    def add_spare(self) -> None:
        """A second set of arenas. Updates on the host are never speculative."""
        for host in self.sets:
            if not host.spare and not host.on_host:
                host.spare = self._arenas(host.layout, {key: arena.dtype for key, arena in host.arenas.items()})

    def drop_spare(self) -> None:
        """There are no speculative updates any more: what they write, and the weights before, go."""
        for host in self.sets:
            _close(list(host.spare.values()))
            host.spare = {}
        _close(list(self.old_weights.values()))
        self.old_weights.clear()

    def flip(self) -> None:
        """The second set is the state from now on."""
        for host in self.sets:
            if not host.on_host:
                host.flip()

    def keep_old_weights(self, states: Iterable[ParamState]) -> None:
        """Speculative updates of `states` keep the weights before on the host, where they cost no device memory."""
        for state in states:
            self.old_weights[state] = self._arena(state.local.numel(), state.local.dtype)


def gradient_bytes_of(chunk: StateChunk) -> int:
    """What the gradients of `chunk` take in a slot, if they are in their parameters' format."""
    return sum(round_up((piece.stop - piece.start) * piece.owner.local.itemsize) for piece in chunk.pieces)


def _first_of_layers(members: Sequence[ParamState]) -> set[int]:
    """Positions at which another layer begins whose weights live on the host: a chunk is of one layer."""
    layers = [None if state.hosted is None else state.hosted.layer for state in members]
    return {i for i, layer in enumerate(layers) if layer is not None and (i == 0 or layers[i - 1] is not layer)}


def staging_bytes_of(chunk: StateChunk) -> int:
    """What `chunk` takes in a staging buffer, if gradients are in their parameters' format."""
    return sum(2 * round_up((piece.stop - piece.start) * piece.owner.local.itemsize) for piece in chunk.pieces)


def _close(arenas: Sequence[Arena]) -> None:
    for arena in arenas:
        arena.close()
