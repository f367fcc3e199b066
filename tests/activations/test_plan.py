# SPDX-License-Identifier: Apache-2.0
"""Plans for activations: what is promised fits, nothing that was rejected is faster, and refusals have numbers."""

import dataclasses
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offstage.activations import plan as activation_plan
from offstage.activations.plan import Choice, LayerFacts, choose, spread
from offstage.config import parse_size
from offstage.errors import ConfigError

MB = 1_000_000
GB_PER_S = 50.0


@st.composite
def layer_facts(draw):
    saved = draw(st.integers(0, 400)) * MB
    return LayerFacts(
        forward_ms=draw(st.floats(0.01, 20)),
        saved_bytes=saved,
        input_bytes=saved * draw(st.integers(0, 100)) // 100,
        before_backward_bytes=draw(st.integers(0, 2000)) * MB,
        remade_bytes=saved * draw(st.sampled_from([0, 0, 30, 100])) // 100,
        remade_ms=draw(st.floats(0, 2)),
    )


MODELS = st.lists(layer_facts(), min_size=1, max_size=7)
PEAKS = st.integers(1, 5000).map(lambda number: number * MB)
RATES = st.floats(0.5, 200)


def chosen(layers, peak, rate, keep_last, in_flight):
    """The plan, or `None` where it is refused."""
    try:
        return choose(layers, device_peak=peak, link_gb_per_s=rate, keep_last=keep_last, in_flight=in_flight)
    except ConfigError:
        return None


def walked(layers, choices, in_flight):
    """The most that the device holds while backward walks through the layers, told step by step."""
    stays, holds = {}, {}
    for number, (layer, choice) in enumerate(zip(layers, choices, strict=True)):
        if choice in (Choice.KEEP, Choice.REMAKE):
            stays[number] = layer.saved_bytes - (layer.remade_bytes if choice is Choice.REMAKE else 0)
        holds[number] = in_flight * stays.get(number, 0)
    most = 0
    for number in reversed(range(len(layers))):
        layer = layers[number]
        if number in stays:
            holds[number] += layer.saved_bytes - stays[number]  # remade
        else:
            holds[number] = layer.saved_bytes  # back, or computed again
        following = next((one for one in reversed(range(number)) if one not in stays), None)
        if following is not None:  # double buffering: on its way back already
            sent_for = layers[following]
            away = choices[following] is Choice.OFFLOAD
            holds[following] = sent_for.saved_bytes - sent_for.remade_bytes if away else sent_for.input_bytes
        most = max(most, layer.before_backward_bytes + sum(holds.values()))
        holds[number] -= layer.saved_bytes
    return most


def cost(layers, choices, rate):
    """Milliseconds over keeping everything: what is computed again, and copies that nothing hides."""
    forward = math.fsum(layer.forward_ms for layer in layers)
    again = math.fsum(one.forward_ms for one, choice in zip(layers, choices, strict=True) if choice is Choice.RECOMPUTE)
    moved = 0
    for layer, choice in zip(layers, choices, strict=True):
        moved += {Choice.OFFLOAD: layer.saved_bytes - layer.remade_bytes, Choice.RECOMPUTE: layer.input_bytes}.get(
            choice, 0
        )
        again += layer.remade_ms if choice in (Choice.OFFLOAD, Choice.REMAKE) else 0.0
    copies = moved / (rate * 1e6)
    return again + max(0.0, copies - forward) + max(0.0, copies - (2 * forward + again))


@settings(max_examples=60, deadline=None)
@given(MODELS, PEAKS, RATES, st.integers(0, 3), st.integers(1, 4))
def test_a_plan_keeps_its_promise(layers, peak, rate, keep_last, in_flight):
    plan = chosen(layers, peak, rate, keep_last, in_flight)
    if plan is not None:
        assert walked(layers, plan.choices, in_flight) <= plan.peak_bytes <= peak
        assert plan.added_ms == pytest.approx(cost(layers, plan.choices, rate), abs=1e-6)
        assert len(plan.choices) == len(layers)
        assert all(choice is Choice.KEEP for choice in plan.choices[len(layers) - keep_last :][:keep_last])


@settings(max_examples=60, deadline=None)
@given(MODELS, PEAKS, RATES, st.integers(0, 2), st.integers(1, 3))
def test_nothing_that_was_rejected_is_faster(layers, peak, rate, keep_last, in_flight):
    plan = chosen(layers, peak, rate, keep_last, in_flight)
    for choices in activation_plan._mixes(layers, keep_last):
        other = activation_plan._predict(layers, choices, rate, in_flight)
        if other.peak_bytes <= peak:
            assert plan is not None, "refused, although this fits"
            assert plan.added_ms <= other.added_ms


@settings(max_examples=40, deadline=None)
@given(MODELS, RATES, st.integers(0, 2))
def test_more_room_is_never_slower_and_fewer_in_flight_neither(layers, rate, keep_last):
    least = None
    for peak in (500 * MB, 1000 * MB, 2000 * MB, 4000 * MB, 10**11):
        plans = [chosen(layers, peak, rate, keep_last, in_flight) for in_flight in (1, 2, 4)]
        costs = [math.inf if plan is None else plan.added_ms for plan in plans]
        assert costs == sorted(costs)
        assert least is None or costs[0] <= least
        least = costs[0]
    assert plans[0] is not None
    assert plans[0].added_ms == 0.0  # room for everything: nothing is slower than keeping


