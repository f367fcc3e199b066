# SPDX-License-Identifier: Apache-2.0
"""Does offloading cost the same under FSDP2 as without it?

    python -m benchmarks.fsdp2                    every case, about three minutes on one H200
    python -m benchmarks.fsdp2 in_step window     these cases, and resident state
    python -m benchmarks.fsdp2 --size small       a few seconds on any machine: does every case run?

The 2.70B workload on one rank, where FSDP2 has nothing to communicate: each setting first as it is, then with every
block and the whole under `fully_shard`, in the same process. `ratio_to_unsharded` is the time over that of the same
setting without FSDP2, and must be within 3%; `ratio` is that over resident state of the same kind. `overlap_forward` is
not among the settings: FSDP2 gathers weights ahead of their module's forward, so `step()` waits for them. `slots`: how
many there were: with `update_in_backward` FSDP2 gets more by default, and the last setting gives both the same.

`fetches` is from a profile of one more iteration: how long state was on its way to the device (`fetch_ms`), how much of
that while backward's own kernels ran (`overlapped_ms`), and while those ran that FSDP2 makes to reduce gradients
(`under_reduce_ms`: at one rank these are its copies).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import statistics
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import offstage
from benchmarks.anywhere import DEVICE, Row, at_most, now, options_of, peak_bytes, reset_peak, synchronize
from benchmarks.checkpoints import SIZES, SMALL_CHUNKS
from benchmarks.common import write_row
from benchmarks.overlap import BATCH, IN_STEP, MAX_NORM, RECEIPT_FIELDS, gib, rounded, times
from benchmarks.trace import LANE_OF, SMALL_KERNELS, Event, Span, exported
from benchmarks.workload import GPT, adamw, build, tokens

WARM_UP = 4  # hook counts are learned, and a window opens, in the first iterations
MAX_RATIO = 1.03
BACKWARD = "backward"
REDUCES = "FSDP::post_backward_reduce"
"""How FSDP2's own spans around the reduction of gradients begin."""

ACTIVITIES = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to train the workload, with FSDP2 and without."""

    config: Mapping[str, Any]
    clips: bool = True
    small: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else the small model needs."""


SETTINGS = {
    "resident": Setting(config={"fraction": 0.0, "master_weights": "fp32"}),
    "in_step": Setting(config=IN_STEP, small=SMALL_CHUNKS),
    "window": Setting(config={**IN_STEP, "window": "8GiB"}, small={**SMALL_CHUNKS, "window": "256KiB"}),
    "in_backward": Setting(config={**IN_STEP, "update_in_backward": True}, clips=False, small=SMALL_CHUNKS),
    "in_backward_24_slots": Setting(
        config={**IN_STEP, "update_in_backward": True, "slots": 24}, clips=False, small=SMALL_CHUNKS
    ),
}


# Training


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}  # nobody else is there to be reached
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(model: GPT) -> GPT:
    """Each block, and what is left, as one would shard it on many ranks."""
    mesh = init_device_mesh(DEVICE.type, (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Training:
    """The workload under one setting, in the loop a user would write."""

    def __init__(self, setting: Setting, size_name: str, *, with_fsdp2: bool) -> None:
        size = SIZES[size_name]
        self.config = {**setting.config, **(setting.small if size_name == "small" else {})}
        self.model = build(size)
        if with_fsdp2:
            self.model = sharded(self.model)
        self.optimizer = offstage.offload(adamw(self.model), self.model, **self.config)
        self.losses: list[torch.Tensor] = []
        self._clips = setting.clips
        self._batches = itertools.cycle([tokens(size, BATCH, seed) for seed in range(8)])

    def iterate(self) -> None:
        loss = self.model(next(self._batches))
        with record_function(BACKWARD):
            loss.backward()
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def timed(self, iterations: int) -> Row:
        """Mean and median time of an iteration. The host waits before the first and after the last only."""
        synchronize()
        start = time.perf_counter()
        ends = [now()]
        for _ in range(iterations):
            self.iterate()
            ends.append(now())
        synchronize()
        mean = 1e3 * (time.perf_counter() - start) / iterations
        median = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(ends))
        return {"iteration_ms": round(mean, 1), "median_ms": round(median, 1)}

    def fetches(self) -> Row | None:
        """What a profile of one iteration says of the way of state to the device; `None` without a device."""
        synchronize()
        with profile(activities=ACTIVITIES) as trace:
            self.iterate()
            synchronize()
        return fetches_in(exported(trace)) if DEVICE.type == "cuda" else None


# The profile


def fetches_in(events: Sequence[Event]) -> Row:
    """How long fetches took, and how much of it under the kernels of backward."""
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    fetched = union(event for event in work if event["name"].startswith("Memcpy HtoD"))
    others = [event for event in work if not event["name"].startswith((*LANE_OF, *SMALL_KERNELS))]
    backward = launched_in(events, others, BACKWARD)
    reduces = launched_in(events, others, REDUCES)
    kernels = union(event for event in backward if event["cat"] == "kernel")
    whole = [(kernels[0][0], kernels[-1][1])] if kernels else []
    return {
        "fetch_ms": total_ms(fetched),
        "in_backward_ms": total_ms(both(fetched, whole)),
        "overlapped_ms": total_ms(both(fetched, kernels)),
        "under_reduce_ms": total_ms(both(fetched, union(reduces))),
        "backward_ms": total_ms(whole),
        "reduce_ms": total_ms(union(reduces)),
        "overlapped_share": round(total_ms(both(fetched, kernels)) / total_ms(fetched), 4) if fetched else None,
    }


def launched_in(events: Sequence[Event], work: Iterable[Event], span: str) -> list[Event]:
    """The work that was launched in spans whose name begins with `span`.

    Launches are looked up by time, not by thread: backward launches from autograd's own.
    """
    runtime = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = {event["args"]["correlation"]: event["ts"] for event in runtime if "correlation" in event["args"]}
    named = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(span)]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in named]
    found = []
    for event in work:
        at = launched.get(event["args"].get("correlation"))
        if at is not None and any(start <= at <= stop for start, stop in spans):
            found.append(event)
    return found


