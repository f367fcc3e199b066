# SPDX-License-Identifier: Apache-2.0
"""What do the lanes do during a streamed step, and beside backward and forward?

    python -m benchmarks.trace
    python -m benchmarks.trace --size small     anywhere: does it run? Only a GPU has lanes to show

The first row is a profile of one step over 0.5 billion bf16 parameters with fp32 masters: when each lane worked. The
second is one iteration (backward, step, next forward) of the workload with 12 blocks, for three settings: when each
lane and the caller's stream worked, and when the phases began there. `plot.py` draws both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import offstage
from benchmarks import harness
from benchmarks.common import DEVICE, ON_GPU, Row, clean_up, synchronize
from benchmarks.harness import Case
from benchmarks.workload import BATCH, IN_BACKWARD, IN_STEP, MAX_NORM, OVERLAP_FORWARD, SIZES, build, offloaded, tokens

Span = tuple[float, float]
Event = Mapping[str, Any]

LANE_OF = {"Memcpy HtoD": "fetch", "adamw_kernel": "update", "Memcpy DtoH": "store"}
SMALL_KERNELS = ("hyperparameters_kernel", "fingerprint_kernel")  # the rule's other kernels, on the update lane too
PHASES = ("backward", "step", "forward")
SETTINGS: dict[str, tuple[Mapping[str, Any], bool]] = {  # the configuration, and whether torch clips
    "streamed in step": (IN_STEP, True),
    "overlap_forward": (OVERLAP_FORWARD, True),
    "update_in_backward": (IN_BACKWARD, False),
}
BLOCKS = 12  # the widths of the workload, in a short iteration
MERGE_US = 50.0  # gaps shorter than this would not be seen in the figure
MAX_SPANS = 300


ACTIVITIES = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]


# One step


def spans(width: int) -> dict[str, list[Span]]:
    """Per lane, (start, end) of each copy or kernel in microseconds from the first one."""
    params = [torch.nn.Parameter(torch.randn(width, width, device=DEVICE).bfloat16()) for _ in range(32)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = offstage.offload(torch.optim.AdamW(params))
    for _ in range(3):
        optimizer.step()
    synchronize()
    with profile(activities=ACTIVITIES) as trace:
        optimizer.step()
        synchronize()
    found: dict[str, list[Span]] = {lane: [] for lane in LANE_OF.values()}
    for event in trace.events():
        lane = next((lane for name, lane in LANE_OF.items() if event.name.startswith(name)), None)
        if lane is not None and event.device_type == torch.autograd.DeviceType.CUDA:
            found[lane].append((event.time_range.start, event.time_range.end))
    first = min((start for lane in found.values() for start, _ in lane), default=0.0)
    optimizer.close()
    return {lane: [(round(a - first, 1), round(b - first, 1)) for a, b in sorted(x)] for lane, x in found.items()}


# One iteration


def profiled_iteration(config: Mapping[str, Any], *, clip: bool, size_name: str) -> list[Event]:
    """The profiler's events of backward, step and the next forward, in steady state."""
    size = replace(SIZES[size_name], blocks=min(BLOCKS, SIZES[size_name].blocks))
    model = build(size)
    optimizer = offloaded(model, size_name, config)
    batch = tokens(size, BATCH, seed=0)

    def from_backward_to_forward(loss: torch.Tensor) -> torch.Tensor:
        with record_function("backward"):
            loss.backward()
        with record_function("step"):  # clipping is what makes the step wait for the whole backward: it belongs here
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        with record_function("forward"):
            return model(batch)

    loss = model(batch)
    for _ in range(4):
        loss = from_backward_to_forward(loss)
    synchronize()
    with profile(activities=ACTIVITIES) as trace:
        loss = from_backward_to_forward(loss)
        synchronize()
    optimizer.close()
    return exported(trace)


def exported(trace: profile) -> list[Event]:
    """The events of the exported trace: unlike `trace.events()` they name streams, and which call launched what."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def timeline(events: list[Event]) -> dict[str, Any]:
    """When each lane and the caller's stream worked, and when each phase began there, from the first piece of work."""
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    caller = callers_stream(work)
    by_lane: dict[str, list[Event]] = {"compute": [], "fetch": [], "update": [], "store": []}
    for event in work:
        by_lane[lane_of(event, caller)].append(event)
    first = min(event["ts"] for event in work)
    begins = phase_begins(events, by_lane["compute"])
    return {
        "spans_us": {lane: merged(on_lane, first) for lane, on_lane in by_lane.items()},
        "begins_us": {phase: None if at is None else round(at - first) for phase, at in begins.items()},
    }


def lane_of(event: Event, caller: int) -> str:
    """By name; what else runs beside the caller's stream (copies between device buffers) belongs to the updates."""
    for prefix, lane in LANE_OF.items():
        if event["name"].startswith(prefix):
            return lane
    ours = event["name"].startswith(SMALL_KERNELS) or event["args"]["stream"] != caller
    return "update" if ours else "compute"


def callers_stream(work: list[Event]) -> int:
    """The stream with most kernel time that is not ours: the model's."""
    ours = (*LANE_OF, *SMALL_KERNELS)
    busy: Counter[int] = Counter()
    for event in work:
        if event["cat"] == "kernel" and not event["name"].startswith(ours):
            busy[event["args"]["stream"]] += event["dur"]
    return busy.most_common(1)[0][0]


def phase_begins(events: list[Event], compute: list[Event]) -> dict[str, float | None]:
    """Start of the first kernel on the caller's stream that was launched in each phase; `None` if there was none."""
    return {phase: min((e["ts"] for e in launched_in(events, compute, phase)), default=None) for phase in PHASES}


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


def merged(events: list[Event], first: float) -> list[tuple[int, int]]:
    """(start, end) in microseconds from `first`, with short gaps closed until there are few enough."""
    ordered = sorted((event["ts"] - first, event["ts"] + event["dur"] - first) for event in events)
    gap = MERGE_US
    while len(found := close_gaps(ordered, gap)) > MAX_SPANS:
        gap *= 2
    return [(round(start), round(stop)) for start, stop in found]


def close_gaps(ordered: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """What is no further apart than `gap` becomes one."""
    found: list[Span] = []
    for start, stop in ordered:
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def iterations(size_name: str) -> Row:
    found = {}
    for name, (config, clip) in SETTINGS.items():
        events = profiled_iteration(config, clip=clip, size_name=size_name)
        found[name] = {"config": dict(config), "clip": clip} | (timeline(events) if ON_GPU else {})
        clean_up()
    return found


def measure(case: Case, size_name: str) -> Row:
    if case.name == "step":
        width = 4096 if size_name == "full" else 128
        return {"case": "one streamed step, 0.54 billion bf16 parameters, fp32 masters", "spans_us": spans(width)}
    name = f"backward, step and next forward, {BLOCKS} blocks of the workload, split masters"
    return {"case": name, "settings": iterations(size_name)}


def main() -> None:
    options = harness.parse(harness.command(__doc__), harness.cases_of(("step", "iteration")))
    harness.run("trace", options.cases, lambda case: measure(case, options.size))


if __name__ == "__main__":
    main()
