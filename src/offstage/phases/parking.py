# SPDX-License-Identifier: Apache-2.0
"""`Lot` and `ParkedStorage`: storages of one device that wait on the host, and their way there and back.

`HERE → LEAVING → AWAY → COMING → HERE`, or back from `LEAVING` where a copy fails. A storage, not a tensor, is what
moves: views and tied weights move once, and every tensor stays the object it was. What is `AWAY` has no device memory;
its values are in a range of the lot's host memory.

| buffer | written by | read by | separated by |
|---|---|---|---|
| the storage | the caller | store | a mark when sleep begins; it is freed when the host has waited for all stores |
| host range | store | fetch | the host has waited for all stores; it is used again when the fetch is over |
| the storage that returned | fetch | the caller | a mark when it is allocated, `coming` |
"""

from __future__ import annotations

import enum
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from offstage.config import format_size
from offstage.errors import OffstageError
from offstage.lanes.host_threads import may_wait_for_threads
from offstage.lanes.lanes import Lane, Lanes, Mark, copy_work
from offstage.lanes.link import Link, link_for
from offstage.memory.arena import Arena, check_host_memory, round_up
from offstage.memory.guarded import Guard, guard_of, unguarded
from offstage.memory.interrupts import deferred_interrupts
from offstage.memory.pool import HostPool, Range
from offstage.phases.away import bring_back, move_versions, send_away
from offstage.tensors import like, local_of

_BATCH = 32 * 1024 * 1024
"""Bytes that come back together, behind one mark."""
_SMALL = 1024 * 1024
"""Smaller storages come first, and `wake()` waits for them."""
_SEGMENT = 1024 * 1024 * 1024
"""Bytes of the largest part of device memory that is taken at once."""
_ALLOCATORS_UNIT = 512
_POISON = 0xA5
_DIGEST_WORDS = 4 * 1024 * 1024
_DIGEST_FACTOR = 0x9E3779B97F4A7C15 - 2**64


Digest = tuple[int, int]
"""Of the values of a storage: the version of its tensors, and a checksum."""


class Stage(enum.Enum):
    HERE = "here"
    LEAVING = "leaving"
    """Its copy is under way. Only what interrupts `sleep()` in its own thread sees this."""
    AWAY = "away"
    COMING = "coming"


