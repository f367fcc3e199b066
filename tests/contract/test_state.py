# SPDX-License-Identifier: Apache-2.0
"""The contract's section "State and checkpoints", as far as it is about one process and plain tensors."""

import copy
import io
import pickle
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import offstage
from offstage.errors import HostMemoryError
from offstage.held_state import HeldState

from .support import (
    CLASSES,
    PLANS,
    SMALL,
    TORCH,
    adamw,
    assert_same,
    assert_same_optimizer,
    assert_same_tree,
    assert_same_weights,
    lazily_offloaded,
    loss_of,
    make_model,
    offloaded_model,
    saved_and_loaded,
    snapshot,
    train,
    twin,
    unchanged,
)

MASTERS = {
    "fp32": {**SMALL, "master_weights": "fp32"},
    "split": {**SMALL, "master_weights": "split"},
    "fp32 half": {**SMALL, "master_weights": "fp32", "fraction": 0.5},
    "split half": {**SMALL, "master_weights": "split", "fraction": 0.5},
    "fp32 off": {"fraction": 0.0, "master_weights": "fp32"},
    "split off": {"fraction": 0.0, "master_weights": "split"},
    "fp32 one chunk": {"min_bytes": 0, "chunk_bytes": "1MiB", "slots": 1},
}
"""Plans for bf16 parameters that all keep the same masters."""

TWO_KEYS = {"exp_avg", "exp_avg_sq", "step"}


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
    last_model, last = offloaded_model(CLASSES[name], **TORCH)
    last_model.load_state_dict(middle_model.state_dict())
    last.load_state_dict(saved_and_loaded(middle.state_dict()))
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
    model, optimizer = offloaded_model(dtype=torch.bfloat16, **config)
    reference_model, reference = offloaded_model(dtype=torch.bfloat16, **MASTERS["fp32"])
    train(model, optimizer, 3)
    train(reference_model, reference, 3)
    assert_same(reference_model, reference, model, optimizer)
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
    model, optimizer = offloaded_model(dtype=dtype, **config)
    train(model, optimizer, 1)
    for values in optimizer.state_dict()["state"].values():
        for value in values.values():
            assert value.untyped_storage().nbytes() == value.nbytes
            file = io.BytesIO()
            torch.save(value, file)
            assert file.tell() < value.nbytes + 4096


@pytest.mark.parametrize("name", CLASSES)
def test_tensors_and_primitives_only(name):
    """“Tensors and primitives only (`weights_only=True` loads it)”."""
    model, optimizer = offloaded_model(CLASSES[name])
    train(model, optimizer, 2)
    assert_same_tree(saved_and_loaded(optimizer.state_dict()), optimizer.state_dict())


def test_state_dict_is_on_the_host():
    """“state presented on one device”: every tensor of a state dict, `step` included, is on the host."""
    for config in PLANS.values():
        model, optimizer = offloaded_model(**config)
        train(model, optimizer, 1)
        values = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        assert {value.device for value in values} == {torch.device("cpu")}


# Loading


def test_loading_keeps_fp32_masters_and_moments():
    """“Base `load_state_dict` casts state to the parameter's dtype (m). Ours copies into the arenas”."""
    model, optimizer = offloaded_model(dtype=torch.bfloat16)
    train(model, optimizer, 3)
    saved = saved_and_loaded(optimizer.state_dict())
    other_model, other = offloaded_model(dtype=torch.bfloat16)
    train(other_model, other, 1)  # it has arenas with other contents
    places = {id(p): other.state[p]["exp_avg"].data_ptr() for p in other_model.parameters()}
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    for param, values in zip(other_model.parameters(), saved["state"].values(), strict=True):
        for key, value in values.items():
            assert value.dtype == torch.float32
            assert torch.equal(other.state[param][key], value)
        assert other.state[param]["exp_avg"].data_ptr() == places[id(param)]
    train(model, optimizer, range(3, 5))
    train(other_model, other, range(3, 5))
    assert_same(model, optimizer, other_model, other)


