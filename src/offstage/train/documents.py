# SPDX-License-Identifier: Apache-2.0
"""`Documents`: the texts of files, one after the other: a file, or a row of a file that the package datasets reads.

A long text comes in pieces, cut after a line where there is one, so that memory stays bounded whatever the files hold.
"""

from __future__ import annotations

import codecs
import glob
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage import ConfigError
from offstage.train.corpus import files_of, readable, stdlib_files
from offstage.train.extras import optional

PIECE = 2**20
"""Most characters, or bytes of a file, of a piece."""
_READERS: dict[str, tuple[str, dict[str, str]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {}),
}
"""By the end of a file's name: what the package calls its reader, and settings of it."""
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class Piece:
    """Part of a document."""

    text: str
    source: int
    """Which of the sources, from 0."""
    last: bool
    """Whether the document ends here."""


class Documents:
    """The documents of `paths`, in the order of the paths and, in folders, of their files."""

    def __init__(self, paths: Sequence[str], column: str | None, cache: Path) -> None:
        """`column`: of rows; without it, a file is a document. `cache` is the run's folder."""
        self._column, self._cache = column, cache
        self.sources: list[Path] = []
        """Files, and folders that `save_to_disk` wrote."""
        self.files: list[Path] = []
        """All files that are read."""
        self.empty = 0
        """Documents without text, which were left out."""
        if not paths:
            self.sources = self.files = stdlib_files()
            return
        for path in (Path(given).expanduser() for given in paths):
            found = files_of([path], besides=cache)
            self.files += found
            self.sources += [path] if column is not None and _is_saved(path) else found
        self.sources, self.files = list(dict.fromkeys(self.sources)), list(dict.fromkeys(self.files))
        for source in self.sources if column is not None else ():
            _reader(source)  # raises for one that has none

    def __iter__(self) -> Iterator[Piece]:
        self.empty = 0
        for number, source in enumerate(self.sources):
            texts = [_lines_of(source)] if self._column is None else map(_cut, self._rows(source))
            for text in texts:
                yield from self._pieces(text, number)

    def _pieces(self, parts: Iterator[str], source: int) -> Iterator[Piece]:
        held: str | None = None
        for part in parts:
            if held is not None:
                yield Piece(held, source, last=False)
            held = part
        if held:
            yield Piece(held, source, last=True)
        else:
            self.empty += 1

    def _rows(self, source: Path) -> Iterator[str]:
        assert self._column is not None
        datasets = optional("datasets", f"data.column={self._column!r}")
        with tempfile.TemporaryDirectory(prefix=".datasets-", dir=self._cache) as cache:
            try:
                for number, row in enumerate(_read(datasets, source, cache)):
                    yield self._text(row, f"row {number:,} of {source}")
            except (ConfigError, MemoryError):
                raise
            except Exception as error:  # those of every file format that the package reads
                raise ConfigError(
                    f"data.paths expects files that the package datasets {datasets.__version__} reads; found in "
                    f"{source}: {type(error).__name__}: {error}. Mend the file, or leave it out."
                ) from error

    def _text(self, row: dict[str, Any], where: str) -> str:
        if self._column not in row:
            raise ConfigError(
                f"data.column={self._column!r} expects a column of that name; {where} has {', '.join(row) or 'none'}. "
                "Give one of these."
            )
        text = row[self._column]
        if text is not None and not isinstance(text, str):
            raise ConfigError(
                f"data.column={self._column!r} expects text; found {type(text).__name__} in {where}. Give another "
                "column, or make it text."
            )
        return text or ""


def _is_saved(path: Path) -> bool:
    """Whether `save_to_disk` of one dataset wrote this folder."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(one.name for one in path.iterdir() if _is_saved(one))
        raise ConfigError(
            f"data.paths expects one dataset; {path} has several: {', '.join(splits)}. Give the folder of one, such as "
            f"{path / (splits or ['train'])[0]}."
        )
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _reader(source: Path) -> tuple[str, dict[str, str]] | None:
    """How to read a file of rows; `None` for a folder of `save_to_disk`."""
    if source.is_dir():
        return None
    suffixes = [suffix.lower() for suffix in source.suffixes]
    if suffixes[-1:] and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in _READERS:
        raise ConfigError(
            f"data.column is for files of rows, whose names end in {', '.join(_READERS)} (or {', '.join(_COMPRESSED)} "
            f"after it); found {source}. Leave it out of data.paths, or leave data.column out for plain text."
        )
    return _READERS[suffixes[-1]]


def _read(datasets: Any, source: Path, cache: str) -> Any:
    """The rows of one source, read as they are asked for and in their order."""
    reader = _reader(source)
    if reader is None:
        return datasets.load_from_disk(str(source.resolve()))
    if not source.stat().st_size:
        return ()
    kind, settings = reader
    file = glob.escape(str(source.resolve()))  # the package takes patterns
    return datasets.load_dataset(kind, data_files=file, split="train", streaming=True, cache_dir=cache, **settings)


def _lines_of(file: Path) -> Iterator[str]:
    """The text of a file, in pieces that end after a line."""
    decoder, held, place = codecs.getincrementaldecoder("utf-8")(), "", 0
    with readable(file), open(file, "rb") as source:
        while True:
            data = source.read(PIECE)
            try:
                held += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"data.tokenizer expects text in UTF-8; {file} has other bytes near byte {place + error.start:,}. "
                    "Convert the file, or leave it out; without a tokenizer, any bytes are data."
                ) from error
            place += len(data)
            if not data:
                break
            *whole, held = _cut(held) if len(held) >= PIECE else (held,)
            yield from whole
    if held:
        yield held


def _cut(text: str) -> Iterator[str]:
    """`text` in pieces of at most `PIECE`, cut after a line where there is one."""
    start = 0
    while len(text) - start > PIECE:
        stop = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]
