# SPDX-License-Identifier: Apache-2.0
"""`RunSettings`: the section `run` of a run's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from offstage import ConfigError
from offstage.train.settings import at_least, checked

if TYPE_CHECKING:  # imported where it is used: it takes seconds, and `offstage train --help` needs none
    import torch


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long, where, and what is recorded."""

    folder: str = "runs/default"
    """Everything about the run: configuration, metrics, checkpoints, samples, report."""

    steps: int = 300
    """Optimizer steps in all, those before a resume included."""

    seed: int = 0
    """Of the first weights, the order of the data and the samples."""

    device: str = "auto"
    """auto: this machine's accelerator, or the CPU if there is none. Otherwise a device of torch, such as cpu."""

    resume: bool = True
    """Continue from the newest complete checkpoint in the folder, if there is one, with the same bits as an
    uninterrupted run."""

    fallback: bool = False
    """If the newest checkpoint is damaged, move it to checkpoints/damaged and continue from the newest that is not,
    with the steps since then made again. Without it, a damaged checkpoint is an error."""

    deterministic: bool = True
    """On an accelerator: kernels that give the same bits every time, so that a resume is exact there too. Attention's
    backward takes a little longer."""

    save_every: int = 100
    """Steps between checkpoints. 0: only at the end."""

    save_last: bool = True
    """Save after the last step, and when the run is stopped. Without it, and with save_every=0, nothing is saved."""

    keep_checkpoints: int = 2
    """How many of the newest are kept."""

    asynchronous_saves: bool = True
    """Write checkpoints while training continues."""

    eval_every: int = 100
    """Steps between evaluations. 0: never."""

    eval_batches: int = 8
    """Batches of one evaluation."""

    sample_every: int = 0
    """Steps between samples of text. 0: never."""

    sample_bytes: int = 200
    """Length of a sample; with data.tokenizer, in tokens."""

    not_finite: Literal["skip", "stop"] = "skip"
    """What happens if the loss or a gradient is NaN or infinite. skip: the step is left out and counted. stop: the run
    ends."""

    most_not_finite: int = 10
    """With skip: the run ends after so many skipped steps in a row."""

    progress: Literal["auto", "rich", "quiet", "json"] = "auto"
    """rich: a moving bar. json: one JSON object per line, for logs. quiet: a line every few seconds. auto: rich on a
    terminal, otherwise quiet."""

    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Send metrics to these too, besides metrics.jsonl. Needs `pip install 'offstage[tensorboard]'` or
    `'offstage[wandb]'`; WANDB_MODE=offline keeps W&B's files on this machine."""

    tensorboard: bool = False
    """The same as track with tensorboard."""

    observe_step: int = 5
    """The step whose memory and lanes are recorded for the report. 0: none."""

    memory_snapshot: bool = False
    """On CUDA: write torch's memory snapshot after the observed step, with a stack for each allocation so far."""

    def __post_init__(self) -> None:
        checked(self, "run")
        for name in ("steps", "keep_checkpoints", "eval_batches", "sample_bytes", "most_not_finite"):
            at_least(1, getattr(self, name), f"run.{name}")
        for name in ("seed", "save_every", "eval_every", "sample_every", "observe_step"):
            at_least(0, getattr(self, name), f"run.{name}")
        if self.memory_snapshot and not 1 <= self.observe_step <= self.steps:
            raise ConfigError(
                "run.memory_snapshot is written after the observed step; expected run.observe_step from 1 to run.steps="
                f"{self.steps}; found {self.observe_step}. Choose a step of the run."
            )
        if not self.folder:
            raise ConfigError("run.folder expects the path of a folder; found ''. Leave it out for runs/default.")
        if self.device != "auto":
            self.torch_device()
        asked = ("tensorboard", *self.track) if self.tensorboard else self.track
        object.__setattr__(self, "track", tuple(dict.fromkeys(asked)))

    def torch_device(self) -> torch.device:
        """The device, with "auto" resolved. It may not exist: its first use raises."""
        import torch

        if self.device == "auto":
            return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        try:
            return torch.device(self.device)
        except RuntimeError:
            raise ConfigError(
                f"run.device expects auto or a device of torch, such as cpu; found {self.device!r}. Leave it out for "
                "auto."
            ) from None
