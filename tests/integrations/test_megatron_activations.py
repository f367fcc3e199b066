# SPDX-License-Identifier: Apache-2.0
"""Saved tensors of Megatron's transformer layers leave and return, in pipelines and with recompute: the same bits."""

import dataclasses

import pytest
import torch
from torch import nn

from offstage import ConfigError, OffloadIneffectiveError
from offstage.integrations.megatron import config_from_megatron, offload, offload_activations
from tests.support import megatron
from tests.support.contract import SMALL
from tests.support.training import lazily, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

SEEDS = [None, 1]
INPUT = megatron.LENGTH * megatron.SEQUENCES * 16 * 2
"""Bytes of a layer's input."""


@pytest.fixture
def session(process_group):
    with megatron.session():
        yield


def trained(config=None, *, seed=None, steps=2, model=None):
    """Weights, losses and gradient norms after some steps, and what moved. `config`: `None` leaves everything."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    chunks = megatron.make_model(torch.bfloat16, **{"num_layers": 4, **(model or {})})
    optimizer = megatron.make_optimizer(chunks)
    with lazily(seed):
        handle = None if config is None else offload_activations(chunks, **{"min_bytes": 64, **config})
        seen = megatron.train(chunks, optimizer, steps)
        found = [*megatron.weights(chunks)]
        for losses, _, norm in seen:
            found += [*losses, torch.tensor(norm)]
        if handle is not None:
            handle.remove()
    return found, handle


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = {
    "plain": {},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "recompute full": FULL,
    "recompute full, by two": {**FULL, "num_layers": 5, "recompute_num_layers": 2},
    "recompute full, with dropout": {**FULL, "hidden_dropout": 0.1},
    "recompute blocks": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    "recompute core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    # Without biases: Megatron's recomputed MLP returns its bias, which becomes a part of its own graph, without end.
    "recompute mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": False},
    "recompute moe": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
        "num_moe_experts": 2,
        "moe_router_topk": 2,
    },
    "experts": {"num_moe_experts": 2, "moe_router_topk": 2},
}


# World 1


@pytest.mark.engine("Megatron-core", "activation offload", "lazy lanes")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_bits(session, model, seed):
    expected, _ = trained(model=MODELS[model])
    found, handle = trained({}, model=MODELS[model], seed=seed)
    assert_same(found, expected)
    assert handle.bytes_offloaded > 0
    assert handle.bytes_returned > 0


def test_recomputed_layers_send_their_inputs_away(session):
    _, handle = trained({}, model=FULL)
    (receipt,) = handle.receipts()
    mask = megatron.LENGTH**2
    assert receipt.passes == 4
    assert receipt.bytes_offloaded == 3 * INPUT + mask  # of four layers; the last stays
    assert receipt.total_bytes_offloaded == 4 * receipt.bytes_offloaded


def test_of_layers_recomputed_together_the_first_ones_input_is_saved(session):
    _, handle = trained({}, model=MODELS["recompute full, by two"])
    assert handle.receipts()[0].bytes_offloaded == 2 * INPUT + megatron.LENGTH**2


def test_a_number_of_layers(session):
    sizes = []
    for layers in (1, 2, 3, 4):
        expected, _ = trained()
        found, handle = trained({"layers": layers})
        assert_same(found, expected)
        sizes.append(handle.receipts()[0].bytes_offloaded)
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]  # the last layer stays


def test_all_layers_leave_if_none_is_kept(session):
    _, kept = trained({}, model=FULL)
    expected, _ = trained(model=FULL)
    found, handle = trained({"keep_last": 0}, model=FULL)
    assert_same(found, expected)
    assert handle.receipts()[0].bytes_offloaded == kept.receipts()[0].bytes_offloaded + INPUT


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "modules",
    [("core_attn", "attn_proj"), ("attn_norm", "qkv_linear", "mlp_norm"), ("fused_group_mlp",), ("expert_fc1",)],
)
def test_parts_of_layers(session, modules, seed):
    model = MODELS["experts" if modules[0] in ("fused_group_mlp", "expert_fc1") else "plain"]
    expected, whole = trained({}, model=model)
    found, handle = trained({"modules": modules}, model=model, seed=seed)
    assert_same(found, expected)
    assert 0 < handle.bytes_offloaded < whole.bytes_offloaded


def test_flags_of_megatron(session):
    """What its own offload would be asked for, by the settings that these flags become."""
    chunks = megatron.make_model(torch.bfloat16, num_layers=4, **FULL)
    asked = {"cpu_offloading": True, "cpu_offloading_num_layers": 2, "num_layers": 4, **FULL}
    flags = config_from_megatron(asked)
    with offload_activations(chunks, dataclasses.replace(flags.activations, min_bytes=64), modules=flags.modules) as on:
        megatron.train(chunks, megatron.make_optimizer(chunks), 1)
    assert on.receipts()[0].bytes_offloaded == 2 * INPUT + megatron.LENGTH**2


@pytest.mark.parametrize("seed", SEEDS)
def test_beside_state_that_is_offloaded(session, seed):
    """Both share the link; a race between them is one, too."""
    expected = None
    for settings in ({"fraction": 0.0}, SMALL, {**SMALL, "window": "all"}):
        chunks = megatron.make_model(torch.bfloat16, num_layers=4, ddp={"use_distributed_optimizer": True})
        optimizer = megatron.make_optimizer(chunks)
        with lazily(seed):
            offload(optimizer, model=chunks, **settings)
            handle = offload_activations(chunks, min_bytes=64)
            megatron.train(chunks, optimizer, 3)
            found = megatron.weights(chunks)
            handle.remove()
        assert handle.bytes_returned > 0
        expected = expected or found
        assert_same(found, expected)


def test_removed_nothing_leaves(session):
    chunks = megatron.make_model(torch.bfloat16, num_layers=4)
    optimizer = megatron.make_optimizer(chunks)
    handle = offload_activations(chunks, min_bytes=64)
    megatron.train(chunks, optimizer, 1)
    handle.remove()
    moved = handle.bytes_offloaded
    megatron.train(chunks, optimizer, range(1, 2))
    assert handle.bytes_offloaded == moved > 0


# Pipelines


def in_stages(_loaded, config, seed, virtual, model):
    """What `trained` finds on one of two ranks, and the bytes that left and returned in each of its chunks."""
    with megatron.session(pp=2, virtual=virtual):
        model = {"num_layers": 4, "deallocate_pipeline_outputs": True, **model}
        if virtual:
            model |= {"overlap_p2p_comm": False, "batch_p2p_comm": True}
        found, handle = trained(config, seed=seed, model=model)
    receipts = () if handle is None else handle.receipts()
    return found, tuple((one.bytes_offloaded, one.total_bytes_returned) for one in receipts)


@pytest.mark.engine("Megatron-core", "activation offload", "lazy lanes")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", [{}, FULL], ids=["plain", "recompute"])
def test_a_pipeline_of_two_stages(ranks, model, seed):
    expected = ranks.run(2, in_stages, megatron.LOADED, None, seed, None, model)
    found = ranks.run(2, in_stages, megatron.LOADED, {}, seed, None, model)
    for (weights, moved), (other, _) in zip(found, expected, strict=True):
        assert_same(weights, other)
        assert len(moved) == 1
        assert all(offloaded > 0 and returned > 0 for offloaded, returned in moved)
    if model:
        first, last = (moved[0][0] for _, moved in found)
        assert first - last == INPUT  # the stage that is not the last keeps no layer


def test_a_pipeline_of_two_virtual_chunks_in_each_stage(ranks):
    model = {"num_layers": 8}
    expected = ranks.run(2, in_stages, megatron.LOADED, None, None, 2, model)
    found = ranks.run(2, in_stages, megatron.LOADED, {}, None, 2, model)
    for (weights, moved), (other, _) in zip(found, expected, strict=True):
        assert_same(weights, other)
        assert len(moved) == 2
        assert all(offloaded > 0 and returned > 0 for offloaded, returned in moved)


# Refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layers": "auto"}, r"offstage\.fit\(model, optimizer, device_peak"),
        ({"layers": [nn.Identity()]}, "found a list"),
        ({"weights": True}, "in one buffer on the device"),
        ({"modules": ("attn",)}, "found 'attn'"),
        ({"modules": ("core_attn",), "layers": 2}, "Leave one of them out"),
    ],
)
def test_settings_that_cannot_be_used(session, config, message):
    with pytest.raises(ConfigError, match=message):
        trained(config)


def test_models_that_cannot_be_used(session):
    with pytest.raises(ConfigError, match="expects Megatron's model chunks; found str"):
        offload_activations(["model"])
    with pytest.raises(OffloadIneffectiveError, match="no TransformerBlock has layers"):
        offload_activations(nn.Linear(2, 2))
    with pytest.raises(OffloadIneffectiveError, match="no layer has a module of its own for expert_fc1"):
        trained({"modules": ("expert_fc1",)})


def test_layers_that_empty_saved_tensors_are_refused(session):
    model = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    with pytest.raises(ConfigError, match="'layernorm', with which Megatron empties"):
        trained({}, model=model)


def test_megatrons_own_offload_is_refused_beside_it(session):
    chunks = megatron.make_model(torch.bfloat16, num_layers=4)
    chunks[0].config.cpu_offloading = True
    with pytest.raises(ConfigError, match=r"cpu_offloading of Megatron is on.*switch_off\(args\)"):
        offload_activations(chunks)


def test_a_second_time_is_refused_and_takes_nothing_away(session):
    chunks = megatron.make_model(torch.bfloat16, num_layers=4)
    handle = offload_activations(chunks, min_bytes=64)
    with pytest.raises(ConfigError, match="offloaded already"):
        offload_activations(chunks)
    megatron.train(chunks, megatron.make_optimizer(chunks), 1)
    assert handle.bytes_offloaded > 0
