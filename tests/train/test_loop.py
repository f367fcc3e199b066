# SPDX-License-Identifier: Apache-2.0
"""The training loop: what it learns, that no plan changes a bit of it, and what happens when numbers are not finite."""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from offstage import checkpoint
from offstage.errors import ConfigError
from offstage.train import loop, passes
from offstage.train.config import OptimizerSettings, load_config
from offstage.train.data import Batches, Corpus
from offstage.train.loop import NotFiniteError
from offstage.train.model import build as build_model
from tests.support import stand_in
from tests.support.lives import end_step
from tests.support.trainer import PLANS, differences, losses_of, rows_of, tensors_of, train, train_there, values_of

# What it learns

EARLY = 20
"""Steps after which weights are looked at."""


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory):
    """200 steps on the default data, with state resident and with everything on the way that can be."""
    root = tmp_path_factory.mktemp("long")
    sections = {
        "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 128},
        "data": {"paths": (), "sequence": 64, "batch": 4},
        "optimizer": {"lr": 2e-3, "warm_up": 20},
        "run": {"steps": 200, "eval_every": 200},
    }
    early = {}
    after_step = loop.Training._after_step

    def look(self, *, last):
        if self.step == EARLY:
            self.optimizer.synchronize()
            early.update((name, param.detach().clone()) for name, param in self.passes.model.named_parameters())
        after_step(self, last=last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Training, "_after_step", look)
        return {plan: train(root / plan, plan, **sections) for plan in ("backward", "off")}, early


def test_the_loss_falls(long_runs):
    runs, _ = long_runs
    losses = losses_of(runs["off"].folder)
    assert len(losses) == 200
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert sum(losses[-20:]) / 20 < 2.8
    assert runs["off"].eval_loss < 2.8


def test_the_same_bits_as_without_offloading(long_runs):
    off, backward = long_runs[0]["off"], long_runs[0]["backward"]
    assert differences(backward.checkpoint, off.checkpoint) == []
    assert losses_of(backward.folder) == losses_of(off.folder)
    assert backward.eval_loss == off.eval_loss
    assert all(row["bytes_stored"] > 0 for row in rows_of(backward.folder))
    assert all(row["bytes_stored"] == 0 for row in rows_of(off.folder))


def test_close_to_plain_adamw(long_runs):
    """torch's AdamW rounds differently on the CPU. What one step rounds the next ones work on, so weights are compared
    after 20 steps, as closely as after a single update, and losses all the way."""
    runs, early = long_runs
    folder = runs["off"].folder
    config = load_config(folder / "config.toml", [])
    weights, losses = plainly_trained(config, Corpus((), cache=folder))
    found = losses_of(folder)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=0)
    torch.testing.assert_close(torch.tensor(found[:EARLY]), torch.tensor(losses[:EARLY]), rtol=1e-6, atol=0)
    torch.testing.assert_close(early, weights, rtol=1e-5, atol=1e-6)


def plainly_trained(config, corpus):
    """A loop as people write it, with torch's own AdamW and clipping. Early weights, and all losses."""
    model = build_model(config.model, device="cpu", dtype=torch.float32, sequence=config.data.sequence)
    batches = Batches(corpus.split(config.data.eval_share)[0], config.data.sequence, config.data.batch, seed=0)
    params, settings = list(model.parameters()), config.optimizer
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
    weights, losses = {}, []
    for step in range(1, config.run.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step, config.run.steps)
        tokens = batches.next()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, settings.clip)
        end_step(optimizer)
        losses.append(loss.item())
        if step == EARLY:
            weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return weights, losses


# No setting that is about memory or time changes a bit


