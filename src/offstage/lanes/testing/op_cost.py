# SPDX-License-Identifier: Apache-2.0
"""What an aten operation costs on a simulated device: floating-point operations, or bytes of device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_FLOPS = dict(flop_registry) | {
    # The CPU's kernels for attention have the first arguments of CUDA's.
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
# Torch's own formulas say the same, and look for tensors in all arguments first.
_FLOPS |= dict.fromkeys((_aten.mm, _aten.bmm), lambda a, b, *_, out_val, **__: 2 * out_val.numel() * a.shape[-1])
_FLOPS |= dict.fromkeys(
    (_aten.addmm, _aten.baddbmm), lambda _, a, b, *__, out_val, **___: 2 * out_val.numel() * a.shape[-1]
)
_NO_KERNEL = {
    "detach_", "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
    "resize_as_", "set_", "squeeze_", "t_", "transpose_", "unsqueeze_", "as_strided_",
}  # fmt: skip
"""They allocate, or change what a tensor says of its memory."""
_OVERWRITE = {"bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "uniform_", "zero_"}
"""They do not read what they write."""
WAITS = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "_unique", "_unique2"}
"""The host waits for their results."""


class Cost(NamedTuple):
    """Of one operation."""

    flops: int = 0
    nbytes: int = 0


_NOTHING = Cost()


@dataclass(frozen=True, slots=True)
class Operation:
    """What is always the same of an operation: asking torch takes longer than many a kernel."""

    func: Any
    name: str
    flops: Callable[..., int] | None
    """The formula, if torch knows one."""
    decomposes: bool
    """In inference mode torch leaves it to a mode to do it in parts."""
    is_view: bool
    """It makes nothing but other names for memory that it was given."""
    mutates: bool
    written: Sequence[int]
    """Positions of the arguments that it writes to."""
    written_names: Sequence[str]


_known: dict[int, Operation] = {}
"""By `id`: an `Operation` keeps its function."""


def operation_of(func: Any) -> Operation:
    """What is known of `func`."""
    found = _known.get(id(func))
    if found is None:
        flops, returns = _FLOPS.get(func._overloadpacket), func._schema.returns
        written = [
            (place, one)
            for place, one in enumerate(func._schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        found = _known[id(func)] = Operation(
            func=func,
            name=str(func._overloadpacket.__name__),
            flops=flops,
            decomposes=flops is None and func._can_decompose(),
            is_view=bool(returns) and all(one.alias_info and not one.alias_info.is_write for one in returns),
            mutates=func._schema.is_mutable,
            written=[place for place, one in written if not one.kwarg_only],
            written_names=[one.name for _, one in written],
        )
    return found


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """CPU tensors with a storage, in lists, tuples and dicts as well."""
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def cost_of(
    operation: Operation,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Any,
    given: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
) -> Cost:
    """`given`: the tensors in `args` and `kwargs`. `new`: those in `made` that have memory of their own."""
    if operation.flops is not None:
        return Cost(flops=int(operation.flops(*args, **kwargs, out_val=made)))
    if operation.name in _NO_KERNEL:
        return _NOTHING
    written = tensors_in([args[place] for place in operation.written if place < len(args)])
    written += tensors_in([kwargs[one] for one in operation.written_names if one in kwargs])
    if not written and not new and operation.name not in WAITS:  # a view
        return _NOTHING
    read = given
    if operation.name in _OVERWRITE:
        read = [tensor for tensor in read if all(tensor is not one for one in written)]
    return Cost(nbytes=sum(_nbytes(tensor) for tensor in (*read, *written, *new)))


def _nbytes(tensor: torch.Tensor) -> int:
    """What is touched of its memory: an expanded tensor has less than its shape says."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
