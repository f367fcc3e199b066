# SPDX-License-Identifier: Apache-2.0
"""Layers that leave are spread over the model."""

from hypothesis import given
from hypothesis import strategies as st

from offstage.planning.choices import spread


@given(st.integers(1, 200).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_spread_is_even(numbers):
    count, total = numbers
    found = sorted(spread(count, total))
    assert len(found) == count
    assert all(0 <= number < total for number in found)
    gaps = [b - a for a, b in zip(found, [*found[1:], found[0] + total], strict=True)] if found else [0]
    assert max(gaps) - min(gaps) <= 1
