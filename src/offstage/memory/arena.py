# SPDX-License-Identifier: Apache-2.0
"""`Arena`: exact-size host memory that the accelerator can copy from and to at link speed; and how much is left.

An arena is one private anonymous mapping with huge pages, populated by several threads and then registered with the
accelerator. Its size is exact (torch's pinned allocator rounds up to a power of two), and making it is about ten times
faster than allocating pinned memory.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offstage.config import format_size
from offstage.errors import HostMemoryError, OffstageError
from offstage.memory.claims import Claim, Outstanding, memory_cgroups, others_outstanding, own_outstanding
from offstage.memory.cpus import cpus_near
from offstage.memory.interrupts import deferred_interrupts
from offstage.memory.threads import Crew, together

logger = logging.getLogger("offstage")

CGROUP_ROOT = Path("/sys/fs/cgroup")
ALIGN_BYTES = 256
"""Ranges in an arena, a slot or a pool start at a multiple of this."""
_HUGE_PAGE = 2 * 1024 * 1024
_TOUCH_BYTES = 64 * 1024 * 1024  # what one thread populates at a time
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet in Python's mmap module
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_PAGE = mmap.PAGESIZE
_NO_LIMIT = 1 << 62
"""What cgroup v1 says where there is no limit is more; the kernel takes long to count what is used."""
_handed_out: weakref.WeakValueDictionary[tuple[int, weakref.ref[Arena]], memoryview] = weakref.WeakValueDictionary()
"""The memory under each tensor that `Arena.tensor` has made, as long as the tensor's storage exists."""
_numbers = itertools.count()
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_inherited: list[mmap.mmap] = []
"""Mappings that the child of a fork under way gets."""
_kept_in_child: list[mmap.mmap] = []


def round_up(number: int, to: int = ALIGN_BYTES) -> int:
    """The smallest multiple of `to` that is at least `number`."""
    return -(-number // to) * to


class Arena:
    """One contiguous host allocation of `numel` elements, initially zero."""

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, pin: bool, shared: bool = False
    ) -> None:
        """`device` is the accelerator that will copy; on a CPU device the arena is plain memory.

        `shared`: other processes can map it too (`file`). It gets no huge pages, so making it takes longer.
        """
        self.numel, self.dtype = numel, dtype
        self.nbytes = numel * dtype.itemsize
        self.pinned = pin and device.type != "cpu" and self.nbytes > 0
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._memory: Any = b""
        self.file: int | None = None
        """Shared memory: the descriptor of the file without a name that it is."""
        self._owner = os.getpid()
        self._flat = torch.empty(0, dtype=dtype, device="cpu")
        if self.nbytes:
            by_torch = self.pinned and device.type != "cuda" and not shared  # other accelerators: torch's own pinning
            if shared:
                self.pinned = self.pinned and device.type == "cuda"
                self.file, self._memory = _map_shared(self.nbytes)
                weakref.finalize(self, _close_file, self.file, os.getpid())
            else:
                self._memory = _pinned_by_torch(self.nbytes) if by_torch else map_exact(self.nbytes)
            self._flat = torch.frombuffer(self._memory, dtype=dtype, count=numel)
            if not by_torch:
                self._populate(device)

    def _populate(self, device: torch.device) -> None:
        address = self._flat.data_ptr()
        _first_touch(self._memory, address, self.nbytes, cpus_near(device))
        if self.pinned:
            with deferred_interrupts():  # memory that is registered is unregistered before it is unmapped
                _register(address, self.nbytes, device)
                # Runs once: at close(), at garbage collection, or at interpreter exit.
                self._finalizer = weakref.finalize(self, _unregister, address, device, os.getpid())

    @property
    def flat(self) -> torch.Tensor:
        """All elements, for copies within the library. Tensors that users get come from `tensor()`."""
        check_owner(self._owner)
        return self._flat

    def tensor(self, start: int, numel: int) -> torch.Tensor:
        """Elements `[start, start + numel)` without a copy, in a storage of exactly that size.

        A plain slice of the arena would make `torch.save` write the whole arena.
        """
        check_owner(self._owner)
        if numel == 0:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        offset = start * self.dtype.itemsize
        memory = memoryview(self._memory)
        _handed_out[next(_numbers), weakref.ref(self)] = memory
        return torch.frombuffer(memory, dtype=self.dtype, count=numel, offset=offset)

    def close(self) -> None:
        """Unregister. The caller has waited for the last copy; tensors from `tensor()` stay readable."""
        if self._finalizer is not None:
            self._finalizer()
        self.pinned = False


# fork #


def check_owner(owner: int) -> None:
    """Raise in a forked child of the process `owner`: neither its host memory nor its threads are there."""
    if os.getpid() != owner:
        raise OffstageError(
            f"Host memory of offstage belongs to process {owner}; found this process, {os.getpid()}, a forked child of "
            "it, which has none of it. Take state_dict() before the fork, and clone its tensors if they are pinned; or "
            "save in the parent, where offstage.async_save() goes on in the background."
        )


