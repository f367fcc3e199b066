# SPDX-License-Identifier: Apache-2.0
"""A parameter's state read and written by name, after the lanes have been drained.

The names are torch's own (`exp_avg`, `step`, …) plus `master_weight`; how a key is stored (split, bf16, in an arena or
on the device) does not show.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from offstage.config import Placement
from offstage.errors import ConfigError
from offstage.rules import master_weights
from offstage.rules.rule import MASTER_KEY, MASTER_LOW_KEY, ParamState, StateKey
from offstage.tensors import as_param, check_layout, flat_like, like, local_of, local_value, number_in

logger = logging.getLogger("offstage")


def allocate_resident(state: ParamState, existing: Mapping[str, Any]) -> None:
    """Device tensors for every key: those that exist where their format fits, so that nothing is held twice."""
    for key in state.keys:
        there = existing.get(key.name)
        there = local_of(there) if isinstance(there, torch.Tensor) else there
        if isinstance(there, torch.Tensor) and (there.dtype, there.device) == (key.dtype, state.device):
            state.resident[key.name] = flat_like(there, _like(state, key))
        else:
            numel = key.numel(state.local)
            state.resident[key.name] = torch.zeros(numel, dtype=key.dtype, device=state.device)


def resident_tensors(state: ParamState) -> dict[str, torch.Tensor]:
    """RESIDENT: the tensors themselves, as they are kept, in the parameter's shape."""
    return {key.name: _shaped(state, None, key) for key in state.keys if state.home is None}


def adopt(state: ParamState, other: ParamState, group: dict[str, Any]) -> None:
    """Take over all state of `other`, which was kept elsewhere in the same format, bit for bit."""
    for key in other.keys:
        _copy_into(state.raw(key.name), other.raw(key.name))
    set_scalars(state, other.scalars, group)
    state.present = other.present
    state.rule.adopt(state, other)


def export(state: ParamState) -> dict[str, Any]:
    """The state under its public names: live where possible, joined and new where masters are split."""
    special = _joined(state) if MASTER_LOW_KEY in state.present else {}
    result: dict[str, Any] = dict(state.scalars)
    for key in state.keys:
        if key.name in state.present:
            name = MASTER_KEY if key.name == MASTER_LOW_KEY else key.name
            shaped = _shaped(state, special.get(name), key)
            result[name] = like(shaped, state.param) if key.shape is None else shaped
    return result


def export_first(state: ParamState) -> dict[str, Any]:
    """What there would be before its first step; nothing where the rule cannot tell."""
    if state.rule.counts_from is None:
        return {}
    result: dict[str, Any] = {"step": torch.tensor(state.rule.counts_from, dtype=torch.float32, device="cpu")}
    for key in state.keys:
        if key.name in (MASTER_KEY, MASTER_LOW_KEY):
            result[MASTER_KEY] = like(state.local.detach().to("cpu", torch.float32), state.param)
        else:
            zeros = torch.zeros(key.numel(state.local), dtype=key.dtype, device="cpu")
            result[key.name] = like(as_param(zeros, state.local), state.param)
    return result


def _joined(state: ParamState) -> dict[str, torch.Tensor]:
    """Split masters as fp32, and `exp_avg_sq` without the bit it carries for them."""
    weight = flat_like(state.local, state.local)
    low, squares = state.raw(MASTER_LOW_KEY), state.raw("exp_avg_sq")
    ours = state.rule.wrote(state, weight)
    master, squares = master_weights.join(weight.to(low.device), low, squares)
    return {MASTER_KEY: master if ours else weight.to(low.device, torch.float32), "exp_avg_sq": squares}


