# SPDX-License-Identifier: Apache-2.0
"""The receipt of `offload_activations()`: what was really moved."""

from __future__ import annotations

from dataclasses import dataclass

from offstage.activations.plan import ActivationPlan
from offstage.config import format_size


@dataclass(frozen=True)
class ActivationReceipt:
    """Counted where the copies are made."""

    passes: int
    """Forwards of the model with gradients so far."""
    bytes_left: int
    """Device → host, in the last forward."""
    bytes_stayed: int
    """Saved by chosen layers in the last forward, and kept on the device because of `fraction`."""
    bytes_remade: int
    """Saved in the last forward as well, and made again in backward instead of moved."""
    total_bytes_left: int
    total_bytes_returned: int
    weight_bytes_fetched: int
    """Of weights, so far."""
    gradient_bytes_stored: int
    """Of gradients of weights that live on the host, so far."""
    host_bytes: int
    plan: ActivationPlan | None = None
    """What `layers="auto"` has decided."""

    def __str__(self) -> str:
        rows = [
            ("forwards", f"{self.passes}"),
            ("left / stayed, last forward", f"{format_size(self.bytes_left)} / {format_size(self.bytes_stayed)}"),
            ("made again, last backward", format_size(self.bytes_remade)),
            (
                "left / returned, so far",
                f"{format_size(self.total_bytes_left)} / {format_size(self.total_bytes_returned)}",
            ),
            ("host memory", format_size(self.host_bytes)),
        ]
        if self.weight_bytes_fetched:
            fetched, stored = format_size(self.weight_bytes_fetched), format_size(self.gradient_bytes_stored)
            rows.append(("weights / gradients, so far", f"{fetched} fetched / {stored} stored"))
        if self.plan is not None:
            rows.append(("plan", str(self.plan)))
        return "\n".join(f"{name:<28} {value}" for name, value in rows)
