# SPDX-License-Identifier: Apache-2.0
"""A slow, exact Adam: every operation rounded once to fp32, `fma` through round-to-odd and through fractions."""

from fractions import Fraction

import numpy as np

F32 = np.float32


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of fp32 values with one rounding.

    The product of two fp32 numbers is exact in fp64. The sum is rounded to odd there (of the two fp64 neighbours of
    the exact sum, the odd one), which makes the second rounding, to fp32, the only one that counts.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = product + addend
        shadow = total - product  # Knuth's two-sum: `error` is what `total` lost
        error = (product - (total - shadow)) + (addend - shadow)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
        toward = np.where(error > 0, np.inf, -np.inf)
        return np.where(inexact & even, np.nextafter(total, toward), total).astype(F32)


def fma_by_fractions(a: float, b: float, c: float) -> np.float32:
    """The same for three finite numbers, in rational arithmetic."""
    return round_to_fp32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def round_to_fp32(exact: Fraction) -> np.float32:
    """The nearest fp32, ties to even."""
    if exact == 0:
        return F32(0.0)
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    scaled = magnitude / unit
    whole, rest = divmod(scaled.numerator, scaled.denominator)
    if 2 * rest > scaled.denominator or (2 * rest == scaled.denominator and whole % 2):
        whole += 1
    value = whole * unit
    result = F32(np.inf) if value >= Fraction(2) ** 128 else F32(float(value))
    return -result if exact < 0 else result


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16, ties to even, by comparing the two candidates; NaN is 0x7FC0."""
    bits = np.asarray(x, F32).view(np.uint32).astype(np.uint64)
    down, rest = bits >> np.uint64(16), bits & np.uint64(0xFFFF)
    up = (rest > 0x8000) | ((rest == 0x8000) & ((down & np.uint64(1)) == 1))
    return np.where(np.isnan(x), 0x7FC0, down + up).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(F32)


def adam(
    p, g, m, v, largest, *,
    lr_decay, step_size, bias_correction2_sqrt, beta1, beta2, weight_decay, eps, maximize, decoupled,
):  # fmt: skip
    """One step in fp32 on fp32 arrays. Returns (p, m, v, largest)."""
    beta1, beta2, weight_decay, eps = F32(beta1), F32(beta2), F32(weight_decay), F32(eps)
    with np.errstate(all="ignore"):
        g = -g if maximize else g
        if weight_decay != 0 and decoupled:
            p = fma(np.full_like(p, -lr_decay), p, p)
        elif weight_decay != 0:
            g = fma(p, np.full_like(p, weight_decay), g)
        b1, b2 = np.full_like(p, beta1), np.full_like(p, beta2)
        m = fma(b1, m, fma(-b1, g, g))
        square = (g * g).astype(F32)
        v = fma(b2, v, fma(-b2, square, square))
        root = v
        if largest is not None:
            largest = np.where(largest < v, v, largest)
            root = largest
        denominator = ((np.sqrt(root) / F32(bias_correction2_sqrt)).astype(F32) + eps).astype(F32)
        p = (p - ((F32(step_size) * m).astype(F32) / denominator).astype(F32)).astype(F32)
    return p, m, v, largest
