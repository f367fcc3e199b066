# SPDX-License-Identifier: Apache-2.0
"""`make_plan`: the fastest plan that fits. Pure: sizes, machine and configuration in, plan out, always the same.

What the configuration fixes is fixed. What it leaves open, the CPU's share, is searched on a grid that is the same for
every machine and budget: so a faster machine or a larger budget never predicts a slower plan. Other settings are
advice: their rows show what they would give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from offstage.config import OffloadConfig, format_size
from offstage.errors import ConfigError, HostMemoryError
from offstage.plan import HOST_SLOTS, ParamSize, Placement, Plan, host_slot_bytes, plan_placements
from offstage.predict import (
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
from offstage.sizes import Source, param_sizes
from offstage.world import RankShare, World

if TYPE_CHECKING:
    from offstage.machine import Machine

_SHARES = tuple(i / 100 for i in range(101))
_SHOWN = tuple(i / 10 for i in range(11))
CHOSEN = "chosen"


def make_plan(
    model_or_sizes: Source,
    machine: Machine,
    config: OffloadConfig | None = None,
    *,
    world: World | None = None,
    workload: Workload | None = None,
) -> Plan:
    """The fastest plan for one rank that fits, what it is predicted to take, and what else was considered.

    `model_or_sizes` is a model (the meta device will do), a state dict, `ParamSize`s, or a mapping from names to shapes
    or numbers of elements. Raises with numbers if nothing fits.
    """
    search = _Search(model_or_sizes, machine, config or OffloadConfig(), world, workload)
    chosen = search.choose()
    search.check_device(chosen)
    plan = plan_placements(search.sizes, search.with_share(chosen.host_fraction))
    prediction = dataclasses.replace(chosen.prediction, **_moved(plan, search.workload, search.config))
    return dataclasses.replace(
        plan,
        prediction=prediction,
        candidates=(dataclasses.replace(chosen, prediction=prediction), *search.others(chosen)),
        notes=tuple(search.notes(prediction)),
    )


def choose_host_fraction(sizes: Sequence[ParamSize], machine: Machine, config: OffloadConfig) -> float:
    """The share that `make_plan` chooses for the CPU, of what leaves the device. Whether all of it fits is not asked."""
    return _Search(list(sizes), machine, config, None, None).choose(refuse=False).host_fraction


class _Search:
    """One call of `make_plan`."""

    def __init__(
        self,
        source: Source,
        machine: Machine,
        config: OffloadConfig,
        world: World | None,
        workload: Workload | None,
    ) -> None:
        self.machine, self.config, self.workload = machine, config, workload or Workload()
        self.knows_workload, self.shares_host = workload is not None, world is None
        self.world = world or World(ranks_per_host=machine.ranks_on_host)
        self.rank: RankShare = self.world.share_of(param_sizes(source, config))
        self.sizes = self.rank.sizes
        _check_one_device(self.sizes)
        self.config = self._with_budget(config)
        self.totals = Totals.of(self.sizes, self.workload.active_experts)
        per_param = self.totals.update_bytes / max(1.0, self.totals.params)
        self.rates = rates_of(machine, self.world.ranks_per_host, config.threads, max(per_param, 1e-9))
        self.host_limit, self.host_limit_name = self._host_limit()

    # What is given

    def _with_budget(self, config: OffloadConfig) -> OffloadConfig:
        """`device_peak`, less what else is on the device, is a budget; `window="auto"` takes that by itself."""
        if config.device_peak is None or config.window == "auto":
            return config
        room = int(config.device_peak) - self.other_device_bytes()
        if room <= 0:
            raise ConfigError(
                f"device_peak of {format_size(int(config.device_peak))} expects room for state; found weights of "
                f"{format_size(self.rank.weight_bytes)}, gradients of {format_size(self.rank.gradient_bytes)} and "
                f"{format_size(int(self.workload.other_bytes))} of other bytes. Raise it above "
                f"{format_size(self.other_device_bytes())}, or use update_in_backward=True without clipping."
            )
        budget = room if config.device_budget is None else min(room, int(config.device_budget))
        return dataclasses.replace(config, device_peak=None, device_budget=budget)

    def _host_limit(self) -> tuple[int, str]:
        free, ranks = self.machine.host_free_bytes, self.world.ranks_per_host
        sharing = f", a {ranks}th of {format_size(free)}" if ranks > 1 else ""
        limit, name = free // ranks, f"free host memory of {format_size(free // ranks)}{sharing}"
        if self.config.host_budget is not None and int(self.config.host_budget) < limit:
            limit = int(self.config.host_budget)
            name = f"host_budget of {format_size(limit)}"
        return limit, name

    def other_device_bytes(self, config: OffloadConfig | None = None, left: float = 1.0, streamed: float = 1.0) -> int:
        """Weights, gradients, the workload's bytes, and old weights that speculation keeps."""
        config = config or self.config
        gradients = gradient_share(config, self.workload, left) * self.rank.gradient_bytes
        kept = kept_weight_share(config, self.workload)[0] * streamed * self.rank.gradient_bytes
        return int(self.rank.weight_bytes + gradients + kept + int(self.workload.other_bytes))

    def with_share(self, share: float, config: OffloadConfig | None = None) -> OffloadConfig:
        """`config` with the CPU's share filled in, where it is open."""
        config = config or self.config
        if config.update_on != "auto" or config.host_fraction is not None:
            return config
        return dataclasses.replace(config, host_fraction=share)

    def _open(self, config: OffloadConfig) -> Sequence[float]:
        """The shares that `config` leaves open."""
        if config.update_on == "auto" and config.host_fraction is None:
            return _SHARES
        return ({"device": 0.0, "host": 1.0}.get(config.update_on, config.host_fraction or 0.0),)

    # Candidates

    def choose(self, *, refuse: bool = True) -> Candidate:
        """The fastest of the configuration's own candidates; then the one with less on the host, then the smaller
        share."""
        found = list(self._of("as configured", self.config))
        fitting = [one for one in found if not self._misfit(one)]
        if not fitting and refuse:
            self._refuse_host(min(found, key=lambda one: one.prediction.host_bytes))
        best = min(fitting or found, key=_order)
        return dataclasses.replace(best, verdict=CHOSEN)

    def _of(self, name: str, config: OffloadConfig, resident: float = 1.0) -> Iterator[Candidate]:
        """`config` with each share that it leaves open; `resident` of what could be resident."""
        plans: dict[bool, Plan] = {}
        for share in self._open(config):
            whole = share == 1.0  # without slots more is resident
            if whole not in plans:
                plans[whole] = plan_placements(self.sizes, self.with_share(share if whole else 0.0, config))
            yield self._candidate(name, config, plans[whole], share, resident)

    def _candidate(self, name: str, config: OffloadConfig, plan: Plan, share: float, part: float) -> Candidate:
        """Placements matter only by their total here: [Note: fluid model]."""
        kept = plan.bytes_of(Placement.RESIDENT) * part
        resident = kept / self.totals.state if self.totals.state else 1.0
        off_bytes = self.totals.state - kept
        largest = max((size.padded_bytes for size in self.sizes if not size.splits), default=0)
        fill = min(max(int(config.chunk_bytes), largest), off_bytes)
        staging = config.slots * plan.slot_bytes if share < 1.0 else 0
        window = self._window(config, staging, off_bytes * (1.0 - share))
        shares = Shares(resident, share, window, fill)
        second = config.update_in_backward and self.workload.clips
        host = self._host_bytes(plan, part, share, second=second)
        if second and host > self.host_limit:  # offstage then makes all updates in step()
            config, second = dataclasses.replace(config, update_in_backward=False), False
            host = self._host_bytes(plan, part, share, second=False)
        times = exposed(self.totals, shares, self.rates, config, self.workload)
        device_state = int(kept + staging + window)
        peak = device_state + self.other_device_bytes(config, times.left, (1.0 - resident) * (1.0 - share))
        prediction = self._prediction(times, shares, device_state, peak, host)
        return Candidate(name, share, int(kept), prediction, "")

    def _prediction(self, times: Times, shares: Shares, device_state: int, peak: int, host: int) -> Prediction:
        on_device = 1.0 - (1.0 - shares.resident) * shares.host
        busy = busy_ms(times.work, self.totals.update_bytes * self.totals.moved * on_device, self.rates)
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

    def _window(self, config: OffloadConfig, staging: int, streamed: float) -> float:
        if config.window == "all":
            return streamed
        if config.window != "auto":
            return min(float(int(config.window)), streamed)
        room = int(config.device_peak or 0) - self.other_device_bytes(config) - staging
        return max(0.0, min(float(room), streamed)) if self.knows_workload else 0.0

    def _host_bytes(self, plan: Plan, part: float, share: float, *, second: bool) -> int:
        off = [size for size, where in zip(plan.sizes, plan.placements, strict=True) if where is not Placement.RESIDENT]
        arenas = sum(size.padded_bytes for size in off) + plan.bytes_of(Placement.RESIDENT) * (1.0 - part)
        slots = HOST_SLOTS * host_slot_bytes(off, int(self.config.chunk_bytes)) if share > 0.0 and off else 0
        again = (1.0 - share) * arenas if second else 0.0
        kept = kept_weight_share(self.config, self.workload)[1] if second else 0.0
        off_weights = sum(size.weight_bytes for size in off) * (1.0 - share)
        return int(arenas + slots + again + kept * off_weights)

    def others(self, chosen: Candidate) -> Iterator[Candidate]:
        """What was not taken, and why."""
        for one in self._of("as configured", self.config):
            if one.host_fraction in _SHOWN and one.host_fraction != chosen.host_fraction:
                yield self._judged(one, chosen)
        if chosen.resident_bytes and self.config.fraction is None:
            for part, name in ((0.5, "half of it resident"), (0.0, "none of it resident")):
                yield self._judged(self._best(name, self.config, part), chosen)
        for name, changes, verdict in self._advice():
            try:
                config = dataclasses.replace(self.config, **changes)
            except ConfigError:  # it contradicts another setting
                continue
            yield self._judged(self._best(name, config), chosen, verdict)
        if chosen.resident_bytes < self.totals.state:
            everything = plan_placements(self.sizes, OffloadConfig(fraction=0.0))
            yield self._judge_resident(self._candidate("all resident", self.config, everything, 0.0, 1.0))

    def _best(self, name: str, config: OffloadConfig, resident: float = 1.0) -> Candidate:
        found = list(self._of(name, config, resident))
        return min([one for one in found if not self._misfit(one)] or found, key=_order)

    def _advice(self) -> Iterator[tuple[str, dict[str, object], str]]:
        """Settings that only the user can choose: they change what the loop may do."""
        config = self.config
        if config.fraction == 0.0:
            return
        if config.update_on == "device":
            yield "update_on='auto'", {"update_on": "auto"}, "not asked for"
        if not self.knows_workload:
            return
        if not config.overlap_forward:
            yield "overlap_forward=True", {"overlap_forward": True}, "not asked for"
        if not config.update_in_backward:
            both = {"overlap_forward": True, "update_in_backward": True}
            yield "overlap_forward, update_in_backward=True", both, "not asked for"

    def _misfit(self, one: Candidate) -> str:
        if one.prediction.host_bytes > self.host_limit:
            return f"host memory: {format_size(one.prediction.host_bytes)} of {format_size(self.host_limit)}"
        return ""

    def _judged(self, one: Candidate, chosen: Candidate, verdict: str = "") -> Candidate:
        slower = one.prediction.exposed_ms - chosen.prediction.exposed_ms
        by_time = "slower" if slower > 0 else "no faster, more on the host or a larger share"
        too_large = self._too_large(one.prediction.device_peak_bytes)
        return dataclasses.replace(one, verdict=self._misfit(one) or too_large or verdict or by_time)

    def _judge_resident(self, one: Candidate) -> Candidate:
        budget = self.config.device_budget
        if budget is not None:
            verdict = f"over device_budget by {format_size(one.prediction.device_state_bytes - int(budget))}"
        else:
            verdict = self._too_large(one.prediction.device_peak_bytes) or "not asked for"
        return dataclasses.replace(one, verdict=verdict)

    def _too_large(self, peak: int) -> str:
        most = self.machine.device_bytes
        return f"device memory: {format_size(peak)} of {format_size(most)}" if peak > most else ""

    # Refusing

    def check_device(self, chosen: Candidate) -> None:
        """Refuse what the device cannot hold."""
        peak, most = chosen.prediction.device_peak_bytes, self.machine.device_bytes
        if peak <= most:
            return
        state = chosen.prediction.device_state_bytes
        remedies = []
        if chosen.resident_bytes and state > peak - most:
            remedies.append(f"lower device_budget to {format_size(state - (peak - most))}")
        if not self.config.update_in_backward:
            remedies.append("use update_in_backward=True, which keeps a quarter of the gradients")
        remedies.append("divide the model among more ranks")
        raise ConfigError(
            f"{self.machine.device_name} with {format_size(most)} cannot hold a peak of {format_size(peak)}: weights "
            f"of {format_size(self.rank.weight_bytes)}, {format_size(state)} of state, "
            f"{format_size(int(self.workload.other_bytes))} of other bytes, and gradients. "
            f"{', or '.join(remedies).capitalize()}."
        )

    def _refuse_host(self, least: Candidate) -> None:
        need = least.prediction.host_bytes
        missing = need - self.host_limit
        raise HostMemoryError(
            f"The plan needs at least {format_size(need)} of host memory per rank; found {self.host_limit_name}. "
            f"Keep {format_size(missing)} more of the state on the device (device_budget of "
            f"{format_size(least.prediction.device_state_bytes + missing)}), use master_weights='split' or "
            "state_dtype='bfloat16', or divide the state among more ranks."
        )

    # What is assumed

    def notes(self, prediction: Prediction) -> Iterator[str]:
        world, ranks = self.world, self.world.ranks_per_host
        if world.ranks > 1:
            stage = f", the stage with {self.rank.stage}" if self.rank.stage else ""
            ways = " x ".join(f"{n} {way}" for way in ("data", "tensor", "pipeline") if (n := getattr(world, way)) > 1)
            experts = f", experts divided by {world.expert}" if world.expert > 1 else ""
            yield f"one rank of {world.ranks:,} ({ways}{experts}){stage}"
        if ranks > 1:
            yield (
                f"{ranks} ranks share a host: each has a link of its own, and one part in {ranks} of its memory, "
                "memory bandwidth and threads"
            )
        if not self.knows_workload:
            yield "no workload was given: nothing hides the updates, so `exposed` is an upper bound"
        if self.totals.moved < 1.0:
            yield f"{self.totals.moved:.0%} of the state gets gradients in a step; the rest does not move"
        if self.config.update_in_backward and not self.workload.clips:
            first = prediction.device_peak_bytes - self.other_device_bytes(self.config) * 0
            first = prediction.device_state_bytes + self.rank.weight_bytes + self.rank.gradient_bytes
            over = " than this device has" if first > self.machine.device_bytes else ""
            yield (
                "the first iteration keeps all gradients: weights, gradients and state are then "
                f"{format_size(first)}{', more' + over if over else ''}"
            )


def _order(one: Candidate) -> tuple[float, int, float]:
    return one.prediction.exposed_ms, one.prediction.host_bytes, one.host_fraction


def _check_one_device(sizes: Sequence[ParamSize]) -> None:
    devices = sorted({size.device for size in sizes})
    if len(devices) > 1:
        raise ConfigError(
            f"make_plan expects the parameters of one device; found some on {', '.join(devices)}. Make a plan for each."
        )


def _moved(plan: Plan, workload: Workload, config: OffloadConfig) -> dict[str, int]:
    """Bytes from the placements themselves."""
    second = config.update_in_backward and workload.clips
    up = down = 0.0
    for size, placement in zip(plan.sizes, plan.placements, strict=True):
        active = workload.active_experts if size.expert else 1.0
        if placement is Placement.STREAMED:
            up += size.state_bytes * (1.0 if second else active)
            down += size.state_bytes * (1.0 if second else active)
        elif placement is Placement.HOST:
            up += size.weight_bytes * active
            down += 2 * size.weight_bytes * active
    return {"bytes_up": int(up), "bytes_down": int(down)}
