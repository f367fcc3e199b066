# SPDX-License-Identifier: Apache-2.0
"""What works in which engine, from the results of the tests that are marked with `pytest.mark.engine`.

    python -m tests.support.engine_matrix

runs them and writes the table of `docs/engines.md`. `tests/integrations/test_matrix.py` compares the page with the
marks: a feature whose tests are gone, or that is not in the page, fails there; one whose tests fail, fails by itself.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "engines.md"
TESTS = ROOT / "tests" / "integrations"
ENGINES = (
    "transformers Trainer",
    "TRL SFT",
    "TRL DPO",
    "TRL GRPO",
    "PEFT LoRA",
    "accelerate",
    "Lightning",
    "Fabric",
    "torchtitan",
    "Megatron-core",
)
FEATURES = (
    "same bits",
    "accumulation",
    "clipping",
    "update in backward, clipped",
    "overlap_forward",
    "save and resume",
    "DDP",
    "FSDP2",
    "sleep and wake",
    "lazy lanes",
    "activation offload",
    "device_peak",
)
_BEGIN, _END = "<!-- made by tests/support/engine_matrix.py -->\n", "<!-- end -->\n"

Pair = tuple[str, str]
"""An engine and a feature."""


class Results:
    """A pytest plugin: which marked tests have passed."""

    def __init__(self) -> None:
        self.passed: dict[Pair, bool] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if report.when == "call" or report.failed:
            for mark in item.iter_markers("engine"):
                name, *features = mark.args
                for pair in ((name, feature) for feature in features):
                    self.passed[pair] = self.passed.get(pair, True) and report.passed
        return report


def marked() -> dict[Pair, list[str]]:
    """The tests that show each pair, as their source says."""
    found: dict[Pair, list[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and re.search(r"\bengine$", ast.unparse(mark.func)):
                    name, *features = map(ast.literal_eval, mark.args)
                    for feature in features:
                        found.setdefault((name, feature), []).append(f"{path.name}::{node.name}")
    return found


def table(pairs: Iterable[Pair]) -> str:
    """Rows are features, columns engines."""
    there = set(pairs)
    rows = [(feature, *("✓" if (name, feature) in there else "" for name in ENGINES)) for feature in FEATURES]
    lines = [f"| {' | '.join(row)} |\n" for row in (("", *ENGINES), *rows)]
    return "".join([lines[0], "|---" * (len(ENGINES) + 1) + "|\n", *lines[1:]])


def in_page() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]


def write(passed: Mapping[Pair, bool]) -> None:
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}{table(pair for pair, ok in passed.items() if ok)}{_END}{after}")


def main() -> int:
    results = Results()
    status = pytest.main(["-q", "-p", "no:cacheprovider", str(TESTS), *sys.argv[1:]], plugins=[results])
    write(results.passed)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
