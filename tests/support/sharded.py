# SPDX-License-Identifier: Apache-2.0
"""Models over several ranks, and the training run that equality tests compare. Everything here runs on a rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import offstage
from tests.support.runs import Run, differences, local, look
from tests.support.runs import keep as take_down
from tests.support.training import Block as AnyBlock
from tests.support.training import groups_of, lazily

WIDTH = 28
VOCABULARY = 67
EXPERTS = 6
EP = 2
"""Ranks over which experts are spread; the others have copies that FSDP2 shards again."""

PLANS: dict[str, dict[str, Any]] = {
    "streamed": {"chunk_bytes": "16KiB"},
    "half, window, in backward": {
        "fraction": 0.5,
        "window": "64KiB",
        "update_in_backward": True,
        "chunk_bytes": "16KiB",
    },
    "host, window": {"host_fraction": 0.4, "window": "48KiB", "chunk_bytes": "16KiB"},
}
"""Plans between which no bit may differ, nor from `fraction=0`."""


# Models


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks of `group` have, one after the other."""
    out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sum over all ranks of `group`."""
    out = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    # torch.distributed._functional_collectives has these too; a rank died in them in about one of a hundred runs.
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


class Experts(nn.Module):
    """A stack of experts spread over `mesh`: what all its ranks have comes to each expert and goes back.

    `tokens` are those of all ranks of the mesh; they choose the expert.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        for name, shape in (("up", (EXPERTS, WIDTH, 2 * WIDTH)), ("down", (EXPERTS, 2 * WIDTH, WIDTH))):
            whole = torch.randn(shape) / WIDTH**0.5
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        group, first = self._mesh.get_group(), self._mesh.get_local_rank() * EXPERTS // self._mesh.size()
        everyone = _Gather.apply(x, group)
        chosen = tokens % EXPERTS
        result = torch.zeros_like(everyone)
        for number, (up, down) in enumerate(zip(local(self.up), local(self.down), strict=True), start=first):
            result = result + torch.tanh(everyone * (chosen == number).unsqueeze(1) @ up) @ down
        return x + _Scatter.apply(result, group)


class Attention(nn.Module):
    """One head, with the three projections in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # No bias: what is added to all keys alike changes nothing, and its gradient is rounding noise.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) / WIDTH**0.5, -1)
        return x + self.out(weights @ value)


class Mixture(nn.Module):
    """A small transformer with a mixture of experts and everything that makes sharding uneven.

    - the embedding, tied to the output, has a prime number of rows;
    - `gate` has three outputs, so that the last of four ranks has an empty shard;
    - `reader` is frozen; `scale` stays an ordinary parameter (`ignored_params`);
    - experts are on a mesh of their own, and `rare` ones get gradients only in even steps.
    """

    def __init__(self, experts_mesh: DeviceMesh) -> None:
        super().__init__()
        self.step, self._mesh = 0, experts_mesh
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = Attention()
        self.reader = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gate = nn.Linear(WIDTH, 3)
        self.experts, self.rare = Experts(experts_mesh), Experts(experts_mesh)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.embedding(tokens))
        x = x + torch.tanh(self.reader(x)) * self.gate(x).softmax(-1)[..., :1]
        everyones = gathered(tokens.flatten(), self._mesh.get_group())
        lines = self.experts(x.flatten(0, 1), everyones)
        if self.step % 2 == 0:
            lines = self.rare(lines, everyones)
        return self.head(lines * self.scale.mean().to(lines.dtype)).unflatten(0, tokens.shape)


Block = functools.partial(AnyBlock, WIDTH, 4)


class Plain(nn.Module):
    """Nothing special: what tensor parallelism can cut."""

    def __init__(self, blocks: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stage(nn.Module):
    """One of several of a pipeline: the first has the embedding, the last the output. Some checkpoint their blocks."""

    def __init__(self, number: int, of: int, blocks: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY) if number == of - 1 else None
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x if self.head is None else self.head(x)


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}
MICRO_BATCHES = 4


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class Pipeline:
    """This rank's stages under a schedule; every rank sees the same tokens."""

    def __init__(self, schedule: str, **options: Any) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._total = 2 * ranks if schedule == "Interleaved1F1B" else ranks
        self._numbers = range(rank, self._total, ranks)
        torch.manual_seed(rank)
        self.modules = nn.ModuleList(Stage(number, self._total, **options) for number in self._numbers)
        self._schedule_name, self._schedule = schedule, None
        self._generator = torch.Generator().manual_seed(1)

    def run(self) -> None:
        """Forward and backward of a batch."""
        if self._schedule is None:
            stages = [
                PipelineStage(module, number, self._total, torch.device("cpu"))
                for module, number in zip(self.modules, self._numbers, strict=True)
            ]
            given = stages if len(stages) > 1 else stages[0]
            self._schedule = SCHEDULES[self._schedule_name](given, MICRO_BATCHES, loss_fn=loss_of)
        tokens, targets = torch.randint(VOCABULARY, (2, 2 * MICRO_BATCHES, 6), generator=self._generator)
        given = [tokens] if 0 in self._numbers else []
        self._schedule.step(*given, target=targets if self._total - 1 in self._numbers else None)


