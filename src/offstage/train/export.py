# SPDX-License-Identifier: Apache-2.0
"""`export`: a run's weights as a folder of safetensors, which `from_pretrained` loads if the model is of transformers.

    export(Path("runs/books"), Path("books-1b"))

Weights go from the checkpoint's files to the new ones block by block, in the format they were trained in and without an
accelerator. Adapters are added to the weights that they belong to; if the run began with weights of another folder,
`adapter/` has them alone, for peft. The folder gets its name when it is complete, and not before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offstage import CheckpointError, ConfigError, OffstageError, checkpoint
from offstage.checkpoint.manifest import check_listed, complete_in, sync_folder
from offstage.checkpoint.parts import Box, blocks_of
from offstage.checkpoint.stored import Stored
from offstage.config import format_size
from offstage.train.adapter_files import Adapters, read_adapters
from offstage.train.config import ModelSettings, TrainConfig, build, read_toml
from offstage.train.description import CONFIG, GENERATION, without_weights
from offstage.train.model import CausalLM
from offstage.train.model import build as build_model
from offstage.train.pretrained import check_kept_as_stored
from offstage.train.run_folder import RunFolder
from offstage.train.tensor_files import BLOCK_BYTES, Outgoing, write_synced, write_tensors

SHARD_BYTES = 4 * 2**30
"""The most in one file, unless a single tensor is larger."""
SETTINGS = "offstage.toml"
"""The run's settings, beside the weights of a model of offstage's own."""
ADAPTER = "adapter"
"""The folder, beside the weights, of what was trained alone."""
_PREFIX = "model."
"""Of the names of weights in a checkpoint."""
_LM = "lm."
"""After it, of those of a transformers model."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    checkpoint: Path
    parameters: int
    nbytes: int
    formats: Sequence[str]
    """Of its tensors."""
    package: str | None
    """The class of transformers that loads it; `None` for a model of offstage's own."""
    merged: int
    """Matrices to which an adapter was added."""
    adapter: Path | None
    """The folder of the adapters alone, for peft."""


