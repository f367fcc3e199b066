# SPDX-License-Identifier: Apache-2.0
"""`Passes`: forward and backward of one step's micro-batches, through a whole model or through pipeline stages.

passes = passes_for(config, parallel)
with activation_mode(config.activations, passes):
    loss = passes.gradients(tokens, optimizer, mark)  # then clip, step, zero_grad
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from offstage import OffloadedOptimizer, offload_activations
from offstage.activations.offload import ActivationOffload
from offstage.tensors import reshard
from offstage.train.config import ActivationSettings, TrainConfig
from offstage.train.lora import initialize_adapters
from offstage.train.model import BYTES, LanguageModel, stages
from offstage.train.parallel import Parallel
from offstage.train.stages import Stage, mean_loss
from offstage.train.whole_model import begins_on_host, model_for

Mark = Callable[[str], None]
"""Called with the phase that begins: ``"forward"``, ``"backward"``."""

SCHEDULES: dict[str, Any] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}
STAGES_PER_RANK = {"Interleaved1F1B": 2}
TEMPERATURE = 0.8
"""Of samples: below 1, because short samples of a small model are then easier to judge."""


class Passes(abc.ABC):
    """Every rank calls every method, with the tokens [sequences, sequence + 1] of its data rank."""

    model: nn.Module
    """This rank's part of the model, under the names of the whole."""

    pieces: list[nn.Module]
    """The modules that are called: the model, or the stages of this rank."""

    @abc.abstractmethod
    def gradients(self, tokens: torch.Tensor, optimizer: OffloadedOptimizer, mark: Mark) -> torch.Tensor:
        """Backward of the whole step. Returns the mean loss on ranks that have it; 0 on the others."""

    @abc.abstractmethod
    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss for an evaluation, without gradients."""

    @abc.abstractmethod
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T, vocabulary] on every rank, without gradients."""

    def layers(self) -> list[nn.Module]:
        """The layers of this rank, in order."""
        return [layer for piece in self.pieces for layer in piece.layers()]  # type: ignore[operator]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within: evaluation mode, without gradients."""
        for piece in self.pieces:
            piece.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for piece in self.pieces:
                reshard(piece)  # a forward without backward keeps gathered weights
                piece.train()


