# SPDX-License-Identifier: Apache-2.0
"""`Sleeper`: one object that can sleep: which tensors it has, what of it is away, and the hooks that guard it."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from offstage.optimizer.runtime import Runtime
from offstage.phases.away import send_away
from offstage.phases.parking import ParkedStorage, Stage, Wrapper, asleep_error
from offstage.tensors import local_of, readable

KINDS = ("slots", "gradients", "state", "buffers", "weights")
"""In the order in which they are given up where not all has to go: the cheapest to bring back first."""


@dataclass(frozen=True, eq=False)
class Item:
    """A tensor of an object."""

    kind: str
    label: str
    tensor: torch.Tensor
    """As the object has it; a DTensor's memory is that of its local tensor."""
    module: nn.Module | None = None
    """The one whose forward uses it."""
    param: torch.Tensor | None = None
    """The parameter, if this is its gradient."""


class KeptItem:
    """What a sleeper remembers of an item: nothing of it is kept alive, neither the object itself nor a gradient."""

    def __init__(self, item: Item) -> None:
        self.kind = item.kind
        self._tensor = TensorWeakRef(item.tensor)
        self._module = weakref.ref(item.module) if item.module is not None else None
        self._param = TensorWeakRef(item.param) if item.param is not None else None

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._tensor()  # type: ignore[no-any-return]

    @property
    def module(self) -> nn.Module | None:
        return self._module() if self._module is not None else None

    @property
    def param(self) -> torch.Tensor | None:
        return self._param() if self._param is not None else None


class Sleeper(ABC):
    """One object that has slept, or is about to."""

    main_kind: str
    """Without this the object cannot be used: it is asleep."""

    def __init__(self, title: str) -> None:
        """`title`: how messages name the object."""
        self.title = title
        self.is_asleep = False
        self.is_public = False
        """Other processes shall be able to read its values while it sleeps."""
        self.parked: dict[ParkedStorage, list[KeptItem]] = {}
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """All tensors of the object, in the order in which training needs them."""

    def check(self) -> None:
        """Raise if it cannot sleep now. Changes nothing."""
        for runtime in self.runtimes():
            runtime.check_not_lost()
            runtime.check_between_steps()

    def drain(self) -> None:
        """Nothing is under way afterwards."""
        for runtime in self.runtimes():
            runtime.drain_state()

    def runtimes(self) -> list[Runtime]:
        """Of offloaded optimizers that use its tensors."""
        return []

    def drop_gradients(self) -> None:  # noqa: B027
        """No gradient is wanted any more."""

    def free_slots(self, device: torch.device) -> int:
        """Give back memory of `device` that holds nothing. Returns how much."""
        return 0

    def arranged(self) -> list[ParkedStorage]:
        """Its storages, in the order in which training needs them."""
        return list(self.parked)

    @property
    def waits_at_once(self) -> bool:
        """Whether its tensors are read in ways that no hook sees: then `wake()` waits for all of them."""
        return False

    @property
    def away(self) -> list[ParkedStorage]:
        return [one for one in self.parked if one.stage is Stage.AWAY and not one.is_dropped]

    def keep(self, storage: ParkedStorage, items: Iterable[Item]) -> None:
        """`storage`, which is away, is one of its own."""
        self.parked[storage] = list(map(KeptItem, items))

    def prune(self, current: set[ParkedStorage]) -> None:
        """Forget storages that it does not use any more."""
        for one in list(self.parked):
            if one.is_dropped or (one.stage is Stage.HERE and one not in current):
                del self.parked[one]

    def fell_asleep(self, *, wholly: bool) -> None:
        """Storages of it are away: from now on using them raises. `wholly`: using the object does."""
        self.is_asleep = self.is_asleep or wholly
        self._forget_hooks()
        for one, items in self.parked.items():
            if one.stage is Stage.AWAY:
                for item in items:
                    if isinstance(item.tensor, DTensor):
                        send_away(item.tensor, Wrapper(one))
        self._guard()

    @abstractmethod
    def _guard(self) -> None:
        """Make the hooks that refuse or delay its use."""

    def woke(self) -> None:
        """Its storages are here, or on their way."""
        self.is_asleep = False
        for one in [one for one in self.parked if one.is_dropped]:
            del self.parked[one]
        if self.waits_at_once or not self._is_coming:
            self.settle()

    @property
    def _is_coming(self) -> bool:
        return any(one.stage is Stage.COMING for one in self.parked)

    def use(self, how: str) -> None:
        """The object is about to be used: raise if it is asleep, and wait for what is on its way."""
        if self.is_asleep:
            raise asleep_error(self.title, how)
        self.settle()

    def settle(self) -> None:
        """The caller's stream waits for all that is on its way. If nothing is away then, no hooks are left."""
        for one, items in list(self.parked.items()):
            if one.stage is Stage.COMING:
                one.back()
            if one.stage is Stage.HERE:
                for item in items:
                    if item.tensor is not None:  # a DTensor's wrapper goes with its local tensor's
                        readable(item.tensor)
                if one.kind == "gradients":
                    del self.parked[one]
        if not self.is_asleep and not self.away:
            self._forget_hooks()

    @property
    def is_watching(self) -> bool:
        """Whether it has hooks."""
        return bool(self._handles)

    def _forget_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def memories_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose storages move with `tensor`: itself, or those that it is made of."""
    if isinstance(tensor, DTensor):
        return memories_of(local_of(tensor))
    if is_lazy(tensor):
        return []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [memory for one in inner if isinstance(one, torch.Tensor) for memory in memories_of(one)]
    has_storage = not tensor.is_meta and tensor.layout is torch.strided
    return [tensor] if has_storage else []
