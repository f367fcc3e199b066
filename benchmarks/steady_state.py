# SPDX-License-Identifier: Apache-2.0
"""Does a steady-state step, or a whole iteration with overlap, synchronise with the device or allocate on it?

    python -m benchmarks.steady_state
    python -m benchmarks.steady_state --size small     anywhere: does it run? Only a GPU can be synchronised with

Runs under `set_sync_debug_mode("error")` and looks for synchronising or allocating calls in a profiler trace. For steps
alone it counts allocations in the allocator's statistics. With overlap it trains a small GPT for 200 iterations and
compares the allocator's memory after the 20th and the last; the trace is of the last 10.

The debug mode does not know `cudaEventSynchronize`, the one host wait on the norm that `optimizer.clip_grad_norm_` may
make; the trace does, and it is counted. It is in the loop's own threads: the thread that feeds a lane whose queue is
full waits for room in it, and that is no wait of the caller's. All other calls count in whatever thread they are made.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile, record_function

import offstage
from benchmarks import harness
from benchmarks.common import DEVICE, ON_GPU, Row, allocated_bytes, synchronize
from benchmarks.harness import Case
from benchmarks.overlap_bits import update_all_early
from benchmarks.trace import ACTIVITIES
from benchmarks.workload import BATCH, GPT, SIZES, Size

SHAPES = [(2048, 2048), (2048, 4096), (4096,), (1000, 333)] * 4
FORBIDDEN = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "Synchronize", "cudaStreamCreate")
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16, fp32 masters": (torch.bfloat16, {}),
    "bf16, split masters": (torch.bfloat16, {"master_weights": "split"}),
    "fp32, half resident": (torch.float32, {"fraction": 0.5}),
}

SIZE = Size(blocks=4, width=256, hidden=512, heads=4, vocabulary=1000, sequence=128)
HOST_WAIT = "cudaEventSynchronize"
LOOP = "the caller's loop"
"""A span that is open in the caller's thread as long as the loop is traced."""
IN_BACKWARD_PASS = "autograd::engine::evaluate_function"
"""How the spans around the nodes of a backward begin; hooks are called inside them."""


@dataclass(frozen=True)
class OverlapCase:
    """A way to overlap, and the `max_norm` of each iteration in turn; without any, nothing is clipped."""

    config: dict[str, Any]
    max_norms: Sequence[float] = ()


OVERLAP_FORWARD = {"overlap_forward": True}
IN_BACKWARD = {"overlap_forward": True, "update_in_backward": True}
OVERLAP_CASES = {
    "overlap_forward": OverlapCase(OVERLAP_FORWARD),
    "overlap_forward, clipping": OverlapCase(OVERLAP_FORWARD, (1e-4,)),
    "window": OverlapCase({"window": "8MiB"}),
    "overlap_forward, window": OverlapCase({**OVERLAP_FORWARD, "window": "8MiB"}),
    "overlap_forward, window all": OverlapCase({**OVERLAP_FORWARD, "window": "all"}),
    "update_in_backward": OverlapCase(IN_BACKWARD),
    "update_in_backward, clipping never active": OverlapCase(IN_BACKWARD, (1e4,)),
    "update_in_backward, clipping active every other time": OverlapCase(IN_BACKWARD, (1e4, 1e-4)),
}