def export(run: Path, target: Path, step: int | None = None, *, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Write the weights of the newest checkpoint of `run`, or of the one after `step`, to the new folder `target`."""
    folder = RunFolder(run)
    config = _config(folder)
    source = _checkpoint(folder, step)
    _check_target(target)
    with Stored(source) as stored:
        checkpoint.verify(source, stored.files)
        check_listed(source, stored.files)
        lm = _lm(config, folder, stored)
        adapters = read_adapters(stored, config.lora, _PREFIX)
        tensors = list(_own_tensors(stored, adapters) if lm is None else _lm_tensors(stored, adapters, lm))
        alone = bool(adapters.factors) and config.model.weights is not None
        size = sum(one.nbytes for one in tensors)
        with _becoming(target, size + adapters.nbytes * alone) as unfinished:
            write_tensors(unfinished, tensors, shard_bytes)
            _write_about(unfinished, folder, lm)
            if alone:
                adapters.write(unfinished / ADAPTER, f"{_PREFIX}{_LM}", str(config.model.weights))
    return Exported(
        folder=target.absolute(),
        checkpoint=source,
        parameters=sum(one.nbytes // one.dtype.itemsize for one in tensors),
        nbytes=size,
        formats=sorted({str(one.dtype).removeprefix("torch.") for one in tensors}),
        package=None if lm is None else type(lm).__name__,
        merged=len(adapters.factors) // 2,
        adapter=target.absolute() / ADAPTER if alone else None,
    )


# What is exported #


def _config(folder: RunFolder) -> TrainConfig:
    if not folder.config.is_file():
        raise ConfigError(
            f"offstage export expects the folder of a run; found no {folder.config.name} in {folder.path}. Give the "
            "run.folder of that run."
        )
    return build(read_toml(folder.config))


def _checkpoint(folder: RunFolder, step: int | None) -> Path:
    there = complete_in(folder.checkpoints) if folder.checkpoints.is_dir() else []
    if not there:
        raise ConfigError(
            f"offstage export expects a run with a checkpoint; found none that is complete in {folder.checkpoints}. "
            "Train first; run.save_last saves at the end."
        )
    if step is None:
        return there[-1]
    wanted = [path for path in there if path.name == f"step-{step:08}"]
    if not wanted:
        names = ", ".join(path.name for path in there)
        raise ConfigError(f"--step {step} expects a complete checkpoint of that step; found {names}. Choose one.")
    return wanted[0]


def _lm(config: TrainConfig, folder: RunFolder, stored: Stored) -> Any:
    """The run's transformers model, on meta; `None` if it is one of offstage's own."""
    if config.model.described_by is None:
        return None
    kept = folder.model / CONFIG  # what was trained, even if the original has changed since
    settings = ModelSettings(transformers=str(kept)) if kept.is_file() else without_weights(config.model, folder)
    dtypes = [dtype for name, (_, dtype) in stored.tensors.items() if name.startswith(_PREFIX)]
    dtype = next((one for one in dtypes if one.is_floating_point), torch.float32)
    model = build_model(settings, device="meta", dtype=dtype, sequence=1)
    assert isinstance(model, CausalLM)
    return model.lm


def _own_tensors(stored: Stored, adapters: Adapters) -> Iterator[Outgoing]:
    for name in stored.tensors:
        if name.startswith(_PREFIX) and name not in adapters.factors:
            yield _outgoing(stored, name, name.removeprefix(_PREFIX), adapters)


def _lm_tensors(stored: Stored, adapters: Adapters, lm: Any) -> Iterator[Outgoing]:
    """Each tensor once, under the first of its names: `from_pretrained` ties the others to it."""
    names: dict[int, list[str]] = {}
    tensors = lm.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    check_kept_as_stored(lm, tensors, "The run has trained")
    known = {f"{_PREFIX}{_LM}{name}" for name in tensors} | adapters.factors.keys()
    if others := [name for name in stored.tensors if name.startswith(_PREFIX) and name not in known]:
        raise CheckpointError(
            f"{stored.folder}: expected the tensors of {type(lm).__name__}; found {len(others)} others, such as "
            f"{others[0]!r}, without which the exported model would not be the trained one. Nothing was written."
        )
    for first, *others in names.values():
        paths = [f"{_PREFIX}{_LM}{name}" for name in (first, *others)]
        saved = next((path for path in paths if path in stored.tensors), None)
        found = "nothing" if saved is None else f"shape {stored.shape(saved)}"
        if saved is None or stored.shape(saved) != tuple(tensors[first].shape):
            raise CheckpointError(
                f"{stored.folder}: expected {first!r} of {type(lm).__name__} with shape {tuple(tensors[first].shape)}; "
                f"found {found}. The checkpoint is of another model than config.json in the run's folder describes."
            )
        if others and any(adapters.has(path) for path in paths):
            raise OffstageError(
                f"{first!r} is one tensor with {others[0]!r}, and the adapter belongs to one of them: added to it, it "
                "would change the other. Nothing was written. Train without this layer in lora.targets, or with "
                "tie_word_embeddings=false in config.json."
            )
        yield _outgoing(stored, saved, first, adapters)


def _outgoing(stored: Stored, saved: str, name: str, adapters: Adapters) -> Outgoing:
    shape, dtype = stored.tensors[saved]

    def blocks() -> Iterator[torch.Tensor]:
        step = BLOCK_BYTES // dtype.itemsize
        whole = Box((0,) * len(shape), shape)
        buffer = torch.empty(min(step, whole.numel), dtype=dtype, device="cpu")
        for box in blocks_of(whole, step):
            block = buffer[: box.numel].view(box.size)
            stored.read(saved, box, into=block)
            yield adapters.added(saved, block, box)

    return Outgoing(name, dtype, shape, blocks)


# The folder #


def _check_target(target: Path) -> None:
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        found = "a link" if target.is_symlink() else "a folder with files in it" if target.is_dir() else "a file"
        raise ConfigError(
            f"offstage export expects a folder that is not there yet, or an empty one; found {found} at {target}. "
            "Choose another, or remove it."
        )


@contextlib.contextmanager
def _becoming(target: Path, size: int) -> Iterator[Path]:
    """Within: a folder beside `target`, which takes its name at the end and is removed on any error."""
    unfinished = target.absolute().with_name(f".{target.absolute().name}.{secrets.token_hex(4)}.unfinished")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(unfinished.parent).free
        if free < size:
            raise OffstageError(
                f"The weights take {format_size(size)}; found {format_size(free)} free in {unfinished.parent}. Free "
                "space there, or choose another folder. Nothing was written."
            )
        unfinished.mkdir()
        yield unfinished
        sync_folder(unfinished)
        unfinished.rename(target.absolute())
        sync_folder(target.absolute().parent)
    except OSError as error:
        raise OffstageError(
            f"{target} could not be written: {error.strerror or error}. Nothing is left of it: fix the cause, and run "
            "the same command again."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # after the rename it is not there


def _write_about(unfinished: Path, folder: RunFolder, lm: Any) -> None:
    """What belongs beside the weights."""
    if lm is None:
        write_synced(unfinished / SETTINGS, [folder.config.read_bytes()])
        return
    lm.config.architectures = [type(lm).__name__]
    lm.config.save_pretrained(unfinished)
    beside = [folder.model / GENERATION]
    if folder.tokenizer.is_dir():
        beside += sorted(folder.tokenizer.iterdir())
    for path in beside:
        if path.is_file() and not path.is_symlink():
            write_synced(unfinished / path.name, [path.read_bytes()])
