# SPDX-License-Identifier: Apache-2.0
"""`HostLayer`: the weights of one layer, which live on the host and come to the device together.

Between uses a parameter is a host tensor: that is what other code, state dicts and checkpoints see. While its layer
runs forward, `param.data` is a part of the layer's copy on the device, which is one allocation. What autograd saves of
it keeps it alive: a layer's memory goes back when the last reference to it goes, and never under one.

| buffer | written by | read by | separated by |
|---|---|---|---|
| host weight | store | fetch | `used`, when the copy is dropped; the store's update comes after `fetched` |
| host weight, updated by the CPU | host threads | fetch, host threads | `read`; the next fetch waits for `updated` |
| copy on the device | fetch, update | the caller, update, store | `fetched`, `Pending.updated`, `used` |
| spare host weight | store of a speculative update | fetch, once it is the weight | the same, after `flip` |
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from offstage.engine.timer import StepTimer
from offstage.errors import ConfigError
from offstage.lanes.lanes import Lane, Lanes, Mark, Place, copy_work
from offstage.memory.arena import Arena, round_up
from offstage.memory.guarded import Guard, guard, unguard, unguarded


class HostWeight:
    """One parameter of a layer."""

    def __init__(self, name: str, param: nn.Parameter, layer: HostLayer, offset: int, host: torch.Tensor) -> None:
        """`host`: flat host memory for it; `offset`: of its bytes in the layer's copy."""
        self.name, self.param, self.device = name, param, layer.device
        self._layer = weakref.ref(layer)
        self.host = host
        self.spare: torch.Tensor | None = None
        """Where speculative updates go."""
        self.speculated: list[tuple[int, int]] = []
        """Elements whose newest values are in the spare memory, though it is not decided whether they stay."""
        self.first_byte, self._shape, self._version = offset, param.shape, 0
        self._swapped: torch.Tensor | None = None
        """What the parameter is while its layer runs: a part of a copy."""
        self._guard: Guard | None = None
        """What is asked before the host's tensor is used, unless the newest values are there and nowhere else."""
        self._is_late = False
        """Its last update is not settled."""
        self.host.view(self._shape).copy_(param.data)
        param.data = self.host.view(self._shape)

    def link(self, layer: HostLayer) -> None:
        """`layer` owns this. It is known weakly: without a cycle, dropping it frees its memory at once."""
        self._layer = weakref.ref(layer)

    @property
    def layer(self) -> HostLayer:
        """What it comes with."""
        layer = self._layer()
        assert layer is not None, "the layer was dropped"
        return layer

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def on_device(self) -> torch.Tensor:
        """Its part of the layer's copy, flat."""
        copy = self.layer.copy
        assert copy is not None, "the layer is not on the device"
        return copy[self.first_byte : self.first_byte + self.nbytes].view(self.host.dtype)

    @property
    def is_here(self) -> bool:
        return self.layer.copy is not None

    def bring(self) -> None:
        """An update is about to be made."""
        self.layer.bring()

    def copies_up(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) tensors for a fetch: the host's weight, and over it what was updated speculatively since."""
        target, copies = self.on_device(), [(self.on_device(), self.host)]
        for start, stop in self.speculated:
            assert self.spare is not None
            copies.append((target[start:stop], self.spare[start:stop]))
        return copies

    def holds(self, byte: int) -> bool:
        """Whether that byte of the layer's copy is one of this weight's."""
        return self.first_byte <= byte < self.first_byte + self.nbytes

    def swap_in(self) -> None:
        """The parameter is on the device."""
        self._swapped = self.on_device()
        unguard(self.param)
        self.param.data = self._swapped.view(self._shape)
        self._version = self.param._version

    def swap_out(self) -> None:
        """The parameter is the host's tensor."""
        swapped, self._swapped = self._swapped, None
        if swapped is not None and self.param.data_ptr() == swapped.data_ptr():
            if self.param._version != self._version:  # a forward that writes weights
                self.layer.let_write()
                self.host.copy_(swapped)
            self.param.data = self.host.view(self._shape)
        if swapped is not None and self._guard is not None:
            guard(self.param, self._guard)

    def was_updated(self) -> None:
        """The optimizer has moved the parameter's version on, maybe while another thread runs its layer."""
        self._version += 1

    def adopt(self) -> None:
        """Data that other code has given the parameter between two uses wins."""
        self.swap_out()
        with unguarded():
            found = self.param.data
        if found.data_ptr() == self.host.data_ptr() or not found.numel():
            return
        if found.shape != self._shape or found.dtype != self.host.dtype:
            raise ConfigError(
                f"Parameter {self.name!r} lives on the host as {tuple(self._shape)} {self.host.dtype}, and was "
                f"replaced by {tuple(found.shape)} {found.dtype}; expected the same. Move and convert the model first, "
                "then call offload() or offload_activations()."
            )
        self.layer.drop()
        self.layer.let_write()
        self.host.view(self._shape).copy_(found)
        with unguarded():
            self.param.data = self.host.view(self._shape)

    def flip(self) -> None:
        """What was stored to the spare memory is the weight from now on."""
        if self.spare is not None:
            self.host, self.spare = self.spare, self.host
            if self._swapped is None:  # otherwise its layer runs, in another thread
                with unguarded():
                    self.param.data = self.host.view(self._shape)
        self.unspeculate()

    def hold_back(self, by: Guard, *, late: bool) -> None:
        """Outside its layer `by` is asked until the host alone has the newest values. `late`: they are not made yet."""
        self._guard, self._is_late = by, late
        if self._swapped is None:
            guard(self.param, by)

    def was_settled(self) -> None:
        """The caller's stream has waited for its update."""
        self._is_late = False
        self.look()

    def look(self) -> None:
        """Are the newest values on the host and nowhere else? Then it can be read, and written, without asking."""
        if self._guard is not None and not self._is_late and self.layer.is_on_host and not self.is_here:
            unguard(self.param)

    def let_go(self, by: Guard) -> None:
        """`by` is asked no more."""
        if self._guard is by:
            self._guard = None
            unguard(self.param)

    def was_speculated(self, start: int, stop: int) -> None:
        """An update of these elements may be taken back."""
        self.speculated.append((start, stop))

    def unspeculate(self) -> None:
        """Nothing of it is undecided."""
        self.speculated = []

    def release(self, device: torch.device) -> None:
        """The parameter is an ordinary tensor again, on `device`, in memory of its own."""
        self._guard = None
        self.adopt()
        unguard(self.param)
        found = self.param.data
        self._become(torch.empty(found.shape, dtype=found.dtype, device=device).copy_(found))

    def take_back(self) -> None:
        """The parameter is the host's tensor after all."""
        if self.param.data_ptr() != self.host.data_ptr():
            self._become(self.host.view(self._shape))

    def _become(self, data: torch.Tensor) -> None:
        grad = None if self.param.grad is None else self.param.grad.to(data.device)
        self.param.grad = None
        self.param.data = data
        self.param.grad = grad


