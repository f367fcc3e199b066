# SPDX-License-Identifier: Apache-2.0
"""Timed passes for `measure_machine`: link, device memory, host memory, pinning, host updates.

They use the lanes, the arenas and the rule that training uses, so that training reaches these rates. The best of a few
repetitions counts: other work on the machine can only make a pass slower.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from offstage.lanes.lanes import Lane, Lanes, on_device
from offstage.lanes.link import link_for, use_lanes
from offstage.memory.arena import Arena
from offstage.memory.threads import Crew, together
from offstage.planning.machine import UPDATE_BYTES_PER_PARAM
from offstage.rules import adamw_host

_MIB = 1 << 20
_ARENA_BYTES = 4096 * _MIB  # many times what a cache holds: some have 300 MiB
_DEVICE_BYTES = 512 * _MIB
_SHARE_OF_FREE = 8  # at most one part in this many of the free memory is used
_TOUCH_BYTES = 64 * _MIB  # what one thread populates at a time when an arena is made
_PIN_SECONDS = 0.5  # target time for the second, larger arena; on slow memory it stays small
_COPY_BYTES = 64 * _MIB
_COPIES = 4  # in a row
_REPEATS = 3
_SUBMITS = 64  # fewer than a lane's queue holds
_WINDOW_SECONDS = 0.08  # how long each thread is timed
_SLICE = 1 << 20  # parameters per call of the rule
_STATE_BYTES = 16  # per parameter of the update pass: bf16 weight and gradient, fp32 master and moments
_IN_CACHE = (8 * 1024, 24 * 1024)  # parameters; 384 KiB of state fit in a second-level cache
_IN_CACHE_CALLS = 400


def measure_rates(device: torch.device, threads: int, host_free: int, device_free: int) -> dict[str, Any]:
    """The rates of a `Machine`, by field name. Uses at most 4 GiB of host and 0.5 GiB of device memory."""
    with use_lanes(None):  # not the lanes of a test
        link = link_for(device)
        lanes = link.lanes()
    with on_device(device):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # start the driver and finish earlier work before anything is timed
        arena, pin_rate = _pin(device, threads, min(_ARENA_BYTES, host_free // _SHARE_OF_FREE))
        try:
            copies = _link_and_device(lanes, arena, min(_DEVICE_BYTES, device_free // _SHARE_OF_FREE))
            link.remember(copies["link_duplex_gb_per_s"])
            submit_us = _submit_us(lanes)
            updates, limit = _host_updates(arena, threads)
            dram = max(_streaming(arena, threads), *updates.values())
        finally:
            arena.close()
    if device.type == "cpu":
        copies["device_gb_per_s"] = dram  # the same memory
    else:
        torch.accelerator.empty_cache()  # return the memory to other processes
    return {
        "pin_gib_per_s": pin_rate,
        "dram_gb_per_s": dram,
        "host_update_gb_per_s": updates,
        "host_update_gparam_limit": limit,
        "submit_us": submit_us,
        **copies,
    }


# Arena and link #


def _pin(device: torch.device, threads: int, most: int) -> tuple[Arena, float]:
    """An arena of at most `most` bytes that takes about half a second to make, and its rate in GiB/s."""
    nbytes = max(_MIB, min(most, _TOUCH_BYTES * min(threads, 8)))
    arena, seconds = _timed_arena(device, nbytes)
    arena.close()
    del arena  # free its memory before the next one is made
    larger = min(most, int(nbytes * _PIN_SECONDS / seconds))
    arena, seconds = _timed_arena(device, max(larger // _MIB * _MIB, nbytes))
    return arena, arena.nbytes / 2**30 / seconds


def _timed_arena(device: torch.device, nbytes: int) -> tuple[Arena, float]:
    start = time.perf_counter()
    arena = Arena(nbytes, torch.uint8, device, pin=True)
    return arena, time.perf_counter() - start


def _link_and_device(lanes: Lanes, arena: Arena, device_bytes: int) -> dict[str, float]:
    size = max(256, min(_COPY_BYTES, arena.nbytes // 2, device_bytes // 2) // 256 * 256)
    memory = torch.empty(2 * size, dtype=torch.uint8, device=lanes.device)
    fetched, stored = memory.chunk(2)
    pairs = arena.nbytes // (2 * size)
    pieces = arena.flat[: pairs * 2 * size].chunk(pairs * 2)
    fetch = [partial(_copy, fetched, host) for host in pieces[0::2]]
    store = [partial(_copy, host, stored) for host in pieces[1::2]]
    gb = _COPIES * size / 1e9
    rates = {
        "link_up_gb_per_s": gb / _best_seconds(lanes, {Lane.FETCH: fetch}),
        "link_down_gb_per_s": gb / _best_seconds(lanes, {Lane.STORE: store}),
        "link_duplex_gb_per_s": gb / _best_seconds(lanes, {Lane.FETCH: fetch, Lane.STORE: store}),
    }
    if lanes.device.type != "cpu":
        numbers = torch.zeros(max(256, device_bytes - 2 * size) // 4, dtype=torch.float32, device=lanes.device)
        torch.accelerator.synchronize(lanes.device)  # the zeros are written before another lane adds to them
        seconds = _best_seconds(lanes, {Lane.UPDATE: [partial(numbers.add_, 1.0)]})
        rates["device_gb_per_s"] = _COPIES * 2 * numbers.nbytes / 1e9 / seconds
    return rates


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _best_seconds(lanes: Lanes, queues: Mapping[Lane, Sequence[Callable[[], Any]]]) -> float:
    """Seconds for `_COPIES` pieces of work on every lane of `queues` at the same time, until the last is done."""

    def once() -> float:
        start = lanes.stamp(next(iter(queues)))
        for turn in range(_COPIES):
            for lane, work in queues.items():
                lanes.submit(lane, work[turn % len(work)], after={})
        stops = [lanes.stamp(lane) for lane in queues]
        return max(lanes.elapsed_ms(start, stop) for stop in stops) / 1e3

    once()
    return min(once() for _ in range(_REPEATS))


def _submit_us(lanes: Lanes) -> float:
    """Microseconds for one thread to give work behind a mark to a lane, as a step does for every chunk."""
    memory = torch.zeros(2, 64, dtype=torch.float32, device=lanes.device)

    def once() -> float:
        start = time.perf_counter()
        for _ in range(_SUBMITS):
            lanes.submit(
                Lane.UPDATE, partial(_copy, memory[0], memory[1]), after={"measure: it is ready": lanes.mark()}
            )
        seconds = time.perf_counter() - start
        lanes.synchronize("measure: all is done")
        return seconds

    once()
    return 1e6 * min(once() for _ in range(_REPEATS)) / _SUBMITS


# Host #


def _host_updates(arena: Arena, threads: int) -> tuple[dict[int, float], float]:
    """Threads → GB/s of traffic, and the limit in 1e9 parameters per second and thread, on data in the cache."""
    state = _adamw_state(arena)
    numel = state[0].numel()
    _update([tensor[: _IN_CACHE[0]] for tensor in state])  # compile, or load the compiled code
    rates = {}
    update = _prepare(state)  # once for all slices, as in training: each call then holds the GIL only briefly
    for count in thread_counts(threads):
        size = min(_SLICE, numel // count)
        slices = [partial(update, i, i + size) for i in range(0, numel - size + 1, size)]
        best = max(_per_second(count, slices) for _ in range(_REPEATS))
        rates[count] = best * size * UPDATE_BYTES_PER_PARAM / 1e9
    return rates, _in_cache_limit(state)


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4, … and `threads` itself."""
    return sorted({1 << i for i in range(threads.bit_length())} | {threads})


