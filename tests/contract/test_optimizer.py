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
from offstage.plan import Placement

from .support import (
    CLASSES,
    PLANS,
    SMALL,
    TORCH,
    adamw,
    assert_same,
    assert_same_optimizer,
    assert_same_weights,
    batch,
    chunk_count,
    loss_of,
    make_model,
    offloaded_model,
    train,
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
    model, optimizer = offloaded_model()
    train(model, optimizer, 2)

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
    model, optimizer = offloaded_model()
    train(model, optimizer, 1)
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
    model, optimizer = offloaded_model()
    train(model, optimizer, 1)
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
    assert "streamed" in placement
    assert "resident" in placement


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

    plain_model, plain, model, optimizer = twin(make)
    train(plain_model, plain, 4)
    train(model, optimizer, 4)
    assert_same(plain_model, plain, model, optimizer)


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
        model, optimizer = offloaded_model(CLASSES[name], **config)
        train(model, optimizer, 4)
        if reference is None:
            reference, reference_optimizer = model, optimizer
        assert_same(reference, reference_optimizer, model, optimizer)
    for ours, theirs in zip(reference.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# Cover


def cover(params, grads, config, steps=3):
    """Plain and offloaded AdamW over lists of parameters that correspond; `grads(step)` gives a list for both."""
    plain_params, our_params = params(), params()
    plain, optimizer = adamw(plain_params), offstage.offload(adamw(our_params), **config)
    for step in range(steps):
        for own in (plain_params, our_params):
            for param, grad in zip(own, grads(step), strict=True):
                param.grad = grad
        plain.step()
        optimizer.step()
    for ours, theirs in zip(our_params, plain_params, strict=True):
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
    assert_same_optimizer(plain, optimizer)
    return our_params, optimizer


def seeded(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_frozen_parameters():
    """“Cover: frozen parameters”: in the optimizer, without gradient, and untouched."""
    plain_model, plain, model, optimizer = twin()
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        one_model[0].requires_grad_(False)
        train(one_model, one, 3)
    assert_same(plain_model, plain, model, optimizer)
    assert len(optimizer.state) == 2


@pytest.mark.parametrize("config", [TORCH, SMALL], ids=["torch rule", "own rule"])
def test_a_parameter_without_gradient_is_untouched(config):
    """“A parameter without gradient is untouched, moments too”, and moves no bytes."""
    model, optimizer = offloaded_model(**config)
    train(model, optimizer, 2)
    everything = optimizer.receipt().bytes_fetched
    first = model[0].weight
    before = {name: value.clone() for name, value in optimizer.state[first].items()}
    weight = first.detach().clone()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    first.grad = None
    optimizer.step()
    assert torch.equal(first, weight)
    assert before["step"] == 2
    for name, value in optimizer.state[first].items():
        assert torch.equal(value, before[name]), name
    assert optimizer.state[model[0].bias]["step"] == 3
    assert optimizer.receipt().bytes_fetched < everything


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_that_come_and_go(name):
    """“`grad is None`”: each parameter counts its own steps, and state that torch has not created stays absent."""
    plain_model, plain, model, optimizer = twin(CLASSES[name])
    for number in range(4):
        for one_model, one in ((plain_model, plain), (model, optimizer)):
            one.zero_grad()
            loss_of(one_model, number).backward()
            for position, param in enumerate(one_model.parameters()):
                if (number + position) % 3 == 0:
                    param.grad = None
            one.step()
        assert_same(plain_model, plain, model, optimizer)


@pytest.mark.parametrize("config", [SMALL, {"fraction": 0.0}], ids=["all", "off"])
def test_sparse_gradients_are_refused(config):
    """“sparse gradients (clear error)”, before anything moved."""
    model = nn.ModuleDict({"dense": nn.Linear(8, 8), "embedding": nn.Embedding(16, 8, sparse=True)})
    optimizer = offstage.offload(adamw(model.parameters()), model, **config)
    model["dense"](model["embedding"](torch.tensor([1, 3]))).sum().backward()
    with unchanged(model, optimizer), pytest.raises(offstage.ConfigError, match=r"embedding\.weight.*sparse"):
        optimizer.step()
    assert optimizer.receipt().total_bytes_fetched == 0


def test_complex_parameters_are_refused():
    """“complex (clear error)”, and the optimizer given is still good."""
    param = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    inner = adamw([param])
    with pytest.raises(offstage.ConfigError, match="complex"):
        offstage.offload(inner, **SMALL)
    param.grad = torch.ones_like(param)
    inner.step()
    assert inner.state[param]["step"] == 1


def test_zero_dimensional_and_empty_parameters():
    """“0-d and empty parameters”."""

    def params():
        return [nn.Parameter(seeded(*shape)) for shape in [(), (0,), (3, 0), (1,), (130,), (40, 60)]]

    our_params, optimizer = cover(params, lambda step: [seeded(*p.shape, seed=step) for p in params()], TORCH)
    assert optimizer.state[our_params[0]]["exp_avg"].shape == ()
    assert optimizer.state[our_params[2]]["exp_avg"].shape == (3, 0)
    own_params = params()
    own = offstage.offload(adamw(own_params), **SMALL)
    for step in range(3):
        for param in own_params:
            param.grad = seeded(*param.shape, seed=step)
        own.step()
    for ours, theirs in zip(own_params, our_params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_tied_parameters():
    """“tied parameters”: one parameter, one state, one update."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(48, 48)
            self.outer = nn.Linear(48, 48)
            self.outer.weight = self.inner.weight

        def forward(self, inputs):
            return self.outer(torch.tanh(self.inner(inputs)))

    plain_model, plain, model, optimizer = twin(model=Tied())
    assert model.outer.weight is model.inner.weight
    train(plain_model, plain, 3)
    train(model, optimizer, 3)
    assert len(optimizer.state) == 3
    assert_same(plain_model, plain, model, optimizer)


LAYOUTS = {
    "transposed": lambda tensor: tensor.reshape(40, 60).t(),
    "channels last": lambda tensor: tensor.reshape(10, 6, 8, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda tensor: tensor.reshape(40, 60)[:, ::2],
    "offset": lambda tensor: tensor[7:2007].view(40, 50),
    "contiguous": lambda tensor: tensor.reshape(40, 60),
}


@pytest.mark.parametrize("config", [TORCH, SMALL], ids=["torch rule", "own rule"])
@pytest.mark.parametrize("grad_layout", ["as the parameter", "contiguous", "reversed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_non_contiguous_parameters_and_gradients(layout, grad_layout, config):
    """“non-contiguous parameters and gradients”."""

    def param():
        return nn.Parameter(LAYOUTS[layout](seeded(2400)))

    def grad(step):
        like = LAYOUTS[layout](seeded(2400, seed=1 + step))
        if grad_layout == "contiguous":
            return like.contiguous()
        if grad_layout == "reversed":
            dims = list(reversed(range(like.dim())))
            return like.permute(dims).contiguous().permute(dims)
        return like

    plain, ours, off = param(), param(), param()
    optimizers = [adamw([plain]), offstage.offload(adamw([ours]), **config), offstage.offload(adamw([off]), fraction=0)]
    for step in range(3):
        for one, optimizer in zip((plain, ours, off), optimizers, strict=True):
            one.grad = grad(step)
            optimizer.step()
    if config is TORCH:
        assert torch.equal(ours, plain)
        assert_same_optimizer(optimizers[0], optimizers[1])
    else:
        assert torch.equal(ours, off)
        assert_same_optimizer(optimizers[1], optimizers[2])
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_memory_format_changed_after_offload():
    """“non-contiguous parameters”: a weight laid out anew keeps its own moments, or there is an error."""

    def make():
        torch.manual_seed(0)
        return nn.Conv2d(6, 10, 5, bias=False)

    plain_model, model = make(), make()
    plain, optimizer = adamw(plain_model.parameters()), offstage.offload(adamw(model.parameters()), model, **TORCH)
    for step in range(3):
        for one_model in (plain_model, model):
            if step == 1:
                one_model.to(memory_format=torch.channels_last)
            one_model.weight.grad = seeded(10, 6, 5, 5, seed=step)
        plain.step()
        try:
            optimizer.step()
        except offstage.ConfigError as error:
            assert "weight" in str(error)  # noqa: PT017
            return
    assert torch.equal(plain_model.weight, model.weight)


def test_parameters_on_two_devices():
    """“parameters on two devices”: a device whose parameters all stay resident is no failure."""
    # The second device is torch's meta device, which computes nothing: what counts is that the first is unharmed.
    plain_param, param = nn.Parameter(seeded(128, 128)), nn.Parameter(seeded(128, 128))
    elsewhere = nn.Parameter(torch.zeros(4, device="meta"))
    plain = adamw([plain_param])
    optimizer = offstage.offload(adamw([param, elsewhere]), rule="torch")
    for step in range(3):
        plain_param.grad, param.grad = seeded(128, 128, seed=step), seeded(128, 128, seed=step)
        elsewhere.grad = torch.zeros(4, device="meta")
        plain.step()
        optimizer.step()
    assert torch.equal(plain_param, param)
    assert [placement.value for placement in optimizer.plan.placements] == ["streamed", "resident"]
    assert optimizer.state[elsewhere]["exp_avg"].device.type == "meta"


def test_a_parameter_given_twice_is_refused():
    """“a parameter given twice (error)”: in one group torch only warns; in two it raises itself."""
    param = nn.Parameter(torch.zeros(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twice = adamw([param, param])
        with pytest.raises(offstage.ConfigError, match="twice"):
            offstage.offload(twice, **SMALL)
    optimizer = offstage.offload(adamw([param]), **SMALL)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [param]})
    optimizer.param_groups[0]["params"].append(param)
    param.grad = torch.ones(8)
    with pytest.raises(offstage.ConfigError, match="twice"):
        optimizer.step()
    assert not param.any()


# Step counts


@pytest.mark.parametrize("config", [TORCH, SMALL, {"fraction": 0.0}], ids=["torch rule", "own rule", "off"])
def test_step_counts_once_per_successful_step(config):
    """“`step` counts exactly once per successful step, per parameter, and survives save/load”."""
    model, optimizer = offloaded_model(**config)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    optimizer.step()  # no gradients: nothing to count
    loss_of(model, 2).backward()
    optimizer.step()
    assert [float(state["step"]) for state in optimizer.state.values()] == [3.0] * 4
    other_model, other = offloaded_model(**config)
    other.load_state_dict(optimizer.state_dict())
    assert [float(state["step"]) for state in other.state.values()] == [3.0] * 4
    train(other_model, other, 1)
    assert [float(state["step"]) for state in other.state.values()] == [4.0] * 4
    assert [float(state["step"]) for state in optimizer.state.values()] == [3.0] * 4


def test_step_counts_only_successful_steps(monkeypatch):
    """“`step` counts exactly once per successful step”: one that failed before its first update does not count."""
    plain_model, plain, model, optimizer = twin()
    train(model, optimizer, 2)
    train(plain_model, plain, 2)
    inputs, _ = batch(2)
    model(inputs).square().mean().backward()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.rule, "begin", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with unchanged(model, optimizer), pytest.raises(MemoryError, match="no room"):
            optimizer.step()
    train(model, optimizer, range(2, 4))
    train(plain_model, plain, range(2, 4))
    assert_same(plain_model, plain, model, optimizer)
