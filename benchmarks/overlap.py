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

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import offstage
from benchmarks import harness, workload
from benchmarks.activation_loop import SMALL_TENSORS
from benchmarks.common import ON_GPU, Row, clean_up, gib, rounded, rss_bytes, synchronize, times
from benchmarks.harness import at_least, at_most
from benchmarks.workload import BATCH, IN_BACKWARD, IN_STEP, MAX_NORM, OVERLAP_FORWARD, RESIDENT, SIZES, Clip

FRACTIONS = (0.25, 0.5, 0.75)  # 0 and 1 are cases of their own
DEVICE_PEAKS_GIB = (14, 18, 24)


@dataclass(frozen=True, kw_only=True)
class Case(harness.Case):
    """One row: a way to train the workload, and what it has to reach."""

    setting: str
    """What rows of one curve have in common."""
    config: Mapping[str, Any]
    clip: Clip = "outside"
    batch: int = BATCH
    """Sequences of a micro-batch."""
    micro_batches: int = 1
    inputs_leave: bool = False
    """Whether the inputs of the checkpointed blocks wait on the host as well."""
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
        """The name of the baseline: as many tokens, in as many micro-batches."""
        tokens = "" if self.batch == BATCH else f"_{self.batch * SIZES['full'].sequence // 1024}k"
        return f"resident{tokens}" + ("" if self.micro_batches == 1 else f"_x{self.micro_batches}")


def case(name: str, config: Mapping[str, Any], groups: str = "", *, setting: str = "", **more: Any) -> Case:
    """Named after its setting; `_x4` is with as many micro-batches, `_32k` with as many tokens in one."""
    setting = setting or name.removesuffix("_x4").removesuffix("_32k")
    if name.endswith("_x4"):
        more |= {"micro_batches": 4, "short": True}
    if name.endswith("_32k"):
        more |= {"batch": 2 * BATCH, "short": True}
    return Case(name=name, setting=setting, config=config, groups=tuple(groups.split()), **more)


def curve(setting: str, config: Mapping[str, Any], clip: Clip) -> list[Case]:
    """Time and peak over fractions; 1 is measured by `overlap_forward` and `in_backward` themselves."""
    made = [(f"{setting}_{fraction}", {**config, "fraction": fraction}) for fraction in FRACTIONS]
    return [case(name, one, "curve", setting=setting, clip=clip, short=True) for name, one in made]


def auto(peak_gib: int) -> Case:
    """`device_peak` is a promise for the whole life of the process, so its peak counts from the case's start."""
    config = {**OVERLAP_FORWARD, "window": "auto", "device_peak": f"{peak_gib}GiB"}
    limits = {"peak_gib_since_start": peak_gib}
    return case(f"auto_{peak_gib}gib", config, "limits auto", setting="window_auto", short=True, at_most=limits)


CLIPPED: Mapping[str, Any] = {"setting": "in_backward_clip", "clip": "optimizer"}
"""The optimizer's own clipping with updates in backward."""
WINDOW = {**OVERLAP_FORWARD, "window": "8GiB"}
SIX_BYTES = {**IN_BACKWARD, "state_dtype": "bfloat16"}

CASES = [
    case("resident", RESIDENT),
    # Two to warm up, of four micro-batches each: resident state has nothing to learn.
    case("resident_x4", RESIDENT, warm_up=2),
    case("in_step", IN_STEP, "curve"),
    case("overlap_forward", OVERLAP_FORWARD, "limits curve", at_most={"ratio": 1.65, "peak_gib": 15}),
    case("overlap_forward_x4", OVERLAP_FORWARD, "limits", at_most={"ratio": 1.18}),
    case("window_8gib", WINDOW, "limits", setting="window", at_most={"ratio": 1.45, "peak_gib": 22}),
    case("in_backward", IN_BACKWARD, "limits curve", clip=None, at_most={"ratio": 1.12, "peak_gib": 12}),
    case("in_backward_x4", IN_BACKWARD, "limits", clip=None, at_most={"ratio": 1.05}),
    case("in_backward_6_bytes", SIX_BYTES, "limits", clip=None, at_most={"ratio": 1.05}),
    case(
        "clip_never_active",
        IN_BACKWARD,
        "limits clip",
        loss_scale=1e-2,
        at_most={"ratio": 1.18, "peak_gib": 16, "largest_norm": MAX_NORM},
        **CLIPPED,
    ),
    case(
        "clip_always_active",
        IN_BACKWARD,
        "limits clip",
        loss_scale=1e3,
        warm_up=12,  # speculation has to see that it loses before it switches itself off
        compared_with="overlap_forward",
        at_most={"ratio_to_overlap_forward": 1.05},
        at_least={"smallest_norm": MAX_NORM},
        **CLIPPED,
    ),
    # Nothing moves, so nothing may be asked to overlap.
    case("fraction_0", {**IN_STEP, "fraction": 0.0}, "curve", setting="resident_split", short=True),
    *curve("overlap_forward", OVERLAP_FORWARD, "outside"),
    *curve("in_backward", IN_BACKWARD, None),
    *map(auto, DEVICE_PEAKS_GIB),
]


# Measuring


def measure(case: Case, size_name: str, iterations: int) -> Row:
    """Everything about `case` that needs no other case."""
    start_bytes, start_rss = clean_up(), rss_bytes()
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
        batch=case.batch,
    )
    with contextlib.ExitStack() as ends:
        ends.callback(training.close)
        if case.inputs_leave:
            handle = offstage.offload_activations(model, **({} if size_name == "full" else SMALL_TENSORS))
            ends.callback(handle.remove)
        synchronize()
        build_s = time.perf_counter() - start
        found = training.measured(case.warm_up, max(2, iterations // 2) if case.short else iterations)
        norms = [float(norm) for norm in training.norms]
        return {
            **harness.described(case, "setting", "clip", "batch", "micro_batches", "loss_scale"),
            "size": size_name,
            "config": config,
            "fraction": config.get("fraction", 1.0),
            "build_s": round(build_s, 1),
            "allocated_at_start_gib": gib(start_bytes),
            **found,
            "rss_growth_gib": gib(rss_bytes() - start_rss),
            "peak_reserved_gib": gib(torch.cuda.max_memory_reserved()) if ON_GPU else 0.0,
            **training.counted(),
            "smallest_norm": rounded(min(norms, default=None)),
            "largest_norm": rounded(max(norms, default=None)),
            **({"inputs_left_gib": gib(handle.receipt().bytes_offloaded)} if case.inputs_leave else {}),
        }


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


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--iterations", type=int, default=8, help="measured after the warm-up; long cases take half")
    options = harness.parse(parser, CASES)
    done: dict[str, Row] = {}

    def measured(case: Case) -> Row:
        done[case.name] = compared(case, measure(case, options.size, options.iterations), done)
        return done[case.name]

    harness.run("overlap", options.cases, measured)


if __name__ == "__main__":
    main()
