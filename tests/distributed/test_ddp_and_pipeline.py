# SPDX-License-Identifier: Apache-2.0
"""DDP and pipeline schedules: every way to overlap that works with them gives the bits of `fraction=0`."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offstage
from offstage.errors import ConfigError
from tests.support.sharded import MAX_NORM, SCHEDULES, Pipeline, Plain, Run, compared, keep, look, train

SMALL = {"chunk_bytes": "16KiB"}
PLANS = {
    "streamed": SMALL,
    "window": {**SMALL, "window": "all"},
    "half, forward": {**SMALL, "fraction": 0.5, "overlap_forward": True},
    "window, forward": {**SMALL, "window": "48KiB", "overlap_forward": True},
    "host": {**SMALL, "host_fraction": 0.4},
    "host, window, forward": {**SMALL, "host_fraction": 0.4, "window": "48KiB", "overlap_forward": True},
}


def assert_same(answers, plans=PLANS):
    """No rank has seen a difference, and every plan did what it is for."""
    for found in answers:
        assert {name: differs for name, (differs, _) in found.items() if differs} == {}
        for name, plan in plans.items():
            assert_did(found[name][1], plan)


def assert_did(run, plan):
    receipt = run.receipt
    assert receipt.total_bytes_stored > 0
    assert (receipt.host_update_ms is not None) == ("host_fraction" in plan)
    assert (run.fetched_in_backward > 0) == ("window" in plan)
    assert (run.left_to_forward > 0) == ("overlap_forward" in plan)
    assert receipt.fallbacks == ()


# DDP


class Occasional(Plain):
    """Its last block runs in even steps only."""

    step = 0

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks[: 3 - self.step % 2]:
            x = block(x)
        return self.head(x)


def compare_ddp(make, wrapping, plans=PLANS, lazy_seed=None, **loop):
    wrap = functools.partial(DistributedDataParallel, **wrapping)
    build = functools.partial(seeded, make)
    return compared(lambda config: train(build, config, wrap=wrap, **loop), plans, lazy_seed=lazy_seed)


def seeded(make):
    torch.manual_seed(0)
    return make()


DDP = {
    "plain": (Plain, {}),
    "gradients in buckets": (Plain, {"gradient_as_bucket_view": True}),
    "unused": (Occasional, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
}


@pytest.mark.parametrize(
    ("case", "num_ranks", "max_norm"), [*((case, 2, MAX_NORM) for case in DDP), ("gradients in buckets", 4, 0.1)]
)
def test_ddp(ranks, case, num_ranks, max_norm):
    answers = ranks.run(num_ranks, compare_ddp, *DDP[case], max_norm=max_norm)
    assert_same(answers)
    for name in PLANS:  # all ranks clip alike, and not always
        norms = [found[name][1].norms for found in answers]
        assert all(each == norms[0] for each in norms)
        assert {bool(norm > max_norm) for norm in norms[0]} == {False, True}


def test_ddp_accumulates(ranks):
    assert_same(ranks.run(2, compare_ddp, Plain, {}, micro_batches=2, steps=8))


@pytest.mark.parametrize("seed", [0, 1])
def test_ddp_on_lazy_lanes(ranks, seed):
    """Nothing runs until forced, and the happens-before checker looks on."""
    plans = {name: PLANS[name] for name in ("window, forward", "host, window, forward")}
    wrapping = {"gradient_as_bucket_view": True}
    assert_same(ranks.run(2, compare_ddp, Plain, wrapping, plans, seed, steps=8), plans)


@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_updates_in_backward_are_refused_under_ddp(ranks, wrapped):
    """Gradients are not reduced yet when they are ready."""
    messages = ranks.run(2, refusal_under_ddp, wrapped)
    assert messages[0] == messages[1]
    assert "update_in_backward" in messages[0]
    assert "DistributedDataParallel" in messages[0]
    assert "overlap_forward" in messages[0]


def refusal_under_ddp(wrapped):
    model = seeded(Plain)
    config = {**SMALL, "min_bytes": 0, "update_in_backward": True}
    if wrapped == "before":
        model = DistributedDataParallel(model)
        with pytest.raises(ConfigError) as caught:
            offstage.offload(torch.optim.AdamW(model.parameters()), model, **config)
    else:
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, **config)
        model = DistributedDataParallel(model)
        with pytest.raises(ConfigError) as caught:
            model(torch.arange(24).view(3, 8))
        optimizer.close()
    return str(caught.value)


# Pipelines


MAX_NORMS = (0.5, 10.0, 10.0)
"""In turn: norms are between them, so that one step out of three is clipped."""


def train_stages(config, schedule_name, per_stage=False, steps=20):
    """This rank's stages. One optimizer for all of them and a norm over all ranks, or one each and no clipping."""
    pipeline = Pipeline(schedule_name)
    modules = pipeline.modules
    owners = list(modules) if per_stage else [modules]
    optimizers = [torch.optim.AdamW(owner.parameters(), lr=3e-3, weight_decay=0.1) for owner in owners]
    if config is not None:
        optimizers = [
            offstage.offload(optimizer, owner, min_bytes=0, **config)
            for optimizer, owner in zip(optimizers, owners, strict=True)
        ]
    run = Run()
    for step in range(steps):
        pipeline.run()
        if not per_stage:
            run.norms.append(clip(modules, optimizers[0], MAX_NORMS[step % 3]))
        look(run, optimizers, before_step=True)
        for optimizer in optimizers:
            optimizer.step()
        look(run, optimizers, before_step=False)
        for optimizer in optimizers:
            optimizer.zero_grad()
    keep(run, modules, optimizers)
    return run


@torch.no_grad()
def clip(modules, optimizer, max_norm):
    """By the norm of the whole model's gradients."""
    if isinstance(optimizer, offstage.OffloadedOptimizer):
        return optimizer.clip_grad_norm_(max_norm, group=dist.group.WORLD)
    squares = torch.stack([param.grad.double().square().sum() for param in modules.parameters()]).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt().float()
    for param in modules.parameters():
        param.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def compare_stages(schedule_name, plans=PLANS, lazy_seed=None, **loop):
    return compared(lambda config: train_stages(config, schedule_name, **loop), plans, lazy_seed=lazy_seed)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline(ranks, schedule):
    answers = ranks.run(2, compare_stages, schedule)
    assert_same(answers)
    norms = [found["streamed"][1].norms for found in answers]
    assert norms[0] == norms[1]
    assert [bool(norm > MAX_NORMS[step % 3]) for step, norm in enumerate(norms[0][:6])] == [True, False, False] * 2


def test_an_optimizer_for_each_stage(ranks):
    """Two offloaded optimizers in each process, whose stages take turns."""
    assert_same(ranks.run(2, compare_stages, "Interleaved1F1B", per_stage=True, steps=8))


def test_pipeline_on_lazy_lanes(ranks):
    plans = {name: PLANS[name] for name in ("window, forward", "host, window, forward")}
    assert_same(ranks.run(2, compare_stages, "1F1B", plans, 0, steps=8), plans)


def test_updates_in_backward_wait_for_step_in_a_pipeline(ranks):
    """Gradients come in as many parts as there are micro-batches: the same bits, and the receipt says so."""
    plan = {**SMALL, "update_in_backward": True}
    for found in ranks.run(2, compare_stages, "1F1B", {"backward": plan}, steps=8):
        differs, run = found["backward"]
        assert differs == []
        assert run.updated_in_backward == 0
        (said,) = [text for text in run.receipt.fallbacks if "update_in_backward has no effect" in text]
        assert "pipeline" in said
