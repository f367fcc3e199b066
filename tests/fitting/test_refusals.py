# SPDX-License-Identifier: Apache-2.0
"""What `fit` refuses, and that nothing has moved then."""

import copy

import pytest
import torch
from torch import nn

import offstage
from offstage.errors import ConfigError, HostMemoryError, OffstageError
from offstage.optimizer.optimizer import runtime_of
from tests.support.machines import machine
from tests.support.simulated_jobs import Blocks, Task, device, fitting


def made(**settings):
    model = Blocks(2)
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"device_peak": "1GiB", "machine": machine(), **settings}
    return model, optimizer, lambda: offstage.fit(model, optimizer, **given)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fraction": 0.5}, "fit() decides fraction itself, or does not know it; expected of master_weights"),
        ({"weights": "host", "window": 3}, "fit() decides weights, window itself"),
        ({"device_peak": "much"}, "device_peak expects a number of bytes or a size such as"),
        ({"host_budget": -1}, "host_budget expects a size of at least 0 bytes"),
        ({"plan": 3}, "plan expects a FitPlan or its JSON; found int"),
        ({"plan": "{}"}, "FitPlan.from_json expects what FitPlan.to_json wrote"),
        ({"master_weights": "half"}, "master_weights expects one of"),
    ],
)
def test_one_clear_message_and_nothing_moved(settings, words):
    model, optimizer, call = made(**settings)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError) as caught:
        call()
    assert words in str(caught.value)
    assert all(torch.equal(model.state_dict()[name], one) for name, one in before.items())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()  # it was not taken over


def test_the_order_of_arguments():
    model = Blocks(2)
    with pytest.raises(ConfigError, match=r"fit\(\) expects a torch.nn.Module first; found AdamW"):
        offstage.fit(torch.optim.AdamW(model.parameters()), model)


def test_too_little_host_memory():
    _, _, call = made(device_peak="1MiB", host_budget="64KiB")
    with pytest.raises(HostMemoryError, match=r"The host has 64\.0 KiB for this job, which takes"):
        call()


def test_a_plan_of_another_model():
    plan = Task(steps=5).run(fitting(1 << 30), device()).optimizer.fitted
    _, _, call = made(plan=plan)
    with pytest.raises(ConfigError, match=r"plan was made for 28 parameters .* found 12"):
        call()


def test_a_plan_that_uses_what_is_forbidden():
    plan = Task(steps=5).run(fitting(2_200_000), device()).optimizer.fitted
    assert plan.setting.update_in_backward
    with pytest.raises(ConfigError, match="plan uses what update_in_backward forbids"):
        Task(steps=1).run(fitting(2_200_000, plan=plan, update_in_backward=False), device())


def test_a_model_that_is_compiled_as_a_whole():
    model = Blocks(2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="compiled as a whole"):
        offstage.fit(torch.compile(model, backend="eager"), optimizer, "1GiB", machine=machine())
    optimizer.step()  # it was not taken over


def test_a_loop_that_uses_gradients_itself_is_seen():
    """Clipping by the optimizer is no use of gradients; torch's is: then nothing is updated in backward."""
    ran = Task(steps=5, clip="ours").run(fitting(2_200_000), device())
    assert not runtime_of(ran.optimizer).watcher.job.loop.reads_gradients
    read = Task(steps=5, clip="torch").run(fitting(2_200_000), device())
    assert runtime_of(read.optimizer).watcher.job.loop.reads_gradients
    assert not read.optimizer.fitted.setting.update_in_backward


def test_the_user_cannot_replan():
    ran = Task(steps=5).run(fitting(1 << 30), device())
    with pytest.raises(OffstageError, match="run by fit"):
        ran.optimizer.replan(fraction=0.5)


def test_a_model_without_layers_is_fitted_too():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.tanh(self.one(x)))

    model = Plain()
    optimizer = offstage.fit(
        model, torch.optim.AdamW(model.parameters()), "1GiB", machine=machine(), min_bytes=0, chunk_bytes="16KiB"
    )
    for _ in range(6):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.fitted is not None
    assert "no layers were found" in str(optimizer.fitted)


@pytest.mark.parametrize("steps", [1, 4, 12])
def test_close_leaves_no_hook(steps):
    ran = Task(steps=steps).run(fitting(2_000_000), device())
    ran.optimizer.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in ran.model.modules())
    assert ran.optimizer.fitted is None


def test_where_everything_fits_no_hook_stays():
    ran = Task(steps=9).run(fitting(1 << 30, overlap_forward=False, update_in_backward=False), device())
    plan, runtime = ran.optimizer.fitted, runtime_of(ran.optimizer)
    assert plan.overrides["fraction"] == 0.0
    assert not any(module._forward_hooks for module in ran.model.modules())
    assert sum(len(module._forward_pre_hooks) for module in ran.model.modules()) == 1  # the one that sees batches grow
    assert runtime.moved().up == runtime.moved().down or runtime.last_moved.up == 0
