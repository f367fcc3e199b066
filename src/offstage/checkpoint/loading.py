# SPDX-License-Identifier: Apache-2.0
"""`load`: a checkpoint of any plan and world size into a model and an optimizer, in place.

Every rank checks everything before any rank writes: that the checkpoint is complete, that its files are what was saved,
that every tensor exists with the right shape and all of its bytes. Weights are read into the parameters and state into
the arenas, block by block, straight from the files: no second copy on the device, and on the host none beyond a block.
An error on one rank is raised on all.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from offstage.checkpoint.catalogue import (
    ABSENT_SHARDS,
    EXTRA,
    GROUPS,
    MODEL,
    OPTIM,
    SHARD_SCALARS,
    Layouts,
    checked_optimizer,
    clean_name,
    name_in,
    part_of,
    same_options,
    synchronize_devices,
    turn_of,
)
from offstage.checkpoint.extra_state import saved_extra_state
from offstage.checkpoint.files import one_error, read_whole
from offstage.checkpoint.fused import Splitter, by_metadata
from offstage.checkpoint.manifest import MANIFEST, MARKER, METADATA, check_listed, checked_folder, read_manifest, verify
from offstage.checkpoint.metadata import MAX_BYTES
from offstage.checkpoint.parts import Part
from offstage.checkpoint.ranks import Ranks, file_threads
from offstage.checkpoint.shards import box_of, check_shards, read_table
from offstage.checkpoint.stored import Stored
from offstage.checkpoint.threads import in_threads
from offstage.engine import named_state
from offstage.errors import CheckpointError, ConfigError
from offstage.memory.interrupts import deferred_interrupts
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from offstage.optimizer.state_dict import completed_options, replace_groups
from offstage.rules import master_weights
from offstage.rules.rule import MASTER_KEY, MASTER_LOW_KEY, ParamState
from offstage.tensors import flat_like, is_dense, local_of

logger = logging.getLogger("offstage")

_BLOCK = 16 * 1024 * 1024
"""Elements read at a time."""
_SPLIT_BYTES = 40
"""Host bytes needed to split one master, temporaries included."""
_EXTRA_STATE = "_extra_state"


@torch.no_grad()
def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    checksums: bool = True,
    splitter: Splitter = by_metadata,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load what `save` saved, or `torch.distributed.checkpoint` under the same names; returns `extra`.

    Every rank calls it. `checksums=False` compares only the sizes of the files. A folder that
    `torch.distributed.checkpoint` wrote has no manifest and is loaded without either check, with a warning.
    """
    with turn_of(optimizer):
        return _load(folder, model, optimizer, checksums, splitter, Ranks(group))


def _load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    checksums: bool,
    splitter: Splitter,
    ranks: Ranks,
) -> dict[str, Any]:
    with ranks.failing_together("Verifying the checkpoint"):
        path = checked_folder(folder)
        offloaded = checked_optimizer(optimizer)
        with one_error(path):
            is_verified = _verify(path, ranks, checksums)
            content = zlib.crc32(read_whole(path, _summary(path), MAX_BYTES))
    _check_one_checkpoint(ranks.gather((str(path), content)))
    stored = None
    with ranks.failing_together("Comparing the checkpoint with the model"):
        stored = Stored(path)
        if is_verified:
            check_listed(path, stored.files)
        job = _Load(stored, model, offloaded, splitter)
        if offloaded is not None:
            runtime_of(offloaded).iteration.give_up("A checkpoint was loaded between backward and step().")
    assert stored is not None
    with stored:
        try:
            with ranks.failing_together("Making room for the checkpoint"):
                job.prepare()
        except BaseException:  # of this rank or of another
            job.restore_options()
            raise
        try:
            with ranks.failing_together("Loading the checkpoint"):
                job.run()
        except BaseException as error:
            if not (job.is_loaded and ranks.size == 1):  # a Ctrl-C that was deferred until everything was written
                job.lose(error)
            raise
    return job.extra


def _summary(folder: Path) -> str:
    """The file that identifies the checkpoint."""
    return MANIFEST if (folder / MANIFEST).exists() else METADATA


def _check_one_checkpoint(found: Sequence[tuple[str, int]]) -> None:
    """Raise, on all ranks, if they are about to load different checkpoints."""
    for rank, (folder, content) in enumerate(found):
        if content != found[0][1]:
            raise CheckpointError(
                f"Ranks were given different checkpoints: rank 0 {found[0][0]}, rank {rank} {folder}. Expected one for "
                "all. Choose it on one rank and broadcast the choice, or copy it to every rank's disk."
            )


