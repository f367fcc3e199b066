# SPDX-License-Identifier: Apache-2.0
"""The contract's section "State and checkpoints", as far as it is about one process and plain tensors."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)

import offstage
from tests.support.contract import (
    CLASSES,
    MASTERS,
    PLANS,
    SMALL,
    TORCH,
    TWO_KEYS,
    adamw,
    assert_same,
    assert_same_optimizer,
    assert_same_tree,
    assert_same_weights,
    lazily_offloaded,
    loss_of,
    make_model,
    offloaded_model,
    resumed,
    saved_and_loaded,
    snapshot,
    train,
    trained,
    twin,
    unchanged,
)

# The format


@pytest.mark.parametrize("name", CLASSES)
def test_state_dict_is_plain_torchs(name):
    """“`state_dict()` is `{state: {int: {...}}, param_groups}`”: the same keys, types, shapes and bits as torch's."""
    plain_model, plain, model, optimizer = twin(CLASSES[name])
    assert_same_optimizer(plain, optimizer)  # before the first step
    train(plain_model, plain, 3)
    train(model, optimizer, 3)
    ours, theirs = optimizer.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs) == ["state", "param_groups"]
    assert all(type(key) is int for key in ours["state"])
    assert_same_tree(theirs, ours)
    for index, values in ours["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                assert value.shape == theirs["state"][index][key].shape
                assert value.stride() == theirs["state"][index][key].stride()


@pytest.mark.parametrize("name", CLASSES)
def test_state_dict_goes_to_plain_torch_and_back(name):
    """“loads into plain `torch.optim.AdamW` and back, bit for bit for fp32 parameters”."""
    plain_model, plain, model, optimizer = twin(CLASSES[name])
    train(plain_model, plain, 6)
    train(model, optimizer, 2)
    middle_model = copy.deepcopy(model)
    middle = CLASSES[name](middle_model.parameters())
    middle.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(middle_model, middle, range(2, 4))
    last_model, last = resumed(middle_model, middle, CLASSES[name], **TORCH)
    train(last_model, last, range(4, 6))
    assert_same(plain_model, plain, last_model, last)


def test_state_of_a_running_optimizer_is_taken_over():
    """“loads into plain torch and back”: offload() of an optimizer that has state goes on from it, bit for bit."""
    plain_model, model = make_model(), make_model()
    plain, inner = adamw(plain_model.parameters()), adamw(model.parameters())
    train(plain_model, plain, 4)
    train(model, inner, 2)
    optimizer = offstage.offload(inner, model, **TORCH)
    train(model, optimizer, range(2, 4))
    assert_same(plain_model, plain, model, optimizer)


@pytest.mark.parametrize("config", MASTERS.values(), ids=MASTERS)
def test_masters_are_shown_joined_to_fp32(config):
    """“extra key `master_weight`, joined to fp32”: equal over formats, and the weight is its rounding."""
    model, optimizer = trained(3, dtype=torch.bfloat16, **config)
    assert_same(*trained(3, dtype=torch.bfloat16, **MASTERS["fp32"]), model, optimizer)
    for param in model.parameters():
        state = optimizer.state[param]
        assert state.keys() == TWO_KEYS | {"master_weight"}
        assert state["master_weight"].dtype == torch.float32
        assert torch.equal(state["master_weight"].to(torch.bfloat16), param)
        assert not torch.equal(state["master_weight"], param.float())  # there is something to keep
        assert (state["exp_avg_sq"] >= 0).all()
        assert not state["exp_avg_sq"].signbit().any()


def test_masters_only_where_they_exist():
    """“`master_weight` … only where masters exist”: per parameter."""
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48)).requires_grad_()
    model[1].to(torch.bfloat16)
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert ["master_weight" in state for state in optimizer.state_dict()["state"].values()] == [
        False,
        False,
        True,
        True,
    ]
    _, without = offloaded_model(dtype=torch.bfloat16, **SMALL, master_weights="none")
    for param in without.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    without.step()
    assert all(state.keys() == TWO_KEYS for state in without.state_dict()["state"].values())


