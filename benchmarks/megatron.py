# SPDX-License-Identifier: Apache-2.0
"""How long does an iteration of Megatron's own GPT take with its optimizer state off the device?

    python -m benchmarks.fetch_peers              once, where there is a network
    python -m benchmarks.megatron                 every case on one GPU
    python -m benchmarks.megatron hdo streamed    these cases or groups (also auto, window, bits), and resident
    python -m benchmarks.megatron --size small    a tiny model: does every case run? Also without a GPU

megatron-core's GPT of 1.68B parameters in bf16: its layers (every one recomputed, its own unfused attention), its DDP
with its DistributedOptimizer, its schedule and its clipping, one rank, 4 x 2048 tokens. Every case is a process of its
own; `ratio` is its time over that of resident state, measured first.

resident        Megatron as it is, fp32 masters on the device, torch's fused AdamW inside
hdo_F           its `HybridDeviceOptimizer` with overlap: F percent of the state are updated by the CPU
streamed_F      offstage in the same optimizer: F percent live on the host and are updated on the device
auto_F          the same, and the CPU updates the share of it that the planner finds
mixed_F         as streamed_F, and the CPU updates 30 percent of it
window          all of it lives on the host and is back for the step, as `offload_optimizer_states` would have it
bits_*          50 steps, deterministic: a digest of all weights, to be that of `bits_resident`, Megatron as it is.
                Without a GPU, where torch's AdamW rounds differently, to be that of `bits_off`, offstage's resident

`peak_gib` is the most of timed iterations, `step_peak_gib` that of the step alone, and `state_off_gib` how much less
than with resident state is allocated when forward begins. Without a GPU the patches of tests/support/megatron.py let
the CPU play one; `HybridDeviceOptimizer` is then built and not stepped, which needs CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import offstage
from benchmarks import harness, workload
from benchmarks.common import (
    DEVICE,
    ON_GPU,
    Row,
    allocated_bytes,
    gib,
    peak_bytes,
    reset_peak,
    rss_bytes,
    synchronize,
)
from benchmarks.fetch_peers import environment
from benchmarks.fsdp2 import begin_one_rank
from benchmarks.harness import at_least, at_most

IMPORTS = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel",
    "offstage.integrations.megatron",
)
WARM_UP = 3
STEPS_ALONE = 2
BITS_STEPS = 50
FRACTIONS = (0.25, 0.5, 1.0)
TIMES_FASTER = 2.0
"""Than HybridDeviceOptimizer, with all state off the device."""


@dataclass(frozen=True)
class Size:
    layers: int = 24
    width: int = 2304
    heads: int = 18
    vocabulary: int = 32_000
    sequence: int = 2048
    batch: int = 4


SIZES = {"full": Size(), "small": Size(layers=2, width=64, heads=2, vocabulary=256, sequence=16, batch=2)}


@dataclass(frozen=True, kw_only=True)
class Case(harness.Case):
    needs: tuple[str, ...] = ("resident",)
    system: str = "offstage"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `OffloadConfig`, or of Megatron's `OptimizerConfig`."""
    fraction: float | None = None
    timeout_s: int = 240


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f}"


def hdo(fraction: float) -> Case:
    options = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,  # without which its DistributedOptimizer keeps masters on the device
    }
    return Case(name=f"hdo_{percent(fraction)}", system="hdo", options=options, fraction=fraction, groups=("hdo",))


def ours(kind: str, fraction: float, suffix: str = "", **options: Any) -> Case:
    needs = ("resident", f"hdo_{percent(fraction)}")
    settings = {"fraction": fraction, "master_weights": "fp32", **options}
    settings |= {"min_bytes": 0} if fraction == 1.0 else {}  # all of it, as there
    name = f"{kind}_{percent(fraction)}{suffix}"
    return Case(name=name, options=settings, fraction=fraction, groups=(kind,), needs=needs)


SAME_AS = "bits_resident" if ON_GPU else "bits_off"


def bits(name: str, options: Mapping[str, Any], system: str = "offstage") -> Case:
    needs = () if name in ("resident", "off") else (SAME_AS,)
    return Case(name=f"bits_{name}", system=system, options=options, groups=("bits",), needs=needs)


WINDOW: Mapping[str, Any] = {"window": "all", "master_weights": "fp32"}
CASES = [
    Case(name="resident", system="megatron", needs=()),
    *map(hdo, FRACTIONS),
    *(ours("streamed", fraction) for fraction in FRACTIONS),
    *(ours("auto", fraction, update_on="auto") for fraction in FRACTIONS),
    ours("streamed", 1.0, "_split", master_weights="split"),
    ours("mixed", 1.0, "_split", master_weights="split", host_fraction=0.3),
    Case(name="window", options=WINDOW, groups=("window",)),
    bits("resident", {}, "megatron"),
    bits("off", {"fraction": 0.0}),
    bits("streamed_100", {"fraction": 1.0}),
    bits("streamed_50_split", {"fraction": 0.5, "master_weights": "split"}),
    bits("host_50", {"fraction": 0.5, "update_on": "host"}),
    bits("window", WINDOW),
]


