# SPDX-License-Identifier: Apache-2.0
"""Does the trainer cost anything beside the library, and how large a model does one device train?

    python -m benchmarks.train                     both cases, about three minutes on one H200
    python -m benchmarks.train largest             18B parameters: full AdamW, lossless state, ten optimizer steps
    python -m benchmarks.train --size small        a few seconds on any machine: does every case run?

`workload`: 2.70B parameters, 8 x 2048 tokens, every block checkpointed, split masters, clipping. First a plain loop
over the trainer's own model with `offload()`, then `offstage train` with the same settings, in the same process;
`ratio` is the median time of a step over that of the plain loop, and must be within 3%.

`largest`: what is on the device and on the host, by owner, with the tokens per second. Nothing is saved: a checkpoint
would not fit the disk of most machines.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import offstage
from benchmarks import harness
from benchmarks.common import DEVICE, Row, clean_up, gib
from benchmarks.harness import Case, at_least, at_most
from offstage.train.config import TrainConfig, load_config
from offstage.train.data import Batches, Corpus
from offstage.train.loop import run
from offstage.train.model import build

MAX_RATIO = 1.03
LEAST_PARAMETERS = 18e9
WARM_UP = 3

COMMON = ["--run.deterministic", "false", "--run.eval-every", "0", "--run.save-every", "0", "--run.save-last", "false"]
CASES: dict[str, dict[str, list[str]]] = {
    "workload": {
        "full": [
            *("--model.size", "2.7B", "--data.sequence", "2048", "--data.batch", "8", "--run.steps", "9"),
            *("--activations.mode", "checkpoint", "--offload.master-weights", "split"),
        ],
        "small": ["--model.size", "1M", "--data.sequence", "64", "--data.batch", "2", "--run.steps", "9"],
    },
    "largest": {
        "full": [
            *("--model.size", "18B", "--data.sequence", "2048", "--data.batch", "2", "--run.steps", "10"),
            *("--activations.mode", "checkpoint_and_offload", "--offload.master-weights", "split"),
            *("--offload.fraction", "0.64"),
        ],
        "small": ["--model.size", "1M", "--data.sequence", "64", "--data.batch", "1", "--run.steps", "10"],
    },
}


def settings(case: str, size: str, folder: Path) -> tuple[TrainConfig, list[str]]:
    arguments = [*CASES[case][size], *COMMON, "--run.folder", str(folder), "--run.progress", "quiet"]
    return load_config(None, arguments), arguments


# The plain loop


def library_ms(config: TrainConfig, folder: Path) -> float:
    """The median time of a step of the loop that a user would write."""
    dtype = config.model.dtype_on(DEVICE)
    model = build(config.model, device=DEVICE, dtype=dtype, sequence=config.data.sequence)
    if config.activations.mode == "checkpoint":
        model.checkpoint_layers()
    adamw = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, betas=config.optimizer.betas)
    optimizer = offstage.offload(adamw, model, config.offload)
    training, _ = Corpus(config.data.paths, cache=folder).split(config.data.eval_share)
    batches = Batches(training, config.data.sequence, config.data.batch, 0)
    times = [time.perf_counter()]
    for _ in range(config.run.steps):
        tokens = batches.next().to(DEVICE)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.clip_grad_norm_(config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter())
    optimizer.close()
    return 1e3 * statistics.median([b - a for a, b in itertools.pairwise(times)][WARM_UP:])


# The trainer


def metrics_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(config: TrainConfig) -> list[Row]:
    """The rows of a run."""
    result = run(config)
    assert result.step == config.run.steps
    return metrics_of(result.folder)


def workload(size: str, folder: Path) -> Row:
    config, arguments = settings("workload", size, folder)
    library = library_ms(config, folder)
    clean_up()
    rows = trained(config)
    counted = [row["step_ms"] for row in rows[WARM_UP:] if row["step"] != config.run.observe_step]
    found = statistics.median(counted)
    return {
        "arguments": said(arguments),
        "library_ms": round(library, 1),
        "trainer_ms": round(found, 1),
        "times_ms": [round(row["step_ms"], 1) for row in rows],
        "ratio": round(found / library, 4),
        "first_and_last_loss": [rows[0]["loss"], rows[-1]["loss"]],
        **({"must": {"ratio": at_most(MAX_RATIO, round(found / library, 4))}} if size == "full" else {}),
    }


def largest(size: str, folder: Path) -> Row:
    config, arguments = settings("largest", size, folder)
    rows = trained(config)
    about = json.loads((folder / "run.json").read_text())
    receipt = json.loads((folder / "receipt.json").read_text())
    observed = json.loads((folder / "observed.json").read_text()) if (folder / "observed.json").exists() else {}
    step_ms = statistics.median(row["step_ms"] for row in rows[2:])
    return {
        "arguments": said(arguments),
        "parameters": about["parameters"],
        "steps": len(rows),
        "times_ms": [round(row["step_ms"], 1) for row in rows],
        "tokens_per_s": round(about["tokens_per_step"] / step_ms * 1e3, 1),
        "losses": [row["loss"] for row in rows],
        "device_peak_gib": gib(max(row["device_peak_bytes"] or 0 for row in rows)),
        "host_state_gib": gib(receipt["host_state_bytes"]),
        "device_state_gib": gib(receipt["device_state_bytes"]),
        "host_peak_rss_gib": gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "receipt": receipt,
        "most_by_owner_gib": most_by_owner(observed),
        "must": {"parameters": at_least(LEAST_PARAMETERS, about["parameters"])},
    }


def most_by_owner(observed: Mapping[str, Any]) -> dict[str, float]:
    """The most that each owner held in the step that was observed."""
    owners: Mapping[str, list[int]] = observed.get("memory", {}).get("bytes", {})
    return {owner: gib(max(samples, default=0)) for owner, samples in owners.items()}


def said(arguments: list[str]) -> str:
    """The command's settings, without the folder of this run."""
    at = arguments.index("--run.folder")
    return " ".join(arguments[:at] + arguments[at + 2 :])


def measure(case: Case, size: str) -> Row:
    begin = time.perf_counter()
    clean_up()
    with tempfile.TemporaryDirectory() as folder:
        row = (workload if case.name == "workload" else largest)(size, Path(folder))
    return {"case": case.name, "size": size, **row, "seconds": time.perf_counter() - begin}


def main() -> None:
    options = harness.parse(harness.command(__doc__), harness.cases_of(CASES))
    harness.run("train", options.cases, lambda case: measure(case, options.size))


if __name__ == "__main__":
    main()
