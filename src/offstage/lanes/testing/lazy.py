# SPDX-License-Identifier: Apache-2.0
"""`LazyLanes`: the backend that catches races on a machine without an accelerator. For tests.

Submitted work does not run until something forces it, and then only what must run does, in an order drawn at random
from those the marks allow. Released buffers are poisoned. Every declared access goes through the happens-before
checker. Every wait is recorded under its name, and one can be dropped by name: a test drops each in turn, and each
must be caught. Its clock stands still, so that what is decided by measured times is always decided in the same way:
all times are 0, and logs stay empty.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offstage.lanes.host_threads import Slice
from offstage.lanes.lanes import UNORDERED, Buffers, Lane, Lanes, Work, run_all
from offstage.lanes.testing.happens_before import CALLER, HOST, Clock, Clocks

_POISON_BYTE = 0xA5


@dataclass(eq=False)
class _Work:
    """One piece of work and its mark: later work that names it comes after it."""

    lane: Lane
    run: Work
    before: list[_Work]
    clock: Clock
    done: bool = False


@dataclass
class WaitLog:
    """Which waits were made, by name; `drop` names the one that is left out."""

    drop: str | None = None
    seen: set[str] = field(default_factory=set)

    def keeps(self, reason: str) -> bool:
        self.seen.add(reason)
        return reason != self.drop


class LazyLanes(Lanes):
    """Work runs as late and as out of order as the marks allow."""

    checks = True

    def __init__(
        self, device: torch.device, *, seed: int = 0, waits: WaitLog | None = None, clocks: Clocks | None = None
    ) -> None:
        """`clocks`: those of another set of lanes, `beside()` which these are."""
        self.device = device
        self.waits = waits if waits is not None else WaitLog()
        self.log: list[str] = []
        self._clocks = clocks if clocks is not None else Clocks()
        self._random = random.Random(seed)
        # Some seeds never run anything early; the others run a little now and then.
        self._early = (0.0, 0.3, 0.7)[seed % 3]
        self._pending: list[_Work] = []
        self._last: dict[Lane, _Work] = {}

    def submit(
        self,
        lane: Lane,
        work: Work,
        *,
        after: Mapping[str, _Work | None],
        reads: Buffers = (),
        writes: Buffers = (),
        low_priority: bool = False,
    ) -> _Work:
        before = [mark for reason, mark in after.items() if mark is not None and self.waits.keeps(reason)]
        ordered = lane not in UNORDERED
        clocks = [mark.clock for mark in before]
        clock = self._clocks.work(lane.value, clocks, reads=reads, writes=writes, ordered=ordered)
        if lane in self._last and ordered:
            before.append(self._last[lane])
        item = _Work(lane, work, before, clock)
        self._last[lane] = item
        self._pending.append(item)
        self.log.append(lane.value)
        self._run_some_early()
        return item

    def submit_on_host(
        self,
        slices: Sequence[Slice],
        *,
        after: Mapping[str, _Work | None],
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> _Work:
        order = self._random.sample(slices, len(slices))
        return self.submit(Lane.HOST, lambda: _all(order), after=after, reads=reads, writes=writes)

    def mark(self) -> _Work:
        return _Work(Lane.CALLER, _nothing, [], self._clocks.work(CALLER, []), done=True)

    def wait(self, mark: _Work, reason: str) -> None:
        if self.waits.keeps(reason):
            self._force([mark])
            self._clocks.wait(CALLER, mark.clock)

    def wait_on_host(self, mark: _Work, reason: str) -> None:
        if self.waits.keeps(reason):
            self._force([mark])
            self._clocks.wait(HOST, mark.clock)

    def empty(self, nbytes: int) -> torch.Tensor:
        tensor = torch.full((nbytes,), _POISON_BYTE, dtype=torch.uint8, device=self.device)
        self.touch(writes=[tensor])
        return tensor

    def release(self, tensor: torch.Tensor, after: _Work, reason: str) -> None:
        self.wait(after, reason)
        self.drop(tensor)

    def drop(self, tensor: torch.Tensor) -> None:
        self.touch(writes=[tensor])
        tensor.view(-1).view(torch.uint8).fill_(_POISON_BYTE)

    def synchronize(self, reason: str) -> None:
        if self.waits.keeps(reason):
            self._force(list(self._pending))
            self._clocks.wait_for_all()

    def passed(self, mark: _Work) -> bool:
        if mark.done:
            self._clocks.wait(HOST, mark.clock)
        return mark.done

    def touch(self, *, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._clocks.work(CALLER, [], reads=reads, writes=writes)

    def touch_on_host(self, *, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._clocks.work(HOST, [], reads=reads, writes=writes)

    def stamp(self, lane: Lane) -> float:
        return 0.0

    def elapsed_ms(self, start: float, stop: float) -> float:
        return 0.0

    def _run_some_early(self) -> None:
        while self._pending and self._random.random() < self._early:
            ready = [item for item in self._pending if all(other.done for other in item.before)]
            self._run(self._random.choice(ready))

    def _force(self, marks: list[_Work]) -> None:
        """Run exactly what `marks` need, in a random order among those allowed."""
        needed: list[_Work] = []
        stack = [mark for mark in marks if not mark.done]
        while stack:
            item = stack.pop()
            if item not in needed:
                needed.append(item)
                stack.extend(other for other in item.before if not other.done)
        while needed:
            item = self._random.choice([x for x in needed if all(other.done for other in x.before)])
            self._run(item)
            needed.remove(item)

    def _run(self, item: _Work) -> None:
        self._pending.remove(item)
        work, item.run, item.before, item.done = item.run, _nothing, [], True  # what it kept alive may go
        with torch.inference_mode(False), torch.no_grad():  # as on a lane, whatever mode the thread is in that waits
            run_all(work)


def _nothing() -> None:
    pass


def _all(slices: Sequence[Slice]) -> None:
    for piece in slices:
        piece()
