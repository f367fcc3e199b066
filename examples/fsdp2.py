# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with the shards' state in host memory, and a checkpoint that goes on under another plan.

    torchrun --nproc-per-node 2 -m examples.fsdp2

Every rank keeps the state of its own shards. A small GPT is trained and saved half way; a second model with another
plan loads that and goes on, and the bits that differ at the end are counted. Uses one accelerator per process if there
are any; without them the CPU plays the device. A checkpoint loads at any other number of processes too.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import offstage
import offstage.checkpoint
from examples.gpt import GPT, Shape, make_repeatable, stdlib_bytes

STEPS = 10
BATCH = 4
MAX_NORM = 2.5  # some of these steps are clipped and most are not
SHAPE = Shape(width=128, blocks=3, context=32)


def build(mesh: DeviceMesh, device: torch.device, **plan: object) -> tuple[GPT, offstage.OffloadedOptimizer]:
    torch.manual_seed(0)  # the same weights on every rank before they are cut
    model = GPT(SHAPE, activations=torch.float32 if device.type == "cpu" else torch.bfloat16).to(device)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy)  # its gradients are there first
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # In this order: shard the model, build the optimizer, offload it.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return model, offstage.offload(optimizer, model, chunk_bytes="128KiB", **plan)


def train(model: GPT, optimizer: offstage.OffloadedOptimizer, data: torch.Tensor, steps: range) -> None:
    device = next(model.parameters()).device
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())  # every rank has its own batches
        starts = torch.randint(len(data) - SHAPE.context, (BATCH,), generator=generator).tolist()
        batch = torch.stack([data[i : i + SHAPE.context + 1] for i in starts]).long().to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = optimizer.clip_grad_norm_(MAX_NORM)  # over the shards of all ranks
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1:2d}  loss {loss.item():.4f}  norm {norm.item():.2f}")


def shards(model: GPT) -> list[torch.Tensor]:
    return [param.detach().to_local() for param in model.parameters() if isinstance(param, DTensor)]


def main() -> int:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    device = accelerator or torch.device("cpu")
    make_repeatable(device)
    dist.init_process_group()  # gloo for host tensors, and what the accelerator has for its own
    atexit.register(gc.collect)  # ends gloo's threads: one that holds a tensor at the very end aborts the process
    mesh, data = init_device_mesh(device.type, (dist.get_world_size(),)), stdlib_bytes()
    folder = [tempfile.mkdtemp(prefix="offstage-fsdp2-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)  # all ranks save to, and load from, one folder

    model, optimizer = build(mesh, device, window="256KiB", update_in_backward=True)
    train(model, optimizer, data, range(STEPS // 2))
    offstage.checkpoint.save(f"{folder[0]}/half", model, optimizer, extra={"step": STEPS // 2})
    train(model, optimizer, data, range(STEPS // 2, STEPS))

    resumed, other = build(mesh, device, fraction=0.5, master_weights="split")
    extra = offstage.checkpoint.load(f"{folder[0]}/half", resumed, other)
    train(resumed, other, data, range(extra["step"], STEPS))

    pairs = zip(shards(model), shards(resumed), strict=True)
    differ = torch.stack([(a.view(torch.int16) != b.view(torch.int16)).sum() for a, b in pairs]).sum()
    dist.all_reduce(differ)
    receipts = optimizer.receipt(), other.receipt()
    if dist.get_rank() == 0:
        print(optimizer.plan.summary(), receipts[0], other.plan.summary(), receipts[1], sep="\n")
        print(f"elements that differ between going on and resuming: {int(differ)}")
        shutil.rmtree(folder[0])
    dist.destroy_process_group()
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
