# SPDX-License-Identifier: Apache-2.0
"""How fast is a streamed step, against the link of the same machine in the same run?

    python -m benchmarks.stream_step
    python -m benchmarks.stream_step --size small     anywhere: does it run?

Measures the duplex link, then steps over 2.15 billion parameters: fp32 parameters (8 bytes of state each), bf16 with
fp32 masters (12) and bf16 with split masters (10); device memory, host memory and set-up time with each.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import offstage
from benchmarks import common, harness, link
from benchmarks.common import DEVICE, ON_GPU, Row, synchronize
from benchmarks.harness import Case
from offstage.memory.arena import Arena

FIRST = torch.device("cuda", 0) if ON_GPU else DEVICE
PIECE = 16 * 2**20  # elements: 64 MiB a copy
LINK_NUMEL = {"full": 256 * 2**20, "small": 2**20}
PINNED_GIB = {"full": 30, "small": 0.0625}
LAYERS = {"full": 32, "small": 2}
SHRUNK = {"full": 1, "small": 16}
SHAPES = [(4096, 4096), (4096, 4096), (4096, 8192), (4096,)]
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32 parameters": (torch.float32, {}),
    "bf16, fp32 masters": (torch.bfloat16, {}),
    "bf16, split masters": (torch.bfloat16, {"master_weights": "split"}),
}


def link_rates(size_name: str) -> dict[str, float]:
    """GB/s of each direction alone, and of each way with both at once."""
    numel = LINK_NUMEL[size_name]
    up, down = (Arena(numel, torch.float32, FIRST, pin=True) for _ in range(2))
    a, b = (torch.empty(numel, device=FIRST) for _ in range(2))
    streams = [link.stream() for _ in range(2)]

    def both(fetch: bool, store: bool) -> None:
        copies = [(streams[0], a, up.flat)] * fetch + [(streams[1], down.flat, b)] * store
        here = torch.cuda.current_stream() if ON_GPU else None
        for stream, _, _ in copies if ON_GPU else ():
            stream.wait_stream(here)
        for start in range(0, numel, PIECE):
            for stream, target, source in copies:
                with link.on(stream):
                    target[start : start + PIECE].copy_(source[start : start + PIECE], non_blocking=True)
        for stream, _, _ in copies if ON_GPU else ():
            here.wait_stream(stream)

    size = numel * 4 / 1e6
    rates = {
        "h2d_alone": size / common.milliseconds(lambda: both(True, False)),
        "d2h_alone": size / common.milliseconds(lambda: both(False, True)),
        "duplex_each_way": size / common.milliseconds(lambda: both(True, True)),
    }
    up.close()
    down.close()
    return {name: round(rate, 2) for name, rate in rates.items()}


def model(dtype: torch.dtype, size_name: str) -> list[torch.nn.Parameter]:
    params = []
    for _ in range(LAYERS[size_name]):
        for shape in SHAPES:
            weight = torch.empty([dim // SHRUNK[size_name] for dim in shape], dtype=dtype, device=DEVICE).normal_(
                std=0.02
            )
            params.append(torch.nn.Parameter(weight))
            params[-1].grad = torch.empty_like(weight).normal_(std=1e-3)
    return params


def streamed(name: str, size_name: str, duplex: float) -> Row:
    dtype, config = CASES[name]
    params = model(dtype, size_name)
    numel = sum(p.numel() for p in params)
    synchronize()
    common.reset_peak()
    before_device, before_rss = common.allocated_bytes(), common.rss_bytes()
    start = time.perf_counter()
    optimizer = offstage.offload(torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1), **config)
    seconds = time.perf_counter() - start
    step_ms = common.milliseconds(optimizer.step, repeats=7, warm_up=3)
    start = time.perf_counter()
    optimizer.step()
    host_ms = (time.perf_counter() - start) * 1e3
    receipt = optimizer.receipt()
    rate = receipt.bytes_fetched / step_ms / 1e6
    row = {
        "case": name,
        "parameters": numel,
        "step_ms": round(step_ms, 2),
        "gparam_per_s": round(numel / step_ms / 1e6, 3),
        "bytes_per_param_each_way": round(receipt.bytes_fetched / numel, 4),
        "gb_per_s_each_way": round(rate, 2),
        "duplex_gb_per_s": duplex,
        "share_of_duplex": round(rate / duplex, 4),
        "host_ms_in_step": round(host_ms, 2),
        "lane_ms": {lane: round(ms, 2) for lane, ms in receipt.lane_ms.items()},
        "peak_device_state_mib": round((common.peak_bytes() - before_device) / 2**20, 2),
        "slots_and_resident_mib": round(receipt.device_state_bytes / 2**20, 2),
        "host_state_gib": round(receipt.host_state_bytes / 2**30, 3),
        "rss_growth_over_state": round((common.rss_bytes() - before_rss) / receipt.host_state_bytes, 4),
        "offload_seconds": round(seconds, 2),
    }
    optimizer.close()
    return row


def pinning(gib: float) -> Row:
    """Seconds to get pinned memory: an arena, cold and warm, and torch's own, warm, in the same run."""
    numel = int(gib * 2**30) // 4
    rates = {}
    for name in ("arena_cold", "arena_warm"):
        start = time.perf_counter()
        arena = Arena(numel, torch.float32, FIRST, pin=True)
        rates[name] = gib / (time.perf_counter() - start)
        arena.close()
        del arena
    start = time.perf_counter()
    tensor = torch.empty(numel, dtype=torch.float32, pin_memory=ON_GPU)
    rates["torch_warm"] = gib / (time.perf_counter() - start)
    del tensor
    return {
        "gib": gib,
        "gib_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "arena_warm_over_torch": round(rates["arena_warm"] / rates["torch_warm"], 2),
    }


def main() -> None:
    options = harness.parse(harness.command(__doc__), harness.cases_of(CASES))
    common.write_row("pinning", pinning(PINNED_GIB[options.size]))
    rates = link_rates(options.size)
    common.write_row("link", {"gb_per_s": rates})

    def measure(case: Case) -> Row:
        return streamed(case.name, options.size, rates["duplex_each_way"])

    harness.run("stream_step", options.cases, measure)
    common.write_row("link", {"gb_per_s": link_rates(options.size)})


if __name__ == "__main__":
    main()
