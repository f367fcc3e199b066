# SPDX-License-Identifier: Apache-2.0
"""The doctor: for every illness a finding with advice, none for the healthy, and a trial that can fail."""

import dataclasses
import json
import os

import pytest
import torch

from offstage.cli import doctor, system_info
from offstage.cli import main as cli
from offstage.cli.doctor import Finding, judge, judge_rates, trial
from offstage.cli.system_info import SystemInfo, read_system_info
from offstage.errors import OffstageError
from offstage.planning.machine import Machine
from tests.support.machines import machine

GIB = 1 << 30
CPU = torch.device("cpu")


def healthy(**changes) -> SystemInfo:
    """A GPU in a good host."""
    fields = {
        "python": "3.12.1",
        "versions": dict.fromkeys(system_info.PACKAGES, "9.9"),
        "environment": {},
        "built_for": "cuda",
        "device_type": "cuda",
        "num_devices": 1,
        "driver_file": "/proc/driver/nvidia/version",
        "link_width": 16,
        "link_width_most": 16,
        "link_gt_per_s": 32.0,
        "host_bytes": 126 * GIB,
        "host_available": 120 * GIB,
        "cgroup_left": None,
        "memlock": None,
        "address_space": None,
        "overcommit": 0,
        "huge_pages": "madvise",
        "cpus": 16,
        "cpus_allowed": 16,
        "cpu_quota": None,
        "numa_nodes": 1,
        "cpus_near_device": None,
        "near_node_is_allowed": True,
        "cache_folder": "/home/you/.cache/offstage",
        "cache_writable": True,
        "disk_free": 500 * GIB,
    }
    return SystemInfo(**(fields | changes))


def versions(**changes):
    return {"versions": healthy().versions | changes}


WITHOUT = {"device_type": None, "num_devices": 0, "link_width": None, "link_width_most": None, "link_gt_per_s": None}

ILLNESSES = {
    "an old Python": ({"python": "3.10.2"}, "broken", "Python 3.11 or newer"),
    "an old torch": (versions(torch="2.9.1+cu128"), "broken", "torch 2.11 or newer"),
    "no numba": (versions(numba=None), "broken", "pip install numba"),
    "no triton": (versions(triton=None), "broken", "pip install triton"),
    "no jit": ({"environment": {"NUMBA_DISABLE_JIT": "1"}}, "broken", "Unset it"),
    "torch for the CPU": (WITHOUT | {"built_for": None}, "broken", "Install a build of torch for your accelerator"),
    "a hidden device": (
        WITHOUT | {"environment": {"CUDA_VISIBLE_DEVICES": ""}},
        "broken",
        "Unset CUDA_VISIBLE_DEVICES",
    ),
    "a driver without a device": (WITHOUT, "broken", "update the driver or pass the device in"),
    "no accelerator": (WITHOUT | {"built_for": None, "driver_file": None}, "note", "no device memory is saved"),
    "blocking launches": ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "slow", "nothing overlaps"),
    "no caching": ({"environment": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}, "slow", "Unset it"),
    "a narrow slot": ({"link_width": 4}, "slow", "a slot with all its lanes"),
    "another node": ({"near_node_is_allowed": False, "numa_nodes": 2}, "slow", "numactl"),
    "a small container": ({"cgroup_left": 8 * GIB}, "slow", "Raise its memory limit"),
    "a limited address space": ({"address_space": 64 * GIB}, "broken", "ulimit -v unlimited"),
    "strict reservations": ({"overcommit": 2}, "slow", "vm.overcommit_memory=0"),
    "no huge pages": ({"huge_pages": "never"}, "slow", "echo madvise"),
    "a kernel without huge pages": ({"huge_pages": None}, "note", "Pinning takes longer"),
    "locked memory on CUDA": ({"memlock": 8 << 20}, "note", "does not enforce it"),
    "locked memory elsewhere": ({"memlock": 8 << 20, "device_type": "xpu"}, "slow", "ulimit -l unlimited"),
    "a quota": ({"cpu_quota": 2.0}, "slow", "docker run --cpus"),
    "an affinity": ({"cpus_allowed": 4}, "note", "A launcher does that"),
    "one thread of torch": ({"environment": {"OMP_NUM_THREADS": "1"}}, "note", "torch's own threads"),
    "a cache nobody may write": ({"cache_writable": False}, "slow", "Set OFFSTAGE_CACHE"),
    "no packages of choice": (versions(transformers=None), "note", ""),
}


def not_fine(findings):
    return [one for one in findings if one.verdict != "fine"]


def test_the_healthy_are_sent_home():
    assert not not_fine(judge(healthy()))
    assert not not_fine(judge_rates(machine(), healthy()))


@pytest.mark.parametrize("name", ILLNESSES)
def test_every_illness_has_one_finding_with_advice(name):
    changes, verdict, advice = ILLNESSES[name]
    (found,) = not_fine(judge(healthy(**changes)))
    assert found.verdict == verdict
    assert advice in found.advice
    assert found.found


def test_what_is_fine_is_said():
    text = "\n".join(one.found for one in judge(healthy(cgroup_left=100 * GIB, numa_nodes=2, cpus_near_device=8)))
    assert "126.0 GiB, 100.0 GiB free, the cgroup's limit" in text
    assert "8.9 billion bf16 parameters" in text  # 100 GiB / 12 bytes
    assert "16 of 16 on 2 NUMA nodes, 8 of them near the accelerator" in text
    assert "500.0 GiB free here" in text


