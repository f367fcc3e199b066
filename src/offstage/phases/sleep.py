# SPDX-License-Identifier: Apache-2.0
"""`sleep()`, `wake()` and `asleep()`.

To sleep: look at everything and refuse what cannot be done; copy to the host; then, when every copy is made, free the
device's memory. To wake: allocate, and have the copies made in the order in which forward needs them. A failure before
the copies are made changes nothing, either way.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from offstage.config import format_size, parse_size
from offstage.errors import ConfigError, OffstageError
from offstage.lanes.lanes import Lane
from offstage.memory.interrupts import deferred_interrupts
from offstage.modules import running_backward
from offstage.phases.parking import Lot, ParkedStorage, Stage, lot_for
from offstage.phases.report import DeviceReport, Sleep, Wake
from offstage.phases.sleeper import KINDS, Item, Sleeper, memories_of
from offstage.phases.sleepers import ModuleSleeper, parts_of, sleeper_for, sleeper_of

logger = logging.getLogger("offstage")

_DROPPABLE = ("gradients",)
_ORDER = ("buffers", "weights", "gradients", "state")
_one_call = threading.RLock()
Found = dict[ParkedStorage, dict[Sleeper, list[Item]]]
"""Storages, whose they are, and the tensors that use them."""


def sleep(
    *objects: Any, keep: Collection[str] = (), drop: Collection[str] = (), need: int | str | None = None
) -> Sleep:
    """Give the device memory of `objects` back to the driver until `wake()`; their values wait on the host.

    `objects` are modules (weights, gradients, buffers) and optimizers, offloaded or not (state, slots). Tensors stay
    the same Python objects. `keep`: kinds that stay, of "weights", "buffers", "gradients", "state", "slots". `drop`:
    ("gradients",) sets them to `None` instead of copying them. `need`: only as much as is missing until the device has
    so many bytes free, cheapest first; nothing if it has them already.

    Between steps. What sleeps already stays as it is. If it fails, nothing has changed. Use it as a context manager to
    wake at its end what this call has put to sleep.
    """
    kept, dropped = _kinds("keep", keep, KINDS), _kinds("drop", drop, _DROPPABLE)
    needed = None if need is None else parse_size(need, "need")
    sleepers = _sleepers_for("sleep", objects)
    if running_backward() is not None:
        raise OffstageError("sleep() was called in a backward; expected it between steps, when nothing is under way.")
    with _turns(sleepers):
        for sleeper in sleepers:
            sleeper.check()
        return _Falling(sleepers, kept, dropped, needed).fall()


def wake(*objects: Any) -> Wake:
    """Take device memory again for what sleeps of `objects`, and copy their values there.

    Returns when the copies are on their way, in the order in which forward needs them: every module's forward, every
    optimizer's step and every other use of a tensor waits for what it uses. What is awake stays as it is. If the device
    has not enough memory, nothing has changed, and it can be tried again.
    """
    sleepers = _sleepers_for("wake", objects)
    with _turns(sleepers):
        return _wake(dict.fromkeys(sleepers, False), [one for sleeper in sleepers for one in sleeper.away])


def asleep(*objects: Any) -> bool:
    """Whether all of `objects` are asleep."""
    if not objects:
        raise ConfigError("asleep() expects modules and optimizers; found none. Use asleep(model, optimizer).")
    sleepers = [sleeper_of(part) for one in objects for part in parts_of(one)]
    return all(sleeper is not None and sleeper.is_asleep for sleeper in sleepers)


def _kinds(name: str, found: Collection[str], known: Sequence[str]) -> set[str]:
    kinds = {found} if isinstance(found, str) else set(found)
    if unknown := sorted(map(str, kinds - set(known))):
        raise ConfigError(f"{name} expects kinds of {', '.join(known)}; found {unknown[0]!r}.")
    return kinds


def _sleepers_for(what: str, objects: Sequence[Any]) -> list[Sleeper]:
    """One for each, modules first: forward needs what they have first."""
    if not objects:
        raise ConfigError(f"{what}() expects modules and optimizers; found none. Use {what}(model, optimizer).")
    parts = [part for one in objects for part in parts_of(one)]
    if what == "wake":
        for one in parts:
            if sleeper_of(one) is None:
                raise OffstageError(
                    f"wake() was called for a {type(one).__name__} that has never slept; expected one that was given "
                    "to sleep(). Is it another object than then, a copy or a wrapper?"
                )
    sleepers = dict.fromkeys(sleeper_for(one) for one in parts)
    return sorted(sleepers, key=lambda one: not isinstance(one, ModuleSleeper))


@contextlib.contextmanager
def _turns(sleepers: Iterable[Sleeper]) -> Iterator[None]:
    """One call at a time, and no training meanwhile with the optimizers that are concerned."""
    with _one_call, _no_collection(), contextlib.ExitStack() as turns:
        runtimes = {id(runtime): runtime for sleeper in sleepers for runtime in sleeper.runtimes()}
        for _, runtime in sorted(runtimes.items()):  # the same order in every thread
            turns.enter_context(runtime.turn)
        yield


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector looks at every object of the process: longer than a GiB takes over the link."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Falling:
    """One call of `sleep()`."""

    def __init__(self, sleepers: Sequence[Sleeper], kept: set[str], dropped: set[str], need: int | None) -> None:
        self._sleepers, self._kept, self._dropped, self._need = sleepers, kept, dropped, need
        self._started = time.perf_counter()
        self._were_asleep = {sleeper: sleeper.is_asleep for sleeper in sleepers}
        self._slots: dict[Lot, int] = {}
        self._copied: dict[Lot, int] = {}
        self._seconds: dict[Lot, float] = {}
        self._left: list[ParkedStorage] = []
        self._dropping: list[ParkedStorage] = []

    def fall(self) -> Sleep:
        devices = _devices(self._sleepers)
        lots = [lot_for(device) for device in devices]
        for lot in lots:
            lot.refuse_capture()
        for sleeper in self._sleepers:
            sleeper.settle()
            sleeper.drain()
        found = _collect(self._sleepers, devices)
        for sleeper in self._sleepers:
            sleeper.prune({one for one, owners in found.items() if sleeper in owners})
        for lot in lots:
            lot.link.one_way_gb_per_s(lot.lanes, Lane.STORE)  # the first time
        try:
            for lot in lots:
                for leaving in self._rounds(lot, found):
                    self._leave(lot, leaving, found)
            with deferred_interrupts():
                self._guard(found)
        except BaseException:
            self._waking()()
            _settle(self._sleepers)
            raise
        self._drop(found)
        for lot in lots:
            lot.lanes.return_memory()
        made = Sleep([self._report(lot, found) for lot in lots], self._waking())
        logger.info("%s", made)
        return made

    # What goes

    def _rounds(self, lot: Lot, found: Found) -> Iterator[list[ParkedStorage]]:
        """Storages to be parked, until there is room enough."""
        staying = [one for one in found if one.lot is lot and one.stage is Stage.HERE]
        parts: dict[str, list[ParkedStorage]] = {kind: [] for kind in KINDS}
        for one in staying:
            kinds = _kinds_of(one, found)
            if kinds.isdisjoint(self._kept):
                parts[max(kinds, key=KINDS.index)].append(one)
        if self._need is None:
            self._free_slots(lot)
            yield [one for kind in KINDS for one in parts[kind]]
            return
        if self._missing(lot) > 0:
            self._free_slots(lot)
        queue = [one for kind in KINDS for one in (reversed(parts[kind]) if kind == "weights" else parts[kind])]
        while queue and (missing := self._missing(lot)) > 0:
            chosen: list[ParkedStorage] = []
            while queue and missing > 0:
                chosen.append(queue.pop(0))
                missing -= chosen[-1].nbytes
            yield chosen
        if (missing := self._missing(lot)) > 0:
            logger.warning(
                "sleep(need=%s): nothing is left that could go, and %s are missing on %s",
                format_size(self._need),
                format_size(missing),
                lot.device,
            )

    def _missing(self, lot: Lot) -> int:
        """Bytes until the device has as many free as are needed. A CPU does not count: it has what was given up."""
        assert self._need is not None
        lot.lanes.return_memory()
        free, _, total = lot.lanes.device_memory()
        if not total:
            free = self._slots.get(lot, 0) + sum(one.nbytes for one in self._left if one.lot is lot)
        return self._need - free - sum(one.nbytes for one in self._dropping if one.lot is lot)

    def _free_slots(self, lot: Lot) -> None:
        if "slots" not in self._kept and lot not in self._slots:
            self._slots[lot] = sum(sleeper.free_slots(lot.device) for sleeper in self._sleepers)

    # How it goes

    def _leave(self, lot: Lot, leaving: Sequence[ParkedStorage], found: Found) -> None:
        dropping = [one for one in leaving if _kinds_of(one, found) <= self._dropped]
        self._dropping += dropping
        moving = [one for one in leaving if one not in dropping]
        started = time.perf_counter()
        new = {one for one in moving if one.range is None}
        known = {(sleeper, one) for one in moving for sleeper in found[one] if one in sleeper.parked}

        def depart() -> None:
            with deferred_interrupts():
                for one in moving:
                    one.depart()
                    for sleeper, items in found[one].items():
                        sleeper.keep(one, items)

        with lot.turn:
            try:
                for one in moving:
                    one.hold()
                self._copied[lot] = self._copied.get(lot, 0) + lot.store(moving, depart)
                self._seconds[lot] = self._seconds.get(lot, 0.0) + time.perf_counter() - started
                with deferred_interrupts():
                    for one in moving:
                        one.leave()
                        self._left.append(one)
            except BaseException:
                with deferred_interrupts():  # what has left is woken by the caller
                    staying = [one for one in moving if one.stage is not Stage.AWAY]
                    for one in staying:
                        one.stay()
                        for sleeper in found[one]:
                            if (sleeper, one) not in known:
                                sleeper.parked.pop(one, None)
                    lot.forget(one for one in staying if one in new)
                raise

    def _guard(self, found: Found) -> None:
        left = set(self._left)
        for one, owners in found.items():
            if one.stage is Stage.AWAY and one not in left:  # what slept before, as another's
                for sleeper, items in owners.items():
                    sleeper.keep(one, items)
        for sleeper in self._sleepers:
            gone = {item.kind for one in self._left for item in found[one].get(sleeper, ())}
            wholly = sleeper.main_kind in gone if self._need is not None else sleeper.main_kind not in self._kept
            if gone or wholly:
                sleeper.fell_asleep(wholly=wholly)

    def _drop(self, found: Found) -> None:
        """Nothing can fail any more."""
        for sleeper in self._sleepers if self._need is None and "gradients" in self._dropped else ():
            sleeper.drop_gradients()  # those without memory of their own, too
        for one in self._dropping:
            for items in found.pop(one).values():
                for item in items:
                    assert item.param is not None
                    item.param.grad = None

    def _waking(self) -> Callable[[], Wake]:
        return functools.partial(_wake_again, self._were_asleep, [weakref.ref(one) for one in self._left])

    def _report(self, lot: Lot, found: Found) -> DeviceReport:
        free, reserve, total = lot.lanes.device_memory()
        allocated = lot.lanes.allocated_bytes() or 0
        ours = sum(one.nbytes for one in found if one.lot is lot and one.stage is not Stage.AWAY)
        return DeviceReport(
            lot.device,
            parked_bytes=sum(one.nbytes for one in self._left if one.lot is lot),
            copied_bytes=self._copied.get(lot, 0),
            freed_bytes=self._slots.get(lot, 0) + sum(one.nbytes for one in self._dropping if one.lot is lot),
            host_bytes=lot.host_bytes,
            seconds=time.perf_counter() - self._started,
            copy_seconds=self._seconds.get(lot, 0.0),
            still_ours_bytes=ours,
            other_bytes=max(0, allocated - ours) if total else 0,
            reserve_bytes=reserve,
            context_bytes=total - free - reserve - allocated if total else 0,
            link_gb_per_s=lot.link.one_way_gb_per_s(lot.lanes, Lane.STORE),
        )


def _kinds_of(one: ParkedStorage, found: Found) -> set[str]:
    return {item.kind for items in found[one].values() for item in items}


def _devices(sleepers: Iterable[Sleeper]) -> list[torch.device]:
    """Accelerators; where there are none, the CPU plays the device."""
    found: dict[torch.device, None] = {}
    for sleeper in sleepers:
        found |= dict.fromkeys(memory.device for item in sleeper.items() for memory in memories_of(item.tensor))
        found |= dict.fromkeys(engine.device for runtime in sleeper.runtimes() for engine in runtime.engines)
    return [device for device in found if device.type != "cpu"] or [torch.device("cpu")]


def _collect(sleepers: Sequence[Sleeper], devices: Sequence[torch.device]) -> Found:
    """Every storage on the devices, asleep or not."""
    lots, found = {device: lot_for(device) for device in devices}, Found()
    for sleeper in sleepers:
        for item in sleeper.items():
            for memory in memories_of(item.tensor):
                storage = memory.untyped_storage()
                lot = lots.get(memory.device)
                if lot is None:
                    continue
                if not storage.nbytes() and storage._cdata not in lot.parked:
                    continue
                if not storage.resizable() and memory.device.type != "cpu":
                    raise ConfigError(
                        f"{item.label} uses memory that cannot be freed and taken again (of another process, or of a "
                        "library beside torch); expected memory of torch's own. Clone it first."
                    )
                parked = lot.storage_of(memory, item.kind, item.label)
                if sleeper.is_public and item.kind in ("weights", "buffers"):
                    parked.is_public = True
                found.setdefault(parked, {}).setdefault(sleeper, []).append(item)
    return found


def _wake_again(flags: dict[Sleeper, bool], storages: Sequence[weakref.ref[ParkedStorage]]) -> Wake:
    with _turns(flags):
        found = [one for ref in storages if (one := ref()) is not None]
        return _wake(flags, [one for one in found if one.stage is Stage.AWAY and not one.is_dropped])


def _wake(flags: dict[Sleeper, bool], storages: Iterable[ParkedStorage]) -> Wake:
    """Bring `storages` back. `flags`: whether each sleeper still sleeps afterwards."""
    order = {one: number for number, one in enumerate(_ordered(flags, dict.fromkeys(storages)))}
    coming: dict[Lot, list[ParkedStorage]] = {}
    for one in order:
        coming.setdefault(one.lot, []).append(one)
    for lot, ones in coming.items():
        _check_room(lot, ones)
    comings: list[tuple[Lot, int, object, object]] = []
    at_once = [one for one in order if one.is_small or one.kind == "buffers" or one.is_shared]
    with deferred_interrupts():
        for lot, ones in coming.items():
            start = lot.lanes.stamp(Lane.FETCH)
            try:
                lot.fetch(ones)
            except BaseException as error:
                for other, *_ in comings:  # on other devices
                    other.undo(coming[other])
                if isinstance(error, RuntimeError) and not isinstance(error, OffstageError):
                    raise _no_room(lot, ones) from error
                raise
            comings.append((lot, sum(one.nbytes for one in ones), start, lot.lanes.stamp(Lane.FETCH)))
        for one in at_once:
            one.back()
        for sleeper, stays_asleep in flags.items():
            if not stays_asleep:
                sleeper.woke()
    return Wake(comings, functools.partial(_settle, list(flags)))


def _settle(sleepers: Sequence[Sleeper]) -> None:
    with _turns(sleepers):
        for sleeper in sleepers:
            sleeper.settle()


def _ordered(sleepers: Iterable[Sleeper], storages: Iterable[ParkedStorage]) -> list[ParkedStorage]:
    """Small ones first, for which `wake()` waits; then weights, as forward needs them; gradients; state."""
    wanted = set(storages)
    arranged = dict.fromkeys(one for sleeper in sleepers for one in sleeper.arranged() if one in wanted)
    return sorted(arranged, key=lambda one: 0 if one.is_small else _ORDER.index(one.kind))


def _check_room(lot: Lot, ones: Sequence[ParkedStorage]) -> None:
    free, reserve, total = lot.lanes.device_memory()
    if total and sum(one.nbytes for one in ones) > free + reserve:
        raise _no_room(lot, ones)


def _no_room(lot: Lot, ones: Sequence[ParkedStorage]) -> OffstageError:
    free, reserve, total = lot.lanes.device_memory()
    found = f"{format_size(free)} free and {format_size(reserve)} in torch's reserve" if total else "less"
    return OffstageError(
        f"wake() needs {format_size(sum(one.nbytes for one in ones))} on {lot.device}; found {found}. Does another "
        "process still hold the memory? Nothing has changed, the values are on the host: free it and call wake() again."
    )
