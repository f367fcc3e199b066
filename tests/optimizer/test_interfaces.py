# SPDX-License-Identifier: Apache-2.0
"""The settings and `optimizer.state` at their edges: values of every kind, keys of every kind, texts, types."""

import copy
import dataclasses
import inspect
import logging
import pydoc
import tomllib
import typing
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import offstage
from offstage import ActivationConfig, ConfigError, OffloadConfig
from offstage.config import ActivationSettings, OffloadSettings, descriptions
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import SMALL, adamw, assert_same_tree, make_model, trained, twin
from tests.support.contract import train as train_steps

ROOT = Path(__file__).parents[2]
CONFIGS = {OffloadConfig: OffloadSettings, ActivationConfig: ActivationSettings}
FIELDS = [(cls, one.name) for cls in CONFIGS for one in dataclasses.fields(cls)]

# Values

STRANGE = [
    "", "x", "9" * 400, "-1", "nan", b"8GiB", -1, 1.5, float("nan"), float("inf"), 10**400, 1j, True, (), [1], {1: 2},
    {"exp_avg": None}, {"exp_avg": torch.int8}, {"exp_averages": "float32"}, object(), int, len, torch.float16,
    torch.ones(2), numpy.ones(2), numpy.int64(3), nn.Linear(1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_a_value_is_taken_or_refused_by_name(cls, name):
    said = []
    for value in STRANGE:
        try:
            cls(**{name: value})
        except ConfigError as error:
            said.append(str(error))
    assert len(said) > 15
    assert all(name in text and text.endswith(".") for text in said)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "float32"),
        ({"exp_avg": torch.bfloat16, "exp_avg_sq": "float32"}, {"exp_avg": "bfloat16", "exp_avg_sq": "float32"}),
    ],
)
def test_dtypes_of_torch(given, found):
    config = OffloadConfig(state_dtype=given)
    assert config == OffloadConfig(state_dtype=found) == dataclasses.replace(config)
    assert config.state_dtype == found
    assert config.dtype_of("exp_avg") is (torch.float32 if found == "float32" else torch.bfloat16)
    assert config.dtype_of("exp_avg_sq") is (torch.bfloat16 if found == "bfloat16" else torch.float32)
    optimizer = offstage.offload(adamw(make_model().parameters()), **SMALL, state_dtype=given)
    for key in runtime_of(optimizer).all_states()[0].keys:
        assert key.dtype is config.dtype_of(key.name)


def test_none_is_the_default():
    assert OffloadConfig(min_bytes=None) == OffloadConfig()
    assert ActivationConfig(min_bytes=None) == ActivationConfig()
    for cls, name in (
        *((OffloadConfig, name) for name in ("update_on", "rule", "master_weights", "state_dtype", "pin_memory")),
        *((ActivationConfig, name) for name in ("fraction", "keep_last", "prefetch", "activations", "weights")),
    ):
        with pytest.raises(ConfigError, match=f"{name} expects .*; found None"):
            cls(**{name: None})


def test_layers_of_a_model_as_they_are():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    assert ActivationConfig(layers=model["layers"]).layers == list(model["layers"])
    assert ActivationConfig(layers=tuple(model["layers"])).layers == list(model["layers"])


# Settings without effect

VAIN = {
    "threads on the device": ({"threads": 4}, "found update_on='device'"),
    "threads, off": ({"threads": 4, "fraction": 0.0}, "found update_on='device'"),
    "threads of torch": ({"threads": 4, "update_on": "host", "rule": "torch"}, "torch.set_num_threads"),
    "slots on the host": ({"slots": 2, "update_on": "host"}, "Leave slots out"),
    "a moment that is none": ({"state_dtype": {"exp_avgs": "bfloat16"}}, "found the key 'exp_avgs'"),
}


@pytest.mark.parametrize("case", VAIN)
def test_a_setting_that_can_do_nothing_is_refused(case):
    settings, says = VAIN[case]
    with pytest.raises(ConfigError, match=says):
        OffloadConfig(**settings)


def test_activation_settings_that_can_do_nothing_are_refused():
    with pytest.raises(ConfigError, match="keep_last=2 chooses among all layers"):
        ActivationConfig(layers=[nn.Linear(2, 2)], keep_last=2)
    with pytest.raises(ConfigError, match=r"fraction=0\.5 is a share of the saved tensors"):
        ActivationConfig(activations=False, weights=True, fraction=0.5)


def test_threads_for_a_class_that_has_torchs():
    model = make_model()
    with pytest.raises(ConfigError, match=r"SGD updates with torch's threads.*leave threads out"):
        offstage.offload(torch.optim.SGD(model.parameters(), momentum=0.9), model, **SMALL, update_on="host", threads=2)


@pytest.mark.parametrize("settings", [{"update_on": "auto"}, {"host_fraction": 0.0}, {"host_fraction": 1.0}])
def test_what_may_have_an_effect_is_taken(settings):
    config = OffloadConfig(**settings, threads=2, slots=4, window="all")
    for share in (0.0, 1.0):  # what the planner may choose
        assert dataclasses.replace(config, host_fraction=share).threads == 2


