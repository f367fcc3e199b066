# SPDX-License-Identifier: Apache-2.0
"""Megatron's checkpoints: between plain Megatron and ours, through its own methods and dist_checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from offstage.integrations.megatron import offload, parts
from tests.integrations.test_megatron import Run, make
from tests.support import megatron
from tests.support.contract import SMALL, TORCH, assert_same_tree, one_process_group, saved_and_loaded

pytestmark = pytest.mark.filterwarnings("ignore")

RESHARDABLE = ["fully_reshardable", "dp_reshardable"]
"""What dist_checkpointing of this version makes of a DistributedOptimizer."""
HALF = {**TORCH, "fraction": 0.5}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with one_process_group(), megatron.session():
        yield


def assert_same_future(left: Run, right: Run, steps: range) -> None:
    for run in (left, right):
        run.train(steps)
    assert_same_tree(megatron.weights(right.chunks), megatron.weights(left.chunks))


def copied(source: Run, target: Run) -> None:
    """Through Megatron's state dicts, the model first, as it loads them."""
    state = {"model": source.chunks[0].state_dict(), "optimizer": source.optimizer.state_dict()}
    torch.save(state, "all.pt")
    loaded = torch.load("all.pt", weights_only=False)
    target.chunks[0].load_state_dict(loaded["model"])
    target.optimizer.load_state_dict(loaded["optimizer"])
    target.scheduler.load_state_dict(source.scheduler.state_dict())
    if hasattr(source.optimizer.chained_optimizers[0], "save_parameter_state"):
        source.optimizer.save_parameter_state("shards.pt")
        target.optimizer.load_parameter_state("shards.pt")


def sharded(run: Run, form: str, *, is_loading: bool) -> dict[str, Any]:
    model = _gpt(run).sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
    return {
        "model": model,
        "optimizer": run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
    }


def _gpt(run: Run) -> Any:
    module = run.chunks[0]
    while hasattr(module, "module"):
        module = module.module
    return module


def copied_sharded(source: Run, target: Run, folder: Path, form: str) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(sharded(source, form, is_loading=False), str(folder))
    restore_sharded(target, folder, form, source.scheduler)


def restore_sharded(target: Run, folder: Path, form: str, scheduler: Any) -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded(target, form, is_loading=True), str(folder))
    _gpt(target).load_state_dict(loaded["model"])
    target.optimizer.load_state_dict(loaded["optimizer"])
    target.scheduler.load_state_dict(scheduler.state_dict())


