# SPDX-License-Identifier: Apache-2.0
"""Gradients that left the device in backward and wait on the host for the update that needs them.

A `HostGradient` is one parameter's. It leaves when autograd has made it. An update of a chunk fetches its part of it
into the chunk's slot, scaled by what clipping has found meanwhile; or the whole of it returns, to be added to the
gradient of the next micro-batch.

| buffer | written by | read by | separated by |
|---|---|---|---|
| gradient on the device | the caller | store | a mark when it is made; its memory is used again behind `stored` |
| host gradient | store, other code | fetch, return, other code | `stored`; its update is settled before the next |
| gradient that returned | return | the caller | a mark when it is allocated, `returned` |
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offstage.engine.timer import StepTimer
from offstage.lanes.lanes import Lane, Lanes, Mark, copy_work
from offstage.memory.arena import Arena
from offstage.rules.rule import ParamState
from offstage.tensors import norm_of

_orders = itertools.count(1)
_MOST_LEAVING = 4
"""Gradients whose device memory is kept until they have left, before the caller's stream waits for the oldest."""


class HostGradient:
    """One parameter's gradient, flat, in the parameter's memory order."""

    def __init__(self, name: str, numel: int, dtype: torch.dtype, lanes: Lanes, timer: StepTimer, *, pin: bool) -> None:
        """`timer`: notes how long the caller is held up."""
        self.name, self.device, self.dtype = name, lanes.device, dtype
        self.norm: torch.Tensor | None = None
        """Its 2-norm, as torch would compute it; `None` where other code may have written it since."""
        self.scales: list[torch.Tensor] = []
        """What clipping has found: factors by which it is still to be scaled, one after the other."""
        self.here: torch.Tensor | None = None
        """It has returned: the tensor on the device, newer than what is on the host."""
        self.bytes_left = self.bytes_returned = 0
        """So far: to the host, and back as a whole."""
        self.stored: Mark = None
        self.order = 0
        """Stores follow each other on one lane: waiting for a larger number waits for this one."""
        self.read: Mark = None
        """Behind the last copy from the host's memory."""
        self._lanes, self._timer = lanes, timer
        self._arena = Arena(numel, dtype, lanes.device, pin=pin)
        self._leaving: torch.Tensor | None = None
        self._handed_out: list[Callable[[], object]] = []
        """What other code has of it: each returns `None` when it is gone."""
        self._finish: Callable[[], Callable[[], None] | None] | None = None
        self._updating = False
        self._kept: torch.Tensor | None = None
        self._returned: Mark = None

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def flat(self) -> torch.Tensor:
        """The host's memory, for lanes."""
        return self._arena.flat

    # Who else uses it

    def hand_out(self, user: Callable[[], object]) -> None:
        """Other code has it from now on, until `user` returns `None`."""
        self._handed_out = [one for one in self._handed_out if one() is not None]
        self._handed_out.append(user)

    @property
    def is_held(self) -> bool:
        """Whether other code may still read it: then its memory is not used for the next one."""
        return any(one() is not None for one in self._handed_out)

    def postpone(self, finish: weakref.WeakMethod[Callable[[], None]]) -> None:
        """An update is left to the next forward; `finish` makes it."""
        self._finish = finish

    def finish_updates(self) -> None:
        """Other code is about to use it, and may write it: an update that needs it as it is comes first."""
        if self._finish is not None and (finish := self._finish()) is not None:
            finish()
        self._finish = None

    # Its trips

    def leave(self, grad: torch.Tensor, norm: torch.Tensor | None = None, *, updating: bool = False) -> None:
        """Copy `grad`, which the caller's stream has made, to the host. `norm`: its 2-norm.

        `updating`: an update reads it, too, and keeps it.
        """
        lanes = self._lanes
        self.let_go()  # of one that was not used: its step was skipped
        self.norm, self.scales, self.here, self._leaving = norm, [], None, grad
        self._updating, self._finish = updating, None
        lanes.touch(reads=[grad] if updating else (), writes=() if updating else [grad])
        self.order = next(_orders)
        self.bytes_left += grad.nbytes
        with self._timer.working():
            self.stored = lanes.submit(
                Lane.STORE,
                copy_work([(self.flat, grad)]),
                after={"gradient: it is made": lanes.mark()},
                reads=[grad],
                writes=[self.flat],
            )

    def keep(self, grad: torch.Tensor, norm: torch.Tensor) -> None:
        """It stays on the device, where an update reads it, too."""
        self.norm, self.scales, self.here, self._returned, self._kept = norm, [], grad, None, grad

    def let_go_of_kept(self) -> None:
        """What was kept on the device is not needed, unless it has left since."""
        if self._kept is not None and self.here is self._kept:
            self.here = None
        self._kept = None

    def let_go(self) -> None:
        """Its device memory may be used for something else, behind the copy."""
        if self._leaving is not None:
            self._wait(self.stored, "gradient: it has left")
            if not self._updating:
                self._lanes.touch(writes=[self._leaving])
            self._leaving = None

    def _wait(self, mark: Mark, reason: str) -> None:
        with self._timer.waiting():
            self._lanes.wait(mark, reason)

    def send_for(self) -> None:
        """It will be needed on the device: for the sum with the next micro-batch's."""
        if self.here is not None:
            return
        lanes = self._lanes
        self.here = torch.empty(self.flat.numel(), dtype=self.dtype, device=self.device)
        lanes.touch(writes=[self.here])
        self.bytes_returned += self.nbytes
        with self._timer.working():
            self.read = self._returned = lanes.submit(
                Lane.WEIGHTS_UP,
                copy_work([(self.here, self.flat)]),
                after={
                    "gradient: the memory is free": lanes.mark(),
                    "gradient: it is on the host": self.stored,
                },
                reads=[self.flat],
                writes=[self.here],
            )

    def on_device(self) -> torch.Tensor:
        """The tensor that has returned, after the caller's stream has waited for it, scaled as clipping wants it."""
        self.send_for()
        assert self.here is not None
        if self._returned is not None:
            self._wait(self._returned, "gradient: it has returned")
            self._returned = None
        self._lanes.touch(writes=[self.here])
        for factor in self.scales:
            torch._foreach_mul_([self.here], factor.to(self.device))
        self.scales = []
        return self.here

    def forget_here(self) -> None:
        """What has returned was used, and the caller's stream has waited for that."""
        assert self.here is not None
        self._lanes.touch(writes=[self.here])
        self.here = None

    def take_here(self) -> torch.Tensor | None:
        """What has returned, as the gradient that is used from now on: what is on the host is old."""
        here, self.here = (self.on_device() if self.here is not None else None), None
        return here

    def norm_of_type(self, norm_type: float) -> torch.Tensor:
        """Its norm, known since it left, or computed on the device."""
        if self.norm is not None and norm_type == 2.0:
            norm = self.norm.to(self.device)
        else:
            is_on_host = self.here is None and not self.scales
            norm = norm_of(self.on_device(), norm_type)
            if is_on_host:
                self.here = None
        return norm

    def scale(self, factor: torch.Tensor) -> None:
        """Clipping has found this: it is applied where the gradient is used next."""
        self.norm = None
        if self.here is not None:
            torch._foreach_mul_([self.on_device()], factor)
        else:
            self.scales.append(factor)

    def leave_again(self) -> None:
        """What was added or scaled on the device since it returned is on the host, too."""
        if self.here is not None:
            self.leave(self.on_device())

    def on_host(self) -> torch.Tensor:
        """The host's memory, complete, for other code to read and write: the host waits."""
        if self.scales:
            self.on_device()
        self.leave_again()
        self.await_on_host()
        self.let_go()
        self.norm = None
        tensor = self._arena.tensor(0, self.flat.numel())
        self.hand_out(functools.partial(_alive, StorageWeakRef(tensor.untyped_storage())))  # type: ignore[no-untyped-call]
        return tensor

    def await_on_host(self) -> None:
        """The host waits until no copy reads or writes its memory."""
        for mark, reason in (
            (self.stored, "gradient: the host reads it"),
            (self.read, "gradient: the host may write it"),
        ):
            if mark is not None:
                self._lanes.wait_on_host(mark, reason)
        self._lanes.touch_on_host(writes=[self.flat])

    def set(self, grad: torch.Tensor) -> None:
        """A gradient that other code has assigned."""
        self.forget()
        self.await_on_host()
        self.flat.copy_(grad)
        self.norm, self.scales, self.stored = None, [], None

    def forget(self) -> None:
        """It is not needed."""
        self._await_copies()
        self.here, self.scales = None, []

    def forget_marks(self) -> None:
        """The lanes have been drained, and what was under way may have failed."""
        if self._leaving is not None:
            if not self._updating:
                self._lanes.touch(writes=[self._leaving])
            self._leaving = None
        self.stored = self.read = None

    def _await_copies(self) -> None:
        self.let_go()
        if self._returned is not None:
            self._wait(self._returned, "gradient: it has returned")
            assert self.here is not None
            self._lanes.touch(writes=[self.here])
            self._returned = None

    def use(self, lanes: Lanes, timer: StepTimer) -> None:
        """Other lanes from now on: state has moved. The host has waited for the old ones."""
        self._await_copies()
        self.stored = self.read = None
        self.bytes_left = self.bytes_returned = 0
        self._lanes, self._timer = lanes, timer

    @property
    def numbers(self) -> list[torch.Tensor]:
        """What is known of it, each a number on the device. Those that have rested and were not used are not."""
        known = [*self.scales, *([] if self.norm is None else [self.norm])]
        return [number for number in known if number.device.type != "cpu"]

    def rest(self, on_host: Mapping[int, torch.Tensor]) -> None:
        """`on_host`: its `numbers`, by the identity of those on the device."""
        self.scales = [on_host.get(id(factor), factor) for factor in self.scales]
        self.norm = None if self.norm is None else on_host.get(id(self.norm), self.norm)

    def close(self) -> None:
        """Nothing is under way."""
        self._arena.close()


