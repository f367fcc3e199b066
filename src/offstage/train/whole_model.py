# SPDX-License-Identifier: Apache-2.0
"""`model_for`: the model of a run's settings, with a vocabulary for its data and its adapters; where it is made."""

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


def begins_on_host(config: TrainConfig, device: torch.device, vocabulary: int | None = None) -> bool:
    """Whether the model is made on the host: weights live there, or would by themselves take more than device_peak."""
    if config.offload.moves_weights or not config.fit.decides or device.type == "cpu":
        return config.offload.moves_weights
    dtype = config.model.dtype_on(device)
    model = model_for(config, device="meta", dtype=dtype, vocabulary=vocabulary)
    return sum(param.nbytes for param in model.parameters()) > config.fit.peak_bytes
