# SPDX-License-Identifier: Apache-2.0
"""`LayerMeasurements`: measures a model's layers in its first forwards, and plans from that. For `layers="auto"`.

In the forwards that are measured every layer is recomputed, which takes the least memory of all, but one of each kind:
its tensors leave, so that they can be counted, and memory is read while its backward runs. Optimizers allocate in their
first step, so the second forward counts. What the plan then really takes corrects the prediction, and it is made anew.
To see that, the device's peak statistics are reset before each of these forwards.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offstage.activations.device import DeviceActivations
from offstage.activations.layers import kind_of
from offstage.activations.plan import ActivationPlan, Choice, LayerFacts, choose
from offstage.config import ActivationConfig, format_size
from offstage.lanes.lanes import Lane, Lanes

logger = logging.getLogger("offstage")

_MEASURED_FORWARD = 2
_CORRECTIONS = 4
"""How often the plan is made anew, at most."""
_CLOSE = 0.02
"""A plan whose peak is that close to what it may take is not made anew to use the rest."""


@dataclass
class _Measured:
    """One layer in one forward and its backward."""

    start: Any = None
    stop: Any = None
    saved_bytes: int = 0
    remade_bytes: int = 0
    """Of them, what does not leave with the others because it is remade."""
    first_bytes: int | None = None
    """On the device when its backward began, without saved tensors."""
    most_bytes: int = 0


@dataclass
class LayerMeasurements:
    """What is known of one model's layers, and the plan for them."""

    model: nn.Module
    layers: Sequence[nn.Module]
    config: ActivationConfig
    device: Callable[[], DeviceActivations]
    """Knows the rates of the link and of remaking; there is none before the first tensor is saved."""
    plan: ActivationPlan | None = None
    _num_forwards: int = 0
    _in_flight: deque[int] = field(default_factory=lambda: deque([1], maxlen=2))
    """In the last forwards, how many of them waited for their backward."""
    _measured: dict[int, _Measured] = field(default_factory=dict)
    _facts: list[LayerFacts] = field(default_factory=list)
    _tail_bytes: int = 0
    _most_bytes: int = 0
    _corrections: int = 0
    _was_exceeded: bool = False
    """A plan has taken more than `device_peak`."""
    _is_done: bool = False
    """Nothing is measured any more: the plan stays."""

    @property
    def in_flight(self) -> int:
        """Forwards that wait for their backward at once."""
        return max(self._in_flight)

    def choices(self) -> tuple[Choice, ...]:
        """What the layers do now."""
        if self.plan is not None:
            return self.plan.choices
        kinds: set[object] = set()
        found = []
        for number, layer in enumerate(self.layers):
            kind = kind_of(layer)
            if number >= len(self.layers) - self.config.keep_last:
                found.append(Choice.KEEP)
            elif kind not in kinds or not can_recompute(layer):
                found.append(Choice.OFFLOAD)
                kinds.add(kind)
            else:
                found.append(Choice.RECOMPUTE)
        return tuple(found)

    # Cues

    def begin_forward(self, lanes: Lanes | None, in_flight: int) -> None:
        """Plan, if enough is known. `in_flight`: forwards that wait for their backward, and this one."""
        self._in_flight.append(in_flight)
        if self._is_done or lanes is None:
            self._num_forwards += not self._is_done
            return
        if self.plan is None and self._num_forwards >= _MEASURED_FORWARD:
            self._make_plan(lanes)
        elif self.plan is not None:
            self._correct(lanes)
        self._num_forwards += 1
        self._measured = {}
        self._most_bytes = self._tail_bytes = 0
        lanes.reset_peak()

    def enter(self, number: int, lanes: Lanes | None) -> None:
        if not self._is_done and lanes is not None:
            self._of(number).start = lanes.stamp(Lane.CALLER)

    def leave(self, number: int, lanes: Lanes | None) -> None:
        if not self._is_done and lanes is not None:
            self._of(number).stop = lanes.stamp(Lane.CALLER)

    def saved(self, number: int, nbytes: int, *, is_remade: bool = False) -> None:
        """The layer has saved so much more for backward."""
        if not self._is_done:
            self._of(number).saved_bytes += nbytes
            self._of(number).remade_bytes += nbytes if is_remade else 0

    def in_backward(self, number: int | None, lanes: Lanes, here_bytes: int) -> None:
        """Backward is in the layer, or (`None`) outside any; `here_bytes` of saved tensors are on the device."""
        if self._is_done:
            return
        allocated = lanes.allocated_bytes()
        without = _known_bytes(self.model) if allocated is None else allocated - here_bytes
        self._most_bytes = max(self._most_bytes, without + here_bytes)
        if number is None:
            self._tail_bytes = max(self._tail_bytes, without)
            return
        measured = self._of(number)
        if measured.first_bytes is None:
            measured.first_bytes = without
        measured.most_bytes = max(measured.most_bytes, without)

    def _of(self, number: int) -> _Measured:
        return self._measured.setdefault(number, _Measured())

    # Planning

    def _make_plan(self, lanes: Lanes) -> None:
        if not self._most_bytes or any(self._of(number).stop is None for number in range(len(self.layers))):
            return  # no backward since, or not every layer ran: measure the next forward
        self._facts = self._collect(lanes)
        self._plan_anew()

    def _collect(self, lanes: Lanes) -> list[LayerFacts]:
        choices = self.choices()
        saved: dict[object, int] = {}
        remade: dict[object, int] = {}
        inputs: dict[object, int] = {}
        extra: dict[object, int] = {}
        for number, (layer, choice) in enumerate(zip(self.layers, choices, strict=True)):
            measured, kind = self._of(number), kind_of(layer)
            if choice is Choice.RECOMPUTE:
                inputs.setdefault(kind, measured.saved_bytes)
            else:
                saved[kind] = max(saved.get(kind, 0), measured.saved_bytes)
                remade[kind] = max(remade.get(kind, 0), measured.remade_bytes)
                extra[kind] = max(extra.get(kind, 0), measured.most_bytes - (measured.first_bytes or 0))
        facts = []
        base = 0
        for number, layer in reversed(list(enumerate(self.layers))):
            measured, kind = self._of(number), kind_of(layer)
            base = measured.first_bytes if measured.first_bytes is not None else base
            facts.append(
                LayerFacts(
                    lanes.elapsed_ms(measured.start, measured.stop),
                    saved.get(kind, measured.saved_bytes),
                    min(inputs.get(kind, saved.get(kind, 0)), saved.get(kind, measured.saved_bytes)),
                    base + extra.get(kind, 0),
                    can_recompute(layer),
                    remade.get(kind, 0),
                    remade[kind] / self.device().remaking_gb_per_s / 1e6 if remade.get(kind) else 0.0,
                )
            )
        facts.reverse()
        if facts:  # what runs behind the layers holds what they keep as well
            last = facts[-1]
            most = max(last.before_backward_bytes, self._tail_bytes)
            facts[-1] = dataclasses.replace(last, before_backward_bytes=most)
        return facts

    def _plan_anew(self) -> None:
        assert self.config.device_peak is not None
        self.plan = choose(
            self._facts,
            device_peak=int(self.config.device_peak),
            link_gb_per_s=self.device().link_gb_per_s,
            keep_last=self.config.keep_last,
            in_flight=self.in_flight,
        )
        logger.info("activations: %s", self.plan)

    def _correct(self, lanes: Lanes) -> None:
        """Compare what the last forward, which ran as planned, took with what was predicted."""
        assert self.plan is not None
        assert self.config.device_peak is not None
        found = max(lanes.peak_bytes(), self._most_bytes)
        if not self._most_bytes:
            return  # no backward yet
        room = int(self.config.device_peak) - found
        # A plan that fits, after one that did not, is not changed again: the one that did not might come back.
        enough = self._was_exceeded or room <= _CLOSE * int(self.config.device_peak)
        if self._corrections >= _CORRECTIONS or (room >= 0 and enough):
            self._is_done = True
            return
        self._corrections += 1
        self._was_exceeded |= room < 0
        before, wrong = self.plan, found - self.plan.peak_bytes
        if wrong < 0:
            wrong //= 2  # what this mix does not take, another one may
        self._facts = [
            dataclasses.replace(one, before_backward_bytes=one.before_backward_bytes + wrong) for one in self._facts
        ]
        self._plan_anew()
        if self.plan.choices == before.choices and room >= 0:
            self._is_done = True
        elif room < 0:
            logger.warning(
                "activations: the peak was %s, %s more than predicted; planned anew",
                format_size(found),
                format_size(wrong),
            )


def can_recompute(layer: nn.Module) -> bool:
    """Whether a second forward changes nothing: running statistics would count every batch twice."""
    norms = [module for module in layer.modules() if isinstance(module, _NormBase)]
    return not any(norm.track_running_stats for norm in norms)


def _known_bytes(model: nn.Module) -> int:
    """Parameters, buffers and gradients, for devices whose allocator has no statistics."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in tensors) + sum(
        param.grad.nbytes for param in model.parameters() if param.grad is not None
    )
