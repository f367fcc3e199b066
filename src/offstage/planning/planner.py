# SPDX-License-Identifier: Apache-2.0
"""`make_plan`: the fastest plan that fits, or a refusal with numbers. Pure: the same input gives the same answer.

`Search` predicts the plans that are considered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from offstage.config import OffloadConfig, format_size
from offstage.errors import ConfigError, HostMemoryError
from offstage.planning.group_slots import with_slots
from offstage.planning.machine import Machine
from offstage.planning.plan import Placed, Plan
from offstage.planning.predict import CHOSEN, LEAST_LEAVING, Candidate, Prediction, Workload
from offstage.planning.search import Search
from offstage.planning.sizes import Mask, Numbers, ParamSize, Source, World, param_sizes, total


def make_plan(
    model_or_sizes: Source,
    machine: Machine,
    config: OffloadConfig | None = None,
    *,
    world: World | None = None,
    workload: Workload | None = None,
) -> Plan:
    """The fastest plan for one rank that fits, with its prediction and the other plans that were considered.

    `model_or_sizes` is a model (on any device, the meta device too), a state dict, `ParamSize`s, or a mapping from
    names to shapes or numbers of elements. Without `world` the model is on one device; without `workload` the updates
    are not hidden behind forward or backward.
    """
    model = model_or_sizes if isinstance(model_or_sizes, nn.Module) else None
    config = with_slots(config or OffloadConfig(), model)
    world = world or World(ranks_per_host=machine.ranks_on_host)
    _refuse_ranks(config, world)
    sizes = _on_one_device(param_sizes(model_or_sizes, config))
    search = Search(world.share_of(sizes), machine, config, world, workload)
    allowed = search.allowed()
    chosen = dataclasses.replace(search.best(allowed), verdict=CHOSEN)
    if not search.fits_host(chosen):
        _refuse_host(search, chosen)
    if chosen.prediction.device_peak_bytes > machine.device_bytes:
        _refuse_device(search, chosen)
    placed = search.placed(search.with_share(chosen.host_fraction))
    chosen = dataclasses.replace(chosen, prediction=_exact(placed, chosen.prediction, search))
    hosted = search.sums(placed).hosted
    return dataclasses.replace(
        placed.plan(search.rank.sizes),
        host_weight_bytes=int(hosted.weights),
        device_weight_bytes=search.weights_on_device(hosted) if hosted.weights else 0,
        prediction=chosen.prediction,
        candidates=(chosen, *search.others(allowed, chosen)),
        notes=tuple(_notes(search, placed, chosen.prediction)),
    )


def choose_host_fraction(sizes: Sequence[ParamSize], machine: Machine, config: OffloadConfig) -> float:
    """The share that `make_plan` chooses for the CPU, of what leaves the device. Does not check that the plan fits."""
    world = World(ranks_per_host=machine.ranks_on_host)
    search = Search(world.share_of(sizes), machine, config, world, None)
    return search.best(search.allowed()).host_fraction


def _on_one_device(sizes: Sequence[ParamSize]) -> Sequence[ParamSize]:
    devices = sorted({size.device for size in sizes})
    if len(devices) > 1:
        raise ConfigError(
            f"make_plan expects the parameters of one device; found some on {', '.join(devices)}. Make a plan for each."
        )
    return sizes


def _refuse_ranks(config: OffloadConfig, world: World) -> None:
    if config.moves_weights and world.ranks > 1:
        raise ConfigError(
            f"weights={config.weights!r} keeps a layer's weights on the host of one device, which updates all of them; "
            f"expected one rank, found {world.ranks}. Leave weights out: ranks that divide weights have fewer each, "
            "and FSDP2 has a CPUOffloadPolicy of its own."
        )


def _exact(placed: Placed, prediction: Prediction, search: Search) -> Prediction:
    """`prediction` with the exact bytes of the placements, which meet the shares only to within one parameter."""
    workload, config = search.workload, search.config
    if config.moves_weights:  # nothing is shared with the CPU, so the sums are exact
        return prediction
    speculates = config.update_in_backward and workload.clips
    sums, columns, streamed = search.sums(placed), placed.columns, placed.streamed
    staging = placed.slots * placed.slot_bytes
    window = search.window_bytes(config, staging, total(columns.state_bytes, streamed))
    state = sums.resident + staging + int(window)

    def moved(nbytes: Numbers, which: Mask, active: float) -> float:
        return total(nbytes, which & ~columns.expert) + active * total(nbytes, which & columns.expert)

    both_ways = moved(columns.state_bytes, streamed, 1.0 if speculates else workload.active_experts)
    weights = moved(columns.weight_bytes, placed.on_host, workload.active_experts)
    host = sums.off + placed.host_slots * placed.host_slot_bytes
    return dataclasses.replace(
        prediction,
        device_state_bytes=state,
        device_peak_bytes=prediction.device_peak_bytes - prediction.device_state_bytes + state,
        host_bytes=prediction.host_bytes if speculates else host,
        bytes_up=int(both_ways + weights),
        bytes_down=int(both_ways + 2 * weights),
    )


# Refusals #


def _refuse_host(search: Search, chosen: Candidate) -> None:
    need, machine, ranks = chosen.prediction.host_bytes, search.machine, search.world.ranks_per_host
    missing = need - search.host_limit
    limit = f"{format_size(machine.host_free_bytes)} free" + (f" for {ranks} ranks" if ranks > 1 else "")
    if search.host_limit < machine.host_free_bytes // ranks:
        limit = f"host_budget={format_size(search.host_limit)}"
    remedies = ["use master_weights='split' or state_dtype='bfloat16'", "divide the state among more ranks"]
    if chosen.prediction.device_peak_bytes + missing <= machine.device_bytes:
        budget = format_size(chosen.prediction.device_state_bytes + missing)
        remedies.insert(0, f"keep {format_size(missing)} more of the state on the device (device_budget of {budget})")
    raise HostMemoryError(
        f"The plan needs {format_size(need)} of host memory per rank; found {limit}. To make room, "
        f"{', or '.join(remedies)}."
    )


def _refuse_device(search: Search, chosen: Candidate) -> None:
    peak, most = chosen.prediction.device_peak_bytes, search.machine.device_bytes
    state, rank = chosen.prediction.device_state_bytes, search.rank
    remedies = []
    if chosen.resident_bytes > peak - most:
        remedies.append(f"lower device_budget to {format_size(state - (peak - most))}")
    weights = rank.weight_bytes
    if search.config.moves_weights:
        weights = search.weights_on_device(search.sums(search.placed(search.config)).hosted)
    elif search.world.ranks == 1:
        remedies.append("keep the layers' weights on the host (weights='host')")
    remedies.append("divide the model among more ranks")
    raise ConfigError(
        f"{search.machine.device_name} with {format_size(most)} cannot hold a peak of {format_size(peak)}, of which "
        f"weights {format_size(weights)}, state {format_size(state)}, other bytes of the workload "
        f"{format_size(int(search.workload.other_bytes))}, and the rest gradients. To make room, "
        f"{', or '.join(remedies)}."
    )


# Notes #


def _notes(search: Search, placed: Placed, prediction: Prediction) -> Iterator[str]:
    """What the prediction assumes."""
    world, ranks, rank = search.world, search.world.ranks_per_host, search.rank
    if world.ranks > 1:
        ways = " x ".join(f"{n} {way}" for way in ("data", "tensor", "pipeline") if (n := getattr(world, way)) > 1)
        experts = f", experts divided by {world.expert}" if world.expert > 1 else ""
        stage = f"; the stage of {rank.stage}" if rank.stage else ""
        yield f"one rank of {world.ranks:,} ({ways}{experts}){stage}"
    if ranks > 1:
        yield f"{ranks} ranks share a host: a link each; host memory, its bandwidth and the threads in equal parts"
    if not search.knows_times:
        yield "no times of forward and backward were given, so nothing hides the updates: exposed is an upper bound"
    if not search.workload.other_bytes:
        yield "no bytes of activations were given (the workload's other_bytes): the peak is without them"
    if search.fits_resident():
        peak = int(search.totals.state) + search.other_device_bytes(search.config)
        yield f"all state would fit on the device, at a peak of {format_size(peak)}: offload only if you need the room"
    if search.totals.moved < 1.0:
        yield f"{search.totals.moved:.0%} of the state gets gradients in a step; the rest does not move"
    if search.config.moves_weights and not search.sums(placed).hosted.weights:
        yield f"weights={search.config.weights!r} moves none: the layers' state stays on the device, and so do they"
    hosted, work = search.sums(placed).hosted, search.workload
    later = hosted.host_gradients(search.config, clips=work.clips, micro_batches=work.micro_batches)
    if hosted.trained > later:
        more = format_size(int(hosted.trained - later))
        yield f"the first iteration has {more} of gradients on the host, too, if there is room"
    first = _first_peak(search, placed, prediction)
    if first > prediction.device_peak_bytes:
        over = f", more than the device's {format_size(search.machine.device_bytes)}"
        yield (
            f"the first iteration keeps more gradients: its peak is {format_size(first)}"
            f"{over if first > search.machine.device_bytes else ''}"
        )


def _first_peak(search: Search, placed: Placed, prediction: Prediction) -> int:
    """With `update_in_backward`: the peak of the first iteration, which only learns what is used at once.

    Gradients leave for the host in it, but for those of shards, small ones of resident state, and those that the CPU
    needs; these stay until `step()`.
    """
    config, work, rank = search.config, search.workload, search.rank
    if not config.update_in_backward or work.clips or config.moves_weights:
        return 0
    stay = rank.gradient_bytes
    if search.world.ranks == 1:
        sizes = rank.columns.weight_bytes
        stay -= total(sizes, placed.streamed | (placed.resident & (sizes >= LEAST_LEAVING)))
    return prediction.device_state_bytes + rank.weight_bytes + stay + int(work.other_bytes)
