# SPDX-License-Identifier: Apache-2.0
"""`Parallel`: this rank's place in stages × data. Ranks of one stage are adjacent:

    rank = stage * data_ranks + data_rank

`started` reads it from torchrun's environment; without torchrun there is one process and no process group.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from offstage import ConfigError, OffstageError
from offstage.checkpoint.ranks import host_group, timeout_of
from offstage.train.config import ParallelSettings


@dataclass(frozen=True)
class Parallel:
    """This rank's place. `mesh` is set with a process group; `sharded` if FSDP2 divides the weights of a stage."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    stages: int = 1
    sharded: bool = False
    mesh: DeviceMesh | None = None
    host_group: dist.ProcessGroup | None = None
    """Process group of all ranks, for host tensors."""

    @property
    def first(self) -> bool:
        """The rank that writes the run's files and shows progress."""
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        """Ranks of one stage: each has its own batches."""
        return self.ranks // self.stages

    @property
    def data_rank(self) -> int:
        return self.rank % self.data_ranks

    @property
    def stage(self) -> int:
        return self.rank // self.data_ranks

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks of one pipeline, in the order of their stages; `None` without one."""
        return self.mesh["stage"].get_group() if self.mesh is not None and self.stages > 1 else None

    def shard(self, module: nn.Module, groups: list[nn.Module | list[nn.Module]]) -> None:
        """Apply FSDP2 over the ranks of this stage, by groups. Weights are on meta, or the same on all ranks."""
        if self.sharded:
            assert self.mesh is not None
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # bf16 sums would lose small gradients
            for part in (*groups, module):
                fully_shard(part, mesh=self.mesh["data"], mp_policy=policy)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of the data ranks' losses, which are on the last stage; elsewhere `value` is 0."""
        if self.ranks > 1:
            dist.all_reduce(value)
            value = value / self.data_ranks
        return value


@contextlib.contextmanager
def started(settings: ParallelSettings, device: torch.device) -> Iterator[Parallel]:
    """Within: torchrun's process group, made here unless the application has made it."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else 1
    check_ranks(settings, ranks)
    device = _own_device(device, int(os.environ.get("LOCAL_RANK", "0")) if launched else 0)
    alone = ranks == 1 and not settings.shards(1)
    if alone and not dist.is_initialized():
        yield Parallel(device)
        return
    own = not dist.is_initialized()
    if own:
        _init(launched)
    try:
        yield _placed(settings, device)
    except BaseException:
        own = own and ranks == 1  # other ranks may not get here: the group ends with the process
        raise
    finally:
        if own:
            dist.destroy_process_group()


def check_ranks(settings: ParallelSettings, ranks: int) -> None:
    """Raise if `ranks` cannot be divided into stages × data as configured."""
    if ranks % settings.stages:
        raise ConfigError(
            f"parallel.stages={settings.stages} expects a number of ranks that it divides; found {ranks}. Start "
            f"`torchrun --nproc-per-node {settings.stages * max(1, ranks // settings.stages)}`, or change stages."
        )
    if ranks // settings.stages > 1 and not settings.shards(ranks // settings.stages):
        raise ConfigError(
            f"parallel.fsdp=false leaves {ranks // settings.stages} ranks per stage with separate weights; expected "
            "one. Leave fsdp out, or start fewer ranks."
        )


def _init(launched: bool) -> None:
    atexit.register(gc.collect)  # ends gloo's threads: one that holds a tensor at the very end aborts the process
    if launched:
        dist.init_process_group()  # gloo for host tensors, and what the accelerator has for its own
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _placed(settings: ParallelSettings, device: torch.device) -> Parallel:
    ranks, stages = dist.get_world_size(), settings.stages
    mesh = init_device_mesh(device.type, (stages, ranks // stages), mesh_dim_names=("stage", "data"))
    assert dist.group.WORLD is not None
    for group in mesh.get_all_groups():  # torch gives those of some ranks its default
        _set_pg_timeout(timeout_of(dist.group.WORLD), group)
    return Parallel(
        device=device,
        rank=dist.get_rank(),
        ranks=ranks,
        stages=stages,
        sharded=settings.shards(ranks // stages),
        mesh=mesh,
        host_group=host_group() if ranks > 1 else None,
    )


def _own_device(device: torch.device, local_rank: int) -> torch.device:
    """The accelerator of this rank, made current."""
    if device.type == "cpu":
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        found = "none" if accelerator is None else accelerator.type
        raise ConfigError(
            f"run.device={device.type!r} expects such an accelerator; found {found}. Leave it out for auto."
        )
    index = device.index if device.index is not None else local_rank
    if index >= torch.accelerator.device_count():
        raise OffstageError(
            f"Rank {local_rank} of this host expects a {device.type} device of its own; found "
            f"{torch.accelerator.device_count()}. Start as many ranks per host as there are devices."
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)