def union(events: Iterable[Event]) -> list[Span]:
    """When at least one of them ran, in microseconds and in order."""
    found: list[Span] = []
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def both(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Where two unions overlap."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            found.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def total_ms(spans: Iterable[Span]) -> float:
    return round(sum(stop - start for start, stop in spans) / 1e3, 2)


# Measuring


def measure(name: str, size_name: str, iterations: int, *, with_fsdp2: bool) -> Row:
    """Everything about one setting that needs no other."""
    start_bytes = forget_the_last_case()
    training = Training(SETTINGS[name], size_name, with_fsdp2=with_fsdp2)
    assert isinstance(training.model, FSDPModule) == with_fsdp2
    try:
        for _ in range(WARM_UP):
            training.iterate()
        synchronize()
        reset_peak()
        found = training.timed(iterations)
        peak = peak_bytes()
        receipt = training.optimizer.receipt()
        return {
            "case": name,
            "with_fsdp2": with_fsdp2,
            "size": size_name,
            "config": training.config,
            "slots": training.optimizer.plan.slots,
            "clips": SETTINGS[name].clips,
            "warm_up": WARM_UP,
            "iterations": iterations,
            **found,
            "allocated_at_start_gib": gib(start_bytes),
            "peak_gib": gib(peak),
            "host_state_gib": gib(receipt.host_state_bytes),
            "receipt": {field: rounded(getattr(receipt, field, None)) for field in RECEIPT_FIELDS},
            "fallbacks": list(receipt.fallbacks),
            "first_and_last_loss": [rounded(float(loss)) for loss in (training.losses[0], training.losses[-1])],
            "fetches": None if name == "resident" else training.fetches(),
        }
    finally:
        training.optimizer.close()


def forget_the_last_case() -> int:
    """Free what the last case held; the bytes that are still allocated, which would blur the peak."""
    gc.collect()  # hooks tie model and optimizer into cycles
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def compared(row: Row, done: Mapping[tuple[str, bool], Row]) -> Row:
    """`row` against the same setting without FSDP2, and against resident state of the same kind."""
    unsharded = done.get((row["case"], False), {})
    resident = done.get(("resident", row["with_fsdp2"]), row if row["case"] == "resident" else {})
    result: Row = {"resident_ms": resident.get("iteration_ms"), "ratio": times(row, resident, "iteration_ms")}
    if row["with_fsdp2"]:
        result |= {
            "unsharded_ms": unsharded.get("iteration_ms"),
            "unsharded_peak_gib": unsharded.get("peak_gib"),
            "ratio_to_unsharded": times(row, unsharded, "iteration_ms"),
            "median_ratio_to_unsharded": times(row, unsharded, "median_ms"),
        }
        if unsharded and row["size"] == "full":  # a tiny model has other ratios, and nothing to prove
            result["must"] = {"ratio_to_unsharded": at_most(MAX_RATIO, result["ratio_to_unsharded"])}
    return result


# The command


def summary(row: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    to_unsharded = f"{row['ratio_to_unsharded']:.3f} x unsharded" if row.get("ratio_to_unsharded") else ""
    verdict = "".join(" met" if one["met"] else " NOT MET" for one in row.get("must", {}).values())
    return (
        f"{row['case']:<12} {'FSDP2' if row['with_fsdp2'] else '':<6} {row['iteration_ms']:8.1f} ms"
        f"  peak {row['peak_gib']:6.2f} GiB  {row['ratio'] or 0:6.3f} x resident  {to_unsharded}{verdict}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Offloading under FSDP2 on one rank, against the same without it.")
    parser.add_argument("--iterations", type=int, default=8, help=f"measured after {WARM_UP} to warm up")
    return options_of(parser, SETTINGS, SIZES)


def main() -> None:
    options = arguments()
    begin = time.perf_counter()
    done: dict[tuple[str, bool], Row] = {}
    failed = []
    cases = [name for name in SETTINGS if not options.case or name in (*options.case, "resident")]
    with one_rank():
        for name, with_fsdp2 in itertools.product(cases, (False, True)):
            print(f"[{time.perf_counter() - begin:4.0f} s] {name}{' with FSDP2' * with_fsdp2}", flush=True)
            try:
                row = measure(name, options.size, options.iterations, with_fsdp2=with_fsdp2)
            except Exception:  # one case that fails must not cost the others their rows
                traceback.print_exc()
                failed.append(f"{name}{' with FSDP2' * with_fsdp2}")
                continue
            done[name, with_fsdp2] = row | compared(row, done)
            write_row("fsdp2", done[name, with_fsdp2])
    print(f"\n{time.perf_counter() - begin:.0f} s in all", *map(summary, done.values()), sep="\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