def check(state: ParamState, values: Mapping[str, Any], group: dict[str, Any]) -> None:
    """Raise if `values` cannot be this parameter's state with the options of `group`. Changes nothing."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"State of parameter {state.name!r}: expected a dict by name; found {type(values).__name__}. Load the "
            "optimizer's part of a checkpoint."
        )
    for name, value in values.items():
        check_one(state, name, value)
    check_complete(state, values.keys(), group)


def check_one(state: ParamState, name: str, value: Any) -> None:
    """Raise if `value` cannot be this parameter's `name`. Changes nothing."""
    shapes = {key.name: tuple(state.param.shape) if key.shape is None else key.shape for key in state.keys}
    if shapes.pop(MASTER_LOW_KEY, None) is not None:
        shapes[MASTER_KEY] = tuple(state.param.shape)
    check_layout(value, state.param, f"State {name!r} of parameter {state.name!r}")
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if isinstance(value, torch.Tensor) and (value.is_meta or value.layout != torch.strided):
        kind = "a meta tensor, without data" if value.is_meta else f"of layout {value.layout}"
        raise ConfigError(
            f"State {name!r} of parameter {state.name!r} is {kind}; expected a dense tensor with data. "
            "Load the checkpoint itself, not its skeleton."
        )
    if name in shapes and found != shapes[name]:
        raise ConfigError(
            f"State {name!r} of parameter {state.name!r}: expected shape {shapes[name]}, found {found}. "
            "Load a checkpoint of this model, or check the order of the parameters."
        )
    if name in state.rule.names and isinstance(value, torch.Tensor) and not value.is_floating_point():
        raise ConfigError(
            f"State {name!r} of parameter {state.name!r}: expected a floating point format, found {value.dtype}. "
            "Load a checkpoint of the same optimizer class."
        )
    check_scalar(state, name, value)
    is_scalar = not isinstance(value, torch.Tensor) or value.numel() == 1
    if name not in shapes and name not in state.rule.names and not is_scalar:
        raise ConfigError(
            f"Parameter {state.name!r} keeps {sorted(shapes)}; found state {name!r} of shape {found}. "
            "Load a checkpoint of the same optimizer class and options."
        )


def check_scalar(state: ParamState, name: str, value: Any) -> None:
    """Raise if `value`, loaded as `name`, is one of the rule's numbers per parameter and no sensible one."""
    if name != "step" and name not in state.rule.scalars:
        return
    number = number_in(value)
    if number is None or not math.isfinite(number) or (name == "step" and (number < 0 or number != int(number))):
        expected = "the number of updates so far, 0 or more" if name == "step" else "a finite number"
        found = type(value).__name__ if number is None else number
        raise ConfigError(
            f"State {name!r} of parameter {state.name!r}: expected {expected}; found {found}. Use another checkpoint, "
            "or load without the optimizer."
        )


def check_names(state: ParamState, values: Mapping[str, Any]) -> None:
    """Raise if one of `values`, assigned by name, is nothing that the rule keeps, nor loaded from a state dict."""
    known = state.rule.names | state.rule.scalars | {"step"} | state.scalars.keys()
    if unknown := sorted(str(name) for name in values.keys() - known):
        kept = sorted(({key.name for key in state.keys} | state.rule.scalars) - {MASTER_LOW_KEY})
        raise ConfigError(
            f"State {unknown[0]!r} of parameter {state.name!r}: {state.rule.title} keeps {kept} and would not use it. "
            f"Keep values of your own beside the parameters': optimizer.state[{unknown[0]!r}]."
        )


def check_complete(state: ParamState, names: Collection[str], group: dict[str, Any]) -> None:
    """Raise if state is loaded in part. No state at all is that of a parameter before its first update."""
    missing = state.rule.required(state.local, group) - set(names)
    if names and missing:
        raise ConfigError(
            f"Parameter {state.name!r}: the state to load lacks {sorted(missing)}; found {sorted(names)}. Load a "
            "checkpoint of the same optimizer class and options, or leave out all state of the parameter: its moments "
            "and bias corrections then begin anew."
        )


