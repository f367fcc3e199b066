# SPDX-License-Identifier: Apache-2.0
"""`PretrainedWeights`: the weights of a transformers folder, checked against a model and then read into it.

Each tensor is read block by block to where its parameter lives, on any device and also where FSDP2 has divided it, and
converted on the way: beside the model itself, the host holds a block for each thread that reads, the device nothing.
Everything is compared before anything is read.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from offstage import ConfigError
from offstage.checkpoint.ranks import file_threads
from offstage.checkpoint.threads import in_threads
from offstage.config import format_size
from offstage.tensors import local_box, local_of
from offstage.train.reading import BadFileError
from offstage.train.tensor_files import INDEX, SINGLE, StoredTensor, open_file, read_tensor, stored_tensors

CONVERTIBLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Formats whose numbers are the weights. Others, such as fp8, need scales that are stored beside them."""
_MOST_NAMED = 4
_COMPARED = 2**20
"""Elements of two tensors that are compared at a time."""


def weight_files(folder: Path) -> list[str]:
    """The files of weights that a folder holds, in any format."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    if not folder.is_dir():
        return []
    return sorted(one.name for one in folder.iterdir() if one.suffix in suffixes and "training_args" not in one.name)


class PretrainedWeights:
    """The tensors in `folder`; what they are is known, and none of them has been read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._check_folder()
        try:
            self.tensors: Mapping[str, StoredTensor] = stored_tensors(self.folder)
        except BadFileError as error:
            raise _unreadable(error) from error

    def _check_folder(self) -> None:
        if not self.folder.is_dir():
            found = "a file" if self.folder.exists() else "nothing"
            raise ConfigError(
                f"model.weights expects the folder of a transformers model; found {found} at {self.folder}. Give the "
                "folder with its config.json and its .safetensors files."
            )
        if not any((self.folder / name).exists() for name in (SINGLE, INDEX)):
            found = ", ".join(weight_files(self.folder)[:_MOST_NAMED]) or "no weights"
            raise ConfigError(
                f"model.weights expects {SINGLE} or {INDEX}; found {found} in {self.folder}. Other formats are "
                "converted by transformers: from_pretrained(folder).save_pretrained(another)."
            )

    def __str__(self) -> str:
        """The number of tensors, their size and their formats."""
        formats = sorted({str(one.dtype).removeprefix("torch.") for one in self.tensors.values()})
        size = format_size(sum(one.nbytes for one in self.tensors.values()))
        return f"{len(self.tensors)} tensors, {size} in {' and '.join(formats)}"

    # Checking #

    def check(self, lm: Any) -> None:
        """Raise unless every tensor of `lm`, which may be on meta, is here with its shape, and nothing else."""
        if getattr(lm.config, "quantization_config", None) is not None:
            raise ConfigError(
                f"model.weights expects weights that can be trained; the configuration of {self.folder} says that "
                "they are quantized. Give a folder with the original weights."
            )
        check_kept_as_stored(lm, self.tensors, f"{self.folder} stores")
        sources, unexpected = self._sources(lm)
        missing, other = [], []
        for names, tensor, found in sources:
            if not found:
                missing.append(names[0])
            for name in found:
                stored = self.tensors[name]
                fits = stored.dtype == tensor.dtype or {stored.dtype, tensor.dtype} <= CONVERTIBLE
                if stored.shape != tuple(tensor.shape) or not fits:
                    expected, kind = tuple(tensor.shape), str(stored.dtype).removeprefix("torch.")
                    other.append(f"{name} (expected {expected}, found {stored.shape} in {kind})")
        faults = {"missing": missing, "not in the model": unexpected, "of another shape or format": other}
        if any(faults.values()):
            listed = "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in faults.items() if names)
            raise ConfigError(
                f"The weights in {self.folder} are not those of the model, {type(lm).__name__}: {listed}. Nothing was "
                "loaded. Give model.weights a folder whose config.json and tensors belong together."
            )
        for _, _, found in sources:
            for name in found[1:]:
                self._check_equal(found[0], name)

    def _sources(self, lm: Any) -> tuple[list[tuple[list[str], torch.Tensor, list[str]]], list[str]]:
        """For each tensor of the model: its names (several, if it is tied), itself, and its stored names.

        Also the stored names that are left over, without those that the model computes itself or ignores.
        """
        wanted: dict[int, tuple[list[str], torch.Tensor, list[str]]] = {}
        of_name = {}
        for name, tensor in lm.state_dict(keep_vars=True).items():
            of_name[name] = wanted.setdefault(id(tensor), ([], tensor, []))
            of_name[name][0].append(name)
        computed = {name for name, _ in lm.named_buffers()} - of_name.keys()
        patterns = getattr(lm, "_keys_to_ignore_on_load_unexpected", None) or ()
        ignored = [re.compile(one) for one in (*patterns, r"rotary_emb\.inv_freq")]
        prefix, unexpected = getattr(lm, "base_model_prefix", ""), []
        for stored in self.tensors:
            # A folder of the model without its head has names without the prefix.
            name = stored if stored in of_name or stored in computed else f"{prefix}.{stored}"
            if name in of_name:
                of_name[name][2].append(stored)
            elif name not in computed and not any(pattern.search(stored) for pattern in ignored):
                unexpected.append(stored)
        return list(wanted.values()), unexpected

    def _check_equal(self, one: str, other: str) -> None:
        """Raise if two tensors differ that are one in the model: a choice between them would lose weights."""
        first, second = self.tensors[one], self.tensors[other]
        numel = math.prod(first.shape)
        for begin in range(0, numel, _COMPARED):
            pieces = []
            for stored in (first, second):
                pieces.append(torch.empty(min(_COMPARED, numel - begin), dtype=torch.float64, device="cpu"))
                with _reading(), open_file(stored.file) as (descriptor, _):
                    read_tensor(descriptor, stored, begin, pieces[-1])
            if not torch.allclose(pieces[0], pieces[1], rtol=0.0, atol=0.0, equal_nan=True):
                raise ConfigError(
                    f"{self.folder}: {one!r} and {other!r} differ, and the model has one tensor for both. Nothing was "
                    "loaded. Set tie_word_embeddings to false in config.json, if both were trained."
                )

    # Loading #

    def load(self, lm: Any) -> None:
        """Read every tensor into `lm`, in the order of the files and with several threads. `check` comes first."""
        # What was added to the model after `check` has no source: adapters, for example.
        places = [(self.tensors[found[0]], tensor) for _, tensor, found in self._sources(lm)[0] if found]
        places.sort(key=lambda one: (one[0].file.name, one[0].start))
        with _reading():
            in_threads(_load, places, file_threads())


