# SPDX-License-Identifier: Apache-2.0
"""Runs whose layers' weights live on the host: the bits of ordinary ones, saved, resumed, reported and refused."""

import functools
import json
import re
import sys

import pytest
import torch

from offstage.cli import main as cli
from offstage.errors import ConfigError
from offstage.memory import arena
from offstage.optimizer.optimizer import runtime_of
from offstage.train import loop, memory_needs
from offstage.train.config import ModelSettings, build, load_config, to_toml
from offstage.train.language_model import initialize
from offstage.train.memory_needs import check_memory, needs_of
from offstage.train.model import build as build_model
from offstage.train.parallel import Parallel
from offstage.train.progress import progress_for
from offstage.train.run_folder import RunFolder
from offstage.weights.host_weights import host_weight_of
from tests.support import stand_in
from tests.support.trainer import SMALL, TINY, differences, losses_of, train, train_there, values_of

CPU = Parallel(torch.device("cpu"))
MODEL = {**TINY, "layers": 5, "dtype": "bfloat16"}
HOST = {**SMALL, "fraction": None, "weights": "host", "master_weights": "split"}
MODES = {
    "in step": {},
    "under forward": {"overlap_forward": True},
    "in backward": {"update_in_backward": True, "overlap_forward": True},
}


def host_run(folder, mode="under forward", offload=None, **sections):
    sections.setdefault("model", MODEL)
    return train(folder, "off", offload={**HOST, **MODES[mode], **(offload or {})}, **sections)


def training_of(folder, values):
    return loop.Training(build(values), CPU, RunFolder(folder), progress_for("quiet", first=False))


# The same bits


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_a_run_with_weights_on_the_device(tmp_path, mode, clip):
    """With evaluations, samples and saves between the steps, and one that is observed."""
    sections = {"model": MODEL, "optimizer": {"clip": clip}, "run": {"steps": 8}}
    plain = train(tmp_path / "plain", "off", **sections)
    sections["run"] |= {"save_every": 3, "eval_every": 3, "sample_every": 4, "sample_bytes": 4, "observe_step": 4}
    found = host_run(tmp_path / "host", mode, **sections)
    assert differences(plain.checkpoint, found.checkpoint) == []
    assert losses_of(tmp_path / "host") == losses_of(tmp_path / "plain")


@pytest.mark.parametrize("mode", MODES)
def test_with_micro_batches(tmp_path, mode):
    sections = {"model": MODEL, "data": {"micro_batches": 3, "batch": 1}, "run": {"steps": 5}}
    plain = train(tmp_path / "plain", "off", **sections)
    assert differences(plain.checkpoint, host_run(tmp_path / "host", mode, **sections).checkpoint) == []


@pytest.mark.parametrize(
    ("mode", "activations"),
    [("in step", "checkpoint"), ("under forward", "offload"), ("in backward", "checkpoint_and_offload")],
)
def test_with_activations_that_leave(tmp_path, mode, activations):
    """On the same link. Inputs of layers are a mebibyte each: smaller tensors stay."""
    sections = {"model": {"layers": 4, "width": 128}, "data": {"sequence": 256, "batch": 8}, "run": {"steps": 4}}
    sections["activations"] = {"mode": activations}
    plain = train(tmp_path / "plain", "off", **sections)
    found = host_run(tmp_path / "host", mode, {"master_weights": "auto"}, **sections)
    assert differences(plain.checkpoint, found.checkpoint) == []


