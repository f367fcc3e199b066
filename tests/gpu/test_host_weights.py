# SPDX-License-Identifier: Apache-2.0
"""Weights that live on the host, on real streams: the same bits in every mode, nothing unordered, bounded memory."""

import functools
from typing import Any

import pytest
import torch

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


def host_weights(mode: str, masters: str = "split", clip: str = "none", **more: Any) -> Run:
    return run_gates({**MODES[mode], "master_weights": masters, "weights": "host"}, clip=clip, **more)


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