def test_settings_follow_the_place_of_updates():
    model, optimizer = trained(1, **SMALL, slots=2)
    optimizer.replan(update_on="host", threads=2)
    optimizer.replan(update_on="device", slots=2)
    train_steps(model, optimizer, range(1, 3))
    assert (optimizer.config.threads, optimizer.config.slots) == (None, 2)
    with pytest.raises(ConfigError, match="leave threads out"):
        optimizer.replan(threads=2)


NO_EFFECT_HERE = {
    "the budget holds all": ({"device_budget": "1GiB"}, "device_budget=1.0 GiB holds all 48.9 KiB of state: nothing"),
    "no masters": ({"master_weights": "split"}, "master_weights='split': no parameter is in 16 bits"),
    "a window for nothing": ({"update_on": "host", "window": "all"}, "the window is not used"),
}


@pytest.mark.parametrize("case", NO_EFFECT_HERE)
def test_what_has_no_effect_here_is_said_once(case, caplog):
    settings, says = NO_EFFECT_HERE[case]
    with caplog.at_level(logging.WARNING, "offstage"):
        _, optimizer = trained(3, **SMALL, **settings)
    (text,) = optimizer.receipt().fallbacks
    assert says in text
    assert text in str(optimizer.receipt())
    assert [record.getMessage() for record in caplog.records] == [text]


def test_a_budget_that_holds_all_after_a_replan(caplog):
    _, optimizer = trained(1, **SMALL)
    assert optimizer.receipt().fallbacks == ()
    with caplog.at_level(logging.WARNING, "offstage"):
        optimizer.replan(device_budget="1GiB")
    assert ["holds all" in text for text in optimizer.receipt().fallbacks] == [True]
    assert ["holds all" in record.getMessage() for record in caplog.records] == [True]


def test_a_rate_that_is_not_known():
    model = make_model()
    optimizer = offstage.offload(torch.optim.SGD(model.parameters(), momentum=0.9), model, **SMALL, update_on="auto")
    assert ["all updates are on the device" in text for text in optimizer.receipt().fallbacks] == [True]


# Parameters


class Wrapped(torch.Tensor):
    """Its values are in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


PARAMETERS = {
    "meta": (lambda: nn.Linear(4, 4, device="meta"), ["'weight'", "meta device", "to_empty", "then build"]),
    "lazy": (lambda: nn.LazyLinear(4), ["'weight'", "has no shape yet", "Run one forward first"]),
    "wrapped": (
        lambda: nn.ParameterDict({"weight": nn.Parameter(Wrapped(torch.ones(4, 4)))}),
        ["'weight'", "test_interfaces.Wrapped", "expected a plain tensor or a DTensor"],
    ),
}


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_without_memory_of_their_own(case, with_model):
    make, fragments = PARAMETERS[case]
    model = make()
    inner = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError) as info:
        offstage.offload(inner, model if with_model else None, **SMALL)
    for fragment in fragments[0 if with_model else 1 :]:
        assert fragment in str(info.value)
    assert "_offstage_consumed" not in vars(inner)


@pytest.mark.parametrize("case", PARAMETERS)
def test_such_parameters_are_not_added_later(case):
    model, optimizer = trained(1, **SMALL)
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": list(PARAMETERS[case][0]().parameters())})
    assert len(optimizer.param_groups) == 1
    train_steps(model, optimizer, range(1, 2))


class Named(nn.Parameter):
    """Only a name for a plain parameter."""


def test_classes_that_only_have_a_name_are_parameters():
    param = Named(torch.ones(64, 64))
    optimizer = offstage.offload(adamw([param]), **SMALL)
    param.grad = torch.ones(64, 64)
    optimizer.step()
    assert (param != 1).all()


# optimizer.state


def test_own_keys_as_in_plain_torch():
    """torch's own tests of hooks write such keys; `state_dict()` and `load_state_dict()` take them along."""
    plain_model, plain, model, optimizer = twin(adamw)
    expected = {}
    for one, result in ((plain, expected), (optimizer, found := {})):
        one.register_state_dict_pre_hook(lambda made: made.state.__setitem__("saves", 1))
        one.state["test"] = 5
        one.state["made"]["by reading"] = True
        result["keys"] = [*one.state]
        result["asked"] = ["test" in one.state, "no" in one.state, one.state.get("no"), one.state.pop("no", 7)]
        result["default"] = one.state.setdefault("set", [1])
        before = one.state_dict()  # no parameter has state yet
        one.state = {}
        result["emptied"] = len(one.state)
        one.load_state_dict(before)
        result["loaded"] = dict(one.state.items())
        del one.state["made"]
        with pytest.raises(KeyError):
            del one.state["made"]
        with pytest.raises(KeyError):
            one.state.pop("made")
    train_steps(plain_model, plain, 2)
    train_steps(model, optimizer, 2)
    assert found == expected
    assert_same_tree(optimizer.state_dict(), plain.state_dict())
    assert {key for key in optimizer.state if isinstance(key, str)} == {"test", "set", "saves"}
    optimizer.replan(fraction=0.5)
    assert optimizer.state["test"] == 5


