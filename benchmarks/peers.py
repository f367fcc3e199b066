# SPDX-License-Identifier: Apache-2.0
"""How long does an iteration take when the CPU updates: offstage, and the libraries that do the same?

    python -m benchmarks.fetch_peers           once, where there is a network
    python -m benchmarks.peers                 every case, about nine minutes on one H200
    python -m benchmarks.peers peers host      these cases or groups (peers, offstage), and the resident baseline
    python -m benchmarks.peers --size small    a tiny model: does every case run?

The 2.70B workload, 8 x 2048 tokens, AdamW. Every case is a process of its own, so that memory, libraries and crashes
stay apart; `ratio` is its time over that of resident state with fp32 masters, measured first. A case that fails or runs
out of time gets a row that says why.

`iteration_ms` is the mean over one span that begins and ends with everything idle. `step_ms` is the update alone, from
an idle machine until every weight is final, with the system's own clipping if it has one; torch's clipping is outside.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import offstage
from benchmarks import workload
from benchmarks.common import rss_bytes, write_row
from benchmarks.fetch_peers import environment

SIZES = {
    "full": workload.Size(),
    "small": workload.Size(blocks=4, width=256, hidden=512, heads=4, vocabulary=1000, sequence=128),
}
SMALL_CHUNKS = {"chunk_bytes": "256KiB"}  # or the small model would be a single chunk
BATCH = 8
MAX_NORM = 1.0
ADAMW: Mapping[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}  # of workload.adamw
WARM_UP = 3
STEPS_ALONE = 2
LAST_LINES = 15

LOSSLESS = "fp32 masters and moments"
BF16_STATE = "bf16 moments, no masters"

Clip = Literal["outside", "optimizer"] | None
"""By `torch.nn.utils.clip_grad_norm_`, by the system itself, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a system, what it is given, and how it clips."""

    name: str
    system: str = "offstage"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `OffloadConfig`, or the peer's own arguments."""
    clip: Clip = "outside"
    numerics: str = LOSSLESS
    timeout_s: int = 150
    group: str = "peers"


# The cases


def host_cases(name: str, formats: Mapping[str, Any], numerics: str, clip: Clip) -> list[Case]:
    """Updates on the host in `step()`, under the next forward as well, and in backward as well."""
    in_step = {"update_on": "host", **formats}
    overlap = {**in_step, "overlap_forward": True}
    in_backward = {**overlap, "update_in_backward": True}
    return [
        Case(name=name, options=in_step, numerics=numerics, clip=clip, group="offstage"),
        Case(name=f"{name}_overlap", options=overlap, numerics=numerics, clip=clip, group="offstage"),
        Case(name=f"{name}_in_backward", options=in_backward, numerics=numerics, clip=None, group="offstage"),
    ]


RESIDENT = Case(name="resident", options={"fraction": 0.0, "master_weights": "fp32"}, group="resident")
BF16_FORMATS = {"master_weights": "none", "state_dtype": "bfloat16"}
TORCHAO = {"system": "torchao", "clip": None, "numerics": BF16_STATE}  # gradients leave before a norm is known
DEEPSPEED = {"system": "deepspeed", "clip": "optimizer", "timeout_s": 240}  # the first one compiles

CASES = [
    RESIDENT,
    Case(name="torchao", options={"offload_gradients": False}, **TORCHAO),  # type: ignore[arg-type]
    Case(name="torchao_offload_gradients", options={"offload_gradients": True}, **TORCHAO),  # type: ignore[arg-type]
    Case(name="deepspeed", options={"overlap_comm": False}, **DEEPSPEED),  # type: ignore[arg-type]
    Case(name="deepspeed_overlap_comm", options={"overlap_comm": True}, **DEEPSPEED),  # type: ignore[arg-type]
    Case(name="megatron", system="megatron", options={"overlap_cpu_optimizer_d2h_h2d": True}),
    *host_cases("host", {"master_weights": "fp32"}, LOSSLESS, "outside"),
    *host_cases("host_split", {"master_weights": "split"}, "split masters, fp32 moments (lossless)", "outside"),
    *host_cases("host_bf16", BF16_FORMATS, BF16_STATE, None),  # unclipped, as torchao is
    Case(name="auto", options={"update_on": "auto", "master_weights": "fp32"}, group="offstage"),
]


