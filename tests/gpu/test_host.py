# SPDX-License-Identifier: Apache-2.0
"""Updates on the host with real streams: the bits of the device, nothing unordered, nothing lost, nothing grows."""

import copy
import functools
import gc
import itertools
import logging
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offstage
from benchmarks.bits import LANES_TO_HOST, ON_HOST, DelayedLanes, mismatches
from benchmarks.overlap_bits import SETTINGS, SMALL, Checked, Run, batches, build, delayed_lanes, offloaded
from offstage.config import Placement
from offstage.errors import OffstageError, StepLostError
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from offstage.optimizer.optimizer import runtime_of
from tests.support.gates import (
    DEVICE,
    DeviceMemory,
    Elsewhere,
    Forgetful,
    assert_same,
    is_a_race,
    run_gates,
    steps_on_three_streams,
)
from tests.support.lives import end_step
from tests.support.params import copy_weights, result, set_gradients, steps
from tests.support.params import equal as same
from tests.support.params import make_params as make_params_on

# The bits of fused AdamW

CASES = {case.name: case for case in ON_HOST}
COMPARED = [
    "fp32, 50% updated by the CPU",
    "bf16, fp32 masters, 50% updated by the CPU",
    "bf16, split masters, 50% updated by the CPU",
    "bf16, split masters, 100% updated by the CPU",
    "bf16, no masters, bf16 moments, 50% updated by the CPU",
    "bf16, no masters, bf16 moments, 100% updated by the CPU",
    "fp32, amsgrad, 100% updated by the CPU",
    "fp32, tensor lr, 50% updated by the CPU",
]


@pytest.mark.parametrize("name", COMPARED)
def test_equals_fused_adamw(name: str) -> None:
    assert set(mismatches(CASES[name], 15).values()) == {0}


@pytest.mark.parametrize("lane", LANES_TO_HOST, ids=lambda lane: lane.value)
def test_delays_change_nothing(lane: Lane) -> None:
    for name in (COMPARED[0], COMPARED[3]):
        with use_lanes(lambda device: DelayedLanes(device, lane)):
            assert set(mismatches(CASES[name], 5).values()) == {0}


# Overlap

OVERLAPPED = (
    "in step",
    "overlap_forward",
    "overlap_forward, window all",
    "update_in_backward, overlap_forward",
    "update_in_backward, overlap_forward, window",
)
SHARES = (0.5, 1.0)


@functools.cache
def plain(clip: str = "none") -> Run:
    """Everything resident and updated in step(), torch's own clipping."""
    return run_gates({"master_weights": "fp32", "fraction": 0.0}, clip=clip, clipped_by_torch=True)


@pytest.mark.parametrize("setting", OVERLAPPED)
def test_every_setting_gives_the_bits_of_plain_steps(setting: str) -> None:
    for share, clip, masters in itertools.product(SHARES, ("none", "sometimes"), ("fp32", "split")):
        run = run_gates({**SETTINGS[setting], "master_weights": masters, "host_fraction": share}, clip=clip)
        assert_same(run, plain(clip))
        assert run.receipt.host_update_ms > 0
        assert (run.taken_by_step > 0) == SETTINGS[setting].get("overlap_forward", False)


@pytest.mark.parametrize("lane", [*LANES_TO_HOST, Lane.CALLER], ids=lambda lane: lane.value)
def test_delays_change_nothing_under_overlap(lane: Lane) -> None:
    with delayed_lanes(lane):
        config = {**SETTINGS["update_in_backward, overlap_forward"], "master_weights": "split", "host_fraction": 0.5}
        run = run_gates(config, delayed=lane is Lane.CALLER)
    assert_same(run, plain())


