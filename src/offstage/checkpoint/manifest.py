# SPDX-License-Identifier: Apache-2.0
"""The manifest: a checkpoint folder is complete when it has one, and sound when its files are what the manifest says.

It is written last, under another name, and renamed into place: a save that was interrupted anywhere leaves a folder
without one. It holds the size and checksum of every other file of the checkpoint, and a checksum of itself. Written by
`saving.py`; `loading.py` verifies before it changes anything.
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

from offstage.errors import CheckpointError

logger = logging.getLogger("offstage")

MANIFEST = "manifest.json"
FORMAT = "offstage checkpoint"
VERSION = 1

_TEMPORARY = f".{MANIFEST}.tmp"
_READ_BYTES = 4 * 1024 * 1024
_MAX_THREADS = 16
_MAX_NAMED = 5
_USE_ANOTHER = "Use another checkpoint."


@dataclass(frozen=True)
class FileSum:
    """What a file must be."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What the manifest of a complete checkpoint says."""

    saved_at: int
    """When it was written: nanoseconds since 1970."""
    files: Mapping[str, FileSum]
    about: Mapping[str, Any]
    """What the writer wanted to say about the checkpoint."""


# Writing #


def sum_of(path: Path) -> FileSum:
    """Size and checksum of a file. Sequential, and without the interpreter's lock: run files in threads."""
    nbytes = crc = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            nbytes += count
    return FileSum(nbytes, crc)


def write_manifest(folder: Path, files: Mapping[str, FileSum], *, about: Mapping[str, Any]) -> None:
    """Make the checkpoint in `folder` complete. Its other files are on disk already: written, synchronised, closed.

    `files` are all of them, by name, `.metadata` and empty ones included; `about` is plain data (what JSON can say).
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "saved_at": time.time_ns(),
        "about": about,
        "files": {name: {"bytes": file.nbytes, "crc32": file.crc32} for name, file in sorted(files.items())},
    }
    # Once through JSON, so that the checksum is of what a reader will see (tuples become lists, keys strings).
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
    """The checksum of everything in the manifest but itself, whatever the order and the spaces in the file."""
    rest = {key: value for key, value in content.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def sync_folder(folder: Path) -> None:
    """A rename is durable when the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """What is in the file is on disk from now on."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


# Reading #


def read_manifest(folder: Path) -> Manifest:
    """What the manifest says; raises if the checkpoint is incomplete or the manifest itself is damaged."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
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
    """Whether the checkpoint was saved to its end. Whether its files are still what was saved is for `verify`."""
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
            continue  # a save that was interrupted or is not over, or something else
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
    """Raise unless the files (`names`, or all of them) are there, as long as they were, with the same content.

    Without `checksums` sizes alone are compared, which takes no reading. All files are looked at before it raises.
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
