# SPDX-License-Identifier: Apache-2.0
"""What `fit` makes of the iterations that it watches: of layers whose tensors are remade, of a host that is slow."""

import dataclasses

import pytest
import torch

from offstage.fitting.watch import LoopWatch, _divide, _least, _without_host
from offstage.optimizer.optimizer import runtime_of
from offstage.planning.choices import Choice
from offstage.planning.choosing import predict
from offstage.planning.job import Job, Setting
from offstage.planning.loop import LayerLoad, Loop
from tests.support.simulated_jobs import GatedBlocks, Ran, Task, by_hand, device, fitting, job_of

KEEP, OFFLOAD, AGAIN = Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE
LAYERS, ROWS = 10, 1024
EARLY = {"overlap_forward": True, "update_in_backward": True}


def task(steps: int) -> Task:
    """Much is saved, and weights and state are small beside it."""
    return Task(
        steps=steps, layers=LAYERS, model=GatedBlocks, dtype=torch.bfloat16, clip="ours", rows=lambda step: ROWS
    )


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of(task(2).run(fitting("1GiB", master_weights="split"), device()))


def mostly_again(kept: int) -> tuple[Choice, ...]:
    return (AGAIN,) * (LAYERS - kept) + (KEEP,) * kept


SETTINGS = {
    "all is kept": lambda most: Setting(mostly_again(LAYERS), most),
    "all is recomputed": lambda most: Setting(mostly_again(0), most),
    "state streams": lambda most: Setting(mostly_again(0), 0, **EARLY),
    "weights on the host": lambda most: Setting(mostly_again(0), 0, LAYERS, **EARLY),
    "updates under forward": lambda most: Setting(mostly_again(0), 0, LAYERS, overlap_forward=True),
    # Gradients stay where activations were, and the layers before have theirs only while they are recomputed.
    "one layer is kept": lambda most: Setting(mostly_again(1), 0, LAYERS - 2, **EARLY),
    "three layers are kept": lambda most: Setting(mostly_again(3), 0, LAYERS - 2, **EARLY),
    "half is kept": lambda most: Setting(mostly_again(LAYERS // 2), 0, LAYERS - 2, **EARLY),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_peaks_are_as_predicted_before_anything_was_tried(job, name):
    setting = SETTINGS[name](job.most_resident)
    ran: Ran = task(5).run(by_hand(job, setting, master_weights="split"), device())
    ratio = predict(job, setting).device_bytes / ran.peaks[-1]
    assert 0.98 < ratio < 1.08, f"{ratio:.3f}"


def test_it_never_exceeds_a_limit_with_such_layers():
    for budget in (4_500_000, 6_000_000, 9_000_000):
        ran = task(12).run(fitting(budget, master_weights="split"), device())
        assert max(ran.peaks) <= budget, f"{ran.peaks} of {budget}: {ran.optimizer.fitted}"


def test_a_layer_that_offloads_for_the_first_time_does_not_show_its_backward():
    """It had taken 45 ms, three times as much as those that were recomputed: which did not come for nothing."""
    kinds, chosen = ["block"] * 4, [AGAIN, AGAIN, AGAIN, OFFLOAD]
    backward, again = _divide([13.6, 13.5, 13.7, 45.0], [4.0, 4.0, 4.0, 20.0], kinds, chosen)
    assert again == pytest.approx([4.0] * 4)
    assert backward == pytest.approx([9.6, 9.5, 9.7, 9.7])


def test_a_layer_that_shows_its_backward():
    kinds, chosen = ["block"] * 3, [AGAIN, AGAIN, OFFLOAD]
    backward, again = _divide([13.6, 13.6, 10.0], [4.0, 4.0, 4.2], kinds, chosen)
    assert backward == pytest.approx([10.0, 10.0, 10.0])
    assert again == pytest.approx([3.6] * 3)


def test_forwards_for_which_the_device_waited_are_not_what_it_takes():
    kinds, chosen = ["block"] * 3 + ["other"], [AGAIN, AGAIN, OFFLOAD, OFFLOAD]
    lasted, forward = [13.5, 13.8, 45.0, 7.0], [7.5, 4.1, 20.0, 5.0]
    found = _without_host(forward, [True, False, True, True], lasted, kinds, chosen)
    assert found == pytest.approx([4.5, 4.1, 4.5, 5.0])


def test_times_that_were_shorter_later():
    """Of a layer: its forward; its backward, where one of its kind kept all; both with a second forward."""
    slow = LayerLoad(forward_ms=8.0, backward_ms=12.0, again_ms=6.0)
    kept = _least(slow, 5.0, 10.0, None)
    assert (kept.forward_ms, kept.backward_ms, kept.again_ms) == (5.0, 10.0, 5.0)
    again = _least(slow, 5.0, 10.0, 14.0)
    assert (again.forward_ms, again.backward_ms, again.again_ms) == (5.0, 10.0, 4.0)
    alone_unknown = _least(slow, 5.0, None, 14.0)
    assert (alone_unknown.backward_ms, alone_unknown.again_ms) == (9.0, 5.0)
    longer = LayerLoad(forward_ms=4.0, backward_ms=8.0, again_ms=3.0)
    assert _least(longer, 5.0, 9.0, 14.0) == longer


def test_a_loop_that_was_watched_beside_a_slow_host_is_timed_again(monkeypatch):
    """What watching costs the host is seen as time of the layers. It is corrected when the first plan is tried."""
    loop = LoopWatch.loop

    def slow(watch: LoopWatch) -> Loop:
        found = loop(watch)
        layers = tuple(
            dataclasses.replace(
                layer, forward_ms=1.6 * layer.forward_ms, backward_ms=1.6 * layer.backward_ms, again_ms=0.0
            )
            for layer in found.layers
        )
        return dataclasses.replace(found, layers=layers)

    exact = task(12).run(fitting(9_000_000, master_weights="split"), device())
    monkeypatch.setattr(LoopWatch, "loop", slow)
    ran = task(12).run(fitting(9_000_000, master_weights="split"), device())
    mine, theirs = (runtime_of(one.optimizer).watcher.job for one in (ran, exact))
    assert mine.loop.compute_ms == pytest.approx(theirs.loop.compute_ms, rel=0.02)
    assert ran.times[-1] < 1.03 * exact.times[-1]
    assert all(0.8 < slowdown < 1.25 for slowdown in mine.slowdowns.values())


@pytest.mark.parametrize("budget", [4_500_000, "1GiB"])
def test_nothing_is_timed_when_it_has_settled(budget):
    ran = task(10).run(fitting(budget, master_weights="split"), device())
    watcher = runtime_of(ran.optimizer).watcher
    assert watcher._handle is None or watcher._handle.observer is None
    assert not watcher._is_timing
