# SPDX-License-Identifier: Apache-2.0
"""`estimated_loop`: a `Loop` that nobody has measured, from the shapes of a model's matrices. Pure arithmetic.

A matrix product is taken to save its input and its output, in the format of the weights: 32 bytes per token and feature
for a block of GPT-2 in bf16, against the 34 that are commonly counted. What norms, gates and rotations save besides is
`SAVED_BESIDE`, which was fitted to the blocks of `offstage train`. A product takes two operations per element and
token, twice as many in backward; attention is causal and does not save its scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offstage.errors import ConfigError
from offstage.planning.loop import LayerLoad, Loop
from offstage.planning.sizes import EXPERTS

SAVED_BESIDE = 1.3
"""What a layer saves, over the inputs and outputs of its matrix products."""
_LOGIT_BYTES = 8
"""Of a logit in fp32 and its gradient, beside the logit in the format of the weights."""
_NUMBER = re.compile(r"(?:^|\.)experts\.(\d+)\.")
EXPERTS_PER_TOKEN = 2
"""Where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one step trains on, and how."""

    sequences: int
    """Of one micro-batch."""
    sequence: int
    """Tokens of each."""
    micro_batches: int = 1
    clips: bool = True
    experts_per_token: int = EXPERTS_PER_TOKEN

    def __post_init__(self) -> None:
        for name in ("sequences", "sequence", "micro_batches", "experts_per_token"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Batch expects at least 1 for {name}; found {getattr(self, name)}. Leave it out.")

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.sequences * self.sequence


@dataclass
class _Products:
    """The matrix products of one layer, or of what is in none, per token."""

    features: float = 0.0
    """Of all inputs and outputs."""
    elements: float = 0.0
    """Of the matrices that a token is multiplied with."""
    widest: int = 0

    def add(self, rows: int, columns: int, share: float) -> None:
        self.features += share * (rows + columns)
        self.elements += share * rows * columns
        self.widest = max(self.widest, rows + columns)


Shapes = Mapping[str, Sequence[int]]


def estimated_loop(
    shapes: Shapes,
    layer_of: Mapping[str, int],
    batch: Batch,
    *,
    itemsize: int,
    tflops: float | None = None,
    times_ms: tuple[float, float] | None = None,
    most_turn_bytes: int | None = None,
) -> Loop:
    """The loop of a decoder with these parameters.

    `layer_of`: the layer of each parameter that is in one. `itemsize`: of weights and activations. Times are those of
    `tflops`, the rate that the device reaches, or parts of `times_ms`, a measured forward and backward of one
    micro-batch. `most_turn_bytes`: where the loss is computed in slices.
    """
    if (tflops is None) == (times_ms is None):
        raise ConfigError("estimated_loop expects either tflops or times_ms; found both or neither. Give one of them.")
    num_layers = 1 + max(layer_of.values(), default=-1)
    if not num_layers:
        raise ConfigError(
            "An estimate expects a model with layers, whose parameters have names such as 'layers.0.weight'; found "
            f"{len(shapes)} parameters without numbers. Measure instead: offstage.fit() in the loop itself."
        )
    layers = [_products(shapes, layer_of, number, batch) for number in range(num_layers)]
    head, width = _head(shapes, layer_of)
    attention = 2.0 * batch.sequence * width  # both products of a token with, on average, half of the sequence
    forward_ops = [batch.tokens * 2.0 * (one.elements + attention) for one in layers]
    head_ops = batch.tokens * 2.0 * head * width
    if times_ms is None:
        assert tflops is not None
        ms_per_op = (1.0 / (tflops * 1e9), 2.0 / (tflops * 1e9))
    else:
        everything = sum(forward_ops) + head_ops
        ms_per_op = (times_ms[0] / everything, times_ms[1] / everything)
    turn_bytes = batch.tokens * head * (itemsize + _LOGIT_BYTES)
    return Loop(
        layers=tuple(
            LayerLoad(
                forward_ms=ops * ms_per_op[0],
                backward_ms=ops * ms_per_op[1],
                saved_bytes=int(SAVED_BESIDE * itemsize * batch.tokens * one.features),
                input_bytes=itemsize * batch.tokens * width,
                working_bytes=2 * itemsize * batch.tokens * one.widest,
            )
            for one, ops in zip(layers, forward_ops, strict=True)
        ),
        turn_ms=head_ops * sum(ms_per_op),
        turn_bytes=turn_bytes if most_turn_bytes is None else min(turn_bytes, most_turn_bytes),
        micro_batches=batch.micro_batches,
        clips=batch.clips,
        input_elements=batch.tokens,
    )


def _products(shapes: Shapes, layer_of: Mapping[str, int], number: int, batch: Batch) -> _Products:
    """Of a token in layer `number`. It visits some of the experts."""
    mine = {name: shape for name, shape in shapes.items() if layer_of.get(name) == number}
    numbers = {match[1] for name in mine if (match := _NUMBER.search(name))}
    found = _Products()
    for name, shape in mine.items():
        if len(shape) == 3:  # all experts in one parameter
            found.add(shape[1], shape[2], min(batch.experts_per_token, shape[0]))
        elif len(shape) == 2:
            is_expert = re.search(EXPERTS, name) is not None and bool(numbers)
            share = min(1.0, batch.experts_per_token / len(numbers)) if is_expert else 1.0
            found.add(shape[0], shape[1], share)
    return found


def _head(shapes: Shapes, layer_of: Mapping[str, int]) -> tuple[int, int]:
    """The vocabulary and the width: the sides of the largest matrix that is in no layer."""
    outside = [shape for name, shape in shapes.items() if name not in layer_of and len(shape) == 2]
    if outside:
        largest = max(outside, key=lambda shape: shape[0] * shape[1])
        return max(largest), min(largest)
    inside = [shape for name, shape in shapes.items() if name in layer_of and len(shape) == 2]
    return 0, min((min(shape) for shape in inside), default=1)
