# SPDX-License-Identifier: Apache-2.0
"""`Plan`: where each parameter's state lives. Pure: the same sizes and configuration give the same plan."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from offstage.config import MIN_CHUNK_BYTES, OffloadConfig, Placement, format_size
from offstage.errors import ConfigError, OffloadIneffectiveError
from offstage.planning.host_weights import may_leave
from offstage.planning.predict import CHOSEN, HOST_CHUNK, Candidate, Prediction
from offstage.planning.sizes import Columns, Mask, ParamSize, largest, total

SLOTS_SHARE = 0.25
"""Slots together take at most this share of the state that goes through them, unless `chunk_bytes` is given."""
_LEAST_JUDGED = 1024**2
"""Less state than this may leave without a saving: torch packs allocations of up to this size into common blocks, so
that neither what leaves nor its slots are seen from outside."""
HOST_SLOTS = 4
"""Staging buffers on the host for chunks that the CPU updates: one is filled from the device, two are updated (threads
that finish one go on to the next), one is copied back."""
_MOST_ROWS = 24
"""`str(plan)` shows a plan with more parameters by groups of them."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number between the dots of a name."""


@dataclass(frozen=True)
class Plan:
    """The placement of every parameter on one device, and the slots. Printable; equal for equal input."""

    sizes: tuple[ParamSize, ...]
    placements: tuple[Placement, ...]
    slots: int
    slot_bytes: int
    """The most that a slot takes: a chunk, the largest parameter that is not split, or all streamed state."""
    window: int | str = 0
    """Bytes beyond the slots in which chunks may wait; ``"auto"`` and ``"all"`` become bytes in training."""
    host_slots: int = 0
    host_slot_bytes: int = 0
    """The most that a staging buffer on the host takes: weights and gradients of a chunk that the CPU updates."""
    chunk_bytes: int = 0
    """Streamed state is cut into chunks of this size, except parameters that are not split and larger."""
    host_chunk_bytes: int = 0
    """The same for state that the CPU updates."""
    host_weight_bytes: int = field(default=0, compare=False)
    """Weights that live on the host, as `make_plan` expects it."""
    device_weight_bytes: int = field(default=0, compare=False)
    """Where some live on the host: the most of all weights that is on the device, with copies of layers that run."""
    prediction: Prediction | None = field(default=None, compare=False)
    """What `make_plan` expects of this plan."""
    candidates: tuple[Candidate, ...] = field(default=(), compare=False)
    """The plans that `make_plan` considered, this one first, each with the reason why it was chosen or not."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What the prediction assumes."""

    def bytes_of(self, placement: Placement) -> int:
        """State bytes of the parameters with this placement."""
        return sum(s.state_bytes for s, p in zip(self.sizes, self.placements, strict=True) if p is placement)

    @property
    def host_share(self) -> float:
        """The share that the CPU updates, of the state that left the device."""
        off_device = self.bytes_of(Placement.HOST) + self.bytes_of(Placement.STREAMED)
        return self.bytes_of(Placement.HOST) / off_device if off_device else 0.0

    @property
    def host_bytes(self) -> int:
        """Host memory for state that is not resident, and for staging buffers."""
        off_device = (s for s, p in zip(self.sizes, self.placements, strict=True) if p is not Placement.RESIDENT)
        return sum(s.padded_bytes for s in off_device) + self.host_slots * self.host_slot_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory for resident state, slots, and a window of known size."""
        window = self.window if isinstance(self.window, int) else 0
        return self.bytes_of(Placement.RESIDENT) + self.slots * self.slot_bytes + window

    @property
    def net_saved_bytes(self) -> int:
        """Device memory that offloading frees, less what slots and a window of known size take."""
        return sum(size.state_bytes for size in self.sizes) - self.device_bytes

    def summary(self) -> str:
        """One line, for `repr(optimizer)` and logs."""
        if not self.slots:
            return f"state: {self.by_placement()}"
        size = format_size(self.window) if isinstance(self.window, int) else repr(self.window)
        window = f" and a window of {size}" if self.window else ""
        return f"state: {self.by_placement()} through {self.slots} slots of {format_size(self.slot_bytes)}{window}"

    def by_placement(self) -> str:
        """How many bytes and parameters have each placement."""
        words = {Placement.RESIDENT: "resident", Placement.HOST: "updated on the host", Placement.STREAMED: "streamed"}
        parts = [
            f"{format_size(self.bytes_of(placement))} {word} ({self.placements.count(placement)})"
            for placement, word in words.items()
            if placement in self.placements
        ]
        return ", ".join(parts).replace(")", " parameters)", 1) or "none"

    def __str__(self) -> str:
        return "\n".join(_table(self))

    def to_json(self) -> str:
        """The whole plan as a JSON object."""
        fields = dataclasses.asdict(self)
        fields["placements"] = [placement.value for placement in self.placements]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`."""
        try:
            fields = json.loads(text)
            fields["sizes"] = tuple(ParamSize(**size) for size in fields["sizes"])
            fields["placements"] = tuple(Placement(value) for value in fields["placements"])
            fields["prediction"] = Prediction(**fields["prediction"]) if fields["prediction"] else None
            fields["candidates"] = tuple(
                Candidate(**{**one, "prediction": Prediction(**one["prediction"])}) for one in fields["candidates"]
            )
            fields["notes"] = tuple(fields["notes"])
            return cls(**fields)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"Plan.from_json expects what Plan.to_json wrote; found {text[:80]!r} ({error!r}). Make the plan again."
            ) from error