def _in_cache_limit(state: Sequence[torch.Tensor]) -> float:
    # The difference between two sizes cancels the cost of a call; alternating, both run at the same clock rate.
    best = [float("inf")] * len(_IN_CACHE)
    for _ in range(_IN_CACHE_CALLS):
        for i, numel in enumerate(_IN_CACHE):
            piece = [tensor[:numel] for tensor in state]
            start = time.perf_counter()
            _update(piece)
            best[i] = min(best[i], time.perf_counter() - start)
    return (_IN_CACHE[1] - _IN_CACHE[0]) / 1e9 / max(best[1] - best[0], 1e-9)


def _adamw_state(arena: Arena) -> list[torch.Tensor]:
    """Weight, gradient, moments and master in the arena, with values that stay normal numbers over many updates."""
    numel = arena.nbytes // _STATE_BYTES
    wide, narrow = arena.flat[: 12 * numel].view(torch.float32), arena.flat[12 * numel : 16 * numel]
    exp_avg, exp_avg_sq, master = wide.chunk(3)
    weight, grad = narrow.view(torch.bfloat16).chunk(2)
    for tensor, value in ((weight, 1.0), (grad, 0.01), (exp_avg, 0.01), (exp_avg_sq, 1e-4), (master, 1.0)):
        tensor.fill_(value)
    return [weight, grad, exp_avg, exp_avg_sq, master]


def _update(state: Sequence[torch.Tensor]) -> None:
    _prepare(state)(0, state[0].numel())


def _prepare(state: Sequence[torch.Tensor]) -> adamw_host.Prepared:
    weight, grad, exp_avg, exp_avg_sq, master = state
    return adamw_host.prepare(
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        None,
        master,
        master_kind="fp32",
        coefficients=torch.tensor([1e-6, 1e-5, 1.0], dtype=torch.float32, device="cpu"),
        prints=None,
        found=torch.zeros(1, dtype=torch.int64, device="cpu"),
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
        decoupled=True,
        fresh=False,
    )


def _streaming(arena: Arena, threads: int) -> float:
    """GB/s of ``a += b``: in place, so that no cache line is read only to be overwritten."""
    numbers = arena.flat[: arena.nbytes // 8 * 8].view(torch.float32).fill_(1.0).numpy()
    into, other = np.split(numbers, 2)
    size = min(_SLICE, into.size // threads)
    slices = [slice(i, i + size) for i in range(0, into.size - size + 1, size)]
    work = [partial(np.add, into[piece], other[piece], out=into[piece]) for piece in slices]
    return max(_per_second(threads, work) for _ in range(_REPEATS)) * size * 12 / 1e9


def _per_second(threads: int, work: Sequence[Callable[[], Any]]) -> float:
    """Calls per second of all threads together; each repeats its own part of `work`.

    Every thread is timed on its own, so the slowest one does not lengthen the time of the others.
    """

    def repeat(first: int, crew: Crew[float]) -> float:
        calls = itertools.cycle(work[first :: crew.count])
        done, seconds, start = 0, 0.0, time.perf_counter()
        while seconds < _WINDOW_SECONDS:
            next(calls)()
            done += 1
            seconds = time.perf_counter() - start
        return done / seconds

    return sum(together(repeat, threads))