def load(state: ParamState, values: Mapping[str, Any], group: dict[str, Any]) -> None:
    """Replace the state by `values`, already checked. An empty mapping means: as before the first step."""
    names = {key.name for key in state.keys}
    unused = sorted((values.keys() & state.rule.names) - names - ({MASTER_KEY} if state.master_kind else set()))
    if unused:
        logger.info("%s: state %s is not used with these options and is not kept", state.name, unused)
    set_scalars(state, {n: value for n, value in values.items() if n not in names | state.rule.names}, group)
    for key in state.keys:
        if key.name in values:
            _copy_into(state.raw(key.name), flat_like(_local_value(state, key.name, values), _like(state, key)))
        else:  # not there yet (a fresh parameter, an option just switched on): starts at zero, as at the first step
            state.raw(key.name).zero_()
    state.present = frozenset(names & values.keys())
    if values and {MASTER_KEY, MASTER_LOW_KEY} & names:
        _load_master(state, _local_value(state, MASTER_KEY, values) if MASTER_KEY in values else None)


def is_alone(state: ParamState, name: str) -> bool:
    """Whether what is kept under `name` can be written without the rest: split masters share a bit with a moment."""
    split = MASTER_LOW_KEY in {key.name for key in state.keys} and name in (MASTER_KEY, "exp_avg_sq")
    return not split and (name in state.present or name in state.scalars)


def load_one(state: ParamState, name: str, value: Any, group: dict[str, Any]) -> None:
    """Replace what is kept under `name`, already checked, and nothing else."""
    for key in state.keys:
        if key.name == name:
            _copy_into(state.raw(name), flat_like(_local_value(state, name, {name: value}), _like(state, key)))
            return
    set_scalars(state, {**state.scalars, name: value}, group)


def _local_value(state: ParamState, name: str, values: Mapping[str, Any]) -> torch.Tensor:
    return local_value(values[name], state.param, f"State {name!r} of parameter {state.name!r}")


def set_scalars(state: ParamState, values: Mapping[str, Any], group: dict[str, Any]) -> None:
    """Replace the numbers that are kept once per parameter."""
    state.scalars = {
        name: state.rule.scalar(name, value, _scalar_device(state, name, group)) for name, value in values.items()
    }


def rest_scalars(state: ParamState) -> None:
    """The job sleeps: the numbers that are on the device wait on the host until the next update.

    Some classes make there what they take from the host as well (ASGD's `step`): it goes, too.
    """
    state.scalars = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.scalars.items()
    }


def _scalar_device(state: ParamState, name: str, group: dict[str, Any]) -> torch.device:
    on_host = state.placement is Placement.HOST
    return torch.device("cpu") if on_host else state.rule.scalar_device(name, state.param, group)


def _load_master(state: ParamState, master: torch.Tensor | None) -> None:
    # Without a master in the checkpoint the weight as it is now is the best there is.
    source = state.local if master is None else master
    flat = flat_like(source, state.local).to("cpu").to(torch.float32)
    if MASTER_KEY in {key.name for key in state.keys}:
        _copy_into(state.raw(MASTER_KEY), flat)
        state.present |= {MASTER_KEY}
        return
    squares = state.raw("exp_avg_sq")
    weight, low, signed = master_weights.split(flat, squares.to("cpu"))
    _copy_into(state.raw(MASTER_LOW_KEY), low)
    _copy_into(squares, signed)
    state.present |= {MASTER_LOW_KEY}
    # These low halves belong to the weights they were split from, which the model may load later.
    state.rule.expect_weight(state, [(0, weight)])


def _shaped(state: ParamState, replacement: torch.Tensor | None, key: StateKey) -> torch.Tensor:
    flat = state.raw(key.name) if replacement is None else replacement
    return flat.view(key.shape) if key.shape is not None else as_param(flat, state.local)


def _like(state: ParamState, key: StateKey) -> torch.Tensor:
    """A tensor whose memory order the key's flat line follows."""
    return state.local if key.shape is None else torch.empty(key.shape, dtype=key.dtype, device="meta")


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.data_ptr() == target.data_ptr() and source.dtype == target.dtype:
        return  # it is there already
    if source.dtype != target.dtype and source.device != target.device:
        source = source.to("cpu")  # converting on the device would take device memory
    if target.device.type != "cpu" and source.dtype != target.dtype:
        source = source.to(target.dtype)
    target.copy_(source)
