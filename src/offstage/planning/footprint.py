# SPDX-License-Identifier: Apache-2.0
"""What a job takes under a `Setting`: the device's peak and the host's bytes. Pure arithmetic.

The peak is the largest of three kinds of moments: the turn, when all layers have saved what they keep; the backward of
each layer, when the layers behind it have given theirs back and gradients have taken its place; and `step()`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from offstage.config import OffloadConfig
from offstage.planning.choices import Choice
from offstage.planning.host_weights import LAYERS_BEHIND, LAYERS_WITH_GRADIENTS, left_to_forward
from offstage.planning.job import Job, Part, Setting
from offstage.planning.plan import HOST_SLOTS
from offstage.planning.predict import COLLECTED, GRADIENTS_IN_FLIGHT, HOST_CHUNK, LEFT_TO_STEP, OLD_WEIGHTS_ON_HOST

_IN_STEP = 3
"""Layers whose weights live on the host and are there at once while `step()` makes their updates."""
_LEAVING = 2
"""Gradients of earlier layers that are still on their way to the host. Of those that may be the others are its own."""


@dataclass(frozen=True)
class Footprint:
    """Bytes."""

    device: int
    """At the peak."""
    host: int
    state: int
    """On the device: what is resident, and slots."""


def footprint(job: Job, setting: Setting) -> Footprint:
    """What `job` takes under `setting`."""
    return Footprints(job, setting).at(setting.resident)


class Footprints:
    """The sums of one job under settings that differ at most in how much state stays on the device."""

    def __init__(self, job: Job, setting: Setting) -> None:
        self.job, self.setting, self.loop = job, setting, job.loop
        parts, layers = job.parts, job.parts[1:-1]
        split = len(layers) - setting.hosted
        self.stay, self.hosted = layers[:split], layers[split:]
        self.largest = max((part.movable for part in self.hosted), default=0)
        self.trained_before = list(itertools.accumulate((part.trained for part in parts), initial=0))
        self.hosted_weights = sum(part.movable for part in self.hosted)
        self.weights = sum(part.weights for part in parts) - self.hosted_weights
        self.there = [*parts[: 1 + split], *(Part() for _ in self.hosted), parts[-1]]
        self.hosted_trained = sum(part.trained for part in self.hosted)
        self.most_hosted_gradients = self._most_hosted_gradients()
        self.has_old_weights = setting.update_in_backward and self.loop.clips
        self._most: float | None = None

    def at(self, resident: int) -> Footprint:
        """With so many of the parameters whose state may leave keeping it on the device."""
        self._keep(resident)
        if self._most is None or self.has_old_weights:  # nothing else of it depends on what stays
            self._most = self.most_beside()
        base = self.loop.base_bytes + self.job.unseen_of(self.setting) + self.weights + self.state
        return Footprint(int(base + self._most), int(self.host()), int(self.state))

    def _keep(self, resident: int) -> None:
        job, setting = self.job, self.setting
        kept = job.resident_bytes(resident)
        self.kept = sum(kept)
        self.leaves = job.state - self.kept
        on_device = 1.0 - setting.host_share
        self.speculated = [
            part.trained * on_device * (1.0 - held / max(1, part.state))
            for part, held in zip(self.there, kept, strict=True)
        ]
        self.streamed = self.leaves * (1.0 - setting.host_share)
        slot = job.slot_bytes(setting, self.streamed)
        if self.hosted and (self._late() or not setting.update_in_backward):
            # Gradients come back through the slots; with clipping in backward, only those of a step that is made again.
            state = sum(part.state for part in self.hosted)
            slot += int(slot * self.hosted_trained / state) if state else 0
        self.state = self.kept + (job.config.num_slots * slot if self.streamed else 0)

    def _host_gradients(self) -> float:
        """Gradients of weights on the host that leave: all but those that are used at once."""
        setting = self.setting
        if not setting.update_in_backward or self.loop.clips or self.loop.micro_batches > 1:
            return float(self.hosted_trained)
        return float(sum(self.hosted[number].trained for number in self._late()))

    def _late(self) -> list[int]:
        """Of the layers on the host, those that the next forward updates, though others are updated in backward."""
        setting = self.setting
        if self.loop.clips or not (setting.update_in_backward and setting.overlap_forward):
            return []
        return left_to_forward(len(self.hosted))

    # The device #

    def most_beside(self) -> float:
        """The most beside weights that stay and state: activations, weights that travel, gradients, working memory."""
        layers, choices = self.loop.layers, self.setting.choices
        kept = [layer.kept_bytes(choice) for layer, choice in zip(layers, choices, strict=True)]
        moving = [layer.moved_bytes(choice) for layer, choice in zip(layers, choices, strict=True)]
        largest = max(moving, default=0)
        before = list(itertools.accumulate(kept, initial=0))
        # Copies that are on their way when the head runs still have their memory, if not all leave.
        late = largest if Choice.OFFLOAD in choices and not all(moving[:-1]) else 0
        most = before[-1] + late + self.loop.turn_bytes + self._travelling(len(layers)) + self._gradients(len(layers))
        sent = 0
        for number, (layer, choice) in enumerate(zip(layers, choices, strict=True)):
            coming = min(sent, largest)
            own = layer.saved_bytes - kept[number] + layer.working_bytes
            own += layer.remaking_bytes if choice is Choice.RECOMPUTE else 0
            held = before[number + 1] + own + coming + self._travelling(number)
            most = max(most, held + self._gradients(number))
            sent += moving[number]
        return max(most, self._gradients(0) + min(self.hosted_weights, _IN_STEP * self.largest))

    def _travelling(self, reached: int) -> int:
        """Weights that live on the host and are on the device when backward has come to layer `reached`, or the head.

        The next layer's are sent for meanwhile.
        """
        split, num = len(self.stay), len(self.stay) + len(self.hosted)
        reached = max(reached, split)  # they do not leave before others come
        there = range(max(split, min(reached, num - 1) - 1), min(num, reached + 1 + LAYERS_BEHIND))
        return sum(self.hosted[number - split].movable for number in there)

    def _gradients(self, reached: int) -> float:
        """Gradients on the device, and old weights, when backward has come to layer `reached`."""
        parts, num = self.job.parts, len(self.loop.layers)
        split = num - len(self.hosted)
        hosted = min(self.most_hosted_gradients, self._trained(1 + max(reached, split), num + 1))
        accumulates = self.loop.micro_batches > 1
        first = 0 if accumulates else 1 + reached
        there = self._trained(first, 1 + split) + parts[-1].trained
        there += parts[0].trained if reached == 0 and first else 0
        if not self.setting.update_in_backward or accumulates or self.loop.clips:
            old = self._old_weights(reached) if self.has_old_weights else 0.0
            return there + hosted + old
        collected = min(COLLECTED, self.job.config.most_chunk_bytes / max(1.0, self.job.state))
        left = LEFT_TO_STEP * (self.trained_before[-1] - self.hosted_trained) if self.setting.overlap_forward else 0.0
        most = left + (GRADIENTS_IN_FLIGHT + collected) * (self.trained_before[-1] - left)
        most += self.largest if reached >= split else 0  # the layer that backward is in
        return min(there + hosted, most)

    def _most_hosted_gradients(self) -> float:
        """Gradients of weights that live on the host: of the layer that backward is in, and those that wait."""
        most = LAYERS_WITH_GRADIENTS * self.largest
        if self.loop.micro_batches > 1:  # sums come back
            return most
        if not self.setting.update_in_backward:  # they leave
            return min(most, self.largest + _LEAVING * self.job.largest_gradient)
        if self.loop.clips:
            return most
        return min(most, self.largest + GRADIENTS_IN_FLIGHT * self.trained_before[-1])

    def _trained(self, first: int, stop: int) -> int:
        """Gradients of the parts from `first` on."""
        return self.trained_before[max(first, stop)] - self.trained_before[first]

    def _old_weights(self, reached: int) -> float:
        """What speculative updates keep of the weights that are on the device; the last ones of it go to the host."""
        found = sum(self.speculated[1 + reached :])
        stays = (1.0 - OLD_WEIGHTS_ON_HOST) * sum(self.speculated)
        leaving = 0.0 if self.setting.overlap_forward else max(self.speculated)  # otherwise the last ones begin later
        return found if found < stays else min(found, stays + leaving)

    # The host #

    def host(self) -> float:
        """State, weights, gradients, activations and the second set that clipping in backward needs."""
        setting, loop = self.setting, self.loop
        found = float(self.leaves + self.hosted_weights + self._activations())
        found += self._host_gradients()
        if setting.update_in_backward and loop.clips:
            weights = sum(part.trained for part in self.job.parts)
            old = OLD_WEIGHTS_ON_HOST * (weights - self.hosted_trained) * self.streamed / max(1, self.job.state)
            found += self.streamed + self.hosted_trained + old
        if setting.host_share:
            found += self._staging()
        return found

    def _activations(self) -> int:
        chosen = zip(self.loop.layers, self.setting.choices, strict=True)
        return sum(layer.moved_bytes(choice) for layer, choice in chosen)

    def _staging(self) -> float:
        """Buffers for weights and gradients of chunks that the CPU updates."""
        config: OffloadConfig = self.job.config
        weights = sum(part.trained for part in self.job.parts)
        chunk = min(HOST_CHUNK * config.most_chunk_bytes, self.leaves * self.setting.host_share)
        return HOST_SLOTS * chunk * 2 * weights / max(1, self.job.state)
