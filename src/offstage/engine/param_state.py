# SPDX-License-Identifier: Apache-2.0
"""`HeldState`: where one parameter's state is kept, and how it is read and written by name.

The names are torch's own (`exp_avg`, `step`, …) plus `master_weight`; how a key is stored (split, bf16, in an arena or
on the device) does not show. Called by `optimizer.py` and `state_dict.py`, after the lanes have been drained.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offstage.config import Placement
from offstage.engine.pipeline import HostState
from offstage.errors import ConfigError
from offstage.rules import master_weights
from offstage.rules.rule import MASTER_KEY, MASTER_LOW_KEY, ParamState, Rule, StateKey
from offstage.tensors import as_param, check_layout, flat_like, like, local_of, local_value, order_of

logger = logging.getLogger("offstage")

_alive: weakref.WeakSet[HeldState] = weakref.WeakSet()


def is_held(param: torch.Tensor) -> bool:
    """Whether some optimizer of ours keeps state of `param`."""
    return any(held.param is param for held in _alive)


@dataclass(eq=False)
class HeldState(ParamState):
    """A parameter's state and its place."""

    rule: Rule = field(kw_only=True)
    placement: Placement = Placement.RESIDENT
    resident: dict[str, torch.Tensor] = field(default_factory=dict)
    """RESIDENT: one flat device tensor per key."""
    host: HostState | None = None
    index: int = 0
    """STREAMED, HOST: its position in the host state's layout."""

    def __post_init__(self) -> None:
        self._made_for = _kind(self.local)
        _alive.add(self)

    def check_unmoved(self) -> None:
        """Raise if the parameter is no longer what the state was made for."""
        now = _kind(self.local)
        if now != self._made_for:
            raise ConfigError(
                f"Parameter {self.name!r} was {_describe(*self._made_for)} at offload() and is {_describe(*now)} now. "
                "Move and convert the model first (model.to(...)), then build the optimizer and call offload()."
            )

    @property
    def nbytes(self) -> int:
        return sum(key.numel(self.local) * key.dtype.itemsize for key in self.keys)

    def raw(self, name: str) -> torch.Tensor:
        """The flat tensor in which `name` is kept, without a copy and with a storage of its own size."""
        if self.host is None:
            return self.resident[name]
        layout = self.host.layout
        return self.host.arenas[name].tensor(layout.offsets[self.index][name], layout.extents[self.index][name])

    def allocate_resident(self, existing: Mapping[str, Any]) -> None:
        """Device tensors for every key: those that exist where their format fits, so that nothing is held twice."""
        for key in self.keys:
            there = existing.get(key.name)
            there = local_of(there) if isinstance(there, torch.Tensor) else there
            if isinstance(there, torch.Tensor) and (there.dtype, there.device) == (key.dtype, self.local.device):
                self.resident[key.name] = flat_like(there, self._like(key))
            else:
                numel = key.numel(self.local)
                self.resident[key.name] = torch.zeros(numel, dtype=key.dtype, device=self.local.device)

    def resident_tensors(self) -> dict[str, torch.Tensor]:
        """RESIDENT: the tensors themselves, as they are kept, in the parameter's shape."""
        return {key.name: self._shaped(None, key) for key in self.keys if self.host is None}

    def adopt(self, other: HeldState, group: dict[str, Any]) -> None:
        """Take over all state of `other`, which was kept elsewhere in the same format, bit for bit."""
        for key in other.keys:
            _copy_into(self.raw(key.name), other.raw(key.name))
        self.set_scalars(other.scalars, group)
        self.present = other.present
        self.rule.adopt(self, other)

    def export(self) -> dict[str, Any]:
        """The state under its public names: live where possible, joined and new where masters are split."""
        special = self._joined() if MASTER_LOW_KEY in self.present else {}
        result: dict[str, Any] = dict(self.scalars)
        for key in self.keys:
            if key.name in self.present:
                name = MASTER_KEY if key.name == MASTER_LOW_KEY else key.name
                shaped = self._shaped(special.get(name), key)
                result[name] = like(shaped, self.param) if key.shape is None else shaped
        return result

    def export_first(self) -> dict[str, Any]:
        """What there would be before its first step; nothing where the rule cannot tell."""
        if self.rule.counts_from is None:
            return {}
        result: dict[str, Any] = {"step": torch.tensor(self.rule.counts_from)}
        for key in self.keys:
            if key.name in (MASTER_KEY, MASTER_LOW_KEY):
                result[MASTER_KEY] = like(self.local.detach().to("cpu", torch.float32), self.param)
            else:
                zeros = torch.zeros(key.numel(self.local), dtype=key.dtype)
                result[key.name] = like(as_param(zeros, self.local), self.param)
        return result

    def _joined(self) -> dict[str, torch.Tensor]:
        """Split masters as fp32, and `exp_avg_sq` without the bit it carries for them."""
        weight = flat_like(self.local, self.local)
        low, squares = self.raw(MASTER_LOW_KEY), self.raw("exp_avg_sq")
        ours = self.rule.wrote(self, weight)
        master, squares = master_weights.join(weight.to(low.device), low, squares)
        return {MASTER_KEY: master if ours else weight.to(low.device, torch.float32), "exp_avg_sq": squares}

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise if `values` cannot be this parameter's state. Changes nothing."""
        shapes = {key.name: tuple(self.param.shape) if key.shape is None else key.shape for key in self.keys}
        if shapes.pop(MASTER_LOW_KEY, None) is not None:
            shapes[MASTER_KEY] = tuple(self.param.shape)
        for name, value in values.items():
            check_layout(value, self.param, f"State {name!r} of parameter {self.name!r}")
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if isinstance(value, torch.Tensor) and (value.is_meta or value.layout != torch.strided):
                kind = "a meta tensor, without data" if value.is_meta else f"of layout {value.layout}"
                raise ConfigError(
                    f"State {name!r} of parameter {self.name!r} is {kind}; expected a dense tensor with data. "
                    "Load the checkpoint itself, not its skeleton."
                )
            if name in shapes and found != shapes[name]:
                raise ConfigError(
                    f"State {name!r} of parameter {self.name!r}: expected shape {shapes[name]}, found {found}. "
                    "Load a checkpoint of this model, or check the order of the parameters."
                )
            is_scalar = not isinstance(value, torch.Tensor) or value.numel() == 1
            if name not in shapes and name not in self.rule.names and not is_scalar:
                raise ConfigError(
                    f"Parameter {self.name!r} keeps {sorted(shapes)}; found state {name!r} of shape {found}. "
                    "Load a checkpoint of the same optimizer class and options."
                )
        missing = self.rule.required - values.keys()
        if values and missing:
            raise ConfigError(
                f"Parameter {self.name!r}: the state to load lacks {sorted(missing)}; found {sorted(values)}. "
                "Load a checkpoint of the same optimizer class and options."
            )

    def load(self, values: Mapping[str, Any], group: dict[str, Any]) -> None:
        """Replace the state by `values`, already checked. An empty mapping means: as before the first step."""
        names = {key.name for key in self.keys}
        unused = sorted((values.keys() & self.rule.names) - names - ({MASTER_KEY} if self.master_kind else set()))
        if unused:
            logger.info("%s: state %s is not used with these options and is not kept", self.name, unused)
        self.set_scalars({n: value for n, value in values.items() if n not in names | self.rule.names}, group)
        for key in self.keys:
            if key.name in values:
                _copy_into(self.raw(key.name), flat_like(self._local_value(key.name, values), self._like(key)))
            else:  # not there yet (a fresh parameter, an option just switched on): starts at zero, as at the first step
                self.raw(key.name).zero_()
        self.present = frozenset(names & values.keys())
        if values and {MASTER_KEY, MASTER_LOW_KEY} & names:
            self._load_master(self._local_value(MASTER_KEY, values) if MASTER_KEY in values else None)

    def _local_value(self, name: str, values: Mapping[str, Any]) -> torch.Tensor:
        return local_value(values[name], self.param, f"State {name!r} of parameter {self.name!r}")

    def set_scalars(self, values: Mapping[str, Any], group: dict[str, Any]) -> None:
        """Replace the numbers that are kept once per parameter."""
        self.scalars = {name: _scalar(name, value, self._scalar_device(name, group)) for name, value in values.items()}

    def _scalar_device(self, name: str, group: dict[str, Any]) -> torch.device:
        on_host = self.placement is Placement.HOST
        return torch.device("cpu") if on_host else self.rule.scalar_device(name, self.param, group)

    def _load_master(self, master: torch.Tensor | None) -> None:
        # Without a master in the checkpoint the weight as it is now is the best there is.
        source = self.local if master is None else master
        flat = flat_like(source, self.local).to("cpu").to(torch.float32)
        if MASTER_KEY in {key.name for key in self.keys}:
            _copy_into(self.raw(MASTER_KEY), flat)
            self.present |= {MASTER_KEY}
            return
        squares = self.raw("exp_avg_sq")
        weight, low, signed = master_weights.split(flat, squares.to("cpu"))
        _copy_into(self.raw(MASTER_LOW_KEY), low)
        _copy_into(squares, signed)
        self.present |= {MASTER_LOW_KEY}
        # These low halves belong to the weights they were split from, which the model may load later.
        self.rule.expect_weight(self, [(0, weight)])

    def _shaped(self, replacement: torch.Tensor | None, key: StateKey) -> torch.Tensor:
        flat = self.raw(key.name) if replacement is None else replacement
        return flat.view(key.shape) if key.shape is not None else as_param(flat, self.local)

    def _like(self, key: StateKey) -> torch.Tensor:
        """A tensor whose memory order the key's flat line follows."""
        return self.local if key.shape is None else torch.empty(key.shape, device="meta")


def _kind(param: torch.Tensor) -> tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]]:
    return param.device, param.dtype, param.shape, order_of(param)


def _describe(device: torch.device, dtype: torch.dtype, shape: torch.Size, order: tuple[int, ...]) -> str:
    return f"{dtype} {tuple(shape)} on {device} (memory order {order})"


def _scalar(name: str, value: Any, device: torch.device) -> Any:
    if name == "step":  # very old checkpoints hold a plain number
        value = torch.as_tensor(value, dtype=torch.float32)
    return local_of(value).detach().clone().to(device) if isinstance(value, torch.Tensor) else value


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.data_ptr() == target.data_ptr() and source.dtype == target.dtype:
        return  # it is there already
    if source.dtype != target.dtype and source.device != target.device:
        source = source.to("cpu")  # converting on the device would take device memory
    if target.device.type != "cpu" and source.dtype != target.dtype:
        source = source.to(target.dtype)
    target.copy_(source)
