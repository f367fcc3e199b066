# SPDX-License-Identifier: Apache-2.0
"""Whether a thread takes denormal numbers for zero, and work done either way.

`torch.set_flush_denormal` sets it for the calling thread; a new thread begins as the thread that starts it. So the same
update could have other bits in another thread. Adam and AdamW of offstage always keep denormals, as every GPU does; the
user's own class does what it would do in the thread that calls `step()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_SMALLEST_NORMAL = sys.float_info.min


def flushes_denormals() -> bool:
    """Whether the calling thread does. torch has no function that tells; Python's floats are computed the same way."""
    return _SMALLEST_NORMAL / 2 == 0.0


def run_flushing(flush: bool, work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)` with denormals flushed to zero or kept; afterwards the thread is as it was."""
    before = flushes_denormals()
    if before == flush:
        return work(*arguments)
    try:
        torch.set_flush_denormal(flush)
        return work(*arguments)
    finally:
        torch.set_flush_denormal(before)
