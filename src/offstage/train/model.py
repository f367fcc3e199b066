# SPDX-License-Identifier: Apache-2.0
"""`build`: the model that settings describe. This module exports the trainer's models and their sizes.

    model = build(ModelSettings(size="150M"), device=device, dtype=torch.bfloat16, sequence=1024)
    model.checkpoint_layers()
    model.loss(tokens, targets).backward()

`model_sizes.py` has the named sizes, `blocks.py` one layer, `transformer.py` the whole model, `language_model.py` the
interface and the first weights. `stages.py` cuts a model for pipelines; `causal_lm.py` puts a model of the transformers
package behind the same interface, and `pretrained.py` reads its weights.
"""

from __future__ import annotations

import torch

from offstage.train.blocks import Block
from offstage.train.causal_lm import CausalLM, build_causal_lm
from offstage.train.config import ModelSettings
from offstage.train.language_model import LanguageModel
from offstage.train.model_sizes import BYTES, SIZES, ModelConfig, num_active_parameters, num_parameters, with_overrides
from offstage.train.stages import Stage, mean_loss, stages
from offstage.train.transformer import Transformer

__all__ = [
    "BYTES",
    "SIZES",
    "Block",
    "CausalLM",
    "LanguageModel",
    "ModelConfig",
    "Stage",
    "Transformer",
    "build",
    "config_of",
    "mean_loss",
    "num_active_parameters",
    "num_parameters",
    "stages",
]


def config_of(settings: ModelSettings, vocabulary: int = BYTES) -> ModelConfig:
    """The sizes that `settings` name, with a vocabulary of at least `vocabulary`."""
    size = SIZES[settings.size]
    return with_overrides(
        size,
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        hidden=settings.hidden,
        experts=settings.experts,
        experts_per_token=settings.experts_per_token,
        vocabulary=max(size.vocabulary, vocabulary),
    )


def build(
    settings: ModelSettings,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    vocabulary: int = BYTES,
    sequence: int,
    seed: int = 0,
    home: torch.device | None = None,
) -> LanguageModel:
    """The model that `settings` describe, with its first weights, allocated on `device` without a second copy.

    Those in the folder `settings.weights`, or random ones.

    On the meta device it has no weights: for planning, and for cutting into stages or shards before `materialize`.
    `sequence` is the longest input. `home`: where it is allocated, if not on `device`: random weights of offstage's own
    models are made there one by one, with the bits of `device`; those of transformers models are the CPU's.
    """
    if settings.described_by is not None:
        return build_causal_lm(
            settings.described_by,
            weights=settings.weights,
            device=device if home is None else home,
            dtype=dtype,
            vocabulary=vocabulary,
            sequence=sequence,
            seed=seed,
        )
    model = Transformer(config_of(settings, vocabulary), device="meta", dtype=dtype)
    if torch.device(device).type != "meta":
        model.materialize(device, seed, home)
    return model
