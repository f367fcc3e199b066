# SPDX-License-Identifier: Apache-2.0
"""What a probe sees in an optimizer class, and what it does not touch."""

import copy
import random
import time

import numpy as np
import pytest
import pytorch_optimizer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offstage
from offstage.rules.probe import probe
from offstage.rules.subject import Subject
from tests.support import made_up
from tests.support.contract import SMALL, assert_same_tree
from tests.support.training import same_bits

CPU = torch.device("cpu")


def probed(optimizer, dtype=torch.float32):
    return probe(Subject(optimizer), optimizer.param_groups[0], dtype, CPU)


def params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = [(40, 30), (64,), (), (3, 2, 2, 2), (1,)]
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    return [*made, nn.Parameter(torch.randn(20, 10, generator=generator).to(dtype).t())]


def trained(make, config, steps=5):
    """`steps` steps over parameters in two groups, some of which pause."""
    made = params()
    optimizer = make([{"params": made[:3]}, {"params": made[3:], "lr": 0.02}])
    if config is not None:
        optimizer = offstage.offload(optimizer, **config)
    generator = torch.Generator().manual_seed(4)
    for step in range(steps):
        for number, param in enumerate(made):
            grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
            param.grad = None if (number + step) % 4 == 0 else grad
        optimizer.step()
    return made, optimizer


def assert_same_as_plain(make, config=SMALL, steps=5):
    (ours, optimizer), (theirs, plain) = trained(make, config, steps), trained(make, None, steps)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))
    assert_same_tree(optimizer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("make", made_up.ELEMENTWISE, ids=lambda make: make.__name__)
def test_awkward_elementwise_classes_are_exact(make):
    assert_same_as_plain(make)


@pytest.mark.parametrize("name", made_up.COUPLED)
def test_coupled_elements_are_refused(name):
    kind = made_up.COUPLED[name]
    optimizer = kind(params())
    before = dict(vars(kind))
    with pytest.raises(offstage.ConfigError, match=r"Coupled cannot be offloaded: .*its st.*\. Use it without"):
        probed(optimizer)
    assert dict(vars(kind)) == before


@pytest.mark.parametrize(("make", "saw"), made_up.REFUSED.items(), ids=lambda one: getattr(one, "__name__", None))
def test_refusals_say_what_was_seen(make, saw):
    with pytest.raises(offstage.ConfigError, match=saw) as caught:
        offstage.offload(make(params()), **SMALL)
    assert str(caught.value).startswith(f"{make.__name__} cannot be offloaded: ")


FROM_A_PACKAGE = {
    "lamb": "looks at the whole parameter: the weight of element",
    "adamp": "looks at the whole parameter: the weight of element",
    "mars": "looks at the whole parameter: the weight of element",
    "novograd": "looks at the whole parameter",
    "kron": "'Q' is a list",
    "adafactor": r"'exp_avg_sq_row' has shape \(16,\) for a parameter of shape \(16, 16\)",
    "came": r"'exp_avg_sq_row' has shape \(16,\)",
    "sara": "'mask' is kept as torch.bool",
    "prodigy": "of the group from weights, gradients or state",
    "schedulefreeadamw": r"its train\(\) and eval\(\) change the weights",
    "adabound": "failed beside others, in two groups",
    "gravity": "draws random numbers",
    "alig": "AliG requires closure",
    "spam": r"a state_dict\(\) of its own",
}


@pytest.mark.parametrize(("name", "saw"), FROM_A_PACKAGE.items(), ids=FROM_A_PACKAGE)
def test_refusals_of_a_package(name, saw):
    with pytest.raises(offstage.ConfigError, match=f"cannot be offloaded: .*{saw}"):
        offstage.offload(pytorch_optimizer.load_optimizer(name)(params()), **SMALL)


def test_a_clipping_adan_is_refused_though_one_without_is_not():
    probed(pytorch_optimizer.Adan(params(), max_grad_norm=0.0))
    with pytest.raises(offstage.ConfigError, match="Adan cannot be offloaded"):
        probed(pytorch_optimizer.Adan(params(), max_grad_norm=1.0))


def _whole_package():
    for name in pytorch_optimizer.get_supported_optimizers():
        kind = pytorch_optimizer.load_optimizer(name)
        try:
            optimizer = kind([{"params": params()[:3]}, {"params": params()[3:]}])
        except Exception:  # it wants a model, another package or more arguments
            continue
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):  # those have a rule of their own
            yield name


def test_every_class_of_a_package_is_refused_or_exact():
    exact = []
    for name in _whole_package():
        try:
            assert_same_as_plain(pytorch_optimizer.load_optimizer(name))
            exact.append(name)
        except (offstage.ConfigError, offstage.OffloadIneffectiveError):
            pass
    assert len(exact) >= 40
    assert {"lion", "adabelief", "adopt", "madgrad", "laprop", "nadam", "qhadam"} <= set(exact)


@pytest.mark.parametrize("make", [made_up.LossScaled, made_up.Scaled, pytorch_optimizer.EmoNavi])
def test_a_closure_is_refused_where_it_would_change_the_step(make):
    made = params()
    optimizer = offstage.offload(make(made), **SMALL)
    called = []
    with pytest.raises(offstage.ConfigError, match=f"step\\(closure\\) of {make.__name__} looks at the loss"):
        optimizer.step(lambda: called.append(1))
    assert not called
    for param in made:
        param.grad = torch.ones_like(param)
    optimizer.step()
    offstage.offload(made_up.IntStep(params()), **SMALL).step(lambda: called.append(1))
    assert called


