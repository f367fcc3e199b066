# SPDX-License-Identifier: Apache-2.0
"""Lanes of a device whose memory is counted: what offstage takes, and what a model pretends to take (`use`)."""

from __future__ import annotations

from typing import Any

import torch

from offstage.lanes.lanes import ImmediateLanes, Lanes, Mark
from offstage.lanes.testing.lazy import LazyLanes


class _Metering(Lanes):
    """In front of lanes that do the work."""

    def __init__(self, device: torch.device, limit: int | None = None, **settings: Any) -> None:
        super().__init__(device, **settings)  # type: ignore[call-arg]
        self.allocated = 0
        self.peak = 0
        self.limit = limit
        self.refused = 0

    def use(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.limit is not None and self.allocated + nbytes > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(f"no room for {nbytes}")
        self.use(nbytes)
        return super().empty(nbytes)  # type: ignore[safe-super]

    def release(self, tensor: torch.Tensor, after: Mark, reason: str) -> None:
        self.use(-tensor.nbytes)
        super().release(tensor, after, reason)  # type: ignore[safe-super]

    def drop(self, tensor: torch.Tensor) -> None:
        self.use(-tensor.nbytes)
        super().drop(tensor)

    def peak_bytes(self) -> int:
        return self.peak


class _Counting(_Metering):
    """They also say how much is allocated now, and count the peak anew, as an accelerator's do."""

    most = 0
    """The highest peak ever."""

    def use(self, nbytes: int) -> None:
        super().use(nbytes)
        self.most = max(self.most, self.peak)

    def allocated_bytes(self) -> int:
        return self.allocated

    def reset_peak(self) -> None:
        self.peak = self.allocated


class Metered(_Metering, ImmediateLanes):
    """They know the peak only."""


class Counted(_Counting, ImmediateLanes):
    """They know what is allocated."""


class CountedLazy(_Counting, LazyLanes):
    """The same, with work that runs as late as the marks allow."""
