# SPDX-License-Identifier: Apache-2.0
"""The CPUs that this process may keep busy, and the NUMA nodes they belong to.

How many: affinity, the cgroup's CPU quota, and the other ranks of the host. Where: memory of another node is slower to
read and slower to copy to the device, so host state and the threads that update it belong on the accelerator's node.
The roots of sysfs, procfs and the cgroup hierarchy are arguments, so that tests can describe other machines.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")

# How launchers say how many processes of this job run on this host, the most specific first: torchrun, Open MPI,
# Slurm ("8", or "8(x2)" for eight on each of two hosts), Intel MPI.
_RANK_COUNTS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "MPI_LOCALNRANKS")


def affinity() -> frozenset[int]:
    """The CPUs this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def stay_on(cpus: Collection[int] | None) -> None:
    """Let the calling thread run on `cpus` only, if there are any given."""
    if cpus is not None:
        with contextlib.suppress(OSError):  # the process may have lost them since: slower, otherwise the same
            os.sched_setaffinity(0, cpus)


def usable_cpus(cpus: frozenset[int] | None = None, *, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """CPUs this process can keep busy: its affinity (or `cpus`), limited by the cgroup's quota; at least 1."""
    allowed = len(affinity() if cpus is None else cpus)
    quota = cpu_quota(cgroup=cgroup, membership=membership)
    return max(1, min(allowed, math.floor(quota)) if quota is not None else allowed)


def cpu_quota(*, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs under the tightest quota of this process's cgroup and its ancestors; `None` without a quota."""
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
            # Mounted under its own name, or under the names of all controllers in its hierarchy.
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
    """Cores of the affinity (or `cpus`): hyperthreads of one core count once, CPUs of unknown topology each."""
    cores = set()
    for cpu in affinity() if cpus is None else cpus:
        try:
            cores.add((topology / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def ranks_on_this_host(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes of this job share this host, according to the launcher; 1 without a launcher."""
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
    """Threads for this rank: `asked`, or its share of the usable CPUs, or fewer if the user lowered torch's number."""
    if asked is not None:
        return asked
    own, ranks = affinity(), ranks_on_this_host(environment)
    usable = usable_cpus(own, cgroup=cgroup, membership=membership)
    # Where the launcher has bound each rank to its own CPUs, they are already divided: divide those of the whole job.
    job = usable_cpus(own | _affinity_of_parent(), cgroup=cgroup, membership=membership)
    threads = max(1, min(usable, job // ranks))
    # torchrun sets OMP_NUM_THREADS to 1; torch's number then says nothing about what the user wants.
    lowered = torch.get_num_threads() < min(physical_cores(own, topology=topology), usable)
    if lowered and "OMP_NUM_THREADS" not in environment:
        threads = min(threads, torch.get_num_threads())
    return threads


def beside_a_loop(threads: int) -> int:
    """How many of `threads` to keep busy while a training loop keeps an accelerator busy.

    The loop's thread and autograd's must find a CPU at once when they have something to launch: one in eight is theirs.
    """
    return threads - max(1, threads // 8) if threads >= 4 else threads


def _affinity_of_parent() -> frozenset[int]:
    """The CPUs of the launcher; none where they cannot be read."""
    try:
        return frozenset(os.sched_getaffinity(os.getppid()) if os.getppid() else ())
    except OSError:
        return frozenset()


# NUMA nodes #


def num_nodes(*, nodes: Path = NODES) -> int:
    """Nodes that have CPUs (a node may be memory only, such as an accelerator's); 1 where sysfs does not say."""
    return max(1, sum(bool(_cpus_in(folder)) for folder in nodes.glob("node[0-9]*")))


def cpus_of_node(node: int, *, nodes: Path = NODES) -> frozenset[int]:
    """The CPUs of `node`, whether this process may use them or not; none for a node that does not exist."""
    return _cpus_in(nodes / f"node{node}")


def cpus_near(
    device: torch.device, *, nodes: Path = NODES, pci: Path = PCI, allowed: frozenset[int] | None = None
) -> frozenset[int] | None:
    """The CPUs this process may use on the node of `device`.

    `None` if there is only one node, if the device's node is unknown, or if the process is bound to other nodes.
    """
    if device.type == "cpu" or num_nodes(nodes=nodes) == 1:
        return None
    folder = pci_folder(device, pci=pci)
    if folder is None:
        return None
    try:
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # The kernel writes -1 where the firmware does not report the node; node -1 has no CPUs, so the result is None.
    near = cpus_of_node(node, nodes=nodes) & (affinity() if allowed is None else allowed)
    return near or None


def pci_folder(device: torch.device, *, pci: Path = PCI) -> Path | None:
    """The accelerator's folder in sysfs; `None` for a CPU and for devices whose PCI address is unknown."""
    if device.type == "cpu":
        return None
    properties = torch.get_device_module(device).get_device_properties(device.index)
    bus, slot = getattr(properties, "pci_bus_id", None), getattr(properties, "pci_device_id", None)
    if not isinstance(bus, int) or not isinstance(slot, int):
        return None
    return pci / f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{slot:02x}.0"


def _cpus_in(node: Path) -> frozenset[int]:
    """The CPUs that a node's list, such as ``0-3,8,10-11``, names."""
    cpus: set[int] = set()
    try:
        for part in (node / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):  # ValueError: an empty list, or not one
        return frozenset()
    return frozenset(cpus)
