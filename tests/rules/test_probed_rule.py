# SPDX-License-Identifier: Apache-2.0
"""Classes that are not torch's: the same bits as the plain class, in every plan, mode and format."""

import copy

import lion_pytorch
import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import offstage
from offstage import checkpoint
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.optimizer.optimizer import runtime_of
from offstage.rules import probed_rule
from tests.support import made_up
from tests.support.contract import (
    SMALL,
    assert_same,
    assert_same_future,
    assert_same_optimizer,
    assert_same_tree,
    assert_same_weights,
    chunk_count,
    lazily_offloaded,
    loss_of,
    make_model,
    offloaded_model,
    one_process_group,
    resumed,
    saved_and_loaded,
    train,
    trained,
    trained_twins,
    twin,
)
from tests.support.params import make_params
from tests.support.torch_classes import MATRICES, OTHERS, assert_masters_equal
from tests.support.training import lazily, same_bits
from tests.support.training import train as train_long

CLASSES = {
    "lion_pytorch.Lion": (lion_pytorch.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "AdamW that calls super": (made_up.Scaled, {"weight_decay": 0.1, "amsgrad": True}),
    "AdamW that calls super, fused": (made_up.Scaled, {"fused": True}),
    "AdaBelief": (pytorch_optimizer.AdaBelief, {"weight_decay": 0.1}),
    "ADOPT": (pytorch_optimizer.ADOPT, {"lr": 1e-2}),
    "MADGRAD": (pytorch_optimizer.MADGRAD, {"weight_decay": 0.01}),
    "LaProp": (pytorch_optimizer.LaProp, {"centered": True, "steps_before_using_centered": 2}),
    "QHAdam": (pytorch_optimizer.QHAdam, {}),
    "int step": (made_up.IntStep, {}),
    "counts in its group": (made_up.GroupCount, {}),
}
"""What each keeps: nothing else, a tensor, a number in the group, one for all parameters, floats, (1,), an int."""
OFF = {"fraction": 0.0, "update_on": "device"}
each_class = pytest.mark.parametrize("name", CLASSES)


def maker(name):
    kind, options = CLASSES[name]
    return lambda params: kind(params, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each_class
def test_equals_the_plain_class(name, dtype):
    plain = run(name, dtype, None)
    settings = [{"fraction": 1.0}, {"fraction": 0.5}, {"fraction": 0.0}, {"slots": 1}, {"update_on": "host"}]
    for one in settings:
        assert_same_tree(run(name, dtype, one), plain)
    with lazily(1):
        assert_same_tree(run(name, dtype, {}), plain)


def run(name, dtype, config):
    """Weights and state dict after some steps over parameters that begin at different times, and pause."""
    kind, options = CLASSES[name]
    params = make_params(dtype, [*MATRICES, *OTHERS])
    params.append(nn.Parameter(torch.randn(40, 30).to(dtype).t()))  # not contiguous
    optimizer = kind([{"params": params[:3]}, {"params": params[3:], "lr": 0.02}], **options)
    if config is not None:
        optimizer = offstage.offload(optimizer, **SMALL, master_weights="none", **config)
    for step in range(7):
        for i, param in enumerate(params):
            param.grad = None if (i + step) % 4 == 0 else torch.randn_like(param)
        optimizer.step()
    return [param.detach() for param in params], optimizer.state_dict()


@each_class
def test_masters_equal_the_plain_class_on_fp32_copies(name):
    make = maker(name)
    torch.manual_seed(2)
    ours = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((67, 129), (1000,), (3, 5), ())]
    plain = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer, other = offstage.offload(make(ours), **SMALL), make(plain)
    for _ in range(6):
        for a, b in zip(ours, plain, strict=True):
            a.grad = torch.randn(a.shape).bfloat16()
            b.grad = a.grad.float()
        optimizer.step()
        other.step()
    assert_masters_equal(ours, optimizer, plain)
    with pytest.raises(offstage.ConfigError, match=r"master_weights='split'.*Use master_weights='fp32'"):
        offstage.offload(make([nn.Parameter(torch.zeros(4, 4).bfloat16())]), master_weights="split", **SMALL)


@each_class
def test_a_long_run_with_groups_clipping_and_a_scheduler(name):
    kind, options = CLASSES[name]
    arguments = {"make": kind, "options": options, "steps": 30}
    plain = train_long(None, **arguments)
    with lazily(3):
        ours = train_long({"chunk_bytes": "16KiB", "overlap_forward": True}, **arguments)
    ours[1].synchronize()
    assert_same(*ours, *plain)


@each_class
def test_replanning(name):
    plain_model, plain, model, optimizer = twin(maker(name), **SMALL)
    for start, changes in enumerate(({}, {"fraction": 0.5}, {"fraction": 1.0, "update_on": "host"}, OFF)):
        if changes:
            optimizer.replan(**changes)
        for one in ((plain_model, plain), (model, optimizer)):
            train(*one, range(3 * start, 3 * start + 3))
        assert_same(model, optimizer, plain_model, plain)


# Work outside step()


def train_clipped(model, optimizer, steps, max_norm):
    """Clips at `max_norm`; with ours, through the optimizer's own function."""
    for number in steps:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        if isinstance(optimizer, offstage.OffloadedOptimizer):
            optimizer.clip_grad_norm_(max_norm(number))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm(number))
        optimizer.step()


