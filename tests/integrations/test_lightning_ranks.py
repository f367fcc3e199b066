# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric on two ranks: DDP, and FSDP2 as `ModelParallelStrategy` has it."""

import functools

import pytest
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offstage
from offstage.errors import ConfigError
from offstage.integrations.lightning import OffloadCallback, OffloadFabric
from tests.support.contract import assert_same_tree
from tests.support.lightning_runs import (
    BOTH,
    FORWARD,
    MAX_NORM,
    SMALL,
    Module,
    adamw,
    batches,
    fit,
    loss_of,
    network,
    ours,
)
from tests.support.sharded import local

EARLY = {**SMALL, "update_in_backward": True}
HALF = {**SMALL, "fraction": 0.5}


class Sharded(Module):
    """Every layer is sharded over the ranks."""

    def configure_model(self):
        shard(self.network, self.device_mesh["data_parallel"])


def shard(model, mesh):
    mesh = mesh["data_parallel"] if mesh.ndim > 1 else mesh
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


STRATEGIES = {
    "DDP": (lambda: DDPStrategy(process_group_backend="gloo"), Module),
    "FSDP2": (lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), Sharded),
}


def train(strategy, config, *, callbacks=(), **options):
    """Runs on a rank: its part of the weights, and the receipt."""
    make_strategy, kind = STRATEGIES[strategy]
    make = adamw if config is None else ours(**config)
    callbacks = [*callbacks, *([OffloadCallback()] if config is not None else [])]
    options = {"gradient_clip_val": MAX_NORM, "accumulate_grad_batches": 2, "max_epochs": 5, **options}
    module, trainer = fit(make, callbacks, kind=kind, devices=2, strategy=make_strategy(), **options)
    return finished(strategy, module, None if config is None else trainer.optimizers[0])


def finished(strategy, model, optimizer):
    assert all(isinstance(param, DTensor) == (strategy == "FSDP2") for param in model.parameters())
    return [local(param).detach().clone() for param in model.parameters()], optimizer and optimizer.receipt()


def compare(run, strategy, references, plans):
    """Runs on a rank: the receipt of each plan, whose weights have the bits of each reference."""
    expected = [run(strategy, config)[0] for config in references]
    receipts = []
    for config in plans:
        found, receipt = run(strategy, config)
        for weights in expected:
            assert_same_tree(found, weights)
        receipts.append(receipt)
    return receipts


def assert_left(answers):
    """On every rank the state was off the device."""
    for receipts in answers:
        assert all(receipt.host_state_bytes > 0 for receipt in receipts)
        assert all(receipt.total_bytes_stored > 0 for receipt in receipts)


def check_ddp(ranks, run):
    assert_left(ranks.run(2, compare, run, "DDP", [{"fraction": 0.0}], [SMALL, HALF, FORWARD]))
    assert_left(ranks.run(2, compare, run, "DDP", [None], [{**SMALL, "rule": "torch"}]))


def check_fsdp2(ranks, run, **unclipped):
    answers = ranks.run(2, compare, run, "FSDP2", [{"fraction": 0.0}], [SMALL, HALF, EARLY])
    assert_left(answers)
    for *_, early in answers:
        assert early.speculation_hits > 0
        assert early.speculation_misses > 0
        assert early.fallbacks == ()
    plain = functools.partial(run, **unclipped)  # a norm is reduced in some order
    assert_left(ranks.run(2, compare, plain, "FSDP2", [None], [{**SMALL, "rule": "torch"}]))


@pytest.mark.engine("Lightning", "DDP", "accumulation", "clipping", "overlap_forward")
def test_ddp(ranks):
    check_ddp(ranks, train)


@pytest.mark.engine("Lightning", "FSDP2", "accumulation", "update in backward, clipped")
def test_fsdp2(ranks):
    check_fsdp2(ranks, train, gradient_clip_val=None)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.engine("Lightning", "save and resume")
def test_killed_and_resumed(ranks, strategy, tmp_path):
    assert_left(ranks.run(2, kill_and_resume, strategy, str(tmp_path)))


def kill_and_resume(strategy, folder):
    """Runs on a rank. With FSDP2 Lightning saves a folder of shards (DCP)."""
    config = SMALL if strategy == "DDP" else EARLY
    expected, _ = train(strategy, {"fraction": 0.0})
    saver = ModelCheckpoint(folder, filename="{epoch}")
    train(strategy, config, callbacks=[saver], enable_checkpointing=True, fails_at=4)
    found, receipt = train(strategy, config, resume=f"{folder}/epoch=0.ckpt")
    assert_same_tree(found, expected)
    return [receipt]


def test_updates_in_backward_are_refused_with_ddp(ranks):
    """In the Trainer by the strategy: its module has no `DistributedDataParallel` inside. Fabric's has."""
    for run, name in ((train, "found DDPStrategy"), (loop, "DistributedDataParallel")):
        said = ranks.run(2, refusal, run)
        assert all(name in text for text in said)
        assert all("update_in_backward=True" in text for text in said)


def refusal(run):
    with pytest.raises(ConfigError) as caught:
        run("DDP", BOTH)
    return str(caught.value)


# Fabric


@pytest.mark.engine("Fabric", "DDP", "accumulation", "clipping", "overlap_forward")
def test_ddp_in_fabric(ranks):
    check_ddp(ranks, loop)


@pytest.mark.engine("Fabric", "FSDP2", "accumulation", "update in backward, clipped")
def test_fsdp2_in_fabric(ranks):
    check_fsdp2(ranks, loop, max_norm=None)


FABRIC_STRATEGIES = {
    "DDP": lambda: FabricDDPStrategy(process_group_backend="gloo"),
    "FSDP2": lambda: FabricModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1),
}


def loop(strategy, config, *, max_norm=MAX_NORM):
    """Runs on a rank."""
    fabric = OffloadFabric(accelerator="cpu", devices=2, strategy=FABRIC_STRATEGIES[strategy]())
    fabric.launch()
    model = fabric.setup_module(network())
    optimizer = adamw(model)
    if config is not None:
        optimizer = offstage.offload(optimizer, model, **config)
    optimizer = fabric.setup_optimizers(optimizer)
    for step in range(12):
        for number, (inputs, target) in enumerate(batches(dist.get_rank())[:2]):
            with fabric.no_backward_sync(model, enabled=number == 0):
                fabric.backward(loss_of(model(inputs), target, step))
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return finished(strategy, model, None if config is None else optimizer)
