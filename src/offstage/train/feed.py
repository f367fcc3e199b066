# SPDX-License-Identifier: Apache-2.0
"""`Feed`: the batches of whole steps, one prepared ahead, with the exact position to go on from. Used by `loop.py`."""

from __future__ import annotations

from typing import Any

import torch

from offstage.train.data import Batches


class Feed:
    """Takes so many micro-batches per step from `batches` and brings them to the device."""

    def __init__(self, batches: Batches, micro_batches: int, device: torch.device) -> None:
        self._batches, self._micro_batches, self._device = batches, micro_batches, device
        self._prepared: torch.Tensor | None = None
        self._position = batches.state_dict()

    @property
    def position(self) -> dict[str, Any]:
        """After the last step that was taken; what is only prepared does not count."""
        return self._position

    def go_to(self, position: dict[str, Any]) -> None:
        """Go on from there."""
        self._batches.load_state_dict(position)
        self._position, self._prepared = self._batches.state_dict(), None

    def prepare(self) -> None:
        """Read the next step's batch, while the device is busy."""
        if self._prepared is None:
            tokens = torch.cat([self._batches.next() for _ in range(self._micro_batches)])
            self._prepared = tokens if self._device.type == "cpu" else tokens.pin_memory()

    def take(self) -> torch.Tensor:
        """[sequences, sequence + 1] on the device: all micro-batches of the next step."""
        self.prepare()
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        self._position = self._batches.state_dict()
        return prepared.to(self._device, non_blocking=True)