OVERLAP = {
    "forward": {"overlap_forward": True},
    "both": {"overlap_forward": True, "update_in_backward": True},
    "weights on the host": {"overlap_forward": True, "weights": "host"},
    "both, on the host": {"overlap_forward": True, "update_in_backward": True, "update_on": "host"},
}


@pytest.mark.parametrize("mode", OVERLAP)
@each_class
def test_overlap(name, mode):
    plain_model = make_model()
    plain = maker(name)(plain_model.parameters())
    train(plain_model, plain, 8)
    for seed in (None, 1):
        if seed is None:
            model, optimizer = offloaded_model(maker(name), **SMALL, **OVERLAP[mode])
        else:
            model, optimizer, _ = lazily_offloaded(maker(name), seed=seed, **SMALL, **OVERLAP[mode])
        train(model, optimizer, 8)
        optimizer.synchronize()
        assert_same(model, optimizer, plain_model, plain)


CLIPPED = {**CLASSES, "Lion, maximizing": (pytorch_optimizer.Lion, {"lr": 1e-3, "maximize": True})}
"""The last one negates gradients where they are."""


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_updates_in_backward_are_taken_back(name):
    """Some norms are too large: their speculative updates are made again, with gradients as they were."""
    kind, options = CLIPPED[name]
    plain_model = make_model()
    plain = kind(plain_model.parameters(), **options)
    with use_lanes(lambda device: LazyLanes(device, seed=1)):
        model, optimizer = offloaded_model(lambda params: kind(params, **options), **SMALL, update_in_backward=True)
    for one in ((plain_model, plain), (model, optimizer)):
        train_clipped(*one, range(12), lambda number: 1e-2 if number in (5, 9) else 1e3)
    assert_same(model, optimizer, plain_model, plain)
    assert runtime_of(optimizer).speculation.misses == 2
    assert runtime_of(optimizer).speculation.hits


def test_gradients_are_written_as_the_plain_class_writes_them():
    plain_model, plain, model, optimizer = twin(made_up.InPlaceGradient, **SMALL)
    for one in ((plain_model, plain), (model, optimizer)):
        train(*one, 2)
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert same_bits(ours.grad, theirs.grad)


# Pieces


@each_class
def test_pieces_of_parameters(name, monkeypatch):
    """Devices split parameters. On the CPU pieces of whole vectors have the same bits, so that it can be shown here."""
    monkeypatch.setattr(probed_rule.ProbedRule, "splits", lambda self, device: True)
    plain_model, plain, model, optimizer = twin(maker(name), model=nn.Linear(128, 256), **SMALL)
    parts = [chunk for host in runtime_of(optimizer).engines[0].arenas.sets for chunk in host.chunks]
    assert any(piece.start > 0 for chunk in parts for piece in chunk.pieces)
    for step in range(12):
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            theirs.grad = torch.randn_like(theirs) * 10.0 ** (step % 5 - 3)
            ours.grad = theirs.grad.clone()
        plain.step()
        optimizer.step()
    assert_same(model, optimizer, plain_model, plain)


# State dicts


@each_class
def test_state_dicts_go_to_the_plain_class_and_back(name):
    make = maker(name)
    plain_model, plain, model, optimizer = trained_twins(4, make, **SMALL)
    assert_same_optimizer(plain, optimizer)
    other_model = make_model()
    other = make(other_model.parameters())
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    again = resumed(plain_model, plain, make, **SMALL, fraction=0.5)
    for one in (plain_model, plain), (model, optimizer), (other_model, other), again:
        train(*one, range(4, 9))
    for right in (model, optimizer), (other_model, other), again:
        assert_same(plain_model, plain, *right)


