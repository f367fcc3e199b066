# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW for host tensors, in numba: the formula of `adamw_triton.py` with the same roundings.

bf16 travels as uint16 and fp16 as int16, so that the array type alone picks the conversion. The loops index with
unsigned integers over sliced arrays: with signed ones LLVM does not vectorise them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from offstage.lanes.compiled import atomic_add, compiled, compiled_for_c
from offstage.rules.denormals import run_flushing
from offstage.rules.rule import Hyperparameters

_FACTOR = np.uint64(0x1E3779B97F4A7C15)


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


def _number(number, kind):
    """`number` as fp32; `None` where the kind is."""


@overload(_number)
def _number_of_kind(number, kind):
    if isinstance(kind, types.NoneType):
        return lambda number, kind: None
    return lambda number, kind: np.float32(number)


@numba.njit(nogil=True, error_model="numpy")
def _update(
    start, stop, weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, low, expected, observed, fresh,
    coefficients, beta1, beta2, weight_decay, eps, maximize, decoupled, scale,
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
        lr_decay, step_size, bias_correction2_sqrt, beta1, beta2, weight_decay, eps, maximize, decoupled, scale,
    )  # fmt: skip
    if fresh:
        return np.int64(0)
    return np.int64(weight.size) if rewritten else not_ours


@numba.njit(nogil=True, error_model="numpy")
def _pass(
    weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, low, refresh,
    lr_decay, step_size, bias_correction2_sqrt, beta1, beta2, weight_decay, eps, maximize, decoupled, scale,
):  # fmt: skip
    """Returns how many weights were not the rounded master (fp32 masters only)."""
    decay = weight_decay != np.float32(0)
    foreign = np.int64(0)
    for i in range(np.uint64(weight.size)):
        g = _load(grad, i)
        if scale is not None:
            g = _rounded(grad, g * scale)  # as clipping would have
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


@compiled(nogil=True)
def _fingerprint(weight, start):
    total = np.uint64(0)
    for i in range(np.uint64(weight.size)):
        total += np.uint64(weight[i]) * (((start + np.uint64(i)) * _FACTOR) | np.uint64(1))
    return np.int64(total)


@compiled(nogil=True)
def _fingerprint_at(weight, places):
    total = np.uint64(0)
    for i in range(np.uint64(weight.size)):
        total += np.uint64(weight[i]) * ((places[i] * _FACTOR) | np.uint64(1))
    return np.int64(total)


def _print_of(weight, first):
    """The fingerprint of bf16 weights; other weights have none."""


@overload(_print_of)
def _print_of_dtype(weight, first):
    if weight.dtype == types.uint16:
        return lambda weight, first: _fingerprint(weight, np.uint64(first))
    return lambda weight, first: np.int64(0)


# The kernel: [Note: native threads] in `lanes/native_threads.py` says what it has to look like.

_WORDS = (
    "weight", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "expected", "observed", "coefficients",
    "found", "fresh", "maximize", "decoupled", "after", "first", "beta1", "beta2", "weight_decay", "eps", "scale",
)  # fmt: skip
"""The arguments of a kernel, 8 bytes each: addresses, flags, and doubles."""
_FLOATS = _WORDS.index("beta1")


