# SPDX-License-Identifier: Apache-2.0
"""`Search`: the plans that a configuration allows, and those it could allow, each with its prediction. Pure.

Used by `planner.py`. What the configuration fixes is fixed. What it leaves open, the CPU's share, is tried on a grid
that is the same for every machine and budget: so a faster machine or a larger budget never predicts a slower plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from offstage.config import OffloadConfig, Placement, format_size
from offstage.errors import ConfigError
from offstage.planning.plan import HOST_SLOTS, Plan, host_slot_bytes, plan_placements
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
from offstage.planning.world import RankShare, World

if TYPE_CHECKING:
    from offstage.planning.machine import Machine

_SHARES = tuple(i / 100 for i in range(101))
_SHOWN = tuple(i / 10 for i in range(11))


class Search:
    """One rank's model on one machine."""

    def __init__(
        self, rank: RankShare, machine: Machine, config: OffloadConfig, world: World, workload: Workload | None
    ) -> None:
        self.rank, self.machine, self.world = rank, machine, world
        self.workload, self.knows_workload = workload or Workload(), workload is not None
        self.config = self._with_budget(config)
        self.totals = Totals.of(rank.sizes, self.workload.active_experts)
        per_param = self.totals.update_bytes / max(1.0, self.totals.params)
        self._rates = rates_of(machine, world.ranks_per_host, config.threads, max(per_param, 1.0))
        self.host_limit = machine.host_free_bytes // world.ranks_per_host
        if config.host_budget is not None:
            self.host_limit = min(self.host_limit, int(config.host_budget))

    # What is given

    def _with_budget(self, config: OffloadConfig) -> OffloadConfig:
        """`device_peak`, less what else is on the device, is a budget; with ``window="auto"`` it is the window's."""
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
        gradients = gradient_share(config, self.workload, left) * self.rank.gradient_bytes
        kept = kept_weight_share(config, self.workload)[0] * streamed * self.rank.gradient_bytes
        return int(self.rank.weight_bytes + gradients + kept + int(self.workload.other_bytes))

    def with_share(self, share: float, config: OffloadConfig | None = None) -> OffloadConfig:
        """`config` with the CPU's share filled in, where it is open."""
        config = config or self.config
        return dataclasses.replace(config, host_fraction=share) if _is_open(config) else config

    # Candidates

    def own(self) -> list[Candidate]:
        """All that the configuration allows."""
        return self._of("as configured", self.config)

    def best(self, found: Sequence[Candidate]) -> Candidate:
        """The fastest that fits; if none does, one that lacks least, of the host's memory or else of the device's."""
        if fitting := [one for one in found if not self.misfit(one)]:
            return fastest(fitting)
        if on_host := [one for one in found if self.fits_host(one)]:
            return min(on_host, key=lambda one: (one.prediction.device_peak_bytes, one.host_fraction))
        return min(found, key=lambda one: (one.prediction.host_bytes, one.host_fraction))

    def fits_host(self, one: Candidate) -> bool:
        """Whether the host has room for it."""
        return one.prediction.host_bytes <= self.host_limit

    def misfit(self, one: Candidate) -> str:
        """What does not fit, in a few words."""
        if not self.fits_host(one):
            return f"{format_size(one.prediction.host_bytes - self.host_limit)} over host memory"
        over = one.prediction.device_peak_bytes - self.machine.device_bytes
        return f"{format_size(over)} over device memory" if over > 0 else ""

    def others(self, own: Sequence[Candidate], chosen: Candidate) -> Iterator[Candidate]:
        """What was not taken, and why."""
        for one in own:
            if one.host_fraction in _SHOWN and one.host_fraction != chosen.host_fraction:
                yield self._judged(dataclasses.replace(one, name="another share for the CPU"), chosen)
        if self.config.device_budget is not None and 0 < chosen.resident_bytes < self.totals.state:
            for part, name in ((0.5, "half as much resident"), (0.0, "nothing resident")):
                yield self._judged(self.best(self._of(name, self.config, part)), chosen)
        for name, changes, needs in self._advice():
            try:
                config = OffloadConfig.build(self.config, changes)
            except ConfigError:  # it contradicts another setting
                continue
            yield self._judged(self.best(self._of(name, config)), chosen, needs)
        if chosen.resident_bytes < self.totals.state:
            everything = plan_placements(self.rank.sizes, OffloadConfig(fraction=0.0))
            yield self._judged_resident(self._candidate("all resident", self.config, everything, 0.0, 1.0))

    def _advice(self) -> Iterator[tuple[str, dict[str, object], str]]:
        """Settings that only the user can choose, because they change what the loop may do."""
        config = self.config
        if config.fraction == 0.0:
            return
        if config.update_on == "device":
            yield "CPU and device", {"update_on": "auto"}, "needs update_on='auto'"
        if not self.knows_workload:
            return
        if not config.overlap_forward:
            yield "forward does not wait", {"overlap_forward": True}, "needs overlap_forward=True"
        if not config.update_in_backward:
            also = "" if config.overlap_forward else " too"
            changes: dict[str, object] = {"overlap_forward": True, "update_in_backward": True}
            yield "updates in backward" + also, changes, "needs update_in_backward=True" + also

    def _of(self, name: str, config: OffloadConfig, part: float = 1.0) -> list[Candidate]:
        """`config` with each share that it leaves open; `part` of what could be resident is."""
        if not _is_open(config):
            share = {"device": 0.0, "host": 1.0}.get(config.update_on, config.host_fraction)
            return [self._candidate(name, config, plan_placements(self.rank.sizes, config), share or 0.0, part)]
        host_only = plan_placements(self.rank.sizes, self.with_share(1.0, config))  # needs no slots
        last = self._candidate(name, config, host_only, 1.0, part)
        try:
            streaming = plan_placements(self.rank.sizes, self.with_share(0.0, config))
        except ConfigError:  # there is no room for slots
            return [last]
        return [self._candidate(name, config, streaming, share, part) for share in _SHARES[:-1]] + [last]

    def _candidate(self, name: str, config: OffloadConfig, plan: Plan, share: float, part: float) -> Candidate:
        """Placements count by their sums only: [Note: fluid model]."""
        kept = plan.bytes_of(Placement.RESIDENT) * part
        resident = kept / self.totals.state if self.totals.state else 1.0
        off_bytes = self.totals.state - kept
        largest = max((size.padded_bytes for size in plan.sizes if not size.splits), default=0)
        chunk = min(max(int(config.chunk_bytes), largest), off_bytes)
        staging = config.num_slots * plan.slot_bytes if share < 1.0 else 0
        window = self.window_bytes(config, staging, off_bytes * (1.0 - share))
        second = config.update_in_backward and self.workload.clips
        host = self._host_bytes(plan, part, share, second=second)
        if second and host > self.host_limit:  # all updates are then made in step()
            config = dataclasses.replace(config, update_in_backward=False)
            host = self._host_bytes(plan, part, share, second=False)
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
            iteration_ms=self.workload.compute_ms + times.exposed_ms if self.knows_workload else None,
            busy_ms=busy,
            bottleneck=max(busy, key=lambda name: busy[name]),
        )

    def window_bytes(self, config: OffloadConfig, staging: int, streamed: float) -> float:
        """What a window takes beside slots of `staging` bytes, for `streamed` bytes of state."""
        if config.window == "all":
            return streamed
        if config.window != "auto":
            return min(float(int(config.window)), streamed)
        room = int(config.device_peak or 0) - self.other_device_bytes(config) - staging
        return max(0.0, min(float(room), streamed)) if self.knows_workload else 0.0

    def _host_bytes(self, plan: Plan, part: float, share: float, *, second: bool) -> int:
        off = [size for size, where in zip(plan.sizes, plan.placements, strict=True) if where is not Placement.RESIDENT]
        arenas = sum(size.padded_bytes for size in off) + plan.bytes_of(Placement.RESIDENT) * (1.0 - part)
        slots = HOST_SLOTS * host_slot_bytes(off, int(self.config.chunk_bytes)) if share > 0.0 else 0
        if not second:
            return int(arenas + slots)
        kept = kept_weight_share(self.config, self.workload)[1] * sum(size.weight_bytes for size in off)
        return int(arenas + slots + (1.0 - share) * (arenas + kept))

    # Why not

    def _judged(self, one: Candidate, chosen: Candidate, needs: str = "") -> Candidate:
        slower = one.prediction.exposed_ms > chosen.prediction.exposed_ms
        verdict = self.misfit(one) or needs or ("slower" if slower else "no faster")
        return dataclasses.replace(one, verdict=verdict)

    def _judged_resident(self, one: Candidate) -> Candidate:
        state, budget = one.prediction.device_state_bytes, self.config.device_budget
        over = "" if budget is None else f"{format_size(state - int(budget))} over device_budget"
        return dataclasses.replace(one, verdict=over or self.misfit(one) or "needs fraction=0.0")


def fastest(found: Sequence[Candidate]) -> Candidate:
    """Of equally fast ones, that with the smallest share for the CPU."""
    return min(found, key=lambda one: (one.prediction.exposed_ms, one.host_fraction))


def _is_open(config: OffloadConfig) -> bool:
    """Whether `config` leaves the CPU's share to the planner."""
    return config.update_on == "auto" and config.host_fraction is None
