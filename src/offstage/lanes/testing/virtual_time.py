# SPDX-License-Identifier: Apache-2.0
"""Virtual time: when things would have happened on a device that has given rates. In milliseconds, from 0 on."""

from __future__ import annotations

import bisect


class Timeline:
    """One thing that serves one piece of work at a time: a direction of the link, or the host's threads together.

    Work is served in the order in which it is submitted, and uses every moment that earlier work has left free from
    when it may begin. So a copy that waits for something far away holds up nobody, and one that was submitted later
    never delays one that was submitted before: [Note: the link takes turns] is not modelled.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._stops: list[float] = []
        """Of the times in which it is busy, in order; neighbours that touch are one."""

    def take(self, ready: float, duration: float) -> tuple[float, float]:
        """Serve `duration` of work that may begin at `ready`. Returns when it begins and ends."""
        if duration <= 0:
            return ready, ready
        place = first = bisect.bisect_right(self._stops, ready)
        at, left, begin = ready, duration, None
        while place < len(self._starts):
            free = max(0.0, self._starts[place] - at)
            if free > 0 and begin is None:
                begin = at
            if free >= left:
                break
            left, at = left - free, self._stops[place]
            place += 1
        begin, end = at if begin is None else begin, at + left
        self._occupy(first, place, begin, end)
        return begin, end

    def _occupy(self, first: int, place: int, begin: float, end: float) -> None:
        """Busy from `begin` to `end`, over the busy times from `first` up to `place`."""
        if first < place:
            begin = min(begin, self._starts[first])
        if first > 0 and self._stops[first - 1] == begin:
            first -= 1
            begin = self._starts[first]
        if place < len(self._starts) and self._starts[place] == end:
            end = self._stops[place]
            place += 1
        self._starts[first:place] = [begin]
        self._stops[first:place] = [end]


class Link:
    """One direction of the link. Its users take turns, copy by copy.

    A copy waits for those that its own queue was given before, and for the one of another queue that is being served.
    What it takes from queues that have more to do, they get later.
    """

    def __init__(self) -> None:
        self._served: dict[object, list[tuple[float, float]]] = {}
        """The times of each queue's last copies, in order."""
        self._owed: dict[object, float] = {}

    def take(self, queue: object, ready: float, duration: float) -> tuple[float, float]:
        """Serve a copy of `queue` that may begin at `ready`. Returns when it begins and ends."""
        if duration <= 0:
            return ready, ready
        own = self._served.setdefault(queue, [])
        begin = max(ready, own[-1][1] + self._owed.pop(queue, 0.0)) if own else ready
        for other, copies in self._served.items():
            if other != queue:
                begin = max(begin, next((stop for start, stop in copies if start <= begin < stop), begin))
        end = begin + duration
        for other, copies in self._served.items():
            if other != queue and copies and copies[-1][1] > begin:
                self._owed[other] = self._owed.get(other, 0.0) + duration
        own.append((begin, end))
        del own[:-_REMEMBERED]
        return begin, end


_REMEMBERED = 64


class DeviceClock:
    """The clocks that all users of one device share: the host's, the caller's stream, the link and the host's threads.

    The host runs ahead of the device: its clock moves by what a launch costs, and where it waits.
    """

    def __init__(self, launch_ms: float) -> None:
        self.host = 0.0
        """How far the host thread is."""
        self._caller = 0.0
        self._launch_ms = launch_ms
        self.up, self.down, self.host_threads = Link(), Link(), Timeline()

    @property
    def caller(self) -> float:
        """When the caller's stream is done with all that it has been given so far."""
        return max(self._caller, self.host)

    def launch(self) -> None:
        """The host gives something to the device."""
        self.host += self._launch_ms

    def run(self, duration: float) -> None:
        """An operation on the caller's stream."""
        self._caller = self.caller + duration

    def copy(self, link: Link, duration: float) -> None:
        """A copy between host and device on the caller's stream."""
        self._caller = link.take("caller", self.caller, duration)[1]

    def wait(self, moment: float) -> None:
        """The caller's stream waits."""
        self._caller = max(self._caller, moment)

    def wait_on_host(self, moment: float) -> None:
        """The host waits: all that it submits later begins no earlier."""
        self.host = max(self.host, moment)
