# SPDX-License-Identifier: Apache-2.0
"""The same bits for every fraction, chunk size, number of slots, master format and backend."""

import copy
import functools
import itertools

import pytest
import torch

import offstage
from tests.support.training import lazily, same_run, train, weights

FORMATS = {
    "fp32": (torch.float32, {}),
    "bf16, fp32 masters": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16, split masters": (torch.bfloat16, {"master_weights": "split"}),
}
CHUNKS = ["64KiB", "1MiB", "1GiB"]
SLOTS = [1, 2, 3, 5]
PLANS = [{"fraction": f, "chunk_bytes": c, "slots": s} for f, c, s in itertools.product((0.3, 1.0), CHUNKS, SLOTS)]


STEPS = 12
"""Of every plan. What a plan does repeats itself with every step; some plans go on for longer."""
LONG = 50


@functools.cache
def reference(name: str, steps: int = LONG):
    dtype, _ = FORMATS[name]
    return train({"fraction": 0.0}, dtype=dtype, steps=steps)


def steps_of(plan):
    """The plan with the most chunks and the one with the fewest slots for them are trained for longer."""
    return LONG if (plan["chunk_bytes"], plan["slots"]) in (("64KiB", 1), ("64KiB", 3)) else STEPS


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p['fraction']}-{p['chunk_bytes']}-{p['slots']}")
@pytest.mark.parametrize("name", FORMATS)
def test_immediate(name, plan):
    dtype, config = FORMATS[name]
    steps = steps_of(plan)
    assert same_run(train({**config, **plan}, dtype=dtype, steps=steps), reference(name, steps))


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p['fraction']}-{p['chunk_bytes']}-{p['slots']}")
@pytest.mark.parametrize("name", FORMATS)
def test_lazy(name, plan):
    dtype, config = FORMATS[name]
    seed = PLANS.index(plan) + 100 * list(FORMATS).index(name)
    with lazily(seed):
        ours = train({**config, **plan}, dtype=dtype, steps=steps_of(plan))
    assert same_run(ours, reference(name, steps_of(plan)))


def test_fp32_and_split_masters_are_the_same_run():
    assert same_run(reference("bf16, fp32 masters"), reference("bf16, split masters"))


def test_close_to_torch():
    """torch's CPU AdamW rounds differently; the run stays close to it."""
    plain, _ = train(None)
    for a, b in zip(weights(reference("fp32")[0]), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


EPSILON = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("plain", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.9999), (0.9, 0.95), (0.5, 0.9)], ids=str)
def test_how_close_to_torch(betas, plain):
    """The bounds that docs/internals/numerics.md promises, on the same gradients of all sizes."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-4, 4, 2001)) for _ in range(2))
    options = {"lr": 1e-3, "betas": betas, "weight_decay": 0.1}
    optimizer = offstage.offload(torch.optim.AdamW([ours], **options), min_bytes=0)
    other = torch.optim.AdamW([theirs], **options, **plain)
    scale = 10 ** torch.empty(2001).uniform_(-6, 2, generator=generator)
    biggest, weight = torch.zeros(2001), ours.detach().abs()
    for step in range(1, 101):
        ours.grad = torch.randn(2001, generator=generator) * scale
        theirs.grad = ours.grad.clone()
        optimizer.step()
        other.step()
        biggest, weight = torch.maximum(biggest, ours.grad.abs()), torch.maximum(weight, theirs.detach().abs())
        if step in (1, 10, 100):
            a, b = (
                {name: one.double() for name, one in of.state[p].items()}
                for of, p in ((optimizer, ours), (other, theirs))
            )
            assert bool(((a["exp_avg"] - b["exp_avg"]).abs() <= EPSILON / (1 - betas[0]) * biggest).all())
            assert bool(((a["exp_avg_sq"] - b["exp_avg_sq"]).abs() <= EPSILON / (1 - betas[1]) * b["exp_avg_sq"]).all())
            a_step = 2 * EPSILON * weight + EPSILON / (1 - betas[1]) * options["lr"]
            assert bool(((ours - theirs).detach().abs() <= step * a_step).all())


@pytest.mark.parametrize("name", ["bf16, fp32 masters", "bf16, split masters"])
def test_masters_are_close_to_torch_on_the_same_gradients(name):
    """bf16 weights with masters against torch's AdamW on fp32 copies, fed with the same gradients."""
    dtype, config = FORMATS[name]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in ((33, 65), (129,), (7, 5, 3))]
    plain = [torch.nn.Parameter(p.detach().float()) for p in ours]
    options = {"lr": 3e-3, "weight_decay": 0.1}
    optimizer = offstage.offload(torch.optim.AdamW(ours, **options), min_bytes=0, chunk_bytes="16KiB", **config)
    other = torch.optim.AdamW(plain, **options)
    for _ in range(50):
        for a, b in zip(ours, plain, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.float()
        optimizer.step()
        other.step()
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        master = optimizer.state_dict()["state"][i]["master_weight"]
        torch.testing.assert_close(master, b.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(a.detach(), master.to(dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"lr": torch.tensor(2e-3)},
        {"betas": (0.5, 0.9), "eps": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_options(make, options):

    def run(config):  # schedulers write into a tensor lr, so each run gets its own
        return train(config, make=make, options=copy.deepcopy(options), steps=10)

    plain, resident = run(None), run({"fraction": 0.0})
    for config in ({"chunk_bytes": "64KiB"}, {"chunk_bytes": "16KiB", "fraction": 0.5}):
        assert same_run(run(config), resident)
    for a, b in zip(weights(resident[0]), weights(plain[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state_dtype", ["bfloat16", {"exp_avg": "bfloat16"}], ids=str)
@pytest.mark.parametrize("master_weights", ["none", "fp32", "split"])
def test_bf16_moments(state_dtype, master_weights):
    config = {"state_dtype": state_dtype, "master_weights": master_weights}
    resident = train({**config, "fraction": 0.0}, dtype=torch.bfloat16, steps=10)
    assert same_run(train({**config, "chunk_bytes": "16KiB"}, dtype=torch.bfloat16, steps=10), resident)


def test_fp16_parameters_with_masters():
    resident = train({"fraction": 0.0}, dtype=torch.float16, steps=10)
    assert same_run(train({"chunk_bytes": "16KiB"}, dtype=torch.float16, steps=10), resident)
