# SPDX-License-Identifier: Apache-2.0
"""When each lane worked, how many bytes it carried, and how many CPU cores were busy, through one iteration.

- `LaneWatch` reads the spans that lanes note of their own work: the receipt's lane times are of the same spans.
- `DeviceTrace` is torch's profiler, for the model's work on an accelerator and that of others. Work belongs to the lane
  whose stream it ran on; the spans `offstage: fetch` and so on, in which lanes launch their work, identify each lane's
  stream.
- `CpuUse` samples the process's CPU time.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from offstage.lanes.lanes import Lane, Lanes, new_log
from offstage.lanes.spans import covered_ms
from offstage.memory.cpus import usable_cpus
from offstage.memory.interrupts import deferred_interrupts
from offstage.memory.threads import start_some

Span = tuple[float, float, int]
"""Start and end in milliseconds since the iteration began, and the bytes carried."""
Spans = dict[str, list[Span]]
Event = Mapping[str, Any]

COMPUTE = "model"
"""Work on the caller's stream."""
COLLECTIVES = "collectives"
OTHER = "other streams"
MOST_SPANS = 400
"""Of one lane: a figure can show no more."""
NUM_BINS = 120
"""Of the link's use over time."""

_UP, _DOWN = ("fetch", "raise"), ("store", "lower")
_SPAN = "offstage: "
"""Prefix of the names of the spans in which lanes launch work (`lanes/lanes.py`)."""
_BEGIN = "offstage observes"
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime")
_UPDATE_KERNELS = ("adamw_kernel", "hyperparameters_kernel", "fingerprint_kernel")
"""The rules' own kernels (`rules/adamw_triton.py`)."""
_CPU_EVERY_S = 0.004
_MOST_CPU_SAMPLES = 400


class LaneWatch:
    """When `lanes` worked between `start` and `stop`."""

    def __init__(self, lanes: Sequence[Lanes]) -> None:
        self._logs = [(one, new_log()) for one in lanes]

    def start(self) -> None:
        for lanes, log in self._logs:
            lanes.open_log(log)

    def stop(self) -> None:
        for lanes, log in self._logs:
            lanes.close_log(log)

    def spans(self, began: float, stamp: Any) -> Spans:
        """By lane; `began` and `stamp`: when the iteration did, by `time.perf_counter` and on the lanes' clock."""
        found: Spans = defaultdict(list)
        for lanes, log in self._logs:
            for lane, spans in log.items():
                for span in list(spans):  # threads may still append
                    origin = began if isinstance(span.start, float) else stamp
                    times = lanes.elapsed_ms(origin, span.start), lanes.elapsed_ms(origin, span.stop)
                    found[lane.value].append((*times, span.nbytes))
        return {lane: sorted(spans) for lane, spans in found.items()}


class DeviceTrace:
    """The work of an accelerator between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        activity = getattr(ProfilerActivity, device.type.upper(), None) or ProfilerActivity.PrivateUse1
        self._profile = profile(activities={ProfilerActivity.CPU, activity})

    def start(self) -> None:
        self._profile.start()

    def begin(self) -> None:
        """Record the beginning of the iteration on the profiler's clock. The device must be idle."""
        with record_function(_BEGIN):
            pass

    def stop(self) -> None:
        self._profile.stop()

    def spans(self) -> Spans:
        """By lane; from the exported trace, which has the stream and the launching call of each kernel."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return spans_of(json.loads(path.read_text())["traceEvents"])


def spans_of(events: Sequence[Event]) -> Spans:
    """The spans of each lane in the events of a trace."""
    began = next(event["ts"] for event in events if event.get("name") == _BEGIN and event.get("ph") == "X")
    work = [event for event in events if event.get("cat") in _WORK]
    lane_of_stream = _lanes_of_streams(events, work)
    caller = _callers_stream(work, lane_of_stream)
    found: Spans = defaultdict(list)
    for event in work:
        start = (event["ts"] - began) / 1e3
        nbytes = int(event["args"].get("bytes", 0)) if event["cat"] == "gpu_memcpy" else 0
        found[_lane_of(event, lane_of_stream, caller)].append((start, start + event["dur"] / 1e3, nbytes))
    return {lane: sorted(spans) for lane, spans in found.items()}


def _lanes_of_streams(events: Sequence[Event], work: Iterable[Event]) -> dict[int, str]:
    """The lane of each stream: the one whose spans launched most of the stream's work.

    Some work is launched outside of spans: by threads that the profiler does not record.
    """
    spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(_SPAN):
            lane = event["name"].removeprefix(_SPAN)
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"], lane))
    for of_thread in spans.values():
        of_thread.sort()
    launches = [event for event in events if event.get("cat") in _LAUNCHES]
    launched = {event["args"].get("correlation"): (event["tid"], event["ts"]) for event in launches}
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    for event in work:
        thread, at = launched.get(event["args"].get("correlation"), (None, 0.0))
        of_thread = spans.get(thread, [])
        index = bisect_right(of_thread, at, key=lambda span: span[0]) - 1
        if index >= 0 and at <= of_thread[index][1]:
            votes[event["args"]["stream"]][of_thread[index][2]] += 1
    return {stream: counts.most_common(1)[0][0] for stream, counts in votes.items()}


def _callers_stream(work: Iterable[Event], lane_of_stream: Mapping[int, str]) -> int | None:
    """The model's stream: the one with most kernel time that belongs to no lane."""
    busy: Counter[int] = Counter()
    for event in work:
        stream = event["args"]["stream"]
        if event["cat"] == "kernel" and stream not in lane_of_stream and not _is_collective(event):
            busy[stream] += event["dur"]
    return busy.most_common(1)[0][0] if busy else None


