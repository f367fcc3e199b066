# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own GPT, DDP and DistributedOptimizer, with the state and the activations that its flags ask for.

    python -m examples.megatron

Trained twice, with the state on the device and as Megatron's arguments say; it prints what became of each flag, what
was moved, and how many weights differ. Needs megatron-core 0.19. Without an accelerator the CPU plays the device, by
the patches with which this repository's tests run megatron-core there (`tests/support/megatron.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import torch
import torch.distributed as dist

import offstage
from examples.gpt import make_repeatable, stdlib_bytes
from offstage.integrations import megatron

CONTEXT, BATCH = 32, 4
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ARGUMENTS = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "cpu_offloading_num_layers": 3}


def build(device: torch.device) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig, module

    torch.manual_seed(0)
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **plain, **bf16, **RECOMPUTE)
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(config, gpt_layer_specs.get_gpt_layer_local_spec(), 256, CONTEXT).to(device)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, module.Float16Module(config, model))
    return model, get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, **bf16), [model])


def forward_step(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(CONTEXT, device=tokens.device).expand(BATCH, CONTEXT)
    mask = (positions[0] > positions[0, :, None])[None, None]  # hides the future
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})


def train(device: torch.device, state: offstage.OffloadConfig, activations: offstage.ActivationConfig | None) -> Any:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, optimizer = build(device)
    megatron.offload(optimizer, state, model=[model])  # the added line
    handle = activations and megatron.offload_activations([model], activations)  # and another one
    data, run = stdlib_bytes(), get_forward_backward_func()
    sizes = {"seq_length": CONTEXT, "micro_batch_size": BATCH, "num_microbatches": 2, "forward_only": False}
    for _ in range(4):
        starts = torch.randint(len(data) - CONTEXT, (2, BATCH)).tolist()
        batches = (torch.stack([data[i : i + CONTEXT + 1] for i in some]).long().to(device) for some in starts)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(forward_step_func=forward_step, data_iterator=batches, model=[model], **sizes)
        optimizer.step()
    if handle:
        print(megatron.parts(optimizer)[0].receipt(), *handle.receipts(), sep="\n")
    return [param.detach() for param in model.parameters()]


def main() -> int:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu":
        from tests.support.megatron import patched

        print("no accelerator: the CPU plays one, with the patches of tests/support/megatron.py")
        (patches := patched()).__enter__()  # noqa: F841  # until the end
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    make_repeatable(device)
    arguments = argparse.Namespace(**ARGUMENTS, **RECOMPUTE, num_layers=4, bf16=True)
    print(flags := megatron.config_from_megatron(arguments))
    megatron.switch_off(arguments)  # in a real run: before Megatron builds from them
    activations = dataclasses.replace(flags.activations, min_bytes="1KiB")  # without it, tensors from 1 MiB leave
    runs = train(device, offstage.OffloadConfig(fraction=0.0), None), train(device, flags.state, activations)
    different = sum(int((a != b).sum()) for a, b in zip(*runs, strict=True))
    print(f"weights that differ from those of the run with all of it on the device: {different}")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
