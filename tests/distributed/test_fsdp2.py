# SPDX-License-Identifier: Apache-2.0
"""FSDP2 and tensor parallelism: offloaded shards train bit for bit as resident ones, and close to plain AdamW.

Every case trains its model once with `fraction=0`, once per plan and, where that can be close, with plain torch. Ranks
compare for themselves and tell what differs.
"""

import contextlib
import functools
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import offstage
from offstage.errors import ConfigError, OffstageError
from offstage.optimizer.overlap.selection import BackwardSelection
from tests.support.lives import end_step
from tests.support.sharded import (
    MAX_NORM,
    PLANS,
    Plain,
    compared,
    differences,
    fsdp2,
    local,
    mixture,
    tensor_parallel,
    train,
)

ROOT = Path(__file__).parent.parent.parent
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def compare(make, *, base=None, against_torch=True, lazy_seed=None, **loop):
    """Runs on a rank."""
    options = {"base": base, "against_torch": against_torch, "lazy_seed": lazy_seed}
    return compared(lambda config: train(make, config, **loop), PLANS, **options)


def assert_same(answers):
    """No rank has seen a difference, and every plan did what it is for."""
    everyones = [{name: differs for name, (differs, _) in found.items() if differs} for found in answers]
    assert everyones == [{}] * len(answers)
    for found in answers:
        for name in PLANS:
            assert_did(found[name][1], PLANS[name])
    norms = [found["streamed"][1].norms for found in answers]
    assert norms == [norms[0]] * len(norms)  # all ranks clip alike


def assert_did(run, plan):
    receipt = run.receipt
    assert receipt.steps == len(run.norms)
    assert receipt.total_bytes_stored > 0
    assert (receipt.host_update_ms is not None) == ("host_fraction" in plan)
    early = plan.get("update_in_backward", False)
    assert (run.updated_in_backward > 0) == early
    assert (run.fetched_in_backward > 0) == bool(plan.get("window") and not early)
    assert {bool(norm > MAX_NORM) for norm in run.norms} == {False, True}
    assert (receipt.speculation_hits > 0) == early
    assert (receipt.speculation_misses > 0) == early
    assert receipt.fallbacks == ()


# The same bits


@pytest.mark.parametrize(("num_ranks", "steps"), [(2, 20), (4, 8)])
def test_mixture(ranks, num_ranks, steps):
    """Uneven and empty shards, frozen and ordinary parameters, a tied embedding, experts on another mesh."""
    assert_same(ranks.run(num_ranks, compare, mixture, steps=steps, timeout=120))


def test_mixture_has_what_it_says(ranks):
    """Otherwise the tests above would not cover it."""
    answers = ranks.run(4, describe, mixture)
    sizes = [{name: local[0] for name, (_, local, _) in params.items() if local} for params, _ in answers]
    assert [size["gate.bias"] for size in sizes] == [1, 1, 1, 0]
    assert [size["embedding.weight"] for size in sizes] == [17, 17, 17, 16]
    assert sorted(size["experts.up"] for size in sizes) == [1, 1, 2, 2]
    params, steps = answers[0]
    meshes = {name: mesh for name, (mesh, _, _) in params.items()}
    assert meshes["scale"] is None
    assert len({meshes["experts.up"], meshes["embedding.weight"], None}) == 3
    assert {name for name, (_, _, trained) in params.items() if not trained} == {"reader.weight", "reader.bias"}
    even, odd = steps
    assert even - odd == {"rare.up", "rare.down"}
    assert "head.weight" not in params  # tied


def describe(make):
    model = make()
    params = {}
    for name, param in model.named_parameters():
        mesh = str(param.device_mesh) if isinstance(param, DTensor) else None
        params[name] = mesh, tuple(local(param).shape), param.requires_grad
    steps = []
    for model.step in range(2):
        model(torch.arange(24).view(3, 8)).sum().backward()
        steps.append({name for name, param in model.named_parameters() if param.grad is not None})
        model.zero_grad()
    return params, steps


def test_hsdp(ranks):
    """Shards over two ranks, and two copies of them."""
    assert_same(ranks.run(4, compare, functools.partial(mixture, replicas=2), steps=8, timeout=120))


def tp_row():
    """Ranks that share a layer see the same tokens."""
    return dist.get_rank() // 2


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(4, {}), (2, {"fsdp": False}), (2, {"fsdp": False, "sequence": True})],
    ids=["with FSDP2", "alone", "sequence, alone"],
)
def test_tensor_parallel(ranks, num_ranks, options):
    """Alone with sequence parallelism, gradients of norms are partial sums."""
    make = functools.partial(tensor_parallel, **options)
    assert_same(ranks.run(num_ranks, compare, make, data=tp_row, steps=8))


