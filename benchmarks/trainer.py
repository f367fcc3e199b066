# SPDX-License-Identifier: Apache-2.0
"""What does a step of transformers' `Trainer` take with us, with resident state, and with its own DeepSpeed?

    python -m benchmarks.fetch_peers             once, where there is a network, for the case deepspeed
    python -m benchmarks.trainer                 every case
    python -m benchmarks.trainer times           these cases or groups (times, bits), and those they need
    python -m benchmarks.trainer --size small    a minute on any machine: does every case run?

A Llama of 1.78B parameters (width 2048, 32 layers, vocabulary 32,000) with random weights, every layer checkpointed,
8 x 2048 tokens per step, through `Trainer.train()`. Every case is a process of its own. Needs transformers and
accelerate.

resident        bf16 weights, fp32 masters and moments on the device: `fraction=0.0`
streamed        `offload(trainer)`: all of it on the host
split           split masters: 10 bytes a parameter instead of 12
forward         split masters, `overlap_forward`
fast            and `update_in_backward`, with exact clipping that is hardly ever active
fast_unclipped  and `max_grad_norm=0`
deepspeed       ZeRO-2 with the optimizer on the CPU, through `TrainingArguments(deepspeed=...)`
bits_plain      fp32 weights, bf16 autocast, deterministic algorithms: `Trainer` as it is, with torch's fused AdamW
bits_fast       the same with us in the fast mode: every loss and every weight must have the same bits

`iteration_ms` is the mean over the steps behind the first four, from idle to idle; `host_gib` what the optimizer keeps
in host memory, `rss_gib` what the process has.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, workload
from benchmarks.common import DEVICE, ON_GPU, Row, gib, peak_bytes, reset_peak, rss_bytes, synchronize, times
from benchmarks.fetch_peers import environment
from benchmarks.workload import IN_BACKWARD, IN_STEP, MAX_NORM, OVERLAP_FORWARD, RESIDENT, SIZES

SHAPES: dict[str, dict[str, int]] = {
    "full": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}
BATCH = 8
WARM_UP = 4
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
NOT_TRIED = "not tried"
ZERO2: Mapping[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "steps_per_print": 1_000_000,
}


@dataclass(frozen=True, kw_only=True)
class Case(harness.Case):
    """One row: what the trainer is given."""

    config: Mapping[str, Any] | None = None
    """Of `offload(trainer)`; without it, the trainer is as it is."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `TrainingArguments`."""
    groups: tuple[str, ...] = ("times",)
    needs: tuple[str, ...] = ("resident",)
    bits: bool = False
    timeout_s: int = 240


CLIPPED = {"max_grad_norm": 100 * MAX_NORM}
"""Above every norm of this workload but the first few."""
CASES = [
    Case(name="resident", config=RESIDENT, options=CLIPPED, needs=()),
    Case(name="streamed", config={}, options=CLIPPED),
    Case(name="split", config=IN_STEP, options=CLIPPED),
    Case(name="forward", config=OVERLAP_FORWARD, options=CLIPPED),
    Case(name="fast", config=IN_BACKWARD, options=CLIPPED),
    Case(name="fast_unclipped", config=IN_BACKWARD, options={"max_grad_norm": 0.0}),
    Case(name="deepspeed", options={**CLIPPED, "deepspeed": ZERO2}, timeout_s=400),
    Case(name="bits_plain", options={"max_grad_norm": MAX_NORM}, groups=("bits",), needs=(), bits=True),
    Case(
        name="bits_fast",
        config={"overlap_forward": True, "update_in_backward": True},
        options={"max_grad_norm": MAX_NORM},
        groups=("bits",),
        needs=("bits_plain",),
        bits=True,
    ),
]


# Measuring, in the case's own process


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int, size_name: str) -> None:
        size = SIZES[size_name]
        generator = torch.Generator().manual_seed(1)
        self._rows = torch.randint(size.vocabulary, (rows, size.sequence), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[row], "labels": self._rows[row]}


