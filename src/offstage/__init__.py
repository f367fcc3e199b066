# SPDX-License-Identifier: Apache-2.0
"""offstage keeps training state off the accelerator until it is needed."""

from offstage._version import __version__
from offstage.config import OffloadConfig
from offstage.errors import ConfigError, OffloadIneffectiveError, OffstageError
from offstage.optimizer import OffloadedOptimizer, offload

__all__ = [
    "ConfigError",
    "OffloadConfig",
    "OffloadIneffectiveError",
    "OffloadedOptimizer",
    "OffstageError",
    "__version__",
    "offload",
]
