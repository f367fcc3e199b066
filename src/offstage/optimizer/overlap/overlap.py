# SPDX-License-Identifier: Apache-2.0
"""`Overlap`: what happens outside `step()`. Turns cues into trips, where the config asks for it.

- `overlap_forward`: the update of a parameter may end as late as in the next forward of its module. Only parameters
  whose module was seen running since the last step: weights that are read in another way are never old ones.
- `window`: chunks are fetched ahead during backward.
- `update_in_backward`: a parameter whose gradient is final is updated soon; `BackwardSelection` says which.
- `weights`: a layer whose weights live on the host is updated while it is on the device. What is not updated in
  backward waits, with its gradient on the host, for `step()`, or with `overlap_forward` for the next forward.

[Note: the host's time in backward] Autograd's thread calls the hooks and launches backward's own kernels: whatever a
hook takes, backward may take longer. Giving work to lanes costs tenths of a millisecond, and a model has hundreds of
parameters, most of them small. So updates begin for a chunk's worth of parameters at a time, or for an eighth of them
in a small model; what is collected when backward ends is left to `step()`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from offstage.config import OffloadConfig, Placement
from offstage.engine.engine import Engine
from offstage.errors import OffloadIneffectiveError, OffstageError, StepLostError
from offstage.lanes.lanes import Place
from offstage.memory.interrupts import deferred_interrupts
from offstage.modules import is_recomputing, running_backward, uses_ddp
from offstage.optimizer.iteration import Iteration
from offstage.optimizer.overlap.cues import check_cues, is_fsdp, refuse_ddp
from offstage.optimizer.overlap.hooks import Hooks
from offstage.optimizer.overlap.leaving import LeavingGradients
from offstage.optimizer.overlap.left_gradient import GradientUses, LeftGradient
from offstage.optimizer.overlap.selection import BackwardSelection
from offstage.optimizer.overlap.speculation import Speculation
from offstage.optimizer.overlap.window import Window
from offstage.optimizer.places import Groups, Places
from offstage.rules.rule import ParamState, ParamUpdate
from offstage.tensors import has_placed_gradient, is_dense, local_of

logger = logging.getLogger("offstage")

_GATHERS = (
    "overlap_forward: step() waits for all weights, because FSDP2 gathers them ahead of their module's forward; window "
    "and update_in_backward work"
)

_IDLE_STEPS = 10
"""Steps without a cue after which it is sure that none will come."""


class Owner(Protocol):
    """The optimizer's runtime, as far as updates outside `step()` need it."""

    @property
    def turn(self) -> contextlib.AbstractContextManager[Any]: ...
    @property
    def config(self) -> OffloadConfig: ...
    @property
    def places(self) -> Places: ...
    @property
    def iteration(self) -> Iteration: ...
    @property
    def speculation(self) -> Speculation: ...
    @property
    def uses(self) -> GradientUses: ...
    @property
    def hold_updates(self) -> bool: ...
    @property
    def groups(self) -> Groups: ...
    @property
    def defaults(self) -> dict[str, Any]: ...

    def follow_groups(self) -> None:
        """Parameters and options may have changed since the last step."""

    def begin_in_backward(self) -> None:
        """The iteration's first update is about to be made."""

    def settle_host_weights(self, params: Sequence[torch.Tensor]) -> None:
        """Those of `params` that live on the host are about to be read or written there."""

    def restart(self, reason: str) -> None:
        """Take back what backward has updated; where that is not possible the step is lost, for `reason`."""


class _Collected:
    """Parameters whose updates begin together, in the order of their gradients."""

    def __init__(self) -> None:
        self.states: dict[ParamState, None] = {}
        self.state_bytes = 0
        self.gradient_bytes = 0

    def add(self, state: ParamState) -> None:
        """A gradient may come in parts: it counts once."""
        if state not in self.states:
            self.states[state] = None
            self.state_bytes += state.nbytes
            self.gradient_bytes += state.local.nbytes


