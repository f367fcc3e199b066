# SPDX-License-Identifier: Apache-2.0
"""Reading the files of a run folder, whatever is in them: regular files only, of bounded size, as strict JSON.

A file that is damaged, or that a stranger made, raises `BadFileError`; nothing is read that is not in the folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from offstage import OffstageError
from offstage.config import format_size

MOST_OBJECT_BYTES = 16 * 2**20
"""Of a file that is read at once. Parsed JSON takes up to thirty times as much memory as its text."""
MOST_LINES_BYTES = 4 * 2**30
"""Of a file that is read line by line."""
MOST_LINE_BYTES = 64 * 2**10
_MOST_DIGITS = 20
"""Of a whole number: those of 64 bits, with a sign."""


class BadFileError(OffstageError):
    """A file is not what was expected; the message says what was expected and what was found."""


@contextlib.contextmanager
def opened(path: Path, most_bytes: int) -> Iterator[tuple[BinaryIO, int]]:
    """The file and its size. A missing one is a `FileNotFoundError`, any other failure a `BadFileError`."""
    try:
        # First without opening it: to open a device may already have an effect.
        _check_kind(os.stat(path, follow_symlinks=False).st_mode)
        # A pipe that has taken its place since then is not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            _check_kind(found.st_mode)
            if found.st_size > most_bytes:
                raise BadFileError(
                    f"expected at most {format_size(most_bytes)}; found {format_size(found.st_size)}"
                ) from None
            yield file, found.st_size
    except FileNotFoundError:
        raise
    except OSError as error:
        found_instead = "a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise BadFileError(f"expected a file that can be read; found: {found_instead}") from error


def _check_kind(mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
    found = kinds.get(stat.S_IFMT(mode), "a device or socket")
    raise BadFileError(f"expected a regular file; found {found}")


def read_bytes(path: Path, most_bytes: int = MOST_OBJECT_BYTES) -> bytes:
    """All of a file."""
    with opened(path, most_bytes) as (file, size):
        return file.read(size)  # a file that grows meanwhile is read as far as it was checked


def read_tail(path: Path, most_bytes: int) -> bytes:
    """The end of a file that may be long."""
    with opened(path, MOST_LINES_BYTES) as (file, size):
        file.seek(max(0, size - most_bytes))
        return file.read(most_bytes)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that is the whole file."""
    return parse_object(read_bytes(path))


def read_lines(path: Path) -> Iterator[bytes]:
    """Every line with its newline, and a last one that may have none. One that is too long is cut."""
    with opened(path, MOST_LINES_BYTES) as (file, left):
        while left > 0 and (line := file.readline(MOST_LINE_BYTES)):
            left -= len(line)
            if len(line) < MOST_LINE_BYTES or line.endswith(b"\n"):
                yield line
                continue
            yield line + b"\n"
            while left > 0 and (rest := file.readline(MOST_LINE_BYTES)):
                left -= len(rest)
                if rest.endswith(b"\n"):
                    break


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Numbers that are not finite are `None`, which is how the trainer writes them."""
    try:
        found = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadFileError(f"expected UTF-8; found byte {data[error.start]:#04x} at {error.start}") from None
    except RecursionError:
        raise BadFileError("expected an object; found one nested too deeply") from None
    except ValueError as error:
        raise BadFileError(f"expected JSON; found an error in it: {error}") from None
    if not isinstance(found, dict):
        raise BadFileError(f"expected an object; found a JSON {type(found).__name__}")
    return found


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=lambda _: None)
