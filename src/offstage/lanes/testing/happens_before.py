# SPDX-License-Identifier: Apache-2.0
"""A happens-before checker: raises on two conflicting accesses to one buffer that no chain of marks orders.

Every lane has a clock; work knows the latest tick of every lane that is certain to lie before it. Wrong bytes alone
miss half of the missing waits, because the wrong order has to happen; this finds them in any order. It needs only
declared accesses: `LazyLanes` uses it in tests without an accelerator, `CheckedLanes` on real streams.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from offstage.errors import RaceError

Clock = dict[str, int]
"""Lane → the latest tick of it that is known to have passed."""
HOST, CALLER = "host", "caller"
SHARED = (HOST, CALLER)
"""These belong to no user of lanes: they give work to the lanes of all."""


def join(target: Clock, other: Clock) -> None:
    """`target` now also comes after everything `other` comes after."""
    for lane, tick in other.items():
        if tick > target.get(lane, 0):
            target[lane] = tick


@dataclass(slots=True)
class _Access:
    start: int
    stop: int
    write: bool
    lane: str
    tick: int
    what: str


class HappensBefore:
    """The accesses that later ones must still be ordered against."""

    def __init__(self) -> None:
        self._accesses: dict[int, _Access] = {}
        """By `id`, in the order in which they came."""

    def record(
        self,
        lane: str,
        clock: Clock,
        what: str,
        *,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
    ) -> None:
        """`lane` accesses the tensors at `clock`, which already includes the access's own tick."""
        for write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                if tensor.numel():
                    start = tensor.data_ptr()
                    access = _Access(start, start + _extent_bytes(tensor), write, lane, clock[lane], what)
                    self._check(access, clock)

    def _check(self, new: _Access, clock: Clock) -> None:
        # Few of thousands overlap: the others are passed over in one expression, which most of a test's time goes to.
        overlapping = [old for old in self._accesses.values() if old.start < new.stop and new.start < old.stop]
        superseded = []
        for old in overlapping:
            ordered = clock.get(old.lane, 0) >= old.tick
            if not ordered and (old.write or new.write):
                kind = f"{'write' if old.write else 'read'}–{'write' if new.write else 'read'}"
                raise RaceError(
                    f"{kind} race on {min(old.stop, new.stop) - max(old.start, new.start)} bytes: {new.what} on the "
                    f"{new.lane} lane is not ordered after {old.what} on the {old.lane} lane. "
                    "Expected a mark between them; add it to `after`."
                )
            covered = new.start <= old.start and old.stop <= new.stop
            # An access that is ordered before this one, over the same bytes and no stronger, says nothing more.
            if covered and ordered and (new.write or not old.write):
                superseded.append(old)
        for old in superseded:
            del self._accesses[id(old)]
        self._accesses[id(new)] = new


class Clocks:
    """The clocks of one set of lanes, of the caller's stream and of the host, over one checker.

    Several sets of lanes, of an optimizer and of a model's activations, have lanes of their own and one caller and one
    host (`beside`): what one of them writes and another reads must be ordered by what the caller or the host waits for.
    """

    def __init__(self, checker: HappensBefore | None = None) -> None:
        self._checker = checker if checker is not None else HappensBefore()
        self._clocks: dict[str, Clock] = {}
        self._number = itertools.count(1)
        self._of = ""

    def beside(self) -> Clocks:
        """The clocks of another set of lanes with the same caller, host and checker."""
        made = Clocks(self._checker)
        made._clocks, made._number = self._clocks, self._number
        made._of = f" of user {next(self._number)}"
        return made

    def work(
        self,
        lane: str,
        after: Iterable[Clock],
        *,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
        ordered: bool = True,
    ) -> Clock:
        """`lane` gets work that comes after the given moments; returns the moment it is done.

        `ordered`: it also comes after what the lane got before.
        """
        if not ordered:
            lane = f"{lane}{self._of} ({next(self._number)})"
        elif lane not in SHARED:
            lane += self._of
        clock = self._clocks.setdefault(lane, {lane: 0})
        for other in (self._clocks.get(HOST, {}), *after):  # whatever the host waited for lies before all it does next
            join(clock, other)
        clock[lane] += 1
        self._checker.record(lane, clock, f"{lane} #{clock[lane]}", reads=reads, writes=writes)
        return dict(clock)

    def wait(self, who: str, moment: Clock) -> None:
        """`who` (the caller's stream, the host) goes on only after `moment`."""
        join(self._clocks.setdefault(who, {who: 0}), moment)

    def wait_for_all(self, who: str) -> None:
        """`who` goes on only after everything that any of these lanes has been given."""
        for lane, clock in list(self._clocks.items()):
            if lane not in SHARED and lane.partition(" (")[0].endswith(self._of):
                self.wait(who, clock)


def _extent_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
