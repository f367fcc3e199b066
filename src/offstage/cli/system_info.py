# SPDX-License-Identifier: Apache-2.0
"""`SystemInfo`: what the operating system reports that matters to offloading, as plain data.

Nothing is measured or judged here. A value that cannot be read is `None`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from offstage.memory import cpus as host_cpus
from offstage.memory import cpus as numa
from offstage.memory.arena import cgroup_available, mem_available
from offstage.planning.measure import cache_folder, host_bytes

PACKAGES = ("torch", "numpy", "numba", "triton", "tyro", "rich", "matplotlib", "transformers", "tensorboard")
VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NUMBA_DISABLE_JIT",
    "OMP_NUM_THREADS",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, kw_only=True)
class SystemInfo:
    """One process on one host. Sizes are bytes."""

    python: str
    versions: Mapping[str, str | None]
    """Package → version, `None` where it is not installed."""
    environment: Mapping[str, str]
    """Those of `VARIABLES` that are set."""
    built_for: str | None
    """The kind of accelerator that torch is built for."""
    device_type: str | None
    """The kind of accelerator that torch can use here."""
    num_devices: int
    driver_file: str | None
    """A file that exists if an accelerator's driver is installed."""
    link_width: int | None
    """PCIe lanes in use; the next field: the most that slot and card support."""
    link_width_most: int | None
    link_gt_per_s: float | None
    """The highest rate per lane that slot and card support."""
    host_bytes: int
    host_available: int | None
    """MemAvailable."""
    cgroup_left: int | None
    """What the tightest memory limit of the cgroup leaves free; `None` without one."""
    memlock: int | None
    """RLIMIT_MEMLOCK; `None`: no limit."""
    address_space: int | None
    """RLIMIT_AS; `None`: no limit."""
    overcommit: int | None
    """vm.overcommit_memory."""
    huge_pages: str | None
    """always, madvise or never."""
    cpus: int
    """Of the host."""
    cpus_allowed: int
    """Of this process's affinity."""
    cpu_quota: float | None
    numa_nodes: int
    cpus_near_device: int | None
    """Allowed CPUs on the accelerator's node; `None` if unknown, or if there is one node."""
    near_node_is_allowed: bool
    """Whether the process may use any CPU of that node."""
    cache_folder: str
    cache_writable: bool
    disk_free: int | None
    """In the working directory, where checkpoints are written."""


def read_system_info(
    *,
    environment: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
) -> SystemInfo:
    """Read everything. The roots of procfs and sysfs are arguments, so that tests can describe other machines."""
    found = torch.accelerator.current_accelerator(check_available=True)
    built = torch.accelerator.current_accelerator(check_available=False)
    device = torch.device(found.type, torch.accelerator.current_device_index()) if found else torch.device("cpu")
    folder = numa.pci_folder(device, pci=sys / "bus/pci/devices")
    near = numa.cpus_near(device)
    cache = cache_folder()
    return SystemInfo(
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        environment={name: environment[name] for name in VARIABLES if name in environment},
        built_for=built.type if built else None,
        device_type=found.type if found else None,
        num_devices=torch.accelerator.device_count() if found else 0,
        driver_file=next((name for name in _DRIVER_FILES if Path(name).exists()), None),
        link_width=_number(folder / "current_link_width" if folder else None),
        link_width_most=_number(folder / "max_link_width" if folder else None),
        link_gt_per_s=_speed(folder / "max_link_speed" if folder else None),
        host_bytes=host_bytes(),
        host_available=mem_available(),
        cgroup_left=cgroup_available(),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        address_space=_limit(resource.RLIMIT_AS),
        overcommit=_number(proc / "sys/vm/overcommit_memory"),
        huge_pages=_chosen(sys / "kernel/mm/transparent_hugepage/enabled"),
        cpus=os.cpu_count() or 1,
        cpus_allowed=len(host_cpus.affinity()),
        cpu_quota=host_cpus.cpu_quota(),
        numa_nodes=numa.num_nodes(),
        cpus_near_device=len(near) if near else None,
        near_node_is_allowed=near is not None or not _node_of(folder),
        cache_folder=str(cache),
        cache_writable=_writable(cache),
        disk_free=_disk_free(Path.cwd()),
    )


def _version(package: str) -> str | None:
    try:
        return str(torch.__version__) if package == "torch" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: Path | None) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text().strip() if path else None
    return None


def _number(path: Path | None) -> int | None:
    text = _text(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _speed(path: Path | None) -> float | None:
    """``32.0 GT/s PCIe`` → 32.0."""
    match = re.match(r"([\d.]+) GT/s", _text(path) or "")
    return float(match[1]) if match else None


def _chosen(path: Path) -> str | None:
    """``always [madvise] never`` → madvise."""
    match = re.search(r"\[(\w+)\]", _text(path) or "")
    return match[1] if match else None


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _node_of(folder: Path | None) -> frozenset[int]:
    """The CPUs of the accelerator's node, on a host with several."""
    node = _number(folder / "numa_node" if folder else None)
    return numa.cpus_of_node(node) if node is not None and numa.num_nodes() > 1 else frozenset()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _disk_free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