def plan_placements(
    sizes: Sequence[ParamSize], config: OffloadConfig, placed: Mapping[int, Placement] | None = None
) -> Plan:
    """Place the parameters of one device. Small ones stay resident, then the first ones as far as there is room.

    The first layers' state is the best to keep: their gradients come last in backward and their weights are needed
    first in the next forward. `placed`: parameters, by position, whose placement is already decided.
    """
    return place(Columns.of(sizes), config, placed).plan(sizes)


@dataclass(frozen=True, eq=False)
class Placed:
    """A `Plan` without names: where each parameter of `columns` is, and the slots."""

    columns: Columns
    resident: Mask
    on_host: Mask
    """The CPU updates them."""
    slots: int
    slot_bytes: int
    window: int | str
    host_slots: int
    host_slot_bytes: int
    chunk_bytes: int
    host_chunk_bytes: int

    @property
    def streamed(self) -> Mask:
        return ~(self.resident | self.on_host)

    def plan(self, sizes: Sequence[ParamSize]) -> Plan:
        """The plan for `sizes`, of which `columns` are the numbers."""
        where = (Placement.STREAMED, Placement.HOST, Placement.RESIDENT)
        codes = np.where(self.resident, 2, self.on_host).tolist()
        return Plan(
            tuple(sizes),
            tuple(map(where.__getitem__, codes)),
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            window=self.window,
            host_slots=self.host_slots,
            host_slot_bytes=self.host_slot_bytes,
            chunk_bytes=self.chunk_bytes,
            host_chunk_bytes=self.host_chunk_bytes,
        )


def place(columns: Columns, config: OffloadConfig, placed: Mapping[int, Placement] | None = None) -> Placed:
    """What `plan_placements` decides, for parameters whose numbers are `columns`."""
    state = columns.state_bytes
    decided = {where: _mask(len(state), placed or {}, where) for where in Placement}
    is_open = ~(decided[Placement.RESIDENT] | decided[Placement.STREAMED] | decided[Placement.HOST])
    small = state < max(1, int(config.min_bytes))
    resident = decided[Placement.RESIDENT] | (is_open & small if config.fraction != 0.0 else is_open)
    left, whole = _whole_and_largest(columns, ~resident)
    used = total(state, resident)
    room = _room_for_resident(used, left, whole, int(state.sum()), config)
    resident[_first_that_fit(columns, is_open & ~resident, used, left, room)] = True
    on_host = _choose_host(columns, config, resident, decided)
    streamed = ~(resident | on_host)
    streamed_bytes, whole = _whole_and_largest(columns, streamed)
    slot_bytes = slot_bytes_for(streamed_bytes, whole, config)
    by_cpu = HostUpdated.of(columns, on_host)
    _check_window(config, slot_bytes)
    return Placed(
        columns,
        resident,
        on_host,
        slots=config.num_slots if streamed.any() else 0,
        slot_bytes=slot_bytes,
        window=config.window if streamed.any() else 0,
        host_slots=HOST_SLOTS if on_host.any() else 0,
        host_slot_bytes=by_cpu.slot_bytes(config),
        chunk_bytes=_chunk_bytes(streamed_bytes, config.num_slots, config) if streamed.any() else 0,
        host_chunk_bytes=_host_chunk_bytes(by_cpu.state_bytes, config) if on_host.any() else 0,
    )


