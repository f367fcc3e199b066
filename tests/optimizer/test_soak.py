# SPDX-License-Identifier: Apache-2.0
"""Long lives: 6,000 steps with changing settings, and 120 optimizers made and dropped, leave nothing behind."""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import offstage
from offstage import checkpoint
from offstage.optimizer.optimizer import runtime_of
from tests.support.threaded_lanes import wait_until
from tests.support.training import THREADED, lazily

STEPS, OPTIMIZERS = 6_000, 120
WARM_STEPS, WARM_OPTIMIZERS = 500, 60
WIDTH = 40
PAGE = os.sysconf("SC_PAGE_SIZE")
CUES: list[tuple[Any, dict[str, Any]]] = [
    (None, {}),
    (None, {"overlap_forward": True, "window": "all"}),
    (None, {"overlap_forward": True, "update_in_backward": True}),
    (THREADED, {"overlap_forward": True, "update_in_backward": True, "host_fraction": 0.5}),
]
"""Lanes, and settings that only a new optimizer changes."""
PLANS: list[dict[str, Any]] = [
    {"fraction": 1.0, "update_on": "host", "chunk_bytes": "16KiB", "threads": 1},
    {"fraction": 0.5, "update_on": "device", "slots": 1},
    {"fraction": 1.0, "host_fraction": 0.4, "slots": 3, "threads": 1},
    {"fraction": 0.3},
    {"fraction": 0.7, "update_on": "device", "chunk_bytes": "32KiB"},
]
MOST_GROWTH = {
    "objects": 40, "blocks": 400, "mappings": 16, "resident_bytes": 16 * 2**20, "descriptors": 0, "threads": 0
}  # fmt: skip
"""Far less than one for each of 200 changes of the plan, of 80 loads or of 120 optimizers. Blocks come and go with
Python's caches. Malloc has a heap for each of some threads, and what these hold depends on which thread ran when: over
1,000 optimizers resident memory grows by 0.2 MiB, over any 200 by up to 9."""


@dataclass(frozen=True)
class Held:
    """What this process holds now."""

    objects: int
    """That the garbage collector knows."""
    blocks: int
    """Of Python's allocator: numbers and texts, too."""
    mappings: int
    """Of memory: every arena is one."""
    resident_bytes: int
    descriptors: int
    threads: int
    """Of the operating system: Python's, numba's, torch's."""

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps for later depends on the tests before
        # Pages of libraries come and go with the memory that other processes take.
        resident, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        return cls(
            objects=len(gc.get_objects()),
            blocks=sys.getallocatedblocks(),
            mappings=len(Path("/proc/self/maps").read_text().splitlines()),
            resident_bytes=(resident - of_files) * PAGE,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
        )


def assert_no_growth(before: Held) -> None:
    assert wait_until(lambda: Held.now().threads <= before.threads)  # threads end a little after their owner
    growth = {name: value - asdict(before)[name] for name, value in asdict(Held.now()).items()}
    assert not {name: by for name, by in growth.items() if by > MOST_GROWTH[name]}, growth
    assert not gc.garbage


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """pytest keeps every record that is logged."""
    with mock.patch.object(logging.getLogger("offstage"), "disabled", True):
        yield


class Life:
    """A model, its optimizer, and what a long run does to them. What happens depends on the step's number alone."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.added: list[nn.Parameter] = []
        self.lanes, self.cues = CUES[number % len(CUES)]
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        with lazily(self.lanes):
            self.optimizer = offstage.offload(inner, self.model, min_bytes=0, chunk_bytes="16KiB", **self.cues)
        self.input = torch.randn(2, WIDTH)

    def loss(self) -> torch.Tensor:
        x = self.model(self.input)
        for param in self.added:
            x = x * param
        return x.pow(2).mean()

    def step(self, number: int) -> None:
        optimizer = self.optimizer
        if number in (10, 30):
            self.added.append(nn.Parameter(torch.randn(WIDTH)))
            self.model.register_parameter(f"added{number}", self.added[-1])
            optimizer.add_param_group({"params": self.added[-1:], "lr": 1e-2})
        if number % 5 == 4:
            with optimizer.accumulate():
                self.loss().backward()
        self.loss().backward()
        optimizer.clip_grad_norm_(1e-2 if number % 3 == 1 else 1e4)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 4 != 0)
        self.in_between(number)

    def in_between(self, number: int) -> None:
        optimizer = self.optimizer
        if number % 7 == 0:
            optimizer.param_groups[0].update(lr=1e-4 * (1 + number % 9), betas=(0.9, 0.9 + 0.01 * (number % 9)))
        if number % 20 == 11:
            with lazily(self.lanes):
                optimizer.replan(**PLANS[number // 20 % len(PLANS)])
        if number % 50 == 33:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number % 25 == 17:
            optimizer.receipt()
            optimizer.state[self.model[0].weight]["exp_avg"].mul_(0.5)
        if number % 25 == 19:
            optimizer.prefetch() if self.cues.get("window") else optimizer.synchronize()
            optimizer.evict()


def test_steps_leave_nothing_behind():
    lives = [Life(number) for number in range(len(CUES))]
    for number in range(WARM_STEPS):  # what happens repeats itself after as many steps
        for life in lives:
            life.step(number)
    before = Held.now()
    for number in range(WARM_STEPS, STEPS // len(lives)):
        for life in lives:
            life.step(number)
    assert_no_growth(before)
    assert all(runtime_of(life.optimizer).steps == STEPS // len(lives) for life in lives)


def short_life(number: int, folder: Path) -> None:
    """Made, trained, maybe saved, maybe closed, and dropped: its memory does not wait for the garbage collector."""
    life = Life(number)
    handle = offstage.offload_activations(life.model, min_bytes=0) if number % 3 == 0 else None
    for step in range(9, 13):  # a new group and another plan among them
        life.step(step)
    if number % 10 == 0:
        checkpoint.save(folder / f"{number}", life.model, life.optimizer)
    elif number % 10 == 5:
        checkpoint.async_save(folder / f"{number}", life.model, life.optimizer).wait()
    if number % 4 == 1:
        life.optimizer.close()
    if number % 6 == 0:
        assert handle is not None
        handle.remove()
    sets = [one for engine in runtime_of(life.optimizer).engines for one in engine.arenas.sets]
    gone = [weakref.ref(one) for one in (life.optimizer, *(a for one in sets for a in one.arenas.values()))]
    gc.disable()
    try:
        del life, sets, handle
        # A host thread may still be on its way from its last update to waiting.
        assert wait_until(lambda: all(ref() is None for ref in gone))
    finally:
        gc.enable()


def test_optimizers_leave_nothing_behind(tmp_path):
    Life(0)  # torch imports more with the process's first optimizer, and the import keeps its callers' frames alive
    for number in range(WARM_OPTIMIZERS):
        short_life(number, tmp_path)
    before = Held.now()
    for number in range(WARM_OPTIMIZERS, WARM_OPTIMIZERS + OPTIMIZERS):
        short_life(number, tmp_path)
    assert_no_growth(before)
    assert checkpoint.is_complete(tmp_path / "0")
