# SPDX-License-Identifier: Apache-2.0
"""Mutations of every file of a checkpoint, each loaded in turn by a process of its own with bounded memory.

`python -m tests.support.fuzz FOLDER SEED FLIPS` prints each mutation that was handled wrongly, and what was wrong.

A mutation is refused with one `CheckpointError`, model and optimizer as they were, or loaded right: with the bits that
were saved. Only where nothing in the folder can tell (a folder without a manifest, or with one that was made for the
mutated files) may other data be loaded: `UNVERIFIED`.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import pathlib
import pickle
import random
import resource
import shutil
import socket
import sys
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import offstage
from offstage import checkpoint
from offstage.checkpoint.manifest import MANIFEST, METADATA, sum_of, write_manifest
from offstage.checkpoint.stored import Stored
from offstage.errors import CheckpointError
from tests.support import crafted

MAX_EXTRA_BYTES = 2**30
"""Address space beyond what the process has after loading once: threads reserve some, and no mutation needs any."""
MAX_RESIDENT_BYTES = 400 * 2**20
"""Growth over all mutations."""
MAX_SECONDS = 30.0

REFUSED, RIGHT, UNVERIFIED = "refused", "loaded right", "loaded otherwise"
OURS, RESEALED, STOCK = "ours", "ours with a new manifest", "stock"

WATCHED: list[Any] = [
    *(one for one in vars(pathlib).values() if isinstance(one, type)),
    *(one for one in vars(metadata).values() if isinstance(one, type)),
    *(one for one in vars(filesystem).values() if isinstance(one, type)),
    *(OrderedDict, Counter, torch.Size, torch.Tensor, nn.Parameter),
]
"""Classes that a crafted pickle could change for the whole process."""


class Mutation(NamedTuple):
    """A change of a copy of a checkpoint, and what may come of loading it."""

    name: str
    base: str
    apply: Callable[[Path], None]
    allowed: frozenset[str]


# The checkpoints #


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    return model, optimizer


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_ours(folder: Path, seed: int) -> None:
    model, plain = make(seed)
    optimizer = offstage.offload(plain, min_bytes=0)
    trained(model, optimizer)
    checkpoint.save(folder, model, optimizer, extra=extra(seed))
    optimizer.close()


def save_stock(folder: Path, seed: int) -> None:
    model, optimizer = make(seed)
    trained(model, optimizer)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "extra": extra(seed),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def extra(seed: int) -> dict[str, Any]:
    return {"epoch": seed, "list": [torch.arange(3) + seed, "text", {"a": (1, 2.5)}], "rng": torch.arange(8) * seed}


# Mutations #


class Mutations:
    """All mutations, in an order that the seed decides."""

    def __init__(self, pristine: Path, outside: Path, sentinel: Path, seed: int, flips: int) -> None:
        self._pristine, self._outside, self._sentinel = pristine, outside, sentinel
        self._random = random.Random(seed)
        self._flips = flips

    def all(self) -> Iterator[Mutation]:
        for base in (OURS, RESEALED, STOCK):
            for name in sorted(path.name for path in self.folder(base).iterdir()):
                if not (base == RESEALED and name == MANIFEST):
                    yield from self._bytes(base, name)
                    yield from self._kinds(base, name)
        for base in (RESEALED, STOCK):
            yield from self._metadata(base)
        yield from self._items(STOCK)
        yield self._mutation(OURS, "manifest: no files, and a changed weight", self._without_files)
        for name, content in crafted.manifests((self.folder(OURS) / MANIFEST).read_bytes()).items():
            yield self._mutation(
                OURS, f"manifest: {name}", lambda folder, c=content: _write(folder / MANIFEST, c), RIGHT
            )

    def folder(self, base: str, other: bool = False) -> Path:
        return self._pristine / (("stock" if base == STOCK else "ours") + ("2" if other else ""))

    def _mutation(self, base: str, name: str, change: Callable[[Path], None], *allowed: str) -> Mutation:
        def apply(folder: Path) -> None:
            change(folder)
            if base == RESEALED:
                seal(folder)

        return Mutation(f"{base}: {name}", base, apply, frozenset({REFUSED, *allowed}))

    def _bytes(self, base: str, name: str) -> Iterator[Mutation]:
        """Flipped, cut, grown, zeroed, swapped."""
        content = (self.folder(base) / name).read_bytes()
        size = len(content)
        data = data_ranges(self.folder(base)).get(name, [])

        def made(what: str, changed: bytes, *allowed: str) -> Mutation:
            allowed = (*allowed, RIGHT) if changed == content else allowed
            return self._mutation(base, f"{name} {what}", lambda folder: _write(folder / name, changed), *allowed)

        for _ in range(self._flips):
            at, bit = self._random.randrange(size or 1), self._random.randrange(8)
            if size:
                changed = bytearray(content)
                changed[at] ^= 1 << bit
                yield made(f"bit {bit} of byte {at}", bytes(changed), *self._unverified(base, name, [at], data))
        for length in sorted({0, 1, size // 3, size // 2, size - 1} & set(range(size))):
            yield made(f"cut to {length}", content[:length], *self._unverified(base, name, [], data))
        yield made("grown at the end", content + os.urandom(64), RIGHT)
        for at in (0, size // 2):
            grown = content[:at] + b"\0" * 8 + content[at:]
            yield made(f"grown at {at}", grown, RIGHT, *self._unverified(base, name, range(at, size), data))
        for _ in range(3):
            at = self._random.randrange(size or 1)
            zeros = content[:at] + bytes(len(content[at : at + 16])) + content[at + 16 :]
            yield made(f"16 zeros at {at}", zeros, *self._unverified(base, name, range(at, at + 16), data))
        for other in sorted((self.folder(base) / one).name for one in self.folder(base).iterdir()):
            if other != name:
                content_of = (self.folder(base) / other).read_bytes()
                # With as many files as a machine with many CPUs writes, two can have items of the same form.
                alike = base != OURS and all(one.startswith("__") for one in (name, other))
                allowed = [UNVERIFIED] if alike else []
                yield made(f"with the content of {other}", content_of, *([RIGHT] if name == ".offstage" else allowed))
        other_run = (self.folder(base, other=True) / name).read_bytes()
        if base != OURS:  # the other one's `.metadata` may be the same
            yield made("of another checkpoint", other_run, RIGHT, UNVERIFIED)
        elif name != MANIFEST and other_run != content:
            yield made("of another checkpoint", other_run, *([RIGHT] if name == ".offstage" else []))

    def _unverified(self, base: str, name: str, places: Any, data: list[range]) -> list[str]:
        """What may come of changed bytes at `places`, beside a refusal."""
        if base == OURS or not (base == STOCK or name.startswith((".metadata", "__"))):
            return [RIGHT] if name in (MANIFEST, ".offstage") else []
        if name == METADATA or any(at in one for at in places for one in data):
            return [RIGHT, UNVERIFIED]
        return [RIGHT]

    def _kinds(self, base: str, name: str) -> Iterator[Mutation]:
        """Not a file any more, or a file elsewhere. A new manifest cannot be made for those."""
        if base == RESEALED:
            return
        # Without its marker a checkpoint with a manifest is complete; without its manifest, it is not ours any more.
        needed = [RIGHT] if name == ".offstage" else []
        outside = self._outside

        def put(what: str, make: Callable[[Path], None], *allowed: str) -> Mutation:
            def change(folder: Path) -> None:
                (folder / name).unlink()
                make(folder / name)

            return self._mutation(base, f"{name} {what}", change, *allowed, *needed)

        yield put("removed", lambda path: None)
        yield put("a folder", Path.mkdir)
        yield put("a FIFO", os.mkfifo)
        yield put("a socket", _socket)
        yield put("a link to the same file outside", lambda path: path.symlink_to(outside / f"{base}{name}"))
        yield put("a link to another file", lambda path: path.symlink_to("/etc/passwd"))
        yield put("a link to a device", lambda path: path.symlink_to("/dev/zero"))
        yield put("a link to nowhere", lambda path: path.symlink_to("nowhere"))
        yield put("a link to itself", lambda path: path.symlink_to(name))
        yield put("a link to the folder", lambda path: path.symlink_to("."))

        def inside(path: Path) -> None:
            shutil.copy(self.folder(base) / name, path.with_name("real"))
            path.symlink_to("real")

        yield put("a link within the folder", inside, RIGHT)

    def _without_files(self, folder: Path) -> None:
        name, ranges = next(iter(data_ranges(folder).items()))
        content = bytearray((folder / name).read_bytes())
        content[ranges[0].start] ^= 1
        _write(folder / name, bytes(content))
        _write(folder / MANIFEST, crafted.manifests((folder / MANIFEST).read_bytes())["no files"])

    def _metadata(self, base: str) -> Iterator[Mutation]:
        content = (self.folder(base) / METADATA).read_bytes()

        def made(what: str, changed: bytes, *allowed: str) -> Mutation:
            return self._mutation(
                base, f"metadata: {what}", lambda folder: _write(folder / METADATA, changed), *allowed
            )

        for name, changed in crafted.pickles(self._sentinel).items() if base == STOCK else ():
            yield made(name, changed)
        for module, name in crafted.CLASSES:
            yield made(
                f"right, and a state of {name}", crafted.metadata_with(crafted.build_on(module, name, "x"))(content)
            )
        before = crafted.call("os", "system", crafted.text(f"touch {self._sentinel}")) + b"0"
        yield made("right, and a call", crafted.metadata_with(before)(content))
        for name, change in crafted.statements().items() if base == STOCK else ():
            saved = pickle.loads(content)
            change(saved)
            yield made(name, pickle.dumps(saved), RIGHT)
        saved = pickle.loads(content)
        for one, other in itertools.pairwise(sorted(saved.storage_data, key=str)[:8]):
            swapped = pickle.loads(content)
            places = swapped.storage_data
            places[one], places[other] = places[other], places[one]
            yield made(f"{one.fqn} and {other.fqn} swapped", pickle.dumps(swapped), UNVERIFIED)

    def _items(self, base: str) -> Iterator[Mutation]:
        """Crafted items in the place of a tensor, of an object and of an option."""
        for target in ("model.0.weight", "extra.epoch", "optim.param_groups.0.lr"):
            for name, item in crafted.items(self._sentinel).items():
                # Plain data of another value is data: only the object's user can tell.
                allowed = [UNVERIFIED] if target == "extra.epoch" else []
                yield self._mutation(
                    base, f"{target}: {name}", lambda folder, t=target, i=item: crafted.put_item(folder, t, i), *allowed
                )


def seal(folder: Path) -> None:
    """A new manifest: the mutation is the writer's intention."""
    files = [path for path in folder.iterdir() if path.name not in (MANIFEST, ".offstage")]
    write_manifest(folder, {path.name: sum_of(path) for path in files}, about={})


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address may be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def data_ranges(folder: Path) -> dict[str, list[range]]:
    """The bytes of each file that are elements of a tensor: where there is no manifest, nothing can tell a change."""
    ranges: dict[str, list[range]] = {}
    with Stored(folder) as stored:
        for tensor in stored._tensors.values():
            for chunk in tensor.chunks:
                stored.check(next(n for n, t in stored._tensors.items() if t is tensor), chunk.box)
                header = stored._headers[chunk.item]
                place = range(header.data_offset, header.data_offset + header.nbytes)
                ranges.setdefault(chunk.item.file, []).append(place)
        for item in stored._objects.values():  # which may contain tensors
            content = (folder / item.file).read_bytes()[item.offset : item.offset + item.length]
            if b"data/0" in content:
                ranges.setdefault(item.file, []).append(range(item.offset, item.offset + item.length))
    return ranges


