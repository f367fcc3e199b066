# SPDX-License-Identifier: Apache-2.0
"""`TorchRule`: the user's own class does the arithmetic, on pieces, with the bits of running it whole.

The class's `step` runs on flat views of weight, gradient and state. Its scalars (`step`, `mu_product`, `eta`) are
given as copies to every piece and kept once per parameter; state that torch has not created yet stays absent; step
hooks do not fire, because they belong to the outer step.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import optim

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.lanes.host_threads import Slice
from offstage.rules.denormals import flushes_denormals, run_flushing
from offstage.rules.rule import MASTER_KEY, ParamUpdate, PieceUpdate, Rule, StateKey
from offstage.rules.shell import on_host, run_step, shell_of
from offstage.tensors import as_param, home_of

Group = dict[str, Any]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def _adam(group: Group) -> tuple[str, ...]:
    return (*_MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else _MOMENTS


def _rmsprop(group: Group) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


def _constant(*names: str) -> Callable[[Group], tuple[str, ...]]:
    return lambda group: names


ELEMENTWISE: dict[type[optim.Optimizer], Callable[[Group], tuple[str, ...]]] = {
    optim.Adadelta: _constant("square_avg", "acc_delta"),
    optim.Adagrad: _constant("sum"),
    optim.Adam: _adam,
    optim.Adamax: _constant("exp_avg", "exp_inf"),
    optim.AdamW: _adam,
    optim.ASGD: _constant("ax"),
    optim.NAdam: _constant(*_MOMENTS),
    optim.RAdam: _constant(*_MOMENTS),
    optim.RMSprop: _rmsprop,
    optim.Rprop: _constant("prev", "step_size"),
    optim.SGD: lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
}
"""Classes that treat each element alone, and the state each keeps per element."""

SCALARS: dict[type[optim.Optimizer], tuple[str, ...]] = {
    optim.ASGD: ("step", "eta", "mu"),
    optim.Muon: (),
    optim.NAdam: ("step", "mu_product"),
    optim.SGD: (),
}
"""What each keeps once per parameter, where that is more or less than `step`."""

_ONE_BY_ONE = (optim.Muon, optim.SGD)
"""Classes that create what they miss. The others create all of a parameter's state at once, and fail without it."""

WHOLE = (optim.Adafactor, optim.Muon)
"""Classes that look at a whole parameter: chunks end between parameters."""

_WITH_EVERYTHING: Group = {"amsgrad": True, "momentum": 1.0, "centered": True}
_EVERY_NAME: dict[type[optim.Optimizer], tuple[str, ...]] = {
    **{cls: names(_WITH_EVERYTHING) for cls, names in ELEMENTWISE.items()},
    optim.Adafactor: ("row_var", "col_var", "variance"),
    optim.Muon: ("momentum_buffer",),
}


