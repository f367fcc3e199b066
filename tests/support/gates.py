# SPDX-License-Identifier: Apache-2.0
"""Runs of the model of `benchmarks.overlap_bits` on a device, and what tests on real streams do to them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.overlap_bits import SMALL, Run, mismatches, train
from offstage.errors import RaceError
from offstage.lanes.lanes import Lane
from offstage.lanes.testing.checked import CheckedLanes
from tests.support.lives import end_step

DEVICE = "cuda"
STEPS = 8
run_gates = functools.partial(train, steps=STEPS, size=SMALL, device=DEVICE)


def assert_same(run: Run, reference: Run) -> None:
    assert not {name: count for name, count in mismatches(run, reference).items() if count}
    assert all(weight.isfinite().all() for weight in run.weights)


class Forgetful(CheckedLanes):
    """Leaves out the wait of one name."""

    def __init__(self, device: torch.device, forgotten: str) -> None:
        super().__init__(device)
        self._forgotten = forgotten

    def submit(self, lane: Lane, work: Callable[[], None], *, after: dict, **buffers: Any) -> Any:
        return super().submit(lane, work, after=self._kept(after), **buffers)

    def submit_on_host(self, slices: Sequence[Callable[[], None]], *, after: dict, **buffers: Any) -> Any:
        return super().submit_on_host(slices, after=self._kept(after), **buffers)

    def wait(self, mark: Any, reason: str) -> None:
        if reason != self._forgotten:
            super().wait(mark, reason)

    def wait_on_host(self, mark: Any, reason: str) -> None:
        if reason != self._forgotten:
            super().wait_on_host(mark, reason)

    def _kept(self, after: dict) -> dict:
        return {reason: mark for reason, mark in after.items() if reason != self._forgotten}


def is_a_race(error: BaseException | None) -> bool:
    """It, or what it comes from."""
    while error is not None and not isinstance(error, RaceError):
        error = error.__cause__ or error.__context__
    return error is not None


class Elsewhere:
    """Forward and backward on a stream of their own; `step_too`: everything else as well."""

    def __init__(self, *, step_too: bool) -> None:
        self.stream = torch.cuda.Stream()
        self._step_too = step_too

    @contextlib.contextmanager
    def __call__(self, moment: str) -> Iterator[None]:
        if moment == "step" and not self._step_too:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)


class DeviceMemory:
    """By how much device memory has grown: for good, and for a while."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def growth(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - self._before

    def peak_growth(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._before


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Torch raises at whatever makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_on_three_streams(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Each step from another stream; gradients are freed and their memory is overwritten right after it."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    generator = torch.Generator(DEVICE).manual_seed(1)
    for step in range(steps):
        stream = streams[step % 3]
        stream.wait_stream(streams[(step - 1) % 3])
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for param in params:
                param.grad = torch.randn(param.shape, device=DEVICE, generator=generator)
            end_step(optimizer)
            for param in [*params, *params]:
                torch.full(param.shape, torch.nan, device=DEVICE)  # takes the gradients' memory
    torch.cuda.synchronize()