# The systems: each trains `model` by `forward_backward()` and `step()`


class System:
    """A model and an optimizer in the loop a user would write."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, clip: Clip) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens)
        loss.backward()
        if self.clip == "outside":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Wait until every weight is final."""
        torch.cuda.synchronize()

    def counted(self) -> dict[str, Any]:
        return {}


class Offstage(System):
    def step(self) -> None:
        if self.clip == "optimizer":
            self.optimizer.clip_grad_norm_(MAX_NORM)
        super().step()

    def finish(self) -> None:
        self.optimizer.synchronize()
        super().finish()

    def counted(self) -> dict[str, Any]:
        receipt = dataclasses.asdict(self.optimizer.receipt())
        return {"receipt": {name: value for name, value in receipt.items() if isinstance(value, int | float | dict)}}


class DeepSpeed(System):
    """The engine is model and optimizer at once."""

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens)
        self.optimizer.backward(loss)
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step()


def build_offstage(case: Case, model: torch.nn.Module, size: str) -> System:
    options = {**case.options, **(SMALL_CHUNKS if size == "small" else {})}
    return Offstage(model, offstage.offload(workload.adamw(model), model, **options), case.clip)


def build_torchao(case: Case, model: torch.nn.Module, size: str) -> System:
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **case.options, **ADAMW)
    return System(model, optimizer, case.clip)


def build_megatron(case: Case, model: torch.nn.Module, size: str) -> System:
    """With the arguments that Megatron-core's own optimizer builder gives; `fused` is for the CPU's AdamW."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    optimizer = HybridDeviceOptimizer(
        [{"params": list(model.parameters())}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        pin_cpu_grads=True,
        pin_cpu_params=True,
        bias_correction=True,
        fused=True,
        **case.options,
        **ADAMW,
    )
    return System(model, optimizer, case.clip)


def build_deepspeed(case: Case, model: torch.nn.Module, size: str) -> System:
    """ZeRO-2 with the optimizer on the CPU, as a single rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "contiguous_gradients": True,
            **case.options,
        },
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return DeepSpeed(engine, engine, case.clip)


BUILDERS: Mapping[str, Callable[[Case, torch.nn.Module, str], System]] = {
    "offstage": build_offstage,
    "torchao": build_torchao,
    "megatron": build_megatron,
    "deepspeed": build_deepspeed,
}
PACKAGES = {"torchao": "torchao", "megatron": "megatron-core"}


# Measuring, in the case's own process


class Training:
    def __init__(self, case: Case, size: str) -> None:
        start = time.perf_counter()
        model = workload.build(SIZES[size])
        self._batches = itertools.cycle([workload.tokens(SIZES[size], BATCH, seed) for seed in range(8)])
        self.system = BUILDERS[case.system](case, model, size)
        self.losses: list[torch.Tensor] = []
        self.system.finish()
        self.build_s = time.perf_counter() - start

    def iterate(self, iterations: int) -> float:
        """Milliseconds of an iteration. The host waits before the first and after the last only."""
        self.system.finish()
        start = time.perf_counter()
        for _ in range(iterations):
            self.losses.append(self.system.forward_backward(next(self._batches)))
            self.system.step()
        self.system.finish()
        return 1e3 * (time.perf_counter() - start) / iterations

    def step_alone(self) -> float:
        """Milliseconds from the end of backward until every weight is final."""
        self.losses.append(self.system.forward_backward(next(self._batches)))
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.system.step()
        self.system.finish()
        return 1e3 * (time.perf_counter() - start)


def measure(case: Case, size: str, iterations: int) -> dict[str, Any]:
    training = Training(case, size)
    warm_up_ms = training.iterate(WARM_UP)
    warm_up_peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    iteration_ms = training.iterate(iterations)
    peak = torch.cuda.max_memory_allocated()
    steps_ms = [training.step_alone() for _ in range(STEPS_ALONE)]
    losses = [float(loss) for loss in training.losses]
    return {
        "iteration_ms": round(iteration_ms, 1),
        "step_ms": round(sum(steps_ms) / len(steps_ms), 1),
        "peak_gib": gib(peak),
        "peak_gib_since_start": gib(max(peak, warm_up_peak)),
        "rss_gib": gib(rss_bytes()),
        "rss_peak_gib": gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
        "build_s": round(training.build_s, 1),
        "warm_up_s": round(1e-3 * warm_up_ms * WARM_UP, 1),
        "first_and_last_loss": [round(loss, 4) for loss in (losses[0], losses[-1])],
        "version": version_of(case),
        **training.system.counted(),
    }


