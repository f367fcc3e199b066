# SPDX-License-Identifier: Apache-2.0
"""`Side`: lanes and host memory for the activations of one device. Used by `activations.py`."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import Any

import torch

from offstage.activations.proofs import Proofs
from offstage.activations.rates import measure_link, measure_product, measure_remaking
from offstage.activations.recipe import Recipe
from offstage.config import ActivationConfig
from offstage.errors import OffstageError
from offstage.lanes.lanes import Lanes
from offstage.lanes.link import link_for
from offstage.memory.pool import HostPool


class Side:
    """Made when the first tensor of a device is saved."""

    def __init__(self, device: torch.device, config: ActivationConfig) -> None:
        self.lanes: Lanes = link_for(device).lanes()
        self.pool = HostPool(device, None if config.host_budget is None else int(config.host_budget))
        self.proofs = Proofs()
        self.here_bytes = 0
        """Of saved tensors that are on the device."""
        self._products: dict[torch.dtype, float] = {}
        self._dead: deque[Any] = deque()
        self.refuse_capture()

    @functools.cached_property
    def link_gb_per_s(self) -> float:
        """What the link carries each way, with both directions busy. Measured the first time."""
        return measure_link(self.lanes)

    @functools.cached_property
    def remaking_gb_per_s(self) -> float:
        """How fast the device makes saved tensors again. Measured the first time."""
        return measure_remaking(self.lanes)

    def is_made_faster(self, recipe: Recipe) -> bool:
        """Whether the device makes it, a matrix product, in less time than the link takes to carry it, even twice."""
        if self.lanes.device.type == "cpu":
            return True  # there is no link
        if recipe.dtype not in self._products:
            self._products[recipe.dtype] = measure_product(self.lanes, recipe.dtype)
        seconds = 2 * recipe.multiplications / self._products[recipe.dtype]
        return seconds < recipe.nbytes / (1e9 * self.link_gb_per_s)

    def refuse_capture(self) -> None:
        if self.lanes.capturing():
            raise OffstageError(
                "A graph is being captured, and activations are offloaded: its replays would copy from and to host "
                "memory that is used for something else by then. Capture the model without offload_activations()."
            )

    def trim(self) -> None:
        """Give back host memory that nobody uses. Waits for the device."""
        self.bury()
        self.lanes.synchronize("trim: the host memory is not in use")
        self.lanes.touch_on_host(writes=self.pool.trim())

    def lay_out(self, remains: Any) -> None:
        """What a storage that nobody needs has left. Called by the garbage collector: nothing else may be done."""
        self._dead.append(remains)

    def bury(self) -> None:
        """Give back what the dead have left."""
        with contextlib.suppress(IndexError):
            while True:
                taken, after, memory = self._dead.popleft()
                if memory is not None:  # a copy from or into this memory may be under way
                    self.lanes.wait(after, "bury: the copy that nobody needed is done")
                    self.lanes.touch(writes=[memory])
                self.pool.give_back(taken)