@pytest.mark.parametrize("setting", OVERLAPPED)
def test_streams_with_little_room(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly everything is promised and given by the feeder, while the next forward runs."""
    monkeypatch.setattr("offstage.lanes.accelerator._MOST_UNDER_WAY", 2)
    for share, lane in itertools.product((0.0, 0.5), (Lane.FETCH, Lane.UPDATE, Lane.STORE)):
        with delayed_lanes(lane):
            config = {**SETTINGS[setting], "master_weights": "split", "host_fraction": share}
            run = run_gates(config, clip="sometimes")
        assert_same(run, plain("sometimes"))


@pytest.mark.parametrize("setting", ["in step", "overlap_forward", "update_in_backward, overlap_forward"])
def test_the_checker_finds_nothing_on_real_streams(setting: str) -> None:
    for share in SHARES:
        lanes = Checked()
        with use_lanes(lanes):
            run = run_gates({**SETTINGS[setting], "master_weights": "split", "host_fraction": share}, clip="sometimes")
        assert lanes.accesses > 500
        assert_same(run, plain("sometimes"))


@pytest.mark.parametrize(
    "wait",
    [
        "lower: the gradients are ready",
        "lower: the staging buffer is free",
        "host: weights and gradients have come down",
        "raise: the weights are updated",
        "forward: the weights are ready",
    ],
)
def test_the_checker_notices_a_missing_wait(wait: str) -> None:
    """The control of the test before."""
    with use_lanes(lambda device: Forgetful(device, wait)), pytest.raises(OffstageError) as caught:
        run_gates({"overlap_forward": True, "update_on": "host"})
    torch.accelerator.synchronize()  # the buffers are still there: the traceback holds them
    assert is_a_race(caught.value)


# Parameters set by hand

WHERE: dict[str, dict[str, Any]] = {
    "resident": {"fraction": 0.0},
    "streamed": {},
    "host": {"update_on": "host"},
    "mixed": {"host_fraction": 0.5, "fraction": 0.8},
}


make_params = functools.partial(make_params_on, shapes=((300, 100),) * 8, device=DEVICE)


def make(config: dict[str, Any], *args: Any, **options: Any) -> tuple[list[nn.Parameter], offstage.OffloadedOptimizer]:
    params = make_params(*args, **options)
    inner = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True)  # which a state dict takes along
    return params, offstage.offload(inner, **{"min_bytes": 0, "chunk_bytes": "64KiB", **config})


def after(numbers: Sequence[int], **arguments: Any) -> list[torch.Tensor]:
    """The end of the same steps with everything resident."""
    params, optimizer = make(WHERE["resident"] | arguments.pop("config", {}), **arguments)
    steps(params, optimizer, numbers)
    return result(params, optimizer)


def test_all_on_the_host_takes_no_device_memory() -> None:
    params = make_params(shapes=((2048, 2048),) * 4)
    for param in params:
        param.grad = torch.zeros_like(param)
    memory = DeviceMemory()
    optimizer = offstage.offload(torch.optim.AdamW(params), chunk_bytes="8MiB", update_on="host")
    for _ in range(3):
        optimizer.step()
    optimizer.synchronize()
    assert memory.peak_growth() <= 64 * 1024
    assert optimizer.receipt().device_state_bytes == 0


def test_any_number_of_threads_gives_the_same_bits() -> None:
    shapes = ((3_000_001,), (2000, 1000), (7,))  # several slices
    for threads in (1, 3, 16):
        params, optimizer = make({"update_on": "host", "chunk_bytes": "64MiB", "threads": threads}, shapes=shapes)
        steps(params, optimizer, range(3))
        assert same(result(params, optimizer), after(range(3), shapes=shapes))


def test_more_chunks_than_a_stream_has_room_for() -> None:
    """Hundreds of chunks on both ways in one step, given while the first updates are late."""
    shapes = ((3000,),) * 700
    with use_lanes(lambda device: DelayedLanes(device, Lane.WEIGHTS_UP)):
        params, optimizer = make({"host_fraction": 0.5, "chunk_bytes": "16KiB"}, shapes=shapes)
    steps(params, optimizer, range(2))
    assert same(result(params, optimizer), after(range(2), shapes=shapes))


def odd_params(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in [(50, 30), (40, 80), (), (0, 5)]]
    values[0], values[1] = values[0].t(), values[1][:, ::2]  # another order in memory, gaps in memory
    return [nn.Parameter(value) for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_odd_parameters(dtype: torch.dtype) -> None:
    """Not contiguous, with gaps, a scalar, one without elements; some without a gradient now and then."""

    def live(config: dict[str, Any]) -> list[torch.Tensor]:
        params = odd_params(dtype)
        optimizer = offstage.offload(torch.optim.AdamW(params, lr=0.01), min_bytes=0, chunk_bytes="16KiB", **config)
        generator = torch.Generator().manual_seed(1)
        for step in range(5):
            for number, param in enumerate(params):
                gradient = torch.randn(param.shape, generator=generator).to(DEVICE, dtype)
                param.grad = None if (number + step) % 3 == 0 else gradient
            optimizer.step()
        return result(params, optimizer)

    assert same(live(WHERE["host"]), live(WHERE["resident"]))


# State


@pytest.mark.parametrize(
    ("source", "target", "masters"),
    [
        ("host", "resident", "split"),
        ("resident", "host", "fp32"),
        ("host", "streamed", "fp32"),
        ("streamed", "host", "split"),
        ("mixed", "host", "split"),
    ],
)
def test_state_goes_from_place_to_place(source: str, target: str, masters: str) -> None:
    formats = {"master_weights": masters}
    first_params, first = make(WHERE[source] | formats, torch.bfloat16)
    steps(first_params, first, range(3))
    params, optimizer = make(WHERE[target] | formats, torch.bfloat16)
    steps(params, optimizer, [9])  # it has state of its own
    copy_weights(params, first_params)
    optimizer.load_state_dict(first.state_dict())
    steps(params, optimizer, range(3, 5))
    assert same(result(params, optimizer), after(range(5), dtype=torch.bfloat16, config=formats))


def test_state_goes_to_plain_torch_and_back() -> None:
    plain_params = make_params()
    plain_one = torch.optim.AdamW(plain_params, lr=0.01, weight_decay=0.1, fused=True)
    params, optimizer = make(WHERE["host"])
    steps(params, optimizer, range(2))
    copy_weights(plain_params, params)
    plain_one.load_state_dict(optimizer.state_dict())
    steps(plain_params, plain_one, range(2, 4))
    copy_weights(params, plain_params)
    optimizer.load_state_dict(plain_one.state_dict())
    steps(params, optimizer, range(4, 6))
    assert same(result(params, optimizer)[: len(params)], after(range(6))[: len(params)])


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_a_weight_that_someone_else_wrote_wins(masters: str, caplog: pytest.LogCaptureFixture) -> None:
    def live(config: dict[str, Any]) -> tuple[offstage.OffloadedOptimizer, list[torch.Tensor]]:
        params, optimizer = make(config | {"master_weights": masters}, torch.bfloat16)
        steps(params, optimizer, range(2))
        params[3].data.fill_(33.25)
        steps(params, optimizer, range(2, 5))
        return optimizer, result(params, optimizer)

    with caplog.at_level(logging.WARNING, "offstage"):
        optimizer, got = live(WHERE["host"])
    assert optimizer.receipt().weights_written_by_others == 300 * 100
    assert len([record for record in caplog.records if "written by someone else" in record.getMessage()]) == 1
    assert same(got, live(WHERE["resident"])[1])


# Other optimizer classes


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.AdamW, {"capturable": True}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_classes_have_the_bits_of_the_class_on_the_host(cls: Any, options: dict[str, Any]) -> None:
    params = make_params()
    inner = cls(params, **options)
    optimizer = offstage.offload(inner, min_bytes=0, chunk_bytes="64KiB", update_on="host", rule="torch")
    theirs = [nn.Parameter(param.detach().cpu()) for param in params]
    other = cls(theirs, **{name: value for name, value in options.items() if name != "capturable"})
    steps(params, optimizer, range(5))
    steps(theirs, other, range(5))
    assert same(result(params, optimizer), result(theirs, other))


def test_a_class_updates_on_both_sides_at_once() -> None:
    """The host's half has the bits of the class on the host, the other half those of the class on the device."""
    params = make_params(shapes=((64, 64),) * 24)
    optimizer = offstage.offload(torch.optim.NAdam(params), min_bytes=0, chunk_bytes="16KiB", host_fraction=0.5)
    on_host = [placement is Placement.HOST for placement in optimizer.plan.placements]
    made = make_params(shapes=((64, 64),) * 24)
    theirs = [nn.Parameter(p.detach().cpu()) if there else p for p, there in zip(made, on_host, strict=True)]
    others = [torch.optim.NAdam([param]) for param in theirs]
    for number in range(5):
        steps(params, optimizer, [number])
        set_gradients(theirs, number)
        for other in others:
            other.step()
    assert any(on_host)
    assert same([param.detach().cpu() for param in params], [param.detach().cpu() for param in theirs])


# Failing and ending


def fail_once(optimizer: offstage.OffloadedOptimizer, at: int) -> Callable[[], None]:
    """Make one slice of the next step raise. Returns what puts the rule right again."""
    slices_of, calls = runtime_of(optimizer).rule.slices, []

    def fail() -> None:
        raise ZeroDivisionError("in a slice")

    def slices(shares: Any) -> list[Callable[[], None]]:
        calls.append(1)
        return [fail, *slices_of(shares)] if len(calls) == at else slices_of(shares)

    runtime_of(optimizer).rule.slices = slices
    return lambda: setattr(runtime_of(optimizer).rule, "slices", slices_of)


@pytest.mark.parametrize("config", [WHERE["host"], {"host_fraction": 0.5}], ids=["host", "mixed"])
def test_a_slice_that_fails_loses_the_step(config: dict[str, Any]) -> None:
    params, optimizer = make(config)
    steps(params, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [param.detach().clone() for param in params]
    repair = fail_once(optimizer, at=2)
    with pytest.raises(StepLostError, match="in a slice"):
        steps(params, optimizer, [2])
    repair()
    with pytest.raises(StepLostError):
        optimizer.state_dict()
    copy_weights(params, weights)
    optimizer.load_state_dict(saved)
    steps(params, optimizer, range(2, 4))
    assert same(result(params, optimizer), after(range(4)))


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Any]) -> None:
    for x, gradient in data:
        model(x).backward(gradient)
        end_step(optimizer)


