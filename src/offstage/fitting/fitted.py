# SPDX-License-Identifier: Apache-2.0
"""`Fitted`: a job that decides between steps how it goes on: it watches, plans, tries, and goes on watching.

It begins with everything on the host that can be there, and watches the loop for two iterations. Then it plans, moves
everything to the plan's setting between two steps, and compares what two more iterations take with what was predicted:
the plan is made anew with what was wrong, a few times at most. From then on it looks at the size of every micro-batch
before it runs, and now and then at the peak and at the time. [Note: stages] in docs/internals/fit.md.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offstage.activations.layers import can_recompute
from offstage.activations.offload import ActivationOffload, offload_activations
from offstage.config import format_size
from offstage.errors import ConfigError, HostMemoryError, OffloadIneffectiveError
from offstage.fitting.sizes import num_trained, sizes_of
from offstage.fitting.watch import LoopWatch, kind_of
from offstage.lanes.lanes import Lane
from offstage.lanes.link import link_for, measure_duplex
from offstage.memory.interrupts import deferred_interrupts
from offstage.modules import Hook, layers_of
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from offstage.planning.choices import Choice
from offstage.planning.choosing import Limits, Predicted, choose, least_memory, predict
from offstage.planning.fit_plan import FitPlan, plan_job, refusal
from offstage.planning.job import Job, Setting
from offstage.planning.loop import LayerLoad, Loop

logger = logging.getLogger("offstage")

_WATCHED = 2
"""Iterations before the first plan: in the first one kernels are compiled and memory is allocated."""
_MOST_WATCHED = 6
"""Iterations after which a loop that does not run every layer is left as it is."""
_TRIED = 4
"""Iterations after each switch: the first ones learn, and give back what they do not need; the last one counts."""
_CORRECTIONS = 4
_CLOSE = 0.01
"""A plan is made anew for time or memory if that gains more than this share."""
_LOOKS_EVERY = 32
"""Iterations from one look at peak and time to the next."""
_LEAST_COPY, _MOST_COPY = 64 * 1024, 32 * 1024**2
"""Bytes of a copy that measures the link again."""
_SEEN = 0.97
"""Share of the limit that the watched iterations may have taken, if the job is to go on as it began."""
_TIGHT = 0.985
"""Share of the limit that plans use: what is left is for what was not seen."""
_SLOWER = 1.2
"""An iteration that takes so much longer than it did, at two looks, calls for a new plan."""
_MOST_SHORT = 8
"""Iterations more that are tried, if the one to be timed is of smaller micro-batches than those that were measured."""


_IN_PARTS = (
    "updates in backward cannot be used: gradients come in several parts; put the backward of every micro-batch but "
    "the last under optimizer.accumulate()"
)


class Stage(enum.Enum):
    """How far it is."""

    WATCHING = "watching"
    TRYING = "trying"
    SETTLED = "settled"


class Fitted:
    """One job: a model, its optimizer, and the activations' handle where there is one."""

    def __init__(
        self,
        optimizer: OffloadedOptimizer,
        model: nn.Module,
        job: Job,
        limits: Limits,
        began_with: Setting,
        min_bytes: int,
    ) -> None:
        """`job`: with what is known before the first iteration. `began_with`: how it begins. `min_bytes`: of saved
        tensors that may leave."""
        self.plan: FitPlan | None = None
        self.stage = Stage.WATCHING
        self.iterations = 0
        self.job, self.limits = job, limits
        self._runtime = runtime_of(optimizer)
        self._optimizer, self._model = weakref.ref(optimizer), weakref.ref(model)
        self._min_bytes, self._began_with = min_bytes, began_with
        self._layers = layers_of(model, None) if job.num_layers else []
        (self._device,) = self._runtime.places.engines
        self._lanes = link_for(self._device).lanes()
        self._handle: ActivationOffload | None = None
        self._hook: Any = None
        self._elements = self._forwards = self._corrections = self._since = 0
        self._given: FitPlan | None = None
        self._begun: Any = None
        """When this iteration's first forward began: what comes between two iterations is not theirs."""
        self._settled_ms = 0.0
        self._was_slower = self._is_timing = False
        self._num_trained = num_trained(optimizer.param_groups)
        self._tried: dict[Setting, float] = {}
        """How long an iteration took with each setting that stayed under the limit."""
        self._versions = [_versions_of(layer) for layer in self._layers]
        """Of the layers' buffers, before the first forward."""
        self._may_recompute = [
            can_recompute(layer) and not versions for layer, versions in zip(self._layers, self._versions, strict=True)
        ]
        """Not before it was seen that a layer's forward writes to no buffer: a second one would write twice."""
        self._watch = LoopWatch(
            model,
            self._layers,
            self._runtime,
            self._choices,
            self._device,
            self._lanes,
            lambda: self._elements,
            self._may_recompute,
        )

    # Beginning #

    def begin(self, plan: FitPlan | None) -> None:
        """Watch. `plan`: which was made before, and is run as soon as the loop is known."""
        self._runtime.watcher, self._given = self, plan
        self._runtime.hold_updates = True
        self._offload_activations(self._watched_choices())
        self._watch.begin_iteration()
        self._bind()
        self._lanes.reset_peak()

    def _look_at_buffers(self) -> None:
        """An iteration is over: layers that wrote to none of their buffers may be recomputed."""
        self._may_recompute[:] = [
            can_recompute(layer) and _versions_of(layer) == before
            for layer, before in zip(self._layers, self._versions, strict=True)
        ]

    def _watched_choices(self) -> tuple[Choice, ...]:
        """All recompute, which takes the least memory, but one of each kind: what it saves must be seen."""
        if not self.job.may_offload_activations:
            return (Choice.KEEP,) * len(self._layers)
        kinds: set[object] = set()
        found = []
        for layer, may_recompute in zip(reversed(self._layers), reversed(self._may_recompute), strict=True):
            is_new = kind_of(layer) not in kinds  # the last one: nothing else is in its backward
            kinds.add(kind_of(layer))
            found.append(Choice.OFFLOAD if is_new or not may_recompute else Choice.RECOMPUTE)
        return tuple(reversed(found))

    def _choices(self) -> tuple[Choice, ...]:
        return self._handle.choices if self._handle is not None else (Choice.KEEP,) * len(self._layers)

    def _offload_activations(self, choices: tuple[Choice, ...], *, lean: bool = True) -> None:
        """The layers do as `choices` say from the next forward on. Where all keep there are no hooks.

        `lean`: as the job began, with as little on its way as can be.
        """
        is_needed = self.stage is Stage.WATCHING or any(choice is not Choice.KEEP for choice in choices)
        model = self._model()
        if model is None or not self._layers:
            return
        if is_needed and self._handle is None:
            self._handle = offload_activations(model, min_bytes=self._min_bytes, keep_last=0)
            self._handle.may_be_idle = True  # it is there to be watched, too
        if self._handle is not None and not is_needed:
            self._handle.remove()
            self._handle = None
        if self._handle is not None:
            self._handle.replan(choices)
            self._handle.is_lean = lean
            self._handle.observer = self._watch if self.stage is Stage.WATCHING else None

    def _bind(self) -> None:
        """Our hook is the first of the model's: it may change what the others do in this forward."""
        model = self._model()
        if self._hook is not None:
            self._hook.remove()
        if model is not None:
            hook = Hook(self._before_forward)
            self._hook = model.register_forward_pre_hook(_WithKeywords(hook), prepend=True, with_kwargs=True)

    def remove(self) -> None:
        """The optimizer is closed: nothing is decided any more, and layers keep their tensors."""
        self._watch.stop()
        self._runtime.watcher = None
        if self._hook is not None:
            self._hook.remove()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    # Before a forward #

    def _before_forward(self, _: nn.Module, arguments: Any, keywords: Any) -> None:
        model = self._model()
        if not torch.is_grad_enabled() or model is None or self._optimizer() is None:
            return
        leaves = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
        self._elements = sum(leaf.numel() for leaf in leaves)
        # One whose backward did not come is no micro-batch: an evaluation, or a step that was skipped.
        follows = self._forwards > 0 and any(param.grad is not None for param in model.parameters())
        self._forwards = self._forwards + 1 if follows else 1
        if self._forwards == 1:
            self._begun = self._lanes.stamp(Lane.CALLER)
        if self.plan is not None:
            self._make_room()
        elif self.stage is Stage.WATCHING and self._handle is None:  # which would tell
            self._watch.begin_forward(1)

    def _make_room(self) -> None:
        """This micro-batch is larger than those that were measured, or there are more of them: does the plan fit?"""
        if self._runtime.iteration.early:  # weights are updated, and `step()` has not followed: the forward is refused
            return
        assert self.plan is not None
        loop, is_followed = self._grown(), self._follow_parameters()
        if loop is self.job.loop and not is_followed:
            return
        self.job = dataclasses.replace(self.job, loop=loop)
        self._tried.clear()  # they were tried with less
        self._settled_ms = 0.0
        if not is_followed and predict(self.job, self.plan.setting).device_bytes <= self.limits.device:
            return
        logger.info(
            "fit: planned anew for micro-batches of %d elements, %d per step, and %d parameters that are trained",
            loop.input_elements,
            loop.micro_batches,
            self._num_trained,
        )
        was_there = self._handle
        with self._runtime.turn:
            self._plan_anew()
        if self._handle is not None and self._handle is not was_there:
            self._handle.begin_late()
        self._corrections = min(self._corrections, _CORRECTIONS - 2)  # what was scaled is measured anew

    def _grown(self) -> Loop:
        """The loop that was measured, or what it would be with this micro-batch."""
        loop = self.job.loop
        if self._elements > loop.input_elements > 0:
            larger = loop.scaled(self._elements / loop.input_elements)
            loop = dataclasses.replace(larger, input_elements=self._elements)
        if self._forwards > loop.micro_batches:
            loop = dataclasses.replace(loop, micro_batches=self._forwards)
        return loop

    def _follow_parameters(self) -> bool:
        """Whether others are trained than were: sizes are made anew, and what was learned was of others."""
        optimizer, model = self._optimizer(), self._model()
        if optimizer is None or model is None or num_trained(optimizer.param_groups) == self._num_trained:
            return False
        self._num_trained = num_trained(optimizer.param_groups)
        layer_of_name = {size.name: size.layer for size in self.job.sizes}
        layer_of: dict[torch.Tensor, int | None] = {
            param: layer_of_name.get(name) for name, param in model.named_parameters()
        }
        sizes = sizes_of(model, optimizer.param_groups, self._runtime.rule, self.job.config, layer_of)
        self.job = dataclasses.replace(self.job, sizes=tuple(sizes), unseen_bytes={}, slowdowns={})
        return True

    # Steps #

    def begin_step(self) -> None:
        if self.stage is Stage.WATCHING or self._is_timing:
            self._watch.begin_step()

    def end_step(self) -> None:
        self.iterations += 1
        # There may have been more: of a step that was skipped, of a backward that failed.
        if self.plan is not None and 0 < self._forwards < self.job.loop.micro_batches:
            loop = dataclasses.replace(self.job.loop, micro_batches=self._forwards)
            self.job = dataclasses.replace(self.job, loop=loop)
        self._forwards, self._since = 0, self._since + 1
        if self.stage is Stage.WATCHING:
            self._watch.end_step()
            self._end_watched()
        elif self.stage is Stage.TRYING:
            if self._is_timing:
                self._watch.end_step()
            self._end_tried()
            self._time(self.stage is Stage.TRYING and self._since >= _TRIED - 1)
        elif self._since % _LOOKS_EVERY == 0:
            self._look()

    def _end_watched(self) -> None:
        if self._given is not None and self.iterations >= _WATCHED:
            given, self._given = self._given, None
            if self._is_for_this_loop(given):
                self._watch.stop()
                try:
                    self._switch(given)
                except (HostMemoryError, OffloadIneffectiveError) as error:
                    self._stay(error)
                return
            logger.warning("fit: the plan that was given is for a loop that does something else; it is made anew")
            self.job = dataclasses.replace(self.job, unseen_bytes={}, slowdowns={})
        if self.iterations == 1:
            self._look_at_buffers()
            self._offload_activations(self._watched_choices())
        if self.iterations < _WATCHED or not self._watch.is_complete:
            if self.iterations >= _MOST_WATCHED:
                self._watch.stop()
                self.stage = Stage.SETTLED
                self._offload_activations(self._choices())  # unwatched
                logger.warning(
                    "fit: %d iterations did not run every one of the model's %d layers forward and backward; the job "
                    "goes on as it began, with all that can be there on the host",
                    self.iterations,
                    len(self._layers),
                )
                return
            self._watch.begin_iteration()
            return
        loop = self._watch.loop()
        self._watch.stop()
        notes, at_once = self.job.notes, self._brings_at_once(loop.micro_batches)
        if self.job.may_update_in_backward and not at_once:
            notes = (*notes, _IN_PARTS)
        self.job = dataclasses.replace(
            self.job, loop=loop, notes=notes, may_update_in_backward=self.job.may_update_in_backward and at_once
        )
        # Updates were held back, and so nothing was kept for the case that a norm undoes them.
        ran = dataclasses.replace(self.job, loop=dataclasses.replace(loop, clips=False))
        self._learn_peak(predict(ran, self._watched), self._watch.most_bytes)
        self.job = dataclasses.replace(self.job, watched_kind=self._watched.memory_kind)
        self._plan_anew()

    def _brings_at_once(self, micro_batches: int) -> bool:
        """Whether every gradient is final as it comes, in the backward that counts."""
        overlap = self._runtime.overlap
        return overlap is None or (overlap.brings_at_once and not (micro_batches > 1 and overlap.brings_some_in_parts))

    def _is_for_this_loop(self, given: FitPlan) -> bool:
        """Whether the loop that was watched does to gradients, and layers to buffers, what they did before."""
        watch, loop = self._watch, given.loop
        seen = (watch.micro_batches, watch.clips, watch.reads_gradients)
        at_once = self._brings_at_once(watch.micro_batches) or not given.setting.update_in_backward
        chosen = zip(given.setting.choices, self._may_recompute, strict=True)
        repeats = all(may_recompute or choice is not Choice.RECOMPUTE for choice, may_recompute in chosen)
        return at_once and repeats and seen == (loop.micro_batches, loop.clips, loop.reads_gradients)

    @property
    def _watched(self) -> Setting:
        """What ran while it was watched."""
        return dataclasses.replace(self._began_with, choices=self._choices())

    def _plan_anew(self) -> None:
        """Go over to the fastest plan that fits. Between steps, or before a forward."""
        try:
            plan = self._planned()
        except ConfigError as error:
            if self.plan is None and self._watch.most_bytes > _SEEN * self.limits.device:
                raise
            logger.warning("fit: %s The job goes on with as little as it can take", error)
            if self.plan is None:  # as it began, which fits: that was seen
                self.plan, self.stage = self._planned(self._watched), Stage.SETTLED
                self._offload_activations(self._watched.choices)
                return
            plan = self._planned(least_memory(self.job, self.limits).setting)
        try:
            self._switch(plan)
        except OffloadIneffectiveError as error:
            self._stay(error)
        except HostMemoryError as error:
            if not self.job.may_move_state:
                self._stay(error)
                return
            logger.warning("fit: state stays where it is: %s", error)
            self.job = dataclasses.replace(self.job, may_move_state=False)
            self._plan_anew()

    def _stay(self, error: Exception) -> None:
        """A switch has changed nothing."""
        logger.warning("fit: the job goes on as it was: %s", error)
        is_as_it_began = self.plan is None
        if self.plan is None:
            self.plan = self._planned(self._watched)
        self.stage = Stage.SETTLED
        self._offload_activations(self._choices(), lean=is_as_it_began)  # unwatched
        self._time(False)

    def _planned(self, setting: Setting | None = None) -> FitPlan:
        """The plan of `setting`, or the fastest one that leaves a little of the limit."""
        tight = dataclasses.replace(self.limits, device=int(_TIGHT * self.limits.device))
        if setting is None and choose(self.job, tight) is None:
            least = least_memory(self.job, tight)
            need = dataclasses.replace(least, device_bytes=math.ceil(least.device_bytes / _TIGHT))
            raise ConfigError(refusal(need, self.limits))
        return dataclasses.replace(plan_job(self.job, tight, setting), limits=self.limits)

    def _switch(self, plan: FitPlan) -> None:
        """Go over to `plan`. If that fails, or is interrupted, nothing has changed."""
        optimizer = self._optimizer()
        assert optimizer is not None
        before, was_lean = (self.stage, self._choices()), self._handle is not None and self._handle.is_lean
        with deferred_interrupts():
            try:
                self.stage = Stage.TRYING
                self._offload_activations(plan.setting.choices, lean=False)
                with self._runtime.deciding():
                    optimizer.replan(**plan.overrides)  # type: ignore[arg-type]
            except BaseException:
                self.stage = before[0]
                self._offload_activations(before[1], lean=was_lean)
                self._bind()
                raise
            self._runtime.hold_updates = False  # only now: speculation needs a second set of the state as it is placed
            self._bind()
            self._time(False)
            self.plan, self._since, self._was_slower = plan, 0, False
            self._lanes.reset_peak()
        logger.info("fit: %s", plan.summary())

    # Looking back #

    def _time(self, is_wanted: bool) -> None:
        """The layers of the next iteration are timed, where there are hooks that tell of them; or no more."""
        if self._is_timing:
            self._watch.stop()
        self._is_timing = is_wanted and self._handle is not None
        if self._handle is not None:
            self._handle.observer = self._watch if self._is_timing else None
        if self._is_timing:
            self._watch.times_only = True
            self._watch.begin_iteration()

    def _end_tried(self) -> None:
        if self._begun is None or self._since < _TRIED:
            return
        assert self.plan is not None
        took_ms, peak = self._took_ms(), self._lanes.peak_bytes()
        is_over = peak > self.limits.device
        if not is_over and not self._is_whole and self._since < _TRIED + _MOST_SHORT:
            return
        if self._is_whole:
            if not is_over:
                self._tried[self.plan.setting] = took_ms
            self._learn(took_ms, peak)
        elif is_over:
            self._learn_peak(predict(self.job, self.plan.setting), peak)
        if (self._is_whole or is_over) and self._corrections < _CORRECTIONS and self._try_another(took_ms, peak):
            return
        self._settle(took_ms, is_over=is_over)

    @property
    def _is_whole(self) -> bool:
        """Whether the last micro-batch was as large as the largest that the plan is for."""
        return self._elements >= self.job.loop.input_elements

    def _took_ms(self) -> float:
        """This iteration, from its first forward to the end of its step."""
        return self._lanes.elapsed_ms(self._begun, self._lanes.stamp(Lane.CALLER))

    def _learn(self, took_ms: float, peak: int) -> None:
        """What the setting took, beside what was predicted, corrects the predictions of all."""
        assert self.plan is not None
        setting, job = self.plan.setting, self.job
        loop = self._watch.retimed(job.loop) if self._is_timing else job.loop
        plain = dataclasses.replace(job, loop=loop, slowdowns={})
        # Those that were measured beside other times of the layers are measured beside these.
        took = {**(self._tried if loop != job.loop else {}), setting: took_ms}
        slowdowns = {} if loop != job.loop else dict(job.slowdowns)
        for one, ms in took.items():
            predicted_ms = predict(plain, one).iteration_ms
            slowdowns[one.kind] = ms / predicted_ms if predicted_ms else 1.0
        self.job = dataclasses.replace(plain, slowdowns=slowdowns)
        self._learn_peak(predict(self.job, setting), peak)

    def _learn_peak(self, predicted: Predicted, peak: int) -> None:
        """Settings of this kind are as wrong as the worst of them that was measured."""
        known, kind = self.job.unseen_bytes, predicted.setting.memory_kind
        wrong = peak - predicted.device_bytes + self.job.unseen_of(predicted.setting) if peak else 0
        wrong = wrong if wrong > 0 else wrong // 2  # what this setting does not take, another one may
        unseen = {**known, kind: max(wrong, known.get(kind, wrong))}
        watched = None if kind == self.job.watched_kind else self.job.watched_kind
        self.job = dataclasses.replace(self.job, unseen_bytes=unseen, watched_kind=watched)

    def _try_another(self, took_ms: float, peak: int) -> bool:
        """Go over to another setting, if the corrected predictions say that it is worth it."""
        assert self.plan is not None
        is_over = peak > self.limits.device
        if is_over:
            logger.warning(
                "fit: the peak was %s, over device_peak=%s; planned anew",
                format_size(peak),
                format_size(self.limits.device),
            )
        try:
            other = self._planned()
        except ConfigError:
            if not is_over or self.plan.setting == least_memory(self.job, self.limits).setting:
                return False
            self._corrections += 1
            self._plan_anew()  # to what takes the least
            return True
        gains = other.predicted.iteration_ms < (1.0 - _CLOSE) * took_ms
        if other.setting in self._tried or other.setting == self.plan.setting or not (is_over or gains):
            return False
        self._corrections += 1
        self._plan_anew()
        return True

    def _settle(self, took_ms: float, *, is_over: bool) -> None:
        """Stay, or go back to what was the fastest of those that were tried."""
        assert self.plan is not None
        best = min(self._tried, key=self._tried.__getitem__, default=self.plan.setting)
        if best != self.plan.setting and (is_over or self._tried[best] < (1.0 - _CLOSE) * took_ms):
            try:
                self._switch(self._planned(best))
                took_ms = self._tried[best]
            except HostMemoryError as error:
                self._stay(error)
        else:
            self.plan = self._planned(self.plan.setting)
        self.stage, self._since = Stage.SETTLED, 0
        self._settled_ms, self._was_slower = (took_ms if self._is_whole else 0.0), False
        self._tried.clear()
        self._lanes.reset_peak()
        logger.info("fit: settled after %d iterations, %s", self.iterations, self.plan.summary())

    def _look(self) -> None:
        """Now and then: has the peak come over the limit, or an iteration become slower?"""
        if self.plan is None or self._begun is None:
            return
        peak, took_ms = self._lanes.peak_bytes(), self._took_ms()
        is_over = self.limits.device < peak
        if self._is_whole and not self._settled_ms:  # batches have grown since: this is how long they take
            self._settled_ms = took_ms
        seems_slower = self._is_whole and took_ms > _SLOWER * self._settled_ms
        is_slower, self._was_slower = seems_slower and self._was_slower, seems_slower
        if not (is_over or is_slower):
            return
        if is_slower:
            room = self.limits.device - (self._lanes.allocated_bytes() or 0)
            rate = measure_duplex(self._lanes, nbytes=max(_LEAST_COPY, min(_MOST_COPY, room // 4)))
            machine = self.job.machine
            self.job = dataclasses.replace(
                self.job,
                machine=dataclasses.replace(
                    machine, link_duplex_gb_per_s=rate, link_up_gb_per_s=rate, link_down_gb_per_s=rate
                ),
                slowdowns={},
            )
            logger.info("fit: an iteration takes %.1f ms instead of %.1f; planned anew", took_ms, self._settled_ms)
        if is_over:
            self._learn_peak(predict(self.job, self.plan.setting), peak)
            logger.warning("fit: the peak was %s, over device_peak; planned anew", format_size(peak))
        self._corrections = 0
        self._plan_anew()


class _WithKeywords:
    """A hook of a module's forward that is given keywords, too, and returns nothing."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        self._hook(module, arguments, keywords)


def _versions_of(layer: nn.Module) -> list[int]:
    """Of its buffers: one that is written to has another."""
    return [buffer._version for buffer in layer.buffers()]


def empty_loop(model: nn.Module) -> Loop:
    """What is known of a loop before its first iteration: the number of layers."""
    try:
        layers = layers_of(model, None)
    except ConfigError:
        layers = []
    return Loop(layers=tuple(LayerLoad(can_recompute=can_recompute(layer)) for layer in layers))
