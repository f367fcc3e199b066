# SPDX-License-Identifier: Apache-2.0
"""Fused parameters are saved under split names: gate and up of one SwiGLU weight as two tensors, q, k and v as three.

What a parameter consists of is metadata on it, put there by `split_as` or one of its short forms (`swiglu`, `qkv`,
`gdn`), and decides how the parameter and its optimizer state are saved and loaded. A checkpoint then fits a model with
separate parts, and the reverse. A `Splitter` replaces the metadata by any other decision.

The metadata is a plain attribute of the parameter object. `fully_shard`, `distribute_module`, `to_empty()` of a meta
model, `.to(dtype)` of a sharded one and `copy.deepcopy` put another object in its place, without the attribute: call
`split_as` after them (a DTensor's shape is the global one, so nothing else changes), or describe the parameters by
name with `by_map`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from offstage.checkpoint.parts import Box, Part, boxes_of_range, row_major
from offstage.errors import ConfigError

_ATTRIBUTE = "offstage_fused"
_LEAVES = ("weight", "bias")

Param = TypeVar("Param", bound=torch.Tensor)


@dataclass(frozen=True)
class Fused:
    """What a fused parameter consists of: consecutive parts along one dim."""

    parts: tuple[tuple[str, int], ...]
    """Name and size along `dim` of each part, in their order in the parameter."""
    dim: int = 0
    shape: tuple[int, ...] | None = None
    """The parameter's logical shape where it is stored flat (1-D, row-major); `None`: its own shape."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        if not names or len(set(names)) < len(names) or not all(_is_name(name) for name in names):
            raise ConfigError(
                f"The parts of a fused parameter expect unique names that are not empty; found {names}. "
                "Give one name per part, as in split_as(weight, {'gate': 4096, 'up': 4096})."
            )
        if wrong := [f"{name!r}: {size}" for name, size in self.parts if size < 1]:
            raise ConfigError(
                f"The parts of a fused parameter expect sizes of at least 1; found {', '.join(wrong)}. "
                "Leave out parts that are not there."
            )

    def logical(self, shape: Sequence[int], name: str = "a parameter") -> tuple[int, ...]:
        """The shape that the parts are cut from, of a parameter (called `name`) with the global `shape`.

        Raises where the parts do not fit it.
        """
        found = tuple(shape)
        logical = found if self.shape is None else self.shape
        if found not in (logical, (math.prod(logical),)):
            raise ConfigError(
                f"The fused metadata of {name} expects the shape {logical}, or 1-D with {math.prod(logical)} elements; "
                f"found {found}. Give the parameter's logical shape as shape=."
            )
        if not -len(logical) <= self.dim < len(logical):
            raise ConfigError(
                f"The fused metadata of {name} expects a dim of the shape {logical}; found dim={self.dim}. For a "
                "parameter that is stored flat give its logical shape as shape=."
            )
        if (total := sum(size for _, size in self.parts)) != logical[self.dim]:
            parts = " + ".join(f"{size} ({part})" for part, size in self.parts)
            raise ConfigError(
                f"The parts of {name} expect to sum to {logical[self.dim]}, its size along dim {self.dim} of "
                f"{logical}; found {parts} = {total}. Correct the sizes or dim."
            )
        return logical


FusedMap = Mapping[str, Fused]
"""Fully qualified parameter name → what it consists of."""

Splitter = Callable[[str, torch.Tensor], Fused | None]
"""(fully qualified name, parameter) → what it consists of, or `None` for an ordinary parameter."""


# Metadata on parameters #


def split_as(param: Param, parts: Mapping[str, int], *, dim: int = 0, shape: Sequence[int] | None = None) -> Param:
    """Say that `param` is several tensors in one: `parts` maps their names to their sizes along `dim`, in order.

    `shape` is the logical shape of a parameter that is stored flat. Returns `param`. Call it after `fully_shard`.
    """
    fused = Fused(tuple(parts.items()), dim, None if shape is None else tuple(shape))
    fused.logical(param.shape)
    setattr(param, _ATTRIBUTE, fused)
    return param


