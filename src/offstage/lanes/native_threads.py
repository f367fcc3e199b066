# SPDX-License-Identifier: Apache-2.0
"""`NativeThreads`: threads that run compiled slices one after the other and never need the interpreter.

[Note: native threads] A thread of Python takes the GIL for every slice, before it and after it. Beside a model whose
own Python keeps the interpreter busy that costs both: the slice waits for the GIL, and the model waits for a thread
that holds it, which may even have lost its CPU meanwhile. So these threads stay in one compiled loop from their start
to their end. They find slices in a ring of tickets and wait for them in a semaphore. The slices of one run count down;
the last posts the semaphore that the run's owner waits in.

| memory | written by | read by | separated by |
|---|---|---|---|
| ring | who adds a run, one at a time | the thread that took the number | the semaphore; at most `_MOST` ahead |
| a run's count | all threads, atomically | all threads | |
| what slices write | the thread with the slice | the owner of the run | the run's semaphore |
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from offstage.lanes.compiled import atomic_add, compiled
from offstage.memory.cpus import stay_on
from offstage.memory.threads import start_some

_Words = np.ndarray[Any, np.dtype[np.int64]]
Ticket = tuple[int, int, int, int]
"""Address of a C function ``void (int64 start, int64 stop, int64 arguments)``, and what to call it with."""

_ROOM = 1 << 13
"""Tickets in the ring."""
_MOST = _ROOM
"""How far the newest ticket may be ahead of the first one of the oldest run that is not over."""
_TICKET_BYTES = 8 * 5
_NEXT, _ADDED, _RING, _TICKETS = 0, 8, 16, 24  # in the control block: numbers, address of the ring, semaphore
_LEFT, _OVER = 0, 8  # in the block of a run: how many of its slices are left, semaphore
_BLOCK_WORDS = 8  # a semaphore is at most 32 bytes

_wait_for = types.ExternalFunction("sem_wait", types.int32(types.int64))
_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_init = types.ExternalFunction("sem_init", types.int32(types.int64, types.int32, types.uint32))


@intrinsic
def _word(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def _call(typingctx: Any, function: Any, start: Any, stop: Any, arguments: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@compiled(nogil=True)
def _work(control):
    """What each thread does: until the semaphore is posted without a ticket."""
    while True:
        while _wait_for(control + _TICKETS) != 0:  # interrupted by a signal
            pass
        number = atomic_add(control + _NEXT, 1)
        if number >= _word(control + _ADDED):
            return
        ticket = _word(control + _RING) + (number % _ROOM) * _TICKET_BYTES
        run = _word(ticket + 32)
        _call(_word(ticket), _word(ticket + 8), _word(ticket + 16), _word(ticket + 24))
        if atomic_add(run + _LEFT, -1) == 1:
            _post(run + _OVER)


@compiled(nogil=True)
def _announce(semaphore, count):
    for _ in range(count):
        _post(semaphore)


@compiled(nogil=True)
def _wait(semaphore):
    while _wait_for(semaphore) != 0:
        pass


@compiled()
def _make_semaphore(address):
    return _init(address, 0, 0)


class NativeThreads:
    """At most `num_threads` of them, as many as the system allows; they end when `close` is called."""

    def __init__(self, num_threads: int, cpus: Collection[int] | None, name: str) -> None:
        self._ring = np.zeros((_ROOM, 5), np.int64)
        self._control = np.zeros(_BLOCK_WORDS, np.int64)
        self._control[_RING // 8] = self._ring.ctypes.data
        self._free: deque[_Words] = deque()
        """Blocks of runs that are over. A thread may still be on its way out of one, so they live as long as this."""
        self._adding = threading.Lock()
        self._added = 0
        self._firsts: set[int] = set()
        """The first tickets of runs that are not over."""
        # Where there are no such semaphores (macOS), the caller does everything.
        works = _make_semaphore(self._control.ctypes.data + _TICKETS) == 0
        # Here, and not in each of the threads or in a finalizer.
        for function, arguments in ((_work, 1), (_wait, 1), (_announce, 2)):
            function.compile((types.int64,) * arguments)
        self.threads = start_some(
            (
                threading.Thread(
                    target=_stay, args=(self._control, self._ring, cpus), name=f"{name}native-{number}", daemon=True
                )
                for number in range(num_threads if works else 0)
            ),
            num_threads,
        )

    def run(self, tickets: Sequence[Ticket]) -> bool:
        """Run all of `tickets`; `False`, and nothing is done, where there is no thread or no room for them."""
        if not tickets:
            return True
        added = self._add(tickets)
        if added is None:
            return False
        block, first = added
        _wait(block.ctypes.data + _OVER)
        with self._adding:
            self._firsts.remove(first)
        self._free.append(block)
        return True

    def _add(self, tickets: Sequence[Ticket]) -> tuple[_Words, int] | None:
        with self._adding:
            first = self._added
            if not self.threads or first + len(tickets) - min(self._firsts, default=first) > _MOST:
                return None
            block = self._free.popleft() if self._free else _new_block()
            block[0] = len(tickets)
            places = np.arange(self._added, self._added + len(tickets)) % _ROOM
            self._ring[places, :4] = tickets
            self._ring[places, 4] = block.ctypes.data
            self._added += len(tickets)
            self._control[_ADDED // 8] = self._added
            self._firsts.add(first)
            _announce(self._control.ctypes.data + _TICKETS, len(tickets))
            return block, first

    def close(self) -> None:
        """Let the threads end, behind all tickets. Finalizers call it, so it waits for no lock."""
        _announce(self._control.ctypes.data + _TICKETS, len(self.threads))


def _stay(control: _Words, ring: _Words, cpus: Collection[int] | None) -> None:
    """`control` and `ring` live as long as the thread."""
    torch.set_flush_denormal(False)  # of this thread: as every accelerator does
    stay_on(cpus)
    _work(control.ctypes.data)


def _new_block() -> _Words:
    block = np.zeros(_BLOCK_WORDS, np.int64)
    _make_semaphore(block.ctypes.data + _OVER)
    return block
