# SPDX-License-Identifier: Apache-2.0
"""What an aten operation costs on a simulated device: floating-point operations, or bytes of device memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
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


def counts_flops(func: Any) -> bool:
    return func._overloadpacket in _FLOPS


def name_of(func: Any) -> str:
    return str(func._overloadpacket.__name__)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """CPU tensors with a storage, in lists and tuples as well."""
    if isinstance(values, torch.Tensor):
        if values.device.type == "cpu" and values.layout is torch.strided:
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def cost_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, new: Sequence[torch.Tensor]) -> Cost:
    """`new`: those of the tensors in `made` that have memory of their own."""
    if counts_flops(func):
        return Cost(flops=int(_FLOPS[func._overloadpacket](*args, **kwargs, out_val=made)))
    name = name_of(func)
    if name in _NO_KERNEL:
        return Cost()
    positions, names = _written(func)
    written = [*tensors_in([args[place] for place in positions if place < len(args)])]
    written += tensors_in([kwargs[one] for one in names if one in kwargs])
    if not written and not new and name not in WAITS:  # a view
        return Cost()
    read = [*tensors_in(args), *tensors_in(kwargs)]
    if name in _OVERWRITE:
        read = [tensor for tensor in read if all(tensor is not one for one in written)]
    return Cost(nbytes=sum(_nbytes(tensor) for tensor in (*read, *written, *new)))


@functools.cache
def _written(func: Any) -> tuple[list[int], list[str]]:
    """Positions and names of the arguments that `func` writes to."""
    arguments = list(enumerate(func._schema.arguments))
    found = [(place, one) for place, one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return [place for place, one in found if not one.kwarg_only], [one.name for _, one in found]


def _nbytes(tensor: torch.Tensor) -> int:
    """What is touched of its memory: an expanded tensor has less than its shape says."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
