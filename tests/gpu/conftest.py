# SPDX-License-Identifier: Apache-2.0
"""GPU tests fail, and do not skip, on a machine without an accelerator."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _needs_accelerator() -> None:
    if not torch.cuda.is_available():
        pytest.fail("tests/gpu needs an accelerator; none was found", pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
