# SPDX-License-Identifier: Apache-2.0
"""`LoopWatch`: measures a training loop while it trains, and makes a `Loop` of what it saw.

Each moment that the activations' handle tells of begins a section: a layer's forward, the turn from forward to
backward, a layer's backward. Of each section the time on the caller's stream is taken, without what it waited for
lanes, and the most device memory, less what is known of it: weights, gradients, state, saved tensors. Stamps are read
after the iteration; nothing waits meanwhile. To see the memory of a section, the device's peak statistics are reset.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from offstage.lanes.lanes import Lane, Lanes
from offstage.lanes.link import link_for
from offstage.lanes.spans import Span, covered_ms
from offstage.modules import size_of
from offstage.optimizer.overlap.left_gradient import LeftGradient
from offstage.optimizer.runtime import Runtime
from offstage.planning.choices import Choice
from offstage.planning.loop import LayerLoad, Loop
from offstage.weights.host_weights import host_weight_of


def kind_of(layer: nn.Module) -> tuple[type[nn.Module], int]:
    """Layers of one kind save as much as each other, and do the same with it."""
    return type(layer), size_of(layer)


class Section(NamedTuple):
    """A part of an iteration: what, and of which layer."""

    name: str
    layer: int = -1


@dataclass
class _Seen:
    """One section, in the last micro-batch that had it."""

    start: Any = None
    stop: Any = None
    known_bytes: int = 0
    """On the device when it began, as far as that is known: base, weights, gradients, state, saved tensors."""
    owned_bytes: int = 0
    """Weights, gradients and state, with gradients that have left: they were there for a moment."""
    most_bytes: int = 0
    saved_bytes: int = 0
    """Of saved tensors, on the device when it began."""
    starved: bool = False
    """The device had nothing to do at both of its ends: it waited for the host meanwhile."""


@dataclass
class _Layer:
    saved_bytes: int = 0
    remade_bytes: int = 0


class _Times(NamedTuple):
    """Milliseconds, without what was waited for lanes."""

    forward: list[float]
    """Of each layer."""
    lasted: list[float]
    """Each layer's section of backward."""
    front_ms: float
    turn_ms: float
    end_ms: float


_MOST_WAITS = 1 << 16
_RECOMPUTED_OVER_FORWARD = 3.0
"""Of a layer that is recomputed: how many times its forward what its backward's section computes."""
_LEAST_AGAIN = 0.5
"""Share of the first forward that a second one takes at least: what backward does not need is left out."""
_FRONT, _TURN, _STEP = Section("front"), Section("turn"), Section("step")


