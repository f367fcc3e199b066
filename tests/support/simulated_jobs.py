# SPDX-License-Identifier: Apache-2.0
"""Small jobs on a simulated device: a model of equal blocks, a loop with options, and what each iteration took."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import offstage
from offstage.activations.offload import offload_activations
from offstage.lanes.testing.simulated import SimulatedDevice
from offstage.optimizer.optimizer import runtime_of
from offstage.planning.choices import Choice
from offstage.planning.job import Job, Setting

WIDTH = 64
ROWS = 128
SMALL = {"min_bytes": 1024, "chunk_bytes": "48KiB"}
"""Settings for tensors of this size."""
HOST = "4GiB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class GatedBlock(nn.Module):
    """Much of what it saves is remade where it would leave: gates, and their products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class GatedBlocks(Blocks):
    def __init__(self, count: int = 6) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(GatedBlock() for _ in range(count))


def device(**changes: Any) -> SimulatedDevice:
    """Its link carries the state of a block in about one and a half of the block's backwards."""
    fields = {
        "memory_bytes": 1 << 30,
        "up_gb_per_s": 5.0,
        "down_gb_per_s": 5.0,
        "device_gb_per_s": 2000.0,
        "tflops": 0.4,
        "host_update_gb_per_s": 10.0,
    }
    return SimulatedDevice(**(fields | changes))


Make = Callable[[nn.Module, torch.optim.Optimizer, SimulatedDevice], torch.optim.Optimizer]


@dataclass
class Ran:
    """What a job has done."""

    model: nn.Module
    optimizer: Any
    device: SimulatedDevice | None
    times: list[float] = field(default_factory=list)
    """Milliseconds of each iteration."""
    peaks: list[int] = field(default_factory=list)
    """The most that was ever on the device, after each iteration."""

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The loop."""

    steps: int = 12
    layers: int = 6
    model: Callable[[int], nn.Module] = Blocks
    """Of so many layers."""
    dtype: torch.dtype = torch.float32
    clip: str | None = None
    """``"ours"``, ``"torch"`` or none."""
    max_norm: float = 1e9
    micro_batches: int = 1
    accumulates: bool = True
    """Earlier micro-batches are under `accumulate()`."""
    rows: Callable[[int], int] = lambda step: ROWS

    def run(self, make: Make, simulated: SimulatedDevice | None) -> Ran:
        with simulated if simulated is not None else contextlib.nullcontext():
            model = self.model(self.layers).to(self.dtype)
            if simulated is not None:
                simulated.adopt(model)
            plain = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
            ran = Ran(model, make(model, plain, simulated), simulated)
            generator = torch.Generator().manual_seed(1)
            for step in range(self.steps):
                start = simulated.now_ms() if simulated is not None else 0.0
                self._iterate(ran, step, generator)
                if simulated is not None:
                    ran.times.append(simulated.now_ms() - start)
                    ran.peaks.append(simulated.most_bytes)
            if isinstance(ran.optimizer, offstage.OffloadedOptimizer):
                ran.optimizer.synchronize()
        return ran

    def _iterate(self, ran: Ran, step: int, generator: torch.Generator) -> None:
        ours = isinstance(ran.optimizer, offstage.OffloadedOptimizer)
        for number in range(self.micro_batches):
            x = torch.randn(self.rows(step), WIDTH, generator=generator).to(self.dtype)
            if ran.device is not None:
                ran.device.adopt(x)
            is_last = number == self.micro_batches - 1
            within = ours and self.accumulates and not is_last
            with ran.optimizer.accumulate() if within else contextlib.nullcontext():
                ran.model(x).float().square().mean().backward()
        if self.clip is not None:
            if self.clip == "ours" and ours:
                ran.optimizer.clip_grad_norm_(self.max_norm)
            else:
                nn.utils.clip_grad_norm_(ran.model.parameters(), self.max_norm)
        ran.optimizer.step()
        ran.optimizer.zero_grad()


def fitting(device_peak: Any, **settings: Any) -> Make:
    """Run by `fit`."""

    def make(model: nn.Module, plain: torch.optim.Optimizer, simulated: SimulatedDevice | None) -> Any:
        machine = simulated.machine(offstage.Machine) if simulated is not None else None
        given = {"host_budget": HOST, "machine": machine, **SMALL, **settings}
        return offstage.fit(model, plain, device_peak, **given)

    return make


def by_hand(job: Job, setting: Setting, **settings: Any) -> Make:
    """Run with settings made by hand."""

    def make(model: nn.Module, plain: torch.optim.Optimizer, simulated: SimulatedDevice | None) -> Any:
        config = offstage.OffloadConfig(**{**SMALL, **settings, **job.overrides(setting)})
        optimizer = offstage.offload(plain, model, config)
        if any(choice is not Choice.KEEP for choice in setting.choices):
            offload_activations(model, min_bytes=SMALL["min_bytes"], keep_last=0).replan(setting.choices)
        return optimizer

    return make


def resident(model: nn.Module, plain: torch.optim.Optimizer, simulated: SimulatedDevice | None) -> Any:
    """All on the device."""
    return offstage.offload(plain, model, fraction=0.0)


def job_of(ran: Ran) -> Job:
    """What was measured."""
    watcher: Any = runtime_of(ran.optimizer).watcher
    found: Job = watcher.job
    return dataclasses.replace(found, slowdowns={}, unseen_bytes={})


def all_by_hand(job: Job) -> Iterator[Setting]:
    """Settings as people would make them: a grid over everything that can be chosen."""
    num, most = job.num_layers, job.most_resident
    keep, away, again = Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE
    half = num // 2
    mixes = [(keep,) * num, (again,) * num, (again,) * half + (keep,) * (num - half), (away, keep) * half]
    placements = [(0, count, 0.0) for count in (0, most // 3, 2 * most // 3)]
    placements += [(0, 0, 1.0), (0, most // 2, 0.5)]
    placements += [(hosted, count, 0.0) for hosted in (half, num) for count in {0, job.resident_below(hosted)}]
    for choices in mixes:
        yield Setting(choices, most)
        for hosted, count, share in placements:
            for overlap, early in ((False, False), (True, False), (False, True), (True, True)):
                yield Setting(choices, count, hosted, share, overlap, early)