class ParkedStorage(Guard):
    """One storage."""

    def __init__(self, lot: Lot, storage: torch.UntypedStorage, kind: str, label: str) -> None:
        """`label`: how messages name it."""
        self.lot, self.kind, self.label = lot, kind, label
        self.nbytes = storage.nbytes()
        self.stage = Stage.HERE
        self.storage: torch.UntypedStorage | None = None
        """While it is not here: it has no memory, and keeping it alive costs none."""
        self._address = storage._cdata
        self._keeps_address = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.range: Range | None = None
        """Its host memory, in every cycle the same: what was handed out while it slept stays a view of it."""
        self.is_public = False
        """Other processes shall be able to read it on the host."""
        self.coming: Mark = None
        self._tensors: dict[int, TensorWeakRef] = {}
        self._digest: Digest | None = None
        """Of the values in `range`."""

    def know(self, tensor: torch.Tensor) -> None:
        """`tensor` is one of those that use the storage."""
        is_new = not any(tensor is one for one in self.tensors)
        self._tensors[id(tensor)] = TensorWeakRef(tensor)
        if is_new and self.stage is Stage.AWAY:
            move_versions([tensor], 1)
            send_away(tensor, self)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that are known, still exist, and still use it."""
        found = [tensor for one in self._tensors.values() if (tensor := one()) is not None]
        return [tensor for tensor in found if tensor.untyped_storage()._cdata == self._address]

    @property
    def is_dropped(self) -> bool:
        """Away, and nothing is left that could use it."""
        return self.stage is Stage.AWAY and not self.tensors

    @property
    def is_small(self) -> bool:
        return self.nbytes < _SMALL

    @property
    def is_shared(self) -> bool:
        """While it is away: whether tensors use it of which nothing is known, and which can therefore not wait."""
        assert self.storage is not None
        return bool(torch._C._storage_Use_Count(self.storage._cdata) > 1 + len(self.tensors))  # type: ignore[attr-defined]

    # Leaving

    def bytes(self) -> torch.Tensor:
        """Its memory on the device, flat."""
        storage = self.storage
        assert storage is not None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]

    def hold(self) -> None:
        """It is about to leave."""
        self.storage = self.tensors[0].untyped_storage()

    def depart(self) -> None:
        """HERE → LEAVING: its copy is under way. A thread that uses it waits until this call of `sleep()` is over."""
        self.stage = Stage.LEAVING
        tensors = self.tensors
        move_versions(tensors, 1)
        for tensor in tensors:
            send_away(tensor, self)

    def stay(self) -> None:
        """LEAVING → HERE: it does not leave after all. There was a failure before, in, or behind `depart`."""
        departed = [tensor for tensor in self.tensors if guard_of(tensor) is self]
        for tensor in departed:
            bring_back(tensor)
        move_versions(departed, -1)
        self.stage, self.storage = Stage.HERE, None

    def leave(self) -> None:
        """LEAVING → AWAY: the values are on the host, and the device's memory goes back to the allocator."""
        assert self.range is not None
        self.free()
        self.stage = Stage.AWAY

    def free(self) -> None:
        """Give the device's memory back to the allocator."""
        assert self.storage is not None
        if self.storage.resizable():
            self.storage.resize_(0)
        else:  # a CPU that plays the device, and numpy has seen the memory: it stays, but its values do not
            self.bytes().fill_(_POISON)

    def allocate(self) -> None:
        """Take device memory for the values."""
        assert self.storage is not None
        if self.storage.resizable():
            self.storage.resize_(self.nbytes)

    # Returning

    def back(self) -> None:
        """COMING → HERE: the caller's stream waits for the values."""
        with self.lot.turn:
            if self.stage is not Stage.COMING:
                return
            lanes = self.lot.lanes
            lanes.wait(self.coming, "wake: the tensor is back")
            if lanes.checks:
                lanes.touch(writes=[self.bytes()])
            with deferred_interrupts():
                tensors = self.tensors
                for tensor in tensors:
                    bring_back(tensor)
                move_versions(tensors, -1)
                self.stage, self.storage = Stage.HERE, None
                self.lot.is_back(self)
                self._tensors.clear()  # the next sleep finds those that there are then

    def use(self, how: str) -> None:
        """The values are about to be used: wait until they are back, or raise."""
        with self.lot.turn:
            if self.stage in (Stage.LEAVING, Stage.AWAY):
                raise asleep_error(self.label, how)
            self.back()

    def before_use(self, tensor: torch.Tensor, how: str) -> None:
        self.use(how)
        bring_back(tensor)

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.lot.turn:
            if self.stage is Stage.LEAVING:  # a signal's handler, which may keep it: the memory is about to be freed
                with unguarded():
                    return tensor.detach().to("cpu", copy=True)
            if self.stage is Stage.AWAY:
                assert self.range is not None
                self.remember(None)  # other code may write what it gets
                host = torch.empty(0, dtype=tensor.dtype, device="cpu")
                place = (tensor.storage_offset(), tensor.size(), tensor.stride())
                host = host.set_(self.range.storage(), *place)  # type: ignore[call-overload]
                host = host.conj() if tensor.is_conj() else host
                return torch._neg_view(host) if tensor.is_neg() else host
        self.back()
        return tensor

    # Values that have not changed

    def is_current(self, digest: Digest | None) -> bool:
        """Whether the host has these values already."""
        return self.range is not None and digest is not None and self._digest == digest

    def remember(self, digest: Digest | None) -> None:
        """What is in the range; `None`: unknown."""
        self._digest = digest

    @property
    def version(self) -> int:
        """Of all its tensors together."""
        return sum(tensor._version for tensor in self.tensors if not tensor.is_inference())

    @property
    def is_frozen(self) -> bool:
        """A weight that is not trained."""
        return self.kind == "weights" and not any(tensor.requires_grad for tensor in self.tensors)

    def __del__(self) -> None:
        if self.range is not None:
            self.lot.queue_release(self.range, self.coming, self.storage)


