# SPDX-License-Identifier: Apache-2.0
"""Does overlap change a bit of the result?

    python -m benchmarks.overlap_bits
    python -m benchmarks.overlap_bits --size small     anywhere: does it run? Lanes are delayed and checked on a GPU

Every way to overlap, 30 steps of a bf16 model, against updates in `step()` with fp32 masters and torch's own clipping.
The main settings run again with delays injected into each lane, and all of them under the happens-before checker on
real streams. The model is elementwise: a forward that reads a weight too early, or too late, gives other gradients from
there on, and nothing else does, because no kernel of it depends on the order of additions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offstage
from benchmarks import harness
from benchmarks.bits import DELAY_CYCLES, DelayedLanes, num_different
from benchmarks.common import DEVICE, ON_GPU, Row
from benchmarks.harness import Case
from offstage.lanes.lanes import Lane, Lanes
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.checked import CheckedLanes
from offstage.lanes.testing.happens_before import Clocks
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient

STEPS = 30
CHECKED_STEPS = 10
LANES = (Lane.FETCH, Lane.UPDATE, Lane.STORE, Lane.CALLER)
MASTERS = ("fp32", "split")
SCALES = (0.01, 0.01, 1.0, 1.0)
"""Of the gradients, in turn, so that one `max_norm` clips some steps and not others."""
RESIDENT = 255
"""Elements of a parameter with less than 4 KiB of state: it stays on the device."""
MAX_NORMS = {"never": 1e4, "sometimes": 0.3, "always": 1e-4}

IN_BACKWARD = {"overlap_forward": True, "update_in_backward": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "in step": {},
    "overlap_forward": {"overlap_forward": True},
    "window": {"window": "some"},
    "window all": {"window": "all"},
    "overlap_forward, window": {"overlap_forward": True, "window": "some"},
    "overlap_forward, window all": {"overlap_forward": True, "window": "all"},
    "update_in_backward": {"update_in_backward": True},
    "update_in_backward, overlap_forward": IN_BACKWARD,
    "update_in_backward, overlap_forward, window": {**IN_BACKWARD, "window": "some"},
}
CLIPPED = ("overlap_forward", "update_in_backward", "update_in_backward, overlap_forward")
"""Settings that run with clipping that is never, and always, active; all of them run with the one that sometimes is."""
DELAYED = (
    ("overlap_forward", "none"),
    ("overlap_forward, window all", "none"),
    ("update_in_backward, overlap_forward", "none"),
    ("update_in_backward, overlap_forward", "sometimes"),
)


# The model


@dataclass(frozen=True)
class Size:
    gates: int = 12
    width: int = 200_003
    narrow: int = 4_001
    """Several such parameters share a chunk, and a wide one has pieces in several."""
    chunk_bytes: int = 2**21
    window: int = 2**23
    """What "some" means."""


SMALL = Size(gates=5, width=20_011, narrow=1_501, chunk_bytes=2**16, window=2**18)


class Gate(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(size.width))
        self.shift = nn.Parameter(0.1 * torch.randn(size.narrow))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = len(self.shift)
        x = x + torch.tanh(x * self.weight)
        return torch.cat([x[:narrow] + self.shift, x[narrow:]])


class Gates(nn.Module):
    """Gates, the first of them called twice, behind one parameter whose state is resident."""

    def __init__(self, size: Size, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.scale = nn.Parameter(torch.ones(RESIDENT))
        self.gates = nn.ModuleList(Gate(size) for _ in range(size.gates))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x[:RESIDENT] * self.scale, x[RESIDENT:]])
        for gate in [*self.gates, self.gates[0]]:
            if self.checkpointing == "none":
                x = gate(x)
            else:
                x = checkpoint(gate, x, use_reentrant=self.checkpointing == "reentrant")
        return x


def build(size: Size, device: str, checkpointing: str = "none") -> Gates:
    torch.manual_seed(0)  # made on the host: the same weights on every device
    return Gates(size, checkpointing).to(torch.bfloat16).to(device)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    wide = [param for name, param in named if name.endswith("weight")]
    others = [param for name, param in named if not name.endswith("weight")]
    return [{"params": wide}, {"params": others, "lr": 1e-3, "weight_decay": 0.0}]


def offloaded(model: nn.Module, size: Size, config: Mapping[str, Any]) -> offstage.OffloadedOptimizer:
    optimizer = torch.optim.AdamW(groups_of(model), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    settings = {"min_bytes": "4KiB", "chunk_bytes": size.chunk_bytes, **config}
    if settings.get("window") == "some":
        settings["window"] = size.window
    made = offstage.offload(optimizer, model, **settings)
    if settings.get("update_in_backward"):
        update_all_early(made)
    return made


def update_all_early(optimizer: offstage.OffloadedOptimizer) -> None:
    """A backward this short, or a delayed lane, would let the optimizer leave all updates to `step()`: no link is known
    that would be too slow."""
    for engine in runtime_of(optimizer).engines:
        engine.transport.link_gb_per_s = 0.0


# A run


@dataclass
class Run:
    """What training left, on the host, and how much of it happened outside `step()`."""

    weights: list[torch.Tensor]
    state: dict[tuple[int, str], torch.Tensor]
    norms: list[torch.Tensor]
    receipt: Any
    updated_in_backward: int = 0
    """Gradients that were gone when backward was over."""
    fetched_in_backward: int = 0
    """Bytes."""
    taken_by_step: int = 0
    """Gradients that were there when backward was over and gone after `step()`: `overlap_forward` took them."""


def train(
    config: Mapping[str, Any],
    *,
    clip: str = "none",
    steps: int = STEPS,
    size: Size | None = None,
    device: str = DEVICE.type,
    checkpointing: str = "none",
    clipped_by_torch: bool = False,
    infinite_step: int | None = None,
    delayed: bool = False,
    prepare: Callable[[Gates], None] = lambda model: None,
    where: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda moment: contextlib.nullcontext(),
) -> Run:
    """`steps` steps of `Gates`.

    `delayed`: the caller's stream is late. `infinite_step`: its gradients are not finite. `prepare` gets the model
    before `offload()`. `where("training")` is around forward and backward, `where("step")` around the rest.
    """
    size = size or Size()
    model = build(size, device, checkpointing)
    prepare(model)
    optimizer = offloaded(model, size, config)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run = Run([], {}, [], None)
    for number, (x, gradient) in enumerate(batches(size, device, steps)):
        with where("training"):
            _delay(delayed)
            out = model(x)
            _delay(delayed)
            fetched = _fetched(optimizer)
            out.backward(gradient * torch.inf if number == infinite_step else gradient)
            del out
        run.fetched_in_backward += _fetched(optimizer) - fetched
        there = [param for param in params if not isinstance(param.grad, DroppedGradient)]
        run.updated_in_backward += len(params) - len(there)
        with where("step"):
            if _clip(optimizer, params, clip, clipped_by_torch, run.norms):
                optimizer.step()
            run.taken_by_step += sum(param.grad is None for param in there)
            scheduler.step()
            optimizer.zero_grad()
    return _collect(run, model, optimizer)


def batches(size: Size, device: str, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs, and the gradients of the outputs. On the device before training begins: a copy would hold the host up."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(steps):
        x, gradient = (torch.randn(size.width, generator=generator) for _ in range(2))
        gradient = gradient * (SCALES[number % len(SCALES)] / size.width**0.5)
        made.append((x.to(device, torch.bfloat16), gradient.to(device, torch.bfloat16)))
    return made


def _fetched(optimizer: offstage.OffloadedOptimizer) -> int:
    return sum(engine.transport.moved.up for engine in runtime_of(optimizer).engines)


def _delay(delayed: bool) -> None:
    if delayed:
        torch.cuda._sleep(DELAY_CYCLES)


def _clip(
    optimizer: offstage.OffloadedOptimizer, params: list[torch.Tensor], clip: str, by_torch: bool, norms: list[Any]
) -> bool:
    """Whether the step should be made. The optimizer decides that itself; the loop around torch's function has to."""
    if clip == "none":
        return True
    if by_torch:
        norms.append(nn.utils.clip_grad_norm_(params, MAX_NORMS[clip]))
        return bool(norms[-1].isfinite())
    norms.append(optimizer.clip_grad_norm_(MAX_NORMS[clip]))
    return True


