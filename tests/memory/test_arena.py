# SPDX-License-Identifier: Apache-2.0
"""Arenas: exact size, zero at first, own storages, not shared with a forked child, refused with numbers."""

import io
import os
import pickle

import pytest
import torch

from offstage.config import parse_size
from offstage.errors import HostMemoryError
from offstage.memory import arena as host_memory
from offstage.memory.arena import Arena, check_host_memory

CPU = torch.device("cpu")


def arena(numel: int, dtype: torch.dtype = torch.float32) -> Arena:
    return Arena(numel, dtype, CPU, pin=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.float64])
@pytest.mark.parametrize("numel", [1, 1000, 3_000_001])
def test_exact_size_and_zero(numel, dtype):
    memory = arena(numel, dtype)
    assert memory.nbytes == numel * dtype.itemsize
    assert memory.flat.shape == (numel,)
    assert not memory.flat.any()
    assert not memory.pinned  # there is no accelerator to register with


def test_kernels_that_cannot_populate_pages(monkeypatch):
    """Linux before 5.14 refuses the advice; the pages are then touched one by one, and are zero all the same."""
    monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 9999)
    memory = arena(30_000_001)
    assert _resident_bytes(memory) >= memory.nbytes
    assert not memory.flat.any()


def _resident_bytes(memory: Arena) -> int:
    """What the kernel says is populated of the arena's mapping."""
    address, inside = memory.flat.data_ptr(), False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            fields = line.split()
            if "-" in fields[0] and not fields[0].endswith(":"):
                low, high = (int(end, 16) for end in fields[0].split("-"))
                inside = low <= address < high
            elif inside and fields[0] == "Rss:":
                return int(fields[1]) * 1024
    raise AssertionError("the mapping is not there")


def test_a_handed_out_tensor_is_the_arena_and_owns_its_storage():
    memory = arena(1_000_000)
    piece = memory.tensor(1024, 1000)
    piece.fill_(3)
    assert memory.flat[1023] == 0
    assert torch.equal(memory.flat[1024:2024], piece)
    assert memory.flat[2024] == 0
    assert piece.untyped_storage().nbytes() == 4000
    file = io.BytesIO()
    torch.save(piece, file)
    assert file.tell() < 8000  # a slice of the arena would save all 4 MB


def test_a_handed_out_tensor_outlives_its_arena():
    memory = arena(4096)
    piece = memory.tensor(0, 4096)
    memory.flat.fill_(5)
    memory.close()
    del memory
    assert torch.equal(piece, torch.full((4096,), 5.0))


def test_empty_pieces():
    assert arena(0).flat.numel() == 0
    assert arena(10).tensor(3, 0).numel() == 0


def test_a_forked_child_does_not_have_the_pages():
    """MADV_DONTFORK: in the child the range is not mapped at all, so nothing is copied and nothing can be moved."""
    memory = arena(1_000_000)
    address = memory.flat.data_ptr()
    assert _is_mapped(address)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, pickle.dumps(_is_mapped(address)))
        os._exit(0)
    os.waitpid(child, 0)
    assert pickle.loads(os.read(read, 100)) is False
    os.close(read)
    os.close(write)


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_host_budget_is_a_refusal_with_numbers():
    check_host_memory(100, host_budget=200, already_bytes=100)
    with pytest.raises(HostMemoryError, match=r"host_budget of 200 B cannot hold 201 B.*Raise it to 201 B"):
        check_host_memory(101, host_budget=200, already_bytes=100)


def test_mem_available_is_a_refusal_with_numbers(monkeypatch):
    monkeypatch.setattr(host_memory, "mem_available", lambda: parse_size("1GiB", ""))
    with pytest.raises(HostMemoryError, match=r"needs 2\.0 GiB.*MemAvailable 1\.0 GiB.*Lower fraction"):
        check_host_memory(parse_size("2GiB", ""), host_budget=None)


def test_this_machine_has_some_memory():
    assert host_memory.mem_available() > 2**20
    with pytest.raises(HostMemoryError, match="MemAvailable"):
        check_host_memory(2**60, host_budget=None)


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("0::/job/task\n", {"job/task": ("max", 10, 0), "job": ("1000", 400, 100)}, 700),
        ("0::/job\n", {"job": ("500", 800, 0)}, 0),
        ("0::/job\n", {"job": ("max", 800, 0)}, None),
        ("0::/\n", {}, None),
    ],
)
def test_cgroup_v2(tmp_path, membership, files, left):
    """The tightest limit of the cgroup and its ancestors; cached file pages are not used memory."""
    for folder, (limit, usage, cached) in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{usage}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    (tmp_path / "self").write_text(membership)
    assert host_memory.cgroup_available(tmp_path, tmp_path / "self") == left


def test_cgroup_v1(tmp_path):
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("1000\n")
    (folder / "memory.usage_in_bytes").write_text("300\n")
    (folder / "memory.stat").write_text("total_inactive_file 50\n")
    (tmp_path / "self").write_text("7:cpu,memory:/job\n3:pids:/other\n")
    assert host_memory.cgroup_available(tmp_path, tmp_path / "self") == 750