class HostLayer:
    """The weights of one layer on one device, and their copy there while there is one."""

    def __init__(
        self,
        module: nn.Module,
        params: dict[str, nn.Parameter],
        device: torch.device,
        lanes: Lanes,
        *,
        pin: bool,
        timer: StepTimer | None = None,
    ) -> None:
        """`timer`: notes how long the caller is held up."""
        self.module, self.device = module, device
        self.came_from = next(iter(params.values())).device
        """Where the weights were before."""
        self.copy: torch.Tensor | None = None
        """All weights of the layer, on the device or on their way."""
        self.calls = 0
        """Forwards of it that are running, in any thread."""
        self.fetched: Mark = None
        self.stored: Mark = None
        """Behind it the host has the newest weights."""
        self.used: Mark = None
        """Behind the last store from the copy."""
        self.bring: Callable[[], object] = self.fetch
        """Sends for it."""
        self._lanes, self._timer, self._pin = lanes, timer, pin
        self._place: Place = None
        self._waited = False
        self._versions: list[int] = []
        self.read: Mark = None
        """Behind the last fetch, until the host has waited for it."""
        self.updated: Mark = None
        """Behind it the CPU has updated the weights where they live, until the host has waited for it."""
        self._arenas = _arenas_for(list(params.values()), device, pin=pin)
        self.weights: list[HostWeight] = []
        offset, taken = 0, dict.fromkeys(self._arenas, 0)
        for name, param in params.items():
            host = self._arenas[param.dtype].tensor(taken[param.dtype], param.numel())
            self.weights.append(HostWeight(name, param, self, offset, host))
            taken[param.dtype] += round_up(param.nbytes) // param.itemsize
            offset += round_up(param.nbytes)
        self.nbytes = offset
        self._spares: list[Arena] = []

    @property
    def host_bytes(self) -> int:
        return sum(arena.nbytes for arena in (*self._arenas.values(), *self._spares))

    def link(self, bring: Callable[[], object]) -> None:
        """`bring` is called for updates: whoever owns this may make room first."""
        self.bring = bring
        for weight in self.weights:
            weight.link(self)

    def use(self, lanes: Lanes, timer: StepTimer) -> None:
        """Other lanes from now on. Nothing is under way."""
        self.drop()
        self.let_write()
        self._lanes, self._timer = lanes, timer

    def made_again(self) -> Callable[[], HostLayer]:
        """What makes it again after `close`. It keeps no memory of this one."""
        params = {weight.name: weight.param for weight in self.weights}
        return functools.partial(
            HostLayer, self.module, params, self.device, self._lanes, pin=self._pin, timer=self._timer
        )

    # The copy on the device

    def fetch(self) -> int:
        """Have all weights copied to the device, unless they are there. Returns the bytes that had to move."""
        if self.copy is not None:
            return 0
        with self._timer.working() if self._timer is not None else contextlib.nullcontext():
            return self._fetch()

    @torch.inference_mode(False)  # the copy may be used for training later
    @torch.no_grad()
    def _fetch(self) -> int:
        lanes = self._lanes
        self.copy = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self._place = lanes.here()
        lanes.touch(writes=[self.copy])
        copies = [copy for weight in self.weights for copy in weight.copies_up()]
        try:
            self.read = self.fetched = lanes.submit(
                Lane.WEIGHTS_UP,
                copy_work(copies),
                # The caller's stream has waited for the last store when it dropped the copy before.
                after={"weights: the memory is free": lanes.mark(), "weights: the CPU has updated them": self.updated},
                reads=[host for _, host in copies],
                writes=[target for target, _ in copies],
            )
        except Exception:
            self.copy = None
            raise
        lanes.prioritise(self.fetched)
        self._waited, self.used = False, None
        self.note_versions()
        return sum(host.nbytes for _, host in copies)

    def note_versions(self) -> None:
        """The copy has the newest weights now."""
        self._versions = [weight.param._version for weight in self.weights]

    @property
    def is_current(self) -> bool:
        """Whether nothing has written the parameters since the copy had their newest values."""
        return self._versions == [weight.param._version for weight in self.weights]

    def await_copy(self, weights: Sequence[HostWeight]) -> None:
        """The caller's stream waits for the copy, to read `weights`: others of the layer may be updated meanwhile."""
        assert self.copy is not None
        if not self._waited:
            with self._waiting():
                self._lanes.wait(self.fetched, "weights: the layer is here")
            self._waited = True
        self._lanes.touch(reads=[weight.on_device() for weight in weights])

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return self._timer.waiting() if self._timer is not None else contextlib.nullcontext()

    def drop(self) -> None:
        """Let go of the copy. Views of it that autograd or other code holds stay what they are."""
        if self.copy is None:
            return
        with self._waiting():
            if not self._waited:  # fetched, and not used
                self._lanes.wait(self.fetched, "weights: the fetch is over")
            if self.used is not None:
                self._lanes.wait(self.used, "weights: the layer was stored")
        self._lanes.touch(writes=[self.copy])
        self._lanes.follow(self._place)
        for weight in self.weights if not self.calls else ():  # a forward that runs in another thread goes on with it
            weight.swap_out()
        self.copy = None
        for weight in self.weights:
            weight.look()

    def was_stored(self, mark: Mark) -> None:
        """A part of the copy goes to the host, to where the weights live or to the spare memory."""
        self.used = self.stored = mark

    def was_updated(self, mark: Mark) -> None:
        """The CPU updates weights where they live, until behind `mark`."""
        self.updated = mark

    def forget(self) -> None:
        """Nothing is under way, and what was may have failed: the lanes have been drained."""
        self.read = self.stored = self.updated = self.used = None
        self._waited = True

    @property
    def is_on_host(self) -> bool:
        """Whether the host has waited for the last store and the CPU's last updates: its weights can be read there."""
        return self.stored is None and self.updated is None

    def let_write(self) -> None:
        """The host waits until no copy reads or writes the host's weights."""
        if self.read is None and self.is_on_host:
            return
        if self.read is not None:
            self._lanes.wait_on_host(self.read, "weights: the host may write")
        for mark in (self.stored, self.updated):
            if mark is not None:
                self._lanes.wait_on_host(mark, "weights: the host may read")
        self._lanes.touch_on_host(writes=[weight.host for weight in self.weights])
        self.read = self.stored = self.updated = None
        for weight in self.weights:
            weight.look()

    # Speculative updates

    def add_spare(self, weights: Sequence[HostWeight]) -> None:
        """A second set of host memory for `weights`, which the optimizer updates."""
        new = [weight for weight in weights if weight.spare is None]
        arenas = _arenas_for([weight.param for weight in new], self.device, pin=self._pin)
        taken = dict.fromkeys(arenas, 0)
        for weight in new:
            dtype = weight.host.dtype
            weight.spare = arenas[dtype].tensor(taken[dtype], weight.host.numel())
            taken[dtype] += round_up(weight.nbytes) // dtype.itemsize
        self._spares += arenas.values()

    def drop_spare(self) -> None:
        """There are no speculative updates any more."""
        if self._spares:
            self.let_write()
        for weight in self.weights:
            if any(_is_in(weight.host, arena) for arena in self._spares):  # it lives there since the last flip
                assert weight.spare is not None
                weight.spare.copy_(weight.host)
                weight.flip()
            weight.spare = None
        for arena in self._spares:
            arena.close()
        self._spares.clear()

    def close(self, device: torch.device) -> None:
        """The parameters are ordinary tensors again, on `device`; all of them, or it fails and none is."""
        self.drop()
        self.let_write()
        try:
            for weight in self.weights:
                weight.release(device)
        except BaseException:
            for weight in self.weights:
                weight.take_back()
            raise
        for arena in (*self._arenas.values(), *self._spares):
            arena.close()


def _is_in(tensor: torch.Tensor, arena: Arena) -> bool:
    first = arena.flat.data_ptr()
    return first <= tensor.data_ptr() < first + arena.nbytes


def _arenas_for(params: Sequence[torch.Tensor], device: torch.device, *, pin: bool) -> dict[torch.dtype, Arena]:
    """One for each dtype, with room for `params` one behind the other."""
    elements: dict[torch.dtype, int] = {}
    for param in params:
        elements[param.dtype] = elements.get(param.dtype, 0) + round_up(param.nbytes) // param.itemsize
    return {dtype: Arena(numel, dtype, device, pin=pin) for dtype, numel in elements.items()}
