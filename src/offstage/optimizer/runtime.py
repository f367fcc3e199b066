# SPDX-License-Identifier: Apache-2.0
"""`Runtime`: what is behind an `OffloadedOptimizer`: places, overlap, clipping, the iteration under way, a lost step.

`step()` reads gradients and hyperparameters afresh, gives resident parameters and chunks to each device's engine, and
makes the caller's stream wait for the new weights. Everything that reads state drains the lanes first.

[Note: threads] Every call from outside holds the `turn`: public methods, `optimizer.state`, checkpoints, and the cues
of forward and of autograd's threads. So a thread that reads while another one trains sees the state between two calls.
A backward takes the turn in autograd's thread: code that holds it must not call backward.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from offstage.config import OffloadConfig, Placement
from offstage.engine import named_state
from offstage.engine.engine import Engine
from offstage.engine.snapshot import Snapshot
from offstage.engine.transport import Moved
from offstage.errors import ConfigError, OffloadIneffectiveError, StepLostError
from offstage.memory.interrupts import deferred_interrupts
from offstage.modules import running_backward
from offstage.optimizer.checks import check_no_duplicates
from offstage.optimizer.iteration import End, Iteration, lost_by, note_writes
from offstage.optimizer.overlap.cues import needs_model
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.optimizer.overlap.left_gradient import GradientUses, LeftGradient
from offstage.optimizer.overlap.overlap import Overlap
from offstage.optimizer.overlap.speculation import Norm, Speculation
from offstage.optimizer.places import NOTHING_TRAINS, Groups, Places
from offstage.optimizer.trained_model import TrainedModel, trains_nothing
from offstage.planning.fit_plan import FitPlan
from offstage.planning.group_slots import with_slots
from offstage.planning.plan import Plan
from offstage.rules import Rule
from offstage.rules.rule import ParamState, ParamUpdate
from offstage.weights.host_weights import HostWeights, host_weight_of
from offstage.weights.moving import MovingWeights

logger = logging.getLogger("offstage")


_alive: weakref.WeakSet[Runtime] = weakref.WeakSet()


def runtimes_with(params: Collection[torch.Tensor]) -> list[Runtime]:
    """Those of optimizers that update some of `params`."""
    return [runtime for runtime in list(_alive) if not runtime.places.states.keys().isdisjoint(params)]


class Rest(Protocol):
    """An optimizer's sleep."""

    def use(self, how: str) -> None:
        """The optimizer is about to be used: raise if it is asleep, and wait for its state if it is waking."""


class Watcher(Protocol):
    """Decides between steps how training goes on."""

    @property
    def plan(self) -> FitPlan | None:
        """What it has decided last."""

    def begin_step(self) -> None:
        """`step()` begins: backward is over, and so is clipping."""

    def end_step(self) -> None:
        """`step()` is over, and settings may change."""

    def remove(self) -> None:
        """The optimizer is closed."""


