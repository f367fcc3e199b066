# SPDX-License-Identifier: Apache-2.0
"""What an optimizer class does, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offstage.rules.rule import StateKey


@dataclass(frozen=True)
class Scalar:
    """How a class keeps one number of a parameter: `kind` is `int`, `float` or `bool`, or the dtype of a tensor.

    Some keep `None` where an option needs no number.
    """

    kind: type | torch.dtype
    shape: tuple[int, ...] = ()
    on_device: bool = False

    @classmethod
    def like(cls, value: Any, device: torch.device) -> Scalar:
        if not isinstance(value, torch.Tensor):
            return cls(type(value))
        return cls(value.dtype, tuple(value.shape), value.device.type == device.type != "cpu")

    def of(self, number: Any, device: torch.device) -> Any:
        """`number`, in a tensor or not, as the class keeps it."""
        if self.kind is type(None):
            return None
        if isinstance(self.kind, torch.dtype):
            value = number if isinstance(number, torch.Tensor) else torch.tensor(number, dtype=self.kind, device="cpu")
            return value.detach().to(device, self.kind, copy=True).reshape(self.shape)
        return self.kind(number.item() if isinstance(number, torch.Tensor) else number)


@dataclass(frozen=True)
class Behaviour:
    """What a class does with one set of options, on one device and in one dtype."""

    elements: tuple[StateKey, ...]
    """What it keeps for each element, in the order in which it appears."""
    scalars: tuple[tuple[str, Scalar], ...]
    """What it keeps once per parameter."""
    first: frozenset[str]
    """What of both there is after the first step."""
    counters: frozenset[str]
    """What it changes in its group at every step."""
    shared: frozenset[Any]
    """What it keeps in its state for all parameters together."""
    writes_grad: bool
    """It uses the gradient's memory for numbers of its own."""
    asked: frozenset[str]
    """Attributes that it has looked for on parameters."""
    with_closure: str | None = None
    """What it does with a closure besides calling it first, as an offloaded optimizer does."""
