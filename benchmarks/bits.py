# SPDX-License-Identifier: Apache-2.0
"""Does offstage give the bits of `torch.optim.AdamW(fused=True)`?

    python -m benchmarks.bits
    python -m benchmarks.bits CPU              what the CPU updates, or part of it
    python -m benchmarks.bits --size small     anywhere: does it run? The bits are promised on a GPU, and lanes are
                                               delayed there

Fixed gradients from 1e-30 to 1e3, and zeros, for 100 steps. For 16-bit parameters the reference is the same
optimizer on fp32 masters, cast. Every case runs plainly, and four of them with delays injected into each lane.

Adam with weight decay (L2) is not among them: torch's own kernel computes `grad + weight_decay * param` with one
rounding in three elements of four and with two in the fourth (torch 2.11, by position), so no formula has its bits.
`adam_l2` counts that.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import offstage
from benchmarks import harness
from benchmarks.common import DEVICE, ON_GPU, Row
from offstage.lanes.accelerator import AcceleratorLanes
from offstage.lanes.host_threads import Slice
from offstage.lanes.lanes import Lane, Mark, Work, pieces_of
from offstage.lanes.link import use_lanes

SHAPES = [(1021, 1031), (4096,), (33, 65), (2048, 512), (7,), (1,), (300_007,)]
DELAY_CYCLES = 2_000_000  # about a millisecond


@dataclass(frozen=True)
class Case:
    """One configuration of the comparison."""

    name: str
    dtype: torch.dtype = torch.float32
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tensor_lr: bool = False
    reference_dtype: torch.dtype = torch.float32


ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
BF16 = torch.bfloat16
CASES = [
    Case("fp32", options=ADAMW),
    Case("fp32, half of it resident", options=ADAMW, config={"fraction": 0.5}),
    Case("fp32, all resident", options=ADAMW, config={"fraction": 0.0}),
    Case("fp32, no weight decay", options=ADAMW | {"weight_decay": 0.0}),
    Case("fp32, amsgrad", options=ADAMW | {"amsgrad": True}),
    Case("fp32, maximize", options=ADAMW | {"maximize": True}),
    Case("fp32, tensor lr", options=ADAMW, tensor_lr=True),
    Case("fp32, Adam, amsgrad", cls=torch.optim.Adam, options=ADAMW | {"amsgrad": True, "weight_decay": 0.0}),
    Case("bf16, fp32 masters", BF16, options=ADAMW),
    Case("bf16, split masters", BF16, options=ADAMW, config={"master_weights": "split"}),
    Case(
        "bf16, split masters, half resident", BF16, options=ADAMW, config={"master_weights": "split", "fraction": 0.5}
    ),
    Case("fp16, fp32 masters", torch.float16, options=ADAMW),
    Case(
        "bf16, no masters, bf16 moments",
        BF16,
        options=ADAMW,
        config={"master_weights": "none", "state_dtype": "bfloat16"},
        reference_dtype=BF16,
    ),
]
ON_HOST = [
    replace(case, name=f"{case.name}, {share:.0%} updated by the CPU", config={**case.config, "host_fraction": share})
    for case in CASES
    if case.config.get("fraction") != 0.0
    for share in (0.5, 1.0)
]
L2 = "torch's own Adam with L2, by index modulo 4"
DELAYED = ("fp32", "bf16, fp32 masters", "bf16, split masters", "fp32, half of it resident")
LANES = (Lane.FETCH, Lane.UPDATE, Lane.STORE)
LANES_TO_HOST = (Lane.GRADIENTS_DOWN, Lane.HOST, Lane.WEIGHTS_UP)


class DelayedLanes(AcceleratorLanes):
    """Every piece of work on `lane` is preceded by a millisecond of nothing."""

    def __init__(self, device: torch.device, lane: Lane) -> None:
        super().__init__(device)
        self._delayed = lane

    def submit(self, lane: Lane, work: Work, **arguments: Any) -> Mark:
        if lane is self._delayed:
            work = [functools.partial(torch.cuda._sleep, DELAY_CYCLES), *pieces_of(work)]
        return super().submit(lane, work, **arguments)

    def submit_on_host(self, slices: Sequence[Slice], **arguments: Any) -> Mark:
        def delayed(piece: Slice) -> None:
            time.sleep(1e-3)
            piece()

        if self._delayed is Lane.HOST:
            slices = [functools.partial(delayed, piece) for piece in slices]
        return super().submit_on_host(slices, **arguments)


def gradients(steps: int, dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """The same gradients every time: magnitudes 1e-30 to 1e3, one element in eight 0."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    for _ in range(steps):
        grads = []
        for shape in SHAPES:
            exponent = torch.rand(shape, generator=generator, device=DEVICE) * 33 - 30
            value = torch.randn(shape, generator=generator, device=DEVICE) * torch.pow(10.0, exponent)
            zero = torch.rand(shape, generator=generator, device=DEVICE) < 0.125
            grads.append(torch.where(zero, 0.0, value).to(dtype))
        yield grads


