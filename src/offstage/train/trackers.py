# SPDX-License-Identifier: Apache-2.0
"""`open_trackers`: the rows of `metrics.jsonl` for TensorBoard and Weights & Biases too, through their packages.

A tracker that cannot begin ends a new run before its first step. Later failures are reported once, and the run goes on
without it: a month of training does not end because a server cannot be reached.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import tomllib
from typing import Any, Protocol

from offstage import OffstageError
from offstage.train.config import TrainConfig, to_toml
from offstage.train.extras import optional
from offstage.train.metrics import Row
from offstage.train.run_folder import RunFolder

logger = logging.getLogger("offstage")


class Writer(Protocol):
    """One tracker's package."""

    def write(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Sends rows to a writer, until it fails."""

    def __init__(self, name: str, writer: Writer) -> None:
        self._name = name
        self._writer: Writer | None = writer

    def write(self, row: Row) -> None:
        """All numbers of the row that were measured."""
        if self._writer is None:
            return
        values = {name: float(value) for name, value in dataclasses.asdict(row).items() if value is not None}
        del values["step"]
        try:
            self._writer.write(values, row.step)
        except Exception as error:
            self._writer = None
            _warn(self._name, f"failed at step {row.step}, and the run goes on without it", error)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except Exception as error:
            _warn(self._name, "failed at the end", error)


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, config: TrainConfig, folder: RunFolder, after_step: int) -> None:
        """Hides the rows of steps after `after_step`, which this run repeats."""
        summary_writer = optional("torch.utils.tensorboard", "run.track='tensorboard'").SummaryWriter
        self._writer = summary_writer(str(folder.tensorboard), purge_step=after_step + 1 if after_step else None)

    def write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, which a resumed run of the trainer continues. Its own variables configure it."""

    def __init__(self, config: TrainConfig, folder: RunFolder, after_step: int) -> None:
        wandb = optional("wandb", "run.track='wandb'")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "offstage"),
            name=folder.path.name,
            id=_run_id(folder),
            resume="allow",
            dir=str(folder.path),
            config=tomllib.loads(to_toml(config)),
            settings=wandb.Settings(console="off"),  # standard output is left as it is
        )

    def write(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)  # in the background; rows of steps it has are ignored

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: RunFolder) -> str:
    """Of this folder: another run in it later is the same one, and a new folder of the same name is not."""
    known = folder.read_json(folder.wandb).get("id")
    if isinstance(known, str):
        return known
    made = secrets.token_hex(8)
    folder.write_json(folder.wandb, {"id": made})
    return made


_KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb}


def open_trackers(config: TrainConfig, folder: RunFolder, after_step: int) -> list[Tracker]:
    """Those of `run.track`, for rows after `after_step`."""
    trackers: list[Tracker] = []
    for name in config.run.track:
        try:
            trackers.append(Tracker(name, _KINDS[name](config, folder, after_step)))
        except Exception as error:
            if not after_step:
                for tracker in trackers:
                    tracker.close()
                found = f"{type(error).__name__}: {error}".rstrip(".")
                raise OffstageError(
                    f"run.track={name!r} expects a tracker that begins; found {found}. Mend that, or leave it out: "
                    "metrics.jsonl has the same numbers. W&B needs `wandb login`, or WANDB_MODE=offline."
                ) from error
            _warn(name, "could not begin again, and the run goes on without it", error)
    return trackers


def _warn(name: str, what: str, error: Exception) -> None:
    logger.warning(
        "tracker %s %s; metrics.jsonl has all rows: %s: %s",
        name,
        what,
        type(error).__name__,
        error,
    )
