# SPDX-License-Identifier: Apache-2.0
"""The contract's section "torch.optim.Optimizer"."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import offstage
from offstage.config import Placement
from tests.support.contract import (
    CLASSES,
    PLANS,
    SMALL,
    TORCH,
    adamw,
    assert_same,
    assert_same_optimizer,
    assert_same_weights,
    chunk_count,
    loss_of,
    make_model,
    offloaded_model,
    train,
    trained,
    trained_twins,
    twin,
    unchanged,
)

SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
}


def train_with(scheduler, model, optimizer, steps):
    for number in range(steps):
        train(model, optimizer, range(number, number + 1))
        scheduler.step()


def random_grads(*param_lists, seed=0):
    """The same gradients for parameters that correspond."""
    generator = torch.Generator().manual_seed(seed)
    for params in zip(*param_lists, strict=True):
        grad = torch.randn(params[0].shape, generator=generator)
        for param in params:
            param.grad = grad.clone().to(param.dtype)


# Subclass it and call its `__init__`


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_the_offloaded_optimizer(name):
    """“Subclass it and call its `__init__`; schedulers, hooks break otherwise”: each scheduler gives the same bits."""
    plain_model, plain, model, optimizer = twin()
    assert isinstance(optimizer, torch.optim.Optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_with(SCHEDULERS[name](plain), plain_model, plain, 5)
        train_with(SCHEDULERS[name](optimizer), model, optimizer, 5)
    assert plain.param_groups[0]["lr"] != 0.01
    assert_same(plain_model, plain, model, optimizer)


def test_reduce_on_plateau():
    """“schedulers”: ReduceLROnPlateau, which is driven by a metric, writes the lr that the update uses."""
    plain_model, plain, model, optimizer = twin()
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        scheduler = lr_scheduler.ReduceLROnPlateau(one, factor=0.1, patience=0)
        for number in range(4):
            train(one_model, one, range(number, number + 1))
            scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
    assert_same(plain_model, plain, model, optimizer)


def test_scheduler_made_before_offload_keeps_working():
    """“Inner copies go stale when a scheduler writes lr”: a scheduler that holds the old object still reaches us."""
    plain_model, model = make_model(), make_model()
    plain, inner = adamw(plain_model.parameters()), adamw(model.parameters())
    plain_scheduler, scheduler = (lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in (plain, inner))
    optimizer = offstage.offload(inner, model, **TORCH)
    train_with(plain_scheduler, plain_model, plain, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # plain torch does not warn either
        train_with(scheduler, model, optimizer, 3)
    assert optimizer.param_groups[0]["lr"] == 0.01 / 8
    assert_same(plain_model, plain, model, optimizer)


# `param_groups` is the user's list


def test_param_groups_are_the_users_own_objects():
    """“`param_groups` is the user's list: same dicts, same count and order, `param_names` kept”."""
    model = make_model()
    named = list(model.named_parameters())
    inner = adamw([{"params": named[:2], "lr": 0.1, "tag": "first"}, {"params": named[2:]}])
    groups, dicts = inner.param_groups, list(inner.param_groups)
    params = [list(group["params"]) for group in groups]
    keys = [list(group) for group in groups]
    optimizer = offstage.offload(inner, model, **SMALL)
    train(model, optimizer, 2)
    assert optimizer.param_groups is groups
    assert [id(group) for group in optimizer.param_groups] == [id(group) for group in dicts]
    assert [list(group) for group in groups] == keys
    assert groups[0]["tag"] == "first"
    for group, before in zip(groups, params, strict=True):
        assert all(a is b for a, b in zip(group["params"], before, strict=True))
    assert [group["param_names"] for group in groups] == [[name for name, _ in part] for part in (named[:2], named[2:])]


def test_hyperparameters_written_between_steps_are_used():
    """“Inner copies go stale”: lr, betas, eps, weight_decay written to the groups act from the next step on."""
    plain_model, plain, model, optimizer = twin()
    for number in range(4):
        for one in (plain, optimizer):
            one.param_groups[0].update(lr=0.1 / (1 + number), betas=(0.5, 0.9), eps=1e-3, weight_decay=0.3 * number)
        train(plain_model, plain, range(number, number + 1))
        train(model, optimizer, range(number, number + 1))
    assert_same(plain_model, plain, model, optimizer)


