# SPDX-License-Identifier: Apache-2.0
"""Exact clipping together with `update_in_backward`.

The norm of all gradients is known only when backward is over, so the updates in backward are made as if nothing had to
be clipped, into a second set of arenas and with the old weights kept. If the norm turns out within `max_norm`, the
second set becomes the state by a flip; otherwise the weights come back and the step is made from the untouched state
with clipped gradients. Either way the bits are those of clipping first.

`Norm` is one call of `clip_grad_norm_`; `Speculation` decides whether the next iteration speculates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from offstage.config import Placement, format_size
from offstage.engine.engine import Engine
from offstage.errors import HostMemoryError
from offstage.lanes.lanes import Lanes
from offstage.memory.arena import check_host_memory
from offstage.optimizer.overlap.left_gradient import LeftGradient
from offstage.rules.rule import ParamState
from offstage.tensors import local_of, total_norm
from offstage.weights.host_weights import HostWeights

logger = logging.getLogger("offstage")

_PATIENCE = 8.0
"""About as many steps decide whether speculation pays."""
_PAYS_FROM, _PAYS_UNTIL = 0.4, 0.2
"""Share of steps within `max_norm`. A hit saves about half an iteration, a miss costs about a tenth of one."""


class Norm:
    """The total norm of one step's gradients, and what torch makes of it."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        gradients: Mapping[torch.Tensor, torch.Tensor],
        max_norm: float,
        norm_type: float,
        *,
        group: ProcessGroup | None,
        seen: torch.Tensor,
        lanes: Lanes,
    ) -> None:
        """`gradients` are those of `params` that have one; `seen` is where the host looks: two numbers, pinned where
        there is an accelerator.
        """
        self._of = gradients
        left = {param: one.gradient for param, one in gradients.items() if isinstance(one, LeftGradient)}
        known = {param: gradient.norm_of_type(norm_type) for param, gradient in left.items()}
        self.total = total_norm(params, gradients, norm_type, group, known)
        self.max_norm = float(max_norm)
        # Written as in torch.nn.utils.clip_grads_with_norm_, so that "nothing is clipped" means the same.
        self._coefficient = torch.clamp(self.max_norm / (self.total + 1e-6), max=1.0)
        self._lanes = lanes
        self._seen = seen
        self._seen.copy_(torch.stack([self.total, self._coefficient]).double(), non_blocking=True)
        self._applied = False
        lanes.touch(writes=[self._seen])
        self._arrived = lanes.mark()

    def clip(self) -> None:
        """Scale the gradients that the norm is of as torch does, once."""
        if not self._applied:
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for param, gradient in self._of.items():
                if param.grad is not gradient:  # the loop has put something in its place since
                    continue
                if isinstance(gradient, LeftGradient):
                    gradient.gradient.scale(self._coefficient)
                else:
                    by_device.setdefault(gradient.device, []).append(local_of(gradient))
            for device, gradients in by_device.items():
                torch._foreach_mul_(gradients, self._coefficient.to(device))
            self._applied = True

    def wait(self) -> None:
        """The one host wait of a step."""
        self._lanes.wait_on_host(self._arrived, "step: the norm is known")
        self._lanes.touch_on_host(reads=[self._seen])

    @property
    def finite(self) -> bool:
        return math.isfinite(float(self._seen[0]))

    @property
    def within(self) -> bool:
        """Clipping changes no gradient."""
        return float(self._seen[1]) == 1.0


class Speculation:
    """Whether updates in backward are made, given that the loop clips."""

    def __init__(self) -> None:
        self.clips = False
        """The loop calls `clip_grad_norm_`."""
        self.possible = False
        """There is a second set of arenas."""
        self.impossible: str | None = None
        """Why there is none."""
        self.is_armed = False
        """It was tried to have one."""
        self.hits = 0
        self.misses = 0
        self._within = 0.5
        self._pays = True

    @property
    def is_off(self) -> bool:
        """It would lose more than it wins."""
        return self.possible and not self._pays

    @property
    def allows_early(self) -> bool:
        """Whether updates in backward are right at all: at once, or speculatively."""
        return not self.clips or (self.possible and self._pays)

    def arm(
        self,
        engines: Sequence[Engine],
        host_budget: int | None,
        beside: Mapping[str, int],
        weights: HostWeights | None = None,
    ) -> None:
        """The loop clips: updates in backward are speculative from now on, if the host has the memory.

        `beside`: what else training takes on the host, by name. `weights`: those that live there, which need a second
        set, too, and room for their gradients.
        """
        self.clips, self.is_armed, self.possible, self.impossible = True, True, False, None
        training = [state for engine in engines for state in engine.arenas.hosted if _speculates(state)]
        hosted = [state.hosted for state in training if state.hosted is not None]
        need = sum(engine.arenas.streamed_bytes for engine in engines)
        need += sum(2 * weight.host.nbytes for weight in hosted)
        # Gradients that are there give their room to those that speculation needs, but for those that leave anyway.
        by_cpu = [one for engine in engines for one in engine.arenas.hosted if one.placement is Placement.HOST]
        there = [engine.transport.gradients for engine in engines]
        need -= sum(gradients.nbytes - gradients.nbytes_of(by_cpu) for gradients in there)
        used = sum(engine.transport.host_bytes for engine in engines)
        try:
            with check_host_memory(need, host_budget, already_bytes=used, beside=beside):
                logger.info(
                    "clipping with update_in_backward: allocating a second set of state, %s", format_size(max(0, need))
                )
                for engine in engines:
                    engine.arenas.add_spare()
                if weights is not None:
                    weights.add_spare([state.param for state in training])
            self.possible = True
        except (HostMemoryError, MemoryError, OSError) as error:
            _drop_spare(engines, weights)
            self.impossible = (
                "update_in_backward with clipping needs a second copy of the state on the host; without it all updates "
                f"are made in step(). {error}"
            )
            logger.warning(self.impossible)

    def disarm(self, engines: Sequence[Engine], weights: HostWeights | None) -> None:
        """There are no updates in backward for now: what they need goes back to the host. The lanes were drained."""
        if self.is_armed:
            _drop_spare(engines, weights)
        self.is_armed, self.possible, self.impossible = False, False, None

    def decide(self, within: bool) -> None:
        """A clipped step is over: its norm was `within` bounds or not."""
        self._within += (within - self._within) / _PATIENCE
        pays = self._within > (_PAYS_UNTIL if self._pays else _PAYS_FROM)
        if pays != self._pays and self.possible:
            logger.warning(
                "Clipping was active in about %.0f%% of the last steps: updates in backward are %s",
                100 * (1 - self._within),
                "made again" if pays else "not worth redoing and are made in step() for now",
            )
        self._pays = pays


def _drop_spare(engines: Sequence[Engine], weights: HostWeights | None) -> None:
    for engine in engines:
        engine.arenas.drop_spare()
    if weights is not None:
        weights.drop_spare()


def _speculates(state: ParamState) -> bool:
    """Whether a weight on the host needs a second set: neither a frozen one, nor one that the CPU updates."""
    trains = state.param.requires_grad or state.param.grad is not None
    return trains and state.placement is Placement.STREAMED
