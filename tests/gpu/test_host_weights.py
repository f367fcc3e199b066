# SPDX-License-Identifier: Apache-2.0
"""Weights that live on the host, on real streams: the same bits in every mode, nothing unordered, bounded memory."""

import functools
from typing import Any

import pytest
import torch

import offstage
from benchmarks.overlap_bits import IN_BACKWARD, MASTERS, Checked, Run, delayed_lanes
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from tests.support.gates import Elsewhere, assert_same, no_synchronisation, run_gates

pytestmark = pytest.mark.usefixtures("some_layers_are_late")

MODES: dict[str, dict[str, Any]] = {
    "in step": {},
    "under forward": {"overlap_forward": True},
    "in backward": {"update_in_backward": True},
    "in backward and under forward": IN_BACKWARD,
}
LANES = (Lane.FETCH, Lane.UPDATE, Lane.STORE, Lane.WEIGHTS_UP, Lane.CALLER)
BY_CPU = {"host_fraction": 0.5}


def host_weights(
    mode: str, masters: str = "split", clip: str = "none", config: dict[str, Any] | None = None, **more: Any
) -> Run:
    settings = {**MODES[mode], "master_weights": masters, "weights": "host", **(config or {})}
    return run_gates(settings, clip=clip, **more)


@functools.cache
def plain(clip: str = "none", infinite_step: int | None = None) -> Run:
    return run_gates({"master_weights": "fp32"}, clip=clip, infinite_step=infinite_step, clipped_by_torch=True)


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("clip", ["none", "never", "sometimes", "always"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_bits_of_plain_steps(mode: str, clip: str, masters: str) -> None:
    run = host_weights(mode, masters, clip)
    assert_same(run, plain(clip))
    early = "in backward" in mode
    assert (run.updated_in_backward > 0) == early
    assert (run.receipt.speculation_hits > 0) == (early and clip in ("never", "sometimes"))
    assert run.receipt.host_weight_bytes > 0
    assert run.receipt.moved.weights_up > run.receipt.moved.weights_down > 0


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("clip", ["none", "never", "sometimes", "always"])
@pytest.mark.parametrize("mode", MODES)
def test_layers_that_the_cpu_updates_have_the_same_bits(mode: str, clip: str, masters: str) -> None:
    run = host_weights(mode, masters, clip, BY_CPU)
    assert_same(run, plain(clip))
    assert run.receipt.host_update_ms is not None


@pytest.mark.parametrize("lane", [Lane.GRADIENTS_DOWN, Lane.WEIGHTS_UP, Lane.STORE], ids=lambda lane: lane.value)
@pytest.mark.parametrize("mode", MODES)
def test_delays_beside_layers_that_the_cpu_updates(mode: str, lane: Lane) -> None:
    with delayed_lanes(lane):
        run = host_weights(mode, clip="sometimes", config=BY_CPU)
    assert_same(run, plain("sometimes"))


@pytest.mark.parametrize("mode", MODES)
def test_the_checker_finds_nothing_beside_layers_that_the_cpu_updates(mode: str) -> None:
    lanes = Checked()
    with use_lanes(lanes):
        run = host_weights(mode, clip="sometimes", config=BY_CPU)
    assert_same(run, plain("sometimes"))


def test_gradients_of_other_formats_are_scaled_as_on_the_device() -> None:
    """The factor is fp32 where some gradients are; those in bf16 are multiplied by it as kernels of the device do."""

    def trained(**config: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 256), torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(4)]).bfloat16()
        ).cuda()
        settings = {"min_bytes": 0, "weights": "host", "overlap_forward": True, "master_weights": "split", **config}
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **settings)
        for number in range(6):
            x = torch.randn(8, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
            x = model[0](x).bfloat16()
            for layer in model[1]:
                x = x + layer(x)
            x.float().pow(2).mean().backward()
            optimizer.clip_grad_norm_(0.01)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return [param.detach().cpu().clone() for param in model.parameters()]

    expected, found = trained(), trained(**BY_CPU)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing(mode: str, checkpointing: str) -> None:
    assert_same(host_weights(mode, clip="sometimes", checkpointing=checkpointing), plain("sometimes"))


@pytest.mark.parametrize("mode", MODES)
def test_a_norm_that_is_not_finite_changes_nothing(mode: str) -> None:
    run = host_weights(mode, clip="sometimes", infinite_step=5)
    assert_same(run, plain("sometimes", infinite_step=5))


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.value)
@pytest.mark.parametrize("clip", ["none", "sometimes"])
@pytest.mark.parametrize("mode", MODES)
def test_delays_change_nothing(mode: str, clip: str, lane: Lane) -> None:
    with delayed_lanes(lane):
        run = host_weights(mode, clip=clip, delayed=lane is Lane.CALLER)
    assert_same(run, plain(clip))


@pytest.mark.parametrize("clip", ["none", "sometimes"])
@pytest.mark.parametrize("mode", MODES)
def test_the_checker_finds_nothing_on_real_streams(mode: str, clip: str) -> None:
    lanes = Checked()
    with use_lanes(lanes):
        run = host_weights(mode, clip=clip)
    assert lanes.accesses > 1000
    assert_same(run, plain(clip))


@pytest.mark.parametrize("step_too", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_loop_on_a_stream_of_its_own(mode: str, step_too: bool) -> None:
    assert_same(host_weights(mode, clip="sometimes", where=Elsewhere(step_too=step_too)), plain("sometimes"))


def test_the_norm_has_the_bits_of_torch() -> None:
    """Norms of gradients that have left were taken before they left."""
    expected = plain("sometimes").norms
    for mode in MODES:
        found = host_weights(mode, clip="sometimes").norms
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_host_does_not_wait_in_forward_and_backward() -> None:
    """After the first steps, in which memory is pinned."""
    from benchmarks.overlap_bits import SMALL, batches, build, offloaded

    model = build(SMALL, "cuda", "non-reentrant")
    optimizer = offloaded(model, SMALL, {**IN_BACKWARD, "master_weights": "split", "weights": "host"})
    for number, (x, gradient) in enumerate(batches(SMALL, "cuda", 8)):
        if number < 5:
            model(x).backward(gradient)
            optimizer.step()
        else:
            with no_synchronisation():
                model(x).backward(gradient)
                optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def test_the_doctors_trial() -> None:
    """With gradients that are assigned by hand, beside weights on the host."""
    from offstage.cli.doctor import trial

    assert trial(torch.device("cuda")).verdict == "fine"