# `step`


def test_step_is_a_plain_bound_method():
    """“`step` is a plain bound method”."""
    _, optimizer = offloaded_model()
    assert inspect.ismethod(optimizer.step)
    assert optimizer.step.__self__ is optimizer
    assert optimizer.step.__func__ is type(optimizer).step
    assert "step" not in vars(optimizer)


def test_step_runs_the_closure_under_grad_and_returns_its_loss():
    """“`step(closure)` runs the closure under grad and returns its loss”."""
    plain_model, plain, model, optimizer = twin()
    results = []
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        calls = []

        def closure(one_model=one_model, one=one, calls=calls):
            calls.append(torch.is_grad_enabled())
            one.zero_grad()
            loss = loss_of(one_model, 0)
            loss.backward()
            return loss

        with torch.no_grad():
            results.append(one.step(closure))
        assert calls == [True]
    assert torch.equal(*results)
    assert optimizer.step(lambda: "the loss") == "the loss"
    assert optimizer.step() is None


def test_an_exception_in_the_closure_changes_nothing():
    """“`step(closure)`”: a closure that raises leaves weights, state and step counts as they were."""
    model, optimizer = trained(2)

    def closure():
        raise ZeroDivisionError("in the closure")

    with unchanged(model, optimizer), pytest.raises(ZeroDivisionError, match="in the closure"):
        optimizer.step(closure)
    assert optimizer.receipt().steps == 2


# Parameters are re-read from `param_groups`


@pytest.mark.parametrize("config", [TORCH, {"fraction": 0.0, "rule": "torch"}], ids=["all", "off"])
def test_add_param_group_after_steps(config):
    """“`add_param_group` works after steps”."""
    plain_model, plain, model, optimizer = twin(lambda params: adamw(list(params)[:2]), **config)
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        train(one_model, one, 2)
        one.add_param_group({"params": list(one_model.parameters())[2:], "lr": 0.05})
        train(one_model, one, range(2, 4))
    assert len(optimizer.param_groups) == 2
    assert_same(plain_model, plain, model, optimizer)


def test_add_param_group_of_small_parameters():
    """“`add_param_group` works after steps”: a group that stays resident is no failure while the rest is offloaded."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 2))
    plain_model = copy.deepcopy(model)
    plain = adamw(plain_model[0].parameters())
    optimizer = offstage.offload(adamw(model[0].parameters()), model, rule="torch")  # min_bytes is 64 KiB
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        one.add_param_group({"params": list(one_model[1].parameters())})
        for number in range(2):
            one.zero_grad()
            one_model(torch.arange(256.0).view(2, 128) / (100 + number)).square().mean().backward()
            one.step()
    assert optimizer.plan.placements[0] is Placement.STREAMED
    assert_same(plain_model, plain, model, optimizer)


def test_device_budget_holds_after_add_param_group():
    """“`add_param_group` works after steps”: the budget is the optimizer's, not one for every group added."""
    params = [nn.Parameter(torch.randn(4096)) for _ in range(6)]  # 32 KiB of state each
    optimizer = offstage.offload(
        adamw(params[:3]), device_budget="80KiB", chunk_bytes="16KiB", slots=3, min_bytes=0
    )  # 48 KiB of slots and one resident parameter
    optimizer.add_param_group({"params": params[3:]})
    random_grads(params)
    optimizer.step()
    assert optimizer.receipt().device_state_bytes <= 80 * 1024


def test_a_failed_add_param_group_leaves_the_groups_as_they_were():
    """“`add_param_group`”: a group that is refused is not half added."""
    model, optimizer = trained(1)
    with unchanged(model, optimizer), pytest.raises(offstage.ConfigError, match="complex"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8, dtype=torch.complex64))]})
    train(model, optimizer, 1)


