# SPDX-License-Identifier: Apache-2.0
"""What does the link do when others use it, too?

    python -m benchmarks.link
    python -m benchmarks.link --size small     anywhere: does it run? Without a GPU there are no lanes to take turns

Three questions, a row each:

- `over_time`: copies both ways between the same buffers, again and again: how much the rate varies by itself. What
  other machines on the same host do is not in our hands, so ratios are taken within one run, with turns.
- `waiting_streams`: the same while other streams wait for an event behind a long kernel, as those of FSDP2 and NCCL do
  all through backward. A device looks again and again whether the event has come, and it looks in host memory.
- `turns`: how long a copy on a stream of its own takes while a fetch lane has 2 GiB in its queue; on one stream, and on
  two that take turns ([Note: the link takes turns] in `copies.py`); and the rate of the lane itself.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.common import DEVICE, ON_GPU, Row, now, synchronize
from benchmarks.harness import Case
from offstage.lanes.accelerator import AcceleratorLanes
from offstage.lanes.lanes import Lane, copy_work, run_all
from offstage.memory.arena import Arena

COPY_BYTES = {"full": 27_000_000, "small": 2**20}  # about what a moment of a 64 MiB chunk has
COPIES = 100
REPEATS = 9
WAITING = (0, 1, 2, 4, 8, 16)
STRANGERS = (64 * 1024, 1024 * 1024)  # bytes: up to 64 KiB travel with the commands, and do not wait
QUEUED = 80  # copies in the lane's queue: 2 GiB
CYCLES = 300_000_000  # about 0.15 s: longer than all copies of a measurement


def stream() -> Any:
    return torch.cuda.Stream() if ON_GPU else None


def on(chosen: Any) -> contextlib.AbstractContextManager[Any]:
    """Work within goes to this stream."""
    return torch.cuda.stream(chosen) if ON_GPU else contextlib.nullcontext()


class Link:
    """Host and device buffers, and a stream each way."""

    def __init__(self, size_name: str) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else DEVICE
        self.copy_bytes = COPY_BYTES[size_name]
        self.arena = Arena(2 * COPIES * self.copy_bytes, torch.uint8, self.device, pin=True)
        self.there, self.back = (torch.empty(self.copy_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        self.small = torch.zeros(max(STRANGERS), dtype=torch.uint8, device=DEVICE)
        self.streams = [stream() for _ in range(2)]
        self.sleeper = stream()
        self.others = [stream() for _ in range(max(WAITING))]
        if ON_GPU:
            torch.cuda._sleep(1)
        self.small.add_(1)  # loading a kernel waits for the device, so each is loaded before anything is measured

    def host(self, number: int) -> torch.Tensor:
        return self.arena.flat[number * self.copy_bytes : (number + 1) * self.copy_bytes]

    def both_ways(self) -> list[float]:
        """GB/s to the device and back, of copies that run at once."""
        spans = []
        for chosen, is_back in zip(self.streams, (False, True), strict=True):
            with on(chosen):
                start = now()
                for number in range(COPIES):
                    if is_back:
                        self.host(COPIES + number).copy_(self.back, non_blocking=True)
                    else:
                        self.there.copy_(self.host(number), non_blocking=True)
                spans.append((start, now()))
        for chosen in self.streams if ON_GPU else ():
            chosen.synchronize()
        return [COPIES * self.copy_bytes / start.elapsed_time(stop) / 1e6 for start, stop in spans]

    def with_waiting(self, num_streams: int) -> list[float]:
        """The same beside so many streams that wait."""
        synchronize()
        if not ON_GPU:
            return self.both_ways()
        with on(self.sleeper):
            torch.cuda._sleep(CYCLES)
            over = self.sleeper.record_event()
        for chosen in self.others[:num_streams]:
            chosen.wait_event(over)
            with on(chosen):
                self.small.add_(1)
        rates = self.both_ways()
        assert not over.query(), "the other streams did not wait long enough"
        synchronize()
        return rates

    def stranger(self, lanes: AcceleratorLanes, nbytes: int, *, takes_turns: bool) -> tuple[float, float]:
        """Milliseconds that a copy of `nbytes` takes beside a full queue, and the GB/s of that queue."""
        synchronize()
        work = copy_work((self.there, self.host(number)) for number in range(QUEUED))
        if takes_turns:
            start = lanes.stamp(Lane.FETCH)
            lanes.submit(Lane.FETCH, work, after={})
            stop = lanes.stamp(Lane.FETCH)
        else:
            with on(self.streams[0]):
                start = now()
                run_all(work)
                stop = now()
        with on(self.others[0]):
            begin = now()
            self.small[:nbytes].copy_(self.arena.flat[-nbytes:], non_blocking=True)
            end = now()
        synchronize()
        return begin.elapsed_time(end), QUEUED * self.copy_bytes / start.elapsed_time(stop) / 1e6


def medians(found: Sequence[Sequence[float]]) -> list[float]:
    return [round(statistics.median(one), 3) for one in zip(*found, strict=True)]


def over_time(link: Link) -> Iterator[Row]:
    link.both_ways()
    found = [link.both_ways() for _ in range(60)]
    ways = {name: sorted(one) for name, one in zip(("fetch", "store"), zip(*found, strict=True), strict=True)}
    yield {
        "case": "over_time",
        "copies": COPIES,
        "gb_per_s": {
            name: {"least": round(one[0], 2), "median": round(statistics.median(one), 2), "most": round(one[-1], 2)}
            for name, one in ways.items()
        },
        "all_gb_per_s": [[round(rate, 1) for rate in one] for one in found],
    }


def waiting_streams(link: Link) -> Iterator[Row]:
    waiting: dict[int, list[list[float]]] = {number: [] for number in WAITING}
    for _ in range(REPEATS):  # in turns: the rate drifts
        for number, found in waiting.items():
            found.append(link.with_waiting(number))
    rates = {number: medians(found) for number, found in waiting.items()}
    yield {"case": "waiting_streams", "repeats": REPEATS, "fetch_and_store_gb_per_s": rates}


def turns(link: Link) -> Iterator[Row]:
    if not ON_GPU:
        return
    lanes = AcceleratorLanes(link.device)
    kinds = [(nbytes, takes_turns) for nbytes in STRANGERS for takes_turns in (False, True)]
    rounds = [[link.stranger(lanes, nbytes, takes_turns=both) for nbytes, both in kinds] for _ in range(REPEATS)]
    for (nbytes, takes_turns), found in zip(kinds, zip(*rounds, strict=True), strict=True):
        stranger_ms, rate = medians(found)
        yield {
            "case": "turns",
            "takes_turns": takes_turns,
            "queued_gib": round(QUEUED * link.copy_bytes / 2**30, 2),
            "stranger_bytes": nbytes,
            "stranger_ms": stranger_ms,
            "lane_gb_per_s": rate,
        }
    lanes.synchronize("measured: nothing is under way")


CASES = {"over_time": over_time, "waiting_streams": waiting_streams, "turns": turns}


def main() -> None:
    options = harness.parse(harness.command(__doc__), harness.cases_of(CASES))
    link = Link(options.size)

    def measure(case: Case) -> Iterator[Row]:
        return CASES[case.name](link)

    harness.run("link", options.cases, measure)
    link.arena.close()


if __name__ == "__main__":
    main()
