# SPDX-License-Identifier: Apache-2.0
"""`HostSide`: what one device's parameters have on the host. Owned by `engine.py`.

Arenas with the state of parameters that are not resident and the chunks that cover them; and, for speculative updates,
a second set of arenas and the old weights that are kept here and not on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from offstage.config import OffloadConfig, Placement
from offstage.engine.host_trips import slot_bytes_of
from offstage.engine.param_state import HeldState
from offstage.engine.pipeline import HostState
from offstage.memory.arena import Arena
from offstage.planning.layout import Chunk, Layout, Piece, make_layout
from offstage.planning.plan import HOST_CHUNK
from offstage.rules.rule import Rule

Member = tuple[HostState, list[HeldState], Chunk]
"""A chunk, and whose state it is."""


class HostSide:
    """The arenas of one device."""

    def __init__(self, device: torch.device, rule: Rule, config: OffloadConfig) -> None:
        self.states: list[tuple[HostState, list[HeldState]]] = []
        self.chunks_of: dict[HeldState, list[Member]] = {}
        """In the order of the layout, which is that of forward."""
        self.staging_bytes = 0
        """What a staging buffer needs for any chunk that is updated on the host."""
        self._position: dict[HeldState, int] = {}
        self._chunks: list[Member] = []
        self.kept: dict[HeldState, Arena] = {}
        """Where speculative updates keep the weights before."""
        self._device, self._rule, self._config = device, rule, config

    def add(self, states: Sequence[HeldState]) -> None:
        """Give parameters that are not resident their arenas and chunks."""
        kinds: dict[tuple[Any, ...], list[HeldState]] = {}
        for held in states:
            self._position[held] = len(self._position)
            if held.placement is not Placement.RESIDENT:
                keys = ((key.name, key.dtype) for key in held.keys)
                kinds.setdefault((held.placement, *keys), []).append(held)
        self.states += [(self._make(members), members) for members in kinds.values()]

    def _make(self, members: Sequence[HeldState]) -> HostState:
        keys = members[0].keys
        on_host = members[0].placement is Placement.HOST
        layout = make_layout(
            [{key.name: key.numel(held.local) for key in held.keys} for held in members],
            {key.name: key.dtype.itemsize for key in keys},
            [held.local.numel() for held in members],
            chunk_bytes=int(self._config.chunk_bytes) * (HOST_CHUNK if on_host else 1),
            split=self._rule.splits(torch.device("cpu") if on_host else self._device),
        )
        # What the CPU updates never travels, so the accelerator need not know its memory.
        arenas = self._arenas(layout, {key.name: key.dtype for key in keys}, pin=not on_host)
        host = HostState(layout, arenas, on_host=on_host)
        for index, held in enumerate(members):
            held.host, held.index = host, index
        return host

    def _arenas(self, layout: Layout, dtypes: dict[str, torch.dtype], *, pin: bool = True) -> dict[str, Arena]:
        return {key: self._arena(layout.arena_numel[key], dtype, pin=pin) for key, dtype in dtypes.items()}

    def _arena(self, numel: int, dtype: torch.dtype, *, pin: bool = True) -> Arena:
        return Arena(numel, dtype, self._device, pin=pin and self._config.pin_memory)

    def drop_unused(self, live: Iterable[HeldState]) -> None:
        """Close arenas none of whose parameters are kept there any more. The lanes have been drained."""
        alive = set(live)
        for host, members in self.states:
            if alive.isdisjoint(members):
                _close([*host.arenas.values(), *host.spare.values()])
        self.states = [(host, members) for host, members in self.states if not alive.isdisjoint(members)]
        _close([self.kept.pop(held) for held in self.kept.keys() - alive])
        self._position = {held: position for held, position in self._position.items() if held in alive}
        self._order()

    def _order(self) -> None:
        """Chunks in the order in which forward needs them, whether host or device updates them."""
        members_of = [(host, members, chunk) for host, members in self.states for chunk in host.layout.chunks]
        last = len(self._position)
        self._chunks = sorted(members_of, key=lambda one: self._position.get(one[1][one[2].pieces[0].index], last))
        self.chunks_of = {}
        for host, members, chunk in self._chunks:
            for held in (members[piece.index] for piece in chunk.pieces):
                if held in self._position:
                    self.chunks_of.setdefault(held, []).append((host, members, chunk))
        self.staging_bytes = max(
            (
                slot_bytes_of(chunk, [held.local for held in members])
                for host, members, chunk in self._chunks
                if host.on_host
            ),
            default=0,
        )

    def chunks(self) -> Sequence[Member]:
        """All chunks, in the order in which forward needs them."""
        return self._chunks

    @property
    def num_streamed_chunks(self) -> int:
        return sum(len(host.layout.chunks) for host, _ in self.states if not host.on_host)

    def chunks_with(self, wanted: Collection[HeldState]) -> Iterator[tuple[HostState, Chunk, list[Piece]]]:
        """Streamed chunks that hold state of `wanted`, with those of their pieces."""
        for host, members, chunk in self._chunks:
            pieces = [piece for piece in chunk.pieces if members[piece.index] in wanted]
            if pieces and not host.on_host:
                yield host, chunk, pieces

    def offloaded(self, params: Collection[torch.Tensor], placement: Placement) -> list[HeldState]:
        """Those of `params` that are placed so, in the order of forward."""
        return [held for held in self.chunks_of if held.param in params and held.placement is placement]

    @property
    def slot_bytes(self) -> int:
        """The size of a slot that can hold any streamed chunk."""
        return max((host.layout.slot_bytes for host, _ in self.states if not host.on_host), default=0)

    @property
    def nbytes(self) -> int:
        kept = sum(arena.nbytes for arena in self.kept.values())
        return kept + sum(host.nbytes for host, _ in self.states)

    # For speculative updates

    @property
    def has_spare(self) -> bool:
        return any(host.spare for host, _ in self.states)

    @property
    def streamed_bytes(self) -> int:
        """What a second set of arenas takes."""
        return sum(host.nbytes for host, _ in self.states if not host.on_host)

    def add_spare(self) -> None:
        """A second set of arenas. Updates on the host are never speculative."""
        for host, _ in self.states:
            if not host.spare and not host.on_host:
                host.spare = self._arenas(host.layout, {key: arena.dtype for key, arena in host.arenas.items()})

    def drop_spare(self) -> None:
        """Not enough memory for all of it: none of it."""
        for host, _ in self.states:
            _close(list(host.spare.values()))
            host.spare = {}

    def flip(self) -> None:
        """The second set is the state from now on."""
        for host, _ in self.states:
            if not host.on_host:
                host.flip()

    def keep(self, states: Iterable[HeldState]) -> None:
        """Speculative updates of `states` keep the weights before on the host, where they cost no device memory."""
        for held in states:
            self.kept[held] = self._arena(held.local.numel(), held.local.dtype)


def _close(arenas: Sequence[Arena]) -> None:
    for arena in arenas:
        arena.close()
