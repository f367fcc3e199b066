# SPDX-License-Identifier: Apache-2.0
"""Is `offstage.fit(model, optimizer, device_peak=...)` as fast as the best of many settings made by hand?

    python -m benchmarks.fit gpt                      one workload: its settings by hand, then fit at four limits
    python -m benchmarks.fit llama_hand               a workload's settings made by hand only
    python -m benchmarks.fit llama_fit llama_grow     fit only; rows of earlier commands are looked up
    python -m benchmarks.fit gpt_fit_1 gpt_resident   these cases
    python -m benchmarks.fit --table                  what the rows say, without measuring
    python -m benchmarks.fit --size small             some seconds for each of 84 cases, anywhere: does every case run?

gpt        the 2.70B GPT of `workload.py` without its checkpointing
llama      a 1.35B Llama of the transformers library, nothing checkpointed
llama7b    the same with 6.74B parameters

8 x 2048 tokens, bf16, split masters; `optimizer.clip_grad_norm_` in every loop, and every norm is within the limit.
Settings made by hand share a process, one after the other; every other case has its own. A case is WORKLOAD_NAME, where
NAME is one of

peaks            what fit measures of the loop on the whole device, and four values of device_peak made from it: 1.05
                 times the least that trains, 1.05 times what everything takes (or what the device has), two between
fit_1 ... fit_4  fit under these. `iteration_ms` is the median of the last six iterations, at least 12 of them and six
                 after the last switch; `median_7_to_12_ms` is that of iterations 7 to 12
fit_clipped      fit_2 with every norm over the limit: updates made in backward have to be taken back
grow             fit_2 with a quarter of the tokens in a sequence, and with all of them from the 13th iteration on
torch_masters    fused AdamW of torch on fp32 masters, everything on the device
torch            the same on the bf16 parameters themselves
others           settings made by hand (`BY_HAND` in fit_jobs.py): `offload()`, and a choice for every layer

`peak_gib` is the most allocated since the case began, over all resets of the statistics. The best setting made by hand
under a device_peak is a look-up over the newest rows of the same workload, size and device. `must` holds what a row of
fit has to reach, and whether it did.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import offstage
from benchmarks import fit_jobs, harness, workload
from benchmarks.common import (
    DEVICE,
    ON_GPU,
    RESULTS,
    Row,
    clean_up,
    end_before_host_memory_does,
    gib,
    now,
    rss_bytes,
    synchronize,
    write_row,
)
from benchmarks.fit_jobs import BY_HAND, HOST, LOSS_SCALE, TORCH, WORKLOADS, LifePeak, Workload
from benchmarks.harness import at_most
from benchmarks.llama import LLAMA_MODULE
from benchmarks.memory_cap import cap_device_memory
from offstage.optimizer.optimizer import runtime_of
from offstage.planning.choices import Choice
from offstage.planning.choosing import least_memory, predict
from offstage.planning.fit_plan import FitPlan, describe
from offstage.planning.job import Setting

QUESTION = "fit"
PEAKS = 4
ROOM = 1.05
"""Over the least that trains, and over what everything takes."""
STEP_GIB = 0.25
"""Limits are multiples of it, so that they are the same in every run."""
ITERATIONS = 12
LAST = 6
MOST_ITERATIONS = 24
CLIPPED_SCALE = 1e3
WARM_UP, TIMED = 5, 4
"""Iterations of settings made by hand: hook counts and speculation are learned in the first ones."""
TIMES_BY_HAND = 1.05
"""Over the best setting made by hand."""
TIMES_TORCH = 1.01
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True)
class Case(harness.Case):
    job: str
    kind: str
    """What of the workload: a name in `BY_HAND` or `TORCH`, ``"peaks"``, ``"fit_2"``, ..."""

    @property
    def is_by_hand(self) -> bool:
        return self.kind in BY_HAND or self.kind in TORCH

    @property
    def limit(self) -> int:
        """Which device_peak; -1 if none."""
        number = self.kind.removeprefix("fit_")
        return int(number) - 1 if number.isdigit() else 1 if self.kind in ("fit_clipped", "grow") else -1


def _cases(job: str) -> Iterator[Case]:
    fits = [f"fit_{number + 1}" for number in range(PEAKS)]
    for group, kinds in (("hand", (*BY_HAND, *TORCH)), ("fit", ("peaks", *fits)), ("more", ("fit_clipped", "grow"))):
        for kind in kinds:
            yield Case(name=f"{job}_{kind}", job=job, kind=kind, groups=(job, group, f"{job}_{group}"))


CASES = [case for job in WORKLOADS for case in _cases(job)]


# In the case's own process: one job followed


@dataclass
class Followed:
    """Iterations of a training, their times, and when fit changed its mind."""

    training: workload.Training
    ends: list[Any]
    switches: list[Row]
    setting: Setting | None = None

    @classmethod
    def begin(cls, training: workload.Training) -> Followed:
        synchronize()
        return cls(training, [now()], [])

    @property
    def iterations(self) -> int:
        return len(self.ends) - 1

    @property
    def last_switch(self) -> int:
        """The number of the last iteration that ended with another setting than it began with, from 1 on."""
        return int(self.switches[-1]["iteration"]) if self.switches else 0

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.training.iterate()
            self.ends.append(now())
            self._note()

    def _note(self) -> None:
        plan = getattr(self.training.optimizer, "fitted", None)
        if plan is not None and plan.setting != self.setting:
            self.setting = plan.setting
            self.switches.append({"iteration": self.iterations, **planned(plan)})

    def laps(self) -> list[float]:
        """Milliseconds of each iteration, on the caller's stream. Waits for the device."""
        synchronize()
        pairs = zip(self.ends, self.ends[1:], strict=False)
        return [round(one.elapsed_time(other), 2) for one, other in pairs]

    def converge(self) -> None:
        """At least 12 iterations, and six after the last switch."""
        target = self.iterations + ITERATIONS
        most = self.iterations + MOST_ITERATIONS
        while self.iterations < most and (self.iterations < target or self.iterations < self.last_switch + LAST):
            self.run(1)


