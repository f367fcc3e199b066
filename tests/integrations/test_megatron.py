# SPDX-License-Identifier: Apache-2.0
"""The real megatron-core optimizers on one rank: ours has the bits of plain torch AdamW inside Megatron."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import offstage
from offstage.integrations.megatron import offload, parts
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.optimizer.optimizer import runtime_of
from tests.support import megatron
from tests.support.contract import SMALL, TORCH, assert_same_tree, one_process_group

pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core's own, by the hundred

STEPS = 30
SPOILED = (4, 5, 17)
"""Iterations with infinite gradients; skipped where there is a loss scale."""

DISTRIBUTED = {"ddp": {"use_distributed_optimizer": True}}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16, "optimizer": {"loss_scale": 128.0}},
    "fp16": {"dtype": torch.float16, "optimizer": {"initial_loss_scale": 2.0**10, "hysteresis": 1}},
    "distributed": {"dtype": torch.bfloat16, "model": DISTRIBUTED, "optimizer": {"loss_scale": 128.0}},
    "distributed fp32": {"dtype": torch.float32, "model": DISTRIBUTED, "optimizer": {"loss_scale": 128.0}},
    "mixed": {"dtype": torch.bfloat16, "model": {"full": ["layernorm"]}, "optimizer": {"loss_scale": 128.0}},
    "distributed mixed": {
        "dtype": torch.bfloat16,
        "model": {"full": ["layernorm"], "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": False}},
        "optimizer": {"loss_scale": 128.0},
    },
    "sgd": {"dtype": torch.bfloat16, "optimizer": {"optimizer": "sgd", "loss_scale": 128.0}},
}
CLASSES = {
    "fp32": "FP32Optimizer",
    "bf16": "Float16OptimizerWithFloat16Params",
    "fp16": "Float16OptimizerWithFloat16Params",
    "distributed": "DistributedOptimizer",
    "distributed fp32": "DistributedOptimizer",
    "mixed": "Float16OptimizerWithFloat16Params",
    "distributed mixed": "DistributedOptimizer",
    "sgd": "Float16OptimizerWithFloat16Params",
}
PLANS: dict[str, dict[str, Any]] = {
    "off": {"rule": "torch", "fraction": 0.0},
    "streamed": TORCH,
    "half": {**TORCH, "fraction": 0.5},
    "host": {**TORCH, "update_on": "host"},
    "window": {**TORCH, "window": "all"},
    "window that stays": {**TORCH, "window": "auto", "device_peak": "1GiB"},
}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with one_process_group(), megatron.session():
        yield


@dataclass
class Run:
    """A model, its Megatron optimizer and scheduler."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any

    def train(self, steps: range | int, **arguments: Any) -> list[Any]:
        return megatron.train(self.chunks, self.optimizer, steps, scheduler=self.scheduler, **arguments)

    def state(self) -> Any:
        """Everything that Megatron's own methods save of the optimizer."""
        only = self.optimizer.chained_optimizers[0]
        shards = None
        if hasattr(only, "get_parameter_state_dp_zero") and len({p.dtype for p in self.chunks[0].parameters()}) == 1:
            shards = only.get_parameter_state_dp_zero()  # in which Megatron mixes up parameters of two dtypes
        return {"state": self.optimizer.state_dict(), "shards": shards}


def make(kind: str, settings: dict[str, Any] | None = None, *, model: bool = True) -> Run:
    """Of one kind, offloaded with `settings`; `model`: whether offload() is told the chunks."""
    one = KINDS[kind]
    chunks = megatron.make_model(one["dtype"], **one.get("model", {}))
    optimizer = megatron.make_optimizer(chunks, log_num_zeros_in_grad=True, **one.get("optimizer", {}))
    if settings is not None:
        assert offload(optimizer, model=chunks if model else None, **settings) is optimizer
    return Run(chunks, optimizer, megatron.make_scheduler(optimizer, STEPS))


def spoiled(kind: str) -> tuple[int, ...]:
    return SPOILED if kind != "fp32" else ()  # which has no loss scale, and would never recover