def _before_fork() -> None:
    """A state dict that exists at a fork can be read in the child. All other state is not inherited.

    Pinned memory is not either: copying it on write could leave the accelerator with the child's pages.
    """
    for (_, arena), memory in list(_handed_out.items()):
        if isinstance(memory.obj, mmap.mmap) and not _is_pinned(arena()):
            memory.obj.madvise(mmap.MADV_DOFORK)
            _inherited.append(memory.obj)


def _after_fork_in_parent() -> None:
    while _inherited:
        _inherited.pop().madvise(mmap.MADV_DONTFORK)


def _after_fork_in_child() -> None:
    # To drop one would unmap a range that this process may have used for something else since.
    _kept_in_child.extend(_mapped)
    _inherited.clear()
    if any(_is_pinned(arena()) for _, arena in list(_handed_out)):
        logger.warning(
            "process %d was forked while tensors of pinned optimizer state existed; reading one of them here ends "
            "the process. Clone them before the fork, or save in the parent",
            os.getpid(),
        )


def _is_pinned(arena: Arena | None) -> bool:
    return arena is not None and arena.pinned


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# How much memory there is #


def check_host_memory(
    need_bytes: int,
    host_budget: int | None,
    already_bytes: int = 0,
    *,
    beside: Mapping[str, int] | None = None,
    what: str = "The state",
    kinds: str = "state",
    remedy: str = "Lower fraction, use master_weights='split' or state_dtype='bfloat16', or free host memory.",
) -> Claim:
    """Raise if `need_bytes` more would exceed `host_budget` or the memory that the machine has left.

    Returns a claim, which other processes respect: the caller takes the memory while holding it. `beside` is what else
    training is going to take on the host, by name; `host_budget`, which is for `kinds`, does not count it. If
    nothing is needed, nothing is checked. What is counted, and when, is in [Note: host memory].
    """
    total = need_bytes + already_bytes
    if host_budget is not None and total > host_budget:
        raise HostMemoryError(
            f"host_budget of {format_size(host_budget)} cannot hold {format_size(total)} of {kinds}. "
            f"Raise it to {format_size(total, up=True)}, lower fraction, or use master_weights='split' or "
            "state_dtype='bfloat16'."
        )
    if need_bytes <= 0:
        return Claim(0)
    beside = {name: nbytes for name, nbytes in (beside or {}).items() if nbytes}
    need, own = need_bytes + sum(beside.values()), own_outstanding()

    def check(limit: str, available: int, rivals: Sequence[Outstanding]) -> None:
        if need + own + sum(one.nbytes for one in rivals) > available:
            parts = "".join(f", {format_size(nbytes)} for {part}" for part, nbytes in beside.items())
            raise HostMemoryError(
                f"{what} needs {format_size(need_bytes)} of host memory{parts}; {limit} {format_size(available)}"
                f"{_claimed_by(own, rivals)}. {remedy}"
            )

    for name, available, _ in _limits():  # what cannot be had in any case stands in nobody's way
        check(name, available, ())
    claim = Claim(need)  # before looking at the claims of others, who may be doing the same now
    try:
        for limit in _limits():
            check(*limit)
    except BaseException:
        claim.release()
        raise
    return claim


# [Note: host memory]
# A check counts what will be taken after it; what has been taken the kernel counts. Some of it is taken at once, under
# the claim that the check returns; the rest is claimed until it has been taken:
#
# - State gets a place (`offload()`, `replan()`, new groups, a load that needs more): arenas at once; staging buffers,
#   and on a CPU, which is its own host, gradients, slots and the window, until the first step has been made.
# - `async_save()`: copies of weights and resident state at once; copies of the chunks that training overwrites, at most
#   all of them, and on a CPU the gradients of the next backward, until the save has ended.
# - Speculative updates: a second set of arenas, and old weights, at once; on a CPU the check leaves room for gradients.
# - Activations: a slab of the pool at once. `weights=True`: weights at once; the check leaves room for their gradients.


def _limits() -> Iterator[tuple[str, int, list[Outstanding]]]:
    """(name, bytes left, claims of other processes that count) for each limit on this process's memory."""
    others = others_outstanding()  # first: what is taken from here on counts twice, and not never
    if (available := mem_available()) is not None:
        yield "MemAvailable", available, others
    for group, left in cgroup_limits():
        within = [one for one in others if any(_is_within(theirs, group) for theirs in one.cgroups)]
        yield "the cgroup's memory limit leaves", left, within


def _is_within(group: tuple[str, str], outer: tuple[str, str]) -> bool:
    """Whether the cgroup `outer` contains `group`. A path with ".." is outside of this process's namespace."""
    (of, path), (outer_of, outer_path) = group, outer
    return of == outer_of and ".." not in path.split("/") and f"{path}/".startswith(f"{outer_path.rstrip('/')}/")


