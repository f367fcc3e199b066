# SPDX-License-Identifier: Apache-2.0
"""The contract's section "Gradients"."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import offstage
from tests.support.contract import (
    CLASSES,
    PLANS,
    SMALL,
    TORCH,
    adamw,
    assert_same,
    batch,
    loss_of,
    make_model,
    offloaded_model,
    one_process_group,
    train,
    trained,
    trained_twins,
    twin,
    unchanged,
)

HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


# Never need a backward hook to have run


@pytest.mark.parametrize("name", CLASSES)
def test_assigned_gradients_are_enough(name):
    """“Never need a backward hook to have run: assigning `p.grad` fires none”."""
    plain_model, plain, model, optimizer = twin(CLASSES[name])
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        for theirs, ours in zip(plain_model.parameters(), model.parameters(), strict=True):
            grad = torch.randn(ours.shape, generator=generator)
            theirs.grad, ours.grad = grad.clone(), grad.clone()
        plain.step()
        optimizer.step()
    assert_same(plain_model, plain, model, optimizer)


def test_a_backward_whose_gradients_were_replaced():
    """“Never need a backward hook to have run”: what counts is the `.grad` that step() finds."""
    plain_model, plain, model, optimizer = twin()
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        for number in range(3):
            one.zero_grad()
            loss_of(one_model, number).backward()
            for param in one_model.parameters():
                param.grad = param.grad.clone() * 0.5
            one.step()
    assert_same(plain_model, plain, model, optimizer)


def test_no_hooks_by_default():
    """“Never need a backward hook”: by default none is registered, on parameters or modules."""
    model, _optimizer = trained(1)
    for param in model.parameters():
        assert not any(getattr(param, table) for table in HOOK_TABLES)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
        assert not module._backward_pre_hooks


# `.grad` stays on the device until `step`


def test_gradients_stay_until_step_and_step_does_not_change_them():
    """“`.grad` stays on the device until `step`”; afterwards it is what plain torch leaves: the same tensor."""
    plain_model, _, model, optimizer = twin()
    train(model, optimizer, 1)
    plain_model.load_state_dict(model.state_dict())
    optimizer.zero_grad()
    for one in (plain_model, model):
        loss_of(one, 1).backward()
    grads = [param.grad for param in model.parameters()]
    for theirs, ours in zip(plain_model.parameters(), model.parameters(), strict=True):
        assert ours.grad.device == ours.device
        assert torch.equal(theirs.grad, ours.grad)
    optimizer.step()
    for theirs, ours, before in zip(plain_model.parameters(), model.parameters(), grads, strict=True):
        assert ours.grad is before
        assert torch.equal(theirs.grad, ours.grad)


@pytest.mark.parametrize("max_norm", [0.05, 1000.0])
def test_clip_grad_norm(max_norm):
    """“`torch.nn.utils.clip_grad_norm_` and GradScaler just work”: same norm, same bits after the step."""
    plain_model, plain, model, optimizer = twin()
    norms = []
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        own = []
        for number in range(3):
            one.zero_grad()
            loss_of(one_model, number).backward()
            own.append(nn.utils.clip_grad_norm_(one_model.parameters(), max_norm))
            one.step()
        norms.append(torch.stack(own))
    assert torch.equal(*norms)
    assert (norms[0] > 0.05).all()
    assert_same(plain_model, plain, model, optimizer)


# Accumulation


def test_the_order_of_parameters_decides_the_last_bit_of_the_norm():
    """Engines make groups with and without decay, and clip in the order of the model."""
    found = {True: [], False: []}
    for seed in range(20):
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.zeros(37)) for _ in range(40)]
        optimizer = offstage.offload(adamw([{"params": params[::2]}, {"params": params[1::2]}]), **SMALL)
        for ordered in found:
            for number, param in enumerate(params):
                param.grad = torch.randn(37, generator=torch.Generator().manual_seed(100 * seed + number))
            expected = torch.nn.utils.get_total_norm([param.grad for param in params])
            norm = optimizer.clip_grad_norm_(1.0, order=params if ordered else None)
            found[ordered].append(torch.equal(norm, expected))
    assert all(found[True])
    assert not all(found[False])


def accumulate(model, optimizer, steps, micro_batches=3):
    for number in range(steps):
        optimizer.zero_grad()
        for part in range(micro_batches):
            (loss_of(model, number * micro_batches + part) / micro_batches).backward()
        optimizer.step()


def test_accumulation_gives_plain_torchs_bits():
    """“Accumulation over micro-batches gives the same bits as without offload”."""
    plain_model, plain, model, optimizer = twin()
    accumulate(plain_model, plain, 3)
    accumulate(model, optimizer, 3)
    assert [float(state["step"]) for state in optimizer.state.values()] == [3.0] * 4
    assert_same(plain_model, plain, model, optimizer)


@pytest.mark.parametrize("plan", list(PLANS)[1:])
def test_accumulation_gives_the_same_bits_on_every_plan(plan):
    """“Accumulation … same bits as without offload”, with offstage's own rule."""
    off_model, off = offloaded_model(**PLANS["off"])
    model, optimizer = offloaded_model(**PLANS[plan])
    accumulate(off_model, off, 3)
    accumulate(model, optimizer, 3)
    assert_same(off_model, off, model, optimizer)