@pytest.mark.engine("Megatron-core", "save and resume")
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize(("before", "after"), [(TORCH, None), (None, TORCH), (HALF, TORCH)])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_between_plain_megatron_and_ours(
    kind: str, before: Any, after: Any, is_sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, target = make(kind, before), make(kind, after)
    source.train(3)
    if is_sharded:
        copied_sharded(source, target, tmp_path, "none")
    else:
        copied(source, target)
    assert_same_future(source, target, range(3, 6))


@pytest.mark.engine("Megatron-core", "save and resume")
@pytest.mark.parametrize("kind", ["distributed", "distributed fp32"])
@pytest.mark.parametrize(("before", "after"), [(None, TORCH), (HALF, TORCH)])
@pytest.mark.parametrize("form", ["its own file", *RESHARDABLE])
def test_a_distributed_optimizer_into_ours(
    kind: str, before: Any, after: Any, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, target = make(kind, before), make(kind, after)
    source.train(3)
    if form == "its own file":
        copied(source, target)
    else:
        copied_sharded(source, target, tmp_path, form)
    assert_same_future(source, target, range(3, 6))


@pytest.mark.parametrize(("before", "after"), [(TORCH, None), (None, TORCH), (HALF, TORCH)])
def test_fp32_parameters_among_16_bit_ones(
    before: Any, after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's sharded form refuses them."""
    monkeypatch.chdir(tmp_path)
    source, target = make("mixed", before), make("mixed", after)
    source.train(3)
    copied(source, target)
    assert_same_future(source, target, range(3, 6))


@pytest.mark.parametrize("form", ["its own file", *RESHARDABLE])
def test_fp32_parameters_among_16_bit_ones_of_a_distributed_optimizer(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own map of places is wrong there: plain copies into other parameters, or raises."""
    monkeypatch.chdir(tmp_path)
    source, target = make("distributed mixed", HALF), make("distributed mixed", TORCH)
    source.train(3)
    if form == "its own file":
        copied(source, target)
    else:
        copied_sharded(source, target, tmp_path, form)
    assert_same_future(source, target, range(3, 6))


def test_plain_megatron_cannot_load_a_distributed_optimizer_without_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own: why ours into plain is not shown above. What we save is what it saves, as other tests compare."""
    monkeypatch.chdir(tmp_path)
    source = make("distributed")
    source.train(1)
    with pytest.raises(KeyError, match="step"):
        copied(source, make("distributed"))
    with pytest.raises(AssertionError):
        sharded(make("distributed"), "dp_reshardable", is_loading=True)


@pytest.mark.parametrize("kind", ["bf16", "distributed"])
def test_split_masters_are_saved_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source, target = make(kind, {**SMALL, "master_weights": "split"}), make(kind, SMALL)
    source.train(3)
    copied(source, target)
    assert_same_future(source, target, range(3, 6))


@pytest.mark.parametrize("kind", ["bf16", "distributed"])
@pytest.mark.parametrize("steps", [0, 2])
def test_masters_follow_the_model_after_reload_model_params(kind: str, steps: int) -> None:
    """A model that was loaded without its optimizer."""
    other = make(kind)
    with torch.no_grad():
        for param in other.chunks[0].parameters():
            param.mul_(1.5)
    runs = [make(kind), make(kind, TORCH), make(kind, {**TORCH, "fraction": 0.0})]
    for run in runs:
        run.train(steps)
        run.chunks[0].load_state_dict(other.chunks[0].state_dict())
        run.optimizer.reload_model_params()
        run.train(range(5, 8))
    for run in runs[1:]:
        assert_same_tree(megatron.weights(run.chunks), megatron.weights(runs[0].chunks))


def test_masters_come_from_a_more_exact_state_dict() -> None:
    """`reload_model_params(state_dict)`, which only a DistributedOptimizer has."""
    exact = {
        name: torch.randn(param.shape, generator=torch.Generator().manual_seed(3)) / 8
        for name, param in _gpt(make("distributed")).named_parameters()
    }
    runs = [make("distributed"), make("distributed", TORCH)]
    for run in runs:
        with torch.no_grad():
            for name, param in _gpt(run).named_parameters():
                param.copy_(exact[name])
        run.optimizer.reload_model_params(state_dict={"model": dict(exact)})
        run.train(3)
    assert_same_tree(megatron.weights(runs[1].chunks), megatron.weights(runs[0].chunks))


class _AskedOfTheDevice(TorchFunctionMode):
    """Elements that factories were asked for on the device."""

    elements = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if str(kwargs.get("device")).startswith("cuda") and isinstance(result, torch.Tensor):
            self.elements += result.numel()
        return result


@pytest.mark.parametrize("form", RESHARDABLE)
def test_a_load_allocates_nothing_on_the_device(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import dist_checkpointing

    source, target = make("distributed", TORCH), make("distributed", TORCH)
    source.train(1)
    dist_checkpointing.save(sharded(source, form, is_loading=False), str(tmp_path))
    state = dist_checkpointing.load(sharded(target, form, is_loading=True), str(tmp_path))["optimizer"]
    fresh, plain = make("distributed", TORCH), make("distributed")
    weights = sum(param.numel() for param in megatron.weights(fresh.chunks))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cuda")  # which other patches make a CPU
    with _AskedOfTheDevice() as ours:
        fresh.optimizer.load_state_dict(state)
    assert ours.elements == 0
    with _AskedOfTheDevice() as theirs, pytest.raises(KeyError):
        plain.optimizer.load_state_dict(state)
    assert theirs.elements >= 2 * weights, "the way to see it does not see it"


@pytest.mark.parametrize(
    ("kind", "form"),
    [("fp32", "none"), ("bf16", "none"), ("distributed", "dp_reshardable"), ("distributed fp32", "dp_reshardable")],
)
def test_what_an_asynchronous_save_writes_is_what_there_was_at_its_call(kind: str, form: str, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    source, target, expected = make(kind, TORCH), make(kind, TORCH), make(kind, TORCH)
    source.train(2)
    expected.train(2)
    request = dist_checkpointing.save(
        sharded(source, form, is_loading=False), str(tmp_path), async_sharded_save=True, async_strategy="mcore"
    )
    source.train(range(2, 3))
    request.execute_sync()
    restore_sharded(target, tmp_path, form, expected.scheduler)
    assert_same_tree(_tensors(target.state()), _tensors(expected.state()))


def _tensors(state: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(state) if isinstance(one, torch.Tensor)]


# Transformer Engine's optimizer, which is not here: its options and its format


class FusedAdam(torch.optim.Optimizer):
    """The interface that Transformer Engine's and Apex's have: `adam_w_mode`, and `step` once for a group."""

    def __init__(self, params: Any, *, adam_w_mode: bool = True, **defaults: Any) -> None:
        super().__init__(params, {"bias_correction": True, **defaults})
        self.adam_w_mode = adam_w_mode


def fused(kind: str, *, adam_w_mode: bool = True, **changes: Any) -> Run:
    """Megatron's optimizer as it is where Transformer Engine is installed."""
    run = make(kind)
    only = run.optimizer.chained_optimizers[0]
    options = {name: only.optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    unknown = {*torch.optim.AdamW([torch.zeros(1)]).defaults} - {*options}
    groups = [{k: v for k, v in group.items() if k not in unknown} for group in only.optimizer.param_groups]
    only.optimizer = FusedAdam(groups, adam_w_mode=adam_w_mode, **options, **changes)
    return run


@pytest.mark.parametrize("kind", ["fp32", "bf16", "distributed"])
def test_fused_adams_options_become_torchs(kind: str) -> None:
    expected, run = make(kind, TORCH), fused(kind)
    offload(run.optimizer, model=run.chunks, **TORCH)
    assert_same_future(expected, run, range(3))


def test_fused_adam_with_l2_decay_is_torchs_adam() -> None:
    from offstage.integrations.megatron.inner import torch_twin
    from offstage.integrations.megatron.views import views_of

    run = fused("fp32", adam_w_mode=False)
    only = run.optimizer.chained_optimizers[0]
    twin = torch_twin(only.optimizer, views_of(only, run.chunks))
    assert type(twin) is torch.optim.Adam


def test_without_bias_correction_it_is_refused() -> None:
    run = fused("fp32", bias_correction=False)
    with pytest.raises(ValueError, match="bias_correction"):
        offload(run.optimizer, **TORCH)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_fused_adams_format_is_kept(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source, target, other = fused(kind), fused(kind), make(kind, TORCH)
    offload(source.optimizer, model=source.chunks, **TORCH)
    offload(target.optimizer, model=target.chunks, **TORCH)
    source.train(3)
    saved = source.optimizer.state_dict()
    inner = saved if kind == "fp32" else saved["optimizer"]
    assert all(group["step"] == 3 for group in inner["param_groups"])
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in inner["state"].values())
    copied(source, target)
    copied(source, other)  # and ours in the place of torch's AdamW reads it
    assert not any("step" in group for group in other.optimizer.param_groups)
    assert_same_future(source, target, range(3, 5))
    other.train(range(3, 5))
    assert_same_tree(megatron.weights(other.chunks), megatron.weights(source.chunks))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "distributed"])
def test_a_checkpoint_that_fused_adam_has_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups have none of the options that only torch's class has."""
    from megatron.core.optimizer import distrib_optimizer

    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)  # Megatron then leaves `step` in the groups
    source, target = fused(kind), fused(kind)
    for run in (source, target):
        offload(run.optimizer, model=run.chunks, **TORCH)
    source.train(3)
    saved = source.optimizer.state_dict()
    inner = saved if kind == "fp32" else saved["optimizer"]
    only_torch = {*torch.optim.AdamW([torch.zeros(1)]).defaults} - {"lr", "betas", "eps", "weight_decay"}
    for group in inner["param_groups"]:
        for name in only_torch:
            del group[name]
    target.chunks[0].load_state_dict(source.chunks[0].state_dict())
    target.optimizer.load_state_dict(saved)
    if kind == "distributed":
        shards = source.optimizer.chained_optimizers[0].get_parameter_state_dp_zero()
        target.optimizer.chained_optimizers[0].load_parameter_state_from_dp_zero(shards)
    target.scheduler.load_state_dict(source.scheduler.state_dict())
    assert_same_future(source, target, range(3, 5))


def test_state_dicts_are_tensors_and_numbers() -> None:
    run = make("bf16", TORCH)
    run.train(1)
    assert_same_tree(saved_and_loaded(run.optimizer.state_dict()["optimizer"]["state"]), _inner(run)["state"])


def _inner(run: Run) -> Any:
    state = parts(run.optimizer)[0].state_dict()
    for one in state["state"].values():
        one.pop("master_weight")
    return state