def version_of(case: Case) -> str | None:
    if case.system == "deepspeed":  # unpacked from its sdist, without metadata
        return sys.modules["deepspeed"].__version__.strip()
    return importlib.metadata.version(PACKAGES[case.system]) if case.system in PACKAGES else offstage.__version__


def gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 3)


def run_here(case: Case, options: argparse.Namespace) -> None:
    """Measure in this process and leave one line of JSON in the file the parent named."""
    try:
        found = measure(case, options.size, options.iterations)
        options.result.write_text(json.dumps(found) + "\n")
    except Exception:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # freeing tens of GiB of pinned memory piece by piece takes longer than the measurement


# The parent


def run_apart(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """What the case's process found, or why it found nothing. The process and all it started end with this call."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.peers", case.name, "--result", str(result)]
        command += ["--size", options.size, "--iterations", str(options.iterations)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment(), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # so that a compiler it started can be ended with it
            )
            try:
                status = str(process.wait(case.timeout_s))
            except subprocess.TimeoutExpired:
                status = f"no end after {case.timeout_s} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if result.exists():
            return json.loads(result.read_text())  # type: ignore[no-any-return]
        lines = log.read_text(errors="replace").splitlines()
        return {"error": "\n".join([*lines[-LAST_LINES:], f"exit: {status}"])}


def described(case: Case, size: str) -> dict[str, Any]:
    return {
        "case": case.name,
        "system": case.system,
        "size": size,
        "options": dict(case.options),
        "clip": case.clip,
        "numerics": case.numerics,
    }


def compared(row: Mapping[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """`row` against resident state, and offstage against each peer of the same run."""
    times = {other["case"]: other.get("iteration_ms") for other in [*earlier, row]}
    found = row.get("iteration_ms")
    ratios = {name: round(found / ms, 4) for name, ms in times.items() if found and ms}
    result = {"resident_ms": times.get("resident"), "ratio": ratios.get("resident")}
    if row["system"] == "offstage":
        peers = [other["case"] for other in earlier if other["system"] != "offstage"]
        result["ratio_to"] = {name: ratios[name] for name in peers if name in ratios}
    return result


def summary(row: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    if "error" in row:
        return f"{row['case']:<28} {row['error'].splitlines()[-2:]}"
    ratio = f"{row['ratio']:.3f} x" if row["ratio"] else ""
    return (
        f"{row['case']:<28} {row['iteration_ms']:8.1f} ms {ratio:>9}  step {row['step_ms']:7.1f} ms"
        f"  peak {row['peak_gib']:6.2f} GiB  rss {row['rss_gib']:6.2f} GiB  build {row['build_s']:5.1f} s"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Whole iterations with updates on the CPU: offstage and its peers.")
    known = [case.name for case in CASES] + sorted({case.group for case in CASES} - {"resident"})
    parser.add_argument("case", nargs="*", help=f"all of them unless named: {', '.join(known)}")
    parser.add_argument("--iterations", type=int, default=6, help=f"measured after {WARM_UP} to warm up")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--result", type=Path, help="measure one case in this process and write what was found here")
    options = parser.parse_args()
    unknown = [name for name in options.case if name not in known]
    if unknown:
        parser.error(f"no case or group {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def main() -> None:
    options = arguments()
    if options.result:
        run_here(next(case for case in CASES if case.name == options.case[0]), options)
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        asked_for = not options.case or case.name in options.case or case.group in options.case
        if not asked_for and case is not RESIDENT:
            continue
        print(f"[{time.perf_counter() - begin:4.0f} s] {case.name}: {dict(case.options)}", flush=True)
        row = described(case, options.size) | {"iterations": options.iterations} | run_apart(case, options)
        rows.append(row | compared(row, rows))
        write_row("peers", rows[-1])
    print(f"\n{time.perf_counter() - begin:.0f} s in all", *map(summary, rows), sep="\n")
    failed = [row["case"] for row in rows if "error" in row]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