class Wrapper(Guard):
    """For a DTensor: its local tensor is what is away."""

    def __init__(self, parked: ParkedStorage) -> None:
        self._parked = parked

    def before_use(self, tensor: torch.Tensor, how: str) -> None:
        self._parked.use(how)
        bring_back(tensor)

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        local = self._parked.readable(local_of(tensor))
        if self._parked.stage is Stage.HERE:
            bring_back(tensor)
            return tensor
        return like(local, tensor)


AWAY = (ParkedStorage, Wrapper)
"""What guards tensors whose memory is away."""


class Lot:
    """The host memory and lanes of one device for what sleeps."""

    def __init__(self, link: Link) -> None:
        self.link, self.device = link, link.device
        self.lanes = link.lanes()
        self.turn = threading.RLock()
        self._pools = {shared: HostPool(link.device, None, shared=shared) for shared in (False, True)}
        self.parked: weakref.WeakValueDictionary[int, ParkedStorage] = weakref.WeakValueDictionary()
        """By the storage's address, which no other gets as long as it is in here."""
        self._releases: list[tuple[Range, Mark, torch.UntypedStorage | None]] = []
        # Dropped with fetches under way: what they use must not be freed before they are done.
        weakref.finalize(self, _drain, self.lanes, self._pools, self._releases, os.getpid())

    @property
    def host_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())

    @property
    def shared_arenas(self) -> list[Arena]:
        """Those that other processes can map."""
        return self._pools[True].arenas

    def storage_of(self, tensor: torch.Tensor, kind: str, label: str) -> ParkedStorage:
        """The parked storage, or the one to be parked, that `tensor` uses."""
        storage = tensor.untyped_storage()
        found = self.parked.get(storage._cdata)
        if found is not None:
            found.back()  # on its way, as another object's
        if found is None or found.nbytes != storage.nbytes() != 0:
            found = self.parked[storage._cdata] = ParkedStorage(self, storage, kind, label)
        found.know(tensor)
        return found

    def refuse_capture(self) -> None:
        if self.lanes.capturing():
            raise OffstageError("sleep() was called while a graph is being captured; expected it between steps.")

    # Leaving

    @torch.no_grad()
    def store(self, leaving: Sequence[ParkedStorage], meanwhile: Callable[[], None]) -> int:
        """Copy the values of `leaving` to the host, which waits for it. Returns the bytes that had to be copied.

        `meanwhile`: what the host does before it waits. If this fails, nothing of its own has changed.
        """
        self._run_releases("sleep: the last fetch is over")
        digests = self._digests(leaving)
        moving = [one for one in leaving if not one.is_current(digests.get(one))]
        for one in moving:
            one.remember(None)  # until its copy is made
        new = {
            pool: [one for one in moving if one.range is None and one.is_public == shared]
            for shared, pool in self._pools.items()
        }
        missing = sum(pool.missing_bytes([one.nbytes for one in ones]) for pool, ones in new.items())
        what = f"sleep() parks {format_size(sum(one.nbytes for one in leaving))} and"
        remedy = "Nothing has changed. Free host memory, sleep less (need=, keep=), or drop=('gradients',)."
        old = [one for one in moving if one.range is not None]
        with check_host_memory(missing, None, what=what, remedy=remedy):
            try:
                for one in old:
                    self._submit(one)
                for pool, ones in new.items():
                    for one, taken in zip(ones, pool.take_all([one.nbytes for one in ones]), strict=True):
                        one.range = taken
                        self._submit(one)
                meanwhile()
            finally:
                # Whatever happens next, nothing is under way then.
                self.lanes.synchronize("sleep: the copies are made")
                for one in moving:
                    self._touch_on_host(one)
            self._check()
        for one in moving:
            one.remember(digests.get(one))
        return sum(one.nbytes for one in moving)

    def _check(self) -> None:
        """Raise what a copy has failed with, if one has; the next call begins anew."""
        try:
            self.lanes.check()
        except BaseException:
            self.lanes.forget()
            raise

    def _submit(self, one: ParkedStorage) -> None:
        assert one.range is not None
        source, target = one.bytes(), one.range.tensor
        self.lanes.touch(writes=[source])
        self.lanes.submit(
            Lane.STORE,
            copy_work([(target, source)]),
            after={"sleep: the tensors are made": self.lanes.mark()},
            reads=[source],
            writes=[target],
        )

    def _touch_on_host(self, one: ParkedStorage) -> None:
        if self.lanes.checks and one.range is not None and one.storage is not None:
            self.lanes.touch_on_host(writes=[one.range.tensor, one.bytes()])

    def forget(self, storages: Iterable[ParkedStorage]) -> None:
        """They did not leave after all."""
        for one in storages:
            one.storage = None
            if one.range is not None:
                one.range.pool.give_back(one.range)
                one.range = None

    def _digests(self, leaving: Sequence[ParkedStorage]) -> dict[ParkedStorage, Digest]:
        """Of frozen weights, whose values the host may have already."""
        frozen = [one for one in leaving if one.is_frozen]
        try:
            sums = torch.stack([_checksum(one.bytes()) for one in frozen]).tolist() if frozen else []
        except torch.OutOfMemoryError:  # then they are copied
            return {}
        return {one: (one.version, found) for one, found in zip(frozen, sums, strict=True)}

    # Returning

    @torch.no_grad()
    def fetch(self, coming: Sequence[ParkedStorage]) -> None:
        """Give `coming` device memory and have their values copied there, in this order. The host does not wait.

        If the device has not enough memory, nothing has changed.
        """
        self._run_releases("sleep: the last fetch is over")
        segment_of = {one: segment for segment in _segments(coming) for one in segment}
        begun: dict[ParkedStorage, None] = {}
        try:
            for batch in _batches(coming):
                for one in batch:
                    if one not in begun:
                        begun.update(dict.fromkeys(segment_of[one]))
                        self._allocate(segment_of[one])
                self._bring(batch)
        except BaseException:
            self.undo(begun)
            raise

    def undo(self, begun: Iterable[ParkedStorage]) -> None:
        """There was no room for all: what has come, or is coming, is away again."""
        self.lanes.synchronize("wake: the copies so far are made")
        for one in begun:
            assert one.storage is not None
            if one.storage.nbytes():
                self._touch_on_host(one)
            one.free()
            one.stage, one.coming = Stage.AWAY, None
        self.lanes.return_memory()

    def _allocate(self, segment: Sequence[ParkedStorage]) -> None:
        if len(segment) > 1:
            self.lanes.reserve(sum(round_up(one.nbytes, _ALLOCATORS_UNIT) for one in segment))
        for one in segment:
            one.allocate()

    def _bring(self, batch: Sequence[ParkedStorage]) -> None:
        copies = [(one.bytes(), one.range.tensor) for one in batch if one.range is not None]
        self.lanes.touch(writes=[target for target, _ in copies])
        mark = self.lanes.submit(
            Lane.FETCH,
            copy_work(copies),
            after={"wake: the memory is free": self.lanes.mark()},
            reads=[source for _, source in copies],
            writes=[target for target, _ in copies],
        )
        for one in batch:
            one.coming, one.stage = mark, Stage.COMING

    def is_back(self, one: ParkedStorage) -> None:
        """A gradient's host memory can be used for something else: the next one will be another tensor."""
        if one.range is not None and one.kind == "gradients":
            self.queue_release(one.range, one.coming, None)
            one.range = None
        one.coming = None

    def queue_release(self, taken: Range, after: Mark, storage: torch.UntypedStorage | None) -> None:
        """Give `taken`, and `storage`, back behind `after`. The garbage collector calls this: no more is done here."""
        self._releases.append((taken, after, storage))

    def _run_releases(self, reason: str) -> None:
        """Host memory that no fetch reads, and no other code holds, is free again."""
        queued = len(self._releases)  # more may come meanwhile
        self.lanes.synchronize(reason)  # a fetch may have been waited for on another stream than the caller's
        with deferred_interrupts():
            for _ in range(queued):
                taken, after, storage = self._releases.pop(0)
                if taken.is_handed_out:
                    self._releases.append((taken, None, None))
                    continue
                if after is not None:
                    self.lanes.touch_on_host(writes=[taken.tensor])
                del storage
                taken.pool.give_back(taken)


