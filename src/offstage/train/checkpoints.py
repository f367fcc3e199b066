# SPDX-License-Identifier: Apache-2.0
"""`Checkpoints`: the checkpoint folders of a run, of which the newest are kept.

An old one is removed only after a newer one is complete: the newest is the one that was saved last, for resuming and
for removing alike. Only folders that a run has made here are removed, never what a link leads to.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offstage import CheckpointError, HostMemoryError, OffloadedOptimizer, checkpoint
from offstage.checkpoint.manifest import MANIFEST, MARKER, complete_in
from offstage.checkpoint.ranks import Ranks

logger = logging.getLogger("offstage")
_NAME = re.compile(r"step-(\d{8,})")
_EXTRA = {"step", "skipped_in_a_row", "data"}
"""What the loop needs to continue."""
_ASIDE = "damaged"
"""The folder, among the checkpoints, of those that are damaged."""


class Checkpoints:
    """`step-00000100` and so on in `root`. Every rank calls every method."""

    def __init__(self, root: Path, *, keep: int, asynchronous: bool, first: bool, fallback: bool = False) -> None:
        """`first`: this is the rank that removes old ones. `fallback`: where the newest is damaged, load another."""
        self._root, self._keep, self._asynchronous, self._first = root, keep, asynchronous, first
        self._fallback = fallback
        self._damaged: list[Path] = []
        """Passed over by `load`."""
        self._under_way: checkpoint.AsyncSave | None = None
        self._failure: Exception | None = None

    def newest(self) -> Path | None:
        """The newest complete one that the first rank finds: all ranks must resume from the same."""
        ranks, found = Ranks(None), None
        with ranks.failing_together("Looking for the newest checkpoint"):
            if self._first:
                found = checkpoint.latest(self._root)
        newest: Path | None = ranks.gather(found)[0]
        return newest

    def to_resume(self) -> Path | None:
        """The newest that was completed, as the first rank finds it, even if its manifest is damaged now."""
        ranks, found = Ranks(None), None
        with ranks.failing_together("Looking for the newest checkpoint"):
            if self._first:
                complete = complete_in(self._root, warn=False)  # `load` says what is wrong with the others
                found = complete[-1] if complete else None
                found = max(_unreadable(self._root, after=found), key=_step_of, default=found)  # type: ignore[arg-type]
        newest: Path | None = ranks.gather(found)[0]
        return newest

    def load(self, folder: Path, model: nn.Module, optimizer: OffloadedOptimizer) -> tuple[Path, dict[str, Any]]:
        """Load into `model` and `optimizer`; returns what was loaded, and its `extra`.

        That is `folder`, or with `fallback` the newest before it that is not damaged.
        """
        try:
            extra = checkpoint.load(folder, model, optimizer)
        except CheckpointError as error:
            folder = self._instead_of(folder, error)
            extra = checkpoint.load(folder, model, optimizer)
        if missing := sorted(_EXTRA - extra.keys()):
            raise CheckpointError(
                f"{folder}: expected a checkpoint of `offstage train`; found one without {missing[0]!r}, which another "
                "program saved. Move it elsewhere, or choose another run.folder."
            )
        return folder, extra

    def _instead_of(self, folder: Path, error: CheckpointError) -> Path:
        """The newest that is not damaged, in place of `folder`, which could not be loaded; raises if that is wrong."""
        ranks = Ranks(None)
        found: tuple[bool, Path | None] = (False, None)
        with ranks.failing_together("Looking for a checkpoint that is not damaged"):
            if self._first:
                found = self._intact_before(folder)
        damaged, intact = ranks.gather(found)[0]
        if not damaged:
            raise CheckpointError(
                f"{error} Nothing was changed. To train another model, choose another run.folder."
            ) from error
        if intact is None:
            raise CheckpointError(
                f"{error} Nothing was changed. No other checkpoint in {self._root} is complete and intact: bring "
                "this one back from a copy, or begin again in another run.folder."
            ) from error
        if not self._fallback:
            raise CheckpointError(
                f"{error} Nothing was changed. {intact} is intact: run.fallback=true continues from there, and keeps "
                "the damaged one aside."
            ) from error
        logger.warning("continuing from %s instead: %s", intact, error)
        return Path(intact)

    def _intact_before(self, folder: Path) -> tuple[bool, Path | None]:
        """Whether `folder` is damaged, and the newest that is not; remembers the damaged ones."""
        if _is_intact(folder):
            return False, None
        complete = complete_in(self._root, warn=False)
        self._damaged = []
        while complete and not _is_intact(complete[-1]):
            self._damaged.append(complete.pop())
        intact = complete[-1] if complete else None
        self._damaged += _unreadable(self._root, after=intact)
        return True, intact

    def set_aside(self) -> None:
        """Move the damaged ones, which `load` passed over, to a folder of their own: a save may need their names."""
        ranks = Ranks(None)
        with ranks.failing_together("Setting damaged checkpoints aside"):
            for folder in self._damaged:
                names = (self._root / _ASIDE / f"{folder.name}{end}" for end in _endings())
                aside = next(name for name in names if not os.path.lexists(name))
                try:
                    aside.parent.mkdir(exist_ok=True)
                    folder.rename(aside)
                except OSError as error:
                    raise CheckpointError(
                        f"{folder} is damaged and could not be moved to {aside}: {error.strerror or error}. Move it "
                        "elsewhere, and run the same command again."
                    ) from error
                logger.warning("the damaged checkpoint %s is kept as %s", folder, aside)
        self._damaged.clear()

    def save(
        self, step: int, model: nn.Module, optimizer: OffloadedOptimizer, extra: Mapping[str, Any], *, wait: bool
    ) -> Path:
        """Start a save of the state after `step`; with `wait`, or without asynchronous saves, complete it."""
        self.finish()
        folder = self._root / f"step-{step:08}"
        if checkpoint.is_complete(folder):  # the run stops where it has just saved
            return folder
        with self._removing_on_error(folder):
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
        """`None` if the host has too little memory: the save then blocks training instead."""
        try:
            return checkpoint.async_save(folder, model, optimizer, extra=extra)
        except (HostMemoryError, CheckpointError) as error:
            if not isinstance(error, HostMemoryError) and HostMemoryError.__name__ not in str(error):
                raise
            logger.warning("training waits for each save from now on: %s", error)
            self._asynchronous = False
            return None

    def poll(self) -> bool:
        """If a save in the background has ended, remove older checkpoints. `True` if it has failed.

        Ranks notice the failure at different times and must leave training after the same step: `finish` raises it.
        """
        if self._under_way is not None and self._under_way.done():
            try:
                self.finish()
            except Exception as error:
                self._failure = error
        return self._failure is not None

    def finish(self) -> None:
        """Wait for the save under way; raise its error, if there was one."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._under_way is not None:
            saving, self._under_way = self._under_way, None
            with self._removing_on_error(saving.folder):
                saving.result()
            self._prune()

    @contextlib.contextmanager
    def _removing_on_error(self, folder: Path) -> Iterator[None]:
        """Remove the files of a save that fails, for example on a full disk."""
        try:
            yield
        except Exception:
            if self._first:
                _remove_incomplete(folder)
            raise

    def _prune(self) -> None:
        """Remove all but the newest `keep` complete ones, and interrupted saves of steps before the newest's."""
        if not self._first:
            return
        try:
            complete = [path for path in complete_in(self._root) if _step_of(path) is not None]
            steps = {path: step for path in self._root.iterdir() if (step := _step_of(path)) is not None}
        except (CheckpointError, OSError) as error:
            logger.warning("old checkpoints could not be looked for: %s", error)
            return
        for path in complete[: -self._keep]:
            _remove(path)
        for path, step in steps.items():
            if complete and path not in complete and step < steps[complete[-1]]:
                _remove_incomplete(path)


