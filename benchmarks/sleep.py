# SPDX-License-Identifier: Apache-2.0
"""How long do 30 GiB of weights, gradients and state take to the host and back, against what the link itself does?

    python -m benchmarks.sleep                   every case, under four minutes on one H200
    python -m benchmarks.sleep cycles            these cases, and those they need
    python -m benchmarks.sleep --size small      under a minute on any machine: does every case run?

A stack of linear layers in bf16, with the gradients of a backward. `must` holds what a case has to reach.

link           what pinned copies of 32 MiB on lanes, and of 1 GiB, carry each way when nothing goes the other way
cycles         fp32 masters and moments on the device (`fraction=0`): 20 cycles of `sleep()` and `wake()`; in a row of
               their own (`breakdown`) the first and a 21st by parts, and a 22nd with a forward right behind `wake()`
torch          the same layers with torch's own AdamW, whose state is bf16: half the bytes
to             the same with `model.to("cpu")`, `.to(device)` and the state tensor by tensor, in pageable memory
frozen         weights that are not trained, slept twice; then one of them is changed
need           how much, and what, leaves when another job needs little
memory_saver   torch_memory_saver, in a process of its own if it is installed; otherwise what was published about it

`sleep_s` is the whole call, `wake_s` lasts from the call until the device is idle with everything back, and both rates
are over all bytes parked. `share` is such a rate over the link's, the faster of the two measurements of the same run;
of later cycles it is the median, `least_share` the least. `first_kernel` is the time from the call of `wake()` to the
moment when the first layer's first product may begin, over `wake_s`. `host_peak_ratio` is by how much the process's
largest resident size grew, over the bytes parked. Every bit of every tensor goes into a checksum, which is compared
after each cycle; `trained_on` is whether the gradients that slept, a step and one more iteration give the bits of a run
that never slept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import re
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import offstage
from benchmarks import harness
from benchmarks.common import DEVICE, ON_GPU, Row, clean_up, gib, now, rounded, rss_bytes, share, synchronize
from benchmarks.harness import Case, at_least, at_most
from benchmarks.sleep_training import Size, Training, batches_of, build, checksums, fused, offloaded
from offstage.lanes.lanes import Lane, copy_work, new_log, run_all
from offstage.lanes.link import link_for, measure_one_way
from offstage.lanes.spans import busy_ms
from offstage.memory import pool
from offstage.memory.arena import Arena
from offstage.phases.parking import Lot, Stage
from offstage.phases.report import DeviceReport
from offstage.phases.sleeper import KINDS

RESIDENT: Mapping[str, Any] = {"fraction": 0.0, "master_weights": "fp32"}
STREAMED: Mapping[str, Any] = {"fraction": 0.5, "master_weights": "fp32"}
LEAST_GIB, SHARE_OF_LINK, FIRST_GB_PER_S, HOST_PEAK, FIRST_KERNEL = 30.0, 0.90, 8.0, 1.02, 0.20
GROWTH_BYTES = 64 * 2**20
"""The resident size of any process goes up and down by some."""
TO_S = 20.0
"""No further cycle of `to` begins after this."""
SAVER_BYTES, SAVER_TIMEOUT_S = 2**32, 60
PUBLISHED: Row = {
    "measured": False,
    "published": "github.com/fzyzcjy/torch_memory_saver/issues/111",
    "published_for": "4 GiB, NVIDIA L20, PCIe 4 x16",
    "pause_gib_per_s": 2.41,
    "resume_gib_per_s": 5.32,
    "pinned_copies_gib_per_s": [24.43, 23.54],
}


SIZES = {
    "full": Size(layers=26, width=2560, hidden=6912, heads=20, tokens=2048, cycles=20, few_cycles=3, copy_bytes=2**30),
    "small": Size(layers=2, width=768, hidden=1536, heads=2, tokens=16, cycles=3, few_cycles=2, copy_bytes=2**25),
}
NEEDS = {"cycles": ("link",), "torch": ("link",), "to": ("link",)}
CASES = harness.cases_of(("link", "cycles", "torch", "to", "frozen", "need", "memory_saver"), needs=NEEDS)


# Memory and rates


def device_bytes() -> dict[str, int]:
    """Of torch's allocator, and what the driver has left for any process."""
    if not ON_GPU:
        return {"allocated": 0, "reserved": 0, "driver_free": 0}
    return {
        "allocated": torch.accelerator.memory_allocated(),
        "reserved": torch.accelerator.memory_reserved(),
        "driver_free": int(torch.accelerator.get_memory_info()[0]),
    }


