# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one process: any plan to any other, saves beside training, and what must be refused.

Those of several processes are in `tests/distributed/test_checkpoints.py`.
"""

import contextlib
import copy
import errno
import functools
import gc
import io
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import offstage
from offstage import checkpoint
from offstage.checkpoint import catalogue, manifest, writer
from offstage.checkpoint.manifest import MARKER, METADATA
from offstage.checkpoint.stored import Stored
from offstage.config import format_size, parse_size
from offstage.engine.snapshot import Snapshot
from offstage.errors import CheckpointError, ConfigError, HostMemoryError, OffstageError, StepLostError
from offstage.memory.arena import Arena
from offstage.optimizer.optimizer import runtime_of
from offstage.rules import adamw
from tests.support.contract import CLASSES, SMALL, assert_same_tree, one_process_group, unchanged
from tests.support.contract import adamw as adamw_of
from tests.support.lives import end_step
from tests.support.refusals import refused
from tests.support.slow_writer import LONGEST_S, SlowWriter, held_back
from tests.support.threaded_lanes import wait_until
from tests.support.training import THREADED, lazily

RESIDENT = {"fraction": 0.0}


class Model(nn.Module):
    """Several chunks: odd sizes, a scalar, one without elements, one without a gradient, a frozen one, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(33, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.narrow = nn.Linear(24, 7)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.unused = nn.Parameter(torch.ones(129))
        self.register_buffer("offset", torch.full((3,), 0.5))

    def forward(self, tokens):
        x = self.frozen(self.embedding(tokens))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.narrow(x) * self.scale + self.offset[0]


def two_groups(params):
    """Or one, where there are only matrices."""
    matrices = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() <= 1]
    return [{"params": matrices}, *([{"params": others, "lr": 0.003}] if others else [])]


def build(config, *, dtype=torch.bfloat16, seed=0, make=adamw_of, model=Model, wanted=lambda param: True):
    torch.manual_seed(seed)
    built = model().to(dtype)
    inner = make(two_groups([param for param in built.parameters() if wanted(param)]))
    return built, offstage.offload(inner, built, **config)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randint(33, (4, 7), generator=generator)).float().pow(2).mean().backward()
        end_step(optimizer)


def built_after(steps, config, **arguments):
    model, optimizer = build(config, **arguments)
    train(model, optimizer, range(steps))
    return model, optimizer


def loaded_into(folder, config, **arguments):
    model, optimizer = build(config, **arguments)
    checkpoint.load(folder, model, optimizer)
    return model, optimizer


def save_both(folder, model, optimizer):
    checkpoint.save(folder / "saved", model, optimizer)
    checkpoint.async_save(folder / "async", model, optimizer).result(LONGEST_S)


def everything(model, optimizer):
    """Weights, buffers, state and options as they are now."""
    return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def load_as_state_dicts(saved, model, optimizer):
    """The same by torch's own interface: what a checkpoint must be equal to."""
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


# Any plan to any other

PLANS = {
    "streamed": {**SMALL, "master_weights": "fp32"},
    "split": {**SMALL, "master_weights": "split"},
    "half on the host": {**SMALL, "master_weights": "fp32", "host_fraction": 0.5},
    "all on the host, split": {**SMALL, "master_weights": "split", "update_on": "host"},
    "resident": {**RESIDENT, "master_weights": "split"},
    "half, in backward": {**SMALL, "master_weights": "fp32", "fraction": 0.5, "update_in_backward": True},
    "bf16 state": {**SMALL, "master_weights": "split", "state_dtype": {"exp_avg": "bfloat16"}},
    "no masters": {**SMALL, "master_weights": "none"},
    "torch": {**SMALL, "rule": "torch"},
}
FORMATS = {"bf16 state": "bf16", "no masters": "none"}
"""Plans whose state another plan cannot keep; the others all keep the same, and make the same of it but for one."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three steps under a plan, saved; and three more."""

    @functools.cache
    def make(plan):
        folder = tmp_path_factory.mktemp("saved") / "here"
        model, optimizer = built_after(3, PLANS[plan])
        at_save = everything(model, optimizer)
        checkpoint.save(folder, model, optimizer, extra={"step": 3})
        train(model, optimizer, range(3, 6))
        return folder, at_save, everything(model, optimizer)

    return make


CORE = ["split", "half on the host", "bf16 state"]
PAIRS = [*itertools.product(CORE, repeat=2), *itertools.pairwise([*PLANS, "streamed"])]


@pytest.mark.parametrize(("plan", "other"), sorted(set(PAIRS)))
def test_from_any_plan_to_any_other(saved, plan, other):
    folder, at_save, at_end = saved(plan)
    model, optimizer = build(PLANS[other], seed=1)
    if (list(PLANS).index(plan) + list(PLANS).index(other)) % 2:  # into a fresh one, and into one with other state
        train(model, optimizer, range(20, 22))
    groups = list(optimizer.param_groups)
    assert checkpoint.load(folder, model, optimizer) == {"step": 3}
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    expected_model, expected = build(PLANS[other], seed=2)
    load_as_state_dicts(at_save, expected_model, expected)
    assert_same_tree(everything(model, optimizer), everything(expected_model, expected))
    keeps_all = FORMATS.get(plan) == FORMATS.get(other)
    if keeps_all:
        assert_same_tree(everything(model, optimizer), at_save)
    train(model, optimizer, range(3, 6))
    if keeps_all and (plan == "torch") == (other == "torch"):
        assert_same_tree(everything(model, optimizer), at_end)
    else:
        train(expected_model, expected, range(3, 6))
        assert_same_tree(everything(model, optimizer), everything(expected_model, expected))


@pytest.mark.parametrize(
    ("plan", "other"),
    [("streamed", "split"), ("split", "half on the host"), ("half on the host", "streamed"), ("split", "split")],
)
def test_weights_that_someone_else_wrote_before_the_save(plan, other, tmp_path):
    model, optimizer = built_after(3, PLANS[plan])
    with torch.no_grad():
        model.layers[1].weight.mul_(1.5)
    at_save = everything(model, optimizer)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    loaded, expected = build(PLANS[other], seed=1), build(PLANS[other], seed=2)
    checkpoint.load(tmp_path / "saved", *loaded)
    load_as_state_dicts(at_save, *expected)
    assert_same_tree(everything(*loaded), everything(*expected))
    for one in (loaded, expected, (model, optimizer)):
        train(*one, range(3, 5))
    assert_same_tree(everything(*loaded), everything(*expected))
    assert_same_tree(everything(*loaded), everything(model, optimizer))


def test_masters_halfway_between_two_weights(tmp_path):
    """Where split masters keep a bit in the sign of `exp_avg_sq`, which no file shows."""
    model, optimizer = built_after(2, PLANS["split"])
    weight = model.layers[0].weight
    bits = weight.detach().float().view(torch.int32) & ~0xFFFF | 0x8000
    bits += torch.arange(bits.numel()).view_as(bits).int() % 2 << 16  # rounded up, and rounded down
    optimizer.state[weight]["master_weight"] = bits.view(torch.float32)
    with torch.no_grad():
        weight.copy_(bits.view(torch.float32))
    assert bool((runtime_of(optimizer).state_of(weight).raw("exp_avg_sq").signbit()).any())
    at_save = everything(model, optimizer)
    save_both(tmp_path, model, optimizer)
    train(model, optimizer, range(2, 4))
    for folder, plan in (("saved", "streamed"), ("async", "all on the host, split")):
        loaded = loaded_into(tmp_path / folder, PLANS[plan], seed=1)
        assert_same_tree(everything(*loaded), at_save)
        train(*loaded, range(2, 4))
        assert_same_tree(everything(*loaded), everything(model, optimizer))