@dataclass
class LoopWatch:
    """What is seen of one iteration. It is told by the activations' handle, and of steps by the runtime."""

    model: nn.Module
    layers: Sequence[nn.Module]
    runtime: Runtime
    choices: Callable[[], Sequence[Choice]]
    """What the layers do now."""
    device: torch.device
    lanes: Lanes
    """For stamps and for the device's memory."""
    input_elements: Callable[[], int]
    """Of the micro-batch that runs."""
    may_recompute: Sequence[bool]
    """Of each layer, as far as it was seen."""
    times_only: bool = False
    """Nothing is counted: the peak is somebody else's, and what is there is not as it was when it was watched."""
    micro_batches: int = 0
    base_bytes: int = 0
    clips: bool = False
    reads_gradients: bool = False
    _sections: dict[Section, _Seen] = field(default_factory=dict)
    _now: Section | None = None
    _saved: dict[int, _Layer] = field(default_factory=dict)
    _waits: deque[Span] = field(default_factory=deque)
    _began: Any = None
    _boundary: Any = None
    """Where the last section ended."""
    _params: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    _weight_bytes: int = 0
    """Of those that do not live on the host."""
    _state_bytes: int = 0
    """On the device; it comes and goes in `step()` only."""
    _is_idle: bool = False
    """The device had nothing to do when the section began that is now."""

    # What it is told #

    def begin_iteration(self) -> None:
        """Forget the iteration before."""
        self.micro_batches = 0
        self.clips = False
        self._sections, self._saved, self._now, self._waits = {}, {}, None, deque(maxlen=_MOST_WAITS)
        self._params = [(param, param.nbytes) for param in self.model.parameters()]
        self._weight_bytes = sum(nbytes for param, nbytes in self._params if host_weight_of(param) is None)
        link_for(self.device).caller_waits.spans = self._waits
        self._began = self.lanes.stamp(Lane.CALLER)

    def stop(self) -> None:
        """Nothing is noted any more."""
        link_for(self.device).caller_waits.spans = None

    def begin_forward(self, in_flight: int) -> None:
        # One without a backward before it is none: an evaluation with gradients.
        if not self.micro_batches or any(param.grad is not None for param in self.model.parameters()):
            self.micro_batches += 1
        self._saved = {}
        if self.times_only:
            self._begin(_FRONT, 0)
            return
        self._state_bytes = self.runtime.device_state_bytes(self.device)
        allocated = self.lanes.allocated_bytes()
        if allocated is not None:
            self.base_bytes = max(0, allocated - self._owned_bytes()[0])
        self._begin(_FRONT, 0)

    def enter(self, layer: int, here_bytes: int) -> None:
        self._begin(Section("forward", layer), here_bytes)

    def leave(self, layer: int, here_bytes: int) -> None:
        if layer == len(self.layers) - 1:
            self._begin(_TURN, here_bytes)

    def saved(self, layer: int, nbytes: int, *, is_remade: bool) -> None:
        of = self._saved.setdefault(layer, _Layer())
        of.saved_bytes += nbytes
        of.remade_bytes += nbytes if is_remade else 0

    def in_backward(self, layer: int | None, here_bytes: int) -> None:
        if layer is not None and self._now != Section("backward", layer):
            self._begin(Section("backward", layer), here_bytes)

    def end_forward(self) -> None:
        """Nothing begins: the turn lasts until backward."""

    def begin_step(self) -> None:
        """`step()` begins."""
        self.clips = self.runtime.iteration.norm is not None
        self.reads_gradients = self.runtime.uses.count > 0  # in any iteration so far
        self._begin(_STEP, 0)

    def end_step(self) -> None:
        """`step()` is over."""
        self._end()

    # Sections #

    def _begin(self, section: Section, saved_bytes: int) -> None:
        owned, left = self._end()
        self._sections[section] = _Seen(
            start=self._boundary,
            known_bytes=self.base_bytes + owned + saved_bytes,
            owned_bytes=owned + left,
            saved_bytes=saved_bytes,
        )
        self._now = section

    def _end(self) -> tuple[int, int]:
        """The section that is now ends. Returns what is owned, and what of gradients has left."""
        lanes = self.lanes
        self._boundary, reached = lanes.stamp(Lane.CALLER), lanes.mark()
        owned, left = (0, 0) if self.times_only else self._owned_bytes()
        is_idle = not lanes.at_once and lanes.passed(reached)  # all that was given so far is done
        if self._now is not None:
            seen = self._sections[self._now]
            seen.stop, seen.starved = self._boundary, is_idle and self._is_idle
            if not self.times_only:
                seen.most_bytes = lanes.peak_bytes()
                # Weights and gradients that came meanwhile are known, too.
                seen.known_bytes += max(0, owned + left - seen.owned_bytes)
        self._now, self._is_idle = None, is_idle
        if not self.times_only:
            lanes.reset_peak()
        return owned, left

    def _owned_bytes(self) -> tuple[int, int]:
        """Weights, gradients and state on the device now; and gradients that have left.

        Called between two layers, and the device must not wait for it: what a parameter takes is looked up once.
        """
        owned, left = self._state_bytes + self._weight_bytes, 0
        if self.runtime.weights is not None:
            owned += self.runtime.weights.device_bytes
        for param, nbytes in self._params:
            grad = param.grad
            if grad is None:
                continue
            if type(grad) is torch.Tensor:
                owned += grad.nbytes
            elif isinstance(grad, LeftGradient):
                left += nbytes
        return owned, left

    # What it makes of it #

    @property
    def is_complete(self) -> bool:
        """Whether an iteration was seen: the forward of every layer, a backward (frozen layers have none), a step."""
        layers = range(len(self.layers))
        has_backward = not layers or any(Section("backward", layer) in self._sections for layer in layers)
        wanted = [_FRONT, *(Section("forward", layer) for layer in layers), *((_TURN,) if layers else ()), _STEP]
        return has_backward and all(one in self._sections for one in wanted)

    @property
    def most_bytes(self) -> int:
        """The most that the iteration had on the device; 0 where that is not counted."""
        return max((seen.most_bytes for seen in self._sections.values()), default=0)

    def loop(self) -> Loop:
        """The iteration that was seen. Waits for the device."""
        assert self.is_complete
        chosen, kinds = list(self.choices()), [kind_of(layer) for layer in self.layers]
        saved, inputs = self._by_kind(kinds, chosen)
        times = self._times(kinds, chosen)
        forward, lasted = times.forward, times.lasted
        backward, again = _divide(lasted, forward, kinds, chosen)
        working, remaking = self._working(kinds, chosen, saved, inputs)
        layers = tuple(
            LayerLoad(
                forward_ms=forward[number],
                backward_ms=backward[number],
                again_ms=again[number],
                saved_bytes=saved.get(kind, 0),
                input_bytes=min(inputs.get(kind, saved.get(kind, 0)), saved.get(kind, 0)),
                working_bytes=working.get(kind, 0),
                remaking_bytes=remaking.get(kind, 0),
                can_recompute=self.may_recompute[number],
            )
            for number, kind in enumerate(kinds)
        )
        return Loop(
            layers=layers,
            front_ms=times.front_ms,
            turn_ms=times.turn_ms,
            end_ms=times.end_ms,
            turn_bytes=self._beyond(_TURN if self.layers else _FRONT),
            base_bytes=self.base_bytes,
            micro_batches=self.micro_batches,
            clips=self.clips,
            reads_gradients=self.reads_gradients,
            input_elements=self.input_elements(),
        )

    def retimed(self, loop: Loop) -> Loop:
        """`loop`, with what took less time in the iteration that was seen. Waits for the device.

        Nothing that the device does takes less than it needs; but it waits for a host that is busy with what a watched
        job has more to do, or, when sequences grow, had more to do for each token.
        """
        if not self.is_complete or len(loop.layers) != len(self.layers):
            return loop
        chosen, kinds = list(self.choices()), [kind_of(layer) for layer in self.layers]
        times = self._times(kinds, chosen)
        alone: dict[object, float] = {}
        for kind, choice, ms in zip(kinds, chosen, times.lasted, strict=True):
            if choice is Choice.KEEP and ms:
                alone[kind] = min(ms, alone.get(kind, ms))
        return dataclasses.replace(
            loop,
            layers=tuple(
                _least(layer, first, alone.get(kind), ms if choice is Choice.RECOMPUTE and ms else None)
                for layer, kind, choice, first, ms in zip(
                    loop.layers, kinds, chosen, times.forward, times.lasted, strict=True
                )
            ),
            front_ms=min(loop.front_ms, times.front_ms),
            turn_ms=min(loop.turn_ms, times.turn_ms),
            end_ms=min(loop.end_ms, times.end_ms),
        )

    def _times(self, kinds: Sequence[object], chosen: Sequence[Choice]) -> _Times:
        times = {section: self._ms(seen) for section, seen in self._sections.items()}
        lasted = [times.get(Section("backward", number), 0.0) for number in range(len(self.layers))]
        end_ms = 0.0
        if lasted:
            end_ms, lasted[0] = _without_end(lasted, kinds, chosen)
        forward = [times[Section("forward", number)] for number in range(len(self.layers))]
        starved = [self._sections[Section("forward", number)].starved for number in range(len(self.layers))]
        return _Times(
            forward=_without_host(forward, starved, lasted, kinds, chosen),
            lasted=lasted,
            front_ms=times[_FRONT] if self.layers else 0.0,
            turn_ms=times[_TURN if self.layers else _FRONT],  # without layers nothing else is seen
            end_ms=end_ms,
        )

    def iteration_ms(self) -> float:
        """The whole iteration, with everything that it waited for. Waits for the device."""
        return self.lanes.elapsed_ms(self._began, self._sections[_STEP].stop)

    def _ms(self, seen: _Seen) -> float:
        """How long a section lasted, without what it waited for lanes."""
        elapsed = self.lanes.elapsed_ms
        length = elapsed(seen.start, seen.stop)
        times = [(elapsed(seen.start, wait.start), elapsed(seen.start, wait.stop)) for wait in self._waits]
        waited = covered_ms((max(0.0, a), min(length, b)) for a, b in times if a < length and b > 0.0)
        return max(0.0, length - waited)

    def _by_kind(
        self, kinds: Sequence[object], chosen: Sequence[Choice]
    ) -> tuple[dict[object, int], dict[object, int]]:
        """What a layer of each kind saves if it is not recomputed, and if it is."""
        saved: dict[object, int] = {}
        inputs: dict[object, int] = {}
        for number, (kind, choice) in enumerate(zip(kinds, chosen, strict=True)):
            of = self._saved.get(number, _Layer())
            if choice is Choice.RECOMPUTE:
                inputs[kind] = max(inputs.get(kind, 0), of.saved_bytes)
            else:
                saved[kind] = max(saved.get(kind, 0), of.saved_bytes)
        return saved, inputs

    def _working(
        self, kinds: Sequence[object], chosen: Sequence[Choice], saved: dict[object, int], inputs: dict[object, int]
    ) -> tuple[dict[object, int], dict[object, int]]:
        """What a backward of each kind of layer takes beyond what is counted elsewhere; a forward may take more.

        And what it takes besides, if the layer is recomputed. The most over all layers of the kind. One that offloads
        shows nothing if backward remakes some of its tensors, which are then not there at once; those that were
        recomputed take at least as much as others.
        """
        working: dict[object, int] = {}
        again: dict[object, int] = {}
        remade = {
            kind
            for number, (kind, choice) in enumerate(zip(kinds, chosen, strict=True))
            if choice is Choice.OFFLOAD and self._saved.get(number, _Layer()).remade_bytes
        }
        for number, (kind, choice) in enumerate(zip(kinds, chosen, strict=True)):
            is_again, comes = choice is Choice.RECOMPUTE, 0
            if is_again:  # but its inputs, which are saved, too, and were there when the section began
                comes = max(0, saved.get(kind, 0) - inputs.get(kind, 0))
            elif choice is Choice.OFFLOAD:  # some of it was there already when the section began
                seen = self._sections.get(Section("backward", number))
                comes = max(0, saved.get(kind, 0) - (seen.saved_bytes if seen is not None else 0))
            in_forward = self._beyond(Section("forward", number)) - saved.get(kind, 0)
            in_backward = self._beyond(Section("backward", number)) - comes
            found = again if is_again else working
            found[kind] = max(found.get(kind, 0), in_forward, in_backward)
        for kind in remade & again.keys():
            working[kind] = again[kind]
        working = {**again, **working}
        return working, {kind: max(0, most - working[kind]) for kind, most in again.items()}

    def _beyond(self, section: Section) -> int:
        """The most that a section had on the device, beyond what was known when it began."""
        seen = self._sections.get(section)
        return max(0, seen.most_bytes - seen.known_bytes) if seen is not None and seen.most_bytes else 0


