# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: where rows go, and the machine they were measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """The machine, versions, date and command of this run."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "machine": {"device": device, "cores": os.cpu_count(), "host_gib": round(memory / 2**30, 1)},
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton_version,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", *_module_and_arguments()]),
    }


def write_row(question: str, row: dict[str, Any]) -> None:
    """Append one row to results/<question>.jsonl and show it."""
    folder = Path(os.environ.get("OFFSTAGE_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{question}.jsonl").open("a") as file:
        file.write(json.dumps({"question": question, **row, **environment()}) + "\n")
    print(json.dumps(row), flush=True)


def milliseconds(work: Callable[[], None], *, repeats: int = 5, warm_up: int = 2) -> float:
    """Median wall-clock time of `work` with the device idle before and after."""
    times = []
    for i in range(warm_up + repeats):
        torch.cuda.synchronize()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if i >= warm_up:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _module_and_arguments() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name if spec is not None else Path(sys.argv[0]).stem
    return [name.removesuffix(".__main__"), *sys.argv[1:]]
