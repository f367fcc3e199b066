# SPDX-License-Identifier: Apache-2.0
"""`Overlap`: what happens outside `step()`. Turns cues into trips. Made by `optimizer.py` when the config asks for it.

- `overlap_forward`: the update of a parameter may end as late as in the next forward of its module. Only parameters
  whose module was seen running since the last step: whoever reads weights in another way never sees old ones.
- `window`: chunks are fetched ahead during backward.
- `update_in_backward`: a parameter whose gradient is final is updated at once. Finality cannot be known from the hook
  alone, so one plain iteration counts how often each parameter's hook fires; only those that fire once are early.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offstage.cues import Cues
from offstage.dropped_gradient import DroppedGradient
from offstage.engine import Engine
from offstage.errors import ConfigError, OffstageError
from offstage.held_state import HeldState
from offstage.interrupts import deferred_interrupts
from offstage.plan import Placement
from offstage.rules.rule import Turn
from offstage.window import Window

if TYPE_CHECKING:
    from offstage.optimizer import OffloadedOptimizer

logger = logging.getLogger("offstage")

_GRADIENTS_IN_FLIGHT = 0.25
"""Share of all gradients that may wait for their update in backward. More memory than that is given back behind the
updates, which then hold up backward; the updates are that far behind only where the link is much too slow."""


class Overlap:
    """One optimizer's cues and what it has learned about the training loop."""

    def __init__(self, optimizer: OffloadedOptimizer, model: nn.Module | None) -> None:
        config = optimizer.config
        if config.overlap_forward and model is None:
            raise ConfigError(
                "overlap_forward=True needs the model, whose modules wait for their own weights; found no model. "
                "Call offload(optimizer, model, overlap_forward=True)."
            )
        if config.update_in_backward and model is not None:
            _refuse_ddp(any(isinstance(module, DistributedDataParallel) for module in model.modules()))
        self._optimizer = optimizer
        self._config = config
        self._off: str | None = None
        self._accumulating = 0
        self._fired: Counter[torch.Tensor] = Counter()
        self._once: frozenset[torch.Tensor] | None = None
        """Parameters whose hook fired once in the iteration that was learned from."""
        self._backward: dict[Engine, tuple[Any, Any]] = {}
        """Stamps at the first gradient and the end of that iteration's backward."""
        self._most_in_flight = 0.0
        self._running: set[torch.Tensor] = set()
        """Parameters whose module ran forward since the last step."""
        self.early: frozenset[torch.Tensor] | None = None
        """Parameters that are updated in backward; `None` until one iteration has been seen."""
        self.updated: dict[torch.Tensor, HeldState] = {}
        """Given to the lanes in this backward."""
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        """Their gradients, as autograd made them; only while clipping may need them."""
        self._used_options: dict[int, dict[str, Any]] = {}
        self._window = Window(config)
        self._cues = Cues(self, model)
        self.bind()

    def bind(self) -> None:
        """Hook parameters that are new."""
        self._cues.bind([held.param for held in self._optimizer.all_held()])

    def remove(self) -> None:
        self._cues.remove()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gradients that come within are not final."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    # Cues

    def gradient_ready(self, param: torch.Tensor) -> None:
        """Called by autograd's thread, with the stream current on which the gradient was made."""
        if self._off or self._accumulating:
            return
        for engine, (held,) in self._optimizer.by_engine([param]):
            if self._captured(engine):
                return
            self.check_waited(held, engine)
            self._fired[param] += 1
            if self._config.update_in_backward and self.early is None:
                self._watch(engine)
            with torch.no_grad(), deferred_interrupts():
                self._window.in_backward(engine, self._fired.total())
                if self._is_early(param, held):
                    self._update_now(held, engine)
                elif not self._config.update_in_backward:
                    engine.fetch_ahead()

    def before_forward(self, params: Sequence[torch.Tensor], module: str) -> None:
        """The caller's stream waits for the updates of this module's weights, and for nothing else."""
        if self._config.update_in_backward:
            _refuse_ddp(DistributedDataParallel._active_ddp_module is not None)
            self._refuse_forward(module)
        if self._off:
            return
        for engine, states in self._optimizer.by_engine(params):
            if self._captured(engine):
                return
            engine.settle(states, "forward: the weights are ready")
            self._window.in_forward(engine, module)
        self._running.update(params)

    def before_read(self, params: Sequence[torch.Tensor]) -> None:
        """A state dict of the model is read or loaded."""
        if not self._off:
            for engine, states in self._optimizer.by_engine(params):
                engine.settle(states, "read: the weights are ready")

    def check_waited(self, held: HeldState, engine: Engine) -> None:
        """A gradient came out of a forward that read weights while their update was still under way."""
        if held in engine.pending and held.param not in self.updated:
            module = self._cues.module_of.get(held.param, "unknown")
            raise OffstageError(
                f"Parameter {held.name!r} got a gradient, but the forward of its module {module!r} was not seen since "
                "the last step(): its weight was read in another way, and may have been read before its update. "
                "Expected every read of a weight to be in its own module's forward or after optimizer.synchronize(). "
                "Call synchronize() before that read, compile the model before offload(), or set overlap_forward=False."
            )

    def _captured(self, engine: Engine) -> bool:
        """Graphs replay without cues: from the first capture on everything happens in `step()`."""
        if not engine.capturing():
            return False
        self._off = "a graph was captured"
        logger.warning(
            "A graph capture was seen: its replays give no cues, so overlap_forward, window and update_in_backward are "
            "off from now on and step() does everything. Results are the same."
        )
        return True

    def _refuse_forward(self, module: str) -> None:
        """Between backward and step() some weights are new and some are old."""
        # Not inside backward, where checkpointing runs forwards again.
        if self.updated and torch._C._current_graph_task_id() == -1:
            raise OffstageError(
                f"The forward of {module!r} ran between backward and step(), when update_in_backward=True has updated "
                "some weights and not others. Expected step() first; run evaluation after it. If this is another "
                "micro-batch, put the backward before it under optimizer.accumulate()."
            )

    # Updates in backward

    def _watch(self, engine: Engine) -> None:
        """During the first backward, and at the beginning of the second."""
        if self._once is not None:
            self._decide_early()
        elif engine not in self._backward:
            self._backward[engine] = (engine.stamp(), None)

    def _is_early(self, param: torch.Tensor, held: HeldState) -> bool:
        speculation = self._optimizer.speculation
        if self.early is None or param not in self.early or not speculation.allows_early:
            return False
        # Resident state has no second set; its update costs no transfer and can as well be made in step().
        return held.placement is Placement.STREAMED or not speculation.clips

    def _update_now(self, held: HeldState, engine: Engine) -> None:
        optimizer, param = self._optimizer, held.param
        if not self.updated:
            optimizer.begin_round()
            optimizer.speculation.begin()
        turn = optimizer.turn_of(held)
        engine.prepare()
        engine.take([turn], to_spare=optimizer.speculation.active)
        gradient, param.grad = param.grad, DroppedGradient(param, held.name)
        self.updated[param] = held
        self._used_options.setdefault(turn.group_number, _fixed(optimizer.param_groups[turn.group_number]))
        if optimizer.speculation.active:
            assert gradient is not None
            self.gradients[param] = gradient
        torch.autograd.graph.increment_version([param])
        engine.advance(held)
        if not optimizer.speculation.active:
            self._bound_gradients(engine)

    def _bound_gradients(self, engine: Engine) -> None:
        """Give back the memory of the oldest gradients behind their updates."""
        waiting = [held for held in engine.pending if held.param in self.updated]
        total = sum(held.param.nbytes for held in waiting)
        while waiting and total > self._most_in_flight:
            oldest = waiting.pop(0)
            total -= oldest.param.nbytes
            engine.settle([oldest], "backward: the update is done with the gradient")

    def options_changed(self) -> bool:
        """Whether a hyperparameter is no longer what the updates in backward used."""
        groups = self._optimizer.param_groups
        return any(used != _fixed(groups[number]) for number, used in self._used_options.items())

    def give_gradients_back(self) -> None:
        """The updates in backward were taken back: `step()` finds the gradients where autograd left them."""
        for param, gradient in self.gradients.items():
            param.grad = gradient
        self.updated.clear()
        self.gradients.clear()
        self._used_options.clear()

    def prefetch(self, engine: Engine) -> None:
        """The whole window, now."""
        engine.widen(self._window.slots(engine))
        engine.fetch_ahead()

    # The step

    def end_step(self, turns: Sequence[Turn]) -> set[HeldState]:
        """Take the gradients; return the states whose weights may come as late as in the next forward."""
        self._window.end_step(self._fired.total())
        late: set[HeldState] = set()
        for held in [*self.updated.values(), *(turn.of for turn in turns)]:
            assert isinstance(held, HeldState)
            if self._config.overlap_forward and not self._off and held.param in self._running:
                late.add(held)
                held.param.grad = None
        self._learn()
        self.forget()
        return late

    # Learning

    def _learn(self) -> None:
        """The first iteration is over: who fired once, and how long did backward take?"""
        if not self._config.update_in_backward or self._once is not None or not self._fired:
            return
        self._once = frozenset(param for param, times in self._fired.items() if times == 1)
        self._backward = {engine: (start, engine.stamp()) for engine, (start, _) in self._backward.items()}
        several = len(self._fired) - len(self._once)
        if several:
            logger.info("%d parameters get their gradient in several parts and wait for step()", several)

    def _decide_early(self) -> None:
        """Before the second backward: what the link cannot move during backward is better left to `step()`.

        The parameters that forward needs first get their gradients last. Left to `step()` they go in the order in
        which forward needs them, instead of queueing up behind the others.
        """
        assert self._once is not None
        deferred: set[torch.Tensor] = set()
        for engine, (start, stop) in self._backward.items():
            deferred |= engine.beyond_the_link(self._once, engine.elapsed_ms(start, stop))
        self.early = self._once - deferred
        self._most_in_flight = _GRADIENTS_IN_FLIGHT * sum(param.nbytes for param in self.early)
        logger.info("%d parameters are updated in backward, %d in step()", len(self.early), len(deferred))

    def forget(self) -> None:
        """After a lost step or a load: nothing is under way."""
        for param in self.updated:
            param.grad = None
        self.updated.clear()
        self.gradients.clear()
        self._used_options.clear()
        self._fired.clear()
        self._running.clear()


def _refuse_ddp(found: bool) -> None:
    if found:
        raise ConfigError(
            "update_in_backward=True uses gradients as autograd makes them; DistributedDataParallel reduces them "
            "later. Expected a model without it. Use overlap_forward=True and window instead."
        )


def _fixed(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, comparable without waiting for a device: tensors by identity and version."""
    return {
        name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
