# SPDX-License-Identifier: Apache-2.0
"""Plans: fractions met to within one parameter, budgets kept, the same answer every time."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from offstage.config import OffloadConfig, Placement
from offstage.errors import ConfigError, OffloadIneffectiveError
from offstage.memory.arena import round_up
from offstage.planning.layout import make_layout
from offstage.planning.plan import plan_placements, refuse_idle
from offstage.planning.predict import HOST_CHUNK
from offstage.planning.sizes import ParamSize

SIZES = st.lists(st.integers(0, 5_000_000), min_size=1, max_size=40)


def sizes_of(numbers: list[int], splits: bool = True) -> list[ParamSize]:
    return [ParamSize(f"p{i}", "cpu", n, -(-n // 256) * 256, splits) for i, n in enumerate(numbers)]


@given(SIZES, st.floats(0.01, 1.0))
def test_fraction_is_met_to_within_one_parameter(numbers, fraction):
    plan = plan_placements(sizes_of(numbers), OffloadConfig(fraction=fraction, min_bytes=0))
    total, streamed = sum(numbers), plan.bytes_of(Placement.STREAMED)
    assert streamed >= fraction * total - 1e-6 * total
    assert streamed - fraction * total <= max(numbers)


@given(SIZES)
def test_off_is_off(numbers):
    plan = plan_placements(sizes_of(numbers), OffloadConfig(fraction=0.0))
    assert Placement.STREAMED not in plan.placements
    assert plan.device_bytes == sum(numbers)
    assert (plan.slots, plan.slot_bytes, plan.host_bytes) == (0, 0, 0)


@given(SIZES, st.integers(0, 20_000_000))
def test_device_budget_is_kept(numbers, budget):
    config = OffloadConfig(device_budget=budget, chunk_bytes=64 * 1024, slots=2, min_bytes=1000)
    small = sum(n for n in numbers if n < 1000)
    staged = sum(-(-n // 256) * 256 for n in numbers if n >= 1000)
    if sum(numbers) > budget and small + 2 * min(64 * 1024, staged) > budget:
        with pytest.raises(ConfigError, match="Raise it to"):
            plan_placements(sizes_of(numbers), config)
    else:
        assert plan_placements(sizes_of(numbers), config).device_bytes <= budget


@given(SIZES, st.integers(300_000, 20_000_000), st.integers(0, 5_000_000))
def test_more_budget_never_keeps_less(numbers, budget, more):
    assume(sum(n for n in numbers if n < 1000) < 100_000)

    def resident(size: int) -> int:
        config = OffloadConfig(device_budget=size, chunk_bytes=64 * 1024, slots=2, min_bytes=1000)
        return plan_placements(sizes_of(numbers), config).bytes_of(Placement.RESIDENT)

    assert resident(budget + more) >= resident(budget)


@given(SIZES, st.floats(0.0, 1.0))
def test_the_cpus_share_is_met_to_within_one_parameter(numbers, share):
    plan = plan_placements(sizes_of(numbers), OffloadConfig(host_fraction=share, min_bytes=0))
    on_host, total = plan.bytes_of(Placement.HOST), sum(numbers)
    assert abs(on_host - share * total) <= max(numbers)
    assert plan.bytes_of(Placement.RESIDENT) == 0
    assert plan.slots == (3 if Placement.STREAMED in plan.placements else 0)
    assert bool(plan.host_slots) == (Placement.HOST in plan.placements)


def test_the_cpus_share_is_spread_over_the_model():
    plan = plan_placements(sizes_of([100_000] * 8), OffloadConfig(host_fraction=0.5))
    assert [p.value for p in plan.placements] == ["host", "streamed"] * 4


def test_updates_on_the_host_need_no_slots_in_the_budget():
    config = OffloadConfig(update_on="host", device_budget=500_000, min_bytes=0)
    plan = plan_placements(sizes_of([250_000] * 4), config)
    assert plan.bytes_of(Placement.RESIDENT) == 500_000
    assert (plan.slots, plan.window, plan.device_bytes) == (0, 0, 500_000)
    same = OffloadConfig(host_fraction=1.0, device_budget=500_000, min_bytes=0, window="1GiB")
    assert plan_placements(sizes_of([250_000] * 4), same) == plan


def test_staging_on_the_host_holds_weights_and_gradients_of_a_chunk():
    params = [torch.empty(n, dtype=torch.bfloat16) for n in (700_000, 300_000)]
    sizes = [
        ParamSize(f"p{i}", "cpu", 12 * p.numel(), 12 * p.numel(), True, numel=p.numel(), weight_bytes=p.nbytes)
        for i, p in enumerate(params)
    ]
    config = OffloadConfig(update_on="host", chunk_bytes="1MiB")
    layout = make_layout(
        [{"state": p.numel()} for p in params],
        {"state": 12},
        [p.numel() for p in params],
        chunk_bytes=HOST_CHUNK << 20,
        split=True,
    )
    needed = max(sum(2 * round_up(2 * piece.numel) for piece in chunk.pieces) for chunk in layout.chunks)
    assert plan_placements(sizes, config).host_slot_bytes == pytest.approx(needed, rel=0.001)


def test_small_parameters_stay():
    plan = plan_placements(sizes_of([100, 10_000, 65_536]), OffloadConfig())
    assert [p.value for p in plan.placements] == ["resident", "resident", "streamed"]


def test_the_first_parameters_stay():
    plan = plan_placements(sizes_of([100_000] * 4), OffloadConfig(fraction=0.5))
    assert [p.value for p in plan.placements] == ["resident", "resident", "streamed", "streamed"]


def test_unsplittable_parameters_need_slots_of_their_size():
    plan = plan_placements(sizes_of([100_000, 900_000], splits=False), OffloadConfig(chunk_bytes=64 * 1024))
    assert plan.slot_bytes == -(-900_000 // 256) * 256


def test_what_is_placed_stays_placed():
    config = OffloadConfig(device_budget=1_000_000, chunk_bytes=64 * 1024, slots=2)
    first = plan_placements(sizes_of([800_000]), config)
    assert first.placements == (Placement.RESIDENT,)
    both = plan_placements(sizes_of([800_000, 800_000]), config, {0: Placement.RESIDENT})
    assert both.placements == (Placement.RESIDENT, Placement.STREAMED)
    assert both.device_bytes <= 1_000_000


def test_idle_plans_are_refused():
    config = OffloadConfig()
    with pytest.raises(OffloadIneffectiveError, match="min_bytes"):
        refuse_idle([plan_placements(sizes_of([100, 200]), config)], config)
    with pytest.raises(OffloadIneffectiveError, match="keeps no state"):
        refuse_idle([plan_placements(sizes_of([0, 0]), config)], config)
    refuse_idle([plan_placements(sizes_of([100]), OffloadConfig(fraction=0.0))], OffloadConfig(fraction=0.0))
    enough = OffloadConfig(device_budget="1GiB")
    refuse_idle([plan_placements(sizes_of([100_000]), enough)], enough)


def test_a_plan_reads_well():
    text = str(plan_placements(sizes_of([100, 3_000_000]), OffloadConfig(chunk_bytes="1MiB")))
    assert "p0" in text
    assert "resident" in text
    assert "2.9 MiB streamed (1) through 3 slots of 1.0 MiB" in text