def _lane_of(event: Event, lane_of_stream: Mapping[int, str], caller: int | None) -> str:
    name, stream = event["name"], event["args"]["stream"]
    if name.startswith(_UPDATE_KERNELS):  # these run on the caller's stream if everything is resident
        return Lane.UPDATE.value
    if stream in lane_of_stream:
        return lane_of_stream[stream]
    if stream == caller:
        return COMPUTE
    if _is_collective(event):
        return COLLECTIVES
    if name.startswith("Memcpy HtoD"):
        return Lane.FETCH.value
    return Lane.STORE.value if name.startswith("Memcpy DtoH") else OTHER


def _is_collective(event: Event) -> bool:
    return "nccl" in event["name"].lower() or "rccl" in event["name"].lower()


class CpuUse:
    """How many cores this process keeps busy: a thread reads its CPU time every few milliseconds."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._began = 0.0

    def start(self, began: float) -> None:
        """`began`: when the iteration did, by `time.perf_counter`."""
        self._began = began
        self._look()
        thread = threading.Thread(target=self._run, name="offstage-observer", daemon=True)
        with deferred_interrupts():
            self._threads = start_some([thread], 1)  # without it there are two samples: the beginning and the end

    def _run(self) -> None:
        every = _CPU_EVERY_S
        while not self._over.wait(every):
            self._look()
            if (
                len(self._seen) >= _MOST_CPU_SAMPLES
            ):  # a long iteration: keep every second sample, and sample half as often
                del self._seen[1::2]
                every *= 2

    def _look(self) -> None:
        self._seen.append((time.perf_counter(), time.process_time()))

    def stop(self) -> None:
        """End sampling."""
        with (
            deferred_interrupts()
        ):  # Ctrl-C within set() or join() leaves locks in a state in which others wait for ever
            self._over.set()
            for thread in self._threads:
                thread.join()
        self._look()

    def used(self) -> dict[str, Any]:
        """`cores`: the mean of each interval; `ms`: the boundaries of the intervals, one more than `cores`."""
        ms = [1e3 * (wall - self._began) for wall, _ in self._seen]
        steps = list(pairwise(self._seen))
        cores = [(later[1] - sooner[1]) / max(later[0] - sooner[0], 1e-9) for sooner, later in steps]
        return {
            "ms": [round(value, 3) for value in ms],
            "cores": [round(value, 3) for value in cores],
            "available": usable_cpus(),
        }


# For figures #


def merged(spans: Sequence[Span], most: int = MOST_SPANS) -> list[Span]:
    """At most `most` spans instead of the sorted `spans`: the shortest gaps are closed."""
    joined = _close_gaps(spans, 0.0)
    if len(joined) > most:
        gaps = sorted(later[0] - earlier[1] for earlier, later in pairwise(joined))
        joined = _close_gaps(joined, gaps[len(joined) - most - 1])
    return [(round(start, 4), round(stop, 4), nbytes) for start, stop, nbytes in joined]


def busy_ms(spans: Sequence[Span]) -> float:
    """Time covered by any of the spans."""
    return covered_ms((start, stop) for start, stop, _ in spans)


def _close_gaps(spans: Sequence[Span], longest: float) -> list[Span]:
    found: list[Span] = []
    for start, stop, nbytes in spans:
        if found and start - found[-1][1] <= longest:
            found[-1] = (found[-1][0], max(found[-1][1], stop), found[-1][2] + nbytes)
        else:
            found.append((start, stop, nbytes))
    return found


def link_use(spans: Spans, end_ms: float, num_bins: int = NUM_BINS) -> dict[str, Any]:
    """Bytes up and down over time, in bins of equal length."""
    width = end_ms / num_bins
    up = _binned((span for lane in _UP for span in spans.get(lane, ())), width, num_bins)
    down = _binned((span for lane in _DOWN for span in spans.get(lane, ())), width, num_bins)
    return {"bin_ms": width, "up_bytes": up, "down_bytes": down}


def _binned(spans: Iterable[Span], width: float, num_bins: int) -> list[int]:
    """The bytes of copies per bin, spread evenly over the time of each copy."""
    bins = [0.0] * num_bins
    for start, stop, nbytes in spans:
        first = min(max(int(start / width), 0), num_bins - 1)
        last = min(max(int(stop / width), first), num_bins - 1)
        for index in range(first, last + 1):
            inside = min(stop, (index + 1) * width) - max(start, index * width)
            share = inside / (stop - start) if stop > start else 1.0 / (last - first + 1)
            bins[index] += nbytes * max(0.0, share)
    return [round(value) for value in bins]