# Ways to shard


def mixture(
    *, dtype: torch.dtype = torch.float32, policy: MixedPrecisionPolicy | None = None, replicas: int = 1
) -> nn.Module:
    """`Mixture` under FSDP2; with `replicas`, shards are copied over as many rows of a mesh (HSDP)."""
    ranks = dist.get_world_size()
    grid = init_device_mesh("cpu", (ranks // EP, EP), mesh_dim_names=("outer", "ep"))
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = Mixture(grid["ep"]).to(dtype)
    options = {"mp_policy": policy or MixedPrecisionPolicy()}
    for experts in (model.experts, model.rare):
        fully_shard(experts, mesh=grid["outer"], reshard_after_forward=False, **options)
    fully_shard(model.attention, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params={model.scale}, **options)
    # FSDP2 does not look after ignored parameters. A hook made before offload() runs before its cues.
    model.scale.register_post_accumulate_grad_hook(_average)
    return model


def fsdp2(*, dtype: torch.dtype = torch.float32, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    torch.manual_seed(0)
    return fully_sharded(Plain().to(dtype), init_device_mesh("cpu", (dist.get_world_size(),)), policy)


def tensor_parallel(*, sequence: bool = False, fsdp: bool = True) -> nn.Module:
    """`Plain` with the blocks cut over half of the ranks, or all of them, and FSDP2 over the rest."""
    torch.manual_seed(0)
    ranks, model = dist.get_world_size(), Plain()
    rows = ranks // 2 if fsdp else 1
    mesh = init_device_mesh("cpu", (rows, ranks // rows), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        down = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
        up = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
        plan: dict[str, Any] = {"up": up, "down": down}
        if sequence:
            plan["norm"] = SequenceParallel()
        parallelize_module(block, mesh["tp"], plan)
    return fully_sharded(model, mesh["dp"]) if fsdp else model


def fully_sharded(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


def _average(param: torch.Tensor) -> None:
    assert param.grad is not None
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


# Training


MAX_NORM = 1.0
"""Losses of most steps are a thousandth of the others', so that gradients are clipped in some steps only."""


def train(
    make: Callable[[], nn.Module],
    config: dict[str, Any] | None,
    *,
    steps: int = 20,
    micro_batches: int = 1,
    max_norm: float = MAX_NORM,
    data: Callable[[], int] = dist.get_rank,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    between: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
) -> Run:
    """`steps` clipped steps. `config=None`: plain torch. Ranks for which `data` is the same see the same tokens.

    `between` is called after every step.
    """
    model = make()
    # Lists of DTensors on several meshes are more than torch's foreach takes.
    optimizer = torch.optim.AdamW(groups_of(model), lr=3e-3, weight_decay=0.1, foreach=False)
    called = wrap(model)
    if config is not None:
        optimizer = offstage.offload(optimizer, called, **{"min_bytes": 0, **config})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps)
    run = Run()
    generator = torch.Generator().manual_seed(1 + data())
    for step in range(steps):
        model.step = step
        for number in range(micro_batches):
            with _accumulating(called, optimizer, number < micro_batches - 1):
                tokens = torch.randint(VOCABULARY, (3, 8), generator=generator)
                targets = torch.randint(VOCABULARY, (24,), generator=generator)
                loss = nn.functional.cross_entropy(called(tokens).float().flatten(0, 1), targets)
                (loss * (1e-3 if step % 4 else 1.0) / micro_batches).backward()
        run.losses.append(loss.item())
        if config is None:
            run.norms.append(clip_whole(model.parameters(), max_norm))
        else:
            run.norms.append(optimizer.clip_grad_norm_(max_norm))
        look(run, [optimizer], before_step=True)
        optimizer.step()
        look(run, [optimizer], before_step=False)
        scheduler.step()
        optimizer.zero_grad()
        if between is not None:
            between(model, optimizer)
    keep(run, model, [optimizer])
    return run


@contextlib.contextmanager
def _accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, more: bool) -> Any:
    """All micro-batches but the last: no update, and gradients need not be reduced yet."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not more)
        if more and isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        if more and isinstance(optimizer, offstage.OffloadedOptimizer):
            stack.enter_context(optimizer.accumulate())
        yield


@torch.no_grad()
def clip_whole(params: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clipping from first principles: the squares of all elements, with each counted once."""
    gradients = []
    for param in params:
        if isinstance(param.grad, DTensor):  # sequence parallelism leaves partial sums
            param.grad = param.grad.redistribute(placements=param.placements)
        if param.grad is not None:
            gradients.append(param.grad)
    squares = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        squares += local(gradient).double().square().sum() / _copies(gradient)
    dist.all_reduce(squares)
    norm = squares.sqrt().float()
    for gradient in gradients:
        local(gradient).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _copies(tensor: torch.Tensor) -> int:
    """On how many ranks each element is."""
    parts = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            parts *= 1 if placement.is_replicate() else size
    return dist.get_world_size() // parts


def keep(run: Run, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take down what the run has come to, and end it."""
    take_down(run, model, optimizers)
    for optimizer in optimizers:
        if isinstance(optimizer, offstage.OffloadedOptimizer):
            optimizer.close()


# Comparison


def far(expected: Run, found: Run) -> list[str]:
    """Which weights and norms of two runs are not close (rtol 1e-5, atol 1e-6)."""
    close = {"rtol": 1e-5, "atol": 1e-6}
    named = []
    for name, weight in expected.weights.items():
        if not torch.allclose(found.weights[name], weight, **close):
            named.append(f"weight {name} by {(found.weights[name] - weight).abs().max()}")
    norms = zip(expected.norms, found.norms, strict=True)
    return named + [f"norm {step}: {a} {b}" for step, (a, b) in enumerate(norms) if not torch.allclose(a, b, **close)]


def compared(
    train_one: Callable[[dict[str, Any] | None], Run],
    plans: dict[str, dict[str, Any]],
    *,
    base: dict[str, Any] | None = None,
    against_torch: bool = True,
    lazy_seed: int | None = None,
) -> dict[str, Any]:
    """What differs between each plan and `fraction=0`, from plain torch, and the runs without their tensors."""
    expected = train_one({"fraction": 0.0, **(base or {})})
    found: dict[str, Any] = {"torch": (far(train_one(None), expected), None)} if against_torch else {}
    for name, plan in plans.items():
        with lazily(lazy_seed):
            run = train_one({**(base or {}), **plan})
        found[name] = differences(expected, run), run
        run.weights, run.state = {}, {}
    return found