@intrinsic
def _pointer(typingctx: Any, address: Any, kind: Any) -> Any:
    """A pointer to elements of `kind`."""
    target = types.CPointer(kind.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(address, kind), codegen


def _array(address, size, kind):
    """The array of `kind` at `address`; `None` where the kind is."""


@overload(_array)
def _array_of_kind(address, size, kind):
    if isinstance(kind, types.NoneType):
        return lambda address, size, kind: None
    return lambda address, size, kind: numba.carray(_pointer(address, kind), size)


_KINDS = {torch.float32: types.float32, torch.bfloat16: types.uint16, torch.float16: types.int16}


@functools.cache
def _kernel(
    weight: Any, grad: Any, first: Any, second: Any, largest: Any, master: Any, low: Any, prints: Any, scale: Any
) -> Any:
    """The kernel for tensors of these kinds, compiled once."""
    is_int = types.int64

    def kernel(start, stop, address):
        words = numba.carray(_pointer(address, is_int), len(_WORDS))
        numbers = numba.carray(_pointer(address, types.float64), len(_WORDS))[_FLOATS:]
        found = _update(
            np.int64(start),
            np.int64(stop),
            _array(words[0], stop, weight),
            _array(words[1], stop, grad),
            _array(words[2], stop, first),
            _array(words[3], stop, second),
            _array(words[4], stop, largest),
            _array(words[5], stop, master),
            _array(words[5], stop, low),
            _array(words[6], 1, prints),
            _array(words[7], 1, prints),
            words[10] != 0,
            numba.carray(_pointer(words[8], types.float32), 3),
            numbers[0],
            numbers[1],
            numbers[2],
            numbers[3],
            words[11] != 0,
            words[12] != 0,
            _number(numbers[4], scale),
        )
        if found:
            atomic_add(words[9], found)
        if words[13]:
            updated = _array(words[0], stop, weight)[start:stop]
            atomic_add(words[13], _print_of(updated, words[14] + start))

    return compiled_for_c(types.void(types.int64, types.int64, types.int64), kernel)


class Prepared:
    """An update that any thread can make in parts. Threads of Python and native ones: see `NativeSlice`."""

    def __init__(self, kernel: Any, arguments: Any, keeps: Sequence[Any]) -> None:
        """`keeps`: what the arguments point to."""
        self.address = int(kernel.address)
        self.arguments = int(arguments.ctypes.data)
        self._function, self._keeps = kernel.ctypes, (arguments, *keeps)

    def __call__(self, start: int, stop: int) -> None:
        """Update elements `[start, stop)`."""
        run_flushing(False, self._function, start, stop, self.arguments)


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
    found: torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled: bool,
    fresh: bool,
    scale: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
    first: int = 0,
) -> Prepared:
    """The update of these flat tensors, in place.

    It adds to `found` (int64) how many of the weights were written from outside. `coefficients` and `prints` are read
    when it is made. `scale`: what clipping multiplies the gradient by. `after` (int64): the fingerprint of the new
    weights is added to it, which are those of a parameter from its element `first` on.
    """
    expected, observed = prints[:2] if prints is not None else (None, None)
    keeps = (weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, expected, observed, coefficients, found)
    words = np.zeros(len(_WORDS), np.int64)
    words[: len(keeps)] = [0 if tensor is None else tensor.data_ptr() for tensor in keeps]
    words[len(keeps) : _FLOATS] = fresh, maximize, decoupled, 0 if after is None else after.data_ptr(), first
    factor = 1.0 if scale is None else float(scale)
    words[_FLOATS:].view(np.float64)[:] = beta1, beta2, weight_decay, eps, factor
    kinds = [None if tensor is None else _KINDS[tensor.dtype] for tensor in keeps[:5]]
    kernel = _kernel(
        *kinds,
        types.float32 if master_kind == "fp32" else None,
        types.uint16 if master_kind == "split" else None,
        types.int64 if prints is not None else None,
        types.float32 if scale is not None else None,
    )
    return Prepared(kernel, words, (*keeps, after))


@functools.cache
def _look() -> Any:
    """The kernel that adds the fingerprint of a part of a bf16 weight to a sum."""

    def kernel(start, stop, address):
        words = numba.carray(_pointer(address, types.int64), 2)
        part = _array(words[0], stop, types.uint16)[start:stop]
        atomic_add(words[1], _fingerprint(part, np.uint64(start)))

    return compiled_for_c(types.void(types.int64, types.int64, types.int64), kernel)


def prepare_fingerprint(weight: torch.Tensor, out: torch.Tensor) -> Prepared:
    """The fingerprint of a whole bf16 parameter, whose parts are added to `out` (int64)."""
    return Prepared(_look(), np.array([weight.data_ptr(), out.data_ptr()], np.int64), (weight, out))


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
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
    prepare(weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, found=found, **options)(0, weight.numel())
    if foreign is not None:
        foreign += found
    return int(found)


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


def fingerprints(weights: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """The same of several."""
    for weight, out in zip(weights, outs, strict=True):
        fingerprint(weight, out)


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