# Trials #


class Trials:
    """A model and an optimizer that every mutation is loaded into."""

    def __init__(self, root: Path, pristine: Path, outside: Path, sentinel: Path) -> None:
        self._work, self._outside_folder, self._sentinel = root / "work", outside, sentinel
        self._pristine = pristine
        self._model, plain = make(3)
        self._optimizer = offstage.offload(plain, min_bytes=0)
        trained(self._model, self._optimizer)
        self._before = root / "before"
        checkpoint.save(self._before, self._model, self._optimizer)
        checkpoint.load(self._before, self._model, self._optimizer)
        self._was = self._state()
        self._options = [set(group) for group in self._optimizer.param_groups]
        self._right = {}
        for base, folder in ((OURS, "ours"), (RESEALED, "ours"), (STOCK, "stock")):
            found = checkpoint.load(pristine / folder, self._model, self._optimizer)
            self._right[base] = [*self._state(), *leaves(found)]
        checkpoint.load(self._before, self._model, self._optimizer)
        assert same(self._state(), self._was)
        self._classes = {one: dict(vars(one)) for one in WATCHED}
        self._outside = self._all_outside()

    def run(self, mutation: Mutation) -> str | None:
        """What was wrong; `None` if nothing was."""
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._pristine / ("stock" if mutation.base == STOCK else "ours"), self._work)
        mutation.apply(self._work)
        found: Any = None
        start = time.monotonic()
        faulthandler.dump_traceback_later(2 * MAX_SECONDS, exit=True)
        try:
            found = checkpoint.load(self._work, self._model, self._optimizer)
            outcome = None
        except CheckpointError as error:
            outcome = str(error)
        except BaseException as error:
            return self._restored(f"{type(error).__name__} instead of CheckpointError: {str(error)[:300]}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        if (seconds := time.monotonic() - start) > MAX_SECONDS:
            return f"took {seconds:.0f} s"
        if self._sentinel.exists():
            self._sentinel.unlink()
            return "ran code of the checkpoint"
        if changed := [one for one in WATCHED if dict(vars(one)) != self._classes[one]]:
            return f"changed {changed}"
        if self._all_outside() != self._outside:
            return "touched a file outside"
        return self._wrong_refusal(outcome) if outcome is not None else self._wrong_load(found, mutation)

    def _wrong_refusal(self, message: str) -> str | None:
        try:
            unchanged = same(self._state(), self._was)
        except Exception as error:
            return self._restored(f"refused, and left the state lost ({error})")
        if not unchanged:
            return self._restored(f"refused, and left a changed state: {message[:300]}")
        if "\n" in message or len(message) > 6000 or "ound" not in message:
            return f"a message that is not one of ours: {message[:300]}"
        return None

    def _wrong_load(self, found: Any, mutation: Mutation) -> str | None:
        outcome = RIGHT if same([*self._state(), *leaves(found)], self._right[mutation.base]) else UNVERIFIED
        return self._restored(None if outcome in mutation.allowed else outcome)

    def _restored(self, wrong: str | None) -> str | None:
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for added in group.keys() - options:
                del group[added]
        checkpoint.load(self._before, self._model, self._optimizer)
        assert same(self._state(), self._was)
        return wrong

    def _state(self) -> list[Any]:
        return [*leaves(self._model.state_dict()), *leaves(self._optimizer.state_dict())]

    def _all_outside(self) -> list[Any]:
        return [(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in self._outside_folder.iterdir()]


def leaves(value: Any) -> list[Any]:
    """The values in nested containers, tensors as bytes."""
    if isinstance(value, torch.Tensor) and value.numel() > 10_000:  # a small storage, repeated
        return [value.dtype, tuple(value.shape), value.stride()]
    if isinstance(value, torch.Tensor):
        return [
            value.dtype,
            tuple(value.shape),
            value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        ]
    if isinstance(value, dict):
        return [one for key in sorted(value, key=str) for one in [key, *leaves(value[key])]]
    if isinstance(value, (list, tuple)):
        return [one for inner in value for one in leaves(inner)]
    return [repr(value)]


def same(one: list[Any], other: list[Any]) -> bool:
    return one == other


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(folder: str, seed: str, flips: str) -> int:
    logging.getLogger("offstage").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    root = Path(folder)
    pristine, outside, sentinel = root / "pristine", root / "outside", root / "ran"
    for name, seed_of in (("", 1), ("2", 2)):
        save_ours(pristine / f"ours{name}", seed_of)
        save_stock(pristine / f"stock{name}", seed_of)
    outside.mkdir()
    for base, name in ((OURS, "ours"), (STOCK, "stock")):
        for path in (pristine / name).iterdir():
            shutil.copy(path, outside / f"{base}{path.name}")
    trials = Trials(root, pristine, outside, sentinel)
    mutations = list(Mutations(pristine, outside, sentinel, int(seed), int(flips)).all())
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_EXTRA_BYTES, -1))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wrong = 0
    for mutation in mutations:
        (root / "last").write_text(mutation.name)
        if (what := trials.run(mutation)) is not None:
            wrong += 1
            say(f"{mutation.name}: {what}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
    if grown > MAX_RESIDENT_BYTES:
        wrong += 1
        say(f"took {grown / 2**20:.0f} MiB of memory")
    say(f"{len(mutations)} mutations, {wrong} wrong, {grown / 2**20:.0f} MiB")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
