# SPDX-License-Identifier: Apache-2.0
"""Host memory: what processes of one host claim of it, and what a check counts. Limits are a tree of cgroup files."""

import contextlib
import gc
import mmap
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offstage
from offstage import checkpoint
from offstage.config import format_size
from offstage.errors import HostMemoryError
from offstage.memory import arena, claims
from offstage.memory.arena import check_host_memory
from offstage.memory.claims import Claim, others_outstanding, own_outstanding
from offstage.memory.pool import HostPool
from offstage.optimizer.optimizer import runtime_of
from tests.support.slow_writer import held_back

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def _nothing_left():
    """Optimizers that other tests have left still claim what their first step would take."""
    gc.collect()
    claims._own.forget()


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host of its own: no limit yet, and no claims but those of the test's processes."""
    (tmp_path / "claims").mkdir()
    enter(tmp_path, monkeypatch.setattr)
    return tmp_path


def enter(folder, set_attribute=setattr):
    """Make `folder` this process's host. Ranks do it too."""
    set_attribute(claims, "SHARED_FOLDERS", (folder / "claims",))
    set_attribute(arena, "CGROUP_ROOT", folder / "cgroup")


def allow(folder, left, group=""):
    """The cgroup has `left` bytes left: in the files of cgroups v2 and in those of v1."""
    for base, limit, usage in (
        (folder / "cgroup", "memory.max", "memory.current"),
        (folder / "cgroup" / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        (base / group).mkdir(parents=True, exist_ok=True)
        (base / group / limit).write_text(f"{1000 * MIB + left}\n")
        (base / group / usage).write_text(f"{1000 * MIB}\n")
        (base / group / "memory.stat").write_text("anon 5\n")


def taken(nbytes):
    """Private memory that the kernel counts."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:: mmap.PAGESIZE] = bytes(-(-nbytes // mmap.PAGESIZE))
    return memory


# Several processes


class Child:
    """A process that has claimed `nbytes`, and lives until it is told to end."""

    def __init__(self, nbytes, *, takes=0):
        ready, tell = os.pipe()
        self._wait, self._end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                claim = check_host_memory(nbytes, None)
                memory = taken(takes) if takes else None
                os.write(tell, b"+")
                os.close(self._end)
                os.read(self._wait, 1)
                del claim, memory
            os._exit(0)
        os.close(tell)
        os.close(self._wait)
        assert os.read(ready, 1) == b"+"
        os.close(ready)

    def end(self):
        os.close(self._end)
        os.waitpid(self.pid, 0)


def test_what_another_process_has_claimed_is_not_left(host):
    allow(host, 100 * MIB)
    child = Child(60 * MIB)
    check_host_memory(40 * MIB, None).release()
    with pytest.raises(HostMemoryError) as info:
        check_host_memory(41 * MIB, None)
    said = str(info.value)
    assert "needs 41.0 MiB of host memory; the cgroup's memory limit leaves 100.0 MiB" in said
    assert f"claimed and not taken yet: 60.0 MiB by process {child.pid}. Lower fraction" in said
    assert own_outstanding() == 0  # what was refused is not claimed
    child.end()
    check_host_memory(100 * MIB, None).release()


def test_what_cannot_be_had_is_never_claimed(host, monkeypatch):
    """Another process that looks meanwhile would be refused for it."""
    allow(host, 100 * MIB)
    monkeypatch.setattr(arena, "Claim", None)
    with pytest.raises(HostMemoryError, match="needs 101"):
        check_host_memory(101 * MIB, None)


def test_memory_that_was_taken_is_not_counted_twice(host):
    """The kernel counts it: with the claim, half of the memory would look as if it were twice as much."""
    allow(host, 100 * MIB)  # with what the child has taken
    child = Child(60 * MIB, takes=50 * MIB)
    assert 9 * MIB < sum(one.nbytes for one in others_outstanding()) < 12 * MIB
    check_host_memory(88 * MIB, None).release()
    with pytest.raises(HostMemoryError, match=f"by process {child.pid}"):
        check_host_memory(92 * MIB, None)
    child.end()


def test_a_killed_process_claims_nothing(host):
    """Not even before its parent has asked for its exit status, nor if another process gets its number."""
    allow(host, 100 * MIB)
    child = Child(60 * MIB)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
    with check_host_memory(100 * MIB, None):
        files = list(claims.claims_folder().iterdir())
        assert [path.name.split("-")[0] for path in files] == [str(os.getpid())]  # the child's is removed
        (claims.claims_folder() / f"{os.getppid()}-12345").write_text(f"{10**15} 0")
        assert not others_outstanding()
    child.end()


def race(folder, needs, rounds):
    """In each round all ranks ask at the same time, and keep what they get until all have asked."""
    enter(folder)
    granted = []
    for _ in range(rounds):
        dist.barrier()
        try:
            claim = check_host_memory(needs[dist.get_rank()], None)
        except HostMemoryError:
            claim = Claim(0)
        dist.barrier()
        granted.append(claim.nbytes)
        claim.release()
    return granted


def test_ranks_that_ask_at_once_never_get_more_than_there_is(host, ranks):
    allow(host, 100 * MIB)
    rounds = zip(*ranks.run(3, race, host, [60 * MIB, 50 * MIB, 30 * MIB], 20), strict=True)
    assert all(sum(granted) <= 100 * MIB for granted in rounds)
    for granted in ranks.run(3, race, host, [40 * MIB, 30 * MIB, 30 * MIB], 5):
        assert all(granted)  # all of them fit


def offload_one_after_the_other(folder):
    """Rank 1 asks while rank 0 has its arenas, and has not made a step: without gradients and slots yet."""
    enter(folder)
    model, settings = nn.Linear(2048, 2048, bias=False), {"min_bytes": 0, "chunk_bytes": "1MiB", "slots": 2}
    refusals = []
    for rank in range(2):
        if dist.get_rank() == rank:
            inner = torch.optim.AdamW(model.parameters())
            try:
                optimizer = offstage.offload(inner, model, **settings)
            except HostMemoryError as error:
                refusals.append(str(error))
        dist.barrier()
    if dist.get_rank() == 0:
        model(torch.ones(1, 2048)).sum().backward()
        optimizer.step()
    dist.barrier()
    if dist.get_rank() == 1:
        offstage.offload(inner, model, **settings)
    return os.getpid(), refusals


def test_what_the_first_step_takes_is_claimed_until_then(host, ranks):
    """A rank needs 32 MiB of state, 16 of gradients and 2 of slots; when it has its arenas, 18 are still claimed."""
    allow(host, 55 * MIB)
    (first, none), (_, refusals) = ranks.run(2, offload_one_after_the_other, host)
    assert not none
    assert len(refusals) == 1
    assert re.search(rf"needs 32\.0 MiB .* 16\.0 MiB for gradients.*\b1\d\.\d MiB by process {first}", refusals[0])


def test_claims_of_other_cgroups_count_only_where_they_share_a_limit(host, monkeypatch):
    """As in a Slurm job: each task has a cgroup of its own, and the limit is that of the job around them."""
    fake = host / "proc"
    child, own = Child(60 * MIB), os.getpid()
    groups = {own: "/job/task_0", child.pid: "/job/task_1"}
    (fake / "self" / "ns").mkdir(parents=True)
    (fake / "self" / "ns" / "pid").symlink_to("/proc/self/ns/pid")
    for pid in (own, child.pid):
        (fake / str(pid)).mkdir()
        for name in ("stat", "statm"):
            (fake / str(pid) / name).symlink_to(f"/proc/{pid}/{name}")
    monkeypatch.setattr(claims, "PROC", fake)

    def left_for(theirs):
        for pid, path in {**groups, child.pid: theirs}.items():
            (fake / str(pid) / "cgroup").write_text(f"3:pids:/\n0::{path}\n")
        (fake / "self" / "cgroup").write_text(f"0::{groups[own]}\n")
        try:
            check_host_memory(50 * MIB, None).release()
        except HostMemoryError as error:
            assert f"60.0 MiB by process {child.pid}" in str(error)  # noqa: PT017
            return False
        return True

    allow(host, 100 * MIB, "job")
    assert not left_for("/job/task_1")
    assert not left_for("/job")
    assert left_for("/job2/task_0")
    assert left_for("/")
    assert left_for("/../job/task_1")  # outside of this container
    allow(host, 100 * MIB, "job/task_0")
    allow(host, 1000 * MIB, "job")
    assert left_for("/job/task_1")
    assert not left_for("/job/task_0")
    child.end()


# One process


def test_claims_add_up_and_shrink_as_memory_is_taken(host):
    allow(host, 100 * MIB)
    first, second = Claim(30 * MIB), check_host_memory(50 * MIB, None)
    with pytest.raises(HostMemoryError, match=r"not taken yet: 80\.0 MiB by this process"):
        check_host_memory(30 * MIB, None)
    memory = taken(20 * MIB)
    assert 58 * MIB < own_outstanding() <= 60 * MIB
    second.release()
    assert own_outstanding() == 30 * MIB  # the rest belongs to the first, which may have taken nothing
    del first
    assert own_outstanding() == 0
    assert not list(claims.claims_folder().iterdir())
    del memory


def test_a_forked_child_has_no_claims_and_keeps_those_of_its_parent(host):
    allow(host, 100 * MIB)
    with check_host_memory(60 * MIB, None) as claim:
        child = os.fork()
        if child == 0:
            claim.release()  # at the end of a worker: not the parent's
            seen = [one.nbytes for one in others_outstanding() if one.pid == os.getppid()]
            os._exit(own_outstanding() != 0 or not seen or not 58 * MIB < seen[0] <= 60 * MIB)
        assert os.waitpid(child, 0)[1] == 0
        assert own_outstanding() > 58 * MIB


@pytest.mark.parametrize("place", ["nowhere", "a link", "a file"])
def test_without_a_place_for_claims_a_process_counts_its_own(host, monkeypatch, caplog, place):
    """A folder that another user could have prepared is not used, and a warning says that nothing is shared."""
    claims._warn_alone.cache_clear()
    name = claims.claims_folder().name
    other = host / "other"
    other.mkdir()
    if place == "a link":
        (other / name).symlink_to(claims.claims_folder())
    elif place == "a file":
        (other / name).write_text("")
    monkeypatch.setattr(claims, "SHARED_FOLDERS", (host / "absent",) if place == "nowhere" else (other,))
    allow(host, 100 * MIB)
    with check_host_memory(60 * MIB, None), pytest.raises(HostMemoryError, match="by this process"):
        check_host_memory(60 * MIB, None)
    assert sum("cannot see how much memory" in record.message for record in caplog.records) == 1
    assert not list((host / "claims" / name).iterdir())


def test_files_that_are_no_claims_are_left_alone(host):
    folder = claims.claims_folder()
    parent, started = os.getppid(), claims._started(os.getppid())
    (folder / "notes.txt").write_text("mine")
    (folder / f"{parent}-{started}").write_text("damaged")
    assert others_outstanding() == []
    assert {path.name for path in folder.iterdir()} == {"notes.txt", f"{parent}-{started}"}


def test_activations_claim_their_slab_while_they_take_it(host):
    allow(host, 3 * MIB)
    pool = HostPool(torch.device("cpu"), None)
    pool.take(1 * MIB)
    child = Child(2 * MIB)
    with pytest.raises(HostMemoryError, match=f"by process {child.pid}"):
        pool.take(2 * MIB)
    child.end()
    pool.take(2 * MIB)
    assert own_outstanding() == 0


# What is counted


def made(**config):
    """2 MiB of weights, with 4 MiB of state and 3 MiB in slots."""
    model = nn.Linear(512, 1024, bias=False)
    inner = torch.optim.AdamW(model.parameters())
    return model, offstage.offload(inner, model, **{"min_bytes": 0, "chunk_bytes": "1MiB", **config})


def step(model, optimizer, *, clip=None):
    optimizer.zero_grad()
    model(torch.ones(1, 512)).sum().backward()
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    optimizer.step()


COUNTED = {
    "streamed": ({}, 4, {"gradients": 2, "slots": 3}),
    "slots by size": ({"chunk_bytes": None}, 4, {"gradients": 2, "slots": 63 / 64}),
    "small slots": ({"chunk_bytes": "1MiB", "slots": 2}, 4, {"gradients": 2, "slots": 2}),
    "window": ({"chunk_bytes": "1MiB", "slots": 2, "window": "all"}, 4, {"gradients": 2, "slots": 6}),
    "on the host": ({"update_on": "host", "chunk_bytes": "2MiB"}, 4 + 4 * 4, {"gradients": 2}),
}


@pytest.mark.parametrize("case", COUNTED)
def test_on_a_cpu_gradients_and_slots_count(host, case):
    """Exactly what the first step takes beside the state, and each part is named."""
    config, state, beside = COUNTED[case]
    need = int((state + sum(beside.values())) * MIB)
    allow(host, need - 1)
    with pytest.raises(HostMemoryError) as info:
        made(**config)
    for name, mib in beside.items():
        assert f"{format_size(mib * MIB)} for {name}" in str(info.value)
    assert f"The state needs {state}.0 MiB of host memory" in str(info.value)
    allow(host, need)
    model, optimizer = made(**config)
    step(model, optimizer)
    assert own_outstanding() == 0
    transport = runtime_of(optimizer).engines[0].transport
    assert transport.host_bytes == state * MIB
    assert transport.pipeline.device_bytes <= beside.get("slots", 0) * MIB


def test_resident_state_on_a_cpu_counts_and_what_exists_does_not(host):
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])  # 4 x 1 MiB, 2 MiB of state each
    settings = {"min_bytes": 0, "fraction": 0.5, "chunk_bytes": "1MiB", "slots": 2}
    allow(host, 4 * MIB)
    with pytest.raises(
        HostMemoryError, match=r"4\.0 MiB for gradients, 2\.0 MiB for slots, 4\.0 MiB for resident state"
    ):
        offstage.offload(torch.optim.AdamW(model.parameters()), model, **settings)
    inner = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    inner.step()
    with pytest.raises(HostMemoryError, match=r"needs 4\.0 MiB of host memory, 2\.0 MiB for slots; "):
        offstage.offload(inner, model, **settings)
    allow(host, 6 * MIB)
    offstage.offload(inner, model, **settings)


def test_nothing_is_needed_where_nothing_leaves(host):
    allow(host, 0)
    model, optimizer = made(fraction=0.0)
    step(model, optimizer)
    optimizer.replan(slots=2)


def test_a_replan_counts_the_new_arenas_and_slots(host):
    allow(host, 9 * MIB)
    model, optimizer = made()
    step(model, optimizer)
    optimizer.zero_grad()
    allow(host, 6 * MIB)  # beside what was taken
    optimizer.replan(slots=3)  # state that stays in its place needs no new arenas
    with pytest.raises(HostMemoryError, match=r"4\.0 MiB of host memory, 2\.0 MiB for gradients, 1\.0 MiB for slots"):
        optimizer.replan(chunk_bytes="512KiB", slots=2)
    allow(host, 8 * MIB)
    optimizer.replan(chunk_bytes="512KiB", slots=2)
    step(model, optimizer)
    optimizer.close()
    assert own_outstanding() == 0


def test_a_dropped_optimizer_claims_nothing(host):
    allow(host, 9 * MIB)
    model_and_optimizer = made()
    assert own_outstanding() > 4 * MIB
    del model_and_optimizer
    assert own_outstanding() == 0
    made()


def test_two_optimizers_of_one_process_count_together(host):
    allow(host, 9 * MIB)
    first = made()
    with pytest.raises(HostMemoryError, match="by this process"):
        made()
    step(*first)
    made()


def test_an_asynchronous_save_leaves_room_for_gradients(host, tmp_path):
    """It takes 2 MiB for weights and up to 4 MiB for state, while the next backward takes 2 MiB for gradients."""
    allow(host, 100 * MIB)
    model, optimizer = made()
    step(model, optimizer)
    optimizer.zero_grad()
    allow(host, 8 * MIB - 1)
    with pytest.raises(HostMemoryError) as info:
        checkpoint.async_save(tmp_path / "saved", model, optimizer)
    for part in (
        "copies 2.0 MiB now",
        "all 4.0 MiB of state",
        "2.0 MiB for gradients",
        "leaves 8.0 MiB",
        "Or use save()",
    ):
        assert part in str(info.value)
    assert not (tmp_path / "saved").exists()
    assert own_outstanding() == 0
    checkpoint.save(tmp_path / "plain", model, optimizer)
    allow(host, 8 * MIB)
    checkpoint.async_save(tmp_path / "saved", model, optimizer).result()


def test_an_asynchronous_save_claims_what_it_takes_until_it_has_ended(host, tmp_path):
    allow(host, 100 * MIB)
    model, optimizer = made()
    step(model, optimizer)
    optimizer.zero_grad()
    allow(host, 8 * MIB)
    with held_back() as slow:
        saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
        assert own_outstanding() > 2 * MIB
        with pytest.raises(HostMemoryError, match="by this process"):
            optimizer.replan(chunk_bytes="512KiB", slots=1)
        slow.finish(saving)
    assert own_outstanding() == 0
    optimizer.replan(chunk_bytes="512KiB", slots=1)


@pytest.mark.parametrize("left", [6 * MIB - 1, 6 * MIB], ids=["too little", "enough"])
def test_a_second_set_of_arenas_leaves_room_for_gradients(host, left):
    """It takes 4 MiB, and the next backward 2 MiB. Without room for both, updates are made in step()."""
    allow(host, 100 * MIB)
    model, optimizer = made(overlap_forward=True, update_in_backward=True)
    allow(host, left)  # beside what the first step takes
    step(model, optimizer, clip=1e6)
    told = [text for text in optimizer.receipt().fallbacks if "second copy of the state" in text]
    assert len(told) == (left < 6 * MIB)
    assert all("needs 4.0 MiB of host memory, 2.0 MiB for gradients" in text for text in told)
    step(model, optimizer, clip=1e6)
