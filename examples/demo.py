# SPDX-License-Identifier: Apache-2.0
"""Everything once, in a minute or two: doctor, plan, training, kill -9, going on to the same bits, the report.

    python -m examples.demo

A small transformer is trained twice on the source of Python's standard library: with resident optimizer state and
never stopped; and with the state in host memory, killed on the way and gone on with. Then every bit is compared. The
commands are those that you would type. They use the accelerator if there is one; without one the CPU plays the device:
the same chunks take the same trips, and only the saving is not real.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from offstage import checkpoint
from offstage.config import Placement, format_size
from offstage.planning.plan import Plan

FOLDER = Path("runs/demo")
STEPS, KILLED_AFTER = 60, 47
SETTINGS = f"""\
[model]
size = "1M"

[data]
sequence = 128

[run]
steps = {STEPS}
save_every = 20
eval_every = 30
sample_every = {STEPS}
sample_bytes = 120
"""
RUNS = {
    "resident": ["--offload.fraction", "0"],
    "streamed": ["--offload.overlap-forward"],
}

console = Console(highlight=False)


def command(*arguments: str) -> list[str]:
    """Show a command as it is typed; the words to run it with."""
    console.print(f"$ offstage {shlex.join(arguments)}", style="cyan", markup=False, soft_wrap=True)
    return [sys.executable, "-m", "offstage", *arguments]


def ask(*arguments: str) -> None:
    """Run a command to its end."""
    sys.stdout.flush()
    status = subprocess.run(command(*arguments), check=False).returncode
    if status:
        sys.exit(f"That ended with status {status}, and so does the demo.")


def training(run: str) -> list[str]:
    return ["train", "--config", str(FOLDER / "demo.toml"), "--run.folder", str(FOLDER / run), *RUNS[run]]


def train_and_kill(run: str) -> None:
    """Watch a run through what it prints as JSON, and kill it without a warning."""
    words = command(*training(run), "--run.progress", "json")
    columns = ("training", BarColumn(), MofNCompleteColumn(), "{task.fields[loss]}")
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process,
        Progress(*columns, console=console) as progress,
    ):
        assert process.stdout is not None
        task = progress.add_task("", total=STEPS, loss="")
        for line in process.stdout:
            row = json.loads(line)
            if "tokens_per_s" in row:
                progress.update(task, completed=row["step"], loss=f"loss {row['loss']:.4f}")
                if row["step"] >= KILLED_AFTER:
                    process.kill()
                    break
    newest = checkpoint.latest(FOLDER / run / "checkpoints")
    if process.returncode != -9 or newest is None:
        sys.exit(f"It was to be killed after a checkpoint; it ended with {process.returncode}, and left {newest}.")
    console.print(
        f"kill -9 after step {row['step']}. The newest complete checkpoint is {newest.name}.", style="bold red"
    )


def tensors(run: str) -> dict[str, torch.Tensor]:
    """The last checkpoint as one file, made by stock torch: these are plain torch checkpoints."""
    newest = checkpoint.latest(FOLDER / run / "checkpoints")
    assert newest is not None
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(newest, f"{folder}/all.pt")
        found = torch.load(f"{folder}/all.pt", weights_only=True)
    state = found["optim"]["state"]
    weights = {f"weight {name}": value for name, value in found["model"].items()}
    return weights | {f"state {name} {key}": value for name, one in state.items() for key, value in one.items()}


def num_different() -> dict[str, tuple[int, int]]:
    """Of weights and state: elements, and how many have other bits."""
    resident, streamed = tensors("resident"), tensors("streamed")
    assert resident.keys() == streamed.keys()
    counts = {}
    for what in ("weight", "state"):
        pairs = [(one, streamed[name]) for name, one in resident.items() if name.startswith(what)]
        differ = [one.flatten().view(torch.uint8) != other.flatten().view(torch.uint8) for one, other in pairs]
        bytes_of = [one.itemsize for one, _ in pairs]
        elements = [int(d.view(-1, n).any(dim=1).sum()) for d, n in zip(differ, bytes_of, strict=True)]
        counts[what] = sum(one.numel() for one, _ in pairs), sum(elements)
    return counts


def table(different: dict[str, tuple[int, int]]) -> Table:
    """Where the state lived, and what came of it."""
    plans, receipts, losses = {}, {}, {}
    for run in RUNS:
        about = json.loads((FOLDER / run / "run.json").read_text())
        plans[run] = Plan.from_json(json.dumps(about["plan"]))
        receipts[run] = json.loads((FOLDER / run / "receipt.json").read_text())
        rows = [json.loads(line) for line in (FOLDER / run / "metrics.jsonl").read_text().splitlines()]
        losses[run] = rows[0]["loss"], rows[-1]["loss"], rows[-1]["eval_loss"]
    found = Table(box=box.SIMPLE_HEAD, title="Where the optimizer's state lived", title_justify="left")
    found.add_column("")
    for run, what in {"resident": "never stopped", "streamed": "killed, gone on"}.items():
        found.add_column(f"{run}\n{what}", justify="right")

    def row(label: str, values: dict[str, Any], **options: Any) -> None:
        found.add_row(label, *(str(values[run]) for run in RUNS), **options)

    row("device: resident state", {run: format_size(plan.bytes_of(Placement.RESIDENT)) for run, plan in plans.items()})
    slots = {
        run: f"{plan.slots} × {format_size(plan.slot_bytes)}" if plan.slots else "none" for run, plan in plans.items()
    }
    row("device: slots", slots)
    row("host: arenas", {run: format_size(one["host_state_bytes"]) for run, one in receipts.items()}, end_section=True)
    row("state on the device, in all", {run: format_size(one["device_state_bytes"]) for run, one in receipts.items()})
    row("saved on the device, net", {run: format_size(one["net_saved_bytes"]) for run, one in receipts.items()})
    row("fetched per step", {run: format_size(one["bytes_fetched"]) for run, one in receipts.items()})
    row("stored per step", {run: format_size(one["bytes_stored"]) for run, one in receipts.items()}, end_section=True)
    row("loss, first and last step", {run: f"{first:.4f} → {last:.4f}" for run, (first, last, _) in losses.items()})
    row("loss on data that was held out", {run: f"{held_out:.4f}" for run, (_, _, held_out) in losses.items()})
    for what, (number, differ) in different.items():
        label = {"weight": "weights", "state": "all of the state"}[what]
        found.add_row(f"{label} ({number:,} elements)", "", f"{differ} differ", style="red" if differ else "green")
    if torch.accelerator.current_accelerator() is None:
        found.caption = "No accelerator here: the CPU played the device, so nothing was really saved."
        found.caption_justify = "left"
    return found


def main() -> int:
    os.environ.setdefault("PYTHONPATH", "src")  # a checkout that nobody has installed
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (FOLDER / "demo.toml").write_text(SETTINGS)

    console.rule("What can this machine do?", align="left")
    ask("doctor")
    console.rule("What would a model that does not fit cost?", align="left")
    ask("plan", "150M", "--budget", "1GiB")
    console.rule("A run with resident state, never stopped", align="left")
    ask(*training("resident"))
    console.rule("The same with the state in host memory, and killed", align="left")
    train_and_kill("streamed")
    console.rule("The same command again goes on", align="left")
    ask(*training("streamed"))
    console.rule("Every bit compared", align="left")
    different = num_different()
    console.print(table(different))
    console.rule("The report", align="left")
    ask("report", str(FOLDER / "streamed"))

    console.rule("What to open", align="left")
    streamed = FOLDER / "streamed"
    for path, what in {
        streamed / "report.html": "figures: loss, memory by owner, lanes of one step, plan against measured",
        streamed / "samples.txt": f"what the model writes after {STEPS} steps",
        streamed / "metrics.jsonl": "a row per step",
        streamed / "config.toml": "all settings: offstage train --config … begins from here",
        Path("docs/quick_start.md"): "the next steps",
    }.items():
        console.print(f"  [bold]{path}[/]  {what}", soft_wrap=True)
    return 1 if any(differ for _, differ in different.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
