# SPDX-License-Identifier: Apache-2.0
"""Saves beside other saves, on bad disks, with too few threads, interrupted, and while the program changes folders."""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import resource
import signal
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offstage
from offstage import checkpoint
from offstage.checkpoint import loading, manifest, saving
from offstage.checkpoint.claim import FolderClaim
from offstage.checkpoint.manifest import MANIFEST, MARKER
from offstage.checkpoint.threads import in_threads
from offstage.errors import CheckpointError
from offstage.memory.threads import _warn_of_limit
from tests.support import refusals
from tests.support.slow_writer import LONGEST_S, held_back

refused = functools.partial(refusals.refused, CheckpointError)
START = threading.Thread.start


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    return model, offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.1), model, min_bytes=0)


def weights_in(folder):
    model, optimizer = build(seed=99)
    checkpoint.load(folder, model, optimizer)
    return [param.detach().clone() for param in model.parameters()]


def assert_holds(folder, model):
    assert all(map(torch.equal, weights_in(folder), model.parameters()))


def save_now(folder, *args, **kwargs):
    checkpoint.save(folder, *args, **kwargs)


def save_beside(folder, *args, **kwargs):
    checkpoint.async_save(folder, *args, **kwargs).result(LONGEST_S)


BOTH = pytest.mark.parametrize("action", [save_now, save_beside])


# Another process saves to the same folder #


def save_at_once(root, rounds):
    """Every rank saves alone, to the same folder as the other: which succeeded."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model, optimizer = build(dist.get_rank())
    succeeded = []
    for number in range(rounds):
        dist.barrier()
        try:
            checkpoint.save(root / str(number), model, optimizer, group=alone)
            succeeded.append(True)
        except CheckpointError:
            succeeded.append(False)
    return succeeded


def test_of_two_processes_that_save_to_one_folder_one_succeeds(ranks, tmp_path):
    for number, who in enumerate(zip(*ranks.run(2, save_at_once, tmp_path, 10), strict=True)):
        assert sorted(who) == [False, True]
        checkpoint.verify(tmp_path / str(number))
        assert_holds(tmp_path / str(number), build(seed=who.index(True))[0])


def test_a_marker_that_was_replaced_before_it_was_locked(tmp_path):
    """Another save found it, took it for what an interrupted one had left, and made its own."""
    folder, flock = tmp_path / "one", fcntl.flock

    def late(descriptor, operation):
        marker = folder / MARKER
        marker.unlink()
        marker.touch()
        flock(descriptor, operation)

    model, optimizer = build(0)
    with (
        mock.patch("offstage.checkpoint.claim.fcntl.flock", late),
        pytest.raises(CheckpointError, match="Another process is saving"),
    ):
        checkpoint.save(folder, model, optimizer)
    assert os.listdir(folder) == [MARKER]


def save_in_between(folder, asynchronous):
    """Rank 1 wants to save while rank 0 is in the middle: what each raised."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    between = dist.new_group()
    model, optimizer = build(dist.get_rank())
    if dist.get_rank() == 1:
        dist.barrier(between)
        try:
            checkpoint.save(folder, model, optimizer, group=alone)
        except CheckpointError as error:
            return str(error)
        finally:
            dist.barrier(between)
        return None
    fsync, met = os.fsync, []

    def meet(descriptor):
        if not met:
            met.append(None)
            dist.barrier(between)
            dist.barrier(between)
        fsync(descriptor)

    os.fsync = meet
    if asynchronous:
        saving._background_group = lambda: alone
        checkpoint.async_save(folder, model, optimizer).result()
    else:
        checkpoint.save(folder, model, optimizer, group=alone)
    return None


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_a_save_in_the_middle_of_another_process_is_left_alone(ranks, tmp_path, asynchronous):
    first, second = ranks.run(2, save_in_between, tmp_path / "saved", asynchronous)
    assert first is None
    assert "Another process is saving" in second
    assert_holds(tmp_path / "saved", build(seed=0)[0])