def _mask(count: int, placed: Mapping[int, Placement], where: Placement) -> Mask:
    found = np.zeros(count, dtype=bool)
    found[[i for i, placement in placed.items() if placement is where]] = True
    return found


def _first_that_fit(
    columns: Columns, candidates: Mask, used: int, left: int, room: Callable[[int], float]
) -> list[int]:
    """Positions of candidates that fit, each tried in its turn with the room that those before it left."""
    state, padded = columns.state_bytes, columns.padded_bytes
    most = math.floor(room(0)) - used  # there is the most room if nothing leaves, and no slots are needed
    positions = np.flatnonzero(candidates & (state <= most))
    biggest = int(padded[positions].max(initial=0))
    fitting: list[int] = []
    # Room only grows as state stays. So what fits in `low` fits, and what does not fit in `high` does not.
    low, high = room(left), room(left - biggest)
    for i, size, taken in zip(positions.tolist(), state[positions].tolist(), padded[positions].tolist(), strict=True):
        if used + size <= low or (used + size <= high and used + size <= room(left - taken)):
            fitting.append(i)
            used += size
            left -= taken
            high = high if used + biggest <= low else room(left - biggest)
    return fitting


def _choose_host(columns: Columns, config: OffloadConfig, resident: Mask, decided: Mapping[Placement, Mask]) -> Mask:
    """Choose which of the parameters that are not resident the CPU updates.

    They are spread evenly over the model: host and device both work in the order of forward, so neither delays the
    other.
    """
    state = columns.state_bytes
    share = host_share(config)
    assert share is not None, "the planner chooses a share before parameters are placed"
    always = decided[Placement.HOST]
    may = ~(resident | decided[Placement.STREAMED])
    if share in (0.0, 1.0):
        return may if share else always
    if config.moves_weights:
        moving = may & may_leave(columns, config)
        return always | (moving & np.isin(columns.layer, _whole_layers(columns, share, ~resident, moving)))
    positions = np.flatnonzero(~resident)
    limits = share * np.cumsum(state[positions])
    limits[always[positions]] = math.inf
    limits[~may[positions]] = -math.inf
    picked, on_host = [], 0.0
    for i, size, limit in zip(positions.tolist(), state[positions].tolist(), limits.tolist(), strict=True):
        if on_host + size / 2 <= limit:
            picked.append(i)
            on_host += size
    chosen = np.zeros(len(state), dtype=bool)
    chosen[picked] = True
    return chosen


def _whole_layers(columns: Columns, share: float, off: Mask, moving: Mask) -> list[int]:
    """The numbers of layers that the CPU updates as a whole, because their weights come to the device as a whole.

    `off`: what leaves the device; `moving`: what of it has its weights on the host, too. The first of each few layers
    are the device's: the CPU has their time for its own. What is in no layer is the device's.
    """
    state = columns.state_bytes
    numbers, positions = np.unique(columns.layer[moving], return_inverse=True)
    sizes = np.bincount(positions, weights=state[moving], minlength=len(numbers)).tolist()
    share = min(1.0, share * total(state, off) / max(1, total(state, moving)))
    picked: list[int] = []
    passed = on_host = 0.0
    for number, size in zip(numbers.tolist(), sizes, strict=True):
        passed += size
        if on_host + size <= share * passed:
            picked.append(number)
            on_host += size
    return picked or numbers.tolist()[-1:]


