# SPDX-License-Identifier: Apache-2.0
"""Our transformer computes what its formulas say, alone, compiled, checkpointed, sharded and in stages."""

import dataclasses
import itertools
import json
import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import offstage
from offstage.errors import ConfigError
from offstage.train import blocks, transformer
from offstage.train.config import ModelSettings, SizeName
from offstage.train.model import (
    SIZES,
    ModelConfig,
    Transformer,
    build,
    config_of,
    mean_loss,
    num_active_parameters,
    num_parameters,
    stages,
)
from tests.support import stand_in
from tests.support.lives import end_step

DENSE = ModelConfig(layers=3, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=64)
EXPERTS = dataclasses.replace(DENSE, experts=5, experts_per_token=2)
KINDS = {"dense": DENSE, "experts": EXPERTS}
EVERY_KIND = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


def sample(batch=4, length=17, vocabulary=64, seed=0):
    """Tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model):
    return {name: param.grad for name, param in model.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def farthest(found, expected):
    """The largest difference, as a share of the largest value of its tensor."""
    assert found.keys() <= expected.keys()
    pairs = [(found[name].detach(), expected[name].detach()) for name in found]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


# Sizes


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_the_parameters_of_their_names(name):
    number = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    assert abs(num_parameters(SIZES[name]) / number - 1) < 0.06


def test_names_are_those_of_the_settings():
    assert tuple(SIZES) == SizeName.__args__


def test_the_workload_of_the_figures():
    config = SIZES["2.7B"]
    assert (config.layers, config.width, config.hidden, config.heads) == (32, 2560, 6912, 20)
    assert num_parameters(config) / 1e9 == pytest.approx(2.70, abs=0.005)
    assert num_parameters(SIZES["18B"]) >= 18e9


@pytest.mark.parametrize("config", [*SIZES.values(), DENSE, EXPERTS])
def test_parameters_are_counted(config):
    model = Transformer(config, device="meta")
    assert sum(param.numel() for param in model.parameters()) == num_parameters(config)


def test_active_parameters():
    assert num_active_parameters(DENSE) == num_parameters(DENSE)
    idle = 3 * 3 * (3 * 32 * 48)  # three of five experts in three blocks
    assert num_active_parameters(EXPERTS) == num_parameters(EXPERTS) - idle


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, r"layers expects at least 1; found 0"),
        ({"heads": 5}, r"width expects an even number of features for each of the heads=5; found 32. Use 30"),
        ({"heads": 32, "kv_heads": 32}, r"width expects an even number .* heads=32; found 32. Use 64"),
        ({"kv_heads": 3}, r"kv_heads expects a divisor of heads=4; found 3. Use 2"),
        ({"experts": 2, "experts_per_token": 3}, r"from 1 to experts=2; found 3. Use 2"),
        ({"experts": 2, "hidden": 49}, r"multiples of 8, which grouped products need; found 32 and 49"),
    ],
)
def test_impossible_sizes_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DENSE, **wrong)


def test_settings_go_over_a_size():
    size = SIZES["1M"]
    assert config_of(ModelSettings()) == size
    assert config_of(ModelSettings(layers=2, hidden=64)) == dataclasses.replace(size, layers=2, hidden=64)
    # A head keeps its features, and keys and values their share of the heads.
    assert config_of(ModelSettings(width=256)) == dataclasses.replace(size, width=256, heads=8, kv_heads=4)
    assert config_of(ModelSettings(heads=8)) == dataclasses.replace(size, heads=8, kv_heads=4)
    assert config_of(ModelSettings(heads=1)) == dataclasses.replace(size, heads=1, kv_heads=1)
    assert config_of(ModelSettings(experts=1)) == dataclasses.replace(size, experts=1, experts_per_token=1)
    assert config_of(ModelSettings(experts=8)) == dataclasses.replace(size, experts=8, experts_per_token=2)


def test_experts_per_token_need_experts():
    with pytest.raises(ConfigError, match="experts_per_token=1 expects a model with experts; found one without"):
        config_of(ModelSettings(experts_per_token=1))


def test_vocabulary_is_that_of_the_data_at_least():
    assert config_of(ModelSettings(), vocabulary=300).vocabulary == 300
    assert config_of(ModelSettings(size="2.7B"), vocabulary=256).vocabulary == 32_000


# Forward


def written_out(model, tokens):
    """Logits, as the formulas are written: complex rotations, one head, one token and one expert after the other."""
    config, weights = model.config, {name: param.detach().double() for name, param in model.named_parameters()}
    size = config.head_width

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x):  # [T, D]
        exponents = torch.arange(0, size, 2).double() / size
        angles = torch.outer(torch.arange(len(x)).double(), config.rotary_base**-exponents)
        pairs = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), -1)

    def swiglu(x, gate_up, down):
        hidden = gate_up @ x
        gate, up = hidden[: config.hidden], hidden[config.hidden :]
        return down @ (gate / (1 + torch.exp(-gate)) * up)

    def mixture(x, name):
        shares = (weights[f"{name}.router.weight"] @ x).softmax(0)
        chosen = shares.argsort(descending=True)[: config.experts_per_token]
        parts = [shares[e] * swiglu(x, weights[f"{name}.gate_up"][e], weights[f"{name}.down"][e]) for e in chosen]
        return sum(parts) / shares[chosen].sum()

    def logits(row):
        x = weights["embedding.weight"][row]
        for number in range(config.layers):
            name = f"blocks.{number}"
            qkv = norm(x, f"{name}.attention_norm") @ weights[f"{name}.attention.qkv.weight"].T
            parts = qkv.split(size, dim=-1)  # heads of queries, then of keys, then of values
            attended = []
            for head in range(config.heads):
                served = head // (config.heads // config.kv_heads)
                key, value = parts[config.heads + served], parts[config.heads + config.kv_heads + served]
                scores = turned(parts[head]) @ turned(key).T / math.sqrt(size)
                future = torch.ones_like(scores, dtype=torch.bool).triu(1)
                attended.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
            x = x + torch.cat(attended, -1) @ weights[f"{name}.attention.out.weight"].T
            normed = norm(x, f"{name}.feed_forward_norm")
            if config.experts:
                fed = [mixture(token, f"{name}.feed_forward") for token in normed]
            else:
                gate_up, down = (weights[f"{name}.feed_forward.{part}.weight"] for part in ("gate_up", "down"))
                fed = [swiglu(token, gate_up, down) for token in normed]
            x = x + torch.stack(fed)
        return norm(x, "norm") @ weights["head.weight"].T

    return torch.stack([logits(row) for row in tokens])


@pytest.mark.parametrize(
    "config",
    [
        DENSE,
        dataclasses.replace(DENSE, kv_heads=4),
        dataclasses.replace(DENSE, kv_heads=1),
        EXPERTS,
        dataclasses.replace(EXPERTS, experts_per_token=1),
        dataclasses.replace(EXPERTS, experts=2),
    ],
    ids=["grouped", "as many keys", "one key", "experts", "one expert per token", "all experts"],
)
def test_logits(config):
    model = Transformer(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    tokens, _ = sample()
    expected = written_out(model, tokens)
    assert expected.abs().max() > 1  # far from nothing
    torch.testing.assert_close(model.logits(tokens).double(), expected, rtol=1e-4, atol=1e-4)


@EVERY_KIND
def test_the_future_is_not_seen(config):
    model = Transformer(config)
    tokens, _ = sample()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_gradient_of_a_rotation():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    table = blocks.rotary(dataclasses.replace(DENSE, width=32), torch.empty(2, 5, 32, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: blocks._Turn.apply(x, *table), x)


def test_rotary_angles_are_exact_in_every_format():
    """Positions beyond 256 do not exist in bf16; their angles are computed before it comes in."""
    exact = blocks.rotary(DENSE, torch.empty(1, 1000, 32))
    found = blocks.rotary(DENSE, torch.empty(1, 1000, 32, dtype=torch.bfloat16))
    assert found.cos.dtype == found.sin.dtype == torch.bfloat16
    assert torch.equal(found.cos, exact.cos.bfloat16())
    assert torch.equal(found.sin, exact.sin.bfloat16())


# Loss


@EVERY_KIND
def test_loss(config):
    model = Transformer(config).eval()
    tokens, targets = sample()
    expected = F.cross_entropy(model.logits(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(tokens, targets), expected)


class Largest(TorchDispatchMode):
    """Watches how large tensors get."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in [found] if isinstance(found, torch.Tensor) else []:
            self.elements = max(self.elements, tensor.numel())
        return found


