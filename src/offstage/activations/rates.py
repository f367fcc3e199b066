# SPDX-License-Identifier: Apache-2.0
"""What has to be known of the machine to choose: how fast tensors move, and how fast they are made again.

Each is measured once, in a few milliseconds for which the host waits. Used by `activation_side.py`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from offstage.activations.proofs import digest_of
from offstage.lanes.lanes import Lane, Lanes, copy_work
from offstage.memory.arena import Arena

_MEASURED_BYTES, _MEASURED_TIMES = 32 * 1024 * 1024, 4
_SHORTEST_MS = 1e-6
"""Lanes of tests have clocks that stand still."""


def measure_link(lanes: Lanes) -> float:
    """GB/s each way, with both directions busy: a few copies, for which the host waits."""
    arena = Arena(2 * _MEASURED_BYTES, torch.uint8, lanes.device, pin=True)
    down, up = arena.flat.chunk(2)
    memory = torch.empty(2, _MEASURED_BYTES, dtype=torch.uint8, device=lanes.device)
    lanes.touch(writes=[memory])
    ready = lanes.mark()

    def both_ways(times: int) -> None:
        for _ in range(times):
            stored = lanes.submit(
                Lane.STORE,
                copy_work([(down, memory[0])]),
                after={"measure: the memory is free": ready},
                reads=[memory[0]],
                writes=[down],
            )
            fetched = lanes.submit(
                Lane.FETCH,
                copy_work([(memory[1], up)]),
                after={"measure: the memory is free": ready},
                reads=[up],
                writes=[memory[1]],
            )
        for mark in (stored, fetched):
            lanes.wait(mark, "measure: the copies are done")

    both_ways(1)  # the first time is slower
    start = lanes.stamp(Lane.CALLER)
    both_ways(_MEASURED_TIMES)
    milliseconds = lanes.elapsed_ms(start, lanes.stamp(Lane.CALLER))
    lanes.touch(writes=[memory])
    arena.close()
    return _MEASURED_TIMES * _MEASURED_BYTES / max(milliseconds, _SHORTEST_MS) / 1e6


def measure_remaking(lanes: Lanes) -> float:
    """GB/s of saved tensors that are made again: those of a gated layer, the most common ones."""
    nbytes = _MEASURED_BYTES if lanes.device.type != "cpu" else _MEASURED_BYTES // 32
    gate, up = torch.zeros(2, nbytes // 2, dtype=torch.bfloat16, device=lanes.device)

    def again(times: int) -> None:
        for _ in range(times):
            made = F.silu(gate).mul(up), F.silu(gate)  # for the linear layer behind, and for the product's own backward
            for one in made:
                digest_of(one)  # when it is saved,
                digest_of(one)  # and when it is made again

    again(1)  # the first time is slower
    start = lanes.stamp(Lane.CALLER)
    again(_MEASURED_TIMES)
    milliseconds = lanes.elapsed_ms(start, lanes.stamp(Lane.CALLER))
    return _MEASURED_TIMES * 2 * nbytes / max(milliseconds, _SHORTEST_MS) / 1e6


def measure_product(lanes: Lanes, dtype: torch.dtype) -> float:
    """Multiplications per second of a matrix product."""
    side = 2048
    one, other = torch.zeros(2, side, side, dtype=dtype, device=lanes.device)
    torch.mm(one, other)  # the first time is slower
    start = lanes.stamp(Lane.CALLER)
    for _ in range(_MEASURED_TIMES):
        torch.mm(one, other)
    milliseconds = lanes.elapsed_ms(start, lanes.stamp(Lane.CALLER))
    return _MEASURED_TIMES * side**3 / max(milliseconds, _SHORTEST_MS) * 1e3