@pytest.mark.parametrize("config", [SMALL, {"fraction": 0.0}, MASTERS["split"]], ids=["all", "off", "split"])
def test_saved_tensors_take_their_own_size(config):
    """“A saved tensor's file is its own size, not its arena's”."""
    dtype = torch.bfloat16 if "master_weights" in config else torch.float32
    _model, optimizer = trained(1, dtype=dtype, **config)
    for values in optimizer.state_dict()["state"].values():
        for value in values.values():
            assert value.untyped_storage().nbytes() == value.nbytes
            file = io.BytesIO()
            torch.save(value, file)
            assert file.tell() < value.nbytes + 4096


@pytest.mark.parametrize("name", CLASSES)
def test_tensors_and_primitives_only(name):
    """“Tensors and primitives only (`weights_only=True` loads it)”."""
    _model, optimizer = trained(2, CLASSES[name])
    assert_same_tree(saved_and_loaded(optimizer.state_dict()), optimizer.state_dict())


def test_state_dict_is_on_the_host():
    """“state presented on one device”: every tensor of a state dict, `step` included, is on the host."""
    for config in PLANS.values():
        _model, optimizer = trained(1, **config)
        values = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        assert {value.device for value in values} == {torch.device("cpu")}


# `state`


@pytest.mark.parametrize("name", CLASSES)
def test_state_has_parameter_keys_only(name):
    """“`state` never holds non-parameter keys (m: DCP KeyError)”: its keys are the parameters that have state."""
    plain_model, plain, model, optimizer = twin(CLASSES[name])
    partner = dict(zip(plain_model.parameters(), model.parameters(), strict=True))
    for steps in (0, 1, 1):  # Adagrad has state before its first step, the others do not
        for one_model, one in ((plain_model, plain), (model, optimizer)):
            one_model[0].bias.requires_grad_(False)
            train(one_model, one, steps)
        expected = [partner[param] for param in plain.state]
        assert bool(optimizer.state) is bool(plain.state)
        assert len(optimizer.state) == len(expected)
        assert {id(param) for param in optimizer.state} == {id(param) for param in expected}
        assert all((param in optimizer.state) is (theirs in plain.state) for theirs, param in partner.items())
        for theirs, state in plain.state.items():
            assert optimizer.state[partner[theirs]].keys() == state.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_keys_are_recognised_by_name(name):
    """“Keys are recognised by name, not by shape”: parameters of one element, whose moments look like `step`."""

    def make_params():
        return [nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor([0.25])), nn.Parameter(torch.ones(1, 1))]

    plain_params, params = make_params(), make_params()
    plain = CLASSES[name](plain_params)
    optimizer = offstage.offload(CLASSES[name](params), **TORCH)
    for number in range(4):
        for theirs, ours in zip(plain_params, params, strict=True):
            theirs.grad, ours.grad = torch.full_like(theirs, 0.1 + number), torch.full_like(ours, 0.1 + number)
        plain.step()
        optimizer.step()
        if number == 1:
            saved = saved_and_loaded(optimizer.state_dict())
            optimizer = offstage.offload(CLASSES[name](params), **TORCH)
            optimizer.load_state_dict(saved)
    assert_same_optimizer(plain, optimizer)
    for theirs, ours in zip(plain_params, params, strict=True):
        assert torch.equal(theirs, ours)


def test_state_can_be_written():
    """“`state[p]`”: assigning a key, a whole state or all of it writes where the state is kept."""
    plain_model, plain, model, optimizer = twin()
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        train(one_model, one, 2)
        first, second, third, _ = one_model.parameters()
        one.state[first]["exp_avg"] = torch.ones_like(first)
        one.state[second] = {name: value * 2 for name, value in one.state[second].items()}
        one.state[third]["exp_avg_sq"].mul_(0.5)
        train(one_model, one, range(2, 4))
    assert_same(plain_model, plain, model, optimizer)


