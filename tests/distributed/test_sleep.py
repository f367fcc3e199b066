# SPDX-License-Identifier: Apache-2.0
"""FSDP2 models sleep: shards keep their identity, ranks train on with the same bits, and can save meanwhile."""

import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import offstage
from offstage import asleep, checkpoint, sleep, wake
from offstage.errors import OffstageError
from offstage.tensors import local_of
from tests.support.sharded import PLANS, differences, local, mixture, train
from tests.support.training import lazily, same_bits

STEPS = 20


def rest(model, optimizer):
    params = list(model.parameters())
    sleep(model, optimizer)
    assert asleep(model, optimizer)
    assert not any(local_of(param).untyped_storage().nbytes() for param in params)
    wake(model, optimizer)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))


def rest_in_part(model, optimizer):
    with sleep(model, optimizer, keep=("weights", "buffers")):
        model.step = 0
        with torch.no_grad():
            model(torch.arange(24).view(3, 8))
    sleep(optimizer)
    with sleep(model):
        pass
    wake(optimizer)


def compare(plan, seed):
    """Runs on a rank."""
    ways = itertools.cycle([rest, rest_in_part])
    with lazily(seed), mock.patch("offstage.phases.parking._SMALL", 0):
        runs = [
            train(mixture, plan, steps=STEPS),
            train(mixture, plan, steps=STEPS, between=lambda *job: next(ways)(*job)),
        ]
    return differences(*runs)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", ["plain", "resident", *PLANS])
def test_twenty_cycles(ranks, name, seed):
    plan = {"plain": None, "resident": {"fraction": 0.0}}.get(name, PLANS.get(name))
    assert ranks.run(2, compare, plan, seed, timeout=120) == [[]] * 2


def saved_asleep(folder):
    """Runs on a rank: what is read and saved asleep, and what is refused."""
    model = mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    optimizer = offstage.offload(optimizer, model, min_bytes=0, fraction=0.5, chunk_bytes="16KiB")
    model.step = 0
    model(torch.arange(24).view(3, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = {name: local(value).clone() for name, value in model.state_dict().items()}
    kinds = {name: type(value) for name, value in model.state_dict().items()}
    checkpoint.save(f"{folder}/awake", model, optimizer)
    sleep(model, optimizer)
    found = model.state_dict()
    wrong = [name for name, value in found.items() if not same_bits(local(value), expected[name])]
    assert {name: issubclass(type(value), DTensor) for name, value in found.items()} == {
        name: issubclass(kind, DTensor) for name, kind in kinds.items()
    }
    with pytest.raises(OffstageError, match=r"is asleep.*forward"):
        model(torch.arange(24).view(3, 8))
    with pytest.raises(OffstageError, match="is asleep"):
        next(param for param in model.parameters() if isinstance(param, DTensor)).sum()
    checkpoint.save(f"{folder}/asleep", model, optimizer)
    wake(model, optimizer)
    checkpoint.load(f"{folder}/asleep", model, optimizer)
    model(torch.arange(24).view(3, 8)).sum().backward()
    optimizer.step()
    return wrong


def test_read_and_saved_meanwhile(ranks, tmp_path):
    assert ranks.run(2, functools.partial(saved_asleep, str(tmp_path))) == [[]] * 2
    names = sorted(path.name for path in (tmp_path / "awake").glob("*.distcp"))
    assert names
    for name in names:
        assert (tmp_path / "awake" / name).read_bytes() == (tmp_path / "asleep" / name).read_bytes()


class Small(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def ddp(sleeps, view):
    """Runs on a rank."""
    model = DistributedDataParallel(Small(), gradient_as_bucket_view=view)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(6):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        model(torch.randn(4, 8, generator=generator)).pow(2).mean().backward()
        if sleeps and number % 2:  # with gradients, which are parts of DDP's buckets
            rest(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if sleeps:
            rest(model, optimizer)
    return [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize("view", [False, True])
def test_ddp(ranks, view):
    assert ranks.run(2, ddp, True, view) == ranks.run(2, ddp, False, view)
