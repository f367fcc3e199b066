# SPDX-License-Identifier: Apache-2.0
"""What is loaded is sensible or refused: options, numbers kept once per parameter, incomplete state, extra state."""

import copy
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)

import offstage
from offstage import checkpoint
from offstage.errors import CheckpointError, ConfigError
from tests.support.contract import (
    CLASSES,
    SMALL,
    TORCH,
    adamw,
    assert_same,
    assert_same_tree,
    make_model,
    offloaded_model,
    snapshot,
    train,
    trained,
    unchanged,
)
from tests.support.refusals import refused

NAN, INF = math.nan, math.inf
BAD_OPTIONS = {
    "lr": [NAN, INF, -1.0, "0.1", None, torch.tensor(NAN), torch.ones(2), 1j],
    "betas": [(NAN, 0.9), ("a", "b"), (0.9,), (0.9, 1.5), (0.9, 0.9, 0.9), None, 0.9],
    "eps": [NAN, INF, "x", None, -1.0],
    "weight_decay": [NAN, "x", None, -1.0],
    "amsgrad": ["yes", 0.5],
}
BAD_STEPS = [NAN, INF, -1.0, 1.5, "3", None, torch.tensor(NAN), torch.tensor(1j), torch.tensor(-2), [1.0]]


def parameters_of(cases):
    return [pytest.param(name, value, id=f"{name}={value}") for name, values in cases.items() for value in values]


def stock_folder(folder, model, optimizer, change):
    """What stock torch saves of these, after `change` of the optimizer's nested state dict."""
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    change(state)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def plain_after(steps, make=adamw, dtype=torch.float32):
    model = make_model(dtype)
    optimizer = make(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def refused_by_both(tmp_path, change_numbered, change_named, *fragments, make=adamw, config=SMALL):
    """`load_state_dict` and `checkpoint.load` refuse with one error, and nothing has changed."""
    plain_model, plain = plain_after(3, make)
    model, optimizer = trained(2, make, **config)
    saved = snapshot(plain)
    change_numbered(saved)
    with unchanged(model, optimizer):
        refused(ConfigError, lambda: optimizer.load_state_dict(saved), *fragments)
    stock_folder(tmp_path / "stock", plain_model, plain, change_named)
    with unchanged(model, optimizer):
        refused(CheckpointError, lambda: checkpoint.load(tmp_path / "stock", model, optimizer), *fragments)
    train(model, optimizer, 1)


@pytest.mark.parametrize(("name", "value"), parameters_of(BAD_OPTIONS))
def test_options_that_the_class_does_not_take(name, value, tmp_path):
    def change(saved):
        saved["param_groups"][0][name] = value

    refused_by_both(tmp_path, change, change, "group 0", "expected options that AdamW takes")


def test_options_that_are_missing(tmp_path):
    def change(saved):
        del saved["param_groups"][0]["lr"]

    refused_by_both(tmp_path, change, change, "group 0", "lacks ['lr']")


@pytest.mark.parametrize(
    ("value", "config"),
    [*((value, SMALL) for value in BAD_STEPS), *((value, TORCH) for value in BAD_STEPS[:1])],
    ids=str,
)
def test_a_step_that_is_no_number_of_updates(value, config, tmp_path):
    def numbered(saved):
        saved["state"][2]["step"] = value

    def named(saved):
        saved["state"]["2.weight"]["step"] = value

    refused_by_both(tmp_path, numbered, named, "'2.weight'", "'step'", config=config)


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"SGD"}))
def test_state_that_is_there_in_part(name, tmp_path):
    """A parameter without any state has never had a gradient; without `step`, its bias corrections would begin anew."""
    plain_model, plain = plain_after(3, CLASSES[name])
    model, optimizer = trained(2, CLASSES[name], **TORCH)
    numbered = snapshot(plain)["state"][0]
    for key in numbered:
        if key == "max_exp_avg_sq":
            continue
        saved = snapshot(plain)
        del saved["state"][0][key]
        with unchanged(model, optimizer):
            refused(ConfigError, lambda saved=saved: optimizer.load_state_dict(saved), "'0.weight'", key)
    for key in ("step", next(reversed(numbered))):
        folder = tmp_path / key
        stock_folder(folder, plain_model, plain, lambda saved, key=key: saved["state"]["0.weight"].pop(key))
        with unchanged(model, optimizer):
            load = lambda folder=folder: checkpoint.load(folder, model, optimizer)  # noqa: E731
            refused(CheckpointError, load, "'0.weight'", key)


def test_adam_of_ours_without_step(tmp_path):
    def numbered(saved):
        del saved["state"][2]["step"]

    def named(saved):
        del saved["state"]["2.weight"]["step"]

    refused_by_both(tmp_path, numbered, named, "'2.weight'", "lacks ['step']")


def test_a_parameter_without_any_state_begins_anew(tmp_path):
    plain_model, plain = plain_after(3)
    stock_folder(tmp_path / "stock", plain_model, plain, lambda saved: saved["state"].pop("2.weight"))
    saved = snapshot(plain)
    del saved["state"][2]
    model, optimizer = trained(2)
    checkpoint.load(tmp_path / "stock", model, optimizer)
    other_model, other = trained(1)
    other_model.load_state_dict(plain_model.state_dict())
    other.load_state_dict(saved)
    for one in ((model, optimizer), (other_model, other)):
        train(*one, range(3, 5))
    assert_same(model, optimizer, other_model, other)
    assert float(optimizer.state_dict()["state"][2]["step"]) == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool], ids=str)
def test_state_that_is_not_floating_point(dtype, tmp_path):
    def numbered(saved):
        saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].to(dtype)

    def named(saved):
        saved["state"]["0.weight"]["exp_avg"] = saved["state"]["0.weight"]["exp_avg"].to(dtype)

    refused_by_both(tmp_path, numbered, named, "'exp_avg'", "'0.weight'", "floating point")


