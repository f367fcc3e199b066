# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on real processes: any world size and plan to any other, and no rank waits for ever."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import offstage
from offstage import checkpoint
from offstage.checkpoint.stored import Stored
from offstage.errors import CheckpointError, StepLostError
from offstage.optimizer.optimizer import runtime_of
from tests.support.lives import end_step
from tests.support.sharded import local
from tests.support.slow_writer import held_back

SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}
STREAMED = {**SMALL, "master_weights": "fp32"}
SPLIT = {**SMALL, "master_weights": "split", "host_fraction": 0.5}
MIXED = {**SMALL, "fraction": 0.5, "master_weights": "fp32", "update_in_backward": True}
RESIDENT = {"fraction": 0.0, "master_weights": "split"}
PLANS = {"streamed": STREAMED, "split, half on the host": SPLIT, "half, in backward": MIXED, "resident": RESIDENT}


class Model(nn.Module):
    """Uneven shards, a bias smaller than four ranks, a buffer, a frozen layer and a fused one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(33, 20)
        self.frozen = nn.Linear(20, 20)
        self.gate_up = nn.Linear(20, 2 * 30)
        self.down = nn.Linear(30, 20)
        self.small = nn.Linear(20, 3)
        self.register_buffer("scale", torch.full((5,), 0.5))
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        x = self.frozen(self.embed(tokens))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.small(self.down(torch.sigmoid(gate) * up)) * self.scale[0]


def build(config, dtype=torch.bfloat16, *, plain=False, fused=True, seed=0):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.gate_up, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if fused:
        checkpoint.swiglu(model.gate_up.weight)
        checkpoint.swiglu(model.gate_up.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, optimizer if plain else offstage.offload(optimizer, model, **config)


def train(model, optimizer, steps):
    """The same batch on every rank: the gradients are those of one process, up to rounding."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randint(33, (4, 7), generator=generator)).float().pow(2).mean().backward()
        end_step(optimizer)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def everything(model, optimizer):
    """Weights and state as one process would have them."""
    found = {f"model.{name}": whole(value.detach()) for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items() if param in optimizer.state else ():
            found[f"{name}.{key}"] = whole(value)
    return found


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# Any world size and plan to any other


def save_and_go_on(folder, plan):
    model, optimizer = build(PLANS[plan])
    train(model, optimizer, range(5))
    at_save = everything(model, optimizer)
    checkpoint.save(folder, model, optimizer, extra={"step": 5})
    checkpoint.save(f"{folder}-again", model, optimizer, extra={"step": 5})
    train(model, optimizer, range(5, 15))
    return at_save, everything(model, optimizer)


def load_and_go_on(folder, plan):
    model, optimizer = build(PLANS[plan], seed=1)
    train(model, optimizer, range(20, 22))
    extra = checkpoint.load(folder, model, optimizer)
    assert extra == {"step": 5}
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    at_load = everything(model, optimizer)
    train(model, optimizer, range(5, 15))
    return at_load, everything(model, optimizer)


@pytest.mark.parametrize(
    ("plan", "other"), [("streamed", "split, half on the host"), ("half, in backward", "resident")]
)
def test_from_four_ranks_to_any_number(ranks, tmp_path, plan, other):
    folder = tmp_path / "saved"
    at_save, at_end = ranks.run(4, save_and_go_on, folder, plan)[0]
    for world in (1, 2, 3, 4):
        at_load, end = ranks.run(world, load_and_go_on, folder, other)[0]
        assert_same(at_load, at_save)
        if world == 4:
            assert_same(end, at_end)
    at_load, _ = load_and_go_on(f"{folder}-again", other)  # one process without a process group
    assert_same(at_load, at_save)


def test_from_one_process_to_four_ranks(ranks, tmp_path):
    at_save, _ = save_and_go_on(tmp_path / "saved", "split, half on the host")
    at_load, _ = ranks.run(4, load_and_go_on, tmp_path / "saved", "streamed")[0]
    assert_same(at_load, at_save)


def save_train_save(folder):
    model, optimizer = build(SPLIT)
    train(model, optimizer, range(2))
    checkpoint.save(folder / "first", model, optimizer)
    first = everything(model, optimizer)
    train(model, optimizer, range(2, 4))
    checkpoint.save(folder / "second", model, optimizer)
    second = everything(model, optimizer)
    found = []
    for name in ("first", "second"):
        model, optimizer = build(STREAMED, seed=3)
        checkpoint.load(folder / name, model, optimizer)
        found.append(everything(model, optimizer))
    assert_same(found[0], first)
    assert_same(found[1], second)


def test_save_train_save(ranks, tmp_path):
    ranks.run(2, save_train_save, tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "second"


# Plain AdamW, through torch's own functions


def plain_saves(folder):
    model, optimizer = build({}, torch.float32, plain=True, fused=False)
    train(model, optimizer, range(3))
    dcp.save(
        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    return everything(model, optimizer)


def ours_saves(folder, config):
    model, optimizer = build(config, torch.float32, fused=False)
    train(model, optimizer, range(3))
    checkpoint.save(folder, model, optimizer)
    return everything(model, optimizer)


def ours_loads(folder, config):
    model, optimizer = build(config, torch.float32, fused=False, seed=1)
    checkpoint.load(folder, model, optimizer)
    return everything(model, optimizer)


def loads_by_torch(folder, config):
    """`set_optimizer_state_dict` of torch, on our optimizer (the state is read straight into the arenas) or torch's."""
    model, optimizer = build(config, torch.float32, plain=config is None, fused=False, seed=1)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    return everything(model, optimizer)


def test_plain_adamw_checkpoints_load_here(ranks, tmp_path):
    saved = ranks.run(2, plain_saves, tmp_path / "plain")[0]
    for world, config in ((4, STREAMED), (1, SMALL)):
        assert_same(ranks.run(world, ours_loads, tmp_path / "plain", config)[0], saved)
    assert_same(ranks.run(3, loads_by_torch, tmp_path / "plain", SMALL)[0], saved)


def test_ours_load_into_plain_adamw(ranks, tmp_path):
    saved = ranks.run(4, ours_saves, tmp_path / "ours", SMALL)[0]
    for world in (2, 4):
        assert_same(ranks.run(world, loads_by_torch, tmp_path / "ours", None)[0], saved)


# Fused parameters


class Flat(nn.Module):
    """Fused parameters in every form: SwiGLU, QKV, a gated delta net's projection stored flat."""

    def __init__(self, *, fused):
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        qkv, gdn, swiglu = random(16, 6), random(23, 5), random(4, 2 * 9)
        if fused:
            self.qkv = nn.Module()
            self.qkv.weight = nn.Parameter(qkv)
            self.gdn = nn.Parameter(gdn.reshape(-1))
            self.w13 = nn.Parameter(swiglu)
        else:
            for name, part in zip("qkv", qkv.split([8, 4, 4]), strict=True):
                module = nn.Module()
                module.weight = nn.Parameter(part.clone())
                setattr(self, name, module)
            self.gdn = nn.ParameterDict(dict(zip("qkvz", (p.clone() for p in gdn.split([6, 6, 7, 4])), strict=True)))
            self.w13 = nn.ParameterDict(dict(zip(("gate", "up"), (p.clone() for p in swiglu.chunk(2, 1)), strict=True)))


def build_flat(config, *, fused):
    model = Flat(fused=fused)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if fused:
        checkpoint.qkv(model.qkv.weight, q=8, k=4, v=4)
        checkpoint.gdn(model.gdn, q=6, k=6, v=7, z=4, shape=(23, 5))
        checkpoint.swiglu(model.w13, dim=1)
    return model, offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.1), model, **config)


def step_flat(model, optimizer):
    """A gradient that does not depend on how parameters are fused."""
    for param in model.parameters():
        param.grad = (2 * param.detach()).clone()
    end_step(optimizer)


def save_flat(folder, config, fused):
    model, optimizer = build_flat(config, fused=fused)
    step_flat(model, optimizer)
    step_flat(model, optimizer)
    checkpoint.save(folder, model, optimizer)
    return everything(model, optimizer)


def load_flat(folder, config, fused):
    model, optimizer = build_flat(config, fused=fused)
    checkpoint.load(folder, model, optimizer)
    return everything(model, optimizer)


@pytest.mark.parametrize("fused", [True, False], ids=["saved fused", "saved apart"])
def test_fused_parameters_are_saved_split(ranks, tmp_path, fused):
    """What a fused model saves, one that keeps the parts apart loads, and the reverse, at another world size."""
    expected = {one: save_flat(tmp_path / f"alone {one}", SMALL, one) for one in (True, False)}
    ranks.run(4, save_flat, tmp_path / "saved", SMALL, fused)
    with checkpoint.stored.Stored(tmp_path / "saved") as stored:
        names = set(stored.names)
    assert {"model.q.weight", "model.gdn.z", "model.w13.up", "optim.state.k.weight.exp_avg"} <= names
    assert not {"model.qkv.weight", "model.gdn", "model.w13"} & names
    for world in (2, 3):
        for kind in (True, False):
            found = ranks.run(world, load_flat, tmp_path / "saved", SMALL, kind)[0]
            assert_same(found, expected[kind])


# Ranks that hold nothing, or something of their own


def save_with_differences(folder):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.ModuleDict({"shared": nn.Linear(8, 3)})  # fewer rows than ranks
    fully_shard(model["shared"], mesh=mesh)
    if rank == 1:
        model["only_here"] = nn.Linear(4, 4)
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.1), model, **SMALL)

    def everything_whole():
        named = model.state_dict().items()
        return {name: whole(value) if name.startswith("shared") else value.clone() for name, value in named}

    model["shared"](torch.ones(2, 8)).sum().backward()
    if rank == 1:
        model["only_here"](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    checkpoint.async_save(f"{folder}-async", model, optimizer).result()
    before = everything_whole()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    checkpoint.load(folder, model, optimizer)
    assert_same(before, everything_whole())
    return sorted(before)


def test_ranks_with_nothing_and_parameters_of_one_rank(ranks, tmp_path):
    names = ranks.run(4, save_with_differences, tmp_path / "saved", timeout=60)
    assert [len(one) for one in names] == [2, 4, 2, 2]


def save_without_state(folder, fused):
    """Ranks differ in how often they have trained, the last has not at all: its experts saw no token."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    experts = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]))
    model = nn.Module()
    model.experts = experts
    if fused:
        checkpoint.swiglu(experts, dim=1)
    optimizer = offstage.offload(torch.optim.AdamW([experts], lr=0.1), model, **SMALL)
    for step in range(3):
        if dist.get_rank() <= step:
            experts.grad = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)])
        end_step(optimizer)
    checkpoint.save(folder, model, optimizer)
    before = experts.to_local().detach().clone()
    steps = float(optimizer.state[experts]["step"]) if experts in optimizer.state else 0.0
    for other in (offstage.offload(torch.optim.AdamW([experts], lr=0.1), model, **SMALL), optimizer):
        checkpoint.load(folder, model, other)
        assert torch.equal(before, experts.to_local())
        assert (float(other.state[experts]["step"]) if experts in other.state else 0.0) == steps
    return steps


@pytest.mark.parametrize("fused", [False, True])
def test_shards_that_were_not_updated_equally_often(ranks, tmp_path, fused):
    """Also experts of a fused weight on a mesh of their own."""
    assert ranks.run(4, save_without_state, tmp_path / "saved", fused) == [3.0, 2.0, 1.0, 0.0]


# What goes wrong goes wrong on all ranks


def load_or_error(folder, missing_on):
    model, optimizer = build(SMALL, seed=1)
    before = everything(model, optimizer)
    if dist.get_rank() == missing_on:  # a disk of its own, that lacks a file
        own = Path(f"{folder}-{missing_on}")
        shutil.copytree(folder, own)
        next(own.glob("*.distcp")).unlink()
        folder = own
    try:
        checkpoint.load(folder, model, optimizer)
    except CheckpointError as error:
        assert_same(everything(model, optimizer), before)
        return str(error)
    return None


def test_a_file_missing_on_one_rank_raises_on_all(ranks, tmp_path):
    ranks.run(2, save_and_go_on, tmp_path / "saved", "streamed")
    first, second = ranks.run(2, load_or_error, tmp_path / "saved", 1, timeout=60)
    assert ".distcp" in second
    assert "No such file" in second
    assert "failed on rank 1" in first
    assert ".distcp" in first


def save_or_error(folder, config):
    model, optimizer = build(config)
    train(model, optimizer, range(1))
    try:
        if dist.get_rank() == 1:
            runtime_of(optimizer).lose("A test has lost this step.")
        checkpoint.save(folder, model, optimizer)
    except Exception as error:
        return type(error).__name__
    return None


def test_a_save_that_one_rank_cannot_make_raises_on_all(ranks, tmp_path):
    assert ranks.run(2, save_or_error, tmp_path / "saved", SMALL, timeout=60) == ["CheckpointError", "StepLostError"]
    assert not checkpoint.is_complete(tmp_path / "saved")


# Asynchronous saves


def save_beside_training(folder, plan):
    model, optimizer = build(PLANS[plan])
    train(model, optimizer, range(3))
    checkpoint.save(folder / "sync", model, optimizer)
    at_call = everything(model, optimizer)
    with held_back() as slow:
        saving = checkpoint.async_save(folder / "async", model, optimizer)
        train(model, optimizer, range(3, 13))
        assert not saving.done()
        slow.open()
        train(model, optimizer, range(13, 23))
        saving.result()
    state = optimizer.receipt().host_state_bytes + optimizer.receipt().device_state_bytes
    model, optimizer = build(RESIDENT, seed=4)
    checkpoint.load(folder / "async", model, optimizer)
    assert_same(everything(model, optimizer), at_call)
    return saving.extra_bytes, state


@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on_while_it_is_saved(ranks, tmp_path, plan):
    for extra, state in ranks.run(2, save_beside_training, tmp_path, plan):
        weights = 33 * 20 + 20 * 20 + 20 + 60 * 20 + 60 + 20 * 30 + 20 + 3 * 20 + 3
        assert 0 < extra <= state + 2 * weights + 16 * 1024  # each copy begins at a multiple of 256 bytes


def save_several_beside_training(folder, plan):
    model, optimizer = build(PLANS[plan])
    saves = []
    for step in range(4):
        train(model, optimizer, [step])
        saves.append(checkpoint.async_save(folder / str(step), model, optimizer))
    for saving in saves:
        saving.result()


@pytest.mark.parametrize("plan", ["streamed", "resident"])
def test_several_asynchronous_saves_in_a_row(ranks, tmp_path, plan):
    """The ranks of a save talk to each other in the background: those of the next one must not mix with them."""
    ranks.run(2, save_several_beside_training, tmp_path, plan)
    assert all(checkpoint.is_complete(tmp_path / str(step)) for step in range(4))


# Other trouble


def evaluate_and_save(folder):
    """After a forward without backward FSDP2 leaves gathered parameters in the model."""
    model, optimizer = build(SMALL)
    train(model, optimizer, range(2))
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))
    optimizer.step()  # without gradients
    checkpoint.save(folder, model, optimizer)
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))
    checkpoint.load(folder, model, optimizer)
    train(model, optimizer, range(2, 4))


def test_saving_after_an_evaluation(ranks, tmp_path):
    ranks.run(2, evaluate_and_save, tmp_path / "saved")


def absent_state(folder, make):
    """Saved before the first step: what does not exist is not saved, and is not there after loading."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = offstage.offload(make(model.parameters()), model, min_bytes=0, chunk_bytes="16KiB")
    checkpoint.save(folder, model, optimizer)

    def three_steps(optimizer):
        for step in range(3):
            model(torch.full((2, 6), 0.1 * (step + 1))).pow(2).sum().backward()
            end_step(optimizer)
        return {name: whole(value) for name, value in model.state_dict().items()}

    never_stopped = three_steps(optimizer)
    again = offstage.offload(make(model.parameters()), model, min_bytes=0, chunk_bytes="16KiB")
    checkpoint.load(folder, model, again)
    assert not len(again.state)
    assert_same(three_steps(again), never_stopped)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize("make", [momentum, torch.optim.NAdam, torch.optim.AdamW])
def test_absent_state_stays_absent(ranks, tmp_path, make):
    ranks.run(2, absent_state, tmp_path / "saved", make)


def save_to_own_folder(folder):
    model, optimizer = build(SMALL)
    return message_of(lambda: checkpoint.save(folder / str(dist.get_rank()), model, optimizer))


def test_ranks_without_a_shared_folder(ranks, tmp_path):
    for message in ranks.run(2, save_to_own_folder, tmp_path):
        assert message.startswith("CheckpointError: ")
        assert "share" in message
    assert not any(checkpoint.is_complete(tmp_path / str(rank)) for rank in range(2))


def clip_with_missing_gradients():
    """An expert on one rank got no token: the others must not wait for it, in any format."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 5).to(torch.bfloat16), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = offstage.offload(torch.optim.AdamW(params), min_bytes=0, chunk_bytes="16KiB")
    params[0].grad = DTensor.from_local(torch.full((2, 5), 2.0).to(torch.bfloat16), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        params[1].grad = DTensor.from_local(torch.full((2, 5), 1.0).to(torch.bfloat16), mesh, [Shard(0)])
    return float(optimizer.clip_grad_norm_(1.0))


def test_clipping_where_one_rank_lacks_a_gradient(ranks):
    first, second = ranks.run(2, clip_with_missing_gradients)
    assert first == second == pytest.approx((20 * 4 + 10) ** 0.5, rel=0.01)


# Ranks that differ


def message_of(act):
    """What it raises, or `None`."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def expert_and_dense():
    """A sharded expert that got a gradient on the first ranks only, beside a parameter that got one everywhere."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Module()
    for name in ("dense", "expert"):
        weight = torch.randn(4, 6).to(torch.bfloat16)
        model.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.1), model, **STREAMED)
    for name in ("dense", "expert") if dist.get_rank() == 0 else ("dense",):
        param = model.get_parameter(name)
        ones = torch.ones(param.to_local().shape, dtype=torch.bfloat16)
        param.grad = DTensor.from_local(ones, mesh, [Shard(0)])
    end_step(optimizer)
    return model, optimizer


def names_and_shapes(folder):
    """Without talking to the others: rank 1 is not even there."""
    model, optimizer = expert_and_dense()
    found = None
    if dist.get_rank() == 0:
        found = get_optimizer_state_dict(model, optimizer)
    mine = get_optimizer_state_dict(model, optimizer)
    names = [(name, key, tuple(value.shape)) for name, state in mine["state"].items() for key, value in state.items()]
    assert found is None or list(found["state"]) == list(mine["state"])
    dcp.save({"optim": mine}, checkpoint_id=folder)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    rank = dist.get_rank()
    assert all(model.get_parameter(name) in optimizer.state for name in ["dense", "expert"][: 2 - rank])
    assert (model.expert in optimizer.state) == (rank == 0)  # what was handed out is not kept
    return names, {name: list(state) for name, state in full.get("state", {}).items()}  # torch gives it to rank 0


def test_all_ranks_have_the_same_names_in_the_same_order(ranks, tmp_path):
    """Also where one of them has no state for a parameter: they gather name by name, and no rank may wait for ever."""
    (first, full), (second, _) = ranks.run(2, names_and_shapes, tmp_path / "saved", timeout=30)
    keys = ["step", "master_weight", "exp_avg", "exp_avg_sq"]
    assert first == second
    assert [(name, key) for name, key, _ in first] == [(name, key) for name in ("dense", "expert") for key in keys]
    assert {shape for _, key, shape in first if key != "step"} == {(4, 6)}
    assert full == {"dense": keys, "expert": keys}


def save_frozen_expert(folder, option):
    """Its state is on one rank only, and so is what an option adds later."""
    model, optimizer = expert_and_dense()
    if option == "frozen":
        model.expert.requires_grad_(False)
    else:
        optimizer.param_groups[0]["amsgrad"] = True
        mesh = model.expert.device_mesh
        if dist.get_rank() == 0:
            ones = torch.ones(2, 6, dtype=torch.bfloat16)
            model.expert.grad = DTensor.from_local(ones, mesh, [Shard(0)])
        end_step(optimizer)
    at_save = everything_local(model, optimizer)
    checkpoint.save(folder, model, optimizer)
    for param in model.parameters():
        optimizer.state[param] = {}
    checkpoint.load(folder, model, optimizer)
    found = everything_local(model, optimizer)
    for name, value in at_save.items():
        assert torch.equal(found.pop(name), value), name
    assert not any(value.any() for value in found.values())  # what an option has added begins with zeros


def everything_local(model, optimizer):
    return {
        f"{name}.{key}": local(value).clone()
        for name, param in model.named_parameters()
        for key, value in (optimizer.state[param].items() if param in optimizer.state else ())
    }


@pytest.mark.parametrize("option", ["frozen", "amsgrad"])
def test_state_that_one_rank_has(ranks, tmp_path, option):
    ranks.run(2, save_frozen_expert, tmp_path / "saved", option)


def two_checkpoints(folder):
    model, optimizer = build(SMALL)
    for name in "ab":
        train(model, optimizer, range(2))
        checkpoint.save(folder / name, model, optimizer)


def load_differently(folder, which):
    """Rank 1 means another folder, or none."""
    model, optimizer = build(SMALL, seed=1)
    before = everything(model, optimizer)
    chosen = {"another": [folder / "a", folder / "b"], "none": [folder / "a", None]}[which][dist.get_rank()]
    said = message_of(lambda: checkpoint.load(chosen, model, optimizer))
    assert_same(everything(model, optimizer), before)
    return said


@pytest.mark.parametrize(("which", "words"), [("another", "different checkpoints"), ("none", "found None")])
def test_ranks_must_mean_one_checkpoint(ranks, tmp_path, which, words):
    ranks.run(2, two_checkpoints, tmp_path)
    for said in ranks.run(2, load_differently, tmp_path, which, timeout=30):
        assert said.startswith("CheckpointError")
        assert words in said


def fail_while_loading(folder):
    """Rank 1 cannot read one tensor when others have been written: no rank may train on."""
    model, optimizer = build(SMALL)
    train(model, optimizer, range(2))
    read = Stored.read

    def bad(self, name, box, into):
        if dist.get_rank() == 1 and name.endswith("embed.weight.exp_avg"):
            raise OSError("I/O error")
        return read(self, name, box, into)

    with mock.patch.object(Stored, "read", bad):
        said = message_of(lambda: checkpoint.load(folder / "a", model, optimizer))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(StepLostError, match="I/O error"):
        optimizer.step()
    optimizer.zero_grad()
    checkpoint.load(folder / "a", model, optimizer)
    train(model, optimizer, range(2))
    return said


def test_a_load_that_fails_on_one_rank_is_lost_on_all(ranks, tmp_path):
    ranks.run(2, two_checkpoints, tmp_path)
    assert all("I/O error" in said for said in ranks.run(2, fail_while_loading, tmp_path))


def load_without_room(folder, save):
    """The checkpoint's options need more state than rank 1 may have."""
    amsgrad = {"lr": 0.5, "amsgrad": True}
    torch.manual_seed(0)
    model = nn.Linear(20, 33)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    budget = {"host_budget": "4KiB"} if dist.get_rank() == 1 and not save else {}
    inner = torch.optim.AdamW(model.parameters(), **(amsgrad if save else {"lr": 0.01}))
    optimizer = offstage.offload(inner, model, **SMALL, **budget)

    def two_steps():
        for _ in range(2):
            model(torch.ones(2, 20)).pow(2).mean().backward()
            end_step(optimizer)
        return {name: whole(value) for name, value in model.state_dict().items()}

    two_steps()
    if save:
        checkpoint.save(folder, model, optimizer)
        return None
    said = message_of(lambda: checkpoint.load(folder, model, optimizer))
    (group,) = optimizer.param_groups
    answer = said, group["lr"], group["amsgrad"], two_steps()
    checkpoint.save(f"{folder}-again", model, optimizer)
    assert all(set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"} for param in model.parameters())
    return answer


def test_a_load_that_one_rank_has_no_room_for_changes_no_options(ranks, tmp_path):
    ranks.run(2, load_without_room, tmp_path / "saved", True)
    answers = ranks.run(2, load_without_room, tmp_path / "saved", False)
    for said, lr, amsgrad, _ in answers:
        assert "host_budget" in said
        assert (lr, amsgrad) == (0.01, False)
    assert_same(answers[0][3], answers[1][3])


def destroy_while_saving(folder):
    """Destroying the process group before the save is complete is an error, and there is no checkpoint."""
    model, optimizer = build(SMALL)
    train(model, optimizer, range(2))
    with held_back() as slow:
        saving = checkpoint.async_save(folder, model, optimizer)
        dist.destroy_process_group()
        slow.open()
        said = message_of(lambda: saving.result(30))
    return said, checkpoint.is_complete(folder)


def test_a_process_group_that_is_destroyed_while_it_is_saved(ranks, tmp_path):
    for said, complete in ranks.run(2, destroy_while_saving, tmp_path / "saved"):
        assert said.startswith("CheckpointError")
        assert "process group was destroyed" in said
        assert not complete
