# SPDX-License-Identifier: Apache-2.0
"""`SimulatedDevice`: the CPU plays an accelerator with given rates and so much memory. For tests and for planning.

    device = SimulatedDevice(memory_bytes=..., up_gb_per_s=..., ...)
    with device:
        device.adopt(model)
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model)
        model(x).sum().backward()
        optimizer.step()
        device.now_ms(), device.peak_bytes

The real library runs and all results are those of a CPU; what is simulated is when things would have happened, and how
much memory they would have taken. Work is done at once, when it is submitted; clocks say when it would have begun and
ended (`virtual_time.py`). Nothing of it depends on the real time: a program always has the same times and peaks.

- A lane is a queue. Its copies take what they write over the link's rate, and one link is shared by the lanes of all
  users. Updates take their memory traffic (declared reads once, declared writes twice: they are read as well) over the
  rate of the device's memory, or of the host's threads.
- An operation outside lanes takes its flops if torch knows a formula for it, and otherwise the bytes that it reads and
  writes (`op_cost.py`). The host waits where the value of a tensor is asked for.
- Device memory is what operations make from nothing or from device memory, and what is adopted (`device_memory.py`).
  What is made from host memory alone is host memory: arenas, and batches that nobody has adopted. A few small tensors
  that the library keeps on the host count as device memory, for they are made from nothing.

Not modelled: compute and updates that slow each other down, traffic of host memory, fragmentation, workspaces of
kernels, temporary memory within a kernel of torch, and other threads than the one that entered the device. Rules'
compiled kernels take time on lanes only: where nothing is off the device there are none, and updates take no time. An
operation that runs out of memory has written what it writes in place by then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offstage.errors import ConfigError, OffstageError
from offstage.lanes.host_threads import Slice
from offstage.lanes.lanes import (
    CARRIES,
    UNORDERED,
    Buffers,
    Lane,
    Lanes,
    Priority,
    Work,
    carried_bytes,
    note,
    run_all,
)
from offstage.lanes.link import link_for, use_lanes
from offstage.lanes.testing.device_memory import DeviceMemory
from offstage.lanes.testing.op_cost import WAITS, Cost, Operation, cost_of, operation_of, tensors_in
from offstage.lanes.testing.virtual_time import DeviceClock
from offstage.memory.arena import cgroup_available, mem_available

M = TypeVar("M")
_UP = (Lane.FETCH, Lane.WEIGHTS_UP)
_CPU = torch.device("cpu")


class SimulatedDevice:
    """The clocks and the memory of one device. A context manager: within it the calling thread's CPU is the device."""

    def __init__(
        self,
        *,
        memory_bytes: int,
        up_gb_per_s: float,
        down_gb_per_s: float,
        device_gb_per_s: float,
        tflops: float,
        host_update_gb_per_s: float,
        launch_us: float = 0.0,
    ) -> None:
        """`launch_us`: the host's time for each operation and each piece of work that it gives to a lane."""
        rates = {
            "memory_bytes": memory_bytes,
            "up_gb_per_s": up_gb_per_s,
            "down_gb_per_s": down_gb_per_s,
            "device_gb_per_s": device_gb_per_s,
            "tflops": tflops,
            "host_update_gb_per_s": host_update_gb_per_s,
        }
        wrong = {name: value for name, value in rates.items() if not value > 0}
        if wrong or launch_us < 0:
            raise ConfigError(
                f"SimulatedDevice expects positive sizes and rates and launch_us of at least 0; found "
                f"{wrong or {'launch_us': launch_us}}. Give those of the machine to simulate."
            )
        self.up_gb_per_s, self.down_gb_per_s, self.device_gb_per_s = up_gb_per_s, down_gb_per_s, device_gb_per_s
        self.tflops, self.host_update_gb_per_s, self.launch_us = tflops, host_update_gb_per_s, launch_us
        self.clock = DeviceClock(1e-3 * launch_us)
        self.memory = DeviceMemory(memory_bytes)
        self.lane: Lane | None = None
        """Whose work is being done, if it is a lane's."""
        self._entered: contextlib.ExitStack | None = None

    def make_lanes(self, device: torch.device) -> SimulatedLanes:
        """For `use_lanes`: lanes for one more user of this device."""
        return SimulatedLanes(device, self)

    def __enter__(self) -> SimulatedDevice:
        if self._entered is not None:
            raise OffstageError(
                "This SimulatedDevice was entered already; expected once at a time, or operations would count twice. "
                "Leave it first, or make another one."
            )
        with contextlib.ExitStack() as entered:
            entered.enter_context(use_lanes(self.make_lanes))
            # As it would be measured; measuring takes device memory.
            link_for(_CPU).remember(min(self.up_gb_per_s, self.down_gb_per_s))
            entered.enter_context(_resizes_noted(self.memory))
            entered.enter_context(_Operations(self))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        entered, self._entered = self._entered, None
        assert entered is not None
        entered.close()

    def adopt(self, *what: nn.Module | torch.Tensor) -> None:
        """Tensors that exist already, or the parameters, gradients and buffers of a module, are device memory."""
        for one in what:
            tensors = [one] if isinstance(one, torch.Tensor) else [*one.parameters(), *one.buffers()]
            tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
            self.memory.take(tensor.untyped_storage() for tensor in tensors)

    # Looking

    def now_ms(self) -> float:
        """When the caller's stream is done with all that it has been given so far."""
        return self.clock.caller

    def synchronize(self) -> None:
        """The host waits for the caller's stream, as a loop does that reads its loss."""
        self.clock.wait_on_host(self.clock.caller)

    @property
    def allocated_bytes(self) -> int:
        return self.memory.allocated

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak

    def reset_peak(self) -> None:
        self.memory.reset_peak()

    @property
    def most_bytes(self) -> int:
        """The most that was ever allocated, whatever has reset the peak."""
        return self.memory.most

    def machine(self, make: Callable[..., M], *, host_free_bytes: int | None = None) -> M:
        """`machine(offstage.Machine)`: the machine that has this device, for plans.

        `host_free_bytes`: what this host has left, unless given.
        """
        if host_free_bytes is None:
            host_free_bytes = min(left for left in (mem_available(), cgroup_available(), _host_bytes()) if left)
        return make(
            device_name="simulated",
            device_bytes=self.memory.limit,
            device_free_bytes=self.memory.limit - self.allocated_bytes,
            host_bytes=max(_host_bytes(), host_free_bytes),
            host_free_bytes=host_free_bytes,
            link_up_gb_per_s=self.up_gb_per_s,
            link_down_gb_per_s=self.down_gb_per_s,
            link_duplex_gb_per_s=min(self.up_gb_per_s, self.down_gb_per_s),
            # Never the limit, as here.
            dram_gb_per_s=4 * (self.up_gb_per_s + self.down_gb_per_s + self.host_update_gb_per_s),
            host_update_gb_per_s={1: self.host_update_gb_per_s},
            host_update_gparam_limit=1e3 * self.host_update_gb_per_s,
            pin_gib_per_s=1e3,
            device_gb_per_s=self.device_gb_per_s,
            threads=1,
            submit_us=max(self.launch_us, 1e-6),
        )

    # What lanes and operations take

    def traffic_ms(self, nbytes: int) -> float:
        """Of so much traffic of device memory."""
        return nbytes / self.device_gb_per_s / 1e6

    def copy_ms(self, nbytes: int, *, up: bool) -> float:
        return nbytes / (self.up_gb_per_s if up else self.down_gb_per_s) / 1e6

    @contextlib.contextmanager
    def working_for(self, lane: Lane) -> Iterator[None]:
        """The operations within are a lane's."""
        before, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = before

    def operation(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """It has made `made`: count its memory, and its time on the caller's stream."""
        given = tensors_in(args)
        if kwargs:
            given += tensors_in(kwargs.values())
        before = {tensor.untyped_storage()._cdata for tensor in given}
        if self.lane is Lane.HOST or (before and not self.memory.holds_any(before)):
            return
        new = [tensor for tensor in tensors_in((made,)) if tensor.untyped_storage()._cdata not in before]
        if new:
            self.memory.take(tensor.untyped_storage() for tensor in new)
        if operation.mutates:  # an `out` may have grown
            for tensor in given:
                self.memory.look_again(tensor.untyped_storage())
        if self.lane is None:
            cost = cost_of(operation, args, kwargs, made, given, new)
            if cost.flops or cost.nbytes:
                self._pass_time(operation, args, kwargs, cost)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return self.memory.holds(tensor.untyped_storage())

    def _pass_time(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], cost: Cost) -> None:
        clock = self.clock
        clock.launch()
        if operation.name == "copy_" and self._is_here(args[0]) != self._is_here(args[1]):
            up = self._is_here(args[0])
            clock.copy(clock.up if up else clock.down, self.copy_ms(args[0].nbytes, up=up))
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                clock.wait_on_host(clock.caller)
        else:
            clock.run(cost.flops / self.tflops / 1e9 + self.traffic_ms(cost.nbytes))
        if operation.name in WAITS:
            clock.wait_on_host(clock.caller)


