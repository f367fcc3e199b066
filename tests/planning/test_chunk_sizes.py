# SPDX-License-Identifier: Apache-2.0
"""Chunks and slots are sized by the state they serve, and settings with which offloading saves nothing are refused."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from offstage.config import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, OffloadConfig, Placement
from offstage.errors import OffloadIneffectiveError
from offstage.planning.plan import Plan, plan_placements, refuse_costly
from offstage.planning.planner import make_plan
from offstage.planning.sizes import ParamSize, param_sizes
from tests.support.machines import machine

MIB = 1 << 20
SIZES = st.lists(st.integers(64 * 1024, 900 * MIB), min_size=1, max_size=12)
TEN_MILLION = {f"layers.{i}.weight": 1_000_000 for i in range(10)}
"""bf16 parameters: 114 MiB of state with AdamW."""


def sizes_of(numbers: list[int], splits: bool = True) -> list[ParamSize]:
    return [
        ParamSize(f"p{i}", "cpu", n, -(-n // 256) * 256, splits, numel=n // 12, weight_bytes=n // 6)
        for i, n in enumerate(numbers)
    ]


def plan_of(numbers: list[int], splits: bool = True, **settings: object) -> Plan:
    return plan_placements(sizes_of(numbers, splits), OffloadConfig(**settings))


@given(SIZES, st.sampled_from([None, 1, 3, 24]), st.floats(0.05, 1.0))
def test_slots_take_at_most_a_quarter_of_what_they_serve(numbers, slots, fraction):
    plan = plan_of(numbers, slots=slots, fraction=fraction)
    served = sum(s.padded_bytes for s, p in zip(plan.sizes, plan.placements, strict=True) if p is Placement.STREAMED)
    assert MIN_CHUNK_BYTES <= plan.chunk_bytes <= MAX_CHUNK_BYTES
    assert plan.slots * plan.slot_bytes <= max(served // 4, plan.slots * MIN_CHUNK_BYTES)
    if served >= 4 * plan.slots * MAX_CHUNK_BYTES:
        assert plan.slot_bytes == MAX_CHUNK_BYTES  # a large model has the same chunks as ever


def test_ten_million_parameters_take_a_quarter_of_their_state():
    state = 12 * 10_000_000
    plan = make_plan(TEN_MILLION, machine())
    assert plan.prediction.device_state_bytes == plan.device_bytes <= state / 4
    assert plan.net_saved_bytes == state - plan.device_bytes >= 0.75 * state
    assert make_plan(TEN_MILLION, machine(), OffloadConfig(chunk_bytes="8MiB")).slot_bytes == 8 * MIB


def test_a_size_that_is_given_is_taken():
    assert plan_of([200 * MIB] * 4, chunk_bytes="128MiB").slot_bytes == 128 * MIB
    assert plan_of([MIB] * 4, chunk_bytes="1MiB").chunk_bytes == MIB
    assert plan_of([MIB] * 4, chunk_bytes="1MiB", update_on="host").host_chunk_bytes == 3 * MIB


def test_what_is_not_split_decides_the_slot_and_not_the_chunk():
    plan = plan_of([64 * MIB, *[MIB] * 400], splits=False)
    assert (plan.slot_bytes, plan.chunk_bytes) == (64 * MIB, pytest.approx(464 * MIB / 12, rel=0.01))


@given(SIZES)
def test_staging_buffers_of_the_host_are_a_quarter_too(numbers):
    """Weights and gradients of a chunk are a third of its state, and a chunk is three times larger."""
    plan = plan_of(numbers, update_on="host")
    assert plan.host_slots * plan.host_slot_bytes <= 1.01 * max(sum(numbers) / 4, 4 * 3 * MIN_CHUNK_BYTES)
    assert (plan.slots, plan.chunk_bytes) == (0, 0)
    assert plan.host_chunk_bytes <= 3 * MAX_CHUNK_BYTES


def test_streamed_state_and_the_cpus_have_chunks_of_their_own():
    plan = plan_of([12 * MIB] * 16, host_fraction=0.75)
    assert plan.slots * plan.slot_bytes == pytest.approx(12 * MIB, rel=0.01)
    assert plan.host_chunk_bytes == pytest.approx(3 * 144 * MIB / 16, rel=0.01)


@given(st.lists(st.integers(64 * 1024, 4 * MIB), min_size=2, max_size=40), st.floats(0.3, 0.99))
def test_a_budget_is_used_to_within_one_parameter(numbers, share):
    """Slots shrink with what is streamed, and the room that they leave is used."""
    budget = int(share * sum(numbers))
    assume(budget > sum(numbers) / 4 + 3 * MIN_CHUNK_BYTES)
    plan = plan_of(numbers, device_budget=budget)
    assert plan.device_bytes <= budget
    assert budget - plan.device_bytes <= max(numbers) + 3 * MIN_CHUNK_BYTES


# Net #


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chunk_bytes": "64MiB"}, ["found 192.0 MiB (3 slots of 64.0 MiB)", "Leave out chunk_bytes, use"]),
        ({"chunk_bytes": "8MiB", "slots": 20}, ["20 slots of 8.0 MiB", "Leave out chunk_bytes and slots"]),
        ({"window": "100MiB"}, ["and a window of 100.0 MiB", "Leave out window"]),
    ],
)
def test_settings_that_cost_what_they_free_are_refused(settings, words):
    config = OffloadConfig(**settings)
    with pytest.raises(OffloadIneffectiveError) as error:
        refuse_costly([plan_placements(param_sizes(TEN_MILLION), config)], config)
    for text in ("less than the 114.4 MiB of state that leaves", *words, "update_on='host'", "fraction=0.0"):
        assert text in str(error.value)


def test_whole_parameters_that_fill_their_slots_are_refused():
    for number, remedy in ((1, "Use update_on='host'"), (3, "Use slots=1, update_on='host'")):
        plan = plan_of([MIB] * number, splits=False)
        with pytest.raises(OffloadIneffectiveError, match="largest parameter that is not split") as error:
            refuse_costly([plan], OffloadConfig())
        assert remedy in str(error.value)
    refuse_costly([plan_of([MIB] * 4, splits=False)], OffloadConfig())
    refuse_costly([plan_of([MIB] * 3, splits=False, slots=1)], OffloadConfig(slots=1))


@given(
    SIZES, st.sampled_from([{}, {"fraction": 0.2}, {"update_on": "host"}, {"host_fraction": 0.5}, {"window": "all"}])
)
def test_what_the_plan_chooses_saves(numbers, settings):
    plan = plan_of(numbers, **settings)
    assert plan.net_saved_bytes > 0
    refuse_costly([plan], OffloadConfig(**settings))


def test_nothing_that_stays_is_refused():
    for settings in ({"fraction": 0.0}, {"device_budget": "1GiB"}):
        plan = plan_of([MIB] * 3, splits=False, **settings)
        assert plan.net_saved_bytes == 0
        refuse_costly([plan], OffloadConfig(**settings))


def test_a_plan_of_before_is_still_read():
    """Plans in the run folders of older versions say nothing about chunks."""
    fields = plan_placements(param_sizes({"weight": 100_000}, dtype=torch.float32), OffloadConfig())
    text = fields.to_json().replace(f', "chunk_bytes": {fields.chunk_bytes}, "host_chunk_bytes": 0', "")
    assert "chunk_bytes" not in text
    assert Plan.from_json(text).slot_bytes == fields.slot_bytes
