# SPDX-License-Identifier: Apache-2.0
"""`optional`: packages that only some settings need, imported where they are used; `check_packages`: before a run."""

from __future__ import annotations

import importlib
from typing import Any

from offstage import ConfigError
from offstage.train.config import TrainConfig

EXTRAS = {
    "tokenizers": "hf",
    "datasets": "datasets",
    "torch.utils.tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""The extra of pyproject.toml that installs each."""


def optional(package: str, setting: str) -> Any:
    """The package; `setting` is what asks for it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = EXTRAS[package]
        raise ConfigError(
            f"{setting} expects the package {package.rpartition('.')[2]}; found: {error}. Run "
            f"`pip install 'offstage[{extra}]'`, or leave the setting out."
        ) from error


def check_packages(config: TrainConfig) -> None:
    """Raise if a package that these settings need cannot be imported."""
    if config.data.tokenizer is not None:
        optional("tokenizers", f"data.tokenizer={config.data.tokenizer!r}")
    if config.data.column is not None:
        optional("datasets", f"data.column={config.data.column!r}")
    for tracker in config.run.track:
        optional({"tensorboard": "torch.utils.tensorboard"}.get(tracker, tracker), f"run.track={tracker!r}")