def build(case: Case, size_name: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = SIZES[size_name]
    more = {"vocab_size": size.vocabulary, "max_position_embeddings": size.sequence, "attn_implementation": "sdpa"}
    config = LlamaConfig(**SHAPES[size_name], **more, tie_word_embeddings=False, use_cache=False)
    torch.manual_seed(0)
    with DEVICE:
        model = LlamaForCausalLM(config)
    return model if case.bits else model.to(torch.bfloat16)


def make_trainer(case: Case, size_name: str, steps: int, folder: str) -> Any:
    """A trainer that keeps its losses and knows when it was idle."""
    import transformers

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        reads_weights = False

        def __init__(self) -> None:
            self.idle: dict[int, float] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (WARM_UP, steps):
                if state.global_step == steps:
                    finish(trainer)
                synchronize()
                self.idle[state.global_step] = time.perf_counter()
            if state.global_step == WARM_UP:
                trainer.peak_of_warm_up = peak_bytes()
                reset_peak()

    class Kept(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            self.kept.append(loss)
            return loss

    args = transformers.TrainingArguments(
        **{
            "output_dir": folder,
            "max_steps": steps,
            "per_device_train_batch_size": BATCH,
            "learning_rate": 1e-4,
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "bf16": (case.bits and ON_GPU) or "deepspeed" in case.options,
            "use_cpu": not ON_GPU,
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,  # it would wait for every loss
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": ON_GPU,
            **case.options,
        }
    )
    trainer = Kept(build(case, size_name), args=args, train_dataset=Tokens(BATCH * steps, size_name))
    trainer.kept, trainer.clock = [], Clock()
    trainer.add_callback(trainer.clock)
    if case.config is not None:
        import offstage.integrations.transformers

        on_cpu = {"rule": "torch"} if case.bits and not ON_GPU else {}  # torch's CPU kernels round in their own way
        config = workload.config_for(size_name, {**case.config, **on_cpu})
        offstage.integrations.transformers.offload(trainer, **config)
    return trainer


def finish(trainer: Any) -> None:
    """Wait until every weight is final."""
    found = getattr(trainer.optimizer, "optimizer", None)
    if hasattr(found, "synchronize"):
        found.synchronize()


def measure(case: Case, size_name: str, iterations: int) -> Row:
    if case.bits:
        torch.use_deterministic_algorithms(True)
    if "deepspeed" in case.options:
        begin_deepspeed()
    steps = WARM_UP + iterations
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, size_name, steps, folder)
        parameters = sum(param.numel() for param in trainer.model.parameters())
        reset_peak()
        trainer.train()
    idle = trainer.clock.idle
    found = getattr(trainer.optimizer, "optimizer", None)
    receipt = found.receipt() if hasattr(found, "receipt") else None
    losses = [float(loss) for loss in trainer.kept]
    row: Row = {
        "parameters": parameters,
        "iteration_ms": round(1e3 * (idle[steps] - idle[WARM_UP]) / iterations, 1),
        "peak_gib": gib(peak_bytes()),
        "peak_gib_since_start": gib(max(peak_bytes(), trainer.peak_of_warm_up)),
        "rss_gib": gib(rss_bytes()),
        "host_gib": gib(workload.host_bytes(receipt)) if receipt is not None else None,
        "first_and_last_loss": [round(loss, 4) for loss in (losses[0], losses[-1])],
        "loss_bits": [struct.pack(">f", loss).hex() for loss in losses],
        "receipt": workload.receipt_numbers(receipt) if receipt is not None else None,
        "fallbacks": list(receipt.fallbacks) if receipt is not None else [],
    }
    row["tokens_per_s"] = round(BATCH * SIZES[size_name].sequence / row["iteration_ms"] * 1e3, 1)
    return row | ({"weight_bits": checksum(trainer.model)} if case.bits else {})


def checksum(model: Any) -> str:
    """Of every bit of every weight."""
    value = 0
    for param in model.parameters():
        value = zlib.crc32(param.detach().cpu().contiguous().view(torch.uint8).numpy(), value)
    return f"{value:08x}"


def begin_deepspeed() -> None:
    """As a single rank. accelerate asks for a package's metadata, which the unpacked sources do not have."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed

    version = deepspeed.__version__.strip()
    about = Path(tempfile.mkdtemp()) / f"deepspeed-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    sys.path.append(str(about.parent))


# The parent


def run_case(case: Case, size_name: str, iterations: int) -> Row:
    row = harness.described(case, "config", "options") | {"size": size_name, "iterations": iterations}
    if "deepspeed" in case.options and not (ON_GPU and has_deepspeed()):
        return row | {"error": f"{NOT_TRIED}: it needs a GPU and deepspeed, see benchmarks/fetch_peers.py"}
    variables = environment() | (DETERMINISTIC if case.bits else {})
    arguments = ["--size", size_name, "--iterations", str(iterations)]
    return row | harness.in_own_process(case.name, arguments, variables=variables, timeout_s=case.timeout_s)


def has_deepspeed() -> bool:
    path = environment()["PYTHONPATH"].split(os.pathsep)
    return importlib.util.find_spec("deepspeed") is not None or any((Path(one) / "deepspeed").is_dir() for one in path)


def compared(case: Case, row: Row, done: Mapping[str, Row]) -> Row:
    """Against resident state, or bit for bit against the trainer without us."""
    if "iteration_ms" in row and not case.bits:
        row["ratio"] = times(row, done.get("resident", {}), "iteration_ms")
    plain = done.get("bits_plain")
    if case.name == "bits_fast" and plain is not None and "loss_bits" in row:
        same = {name: row[name] == plain.get(name) for name in ("loss_bits", "weight_bits")}
        row["must"] = {name: {"expected": True, "found": found, "met": found} for name, found in same.items()}
    return row


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--iterations", type=int, default=8, help=f"measured after {WARM_UP} to warm up")
    options = harness.parse(parser, CASES)
    if options.result:
        case = options.cases[-1]  # behind the one it needs
        harness.report(options.result, lambda: measure(case, options.size, options.iterations))
    done: dict[str, Row] = {}
    failed: list[str] = []

    def measured(case: Case) -> Iterator[Row]:
        row = compared(case, run_case(case, options.size, options.iterations), done)
        failed.extend([case.name] if not row.get("error", NOT_TRIED).startswith(NOT_TRIED) else [])
        failed.extend([case.name] if not harness.is_met(row) else [])
        done[case.name] = row
        yield row

    harness.run("trainer", options.cases, measured, failed=failed)


if __name__ == "__main__":
    main()