def start_weights(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(3)
    return [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in SHAPES]


def train(case: Case, steps: int, *, ours: bool) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Weights after `steps` steps, and the optimizer. Two groups, the second with another lr; a decaying lr."""
    dtype = case.dtype if ours else case.reference_dtype
    params = [torch.nn.Parameter(w.to(dtype)) for w in start_weights(case.dtype)]
    options = dict(case.options)
    base = options["lr"]
    rates = [torch.tensor(lr, device=DEVICE) if case.tensor_lr else lr for lr in (base, base / 3)]
    groups = [{"params": params[:4], "lr": rates[0]}, {"params": params[4:], "lr": rates[1]}]
    optimizer: torch.optim.Optimizer = case.cls(groups, **options, fused=True)
    if ours:
        optimizer = offstage.offload(optimizer, chunk_bytes="1MiB", min_bytes=0, **case.config)
    for number, grads in enumerate(gradients(steps, case.dtype)):
        factor = 0.5 * (1 + math.cos(math.pi * number / steps))
        for group, lr in zip(optimizer.param_groups, (base, base / 3), strict=True):
            if case.tensor_lr:
                group["lr"].fill_(lr * factor)
            else:
                group["lr"] = lr * factor
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in params], optimizer


def mismatches(case: Case, steps: int) -> dict[str, int]:
    """Elements that differ from the reference: weights, and each moment (and master) by name."""
    reference, plain = train(case, steps, ours=False)
    weights, offloaded = train(case, steps, ours=True)
    count = {"weights": sum(num_different(w, r.to(w.dtype)) for w, r in zip(weights, reference, strict=True))}
    ours, theirs = offloaded.state_dict()["state"], plain.state_dict()["state"]
    for index, expected in theirs.items():
        for name, value in expected.items():
            count[name] = count.get(name, 0) + num_different(ours[index][name].to(DEVICE), value.to(DEVICE))
        if "master_weight" in ours[index]:
            differ = num_different(ours[index]["master_weight"].to(DEVICE), reference[index])
            count["master_weight"] = count.get("master_weight", 0) + differ
    return count


def num_different(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    integers = {2: torch.int16, 4: torch.int32}[a.itemsize]  # bits, not values: +0 and -0 differ
    same = (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())
    return int((~same).sum())


def adam_l2(numel: int = 4_000_000) -> dict[str, list[int]]:
    """Where torch's fused Adam rounds `grad + weight_decay * param` once, and where twice, by index modulo 4.

    With beta1 = 0 the first moment after one step is that sum.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    param = torch.nn.Parameter(torch.randn(numel, generator=generator, device=DEVICE))
    weight, decay = param.detach().clone(), torch.tensor(0.1, device=DEVICE)
    param.grad = torch.randn(numel, generator=generator, device=DEVICE)
    optimizer = torch.optim.Adam([param], betas=(0.0, 0.5), weight_decay=0.1, fused=True)
    optimizer.step()
    found = optimizer.state[param]["exp_avg"]
    once = (param.grad.double() + weight.double() * decay.double()).float()
    twice = param.grad + weight * decay
    lane = torch.arange(numel, device=DEVICE) % 4
    return {
        "differ_from_one_rounding": [int((found != once)[lane == i].sum()) for i in range(4)],
        "differ_from_two_roundings": [int((found != twice)[lane == i].sum()) for i in range(4)],
    }


def compare(case: Case, steps: int, delayed: Lane | None = None) -> Row:
    with use_lanes(None if delayed is None else lambda device: DelayedLanes(device, delayed)):
        count = mismatches(case, steps)
    row = {"case": case.name, "steps": steps, "elements": sum(math.prod(shape) for shape in SHAPES)}
    return row | ({} if delayed is None else {"delayed_lane": delayed.value}) | {"mismatches": count}


def rows_of(case: Case, steps: int) -> Iterator[Row]:
    """Plainly, and maybe with each lane delayed in turn."""
    yield compare(case, steps)
    if case.name.removesuffix(", 50% updated by the CPU") in DELAYED and ON_GPU:
        for lane in (*LANES, *(LANES_TO_HOST if case in ON_HOST else ())):
            yield compare(case, steps, lane)


def main() -> None:
    by_name = {case.name: case for case in (*CASES, *ON_HOST)}
    in_groups = {case.name: ("CPU",) if case in ON_HOST else () for case in by_name.values()}
    cases = [harness.Case(name=name, groups=groups) for name, groups in {L2: (), **in_groups}.items()]
    options = harness.parse(harness.command(__doc__), cases)
    steps = 100 if options.size == "full" else 2

    def measure(case: harness.Case) -> Row | Iterator[Row]:
        return {"case": L2, **adam_l2()} if case.name == L2 else rows_of(by_name[case.name], steps)

    harness.run("bits", options.cases, measure)


if __name__ == "__main__":
    main()