def host_share(config: OffloadConfig) -> float | None:
    """The share that the CPU updates, of the state that leaves the device; `None`: the planner chooses it."""
    return {"device": 0.0, "host": 1.0}.get(config.update_on, config.host_fraction)


def staging_bytes(slots: int, slot_bytes: int, window: int | str, streamed_bytes: int) -> int:
    """Device memory for slots and the window. What ``"auto"`` takes is not known yet."""
    beyond = {"all": streamed_bytes, "auto": 0}.get(window, window) if isinstance(window, str) else window
    return slots * slot_bytes + (int(beyond) if slots else 0)


# The size of chunks and slots #


def _chunk_bytes(state_bytes: float, slots: int, config: OffloadConfig) -> int:
    """The size of the chunks in which `state_bytes` of state go through `slots` slots: given, or chosen here."""
    if config.chunk_bytes is not None:
        return int(config.chunk_bytes)
    share = int(SLOTS_SHARE * state_bytes / slots) // MIN_CHUNK_BYTES * MIN_CHUNK_BYTES
    return min(config.most_chunk_bytes, max(MIN_CHUNK_BYTES, share))


def _host_chunk_bytes(state_bytes: float, config: OffloadConfig) -> int:
    return HOST_CHUNK * _chunk_bytes(state_bytes, HOST_SLOTS, config)


def slot_bytes_for(streamed_bytes: float, largest_whole: float, config: OffloadConfig) -> int:
    """The size of a slot for `streamed_bytes` of state. `largest_whole`: of the largest parameter that is not split."""
    return int(max(largest_whole, min(_chunk_bytes(streamed_bytes, config.num_slots, config), streamed_bytes)))


@dataclass(frozen=True)
class HostUpdated:
    """What decides the size of a staging buffer for parameters that the CPU updates."""

    state_bytes: int
    """Of all of them, with alignment."""
    split_bytes: int
    """Of those that chunks may split."""
    per_state_byte: float
    """The most bytes of weights and gradients that go with a byte of their state."""
    largest_whole: int
    """Weights and gradients of the largest that is not split. Gradients are taken to have the weights' dtype."""

    @classmethod
    def of(cls, columns: Columns, updated: Mask) -> HostUpdated:
        splits = updated & columns.splits & (columns.padded_bytes > 0)
        return cls(
            state_bytes=total(columns.padded_bytes, updated),
            split_bytes=total(columns.padded_bytes, splits),
            per_state_byte=float((2 * columns.weight_bytes[splits] / columns.padded_bytes[splits]).max(initial=0.0)),
            largest_whole=2 * largest(columns.weight_bytes, updated & ~columns.splits),
        )

    def slot_bytes(self, config: OffloadConfig, share: float = 1.0) -> int:
        """Bytes of weights and gradients of the largest chunk, if the CPU updates `share` of them."""
        chunk_bytes = _host_chunk_bytes(share * self.state_bytes, config)
        return max(self.largest_whole, int(self.per_state_byte * min(chunk_bytes, share * self.split_bytes)))


def _whole_and_largest(columns: Columns, which: Mask) -> tuple[int, int]:
    """Bytes of all state, and of the largest parameter that is not split, with alignment."""
    return total(columns.padded_bytes, which), largest(columns.padded_bytes, which & ~columns.splits)


def _check_window(config: OffloadConfig, slot_bytes: int) -> None:
    if isinstance(config.window, int) and 0 < config.window < slot_bytes:
        raise ConfigError(
            f"window={format_size(config.window)} is smaller than one slot of {format_size(slot_bytes)} and would do "
            "nothing. Use at least that, lower chunk_bytes, or use window=0."
        )