def test_a_slice_that_fails_under_overlap_is_told_in_the_next_forward() -> None:
    data = batches(SMALL, DEVICE, 5)
    model = build(SMALL, DEVICE)
    optimizer = offloaded(model, SMALL, {"overlap_forward": True, "update_on": "host"})
    iterate(model, optimizer, data[:2])
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    repair = fail_once(optimizer, at=1)
    with pytest.raises(StepLostError, match="in a slice"):
        iterate(model, optimizer, data[2:4])
    repair()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    iterate(model, optimizer, data[2:])
    reference_model = build(SMALL, DEVICE)
    reference = offloaded(reference_model, SMALL, {"fraction": 0.0})
    iterate(reference_model, reference, data)
    optimizer.synchronize()
    ours, theirs = list(model.parameters()), list(reference_model.parameters())
    assert same(result(ours, optimizer), result(theirs, reference))


@pytest.mark.parametrize("how", ["close", "drop"])
def test_work_under_way_is_finished_first(how: str) -> None:
    data = batches(SMALL, DEVICE, 3)
    model = build(SMALL, DEVICE)
    with delayed_lanes(Lane.HOST):
        optimizer = offloaded(model, SMALL, {"overlap_forward": True, "update_on": "host"})
    iterate(model, optimizer, data)
    if how == "close":
        optimizer.close()
    del optimizer
    gc.collect()
    torch.cuda.synchronize()
    reference_model = build(SMALL, DEVICE)
    reference = offloaded(reference_model, SMALL, {"fraction": 0.0})
    iterate(reference_model, reference, data)
    ours, theirs = ([param.detach().cpu() for param in one.parameters()] for one in (model, reference_model))
    assert same(ours, theirs)


