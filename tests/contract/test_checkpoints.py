# SPDX-License-Identifier: Apache-2.0
"""The contract's section "State and checkpoints": loading, resuming, `torch.distributed.checkpoint`."""

import copy
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import offstage
from offstage.engine import named_state
from offstage.errors import HostMemoryError
from tests.support.contract import (
    CLASSES,
    MASTERS,
    PLANS,
    SMALL,
    TORCH,
    TWO_KEYS,
    adamw,
    assert_same,
    assert_same_future,
    assert_same_tree,
    assert_same_weights,
    make_model,
    offloaded_model,
    resumed,
    saved_and_loaded,
    snapshot,
    train,
    trained,
    trained_twins,
    twin,
    unchanged,
)

# Loading


def test_loading_keeps_fp32_masters_and_moments():
    """“Base `load_state_dict` casts state to the parameter's dtype (m). Ours copies into the arenas”."""
    model, optimizer = trained(3, dtype=torch.bfloat16)
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
    assert_same_future((model, optimizer), (other_model, other), range(3, 5))


def test_loading_does_not_keep_the_checkpoint():
    """“Ours copies into the arenas”: what happens to the loaded dict afterwards does not matter, nor to its owner."""
    model, optimizer = trained(2)
    other_model, other = offloaded_model()
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())  # without a copy: both could share memory
    with unchanged(model, optimizer):
        train(other_model, other, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert_same(model, optimizer, other_model, other)


def test_loading_runs_the_hooks():
    """“runs the pre/post hooks”: in torch's order, and what a pre-hook returns is loaded."""
    _model, optimizer = trained(2)
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
    _model, optimizer = trained(1)
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
    plain_model, plain, model, optimizer = trained_twins(2)
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
    model, optimizer = trained(3, dtype=dtype)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other_model, other = offloaded_model(dtype=dtype, **SMALL, fraction=0.5)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, optim_state_dict=saved, options=options)
    assert_same_future((model, optimizer), (other_model, other), range(3, 5))


def test_dcp_checkpoints_go_between_plain_torch_and_offload():
    """“DCP”: a checkpoint of plain torch sets an offloaded optimizer, and the other way round."""
    plain_model, plain, model, optimizer = twin()
    train(plain_model, plain, 3)
    model.load_state_dict(plain_model.state_dict())
    set_optimizer_state_dict(
        model, optimizer, optim_state_dict=copy.deepcopy(get_optimizer_state_dict(plain_model, plain))
    )
    assert_same_future((model, optimizer), (plain_model, plain), range(3, 5))
    back_model = make_model()
    back = adamw(back_model.parameters())
    model_state, state = get_state_dict(model, optimizer)
    set_state_dict(back_model, back, model_state_dict=model_state, optim_state_dict=copy.deepcopy(state))
    assert_same_future((back_model, back), (plain_model, plain), range(5, 7))


@pytest.mark.parametrize(("dtype", "config"), [(torch.float32, SMALL), (torch.bfloat16, MASTERS["split"])])
def test_dcp_saves_and_loads_files(tmp_path, dtype, config):
    """“`get_/set_optimizer_state_dict` (DCP)”: through files, from one plan to another."""
    model, optimizer = trained(3, dtype=dtype, **config)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other_model, other = offloaded_model(dtype=dtype, **SMALL, fraction=0.5)
    weights, state = get_state_dict(other_model, other)
    holder = {"model": weights, "optimizer": state}
    dcp.load(holder, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other_model, other, model_state_dict=holder["model"], optim_state_dict=holder["optimizer"])
    assert_same_future((model, optimizer), (other_model, other), range(3, 5))


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
    model, optimizer = trained(2, **PLANS[source])
    other_model, other = resumed(model, optimizer, **PLANS[target])
    train(other_model, other, range(2, 4))
    assert_same(*trained(4, **PLANS["off"]), other_model, other)


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("target", MASTERS)
@pytest.mark.parametrize("source", ["fp32", "split", "split half", "fp32 off"])
def test_masters_between_formats(source, target, optimizer_first):
    """“Save at one plan, load at any other: … master format”, whichever of model and optimizer is loaded first."""
    model, optimizer = trained(2, dtype=torch.bfloat16, **MASTERS[source])
    other_model, other = offloaded_model(dtype=torch.bfloat16, **MASTERS[target])
    saved, weights = saved_and_loaded(optimizer.state_dict()), saved_and_loaded(model.state_dict())
    if optimizer_first:
        other.load_state_dict(saved)
        other_model.load_state_dict(weights)
    else:
        other_model.load_state_dict(weights)
        other.load_state_dict(saved)
    train(other_model, other, range(2, 5))
    assert_same(*trained(5, dtype=torch.bfloat16, **MASTERS["fp32"]), other_model, other)
    assert other.receipt().weights_written_by_others == 0


