# SPDX-License-Identifier: Apache-2.0
"""`save` and `async_save`: a checkpoint folder that is complete or recognisably incomplete.

The data files are written first, then `.metadata`, and last a manifest with the checksums of all of them, renamed into
place: a process killed on the way leaves a folder without a manifest. See docs/state_dict.md for the format.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from offstage.checkpoint.catalogue import (
    Catalogue,
    CountingStaging,
    SnapshotStaging,
    Staging,
    catalogue_of,
    checked_optimizer,
    synchronize_devices,
    turn_of,
)
from offstage.checkpoint.claim import FolderClaim, file_errors
from offstage.checkpoint.fused import Splitter, by_metadata
from offstage.checkpoint.manifest import (
    MARKER,
    METADATA,
    FileSum,
    checked_folder,
    sum_of,
    sync_file,
    sync_folder,
    write_manifest,
)
from offstage.checkpoint.ranks import Ranks, file_threads, host_group, lost_ranks
from offstage.checkpoint.writer import Planner, Writer
from offstage.config import format_size
from offstage.engine.snapshot import Snapshot
from offstage.errors import CheckpointError, HostMemoryError, OffstageError
from offstage.memory.arena import check_host_memory
from offstage.memory.claims import Claim
from offstage.memory.interrupts import deferred_interrupts
from offstage.memory.threads import Latch
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of

logger = logging.getLogger("offstage")
_last: AsyncSave | None = None
_background: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""Default process group → a second group of the same ranks, for saves that run beside training's collectives."""


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    splitter: Splitter = by_metadata,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save `model`, `optimizer` and `extra` to `folder`, which is complete when this returns. Every rank calls it.

    `extra` is nested dicts of tensors and of objects that `torch.load(weights_only=True)` can load; values that differ
    between ranks need different keys. `splitter` decides which parameters are saved under split names (`split_as`).
    """
    ranks = Ranks(group)
    with contextlib.ExitStack() as until_written:
        until_written.enter_context(turn_of(optimizer))
        with ranks.failing_together("Preparing the checkpoint"):
            path = checked_folder(folder)
            offloaded = _drained(optimizer)
            catalogue = catalogue_of(model, offloaded, extra or {}, splitter, Staging())
            synchronize_devices(model)
            claim = until_written.enter_context(FolderClaim(path, first=ranks.rank == 0))
        _write(path, catalogue, ranks, claim)


class AsyncSave:
    """A save in the background. `result()` waits for it and raises its error, if there was one."""

    def __init__(self) -> None:
        self.folder = Path()
        self._over = Latch()
        self._error: BaseException | None = None
        self._snapshots: dict[int, Snapshot] = {}
        self._staging: SnapshotStaging | None = None
        self._catalogue: Catalogue | None = None
        self._claim: FolderClaim | None = None
        self._room = Claim(0)
        self._until_over = contextlib.ExitStack()
        self._extra_bytes = 0

    @property
    def extra_bytes(self) -> int:
        """Peak host memory of the save beyond the state itself so far: copies of weights and of chunks."""
        staged = self._staging.nbytes if self._staging is not None else 0
        return max(self._extra_bytes, staged + sum(one.copied_bytes for one in self._snapshots.values()))

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._over.is_set

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save has ended, successfully or not."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"The save to {self.folder} is not over after {timeout} s.")

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete; raise the error of the save, if there was one."""
        self.wait(timeout)
        if self._error is not None:
            raise self._error

    def _prepare(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        splitter: Splitter,
        ranks: Ranks,
    ) -> None:
        """Copy the state of this moment, or register it with snapshots."""
        self.folder = checked_folder(folder)
        offloaded = _drained(optimizer)
        count = CountingStaging()
        catalogue_of(model, offloaded, extra, splitter, count)
        self._room = _check_host_memory(offloaded, sum(count.needed.values()))
        if offloaded is not None:
            self._snapshots = runtime_of(offloaded).take_snapshots()
        pin = offloaded is None or offloaded.config.pin_memory
        self._staging = SnapshotStaging(self._snapshots, count.needed, pin=pin)
        self._catalogue = catalogue_of(model, offloaded, extra, splitter, self._staging)
        self._staging.settle()
        self._claim = self._until_over.enter_context(FolderClaim(self.folder, first=ranks.rank == 0))

    def _start(self, ranks: Ranks) -> None:
        """Start the thread that writes. Other ranks have begun: without a thread, the caller's writes."""
        try:
            threading.Thread(target=self._run, args=(ranks,), name="offstage-save", daemon=False).start()
        except RuntimeError as error:
            logger.warning("%s: training waits for this save: %s", self.folder, error)
            self._run(ranks)

    def _run(self, ranks: Ranks) -> None:
        assert self._catalogue is not None
        assert self._claim is not None
        try:
            with _while_grouped(self.folder, ranks):
                _write(self.folder, self._catalogue, ranks, self._claim)
        except BaseException as error:
            logger.error("the save to %s failed:\n%s", self.folder, "".join(traceback.format_exception(error)))
            _forget_frames(error)
            self._error = error
        finally:
            self._end()

    def _end(self) -> None:
        """Release everything that the save needed, and report its end."""
        global _last
        _last = None
        self._extra_bytes = self.extra_bytes
        for snapshot in self._snapshots.values():
            snapshot.close()
        if self._staging is not None:
            self._staging.close()
        self._snapshots, self._staging, self._catalogue = {}, None, None
        self._until_over.close()
        self._room.release()
        self._over.set()


