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

import dataclasses
import importlib.metadata
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import offstage
from benchmarks import fsdp2, harness, workload
from benchmarks.common import ON_GPU, Row, gib, peak_bytes, reset_peak, rss_bytes, settle_collector, synchronize
from benchmarks.fetch_peers import environment
from benchmarks.workload import BATCH, MAX_NORM, SIZES, Clip

ADAMW: Mapping[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}  # of workload.adamw
WARM_UP = 3
STEPS_ALONE = 2

LOSSLESS = "fp32 masters and moments"
BF16_STATE = "bf16 moments, no masters"
FP32_WEIGHTS = "fp32 weights and moments, bf16 compute"


@dataclass(frozen=True, kw_only=True)
class Case(harness.Case):
    """One row: a system, what it is given, and how it clips."""

    needs: tuple[str, ...] = ("resident",)
    groups: tuple[str, ...] = ("peers",)
    system: str = "offstage"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `OffloadConfig`, or the peer's own arguments."""
    clip: Clip = "outside"
    numerics: str = LOSSLESS
    timeout_s: int = 150


# The cases


def host_cases(name: str, formats: Mapping[str, Any], numerics: str, clip: Clip) -> list[Case]:
    """Updates on the host in `step()`, under the next forward as well, and in backward as well."""
    in_step = {"update_on": "host", **formats}
    overlap = {**in_step, "overlap_forward": True}
    in_backward = {**overlap, "update_in_backward": True}
    return [
        Case(name=name, options=in_step, numerics=numerics, clip=clip, groups=("offstage",)),
        Case(name=f"{name}_overlap", options=overlap, numerics=numerics, clip=clip, groups=("offstage",)),
        Case(name=f"{name}_in_backward", options=in_backward, numerics=numerics, clip=None, groups=("offstage",)),
    ]


BF16_FORMATS = {"master_weights": "none", "state_dtype": "bfloat16"}
TORCHAO = {"system": "torchao", "clip": None, "numerics": BF16_STATE}  # gradients leave before a norm is known
DEEPSPEED: Mapping[str, Any] = {"system": "deepspeed", "clip": "optimizer", "timeout_s": 240}  # the first one compiles

CASES = [
    Case(name="resident", options=workload.RESIDENT, groups=()),
    Case(name="torchao", options={"offload_gradients": False}, **TORCHAO),  # type: ignore[arg-type]
    Case(name="torchao_offload_gradients", options={"offload_gradients": True}, **TORCHAO),  # type: ignore[arg-type]
    Case(name="deepspeed", options={"overlap_comm": False}, **DEEPSPEED),
    Case(name="deepspeed_overlap_comm", options={"overlap_comm": True}, **DEEPSPEED),
    Case(name="megatron", system="megatron", options={"overlap_cpu_optimizer_d2h_h2d": True}),
    *host_cases("host", {"master_weights": "fp32"}, LOSSLESS, "outside"),
    *host_cases("host_split", {"master_weights": "split"}, "split masters, fp32 moments (lossless)", "outside"),
    *host_cases("host_bf16", BF16_FORMATS, BF16_STATE, None),  # unclipped, as torchao is
    Case(name="auto", options={"update_on": "auto", "master_weights": "fp32"}, groups=("offstage",)),
]
WEIGHTS_TOO = (
    Case(name="zero3", options={"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}, **DEEPSPEED),
    Case(name="fsdp2", system="fsdp2", options={"pin_memory": True}, numerics=FP32_WEIGHTS, timeout_s=240),
)
"""Systems with the weights on the host as well, for benchmarks that have them there."""


# The systems: each trains `model` by `forward_backward()` and `step()`


class System(workload.Training):
    """A model and an optimizer in the loop a user would write."""

    def finish(self) -> None:
        """Wait until every weight is final."""
        synchronize()

    def mean_ms(self, iterations: int) -> float:
        """Of an iteration. The host waits before the first and after the last only."""
        self.finish()
        start = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        self.finish()
        return 1e3 * (time.perf_counter() - start) / iterations

    def step_alone(self) -> float:
        """Milliseconds from the end of backward until every weight is final."""
        self.forward_backward()
        synchronize()
        start = time.perf_counter()
        self.step()
        self.finish()
        return 1e3 * (time.perf_counter() - start)

    def counted(self) -> Row:
        return {}


class Offstage(System):
    def finish(self) -> None:
        self.optimizer.synchronize()
        super().finish()

    def counted(self) -> Row:
        return {"receipt": workload.receipt_numbers(self.optimizer.receipt())}


class DeepSpeed(System):
    """The engine is model and optimizer at once, and clips in its step."""

    def clip_gradients(self) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.backward(loss)

    def step(self) -> None:
        self.optimizer.step()


def build_offstage(case: Case, model: nn.Module, size: str) -> System:
    return Offstage(model, workload.offloaded(model, size, case.options), SIZES[size], clip=case.clip)


def build_torchao(case: Case, model: nn.Module, size: str) -> System:
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **case.options, **ADAMW)
    return System(model, optimizer, SIZES[size], clip=case.clip)


def build_megatron(case: Case, model: nn.Module, size: str) -> System:
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
    return System(model, optimizer, SIZES[size], clip=case.clip)


def build_deepspeed(case: Case, model: nn.Module, size: str) -> System:
    """ZeRO-2, or what the options say, with the optimizer on the CPU, as a single rank."""
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
    return DeepSpeed(engine, engine, SIZES[size], clip=case.clip)


def build_fsdp2(case: Case, model: nn.Module, size: str) -> System:
    """Weights, gradients and updates on the CPU, as a single rank."""
    fsdp2.begin_one_rank("cpu:gloo,cuda:nccl")  # gloo for the norm of gradients on the host
    computes = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    on_host = CPUOffloadPolicy(pin_memory=ON_GPU and case.options["pin_memory"])
    fsdp2.sharded(model.float(), mp_policy=computes, offload_policy=on_host)
    return System(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), SIZES[size], clip=case.clip)


