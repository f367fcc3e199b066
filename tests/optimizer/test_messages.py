# SPDX-License-Identifier: Apache-2.0
"""Bad input gets one clear exception before anything moved: it names what was found, what was expected, what to do."""

import contextlib
import copy
import functools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import offstage
from offstage.config import format_size, parse_size
from offstage.errors import HostMemoryError, StepLostError
from offstage.memory import arena as host_memory
from offstage.memory.guarded import unguarded
from tests.support.contract import (
    SMALL,
    adamw,
    assert_same,
    assert_same_tree,
    loss_of,
    make_model,
    offloaded_model,
    one_process_group,
    snapshot,
    train,
    trained,
    unchanged,
)
from tests.support.lives import end_step

ConfigError = offstage.ConfigError


@contextlib.contextmanager
def one_error(kind, *fragments):
    """Exactly one exception of exactly this type, whose message holds every fragment."""
    with pytest.raises(kind) as info:
        yield
    error = info.value
    assert type(error) is kind
    assert error.__cause__ is None
    assert error.__context__ is None
    message = str(error)
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert message.endswith((".", "?")), message


@contextlib.contextmanager
def refused(inner, kind, *fragments):
    """offload() raises, and the optimizer given is afterwards what it was: it has its state and its step."""
    state, weights = snapshot(inner), [param.detach().clone() for g in inner.param_groups for param in g["params"]]
    groups = [(id(group), list(group)) for group in inner.param_groups]
    attributes = set(vars(inner))
    with one_error(kind, *fragments):
        yield
    assert_same_tree(inner.state_dict(), state)
    assert [(id(group), list(group)) for group in inner.param_groups] == groups
    assert set(vars(inner)) == attributes
    for param, before in zip((p for g in inner.param_groups for p in g["params"]), weights, strict=True):
        assert torch.equal(param, before)


def used_adamw(model, **options):
    """An optimizer that has something to lose."""
    inner = adamw(model.parameters(), **options)
    train(model, inner, 2)
    return inner


# Settings