@pytest.mark.parametrize("how", ["update", "pop", "clear", "delete", "reset"])
def test_state_can_be_written_in_every_way_of_a_dict(how):
    """“`state[p]`”: no way of changing a parameter's state is silently ignored (an error would do)."""
    plain_model, plain, model, optimizer = twin(CLASSES["SGD"])
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        train(one_model, one, 2)
        param = one_model[0].weight
        try:
            if how == "update":
                one.state[param].update(momentum_buffer=torch.ones_like(param))
            elif how == "pop":
                one.state[param].pop("momentum_buffer")
            elif how == "clear":
                one.state[param].clear()
            elif how == "delete":
                del one.state[param]["momentum_buffer"]
            else:
                one.state = type(plain.state)(dict)
        except (TypeError, offstage.OffstageError):
            assert one is optimizer
            return
        train(one_model, one, range(2, 4))
    assert_same_weights(plain_model, model)


# Weights written by others


def shadow_step(shadow, optimizer, model):
    """What fp32 masters must be: plain torch on an fp32 copy that gets the 16-bit model's gradients."""
    for copy_, param in zip(shadow, model.parameters(), strict=True):
        copy_.grad = param.grad.float()
    optimizer.step()


EDITS = {
    "model.load_state_dict": lambda model: model.load_state_dict(
        {name: value * 2 + 1 for name, value in model.state_dict().items()}
    ),
    "in place": lambda model: [param.detach().mul_(2).add_(1) for param in model.parameters()],
    ".data": lambda model: [param.data.copy_(param.data * 2 + 1) for param in model.parameters()],
    "new .data": lambda model: [setattr(param, "data", param.data * 2 + 1) for param in model.parameters()],
    "one element": lambda model: [param.data.view(-1)[7].fill_(3.0) for param in model.parameters()],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CLASSES)
def test_masters_are_plain_torch_in_fp32(name, dtype):
    """“extra key `master_weight`”: what plain torch makes of fp32 parameters that get the 16-bit gradients."""
    model, optimizer = offloaded_model(CLASSES[name], dtype=dtype, **TORCH)
    shadow = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    shadow_optimizer = CLASSES[name](shadow)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        shadow_step(shadow, shadow_optimizer, model)
        optimizer.step()
    for copy_, param in zip(shadow, model.parameters(), strict=True):
        assert torch.equal(copy_.to(dtype), param)
        ours = dict(optimizer.state[param])
        assert torch.equal(copy_, ours.pop("master_weight"))
        assert_same_tree(shadow_optimizer.state[copy_], ours)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("config", [MASTERS["fp32"], MASTERS["fp32 off"], TORCH], ids=["fp32", "off", "torch rule"])
def test_masters_follow_edited_weights(config, edit):
    """“After `model.load_state_dict`, or any in-place edit of a weight, masters follow”."""
    model, optimizer = offloaded_model(dtype=torch.bfloat16, **config)
    shadow = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    exact = config is TORCH
    shadow_optimizer = adamw(shadow)
    if not exact:
        shadow_optimizer = offstage.offload(shadow_optimizer, fraction=0.0)
    for number in range(4):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        if number == 2:
            before = [param.detach().clone() for param in model.parameters()]
            EDITS[edit](model)
            with torch.no_grad():
                for copy_, param, old in zip(shadow, model.parameters(), before, strict=True):
                    copy_.copy_(torch.where(param == old, copy_, param.float()))
        shadow_step(shadow, shadow_optimizer, model)
        optimizer.step()
    for copy_, param in zip(shadow, model.parameters(), strict=True):
        assert torch.equal(copy_.to(torch.bfloat16), param)
        assert torch.equal(copy_, optimizer.state[param]["master_weight"])
    assert optimizer.receipt().weights_written_by_others > 0


@pytest.mark.parametrize("edit", EDITS)
def test_split_masters_follow_edited_weights(edit):
    """“masters follow”: a parameter with split masters that was written restarts from its weights."""
    model, optimizer = offloaded_model(dtype=torch.bfloat16, **MASTERS["split"])
    shadow = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    shadow_optimizer = offstage.offload(adamw(shadow), fraction=0.0)
    for number in range(4):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        if number == 2:
            EDITS[edit](model)
            with torch.no_grad():
                for copy_, param in zip(shadow, model.parameters(), strict=True):
                    copy_.copy_(param.float())
        shadow_step(shadow, shadow_optimizer, model)
        optimizer.step()
    for copy_, param in zip(shadow, model.parameters(), strict=True):
        assert torch.equal(copy_.to(torch.bfloat16), param)
        assert torch.equal(copy_, optimizer.state[param]["master_weight"])


