# SPDX-License-Identifier: Apache-2.0
"""`Ranks`: the processes of one save or load. An error on one rank is raised on all, so that none waits for it."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from offstage.errors import CheckpointError
from offstage.memory.cpus import ranks_on_this_host, usable_cpus

_MAX_THREADS = 16


class Ranks:
    """The processes that work on one checkpoint together; a single one if there is no process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, on every rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise lost_ranks(error) from error
        return values

    @contextlib.contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """Ranks leave the block together: an error on any rank is raised on all."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:  # Ctrl-C too: the other ranks are about to gather
            error = raised
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failed:
            rank, text = next(iter(failed.items()))
            others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            raise CheckpointError(f"{what} failed on rank {rank}{others}, so on all: {text}")


def lost_ranks(error: RuntimeError) -> CheckpointError:
    """What to raise if a collective raised `error`."""
    return CheckpointError(
        "Expected an answer of all ranks; found that one has ended, or is later than the timeout of the process group "
        f"({type(error).__name__}: {error}). Complete checkpoints are as they were. Start all ranks again; if one is "
        "slow, raise the timeout of init_process_group()."
    )


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long the group's collectives wait: those of host tensors, if it has both kinds.

    torch's default for a group whose backend knows no timeout.
    """
    kinds = sorted(group._device_types, key=lambda kind: kind.type != "cpu")
    options = getattr(group._get_backend(kinds[0]), "options", None)
    found: datetime.timedelta = options._timeout if options is not None else default_pg_timeout
    return found


def host_group() -> dist.ProcessGroup:
    """One more group of all ranks, for host tensors, with the timeout of the default group. Every rank calls it.

    torch would take its own default, of half an hour, and ranks would wait that long for one that was killed.
    """
    assert dist.group.WORLD is not None
    try:
        made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))
    except RuntimeError as error:
        raise lost_ranks(error) from error
    return made


def file_threads() -> int:
    """Threads with which one rank reads or writes files: its share of this host's CPUs."""
    return max(1, min(_MAX_THREADS, usable_cpus() // ranks_on_this_host()))
