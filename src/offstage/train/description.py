# SPDX-License-Identifier: Apache-2.0
"""What a run keeps in its folder about a transformers model, and what it says about the weights it begins with.

`RUN/model/` has the config.json that the model was built from, and its generation_config.json if there was one: with
them a run is resumed and exported when the folder that it began from is gone.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from offstage import ConfigError
from offstage.train.causal_lm import CausalLM, description_of
from offstage.train.config import ModelSettings
from offstage.train.pretrained import weight_files
from offstage.train.reading import BadFileError, read_bytes
from offstage.train.run_folder import RunFolder

CONFIG, GENERATION = "config.json", "generation_config.json"


def keep(folder: RunFolder, settings: ModelSettings, model: Any, *, resumed: bool) -> None:
    """Write what describes `model`; what is there stays if the run was resumed and the original is gone."""
    named = settings.described_by
    source = None if named is None else description_of(named)
    if named is None or (resumed and (source is None or not source.is_file())):
        return
    assert isinstance(model, CausalLM)
    folder.make(folder.model)
    folder.write_text(folder.model / CONFIG, model.lm.config.to_json_string() if source is None else _text(source))
    beside = [Path(one).expanduser() / GENERATION for one in (settings.weights, source and source.parent) if one]
    generation = next((path for path in beside if path.is_file()), None)
    if generation is not None:
        folder.write_text(folder.model / GENERATION, _text(generation))
    elif not resumed:  # of a run that was given up
        (folder.model / GENERATION).unlink(missing_ok=True)


def _text(path: Path) -> str:
    try:
        return read_bytes(Path(os.path.realpath(path))).decode("utf-8")
    except (BadFileError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}. Expected the JSON of a transformers model: mend the file.") from error


def without_weights(settings: ModelSettings, folder: RunFolder) -> ModelSettings:
    """The same model, for weights from a checkpoint; described by what the run has kept if the original is gone."""
    named, kept = settings.described_by, folder.model / CONFIG
    if named is None:
        return settings
    source = description_of(named)
    if (source is None or not source.is_file()) and kept.is_file():
        named = str(kept)
    return dataclasses.replace(settings, transformers=named, weights=None)


def first_weights(settings: ModelSettings, model: Any, device: torch.device) -> str | None:
    """A sentence about the weights that a new run of a transformers model begins with."""
    if settings.described_by is None:
        return None
    assert isinstance(model, CausalLM)
    if model.weights is not None:
        dtype = str(settings.dtype_on(device)).removeprefix("torch.")
        why = f"model.dtype=auto on {device.type}" if settings.dtype == "auto" else "model.dtype"
        return f"beginning with the weights in {model.weights.folder}: {model.weights}, held in {dtype} ({why})"
    said = f"beginning with random weights: model.transformers={settings.described_by} gives the model's shape only"
    source = description_of(settings.described_by)
    if source is not None and (files := weight_files(source.parent)):
        said += f". {source.parent} holds weights ({files[0]}): add --model.weights {source.parent} to begin with them"
    return said
