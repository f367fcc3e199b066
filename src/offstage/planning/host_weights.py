# SPDX-License-Identifier: Apache-2.0
"""Weights that live on the host: which layers' these are, what they take, and what their trips cost. Pure arithmetic.

A layer's weights come to the device for its forward and again for its backward. Its update needs its state there too,
and after it both go to the host: in backward, or, with the gradients that had left, in `step()` or under the next
forward. Each phase takes as long as its compute or as its copies take, whichever is longer. docs/internals/planner.md
derives the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from offstage.config import OffloadConfig, format_size
from offstage.errors import ConfigError
from offstage.planning.predict import (
    HOST_MS_PER_CHUNK,
    LINK_IN_BACKWARD,
    Load,
    Rates,
    Shares,
    Times,
    Totals,
    Workload,
    launches_delayed_ms,
)
from offstage.planning.sizes import NO_LAYER, Columns, Mask, Numbers, total

LAYERS_BEHIND = 2
"""Layers that backward has left and whose updates may still be under way: with fewer the link has pauses."""
LAYERS_ON_DEVICE = 2 + LAYERS_BEHIND
"""Layers whose weights are on the device at once: the one that runs, the next one, and those that backward has left."""
LAYERS_WITH_GRADIENTS = 1 + LAYERS_BEHIND
"""Layers whose gradients are on the device at once: the one that backward is in, and those that it has left."""
LEFT_TO_FORWARD = 0.16
"""`update_in_backward` with `overlap_forward`: share of these layers that the next forward updates, where the link has
time besides carrying their weights. In backward it carries state as well, and is what backward waits for."""
_LAYERS_KEPT = 2
"""Layers whose weights wait on the device: the last ones between forward and backward, and the first ones between
backward and what follows."""
_UPDATE_IN_PLACE = 4.0
"""Bytes of host memory that an update by the CPU takes for each byte of weights, beside the state: weights are looked
at, read and written, gradients are read."""
_GRADIENTS_KEPT = 0.5
"""With clipping and a second set: share of their gradients that stays on the device, where activations were."""


# Which #


def may_leave(columns: Columns, config: OffloadConfig) -> Mask:
    """The parameters whose weights `config` lets live on the host: those of whole layers, the last ones first.

    They do if their state streams, or if they have none. The first layers stay: backward updates them last, and the
    next forward needs them first.
    """
    weights, candidates = columns.weight_bytes, in_layers(columns, config)
    numbers, layer_bytes = _by_layer(columns, candidates, weights)
    if not len(numbers):
        raise ConfigError(
            f"weights={config.weights!r} expects layers with weights of at least min_bytes="
            f"{format_size(int(config.min_bytes))}, in a ModuleList or with numbers in their names, as in "
            "'layers.0.weight'; found none. Lower min_bytes, name the layers, or leave weights out."
        )
    stays = _may_stay(int(weights.sum()), layer_bytes, config)
    leaving = []
    for number, nbytes in zip(numbers.tolist(), layer_bytes.tolist(), strict=True):
        if stays >= nbytes:
            stays -= nbytes
        else:
            stays = 0
            leaving.append(number)
    found: Mask = candidates & np.isin(columns.layer, leaving)
    return found


def in_layers(columns: Columns, config: OffloadConfig) -> Mask:
    """The parameters of layers that are large enough to leave."""
    found: Mask = (columns.layer != NO_LAYER) & (columns.weight_bytes >= max(1, int(config.min_bytes)))
    return found


def left_to_forward(layers: int) -> list[int]:
    """Which of so many layers the next forward updates, by number: spread over it, so that the link can keep up."""
    left = int(LEFT_TO_FORWARD * layers)
    return [(2 * number + 1) * layers // (2 * left) for number in range(left)]


def _by_layer(columns: Columns, which: Mask, numbers: Numbers) -> tuple[Numbers, Numbers]:
    """The layers of the parameters that `which` selects, and the sum of their `numbers`."""
    layers, positions = np.unique(columns.layer[which], return_inverse=True)
    sums = np.zeros(len(layers), dtype=np.int64)
    np.add.at(sums, positions, numbers[which])
    return layers, sums


def _may_stay(everything: int, layer_bytes: Numbers, config: OffloadConfig) -> int:
    """Bytes of the layers' weights that may stay on the device."""
    of_layers = int(layer_bytes.sum())
    if config.weights == "host":
        return 0
    if isinstance(config.weights, float):
        return int((1.0 - config.weights) * of_layers)
    budget = int(config.weights)
    if everything <= budget:
        return of_layers
    need = everything - of_layers + LAYERS_ON_DEVICE * int(layer_bytes.max())
    if need > budget:
        raise ConfigError(
            f"weights={format_size(budget)} cannot hold what is not in the model's layers, "
            f"{format_size(everything - of_layers)}, and {LAYERS_ON_DEVICE} layers of "
            f"{format_size(int(layer_bytes.max()))} that are on their way. Raise it to {format_size(need, up=True)}."
        )
    return budget - need


# How much #


