# SPDX-License-Identifier: Apache-2.0
"""`offstage.optim`: classes for engines that make the optimizer themselves."""

import dataclasses
import importlib
import inspect
import pydoc

import pytest
import torch

import offstage
from offstage import optim
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from tests.support.contract import SMALL, adamw, assert_same_weights, make_model, train

CLASSES = [getattr(optim, name) for name in optim.__all__]
SETTINGS = {field.name for field in dataclasses.fields(offstage.OffloadConfig)}
of_each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def params_of(cls, model):
    """Muon takes matrices only."""
    return [param for param in model.parameters() if cls is not optim.Muon or param.ndim == 2]


def test_every_class_that_can_be_offloaded_is_there():
    refused = {"LBFGS", "SparseAdam", "Optimizer"}
    torchs = {name for name, found in vars(torch.optim).items() if inspect.isclass(found)}
    assert set(optim.__all__) == torchs - refused


@of_each_class
def test_the_bits_of_offload(cls):
    direct, made = make_model(), make_model()
    options = {"momentum": 0.9} if cls is optim.SGD else {}  # which keeps no state without
    plain = getattr(torch.optim, cls.__name__)(params_of(cls, direct), lr=0.01, **options)
    offloaded = offstage.offload(plain, direct, **SMALL)
    ready = cls(params_of(cls, made), 0.01, **options, **SMALL)
    assert isinstance(ready, offstage.OffloadedOptimizer)
    assert ready.plan.placements == offloaded.plan.placements
    train(direct, offloaded, 3)
    train(made, ready, 3)
    assert_same_weights(made, direct)
    assert ready.receipt().bytes_fetched == offloaded.receipt().bytes_fetched


@of_each_class
def test_options_and_settings_have_different_names(cls):
    options = set(inspect.signature(cls.torch_class).parameters)
    assert not options & (SETTINGS | {"model", "config"})
    assert set(inspect.signature(cls).parameters) == options | SETTINGS | {"model", "config"}
    assert "fraction: float | None = None" in pydoc.render_doc(cls)


def test_settings_come_as_config_files_have_them():
    """By the path of the class, with numbers and strings only."""
    module, _, name = "offstage.optim.AdamW".rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    model = make_model()
    optimizer = cls(model.parameters(), lr=1e-3, betas=[0.9, 0.95], fraction=0.5, min_bytes="1KiB")
    assert optimizer.config.fraction == 0.5
    assert tuple(optimizer.param_groups[0]["betas"]) == (0.9, 0.95)


def test_a_config_and_keywords():
    config = offstage.OffloadConfig(fraction=0.5, min_bytes=0)
    optimizer = optim.AdamW(make_model().parameters(), config=config, slots=2)
    assert (optimizer.config.fraction, optimizer.config.slots) == (0.5, 2)


@pytest.mark.parametrize(("name", "near"), [("fractoin", "'fraction'"), ("beta", "'betas'"), ("xyz", "options are")])
def test_an_unknown_name_is_refused(name, near):
    with pytest.raises(offstage.ConfigError, match=f"AdamW has no option or setting '{name}'.*{near}"):
        optim.AdamW(make_model().parameters(), **{name: 0.5})


def test_groups_with_options_of_their_own():
    model = make_model()
    first, second = model[0], model[2]
    optimizer = optim.SGD(
        [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters()}], 0.2, 0.9, **SMALL
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9]


# A model that comes later


class Net(torch.nn.Module):
    """As `make_model()`, with names."""

    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def forward(self, x):
        return self.layers(x)


OVERLAPS = {
    "in forward": {"overlap_forward": True},
    "window": {"window": "all"},
    "in backward": {"overlap_forward": True, "update_in_backward": True},
    "in step": {},
}


@pytest.mark.parametrize("mode", OVERLAPS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_model_that_is_attached(mode, seed):
    expected_model, model = Net(), Net()
    lanes = (lambda device: LazyLanes(device, seed=seed)) if seed is not None else None
    with use_lanes(lanes):
        expected = offstage.offload(adamw(expected_model.parameters()), expected_model, **SMALL, **OVERLAPS[mode])
        optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **SMALL, **OVERLAPS[mode])
    optimizer.attach(model)
    optimizer.attach(model)  # which changes nothing
    assert optimizer.plan == expected.plan  # with the names of the model
    for one in ((model, optimizer), (expected_model, expected)):
        train(*one, 5)
        one[1].synchronize()
    assert_same_weights(model, expected_model)
    assert optimizer.receipt().bytes_fetched == expected.receipt().bytes_fetched
    assert bool(hooks_of(model)) == bool(OVERLAPS[mode])


def hooks_of(model):
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


def test_updates_in_backward_need_no_model_and_get_its_names():
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, **SMALL, update_in_backward=True)
    train(model, optimizer, 3)
    optimizer.attach(model)
    train(model, optimizer, range(3, 6))
    expected_model = Net()
    train(expected_model, optim.AdamW(expected_model.parameters(), lr=0.01, **SMALL), 6)
    assert_same_weights(model, expected_model)
    assert optimizer.plan.sizes[0].name == "layers.0.weight"


@pytest.mark.parametrize("mode", ["in forward", "window"])
def test_a_step_without_the_model_that_is_needed(mode):
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, **SMALL, **OVERLAPS[mode])
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(offstage.ConfigError, match=r"optimizer\.attach\(model\)"):
        train(model, optimizer, 1)
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(offstage.ConfigError, match="attach"):
        optimizer.prefetch()
    with pytest.raises(offstage.ConfigError, match="found no model"):  # offload() has it or never gets it
        offstage.offload(adamw(Net().parameters()), **SMALL, **OVERLAPS[mode])


def test_a_model_that_cannot_be_attached():
    model, other = Net(), Net()
    optimizer = optim.AdamW(model.parameters(), model=model, **SMALL)
    with pytest.raises(offstage.ConfigError, match="made for a Net"):
        optimizer.attach(torch.nn.Sequential(model))
    free = optim.AdamW(model.parameters(), **SMALL)
    with pytest.raises(offstage.ConfigError, match="None of the optimizer's parameters"):
        free.attach(other)
    with pytest.raises(offstage.ConfigError, match=r"expects a torch\.nn\.Module"):
        free.attach("model")
    with pytest.raises(offstage.ConfigError, match="needs the model"):
        optim.AdamW(model.parameters(), weights="host", **SMALL)
