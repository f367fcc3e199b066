# SPDX-License-Identifier: Apache-2.0
"""How large a model trains on one device, and is its plan right before anything is allocated?

    python -m benchmarks.largest                 both cases, about four minutes on an H200 with 125 GiB of host memory
    python -m benchmarks.largest lossless        20.3B parameters: split masters, fp32 moments
    python -m benchmarks.largest bf16_moments    28.5B parameters: split masters, bf16 moments
    python -m benchmarks.largest --batch 4       four sequences a step: most of the time the link works, not the device
    python -m benchmarks.largest --size small    a few seconds on any machine: does every case run?

The workload's architecture, 6144 wide, one sequence of 2048 tokens per step, every block checkpointed. The weights are
on the device, with as much of the state as the host has no room for; the rest is streamed. Updates run in backward, and
each gradient is dropped behind its update. What `overlap_forward` leaves to `step()` would keep its gradients until
then: with so little compute in an iteration that is most of them, so it is off unless `--overlap-forward` asks for it.

Each case is a process of its own. First forward and backward are timed without an optimizer, then `make_plan` predicts
the iteration and both memories, then ten steps are made, on two batches and with a small learning rate, so that the
loss falls. `error` is predicted over measured, less one; `must` says whether the peak, since `offload()` began, is
within 5% and the time within 15%.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import offstage
from benchmarks import harness, workload
from benchmarks.common import ON_GPU, Row, clean_up, end_before_host_memory_does, gib
from benchmarks.harness import at_least, at_most
from benchmarks.plans import WORKLOAD_FIELDS, Bench
from benchmarks.workload import Size, Training, build, config_for, tokens
from offstage.config import OffloadConfig
from offstage.planning.sizes import param_sizes

STEPS, WARM_UP = 10, 4
LEARNING_RATE = 2e-5
HOST_BYTES = 111 * 2**30
"""For state, of a host with 125 GiB."""
SMALL_HOST_SHARE = 0.6
MOST_PEAK_ERROR, MOST_TIME_ERROR, MOST_LOSS = 0.05, 0.15, 0.99
TIMEOUT_S = 280

STREAMED: Mapping[str, Any] = {"master_weights": "split", "update_in_backward": True}


@dataclass(frozen=True, kw_only=True)
class Case(harness.Case):
    blocks: int
    config: Mapping[str, Any]
    least_params: float

    def model_size(self, size_name: str) -> Size:
        if size_name == "full":
            return Size(blocks=self.blocks, width=6144, hidden=16384, heads=48)
        return Size(blocks=4, width=64, hidden=128, heads=2, vocabulary=512, sequence=32)


CASES = [
    Case(name="lossless", blocks=44, config=STREAMED, least_params=20e9),
    Case(name="bf16_moments", blocks=62, config={**STREAMED, "state_dtype": "bfloat16"}, least_params=28e9),
]


def configured(case: Case, model: nn.Module, options: argparse.Namespace) -> dict[str, Any]:
    """With the budget that leaves the host no more state than it has room for."""
    config = config_for(options.size, {**case.config, "overlap_forward": options.overlap_forward})
    state = sum(size.state_bytes for size in param_sizes(model, OffloadConfig(**config)))
    on_host = HOST_BYTES if options.size == "full" else int(SMALL_HOST_SHARE * state)
    return {**config, "device_budget": state - on_host}


# Measuring


def measure(case: Case, options: argparse.Namespace) -> Row:
    """In a process of its own: nothing else may be on the device or the host."""
    begin = time.perf_counter()
    end_before_host_memory_does()
    size = case.model_size(options.size)
    model = build(size)
    batches = itertools.cycle([tokens(size, options.batch, seed) for seed in range(2)])
    bench = Bench(model, batches, options.size, clips=False)
    config = configured(case, model, options)
    plan = offstage.make_plan(model, bench.machine, OffloadConfig(**config), workload=bench.workload)
    start_bytes = clean_up()
    ready = time.perf_counter()
    optimizer = offstage.offload(workload.adamw(model, lr=LEARNING_RATE), model, **config)
    offload_s = time.perf_counter() - ready
    training = Training(model, optimizer, size, clip=None)
    training.batches = batches
    found = workload.since_start(training.measured(WARM_UP, STEPS - WARM_UP))
    row = {
        "config": config,
        "blocks": size.blocks,
        "parameters": bench.num_params,
        "weights_gib": gib(start_bytes),
        "offload_s": round(offload_s, 1),
        **found,
        "peak_reserved_gib": gib(torch.cuda.max_memory_reserved()) if ON_GPU else 0.0,
        "tokens_per_s": round(options.batch * size.sequence / found["iteration_ms"] * 1e3, 1),
        **training.counted(),
        "losses": [round(float(loss), 4) for loss in training.losses],
        "device_state_gib": gib(optimizer.receipt().device_state_bytes),
        "rss_peak_gib": gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
        "plan": optimizer.plan.summary(),
        "plan_notes": list(plan.notes),
        "workload": {name: getattr(bench.workload, name) for name in WORKLOAD_FIELDS},
    }
    return row | against(plan, row) | {"seconds": round(time.perf_counter() - begin, 1)}


# The prediction


def against(plan: offstage.Plan, row: Mapping[str, Any]) -> Row:
    """What was predicted, and by how much it was wrong."""
    assert plan.prediction is not None
    predicted = {
        "iteration_ms": round(plan.prediction.iteration_ms or 0.0, 1),
        "peak_gib": gib(plan.prediction.device_peak_bytes),
        "host_state_gib": gib(plan.prediction.host_bytes),
        "device_state_gib": gib(plan.prediction.device_state_bytes),
    }
    error = {name: round(value / row[name] - 1, 4) for name, value in predicted.items() if row[name]}
    return {"predicted": predicted, "error": error, "bottleneck": plan.prediction.bottleneck}


def must(case: Case, row: Mapping[str, Any]) -> Row:
    losses, half = row["losses"], STEPS // 2
    fell = statistics.mean(losses[half:]) / statistics.mean(losses[:half])
    return {
        "parameters": at_least(case.least_params, row["parameters"]),
        "steps": at_least(STEPS, len(losses)),
        "loss_second_half_over_first": at_most(MOST_LOSS, round(fell, 4)),
        "peak_error": at_most(MOST_PEAK_ERROR, abs(row["error"]["peak_gib"])),
        "time_error": at_most(MOST_TIME_ERROR, abs(row["error"]["iteration_ms"])),
    }


# The command


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--overlap-forward", action="store_true", help="leave some of the updates to the next forward")
    options = harness.parse(parser, CASES)
    if options.result:
        (only,) = options.cases
        harness.report(options.result, lambda: measure(only, options))
    arguments = ["--size", options.size, "--batch", str(options.batch)]
    arguments += ["--overlap-forward"] if options.overlap_forward else []
    failed: list[str] = []

    def measured(case: Case) -> Iterator[Row]:
        row = harness.described(case) | {"size": options.size, "batch": options.batch}
        row |= harness.in_own_process(case.name, arguments, variables={}, timeout_s=TIMEOUT_S)
        if isinstance(row["error"], str):
            failed.append(case.name)
        elif options.size == "full":
            row["must"] = must(case, row)
        yield row

    harness.run("largest", options.cases, measured, failed=failed)


if __name__ == "__main__":
    main()
