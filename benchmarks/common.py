# SPDX-License-Identifier: Apache-2.0
"""The device to measure on, its clocks and its memory; and a row of results with the machine it was measured on.

Without an accelerator the device is the CPU, on which everything but its memory and its rates can be tried.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from offstage.memory.arena import cgroup_available, mem_available

RESULTS = Path(__file__).parent / "results"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"

Row = dict[str, Any]


# The device


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def reset_peak() -> None:
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Most device bytes since `reset_peak`; 0 without a device."""
    return torch.cuda.max_memory_allocated() if ON_GPU else 0


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if ON_GPU else 0


def clean_up() -> int:
    """Free what is no longer held and start the peak anew; the bytes still allocated, which would blur the peak."""
    gc.unfreeze()
    gc.collect()  # hooks tie models and optimizers into cycles
    if ON_GPU:
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", int)()  # save_on_cpu's pinned memory: as much again as ours
        reset_peak()
    return allocated_bytes()


def settle_collector() -> None:
    """What there is now is not looked through for cycles again: in a process that has imported every system that takes
    a fifth of a second, now and then. The same for all systems, before they are timed."""
    gc.collect()
    gc.freeze()


class HostTime:
    """Stands in for an event where there is no device."""

    def __init__(self) -> None:
        self._s = time.perf_counter()

    def elapsed_time(self, later: HostTime) -> float:
        return 1e3 * (later._s - self._s)

    def synchronize(self) -> None:
        """It is past already."""


def now() -> Any:
    """A moment of the device; `elapsed_time` of two is in milliseconds."""
    if not ON_GPU:
        return HostTime()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(work: Callable[[], object], *, repeats: int = 5, warm_up: int = 2) -> float:
    """Median time of `work` with the device idle before and after."""
    times = []
    for i in range(warm_up + repeats):
        synchronize()
        start = now()
        work()
        stop = now()
        synchronize()
        if i >= warm_up:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


# The host


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def host_free_bytes() -> int:
    """What this process may still take."""
    return min(size for size in (mem_available(), cgroup_available()) if size is not None)


def end_before_host_memory_does(least_bytes: int = 3 * 2**29) -> None:
    """End this process while the host has some memory left: without any, the kernel might end another one."""

    def watch() -> None:
        while (left := host_free_bytes()) > least_bytes:
            time.sleep(0.05)
        print(f"ended: {gib(left)} GiB of host memory are left, this process has {gib(rss_bytes())}", flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# Numbers


def gib(num_bytes: float) -> float:
    return round(num_bytes / 2**30, 4)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, Mapping) else value


def times(row: Mapping[str, Any], other: Mapping[str, Any], name: str) -> float | None:
    """The ratio of a field of two rows."""
    return round(row[name] / other[name], 4) if other.get(name) else None


def share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


# Rows


def environment() -> Row:
    """The machine, versions, date and command of this run."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "machine": {
            "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
            "cores": os.cpu_count(),
            "host_gib": round(memory / 2**30, 1),
        },
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton_version,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", main_module(), *sys.argv[1:]]),
    }


def write_row(question: str, row: Mapping[str, Any]) -> None:
    """Append one row to results/<question>.jsonl and show it."""
    folder = Path(os.environ.get("OFFSTAGE_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{question}.jsonl").open("a") as file:
        file.write(json.dumps({"question": question, **row, **environment()}) + "\n")
    print(json.dumps(row), flush=True)


def main_module() -> str:
    """The name of the module that was started."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name if spec is not None else Path(sys.argv[0]).stem
    return name.removesuffix(".__main__")
