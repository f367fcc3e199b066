# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW for accelerator tensors, in Triton: the same bits as `torch.optim.AdamW(fused=True)` on CUDA.

Every operation is written with the rounding it must have (`fma`, `div_rn`, `sqrt_rn`, fusion off), so that
`adamw_host.py` can repeat it bit for bit.

[Note: bits of a bf16] Conversions to bf16 are done on integers (round to nearest even, any NaN becomes 0x7FC0):
hardware and software conversions agree on numbers and disagree on NaN payloads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from offstage.rules.rule import Hyperparameters

_BLOCK = 1024
_FINGERPRINT_BLOCK = 4096
_FINGERPRINT_PROGRAMS = 264  # few enough that their additions to one number do not queue up

NO_MASTER = tl.constexpr(0)
FP32_MASTER = tl.constexpr(1)
SPLIT_MASTER = tl.constexpr(2)
MASTER_CODES = {None: 0, "fp32": 1, "split": 2}
FINGERPRINT_FACTOR = tl.constexpr(0x1E3779B97F4A7C15)


@triton.jit
def _round_to_bf16_bits(x):
    """The bf16 nearest to `x`, as the low 16 bits of an int32. See [Note: bits of a bf16]."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded & 0xFFFF)


@triton.jit
def _negated(x):
    """-x for any x. Triton before 3.8 compiles `-x` as `0 - x`, which is +0 for both zeros."""
    return (x.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """`x` (fp32) in `dtype`."""
    if dtype == tl.bfloat16:
        return _round_to_bf16_bits(x).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _join(weight_bits, low, tied_up):
    """The fp32 master from the bf16 weight's bits and its own low half. See `master_weights.py`."""
    rounded_up = (low > 0x8000) | ((low == 0x8000) & tied_up)
    high = weight_bits - tl.where(rounded_up, 1, 0)
    return ((high << 16) | low).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["fresh"])
