# SPDX-License-Identifier: Apache-2.0
"""`fit`: take over a model and its optimizer, within a peak of device memory. Read this first.

What can be said before the first iteration is said here: what the job may use, what it takes at least, and why it is
refused. What is decided later is in `fitted.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from offstage.activations.offload import offloads_activations
from offstage.config import OffloadConfig, format_size, parse_size
from offstage.errors import ConfigError, HostMemoryError
from offstage.fitting.fitted import Fitted, empty_loop
from offstage.fitting.sizes import sizes_of
from offstage.memory.arena import cgroup_available, mem_available
from offstage.modules import layers_of, uses_ddp
from offstage.optimizer.checks import check_optimizer
from offstage.optimizer.optimizer import OffloadedOptimizer
from offstage.planning.choices import Choice
from offstage.planning.choosing import Limits, least_memory
from offstage.planning.fit_plan import FitPlan, refusal
from offstage.planning.job import Job, Setting
from offstage.planning.machine import Machine
from offstage.planning.measure import measure_machine
from offstage.rules import choose_rule
from offstage.weights.choosing import movable

logger = logging.getLogger("offstage")

_GIVEN = (
    "master_weights",
    "state_dtype",
    "rule",
    "threads",
    "min_bytes",
    "chunk_bytes",
    "slots",
    "pin_memory",
)
"""Fields of `OffloadConfig` that are the user's: formats, and how state moves."""
_ESTIMATED = 0.8
"""Of what a job is predicted to take at least, what it takes without doubt: predictions of the smallest settings, which
were not measured yet, are too high."""
_MARGIN = 0.05
"""Share of a memory that is left to others where no limit is given."""
_SAVED_MIN_BYTES = 1024**2
"""Smaller saved tensors stay, unless `min_bytes` is given."""


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device_peak: int | str | None = None,
    host_budget: int | str | None = None,
    *,
    plan: FitPlan | str | None = None,
    machine: Machine | None = None,
    overlap_forward: bool = True,
    update_in_backward: bool = True,
    update_on_host: bool = True,
    weights_on_host: bool = True,
    activations: bool = True,
    **settings: Any,
) -> OffloadedOptimizer:
    """Train `model` with at most `device_peak` of device memory, as fast as that goes. Returns the optimizer to use.

    The job begins with all on the host that can be there, is measured in your loop for two iterations, and then goes
    over to the fastest of all placements of state, weights and activations that fit, without losing a bit. It goes on
    watching: longer sequences, the peak, the time. `optimizer.fitted` is the plan: print it, or save its `to_json()`
    and give it back as `plan` to begin with it.

    `device_peak`, `host_budget`: bytes or ``"24GiB"``; `None`: what the device and the host have, less 5%. `machine`:
    rates that were measured before. `overlap_forward`, `update_in_backward`, `update_on_host`, `weights_on_host`,
    `activations`: ``False`` forbids that. `settings`: formats and movement as in `OffloadConfig` (`master_weights`,
    `state_dtype`, `rule`, `threads`, `min_bytes`, `chunk_bytes`, `slots`, `pin_memory`).

    With `update_in_backward` use `optimizer.clip_grad_norm_`, and `optimizer.accumulate()` around the backwards of
    earlier micro-batches; a loop that does not is recognised, and loses only time. A loop that skips steps behind their
    backward needs ``update_in_backward=False``.
    """
    _check_arguments(model, optimizer, settings, activations=activations)
    config = OffloadConfig.build(None, {name: value for name, value in settings.items() if name != "threads"})
    loop = empty_loop(model)
    sizes = sizes_of(model, optimizer.param_groups, choose_rule(optimizer, config), config, _layers(model, config))
    device = _device_of(model)
    found = machine if machine is not None else measure_machine(device)
    plain = not any(isinstance(param, DTensor) for param in model.parameters())
    # Without state there is no update to travel with: `offload()` has nothing to do there.
    may_leave = any(size.layer is not None for size in sizes) and any(size.state_bytes for size in sizes)
    job = Job(
        sizes=tuple(sizes),
        loop=loop,
        machine=found,
        config=config,
        threads=settings.get("threads"),
        may_host_weights=weights_on_host and plain and may_leave,
        may_update_on_host=update_on_host and choose_rule(optimizer, config).rate_is_known,
        may_overlap_forward=overlap_forward,
        may_update_in_backward=update_in_backward and plain,
        may_offload_activations=activations and bool(loop.layers),
    )
    if weights_on_host and not job.may_host_weights:
        job = dataclasses.replace(job, notes=("weights stay on the device: no layers were found that could leave it",))
    limits = _limits(device_peak, host_budget, found, device)
    known = _known_plan(plan, job)
    if known is not None and known.predicted.device_bytes > limits.device:
        raise ConfigError(
            f"plan takes {format_size(known.predicted.device_bytes, up=True)} on the device; expected one within "
            f"device_peak={format_size(limits.device)}. Leave plan out: fit() makes it again in a few iterations."
        )
    least = least_memory(job, limits)
    if _ESTIMATED * least.device_bytes > limits.device or least.host_bytes > limits.host:
        error = ConfigError if least.device_bytes > limits.device else HostMemoryError
        raise error(refusal(least, limits))
    if known is not None:
        job = dataclasses.replace(
            job, loop=known.loop, unseen_bytes=dict(known.unseen_bytes), slowdowns=dict(known.slowdowns)
        )
    # Earlier micro-batches may leave gradients on the device; there may be none.
    several = dataclasses.replace(job, loop=dataclasses.replace(job.loop, micro_batches=2))
    began_with = _first(least_memory(several, limits).setting)
    overrides = job.overrides(began_with)
    fitted_config = dataclasses.replace(config, **overrides)  # type: ignore[arg-type]
    if not fitted_config.moves_weights:  # otherwise what does not stay on the host goes to the device by itself
        model.to(device)
    made = OffloadedOptimizer(optimizer, model, fitted_config)
    saved_min_bytes = _SAVED_MIN_BYTES if settings.get("min_bytes") is None else int(config.min_bytes)
    Fitted(made, model, job, limits, began_with, saved_min_bytes).begin(known)
    return made


