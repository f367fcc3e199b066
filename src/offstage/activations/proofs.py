# SPDX-License-Identifier: Apache-2.0
"""`Proofs`: which results are made again with the same bits. For `remade_storage.py`.

[Note: proofs] Autograd counts who writes to a tensor, but not everyone lets it: collectives do not, and neither does
`.data`. So a result that was written to could be made again as it was before. Therefore the first time that a layer of
some kind saves a result, it moves like everything else, and is made again beside it in backward: only if the bits are
the same it is not moved from then on. And each time a sum over its bits is taken before it goes, and compared with that
of what was made again: who begins to write later is found out, unless numbers only change places. That is two forwards
later, since nobody waits for the answer, and training stops.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from offstage.activations.recipe import Recipe, Unpack, operation_of
from offstage.activations.storage import bytes_of
from offstage.errors import OffstageError

if TYPE_CHECKING:
    from offstage.lanes.lanes import Lanes, Mark

logger = logging.getLogger("offstage")

_PLACES, _FEW = 128, 16
"""For sums: how many are made at once, and how few are too few, since threads may take one at the same time."""
Key = tuple[object, ...]
"""Of a result: what kind of layer made it, behind which operations, and which operation did."""


class Trial:
    """A result that is made once beside the one that was saved."""

    def __init__(self, key: Key, recipe: Recipe) -> None:
        self.key, self._recipe = key, recipe
        recipe.expect()

    def make(self, unpack: Unpack) -> torch.Tensor:
        try:
            return self._recipe.make(unpack)
        finally:
            self._recipe.unexpect()  # another backward does not make it again


class Proofs:
    """Whose results are made again with the same bits, on one device. See [Note: proofs]."""

    def __init__(self) -> None:
        self._are_same: dict[Key, bool] = {}
        self._tried: dict[Key, torch.Tensor] = {}
        """Whether they differed, for results that moved as well. Not looked at yet: that would make the host wait."""
        self._says_something: dict[Key, torch.Tensor] = {}
        """Whether any number of these was not zero."""
        self._watched: dict[Key, torch.Tensor] = {}
        """Whether they differed, for results that did not move."""
        self._answer: tuple[dict[Key, torch.Tensor], torch.Tensor, Mark] | None = None
        """On its way to the host: whether any of them did."""
        self._places: deque[torch.Tensor] = deque()
        """For sums, one number each."""
        self._is_last = False
        """No forward comes that would ask."""

    def verdict(self, key: Key) -> bool | None:
        """`None`: not known."""
        return self._are_same.get(key)

    @torch.no_grad()
    def compare(self, trial: Trial, found: torch.Tensor, unpack: Unpack) -> None:
        """`found`: of the storage that was saved. One that cannot be made moves: its weight has changed, or is
        somewhere else; memory is short."""
        try:
            differ = _words(trial.make(unpack)).ne(_words(found)).any()
            says_something = found.ne(0).any()  # zeros do not: whatever they are scaled by, they are the same
        except (OffstageError, torch.OutOfMemoryError) as error:
            logger.warning(
                "activations: %s is not made again, and moves like everything else: %s", _named(trial.key), error
            )
            self._are_same[trial.key] = False
            return
        _add(self._tried, trial.key, differ)
        _add(self._says_something, trial.key, says_something)

    def take_digest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over what is saved. Given back when nobody needs it any more."""
        if len(self._places) < _FEW:  # together: alone each would take what the allocator gives at least
            self._places.extend(torch.empty(_PLACES, dtype=torch.int64, device=tensor.device).unbind())
        return digest_of(tensor, self._places.popleft())

    def give_back(self, digest: torch.Tensor) -> None:
        self._places.append(digest)

    @torch.no_grad()
    def watch(self, key: Key, made: torch.Tensor, digest: torch.Tensor) -> None:
        """`digest`: of what was saved, and is gone."""
        _add(self._watched, key, digest_of(made).ne(digest))
        if self._is_last:
            self.look_at_all()

    def look(self, lanes: Lanes) -> bool:
        """A forward begins: what has been found out? Waits for the device in the first iterations only.

        Returns whether anything is now known to be the same."""
        known = sum(self._are_same.values())
        while self._tried:
            key, differ = self._tried.popitem()
            same, says_something = not bool(differ), bool(self._says_something.pop(key))
            if not same and self._are_same.get(key) is not False:
                logger.warning(
                    "activations: %s %s: it moves like everything else, and is not made again", _named(key), _why(key)
                )
            if not same or says_something:
                self._are_same[key] = same and self._are_same.get(key, True)
        if self._answer is not None and lanes.passed(self._answer[-1]):
            watched, any_differs, _ = self._answer
            self._answer = None
            if any_differs:
                self._refuse(watched)
        if self._watched and self._answer is None:
            watched, self._watched = self._watched, {}
            any_differs = torch.empty((), dtype=torch.bool, pin_memory=lanes.device.type != "cpu")
            any_differs.copy_(torch.stack(list(watched.values())).any(), non_blocking=True)
            self._answer = watched, any_differs, lanes.mark()
        return sum(self._are_same.values()) > known

    def look_at_all(self) -> None:
        """The same for everything so far, and from now on at once. Waits for the device."""
        self._is_last = True
        asked = self._answer[0] if self._answer is not None else {}
        watched, self._watched, self._answer = self._watched, {}, None
        for one in (asked, watched):
            self._refuse(one)

    def _refuse(self, watched: Mapping[Key, torch.Tensor]) -> None:
        differ = [key for key, found in watched.items() if bool(found)]
        self._are_same.update(dict.fromkeys(differ, False))
        if differ:
            self._watched.clear()  # the same again, of iterations that have begun since
            raise OffstageError(
                f"A saved tensor, {_named(differ[0])}, {_why(differ[0])}. That did not happen in the first iteration, "
                "so it was made again with other bits, and gradients since then are wrong; expected the same in every "
                "iteration. Load the last checkpoint; let that layer use an operation that makes a new tensor, and "
                "deterministic kernels, or leave it out of layers."
            )


def _add(flags: dict[Key, torch.Tensor], key: Key, flag: torch.Tensor) -> None:
    before = flags.get(key)
    flags[key] = flag if before is None else before | flag


def _named(key: Key) -> str:
    return f"what {operation_of(str(key[-1]))} has made in a {getattr(key[0], '__name__', key[0])}"


def _why(key: Key) -> str:
    written = "was written to without autograd's knowledge (by a collective, through .data)"
    is_product = operation_of(str(key[-1])) == operation_of("MmBackward0")
    return f"{written}, or its weight was, or it has other bits each time it is computed" if is_product else written


@torch.no_grad()
def digest_of(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Of all bits of the tensor's storage."""
    return torch.sum(_words(tensor), dim=0, dtype=torch.int64, out=into)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, in words of eight bytes where that is possible."""
    found = bytes_of(tensor)
    return found.view(torch.int64) if found.numel() % 8 == 0 else found
