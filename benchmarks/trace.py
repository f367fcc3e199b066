# SPDX-License-Identifier: Apache-2.0
"""What do the lanes do during a streamed step?

    python -m benchmarks.trace

Profiles one step over 0.5 billion bf16 parameters with fp32 masters and writes when each lane worked; `plot.py` draws
it.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

import offstage
from benchmarks.common import write_row

LANE_OF = {"Memcpy HtoD": "fetch", "adamw_kernel": "update", "Memcpy DtoH": "store"}


def spans() -> dict[str, list[tuple[float, float]]]:
    """Per lane, (start, end) of each copy or kernel in microseconds from the first one."""
    params = [torch.nn.Parameter(torch.randn(4096, 4096, device="cuda").bfloat16()) for _ in range(32)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = offstage.offload(torch.optim.AdamW(params))
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        optimizer.step()
        torch.cuda.synchronize()
    found: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANE_OF.values()}
    for event in trace.events():
        lane = next((lane for name, lane in LANE_OF.items() if event.name.startswith(name)), None)
        if lane is not None and event.device_type == torch.autograd.DeviceType.CUDA:
            found[lane].append((event.time_range.start, event.time_range.end))
    first = min(start for lane in found.values() for start, _ in lane)
    optimizer.close()
    return {lane: [(round(a - first, 1), round(b - first, 1)) for a, b in sorted(x)] for lane, x in found.items()}


def main() -> None:
    write_row("trace", {"case": "one streamed step, 0.54 billion bf16 parameters, fp32 masters", "spans_us": spans()})


if __name__ == "__main__":
    main()
