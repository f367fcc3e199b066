# SPDX-License-Identifier: Apache-2.0
"""`require`: another engine's package in a version whose extension points are known here, or one message."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch.torch_version import TorchVersion

from offstage import ConfigError


def require(module: str, *, package: str, at_least: str, below: str, why: str) -> Any:
    """`module`, if `package` is installed with `at_least` <= its version < `below`; `why` names what asks for it."""
    remedy = f"Run `pip install '{package}>={at_least},<{below}'`"
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise ConfigError(f"{why} expects the package {package}; found none. {remedy}.") from error
    if not TorchVersion(at_least) <= found < TorchVersion(below):
        raise ConfigError(
            f"{why} expects {package} from {at_least} up to, not including, {below}, whose extension points it knows; "
            f"found {found}. {remedy}, or use offstage.offload() in a loop of your own."
        )
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{why} expects to import {module}; found: {error}. {remedy}.") from error
