# SPDX-License-Identifier: Apache-2.0
"""The trainer on an accelerator: bits that repeat, no waiting for the device, and what rows say about it."""

import json
import pickle

import pytest
import torch

from offstage.errors import OffstageError
from offstage.train import loop, passes
from offstage.train.config import ModelSettings
from offstage.train.model import build as build_model
from tests.support.gates import no_synchronisation
from tests.support.trainer import TINY, differences, losses_of, rows_of, train

SMALL = {"chunk_bytes": "256KiB"}
PLANS = {
    "off": {"fraction": 0.0},
    "forward": {**SMALL, "overlap_forward": True, "window": "1MiB"},
    "backward": {**SMALL, "overlap_forward": True, "update_in_backward": True, "master_weights": "split"},
    "host": {**SMALL, "update_on": "host", "overlap_forward": True},
    "weights": {**SMALL, "weights": "host", "overlap_forward": True, "master_weights": "split"},
    "weights in backward": {**SMALL, "weights": "host", "update_in_backward": True, "master_weights": "split"},
}
BY_SIZE = dict.fromkeys(TINY)  # over the defaults of small runs, whose layers would be too small to move
MODEL = {"model": {**BY_SIZE, "size": "10M", "layers": 4}, "data": {"sequence": 512, "batch": 8}}


def go(folder, plan, **sections):
    run = {"steps": 8, "eval_every": 4, "eval_batches": 2, **sections.pop("run", {})}
    return train(folder, "off", **{**MODEL, **sections}, run=run, offload=offload_of(plan))


def offload_of(plan):
    """Over the defaults of small runs, which `off` is."""
    return {"fraction": None, **PLANS[plan]}


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    return go(tmp_path_factory.mktemp("resident"), "off")


@pytest.mark.parametrize("plan", ["forward", "backward", "host", "weights", "weights in backward"])
def test_every_plan_has_the_same_bits(plan, resident, tmp_path):
    done = go(tmp_path, plan)
    assert losses_of(tmp_path) == losses_of(resident.folder)
    assert differences(done.checkpoint, resident.checkpoint) == []
    row = rows_of(tmp_path)[-1]
    assert row["device_bytes"] > 0
    assert row["device_peak_bytes"] >= row["device_bytes"]
    assert row["exposed_ms"] is not None
    assert (row["hidden_ms"] is None) is (plan == "host")  # the link's rate is measured where state is streamed


def test_a_run_that_is_stopped_goes_on_to_the_same_bits(resident, tmp_path):
    flat = {"optimizer": {"warm_up": 0, "last_lr_share": 1.0}}
    whole = go(tmp_path / "whole", "forward", **flat)
    go(tmp_path / "stopped", "backward", run={"steps": 5}, **flat)
    done = go(tmp_path / "stopped", "host", **flat)
    assert differences(done.checkpoint, whole.checkpoint) == []


def test_a_run_with_weights_on_the_host_goes_on_to_the_same_bits(resident, tmp_path):
    """From its own checkpoint, which was read from host memory, and with weights on the device."""
    flat = {"optimizer": {"warm_up": 0, "last_lr_share": 1.0}}
    whole = go(tmp_path / "whole", "forward", **flat)
    for first, then in (("weights", "weights in backward"), ("weights in backward", "forward"), ("forward", "weights")):
        folder = tmp_path / f"{first}, {then}"
        go(folder, first, run={"steps": 5}, **flat)
        assert differences(go(folder, then, **flat).checkpoint, whole.checkpoint) == []