def test_logits_of_a_large_vocabulary_never_exist_at_once(monkeypatch):
    config = dataclasses.replace(DENSE, vocabulary=5000)
    tokens, targets = sample(batch=4, length=41)
    whole, sliced = Transformer(config), Transformer(config)
    expected = whole.loss(tokens, targets)
    expected.backward()
    monkeypatch.setattr(transformer, "LOSS_SLICE_BYTES", 4 * 5000 * 25)
    with Largest() as seen:
        found = sliced.loss(tokens, targets)
        found.backward()
    torch.testing.assert_close(found, expected)
    assert farthest(gradients(sliced), gradients(whole)) < 1e-5
    weights = 5000 * config.width
    assert max(weights, 23 * 5000) <= seen.elements < 25 * 5000 + weights  # 160 tokens in 7 slices of at most 23


def test_a_block_with_experts_is_balanced_while_training():
    model = Transformer(EXPERTS)
    tokens, targets = sample()
    balance = model.loss(tokens, targets) - model.eval().loss(tokens, targets)
    # Routers begin nearly even: about 1 per block, of which the mean counts.
    assert float(balance.detach()) / EXPERTS.balance_weight == pytest.approx(1.0, abs=0.1)


# Experts


def test_balancing_loss():
    even = torch.full((8, 4), 0.25)
    assert float(blocks.balancing_loss(even, torch.tensor([4, 8, 12, 16]))) == pytest.approx(1.0)
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(8, 4)
    assert float(blocks.balancing_loss(one, torch.tensor([8, 8, 8, 8]))) == pytest.approx(4.0)


