# SPDX-License-Identifier: Apache-2.0
"""`megatron_core`: the package in a version whose extension points are known here, or one message."""

from __future__ import annotations

from typing import Any

from offstage.integrations.packages import require

AT_LEAST, BELOW = "0.19", "0.20"


def megatron_core(module: str, *, why: str) -> Any:
    """`module` of megatron-core; `why` names what asks for it."""
    return require(module, package="megatron-core", at_least=AT_LEAST, below=BELOW, why=why)
