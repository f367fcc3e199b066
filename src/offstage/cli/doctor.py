# SPDX-License-Identifier: Apache-2.0
"""`offstage doctor`: what this machine can do, what is wrong with it, and how to fix that, in plain words.

`judge` and `judge_rates` are pure functions of a `SystemInfo`, so that every advice can be tested; `trial` makes a few
offloaded steps and compares every bit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from offstage import Machine, OffloadedOptimizer, offload
from offstage.cli.system_info import SystemInfo
from offstage.config import format_size
from offstage.planning.machine import UPDATE_BYTES_PER_PARAM

Verdict = Literal["fine", "note", "slow", "broken"]
"""note: worth knowing. slow: it works, and could be faster or hold more. broken: it does not work."""

OLDEST_TORCH = (2, 11)
OLDEST_PYTHON = (3, 11)
_GIB = 1 << 30
_PCIE_SHARE = 0.6
"""A link below this share of its lanes' capacity is reported; a good one reaches 0.85 of it."""
_SLOW_PIN_GIB_PER_S = 1.0


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    part: str
    found: str
    verdict: Verdict = "fine"
    advice: str = ""
    """What to do about it."""


def judge(s: SystemInfo) -> list[Finding]:
    """Findings that need no measurement."""
    return [*_versions(s), *_accelerator(s), *_memory(s), *_pinning(s), *_cpus(s), *_folders(s)]


# Versions #