@pytest.mark.parametrize("target", ["fp32", "split"])
def test_a_checkpoint_without_masters(target):
    """“Save at one plan, load at any other: … none at all”: masters start from the weights."""
    model, optimizer = trained(2, dtype=torch.bfloat16, **SMALL, master_weights="none")
    other_model, other = resumed(model, optimizer, dtype=torch.bfloat16, **MASTERS[target])
    for param in other_model.parameters():
        assert torch.equal(other.state[param]["master_weight"], param.float())
        assert other.state[param]["step"] == 2


def test_a_checkpoint_with_masters_loads_where_there_are_none():
    """“Save at one plan, load at any other: … none at all”: moments and step arrive, masters are left out."""
    model, optimizer = trained(2, dtype=torch.bfloat16)
    other_model, other = resumed(model, optimizer, dtype=torch.bfloat16, **SMALL, master_weights="none")
    for param, theirs in zip(other_model.parameters(), model.parameters(), strict=True):
        assert other.state[param].keys() == TWO_KEYS
        assert torch.equal(other.state[param]["exp_avg"], optimizer.state[theirs]["exp_avg"])
        assert other.state[param]["step"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_formats(dtype):
    """“Save at one plan, load at any other”: moments kept in bf16 load into fp32 and back without another change."""
    model, optimizer = trained(2, **SMALL, state_dtype="bfloat16")
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
    model, optimizer = trained(done, dtype=dtype, **config)
    for number in (done, done + 2):
        saved, weights = saved_and_loaded(optimizer.state_dict()), saved_and_loaded(model.state_dict())
        model, optimizer = offloaded_model(dtype=dtype, **config)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(number, number + 2))
    assert_same(*trained(done + 4, dtype=dtype, **config), model, optimizer)


def test_one_checkpoint_loaded_twice():
    """“Resume … twice”: loading does not use a checkpoint up, and loading over later state forgets all of it."""
    model, optimizer = trained(2)
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
    model, optimizer = trained(2)
    saved = snapshot(optimizer)
    train(model, optimizer, range(2, 4))
    saved["param_groups"][0]["lr"] = 77.0
    damage(saved)
    with unchanged(model, optimizer), pytest.raises(offstage.ConfigError):
        optimizer.load_state_dict(saved)
    reference_model, reference = trained(4)
    assert_same_future((reference_model, reference), (model, optimizer), range(4, 6))


def test_a_load_that_needs_more_host_memory_than_allowed_leaves_the_old_state():
    """“Interrupted load leaves the old state”: also when its options need more keys than there is room for."""
    model, optimizer = trained(2, **SMALL, host_budget="52KiB")
    _bigger_model, bigger = trained(1, lambda params: adamw(params, amsgrad=True))
    with unchanged(model, optimizer), pytest.raises(HostMemoryError, match="host_budget"):
        optimizer.load_state_dict(snapshot(bigger))
    train(model, optimizer, range(2, 3))


def test_a_pre_hook_that_raises_leaves_the_old_state():
    """“Interrupted load leaves the old state”."""
    model, optimizer = trained(2)
    saved = snapshot(optimizer)
    train(model, optimizer, 1)

    def refuse(one, state_dict):
        raise ZeroDivisionError

    optimizer.register_load_state_dict_pre_hook(refuse)
    with unchanged(model, optimizer), pytest.raises(ZeroDivisionError):
        optimizer.load_state_dict(saved)


def test_ctrl_c_during_a_load_waits_for_its_end(monkeypatch):
    """“Interrupted load”: Ctrl-C in the middle finishes the load first, never leaving half of each state."""
    model, optimizer = trained(2)
    saved = snapshot(optimizer)
    train(model, optimizer, range(2, 4))
    load, calls = named_state.load, []

    def interrupted_load(state, *args):
        calls.append(state)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        load(state, *args)

    monkeypatch.setattr(named_state, "load", interrupted_load)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    assert len(calls) == 4
    assert_same_tree(optimizer.state_dict(), saved)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
