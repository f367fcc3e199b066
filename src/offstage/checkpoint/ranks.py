# SPDX-License-Identifier: Apache-2.0
"""Ranks agree: what fails on one is raised on all, and nobody waits for a rank that has given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from offstage.errors import CheckpointError


class Ranks:
    """The processes that save or load one checkpoint together; one alone if there is no process group."""

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
    def agreeing(self, what: str) -> Iterator[None]:
        """Leave the block together: if it raises on any rank, it raises on all."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:  # Ctrl-C too: the others are on their way to the same place
            error = raised
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = {rank: text for rank, text in enumerate(told) if text is not None}
        if failed:
            rank, text = next(iter(failed.items()))
            others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            raise CheckpointError(f"{what} failed on rank {rank}{others}, so on all: {text}")
