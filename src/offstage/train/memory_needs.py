# SPDX-License-Identifier: Apache-2.0
"""`check_memory`: whether a run fits this machine, before anything of it is allocated.

The figures are the planner's: a rank's share of the model (`planning/sizes.py`), the placement of its state
(`planning/plan.py`) and the weights that live on the host (`planning/host_weights.py`). Activations depend on the
model's code and come on top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from offstage import ConfigError, HostMemoryError, World
from offstage.config import Placement, format_size
from offstage.memory.arena import check_host_memory
from offstage.memory.claims import Claim
from offstage.planning.host_weights import hosted_by
from offstage.planning.plan import host_share, plan_placements, staging_bytes
from offstage.planning.sizes import param_sizes
from offstage.train.config import TrainConfig
from offstage.train.parallel import Parallel
from offstage.train.passes import pieces_of
from offstage.train.whole_model import begins_on_host, model_for


@dataclass(frozen=True)
class Needs:
    """What one rank takes, in bytes, without activations."""

    parameters: int
    """How many are trained, in this rank's share."""
    dtype: torch.dtype
    weights: int
    """On the device, with copies of layers that live on the host."""
    gradients: int
    device_state: int
    """State that stays resident, slots and window."""
    host_state: int
    """State that leaves the device, and staging buffers."""
    host_weights: int = 0
    host_gradients: int = 0
    """Of weights that live on the host, unless they are used at once."""
    ranks: int = 1
    """How many there are."""

    @property
    def device_bytes(self) -> int:
        return self.weights + self.gradients + self.device_state

    @property
    def host_bytes(self) -> int:
        return self.host_weights + self.host_gradients + self.host_state

    def on_device(self) -> str:
        """What is trained, and the parts of the sum on the device."""
        parts = {"weights": self.weights, "gradients": self.gradients, "state": self.device_state}
        return self._in_words(parts, activations=True)

    def on_host(self) -> str:
        """The same on the host."""
        parts = {"weights": self.host_weights, "gradients": self.host_gradients} if self.host_weights else {}
        return self._in_words({**parts, "state": self.host_state}, activations=False)

    def everywhere(self) -> str:
        """The same on a machine whose device is the host."""
        weights, gradients = self.weights + self.host_weights, self.gradients + self.host_gradients
        parts = {"weights": weights, "gradients": gradients, "state": self.device_state + self.host_state}
        return self._in_words(parts, activations=True)

    def _in_words(self, parts: Mapping[str, int], *, activations: bool) -> str:
        sizes = ", ".join(f"{format_size(nbytes)} of {name}" for name, nbytes in parts.items())
        also = "; activations come on top" if activations else ""
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
    if begins_on_host(config, parallel.device, vocabulary) and not offload.moves_weights:
        offload = dataclasses.replace(offload, weights="host")
    if host_share(offload) is None:  # the share that the planner will choose changes little of it
        offload = dataclasses.replace(offload, host_fraction=0.0)
    world = World(data=parallel.data_ranks, shard_weights=parallel.sharded, shard_state=parallel.sharded)
    share = world.share_of(param_sizes(named, offload))
    plan = plan_placements(share.sizes, offload)
    staging = staging_bytes(plan.slots, plan.slot_bytes, plan.window, plan.bytes_of(Placement.STREAMED))
    hosted = hosted_by(share.columns, offload, [one is not Placement.RESIDENT for one in plan.placements])
    by_cpu = hosted.by_cpu(plan.host_share, plan.bytes_of(Placement.STREAMED) + plan.bytes_of(Placement.HOST))
    clips, micro_batches = bool(config.optimizer.clip), config.data.micro_batches
    return Needs(
        parameters=sum(size.numel for size in share.sizes if size.state_bytes),
        dtype=dtype,
        weights=int(share.weight_bytes - hosted.weights + hosted.copies),
        gradients=int(share.gradient_bytes - hosted.trained + hosted.gradients),
        device_state=plan.bytes_of(Placement.RESIDENT) + staging,
        host_state=plan.host_bytes,
        host_weights=int(hosted.weights),
        host_gradients=int(hosted.host_gradients(offload, clips=clips, micro_batches=micro_batches, by_cpu=by_cpu)),
        ranks=parallel.ranks,
    )