class Whole(Passes):
    """The model in one piece, sharded or not."""

    def __init__(self, model: LanguageModel, micro_batches: int) -> None:
        self.model, self.pieces = model, [model]
        self._model, self._micro_batches = model, micro_batches

    def gradients(self, tokens: torch.Tensor, optimizer: OffloadedOptimizer, mark: Mark) -> torch.Tensor:
        parts = tokens.chunk(self._micro_batches)
        losses = []
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last else optimizer.accumulate():
                mark("forward")
                loss = self._model.loss(part[:, :-1], part[:, 1:])
                mark("backward")
                (loss / len(parts)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.loss(tokens[:, :-1], tokens[:, 1:])

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.logits(tokens)


class Staged(Passes):
    """Some stages of the model on each rank, with micro-batches in a pipeline schedule."""

    def __init__(self, owned: dict[int, Stage], parallel: Parallel, config: TrainConfig) -> None:
        """`owned`: this rank's stages by their numbers."""
        self.pieces = list(owned.values())
        self.model = self.pieces[0] if len(owned) == 1 else JoinedStages(list(owned.values()))
        self._owned, self._parallel = owned, parallel
        self._num_stages = len(owned) * parallel.stages
        self._group = parallel.stage_group
        group = self._group
        pipelined = [
            PipelineStage(piece, number, self._num_stages, parallel.device, group=group)
            for number, piece in owned.items()
        ]
        schedule = SCHEDULES[config.parallel.schedule]
        several = issubclass(schedule, ScheduleInterleaved1F1B)
        self._schedule = schedule(pipelined if several else pipelined[0], config.data.micro_batches, loss_fn=mean_loss)

    def gradients(self, tokens: torch.Tensor, optimizer: OffloadedOptimizer, mark: Mark) -> torch.Tensor:
        mark("forward")  # the schedule interleaves forwards and backwards
        inputs = [tokens[:, :-1]] if 0 in self._owned else []
        losses: list[torch.Tensor] = []
        if self._has_last:
            targets = tokens[:, 1:]
            self._schedule.step(*inputs, target=targets, targets=targets, losses=losses)
            return torch.stack([loss.detach() for loss in losses]).mean()
        self._schedule.step(*inputs)
        return torch.zeros((), dtype=torch.float32, device=self._parallel.device)

    @property
    def _has_last(self) -> bool:
        return self._num_stages - 1 in self._owned

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self._relay(tokens[:, :-1], targets=tokens[:, 1:])
        return torch.zeros((), dtype=torch.float32, device=self._parallel.device) if found is None else found.squeeze(0)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self._relay(tokens, targets=None)
        if found is None:
            piece = next(iter(self._owned.values()))
            shape = (*tokens.shape, piece.vocabulary)
            found = torch.empty(shape, dtype=next(piece.parameters()).dtype, device=tokens.device)
        dist.broadcast(found, group=self._group, group_src=self._parallel.stages - 1)
        return found

    def _relay(self, tokens: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor | None:
        """One batch through all stages in turn; returns the last one's output on its rank."""
        stages, mine = self._parallel.stages, self._parallel.stage
        x = tokens
        for number in range(self._num_stages):
            if number % stages != mine:
                continue
            piece = self._owned[number]
            if number > 0:
                dtype = next(piece.parameters()).dtype
                x = torch.empty((*tokens.shape, piece.config.width), dtype=dtype, device=tokens.device)
                dist.recv(x, group=self._group, group_src=(number - 1) % stages)
            found = piece(x, targets=targets)
            x = found[0] if isinstance(found, tuple) else found  # without the balancing loss, which is for training
            if number < self._num_stages - 1:
                dist.send(x.contiguous(), group=self._group, group_dst=(number + 1) % stages)
        return x if self._has_last else None


class JoinedStages(nn.Module):
    """The stages of one rank as one module without a forward, with the parameter names of the whole model."""

    def __init__(self, pieces: list[Stage]) -> None:
        super().__init__()
        for piece in pieces:
            for name, child in piece.named_children():
                if name != "blocks" and child is not None:
                    self.add_module(name, child)
        self.blocks = nn.ModuleDict({name: block for piece in pieces for name, block in piece.blocks.items()})


def pieces_of(model: LanguageModel, config: TrainConfig, parallel: Parallel) -> dict[int, Any]:
    """The modules that this rank calls, by number: the model, or its stages of a pipeline."""
    if parallel.stages == 1:
        return {0: model}
    num_stages = parallel.stages * STAGES_PER_RANK.get(config.parallel.schedule, 1)
    return dict(list(enumerate(stages(model, num_stages)))[parallel.stage :: parallel.stages])


def passes_for(config: TrainConfig, parallel: Parallel, vocabulary: int = BYTES) -> Passes:
    """The model of `config` for tokens in ``range(vocabulary)``, divided as `parallel` says, on its device.

    A divided model is made on meta, compiled, sharded, and only then gets weights: each rank allocates only its own. A
    model of which weights live on the host is made there: `offload()` moves what stays to the device.
    """
    whole = parallel.stages == 1
    late = not whole or parallel.sharded
    device, dtype = torch.device("meta") if late else parallel.device, config.model.dtype_on(parallel.device)
    home = torch.device("cpu") if begins_on_host(config, parallel.device, vocabulary) else None
    model = model_for(config, device=device, dtype=dtype, vocabulary=vocabulary, home=home)
    pieces = pieces_of(model, config, parallel)
    for piece in pieces.values():
        if config.model.compile:
            for layer in piece.layers():
                if home is None and not config.fit.decides:
                    layer.compile()
                else:  # without the hooks that send for its weights
                    layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
        parallel.shard(piece, piece.groups())
        if late:
            piece.materialize(parallel.device, config.run.seed)
        initialize_adapters(piece, config.run.seed, parallel.device)
    return Whole(model, config.data.micro_batches) if whole else Staged(pieces, parallel, config)


@torch.no_grad()
def sample_tokens(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    prompt: Sequence[int],
    length: int,
    *,
    vocabulary: int,
    sequence: int,
    seed: int,
) -> list[int]:
    """`length` tokens that the model writes after `prompt`, one by one. All ranks call it.

    `logits_of` takes [1, sequence] tokens and returns [1, sequence, vocabulary or more] on every rank. The window
    always has training's length, padded with zeros at its end, which a causal model does not see: one shape for
    compiled blocks and pipelines. Samples have their own generator and leave training's random numbers alone.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        seen = tokens[-sequence:]
        window = torch.zeros(1, sequence, dtype=torch.int64, device="cpu")
        window[0, : len(seen)] = torch.tensor(seen, dtype=torch.int64, device="cpu")
        logits = logits_of(window)[0, len(seen) - 1, :vocabulary].float().cpu()
        if not logits.isfinite().all():
            break  # no text from weights that are not finite
        chances = torch.softmax(logits / TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokens[len(prompt) :]


@contextlib.contextmanager
def activation_mode(settings: ActivationSettings, passes: Passes) -> Iterator[list[ActivationOffload]]:
    """Within: layers keep, recompute or offload activations as `settings` say. Yields the handles of offloading."""
    handles: list[ActivationOffload] = []
    with contextlib.ExitStack() as open_until_end:
        for piece in passes.pieces:
            if settings.checkpoints:
                piece.checkpoint_layers()  # type: ignore[operator]
            if settings.offloads and (layers := _leaving(piece)):
                handle = offload_activations(piece, layers=layers, fraction=settings.fraction)
                handles.append(open_until_end.enter_context(handle))
        yield handles


def _leaving(piece: nn.Module) -> list[nn.Module]:
    """All but the model's last layer, which backward needs at once."""
    layers: list[nn.Module] = piece.layers()  # type: ignore[operator]
    return layers if isinstance(piece, Stage) and not piece.last else layers[:-1]
