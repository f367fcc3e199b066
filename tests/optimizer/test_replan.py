# SPDX-License-Identifier: Apache-2.0
"""`replan`: state moves to another plan between steps, and the bits stay."""

import itertools
import logging

import pytest
import torch
from torch import nn

import offstage
from offstage.config import Placement
from offstage.engine import named_state
from offstage.errors import ConfigError, HostMemoryError
from offstage.optimizer.optimizer import runtime_of
from tests.support.lives import end_step
from tests.support.training import THREADED, lazily, same_run, train

SMALL = {"chunk_bytes": "16KiB"}
FORMATS = {
    "fp32": (torch.float32, {}),
    "bf16, fp32 masters": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16, split masters": (torch.bfloat16, {"master_weights": "split"}),
}
PLANS = [
    {"update_on": "host", "threads": 2},
    {"device_budget": "120KiB"},
    {"fraction": 1.0, "update_on": "device", "slots": 1},
    {"host_fraction": 0.4, "threads": 2},
    {"fraction": 0.4},
    {"fraction": 0.7, "update_on": "device", "chunk_bytes": "32KiB"},
]


def moving(model: nn.Module, optimizer: offstage.OffloadedOptimizer, step: int) -> None:
    if step % 3 == 1:
        optimizer.replan(**PLANS[step // 3 % len(PLANS)])


def moved(name: str, **config):
    dtype, formats = FORMATS[name]
    run = train({**SMALL, **formats, **config}, dtype=dtype, steps=20, between=moving)
    run[1].synchronize()
    return run


def stayed(name: str):
    return train({"fraction": 0.0}, dtype=FORMATS[name][0], steps=20)


@pytest.mark.parametrize(("name", "lanes"), [*((name, None) for name in FORMATS), *zip(FORMATS, range(3), strict=True)])
def test_the_bits_stay(name, lanes):
    with lazily(lanes):
        ours = moved(name)
    assert same_run(ours, stayed(name))


@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_stay_with_overlap_and_threads(name):
    with lazily(THREADED):
        ours = moved(name, overlap_forward=True)
    assert same_run(ours, stayed(name))


@pytest.mark.parametrize("clip", [None, 1e4, 1e-3], ids=["no clipping", "never active", "always active"])
def test_updates_in_backward_go_on(clip):
    def run(plans, **config):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = offstage.offload(inner, model, min_bytes=0, chunk_bytes="16KiB", **config)
        for step, plan in zip(range(9), itertools.cycle(plans), strict=False):
            model(torch.full((3, 40), 0.1 * (step + 1))).pow(2).mean().backward()
            end_step(optimizer, clip)
            if plan and step % 2:
                optimizer.replan(**plan)
        return model, optimizer

    ours = run(PLANS[:1] + PLANS[3:5], update_in_backward=True, overlap_forward=True)
    ours[1].synchronize()
    assert same_run(ours, run([{}], fraction=0.0))


def small(**config):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(6)))
    return model, offstage.offload(torch.optim.AdamW(model.parameters()), model, **{"min_bytes": 0, **SMALL, **config})


def step_of(model, optimizer):
    model(torch.ones(2, 40)).sum().backward()
    end_step(optimizer)


def test_the_plan_is_the_new_one_and_the_receipt_goes_on():
    model, optimizer = small()
    step_of(model, optimizer)
    before = optimizer.receipt()
    plan = optimizer.replan(update_on="host")
    assert plan == optimizer.plan
    assert set(plan.placements) == {Placement.HOST}
    assert optimizer.config.update_on == "host"
    assert optimizer.receipt().device_state_bytes == 0
    step_of(model, optimizer)
    after = optimizer.receipt()
    assert after.steps == before.steps + 1
    assert after.total_bytes_fetched > before.total_bytes_fetched
    assert after.bytes_fetched == sum(param.nbytes for param in model.parameters())


def test_resident_state_that_stays_is_not_copied():
    model, optimizer = small(fraction=0.5)
    step_of(model, optimizer)
    kept = next(held for held in runtime_of(optimizer).all_states() if held.placement is Placement.RESIDENT)
    address = kept.raw("exp_avg").data_ptr()
    optimizer.replan(host_fraction=0.5)
    now = runtime_of(optimizer).state_of(kept.param)
    assert now.placement is Placement.RESIDENT
    assert now.raw("exp_avg").data_ptr() == address