class TorchRule(Rule):
    """A class of `torch.optim`, or one that does the same."""

    threads_itself = True

    def __init__(
        self, config: OffloadConfig, optimizer: optim.Optimizer, kind: type[optim.Optimizer] | None = None
    ) -> None:
        """`kind`: the class whose arithmetic it has, if that is another than its own."""
        self._config = config
        self._class = type(optimizer) if kind is None else kind
        self.title, self.whole = self._class.__name__, self._class in WHOLE
        self._inner = shell_of(optimizer)
        self.names = frozenset({MASTER_KEY, *_EVERY_NAME.get(self._class, ())})
        self.scalars = frozenset(SCALARS.get(self._class, ("step",) if self._class in _EVERY_NAME else ()))
        self.counts_from = 0.0 if self._class in (optim.Adam, optim.AdamW) else None
        self._foreign: dict[torch.device, torch.Tensor] = {}
        self._foreign_before: dict[torch.device, torch.Tensor] = {}
        self._remembered: dict[torch.device, int] = {}
        self._counting = threading.Lock()
        self._found = 0

    @property
    def external_on_host(self) -> int:
        return self._found

    def keys(self, param: torch.Tensor, group: Group) -> tuple[StateKey, ...]:
        master = self.has_master(param)
        if master and self._config.master_weights == "split":
            raise ConfigError(
                f"master_weights='split' keeps a bit in Adam's exp_avg_sq and works with Adam and AdamW; found "
                f"{self._class.__name__}. Use master_weights='fp32'."
            )
        dtype = torch.float32 if master else param.dtype
        masters = (StateKey(MASTER_KEY, torch.float32),) if master else ()
        return (*masters, *self.own_keys(param, group, dtype))

    def has_master(self, param: torch.Tensor) -> bool:
        """Whether the class runs on an fp32 master of `param`."""
        return param.dtype in (torch.bfloat16, torch.float16) and self._config.master_weights != "none"

    def own_keys(self, param: torch.Tensor, group: Group, dtype: torch.dtype) -> tuple[StateKey, ...]:
        """What the class itself keeps for `param`, or for its master, which is of `dtype`."""
        if self._class in ELEMENTWISE:
            return tuple(StateKey(name, dtype) for name in ELEMENTWISE[self._class](group))
        if self._class is optim.Muon:
            return (StateKey("momentum_buffer", dtype),)
        if param.dim() > 1:
            rows, columns = list(param.shape), list(param.shape)
            rows[-1], columns[-2] = 1, 1
            return StateKey("row_var", dtype, tuple(rows)), StateKey("col_var", dtype, tuple(columns))
        return (StateKey("variance", dtype),)

    def required(self, param: torch.Tensor, group: Group) -> frozenset[str]:
        if self._class in _ONE_BY_ONE:
            return frozenset()
        return self.scalars | {key.name for key in self.keys(param, group)} - {MASTER_KEY}

    def signature(self, group: Group) -> Any:
        return ELEMENTWISE[self._class](group) if self._class in ELEMENTWISE else None

    def scalar_device(self, name: str, param: torch.Tensor, group: Group) -> torch.device:
        on_device = group.get("capturable") or group.get("fused") or name in ("eta", "mu")
        return home_of(param) if on_device else torch.device("cpu")

    def splits(self, device: torch.device) -> bool:
        # On CPU tensors torch's vectorised loops round the last few elements differently, so where a piece ends
        # would change bits.
        return self._class in ELEMENTWISE and device.type != "cpu"

    def update(self, pieces: Sequence[PieceUpdate]) -> None:
        if not pieces:
            return
        groups: dict[int, Group] = {}
        inner_state: defaultdict[Any, Any] = defaultdict(dict, copy.deepcopy(pieces[0].update.shared))
        targets = [self._prepare(piece, inner_state) for piece in pieces]
        for piece, target in zip(pieces, targets, strict=True):
            number = piece.update.group_number
            groups.setdefault(number, self.options(piece))["params"].append(target)
        run_step(self._inner, list(groups.values()), inner_state)
        for piece, target in zip(pieces, targets, strict=True):
            self.collect(piece, target, inner_state[target])

    def slices(self, pieces: Sequence[PieceUpdate]) -> list[Slice]:
        # torch has threads of its own for the elements of a tensor.
        return [functools.partial(run_flushing, flushes_denormals(), self.update, pieces)]

    def finish(self, updates: Sequence[ParamUpdate]) -> None:
        for update in updates:
            update.of.scalars, update.of.present = update.scalars, update.created

    def remember(self, device: torch.device, update: ParamUpdate) -> None:
        if self._remembered.get(device) != update.iteration and device in self._foreign:
            self._foreign_before[device] = self._foreign[device].clone()
            self._remembered[device] = update.iteration

    def revert(self, device: torch.device, updates: Sequence[ParamUpdate]) -> None:
        if device in self._foreign:
            before = self._foreign_before.get(device)
            self._foreign[device].copy_(before if before is not None else torch.zeros_like(self._foreign[device]))

    def rest(self, device: torch.device) -> None:
        for counts in (self._foreign, self._foreign_before):
            if device in counts:
                counts[device] = counts[device].cpu()

    def external_writes(self, device: torch.device) -> torch.Tensor | None:
        return self._foreign.get(device)

    def _prepare(self, piece: PieceUpdate, inner_state: dict[torch.Tensor, dict[str, Any]]) -> torch.Tensor:
        """The tensor the inner optimizer updates: the weight, or the fp32 master; with its gradient and state."""
        update = piece.update
        weight, grad = piece.weight, piece.grad
        if piece.scale is not None:
            grad = grad * piece.scale
        if MASTER_KEY in piece.state:
            master = piece.state[MASTER_KEY]
            self._refresh(master, weight, piece)
            weight = master
        target = self.target_of(piece, shaped(piece, weight.detach()))
        target.grad = shaped(piece, self.gradient_for(target, grad))
        for key in update.of.keys:
            if key.name in update.of.present and key.name != MASTER_KEY:
                inner_state[target][key.name] = shaped(piece, piece.state[key.name], key)
        for name, value in update.of.scalars.items():
            inner_state[target][name] = self._copy_of(name, value, piece) if isinstance(value, torch.Tensor) else value
        return target

    def _copy_of(self, name: str, value: torch.Tensor, piece: PieceUpdate) -> torch.Tensor:
        """A copy of the scalar `value` where the class wants it: it may have rested on the host."""
        if piece.host_copies is None:
            home = self.scalar_device(name, piece.update.of.param, piece.update.group)
            if home.type != "cpu":
                return value.to(home, non_blocking=True, copy=True)
        return value.clone()

    def target_of(self, piece: PieceUpdate, tensor: torch.Tensor) -> torch.Tensor:
        """What the class takes for a parameter, in the memory of `tensor`."""
        return tensor

    def gradient_for(self, target: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of `target`, flat."""
        return grad.to(target.dtype)

    def options(self, piece: PieceUpdate) -> Group:
        """The group's hyperparameters for the class; on the host, without what only a device can do."""
        group: Group = {**piece.update.group, "params": []}
        return group if piece.host_copies is None else on_host(group)

    def collect(self, piece: PieceUpdate, target: torch.Tensor, result: dict[str, Any]) -> None:
        """Keep what the class has made of the state of `target`, which stands for `piece`."""
        update = piece.update
        names = {key.name for key in update.of.keys}
        for key in update.of.keys:
            kept = result.get(key.name)
            if kept is None:
                continue
            place = shaped(piece, piece.state[key.name], key)
            if kept.data_ptr() != place.data_ptr():  # created by this step
                place.copy_(kept)
        masters = {MASTER_KEY} & piece.state.keys()
        update.created = frozenset(names & result.keys()) | masters
        update.scalars = {name: value for name, value in result.items() if name not in names}
        if masters:
            piece.weight.copy_(piece.state[MASTER_KEY])

    def _refresh(self, master: torch.Tensor, weight: torch.Tensor, piece: PieceUpdate) -> None:
        """Where the weight is no longer the rounded master, the weight wins ([Note: who wrote the weight])."""
        same_bits = master.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
        foreign = ~(same_bits | (master.isnan() & weight.isnan()))
        master.copy_(torch.where(foreign, weight.to(torch.float32), master))
        if piece.host_copies is not None:
            if not piece.update.fresh:
                with self._counting:  # in threads of the host
                    self._found += int(foreign.sum())
        elif not piece.update.fresh:
            counter = self._counter_on(weight.device)
            counter += foreign.sum()

    def _counter_on(self, device: torch.device) -> torch.Tensor:
        """Made, or back from where it rested."""
        found = self._foreign.get(device)
        if found is None or found.device != device:
            rested = torch.zeros(1, dtype=torch.int64, device="cpu") if found is None else found
            found = self._foreign[device] = rested.to(device)
        return found


def shaped(piece: PieceUpdate, flat: torch.Tensor, key: StateKey | None = None) -> torch.Tensor:
    """`flat` as the inner optimizer should see it: a whole parameter in its own shape, a piece flat."""
    param = piece.update.of.local
    if key is not None and key.shape is not None:
        return flat.view(key.shape)
    if piece.first and piece.last:
        return as_param(flat, param)
    return flat.view(-1)
