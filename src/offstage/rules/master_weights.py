# SPDX-License-Identifier: Apache-2.0
"""Split masters: an fp32 master as the bf16 weight on the device plus 16 bits on the host, lossless.

The weight is the master rounded to nearest even, so the master is the weight's bits with its own low half, minus one
in the high half where rounding went up. Rounding goes up when the low half is above 0x8000, and at exactly 0x8000 in
one of the two cases that round to even: the half bit that decides it (`tied_up`) is kept in the sign of `exp_avg_sq`,
which is never negative otherwise. NaN masters become the bf16 NaN with low bits 0.

The rules do this inside their kernels; this module is the same on whole host tensors, for checkpoints.

[Note: who wrote the weight] With fp32 masters a weight that is not its rounded master was written from outside:
the update sees it per element and the weight wins. A split master always rounds to whatever weight is there, so
there the rule keeps a fingerprint of each parameter's weight; if it has changed, that parameter's masters restart
from its weights. Neither needs `_version`, which misses `.data` writes and moves when nothing changed.
"""

from __future__ import annotations

import torch


def split(master: torch.Tensor, exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(bf16 weight, low half as int16, `exp_avg_sq` carrying the tie bit) of fp32 masters."""
    bits = master.view(torch.int32)
    low = torch.where(master.isnan(), 0, bits & 0xFFFF)
    tied_up = (low == 0x8000) & (((bits >> 16) & 1) == 1)
    signed = torch.where(tied_up, -exp_avg_sq.abs(), exp_avg_sq)
    return master.to(torch.bfloat16), low.to(torch.int16), signed


def join(weight: torch.Tensor, low: torch.Tensor, exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 masters, `exp_avg_sq` without the tie bit) from what `split` made."""
    half = low.to(torch.int32) & 0xFFFF
    rounded_up = (half > 0x8000) | ((half == 0x8000) & exp_avg_sq.signbit())
    high = (weight.view(torch.int16).to(torch.int32) & 0xFFFF) - rounded_up.to(torch.int32)
    return ((high << 16) | half).view(torch.float32), exp_avg_sq.abs()
