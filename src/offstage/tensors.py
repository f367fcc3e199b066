# SPDX-License-Identifier: Apache-2.0
"""A parameter as this rank's flat run of elements: flat views of strided tensors, and local shards of DTensors.

Flat views: weights, gradients and state are all in the parameter's own memory order, so that a piece `[start, stop)`
means the same elements everywhere. DTensors: local shards are taken and described as DTensors again without dispatch
through DTensor and without collectives, except for the norm, which needs one.

[Note: the life of a sharded state] Under FSDP2 and tensor parallelism a parameter is a DTensor: a description of the
whole (mesh, placements, global shape) around the local tensor, this rank's shard.

- FSDP2 owns the local tensor of the *parameter* and may replace it between steps (`model.to`, loading with `assign`).
  So it is looked up whenever it is needed (`ParamState.local`) and never stored.
- The *state* of a parameter has as many elements as the local shard and lives where any other state lives: in arenas,
  slots and on lanes. There it is a plain tensor. Pinning, copies and kernels never see a DTensor.
- It becomes a DTensor when a user reads it (`optimizer.state[p]`, `state_dict()`): the same memory, described by the
  parameter's mesh and placements. `DTensor.from_local` would move a host tensor to the mesh's device, so the
  description is attached directly (`like`). Later steps write to this memory, as they do with plain state.
- A loaded value is a DTensor with the same mesh and placements, of which the local tensor is taken; or a plain tensor
  of the global shape, of which this rank's box is taken (`local_value`).
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import get_total_norm
from torch.utils.weak import WeakIdKeyDictionary

from offstage.errors import ConfigError, OffstageError

# Flat views #


def flat_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`tensor` (`param` itself, its gradient, a state tensor) as one flat tensor in `param`'s memory order.

    A view if possible; a copy if the order differs or the tensor has gaps in memory.
    """
    data = tensor.detach()
    if data.is_contiguous() and param.is_contiguous():
        return data.view(-1)
    if _same_order(data, param):
        return data.as_strided((data.numel(),), (1,))
    copy = torch.empty_strided(param.shape, _dense_strides(param), dtype=data.dtype, device=data.device)
    copy.copy_(data)
    return copy.as_strided((copy.numel(),), (1,))


