# SPDX-License-Identifier: Apache-2.0
"""Overlap on real streams: the same bits in every setting, nothing unordered, no wait of the host, less memory."""

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offstage
from benchmarks.bits import DELAY_CYCLES
from benchmarks.overlap_bits import (
    DELAYED,
    IN_BACKWARD,
    LANES,
    MASTERS,
    SETTINGS,
    SMALL,
    Checked,
    Gates,
    Run,
    batches,
    build,
    delayed_lanes,
    offloaded,
    update_all_early,
)
from benchmarks.steady_state import OVERLAP_CASES, overlap_steady_state
from offstage.errors import OffstageError
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from tests.support.gates import (
    DEVICE,
    STEPS,
    Elsewhere,
    Forgetful,
    assert_same,
    is_a_race,
    no_synchronisation,
    run_gates,
)
from tests.support.lives import end_step
from tests.support.params import equal as same
from tests.support.params import result as result_of

CLIPS = ["none", "never", "sometimes", "always"]
OVERLAPPED = {name: config for name, config in SETTINGS.items() if config}


@functools.cache
def plain(clip: str = "none", infinite_step: int | None = None) -> Run:
    """Updates in step(), fp32 masters, torch's own clipping. What every other run is compared with."""
    return run_gates({"master_weights": "fp32"}, clip=clip, infinite_step=infinite_step, clipped_by_torch=True)


def assert_overlapped(run: Run, config: dict[str, Any], clip: str = "none") -> None:
    """The run cannot have been a plain one."""
    early = config.get("update_in_backward", False)
    assert (run.updated_in_backward > 0) == early
    assert (run.fetched_in_backward > 0) == bool(early or config.get("window"))
    assert (run.taken_by_step > 0) == config.get("overlap_forward", False)
    assert (run.receipt.speculation_hits > 0) == (early and clip in ("never", "sometimes"))
    assert (run.receipt.speculation_misses > 0) == (early and clip in ("sometimes", "always"))


# The same bits


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_gives_the_bits_of_plain_steps(setting: str, clip: str, masters: str) -> None:
    run = run_gates({**SETTINGS[setting], "master_weights": masters}, clip=clip)
    assert_same(run, plain(clip))
    assert_overlapped(run, SETTINGS[setting], clip)


def test_the_steps_are_clipped_as_often_as_their_name_says() -> None:
    limits = {"never": 1e4, "sometimes": 0.3, "always": 1e-4}
    clipped = {clip: sum(float(norm) > limit for norm in plain(clip).norms) for clip, limit in limits.items()}
    assert clipped == {"never": 0, "sometimes": STEPS // 2, "always": STEPS}


@pytest.mark.parametrize("setting", OVERLAPPED)
def test_a_norm_that_is_not_finite_changes_nothing(setting: str) -> None:
    """In the sixth step, which speculation would have hit."""
    run = run_gates({**SETTINGS[setting], "master_weights": "split"}, clip="sometimes", infinite_step=5)
    assert_same(run, plain("sometimes", infinite_step=5))
    assert run.receipt.skipped_steps == 1


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.value)
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize(("setting", "clip"), DELAYED)
def test_delays_change_nothing(setting: str, clip: str, masters: str, lane: Lane) -> None:
    with delayed_lanes(lane):
        config = {**SETTINGS[setting], "master_weights": masters}
        run = run_gates(config, clip=clip, delayed=lane is Lane.CALLER)
    assert_same(run, plain(clip))
    assert_overlapped(run, SETTINGS[setting], clip)


# Happens before


