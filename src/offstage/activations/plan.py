# SPDX-License-Identifier: Apache-2.0
"""What becomes of each layer's activations: kept, remade, offloaded, or recomputed. Pure arithmetic.

`choose` finds the mix that fits a peak at the least cost. Keeping costs memory, recomputing costs a forward, offloading
costs nothing as long as the link carries it while the device computes; remaking what one kernel makes costs little and
saves little. So layers keep without remaking as long as that fits, the link is used for what it can carry under forward
and backward, and the rest is recomputed; more is offloaded only where even that does not fit.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offstage.config import format_size
from offstage.errors import ConfigError


class Choice(enum.Enum):
    """What a layer does with the tensors that its backward needs."""

    KEEP = "keep"
    REMAKE = "remake"  # keeps what one kernel cannot remake
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"  # its inputs leave


@dataclass(frozen=True)
class LayerFacts:
    """One layer, as measured in an iteration."""

    forward_ms: float
    saved_bytes: int
    """What it saves for backward."""
    input_bytes: int
    """What it saves if it is recomputed."""
    before_backward_bytes: int
    """What the device held, at most, while this layer's backward ran, without any layer's saved tensors."""
    can_recompute: bool = True
    remade_bytes: int = 0
    """Of `saved_bytes`, what one kernel each remakes from the rest: it neither moves nor stays."""
    remade_ms: float = 0.0
    """How long that takes."""

    @property
    def rest_bytes(self) -> int:
        """What moves if it is offloaded, and stays if it is remade."""
        return self.saved_bytes - self.remade_bytes

    def kept_bytes(self, choice: Choice) -> int:
        """What is on the device all the time."""
        return {Choice.KEEP: self.saved_bytes, Choice.REMAKE: self.rest_bytes}.get(choice, 0)


@dataclass(frozen=True)
class ActivationPlan:
    """What each layer does, and what that was predicted to take."""

    choices: tuple[Choice, ...]
    peak_bytes: int
    added_ms: float
    """Over keeping everything."""
    moved_bytes: int
    """Each way."""
    reason: str

    def count(self, choice: Choice) -> int:
        return self.choices.count(choice)

    def __str__(self) -> str:
        kept = self.count(Choice.KEEP)
        remade = f"{self.count(Choice.REMAKE)} remake, " if self.count(Choice.REMAKE) else ""
        return (
            f"{kept} {'layer keeps' if kept == 1 else 'layers keep'}, {remade}{self.count(Choice.OFFLOAD)} offload, "
            f"{self.count(Choice.RECOMPUTE)} recompute: predicted peak {format_size(self.peak_bytes)}, "
            f"{self.added_ms:.1f} ms added per iteration. {self.reason}"
        )


def choose(
    layers: Sequence[LayerFacts], *, device_peak: int, link_gb_per_s: float, keep_last: int, in_flight: int = 1
) -> ActivationPlan:
    """The fastest mix whose predicted peak is at most `device_peak`; raises, with numbers, when none is.

    `in_flight`: forwards that wait for their backward at once (micro-batches of a pipeline).
    """
    best: ActivationPlan | None = None
    least: ActivationPlan | None = None
    for choices in _mixes(layers, keep_last):
        plan = _predict(layers, choices, link_gb_per_s, in_flight)
        if least is None or plan.peak_bytes < least.peak_bytes:
            least = plan
        fits = plan.peak_bytes <= device_peak
        if fits and (best is None or (plan.added_ms, plan.moved_bytes) < (best.added_ms, best.moved_bytes)):
            best = plan
    assert least is not None
    if best is None:
        raise ConfigError(
            f"device_peak={format_size(device_peak)} is not enough: with {least.count(Choice.RECOMPUTE)} of "
            f"{len(layers)} layers recomputed and {least.count(Choice.OFFLOAD)} offloaded the predicted peak is still "
            f"{format_size(least.peak_bytes, up=True)}. Raise device_peak to that, use a smaller batch or sequence, or "
            "offload the optimizer's state."
        )
    return best


def _mixes(layers: Sequence[LayerFacts], keep_last: int) -> Iterator[tuple[Choice, ...]]:
    """All numbers of offloaded and recomputed layers, spread over the model; the others keep or remake.

    The last `keep_last` keep.
    """
    num_layers = len(layers)
    free = max(0, num_layers - keep_last)
    rests = [[Choice.KEEP] * num_layers]
    if any(layer.remade_bytes for layer in layers[:free]):
        rests.append(
            [Choice.REMAKE if layer.remade_bytes else Choice.KEEP for layer in layers[:free]] + rests[0][free:]
        )
    for offloaded in range(free + 1):
        away = spread(offloaded, free)
        others = [number for number in range(free) if number not in away and layers[number].can_recompute]
        for recomputed in range(len(others) + 1):
            # The first ones: what is kept is then given back early in backward, when the gradients are still to come.
            again = others[:recomputed]
            moved = {**dict.fromkeys(again, Choice.RECOMPUTE), **dict.fromkeys(away, Choice.OFFLOAD)}
            for rest in rests:
                yield tuple(moved.get(number, one) for number, one in enumerate(rest))


def spread(count: int, total: int) -> frozenset[int]:
    """`count` numbers below `total`, evenly: the link is busy all through forward, and not more."""
    return frozenset(number * total // count for number in range(count)) if count else frozenset()


def _predict(
    layers: Sequence[LayerFacts], choices: Sequence[Choice], link_gb_per_s: float, in_flight: int
) -> ActivationPlan:
    forward_ms = sum(layer.forward_ms for layer in layers)
    recomputed_ms = sum(layer.forward_ms for layer, choice in _of(layers, choices, Choice.RECOMPUTE))
    remade_ms = sum(layer.remade_ms for layer, choice in _of(layers, choices, Choice.OFFLOAD, Choice.REMAKE))
    moved = sum(layer.rest_bytes for layer, choice in _of(layers, choices, Choice.OFFLOAD))
    moved += sum(layer.input_bytes for layer, choice in _of(layers, choices, Choice.RECOMPUTE))
    copy_ms = moved / link_gb_per_s / 1e6
    backward_ms = 2 * forward_ms + recomputed_ms + remade_ms
    added_ms = recomputed_ms + remade_ms + max(0.0, copy_ms - forward_ms) + max(0.0, copy_ms - backward_ms)
    peak = _peak(layers, choices, in_flight)
    hidden = "all copies hidden" if copy_ms <= forward_ms else f"{copy_ms - forward_ms:.0f} ms of copies not hidden"
    return ActivationPlan(
        tuple(choices),
        peak,
        added_ms,
        moved,
        f"{moved / 1e9:.1f} GB each way at {link_gb_per_s:.0f} GB/s, {hidden}; "
        f"{recomputed_ms + remade_ms:.0f} ms computed again",
    )


def _of(
    layers: Sequence[LayerFacts], choices: Sequence[Choice], *wanted: Choice
) -> Iterator[tuple[LayerFacts, Choice]]:
    return ((layer, choice) for layer, choice in zip(layers, choices, strict=True) if choice in wanted)


def _peak(layers: Sequence[LayerFacts], choices: Sequence[Choice], in_flight: int) -> int:
    """The largest of what the device holds in each layer's backward."""
    away = max((layer.rest_bytes for layer, _ in _of(layers, choices, Choice.OFFLOAD)), default=0)
    inputs = max((layer.input_bytes for layer, _ in _of(layers, choices, Choice.RECOMPUTE)), default=0)
    # Other micro-batches in flight hold all that they keep.
    others = (in_flight - 1) * sum(layer.kept_bytes(choice) for layer, choice in zip(layers, choices, strict=True))
    kept = peak = 0
    for layer, choice in zip(layers, choices, strict=True):
        kept += layer.kept_bytes(choice)
        own = layer.saved_bytes - layer.kept_bytes(choice)
        # One layer's tensors are on their way back while those of another are in use.
        peak = max(peak, layer.before_backward_bytes + others + kept + own + max(away, inputs))
    return peak
