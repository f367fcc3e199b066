# SPDX-License-Identifier: Apache-2.0
"""`TokenFile`: documents as one memory-mapped file of tokens, made once, in the run's folder.

    corpus = corpus_for(config.data, run_folder, print, stop_requests.check)  # a TokenFile, or a Corpus of bytes

`tokens-<identity>.bin` has the tokens and nothing else; the `.json` beside it has their number and format, a hash of
them all, and what they were made from. The name depends on that too: other files, another tokenizer or another column
make another file, and a run that resumes compares the hash of the tokens with that of its checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from offstage import ConfigError
from offstage.config import format_size
from offstage.train.config import DataSettings
from offstage.train.corpus import Corpus, locked
from offstage.train.documents import Documents, Piece
from offstage.train.reading import BadFileError, read_object
from offstage.train.tokenizer import Encoder, encoder_for

Say = Callable[[str], object]
Check = Callable[[], object]

_BATCH = 4 * 2**20
"""Characters that are encoded together: enough for all CPUs. A tokenizer needs some hundred bytes for each."""
_EVERY_S = 15.0
"""How often progress is reported."""


class TokenFile(Corpus):
    """Tokens in a file that is complete."""

    unit = "token"

    def __init__(self, path: Path) -> None:
        about = _about(path)
        assert about is not None, "_prepared() has just checked it"
        self.path, self.identity = path, about["digest"]
        self._array = np.memmap(path, dtype=np.dtype(about["dtype"]), mode="r")


def _nothing(*_: object) -> None:
    return


def corpus_for(settings: DataSettings, cache: Path, say: Say = _nothing, check: Check = _nothing) -> Corpus:
    """The data that `settings` name, made into tokens if they say so, which may take long.

    `say` is told of the progress; `check` is called now and then, and what it raises ends the work.
    """
    if not settings.tokenizes:
        return Corpus(settings.paths, cache=cache)
    return TokenFile(_prepared(settings, encoder_for(settings), cache, say, check))


def _prepared(settings: DataSettings, encoder: Encoder, folder: Path, say: Say, check: Check) -> Path:
    """The file of tokens in `folder`; the first process to take the lock writes it."""
    documents = Documents(settings.paths, settings.column, folder)
    made_from = {"files": _identity(documents), "column": settings.column, "encoder": encoder.identity}
    name = hashlib.blake2b(json.dumps(made_from).encode(), digest_size=8).hexdigest()
    target = folder / f"tokens-{name}.bin"
    with _writable(folder), locked(folder / "corpus.lock"):
        if _about(target) is None:
            _write(target, documents, encoder, made_from, _Reports(say, check, len(documents.sources)))
    return target


def _identity(documents: Documents) -> str:
    """Depends on the paths, sizes and times of the files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in documents.files:
        stat = file.stat()
        digest.update(json.dumps([str(file.resolve()), stat.st_size, stat.st_mtime_ns]).encode())
    return f"{len(documents.files)} files, {digest.hexdigest()}"


def _about(target: Path) -> dict[str, Any] | None:
    """What is known about the tokens; `None` if they are not there, or not all of them."""
    try:
        about = read_object(target.with_suffix(".json"))
        whole = target.stat().st_size == about["tokens"] * np.dtype(about["dtype"]).itemsize
    except (OSError, BadFileError, KeyError, TypeError):
        return None
    return about if whole and isinstance(about.get("digest"), str) else None


# Writing #


class _Reports:
    """Tells of the progress every few seconds."""

    def __init__(self, say: Say, check: Check, sources: int) -> None:
        self.say, self._check, self._sources = say, check, sources
        self._began = self._said = time.monotonic()

    def after(self, batch: list[Piece], written: _Written) -> None:
        """`batch` has been written. Raises if the work has to end."""
        self._check()
        now = time.monotonic()
        if now - self._said > _EVERY_S:
            self._said = now
            self.say(
                f"tokenizing: {format_size(written.characters)} of text, in file {batch[-1].source + 1} of "
                f"{self._sources}; {written.tokens:,} tokens, {written.tokens / (now - self._began):,.0f} per second"
            )


@dataclass
class _Written:
    """What is in the file so far."""

    digest: Any
    tokens: int = 0
    documents: int = 0
    characters: int = 0


def _write(
    target: Path, documents: Documents, encoder: Encoder, made_from: dict[str, str | None], reports: _Reports
) -> None:
    """Write under another name, and rename when complete."""
    unfinished, about = target.with_suffix(".unfinished"), target.with_suffix(".json")
    about.unlink(missing_ok=True)  # of a damaged file
    try:
        with open(unfinished, "wb") as out:
            written = _encode_all(out, documents, encoder, reports)
            out.flush()
            os.fsync(out.fileno())
        _check_documents(documents, written, made_from)
        values = {
            "tokens": written.tokens,
            "documents": written.documents,
            "left_out": documents.empty,
            "dtype": encoder.dtype.name,
            "digest": written.digest.hexdigest(),
            "made_from": made_from,
        }
        about.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)
    number = f"{written.documents:,} document{'s' * (written.documents > 1)}"
    empty = f"; {documents.empty:,} without text were left out" if documents.empty else ""
    reports.say(f"tokenized {number}: {written.tokens:,} tokens in {target}{empty}")


def _check_documents(documents: Documents, written: _Written, made_from: dict[str, str | None]) -> None:
    if not written.documents:
        raise ConfigError(
            f"Expected text in data.paths; found none in {len(documents.files):,} files. Give other ones."
        )
    if _identity(documents) != made_from["files"]:
        raise ConfigError(
            "Expected data.paths that stay as they are; found that some changed while they were read. Start again "
            "when they do not."
        )


def _encode_all(out: BinaryIO, documents: Documents, encoder: Encoder, reports: _Reports) -> _Written:
    written, begins = _Written(hashlib.blake2b(digest_size=16)), True
    for batch in _batches(documents):
        for piece, tokens in zip(batch, encoder.encode([piece.text for piece in batch]), strict=True):
            parts = [encoder.before if begins else (), tokens, (encoder.end,) if piece.last else ()]
            data = np.concatenate([np.fromiter(part, dtype=encoder.dtype) for part in parts]).tobytes()
            out.write(data)
            written.digest.update(data)
            written.tokens += len(data) // encoder.dtype.itemsize
            written.documents += piece.last
            written.characters += len(piece.text)
            begins = piece.last
        reports.after(batch, written)
    return written


def _batches(documents: Documents) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in documents:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"Tokens are kept in a file; expected room for it in {folder}, found: {error.strerror or error}. Free "
            "space there, or choose another run.folder."
        ) from error
