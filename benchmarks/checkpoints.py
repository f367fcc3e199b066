# SPDX-License-Identifier: Apache-2.0
"""How long do 30 GiB of state take to the disk and back, against what the disk itself does?

    python -m benchmarks.checkpoints                 every case, about six minutes on one H200
    python -m benchmarks.checkpoints save load       these cases, and those they need
    python -m benchmarks.checkpoints --size small    a few seconds on any machine: does every case run?

The 2.70B workload with bf16 weights, fp32 masters and moments on the host: 12 bytes of state and 2 of weight per
parameter, saved by one process. The disk's own rates are measured first, in the same run, with plain writes and reads
in as many threads; `ratio_to_disk` is a case's rate over the disk's. Before anything is read it is dropped from the
page cache; `cached_share` is how much stayed there all the same, and a read was `cold` if that is next to nothing.

Every load begins with state that a step has changed, and ends with a comparison of all weights and state with what was
there when the checkpoint was saved: `restored`. `host_growth_gib` is by how much the process's own memory grew.
`async_save` trains on for 20 iterations at least; those that began before the save was over are `beside` it. Then, and
in `dcp`, the checkpoint is `loaded` again. Checkpoints go to $OFFSTAGE_SCRATCH, or to the system's folder for temporary
files, one at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import offstage
import offstage.checkpoint
from benchmarks import harness, workload
from benchmarks.common import Row, gib, peak_bytes, reset_peak, synchronize
from benchmarks.harness import Case, at_most
from benchmarks.workload import SIZES, build

CONFIG: Mapping[str, Any] = {"master_weights": "fp32"}  # 12 bytes of state for each parameter
THREADS = 16
BLOCK = 16 * 2**20
COLD = 0.02
"""Share of a folder that may still be in the page cache when it is read from the disk."""
DISK_GIB = {"full": 16.0, "small": 0.0625}
WARM_UP = 2
BEFORE = 5
"""Iterations that those beside a save are compared with."""
BESIDE = 20
"""Iterations that training goes on for at least, whether the save is over or not."""
TOO_LONG_S = 400.0
SCRATCH = "OFFSTAGE_SCRATCH"

# The disk


def timed(work: Callable[[], object]) -> float:
    """Seconds from an idle device to an idle device."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def in_threads(work: Callable[[Path], None], paths: Iterable[Path]) -> float:
    """Seconds until `work` is done for all of them, each in a thread of its own."""
    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, paths))
    return time.perf_counter() - start