def async_save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    splitter: Splitter = by_metadata,
) -> AsyncSave:
    """Save the state of this moment in the background. Every rank calls it.

    Weights and resident state are copied now. State on the host is read while training continues; chunks that an update
    is about to overwrite are copied first. The copies take at most as much memory as everything saved, weights
    included, which `host_budget` must allow. A second save waits until the first has ended.
    """
    global _last
    if (previous := _last) is not None:
        previous.wait()  # both would use the same process group
    ranks = Ranks(_background_group())
    started = AsyncSave()
    try:
        with turn_of(optimizer), ranks.failing_together("Preparing the checkpoint"):
            started._prepare(folder, model, optimizer, extra or {}, splitter, ranks)
    except BaseException:
        started._end()
        raise
    with deferred_interrupts():  # a thread whose start was interrupted may run or not
        _last = started
        started._start(ranks)
    return started


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks, whose frames would keep the state alive as long as the error."""
    if error is not None:
        error.__traceback__ = None
        _forget_frames(error.__cause__)
        _forget_frames(error.__context__ if error.__context__ is not error.__cause__ else None)


def _check_host_memory(optimizer: OffloadedOptimizer | None, copies: int) -> Claim:
    """Raise if the host cannot hold `copies` bytes and a second copy of the state, beside what training takes."""
    runtime = runtime_of(optimizer) if optimizer is not None else None
    state = sum(engine.transport.host_bytes for engine in runtime.engines) if runtime is not None else 0
    budget = optimizer.config.host_budget if optimizer is not None else None
    try:
        return check_host_memory(
            copies + state,
            None if budget is None else int(budget),
            already_bytes=state,
            beside=runtime.places.still_to_take() if runtime is not None else None,
            what="async_save()",
            remedy="Free host memory.",
        )
    except HostMemoryError as error:
        raise HostMemoryError(
            f"async_save() copies {format_size(copies)} now and may copy all {format_size(state)} of state on the host "
            f"while training continues: {format_size(copies + 2 * state)} with the state itself. {error} Or use "
            "save(), which copies nothing."
        ) from error


@contextlib.contextmanager
def _while_grouped(folder: Path, ranks: Ranks) -> Iterator[None]:
    """If the process group is destroyed during the save, raise an error that says so, and release the other ranks."""
    try:
        yield
    except Exception as error:
        if ranks.alone or dist.is_initialized():
            raise
        _background.clear()  # the other ranks wait while this rank keeps its connection open
        raise CheckpointError(
            f"{folder}: the process group was destroyed before the save was complete. Expected it to stay until then. "
            "The folder is incomplete and will not be loaded. Wait first: result() of what async_save() returned."
        ) from error


def _background_group() -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        return None
    default = dist.group.WORLD
    if default not in _background:
        _background[default] = host_group()
    return _background[default]


def _drained(optimizer: torch.optim.Optimizer | None) -> OffloadedOptimizer | None:
    """`checked_optimizer`, with no step lost and all of its state stored."""
    offloaded = checked_optimizer(optimizer)
    if offloaded is not None:
        runtime_of(offloaded).check_not_lost()
        runtime_of(offloaded).drain_state()
    return offloaded


def _write(folder: Path, catalogue: Catalogue, ranks: Ranks, claim: FolderClaim) -> None:
    started = time.time()
    writer, planner = Writer(folder, file_threads()), Planner(catalogue, ranks.size)
    try:
        if ranks.alone:
            _write_alone(writer, planner)
        else:
            dcp_save({}, storage_writer=writer, planner=planner, process_group=ranks.group)
    except RuntimeError as error:  # of a collective
        if isinstance(error, OffstageError):
            raise
        raise lost_ranks(error) from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if any(isinstance(failure, KeyboardInterrupt) for failure, _ in error.failures.values()):
            raise KeyboardInterrupt from error
        raise CheckpointError(
            f"{folder}: the checkpoint could not be written; rank {rank}: {type(cause).__name__}: {cause}. The folder "
            "is incomplete and will not be loaded; checkpoints saved before are as they were. Mend the cause and save "
            "again."
        ) from cause
    sums = ranks.gather(writer.sums)
    with ranks.failing_together("Completing the checkpoint"), file_errors(folder):
        if ranks.rank == 0:
            files = {name: one for each in sums for name, one in each.items()}
            for name in (METADATA, MARKER):  # torch does not synchronise the first
                sync_file(folder / name)
            sync_folder(folder.parent)
            files |= {name: sum_of(folder / name) for name in (METADATA, MARKER)}
            _check_shared(folder, files)
            about = {"ranks": ranks.size, "torch": torch.__version__, "seconds": round(time.time() - started, 3)}
            claim.check()
            write_manifest(folder, files, about=about)


def _check_shared(folder: Path, files: Mapping[str, FileSum]) -> None:
    """Raise if files of other ranks are missing here: without a shared folder no rank has the whole checkpoint."""
    for name, expected in files.items():
        path = folder / name
        if not path.exists() or path.stat().st_size != expected.nbytes:
            raise CheckpointError(
                f"{path} was written by another rank and is not here; expected all ranks to write to one folder. Use a "
                "file system that all of them share."
            )


def _write_alone(writer: Writer, planner: Planner) -> None:
    """The steps of `torch.distributed.checkpoint` for a single process without a process group."""
    try:
        writer.set_up_storage_writer(True)
        planner.set_up_planner({}, is_coordinator=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        results = writer.write_data(plan, planner).wait()
        writer.finish(metadata, [results])
    except Exception as error:
        raise CheckpointException("one process", {0: (error, traceback.extract_stack())}) from error
