# SPDX-License-Identifier: Apache-2.0
"""kill -9 anywhere in a save, a load, a replan or a run: what was reported as saved is there, with the right bits.

A process is killed at a line of offstage or of `torch.distributed.checkpoint`, counted from the beginning of what is
tried: the seed decides which, not the speed of the machine. The next life goes on from the newest complete checkpoint,
on one rank or on two, so that each kind of kill finds what the others left.
"""

import contextlib
import hashlib
import itertools
import os
import random
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import offstage
from offstage import checkpoint
from offstage.errors import CheckpointError
from offstage.train import loop
from offstage.train.config import build as build_config
from tests.support.lives import end_step
from tests.support.ranks import RankError
from tests.support.trainer import PLANS, differences, train_there, values_of

PLACES = ("/offstage/", "/distributed/checkpoint/")
"""Files in which a process may be killed, the tests' own apart."""
KILLS = {  # what is tried: kills of one process, and of one of two ranks
    "save": (8, 6),
    "async_save": (8, 6),
    "load": (5, 4),
    "replan": (5, 4),
    "train": (8, 6),
}
SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}
FRACTIONS = (1.0, 0.5, 0.0)
GRACE_S = 0.3
"""What becomes of the other rank is tested elsewhere."""


def test_there_are_sixty_kills():
    assert sum(map(sum, KILLS.values())) == 60


# Dying


class Lines:
    """Counts lines from `with lines:` on, in this thread and in those started from it; kills at number `kill_at`."""

    def __init__(self, kill_at=None):
        self.passed = 0
        self._kill_at, self._numbers = kill_at, itertools.count(1)

    def __enter__(self):
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)
        threading.settrace(None)

    def _trace(self, frame, event, _):
        if event == "call":
            name = frame.f_code.co_filename
            return self._trace if any(place in name for place in PLACES) and "/tests/" not in name else None
        if event == "line":
            self.passed = next(self._numbers)
            if self.passed == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


def die_at(kill_at, who):
    """The lines of this rank, which is killed there if it is the one."""
    return Lines(kill_at if dist.get_rank() == who else None)


def report_saves(reports):
    """Whenever a save has ended well, write its name: at once, so that a kill cannot take it back."""

    def reporting(original, folder_of):
        def call(*args, **kwargs):
            result = original(*args, **kwargs)
            if dist.get_rank() == 0:
                reported = os.open(reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.write(reported, f"{folder_of(*args, **kwargs).name}\n".encode())
                os.close(reported)
            return result

        return call

    checkpoint.save = reporting(checkpoint.save, lambda folder, *_, **__: folder)
    checkpoint.AsyncSave.result = reporting(checkpoint.AsyncSave.result, lambda saving, *_: saving.folder)


def number_of(name):
    return int(name.rpartition("-")[2])


# One life


def build(fraction=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4)))
    if dist.is_initialized() and dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.01), model, fraction=fraction, **SMALL)


def step(model, optimizer, number):
    """The same on every rank, so that two ranks compute what one does."""
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(2, 48, generator=generator)).pow(2).mean().backward()
    end_step(optimizer)


def live(root, reports, what, kill_at=None, who=0, fraction=1.0):
    """Go on from the newest checkpoint for one step and save; killed in `what`, or after it. Returns its lines."""
    report_saves(reports)
    lines = die_at(kill_at, who)

    def trying(name):
        return lines if name == what else contextlib.nullcontext()

    model, optimizer = build(fraction)
    newest = dist_latest(root)
    number = 0
    if newest is not None:
        with trying("load"):
            number = checkpoint.load(newest, model, optimizer)["step"] + 1
    step(model, optimizer, number)
    saved = {"model": model, "optimizer": optimizer, "extra": {"step": number}}
    folder = root / f"step-{number:08}"
    if what in ("async_save", "replan"):
        with trying("async_save"):
            saving = checkpoint.async_save(folder, **saved)
            with trying("replan"):
                optimizer.replan(fraction=FRACTIONS[number % 3])
            step(model, optimizer, number + 1)
            saving.result()
    else:
        with trying("save"):
            checkpoint.save(folder, **saved)
    if kill_at is not None and dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    return lines.passed


def dist_latest(root):
    """The newest that rank 0 finds."""
    found = [checkpoint.latest(root)]
    dist.broadcast_object_list(found)
    return found[0]


def digest(model, optimizer):
    """Of all weights and all state, in order."""
    found = hashlib.sha256()
    for tensor in [
        *model.parameters(),
        *(value for one in optimizer.state.values() for _, value in sorted(one.items())),
    ]:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(steps):
    """After each step of a life that nothing interrupts."""
    model, optimizer = build()
    found = []
    for number in range(steps):
        step(model, optimizer, number)
        found.append(digest(model, optimizer))
    return found


