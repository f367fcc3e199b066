# SPDX-License-Identifier: Apache-2.0
"""How many threads this process may keep busy: affinity, the cgroup's CPU quota, and the other ranks of the host.

The roots of sysfs, procfs and the cgroup hierarchy are arguments, so that tests can describe other machines.
Called by `machine.py` and by whoever sizes a thread pool.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")

# Each launcher's word for "processes of this job on this host", the most specific first: torchrun, Open MPI,
# Slurm ("8", or "8(x2)" for eight on each of two hosts), Intel MPI.
_RANK_COUNTS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "MPI_LOCALNRANKS")


def affinity() -> frozenset[int]:
    """The CPUs this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def usable_cpus(cpus: frozenset[int] | None = None, *, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """CPUs this process can keep busy: its affinity (or `cpus`), as far as the cgroup's quota reaches; at least 1."""
    allowed = len(affinity() if cpus is None else cpus)
    quota = cpu_quota(cgroup=cgroup, membership=membership)
    return max(1, min(allowed, math.floor(quota)) if quota is not None else allowed)


def cpu_quota(*, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs under the tightest quota of this process's cgroup and its ancestors; `None` when there is none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases, read = [cgroup], _quota_v2
        elif "cpu" in controllers.split(","):
            # Mounted under its own name or under that of all controllers it shares a hierarchy with.
            bases, read = [cgroup / "cpu", cgroup / controllers], _quota_v1
        else:
            continue
        for base in bases:
            folder = base / path.lstrip("/")
            quotas += [quota for place in [folder, *_up_to(base, folder)] if (quota := read(place)) is not None]
    return min(quotas, default=None)


def _up_to(base: Path, folder: Path) -> list[Path]:
    return [place for place in folder.parents if place == base or base in place.parents]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


def physical_cores(cpus: frozenset[int] | None = None, *, topology: Path = TOPOLOGY) -> int:
    """Cores behind the affinity (or `cpus`), hyperthreads of one core counted once; unknown ones count as cores."""
    cores = set()
    for cpu in affinity() if cpus is None else cpus:
        try:
            cores.add((topology / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def ranks_on_this_host(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes of this job share this host, as its launcher says; 1 without a launcher."""
    for name in _RANK_COUNTS:
        match = re.match(r"\s*(\d+)", environment.get(name, ""))
        if match and int(match[1]) >= 1:
            return int(match[1])
    return 1


def num_threads(
    asked: int | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    cgroup: Path = CGROUP,
    membership: Path = MEMBERSHIP,
    topology: Path = TOPOLOGY,
) -> int:
    """Threads for this rank: `asked`, or its share of the usable CPUs, or fewer where the user limited torch."""
    if asked is not None:
        return asked
    own, ranks = affinity(), ranks_on_this_host(environment)
    usable = usable_cpus(own, cgroup=cgroup, membership=membership)
    # A launcher that bound each rank to CPUs of its own has divided them already: what counts is the job's share.
    job = usable_cpus(own | _affinity_of_parent(), cgroup=cgroup, membership=membership)
    threads = max(1, min(usable, job // ranks))
    # torchrun sets OMP_NUM_THREADS to 1, so then torch's own count says nothing about what the user wants.
    lowered = torch.get_num_threads() < min(physical_cores(own, topology=topology), usable)
    if lowered and "OMP_NUM_THREADS" not in environment:
        threads = min(threads, torch.get_num_threads())
    return threads


def _affinity_of_parent() -> frozenset[int]:
    """The CPUs of the launcher; nothing where it cannot be asked."""
    try:
        return frozenset(os.sched_getaffinity(os.getppid()) if os.getppid() else ())
    except OSError:
        return frozenset()


# NUMA nodes #


def num_nodes(*, nodes: Path = NODES) -> int:
    """Nodes that have CPUs (a node may be memory alone, of an accelerator for instance); 1 when it cannot be known."""
    return max(1, sum(bool(_cpus_in(folder)) for folder in nodes.glob("node[0-9]*")))


def cpus_of_node(node: int, *, nodes: Path = NODES) -> frozenset[int]:
    """The CPUs of `node`, whether this process may use them or not; none for a node that is not there."""
    return _cpus_in(nodes / f"node{node}")


def cpus_near(
    device: torch.device, *, nodes: Path = NODES, pci: Path = PCI, allowed: frozenset[int] | None = None
) -> frozenset[int] | None:
    """The CPUs this process may use on the node that `device` hangs on.

    `None` where that says nothing: one node, an unknown place, or a process that is bound to other nodes.
    """
    if num_nodes(nodes=nodes) == 1:
        return None
    folder = pci_folder(device, pci=pci)
    if folder is None:
        return None
    try:
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # The kernel writes -1 where the firmware does not say: there is no such node, so the answer is None.
    near = cpus_of_node(node, nodes=nodes) & (affinity() if allowed is None else allowed)
    return near or None


def pci_folder(device: torch.device, *, pci: Path = PCI) -> Path | None:
    """What sysfs knows about the accelerator; `None` for a CPU and for devices that do not say their PCI address."""
    if device.type == "cpu":
        return None
    properties = torch.get_device_module(device).get_device_properties(device.index)
    bus, slot = getattr(properties, "pci_bus_id", None), getattr(properties, "pci_device_id", None)
    if not isinstance(bus, int) or not isinstance(slot, int):
        return None
    return pci / f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{slot:02x}.0"


def _cpus_in(node: Path) -> frozenset[int]:
    """``0-3,8,10-11`` → those CPUs."""
    cpus: set[int] = set()
    try:
        for part in (node / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):  # ValueError: an empty list, or not one
        return frozenset()
    return frozenset(cpus)