def swiglu(param: Param, *, dim: int = 0, shape: Sequence[int] | None = None) -> Param:
    """`split_as` for the fused input projection of a SwiGLU: equal halves, `gate` and `up`."""
    logical = param.shape if shape is None else shape
    size = logical[dim] if -len(logical) <= dim < len(logical) else 2  # split_as reports a wrong dim
    if size % 2 or not size:
        raise ConfigError(
            f"swiglu expects two equal halves along dim {dim}; found a size of {size} in the shape {tuple(logical)}. "
            "Correct dim, or name the parts and their sizes with split_as."
        )
    return split_as(param, {"gate": size // 2, "up": size // 2}, dim=dim, shape=shape)


def qkv(param: Param, *, q: int, k: int, v: int, dim: int = 0, shape: Sequence[int] | None = None) -> Param:
    """`split_as` for a fused attention projection, weight or bias: the sizes of `q`, `k` and `v` along `dim`."""
    return split_as(param, {"q": q, "k": k, "v": v}, dim=dim, shape=shape)


def gdn(
    param: Param,
    *,
    q: int,
    k: int,
    v: int,
    z: int,
    b: int = 0,
    a: int = 0,
    dim: int = 0,
    shape: Sequence[int] | None = None,
) -> Param:
    """`split_as` for the input projection of a gated delta net: `q`, `k`, `v`, the gate `z`, and `b` and `a`.

    Parts of size 0 are left out: they belong to another projection.
    """
    sizes = {"q": q, "k": k, "v": v, "z": z, "b": b, "a": a}
    return split_as(param, {name: size for name, size in sizes.items() if size}, dim=dim, shape=shape)


def fused_of(param: torch.Tensor) -> Fused | None:
    """The metadata that `split_as` put on `param`."""
    fused = getattr(param, _ATTRIBUTE, None)
    return fused if isinstance(fused, Fused) else None


# Splitters #


def by_metadata(fqn: str, param: torch.Tensor) -> Fused | None:
    """The default `Splitter`: what `split_as` said."""
    return fused_of(param)


def by_map(fused: FusedMap) -> Splitter:
    """A `Splitter` that looks parameters up by name, and asks their metadata where the map has none."""

    def split(fqn: str, param: torch.Tensor) -> Fused | None:
        return fused[fqn] if fqn in fused else fused_of(param)

    return split


# Names and parts #


def split_name(fqn: str, part: str) -> str:
    """The name under which `part` of the parameter `fqn` is saved.

    The part's name takes the place of the module that owns a `weight` or `bias`: `gate` of
    `layers.0.mlp.gate_up.weight` is `layers.0.mlp.gate.weight`. Below a parameter with any other name it is one more
    component: `gate` of `layers.0.w13` is `layers.0.w13.gate`.
    """
    *modules, leaf = fqn.split(".")
    if leaf in _LEAVES:
        return ".".join((*modules[:-1], part, leaf))
    return f"{fqn}.{part}"


def fused_parts(fqn: str, fused: Fused, part_of_whole: Part) -> list[Part]:
    """The local elements of the fused parameter `fqn`, as parts of the tensors that it is saved as.

    `part_of_whole` describes those elements within the global parameter. Each part returned is named by `split_name`
    and has the shape of that part alone; the flat run is the same.
    """
    logical = fused.logical(part_of_whole.shape, fqn)
    pieces = [part_of_whole] if part_of_whole.shape == logical else _unflattened(logical, part_of_whole)
    dim = fused.dim % len(logical)
    parts = []
    start = 0
    for name, size in fused.parts:
        shape = _with_dim(logical, dim, size)
        slab = Box(_with_dim((0,) * len(logical), dim, start), shape)
        for piece in pieces:
            if (common := piece.box.overlap(slab)) is not None:
                inner = piece.inner(common)
                parts.append(Part(split_name(fqn, name), shape, common.within(slab), inner.start, inner.strides))
        start += size
    return parts


def _unflattened(logical: tuple[int, ...], flat: Part) -> list[Part]:
    """A range of a parameter that is stored flat, as parts of its logical shape."""
    (first,), (length,), (stride,) = flat.box.offset, flat.box.size, flat.strides
    strides = row_major(logical)
    parts = []
    for box in boxes_of_range(logical, first, first + length):
        position = sum(i * step for i, step in zip(box.offset, strides, strict=True))
        start = flat.start + (position - first) * stride
        parts.append(Part(flat.name, logical, box, start, tuple(step * stride for step in strides)))
    return parts


def _with_dim(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _is_name(name: object) -> bool:
    return isinstance(name, str) and all(name.split("."))