def check_host_weights(config: TrainConfig, parallel: Parallel) -> None:
    """Raise if weights cannot live on the host of this run, or if it has ranks that would decide differently."""
    if parallel.ranks > 1:
        config.refuse_fit_of_ranks(f"{parallel.ranks} ranks")
        config.refuse_divided_weights(f"{parallel.ranks} ranks, which share the weights with FSDP2 or as stages")
    moves = config.offload.moves_weights
    if (moves or config.fit.decides) and parallel.device.type == "cpu" and torch.accelerator.is_available():
        name = f"offload.weights={config.offload.weights!r}" if moves else "device_peak"
        raise ConfigError(
            f"{name} brings weights to this machine's accelerator; found run.device={config.run.device!r}. Leave "
            f"run.device out, or leave {name.partition('=')[0]} out."
        )


def check_memory(config: TrainConfig, parallel: Parallel, vocabulary: int | None = None) -> Claim:
    """Raise a `ConfigError` if this machine has too little memory for the run.

    `vocabulary`: of the tokenizer, which is read if it is not given. Returns the claim of the run's host memory, which
    other ranks and runs on this host respect until it is released.
    """
    needs = needs_of(config, parallel, vocabulary)
    budget = config.fit.host_budget if config.fit.decides else config.offload.host_budget
    on_host = parallel.device.type == "cpu"
    if config.fit.decides:  # what stays on the device is decided so that it fits
        _check_peak(config, parallel.device)
    elif not on_host:
        _check_device(needs, parallel.device)
    try:
        check_host_memory(0, None if budget is None else int(budget), already_bytes=needs.host_bytes)
        return check_host_memory(
            needs.host_bytes + (needs.device_bytes if on_host else 0),
            None,
            what=needs.everywhere() if on_host else needs.on_host(),
            remedy=_host_remedy(config, needs, on_host=on_host),
        )
    except HostMemoryError as error:
        raise ConfigError(str(error)) from error


def _check_peak(config: TrainConfig, device: torch.device) -> None:
    most = config.fit.peak_bytes
    if device.type != "cpu" and most > (has := torch.accelerator.get_memory_info(device)[1]):
        raise ConfigError(
            f"device_peak={format_size(most)} expects a device with so much memory; {device} has {format_size(has)}. "
            "Lower device_peak; leave room for the process's own context, half a GiB or so."
        )


def _check_device(needs: Needs, device: torch.device) -> None:
    free, _ = torch.accelerator.get_memory_info(device)
    free += torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    if needs.device_bytes <= free:
        return
    remedies = ["divide it among more devices with torchrun", "choose a smaller model"]
    if not needs.host_weights and needs.ranks == 1:
        remedies.insert(0, "keep the layers' weights on the host (offload.weights='host')")
    if needs.device_state > needs.device_bytes - free:
        remedies.insert(
            0, "let more of the state leave the device (a smaller offload.device_budget, no offload.window)"
        )
    if needs.dtype == torch.float32:
        remedies.insert(0, "use model.dtype='bfloat16'")
    raise ConfigError(
        f"{needs.on_device()} needs {format_size(needs.device_bytes)} of device memory; "
        f"{device} has {format_size(free)} free. To make room, {', or '.join(remedies)}; `offstage plan` shows what "
        "fits."
    )


def _host_remedy(config: TrainConfig, needs: Needs, *, on_host: bool) -> str:
    remedies = []
    if config.offload.state_dtype == "float32":
        remedies.append("use offload.state_dtype='bfloat16'")
    if needs.dtype == torch.bfloat16 and config.offload.master_weights in ("auto", "fp32"):
        remedies.append("use offload.master_weights='split'")
    if not on_host and not config.fit.decides:
        remedies.append("keep more of the state on the device (a lower offload.fraction)")
    if needs.host_weights and not on_host and not config.fit.decides:
        remedies.append("keep more weights on the device (a share or a size for offload.weights)")
    remedies += ["choose a smaller model", "free host memory"]
    return f"To make room, {', or '.join(remedies)}; `offstage plan` shows what fits."
