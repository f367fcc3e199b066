# SPDX-License-Identifier: Apache-2.0
"""`replan`: other settings in the middle of training, or why they cannot be had there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from offstage.config import OffloadConfig, Placement, format_size, parse_size
from offstage.engine import named_state
from offstage.engine.gradients import HostGradient
from offstage.errors import ConfigError
from offstage.memory.interrupts import deferred_interrupts
from offstage.optimizer.overlap.cues import check_cues
from offstage.optimizer.overlap.left_gradient import LeftGradient
from offstage.optimizer.overlap.overlap import Overlap
from offstage.optimizer.places import Places
from offstage.optimizer.runtime import Runtime
from offstage.planning.group_slots import with_slots
from offstage.weights.moving import ReplannedWeights, describe

logger = logging.getLogger("offstage")

_MAY_CHANGE = frozenset(
    {
        "fraction",
        "device_budget",
        "host_budget",
        "min_bytes",
        "update_on",
        "host_fraction",
        "threads",
        "chunk_bytes",
        "slots",
        "pin_memory",
        "overlap_forward",
        "update_in_backward",
        "weights",
    }
)


def replanned_config(runtime: Runtime, changes: Mapping[str, Any]) -> OffloadConfig:
    """The config with `changes`; raises for what cannot be changed in the middle of training."""
    _refuse_under_fit(runtime, changes)
    config, changes = runtime.config, dict(changes)
    if changes.get("device_peak") is not None and config.window != "auto":
        changes["device_budget"] = budget_under(parse_size(changes.pop("device_peak"), "device_peak"), runtime)
    built = OffloadConfig.build(config, _complete(config, changes))
    fixed = sorted(name for name in changes if name not in _MAY_CHANGE and changes[name] != getattr(config, name))
    if fixed:
        raise ConfigError(
            f"replan() expects changes of {', '.join(sorted(_MAY_CHANGE))}, found {', '.join(fixed)}. Formats, rule "
            "and window are those of offload(): build a new optimizer and load its state_dict()."
        )
    return built


def _refuse_under_fit(runtime: Runtime, changes: Mapping[str, Any]) -> None:
    if runtime.watcher is not None and not runtime.is_deciding:
        raise ConfigError(
            "This optimizer is run by fit(), which decides between steps what lives where; expected no replan(), found "
            f"replan({', '.join(f'{name}={value!r}' for name, value in changes.items())}). Leave it out; for settings "
            "or a device_peak of your own, save state_dict() and load it into an optimizer that offload() or fit() "
            "makes with them."
        )


def _complete(config: OffloadConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """One way of saying how much leaves takes the place of the other; the same for who updates."""
    complete = dict(changes)
    if changes.get("device_budget") is not None:
        complete.setdefault("fraction", None)
    if changes.get("fraction") is not None:
        complete.setdefault("device_budget", None)
    if changes.get("update_on") is not None:
        complete.setdefault("host_fraction", None)
    # What has no effect where updates are made from now on goes.
    if changes.get("update_on") == "device" and changes.get("host_fraction") is None:
        complete.setdefault("threads", None)
    if changes.get("update_on") == "host":
        complete.setdefault("slots", None)
    if changes.get("host_fraction") is not None and config.update_on == "host":
        complete.setdefault("update_on", "auto")
    return complete


def budget_under(peak: int, runtime: Runtime) -> int:
    """The `device_budget` that keeps the process under `peak` bytes, from what it has had at most so far."""
    engine = max(runtime.engines, key=lambda engine: engine.transport.lanes.peak_bytes())
    found = engine.transport.lanes.peak_bytes()
    if runtime.steps == 0 or not found:
        raise ConfigError(
            "replan(device_peak=...) looks at the peak of the steps so far; found none on an accelerator. Train a few "
            "steps first, or give device_budget."
        )
    without_state = found - runtime.device_state_bytes(engine.device)
    if peak <= without_state:
        raise ConfigError(
            f"device_peak={format_size(peak)} is less than the {format_size(without_state)} that training "
            f"has taken on {engine.device} without any state. Raise it, or lower the batch."
        )
    return peak - without_state


def replan(runtime: Runtime, config: OffloadConfig) -> None:
    """`config` is in force from now on. If it fails, nothing has changed."""
    runtime.check_awake("replan()")
    check_cues(config, runtime.model)
    runtime.drain_state()
    placed = with_slots(config, runtime.model)
    with deferred_interrupts():  # settings, places and cues are never of different plans
        moved = not runtime.places.follow(placed, runtime.groups)
        if moved:
            _Move(runtime, placed).make()
        runtime.config = config
        runtime.iteration.revert()  # the next one is of the new places
        _switch_cues(runtime, moved=moved)
    logger.info("replanned, %s", runtime.plan.summary())
    if runtime.weights is not None:
        logger.info(describe(runtime.weights))
    runtime.places.log_fallbacks()


def attach(runtime: Runtime, model: torch.nn.Module) -> None:
    """`model` is the one that is trained."""
    runtime.attach(model)
    if with_slots(runtime.config, model) != with_slots(runtime.config, None):
        replan(runtime, runtime.config)


class _Move:
    """State, and weights where these are to live elsewhere, on their way to other places."""

    def __init__(self, runtime: Runtime, config: OffloadConfig) -> None:
        self._runtime, self._config, self._old = runtime, config, runtime.places
        self._weights: ReplannedWeights | None = None
        if config.weights != runtime.config.weights:
            self._weights = ReplannedWeights(runtime.model, config, runtime.turn, runtime.weights)
        self._left: dict[torch.Tensor, HostGradient] = {}
        """Gradients on the host: what stands for them in `.grad` is made for a weight on the device, or on the host."""

    def make(self) -> None:
        """Weights go to the host first, then all state moves, then weights come to the device: so it has room."""
        new: Places | None = None
        self._set_gradients_aside()
        try:
            new = self._old.moved_to(self._config, self._runtime.groups, self._weights)
            if self._weights is not None:
                self._make_room(new)
                self._weights.bring_back()
        except BaseException as error:
            self._take_back(new, error)
            raise
        self._end(new)

    def _end(self, new: Places) -> None:
        runtime = self._runtime
        new.carry_on(self._old)
        runtime.places = new
        if self._weights is not None:
            runtime.use_weights(self._weights.end())
        if runtime.weights is not None:
            runtime.weights.use(new.lanes, new.timers)
        self._old.close()
        self._put_gradients_back()

    def _take_back(self, new: Places | None, error: BaseException) -> None:
        """Everything is where it was. If that fails, too, weights and state do not belong together any more."""
        runtime = self._runtime
        if self._weights is None:
            return
        try:
            self._weights.undo()
            if new is not None:
                self._make_resident_again(new)
                new.close()
            self._old.use_layers(runtime.weights.layers if runtime.weights is not None else [])
            self._put_gradients_back()
            runtime.speculation.is_armed = False  # layers that are made again have no second set
            runtime.arm_speculation()
        except BaseException as second:
            runtime.lose(
                f"replan() failed ({type(error).__name__}: {error}), and so did the way back "
                f"({type(second).__name__}: {second})."
            )
            runtime.check_not_lost()

    def _make_room(self, new: Places) -> None:
        """Give memory back that `new` does without: slots, resident state that is on the host there, and weights."""
        for param, state in self._old.states.items():
            if param in new.states and new.states[param].placement is not Placement.RESIDENT:
                state.resident.clear()
            if param in new.states and new.states[param].hosted is None:
                state.hosted = None  # it would keep the host's memory
        for device, engine in self._old.engines.items():
            engine.transport.layers = new.engines[device].transport.layers if device in new.engines else ()
            pipeline = engine.transport.pipeline
            pipeline.resize(pipeline.num_slots, pipeline.slot_bytes, pipeline.gradient_bytes)

    def _make_resident_again(self, new: Places) -> None:
        for param, state in self._old.states.items():
            if state.placement is Placement.RESIDENT and not state.resident:
                named_state.allocate_resident(state, {})
                for key in state.keys:
                    state.raw(key.name).copy_(new.states[param].raw(key.name))

    def _set_gradients_aside(self) -> None:
        for param in self._old.states if self._weights is not None else ():
            if isinstance(param.grad, LeftGradient):
                self._left[param] = param.grad.gradient
                param.grad = None

    def _put_gradients_back(self) -> None:
        states = self._runtime.places.states
        for param, gradient in self._left.items():
            on_host = states[param].hosted is not None
            param.grad = LeftGradient(param, gradient, self._runtime.uses, stays_on_host=on_host)


def _switch_cues(runtime: Runtime, *, moved: bool) -> None:
    """The cues are those of the runtime's config. The lanes have been drained."""
    config, speculation = runtime.config, runtime.speculation
    if not config.update_in_backward:
        speculation.disarm(runtime.engines, runtime.weights)
    speculation.is_armed = speculation.is_armed and not moved  # new arenas have no second set
    runtime.arm_speculation()
    if runtime.overlap is not None:
        runtime.overlap.replanned(config, moved=moved)
    elif config.overlaps:
        runtime.overlap = Overlap(runtime, runtime.model)
        runtime.overlap.begin_late()
    runtime.tell_weights()
    if moved and runtime.overlap is not None:
        runtime.overlap.let_gradients_leave()
    for engine in runtime.engines:
        engine.transport.gradients.drop_idle()
