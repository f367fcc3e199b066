# SPDX-License-Identifier: Apache-2.0
"""`Checkpoints`: when and where a run saves, what is kept, and what it goes on from. Called by `loop.py`.

The folders are those of `offstage.checkpoint`. An old one is removed only after a newer one is complete.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offstage import CheckpointError, HostMemoryError, OffloadedOptimizer, checkpoint
from offstage.checkpoint.manifest import MANIFEST
from offstage.checkpoint.saving import MARKER

logger = logging.getLogger("offstage")
_NAME = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """Those of one run: `step-00000100` and so on in `root`. Every rank calls every method."""

    def __init__(self, root: Path, *, keep: int, asynchronous: bool, first: bool) -> None:
        """`first`: this is the rank that removes old ones."""
        self._root, self._keep, self._asynchronous, self._first = root, keep, asynchronous, first
        self._under_way: checkpoint.AsyncSave | None = None
        self._failure: Exception | None = None

    def newest(self) -> Path | None:
        """The newest complete one, as the first rank sees it: all must go on from the same."""
        found: list[Path | None] = [checkpoint.latest(self._root) if self._first else None]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        return found[0]

    def load(self, folder: Path, model: nn.Module, optimizer: OffloadedOptimizer) -> dict[str, Any]:
        """Into `model` and `optimizer`; the rest of what `save` was given."""
        try:
            return checkpoint.load(folder, model, optimizer)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Nothing was changed. To train another model, choose another run.folder; if the checkpoint is "
                f"damaged, remove {folder} to go on from the one before."
            ) from error

    def save(
        self, step: int, model: nn.Module, optimizer: OffloadedOptimizer, extra: Mapping[str, Any], *, wait: bool
    ) -> Path:
        """Begin to save what is after `step`; with `wait`, or without asynchronous saves, it is complete afterwards."""
        self.finish()
        folder = self._root / f"step-{step:08}"
        if checkpoint.is_complete(folder):  # of this very step: a run that stops where it had just saved
            return folder
        with self._giving_back(folder):
            if self._asynchronous and not wait:
                self._under_way = self._begin(folder, model, optimizer, extra)
            if self._under_way is None:
                checkpoint.save(folder, model, optimizer, extra=extra)
        if self._under_way is None:
            self._prune()
        return folder

    def _begin(
        self, folder: Path, model: nn.Module, optimizer: OffloadedOptimizer, extra: Mapping[str, Any]
    ) -> checkpoint.AsyncSave | None:
        """`None` if the host has no room for it; then training waits for the save instead."""
        try:
            return checkpoint.async_save(folder, model, optimizer, extra=extra)
        except (HostMemoryError, CheckpointError) as error:
            if not isinstance(error, HostMemoryError) and HostMemoryError.__name__ not in str(error):
                raise
            logger.warning("training waits for each save from now on: %s", error)
            self._asynchronous = False
            return None

    def poll(self) -> bool:
        """Look after a save in the background: if it is complete, older ones go. `True` if it has failed.

        Ranks see the failure at different moments, and must leave training after the same step: `finish` raises it.
        """
        if self._under_way is not None and self._under_way.done():
            try:
                self.finish()
            except Exception as error:
                self._failure = error
        return self._failure is not None

    def finish(self) -> None:
        """Wait for the save under way; raise what went wrong with it."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._under_way is not None:
            saving, self._under_way = self._under_way, None
            with self._giving_back(saving.folder):
                saving.result()
            self._prune()

    @contextlib.contextmanager
    def _giving_back(self, folder: Path) -> Iterator[None]:
        """A save that fails, on a full disk for one, does not keep what it has written."""
        try:
            yield
        except Exception:
            if self._first:
                _remove_incomplete(folder)
            raise

    def _prune(self) -> None:
        """All but the newest `keep` complete ones, and saves that were interrupted before the newest."""
        if not self._first:
            return
        found = sorted((int(match[1]), path) for path in self._root.iterdir() if (match := _NAME.fullmatch(path.name)))
        complete = [path for _, path in found if checkpoint.is_complete(path)]
        newest = complete[-1] if complete else None
        for path in complete[: -self._keep]:
            _remove(path)
        for _, path in found:
            if newest is not None and path < newest and path not in complete:
                _remove_incomplete(path)


def _remove(folder: Path) -> None:
    """The manifest first: whoever is killed here leaves what is known not to be complete."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("an old checkpoint could not be removed: %s", error)


def _remove_incomplete(folder: Path) -> None:
    """Only what a save of ours has begun and not ended."""
    if (folder / MARKER).exists() and not (folder / MANIFEST).exists():
        _remove(folder)


# Random states


def rng_states(rank: int, device: torch.device) -> dict[str, Any]:
    """Of the host and of the device, under a key of this rank's own."""
    states = {"host": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return {f"rng_{rank}": states}


def set_rng_states(extra: Mapping[str, Any], rank: int, device: torch.device) -> bool:
    """Whether there were any for this rank. With more ranks than before, or on another device, there are none."""
    states = extra.get(f"rng_{rank}", {})
    if "host" not in states or (device.type != "cpu") != ("device" in states):
        return False
    torch.set_rng_state(states["host"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
    return True