def disk_rates(folder: Path, num_bytes: int) -> Row:
    """GB/s of plain writes that have reached the disk, of reads from it, and of reads from the page cache."""
    blocks = max(1, num_bytes // THREADS // BLOCK)
    data = os.urandom(BLOCK)  # a disk may do less for zeros

    def write(path: Path) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for _ in range(blocks):
                written = 0
                while written < BLOCK:
                    written += os.write(handle, memoryview(data)[written:])
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(path: Path) -> None:
        buffer = bytearray(BLOCK)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    folder.mkdir()
    paths = [folder / f"{number}.bin" for number in range(THREADS)]
    total = THREADS * blocks * BLOCK
    write_s = in_threads(write, paths)
    cached = drop_from_cache(folder)
    cold_s, warm_s = in_threads(read, paths), in_threads(read, paths)
    shutil.rmtree(folder)
    return {
        "bytes": total,
        "filesystem": filesystem_of(folder.parent),
        "write_gb_per_s": rate(total, write_s),
        "read_gb_per_s": rate(total, cold_s),
        "cached_share": cached,
        "cold": cached < COLD,
        "read_cached_gb_per_s": rate(total, warm_s),
    }


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def drop_from_cache(folder: Path) -> float:
    """Ask the system to forget what it has read or written of these files; the share of their bytes that it kept."""

    def drop(path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # pages that are not on the disk yet cannot go
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    paths = files_of(folder)
    in_threads(drop, paths)
    pages = [cached_pages(path) for path in paths if path.stat().st_size]
    return round(sum(there for there, _ in pages) / max(1, sum(of for _, of in pages)), 4)


def cached_pages(path: Path) -> tuple[int, int]:
    """Pages of the file in the page cache, and pages in all."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        there = np.zeros(-(-view.size // mmap.PAGESIZE), dtype=np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size), ctypes.c_void_p(there.ctypes.data))
        del view  # or the mapping could not be closed
        if libc.mincore(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return int((there & 1).sum()), there.size


def filesystem_of(folder: Path) -> str:
    """The type of the file system that `folder` is on."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    there = [(Path(fields[1]), fields[2]) for fields in mounts]
    above = [(len(point.parts), kind) for point, kind in there if folder.resolve().is_relative_to(point)]
    return max(above, key=lambda one: one[0])[1] if above else "unknown"


def rate(num_bytes: int, seconds: float) -> float:
    """GB/s."""
    return round(num_bytes / seconds / 1e9, 3)


# Memory


class Growth:
    """By how much the process's own memory grows at most; mapped files do not count. Looks every few milliseconds."""

    def __init__(self) -> None:
        self.num_bytes: int | None = None

    def __enter__(self) -> Growth:
        self._before = self._most = _anonymous_bytes()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="memory-watcher")
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
        if self._before is not None and self._most is not None:
            self.num_bytes = self._most - self._before

    def _watch(self) -> None:
        while self._most is not None:
            self._most = max(self._most, _anonymous_bytes() or 0)
            if self._over.wait(0.005):
                return


def _anonymous_bytes() -> int | None:
    """`None` where the kernel does not say."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), None)


# Training


class Training(workload.Training):
    """The workload, and what its state is."""

    def __init__(self, size_name: str) -> None:
        model = build(SIZES[size_name])
        super().__init__(model, workload.offloaded(model, size_name, CONFIG), SIZES[size_name])

    @property
    def iterations(self) -> int:
        return len(self.losses)

    def lap(self) -> float:
        """Milliseconds of an iteration that begins and ends with an idle device."""
        return 1e3 * timed(self.iterate)

    def checksums(self) -> dict[str, int]:
        """Of the bytes of every weight and every state tensor, step counts included."""
        tensors = {name: param.detach().cpu() for name, param in self.model.named_parameters()}
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{name}": torch.as_tensor(value).cpu() for name, value in values.items()}
        with ThreadPoolExecutor(THREADS) as pool:
            return dict(zip(tensors, pool.map(_checksum, tensors.values()), strict=True))


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy())


# The cases


class Bench:
    """One training job, one checkpoint at a time, and what was measured so far."""

    def __init__(self, size_name: str, disk_gib: float, scratch: Path) -> None:
        self._disk_bytes = int(disk_gib * 2**30)
        self._scratch, self._folder = scratch, scratch / "checkpoint"
        self._rates: Row = {}
        self._saved: dict[str, int] = {}
        self._saved_iterations = 0
        self.training = Training(size_name)
        reset_peak()
        for _ in range(WARM_UP):
            self.training.lap()
        self._training_peak = peak_bytes()
        self._state_bytes = self.training.optimizer.receipt().host_state_bytes
        self._weight_bytes = sum(param.nbytes for param in self.training.model.parameters())
        self._check_room()

    def _check_room(self) -> None:
        needed = int(max(1.05 * (self._state_bytes + self._weight_bytes), self._disk_bytes))
        free = shutil.disk_usage(self._scratch).free
        if free < needed:
            raise SystemExit(
                f"The largest case needs {gib(needed)} GiB of disk; found {gib(free)} GiB in {self._scratch}. Set "
                f"{SCRATCH} to a folder on a larger disk."
            )

    def about(self) -> Row:
        """What every row says of the job."""
        return {
            "params": sum(param.numel() for param in self.training.model.parameters()),
            "config": dict(CONFIG),
            "state_gib": gib(self._state_bytes),
            "weights_gib": gib(self._weight_bytes),
        }

    def disk(self) -> Row:
        self._rates = disk_rates(self._scratch / "disk", self._disk_bytes)
        return self._rates

    # Ours

    def save(self) -> Row:
        self._start_checkpoint()
        with Growth() as growth:
            seconds = timed(lambda: self._call(offstage.checkpoint.save))
        return self._written(seconds) | {"host_growth_gib": _gib(growth.num_bytes)}

    def load(self) -> Row:
        return self._read(self._load)

    def load_unverified(self) -> Row:
        return self._read(lambda: self._load(checksums=False))

    def async_save(self) -> Row:
        training = self.training
        before = [training.lap() for _ in range(BEFORE)]
        self._start_checkpoint()
        start = time.perf_counter()
        save: offstage.checkpoint.AsyncSave = self._call(offstage.checkpoint.async_save)
        returned_s = time.perf_counter() - start
        ended = threading.Thread(target=_wait_for, args=(save, ends := [start + TOO_LONG_S]), name="save-watcher")
        ended.start()
        spans: list[tuple[float, float]] = []
        while len(spans) < BESIDE or (not save.done() and time.perf_counter() < start + TOO_LONG_S):
            began = time.perf_counter()
            spans.append((began, training.lap()))
        save.result(timeout=TOO_LONG_S)
        ended.join()
        beside = [milliseconds for began, milliseconds in spans if began < ends[0]]
        after = [milliseconds for began, milliseconds in spans if began >= ends[0]]
        usual = statistics.mean(before)
        return {
            "returned_s": round(returned_s, 3),
            **self._written(ends[0] - start),
            "iteration_ms_before": round(usual, 1),
            "iterations_beside": len(beside),
            "iteration_ms_beside": round(statistics.mean(beside), 1) if beside else None,
            "worst_ms_beside": round(max(beside), 1) if beside else None,
            "slowdown": round(statistics.mean(beside) / usual, 3) if beside else None,
            "worst_slowdown": round(max(beside) / usual, 3) if beside else None,
            "times_ms_beside": [round(milliseconds, 1) for milliseconds in beside],
            "iteration_ms_after": round(statistics.mean(after), 1) if after else None,
            "iterations": len(spans),
            "extra_gib": gib(save.extra_bytes),
            "extra_over_state": round(save.extra_bytes / self._state_bytes, 4),
            "extra_over_saved": round(save.extra_bytes / (self._state_bytes + self._weight_bytes), 4),
            "loaded": self._read(self._load),
            "must": {"extra_gib": at_most(gib(self._state_bytes), gib(save.extra_bytes))},
        }

    def _start_checkpoint(self) -> None:
        """Room for a new one, and a note of what it has to hold."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._saved, self._saved_iterations = self.training.checksums(), self.training.iterations

    def _call(self, save: Callable[..., Any]) -> Any:
        extra = {"iterations": self.training.iterations}
        return save(self._folder, self.training.model, self.training.optimizer, extra=extra)

    def _load(self, *, checksums: bool = True) -> int:
        training = self.training
        extra = offstage.checkpoint.load(self._folder, training.model, training.optimizer, checksums=checksums)
        return int(extra["iterations"])

    # Stock

    def dcp(self) -> Row:
        """`torch.distributed.checkpoint` on the state dicts of the same model and optimizer."""
        self._start_checkpoint()
        writer = dcp.FileSystemWriter(self._folder, thread_count=THREADS)
        with Growth() as growth:
            seconds = timed(lambda: dcp.save(self._state_dicts(), storage_writer=writer, no_dist=True))
        written = self._written(seconds) | {"host_growth_gib": _gib(growth.num_bytes)}
        return written | {"loaded": self._read(self._dcp_load)}

    def _dcp_load(self) -> int:
        training, state = self.training, self._state_dicts()
        dcp.load(state, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        set_model_state_dict(training.model, state["model"])
        set_optimizer_state_dict(training.model, training.optimizer, state["optim"])
        return state["iterations"]  # type: ignore[no-any-return]

    def _state_dicts(self) -> dict[str, Any]:
        training = self.training
        return {
            "model": get_model_state_dict(training.model),
            "optim": get_optimizer_state_dict(training.model, training.optimizer),
            "iterations": training.iterations,
        }

    # Rows

    def _written(self, seconds: float) -> Row:
        return self._against("write_gb_per_s", seconds)

    def _read(self, load: Callable[[], int]) -> Row:
        """Load after a step that changed everything, from a disk whose files are not in the page cache."""
        self.training.lap()
        cached = drop_from_cache(self._folder)
        iterations = 0

        def run() -> None:
            nonlocal iterations
            iterations = load()

        reset_peak()
        with Growth() as growth:
            seconds = timed(run)
        peak = peak_bytes()
        restored = iterations == self._saved_iterations and self.training.checksums() == self._saved
        return {
            **self._against("read_gb_per_s", seconds),
            "cached_share": cached,
            "cold": cached < COLD,
            "restored": restored,
            "peak_gib": gib(peak),
            "training_peak_gib": gib(self._training_peak),
            "host_growth_gib": _gib(growth.num_bytes),
            "must": {
                "restored": {"found": restored, "met": restored},
                "peak_gib": at_most(gib(self._training_peak), gib(peak)),
            },
        }

    def _against(self, disk: str, seconds: float) -> Row:
        num_bytes = sum(path.stat().st_size for path in files_of(self._folder))
        found, limit = rate(num_bytes, seconds), self._rates[disk]
        return {
            "seconds": round(seconds, 3),
            "bytes": num_bytes,
            "gb_per_s": found,
            "disk_gb_per_s": limit,
            "ratio_to_disk": round(found / limit, 4),
        }


def _wait_for(save: offstage.checkpoint.AsyncSave, ends: list[float]) -> None:
    """Note when `save` is over. `result()` waits for copies too, which only the thread that trains may do."""
    while not save.done() and time.perf_counter() < ends[0]:
        time.sleep(0.005)
    ends[0] = time.perf_counter()


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else gib(num_bytes)


CASES: dict[str, tuple[Callable[[Bench], Row], tuple[str, ...]]] = {
    "disk": (Bench.disk, ()),
    "save": (Bench.save, ("disk",)),
    "load": (Bench.load, ("disk", "save")),
    "load_unverified": (Bench.load_unverified, ("disk", "save")),
    "async_save": (Bench.async_save, ("disk",)),
    "dcp": (Bench.dcp, ("disk",)),
}
"""What is measured, in this order, and what has to be measured before it."""


# The command


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--disk-gib", type=float, help="how much is written and read to measure the disk itself")
    options = harness.parse(parser, harness.cases_of(CASES, needs={name: needs for name, (_, needs) in CASES.items()}))
    with tempfile.TemporaryDirectory(prefix="offstage-", dir=os.environ.get(SCRATCH)) as scratch:
        bench = Bench(options.size, options.disk_gib or DISK_GIB[options.size], Path(scratch))
        failed: list[str] = []

        def measure(case: Case) -> Row:
            row = CASES[case.name][0](bench)
            failed.extend([case.name] if not row.get("loaded", row).get("restored", True) else [])
            return {"case": case.name, "size": options.size, **bench.about(), **row}

        try:
            harness.run("checkpoints", options.cases, measure, failed=failed)
        finally:
            bench.training.close()


if __name__ == "__main__":
    main()