def test_balancing_loss_lowers_the_share_of_busy_experts():
    scores = torch.zeros(8, 4, requires_grad=True)
    blocks.balancing_loss(scores.softmax(-1), torch.tensor([6, 7, 8, 8])).backward()
    assert (scores.grad[:, 0] > 0).all()  # descending lowers it
    assert (scores.grad[:, 3] < 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_without_tokens_has_a_gradient_of_zeros(dtype):
    """Not none at all: FSDP2 reduces the same gradients on all ranks."""
    mixture = blocks.Mixture(EXPERTS, dtype=dtype)
    with torch.no_grad():
        for param in mixture.parameters():
            param.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        mixture.router.weight.zero_()
        mixture.router.weight[1:3] = 1.0  # all tokens below are positive
    fed, _ = mixture(torch.rand(2, 7, 32, dtype=dtype) + 0.1)
    fed.float().sum().backward()
    busy = mixture.gate_up.grad.float().abs().amax(dim=(1, 2)) > 0
    assert busy.tolist() == [False, True, True, False, False]


def test_grouped_products_agree():
    """bf16 has a kernel, other formats a loop."""
    tokens, weights = torch.randn(20, 16).bfloat16(), torch.randn(4, 24, 16).bfloat16().transpose(1, 2)
    ends = torch.tensor([3, 3, 12, 20], dtype=torch.int32)
    exact = blocks.grouped_product(tokens.double(), weights.double(), offs=ends)
    for start, end, weight, group in zip([0, 3, 3, 12], ends, weights, range(4), strict=True):
        assert torch.equal(exact[start:end], tokens[start:end].double() @ weight.double()), group
    torch.testing.assert_close(F.grouped_mm(tokens, weights, offs=ends).double(), exact, rtol=2e-2, atol=2e-2)


# First weights


@EVERY_KIND
def test_first_weights(config):
    model = Transformer(config)
    for name, param in model.named_parameters():
        if "norm" in name:
            assert torch.equal(param, torch.ones_like(param))
            continue
        inward = name.endswith(("out.weight", "down.weight", "feed_forward.down"))
        std = 0.02 / math.sqrt(6) if inward else 0.02
        # The deviation of a sample's deviation is std / sqrt(2 n).
        assert float(param.detach().std()) == pytest.approx(std, rel=5 / math.sqrt(2 * param.numel())), name
    one, other = model.blocks[0].attention.qkv.weight, model.blocks[1].attention.qkv.weight
    assert not torch.equal(one, other)


def test_first_weights_depend_on_the_seed_and_the_name_only():
    one = dict(Transformer(DENSE).named_parameters())
    torch.randn(3)  # other draws do not matter
    again = Transformer(DENSE)
    again.embedding = None  # nor does what is not there
    again.reset_parameters(0)
    found = dict(again.named_parameters())
    assert_equal(found, {name: param for name, param in one.items() if name in found})
    again = Transformer(DENSE)
    again.reset_parameters(1)
    differing = [name for name, param in again.named_parameters() if not torch.equal(param, one[name])]
    assert differing == [name for name in one if "norm" not in name]


class Allocated(TorchDispatchMode):
    """Adds up the bytes of all storages that are made."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.device.type != "meta":
            self.storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        return found


@EVERY_KIND
def test_a_model_is_built_once_where_it_stays(config):
    settings = ModelSettings(layers=3, width=32, heads=4, hidden=48, experts=config.experts or None, dtype="bfloat16")
    with Allocated() as seen:
        model = build(settings, device="cpu", dtype=torch.bfloat16, vocabulary=256, sequence=16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert sum(seen.storages.values()) == 2 * num_parameters(model.config)


def test_a_model_on_meta_gets_its_weights_later():
    settings = ModelSettings(layers=2, width=32, heads=4)
    model = build(settings, device="meta", dtype=torch.float32, sequence=16, seed=3)
    assert all(param.is_meta for param in model.parameters())
    model.reset_parameters()  # nothing to fill, and no error
    model.materialize("cpu", seed=3)
    expected = build(settings, device="cpu", dtype=torch.float32, sequence=16, seed=3)
    assert_equal(dict(model.named_parameters()), dict(expected.named_parameters()))


# Checkpointing, compiling, offloading


@EVERY_KIND
@pytest.mark.parametrize("numbers", [None, {0, 2}, set()])
def test_checkpointed_layers_run_twice_and_change_nothing(config, numbers):
    plain, model = Transformer(config), Transformer(config)
    tokens, targets = sample()
    model.checkpoint_layers(numbers)
    runs = [0] * 3
    for number, layer in enumerate(model.layers()):
        layer.register_forward_pre_hook(lambda *_, number=number: runs.__setitem__(number, runs[number] + 1))
    losses = [one.loss(tokens, targets) for one in (plain, model)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert_equal(gradients(model), gradients(plain))
    assert runs == [2 if numbers is None or number in numbers else 1 for number in range(3)]
    with torch.no_grad():
        model.loss(tokens, targets)
    assert sum(runs) == 6 + len({0, 1, 2} if numbers is None else numbers)  # without gradients, each once


@pytest.mark.parametrize("checkpointed", [False, True])
def test_one_piece_of_code_for_all_blocks(checkpointed):
    """Of the whole block: nothing in it has to run in Python."""
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    plain, model = Transformer(DENSE), Transformer(DENSE)
    for block in model.layers():
        block.compile(backend=backend, fullgraph=True)
    if checkpointed:
        model.checkpoint_layers()
    tokens, targets = sample()
    for one in (plain, model):
        one.loss(tokens, targets).backward()
    assert len(compiled) == 1
    assert farthest(gradients(model), gradients(plain)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_experts(dtype):
    torch._dynamo.reset()
    plain, model = Transformer(EXPERTS, dtype=dtype), Transformer(EXPERTS, dtype=dtype)
    for block in model.layers():
        block.compile(backend="aot_eager", fullgraph=dtype == torch.bfloat16)
    tokens, targets = sample()
    for one in (plain, model):
        one.loss(tokens, targets).backward()
    assert farthest(gradients(model), gradients(plain)) < (1e-5 if dtype == torch.float32 else 0.05)


OFFLOADS = {
    "off": {"fraction": 0.0},
    "streamed": {"chunk_bytes": "16KiB", "min_bytes": 0},
    "overlapping": {
        "chunk_bytes": "16KiB",
        "min_bytes": 0,
        "overlap_forward": True,
        "update_in_backward": True,
        "window": "48KiB",
    },
    "host": {"chunk_bytes": "16KiB", "min_bytes": 0, "update_on": "host", "overlap_forward": True},
}


def trained(config, plan, monkeypatch):
    """Weights after some steps, and what the optimizer says. Blocks are checkpointed, the loss comes in slices."""
    monkeypatch.setattr(transformer, "LOSS_SLICE_BYTES", 4 * 64 * 25)
    model = Transformer(config)
    model.checkpoint_layers({0, 1})
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **plan)
    for step in range(5):
        model.loss(*sample(seed=step)).backward()
        end_step(optimizer, 0.5)
    optimizer.synchronize()
    return dict(model.named_parameters()), optimizer.receipt()


@EVERY_KIND
def test_offloaded_state_trains_to_the_same_bits(config, monkeypatch):
    expected, _ = trained(config, OFFLOADS["off"], monkeypatch)
    for name, plan in OFFLOADS.items():
        found, receipt = trained(config, plan, monkeypatch)
        assert_equal(found, expected)
        assert receipt.fallbacks == ()
        assert (receipt.total_bytes_stored > 0) == (name != "off")
        assert (receipt.host_update_ms is not None) == (name == "host")


# FSDP2


def sharded(config, *, checkpointed=False, backend=None, policy=None):
    """How first weights, loss and gradients of a sharded model differ from those of a whole one. Runs on a rank."""
    whole, model = Transformer(config), Transformer(config, device="meta")
    whole.reset_parameters(5)
    if checkpointed:
        model.checkpoint_layers()
    for block in model.layers() if backend else []:
        block.compile(backend=backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {} if policy is None else {"mp_policy": policy}
    for module in [*model.groups(), model]:
        fully_shard(module, mesh=mesh, **options)
    model.materialize("cpu", 5)
    order = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    first = {name: param.full_tensor() for name, param in model.named_parameters()}
    same = all(torch.equal(first[name], param) for name, param in whole.named_parameters())

    halves = list(zip(*(part.chunk(2) for part in sample()), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "LOSS_SLICE_BYTES", 4 * config.vocabulary * 25)
        loss = model.loss(*halves[dist.get_rank()])
        loss.backward()
    assert order[:2] == ["norm.weight", "head.weight"]  # once for all slices, and before any block's
    assert len(order) == len(set(order))
    expected = [whole.loss(*half) for half in halves]
    (sum(expected) / 2).backward()
    found = {name: gradient.full_tensor() for name, gradient in gradients(model).items()}
    with torch.no_grad():
        logits = float((model.logits(halves[0][0]) - whole.logits(halves[0][0])).abs().max())
    return same, abs(float(loss - expected[dist.get_rank()])), farthest(found, gradients(whole)), logits


SHARDED = {
    "dense": (DENSE, {}),
    "experts": (EXPERTS, {"checkpointed": True}),
    "compiled": (dataclasses.replace(DENSE, layers=2), {"checkpointed": True, "backend": "aot_eager"}),
}


@pytest.mark.parametrize(("config", "how"), SHARDED.values(), ids=SHARDED)
def test_shards(ranks, config, how):
    for same, loss, gradient, logits in ranks.run(2, sharded, config, **how, timeout=120):
        assert same
        assert loss < 1e-5
        assert gradient < 1e-5
        assert logits < 1e-5


def test_shards_in_mixed_precision(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for same, loss, gradient, logits in ranks.run(2, sharded, DENSE, checkpointed=True, policy=policy):
        assert same
        assert loss < 0.01
        assert 1e-4 < gradient < 0.05  # bf16 was at work
        assert logits < 0.05


# Stages


@EVERY_KIND
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_are_the_model(config, num_stages):
    """Called one after the other they give its loss and its gradients, in its parameters."""
    whole, model = Transformer(config), Transformer(config)
    tokens, targets = sample()
    pieces = stages(model, num_stages)
    carried = (tokens,)
    for piece in pieces[:-1]:
        carried = piece(*carried)
        carried = carried if isinstance(carried, tuple) else (carried,)
    loss = pieces[-1](*carried, targets=targets)
    expected = whole.loss(tokens, targets)
    assert loss.shape == (1,)
    torch.testing.assert_close(loss[0], expected)
    for one in (loss[0], expected):
        one.backward()
    assert farthest(gradients(model), gradients(whole)) < 1e-5
    names = [name for piece in pieces for name, _ in piece.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())  # each once, under its own name
    with torch.no_grad():
        found = pieces[-1](*carried)
        assert torch.equal(found, whole.logits(tokens))


def test_stages_are_of_equal_size():
    model = Transformer(dataclasses.replace(DENSE, layers=7), device="meta")
    assert [len(piece.layers()) for piece in stages(model, 3)] == [3, 2, 2]
    assert [list(piece.blocks) for piece in stages(model, 3)] == [["0", "1", "2"], ["3", "4"], ["5", "6"]]


@pytest.mark.parametrize("number", [0, 4])
def test_more_stages_than_blocks_are_refused(number):
    with pytest.raises(ConfigError, match=f"Expected from 1 to 3 pipeline stages.*; found {number}. Use fewer"):
        stages(Transformer(DENSE, device="meta"), number)


SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe, "Interleaved1F1B": ScheduleInterleaved1F1B}


def pipelined(config, name):
    """How far a pipeline of the stages made on meta is from the whole model. Runs on a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    several = name == "Interleaved1F1B"
    total = 2 * world if several else world
    whole, model = Transformer(config), Transformer(config, device="meta")
    whole.reset_parameters(5)
    model.checkpoint_layers({1})
    mine = dict(itertools.islice(enumerate(stages(model, total)), rank, None, world))
    for piece in mine.values():
        piece.materialize("cpu", 5)
    pipes = [PipelineStage(piece, number, total, torch.device("cpu")) for number, piece in mine.items()]
    schedule = SCHEDULES[name](pipes if several else pipes[0], 4, loss_fn=mean_loss)

    tokens, targets = sample(batch=8)
    losses = []
    told = {"target": targets, "targets": targets, "losses": losses} if total - 1 in mine else {}
    schedule.step(*([tokens] if 0 in mine else []), **told)
    expected = [whole.loss(*part) for part in zip(tokens.chunk(4), targets.chunk(4), strict=True)]
    (sum(expected) / 4).backward()
    found = {name: param for piece in mine.values() for name, param in piece.named_parameters()}
    of_whole = dict(whole.named_parameters())
    return (
        all(torch.equal(param, of_whole[name]) for name, param in found.items()),
        [abs(float(a - b)) for a, b in zip(losses, expected, strict=bool(losses))],
        farthest({name: param.grad for name, param in found.items()}, gradients(whole)),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@EVERY_KIND
def test_pipelines(ranks, config, schedule):
    answers = ranks.run(2, pipelined, dataclasses.replace(config, layers=5), schedule)
    for same, losses, gradient in answers:
        assert same
        assert gradient < 1e-5
        assert all(loss < 1e-5 for loss in losses)
    assert [len(losses) for _, losses, _ in answers] == [0, 4]


# Models of the transformers package


@pytest.fixture(params=["stand-in", *stand_in.INSTALLED])
def config_json(request, monkeypatch, tmp_path):
    """A small llama: of the package itself where it is installed, and of a stand-in with the same interface."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "transformers", stand_in)
    (tmp_path / "config.json").write_text(json.dumps(stand_in.LLAMA))
    return tmp_path / "config.json"


def causal_lm(named, *, device="cpu", sequence=16, vocabulary=256, seed=0):
    settings = ModelSettings(transformers=str(named))
    return build(settings, device=device, dtype=torch.float32, vocabulary=vocabulary, sequence=sequence, seed=seed)


def test_causal_lm(config_json):
    model = causal_lm(config_json)
    tokens, targets = sample(vocabulary=256)
    logits = model.logits(tokens)
    assert logits.shape == (4, 16, 256)
    loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    assert len(model.layers()) == 3
    assert model.vocabulary == 256


def test_causal_lm_from_the_folder(config_json):
    found, expected = causal_lm(config_json.parent), causal_lm(config_json)
    assert_equal(dict(found.named_parameters()), dict(expected.named_parameters()))


def test_causal_lm_of_a_type(config_json):
    model = causal_lm("llama", device="meta")
    assert all(param.is_meta for param in model.parameters())
    assert len(model.layers()) == 32


def test_causal_lm_checkpoints_layers(config_json):
    plain, model = causal_lm(config_json), causal_lm(config_json)
    model.checkpoint_layers({0, 2})
    runs = [0] * 3
    for number, layer in enumerate(model.layers()):
        layer.register_forward_pre_hook(lambda *_, number=number: runs.__setitem__(number, runs[number] + 1))
    for one in (plain, model):
        one.loss(*sample(vocabulary=256)).backward()
    assert_equal(gradients(model), gradients(plain))
    assert runs == [2, 1, 2]


def test_causal_lm_on_meta_gets_its_weights_later(config_json):
    """Buffers too, which are in no state dict, and what is tied stays tied."""
    expected, model = causal_lm(config_json, seed=3), causal_lm(config_json, device="meta")
    model.materialize("cpu", seed=3)
    assert_equal(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert_equal(dict(model.named_buffers()), dict(expected.named_buffers()))
    tokens, _ = sample(vocabulary=256)
    assert torch.equal(model.logits(tokens), expected.logits(tokens))
    assert model.lm.get_output_embeddings().weight is model.lm.get_input_embeddings().weight


def test_causal_lm_is_not_cut_into_stages(config_json):
    with pytest.raises(ConfigError, match="expect offstage's own Transformer; found CausalLM, whose forward cannot"):
        stages(causal_lm(config_json), 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vocabulary": 300}, r"The data has 300 different tokens; .* found vocab_size=256 in .* Raise vocab_size"),
        ({"sequence": 64}, r"Sequences have 64 tokens; expected at most max_position_embeddings=32 of .* Lower"),
        ({"named": "no_such_model"}, r"a model type such as llama; found 'no_such_model', which is neither"),
    ],
)
def test_causal_lm_that_does_not_fit(config_json, given, message):
    with pytest.raises(ConfigError, match=message):
        causal_lm(**{"named": config_json, **given})


def test_causal_lm_of_an_unreadable_config(config_json):
    config_json.write_text("{")
    with pytest.raises(ConfigError, match=r"expects the config.json of a transformers model; could not use .*json"):
        causal_lm(config_json)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"expects the package transformers; found: .* Run `pip install transformers`"
    ):
        causal_lm("llama")


def test_with_an_old_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setattr(stand_in, "__version__", "4.9.2")
    with pytest.raises(ConfigError, match=r"expects transformers 4.56 or later; found 4.9.2. Run `pip install --upg"):
        causal_lm("llama")
