# SPDX-License-Identifier: Apache-2.0
"""`OffloadFabric`: a loop that is written for Lightning's Fabric, with every mode."""

import contextlib
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric

import offstage
from offstage.errors import ConfigError, OffstageError
from offstage.integrations.lightning import OffloadFabric
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import assert_same_tree, assert_same_weights
from tests.support.lightning_runs import BOTH, MAX_NORM, PLANS, SMALL, adamw, batches, loss_of, network

OFF = {"fraction": 0.0}


def start(config, *, lazy_seed=None, kind=OffloadFabric):
    """Everything that a loop needs; `config` is `None` for plain torch."""
    fabric = kind(accelerator="cpu", devices=1)
    model = fabric.setup_module(network())
    lanes = use_lanes(lambda device: LazyLanes(device, seed=lazy_seed))
    with lanes if lazy_seed is not None else contextlib.nullcontext():
        optimizer = adamw(model) if config is None else offstage.offload(adamw(model), model, **config)
    return fabric, model, fabric.setup_optimizers(optimizer)


def loop(fabric, model, optimizer, steps=range(12), *, micro_batches=1, max_norm=MAX_NORM):
    data = batches()
    for step in steps:
        for number in range(micro_batches):
            inputs, target = data[(step + number) % len(data)]
            with fabric.no_backward_sync(model, enabled=number < micro_batches - 1):
                fabric.backward(loss_of(model(inputs), target, step))
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, offstage.OffloadedOptimizer):
        optimizer.synchronize()  # the loop is the user's, and so is this
    return model, optimizer


def run(config, *, lazy_seed=None, kind=OffloadFabric, **options):
    return loop(*start(config, lazy_seed=lazy_seed, kind=kind), **options)


@pytest.mark.engine("Fabric", "same bits", "clipping", "overlap_forward")
@pytest.mark.parametrize("plan", PLANS)
def test_same_bits(plan):
    reference, _ = run(OFF)
    model, optimizer = run(PLANS[plan])
    assert_same_weights(model, reference)
    receipt = optimizer.receipt()
    assert receipt.host_state_bytes > 0
    assert receipt.fallbacks == ()


@pytest.mark.engine("Fabric", "same bits")
def test_torchs_own_arithmetic():
    reference, plain = run(None, kind=Fabric)
    model, optimizer = run({**BOTH, "rule": "torch"})
    assert_same_weights(model, reference)
    assert_same_tree(optimizer.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.engine("Fabric", "update in backward, clipped", "accumulation", "lazy lanes")
@pytest.mark.parametrize("lazy_seed", [None, 0, 1])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_clipped_updates_in_backward(micro_batches, lazy_seed):
    options = {"micro_batches": micro_batches, "max_norm": MAX_NORM * micro_batches**0.75}
    reference, _ = run(OFF, **options)
    model, optimizer = run(BOTH, lazy_seed=lazy_seed, **options)
    assert_same_weights(model, reference)
    receipt = optimizer.receipt()
    assert receipt.speculation_hits > 0
    assert receipt.speculation_misses > 0
    assert receipt.fallbacks == ()


def test_accumulation_without_clipping():
    reference, _ = run(OFF, micro_batches=3, max_norm=None)
    model, optimizer = run(BOTH, micro_batches=3, max_norm=None)
    assert_same_weights(model, reference)
    assert runtime_of(optimizer).overlap.selection.params  # which are updated in backward


def test_fabrics_own_class_cannot():
    """Otherwise the tests above would not show what `OffloadFabric` is for."""
    with pytest.raises(OffstageError, match="clip_grad_norm_"):
        run(BOTH, kind=Fabric)


@pytest.mark.engine("Fabric", "save and resume")
@pytest.mark.parametrize("plan", ["half", "forward, backward"])
def test_saved_and_resumed(plan, tmp_path):
    reference, expected = run(OFF)
    fabric, model, optimizer = start(PLANS[plan])
    loop(fabric, model, optimizer, range(5))
    fabric.save(tmp_path / "state", {"model": model, "optimizer": optimizer, "step": 5})
    loop(fabric, model, optimizer, range(5, 7))  # lost with the process
    fabric, model, optimizer = start(PLANS[plan])
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "state", state)
    loop(fabric, model, optimizer, range(state["step"], 12))
    assert_same_weights(model, reference)
    assert_same_tree(optimizer.state_dict(), expected.state_dict())
    assert optimizer.receipt().host_state_bytes > 0


@pytest.mark.parametrize("config", [OFF, SMALL, BOTH])
def test_norm_that_is_not_finite(config):
    fabric, model, optimizer = start(config)
    loop(fabric, model, optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    for refuses in (True, False):
        fabric.backward(loss_of(model(torch.full((8, 48), float("inf"))), torch.zeros(8, 48), 0))
        expects = pytest.raises(RuntimeError, match="the gradients is nan, so they cannot be clipped")
        with expects if refuses else contextlib.nullcontext():
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=refuses)
            optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        assert_same_tree([param.detach() for param in model.parameters()], before)


def test_two_optimizers():
    """Only those of the module that does not synchronise take its gradients as not final."""

    def trained(config):
        fabric = OffloadFabric(accelerator="cpu", devices=1)
        models = [fabric.setup_module(network()) for _ in range(2)]
        made = [offstage.offload(adamw(model), model, **config) for model in models]
        optimizers = fabric.setup_optimizers(*made)
        for step, (inputs, target) in enumerate(batches() * 2):
            with fabric.no_backward_sync(models[0]):
                fabric.backward(loss_of(models[0](inputs), target, step))
                fabric.backward(loss_of(models[1](inputs), target, step))
            fabric.backward(loss_of(models[0](target), inputs, step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.synchronize()
        return models, optimizers

    reference, _ = trained(OFF)
    models, optimizers = trained(BOTH)
    for model, expected in zip(models, reference, strict=True):
        assert_same_weights(model, expected)
    for optimizer in optimizers:
        assert runtime_of(optimizer).overlap.selection.params
        assert optimizer.receipt().fallbacks == ()


def test_clipping_by_value():
    fabric, model, optimizer = start(SMALL)
    fabric.backward(model(torch.ones(1, 48)).sum())
    assert fabric.clip_gradients(model, optimizer, clip_val=2**-10) is None
    assert max(float(param.grad.abs().max()) for param in model.parameters()) <= 2**-10
    fabric, model, optimizer = start(BOTH)
    with pytest.raises(ConfigError, match=r"clip_val=0.0009765625"):
        fabric.clip_gradients(model, optimizer, clip_val=2**-10)
    with pytest.raises(ValueError, match="either"):
        fabric.clip_gradients(model, optimizer)


def test_offloaded_before_the_module_moves():
    fabric = OffloadFabric(accelerator="cpu", devices=1)
    model = network()
    optimizer = offstage.offload(adamw(model), model, **SMALL)
    with (
        mock.patch.object(OffloadFabric, "device", torch.device("meta")),
        pytest.raises(ConfigError, match=r"move parameters to meta after offload.* fabric.setup_module"),
    ):
        fabric.setup(model, optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    loop(fabric, model, optimizer)
    assert optimizer.receipt().steps == 12


def test_replanned_through_fabrics_wrapper():
    reference, _ = run(OFF)
    fabric, model, optimizer = start(SMALL)
    loop(fabric, model, optimizer, range(5))
    optimizer.replan(fraction=0.5)
    loop(fabric, model, optimizer, range(5, 12))
    assert_same_weights(model, reference)
    assert optimizer.optimizer.config.fraction == 0.5
