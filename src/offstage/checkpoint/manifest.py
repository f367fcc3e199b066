# SPDX-License-Identifier: Apache-2.0
"""The manifest: a checkpoint folder is complete when it has one, and intact when its files match it.

It is written last, under another name, and renamed into place: an interrupted save leaves a folder without one. It
holds the size and checksum of every other file of the checkpoint, and a checksum of itself.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.checkpoint.files import open_regular, read_whole
from offstage.errors import CheckpointError

logger = logging.getLogger("offstage")

MARKER = ".offstage"
"""Written first: a folder with it and without a manifest is an interrupted save."""
METADATA = ".metadata"
MANIFEST = "manifest.json"
FORMAT = "offstage checkpoint"
VERSION = 1

_TEMPORARY = f".{MANIFEST}.tmp"
_READ_BYTES = 4 * 1024 * 1024
_MAX_BYTES = 256 * 1024 * 1024  # more than a million files
_MAX_THREADS = 16
_MAX_NAMED = 5
_USE_ANOTHER = "Use another checkpoint."


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of a file."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    saved_at: int
    """Time of writing, in nanoseconds since 1970."""
    files: Mapping[str, FileSum]
    about: Mapping[str, Any]
    """Number of ranks, versions and the like; for people."""


def checked_folder(folder: str | os.PathLike[str] | None) -> Path:
    """`folder` as a path; raises if it is `None`: `latest()` may have found nothing, on one rank only."""
    if folder is None:
        raise CheckpointError(
            "Expected the folder of a checkpoint; found None, which latest() returns where no checkpoint is complete. "
            "Name a folder; before loading, check the result of latest(), and start anew where it is None."
        )
    return Path(folder)


# Writing #


def sum_of(path: Path) -> FileSum:
    """Size and checksum of a file. Releases the GIL, so that several threads can sum several files."""
    nbytes = crc = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with os.fdopen(open_regular(path.parent, path.name), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            nbytes += count
    return FileSum(nbytes, crc)


def write_manifest(folder: Path, files: Mapping[str, FileSum], *, about: Mapping[str, Any]) -> None:
    """Make the checkpoint in `folder` complete. Its other files must be on disk: written, synchronised, closed.

    `files` are all of them, by name, `.metadata` and empty ones included; `about` is data that JSON can represent.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "saved_at": time.time_ns(),
        "about": about,
        "files": {name: {"bytes": file.nbytes, "crc32": file.crc32} for name, file in sorted(files.items())},
    }
    # Through JSON once, so that the checksum is of what a reader gets (tuples become lists, keys strings).
    content = json.loads(json.dumps(content, allow_nan=False))
    text = json.dumps(content | {"crc32": _own_sum(content)}, indent=1, ensure_ascii=False) + "\n"
    temporary = folder / _TEMPORARY
    with temporary.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)
    sync_folder(folder)


def _own_sum(content: Mapping[str, Any]) -> int:
    """The checksum of the manifest's content without `crc32`, independent of order and spaces in the file."""
    rest = {key: value for key, value in content.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not support it, and do not need it
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


# Reading #


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest; raise if the checkpoint is incomplete or the manifest itself is damaged."""
    path = folder / MANIFEST
    try:
        text = read_whole(folder, MANIFEST, _MAX_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: expected the manifest of a complete checkpoint; found none. The checkpoint is incomplete: the "
            f"save was interrupted or is not over. {_USE_ANOTHER}"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected the manifest of a complete checkpoint; found {error.strerror or error}. Check the "
            "folder's name and who may read it."
        ) from error
    try:
        content = json.loads(text)
        damaged = content["crc32"] != _own_sum(content) or content["format"] != FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if damaged:
        raise _damaged(path, "content that its own checksum does not fit")
    if content["version"] != VERSION:
        raise CheckpointError(
            f"{path}: expected version {VERSION} of the format; found version {content['version']}. Load it with the "
            "version of offstage that saved it."
        )
    try:
        files = {name: FileSum(entry["bytes"], entry["crc32"]) for name, entry in content["files"].items()}
        manifest = Manifest(content["saved_at"], files, content["about"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if outside := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise _damaged(path, f"{outside[0]!r}, a file outside the folder")
    return manifest


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Whether the checkpoint was saved to its end. `verify` checks that its files are still what was saved."""
    try:
        read_manifest(Path(folder))
    except CheckpointError:
        return False
    return True


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint directly under `root` that was saved last; `None` if there is none."""
    root = Path(root)
    newest: tuple[int, str] | None = None
    for folder in root.iterdir() if root.is_dir() else ():
        if not (folder / MANIFEST).is_file():
            continue  # an interrupted or unfinished save, or another folder
        try:
            found = (read_manifest(folder).saved_at, folder.name)
        except CheckpointError as error:
            logger.warning("passed over a checkpoint: %s", error)
            continue
        newest = found if newest is None else max(newest, found)
    return None if newest is None else root / newest[1]


def verify(
    folder: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    checksums: bool = True,
    threads: int | None = None,
) -> None:
    """Raise unless the files (`names`, or all of them) exist with the recorded size and content.

    Without `checksums` only sizes are compared and no file is read. All files are checked before it raises.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    wanted = sorted(manifest.files if names is None else set(names))
    workers = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers, thread_name_prefix="offstage-verify") as pool:
        found = pool.map(lambda name: _fault(folder, name, manifest.files.get(name), checksums), wanted)
        faults = [fault for fault in found if fault is not None]
    if faults:
        more = f" And {len(faults) - _MAX_NAMED} more." if len(faults) > _MAX_NAMED else ""
        raise CheckpointError(
            f"{folder}: {len(faults)} of {len(wanted)} files are not what was saved. "
            f"{' '.join(faults[:_MAX_NAMED])}{more} {_USE_ANOTHER}"
        )


def _fault(folder: Path, name: str, expected: FileSum | None, checksums: bool) -> str | None:
    """What is wrong with one file; `None` if nothing is."""
    if expected is None:
        return f"{name}: expected in {MANIFEST}; found no entry."
    path = folder / name
    try:
        found = sum_of(path) if checksums and path.stat().st_size == expected.nbytes else None
        nbytes = path.stat().st_size if found is None else found.nbytes
    except OSError as error:
        return f"{name}: expected {expected.nbytes} bytes; found {error.strerror or error}."
    if nbytes != expected.nbytes:
        return f"{name}: expected {expected.nbytes} bytes; found {nbytes}."
    if found is not None and found.crc32 != expected.crc32:
        return f"{name}: expected checksum {expected.crc32:08x}; found {found.crc32:08x}."
    return None


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected the manifest of a checkpoint; found {found}. The file is damaged or was edited. "
        f"{_USE_ANOTHER}"
    )
