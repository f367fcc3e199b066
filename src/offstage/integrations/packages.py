# SPDX-License-Identifier: Apache-2.0
"""`require`: another engine's package in a version whose extension points are known here, or one message."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch.torch_version import TorchVersion

from offstage import ConfigError


def require(module: str, *, package: str, at_least: str, below: str, why: str) -> Any:
    """`module`, if `package` is installed with `at_least` <= its version < `below`; `why` names what asks for it."""
    remedy = f"Run `pip install '{package}>={at_least},<{below}'`"
    found = _version_of(module, package)
    if found is None:
        raise ConfigError(f"{why} expects the package {package}; found none. {remedy}.")
    if not TorchVersion(at_least) <= found < TorchVersion(below):
        raise ConfigError(
            f"{why} expects {package} from {at_least} up to, not including, {below}, whose extension points it knows; "
            f"found {found}. {remedy}, or use offstage.offload() in a loop of your own."
        )
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{why} expects to import {module}; found: {error}. {remedy}.") from error


def _version_of(module: str, package: str) -> str | None:
    """As installed; of a checkout on the path, which has no metadata, as it says itself."""
    try:
        return version(package)
    except PackageNotFoundError:
        pass
    try:
        importlib.import_module(module)
    except ImportError:
        return None
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((found for name in names if (found := getattr(sys.modules[name], "__version__", None))), None)
