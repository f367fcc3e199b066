# SPDX-License-Identifier: Apache-2.0
"""`RemadeStorage`: a saved tensor that is made again from others that are saved anyway, so that it need not move.

An activation function saves its input, and the linear layer behind it saves its output. So of what `down(silu(gate) *
up)` leaves for backward, `silu(gate)` and the product are made again from `gate` and `up`: by the same kernels from the
same bits, in a small part of the time in which the link would carry them. Used by `activations.py`.

[Note: dear ones] What a linear layer has made costs a matrix product, so it is made again only where the link is the
limit, and kept until every operation that needs it had it. But for one: a product's backward makes two gradients, and
needs its two factors and nothing that they were made of. That is let go before, and made once more behind (`Factors`).

How it is made is in `recipe.py`, whether it then has the same bits in `proofs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offstage.activations.proofs import Key
from offstage.activations.recipe import Recipe, Unpack
from offstage.activations.storage import Saved, bytes_of

if TYPE_CHECKING:
    from offstage.activations.device import Side
    from offstage.activations.forward_pass import Visit


class RemadeStorage:
    """Stands where a `SavedStorage` would. Holds no memory, unless it is dear: see [Note: dear ones]."""

    traffic = None
    is_remade = True

    def __init__(
        self, side: Side, tensor: torch.Tensor, visit: Visit, key: Key, recipe: Recipe, unpack: Unpack
    ) -> None:
        self.side, self.visit = side, visit
        self.nbytes = tensor.untyped_storage().nbytes()
        self.depth: int = recipe.depth
        self.is_dear = recipe.is_dear
        self._key, self._recipe, self._unpack = key, recipe, unpack
        self._digest = side.proofs.take_digest(tensor)
        self._alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._bytes: torch.Tensor | None = None
        """If it is dear: from the first operation that needs it to the last."""
        self._saved = 0
        """How often backward will ask for it."""
        self._used = 0
        self._was_let_go = False
        """In this backward."""
        self._is_made_twice = False
        """In each: what it is made of has been told."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, whose storage has the same address, is of this one and has the values that were saved."""
        return not self._alive.expired() and tensor._version == 0  # type: ignore[no-untyped-call]

    def saved(self, tensor: torch.Tensor) -> Saved:
        """What autograd keeps in place of `tensor`."""
        self.expect()
        return Saved(self, tensor)

    def expect(self) -> None:
        """It will be asked for once more, and so will what it is made of."""
        if not self.is_dear or not self._saved:
            self._recipe.expect()
        self._saved += 1

    def unexpect(self) -> None:
        """It was asked for once by nobody."""
        self._saved -= 1
        if not self.is_dear or not self._saved:
            self._recipe.unexpect()
        if self._bytes is not None:
            self._used -= 1

    def bytes_for_backward(self) -> torch.Tensor:
        """The storage."""
        found = self._bytes if self._bytes is not None else self._make()
        self._used += 1
        if self._used >= self._saved:  # a second backward makes it again
            self._keep(None)
            self._used, self._was_let_go = 0, False
        elif self.is_dear:
            self._keep(found)
        return found

    def _make(self) -> torch.Tensor:
        made = self._recipe.make(self._unpack)
        self.side.proofs.watch(self._key, made, self._digest)
        return bytes_of(made)

    def dear_ones(self) -> list[RemadeStorage]:
        """Itself, or what it is made of."""
        if self.is_dear:
            return [self]
        return [dear for kept in self._recipe.inputs for dear in kept.storage.dear_ones()]

    def let_go(self) -> None:
        """It is asked for again, but not before what comes next has used the memory. Once: it is dear."""
        if self._bytes is None or self._was_let_go:
            return
        self._keep(None)
        self._was_let_go = True
        if not self._is_made_twice:
            self._is_made_twice = True
            self._recipe.expect()

    def _keep(self, found: torch.Tensor | None) -> None:
        self.side.here_bytes += self.nbytes * ((found is not None) - (self._bytes is not None))
        self._bytes = found

    def __del__(self) -> None:
        if getattr(self, "_bytes", None) is not None:
            self.side.here_bytes -= self.nbytes
        digest: torch.Tensor | None = getattr(self, "_digest", None)
        if digest is not None:  # whoever uses it next comes later in the caller's stream
            self.side.proofs.give_back(digest)


def join_factors(both: Sequence[Saved]) -> None:
    """A product has saved these two, and its backward will ask for both at once."""
    dear = dict.fromkeys(one for kept in both for one in kept.storage.dear_ones())
    # Not one of which all is needed.
    made_of = [one for one in dear if sum(kept.nbytes for kept in both if kept.storage is one) < one.nbytes]
    if made_of:
        factors = Factors(made_of)
        for kept in both:
            kept.factors = factors


class Factors:
    """The two that a product has saved, of which something is let go: see [Note: dear ones]."""

    def __init__(self, made_of: Sequence[RemadeStorage]) -> None:
        self._made_of = made_of
        self._asked: list[Saved] = []

    def asked(self, kept: Saved, found: torch.Tensor) -> torch.Tensor:
        """The product's backward has asked for `kept`, which is `found`. What it gets instead."""
        if kept.storage in self._made_of:
            found = found.clone()  # its part only, in the same order: more does not matter, element by element
        self._asked = [one for one in self._asked if one is not kept] + [kept]
        if len(self._asked) == 2:
            self._asked = []
            for storage in self._made_of:
                storage.let_go()
        return found
