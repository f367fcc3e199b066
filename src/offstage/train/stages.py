# SPDX-License-Identifier: Apache-2.0
"""`Stage`: a piece of a `Transformer`, for the schedules of `torch.distributed.pipelining`.

    model = build(settings, device="meta", dtype=dtype, sequence=sequence)
    stage = stages(model, num_stages)[index]
    stage.materialize(device, seed)  # allocates this piece only
    schedule = Schedule1F1B(PipelineStage(stage, index, num_stages, device), micro_batches, loss_fn=mean_loss)
    if stage.first: schedule.step(tokens)
    elif stage.last: schedule.step(target=targets, targets=targets, losses=losses)
    else: schedule.step()

The last stage computes the loss inside its forward (hence `targets` as its argument as well), so that logits exist in
slices only, and hooks (FSDP2, offloading) see all of a module's parameters used in its forward.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate, pairwise

import torch
from torch import nn

from offstage import ConfigError
from offstage.train.language_model import LanguageModel, initialize
from offstage.train.transformer import Transformer, run_blocks, with_balance


class Stage(nn.Module):
    """Blocks `start` to `stop` of a model, under their names in the model: a checkpoint fits any number of stages.

    The first takes tokens; the last returns logits, or with `targets` the mean loss (shape [1]: schedules concatenate
    the outputs of micro-batches). In between: features [B, T, W] and, with experts, the balancing loss so far.
    """

    def __init__(self, model: Transformer, start: int, stop: int) -> None:
        super().__init__()
        self.config, self.vocabulary = model.config, model.vocabulary
        self.first, self.last = start == 0, stop == model.config.layers
        self.embedding = model.embedding if self.first else None
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in range(start, stop)})
        self.norm = model.norm if self.last else None
        self.head = model.head if self.last else None
        self.checkpointed = model.checkpointed

    def materialize(self, device: torch.device | str, seed: int = 0) -> None:
        """Allocate a stage of a model on meta, with the first weights of the whole model."""
        self.to_empty(device=device)
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int = 0) -> None:
        """Fill in first weights."""
        initialize(self, self.config.layers, seed)

    def layers(self) -> list[nn.Module]:
        """The blocks in order."""
        return list(self.blocks.values())

    def groups(self) -> list[nn.Module | list[nn.Module]]:
        """See `LanguageModel.groups`."""
        ends = [[self.norm, self.head]] if self.norm is not None and self.head is not None else []
        return [*self.layers(), *ends]

    def checkpoint_layers(self, numbers: Collection[int] | None = None) -> None:
        """See `LanguageModel.checkpoint_layers`; numbers count from the model's first block."""
        self.checkpointed = frozenset(range(self.config.layers) if numbers is None else numbers)

    def forward(
        self, x: torch.Tensor, balance: torch.Tensor | None = None, *, targets: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = x if self.embedding is None else self.embedding(x)
        numbered = ((int(number), block) for number, block in self.blocks.items())
        x, added = run_blocks(self.config, numbered, x, self.checkpointed)
        if added is not None:
            balance = added if balance is None else balance + added
        if self.norm is None or self.head is None:
            return x if balance is None else (x, balance)
        result: torch.Tensor = self.head(self.norm(x), targets)
        if targets is None:
            return result
        return with_balance(self.config, result, balance if self.training else None).unsqueeze(0)


def mean_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The `loss_fn` of a schedule: the last stage has already computed the loss."""
    return output.squeeze(0)


def stages(model: LanguageModel, num_stages: int) -> list[Stage]:
    """`model` in `num_stages` pieces of as equal a number of blocks as possible; earlier pieces are the larger ones."""
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"Pipeline stages expect offstage's own Transformer; found {type(model).__name__}, whose forward cannot be "
            "cut. Use a size instead of model.transformers, or parallel.stages=1."
        )
    layers = model.config.layers
    if not 1 <= num_stages <= layers:
        raise ConfigError(
            f"Expected from 1 to {layers} pipeline stages, one block for each at least; found {num_stages}. Use fewer "
            "stages, or more layers."
        )
    counts = [layers // num_stages + (number < layers % num_stages) for number in range(num_stages)]
    return [Stage(model, start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
