# SPDX-License-Identifier: Apache-2.0
"""`BackwardSelection`: which parameters are updated in backward, as learned from the training loop.

A gradient's finality cannot be known from its hook alone, so the first iteration is plain and counts how often each
parameter's hook fires: those that fire once, and whose forward checkpointing does not run again afterwards, may be
early. What of these the link cannot move, or the CPU not update, during backward is better left to `step()`: the
parameters that forward needs first get their gradients last, and left to `step()` they go in the
order in which forward needs them, instead of queueing up behind the others. How much that is, a backward is measured
for. Where `step()` waits for all of them anyway nothing is left to it: the link has no pause between backward and step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from offstage.config import OffloadConfig, Placement
from offstage.engine.engine import Engine
from offstage.errors import HostMemoryError
from offstage.memory.arena import check_host_memory
from offstage.optimizer.overlap.speculation import Speculation
from offstage.planning.host_weights import left_to_forward
from offstage.planning.predict import COLLECTED, GRADIENTS_IN_FLIGHT, LEFT_TO_STEP, OLD_WEIGHTS_ON_HOST
from offstage.rules.rule import ParamState
from offstage.tensors import local_of

logger = logging.getLogger("offstage")

_MEASURED_BACKWARD = 2
"""Which backward with updates is measured: in the first one kernels are compiled and memory is allocated."""


class BackwardSelection:
    """What one optimizer has learned."""

    def __init__(self, config: OffloadConfig, speculation: Speculation, *, leaves_some: bool) -> None:
        """`leaves_some`: whether the next forward, and not `step()`, waits for what is left to `step()`."""
        self.params: frozenset[torch.Tensor] = frozenset()
        self.most_in_flight = 0.0
        """Bytes of gradients that may wait for their updates."""
        self.most_collected = 0.0
        """Bytes of gradients whose updates begin together at the latest."""
        self._config, self._speculation, self._leaves_some = config, speculation, leaves_some
        self._once: frozenset[torch.Tensor] = frozenset()
        self._never: frozenset[torch.Tensor] = frozenset()
        """Parameters that are always left to `step()`."""
        self.some_in_parts = False
        """Some gradients have come in several parts while others came at once."""
        self._left: Mapping[tuple[Engine, Placement], float] = {}
        self._backwards = 0
        self._measured = False
        self.fallbacks: dict[str, str] = {}
        """What is not as it was asked for."""

    def learn(self, fired: Mapping[torch.Tensor, int], engines: Sequence[Engine], *, with_updates: bool) -> None:
        """An iteration is over, in which hooks have `fired` so often."""
        self._backwards += with_updates
        before, once = self._once, {param for param, times in fired.items() if times == 1}
        if once:  # otherwise a whole backward was run again, and nothing is learned from that
            self.some_in_parts |= bool(fired.keys() - once)
            self._never |= fired.keys() - once
            self._once = (self._once | once) - self._never
        if not self._config.update_in_backward:  # it may be switched on later
            return
        if not before:
            self._left = self._left_at_first(engines)
        if self._once != before:  # the first time, and when parameters join: experts, layers no longer frozen
            self._choose(engines)
        if fired and not self._once and "no effect" not in self.fallbacks:
            self._fall_back(
                "no effect",
                "update_in_backward has no effect yet: every gradient came in several parts, so all updates wait for "
                "step(). Put the backward of every micro-batch but the last under optimizer.accumulate(); with "
                "pipeline schedules use overlap_forward instead.",
            )
        elif self._once:
            self.fallbacks.pop("no effect", None)

    def replanned(self, config: OffloadConfig, engines: Sequence[Engine], *, leaves_some: bool) -> None:
        """State has moved, or cues are others: measure anew. Which gradients come at once is known already."""
        self._config, self._leaves_some, self._measured, self._backwards = config, leaves_some, False, 0
        self.fallbacks.clear()
        self.params = frozenset()
        if self._once and config.update_in_backward:
            self._left = self._left_at_first(engines)
            self._choose(engines)

    def _left_at_first(self, engines: Sequence[Engine]) -> Mapping[tuple[Engine, Placement], float]:
        share = LEFT_TO_STEP if self._leaves_some else 0.0
        return {(engine, placement): share for engine in engines for placement in Placement}

    def leave_nothing(self) -> None:
        """`step()` waits for all of it: what is left to it has nothing to hide under."""
        self._leaves_some = False

    @property
    def is_learning(self) -> bool:
        """No iteration has shown yet which gradients come at once."""
        return not self._once

    def exclude(self, params: Iterable[torch.Tensor]) -> None:
        """Their forward is run again after their gradients are there: an update in between would be seen by it."""
        self._never |= frozenset(params)

    def measure(self, engines: Sequence[Engine]) -> None:
        """A backward begins: what did the link have time for in the one before? Looks once."""
        if self._measured or self._backwards < _MEASURED_BACKWARD or not self._leaves_some:
            return
        left: dict[tuple[Engine, Placement], float] = {}
        for engine in engines:
            rates = {Placement.STREAMED: engine.transport.link_gb_per_s, Placement.HOST: engine.transport.host_gb_per_s}
            for placement, rate in rates.items():
                moving = engine.arenas.offloaded(self._once, placement)
                total = sum(held.nbytes for held in moving if held.hosted is None or placement is Placement.STREAMED)
                if total and rate:
                    left[engine, placement] = 1 - rate * 1e6 * engine.transport.timer.backward_ms() / total
        self._left, self._measured = left, True
        self._choose(engines)

    def _choose(self, engines: Sequence[Engine]) -> None:
        left: set[ParamState] = set()
        for engine in engines:
            for placement in (Placement.STREAMED, Placement.HOST):
                states = [held for held in engine.arenas.offloaded(self._once, placement) if held.hosted is None]
                left |= set(_first(states, self._left.get((engine, placement), 0.0)))
            left |= self._left_to_forward(engine)
            left |= {held for held in engine.arenas.offloaded(self._once, Placement.HOST) if held.hosted is not None}
            if self._speculation.possible:
                streamed = engine.arenas.offloaded(self._once, Placement.STREAMED)
                last = _first([held for held in streamed if held.hosted is None], OLD_WEIGHTS_ON_HOST)
                self._keep_on_host(engines, engine, [held for held in last if held not in left])
        self.params = self._once - {held.param for held in left}
        nbytes = sum(local_of(param).nbytes for param in self.params)
        self.most_in_flight, self.most_collected = GRADIENTS_IN_FLIGHT * nbytes, COLLECTED * nbytes
        logger.info(
            "update_in_backward: %d parameters in backward; in step(): %d that there is no time for, %d whose "
            "gradients come in parts or whose forward is run again",
            len(self.params),
            len(left),
            len(self._never),
        )

    def _left_to_forward(self, engine: Engine) -> set[ParamState]:
        """Of the layers whose weights live on the host: nearly all are updated in backward, while they are there.

        But then backward waits for the link, which has time in the next forward. Not if the updates are speculative:
        the second set has to be complete by then.
        """
        if not self._leaves_some or self._speculation.clips:
            return set()
        layers: dict[object, list[ParamState]] = {}
        for held in engine.arenas.hosted:
            assert held.hosted is not None
            if held.param in self._once and held.placement is Placement.STREAMED:
                layers.setdefault(held.hosted.layer, []).append(held)
        found = list(layers.values())
        return {held for number in left_to_forward(len(found)) for held in found[number]}

    def _keep_on_host(self, engines: Sequence[Engine], engine: Engine, states: Sequence[ParamState]) -> None:
        budget = self._config.host_budget
        new = [held for held in states if held not in engine.arenas.old_weights]
        need, used = sum(held.local.nbytes for held in new), sum(one.transport.host_bytes for one in engines)
        try:
            with check_host_memory(need, None if budget is None else int(budget), already_bytes=used):
                engine.arenas.keep_old_weights(new)
        except (HostMemoryError, MemoryError, OSError) as error:
            self._fall_back("kept", f"old weights of speculative updates are all kept on the device: {error}")

    def _fall_back(self, key: str, text: str) -> None:
        self.fallbacks[key] = text
        logger.warning(text)


def _first(states: Sequence[ParamState], share: float) -> list[ParamState]:
    """The first of `states` that together have `share` of the bytes."""
    room = share * sum(held.nbytes for held in states)
    found = []
    for held in states:
        if room <= 0:
            break
        found.append(held)
        room -= held.nbytes
    return found