def test_without_locks_a_save_notices_at_its_end_that_another_took_its_folder(tmp_path, monkeypatch, caplog):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    folder, other_name = tmp_path / "saved", tmp_path / "." / "x" / ".." / "saved"
    (tmp_path / "x").mkdir()
    with caplog.at_level(logging.WARNING, "offstage"), FolderClaim(folder, first=True) as first:
        first.check()
        with FolderClaim(other_name, first=True) as second:
            refused(first.check, "Another process is saving", str(folder))
            second.check()
        (folder / MARKER).unlink()
        refused(first.check, "Another process is saving")
    assert "has no locks" in caplog.text
    model, optimizer = build()
    checkpoint.save(tmp_path / "alone", model, optimizer)
    assert_holds(tmp_path / "alone", model)


def test_a_child_forked_in_the_middle_does_not_keep_the_folder(tmp_path):
    """Workers of a data loader are such children: they have copies of all descriptors."""
    reading, writing = os.pipe()
    with FolderClaim(tmp_path / "saved", first=True):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            os._exit(0)
    with FolderClaim(tmp_path / "saved", first=True) as again:
        again.check()
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


# The manifest and the data #


def without(folder, name):
    """Take one file out of the manifest, with its checksum made right."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["files"][name]
    content["crc32"] = manifest._own_sum({key: value for key, value in content.items() if key != "crc32"})
    (folder / MANIFEST).write_text(json.dumps(content))


def test_data_that_the_manifest_does_not_list_is_not_loaded(tmp_path):
    model, optimizer = build()
    checkpoint.save(tmp_path / "saved", model, optimizer)
    without(tmp_path / "saved", "__0_0.distcp")
    before = [param.detach().clone() for param in model.parameters()]
    for checksums in (True, False):
        refused(
            lambda checksums=checksums: checkpoint.load(tmp_path / "saved", model, optimizer, checksums=checksums),
            str(tmp_path / "saved" / MANIFEST),
            "no entry for '__0_0.distcp'",
        )
    assert all(map(torch.equal, model.parameters(), before))


# Relative paths #


def test_a_relative_path_is_that_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    model, optimizer = build()
    monkeypatch.chdir(tmp_path / "here")
    with held_back() as slow:
        under_way = checkpoint.async_save("saved", model, optimizer)
        assert slow.reached.wait(LONGEST_S)
        monkeypatch.chdir(tmp_path / "there")
        refused(lambda: checkpoint.save(tmp_path / "here" / "saved", model, optimizer), "under way")
        slow.finish(under_way)
    assert under_way.folder == tmp_path / "here" / "saved"
    assert list((tmp_path / "there").iterdir()) == []
    assert_holds(tmp_path / "here" / "saved", model)


# Threads #


@pytest.fixture
def four_threads(monkeypatch):
    for module in (saving, loading):
        monkeypatch.setattr(module, "file_threads", lambda: 4)


def starting(monkeypatch, how, *, after=0, name="offstage-files"):
    """Let `how(thread)` start threads of that name, after so many."""
    started = []

    def start(thread):
        if thread.name != name:
            return START(thread)
        if len(started) < after:
            started.append(thread)
            return START(thread)
        return how(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return started


def refuse(thread):
    raise RuntimeError("can't start new thread")


def interrupt_before(thread):
    signal.raise_signal(signal.SIGINT)
    START(thread)


def interrupt_within(thread):
    """The new thread exists, and may not have begun."""
    thread._started.wait = lambda: signal.raise_signal(signal.SIGINT)
    START(thread)


@BOTH
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_with_fewer_threads_than_wanted_everything_is_saved_and_loaded(
    action, limit, four_threads, monkeypatch, caplog, tmp_path
):
    model, optimizer = build()
    starting(monkeypatch, refuse, after=limit)
    _warn_of_limit.cache_clear()
    with caplog.at_level(logging.WARNING, "offstage"):
        action(tmp_path / "saved", model, optimizer)
        assert "not all of 4 threads could be started (can't start new thread)" in caplog.text
        assert len([path for path in (tmp_path / "saved").iterdir() if path.suffix == ".distcp"]) == 4
        assert_holds(tmp_path / "saved", model)


def test_without_a_thread_for_it_training_waits_for_the_save(monkeypatch, caplog, tmp_path):
    model, optimizer = build()
    starting(monkeypatch, refuse, name="offstage-save")
    with caplog.at_level(logging.WARNING, "offstage"):
        under_way = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    assert under_way.done()
    under_way.result()
    assert "training waits for this save: can't start new thread" in caplog.text
    assert_holds(tmp_path / "saved", model)


@pytest.mark.parametrize("how", [interrupt_before, interrupt_within])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_ctrl_c_while_writers_are_started(how, after, four_threads, monkeypatch, tmp_path):
    model, optimizer = build()
    checkpoint.save(tmp_path / "before", model, optimizer)
    with monkeypatch.context() as patch:
        started = starting(patch, how, after=after)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path / "saved", model, optimizer)
        assert not any(thread.is_alive() for thread in started)
    assert checkpoint.latest(tmp_path) == tmp_path / "before"
    checkpoint.save(tmp_path / "saved", model, optimizer)
    assert_holds(tmp_path / "saved", model)


def test_ctrl_c_while_an_asynchronous_save_is_started_comes_after_it(monkeypatch, tmp_path):
    model, optimizer = build()

    def interrupted(thread):
        signal.raise_signal(signal.SIGINT)
        START(thread)

    starting(monkeypatch, interrupted, name="offstage-save")
    with pytest.raises(KeyboardInterrupt):
        checkpoint.async_save(tmp_path / "saved", model, optimizer)
    for thread in threading.enumerate():
        if thread.name == "offstage-save":
            thread.join(LONGEST_S)
    assert_holds(tmp_path / "saved", model)


def test_ctrl_c_while_threads_are_waited_for(monkeypatch):
    """Threads are told to stop, and none works on when the interrupt arrives at the caller."""
    stopped, working = threading.Event(), threading.Barrier(2)
    ended = []

    def work(item):
        if working.wait(LONGEST_S) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(LONGEST_S)
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        in_threads(work, range(5), 2, stop=stopped.set)
    assert len(ended) == 2


# Disks #

FAULTS = ["mkdir", "listdir", "open", "fsync", "rename", "replace"]


def failing(patch, name, at, number):
    """Let call `at` of a function of the system fail; returns the list of calls."""
    real, calls = getattr(os, name), []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    patch.setattr(os, name, fail)
    return calls


@BOTH
@pytest.mark.parametrize("name", FAULTS)
def test_every_call_of_the_system_may_fail(action, name, monkeypatch, tmp_path):
    """One error that says so; what was saved before is as it was, and the same folder can be saved to afterwards."""
    model, optimizer = build()
    checkpoint.save(tmp_path / "before", model, optimizer)
    numbers = [errno.ENOSPC, errno.EIO, errno.EROFS]
    at, reached = 0, True
    while reached:
        at += 1
        folder = tmp_path / str(at) / "saved"  # alone in its folder: a save looks at those beside it
        number = numbers[at % len(numbers)]
        with monkeypatch.context() as patch:
            calls = failing(patch, name, at, number)
            try:
                action(folder, model, optimizer)
                raised = None
            except CheckpointError as error:
                raised = error
            reached = len(calls) >= at
        checkpoint.verify(tmp_path / "before")
        if raised is not None:
            assert os.strerror(number) in str(raised)
            assert str(folder) in str(raised)
            assert not checkpoint.is_complete(folder)
            action(folder, model, optimizer)
        checkpoint.verify(folder)


@BOTH
def test_a_file_that_may_not_grow_further(action, tmp_path):
    """A limit of the system itself."""
    model, optimizer = build()
    checkpoint.save(tmp_path / "before", model, optimizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as limited:
        limited.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        refused(lambda: action(tmp_path / "saved", model, optimizer), str(tmp_path / "saved"), os.strerror(errno.EFBIG))
    assert checkpoint.latest(tmp_path) == tmp_path / "before"
    action(tmp_path / "saved", model, optimizer)
    assert_holds(tmp_path / "saved", model)


@BOTH
def test_places_where_no_folder_can_be(action, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    model, optimizer = build()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere", "/dev/null/below"):
        refused(lambda folder=folder: action(folder, model, optimizer), str(folder))
    for folder in (3, "null\0byte"):
        refused(lambda folder=folder: action(folder, model, optimizer), "Expected the path of a folder")
