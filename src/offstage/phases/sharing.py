# SPDX-License-Identifier: Apache-2.0
"""`SharedWeights`: a sleeping model's weights for another process on the same host, without a copy.

The host's copy of the weights lies in files without a name that other processes of the same user can map. A generator
reads them there while the trainer sleeps, and copies them to its device itself.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from offstage.errors import OffstageError
from offstage.memory.arena import Arena, check_host_memory, round_up
from offstage.phases.parking import Lot
from offstage.phases.sleepers import sleeper_for
from offstage.tensors import local_of


@dataclass(frozen=True)
class _Place:
    """Where a tensor is: which file, which byte, and what it looks like."""

    file: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class WeightsOnHost:
    """Where the weights of a sleeping model are. Small, and can be pickled."""

    pid: int
    files: dict[int, int]
    """Descriptors in that process, and their sizes."""
    places: dict[str, _Place]

    def open(self) -> dict[str, torch.Tensor]:
        """The tensors, by name, to be read until the trainer wakes. Call it in the process that needs them."""
        mapped = {file: self._map(file, nbytes) for file, nbytes in self.files.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return {name: _tensor(mapped[place.file], place) for name, place in self.places.items()}

    def _map(self, file: int, nbytes: int) -> mmap.mmap:
        path = f"/proc/{self.pid}/fd/{file}"
        try:
            opened = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise OffstageError(
                f"The weights of process {self.pid} cannot be opened ({error}). Expected it alive, of the same user "
                "and on the same host (in one PID namespace), and its model asleep."
            ) from error
        try:
            return mmap.mmap(opened, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(opened)


class SharedWeights:
    """Make it before the first `sleep()` of `model`: its weights then go where other processes can read them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._sleeper = sleeper_for(model)
        self._extra: Arena | None = None
        if self._sleeper.parked:
            raise OffstageError(
                "SharedWeights was made after the model had slept, when its weights had their host memory. Expected it "
                "before the first sleep()."
            )
        self._sleeper.is_public = True

    def while_asleep(self) -> WeightsOnHost:
        """Where the weights and buffers are, for the other process. The model sleeps until that one is done with them.

        What the model has on the host anyway (`weights="host"`), or was kept on the device, is copied to shared memory.
        """
        model = self._model()
        if model is None or not self._sleeper.is_asleep:
            raise OffstageError("SharedWeights.while_asleep() was called while the model is awake. Call sleep() first.")
        arenas = [arena for lot in self._lots() for arena in lot.shared_arenas]
        places, others = {}, {}
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                found = _place_in(arenas, local_of(value))
                if found is None:
                    others[name] = local_of(value)
                else:
                    places[name] = found
        if others:
            extra = self._room_for(others)
            arenas.append(extra)
            places |= _copy_into(extra, others)
        used = {place.file for place in places.values()}
        files = {arena.file: arena.nbytes for arena in arenas if arena.file is not None and arena.file in used}
        return WeightsOnHost(os.getpid(), files, places)

    def _lots(self) -> set[Lot]:
        return {one.lot for one in self._sleeper.parked}

    def _room_for(self, tensors: dict[str, torch.Tensor]) -> Arena:
        nbytes = sum(round_up(max(tensor.nbytes, 1)) for tensor in tensors.values())
        if self._extra is None or self._extra.nbytes < nbytes:
            with check_host_memory(nbytes, None, what="SharedWeights", remedy="Free host memory."):
                self._extra = Arena(nbytes, torch.uint8, torch.device("cpu"), pin=False, shared=True)
        return self._extra


def _place_in(arenas: list[Arena], tensor: torch.Tensor) -> _Place | None:
    for arena in arenas:
        start = tensor.data_ptr() - arena.flat.data_ptr()
        if tensor.device.type == "cpu" and 0 <= start < arena.nbytes:
            assert arena.file is not None
            return _Place(arena.file, start, tensor.dtype, tuple(tensor.shape), tensor.stride())
    return None


def _copy_into(arena: Arena, tensors: dict[str, torch.Tensor]) -> dict[str, _Place]:
    places, start = {}, 0
    for name, tensor in tensors.items():
        contiguous = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        assert arena.file is not None
        places[name] = _Place(arena.file, start, tensor.dtype, tuple(tensor.shape), contiguous.stride())
        if tensor.numel():
            arena.flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += round_up(max(tensor.nbytes, 1))
    return places


def _tensor(memory: mmap.mmap, place: _Place) -> torch.Tensor:
    made = torch.empty(0, dtype=place.dtype, device="cpu")
    if 0 in place.shape:
        return made.view(place.shape)
    room = torch.frombuffer(memory, dtype=torch.uint8, count=len(memory) - place.start, offset=place.start)
    return made.set_(room.untyped_storage(), 0, place.shape, place.stride)  # type: ignore[call-overload, no-any-return]
