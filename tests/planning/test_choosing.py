# SPDX-License-Identifier: Apache-2.0
"""The planner of `fit`: what it chooses, against trying everything, and what must hold of every choice."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.planning.choices import Choice
from offstage.planning.choosing import Limits, all_settings, choose, least_memory, predict
from offstage.planning.fit_plan import FitPlan, plan_job
from offstage.planning.footprint import footprint
from offstage.planning.job import Job, Setting
from offstage.planning.loop import LayerLoad, Loop
from offstage.planning.sizes import ParamSize
from offstage.planning.timeline import iteration_ms
from tests.support.machines import machine as machine_with

MIB = 1024**2
PLENTY = 1 << 60


def sizes_of(num_layers: int, layer_mib: int = 8, *, head_mib: int = 4) -> tuple[ParamSize, ...]:
    """An embedding, layers of two weights each, a head: fp32 with two moments."""

    def size(name: str, mib: int, layer: int | None) -> ParamSize:
        weight = mib * MIB
        return ParamSize(name, "d", 2 * weight, 2 * weight, True, numel=weight // 4, weight_bytes=weight, layer=layer)

    layers = [size(f"layers.{n}.{k}", layer_mib // 2, n) for n in range(num_layers) for k in "ab"]
    return (size("embed", head_mib, None), *layers, size("head", head_mib, None))


def job_with(num_layers: int = 4, *, clips: bool = False, micro_batches: int = 1, link: float = 10.0, **loads) -> Job:
    layer = LayerLoad(
        **(
            {
                "forward_ms": 1.0,
                "backward_ms": 2.0,
                "saved_bytes": 16 * MIB,
                "input_bytes": 2 * MIB,
                "working_bytes": 6 * MIB,
            }
            | loads
        )
    )
    loop = Loop(
        layers=(layer,) * num_layers,
        front_ms=0.1,
        turn_ms=0.5,
        end_ms=0.1,
        turn_bytes=8 * MIB,
        base_bytes=MIB,
        clips=clips,
        micro_batches=micro_batches,
    )
    machine = machine_with(
        link_up_gb_per_s=link,
        link_down_gb_per_s=link,
        link_duplex_gb_per_s=link,
        device_gb_per_s=1000.0,
        host_update_gb_per_s={4: 30.0},
    )
    config = OffloadConfig(min_bytes="64KiB", chunk_bytes="1MiB")
    return Job(sizes_of(num_layers), loop, machine, config)


jobs = st.builds(
    job_with,
    num_layers=st.integers(1, 4),
    clips=st.booleans(),
    micro_batches=st.integers(1, 3),
    link=st.sampled_from([2.0, 10.0, 60.0]),
    forward_ms=st.sampled_from([0.05, 1.0, 8.0]),
    saved_bytes=st.sampled_from([0, 3 * MIB, 40 * MIB]),
    can_recompute=st.booleans(),
)


def smallest(job: Job) -> int:
    return least_memory(job, Limits(PLENTY, PLENTY)).device_bytes


def largest(job: Job) -> int:
    return footprint(job, Setting((Choice.KEEP,) * job.num_layers, job.most_resident)).device


@settings(max_examples=25, deadline=None)
@given(jobs, st.floats(0.0, 1.1))
def test_the_search_finds_what_trying_everything_finds(job, share):
    limits = Limits(int(smallest(job) + share * (largest(job) - smallest(job))), PLENTY)
    fitting = [one for one in all_settings(job, limits) if not one.over(limits)]
    found = choose(job, limits)
    if not fitting:
        assert found is None or not found.over(limits)
        return
    assert found is not None
    assert not found.over(limits)
    best = min(one.iteration_ms * (1.03 if one.setting.host_share else 1.0) for one in fitting)
    assert found.iteration_ms <= 1.01 * best


@settings(max_examples=40, deadline=None)
@given(jobs, st.lists(st.floats(0.0, 1.2), min_size=2, max_size=2))
def test_more_memory_is_never_slower(job, shares):
    low, high = sorted(shares)
    span = largest(job) - smallest(job)
    less, more = (choose(job, Limits(int(smallest(job) + share * span), PLENTY)) for share in (low, high))
    if less is not None:
        assert more is not None
        assert more.iteration_ms <= 1.03 * less.iteration_ms


@settings(max_examples=40, deadline=None)
@given(jobs, st.data())
def test_a_setting_takes_no_less_than_its_compute(job, data):
    choices = tuple(data.draw(st.sampled_from(list(Choice))) for _ in range(job.num_layers))
    setting = Setting(
        choices,
        resident=data.draw(st.integers(0, job.most_resident)),
        hosted=data.draw(st.integers(0, job.num_layers)),
        overlap_forward=data.draw(st.booleans()),
        update_in_backward=data.draw(st.booleans()),
    )
    again = sum(
        layer.forward_ms for layer, one in zip(job.loop.layers, choices, strict=True) if one is Choice.RECOMPUTE
    )
    took = iteration_ms(job, setting)
    assert took >= job.loop.compute_ms + job.loop.micro_batches * again - 1e-9
    assert took == iteration_ms(job, setting)
    if not setting.hosted:  # with more state on the device nothing is slower, and less is on the host
        more = dataclasses.replace(setting, resident=job.most_resident)
        on_device_ms = sum(2 * size.state_bytes + 3 * size.weight_bytes for size in job.sizes) / 1e9
        assert iteration_ms(job, more) <= took + on_device_ms  # which step() does not hide
        assert footprint(job, more).host <= footprint(job, setting).host


@pytest.mark.parametrize("cue", ["overlap_forward", "update_in_backward"])
def test_a_cue_hides_transfers(cue):
    job = job_with()
    plain = Setting((Choice.KEEP,) * 4)
    assert iteration_ms(job, dataclasses.replace(plain, **{cue: True})) < iteration_ms(job, plain)


def test_updates_in_step_take_what_the_link_takes():
    job = job_with(link=1.0)
    took = iteration_ms(job, Setting((Choice.KEEP,) * 4))
    state = sum(size.state_bytes for size in job.sizes)
    assert took == pytest.approx(job.loop.compute_ms + state / 1e6, rel=0.05)


def test_offloaded_tensors_are_hidden_by_a_fast_link_only():
    plain, away = (Setting((one,) * 4, resident=10) for one in (Choice.KEEP, Choice.OFFLOAD))
    fast, slow = job_with(link=200.0), job_with(link=2.0)
    assert iteration_ms(fast, away) == pytest.approx(iteration_ms(fast, plain), rel=0.05)
    assert iteration_ms(slow, away) > 1.5 * iteration_ms(slow, plain)


def test_memory_is_counted_by_hand():
    job = job_with()
    weights = sum(size.weight_bytes for size in job.sizes)
    state = sum(size.state_bytes for size in job.sizes)
    everything = footprint(job, Setting((Choice.KEEP,) * 4, job.most_resident))
    # The largest moment is the turn or the last layer's backward: all have saved, and the head has its gradient.
    saved, gradients = 4 * 16 * MIB, 4 * MIB
    turn = saved + 8 * MIB + gradients
    last = saved + 6 * MIB + gradients + 8 * MIB
    assert everything.device == MIB + weights + state + max(turn, last)
    assert everything.host == 0
    hosted = footprint(job, Setting((Choice.RECOMPUTE,) * 4, hosted=4, update_in_backward=True))
    assert hosted.host == state + 4 * 8 * MIB + 4 * 2 * MIB
    slots, copies = 3 * MIB, 4 * 8 * MIB
    inside = 16 * MIB + 2 * MIB + 6 * MIB  # a layer is remade, the next one's input is on its way
    # Gradients of the layer itself, and of all others those whose updates are under way, or begin together.
    waiting = 8 * MIB + (0.25 + MIB / state) * 40 * MIB
    assert hosted.device == pytest.approx(MIB + 8 * MIB + copies + slots + inside + waiting, rel=1e-3)


@pytest.mark.parametrize(("hosted", "there"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 4)])
def test_weights_that_travel_are_there_one_layer_ahead_and_two_behind(hosted, there):
    """A layer that is recomputed has all in its backward, with what only a second forward needs. Frozen here."""
    job = job_with(6, remaking_bytes=5 * MIB)
    frozen = [size if size.name == "head" else dataclasses.replace(size, state_bytes=0) for size in job.sizes]
    job = dataclasses.replace(job, sizes=tuple(frozen))
    weights = (4 + 4 + (6 - hosted) * 8 + there * 8) * MIB
    inside = (16 + 6 + 5 + 2) * MIB
    slots, gradient = 3 * MIB, 4 * MIB
    found = footprint(job, Setting((Choice.RECOMPUTE,) * 6, hosted=hosted)).device
    assert found == MIB + weights + inside + slots + gradient


@pytest.mark.parametrize("clips", [False, True])
def test_a_plan_comes_back_from_json(clips):
    job = job_with(clips=clips)
    plan = plan_job(job, Limits(smallest(job) + 20 * MIB, PLENTY))
    again = FitPlan.from_json(plan.to_json())
    assert again == plan
    assert (again.considered, again.notes) == (plan.considered, plan.notes)
    assert str(again) == str(plan)
    assert plan_job(job, plan.limits) == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"loop": 3}', "nonsense"])
def test_json_that_is_no_plan(text):
    with pytest.raises(ConfigError, match=r"FitPlan\.from_json expects what FitPlan\.to_json wrote"):
        FitPlan.from_json(text)


def test_what_does_not_fit_is_refused_with_numbers():
    job = job_with()
    with pytest.raises(ConfigError, match=r"device_peak=10\.0 MiB is not enough: .* takes [\d.]+ MiB on the device"):
        plan_job(job, Limits(10 * MIB, PLENTY))
    need = smallest(job)
    with pytest.raises(ConfigError, match=r"The host has 1\.0 MiB for this job, which takes [\d.]+ MiB there"):
        plan_job(job, Limits(need + MIB, MIB))


def test_gradients_that_are_read_cost_time_and_the_plan_says_so():
    job = job_with(8, link=8.0)
    loop = dataclasses.replace(job.loop, reads_gradients=True)
    read = dataclasses.replace(job, loop=loop, may_update_on_host=False)
    limits = Limits(smallest(job) + 30 * MIB, PLENTY)
    plan = plan_job(read, limits)
    assert not plan.setting.update_in_backward
    (note,) = plan.notes
    assert "gradients are used between backward and step()" in note
    assert "use optimizer.clip_grad_norm_" in note


def test_a_larger_batch_scales_what_grows_with_it():
    loop = job_with().loop
    twice = loop.scaled(2.0)
    assert twice.compute_ms == pytest.approx(2 * loop.compute_ms)
    assert [layer.saved_bytes for layer in twice.layers] == [2 * layer.saved_bytes for layer in loop.layers]
    assert twice.base_bytes == loop.base_bytes
    assert loop.scaled(1.0) is loop


def test_state_that_may_not_move_streams():
    job = dataclasses.replace(job_with(), may_move_state=False)
    found = choose(job, Limits(PLENTY, PLENTY))
    assert found is not None
    assert (found.setting.resident, found.setting.host_share) == (0, 0.0)


def test_a_measured_kind_is_corrected_and_others_by_half():
    job = job_with()
    plain, early = Setting((Choice.KEEP,) * 4), Setting((Choice.KEEP,) * 4, update_in_backward=True)
    slower = dataclasses.replace(job, slowdowns={plain.kind: 2.0})
    assert iteration_ms(slower, plain) == pytest.approx(2 * iteration_ms(job, plain))
    assert iteration_ms(slower, early) == pytest.approx(1.5 * iteration_ms(job, early))
    both = dataclasses.replace(job, slowdowns={plain.kind: 2.0, early.kind: 1.0})
    assert predict(both, early).iteration_ms == pytest.approx(iteration_ms(job, early))