def adamw_kernel(
    weight_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    max_exp_avg_sq_ptr,
    master_ptr,
    coefficients_ptr,  # [lr * weight_decay, lr / bias_correction1, sqrt(bias_correction2)]
    expected_ptr,  # split: the weight's fingerprint after our last write
    observed_ptr,  # split: its fingerprint now
    foreign_ptr,  # elements whose weight was written from outside
    beta1,
    beta2,
    weight_decay,
    eps,
    numel,
    fresh,  # no state yet: the master starts from the weight, and that counts as no write
    MASTER: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    weight = tl.load(weight_ptr + index, mask=mask, other=0.0)
    g = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg_ptr + index, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + index, mask=mask, other=0.0).to(tl.float32)

    if MASTER == NO_MASTER:
        p = weight.to(tl.float32)
    elif MASTER == FP32_MASTER:
        master = tl.load(master_ptr + index, mask=mask, other=0.0)
        there = weight.to(tl.int16, bitcast=True)
        ours = _narrow(master, weight_ptr.dtype.element_ty).to(tl.int16, bitcast=True)
        foreign = (there != ours) & ((weight == weight) | (master == master)) & mask
        p = tl.where(foreign, weight.to(tl.float32), master)
        count = tl.sum(foreign.to(tl.int32))
        if (count > 0) & (fresh == 0):
            tl.atomic_add(foreign_ptr, count.to(tl.int64))
    else:
        low = tl.load(master_ptr + index, mask=mask, other=0).to(tl.int32) & 0xFFFF
        foreign = tl.load(expected_ptr) != tl.load(observed_ptr)
        tied_up = v.to(tl.int32, bitcast=True) < 0
        v = tl.abs(v)
        joined = _join(weight.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF, low, tied_up)
        p = tl.where(foreign | (fresh != 0), weight.to(tl.float32), joined)
        if foreign & (fresh == 0) & (tl.program_id(0) == 0):
            tl.atomic_add(foreign_ptr, tl.zeros([], tl.int64) + numel)

    zero = tl.zeros([BLOCK], tl.float32)
    b1 = beta1 + zero
    b2 = beta2 + zero
    lr_decay = tl.load(coefficients_ptr) + zero
    step_size = tl.load(coefficients_ptr + 1) + zero
    bias_correction2_sqrt = tl.load(coefficients_ptr + 2) + zero
    if MAXIMIZE:
        g = _negated(g)
    if DECAY:
        if DECOUPLED:
            p = tl.fma(_negated(lr_decay), p, p)
        else:
            g = tl.fma(p, weight_decay + zero, g)
    m = tl.fma(b1, m, tl.fma(_negated(b1), g, g))
    g2 = g * g
    v = tl.fma(b2, v, tl.fma(_negated(b2), g2, g2))
    if AMSGRAD:
        largest = tl.load(max_exp_avg_sq_ptr + index, mask=mask, other=0.0).to(tl.float32)
        largest = tl.where(largest < v, v, largest)  # std::max's answer to NaN
        tl.store(max_exp_avg_sq_ptr + index, _narrow(largest, max_exp_avg_sq_ptr.dtype.element_ty), mask=mask)
        root = tl.sqrt_rn(largest)
    else:
        root = tl.sqrt_rn(v)
    denominator = tl.div_rn(root, bias_correction2_sqrt) + eps
    p = p - tl.div_rn(step_size * m, denominator)

    if MASTER == FP32_MASTER:
        tl.store(master_ptr + index, p, mask=mask)
    elif MASTER == SPLIT_MASTER:
        bits = p.to(tl.int32, bitcast=True)
        low = tl.where(p != p, 0, bits & 0xFFFF)
        tl.store(master_ptr + index, low.to(tl.int16), mask=mask)
        tied_up = (low == 0x8000) & (((bits >> 16) & 1) == 1)
        v = tl.where(tied_up, _negated(v), v)
    tl.store(weight_ptr + index, _narrow(p, weight_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_ptr + index, _narrow(m, exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + index, _narrow(v, exp_avg_sq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["step"])
def hyperparameters_kernel(out_ptr, stride, lr_ptr, lr, beta1, beta2, weight_decay, step, LR_TENSOR: tl.constexpr):
    """One column of [beta1, beta2, step, lr, weight_decay]: numbers go to the device as arguments, without a copy."""
    if LR_TENSOR:
        rate = tl.load(lr_ptr).to(tl.float32)
    else:
        rate = lr
    tl.store(out_ptr, beta1)
    tl.store(out_ptr + stride, beta2)
    tl.store(out_ptr + 2 * stride, step)
    tl.store(out_ptr + 3 * stride, rate)
    tl.store(out_ptr + 4 * stride, weight_decay)


@triton.jit
def fingerprint_kernel(weight_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """Adds to `out` a sum over the weight's bits that depends on where each bit is."""
    total = tl.zeros([BLOCK], tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, numel, tl.num_programs(0).to(tl.int64) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        bits = tl.load(weight_ptr + index, mask=index < numel, other=0).to(tl.int64) & 0xFFFF
        total += bits * ((index * FINGERPRINT_FACTOR) | 1)
    tl.atomic_add(out_ptr, tl.sum(total))


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor | None,
    master: torch.Tensor | None,
    *,
    master_kind: str | None,
    coefficients: torch.Tensor,
    prints: tuple[torch.Tensor, torch.Tensor] | None,
    foreign: torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled: bool,
    fresh: bool,
) -> None:
    """One piece of one parameter: weight, moments and master in place."""
    numel = weight.numel()
    expected, observed = prints if prints is not None else (foreign, foreign)
    adamw_kernel[(triton.cdiv(numel, _BLOCK),)](
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq if max_exp_avg_sq is not None else exp_avg_sq,
        master if master is not None else exp_avg,
        coefficients,
        expected,
        observed,
        foreign,
        beta1,
        beta2,
        weight_decay,
        eps,
        numel,
        int(fresh),
        MASTER=MASTER_CODES[master_kind],
        AMSGRAD=max_exp_avg_sq is not None,
        MAXIMIZE=maximize,
        DECOUPLED=decoupled,
        DECAY=weight_decay != 0,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )


def coefficients(inputs: torch.Tensor, out: torch.Tensor, rows: Sequence[Hyperparameters]) -> None:
    """Row i of `out` = [lr * weight_decay, lr / bias_correction1, sqrt(bias_correction2)] of `rows[i]`.

    The powers are torch's own, because torch's fused kernel uses the same function; Triton's differs in the last bit.
    """
    for i, row in enumerate(rows):
        lr_tensor = isinstance(row.lr, torch.Tensor)
        hyperparameters_kernel[(1,)](
            inputs[:, i:],
            inputs.stride(0),
            row.lr if lr_tensor else inputs,
            0.0 if lr_tensor else float(row.lr),
            row.beta1,
            row.beta2,
            row.weight_decay,
            float(row.step),
            LR_TENSOR=lr_tensor,
        )
    used = inputs[:, : len(rows)]
    betas, step, lr, weight_decay = used[:2], used[2], used[3], used[4]
    lr_decay, step_size, correction2_sqrt = out[: len(rows)].unbind(1)
    torch.pow(betas, step, out=betas)
    betas.neg_().add_(1)
    torch.mul(lr, weight_decay, out=lr_decay)
    torch.div(lr, betas[0], out=step_size)
    torch.sqrt(betas[1], out=correction2_sqrt)


def fingerprint(weight: torch.Tensor, out: torch.Tensor) -> None:
    """Set `out` (int64, one element) to the fingerprint of a whole bf16 parameter."""
    fingerprints([weight], [out])


def fingerprints(weights: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """The same of several: one launch less for each."""
    torch._foreach_zero_(list(outs))
    for weight, out in zip(weights, outs, strict=True):
        programs = min(triton.cdiv(weight.numel(), _FINGERPRINT_BLOCK), _FINGERPRINT_PROGRAMS)
        fingerprint_kernel[(programs,)](weight.view(torch.int16), out, weight.numel(), BLOCK=_FINGERPRINT_BLOCK)
