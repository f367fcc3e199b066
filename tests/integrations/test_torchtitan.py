# SPDX-License-Identifier: Apache-2.0
"""torchtitan's containers, clipping, schedulers and DCP checkpoints over offloaded optimizers, on one rank and on two.

The loop is that of its `Trainer.train_step`, whose module needs Triton and a device.
"""

import contextlib
import functools
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
)
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.distributed.utils import clip_grad_norm_

import offstage
from offstage.errors import ConfigError
from offstage.integrations import packages
from offstage.integrations.torchtitan import OffloadedOptimizersContainer, offload
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from tests.support.contract import assert_same_tree
from tests.support.sharded import local

OFF = {"fraction": 0.0}
SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}
PLANS = {
    "all": SMALL,
    "half": {**SMALL, "fraction": 0.5},
    "window": {**SMALL, "window": "all"},
    "by the host": {**SMALL, "update_on": "host"},
}
FORWARD = {**SMALL, "overlap_forward": True}
TORCH = {**SMALL, "rule": "torch"}
WIDTH = 48
STEPS = 10
MAX_NORM = 0.2


@dataclass(kw_only=True, slots=True)
class State:
    """What torchtitan's trainer keeps beside the model."""

    step: int = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, values):
        self.step = values["step"]


def groups(**options):
    """Biases have their own options, as torchtitan's recipes have it."""
    config = default_adamw(lr=0.01, **options)
    bare = ParamGroupConfig(
        pattern=r"\.bias$", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.02, "weight_decay": 0.0, **options}
    )
    config.param_groups.insert(0, bare)
    return config


class Job:
    """A model, its optimizers, schedulers and checkpoints, as torchtitan's `Trainer.__init__` makes them."""

    def __init__(self, settings, *, folder=None, dtype=torch.float32, shard=False, parts=1, async_mode="disabled"):
        """`settings` is `None` for torchtitan's own container."""
        torch.manual_seed(0)
        self.state = State()
        blocks = [nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(2)]
        model = nn.Sequential(*blocks).to(dtype)
        if shard:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model, self.dtype = model, dtype
        self.parts = [model] if parts == 1 else [nn.ModuleDict({str(i): block}) for i, block in enumerate(blocks)]
        config = groups() if settings is None else offload(groups(), **settings)
        self.optimizers = config.build(model_parts=self.parts)
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.checkpoints = CheckpointManager.Config(
            enable=folder is not None, interval=4, last_save_model_only=False, keep_latest_k=0, async_mode=async_mode
        ).build(
            dataloader=None,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            sd_adapter=None,
            base_folder=str(folder or ""),
        )

    def train(self, steps=STEPS, *, max_norm=MAX_NORM):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.checkpoints.load()
        while self.state.step < steps:
            self.state.step += 1
            self.optimizers.zero_grad()
            for micro_batch in range(2):
                generator = torch.Generator().manual_seed(1000 * rank + 10 * self.state.step + micro_batch)
                inputs, target = torch.randn(2, 8, WIDTH, generator=generator).to(self.dtype)
                nn.functional.mse_loss(self.model(inputs), target).backward()
            clip_grad_norm_([p for part in self.parts for p in part.parameters()], max_norm, foreach=True)
            self.checkpoints.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.checkpoints.save(self.state.step)
        self.checkpoints.maybe_wait_for_saving()
        self.checkpoints.close()
        return self

    def weights(self):
        for optimizer in self.optimizers:
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
        return [local(param).detach().clone() for param in self.model.parameters()]

    def values(self):
        """All state and options, by name."""
        flat = self.optimizers.state_dict()
        return {name: local(one).clone() if isinstance(one, torch.Tensor) else one for name, one in flat.items()}

    def assert_left(self):
        for optimizer in self.optimizers:
            receipt = optimizer.receipt()
            assert receipt.host_state_bytes > 0
            assert receipt.total_bytes_stored > 0
            assert receipt.fallbacks == ()


# The same bits


@pytest.mark.engine("torchtitan", "same bits", "clipping", "accumulation")
@pytest.mark.parametrize("plan", PLANS)
def test_same_bits(plan):
    job = Job(PLANS[plan]).train()
    assert_same_tree(job.weights(), Job(OFF).train().weights())
    job.assert_left()


@pytest.mark.engine("torchtitan", "overlap_forward", "lazy lanes")
@pytest.mark.parametrize("lazy_seed", [None, 0, 1])
def test_overlap_forward_without_fsdp(process_group, lazy_seed, tmp_path):
    """Saves read weights between a step and the next forward."""
    lanes = use_lanes(lambda device: LazyLanes(device, seed=lazy_seed))
    with lanes if lazy_seed is not None else contextlib.nullcontext():
        job = Job(FORWARD, folder=tmp_path).train()
    assert_same_tree(job.weights(), Job(OFF).train().weights())
    job.assert_left()
    assert_same_tree(Job(OFF, folder=tmp_path).train(8).weights(), Job(OFF).train(8).weights())


