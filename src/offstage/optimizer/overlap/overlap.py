# SPDX-License-Identifier: Apache-2.0
"""`Overlap`: what happens outside `step()`. Turns cues into trips. Made by `optimizer.py` when the config asks for it.

- `overlap_forward`: the update of a parameter may end as late as in the next forward of its module. Only parameters
  whose module was seen running since the last step: whoever reads weights in another way never sees old ones.
- `window`: chunks are fetched ahead during backward.
- `update_in_backward`: a parameter whose gradient is final is updated at once; `early.py` says which.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from offstage.config import OffloadConfig, Placement
from offstage.engine.engine import Engine
from offstage.engine.param_state import HeldState
from offstage.errors import ConfigError, OffstageError, StepLostError
from offstage.optimizer.interrupts import deferred_interrupts
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.optimizer.overlap.hooks import Cues
from offstage.optimizer.overlap.selection import Early
from offstage.optimizer.overlap.window import Window
from offstage.rules.rule import Turn
from offstage.tensors import has_placed_gradient, is_dense

if TYPE_CHECKING:
    from offstage.optimizer.optimizer import OffloadedOptimizer

logger = logging.getLogger("offstage")

_FAILED = (
    "A backward failed after update_in_backward=True had updated some weights and not others; expected it to come to "
    "its end."
)
_GATHERS = (
    "overlap_forward: step() waits for all weights, because FSDP2 gathers them ahead of their module's forward; window "
    "and update_in_backward work"
)


class Overlap:
    """One optimizer's cues and what it has learned about the training loop."""

    def __init__(self, optimizer: OffloadedOptimizer, model: nn.Module | None) -> None:
        config = optimizer.config
        if config.overlap_forward and model is None:
            raise ConfigError(
                "overlap_forward=True needs the model, whose modules wait for their own weights; found no model. "
                "Call offload(optimizer, model, overlap_forward=True)."
            )
        if config.window == "all" and model is None:
            raise ConfigError(
                "window='all' leaves again during the next forward, whose modules give the cues; found no model. "
                "Call offload(optimizer, model, window='all'), or give window as a size."
            )
        if config.update_in_backward and model is not None:
            _refuse_ddp(any(isinstance(module, DistributedDataParallel) for module in model.modules()))
        if config.overlap_forward and isinstance(model, nn.DataParallel):
            raise ConfigError(
                "overlap_forward=True lets modules wait for their own weights; nn.DataParallel copies all weights "
                "before any module runs. Expected a model without it. Use DistributedDataParallel."
            )
        self._owner = weakref.ref(optimizer)  # which owns this: no cycle, so that dropping it frees its memory at once
        self._config = config
        self._lock = threading.RLock()
        """Autograd runs the hooks of each device in a thread of its own."""
        self._off = False
        """A graph was captured: there will be no more cues."""
        self._accumulating = 0
        self._fired: Counter[torch.Tensor] = Counter()
        self._cues_so_far = 0
        self._blind: str | None = None
        """What was said about parameters whose module's forward is not seen."""
        self._in_flight: deque[HeldState] = deque()
        self._bytes_in_flight = 0
        self._running: set[torch.Tensor] = set()
        """Parameters whose module ran forward since the last step."""
        self._unseen: set[torch.Tensor] = set()
        """Parameters that were still pending when backward began: their module did not run."""
        self._gathers = config.overlap_forward and model is not None and _is_fsdp(model)
        """FSDP2 reads weights on streams of its own, layers ahead of their forward: no module can wait for them."""
        self.early = Early(config, optimizer.speculation, leaves_some=config.overlap_forward and not self._gathers)
        self.updated: dict[torch.Tensor, HeldState] = {}
        """Given to the lanes in this backward."""
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        """Their gradients, as autograd made them; only while clipping may need them."""
        self._unfinished: set[int] = set()
        """Backwards with updates that have not come to their end."""
        self._used_options: dict[int, dict[str, Any]] = {}
        self._window = Window(config)
        if self._gathers:
            logger.warning(_GATHERS)
        self._cues = Cues(self, model)
        self.bind()
        if (idle := self._idle_window()) is not None:
            logger.warning(idle)

    @property
    def _optimizer(self) -> OffloadedOptimizer:
        owner = self._owner()
        assert owner is not None
        return owner

    def fallbacks(self) -> list[str]:
        """What does not happen as it was asked for."""
        off = "a graph was captured: step() does everything" if self._off else None
        gathers = _GATHERS if self._gathers else None
        return [
            *(text for text in (off, gathers, self._blind, self._idle_window()) if text is not None),
            *self.early.fallbacks.values(),
            *self._window.fallbacks,
        ]

    def _idle_window(self) -> str | None:
        if not self._config.window or any(engine.num_chunks for engine in self._optimizer.engines):
            return None
        return "the window is not used, because no state comes to the device for its update: leave it out"

    def bind(self) -> None:
        """Hook parameters that are new, or no longer frozen."""
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
        if self._off or any(self._captured(engine) for engine, _ in self._optimizer.by_engine([param])):
            return
        with self._lock, torch.no_grad(), deferred_interrupts():
            if not self._fired and not self._accumulating:
                self._begin_backward()
            for engine, (held,) in self._optimizer.by_engine([param]):
                self._gradient_ready(held, engine)

    def _begin_backward(self) -> None:
        """The first gradient that counts: what was learned before takes effect."""
        if self._config.update_in_backward and not self.updated:
            self._optimizer.follow_groups()
            self.early.measure(self._optimizer.engines)

    def _gradient_ready(self, held: HeldState, engine: Engine) -> None:
        if engine.pending and not engine.in_round:
            # What no forward has waited for is waited for now: backward may write into the gradients (DDP does).
            self._unseen.update(pending.param for pending in engine.pending)
            engine.settle(list(engine.pending), "backward: the last update is done")
        self._check_waited(held)
        if self._accumulating:
            return
        if held.param in self.updated:
            self._optimizer.restart_round(
                f"A gradient for {held.name!r} arrived after its update in backward: step() did not follow the "
                "backward before. Expected one backward per step(), the others under optimizer.accumulate()."
            )
        self._fired[held.param] += 1
        self._cues_so_far += 1
        self._window.in_backward(self._cues_so_far, self._optimizer.engines)
        if self._is_early(held, engine):
            self._update_now(held, engine)
        elif not self._config.update_in_backward:
            engine.fetch_ahead()

    def before_forward(self, params: Sequence[torch.Tensor], module: str) -> None:
        """The caller's stream waits for the updates of this module's weights, and for nothing else."""
        if self._config.update_in_backward:
            _refuse_ddp(DistributedDataParallel._active_ddp_module is not None)
            self._refuse_forward(params, module)
        if self._off:
            return
        for engine, states in self._optimizer.by_engine(params):
            if self._captured(engine):
                return
            engine.settle(states, "forward: the weights are ready")
        self._window.in_forward(module, self._optimizer.engines)
        self._running.update(params)
        self._unseen.difference_update(params)

    def before_read(self, params: Sequence[torch.Tensor]) -> None:
        """A state dict of the model is read."""
        self._optimizer.check_between_steps()
        for engine, states in self._optimizer.by_engine(params):
            if not engine.capturing():
                engine.settle(states, "read: the weights are ready")

    def before_load(self, params: Sequence[torch.Tensor]) -> None:
        """A state dict of the model is loaded: maybe to go on after a step that was lost."""
        self._optimizer.give_up_round("A model was loaded between backward and step().")
        for engine, states in self._optimizer.by_engine(params):
            if not engine.capturing():
                with contextlib.suppress(StepLostError):
                    engine.settle(states, "read: the weights are ready")

    def _check_waited(self, held: HeldState) -> None:
        """A gradient came out of a forward that read weights while their update was still under way."""
        if held.param in self._unseen:
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
        if engine.lanes is not None and engine.lanes.has_promised():
            raise OffstageError(
                "A graph capture began while updates of the last step were still being given to the device by other "
                "threads; expected none. Call optimizer.synchronize() before the capture."
            )
        self._off = True
        logger.warning(
            "A graph capture was seen: its replays give no cues, so overlap_forward, window and update_in_backward are "
            "off from now on and step() does everything. Results are the same."
        )
        return True

    def _refuse_forward(self, params: Sequence[torch.Tensor], module: str) -> None:
        """Between backward and step() some weights are new and some are old."""
        if torch._C._current_graph_task_id() != -1:  # inside backward, where checkpointing runs forwards again
            if any(param in self.updated for param in params):
                raise OffstageError(
                    f"Checkpointing ran the forward of {module!r} again after update_in_backward=True had updated it, "
                    "which did not happen in the first iteration. Expected the same order of forwards and gradients in "
                    "every backward. Use update_in_backward=False, or keep that module out of the checkpointed part."
                )
            if again := [param for param in params if param in self._fired]:
                self.early.exclude(again)
        elif self.updated:
            if (changed := self.what_changed()) is not None:
                self._optimizer.restart_round(changed)
                return
            raise OffstageError(
                f"The forward of {module!r} ran between backward and step(), when update_in_backward=True has updated "
                "some weights and not others. Expected step() first; run evaluation after it. If this is another "
                "micro-batch, put the backward before it under optimizer.accumulate()."
            )

    # Updates in backward

    def _is_early(self, held: HeldState, engine: Engine) -> bool:
        speculation = self._optimizer.speculation
        if held.param not in self.early.params or not speculation.allows_early or engine.lanes is None:
            return False
        if not has_placed_gradient(held.param):  # ranks decide for themselves what is early: no collective here
            return False
        # Resident state has no second set; its update costs no transfer and can as well be made in step().
        return held.placement is Placement.STREAMED or not speculation.clips

    def _update_now(self, held: HeldState, engine: Engine) -> None:
        optimizer, param = self._optimizer, held.param
        if not self.updated:
            self._unfinished.clear()  # of backwards that failed before they had updated anything
            optimizer.begin_round(in_backward=True)
            optimizer.speculation.begin()
        if not optimizer.has(param):
            return
        self._notice_end()
        turn = optimizer.turn_of(held)
        assert engine.lanes is not None
        engine.prepare()
        with engine.lanes.patiently():
            engine.take([turn], to_spare=optimizer.speculation.active)
        gradient, param.grad = param.grad, DroppedGradient(param, held.name)
        self.updated[param] = held
        if turn.group_number not in self._used_options:
            self._used_options[turn.group_number] = self._fixed(turn.group_number)
        if optimizer.speculation.active:
            assert gradient is not None
            self.gradients[param] = gradient
        torch.autograd.graph.increment_version([param])
        with engine.lanes.patiently():
            engine.advance(held)
        if not optimizer.speculation.active:
            self._bound_gradients(held)

    def _notice_end(self) -> None:
        """Find out whether this backward comes to its end: if it fails, autograd does not call back."""
        task = torch._C._current_graph_task_id()
        if task not in self._unfinished:
            self._unfinished.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._unfinished.discard(task))

    def _bound_gradients(self, held: HeldState) -> None:
        """Give back the memory of the oldest gradients behind their updates."""
        self._in_flight.append(held)
        self._bytes_in_flight += held.local.nbytes
        while self._bytes_in_flight > self.early.most_in_flight and self._in_flight:
            oldest = self._in_flight.popleft()
            self._bytes_in_flight -= oldest.local.nbytes
            for engine, states in self._optimizer.by_engine([oldest.param]):
                engine.settle(states, "backward: the update is done with the gradient")

    def what_changed(self) -> str | None:
        """Why the updates in backward are not those of this step, if so."""
        if self._unfinished:
            return _FAILED
        for param, held in self.updated.items():
            if not isinstance(param.grad, DroppedGradient):
                return (
                    f"The gradient of {held.name!r} was set or zeroed after its update in backward. Expected step() "
                    "right after backward, with the gradients that autograd made."
                )
        if any(used != self._fixed(number) for number, used in self._used_options.items()):
            return (
                "A hyperparameter changed between backward and step(), after update_in_backward=True had updated "
                "weights with the old one; expected the same from the first gradient to step(). Call schedulers after "
                "step()."
            )
        return None

    def _fixed(self, number: int) -> dict[str, Any]:
        """A group's hyperparameters, comparable without waiting for a device: tensors by identity and version."""
        group = self._optimizer.param_groups[number]
        return {
            name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name in self._optimizer.defaults
        }

    def start_again(self) -> None:
        """The iteration was given up: what fired so far does not count."""
        self._fired.clear()
        self._unseen.clear()
        self._cues_so_far = 0

    def replanned(self, config: OffloadConfig) -> None:
        """State has moved: what was learned about the old places does not hold for the new ones."""
        self._config = config
        self._window = Window(config)
        self.early.replanned(config, self._optimizer.engines)

    def all_waited(self) -> None:
        """The caller's stream has waited for every update."""
        self._unseen.clear()

    def give_gradients_back(self) -> None:
        """The updates in backward were taken back: `step()` finds the gradients where autograd left them."""
        for param, gradient in self.gradients.items():
            if isinstance(param.grad, DroppedGradient):  # otherwise someone has set it, or zeroed it, since
                param.grad = gradient
        self.updated.clear()
        self.gradients.clear()
        self._used_options.clear()
        self._unfinished.clear()

    def prefetch(self, engine: Engine) -> None:
        """The whole window, now."""
        engine.widen(self._window.slots(engine))
        engine.fetch_ahead(at_most=engine.num_chunks)

    # The step

    def end_step(self, turns: Sequence[Turn]) -> set[HeldState]:
        """Take the gradients; return the states whose weights may come as late as in the next forward."""
        self._window.end_step(self._cues_so_far, self._optimizer.engines, off=self._off)
        late: set[HeldState] = set()
        blind = 0
        for held in [*self.updated.values(), *(turn.of for turn in turns)]:
            assert isinstance(held, HeldState)
            # A weight with gaps is updated as a copy and written back when it is settled: nobody may forget that.
            seen = held.param in self._running and is_dense(held.local)
            if self._config.overlap_forward and not self._off and not self._gathers and seen:
                late.add(held)
                held.param.grad = None
            elif held.placement is not Placement.RESIDENT:
                blind += 1
        self._report_blind(blind, len(late))
        return late

    def learn(self) -> None:
        """The step is made."""
        if self._config.update_in_backward:
            self.early.learn(self._fired, self._optimizer.engines, with_updates=bool(self.updated))
        self.forget()
        self.bind()

    def _report_blind(self, blind: int, late: int) -> None:
        """Nothing falls back silently."""
        if self._config.overlap_forward and blind and not self._off and not self._gathers and self._blind is None:
            self._blind = (
                f"overlap_forward: step() waits for {blind} of {blind + late} parameters, because the forward of their "
                "modules was not seen (another module reads their weights, or the model was compiled after offload()), "
                "or because they have gaps in memory"
            )
            logger.warning(self._blind)

    def forget(self) -> None:
        """Nothing is under way."""
        for param in self.updated:
            if isinstance(param.grad, DroppedGradient):
                param.grad = None
        self.updated.clear()
        self.gradients.clear()
        self._used_options.clear()
        self._unfinished.clear()
        self._fired.clear()
        self._cues_so_far = 0
        self._in_flight.clear()
        self._bytes_in_flight = 0
        self._running.clear()
        self._unseen.clear()


def _is_fsdp(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _refuse_ddp(found: bool) -> None:
    if found:
        raise ConfigError(
            "update_in_backward=True uses gradients as autograd makes them; DistributedDataParallel reduces them "
            "later. Expected a model without it. Use overlap_forward=True and window instead."
        )
