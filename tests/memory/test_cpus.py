# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes, CPU quotas, ranks and threads of machines described by small trees of files."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offstage.memory import cpus as host_cpus
from offstage.memory import numa
from offstage.memory.cpus import cpu_quota, num_threads, physical_cores, ranks_on_this_host, usable_cpus
from offstage.memory.numa import cpus_near, cpus_of_node, num_nodes, pci_folder

CPU = torch.device("cpu")
ACCELERATOR = torch.device("cuda", 1)


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def nodes_of(root: Path, *lists: str) -> Path:
    for node, cpus in enumerate(lists):
        put(root / f"node{node}/cpulist", cpus)
    put(root / "possible", f"0-{len(lists) - 1}")
    (root / "power").mkdir()
    return root


@pytest.fixture
def accelerator(monkeypatch):
    """Device 1 sits at 0001:c4:02.0, or as the test says."""
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC4, pci_device_id=2)
    asked = []

    def get_device_properties(index):
        asked.append(index)
        return properties

    module = SimpleNamespace(get_device_properties=get_device_properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    yield properties
    assert set(asked) <= {ACCELERATOR.index}


# Nodes #


def test_nodes_and_their_cpus(tmp_path):
    nodes = nodes_of(tmp_path, "0-3,8-11", "4-7,12,14")
    assert num_nodes(nodes=nodes) == 2
    assert cpus_of_node(0, nodes=nodes) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert cpus_of_node(1, nodes=nodes) == {4, 5, 6, 7, 12, 14}
    assert cpus_of_node(2, nodes=nodes) == frozenset()


def test_a_node_without_cpus_is_not_counted(tmp_path):
    """Accelerators with coherent memory show it as nodes of their own."""
    assert num_nodes(nodes=nodes_of(tmp_path, "0-71", "", "")) == 1


def test_nothing_known_is_one_node(tmp_path):
    assert num_nodes(nodes=tmp_path / "absent") == 1
    assert cpus_of_node(0, nodes=tmp_path / "absent") == frozenset()


def test_this_machine():
    every = [cpus_of_node(int(folder.name[4:])) for folder in numa.NODES.glob("node[0-9]*")]
    assert num_nodes() == max(1, sum(map(bool, every)))
    if every:
        assert host_cpus.affinity() <= frozenset().union(*every)
    assert cpus_near(CPU) is None


@pytest.mark.parametrize("node", range(8))
def test_near_on_eight_nodes(tmp_path, accelerator, node):
    nodes = nodes_of(tmp_path / "node", *(f"{8 * i}-{8 * i + 7}" for i in range(8)))
    put(tmp_path / "pci/0001:c4:02.0/numa_node", node)
    near = cpus_near(ACCELERATOR, nodes=nodes, pci=tmp_path / "pci", affinity=frozenset(range(64)))
    assert near == set(range(8 * node, 8 * node + 8))


def test_near_is_within_the_affinity(tmp_path, accelerator):
    nodes = nodes_of(tmp_path / "node", "0-3", "4-7")
    put(tmp_path / "pci/0001:c4:02.0/numa_node", 1)

    def near(*affinity):
        return cpus_near(ACCELERATOR, nodes=nodes, pci=tmp_path / "pci", affinity=frozenset(affinity))

    assert near(2, 3, 4, 5) == {4, 5}
    assert near(0, 1) is None  # bound to the other node: what is there has to do


def test_near_asks_for_the_affinity_of_this_process(tmp_path, accelerator):
    mine = min(os.sched_getaffinity(0))
    nodes = nodes_of(tmp_path / "node", f"{mine},100001-100002", "100003")
    put(tmp_path / "pci/0001:c4:02.0/numa_node", 0)
    assert cpus_near(ACCELERATOR, nodes=nodes, pci=tmp_path / "pci") == {mine}


@pytest.mark.parametrize("written", ["-1", "7", "", "none", None])
def test_an_unknown_place_is_none(tmp_path, accelerator, written):
    nodes = nodes_of(tmp_path / "node", "0-3", "4-7")
    if written is not None:
        put(tmp_path / "pci/0001:c4:02.0/numa_node", written)
    assert cpus_near(ACCELERATOR, nodes=nodes, pci=tmp_path / "pci", affinity=frozenset(range(8))) is None


def test_one_node_is_none(tmp_path, accelerator):
    put(tmp_path / "pci/0001:c4:02.0/numa_node", 0)
    nodes = nodes_of(tmp_path / "node", "0-7")
    assert cpus_near(ACCELERATOR, nodes=nodes, pci=tmp_path / "pci", affinity=frozenset(range(8))) is None


def test_pci_address(tmp_path, accelerator):
    assert pci_folder(ACCELERATOR, pci=tmp_path) == tmp_path / "0001:c4:02.0"
    del accelerator.pci_domain_id  # some backends do not say
    assert pci_folder(ACCELERATOR, pci=tmp_path) == tmp_path / "0000:c4:02.0"
    del accelerator.pci_bus_id
    assert pci_folder(ACCELERATOR, pci=tmp_path) is None
    assert pci_folder(CPU, pci=tmp_path) is None


# Quota #


def quota_of(root: Path) -> float | None:
    return cpu_quota(cgroup=root / "cgroup", membership=root / "membership")


def usable(root: Path, cpus: int) -> int:
    return usable_cpus(frozenset(range(cpus)), cgroup=root / "cgroup", membership=root / "membership")


def test_without_a_cgroup_the_affinity_counts(tmp_path):
    assert quota_of(tmp_path) is None
    assert usable(tmp_path, 6) == 6
    assert usable_cpus(cgroup=tmp_path, membership=tmp_path / "absent") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("written", "cpus"), [("250000 100000", 2), ("max 100000", 8), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_quota_of_version_2(tmp_path, written, cpus):
    put(tmp_path / "membership", "0::/job")
    put(tmp_path / "cgroup/job/cpu.max", written)
    assert usable(tmp_path, 8) == cpus


def test_the_tightest_ancestor_counts(tmp_path):
    put(tmp_path / "membership", "0::/slice/job/task")
    put(tmp_path / "cgroup/slice/job/task/cpu.max", "max 100000")
    put(tmp_path / "cgroup/slice/job/cpu.max", "300000 100000")
    put(tmp_path / "cgroup/slice/cpu.max", "600000 100000")
    put(tmp_path / "cpu.max", "100000 100000")  # outside the hierarchy
    put(tmp_path / "cgroup/slice/other/cpu.max", "100000 100000")  # another job's
    assert quota_of(tmp_path) == 3.0
    assert usable(tmp_path, 16) == 3


def test_a_path_of_the_host_inside_a_container(tmp_path):
    """Without a cgroup namespace the path is the host's, and the root of the mount is the container's own group."""
    put(tmp_path / "membership", "0::/docker/0123")
    put(tmp_path / "cgroup/cpu.max", "450000 100000")
    assert usable(tmp_path, 16) == 4


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1(tmp_path, mount):
    put(tmp_path / "membership", "4:memory:/m\n3:cpuset:/x\n2:cpu,cpuacct:/job/task\n1:name=systemd:/\n0::/")
    put(tmp_path / "cgroup" / mount / "job/task/cpu.cfs_quota_us", -1)
    put(tmp_path / "cgroup" / mount / "job/task/cpu.cfs_period_us", 100000)
    put(tmp_path / "cgroup" / mount / "job/cpu.cfs_quota_us", 125000)
    put(tmp_path / "cgroup" / mount / "job/cpu.cfs_period_us", 50000)
    assert quota_of(tmp_path) == 2.5
    assert usable(tmp_path, 8) == 2


@pytest.mark.parametrize("written", ["", "many 100000", "100000", "100000 0"])
def test_what_is_not_a_quota_is_none(tmp_path, written):
    put(tmp_path / "membership", "0::/job")
    put(tmp_path / "cgroup/job/cpu.max", written)
    assert quota_of(tmp_path) is None


def test_hyperthreads_share_a_core(tmp_path):
    for cpu in range(8):
        put(tmp_path / f"cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    assert physical_cores(frozenset(range(8)), topology=tmp_path) == 4
    assert physical_cores(frozenset({1, 2, 5}), topology=tmp_path) == 2
    assert physical_cores(frozenset({1, 100, 101}), topology=tmp_path) == 3  # not described: counted as cores


# Ranks and threads #


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_NTASKS_PER_NODE": "2"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_NTASKS_PER_NODE": "1"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "16"}, 16),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "", "MPI_LOCALNRANKS": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_ranks(environment, ranks):
    assert ranks_on_this_host(environment) == ranks


@pytest.fixture
def sixteen(tmp_path, monkeypatch):
    """Eight cores with two hyperthreads each, none of them bound; torch as it comes."""
    cpus = {os.getpid(): frozenset(range(16)), os.getppid(): frozenset(range(16))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus[pid or os.getpid()])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for cpu in range(16):
        put(tmp_path / f"topology/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 8},{cpu % 8 + 8}")

    def threads(asked=None, **environment):
        return num_threads(
            asked,
            environment={name: str(value) for name, value in environment.items()},
            cgroup=tmp_path / "cgroup",
            membership=tmp_path / "membership",
            topology=tmp_path / "topology",
        )

    return SimpleNamespace(threads=threads, cpus=cpus, root=tmp_path)


def test_threads_of_one_process_and_of_several_ranks(sixteen):
    assert sixteen.threads() == 16
    assert sixteen.threads(LOCAL_WORLD_SIZE=8) == 2
    assert sixteen.threads(LOCAL_WORLD_SIZE=3) == 5
    assert sixteen.threads(LOCAL_WORLD_SIZE=32) == 1


def test_asked_is_asked(sixteen, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert sixteen.threads(5, LOCAL_WORLD_SIZE=8) == 5
    assert sixteen.threads(40) == 40


def test_ranks_share_the_quota(sixteen):
    put(sixteen.root / "membership", "0::/")
    put(sixteen.root / "cgroup/cpu.max", "650000 100000")
    assert sixteen.threads() == 6
    assert sixteen.threads(LOCAL_WORLD_SIZE=2) == 3
    assert sixteen.threads(LOCAL_WORLD_SIZE=8) == 1


def test_a_rank_bound_to_cpus_of_its_own_uses_them(sixteen):
    sixteen.cpus[os.getpid()] = frozenset(range(4))
    assert sixteen.threads(LOCAL_WORLD_SIZE=4) == 4  # not a quarter of its own
    assert sixteen.threads(LOCAL_WORLD_SIZE=8) == 2  # two ranks were bound to the same four
    sixteen.cpus[os.getppid()] = frozenset(range(4))
    assert sixteen.threads(LOCAL_WORLD_SIZE=4) == 1  # the whole job was bound


def test_a_launcher_that_cannot_be_asked(sixteen):
    def affinity(pid):
        if pid:
            raise PermissionError
        return frozenset(range(16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", affinity)
        assert sixteen.threads(LOCAL_WORLD_SIZE=2) == 8


def test_torch_limits_only_where_the_user_lowered_it(sixteen, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert sixteen.threads() == 3
    assert sixteen.threads(LOCAL_WORLD_SIZE=8) == 2
    assert sixteen.threads(OMP_NUM_THREADS=3) == 16
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert sixteen.threads(OMP_NUM_THREADS=1, LOCAL_WORLD_SIZE=2) == 8  # what torchrun does
    put(sixteen.root / "membership", "0::/")
    put(sixteen.root / "cgroup/cpu.max", "400000 100000")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert sixteen.threads() == 4
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert sixteen.threads() == 2