@functools.cache
def plain(kind: str) -> tuple[Any, ...]:
    """What Megatron makes of it without offstage."""
    run = make(kind)
    assert type(run.optimizer.chained_optimizers[0]).__name__ == CLASSES[kind]
    seen = run.train(STEPS, spoiled=spoiled(kind))
    assert [step for step, (_, stepped, _) in enumerate(seen) if not stepped] == list(spoiled(kind))
    assert any(norm is not None and norm > 1.0 for _, _, norm in seen), "nothing was clipped"
    return seen, megatron.weights(run.chunks), run.state()


@pytest.mark.engine("Megatron-core", "same bits", "accumulation", "clipping")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *[(kind, plan) for kind in ("bf16", "distributed") for plan in PLANS],
        *[(kind, plan) for kind in ("fp32", "fp16", "distributed fp32", "sgd") for plan in ("off", "streamed")],
        *[(kind, "half") for kind in ("mixed", "distributed mixed")],
    ],
)
def test_the_same_bits_as_plain_megatron(kind: str, plan: str) -> None:
    """30 steps with clipping, skipped steps, two micro-batches, and schedules of learning rate and weight decay."""
    run = make(kind, PLANS[plan])
    seen = run.train(STEPS, spoiled=spoiled(kind))
    expected_seen, expected_weights, expected_state = plain(kind)
    assert_same_tree(seen, expected_seen)
    assert_same_tree(megatron.weights(run.chunks), expected_weights)
    assert_same_tree(_comparable(run.state()), _comparable(expected_state))
    (inner,) = parts(run.optimizer)
    assert run.optimizer.optimizer is inner
    assert bool(inner.receipt().host_state_bytes) == (plan != "off")


def _comparable(value: Any) -> Any:
    """Parameters as tensors, numbers as floats: Megatron counts steps in both ways."""
    if isinstance(value, torch.Tensor):
        return value.detach().data
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(one) for one in value]
    return float(value) if isinstance(value, int) else value


@pytest.mark.parametrize("kind", ["bf16", "distributed"])
def test_our_own_rule_has_the_same_bits_under_every_plan(kind: str) -> None:
    plans = [{"fraction": 0.0}, SMALL, {**SMALL, "master_weights": "split"}, {**SMALL, "update_on": "host"}]
    results = []
    for settings in plans:
        run = make(kind, settings)
        seen = run.train(10, spoiled=SPOILED)
        results.append((seen, megatron.weights(run.chunks), _comparable(run.state())))
    for other in results[1:]:
        assert_same_tree(other, results[0])


@pytest.mark.engine("Megatron-core", "lazy lanes")
@pytest.mark.parametrize("kind", ["fp32", "bf16", "distributed"])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_copies_and_gathers_wait_for_the_updates(kind: str, seed: int) -> None:
    """On lanes that hold work back as long as the marks allow, and check every access."""
    expected = make(kind)
    expected.train(4)
    with use_lanes(lambda device: LazyLanes(device, seed=seed)):
        run = make(kind, {**TORCH, "window": "all" if seed % 2 else 0})
    run.train(4)
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(expected.chunks))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "distributed"])
def test_an_optimizer_that_has_trained_is_taken_over_with_its_state(kind: str) -> None:
    expected, run = make(kind), make(kind)
    expected.train(6)
    run.train(3)
    offload(run.optimizer, model=run.chunks, **TORCH)
    run.train(range(3, 6))
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(expected.chunks))
    assert_same_tree(_comparable(run.state()), _comparable(expected.state()))


@pytest.mark.parametrize("kind", ["bf16", "distributed"])
def test_no_fp32_main_parameter_is_left_on_the_device(kind: str) -> None:
    run = make(kind)
    only = run.optimizer.chained_optimizers[0]
    mains = [weakref.ref(param) for param in only.get_parameters()]
    offload(run.optimizer, model=run.chunks, **TORCH)
    gc.collect()
    assert [main() for main in mains] == [None] * len(mains)
    run.train(1)
    assert {param.dtype for param in only.get_parameters()} == {torch.bfloat16}
    for chunk in run.chunks:
        for param in chunk.parameters():
            assert not hasattr(param, "main_param")
    storages = {param.untyped_storage().data_ptr() for chunk in run.chunks for param in chunk.parameters()}
    assert {param.untyped_storage().data_ptr() for param in only.get_parameters()} <= storages


