# SPDX-License-Identifier: Apache-2.0
"""offstage keeps training state off the accelerator until it is needed.

A public name is imported from its module when it is first used: the command line's help needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offstage import checkpoint, optim
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
    from offstage.fitting.fit import fit
    from offstage.optimizer.optimizer import OffloadedOptimizer, offload
    from offstage.phases.sleep import asleep, sleep, wake
    from offstage.planning.fit_plan import FitPlan
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
    "FitPlan",
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
    "asleep",
    "checkpoint",
    "fit",
    "make_plan",
    "measure_machine",
    "offload",
    "offload_activations",
    "optim",
    "sleep",
    "wake",
]

_NAMES_OF = {
    "activations.offload": ("offload_activations",),
    "config": ("ActivationConfig", "OffloadConfig"),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "HostMemoryError",
        "OffloadIneffectiveError",
        "OffstageError",
        "StepLostError",
    ),
    "fitting.fit": ("fit",),
    "optimizer.optimizer": ("OffloadedOptimizer", "offload"),
    "phases.sleep": ("asleep", "sleep", "wake"),
    "planning.fit_plan": ("FitPlan",),
    "planning.machine": ("Machine",),
    "planning.measure": ("measure_machine",),
    "planning.plan": ("Plan",),
    "planning.planner": ("make_plan",),
    "planning.predict": ("Workload",),
    "planning.sizes": ("World",),
}
_HOMES = {name: home for home, names in _NAMES_OF.items() for name in names}
_ROOMS = {"checkpoint", "integrations", "optim", *(home.split(".")[0] for home in _NAMES_OF)}

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one that exists

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        elif name in _ROOMS:
            found = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