def as_param(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The inverse of `flat_like`: a flat tensor in `param`'s memory order, viewed in `param`'s shape."""
    if param.is_contiguous():
        return flat.view(param.shape)
    return flat.as_strided(param.shape, _dense_strides(param))


def order_of(param: torch.Tensor) -> tuple[int, ...]:
    """The dims of more than one element, from the outermost in memory to the innermost: the order of a flat tensor."""
    if param.is_contiguous():
        return tuple(dim for dim, size in enumerate(param.shape) if size > 1)
    strides = _dense_strides(param)
    dims = [dim for dim, size in enumerate(param.shape) if size > 1]
    return tuple(sorted(dims, key=lambda dim: -strides[dim]))


def is_dense(param: torch.Tensor) -> bool:
    """Whether `flat_like(param, param)` is a view; otherwise it is a copy."""
    return param.is_contiguous() or _same_order(param, param)


def number_in(value: Any) -> float | None:
    """The real number that `value` is, alone or as the only element of a tensor with data; otherwise `None`."""
    if isinstance(value, torch.Tensor):
        value = local_of(value)
        if value.numel() != 1 or value.is_complex() or value.is_meta or value.layout != torch.strided:
            return None
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


def copy_back(flat: torch.Tensor, param: torch.Tensor) -> None:
    """Write `flat` to `param` if it is a copy (of a parameter with gaps in memory) and not a view."""
    if flat.numel() and flat.data_ptr() != param.data_ptr():
        param.copy_(as_param(flat, param))


def _dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """The strides torch gives to `zeros_like(param)`: the same order, without gaps."""
    return torch.empty_like(param, device="meta").stride()


def _same_order(data: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether `data` lies in memory as `param` does, without gaps."""
    wanted = _dense_strides(param)
    return all(size == 1 or have == want for size, have, want in zip(data.shape, data.stride(), wanted, strict=True))


# Memory that is elsewhere #

GUARD = "_offstage_guard"
"""Attribute of a tensor whose values must not be used as they are: what is asked before."""


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`; while it is asleep its copy on the host, and while it is waking itself, once it is back."""
    guard = vars(tensor).get(GUARD)
    return tensor if guard is None else guard.readable(tensor)  # type: ignore[no-any-return]


# Shards #


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`."""
    # Not `to_local()`: it is an autograd function and returns a view.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Make `model.parameters()` the trained shards: after a forward without backward they are FSDP2's gathered ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def like(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`local`, with an element for each of `param`'s shard, as a DTensor with `param`'s mesh and placements."""
    if not isinstance(param, DTensor):
        return local
    meta = TensorMeta(param.shape, param.stride(), local.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def is_divided(param: torch.Tensor) -> bool:
    """Whether other ranks have a part of `param`. The answer is the same on all ranks of its mesh."""
    return isinstance(param, DTensor) and param.device_mesh.size() > 1


def is_sharded(param: torch.Tensor) -> bool:
    """Whether this rank has only a part of `param`."""
    return isinstance(param, DTensor) and local_of(param).shape != param.shape


def largest_shard(param: torch.Tensor) -> int:
    """The number of elements on the rank with the most of `param`. The answer is the same on all ranks."""
    sizes = list(param.shape)
    if isinstance(param, DTensor):
        for dim, placement in enumerate(param.placements):
            if (sharded := getattr(placement, "dim", None)) is not None:  # a strided shard is not a `Shard`
                sizes[sharded] = -(-sizes[sharded] // param.device_mesh.size(dim))
    return math.prod(sizes)


def local_gradient(param: torch.Tensor, name: str) -> torch.Tensor:
    """This rank's part of the gradient. Every rank of the mesh must call it."""
    grad = param.grad
    if grad is None:
        raise OffstageError(
            f"The gradient of {name!r} was removed by another thread while step() was using it; expected gradients to "
            "stay until step() returns. Zero them in the thread that makes the steps."
        )
    if isinstance(param, DTensor) != isinstance(grad, DTensor):
        kinds = ["a DTensor" if isinstance(one, DTensor) else "a plain tensor" for one in (param, grad)]
        raise ConfigError(
            f"Parameter {name!r} is {kinds[0]} and its gradient is {kinds[1]}; expected the same. Leave gradients as "
            "backward makes them, or assign one with the parameter's mesh and placements."
        )
    place_gradient(param)
    assert param.grad is not None
    return local_of(param.grad)


def place_gradient(param: torch.Tensor) -> None:
    """Give the gradient `param`'s placements, as torch's own optimizers do: tensor parallelism leaves partial sums.

    Every rank of the mesh must call it.
    """
    if not has_placed_gradient(param):
        assert isinstance(param, DTensor)
        assert isinstance(param.grad, DTensor)
        param.grad = param.grad.redistribute(placements=param.placements)


def has_placed_gradient(param: torch.Tensor) -> bool:
    """Whether the gradient has `param`'s placements, so that using it needs no collective."""
    grad = param.grad
    both = isinstance(param, DTensor) and isinstance(grad, DTensor)
    return not both or grad.placements == param.placements  # type: ignore[attr-defined,union-attr]


def local_value(value: torch.Tensor, param: torch.Tensor, name: str) -> torch.Tensor:
    """This rank's part of a state tensor that is loaded for `param`. The caller has checked its global shape."""
    if not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        check_layout(value, param, name)
        return local_of(value)
    offset, size = local_box(param)
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        value = value.narrow(dim, start, length)
    return value


def check_layout(value: Any, param: torch.Tensor, name: str) -> None:
    """Raise if `value` is a DTensor with another mesh or other placements than `param`."""
    if not isinstance(value, DTensor) or not isinstance(param, DTensor):
        return
    if (value.device_mesh, value.placements) != (param.device_mesh, param.placements):
        raise ConfigError(
            f"{name} is laid out as {value.placements} on {value.device_mesh}; expected the parameter's own, "
            f"{param.placements} on {param.device_mesh}. Load through torch.distributed.checkpoint or "
            "offstage.checkpoint.load, which reshard, or redistribute() it first."
        )


def local_box(param: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, size) of this rank's shard in the whole, computed from mesh and placements without a collective."""
    if not isinstance(param, DTensor):
        return (0,) * param.dim(), tuple(param.shape)
    size, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    local = tuple(local_of(param).shape)
    if 0 in local:  # an empty shard may begin anywhere within the whole
        return (0,) * len(local), local
    if tuple(size) != local:
        raise ConfigError(
            f"The local shard of a parameter of shape {tuple(param.shape)} is {local}; its placements "
            f"{param.placements} on {param.device_mesh} imply {tuple(size)}. Expected them to agree."
        )
    return tuple(offset), local


def check_dtensor(param: DTensor, name: str) -> None:
    """Raise if the state of this DTensor cannot be offloaded."""
    local, mesh = local_of(param).device.type, param.device_mesh.device_type
    if local != mesh:
        raise ConfigError(
            f"Parameter {name!r} lives on {local!r} while its mesh is on {mesh!r}: FSDP2's CPUOffloadPolicy has "
            "offloaded it already. Remove offload_policy=CPUOffloadPolicy() from fully_shard()."
        )
    if any(placement.is_partial() for placement in param.placements):
        raise ConfigError(
            f"Parameter {name!r} is placed as {param.placements}: a partial sum, not a weight. Expected Shard or "
            "Replicate. Redistribute it first."
        )


# Weights that live on the host #

_homes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def home_of(param: torch.Tensor) -> torch.device:
    """The device on which `param` is used and updated: where it is, unless it lives on the host and only visits."""
    home: torch.device | None = _homes.get(param)  # type: ignore[no-untyped-call]
    return local_of(param).device if home is None else home


def set_home(param: torch.Tensor, device: torch.device) -> None:
    """`param` is used and updated on `device`, wherever its tensor is."""
    _homes[param] = device


def forget_home(param: torch.Tensor) -> None:
    """`param` is where its tensor is."""
    _homes.pop(param, None)  # type: ignore[no-untyped-call]


# Norms #


def total_norm(
    params: Sequence[torch.Tensor],
    gradients: Mapping[torch.Tensor, torch.Tensor],
    norm_type: float,
    group: dist.ProcessGroup | None = None,
    known: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The norm of `gradients`, over all ranks that hold parts of them, as a plain tensor.

    `known`: norms of some of them (not of DTensors), as `norm_of` gives them; those gradients are not read.

    `params` are all parameters that may have gradients. Every rank of a mesh reduces the same list, with zeros for
    parameters without a gradient on this rank: otherwise ranks whose experts saw no token would skip the collective and
    block the others. `group`: ranks with other parameters (stages of a pipeline), whose norms are included.
    """
    plain = {param: gradient for param, gradient in gradients.items() if not isinstance(gradient, DTensor)}
    norms = [_plain_norm(plain, norm_type, known or {})] if plain else []
    by_layout: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[tuple[torch.Tensor | None, torch.dtype]]] = {}
    for param in params:
        if isinstance(param, DTensor):
            part = local_of(gradients[param]) if param in gradients else None
            dtype = getattr(param, "grad_dtype", param.dtype) or torch.float32  # None: any dtype
            by_layout.setdefault((param.device_mesh, param.placements), []).append((part, dtype))
    for (mesh, placements), parts in by_layout.items():
        norms.append(_norm_over(mesh, placements, parts, norm_type))
    if len(norms) != 1:
        device = norms[0].device if norms else torch.device("cpu")
        there = [norm.to(device) for norm in norms] or [torch.zeros((), dtype=torch.float32, device=device)]
        norms = [torch.linalg.vector_norm(torch.stack(there), norm_type)]
    return _reduced(norms[0], group, norm_type) if group is not None else norms[0]


def _plain_norm(
    gradients: Mapping[torch.Tensor, torch.Tensor], norm_type: float, known: Mapping[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    if known.keys().isdisjoint(gradients):
        return get_total_norm(list(gradients.values()), norm_type)
    # In the order of `get_total_norm`: by device and dtype, each in the order of the gradients.
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param, gradient in gradients.items():
        one = known[param] if param in known else norm_of(gradient, norm_type)
        by_kind.setdefault((one.device, gradient.dtype), []).append(one)
    norms = [one for kind in by_kind.values() for one in kind]
    stacked = torch.stack([one.to(norms[0].device) for one in norms])
    return torch.linalg.vector_norm(stacked, norm_type)  # type: ignore[no-any-return]


def norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of one gradient, rounded as `torch.nn.utils.get_total_norm` rounds that of each."""
    if gradient.device.type == "cpu":
        return torch.linalg.vector_norm(gradient, norm_type)  # type: ignore[no-any-return]
    return torch._foreach_norm([gradient], norm_type)[0]


def _norm_over(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    parts: Sequence[tuple[torch.Tensor | None, torch.dtype]],
    norm_type: float,
) -> torch.Tensor:
    """The norm of gradients of one layout, rounded as `torch.nn.utils.get_total_norm` rounds on DTensors.

    Each part comes with its parameter's dtype: ranks with and without a gradient must reduce tensors of the same dtype.
    """
    there = [part for part, _ in parts if part is not None]
    device = there[0].device if there else _device_of(mesh)
    dtype = functools.reduce(torch.promote_types, (dtype for _, dtype in parts))
    norms = iter(torch._foreach_norm(there, norm_type) if there else ())
    zero = torch.zeros((), device=device, dtype=dtype)
    vector = torch.stack([zero if part is None else next(norms).to(dtype) for part, _ in parts])
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            vector = _reduced(vector, mesh.get_group(dim), norm_type)
    return torch.linalg.vector_norm(vector, norm_type)  # type: ignore[no-any-return]


def _reduced(norms: torch.Tensor, group: dist.ProcessGroup, norm_type: float) -> torch.Tensor:
    """Combine the norms of each rank's parts into the norms over all ranks of `group`."""
    if norm_type == float("inf"):
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=group)
        return norms
    powers = torch.pow(norms, norm_type)
    dist.all_reduce(powers, group=group)
    return torch.pow(powers, 1.0 / norm_type)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
