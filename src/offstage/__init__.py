# SPDX-License-Identifier: Apache-2.0
"""offstage keeps training state off the accelerator until it is needed."""

from offstage.activations.offload import offload_activations
from offstage.config import ActivationConfig, OffloadConfig
from offstage.errors import (
    CheckpointError,
    ConfigError,
    HostMemoryError,
    OffloadIneffectiveError,
    OffstageError,
    StepLostError,
)
from offstage.optimizer.optimizer import OffloadedOptimizer, offload
from offstage.planning.machine import Machine
from offstage.planning.measure import measure_machine
from offstage.planning.plan import Plan
from offstage.planning.planner import make_plan
from offstage.planning.predict import Workload
from offstage.planning.sizes import World

__version__ = "0.1.0"

__all__ = [
    "ActivationConfig",
    "CheckpointError",
    "ConfigError",
    "HostMemoryError",
    "Machine",
    "OffloadConfig",
    "OffloadIneffectiveError",
    "OffloadedOptimizer",
    "OffstageError",
    "Plan",
    "StepLostError",
    "Workload",
    "World",
    "__version__",
    "make_plan",
    "measure_machine",
    "offload",
    "offload_activations",
]
