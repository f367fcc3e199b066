# SPDX-License-Identifier: Apache-2.0
"""`copy_work`: copies over the link as work for a lane, cut so that others get their turn.

[Note: the link takes turns] A device's copy engine serves one stream until that stream has to wait for something, and
priorities do not matter to it: what another stream asks for waits behind all that a fetch lane has been given before
(but for copies of up to 64 KiB, which travel with the commands). FSDP2 makes larger ones in every layer's backward,
data loaders do, and so do activations that backward waits for. So a lane that copies has two streams, and each copy
waits for the one before on the other stream: then the engine looks around after every copy, and a stranger waits for
one copy at most, while the link stays as busy as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

LONGEST_COPY = 32 * 1024 * 1024
"""Bytes. Shorter ones cost the host more and the link some of its rate."""


def copy_work(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], None]]:
    """One function per piece of (target, source): flat tensors of one dtype, one of each pair on the host."""
    work: list[Callable[[], None]] = []
    for target, source in copies:
        length = LONGEST_COPY // target.itemsize
        if target.numel() <= length:
            work.append(functools.partial(_copy, target, source))
            continue
        for start in range(0, target.numel(), length):
            stop = start + length
            work.append(functools.partial(_copy, target[start:stop], source[start:stop]))
    return work


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
