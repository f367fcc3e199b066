# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW for host tensors, in numba: the formula of `adamw_triton.py` with the same roundings.

bf16 travels as uint16 and fp16 as int16, so that the array type alone picks the conversion. The loops index with
unsigned integers over sliced arrays: with signed ones LLVM does not vectorise them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.caching import NullCache
from numba.extending import intrinsic, overload

from offstage.rules.denormals import run_flushing
from offstage.rules.rule import Hyperparameters

logger = logging.getLogger("offstage")

_FACTOR = np.uint64(0x1E3779B97F4A7C15)


class _DiskCache:
    """numba's cache on disk, as long as it can be read and written: it saves seconds and must not cost a step."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *args: Any) -> Any:
        return self._tried("load_overload", *args)

    def save_overload(self, *args: Any) -> None:
        self._tried("save_overload", *args)

    def _tried(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._cache, name)(*args)
        except Exception as error:  # a full disk, a folder that is gone, a file that is cut
            self._cache = NullCache()
            _log_no_cache(f"{type(error).__name__}: {error}")
            return None


@functools.cache
def _log_no_cache(reason: str) -> None:
    logger.warning(
        "what numba compiles for updates on the host cannot be kept on disk (%s): every process compiles it again, "
        "which takes a few seconds. Set NUMBA_CACHE_DIR to a folder that can be written",
        reason,
    )


def _cached(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit`, kept on disk where that is possible."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        try:
            dispatcher.enable_caching()
        except RuntimeError as error:  # neither beside the source nor under the user's home
            _log_no_cache(str(error).partition(":")[2].strip())
            return dispatcher
        dispatcher._cache = _DiskCache(dispatcher._cache)
        return dispatcher

    return compiled


@intrinsic
def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _bitcast(source: Any, target: Any) -> Any:
    @intrinsic
    def cast(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), codegen

    return cast


_bits = _bitcast(types.float32, types.uint32)
_from_bits = _bitcast(types.uint32, types.float32)


@intrinsic
def _half_to_float(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), codegen


@intrinsic
def _float_to_half(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), cgutils.ir.IntType(16))

    return types.int16(types.float32), codegen


@numba.njit
def _to_bf16(x):
    """Round to nearest even; any NaN becomes 0x7FC0 (see [Note: bits of a bf16])."""
    bits = _bits(x)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(np.uint32(0x7FC0) if x != x else rounded)


def _load(array, i):
    """Element `i` as fp32."""


@overload(_load)
def _load_of_dtype(array, i):
    if array.dtype == types.uint16:
        return lambda array, i: _from_bits(np.uint32(array[i]) << np.uint32(16))
    if array.dtype == types.int16:
        return lambda array, i: _half_to_float(array[i])
    return lambda array, i: array[i]


def _store(array, i, x):
    """Set element `i` to the fp32 `x`, rounded to the array's format."""


@overload(_store)
def _store_of_dtype(array, i, x):
    if array.dtype == types.uint16:

        def store_bf16(array, i, x):
            array[i] = _to_bf16(x)

        return store_bf16
    if array.dtype == types.int16:

        def store_fp16(array, i, x):
            array[i] = _float_to_half(x)

        return store_fp16

    def store_fp32(array, i, x):
        array[i] = x

    return store_fp32


def _part(array, start, stop):
    """`array[start:stop]`, or `None` where there is none."""


@overload(_part)
def _part_of(array, start, stop):
    if isinstance(array, types.Array):
        return lambda array, start, stop: array[start:stop]
    return lambda array, start, stop: None


def _rounded(array, x):
    """What the fp32 `x` reads as after being stored in `array`."""


@overload(_rounded)
def _rounded_to_dtype(array, x):
    if array.dtype == types.uint16:
        return lambda array, x: _from_bits(np.uint32(_to_bf16(x)) << np.uint32(16))
    if array.dtype == types.int16:
        return lambda array, x: _half_to_float(_float_to_half(x))
    return lambda array, x: x