def test_compiled_blocks(tmp_path, monkeypatch):
    """Hooks stay outside of what is compiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    sections = {"model": {**MODEL, "compile": True}, "run": {"steps": 4}}
    plain = train(tmp_path / "plain", "off", **sections)
    assert differences(plain.checkpoint, host_run(tmp_path / "host", "in backward", **sections).checkpoint) == []


@pytest.mark.parametrize("share", [0.5, "150KiB"])
def test_a_part_of_the_weights(tmp_path, share):
    sections = {"model": {**MODEL, "layers": 8}, "run": {"steps": 4}}
    plain = train(tmp_path / "plain", "off", **sections)
    found = host_run(tmp_path / "host", offload={"weights": share}, **sections)
    assert differences(plain.checkpoint, found.checkpoint) == []
    assert 0 < json.loads((tmp_path / "host/run.json").read_text())["weights"]["layers"] < 8


def test_adapters(tmp_path):
    """Frozen weights come, and do not go back."""
    sections = {"model": MODEL, "lora": {"rank": 4}, "run": {"steps": 4}}
    plain = train(tmp_path / "plain", "off", **sections)
    found = host_run(tmp_path / "host", **sections)
    assert differences(plain.checkpoint, found.checkpoint) == []
    moved = json.loads((tmp_path / "host/receipt.json").read_text())["moved"]
    assert moved["weights_up"] > 3 * moved["weights_down"]


# Building


class Elsewhere:
    """Weights that are made: what each takes, and the sum of what is there at once."""

    def __init__(self, monkeypatch):
        self.made = []
        original = torch.empty_like
        monkeypatch.setattr(torch, "empty_like", lambda like, **more: self._made(original(like), like, more))

    def _made(self, tensor, like, more):
        self.made.append((like.shape, more))
        return tensor


def test_first_weights_are_made_on_the_device_one_by_one(monkeypatch):
    """With the bits that a model on the device begins with. Here the device is a second name of the CPU."""
    settings = ModelSettings(**MODEL)
    expected = build_model(settings, device="cpu", dtype=torch.bfloat16, sequence=16, seed=3)
    model = build_model(settings, device="meta", dtype=torch.bfloat16, sequence=16)
    model.to_empty(device="cpu")
    made = Elsewhere(monkeypatch).made
    initialize(model, 5, 3, torch.device("cuda"))
    assert all(more == {"device": torch.device("cuda")} for _, more in made)
    assert [shape for shape, _ in made] == [param.shape for param in model.parameters() if param.dim() > 1]
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_lives_on_the_host_is_built_there(tmp_path, monkeypatch):
    values = values_of(tmp_path / "run", "off", model=MODEL, offload=HOST)
    seen = {}
    original = loop.passes_for

    def passes_for(*args):
        made = original(*args)
        seen["devices"] = {param.device.type for param in made.model.parameters()}
        return made

    monkeypatch.setattr(loop, "passes_for", passes_for)
    training = training_of(tmp_path, values)
    try:
        assert seen["devices"] == {"cpu"}
        assert sum(host_weight_of(param) is not None for param in training.passes.model.parameters()) == 30
        assert runtime_of(training.optimizer).weights.host_bytes > 0
    finally:
        training.close()


def test_transformers_models(tmp_path, monkeypatch):
    """With random weights, and with those of a folder; the head is tied to the embedding, and both stay."""
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    stand_in.save_weights(tmp_path / "source", num_hidden_layers=7)
    for model in ({"transformers": str(tmp_path / "source")}, {"weights": str(tmp_path / "source")}):
        name = next(iter(model))
        values = values_of(tmp_path / "plain" / name, "off", run={"steps": 3})
        plain = train_there({**values, "model": {**model, "dtype": "bfloat16"}})
        offload = {**HOST, **MODES["in backward"]}
        values = values_of(tmp_path / "host" / name, "off", run={"steps": 3}, offload=offload)
        found = train_there({**values, "model": {**model, "dtype": "bfloat16"}})
        assert differences(plain.checkpoint, found.checkpoint) == []
        assert json.loads((tmp_path / "host" / name / "run.json").read_text())["weights"]["layers"] == 7


# Saving


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_has_the_same_bits(tmp_path, mode, asynchronous):
    """From a checkpoint that was read from host memory, also while training went on."""
    run = {"save_every": 2, "keep_checkpoints": 9, "asynchronous_saves": asynchronous}
    for steps in (4, 8):
        train(tmp_path / "plain", "off", model=MODEL, run={**run, "steps": steps})
        assert host_run(tmp_path / "run", mode, run={**run, "steps": steps}).step == steps
    for step in (2, 4, 6, 8):
        name = f"checkpoints/step-{step:08}"
        assert differences(tmp_path / "plain" / name, tmp_path / "run" / name) == []


def test_weights_move_between_runs(tmp_path):
    """A run that began with weights on the device goes on with them on the host, and the other way round."""
    train(tmp_path / "a", "streamed", model=MODEL, run={"steps": 3})
    host_run(tmp_path / "b", run={"steps": 3})
    moved = host_run(tmp_path / "a", "in backward", run={"steps": 6})
    back = train(tmp_path / "b", "backward", model=MODEL, run={"steps": 6})
    assert differences(moved.checkpoint, back.checkpoint) == []


# What is said


def test_the_run_says_where_weights_are(tmp_path, capsys):
    host_run(tmp_path / "run", run={"steps": 4, "observe_step": 3})
    out = capsys.readouterr()
    assert re.search(r"weights: \d+\.\d KiB on the host \(5 layers\), at most \d+\.\d KiB of them", out.out + out.err)
    found = json.loads((tmp_path / "run/run.json").read_text())["weights"]
    assert found["layers"] == 5
    assert 0 < found["device_bytes"] < found["host_bytes"]
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "those of 5 layers live on the host" in page
    assert "weights off the device" in page
    assert "could not be" not in page
    ordinary = train(tmp_path / "plain", model=MODEL, run={"steps": 1})
    assert json.loads((ordinary.folder / "run.json").read_text())["weights"] is None


def test_copies_of_layers_are_weights_on_the_device(tmp_path):
    """In the observed step: what stays, and four layers at most; gradients that left are not there."""
    host_run(tmp_path / "run", run={"steps": 4, "observe_step": 3}, activations={"mode": "checkpoint"})
    config = build(values_of("unused", "off", model=MODEL, offload=HOST))
    needs = needs_of(config, CPU)
    seen = json.loads((tmp_path / "run/observed.json").read_text())
    assert seen["notes"] == []
    weights = seen["memory"]["bytes"]["weights"]
    assert min(weights) < max(weights) <= needs.weights + 5 * 4096  # alignment
    assert max(seen["memory"]["bytes"]["gradients"]) <= needs.gradients
    assert max(seen["memory"]["bytes"]["window"], default=0) == 0


# Memory


@pytest.mark.parametrize("weights", ["host", 0.5])
def test_the_check_counts_what_the_run_takes(tmp_path, weights):
    values = values_of(tmp_path / "run", "off", model=MODEL, offload={**HOST, "weights": weights})
    needs = needs_of(build(values), CPU)
    training = training_of(tmp_path, values)
    try:
        hosted, plan = runtime_of(training.optimizer).weights, training.optimizer.plan
        params = {param: host_weight_of(param) is not None for param in training.passes.model.parameters()}
        copies = hosted.most_device_bytes
    finally:
        training.close()
    assert needs.host_weights == sum(param.nbytes for param, on_host in params.items() if on_host)
    stay = sum(param.nbytes for param, on_host in params.items() if not on_host)
    assert needs.weights == pytest.approx(stay + copies, rel=0.05)
    assert needs.host_state == plan.host_bytes
    assert needs.host_bytes == needs.host_state + 2 * needs.host_weights
    at_once = {**values, "offload": {**HOST, "update_in_backward": True}, "optimizer": {"clip": 0.0}}
    assert needs_of(build(at_once), CPU).host_gradients == 0
    at_once["data"] = {**values["data"], "micro_batches": 2}
    assert needs_of(build(at_once), CPU).host_gradients > 0


def test_a_model_that_the_device_cannot_hold(monkeypatch):
    """With its weights on the host it can, if the host has the memory."""
    device = Parallel(torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (4 << 30, 80 << 30))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(arena, "mem_available", lambda: 40 << 30)
    monkeypatch.setattr(arena, "cgroup_limits", list)
    with pytest.raises(ConfigError, match=r"needs 10\.\d GiB of device memory.*keep the layers' weights on the host"):
        check_memory(build({"model": {"size": "2.7B"}}), device)
    on_host = {"model": {"size": "2.7B"}, "offload": {"weights": "host", "master_weights": "split"}}
    with check_memory(build(on_host), device) as claim:
        assert claim.nbytes == pytest.approx(14 * 2.70e9, rel=0.02)  # embedding and head stay
    monkeypatch.setattr(arena, "mem_available", lambda: 30 << 30)
    parts = r"\(4\.7 GiB of weights, 4\.7 GiB of gradients, 25\.\d GiB of state\) needs 34\.\d GiB of host memory"
    with pytest.raises(ConfigError, match=f"{parts}.*keep more weights on the device"):
        check_memory(build(on_host), device)


# Settings and refusals


@pytest.mark.parametrize(("words", "found"), [("host", "host"), ("0.25", 0.25), ("6GiB", 6 << 30), ("1.0", "host")])
def test_weights_on_a_command_line_and_in_a_file(tmp_path, words, found):
    config = load_config(None, ["--offload.weights", words])
    assert config.offload.weights == found
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "run.toml", []) == config


@pytest.mark.parametrize("parallel", [{"fsdp": True}, {"stages": 2}])
def test_ranks_that_divide_the_model_are_refused(parallel):
    values = {"parallel": parallel, "data": {"micro_batches": 2}, "offload": {"weights": "host"}}
    with pytest.raises(ConfigError, match=r"offload.weights='host' keeps weights on the host of one device.*found par"):
        build(values)


def test_several_ranks_are_refused():
    config = build({"offload": {"weights": 0.5}})
    with pytest.raises(ConfigError, match=r"offload.weights=0.5 keeps weights on the host.*found 2 ranks"):
        memory_needs.check_host_weights(config, Parallel(torch.device("cpu"), ranks=2, sharded=True))
    memory_needs.check_host_weights(build({}), Parallel(torch.device("cpu"), ranks=2, sharded=True))


def test_the_cpu_beside_an_accelerator_is_refused(monkeypatch):
    """The library would move the model there."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    config = build({"offload": {"weights": "host"}, "run": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=r"to this machine's accelerator; found run.device='cpu'"):
        memory_needs.check_host_weights(config, CPU)
