# SPDX-License-Identifier: Apache-2.0
"""`Search`: the plans that a configuration allows, and some that other settings would allow, each with its prediction.

If the configuration leaves the CPU's share open, every share of a grid is tried. The grid is the same for every machine
and budget, so a faster machine or a larger budget never gives a slower plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offstage.config import OffloadConfig, format_size
from offstage.errors import ConfigError
from offstage.planning.host_weights import NO_WEIGHTS, Hosted, exposed_with_weights, hosted_by
from offstage.planning.machine import Machine
from offstage.planning.plan import HOST_SLOTS, HostUpdated, Placed, host_share, place, slot_bytes_for
from offstage.planning.predict import (
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
from offstage.planning.sizes import RankShare, World, largest, total

_SHARES = tuple(i / 100 for i in range(101))
"""The grid of shares for the CPU."""
_WORTH_THE_CPU = 0.75
"""`update_on="auto"` in a loop that is not known: the CPU's part has to bring the step's time below this share."""
_SHOWN = tuple(i / 10 for i in range(11))
"""Those of them that a plan lists among its candidates."""


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
    hosted: Hosted
    """Weights that live on the host."""


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
        self._most_hosted = hosted_by(columns, config, columns.state_bytes >= max(1, int(config.min_bytes)))
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
        hosted = self._most_hosted
        other = self.other_device_bytes(config, hosted=hosted)
        room = int(config.device_peak) - other
        if room <= 0:
            gradients = self.rank.gradient_bytes - hosted.trained + hosted.gradients
            remedies = ["update_in_backward=True without clipping", *(["weights='host'"] * (config.weights != "host"))]
            raise ConfigError(
                f"device_peak of {format_size(int(config.device_peak))} expects room for state; found weights of "
                f"{format_size(self.weights_on_device(hosted))}, gradients of {format_size(gradients)} and "
                f"{format_size(int(self.workload.other_bytes))} of other bytes. Raise it above "
                f"{format_size(other, up=True)}, or use {', or '.join(remedies)}."
            )
        if hosted.state:  # beside resident state there are its weights and gradients
            room = int(room * hosted.state / (hosted.state + 2 * hosted.trained))
        budget = room if config.device_budget is None else min(room, int(config.device_budget))
        return dataclasses.replace(config, device_peak=None, device_budget=budget)

    def other_device_bytes(
        self, config: OffloadConfig, left: float = 1.0, streamed: float = 1.0, hosted: Hosted = NO_WEIGHTS
    ) -> int:
        """Weights, gradients, the workload's bytes, and the old weights that speculation keeps.

        `left`: share of the model whose updates are left to `step()`; `streamed`: share that is streamed; `hosted`:
        weights that live on the host.
        """
        gradients = gradient_share(config, self.workload, left, self.totals.state)
        gradients *= self.rank.gradient_bytes - hosted.trained
        kept = kept_weight_share(config, self.workload)[0]
        kept *= max(0.0, streamed * self.rank.gradient_bytes - hosted.trained)
        beside = hosted.gradients + gradients + kept + int(self.workload.other_bytes)
        first = hosted.first_gradients + int(self.workload.activation_bytes)
        return int(self.weights_on_device(hosted) + max(beside, first))

    def weights_on_device(self, hosted: Hosted) -> int:
        """The most of all weights that is on the device."""
        return int(self.rank.weight_bytes - hosted.weights + hosted.copies)

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
                hosted=hosted_by(columns, self.config, off),
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
        sums = self.sums(placed)
        hosted = self._most_hosted.towards(sums.hosted, part)
        speculates = config.update_in_backward and self.workload.clips
        host = self._host_bytes(config, sums, part, share, hosted)
        if speculates and host > self.host_limit:  # then step() makes all updates
            config = dataclasses.replace(config, update_in_backward=False)
            host = self._host_bytes(config, sums, part, share, hosted)
        shares = Shares(resident, share, window, chunk)
        if hosted.weights:
            times = exposed_with_weights(self.totals, shares, hosted, self._rates, config, self.workload)
        else:
            times = exposed(self.totals, shares, self._rates, config, self.workload)
        if share < 1.0 and self._gradients_leave(config, hosted):  # they come back through the slots
            staging += int(config.num_slots * hosted.room_in_slot(slot))
        state = int(kept + staging + window)
        peak = state + self.other_device_bytes(config, times.left, (1.0 - resident) * (1.0 - share), hosted)
        return Candidate(name, share, int(kept), self._prediction(times, shares, state, peak, host), "")

    def _gradients_leave(self, config: OffloadConfig, hosted: Hosted) -> bool:
        work = self.workload
        return hosted.host_gradients(config, clips=work.clips, micro_batches=work.micro_batches) > 0

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

    def _host_bytes(self, config: OffloadConfig, sums: Sums, part: float, share: float, hosted: Hosted) -> int:
        work = self.workload
        arenas = sums.off + sums.resident * (1.0 - part)
        slots = HOST_SLOTS * sums.host.slot_bytes(self.config, share) if share > 0.0 and not hosted.weights else 0
        by_cpu = hosted.by_cpu(share, arenas)
        weights = hosted.host_bytes(config, clips=work.clips, micro_batches=work.micro_batches, by_cpu=by_cpu)
        if not (config.update_in_backward and work.clips):
            return int(arenas + slots + weights)
        kept = kept_weight_share(config, work)[1] * max(0.0, sums.off_weights - hosted.trained)
        return int(arenas + slots + weights + (1.0 - share) * (arenas + kept))

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


def _ms(candidate: Candidate) -> float:
    return candidate.prediction.exposed_ms