# Megatron's model, optimizer and loop


@contextlib.contextmanager
def megatron() -> Iterator[None]:
    """Its process groups over one rank; without a GPU, with the patches that let it run."""
    with contextlib.ExitStack() as during:
        if not ON_GPU:
            from tests.support.megatron import patched

            during.enter_context(patched())
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        begin_one_rank()
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield


def build_model(size: Size, *, deterministic: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=not ON_GPU,
        gradient_accumulation_fusion=False,  # would need Apex
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        deterministic_mode=deterministic,
    )
    config.finalize_model_grads_func = finalize_model_grads
    torch.manual_seed(0)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=size.vocabulary,
        max_sequence_length=size.sequence,
        share_embeddings_and_output_weights=False,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, Float16Module(config, model.to(DEVICE)))


def build_optimizer(case: Case, model: Any, size_name: str) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from offstage.integrations import megatron as integration

    fields = {
        "lr": 1e-4,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": True,
    }
    config = OptimizerConfig(**fields, **(case.options if case.system == "hdo" else {}))
    optimizer = get_megatron_optimizer(config, [model])
    if case.system == "megatron":
        for group in optimizer.param_groups:  # as fast as it can be, and the bits that offstage has
            group.update(fused=True, foreach=False)
    if case.system == "offstage":
        integration.offload(optimizer, model=[model], **workload.config_for(size_name, case.options))
    return optimizer


class Training:
    """Iterations as in Megatron's own loop."""

    def __init__(self, case: Case, size_name: str) -> None:
        self.size = size = SIZES[size_name]
        self.model = build_model(size, deterministic=case.name.startswith("bits_"))
        self.optimizer = build_optimizer(case, self.model, size_name)
        self.losses: list[torch.Tensor] = []
        generator = torch.Generator(DEVICE).manual_seed(1)
        shape = (size.batch, size.sequence + 1)
        drawn = [torch.randint(size.vocabulary, shape, generator=generator, device=DEVICE) for _ in range(8)]
        self.batches = itertools.cycle(drawn)
        steps = torch.arange(size.sequence, device=DEVICE)
        self.positions = steps.expand(size.batch, size.sequence)
        self.mask = (steps > steps[:, None])[None, None]

    def forward_step(self, batches: Iterator[torch.Tensor], model: Any) -> Any:
        tokens = next(batches)
        losses = model(tokens[:, :-1], self.positions, self.mask, labels=tokens[:, 1:])
        return losses, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})

    def forward_backward(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        (seen,) = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.batches,
            model=[self.model],
            num_microbatches=1,
            seq_length=self.size.sequence,
            micro_batch_size=self.size.batch,
            forward_only=False,
        )
        self.losses.append(seen["loss"])

    def step(self) -> None:
        stepped, _, _ = self.optimizer.step()
        assert stepped, "its loss scale or its norm has skipped a step"

    def mean_ms(self, iterations: int) -> float:
        """Of an iteration. The host waits before the first and after the last only."""
        synchronize()
        start = time.perf_counter()
        for _ in range(iterations):
            self.forward_backward()
            self.step()
        synchronize()
        return 1e3 * (time.perf_counter() - start) / iterations

    def digest(self) -> str:
        """Of the bits of every weight."""
        found = hashlib.sha256()
        for param in self.model.parameters():
            found.update(param.detach().cpu().view(torch.int16).numpy().tobytes())
        return found.hexdigest()


# Measuring, in the case's own process


def measure(case: Case, size_name: str, iterations: int) -> Row:
    with megatron():
        if case.name.startswith("bits_"):
            return measure_bits(case, size_name)
        start = time.perf_counter()
        training = Training(case, size_name)
        row: Row = {"parameters": sum(param.numel() for param in training.model.parameters())}
        row["build_s"] = round(time.perf_counter() - start, 1)
        row["megatron_core"] = importlib.metadata.version("megatron-core")
        if case.system == "hdo" and not ON_GPU:
            training.forward_backward()
            return row | {"not_stepped": "HybridDeviceOptimizer needs CUDA for its step"}
        return row | measured(training, iterations) | counted(training)


