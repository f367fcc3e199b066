# SPDX-License-Identifier: Apache-2.0
"""Refusals: what cannot be offloaded, said once and clearly before anything moved."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from offstage.errors import ConfigError
from offstage.memory.guarded import unguarded
from offstage.rules.rule import ParamState
from offstage.tensors import check_dtensor, local_of, number_in, reshard


def check_optimizer(optimizer: Any, model: torch.nn.Module | None) -> None:
    """Raise if `optimizer` is not one that `offload()` can take over."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"offload() expects a torch.optim.Optimizer; found {type(optimizer).__name__}. "
            "Build the optimizer as usual and pass it: offstage.offload(optimizer, model)."
        )
    if getattr(optimizer, "_offstage_consumed", False):
        raise ConfigError(
            f"This {type(optimizer).__name__} is already offloaded; expected one that is not. "
            "Use the optimizer that the first offload() returned."
        )
    if model is not None:
        check_model(optimizer, model)
    check_options(optimizer.param_groups)


def check_options(groups: Iterable[dict[str, Any]]) -> None:
    """Raise if a group asks for something that cannot be had with state elsewhere."""
    for number, group in enumerate(groups):
        if group.get("differentiable"):
            raise ConfigError(
                f"Parameter group {number} has differentiable=True, which needs all state on the device. "
                "Use differentiable=False."
            )


def check_saved_options(
    kind: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    groups: Iterable[dict[str, Any]],
    *,
    is_probed: bool = False,
) -> None:
    """Raise if groups of a checkpoint have options with which no optimizer of the class `kind` could be made.

    The class's own constructor decides, on a parameter of one element; `is_probed`: the class is probed with these
    options instead, when state is placed for them. Options that a class does not know are the user's.
    """
    known = sorted(inspect.signature(kind).parameters.keys() & defaults.keys())
    for number, group in enumerate(groups):
        if missing := [name for name in known if name not in group]:
            raise ConfigError(
                f"Saved parameter group {number} lacks {missing}; expected those of this optimizer's class, found "
                f"{', '.join(sorted(map(str, group)))[:200]}. Load a checkpoint of the same optimizer class."
            )
        if is_probed:
            continue
        try:
            for name in known:
                _check_kind(name, group[name], defaults[name])
            options = {name: _as_floats(group[name]) for name in known}
            kind([torch.zeros(1, 1, dtype=torch.float32, device="cpu")], **options)
        except Exception as error:  # each class has its own way to refuse an option
            found = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"Saved parameter group {number}: expected options that {kind.__name__} takes; found {found}. Use "
                "another checkpoint, or correct the options in its state dict."
            ) from error


