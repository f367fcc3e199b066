# SPDX-License-Identifier: Apache-2.0
"""Loops that nobody has measured, against what the blocks of the trainer really save and multiply."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from offstage.errors import ConfigError
from offstage.planning.estimate import Batch, estimated_loop
from offstage.planning.sizes import OffloadConfig, param_sizes
from offstage.train.blocks import rotary
from offstage.train.model_sizes import SIZES, ModelConfig
from offstage.train.transformer import Transformer

NARROW = ModelConfig(layers=3, width=64, heads=4, kv_heads=4, hidden=176, vocabulary=512)
"""The proportions of the 2.7B model."""
BATCH = Batch(sequences=2, sequence=64)


def loop_of(config, batch=BATCH, **how):
    """The estimate for one of the trainer's models."""
    model = Transformer(config, device="meta", dtype=torch.float32)
    named = dict(model.named_parameters())
    sizes = param_sizes(named, OffloadConfig(weights="host"))
    layers = {size.name: size.layer for size in sizes if size.layer is not None}
    shapes = {name: tuple(param.shape) for name, param in named.items()}
    return estimated_loop(shapes, layers, batch, itemsize=4, **(how or {"tflops": 1.0}))


def saved_by(model, run):
    """Bytes of all storages that `run` saves for backward, but for parameters."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(nbytes for address, (nbytes, _) in found.items() if address not in own)


@pytest.mark.parametrize("config", [NARROW, dataclasses.replace(NARROW, kv_heads=1, hidden=224)])
def test_saved_bytes(config):
    torch.manual_seed(0)
    model = Transformer(config, device="cpu", dtype=torch.float32)
    x = torch.randn(BATCH.sequences, BATCH.sequence, config.width, requires_grad=True)
    table = rotary(config, x)
    real = saved_by(model, lambda: model.blocks[1](x, table))
    assert loop_of(config).layers[1].saved_bytes == pytest.approx(real, rel=0.15)
    assert loop_of(config).layers[1].input_bytes == x.nbytes


def test_operations():
    """A rate of 1 TFLOP/s: milliseconds are 1e9 operations, by torch's own count."""
    model = Transformer(NARROW, device="cpu", dtype=torch.float32)
    tokens = torch.randint(0, 256, (BATCH.sequences, BATCH.sequence))
    with FlopCounterMode(display=False) as counted:
        model(tokens)
    loop = loop_of(NARROW)
    causal = sum(layer.forward_ms for layer in loop.layers) + loop.turn_ms / 3
    assert causal * 1e9 == pytest.approx(counted.get_total_flops(), rel=0.15)  # it counts attention in full, or not
    assert loop.backward_ms == pytest.approx(2 * loop.forward_ms)


def test_the_usual_figure_for_a_block_of_gpt2():
    """34 bytes per token and feature, in bf16."""
    shapes = {"h.0.a": (96, 288), "h.0.b": (96, 96), "h.0.c": (96, 384), "h.0.d": (384, 96), "wte": (1000, 96)}
    layers = {name: 0 for name in shapes if name != "wte"}
    loop = estimated_loop(shapes, layers, BATCH, itemsize=2, tflops=1.0)
    assert 34 <= loop.layers[0].saved_bytes / BATCH.tokens / 96 <= 45


def test_experts_are_visited_by_some_tokens():
    dense = loop_of(NARROW).layers[0]
    one_each = dataclasses.replace(BATCH, experts_per_token=1)
    mixed = loop_of(dataclasses.replace(NARROW, experts=8, experts_per_token=1), one_each).layers[0]
    assert mixed.forward_ms == pytest.approx(dense.forward_ms, rel=0.05)
    shapes = {f"layers.0.mlp.experts.{i}.up.weight": (128, 64) for i in range(8)}
    each = estimated_loop(shapes, dict.fromkeys(shapes, 0), BATCH, itemsize=2, tflops=1.0)
    fused = estimated_loop({"layers.0.up": (8, 128, 64)}, {"layers.0.up": 0}, BATCH, itemsize=2, tflops=1.0)
    assert each.layers[0].saved_bytes == fused.layers[0].saved_bytes


def test_given_times_are_divided():
    loop = loop_of(SIZES["1M"], times_ms=(10.0, 20.0))
    assert loop.compute_ms == pytest.approx(30.0)
    assert len({layer.forward_ms for layer in loop.layers}) == 1


def test_larger_batches_take_more():
    small, large = loop_of(NARROW), loop_of(NARROW, dataclasses.replace(BATCH, sequences=4))
    assert large.layers[0].saved_bytes == 2 * small.layers[0].saved_bytes
    assert (large.compute_ms, large.turn_bytes) == (pytest.approx(2 * small.compute_ms), 2 * small.turn_bytes)


def test_refusals():
    for how in ({"tflops": 1.0, "times_ms": (1.0, 1.0)}, {"tflops": None}):
        with pytest.raises(ConfigError, match="either tflops or times_ms"):
            loop_of(NARROW, **how)
    with pytest.raises(ConfigError, match="expects a model with layers"):
        estimated_loop({"weight": (4, 4)}, {}, BATCH, itemsize=2, tflops=1.0)
    with pytest.raises(ConfigError, match="at least 1 for sequences; found 0"):
        Batch(sequences=0, sequence=8)
