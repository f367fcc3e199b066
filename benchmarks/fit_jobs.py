# SPDX-License-Identifier: Apache-2.0
"""The jobs of `benchmarks.fit`: three models without checkpointing of their own, settings made by hand, and a peak that
survives resets of the device's statistics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import offstage
from benchmarks import workload
from benchmarks.activation_loop import SMALL_TENSORS
from benchmarks.common import DEVICE, ON_GPU
from benchmarks.workload import GPT, IN_BACKWARD, IN_STEP, OVERLAP_FORWARD, RESIDENT, Size
from offstage.activations.offload import ActivationOffload
from offstage.planning.choices import Choice, spread

LOSS_SCALE = 1e-2
"""Every norm is within the limit: clipping is exact, and takes no update back."""
HOST = torch.device("cpu")


# Models


@dataclass(frozen=True)
class Workload:
    """One model. `size`: of the GPT, or of the batches of a Llama."""

    name: str
    sizes: Mapping[str, Size]
    llama: Mapping[str, Mapping[str, int]] | None = None
    """A transformers Llama of these shapes, by the size's name; `None`: the GPT of `workload.py`."""
    timeout_s: int = 180

    def build(self, size_name: str, *, home: torch.device, checkpointed: bool) -> nn.Module:
        """Initialised on the device and moved to `home` piece by piece: no other memory ever holds more than a layer.

        `checkpointed`: every layer by torch's own checkpointing; otherwise no layer is.
        """
        torch.manual_seed(0)
        model: Any = self._on_meta(size_name)
        for piece in _pieces(model):
            piece.to_empty(device=DEVICE)
            workload.initialise(piece)
            piece.to(home)
        if isinstance(model, GPT):
            model.recomputed = None if checkpointed else ()
            return model
        with DEVICE:
            model.body.rotary_emb = type(model.body.rotary_emb)(model.body.config)  # its buffers are on the meta device
        if checkpointed:
            model.body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def _on_meta(self, size_name: str) -> nn.Module:
        size = self.sizes[size_name]
        with workload.in_bf16(), torch.device("meta"):
            if self.llama is None:
                return GPT(size)
            from transformers import LlamaConfig

            from benchmarks.llama import Llama

            more = {"vocab_size": size.vocabulary, "max_position_embeddings": size.sequence}
            return Llama(LlamaConfig(**self.llama[size_name], **more, attn_implementation="sdpa")).train()


def _pieces(model: Any) -> tuple[nn.Module, ...]:
    embedding = model.embedding if isinstance(model, GPT) else model.body.embed_tokens
    return embedding, *model.blocks, model.norm, model.head


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SMALL = Size(blocks=6, width=64, hidden=128, heads=2, vocabulary=512, sequence=32)
BATCHES = {"full": Size(), "small": SMALL}
WORKLOADS = {
    one.name: one
    for one in (
        Workload("gpt", BATCHES),
        Workload("llama", BATCHES, {"full": _llama(2048, 5504, 24, 16), "small": _llama(64, 128, 6, 4)}),
        Workload("llama7b", BATCHES, {"full": _llama(4096, 11008, 32, 32), "small": _llama(96, 192, 8, 4)}, 420),
    )
}


def training(
    job: Workload,
    size_name: str,
    model: nn.Module,
    optimizer: Any,
    *,
    sequence: int = 0,
    loss_scale: float = LOSS_SCALE,
) -> workload.Training:
    """The loop of every row: clipping by the optimizer, 8 x 2048 tokens or those of `sequence`."""
    return workload.Training(model, optimizer, sized(job, size_name, sequence), clip="optimizer", loss_scale=loss_scale)


def sized(job: Workload, size_name: str, sequence: int) -> Size:
    size = job.sizes[size_name]
    return Size(**{**vars(size), "sequence": sequence}) if sequence else size


# Settings made by hand


def _none(_: int) -> list[Choice]:
    return []


def _recompute(num: int) -> list[Choice]:
    return [Choice.RECOMPUTE] * num