def test_masters_are_kept_when_nobody_wrote():
    """“masters follow” only what others wrote: loading the model's own weights back loses no bit of the masters."""
    model, optimizer = offloaded_model(dtype=torch.bfloat16)
    train(model, optimizer, 2)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, range(2, 4))
    assert_same(*trained(4, dtype=torch.bfloat16), model, optimizer)
    assert optimizer.receipt().weights_written_by_others == 0


# Copying


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_pickle_and_deepcopy_refuse_with_a_reason(copying):
    """“Pickle and deepcopy work or refuse with a reason”, and the optimizer is unharmed."""
    model, optimizer = trained(1)
    with unchanged(model, optimizer), pytest.raises(offstage.OffstageError, match=r"state_dict\(\) instead"):
        copying(optimizer)


# In-flight copies


READERS = {
    "state_dict": lambda model, optimizer: snapshot(optimizer)["state"],
    "state[p]": lambda model, optimizer: {
        i: {name: value.clone() for name, value in optimizer.state[p].items()} for i, p in enumerate(model.parameters())
    },
    "state.values": lambda model, optimizer: {
        i: {name: value.clone() for name, value in state.items()} for i, state in enumerate(optimizer.state.values())
    },
    "DCP": lambda model, optimizer: dict(
        enumerate(copy.deepcopy(get_optimizer_state_dict(model, optimizer)["state"]).values())
    ),
    "another optimizer": lambda model, optimizer: _load_elsewhere(optimizer),
    "close": lambda model, optimizer: _read_after_close(optimizer),
}


def _load_elsewhere(optimizer):
    _, other = offloaded_model()
    other.load_state_dict(optimizer.state_dict())
    return snapshot(other)["state"]


def _read_after_close(optimizer):
    state = {i: dict(values) for i, values in optimizer.state_dict()["state"].items()}
    optimizer.close()
    return state


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("reader", READERS)
def test_reading_drains_first(reader, seed):
    """“In-flight copies are drained before anything reads: `state_dict`, `state[p]`, …”."""
    _reference_model, reference = trained(2)
    model, optimizer, lanes = lazily_offloaded(seed=seed)
    train(model, optimizer, 2)
    if seed % 3 == 0:
        assert lanes._pending  # copies are in flight
    assert_same_tree(reference.state_dict()["state"], READERS[reader](model, optimizer))
    assert not lanes._pending


@pytest.mark.parametrize("seed", range(3))
def test_loading_drains_first(seed):
    """“In-flight copies are drained before anything reads”, or writes: a late store must not overwrite a load."""
    model, optimizer, _ = lazily_offloaded(seed=seed)
    train(model, optimizer, 1)
    saved, weights = snapshot(optimizer), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(1, 3))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1, 3))
    assert_same(*trained(3), model, optimizer)


def add_a_group(model, optimizer):
    optimizer.add_param_group({"params": list(model[2].parameters())})


def change_the_keys(model, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True


@pytest.mark.parametrize("change", [add_a_group, change_the_keys], ids=["a new group", "other keys"])
@pytest.mark.parametrize("seed", range(3))
def test_placing_anew_drains_first(seed, change):
    """“In-flight copies are drained before anything reads”: state is laid out anew while copies are under way."""

    def make(params):
        return adamw(list(params)[:2])

    reference_model, reference = offloaded_model(make)
    model, optimizer, _ = lazily_offloaded(make, seed=seed)
    for one_model, one in ((reference_model, reference), (model, optimizer)):
        train(one_model, one, 2)
        change(one_model, one)
        train(one_model, one, range(2, 4))
    assert_same(reference_model, reference, model, optimizer)
