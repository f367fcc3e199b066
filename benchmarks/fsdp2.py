# SPDX-License-Identifier: Apache-2.0
"""Does offloading cost the same under FSDP2 as without it?

    python -m benchmarks.fsdp2                    every case, about five minutes on one H200
    python -m benchmarks.fsdp2 in_step window     these cases, and resident state
    python -m benchmarks.fsdp2 --size small       a few seconds on any machine: does every case run?

The 2.70B workload on one rank, where FSDP2 has nothing to communicate: each setting as it is, and with every block, the
head and what is left under `fully_shard`. The rate of the link varies by some percent from one minute to the next
(`benchmarks.link`), so both are in memory and take turns, a few iterations each. `ratio_to_unsharded` is the median
over these rounds of the time over that of the same setting without FSDP2, and must be within 3%; `ratio` is that over
resident state of the same kind. `overlap_forward` is not among the settings: FSDP2 gathers weights ahead of their
module's forward, so `step()` waits for them. `slots`: how many there were: with `update_in_backward` FSDP2 gets more by
default, and the last setting gives both the same.

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
from benchmarks.anywhere import (
    DEVICE,
    Row,
    allocated_bytes,
    at_most,
    now,
    options_of,
    peak_bytes,
    reset_peak,
    synchronize,
)
from benchmarks.checkpoints import SIZES, SMALL_CHUNKS
from benchmarks.common import write_row
from benchmarks.overlap import BATCH, IN_STEP, MAX_NORM, RECEIPT_FIELDS, gib, rounded, times
from benchmarks.trace import LANE_OF, SMALL_KERNELS, Event, Span, exported
from benchmarks.workload import GPT, adamw, build, tokens

WARM_UP = 4  # hook counts are learned, and a window opens, in the first iterations
ITERATIONS = 3  # of a round; before them one more, which begins with an idle link
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
    """Each block, the head, and what is left, as one would shard it on many ranks.

    The gradients of what is left, the embedding, are reduced when backward is over; those of the head are there first.
    """
    mesh = init_device_mesh(DEVICE.type, (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
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

    def round(self) -> list[float]:
        """Milliseconds of each of some iterations. The host waits before the first and after the last only."""
        synchronize()
        self.iterate()
        ends = [now()]
        for _ in range(ITERATIONS):
            self.iterate()
            ends.append(now())
        synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]

    def most_bytes(self) -> int:
        """On the device in two iterations."""
        reset_peak()
        for _ in range(2):
            self.iterate()
        synchronize()
        return peak_bytes()

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


def measure(name: str, size_name: str, num_rounds: int) -> list[Row]:
    """Everything about one setting: a row without FSDP2, and one with it."""
    forget_the_last_case()
    trainings, rows = [], []
    try:
        for with_fsdp2 in (False, True):
            start_bytes = allocated_bytes()
            training = Training(SETTINGS[name], size_name, with_fsdp2=with_fsdp2)
            assert isinstance(training.model, FSDPModule) == with_fsdp2
            trainings.append(training)
            for _ in range(WARM_UP):
                training.iterate()
            synchronize()
            rows.append(
                {
                    "case": name,
                    "with_fsdp2": with_fsdp2,
                    "size": size_name,
                    "config": training.config,
                    "slots": training.optimizer.plan.slots,
                    "clips": SETTINGS[name].clips,
                    "peak_gib": gib(training.most_bytes() - start_bytes),
                }
            )
        rounds = [[training.round() for training in trainings] for _ in range(num_rounds)]
        for training, row, own in zip(trainings, rows, zip(*rounds, strict=True), strict=True):
            row |= times_of(own) | what_else(training)
            row["fetches"] = None if name == "resident" else training.fetches()
    finally:
        for training in trainings:
            training.optimizer.close()
    return rows


def times_of(rounds: Sequence[Sequence[float]]) -> Row:
    every = [ms for one in rounds for ms in one]
    return {
        "iterations_per_round": ITERATIONS,
        "rounds_ms": [round(statistics.median(one), 1) for one in rounds],
        "iteration_ms": round(statistics.mean(every), 1),
        "median_ms": round(statistics.median(every), 1),
    }


def what_else(training: Training) -> Row:
    receipt = training.optimizer.receipt()
    return {
        "host_state_gib": gib(receipt.host_state_bytes),
        "receipt": {field: rounded(getattr(receipt, field, None)) for field in RECEIPT_FIELDS},
        "fallbacks": list(receipt.fallbacks),
        "first_and_last_loss": [rounded(float(loss)) for loss in (training.losses[0], training.losses[-1])],
    }


def forget_the_last_case() -> None:
    """Free what the last case held."""
    gc.collect()  # hooks tie model and optimizer into cycles
    torch.cuda.empty_cache()


def compared(row: Row, unsharded: Row, resident: Mapping[bool, Row]) -> Row:
    """`row` against the same setting without FSDP2, and against resident state of the same kind."""
    found = resident.get(row["with_fsdp2"], {})
    result: Row = {"resident_ms": found.get("median_ms"), "ratio": times(row, found, "median_ms")}
    if row["with_fsdp2"]:
        ratios = [mine / its for mine, its in zip(row["rounds_ms"], unsharded["rounds_ms"], strict=True)]
        result |= {
            "unsharded_ms": unsharded["median_ms"],
            "unsharded_peak_gib": unsharded["peak_gib"],
            "unsharded_slots": unsharded["slots"],
            "ratios_to_unsharded": [round(one, 4) for one in ratios],
            "ratio_to_unsharded": round(statistics.median(ratios), 4),
            "mean_ratio_to_unsharded": times(row, unsharded, "iteration_ms"),
        }
        if row["size"] == "full":  # a tiny model has other ratios, and nothing to prove
            result["must"] = {"ratio_to_unsharded": at_most(MAX_RATIO, result["ratio_to_unsharded"])}
    return result


# The command


def summary(row: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    to_unsharded = f"{row['ratio_to_unsharded']:.3f} x unsharded" if row.get("ratio_to_unsharded") else ""
    verdict = "".join(" met" if one["met"] else " NOT MET" for one in row.get("must", {}).values())
    return (
        f"{row['case']:<20} {'FSDP2' if row['with_fsdp2'] else '':<6} {row['median_ms']:8.1f} ms"
        f"  peak {row['peak_gib']:6.2f} GiB  {row['ratio'] or 0:6.3f} x resident  {to_unsharded}{verdict}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Offloading under FSDP2 on one rank, against the same without it.")
    parser.add_argument("--rounds", type=int, default=5, help=f"of {ITERATIONS} iterations each, with and without")
    return options_of(parser, SETTINGS, SIZES)


def main() -> None:
    options = arguments()
    begin = time.perf_counter()
    done: list[Row] = []
    resident: dict[bool, Row] = {}
    failed = []
    cases = [name for name in SETTINGS if not options.case or name in (*options.case, "resident")]
    with one_rank():
        for name in cases:
            print(f"[{time.perf_counter() - begin:4.0f} s] {name}", flush=True)
            try:
                rows = measure(name, options.size, options.rounds)
            except Exception:  # one case that fails must not cost the others their rows
                traceback.print_exc()
                failed.append(name)
                continue
            for row in rows:
                if name == "resident":
                    resident[row["with_fsdp2"]] = row
                done.append(row | compared(row, rows[0], resident))
                write_row("fsdp2", done[-1])
    print(f"\n{time.perf_counter() - begin:.0f} s in all", *map(summary, done), sep="\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