class HostGradients:
    """One device's gradients on the host. Their memory is kept for the next iteration until it is given back."""

    def __init__(self, lanes: Lanes, timer: StepTimer, *, pin: bool) -> None:
        self._left_before = self._returned_before = 0
        self._used: set[ParamState] = set()
        """Whose gradients have left in this iteration."""
        self._lanes, self._timer, self._pin = lanes, timer, pin
        self._of: dict[ParamState, HostGradient] = {}
        self._held: list[HostGradient] = []
        """Earlier ones that other code had when their parameter's next one left."""
        self._leaving: deque[HostGradient] = deque()

    def carry_on(self, other: HostGradients, states: Mapping[torch.Tensor, ParamState]) -> None:
        """State has moved: the gradients of `other`, which are still to be used, are those of the new `states`."""
        other.let_go()
        for state in [state for state in other._of if state.param in states]:
            gradient = self._of[states[state.param]] = other._of.pop(state)
            gradient.use(self._lanes, self._timer)
        self._used = {states[state.param] for state in other._used if state.param in states}

    @property
    def _all(self) -> list[HostGradient]:
        return [*self._of.values(), *self._held]

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self._all)

    @property
    def bytes_left(self) -> int:
        """That have left so far, some of them more than once."""
        return self._left_before + sum(gradient.bytes_left for gradient in self._all)

    @property
    def bytes_returned(self) -> int:
        """Whole gradients that have come back so far."""
        return self._returned_before + sum(gradient.bytes_returned for gradient in self._all)

    def of(self, state: ParamState, *, again: bool = False) -> HostGradient:
        """Room for the gradient of `state`. `again`: for the sum with the one that is there."""
        self._used.add(state)
        if not again and state in self._of and self._of[state].is_held:
            self._held.append(self._of.pop(state))
        if state not in self._of:
            local = state.local
            self._of[state] = HostGradient(
                state.name, local.numel(), local.dtype, self._lanes, self._timer, pin=self._pin
            )
        return self._of[state]

    def leave(
        self, state: ParamState, grad: torch.Tensor, norm: torch.Tensor, *, again: bool = False, updating: bool = False
    ) -> HostGradient:
        """`grad`, flat, leaves for the host. `norm`: its 2-norm. `again`: it is the sum with the one that is there.
        `updating`: an update reads it, too, and keeps it."""
        gradient = self.of(state, again=again)
        gradient.leave(grad, norm, updating=updating)
        self._leaving.append(gradient)
        while len(self._leaving) > _MOST_LEAVING:
            self._leaving.popleft().let_go()
        return gradient

    @property
    def is_larger_than_used(self) -> bool:
        """Whether there is memory for gradients that did not leave in this iteration."""
        return len(self._used) < len(self._of)

    def next_iteration(self) -> None:
        """A step is made: what was kept on the device for it may go."""
        self._used.clear()
        for gradient in self._of.values():
            gradient.let_go_of_kept()

    def drop_unused(self) -> None:
        """Give back memory of gradients that did not leave in this iteration. The lanes have been drained."""
        self.drop(self._of.keys() - self._used)

    def drop_idle(self) -> None:
        """Give back memory of gradients beside weights on the device that wait for no step. The lanes were drained."""
        self.drop([state for state, one in self._of.items() if state.hosted is None and not one.is_held])

    def nbytes_of(self, states: Iterable[ParamState]) -> int:
        """What is there already for `states`."""
        return sum(self._of[state].nbytes for state in states if state in self._of)

    def forget_marks(self) -> None:
        """The lanes have been drained, and what was under way may have failed."""
        for gradient in self._all:
            gradient.forget_marks()

    def let_go_of(self, state: ParamState) -> None:
        if state in self._of:
            self._of[state].let_go()

    def let_go(self) -> None:
        """Device memory of all that are leaving goes back behind their copies."""
        while self._leaving:
            self._leaving.popleft().let_go()
        for gradient in [one for one in self._held if not one.is_held]:
            self._held.remove(gradient)
            gradient.await_on_host()  # a copy from it may still be under way
            self._close(gradient)

    def rest(self) -> None:
        """The job sleeps, and the lanes have been drained: norms and factors wait on the host until they are used."""
        everything = self._all
        for gradient in everything:
            gradient.leave_again()
            gradient.let_go_of_kept()  # of a step that was skipped
            gradient.let_go()
        self.let_go()
        numbers = {id(one): one for gradient in everything for one in gradient.numbers}
        if numbers:
            here = [number.to(self._lanes.device, torch.float64) for number in numbers.values()]  # clipping chose where
            rows = torch.stack(here).cpu()
            found = {key: row.to(one.dtype) for (key, one), row in zip(numbers.items(), rows, strict=True)}
            for gradient in everything:
                gradient.rest(found)

    def drop(self, states: Iterable[ParamState] | None = None) -> None:
        """Give host memory back. The lanes have been drained."""
        self.let_go()
        for state in list(self._of if states is None else states):
            if (gradient := self._of.pop(state, None)) is not None:
                self._used.discard(state)
                gradient.forget()
                self._close(gradient)

    def _close(self, gradient: HostGradient) -> None:
        self._left_before += gradient.bytes_left
        self._returned_before += gradient.bytes_returned
        gradient.close()


def _alive(storage: StorageWeakRef) -> object:
    return None if storage.expired() else storage  # type: ignore[no-untyped-call]
