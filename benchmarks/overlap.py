# SPDX-License-Identifier: Apache-2.0
"""What does offloading cost per iteration when the updates ride under backward and the next forward?

    python -m benchmarks.overlap                      every case, about five minutes on one H200
    python -m benchmarks.overlap in_backward curve    these cases or groups, and the baselines they are compared with
    python -m benchmarks.overlap --size small         a few seconds on a tiny model: does every case run?

The 2.70B workload, 8 x 2048 tokens per micro-batch. Resident state with fp32 masters and torch's own clipping is
measured first, in the same process, with as many micro-batches; `ratio` is the time over that. `must` holds what a case
has to reach, and whether it did.

`iteration_ms` is the mean over one span that begins and ends with an idle device, so the last step's updates, which no
forward hides, are in it. `median_ms` is the median distance between the ends of iterations on the caller's stream.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import offstage
from benchmarks.common import write_row
from benchmarks.workload import Size, adamw, build, tokens

SIZES = {
    "full": Size(),
    "small": Size(blocks=4, width=256, hidden=512, heads=4, vocabulary=1000, sequence=128),
}
SMALL_CHUNKS = {"chunk_bytes": "256KiB"}  # or the small model would be a single chunk
BATCH = 8
MAX_NORM = 1.0
FRACTIONS = (0.25, 0.5, 0.75)  # 0 and 1 are cases of their own
DEVICE_PEAKS_GIB = (14, 18, 24)

Clip = Literal["outside", "optimizer"] | None
"""By `torch.nn.utils.clip_grad_norm_`, by the optimizer's own method, or not at all."""

IN_STEP: Mapping[str, Any] = {"master_weights": "split"}
OVERLAP_FORWARD: Mapping[str, Any] = {"master_weights": "split", "overlap_forward": True}
IN_BACKWARD: Mapping[str, Any] = {"master_weights": "split", "overlap_forward": True, "update_in_backward": True}

