# SPDX-License-Identifier: Apache-2.0
"""The manifest: a checkpoint folder is complete when it has one, and intact when its files match it.

It is written last, under another name, and renamed into place: an interrupted save leaves a folder without one. It
holds the size and checksum of every other file of the checkpoint, and a checksum of itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.checkpoint.files import open_regular, read_whole
from offstage.checkpoint.threads import in_threads
from offstage.errors import CheckpointError

logger = logging.getLogger("offstage")

MARKER = ".offstage"
"""Written first: a folder with it and without a manifest is an interrupted save."""
METADATA = ".metadata"
MANIFEST = "manifest.json"
FORMAT = "offstage checkpoint"
VERSION = 1

_TEMPORARY = f".{MANIFEST}.tmp"
_NAME = re.compile(r"\.metadata|\.offstage|__\d+_\d+\.distcp")
"""The files of a checkpoint."""
_FIELDS = {"format", "version", "saved_at", "about", "files", "crc32"}
_MAX_BYTES = 32 * 1024 * 1024
"""Of a manifest: enough for 400,000 files, and little enough to parse whatever is in it."""
_END_OF_TIME = 2**63 - 1
_READ_BYTES = 4 * 1024 * 1024
_MAX_THREADS = 16
_MAX_NAMED = 5
_MAX_SHOWN = 200
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
    """Time of writing, in nanoseconds since 1970; later than that of all checkpoints that were beside it then."""
    files: Mapping[str, FileSum]
    about: Mapping[str, Any]
    """Number of ranks, versions and the like; for people."""


def checked_folder(folder: str | os.PathLike[str] | None) -> Path:
    """`folder` as an absolute path, so that a later `chdir` changes nothing; raises if it is no path.

    `latest()` may have found nothing and returned `None`, on one rank only.
    """
    if folder is None:
        raise CheckpointError(
            "Expected the folder of a checkpoint; found None, which latest() returns where no checkpoint is complete. "
            "Name a folder; before loading, check the result of latest(), and start anew where it is None."
        )
    try:
        path = Path(folder).absolute()
    except (TypeError, OSError) as error:  # no path, or the working directory was removed
        raise CheckpointError(
            f"Expected the path of a folder; found {folder!r} ({error}). Give a str or a Path."
        ) from error
    if "\0" in str(path):
        raise CheckpointError(f"Expected the path of a folder; found {folder!r}, with a null byte. Give another name.")
    return path


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
    try:
        beside = _complete_in(folder.parent)
    except CheckpointError:  # a folder that may be used and not listed: `latest` finds none there either
        beside = []
    newest = beside[-1][0] if beside else 0
    content = {
        "format": FORMAT,
        "version": VERSION,
        # The clock may have been set back since the last save: this one is the newest all the same.
        "saved_at": min(max(time.time_ns(), newest + 1), _END_OF_TIME),
        "about": about,
        "files": {name: {"bytes": file.nbytes, "crc32": file.crc32} for name, file in sorted(files.items())},
    }
    # Through JSON once, so that the checksum is of what a reader gets (tuples become lists, keys strings).
    content = json.loads(json.dumps(content, allow_nan=False))
    text = (json.dumps(content | {"crc32": _own_sum(content)}, indent=1, ensure_ascii=False) + "\n").encode()
    _parsed(content)
    if len(text) > _MAX_BYTES:
        raise CheckpointError(
            f"{folder}: expected a manifest of at most {_MAX_BYTES} bytes; found {len(text)} for {len(files)} files. "
            "Save with fewer ranks or less in `about`."
        )
    temporary = folder / _TEMPORARY
    with temporary.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)
    try:
        sync_folder(folder)
    except OSError:
        with contextlib.suppress(OSError):
            (folder / MANIFEST).unlink()  # what is reported as failed must not be found complete
        raise


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
    text = _read(folder)
    try:
        content = json.loads(text)
        damaged = content["crc32"] != _own_sum(content) or content["format"] != FORMAT
        version = content["version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if damaged:
        raise _damaged(path, "content that its own checksum does not fit")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{path}: expected version {VERSION} of the format; found version {_short(version)}. Load it with the "
            "version of offstage that saved it."
        )
    try:
        return _parsed(content)
    except ValueError as error:
        raise _damaged(path, str(error)) from error


def _read(folder: Path) -> bytes:
    path = folder / MANIFEST
    try:
        return read_whole(folder, MANIFEST, _MAX_BYTES)
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


def _parsed(content: Mapping[str, Any]) -> Manifest:
    """A manifest of this version; raises `ValueError` for anything that `write_manifest` does not write."""
    if wrong := (content.keys() | {"crc32"}) ^ _FIELDS:
        raise ValueError(f"the fields {_short(sorted(content))}; {_short(sorted(wrong))} too many or missing")
    saved_at, about, entries = content["saved_at"], content["about"], content["files"]
    if not _is_count(saved_at, _END_OF_TIME):
        raise ValueError(f"saved_at {_short(saved_at)}")
    if not isinstance(about, dict) or not isinstance(entries, dict):
        raise ValueError(f"about {_short(about)} and files {_short(entries)}, which are no objects")
    files = {}
    for name, entry in entries.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{_short(name)}, which is no file of a checkpoint")
        if not (
            isinstance(entry, dict)
            and entry.keys() == {"bytes", "crc32"}
            and _is_count(entry["bytes"], _END_OF_TIME)
            and _is_count(entry["crc32"], 2**32 - 1)
        ):
            raise ValueError(f"{_short(entry)} for {name}")
        files[name] = FileSum(entry["bytes"], entry["crc32"])
    if METADATA not in files:
        raise ValueError(f"no entry for {METADATA}")
    return Manifest(saved_at, files, about)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def check_listed(folder: Path, files: Iterable[str]) -> None:
    """Raise if the manifest lacks one of `files`, to which `.metadata` refers: it would be loaded unverified."""
    if missing := sorted(set(files) - read_manifest(folder).files.keys()):
        raise _damaged(folder / MANIFEST, f"no entry for {_short(missing[0])}, in which {METADATA} has data")


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Whether the checkpoint was saved to its end. `verify` checks that its files are still what was saved."""
    try:
        read_manifest(checked_folder(folder))
    except CheckpointError:
        return False
    return True