class Runtime:
    """What one optimizer has on its devices and on the host."""

    # Initialization

    def __init__(
        self,
        rule: Rule,
        shell: torch.optim.Optimizer,
        config: OffloadConfig,
        model: torch.nn.Module | None,
        names: dict[torch.Tensor, str],
        groups: Callable[[], Groups],
        defaults: dict[str, Any],
    ) -> None:
        """`shell`: an optimizer of the user's class without parameters. `groups`: the user's `param_groups`, now."""
        self.rule, self.shell, self.config, self.defaults = rule, shell, config, defaults
        self.turn = threading.RLock()
        """Held by the thread that is in one of these methods; see [Note: threads]."""
        self.places = Places(rule, with_slots(config, model), names)
        self.weights: HostWeights | None = None
        """Those that live on the host."""
        self.speculation = Speculation()
        self.uses = GradientUses(self.turn)
        self.overlap: Overlap | None = None
        """Once there were cues; without any it has no hooks, and waits for others with what it has learned."""
        self.iteration = Iteration(1, self.places, weakref.WeakMethod(self._ended))
        self.own_state: dict[Any, Any] = {}
        """What the user keeps in `optimizer.state` under keys that are not tensors."""
        self.rest: Rest | None = None
        """While it is asleep, and until its state is back."""
        self.watcher: Watcher | None = None
        """Of a job that `fit()` runs."""
        self.is_deciding = False
        """Whether it is the watcher that changes settings."""
        self.steps = 0
        self.skipped_steps = 0
        self.last_moved = Moved()
        """In the last step: from the end of the one before to its own."""
        self._groups = groups
        self._lost: str | None = None
        self._holds = False
        self._fetched_before = 0
        """Bytes of weights that were on the host earlier, and are not any more."""
        self._moved_until = Moved()
        self.norm_on_host: torch.Tensor | None = None
        """Where the host looks at norms."""
        self._taken: dict[torch.Tensor, torch.dtype] = {}
        """Gradients, by dtype, that steps have taken and that plain torch would have left to be zeroed."""
        self._trained = TrainedModel(model)
        self._trained.look(self.places, self.groups)
        self._waits_for_model = False
        _alive.add(self)

    def start(self, existing: Mapping[torch.Tensor, Mapping[str, Any]], *, model_later: bool) -> None:
        """Place all parameters; `existing` is state that they have elsewhere. `model_later`: as in the optimizer."""
        self.check_values(existing)
        moving = MovingWeights(self.model, self.config, self.turn) if self.config.moves_weights else None
        try:
            self.places.place(self.groups, existing, moving=moving)
            self._waits_for_model = model_later and self.model is None and needs_model(self.config)
            if self.config.overlaps and not self._waits_for_model:
                self.overlap = Overlap(self, self.model)
        except BaseException:
            if moving is not None:
                moving.undo()
            raise
        self.weights = moving.made if moving is not None else None
        self.tell_weights()

    def use_weights(self, weights: HostWeights | None) -> None:
        """These live on the host from now on."""
        if self.weights is not None and weights is None:
            self._fetched_before += self.weights.bytes_fetched
        self.weights = weights

    def tell_weights(self) -> None:
        """Weights that live on the host know who updates them."""
        if self.weights is not None:
            assert self.overlap is not None
            self.weights.listener = weakref.ref(self.overlap)
            self.weights.may_reuse = self.config.overlap_forward

    def take_over(self, existing: dict[torch.Tensor, Any]) -> None:
        """Move existing state in, parameter by parameter, so that device memory falls while host memory fills."""
        with deferred_interrupts():
            for param, group in self.group_of().items():
                if values := existing.get(param, {}):
                    named_state.load(self.places.states[param], values, group)
                    del existing[param]
            self.own_state.update((key, one) for key, one in existing.items() if not isinstance(key, torch.Tensor))

    @property
    def model(self) -> torch.nn.Module | None:
        """What `offload()` was given, while it is alive."""
        return self._trained.model

    def attach(self, model: torch.nn.Module) -> None:
        """`model` is the one that is trained."""
        if self.model is model:
            return
        if self.model is not None:
            raise ConfigError(
                f"attach() expects an optimizer without a model; this one was made for a {type(self.model).__name__}. "
                "Leave the call out, or leave the model out where the optimizer is made."
            )
        self.check_awake("attach()")
        self.drain_state()
        overlap = Overlap(self, model) if self.config.overlaps else None  # which may refuse it
        if self.overlap is not None:
            self.overlap.remove()
        self.overlap, self._waits_for_model = overlap, False
        self._trained = TrainedModel(model)
        self._trained.look(self.places, self.groups)

    def _check_model(self) -> None:
        """Raise if the model that the config needs has not come yet."""
        if self._waits_for_model:
            name = "overlap_forward=True" if self.config.overlap_forward else "window='all'"
            raise ConfigError(
                f"{name} needs the model, whose modules give the cues; expected it before the first step, found none. "
                "Call optimizer.attach(model), or give model=... where the optimizer is made."
            )

    @property
    def groups(self) -> Groups:
        return self._groups()

    @property
    def engines(self) -> list[Engine]:
        """One per device."""
        return list(self.places.engines.values())

    def place(self, how: str, with_state: Collection[torch.Tensor] = ()) -> None:
        """Parameters or options are new: give them what they need.

        `how`: what asks for it, in messages. `with_state`: parameters that are about to get state.
        """
        self.check_awake(how)
        self.places.place(self.groups, with_state=with_state)
        self._trained.placed(self.places)
        if running_backward() is None:  # there FSDP2 needs its gathered weights, and what it has are not its parameters
            self._trained.look_at_new(self.places, self.groups)
        self.iteration.number_groups(self.groups)
        if self.overlap is not None:
            self.overlap.bind()

    def make_room(self, params: Collection[torch.Tensor]) -> None:
        """State of `params` is about to be loaded, of frozen ones too."""
        if any(self.state_of(param).frozen for param in params):
            self.place("a load of its state", params)

    def follow_groups(self) -> None:
        """The user's `param_groups` are the truth: parameters and options may have changed since the last step."""
        params = [param for group in self.groups for param in group["params"]]
        if len(set(params)) != len(params):
            check_no_duplicates(self.groups, self.places.names)
        if not self.places.fit(self.groups):
            self.restart(
                "Parameter groups changed between backward and step(), after update_in_backward=True had updated "
                "weights. Expected the same groups from the first gradient to step()."
            )
            with deferred_interrupts():
                self.place("step() with other groups or options")
        elif self.places.lack_room(self.groups, between_steps=not self.iteration.early):
            with deferred_interrupts():
                self.place("training of a parameter that was frozen")

    # The step

    def step(self) -> None:
        """Make the step of the gradients that there are, or nothing if their norm forbids it."""
        self.check_awake("step()")
        self._check_model()
        if self.watcher is not None:
            self.watcher.begin_step()
        self.follow_groups()
        self._trained.look_at_new(self.places, self.groups)
        with contextlib.ExitStack() as timed:
            for engine in self.engines:
                timed.enter_context(engine.transport.timer.step())
            self._step()
        if self.watcher is not None:
            with self.deciding():
                self.watcher.end_step()

    def _step(self) -> None:
        norm, prepared = self.iteration.norm, None
        if norm is not None and self.overlap is None and self.weights is None:
            # The device has much of backward before it, and waits for the host when that knows the norm: what can be
            # done before is done now.
            prepared = self._updates()
            for device, updates in self._by_device(prepared).items():
                self.places.engines[device].observe(updates)
        if norm is not None and not self._norm_allows(norm):
            return
        if (changed := self.iteration.what_changed(self.groups, self.defaults)) is not None:
            self.restart(changed)
        if self.weights is not None and not self.iteration.early:
            self.weights.forget_written(unseen=not self.config.overlap_forward)
        updates = self._updates() if prepared is None else prepared
        if self.overlap is not None:
            self.overlap.check_cues(updates)
        if not updates or not self.steps:
            self._trained.check(self.places, self.groups)
        if updates or self.iteration.early:
            for engine in self.engines:
                engine.transport.prepare(with_gradients=any(update.left is not None for update in updates))
            with deferred_interrupts():
                self._run(updates)
        elif self.iteration.norm is not None:
            self.iteration.revert(drop_norm=True)
        self.rule.stepped(self.groups, self.own_state)

    def _updates(self) -> list[ParamUpdate]:
        """Everything this step depends on, read and checked now; nothing of it has moved yet."""
        if not self.iteration.early:
            self._begin()
        for engine in self.engines:  # gradients that were assigned by hand, without a forward
            late = [state for state in engine.unsettled if state.param not in self.iteration.early]
            engine.settle(late, "step: the last update is done")
        wanted = (p for group in self.groups for p in group["params"] if p.grad is not None)
        return [
            self.iteration.update_of(self.places.states[p]) for p in wanted if not isinstance(p.grad, DroppedGradient)
        ]

    def _begin(self) -> None:
        self.iteration.begin(self.groups, copies_lr=self.config.overlaps, shared=self.rule.shared(self.own_state))

    def begin_in_backward(self) -> None:
        """The iteration's first update is about to be made, in backward."""
        self.check_awake("backward()")
        if self.iteration.norm is not None:  # of an iteration that was given up
            self.iteration.revert(drop_norm=True)
        self._begin()
        self.iteration.speculative = self.speculation.clips

    def _by_device(self, updates: Sequence[ParamUpdate]) -> dict[torch.device, list[ParamUpdate]]:
        found: dict[torch.device, list[ParamUpdate]] = {device: [] for device in self.places.engines}
        for update in updates:
            found[update.of.device].append(update)
        return found

    def _run(self, updates: list[ParamUpdate]) -> None:
        by_device = self._by_device(updates)
        iteration = self.iteration
        updated = with_early = bool(iteration.early)
        try:
            later = self.overlap.begin_step(updates) if self.overlap is not None else ()
            for device, device_updates in by_device.items():
                self.places.engines[device].run(device_updates, later)
                updated = updated or bool(device_updates)
            note_writes([update.of for update in updates])
            self.speculation.hits += iteration.speculative
            iteration.speculative = False
            iteration.commit(self.overlap.end_step(updates) if self.overlap is not None else ())
        except BaseException as error:
            self._fail(iteration, error, updated)
            raise
        self._taken.update(iteration.taken)
        self._settle_gradients()
        self.steps += 1
        self.places.all_taken()
        self._learn(iteration.norm, with_early=with_early)
        before, self._moved_until = self._moved_until, self.moved()
        self.last_moved = self._moved_until - before
        self._prove_effect(updates)

    def _settle_gradients(self) -> None:
        """The step is made: what of it was on the host is where other code expects it."""
        for engine in self.engines:
            engine.transport.gradients.let_go()
        if self.weights is None:
            return
        if self.config.overlap_forward:
            self.weights.note_versions()
        else:
            self.weights.settle()

    def _learn(self, norm: Norm | None, *, with_early: bool) -> None:
        """The step is made: what does it say about the next ones?"""
        if norm is not None:
            self.speculation.clips = True
        if self.overlap is not None:
            self.overlap.learn(with_updates=with_early)
            self._forget_gradients(self.overlap)
        if norm is not None:
            self.speculation.decide(norm.within)
            self.arm_speculation()

    def _forget_gradients(self, overlap: Overlap) -> None:
        """Where updates are made in backward, fewer gradients go to the host than while that was learned, or held.

        And none where only weights on the host could send theirs, and there are none.
        """
        if self.config.update_in_backward:
            all_leave = overlap.selection.is_learning or self.hold_updates
        else:
            all_leave = self.weights is not None
        for engine in self.engines if not all_leave else ():
            gradients = engine.transport.gradients
            if gradients.is_larger_than_used:
                engine.transport.synchronize("host: the first gradients are used")
                gradients.drop_unused()
                if not gradients.nbytes:
                    pipeline = engine.transport.pipeline
                    pipeline.resize(pipeline.num_slots, pipeline.slot_bytes)
            gradients.next_iteration()

    def arm_speculation(self) -> None:
        """If the loop clips, updates in backward are speculative from now on, as long as the host has the room."""
        speculation = self.speculation
        if not self.config.update_in_backward or not speculation.clips or speculation.is_armed or self.hold_updates:
            return
        budget = self.config.host_budget
        beside = self.places.still_to_take()
        speculation.arm(self.engines, None if budget is None else int(budget), beside, self.weights)

    def _fail(self, iteration: Iteration, error: BaseException, updated: bool) -> None:
        """Nothing updated yet: all is as before the step. Otherwise the step is lost, and says so from now on."""
        lost = updated or any(engine.updating or engine.has_failed for engine in self.engines)
        if iteration.end is None:
            iteration.abandon(lost_by(error, self.steps + 1) if lost else None)
        if lost:
            raise StepLostError(str(self._lost)) from error

    def _prove_effect(self, updates: list[ParamUpdate]) -> None:
        """A parameter whose state lives on the host had a gradient: then bytes must have moved."""
        moved = [update.of for update in updates if update.of.local.numel()]  # this rank's shard may be empty
        # What the CPU updates where its weight and a gradient given by hand are does not move at all.
        in_place = {of for of in moved if of.hosted is not None and of.placement is Placement.HOST}
        away = [of for of in moved if of not in in_place and of.placement is not Placement.RESIDENT]
        if away and not (self.last_moved.up or self.last_moved.down):
            raise OffloadIneffectiveError(
                f"{len(away)} parameters with state on the host had gradients (first: {away[0].name!r}), and "
                "no byte moved in this step. This is a defect in offstage; please report it with the plan: "
                f"{self.plan.summary()}"
            )

    # Clipping

    def _norm_allows(self, norm: Norm) -> bool:
        """Whether the step may be made. A speculative one whose gradients must be clipped is taken back first."""
        self.keep_or_revert(norm)
        if norm.finite:
            return True
        self.skipped_steps += 1
        self.iteration.revert(drop_norm=True)
        self.start_again()
        logger.warning("The gradients' norm is %s: step() changes nothing", float(norm.total))
        return False

    def keep_or_revert(self, norm: Norm) -> None:
        """Wait for the norm; speculative updates stay only if it changes no gradient."""
        norm.wait()
        if self.iteration.speculative and not (norm.finite and norm.within):
            self.speculation.misses += norm.finite
            self.iteration.revert()

    # The iteration's ends

    def _ended(self, iteration: Iteration) -> None:
        if iteration.end is End.ABANDONED:
            self._lost = iteration.lost if iteration.lost is not None else self._lost
            if self.overlap is not None:
                self.overlap.forget()
        elif iteration.end is End.REVERTED and self.overlap is not None:
            self.overlap.forget_collected()
        if self.weights is not None and (iteration.took_back or iteration.end is End.ABANDONED):
            self.weights.forget_copies()
        norm = iteration.norm if iteration.end is End.REVERTED else None
        self.iteration = Iteration(iteration.number + 1, self.places, weakref.WeakMethod(self._ended), norm)

    def restart(self, reason: str) -> None:
        """Take back what backward has updated; where that is not possible the step is lost, for `reason`."""
        self.iteration.give_up(reason)
        self.check_not_lost()

    def drop_gradients(self) -> None:
        """Gradients are about to be zeroed: updates that were made with them go too, where that is possible."""
        iteration = self.iteration
        if iteration.speculative or not iteration.early:
            iteration.revert(drop_norm=True)
        else:
            iteration.norm = None

    def zero_taken_gradients(self, set_to_none: bool) -> None:
        """`zero_grad` finds no gradient where a step has taken it: there are zeros now, unless `None` is wanted.

        A parameter without a gradient in the next backward is then decayed and counted, as in plain torch.
        """
        if not set_to_none:
            for param, dtype in self._taken.items():
                if param.grad is None:
                    param.grad = torch.zeros_like(param, dtype=dtype)
        self._taken.clear()

    def start_again(self) -> None:
        """What backward has shown so far does not count."""
        if self.overlap is not None:
            self.overlap.start_again()

    def drop_iteration(self) -> None:
        """All state is about to be replaced: drain everything, and forget what a lost step has left."""
        iteration = self.iteration
        lost = "A load that began between backward and step() did not come to its end."
        iteration.abandon(lost if iteration.early and not iteration.speculative else None)

    def check_not_lost(self) -> None:
        """Raise if weights and state are between two steps: training on, or saving, would spread that."""
        for engine in self.engines:
            engine.transport.check_process()
        for lost in (self._lost, *(engine.lost for engine in self.engines)):
            if lost is not None:
                raise StepLostError(lost)

    def lose(self, reason: str) -> None:
        """Weights and state do not belong together any more; training must not go on with them."""
        self._lost = f"{reason} Load a checkpoint into the model and this optimizer to go on."

    def forget_lost_step(self) -> None:
        """All state has been replaced."""
        self._lost = None

    # Watching the loop

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Within: the watcher changes settings, which nobody else may while there is one."""
        with self.turn:
            before, self.is_deciding = self.is_deciding, True
            try:
                yield
            finally:
                self.is_deciding = before

    @property
    def hold_updates(self) -> bool:
        """Whether `step()` makes all updates for now, as while it is learned which of them backward can make.

        Set between steps. Gradients leave for the host meanwhile, where they can.
        """
        return self._holds

    @hold_updates.setter
    def hold_updates(self, hold: bool) -> None:
        with self.turn:
            if hold:
                self.drain_state()
                self.speculation.disarm(self.engines, self.weights)
            self._holds = hold
            self.arm_speculation()

    @property
    def gradient_uses(self) -> int:
        """How often other code has used a gradient that had left, since this was set to 0."""
        return self.uses.count

    @gradient_uses.setter
    def gradient_uses(self, count: int) -> None:
        self.uses.count = count

    # Waiting

    def check_awake(self, how: str) -> None:
        """Raise if the optimizer sleeps; if it is waking, the caller's stream waits for its state."""
        if self.rest is not None:
            self.rest.use(how)

    def check_between_steps(self) -> None:
        """Raise if backward has updated weights and `step()` has not come yet."""
        if self.overlap is not None:
            self.overlap.check_between_steps()

    def return_slots(self) -> None:
        """Between steps: slots give their memory back behind their last stores, and the next step makes them again."""
        with self.turn, deferred_interrupts():
            for engine in self.engines:
                pipeline = engine.transport.pipeline
                pipeline.resize(pipeline.num_slots, pipeline.slot_bytes, pipeline.gradient_bytes)

    def free_slots(self, device: torch.device) -> int:
        """Give memory back that holds nothing until it is needed. Returns how much of it slots and window had.

        All is drained. Device memory of gradients that have left, and what the rule itself keeps, go with it.
        """
        engine = self.places.engines.get(device)
        if engine is None:
            return 0
        pipeline = engine.transport.pipeline
        with deferred_interrupts():
            freed = pipeline.device_bytes
            pipeline.resize(pipeline.num_slots, pipeline.slot_bytes, pipeline.gradient_bytes)
            engine.transport.gradients.rest()
            self.rule.rest(device)
            for state in self.all_states():
                if state.device == device:
                    named_state.rest_scalars(state)
        return freed

    def synchronize(self) -> None:
        """Make the host and the caller's stream wait until all weights and state are new and where they live."""
        self.places.settle("synchronize: the weights are ready")
        if self.overlap is not None:
            self.overlap.all_waited()
        for engine in self.engines:
            engine.transport.synchronize("host: all stores are done")
            engine.check()
        if self.weights is not None:
            self.weights.settle()

    def settle_host_weights(self, params: Sequence[torch.Tensor]) -> None:
        """Those of `params` that live on the host are about to be read or written there."""
        if self.weights is not None and any(host_weight_of(param) is not None for param in params):
            self.weights.settle()

    def settle(self) -> None:
        """Make the caller's stream wait for all updates: what is known of a parameter's state is then up to date."""
        self.places.settle("read: the state is known")

    def drain_state(self) -> None:
        """The state on the host is about to be read, or written: it is the newest, and the only one."""
        self.check_between_steps()
        self.synchronize()
        for engine in self.engines:
            engine.transport.pipeline.discard_staged()

    def take_snapshots(self) -> dict[int, Snapshot]:
        """Snapshots of the state on the host, which has been drained, for a writer that goes on by itself."""
        return self.places.take_snapshots()

    def before_overwrite(self) -> None:
        """State is about to be written by something other than a step: a save that is still reading it goes first."""
        self.check_awake("a write to its state")
        self.places.wait_for_snapshots()

    # Placing by hand

    def prefetch(self) -> None:
        """Fetch as much state as `window` allows, now."""
        self._check_model()
        if self.overlap is None or not self.config.window:
            raise ConfigError("prefetch() fetches into the window; found window=0. Use window='all'.")
        self.check_not_lost()
        self.check_awake("prefetch()")
        for engine in self.engines:
            engine.transport.prepare()
            self.overlap.prefetch(engine)

    def evict(self) -> None:
        """Give the window's memory back, behind the last stores."""
        for engine in self.engines:
            engine.transport.pipeline.discard_staged()
            engine.transport.pipeline.narrow(0)

    def close(self) -> None:
        """Give back slots and pinned memory, after the last copy."""
        self.iteration.give_up("The optimizer was closed between backward and step().")
        if self.watcher is not None:
            self.watcher.remove()
        if self.overlap is not None:
            self.overlap.remove()
        self.places.give_up("close: the weights are ready")
        self._give_gradients_back()
        if self.weights is not None:
            self.weights.close(to_device=False)
        for engine in self.engines:
            engine.close()

    def _give_gradients_back(self) -> None:
        """Those that have left are ordinary tensors again, unless they are of a step that is lost."""
        if self._lost is None and all(engine.lost is None for engine in self.engines):
            for param in self.places.states:
                if isinstance(param.grad, LeftGradient):
                    param.grad = param.grad.plain()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Dropped: updates that a step has left to the next forward are made, as the weights are still the model's.

        At the interpreter's exit nothing can read them any more. (Then module globals may be gone: a default is not.) A
        forked child has no copy of what it would update.
        """
        weights: HostWeights | None = getattr(self, "weights", None)
        if weights is None or is_exiting() or any(engine.transport.is_inherited for engine in self.engines):
            return
        if any(engine.postponed is not None for engine in self.engines):
            weights.link_again()
            for engine in self.engines:
                engine.finish_postponed()
            weights.settle()

    # Looking

    def state_of(self, param: torch.Tensor) -> ParamState:
        """The state of `param`; `KeyError` if it is not a parameter of this optimizer."""
        if param not in self.places.states:
            self.follow_groups()
        return self.places.states[param]

    def all_states(self) -> list[ParamState]:
        """In the order of `param_groups`."""
        return [self.state_of(param) for group in self.groups for param in group["params"]]

    def group_of(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Every parameter's group, now."""
        return {param: group for group in self.groups for param in group["params"]}

    def check_values(
        self, values: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Raise if `values` cannot be loaded as state, given the options in `groups`. Changes nothing."""
        self.places.check_values(values, self.groups, self.groups if groups is None else groups)

    def with_class_defaults(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`groups` of a checkpoint, completed as the optimizer's class completes those of older versions."""
        for group in groups:
            group["params"] = []
        self.shell.__setstate__({"state": {}, "param_groups": groups})
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    @property
    def plan(self) -> Plan:
        """Where each parameter's state lives, in the order of `param_groups`."""
        return self.places.plan(self.all_states())

    def moved(self) -> Moved:
        """Since the beginning."""
        weights = self.weights.bytes_fetched if self.weights is not None else 0
        return self.places.moved() + Moved(weights_up=self._fetched_before + weights)

    def device_state_bytes(self, device: torch.device) -> int:
        """State on `device` now: resident state and slots."""
        resident = (state.resident.values() for state in self.all_states() if state.device == device)
        slots = self.places.engines[device].transport.pipeline.device_bytes
        here = (min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensors in resident for tensor in tensors)
        return sum(here) + slots  # what sleeps has a storage without memory

    def fallbacks(self) -> list[str]:
        """What does not happen as it was asked for, and why."""
        found = [*self.places.fallbacks(), *(engine.transport.window_cut for engine in self.engines)]
        found.append(self.speculation.impossible)
        if trains_nothing(self.groups):
            found.append(NOTHING_TRAINS)
        if self.speculation.is_off:
            found.append("clipping is active too often: updates in backward are made in step() for now")
        overlap = self.overlap.fallbacks() if self.overlap is not None else []
        return [text for text in found if text is not None] + overlap