def planned(plan: FitPlan) -> Row:
    return {
        "decided": describe(plan.setting, plan.overrides),
        "overrides": dict(plan.overrides),
        "choices": "".join(choice.value[0] for choice in plan.setting.choices),  # keep, remake or recompute, offload
        "predicted_ms": round(plan.predicted.iteration_ms, 2),
        "predicted_gib": gib(plan.predicted.device_bytes),
        "predicted_host_gib": gib(plan.predicted.host_bytes),
    }


def fitted_training(job: Workload, size_name: str, device_peak: int | None, **more: Any) -> workload.Training:
    """fit takes a model on the CPU, so that no weight has to be on the device that will not stay there."""
    small = {} if size_name == "full" else {"chunk_bytes": "32KiB", "min_bytes": "4KiB"}
    model = job.build(size_name, home=HOST, checkpointed=False)
    optimizer = offstage.fit(model, workload.adamw(model), device_peak=device_peak, master_weights="split", **small)
    return fit_jobs.training(job, size_name, model, optimizer, **more)


def measure_peaks(job: Workload, size_name: str) -> Row:
    """What fit measures of the loop, and what the planner makes of it."""
    training = fitted_training(job, size_name, None)
    followed = Followed.begin(training)
    while training.optimizer.fitted is None and followed.iterations < ITERATIONS:
        followed.run(1)
    fitted: Any = runtime_of(training.optimizer).watcher
    if training.optimizer.fitted is None:
        raise RuntimeError(
            f"fit has made no plan in {ITERATIONS} iterations; its log says why. Look at layers_of(model)."
        )
    job_now, limits = fitted.job, fitted.limits
    least = least_memory(job_now, limits).device_bytes
    everything = Setting((Choice.KEEP,) * job_now.num_layers, resident=job_now.most_resident)
    most = predict(job_now, everything).device_bytes
    return {
        "least_gib": gib(least),
        "everything_gib": gib(most),
        "device_gib": gib(limits.device),
        "device_peaks": limits_between(least, min(ROOM * most, limits.device), is_full=size_name == "full"),
        "loop": {
            "compute_ms": round(job_now.loop.compute_ms, 2),
            "saved_gib": gib(sum(layer.saved_bytes for layer in job_now.loop.layers)),
            "micro_batches": job_now.loop.micro_batches,
            "clips": job_now.loop.clips,
        },
        "laps_ms": followed.laps(),
    }