ALL_CLASSES = {**CLASSES, "Muon": lambda params: torch.optim.Muon(params, lr=0.01)}
WANTED = {"Muon": lambda param: param.dim() == 2 and param.numel(), "Adafactor": lambda param: param.numel()}
"""Which parameters a class can have."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in ALL_CLASSES), *((name, "float32") for name in ("SGD", "Adafactor", "Muon"))],
)
def test_every_optimizer_class(name, dtype, tmp_path):
    options = {"make": ALL_CLASSES[name], "wanted": WANTED.get(name, lambda param: True)}
    options["dtype"] = getattr(torch, dtype)
    places = [{**SMALL, "fraction": 0.5}, {**SMALL, "update_on": "host"}, SMALL, RESIDENT]
    first = (list(ALL_CLASSES).index(name) + 2 * (dtype == "float32")) % 4
    plan, other = ({**places[number % 4], "rule": "torch"} for number in (first, first + 1))
    model, optimizer = built_after(3, plan, **options)
    at_save = everything(model, optimizer)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    train(model, optimizer, range(3, 6))
    loaded = loaded_into(tmp_path / "saved", other, **options, seed=1)
    assert_same_tree(everything(*loaded), at_save)
    train(*loaded, range(3, 6))
    assert_same_tree(everything(*loaded), everything(model, optimizer))


def with_amsgrad(optimizer, value=True):
    for group in optimizer.param_groups:
        group["amsgrad"] = value


@pytest.mark.parametrize("plan", ["half on the host", "resident"])
@pytest.mark.parametrize("switched", ["before", "after", "on and off"])
def test_amsgrad_switched_on_later(plan, switched, tmp_path):
    """Before the save: the one that loads has no room for it yet. After: it starts at zero in both."""
    model, optimizer = built_after(2, PLANS[plan])
    if switched != "after":
        with_amsgrad(optimizer)
        train(model, optimizer, range(2, 4))
    if switched == "on and off":
        with_amsgrad(optimizer, False)
        train(model, optimizer, range(4, 5))
    at_save = everything(model, optimizer)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    loaded, expected = build(PLANS[plan], seed=1), build(PLANS[plan], seed=1)
    checkpoint.load(tmp_path / "saved", *loaded)
    load_as_state_dicts(at_save, *expected)
    assert_same_tree(everything(*loaded), everything(*expected))
    if switched != "on and off":  # state that these options do not need is not loaded, as everywhere
        assert_same_tree(everything(*loaded), at_save)
    for one in (loaded, expected):
        with_amsgrad(one[1])
        train(*one, range(4, 7))
    assert_same_tree(everything(*loaded), everything(*expected))
    if switched != "on and off":
        with_amsgrad(optimizer)
        train(model, optimizer, range(4, 7))
        assert_same_tree(everything(*loaded), everything(model, optimizer))


def test_a_checkpoint_without_state_takes_state_away(tmp_path):
    """Saved before the first step; loaded into one that has trained, which then begins again."""
    model, optimizer = build(PLANS["split"])
    at_save = everything(model, optimizer)
    assert not at_save["optimizer"]["state"]
    save_both(tmp_path, model, optimizer)
    train(model, optimizer, range(3))
    for folder in ("saved", "async"):
        loaded = build(PLANS["half on the host"], seed=1)
        train(*loaded, range(2))
        checkpoint.load(tmp_path / folder, *loaded)
        assert_same_tree(everything(*loaded), at_save)
        train(*loaded, range(3))
        assert_same_tree(everything(*loaded), everything(model, optimizer))


def test_a_group_without_parameters_gets_its_options_back(tmp_path):
    model = Model()
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.7}]
    optimizer = offstage.offload(adamw_of(groups), model, **SMALL)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.1
    checkpoint.load(tmp_path / "saved", model, optimizer)
    assert optimizer.param_groups[1]["lr"] == 0.7


def test_the_model_alone(tmp_path):
    model, _ = build(RESIDENT)
    checkpoint.save(str(tmp_path / "a" / "b"), model)
    other, _ = build(RESIDENT, seed=1)
    assert checkpoint.load(str(tmp_path / "a" / "b"), other) == {}
    assert_same_tree(dict(other.state_dict()), dict(model.state_dict()))


def test_a_load_mends_a_lost_step(tmp_path):
    model, optimizer = built_after(2, PLANS["streamed"])
    checkpoint.save(tmp_path / "saved", model, optimizer)
    at_save = everything(model, optimizer)
    runtime_of(optimizer).lose("A test has lost this step.")
    for action in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(StepLostError):
            action(tmp_path / "lost", model, optimizer)
    assert not (tmp_path / "lost").exists()
    checkpoint.load(tmp_path / "saved", model, optimizer)
    assert_same_tree(everything(model, optimizer), at_save)
    train(model, optimizer, range(1))


@pytest.mark.parametrize("action", [checkpoint.save, checkpoint.async_save])
def test_nothing_is_saved_between_backward_and_step(action, tmp_path):
    model, optimizer = built_after(3, {**SMALL, "update_in_backward": True}, dtype=torch.float32)
    expected = build({**SMALL, "update_in_backward": True}, dtype=torch.float32)
    train(*expected, range(4))
    model(torch.randint(33, (4, 7), generator=torch.Generator().manual_seed(3))).float().pow(2).mean().backward()
    with pytest.raises(OffstageError, match="between backward and step"):
        action(tmp_path / "saved", model, optimizer)
    assert not (tmp_path / "saved").exists()
    optimizer.step()
    assert_same_tree(everything(model, optimizer), everything(*expected))


def test_split_masters_are_loaded_by_several_threads(saved, monkeypatch):
    """Two threads that come to a fresh rule at once: neither loses what the other has noted."""
    folder, at_save, _ = saved("split")
    both = threading.Barrier(2)

    def kernels_for(device, real=adamw._kernels_for):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # where only one comes at a time it goes on alone
        return real(device)

    monkeypatch.setattr("offstage.checkpoint.loading.file_threads", lambda: 2)
    monkeypatch.setattr(adamw, "_kernels_for", kernels_for)
    loaded = loaded_into(folder, PLANS["split"], seed=1)
    assert_same_tree(everything(*loaded), at_save)


# Saves beside training

LAYERS = 5


class Deep(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(40, 40, bias=False) for _ in range(LAYERS)))


def iterate(model, optimizer, steps, clip=None, between=None):
    """Losses of odd steps are a thousandth of the others: a norm of 0.01 is enough for those alone."""
    for step in steps:
        inputs = torch.randn(5, 40, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
        (model(inputs).float().pow(2).mean() * (0.001 if step % 2 else 1.0)).backward()
        end_step(optimizer, clip)
        if between is not None:
            between()


MASTERS = {**SMALL, "master_weights": "fp32"}
SPLIT = {**SMALL, "master_weights": "split"}
SETTINGS = {
    "streamed": MASTERS,
    "half on the host, split": {**SPLIT, "host_fraction": 0.5, "threads": 3},
    "half resident": {**SPLIT, "fraction": 0.5},
    "overlap_forward, host updates": {**MASTERS, "overlap_forward": True, "update_on": "host", "threads": 3},
    "overlap_forward, window": {**SPLIT, "overlap_forward": True, "window": "64KiB"},
    "in backward": {**SPLIT, "update_in_backward": True},
    "in backward, clipped": {**MASTERS, "update_in_backward": True},
    "everything, clipped": {
        **SPLIT,
        "update_in_backward": True,
        "overlap_forward": True,
        "window": "64KiB",
        "host_fraction": 0.3,
        "threads": 3,
    },
}
KINDS = [None, 0, 1, THREADED]


def clip_of(setting):
    return 0.01 if "clipped" in setting else None


def deep(config, kind=None, *, seed=0, dtype=torch.bfloat16):
    with lazily(kind):
        return build(config, model=Deep, seed=seed, dtype=dtype)


def deep_after(steps, config, kind=None, *, clip=None, **arguments):
    model, optimizer = deep(config, kind, **arguments)
    iterate(model, optimizer, range(steps), clip)
    return model, optimizer


@functools.cache
def plainly(clip, steps, dtype=torch.bfloat16):
    """What all settings must come to after so many steps: everything resident, nothing saved."""
    model, optimizer = deep({**RESIDENT, "master_weights": "fp32"}, dtype=dtype)
    iterate(model, optimizer, range(steps), clip)
    return everything(model, optimizer)


def loaded_from(folder, dtype=torch.bfloat16):
    model, optimizer = deep({**RESIDENT, "master_weights": "fp32"}, seed=3, dtype=dtype)
    checkpoint.load(folder, model, optimizer)
    return everything(model, optimizer)


@pytest.fixture
def slow():
    with held_back() as made:
        yield made


def state_bytes(optimizer):
    """Arenas, and what is resident."""
    host = {held.home for held in runtime_of(optimizer).all_states() if held.home is not None}
    resident = sum(tensor.nbytes for held in runtime_of(optimizer).all_states() for tensor in held.resident.values())
    return sum(arena.nbytes for one in host for arena in one.arenas.values()) + resident


def weight_bytes(model):
    """With room for each to begin at a multiple of 256 bytes; slabs are a quarter larger at most."""
    return sum(tensor.nbytes + 256 for tensor in model.state_dict().values()) * 5 // 4


@pytest.mark.parametrize(
    ("setting", "kind"),
    [(setting, kind) for n, setting in enumerate(SETTINGS) for kind in ([None, 1][n % 2], 0, THREADED)],
)
def test_training_goes_on_while_it_is_saved(setting, kind, slow, tmp_path):
    """The writer gets on a little in every step, or not at all until they are over."""
    clip = clip_of(setting)
    share = 3 * ((list(SETTINGS).index(setting) + KINDS.index(kind)) % 2)
    model, optimizer = deep_after(3, SETTINGS[setting], kind, clip=clip)
    hits = runtime_of(optimizer).speculation.hits
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    iterate(model, optimizer, range(3, 8), clip, between=lambda: slow.let(share))
    assert not saving.done()
    assert not checkpoint.is_complete(tmp_path / "saved")
    slow.finish(saving)
    assert saving.done()
    assert_same_tree(loaded_from(tmp_path / "saved"), plainly(clip, 3))
    iterate(model, optimizer, range(8, 9), clip)
    assert_same_tree(everything(model, optimizer), plainly(clip, 9))
    assert 0 < saving.extra_bytes <= state_bytes(optimizer) + weight_bytes(model) + 16 * 1024
    if clip is not None:  # the spare arenas were the state, and were overwritten
        assert runtime_of(optimizer).speculation.hits > hits
        assert runtime_of(optimizer).speculation.misses


@pytest.mark.parametrize("kind", [0, THREADED])
@pytest.mark.parametrize("setting", ["streamed", "half on the host, split"])
def test_extra_bytes_are_those_of_what_was_overwritten(setting, kind, slow, tmp_path):
    """A save that ends before anything is overwritten copies the weights alone; one that is still under way when a part
    of the state is copies that part."""
    clip = clip_of(setting)
    model, optimizer = deep_after(2, SETTINGS[setting], kind, clip=clip)
    quick = checkpoint.async_save(tmp_path / "quick", model, optimizer)
    slow.finish(quick)
    iterate(model, optimizer, range(2, 3), clip)
    assert 0 < quick.extra_bytes <= weight_bytes(model) + 8 * 1024
    again = SlowWriter()
    with mock.patch.object(writer, "_blocks", again.blocks):
        again.real = slow.real  # not the first one's
        saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
        model.requires_grad_(False)[-1].requires_grad_(True)
        iterate(model, optimizer, range(3, 5), clip)
        again.finish(saving)
    assert quick.extra_bytes < saving.extra_bytes < weight_bytes(model) + 0.75 * state_bytes(optimizer)
    assert_same_tree(loaded_from(tmp_path / "saved"), plainly(clip, 3))


def test_a_save_ends_though_no_lane_makes_its_copies(tmp_path, slow):
    """Lanes that run nothing until it is waited for: the writer makes the copies that a step has asked for itself."""
    model, optimizer = deep_after(3, MASTERS, 0)
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    iterate(model, optimizer, [3])
    slow.open()
    assert wait_until(saving.done)
    assert_same_tree(loaded_from(tmp_path / "saved"), plainly(None, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_is_overtaken_is_read_again(kind):
    """An update overwrites the chunk when the writer has read half of it."""
    with lazily(kind):
        model, optimizer = deep(MASTERS)
    iterate(model, optimizer, range(1))
    optimizer.synchronize()
    (snapshot,) = runtime_of(optimizer).take_snapshots().values()
    (engine,) = runtime_of(optimizer).engines
    chunk = snapshot.layout.chunks[0]
    start, stop = chunk.ranges["exp_avg"]
    arena = snapshot.arenas["exp_avg"].flat
    before = arena[start:stop].clone()
    half, over = threading.Event(), threading.Event()

    class Target:
        """Reads half, and then the rest when the chunk has been overwritten."""

        found = torch.zeros(stop - start)

        def copy_(self, source):
            middle = len(source) // 2
            self.found[:middle].copy_(source[:middle])
            half.set()
            assert over.wait(LONGEST_S)
            self.found[middle:].copy_(source[middle:])

    reader = threading.Thread(target=snapshot._read, args=(chunk, "exp_avg", start, stop, Target()))
    reader.start()
    assert half.wait(LONGEST_S)
    mark = snapshot.preserve(chunk.number, engine.transport.lanes)
    if mark is not None:
        engine.transport.lanes.wait_on_host(mark, "test: the chunk is copied")
    arena[start:stop].fill_(7.0)
    over.set()
    reader.join(LONGEST_S)
    assert not reader.is_alive()
    assert torch.equal(Target.found, before)
    snapshot.close()


@pytest.mark.parametrize("kind", [0, THREADED])
@pytest.mark.parametrize("setting", ["half on the host, split", "in backward, clipped"])
def test_two_saves_in_a_row(setting, kind, slow, monkeypatch, tmp_path):
    """The second one waits for the first; each has the state of its own moment."""
    clip = clip_of(setting)
    model, optimizer = deep_after(3, SETTINGS[setting], kind, clip=clip)
    first = checkpoint.async_save(tmp_path / "first", model, optimizer)
    iterate(model, optimizer, range(3, 5), clip)
    waited = let_go_on_when_waited_for(slow, monkeypatch)
    second = checkpoint.async_save(tmp_path / "second", model, optimizer)
    assert waited.is_set()
    iterate(model, optimizer, range(5, 8), clip)
    second.result(LONGEST_S)
    first.result(LONGEST_S)
    assert_same_tree(loaded_from(tmp_path / "first"), plainly(clip, 3))
    assert_same_tree(loaded_from(tmp_path / "second"), plainly(clip, 5))
    assert_same_tree(everything(model, optimizer), plainly(clip, 8))
    assert checkpoint.latest(tmp_path) == tmp_path / "second"


def let_go_on_when_waited_for(slow, monkeypatch):
    """The writer stands still until a caller waits for it; the event says that one did."""
    waited = threading.Event()

    def watched(real):
        def wait(*arguments):
            waited.set()
            slow.open()
            real(*arguments)

        return wait

    for waited_for in (Snapshot, checkpoint.AsyncSave):
        monkeypatch.setattr(waited_for, "wait", watched(waited_for.wait))
    return waited


def load_another_state_dict(model, optimizer, folder):
    load_as_state_dicts(plainly(None, 1), model, optimizer)


def load_another_checkpoint(model, optimizer, folder):
    checkpoint.load(folder / "other", model, optimizer)


def assign_state(model, optimizer, folder):
    param = model[2].weight
    optimizer.state[param] = {key: torch.zeros_like(value) for key, value in optimizer.state[param].items()}


def add_parameters(model, optimizer, folder):
    torch.manual_seed(9)
    model.append(nn.Linear(40, 40, bias=False).to(torch.bfloat16))
    optimizer.add_param_group({"params": list(model[-1].parameters())})


LOADS = {"load_another_state_dict": load_another_state_dict, "load_another_checkpoint": load_another_checkpoint}
WAITS = {
    **LOADS,
    "assign_state": assign_state,
    "assign_one_value": lambda model, optimizer, _: optimizer.state[model[2].weight].update(
        exp_avg=torch.zeros(40, 40)
    ),
    "delete_state": lambda model, optimizer, _: optimizer.state.__delitem__(model[2].weight),
    "replace_all_state": lambda _, optimizer, __: setattr(optimizer, "state", {}),
}
ACTIONS = {
    **WAITS,
    "replan": lambda _, optimizer, __: optimizer.replan(fraction=0.5, chunk_bytes="64KiB"),
    "replan_to_the_host": lambda _, optimizer, __: optimizer.replan(update_on="host"),
    "switch_amsgrad_on": lambda _, optimizer, __: with_amsgrad(optimizer),
    "add_parameters": add_parameters,
}


@pytest.mark.parametrize("kind", [0, THREADED])
@pytest.mark.parametrize("action", ACTIONS)
def test_state_is_changed_from_outside_while_it_is_saved(action, kind, slow, monkeypatch, tmp_path):
    """What overwrites state waits until it has been read; what lays it out anew need not."""
    settings = ["streamed", "half on the host, split", "in backward, clipped"]
    setting = settings[(list(ACTIONS).index(action) + (kind == THREADED)) % 3]
    clip = clip_of(setting)
    config = {**SETTINGS[setting], "master_weights": "fp32"}
    if action == "load_another_checkpoint":
        with mock.patch.object(writer, "_blocks", slow.real):
            other = deep(MASTERS)
            iterate(*other, range(1))
            checkpoint.save(tmp_path / "other", *other)
    results = []
    for save in (False, True):
        model, optimizer = deep_after(3, config, kind, clip=clip)
        if save:
            saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
            waited = let_go_on_when_waited_for(slow, monkeypatch)
        if action not in WAITS:  # these find copies under way; the others must not overwrite what is not copied yet
            iterate(model, optimizer, range(3, 5), clip)
        ACTIONS[action](model, optimizer, tmp_path)
        if action in LOADS:
            assert_same_tree(everything(model, optimizer), plainly(None, 1))
        iterate(model, optimizer, range(5, 8), clip)
        results.append(everything(model, optimizer))
    assert waited.is_set() == (action in WAITS)
    slow.finish(saving)
    assert_same_tree(results[0], results[1])
    assert_same_tree(loaded_from(tmp_path / "saved"), plainly(clip, 3))


@pytest.mark.parametrize("kind", [None, 0, THREADED])
def test_the_optimizer_is_closed_while_it_is_saved(kind, slow, tmp_path):
    model, optimizer = deep_after(3, SETTINGS["half on the host, split"], kind)
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    iterate(model, optimizer, range(3, 5))
    optimizer.close()
    del model, optimizer
    slow.finish(saving)
    assert_same_tree(loaded_from(tmp_path / "saved"), plainly(None, 3))


def test_an_optimizer_that_was_closed_is_saved_at_once_only(tmp_path):
    model, optimizer = deep_after(3, MASTERS)
    optimizer.close()
    with pytest.raises(ConfigError, match=r"async_save\(\) expects an open optimizer.*closed.*Use save\(\)"):
        checkpoint.async_save(tmp_path / "later", model, optimizer)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    assert_same_tree(loaded_from(tmp_path / "saved"), plainly(None, 3))


def test_a_save_is_waited_for_with_a_timeout(slow, tmp_path):
    model, optimizer = deep(MASTERS)
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    with pytest.raises(TimeoutError, match=r"saved is not over after 0.0 s"):
        saving.result(0.0)
    slow.finish(saving)
    saving.result()


def test_options_and_extra_are_those_at_the_call(slow, tmp_path):
    """A schedule that fills a tensor lr in place, a list that grows, tensors in it and beside it."""
    model, optimizer = deep(SPLIT)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    extra = {"losses": [1.0], "nested": {"averages": [torch.ones(3)], "mean": torch.ones(3)}}
    expected = copy.deepcopy(extra)
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer, extra=extra)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    extra["losses"].append(2.0)
    extra["nested"]["averages"][0].zero_()
    extra["nested"]["mean"].zero_()
    slow.finish(saving)
    loaded = deep(SPLIT, seed=1)
    assert_same_tree(checkpoint.load(tmp_path / "saved", *loaded), expected)
    assert float(loaded[1].param_groups[0]["lr"]) == 0.5
    assert loaded[1].param_groups[0]["betas"] == (0.9, 0.999)


class Full(io.FileIO):
    """A disk with room for a few tensors more."""

    room = 50_000

    def write(self, data):
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.fixture
def full_disk(monkeypatch):
    """`full_disk()` fills it; called with False it has room again."""

    def fill(full=True):
        monkeypatch.setattr(writer, "open", lambda path, mode: (Full if full else io.FileIO)(path, "w"), raising=False)

    fill()
    return fill


@pytest.mark.parametrize("kind", [0, THREADED])
@pytest.mark.parametrize("setting", ["half on the host, split", "in backward, clipped"])
def test_a_writer_that_fails_lets_go_of_everything(setting, kind, slow, full_disk, monkeypatch, caplog, tmp_path):
    clip = clip_of(setting)
    model, optimizer = deep_after(3, SETTINGS[setting], kind, clip=clip)
    arenas = recorded_arenas(monkeypatch)
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    iterate(model, optimizer, range(3, 5), clip, between=lambda: slow.let(4))
    slow.open()
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"saved: .*could not be written.*No space left.*incomplete"
        ) as raised:
            saving.result(LONGEST_S)
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.__cause__.errno == errno.ENOSPC
    assert saving.done()
    assert "No space left" in caplog.text
    assert not checkpoint.is_complete(tmp_path / "saved")
    taken = saving.extra_bytes
    assert taken <= state_bytes(optimizer) + weight_bytes(model) + 16 * 1024
    iterate(model, optimizer, range(5, 7), clip)
    assert saving.extra_bytes == taken
    join_savers()
    gc.collect()
    assert not [one for one in arenas if one() is not None]
    soon(lambda: optimizer.load_state_dict(optimizer.state_dict()))  # which waits for no save
    full_disk(False)
    soon(lambda: checkpoint.async_save(tmp_path / "saved", model, optimizer).result(LONGEST_S))
    assert_same_tree(loaded_from(tmp_path / "saved"), plainly(clip, 7))
    assert_same_tree(everything(model, optimizer), plainly(clip, 7))


def soon(action):
    """`action`, which must not wait for ever; whatever it raises is raised by what follows."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(LONGEST_S)
    assert not thread.is_alive(), "it hangs"