@pytest.mark.engine("torchtitan", "same bits")
def test_torchs_own_arithmetic():
    """With `rule="torch"`: the bits of a job that knows nothing of offstage."""
    plain, job = Job(None).train(), Job(TORCH).train()
    assert isinstance(plain.optimizers, OptimizersContainer)
    assert_same_tree(job.weights(), plain.weights())
    assert_same_tree(job.values(), plain.values())
    job.assert_left()


def test_two_model_parts():
    """As of a pipeline: one optimizer each, and one flat state dict."""
    job, reference = Job(SMALL, parts=2).train(), Job(OFF, parts=2).train()
    assert len(job.optimizers) == 2
    assert_same_tree(job.weights(), reference.weights())
    assert_same_tree(job.values(), reference.values())
    job.assert_left()


@pytest.mark.engine("torchtitan", "sleep and wake")
def test_sleeping_between_steps():
    job = Job(SMALL).train(5)
    offstage.sleep(job.model, *job.optimizers)
    assert offstage.asleep(job.model, *job.optimizers)
    offstage.wake(job.model, *job.optimizers)
    assert_same_tree(job.train().weights(), Job(OFF).train().weights())


# The config


@dataclass(kw_only=True, slots=True)
class JobConfig(Configurable.Config):
    """As much of `Trainer.Config` as overrides go through."""

    optimizer: OptimizersContainer.Config = field(default_factory=default_adamw)
    override: OverrideConfig = field(default_factory=OverrideConfig)


def test_overridden_from_the_command_line():
    word = 'offstage.integrations.torchtitan.offload={"fraction": 0.5, "min_bytes": 0, "chunk_bytes": "16KiB"}'
    config = JobConfig(override=OverrideConfig(imports=parse_cli_imports([word])))
    config.optimizer.implementation = "foreach"
    (said,) = apply_overrides(config.override, config)
    assert "fraction=0.5" in said
    assert config.optimizer.implementation == "foreach"
    assert config.optimizer.param_groups == default_adamw().param_groups
    assert config.to_dict()["optimizer"]["chunk_bytes"] == "16KiB"
    (optimizer,) = config.optimizer.build(model_parts=[nn.Linear(64, 64)])
    assert optimizer.config.fraction == 0.5
    assert optimizer.param_groups[0]["foreach"]
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


class Other(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (default_adamw, {"update_in_backward": True}, "update_in_backward=True .* train_step"),
        (default_adamw, {"implementation": "fused_opt_states_bf16"}, "fused_opt_states_bf16.* state_dtype='bfloat16'"),
        (default_adamw, {"fraction": 2.0}, "fraction"),
        (default_adamw, {"fractoin": 0.5}, "fractoin.* expected some of fraction, "),
        (Other.Config, {}, "whose own code would be lost"),
    ],
)
def test_refusals(config, settings, says):
    with pytest.raises(ConfigError, match=says):
        offload(config(), **settings)


@pytest.mark.parametrize("name", ["device_budget", "host_budget"])
def test_sizes_with_several_optimizers(name):
    with pytest.raises(ConfigError, match=f"{name} would hold for each of 2 optimizers"):
        Job({name: "1MiB", "min_bytes": 0}, parts=2)
    Job({name: "1MiB", "min_bytes": 0, **({"fraction": 1.0} if name == "host_budget" else {})})


@pytest.mark.parametrize("found", ["0.2.1", "0.4.0", None])
def test_another_version(found, monkeypatch):
    monkeypatch.delitem(sys.modules, "offstage.integrations.torchtitan")
    error = packages.PackageNotFoundError("torchtitan") if found is None else None
    if found is None:
        monkeypatch.setitem(sys.modules, "torchtitan.components.optimizer", None)
    with (
        mock.patch.object(packages, "version", return_value=found, side_effect=error),
        pytest.raises(ConfigError, match=rf"torchtitan .*found {found or 'none'}.*pip install 'torchtitan>=0.3,<0.4'"),
    ):
        importlib.import_module("offstage.integrations.torchtitan")


# Checkpoints


def resumed(folder, first, second, **options):
    """A job that saves and is killed some steps later, and one that goes on from what it saved."""
    Job(first, folder=folder, **options).train(7)
    job = Job(second, folder=folder, **options)
    assert job.checkpoints.load()
    assert job.state.step == 4
    return job.train()


@pytest.mark.engine("torchtitan", "save and resume")
@pytest.mark.parametrize("plan", PLANS)
def test_killed_and_resumed(process_group, plan, tmp_path):
    reference, job = Job(OFF).train(), resumed(tmp_path, PLANS[plan], PLANS[plan])
    assert (tmp_path / "checkpoint" / "step-4" / ".metadata").exists()
    assert_same_tree(job.weights(), reference.weights())
    assert_same_tree(job.values(), reference.values())
    job.assert_left()