# The loop


class Calls:
    """What an iteration calls, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
        self.seen: list[str] = []
        for name in ("prefetch", "step", "evict"):
            self._watch(monkeypatch, offstage.OffloadedOptimizer, name, name)
        chunk = type(run.chunks[0])
        self._watch(monkeypatch, chunk, "finish_grad_sync", "reduce")
        self._watch(monkeypatch, chunk, "_start_bucket_group_param_sync", "gather")
        self._watch(monkeypatch, chunk, "zero_grad_buffer", "begin")

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, label: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)


def test_the_calls_of_an_iteration_with_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("distributed", {**TORCH, "window": "all"}, model=False)  # it knows its model
    calls = Calls(monkeypatch, run)
    run.train(1)
    assert calls.seen == ["begin", "prefetch", "reduce", "step", "gather"]
    calls.seen.clear()
    run.train(range(1, 3), spoiled=[1])
    assert calls.seen == ["begin", "prefetch", "reduce", "begin", "evict", "prefetch", "reduce", "step", "gather"]


def test_the_calls_of_an_iteration_without_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("distributed")
    bound = run.chunks[0].config.finalize_model_grads_func
    offload(run.optimizer, model=run.chunks, fraction=0.0)
    assert run.chunks[0].config.finalize_model_grads_func is bound
    calls = Calls(monkeypatch, run)
    run.train(2)
    assert calls.seen == ["begin", "reduce", "step", "gather"] * 2
    assert runtime_of(run.optimizer.optimizer).overlap is None
    assert not run.optimizer.optimizer.receipt().host_state_bytes


def test_a_rerun_of_forward_and_backward_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run = make("distributed"), make("distributed", {**TORCH, "window": "all"})
    calls = Calls(monkeypatch, run)
    expected.train(3)
    calls.seen.clear()
    run.train(1)
    run.chunks[0].config.grad_scale_func = run.optimizer.scale_loss
    for number in (1, 2):
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        megatron.backward(run.chunks, number)
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        megatron.backward(run.chunks, number)
        run.optimizer.step()
        run.scheduler.step(increment=1)
    again = ["begin", "prefetch", "reduce", "begin", "reduce", "step", "gather"]
    assert calls.seen == ["begin", "prefetch", "reduce", "step", "gather", *again, *again]
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(expected.chunks))


@pytest.mark.parametrize("window", [0, "all"])
def test_slots_take_no_memory_outside_the_step(window: Any) -> None:
    """With a window, not before gradients are reduced; also where the last step was skipped."""
    run = make("bf16", {**TORCH, "window": window})
    inner, device, during, before = run.optimizer.optimizer, torch.device("cpu"), [], []
    runtime = runtime_of(inner)
    inner.register_step_post_hook(lambda *_: during.append(runtime.device_state_bytes(device)))
    run.chunks[0].register_forward_pre_hook(lambda *_: before.append(runtime.device_state_bytes(device)))
    run.train(4, spoiled=[2])
    assert min(during) > 0
    assert max(before) == runtime.device_state_bytes(device) == 0


def test_the_window_is_full_while_gradients_are_reduced_and_gone_after_the_step() -> None:
    run = make("bf16", {**TORCH, "window": "all"})
    run.train(2)
    runtime = runtime_of(run.optimizer.optimizer)
    config = run.chunks[0].config
    device, during = torch.device("cpu"), []
    reduces = config.finalize_model_grads_func.__wrapped__

    def looking(*args: Any, note: str, **kwargs: Any) -> None:
        assert note == "kept"
        during.append(runtime.device_state_bytes(device))
        reduces(*args, **kwargs)

    config.finalize_model_grads_func = functools.partial(looking, note="kept")  # bound after offload()
    before = runtime.device_state_bytes(device)
    run.train(range(2, 4))
    assert runtime.device_state_bytes(device) == before
    assert len(during) == 2
    assert min(during) > before


def test_where_no_function_is_bound_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop reduces gradients by itself: the window is filled when the step begins."""
    run = make("bf16")
    config = run.chunks[0].config
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    offload(run.optimizer, model=run.chunks, **TORCH, window="all")
    calls = Calls(monkeypatch, run)
    config.grad_scale_func = run.optimizer.scale_loss
    for number in range(2):
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        megatron.backward(run.chunks, number)
        assert config.finalize_model_grads_func is None
        finalize(run.chunks)
        run.optimizer.step()
    assert calls.seen == ["begin", "reduce", "prefetch", "step"] * 2