def _check_kind(name: str, value: Any, default: Any) -> None:
    """Raise unless `value` is of the kind of `default`: constructors compare numbers, and not all of them."""
    if default is None:  # the constructor's own affair
        return
    if isinstance(default, bool):
        if value is not None and value not in (False, True):
            raise ValueError(f"{name} is {value!r} in place of a bool")
    elif isinstance(default, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(default):
            raise ValueError(f"{name} is {value!r} in place of {len(default)} numbers")
        for one in value:
            found = number_in(one)
            if one is not None and (found is None or math.isnan(found)):
                raise ValueError(f"{name} is {value!r}, with {one!r} in place of a number")
    elif (found := number_in(value)) is None or not math.isfinite(found):
        raise ValueError(f"{name} is {value!r} in place of a finite number")


def _as_floats(value: Any) -> Any:
    """Numbers as the constructors want them: some take 0.0 and refuse 0, and numpy's floats."""
    if isinstance(value, (list, tuple)):
        return tuple(_as_floats(one) for one in value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value


def check_param(param: torch.Tensor, name: str) -> None:
    """Raise if this parameter's state cannot be offloaded."""
    # Such a tensor answers operations itself, and its values are in others, which its class knows: offstage reads and
    # writes the memory of a weight.
    kinds = [type(one) for one in (param, local_of(param)) if not isinstance(one, DTensor)]
    if strange := [kind for kind in kinds if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__]:
        raise ConfigError(
            f"Parameter {name!r} is a {strange[0].__module__}.{strange[0].__qualname__}, a class of tensors with "
            "operations of its own; expected a plain tensor or a DTensor. Convert it, or give it another optimizer."
        )
    if param.is_complex():
        raise ConfigError(
            f"Parameter {name!r} is complex ({param.dtype}); offstage updates real parameters. "
            "Store it as a real tensor (torch.view_as_real), or give complex parameters an optimizer of their own."
        )
    if isinstance(param, DTensor):
        check_dtensor(param, name)
    if param.layout != torch.strided:
        raise ConfigError(
            f"Parameter {name!r} has layout {param.layout}; expected a dense (strided) parameter. "
            "Convert it with to_dense(), or give it an optimizer of its own."
        )


def check_initialised(groups: Iterable[dict[str, Any]], names: Mapping[torch.Tensor, str]) -> None:
    """Raise if a parameter has no values yet: one of a lazy module, or on the meta device."""
    for number, param in enumerate(param for group in groups for param in group["params"]):
        name = names.get(param, f"number {number}")
        if is_lazy(param):
            raise ConfigError(
                f"Parameter {name!r} of a lazy module has no shape yet; expected parameters with values. Run one "
                "forward first, then build the optimizer and call offload()."
            )
        if param.is_meta:
            raise ConfigError(
                f"Parameter {name!r} is on the meta device, without data; expected parameters with values. Load or "
                "initialise the model first (model.to_empty(device=...)), then build the optimizer and call offload()."
            )


def check_no_duplicates(groups: Iterable[dict[str, Any]], names: dict[torch.Tensor, str]) -> None:
    """Raise if a parameter is given twice."""
    seen: set[torch.Tensor] = set()
    for group in groups:
        for param in group["params"]:
            if param in seen:
                raise ConfigError(
                    f"Parameter {names.get(param, tuple(param.shape))!r} is given twice; expected every parameter "
                    "once. Remove it from one of the groups (tied weights are one parameter)."
                )
            seen.add(param)


def check_no_overlap(params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
    """Raise if two parameters have elements in the same memory, as `nn.Parameter(other.t())` has.

    Each would be updated from its own copy of the weights, and the last to be written would win. Disjoint views of one
    buffer are fine. Frozen parameters count: the optimizer is not told when they are no longer frozen.
    """
    spans: dict[torch.device, list[tuple[int, int, torch.Tensor]]] = {}
    for param in params:
        local = local_of(param)
        with unguarded():
            start = local.data_ptr()
        if local.numel() and start:  # 0: on the meta device, or its memory is elsewhere for now
            spans.setdefault(local.device, []).append((start, start + _span_bytes(local), param))
    for on_device in spans.values():
        on_device.sort(key=lambda span: span[:2])
        together: list[torch.Tensor] = []
        end = 0
        for start, stop, param in on_device:
            if start >= end:
                _check_runs(together, names)
                together = []
            together.append(param)
            end = max(end, stop)
        _check_runs(together, names)


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _check_runs(params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
    """Raise if two of `params`, whose spans overlap, have a byte in common. Exact: columns of one matrix have none."""
    if len(params) < 2:
        return
    runs = [_runs(local_of(param)) for param in params]
    starts = torch.cat([start for start, _ in runs])
    ends = torch.cat([start + length for start, length in runs])
    owners = torch.cat([torch.full_like(start, number) for number, (start, _) in enumerate(runs)])
    order = starts.argsort(stable=True)
    reached = ends[order].cummax(0)
    clashes = (starts[order][1:] < reached.values[:-1]).nonzero()
    if len(clashes):
        later = int(clashes[0])
        pair = {int(owners[order[reached.indices[later]]]), int(owners[order[later + 1]])}
        first, second = (names.get(params[i], f"of shape {tuple(params[i].shape)}") for i in sorted(pair))
        raise ConfigError(
            f"Parameters {first!r} and {second!r} share memory; expected every parameter to have its own. Tie weights "
            "by assigning the same nn.Parameter to both modules (and transpose in forward), or give the optimizer one "
            "of the two."
        )


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The addresses of the tensor's contiguous runs, and the bytes of each."""
    length = tensor.itemsize
    with unguarded():
        start = tensor.data_ptr()
    starts = torch.tensor([start], dtype=torch.int64, device="cpu")
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.itemsize
        if len(starts) == 1 and step <= length:
            length += (size - 1) * step
        else:
            starts = (starts[:, None] + torch.arange(size, dtype=torch.int64, device="cpu") * step).flatten()
    return starts, length


def check_grad(device: torch.device, grad: torch.Tensor, name: str) -> None:
    """Raise if this gradient cannot be used. Called for every gradient before anything moves."""
    if grad.layout != torch.strided:
        raise ConfigError(
            f"Parameter {name!r} has a sparse gradient ({grad.layout}); expected a dense one. "
            "Use nn.Embedding(sparse=False), or keep this parameter in a torch.optim.SparseAdam of its own."
        )
    if grad.device != device:
        raise ConfigError(
            f"Parameter {name!r} is on {device} and its gradient on {grad.device}; expected the same device. "
            "Move the gradient, or the model before backward."
        )


def check_left_dtype(grad: torch.Tensor, state: ParamState) -> None:
    """Raise if the gradient of a weight that lives on the host has no room in its memory there."""
    if grad.dtype != state.local.dtype:
        raise ConfigError(
            f"The gradient of {state.name!r}, which lives on the host, is {grad.dtype}; expected "
            f"{state.local.dtype}, as the weight. Leave out grad_dtype, or keep the weights on the device."
        )


def check_model(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Raise if `model` is not one whose parameters `optimizer` could train."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model expects a torch.nn.Module; found {type(model).__name__}. Leave it out, or pass the model."
        )
    if any(isinstance(module, FSDPModule) and _offloads_params(module) for module in model.modules()):
        raise ConfigError(
            "The model was sharded with FSDP2's CPUOffloadPolicy, which moves parameters, gradients and the update to "
            "the host already; expected parameters that stay on the device. Remove "
            "offload_policy=CPUOffloadPolicy() from fully_shard()."
        )
    reshard(model)
    there = set(model.parameters())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(isinstance(module, FSDPModule) for module in model.modules()) and not there.issuperset(params):
        missing = [param for param in params if param not in there]
        raise ConfigError(
            f"{len(missing)} of the optimizer's {len(params)} parameters (first: of shape {tuple(missing[0].shape)}) "
            "are not in the sharded model; expected all of them. Was the optimizer built before fully_shard()? Shard "
            "first, then build the optimizer, then call offload()."
        )
    if there.isdisjoint(params):
        raise ConfigError(
            "None of the optimizer's parameters belong to the given model; expected the model they came from. "
            "Was the model rebuilt or wrapped after the optimizer was made? Build the optimizer last."
        )


def _offloads_params(module: FSDPModule) -> bool:
    # FSDP2 has no public way to ask; a missing attribute means another layout of its internals, not an error.
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on: parameters may be on several meshes
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    params = [param for group in groups for param in getattr(group, "fsdp_params", ())]
    return any(getattr(param, "offload_to_cpu", False) for param in params)