def _room_for_resident(
    kept: int, left: int, largest: int, everything: int, config: OffloadConfig
) -> Callable[[int], float]:
    """How many bytes of state may stay resident, if so many bytes leave; `kept` bytes must stay, `left` may leave."""
    wanted = (1.0 - config.fraction) * everything if config.fraction is not None else 0.0
    if config.device_budget is None:
        return lambda _: wanted
    budget = int(config.device_budget)
    if everything <= budget and config.fraction is None:
        return lambda _: everything
    if host_share(config) == 1.0:
        slot_bytes = window = 0  # nothing comes back to the device
    else:
        slot_bytes = slot_bytes_for(left, largest, config)
        window = int(config.window)  # OffloadConfig refuses "auto" and "all" together with a budget
    staging = config.num_slots * slot_bytes + window
    also = f", a window of {format_size(window)}" if window else ""
    need = staging + kept
    if need > budget:
        slots = f"{config.num_slots} slots of {format_size(slot_bytes)}{also} and " if staging else ""
        raise ConfigError(
            f"device_budget of {format_size(budget)} cannot hold {slots}{format_size(kept)} of state that stays "
            "resident (parameters under min_bytes, or placed before). Raise it to "
            f"{format_size(need, up=True)}, or lower {'chunk_bytes or slots' if staging else 'min_bytes'}."
        )
    if config.fraction is None:
        if not staging:
            return lambda _: budget
        return lambda left: budget - window - config.num_slots * slot_bytes_for(left, largest, config)
    if wanted + staging > budget:
        raise ConfigError(
            f"fraction={config.fraction} keeps {format_size(wanted)} of state on the device, which with "
            f"{config.num_slots} slots of {format_size(slot_bytes)} contradicts device_budget={format_size(budget)}. "
            f"Raise device_budget to {format_size(wanted + staging, up=True)}, raise fraction, or leave one of the two "
            "out."
        )
    return lambda _: wanted


def refuse_idle(plans: Sequence[Plan], config: OffloadConfig) -> None:
    """Raise if offloading was asked for and all state would stay on its device."""
    if config.fraction == 0.0 or any(p is not Placement.RESIDENT for plan in plans for p in plan.placements):
        return
    sizes = [size for plan in plans for size in plan.sizes]
    everything = sum(size.state_bytes for size in sizes)
    budget = config.device_budget
    if config.fraction is None and budget is not None and 0 < everything <= int(budget) * len(plans):
        return  # all state fits the budget
    if everything == 0:
        reason = "this optimizer keeps no state (SGD without momentum?). Use it without offstage, or with momentum."
    else:
        reason = (
            f"the largest parameter has {format_size(max(size.state_bytes for size in sizes))} of state, less than "
            f"min_bytes={format_size(int(config.min_bytes))}. Lower min_bytes (0 offloads everything), or use "
            "fraction=0.0 to keep everything resident on purpose."
        )
    raise OffloadIneffectiveError(f"Nothing would be offloaded: {reason}")


def refuse_costly(plans: Sequence[Plan], config: OffloadConfig) -> None:
    """Raise if slots and window would take as much device memory as the state that leaves has freed."""
    freed = sum(plan.bytes_of(Placement.STREAMED) + plan.bytes_of(Placement.HOST) for plan in plans)
    taken = sum(plan.device_bytes - plan.bytes_of(Placement.RESIDENT) for plan in plans)
    if taken < freed or freed < _LEAST_JUDGED:
        return
    plan = next(plan for plan in plans if plan.slots)
    found = f"{plan.slots} slots of {format_size(plan.slot_bytes)}"
    whole = plan.slot_bytes > plan.chunk_bytes
    given = [name for name in (("window",) if whole else ("chunk_bytes", "slots", "window")) if getattr(config, name)]
    remedy = f"Leave out {' and '.join(given)}, use " if given else "Use "
    if whole:
        found += ", the largest parameter that is not split"
        remedy = "Use slots=1, " if not given and plan.slots > 1 and plan.slot_bytes < freed else remedy
    if plan.window and isinstance(plan.window, int):
        found += f", and a window of {format_size(plan.window)}"
    raise OffloadIneffectiveError(
        f"Offloading would save no device memory: expected slots and window to take less than the {format_size(freed)} "
        f"of state that leaves the device; found {format_size(taken)} ({found}). {remedy}update_on='host', which needs "
        "no slots, or fraction=0.0 to keep all state resident."
    )