def _claimed_by(own: int, rivals: Sequence[Outstanding]) -> str:
    claims = [f"{format_size(own)} by this process"] if own else []
    claims += [f"{format_size(one.nbytes)} by process {one.pid}" for one in rivals[:8]]
    claims += [f"the rest by {len(rivals) - 8} more"] if len(rivals) > 8 else []
    return f", of which are claimed and not taken yet: {', '.join(claims)}" if claims else ""


def map_exact(nbytes: int) -> mmap.mmap:
    """Private memory in huge pages, not yet populated, that forked children do not share."""
    # MAP_PRIVATE: a shared mapping (Python's default for -1) gets no huge pages, which makes pinning slow.
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked child (a DataLoader worker) must not share these pages: after copy-on-write the accelerator would
    # access the old ones.
    mapping.madvise(mmap.MADV_DONTFORK)
    _mapped.add(mapping)
    if nbytes >= _HUGE_PAGE:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages: slower to pin, otherwise the same
            logger.info("huge pages are not available; pinning host memory will be slower")
    return mapping


def _map_shared(nbytes: int) -> tuple[int, mmap.mmap]:
    """A file without a name, in memory, and a mapping of it. Not /dev/shm, of which containers have little."""
    file = os.memfd_create("offstage")
    try:
        os.ftruncate(file, nbytes)
        mapping = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(file)
        raise
    mapping.madvise(mmap.MADV_DONTFORK)
    _mapped.add(mapping)
    return file, mapping


def _close_file(file: int, owner: int) -> None:
    if os.getpid() == owner:
        os.close(file)


def _first_touch(mapping: mmap.mmap, address: int, nbytes: int, cpus: Collection[int] | None) -> None:
    """Populate every page now, with several threads: the kernel zeroes pages on the core of the faulting thread.

    It takes them from the NUMA node of that core: `cpus` are those of the accelerator's node.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    view = memoryview(mapping)

    def touch(start: int) -> None:
        length = min(_TOUCH_BYTES, nbytes - start)
        if libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
            view[start : start + length : _PAGE] = bytes(-(-length // _PAGE))  # older kernels

    starts = range(0, nbytes, _TOUCH_BYTES)
    if len(starts) == 1 and cpus is None:  # a thread would take longer to start
        touch(0)
        return
    left = iter(starts)

    def populate(_: int, crew: Crew[None]) -> None:
        if cpus is not None and threading.current_thread() is not caller:
            os.sched_setaffinity(0, cpus)  # 0: this thread
        while not crew.stopped and (start := next(left, None)) is not None:
            touch(start)

    # All threads exist before the first touch: starting one needs the lock that populating pages holds.
    caller = threading.current_thread()
    together(populate, min(len(starts), len(cpus or os.sched_getaffinity(0))))


def _pinned_by_torch(nbytes: int) -> Any:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()


def _register(address: int, nbytes: int, device: torch.device) -> None:
    _warn_memlock(nbytes)
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
    if code != 0:
        raise HostMemoryError(
            f"The driver refused to pin {format_size(nbytes)} of host memory (cudaHostRegister: error {code}). "
            "Lower fraction, free host memory, or use pin_memory=False (slower copies)."
        )


def _unregister(address: int, device: torch.device, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has no such pages and must not use the accelerator
    # close() is called after the lanes are drained, but garbage collection and interpreter exit are not. The device
    # faults if a page is unregistered during a copy, so wait for it.
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


@functools.cache
def _warn_memlock_once(soft: int) -> None:
    # A warning only: the NVIDIA driver does not enforce the limit; another driver might.
    logger.warning("RLIMIT_MEMLOCK is %s, less than the host memory that is being pinned", format_size(soft))


def _warn_memlock(nbytes: int) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < nbytes:
        _warn_memlock_once(soft)


def mem_available() -> int | None:
    """MemAvailable in bytes; `None` where the kernel does not report it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def cgroup_available(root: Path | None = None, membership: Path | None = None) -> int | None:
    """Bytes left under the tightest memory limit of this process's cgroup and its ancestors; `None` without a limit."""
    return min((left for _, left in cgroup_limits(root, membership)), default=None)


def cgroup_limits(root: Path | None = None, membership: Path | None = None) -> list[tuple[tuple[str, str], int]]:
    """Bytes left under each memory limit of this process's cgroup and its ancestors, by (controllers, path)."""
    found: list[tuple[tuple[str, str], int]] = []
    for controllers, path in sorted(memory_cgroups(membership)):
        base = CGROUP_ROOT if root is None else root
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            base, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        folder = base / path.lstrip("/")
        for place in [folder, *folder.parents]:
            if place != base and base not in place.parents:
                break
            group = controllers, "/" + str(place.relative_to(base)).removeprefix(".")
            found += [(group, left) for left in _limit_left(place, *names)]
    return found


def _limit_left(folder: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    try:
        text = (folder / limit).read_text().strip()
        if text == "max" or int(text) >= _NO_LIMIT:
            return []
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # Cached file pages count as used, and the kernel frees them when memory is needed.
        used = int((folder / usage).read_text()) - int(stat.get(reclaimable, 0))
        return [max(0, int(text) - used)]
    except (OSError, ValueError):
        return []
