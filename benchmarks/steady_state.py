# SPDX-License-Identifier: Apache-2.0
"""Does a steady-state step synchronise with the device or allocate on it?

    python -m benchmarks.steady_state

Steps under `set_sync_debug_mode("error")`, counts allocations in the allocator's statistics, and looks for
synchronising or allocating calls in a profiler trace. Clipping and a scheduler run as in a training loop.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import offstage
from benchmarks.common import write_row

SHAPES = [(2048, 2048), (2048, 4096), (4096,), (1000, 333)] * 4
FORBIDDEN = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "Synchronize", "cudaStreamCreate")
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16, fp32 masters": (torch.bfloat16, {}),
    "bf16, split masters": (torch.bfloat16, {"master_weights": "split"}),
    "fp32, half resident": (torch.float32, {"fraction": 0.5}),
}


def steady_state(dtype: torch.dtype, config: dict[str, Any], steps: int = 20) -> dict[str, Any]:
    """Allocations and forbidden calls in `steps` steps; a synchronisation raises."""
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = offstage.offload(torch.optim.AdamW(params), chunk_bytes="8MiB", **config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            for _ in range(steps):
                optimizer.step()
                scheduler.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as nothing:
        pass
    calls = forbidden_calls(trace) - forbidden_calls(nothing)  # the profiler makes some itself
    optimizer.close()
    return {"steps": steps, "allocations": allocations, "forbidden_calls": dict(calls)}


def forbidden_calls(trace: profile) -> Counter[str]:
    names = (event.name for event in trace.events() if not event.name.startswith("Activity"))
    return Counter(name for name in names if any(word in name for word in FORBIDDEN))


def main() -> None:
    for name, (dtype, config) in CASES.items():
        write_row("steady_state", {"case": name} | steady_state(dtype, config))


if __name__ == "__main__":
    main()