def test_accumulation(ranks):
    """Two micro-batches, of which FSDP2 reduces only the last."""
    assert_same(ranks.run(2, compare, mixture, micro_batches=2, steps=8))


def test_torchs_own_rule(ranks):
    """With `rule="torch"` the bits are those of plain torch.optim.AdamW on DTensors."""
    assert ranks.run(2, compare_with_torch) == [[]] * 2


def compare_with_torch():
    never = 1e9  # a norm is reduced in some order; gradients that are not clipped are the same in any
    runs = [
        train(mixture, config, max_norm=never, steps=8) for config in (None, {"rule": "torch", **PLANS["streamed"]})
    ]
    for run in runs:
        run.norms = []
    return differences(*runs)


# Mixed precision


def test_fp32_shards_with_bf16_compute(ranks):
    """Not against torch: where weights differ in the last bit, bf16 gradients differ in the third digit."""
    assert_same(ranks.run(2, compare, functools.partial(mixture, policy=HALF), against_torch=False, steps=8))


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_bf16_shards_with_masters(ranks, masters):
    make = functools.partial(mixture, dtype=torch.bfloat16)
    assert_same(ranks.run(2, compare, make, base={"master_weights": masters}, against_torch=False, steps=8))


def test_masters_of_either_kind_are_the_same_run(ranks):
    assert ranks.run(2, compare_masters) == [[]] * 2


def compare_masters():
    make = functools.partial(mixture, dtype=torch.bfloat16)
    runs = [train(make, {"master_weights": kind, **PLANS["streamed"]}, steps=8) for kind in ("fp32", "split")]
    assert any(name == "master_weight" for *_, name in runs[0].state)
    return differences(*runs)


# Lanes that run nothing until forced, with the happens-before checker


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lazy_lanes(ranks, seed):
    assert_same(ranks.run(2, compare, mixture, against_torch=False, lazy_seed=seed, steps=8))


# Ranks that have little or nothing


@pytest.mark.parametrize(
    ("rows", "min_bytes", "moves"),
    [(3, 0, [True, True, True, False]), (5, "32KiB", [True, True, False, False])],
    ids=["empty", "below min_bytes"],
)
def test_ranks_without_anything_to_move(ranks, rows, min_bytes, moves):
    """The last of four ranks has no row at all: it trains with the others, and no message says that nothing moves."""
    answers = ranks.run(4, train_rows, rows, min_bytes)
    assert [moved > 0 for _, _, moved in answers] == moves
    assert [state for _, state, _ in answers] == [2 * 2048 * n for n in ([1, 1, 1, 0] if rows == 3 else [2, 2, 1, 0])]
    assert len({losses for losses, *_ in answers}) == 1


