# SPDX-License-Identifier: Apache-2.0
"""`choose`: the fastest `Setting` of a job that fits the device and the host. Pure: the same job gives the same answer.

Everything is decided together: which state stays, streams or is updated by the CPU; whose weights live on the host;
what each layer does with its activations; when updates are made. For each way of placing the rest, as much state stays
on the device as fits, because more never slows an iteration down. The search climbs from several starts, by steps that
become smaller; tests compare it with trying everything.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offstage.planning.choices import Choice, spread
from offstage.planning.footprint import Footprint, Footprints, footprint
from offstage.planning.job import Job, Setting
from offstage.planning.timeline import iteration_ms

_SHARES = 10
"""The CPU's share is a multiple of one tenth."""
_DOUBT, _HOSTED_DOUBT, _CPU_DOUBT = 1.01, 1.02, 1.03
"""How much longer than predicted an iteration may take in which something leaves the device, one with weights on the
host, and one with updates by the CPU: its threads and the loop's share CPUs, which no measurement of either shows."""


@dataclass(frozen=True)
class Limits:
    """What may be taken, in bytes."""

    device: int
    host: int


@dataclass(frozen=True)
class Predicted:
    """A setting and what it takes."""

    setting: Setting
    iteration_ms: float
    device_bytes: int
    host_bytes: int

    def over(self, limits: Limits) -> int:
        """By how many bytes it exceeds them; 0 if it fits."""
        return max(0, self.device_bytes - limits.device) + max(0, self.host_bytes - limits.host)


class _Point(NamedTuple):
    """Numbers of layers, and the CPU's share in tenths."""

    hosted: int = 0
    offloaded: int = 0
    recomputed: int = 0
    tenths: int = 0

    def moved(self, **by: int) -> _Point:
        return self._replace(**{name: getattr(self, name) + change for name, change in by.items()})


Cues = tuple[bool, bool]
"""`overlap_forward`, `update_in_backward`."""


def predict(job: Job, setting: Setting) -> Predicted:
    """What `setting` takes."""
    found = footprint(job, setting)
    return Predicted(setting, iteration_ms(job, setting), found.device, found.host)


def least_memory(job: Job, limits: Limits) -> Predicted:
    """The setting that takes the least device memory of those that the host has room for."""
    search = _Search(job, limits)
    points = [_Point(hosted, offloaded, recomputed) for hosted, offloaded, recomputed in search.corners()]
    found = [search.setting(point, cues, 0) for point in points for cues in search.cues]
    sized = [(footprint(job, setting), setting) for setting in found]
    fitting = [one for one in sized if one[0].host <= limits.host]
    if not fitting:  # a large device may have room for what a small host has not
        fuller = [search.with_less_on_host(setting) for setting in found]
        fitting = [(footprint(job, setting), setting) for setting in fuller if setting is not None]
        fitting = [one for one in fitting if one[0].device <= limits.device]
    return predict(job, min(fitting or sized, key=lambda one: (one[0].device, one[0].host))[1])


def choose(job: Job, limits: Limits, each: Sequence[Predicted] | None = None) -> Predicted | None:
    """The fastest setting that fits; `None` if none does. `each`: `best_of_each`, where it is known."""
    found = each if each is not None else best_of_each(job, limits)
    fitting = [one for one in found if not one.over(limits)]
    return min(fitting, key=_preference, default=None)


@functools.lru_cache(maxsize=2)  # what was tried is judged by the same search that finds what to try next
def best_of_each(job: Job, limits: Limits) -> Sequence[Predicted]:
    """For each combination of cues the fastest setting that fits, or else the one that exceeds the limits the least."""
    search = _Search(job, limits)
    return tuple(search.climb(cues) for cues in search.cues)


def all_settings(job: Job, limits: Limits) -> Iterator[Predicted]:
    """Every placement, each with as much state on the device as fits. For small models: there are many."""
    search = _Search(job, limits)
    for cues in search.cues:
        for point in search.points():
            yield search.predicted(point, cues)


def _preference(one: Predicted) -> tuple[float, tuple[int, ...]]:
    return one.iteration_ms * _doubt(one), _complexity(one.setting)


def _doubt(one: Predicted) -> float:
    if one.setting.host_share:
        return _CPU_DOUBT
    return _HOSTED_DOUBT if one.setting.hosted else _DOUBT if one.host_bytes else 1.0


def _complexity(setting: Setting) -> tuple[int, ...]:
    moved = sum(1 for choice in setting.choices if choice is not Choice.KEEP)
    cues = setting.update_in_backward + setting.overlap_forward
    return setting.hosted, moved, round(_SHARES * setting.host_share), cues