@each_class
def test_a_plain_optimizer_is_taken_over_in_the_middle(name):
    make = maker(name)
    plain_model, model = make_model(), make_model()
    plain, inner = make(plain_model.parameters()), make(model.parameters())
    train(plain_model, plain, 3)
    train(model, inner, 3)
    optimizer = offstage.offload(inner, model, **SMALL)
    assert_same_future((plain_model, plain), (model, optimizer), range(3, 7))


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "MADGRAD"])
def test_checkpoint_folders(name, tmp_path):
    model, optimizer = trained(3, maker(name), **SMALL)
    checkpoint.save(tmp_path / "one", model, optimizer)
    other_model, other = offloaded_model(maker(name), **SMALL, fraction=0.5)
    checkpoint.load(tmp_path / "one", other_model, other)
    assert_same_tree(other.state_dict(), optimizer.state_dict())
    assert_same_future((model, optimizer), (other_model, other), range(3, 6))


def test_checkpoint_folders_do_not_lose_what_is_kept_for_all_parameters(tmp_path):
    model, optimizer = trained(2, maker("MADGRAD"), **SMALL)
    with pytest.raises(offstage.CheckpointError, match=r"MADGRAD keeps \['k'\] for all parameters together"):
        checkpoint.save(tmp_path / "one", model, optimizer)


def test_numbers_keep_their_types():
    model, optimizer = trained(2, made_up.IntTensor, **SMALL)
    loaded = saved_and_loaded(optimizer.state_dict())
    loaded["state"][0]["step"] = torch.tensor(2.0)  # as some converters write it
    optimizer.load_state_dict(loaded)
    state = optimizer.state[next(model.parameters())]
    assert type(state["step"]) is int
    assert type(state["product"]) is float
    assert type(state["odd"]) is bool
    assert state["seen"].dtype == torch.int64
    assert state["rate"].shape == (1,)
    with pytest.raises(offstage.ConfigError, match="the number of updates so far"):
        state["step"] = -1


def test_state_of_another_class_is_refused():
    _, optimizer = offloaded_model(maker("AdaBelief"), **SMALL)
    _, other = trained(2, maker("MADGRAD"), **SMALL)
    with pytest.raises(offstage.ConfigError, match=r"Load a checkpoint of the same optimizer class"):
        optimizer.load_state_dict(other.state_dict())


def test_torchs_own_functions_for_distributed_checkpoints():
    """They make a step with zero gradients on a fresh optimizer, and name state by parameter."""
    for name in ("AdaBelief", "LaProp", "int step"):
        plain_model, plain, model, optimizer = trained_twins(3, maker(name), **SMALL)
        found = get_optimizer_state_dict(model, optimizer)
        assert_same_tree(found["state"], get_optimizer_state_dict(plain_model, plain)["state"])
        other_model, other = offloaded_model(maker(name), **SMALL)
        other_model.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other_model, other, copy.deepcopy(found))
        assert_same_future((model, optimizer), (other_model, other), range(3, 6))


def test_shards():
    """Each rank has the elements of its shards, which is enough for a class that treats each alone."""
    plain_model = make_model()
    plain = maker("lion_pytorch.Lion")(plain_model.parameters())
    train(plain_model, plain, 4)
    with one_process_group():
        model = make_model()
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer = offstage.offload(maker("lion_pytorch.Lion")(model.parameters()), model, **SMALL)
        train(model, optimizer, 4)
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert same_bits(ours.to_local().detach(), theirs.detach())
            assert isinstance(optimizer.state[ours]["exp_avg"], DTensor)


# Options


def counted(monkeypatch):
    calls = []

    def probe(*arguments):
        calls.append(arguments)
        return probed_rule.__dict__["_probe"](*arguments)

    monkeypatch.setattr(probed_rule, "_probe", probed_rule.probe, raising=False)
    monkeypatch.setattr(probed_rule, "probe", probe)
    return calls


def test_schedulers_of_lr_do_not_probe_again(monkeypatch):
    calls = counted(monkeypatch)
    model, optimizer = offloaded_model(maker("AdaBelief"), **SMALL)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    for number in range(5):
        train(model, optimizer, range(number, number + 1))
        scheduler.step()
    assert len(calls) == 1