def test_first_weights_on_the_host_have_the_bits_of_the_device():
    """Made there one by one: never more than one of them is on the device."""
    settings = ModelSettings(size="10M", layers=4)
    there = build_model(settings, device="cuda", dtype=torch.bfloat16, sequence=512, seed=3)
    largest = max(param.nbytes for param in there.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    here = build_model(settings, device="cuda", dtype=torch.bfloat16, sequence=512, seed=3, home=torch.device("cpu"))
    assert torch.cuda.max_memory_allocated() - before <= 2 * largest
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert one.device.type == "cpu"
        assert torch.equal(one, other.cpu())


def test_what_is_observed_of_weights_on_the_host(tmp_path):
    go(tmp_path, "weights", run={"observe_step": 5}, activations={"mode": "checkpoint"})
    observed = json.loads((tmp_path / "observed.json").read_text())
    assert observed["notes"] == []
    weights = observed["memory"]["bytes"]["weights"]
    assert min(weights) < max(weights)
    about = json.loads((tmp_path / "run.json").read_text())
    assert max(weights) - min(weights) <= about["weights"]["device_bytes"]
    assert about["plan"]["host_weight_bytes"] == pytest.approx(about["weights"]["host_bytes"], rel=0.01)
    assert about["plan"]["prediction"]["iteration_ms"] > 0


@pytest.mark.parametrize("mode", ["checkpoint", "offload", "checkpoint_and_offload"])
def test_activations(mode, resident, tmp_path):
    done = go(tmp_path, "forward", activations={"mode": mode})
    assert differences(done.checkpoint, resident.checkpoint) == []


def test_compiled(resident, tmp_path):
    done = go(tmp_path, "backward", **{**MODEL, "model": {**MODEL["model"], "compile": True}})
    assert done.loss == pytest.approx(resident.loss, rel=0.02)


def test_sharded_on_one_rank(resident, tmp_path):
    done = go(tmp_path, "backward", parallel={"fsdp": True})
    assert done.loss == pytest.approx(resident.loss, rel=0.02)


@pytest.mark.parametrize("plan", PLANS)
def test_steps_do_not_wait_for_the_device(plan, monkeypatch, tmp_path):
    """Torch raises at whatever synchronises; the one wait of a step is for a mark of the norm."""
    step = loop.Training._make_step
    watched = []

    def watch(self):
        if self.step < 4:  # lanes, slots and windows are made
            return step(self)
        watched.append(self.step)
        with no_synchronisation():
            return step(self)

    monkeypatch.setattr(loop.Training, "_make_step", watch)
    go(tmp_path, plan, run={"eval_every": 0, "steps": 10})
    assert len(watched) == 6


def test_the_observed_step_and_the_prediction(tmp_path):
    go(tmp_path, "forward", run={"observe_step": 5})
    observed = json.loads((tmp_path / "observed.json").read_text())
    assert observed["notes"] == []
    assert max(observed["memory"]["bytes"]["activations"]) > 0
    assert observed["lanes"]["fetch"]
    plan = json.loads((tmp_path / "run.json").read_text())["plan"]
    assert plan["prediction"]["iteration_ms"] > 0


def test_a_memory_snapshot(resident, tmp_path):
    """With the stack of what allocated the model, which lived before the observed step; the bits are the same."""
    done = go(tmp_path, "forward", run={"observe_step": 3, "memory_snapshot": True})
    assert losses_of(tmp_path) == losses_of(resident.folder)
    assert done.step == 8
    snapshot = pickle.loads((tmp_path / "memory_snapshot.pickle").read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    files = {frame["filename"] for block in blocks for frame in block.get("frames", ())}
    assert any(name.endswith("offstage/train/passes.py") for name in files)
    assert any(event["action"] == "alloc" for event in snapshot["device_traces"][0])


def test_operations_that_do_not_repeat(tmp_path, monkeypatch):
    """Refused with the setting that allows them, or allowed by it."""
    gradients = passes.Whole.gradients

    def with_median(self, *args):
        torch.ones(3, device="cuda").median(0)
        return gradients(self, *args)

    monkeypatch.setattr(passes.Whole, "gradients", with_median)
    with pytest.raises(OffstageError, match=r"median.*run\.deterministic=false"):
        go(tmp_path / "one", "off")
    go(tmp_path / "other", "off", run={"deterministic": False})
    assert not torch.are_deterministic_algorithms_enabled()


def test_out_of_device_memory(tmp_path):
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 2**28) / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(OffstageError, match=r"Device memory ran out: .*activations\.mode='checkpoint'"):
            go(tmp_path, "forward", data={"sequence": 4096, "batch": 64}, run={"eval_every": 0})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