BF16 = {"model": {"dtype": "bfloat16"}}
SETTINGS = {
    "accumulated, experts": {"data": {"micro_batches": 3}, "model": {"experts": 4, "experts_per_token": 2}},
    "bf16, not clipped": {**BF16, "optimizer": {"clip": 0.0}},
}
"""Two in one run: every plan meets each of them."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_plan_has_the_same_bits(setting, tmp_path):
    expected = train(tmp_path / "off", "off", **SETTINGS[setting])
    for plan in PLANS.keys() - {"off"}:
        found = train(tmp_path / plan, plan, **SETTINGS[setting])
        assert differences(found.checkpoint, expected.checkpoint) == [], plan
        assert found.loss == expected.loss


def test_split_masters_have_the_same_bits(tmp_path):
    expected = train(tmp_path / "off", "off", **BF16)
    split = train(tmp_path / "split", "backward", **BF16, offload={"master_weights": "split"})
    assert differences(split.checkpoint, expected.checkpoint) == []


def test_micro_batches_are_one_batch(tmp_path):
    """The same sequences in other portions: the same gradient, but for the order in which it is added up."""
    one = train(tmp_path / "one", data={"batch": 6})
    three = train(tmp_path / "three", data={"batch": 2, "micro_batches": 3})
    for name in ("loss", "grad_norm"):
        assert rows_of(one.folder)[0][name] == pytest.approx(rows_of(three.folder)[0][name], rel=1e-5)
    for name, tensor in tensors_of(one.checkpoint).items():
        if name.startswith("model."):
            torch.testing.assert_close(tensors_of(three.checkpoint)[name], tensor, rtol=1e-3, atol=1e-4)


def test_only_the_last_micro_batch_is_final(tmp_path):
    """Gradients of the others are marked as such, or none could be used in backward."""
    train(tmp_path, "backward", data={"micro_batches": 3}, optimizer={"clip": 0.0})
    assert json.loads((tmp_path / "receipt.json").read_text())["fallbacks"] == []


LARGE = {"model": {"layers": 4, "width": 128}, "data": {"sequence": 256, "batch": 8}, "run": {"steps": 4}}
"""Inputs of layers are a mebibyte each, which is worth moving: smaller tensors stay."""
MODES = {
    "checkpoint": ({"mode": "checkpoint"}, 4, False),
    "offload": ({"mode": "offload"}, 0, True),
    "a share": ({"mode": "offload", "fraction": 0.5}, 0, True),
    "both": ({"mode": "checkpoint_and_offload"}, 4, True),
}
"""Settings; how many layers the model computes again by itself; whether something leaves."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return train(tmp_path_factory.mktemp("kept"), "backward", **LARGE)


@pytest.mark.parametrize("mode", MODES)
def test_activations(mode, kept, tmp_path, monkeypatch):
    settings, num_checkpointed, leaves = MODES[mode]
    found = []
    finish = loop.Training._finish
    monkeypatch.setattr(loop.Training, "_finish", lambda self, stopped: found.append(self) or finish(self, stopped))
    done = train(tmp_path, "backward", activations=settings, **LARGE)
    assert differences(done.checkpoint, kept.checkpoint) == []
    (training,) = found
    assert len(training.passes.model.checkpointed) == num_checkpointed
    assert bool(sum(handle.bytes_offloaded for handle in training.activations)) == leaves
    assert bool(sum(handle.bytes_returned for handle in training.activations)) == leaves


def test_evaluations_and_samples_change_nothing(tmp_path):
    """Neither weights nor the order of the data, nor random numbers."""
    bare = train(tmp_path / "bare", "backward")
    run = {"eval_every": 1, "eval_batches": 2, "sample_every": 2, "sample_bytes": 5, "observe_step": 4, "save_every": 3}
    looked_at = train(tmp_path / "looked at", "backward", run=run)
    assert differences(looked_at.checkpoint, bare.checkpoint) == []
    evals = [row["eval_loss"] for row in rows_of(looked_at.folder)]
    assert len(set(evals)) == 12
    assert looked_at.eval_loss == evals[-1]
    again = train(tmp_path / "again", run={"eval_every": 12, "eval_batches": 2})
    assert again.eval_loss == evals[-1]  # the same sequences every time


def test_the_eval_loss_is_that_of_the_held_out_data(tmp_path):
    done = train(tmp_path, run={"eval_every": 12, "eval_batches": 3})
    config = load_config(tmp_path / "config.toml", [])
    model = build_model(config.model, device="cpu", dtype=torch.float32, sequence=16)
    model.load_state_dict(
        {name.removeprefix("model."): one for name, one in tensors_of(done.checkpoint).items() if name[:2] == "mo"}
    )
    batches = Batches(Corpus(config.data.paths).split(config.data.eval_share)[1], 16, 2, seed=0)
    with torch.no_grad():
        losses = [model.eval()(tokens[:, :-1], tokens[:, 1:]) for tokens in (batches.next() for _ in range(3))]
    assert done.eval_loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)


def test_a_run_that_saves_nothing(tmp_path):
    """For a trial, or a model that the disk has no room for."""
    done = train(tmp_path, run={"save_last": False})
    assert done.checkpoint is None
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert len(losses_of(tmp_path)) == 12
    assert done.loss == losses_of(tmp_path)[-1]