def test_a_budget_takes_the_place_of_a_fraction_and_back():
    model, optimizer = small(fraction=0.5)
    step_of(model, optimizer)
    assert optimizer.replan(device_budget="48KiB", slots=1).device_bytes <= 48 * 1024
    assert optimizer.config.fraction is None
    optimizer.replan(fraction=1.0)
    assert optimizer.config.device_budget is None
    assert set(optimizer.plan.placements) == {Placement.STREAMED}


def test_more_parameters_and_more_keys_afterwards():
    model, optimizer = small(update_on="host")
    step_of(model, optimizer)
    optimizer.replan(update_on="device")
    optimizer.param_groups[0]["amsgrad"] = True
    step_of(model, optimizer)
    optimizer.replan(host_fraction=0.5)
    extra = nn.Parameter(torch.ones(500))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones_like(extra)
    step_of(model, optimizer)
    assert float(optimizer.state[extra]["step"]) == 1
    assert "max_exp_avg_sq" in optimizer.state[next(iter(model.parameters()))]


REFUSED = {
    "formats": ({"master_weights": "none"}, ConfigError, ["found master_weights", "load its state_dict()"]),
    "window": ({"window": "all"}, ConfigError, ["found window", "load its state_dict()"]),
    "unknown": ({"device_budgets": 1}, ConfigError, ["did you mean 'device_budget'"]),
    "no room": ({"device_budget": "1KiB"}, ConfigError, ["device_budget of 1.0 KiB cannot hold", "Raise it to"]),
    "no memory": ({"host_budget": "1KiB"}, HostMemoryError, ["host_budget of 1.0 KiB cannot hold", "Raise it to"]),
    "no peak": ({"device_peak": "1GiB"}, ConfigError, ["looks at the peak", "give device_budget"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name):
    changes, error, parts = REFUSED[name]
    model, optimizer = small()
    step_of(model, optimizer)
    before, config = optimizer.plan, optimizer.config
    with pytest.raises(error) as raised:
        optimizer.replan(**changes)
    assert all(part in str(raised.value) for part in parts), raised.value
    assert (optimizer.plan, optimizer.config) == (before, config)
    step_of(model, optimizer)


def test_a_failure_in_the_middle_changes_nothing(monkeypatch):
    model, optimizer = small(update_on="host")
    other_model, other = small(update_on="host")
    for one, two in ((model, optimizer), (other_model, other)):
        step_of(one, two)
    adopt, calls = named_state.adopt, itertools.count()

    def fail(*arguments):
        if next(calls) == 3:
            raise MemoryError
        adopt(*arguments)

    monkeypatch.setattr(named_state, "adopt", fail)
    with pytest.raises(MemoryError):
        optimizer.replan(fraction=0.5, update_on="device")
    for one, two in ((model, optimizer), (other_model, other)):
        step_of(one, two)
    assert same_run((model, optimizer), (other_model, other))


def test_between_backward_and_step_is_refused():
    model, optimizer = small(update_in_backward=True)
    for _ in range(2):
        step_of(model, optimizer)
    model(torch.ones(2, 40)).sum().backward()
    with pytest.raises(offstage.OffstageError, match="between backward and step"):
        optimizer.replan(update_on="host")
    optimizer.step()


def test_it_is_logged(caplog):
    model, optimizer = small()
    step_of(model, optimizer)
    with caplog.at_level(logging.INFO, "offstage"):
        optimizer.replan(update_on="host")
    assert "replanned" in caplog.text
    assert "updated on the host (6 parameters)" in caplog.text


class OutOfSlots:
    """Lanes that have no memory for the last slot."""

    def __init__(self, lanes, most):
        self._empty, self._left = lanes.empty, most

    def __call__(self, nbytes):
        self._left -= 1
        if self._left < 0:
            raise torch.OutOfMemoryError("out of memory")
        return self._empty(nbytes)


def test_a_budget_that_does_not_fit_names_one_that_would():
    model, optimizer = small(device_budget="64KiB", chunk_bytes="16KiB")
    lanes = runtime_of(optimizer).engines[0].transport.lanes
    lanes.empty = OutOfSlots(lanes, 2)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step_of(model, optimizer)
    slot = optimizer.plan.slot_bytes
    note = "\n".join(raised.value.__notes__)
    assert f"replan(device_budget={64 * 1024 - slot})" in note
    del lanes.empty
    optimizer.replan(device_budget=64 * 1024 - slot)
    optimizer.step()  # the gradients are still there