def test_an_option_that_changes_is_probed_again():
    model, optimizer = trained(2, maker("LaProp"), **SMALL)
    optimizer.param_groups[0]["cautious"] = True  # scales by the share of elements that agree
    loss_of(model, 2).backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(offstage.ConfigError, match=r"LaProp cannot be offloaded: .*looks at the whole parameter"):
        optimizer.step()
    assert all(same_bits(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    del optimizer.param_groups[0]["cautious"]
    optimizer.step()


def test_an_option_that_changes_adds_state():
    """As torch's own classes do with `amsgrad`: switched on, the state appears."""
    plain_model, plain, model, optimizer = trained_twins(2, lambda params: Toggled(params), **SMALL)
    for one in (plain, optimizer):
        one.param_groups[0]["slow"] = True
    assert_same_future((plain_model, plain), (model, optimizer), range(2, 5))
    assert "slow" in optimizer.state[next(model.parameters())]


class Toggled(made_up.Base):
    def update(self, p, grad, state, group):
        if group.get("slow"):
            grad = grad + state.setdefault("slow", torch.zeros_like(p)).add_(grad, alpha=0.1)
        super().update(p, grad, state, group)


def test_a_fraction_that_changes_at_every_step_is_probed_a_few_times(monkeypatch):
    calls = counted(monkeypatch)
    plain_model, plain, model, optimizer = twin(maker("AdaBelief"), **SMALL)
    for number in range(9):
        for one in ((plain_model, plain), (model, optimizer)):
            one[1].param_groups[0]["betas"] = (0.9 - 0.01 * number, 0.999)
            train(*one, range(number, number + 1))
    assert len(calls) == 4
    assert_same(model, optimizer, plain_model, plain)
    optimizer.param_groups[0]["betas"] = (0.0, 0.999)  # another kind of number
    train(model, optimizer, range(9, 10))
    assert len(calls) == 5


def test_groups_are_probed_each_with_its_options():
    model = make_model()
    groups = [{"params": [p]} for p in model.parameters()]
    groups[2]["cautious"] = True
    with pytest.raises(offstage.ConfigError, match="LaProp cannot be offloaded"):
        offstage.offload(pytorch_optimizer.LaProp(groups), model, **SMALL)
    del groups[2]["cautious"]
    optimizer = offstage.offload(pytorch_optimizer.LaProp(groups[:2]), model, **SMALL)
    optimizer.add_param_group(groups[2])
    with pytest.raises(offstage.ConfigError, match="LaProp cannot be offloaded"):
        optimizer.add_param_group({**groups[3], "cautious": True})
    assert len(optimizer.param_groups) == 3


def test_state_that_appears_after_the_probe_raises():
    class Late(made_up.Base):
        def update(self, p, grad, state, group):
            state["step"] = state.get("step", 0) + 1
            if state["step"] == 20:
                state["late"] = torch.zeros_like(p)
            super().update(p, grad, state, group)

    model, optimizer = trained(19, Late, **SMALL)
    loss_of(model, 19).backward()
    with pytest.raises(offstage.StepLostError, match="Late keeps 'late' from this step on"):
        optimizer.step()


# Classes


def test_a_subclass_that_overrides_nothing_is_its_base():
    class Named(torch.optim.AdamW):
        """Only another name, constructor and a method of its own."""

        def __init__(self, params, lr=0.01):
            super().__init__(params, lr=lr, weight_decay=0.1)

        def describe(self):
            return "Named"

    model, optimizer = trained(3, Named, **SMALL)
    other_model, other = trained(3, lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1), **SMALL)
    assert type(runtime_of(optimizer).rule) is type(runtime_of(other).rule)
    assert_same_weights(model, other_model)


@pytest.mark.parametrize("where", ["class", "instance", "setting"])
def test_a_subclass_that_overrides_something_is_not(where):
    class Changed(torch.optim.AdamW):
        def __init__(self, params, **options):
            super().__init__(params, **options)
            if where == "instance":
                self._init_group = self.other
            if where == "setting":
                self.helper = self.other

        def other(self, *arguments):
            return torch.optim.AdamW._init_group(self, *arguments)

    if where == "class":
        Changed._init_group = Changed.other
    plain_model, plain, model, optimizer = trained_twins(3, Changed, **SMALL)
    is_probed = isinstance(runtime_of(optimizer).rule, probed_rule.ProbedRule)
    assert is_probed == (where != "setting")
    if is_probed:
        assert_same(model, optimizer, plain_model, plain)


def test_hooks_run_once_for_a_class_that_calls_its_base():
    """Hooks of all optimizers run in the step of the base, too: not once for every chunk."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from now on its step runs hooks
    plain_model, plain, model, optimizer = twin(maker("AdamW that calls super"), **SMALL)
    assert chunk_count(optimizer) > 2
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda one, *_: seen.append(one)),
        register_optimizer_step_post_hook(lambda one, *_: seen.append(one)),
    ]
    own = optimizer.register_step_pre_hook(lambda one, *_: seen.append(one))
    try:
        train(model, optimizer, 3)
    finally:
        for handle in (*handles, own):
            handle.remove()
    assert seen == [optimizer] * 9
    train(plain_model, plain, 3)
    assert_same(model, optimizer, plain_model, plain)


def test_paged_on_the_instance():
    """As in bitsandbytes, whose base class sets it in its constructor, `False` where nothing is paged."""

    class Eight(made_up.Base):
        def __init__(self, params, is_paged=False):
            super().__init__(params)
            self.is_paged = is_paged

    with pytest.raises(offstage.ConfigError, match=r"Eight pages its own state.*must not be offloaded twice"):
        offstage.offload(Eight(make_model().parameters(), is_paged=True), **SMALL)
    offstage.offload(Eight(make_model().parameters()), **SMALL)


@pytest.mark.parametrize("settings", [{"state_dtype": "bfloat16"}, {"threads": 2, "update_on": "host"}])
def test_settings_of_own_rules_are_refused(settings):
    with pytest.raises(offstage.ConfigError, match="Lion"):
        offloaded_model(maker("lion_pytorch.Lion"), **SMALL, **settings)


def test_a_tensor_lr_and_named_parameters(monkeypatch):
    calls = counted(monkeypatch)
    models = make_model(), make_model()
    made = [pytorch_optimizer.Lion(one.named_parameters(), lr=torch.tensor(1e-3)) for one in models]
    optimizer = offstage.offload(made[1], models[1], **SMALL, overlap_forward=True)
    for number in range(6):
        for model, one in ((models[0], made[0]), (models[1], optimizer)):
            train(model, one, range(number, number + 1))
            one.param_groups[0]["lr"].mul_(0.9)
    optimizer.synchronize()
    assert_same(models[1], optimizer, models[0], made[0])
    assert len(calls) == 1
    optimizer.param_groups[0]["lr"] = 1e-3
    train(models[1], optimizer, range(6, 7))
    assert len(calls) == 2


def test_groups_count_without_gradients():
    """The plain class counts in groups none of whose parameters has a gradient, and in steps without any."""
    plain_model, plain, model, optimizer = trained_twins(2, maker("counts in its group"), **SMALL)
    for one in (plain, optimizer):
        one.zero_grad()
        one.step()
        one.step()
    assert_same_future((plain_model, plain), (model, optimizer), range(2, 5))
    assert optimizer.param_groups[0]["k"] == 7


def test_a_number_of_the_users_own_is_probed_a_few_times(monkeypatch):
    """Loops keep counters and names in groups, which the class does not know."""
    probes = counted(monkeypatch)
    model = make_model()
    optimizer = offstage.offload(lion_pytorch.Lion(model.parameters(), lr=0.01), model, **SMALL)
    before = len(probes)
    for epoch in range(12):
        optimizer.param_groups[0]["epoch"] = epoch
        train(model, optimizer, 1)
    assert len(probes) - before <= 5


def test_a_frozen_parameter_may_be_of_any_kind():
    frozen = nn.Parameter(torch.ones(64, dtype=torch.uint8), requires_grad=False)
    model = make_model()
    optimizer = offstage.offload(lion_pytorch.Lion([*model.parameters(), frozen], lr=0.01), **SMALL)
    train(model, optimizer, 2)
    assert len(optimizer.state) == 4


def test_options_of_a_subclass_that_overrides_nothing_are_checked():
    class Renamed(torch.optim.AdamW):
        """With another constructor."""

        def __init__(self, params, how):
            super().__init__(params, lr=how)

    model = make_model()
    optimizer = offstage.offload(Renamed(model.parameters(), 0.01), model, **SMALL)
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["betas"] = ("a", 7.0)
    with pytest.raises(offstage.ConfigError, match="betas"):
        optimizer.load_state_dict(saved)