@settings(max_examples=60, deadline=None)
@given(MODELS, RATES, st.integers(0, 2), st.integers(1, 3))
def test_a_refusal_says_what_would_do(layers, rate, keep_last, in_flight):
    """The number in the message is enough; a little less is not."""
    with pytest.raises(ConfigError) as caught:
        choose(layers, device_peak=-1, link_gb_per_s=rate, keep_last=keep_last, in_flight=in_flight)
    message = str(caught.value)
    (size,) = re.findall(r"still ([\d.]+ [KMGT]?i?B)\.", message)
    enough = parse_size(size.replace(" ", ""), "device_peak")
    plan = chosen(layers, enough, rate, keep_last, in_flight)
    assert plan is not None
    least = min(
        activation_plan._predict(layers, choices, rate, in_flight).peak_bytes
        for choices in activation_plan._mixes(layers, keep_last)
    )
    assert chosen(layers, least, rate, keep_last, in_flight) is not None
    assert chosen(layers, least - 1, rate, keep_last, in_flight) is None
    for word in ("device_peak", "recomputed", "offloaded", "Raise device_peak"):
        assert word in message


UNIFORM = [LayerFacts(10.0, 1000 * MB, 50 * MB, 5000 * MB)] * 8
"""Forward takes 80 ms, in which the link carries 4 GB: four of eight layers."""


def plan_of(peak_mb, rate=GB_PER_S, keep_last=1, layers=UNIFORM, **others):
    return choose(layers, device_peak=int(peak_mb * MB), link_gb_per_s=rate, keep_last=keep_last, **others)


def test_from_keeping_to_offloading_to_recomputing():
    """As the peak shrinks: everything stays, then what the link carries leaves, then layers are recomputed too."""
    everything = plan_of(20_000)
    assert everything.choices == (Choice.KEEP,) * 8
    assert everything.added_ms == 0
    some = plan_of(12_100)
    assert some.count(Choice.OFFLOAD) > 0
    assert some.count(Choice.RECOMPUTE) == 0
    assert some.added_ms == 0
    tight = plan_of(8_500)
    assert tight.count(Choice.RECOMPUTE) > 0
    assert tight.added_ms > 0
    with pytest.raises(ConfigError, match=r"device_peak=.* is not enough"):
        plan_of(5_500)


def test_a_slow_link_recomputes_and_a_fast_one_offloads():
    slow, fast = plan_of(8_500, rate=1.0), plan_of(8_500, rate=500.0)
    assert slow.count(Choice.RECOMPUTE) > slow.count(Choice.OFFLOAD)
    assert fast.count(Choice.RECOMPUTE) == 0
    assert fast.count(Choice.OFFLOAD) > 0
    assert fast.added_ms == 0


GATED = [LayerFacts(10.0, 1000 * MB, 50 * MB, 5000 * MB, remade_bytes=300 * MB, remade_ms=0.4)] * 8
"""The same, of which a third is remade in no time."""


def test_what_is_made_again_is_neither_kept_nor_moved():
    """First what costs least: room for everything, then all but what is remade, then the link, then recomputing."""
    assert plan_of(20_000, layers=GATED).choices == (Choice.KEEP,) * 8
    little = plan_of(12_700, layers=GATED, rate=0.1)  # a link that carries next to nothing
    assert little.choices == (Choice.REMAKE,) * 7 + (Choice.KEEP,)
    assert little.added_ms == pytest.approx(7 * 0.4)
    assert "1 layer keeps, 7 remake, 0 offload, 0 recompute" in str(little)
    some, without = plan_of(9_000, layers=GATED), plan_of(9_000)
    assert some.count(Choice.OFFLOAD) > 4  # the link carries four of the others
    assert some.count(Choice.RECOMPUTE) < without.count(Choice.RECOMPUTE)
    assert some.added_ms < without.added_ms
    slowly = plan_of(12_700, layers=[dataclasses.replace(one, remade_ms=50.0) for one in GATED])
    assert slowly.count(Choice.REMAKE) == 0


def test_micro_batches_in_flight_take_room():
    """What is kept is kept for each of them; what is away is not there."""
    assert plan_of(14_000).count(Choice.KEEP) > plan_of(14_000, in_flight=4).count(Choice.KEEP)


def test_no_layers_and_one_layer():
    assert plan_of(1, layers=[]).choices == ()
    assert plan_of(20_000, layers=UNIFORM[:1]).choices == (Choice.KEEP,)
    assert plan_of(20_000, layers=UNIFORM[:2], keep_last=5).choices == (Choice.KEEP,) * 2


def test_a_plan_says_what_it_does_and_why():
    plan = plan_of(8_500)
    text = str(plan)
    counts = [plan.count(choice) for choice in (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE)]
    assert sum(counts) == 8
    for part in (
        f"{counts[0]} layers keep",
        f"{counts[1]} offload",
        f"{counts[2]} recompute",
        "predicted peak 7.",
        f"{plan.added_ms:.1f} ms added per iteration",
        "at 50 GB/s",
        "computed again",
    ):
        assert part in text
    assert "not hidden" in str(plan_of(8_500, rate=1.0))


@given(st.integers(1, 200).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_spread_is_even(numbers):
    count, total = numbers
    found = sorted(spread(count, total))
    assert len(found) == count
    assert all(0 <= number < total for number in found)
    gaps = [b - a for a, b in zip(found, [*found[1:], found[0] + total], strict=True)] if found else [0]
    assert max(gaps) - min(gaps) <= 1