class Overlap:
    """One optimizer's cues and what it has learned about the training loop."""

    def __init__(self, owner: Owner, model: nn.Module | None) -> None:
        config = owner.config
        check_cues(config, model)
        self._owner_ref = weakref.ref(owner)  # which owns this: no cycle, so that dropping it frees its memory at once
        self._config = config
        self._off = False
        """A graph was captured: there will be no more cues."""
        self._loop_thread: int | None = None
        """The thread that makes the steps."""
        self._accumulating = 0
        self._fired: Counter[torch.Tensor] = Counter()
        self._missed_some = False
        """There were no hooks when some gradients of this iteration came."""
        self._cues_so_far = 0
        self._blind: str | None = None
        """What was said about parameters whose module's forward is not seen."""
        self._collected: dict[tuple[Engine, Place], _Collected] = {}
        """Whose update in backward is due and has not begun, by the stream that made the gradient: the lanes wait for
        one stream, and its allocator gets the gradient's memory back."""
        self._in_flight: dict[ParamState, Engine] = {}
        """Updates in backward whose gradients are still held, the oldest first."""
        self._bytes_in_flight = 0
        self._running: set[torch.Tensor] = set()
        """Parameters whose module ran forward since the last step."""
        self._unseen: set[torch.Tensor] = set()
        """Parameters that were still pending when backward began: neither did their module run nor did a reader ask."""
        self._came: set[torch.Tensor] = set()
        """Parameters that live on the host and whose layer ran since the last step."""
        self._judged = False
        """It is known which of those on the host may have been read before their update was there."""
        self._gathers = False
        """FSDP2 reads weights on streams of its own, layers ahead of their forward: no module can wait for them."""
        self.selection = BackwardSelection(config, owner.speculation, leaves_some=config.overlap_forward)
        places = functools.partial(_places_of, self._owner_ref)
        holds = functools.partial(_holds_updates, self._owner_ref)
        self._leaving = LeavingGradients(config, self.selection, places, owner.uses, holds)
        self._window = Window(config)
        self._cued = False
        """A backward, or a call of `prefetch()`, has given a cue."""
        self._steps_without_cues = 0
        """How many there were before the first one."""
        self._idle: str | None = None
        """What was said about them."""
        self._hooks = Hooks(self, model)
        self.bind()
        if (idle := self._idle_window()) is not None:
            logger.warning(idle)

    @property
    def _owner(self) -> Owner:
        owner = self._owner_ref()
        assert owner is not None
        return owner

    @property
    def _engines(self) -> list[Engine]:
        return list(self._owner.places.engines.values())

    @property
    def brings_at_once(self) -> bool:
        """Whether an iteration has shown gradients that come in one part: only such can be used in backward."""
        return not self.selection.is_learning

    @property
    def brings_some_in_parts(self) -> bool:
        """Whether an iteration has shown gradients that come in several parts, beside others that do not."""
        return self.selection.some_in_parts

    def fallbacks(self) -> list[str]:
        """What does not happen as it was asked for."""
        off = "a graph was captured: step() does everything" if self._off else None
        gathers = _GATHERS if self._gathers else None
        return [
            *(text for text in (off, gathers, self._blind, self._idle_window(), self._idle) if text is not None),
            *self.selection.fallbacks.values(),
            *self._window.fallbacks,
        ]

    def _idle_window(self) -> str | None:
        if not self._config.window or any(engine.arenas.num_streamed_chunks for engine in self._engines):
            return None
        return "the window is not used, because no state comes to the device for its update: leave it out"

    def bind(self) -> None:
        """Parameters are new; the model may have been sharded since (accelerate does so behind the optimizer)."""
        model = self._hooks.model
        if self._config.overlap_forward and not self._gathers and model is not None and is_fsdp(model):
            self._gathers = True
            self.selection.leave_nothing()
            logger.warning(_GATHERS)
        self._hook_params()

    def _hook_params(self) -> None:
        """Hook parameters that are new, or no longer frozen."""
        if self._config.overlaps:
            self._hooks.bind([param for group in self._owner.groups for param in group["params"]])

    def remove(self) -> None:
        self._hooks.remove()

    def begin_late(self) -> None:
        """The hooks are new, in the middle of training."""
        self._missed_some = any(param.grad is not None for group in self._owner.groups for param in group["params"])

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gradients that come within are not final."""
        with self._owner.turn:
            self._accumulating += 1
        try:
            yield
        finally:
            with self._owner.turn:
                self._accumulating -= 1

    # Cues

    def gradient_ready(self, param: torch.Tensor) -> None:
        """Called by autograd's thread, with the stream current on which the gradient was made."""
        with self._owner.turn, torch.no_grad(), deferred_interrupts():
            if param.grad is None:  # zeroed by another thread, while this one waited for its turn
                return
            found = self._owner.places.place_of(param)
            if self._off or (found is not None and self._captured(found[0])):
                return
            if not self._fired and not self._accumulating:
                self._begin_backward()
                found = self._owner.places.place_of(param)  # it may have a place only now, or another one
            if found is not None:
                engine, state = found
                self._gradient_ready(state, engine)

    def _begin_backward(self) -> None:
        """The first gradient that counts: what was learned before takes effect."""
        self._leaving.begin_backward(self._engines)
        if self._config.update_in_backward and not self._owner.iteration.early:
            for engine in self._engines:
                self._settle_unseen(engine)
            self._owner.follow_groups()
            self.selection.measure(self._engines)

    def _settle_unseen(self, engine: Engine) -> None:
        """What no forward has waited for is waited for now: backward may write into the gradients (DDP does)."""
        if engine.round is None and (unsettled := engine.unsettled):
            self._unseen.update(state.param for state in unsettled)
            engine.settle(unsettled, "backward: the last update is done")

    def _gradient_ready(self, state: ParamState, engine: Engine) -> None:
        self._is_cued()
        self._settle_unseen(engine)
        if not self._judged:
            self._judged = True
            self._unseen.update(param for one in self._engines for param in _stale_on_host(one) - self._came)
        self._check_waited(state)
        if self._accumulating:
            if state.hosted is not None:
                self._leaving.leave(state, engine)
            return
        if state.param in self._owner.iteration.early:
            self._owner.restart(
                f"A gradient for {state.name!r} arrived after its update in backward: step() did not follow the "
                "backward before. Expected one backward per step(), the others under optimizer.accumulate()."
            )
        self._fired[state.param] += 1
        self._cues_so_far += 1
        self._window.in_backward(self._cues_so_far, self._engines)
        if self._is_early(state, engine):
            self._collect(state, engine)
        elif self._leaving.wants(state):
            self._leaving.leave(state, engine)
        elif not self._config.update_in_backward:
            engine.fetch_ahead()

    # Weights that live on the host

    def weights_coming(self, params: Sequence[torch.Tensor]) -> None:
        """A layer's weights are on their way, in forward: updates that were left to it are made."""
        for engine, states in self._owner.places.by_engine(params):
            engine.resume(states)

    def has_late(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether updates of a layer were left to the next forward."""
        found = self._owner.places.by_engine(params)
        return any(engine.has_postponed(states) for engine, states in found)

    def weights_needed(self, params: Sequence[torch.Tensor]) -> None:
        """A layer is about to run."""
        for engine, states in self._owner.places.by_engine(params):
            engine.settle(states, "forward: the weights are ready")
            if running_backward() is not None:
                for state in states:  # the sums of earlier micro-batches will be needed
                    if isinstance(state.param.grad, LeftGradient):
                        state.param.grad.gradient.send_for()
        if torch.is_grad_enabled():  # an evaluation's forward is not the one that a gradient comes from
            self._unseen.difference_update(params)
            self._came.update(params)

    def weights_leaving(self, params: Sequence[torch.Tensor]) -> None:
        """A layer's copy is about to be dropped: what was collected of it begins, and its gradients may go."""
        if running_backward() is not None:  # otherwise a reader lets it leave, which must not change weights
            self._begin_collected(set(params))
        for engine, states in self._owner.places.by_engine(params):
            engine.settle(states, "weights: the updates are done")
            engine.unbind(states)

    def let_gradients_leave(self) -> None:
        """Weights have gone to the host: gradients that their parameters have follow them."""
        for engine in self._engines:
            for state in engine.arenas.hosted:
                grad, like = state.param.grad, state.local
                if type(grad) is torch.Tensor and (grad.device, grad.dtype) == (state.device, like.dtype):
                    self._leaving.leave(state, engine)

    def backward_is_over(self) -> None:
        """What was collected of layers on the device begins."""
        self._begin_collected(None)

    def _begin_collected(self, params: set[torch.Tensor] | None) -> None:
        """Updates that wait for others to begin with do so now: those with one of `params`, or with any on the host."""
        for (engine, place), collected in list(self._collected.items()):
            states = list(collected.states)
            if any(state.hosted is not None if params is None else state.param in params for state in states):
                del self._collected[engine, place]
                self._update_now(states, engine)

    def begin_step(self, updates: Sequence[ParamUpdate]) -> set[ParamState]:
        """`step()` makes all that is left. Returns the updates that the next forward makes when it sends for layers."""
        self.forget_collected()  # a backward that another thread runs may not be over
        if not self._config.overlap_forward or self._off:
            return set()
        return {
            update.of
            for update in updates
            if update.left is not None and update.of.hosted is not None and update.of.param in self._running
            # The CPU has them where they are: it begins at once.
            if update.of.placement is Placement.STREAMED
        }

    def before_forward(self, params: Sequence[torch.Tensor], module: str) -> None:
        """The caller's stream waits for the updates of this module's weights, and for nothing else."""
        with self._owner.turn:
            self._before_forward(params, module)

    def _before_forward(self, params: Sequence[torch.Tensor], module: str) -> None:
        if self._config.update_in_backward:
            refuse_ddp(uses_ddp())
        self._refuse_forward(params, module)
        if self._off:
            return
        for engine, states in self._owner.places.by_engine(params):
            if self._captured(engine):
                return
            engine.settle(states, "forward: the weights are ready")
        self._window.in_forward(module, self._engines)
        if torch.is_grad_enabled():  # an evaluation's forward is not the one that a gradient comes from
            self._running.update(params)
            self._unseen.difference_update(params)

    def before_inference(self, params: Sequence[torch.Tensor]) -> None:
        """Modules of torch look at the classes of weights inside, which must not be those of late ones."""
        if not torch.is_grad_enabled():
            with self._owner.turn:
                for engine, states in self._owner.places.by_engine(params):
                    if not engine.transport.lanes.capturing():
                        engine.settle(states, "forward: the weights are ready")

    def before_read(self, params: Sequence[torch.Tensor]) -> None:
        """A state dict of the model is read."""
        with self._owner.turn:
            self.check_between_steps()
            for engine, states in self._owner.places.by_engine(params):
                if not engine.transport.lanes.capturing():
                    engine.settle(states, "read: the weights are ready")
            self._owner.settle_host_weights(params)

    def before_use(self, tensor: torch.Tensor) -> None:
        """A parameter whose update is late, or its local tensor, is used outside its module's forward."""
        places = self._owner.places
        for engine in self._engines:  # before the turn, which another thread may have had when a child was forked
            if engine.transport.is_inherited and engine.transport.lanes.at_once and engine.postponed is None:
                return  # the child has what was made before
            engine.transport.check_process()
        with self._owner.turn:
            found = places.place_of(tensor) or _place_of_local(places, tensor)
            if found is None or self._captured(found[0]):
                return
            engine, state = found
            if state.hosted is None:
                engine.settle([state], "read: the weights are ready")
            else:
                self.check_between_steps()
                places.settle("read: the weights are ready")
                self._owner.settle_host_weights([state.param])

    def before_load(self, params: Sequence[torch.Tensor]) -> None:
        """A state dict of the model is loaded: maybe to go on after a step that was lost."""
        with self._owner.turn:
            self._owner.iteration.give_up("A model was loaded between backward and step().")
            for engine, states in self._owner.places.by_engine(params):
                if not engine.transport.lanes.capturing():
                    with contextlib.suppress(StepLostError):
                        engine.settle(states, "read: the weights are ready")
            with contextlib.suppress(StepLostError):
                self._owner.settle_host_weights(params)

    def check_between_steps(self) -> None:
        """Raise if some weights are new and some are old: a reader would get a mixture."""
        if self._owner.iteration.early:
            raise OffstageError(
                "Weights or state were read between backward and step(), when update_in_backward=True has updated some "
                "of them and not others; expected step() first. Read them after step()."
            )

    def _check_waited(self, state: ParamState) -> None:
        """A gradient came out of a forward that read weights while their update was still under way."""
        if state.param in self._unseen:
            module = self._hooks.module_of.get(state.param, "unknown")
            raise OffstageError(
                f"Parameter {state.name!r} got a gradient, but the forward of its module {module!r} was not seen since "
                "the last step(), and nothing else has waited for its update: it was read in a way that cannot wait "
                "(by its address, through a tensor taken from it before, by an extension), maybe too early. Expected "
                "such a read after optimizer.synchronize(). Call that before, compile the model before offload(), or "
                "set overlap_forward=False."
            )

    def _captured(self, engine: Engine) -> bool:
        """Graphs replay without cues: from the first capture on everything happens in `step()`."""
        lanes = engine.transport.lanes
        if not lanes.capturing():
            return False
        if lanes.has_promised():
            raise OffstageError(
                "A graph capture began while updates of the last step were still being given to the device by other "
                "threads; expected none. Call optimizer.synchronize() before the capture."
            )
        if self._off:  # what reads weights outside their modules asks again
            return True
        self._off = True
        logger.warning(
            "A graph capture was seen: its replays give no cues, so overlap_forward, window and update_in_backward are "
            "off from now on and step() does everything. Results are the same."
        )
        return True

    def _refuse_forward(self, params: Sequence[torch.Tensor], module: str) -> None:
        """Between backward and step() some weights are new and some are old."""
        iteration = self._owner.iteration
        if running_backward() is not None:  # checkpointing runs forwards again
            self._leaving.is_reentrant |= not is_recomputing()
            if any(param in iteration.early for param in params):
                raise OffstageError(
                    f"Checkpointing ran the forward of {module!r} again after update_in_backward=True had updated it, "
                    "which did not happen in the first iteration. Expected the same order of forwards and gradients in "
                    "every backward. Use update_in_backward=False, or keep that module out of the checkpointed part."
                )
            if again := [param for param in params if param in self._fired]:
                self.selection.exclude(again)
        elif iteration.early:
            # In another thread than the loop's: that one may be in the middle of its backward, which has not failed.
            in_loop = threading.get_ident() == self._loop_thread
            changed = iteration.what_changed(self._owner.groups, self._owner.defaults) if in_loop else None
            if changed is not None:
                self._owner.restart(changed)
                return
            raise OffstageError(
                f"The forward of {module!r} ran between backward and step(), when update_in_backward=True has updated "
                "some weights and not others. Expected step() first; run evaluation after it. If this is another "
                "micro-batch, put the backward before it under optimizer.accumulate()."
            )

    # Updates in backward

    def _is_early(self, state: ParamState, engine: Engine) -> bool:
        if self._owner.hold_updates:
            return False
        speculation = self._owner.speculation
        chosen = state.param in self.selection.params or self._leaving.trusts()
        if not chosen or not speculation.allows_early or not engine.transport.is_open:
            return False
        if not has_placed_gradient(state.param):  # ranks decide for themselves what is early: no collective here
            return False
        if state.hosted is not None and state.placement is Placement.HOST:  # the CPU needs the norm, and the gradient
            return False
        if speculation.clips and state.hosted is not None and state.hosted.spare is None:  # frozen until now
            return False
        # Resident state has no second set; its update costs no transfer and can as well be made in step().
        return state.placement is Placement.STREAMED or not speculation.clips

    def _collect(self, state: ParamState, engine: Engine) -> None:
        """Its update is due; it begins when a chunk's worth is. See [Note: the host's time in backward]."""
        place = engine.transport.lanes.here()
        collected = self._collected.setdefault((engine, place), _Collected())
        collected.add(state)
        if collected.state_bytes >= engine.chunk_bytes or collected.gradient_bytes >= self.selection.most_collected:
            del self._collected[engine, place]
            self._update_now(list(collected.states), engine)

    def _update_now(self, states: Sequence[ParamState], engine: Engine) -> None:
        if not self._owner.iteration.early:
            self._owner.begin_in_backward()
        iteration = self._owner.iteration
        states = [state for state in states if iteration.has(state.param) and _is_here(state.param.grad)]
        if not states:
            return
        iteration.notice_end_of_backward()
        updates = [iteration.update_of(state) for state in states]
        engine.transport.prepare()
        with engine.transport.lanes.blocking():
            engine.take(updates, speculative=iteration.speculative)
        left = {
            update.of: self._leaving.keep_or_leave(update, engine)
            for update in updates
            if iteration.speculative and update.of.hosted is not None
        }
        for update in updates:
            iteration.add_early(update, self._owner.defaults, left.get(update.of))
        with engine.transport.lanes.blocking():
            engine.advance(states)
        if not iteration.speculative:
            self._bound_gradients(states, engine)

    def _bound_gradients(self, states: Sequence[ParamState], engine: Engine) -> None:
        """Give back the memory of the oldest gradients behind their updates.

        Not of those that share a chunk with a parameter whose gradient is still to come: their update is not given to
        the lanes as a whole, and they are asked again.
        """
        self._in_flight.update(dict.fromkeys(states, engine))
        self._bytes_in_flight += sum(state.local.nbytes for state in states)
        due: dict[Engine, list[ParamState]] = {}
        for state, one in self._in_flight.items():
            if self._bytes_in_flight <= self.selection.most_in_flight:
                break
            if not one.awaits_gradients(state):
                due.setdefault(one, []).append(state)
                self._bytes_in_flight -= state.local.nbytes
        for one, oldest in due.items():
            one.settle(oldest, "backward: the update is done with the gradient")
            for state in oldest:
                del self._in_flight[state]

    # Of the runtime

    def forget_collected(self) -> None:
        """What was to follow in backward is left to `step()`."""
        self._collected.clear()

    def start_again(self) -> None:
        """The iteration was given up: what fired so far does not count."""
        self._fired.clear()
        self._unseen.clear()
        self._cues_so_far = 0
        self._collected.clear()
        self._missed_some = False

    def replanned(self, config: OffloadConfig, *, moved: bool) -> None:
        """Settings are others between two steps. `moved`: state has moved, too.

        What was learned about the loop holds; what was measured on other places, or with other cues, does not.
        """
        before, self._config = self._config, config
        if not config.overlaps:
            self.remove()
        else:
            self.bind()
            if not before.overlaps:
                self.begin_late()
        self._leaving.replanned(config)
        if moved:
            self._window = Window(config)
        cues = (before.overlap_forward, before.update_in_backward)
        if moved or cues != (config.overlap_forward, config.update_in_backward):
            leaves_some = config.overlap_forward and not self._gathers
            self.selection.replanned(config, self._engines, leaves_some=leaves_some)

    def all_waited(self) -> None:
        """The caller's stream has waited for every update."""
        self._unseen.clear()

    def check_cues(self, updates: Sequence[ParamUpdate]) -> None:
        """Gradients that were assigned by hand give no cues: what waits for them does nothing, and says so.

        One such step is ordinary: torch's own checkpoint functions make it to create state.
        """
        if self._cued or self._off or not updates or not (self._config.update_in_backward or self._config.window):
            return
        self._steps_without_cues += 1
        if self._steps_without_cues < 2:
            return
        names = [name for name in ("update_in_backward", "window") if getattr(self._config, name)]
        text = (
            f"{' and '.join(names)} did nothing so far: expected gradients that a backward makes, found only gradients "
            "that were assigned to the parameters"
        )
        works_without = self._config.overlap_forward or self._config.moves_weights
        if self._steps_without_cues > _IDLE_STEPS and not works_without:
            raise OffloadIneffectiveError(
                f"{text}. Leave {' and '.join(names)} out; with a window, optimizer.prefetch() before step() is a cue, "
                "too."
            )
        if self._idle is None:
            self._idle = text
            logger.warning(text)

    def _is_cued(self) -> None:
        self._cued, self._idle = True, None

    def prefetch(self, engine: Engine) -> None:
        """The whole window, now."""
        self._is_cued()
        engine.transport.widen(self._window.slots(engine))
        engine.fetch_ahead(at_most=engine.arenas.num_streamed_chunks)

    def end_step(self, updates: Sequence[ParamUpdate]) -> set[ParamState]:
        """Take the gradients; return the states whose weights may come as late as in the next forward."""
        self._loop_thread = threading.get_ident()
        self._window.end_step(self._cues_so_far, self._engines, off=self._off)
        late: set[ParamState] = set()
        blind = 0
        for state in [*self._owner.iteration.early.values(), *(update.of for update in updates)]:
            # A weight with gaps is updated as a copy and written back when it is settled, which must not be forgotten.
            seen = state.param in self._running and is_dense(state.local)
            if self._config.overlap_forward and not self._off and not self._gathers and seen:
                late.add(state)
                if (gradient := state.param.grad) is not None:
                    self._owner.iteration.taken.setdefault(state.param, gradient.dtype)
                state.param.grad = None
            elif state.placement is not Placement.RESIDENT:
                blind += 1
        self._report_blind(blind, len(late))
        return late

    def learn(self, *, with_updates: bool) -> None:
        """A step is made. `with_updates`: some of it in backward."""
        if not self._missed_some:
            self.selection.learn(self._fired, self._engines, with_updates=with_updates)
        self.forget()
        self._leaving.forget()
        self._hook_params()
        for engine in self._engines:
            engine.guard_late(weakref.WeakMethod(self.before_use))

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
        self.start_again()
        self._in_flight.clear()
        self._bytes_in_flight = 0
        self._running.clear()
        self._came.clear()
        self._judged = False


def _stale_on_host(engine: Engine) -> set[torch.Tensor]:
    """Parameters whose last update may not be on the host yet, where they live."""
    return {
        state.param for state in engine.arenas.hosted if state.hosted is not None and not state.hosted.layer.is_on_host
    }


def _is_here(grad: torch.Tensor | None) -> bool:
    """Whether there is a gradient on the device; otherwise `step()` makes the update."""
    return grad is not None and not (isinstance(grad, LeftGradient) and grad.gradient.here is None)


def _places_of(owner: weakref.ref[Owner]) -> Places:
    found = owner()
    assert found is not None
    return found.places


def _place_of_local(places: Places, local: torch.Tensor) -> tuple[Engine, ParamState] | None:
    """The place of the DTensor whose part on this rank is `local`."""
    param = next((param for param in places.states if local_of(param) is local), None)
    return None if param is None else places.place_of(param)


def _holds_updates(owner: weakref.ref[Owner]) -> bool:
    found = owner()
    assert found is not None
    return found.hold_updates
