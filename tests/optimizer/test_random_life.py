# SPDX-License-Identifier: Apache-2.0
"""Random lives: whatever happens between steps, streamed state has the bits of resident state, and overlapped
iterations those of the plain step, with weights on the device and on the host.

The one that is tested runs on lazy lanes with the happens-before checker; both live through the same events.
"""

from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.random_lives import Iterations, Steps, assert_same_ends, events_of
from tests.support.training import lazily

pytestmark = pytest.mark.usefixtures("some_layers_are_late")


@given(
    events_of(Steps, fewest=3, most=14),
    st.sampled_from(Steps.FORMATS),
    st.sampled_from(["16KiB", "24KiB", "1MiB"]),
    st.integers(1, 4),
    st.sampled_from([1.0, 0.6]),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=120)
def test_streamed_and_resident_lives_are_the_same(events, kind, chunk_bytes, slots, fraction, seed):
    dtype, config = kind
    with lazily(seed):
        plan = {"min_bytes": 0, "chunk_bytes": chunk_bytes, "slots": slots, "fraction": fraction}
        streamed = Steps(seed, dtype, {**config, **plan})
    assert_same_ends(streamed, Steps(seed, dtype, {**config, "fraction": 0.0}), events)


@given(
    events_of(Iterations, fewest=4, most=18),
    st.sampled_from(Iterations.FORMATS),
    st.sampled_from(Iterations.PLACES),
    st.booleans(),
    st.booleans(),
    st.sampled_from(Iterations.CLIPS),
    st.sampled_from(Iterations.IN_BETWEEN),
    st.integers(1, 3),
    st.integers(0, 1000),
)
@example(  # more state is needed while updates wait for the next forward
    [("iterate", 0), ("iterate", 30), ("amsgrad", 0), ("iterate", 0)],
    *(Iterations.FORMATS[0], {"weights": "host"}, True, True, None, "nothing", 1, 0),
)
@example(  # a step while other weights are still on their way back, and some are only late
    [("iterate", 3), ("replan weights", 41), ("sleep", 0), ("iterate", 4), ("iterate", 2)],
    *(Iterations.FORMATS[0], {"window": 0}, True, True, None, "nothing", 1, 0),
)
@settings(deadline=None, max_examples=150)
def test_overlapped_and_plain_lives_are_the_same(
    events, kind, place, overlap_forward, update_in_backward, clip, in_between, slots, seed
):
    dtype, config = kind
    overlap = {**place, "overlap_forward": overlap_forward, "update_in_backward": update_in_backward}
    with lazily(seed):
        overlapped = Iterations(seed, dtype, {**config, **overlap, "slots": slots}, clip, in_between)
    with mock.patch.multiple("offstage.phases.parking", _SMALL=0, _BATCH=2000):
        assert_same_ends(overlapped, Iterations(seed, dtype, config, clip, "nothing"), events)
