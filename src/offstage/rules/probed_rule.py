# SPDX-License-Identifier: Apache-2.0
"""`ProbedRule`: any class that treats each element alone does the arithmetic, as a probe has found it to.

It is `TorchRule` with what it keeps read from probes and not from a table. A class is probed for the options of each
group, on each device and in each dtype in which it runs, when the optimizer is made and whenever an option changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.rules.behaviour import Behaviour, Scalar
from offstage.rules.probe import advance, probe
from offstage.rules.rule import MASTER_KEY, PieceUpdate, StateKey
from offstage.rules.subject import Subject, refuse
from offstage.rules.torch_rule import Group, TorchRule, shaped
from offstage.rules.toy import NOT_OPTIONS
from offstage.tensors import home_of, local_of

_CPU = torch.device("cpu")
_NOT_PROBED = (*NOT_OPTIONS, "lr", "initial_lr")
_ENOUGH = 4
"""Options that were probed at so many values of one kind (see `_regime`) are not probed at more of them."""


class ProbedRule(TorchRule):
    """Any optimizer class whose updates are elementwise."""

    def __init__(self, config: OffloadConfig, optimizer: optim.Optimizer) -> None:
        self._subject = Subject(optimizer)
        super().__init__(config, optimizer)
        self._probed: dict[Any, dict[Any, Behaviour]] = {}
        """By what decides about behaviour, and then by the exact options."""
        self._kinds: dict[tuple[torch.dtype, torch.device], None] = {}
        """Where and in which format parameters are updated."""
        self._counters: frozenset[str] = frozenset()
        self._shared: frozenset[Any] = frozenset()
        self._scalar_kinds: dict[str, Scalar] = {}
        self._writes_grad = False
        self._with_closure: str | None = None
        self._used_on_host = False
        self._refused_on_host: ConfigError | None = None
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad or param.grad is not None:  # a frozen one need not be one that could be trained
                    self._check_param(param, self._behaviour_for(local_of(param), group))

    # What it keeps

    def own_keys(self, param: torch.Tensor, group: Group, dtype: torch.dtype) -> tuple[StateKey, ...]:
        behaviour = self._behaviour_for(param, group)
        self._check_param(param, behaviour)
        return behaviour.elements

    def required(self, param: torch.Tensor, group: Group) -> frozenset[str]:
        return self._behaviour_for(param, group).first

    def signature(self, group: Group) -> Any:
        return tuple(self._behaviour_at(group, dtype, device).elements for dtype, device in tuple(self._kinds))

    def scalar_device(self, name: str, param: torch.Tensor, group: Group) -> torch.device:
        kind = self._scalar_kinds.get(name)
        return home_of(param) if kind is not None and kind.on_device else _CPU

    def scalar(self, name: str, value: Any, device: torch.device) -> Any:
        value = local_of(value) if isinstance(value, torch.Tensor) else value
        kind = self._scalar_kinds.get(name)
        return copy.deepcopy(value) if kind is None else kind.of(value, device)

    def splits(self, device: torch.device) -> bool:
        if device.type == "cpu":
            self._used_on_host = True
            if self._refused_on_host is not None:
                raise ConfigError(f"With updates on the host: {self._refused_on_host}") from self._refused_on_host
        return device.type != "cpu"  # as for torch's own classes

    # What it counts

    def shared(self, own_state: dict[Any, Any]) -> dict[Any, Any]:
        return {key: copy.deepcopy(own_state[key]) for key in self._shared & own_state.keys()}

    def stepped(self, groups: Sequence[Group], own_state: dict[Any, Any]) -> None:
        if not self._counters and not self._shared:
            return
        advanced, shared = advance(self._inner, groups, self.shared(own_state), self._counting_device(groups))
        for group, new in zip(groups, advanced, strict=True):
            group.update({name: new[name] for name in self._counters if name in new})
        own_state.update({key: shared[key] for key in self._shared if key in shared})

    def check_closure(self) -> None:
        if self._with_closure is not None:
            raise ConfigError(
                f"step(closure) of {self.title} {self._with_closure}; expected a class that calls the closure once, "
                f"first, and does not look at the loss. Call the closure yourself and then step(), or use {self.title} "
                "without offstage."
            )

    def _counting_device(self, groups: Sequence[Group]) -> torch.device:
        """Where counting waits for nothing: on the host, unless the class cannot run there or has numbers elsewhere."""
        tensors = [one for group in groups for one in group.values() if isinstance(one, torch.Tensor)]
        devices = [one.device for one in tensors if one.device.type != "cpu"]
        if self._refused_on_host is not None:
            devices += [device for _, device in self._kinds]
        return devices[0] if devices else _CPU

    # Updating

    def target_of(self, piece: PieceUpdate, tensor: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(tensor)  # some classes leave out what needs no gradient

    def gradient_for(self, target: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        # A speculative update may be taken back and made again, with the gradient as it was.
        copies = self._writes_grad and self._config.update_in_backward
        return grad.to(target.dtype, copy=copies)

    def options(self, piece: PieceUpdate) -> Group:
        group = super().options(piece)
        group.pop("param_names", None)  # of whole parameters
        # The same call is made for every piece: each counts from the same number on.
        return {**group, **{name: copy.deepcopy(group[name]) for name in self._counters & group.keys()}}

    def collect(self, piece: PieceUpdate, target: torch.Tensor, result: dict[str, Any]) -> None:
        known = {key.name for key in piece.update.of.keys} | self._scalar_kinds.keys()
        if strange := [name for name in result if name not in known]:
            raise ConfigError(
                f"{self.title} keeps {strange[0]!r} from this step on, which it did not when it was probed; expected "
                f"{sorted(known)}. Use {self.title} without offstage."
            )
        weight = piece.state.get(MASTER_KEY, piece.weight)
        if target.numel() and target.data_ptr() != weight.data_ptr():  # `param.data = ...`
            shaped(piece, weight).copy_(target.detach())
        super().collect(piece, target, result)

    # Probing

    def _behaviour_for(self, param: torch.Tensor, group: Group) -> Behaviour:
        dtype = torch.float32 if self.has_master(param) else param.dtype
        self._kinds[dtype, home_of(param)] = None
        return self._behaviour_at(group, dtype, home_of(param))

    def _behaviour_at(self, group: Group, dtype: torch.dtype, device: torch.device) -> Behaviour:
        found = self._behaviour(group, dtype, device)
        if device.type != "cpu":
            self._look_at_host(group, dtype, found)
        return found

    def _look_at_host(self, group: Group, dtype: torch.dtype, on_device: Behaviour) -> None:
        """Updates on the host may be chosen later: find out now whether they are possible."""
        if self._refused_on_host is not None:
            return
        try:
            found = self._behaviour(group, dtype, _CPU)
            if (found.elements, found.first) != (on_device.elements, on_device.first):
                refuse(self.title, "it keeps other state for parameters on the host than on the device")
        except ConfigError as error:
            if self._used_on_host:
                raise
            self._refused_on_host = error

    def _behaviour(self, group: Group, dtype: torch.dtype, device: torch.device) -> Behaviour:
        regime, exact = self._key(group, dtype, device)
        known = self._probed.get(regime, {})
        if exact in known:
            return known[exact]
        if len(known) >= _ENOUGH and len(set(known.values())) == 1:
            return next(iter(known.values()))
        found = probe(self._subject, group, dtype, device)
        self.names |= {key.name for key in found.elements}
        self.scalars |= {name for name, scalar in found.scalars if scalar.kind is not type(None)}
        self._scalar_kinds.update(found.scalars)
        self._counters |= found.counters
        self._shared |= found.shared
        self._writes_grad |= found.writes_grad
        self._with_closure = self._with_closure or found.with_closure
        regime, exact = self._key(group, dtype, device)  # without what it counts, which is known only now
        self._probed.setdefault(regime, {})[exact] = found
        return found

    def _key(self, group: Group, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
        """What of `group` decides about behaviour, and its exact options."""
        names = sorted(name for name in group if name not in _NOT_PROBED and name not in self._counters)
        # What the class's constructor does not know is the user's, who may count in it.
        own = self._inner.defaults.keys()
        kinds = tuple((name, _regime(group[name]) if name in own else type(group[name])) for name in names)
        return (dtype, device, type(group.get("lr")), kinds), tuple(_exact(group[name]) for name in names)

    def _check_param(self, param: torch.Tensor, behaviour: Behaviour) -> None:
        """Raise if `param` has attributes that the class looks at: pieces of it do not have them."""
        if found := sorted(behaviour.asked & vars(param).keys()):
            refuse(
                self.title, f"its step() looks at the attribute {found[0]!r} of parameters, which pieces do not have"
            )


def _regime(value: Any) -> Any:
    """What of an option decides which way a class goes: all of it, except where it is a fraction or a tensor."""
    if isinstance(value, float):
        edges = (0.0, 1.0)
        return "float", value if value in edges or value != value else tuple(value > edge for edge in edges)
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.device, tuple(value.shape)
    return _parts(value, _regime)


def _exact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return _parts(value, _exact)


def _parts(value: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(of, value)
    if isinstance(value, Mapping):
        return type(value).__name__, *((name, of(one)) for name, one in value.items())
    return (type(value).__name__, value) if isinstance(value, Hashable) else id(value)
