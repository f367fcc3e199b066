# SPDX-License-Identifier: Apache-2.0
"""`docs/engines.md` says what works in which engine; each claim is a test of this folder."""

import re

from tests.support import engine_matrix as matrix


def test_names_of_engines_and_features():
    for name, feature in matrix.marked():
        assert name in matrix.ENGINES
        assert feature in matrix.FEATURES


def test_the_page_has_what_the_tests_show():
    assert matrix.in_page() == matrix.table(matrix.marked())


def test_every_engine_has_the_same_bits():
    assert {name for name, feature in matrix.marked() if feature == "same bits"} == set(matrix.ENGINES)


def test_no_test_of_an_engine_is_skipped():
    """A mark of one that does not run would be a claim."""
    for path in matrix.TESTS.glob("test_*.py"):
        found = re.findall(r"\bpytest\.(?:mark\.)?(?:skip|skipif|xfail|importorskip)\b", path.read_text())
        assert not found, path.name
