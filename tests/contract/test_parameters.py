# SPDX-License-Identifier: Apache-2.0
"""The contract's section "torch.optim.Optimizer": every kind of parameter and gradient, and the step count."""

import warnings

import pytest
import torch
from torch import nn

import offstage
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import (
    CLASSES,
    SMALL,
    TORCH,
    adamw,
    assert_same,
    assert_same_future,
    assert_same_optimizer,
    batch,
    loss_of,
    offloaded_model,
    train,
    trained,
    twin,
    unchanged,
)

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
    model, optimizer = trained(2, **config)
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
    optimizer = offstage.offload(adamw([param]), rule="torch")
    optimizer.param_groups[0]["params"].append(elsewhere)  # offload() itself takes none without values
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


SHARING = {
    "transposed": lambda whole: (whole, whole.t()),
    "the same": lambda whole: (whole, whole.view(-1)),
    "a row of a matrix": lambda whole: (whole, whole[3]),
    "neighbours with a common element": lambda whole: (whole.view(-1)[:101], whole.view(-1)[100:200]),
    "columns with a common one": lambda whole: (whole[:, :5], whole[:, 4:]),
    "every second and every third": lambda whole: (whole.view(-1)[::2], whole.view(-1)[1::3]),
    "a frozen one": lambda whole: (whole, whole.t().detach()),
    "two storages of one memory": lambda whole: (whole, torch.from_numpy(whole.numpy())),
}
DISJOINT = {
    "slices of a flat buffer": lambda whole: (whole.view(-1)[:100], whole.view(-1)[100:]),
    "columns": lambda whole: (whole[:, :5], whole[:, 5:]),
    "even and odd": lambda whole: (whole.view(-1)[::2], whole.view(-1)[1::2]),
    "blocks of a matrix": lambda whole: (whole[:6, :6], whole[6:, :6], whole[:6, 6:], whole[6:, 6:]),
    "nothing, and a matrix": lambda whole: (whole[:0], whole, whole[:, :0]),
}


def parts(views):
    """Parameters over one matrix."""
    return [nn.Parameter(view) for view in views(seeded(12, 12))]


@pytest.mark.parametrize("sharing", SHARING)
def test_two_parameters_over_one_memory_are_refused(sharing):
    """“a parameter given twice (error)”: in parts too; each part would be updated from its own copy."""
    first, second = parts(SHARING[sharing])
    second.requires_grad_(sharing != "a frozen one")
    inner = adamw([("encoder", first), ("decoder", second)])
    with pytest.raises(offstage.ConfigError, match=r"'(encoder|decoder)' and '(encoder|decoder)' share memory.*Tie"):
        offstage.offload(inner, **SMALL)
    first.grad = torch.ones_like(first)
    inner.step()  # it is still good
    optimizer = offstage.offload(adamw([("decoder", second)]), **SMALL)
    with pytest.raises(offstage.ConfigError, match="share memory"):
        optimizer.add_param_group({"params": [("encoder", first)]})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["params"].append(first)  # behind torch's back
    before = first.detach().clone()
    with pytest.raises(offstage.ConfigError, match="share memory"):
        optimizer.step()
    assert torch.equal(first, before)


@pytest.mark.parametrize("views", DISJOINT)
def test_disjoint_parts_of_one_memory_are_trained(views):
    """What flattens parameters into one buffer (FSDP1, Megatron, DDP's buckets) gives such parameters."""

    def grads(step):
        return [torch.full_like(param, 0.1 * (step + 1)) for param in parts(DISJOINT[views])]

    cover(lambda: parts(DISJOINT[views]), grads, TORCH)


def test_parameters_without_memory_share_none():
    whole = torch.zeros(12, 12, device="meta")
    optimizer = offstage.offload(adamw([nn.Parameter(torch.zeros(8))]), fraction=0.0)
    optimizer.param_groups[0]["params"] += [nn.Parameter(whole), nn.Parameter(whole.t())]
    assert len(optimizer.plan.sizes) == 3


def test_many_parts_of_one_memory_are_told_apart():
    """All pairs at once: a thousand columns, of which the last two overlap by one."""
    whole = seeded(64, 2000)
    columns = [nn.Parameter(whole[:, start : start + 2]) for start in range(0, 2000, 2)]
    offstage.offload(adamw(columns), **SMALL)
    columns.append(nn.Parameter(whole[:, 1999:]))
    with pytest.raises(offstage.ConfigError, match="'parameter 999' and 'parameter 1000' share"):
        offstage.offload(adamw(columns), **SMALL)


# Step counts


@pytest.mark.parametrize("config", [TORCH, SMALL, {"fraction": 0.0}], ids=["torch rule", "own rule", "off"])
def test_step_counts_once_per_successful_step(config):
    """“`step` counts exactly once per successful step, per parameter, and survives save/load”."""
    model, optimizer = trained(2, **config)
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
        patch.setattr(runtime_of(optimizer).rule, "begin", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with unchanged(model, optimizer), pytest.raises(MemoryError, match="no room"):
            optimizer.step()
    assert_same_future((model, optimizer), (plain_model, plain), range(2, 4))