class _Search:
    """The settings of one job under some limits, each predicted once."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self.job, self.limits, self.num = job, limits, job.num_layers
        self._predicted: dict[tuple[_Point, Cues], Predicted] = {}
        self._movable = [number for number, layer in enumerate(job.loop.layers) if layer.saved_bytes]
        self._can_recompute = [number for number in self._movable if job.loop.layers[number].can_recompute]

    @functools.cached_property
    def cues(self) -> list[Cues]:
        """Allowed ones; the simplest first."""
        overlap = (False, True) if self.job.may_overlap_forward else (False,)
        early = (False, True) if self.job.may_update_in_backward and not self.job.loop.reads_gradients else (False,)
        return [(one, other) for other in early for one in overlap]

    # The space #

    @property
    def _most_hosted(self) -> int:
        return self.num if self.job.may_host_weights and any(part.movable > 0 for part in self.job.parts) else 0

    @property
    def _may_share(self) -> bool:
        return self.job.may_update_on_host and self.job.may_move_state

    def _is_valid(self, point: _Point) -> bool:
        moves = self.job.may_offload_activations
        return (
            min(point) >= 0
            and point.hosted <= self._most_hosted
            and point.offloaded + point.recomputed <= (len(self._movable) if moves else 0)
            and point.recomputed <= len(self._can_recompute)
            and point.tenths <= (_SHARES if self._may_share and not point.hosted else 0)
        )

    def points(self) -> Iterator[_Point]:
        """All of them."""
        counts = range(self.num + 1)
        for hosted, offloaded, recomputed in itertools.product(counts, counts, counts):
            for tenths in range(_SHARES + 1):
                if self._is_valid(point := _Point(hosted, offloaded, recomputed, tenths)):
                    yield point

    def corners(self) -> Iterator[tuple[int, int, int]]:
        """Everything on the host and everything on the device, with tensors kept, offloaded or recomputed."""
        num = len(self._movable) if self.job.may_offload_activations else 0
        again = min(num, len(self._can_recompute))
        for hosted in dict.fromkeys((0, self._most_hosted)):
            yield from dict.fromkeys([(hosted, 0, 0), (hosted, num, 0), (hosted, num - again, again)])

    def choices(self, point: _Point) -> tuple[Choice, ...]:
        """What each layer does: those that offload are spread, and the first ones of the others recompute.

        What is kept is then given back early in backward, when the gradients are still to come.
        """
        found = [Choice.KEEP] * self.num
        last = max(0, len(self._movable) - 1)  # backward needs the last one first: it leaves when all others do
        away = spread(min(point.offloaded, last), last) | ({last} if point.offloaded > last else frozenset())
        for place in away:
            found[self._movable[place]] = Choice.OFFLOAD
        others = [number for number in self._can_recompute if found[number] is Choice.KEEP]
        for number in others[: point.recomputed]:
            found[number] = Choice.RECOMPUTE
        return tuple(found)

    # What it takes #

    def setting(self, point: _Point, cues: Cues, resident: int) -> Setting:
        overlap, early = cues
        return Setting(self.choices(point), resident, point.hosted, point.tenths / _SHARES, overlap, early)

    def predicted(self, point: _Point, cues: Cues) -> Predicted:
        """The placement with as much state on the device as fits."""
        if (point, cues) not in self._predicted:
            # Chunks for the CPU are large, and backward waits for gradients that it has not used yet: seldom hidden.
            cues = (cues[0], cues[1] and not point.tenths)
            empty = self.setting(point, cues, 0)
            low, high = 0, self.job.resident_below(point.hosted) if self.job.may_move_state else 0
            found = Footprints(self.job, empty)
            if self._fits_device(found.at(0)):
                while low < high:  # the most that fits
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if self._fits_device(found.at(middle)) else (low, middle - 1)
            if low == self.job.most_resident:  # nothing leaves: there is nothing to hide, and no share
                whole = Setting(empty.choices, low)
                fits = self._fits_device(footprint(self.job, whole))
                empty, low = (whole, low) if fits else (empty, max(0, low - 1))
            self._predicted[point, cues] = predict(self.job, dataclasses.replace(empty, resident=low))
        return self._predicted[point, cues]

    def with_less_on_host(self, setting: Setting) -> Setting | None:
        """The same with just so much state on the device that the host has room for the rest; `None`: it never has."""

        found = Footprints(self.job, setting)

        def fits(resident: int) -> bool:
            return found.at(resident).host <= self.limits.host

        low, high = 0, self.job.resident_below(setting.hosted) if self.job.may_move_state else 0
        if not fits(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        if low == self.job.most_resident and not setting.hosted:  # nothing leaves: there is nothing to hide
            return Setting(setting.choices, low)
        return dataclasses.replace(setting, resident=low)

    def _fits_device(self, found: Footprint) -> bool:
        return found.device <= self.limits.device

    # Climbing #

    def climb(self, cues: Cues) -> Predicted:
        starts = [_Point(*corner) for corner in self.corners()]
        if self._is_valid(_Point(tenths=_SHARES)):  # the CPU alone needs no slots
            halves = [one.moved(tenths=_SHARES // 2) for one in starts if not one.hosted]
            starts += [*halves, *(one.moved(tenths=_SHARES // 2) for one in halves)]
        found = [self.predicted(self._climb_from(start, cues), cues) for start in starts]
        return min(found, key=self._rank)

    def _climb_from(self, point: _Point, cues: Cues) -> _Point:
        step = max(1, self.num // 2)
        while True:
            near = [one for one in _neighbours(point, step) if self._is_valid(one)]
            best = min(near, key=lambda one: self._rank(self.predicted(one, cues)), default=point)
            if self._is_better(self.predicted(best, cues), self.predicted(point, cues)):
                point = best
            elif step > 1:
                step //= 2
            else:
                return point

    def _rank(self, one: Predicted) -> tuple[float, float, tuple[int, ...]]:
        return (one.over(self.limits), *_preference(one))

    def _is_better(self, one: Predicted, other: Predicted) -> bool:
        return self._rank(one) < self._rank(other)


def _neighbours(point: _Point, step: int) -> Iterator[_Point]:
    """One more or less of each, and one in place of another."""
    for sign in (step, -step):
        for name in ("hosted", "offloaded", "recomputed"):
            yield point.moved(**{name: sign})
        yield point.moved(offloaded=sign, recomputed=-sign)
        yield point.moved(hosted=sign, recomputed=-sign)
        yield point.moved(hosted=sign, offloaded=-sign)
        yield point.moved(tenths=1 if sign > 0 else -1)
        yield point.moved(hosted=sign)._replace(tenths=0)