RECEIPT_FIELDS = (
    "steps",
    "bytes_fetched",
    "bytes_stored",
    "exposed_ms",
    "hidden_ms",
    "link_gb_per_s",
    "speculation_hits",
    "speculation_misses",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a way to train the workload, and what it has to reach."""

    name: str
    setting: str
    """What rows of one curve have in common."""
    config: Mapping[str, Any]
    clip: Clip = "outside"
    micro_batches: int = 1
    loss_scale: float = 1.0
    """Moves the gradients' norm to one side of `MAX_NORM`; AdamW's updates hardly depend on it."""
    warm_up: int = 4
    """Hook counts and speculation are learned in the first iterations."""
    short: bool = False
    """Half as many measured iterations: each is long, or the row is one point of many."""
    compared_with: str | None = None
    """A case whose time this one's is divided by, besides resident."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    """Field of the row → its limit."""
    at_least: Mapping[str, float] = field(default_factory=dict)
    groups: tuple[str, ...] = ()

    @property
    def resident(self) -> str:
        """The name of the baseline."""
        return "resident" if self.micro_batches == 1 else f"resident_x{self.micro_batches}"

    def asked_for(self, wanted: list[str]) -> bool:
        return not wanted or self.name in wanted or any(group in wanted for group in self.groups)


# The cases


def baselines() -> list[Case]:
    resident = {"fraction": 0.0, "master_weights": "fp32"}
    return [
        Case(name="resident", setting="resident", config=resident),
        # Two to warm up, of four micro-batches each: resident state has nothing to learn.
        Case(name="resident_x4", setting="resident", config=resident, micro_batches=4, warm_up=2, short=True),
        Case(name="in_step", setting="in_step", config=IN_STEP, groups=("curve",)),
    ]


def overlap_forward_cases() -> list[Case]:
    return [
        Case(
            name="overlap_forward",
            setting="overlap_forward",
            config=OVERLAP_FORWARD,
            at_most={"ratio": 1.65, "peak_gib": 15},
            groups=("limits", "curve"),
        ),
        Case(
            name="overlap_forward_x4",
            setting="overlap_forward",
            config=OVERLAP_FORWARD,
            micro_batches=4,
            short=True,
            at_most={"ratio": 1.18},
            groups=("limits",),
        ),
        Case(
            name="window_8gib",
            setting="window",
            config={**OVERLAP_FORWARD, "window": "8GiB"},
            at_most={"ratio": 1.45, "peak_gib": 22},
            groups=("limits",),
        ),
    ]


def in_backward_cases() -> list[Case]:
    return [
        Case(
            name="in_backward",
            setting="in_backward",
            config=IN_BACKWARD,
            clip=None,
            at_most={"ratio": 1.12, "peak_gib": 12},
            groups=("limits", "curve"),
        ),
        Case(
            name="in_backward_x4",
            setting="in_backward",
            config=IN_BACKWARD,
            clip=None,
            micro_batches=4,
            short=True,
            at_most={"ratio": 1.05},
            groups=("limits",),
        ),
        Case(
            name="in_backward_6_bytes",
            setting="in_backward_6_bytes",
            config={**IN_BACKWARD, "state_dtype": "bfloat16"},
            clip=None,
            at_most={"ratio": 1.05},
            groups=("limits",),
        ),
    ]


def clipping_cases() -> list[Case]:
    """The optimizer's own clipping with updates in backward: never active, and always."""
    return [
        Case(
            name="clip_never_active",
            setting="in_backward_clip",
            config=IN_BACKWARD,
            clip="optimizer",
            loss_scale=1e-2,
            at_most={"ratio": 1.18, "peak_gib": 16, "largest_norm": MAX_NORM},
            groups=("limits", "clip"),
        ),
        Case(
            name="clip_always_active",
            setting="in_backward_clip",
            config=IN_BACKWARD,
            clip="optimizer",
            loss_scale=1e3,
            warm_up=12,  # speculation has to see that it loses before it switches itself off
            compared_with="overlap_forward",
            at_most={"ratio_to_overlap_forward": 1.05},
            at_least={"smallest_norm": MAX_NORM},
            groups=("limits", "clip"),
        ),
    ]


def curve_cases() -> list[Case]:
    """Time and peak over fractions; 1 is measured by `overlap_forward` and `in_backward` themselves."""
    cases = [
        Case(
            name="fraction_0",
            setting="resident_split",
            config={**IN_STEP, "fraction": 0.0},  # nothing moves, so nothing may be asked to overlap
            short=True,
            groups=("curve",),
        )
    ]
    settings: tuple[tuple[str, Mapping[str, Any], Clip], ...] = (
        ("overlap_forward", OVERLAP_FORWARD, "outside"),
        ("in_backward", IN_BACKWARD, None),
    )
    for setting, config, clip in settings:
        cases += [
            Case(
                name=f"{setting}_{fraction}",
                setting=setting,
                config={**config, "fraction": fraction},
                clip=clip,
                short=True,
                groups=("curve",),
            )
            for fraction in FRACTIONS
        ]
    return cases


def auto_cases() -> list[Case]:
    """`device_peak` is a promise for the whole life of the process, so its peak counts from the case's start."""
    return [
        Case(
            name=f"auto_{peak}gib",
            setting="window_auto",
            config={**OVERLAP_FORWARD, "window": "auto", "device_peak": f"{peak}GiB"},
            short=True,
            at_most={"peak_gib_since_start": peak},
            groups=("limits", "auto"),
        )
        for peak in DEVICE_PEAKS_GIB
    ]


CASES = [
    *baselines(),
    *overlap_forward_cases(),
    *in_backward_cases(),
    *clipping_cases(),
    *curve_cases(),
    *auto_cases(),
]


def select(wanted: list[str]) -> list[Case]:
    """The cases asked for by name or group, and those they are compared with, which come first."""
    chosen = [case for case in CASES if case.asked_for(wanted)]
    needed = {case.name for case in chosen} | {case.resident for case in chosen}
    needed |= {case.compared_with for case in chosen if case.compared_with}
    return [case for case in CASES if case.name in needed]


# Measuring


class Training:
    """The workload under one case, in the loop a user would write."""

    def __init__(self, case: Case, size: Size, config: Mapping[str, Any]) -> None:
        self.case = case
        self.model = build(size)
        self.optimizer = offstage.offload(adamw(self.model), self.model, **config)
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self._batches = itertools.cycle([tokens(size, BATCH, seed) for seed in range(8)])

    def iterate(self) -> None:
        for micro_batch in range(self.case.micro_batches):
            last = micro_batch == self.case.micro_batches - 1
            loss = self.model(next(self._batches))
            with contextlib.nullcontext() if last else self.optimizer.accumulate():
                (loss * (self.case.loss_scale / self.case.micro_batches)).backward()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def _clip(self) -> None:
        if self.case.clip == "outside":
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM))
        elif self.case.clip == "optimizer":
            self.norms.append(self.optimizer.clip_grad_norm_(MAX_NORM))

    def timed(self, iterations: int) -> dict[str, float]:
        """Mean and median time of an iteration. The host waits before the first and after the last only."""
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        ends[0].record()
        for end in ends[1:]:
            self.iterate()
            end.record()
        torch.cuda.synchronize()
        mean = 1e3 * (time.perf_counter() - start) / iterations
        median = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(ends))
        return {"iteration_ms": round(mean, 1), "median_ms": round(median, 1)}

    def counted(self) -> dict[str, Any]:
        """What the optimizer and the loop counted. Waits for the device."""
        receipt = self.optimizer.receipt()
        norms = [float(norm) for norm in self.norms]
        return {
            "host_state_gib": gib(receipt.host_state_bytes),
            "receipt": {name: rounded(getattr(receipt, name, None)) for name in RECEIPT_FIELDS},
            "smallest_norm": rounded(min(norms, default=None)),
            "largest_norm": rounded(max(norms, default=None)),
            "first_and_last_loss": [rounded(float(loss)) for loss in (self.losses[0], self.losses[-1])],
        }


