# SPDX-License-Identifier: Apache-2.0
"""The workload of every whole-iteration figure: a 2.70B GPT, bf16, every block checkpointed.

32 blocks, width 2560, SwiGLU 6912, 20 heads, vocabulary 32,000 untied, RMSNorm, 8 x 2048 tokens per micro-batch, the
loss computed in 8 checkpointed slices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offstage
from benchmarks.common import (
    DEVICE,
    Row,
    gib,
    now,
    peak_bytes,
    reset_peak,
    rounded,
    settle_collector,
    share,
    synchronize,
)
from offstage.config import Placement

SLICES = 8
BATCH = 8
MAX_NORM = 1.0

IN_STEP: Mapping[str, Any] = {"master_weights": "split"}
OVERLAP_FORWARD: Mapping[str, Any] = {"master_weights": "split", "overlap_forward": True}
IN_BACKWARD: Mapping[str, Any] = {"master_weights": "split", "overlap_forward": True, "update_in_backward": True}
RESIDENT: Mapping[str, Any] = {"fraction": 0.0, "master_weights": "fp32"}

Clip = Literal["outside", "optimizer"] | None
"""By `torch.nn.utils.clip_grad_norm_`, by the optimizer's own method, or not at all."""


@dataclass(frozen=True)
class Size:
    blocks: int = 32
    width: int = 2560
    hidden: int = 6912
    heads: int = 20
    vocabulary: int = 32_000
    sequence: int = 2048


SIZES = {
    "full": Size(),
    "small": Size(blocks=2, width=64, hidden=128, heads=2, vocabulary=512, sequence=32),  # the CPU has to do it too
}
SMALL_CHUNKS = {"chunk_bytes": "32KiB"}  # or the small model would be a few chunks


# The model


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.gate_up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [batch, heads, sequence, head]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Head(nn.Linear):
    """The output projection and the loss behind it, of a slice at a time: one module, which FSDP2 can shard alone."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        losses = [
            checkpoint(self._loss, part, target, use_reentrant=False)
            for part, target in zip(x.chunk(SLICES), targets.chunk(SLICES), strict=True)
        ]
        return torch.stack(losses).sum() / len(targets)

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, self.weight).float(), targets, reduction="sum")


class GPT(nn.Module):
    """`forward` returns the loss."""

    recomputed: Collection[int] | None = None
    """The blocks that are checkpointed, by number; all of them unless it says so."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.RMSNorm(size.width)
        self.head = Head(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self._through_blocks(self.embedding(tokens))).flatten(0, 1)
        return self.head(x, tokens.roll(-1, dims=1).flatten())

    def _through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            is_recomputed = self.recomputed is None or number in self.recomputed
            x = checkpoint(block, x, use_reentrant=False) if is_recomputed else block(x)
        return x


def build(size: Size, seed: int = 0) -> GPT:
    """The model in bf16 on the device, initialised there."""
    torch.manual_seed(seed)
    with in_bf16(), DEVICE:
        model = GPT(size)
    initialise(model)
    return model


