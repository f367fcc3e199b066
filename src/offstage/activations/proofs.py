# SPDX-License-Identifier: Apache-2.0
"""`Proofs`: which results of a layer the device remakes with the same bits.

[Note: proofs] Autograd counts the writes to a tensor, but collectives and `.data` bypass the counter, and a result that
was written to that way would be remade as it was before. So the first time that a layer of some kind saves a result, it
moves like every other tensor, and backward remakes it beside the copy that returned: only if the bits are equal is it
remade instead of moved from then on. After that, a checksum over its bits is taken when it is saved, and compared with
that of what was remade. The checksum catches later writes, except permutations. The host reads the answer two forwards
later, so that it need not wait, and then stops training.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping

import torch

from offstage.errors import OffstageError
from offstage.lanes.lanes import Lanes, Mark

logger = logging.getLogger("offstage")

_PLACES, _FEW = 128, 16
"""For checksums: how many are allocated at once, and how few are too few, since several threads may take one."""
Key = tuple[object, ...]
"""Of a result: what kind of layer made it, after which operations, and by which operation."""


class Proofs:
    """The verdicts for one device. See [Note: proofs]."""

    def __init__(self) -> None:
        self._are_same: dict[Key, bool] = {}
        self._tried: dict[Key, torch.Tensor] = {}
        """Whether bits differed, for results that moved as well. On the device until a forward begins."""
        self._says_something: dict[Key, torch.Tensor] = {}
        """Whether any number of these was not zero."""
        self._watched: dict[Key, torch.Tensor] = {}
        """Whether checksums differed, for results that did not move."""
        self._answer: tuple[dict[Key, torch.Tensor], torch.Tensor, Mark] | None = None
        """On its way to the host: whether any of these differed."""
        self._places: deque[torch.Tensor] = deque()
        """For checksums, one number each."""
        self._is_last = False
        """The hooks were removed: no forward comes that would read the answers."""

    def verdict(self, key: Key) -> bool | None:
        """`None`: not known."""
        return self._are_same.get(key)

    @torch.no_grad()
    def compare(self, key: Key, remake: Callable[[], torch.Tensor], found: torch.Tensor) -> None:
        """`found`: the saved tensor, as it returned. A result that cannot be remade (an input has changed, or memory is
        short) moves from then on."""
        try:
            differ = _words(remake()).ne(_words(found)).any()
            says_something = found.ne(0).any()  # zeros do not: whatever they are scaled by, they are the same
        except (OffstageError, torch.OutOfMemoryError) as error:
            logger.warning("activations: %s is not made again, and moves like everything else: %s", _named(key), error)
            self._are_same[key] = False
            return
        _add(self._tried, key, differ)
        _add(self._says_something, key, says_something)

    def take_digest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The checksum of what is saved. The caller hands it to `give_back` in the end."""
        if len(self._places) < _FEW:  # together: alone each would take the allocator's smallest block
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
        """Read what is known when a forward begins. Waits for the device in the first iterations only.

        Returns whether any result was proven to be the same."""
        known = sum(self._are_same.values())
        while self._tried:
            key, differ = self._tried.popitem()
            same, says_something = not bool(differ), bool(self._says_something.pop(key))
            if not same and self._are_same.get(key) is not False:
                logger.warning(
                    "activations: %s %s: it moves like everything else, and is not made again", _named(key), _WRITTEN
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
            any_differs = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=lanes.device.type != "cpu")
            any_differs.copy_(torch.stack(list(watched.values())).any(), non_blocking=True)
            self._answer = watched, any_differs, lanes.mark()
        return sum(self._are_same.values()) > known

    def look_at_all(self) -> None:
        """Read everything so far, and from now on each answer at once. Waits for the device."""
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
                f"A saved tensor, {_named(differ[0])}, {_WRITTEN}. That did not happen in the first iteration, so it "
                "was made again with other bits, and gradients since then are wrong; expected the same in every "
                "iteration. Load the last checkpoint; let that layer use an operation that makes a new tensor, or "
                "leave it out of layers."
            )


_WRITTEN = "was written to without autograd's knowledge (by a collective, through .data)"


def _add(flags: dict[Key, torch.Tensor], key: Key, flag: torch.Tensor) -> None:
    before = flags.get(key)
    flags[key] = flag if before is None else before | flag


def _named(key: Key) -> str:
    return f"what {key[-1]} has made in a {getattr(key[0], '__name__', key[0])}"


@torch.no_grad()
def digest_of(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A checksum of the tensor's storage."""
    return torch.sum(_words(tensor), dim=0, dtype=torch.int64, out=into)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, as bytes."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[no-any-return]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, in words of eight bytes where that is possible."""
    found = bytes_of(tensor)
    return found.view(torch.int64) if found.numel() % 8 == 0 else found