def host_peak_bytes() -> int:
    """The largest resident size of this process so far, or since `forget_host_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def forget_host_peak() -> None:
    """Where the kernel allows it; otherwise the peak is that of the whole process, which is no smaller."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def num_arenas(lot: Lot) -> int:
    pools = {one.range.pool for one in list(lot.parked.values()) if one.range is not None}
    return sum(len(pool.arenas) for pool in pools)


def away_by_kind(lot: Lot) -> dict[str, int]:
    count: Counter[str] = Counter()
    for one in list(lot.parked.values()):
        count[one.kind] += one.nbytes if one.stage is Stage.AWAY else 0
    return {kind: count[kind] for kind in KINDS if count[kind]}


def gb_per_s(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9 if seconds else 0.0


def seconds_of(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def measure_link(size: Size) -> Row:
    """As the library measures it, and with long copies on the caller's stream: the best of a few."""
    device = torch.empty(0, device=DEVICE).device
    link = link_for(device)
    lanes = link.lanes()
    memory = torch.empty(size.copy_bytes, dtype=torch.uint8, device=DEVICE)
    arena = Arena(size.copy_bytes, torch.uint8, device, pin=True)
    found: Row = {}
    for lane, pair in ((Lane.STORE, (arena.flat, memory)), (Lane.FETCH, (memory, arena.flat))):
        times = []
        for _ in range(5):
            synchronize()
            start = now()
            run_all(copy_work([pair]))
            stop = now()
            synchronize()
            times.append(start.elapsed_time(stop))
        link.one_way_gb_per_s(lanes, lane)  # or the first sleep() would measure it
        rates = {"on_lane": measure_one_way(lanes, lane), "long": size.copy_bytes / min(times) / 1e6}
        found |= {f"{lane.value}_gb_per_s": max(rates.values()), f"{lane.value}_gb_per_s_by": rates}
    arena.close()
    return {"case": "link", "long_copy_bytes": size.copy_bytes, **rounded(found)}


# By parts


class Parts:
    """One call of `sleep()` or `wake()`: the caller's time in functions that do not call each other; the lane's."""

    def __init__(self, lot: Lot, lane: Lane) -> None:
        self._lot, self._lane, self._log = lot, lane, new_log()
        self._seconds: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._seconds[name] += time.perf_counter() - started
                self._calls[name] += 1

        return call

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        lanes = self._lot.lanes
        resize = "free" if self._lane is Lane.STORE else "allocate"
        watched: list[tuple[Any, str, str]] = [
            (lanes, "submit", "submit"),
            (lanes, "mark", "mark"),
            (lanes, "wait", "wait on the stream"),
            (lanes, "synchronize", "wait for copies"),
            (lanes, "return_memory", "synchronize, empty_cache"),
            (lanes, "reserve", "take memory of the driver"),
            (lanes, "device_memory", "ask the driver"),
            (pool, "Arena", "make and pin host memory"),
            (torch.UntypedStorage, "resize_", resize),
        ]
        with contextlib.ExitStack() as undone:
            for owner, name, title in watched:
                undone.enter_context(mock.patch.object(owner, name, self._timed(title, getattr(owner, name))))
            lanes.open_log(self._log)
            undone.callback(lanes.close_log, self._log)
            yield

    def row(self, call_s: float, whole_s: float) -> Row:
        """`whole_s`: until the device is idle."""
        host = {name: {"ms": 1e3 * self._seconds[name], "calls": self._calls[name]} for name in self._seconds}
        host["other"] = {"ms": 1e3 * (call_s - sum(self._seconds.values()))}
        spans, elapsed = self._log[self._lane], self._lot.lanes.elapsed_ms
        nbytes, busy = sum(span.nbytes for span in spans), busy_ms(spans, elapsed)
        lasted = elapsed(spans[0].start, spans[-1].stop) if spans else 0.0
        lane = {
            "pieces": len(spans),
            "busy_ms": busy,
            "first_to_last_ms": lasted,
            "outside_ms": 1e3 * whole_s - lasted,
            "busy_gb_per_s": gb_per_s(nbytes, busy / 1e3),
        }
        return rounded({"whole_ms": 1e3 * whole_s, "call_ms": 1e3 * call_s, "host": host, "lane": lane})


# Cycles


@dataclass
class Cycle:
    """One sleep and one wake."""

    report: DeviceReport
    sleep_s: float
    wake_call_s: float
    wake_s: float
    first_kernel_s: float
    first_layer_s: float
    asleep: dict[str, int]
    rss: int
    arenas: int
    same: bool
    parts: Row | None

    def rate(self, name: str) -> float:
        return gb_per_s(self.report.parked_bytes, getattr(self, f"{name}_s"))

    def row(self) -> Row:
        names = ("sleep", "wake", "wake_call", "first_kernel", "first_layer")
        times = {f"{name}_ms": 1e3 * getattr(self, f"{name}_s") for name in names}
        rates = {"sleep_gb_per_s": self.rate("sleep"), "wake_gb_per_s": self.rate("wake")}
        return rounded({**times, **rates, "copies_gb_per_s": self.report.gb_per_s})


def cycle(training: Training, x: torch.Tensor, bits: list[int], *, in_parts: bool = False) -> Cycle:
    leaving, coming = Parts(training.lot, Lane.STORE), Parts(training.lot, Lane.FETCH)
    synchronize()
    with leaving.watched() if in_parts else contextlib.nullcontext():
        started = time.perf_counter()
        report = training.sleep()
        sleep_s = time.perf_counter() - started
    asleep, rss, arenas = device_bytes(), rss_bytes(), num_arenas(training.lot)
    first, begun = training.model[0], []
    synchronize()
    handle = first.qkv.register_forward_pre_hook(lambda *_: begun.append(now()))  # behind the hook that waits
    with coming.watched() if in_parts else contextlib.nullcontext():
        called, started = now(), time.perf_counter()
        waking = training.wake()
        wake_call_s = time.perf_counter() - started
    with torch.no_grad():
        first(x)
    done = now()
    waking.wait()
    synchronize()
    wake_s = time.perf_counter() - started
    handle.remove()
    parts = {"sleep": leaving.row(sleep_s, sleep_s), "wake": coming.row(wake_call_s, wake_s)} if in_parts else None
    first_kernel_s, first_layer_s = (called.elapsed_time(moment) / 1e3 for moment in (begun[0], done))
    times = (sleep_s, wake_call_s, wake_s, first_kernel_s, first_layer_s)
    return Cycle(report, *times, asleep, rss, arenas, training.bits() == bits, parts)


class Slept:
    """Cycles of one training; and another one that never sleeps, which comes first."""

    def __init__(self, size: Size, make: Callable[[nn.Module], Any], link: Row, num_cycles: int) -> None:
        self.link, self.batches = link, batches_of(size)
        never = Training(size, make, self.batches)
        self.expected = never.bits_after_training_on()
        never.close()
        del never
        clean_up()
        self.others = device_bytes()["allocated"]
        """Batches, and what libraries keep on the device once they have been used."""
        self.training = Training(size, make, self.batches)
        self.awake, self.bits = device_bytes(), self.training.bits()
        forget_host_peak()
        before = rss_bytes()
        self.cycles = [self.cycle(in_parts=number == 0) for number in range(num_cycles)]
        self.host_peak = host_peak_bytes() - before

    def cycle(self, *, in_parts: bool) -> Cycle:
        return cycle(self.training, self.batches[0], self.bits, in_parts=in_parts)

    def row(self) -> Row:
        first, *later = self.cycles
        last, parked = self.cycles[-1], first.report.parked_bytes
        ours = [one.asleep["allocated"] - self.others if ON_GPU else 0 for one in self.cycles]
        left = ("still_ours_bytes", "other_bytes", "reserve_bytes", "context_bytes")
        return {
            "parked_bytes": parked,
            "parked_gib": gib(parked),
            "cycles": len(self.cycles),
            "first": first.row(),
            **self._rates(later),
            "last": last.row(),
            "each_sleep_s": seconds_of([one.sleep_s for one in self.cycles]),
            "each_wake_s": seconds_of([one.wake_s for one in self.cycles]),
            "ours_bytes": max(*ours, *(one.report.still_ours_bytes for one in self.cycles)),
            "libraries_bytes": self.others,
            "awake": self.awake,
            "asleep": last.asleep,
            "left_by_report": {name: getattr(last.report, name) for name in left},
            "host_ratio": share(last.report.host_bytes, parked),
            "host_peak_ratio": share(self.host_peak, parked),
            "growth_bytes": {
                "host": last.report.host_bytes - first.report.host_bytes,
                "rss": last.rss - later[0].rss,
                "allocated": last.asleep["allocated"] - first.asleep["allocated"],
                "reserved": last.asleep["reserved"] - first.asleep["reserved"],
            },
            "arenas": last.arenas,
            "new_arenas": last.arenas - first.arenas,
            "same_bits": sum(one.same for one in self.cycles),
        }

    def _rates(self, later: Sequence[Cycle]) -> Row:
        found: Row = {}
        for name, lane in (("sleep", Lane.STORE), ("wake", Lane.FETCH)):
            rates, carried = [one.rate(name) for one in later], self.link[f"{lane.value}_gb_per_s"]
            found[f"link_{lane.value}_gb_per_s"] = carried
            found[f"{name}_gb_per_s"] = statistics.median(rates)
            found[f"{name}_share"] = share(statistics.median(rates), carried)
            found[f"{name}_least_share"] = share(min(rates), carried)
        found["first_kernel"] = max(one.first_kernel_s / one.wake_s for one in later)
        found["first_layer"] = max(one.first_layer_s / one.wake_s for one in later)
        return rounded(found)

    def train_on(self) -> bool:
        return self.training.bits_after_training_on() == self.expected


def must(row: Row) -> Row:
    """On a CPU, which copies to itself, there are no rates and no device memory to ask for."""
    found = {
        "same_bits": at_least(row["cycles"], row["same_bits"]),
        "trained_on": at_least(1, int(row["trained_on"])),
        "ours_bytes": at_most(0, row["ours_bytes"]),
        "new_arenas": at_most(0, row["new_arenas"]),
        "host_ratio": at_most(HOST_PEAK, row["host_ratio"]),
    }
    if not ON_GPU:
        return found
    for name in ("sleep", "wake"):
        found[f"first_{name}_gb_per_s"] = at_least(FIRST_GB_PER_S, row["first"][f"{name}_gb_per_s"])
        for field in (f"{name}_share", f"{name}_least_share"):
            found[field] = at_least(SHARE_OF_LINK, row[field])
    for name, grown in row["growth_bytes"].items():
        found[f"{name}_growth"] = at_most(GROWTH_BYTES if name == "rss" else 0, grown)
    returned = share(row["awake"]["reserved"] - row["asleep"]["reserved"], row["parked_bytes"])
    return found | {
        "returned": at_least(1.0, returned),
        "first_kernel": at_most(FIRST_KERNEL, row["first_kernel"]),
        "host_peak_ratio": at_most(HOST_PEAK, row["host_peak_ratio"]),
    }


def measure_cycles(size: Size, done: Mapping[str, Row]) -> Iterator[Row]:
    slept = Slept(size, offloaded(RESIDENT), done["link"], size.cycles)
    row = {"case": "cycles", "optimizer": "offstage, fraction=0", **slept.row()}
    row["trained_on"] = slept.train_on()
    enough = {"parked_gib": at_least(LEAST_GIB, row["parked_gib"])} if ON_GPU else {}
    yield row | {"must": must(row) | enough}
    slept.training.backward()  # the step took the gradients
    slept.bits = slept.training.bits()
    later = slept.cycle(in_parts=True)
    parts = {"first": slept.cycles[0].parts, "later": later.parts, "same_bits": later.same}
    yield {"case": "breakdown", **parts, "forward_behind_wake": forward_behind_wake(slept)}
    slept.training.close()


def forward_behind_wake(slept: Slept) -> Row:
    """A whole forward that begins at once: when it ends, beside when everything is back."""
    slept.training.sleep()
    synchronize()
    called, started = now(), time.perf_counter()
    waking = slept.training.wake()
    with torch.no_grad():
        slept.training.model(slept.batches[0])
    done, submitted_s = now(), time.perf_counter() - started
    waking.wait()
    synchronize()
    wake_s, ended_ms = time.perf_counter() - started, called.elapsed_time(done)
    found = {"submitted_ms": 1e3 * submitted_s, "ended_ms": ended_ms, "wake_ms": 1e3 * wake_s}
    return rounded({**found, "ended_over_wake": ended_ms / 1e3 / wake_s})


def measure_torch(size: Size, done: Mapping[str, Row]) -> Row:
    slept = Slept(size, fused, done["link"], size.few_cycles)
    row = {"case": "torch", "optimizer": "torch.optim.AdamW(fused=True)", **slept.row()}
    row["trained_on"] = slept.train_on()
    return row | {"must": must(row)}


# What others do


def measure_to(size: Size, done: Mapping[str, Row]) -> Row:
    """What most loops do: `.to()` for the model, which takes its gradients along, and each tensor of the state."""
    training = Training(size, fused)
    bits, parked = training.bits(), sum(tensor.nbytes for tensor in training.tensors())
    before = rss_bytes()

    def move(device: torch.device) -> float:
        synchronize()
        started = time.perf_counter()
        training.model.to(device)
        for values in training.optimizer.state.values():
            values |= {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        if ON_GPU and device.type == "cpu":
            torch.accelerator.empty_cache()
        synchronize()
        return time.perf_counter() - started

    began, there, back, grown = time.perf_counter(), [], [], 0
    while len(there) < size.few_cycles and (not there or time.perf_counter() - began < TO_S):
        there.append(move(torch.device("cpu")))
        grown = max(grown, rss_bytes() - before)
        back.append(move(DEVICE))
    row: Row = {"case": "to", "optimizer": "torch.optim.AdamW(fused=True)", "parked_gib": gib(parked)}
    row |= {"cycles": len(there), "each_sleep_s": seconds_of(there), "each_wake_s": seconds_of(back)}
    for name, lane, times in (("sleep", Lane.STORE, there), ("wake", Lane.FETCH, back)):
        rate = gb_per_s(parked, statistics.median(times))
        row |= {f"{name}_gb_per_s": rounded(rate), f"{name}_share": share(rate, done["link"][f"{lane.value}_gb_per_s"])}
        row[f"{name}_times_slower"] = share(done.get("torch", {}).get(f"{name}_gb_per_s", 0.0), rate)
    return row | {"host_ratio": share(grown, parked), "same_bits": training.bits() == bits}


def measure_memory_saver(size_name: str) -> Row:
    clean_up()
    if not ON_GPU or importlib.util.find_spec("torch_memory_saver") is None:
        return {"case": "memory_saver", **PUBLISHED}
    arguments = ["--size", size_name]
    found = harness.in_own_process("memory_saver", arguments, variables={}, timeout_s=SAVER_TIMEOUT_S)
    return {"case": "memory_saver", **({**PUBLISHED, "did_not_run": found["error"]} if "error" in found else found)}


def memory_saver() -> Row:
    """In the case's own process: pause and resume with a copy on the host."""
    from torch_memory_saver import torch_memory_saver as saver  # type: ignore[import-not-found]

    saver.hook_mode = "torch"
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensors = [torch.full((SAVER_BYTES // 16,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(16)]
    bits, same, each = checksums(tensors), 0, {"pause": [], "resume": []}
    for _ in range(3):
        for name, times in each.items():
            synchronize()
            started = time.perf_counter()
            getattr(saver, name)()
            synchronize()
            times.append(time.perf_counter() - started)
        same += checksums(tensors) == bits
    row: Row = {"measured": True, "parked_gib": gib(SAVER_BYTES), "cycles": 3, "same_bits": same}
    for name, times in each.items():
        row |= {f"{name}_gb_per_s": rounded(gb_per_s(SAVER_BYTES, statistics.median(times)))}
        row |= {f"each_{name}_s": seconds_of(times)}
    return row


# What does not have to leave


def measure_frozen(size: Size) -> Row:
    """All but the norms is frozen. In the third cycle one weight is not what it was."""
    model = build(size)
    params = list(model.parameters())
    for param in params:
        param.requires_grad_(param.dim() == 1)
    trained = sum(param.nbytes for param in params if param.requires_grad)
    frozen = sum(param.nbytes for param in params) - trained
    changed = params[-1] if not params[-1].requires_grad else params[1]
    rows, same = [], 0
    for number in range(3):
        if number == 2:
            changed.data.neg_()
        bits = checksums(params)
        synchronize()
        started = time.perf_counter()
        report = offstage.sleep(model).devices[0]
        seconds = time.perf_counter() - started
        rows.append({"sleep_ms": rounded(1e3 * seconds), "frozen_copied_bytes": report.copied_bytes - trained})
        offstage.wake(model).wait()
        same += checksums(params) == bits
    copied = [row["frozen_copied_bytes"] for row in rows]
    about = {"frozen_bytes": frozen, "trained_bytes": trained, "changed_bytes": changed.nbytes}
    asked = {
        "first_copies_all": at_least(frozen, copied[0]),
        "second_copies_none": at_most(0, copied[1]),
        "changed_is_copied": at_least(changed.nbytes, copied[2]),
        "no_other_is": at_most(changed.nbytes, copied[2]),
        "same_bits": at_least(3, same),
    }
    return {"case": "frozen", **about, "first": rows[0], "second": rows[1], "changed": rows[2], "must": asked}


def measure_need(size: Size) -> Row:
    """Half of the state streams, so that there are slots. Each time from a state in which all is on the device."""
    config = {**STREAMED, **({} if ON_GPU else {"chunk_bytes": "1MiB"})}
    training = Training(replace(size, layers=max(2, size.layers // 4)), offloaded(config))
    whole = training.sleep()
    there = {"slots": whole.freed_bytes, **away_by_kind(training.lot)}
    training.wake().wait()
    rows: Row = {}
    for name in ("nothing", *there):
        training.step()  # slots are made again
        training.backward()
        bits = training.bits()
        training.lot.lanes.return_memory()
        need = device_bytes()["driver_free"]
        before = list(itertools.takewhile(lambda kind, name=name: kind != name, there)) if name in there else []
        need += sum(there[kind] for kind in before) + there.get(name, 0) // 2
        need = need // 2 if name == "nothing" else need
        report = training.sleep(need=need)
        room = device_bytes()["driver_free"] if ON_GPU else report.parked_bytes + report.freed_bytes
        away = {"slots": report.freed_bytes, **away_by_kind(training.lot)}
        training.wake().wait()
        is_fine = {kind: nbytes for kind, nbytes in away.items() if nbytes and kind != name} == {
            kind: there[kind] for kind in before if there[kind]
        }
        rows[name] = {"need": need, "room": room, "away": away, "is_enough": room >= need, "is_cheapest": is_fine}
        rows[name]["same_bits"] = training.bits() == bits
    training.close()
    left = sum(rows["nothing"]["away"].values())
    right = [row["is_enough"] and row["is_cheapest"] and row["same_bits"] for row in rows.values()]
    asked = {"nothing_when_it_fits": at_most(0, left), "cheapest_first": at_least(len(rows), sum(right))}
    return {"case": "need", "there": there, "needs": rows, "must": asked}


# The rows


def measure(case: Case, options: argparse.Namespace, done: Mapping[str, Row]) -> Iterator[Row]:
    size = SIZES[options.size]
    measures: dict[str, Callable[[], Row | Iterator[Row]]] = {
        "link": lambda: measure_link(size),
        "cycles": lambda: measure_cycles(size, done),
        "torch": lambda: measure_torch(size, done),
        "to": lambda: measure_to(size, done),
        "frozen": lambda: measure_frozen(size),
        "need": lambda: measure_need(size),
        "memory_saver": lambda: measure_memory_saver(options.size),
    }
    found = measures[case.name]()
    yield from [found] if isinstance(found, dict) else found


def main() -> None:
    options = harness.parse(harness.command(__doc__), CASES)
    if options.result:
        harness.report(options.result, memory_saver)
    done: dict[str, Row] = {}
    failed: list[str] = []

    def measured(case: Case) -> Iterator[Row]:
        clean_up()
        begun = time.perf_counter()
        try:
            for row in measure(case, options, done):
                done[row["case"]] = row
                yield row | {"case_s": round(time.perf_counter() - begun, 1)}
        except Exception as error:  # a row says what failed; where the files are is for the terminal
            traceback.print_exc()
            failed.append(case.name)
            yield {"case": case.name, "error": f"{type(error).__name__}: {error}"}

    harness.run("sleep", options.cases, measured, failed=failed)
    clean_up()


if __name__ == "__main__":
    main()
