# SPDX-License-Identifier: Apache-2.0
"""`Batches`: sequences of a `Corpus` in a shuffled order that a resumed run continues exactly; `Feed`: those of a step.

    corpus = Corpus(paths, cache=run_folder)
    training, held_out = corpus.split(0.05)
    batches = Batches(training, sequence=256, batch=8, seed=0, rank=rank, world=world)
    tokens = batches.next()  # [batch, sequence + 1]: inputs and, one further, targets

The order is a formula, not a table: `Shuffle` computes the sequence at a position of an epoch, so that only the
position is saved, and the data may have any size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from offstage import ConfigError
from offstage.train.corpus import ByteRange, Corpus

__all__ = ["Batches", "ByteRange", "Corpus", "Shuffle"]


class Shuffle:
    """A permutation of ``range(size)`` that depends on its key alone and takes no memory.

    A Feistel network permutes the smallest range of 2^(2 n) numbers that holds `size`; a result outside `size` is
    permuted again until it is inside, which keeps it a permutation.
    """

    ROUNDS = 6

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._keys = [
            int.from_bytes(hashlib.blake2b(f"{key} {number}".encode(), digest_size=8).digest(), "big")
            for number in range(self.ROUNDS)
        ]

    def __call__(self, position: int) -> int:
        found = self._permuted(position)
        while found >= self.size:  # less than 4 times on average
            found = self._permuted(found)
        return found

    def _permuted(self, number: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = number >> self._half_bits, number & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << self._half_bits | right


def _mixed(number: int) -> int:
    """64 bits, each of which depends on all bits of `number`: multiplications carry upwards, shifts downwards."""
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        number = (number ^ number >> 31) * factor & 0xFFFF_FFFF_FFFF_FFFF
    return number ^ number >> 32


class Batches:
    """An endless stream of batches. An epoch has every sequence once, in an order that differs between epochs.

    Sequences do not overlap, except for the token that is the last target of one and the first input of the next. Ranks
    take turns of `batch` sequences from one stream: the sequences of a step depend on their number, not on how they
    are spread over ranks and micro-batches.
    """

    def __init__(
        self, data: Corpus | ByteRange, sequence: int, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        if not 0 <= rank < world:
            raise ConfigError(
                f"rank expects a number from 0 to world - 1 = {world - 1}; found {rank}. Ranks count from 0."
            )
        self._data, self._sequence, self._batch, self._seed = data, sequence, batch, seed
        self._rank, self._world = rank, world
        self.num_sequences = (len(data) - 1) // sequence
        if self.num_sequences < 1:
            raise ConfigError(
                f"Expected data of at least one sequence of {sequence} {data.unit}s and its last target, "
                f"{sequence + 1} in all; {data} has {len(data)}. Give more data, or lower data.sequence."
            )
        self.position = 0
        """Sequences that all ranks together have taken so far."""
        self._epoch, self._shuffle = -1, Shuffle(1, "")
        self._identity = {"sequence": sequence, "seed": seed, "data": data.fingerprint()}

    @property
    def epoch(self) -> float:
        """How often all data has been used."""
        return self.position / self.num_sequences

    def next(self) -> torch.Tensor:
        """This rank's next sequences, [batch, sequence + 1] in int64: inputs are all but the last, targets the rest."""
        first = self.position + self._rank * self._batch
        rows = [self._read(self._number_at(position)) for position in range(first, first + self._batch)]
        self.position += self._batch * self._world
        return torch.stack(rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.next()

    def state_dict(self) -> dict[str, Any]:
        """The exact position, and the identity of the data. The same on all ranks."""
        return {"position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there; the number of ranks and the batch may differ."""
        for name, expected in self._identity.items():
            if state.get(name) != expected:
                raise ConfigError(
                    f"The position to resume from is of other data: expected {name}={state.get(name)!r} as when it was "
                    f"saved, found {expected!r}. Give the same data and settings as then, or begin a new run."
                )
        self.position = state["position"]

    def _number_at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_sequences)
        if epoch != self._epoch:
            self._epoch, self._shuffle = epoch, Shuffle(self.num_sequences, f"{self._seed} {epoch}")
        return self._shuffle(place)

    def _read(self, number: int) -> torch.Tensor:
        start = number * self._sequence
        return torch.from_numpy(self._data.read(start, start + self._sequence + 1).astype(np.int64))


class Feed:
    """Copies the micro-batches of one step to the device, one step prepared ahead."""

    def __init__(self, batches: Batches, micro_batches: int, device: torch.device) -> None:
        self._batches, self._micro_batches, self._device = batches, micro_batches, device
        self._prepared: torch.Tensor | None = None
        self._position = batches.state_dict()

    @property
    def position(self) -> dict[str, Any]:
        """After the last step taken; a prepared step does not count."""
        return self._position

    def go_to(self, position: dict[str, Any]) -> None:
        """Continue from there."""
        self._batches.load_state_dict(position)
        self._position, self._prepared = self._batches.state_dict(), None

    def prepare(self) -> None:
        """Read the next step's batch, while the device is busy."""
        if self._prepared is None:
            tokens = torch.cat([self._batches.next() for _ in range(self._micro_batches)])
            self._prepared = tokens if self._device.type == "cpu" else tokens.pin_memory()

    def take(self) -> torch.Tensor:
        """[sequences, sequence + 1] on the device: all micro-batches of the next step."""
        self.prepare()
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        self._position = self._batches.state_dict()
        return prepared.to(self._device, non_blocking=True)