@dataclass(frozen=True)
class Hosted:
    """The weights on the host, in bytes."""

    weights: float = 0.0
    trained: float = 0.0
    """Of those that get gradients, which are as large."""
    state: float = 0.0
    """Of their state."""
    largest: float = 0.0
    """Weights of the largest layer."""
    layers: float = 1.0
    """How many layers the model has, on the host or not."""
    num: float = 0.0
    """How many of them are on the host."""

    @classmethod
    def of(cls, columns: Columns, hosted: Mask) -> Hosted:
        """`hosted`: which of `columns` live there."""
        trained = hosted & (columns.state_bytes > 0)
        _, layer_bytes = _by_layer(columns, hosted, columns.weight_bytes)
        return cls(
            weights=total(columns.weight_bytes, hosted),
            trained=total(columns.weight_bytes, trained),
            state=total(columns.state_bytes, trained),
            largest=int(layer_bytes.max(initial=0)),
            layers=max(1, len(np.unique(columns.layer[columns.layer != NO_LAYER]))),
            num=len(layer_bytes),
        )

    def towards(self, other: Hosted, share: float) -> Hosted:
        """`share` of the way to `other`."""
        return Hosted(*((1.0 - share) * a + share * b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def copies(self) -> float:
        """The most of them on the device."""
        return min(self.weights, LAYERS_ON_DEVICE * self.largest)

    @property
    def gradients(self) -> float:
        """The most of their gradients on the device."""
        return min(self.trained, LAYERS_WITH_GRADIENTS * self.largest)

    @property
    def first_gradients(self) -> float:
        """Those on the device when the activations are largest."""
        return min(self.trained, self.largest)

    def room_in_slot(self, slot_bytes: float) -> float:
        """What a slot of `slot_bytes` of state has besides: room for the gradients that come back with it."""
        return slot_bytes * self.trained / self.state if self.state else 0.0

    def by_cpu(self, share: float, off: float) -> float:
        """The share of them that the CPU updates: whole layers, until that is `share` of the `off` bytes of state that
        leave."""
        return min(1.0, share * off / self.state) if self.state else 0.0

    def left(self, config: OffloadConfig, *, clips: bool, by_cpu: float = 0.0) -> float:
        """The share of them that the device updates in the next forward, although it updates others in backward."""
        if clips or not (config.update_in_backward and config.overlap_forward):
            return 0.0
        return len(left_to_forward(round((1.0 - by_cpu) * self.num))) / max(1.0, self.num)

    def host_bytes(self, config: OffloadConfig, *, clips: bool, micro_batches: int, by_cpu: float = 0.0) -> float:
        """Host memory beside their state: weights, gradients that leave, and a second set."""
        second = self.trained * (1.0 - by_cpu) if config.update_in_backward and clips else 0.0
        gradients = self.host_gradients(config, clips=clips, micro_batches=micro_batches, by_cpu=by_cpu)
        return self.weights + gradients + second

    def host_gradients(self, config: OffloadConfig, *, clips: bool, micro_batches: int, by_cpu: float = 0.0) -> float:
        """Gradients that leave: all but those that are used at once."""
        used_at_once = config.update_in_backward and not clips and micro_batches == 1
        later = self.left(config, clips=clips, by_cpu=by_cpu) + by_cpu
        return self.trained * (later if used_at_once else 1.0)


NO_WEIGHTS = Hosted()
"""All of them are on the device."""


def hosted_by(columns: Columns, config: OffloadConfig, off: Sequence[bool] | Mask) -> Hosted:
    """The weights that `config` moves. `off`: whose state leaves the device; what has no state can leave, too."""
    if not config.moves_weights:
        return NO_WEIGHTS
    leaves = np.asarray(off, dtype=bool) | (columns.state_bytes == 0)
    return Hosted.of(columns, may_leave(columns, config) & leaves)


# What it costs #


def _load(up: float, down: float) -> Load:
    return Load(up=up, down=down, dram=up + down)


class _Trips:
    """Loads of the link: each is one pass over all hosted layers."""

    def __init__(
        self, hosted: Hosted, streamed: float, left: float, by_cpu: float, params: float, rates: Rates
    ) -> None:
        """`streamed`: state that is fetched and stored, also that of weights that stay. `left`: the share of layers on
        the host that the next forward updates, though others are updated in backward. `by_cpu`: the share of them that
        the CPU updates, of `params` parameters."""
        trained = (1.0 - by_cpu) * hosted.trained
        self.cpu = Load(cpu=by_cpu * params, dram=by_cpu * (2 * hosted.state + _UPDATE_IN_PLACE * hosted.trained))
        """The CPU updates layers where they are."""
        self.fetch = _load(hosted.weights, 0.0)
        """Weights come for a forward."""
        self.again = _load(max(0.0, hosted.weights - _LAYERS_KEPT * hosted.largest), 0.0)
        """They come again, but for those that are still there."""
        still = _LAYERS_KEPT - int(_LAYERS_KEPT * by_cpu)  # what the CPU updates is old on the device
        self.first = _load(max(0.0, hosted.weights - still * hosted.largest), 0.0)
        """The same behind a step."""
        self.leave = _load(0.0, hosted.trained)
        """Gradients leave."""
        self.back = _load(hosted.trained, 0.0)
        """They come back, for a sum."""
        self.back_for_update = _load(trained, 0.0)
        """Those that the device needs for the update."""
        self.left = _load(left * hosted.state, left * (hosted.state + hosted.trained))
        """State comes in forward, and leaves with the new weights."""
        self.update = _load(streamed, streamed + trained)
        """The same, of all that the device updates."""
        self.early = _load(streamed - self.left.up, streamed + trained - self.left.down)
        """Of what is updated in backward."""
        self.leave_late, self.back_late = self.leave * (left + by_cpu), self.back * left
        """Gradients that are not used at once, though others are."""
        state = hosted.largest * hosted.state / hosted.trained if hosted.trained else 0.0
        self.layer_ms = _load(state, state + hosted.largest).ms(rates)
        """One layer's update."""


def exposed_with_weights(
    totals: Totals, shares: Shares, hosted: Hosted, rates: Rates, config: OffloadConfig, workload: Workload
) -> Times:
    """`predict.exposed` for a plan with weights on the host. The CPU updates layers where they are, in `step()` or
    under the next forward."""
    in_backward, under_forward = config.update_in_backward, config.overlap_forward
    speculates = in_backward and workload.clips
    off = totals.state * (1.0 - shares.resident)
    by_cpu = hosted.by_cpu(shares.host, off)
    streamed = (off - by_cpu * hosted.state) * (1.0 if speculates else totals.moved)
    left = hosted.left(config, clips=workload.clips, by_cpu=by_cpu)
    trips = _Trips(hosted, streamed, left, by_cpu, totals.params * hosted.trained / max(1.0, totals.weights), rates)
    device_ms = totals.update_bytes * totals.moved / rates.device
    late = device_ms * shares.resident if not in_backward or speculates else 0.0

    cues = {"in_backward": in_backward, "speculates": speculates}
    backwards = list(_backwards(trips, workload.micro_batches, by_cpu, **cues))
    late += sum(_late(load.ms(rates), workload.backward_ms, 0.0, hosted) for load in backwards[:-1])
    share = LINK_IN_BACKWARD if in_backward else 1.0
    end_ms = trips.layer_ms if in_backward and not under_forward else 0.0  # the last update, for which step() waits
    late += _late(backwards[-1].ms(rates) / share, workload.backward_ms, end_ms, hosted)

    # Behind a backward the first layers are still there; without overlap_forward other code may write them meanwhile.
    work, later = Load(), trips.update + trips.back_for_update + trips.cpu
    if under_forward:
        forwards = [(trips.again, 0.0)] * workload.micro_batches
        if in_backward:
            forwards[0] = (trips.first + trips.left + trips.back_late + trips.cpu, 0.0)
        else:
            forwards[0] = (trips.first + later, trips.layer_ms)
    else:
        forwards = [(trips.fetch, hosted.largest / rates.up)] * workload.micro_batches
        if in_backward:
            work = trips.cpu
        else:
            work = trips.fetch * (1.0 - by_cpu) + later
        late += work.ms(rates)
    for load, first_ms in forwards:
        late += _late(load.ms(rates), workload.forward_ms, first_ms, hosted)

    fill_ms = shares.chunk_bytes / rates.duplex
    if speculates and shares.chunk_bytes:
        fill_ms += HOST_MS_PER_CHUNK * streamed / shares.chunk_bytes
    exposed_ms = fill_ms + max(device_ms, late)
    if in_backward:
        exposed_ms += launches_delayed_ms(totals, shares, rates, workload, _load(streamed, streamed))
    work = sum([*(load for load, _ in forwards), *backwards], start=work)
    return Times(exposed_ms, 0.0 if in_backward else 1.0 - shares.resident, work)


def _backwards(
    trips: _Trips, micro_batches: int, by_cpu: float, *, in_backward: bool, speculates: bool
) -> Iterator[Load]:
    """What each backward of a step moves. Sums of gradients wait on the host between micro-batches."""
    for number in range(micro_batches):
        load = trips.again + (trips.back if number else Load())
        if number < micro_batches - 1 or not in_backward:
            yield load + trips.leave
        else:
            kept = trips.leave * ((1.0 - by_cpu) * (1.0 - _GRADIENTS_KEPT)) if speculates else Load()
            yield load + trips.early + trips.leave_late + kept


def _late(link_ms: float, compute_ms: float, end_ms: float, hosted: Hosted) -> float:
    """How much longer a phase takes than its compute, if its copies take `link_ms`.

    `end_ms`: copies that nothing hides: in forward the first layer's, in backward the update of the last one. And while
    the layer at the other end is computed, the link has nothing to do.
    """
    idle_ms = compute_ms / hosted.layers if link_ms else 0.0
    return max(end_ms, link_ms + idle_ms - compute_ms)