def limits_between(least: float, most: float, *, is_full: bool) -> list[int]:
    """Four limits in bytes, each as many times the one before."""
    first = ROOM * least
    ratio = (max(most, first) / first) ** (1 / (PEAKS - 1))
    unit = STEP_GIB * 2**30 if is_full else 1
    found = [int(unit * math.ceil(first * ratio**number / unit)) for number in range(PEAKS)]
    found[-1] = max(found[0], int(unit * (first * ratio ** (PEAKS - 1) // unit)))  # no more than there is
    return found


def measure_fit(case: Case, job: Workload, size_name: str, device_peak: int) -> Row:
    grows = case.kind == "grow"
    whole = job.sizes[size_name].sequence
    scale = CLIPPED_SCALE if case.kind == "fit_clipped" else LOSS_SCALE
    training = fitted_training(job, size_name, device_peak, loss_scale=scale, sequence=whole // 4 if grows else 0)
    followed = Followed.begin(training)
    followed.converge()
    row: Row = {}
    if grows:
        row = {"short": converged(followed, 0)}
        training.batches = fit_jobs.batches(job.sizes[size_name])
        row["grew_after_iteration"] = followed.iterations
        followed.converge()
    plan = training.optimizer.fitted
    assert plan is not None, "fit has made no plan: its log says why"
    norms = [float(norm) for norm in training.norms]
    return row | {
        **converged(followed, row.get("grew_after_iteration", 0)),
        **planned(plan),
        "switches": followed.switches,
        "stage": runtime_of(training.optimizer).watcher.stage.value,  # type: ignore[union-attr]
        "laps_ms": followed.laps(),
        "largest_norm": round(max(norms), 4),
        "smallest_norm": round(min(norms), 4),
        "receipt": workload.receipt_numbers(training.optimizer.receipt()),
        "plan": json.loads(plan.to_json()),
    }


def converged(followed: Followed, before: int) -> Row:
    """Of the iterations behind the first `before`."""
    laps = followed.laps()[before:]
    return {
        "iterations": len(laps),
        "iteration_ms": round(statistics.median(laps[-LAST:]), 2),
        "median_7_to_12_ms": round(statistics.median(laps[ITERATIONS - LAST : ITERATIONS]), 2),
        "settled_in_iteration": max(0, followed.last_switch - before),
    }


def measure_by_hand(case: Case, job: Workload, size_name: str) -> Row:
    setting = BY_HAND[case.kind]
    home = HOST if setting.config.get("weights") == "host" else DEVICE
    model = job.build(size_name, home=home, checkpointed=setting.checkpointed)
    optimizer = workload.offloaded(model, size_name, setting.config)
    handle = fit_jobs.choose(model, setting, size_name)
    training = fit_jobs.training(job, size_name, model, optimizer)
    try:
        row = timed(training) | {"receipt": workload.receipt_numbers(optimizer.receipt())}
        return row | ({"left_gib": gib(handle.receipt().bytes_offloaded)} if handle is not None else {})
    finally:
        if handle is not None:
            handle.remove()
        optimizer.close()


def measure_torch(case: Case, job: Workload, size_name: str) -> Row:
    model = job.build(size_name, home=DEVICE, checkpointed=False)
    return timed(fit_jobs.training(job, size_name, model, TORCH[case.kind](model)))


def timed(training: workload.Training) -> Row:
    followed = Followed.begin(training)
    followed.run(WARM_UP + TIMED)
    laps = followed.laps()
    return {"iterations": len(laps), "iteration_ms": round(statistics.median(laps[-TIMED:]), 2), "laps_ms": laps}


def measure_each(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Settings made by hand, one after the other. What was measured is there even if one of them ends the process."""
    rows: dict[str, Row] = {}
    for case in cases:
        clean_up()
        try:
            rows[case.name] = measure(case, options)
        except Exception as error:
            traceback.print_exc()
            rows[case.name] = {"error": f"{type(error).__name__}: {error}"}
        options.result.write_text(json.dumps(rows))
    os._exit(0)  # as `harness.report` does


def measure(case: Case, options: argparse.Namespace) -> Row:
    """The row of one case, without those that it is compared with."""
    job, size_name = WORKLOADS[case.job], options.size
    if options.cap and options.device_peak:
        cap_device_memory((1 + options.cap) * options.device_peak / 2**30)
    peak, start = LifePeak(), time.perf_counter()
    try:
        if case.kind == "peaks":
            row = measure_peaks(job, size_name)
        elif case.limit >= 0:
            row = measure_fit(case, job, size_name, options.device_peak)
        elif case.kind in TORCH:
            row = measure_torch(case, job, size_name)
        else:
            row = measure_by_hand(case, job, size_name)
    except torch.OutOfMemoryError as error:
        row = {"error": f"{OUT_OF_MEMORY}: {str(error).splitlines()[0][:300]}"}
    peak.look()
    peak.close()
    return row | {
        "peak_gib": gib(peak.allocated),
        "peak_reserved_gib": gib(peak.reserved),
        "resets": peak.resets,
        "rss_gib": gib(rss_bytes()),
        "took_s": round(time.perf_counter() - start, 1),
    }


# The parent: what it is compared with


def written(size_name: str) -> dict[str, Row]:
    """The newest row of each case of this size and device, in the folder of results."""
    path = Path(os.environ.get("OFFSTAGE_RESULTS", RESULTS)) / f"{QUESTION}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    device = torch.cuda.get_device_name() if ON_GPU else "cpu"
    rows = [row for row in map(json.loads, lines) if row["size"] == size_name and row["machine"]["device"] == device]
    return {row["case"]: row for row in rows}


def best_by_hand(job: str, device_peak_gib: float, rows: Mapping[str, Row]) -> Row | None:
    """The fastest setting made by hand whose peak is known, and was not over the limit."""
    found = [rows[name] for kind in BY_HAND if (name := f"{job}_{kind}") in rows]
    fitting = [row for row in found if "iteration_ms" in row and 0 < row["peak_gib"] <= device_peak_gib]
    return min(fitting, key=lambda row: float(row["iteration_ms"]), default=None)


def compared(case: Case, row: Row, rows: Mapping[str, Row]) -> Row:
    """A row of fit beside the best by hand, plain torch where everything fits, and fit without growth."""
    if case.limit < 0 or "iteration_ms" not in row:
        return row
    must = {"peak_gib": at_most(row["device_peak_gib"], row["peak_gib"])}
    if case.kind == "grow":
        row |= _over(row, rows.get(f"{case.job}_fit_{case.limit + 1}"), "fit_of_the_whole_length")
    elif case.kind != "fit_clipped":
        row |= _over(row, best_by_hand(case.job, row["device_peak_gib"], rows), "best_by_hand")
        for kind in TORCH:
            other = rows.get(f"{case.job}_{kind}", {})
            row |= _over(row, other if other.get("peak_gib", math.inf) <= row["device_peak_gib"] else None, kind)
    for name, limit in (("ratio_to_best_by_hand", TIMES_BY_HAND), ("ratio_to_torch_masters", TIMES_TORCH)):
        if name in row:
            must[name] = at_most(limit, row[name])
    return row | ({"must": must} if row["size"] == "full" else {})  # without a device there are no peaks


def _over(row: Row, other: Row | None, name: str) -> Row:
    """`row`'s time over that of another row, if there is one."""
    if other is None or "iteration_ms" not in other:
        return {name: None}
    ratio = round(row["iteration_ms"] / other["iteration_ms"], 4)
    return {name: other["case"], f"{name}_ms": other["iteration_ms"], f"ratio_to_{name}": ratio}


def about(case: Case, size_name: str) -> Row:
    found = {**harness.described(case, "job", "kind"), "size": size_name}
    if case.kind in BY_HAND:
        config = workload.config_for(size_name, BY_HAND[case.kind].config)
        found |= {"config": config, "layers": BY_HAND[case.kind].layers}
    return found


def in_own_process(case: Case, options: argparse.Namespace, device_peak: int = 0) -> Row:
    arguments = ["--size", options.size, "--device-peak", str(device_peak), "--cap", str(options.cap)]
    timeout_s = WORKLOADS[case.job].timeout_s
    row = about(case, options.size)
    row |= {"device_peak_gib": gib(device_peak)} if device_peak else {}
    imports = () if WORKLOADS[case.job].llama is None else (LLAMA_MODULE,)
    return row | harness.in_own_process(case.name, arguments, variables={}, timeout_s=timeout_s, imports=imports)


def by_hand_together(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Row]:
    """What one process has measured of settings made by hand of one workload."""
    first, *others = cases
    arguments = ["--size", options.size, "--cases", first.name, *(case.name for case in others)]
    timeout_s = WORKLOADS[first.job].timeout_s * len(cases)
    imports = () if WORKLOADS[first.job].llama is None else (LLAMA_MODULE,)
    found = harness.in_own_process(first.name, arguments, variables={}, timeout_s=timeout_s, imports=imports)
    if first.name not in found:  # it has ended the process
        found[first.name] = {"error": str(found.get("error", "its process has ended"))}
    return {case.name: about(case, options.size) | found[case.name] for case in cases if case.name in found}


def device_peak_of(case: Case, options: argparse.Namespace, rows: dict[str, Row]) -> int:
    """From the rows, or measured now."""
    name = f"{case.job}_peaks"
    if "device_peaks" not in rows.get(name, {}):
        peaks = next(one for one in CASES if one.name == name)
        rows[name] = in_own_process(peaks, options)
        write_row(QUESTION, rows[name])
    if "device_peaks" not in rows[name]:
        raise RuntimeError(f"{case.name} expects the row {name} to have device_peaks; found {rows[name].get('error')}")
    return int(rows[name]["device_peaks"][case.limit])


def table(rows: Mapping[str, Row]) -> str:
    """Each device_peak: fit, its peak, and the best by hand."""
    lines = [f"{'':<16} {'device_peak':>11} {'fit':>11} {'peak':>9} {'settled':>8}  best by hand"]
    for case in CASES:
        row = rows.get(case.name, {})
        if case.limit < 0 or case.kind in ("grow", "fit_clipped") or "iteration_ms" not in row:
            continue
        best = best_by_hand(case.job, row["device_peak_gib"], rows)
        hand = f"{best['kind']}: {best['iteration_ms']:.1f} ms" if best is not None else "none that fits is known"
        ratio = f", fit x {row['iteration_ms'] / best['iteration_ms']:.3f}" if best is not None else ""
        lines.append(
            f"{case.name:<16} {row['device_peak_gib']:>7.2f} GiB {row['iteration_ms']:>8.1f} ms "
            f"{row['peak_gib']:>5.2f} GiB {row['settled_in_iteration']:>8}  {hand}{ratio}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--table", action="store_true", help="what the rows say, without measuring")
    parser.add_argument(
        "--cap", type=float, default=0.0, help="fit: torch may reserve device_peak and this share of it more; 0: any"
    )
    parser.add_argument("--device-peak", type=int, default=0, help=argparse.SUPPRESS)  # of a case's own process
    options = harness.parse(parser, CASES, needs_gpu=True)
    if options.result:
        end_before_host_memory_does()
        first, *others = options.cases
        if first.is_by_hand:
            measure_each([first, *others], options)
        harness.report(options.result, lambda: measure(first, options))
    rows = written(options.size)
    if options.table:
        print(table(rows))
        return
    failed: list[str] = []
    together: dict[str, Row] = {}

    def measured(case: Case) -> Iterator[Row]:
        if case.is_by_hand:
            if case.name not in together:  # the first one, or the process of those before has ended early
                same = [one for one in options.cases if one.is_by_hand and one.job == case.job]
                together.update(by_hand_together(same[same.index(case) :], options))
            row = together[case.name]
        else:
            device_peak = device_peak_of(case, options, rows) if case.limit >= 0 else 0
            row = compared(case, in_own_process(case, options, device_peak), rows)
        # Settings made by hand may take more than the device has; fit may not.
        is_expected = case.limit < 0 and str(row.get("error", OUT_OF_MEMORY)).startswith(OUT_OF_MEMORY)
        failed.extend([] if is_expected or "error" not in row else [case.name])
        rows[case.name] = row
        yield row

    try:
        harness.run(QUESTION, options.cases, measured, failed=failed)
    finally:
        print("", table(rows), sep="\n")


if __name__ == "__main__":
    main()
