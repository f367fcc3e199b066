# SPDX-License-Identifier: Apache-2.0
"""offstage keeps training state off the accelerator until it is needed."""

from offstage._version import __version__
from offstage.activations import offload_activations
from offstage.config import ActivationConfig, OffloadConfig
from offstage.errors import ConfigError, OffloadIneffectiveError, OffstageError
from offstage.machine import Machine, measure_machine
from offstage.optimizer import OffloadedOptimizer, offload
from offstage.plan import Plan
from offstage.planner import make_plan
from offstage.predict import Workload
from offstage.world import World

__all__ = [
    "ActivationConfig",
    "ConfigError",
    "Machine",
    "OffloadConfig",
    "OffloadIneffectiveError",
    "OffloadedOptimizer",
    "OffstageError",
    "Plan",
    "Workload",
    "World",
    "__version__",
    "make_plan",
    "measure_machine",
    "offload",
    "offload_activations",
]
