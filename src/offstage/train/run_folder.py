# SPDX-License-Identifier: Apache-2.0
"""`RunFolder`: the files of a run, locked by one run at a time.

config.toml      the settings, what "auto" came to included
run.json         command, versions, machine, plan
metrics.jsonl    a row per step; metrics.damaged-1.jsonl as it was before damaged lines were left out
fit_plan.json    what the run has decided within device_peak
receipt.json     what the optimizer has really moved
observed.json    memory and lanes of one step
memory_snapshot.pickle    torch's memory snapshot after that step, if it was asked for
samples.txt      text that the model wrote
model/           config.json of a transformers model
tokenizer/       a copy of the tokenizer, if there is one
tokens-….bin     the data as tokens, if a tokenizer or a column is given; tokens-….json is about it
tensorboard/     event files, if run.track names it
wandb.json       the identity of the run in W&B, if run.track names it; wandb/ has its files
checkpoints/     step-00000100, …; damaged/ has those that run.fallback passed over
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from offstage import OffstageError
from offstage.train.reading import BadFileError, read_object

TOKENS = "tokens-*"
"""Files of tokens, and what is about them."""


class RunFolder:
    """The files of one run. Only the first rank writes them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # a later chdir changes nothing
        self.config = self.path / "config.toml"
        self.run = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.fit_plan = self.path / "fit_plan.json"
        self.receipt = self.path / "receipt.json"
        self.observed = self.path / "observed.json"
        self.memory_snapshot = self.path / "memory_snapshot.pickle"
        self.samples = self.path / "samples.txt"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.model = self.path / "model"
        self.tokenizer = self.path / "tokenizer"
        self.wandb = self.path / "wandb.json"
        self.begun = False
        """Whether the run has been accepted. Until then, what it makes here is removed if it fails.

        Tokens stay: making them may have taken hours.
        """
        self._lock = self.path / ".lock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[RunFolder]:
        """Within: no other process trains here. The system releases the lock however the process ends.

        If the run fails before it has `begun`, the folder is left as it was found.
        """
        missing = [path for path in (self.checkpoints, self._lock, self.path, *self.path.parents) if not path.exists()]
        with named(self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = self._lock.open("a")
        with lock:
            self._take(lock)
            found = set(self.path.iterdir()).difference(missing)
            try:
                yield self
            except BaseException:
                if not self.begun:
                    self._remove_made(found.union(missing))
                    _remove(missing)
                raise

    def _remove_made(self, others: set[Path]) -> None:
        """Remove what is in the folder besides `others` and complete files of tokens."""
        made = set(self.path.iterdir()).difference(others)
        for folder in made & {self.tensorboard, self.wandb.with_suffix("")}:
            shutil.rmtree(folder, ignore_errors=True)
        _remove(path for path in made if not path.match(TOKENS))

    def _take(self, lock: TextIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(self._lock)):
                return
        except FileNotFoundError:
            pass  # a refused run has just removed it
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise OffstageError(f"{self.path} could not be locked: {error}. Choose another run.folder.") from error
        raise OffstageError(
            f"Another process is training in {self.path}; expected one at a time. Wait for it, or choose another "
            "run.folder."
        )

    def make(self, path: Path) -> None:
        """Make a folder in it, unless it is there."""
        with named(path):
            path.mkdir(exist_ok=True)

    def write_text(self, path: Path, text: str) -> None:
        """Replace a small file atomically."""
        with named(path):
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)

    def write_json(self, path: Path, values: Mapping[str, Any]) -> None:
        self.write_text(path, json.dumps(values, indent=1, default=str) + "\n")

    def read_json(self, path: Path) -> dict[str, Any]:
        """What `write_json` wrote; empty if the file is missing or damaged."""
        try:
            return read_object(path)
        except (FileNotFoundError, BadFileError):
            return {}

    def append_sample(self, step: int, prompt: bytes, written: bytes) -> None:
        """Add to samples.txt: the prompt in brackets, and bytes that are not UTF-8 as escapes."""
        shown = [part.decode("utf-8", errors="backslashreplace") for part in (prompt, written)]
        with named(self.samples), self.samples.open("a", encoding="utf-8") as file:
            file.write(f"--- step {step} ---\n[{shown[0]}]{shown[1]}\n\n")


def _remove(paths: Iterable[Path]) -> None:
    """Files and empty folders, in this order. What cannot be removed stays, and so does what is in a folder."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the path and the remedy to errors of the file system."""
    try:
        yield
    except OSError as error:
        raise OffstageError(
            f"{path} could not be written: {error.strerror or error}. Complete checkpoints are unchanged: fix the "
            "cause, and run the same command again to continue from the newest."
        ) from error
