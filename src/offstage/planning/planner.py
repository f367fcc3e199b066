# SPDX-License-Identifier: Apache-2.0
"""`make_plan`: the fastest plan that fits, or a refusal with numbers. Pure: the same input gives the same answer.

`Search` predicts the plans that a configuration allows, and some that other settings would allow. If the configuration
leaves the CPU's share open, every share of a grid is tried. The grid is the same for every machine and budget, so a
faster machine or a larger budget never gives a slower plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from offstage.config import OffloadConfig, format_size
from offstage.errors import ConfigError, HostMemoryError
from offstage.planning.group_slots import with_slots
from offstage.planning.machine import Machine
from offstage.planning.plan import HOST_SLOTS, HostUpdated, Placed, Plan, host_share, place, slot_bytes_for
from offstage.planning.predict import (
    CHOSEN,
    Candidate,
    Prediction,
    Shares,
    Times,
    Totals,
    Workload,
    busy_ms,
    exposed,
    gradient_share,
    kept_weight_share,
    rates_of,
)
from offstage.planning.sizes import (
    Mask,
    Numbers,
    ParamSize,
    RankShare,
    Source,
    World,
    largest,
    param_sizes,
    total,
)

_SHARES = tuple(i / 100 for i in range(101))
"""The grid of shares for the CPU."""
_WORTH_THE_CPU = 0.75
"""`update_on="auto"` in a loop that is not known: the CPU's part has to bring the step's time below this share."""
_SHOWN = tuple(i / 10 for i in range(11))
"""Those of them that a plan lists among its candidates."""


def make_plan(
    model_or_sizes: Source,
    machine: Machine,
    config: OffloadConfig | None = None,
    *,
    world: World | None = None,
    workload: Workload | None = None,
) -> Plan:
    """The fastest plan for one rank that fits, with its prediction and the other plans that were considered.

    `model_or_sizes` is a model (on any device, the meta device too), a state dict, `ParamSize`s, or a mapping from
    names to shapes or numbers of elements. Without `world` the model is on one device; without `workload` the updates
    are not hidden behind forward or backward.
    """
    model = model_or_sizes if isinstance(model_or_sizes, nn.Module) else None
    config = with_slots(config or OffloadConfig(), model)
    world = world or World(ranks_per_host=machine.ranks_on_host)
    sizes = _on_one_device(param_sizes(model_or_sizes, config))
    search = Search(world.share_of(sizes), machine, config, world, workload)
    allowed = search.allowed()
    chosen = dataclasses.replace(search.best(allowed), verdict=CHOSEN)
    if not search.fits_host(chosen):
        _refuse_host(search, chosen)
    if chosen.prediction.device_peak_bytes > machine.device_bytes:
        _refuse_device(search, chosen)
    placed = search.placed(search.with_share(chosen.host_fraction))
    chosen = dataclasses.replace(chosen, prediction=_exact(placed, chosen.prediction, search))
    return dataclasses.replace(
        placed.plan(search.rank.sizes),
        prediction=chosen.prediction,
        candidates=(chosen, *search.others(allowed, chosen)),
        notes=tuple(_notes(search, chosen.prediction)),
    )


def choose_host_fraction(sizes: Sequence[ParamSize], machine: Machine, config: OffloadConfig) -> float:
    """The share that `make_plan` chooses for the CPU, of what leaves the device. Does not check that the plan fits."""
    world = World(ranks_per_host=machine.ranks_on_host)
    search = Search(world.share_of(sizes), machine, config, world, None)
    return search.best(search.allowed()).host_fraction


def _on_one_device(sizes: Sequence[ParamSize]) -> Sequence[ParamSize]:
    devices = sorted({size.device for size in sizes})
    if len(devices) > 1:
        raise ConfigError(
            f"make_plan expects the parameters of one device; found some on {', '.join(devices)}. Make a plan for each."
        )
    return sizes


def _exact(placed: Placed, prediction: Prediction, search: Search) -> Prediction:
    """`prediction` with the exact bytes of the placements, which meet the shares only to within one parameter."""
    workload, config = search.workload, search.config
    speculates = config.update_in_backward and workload.clips
    sums, columns, streamed = search.sums(placed), placed.columns, placed.streamed
    staging = placed.slots * placed.slot_bytes
    window = search.window_bytes(config, staging, total(columns.state_bytes, streamed))
    state = sums.resident + staging + int(window)

    def moved(nbytes: Numbers, which: Mask, active: float) -> float:
        return total(nbytes, which & ~columns.expert) + active * total(nbytes, which & columns.expert)

    both_ways = moved(columns.state_bytes, streamed, 1.0 if speculates else workload.active_experts)
    weights = moved(columns.weight_bytes, placed.on_host, workload.active_experts)
    host = sums.off + placed.host_slots * placed.host_slot_bytes
    return dataclasses.replace(
        prediction,
        device_state_bytes=state,
        device_peak_bytes=prediction.device_peak_bytes - prediction.device_state_bytes + state,
        host_bytes=prediction.host_bytes if speculates else host,
        bytes_up=int(both_ways + weights),
        bytes_down=int(both_ways + 2 * weights),
    )


def _ms(candidate: Candidate) -> float:
    return candidate.prediction.exposed_ms


# Refusals #


def _refuse_host(search: Search, chosen: Candidate) -> None:
    need, machine, ranks = chosen.prediction.host_bytes, search.machine, search.world.ranks_per_host
    missing = need - search.host_limit
    limit = f"{format_size(machine.host_free_bytes)} free" + (f" for {ranks} ranks" if ranks > 1 else "")
    if search.host_limit < machine.host_free_bytes // ranks:
        limit = f"host_budget={format_size(search.host_limit)}"
    remedies = ["use master_weights='split' or state_dtype='bfloat16'", "divide the state among more ranks"]
    if chosen.prediction.device_peak_bytes + missing <= machine.device_bytes:
        budget = format_size(chosen.prediction.device_state_bytes + missing)
        remedies.insert(0, f"keep {format_size(missing)} more of the state on the device (device_budget of {budget})")
    raise HostMemoryError(
        f"The plan needs {format_size(need)} of host memory per rank; found {limit}. To make room, "
        f"{', or '.join(remedies)}."
    )


def _refuse_device(search: Search, chosen: Candidate) -> None:
    peak, most = chosen.prediction.device_peak_bytes, search.machine.device_bytes
    state, rank = chosen.prediction.device_state_bytes, search.rank
    remedies = []
    if chosen.resident_bytes > peak - most:
        remedies.append(f"lower device_budget to {format_size(state - (peak - most))}")
    # update_in_backward would not help: its first iteration keeps all gradients.
    remedies.append("divide the model among more ranks")
    raise ConfigError(
        f"{search.machine.device_name} with {format_size(most)} cannot hold a peak of {format_size(peak)}, of which "
        f"weights {format_size(rank.weight_bytes)}, state {format_size(state)}, other bytes of the workload "
        f"{format_size(int(search.workload.other_bytes))}, and the rest gradients. To make room, "
        f"{', or '.join(remedies)}."
    )


# Notes #


def _notes(search: Search, prediction: Prediction) -> Iterator[str]:
    """What the prediction assumes."""
    world, ranks, rank = search.world, search.world.ranks_per_host, search.rank
    if world.ranks > 1:
        ways = " x ".join(f"{n} {way}" for way in ("data", "tensor", "pipeline") if (n := getattr(world, way)) > 1)
        experts = f", experts divided by {world.expert}" if world.expert > 1 else ""
        stage = f"; the stage of {rank.stage}" if rank.stage else ""
        yield f"one rank of {world.ranks:,} ({ways}{experts}){stage}"
    if ranks > 1:
        yield f"{ranks} ranks share a host: a link each; host memory, its bandwidth and the threads in equal parts"
    if not search.knows_times:
        yield "no times of forward and backward were given, so nothing hides the updates: exposed is an upper bound"
    if not search.workload.other_bytes:
        yield "no bytes of activations were given (the workload's other_bytes): the peak is without them"
    if search.fits_resident():
        peak = int(search.totals.state) + search.other_device_bytes(search.config)
        yield f"all state would fit on the device, at a peak of {format_size(peak)}: offload only if you need the room"
    if search.totals.moved < 1.0:
        yield f"{search.totals.moved:.0%} of the state gets gradients in a step; the rest does not move"
    if search.config.update_in_backward and not search.workload.clips:
        first = (
            prediction.device_state_bytes + rank.weight_bytes + rank.gradient_bytes + int(search.workload.other_bytes)
        )
        over = f", more than the device's {format_size(search.machine.device_bytes)}"
        yield (
            f"the first iteration keeps all gradients: its peak is {format_size(first)}"
            f"{over if first > search.machine.device_bytes else ''}"
        )


# Candidates #


@dataclass(frozen=True)
class Sums:
    """What `Search` needs to know of a `Placed`: bytes."""

    resident: int
    """Of resident state."""
    off: int
    """Of state that is not resident, with alignment."""
    off_weights: int
    """Weights of the parameters whose state is not resident."""
    host: HostUpdated
    """What is not resident, if the CPU updated it."""


class Search:
    """The candidates for one rank's share of a model on one machine."""

    def __init__(
        self, rank: RankShare, machine: Machine, config: OffloadConfig, world: World, workload: Workload | None
    ) -> None:
        self.rank, self.machine, self.world = rank, machine, world
        self.workload, self.knows_workload = workload or Workload(), workload is not None
        self.knows_times = self.workload.compute_ms > 0
        columns = rank.columns
        trained = int((columns.state_bytes > 0).sum())
        self.totals = Totals.of(columns.summed(), self.workload.active_experts, trained)
        self.config = self._with_budget(config)
        per_param = self.totals.update_bytes / max(1.0, self.totals.params)
        self._rates = rates_of(machine, world.ranks_per_host, config.threads, max(per_param, 1.0))
        self.host_limit = machine.host_free_bytes // world.ranks_per_host
        if config.host_budget is not None:
            self.host_limit = min(self.host_limit, int(config.host_budget))
        self._largest_whole = largest(rank.columns.padded_bytes, ~rank.columns.splits)
        self._placed: dict[tuple[object, ...], Placed] = {}
        self._sums: dict[Placed, Sums] = {}

    # Input #

    def _with_budget(self, config: OffloadConfig) -> OffloadConfig:
        """Turn `device_peak`, less what else is on the device, into `device_budget`, except for ``window="auto"``."""
        if config.device_peak is None or config.window == "auto":
            return config
        other = self.other_device_bytes(config)
        room = int(config.device_peak) - other
        if room <= 0:
            raise ConfigError(
                f"device_peak of {format_size(int(config.device_peak))} expects room for state; found weights of "
                f"{format_size(self.rank.weight_bytes)}, gradients of {format_size(self.rank.gradient_bytes)} and "
                f"{format_size(int(self.workload.other_bytes))} of other bytes. Raise it above "
                f"{format_size(other, up=True)}, or use update_in_backward=True without clipping."
            )
        budget = room if config.device_budget is None else min(room, int(config.device_budget))
        return dataclasses.replace(config, device_peak=None, device_budget=budget)

    def other_device_bytes(self, config: OffloadConfig, left: float = 1.0, streamed: float = 1.0) -> int:
        """Weights, gradients, the workload's bytes, and the old weights that speculation keeps.

        `left`: share of the model whose updates are left to `step()`; `streamed`: share that is streamed.
        """
        gradients = gradient_share(config, self.workload, left, self.totals.state) * self.rank.gradient_bytes
        kept = kept_weight_share(config, self.workload)[0] * streamed * self.rank.gradient_bytes
        beside = gradients + kept + int(self.workload.other_bytes)
        return int(self.rank.weight_bytes + max(beside, int(self.workload.activation_bytes)))

    def with_share(self, share: float, config: OffloadConfig | None = None) -> OffloadConfig:
        """`config` with `share` for the CPU, if it leaves that open."""
        config = config or self.config
        return dataclasses.replace(config, host_fraction=share) if host_share(config) is None else config

    # Placements #

    def placed(self, config: OffloadConfig) -> Placed:
        """What `plan_placements` decides. Candidates that differ only in when state moves share it."""
        when = {"overlap_forward": False, "update_in_backward": False}
        key = tuple(when.get(one.name, getattr(config, one.name)) for one in dataclasses.fields(config))
        key = tuple(tuple(one.items()) if isinstance(one, Mapping) else one for one in key)
        if key not in self._placed:
            self._placed[key] = place(self.rank.columns, config)
        return self._placed[key]

    def sums(self, placed: Placed) -> Sums:
        """The sums of one of `placed()`, added up once for all candidates that share it."""
        if placed not in self._sums:
            columns, off = placed.columns, ~placed.resident
            self._sums[placed] = Sums(
                resident=total(columns.state_bytes, placed.resident),
                off=total(columns.padded_bytes, off),
                off_weights=total(columns.weight_bytes, off),
                host=HostUpdated.of(columns, off),
            )
        return self._sums[placed]

    # Choice #

    def allowed(self) -> list[Candidate]:
        """All that the configuration allows."""
        return self._candidates("as configured", self.config)

    def best(self, candidates: Sequence[Candidate]) -> Candidate:
        """The fastest that fits; if none does, the one that takes the least device memory, or else host memory.

        Of equals, the one with the smallest share for the CPU. In a loop that is not known the CPU takes part only
        where streaming alone would take a third longer: threads that update beside a loop also slow down what it
        launches.
        """
        if fitting := [one for one in candidates if not self.misfit(one)]:
            fastest = min(fitting, key=lambda one: (one.prediction.exposed_ms, one.host_fraction))
            if self.knows_workload or not fastest.host_fraction:
                return fastest
            streaming = [one for one in fitting if not one.host_fraction]
            enough = [one for one in streaming if _WORTH_THE_CPU * one.prediction.exposed_ms <= _ms(fastest)]
            return min(enough, key=_ms, default=fastest)
        if on_host := [one for one in candidates if self.fits_host(one)]:
            return min(on_host, key=lambda one: (one.prediction.device_peak_bytes, one.host_fraction))
        return min(candidates, key=lambda one: (one.prediction.host_bytes, one.host_fraction))

    def fits_host(self, candidate: Candidate) -> bool:
        """Whether the host has room for it."""
        return candidate.prediction.host_bytes <= self.host_limit

    def fits_resident(self) -> bool:
        """Whether no setting asks for offload and the device has room for all state."""
        config = self.config
        is_free = config.fraction is None and config.device_budget is None and config.device_peak is None
        return is_free and self.totals.state + self.other_device_bytes(config) <= self.machine.device_bytes

    def misfit(self, candidate: Candidate) -> str:
        """By how much it exceeds which memory; empty if it fits."""
        if not self.fits_host(candidate):
            return f"{format_size(candidate.prediction.host_bytes - self.host_limit)} over host memory"
        over = candidate.prediction.device_peak_bytes - self.machine.device_bytes
        return f"{format_size(over)} over device memory" if over > 0 else ""

    def others(self, allowed: Sequence[Candidate], chosen: Candidate) -> Iterator[Candidate]:
        """What was not chosen, with the reason: other shares, less resident state, other settings, all resident."""
        for one in allowed:
            if one.host_fraction in _SHOWN and one.host_fraction != chosen.host_fraction:
                yield self._with_verdict(dataclasses.replace(one, name="another share for the CPU"), chosen)
        if self.config.device_budget is not None and 0 < chosen.resident_bytes < self.totals.state:
            for part, name in ((0.5, "half as much resident"), (0.0, "nothing resident")):
                yield self._with_verdict(self.best(self._candidates(name, self.config, part)), chosen)
        for name, changes, needs in self._advice():
            try:
                config = OffloadConfig.build(self.config, changes)
            except ConfigError:  # the change contradicts another setting
                continue
            yield self._with_verdict(self.best(self._candidates(name, config)), chosen, needs)
        if chosen.resident_bytes < self.totals.state:
            everything = self.placed(OffloadConfig(fraction=0.0))
            yield self._with_resident_verdict(self._candidate("all resident", self.config, everything, 0.0, 1.0))

    def _advice(self) -> Iterator[tuple[str, dict[str, object], str]]:
        """(name, changes, verdict) of settings that only the user can choose: they restrict what the loop may do."""
        config = self.config
        if config.fraction == 0.0:
            return
        if config.update_on == "device":
            yield "CPU and device", {"update_on": "auto"}, "needs update_on='auto'"
        if not self.knows_times:
            return
        if not config.overlap_forward:
            yield "forward does not wait", {"overlap_forward": True}, "needs overlap_forward=True"
        if not config.update_in_backward:
            also = "" if config.overlap_forward else " too"
            changes: dict[str, object] = {"overlap_forward": True, "update_in_backward": True}
            yield "updates in backward" + also, changes, "needs update_in_backward=True" + also

    def _candidates(self, name: str, config: OffloadConfig, part: float = 1.0) -> list[Candidate]:
        """One candidate for each share that `config` leaves open. `part` of what could be resident is resident."""
        share = host_share(config)
        if share is not None:
            return [self._candidate(name, config, self.placed(config), share, part)]
        host_only = self.placed(self.with_share(1.0, config))  # needs no slots
        last = self._candidate(name, config, host_only, 1.0, part)
        try:
            streaming = self.placed(self.with_share(0.0, config))
        except ConfigError:  # there is no room for slots
            return [last]
        return [self._candidate(name, config, streaming, share, part) for share in _SHARES[:-1]] + [last]

    def _candidate(self, name: str, config: OffloadConfig, placed: Placed, share: float, part: float) -> Candidate:
        """Only the sums of the placements matter: [Note: fluid model]."""
        kept = self.sums(placed).resident * part
        resident = kept / self.totals.state if self.totals.state else 1.0
        off_bytes = self.totals.state - kept
        chunk = min(slot_bytes_for(off_bytes, self._largest_whole, config), off_bytes)
        streamed = off_bytes * (1.0 - share)
        slot = min(slot_bytes_for(streamed, self._largest_whole, config), off_bytes) if share < 1.0 else 0
        staging = int(config.num_slots * slot)
        window = self.window_bytes(config, staging, streamed)
        speculates = config.update_in_backward and self.workload.clips
        host = self._host_bytes(self.sums(placed), part, share, speculates=speculates)
        if speculates and host > self.host_limit:  # then step() makes all updates
            config = dataclasses.replace(config, update_in_backward=False)
            host = self._host_bytes(self.sums(placed), part, share, speculates=False)
        shares = Shares(resident, share, window, chunk)
        times = exposed(self.totals, shares, self._rates, config, self.workload)
        state = int(kept + staging + window)
        peak = state + self.other_device_bytes(config, times.left, (1.0 - resident) * (1.0 - share))
        return Candidate(name, share, int(kept), self._prediction(times, shares, state, peak, host), "")

    def _prediction(self, times: Times, shares: Shares, device_state: int, peak: int, host: int) -> Prediction:
        on_device = 1.0 - (1.0 - shares.resident) * shares.host
        busy = busy_ms(times.work, self.totals.update_bytes * self.totals.moved * on_device, self._rates)
        return Prediction(
            device_state_bytes=device_state,
            device_peak_bytes=peak,
            host_bytes=host,
            bytes_up=int(times.work.up),
            bytes_down=int(times.work.down),
            exposed_ms=times.exposed_ms,
            iteration_ms=self.workload.compute_ms + times.exposed_ms if self.knows_times else None,
            busy_ms=busy,
            bottleneck=max(busy, key=lambda name: busy[name]),
        )

    def window_bytes(self, config: OffloadConfig, staging: int, streamed: float) -> float:
        """The size of the window beside slots of `staging` bytes, for `streamed` bytes of state."""
        if config.window == "all":
            return streamed
        if config.window != "auto":
            return min(float(int(config.window)), streamed)
        room = int(config.device_peak or 0) - self.other_device_bytes(config) - staging
        return max(0.0, min(float(room), streamed)) if self.knows_workload else 0.0

    def _host_bytes(self, sums: Sums, part: float, share: float, *, speculates: bool) -> int:
        arenas = sums.off + sums.resident * (1.0 - part)
        slots = HOST_SLOTS * sums.host.slot_bytes(self.config, share) if share > 0.0 else 0
        if not speculates:
            return int(arenas + slots)
        kept = kept_weight_share(self.config, self.workload)[1] * sums.off_weights
        return int(arenas + slots + (1.0 - share) * (arenas + kept))

    # Verdicts #

    def _with_verdict(self, one: Candidate, chosen: Candidate, needs: str = "") -> Candidate:
        gain = _ms(chosen) - _ms(one)
        compared = "slower" if gain < 0 else "no faster" if gain == 0 else "gains less than a quarter"
        verdict = self.misfit(one) or needs or compared
        return dataclasses.replace(one, verdict=verdict)

    def _with_resident_verdict(self, one: Candidate) -> Candidate:
        state, budget = one.prediction.device_state_bytes, self.config.device_budget
        over = "" if budget is None else f"{format_size(state - int(budget))} over device_budget"
        return dataclasses.replace(one, verdict=over or self.misfit(one) or "needs fraction=0.0")