def measure(case: Case, size_name: str, iterations: int) -> dict[str, Any]:
    """Everything about `case` that needs no other case."""
    start_bytes = forget_the_last_case()
    config = {**case.config, **(SMALL_CHUNKS if size_name == "small" else {})}
    start = time.perf_counter()
    training = Training(case, SIZES[size_name], config)
    try:
        torch.cuda.synchronize()
        build_s = time.perf_counter() - start
        for _ in range(case.warm_up):
            training.iterate()
        torch.cuda.synchronize()
        warm_up_peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        measured = max(2, iterations // 2) if case.short else iterations
        times = training.timed(measured)
        peak = torch.cuda.max_memory_allocated()
        return {
            "case": case.name,
            "setting": case.setting,
            "size": size_name,
            "config": config,
            "fraction": config.get("fraction", 1.0),
            "clip": case.clip,
            "micro_batches": case.micro_batches,
            "loss_scale": case.loss_scale,
            "warm_up": case.warm_up,
            "iterations": measured,
            "build_s": round(build_s, 1),
            **times,
            "allocated_at_start_gib": gib(start_bytes),
            "peak_gib": gib(peak),
            "peak_gib_since_start": gib(max(peak, warm_up_peak)),
            "peak_reserved_gib": gib(torch.cuda.max_memory_reserved()),
            **training.counted(),
        }
    finally:
        training.optimizer.close()


def forget_the_last_case() -> int:
    """Free what the last case held and start its peak anew; what is still allocated would blur every peak."""
    gc.collect()  # hooks tie model and optimizer into cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def compared(case: Case, row: Mapping[str, Any], done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`row` against the same run's other rows, and against the limits of `case`."""
    resident = done.get(case.resident, row if case.name == case.resident else {})
    result = {
        "resident_ms": resident.get("iteration_ms"),
        "ratio": times(row, resident, "iteration_ms"),
        "median_ratio": times(row, resident, "median_ms"),
    }
    if case.compared_with:
        result[f"ratio_to_{case.compared_with}"] = times(row, done.get(case.compared_with, {}), "iteration_ms")
    if row["size"] == "full":  # a tiny model has other ratios, and nothing to prove
        result["must"] = verdicts(case, {**row, **result})
    return result


def verdicts(case: Case, row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    must = {}
    for name, limit in case.at_most.items():
        found = row[name]
        must[name] = {"at_most": limit, "found": found, "met": found is not None and found <= limit}
    for name, limit in case.at_least.items():
        found = row[name]
        must[name] = {"at_least": limit, "found": found, "met": found is not None and found >= limit}
    return must


def times(row: Mapping[str, Any], other: Mapping[str, Any], name: str) -> float | None:
    return round(row[name] / other[name], 4) if other.get(name) else None


def gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 4)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, Mapping) else value


# The command


def summary(row: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    unmet = [name for name, verdict in row.get("must", {}).items() if not verdict["met"]]
    verdict = f"NOT MET: {', '.join(unmet)}" if unmet else "met" if row.get("must") else ""
    return (
        f"{row['case']:<24} {row['iteration_ms']:8.1f} ms  (median {row['median_ms']:8.1f})  {row['ratio'] or 0:6.3f} x"
        f"  peak {row['peak_gib']:6.2f} GiB (since start {row['peak_gib_since_start']:6.2f})  {verdict}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Whole iterations with overlapped updates, against resident state.")
    known = [case.name for case in CASES] + sorted({group for case in CASES for group in case.groups})
    parser.add_argument("case", nargs="*", help=f"all of them unless named: {', '.join(known)}")
    parser.add_argument("--iterations", type=int, default=8, help="measured after the warm-up; long cases take half")
    parser.add_argument("--size", choices=SIZES, default="full")
    options = parser.parse_args()
    unknown = [name for name in options.case if name not in known]
    if unknown:
        parser.error(f"no case or group {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def main() -> None:
    options = arguments()
    begin = time.perf_counter()
    done: dict[str, dict[str, Any]] = {}
    failed = []
    for case in select(options.case):
        print(f"[{time.perf_counter() - begin:4.0f} s] {case.name}: {case.config}", flush=True)
        try:
            row = measure(case, options.size, options.iterations)
        except Exception:  # one case that fails must not cost the others their rows
            traceback.print_exc()
            failed.append(case.name)
            continue
        done[case.name] = row | compared(case, row, done)
        write_row("overlap", done[case.name])
    print(f"\n{time.perf_counter() - begin:.0f} s in all", *map(summary, done.values()), sep="\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
