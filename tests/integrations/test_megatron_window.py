# SPDX-License-Identifier: Apache-2.0
"""`window="auto"` in Megatron: filled in backward as activations go, given back in the next forward; the same bits.

Lanes count what offstage takes of the device, and what the layers pretend to take. Each layer keeps `KEPT` bytes from
its forward to its backward, and takes `SPIKE` more while it runs and while its backward does, as a recomputed one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offstage.integrations.megatron import offload
from offstage.lanes.link import use_lanes
from offstage.modules import layers_of
from offstage.optimizer.optimizer import runtime_of
from tests.support import megatron
from tests.support.contract import SMALL, assert_same_tree, one_process_group
from tests.support.metered import Counted, CountedLazy

pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core's own, by the hundred

LAYERS = 6
SLOT = 16 * 1024
KEPT = 4 * SLOT
SPIKE = 3 * SLOT
DISTRIBUTED = {"use_distributed_optimizer": True}
KINDS: dict[str, Any] = {"fp32": {}, "bf16": {}, "distributed": DISTRIBUTED}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with one_process_group(), megatron.session():
        yield


class Run:
    """A GPT whose layers take memory, and its offloaded optimizer."""

    def __init__(
        self,
        kind: str = "distributed",
        *,
        seed: int | None = None,
        no_sync: bool = True,
        model: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        self.chunks = megatron.make_model(dtype, num_layers=LAYERS, ddp=KINDS[kind], **(model or {}))
        self.config = self.chunks[0].config
        self.config.no_sync_func = self.chunks[0].no_sync if no_sync else None
        self.layers = layers_of(self.chunks[0], None)
        made: list[Any] = []
        self.lanes: Any

        def lanes(device: torch.device) -> Any:
            made.append(Counted(device) if seed is None else CountedLazy(device, seed=seed))
            return made[-1]

        for layer in self.layers:
            layer.register_forward_hook(lambda _, inputs, outputs: self._runs(outputs[0]))
            first = next(layer.parameters())
            first.register_post_accumulate_grad_hook(lambda _: self.lanes.use(-KEPT))
        self.optimizer = megatron.make_optimizer(self.chunks, loss_scale=128.0)
        with use_lanes(lanes):
            offload(self.optimizer, model=self.chunks, **{**SMALL, **settings})
        self.lanes = made[0] if made else None  # where nothing leaves the device there are none
        self.runtime = runtime_of(self.optimizer.optimizer)
        self.engine = self.runtime.places.engines[torch.device("cpu")]

    def _runs(self, output: torch.Tensor) -> None:
        self._briefly()
        if output.requires_grad:
            output.register_hook(self._briefly)
            self.lanes.use(KEPT)

    def _briefly(self, *_: Any) -> None:
        self.lanes.use(SPIKE)
        self.lanes.use(-SPIKE)

    @property
    def pipeline(self) -> Any:
        return self.engine.transport.pipeline

    def watch_backward(self) -> list[tuple[bool, int]]:
        """For every gradient from now on: whether it is of the last micro-batch, and how many chunks wait."""
        seen: list[tuple[bool, int]] = []
        groups = self.chunks[0].param_to_bucket_group
        for param in self.chunks[0].parameters():
            group = groups[param]
            param.register_post_accumulate_grad_hook(
                lambda _, group=group: seen.append((group.is_last_microbatch, len(self.pipeline.staged)))
            )
        return seen

    def train(self, steps: range | int, **arguments: Any) -> Any:
        return megatron.train(self.chunks, self.optimizer, steps, **arguments)


def hooks(run: Run) -> int:
    params = [param for chunk in run.chunks for param in chunk.parameters()]
    modules = [module for chunk in run.chunks for module in chunk.modules()]
    on_params = sum(len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) for param in params)
    return on_params + sum(len(module._forward_pre_hooks) for module in modules)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("no_sync", [True, False])
def test_it_opens_in_backward_and_is_gone_before_the_next_forward_ends(micro_batches: int, no_sync: bool) -> None:
    """And the peak is that of Megatron without a window."""
    plain, run = Run(no_sync=no_sync), Run(no_sync=no_sync, window="auto")
    plain.train(6, micro_batches=micro_batches)
    run.train(2, micro_batches=micro_batches)
    assert run.pipeline.device_bytes == 0
    waiting, slots = run.watch_backward(), []
    for layer in run.layers:
        layer.register_forward_pre_hook(lambda *_: slots.append(run.pipeline.device_bytes))
    for number in range(2, 6):
        waiting.clear()
        slots.clear()
        run.train(range(number, number + 1), micro_batches=micro_batches)
        cues = len(waiting) // micro_batches
        assert {count for _, count in waiting[:-cues]} <= {0}
        assert max(count for is_last, count in waiting[-cues:] if is_last) > 2
        assert run.pipeline.window_slots > 2  # stored under the next forward
        if number > 2:
            assert slots[0] > 3 * SLOT
        assert slots[LAYERS - 1] == 0
    assert run.lanes.most <= plain.lanes.most
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(plain.chunks))


@pytest.mark.engine("Megatron-core", "lazy lanes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_the_same_bits_with_skipped_steps_and_more_micro_batches_later(kind: str, seed: int | None) -> None:
    masters, spoiled = ("auto", ()) if kind == "fp32" else ("split", (3, 5))  # which has no loss scale
    plain, run = Run(kind), Run(kind, seed=seed, window="auto", master_weights=masters)
    for one in (plain, run):
        one.train(7, spoiled=spoiled, micro_batches=1)
        assert (one.pipeline.window_slots > 0) == (one is run)
        one.train(range(7, 11), micro_batches=2)
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(plain.chunks))
    assert run.lanes.most <= plain.lanes.most


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_rerun_before_the_step_finds_its_memory(zeroes: bool) -> None:
    plain, run = Run(), Run(window="auto")
    plain.train(6)
    run.train(3)
    run.config.grad_scale_func = run.optimizer.scale_loss
    for number in range(3, 6):
        for again in range(2):
            run.chunks[0].zero_grad_buffer()
            if zeroes or not again:
                run.optimizer.zero_grad()
            megatron.backward(run.chunks, number)
        run.optimizer.step()
    assert run.lanes.most <= plain.lanes.most
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(plain.chunks))


def test_an_evaluation_gives_it_back_too() -> None:
    run = Run(window="auto")
    run.train(4)
    assert run.pipeline.window_slots > 0
    with torch.no_grad():
        batch = iter([megatron.tokens(0, 0)])
        megatron.forward_step(batch, run.chunks[0])
    assert run.pipeline.device_bytes == 0


def test_without_it_nothing_is_bound() -> None:
    before = Run(fraction=0.0)
    for settings in ({}, {"window": "all"}):
        assert hooks(Run(**settings)) == hooks(before)
    assert hooks(Run(window="auto")) > hooks(before)


def test_a_dropped_optimizer_takes_its_hooks_along() -> None:
    run, before = Run(window="auto"), hooks(Run(fraction=0.0))
    run.train(3)
    run.optimizer = run.runtime = run.engine = run.config.grad_scale_func = None
    gc.collect()
    assert hooks(run) == before


def test_a_closed_optimizer_takes_no_memory() -> None:
    run = Run(window="auto")
    run.train(4)
    run.optimizer.optimizer.close()
    run.config.finalize_model_grads_func = run.config.finalize_model_grads_func.__wrapped__
    megatron.backward(run.chunks, 4)
    assert run.pipeline.device_bytes == 0


def test_a_sleeping_optimizer_takes_no_memory() -> None:
    plain, run = Run(), Run(window="auto")
    plain.train(6)
    run.train(4)
    run.optimizer.offload_to_cpu()
    with torch.no_grad():
        megatron.forward_step(iter([megatron.tokens(0, 0)]), run.chunks[0])
    assert run.pipeline.device_bytes == 0
    run.optimizer.restore_from_cpu()
    run.train(range(4, 6))
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(plain.chunks))