@pytest.mark.parametrize("clip", ["none", "sometimes"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_checker_finds_nothing_on_real_streams(setting: str, clip: str) -> None:
    lanes = Checked()
    with use_lanes(lanes):
        run = run_gates({**SETTINGS[setting], "master_weights": "split"}, clip=clip)
    assert lanes.accesses > 1000
    assert_same(run, plain(clip))


@pytest.mark.parametrize(
    ("wait", "config", "clip"),
    [
        ("fetch: the slot is free", {"overlap_forward": True}, "none"),
        ("update: the state is fetched", {"window": "some"}, "none"),
        ("store: the state is updated", {"update_in_backward": True}, "none"),
        ("update: the gradients are ready", {"update_in_backward": True}, "none"),
        ("step: the weights are ready", {"window": "all"}, "none"),
        ("forward: the weights are ready", {"overlap_forward": True}, "none"),
        ("forward: the weights are ready", IN_BACKWARD, "none"),
        ("step: the norm is known", IN_BACKWARD, "never"),
        ("redo: the speculative updates are done", IN_BACKWARD, "always"),
    ],
)
def test_the_checker_notices_a_missing_wait(wait: str, config: dict[str, Any], clip: str) -> None:
    """The control of the test before: the same runs, with one wait left out."""
    with use_lanes(lambda device: Forgetful(device, wait)), pytest.raises(OffstageError) as caught:
        run_gates(config, clip=clip)
    torch.accelerator.synchronize()  # the buffers are still there: the traceback holds them
    assert is_a_race(caught.value)


# Compiled modules


def _compile_blocks(model: Gates, backend: str = "aot_eager") -> None:
    model.gates = nn.ModuleList(torch.compile(gate, backend=backend) for gate in model.gates)


def _compile_blocks_in_place(model: Gates) -> None:
    for gate in model.gates:
        gate.compile(backend="aot_eager")


def _compile_model_in_place(model: Gates) -> None:
    model.compile(backend="aot_eager")


def _compile_with_inductor(model: Gates) -> None:
    _compile_blocks(model, "inductor")


@pytest.fixture
def _no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED_SETTINGS = [("overlap_forward", "none"), ("update_in_backward, overlap_forward", "sometimes")]


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize(("setting", "clip"), COMPILED_SETTINGS)
@pytest.mark.parametrize("prepare", [_compile_blocks, _compile_blocks_in_place, _compile_model_in_place])
def test_compiled_modules_have_their_cue_at_the_boundary(prepare: Callable, setting: str, clip: str) -> None:
    run = run_gates(SETTINGS[setting], clip=clip, prepare=prepare)
    assert_same(run, run_gates({}, clip=clip, clipped_by_torch=True, prepare=prepare))
    assert_overlapped(run, SETTINGS[setting], clip)
    if clip == "none":
        assert run.taken_by_step == STEPS * len(run.weights)


@pytest.mark.usefixtures("_no_compiled_code")
def test_inductor() -> None:
    run = run_gates(IN_BACKWARD, prepare=_compile_with_inductor)
    assert_same(run, run_gates({}, prepare=_compile_with_inductor))
    assert_overlapped(run, IN_BACKWARD)


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize("setting", ["overlap_forward, window all", "update_in_backward, overlap_forward"])
def test_a_model_compiled_after_offload_is_waited_for_in_step(setting: str) -> None:
    """Nothing inside a compiled region can give a cue: no module waits, so step() does."""

    def loop(config: dict[str, Any]) -> list[torch.Tensor]:
        model = build(SMALL, DEVICE)
        optimizer = offloaded(model, SMALL, config)
        compiled = torch.compile(model, backend="aot_eager")
        for x, gradient in batches(SMALL, DEVICE, STEPS):
            compiled(x).backward(gradient)
            end_step(optimizer)
        return result(model, optimizer)

    assert same(loop(SETTINGS[setting]), loop({}))


# CUDA graphs


def result(model: nn.Module, optimizer: offstage.OffloadedOptimizer) -> list[torch.Tensor]:
    return result_of(model.parameters(), optimizer)


class Static:
    """Forward and backward of one model on static inputs, run or captured and replayed."""

    def __init__(self) -> None:
        self.model = build(SMALL, DEVICE)
        self.x, self.gradient = (torch.zeros_like(tensor) for tensor in batches(SMALL, DEVICE, 1)[0])
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        self.model(self.x).backward(self.gradient)

    def warm_up(self, work: Callable[[], None]) -> None:
        """On a side stream, as torch's documentation asks for."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self) -> None:
        """Without gradients: backward makes them in the graph's own memory, where replays write them again."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()  # an arena of an earlier test that is unregistered now would wait for the device
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def iterate(self, optimizer: offstage.OffloadedOptimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.x.copy_(batch[0])
        self.gradient.copy_(batch[1])
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        optimizer.step()
        if self.graph is None:
            optimizer.zero_grad()

    def iterate_all(self, optimizer: offstage.OffloadedOptimizer) -> list[torch.Tensor]:
        for batch in batches(SMALL, DEVICE, STEPS):
            self.iterate(optimizer, batch)
        return result(self.model, optimizer)


def never_captured(config: dict[str, Any]) -> list[torch.Tensor]:
    static = Static()
    return static.iterate_all(offloaded(static.model, SMALL, config))


def captured_before_offload(config: dict[str, Any]) -> list[torch.Tensor]:
    static = Static()
    static.warm_up(lambda: [static.run() for _ in range(3)])
    static.capture()
    return static.iterate_all(offloaded(static.model, SMALL, config))


def captured_after_offload(config: dict[str, Any]) -> list[torch.Tensor]:
    static = Static()
    optimizer = offloaded(static.model, SMALL, config)
    static.warm_up(lambda: [static.run() for _ in range(3)])  # without a step: these gradients go
    static.capture()
    return static.iterate_all(optimizer)


def captured_after_steps(config: dict[str, Any]) -> list[torch.Tensor]:
    """The first iterations are the warm-up, so that updates are under way when the capture begins."""
    static = Static()
    optimizer = offloaded(static.model, SMALL, config)
    data = batches(SMALL, DEVICE, STEPS)
    static.warm_up(lambda: [static.iterate(optimizer, batch) for batch in data[:4]])
    static.capture()
    for batch in data[4:]:
        static.iterate(optimizer, batch)
    return result(static.model, optimizer)


GRAPH_SETTINGS = ["overlap_forward", "overlap_forward, window all", "update_in_backward, overlap_forward, window"]


@pytest.mark.parametrize("setting", GRAPH_SETTINGS)
@pytest.mark.parametrize(
    ("loop", "warnings"), [(captured_before_offload, 0), (captured_after_offload, 1), (captured_after_steps, 1)]
)
def test_graph_replays_give_the_bits_of_the_plain_loop(
    loop: Callable, warnings: int, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A capture switches everything outside step() off, and says so once; a graph from before is not even seen."""
    with caplog.at_level(logging.WARNING, "offstage"), delayed_lanes(Lane.UPDATE):
        replayed = loop(SETTINGS[setting])
    assert same(replayed, never_captured({}))
    assert len([record for record in caplog.records if "capture" in record.getMessage()]) == warnings


@pytest.mark.parametrize("lane", [Lane.UPDATE, Lane.CALLER], ids=lambda lane: lane.value)
@pytest.mark.parametrize("setting", ["overlap_forward", "update_in_backward, overlap_forward"])
def test_modules_graphed_one_by_one_keep_their_cues(setting: str, lane: Lane) -> None:
    """`make_graphed_callables` before offload(): every call is a replay, and a hook stands in front of it.

    The gradients are in the graphs' own memory, which the next backward writes again.
    """

    def loop(config: dict[str, Any]) -> list[torch.Tensor]:
        data = batches(SMALL, DEVICE, STEPS)
        gates = tuple(build(SMALL, DEVICE).gates)
        samples = tuple((data[0][0].clone().requires_grad_(number > 0),) for number in range(len(gates)))
        gc.collect()
        model = nn.Sequential(*torch.cuda.make_graphed_callables(gates, samples))
        optimizer = offloaded(model, SMALL, config)
        taken = 0
        for x, gradient in data:
            if lane is Lane.CALLER:
                torch.cuda._sleep(DELAY_CYCLES)
            model(x).backward(gradient)
            optimizer.step()
            taken += sum(param.grad is None for param in model.parameters())
            optimizer.zero_grad()
        assert (taken > 0) == bool(config)
        return result(model, optimizer)

    expected = loop({})
    with delayed_lanes(lane):
        assert same(loop(SETTINGS[setting]), expected)


# Checkpointing


@pytest.mark.parametrize("clip", ["none", "sometimes"])
@pytest.mark.parametrize("setting", ["overlap_forward, window", "update_in_backward, overlap_forward"])
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_checkpointing(checkpointing: str, setting: str, clip: str) -> None:
    """Forward runs again inside backward. With reentrant checkpointing the first gate's hook fires twice."""
    run = run_gates(SETTINGS[setting], clip=clip, checkpointing=checkpointing)
    reference = run_gates({}, clip=clip, checkpointing=checkpointing, clipped_by_torch=True)
    assert_same(run, reference)
    assert_overlapped(run, SETTINGS[setting], clip)


# Memory


def test_updates_in_backward_lower_the_peak_by_most_of_the_gradients() -> None:
    layers, width = 24, 1024

    def peak(config: dict[str, Any]) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        model = model.to(torch.bfloat16).to(DEVICE)
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, chunk_bytes="4MiB", **config)
        if config.get("update_in_backward"):
            update_all_early(optimizer)
        x = torch.randn(8, width).to(DEVICE, torch.bfloat16)
        for iteration in range(8):
            if iteration == 4:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            model(x).sum().backward()
            end_step(optimizer)
        optimizer.close()
        return torch.cuda.max_memory_allocated()

    gradients = layers * width * width * 2
    saved = peak({"overlap_forward": True}) - peak(IN_BACKWARD)
    assert saved > gradients / 2


# The host waits for nothing


@pytest.mark.parametrize("name", OVERLAP_CASES)
def test_no_synchronisation_no_growth_and_no_new_streams(name: str) -> None:
    """But for the one wait on the norm of a clipped step."""
    case = OVERLAP_CASES[name]
    found = overlap_steady_state(case, iterations=18, settled=10, traced=4)
    assert found["forbidden_calls"] == {}
    assert found["host_waits_per_iteration"] == (1 if case.max_norms else 0)
    assert found["allocated_bytes_growth"] == 0
    assert found["reserved_bytes_growth"] == 0
    assert found["streams_used"] <= len(Lane)


def test_the_debug_mode_notices_a_synchronisation() -> None:
    """The control of the test before."""
    value = torch.ones(1, device=DEVICE)
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchronizing"):
        value.item()


# Streams


@pytest.mark.parametrize("lane", [None, Lane.UPDATE], ids=["no delay", "late updates"])
@pytest.mark.parametrize("step_too", [False, True])
@pytest.mark.parametrize("clip", ["none", "sometimes"])
@pytest.mark.parametrize("setting", ["overlap_forward, window all", "update_in_backward, overlap_forward"])
def test_training_on_another_stream(setting: str, clip: str, step_too: bool, lane: Lane | None) -> None:
    with delayed_lanes(lane):
        run = run_gates(SETTINGS[setting], clip=clip, where=Elsewhere(step_too=step_too))
    assert_same(run, plain(clip))
    assert_overlapped(run, SETTINGS[setting], clip)


class Greedy(Elsewhere):
    """After each step the training stream fills all memory it is given, and waits for no other stream before that."""

    def __init__(self) -> None:
        super().__init__(step_too=False)

    @contextlib.contextmanager
    def __call__(self, moment: str) -> Iterator[None]:
        with super().__call__(moment):
            yield
        if moment == "step":
            with torch.cuda.stream(self.stream):
                sizes = [SMALL.width] * (8 * SMALL.gates) + [SMALL.narrow] * (8 * SMALL.gates)
                taken = [torch.full((size,), torch.nan, dtype=torch.bfloat16, device=DEVICE) for size in sizes]
                del taken


@pytest.mark.parametrize("clip", ["none", "never", "sometimes", "always"])
def test_memory_goes_back_to_its_stream_behind_the_last_use(clip: str) -> None:
    """Gradients and kept weights belong to the stream of backward. step() runs on another one, and late; the memory
    must not be handed on before that."""
    with delayed_lanes(Lane.UPDATE):
        run = run_gates(IN_BACKWARD, clip=clip, where=Greedy())
    assert_same(run, plain(clip))