def _versions(s: SystemInfo) -> Iterator[Finding]:
    if _numbers(s.python) < OLDEST_PYTHON:
        yield Finding("Python", s.python, "broken", "offstage needs Python 3.11 or newer.")
    else:
        yield Finding("Python", s.python)
    torch_version = s.versions["torch"] or "0"
    if _numbers(torch_version) < OLDEST_TORCH:
        yield Finding("torch", torch_version, "broken", "offstage needs torch 2.11 or newer: pip install -U torch.")
    else:
        yield Finding("torch", f"{torch_version}, built for {s.built_for or 'the CPU only'}")
    others = ", ".join(f"{name} {s.versions[name]}" for name in ("numpy", "numba", "triton") if s.versions[name])
    missing = [name for name in ("numpy", "numba") if s.versions[name] is None]
    if missing:
        yield Finding("packages", others, "broken", f"Missing: {', '.join(missing)}. pip install {' '.join(missing)}.")
    elif s.device_type == "cuda" and s.versions["triton"] is None:
        yield Finding("packages", others, "broken", "Updates on the GPU need triton: pip install triton.")
    else:
        yield Finding("packages", others)
    absent = [name for name in ("transformers", "tensorboard") if s.versions[name] is None]
    uses = {
        "transformers": "transformers for model.transformers",
        "tensorboard": "tensorboard for run.track",
    }
    if absent:
        yield Finding("optional", f"not installed: {', '.join(uses[name] for name in absent)}", "note")
    if s.environment.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        yield Finding(
            "numba", "NUMBA_DISABLE_JIT is set", "broken", "Updates by the CPU would be interpreted. Unset it."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


# Accelerator #


def _accelerator(s: SystemInfo) -> Iterator[Finding]:
    if s.device_type is None:
        yield _without_accelerator(s)
        return
    others = f", one of {s.num_devices} here" if s.num_devices > 1 else ""
    yield Finding("accelerator", f"{s.device_type}{others}")
    if s.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Finding(
            "accelerator",
            "CUDA_LAUNCH_BLOCKING is set",
            "slow",
            "Every kernel waits for the one before, so nothing overlaps. Unset it outside of debugging.",
        )
    if s.environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        yield Finding(
            "accelerator", "PYTORCH_NO_CUDA_MEMORY_CACHING is set", "slow", "Every allocation synchronises. Unset it."
        )
    if s.link_width is not None and s.link_width_most is not None and s.link_width < s.link_width_most:
        yield Finding(
            "link",
            f"{s.link_width} of {s.link_width_most} PCIe lanes are in use",
            "slow",
            "Streaming takes as long as its bytes take on the link. Put the card into a slot with all its lanes, or "
            "let the CPU update more (offload.update_on = auto).",
        )
    if not s.near_node_is_allowed:
        yield Finding(
            "NUMA",
            "this process may not use the CPUs on the accelerator's node",
            "slow",
            "Host memory of another node is slower to copy. Bind the process to the node of its device (numactl "
            "--cpunodebind, or your launcher's binding), or do not bind it.",
        )


def _without_accelerator(s: SystemInfo) -> Finding:
    visible = next((name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in s.environment), None)
    if s.driver_file and s.built_for is None:
        return Finding(
            "accelerator",
            f"there is a driver ({s.driver_file}), and this torch is built for the CPU only",
            "broken",
            "Install a build of torch for your accelerator, as pytorch.org shows for your driver.",
        )
    if s.driver_file and visible and s.environment[visible] in ("", "-1"):
        return Finding("accelerator", f"hidden by {visible}={s.environment[visible]!r}", "broken", f"Unset {visible}.")
    if s.driver_file:
        return Finding(
            "accelerator",
            f"there is a driver ({s.driver_file}), and torch, built for {s.built_for}, finds no device",
            "broken",
            "The driver is probably too old for this torch, or the container was started without the device. See what "
            "the driver's own tool (nvidia-smi, rocm-smi) says; then update the driver or pass the device in.",
        )
    return Finding(
        "accelerator", "none: the CPU plays the device", "note", "Everything runs, but no device memory is saved."
    )


# Memory #


def _memory(s: SystemInfo) -> Iterator[Finding]:
    left = [size for size in (s.host_available, s.cgroup_left) if size is not None]
    free = min(left, default=s.host_bytes)
    whose = ", the cgroup's limit" if s.cgroup_left is not None and s.cgroup_left == free else ""
    found = f"{format_size(s.host_bytes)}, {format_size(free)} free{whose}"
    params = (
        f"AdamW state of {free / 12 / 1e9:.1f} billion bf16 parameters (12 bytes each) would fit, or that of as many "
        "with split masters and their weights beside it (weights='host')"
    )
    if whose and s.host_available is not None and free < s.host_available // 2:
        yield Finding(
            "host memory",
            found,
            "slow",
            f"The host has {format_size(s.host_available)}, of which this container may not use most. Raise its memory "
            f"limit (docker run --memory, a larger request of the pod). Now {params}.",
        )
    else:
        yield Finding("host memory", f"{found}; {params}")
    if s.address_space is not None:
        yield Finding(
            "host memory",
            f"the address space is limited to {format_size(s.address_space)} (ulimit -v)",
            "broken" if s.address_space < s.host_bytes else "slow",
            "Accelerators map far more than they use. Lift it: ulimit -v unlimited.",
        )
    if s.overcommit == 2:
        yield Finding(
            "host memory",
            "vm.overcommit_memory is 2: memory counts when it is reserved, not when it is used",
            "slow",
            "Large reservations may be refused although memory is free. sudo sysctl vm.overcommit_memory=0.",
        )


def _pinning(s: SystemInfo) -> Iterator[Finding]:
    if s.huge_pages == "never":
        yield Finding(
            "huge pages",
            "switched off",
            "slow",
            "Pinning takes about five times as long without them. "
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled.",
        )
    elif s.huge_pages is None:
        yield Finding("huge pages", "this kernel has none", "note", "Pinning takes longer.")
    else:
        yield Finding("huge pages", s.huge_pages)
    if s.memlock is not None:
        # NVIDIA's driver does not count what it pins; others may.
        verdict: Verdict = "note" if s.device_type in (None, "cuda") else "slow"
        advice = "The CUDA driver does not enforce it. Elsewhere: ulimit -l unlimited, docker run --ulimit memlock=-1."
        yield Finding("locked memory", f"limited to {format_size(s.memlock)} (ulimit -l)", verdict, advice)
    else:
        yield Finding("locked memory", "no limit")


# CPUs #


def _cpus(s: SystemInfo) -> Iterator[Finding]:
    usable = host_usable(s)
    nodes = f" on {s.numa_nodes} NUMA nodes" if s.numa_nodes > 1 else ""
    near = f", {s.cpus_near_device} of them near the accelerator" if s.cpus_near_device else ""
    found = f"{usable} of {s.cpus}{nodes}{near}"
    if usable * 2 <= s.cpus and s.cpu_quota is not None and s.cpu_quota < s.cpus_allowed:
        yield Finding(
            "CPUs",
            f"{found}: the cgroup's quota is {s.cpu_quota:g}",
            "slow",
            "Updates by the CPU get no more. Raise the container's limit (docker run --cpus, the pod's CPU limit).",
        )
    elif usable * 2 <= s.cpus:
        yield Finding(
            "CPUs",
            f"{found}: the process is bound to them",
            "note",
            "A launcher does that to give each rank its own. If none did: taskset -pc 0-N PID, or start it unbound.",
        )
    else:
        yield Finding("CPUs", found)
    threads = s.environment.get("OMP_NUM_THREADS")
    if threads is not None:
        yield Finding(
            "threads", f"OMP_NUM_THREADS is {threads}", "note", "It limits torch's own threads, not those of updates."
        )


def host_usable(s: SystemInfo) -> int:
    """CPUs that the process can use."""
    return max(1, int(min(s.cpus_allowed, s.cpu_quota if s.cpu_quota is not None else s.cpus_allowed)))


def _folders(s: SystemInfo) -> Iterator[Finding]:
    if not s.cache_writable:
        yield Finding(
            "cache",
            f"{s.cache_folder} cannot be written",
            "slow",
            "The machine is measured again in every process, a few seconds each. Set OFFSTAGE_CACHE to a folder of "
            "yours.",
        )
    if s.disk_free is not None:
        yield Finding("disk", f"{format_size(s.disk_free)} free here: a checkpoint takes 14 bytes per bf16 parameter")


# Measured #


def judge_rates(machine: Machine, s: SystemInfo) -> list[Finding]:
    """Measured rates against what such a machine can reach."""
    return [*_device_memory(machine, s), *_link(machine, s), *_host_rates(machine, s)]


def _device_memory(m: Machine, s: SystemInfo) -> Iterator[Finding]:
    if s.device_type is None:
        return
    found = f"{m.device_name}, {format_size(m.device_bytes)}, {format_size(m.device_free_bytes)} free, "
    found += f"{m.device_gb_per_s:,.0f} GB/s"
    if m.device_free_bytes < 0.9 * m.device_bytes:
        yield Finding(
            "device memory", found, "slow", "Another process uses it. See the driver's own tool for who, and end it."
        )
    else:
        yield Finding("device memory", found)


def _link(m: Machine, s: SystemInfo) -> Iterator[Finding]:
    found = (
        f"{m.link_up_gb_per_s:.1f} GB/s up, {m.link_down_gb_per_s:.1f} down, {m.link_duplex_gb_per_s:.1f} each way "
        "with both busy"
    )
    if s.device_type is None:
        yield Finding("link", f"copies within host memory: {found}")
        return
    per_step = f"{found}; state of 1 billion bf16 parameters makes the trip in {12 / m.link_duplex_gb_per_s:.2f} s"
    carries = s.link_gt_per_s * s.link_width_most / 8 if s.link_gt_per_s and s.link_width_most else None
    if carries is not None and max(m.link_up_gb_per_s, m.link_down_gb_per_s) < _PCIE_SHARE * carries:
        yield Finding(
            "link",
            per_step,
            "slow",
            f"Its lanes could carry {carries:.0f} GB/s. Look at the slot, at other devices behind the same switch, and "
            "at an IOMMU that translates every copy (iommu=pt).",
        )
    else:
        yield Finding("link", per_step)


def _host_rates(m: Machine, s: SystemInfo) -> Iterator[Finding]:
    best = max(m.host_update_gb_per_s.values()) / UPDATE_BYTES_PER_PARAM
    yield Finding("host memory", f"{m.dram_gb_per_s:.1f} GB/s on {m.threads} threads")
    yield Finding("updates by the CPU", f"{best:.2f} billion parameters per second (AdamW, fp32 masters)")
    if s.device_type is not None and m.pin_gib_per_s < _SLOW_PIN_GIB_PER_S:
        yield Finding(
            "pinning",
            f"{m.pin_gib_per_s:.2f} GiB/s",
            "slow",
            "Startup is slow: every byte of state is touched and pinned once. Memory is fragmented, or huge pages "
            "are off; a freshly started machine is faster.",
        )
    else:
        yield Finding("pinning", f"{m.pin_gib_per_s:.1f} GiB/s")


# A trial #


def trial(device: torch.device, *, steps: int = 3) -> Finding:
    """A few offloaded steps against resident state: once half of the state updated by the device and half by the CPU,
    and once with the weights on the host, too."""
    try:
        different = _different_elements(device, steps)
    except Exception as error:
        if os.environ.get("OFFSTAGE_TRACEBACK"):
            raise
        return Finding(
            "trial",
            f"an offloaded step failed: {type(error).__name__}: {error}",
            "broken",
            "With OFFSTAGE_TRACEBACK=1 the command ends with its traceback; please report it with the lines above.",
        )
    if different:
        return Finding(
            "trial",
            f"{different} elements differ from resident state after {steps} steps",
            "broken",
            "Offloading must not change a bit. Please report it with the lines above.",
        )
    return Finding("trial", f"{steps} offloaded steps have the bits of resident state, with weights on the host, too")


def _different_elements(device: torch.device, steps: int) -> int:
    """After the same steps, from the same weights, with the same gradients."""
    if device.type == "cuda":
        resident = _trained(device, steps)  # torch's own fused kernel
    else:
        resident = _trained(device, steps, fraction=0.0)
    different = 0
    for config in ({"host_fraction": 0.5}, {"weights": "host", "overlap_forward": True}):
        offloaded = _trained(device, steps, min_bytes=0, chunk_bytes="64KiB", **config)
        for a, b in zip(offloaded, resident, strict=True):
            different += int((a.view(torch.int32) != b.view(torch.int32)).sum())
    return different


def _trained(device: torch.device, steps: int, **config: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False, device=device) for _ in range(4)))
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float32, device="cpu"))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device.type == "cuda")
    if config:
        optimizer = offload(optimizer, model, **config)
    for _ in range(steps):
        with torch.no_grad():
            model(torch.ones(1, 128, dtype=torch.float32, device=device))  # weights on the host come for it
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float32, device="cpu")
            param.grad = grad.to(param.device)
        optimizer.step()
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.synchronize()
    return [param.detach().cpu() for param in model.parameters()]