def train_rows(rows, min_bytes):
    """Losses, elements of state on this rank, bytes that were moved."""
    torch.manual_seed(0)
    model = nn.Linear(2048, rows, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    optimizer = offstage.offload(optimizer, model, min_bytes=min_bytes, chunk_bytes="16KiB")
    losses = []
    for _ in range(4):
        loss = model(torch.ones(2, 2048)).square().mean()
        loss.backward()
        end_step(optimizer, clip=1.0)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    state = sum(value.to_local().numel() for value in optimizer.state[model.weight].values() if value.dim())
    return tuple(losses), state, optimizer.receipt().total_bytes_stored


def test_gradients_on_one_rank_only(ranks):
    """An expert that saw tokens on one rank: no rank waits for the other, and the norm is that of what there is."""
    assert ranks.run(2, clip_with_gradients_on_one_rank) == [(5.0, True), (5.0, False)]


def clip_with_gradients_on_one_rank():
    """The norm, and whether this rank's weights have changed."""
    mesh = init_device_mesh("cpu", (2,))
    experts = [nn.Parameter(distribute_tensor(torch.ones(2, 4096), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = offstage.offload(torch.optim.AdamW(experts, lr=0.1), min_bytes=0, chunk_bytes="16KiB")
    if dist.get_rank() == 0:
        gradient = torch.zeros(1, 4096)
        gradient[0, :2] = torch.tensor([3.0, 4.0])
        experts[1].grad = DTensor.from_local(gradient, mesh, [Shard(0)])
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert torch.equal(experts[0].to_local(), torch.ones(1, 4096))
    return norm.item(), bool((experts[1].to_local() != 1.0).any())


@pytest.mark.parametrize("case", ["FSDP2", "sequence"])
def test_ranks_may_differ_in_what_they_update_early(ranks, case):
    """Which updates backward has time for is each rank's own measurement. No rank may wait for another's."""
    assert ranks.run(2, compare_uneven_early, case, timeout=30) == [([], True), ([], False)]


def compare_uneven_early(case):
    """What differs from `fraction=0`, and whether this rank has updated anything in backward."""
    make = fsdp2 if case == "FSDP2" else functools.partial(tensor_parallel, fsdp=False, sequence=True)
    expected = train(make, {"fraction": 0.0}, data=tp_row, steps=8)
    nothing = mock.patch.object(BackwardSelection, "_choose", return_value=None)
    with contextlib.nullcontext() if dist.get_rank() == 0 else nothing:
        run = train(make, {"update_in_backward": True, "chunk_bytes": "16KiB"}, data=tp_row, steps=8)
    return differences(expected, run), run.updated_in_backward > 0


# What cannot be had


def test_overlap_forward_falls_back_and_says_so(ranks):
    for differs, fallbacks, late, warnings in ranks.run(2, compare_overlap_forward):
        assert differs == []
        assert late == 0
        assert len(fallbacks) == 1
        assert "overlap_forward" in fallbacks[0]
        assert "FSDP2" in fallbacks[0]
        assert warnings == [fallbacks[0]]


def compare_overlap_forward():
    expected = train(fsdp2, {"fraction": 0.0}, steps=8)
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("offstage").addHandler(handler)
    run = train(fsdp2, {"overlap_forward": True, "chunk_bytes": "16KiB"}, steps=8)
    return differences(expected, run), run.receipt.fallbacks, run.left_to_forward, warnings


REFUSALS = {
    "CPUOffloadPolicy": ["CPUOffloadPolicy", "Remove offload_policy"],
    "optimizer before fully_shard": ["fully_shard", "Shard first"],
    "offload before fully_shard": ["fully_shard", "Shard the model first"],
    "Adafactor": ["'weight'", "Adafactor", "sharded", "AdamW"],
    "Muon": ["'weight'", "Muon", "sharded", "AdamW"],
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(ranks, name):
    """One message, on every rank, before anything has changed."""
    messages = ranks.run(2, refusal, name)
    assert len(set(messages)) == 1
    for fragment in REFUSALS[name]:
        assert fragment in messages[0]


def refusal(name):
    mesh = init_device_mesh("cpu", (2,))
    shard = functools.partial(fully_shard, mesh=mesh)
    torch.manual_seed(0)
    model = Plain()
    if name == "CPUOffloadPolicy":
        shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        return error_of(ConfigError, lambda: offstage.offload(torch.optim.AdamW(model.parameters()), model))
    if name == "optimizer before fully_shard":
        optimizer = torch.optim.AdamW(model.parameters())
        shard(model)
        return error_of(ConfigError, lambda: offstage.offload(optimizer, model))
    if name == "offload before fully_shard":
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, min_bytes=0)
        shard(model)
        model(torch.arange(24).view(3, 8)).sum().backward()
        return error_of(OffstageError, optimizer.step)
    model = nn.Linear(64, 64, bias=False)
    shard(model)
    make = torch.optim.Muon if name == "Muon" else torch.optim.Adafactor
    before = model.weight.to_local().clone()
    message = error_of(ConfigError, lambda: offstage.offload(make(model.parameters()), model))
    assert torch.equal(model.weight.to_local(), before)
    return message


def error_of(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# The example


def test_the_example_runs_under_torchrun(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OFFSTAGE_CACHE": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [*launcher, "-m", "examples.fsdp2"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "elements that differ between going on and resuming: 0" in found.stdout
    assert "clipping is active too often" not in found.stdout
    assert list(tmp_path.glob("offstage-fsdp2-*")) == []


class Trunk(nn.Module):
    """The root's own layer stands between layers that are sharded one by one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.own, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        return self.last(torch.tanh(self.own(torch.tanh(self.first(x)))))


def thawed(**settings):
    model = Trunk()
    model.first.requires_grad_(False)
    for layer in (model.first, model.last):
        fully_shard(layer)
    fully_shard(model)
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **settings)
    for number in range(6):
        if number == 3:
            model.first.requires_grad_(True)
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach().clone() for param in model.parameters()]


def thawed_in_every_mode():
    expected = thawed(fraction=0.0)
    modes = ({}, {"update_in_backward": True}, {"window": "all"})
    found = [thawed(min_bytes=0, chunk_bytes="16KiB", **mode) for mode in modes]
    return [all(map(torch.equal, one, expected)) for one in found]


def test_layers_thawed_on_the_way(ranks):
    """Room for their state is made in backward, which still needs the weights that were gathered."""
    assert ranks.run(2, thawed_in_every_mode) == [[True] * 3] * 2
