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

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import harness, workload
from benchmarks.common import ON_GPU, Row, clean_up, gib, peak_bytes, reset_peak, rounded, synchronize, times
from benchmarks.harness import at_least, at_most
from benchmarks.workload import IN_BACKWARD, IN_STEP, MAX_NORM, OVERLAP_FORWARD, RESIDENT, SIZES, Clip

FRACTIONS = (0.25, 0.5, 0.75)  # 0 and 1 are cases of their own
DEVICE_PEAKS_GIB = (14, 18, 24)


@dataclass(frozen=True, kw_only=True)
class Case(harness.Case):
    """One row: a way to train the workload, and what it has to reach."""

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

    def __post_init__(self) -> None:
        compared_with = (self.compared_with,) if self.compared_with else ()
        object.__setattr__(self, "needs", (self.resident, *compared_with))

    @property
    def resident(self) -> str:
        """The name of the baseline."""
        return "resident" if self.micro_batches == 1 else f"resident_x{self.micro_batches}"


# The cases


def baselines() -> list[Case]:
    return [
        Case(name="resident", setting="resident", config=RESIDENT),
        # Two to warm up, of four micro-batches each: resident state has nothing to learn.
        Case(name="resident_x4", setting="resident", config=RESIDENT, micro_batches=4, warm_up=2, short=True),
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


CASES = [*baselines(), *overlap_forward_cases(), *in_backward_cases(), *clipping_cases(), *curve_cases(), *auto_cases()]


# Measuring


def measure(case: Case, size_name: str, iterations: int) -> Row:
    """Everything about `case` that needs no other case."""
    start_bytes = clean_up()
    config = workload.config_for(size_name, case.config)
    start = time.perf_counter()
    model = workload.build(SIZES[size_name])
    training = workload.Training(
        model,
        workload.offloaded(model, size_name, case.config),
        SIZES[size_name],
        clip=case.clip,
        micro_batches=case.micro_batches,
        loss_scale=case.loss_scale,
    )
    try:
        synchronize()
        build_s = time.perf_counter() - start
        for _ in range(case.warm_up):
            training.iterate()
        synchronize()
        warm_up_peak = peak_bytes()
        reset_peak()
        measured = max(2, iterations // 2) if case.short else iterations
        found = training.timed(measured)
        peak = peak_bytes()
        norms = [float(norm) for norm in training.norms]
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
            **found,
            "allocated_at_start_gib": gib(start_bytes),
            "peak_gib": gib(peak),
            "peak_gib_since_start": gib(max(peak, warm_up_peak)),
            "peak_reserved_gib": gib(torch.cuda.max_memory_reserved()) if ON_GPU else 0.0,
            **training.counted(),
            "smallest_norm": rounded(min(norms, default=None)),
            "largest_norm": rounded(max(norms, default=None)),
        }
    finally:
        training.close()


def compared(case: Case, row: Row, done: Mapping[str, Row]) -> Row:
    """`row` against the same run's other rows, and against the limits of `case`."""
    resident = done.get(case.resident, row if case.name == case.resident else {})
    row |= {
        "resident_ms": resident.get("iteration_ms"),
        "ratio": times(row, resident, "iteration_ms"),
        "median_ratio": times(row, resident, "median_ms"),
    }
    if case.compared_with:
        row[f"ratio_to_{case.compared_with}"] = times(row, done.get(case.compared_with, {}), "iteration_ms")
    if row["size"] == "full":  # a tiny model has other ratios, and nothing to prove
        row["must"] = {name: at_most(limit, row[name]) for name, limit in case.at_most.items()}
        row["must"] |= {name: at_least(limit, row[name]) for name, limit in case.at_least.items()}
    return row


# The command


def summary(row: Row) -> str:
    """One line for the terminal."""
    return (
        f"{row['case']:<24} {row['iteration_ms']:8.1f} ms  (median {row['median_ms']:8.1f})  {row['ratio'] or 0:6.3f} x"
        f"  peak {row['peak_gib']:6.2f} GiB (since start {row['peak_gib_since_start']:6.2f})  {harness.verdict(row)}"
    )


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--iterations", type=int, default=8, help="measured after the warm-up; long cases take half")
    options = harness.parse(parser, CASES)
    done: dict[str, Row] = {}

    def measured(case: Case) -> Row:
        done[case.name] = compared(case, measure(case, options.size, options.iterations), done)
        return done[case.name]

    harness.run("overlap", options.cases, measured, summary)


if __name__ == "__main__":
    main()
