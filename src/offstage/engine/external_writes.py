# SPDX-License-Identifier: Apache-2.0
"""`ExternalWrites`: logs once that weights with masters were written from outside."""

from __future__ import annotations

import logging

import torch

from offstage.lanes.lanes import Lane, Lanes, Mark
from offstage.rules.rule import Rule

logger = logging.getLogger("offstage")


class ExternalWrites:
    """Brings the count of weights written from outside to the host without waiting for it, and logs it once."""

    def __init__(self, rule: Rule, device: torch.device) -> None:
        self._rule, self._device = rule, device
        self._seen: torch.Tensor | None = None
        self._arrived: Mark = None
        self._looked = False
        self._lanes: Lanes | None = None
        self._logged = False

    def attach(self, lanes: Lanes) -> None:
        """There are lanes from now on; there may have been steps without."""
        self._lanes = lanes
        self._seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=self._device.type != "cpu")

    def carry_on(self, other: ExternalWrites) -> None:
        """This one takes the place of `other`: what was logged once is not logged again."""
        self._logged = other._logged

    def forget(self) -> None:
        """Everything was drained: what the last look would have brought may never come."""
        self._arrived, self._looked = None, False

    def look(self) -> None:
        counter = self._rule.external_writes(self._device)
        if counter is None or self._logged:
            return
        if self._lanes is None:
            # Without lanes nothing is offloaded; on a device the receipt still tells.
            self._seen = counter if self._device.type == "cpu" else None
            return
        if self._looked and not self._lanes.passed(self._arrived):
            return  # the last look has not arrived; the next step looks again
        seen = self._seen
        assert seen is not None
        self._arrived = self._lanes.submit(Lane.UPDATE, lambda: _copy_counter(seen, counter), after={}, writes=[seen])
        self._looked = True

    def report(self) -> None:
        if not self._logged and (count := self._arrived_count() + self._rule.external_on_host):
            self._logged = True
            logger.warning(
                "%d weights on %s were written by someone else between steps; their fp32 masters follow the weights. "
                "Expected after loading a model; otherwise find out who writes them.",
                count,
                self._device,
            )

    def _arrived_count(self) -> int:
        """What the last look at the device's counter has brought."""
        if self._seen is None:
            return 0
        if self._lanes is not None:
            if not self._looked or not self._lanes.passed(self._arrived):
                return 0
            self._lanes.touch_on_host(reads=[self._seen])
        return int(self._seen)


def _copy_counter(seen: torch.Tensor, counter: torch.Tensor) -> None:
    seen.copy_(counter, non_blocking=True)