@_cached(nogil=True, error_model="numpy")
def _update(
    start, stop, weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, low, expected, observed, fresh,
    coefficients, beta1, beta2, weight_decay, eps, maximize, decoupled,
):  # fmt: skip
    """One pass over elements `[start, stop)`. Returns how many of the weights were written from outside."""
    weight, grad = weight[start:stop], grad[start:stop]
    exp_avg, exp_avg_sq = exp_avg[start:stop], exp_avg_sq[start:stop]
    rewritten = expected[0] != observed[0] if expected is not None else False
    refresh = fresh or rewritten
    lr_decay, step_size, bias_correction2_sqrt = coefficients[0], coefficients[1], coefficients[2]
    beta1, beta2 = np.float32(beta1), np.float32(beta2)
    weight_decay, eps = np.float32(weight_decay), np.float32(eps)
    not_ours = _pass(
        weight, grad, exp_avg, exp_avg_sq,
        _part(max_exp_avg_sq, start, stop), _part(master, start, stop), _part(low, start, stop), refresh,
        lr_decay, step_size, bias_correction2_sqrt, beta1, beta2, weight_decay, eps, maximize, decoupled,
    )  # fmt: skip
    if fresh:
        return np.int64(0)
    return np.int64(weight.size) if rewritten else not_ours


@numba.njit(nogil=True, error_model="numpy")
def _pass(
    weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, low, refresh,
    lr_decay, step_size, bias_correction2_sqrt, beta1, beta2, weight_decay, eps, maximize, decoupled,
):  # fmt: skip
    """Returns how many weights were not the rounded master (fp32 masters only)."""
    decay = weight_decay != np.float32(0)
    foreign = np.int64(0)
    for i in range(np.uint64(weight.size)):
        g = _load(grad, i)
        m = _load(exp_avg, i)
        v = _load(exp_avg_sq, i)
        p = _load(weight, i)
        if master is not None:
            kept = master[i]
            same = _bits(_rounded(weight, kept)) == _bits(p) or (p != p and kept != kept)
            foreign += np.int64(0 if same else 1)
            p = kept if same else p  # the weight wins
        if low is not None:
            half = np.uint32(low[i])
            tied_up = (_bits(v) >> np.uint32(31)) == np.uint32(1)
            v = _from_bits(_bits(v) & np.uint32(0x7FFFFFFF))
            rounded_up = half > np.uint32(0x8000) or (half == np.uint32(0x8000) and tied_up)
            high = np.uint32(weight[i]) - np.uint32(1 if rounded_up else 0)
            p = p if refresh else _from_bits((high << np.uint32(16)) | half)
        if maximize:
            g = -g
        if decay:
            if decoupled:
                p = _fma(-lr_decay, p, p)
            else:
                g = _fma(p, weight_decay, g)
        m = _fma(beta1, m, _fma(-beta1, g, g))
        g2 = g * g
        v = _fma(beta2, v, _fma(-beta2, g2, g2))
        largest = v
        if max_exp_avg_sq is not None:
            largest = _load(max_exp_avg_sq, i)
            largest = v if largest < v else largest  # std::max's answer to NaN
            _store(max_exp_avg_sq, i, largest)
        p = p - (step_size * m) / (np.sqrt(largest) / bias_correction2_sqrt + eps)
        if master is not None:
            master[i] = p
        _store(exp_avg, i, m)
        if low is not None:
            bits = _bits(p)
            half = np.uint32(0) if p != p else bits & np.uint32(0xFFFF)
            low[i] = np.uint16(half)
            tied_up = half == np.uint32(0x8000) and ((bits >> np.uint32(16)) & np.uint32(1)) == np.uint32(1)
            v = _from_bits(_bits(v) | np.uint32(0x80000000)) if tied_up else v
        _store(exp_avg_sq, i, v)
        _store(weight, i, p)
    return foreign


