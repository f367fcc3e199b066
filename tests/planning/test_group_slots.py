# SPDX-License-Identifier: Apache-2.0
"""The number of slots where the user has not set one."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import offstage
from offstage.config import OffloadConfig
from offstage.planning.planner import make_plan
from tests.support.machines import machine

WIDTH = 64
STATE = 12 * WIDTH * WIDTH
CHUNK = 16 * 1024


def model_of(groups=4, linears=2, *, shard=True):
    """`groups` groups of `linears` linear layers each, and one more layer in the outermost group."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(linears))) for _ in range(groups)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH, bias=False))
    if shard:
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def offloaded(model, **config):
    trained = [param for param in model.parameters() if param.requires_grad]
    return offstage.offload(torch.optim.AdamW(trained), model, **{"min_bytes": 0, "chunk_bytes": CHUNK, **config})


def slots_of(model, **config):
    optimizer = offloaded(model, **config)
    found = optimizer.plan.slots
    optimizer.close()
    return found


def test_as_many_as_a_group_fills(process_group):
    assert slots_of(model_of(), update_in_backward=True) == -(-2 * STATE // CHUNK) == 6
    assert slots_of(model_of(groups=2, linears=4), update_in_backward=True) == 12
    assert slots_of(model_of(linears=9), update_in_backward=True) == 24  # at most
    assert slots_of(model_of(linears=1), update_in_backward=True, chunk_bytes="1MiB") == 3  # at least


def test_other_settings_get_no_more(process_group):
    assert slots_of(model_of()) == 3
    assert slots_of(model_of(), window="64KiB") == 3
    assert slots_of(model_of(shard=False), update_in_backward=True) == 3
    assert slots_of(model_of(), update_in_backward=True, slots=2) == 2  # who says it, gets it
    # Who limits device memory has not said that slots may have it.
    assert slots_of(model_of(), update_in_backward=True, device_budget="128KiB") == 3


def test_a_group_of_several_modules(process_group):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    fully_shard([model[0], model[1]])
    fully_shard(model)
    assert slots_of(model, update_in_backward=True) == 6


def test_frozen_parameters_have_no_state(process_group):
    model = model_of(linears=2)
    for block in model[:-1]:
        block[0].weight.requires_grad_(False)
    assert slots_of(model, update_in_backward=True) == 3


def test_it_is_the_same_after_replan(process_group):
    model = model_of()
    optimizer = offloaded(model, update_in_backward=True)
    for changes, slots in (({"fraction": 0.9}, 6), ({"slots": 4}, 4)):
        optimizer.replan(**changes)
        assert optimizer.plan.slots == slots
    optimizer.close()


def test_a_plan_has_as_many(process_group):
    model = model_of()
    config = OffloadConfig(min_bytes=0, chunk_bytes=CHUNK, update_in_backward=True)
    assert make_plan(model, machine(), config).slots == slots_of(model, update_in_backward=True) == 6
