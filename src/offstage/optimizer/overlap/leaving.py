# SPDX-License-Identifier: Apache-2.0
"""`LeavingGradients`: which gradients go to the host in backward, because they are not used at once.

Those of weights that live there, always. Beside weights on the device those of the first iteration of
`update_in_backward`, which learns which gradients are final by keeping them: so that it is no larger than the others.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence

import torch

from offstage.config import OffloadConfig, Placement
from offstage.engine.engine import Engine
from offstage.errors import HostMemoryError
from offstage.memory.arena import check_host_memory
from offstage.optimizer.checks import check_grad, check_left_dtype
from offstage.optimizer.overlap.left_gradient import GradientUses, LeftGradient
from offstage.optimizer.overlap.selection import BackwardSelection
from offstage.optimizer.places import Places
from offstage.planning.predict import LEAST_LEAVING
from offstage.rules.rule import HostedLayer, ParamState, ParamUpdate
from offstage.tensors import flat_like, norm_of

logger = logging.getLogger("offstage")

_LAYERS_LIKE_THE_NEXT = 2
"""Of the layers that backward has come to: the next one may have as much on the device as any of the last ones."""


class Wait(enum.Enum):
    """Where gradients of the first iteration, which is made in `step()`, wait for it; and what to say of that."""

    HOST = "The first iteration's gradients wait on the host"
    DEVICE = "The first iteration keeps all gradients on the device"
    NOWHERE = (
        "The first iteration updates with each gradient as it comes, because neither memory has room for all of them. "
        "Put the backward of every micro-batch but the last under optimizer.accumulate(), and use "
        "update_in_backward=False if the loop clips"
    )


class LeavingGradients:
    """The gradients of one optimizer that leave in backward."""

    def __init__(
        self,
        config: OffloadConfig,
        selection: BackwardSelection,
        places: Callable[[], Places],
        uses: GradientUses,
        holds: Callable[[], bool],
    ) -> None:
        """`places`: those of now. `holds`: whether `step()` makes all updates for now, whatever was learned."""
        self.is_reentrant = False
        """Checkpointing was seen that brings gradients in parts."""
        self._config, self._selection, self._places = config, selection, places
        self._uses, self._holds = uses, holds
        self._wait: Wait | None = None
        self._left: dict[torch.Tensor, LeftGradient] = {}
        self._allocated: int | None = None
        """On the device when backward began."""
        self._gradient_bytes = self._kept_bytes = 0
        """Of speculative updates in this backward; and what of them stays on the device."""
        self._layers: dict[HostedLayer, int] = {}
        """The layers that backward has come to, and the most that was on the device when their gradients came, beside
        gradients that stay."""

    def begin_backward(self, engines: Sequence[Engine]) -> None:
        """The first gradient that counts is there."""
        self._allocated = next((engine.transport.lanes.allocated_bytes() for engine in engines), None)
        self._gradient_bytes = self._kept_bytes = 0
        self._layers.clear()

    def replanned(self, config: OffloadConfig) -> None:
        """Settings or places are others: so may be the room for gradients."""
        self._config, self._wait = config, None

    def forget(self) -> None:
        """A step is made."""
        self._left.clear()
        self._layers.clear()

    # The first iteration, and those in which updates are held

    @property
    def _is_learning(self) -> bool:
        return self._config.update_in_backward and (self._selection.is_learning or self._holds())

    def wants(self, state: ParamState) -> bool:
        """Whether the gradient of `state`, which is not used at once, goes to the host."""
        if state.hosted is not None:
            return True
        plain = state.local is state.param and type(state.param.grad) in (torch.Tensor, LeftGradient)
        return self._is_learning and plain and _may_leave(state) and self.where_they_wait() is Wait.HOST

    def trusts(self) -> bool:
        """Whether gradients of the first iteration are taken to be final as they come: neither memory can keep them.

        They are final, unless a backward is run again or checkpointing is reentrant, and then an error says so.
        """
        return self._is_learning and not self.is_reentrant and self.where_they_wait() is Wait.NOWHERE

    def where_they_wait(self) -> Wait:
        """Where the gradients of the iteration that learns can wait for `step()`; decided once."""
        if self._wait is None:
            places = self._places()
            engines = list(places.engines.values())
            need = sum(state.local.nbytes for state in places.states.values() if _may_leave(state))
            need -= sum(engine.transport.gradients.nbytes for engine in engines)  # which are there
            free = sum(engine.transport.lanes.free_bytes() for engine in engines)
            budget = None if self._config.host_budget is None else int(self._config.host_budget)
            used = sum(engine.transport.host_bytes for engine in engines)
            try:
                with check_host_memory(need, budget, already_bytes=used):
                    self._wait = Wait.HOST
            except HostMemoryError as error:
                self._wait = Wait.DEVICE if not free or need <= free else Wait.NOWHERE  # 0: it is not known
                logger.warning("%s: %s", self._wait.value, error)
        return self._wait

    # Leaving

    def leave(self, state: ParamState, engine: Engine) -> None:
        """The gradient goes to the host, and its device memory back, behind the copy."""
        grad, local = state.param.grad, state.local
        assert grad is not None
        returned = grad.gradient.take_here() if isinstance(grad, LeftGradient) else None
        if isinstance(grad, LeftGradient) and returned is None:  # it is there already
            return
        if returned is None:
            check_grad(state.device, grad, state.name)
        if grad.requires_grad:  # other code goes on with its graph (create_graph=True): it stays where it is
            return
        if returned is None:
            self._left.pop(state.param, None)  # of a step that was skipped
        if grad.dtype != local.dtype:
            if state.hosted is not None:
                check_left_dtype(grad, state)
            return
        flat = flat_like(grad, local) if returned is None else returned
        norm = norm_of(flat if returned is not None else grad, 2.0)
        left = self._leave(state, engine, flat, norm, again=returned is not None)
        # Autograd refers to what it adds to: another thread that removes it from `.grad` must not free it meanwhile.
        state.param.grad = self._left[state.param] = left

    def keep_or_leave(self, update: ParamUpdate, engine: Engine) -> LeftGradient:
        """The gradient of a speculative update, while clipping may need it: on the host, or where activations were."""
        norm, again = norm_of(update.grad, 2.0), isinstance(update.of.param.grad, LeftGradient)
        self._gradient_bytes += update.grad.nbytes
        if self._is_room_for(update, engine):
            gradient = engine.transport.gradients.of(update.of, again=again)
            gradient.keep(update.grad, norm)
            return LeftGradient(update.of.param, gradient, self._uses, stays_on_host=True)
        return self._leave(update.of, engine, update.grad, norm, again=again, updating=True)

    def _leave(
        self,
        state: ParamState,
        engine: Engine,
        flat: torch.Tensor,
        norm: torch.Tensor,
        *,
        again: bool,
        updating: bool = False,
    ) -> LeftGradient:
        gradient = engine.transport.gradients.leave(state, flat, norm, again=again, updating=updating)
        return LeftGradient(state.param, gradient, self._uses, stays_on_host=state.hosted is not None)

    def _is_room_for(self, update: ParamUpdate, engine: Engine) -> bool:
        """Whether a gradient can stay in memory that backward has freed: then it is not larger than at its start.

        What a layer has remade or brought back is gone when its last gradients come, and as much comes with the layer
        before it: what counts is the most that the last two layers had, not what is on the device now.
        """
        nbytes, now = update.grad.nbytes, engine.transport.lanes.allocated_bytes()
        if now is None or self._allocated is None:  # not counted here: assume half of what came so far
            is_room = 2 * (self._kept_bytes + nbytes) <= self._gradient_bytes
        else:
            assert update.of.hosted is not None
            layer = update.of.hosted.layer
            self._layers[layer] = max(self._layers.get(layer, 0), now - self._kept_bytes)
            most = max(list(self._layers.values())[-_LAYERS_LIKE_THE_NEXT:])
            is_known = len(self._layers) > _LAYERS_LIKE_THE_NEXT  # weights and gradients of as many are on their way
            is_room = is_known and most + self._kept_bytes + 2 * nbytes <= self._allocated
        self._kept_bytes += nbytes if is_room else 0
        return is_room


def _may_leave(state: ParamState) -> bool:
    """Whether its gradient is worth a trip to the host: those of updates by the CPU go there anyway."""
    large = state.local.nbytes >= LEAST_LEAVING or state.placement is Placement.STREAMED
    by_device = state.placement is not Placement.HOST or state.hosted is not None
    return large and by_device and state.param.requires_grad