def _first(least: Setting) -> Setting:
    """How a job begins. All gradients leave, so that who uses them is seen; no update is made before the plan."""
    return dataclasses.replace(least, update_in_backward=True, overlap_forward=False, host_share=0.0)


def _check_arguments(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], *, activations: bool
) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"fit() expects a torch.nn.Module first; found {type(model).__name__}. Write fit(model, optimizer, "
            "device_peak='24GiB')."
        )
    check_optimizer(optimizer, model)
    decided = [name for name in settings if name not in _GIVEN]
    if decided:
        raise ConfigError(
            f"fit() decides {', '.join(sorted(decided))} itself, or does not know it; expected of {', '.join(_GIVEN)}. "
            "Leave it out, or use offload() with settings of your own."
        )
    if offloads_activations(model):
        raise ConfigError(
            "The activations of this model, or of a part of it, are offloaded already, by offload_activations() or by "
            "an earlier fit(); expected a model that fit() may decide for. Call remove() on that handle, or close() on "
            "that optimizer."
        )
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:  # by torch.compile(model), model.compile()
        raise ConfigError(
            f"fit() works layer by layer; found a {type(model).__name__} that is compiled as a whole. Compile its "
            "layers one by one instead (model.layers[i] = torch.compile(model.layers[i])), then call this."
        )
    if activations and getattr(getattr(model, "config", None), "use_cache", None) is True:  # as in transformers
        raise ConfigError(
            "fit() may run a layer's forward again in backward; expected layers without a cache, found a "
            f"{type(model).__name__} with config.use_cache=True, whose layers would write to it twice. Set "
            "model.config.use_cache = False for training."
        )
    if uses_ddp(model) or (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
        raise ConfigError(
            "fit() decides for one device, and ranks of one job would decide differently; expected a process of its "
            "own, found a process group. Use offload() with the same settings on every rank; make_plan(..., "
            "world=World(...)) finds them."
        )


def _layers(model: nn.Module, config: OffloadConfig) -> dict[torch.Tensor, int]:
    try:
        layers = layers_of(model, None)
        found = movable(model, layers, 0)
    except ConfigError:
        return {}
    return {param: number for number, layer in enumerate(layers) for param in found[layer].values()}


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is trained: a model on the CPU beside an accelerator goes there."""
    devices = {param.device for param in model.parameters()}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if devices == {torch.device("cpu")} and accelerator is not None:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    if len(devices) != 1:
        raise ConfigError(
            f"fit() expects a model on one device; found {', '.join(sorted(map(str, devices))) or 'no parameters'}. "
            "Move the model to one device, or leave it on the CPU."
        )
    return devices.pop()


def _limits(
    device_peak: int | str | None, host_budget: int | str | None, machine: Machine, device: torch.device
) -> Limits:
    host = min(left for left in (mem_available(), cgroup_available(), machine.host_bytes) if left)
    share = 1.0 if device.type != "cpu" else 0.5  # there both are the host's memory
    on_device = machine.device_bytes if device.type != "cpu" else host
    return Limits(
        device=parse_size(device_peak, "device_peak")
        if device_peak is not None
        else int((1 - _MARGIN) * share * on_device),
        host=parse_size(host_budget, "host_budget") if host_budget is not None else int((1 - _MARGIN) * share * host),
    )


def _known_plan(plan: FitPlan | str | None, job: Job) -> FitPlan | None:
    if plan is None:
        return None
    known = FitPlan.from_json(plan) if isinstance(plan, str) else plan
    if not isinstance(known, FitPlan):
        raise ConfigError(f"plan expects a FitPlan or its JSON; found {type(plan).__name__}. Leave it out.")
    found = (len(job.sizes), job.state, job.num_layers)
    expected = (known.num_params, known.state_bytes, len(known.loop.layers))
    if found != expected:
        raise ConfigError(
            f"plan was made for {expected[0]} parameters with {expected[1]} bytes of state in {expected[2]} layers; "
            f"found {found[0]}, {found[1]} and {found[2]}. Leave plan out: fit() makes it again in a few iterations."
        )
    setting = known.setting
    forbidden = {
        "overlap_forward": setting.overlap_forward and not job.may_overlap_forward,
        "update_in_backward": setting.update_in_backward and not job.may_update_in_backward,
        "update_on_host": setting.host_share > 0.0 and not job.may_update_on_host,
        "weights_on_host": setting.hosted > 0 and not job.may_host_weights,
        "activations": any(one is not Choice.KEEP for one in setting.choices) and not job.may_offload_activations,
    }
    if names := [name for name, is_used in forbidden.items() if is_used]:
        raise ConfigError(
            f"plan uses what {' and '.join(names)} forbids, or this model cannot have; expected one of the two. Leave "
            "plan out, or allow it."
        )
    return known