def _load(place: tuple[StoredTensor, torch.Tensor]) -> None:
    stored, tensor = place
    local, (offset, size) = local_of(tensor).detach(), local_box(tensor)
    # A shard is some rows of its parameter: one run of elements.
    assert size[1:] == stored.shape[1:], "FSDP2 divides parameters along their first dim"
    assert local.is_contiguous()
    first = offset[0] * local[0].numel() if local.numel() and size else 0
    with open_file(stored.file) as (descriptor, _):
        read_tensor(descriptor, stored, first, local.view(-1))


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (BadFileError, OSError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> ConfigError:
    return ConfigError(
        f"model.weights expects safetensors files that are whole; {error}. The file is damaged, or was not copied to "
        "its end: copy or download it again."
    )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more


# Conversions of the package #


def check_kept_as_stored(lm: Any, names: Iterable[str], whose: str) -> None:
    """Raise if `from_pretrained` would rename or convert any of these tensors.

    Transformers 5 stores some models, mostly those with experts, in another form than it computes with.
    """
    try:
        conversions = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(lm)
    except (ImportError, AttributeError):  # before version 5 there were none
        return
    converted = list(_converted(conversions, names))
    if converted:
        raise ConfigError(
            f"{whose} {len(converted)} tensors of {type(lm).__name__} in a form that transformers converts when it "
            f"loads them, which offstage does not: {_some(converted)}. Have them converted once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another, save_original_format=False)."
        )


def _converted(conversions: Iterable[Any], names: Iterable[str]) -> Iterator[str]:
    conversions = list(conversions)
    for name in names:
        if any(one.rename_source_key(name)[1] is not None for one in conversions):
            yield name