# Ranks


PARALLEL = {
    "FSDP2": (2, {}),
    "FSDP2, checkpointed": (2, {"activations": {"mode": "checkpoint"}}),
    "FSDP2 on one rank": (1, {"parallel": {"fsdp": True}}),
    "1F1B": (2, {"parallel": {"stages": 2}}),
    "GPipe, checkpointed": (2, {"parallel": {"stages": 2, "schedule": "GPipe"}, "activations": {"mode": "checkpoint"}}),
    "Interleaved1F1B": (2, {"parallel": {"stages": 2, "schedule": "Interleaved1F1B"}}),
    "FSDP2 in stages": (4, {"parallel": {"stages": 2}}),
    "experts in stages": (2, {"parallel": {"stages": 2}, "model": {"experts": 4, "layers": 4}}),
}


@pytest.mark.parametrize("case", PARALLEL)
def test_many_ranks_are_one(ranks, case, tmp_path):
    """The same sequences, divided: the losses, evaluations and samples of one process."""
    num_ranks, sections = PARALLEL[case]
    data_ranks = num_ranks // sections.get("parallel", {}).get("stages", 1)
    common = {
        "model": {"layers": 4, **sections.get("model", {})},
        "run": {"steps": 6, "eval_every": 3, "eval_batches": 2 // data_ranks, "sample_every": 6, "sample_bytes": 6},
    }
    data = {"batch": 4 // data_ranks, "micro_batches": 2}
    values = values_of(tmp_path / "many", "forward", **{**sections, **common}, data=data)
    many = ranks.run(num_ranks, train_there, values)
    one = train(tmp_path / "one", "off", **common, data={"batch": 4, "micro_batches": 2})
    assert len({(done.loss, done.eval_loss, done.checkpoint) for done in many}) == 1
    assert losses_of(tmp_path / "many") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    assert many[0].eval_loss == pytest.approx(one.eval_loss, rel=1e-4)
    assert (tmp_path / "many" / "samples.txt").read_text() == (tmp_path / "one" / "samples.txt").read_text()
    assert tensors_of(many[0].checkpoint).keys() == tensors_of(one.checkpoint).keys()


# Models of the transformers package


def train_other(folder, plan, **sections):
    """With the stand-in for the package, whose embedding and head are one parameter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", stand_in)
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(stand_in.LLAMA))
        values = values_of(folder, plan, **sections)
        values["model"] = {"transformers": str(Path(folder) / "config.json")}
        return train_there(values)


def test_a_model_of_the_package(ranks, tmp_path):
    """It trains like ours: the same bits for every plan and after a stop, nearly the same on two ranks."""
    flat = {"optimizer": {"warm_up": 0, "last_lr_share": 1.0}}
    expected = train_other(tmp_path / "off", "off", **flat)
    run = {"run": {"steps": 5, "sample_every": 5, "sample_bytes": 4}, "activations": {"mode": "checkpoint"}}
    train_other(tmp_path / "backward", "backward", **run, **flat)
    found = train_other(tmp_path / "backward", "half", **flat)
    assert differences(found.checkpoint, expected.checkpoint) == []
    two = ranks.run(2, train_other, str(tmp_path / "two"), "streamed", data={"batch": 1}, **flat)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "off"), rel=1e-4)
    assert tensors_of(two[0].checkpoint).keys() == tensors_of(expected.checkpoint).keys()


def train_from(source, folder, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", stand_in)
        values = values_of(folder, run={"steps": 2}, data={"batch": batch})
        return train_there({**values, "model": {"weights": str(source)}})


def test_ranks_read_their_own_rows_of_weights(ranks, tmp_path):
    stand_in.save_weights(tmp_path / "source")
    one = train_from(tmp_path / "source", tmp_path / "one", 2)
    two = ranks.run(2, train_from, tmp_path / "source", tmp_path / "two", 1)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)
    assert tensors_of(two[0].checkpoint).keys() == tensors_of(one.checkpoint).keys()


def test_another_model_of_the_package_is_refused(tmp_path):
    train_other(tmp_path, "off", run={"steps": 2})
    with pytest.raises(
        ConfigError, match=r"is of another model: package transformers then and offstage now, .{,60}\. Nothing was"
    ):
        train(tmp_path, "off", run={"steps": 4})


# The learning rate


def test_learning_rate():
    settings = OptimizerSettings(lr=1.0, warm_up=4, last_lr_share=0.1)
    rates = [settings.learning_rate(step, 12) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55)  # half way down
    assert rates[11] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))
    assert dataclasses.replace(settings, warm_up=0).learning_rate(12, 12) == pytest.approx(0.1)
    assert dataclasses.replace(settings, warm_up=20).learning_rate(12, 12) == 0.6  # a run that ends in its warm-up


def test_the_learning_rate_is_used(tmp_path):
    train(tmp_path, optimizer={"warm_up": 3, "lr": 3e-3, "last_lr_share": 0.5})
    settings = OptimizerSettings(warm_up=3, lr=3e-3, last_lr_share=0.5)
    assert [row["lr"] for row in rows_of(tmp_path)] == [settings.learning_rate(step, 12) for step in range(1, 13)]


# Numbers that are not finite


def poison(monkeypatch, steps, value=math.nan):
    """The gradients of these steps are not finite, and neither is their loss."""
    loss = passes.Whole.gradients
    count = [0]

    def gradients(self, tokens, optimizer, mark):
        count[0] += 1
        if count[0] not in steps:
            return loss(self, tokens, optimizer, mark)
        found = loss(self, tokens, optimizer, mark)
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(value)
                break
        return found * value

    monkeypatch.setattr(passes.Whole, "gradients", gradients)


@pytest.mark.parametrize(("value", "clip"), [(math.nan, 1.0), (math.inf, 0.0)])
def test_steps_that_are_not_finite_are_left_out(value, clip, monkeypatch, tmp_path):
    poison(monkeypatch, {3, 4, 6}, value)
    done = train(tmp_path, optimizer={"clip": clip}, run={"steps": 7, "save_every": 1, "keep_checkpoints": 20})
    assert (done.step, done.skipped) == (7, 3)
    rows = rows_of(done.folder)
    assert [row["step"] for row in rows if row["skipped"]] == [3, 4, 6]
    assert [row["loss"] for row in rows if row["skipped"]] == [None] * 3
    at = [done.checkpoint.parent / f"step-{step:08}" for step in range(8)]
    assert differences(at[2], at[4]) == []
    assert differences(at[4], at[5]) != []
    assert all(tensor.isfinite().all() for tensor in tensors_of(at[7]).values())


def test_a_run_stops_after_too_many(monkeypatch, tmp_path):
    poison(monkeypatch, {3, 5, 6, 7})
    with pytest.raises(NotFiniteError, match=r"3 steps in a row up to step 7.*Lower optimizer.lr"):
        train(tmp_path / "poisoned", run={"most_not_finite": 3})
    saved = checkpoint.latest(tmp_path / "poisoned" / "checkpoints")
    assert saved.name == "step-00000007"
    assert all(tensor.isfinite().all() for tensor in tensors_of(saved).values())
    assert len(rows_of(tmp_path / "poisoned")) == 7


def test_a_run_stops_at_once_if_asked_to(monkeypatch, tmp_path):
    poison(monkeypatch, {3})
    with pytest.raises(NotFiniteError, match=r"1 step in a row up to step 3.*not_finite='stop'"):
        train(tmp_path, run={"not_finite": "stop"})


def test_skips_in_a_row_are_counted_over_a_resume(monkeypatch, tmp_path):
    poison(monkeypatch, {3, 4, 5, 6})
    train(tmp_path, run={"steps": 4, "most_not_finite": 3})
    with pytest.raises(NotFiniteError, match="3 steps in a row up to step 5"):
        train(tmp_path, run={"steps": 12, "most_not_finite": 3})


def test_gradients_used_up_in_backward(monkeypatch, tmp_path):
    """Without clipping no code looks at them first: the run stops, and what is saved is from before."""
    spoil = {"steps": 12, "save_every": 2}
    original = passes.Whole.gradients
    count = [0]

    def gradients(self, tokens, optimizer, mark):
        count[0] += 1
        if count[0] == 7:
            with torch.no_grad():
                self.model.norm.weight.fill_(math.inf)
        return original(self, tokens, optimizer, mark)

    monkeypatch.setattr(passes.Whole, "gradients", gradients)
    with pytest.raises(NotFiniteError, match=r"loss of step 7 is not finite.*step-00000006.*optimizer.clip=1.0"):
        train(tmp_path, "backward", optimizer={"clip": 0.0}, run=spoil)
    saved = checkpoint.latest(tmp_path / "checkpoints")
    assert saved.name == "step-00000006"
    assert all(tensor.isfinite().all() for tensor in tensors_of(saved).values())