class _Operations(TorchDispatchMode):
    """Tells a device of every operation of the thread."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it."""
        kwargs = kwargs or {}
        operation = operation_of(func)
        if operation.decomposes:
            with self:
                return func.decompose(*args, **kwargs)
        made = func(*args, **kwargs)
        if not operation.is_view:
            self._device.operation(operation, args, kwargs, made)
        return made


class SimulatedLanes(Lanes):
    """The lanes of one user of a simulated device. Marks and stamps are times."""

    def __init__(self, device: torch.device, simulated: SimulatedDevice) -> None:
        self.device = device
        self.priority = Priority()
        self._simulated, self._clock = simulated, simulated.clock
        self._ends = dict.fromkeys(Lane, 0.0)
        """When each lane is done with all that it has been given."""

    def submit(
        self,
        lane: Lane,
        work: Work,
        *,
        after: Mapping[str, float | None],
        reads: Buffers = (),
        writes: Buffers = (),
        low_priority: bool = False,
    ) -> float:
        simulated, clock = self._simulated, self._clock
        with simulated.working_for(lane):
            run_all(work)
        marks = [*after.values(), self.priority.mark if low_priority else None]
        ready = self._ready(lane, marks)
        if lane in CARRIES:
            up = lane in _UP
            link = clock.up if up else clock.down
            begin, end = link.take((self, lane), ready, simulated.copy_ms(carried_bytes(lane, writes), up=up))
        else:
            begin, end = ready, ready + simulated.traffic_ms(_traffic(reads, writes))
        return self._done(lane, begin, end, carried_bytes(lane, writes))

    def submit_on_host(
        self,
        slices: Sequence[Slice],
        *,
        after: Mapping[str, float | None],
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> float:
        with self._simulated.working_for(Lane.HOST):
            self.threads.run(slices)
        duration = _traffic(reads, writes) / self._simulated.host_update_gb_per_s / 1e6
        begin, end = self._clock.host_threads.take(self._ready(Lane.HOST, list(after.values())), duration)
        return self._done(Lane.HOST, begin, end)

    def _ready(self, lane: Lane, marks: Sequence[float | None]) -> float:
        """When work may begin that is submitted now."""
        self._clock.launch()
        before = 0.0 if lane in UNORDERED else self._ends[lane]
        return max(before, self._clock.host, *(mark for mark in marks if mark is not None))

    def _done(self, lane: Lane, begin: float, end: float, nbytes: int = 0) -> float:
        self._ends[lane] = max(self._ends[lane], end)
        note(self.logs, lane, begin, end, nbytes)
        return end

    def mark(self) -> float:
        return self._clock.caller

    def wait(self, mark: float | None, reason: str) -> None:
        if mark is not None:
            start = self.begin_wait()
            self._clock.wait(mark)
            self.end_wait(start)

    def wait_on_host(self, mark: float | None, reason: str) -> None:
        if mark is not None:
            self._clock.wait_on_host(mark)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def release(self, tensor: torch.Tensor, after: float | None, reason: str) -> None:
        self.wait(after, reason)  # the stream that allocated it waits, as on an accelerator

    def synchronize(self, reason: str) -> None:
        self._clock.wait_on_host(max(self._ends.values()))

    def passed(self, mark: float | None) -> bool:
        """As far as the host is: one that never waits, and whose launches cost nothing, sees nothing pass."""
        return mark is None or mark <= self._clock.host

    def prioritise(self, mark: float) -> None:
        self.priority.mark = mark

    def stamp(self, lane: Lane) -> float:
        return self._clock.caller if lane is Lane.CALLER else max(self._ends[lane], self._clock.host)

    def elapsed_ms(self, start: float, stop: float) -> float:
        self._clock.wait_on_host(max(start, stop))
        return stop - start

    def peak_bytes(self) -> int:
        return self._simulated.peak_bytes

    def reset_peak(self) -> None:
        self._simulated.reset_peak()

    def allocated_bytes(self) -> int:
        return self._simulated.allocated_bytes

    def free_bytes(self) -> int:
        return self._simulated.memory.limit - self._simulated.allocated_bytes

    def device_memory(self) -> tuple[int, int, int]:
        return self.free_bytes(), 0, self._simulated.memory.limit


def _traffic(reads: Buffers, writes: Buffers) -> int:
    """Of an update: what it writes it has read."""
    return sum(buffer.nbytes for buffer in reads) + 2 * sum(buffer.nbytes for buffer in writes)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def _resizes_noted(memory: DeviceMemory) -> Iterator[None]:
    """`UntypedStorage.resize_` is no operation that a mode sees."""
    resize = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, nbytes: int) -> Any:
        memory.resize(storage, nbytes)
        return resize(storage, nbytes)

    torch.UntypedStorage.resize_ = noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
