# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes as sysfs tells them: which CPUs belong together, and which are near the accelerator.

Memory of another node is slower to read and slower to copy to the device, so host state and the threads that
update it belong on the node the accelerator hangs on. The roots of sysfs are arguments, so that tests can describe
other machines. Called by `machine.py` and by whoever places threads.
"""

from __future__ import annotations

from pathlib import Path

import torch

from offstage.memory import cpus as host_cpus

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def num_nodes(*, nodes: Path = NODES) -> int:
    """Nodes that have CPUs (a node may be memory alone, of an accelerator for instance); 1 when it cannot be known."""
    return max(1, sum(bool(_cpus_in(folder)) for folder in nodes.glob("node[0-9]*")))


def cpus_of_node(node: int, *, nodes: Path = NODES) -> frozenset[int]:
    """The CPUs of `node`, whether this process may use them or not; none for a node that is not there."""
    return _cpus_in(nodes / f"node{node}")


def cpus_near(
    device: torch.device, *, nodes: Path = NODES, pci: Path = PCI, affinity: frozenset[int] | None = None
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
    near = cpus_of_node(node, nodes=nodes) & (host_cpus.affinity() if affinity is None else affinity)
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
