# SPDX-License-Identifier: Apache-2.0
"""`make_plan`: the fastest plan that fits, or a refusal with numbers. Pure: the same input gives the same answer.

`sizes.py` says what there is, `world.py` what one rank has of it, `search.py` which ways there are, `predict.py` what
each takes, and `plan.py` turns the chosen one into placements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from offstage.config import OffloadConfig, Placement, format_size
from offstage.errors import ConfigError, HostMemoryError
from offstage.planning.group_slots import with_slots
from offstage.planning.plan import ParamSize, Plan, plan_placements
from offstage.planning.predict import CHOSEN, Candidate, Prediction, Workload
from offstage.planning.search import Search
from offstage.planning.sizes import Source, param_sizes
from offstage.planning.world import World

if TYPE_CHECKING:
    from offstage.planning.machine import Machine


def make_plan(
    model_or_sizes: Source,
    machine: Machine,
    config: OffloadConfig | None = None,
    *,
    world: World | None = None,
    workload: Workload | None = None,
) -> Plan:
    """The fastest plan for one rank that fits, what it is predicted to take, and what else was considered.

    `model_or_sizes` is a model (the meta device will do), a state dict, `ParamSize`s, or a mapping from names to shapes
    or numbers of elements. Without `world` the model is on one device; without `workload` nothing hides the updates.
    """
    model = model_or_sizes if isinstance(model_or_sizes, nn.Module) else None
    config = with_slots(config or OffloadConfig(), model)
    world = world or World(ranks_per_host=machine.ranks_on_host)
    search = Search(
        world.share_of(_on_one_device(param_sizes(model_or_sizes, config))), machine, config, world, workload
    )
    own = search.own()
    chosen = dataclasses.replace(search.best(own), verdict=CHOSEN)
    if not search.fits_host(chosen):
        _refuse_host(search, chosen)
    if chosen.prediction.device_peak_bytes > machine.device_bytes:
        _refuse_device(search, chosen)
    plan = plan_placements(search.rank.sizes, search.with_share(chosen.host_fraction))
    chosen = dataclasses.replace(chosen, prediction=_exact(plan, chosen.prediction, search))
    return dataclasses.replace(
        plan,
        prediction=chosen.prediction,
        candidates=(chosen, *search.others(own, chosen)),
        notes=tuple(_notes(search, chosen.prediction)),
    )


def choose_host_fraction(sizes: Sequence[ParamSize], machine: Machine, config: OffloadConfig) -> float:
    """The share that `make_plan` chooses for the CPU, of what leaves the device. Refusing is left to others."""
    world = World(ranks_per_host=machine.ranks_on_host)
    search = Search(world.share_of(sizes), machine, config, world, None)
    return search.best(search.own()).host_fraction


def _on_one_device(sizes: Sequence[ParamSize]) -> Sequence[ParamSize]:
    devices = sorted({size.device for size in sizes})
    if len(devices) > 1:
        raise ConfigError(
            f"make_plan expects the parameters of one device; found some on {', '.join(devices)}. Make a plan for each."
        )
    return sizes


def _exact(plan: Plan, found: Prediction, search: Search) -> Prediction:
    """`found`, with the bytes of the placements themselves: shares are met to within one parameter."""
    workload, config = search.workload, search.config
    second = config.update_in_backward and workload.clips
    staging = plan.slots * plan.slot_bytes
    window = search.window_bytes(config, staging, plan.bytes_of(Placement.STREAMED))
    state = plan.bytes_of(Placement.RESIDENT) + staging + int(window)
    up = down = 0.0
    for size, placement in zip(plan.sizes, plan.placements, strict=True):
        active = workload.active_experts if size.expert else 1.0
        if placement is Placement.STREAMED:
            up += size.state_bytes * (1.0 if second else active)
            down += size.state_bytes * (1.0 if second else active)
        elif placement is Placement.HOST:
            up += size.weight_bytes * active
            down += 2 * size.weight_bytes * active
    return dataclasses.replace(
        found,
        device_state_bytes=state,
        device_peak_bytes=found.device_peak_bytes - found.device_state_bytes + state,
        host_bytes=found.host_bytes if second else plan.host_bytes,
        bytes_up=int(up),
        bytes_down=int(down),
    )


# Refusing


def _refuse_host(search: Search, chosen: Candidate) -> None:
    need, machine, ranks = chosen.prediction.host_bytes, search.machine, search.world.ranks_per_host
    missing = need - search.host_limit
    limit = f"{format_size(machine.host_free_bytes)} free" + (f" for {ranks} ranks" if ranks > 1 else "")
    if search.host_limit < machine.host_free_bytes // ranks:
        limit = f"host_budget={format_size(search.host_limit)}"
    raise HostMemoryError(
        f"The plan needs {format_size(need)} of host memory per rank; found {limit}. Keep {format_size(missing)} more "
        f"of the state on the device (device_budget of {format_size(chosen.prediction.device_state_bytes + missing)}), "
        "use master_weights='split' or state_dtype='bfloat16', or divide the state among more ranks."
    )


def _refuse_device(search: Search, chosen: Candidate) -> None:
    peak, most = chosen.prediction.device_peak_bytes, search.machine.device_bytes
    state, rank = chosen.prediction.device_state_bytes, search.rank
    remedies = []
    if chosen.resident_bytes > peak - most:
        remedies.append(f"lower device_budget to {format_size(state - (peak - most))}")
    if not search.config.update_in_backward:
        remedies.append("use update_in_backward=True without clipping, which keeps a part of the gradients only")
    remedies.append("divide the model among more ranks")
    raise ConfigError(
        f"{search.machine.device_name} with {format_size(most)} cannot hold a peak of {format_size(peak)}, of which "
        f"weights {format_size(rank.weight_bytes)}, state {format_size(state)}, other bytes of the workload "
        f"{format_size(int(search.workload.other_bytes))}, and the rest gradients. To make room, "
        f"{', or '.join(remedies)}."
    )


# What is assumed


def _notes(search: Search, found: Prediction) -> Iterator[str]:
    world, ranks, rank = search.world, search.world.ranks_per_host, search.rank
    if world.ranks > 1:
        ways = " x ".join(f"{n} {way}" for way in ("data", "tensor", "pipeline") if (n := getattr(world, way)) > 1)
        experts = f", experts divided by {world.expert}" if world.expert > 1 else ""
        stage = f"; the stage of {rank.stage}" if rank.stage else ""
        yield f"one rank of {world.ranks:,} ({ways}{experts}){stage}"
    if ranks > 1:
        yield f"{ranks} ranks share a host: a link each; host memory, its bandwidth and the threads in equal parts"
    if not search.knows_workload:
        yield "no workload was given, so nothing hides the updates: exposed is an upper bound"
    if search.totals.moved < 1.0:
        yield f"{search.totals.moved:.0%} of the state gets gradients in a step; the rest does not move"
    if search.config.update_in_backward and not search.workload.clips:
        first = found.device_state_bytes + rank.weight_bytes + rank.gradient_bytes + int(search.workload.other_bytes)
        over = f", more than the device's {format_size(search.machine.device_bytes)}"
        yield (
            f"the first iteration keeps all gradients: its peak is {format_size(first)}"
            f"{over if first > search.machine.device_bytes else ''}"
        )