# A plan as a table #


def _table(plan: Plan) -> list[str]:
    """The rows of `str(plan)`; a plan of `make_plan` also shows what it costs and what else was considered."""
    rows = _parameters(plan) if len(plan.sizes) <= _MOST_ROWS else _groups(plan)
    if plan.prediction is None:
        return [*rows, plan.summary()]
    return [*_facts(plan, plan.prediction), "", *rows, "", *_candidates(plan.candidates)]


def _parameters(plan: Plan) -> Iterator[str]:
    yield f"{'parameter':<40} {'state':>12}  placement"
    for size, placement in zip(plan.sizes, plan.placements, strict=True):
        yield f"{size.name:<40} {format_size(size.state_bytes):>12}  {placement.value}"


def _groups(plan: Plan) -> Iterator[str]:
    """One row for all parameters whose names differ only in numbers."""
    groups: dict[str, list[tuple[ParamSize, Placement]]] = {}
    for size, placement in zip(plan.sizes, plan.placements, strict=True):
        groups.setdefault(_NUMBER.sub("*", size.name), []).append((size, placement))
    yield f"{'parameters':<46} {'number':>7} {'state':>10} {'resident':>10} {'streamed':>10} {'on the host':>11}"
    for name, members in groups.items():
        sums = {placement: sum(s.state_bytes for s, p in members if p is placement) for placement in Placement}
        cells = [format_size(sums[placement]) if sums[placement] else "-" for placement in Placement]
        whole = format_size(sum(sums.values()))
        short = name if len(name) <= 46 else f"{name[:22]}…{name[-23:]}"
        yield f"{short:<46} {len(members):>7,} {whole:>10} {cells[0]:>10} {cells[1]:>10} {cells[2]:>11}"


def _facts(plan: Plan, found: Prediction) -> Iterator[str]:
    slots = f", including {plan.slots} slots of {format_size(plan.slot_bytes)}" if plan.slots else ""
    whole = f", an iteration {_ms(found.iteration_ms)}" if found.iteration_ms is not None else ""
    weights = (
        f"{format_size(plan.host_weight_bytes)} on the host, at most {format_size(plan.device_weight_bytes)} on the "
        "device, with copies of the layers that run"
    )
    rows = [
        ("state", plan.by_placement()),
        *((("weights", weights),) if plan.host_weight_bytes else ()),
        ("device", f"{format_size(found.device_state_bytes)} of state{slots}"),
        ("", f"{format_size(found.device_peak_bytes)} at the peak, with weights, gradients and the workload's bytes"),
        ("host", format_size(found.host_bytes)),
        ("moved per step", f"{format_size(found.bytes_up)} up, {format_size(found.bytes_down)} down"),
        ("exposed", f"{_ms(found.exposed_ms)}{whole}"),
        ("busy per step", ", ".join(f"{name} {_ms(time)}" for name, time in found.busy_ms.items())),
        *(("note", text) for text in plan.notes),
    ]
    for name, value in rows:
        yield f"{name:<15} {value}"


def _candidates(candidates: Sequence[Candidate]) -> Iterator[str]:
    yield (
        f"  {'considered':<25} {'CPU':>4} {'resident':>9} {'device':>9} {'host':>9} "
        f"{'exposed':>9} {'iteration':>9}  verdict"
    )
    for one in candidates:
        found = one.prediction
        iteration = _ms(found.iteration_ms) if found.iteration_ms is not None else "-"
        mark = ">" if one.verdict == CHOSEN else " "
        yield (
            f"{mark} {one.name:<25} {one.host_fraction:>4.0%} {format_size(one.resident_bytes):>9} "
            f"{format_size(found.device_state_bytes):>9} {format_size(found.host_bytes):>9} "
            f"{_ms(found.exposed_ms):>9} {iteration:>9}  {one.verdict}"
        )


def _ms(time: float) -> str:
    return f"{time:.1f} ms" if time < 100 else f"{time:,.0f} ms"
