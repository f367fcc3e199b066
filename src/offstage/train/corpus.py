# SPDX-License-Identifier: Apache-2.0
"""`Corpus`: files of text as one memory-mapped array of bytes, or of tokens (`tokens.py`).

One file is mapped in place. Several are joined once, in the order of their paths and with a zero byte between them,
into a file in the run's folder, which a resumed run uses again. Without any paths, the text is the source of Python's
standard library, which every machine has.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offstage import ConfigError
from offstage.config import format_size

Array = npt.NDArray[np.unsignedinteger[Any]]

SEPARATOR = b"\0"
"""Between two files: no text contains it."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_PIECE_BYTES = 16 * 2**20


class Corpus:
    """All bytes of `paths`: files, and the files in folders. `cache` is a folder for what has to be joined."""

    unit = "byte"
    """What is counted."""
    identity = ""
    """Of the whole content, where it is known."""

    def __init__(self, paths: Sequence[str | Path] = (), cache: str | Path | None = None) -> None:
        files = files_of(paths, besides=cache) if paths else stdlib_files()
        if not any(file.stat().st_size for file in files):
            raise ConfigError(
                f"Expected text in {_names(paths)}; found {len(files)} files without a single byte. Give other "
                "data.paths, or none for the standard library's source."
            )
        if len(files) > 1 and cache is None:
            raise ConfigError(
                f"{len(files)} files have to be joined; expected a folder for the result, found none. Give cache, or a "
                "single file."
            )
        self.path = files[0] if cache is None or len(files) == 1 else joined(files, Path(cache))
        with readable(self.path):
            self._array: Array = np.memmap(self.path, dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return len(self._array)

    def __str__(self) -> str:
        return str(self.path)

    def read(self, start: int, stop: int) -> Array:
        """A copy of these."""
        return np.array(self._array[start:stop])

    def split(self, eval_share: float) -> tuple[ByteRange, ByteRange]:
        """The beginning to train on, and the last `eval_share` to evaluate on: mostly other files."""
        middle = len(self) - round(len(self) * eval_share)
        return ByteRange(self, 0, middle), ByteRange(self, middle, len(self))

    def fingerprint(self) -> str:
        """See `ByteRange.fingerprint`."""
        return ByteRange(self, 0, len(self)).fingerprint()


@dataclass(frozen=True)
class ByteRange:
    """Bytes or tokens `start` to `stop` of a corpus, counted from 0 within."""

    corpus: Corpus
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.corpus} from {self.unit} {self.start:,} to {self.stop:,}"

    @property
    def unit(self) -> str:
        return self.corpus.unit

    def read(self, start: int, stop: int) -> Array:
        """A copy of these."""
        return self.corpus.read(self.start + start, min(self.start + stop, self.stop))

    def fingerprint(self) -> str:
        """Identifies the data: a hash of its length and of samples throughout, so that it is fast for any size."""
        digest = hashlib.blake2b(f"{len(self)}{self.corpus.identity}".encode(), digest_size=16)
        for number in range(_SAMPLES):
            start = max(0, len(self) - _SAMPLE_BYTES) * number // (_SAMPLES - 1)
            digest.update(self.read(start, start + _SAMPLE_BYTES).tobytes())
        return digest.hexdigest()


# Files #


def files_of(paths: Sequence[str | Path], besides: str | Path | None = None) -> list[Path]:
    """The files that `paths` name, each once. Those of a folder come in the order of their paths.

    Hidden files are left out, and those in `besides`, the folder that the run itself writes to.
    """
    found: dict[Path, None] = {}
    own = None if besides is None else Path(besides).resolve()
    for path in (Path(given).expanduser() for given in paths):
        if path.is_dir():
            found.update(dict.fromkeys(file for file in _files_in(path) if own not in file.resolve().parents))
        elif path.is_file():
            found[path] = None
        else:
            raise ConfigError(
                f"data.paths expects files and folders; {path} is not there. Check the spelling; relative paths are "
                f"taken from {Path.cwd()}."
            )
    if not found:
        raise ConfigError(f"data.paths expects files; the folders {_names(paths)} have none. Give other ones.")
    return list(found)


def stdlib_files() -> list[Path]:
    """The source of the standard library, without its tests, which not every installation has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    besides = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [file for file in _files_in(folder, besides) if file.suffix == ".py"]
    if not files:
        raise ConfigError(
            f"Without data.paths, the data is the standard library's source; expected *.py files in {folder}, found "
            "none. Give data.paths."
        )
    return files


def _files_in(folder: Path, besides: Collection[str] = ()) -> list[Path]:
    """Without folders named in `besides`, and without hidden files."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in besides and name[0] != "."]  # os.walk descends into these
        found += [Path(parent, name) for name in names if name[0] != "."]
    return sorted(file for file in found if file.is_file())


def _names(paths: Sequence[str | Path]) -> str:
    return ", ".join(map(str, paths)) or "the standard library"


# Joining #


def joined(files: Sequence[Path], folder: Path) -> Path:
    """All bytes of `files` in one file in `folder`; the first process to take the lock writes it."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    size = sum(stat.st_size for _, stat in stats) + len(SEPARATOR) * (len(files) - 1)
    # The name depends on the paths, sizes and times of the files.
    identity = json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])
    target = folder / f"corpus-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}.bin"
    with writable(target, size), locked(folder / "corpus.lock"):
        if not target.exists() or target.stat().st_size != size:
            _join(files, target, size)
    return target


def _join(files: Sequence[Path], target: Path, size: int) -> None:
    """Write under another name, and rename when complete."""
    unfinished = target.with_suffix(".unfinished")
    try:
        with open(unfinished, "wb") as out:
            for number, file in enumerate(files):
                out.write(SEPARATOR if number else b"")
                for piece in _pieces(file):
                    out.write(piece)
        if unfinished.stat().st_size != size:
            raise ConfigError(
                f"Expected {size:,} bytes in {len(files)} files; found {unfinished.stat().st_size:,}: some changed "
                "while they were read. Start again when they do not."
            )
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _pieces(file: Path) -> Iterator[bytes]:
    with readable(file), open(file, "rb") as source:
        while piece := source.read(_PIECE_BYTES):
            yield piece


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"data.paths expects files that can be read; {path} cannot: {error}. Mend that, or leave it out."
        ) from error


@contextlib.contextmanager
def writable(target: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"Several files are joined into one; expected room for {format_size(size)} in {target.parent}, found: "
            f"{error}. Free space there, choose another run.folder, or give a single file, which is read where it is."
        ) from error
