# SPDX-License-Identifier: Apache-2.0
"""Actions that must raise one clear error, and pickles that must not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def refused(error: type[Exception], action: Callable[[], Any], *fragments: str) -> Exception:
    """`action` raises exactly this error, with all of `fragments` in its message."""
    with pytest.raises(error) as raised:
        action()
    assert type(raised.value) is error
    for fragment in fragments:
        assert fragment in str(raised.value), str(raised.value)
    return raised.value


class Runs:
    """Unpickled by an ordinary unpickler, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)
