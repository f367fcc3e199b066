# SPDX-License-Identifier: Apache-2.0
"""Small runs, and what they leave: shared by the tests of the trainer."""

import json
import os
import signal
import threading
from pathlib import Path

import torch

from offstage.checkpoint.parts import Box
from offstage.checkpoint.stored import Stored
from offstage.train import loop
from offstage.train.config import build

README = str(Path(__file__).parents[2] / "README.md")
TINY = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64}
SMALL = {"chunk_bytes": "16KiB", "min_bytes": 0}
PLANS = {
    "off": {"fraction": 0.0},
    "streamed": SMALL,
    "half": {**SMALL, "fraction": 0.5},
    "forward": {**SMALL, "overlap_forward": True, "window": "48KiB"},
    "backward": {**SMALL, "overlap_forward": True, "update_in_backward": True},
    "window": {**SMALL, "window": "all"},
    "host": {**SMALL, "update_on": "host"},
    "some by the host": {**SMALL, "host_fraction": 0.4, "overlap_forward": True},
}


def values_of(folder, plan="streamed", **sections):
    """Settings of a run of some steps that takes a second; `sections` go over them."""
    values = {
        "model": dict(TINY),
        "data": {"paths": (README,), "sequence": 16, "batch": 2},
        "optimizer": {"warm_up": 3, "lr": 3e-3},
        "offload": dict(PLANS[plan]),
        "run": {
            "folder": str(folder),
            "steps": 12,
            "save_every": 0,
            "eval_every": 0,
            "observe_step": 0,
            "progress": "quiet",
        },
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return values


def train(folder, plan="streamed", **sections):
    return loop.run(build(values_of(folder, plan, **sections)))


def tensors_of(folder):
    """Everything in a checkpoint that is a tensor: weights and state."""
    found = {}
    with Stored(Path(folder)) as stored:
        for name, (shape, dtype) in stored.tensors.items():
            found[name] = torch.empty(shape, dtype=dtype)
            stored.read(name, Box((0,) * len(shape), shape), found[name])
    return {name: tensor for name, tensor in found.items() if not name.startswith("extra.")}


def differences(left, right):
    """The names of tensors whose bits differ, of two checkpoints."""
    left, right = tensors_of(left), tensors_of(right)
    assert left.keys() == right.keys()
    return [name for name in left if not _same_bits(left[name], right[name])]


def _same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def rows_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder):
    return [row["loss"] for row in rows_of(folder)]


def files_of(folder):
    """All files below `folder` with their content."""
    folder = Path(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# For ranks


def at_step(monkeypatch_of, step, action):
    """Let `action` happen when `step` has been queued and before anything else does."""
    original = monkeypatch_of.end

    def end(self, number, *args, **kwargs):
        found = original(self, number, *args, **kwargs)
        if number == step:
            action()
        return found

    monkeypatch_of.end = end


def train_and_be_killed(values, after, delay, who=0):
    """Train on from the last checkpoint; rank `who` is killed so many steps later, and a moment."""
    made = []

    def count():
        made.append(None)
        if len(made) == after and int(os.environ["RANK"]) == who:
            threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    for_every_step(count)
    return loop.run(build(values))


def train_and_be_told(values, step, number, who=0):
    """Rank `who` gets a signal at `step`."""

    def tell():
        if int(os.environ["RANK"]) == who:
            os.kill(os.getpid(), number)

    at_step(loop.Meter, step, tell)
    return loop.run(build(values))


def for_every_step(action):
    original = loop.Meter.end

    def end(self, *args, **kwargs):
        action()
        return original(self, *args, **kwargs)

    loop.Meter.end = end


def train_there(values):
    return loop.run(build(values))
