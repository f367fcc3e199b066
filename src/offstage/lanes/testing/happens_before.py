# SPDX-License-Identifier: Apache-2.0
"""A happens-before checker: raises on two conflicting accesses to one buffer that no chain of marks orders.

Every lane has a clock; work knows the latest tick of every lane that is certain to lie before it. Wrong bytes alone
miss half of the missing waits, because the wrong order has to happen; this finds them in any order. It needs only
declared accesses: `LazyLanes` uses it in tests without an accelerator, `CheckedLanes` on real streams.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from offstage.errors import RaceError

Clock = dict[str, int]
"""Lane → the latest tick of it that is known to have passed. What the host has waited for is left out: see `Clocks`."""
HOST, CALLER = "host", "caller"
SHARED = (HOST, CALLER)
"""These belong to no user of lanes: they give work to the lanes of all."""


_SHORT = 32
"""Entries: fewer are not worth a look."""


def join(target: Clock, other: Clock) -> None:
    """`target` now also comes after everything `other` comes after."""
    if len(other) > len(target):  # one of the two is often much longer: it is copied, not looked at
        mine = target.copy()
        target.update(other)
        other = mine
    for lane, tick in other.items():
        if tick > target.get(lane, 0):
            target[lane] = tick


_PAGE_BITS = 12
_MOST_PAGES = 64
"""An access to more of them is not found by its pages."""


@dataclass(slots=True)
class _Access:
    number: int
    start: int
    stop: int
    write: bool
    lane: str
    tick: int
    what: str


class HappensBefore:
    """The accesses that later ones must still be ordered against."""

    def __init__(self) -> None:
        self._number = itertools.count()
        self._accesses: dict[int, _Access] = {}
        """By number: in the order in which they came."""
        self._large: dict[int, _Access] = {}
        """Those over more than a few pages."""
        self._on_page: defaultdict[int, dict[int, _Access]] = defaultdict(dict)
        """The others: there are thousands, of which few overlap."""

    def record(
        self,
        lane: str,
        clock: Clock,
        what: str,
        *,
        host: Clock,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
    ) -> None:
        """`lane` accesses the tensors at `clock`, which already includes the access's own tick, and after `host`."""
        for write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                if tensor.numel():
                    start, number = tensor.data_ptr(), next(self._number)
                    stop = start + _extent_bytes(tensor)
                    self._check(_Access(number, start, stop, write, lane, clock[lane], what), clock, host)

    def _check(self, new: _Access, clock: Clock, host: Clock) -> None:
        superseded = []
        for old in self._overlapping(new):
            ordered = clock.get(old.lane, 0) >= old.tick or host.get(old.lane, 0) >= old.tick
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
            self._forget(old)
        self._keep(new)

    def _overlapping(self, new: _Access) -> list[_Access]:
        """In the order in which they came."""
        pages = _pages(new)
        if pages is None:
            near = self._accesses
        else:
            near = self._large.copy()
            for page in pages:
                if page in self._on_page:
                    near.update(self._on_page[page])
        found = [old for old in near.values() if old.start < new.stop and new.start < old.stop]
        found.sort(key=_number_of)
        return found

    def _keep(self, new: _Access) -> None:
        self._accesses[new.number] = new
        pages = _pages(new)
        if pages is None:
            self._large[new.number] = new
        else:
            for page in pages:
                self._on_page[page][new.number] = new

    def _forget(self, old: _Access) -> None:
        del self._accesses[old.number]
        pages = _pages(old)
        if pages is None:
            del self._large[old.number]
        else:
            for page in pages:
                del self._on_page[page][old.number]


_number_of = operator.attrgetter("number")


def _pages(access: _Access) -> range | None:
    """Those that it touches, unless they are many."""
    found = range(access.start >> _PAGE_BITS, ((access.stop - 1) >> _PAGE_BITS) + 1)
    return found if len(found) <= _MOST_PAGES else None


class Clocks:
    """The clocks of one set of lanes, of the caller's stream and of the host, over one checker.

    Several sets of lanes, of an optimizer and of a model's activations, have lanes of their own and one caller and one
    host (`beside`): what one of them writes and another reads must be ordered by what the caller or the host waits for.

    Whatever the host waited for lies before all it does next. So other clocks leave it out, and stay short.
    """

    def __init__(self, checker: HappensBefore | None = None) -> None:
        self._checker = checker if checker is not None else HappensBefore()
        self._host: Clock = {HOST: 0}
        self._clocks: dict[str, Clock] = {HOST: self._host}
        self._most: dict[str, int] = {}
        """How long a lane's clock may become before it is shortened."""
        self._number = itertools.count(1)
        self._of = ""

    def beside(self) -> Clocks:
        """The clocks of another set of lanes with the same caller, host and checker."""
        made = Clocks(self._checker)
        made._host, made._clocks, made._number = self._host, self._clocks, self._number
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
        for other in after:
            join(clock, other)
        clock[lane] += 1
        if lane != HOST and len(clock) > self._most.get(lane, _SHORT):
            self._shorten(lane, clock)
        self._checker.record(lane, clock, f"{lane} #{clock[lane]}", host=self._host, reads=reads, writes=writes)
        return dict(clock) if clock is not self._host else {HOST: clock[HOST]}

    def _shorten(self, lane: str, clock: Clock) -> None:
        """Leave out what the host has waited for meanwhile, and do not try again before it is long."""
        host = self._host
        known = [other for other, tick in clock.items() if other != lane and tick <= host.get(other, 0)]
        for other in known:
            del clock[other]
        self._most[lane] = max(_SHORT, 2 * len(clock))

    def wait(self, who: str, moment: Clock) -> None:
        """`who` (the caller's stream, the host) goes on only after `moment`."""
        join(self._clocks.setdefault(who, {who: 0}), moment)

    def wait_for_all(self) -> None:
        """The host goes on only after everything that any of these lanes has been given."""
        for lane, clock in list(self._clocks.items()):
            if lane not in SHARED and lane.partition(" (")[0].endswith(self._of):
                self.wait(HOST, clock)
                if " (" in lane:  # its only work
                    del self._clocks[lane]
                else:
                    self._clocks[lane] = {lane: clock[lane]}


def _extent_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