@pytest.mark.parametrize(
    "broken",
    [
        {"state": {}, "param_groups": None},
        {"state": {}, "param_groups": [3]},
        {"state": {}, "param_groups": [{"lr": 0.1}]},
        {"state": None},
        {"state": {0: None}},
        {"state": {"0.weight": {"step": 1.0}}},
    ],
    ids=str,
)
def test_what_is_no_state_dict(broken):
    model, optimizer = trained(2)
    saved = {**snapshot(optimizer), **broken}
    with unchanged(model, optimizer):
        refused(ConfigError, lambda: optimizer.load_state_dict(saved), "expect")


GOOD_OPTIONS = [
    {"lr": 0.0},
    {"lr": 1},
    {"lr": torch.tensor(0.02)},
    {"betas": [0.5, 0.75]},
    {"betas": (0, 0.75)},
    {"initial_lr": 0.5, "note": "mine", "anything": None},
    {"foreach": False, "fused": None, "maximize": True, "amsgrad": False},
]


@pytest.mark.parametrize("options", GOOD_OPTIONS, ids=str)
def test_options_that_torch_takes_are_loaded(options, tmp_path):
    plain_model, plain = plain_after(2)
    plain.param_groups[0].update(options)
    stock_folder(tmp_path / "stock", plain_model, plain, lambda saved: None)
    model, optimizer = trained(1)
    checkpoint.load(tmp_path / "stock", model, optimizer)
    other_model, other = offloaded_model()
    other_model.load_state_dict(plain_model.state_dict())
    other.load_state_dict(snapshot(plain))
    for one in (optimizer, other):
        group = one.param_groups[0]
        assert_same_tree({name: group[name] for name in options}, options)
    for one in ((model, optimizer), (other_model, other)):
        train(*one, range(2, 4))
    assert_same(model, optimizer, other_model, other)


def test_groups_of_an_older_torch():
    """Options that its class did not have are filled in by the class itself; `step` was a plain number."""
    plain_model, plain = plain_after(2)
    saved = snapshot(plain)
    for name in ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        del saved["param_groups"][0][name]
    for one in saved["state"].values():
        one["step"] = int(one["step"])
    model, optimizer = offloaded_model(**TORCH)
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(saved)
    train(plain_model, plain, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert_same(model, optimizer, plain_model, plain)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam"])
def test_a_folder_with_a_flattened_optimizer(name, tmp_path):
    def groups(model):
        first, *rest = model.parameters()
        return [{"params": [first]}, {"params": rest, "lr": 0.5, "note": 3}]

    plain_model = make_model()
    plain = CLASSES[name](groups(plain_model))
    train(plain_model, plain, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(plain_model, plain, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "flat")
    model = make_model(seed=1)
    optimizer = offstage.offload(CLASSES[name](groups(model)), model, **TORCH)
    checkpoint.load(tmp_path / "flat", model, optimizer)
    assert_same(model, optimizer, plain_model, plain)


# Extra state


class Extra(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        self.value = value


NUMBERS = torch.arange(3.0)
EXTRA_STATES = [
    {"calls": 7, "inner": {"mean": NUMBERS, "list": [1, 2]}, "none": None},
    {"with.dot": 3, "0": {"1": 4}},
    [NUMBERS, {"x": 2}, [NUMBERS + 1]],
    [1, 2],
    (1, "two"),
    {},
    {"empty": {}},
    None,
    NUMBERS,
]


def other_than(value):
    """The same structure with other values, as a module has it before the load."""
    if isinstance(value, dict):
        return {key: other_than(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [other_than(inner) for inner in value]
    return value - 9 if isinstance(value, (int, torch.Tensor)) else value


def with_extra(value):
    return nn.ModuleDict({"one": Extra(copy.deepcopy(value)), "linear": nn.Linear(2, 2)})


@pytest.mark.parametrize("value", EXTRA_STATES, ids=str)
def test_extra_state_from_and_to_stock_torch(value, tmp_path):
    dcp.save({"model": get_model_state_dict(with_extra(value))}, checkpoint_id=tmp_path / "stock")
    checkpoint.save(tmp_path / "ours", with_extra(value))
    for folder in ("stock", "ours"):
        loaded = with_extra(other_than(value))
        checkpoint.load(tmp_path / folder, loaded)
        assert_same_tree(loaded["one"].value, value)
    loaded = with_extra(other_than(value))
    found = {"model": get_model_state_dict(loaded)}
    dcp.load(found, checkpoint_id=tmp_path / "ours")
    set_model_state_dict(loaded, found["model"])
    assert_same_tree(loaded["one"].value, value)


def test_extra_state_with_other_keys_than_now(tmp_path):
    """A dict that has grown during training: the one that loads has none of its values yet."""
    dcp.save({"model": get_model_state_dict(with_extra({"a": [NUMBERS, 2], "b": 1}))}, checkpoint_id=tmp_path / "stock")
    loaded = with_extra({})
    checkpoint.load(tmp_path / "stock", loaded)
    assert_same_tree(loaded["one"].value, {"a": [NUMBERS, 2], "b": 1})


def test_extra_state_that_was_not_saved(tmp_path):
    stateless = nn.ModuleDict({"one": nn.ParameterDict({"weight": torch.ones(4)}), "linear": nn.Linear(2, 2)})
    checkpoint.save(tmp_path / "ours", stateless)
    loaded = with_extra({"calls": 1})
    refused(CheckpointError, lambda: checkpoint.load(tmp_path / "ours", loaded), "'model.one._extra_state'")
    assert loaded["one"].value == {"calls": 1}
