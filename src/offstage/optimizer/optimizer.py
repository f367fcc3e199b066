# SPDX-License-Identifier: Apache-2.0
"""`offload()` and `OffloadedOptimizer`: the `torch.optim.Optimizer` contract over state that is elsewhere.

Read this first. `step()` reads gradients and hyperparameters afresh (`_take_turns`), then for each device gives
resident parameters and chunks to the lanes (`Engine.run` in `engine.py`), and makes the caller's stream wait for the
new weights. Everything that reads state drains the lanes first. What happens outside `step()`, if the config asks for
it, is in `overlap.py`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offstage.activations.host_weights import is_host_weight
from offstage.config import OffloadConfig, Placement, format_size
from offstage.engine.engine import Engine
from offstage.engine.param_state import HeldState
from offstage.engine.snapshot import Snapshot
from offstage.errors import ConfigError, OffloadIneffectiveError, OffstageError, StepLostError
from offstage.optimizer import state_dict as state_dicts
from offstage.optimizer.checks import check_grad, check_no_duplicates, check_optimizer, check_param
from offstage.optimizer.interrupts import deferred_interrupts
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.optimizer.overlap.overlap import Overlap
from offstage.optimizer.overlap.speculation import Norm, Speculation
from offstage.optimizer.places import Places
from offstage.optimizer.receipt import Receipt, make_receipt
from offstage.optimizer.replanning import moved_places, replanned_config
from offstage.planning.group_slots import with_slots
from offstage.planning.plan import Plan
from offstage.rules import choose_rule, shell_of
from offstage.rules.rule import Turn
from offstage.tensors import flat_like, local_gradient, place_gradient, reshard

logger = logging.getLogger("offstage")


def offload(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    config: OffloadConfig | None = None,
    **overrides: Any,
) -> OffloadedOptimizer:
    """Keep `optimizer`'s state in host memory and bring it to the device for its own update.

    The optimizer given is consumed: its class, groups, hooks and any state it has are taken over, and its `step`
    raises from then on. `model` gives parameters their names in messages, and the cues in forward that
    `overlap_forward` needs. `overrides` are fields of `OffloadConfig`.
    """
    check_optimizer(optimizer, model)
    return OffloadedOptimizer(optimizer, model, OffloadConfig.build(config, overrides))


def _check_host_weights(groups: list[dict[str, Any]], config: OffloadConfig, names: Mapping[Any, str]) -> None:
    found = [param for group in groups for param in group["params"] if is_host_weight(param)]
    if found and config.update_in_backward:
        raise ConfigError(
            f"update_in_backward=True updates weights while backward runs; found {names.get(found[0], '?')!r} on "
            "the host because of offload_activations(weights=True), where its gradient arrives when backward is "
            "over. Use one of the two."
        )


class OffloadedOptimizer(torch.optim.Optimizer):
    """What `offload()` returns. Use it as the optimizer it was made from."""

    _offstage_consumed = True  # offload() refuses it

    # Initialization

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, config: OffloadConfig) -> None:
        names = _names_of(optimizer, model)
        check_no_duplicates(optimizer.param_groups, names)
        for group in optimizer.param_groups:
            for param in group["params"]:
                check_param(param, names.get(param, f"of shape {tuple(param.shape)}"))
        if config.device_peak is not None and config.window != "auto":
            raise ConfigError(
                f"device_peak={format_size(int(config.device_peak))} needs to know what training takes besides state, "
                "which offload() cannot know yet. Use window='auto', train a few steps and call "
                "optimizer.replan(device_peak=...), or ask make_plan with a workload."
            )
        _check_host_weights(optimizer.param_groups, config, names)
        self.config = config
        self.rule = choose_rule(optimizer, config)
        self._shell = shell_of(optimizer)
        self._places = Places(self.rule, with_slots(config, model), names)
        self._held, self._engines = self._places.held, self._places.engines
        self._lost: str | None = None
        self.steps = 0
        self.skipped_steps = 0
        self._round = 0
        self._options: dict[int, dict[str, Any]] = {}
        self._group_number: dict[torch.Tensor, int] = {}
        self._moved_until = (0, 0)
        self.last_moved = (0, 0)
        self._host_s_before = 0.0
        """For how long the CPU had been updating when the last round began."""
        self._norm: Norm | None = None
        self._seen: torch.Tensor | None = None
        self.speculation = Speculation()
        self._overlap: Overlap | None = None
        self._model = weakref.ref(model) if model is not None else None
        params = {param for group in optimizer.param_groups for param in group["params"]}
        self._were_in_model = params & set(model.parameters()) if model is not None else set()
        self._placed = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the user's list: schedulers made before offload() write to it
        self.check_values(optimizer.state)
        self._places.place(self.param_groups, optimizer.state)
        self._placed = True
        if config.overlaps:
            self._overlap = Overlap(self, model)
        self._take_over(optimizer)
        logger.info("%s: %s", type(optimizer).__name__, self.plan.summary())

    @property
    def model(self) -> torch.nn.Module | None:
        """What `offload()` was given, while it is alive."""
        return self._model() if self._model is not None else None

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Move existing state in, parameter by parameter, so that device memory falls while host memory fills."""
        for param, group in self.group_of().items():
            existing = optimizer.state.pop(param, {})
            if existing:
                self._held[param].load(existing, group)
        for name, hooks in vars(optimizer).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                setattr(self, name, hooks)
        optimizer.state.clear()
        optimizer._offstage_consumed = True  # type: ignore[attr-defined]
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler made before must not warn for ever
        optimizer.step = _consumed_step  # type: ignore[method-assign]

    def _place(self) -> None:
        self._places.place(self.param_groups)
        self._number_groups()
        if self._overlap is not None:
            self._overlap.bind()

    # Runtime

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of the optimizer this was made from. The host does not wait for the device.

        It waits until every update has been given to the device: with updates on the host, until they are made there.
        With `overlap_forward` not even for that.

        When it returns, whatever the caller's stream is given next sees the new weights. With `overlap_forward` that
        holds for each module's forward, and for everything after `synchronize()`; `.grad` is `None` afterwards.
        """
        self.check_not_lost()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.follow_groups()
        for engine in self._engines.values():
            if engine.timer is not None:
                engine.timer.reach_step()
        if self._norm is not None and not self._norm_allows():
            return loss
        if self._overlap is not None and (changed := self._overlap.what_changed()) is not None:
            self.restart_round(changed)
        turns = self._take_turns()
        if not turns or not self.steps:
            self._check_in_model()
        self._norm = None if not turns and not self._updated_early else self._norm
        if turns or self._updated_early:
            for engine in self._engines.values():
                engine.prepare()
            with deferred_interrupts():
                self._run(turns)
        return loss

    def synchronize(self) -> None:
        """Make the host and the caller's stream wait until all weights and state are new and where they live.

        Reading `state`, `state_dict()` or `model.state_dict()` does this itself; with `overlap_forward`, other reads of
        weights outside a forward (an EMA, logging) need it.
        """
        self._places.settle("synchronize: the weights are ready")
        if self._overlap is not None:
            self._overlap.all_waited()
        for engine in self._engines.values():
            engine.synchronize("host: all stores are done")
            engine.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients of an iteration that is given up take its updates with them, where that is possible."""
        self._norm = None
        if self.speculation.active:
            self._take_back()
        super().zero_grad(set_to_none)
        if self._overlap is not None:
            self._overlap.start_again()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within: gradients are not final. For the backwards of all micro-batches but the last."""
        with self._overlap.accumulate() if self._overlap is not None else contextlib.nullcontext():
            yield

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, group: torch.distributed.ProcessGroup | None = None
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over this optimizer's parameters, with the same bits, in every mode.

        Returns the norm before clipping. If it is not finite, the next `step()` changes nothing. Shards count over all
        ranks of their mesh, and parameters may be on several meshes; every rank must call. `group`: ranks that train
        other parameters of the same model, such as the stages of a pipeline, whose gradients count too.
        """
        if self._updated_early and not self.speculation.active:
            raise OffstageError(
                "clip_grad_norm_() was called for the first time after updates in backward had been made without it. "
                "Expected it in every iteration from the first on, so that update_in_backward can keep the old weights."
            )
        if self._norm is not None and self.speculation.active:  # a second call: the first may have to clip
            self._follow_norm(self._norm)
        everyone = [p for group in self.param_groups for p in group["params"]]
        params = [p for p in everyone if p.grad is not None]
        early = self._overlap.gradients if self._overlap is not None else {}
        for param in params:
            place_gradient(param)
        gradients = {p: gradient for p in params if (gradient := early.get(p, p.grad)) is not None}
        device = next((gradient.device for gradient in gradients.values()), None)
        lanes = self._engines[device].lanes if device is not None else None
        if self._seen is None:
            pin = device is not None and device.type != "cpu"
            self._seen = torch.zeros(2, dtype=torch.float64, pin_memory=pin)
        self._norm = Norm(everyone, gradients, max_norm, norm_type, group=group, seen=self._seen, lanes=lanes)
        if not self.speculation.active:
            self._norm.clip()
        return self._norm.total

    def prefetch(self) -> None:
        """Fetch as much state as `window` allows, now: for frameworks that place the trips by hand.

        What Megatron calls reloading optimizer states. Nothing needs it: backward does it by itself.
        """
        if self._overlap is None or not self.config.window:
            raise ConfigError("prefetch() fetches into the window; found window=0. Use window='all', or a size.")
        self.check_not_lost()
        for engine in self._engines.values():
            engine.prepare()
            self._overlap.prefetch(engine)

    def evict(self) -> None:
        """Give the window's memory back, behind the last stores. What was fetched and not used is dropped."""
        for engine in self._engines.values():
            engine.discard_staged()
            engine.narrow(0)

    @torch.no_grad()
    def replan(self, **changes: Any) -> Plan:
        """Move all state to the plan that `changes` of the config give, bit for bit, and return it.

        Between steps. `device_peak` stands for the `device_budget` that it leaves beside what training has taken so
        far. While state moves, host memory holds both the old and the new arenas. If it fails, nothing has changed.
        """
        self.check_not_lost()
        config = replanned_config(self, changes)
        self.drain_state()
        self._move_to(config)
        if self.speculation.clips:
            self.speculation.arm(self.engines, None if config.host_budget is None else int(config.host_budget))
        if self._overlap is not None:
            self._overlap.replanned(config)
        logger.info("replanned, %s", self.plan.summary())
        return self.plan

    def _move_to(self, config: OffloadConfig) -> None:
        places = moved_places(self, self._places, config)
        self._places.close()
        self._places, self._held, self._engines = places, places.held, places.engines
        self.config = config
        self._host_s_before = 0.0

    def device_state_bytes(self, device: torch.device) -> int:
        """State on `device` now: resident state and slots."""
        resident = (held.resident.values() for held in self.all_held() if held.param.device == device)
        return sum(tensor.nbytes for tensors in resident for tensor in tensors) + self._engines[device].slot_bytes

    def follow_groups(self) -> None:
        """The user's `param_groups` are the truth: parameters and options may have changed since the last step."""
        params = [param for group in self.param_groups for param in group["params"]]
        if len(set(params)) != len(params):
            check_no_duplicates(self.param_groups, self._places.names)
        if not self._places.fit(self.param_groups):
            self.restart_round(
                "Parameter groups changed between backward and step(), after update_in_backward=True had updated "
                "weights. Expected the same groups from the first gradient to step()."
            )
            self._place()

    def _take_turns(self) -> list[Turn]:
        """Everything this step depends on, read and checked now; nothing of it has moved yet."""
        if not self._updated_early:
            self.begin_round()
        for engine in self._engines.values():  # gradients that were assigned by hand, without a forward
            engine.settle([h for h in engine.pending if not self._is_early(h)], "step: the last update is done")
        wanted = (p for group in self.param_groups for p in group["params"] if p.grad is not None)
        return [self.turn_of(self._held[p]) for p in wanted if not isinstance(p.grad, DroppedGradient)]

    def turn_of(self, held: HeldState) -> Turn:
        """The turn of a parameter whose gradient is final."""
        param = held.param
        number = self._group_number[param]
        held.check_unmoved()
        assert param.grad is not None
        local, grad = held.local, local_gradient(param, held.name)
        check_grad(local, grad, held.name)
        return Turn(
            held,
            self._options_of(number),
            number,
            step=self.rule.next_step(held),
            fresh=not held.present and not held.scalars,
            weight=flat_like(local, local),
            grad=flat_like(grad, local),
            round=self._round,
            on_host=held.placement is Placement.HOST,
        )

    def _check_in_model(self) -> None:
        """Parameters that left the model get no more gradients: training on would change nothing, silently."""
        model = self.model
        if model is None:
            return
        reshard(model)
        left = self._were_in_model - set(model.parameters())
        gone = [held for p, held in self._held.items() if p in left and p.requires_grad and p.grad is None]
        if gone:
            raise OffstageError(
                f"{len(gone)} parameters (first: {gone[0].name!r}) are no longer in the model; expected those that "
                "were there at offload(). Was fully_shard() or another wrapper applied after it? Shard the model "
                "first, then build the optimizer and call offload()."
            )

    def _options_of(self, number: int) -> dict[str, Any]:
        """A group's hyperparameters in this round; lanes read them later, so a tensor lr is copied."""
        if number not in self._options:
            options = {name: value for name, value in self.param_groups[number].items() if name != "params"}
            if isinstance(options.get("lr"), torch.Tensor) and self.config.overlaps:
                options["lr"] = options["lr"].detach().clone()
            self._options[number] = options
        return self._options[number]

    def _run(self, turns: list[Turn]) -> None:
        by_device: dict[torch.device, list[Turn]] = {device: [] for device in self._engines}
        for turn in turns:
            by_device[turn.of.param.device].append(turn)
        updated = self._updated_early
        try:
            for device, device_turns in by_device.items():
                self._engines[device].run(device_turns)
                updated = updated or bool(device_turns)
            # Kernels write weights behind autograd's back; it must still notice a graph that saved the old ones.
            torch.autograd.graph.increment_version([turn.of.param for turn in turns])
            self._end_step(turns)
        except BaseException as error:
            self._fail(error, updated)
            raise
        self.steps += 1
        self._learn()
        before, self._moved_until = self._moved_until, self._places.moved_bytes()
        self.last_moved = (self._moved_until[0] - before[0], self._moved_until[1] - before[1])
        self._prove_effect(turns)

    def _end_step(self, turns: list[Turn]) -> None:
        """Wait for the weights that must be ready now."""
        self.speculation.hits += self.speculation.active
        self.speculation.active = False
        late: set[HeldState] = set()
        if self._overlap is not None:
            late = self._overlap.end_step(turns)
        for engine in self._engines.values():
            engine.settle([held for held in engine.pending if held not in late], "step: the weights are ready")

    def _learn(self) -> None:
        """The step is made: what does it say about the next ones?"""
        if self._overlap is not None:
            self._overlap.learn()
        if self._norm is not None:
            self.speculation.decide(self._norm.within)
            if self.config.update_in_backward and not self.speculation.clips:
                budget = self.config.host_budget
                self.speculation.arm(list(self._engines.values()), None if budget is None else int(budget))
            self._norm = None

    def _fail(self, error: BaseException, updated: bool) -> None:
        """Nothing updated yet: all is as before the step. Otherwise the step is lost, and says so from now on."""
        lost = updated or any(engine.updating or engine.has_failed for engine in self._engines.values())
        self.drop_trips()
        if lost:
            self._lost = (
                f"Step {self.steps + 1} failed after some weights had been updated ({type(error).__name__}: {error}); "
                "the weights and state are between two steps. Load a checkpoint into the model and this optimizer "
                "(load_state_dict) to go on."
            )
            raise StepLostError(self._lost) from error

    def _prove_effect(self, turns: list[Turn]) -> None:
        """A parameter whose state lives on the host had a gradient: then bytes must have moved."""
        moved = [turn.of for turn in turns if turn.weight.numel()]  # this rank's shard may be empty
        away = [of for of in moved if self._held[of.param].placement is not Placement.RESIDENT]
        if away and not any(self.last_moved):
            raise OffloadIneffectiveError(
                f"{len(away)} parameters with state on the host had gradients (first: {away[0].name!r}), and "
                "no byte moved in this step. This is a defect in offstage; please report it with the plan: "
                f"{self.plan.summary()}"
            )

    @property
    def last_host_s(self) -> float:
        """Seconds in which the CPU was updating since the last round began: with overlap, after `step()` as well."""
        return sum(engine.host_busy_s for engine in self._engines.values()) - self._host_s_before

    # For `overlap.py`

    @property
    def _updated_early(self) -> bool:
        return self._overlap is not None and bool(self._overlap.updated)

    def _is_early(self, held: HeldState) -> bool:
        return self._overlap is not None and held.param in self._overlap.updated

    @property
    def engines(self) -> list[Engine]:
        """One per device."""
        return list(self._engines.values())

    def begin_round(self, *, in_backward: bool = False) -> None:
        """A step begins, with its first update."""
        self._norm = None if in_backward else self._norm  # of an iteration that was given up
        self._round += 1
        self._host_s_before = sum(engine.host_busy_s for engine in self._engines.values())
        self._options = {}
        self._number_groups()
        self.speculation.active = False

    def _number_groups(self) -> None:
        self._group_number = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}

    def has(self, param: torch.Tensor) -> bool:
        """Whether `param` is in a group, in this round."""
        return param in self._group_number

    def by_engine(self, params: Sequence[torch.Tensor]) -> Iterator[tuple[Engine, list[HeldState]]]:
        """The states of `params`, by device."""
        return self._places.by_engine(params)

    def _norm_allows(self) -> bool:
        """Whether the step may be made. A speculative one whose gradients must be clipped is taken back first."""
        norm = self._norm
        assert norm is not None
        self._follow_norm(norm)
        if norm.finite:
            return True
        self.skipped_steps += 1
        self._norm = None
        if self._overlap is not None:
            self._overlap.start_again()
        logger.warning("The gradients' norm is %s: step() changes nothing", float(norm.total))
        return False

    def _follow_norm(self, norm: Norm) -> None:
        """Wait for the norm; speculative updates stay only if it changes no gradient."""
        norm.wait()
        if self.speculation.active and not (norm.finite and norm.within):
            self.speculation.misses += norm.finite
            self._take_back()

    def restart_round(self, reason: str) -> None:
        """Take back what backward has updated; where that is not possible the step is lost, for `reason`."""
        self.give_up_round(reason)
        self.check_not_lost()

    def give_up_round(self, reason: str) -> None:
        """The same, without raising now."""
        if not self._updated_early:
            return
        if self.speculation.active:
            self._take_back()
            return
        self.drop_trips()
        self._lost = reason + " Load a checkpoint into the model and this optimizer (load_state_dict) to go on."

    def check_between_steps(self) -> None:
        """Raise if some weights are new and some are old: nobody should read that."""
        if self._updated_early:
            raise OffstageError(
                "Weights or state were read between backward and step(), when update_in_backward=True has updated some "
                "of them and not others; expected step() first. Read them after step()."
            )

    def _take_back(self) -> None:
        """Weights are again as before the speculative updates, and gradients as the loop has left them."""
        assert self._overlap is not None
        with deferred_interrupts(), torch.no_grad():
            self.speculation.active = False
            for engine in self._engines.values():
                engine.revert()
            self._overlap.give_gradients_back()
            if self._norm is not None:
                self._norm.clip()

    # State

    @property  # type: ignore[override]
    def state(self) -> state_dicts.StateView:
        """The state of every parameter under torch's names. Reading waits for copies under way."""
        return state_dicts.StateView(self)

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        if self._placed:  # torch's own __init__ assigns an empty one first
            self.state.replace(value)

    def state_dict(self) -> dict[str, Any]:
        """A plain torch optimizer state dict, all tensors on the host, without a copy where that is possible."""
        return state_dicts.save(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a plain torch optimizer state dict, from any plan or from none, into this plan."""
        state_dicts.load(self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters are placed by the same configuration."""
        super().add_param_group(param_group)
        if self._placed:
            try:
                check_no_duplicates(self.param_groups, self._places.names)
                self._place()
            except BaseException:
                self.param_groups.pop()
                raise

    @property
    def plan(self) -> Plan:
        """Where each parameter's state lives, in the order of `param_groups`."""
        return self._places.plan(self.all_held())

    def fallbacks(self) -> list[str]:
        """What does not happen as it was asked for, and why."""
        found = [engine.window_cut for engine in self._engines.values()] + [self.speculation.impossible]
        if self.speculation.is_off:
            found.append("clipping is active too often: updates in backward are made in step() for now")
        overlap = self._overlap.fallbacks() if self._overlap is not None else []
        return [text for text in found if text is not None] + overlap

    def receipt(self) -> Receipt:
        """What was really moved, and what it cost. Waits for the device."""
        return make_receipt(self)

    def moved_bytes(self) -> tuple[int, int]:
        """(fetched, stored) since the beginning."""
        return self._places.moved_bytes()

    def close(self) -> None:
        """Give back slots and pinned memory, after the last copy. State that was handed out stays readable."""
        self.give_up_round("The optimizer was closed between backward and step().")
        if self._overlap is not None:
            self._overlap.remove()
        self._places.give_up("close: the weights are ready")
        for engine in self._engines.values():
            engine.close()

    # For `state_dict.py`

    def held(self, param: torch.Tensor) -> HeldState:
        """The state of `param`; `KeyError` if it is not a parameter of this optimizer."""
        if param not in self._held:
            self.follow_groups()
        return self._held[param]

    def all_held(self) -> list[HeldState]:
        """In the order of `param_groups`."""
        return [self.held(param) for group in self.param_groups for param in group["params"]]

    def group_of(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Every parameter's group, now."""
        return {param: group for group in self.param_groups for param in group["params"]}

    def check_values(
        self, values: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Raise if `values` cannot be loaded as state, given the options in `groups`. Changes nothing."""
        self._places.check_values(values, self.param_groups, self.param_groups if groups is None else groups)

    def with_class_defaults(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`groups` of a checkpoint, completed as the optimizer's class completes those of older versions."""
        for group in groups:
            group["params"] = []
        self._shell.__setstate__({"state": {}, "param_groups": groups})
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def check_not_lost(self) -> None:
        """Raise if weights and state are between two steps: nobody should train on, or save, that."""
        for lost in (self._lost, *(engine.lost for engine in self._engines.values())):
            if lost is not None:
                raise StepLostError(lost)

    def take_snapshots(self) -> dict[int, Snapshot]:
        """Snapshots of the state on the host, which has been drained; for `checkpoint.async_save`."""
        return self._places.take_snapshots()

    def settle_snapshots(self) -> None:
        """Make the copies that snapshots have asked for: whoever waits for the writer of one calls this first."""
        self._places.settle_snapshots()

    def before_overwrite(self) -> None:
        """State is about to be written by someone other than a step: a save that is still reading it goes first."""
        self._places.wait_for_snapshots()

    def drain_state(self) -> None:
        """The state on the host is about to be read, or written: it is the newest, and the only one."""
        self.check_between_steps()
        self.synchronize()
        for engine in self._engines.values():
            engine.discard_staged()

    def settle(self) -> None:
        """Make the caller's stream wait for all updates: what is known of a parameter's state is then up to date."""
        self._places.settle("read: the state is known")

    def drop_trips(self) -> None:
        """Drain everything and forget trips of a lost step: all state is about to be replaced."""
        if self.speculation.active:
            with contextlib.suppress(StepLostError):
                self._take_back()
        self._places.give_up("load: the weights are ready")
        for engine in self._engines.values():
            engine.reset()
        if self._overlap is not None:
            self._overlap.forget()
        self.speculation.active, self._norm = False, None

    def lose(self, reason: str) -> None:
        """Weights and state do not belong together any more; nobody may train on with them."""
        self._lost = f"{reason} Load a checkpoint into the model and this optimizer to go on."

    def forget_lost_step(self) -> None:
        """All state has been replaced."""
        self._lost = None

    # Python

    def __repr__(self) -> str:
        inner = super().__repr__().removeprefix(type(self).__name__)
        return f"{type(self).__name__}[{type(self._shell).__name__}]{inner}\n{self.plan.summary()}"

    def __getstate__(self) -> dict[str, Any]:
        raise OffstageError(
            "An offloaded optimizer cannot be pickled or deep-copied: its state is host memory registered with this "
            "process's accelerator. Save optimizer.state_dict() instead, or build a second optimizer and load it there."
        )


def _names_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> dict[torch.Tensor, str]:
    names: dict[torch.Tensor, str] = {}
    for group in optimizer.param_groups:
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    if model is not None:
        names.update((param, name) for name, param in model.named_parameters())
    return names


def _consumed_step(*args: Any, **kwargs: Any) -> Any:
    raise OffstageError(
        "This optimizer was given to offstage.offload(), which took over its state. Call step() on the optimizer that "
        "offload() returned: optimizer = offstage.offload(optimizer, model)."
    )


_consumed_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or schedulers made before warn
