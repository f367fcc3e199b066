# SPDX-License-Identifier: Apache-2.0
"""Offloading saves device memory, the receipt says how much, and settings with which it does not are refused."""

import functools

import pytest
import torch
from torch import nn

import offstage
from offstage.config import OffloadConfig, format_size
from offstage.planning.plan import plan_placements
from tests.support.training import lazily

STATE = 12 * 10_000_000


def params_of(*numbers: int, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(number, dtype=dtype)) for number in numbers]


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, value)
    optimizer.step()


@pytest.mark.parametrize("lanes", [None, 0], ids=["immediate", "lazy"])
def test_ten_million_parameters_take_far_less_than_resident(lanes):
    with lazily(lanes):
        params = params_of(6_000_000, 4_000_000)
        optimizer = offstage.offload(torch.optim.AdamW(params))
        planned = optimizer.plan
        before = optimizer.receipt()
        step(params, optimizer)
        receipt = optimizer.receipt()
    assert receipt.device_state_bytes <= STATE / 4
    assert receipt.device_state_bytes == pytest.approx(planned.device_bytes, rel=0.02)
    assert before.net_saved_bytes == receipt.net_saved_bytes == STATE - receipt.device_state_bytes
    row = next(line for line in str(receipt).splitlines() if line.startswith("saved on the device, net"))
    assert row.endswith(format_size(receipt.net_saved_bytes))


KINDS = {
    "fp32": (torch.optim.AdamW, torch.float32, {}),
    "split masters": (torch.optim.AdamW, torch.bfloat16, {"master_weights": "split"}),
    "half": (torch.optim.AdamW, torch.bfloat16, {"fraction": 0.5}),
    "budget": (torch.optim.AdamW, torch.bfloat16, {"device_budget": "4MiB"}),
    "on the host": (torch.optim.AdamW, torch.bfloat16, {"update_on": "host"}),
    "host and device": (torch.optim.AdamW, torch.bfloat16, {"host_fraction": 0.5}),
    "whole parameters": (functools.partial(torch.optim.SGD, momentum=0.9), torch.float32, {}),
    "small": (torch.optim.AdamW, torch.bfloat16, {"min_bytes": "1MiB"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_real_bytes_are_the_planned_ones(kind):
    make, dtype, settings = KINDS[kind]
    params = params_of(100_000, 200_000, 130_000, 70_000, 200_000, 90_000, dtype=dtype)
    optimizer = offstage.offload(make(params), **settings)
    planned = plan_placements(optimizer.plan.sizes, OffloadConfig(**settings))
    step(params, optimizer)
    receipt = optimizer.receipt()
    assert receipt.device_state_bytes == pytest.approx(planned.device_bytes, rel=0.02)
    assert receipt.host_state_bytes == pytest.approx(planned.host_bytes, rel=0.02)
    assert receipt.net_saved_bytes == pytest.approx(planned.net_saved_bytes, rel=0.02)
    assert receipt.net_saved_bytes > 0


def test_the_bits_do_not_depend_on_who_chose_the_chunks():
    trained = []
    for settings in ({}, {"chunk_bytes": "16KiB"}, {"chunk_bytes": "100KiB"}, {"fraction": 0.0}):
        params = params_of(30_001, 50_000, 20_011)
        optimizer = offstage.offload(torch.optim.AdamW(params, lr=0.1), **settings)
        for number in range(3):
            step(params, optimizer, value=1.0 / (number + 1))
        trained.append(torch.cat([param.detach() for param in params]).view(torch.int16))
    assert all(torch.equal(trained[0], other) for other in trained[1:])


def test_groups_that_are_added_grow_the_chunks():
    params = params_of(100_000, 1_000_000)
    optimizer = offstage.offload(torch.optim.AdamW(params[:1]))
    few = optimizer.plan.slot_bytes
    optimizer.add_param_group({"params": params[1:]})
    step(params, optimizer)
    assert few < optimizer.plan.slot_bytes <= 12 * 1_100_000 / 12
    assert optimizer.receipt().net_saved_bytes > 0.7 * 12 * 1_100_000


def test_what_saves_nothing_is_refused_before_anything_moved():
    params = params_of(1_000_000)
    plain = torch.optim.AdamW(params)
    with pytest.raises(offstage.OffloadIneffectiveError, match=r"11\.4 MiB of state.* found 24\.0 MiB .*chunk_bytes"):
        offstage.offload(plain, chunk_bytes="8MiB")
    step(params, plain)  # it is as it was
    optimizer = offstage.offload(plain)
    planned = optimizer.plan
    with pytest.raises(offstage.OffloadIneffectiveError, match="Leave out slots"):
        optimizer.replan(slots=1000)
    assert optimizer.plan == planned
    step(params, optimizer)


def test_off_and_a_budget_with_room_for_all_save_nothing_and_say_so():
    for settings in ({"fraction": 0.0}, {"device_budget": "1GiB"}):
        params = params_of(100_000)
        optimizer = offstage.offload(torch.optim.AdamW(params), **settings)
        step(params, optimizer)
        assert optimizer.receipt().net_saved_bytes == 0