@_cached(nogil=True)
def _fingerprint(weight, start):
    total = np.uint64(0)
    for i in range(np.uint64(weight.size)):
        total += np.uint64(weight[i]) * (((start + np.uint64(i)) * _FACTOR) | np.uint64(1))
    return np.int64(total)


@_cached(nogil=True)
def _fingerprint_at(weight, places):
    total = np.uint64(0)
    for i in range(np.uint64(weight.size)):
        total += np.uint64(weight[i]) * ((places[i] * _FACTOR) | np.uint64(1))
    return np.int64(total)


def prepare(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor | None,
    master: torch.Tensor | None,
    *,
    master_kind: str | None,
    coefficients: torch.Tensor,
    prints: Sequence[torch.Tensor] | None,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled: bool,
    fresh: bool,
) -> Callable[[int, int], int]:
    """A function that updates elements `[start, stop)` of these tensors in place, in any thread.

    It returns how many of the weights were written from outside. Threads take turns with everything but the pass
    itself, so all that can be done before is done here. `coefficients` and `prints` are read when it is called.
    """
    arguments = (
        array_of(weight),
        array_of(grad),
        array_of(exp_avg),
        array_of(exp_avg_sq),
        array_of(max_exp_avg_sq) if max_exp_avg_sq is not None else None,
        array_of(master) if master_kind == "fp32" else None,
        array_of(master).view(np.uint16) if master_kind == "split" else None,
        array_of(prints[0]) if prints is not None else None,
        array_of(prints[1]) if prints is not None else None,
        fresh,
        array_of(coefficients),
        beta1,
        beta2,
        weight_decay,
        eps,
        maximize,
        decoupled,
    )
    return lambda start, stop: int(run_flushing(False, _update, start, stop, *arguments))


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor | None,
    master: torch.Tensor | None,
    *,
    foreign: torch.Tensor | None,
    **options: Any,
) -> int:
    """One piece of one parameter: weight, moments and master in place.

    Returns how many weights were written from outside, and adds it to `foreign`.
    """
    piece = prepare(weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, **options)
    found = piece(0, weight.numel())
    if foreign is not None:
        foreign += found
    return found


def coefficients(inputs: torch.Tensor, out: torch.Tensor, rows: Sequence[Hyperparameters]) -> None:
    """Row i of `out` = [lr * weight_decay, lr / bias_correction1, sqrt(bias_correction2)] of `rows[i]`, all in fp32."""
    run_flushing(False, _coefficients, inputs, out, rows)


def _coefficients(inputs: torch.Tensor, out: torch.Tensor, rows: Sequence[Hyperparameters]) -> None:
    for i, row in enumerate(rows):
        numbers = [row.beta1, row.beta2, float(row.step), float(row.lr), row.weight_decay]
        inputs[:, i] = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    beta1, beta2, step, lr, weight_decay = inputs[:, : len(rows)]
    out[: len(rows), 0] = lr * weight_decay
    out[: len(rows), 1] = lr / (1 - torch.pow(beta1, step))
    out[: len(rows), 2] = (1 - torch.pow(beta2, step)).sqrt()


def fingerprint(weight: torch.Tensor, out: torch.Tensor) -> None:
    """Set `out` (int64, one element) to the fingerprint of a whole bf16 parameter."""
    out.fill_(fingerprint_from(0, weight))


def fingerprint_from(place: int | torch.Tensor, weight: torch.Tensor) -> int:
    """What the elements from `place` on, or at these places, add to their parameter's fingerprint; sums wrap around."""
    if isinstance(place, torch.Tensor):
        return int(_fingerprint_at(array_of(weight), place.reshape(-1).numpy().view(np.uint64)))
    return int(_fingerprint(array_of(weight), np.uint64(place)))


def array_of(tensor: torch.Tensor | None) -> Any:
    """The memory of a flat host tensor; bf16 as uint16, fp16 as int16."""
    assert tensor is not None
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float16:
        return tensor.detach().view(torch.int16).numpy()
    return tensor.detach().numpy()
