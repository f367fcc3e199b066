# SPDX-License-Identifier: Apache-2.0
"""`model_for`: the model of a run's settings, with a vocabulary for its data and with its adapters."""

from __future__ import annotations

import torch

from offstage.train.config import TrainConfig
from offstage.train.language_model import LanguageModel
from offstage.train.lora import add_adapters
from offstage.train.model import build
from offstage.train.tokenizer import encoder_for


def model_for(
    config: TrainConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    vocabulary: int | None = None,
    home: torch.device | None = None,
) -> LanguageModel:
    """As `build` makes it; adapters have no values yet. Without `vocabulary`, the tokenizer of the data is read."""
    model = build(
        config.model,
        device=device,
        dtype=dtype,
        vocabulary=encoder_for(config.data).vocabulary if vocabulary is None else vocabulary,
        sequence=config.data.sequence,
        seed=config.run.seed,
        home=home,
    )
    add_adapters(model, config.lora)
    return model
