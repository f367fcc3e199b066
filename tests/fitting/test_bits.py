# SPDX-License-Identifier: Apache-2.0
"""`fit` loses no bit: through watching, every switch and every correction, the weights are those of the plain loop."""

import contextlib
import dataclasses
import functools

import pytest
import torch

import offstage
from offstage.config import Placement
from offstage.optimizer.optimizer import runtime_of
from tests.support.machines import machine
from tests.support.simulated_jobs import SMALL, Task, device, fitting, resident
from tests.support.training import lazily, same_bits

LOOPS = {
    "plain": Task(),
    "clips, never active": Task(clip="ours"),
    "clips, always active": Task(clip="ours", max_norm=1e-3),
    "torch clips": Task(clip="torch", max_norm=1e-3),
    "accumulates": Task(micro_batches=2),
    "accumulates without saying so": Task(micro_batches=2, accumulates=False, clip="torch", max_norm=1e-3),
    "bf16": Task(dtype=torch.bfloat16, clip="ours", max_norm=1e-2),
    "grows": Task(steps=16, rows=lambda step: 64 if step < 9 else 256),
}


@functools.cache
def plainly(task, *, is_simulated):
    """The weights of the run with all state on the device."""
    return task.run(resident, device() if is_simulated else None).weights()


def same(ours, task, *, is_simulated=True) -> bool:
    expected = plainly(task, is_simulated=is_simulated)
    return all(same_bits(a, b) for a, b in zip(ours.weights(), expected, strict=True))


@pytest.mark.parametrize("device_peak", [1_900_000, 2_600_000, 1 << 30])
@pytest.mark.parametrize("name", LOOPS)
def test_on_a_simulated_device(name, device_peak):
    task = LOOPS[name]
    masters = {"master_weights": "split"} if task.dtype == torch.bfloat16 else {}
    ours = task.run(fitting(device_peak, **masters), device())
    assert ours.optimizer.fitted is not None
    assert same(ours, task)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("name", ["plain", "clips, always active", "torch clips", "accumulates", "bf16"])
def test_on_immediate_and_lazy_lanes(name, seed):
    """Without memory statistics the plan follows from sizes; a small limit keeps most of it on the host."""
    task = dataclasses.replace(LOOPS[name], steps=9)
    with lazily(seed) if seed is not None else contextlib.nullcontext():
        ours = task.run(fitting(1_400_000, machine=machine()), None)
        found = runtime_of(ours.optimizer)
    assert ours.optimizer.fitted is not None
    assert any(state.placement is not Placement.RESIDENT for state in found.all_states())
    assert same(ours, task, is_simulated=False)


def test_a_plan_that_is_given_back_begins_with_it():
    first = Task().run(fitting(2_200_000), device())
    plan = first.optimizer.fitted
    again = Task(steps=6).run(fitting(2_200_000, plan=plan.to_json()), device())
    assert max(again.peaks) <= 2_200_000
    assert again.optimizer.fitted.setting == plan.setting
    assert again.times[-1] <= 1.02 * first.times[-1]
    assert same(again, Task(steps=6))


@pytest.mark.parametrize(
    "forbidden", ["overlap_forward", "update_in_backward", "weights_on_host", "update_on_host", "activations"]
)
def test_what_is_forbidden_is_not_used(forbidden):
    ran = Task().run(fitting(2_600_000, **{forbidden: False}), device())
    setting = ran.optimizer.fitted.setting
    used = {
        "overlap_forward": setting.overlap_forward,
        "update_in_backward": setting.update_in_backward,
        "weights_on_host": setting.hosted,
        "update_on_host": setting.host_share,
        "activations": any(choice.value != "keep" for choice in setting.choices),
    }
    assert not used[forbidden]
    assert same(ran, Task())


def test_checkpoints_at_any_moment():
    """State dicts of a watched, a tried and a settled job load into plain torch."""
    for steps in (1, 3, 12):
        ran = Task(steps=steps).run(fitting(2_200_000), device())
        plain = Task(steps=steps).run(resident, device())
        ours, theirs = ran.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        assert all(same_bits(ours[i][key], theirs[i][key]) for i in ours for key in ("exp_avg", "exp_avg_sq"))
        params = [torch.nn.Parameter(param.detach().clone()) for param in ran.model.parameters()]
        torch.optim.AdamW(params, lr=1e-3).load_state_dict(ran.optimizer.state_dict())


def test_settings_reach_the_optimizer():
    ran = Task(steps=3).run(fitting(1 << 30, state_dtype="bfloat16"), device())
    config = ran.optimizer.config
    assert config.state_dtype == "bfloat16"
    assert config.min_bytes == SMALL["min_bytes"]
    assert isinstance(ran.optimizer, offstage.OffloadedOptimizer)
