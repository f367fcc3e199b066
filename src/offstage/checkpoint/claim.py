# SPDX-License-Identifier: Apache-2.0
"""`FolderClaim`: a folder that one save may write to, at a time.

Rank 0 locks the folder's marker. The system releases the lock however the process ends, so a save that was killed
blocks none after it. The lock holds between processes of one host, and between hosts on file systems that share locks
(NFS does, unless it is mounted with `nolock` or `local_lock`). Where there are no locks a warning says so; a save whose
folder another one has taken over then fails at its end, because the marker is not the one that it made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from offstage.checkpoint.manifest import MANIFEST, MARKER, METADATA
from offstage.errors import CheckpointError

logger = logging.getLogger("offstage")
_LEFT = re.compile(r"__\d+_\d+\.distcp|\.metadata|\.metadata\.tmp|\.manifest\.json\.tmp|\.offstage")
"""What an interrupted save leaves."""
_locked = threading.Lock()
_under_way: set[Path] = set()


class FolderClaim:
    """The right to write to `folder`, which was made empty but for the marker. A context manager."""

    def __init__(self, folder: Path, *, first: bool) -> None:
        """`first`: this is the rank that prepares the folder and holds the lock."""
        self._folder, self._marker, self._first = folder, folder / MARKER, first
        self._held = contextlib.ExitStack()
        self._descriptor: int | None = None

    def __enter__(self) -> FolderClaim:
        with contextlib.ExitStack() as held:
            held.enter_context(_alone_in(self._folder))
            if self._first:
                with file_errors(self._folder):
                    self._prepare(held)
            self._held = held.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.close()

    def check(self) -> None:
        """Raise if another save has taken the folder over: only where the file system has no locks."""
        assert self._descriptor is not None
        if not _is_at(self._descriptor, self._marker):
            raise _taken(self._folder)

    def _prepare(self, held: contextlib.ExitStack) -> None:
        """Remove what an interrupted save left; anything else raises. Then make and lock the marker."""
        folder = self._folder
        with contextlib.ExitStack() as until_replaced:
            if _check_interrupted(folder):
                until_replaced.enter_context(_lock(folder, os.O_RDWR))
                _check_interrupted(folder)  # again: the save that held the lock may have completed it
                # The marker last: a process killed here leaves a folder that still counts as an interrupted save.
                for name in sorted(os.listdir(folder), key=lambda name: (name == MARKER, name != METADATA)):
                    (folder / name).unlink()
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = held.enter_context(_lock(folder, os.O_RDWR | os.O_CREAT | os.O_EXCL, warn=True))


@contextlib.contextmanager
def _lock(folder: Path, flags: int, *, warn: bool = False) -> Iterator[int]:
    """Open and lock the marker; yields its descriptor."""
    try:
        descriptor = os.open(folder / MARKER, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except (FileExistsError, FileNotFoundError) as error:  # another save made or removed it a moment ago
        raise _taken(folder) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _taken(folder) from None
            if warn:
                logger.warning(
                    "%s: the file system has no locks (%s); make sure that no other process saves to it now",
                    folder,
                    error.strerror,
                )
        if not _is_at(descriptor, folder / MARKER):  # another save took it for a left one before it was locked
            raise _taken(folder)
        yield descriptor
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile shares the descriptor
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _taken(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"Another process is saving to {folder}; expected one save at a time. Wait until it is over, or choose another "
        "name."
    )


def _check_interrupted(folder: Path) -> bool:
    """Whether an interrupted save left something; raises if there is anything else in `folder`."""
    names = set(os.listdir(folder)) if folder.exists() else set()
    if MANIFEST in names or (METADATA in names and MARKER not in names):
        raise CheckpointError(
            f"{folder} holds a checkpoint; expected an empty or new folder. Choose another name, or remove it."
        )
    strange = sorted(name for name in names if not _LEFT.fullmatch(name))
    if strange or (names and MARKER not in names):
        raise CheckpointError(
            f"{folder} holds {(strange or sorted(names))[0]!r}, which is not of an interrupted save; expected an empty "
            "or new folder. Choose another name."
        )
    return bool(names)


@contextlib.contextmanager
def file_errors(folder: Path) -> Iterator[None]:
    """Add the folder and the remedy to errors of the file system."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the checkpoint could not be written: {error}. The folder is incomplete and will not be loaded; "
            "checkpoints saved before are as they were. Mend the cause and save again."
        ) from error


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Raise if another save of this process is writing to `folder`: some locks do not tell threads apart."""
    with _locked:
        if folder in _under_way:
            raise CheckpointError(
                f"A save to {folder} is under way; expected one at a time. Choose another name, or wait for it: "
                "result() of what async_save() returned."
            )
        _under_way.add(folder)
    try:
        yield
    finally:
        with _locked:
            _under_way.discard(folder)