def latest(root: str | os.PathLike[str], *, intact: bool = False) -> Path | None:
    """The complete checkpoint directly under `root` that was saved last; `None` if there is none.

    What the manifests say counts, not the times of files. Each save is later than those beside it, even if the clock
    was set back. With `intact`, one whose files are not what was saved is passed over, with a warning: they are read
    to the end, from the newest checkpoint back to the first that `verify` accepts.
    """
    for folder in reversed(complete_in(checked_folder(root))):
        try:
            if intact:
                verify(folder)
        except CheckpointError as error:
            logger.warning("passed over a checkpoint: %s", error)
        else:
            return folder
    return None


def complete_in(root: Path, *, warn: bool = True) -> list[Path]:
    """The complete checkpoints directly under `root`, in the order in which they were saved."""
    return [root / name for _, name in _complete_in(root, warn=warn)]


def _complete_in(root: Path, *, warn: bool = True) -> list[tuple[int, str]]:
    """When each was saved, and its name. A warning names what has a manifest and is no complete checkpoint."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{root}: expected a folder of checkpoints; found {error.strerror or error}. Check who may read it."
        ) from error
    found = []
    for name in names:
        try:
            os.lstat(root / name / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            continue  # an interrupted or unfinished save, or something else
        except OSError:
            pass  # read_manifest says what it is
        try:
            found.append((read_manifest(root / name).saved_at, name))
        except CheckpointError as error:
            logger.log(logging.WARNING if warn else logging.DEBUG, "passed over a checkpoint: %s", error)
    return sorted(found)


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
    folder = checked_folder(folder)
    manifest = read_manifest(folder)
    wanted = sorted(manifest.files if names is None else set(names))
    workers = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    found = in_threads(lambda name: _fault(folder, name, manifest.files.get(name), checksums), wanted, workers)
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
        os.close(open_regular(folder, name))
        nbytes = os.stat(path).st_size
        found = sum_of(path) if checksums and nbytes == expected.nbytes else None
        nbytes = nbytes if found is None else found.nbytes
    except CheckpointError as error:  # no regular file of the folder
        return str(error)
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
