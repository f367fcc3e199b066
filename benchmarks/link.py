# SPDX-License-Identifier: Apache-2.0
"""What does the link do when others use it, too?

    python -m benchmarks.link

Three questions, a row each:

- `over_time`: copies both ways between the same buffers, again and again: how much the rate varies by itself. What
  other machines on the same host do is not in our hands, so ratios are taken within one run, with turns.
- `waiting_streams`: the same while other streams wait for an event behind a long kernel, as those of FSDP2 and NCCL do
  all through backward. A device looks again and again whether the event has come, and it looks in host memory.
- `turns`: how long a copy on a stream of its own takes while a fetch lane has 2 GiB in its queue; on one stream, and on
  two that take turns ([Note: the link takes turns] in `copies.py`); and the rate of the lane itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from benchmarks.common import write_row
from offstage.lanes.accelerator import AcceleratorLanes
from offstage.lanes.copies import copy_work
from offstage.lanes.lanes import Lane, run_all
from offstage.memory.arena import Arena

COPY_BYTES = 27_000_000  # about what a moment of a 64 MiB chunk has
COPIES = 100
REPEATS = 9
WAITING = (0, 1, 2, 4, 8, 16)
STRANGERS = (64 * 1024, 1024 * 1024)  # bytes: up to 64 KiB travel with the commands, and do not wait
QUEUED = 80  # copies in the lane's queue: 2 GiB
CYCLES = 300_000_000  # about 0.15 s: longer than all copies of a measurement


class Link:
    """Host and device buffers, and a stream each way."""

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.arena = Arena(2 * COPIES * COPY_BYTES, torch.uint8, device, pin=True)
        self.there, self.back = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        self.small = torch.zeros(max(STRANGERS), dtype=torch.uint8, device=device)
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.sleeper = torch.cuda.Stream()
        self.others = [torch.cuda.Stream() for _ in range(max(WAITING))]
        torch.cuda._sleep(1)
        self.small.add_(1)  # loading a kernel waits for the device, so each is loaded before anything is measured

    def host(self, number: int) -> torch.Tensor:
        return self.arena.flat[number * COPY_BYTES : (number + 1) * COPY_BYTES]

    def both_ways(self) -> list[float]:
        """GB/s to the device and back, of copies that run at once."""
        spans = []
        for stream, is_back in zip(self.streams, (False, True), strict=True):
            with torch.cuda.stream(stream):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for number in range(COPIES):
                    if is_back:
                        self.host(COPIES + number).copy_(self.back, non_blocking=True)
                    else:
                        self.there.copy_(self.host(number), non_blocking=True)
                stop.record()
                spans.append((start, stop))
        for stream in self.streams:
            stream.synchronize()
        return [COPIES * COPY_BYTES / start.elapsed_time(stop) / 1e6 for start, stop in spans]

    def with_waiting(self, num_streams: int) -> list[float]:
        """The same beside so many streams that wait."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.sleeper):
            torch.cuda._sleep(CYCLES)
            over = self.sleeper.record_event()
        for stream in self.others[:num_streams]:
            stream.wait_event(over)
            with torch.cuda.stream(stream):
                self.small.add_(1)
        rates = self.both_ways()
        assert not over.query(), "the other streams did not wait long enough"
        torch.cuda.synchronize()
        return rates

    def stranger(self, lanes: AcceleratorLanes, nbytes: int, *, takes_turns: bool) -> tuple[float, float]:
        """Milliseconds that a copy of `nbytes` takes beside a full queue, and the GB/s of that queue."""
        torch.cuda.synchronize()
        work = copy_work((self.there, self.host(number)) for number in range(QUEUED))
        if takes_turns:
            start = lanes.stamp(Lane.FETCH)
            lanes.submit(Lane.FETCH, work, after={})
            stop = lanes.stamp(Lane.FETCH)
        else:
            with torch.cuda.stream(self.streams[0]):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run_all(work)
                stop.record()
        with torch.cuda.stream(self.others[0]):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.small[:nbytes].copy_(self.arena.flat[-nbytes:], non_blocking=True)
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), QUEUED * COPY_BYTES / start.elapsed_time(stop) / 1e6


def medians(found: Sequence[Sequence[float]]) -> list[float]:
    return [round(statistics.median(one), 3) for one in zip(*found, strict=True)]


def main() -> None:
    link = Link()
    link.both_ways()
    over_time = [link.both_ways() for _ in range(60)]
    ways = {name: sorted(one) for name, one in zip(("fetch", "store"), zip(*over_time, strict=True), strict=True)}
    write_row(
        "link",
        {
            "case": "over_time",
            "copies": COPIES,
            "gb_per_s": {
                name: {"least": round(one[0], 2), "median": round(statistics.median(one), 2), "most": round(one[-1], 2)}
                for name, one in ways.items()
            },
            "all_gb_per_s": [[round(rate, 1) for rate in one] for one in over_time],
        },
    )
    waiting: dict[int, list[list[float]]] = {number: [] for number in WAITING}
    for _ in range(REPEATS):  # in turns: the rate drifts
        for number, found in waiting.items():
            found.append(link.with_waiting(number))
    write_row(
        "link",
        {
            "case": "waiting_streams",
            "repeats": REPEATS,
            "fetch_and_store_gb_per_s": {number: medians(found) for number, found in waiting.items()},
        },
    )
    lanes = AcceleratorLanes(link.device)
    turns: dict[tuple[int, bool], list[tuple[float, float]]] = {
        (nbytes, takes_turns): [] for nbytes in STRANGERS for takes_turns in (False, True)
    }
    for _ in range(REPEATS):
        for (nbytes, takes_turns), found in turns.items():
            found.append(link.stranger(lanes, nbytes, takes_turns=takes_turns))
    for (nbytes, takes_turns), found in turns.items():
        milliseconds, rate = medians(found)
        write_row(
            "link",
            {
                "case": "turns",
                "takes_turns": takes_turns,
                "queued_gib": round(QUEUED * COPY_BYTES / 2**30, 2),
                "stranger_bytes": nbytes,
                "stranger_ms": milliseconds,
                "lane_gb_per_s": rate,
            },
        )
    lanes.synchronize("measured: nothing is under way")
    link.arena.close()


if __name__ == "__main__":
    main()
