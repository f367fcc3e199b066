# SPDX-License-Identifier: Apache-2.0
"""How fast does a 6.74B Llama train in a device of 24 GiB, and of 16 GiB, with exact clipping?

    python -m benchmarks.fetch_peers           once, where there is a network, for the case zero3
    python -m benchmarks.llama                 every case, about six minutes on one H200
    python -m benchmarks.llama cap24           one of them, a minute and a half
    python -m benchmarks.llama --size small    a minute on any machine: does every case run?

The transformers library's Llama (width 4096, 32 layers, vocabulary 32,000) with random bf16 weights, every layer
checkpointed, 8 x 2048 tokens per step, the loss in 8 checkpointed slices. Every case is a process of its own. Needs the
package transformers.

zero3       DeepSpeed ZeRO-3 with parameters and optimizer on the host, one rank, the whole device: two steps after two.
            It takes about 20 bytes of host memory per parameter; where there are fewer, the row says so
fsdp2       FSDP2's `CPUOffloadPolicy`, one rank, the whole device: two steps after two. It takes 16 bytes a parameter;
            more if they are pinned, because torch rounds sizes up to powers of two, and they are where that fits
uncapped    offstage with the weights on the whole device and all state on the host
cap24       weights and state of the layers on the host, but for the first ones, whose state fits into 8 GiB, a third of
            them updated by the CPU, and device memory capped at 24 GiB: 20 steps. At least three times as many tokens
            per second as the faster peer of the same run
cap16       the same with 3 GiB of state on the device, capped at 16 GiB: 10 steps

Ours clip with `optimizer.clip_grad_norm_` and have no second set of state: the next forward makes the updates.
`tokens_per_s` is from the mean over the steps behind the first three; `peak_gib` is the most since the model was built.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import harness, peers, workload
from benchmarks.common import (
    DEVICE,
    Row,
    end_before_host_memory_does,
    gib,
    host_free_bytes,
    reset_peak,
    rounded,
    rss_bytes,
    times,
)
from benchmarks.fetch_peers import environment
from benchmarks.harness import at_least, at_most
from benchmarks.memory_cap import cap_device_memory
from benchmarks.workload import BATCH, OVERLAP_FORWARD, SIZES, Head

SHAPES: dict[str, dict[str, int]] = {
    "full": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
}
LLAMA_MODULE = "transformers.models.llama.modeling_llama"
WARM_UP = 3
PEER_STEPS = 2  # after as many
TIMES_PEERS = 3.0
ZERO3_BYTES = 20
"""Of host memory per parameter, at least: weights, masters, moments, gradients. ZeRO-2 took 24 in the 2.70B case."""
NOT_TRIED = "not tried"
SPARE_BYTES = 4 * 2**30
"""Of host memory, for processes."""


@dataclass(frozen=True, kw_only=True)
class Ours(harness.Case):
    config: Mapping[str, Any]
    cap_gib: int | None = None
    steps: int
    timeout_s: int = 240


ON_HOST = {**OVERLAP_FORWARD, "weights": "host", "host_fraction": 0.33}
"""The CPU has time while the next forward waits for the link: it updates a third of what is offloaded."""
Case = Ours | peers.Case
CASES: list[Case] = [
    *(dataclasses.replace(case, needs=(), timeout_s=300) for case in peers.WEIGHTS_TOO),
    Ours(name="uncapped", config=OVERLAP_FORWARD, steps=8),
    Ours(name="cap24", config={**ON_HOST, "device_budget": "8GiB"}, cap_gib=24, steps=20),
    Ours(name="cap16", config={**ON_HOST, "device_budget": "3GiB"}, cap_gib=16, steps=10),
]


# The model


class Llama(nn.Module):
    """`forward` returns the loss, without the logits of more than a slice at a time."""

    def __init__(self, config: Any) -> None:
        from transformers import LlamaModel

        super().__init__()
        self.body = LlamaModel(config)
        self.head = Head(config.hidden_size, config.vocab_size, bias=False)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.body.layers

    @property
    def norm(self) -> nn.Module:
        return self.body.norm

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        return self.head(x, tokens.roll(-1, dims=1).flatten())


def on_meta(size_name: str) -> Llama:
    from transformers import LlamaConfig

    size = SIZES[size_name]
    more = {"vocab_size": size.vocabulary, "max_position_embeddings": size.sequence, "attn_implementation": "sdpa"}
    with workload.in_bf16(), torch.device("meta"):
        model = Llama(LlamaConfig(**SHAPES[size_name], **more))
    model.body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def build(size_name: str, *, home: torch.device = DEVICE) -> Llama:
    """Initialised on the device and moved to `home` piece by piece: no other memory ever holds more than a layer."""
    torch.manual_seed(0)
    model = on_meta(size_name)
    for piece in (model.body.embed_tokens, *model.blocks, model.norm, model.head):
        piece.to_empty(device=DEVICE)
        workload.initialise(piece)
        piece.to(home)
    with DEVICE:
        model.body.rotary_emb = type(model.body.rotary_emb)(model.body.config)  # its buffers are on the meta device
    return model


# Measuring, in the case's own process


def measure(case: Ours, size_name: str) -> Row:
    end_before_host_memory_does()
    if case.cap_gib is not None:
        cap_device_memory(case.cap_gib)
    on_host = case.config.get("weights") == "host"
    start = time.perf_counter()
    model = build(size_name, home=torch.device("cpu") if on_host else DEVICE)
    parameters = sum(param.numel() for param in model.parameters())
    reset_peak()
    optimizer = workload.offloaded(model, size_name, case.config)
    training = workload.Training(model, optimizer, SIZES[size_name], clip="optimizer")
    row: Row = {"parameters": parameters, "build_s": round(time.perf_counter() - start, 1)}
    try:
        row |= workload.since_start(training.measured(WARM_UP, case.steps - WARM_UP)) | training.counted()
        row["tokens_per_s"] = tokens_per_s(row, size_name)
    except torch.OutOfMemoryError as error:
        row |= {"error": str(error), "died_in_iteration": len(training.losses) + 1}
    norms = [float(norm) for norm in training.norms]
    return row | {
        "steps": len(training.losses),
        "losses": [round(float(loss), 4) for loss in training.losses],
        "smallest_norm": rounded(min(norms, default=None)),
        "largest_norm": rounded(max(norms, default=None)),
        "rss_gib": gib(rss_bytes()),
    }


def measure_peer(case: peers.Case, size_name: str) -> Row:
    end_before_host_memory_does()
    row = peers.measure(case, size_name, PEER_STEPS, warm_up=PEER_STEPS, steps_alone=0, build=build)
    return row | {"tokens_per_s": tokens_per_s(row, size_name)}


def tokens_per_s(row: Mapping[str, Any], size_name: str) -> float:
    return round(BATCH * SIZES[size_name].sequence / row["iteration_ms"] * 1e3, 1)


# The parent


def host_needs(case: peers.Case, size_name: str) -> tuple[int, int]:
    """Bytes that a peer takes of host memory: pinned, and pageable if it can do without."""
    sizes = [param.numel() for param in on_meta(size_name).parameters()]
    if case.system == "deepspeed":
        return ZERO3_BYTES * sum(sizes), ZERO3_BYTES * sum(sizes)
    rounded_up = sum(2 ** math.ceil(math.log2(4 * numel)) for numel in sizes)
    return 2 * rounded_up + 8 * sum(sizes), 16 * sum(sizes)  # weights, gradients, moments


def pageable(case: peers.Case) -> peers.Case:
    return dataclasses.replace(case, options={"pin_memory": False}) if case.system == "fsdp2" else case


def run_peer(case: peers.Case, size_name: str) -> Row:
    """Unless the host has too little memory for it."""
    free = host_free_bytes() - SPARE_BYTES
    needs = host_needs(case, size_name)
    is_pageable = needs[0] > free
    if is_pageable:
        case = pageable(case)
    about = peers.about(case, size_name, PEER_STEPS)
    about |= {"host_needs_gib": [gib(size) for size in needs], "host_free_gib": gib(free)}
    if min(needs) > free:
        return about | {"error": f"{NOT_TRIED}: it takes {gib(min(needs))} GiB of host memory, {gib(free)} are free"}
    arguments = ["--size", size_name, *(["--pageable"] if is_pageable else [])]
    return about | harness.in_own_process(case.name, arguments, variables=environment(), timeout_s=case.timeout_s)


def run_ours(case: Ours, size_name: str) -> Row:
    about = harness.described(case, "config", "cap_gib") | {"size": size_name}
    arguments = ["--size", size_name]
    return about | harness.in_own_process(
        case.name, arguments, variables={}, timeout_s=case.timeout_s, imports=(LLAMA_MODULE,)
    )


def compared(case: Ours, row: Row, done: Mapping[str, Row]) -> Row:
    """Against the same weights on the whole device, and against the faster peer."""
    rates = {name: other["tokens_per_s"] for name, other in done.items() if "tokens_per_s" in other}
    if "tokens_per_s" not in row:
        return row
    row["share_of_uncapped"] = times(row, done.get("uncapped", {}), "tokens_per_s")
    names = [name for name in rates if name in {peer.name for peer in peers.WEIGHTS_TOO}]
    row["times_peers"] = {name: round(row["tokens_per_s"] / rates[name], 3) for name in names}
    if row["size"] == "full" and case.cap_gib is not None:
        row["must"] = {"steps": at_least(case.steps, row["steps"]), "peak_gib": at_most(case.cap_gib, row["peak_gib"])}
        if case.name == "cap24" and names:
            row["must"]["times_peers"] = at_least(TIMES_PEERS, min(row["times_peers"].values()))
    return row


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--pageable", action="store_true", help="FSDP2 without pinned memory")
    options = harness.parse(parser, CASES)
    if options.result:
        (case,) = options.cases
        if isinstance(case, Ours):
            harness.report(options.result, lambda: measure(case, options.size))
        peer = pageable(case) if options.pageable else case
        harness.report(options.result, lambda: measure_peer(peer, options.size))
    done: dict[str, Row] = {}
    failed: list[str] = []

    def measured(case: Case) -> Iterator[Row]:
        if isinstance(case, Ours):
            row = compared(case, run_ours(case, options.size), done)
        else:
            row = run_peer(case, options.size)
        failed.extend([case.name] if not row.get("error", NOT_TRIED).startswith(NOT_TRIED) else [])
        done[case.name] = row
        yield row

    harness.run("llama", options.cases, measured, failed=failed)


if __name__ == "__main__":
    main()