def test_loading_does_not_keep_the_checkpoint():
    """“Ours copies into the arenas”: what happens to the loaded dict afterwards does not matter, nor to its owner."""
    model, optimizer = offloaded_model()
    train(model, optimizer, 2)
    other_model, other = offloaded_model()
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())  # without a copy: both could share memory
    with unchanged(model, optimizer):
        train(other_model, other, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert_same(model, optimizer, other_model, other)


def test_loading_runs_the_hooks():
    """“runs the pre/post hooks”: in torch's order, and what a pre-hook returns is loaded."""
    model, optimizer = offloaded_model()
    train(model, optimizer, 2)
    seen = []

    def pre_load(one, state_dict):
        seen.append("pre load")
        return {**state_dict, "param_groups": [{**g, "lr": 0.5} for g in state_dict["param_groups"]]}

    def post_save(one, state_dict):
        seen.append("post save")
        return {**state_dict, "extra": 1}

    _, other = offloaded_model()
    other.register_load_state_dict_pre_hook(pre_load)
    other.register_load_state_dict_post_hook(lambda one: seen.append("post load"))
    other.register_state_dict_pre_hook(lambda one: seen.append("pre save"))
    other.register_state_dict_post_hook(post_save)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    assert other.state_dict()["extra"] == 1
    assert seen == ["pre load", "post load", "pre save", "post save"]


def test_loading_writes_into_the_users_groups():
    """“`param_groups` is the user's list” also after a load: schedulers that hold it still reach the update."""
    model, optimizer = offloaded_model()
    train(model, optimizer, 1)
    saved = snapshot(optimizer)
    saved["param_groups"][0]["lr"] = 0.25
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    assert group["lr"] == 0.25


# torch.distributed.checkpoint

DCP_OPTIONS = {
    "plain": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full on the host": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "full and flattened": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
}


@pytest.mark.parametrize("options", DCP_OPTIONS.values(), ids=DCP_OPTIONS)
def test_dcp_gets_what_it_gets_from_plain_torch(options):
    """“`get_/set_optimizer_state_dict` (DCP), flattened and full-state variants”."""
    plain_model, plain, model, optimizer = twin()
    train(plain_model, plain, 2)
    train(model, optimizer, 2)
    theirs = get_optimizer_state_dict(plain_model, plain, options=options)
    ours = get_optimizer_state_dict(model, optimizer, options=options)
    assert_same_tree(theirs, ours)


# torch's own set_optimizer_state_dict cannot load the variant that is both full and flattened, for any optimizer.
SETTABLE = [name for name in DCP_OPTIONS if name != "full and flattened"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTABLE)
def test_dcp_sets_a_fresh_optimizer(name, dtype):
    """“`get_/set_optimizer_state_dict`”: into a fresh optimizer, which then goes on with the same bits."""
    options = DCP_OPTIONS[name]
    model, optimizer = offloaded_model(dtype=dtype)
    train(model, optimizer, 3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other_model, other = offloaded_model(dtype=dtype, **SMALL, fraction=0.5)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, optim_state_dict=saved, options=options)
    train(model, optimizer, range(3, 5))
    train(other_model, other, range(3, 5))
    assert_same(model, optimizer, other_model, other)


def test_dcp_checkpoints_go_between_plain_torch_and_offload():
    """“DCP”: a checkpoint of plain torch sets an offloaded optimizer, and the other way round."""
    plain_model, plain, model, optimizer = twin()
    train(plain_model, plain, 3)
    model.load_state_dict(plain_model.state_dict())
    set_optimizer_state_dict(
        model, optimizer, optim_state_dict=copy.deepcopy(get_optimizer_state_dict(plain_model, plain))
    )
    train(model, optimizer, range(3, 5))
    train(plain_model, plain, range(3, 5))
    assert_same(plain_model, plain, model, optimizer)
    back_model = make_model()
    back = adamw(back_model.parameters())
    model_state, state = get_state_dict(model, optimizer)
    set_state_dict(back_model, back, model_state_dict=model_state, optim_state_dict=copy.deepcopy(state))
    train(back_model, back, range(5, 7))
    train(plain_model, plain, range(5, 7))
    assert_same(plain_model, plain, back_model, back)


@pytest.mark.parametrize(("dtype", "config"), [(torch.float32, SMALL), (torch.bfloat16, MASTERS["split"])])
def test_dcp_saves_and_loads_files(tmp_path, dtype, config):
    """“`get_/set_optimizer_state_dict` (DCP)”: through files, from one plan to another."""
    model, optimizer = offloaded_model(dtype=dtype, **config)
    train(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other_model, other = offloaded_model(dtype=dtype, **SMALL, fraction=0.5)
    weights, state = get_state_dict(other_model, other)
    holder = {"model": weights, "optimizer": state}
    dcp.load(holder, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other_model, other, model_state_dict=holder["model"], optim_state_dict=holder["optimizer"])
    train(model, optimizer, range(3, 5))
    train(other_model, other, range(3, 5))
    assert_same(model, optimizer, other_model, other)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
@pytest.mark.parametrize(
    ("dtype", "config"),
    [(torch.float32, SMALL), (torch.float32, TORCH), (torch.bfloat16, SMALL), (torch.bfloat16, MASTERS["split"])],
    ids=["fp32", "fp32 torch rule", "bf16 masters", "bf16 split"],
)
def test_dcp_initialises_a_fresh_optimizer(dtype, config, lr):
    """“DCP runs a real `step()` with zero gradients and lr 0: parameters must not change, all state must exist”."""
    model, optimizer = offloaded_model(lambda params: adamw(params, lr=lr, foreach=False), dtype=dtype, **config)
    before = copy.deepcopy(model)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert_same_weights(before, model)
    assert all(param.grad is None for param in model.parameters())
    assert optimizer.param_groups[0]["lr"] is lr
    assert state.keys() == dict(model.named_parameters()).keys()
    keys = TWO_KEYS | ({"master_weight"} if dtype == torch.bfloat16 else set())
    for name, values in state.items():
        assert values.keys() == keys, name
        if "master_weight" in values:
            assert torch.equal(values["master_weight"], model.get_parameter(name).float())


@pytest.mark.parametrize("name", CLASSES)
def test_dcp_initialises_every_class(name):
    """“DCP runs a real `step()` with zero gradients and lr 0”: as it does with plain torch, for every class."""
    plain_model, plain, model, optimizer = twin(CLASSES[name])
    assert_same_tree(get_optimizer_state_dict(plain_model, plain), get_optimizer_state_dict(model, optimizer))
    assert_same_weights(plain_model, model)


# Any plan to any plan


@pytest.mark.parametrize("target", PLANS)
@pytest.mark.parametrize("source", PLANS)
def test_save_at_one_plan_load_at_any_other(source, target):
    """“Save at one plan, load at any other: fraction, chunk size, …, none at all”."""
    straight_model, straight = offloaded_model(**PLANS["off"])
    train(straight_model, straight, 4)
    model, optimizer = offloaded_model(**PLANS[source])
    train(model, optimizer, 2)
    other_model, other = offloaded_model(**PLANS[target])
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(other_model, other, range(2, 4))
    assert_same(straight_model, straight, other_model, other)


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("target", MASTERS)
@pytest.mark.parametrize("source", ["fp32", "split", "split half", "fp32 off"])
def test_masters_between_formats(source, target, optimizer_first):
    """“Save at one plan, load at any other: … master format”, whichever of model and optimizer is loaded first."""
    straight_model, straight = offloaded_model(dtype=torch.bfloat16, **MASTERS["fp32"])
    train(straight_model, straight, 5)
    model, optimizer = offloaded_model(dtype=torch.bfloat16, **MASTERS[source])
    train(model, optimizer, 2)
    other_model, other = offloaded_model(dtype=torch.bfloat16, **MASTERS[target])
    saved, weights = saved_and_loaded(optimizer.state_dict()), saved_and_loaded(model.state_dict())
    if optimizer_first:
        other.load_state_dict(saved)
        other_model.load_state_dict(weights)
    else:
        other_model.load_state_dict(weights)
        other.load_state_dict(saved)
    train(other_model, other, range(2, 5))
    assert_same(straight_model, straight, other_model, other)
    assert other.receipt().weights_written_by_others == 0


@pytest.mark.parametrize("target", ["fp32", "split"])
def test_a_checkpoint_without_masters(target):
    """“Save at one plan, load at any other: … none at all”: masters start from the weights."""
    model, optimizer = offloaded_model(dtype=torch.bfloat16, **SMALL, master_weights="none")
    train(model, optimizer, 2)
    other_model, other = offloaded_model(dtype=torch.bfloat16, **MASTERS[target])
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for param in other_model.parameters():
        assert torch.equal(other.state[param]["master_weight"], param.float())
        assert other.state[param]["step"] == 2


def test_a_checkpoint_with_masters_loads_where_there_are_none():
    """“Save at one plan, load at any other: … none at all”: moments and step arrive, masters are left out."""
    model, optimizer = offloaded_model(dtype=torch.bfloat16)
    train(model, optimizer, 2)
    other_model, other = offloaded_model(dtype=torch.bfloat16, **SMALL, master_weights="none")
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for param, theirs in zip(other_model.parameters(), model.parameters(), strict=True):
        assert other.state[param].keys() == TWO_KEYS
        assert torch.equal(other.state[param]["exp_avg"], optimizer.state[theirs]["exp_avg"])
        assert other.state[param]["step"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_formats(dtype):
    """“Save at one plan, load at any other”: moments kept in bf16 load into fp32 and back without another change."""
    model, optimizer = offloaded_model(**SMALL, state_dtype="bfloat16")
    train(model, optimizer, 2)
    other_model, other = offloaded_model(**SMALL, state_dtype=dtype)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for param, theirs in zip(other_model.parameters(), model.parameters(), strict=True):
        kept = other.state[param]["exp_avg"]
        assert kept.dtype == getattr(torch, dtype)
        assert torch.equal(kept.float(), optimizer.state[theirs]["exp_avg"].float())


# Resuming


@pytest.mark.parametrize("config", [TORCH, SMALL, {"fraction": 0.0}], ids=["torch rule", "own rule", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_resume(done, dtype, config):
    """“Resume before the first step, after it, and twice”."""
    straight_model, straight = offloaded_model(dtype=dtype, **config)
    train(straight_model, straight, done + 4)
    model, optimizer = offloaded_model(dtype=dtype, **config)
    train(model, optimizer, done)
    for number in (done, done + 2):
        saved, weights = saved_and_loaded(optimizer.state_dict()), saved_and_loaded(model.state_dict())
        model, optimizer = offloaded_model(dtype=dtype, **config)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(number, number + 2))
    assert_same(straight_model, straight, model, optimizer)


def test_one_checkpoint_loaded_twice():
    """“Resume … twice”: loading does not use a checkpoint up, and loading over later state forgets all of it."""
    model, optimizer = offloaded_model()
    train(model, optimizer, 2)
    saved, weights = snapshot(optimizer), copy.deepcopy(model.state_dict())
    before = copy.deepcopy(saved)
    results = []
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert_same_tree(saved, before)
        train(model, optimizer, range(2, 4))
        results.append((copy.deepcopy(model.state_dict()), snapshot(optimizer)))
    assert_same_tree(*results)


def test_loading_a_fresh_checkpoint_starts_over():
    """“Resume before the first step”: an optimizer with state that loads one without has none, masters included."""
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = offloaded_model(dtype=dtype)
        fresh, weights = snapshot(optimizer), copy.deepcopy(model.state_dict())
        train(model, optimizer, 3)
        first, first_state = copy.deepcopy(model), snapshot(optimizer)
        model.load_state_dict(weights)
        optimizer.load_state_dict(fresh)
        assert len(optimizer.state) == 0
        train(model, optimizer, 3)
        assert_same_weights(first, model)
        assert_same_tree(optimizer.state_dict(), first_state)


# A load that fails


def broken_checkpoints():
    def shape(saved):
        saved["state"][3]["exp_avg_sq"] = torch.zeros(5)

    def missing_key(saved):
        del saved["state"][3]["exp_avg"]

    def group_sizes(saved):
        saved["param_groups"][0]["params"].pop()

    def group_count(saved):
        saved["param_groups"].append({**saved["param_groups"][0], "params": []})

    def no_groups(saved):
        del saved["param_groups"]

    def foreign_key(saved):
        saved["state"][3]["momentum_buffer"] = torch.zeros(48)

    def not_a_tensor(saved):
        saved["state"][3]["exp_avg"] = "exp_avg"

    def without_data(saved):
        saved["state"][3]["exp_avg"] = torch.empty(48, device="meta")

    return [shape, missing_key, group_sizes, group_count, no_groups, foreign_key, not_a_tensor, without_data]


@pytest.mark.parametrize("damage", broken_checkpoints(), ids=lambda damage: damage.__name__)
def test_an_interrupted_load_leaves_the_old_state(damage):
    """“Interrupted load leaves the old state”: a checkpoint that cannot be loaded changes nothing at all."""
    model, optimizer = offloaded_model()
    train(model, optimizer, 2)
    saved = snapshot(optimizer)
    train(model, optimizer, range(2, 4))
    saved["param_groups"][0]["lr"] = 77.0
    damage(saved)
    with unchanged(model, optimizer), pytest.raises(offstage.ConfigError):
        optimizer.load_state_dict(saved)
    reference_model, reference = offloaded_model()
    train(reference_model, reference, 4)
    train(reference_model, reference, range(4, 6))
    train(model, optimizer, range(4, 6))
    assert_same(reference_model, reference, model, optimizer)


def test_a_load_that_needs_more_host_memory_than_allowed_leaves_the_old_state():
    """“Interrupted load leaves the old state”: also when its options need more keys than there is room for."""
    model, optimizer = offloaded_model(**SMALL, host_budget="52KiB")
    train(model, optimizer, 2)
    bigger_model, bigger = offloaded_model(lambda params: adamw(params, amsgrad=True))
    train(bigger_model, bigger, 1)
    with unchanged(model, optimizer), pytest.raises(HostMemoryError, match="host_budget"):
        optimizer.load_state_dict(snapshot(bigger))
    train(model, optimizer, range(2, 3))


def test_a_pre_hook_that_raises_leaves_the_old_state():
    """“Interrupted load leaves the old state”."""
    model, optimizer = offloaded_model()
    train(model, optimizer, 2)
    saved = snapshot(optimizer)
    train(model, optimizer, 1)

    def refuse(one, state_dict):
        raise ZeroDivisionError

    optimizer.register_load_state_dict_pre_hook(refuse)
    with unchanged(model, optimizer), pytest.raises(ZeroDivisionError):
        optimizer.load_state_dict(saved)


def test_ctrl_c_during_a_load_waits_for_its_end(monkeypatch):
    """“Interrupted load”: Ctrl-C in the middle finishes the load first, never leaving half of each state."""
    model, optimizer = offloaded_model()
    train(model, optimizer, 2)
    saved = snapshot(optimizer)
    train(model, optimizer, range(2, 4))
    load, calls = HeldState.load, []

    def interrupted_load(self, *args):
        calls.append(self)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        load(self, *args)

    monkeypatch.setattr(HeldState, "load", interrupted_load)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    assert len(calls) == 4
    assert_same_tree(optimizer.state_dict(), saved)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
    reference_model, reference = offloaded_model(dtype=torch.bfloat16)
    train(reference_model, reference, 4)
    train(model, optimizer, 2)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, range(2, 4))
    assert_same(reference_model, reference, model, optimizer)
    assert optimizer.receipt().weights_written_by_others == 0


# Copying


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_pickle_and_deepcopy_refuse_with_a_reason(copying):
    """“Pickle and deepcopy work or refuse with a reason”, and the optimizer is unharmed."""
    model, optimizer = offloaded_model()
    train(model, optimizer, 1)
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
    reference_model, reference = offloaded_model()
    train(reference_model, reference, 2)
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
    reference_model, reference = offloaded_model()
    train(reference_model, reference, 3)
    assert_same(reference_model, reference, model, optimizer)


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
