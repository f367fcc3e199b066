# SPDX-License-Identifier: Apache-2.0
"""Saves that are killed anywhere: the last complete checkpoint loads, the new one is known to be incomplete."""

import os
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn

import offstage
from offstage import checkpoint
from offstage.errors import CheckpointError
from tests.support.lives import end_step
from tests.support.ranks import RankError

KILLS = 20
SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB", "master_weights": "split"}


def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))).to(torch.bfloat16)
    return model, offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.01), model, **SMALL)


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(2, 300, generator=generator).to(torch.bfloat16)).float().pow(2).mean().backward()
    end_step(optimizer)


def go_on(root, kill_after=None, *, asynchronous=False):
    """Go on from the last complete checkpoint for one step and save; killed so many seconds into the save."""
    model, optimizer = build()
    found = checkpoint.latest(root)
    number = checkpoint.load(found, model, optimizer)["step"] + 1 if found is not None else 0
    step(model, optimizer, number)
    begun = time.perf_counter()
    if kill_after is not None:
        threading.Timer(kill_after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    saving = {"folder": root / f"step_{number:03}", "model": model, "optimizer": optimizer, "extra": {"step": number}}
    if asynchronous:
        checkpoint.async_save(**saving).result()
    else:
        checkpoint.save(**saving)
    took = time.perf_counter() - begun
    if kill_after is not None:
        time.sleep(10)  # killed before that, after a complete save
    return number, took


def uninterrupted(steps):
    model, optimizer = build()
    for number in range(steps):
        step(model, optimizer, number)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_killed_at_random_moments(ranks, tmp_path, asynchronous):
    """kill -9 anywhere in a save. The next process goes on from the last complete checkpoint, with the same bits."""
    dice = random.Random(asynchronous)
    _, took = ranks.run(1, go_on, tmp_path, asynchronous=asynchronous)[0]
    incomplete = 0
    for _ in range(KILLS // 2):
        before = checkpoint.latest(tmp_path)
        checkpoint.verify(before)
        number = int(before.name.removeprefix("step_")) + 1
        with pytest.raises(RankError, match="died"):
            ranks.run(1, go_on, tmp_path, dice.uniform(0, 1.2 * took), asynchronous=asynchronous)
        folder = tmp_path / f"step_{number:03}"
        after = checkpoint.latest(tmp_path)
        checkpoint.verify(after)
        if after == before:
            incomplete += 1
            model, optimizer = build()
            with pytest.raises(CheckpointError, match=r"incomplete|No such file"):
                checkpoint.load(folder, model, optimizer)
            checkpoint.load(before, model, optimizer)
        else:
            assert after == folder
    assert incomplete, "no kill hit the middle of a save: the moments are wrong"
    last, _ = ranks.run(1, go_on, tmp_path)[0]
    model, optimizer = build()
    checkpoint.load(checkpoint.latest(tmp_path), model, optimizer)
    assert all(map(torch.equal, model.parameters(), uninterrupted(last + 1)))


def kill_one_of_two(root, kill_after):
    model, optimizer = build()
    checkpoint.load(root / "first", model, optimizer)
    if int(os.environ["RANK"]) == 1:
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