def _verify(folder: Path, ranks: Ranks, checksums: bool) -> bool:
    """Check sizes on every rank, which may have another disk, and each file's content on one rank.

    `False` if there is nothing to check them against: stock torch wrote the folder.
    """
    if (folder / METADATA).exists() and not any((folder / name).exists() for name in (MANIFEST, MARKER)):
        logger.warning("%s has no manifest: torch.distributed.checkpoint wrote it, and nothing can be verified", folder)
        return False
    verify(folder, checksums=False)
    if checksums:
        names = sorted(read_manifest(folder).files)
        verify(folder, names[ranks.rank :: ranks.size], threads=file_threads())
    return True


class _Load:
    """One rank's load: the constructor checks, `run` loads."""

    def __init__(
        self, stored: Stored, model: nn.Module, optimizer: OffloadedOptimizer | None, splitter: Splitter
    ) -> None:
        self._stored, self._optimizer = stored, optimizer
        self._layouts = Layouts(model, splitter)
        self._by_prefix: dict[str, list[str]] = {}
        for name in stored.names:
            self._by_prefix.setdefault(f"{name.rpartition('.')[0]}.", []).append(name)
        self._tensors: list[tuple[list[Part], torch.Tensor]] = []
        self._needed: list[Part] = []
        """What `run` will read."""
        self._objects: dict[str, Any] = {}
        self._model = model
        self._check_model()
        self.extra = self._extra()
        """The `extra` that was saved."""
        self._absent = read_table(stored, ABSENT_SHARDS)
        self._unequal = read_table(stored, SHARD_SCALARS, dict)
        self._scalars: dict[torch.Tensor, dict[str, Any]] = {}
        """State kept once per parameter. Without an entry, a parameter has no state in the checkpoint."""
        self._options: list[dict[str, Any]] = []
        self._before: list[dict[str, Any]] = []
        self._with_state: list[torch.Tensor] = []
        """Parameters for which state was saved."""
        self._group_of = {} if optimizer is None else runtime_of(optimizer).group_of()
        self.is_loaded = False
        if optimizer is not None:
            runtime_of(optimizer).follow_groups()
            names = {held.param: name_in(self._layouts, held) for held in runtime_of(optimizer).all_states()}
            self._with_state = [param for param, name in names.items() if self._saved_keys(name)]
            try:
                self._options = self._checked_options(optimizer)
                for group, options in zip(optimizer.param_groups, self._options, strict=True):
                    for param in group["params"]:
                        self._check_state(runtime_of(optimizer).state_of(param), options)
            except ConfigError as error:
                raise CheckpointError(f"{stored.folder}: {error}") from error
        self._check_files()

    # Checking

    def _check_model(self) -> None:
        model = self._model
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        own = {clean_name(model, name): tensor for name, tensor in named}
        for name, value in get_model_state_dict(model).items():
            if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == _EXTRA_STATE:
                self._objects[name] = saved_extra_state(self._stored, f"{MODEL}.{name}", value, self._value)
                continue
            if name not in own:
                raise CheckpointError(
                    f"{self._stored.folder}: {name!r} is in the model's state dict and is neither a parameter nor a "
                    "buffer of it; expected tensors that can be loaded in place. Load it with model.load_state_dict()."
                )
            target = own[name]  # a state dict hook may have returned a copy
            parts = [part.renamed(f"{MODEL}.{part.name}") for part in self._layouts.parts(name, target)]
            for part in parts:
                self._check(part, f"Tensor {name!r} of the model", target.dtype)
            self._tensors.append((parts, target))

    def _check(self, part: Part, what: str, dtype: torch.dtype | None) -> None:
        """Raise unless `part` is stored, with the right shape and dtype."""
        if part.name not in self._stored.tensors:
            raise CheckpointError(
                f"{self._stored.folder}: {what} is expected under the name {part.name!r}; found nothing of that name. "
                "Load a checkpoint of this model; fused parameters need the names they were saved with (split_as)."
            )
        shape, found = self._stored.tensors[part.name]
        if shape != part.shape:
            raise CheckpointError(
                f"{self._stored.folder}: {what}: expected shape {part.shape}, found {shape}. Load a checkpoint of this "
                "model."
            )
        if found != dtype if dtype is not None else not found.is_floating_point:
            raise CheckpointError(
                f"{self._stored.folder}: {what}: expected {dtype or 'a floating point format'}, found {found}. Convert "
                "the model before it is sharded and offloaded, or load a checkpoint in its format."
            )
        self._needed.append(part)

    def _check_files(self) -> None:
        """Raise unless the files have all that will be read: later the model would be left between two states."""
        in_threads(lambda part: self._stored.check(part.name, part.box), self._needed, file_threads())

    def _check_state(self, held: ParamState, options: dict[str, Any]) -> None:
        name = name_in(self._layouts, held)
        for part in self._layouts.parts(name, held.param):
            check_shards(self._stored, part, (self._absent, self._unequal))
        names = self._saved_keys(name)
        if not names:
            return
        named_state.check_complete(held, names, options)
        strange = [key for key in names - held.rule.names if self._stored.tensors.get(self._path(name, key), ((),))[0]]
        if strange:
            raise CheckpointError(
                f"{self._stored.folder}: parameter {name!r} keeps {sorted(held.rule.names)}; found {strange[0]!r}. "
                "Load a checkpoint of the same optimizer class and options."
            )
        self._check_parts_agree(name, names - held.rule.names)
        for key in names & held.rule.names:
            for part in self._parts(held, name, key):
                self._check(part, f"State {key!r} of parameter {name!r}", torch.float32 if key == MASTER_KEY else None)
        if not self._is_absent(held, name):
            self._scalars[held.param] = self._saved_scalars(held, name)
            for key, value in self._scalars[held.param].items():
                named_state.check_scalar(held, key, value)

    def _saved_keys(self, name: str) -> set[str]:
        """The state keys saved for a parameter: the same for all parts of a fused one, and some for it as a whole."""
        prefixes = {self._path(name, ""), f"{OPTIM}.state.{name}."}
        return {one.removeprefix(prefix) for prefix in prefixes for one in self._by_prefix.get(prefix, ())}

    def _path(self, name: str, key: str) -> str:
        return f"{OPTIM}.state.{self._layouts.saved_names(name)[0]}.{key}"

    def _parts(self, held: ParamState, name: str, key: str) -> list[Part]:
        keys = held.keys if not held.frozen else held.rule.keys(held.local, self._group_of[held.param])
        shaped = next((one.shape for one in keys if one.name == key and one.shape is not None), None)
        if shaped is not None:
            return [part_of(f"{OPTIM}.state.{name}.{key}", torch.empty(shaped, dtype=torch.float32, device="meta"))]
        parts = self._layouts.parts(name, held.param)
        return [part.renamed(f"{OPTIM}.state.{part.name}.{key}") for part in parts]

    def _checked_options(self, optimizer: OffloadedOptimizer) -> list[dict[str, Any]]:
        """The saved options of each of the optimizer's groups, found by the names of its parameters."""
        groups = self._saved_groups()
        by_name = {param: group for group in groups.values() for param in group["params"]}
        found = []
        for place, group in enumerate(optimizer.param_groups):
            saved = [name for p in group["params"] for name in self._layouts.saved_names(self._layouts.name_of[p])]
            missing = [name for name in saved if name not in by_name]
            if missing:
                raise CheckpointError(
                    f"{self._stored.folder}: parameter {missing[0]!r} of group {place} is in no saved group; expected "
                    f"all {len(saved)}, found {len(saved) - len(missing)}. Load a checkpoint of an optimizer for the "
                    "same parameters."
                )
            same = groups.get(str(place), {})
            found_in = [by_name[name] for name in saved] or ([same] if not same.get("params", True) else [])
            options = [{k: v for k, v in one.items() if k != "params"} for one in found_in]
            if not all(same_options(one, options[0]) for one in options[1:]):
                raise CheckpointError(
                    f"{self._stored.folder}: the parameters of group {place} were in groups with different options; "
                    "expected one. Group the parameters as they were when the checkpoint was saved."
                )
            found.append(options[0] if options else {})
        rest = iter(completed_options(optimizer, runtime_of(optimizer), [dict(one) for one in found if one]))
        return [next(rest) if options else {} for options in found]

    def _saved_groups(self) -> dict[str, dict[str, Any]]:
        """The saved groups by number; by parameter, where they were saved with `flatten_optimizer_state_dict`."""
        groups: dict[str, dict[str, Any]] = {}
        for name in self._stored.names:
            if name.startswith(f"{GROUPS}."):
                owner, _, option = name.removeprefix(f"{GROUPS}.").rpartition(".")
                groups.setdefault(owner, {})[option] = self._value(name)
        for owner, group in groups.items():
            params = group.setdefault("params", [owner])
            if not isinstance(params, (list, tuple)) or not all(isinstance(param, str) for param in params):
                raise CheckpointError(
                    f"{self._stored.folder}: expected {GROUPS}.{owner}.params to be a list of names; found {params!r}. "
                    "Use another checkpoint."
                )
        return groups

    def _value(self, name: str) -> Any:
        return self._stored.value(name)

    # Loading

    def prepare(self) -> None:
        """Apply the saved options and allocate the state that they need; an error leaves both unchanged."""
        if (optimizer := self._optimizer) is None:
            return
        runtime = runtime_of(optimizer)
        runtime.drop_iteration()
        runtime.before_overwrite()
        runtime.make_room(self._with_state)
        groups = [
            {**{name: value for name, value in group.items() if name not in ("params", "param_names")}, **options}
            for group, options in zip(optimizer.param_groups, self._options, strict=True)
        ]
        before = [dict(group) for group in optimizer.param_groups]
        with deferred_interrupts():
            replace_groups(runtime, groups)
            self._before = before

    def restore_options(self) -> None:
        """Undo `prepare`: a rank could not allocate the state."""
        if self._optimizer is not None:
            for group, before in zip(self._optimizer.param_groups, self._before, strict=False):
                group.clear()
                group.update(before)

    def lose(self, error: BaseException) -> None:
        """An error in `run`, on any rank, leaves model and state half loaded on all of them."""
        if self._optimizer is not None:
            runtime_of(self._optimizer).lose(f"Loading {self._stored.folder} failed ({type(error).__name__}: {error}).")

    def run(self) -> None:
        """Write everything."""
        with deferred_interrupts():
            self._run()
            self.is_loaded = True

    def _run(self) -> None:
        runtime = None if self._optimizer is None else runtime_of(self._optimizer)
        synchronize_devices(self._model)
        in_threads(self._load_tensor, self._tensors, file_threads())
        self._load_objects()
        if runtime is not None:
            group_of = runtime.group_of()
            states = runtime.all_states()
            in_threads(lambda held: self._load_state(held, group_of[held.param]), states, file_threads())
            runtime.forget_lost_step()
        synchronize_devices(self._model)

    def _load_objects(self) -> None:
        owners = {
            clean_name(self._model, f"{name}.{_EXTRA_STATE}".lstrip(".")): module
            for name, module in self._model.named_modules()
            if type(module).set_extra_state is not nn.Module.set_extra_state
        }
        for name, value in self._objects.items():
            if name in owners:
                owners[name].set_extra_state(value)

    @torch.no_grad()
    def _load_tensor(self, one: tuple[list[Part], torch.Tensor]) -> None:
        parts, value = one
        local = local_of(value).detach()
        if is_dense(local):
            self._read(parts, flat_like(local, local))
        else:  # with gaps in memory: read into a dense copy
            flat = flat_like(local, local)
            self._read(parts, flat)
            local.copy_(flat.as_strided(local.shape, torch.empty_like(local, device="meta").stride()))

    def _read(self, parts: list[Part], flat: torch.Tensor) -> None:
        for part in parts:
            for block in part.blocks(_BLOCK):
                self._stored.read(block.name, block.box, into=block.of(flat))

    @torch.no_grad()
    def _load_state(self, held: ParamState, group: dict[str, Any]) -> None:
        name = name_in(self._layouts, held)
        names = self._saved_keys(name) if held.param in self._scalars else set()
        named_state.set_scalars(held, self._scalars.get(held.param, {}), group)
        kept = {key.name for key in held.keys}
        for key in kept - {MASTER_KEY, MASTER_LOW_KEY} if names else kept:
            if key in names:
                self._read(self._parts(held, name, key), held.raw(key))
            else:
                held.raw(key).zero_()
        held.present = frozenset(kept & names)
        if names and MASTER_KEY in kept:
            self._load_master(held, name, MASTER_KEY in names)
        elif names and MASTER_LOW_KEY in kept:
            self._load_split(held, name, MASTER_KEY in names)

    def _saved_scalars(self, held: ParamState, name: str) -> dict[str, Any]:
        """State kept once per parameter; where shards differed, that of the shards that this rank holds now."""
        parts = self._layouts.parts(name, held.param)
        listed = [(part.box, one) for part in parts for one in self._unequal.get(part.name, ())]
        shards = [one[2] for box, one in listed if box_of(one).overlap(box)]
        for one in shards:
            for key, value in one.items():
                named_state.check_scalar(held, key, value)
        own: dict[str, Any] = max(shards, key=lambda scalars: float(scalars.get("step", 0)), default={})
        if len({str(one) for one in shards}) > 1:
            logger.warning("%s: shards with different numbers of updates are joined; the largest number counts", name)
        found = {key: self._value(self._path(name, key)) for key in self._saved_keys(name) - held.rule.names}
        for key in found.keys() & own.keys():
            value = found[key]
            found[key] = torch.full_like(value, own[key]) if isinstance(value, torch.Tensor) else own[key]
        return found

    def _check_parts_agree(self, name: str, keys: Iterable[str]) -> None:
        for key in keys:
            values = [self._value(f"{OPTIM}.state.{saved}.{key}") for saved in self._layouts.saved_names(name)]
            if any(not _equal(value, values[0]) for value in values[1:]):
                raise CheckpointError(
                    f"{self._stored.folder}: the parts of {name!r} have different {key!r}: {values}; expected one. "
                    "They cannot be one parameter."
                )

    def _is_absent(self, held: ParamState, name: str) -> bool:
        """Whether this rank's shard had no state when the checkpoint was saved, though other shards had."""
        parts = self._layouts.parts(name, held.param)
        for part in parts:
            left = [part.box]
            for one in self._absent.get(part.name, ()):
                left = [piece for box in left for piece in box.without(box_of(one))]
            if any(box.numel for box in left):
                return False
        return held.local.numel() > 0

    def _load_master(self, held: ParamState, name: str, saved: bool) -> None:
        if saved:
            self._read(self._parts(held, name, MASTER_KEY), held.raw(MASTER_KEY))
        else:  # start from the weight, as without a checkpoint
            held.raw(MASTER_KEY).copy_(flat_like(held.local, held.local))
        held.present |= {MASTER_KEY}

    def _load_split(self, held: ParamState, name: str, saved: bool) -> None:
        """Split masters into low halves and tie bits, block by block."""
        weight = flat_like(held.local, held.local)
        low, squares = held.raw(MASTER_LOW_KEY), held.raw("exp_avg_sq")
        assert self._optimizer is not None
        at_most = max(
            1, self._optimizer.config.most_chunk_bytes // (_SPLIT_BYTES * file_threads())
        )  # a chunk for all threads

        def rounded() -> Iterator[tuple[int | torch.Tensor, torch.Tensor]]:
            for part in self._parts(held, name, MASTER_KEY):
                for block in part.blocks(at_most):
                    master = torch.empty(block.box.size, dtype=torch.float32, device="cpu")
                    if saved:
                        self._stored.read(block.name, block.box, into=master)
                    else:
                        master.copy_(block.of(weight))
                    made = master_weights.split(master, block.of(squares).to("cpu"))
                    block.of(low).copy_(made[1])
                    block.of(squares).copy_(made[2])
                    yield block.start if block.is_contiguous else _places(block), made[0]

        held.rule.expect_weight(held, rounded())
        held.present |= {MASTER_LOW_KEY}

    def _extra(self) -> dict[str, Any]:
        """`extra` as it was saved, nested again."""
        result: dict[str, Any] = {}
        for name in self._stored.names:
            head, *path = name.split(".")
            if head == EXTRA and path:
                inner = result
                for step in path[:-1]:
                    inner = inner.setdefault(step, {})
                    if type(inner) is not dict:
                        raise CheckpointError(
                            f"{self._stored.folder}: expected one value called {name!r}; found one that is part of "
                            "another. The checkpoint is damaged: use another one."
                        )
                inner[path[-1]] = self._value(name)
        return result


def _places(part: Part) -> torch.Tensor:
    """The position of each element of the box in the flat run."""
    places = torch.full((1,) * len(part.box.size), part.start, dtype=torch.int64, device="cpu")
    for dim, (length, stride) in enumerate(zip(part.box.size, part.strides, strict=True)):
        steps = stride * torch.arange(length, dtype=torch.int64, device="cpu")
        places = places + steps.view([-1 if other == dim else 1 for other in range(len(part.box.size))])
    return places


def _equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)
