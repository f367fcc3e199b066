# SPDX-License-Identifier: Apache-2.0
"""`run_info`: command, versions, machine, model and plan of a run, for `run.json`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import platform
import sys
from typing import Any

import torch

import offstage
from offstage import OffloadedOptimizer, OffstageError, Plan, Workload, make_plan, measure_machine
from offstage.memory.cpus import usable_cpus
from offstage.optimizer.optimizer import runtime_of
from offstage.planning.sizes import param_sizes
from offstage.train.config import TrainConfig
from offstage.train.metrics import Meter
from offstage.train.model import BYTES, config_of
from offstage.train.parallel import Parallel

logger = logging.getLogger("offstage")


def run_info(
    config: TrainConfig, parallel: Parallel, optimizer: OffloadedOptimizer, *, parameters: int, vocabulary: int = BYTES
) -> dict[str, Any]:
    """Plain values for JSON."""
    data = config.data
    return {
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "offstage": offstage.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": machine(parallel.device),
        "world": {"ranks": parallel.ranks, "stages": parallel.stages, "sharded": parallel.sharded},
        "model": identity(config, parallel.device, vocabulary),
        "parameters": parameters,
        "tokens_per_step": data.sequence * data.batch * data.micro_batches * parallel.data_ranks,
        **places(optimizer),
    }


def places(optimizer: OffloadedOptimizer) -> dict[str, Any]:
    """Where state and weights live now."""
    return {
        "plan": json.loads(optimizer.plan.to_json()),
        "net_saved_bytes": optimizer.plan.net_saved_bytes,
        "weights": host_weights(optimizer),
    }


def host_weights(optimizer: OffloadedOptimizer) -> dict[str, int] | None:
    """What of the weights lives on the host, and the most of that on the device; `None` if all are on the device."""
    weights = runtime_of(optimizer).weights
    if weights is None:
        return None
    return {
        "host_bytes": weights.host_bytes,
        "device_bytes": weights.most_device_bytes,
        "layers": len(weights.layers),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Names and sizes of the host and the device."""
    found: dict[str, Any] = {
        "host": platform.platform(),
        "cpus": usable_cpus(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": str(device),
    }
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        found["device_name"] = getattr(properties, "name", device.type)
        found["device_bytes"] = torch.accelerator.get_memory_info(device)[1]
    return found


def identity(config: TrainConfig, device: torch.device, vocabulary: int = BYTES) -> dict[str, Any]:
    """What must be equal for a checkpoint of one run to fit another; loading compares transformers models."""
    dtype = str(config.model.dtype_on(device)).removeprefix("torch.")
    lora = config.lora
    adapters = (
        {"lora": f"rank {lora.rank}, scale {lora.scale:g}, {' '.join(lora.targets) or 'all blocks'}"}
        if lora.rank
        else {}
    )
    if config.model.described_by is not None:
        return {"package": "transformers", "dtype": dtype, **adapters}
    sizes = dataclasses.asdict(config_of(config.model, vocabulary))
    return {"package": "offstage", **sizes, "dtype": dtype, **adapters}


def predicted_plan(
    optimizer: OffloadedOptimizer, config: TrainConfig, meter: Meter, device: torch.device
) -> Plan | None:
    """The run's plan with the prediction of `make_plan` for such a run; `None` if nothing leaves the device.

    The workload is the measured forward and backward, less the time they waited for updates.
    """
    forward, backward = meter.phase_ms("forward"), meter.phase_ms("backward")
    placed = optimizer.plan
    if not placed.slots or forward is None or backward is None:
        return None
    offload, parts = config.offload, config.data.micro_batches
    overlaps = offload.overlap_forward or offload.update_in_backward or offload.moves_weights
    waited = (meter.exposed_ms(last=False, in_step=False) or 0.0) if overlaps else 0.0
    share = max(0.0, 1.0 - waited / (forward + backward)) / parts
    if offload.update_on == "auto" and offload.host_fraction is None:
        offload = dataclasses.replace(offload, host_fraction=placed.host_share)
    workload = Workload(
        forward_ms=share * forward,
        backward_ms=share * backward,
        micro_batches=parts,
        clips=bool(config.optimizer.clip),
    )
    sizes, model = list(placed.sizes), runtime_of(optimizer).model
    if offload.moves_weights and model is not None:  # also those that have no state, and which layers they are in
        by_name = {size.name: size for size in param_sizes(model, offload)}
        sizes = [*(by_name.pop(size.name) for size in sizes), *by_name.values()]
    try:
        predicted = make_plan(sizes, measure_machine(device), offload, workload=workload)
        known = ("host_weight_bytes", "device_weight_bytes", "prediction", "candidates", "notes")
        return dataclasses.replace(placed, **{name: getattr(predicted, name) for name in known})
    except (OffstageError, MemoryError, torch.OutOfMemoryError) as error:
        logger.warning("the planner has no prediction for the report: %s", error)
        return None


def num_parameters_of(model: torch.nn.Module, *, trained: bool = False) -> int:
    """Parameters of this rank's stages, all or the trained ones; a sharded one counts whole."""
    return sum(param.numel() for param in model.parameters() if param.requires_grad or not trained)
