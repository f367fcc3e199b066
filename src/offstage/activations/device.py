# SPDX-License-Identifier: Apache-2.0
"""`DeviceActivations`: the lanes and the host memory for saved tensors of one device."""

from __future__ import annotations

import contextlib
from collections import deque

import torch

from offstage.activations.proofs import Proofs
from offstage.config import ActivationConfig
from offstage.errors import OffstageError
from offstage.lanes.lanes import Lane, Mark, copy_work
from offstage.lanes.link import link_for
from offstage.memory.pool import HostPool, Range


class DeviceActivations:
    """Made when the first tensor of a device is saved."""

    def __init__(self, device: torch.device, config: ActivationConfig) -> None:
        self.lanes = link_for(device).lanes()
        self.pool = HostPool(device, None if config.host_budget is None else int(config.host_budget))
        self.proofs = Proofs()
        self.here_bytes = 0
        """Of tensors that layers have saved, and that are on the device."""
        self._releases: deque[tuple[Range, Mark, torch.Tensor | None]] = deque()
        self.refuse_capture()

    def refuse_capture(self) -> None:
        if self.lanes.capturing():
            raise OffstageError(
                "A graph is being captured, and activations are offloaded: its replays would copy from and to host "
                "memory that is used for something else by then. Capture the model without offload_activations()."
            )

    # Copies

    def store(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        """Copy `source`, which the caller's stream has made, to the host."""
        lanes = self.lanes
        lanes.touch(writes=[source])
        with lanes.blocking():  # a copy that another thread submits later would hold its device memory until then
            return lanes.submit(
                Lane.STORE,
                copy_work([(target, source)]),
                after={"leave: the tensor is made": lanes.mark()},
                reads=[source],
                writes=[target],
            )

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        """Copy `source` into `target`, which the caller's stream has just allocated and backward will wait for."""
        lanes = self.lanes
        lanes.touch(writes=[target])
        with lanes.blocking():
            fetched = lanes.submit(
                Lane.FETCH,
                copy_work([(target, source)]),
                after={"return: the memory is free": lanes.mark()},  # the caller's stream has waited for the store
                reads=[source],
                writes=[target],
            )
        lanes.prioritise(fetched)
        return fetched

    # Host memory

    def queue_release(self, taken: Range, after: Mark, memory: torch.Tensor | None) -> None:
        """Have `taken` given back, behind `after`. The garbage collector calls this: nothing else may be done here.

        `memory`: device memory that the copy at `after` reads or writes, if the storage still had any.
        """
        self._releases.append((taken, after, memory))

    def run_releases(self) -> None:
        """Give back the host memory of storages that autograd has dropped."""
        with contextlib.suppress(IndexError):
            while True:
                taken, after, memory = self._releases.popleft()
                if memory is not None:
                    self.lanes.wait(after, "bury: the copy that nobody needed is done")
                    self.lanes.touch(writes=[memory])
                self.pool.give_back(taken)

    def trim(self) -> None:
        """Give unused host memory back to the system. Waits for the device."""
        self.run_releases()
        self.lanes.synchronize("trim: the host memory is not in use")
        self.lanes.touch_on_host(writes=self.pool.trim())
