# SPDX-License-Identifier: Apache-2.0
"""What becomes of each layer's activations: kept, remade, offloaded, or recomputed."""

from __future__ import annotations

import enum


class Choice(enum.Enum):
    """What a layer does with the tensors that its backward needs."""

    KEEP = "keep"
    REMAKE = "remake"  # keeps what one kernel cannot remake
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"  # its inputs leave

    __hash__ = object.__hash__  # plans are looked up by the choices of all layers; enum's own is slow


def spread(count: int, total: int) -> frozenset[int]:
    """`count` numbers below `total`, evenly: the link is busy all through forward, and not more."""
    return frozenset(number * total // count for number in range(count)) if count else frozenset()
