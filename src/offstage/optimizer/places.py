# SPDX-License-Identifier: Apache-2.0
"""`Places`: where the state of every parameter is, and the engine of each device.

Parameters are placed when the optimizer is made, when groups are added, and when an option needs more state; those that
have a place keep it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offstage.config import OffloadConfig, Placement, format_size
from offstage.engine import named_state
from offstage.engine.arenas import HostState
from offstage.engine.engine import Engine
from offstage.engine.snapshot import Snapshot
from offstage.engine.timer import StepTimer
from offstage.engine.transport import Moved
from offstage.errors import ConfigError, StepLostError
from offstage.lanes.lanes import Lanes
from offstage.memory.arena import check_host_memory
from offstage.memory.claims import Claim
from offstage.optimizer.checks import check_no_overlap, check_options, check_param
from offstage.planning.layout import padded_bytes
from offstage.planning.measure import measure_machine
from offstage.planning.plan import (
    HOST_SLOTS,
    Plan,
    host_share,
    plan_placements,
    refuse_costly,
    refuse_idle,
    staging_bytes,
)
from offstage.planning.planner import choose_host_fraction
from offstage.planning.sizes import ParamSize
from offstage.rules import Rule
from offstage.rules.rule import ParamState
from offstage.tensors import is_sharded, largest_shard, local_of
from offstage.weights.host_layer import HostLayer
from offstage.weights.host_weights import host_weight_of
from offstage.weights.moving import MovingWeights

logger = logging.getLogger("offstage")

Groups = Sequence[dict[str, Any]]

NOTHING_TRAINS = (
    "no parameter of this optimizer requires a gradient, so it trains nothing: was the model frozen or wrapped (PEFT "
    "does both) after the optimizer was made?"
)


_CUES = {"overlap_forward", "update_in_backward"}
_PLACING = {"fraction", "device_budget", "min_bytes", "slots"}
"""Settings that are not felt where they leave everything in its place. The number of slots can change alone."""


class Places:
    """The state of every parameter, by parameter, and everything on each device, by device."""

    def __init__(self, rule: Rule, config: OffloadConfig, names: dict[torch.Tensor, str]) -> None:
        self.names = names
        self.states: dict[torch.Tensor, ParamState] = {}
        self.engines: dict[torch.device, Engine] = {}
        self._rule, self._config = rule, config
        self._plans: dict[torch.device, Plan] = {}
        self._signatures: list[Any] = []
        self._host_fractions: dict[torch.device, float] = {}
        self._layers: Mapping[torch.Tensor, int] = {}
        """The numbers of the layers of parameters whose weights may live on the host."""
        self._claim = Claim(0)
        """Of what the first step will take."""
        self._numbers = itertools.count(len(names))
        """For names of parameters that have none."""

    def fit(self, groups: Groups) -> bool:
        """Whether every parameter of `groups` is known, with all the state that its options need."""
        if self._signatures != [self._rule.signature(group) for group in groups]:
            return False
        return all(param in self.states for group in groups for param in group["params"])

    def lack_room(self, groups: Groups, *, between_steps: bool) -> bool:
        """Whether a parameter that was frozen needs room for its state.

        Not `between_steps`: one that has no gradient yet gets it with the next iteration.
        """
        return any(
            self.states[param].frozen and (param.grad is not None or (between_steps and param.requires_grad))
            for group in groups
            for param in group["params"]
        )

    def rename(self, names: Mapping[torch.Tensor, str]) -> None:
        """A model has given these parameters their names."""
        self.names.update(names)
        for param in self.states.keys() & names.keys():
            self.states[param].name = names[param]

    def place(
        self,
        groups: Groups,
        existing: Mapping[torch.Tensor, Mapping[str, Any]] | None = None,
        *,
        like: Places | None = None,
        moving: MovingWeights | None = None,
        with_state: Collection[torch.Tensor] = (),
    ) -> None:
        """Place parameters that are new or need more keys; the others stay where they are.

        `existing` is state that new parameters have elsewhere: what stays resident is used where it is. `like`: keep as
        much for every parameter as there. `moving`: weights that may go to the host with their state. `with_state`:
        parameters that are about to get state, also if they are frozen.
        """
        with_state = {*with_state, *(param for param, values in (existing or {}).items() if values)}
        group_of = {param: group for group in groups for param in group["params"]}
        if moving is not None:
            self._layers = moving.layer_numbers
        by_device, plans = self._wanted_places(groups, like, with_state, weights_move=moving is not None)
        wanted = [state for states in by_device.values() for state in states]
        self.all_taken()  # what the first step takes is counted anew
        stay = [state.param for state in wanted if state.placement is Placement.RESIDENT and not state.frozen]
        by_cpu = [state.param for state in wanted if state.placement is Placement.HOST]
        moved_bytes = moving.host_bytes(stay, by_cpu) if moving is not None else 0
        try:
            with self._check_host_memory(plans, by_device, existing or {}, moved_bytes):
                if moving is not None:
                    self._move_weights(moving, wanted, stay)
                for device, states in by_device.items():
                    new = [state for state in states if state is not self.states.get(state.param)]
                    returning = moving.returning if moving is not None else ()
                    self._build(device, new, plans[device], group_of, existing or {}, returning)
        finally:
            self._claim = Claim(sum(self.still_to_take().values()))
        in_use = {state.device for state in self.states.values()}
        for device in [
            one for one, engine in self.engines.items() if one not in in_use and not engine.transport.layers
        ]:
            _drain(self.engines[device])
            self.engines.pop(device).close()
        self._plans = plans
        self._signatures = [self._rule.signature(group) for group in groups]

    def _wanted_places(
        self,
        groups: Groups,
        like: Places | None,
        with_state: Collection[torch.Tensor],
        *,
        weights_move: bool = False,
    ) -> tuple[dict[torch.device, list[ParamState]], dict[torch.device, Plan]]:
        """The state that every parameter has or should get, with its placement, and the plans, by device.

        Unless `weights_move`, which then follow the plan, new state of weights that live on the host streams.
        """
        check_options(groups)
        group_of = {param: group for group in groups for param in group["params"]}
        self._forget_replaced(group_of)
        wanted = [self._wanted(param, group, like, with_state) for param, group in group_of.items()]
        check_no_overlap(list(group_of), self.names)
        by_device: dict[torch.device, list[ParamState]] = {}
        for state in wanted:
            by_device.setdefault(state.device, []).append(state)
        plans = {device: self._planned(device, states, weights_move) for device, states in by_device.items()}
        self._refuse_ineffective(plans, by_device)
        for device, states in by_device.items():
            for state, placement in zip(states, plans[device].placements, strict=True):
                state.placement = placement
        return by_device, plans

    def follow(self, config: OffloadConfig, groups: Groups) -> bool:
        """Take `config` over if all state can stay where it is; returns whether it can. Nothing is under way."""
        changed = {
            field.name
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != getattr(self._config, field.name)
        }
        only_cues = bool(changed) and changed <= _CUES
        if not only_cues and not (changed <= _CUES | _PLACING and self._would_stay(config, groups)):
            return False
        self._config = config
        for engine in self.engines.values():
            engine.follow(config)
        return True

    def _would_stay(self, config: OffloadConfig, groups: Groups) -> bool:
        """Whether all state would be placed by `config` as it is now."""
        other = Places(self._rule, config, self.names)
        other._host_fractions.update(self._host_fractions)
        other._layers = self._layers
        by_device, plans = other._wanted_places(groups, self, ())
        wanted = {state.param: state for states in by_device.values() for state in states}
        sizes = {device: (plan.chunk_bytes, plan.host_chunk_bytes) for device, plan in plans.items()}
        return (
            wanted.keys() == self.states.keys()
            and all(_kind(state) == _kind(self.states[param]) for param, state in wanted.items())
            and sizes == {device: (plan.chunk_bytes, plan.host_chunk_bytes) for device, plan in self._plans.items()}
        )

    def _planned(self, device: torch.device, states: Sequence[ParamState], weights_move: bool) -> Plan:
        """Where `states` go; those that have a place keep it."""
        placed = {i: state.placement for i, state in enumerate(states) if state is self.states.get(state.param)}
        placed |= {i: Placement.RESIDENT for i, state in enumerate(states) if state.frozen}
        sizes = [self.size_of(state) for state in states]
        try:
            config = self._decided(device, sizes)
            if not weights_move:
                placed |= self._beside_weights(states, sizes, config, placed)
            return plan_placements(sizes, config, placed)
        except ConfigError as error:
            if not placed:
                raise
            raise ConfigError(f"{error} Or call replan() with the same settings: it places all anew.") from error

    def _beside_weights(
        self,
        states: Sequence[ParamState],
        sizes: Sequence[ParamSize],
        config: OffloadConfig,
        placed: Mapping[int, Placement],
    ) -> dict[int, Placement]:
        """Where state goes whose weight lives on the host and stays there: all of a layer to the device, or to the CPU.

        What is added to layers goes where the rest of its layer is. If all is placed anew, the plan decides.
        """
        hosted = {i: host_weight_of(state.param) for i, state in enumerate(states) if i not in placed}
        new = {i: weight.layer for i, weight in hosted.items() if weight is not None}
        if not new:
            return {}
        if host_share(config) == 1.0:
            return dict.fromkeys(new, Placement.HOST)
        by_cpu = {
            state.hosted.layer
            for state in self.states.values()
            if state.hosted is not None and state.placement is Placement.HOST
        }
        if not self.states:
            free = plan_placements(sizes, config, placed).placements
            by_cpu = {layer for i, layer in new.items() if free[i] is Placement.HOST}
        return {i: Placement.HOST if layer in by_cpu else Placement.STREAMED for i, layer in new.items()}

    def _move_weights(self, moving: MovingWeights, states: Sequence[ParamState], stay: Sequence[torch.Tensor]) -> None:
        """Weights whose state leaves the device, and those without any, go to the host; not those of `stay`."""
        for device in {state.device for state in states} | moving.devices:
            self._engine(device).transport.connect()
        made = moving.move(stay, self.lanes, self.timers)
        self.use_layers([] if made is None else made.layers, besides=moving.returning)

    def use_layers(self, layers: Sequence[HostLayer], besides: Collection[torch.Tensor] = ()) -> None:
        """These live on the host, without those that have parameters of `besides`."""
        stay = [layer for layer in layers if not any(weight.param in besides for weight in layer.weights)]
        for device, engine in self.engines.items():
            engine.transport.layers = [layer for layer in stay if layer.device == device]
        for state in self.states.values():
            if state.placement is not Placement.RESIDENT:
                state.hosted = host_weight_of(state.param)

    @property
    def lanes(self) -> dict[torch.device, Lanes]:
        return {device: engine.transport.lanes for device, engine in self.engines.items()}

    @property
    def timers(self) -> dict[torch.device, StepTimer]:
        return {device: engine.transport.timer for device, engine in self.engines.items()}

    def _engine(self, device: torch.device) -> Engine:
        if device not in self.engines:
            self.engines[device] = Engine(device, self._rule, self._config)
        return self.engines[device]

    def _refuse_ineffective(
        self, plans: Mapping[torch.device, Plan], by_device: Mapping[torch.device, Sequence[ParamState]]
    ) -> None:
        """Raise if offloading saves nothing: on every rank of a sharded model or on none, though shards are uneven."""
        # A share that the planner chooses may differ between ranks.
        open_share = self._config.update_on == "auto" and self._config.host_fraction is None
        config = dataclasses.replace(self._config, host_fraction=0.0) if open_share else self._config
        alike = [
            plan_placements([self.size_of(state, largest_shard(state.param)) for state in states], config)
            if any(state.local is not state.param for state in states)
            else plans[device]
            for device, states in by_device.items()
        ]
        # Frozen parameters may be trained later, and weights that leave are judged where they do.
        if not self._config.moves_weights and not self._has_frozen(by_device):
            refuse_idle(alike, self._config)
        refuse_costly(alike, self._config)

    def _has_frozen(self, by_device: Mapping[torch.device, Sequence[ParamState]]) -> bool:
        return any(state.frozen for states in by_device.values() for state in states)

    def _decided(self, device: torch.device, sizes: Sequence[ParamSize]) -> OffloadConfig:
        """The config with the CPU's share. What the planner has chosen once stays."""
        config = self._config
        if config.update_on != "auto" or config.host_fraction is not None:
            return config
        if device not in self._host_fractions:
            by_device = dataclasses.replace(config, host_fraction=0.0)
            if not plan_placements(sizes, by_device).host_bytes:
                return by_device  # nothing leaves: there is nothing to measure for
            self._host_fractions[device] = self._choose_host_fraction(device, sizes)
        return dataclasses.replace(config, host_fraction=self._host_fractions[device])

    def _choose_host_fraction(self, device: torch.device, sizes: Sequence[ParamSize]) -> float:
        if not self._rule.rate_is_known:
            return 0.0
        config = self._config
        if all(size.layer is None for size in sizes):  # the layers are on another device
            config = dataclasses.replace(config, weights="device")
        share = choose_host_fraction(sizes, measure_machine(device), config)
        logger.info("with update_on='auto' the CPU updates %.0f%% of what is offloaded from %s", 100 * share, device)
        return share

    def _forget_replaced(self, params: Collection[torch.Tensor]) -> None:
        """Parameters that left the groups and never had state: others took their place (accelerate shards so)."""
        left = [param for param in self.states if param not in params]
        if left:
            self.settle("place: the weights are ready")  # an update that is under way makes state, too
        for param in left:
            if not (self.states[param].present or self.states[param].scalars):
                del self.states[param]
                self.names.pop(param, None)

    def _wanted(
        self, param: torch.Tensor, group: dict[str, Any], like: Places | None, with_state: Collection[torch.Tensor]
    ) -> ParamState:
        """The state `param` has, or the one it should get."""
        if param not in self.names:
            self.names[param] = f"parameter {next(self._numbers)}"
        name = self.names[param]
        check_param(param, name)
        if self._rule.whole and is_sharded(param):
            raise ConfigError(
                f"Parameter {name!r} is sharded ({tuple(local_of(param).shape)} of {tuple(param.shape)} here), and "
                f"{self._rule.title} looks at whole parameters; expected parameters that are not sharded. Use an "
                "optimizer that treats each element alone, such as AdamW."
            )
        state = self.states.get(param)
        there = state if state is not None or like is None else like.states.get(param)
        # State that an option does not need for a while is kept, as torch keeps it.
        kept = there.keys if there is not None else ()
        frozen = not kept and not (param.requires_grad or param.grad is not None or param in with_state)
        keys = () if frozen else self._rule.keys(local_of(param), group)
        missing = tuple(key for key in keys if key not in kept)
        if state is not None and not missing and (frozen or not state.frozen):
            return state
        return ParamState(param, name, kept + missing, rule=self._rule, frozen=frozen)

    def _check_host_memory(
        self,
        plans: Mapping[torch.device, Plan],
        by_device: Mapping[torch.device, Sequence[ParamState]],
        existing: Mapping[torch.Tensor, Mapping[str, Any]],
        moved_bytes: int,
    ) -> Claim:
        """Raise if the host has no room for these plans: [Note: host memory].

        `moved_bytes`: what weights that go there will take, which is checked again when they do.
        """
        wanted = [state for states in by_device.values() for state in states]
        there = sum(self.size_of(state).padded_bytes for state in wanted if state.home is not None)
        there += sum(engine.transport.staging_bytes for engine in self.engines.values())
        need = max(0, sum(plan.host_bytes for plan in plans.values()) - there)
        sets = 2 if any(engine.arenas.has_spare for engine in self.engines.values()) else 1
        beside = self.still_to_take()
        for device, plan in plans.items():
            if device.type == "cpu":  # the device is the host
                states = zip(plan.sizes, plan.placements, by_device[device], strict=True)
                beside |= {
                    "gradients": _gradient_bytes(by_device[device]),
                    "slots": self._missing_slots(
                        device, plan.slots, plan.slot_bytes, plan.bytes_of(Placement.STREAMED)
                    ),
                    "resident state": sum(
                        size.state_bytes
                        for size, placement, state in states
                        if placement is Placement.RESIDENT and not (state.resident or existing.get(state.param))
                    ),
                }
        return check_host_memory(
            sets * need,
            None if self._config.host_budget is None else int(self._config.host_budget),
            already_bytes=sum(engine.transport.host_bytes for engine in self.engines.values()) + moved_bytes,
            beside=beside,
            kinds="state, weights and gradients" if self._config.moves_weights else "state",
        )

    def still_to_take(self) -> dict[str, int]:
        """Host memory that the next steps take beside the arenas, and have neither taken nor claimed yet, by name."""
        missing = {"staging buffers": 0, "gradients": 0, "slots": 0}
        for device, engine in self.engines.items() if not self._claim.nbytes else ():
            transport, pipeline = engine.transport, engine.transport.pipeline
            missing["staging buffers"] += max(0, transport.staging_bytes - transport.host_updates.nbytes)
            if device.type == "cpu":
                states = [state for state in self.states.values() if state.device == device]
                streamed = sum(state.nbytes for state in states if state.placement is Placement.STREAMED)
                missing["gradients"] += _gradient_bytes(states)
                missing["slots"] += self._missing_slots(device, pipeline.num_slots, pipeline.slot_bytes, streamed)
        return missing

    def _missing_slots(self, device: torch.device, slots: int, slot_bytes: int, streamed_bytes: int) -> int:
        there = self.engines[device].transport.pipeline.device_bytes if device in self.engines else 0
        return max(0, staging_bytes(slots, slot_bytes, self._config.window, streamed_bytes) - there)

    def all_taken(self) -> None:
        """A step has been made: what it needs is there."""
        if self._claim.nbytes:
            self._claim.release()

    def _build(
        self,
        device: torch.device,
        states: list[ParamState],
        plan: Plan,
        group_of: Mapping[torch.Tensor, dict[str, Any]],
        existing: Mapping[torch.Tensor, Mapping[str, Any]],
        returning: Collection[torch.Tensor],
    ) -> None:
        engine = self._engine(device)
        for state in states:
            if state.placement is not Placement.RESIDENT and state.param not in returning:
                state.hosted = host_weight_of(state.param)
        has_spare = any(engine.arenas.has_spare for engine in self.engines.values())
        _drain(engine)
        for state in states:
            if state.placement is Placement.RESIDENT:
                named_state.allocate_resident(state, existing.get(state.param, {}))
        engine.add(states, plan)
        for state in states:
            before = self.states.get(state.param)
            if before is not None:  # more keys than before
                named_state.load(state, named_state.export(before), group_of[state.param])
            self.states[state.param] = state
        engine.arenas.drop_unused(self.states.values())
        if has_spare:
            engine.arenas.add_spare()

    def size_of(self, state: ParamState, numel: int | None = None) -> ParamSize:
        """What `state` takes; with `numel`, what a shard of so many elements would take."""
        own = {key.name: key.numel(state.local) for key in state.keys}
        extent = own if numel is None else dict.fromkeys(own, numel)
        itemsize = {key.name: key.dtype.itemsize for key in state.keys}
        padded = padded_bytes(extent, itemsize) if itemsize else 0
        device = state.device
        return ParamSize(
            state.name,
            str(device),
            sum(extent[name] * size for name, size in itemsize.items()),
            padded,
            self._rule.splits(device) if state.keys else True,
            numel=state.local.numel(),
            weight_bytes=state.local.nbytes,
            layer=self._layers.get(state.param),
        )

    def plan(self, states: Sequence[ParamState]) -> Plan:
        """Where `states` are."""
        slots = [slot for engine in self.engines.values() if (slot := engine.transport.pipeline.slot_bytes)]
        return Plan(
            sizes=tuple(self.size_of(one) for one in states),
            placements=tuple(one.placement for one in states),
            slots=self._config.num_slots * len(slots),
            slot_bytes=max(slots, default=0),
            window=self._config.window if slots else 0,
            host_slots=HOST_SLOTS * sum(1 for engine in self.engines.values() if engine.transport.staging_bytes),
            host_slot_bytes=max((engine.arenas.staging_bytes for engine in self.engines.values()), default=0),
            chunk_bytes=max((plan.chunk_bytes for plan in self._plans.values()), default=0),
            host_chunk_bytes=max((plan.host_chunk_bytes for plan in self._plans.values()), default=0),
        )

    def fallbacks(self) -> Iterator[str]:
        """Settings without an effect on these parameters, which may have one on others."""
        config, states = self._config, self.states.values()
        away = any(state.placement is not Placement.RESIDENT for state in states)
        trained = [state for state in states if not state.frozen]
        if trained and len(trained) < len(states) and not away and config.fraction != 0.0:
            held = sum(state.nbytes for state in trained)
            yield (
                f"nothing leaves the device: what is trained now has {format_size(held)} of state in parameters below "
                f"min_bytes={format_size(int(config.min_bytes))} or within device_budget, and the rest is frozen"
            )
        if config.device_budget is not None and not away and trained:
            held = sum(tensor.nbytes for state in states for tensor in state.resident.values())
            yield (
                f"device_budget={format_size(int(config.device_budget))} holds all {format_size(held)} of state: "
                "nothing leaves the device"
            )
        if config.master_weights in ("fp32", "split") and trained and not any(one.master_kind for one in trained):
            yield f"master_weights={config.master_weights!r}: no parameter is in 16 bits, and there are no masters"
        if config.update_on == "auto" and config.host_fraction is None and away and not self._rule.rate_is_known:
            yield (
                "update_on='auto': only Adam's and AdamW's rate on the host is known, so all updates are on the device"
            )

    def log_fallbacks(self) -> None:
        """Say them, once for these places."""
        for text in self.fallbacks():
            logger.warning(text)
        if self.states and all(state.frozen for state in self.states.values()):
            logger.warning(NOTHING_TRAINS)

    def place_of(self, param: torch.Tensor) -> tuple[Engine, ParamState] | None:
        """The engine and the state of `param`, if it has one."""
        state = self.states.get(param)
        return None if state is None else (self.engines[state.device], state)

    def by_engine(self, params: Sequence[torch.Tensor]) -> Iterator[tuple[Engine, list[ParamState]]]:
        """The states of `params`, by device."""
        states = [self.states[param] for param in params if param in self.states]
        for device in {state.device for state in states}:
            yield self.engines[device], [state for state in states if state.device == device]

    def check_values(self, values: Mapping[torch.Tensor, Mapping[str, Any]], groups: Groups, options: Groups) -> None:
        """Raise if `values` cannot be loaded as the state of `groups`, given their `options`. Changes nothing."""
        for group, chosen in zip(groups, options, strict=True):
            for param in group["params"]:
                self.check_value(param, values.get(param, {}), chosen)

    def check_value(self, param: torch.Tensor, values: Mapping[str, Any], options: dict[str, Any]) -> None:
        """Raise if `values` cannot be loaded as the state of `param`, given `options`. Changes nothing."""
        if not values and not param.requires_grad:  # frozen: it need not be one that could be trained
            return
        named_state.check(self.with_room(param, options), values, options)

    def with_room(self, param: torch.Tensor, options: dict[str, Any]) -> ParamState:
        """The state that `param` would have with `options`, also if it is frozen: what it keeps, without memory."""
        name = self.names.get(param, f"of shape {tuple(param.shape)}")
        return ParamState(param, name, self._rule.keys(local_of(param), options), rule=self._rule)

    def take_snapshots(self) -> dict[int, Snapshot]:
        """Snapshots of all state on the host, by the identity of the host state. The lanes have been drained."""
        self.wait_for_snapshots()
        taken = {}
        for host in self._host_states():
            taken[id(host)] = host.snapshot = Snapshot(host.layout, host.arenas)
        return taken

    def wait_for_snapshots(self) -> None:
        """Return when no writer needs the state of a moment before."""
        for host in self._host_states():
            if host.snapshot is not None:
                host.snapshot.wait()
                host.snapshot = None

    def _host_states(self) -> Iterator[HostState]:
        return (host for engine in self.engines.values() for host in engine.arenas.sets)

    def moved_to(self, config: OffloadConfig, groups: Groups, moving: MovingWeights | None = None) -> Places:
        """All state in new places, as `config` says; the lanes have been drained. `moving`: weights that move, too.

        They are built and filled next to these, parameter by parameter: whatever fails leaves these as they were.
        Resident state that stays resident is not copied.
        """
        new = Places(self._rule, config, self.names)
        new._layers = self._layers
        self.all_taken()  # the new places claim what the next step takes
        resident = {param: named_state.resident_tensors(state) for param, state in self.states.items()}
        try:
            new.place(groups, resident, like=self, moving=moving)
            if moving is None:
                for device in new.engines.keys() & self.engines.keys():
                    new.engines[device].transport.layers = self.engines[device].transport.layers
            for group in groups:
                for param in group["params"]:
                    named_state.adopt(new.states[param], self.states[param], group)
        except BaseException:
            new.close()
            raise
        return new

    def carry_on(self, other: Places) -> None:
        """These, which `other` has moved to, take its place from now on."""
        for device, engine in self.engines.items():
            if device in other.engines:
                engine.transport.carry_on(other.engines[device].transport, self.states)

    def close(self) -> None:
        """Give back everything that these places have."""
        self.all_taken()
        for engine in self.engines.values():
            engine.close()

    def settle(self, reason: str) -> None:
        """Make the caller's stream wait for all updates."""
        for engine in self.engines.values():
            engine.settle(engine.unsettled, reason)

    def give_up(self, reason: str) -> None:
        """The same, where it does not matter any more whether an update has failed."""
        for engine in self.engines.values():
            with contextlib.suppress(StepLostError):
                engine.settle(engine.unsettled, reason)
                engine.check()

    def moved(self) -> Moved:
        """Since the beginning."""
        return sum((engine.transport.moved for engine in self.engines.values()), Moved())


def _kind(state: ParamState) -> tuple[Any, ...]:
    return state.device, state.placement, state.keys, state.frozen


def _drain(engine: Engine) -> None:
    """Nothing of `engine` is under way, and nothing waits in a slot."""
    engine.settle(engine.unsettled, "place: the weights are ready")
    engine.transport.synchronize("place: the lanes are drained")
    engine.transport.pipeline.discard_staged()


def _gradient_bytes(states: Iterable[ParamState]) -> int:
    """What the gradients take that do not exist now."""
    return sum(state.local.nbytes for state in states if state.param.requires_grad and state.param.grad is None)
