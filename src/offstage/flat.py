# SPDX-License-Identifier: Apache-2.0
"""Flat views: one line of elements in the parameter's own memory order, whatever its strides. Pure torch views.

State in the arenas, weights and gradients all use this order, so a piece `[start, stop)` means the same elements
everywhere. Called by `optimizer.py`, `held_state.py` and `rules/`.
"""

from __future__ import annotations

import torch


def flat_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`tensor` (`param` itself, its gradient, a state tensor) as one line in `param`'s memory order.

    A view wherever that is possible; a copy where the order differs or the tensor has gaps in memory.
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
    """The inverse: a flat line in `param`'s memory order, seen in `param`'s shape."""
    if param.is_contiguous():
        return flat.view(param.shape)
    return flat.as_strided(param.shape, _dense_strides(param))


def order_of(param: torch.Tensor) -> tuple[int, ...]:
    """The dims of more than one element, from the outermost in memory to the innermost: what a flat line depends on."""
    if param.is_contiguous():
        return tuple(dim for dim, size in enumerate(param.shape) if size > 1)
    strides = _dense_strides(param)
    dims = [dim for dim, size in enumerate(param.shape) if size > 1]
    return tuple(sorted(dims, key=lambda dim: -strides[dim]))


def is_dense(param: torch.Tensor) -> bool:
    """Whether a flat line of `param` is a view of it; otherwise it is a copy."""
    return param.is_contiguous() or _same_order(param, param)


def copy_back(flat: torch.Tensor, param: torch.Tensor) -> None:
    """Write `flat` to `param` if it is a copy of it (a parameter with gaps in memory) and not a view."""
    if flat.numel() and flat.data_ptr() != param.data_ptr():
        param.copy_(as_param(flat, param))


def _dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """The strides torch gives to `zeros_like(param)`: the same order, without gaps."""
    return torch.empty_like(param.detach(), device="meta").stride()


def _same_order(data: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether `data` lies in memory as `param` does, without gaps."""
    wanted = _dense_strides(param)
    return all(size == 1 or have == want for size, have, want in zip(data.shape, data.stride(), wanted, strict=True))