@pytest.mark.engine("torchtitan", "save and resume")
@pytest.mark.parametrize("dtype", ["fp32", "split"])
def test_masters_are_resumed(process_group, dtype, tmp_path):
    settings = {**SMALL, "master_weights": dtype}
    reference = Job({**OFF, "master_weights": dtype}, dtype=torch.bfloat16).train()
    job = resumed(tmp_path, settings, settings, dtype=torch.bfloat16)
    assert_same_tree(job.weights(), reference.weights())
    assert_same_tree(job.values(), reference.values())
    assert any(name.endswith("master_weight") for name in job.values())


@pytest.mark.parametrize("turn", ["plain to ours", "ours to plain"])
def test_checkpoints_are_torchtitans_own(process_group, turn, tmp_path):
    reference = Job(None).train()
    first, second = (None, TORCH) if turn == "plain to ours" else (TORCH, None)
    job = resumed(tmp_path, first, second)
    assert_same_tree(job.weights(), reference.weights())
    assert_same_tree(job.values(), reference.values())


def test_plain_16_bit_checkpoint(process_group, tmp_path):
    """It has no masters, and DCP asks for what the state dict has: once it is told, they come from the weights."""
    Job(None, folder=tmp_path, dtype=torch.bfloat16).train(7)
    with pytest.raises(CheckpointException, match="master_weight"):
        Job(SMALL, folder=tmp_path, dtype=torch.bfloat16).train()
    jobs = [
        Job({**settings, "plain_checkpoint": True}, folder=tmp_path, dtype=torch.bfloat16).train(steps)
        for settings, steps in ((OFF, 7), (SMALL, 7))
    ]
    assert_same_tree(jobs[0].values(), jobs[1].values())
    assert jobs[1].state.step == 7
    loaded = Job({**SMALL, "plain_checkpoint": True}, folder=tmp_path, dtype=torch.bfloat16).train(4)
    state = loaded.values()
    for name, weight in loaded.model.named_parameters():
        assert_same_tree(state[f"state.{name}.master_weight"], weight.detach().float())


def test_plain_checkpoint_that_does_not_come(process_group, tmp_path):
    """Nothing is loaded: what is then saved has its masters."""
    job = Job({**SMALL, "plain_checkpoint": True}, folder=tmp_path, dtype=torch.bfloat16).train(4)
    assert sum(name.endswith("master_weight") for name in job.values()) == 8
    Job(SMALL, folder=tmp_path, dtype=torch.bfloat16).train(5)


def test_state_dict_before_the_first_step():
    """torchtitan makes a step without a learning rate first: weights stay, and so does nothing else."""
    job = Job(SMALL)
    before = job.weights()
    assert any(name.endswith("exp_avg_sq") for name in job.values())
    assert_same_tree(job.weights(), before)
    assert all(param.grad is None for param in job.model.parameters())


def test_saved_while_training_goes_on(process_group, tmp_path):
    """`async_mode="async"` copies the state first: later steps do not reach what is being written."""
    Job(SMALL, folder=tmp_path / "async", async_mode="async").train(7)
    Job(SMALL, folder=tmp_path / "plain").train(4)
    jobs = [Job(SMALL, folder=tmp_path / name).train(4) for name in ("async", "plain")]
    assert all(job.state.step == 4 for job in jobs)
    assert_same_tree(jobs[0].values(), jobs[1].values())
    assert_same_tree(jobs[0].weights(), jobs[1].weights())


# Two ranks


@pytest.mark.engine("torchtitan", "FSDP2", "same bits", "save and resume")
def test_fsdp2(ranks, tmp_path):
    ranks.run(2, compare, str(tmp_path))


def compare(folder):
    """Runs on a rank. FSDP2 gathers weights ahead of their module: `overlap_forward` is off, and says so."""
    job = functools.partial(Job, shard=True)
    reference = job(OFF).train()
    assert all(isinstance(param, DTensor) for param in reference.model.parameters())
    for plan in PLANS.values():
        found = job(plan).train()
        assert_same_tree(found.weights(), reference.weights())
        found.assert_left()
    (optimizer,) = job(FORWARD).train().optimizers
    assert "FSDP2 gathers" in optimizer.receipt().fallbacks[0]
    again = resumed(Path(folder) / "ours", PLANS["half"], PLANS["all"], shard=True)
    assert_same_tree(again.weights(), reference.weights())
    assert_same_tree(again.values(), reference.values())
    again.assert_left()
    plain = job(None).train()
    for number, (first, second) in enumerate([(None, TORCH), (TORCH, None)]):
        other = resumed(Path(folder) / str(number), first, second, shard=True)
        assert_same_tree(other.weights(), plain.weights())
        assert_same_tree(other.values(), plain.values())


def test_the_container_is_torchtitans():
    assert issubclass(OffloadedOptimizersContainer, OptimizersContainer)
    assert OffloadedOptimizersContainer.Config._owner is OffloadedOptimizersContainer