def recorded_arenas(monkeypatch):
    """Weak references to the memory that saves take for weights."""
    made = []

    class Recorded(Arena):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            made.append(weakref.ref(self))

    monkeypatch.setattr(catalogue, "Arena", Recorded)
    return made


@pytest.mark.parametrize("plan", ["streamed", "half resident"])
def test_the_memory_of_a_save_that_is_over_is_given_back(plan, slow, monkeypatch, tmp_path):
    """Though loops keep what async_save() returned until the next one."""
    model, optimizer = deep_after(2, SETTINGS[plan])
    arenas, chunks = recorded_arenas(monkeypatch), []

    def preserve(snapshot, number, lanes, real=Snapshot.preserve):
        mark = real(snapshot, number, lanes)
        if number in snapshot._units:
            chunks.extend(weakref.ref(copied) for copied in snapshot._units[number].copies.values())
        return mark

    monkeypatch.setattr(Snapshot, "preserve", preserve)
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    iterate(model, optimizer, range(2, 4))
    slow.finish(saving)
    join_savers()
    gc.collect()
    assert arenas
    assert chunks
    assert not [one for one in (*arenas, *chunks) if one() is not None]
    assert saving.extra_bytes > 0


def join_savers():
    """A save is over a moment before its thread is."""
    for thread in threading.enumerate():
        if thread.name == "offstage-save":
            thread.join(LONGEST_S)


