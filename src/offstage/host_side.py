# SPDX-License-Identifier: Apache-2.0
"""`HostSide`: what one device's parameters have on the host. Owned by `engine.py`.

Arenas with the state of streamed parameters and the chunks that cover them; and, for speculative updates, a second set
of arenas and the old weights that are kept here and not on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from offstage.config import OffloadConfig
from offstage.held_state import HeldState
from offstage.host_memory import Arena
from offstage.layout import Chunk, Layout, Piece, make_layout
from offstage.pipeline import HostState
from offstage.plan import Placement
from offstage.rules.rule import Rule

Member = tuple[HostState, list[HeldState], Chunk]
"""A chunk, and whose state it is."""


class HostSide:
    """The arenas of one device."""

    def __init__(self, device: torch.device, rule: Rule, config: OffloadConfig) -> None:
        self.states: list[tuple[HostState, list[HeldState]]] = []
        self.chunks_of: dict[HeldState, list[Member]] = {}
        """In the order of the layout, which is that of forward."""
        self.kept: dict[HeldState, Arena] = {}
        """Where speculative updates keep the weights before."""
        self._device, self._rule, self._config = device, rule, config

    def add(self, states: Sequence[HeldState]) -> None:
        """Give streamed parameters their arenas and chunks."""
        kinds: dict[tuple[tuple[str, torch.dtype], ...], list[HeldState]] = {}
        for held in states:
            if held.placement is Placement.STREAMED:
                kinds.setdefault(tuple((key.name, key.dtype) for key in held.keys), []).append(held)
        self.states += [(self._make(members), members) for members in kinds.values()]

    def _make(self, members: Sequence[HeldState]) -> HostState:
        keys = members[0].keys
        layout = make_layout(
            [{key.name: key.numel(held.param) for key in held.keys} for held in members],
            {key.name: key.dtype.itemsize for key in keys},
            [held.param.numel() for held in members],
            chunk_bytes=int(self._config.chunk_bytes),
            split=self._rule.splits(self._device),
        )
        host = HostState(layout, self._arenas(layout, {key.name: key.dtype for key in keys}))
        for index, held in enumerate(members):
            held.host, held.index = host, index
        return host

    def _arenas(self, layout: Layout, dtypes: dict[str, torch.dtype]) -> dict[str, Arena]:
        return {key: self._arena(layout.arena_numel[key], dtype) for key, dtype in dtypes.items()}

    def _arena(self, numel: int, dtype: torch.dtype) -> Arena:
        return Arena(numel, dtype, self._device, pin=self._config.pin_memory)

    def drop_unused(self, live: Iterable[HeldState]) -> None:
        """Close arenas none of whose parameters are kept there any more. The lanes have been drained."""
        alive = set(live)
        for host, members in self.states:
            if alive.isdisjoint(members):
                _close([*host.arenas.values(), *host.spare.values()])
        self.states = [(host, members) for host, members in self.states if not alive.isdisjoint(members)]
        _close([self.kept.pop(held) for held in self.kept.keys() - alive])
        self.chunks_of = {}
        for host, members, chunk in self.chunks():
            for held in (members[piece.index] for piece in chunk.pieces):
                if held in alive:
                    self.chunks_of.setdefault(held, []).append((host, members, chunk))

    def chunks(self) -> Iterator[Member]:
        """All chunks, in the order in which forward needs them."""
        for host, members in self.states:
            for chunk in host.layout.chunks:
                yield host, members, chunk

    def chunks_with(self, wanted: Collection[HeldState]) -> Iterator[tuple[HostState, Chunk, list[Piece]]]:
        """Chunks that hold state of `wanted`, with those of their pieces."""
        for host, members, chunk in self.chunks():
            pieces = [piece for piece in chunk.pieces if members[piece.index] in wanted]
            if pieces:
                yield host, chunk, pieces

    def streamed(self, params: Collection[torch.Tensor]) -> list[HeldState]:
        """Those of `params` whose state is streamed, in the order of forward."""
        return [held for held in self.chunks_of if held.param in params]

    @property
    def slot_bytes(self) -> int:
        """The size of a slot that can hold any chunk."""
        return max((host.layout.slot_bytes for host, _ in self.states), default=0)

    @property
    def nbytes(self) -> int:
        kept = sum(arena.nbytes for arena in self.kept.values())
        return kept + sum(host.nbytes for host, _ in self.states)

    # For speculative updates

    @property
    def has_spare(self) -> bool:
        return any(host.spare for host, _ in self.states)

    def add_spare(self) -> None:
        """A second set of arenas."""
        for host, _ in self.states:
            if not host.spare:
                host.spare = self._arenas(host.layout, {key: arena.dtype for key, arena in host.arenas.items()})

    def drop_spare(self) -> None:
        """Not enough memory for all of it: none of it."""
        for host, _ in self.states:
            _close(list(host.spare.values()))
            host.spare = {}

    def flip(self) -> None:
        """The second set is the state from now on."""
        for host, _ in self.states:
            host.flip()

    def keep(self, states: Iterable[HeldState]) -> None:
        """Speculative updates of `states` keep the weights before on the host, where they cost no device memory."""
        for held in states:
            self.kept[held] = self._arena(held.param.numel(), held.param.dtype)


def _close(arenas: Sequence[Arena]) -> None:
    for arena in arenas:
        arena.close()