BUILD = """
import torch, offstage
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, device="cuda") for _ in range(12)))
optimizer = offstage.offload(
    torch.optim.AdamW(model.parameters()), model, chunk_bytes="4MiB", host_fraction=0.7, overlap_forward=True
)
for _ in range(3):
    model(torch.ones(2, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENDS = {"exit": "", "drop": "import gc\ndel optimizer\ngc.collect()\n", "an exception": "raise KeyboardInterrupt\n"}


def test_the_interpreter_ends_with_work_under_way() -> None:
    started = {
        end: subprocess.Popen([sys.executable, "-c", textwrap.dedent(BUILD) + code], stderr=subprocess.PIPE, text=True)
        for end, code in ENDS.items()
    }
    for end, process in started.items():
        errors = process.communicate(timeout=120)[1]
        if end == "an exception":
            assert errors.strip().endswith("KeyboardInterrupt")
            assert "offstage" not in errors
        else:
            assert (process.returncode, errors) == (0, ""), end


def test_a_forked_child_does_not_disturb_host_threads() -> None:
    params, optimizer = make(WHERE["host"])
    steps(params, optimizer, range(2))
    child = os.fork()
    if child == 0:
        del optimizer
        gc.collect()
        os._exit(0)
    steps(params, optimizer, range(2, 5))
    assert os.waitpid(child, 0)[1] == 0
    assert same(result(params, optimizer), after(range(5)))


# Steady state


def resident_host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("config", [{"update_on": "host"}, {"host_fraction": 0.5}], ids=["host", "mixed"])
def test_nothing_grows(config: dict[str, Any]) -> None:
    """Neither device nor host memory, nor threads, over 30 iterations."""
    data = batches(SMALL, DEVICE, 40)
    model = build(SMALL, DEVICE)
    optimizer = offloaded(model, SMALL, {"overlap_forward": True, "master_weights": "split", **config})
    iterate(model, optimizer, data[:10])
    optimizer.synchronize()
    torch.cuda.synchronize()
    device, reserved, host = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident_host_bytes()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    threads = len(os.listdir("/proc/self/task"))
    iterate(model, optimizer, data[10:])
    optimizer.synchronize()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == device
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) <= pinned + 64 * 1024
    assert resident_host_bytes() - host < 16 * 2**20
    assert len(os.listdir("/proc/self/task")) == threads


def test_step_returns_before_the_host_has_updated() -> None:
    """With `overlap_forward` step() does not wait, however long the host takes."""
    data = batches(SMALL, DEVICE, 4)
    model = build(SMALL, DEVICE)
    optimizer = offloaded(model, SMALL, {"overlap_forward": True, "update_on": "host", "threads": 2})
    iterate(model, optimizer, data[:3])
    optimizer.synchronize()
    slices_of = runtime_of(optimizer).rule.slices

    def late(piece: Callable[[], None]) -> None:
        time.sleep(0.1)
        piece()

    runtime_of(optimizer).rule.slices = lambda shares: [functools.partial(late, piece) for piece in slices_of(shares)]
    model(data[3][0]).backward(data[3][1])
    began = time.perf_counter()
    optimizer.step()
    returned = time.perf_counter() - began
    optimizer.synchronize()
    assert returned < 0.1
    assert time.perf_counter() - began > 0.1


# Streams and graphs


@pytest.mark.parametrize("step_too", [False, True])
def test_training_on_another_stream(step_too: bool) -> None:
    config = {**SETTINGS["update_in_backward, overlap_forward"], "master_weights": "split", "host_fraction": 0.5}
    for lane in (Lane.GRADIENTS_DOWN, Lane.WEIGHTS_UP):
        with delayed_lanes(lane):
            run = run_gates(config, where=Elsewhere(step_too=step_too))
        assert_same(run, plain())


def test_gradients_may_be_freed_and_overwritten_at_once() -> None:
    """Each step from another stream; the gradients' memory is overwritten right after step()."""

    def live(config: dict[str, Any]) -> list[torch.Tensor]:
        params, optimizer = make(config)
        steps_on_three_streams(params, optimizer, 9)
        return result(params, optimizer)

    with use_lanes(lambda device: DelayedLanes(device, Lane.GRADIENTS_DOWN)):
        ours = live({"host_fraction": 0.5})
    assert same(ours, live(WHERE["resident"]))


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_graph_replays_give_the_bits_of_the_plain_loop(overlap_forward: bool) -> None:
    """Forward and backward captured after some steps and replayed; the weights stay at their addresses."""
    data = batches(SMALL, DEVICE, 8)

    def live(config: dict[str, Any], *, captured: bool) -> list[torch.Tensor]:
        model = build(SMALL, DEVICE)
        optimizer = offloaded(model, SMALL, config)
        iterate(model, optimizer, data[:3])
        x, gradient = (tensor.clone() for tensor in data[0])
        if captured:
            optimizer.synchronize()
            gc.collect()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(x).backward(gradient)
        for batch in data[3:]:
            x.copy_(batch[0])
            gradient.copy_(batch[1])
            if captured:
                graph.replay()
            else:
                optimizer.zero_grad()
                model(x).backward(gradient)
            optimizer.step()
        return result(list(model.parameters()), optimizer)

    ours = live({"host_fraction": 0.5, "overlap_forward": overlap_forward}, captured=True)
    assert same(ours, live({"fraction": 0.0}, captured=False))


def test_a_step_that_the_scaler_skips_moves_nothing() -> None:
    def live(config: dict[str, Any]) -> list[torch.Tensor]:
        params, optimizer = make(config)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                value = torch.randn(param.shape, generator=generator).to(DEVICE)
                scaler.scale((param * value).sum() * (torch.inf if step == 2 else 1.0)).backward()
            moved = optimizer.receipt().total_bytes_stored
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if config["fraction"] > 0:
                assert (optimizer.receipt().total_bytes_stored > moved) == (step != 2)
        assert optimizer.receipt().steps == 3
        return result(params, optimizer)

    assert same(live({"update_on": "host", "fraction": 1.0}), live({"fraction": 0.0}))