def _drain(lanes: Lanes, pools: object, releases: object, owner: int) -> None:
    """Keeps `pools` and `releases` alive until the lanes are done with them."""
    if os.getpid() != owner:
        return
    with deferred_interrupts():
        if may_wait_for_threads():
            _wait_for(lanes, pools, releases)
        else:
            lanes.after_promises(functools.partial(_wait_for, lanes, pools, releases))


def _wait_for(lanes: Lanes, *in_use: object) -> None:
    lanes.synchronize("drop: nothing is under way")


_lots: weakref.WeakKeyDictionary[Link, weakref.ref[Lot]] = weakref.WeakKeyDictionary()


def lot_for(device: torch.device) -> Lot:
    """The lot of `device`, which lives as long as something that has slept there."""
    link = link_for(device)
    found = _lots[link]() if link in _lots else None
    if found is None:
        found = Lot(link)
        _lots[link] = weakref.ref(found)
    return found


def _batches(storages: Iterable[ParkedStorage]) -> Iterator[list[ParkedStorage]]:
    batch: list[ParkedStorage] = []
    nbytes = 0
    for one in storages:
        batch.append(one)
        nbytes += one.nbytes
        if nbytes >= _BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _segments(storages: Iterable[ParkedStorage]) -> list[list[ParkedStorage]]:
    """Which storages take their memory together: calls of the driver are slow, and each holds up the device.

    Of one kind, so that the memory can go back where another kind stays.
    """
    segments: list[list[ParkedStorage]] = []
    last: dict[str, int] = {}
    room: dict[str, int] = {}
    for one in storages:
        if one.is_small or room.get(one.kind, 0) < one.nbytes:
            segments.append([])
            last[one.kind], room[one.kind] = len(segments) - 1, 0 if one.is_small else _SEGMENT
        segments[last[one.kind]].append(one)
        room[one.kind] -= one.nbytes
    return segments


def asleep_error(label: str, how: str) -> OffstageError:
    return OffstageError(
        f"{label} is asleep: its memory was given back, and {how} was called with it. Expected it awake. Call "
        "offstage.wake(...) first; model.state_dict(), optimizer.state_dict() and offstage.checkpoint.save() read the "
        "host's copy meanwhile."
    )


def _checksum(memory: torch.Tensor) -> torch.Tensor:
    """A number that depends on every bit and its position, made in pieces that need little memory."""
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    whole = memory.numel() // 8 * 8
    tail = memory[whole:].to(torch.int64)
    for words in (*torch.split(memory[:whole].view(torch.int64), _DIGEST_WORDS), tail):
        places = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=memory.device)
        places.mul_(_DIGEST_FACTOR).bitwise_or_(1)
        high = (words >> 29) & ((1 << 35) - 1)  # without the sign, or a word and its complement would be alike
        total = total * _DIGEST_FACTOR + places.mul_(words ^ high).sum()
    return total