def test_parameters_are_re_read_from_param_groups():
    """“Parameters are re-read from `param_groups`, not from a list captured at construction”."""
    plain_model, plain, model, optimizer = twin(lambda params: adamw(list(params)[:3]))
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        params = list(one_model.parameters())
        train(one_model, one, 2)
        one.param_groups[0]["params"].append(params[3])  # appears
        train(one_model, one, range(2, 4))
        one.param_groups[0]["params"].pop(1)  # leaves
        train(one_model, one, range(4, 6))
    assert_same_weights(plain_model, model)
    for kept, ours in zip(plain.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        assert plain.state[kept]["step"] == optimizer.state[ours]["step"]


def test_a_parameter_appended_to_a_group_is_known_before_the_next_step():
    """“Parameters are re-read from `param_groups`”: reading state does not have to wait for a step."""
    plain_model, plain, model, optimizer = twin(lambda params: adamw(list(params)[:3]))
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        train(one_model, one, 1)
        one.param_groups[0]["params"].append(list(one_model.parameters())[3])
    assert_same_optimizer(plain, optimizer)
    assert dict(optimizer.state[optimizer.param_groups[0]["params"][3]]) == {}
    assert "Parameter Group 0" in repr(optimizer)


# Hooks


@pytest.mark.parametrize("config", [TORCH, SMALL], ids=["torch rule", "own rule"])
def test_step_hooks_fire_once_per_step(config):
    """“Step pre/post hooks fire once per `step`, not once per chunk (m: inner optimizers fire global hooks too)”."""
    model, optimizer = offloaded_model(**config)
    assert chunk_count(optimizer) > 1
    fired = []
    optimizer.register_step_pre_hook(lambda one, args, kwargs: fired.append(("pre", one)))
    optimizer.register_step_post_hook(lambda one, args, kwargs: fired.append(("post", one)))
    handles = [
        register_optimizer_step_pre_hook(lambda one, args, kwargs: fired.append(("global pre", one))),
        register_optimizer_step_post_hook(lambda one, args, kwargs: fired.append(("global post", one))),
    ]
    try:
        train(model, optimizer, 2)
    finally:
        for handle in handles:
            handle.remove()
    assert [name for name, _ in fired] == ["global pre", "pre", "post", "global post"] * 2 or [
        name for name, _ in fired
    ] == ["pre", "global pre", "post", "global post"] * 2
    assert all(one is optimizer for _, one in fired)


def test_hooks_of_the_given_optimizer_are_taken_over():
    """“hooks break otherwise”: hooks registered before offload() fire, once, and their handles remove them."""
    model = make_model()
    inner = adamw(model.parameters())
    fired = []
    handle = inner.register_step_post_hook(lambda *_: fired.append("post"))
    inner.register_state_dict_post_hook(lambda one, state_dict: fired.append("state_dict"))
    optimizer = offstage.offload(inner, model, **SMALL)
    train(model, optimizer, 2)
    optimizer.state_dict()
    assert fired == ["post", "post", "state_dict"]
    handle.remove()
    train(model, optimizer, 1)
    assert fired == ["post", "post", "state_dict"]


# The rest of the surface


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    """“`zero_grad(set_to_none=True|False)`”."""
    model, optimizer = trained(1)
    grads = [param.grad for param in model.parameters()]
    optimizer.zero_grad(set_to_none=set_to_none)
    for param, before in zip(model.parameters(), grads, strict=True):
        if set_to_none:
            assert param.grad is None
        else:
            assert param.grad is before
            assert not param.grad.any()


def test_defaults_and_repr():
    """“`defaults`, `__repr__` (plus one line of placement)”."""
    _, plain, _, optimizer = twin()
    assert optimizer.defaults == plain.defaults
    groups = repr(plain).removeprefix("AdamW")
    assert groups in repr(optimizer)
    extra = repr(optimizer).split(groups)
    assert "AdamW" in extra[0]
    assert "\n" not in extra[0]
    placement = extra[1].strip()
    assert "\n" not in placement
    assert "state:" in placement
    assert "streamed" in placement


def test_tensor_lr():
    """“tensor lr”: read at every step, also when it is filled in place by a scheduler."""
    plain_model, plain, model, optimizer = twin(lambda params: adamw(params, lr=torch.tensor(0.01), foreach=False))
    lr = optimizer.param_groups[0]["lr"]
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        train_with(lr_scheduler.ExponentialLR(one, 0.5), one_model, one, 3)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == torch.tensor(0.01) / 8
    assert_same(plain_model, plain, model, optimizer)


def test_tensor_lr_with_the_own_rule():
    """“tensor lr”: offstage's own rule does with a tensor what it does with the same number."""
    models = []
    for lr in (torch.tensor(0.01), 0.01):
        model, optimizer = offloaded_model(lambda params, lr=lr: adamw(params, lr=lr, foreach=False))
        train_with(lr_scheduler.ExponentialLR(optimizer, 0.5), model, optimizer, 3)
        models.append(model)
    assert_same_weights(*models)


@pytest.mark.parametrize("config", [TORCH, SMALL], ids=["torch rule", "own rule"])
def test_lr_zero(config):
    """“lr 0”: the weights keep their bits, the moments move."""
    model, optimizer = offloaded_model(lambda params: adamw(params, lr=0.0), **config)
    before = copy.deepcopy(model)
    train(model, optimizer, 2)
    assert_same_weights(before, model)
    assert all(state["exp_avg"].any() for state in optimizer.state.values())


def test_several_groups_with_different_hyperparameters():
    """“several groups with different hyperparameters”: each keeps its own, amsgrad and maximize included."""

    def make(params):
        first, second, third, fourth = params
        return adamw(
            [
                {"params": [first], "lr": 0.1, "betas": (0.5, 0.6)},
                {"params": [second, third], "weight_decay": 0.0, "amsgrad": True},
                {"params": [fourth], "maximize": True, "eps": 1e-3},
            ]
        )

    assert_same(*trained_twins(4, make))


@pytest.mark.parametrize(
    ("make", "option", "off", "on"),
    [(CLASSES["SGD"], "momentum", 0, 0.9), (CLASSES["Adam amsgrad"], "amsgrad", False, True)],
    ids=["SGD momentum", "Adam amsgrad"],
)
def test_an_option_that_is_off_for_a_while(make, option, off, on):
    """“several groups with different hyperparameters”: state that one group does not use for a while is not lost."""

    def two_groups(params):
        optimizer = make(params)
        (group,) = optimizer.param_groups
        moved = group["params"][2:]
        del group["params"][2:]
        optimizer.add_param_group({"params": moved})
        return optimizer

    plain_model, plain, model, optimizer = twin(two_groups)
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        for number in range(6):
            one.param_groups[0][option] = off if number in (2, 3) else on
            train(one_model, one, range(number, number + 1))
    assert_same(plain_model, plain, model, optimizer)


def test_muon():
    """Plain torch is the oracle: also where a rule looks at whole matrices."""

    def make(params):
        return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.01)

    plain_model, plain, model, optimizer = twin(make)
    assert chunk_count(optimizer) > 1
    train(plain_model, plain, 3)
    train(model, optimizer, 3)
    assert_same(plain_model, plain, model, optimizer)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_gives_plain_torchs_bits(name):
    """Plain torch is the oracle: with the user's own class doing the arithmetic every bit is torch's."""
    plain_model, plain, model, optimizer = twin(CLASSES[name])
    assert chunk_count(optimizer) > 1 or name == "Adafactor"
    train(plain_model, plain, 4)
    train(model, optimizer, 4)
    assert_same(plain_model, plain, model, optimizer)


@pytest.mark.parametrize("name", ["Adam", "Adam amsgrad", "AdamW"])
def test_own_rule_is_the_same_on_every_plan_and_close_to_torch(name):
    """Offstage's own rule: the same bits on every plan, “off” included, and close to torch's CPU arithmetic."""
    plain_model = make_model()
    train(plain_model, CLASSES[name](plain_model.parameters()), 4)
    reference, reference_optimizer = None, None
    for config in PLANS.values():
        model, optimizer = trained(4, CLASSES[name], **config)
        if reference is None:
            reference, reference_optimizer = model, optimizer
        assert_same(reference, reference_optimizer, model, optimizer)
    for ours, theirs in zip(reference.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