def steady_state(dtype: torch.dtype, config: dict[str, Any], steps: int = 20) -> Row:
    """Allocations and forbidden calls in `steps` steps; a synchronisation raises."""
    params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = offstage.offload(torch.optim.AdamW(params), chunk_bytes="8MiB", **config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    synchronize()
    before = num_allocations()
    with refused_synchronisations(), loop_trace() as trace:
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
    allocations = num_allocations() - before
    calls = calls_beyond_the_profilers(trace)
    optimizer.close()
    return {"steps": steps, "allocations": allocations, "forbidden_calls": dict(calls)}


def num_allocations() -> int:
    """On the device, since the process began."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) if ON_GPU else 0


@contextlib.contextmanager
def refused_synchronisations() -> Iterator[None]:
    """What synchronises with the device within raises."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def loop_trace() -> Iterator[profile]:
    """A trace of what is done inside, with the span by which the caller's thread is found."""
    with profile(activities=ACTIVITIES) as trace, record_function(LOOP):
        yield trace


def calls_beyond_the_profilers(trace: profile) -> Counter[str]:
    with loop_trace() as nothing:
        pass
    return forbidden_calls(trace.events()) - forbidden_calls(nothing.events())  # the profiler makes some itself


def forbidden_calls(events: Sequence[FunctionEvent]) -> Counter[str]:
    """By name, in whatever thread; waits for an event in the loop's own threads only."""
    own = threads_of_the_loop(events)
    found = [event for event in events if any(word in event.name for word in FORBIDDEN)]
    found = [event for event in found if not event.name.startswith("Activity")]
    return Counter(event.name for event in found if event.name != HOST_WAIT or event.device_resource_id in own)


def threads_of_the_loop(events: Sequence[FunctionEvent]) -> set[int]:
    """The caller's thread, and autograd's, which calls the hooks: while one of them waits, the loop does.

    A call's `device_resource_id` is the thread that made it. Its `thread` may not be: a call that no operator or span
    encloses has the thread that ended the trace there, not the one that made it.
    """
    spans = [event for event in events if event.device_type == DeviceType.CPU]  # a span has a shadow on the device
    caller = {event.device_resource_id for event in spans if event.name == LOOP}
    assert len(caller) == 1, f"a trace of one loop has one thread with the span {LOOP!r}, not {len(caller)}"
    return caller | {event.device_resource_id for event in spans if event.name.startswith(IN_BACKWARD_PASS)}


# Whole iterations


class Training:
    """A small GPT in the loop a user would write."""

    def __init__(self, case: OverlapCase, size: Size) -> None:
        torch.manual_seed(0)
        self.model = GPT(size).to(torch.bfloat16).to(DEVICE)
        plain = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        config = {"master_weights": "split", "chunk_bytes": "1MiB", **case.config}
        self.optimizer = offstage.offload(plain, self.model, **config)
        if self.optimizer.config.update_in_backward:
            update_all_early(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        shape = (BATCH, size.sequence)
        self._batches = itertools.cycle([torch.randint(size.vocabulary, shape).to(DEVICE) for _ in range(4)])
        self._max_norms = itertools.cycle(case.max_norms or (None,))

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.model(next(self._batches)).backward()
            max_norm = next(self._max_norms)
            if max_norm is not None:
                self.optimizer.clip_grad_norm_(max_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()


def overlap_steady_state(
    case: OverlapCase, *, iterations: int = 200, settled: int = 20, traced: int = 10, size: Size = SIZE
) -> Row:
    """What happens after the first `settled` iterations; a synchronisation raises."""
    training = Training(case, size)
    training.run(settled)
    before = allocator_bytes()
    with refused_synchronisations():
        training.run(iterations - settled - traced)
        with loop_trace() as trace:
            training.run(traced)
        after = allocator_bytes()
    calls = calls_beyond_the_profilers(trace)
    waits = calls.pop(HOST_WAIT, 0)
    receipt = training.optimizer.receipt()
    training.optimizer.close()
    return {
        "iterations": iterations,
        "settled_after": settled,
        "traced": traced,
        **{f"{name}_growth": after[name] - before[name] for name in after},
        **after,
        "forbidden_calls": dict(calls),
        "host_waits_per_iteration": waits / traced,
        "streams_created": sum(count for name, count in calls.items() if "StreamCreate" in name),
        "streams_used": streams_used(trace),
        "speculation_hits": receipt.speculation_hits,
        "speculation_misses": receipt.speculation_misses,
    }


def allocator_bytes() -> dict[str, int]:
    """Counted by the host as it allocates and frees: nothing is waited for."""
    reserved = torch.cuda.memory_reserved() if ON_GPU else 0
    return {"allocated_bytes": allocated_bytes(), "reserved_bytes": reserved}


def streams_used(trace: profile) -> int:
    """Streams that the device worked on. torch takes new ones from a pool, so that making one leaves no call behind."""
    return len({event.device_resource_id for event in trace.events() if event.device_type == DeviceType.CUDA})


def main() -> None:
    options = harness.parse(harness.command(__doc__), harness.cases_of([*CASES, *OVERLAP_CASES]))
    few: dict[str, Any] = (
        {} if options.size == "full" else {"iterations": 4, "settled": 2, "traced": 1, "size": SIZES["small"]}
    )

    def measure(case: Case) -> Row:
        if case.name in OVERLAP_CASES:
            return {"case": case.name} | overlap_steady_state(OVERLAP_CASES[case.name], **few)
        return {"case": case.name} | steady_state(*CASES[case.name], **({"steps": 1} if few else {}))

    harness.run("steady_state", options.cases, measure)


if __name__ == "__main__":
    main()
