# SPDX-License-Identifier: Apache-2.0
"""`fit` on a simulated device: within the limit in every iteration, nearly as fast as the best of all settings."""

import functools
from typing import NamedTuple

import pytest

from offstage.errors import ConfigError, OffstageError
from offstage.fitting.fitted import Stage
from offstage.optimizer.optimizer import runtime_of
from offstage.planning.choosing import Predicted, predict
from tests.support.simulated_jobs import ROWS, Ran, Task, all_by_hand, by_hand, device, fitting, job_of

SETTLED = 22
"""Iterations after which nothing is tried any more."""
BUDGETS = 20
LEAST = 1.1
"""The smallest budget over the smallest peak of all settings: nearer to it the job goes on as it began."""


class Measured(NamedTuple):
    """A setting made by hand."""

    ms: float
    """Of an iteration in a steady loop."""
    peak: int
    """Since the start."""
    predicted: Predicted


@functools.cache
def measured(clip: str | None) -> list[Measured]:
    """Every setting made by hand."""
    found = []
    job = job_of(Task(steps=3, clip=clip).run(fitting(1 << 30), device()))
    for setting in all_by_hand(job):
        try:
            ran = Task(steps=5, clip=clip).run(by_hand(job, setting), device())
        except OffstageError:  # what contradicts itself
            continue
        found.append(Measured(ran.times[-1], ran.peaks[-1], predict(job, setting)))
    return found


@pytest.mark.parametrize(("clip", "most_late"), [(None, 0), ("ours", 1)])
def test_it_is_as_fast_as_the_best_of_all_settings_and_within_the_limit(clip, most_late):
    """`most_late`: with clipping, the best setting for one of the budgets takes all but 1% of it: plans leave more."""
    rows = measured(clip)
    assert len(rows) > 100
    low, high = LEAST * min(row.peak for row in rows), max(row.peak for row in rows)
    late = []
    for number in range(BUDGETS):
        budget = int(low + (high - low) * number / (BUDGETS - 1))
        best = min(row.ms for row in rows if row.peak <= budget)
        ran = Task(steps=SETTLED + 3, clip=clip).run(fitting(budget), device())
        assert runtime_of(ran.optimizer).watcher.stage is Stage.SETTLED
        assert ran.peaks[-1] <= budget, f"{ran.peaks} of {budget}"
        took = ran.times[-1]
        if took > 1.03 * best:
            late.append(f"{budget}: {took / best:.3f} times the best of {len(rows)}\n{ran.optimizer.fitted}")
    assert len(late) <= most_late, "\n".join(late)


@pytest.mark.parametrize("clip", [None, "ours"])
def test_what_was_predicted_of_all_settings(clip):
    """Before anything of them was measured. `fit` never has the CPU update in backward."""
    for row in measured(clip):
        setting = row.predicted.setting
        if not (setting.host_share and setting.update_in_backward):
            assert 0.96 < row.predicted.device_bytes / row.peak < 1.18, setting
            assert 0.85 < row.predicted.iteration_ms / row.ms < 1.2, setting


def test_where_everything_fits_nothing_leaves():
    ran = Task(steps=8).run(fitting("1GiB"), device())
    plan = ran.optimizer.fitted
    assert plan.setting.host_share == plan.setting.hosted == 0
    assert plan.predicted.iteration_ms <= 1.01 * plan.loop.compute_ms + 0.01


def grown(device_peak: int, task: Task) -> Ran:
    ran = task.run(fitting(device_peak), device())
    assert max(ran.peaks) <= device_peak
    return ran


def test_longer_sequences_stay_under_the_limit():
    """1:4 in the middle: what would exceed the limit gives way before the first long forward."""
    long = Task(steps=20, rows=lambda step: ROWS if step < 10 else 4 * ROWS)
    short = Task(steps=10).run(fitting(1 << 30), device())
    ran = grown(int(1.2 * short.peaks[-1]), long)
    assert len(ran.times) == 20
    choices = ran.optimizer.fitted.setting.choices
    assert any(choice.value != "keep" for choice in choices)


def test_more_micro_batches_stay_under_the_limit():
    least = Task(steps=8).run(fitting(3_000_000), device())
    assert max(least.peaks) <= 3_000_000
    grown(3_000_000, Task(steps=14, micro_batches=3))


def test_a_slower_link_is_noticed():
    simulated = device()

    def rows(step: int) -> int:
        if step == 20:
            simulated.up_gb_per_s = simulated.down_gb_per_s = 0.5
        return ROWS

    ran = Task(steps=140, rows=rows).run(fitting(2_000_000), simulated)
    assert max(ran.peaks) <= 2_000_000
    machine = runtime_of(ran.optimizer).watcher.job.machine
    assert machine.link_duplex_gb_per_s == pytest.approx(0.5, rel=0.1)


def test_what_cannot_fit_is_refused_with_numbers_before_anything_moved():
    with pytest.raises(ConfigError, match=r"device_peak=97\.7 KiB is not enough: .* takes .* on the device"):
        Task(steps=1).run(fitting(100_000), device())


def test_what_activations_do_not_leave_room_for_is_refused_with_numbers():
    with pytest.raises(ConfigError, match=r"device_peak=1\.\d MiB is not enough"):
        Task(steps=4, rows=lambda step: 8 * ROWS).run(fitting(1_700_000), device())
