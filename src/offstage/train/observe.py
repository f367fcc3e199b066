# SPDX-License-Identifier: Apache-2.0
"""`Observer`: records memory, lanes and CPU use of one iteration for the report.

    with Observer(model, optimizer, device) as observer:
        observer.mark("forward")
        ...
        observer.mark("backward")
        ...
        observer.mark("step")
        ...
    observer.save(folder / "observed.json")

It samples device memory by owner at every layer's forward and backward (`memory_by_owner.py`), and records when lanes
and CPU cores worked (`timeline.py`). The iteration computes the same bits. A phase may be marked several times. With
`overlap_forward` the updates end under the next forward: an observer that stays open records that forward too.

On an accelerator, observing begins with the device idle, so that all clocks start together; times are those at which
the caller's stream reached a point, and the allocator reuses memory in the same order.

An error while observing never ends a run: it is logged and noted in the file, and training continues.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offstage import OffstageError
from offstage.activations.offload import lanes_of
from offstage.lanes.lanes import Lanes
from offstage.modules import layers_of
from offstage.train.memory_by_owner import OWNERS, Allocations, MemoryByOwner, engines_of
from offstage.train.timeline import COMPUTE, CpuUse, DeviceTrace, LaneWatch, Span, Spans, busy_ms, link_use, merged

logger = logging.getLogger("offstage")

VERSION = 1
"""Of what `save` writes."""


@dataclass
class _Sample:
    where: str
    at: Any
    nbytes: dict[str, int]


class Observer:
    """One iteration, observed. A context manager around it."""

    # Initialization #

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        layers: Sequence[nn.Module] | None = None,
        step: int | None = None,
    ) -> None:
        """`layers`: sampled at their forward and backward; by default, the children of the longest `ModuleList`."""
        self._model, self._optimizer, self._device = model, optimizer, _numbered(torch.device(device))
        self._layers = list(layers) if layers is not None else _layers(model)
        self._step = step
        self._on_host = self._device.type == "cpu"
        self._clock = _Clock(self._device)
        self._samples: list[_Sample] = []
        self._phases: list[tuple[str, Any]] = []
        self._notes: list[str] = []
        self._looking = self._is_over = False
        self._end: Any = None
        self._memory_by_owner: MemoryByOwner | None = None
        is_compiled = any(_is_compiled(module) for module in model.modules())
        self._allocations = Allocations() if self._on_host and not is_compiled else None
        if self._on_host and self._allocations is None:
            self._note("the model is compiled: on the CPU its activations are not counted")
        self._watch = LaneWatch(_lanes(model, optimizer))
        self._trace: DeviceTrace | None = None
        self._cpu = CpuUse()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Observer:
        with self._harmless("the owners of device memory are not known"):
            self._memory_by_owner = MemoryByOwner(self._model, self._optimizer, self._device)
            self._bind()
        if not self._on_host:
            with self._harmless("torch's profiler did not start: no timeline of the lanes"):
                trace = DeviceTrace(self._device)
                trace.start()
                self._trace = trace
        with self._harmless("the beginning of the iteration is not known: nothing is observed"):
            self._begin()
        return self

    def _begin(self) -> None:
        if not self._on_host:
            torch.accelerator.synchronize(self._device)
        if self._trace is not None:
            self._trace.begin()
        self._clock.start()
        self._cpu.start(self._clock.began)
        self._watch.start()
        if self._allocations is not None:
            self._open.enter_context(self._leaving_out_slots(self._allocations))
            self._open.enter_context(self._allocations)
        self._looking = True
        self._sample("begin")

    def _bind(self) -> None:
        inside = _inside_compiled(self._model)
        for number, layer in enumerate(self._layers):
            if layer in inside:  # compiled code runs no hooks
                continue
            if layer._compiled_call_impl is not None:
                self._wrap(number, layer, layer._compiled_call_impl)
                continue
            before = layer.register_forward_pre_hook(functools.partial(self._before_forward, number))
            # always_call: a checkpoint stops recomputing a layer with an exception once backward has what it needs.
            after = layer.register_forward_hook(functools.partial(self._after_forward, number), always_call=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        before_step = self._optimizer.register_step_pre_hook(lambda *_: self._sample("optimizer.step() begins"))
        after_step = self._optimizer.register_step_post_hook(lambda *_: self._sample("optimizer.step() ends"))
        self._open.callback(before_step.remove)
        self._open.callback(after_step.remove)

    def _wrap(self, number: int, layer: nn.Module, compiled: Callable[..., Any]) -> None:
        """Wrap the call of a layer compiled in place: a hook would be compiled too."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before_forward(number)
            output = compiled(*args, **kwargs)
            self._after_forward(number, layer, args, output)
            return output

        layer._compiled_call_impl = call
        self._open.callback(setattr, layer, "_compiled_call_impl", compiled)

    @contextlib.contextmanager
    def _leaving_out_slots(self, allocations: Allocations) -> Iterator[None]:
        """Leave slots out of `allocations`: `MemoryByOwner.slots` counts them."""
        lanes = _optimizer_lanes(self._optimizer)
        for one in lanes:
            vars(one)["empty"] = allocations.leave_out(one.empty)
        try:
            yield
        finally:
            for one in lanes:
                vars(one).pop("empty", None)

    # Runtime #

    def mark(self, phase: str) -> None:
        """A phase begins: ``"forward"``, ``"backward"`` or ``"step"``."""
        if not self._looking:
            return
        if phase != "forward" and any(earlier == "step" for earlier, _ in self._phases):
            self._stop()  # the next forward has ended
            return
        with self._harmless(f"the beginning of {phase} is not known"):
            self._phases.append((phase, self._clock.stamp()))
        self._sample(phase)

    def _before_forward(self, number: int, *_: Any) -> None:
        self._sample(f"layer {number} forward")

    def _after_forward(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        self._sample(f"layer {number} forward ends")
        if torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            return  # a checkpoint recomputes it for backward
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if self._looking and isinstance(first, torch.Tensor) and first.requires_grad:
            reached = functools.partial(self._reached, number)
            first.register_hook(reached)  # type: ignore[no-untyped-call]

    def _reached(self, number: int, gradient: torch.Tensor) -> None:
        self._sample(f"layer {number} backward")

    def _sample(self, where: str) -> None:
        if not self._looking or self._memory_by_owner is None:
            return
        with self._harmless("device memory is not known from some moment on"):
            at = self._clock.stamp()
            owned = self._memory_by_owner.owned()
            slots, window = self._memory_by_owner.slots()
            nbytes = {owner: sum(storages.values()) for owner, storages in owned.items()}
            nbytes |= {"slots": slots, "window": window}
            if self._allocations is not None:
                storages = [address for of_owner in owned.values() for address in of_owner]
                nbytes["activations"] = self._allocations.nbytes(storages)
            elif not self._on_host:
                allocated = torch.accelerator.memory_allocated(self._device)
                nbytes["activations"] = max(0, allocated - sum(nbytes.values()))
            self._samples.append(_Sample(where, at, nbytes))

    def __exit__(self, *_: object) -> None:
        if not self._is_over:
            self._stop()

    def _stop(self) -> None:
        self._is_over = True
        with self._harmless("the end of the iteration is not known"):
            if self._memory_by_owner is not None:
                self._memory_by_owner.refresh()
            self._sample("end")
            self._end = self._clock.stamp()
        self._looking = False  # hooks on tensors of a graph that is still alive then do nothing
        self._cpu.stop()
        self._watch.stop()
        self._open.close()
        if self._trace is not None:
            with self._harmless("torch's profiler did not stop: no timeline of the lanes"):
                torch.accelerator.synchronize(self._device)
                self._trace.stop()

    @contextlib.contextmanager
    def _harmless(self, otherwise: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(f"{otherwise} ({type(error).__name__}: {error})")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            logger.warning("observing an iteration: %s", text)

    # Writing #

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded as JSON, atomically."""
        if not self._is_over:
            raise OffstageError(
                "Observer.save() expects an iteration that has ended; found one that has not. Leave the context first."
            )
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp")
        with self._harmless(f"{path.name} could not be written"):
            temporary.write_text(json.dumps(self.observed()), encoding="utf-8")
            temporary.replace(path)

    def observed(self) -> dict[str, Any]:
        """Everything recorded, in milliseconds since the iteration began, and bytes."""
        end = self._clock.ms(self._end) if self._end is not None else 0.0
        spans: Spans = {}
        with self._harmless("torch's profile could not be read: no timeline of the lanes"):
            spans = self._trace.spans() if self._trace is not None else {}
        with self._harmless("the lanes' times could not be read"):
            spans |= self._watch.spans(self._clock.began, self._clock.start_stamp)
        phases = self._timed_phases(end)
        if self._on_host:
            spans[COMPUTE] = _between(phases, spans)
        last = max([end, *(span[1] for found in spans.values() for span in found)])
        return {
            "version": VERSION,
            "step": self._step,
            "device": str(self._device),
            "end_ms": round(end, 4),
            "phases": [{"name": name, "start_ms": round(a, 4), "stop_ms": round(b, 4)} for name, a, b in phases],
            "memory": self._memory(),
            "lanes": {lane: merged(found) for lane, found in spans.items()},
            "busy_ms": {lane: round(busy_ms(found), 4) for lane, found in spans.items()},
            "link": link_use(spans, last) if last > 0 else None,
            "cpu": self._cpu.used(),
            "notes": self._notes,
        }

    def _timed_phases(self, end: float) -> list[tuple[str, float, float]]:
        starts = [(name, self._clock.ms(stamp)) for name, stamp in self._phases]
        return [(name, start, stop) for (name, start), (_, stop) in pairwise([*starts, ("", end)])]

    def _memory(self) -> dict[str, Any]:
        known = [owner for owner in OWNERS if any(owner in sample.nbytes for sample in self._samples)]
        return {
            "where": [sample.where for sample in self._samples],
            "ms": [round(self._clock.ms(sample.at), 4) for sample in self._samples],
            "bytes": {owner: [sample.nbytes.get(owner, 0) for sample in self._samples] for owner in known},
        }


class _Clock:
    """Times in the iteration: of the caller's stream on an accelerator, of the host without one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start_stamp: Any = None
        self.began = 0.0
        """The same moment by `time.perf_counter`."""

    def start(self) -> None:
        self.start_stamp = self.stamp()
        self.began = time.perf_counter() if self._device.type != "cpu" else self.start_stamp

    def stamp(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def ms(self, stamp: Any) -> float:
        """Since the start. Waits until the device has reached the stamp."""
        if self._device.type == "cpu":
            return float(1e3 * (stamp - self.start_stamp))
        stamp.synchronize()
        return float(self.start_stamp.elapsed_time(stamp))


def _numbered(device: torch.device) -> torch.device:
    """With its index, as tensors on it report it."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _layers(model: nn.Module) -> list[nn.Module]:
    with contextlib.suppress(OffstageError):  # a model without layers is sampled at its phases only
        return layers_of(model, None)
    return []


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _inside_compiled(model: nn.Module) -> set[nn.Module]:
    """Modules within one that is compiled as a whole."""
    regions = [module for module in model.modules() if _is_compiled(module)]
    return {inner for region in regions for inner in region.modules() if inner is not region}


def _optimizer_lanes(optimizer: torch.optim.Optimizer) -> list[Lanes]:
    return [engine.transport.lanes for engine in engines_of(optimizer) if engine.transport.is_open]


def _lanes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Lanes]:
    """Lanes of the optimizer, and of offloaded activations."""
    return [*_optimizer_lanes(optimizer), *lanes_of(model)]


def _between(phases: Sequence[tuple[str, float, float]], spans: Spans) -> list[Span]:
    """On the CPU the model's thread does the lanes' work in between: the remaining time is the model's."""
    busy = sorted((start, stop) for found in spans.values() for start, stop, _ in found)
    found: list[Span] = []
    for name, start, stop in phases:
        if name == "step":
            continue
        for begins, ends in [*((a, b) for a, b in busy if a < stop and b > start), (stop, math.inf)]:
            if begins > start:
                found.append((start, min(begins, stop), 0))
            start = max(start, ends)
    return found
