# SPDX-License-Identifier: Apache-2.0
"""The observed iteration as Chrome trace events, the JSON that https://ui.perfetto.dev and chrome://tracing open.

One track for the steps, one for their phases, one per lane; counters for memory by owner, the link and the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offstage.errors import ConfigError
from offstage.train.report.iteration import LANES
from offstage.train.report.parts import write_new
from offstage.train.report.recorded import Recorded

Event = dict[str, Any]
_PROCESS = 1
_STEPS, _PHASES, _FIRST_LANE = 1, 2, 3
"""Tracks, from the top."""


def write_trace(folder: Path, path: Path) -> Path:
    """Write the trace of the run in `folder` to `path`, and return `path`."""
    run = Recorded.read(Path(folder))
    if not run.observed.get("lanes") and not run.observed.get("phases"):
        why = f" ({run.problems[0]})" if run.problems else ""
        raise ConfigError(
            f"A trace expects an observed step; found none in {folder}{why}. Train for at least "
            "run.observe_step steps, 5 by default."
        )
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(trace_events(run))})
    return write_new(Path(path), content.encode())


def trace_events(run: Recorded) -> Iterator[Event]:
    """The events, with times in microseconds since the iteration began."""
    seen = run.observed
    step = seen.get("step")
    lanes = {lane: spans for lane, spans in (seen.get("lanes") or {}).items() if spans}
    names = {_STEPS: "steps", _PHASES: "phases"}
    order = sorted(lanes, key=lambda lane: list(LANES).index(lane) if lane in LANES else len(LANES))
    names |= {_FIRST_LANE + i: LANES.get(lane, (lane, ""))[0] for i, lane in enumerate(order)}
    yield _about("process_name", 0, {"name": f"{run.name}, on {seen.get('device', 'an unknown device')}"})
    for track, name in names.items():
        yield _about("thread_name", track, {"name": name})
        yield _about("thread_sort_index", track, {"sort_index": track})
    for number, start, stop in _steps(run):
        yield _span(_STEPS, f"step {step + number}" if step is not None else "step", start, stop, {})
    for one in seen.get("phases") or ():
        yield _span(_PHASES, one["name"], one["start_ms"], one["stop_ms"], {})
    for i, lane in enumerate(order):
        for start, stop, nbytes in lanes[lane]:
            yield _span(_FIRST_LANE + i, lane, start, stop, {"bytes": nbytes} if nbytes else {})
    yield from _counters(seen)


def _steps(run: Recorded) -> Iterator[tuple[int, float, float]]:
    """The observed step, and what was seen of the next one: a forward after the step's update."""
    phases = run.observed.get("phases") or []
    end = float(run.observed.get("end_ms") or 0.0)
    ended = next((i for i, one in enumerate(phases) if one["name"] == "step"), len(phases))
    later = [one["start_ms"] for one in phases[ended + 1 :] if one["name"] == "forward"]
    begins = later[0] if later else end
    yield 0, 0.0, begins
    if later:
        yield 1, begins, end


def _counters(seen: dict[str, Any]) -> Iterator[Event]:
    memory = seen.get("memory") or {}
    for i, at in enumerate(memory.get("ms") or ()):
        sizes = {owner: values[i] for owner, values in memory["bytes"].items()}
        yield _counter("device memory, bytes", at, sizes)
    link = seen.get("link") or {}
    width = link.get("bin_ms") or 0.0
    for i, (up, down) in enumerate(zip(link.get("up_bytes") or (), link.get("down_bytes") or (), strict=False)):
        rates = {"to the device": up / width / 1e6, "to the host": down / width / 1e6}
        yield _counter("link, GB/s", i * width, rates)
    cpu = seen.get("cpu") or {}
    for at, cores in zip(cpu.get("ms") or (), cpu.get("cores") or (), strict=False):
        yield _counter("CPU, cores busy", at, {"cores": cores})


def _about(name: str, track: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": track, "args": args}


def _span(track: int, name: str, start_ms: float, stop_ms: float, args: Event) -> Event:
    place = {"pid": _PROCESS, "tid": track, "ts": 1e3 * start_ms, "dur": max(0.0, 1e3 * (stop_ms - start_ms))}
    return {"ph": "X", "name": name, "cat": "offstage", **place, "args": args}


def _counter(name: str, at_ms: float, values: Event) -> Event:
    return {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": 1e3 * at_ms, "args": values}
