# SPDX-License-Identifier: Apache-2.0
"""Activations offloaded on every rank: pipeline schedules, DDP and FSDP2 give the gradients that they give without."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import offstage
from offstage.activations.offload import offload_activations
from offstage.errors import ConfigError
from tests.support.lives import end_step
from tests.support.sharded import VOCABULARY, WIDTH, Block, Pipeline, Plain, fully_sharded, local, loss_of
from tests.support.training import lazily, same_bits

CONFIGS = {
    "all": {"keep_last": 0},
    "two ahead, a half": {"keep_last": 0, "prefetch": 2, "fraction": 0.5},
    "weights too": {"weights": True, "keep_last": 0},
    "weights alone": {"weights": True, "activations": False},
}
STEPS = 2


def gradients(module):
    return {name: local(param.grad).clone() for name, param in module.named_parameters() if param.grad is not None}


def differences(found, expected):
    """Names of what differs, in some bit or by not being there."""
    differs = [f"{len(found)} steps"] if len(found) != len(expected) else []
    for step, (one, other) in enumerate(zip(found, expected, strict=False)):
        differs += [f"{step}: {name}" for name in one.keys() ^ other.keys()]
        differs += [f"{step}: {name}" for name in one.keys() & other.keys() if not same_bits(one[name], other[name])]
    return differs


# Pipelines


def run_stages(schedule_name, config, checkpointed=False):
    """Gradients and weights of this rank's stages after each step, and the bytes that were moved."""
    pipeline = Pipeline(schedule_name, blocks=3, checkpointed=checkpointed)
    modules = pipeline.modules
    handles = [] if config is None else [offload_activations(module, min_bytes=0, **config) for module in modules]
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(STEPS):
        pipeline.run()
        found.append(gradients(modules))
        end_step(optimizer)
        found.append({name: param.detach().clone() for name, param in modules.named_parameters()})
    receipts = [handle.receipt() for handle in handles]
    return found, [receipt.total_bytes_offloaded + receipt.weight_bytes_fetched for receipt in receipts]


def compare_stages(schedule_name, checkpointed, seeds):
    expected, _ = run_stages(schedule_name, None, checkpointed)
    answers = {}
    for name, config in CONFIGS.items():
        for seed in seeds:
            with lazily(seed):
                found, moved = run_stages(schedule_name, config, checkpointed)
            assert all(moved)
            answers[name, seed] = differences(found, expected)
    return answers


@pytest.mark.parametrize(
    ("schedule", "checkpointed", "seeds"),
    [
        ("GPipe", False, [None, 0]),
        ("1F1B", False, [None, 0]),
        ("1F1B", True, [None, 0]),
        ("Interleaved1F1B", False, [None]),  # two models in each process
    ],
)
def test_pipelines(ranks, schedule, checkpointed, seeds):
    """Several micro-batches are in flight, and leave and return in the schedule's order."""
    for answers in ranks.run(2, compare_stages, schedule, checkpointed, seeds):
        assert {case: differs for case, differs in answers.items() if differs} == {}


# Data parallel


class Reduced(torch.autograd.Function):
    """Sums over ranks in place, of which autograd does not know."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gated(nn.Module):
    """Results that can be made again, one that is written to by a collective, and one with a parameter in it.

    The last is saved by the next layer, when FSDP2 has given this layer's parameters up.
    """

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        y = self.down(nn.functional.silu(gate) * up)
        return (x + self.score(Reduced.apply(y * self.score(x).sigmoid()))) * self.scale


WRAPPED = {
    "DDP": DistributedDataParallel,
    "DDP, gradients in buckets": functools.partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "FSDP2": lambda model: fully_sharded(model, init_device_mesh("cpu", (dist.get_world_size(),))),
}


def run_wrapped(wrap, config, first, offload=None, block=Block):
    """Gradients after each of some iterations of two micro-batches, each rank with its own data."""
    torch.manual_seed(0)
    model = Plain(4, block)
    handle = None
    if config is not None and first == "activations":
        handle = offload_activations(model, min_bytes=0, **config)
    wrapped = WRAPPED[wrap](model)
    if config is not None and first == "wrapper":
        handle = offload_activations(model, min_bytes=0, **config)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    if offload is not None:
        optimizer = offstage.offload(optimizer, wrapped, min_bytes=0, chunk_bytes="16KiB", **offload)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        for _ in range(2):
            tokens, targets = torch.randint(VOCABULARY, (2, 2, 6), generator=generator)
            loss_of(wrapped(tokens), targets).backward()
        found.append(gradients(wrapped))
        end_step(optimizer)
    if offload is not None:
        optimizer.synchronize()
    found.append({name: local(param).detach().clone() for name, param in wrapped.named_parameters()})
    return found, handle


def compare_wrapped(wrap, config, first, offload=None, seeds=(None, 0), block=Block):
    expected, _ = run_wrapped(wrap, None, first, offload, block)
    answers = {}
    for seed in seeds:
        with lazily(seed):
            found, handle = run_wrapped(wrap, config, first, offload, block)
        assert handle.bytes_returned > 0
        assert bool(handle.bytes_remade) is (block is Gated)
        answers[seed] = differences(found, expected)
    return answers


@pytest.mark.parametrize("first", ["activations", "wrapper"])
@pytest.mark.parametrize("wrap", WRAPPED)
def test_data_parallel(ranks, wrap, first):
    """Weights that FSDP2 gathers for a layer stay what they are: its own tensors, gone and back in backward."""
    for answers in ranks.run(2, compare_wrapped, wrap, {}, first):
        assert answers == {None: [], 0: []}


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_what_is_made_again(ranks, wrap):
    """Only what gives the same bits: not what a collective has written to, nor what needs a layer's own parameter."""
    for answers in ranks.run(2, compare_wrapped, wrap, {"keep_last": 0}, "wrapper", None, (None, 0), Gated):
        assert answers == {None: [], 0: []}


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_data_parallel_with_our_optimizer(ranks, wrap):
    offload = {"window": "48KiB", "overlap_forward": wrap == "DDP"}
    for answers in ranks.run(2, compare_wrapped, wrap, {"prefetch": 2}, "wrapper", offload):
        assert answers == {None: [], 0: []}


def weights_under_ddp(first):
    """What differs, or the message of the refusal."""
    expected, _ = run_wrapped("DDP", None, first)
    try:
        found, _ = run_wrapped("DDP", {"weights": True}, first)
    except ConfigError as error:
        return str(error)
    return differences(found, expected)


@pytest.mark.parametrize("first", ["activations", "wrapper"])
def test_weights_on_the_host_under_ddp_are_right_or_refused(ranks, first):
    """DDP reduces gradients after they have arrived, in memory of its own."""
    for answer in ranks.run(2, weights_under_ddp, first):
        assert answer == [] or "DistributedDataParallel" in answer


def weights_under_fsdp2():
    with pytest.raises(ConfigError) as caught:
        run_wrapped("FSDP2", {"weights": True}, "wrapper")
    return str(caught.value)


def test_weights_on_the_host_under_fsdp2_are_refused(ranks):
    for message in ranks.run(2, weights_under_fsdp2):
        assert "found a DTensor" in message