@contextlib.contextmanager
def in_bf16() -> Iterator[None]:
    """What is made inside has bf16 parameters."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def initialise(module: nn.Module) -> None:
    """Random weights, and norms that do nothing yet."""
    for param in module.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
        else:
            nn.init.ones_(param)


def tokens(size: Size, batch: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(size.vocabulary, (batch, size.sequence), generator=generator, device=DEVICE)


def adamw(model: nn.Module | Sequence[nn.Parameter], lr: float = 1e-4) -> torch.optim.AdamW:
    params = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


# Training


class Training:
    """A model and its optimizer, in the loop a user would write."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        size: Size,
        *,
        clip: Clip = "outside",
        micro_batches: int = 1,
        loss_scale: float | None = None,
        batch: int = BATCH,
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.micro_batches, self.loss_scale = micro_batches, loss_scale
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.batches = itertools.cycle([tokens(size, batch, seed) for seed in range(8)])

    def iterate(self) -> None:
        self.forward_backward()
        self.step()

    def forward_backward(self) -> None:
        for micro_batch in range(self.micro_batches):
            last = micro_batch == self.micro_batches - 1
            loss = self.model(next(self.batches))
            with contextlib.nullcontext() if last else self.optimizer.accumulate():
                self.backward(loss if self.loss_scale is None else loss * (self.loss_scale / self.micro_batches))
        self.clip_gradients()
        self.losses.append(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_gradients(self) -> None:
        if self.clip == "outside":
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM))
        elif self.clip == "optimizer":
            self.norms.append(self.optimizer.clip_grad_norm_(MAX_NORM))

    def laps(self, iterations: int, *, to_the_end: bool = True) -> list[float]:
        """Milliseconds from the end of each iteration to the next, on the caller's stream. The host waits at the end:
        for all lanes, or for the caller's stream only, so that the next laps begin with updates under way."""
        ends = [now()]
        for _ in range(iterations):
            self.iterate()
            ends.append(now())
        synchronize() if to_the_end else ends[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]

    def turn(self, iterations: int) -> list[float]:
        """The same for trainings that take turns, after one more iteration that begins with an idle link."""
        synchronize()
        self.iterate()
        return self.laps(iterations)

    def timed(self, iterations: int) -> Row:
        """Mean and median time of an iteration. The host waits before the first and after the last only."""
        synchronize()
        start = time.perf_counter()
        laps = self.laps(iterations)
        mean = 1e3 * (time.perf_counter() - start) / iterations
        return {"iteration_ms": round(mean, 1), "median_ms": round(statistics.median(laps), 1)}

    def measured(self, warm_up: int, iterations: int) -> Row:
        """Times and peaks after so many iterations that are not timed; at least one of them."""
        built = _peak_until_now()
        self.iterate()
        first = _peak_until_now()
        for _ in range(warm_up - 1):
            self.iterate()
        warm = _peak_until_now()
        settle_collector()
        found = self.timed(iterations)
        steady = peak_bytes()
        peaks = {
            "built_peak_gib": gib(built),
            "first_iteration_peak_gib": gib(first),
            "peak_gib": gib(steady),
            "peak_gib_since_start": gib(max(built, first, warm, steady)),
        }
        return {"warm_up": warm_up, "iterations": iterations, **found, **peaks}

    def counted(self) -> Row:
        """What the optimizer counted, and whether it trains. Waits for the device."""
        receipt = self.optimizer.receipt()
        plan = self.optimizer.plan
        away = [size for size, place in zip(plan.sizes, plan.placements, strict=True) if place != Placement.RESIDENT]
        return {
            "host_state_gib": gib(receipt.host_state_bytes),
            "host_bytes_per_param": share(host_bytes(receipt), sum(size.numel for size in away)),
            "receipt": receipt_numbers(receipt),
            "fallbacks": list(receipt.fallbacks),
            "first_and_last_loss": [rounded(float(loss)) for loss in (self.losses[0], self.losses[-1])],
        }

    def close(self) -> None:
        self.optimizer.close()


def _peak_until_now() -> int:
    """Most device bytes since the last call, when all work is done; from here on it is counted anew."""
    synchronize()
    peak = peak_bytes()
    reset_peak()
    return peak


def since_start(measured: Row) -> Row:
    """What `measured()` found, with the peak since the start in the place of that of the timed iterations."""
    steady, first = measured["peak_gib"], measured["first_iteration_peak_gib"]
    row = {**measured, "peak_gib": measured["peak_gib_since_start"], "steady_peak_gib": steady}
    del row["peak_gib_since_start"]
    return row | {"first_over_steady_peak": share(first, steady)}


def receipt_numbers(receipt: Any) -> Row:
    fields = {**dataclasses.asdict(receipt), "link_gb_per_s": receipt.link_gb_per_s}
    return {name: rounded(value) for name, value in fields.items() if name not in ("advice", "fallbacks")}


def host_bytes(receipt: Any) -> int:
    """Everything that the optimizer keeps in host memory: state, weights, gradients."""
    kinds = ("host_state_bytes", "host_weight_bytes", "host_gradient_bytes")
    return sum(getattr(receipt, kind, 0) for kind in kinds)


def offloaded(model: nn.Module, size_name: str, config: Mapping[str, Any]) -> offstage.OffloadedOptimizer:
    """AdamW under `offload()`."""
    return offstage.offload(adamw(model), model, **config_for(size_name, config))


def config_for(size_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The small model has small chunks; its window, budget and the least that leaves are small too."""
    if size_name == "full" or config.get("fraction") == 0.0:
        return dict(config)
    sized = str(config.get("window", "")).endswith("iB")
    window = {"window": "256KiB"} if sized else {}
    least = {"min_bytes": "4KiB"} if "weights" in config else {}
    budget = {"device_budget": "512KiB"} if "device_budget" in config else {}
    return {**config, **SMALL_CHUNKS, **window, **least, **budget}