def check(root, reports, expected):
    """The newest is sound, is as new as what was reported, and has the bits of its step. Returns its number."""
    newest = checkpoint.latest(root)
    reported = [number_of(name) for name in reports.read_text().split()]
    assert number_of(newest.name) >= max(reported)
    model, optimizer = build(0.0)
    assert checkpoint.load(newest, model, optimizer)["step"] == number_of(newest.name)
    assert digest(model, optimizer) == expected[number_of(newest.name)]
    for folder in root.iterdir():
        if not checkpoint.is_complete(folder):
            with pytest.raises(CheckpointError):
                checkpoint.load(folder, model, optimizer)
    return number_of(newest.name)


def test_killed_in_saves_loads_and_replans(ranks, tmp_path):
    dice = random.Random(18)
    root, reports = tmp_path / "saved", tmp_path / "reports"
    kinds = [what for what in KILLS if what != "train"]
    kills = [(what, size + 1) for what in kinds for size in range(2) for _ in range(KILLS[what][size])]
    dice.shuffle(kills)
    (expected,) = ranks.run(1, digests, len(kills) + 20)
    ranks.run(1, live, root, reports, "save")
    lengths = {one: ranks.run(one[1], live, root, reports, one[0])[0] for one in sorted(set(kills))}
    assert min(lengths.values()) > 20, lengths
    interrupted = dict.fromkeys(kinds, 0)
    newest = check(root, reports, expected)
    for what, size in kills:
        kill_at = dice.randint(1, int(1.1 * lengths[what, size]))
        who = dice.randrange(size)
        with pytest.raises(RankError, match=f"died: rank {who}"):
            ranks.run(size, live, root, reports, what, kill_at, who, dice.choice(FRACTIONS), grace=GRACE_S)
        before, newest = newest, check(root, reports, expected)
        assert newest in (before, before + 1)
        interrupted[what] += newest == before
    assert min(interrupted.values()) > 0, interrupted
    ranks.run(2, live, root, reports, "save")
    assert check(root, reports, expected) == newest + 1


# A run


def train_and_die(values, reports, kill_at=None, who=0):
    """Train on from the newest checkpoint; killed at a line. Returns the lines that it took."""
    report_saves(reports)
    lines = die_at(kill_at, who)
    run = loop.Training.run

    def counted(*args):
        with lines:
            return run(*args)

    loop.Training.run = counted
    loop.run(build_config(values))
    if kill_at is not None and dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    return lines.passed


@pytest.mark.parametrize("size", [1, 2])
def test_killed_in_a_run(ranks, tmp_path, size):
    """Steps, asynchronous saves after each, and old checkpoints that are removed, each time with another plan."""
    dice = random.Random(size)
    kills, steps = KILLS["train"][size - 1], 16
    plans = itertools.cycle(PLANS)
    root, reports = tmp_path / "killed" / "checkpoints", tmp_path / "reports"

    def values(folder, plan="off", **run):
        return values_of(folder, plan, run={"steps": steps, "save_every": 1, **run})

    ranks.run(size, train_there, values(tmp_path / "whole", keep_checkpoints=steps))
    for some in (4, 8):  # the second life loads what the first one saved, and makes as many steps
        few = values(tmp_path / "few", "streamed", steps=some)
        length = ranks.run(size, train_and_die, few, tmp_path / "others")[0]
    newest = 0
    for _ in range(kills):
        kill_at, who = dice.randint(1, length), dice.randrange(size)
        with pytest.raises(RankError, match=f"died: rank {who}"):
            ranks.run(
                size, train_and_die, values(tmp_path / "killed", next(plans)), reports, kill_at, who, grace=GRACE_S
            )
        found = checkpoint.latest(root)
        reported = [number_of(name) for name in reports.read_text().split()] if reports.exists() else []
        assert (number_of(found.name) if found else 0) >= max([newest, *reported])
        if found is not None:
            newest = number_of(found.name)
            checkpoint.verify(found)
            assert differences(found, tmp_path / "whole" / "checkpoints" / found.name) == []
    assert newest > 2, "hardly any life made a step"
    rest = values(tmp_path / "killed", next(plans))
    ended = ranks.run(size, train_there, rest)[0]
    assert differences(ended.checkpoint, tmp_path / "whole" / "checkpoints" / f"step-{steps:08}") == []


# One of two ranks, by the clock


def kill_one_of_two(root, kill_after):
    model, optimizer = build()
    checkpoint.load(root / "first", model, optimizer)
    if dist.get_rank() == 1:
        threading.Timer(kill_after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for number in range(1000):
        checkpoint.save(root / f"next_{number}", model, optimizer)


def save_first(root):
    checkpoint.save(root / "first", *build())


def test_one_of_two_ranks_is_killed(ranks, tmp_path):
    ranks.run(2, save_first, tmp_path)
    with pytest.raises(RankError, match="died: rank 1"):
        ranks.run(2, kill_one_of_two, tmp_path, 0.15)
    last = checkpoint.latest(tmp_path)
    checkpoint.verify(last)
    complete = {folder.name for folder in tmp_path.iterdir() if checkpoint.is_complete(folder)}
    assert len(complete) >= len(list(tmp_path.iterdir())) - 1  # at most the one that was under way
    for name in complete:
        checkpoint.verify(tmp_path / name)
    checkpoint.load(last, *build())