# GradScaler


def scaled_step(model, optimizer, scaler, number, *, poison=None, clip=False):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, number)).backward()
    if poison is not None:
        next(model.parameters()).grad[0, 0] = poison
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("make", ["AdamW", "AdamW fused", "SGD"])
def test_grad_scaler(make, clip):
    """“GradScaler just works”, with clipping between unscale_ and step, over skipped steps: plain torch's bits."""
    plain_model, plain, model, optimizer = twin(CLASSES[make])
    scalers = []
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for number in range(5):
            scaled_step(one_model, one, scaler, number, poison=float("inf") if number == 2 else None, clip=clip)
        scalers.append(scaler.state_dict())
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] == 2.0**11
    assert_same(plain_model, plain, model, optimizer)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("config", [TORCH, SMALL], ids=["torch rule", "own rule"])
def test_a_skipped_step_changes_nothing(config, poison):
    """“skipped steps (inf/NaN) change nothing: no state, no step count, and at window 0 no transfer”."""
    model, optimizer = offloaded_model(**config)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled_step(model, optimizer, scaler, 0)
    before = optimizer.receipt()
    with unchanged(model, optimizer):
        scaled_step(model, optimizer, scaler, 1, poison=poison)
    after = optimizer.receipt()
    assert scaler.get_scale() == 2.0**9
    assert after.steps == before.steps == 1
    assert after.total_bytes_fetched == before.total_bytes_fetched > 0
    assert after.total_bytes_stored == before.total_bytes_stored


def test_a_step_skipped_before_the_first_leaves_no_state():
    """“skipped steps change nothing: no state”."""
    model, optimizer = offloaded_model()
    scaled_step(model, optimizer, torch.amp.GradScaler("cpu"), 0, poison=float("inf"))
    assert len(optimizer.state) == 0
    assert optimizer.state_dict()["state"] == {}


def test_amp_scaling_is_not_announced():
    """“Support `grad_scale`/`found_inf` or do not prioritise it”: also not for a class that supports it."""
    _, optimizer = offloaded_model(CLASSES["AdamW fused"])
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


# Double offload


def test_an_offloaded_optimizer_is_refused():
    """“Detect and reject double offload (… an already offloaded optimizer)”: both objects, and both stay good."""
    model = make_model()
    inner = adamw(model.parameters())
    optimizer = offstage.offload(inner, model, **SMALL)
    for again in (inner, optimizer):
        with pytest.raises(offstage.ConfigError, match="already offloaded"):
            offstage.offload(again, model, **SMALL)
    train(model, optimizer, 1)


def test_paged_optimizers_are_refused():
    """“Detect and reject double offload (… paged optimizers …)”."""

    class PagedAdamW(torch.optim.AdamW):
        is_paged = True

    with pytest.raises(offstage.ConfigError, match=r"PagedAdamW.*must not be offloaded twice"):
        offstage.offload(PagedAdamW(make_model().parameters()), **SMALL)


def test_fsdp2_cpu_offload_is_refused():
    """“Detect and reject double offload (FSDP2 `CPUOffloadPolicy` parameters …)”."""
    with one_process_group():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = make_model()
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        inner = adamw(model.parameters())
        with pytest.raises(offstage.ConfigError, match="CPUOffloadPolicy"):
            offstage.offload(inner, model, **SMALL)
        inner.step()  # still a plain optimizer


# Below: what the lines above have in common


def test_step_uses_gradients_in_other_formats_as_torch_does():
    """Default path with 16-bit parameters and without masters: gradients in the parameter's format, torch's bits."""
    config = {**TORCH, "master_weights": "none"}
    assert_same(*trained_twins(3, dtype=torch.bfloat16, **config))


@pytest.mark.parametrize("config", [TORCH, SMALL, PLANS["off"]], ids=["torch rule", "own rule", "off"])
def test_autograd_notices_that_step_wrote_the_weights(config):
    """A graph that saved the old weights is refused after step(), exactly as with plain torch."""
    plain_model, plain, model, optimizer = twin(**config)
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        inputs, _ = batch(0)
        first, second = one_model(inputs).sum(), one_model(inputs).square().sum()
        first.backward()
        one.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