RATES = {
    "a slow link": ({"link_up_gb_per_s": 12.0, "link_down_gb_per_s": 12.0}, "slow", "could carry 64 GB/s"),
    "somebody else": ({"device_free_bytes": 60 * GIB}, "slow", "Another process uses it"),
    "slow pinning": ({"pin_gib_per_s": 0.4}, "slow", "touched and pinned once"),
}


@pytest.mark.parametrize("name", RATES)
def test_slow_machines(name):
    changes, verdict, advice = RATES[name]
    (found,) = not_fine(judge_rates(machine(**changes), healthy()))
    assert found.verdict == verdict
    assert advice in found.advice


def test_one_fast_direction_is_no_slow_link():
    assert not not_fine(judge_rates(machine(link_up_gb_per_s=30.0), healthy()))


def test_rates_without_an_accelerator():
    findings = judge_rates(machine(device_name="cpu", pin_gib_per_s=0.1), healthy(**WITHOUT))
    assert not not_fine(findings)
    assert any("copies within host memory" in one.found for one in findings)


# What the system says #


def test_this_machine():
    found = read_system_info()
    assert found.versions["torch"] == str(torch.__version__)
    assert found.cpus_allowed == len(os.sched_getaffinity(0))
    assert found.host_bytes >= (found.host_available or 0)
    assert found.cache_writable
    assert json.loads(json.dumps(dataclasses.asdict(found)))["python"] == found.python


def test_other_machines(tmp_path, monkeypatch):
    """Files of procfs and sysfs that are somewhere else."""
    pci = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    pci.mkdir(parents=True)
    (pci / "current_link_width").write_text("8\n")
    (pci / "max_link_width").write_text("16\n")
    (pci / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always madvise [never]\n")
    memory = tmp_path / "proc/sys/vm"
    memory.mkdir(parents=True)
    (memory / "overcommit_memory").write_text("2\n")
    monkeypatch.setattr(system_info.numa, "pci_folder", lambda device, pci: pci / "0000:01:00.0")
    monkeypatch.setenv("OFFSTAGE_CACHE", "/proc/nowhere")
    environment = {"OMP_NUM_THREADS": "1", "HOME": "/root"}
    found = read_system_info(environment=environment, proc=tmp_path / "proc", sys=tmp_path / "sys")
    assert (found.link_width, found.link_width_most, found.link_gt_per_s) == (8, 16, 32.0)
    assert (found.huge_pages, found.overcommit) == ("never", 2)
    assert found.environment == {"OMP_NUM_THREADS": "1"}
    assert (found.cache_folder, found.cache_writable) == ("/proc/nowhere", False)
    nothing = read_system_info(environment={}, proc=tmp_path / "none", sys=tmp_path / "none")
    assert (nothing.link_width, nothing.huge_pages, nothing.overcommit) == (None, None, None)


# The trial #


def test_trial():
    assert trial(CPU) == Finding(
        "trial", "3 offloaded steps have the bits of resident state, with weights on the host, too"
    )


@pytest.mark.parametrize("setting", ["host_fraction", "weights"])
def test_trial_that_finds_other_bits(monkeypatch, setting):
    right = doctor._trained

    def wrong(device, steps, **config):
        weights = right(device, steps, **config)
        if setting in config:
            weights[2][5, 7] += 1e-6
        return weights

    monkeypatch.setattr(doctor, "_trained", wrong)
    found = trial(CPU)
    assert (found.verdict, found.found) == ("broken", "1 elements differ from resident state after 3 steps")


def test_trial_that_fails(monkeypatch):
    def fail(*arguments, **config):
        raise OffstageError("The driver refused")

    monkeypatch.setattr(doctor, "offload", fail)
    found = trial(CPU)
    assert found.verdict == "broken"
    assert "OffstageError: The driver refused" in found.found
    monkeypatch.setenv("OFFSTAGE_TRACEBACK", "1")
    with pytest.raises(OffstageError):
        trial(CPU)


# The command #


@pytest.fixture
def measured(monkeypatch):
    """No measuring: `machine()` is what is found."""
    asked = []

    def measure(*, refresh=False):
        asked.append(refresh)
        return machine(device_name="cpu")

    monkeypatch.setattr(cli, "_measured", measure)
    return asked


def test_command(measured, capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "It works." in text
    assert "3 offloaded steps" in text
    assert measured == [False]
    assert cli.main(["doctor", "--refresh", "--json"]) == 0
    assert measured == [False, True]


def test_command_as_json(measured, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {one["part"] for one in content["findings"]} >= {"torch", "accelerator", "host memory", "link", "trial"}
    assert Machine.from_json(json.dumps(content["machine"])) == machine(device_name="cpu")
    assert content["surroundings"]["huge_pages"] == read_system_info().huge_pages


def test_quick_measures_nothing(measured, capsys):
    assert cli.main(["doctor", "--quick", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert measured == []
    assert content["machine"] is None
    assert "trial" not in {one["part"] for one in content["findings"]}


def test_what_is_broken_counts(measured, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "trial", lambda device: Finding("trial", "no", "broken", "Report it."))
    assert cli.main(["doctor"]) == 1
    assert "1 broken: see above." in capsys.readouterr().out


def test_what_is_slow_does_not(measured, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "trial", lambda device: Finding("trial", "hm", "slow", "Wait."))
    assert cli.main(["doctor"]) == 0
    assert "It works. 1 slower than it could be" in " ".join(capsys.readouterr().out.split())


def test_markup_in_what_was_found(measured, monkeypatch, capsys):
    """Square brackets in an error's text are text."""
    monkeypatch.setattr(doctor, "trial", lambda device: Finding("trial", "shape [4, 4] [/red]", "slow", "See [here]."))
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "shape [4, 4] [/red]" in text
    assert "See [here]." in text