BAD_SETTINGS = {
    "unknown field": ({"fractoin": 0.5}, ["'fractoin'", "did you mean 'fraction'?"]),
    "unknown field, near another": ({"chunk_size": 1}, ["'chunk_size'", "'chunk_bytes'"]),
    "unknown field, near none": ({"zzz": 1}, ["'zzz'", "fraction", "device_budget", "slots"]),
    "fraction too large": ({"fraction": 1.5}, ["fraction", "1.5", "from 0.0 to 1.0", "Use 1.0"]),
    "fraction negative": ({"fraction": -0.1}, ["-0.1", "from 0.0 to 1.0", "Use 1.0"]),
    "fraction not a number": ({"fraction": "half"}, ["'half'", "from 0.0 to 1.0", "Use 1.0"]),
    "fraction nan": ({"fraction": float("nan")}, ["nan", "from 0.0 to 1.0", "Use 1.0"]),
    "fraction off with a budget": (
        {"fraction": 0.0, "device_budget": "1MiB"},
        ["fraction=0.0", "contradicts", "device_budget=1MiB", "Give one of the two"],
    ),
    "fraction against the budget": (
        # 49 KiB of state: nine tenths stay, next to three slots of 16 KiB
        {**SMALL, "fraction": 0.1, "device_budget": "64KiB"},
        ["fraction=0.1", "contradicts device_budget=64.0 KiB", "3 slots of 16.0 KiB", "Raise device_budget to", "KiB"],
    ),
    "no room for one slot": (
        {**SMALL, "device_budget": "1KiB", "slots": 1},
        ["device_budget of 1.0 KiB", "1 slots of 16.0 KiB", "Raise it to 16.0 KiB", "chunk_bytes"],
    ),
    "host budget": (
        {**SMALL, "host_budget": "10KiB"},
        ["host_budget of 10.0 KiB", "of state", "Raise it to", "lower fraction"],
    ),
    "slots": ({"slots": 0}, ["slots", "0", "at least 1", "Leave it out"]),
    "chunk too small": ({"chunk_bytes": 100}, ["chunk_bytes", "100", "at least 16.0 KiB"]),
    "size": ({"chunk_bytes": "64 furlongs"}, ["chunk_bytes", "'64 furlongs'", "such as '8GiB'"]),
    "size negative": ({"min_bytes": -1}, ["min_bytes", "-1", "at least 0"]),
    "rule": ({"rule": "fast"}, ["rule", "'fast'", "'auto'", "'torch'"]),
    "master_weights": ({"master_weights": "bf16"}, ["master_weights", "'bf16'", "'split'"]),
    "state_dtype": ({"state_dtype": "int8"}, ["state_dtype", "'int8'", "'bfloat16'"]),
    "state_dtype of a key": ({"state_dtype": {"exp_avg": "int8"}}, ["state_dtype['exp_avg']", "'int8'", "'bfloat16'"]),
    "split with rule torch": (
        {"rule": "torch", "master_weights": "split"},
        ["master_weights='split'", "contradicts rule='torch'", "Use master_weights='fp32'"],
    ),
    "state_dtype with rule torch": (
        {"rule": "torch", "state_dtype": "bfloat16"},
        ["state_dtype", "contradicts rule='torch'", "Remove state_dtype"],
    ),
    "window not a size": ({"window": "some"}, ["window", "'some'", "such as '8GiB'", "'auto'", "'all'"]),
    "window negative": ({"window": -1}, ["window", "-1", "at least 0"]),
    "window not a number": ({"window": True}, ["window", "True", "such as '8GiB'"]),
    "window None": ({"window": None}, ["window", "None", "such as '8GiB'"]),
    "window smaller than a slot": (
        {**SMALL, "window": "10KiB"},
        ["window=10.0 KiB", "one slot of 16.0 KiB", "Use at least that", "window=0"],
    ),
    "window auto without a peak": (
        {"window": "auto"},
        ["window='auto'", "expected both", "found no device_peak", "Give device_peak='40GiB'", "leave window out"],
    ),
    "a peak without window auto": (
        {"window": "1GiB", "device_peak": "2GiB"},
        [
            "device_peak=2.0 GiB",
            "what training takes besides state",
            "expected window='auto'",
            "Use offstage.fit(model, optimizer, device_peak='2GiB')",
        ],
    ),
    "window all with a budget": (
        {"window": "all", "device_budget": "1GiB"},
        ["window='all'", "contradicts device_budget=1GiB", "Leave one of the two out"],
    ),
    "window auto with a budget": (
        {"window": "auto", "device_peak": "2GiB", "device_budget": "1GiB"},
        ["window='auto'", "contradicts device_budget=1GiB", "Leave one of the two out"],
    ),
    "no room for slots and window": (
        {**SMALL, "device_budget": "48KiB", "window": "32KiB"},
        ["device_budget of 48.0 KiB", "3 slots of 16.0 KiB", "a window of 32.0 KiB", "Raise it to 80.0 KiB"],
    ),
    "update_on": ({"update_on": "cpu"}, ["update_on", "'cpu'", "'device'", "'host'", "'auto'", "Leave it out"]),
    "host_fraction too large": ({"host_fraction": 1.5}, ["host_fraction", "1.5", "from 0.0 to 1.0", "Leave it out"]),
    "host_fraction negative": ({"host_fraction": -0.1}, ["-0.1", "a share of the offloaded bytes", "Leave it out"]),
    "host_fraction not a number": ({"host_fraction": "half"}, ["'half'", "from 0.0 to 1.0", "update_on='auto'"]),
    "host_fraction nan": ({"host_fraction": float("nan")}, ["host_fraction", "nan", "from 0.0 to 1.0"]),
    "host_fraction a bool": ({"host_fraction": True}, ["host_fraction", "True", "from 0.0 to 1.0"]),
    "host_fraction beside update_on": (
        {"update_on": "host", "host_fraction": 0.5},
        ["update_on='host'", "contradicts host_fraction=0.5", "Give one of the two", "implies update_on='auto'"],
    ),
    "off with update_on": (
        {"fraction": 0.0, "update_on": "host"},
        ["fraction=0.0", "contradicts update_on and host_fraction", "Leave them out, or raise fraction"],
    ),
    "off with host_fraction": (
        {"fraction": 0.0, "host_fraction": 0.5},
        ["fraction=0.0", "contradicts update_on and host_fraction", "Leave them out, or raise fraction"],
    ),
    "threads none": ({"threads": 0}, ["threads", "at least 1", "found 0", "Leave it out"]),
    "threads negative": ({"threads": -2}, ["threads", "at least 1", "found -2"]),
    "threads not whole": ({"threads": 1.5}, ["threads", "whole number", "found 1.5"]),
    "threads a bool": ({"threads": True}, ["threads", "whole number", "found True"]),
    "threads a string": ({"threads": "all"}, ["threads", "whole number", "found 'all'", "affinity"]),
    "host budget with staging buffers": (
        # 49 KiB of state alone would fit
        {**SMALL, "update_on": "host", "host_budget": "60KiB"},
        ["host_budget of 60.0 KiB", "Raise it to", "lower fraction"],
    ),
    "resident state against the budget, without slots": (
        # What stays is more than the budget; nothing else is on the device
        {"min_bytes": "1KiB", "chunk_bytes": "16KiB", "update_on": "host", "device_budget": 100},
        ["device_budget of 100 B", "that stays resident", "Raise it to 896 B", "lower min_bytes"],
    ),
    "overlap_forward": ({"overlap_forward": 1}, ["overlap_forward", "True or False", "found 1"]),
    "update_in_backward": ({"update_in_backward": "yes"}, ["update_in_backward", "True or False", "found 'yes'"]),
    "off with a window": ({"fraction": 0.0, "window": "all"}, ["fraction=0.0", "contradicts window", "raise fraction"]),
    "off with overlap_forward": (
        {"fraction": 0.0, "overlap_forward": True},
        ["fraction=0.0", "contradicts", "overlap_forward", "Leave them out"],
    ),
    "off with update_in_backward": (
        {"fraction": 0.0, "update_in_backward": True},
        ["fraction=0.0", "contradicts", "update_in_backward", "Leave them out"],
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings(case):
    settings, fragments = BAD_SETTINGS[case]
    kind = HostMemoryError if "host_budget" in settings else ConfigError
    model = make_model()
    inner = used_adamw(model)
    with refused(inner, kind, *fragments):
        offstage.offload(inner, model, **settings)
    train(model, inner, 1)


def test_the_suggested_device_budget_is_enough():
    """Following the message's advice works: what it asks for is what it takes."""
    model = make_model()
    inner = used_adamw(model)
    with refused(inner, ConfigError, "Raise it to 48.0 KiB"):
        offstage.offload(inner, model, **SMALL, device_budget="47KiB")
    optimizer = offstage.offload(inner, model, **SMALL, device_budget="48KiB")
    train(model, optimizer, 1)
    assert optimizer.receipt().device_state_bytes <= 48 * 1024


def test_the_suggested_host_budget_is_enough():
    """Staging buffers are in it."""
    model = make_model()
    inner = used_adamw(model)
    with pytest.raises(HostMemoryError) as info:
        offstage.offload(inner, model, **SMALL, update_on="host", host_budget="60KiB")
    suggested = str(info.value).split("Raise it to ")[1].split(",")[0]
    optimizer = offstage.offload(inner, model, **SMALL, update_on="host", host_budget=suggested.replace(" ", ""))
    train(model, optimizer, 1)
    assert optimizer.receipt().host_state_bytes > 60 * 1024


def refused_offload(model, inner, config, fragments, advice=None, kind=ConfigError):
    """offload() refuses; then with the settings it advises, if any, training works."""
    with refused(inner, kind, *fragments):
        offstage.offload(inner, model, **config)
    if advice is not None:
        train(model, offstage.offload(inner, model, **advice), 2)


def test_config_of_another_kind():
    model = make_model()
    inner = used_adamw(model)
    with refused(inner, ConfigError, "OffloadConfig", "found dict", "keywords"):
        offstage.offload(inner, model, {"fraction": 0.5})


def test_overlap_forward_without_the_model():
    model = make_model()
    inner = used_adamw(model)
    fragments = ["overlap_forward=True needs the model", "found no model", "offload(optimizer, model,"]
    with refused(inner, ConfigError, *fragments):
        offstage.offload(inner, **SMALL, overlap_forward=True)
    train(model, offstage.offload(inner, model, **SMALL, overlap_forward=True), 2)  # the advice works


def test_update_in_backward_with_ddp():
    with one_process_group():
        model = nn.parallel.DistributedDataParallel(make_model())
        fragments = ["update_in_backward=True", "DistributedDataParallel", "Expected a model without it", "Use overlap"]
        advice = {**SMALL, "overlap_forward": True, "window": "all"}
        refused_offload(model, used_adamw(model), {**SMALL, "update_in_backward": True}, fragments, advice)


# The loop


def updated_in_backward(**config):
    """A loop in the middle of an iteration: backward has updated weights, step() has not been called."""
    model, optimizer = trained(3, **SMALL, update_in_backward=True, **config)
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    return model, optimizer


def clip_late(model, optimizer):
    optimizer.clip_grad_norm_(1.0)


def run_forward(model, optimizer):
    loss_of(model, 4)


def save_state(model, optimizer):
    optimizer.state_dict()


def save_weights(model, optimizer):
    model.state_dict()


def use_gradient(model, optimizer):
    model[2].weight.grad.sum()


def backward_again(model, optimizer):
    (model[2].weight * 2).sum().backward()


IN_BETWEEN = [
    (clip_late, ["clip_grad_norm_()", "for the first time after", "Expected it in every iteration from the first on"]),
    (run_forward, ["'0'", "between backward and step()", "Expected step() first", "optimizer.accumulate()"]),
    (save_state, ["between backward and step()", "expected step() first", "Read them after step()"]),
    (save_weights, ["between backward and step()", "expected step() first", "Read them after step()"]),
    (use_gradient, ["'2.weight'", "dropped", "optimizer.clip_grad_norm_(max_norm)", "update_in_backward=False"]),
    (backward_again, ["'2.weight'", "dropped", "under optimizer.accumulate()", "one backward per step"]),
]


@pytest.mark.parametrize(("action", "fragments"), IN_BETWEEN, ids=[case[0].__name__ for case in IN_BETWEEN])
def test_between_backward_and_step(action, fragments):
    """What cannot be had then is refused, and the step is made as if nothing had been asked."""
    model, optimizer = updated_in_backward()
    with one_error(offstage.OffstageError, *fragments):
        action(model, optimizer)
    optimizer.step()
    assert_same(*trained(4), model, optimizer)


def test_a_hyperparameter_that_changes_after_its_use():
    _, optimizer = updated_in_backward()
    optimizer.param_groups[0]["lr"] = 0.5
    fragments = [
        "hyperparameter changed between backward and step()",
        "expected the same",
        "Call schedulers after step()",
    ]
    with one_error(StepLostError, *fragments, "load_state_dict"):
        optimizer.step()


def test_a_weight_read_without_its_module():
    model, optimizer = trained(2, **SMALL, overlap_forward=True)
    optimizer.zero_grad()
    fragments = ["'2.weight'", "module '2'", "Expected such a read after optimizer.synchronize()", "Call that before"]
    with unguarded():  # as an extension would read it, which asks nothing
        loss = (model[2].weight * 2).sum()
    with one_error(offstage.OffstageError, *fragments):
        loss.backward()


def test_prefetch_without_a_window():
    model, optimizer = offloaded_model(**SMALL, overlap_forward=True)
    with unchanged(model, optimizer), one_error(ConfigError, "window", "found window=0", "Use window='all'"):
        optimizer.prefetch()


# Host memory


@pytest.mark.parametrize(
    ("reader", "found", "fragment"),
    [("mem_available", 1024, "MemAvailable 1.0 KiB"), ("cgroup_limits", [(("", "/"), 1024)], "cgroup")],
)
def test_host_memory_that_does_not_suffice(monkeypatch, reader, found, fragment):
    monkeypatch.setattr(host_memory, reader, lambda: found)
    model = make_model()
    inner = used_adamw(model)
    fragments = ["The state needs 49.", "KiB of host memory", fragment, "1.0 KiB", "Lower fraction"]
    with refused(inner, HostMemoryError, *fragments):
        offstage.offload(inner, model, **SMALL)
    offstage.offload(inner, model, fraction=0.0)  # needs none


def test_cgroup_limits_are_read(tmp_path):
    """The tightest limit on the way to the root counts; pages that are only cached files are not in use."""
    leaf = tmp_path / "outer" / "inner"
    leaf.mkdir(parents=True)
    for folder, limit, used, cached in [(leaf, "max", 5, 0), (leaf.parent, 1000, 600, 100), (tmp_path, 5000, 600, 0)]:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    assert host_memory.cgroup_available(tmp_path, membership) == 500
    membership.write_text("0::/\n")
    assert host_memory.cgroup_available(tmp_path, membership) == 4400
    assert host_memory.cgroup_available(tmp_path, tmp_path / "absent") is None


# Parameters


def sgd(params, **options):
    return torch.optim.SGD(params, lr=0.1, **options)


SPLIT, FP32 = {**SMALL, "master_weights": "split"}, {**SMALL, "master_weights": "fp32"}
BFLOAT16_STATE = {**SMALL, "state_dtype": "bfloat16"}
MOMENTUM = functools.partial(sgd, momentum=0.9)
UNFIT = {
    "fp64 with the own rule": (
        torch.float64,
        adamw,
        SMALL,
        ["torch.float64", "float32", "bfloat16", "Use rule='torch'"],
        {**SMALL, "rule": "torch"},
    ),
    "split masters of fp16": (
        torch.float16,
        adamw,
        SPLIT,
        ["'split'", "bfloat16", "torch.float16", "Use master_weights='fp32'"],
        FP32,
    ),
    "split masters with SGD": (
        torch.bfloat16,
        MOMENTUM,
        SPLIT,
        ["'split'", "Adam and AdamW", "SGD", "Use master_weights='fp32'"],
        FP32,
    ),
    "state_dtype with SGD": (
        torch.float32,
        MOMENTUM,
        BFLOAT16_STATE,
        ["state_dtype", "SGD", "Remove state_dtype"],
        SMALL,
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_formats_that_do_not_fit(case):
    dtype, make, config, fragments, advice = UNFIT[case]
    model = make_model(dtype)
    refused_offload(model, make(model.parameters()), config, fragments, advice)


def test_complex_parameter():
    model = nn.ParameterDict({"phase": nn.Parameter(torch.ones(4, dtype=torch.complex64))})
    fragments = ["'phase'", "complex", "torch.complex64", "real", "view_as_real"]
    refused_offload(model, adamw(model.parameters()), SMALL, fragments)


def test_sparse_parameter_gradient():
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "table": nn.Embedding(16, 8, sparse=True)})
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL)
    for module in model.parameters():
        module.grad = torch.ones_like(module)
    end_step(optimizer)
    model["first"](model["table"](torch.tensor([2, 5]))).sum().backward()
    fragments = ["'table.weight'", "sparse gradient", "expected a dense one", "nn.Embedding(sparse=False)"]
    with unchanged(model, optimizer), one_error(ConfigError, *fragments):
        optimizer.step()
    assert optimizer.receipt().steps == 1


def test_parameter_given_twice():
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, which announces an error
        inner = adamw([*model.parameters(), model[0].weight])
        with refused(inner, ConfigError, "'0.weight'", "twice", "once", "Remove it"):
            offstage.offload(inner, model, **SMALL)


@pytest.mark.parametrize("part", [False, True], ids=["the whole model", "a part of it"])
def test_fsdp2_cpu_offload(part):
    """Also when only a submodule was sharded so, and when another one was sharded without it."""
    with one_process_group():
        model = make_model()
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(model[2] if part else model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        inner = adamw(model.parameters())
        fragments = ["CPUOffloadPolicy", "host already", "expected parameters that stay on the device", "Remove"]
        with one_error(ConfigError, *fragments):
            offstage.offload(inner, model, **SMALL)
        assert "_offstage_consumed" not in vars(inner)
        if not part:  # torch's foreach does not take DTensors beside others
            train(model, inner, 1)


# Optimizers


def test_already_offloaded():
    model = make_model()
    inner = used_adamw(model)
    optimizer = offstage.offload(inner, model, **SMALL)
    for again in (inner, optimizer):
        fragments = [type(again).__name__, "already offloaded", "expected one that is not", "first offload() returned"]
        with unchanged(model, optimizer), one_error(ConfigError, *fragments):
            offstage.offload(again, model, **SMALL)
    train(model, optimizer, 1)


def test_step_of_the_consumed_optimizer():
    model = make_model()
    inner = used_adamw(model)
    optimizer = offstage.offload(inner, model, **SMALL)
    loss_of(model, 0).backward()
    with unchanged(model, optimizer), one_error(offstage.OffstageError, "offstage.offload()", "optimizer = offstage"):
        inner.step()
    with unchanged(model, optimizer), one_error(offstage.OffstageError, "Call step() on the optimizer"):
        inner.step(lambda: 1)


def test_step_after_close():
    model, optimizer = trained(1)
    optimizer.close()
    loss_of(model, 1).backward()
    with unchanged(model, optimizer), pytest.raises(offstage.OffstageError, match="closed") as info:
        optimizer.step()
    assert not isinstance(info.value, StepLostError)  # no weight was updated


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        return None


class OwnAdamW(torch.optim.AdamW):
    """Not the arithmetic that offstage knows."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            param.grad.div_(param.grad.norm() + 1)
        return super().step(closure)


class Paged(torch.optim.AdamW):
    is_paged = True


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (torch.optim.LBFGS, ["LBFGS", "closure several times", "another optimizer"]),
        (torch.optim.SparseAdam, ["SparseAdam", "sparse gradients", "another optimizer"]),
        (OwnOptimizer, ["OwnOptimizer", "changed no weight", "Use it without offstage"]),
        (OwnAdamW, ["OwnAdamW", "looks at the whole parameter", "changed when", "Use it without offstage"]),
        (Paged, ["Paged", "pages its own state between device and host already", "must not be offloaded twice"]),
        (
            lambda params: torch.optim.AdamW(params, differentiable=True),
            ["Parameter group 0", "differentiable=True", "Use differentiable=False"],
        ),
    ],
    ids=["LBFGS", "SparseAdam", "own Optimizer", "own AdamW", "paged", "differentiable"],
)
def test_unsupported_optimizers(make, fragments):
    model = make_model()
    refused_offload(model, make(model.parameters()), SMALL, fragments)


@pytest.mark.parametrize("thing", ["AdamW", None, make_model()], ids=["str", "None", "module"])
def test_not_an_optimizer(thing):
    with one_error(ConfigError, "torch.optim.Optimizer", f"found {type(thing).__name__}", "offstage.offload(optimizer"):
        offstage.offload(thing)


def test_model_that_is_none():
    model = make_model()
    inner = used_adamw(model)
    with refused(inner, ConfigError, "torch.nn.Module", "found list", "pass the model"):
        offstage.offload(inner, list(model.parameters()), **SMALL)
    with refused(inner, ConfigError, "None of the optimizer's parameters", "expected the model they came from", "last"):
        offstage.offload(inner, make_model(), **SMALL)


# Nothing to do


@pytest.mark.parametrize(
    ("make", "config", "fragments", "advice"),
    [
        (sgd, SMALL, ["keeps no state", "SGD without momentum", "with momentum"], None),
        (adamw, {}, ["24.0 KiB of state", "min_bytes=64.0 KiB", "Lower min_bytes"], {"min_bytes": "24KiB"}),
    ],
    ids=["SGD without momentum", "all parameters are small"],
)
def test_nothing_to_offload(make, config, fragments, advice):
    model = make_model()
    inner = make(model.parameters())
    train(model, inner, 2)
    fragments = ["Nothing would be offloaded", *fragments]
    refused_offload(model, inner, config, fragments, advice, kind=offstage.OffloadIneffectiveError)


# Models changed after offload()


def convert(model):
    model[2].to(torch.bfloat16)


def reshape(model):
    model[2].weight.data = model[2].weight.data[:40].clone()


@pytest.mark.parametrize(
    ("change", "before", "now"),
    [
        (convert, "torch.float32 (48, 64) on cpu", "torch.bfloat16 (48, 64) on cpu"),
        (reshape, "torch.float32 (48, 64) on cpu", "torch.float32 (40, 64) on cpu"),
    ],
)
def test_model_changed_after_offload(change, before, now):
    model, optimizer = trained(2)
    optimizer.zero_grad()
    change(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    weights = copy.deepcopy(model.state_dict())
    with one_error(ConfigError, "'2.weight'", before, now, "model.to(...)", "then build the optimizer"):
        optimizer.step()
    assert_same_tree(dict(model.state_dict()), dict(weights))
    assert optimizer.receipt().steps == 2
    assert optimizer.state[model[0].weight]["step"] == 2


# Checkpoints that do not fit


def wrong_shape(saved):
    saved["state"][2]["exp_avg"] = torch.zeros(7, 5)


def wrong_order(saved):
    saved["state"][0], saved["state"][2] = saved["state"][2], saved["state"][0]


def not_a_tensor(saved):
    saved["state"][2]["exp_avg"] = 0.5


def no_data(saved):
    saved["state"][2]["exp_avg"] = torch.empty(48, 64, device="meta")


def missing_key(saved):
    del saved["state"][2]["exp_avg_sq"]


def foreign_key(saved):
    saved["state"][2]["momentum_buffer"] = torch.zeros(48, 64)


def smaller_group(saved):
    saved["param_groups"][0]["params"] = [0, 1, 2]


def more_groups(saved):
    saved["param_groups"] = [{**saved["param_groups"][0], "params": [i]} for i in range(4)]


def no_state(saved):
    del saved["state"]


BAD_CHECKPOINTS = [
    (wrong_shape, ["'exp_avg'", "'2.weight'", "expected shape (48, 64)", "found (7, 5)", "Load a checkpoint"]),
    (wrong_order, ["'exp_avg'", "'0.weight'", "expected shape (64, 48)", "found (48, 64)", "order of the parameters"]),
    (not_a_tensor, ["'exp_avg'", "'2.weight'", "expected shape (48, 64)", "found float", "Load a checkpoint"]),
    (no_data, ["'exp_avg'", "'2.weight'", "meta"]),
    (missing_key, ["'2.weight'", "lacks ['exp_avg_sq']", "found ['exp_avg', 'step']", "same optimizer class"]),
    (foreign_key, ["'2.weight'", "keeps ['exp_avg', 'exp_avg_sq']", "'momentum_buffer'", "same optimizer class"]),
    (smaller_group, ["groups of [4] parameters", "[3]", "expected the same", "Load a checkpoint"]),
    (more_groups, ["groups of [4] parameters", "[1, 1, 1, 1]", "expected the same", "grouped as they were"]),
    (no_state, ["load_state_dict()", "'state' and 'param_groups'", "as state_dict() returns"]),
]


@pytest.mark.parametrize(("damage", "fragments"), BAD_CHECKPOINTS, ids=[case[0].__name__ for case in BAD_CHECKPOINTS])
def test_checkpoints(damage, fragments):
    model, optimizer = trained(2)
    saved = snapshot(optimizer)
    train(model, optimizer, range(2, 4))
    saved["param_groups"][0]["lr"] = 123.0
    damage(saved)
    with unchanged(model, optimizer), one_error(ConfigError, *fragments):
        optimizer.load_state_dict(saved)
    train(model, optimizer, range(4, 5))  # training goes on as if nothing had been asked
    assert_same(*trained(5), model, optimizer)


@pytest.mark.parametrize("damage", [wrong_shape, missing_key], ids=["shape", "missing key"])
def test_state_of_the_given_optimizer_that_does_not_fit(damage):
    """The same check when offload() takes over state: the optimizer given keeps it."""
    model = make_model()
    inner = used_adamw(model)
    damaged = {"state": {2: dict(inner.state[model[2].weight])}}
    damage(damaged)
    inner.state[model[2].weight] = damaged["state"][2]
    with refused(inner, ConfigError, "'2.weight'"):
        offstage.offload(inner, model, **SMALL)


@given(st.integers(0, 2**50))
def test_a_size_to_ask_for_is_enough(size):
    """The size that a message names is accepted."""
    asked = parse_size(format_size(size, up=True).replace(" ", ""), "size")
    assert size <= asked <= 1.1 * size
    assert format_size(1536) == format_size(1536, up=True) == "1.5 KiB"