def _recompute_half(num: int) -> list[Choice]:
    """The first ones: what the others keep is given back before the gradients come."""
    return [Choice.RECOMPUTE if number < num // 2 else Choice.KEEP for number in range(num)]


def _offload_half(num: int) -> list[Choice]:
    away = spread(num // 2, num - 1)
    return [Choice.OFFLOAD if number in away else Choice.KEEP for number in range(num)]


def _mixed(num: int) -> list[Choice]:
    """As much is offloaded as a forward hides on PCIe 5, the rest recomputed."""
    away = spread(round(7 / 32 * num), num - 1)
    return [Choice.OFFLOAD if number in away else Choice.RECOMPUTE for number in range(num)]


@dataclass(frozen=True)
class ByHand:
    """Settings of `offload()`, and what each layer does with its activations."""

    config: Mapping[str, Any]
    choices: Callable[[int], list[Choice]] = _none
    """Of so many layers; none of them: no hooks."""
    checkpointed: bool = False

    @property
    def layers(self) -> str:
        return "checkpointed" if self.checkpointed else self.choices.__name__.strip("_").replace("none", "keep")


ALL_HERE: Mapping[str, Any] = {"fraction": 0.0, "master_weights": "split"}
ON_HOST: Mapping[str, Any] = {"weights": "host"}
BY_CPU: Mapping[str, Any] = {"update_on": "auto"}
BY_HAND: dict[str, ByHand] = {
    "resident_checkpointed": ByHand(RESIDENT, checkpointed=True),  # what rows of other benchmarks are relative to
    "resident": ByHand(ALL_HERE),
    "resident_recompute": ByHand(ALL_HERE, _recompute),
    "resident_recompute_half": ByHand(ALL_HERE, _recompute_half),
    "resident_offload_half": ByHand(ALL_HERE, _offload_half),
    "quarter": ByHand({**IN_BACKWARD, "fraction": 0.25}),
    "half": ByHand({**IN_BACKWARD, "fraction": 0.5}),
    "half_recompute": ByHand({**IN_BACKWARD, "fraction": 0.5}, _recompute),
    "in_step_recompute": ByHand(IN_STEP, _recompute),
    "overlap_forward_recompute": ByHand(OVERLAP_FORWARD, _recompute),
    "in_backward": ByHand(IN_BACKWARD),
    "in_backward_recompute_half": ByHand(IN_BACKWARD, _recompute_half),
    "in_backward_mixed": ByHand(IN_BACKWARD, _mixed),
    "in_backward_recompute": ByHand(IN_BACKWARD, _recompute),
    "auto_recompute": ByHand({**OVERLAP_FORWARD, **BY_CPU}, _recompute),
    "auto_in_backward_recompute": ByHand({**IN_BACKWARD, **BY_CPU}, _recompute),
    "host_weights_recompute": ByHand({**OVERLAP_FORWARD, **ON_HOST}, _recompute),
    "host_weights_in_backward_recompute_half": ByHand({**IN_BACKWARD, **ON_HOST}, _recompute_half),
    "host_weights_in_backward_recompute": ByHand({**IN_BACKWARD, **ON_HOST}, _recompute),
}


def choose(model: nn.Module, setting: ByHand, size_name: str) -> ActivationOffload | None:
    """The activations' handle of a setting made by hand, if it needs one."""
    if setting.choices is _none:
        return None
    handle = offstage.offload_activations(model, keep_last=0, **({} if size_name == "full" else SMALL_TENSORS))
    handle.replan(setting.choices(len(handle.layers)))
    return handle


# Plain torch


class Masters:
    """Fused AdamW of torch on fp32 copies of bf16 parameters, with the loop's own clipping: no offstage in it."""

    def __init__(self, model: nn.Module) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._masters = [nn.Parameter(param.detach().float()) for param in self._params]
        self._inner = fused(self._masters)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self._params, max_norm)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None  # one is gone before the next one is there
        self._inner.step()
        self._inner.zero_grad()
        torch._foreach_copy_(self._params, self._masters)

    def zero_grad(self) -> None:
        """They are gone."""


class Plain:
    """Fused AdamW of torch on the bf16 parameters themselves: fewer bytes to update, and other numbers."""

    def __init__(self, model: nn.Module) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._inner = fused(self._params)
        self.step, self.zero_grad = self._inner.step, self._inner.zero_grad

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self._params, max_norm)


def fused(params: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


TORCH: dict[str, type[Masters] | type[Plain]] = {"torch_masters": Masters, "torch": Plain}


# The peak of a whole life


@dataclass
class LifePeak:
    """The most device memory since it was made, although other code resets the device's peak statistics.

    `fit()` resets them between sections of the iterations that it watches, through `torch.accelerator`. Each reset is
    preceded by a look at what it would forget. Exact, except for what another thread allocates between look and reset.
    """

    allocated: int = 0
    reserved: int = 0
    resets: int = 0
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            self._wrap(torch.accelerator)
            self._wrap(torch.cuda)

    def _wrap(self, module: Any) -> None:
        reset = module.reset_peak_memory_stats

        def looked(*arguments: Any, **keywords: Any) -> None:
            self.look()
            self.resets += 1
            reset(*arguments, **keywords)

        module.reset_peak_memory_stats = looked
        self._undo.append(lambda: setattr(module, "reset_peak_memory_stats", reset))

    def look(self) -> int:
        """The most so far."""
        if ON_GPU:
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        return self.allocated

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


def batches(size: Size) -> Any:
    """As `Training` has them."""
    return itertools.cycle([workload.tokens(size, workload.BATCH, seed) for seed in range(8)])
