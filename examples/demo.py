# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT twice, with its optimizer state resident and streamed, and compares every bit.

    python -m examples.demo

Uses the accelerator if there is one. Without one the CPU plays the device: the same chunks take the same trips, and
only the saving is not real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID
from rich.table import Table

import offstage
from examples.gpt import GPT, Shape, make_repeatable, stdlib_bytes
from offstage.config import format_size
from offstage.plan import Placement, Plan
from offstage.receipt import Receipt

STEPS = 30
BATCH = 16
RUNS: dict[str, dict[str, Any]] = {
    "resident": {"fraction": 0.0},
    "streamed": {"chunk_bytes": "2MiB"},
}


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: its numbers, and how it came to them."""

    weights: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    loss: float
    plan: Plan
    receipt: Receipt


def train(
    device: torch.device, data: torch.Tensor, config: dict[str, Any], advance: Callable[[float], None]
) -> Outcome:
    """An ordinary loop; only the line with `offload()` is about offstage."""
    torch.manual_seed(0)
    shape = Shape()
    model = GPT(shape, activations=torch.float32 if device.type == "cpu" else torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = offstage.offload(optimizer, model, **config)
    for _ in range(STEPS):
        starts = torch.randint(len(data) - shape.context, (BATCH,)).tolist()
        batch = torch.stack([data[i : i + shape.context + 1] for i in starts]).long().to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        advance(loss.item())
    return Outcome(
        weights={name: param.detach().cpu() for name, param in model.named_parameters()},
        state=_flat(optimizer.state_dict()["state"]),
        loss=loss.item(),
        plan=optimizer.plan,
        receipt=optimizer.receipt(),
    )


def run_all(device: torch.device, console: Console) -> dict[str, Outcome]:
    """Both runs, with a bar each."""
    data = stdlib_bytes()
    outcomes = {}
    columns = ("{task.description:<9}", BarColumn(), MofNCompleteColumn(), "{task.fields[loss]}")
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=STEPS, loss="") for name in RUNS}
        for name, config in RUNS.items():

            def advance(loss: float, task: TaskID = tasks[name]) -> None:
                progress.update(task, advance=1, loss=f"loss {loss:.4f}")

            outcomes[name] = train(device, data, config, advance)
    return outcomes


def count_mismatches(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> int:
    """Elements whose bits differ."""
    assert ours.keys() == theirs.keys()
    integers = {2: torch.int16, 4: torch.int32}
    pairs = [(ours[name].view(integers[ours[name].itemsize]), theirs[name]) for name in ours]
    return sum(int((a != b.view(a.dtype)).sum()) for a, b in pairs)


def num_chunks(plan: Plan) -> int:
    """Every chunk but the last fills its slot."""
    return -(-plan.host_bytes // plan.slot_bytes) if plan.host_bytes else 0


def report(device: torch.device, outcomes: dict[str, Outcome], mismatches: dict[str, int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Where the optimizer's state lived", title_justify="left")
    table.add_column("")
    for name in outcomes:
        table.add_column(name, justify="right")

    def row(label: str, show: Callable[[Outcome], str], **options: Any) -> None:
        table.add_row(label, *(show(outcome) for outcome in outcomes.values()), **options)

    row("device: resident state", lambda o: format_size(o.plan.bytes_of(Placement.RESIDENT)))
    row("device: slots", lambda o: f"{o.plan.slots} × {format_size(o.plan.slot_bytes)}" if o.plan.slots else "none")
    row("host: arenas", lambda o: format_size(o.receipt.host_state_bytes), end_section=True)
    row("state on the device, in all", lambda o: format_size(o.receipt.device_state_bytes), style="bold")
    row("chunks per step", lambda o: f"{num_chunks(o.plan)}")
    row("fetched per step", lambda o: format_size(o.receipt.bytes_fetched))
    row("stored per step", lambda o: format_size(o.receipt.bytes_stored), end_section=True)
    row("final loss", lambda o: f"{o.loss:.6f}")
    for what, count in mismatches.items():
        table.add_row(what, "", f"{count} differ", style="red" if count else "green")
    if device.type == "cpu":
        table.caption = "No accelerator here: the CPU played the device, so nothing was really saved."
        table.caption_justify = "left"
    return table


def main() -> int:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    make_repeatable(device)
    console = Console()
    console.print(f"A small GPT, bf16 parameters, fp32 masters, AdamW, {STEPS} steps on {device}")
    outcomes = run_all(device, console)
    resident, streamed = outcomes["resident"], outcomes["streamed"]
    elements = {
        "weights": sum(weight.numel() for weight in resident.weights.values()),
        "all of the state": sum(tensor.numel() for tensor in resident.state.values()),
    }
    counts = (
        count_mismatches(streamed.weights, resident.weights),
        count_mismatches(streamed.state, resident.state),
    )
    labels = [f"{what} ({number:,} elements)" for what, number in elements.items()]
    console.print(report(device, outcomes, dict(zip(labels, counts, strict=True))))
    return 1 if any(counts) else 0


def _flat(state: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{index}.{name}": tensor for index, values in state.items() for name, tensor in values.items()}


if __name__ == "__main__":
    sys.exit(main())
