# SPDX-License-Identifier: Apache-2.0
"""`RemadeStorage`: a saved tensor that is made again from others that are saved anyway, so that it need not move.

An activation function saves its input, and the linear layer behind it saves its output. So of what `down(silu(gate) *
up)` leaves for backward, `silu(gate)` and the product are made again from `gate` and `up`: by the same kernels from the
same bits, in a small part of the time in which the link would carry them. Used by `activations.py`.

[Note: proofs] Autograd counts who writes to a tensor, but not everyone lets it: collectives do not, and neither does
`.data`. So a result that was written to could be made again as it was before. Therefore the first time that a layer of
some kind saves a result, it moves like everything else, and is made again beside it in backward: only if the bits are
the same it is not moved from then on. And each time a sum over its bits is taken before it goes, and compared with that
of what was made again: who begins to write later is found out, two forwards later, since nobody waits for the answer,
and training stops. `Proofs` knows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from offstage.errors import OffstageError
from offstage.saved_storage import Saved, bytes_of

if TYPE_CHECKING:
    from offstage.activation_side import Side
    from offstage.activations import Visit
    from offstage.lanes import Lanes, Mark

logger = logging.getLogger("offstage")

_DEEPEST = 2
"""How many results may be made for one, as in `silu(gate) * up`: all of them are made for each that is asked for."""
_Operation = Callable[..., torch.Tensor]
_HOW: Mapping[str, tuple[tuple[str, ...], Callable[[Any], _Operation]]] = {
    "GeluBackward0": (("self",), lambda node: functools.partial(F.gelu, approximate=node._saved_approximate)),
    "MulBackward0": (("self", "other"), lambda _: torch.mul),
    "SiluBackward0": (("self",), lambda _: F.silu),
}
"""By autograd's name of an operation: what it saves, and what it was. Each is one kernel, element by element."""


class Recipe:
    """Keeps what autograd keeps of the operation's inputs: it lives as long as what was saved of the result."""

    def __init__(self, made: torch.Tensor, name: str, operation: _Operation, inputs: list[Saved]) -> None:
        self.name, self.inputs = name, inputs
        self.depth: int = 1 + max(kept.storage.depth for kept in inputs)
        self._operation = operation
        self._device_type, self._stride = made.device.type, made.stride()

    def expect(self) -> None:
        """It will be made once more: so its inputs will be asked for."""
        for kept in self.inputs:
            kept.storage.expect()

    def unexpect(self) -> None:
        """It was made once for nobody."""
        for kept in self.inputs:
            kept.storage.unexpect()

    def make(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        inputs = [unpack(kept) for kept in self.inputs]
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):  # what had to be cast was, before
            made = self._operation(*inputs)
        assert made.stride() == self._stride, "inputs with the strides that they had lead to those it had"
        return made


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """How to make the storage of `tensor`, which autograd is about to save; `None` if nobody knows."""
    root = tensor._base if tensor._is_view() else tensor
    if root is None or type(root) is not torch.Tensor or not root.is_contiguous():
        return None
    node = root.grad_fn
    if node is None or node.name() not in _HOW or root._version or root.nbytes != root.untyped_storage().nbytes():
        return None
    names, operation = _HOW[node.name()]
    inputs = [getattr(node, f"_raw_saved_{name}").data for name in names]
    # Not of parameters: they change, or are somewhere else, as soon as their own layer's backward is over. Nor of what
    # others have saved, nor where nothing was: a factor that needs no gradient.
    if not all(isinstance(kept, Saved) for kept in inputs):
        return None
    recipe = Recipe(root, node.name(), operation(node), inputs)
    return recipe if recipe.depth <= _DEEPEST else None


Key = tuple[object, ...]


class Trial:
    """A result that is made once beside the one that was saved."""

    def __init__(self, key: Key, recipe: Recipe) -> None:
        self.key, self._recipe = key, recipe
        recipe.expect()

    def make(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        made = self._recipe.make(unpack)
        self._recipe.unexpect()  # another backward does not make it again
        return made


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

    def verdict(self, key: Key) -> bool | None:
        """`None`: not known."""
        return self._are_same.get(key)

    @torch.no_grad()
    def compare(self, key: Key, made: torch.Tensor, found: torch.Tensor) -> None:
        """Both are of the same storage: what was made again, and what was saved."""
        _add(self._tried, key, _words(made).ne(_words(found)).any())
        # Zeros prove nothing: their sum over ranks, and whatever they are scaled by, is the same.
        _add(self._says_something, key, found.ne(0).any())

    @torch.no_grad()
    def watch(self, key: Key, made: torch.Tensor, digest: torch.Tensor) -> None:
        """`digest`: of what was saved, and is gone."""
        _add(self._watched, key, digest_of(made).ne(digest))

    def look(self, lanes: Lanes) -> None:
        """A forward begins: what has been found out? Waits for the device in the first iterations only."""
        while self._tried:
            key, differ = self._tried.popitem()
            same, says_something = not bool(differ), bool(self._says_something.pop(key))
            if not same and self._are_same.get(key) is not False:
                logger.warning(
                    "activations: %s was written to without autograd's knowledge (by a collective, through .data): it "
                    "moves like everything else, and is not made again",
                    _named(key),
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

    def look_at_all(self) -> None:
        """The same for everything so far. Waits for the device."""
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
                "A saved tensor was written to without autograd's knowledge (by a collective, through .data): "
                f"{_named(differ[0])}. That did not happen in the first iteration, so it was made again as it was "
                "before, and gradients since then are wrong; expected the same in every iteration. Load the last "
                "checkpoint; let that layer use an operation that makes a new tensor, or leave it out of layers."
            )


def _add(flags: dict[Key, torch.Tensor], key: Key, flag: torch.Tensor) -> None:
    before = flags.get(key)
    flags[key] = flag if before is None else before | flag


def _named(key: Key) -> str:
    return f"what {str(key[-1]).removesuffix('Backward0')} has made in a {getattr(key[0], '__name__', key[0])}"


@torch.no_grad()
def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of all bits of the tensor's storage."""
    return _words(tensor).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, in words of eight bytes where that is possible."""
    found = bytes_of(tensor)
    return found.view(torch.int64) if found.numel() % 8 == 0 else found


class RemadeStorage:
    """Stands where a `SavedStorage` would. Holds no memory: it is made as often as backward asks for it."""

    traffic = None

    def __init__(
        self,
        side: Side,
        tensor: torch.Tensor,
        visit: Visit,
        key: Key,
        recipe: Recipe,
        unpack: Callable[[Any], torch.Tensor],
    ) -> None:
        self.side, self.visit = side, visit
        self.nbytes = tensor.untyped_storage().nbytes()
        self.depth: int = recipe.depth
        self._key, self._recipe, self._unpack = key, recipe, unpack
        self._digest: torch.Tensor | None = digest_of(tensor)
        self._alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, whose storage has the same address, is of this one and has the values that were saved."""
        return not self._alive.expired() and tensor._version == 0  # type: ignore[no-untyped-call]

    def saved(self, tensor: torch.Tensor) -> Saved:
        """What autograd keeps in place of `tensor`."""
        self.expect()
        return Saved(self, tensor)

    def expect(self) -> None:
        """It will be asked for once more, and so will what it is made of."""
        self._recipe.expect()

    def unexpect(self) -> None:
        """It was asked for once by nobody."""
        self._recipe.unexpect()

    def bytes_for_backward(self) -> torch.Tensor:
        """The storage."""
        made = self._recipe.make(self._unpack)
        if self._digest is not None:
            self.side.proofs.watch(self._key, made, self._digest)
            self._digest = None
        return bytes_of(made)