def with_frozen_rest():
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(400, 400).requires_grad_(False))
    model.register_buffer("table", torch.zeros(100_000))
    return model


HUNGRY = {
    "streamed": (Deep, SMALL, {}),
    "on the host": (Deep, {**SMALL, "update_on": "host"}, {}),
    "half resident": (Deep, {**SMALL, "fraction": 0.5}, {}),
    "all resident": (Deep, RESIDENT, {}),
    "frozen weights and buffers": (with_frozen_rest, SMALL, {}),
    "a large extra": (Deep, SMALL, {"average": torch.zeros(500_000)}),
}


def host_bytes(optimizer):
    return sum(engine.transport.host_bytes for engine in runtime_of(optimizer).engines)


@pytest.mark.parametrize("case", HUNGRY)
def test_host_budget_refuses_a_save_before_anything_moves(case, slow, tmp_path):
    """All that it copies counts, and a budget with room for it is enough."""
    make, config, extra = HUNGRY[case]

    def built(budget=None):
        model, optimizer = build({**config, "host_budget": budget}, model=make, dtype=torch.float32)
        step_once(model, optimizer, 0)
        return model, optimizer

    model, optimizer = built()
    saving = checkpoint.async_save(tmp_path / "measured", model, optimizer, extra=extra)
    step_once(model, optimizer, 1)  # everything is overwritten
    slow.finish(saving)
    need = host_bytes(optimizer) + saving.extra_bytes

    model, optimizer = built(need * 3 // 4)
    before = everything(model, optimizer)
    error = refused(
        HostMemoryError,
        lambda: checkpoint.async_save(tmp_path / "saved", model, optimizer, extra=extra),
        "host_budget",
        format_size(need * 3 // 4),
    )
    assert isinstance(error, MemoryError)
    assert not (tmp_path / "saved").exists()
    assert_same_tree(everything(model, optimizer), before)
    step_once(model, optimizer, 1)
    checkpoint.save(tmp_path / "saved", model, optimizer, extra=extra)  # which takes no memory
    # What the message names is enough.
    named = [parse_size(size, "size") for size in re.findall(r"[\d.]+ (?:B|KiB|MiB)", str(error))]
    model, optimizer = built(max(named) * 101 // 100 + 1024)
    saving = checkpoint.async_save(tmp_path / "enough", model, optimizer, extra=extra)
    step_once(model, optimizer, 1)
    saving.result(LONGEST_S)
    assert host_bytes(optimizer) + saving.extra_bytes <= int(optimizer.config.host_budget)


def step_once(model, optimizer, step):
    """A step with gradients that need no forward."""
    for number, param in enumerate(model.parameters()):
        if param.requires_grad:
            generator = torch.Generator().manual_seed(100 * step + number)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    end_step(optimizer)


@pytest.mark.parametrize("second", [checkpoint.save, checkpoint.async_save])
def test_a_folder_that_is_being_written_is_left_alone(second, slow, monkeypatch, tmp_path):
    """It looks like that of a save that was interrupted."""
    model, optimizer = deep_after(3, {**RESIDENT, "master_weights": "fp32"})
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    assert slow.reached.wait(LONGEST_S)
    iterate(model, optimizer, range(3, 4))
    if second is checkpoint.async_save:  # which waits for the first one
        let_go_on_when_waited_for(slow, monkeypatch)
    refused(CheckpointError, lambda: second(tmp_path / "saved", model, optimizer), str(tmp_path / "saved"))
    slow.finish(saving)
    assert_same_tree(loaded_from(tmp_path / "saved"), plainly(None, 3))


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_is_over_does_not_keep_the_optimizer(fails, request, caplog, tmp_path):
    """Nor the model, nor their memory."""
    if fails:
        request.getfixturevalue("full_disk")
    model, optimizer = deep_after(2, MASTERS)
    kept = [weakref.ref(one) for one in (model, optimizer, model[0].weight)]
    kept += [weakref.ref(arena) for held in runtime_of(optimizer).all_states() for arena in held.home.arenas.values()]
    saving = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    with contextlib.suppress(CheckpointError):
        saving.result(LONGEST_S)
    caplog.clear()
    del model, optimizer
    join_savers()
    gc.collect()
    assert not [one for one in kept if one() is not None]
    assert saving.done()


# What is refused, with nothing changed


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A checkpoint of `Model` under "split"."""
    folder = tmp_path_factory.mktemp("complete") / "here"
    model, optimizer = built_after(2, PLANS["split"])
    checkpoint.save(folder, model, optimizer, extra={"step": 2})
    return folder


@pytest.fixture
def copied(complete, tmp_path):
    """A copy of it, to damage."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for file in complete.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def trained(config=PLANS["streamed"], **arguments):
    model, optimizer = build(config, seed=5, **arguments)
    train(model, optimizer, range(30, 31))
    return model, optimizer


def refused_load(folder, model, optimizer, *fragments, error=CheckpointError, **arguments):
    """One clear error, nothing changed, and training goes on."""
    with unchanged(model, optimizer):
        raised = refused(error, lambda: checkpoint.load(folder, model, optimizer, **arguments), *fragments)
    runtime_of(optimizer).check_not_lost()
    return raised


def refused_save(folder, model, optimizer, *fragments, error=CheckpointError, **arguments):
    """By both, with the folder as it was."""
    before = content_of(folder)
    for action in (checkpoint.save, checkpoint.async_save):
        with unchanged(model, optimizer):
            refused(error, functools.partial(action, folder, model, optimizer, **arguments), *fragments)
        assert content_of(folder) == before  # nothing where there was nothing
    runtime_of(optimizer).check_not_lost()


def content_of(folder):
    if folder.is_file():
        return folder.read_bytes()
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} if folder.exists() else None


def test_a_complete_checkpoint_is_not_overwritten(copied):
    refused_save(copied, *trained(), str(copied), "holds a checkpoint", "another name")


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    """Whatever it is called."""
    for number, name in enumerate(["thesis.txt", "thesis.tmp", "data.distcp", "inner"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).mkdir() if name == "inner" else (folder / name).write_text("years of work")
        refused_save(folder, *trained(), str(folder), name, "another name")
        assert (folder / name).exists()


def test_a_checkpoint_of_torch_itself_is_not_overwritten(tmp_path, recwarn):
    model, optimizer = trained()
    dcp.save({"model": dict(model.state_dict())}, checkpoint_id=tmp_path / "stock", no_dist=True)
    refused_save(tmp_path / "stock", model, optimizer, str(tmp_path / "stock"), "another name")


@pytest.mark.parametrize("change", ["a newer version", "a flipped bit"])
def test_a_checkpoint_whose_manifest_cannot_be_read_is_not_overwritten(change, copied):
    path = copied / manifest.MANIFEST
    if change == "a newer version":
        content = json.loads(path.read_text())
        content["version"] = manifest.VERSION + 1
        content["crc32"] = manifest._own_sum(content)
        path.write_text(json.dumps(content))
    else:
        flip(path, 40)
    refused_save(copied, *trained(), str(copied), "another name")
    refused_load(copied, *trained(), manifest.MANIFEST)


def test_what_an_interrupted_save_has_left_is_swept_away(tmp_path, full_disk):
    model, optimizer = trained()
    refused(CheckpointError, lambda: checkpoint.save(tmp_path / "saved", model, optimizer), "No space left")
    left = set(tmp_path.joinpath("saved").iterdir())
    assert (tmp_path / "saved" / MARKER) in left
    full_disk(False)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    loaded = loaded_into(tmp_path / "saved", PLANS["split"], seed=1)
    assert_same_tree(everything(*loaded), everything(model, optimizer))


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        refused_save(folder, *trained(), str(folder))
        refused_load(folder, *trained(), str(folder))


def test_a_disk_that_is_full(tmp_path, full_disk):
    model, optimizer = trained()
    with unchanged(model, optimizer):
        error = refused(
            CheckpointError,
            lambda: checkpoint.save(tmp_path / "saved", model, optimizer),
            str(tmp_path / "saved"),
            "No space left on device",
            "save again",
        )
    assert error.__cause__.errno == errno.ENOSPC
    refused_load(tmp_path / "saved", model, optimizer, "incomplete")


@pytest.mark.parametrize("action", [checkpoint.save, checkpoint.async_save])
@pytest.mark.parametrize("file", [METADATA, manifest.MANIFEST])
def test_a_disk_that_is_full_at_the_very_end(file, action, tmp_path, monkeypatch):
    """When the data is there and only the small files are missing."""
    model, optimizer = trained()

    def fsync(descriptor, real=os.fsync):
        if file in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    save = functools.partial(saved_to_the_end, action, tmp_path / "saved", model, optimizer)
    with unchanged(model, optimizer):
        error = refused(CheckpointError, save, str(tmp_path / "saved"), "No space left on device", "save again")
    assert error.__cause__.errno == errno.ENOSPC
    assert not checkpoint.is_complete(tmp_path / "saved")
    assert checkpoint.latest(tmp_path) is None


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1
    path.write_bytes(content)


def test_an_incomplete_checkpoint(copied):
    (copied / manifest.MANIFEST).unlink()
    refused_load(copied, *trained(), str(copied), manifest.MANIFEST, "incomplete")


def test_a_folder_that_is_not_there(tmp_path):
    refused_load(tmp_path / "nowhere", *trained(), str(tmp_path / "nowhere"))


def damages(folder):
    for file in sorted(path.name for path in folder.iterdir()):
        size = (folder / file).stat().st_size
        yield file, "missing", lambda path: path.unlink()
        if size:
            yield file, "truncated", lambda path, size=size: os.truncate(path, size - 2)
            for position in (0, size // 2, size - 2):
                yield file, "flipped", functools.partial(flip, position=position)
        if file != MARKER:
            yield file, "emptied", lambda path: os.truncate(path, 0)


def test_damaged_files(copied):
    model, optimizer = trained()
    count = 0
    for file, _, damage in list(damages(copied)):
        before = (copied / file).read_bytes()
        damage(copied / file)
        refused_load(copied, model, optimizer, file)
        (copied / file).write_bytes(before)
        count += 1
    assert count > 15
    checkpoint.load(copied, model, optimizer)


def of_other_shape():
    model = Model()
    model.layers[1] = nn.Linear(24, 25)
    return model


def of_fewer_layers():
    model = Model()
    del model.layers[1]
    return model


def of_more_layers():
    model = Model()
    model.layers.append(nn.Linear(24, 24))
    return model


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (of_other_shape, ["'layers.1.weight'", "(25, 24)", "(24, 24)"]),
        (of_more_layers, ["'layers.2.weight'", "found nothing"]),
    ],
)
def test_another_model(make, fragments, complete):
    model, optimizer = build(PLANS["streamed"], model=make)
    refused_load(complete, model, optimizer, str(complete), *fragments)


def test_parts_of_a_checkpoint_that_the_model_does_not_have_are_not_loaded(complete):
    model, optimizer = build(PLANS["streamed"], model=of_fewer_layers)
    whole = build(PLANS["streamed"], seed=1)
    for one in ((model, optimizer), whole):
        checkpoint.load(complete, *one)
    for name, param in model.named_parameters():
        there = whole[0].get_parameter(name)
        assert torch.equal(param, there)
        assert_same_tree(dict(optimizer.state[param]), dict(whole[1].state[there]))


def test_another_dtype(complete):
    model, optimizer = trained(SMALL, dtype=torch.float32)
    refused_load(complete, model, optimizer, "'scale'", "torch.float32", "torch.bfloat16")


def test_a_checkpoint_without_an_optimizer(tmp_path):
    model, optimizer = trained()
    checkpoint.save(tmp_path / "saved", model)
    refused_load(tmp_path / "saved", model, optimizer, str(tmp_path / "saved"), "optimizer")


def test_a_plain_optimizer(complete, tmp_path):
    model = Model().to(torch.bfloat16)
    optimizer = adamw_of(model.parameters())
    for action in (checkpoint.save, checkpoint.async_save, checkpoint.load):
        folder = complete if action is checkpoint.load else tmp_path / "saved"
        with unchanged(model, optimizer):
            refused(ConfigError, functools.partial(action, folder, model, optimizer), "AdamW", "offload()")
    assert not (tmp_path / "saved").exists()


def test_parameters_that_are_not_in_the_model(complete, tmp_path):
    model, optimizer = trained()
    for one in (model.layers, Model().to(torch.bfloat16)):
        refused_save(tmp_path / "saved", one, optimizer, "Parameter '", "not in the model", error=ConfigError)
    other = Model().to(torch.bfloat16)
    before = copy.deepcopy(dict(other.state_dict()))
    refused_load(complete, other, optimizer, "Parameter '", "not in the model", error=ConfigError)
    assert_same_tree(dict(other.state_dict()), before)
    train(model, optimizer, range(2))


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_the_state_of_another_class(name, complete):
    model, optimizer = trained(make=ALL_CLASSES[name])
    refused_load(complete, model, optimizer, "group 0 lacks", "same optimizer class")


@pytest.mark.parametrize(
    ("name", "message"), [("SGD", "group 0 lacks"), ("Adamax", "'embedding.weight'")], ids=["options", "state"]
)
def test_state_of_another_class_for_adam(name, message, tmp_path):
    model, optimizer = trained(make=ALL_CLASSES[name])
    checkpoint.save(tmp_path / "saved", model, optimizer)
    refused_load(tmp_path / "saved", *trained(), message, "same optimizer class")


def test_groups_with_other_parameters(complete):
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    optimizer = offstage.offload(adamw_of(model.parameters()), model, **SMALL)
    refused_load(complete, model, optimizer, "group 0", "different options")


def test_groups_with_nearly_the_same_options(tmp_path):
    """A learning rate in a tensor is shown with four digits, and has more."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    rates = [torch.tensor(rate, dtype=torch.float64) for rate in (1.00001e-3, 1.00002e-3)]
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(model, rates, strict=True)]
    optimizer = offstage.offload(torch.optim.AdamW(groups), model, **SMALL)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    one = offstage.offload(torch.optim.AdamW(model.parameters(), lr=rates[0]), model, **SMALL)
    refused_load(tmp_path / "saved", model, one, "group 0", "different options")
    rates[1].copy_(rates[0])
    optimizer.param_groups[0]["note"] = float("nan")  # which is not equal to itself
    checkpoint.save(tmp_path / "same", model, optimizer)
    checkpoint.load(tmp_path / "same", model, optimizer)
    del optimizer.param_groups[0]["note"]
    checkpoint.save(tmp_path / "one", model, optimizer)
    checkpoint.load(tmp_path / "one", model, one)


def test_parameters_that_had_no_optimizer(tmp_path):
    model, optimizer = trained()
    half = offstage.offload(adamw_of(model.layers.parameters()), model, **SMALL)
    checkpoint.save(tmp_path / "half", model, half)
    refused_load(tmp_path / "half", model, optimizer, "of group 0", "no saved group")


def test_options_that_need_more_memory_than_there_may_be(tmp_path):
    """Saved with amsgrad; the budget has no room for it."""
    model, optimizer = built_after(2, SMALL, dtype=torch.float32, make=functools.partial(adamw_of, amsgrad=True))
    checkpoint.save(tmp_path / "saved", model, optimizer)
    used = host_bytes(build(SMALL, dtype=torch.float32)[1])
    other = trained({**SMALL, "host_budget": used + 1024}, dtype=torch.float32)
    refused_load(tmp_path / "saved", *other, "host_budget", error=HostMemoryError)
    assert not other[1].param_groups[0]["amsgrad"]
    train(*other, range(2))


def test_ctrl_c_while_it_is_loaded_comes_after_it(complete):
    model, optimizer = trained(PLANS["split"])
    expected = build(PLANS["split"])
    checkpoint.load(complete, *expected)
    read, interrupted = Stored.read, []

    def with_ctrl_c(self, *arguments, **more):
        if not interrupted and optimizer.param_groups[0]["lr"] == expected[1].param_groups[0]["lr"]:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return read(self, *arguments, **more)

    optimizer.param_groups[0]["lr"] = 0.5  # as in the checkpoint when the writing begins
    with mock.patch.object(Stored, "read", with_ctrl_c), pytest.raises(KeyboardInterrupt):
        checkpoint.load(complete, model, optimizer)
    assert interrupted
    runtime_of(optimizer).check_not_lost()
    assert_same_tree(everything(model, optimizer), everything(*expected))


class Attention(nn.Module):
    """Two fused weights next to each other, and room for what their parts must not be called."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(24, 24, bias=False)
        self.cross = nn.Linear(24, 24, bias=False)


def as_a_parameter(model):
    model.q = nn.Linear(24, 8, bias=False)
    checkpoint.qkv(model.qkv.weight, q=8, k=8, v=8)


def as_a_buffer(model):
    model.v = nn.Module()
    model.v.register_buffer("weight", torch.zeros(8, 24))
    checkpoint.qkv(model.qkv.weight, q=8, k=8, v=8)


def as_another_part(model):
    checkpoint.qkv(model.qkv.weight, q=8, k=8, v=8)
    checkpoint.qkv(model.cross.weight, q=8, k=8, v=8)


@pytest.mark.parametrize("clash", [as_a_parameter, as_a_buffer, as_another_part], ids=lambda one: one.__name__)
def test_a_part_that_is_called_like_something_else(clash, tmp_path):
    def clashing():
        model = Attention()
        clash(model)
        return model

    model, optimizer = build(SMALL, model=clashing, dtype=torch.float32)
    refused_save(tmp_path / "saved", model, optimizer, "'qkv.weight'", ".weight'", "split_as", error=ConfigError)
    checkpoint.save(tmp_path / "saved", model, optimizer, splitter=lambda name, param: None)
    refused_load(tmp_path / "saved", model, optimizer, "'qkv.weight'", "split_as", error=ConfigError)


def test_shaped_state_of_a_fused_parameter_is_not_lost(tmp_path):
    """Rows and columns of a whole matrix are no state of its parts: it comes back, or the save is refused."""
    make = ALL_CLASSES["Adafactor"]
    model, optimizer = build({**SMALL, "rule": "torch"}, model=Attention, make=make, dtype=torch.float32)
    checkpoint.qkv(model.qkv.weight, q=8, k=8, v=8)
    step_once(model, optimizer, 0)
    before = everything(model, optimizer)
    try:
        checkpoint.save(tmp_path / "saved", model, optimizer)
    except ConfigError:
        assert not checkpoint.is_complete(tmp_path / "saved")
        return
    step_once(model, optimizer, 1)
    checkpoint.load(tmp_path / "saved", model, optimizer)
    assert_same_tree(everything(model, optimizer), before)


def test_paths_may_be_strings(complete):
    assert checkpoint.is_complete(str(complete))
    assert checkpoint.latest(str(complete.parent)) == complete
    checkpoint.verify(str(complete))


# Nothing in a checkpoint is code


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch '{self._path}'",)


def planted(folder, name, value, monkeypatch):
    """A checkpoint, sound by its manifest, in which the object `name` is `value`."""
    model, optimizer = trained()
    real = writer.Planner.resolve_data

    def resolve_data(planner, item):
        if item.index.fqn != name:
            return real(planner, item)
        planted.hits += 1
        file = io.BytesIO()
        torch.save(value, file)
        return file

    planted.hits = 0
    with monkeypatch.context() as patch:
        patch.setattr(writer.Planner, "resolve_data", resolve_data)
        checkpoint.save(folder, model, optimizer, extra={"note": "harmless", "deep": {"list": [1]}})
    assert planted.hits == 1


@pytest.mark.parametrize("name", ["extra.note", "extra.deep.list", "optim.param_groups.1.lr"])
def test_a_malicious_object_is_refused_and_not_run(name, monkeypatch, tmp_path):
    planted(tmp_path / "saved", name, Malicious(tmp_path / "ran"), monkeypatch)
    for checksums in (True, False):
        refused_load(tmp_path / "saved", *trained(), name, ".distcp", checksums=checksums)
    assert not (tmp_path / "ran").exists()
    with open(tmp_path / "proof", "wb") as file:  # an ordinary unpickler would run it
        pickle.dump(Malicious(tmp_path / "ran"), file)
    with open(tmp_path / "proof", "rb") as file:
        pickle.load(file)
    assert (tmp_path / "ran").exists()


def sign(folder):
    """Make the manifest fit what is in the folder now."""
    files = {path.name: manifest.sum_of(path) for path in folder.iterdir() if path.name != manifest.MANIFEST}
    manifest.write_manifest(folder, files, about={})


def test_metadata_with_a_foreign_class_is_refused(copied, tmp_path):
    saved = pickle.loads((copied / METADATA).read_bytes())
    for planner_data in (Malicious(tmp_path / "ran"), threading.Thread):
        saved.planner_data = planner_data
        (copied / METADATA).write_bytes(pickle.dumps(saved))
        sign(copied)
        checkpoint.verify(copied)
        named = "system" if isinstance(planner_data, Malicious) else "threading.Thread"
        refused_load(copied, *trained(), METADATA, named)
        assert not (tmp_path / "ran").exists()


class Custom:
    """Nothing that `weights_only` knows."""


def saved_to_the_end(action, *arguments, **keywords):
    """`save`, or `async_save` and the wait for it."""
    started = action(*arguments, **keywords)
    if started is not None:
        started.result(LONGEST_S)


@pytest.mark.parametrize("action", [checkpoint.save, checkpoint.async_save])
def test_what_could_not_be_loaded_is_not_saved(action, tmp_path):
    model, optimizer = trained()
    folder = tmp_path / "saved"
    for extra, named in ({"thing": Custom()}, "extra.thing"), ({"deep": {"list": [Custom()]}}, "extra.deep.list"):
        with unchanged(model, optimizer), pytest.raises(OffstageError, match=named):
            saved_to_the_end(action, folder, model, optimizer, extra=extra)
        assert not checkpoint.is_complete(folder)
    optimizer.param_groups[0]["note"] = Custom()
    with pytest.raises(OffstageError, match="note"):
        saved_to_the_end(action, folder, model, optimizer)
    assert not checkpoint.is_complete(folder)


def test_numbers_of_numpy_in_options(tmp_path):
    """What a schedule that is written with numpy leaves there."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = np.float64(0.0125)
    optimizer.param_groups[1]["weight_decay"] = np.float32(0.25)
    checkpoint.save(tmp_path / "saved", model, optimizer, extra={"loss": np.float64(2.5), "step": np.int64(7)})
    other = trained()
    assert checkpoint.load(tmp_path / "saved", *other) == {"loss": 2.5, "step": 7}
    assert other[1].param_groups[0]["lr"] == 0.0125
    assert other[1].param_groups[1]["weight_decay"] == 0.25
    train(*other, range(1))


@pytest.mark.parametrize(
    "extra",
    [
        {
            "plain": 1,
            "text": "two",
            "none": None,
            "list": [1, (2, 3)],
            "tensor": torch.arange(3),
            "scalar": torch.ones(()),
        },
        {"nested": {"deeper": {"x": 1.5, "tensor": torch.zeros(2, 3)}}},
        {"a.b": 1, "c": {"d.e": torch.ones(2)}},
        {"a.b": 1, "a": {"b": 2}},
        {"a.b": 1, "a": 3},
        {"a": 1, "a.": 2, ".": 3, "": 4},
        {"empty": {}, "inner": {"empty": {}}},
        {"numbers": {5: 6, "5": 7}, "inner": {"scheduler": {"milestones": Counter({2: 1, 4: 2})}}},
        {"model": 1, "optim": {"param_groups": 2}, "extra": {"extra": 3}},
    ],
    ids=lambda extra: "-".join(map(str, extra)),
)
def test_extra_comes_back_as_it_went_in(extra, tmp_path):
    """Or is refused when it is saved."""
    model = nn.Linear(2, 2)
    may_be_refused = not all(str(key).isidentifier() for key in extra)
    try:
        checkpoint.save(tmp_path / "saved", model, extra=extra)
    except ConfigError:
        if not may_be_refused:
            raise
        assert not checkpoint.is_complete(tmp_path / "saved")
        return
    assert_same_tree(checkpoint.load(tmp_path / "saved", model), extra)


# Models of all kinds


def round_trip(tmp_path, make, config=SMALL, *, dtype=torch.float32, wrap=lambda model: model, save=None):
    """Save a trained model by both ways, load it into another one, and compare; returns the names in the file."""
    model, optimizer = build(config, model=make, dtype=dtype)
    step_once(model, optimizer, 0)
    step_once(model, optimizer, 1)
    at_save = everything(model, optimizer)
    checkpoint.save(tmp_path / "saved", wrap(model), optimizer)
    checkpoint.async_save(tmp_path / "async", wrap(model), optimizer).result(LONGEST_S)
    step_once(model, optimizer, 2)
    for folder in (tmp_path / "saved", tmp_path / "async"):
        other, other_optimizer = build(config, model=make, dtype=dtype, seed=1)
        checkpoint.load(folder, wrap(other), other_optimizer)
        assert_same_tree(everything(other, other_optimizer), at_save)
        step_once(other, other_optimizer, 2)
        assert_same_tree(everything(other, other_optimizer), everything(model, optimizer))
    with Stored(tmp_path / "saved") as stored, Stored(tmp_path / "async") as other:
        assert stored.names == other.names
        assert dict(stored.tensors) == dict(other.tensors)
        return {name for name in stored.names if not name.startswith("optim.param_groups")}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.head = nn.Linear(24, 50)
        self.head.weight = self.embedding.weight


def test_tied_weights(tmp_path):
    """Both names are in the model's state, as torch has it; the optimizer's state is there once."""
    names = round_trip(tmp_path, Tied)
    assert {"model.embedding.weight", "model.head.weight", "optim.state.embedding.weight.exp_avg"} <= names
    assert "optim.state.head.weight.exp_avg" not in names


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)  # an integer among its buffers
        self.norm.running_mean.normal_()
        self.norm.num_batches_tracked += torch.randint(1000, ())
        self.register_buffer("mask", torch.rand(5, 5) > 0.5)
        self.register_buffer("passing", torch.rand(3), persistent=False)


def test_buffers(tmp_path):
    names = round_trip(tmp_path, Buffers)
    assert {"model.norm.running_mean", "model.norm.num_batches_tracked", "model.mask"} <= names
    assert "model.passing" not in names


class Extra(nn.Module):
    """State that is neither parameter nor buffer."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24))
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        self.value = value


class ExtraTensor(Extra):
    """The same, as a tensor that is made when it is asked for."""

    def get_extra_state(self):
        return self.value + 0

    def set_extra_state(self, value):
        self.value = value.clone()


def with_extra(make, value):
    model = make(value(0))
    model.inner = nn.Sequential(make(value(1)), make(value(2)))
    return model


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
@pytest.mark.parametrize("kind", ["object", "tensor"])
def test_extra_state_of_modules(kind, wrap, slow, tmp_path):
    values = {
        "object": (Extra, lambda number: {"calls": [number, torch.rand(2).tolist()]}),
        "tensor": (ExtraTensor, lambda number: torch.rand(3) + number),
    }
    make = functools.partial(with_extra, *values[kind])
    model, optimizer = build(SMALL, model=make, dtype=torch.float32)
    owners = [model, *model.inner]
    expected = copy.deepcopy([owner.value for owner in owners])
    saving = checkpoint.async_save(tmp_path / "async", wrap(model), optimizer)
    for owner in owners:  # changed in place while the writer stands still
        owner.value.zero_() if kind == "tensor" else owner.value["calls"].append("later")
    slow.finish(saving)
    for owner, value in zip(owners, copy.deepcopy(expected), strict=True):
        owner.value = value
    checkpoint.save(tmp_path / "saved", wrap(model), optimizer)
    for folder in (tmp_path / "saved", tmp_path / "async"):
        other, other_optimizer = build(SMALL, model=make, dtype=torch.float32, seed=1)
        checkpoint.load(folder, wrap(other), other_optimizer)
        assert_same_tree([owner.value for owner in (other, *other.inner)], expected)


class Wrapped(nn.Module):
    def __init__(self, first=lambda module: module, second=lambda module: module):
        super().__init__()
        self.first = first(nn.Linear(24, 24))
        self.module = nn.ModuleDict({"module": second(nn.Linear(24, 24))})


NAMES = {f"{name}.{leaf}" for name in ("first", "module.module") for leaf in ("weight", "bias")}


@pytest.mark.parametrize(
    ("make", "wrap"),
    [
        (Wrapped, torch.compile),
        (lambda: Wrapped(torch.compile, checkpoint_wrapper), lambda model: model),
        (lambda: Wrapped(checkpoint_wrapper, lambda module: torch.compile(checkpoint_wrapper(module))), torch.compile),
    ],
    ids=["the whole model compiled", "layers wrapped", "both"],
)
def test_names_without_what_wrappers_add(make, wrap, tmp_path):
    model, optimizer = build(SPLIT, model=make)
    step_once(model, optimizer, 0)
    expected = [value.clone() for value in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    checkpoint.save(tmp_path / "saved", wrap(model), optimizer)
    assert names_of_parameters(tmp_path / "saved") == NAMES
    for one, wrapped in ((make, wrap), (Wrapped, lambda model: model), (Wrapped, torch.compile)):
        other, other_optimizer = build(MASTERS, model=one, seed=1)
        checkpoint.load(tmp_path / "saved", wrapped(other), other_optimizer)
        assert_same_tree([value.detach() for value in other.parameters()], expected)
        assert_same_tree(other_optimizer.state_dict(), state)


def names_of_parameters(folder):
    with Stored(folder) as stored:
        return {name.removeprefix("model.") for name in stored.names if name.startswith("model.")}


def test_names_under_ddp(tmp_path):
    """With a process group of one, saved there and loaded without."""
    with one_process_group():
        torch.manual_seed(0)
        model = DistributedDataParallel(Wrapped())
        optimizer = offstage.offload(adamw_of(model.parameters()), model, **SMALL)
        step_once(model, optimizer, 0)
        save_both(tmp_path, model, optimizer)
        expected = everything(model.module, optimizer)
    for folder in ("saved", "async"):
        assert names_of_parameters(tmp_path / folder) == NAMES
        torch.manual_seed(1)
        other = Wrapped()
        other_optimizer = offstage.offload(adamw_of(other.parameters()), other, **SMALL)
        checkpoint.load(tmp_path / folder, other, other_optimizer)
        assert_same_tree(everything(other, other_optimizer), expected)


class Shapes(nn.Module):
    """Parameters of every shape and stride."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.empty(0))
        self.flat_empty = nn.Parameter(torch.empty(3, 0, 2))
        self.frozen = nn.Parameter(torch.randn(20, 20), requires_grad=False)
        self.convolution = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.volume = nn.Conv3d(4, 4, 3).to(memory_format=torch.channels_last_3d)
        self.transposed = nn.Parameter(torch.randn(40, 50).t())
        self.permuted = nn.Parameter(torch.randn(5, 6, 7, 8).permute(2, 0, 3, 1))


@pytest.mark.parametrize("kind", ["fp32", "split", "split, host"])
def test_shapes_and_strides(kind, tmp_path):
    config = {"fp32": SMALL, "split": SPLIT, "split, host": {**SPLIT, "update_on": "host"}}[kind]
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    names = round_trip(tmp_path, Shapes, config, dtype=dtype)
    assert {"model.frozen", "model.flat_empty", "model.scalar"} <= names
    for folder in ("saved", "async"):  # whatever the strides, a file has rows
        model, optimizer = loaded_into(tmp_path / folder, RESIDENT, model=contiguous_shapes, dtype=dtype, seed=2)
        other, other_optimizer = loaded_into(tmp_path / folder, config, model=Shapes, dtype=dtype, seed=3)
        assert_same_tree(everything(model, optimizer), everything(other, other_optimizer))


def contiguous_shapes():
    model = Shapes()
    for param in model.parameters():
        param.data = param.data.contiguous()
    assert all(param.is_contiguous() for param in model.parameters())
    return model


class Gaps(nn.Module):
    """Parameters with gaps in memory, all of one size."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.randn(64, 128)[:, :64]) for _ in range(6))


@pytest.mark.parametrize("config", [SPLIT, {**RESIDENT, "master_weights": "fp32"}], ids=["split", "resident"])
def test_parameters_with_gaps_in_memory(config, tmp_path):
    round_trip(tmp_path, Gaps, config, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", ["channels last", "transposed"])
def test_split_masters_are_loaded_by_blocks_whatever_the_strides(shape, tmp_path, monkeypatch):
    """Not element by element."""
    made = {
        "channels last": lambda: nn.Conv2d(32, 16, 3, bias=False).to(memory_format=torch.channels_last),
        "transposed": lambda: nn.ParameterList([nn.Parameter(torch.randn(64, 72).t())]),
    }[shape]
    model, optimizer = build(SPLIT, model=made)
    step_once(model, optimizer, 0)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    reads = []

    def read(stored, name, box, into, real=Stored.read):
        reads.append(name)
        real(stored, name, box, into)

    monkeypatch.setattr(Stored, "read", read)
    before = everything(model, optimizer)
    checkpoint.load(tmp_path / "saved", model, optimizer)
    assert_same_tree(everything(model, optimizer), before)
    assert len(reads) < 200, f"{len(reads)} reads for {model[0].numel() if shape == 'transposed' else 4608} elements"


def test_a_transposed_parameter_is_read_once(tmp_path, monkeypatch):
    """A few times at most, and not once for every block of the file."""
    model, optimizer = build(
        SMALL, model=lambda: nn.ParameterList([nn.Parameter(torch.randn(256, 512).t())]), dtype=torch.float32
    )
    step_once(model, optimizer, 0)
    count = 0

    def read(snapshot, index, key, start, stop, into, real=Snapshot.read):
        nonlocal count
        count += stop - start
        real(snapshot, index, key, start, stop, into)

    monkeypatch.setattr(Snapshot, "read", read)
    monkeypatch.setattr(writer, "_BLOCK_BYTES", 16 * 1024)
    checkpoint.async_save(tmp_path / "saved", model, optimizer).result(LONGEST_S)
    assert count <= 4 * 2 * model[0].numel()


# Memory, and the end of the process

SCRIPT = """
import sys
from pathlib import Path

import torch
from torch import nn

import offstage
from offstage import checkpoint
from offstage.checkpoint import loading

torch.backends.mkldnn.enabled = False
torch.set_num_threads(1)
folder = Path(sys.argv[1])


def build(numel):
    torch.manual_seed(0)
    params = nn.ParameterList(nn.Parameter(torch.randn(numel // 1024, 1024).bfloat16()) for _ in range(8))
    inner = torch.optim.AdamW(params.parameters(), lr=0.01)
    return params, offstage.offload(inner, params, min_bytes=0, chunk_bytes="8MiB", master_weights="split")


def step(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024


def watched(master, squares, real=loading.master_weights.split):
    global peak
    made = real(master, squares)
    peak = max(peak, anonymous_bytes())
    return made


loading.file_threads = lambda: 4
peak = 0
small = build(1024)  # what torch and the threads allocate once
step(*small)
checkpoint.save(folder / "small", *small)
checkpoint.load(folder / "small", *small)
model, optimizer = build(400 * 1024)
step(model, optimizer)
checkpoint.save(folder / "large", model, optimizer)
loading.master_weights.split = watched
before = peak = anonymous_bytes()
checkpoint.load(folder / "large", model, optimizer)
from offstage.optimizer.optimizer import runtime_of
print(peak - before, sum(state.nbytes for state in runtime_of(optimizer).all_states()))
checkpoint.async_save(folder / "last", model, optimizer)
step(model, optimizer)
"""


def test_memory_of_a_load_and_a_save_at_the_end_of_the_process(tmp_path):
    """31 MiB of split state in eight parameters and four threads: no more than a chunk of 8 MiB beside the arenas.

    A save that is not waited for is complete when the interpreter has ended.
    """
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    extra, state = map(int, run.stdout.split())
    assert state > 30 * 2**20
    checkpoint.verify(tmp_path / "last")
    assert extra <= 8 * 2**20 + 4 * 2**20, f"{extra / 2**20:.1f} MiB beyond the arenas"