def _collect(run: Run, model: nn.Module, optimizer: offstage.OffloadedOptimizer) -> Run:
    run.receipt = optimizer.receipt()
    run.state = {
        (index, name): torch.as_tensor(value).clone()
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    run.weights = [param.detach().cpu() for param in model.parameters()]
    run.norms = [norm.cpu() for norm in run.norms]
    optimizer.close()
    return run


def mismatches(run: Run, reference: Run) -> dict[str, int]:
    """Elements whose bits differ: weights, each key of the state, norms."""
    count = {"weights": sum(num_different(a, b) for a, b in zip(run.weights, reference.weights, strict=True))}
    assert run.state.keys() == reference.state.keys()
    for key, value in run.state.items():
        count[key[1]] = count.get(key[1], 0) + num_different(value, reference.state[key])
    if reference.norms:
        count["norms"] = sum(num_different(a, b) for a, b in zip(run.norms, reference.norms, strict=True))
    return count


def delayed_lanes(lane: Lane | None) -> contextlib.AbstractContextManager[None]:
    """The caller's stream is not one of the lanes that are made: `train` delays it itself."""
    if lane in (None, Lane.CALLER):
        return contextlib.nullcontext()
    return use_lanes(lambda device: DelayedLanes(device, lane))


@dataclass
class Checked:
    """A factory of checked lanes that keeps what it made; what is of two users is checked, too."""

    made: list[CheckedLanes] = field(default_factory=list)
    clocks: Clocks = field(default_factory=Clocks)

    def __call__(self, device: torch.device) -> Lanes:
        self.made.append(CheckedLanes(device, clocks=self.clocks.beside()))
        return self.made[-1]

    @property
    def accesses(self) -> int:
        return sum(lanes.accesses for lanes in self.made)


# The rows


def reference(clip: str, steps: int = STEPS, **arguments: Any) -> Run:
    """Updates in `step()`, fp32 masters, torch's own clipping."""
    return train({"master_weights": "fp32"}, clip=clip, steps=steps, clipped_by_torch=True, **arguments)


def row_of(setting: str, masters: str, clip: str, run: Run, steps: int) -> Row:
    max_norm = MAX_NORMS.get(clip)
    return {
        "setting": setting,
        "masters": masters,
        "clip": clip,
        "max_norm": max_norm,
        "steps": steps,
        "elements": sum(weight.numel() for weight in run.weights),
        "clipped_steps": sum(float(norm) > max_norm for norm in run.norms) if max_norm else 0,
        "updated_in_backward": run.updated_in_backward,
        "fetched_in_backward_bytes": run.fetched_in_backward,
        "taken_by_step": run.taken_by_step,
        "speculation_hits": run.receipt.speculation_hits,
        "speculation_misses": run.receipt.speculation_misses,
    }


class Comparison:
    """Runs of one size, each against the reference with the same clipping; and those with other bits."""

    def __init__(self, size_name: str) -> None:
        small: dict[str, Any] = {"size": SMALL, "steps": 4}
        self._arguments: dict[str, Any] = {"steps": STEPS} if size_name == "full" else small
        self._references: dict[str, Run] = {}
        self.different: list[str] = []

    def _compare(self, setting: str, clip: str, lane: Lane | None) -> Iterator[Row]:
        if clip not in self._references:
            self._references[clip] = reference(clip, **self._arguments)
        for masters in MASTERS:
            with delayed_lanes(lane):
                config = {**SETTINGS[setting], "master_weights": masters}
                run = train(config, clip=clip, delayed=lane is Lane.CALLER, **self._arguments)
            count = mismatches(run, self._references[clip])
            row = row_of(setting, masters, clip, run, self._arguments["steps"])
            self.different += [f"{setting}, {masters} masters, clip {clip}"] if any(count.values()) else []
            yield row | {"delayed_lane": lane.value if lane else None, "mismatches": count}

    def settings(self) -> Iterator[Row]:
        for setting in SETTINGS:
            for clip in ("none", "sometimes", *(("never", "always") if setting in CLIPPED else ())):
                yield from self._compare(setting, clip, None)

    def delayed(self) -> Iterator[Row]:
        for setting, clip in DELAYED if ON_GPU else ():
            for lane in LANES:
                yield from self._compare(setting, clip, lane)

    def checked(self) -> Iterator[Row]:
        for setting in SETTINGS if ON_GPU else ():
            for clip in ("none", "sometimes"):
                lanes = Checked()
                with use_lanes(lanes):  # a race raises
                    run = train({**SETTINGS[setting], "master_weights": "split"}, clip=clip, steps=CHECKED_STEPS)
                row = row_of(setting, "split", clip, run, CHECKED_STEPS)
                yield row | {"checked_accesses": lanes.accesses, "races": 0}


def main() -> None:
    options = harness.parse(harness.command(__doc__), harness.cases_of(("settings", "delayed", "checked")))
    comparison = Comparison(options.size)

    def measure(case: Case) -> Iterator[Row]:
        return getattr(comparison, case.name)()  # type: ignore[no-any-return]

    harness.run("overlap_bits", options.cases, measure)
    if comparison.different:
        raise SystemExit(f"{len(comparison.different)} rows with other bits: {'; '.join(comparison.different)}")


if __name__ == "__main__":
    main()