def _least(layer: LayerLoad, first: float, alone: float | None, with_again: float | None) -> LayerLoad:
    """The times of a layer, with new ones that are shorter: of its forward, of a backward of its kind where all is
    kept, and of its own with a second forward, where there was one."""
    forward = min(layer.forward_ms, first)
    backward, again = layer.backward_ms, min(layer.recompute_ms, forward)
    together = min(backward + layer.recompute_ms, with_again) if with_again is not None else None
    if alone is not None:
        backward = min(backward, alone)
        if together is not None:
            again = min(forward, max(_LEAST_AGAIN * forward, together - backward))
    elif together is not None:
        backward = max(0.0, together - again)
    return dataclasses.replace(layer, forward_ms=forward, backward_ms=backward, again_ms=again)


def _without_end(lasted: Sequence[float], kinds: Sequence[object], chosen: Sequence[Choice]) -> tuple[float, float]:
    """What follows the first layer's backward is in its section: another one that does the same shows how much."""
    alike = [
        ms
        for ms, kind, choice in zip(lasted[1:], kinds[1:], chosen[1:], strict=True)
        if (kind, choice) == (kinds[0], chosen[0])
    ]
    first = min(lasted[0], sorted(alike)[len(alike) // 2]) if alike else lasted[0]
    return lasted[0] - first, first


def _without_host(
    forward: Sequence[float],
    starved: Sequence[bool],
    lasted: Sequence[float],
    kinds: Sequence[object],
    chosen: Sequence[Choice],
) -> list[float]:
    """A forward in which the device waited for the host has taken longer than the device needs for it.

    A backward computes twice as much as its forward, and a layer that is recomputed has both in its backward's section,
    for which the host seldom is too late: a third of that is taken to be the forward.
    """
    alike: dict[object, float] = {}
    for ms, kind, choice in zip(lasted, kinds, chosen, strict=True):
        if choice is Choice.RECOMPUTE and ms:
            alike[kind] = min(ms, alike.get(kind, ms))
    return [
        min(ms, alike[kind] / _RECOMPUTED_OVER_FORWARD) if was_starved and kind in alike else ms
        for ms, was_starved, kind in zip(forward, starved, kinds, strict=True)
    ]


def _divide(
    lasted: Sequence[float], forward: Sequence[float], kinds: Sequence[object], chosen: Sequence[Choice]
) -> tuple[list[float], list[float]]:
    """Of each layer: its backward alone, and the second forward if it is recomputed.

    A layer of the same kind that is not recomputed shows the backward alone, unless that took longer than it can have:
    a layer that offloads for the first time allocates memory on the host, and tries what can be remade.
    """
    alone: dict[object, float] = {}
    for ms, kind, choice in zip(lasted, kinds, chosen, strict=True):
        if choice is not Choice.RECOMPUTE:
            alone[kind] = min(ms, alone.get(kind, ms))
    backward, again = [], []
    by_kind: dict[object, float] = {}
    for ms, first, kind, choice in zip(lasted, forward, kinds, chosen, strict=True):
        if choice is not Choice.RECOMPUTE:
            backward.append(ms)
            again.append(first)
            continue
        own = alone.get(kind, ms)
        if ms - own < _LEAST_AGAIN * first:
            own = max(0.0, ms - first)
        backward.append(own)
        again.append(ms - own)
        by_kind[kind] = ms - own
    # Of one that was not recomputed, no more than of those of its kind that were.
    slowest: dict[object, float] = {}
    for ms, kind, choice in zip(backward, kinds, chosen, strict=True):
        if choice is Choice.RECOMPUTE:
            slowest[kind] = max(ms, slowest.get(kind, ms))
    backward = [min(ms, slowest.get(kind, ms)) for ms, kind in zip(backward, kinds, strict=True)]
    return backward, [by_kind.get(kind, ms) for ms, kind in zip(again, kinds, strict=True)]
