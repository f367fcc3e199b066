# SPDX-License-Identifier: Apache-2.0
"""Does offloading cost the same under FSDP2 as without it?

    python -m benchmarks.fsdp2                    every case, about five minutes on one H200
    python -m benchmarks.fsdp2 in_step window     these cases, and resident state
    python -m benchmarks.fsdp2 --slots-sweep      `update_in_backward` under FSDP2 with 3 to 24 slots, 80 seconds
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

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import profile, record_function

from benchmarks import common, harness, turns, workload
from benchmarks.common import DEVICE, ON_GPU, Row, gib, synchronize
from benchmarks.harness import Case, at_most
from benchmarks.trace import ACTIVITIES, LANE_OF, SMALL_KERNELS, Event, Span, close_gaps, exported, launched_in
from benchmarks.workload import IN_STEP, RESIDENT, SIZES, build

WARM_UP = 4  # hook counts are learned, and a window opens, in the first iterations
ITERATIONS = 3  # of a round; before them one more, which begins with an idle link
MAX_RATIO = 1.03
BACKWARD = "backward"
REDUCES = "FSDP::post_backward_reduce"
"""How FSDP2's own spans around the reduction of gradients begin."""

SLOTS = ((3, 8, 16), (6, 12, 24))
"""Numbers of slots that take turns: three sets of state are as much host memory as most machines have."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to train the workload, with FSDP2 and without."""

    config: Mapping[str, Any]
    clips: bool = True


IN_BACKWARD = {**IN_STEP, "update_in_backward": True}  # overlap_forward has no effect under FSDP2
SETTINGS = {
    "resident": Setting(config=RESIDENT),
    "in_step": Setting(config=IN_STEP),
    "window": Setting(config={**IN_STEP, "window": "8GiB"}),
    "in_backward": Setting(config=IN_BACKWARD, clips=False),
    "in_backward_24_slots": Setting(config={**IN_BACKWARD, "slots": 24}, clips=False),
}


# Training


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    begin_one_rank()
    try:
        yield
    finally:
        dist.destroy_process_group()


def begin_one_rank(backend: str = "nccl") -> None:
    """`backend`: of a process with a GPU."""
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}  # there is no other rank to be reached
    dist.init_process_group(backend if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)


Sharded = TypeVar("Sharded", bound=nn.Module)


def sharded(model: Sharded, **policies: Any) -> Sharded:
    """Each block, the head, and what is left, as one would shard it on many ranks.

    The gradients of what is left, the embedding, are reduced when backward is over; those of the head are there first.
    """
    mesh = init_device_mesh(DEVICE.type, (1,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **policies)
    fully_shard([model.norm, model.head], mesh=mesh, **policies)  # type: ignore[list-item]
    fully_shard(model, mesh=mesh, **policies)
    return model


class Training(workload.Training):
    """The workload under one setting; profiles find its backward by name."""

    def __init__(self, setting: Setting, size_name: str, *, with_fsdp2: bool) -> None:
        self.config = workload.config_for(size_name, setting.config)
        model = build(SIZES[size_name])
        if with_fsdp2:
            model = sharded(model)
        optimizer = workload.offloaded(model, size_name, setting.config)
        super().__init__(model, optimizer, SIZES[size_name], clip="outside" if setting.clips else None)

    def backward(self, loss: torch.Tensor) -> None:
        with record_function(BACKWARD):
            loss.backward()

    def most_bytes(self) -> int:
        """On the device in two iterations."""
        common.reset_peak()
        for _ in range(2):
            self.iterate()
        synchronize()
        return common.peak_bytes()

    def fetches(self) -> Row | None:
        """What a profile of one iteration says of the way of state to the device; `None` without a device."""
        synchronize()
        with profile(activities=ACTIVITIES) as trace:
            self.iterate()
            synchronize()
        return fetches_in(exported(trace)) if ON_GPU else None


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


def union(events: Iterable[Event]) -> list[Span]:
    """When at least one of them ran, in microseconds and in order."""
    return close_gaps(sorted((event["ts"], event["ts"] + event["dur"]) for event in events))


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
    common.clean_up()
    trainings: list[Training] = []
    rows: list[Row] = []
    try:
        for with_fsdp2 in (False, True):
            start_bytes = common.allocated_bytes()
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
        rounds = [[training.turn(ITERATIONS) for training in trainings] for _ in range(num_rounds)]
        for training, row, own in zip(trainings, rows, zip(*rounds, strict=True), strict=True):
            row |= {"iterations_per_round": ITERATIONS} | turns.times_of(own) | training.counted()
            row["fetches"] = None if name == "resident" else training.fetches()
    finally:
        for training in trainings:
            training.close()
    return rows


def compared(row: Row, unsharded: Row, resident: Mapping[bool, Row]) -> Row:
    """`row` against the same setting without FSDP2, and against resident state of the same kind."""
    found = resident.get(row["with_fsdp2"], {})
    row |= {"resident_ms": found.get("median_ms"), "ratio": common.times(row, found, "median_ms")}
    if row["with_fsdp2"]:
        ratios = [mine / its for mine, its in zip(row["rounds_ms"], unsharded["rounds_ms"], strict=True)]
        row |= {
            "unsharded_ms": unsharded["median_ms"],
            "unsharded_peak_gib": unsharded["peak_gib"],
            "unsharded_slots": unsharded["slots"],
            "ratios_to_unsharded": [round(one, 4) for one in ratios],
            "ratio_to_unsharded": round(statistics.median(ratios), 4),
            "mean_ratio_to_unsharded": common.times(row, unsharded, "iteration_ms"),
        }
        if row["size"] == "full":  # a tiny model has other ratios, and nothing to prove
            row["must"] = {"ratio_to_unsharded": at_most(MAX_RATIO, row["ratio_to_unsharded"])}
    return row


def slots_sweep(size_name: str, num_rounds: int) -> Iterator[Row]:
    """FSDP2 on one rank, updates in backward: numbers of slots that take turns with resident state."""

    def maker(setting: Setting) -> Callable[[], Training]:
        return lambda: Training(setting, size_name, with_fsdp2=True)

    with turns.Contest(maker(SETTINGS["resident"])) as contest:
        for slots in SLOTS:
            settings = {str(n): Setting(config={**IN_BACKWARD, "slots": n}, clips=False) for n in slots}
            makers = {name: maker(setting) for name, setting in settings.items()}
            for name, row in contest.measure(makers, num_rounds, iterations=2, warm_up=WARM_UP).items():
                about = {"config": dict(settings[name].config), "slots": int(name), "clips": False}
                yield {"case": "slots_sweep", "with_fsdp2": True, "size": size_name, **about, **row}


# The command


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--rounds", type=int, help="5 of 3 iterations with and without FSDP2; 3 of 2 of the sweep")
    parser.add_argument("--slots-sweep", action="store_true", help="numbers of slots instead of the cases")
    needs = dict.fromkeys(SETTINGS, ("resident",))
    options = harness.parse(parser, harness.cases_of(SETTINGS, needs=needs))
    resident: dict[bool, Row] = {}

    def measured(case: Case) -> Iterator[Row]:
        rows = measure(case.name, options.size, options.rounds or 5)
        for row in rows:
            if case.name == "resident":
                resident[row["with_fsdp2"]] = row
            yield compared(row, rows[0], resident)

    with one_rank():
        if options.slots_sweep:
            sweep = harness.cases_of(["slots_sweep"])
            harness.run("fsdp2", sweep, lambda _: slots_sweep(options.size, options.rounds or 3))
        else:
            harness.run("fsdp2", options.cases, measured)


if __name__ == "__main__":
    main()
