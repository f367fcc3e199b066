# SPDX-License-Identifier: Apache-2.0
"""`check_memory`: whether a run fits this machine, before anything of it is allocated.

The figures are the planner's: a rank's share of the model (`planning/sizes.py`) and the placement of its state
(`planning/plan.py`). Activations depend on the model's code and come on top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from offstage import ConfigError, HostMemoryError, World
from offstage.config import Placement, format_size
from offstage.memory.arena import check_host_memory
from offstage.memory.claims import Claim
from offstage.planning.plan import host_share, plan_placements, staging_bytes
from offstage.planning.sizes import param_sizes
from offstage.train.config import TrainConfig
from offstage.train.parallel import Parallel
from offstage.train.passes import pieces_of
from offstage.train.whole_model import model_for


@dataclass(frozen=True)
class Needs:
    """What one rank takes, in bytes, without activations."""

    parameters: int
    """How many are trained, in this rank's share."""
    dtype: torch.dtype
    weights: int
    gradients: int
    device_state: int
    """State that stays resident, slots and window."""
    host_state: int
    """State that leaves the device, and staging buffers."""
    ranks: int = 1
    """How many there are."""

    @property
    def device_bytes(self) -> int:
        return self.weights + self.gradients + self.device_state

    def in_words(self, state: int, *, weights: bool) -> str:
        """What is trained, and the parts of the sum; without weights and gradients where they are elsewhere."""
        parts = {"weights": self.weights, "gradients": self.gradients} if weights else {}
        sizes = ", ".join(f"{format_size(nbytes)} of {name}" for name, nbytes in {**parts, "state": state}.items())
        also = "; activations come on top" if weights else ""
        where = f" on one of {self.ranks} ranks" if self.ranks > 1 else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Training {self.parameters:,} parameters in {dtype}{where} ({sizes}{also})"


def parameters_on_meta(config: TrainConfig, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """The parameters of a run, as its optimizer has them, without any memory."""
    return in_order(model_for(config, device="meta", dtype=dtype).named_parameters())


def in_order(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Matrices first, as in the optimizer's groups: what stays resident depends on the order."""
    return dict(sorted(named, key=lambda one: one[1].dim() <= 1))


def needs_of(config: TrainConfig, parallel: Parallel, vocabulary: int | None = None) -> Needs:
    """What this rank of a run takes. Raises for settings that no machine can satisfy."""
    dtype = config.model.dtype_on(parallel.device)
    model = model_for(config, device="meta", dtype=dtype, vocabulary=vocabulary)
    pieces = pieces_of(model, config, parallel)
    named = in_order((name, param) for piece in pieces.values() for name, param in piece.named_parameters())
    offload = config.offload
    if host_share(offload) is None:  # the share that the planner will choose changes little of it
        offload = dataclasses.replace(offload, host_fraction=0.0)
    world = World(data=parallel.data_ranks, shard_weights=parallel.sharded, shard_state=parallel.sharded)
    share = world.share_of(param_sizes(named, offload))
    plan = plan_placements(share.sizes, offload)
    staging = staging_bytes(plan.slots, plan.slot_bytes, plan.window, plan.bytes_of(Placement.STREAMED))
    return Needs(
        parameters=sum(size.numel for size in share.sizes if size.state_bytes),
        dtype=dtype,
        weights=share.weight_bytes,
        gradients=share.gradient_bytes,
        device_state=plan.bytes_of(Placement.RESIDENT) + staging,
        host_state=plan.host_bytes,
        ranks=parallel.ranks,
    )


def check_memory(config: TrainConfig, parallel: Parallel, vocabulary: int | None = None) -> Claim:
    """Raise a `ConfigError` if this machine has too little memory for the run.

    `vocabulary`: of the tokenizer, which is read if it is not given. Returns the claim of the run's host memory, which
    other ranks and runs on this host respect until it is released.
    """
    needs = needs_of(config, parallel, vocabulary)
    budget = config.offload.host_budget
    on_host = parallel.device.type == "cpu"
    if not on_host:
        _check_device(needs, parallel.device)
    total = needs.device_bytes + needs.host_state if on_host else needs.host_state
    state = needs.device_state + needs.host_state if on_host else needs.host_state
    try:
        check_host_memory(0, None if budget is None else int(budget), already_bytes=needs.host_state)
        return check_host_memory(
            total,
            None,
            what=needs.in_words(state, weights=on_host),
            remedy=_host_remedy(config, needs, on_host=on_host),
        )
    except HostMemoryError as error:
        raise ConfigError(str(error)) from error


def _check_device(needs: Needs, device: torch.device) -> None:
    free, _ = torch.accelerator.get_memory_info(device)
    free += torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    if needs.device_bytes <= free:
        return
    remedies = ["divide it among more devices with torchrun", "choose a smaller model"]
    if needs.device_state > needs.device_bytes - free:
        remedies.insert(
            0, "let more of the state leave the device (a smaller offload.device_budget, no offload.window)"
        )
    if needs.dtype == torch.float32:
        remedies.insert(0, "use model.dtype='bfloat16'")
    raise ConfigError(
        f"{needs.in_words(needs.device_state, weights=True)} needs {format_size(needs.device_bytes)} of device memory; "
        f"{device} has {format_size(free)} free. To make room, {', or '.join(remedies)}; `offstage plan` shows what "
        "fits."
    )


def _host_remedy(config: TrainConfig, needs: Needs, *, on_host: bool) -> str:
    remedies = []
    if config.offload.state_dtype == "float32":
        remedies.append("use offload.state_dtype='bfloat16'")
    if needs.dtype == torch.bfloat16 and config.offload.master_weights in ("auto", "fp32"):
        remedies.append("use offload.master_weights='split'")
    if not on_host:
        remedies.append("keep more of the state on the device (a lower offload.fraction)")
    remedies += ["choose a smaller model", "free host memory"]
    return f"To make room, {', or '.join(remedies)}; `offstage plan` shows what fits."