def _is_intact(folder: Path) -> bool:
    try:
        checkpoint.verify(folder)
    except CheckpointError:
        return False
    return True


def _unreadable(root: Path, after: Path | None) -> list[Path]:
    """Those of later steps than `after` whose save was completed, and whose manifest cannot be read any more."""
    least = -1 if after is None else _step_of(after)
    if least is None or not root.is_dir():
        return []
    steps = {path: step for path in root.iterdir() if (step := _step_of(path)) is not None}
    return [
        path
        for path, step in steps.items()
        if step > least and os.path.lexists(path / MANIFEST) and not checkpoint.is_complete(path)
    ]


def _endings() -> Iterator[str]:
    return ("" if number == 1 else f"-{number}" for number in itertools.count(1))


def _step_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder; `None` for other names, and for links, which lead to what is not ours."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match and os.path.isdir(folder) and not os.path.islink(folder) else None


def _remove(folder: Path) -> None:
    """The manifest first: a process killed here leaves a folder that counts as incomplete."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(MANIFEST, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        shutil.rmtree(folder)  # follows no links
    except OSError as error:
        logger.warning("an old checkpoint could not be removed: %s", error)


def _remove_incomplete(folder: Path) -> None:
    """Remove `folder` if it is an interrupted save."""
    names = (folder / MARKER, folder / MANIFEST)
    if _step_of(folder) is not None and [os.path.lexists(name) for name in names] == [True, False]:
        _remove(folder)


# Random states #


def rng_states(rank: int, device: torch.device) -> dict[str, Any]:
    """Random states of the host and of the device, under this rank's key."""
    states = {"host": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return {f"rng_{rank}": states}


def set_rng_states(extra: Mapping[str, Any], rank: int, device: torch.device) -> bool:
    """Restore them. `False` if there are none for this rank: with more ranks than before, or on another device."""
    states = extra.get(f"rng_{rank}", {})
    if "host" not in states or (device.type != "cpu") != ("device" in states):
        return False
    torch.set_rng_state(states["host"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
    return True
