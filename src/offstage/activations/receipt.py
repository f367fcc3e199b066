# SPDX-License-Identifier: Apache-2.0
"""The receipt of `offload_activations()`: what was really moved."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from offstage.config import format_size
from offstage.planning.choices import Choice


def renamed(old: str, new: str) -> Any:
    """A property that reads `new` under its `old` name, and warns."""

    def read(self: Any) -> Any:
        message = f"{type(self).__name__}.{old} is called {new} now. Use that: the old name will go."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read)


@dataclass(frozen=True)
class ActivationReceipt:
    """Counted where the copies are made."""

    passes: int
    """Forwards of the model with gradients so far."""
    bytes_offloaded: int
    """Device → host, in the last forward."""
    bytes_stayed: int
    """Saved by chosen layers in the last forward, and kept on the device because of `fraction`."""
    bytes_remade: int
    """Saved in the last forward as well, and remade in backward instead of moved."""
    total_bytes_offloaded: int
    """Device → host, so far."""
    total_bytes_returned: int
    """Host → device, so far."""
    weight_bytes_fetched: int
    """Of weights, so far."""
    gradient_bytes_stored: int
    """Of gradients of weights that live on the host, so far."""
    host_bytes: int
    choices: tuple[Choice, ...] = ()
    """What each layer did in the last forward."""

    bytes_left = renamed("bytes_left", "bytes_offloaded")
    total_bytes_left = renamed("total_bytes_left", "total_bytes_offloaded")

    def __str__(self) -> str:
        size = format_size
        rows = [
            ("forwards", f"{self.passes}"),
            ("last forward", f"{size(self.bytes_offloaded)} offloaded, {size(self.bytes_stayed)} kept on the device"),
            ("last backward", f"{size(self.bytes_remade)} remade"),
            ("so far", f"{size(self.total_bytes_offloaded)} offloaded, {size(self.total_bytes_returned)} returned"),
            ("host memory", size(self.host_bytes)),
        ]
        if self.choices:
            counts = ", ".join(f"{self.choices.count(one)} {one.value}" for one in Choice if one in self.choices)
            rows.insert(1, ("layers", counts))
        if self.weight_bytes_fetched:
            fetched, stored = size(self.weight_bytes_fetched), size(self.gradient_bytes_stored)
            rows.append(("weights, so far", f"{fetched} fetched, {stored} of gradients stored"))
        return "\n".join(f"{name:<16} {value}" for name, value in rows)
