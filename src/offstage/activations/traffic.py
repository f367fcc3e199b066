# SPDX-License-Identifier: Apache-2.0
"""`Traffic`: what of one forward is on its way to the host, and what comes back ahead of backward.

A storage that leaves is let go, and its memory is free, when so many bytes have left after it that its copy has
probably arrived, or when so many layers have run: the caller's stream then waits for the copy, and seldom long. How
many bytes depends on where the layers that leave are. Where other layers lie between them, the tensors of one have time
until the next such layer's: `prefetch` times the largest. Where all leave, a few copies keep the link busy.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Sequence

from offstage.activations.storage import SavedStorage
from offstage.config import ActivationConfig
from offstage.planning.choices import Choice

_KEEPS_THE_LINK_BUSY = 256 * 1024 * 1024


class Traffic:
    """Of one forward and its backward."""

    def __init__(
        self,
        choices: Sequence[Choice],
        config: ActivationConfig,
        num_layers: int,
        *,
        largest: int,
        num_calls: int,
        lean: bool = False,
    ) -> None:
        """`num_layers`: of the model, where `choices` may be of some that were named. Of the forward before:
        `largest`, the bytes that one layer sent away, and `num_calls`, how many layers ran. `lean`: as little as
        possible is on its way at once, and the caller waits for it."""
        prefetch = config.prefetch
        offloaded = sum(choice is Choice.OFFLOAD for choice in choices)
        others = sum(choice is Choice.RECOMPUTE for choice in choices)  # whose inputs leave
        enough = num_layers - max(1, config.keep_last)
        self._are_spread = num_layers > offloaded + prefetch > prefetch and offloaded < enough
        """Other layers lie between those that leave: the link has time."""
        self._all_leave = offloaded + others >= enough
        self._spacing = max(1, len(choices) // offloaded) if offloaded else 1
        """Layers from one that leaves to the next."""
        self._last = num_calls - 1
        self._prefetch, self._lean = prefetch, lean
        self.largest = 0
        """Bytes that one layer has sent away, at most."""
        self._expected = largest
        self._of_layer = 0
        self._leaving: deque[tuple[weakref.ref[SavedStorage], int, int]] = deque()
        self._leaving_bytes = 0
        self._away: list[weakref.ref[SavedStorage]] = []

    @property
    def _ends_empty(self) -> bool:
        """Whether all that has left is gone when the layers have run."""
        return self._all_leave or not self._are_spread

    @property
    def _room(self) -> int:
        """Bytes that may be on their way beside the storage in question."""
        if self._lean:
            return 0
        largest = max(self.largest, self._expected)
        return self._prefetch * (largest if self._are_spread else min(largest, _KEEPS_THE_LINK_BUSY))

    # Forward

    def left(self, storage: SavedStorage, call: int) -> None:
        """Call number `call` of a layer has sent `storage` away."""
        storage.send_for = functools.partial(self._send_for, len(self._away))
        self._away.append(weakref.ref(storage))
        self._leaving.append((self._away[-1], storage.nbytes, call))
        self._leaving_bytes += storage.nbytes
        self._of_layer += storage.nbytes
        self.largest = max(self.largest, self._of_layer)
        self._let_go(call)

    def call_is_over(self, call: int) -> None:
        """Call number `call` of a layer has ended."""
        self._of_layer = 0
        # What follows the last layer (a head, a loss) may need more memory than any: where all leave, all are gone.
        self._let_go(call, everything=call == self._last and self._ends_empty)

    def forward_is_over(self) -> None:
        """What the last layer has sent away after its call is let go, too."""
        self._let_go(self._last, everything=self._ends_empty)

    def _let_go(self, call: int, *, everything: bool = False) -> None:
        while self._leaving:
            reference, nbytes, left_in = self._leaving[0]
            is_early = self._leaving_bytes - nbytes < self._room and call - left_in < self._spacing * self._prefetch
            if is_early and not everything:
                return
            self._leaving.popleft()
            self._leaving_bytes -= nbytes
            if (storage := reference()) is not None:
                storage.let_go()

    # Backward

    def _send_for(self, place: int) -> int:
        """Have the storage that left as number `place` return, and those that backward will ask for next."""
        storage = self._away[place]()
        assert storage is not None, "the caller holds it"
        moved = storage.nbytes if storage.come_back() else 0
        room, ahead = self._room, 0
        for earlier in range(place - 1, -1, -1):
            one = self._away[earlier]()
            if one is None or one.has_returned:  # used already, maybe in another order
                continue
            ahead += one.nbytes
            if ahead > room and ahead > one.nbytes:  # the next one in any case, or the link would stand still
                break
            moved += one.nbytes if one.come_back() else 0
        return moved
