# SPDX-License-Identifier: Apache-2.0
"""`SharedWeights`: another process reads the weights of a sleeping model, without a copy."""

import multiprocessing
import os
import pickle

import pytest
import torch
from torch import nn

import offstage
from offstage.errors import OffstageError
from offstage.lanes.lanes import ImmediateLanes
from offstage.lanes.link import use_lanes
from offstage.phases.sharing import SharedWeights
from tests.support.training import same_bits

SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}


@pytest.fixture(autouse=True)
def _own_host_memory():
    with use_lanes(ImmediateLanes):
        yield


def make():
    model = nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Linear(60, 40)).bfloat16()
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("turned", torch.arange(12.0).view(3, 4).t())
    model.tied = model[0].weight
    return model


def train(model, optimizer):
    model(torch.randn(4, 40, dtype=torch.bfloat16)).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _serve(connection):
    """The other process: tells what it reads, as bytes."""
    while (described := connection.recv()) is not None:
        opened = described.open()
        connection.send({name: (value.dtype, value.contiguous().view(-1).tolist()) for name, value in opened.items()})


@pytest.fixture(scope="module")
def other_process():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join(30)


@pytest.mark.parametrize("config", [{"fraction": 0.5}, {"weights": "host"}])
def test_another_process_reads_the_weights(config, other_process):
    model = make()
    shared = SharedWeights(model)
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, **SMALL, **config)
    sizes = []
    for _ in range(3):
        train(model, optimizer)
        optimizer.synchronize()
        expected = {name: (value.dtype, value.view(-1).tolist()) for name, value in plain(model).items()}
        offstage.sleep(model, optimizer)
        described = shared.while_asleep()
        assert len(pickle.dumps(described)) < 5000
        other_process.send(described)
        assert other_process.recv() == expected
        sizes.append((len(described.files), sum(described.files.values())))
        offstage.wake(model, optimizer)
    assert len(set(sizes)) == 1  # the same memory in every cycle


def plain(model):
    return {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}


def test_it_is_the_same_memory():
    model = make()
    shared = SharedWeights(model)
    offstage.sleep(model)
    opened = shared.while_asleep().open()
    assert same_bits(opened["0.weight"], model.state_dict()["0.weight"])
    model.state_dict()["0.weight"].fill_(3.0)
    assert bool((opened["0.weight"] == 3.0).all())
    offstage.wake(model)
    assert bool((model[0].weight == 3.0).all())


def test_misuse():
    model = make()
    shared = SharedWeights(model)
    with pytest.raises(OffstageError, match="while the model is awake"):
        shared.while_asleep()
    offstage.sleep(model)
    with pytest.raises(OffstageError, match="before the first sleep"):
        SharedWeights(model)
    described = shared.while_asleep()
    offstage.wake(model)
    with pytest.raises(OffstageError, match=r"cannot be opened.*same user"):
        type(described)(2**22 + 5, described.files, described.places).open()


def test_files_are_closed():
    def files():
        return sum("memfd:offstage" in os.readlink(f"/proc/self/fd/{name}") for name in open_files())

    before = files()
    model = make()
    shared = SharedWeights(model)
    offstage.sleep(model)
    shared.while_asleep().open()
    assert files() > before
    del model, shared
    assert files() == before


def open_files():
    return [name for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]
