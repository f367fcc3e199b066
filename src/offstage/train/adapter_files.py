# SPDX-License-Identifier: Apache-2.0
"""`Adapters`: the factors of LoRA in a checkpoint, to be added to their weights or written alone, for peft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from offstage import CheckpointError
from offstage.checkpoint.parts import Box
from offstage.checkpoint.stored import Stored
from offstage.train.lora import A, B, config_for_peft, is_adapter, merged, name_for_peft
from offstage.train.lora_settings import LoraSettings
from offstage.train.tensor_files import Outgoing, write_file, write_synced

_WEIGHT = ".weight"


@dataclass(frozen=True)
class Adapters:
    """All factors of a run, on the host: they are small. None, for a run without LoRA."""

    factors: Mapping[str, torch.Tensor]
    """By their names in the checkpoint."""
    settings: LoraSettings

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.factors.values())

    def has(self, name: str) -> bool:
        """Whether the weight `name` has an adapter."""
        return f"{name.removesuffix(_WEIGHT)}.{A}" in self.factors

    def added(self, name: str, block: torch.Tensor, box: Box) -> torch.Tensor:
        """The elements `box` of the weight `name`, which are in `block`, with the adapter's added if it has one."""
        if not self.has(name):
            return block
        a, b = (self.factors[f"{name.removesuffix(_WEIGHT)}.{factor}"] for factor in (A, B))
        rows, columns = (slice(first, first + size) for first, size in zip(box.offset, box.size, strict=True))
        return merged(block, a[:, columns], b[rows], self.settings.scale)

    def write(self, folder: Path, prefix: str, base: str) -> None:
        """Make `folder` one that peft loads; `prefix` is in the names of the checkpoint, and not in those of `base`."""
        folder.mkdir()
        named = {name.removeprefix(prefix): tensor for name, tensor in self.factors.items()}
        outgoing = [
            Outgoing(name_for_peft(name), tensor.dtype, tuple(tensor.shape), partial(iter, (tensor,)))
            for name, tensor in named.items()
        ]
        write_file(folder / "adapter_model.safetensors", outgoing)
        write_synced(folder / "adapter_config.json", [config_for_peft(named, self.settings, base).encode()])


def read_adapters(stored: Stored, settings: LoraSettings, prefix: str) -> Adapters:
    """Those of the model whose names begin with `prefix`. Raises unless they are the ones that `settings` describe."""
    shapes = {name: shape for name, (shape, _) in stored.tensors.items() if name.startswith(prefix)}
    factors = {}
    for name in filter(is_adapter, shapes):
        factors[name] = torch.empty(shapes[name], dtype=stored.dtype(name), device="cpu")
        stored.read(name, Box((0,) * len(shapes[name]), shapes[name]), into=factors[name])
    rank = settings.rank
    for layer in {name.rpartition(".")[0] for name in factors}:
        found = tuple(shapes.get(f"{layer}{part}") for part in (_WEIGHT, f".{A}", f".{B}"))
        weight = found[0] or (0, 0)
        if found != (weight, (rank, weight[-1]), (weight[0], rank)):
            raise CheckpointError(
                f"{stored.folder}: expected {layer!r} with an adapter of lora.rank={rank}, as config.toml in the run's "
                f"folder says; found shapes {', '.join(map(str, found))} of weight, {A} and {B}. Nothing was written."
            )
    if rank and not factors:
        raise CheckpointError(
            f"{stored.folder}: expected adapters of lora.rank={rank}, as config.toml in the run's folder says; found "
            "none. Nothing was written."
        )
    return Adapters(factors, settings)