def test_own_keys_are_taken_over():
    model = make_model()
    inner = adamw(model.parameters())
    inner.state["test"] = kept = ["anything"]
    train_steps(model, inner, 1)
    optimizer = offstage.offload(inner, model, **SMALL)
    assert optimizer.state["test"] is kept
    assert optimizer.state_dict()["state"]["test"] is kept


def test_a_tensor_that_is_no_parameter():
    _, optimizer = trained(1, **SMALL)
    stranger = torch.ones(3)
    calls = [
        lambda: optimizer.state[stranger],
        lambda: optimizer.state.__setitem__(stranger, {}),
        lambda: optimizer.state.__delitem__(stranger),
        lambda: setattr(optimizer, "state", {stranger: {}}),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"shape \(3,\) that is not a parameter of this optimizer") as info:
            call()
        assert isinstance(info.value, KeyError)
    assert stranger not in optimizer.state
    assert optimizer.state.get(stranger) is None
    assert optimizer.state.pop(stranger, 7) == 7
    with pytest.raises(ConfigError, match="expects a dict from parameters"):
        optimizer.state = None


def test_state_without_a_use_is_refused():
    model, optimizer = trained(1, **SMALL)
    param, before = model[0].weight, copy.deepcopy(optimizer.state_dict())
    for name, value in (("foo", 1.0), ("exp_average", torch.ones(()))):
        with pytest.raises(ConfigError, match=rf"State '{name}' of parameter '0.weight'.*optimizer\.state\['{name}'\]"):
            optimizer.state[param][name] = value
        with pytest.raises(ConfigError, match=f"State '{name}'"):
            optimizer.state = {param: {**optimizer.state[param], name: value}}
    assert_same_tree(optimizer.state_dict(), before)


def test_what_a_state_dict_brings_along_stays():
    """As in plain torch: a state dict may have numbers of the user's; assigning others does not lose them."""
    model, optimizer = trained(1, **SMALL)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["foo"] = 3.0
    optimizer.load_state_dict(saved)
    optimizer.state[model[0].weight]["step"] = torch.tensor(4.0)
    train_steps(model, optimizer, range(1, 2))
    assert optimizer.state_dict()["state"][0]["foo"] == 3.0
    assert optimizer.state_dict()["state"][0]["step"] == 5


def test_state_of_parameters_under_other_names_is_refused():
    _, optimizer = trained(1, **SMALL)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {f"name {index}": values for index, values in saved["state"].items()}
    with pytest.raises(ConfigError, match="expected the same names or numbers in both"):
        optimizer.load_state_dict(saved)
    assert not runtime_of(optimizer).own_state


# Texts and types


@pytest.mark.parametrize(
    ("thing", "config"),
    [
        (offstage.OffloadConfig, OffloadConfig),
        (offstage.offload, OffloadConfig),
        (offstage.ActivationConfig, ActivationConfig),
        (offstage.offload_activations, ActivationConfig),
    ],
    ids=lambda one: one.__name__,
)
def test_help_has_every_field(thing, config):
    shown = " ".join(pydoc.plain(pydoc.render_doc(thing)).replace("|", " ").split())
    texts = descriptions(config)
    assert texts.keys() == {one.name for one in dataclasses.fields(config)}
    for name, text in texts.items():
        assert f" {name}: " in shown
        assert " ".join(text.replace("|", " ").split()) in shown


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda one: one.__name__)
def test_keywords_are_typed_as_the_fields(cls):
    """mypy reads tests/support/typed_calls.py; this is about what that file does not name."""
    keywords = {name: hint.__forward_arg__ for name, hint in CONFIGS[cls].__annotations__.items()}
    assert list(keywords) == [one.name for one in dataclasses.fields(cls)]
    for one in dataclasses.fields(cls):
        takes_none = "| None" in keywords[one.name]
        assert keywords[one.name] in (one.type, f"{one.type} | None")
        if takes_none:
            cls(**{one.name: None})


def test_functions_take_the_typed_keywords():
    takers = {
        offstage.offload: OffloadSettings,
        offstage.OffloadedOptimizer.replan: OffloadSettings,
        offstage.offload_activations: ActivationSettings,
    }
    for function, settings in takers.items():
        (last,) = [one for one in inspect.signature(function).parameters.values() if one.kind is one.VAR_KEYWORD]
        assert last.annotation == f"Unpack[{settings.__name__}]"
    assert typing.get_type_hints(offstage.offload)["overrides"] == typing.Unpack[OffloadSettings]
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tests/support/typed_calls.py" in checked["files"]
    assert {"module": ["tests.support.typed_calls"], "warn_unused_ignores": True} in checked["overrides"]
