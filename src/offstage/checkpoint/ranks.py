# SPDX-License-Identifier: Apache-2.0
"""`Ranks`: the processes of one save or load. An error on one rank is raised on all, so that none waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

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
        dist.all_gather_object(values, value, group=self.group)
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


def file_threads() -> int:
    """Threads with which one rank reads or writes files: its share of this host's CPUs."""
    return max(1, min(_MAX_THREADS, usable_cpus() // ranks_on_this_host()))