BUILDERS: Mapping[str, Callable[[Case, nn.Module, str], System]] = {
    "offstage": build_offstage,
    "torchao": build_torchao,
    "megatron": build_megatron,
    "deepspeed": build_deepspeed,
    "fsdp2": build_fsdp2,
}
PACKAGES = {"torchao": "torchao", "megatron": "megatron-core", "fsdp2": "torch"}


# Measuring, in the case's own process


def measure(
    case: Case,
    size: str,
    iterations: int,
    *,
    warm_up: int = WARM_UP,
    steps_alone: int = STEPS_ALONE,
    build: Callable[[str], nn.Module] = lambda size: workload.build(SIZES[size]),
) -> Row:
    start = time.perf_counter()
    system = BUILDERS[case.system](case, build(size), size)
    system.finish()
    build_s = time.perf_counter() - start
    warm_up_ms = system.mean_ms(warm_up)
    settle_collector()
    warm_up_peak = peak_bytes()
    reset_peak()
    iteration_ms = system.mean_ms(iterations)
    peak = peak_bytes()
    steps_ms = [system.step_alone() for _ in range(steps_alone)]
    losses = [float(loss) for loss in system.losses]
    return {
        "iteration_ms": round(iteration_ms, 1),
        "step_ms": round(sum(steps_ms) / len(steps_ms), 1) if steps_ms else None,
        "peak_gib": gib(peak),
        "peak_gib_since_start": gib(max(peak, warm_up_peak)),
        "rss_gib": gib(rss_bytes()),
        "rss_peak_gib": gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
        "build_s": round(build_s, 1),
        "warm_up_s": round(1e-3 * warm_up_ms * warm_up, 1),
        "first_and_last_loss": [round(loss, 4) for loss in (losses[0], losses[-1])],
        "version": version_of(case),
        **system.counted(),
    }


def version_of(case: Case) -> str | None:
    if case.system == "deepspeed":  # unpacked from its sdist, without metadata
        return sys.modules["deepspeed"].__version__.strip()
    return importlib.metadata.version(PACKAGES[case.system]) if case.system in PACKAGES else offstage.__version__


# The parent


def about(case: Case, size: str, iterations: int) -> Row:
    """The beginning of a case's row."""
    return harness.described(case, "system", "options", "clip", "numerics") | {"size": size, "iterations": iterations}


def compared(row: Mapping[str, Any], earlier: list[Row]) -> Row:
    """`row` against resident state, and offstage against each peer of the same run."""
    times = {other["case"]: other.get("iteration_ms") for other in [*earlier, row]}
    found = row.get("iteration_ms")
    ratios = {name: round(found / ms, 4) for name, ms in times.items() if found and ms}
    result = {"resident_ms": times.get("resident"), "ratio": ratios.get("resident")}
    if row["system"] == "offstage":
        peers = [other["case"] for other in earlier if other["system"] != "offstage"]
        result["ratio_to"] = {name: ratios[name] for name in peers if name in ratios}
    return result


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--iterations", type=int, default=6, help=f"measured after {WARM_UP} to warm up")
    options = harness.parse(parser, CASES)
    if options.result:
        case = options.cases[-1]  # behind the one it needs
        harness.report(options.result, lambda: measure(case, options.size, options.iterations))
    arguments = ["--size", options.size, "--iterations", str(options.iterations)]
    done: list[Row] = []
    failed: list[str] = []

    def measured(case: Case) -> Iterator[Row]:
        found = harness.in_own_process(case.name, arguments, variables=environment(), timeout_s=case.timeout_s)
        row = about(case, options.size, options.iterations) | found
        done.append(row | compared(row, done))
        failed.extend([case.name] if "error" in row else [])
        yield done[-1]

    harness.run("peers", options.cases, measured, failed=failed)


if __name__ == "__main__":
    main()
