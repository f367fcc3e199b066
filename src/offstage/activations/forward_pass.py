# SPDX-License-Identifier: Apache-2.0
"""`Pass` and `Visit`: one forward of a model, and one call of a layer in it. Used by `activations.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from offstage.activations.plan import Choice

if TYPE_CHECKING:
    from offstage.activations.remaking import RemadeStorage
    from offstage.activations.storage import SavedStorage
    from offstage.activations.traffic import Traffic

ORDINARY = (torch.Tensor, nn.Parameter)


class Flight:
    """Lives as long as anything that one forward has saved."""


class Visit:
    """One call of a layer in one forward."""

    def __init__(
        self, flight: Flight, number: int, layer: int, choice: Choice, kind: tuple[object, ...], arguments: Any
    ) -> None:
        self.flight, self.number, self.layer, self.choice, self.kind = flight, number, layer, choice, kind
        self.inputs = inputs_of(arguments)
        """Storages of its arguments."""
        self.path = 0
        """Of all that was saved in it so far, what kind it was: another way through a layer has another one."""

    def follow(self, tensor: torch.Tensor, *, is_movable: bool) -> None:
        """`tensor` is saved in it."""
        # Who made it in this layer: to the layer it does not matter who made what it was given.
        is_given = tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self.inputs
        maker = None if tensor.grad_fn is None or is_given else tensor.grad_fn.name()
        self.path = hash((self.path, maker, tensor.dtype, is_movable))


class Pass:
    """One forward of the model. Several may wait for their backward at once: micro-batches of a pipeline."""

    def __init__(self, choices: Sequence[Choice], traffic: Traffic) -> None:
        self.choices, self.traffic = choices, traffic
        self.flight = Flight()
        self.frame = next((frame for frame in frames() if frame.f_code.co_filename == nn.modules.module.__file__), None)
        """Of the model's call."""
        self.seen_bytes = 0
        """Saved by chosen layers so far."""
        self.left_bytes = 0
        self.remade_bytes = 0
        self.has_learnt = False
        """That less has to leave than in the forward before."""
        self.visits = 0
        self.current: Visit | None = None
        self.previous: Visit | None = None
        """The visit that was over last."""
        self.unclaimed: dict[int, SavedStorage] = {}
        """Saved since the last layer."""
        self.storages: dict[int, SavedStorage | RemadeStorage] = {}
        self.weights: dict[int, StorageWeakRef] = {}


def frames() -> Iterator[FrameType]:
    """Who has called, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def storages_of(module: nn.Module) -> dict[int, StorageWeakRef]:
    """As long as there is a reference to one its address is not used for another."""
    tensors = [*module.parameters(), *module.buffers()]
    return _references(tensor for tensor in tensors if type(tensor) in ORDINARY)


def inputs_of(arguments: Any) -> dict[int, StorageWeakRef]:
    """Of tensors in a layer's arguments."""
    leaves = tree_leaves(arguments)
    return _references(leaf for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout == torch.strided)


def _references(tensors: Iterable[torch.Tensor]) -> dict[int, StorageWeakRef]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: StorageWeakRef(storage) for storage in storages}  # type: ignore[no-untyped-call]