def test_a_dropped_optimizer_leaves_only_what_was_bound() -> None:
    run = make("fp32", {**TORCH, "window": "all"})
    run.train(1)
    chunks, run.optimizer, run.scheduler = run.chunks, None, None
    other = Run(chunks, megatron.make_optimizer(chunks), None)
    other.train(1)  # the wrapper does nothing but call what it stands before


# Phases


@pytest.mark.engine("Megatron-core", "sleep and wake")
@pytest.mark.parametrize("kind", ["fp32", "bf16", "distributed"])
def test_sleep_and_wake_between_steps(kind: str) -> None:
    expected, run = make(kind), make(kind, {**TORCH, "fraction": 0.5})
    expected.train(4)
    run.train(2)
    buffers = [buffer for chunk in run.chunks for buffer in chunk.buffers]
    with offstage.sleep(*run.chunks, run.optimizer):
        assert offstage.asleep(*run.chunks, run.optimizer)
        for chunk in run.chunks:  # their values are not needed between steps: Megatron frees them itself
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        assert all(not buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
        assert all(not param.untyped_storage().nbytes() for chunk in run.chunks for param in chunk.parameters())
        for chunk in run.chunks:
            chunk.restore_grad_buffers(synchronize=False)
        with pytest.raises(offstage.OffstageError, match="asleep"):
            run.train(1)
    assert not offstage.asleep(run.optimizer)
    run.train(range(2, 4))
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(expected.chunks))


@pytest.mark.parametrize("kind", ["bf16", "distributed"])
def test_megatrons_own_way_to_leave_the_device_is_sleep(kind: str) -> None:
    expected, run = make(kind), make(kind, {**TORCH, "fraction": 0.5})
    expected.train(4)
    run.train(2)
    weights = [param.data_ptr() for chunk in run.chunks for param in chunk.parameters()]
    run.optimizer.offload_to_cpu()
    assert offstage.asleep(run.optimizer)
    with pytest.raises(offstage.OffstageError, match="asleep"):
        run.optimizer.optimizer.step()
    run.optimizer.restore_from_cpu()
    run.optimizer.restore_from_cpu()  # as Megatron's: again is nothing
    assert [param.data_ptr() for chunk in run.chunks for param in chunk.parameters()] == weights
    run.train(range(2, 4))
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(expected.chunks))


# Messages


def test_names_in_the_plan_are_the_models() -> None:
    run = make("distributed", TORCH)
    (inner,) = parts(run.optimizer)
    names = {name for name, _ in run.chunks[0].named_parameters()}
    assert {state.name for state in runtime_of(inner).all_states()} <= names
    assert not any("param_names" in group for group in run.optimizer.param_groups)


def test_a_stub_optimizer_has_nothing_to_offload(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.optimizer import ChainedOptimizer, FP32Optimizer, OptimizerConfig

    stub = ChainedOptimizer([FP32Optimizer(None, OptimizerConfig(), lambda *_: None)])
    with caplog.at_level(logging.INFO, logger="offstage"):
        assert offload(stub) is stub
    assert "trains no parameters" in caplog.text
    assert parts(stub) == []
