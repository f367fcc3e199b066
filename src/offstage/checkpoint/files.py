# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint folder, opened and read so that nothing in the folder can stop or end the process.

Only regular files that lie in the folder are opened: opening a FIFO or a device may wait for ever, and a link may lead
to any file of the machine. They are read with `pread`, not mapped: touching a mapped page that another process has
meanwhile cut off the file ends the process, while `pread` reports it.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from offstage.errors import CheckpointError

MAX_OPEN = 16
"""Files that `OpenFiles` keeps open; each thread that reads may hold one more."""
_USE_ANOTHER = "Use another checkpoint."


def open_regular(folder: Path, name: str) -> int:
    """A descriptor of the file `name` of `folder`, for reading.

    Raises `CheckpointError` where it is no regular file, or a link that leaves the folder (which may itself be a link),
    and `OSError` where it cannot be opened.
    """
    path = folder / name
    real = os.path.realpath(path, strict=True)
    if os.path.commonpath([real, inside := os.path.realpath(folder)]) != inside:
        raise CheckpointError(
            f"{path}: expected a file of the checkpoint in its folder; found a link to {real}. Copy that file to the "
            "place of the link, if it belongs to the checkpoint."
        )
    # Looked at before it is opened, because opening a device may do something; and after, because it may have changed.
    _check_regular(path, os.stat(real))
    descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _check_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path, found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "a device")
    raise CheckpointError(f"{path}: expected a regular file of the checkpoint; found {kind}. {_USE_ANOTHER}")


@contextmanager
def one_error(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `CheckpointError` about `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a file of the checkpoint; found {error.strerror or error}. The checkpoint is "
            f"incomplete, or not readable from this machine. {_USE_ANOTHER}"
        ) from error


class Source(Protocol):
    """What items are read from."""

    @property
    def name(self) -> str: ...

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; raises `CheckpointError` where they are not there."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """The same, into `memory`."""


class RegularFile:
    """A file of the checkpoint. It is closed with the last reference to it, so that no thread reads a closed one."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        with one_error(self.path):
            self._descriptor = open_regular(folder, name)
            weakref.finalize(self, os.close, self._descriptor).atexit = False
            self.nbytes = os.fstat(self._descriptor).st_size

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, offset: int, length: int) -> bytes:
        if offset + length > self.nbytes:  # before memory is allocated for it
            raise self._ends(offset, length, self.nbytes)
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, memory: memoryview, offset: int) -> None:
        rest, position = memory, offset
        while len(rest):
            with one_error(self.path):
                count = os.preadv(self._descriptor, [rest], position)
            if not count:
                raise self._ends(offset, len(memory), position)
            rest, position = rest[count:], position + count

    def _ends(self, offset: int, length: int, end: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: expected at least {offset + length} bytes; found that the file ends at {end}. The file is "
            f"truncated. {_USE_ANOTHER}"
        )


class Bytes:
    """A file's content in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "the object") -> None:
        self._data = memoryview(data)
        self.name = name

    def read(self, offset: int, length: int) -> bytes:
        found = bytes(self._data[offset : offset + length])
        if len(found) != length:
            raise CheckpointError(
                f"{self.name}: expected at least {offset + length} bytes; found {len(self._data)}. Read what was "
                "written."
            )
        return found

    def read_into(self, memory: memoryview, offset: int) -> None:
        memory[:] = self.read(offset, len(memory))


class OpenFiles:
    """The files of a folder, few of them open at a time: a checkpoint may have more than a process can have open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, RegularFile] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> RegularFile:
        with self._lock:
            file = self._open.pop(name, None) or RegularFile(self._folder, name)
            self._open[name] = file
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
            return file

    def clear(self) -> None:
        """Close all."""
        with self._lock:
            self._open.clear()


def read_whole(folder: Path, name: str, at_most: int) -> bytes:
    """The content of a small file. Raises what `open_regular` raises, so that the caller can say what is missing."""
    with os.fdopen(open_regular(folder, name), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > at_most:
            raise CheckpointError(
                f"{folder / name}: expected at most {at_most} bytes; found {nbytes}. The file is damaged or of another "
                f"format. {_USE_ANOTHER}"
            )
        return file.read(nbytes)
