# SPDX-License-Identifier: Apache-2.0
"""Claims: host memory that processes of this host were allowed to take and have not taken yet.

The kernel counts a page when it is touched. Ranks that start together would each find the same free memory, each be
told that it suffices, and together be killed. So a process writes down what it is about to take, in a file that the
others read, before it looks at what is left: of two that do so at the same time at least one sees the other. There is
no lock, so there is nothing to wait for and nothing that a killed process could leave locked.

A claim shrinks by as much as the private memory of its process has grown since, which the kernel counts as used; it
ends when it is released, or with the process. Claims are seen within one user and one PID namespace: other processes
count only with what they have taken. Dividing the limit by the number of local ranks would be simpler, and wrong for
uneven ranks, for two jobs on one host, and for launchers that do not tell the number.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("offstage")

PROC = Path("/proc")
SHARED_FOLDERS = (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"))  # not TMPDIR, which may differ between ranks
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Outstanding:
    """What one process has claimed and not taken yet."""

    pid: int
    nbytes: int
    cgroups: frozenset[tuple[str, str]]
    """(controllers, path) of each of its memory cgroups."""


class Claim:
    """Memory that this process may take. Released explicitly, at the end of a `with` block, or with the object."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        _own.add(id(self), nbytes)
        self._finalizer: weakref.finalize[Any, Any] = weakref.finalize(self, _own.remove, id(self))

    def release(self) -> None:
        """The memory is taken, or will not be."""
        self._finalizer()
        self.nbytes = 0

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Own:
    """The claims of this process, and the file that tells the others."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in the middle of anything
        self.forget()

    def forget(self) -> None:
        """In a forked child: the claims are the parent's."""
        self._lock = threading.RLock()
        self._live: dict[int, int] = {}
        self._claimed, self._private_then = 0, 0

    def add(self, key: int, nbytes: int) -> None:
        with self._lock:
            if nbytes:
                self._live[key] = nbytes
                self._publish(self.outstanding() + nbytes)

    def remove(self, key: int) -> None:
        with self._lock:
            if self._live.pop(key, 0):
                self._publish(min(self.outstanding(), sum(self._live.values())))

    def outstanding(self) -> int:
        return _left(self._claimed, self._private_then, os.getpid())

    def _publish(self, claimed: int) -> None:
        self._claimed, self._private_then = claimed, _private_bytes(os.getpid()) or 0
        folder = claims_folder()
        if folder is None:
            _warn_alone(f"none of {', '.join(map(str, SHARED_FOLDERS))} is this user's to write")
            return
        mine = folder / f"{os.getpid()}-{_started(os.getpid())}"
        try:
            if claimed:
                new = mine.with_name(f".{mine.name}")
                new.write_text(f"{claimed} {self._private_then}")
                new.replace(mine)  # readers see the old claim or the new one
            else:
                mine.unlink(missing_ok=True)
        except OSError as error:
            _warn_alone(str(error))


_own = _Own()
os.register_at_fork(after_in_child=_own.forget)


def own_outstanding() -> int:
    """What this process has claimed and not taken yet."""
    return _own.outstanding()


def others_outstanding() -> list[Outstanding]:
    """What other processes have claimed and not taken yet."""
    found = {}
    for path in _files():
        pid, _, started = path.name.partition("-")
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        with contextlib.suppress(OSError, ValueError):
            if _started(int(pid)) != started:
                path.unlink()
            else:
                claimed, private_then = map(int, path.read_text().split())
                found[int(pid)] = _left(claimed, private_then, int(pid))
    return [Outstanding(pid, left, memory_cgroups(PROC / str(pid) / "cgroup")) for pid, left in found.items() if left]


def _files() -> list[Path]:
    folder = claims_folder()
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir()) if folder is not None else []
    return []


@functools.cache
def _warn_alone(reason: str) -> None:
    logger.warning("other processes on this host cannot see how much memory this one is about to take: %s", reason)


def claims_folder() -> Path | None:
    """Where this user's processes tell each other; `None` if there is no such place."""
    try:
        name = f"offstage-{os.getuid()}-{(PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return None
    for base in SHARED_FOLDERS:
        with contextlib.suppress(OSError):
            folder = base / name
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK):
                return folder
    return None


def memory_cgroups(membership: Path | None = None) -> frozenset[tuple[str, str]]:
    """(controllers, path) of the memory cgroups of a process, or of this one; empty if that cannot be known."""
    membership = membership or PROC / "self" / "cgroup"
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return frozenset()
    return frozenset((of, path) for _, of, path in lines if of == "" or "memory" in of.split(","))


def _left(claimed: int, private_then: int, pid: int) -> int:
    now = _private_bytes(pid)
    return max(0, claimed - max(0, (private_then if now is None else now) - private_then))


def _private_bytes(pid: int) -> int | None:
    """Private memory that the process has touched."""
    try:
        _, resident, shared, *_ = map(int, (PROC / str(pid) / "statm").read_text().split())
    except (OSError, ValueError):
        return None
    return (resident - shared) * _PAGE


def _started(pid: int) -> str:
    """When the process started; empty if there is none, or only what is left of one that has ended."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