def measured(training: Training, iterations: int) -> Row:
    training.mean_ms(WARM_UP)
    reset_peak()
    row: Row = {"iteration_ms": round(training.mean_ms(iterations), 1), "peak_gib": gib(peak_bytes())}
    steps_ms, step_peaks, forward_peaks = [], [], []
    for _ in range(STEPS_ALONE):
        synchronize()
        row["allocated_before_forward_gib"] = gib(allocated_bytes())
        reset_peak()
        training.forward_backward()
        synchronize()
        forward_peaks.append(peak_bytes())
        reset_peak()
        start = time.perf_counter()
        training.step()
        synchronize()
        steps_ms.append(1e3 * (time.perf_counter() - start))
        step_peaks.append(peak_bytes())
    return row | {
        "step_ms": round(sum(steps_ms) / len(steps_ms), 1),
        "step_peak_gib": gib(max(step_peaks)),
        "forward_backward_peak_gib": gib(max(forward_peaks)),
        "rss_gib": gib(rss_bytes()),
        "rss_peak_gib": gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
        "first_and_last_loss": [round(float(loss), 4) for loss in (training.losses[0], training.losses[-1])],
    }


def counted(training: Training) -> Row:
    """What offstage says of itself."""
    from offstage.integrations import megatron as integration

    parts = integration.parts(training.optimizer)
    if not parts:
        return {}
    receipts = [part.receipt() for part in parts]
    return {
        "host_state_gib": gib(sum(receipt.host_state_bytes for receipt in receipts)),
        "device_state_gib": gib(sum(receipt.device_state_bytes for receipt in receipts)),
        "receipts": [workload.receipt_numbers(receipt) for receipt in receipts],
        "version": offstage.__version__,
    }


def measure_bits(case: Case, size_name: str) -> Row:
    torch.use_deterministic_algorithms(True)
    training = Training(case, size_name)
    for _ in range(BITS_STEPS):
        training.forward_backward()
        training.step()
    return {
        "steps": BITS_STEPS,
        "digest": training.digest(),
        "first_and_last_loss": [float(loss) for loss in (training.losses[0], training.losses[-1])],
    }


# The parent


def compared(case: Case, row: Row, done: Mapping[str, Row]) -> Row:
    """Against resident state and against HybridDeviceOptimizer at the same fraction, in the same run."""
    if "digest" in row:
        if case.system == "megatron" and not ON_GPU:
            return row
        expected = done.get(SAME_AS, row).get("digest")
        return row | {"must": {"same_bits": {"expected": expected, "met": row["digest"] == expected}}}
    found, resident = row.get("iteration_ms"), done.get("resident", row)
    if not found or not resident.get("iteration_ms"):
        return row
    row["ratio"] = round(found / resident["iteration_ms"], 4)
    row["added_ms"] = round(found - resident["iteration_ms"], 1)
    row["state_off_gib"] = round(resident["allocated_before_forward_gib"] - row["allocated_before_forward_gib"], 4)
    row["step_peak_lower_gib"] = round(resident["step_peak_gib"] - row["step_peak_gib"], 4)
    if case.system == "offstage" and case.fraction is not None:
        row |= against_hdo(case, row, done.get(f"hdo_{percent(case.fraction)}", {}))
    return row


def against_hdo(case: Case, row: Row, other: Row) -> Row:
    if not other.get("iteration_ms"):
        return {}
    times = round(other["iteration_ms"] / row["iteration_ms"], 3)
    found: Row = {"times_faster": times}
    if row["size"] == "full":
        everything = case.fraction == 1.0
        found["must"] = {"times_faster": at_least(TIMES_FASTER if everything else 1.0, times)}
        if everything:
            found["must"]["peak_gib"] = at_most(other["peak_gib"], row["peak_gib"])
    return found


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--iterations", type=int, default=6, help=f"measured after {WARM_UP} to warm up")
    options = harness.parse(parser, CASES)
    if options.result:
        case = next(case for case in options.cases if case.name == options.case[0])  # beside those it needs
        harness.report(options.result, lambda: measure(case, options.size, options.iterations))
    arguments = ["--size", options.size, "--iterations", str(options.iterations)]
    done: dict[str, Row] = {}
    failed: list[str] = []

    def measured_case(case: Case) -> Iterator[Row]:
        variables = {**environment(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for the deterministic cases
        found = harness.in_own_process(
            case.name, arguments, variables=variables, timeout_s=case.timeout_s, imports=IMPORTS
        )
        row = harness.described(case, "system", "options") | {"size": options.size, "iterations": options.iterations}
        row = compared(case, row | found, done)
        done[case.name] = row
        failed.extend([case.name] if "error" in row else [])
        yield row

    harness.run("megatron", options.cases, measured_case, failed=failed)


if __name__ == "__main__":
    main()
