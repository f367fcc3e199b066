# SPDX-License-Identifier: Apache-2.0
"""How long an iteration takes under a `Setting`: the caller, the link's two ways and the CPU, followed layer by layer.

The clocks say until when each is busy. A copy begins when it is asked for and the link has carried what was asked for
before; the caller waits for what its next layer needs, as the engine makes it wait. Three iterations are followed,
because what one leaves to the next forward delays that one; the last counts. Pure arithmetic: the same input gives the
same time. docs/internals/fit.md has the table of who waits for what.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from offstage.planning.choices import Choice
from offstage.planning.host_weights import LAYERS_BEHIND, left_to_forward
from offstage.planning.job import Job, Setting
from offstage.planning.predict import GRADIENTS_IN_FLIGHT, OLD_WEIGHTS_ON_HOST

_ITERATIONS = 3
_KEPT = 2
"""Layers whose weights wait on the device between forward and backward."""
_LAYERS_LIKE_THE_NEXT = 2
"""Layers that show how much room the next one leaves for gradients (`LeavingGradients`)."""


def iteration_ms(job: Job, setting: Setting) -> float:
    """The time of one iteration in a steady loop."""
    followed = _Followed(job, setting)
    start = 0.0
    for _ in range(_ITERATIONS):
        start = followed.caller
        followed.iterate()
    # What the device computes, updates too, and what host memory carries in all is a bound that no overlap lowers.
    return job.slowdown_of(setting) * max(followed.caller - start, followed.device_ms, followed.host_ms)


class _Followed:
    """The clocks of one job under one setting, in milliseconds."""

    def __init__(self, job: Job, setting: Setting) -> None:
        loop, rates, layers = job.loop, job.rates, job.loop.layers
        self.job, self.setting, self.loop = job, setting, loop
        self.num = len(layers)
        self.caller = self.cpu = 0.0
        self.up = self.down = 0.0
        """Until when the link is busy, with state too."""
        self.up_first = self.down_first = 0.0
        """Until when it is busy with what goes first: activations and weights, for which the caller waits."""
        self.rate, self.cpu_rate, self.device_rate = rates.duplex, rates.cpu, rates.device
        self.clips, self.in_backward = loop.clips, setting.update_in_backward
        self.speculates = self.clips and self.in_backward
        self.forward_ms = [layer.forward_ms for layer in layers]
        chosen = list(zip(layers, setting.choices, strict=True))
        again = [layer.recompute_ms if choice is Choice.RECOMPUTE else 0.0 for layer, choice in chosen]
        self.backward_ms, self.again_ms = [layer.backward_ms for layer in layers], again
        self.shares = [_shares(part.sizes) if self.setting.update_in_backward else (1.0,) for part in job.parts]
        """Of each part, what its parameters have of its state, in the order of their gradients."""
        self.compute_ms = loop.compute_ms + loop.micro_batches * sum(again)
        self.away = [layer.moved_bytes(choice) for layer, choice in chosen]
        self.hosted = [number >= self.num - setting.hosted for number in range(self.num)]
        self._divide()
        self.ready = [0.0] * (self.num + 2)
        """When each part's weights are updated."""
        self.here: dict[int, float] = {}
        """When each layer's weights arrive that are on the device or on their way."""
        self.postponed: set[int] = set()
        """Layers whose update waits for their next forward."""
        self.late = self._left_to_forward()
        """Layers whose update always does, though others are updated in backward."""
        self.stays = self._gradients_that_stay() if self.speculates else set()
        """Layers on the host whose gradients stay where activations were while clipping may need them."""
        self.collected = self.collected_extra = 0.0
        """State whose update in backward is due and has not begun, and what leaves with it."""

    def _divide(self) -> None:
        """What of each part streams, and what the CPU updates."""
        parts, share = self.job.parts, self.setting.host_share
        kept = self.job.resident_bytes(self.setting.resident)
        leaves = [
            (part.state - stays) / part.state if part.state else 0.0 for part, stays in zip(parts, kept, strict=True)
        ]
        self.streamed = [
            part.state * part_leaves * (1.0 - share) for part, part_leaves in zip(parts, leaves, strict=True)
        ]
        self.weights = [float(part.movable) for part in parts]
        self.gradients = [float(part.trained) for part in parts]
        self.cpu_params = [part.params * part_leaves * share for part, part_leaves in zip(parts, leaves, strict=True)]
        self.cpu_weights = [part.trained * part_leaves * share for part, part_leaves in zip(parts, leaves, strict=True)]
        traffic = [2.0 * part.state + 3.0 * part.trained for part in parts]
        on_device = [1.0 - part_leaves * share for part_leaves in leaves]
        self.update_ms = [bytes_ * at / self.device_rate for bytes_, at in zip(traffic, on_device, strict=True)]
        resident = [
            bytes_ * (1.0 - part_leaves) / self.device_rate for bytes_, part_leaves in zip(traffic, leaves, strict=True)
        ]
        self.resident_ms = sum(resident)
        self.device_ms = self.compute_ms + sum(self.update_ms)
        self.most_in_flight = GRADIENTS_IN_FLIGHT * sum(self.gradients)
        streamed = sum(self.streamed)
        slot = self.job.slot_bytes(self.setting, streamed)
        self.chunk_bytes, self.chunk_ms = float(slot), slot / self.rate
        self.slack_ms = self.job.config.num_slots * self.chunk_ms
        """How far fetches of state may be ahead of its stores."""
        dram = (
            2.0 * streamed
            + sum(self.cpu_weights) * 3
            + sum(bytes_ * part_leaves * share for bytes_, part_leaves in zip(traffic, leaves, strict=True))
        )
        self.host_ms = dram / self.job.rates.dram if share else 0.0
        """What host memory carries for the updates."""
        self.left = self._left_to_step()
        """State of each part that streams and whose update in backward there is no time for."""

    def _left_to_step(self) -> list[float]:
        found = [0.0] * len(self.streamed)
        if not (self.in_backward and self.setting.overlap_forward):
            return found
        backward_ms = sum(self.backward_ms) + sum(self.again_ms) + self.loop.end_ms
        stays = [not (0 < part <= self.num and self.hosted[part - 1]) for part in range(len(found))]
        room = sum(size for size, one in zip(self.streamed, stays, strict=True) if one) - self.rate * backward_ms
        for part, one in enumerate(stays):
            if one and room > 0.0:
                found[part] = min(room, self.streamed[part])
                room -= found[part]
        return found

    def _left_to_forward(self) -> set[int]:
        hosted = [number for number, one in enumerate(self.hosted) if one]
        if self.speculates or not (self.in_backward and self.setting.overlap_forward):
            return set()
        return {hosted[number] for number in left_to_forward(len(hosted))}

    def _gradients_that_stay(self) -> set[int]:
        """What is there in a layer's backward must leave room for them, beside what was there at the turn."""
        chosen = list(zip(self.loop.layers, self.setting.choices, strict=True))
        before = list(itertools.accumulate((layer.kept_bytes(choice) for layer, choice in chosen), initial=0))
        found: set[int] = set()
        held, staying = deque[int](), 0.0
        for number in reversed(range(self.num)):
            if not self.hosted[number]:
                continue
            layer, choice = chosen[number]
            held.append(before[number + 1] + layer.saved_bytes - layer.kept_bytes(choice))
            if len(held) <= _LAYERS_LIKE_THE_NEXT:
                continue
            held.popleft()
            if max(held) + staying + self.gradients[1 + number] <= before[-1]:
                found.add(number)
                staying += self.gradients[1 + number]
        return found

    # The link and the CPU #

    def _send(self, nbytes: float, at: float) -> float:
        """Down the link, ahead of state that waits for it. Returns when it has arrived."""
        if not nbytes:
            return at
        begun, took = max(self.down_first, at), nbytes / self.rate
        self.down_first = begun + took
        self.down = self.down + took if self.down > begun else self.down_first
        return self.down_first

    def _bring(self, nbytes: float, at: float) -> float:
        """Up the link, ahead of state that waits for it."""
        if not nbytes:
            return at
        begun, took = max(self.up_first, at), nbytes / self.rate
        self.up_first = begun + took
        self.up = self.up + took if self.up > begun else self.up_first
        return self.up_first

    def _update(
        self,
        part: int,
        nbytes: float,
        at: float,
        *,
        extra_up: float = 0.0,
        extra_down: float = 0.0,
    ) -> float:
        """A part's state comes, is updated and leaves. Returns when its weights are new."""
        if not nbytes and not extra_up:
            return at
        # Chunk by chunk: a chunk leaves when it is updated, and the next one comes when a slot is free again.
        begun = max(self.up, at, self.down - self.slack_ms)
        fetched = begun + (nbytes + extra_up) / self.rate
        stored = max(self.down, begun + self.chunk_ms) + (nbytes + extra_down) / self.rate
        self.down = max(stored, fetched + self.chunk_ms)
        self.up = max(fetched, self.down - self.slack_ms)
        return self.up + min(self.update_ms[part], self.chunk_ms)

    def _update_on_host(self, part: int, at: float, share: float = 1.0) -> float:
        """`share` of a part's gradients goes down, the CPU updates, weights come up. Returns when they are there."""
        if not self.cpu_params[part]:
            return at
        arrived = self._send(share * self.cpu_weights[part], at)
        self.cpu = max(self.cpu, arrived) + share * self.cpu_params[part] / self.cpu_rate
        return self._bring(share * self.cpu_weights[part], self.cpu)

    # One iteration #

    def iterate(self) -> None:
        for number in range(self.loop.micro_batches):
            self._forward(is_first=number == 0)
            self.caller += self.loop.turn_ms
            self._backward(number)
        self._step()

    def _forward(self, *, is_first: bool) -> None:
        begun = self.caller
        if is_first:
            self.caller = max(self.caller, self.ready[0])
        self.caller += self.loop.front_ms
        if any(self.hosted):
            self._fetch(self.hosted.index(True), begun)
            self._fetch_late(-1, begun)
        leaving: deque[float] = deque()
        for number in range(self.num):
            entered = self.caller
            if self.hosted[number]:
                self._fetch(number, entered)
                self._fetch(number + 1, entered)
                self._fetch_late(number, entered)
                self.caller = max(self.caller, self.here[number])
                self._drop(number - 2)
            if is_first:
                self.caller = max(self.caller, self.ready[1 + number])
            self.caller += self.forward_ms[number]
            if self.away[number]:
                leaving.append(self._send(self.away[number], self.caller))
                if len(leaving) > 1:  # the memory of those before is wanted back
                    self.caller = max(self.caller, leaving.popleft())
        if is_first:
            self.caller = max(self.caller, self.ready[-1])
        if leaving and all(self.away[:-1]):  # the head needs the memory
            self.caller = max(self.caller, leaving.pop())

    def _fetch(self, number: int, at: float) -> None:
        """A layer's weights come, and in forward what its update needs, if that was left to it."""
        if not (0 <= number < self.num) or not self.hosted[number] or number in self.here:
            return
        part = 1 + number
        if number in self.postponed:
            self.postponed.discard(number)
            up, down = self.weights[part] + self.gradients[part], self.weights[part]
            self.here[number] = self._update(part, self.streamed[part], at, extra_up=up, extra_down=down)
        else:
            self.here[number] = self._bring(self.weights[part], at)

    def _fetch_late(self, number: int, at: float) -> None:
        """The next layer after `number` whose update was left to this forward."""
        self._fetch(min((one for one in self.postponed if one > number), default=-1), at)

    def _drop(self, number: int) -> None:
        self.here.pop(number, None)

    def _backward(self, micro_batch: int) -> None:
        is_last = micro_batch == self.loop.micro_batches - 1
        for number in list(self.here):
            if number < self.num - _KEPT:
                self._drop(number)
        updated: dict[int, float] = {}
        in_flight: deque[tuple[float, float]] = deque()
        waiting = 0.0
        back: dict[int, float] = {}
        if is_last:
            self.ready[-1] = self._gradient_ready(self.num + 1)
        for number in reversed(range(self.num)):
            reached = self.caller
            if self.hosted[number]:
                self._fetch(number, reached)
                self._fetch(number - 1, reached)
                if micro_batch:  # sums of earlier micro-batches come back
                    self.caller = max(self.caller, self._bring(self.gradients[1 + number], reached))
                self.caller = max(self.caller, self.here[number], updated.get(number + 1 + LAYERS_BEHIND, 0.0))
                self._drop(number + 1 + LAYERS_BEHIND)
            for wanted in self._next_away(number):
                if wanted not in back:
                    back[wanted] = self._bring(self.away[wanted], reached)
            self.caller = max(self.caller, back.get(number, 0.0)) + self.again_ms[number]
            if not is_last:
                self.caller += self.backward_ms[number]
                self._send(self.gradients[1 + number] if self.hosted[number] else 0.0, self.caller)
                continue
            for share in self.shares[1 + number]:  # its parameters get their gradients one after the other
                self.caller += share * self.backward_ms[number]
                done = self._gradient_ready(1 + number, share)
                updated[number] = self.ready[1 + number] = max(updated.get(number, 0.0), done)
                if self.in_backward and not self.speculates:
                    if in_flight:  # the one before shares a chunk with this one, which comes last
                        in_flight.append((in_flight.pop()[0], done))
                    size = share * self.gradients[1 + number]
                    in_flight.append((size, done))
                    waiting += size
                    while waiting > self.most_in_flight and in_flight:
                        oldest, done = in_flight.popleft()
                        waiting -= oldest
                        self.caller = max(self.caller, done)
        self.caller += self.loop.end_ms
        if is_last:
            self.ready[0] = self._gradient_ready(0)

    def _next_away(self, number: int) -> list[int]:
        """The layer itself and the one before it whose tensors left."""
        if not self.away[number]:
            return []
        before = next((one for one in range(number - 1, -1, -1) if self.away[one]), None)
        return [number] if before is None else [number, before]

    def _gradient_ready(self, part: int, share: float = 1.0) -> float:
        """`share` of a part's gradients is final. Returns when its weights are new; 0 if that is left to `step()`."""
        is_hosted = 0 < part <= self.num and self.hosted[part - 1]
        gradients = share * self.gradients[part]
        if not self.in_backward or part - 1 in self.late:
            if is_hosted:
                self._send(gradients, self.caller)
            return 0.0
        extra = share * self.weights[part] if is_hosted else 0.0
        if self.speculates:
            extra += (part - 1 not in self.stays if is_hosted else OLD_WEIGHTS_ON_HOST) * gradients
        streamed = share * (self.streamed[part] - self.left[part])
        self.collected += streamed
        self.collected_extra += extra if streamed else 0.0
        if not is_hosted and part and self.collected < self.chunk_bytes:
            return 0.0  # an update begins when there is a chunk's worth
        done = self._update(part, self.collected, self.caller, extra_down=self.collected_extra)
        self.collected = self.collected_extra = 0.0
        return done if self.speculates else max(done, self._update_on_host(part, self.caller, share))

    def _step(self) -> None:
        begun = self.caller
        if not self.in_backward or self.speculates:
            self.caller += self.resident_ms
        for part in range(self.num + 2):
            is_hosted = 0 < part <= self.num and self.hosted[part - 1]
            if self.in_backward and part - 1 not in self.late:
                self.ready[part] = max(self.ready[part], self._update(part, self.left[part], begun))
                if self.speculates:
                    self.ready[part] = max(self.ready[part], self._update_on_host(part, begun))
            elif is_hosted and self.setting.overlap_forward:
                self.postponed.add(part - 1)
                self.ready[part] = 0.0
            else:
                up = self.weights[part] + self.gradients[part] if is_hosted else 0.0
                done = self._update(
                    part, self.streamed[part], begun, extra_up=up, extra_down=self.weights[part] if is_hosted else 0.0
                )
                self.ready[part] = max(done, self._update_on_host(part, begun))
        if not self.setting.overlap_forward:
            self.caller = max(self.caller, *self.ready)
            if any(self.hosted):  # other code may read and write the host's weights before the next forward
                self.caller = max(self.caller, self.down)
            self.here.clear()
        else:
            for number in list(self.here):
                if number > 1 or number in self.postponed:
                    self._drop(number)


def _shares(sizes: Sequence[int]) -> tuple[float, ...]:
    total = sum(sizes)
    return tuple(size / total for size in reversed(sizes)) if total else (1.0,)