# Properties

TERMS = {
    "nothing": lambda p, grad: grad,
    "its sign": lambda p, grad: grad.sign(),
    "its square": lambda p, grad: grad * grad.abs(),
    "its weight": lambda p, grad: grad + 0.1 * p,
    "norm": made_up.CHANGES["norm"],
    "mean": made_up.CHANGES["mean"],
    "neighbour": made_up.CHANGES["neighbour"],
    "sort": made_up.CHANGES["sort"],
    "random": made_up.CHANGES["random"],
    "size": made_up.CHANGES["number of elements"],
}
ALONE = list(TERMS)[:4]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    terms=st.lists(st.sampled_from(list(TERMS)), min_size=1, max_size=3),
    beta=st.sampled_from([0.0, 0.5, 0.99]),
    lr=st.sampled_from([0.0, 1e-6, 0.1]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    count_in=st.sampled_from([None, "group", "self"]),
    every=st.sampled_from([1, 2, 5]),
)
def test_combinations_are_refused_or_exact(terms, beta, lr, weight_decay, count_in, every):
    """A class made of terms, each every so many steps, counted in its group or on itself."""

    class Combined(made_up.Base):
        def begin_group(self, group):
            if count_in == "group":
                group["count"] = group.get("count", 0) + 1
            elif count_in == "self":
                self.count = getattr(self, "count", 0) + 1

        def update(self, p, grad, state, group):
            state["step"] = state.get("step", 0) + 1
            for term in sorted(terms, key=lambda term: term not in ALONE):  # a sign has no norm any more
                if state["step"] % every == 0:
                    one = TERMS[term]
                    grad = one(p, grad) if term in ALONE else one(p, grad, state, group)
            super().update(p, grad / group.get("count", 1), state, group)

    def make(groups):
        return Combined(groups, lr=lr, beta=beta, weight_decay=weight_decay)

    if set(terms) <= set(ALONE) and count_in != "self":
        assert_same_as_plain(make, steps=3)
    else:
        with pytest.raises(offstage.ConfigError, match="Combined cannot be offloaded"):
            probed(make(params()))


# What it does not touch


@pytest.mark.parametrize("name", ["lion", "madgrad", "lamb", "gravity", "prodigy"])
def test_the_users_optimizer_and_randomness_are_untouched(name):
    made = params()
    optimizer = pytorch_optimizer.load_optimizer(name)(made)
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append(1))
    for param in made:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy((vars(optimizer)["defaults"], optimizer.state_dict(), [p.detach() for p in made]))
    attributes = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    drawn = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    try:
        probed(optimizer)
    except offstage.ConfigError:
        assert name != "lion"
    assert same_bits(torch.rand(3), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]
    assert_same_tree((vars(optimizer)["defaults"], optimizer.state_dict(), [p.detach() for p in made]), before)
    now = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    assert now.keys() == attributes.keys()
    assert all(now[key] is attributes[key] for key in now)
    assert len(fired) == 1
    assert all(param.grad is not None for param in made)


def test_a_probe_takes_milliseconds():
    optimizer = pytorch_optimizer.Lion(params())
    best = min(_seconds(optimizer) for _ in range(5))
    assert best < 0.25  # about 0.01 on an idle machine


def _seconds(optimizer):
    start = time.perf_counter()
    probed(optimizer)
    return time.perf_counter() - start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_formats(dtype):
    found = probed(pytorch_optimizer.LaProp(params(), ams_bound=True), dtype)
    assert {(key.name, key.dtype) for key in found.elements} == {
        ("exp_avg", dtype),
        ("exp_avg_sq", dtype),
        ("max_exp_avg_sq", dtype),
    }


def test_a_behaviour_is_a_value():
    found = probed(made_up.IntTensor(params()))
    assert [key.name for key in found.elements] == ["average"]
    assert {name: scalar.kind for name, scalar in found.scalars} == {
        "step": int,
        "product": float,
        "odd": bool,
        "seen": torch.int64,
        "rate": torch.float32,
    }
    assert dict(found.scalars)["rate"].shape == (1,)
    assert found.first == {"average", "step", "product", "odd", "seen", "rate"}
    assert not found.counters
    assert found == probed(made_up.IntTensor(params()))
    assert probed(made_up.GroupCount(params())).counters == {"k", "total"}
    assert probed(made_up.SharedCount(params())).shared == {"count"}
    assert probed(made_up.InPlaceGradient(params())).writes_grad
    assert "slow" not in probed(made_up.LaterState(params())).first


def test_attributes_of_parameters_are_not_overlooked():
    class Favoured(made_up.Base):
        def update(self, p, grad, state, group):
            super().update(p, grad * getattr(p, "factor", 1.0), state, group)

    assert_same_as_plain(Favoured)
    made = params()
    made[1].factor = 2.0
    with pytest.raises(offstage.ConfigError, match="looks at the attribute 'factor' of parameters"):
        offstage.offload(Favoured(made), **SMALL)
