# SPDX-License-Identifier: Apache-2.0
"""`CausalLM`: a causal language model of the transformers package, behind the trainer's interface.

The package is imported on first use.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.modules.module import register_module_parameter_registration_hook

from offstage import ConfigError
from offstage.train.language_model import LanguageModel, copy_shard
from offstage.train.lora import is_adapter
from offstage.train.pretrained import PretrainedWeights

OLDEST = (4, 56)
"""The first release whose `from_config` takes a `dtype`."""


class CausalLM(LanguageModel):
    """Wraps `lm`, which runs without a cache and computes all logits at once."""

    lm: Any

    def __init__(self, lm: nn.Module, weights: PretrainedWeights | None = None) -> None:
        """`weights`: what `materialize` reads instead of initializing."""
        super().__init__()
        self.lm = lm
        self.weights = weights
        self.vocabulary = int(self.lm.config.vocab_size)

    @torch.no_grad()
    def materialize(self, device: torch.device | str, seed: int = 0, home: torch.device | None = None) -> None:
        device = device if home is None else home
        if self.weights is None:
            self._initialize(device, seed)
            return
        with torch.device("cpu"), _parameters_on_meta():
            computed = dict(_lm(self.lm.config, self.lm.dtype, seed).named_buffers())
        allocate(self.lm, device)
        for name, buffer in self.lm.named_buffers():
            buffer.copy_(computed[name])
        self.weights.load(self.lm)

    def _initialize(self, device: torch.device | str, seed: int) -> None:
        """The package initializes whole models only.

        So the host holds all weights for a moment, and they are those of a model built on the CPU.
        """
        with torch.device("cpu"):
            first = _lm(self.lm.config, self.lm.dtype, seed)
        whole: dict[str, torch.Tensor] = {**dict(first.named_parameters()), **dict(first.named_buffers())}
        allocate(self.lm, device)
        for name, tensor in [*self.lm.named_parameters(), *self.lm.named_buffers()]:
            if is_adapter(name):  # not of the package
                continue
            if isinstance(tensor, DTensor):
                copy_shard(tensor, whole[name].to(tensor.to_local().device))
            else:
                tensor.copy_(whole[name])

    def layers(self) -> list[nn.Module]:
        lists = [module for module in self.lm.modules() if isinstance(module, nn.ModuleList)]
        if not lists:
            raise ConfigError(
                f"{type(self.lm).__name__} has no ModuleList whose children could be its layers; expected one. Use "
                "another model."
            )
        return list(_largest(lists))

    def checkpoint_layers(self, numbers: Collection[int] | None = None) -> None:
        layers: list[Any] = self.layers()
        chosen = frozenset(range(len(layers)) if numbers is None else numbers)
        if not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
            raise ConfigError(
                f"{type(self.lm).__name__} cannot checkpoint its layers one by one; expected layers with a switch for "
                "it, as the package's own models have. Use activations.mode='offload' or 'keep'."
            )
        self.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number in chosen

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        found = self.lm(input_ids=tokens, use_cache=False)
        if targets is None:
            return found.logits  # type: ignore[no-any-return]
        loss = F.cross_entropy(found.logits.flatten(0, 1).float(), targets.flatten())
        balance = getattr(found, "aux_loss", None)  # of experts, if enabled in its configuration
        if balance is None or not self.training:
            return loss
        weighted: torch.Tensor = self.lm.config.router_aux_loss_coef * balance
        return loss + weighted


def build_causal_lm(
    named: str,
    *,
    weights: str | None = None,
    device: torch.device | str,
    dtype: torch.dtype,
    vocabulary: int,
    sequence: int,
    seed: int = 0,
) -> CausalLM:
    """The model that `named` describes: a config.json, its folder, or a model type.

    Its weights are those in the folder `weights`, or fresh ones.
    """
    pretrained = None if weights is None else PretrainedWeights(weights)
    config = _config(_transformers(), named)
    if config.vocab_size < vocabulary:
        raise ConfigError(
            f"The data has {vocabulary} different tokens; expected a vocabulary of as many at least, found "
            f"vocab_size={config.vocab_size} in {named!r}. Raise vocab_size in its config.json."
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < sequence:
        raise ConfigError(
            f"Sequences have {sequence} tokens; expected at most max_position_embeddings={longest} of {named!r}. Lower "
            "data.sequence, or raise max_position_embeddings in its config.json."
        )
    if pretrained is None:
        with torch.device(device):
            return CausalLM(_lm(config, dtype, seed))
    with torch.device("meta"):
        model = CausalLM(_lm(config, dtype, seed), pretrained)
    pretrained.check(model.lm)
    if torch.device(device).type != "meta":
        model.materialize(device, seed)
    return model


def allocate(lm: Any, device: torch.device | str) -> None:
    """Give a model on meta memory on `device`, once for tied parameters, which `to_empty` would allocate twice."""
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device)
        return made[id(tensor)]

    kept = [*lm.parameters(), *lm.buffers()]  # until the end, so that no other tensor takes over an id
    lm._apply(once)
    lm.tie_weights()  # two parameters with the same memory become one again
    del kept


def description_of(named: str) -> Path | None:
    """The config.json that `named` leads to; `None` if it is a model type, or leads nowhere."""
    path = Path(named).expanduser()
    if path.is_dir():
        return path / "config.json"
    return path if path.is_file() else None


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within: modules have their parameters on meta and their buffers, which they compute, on torch's default device.

    No more than one parameter has memory at a time, and none of it is touched.
    """

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        return None if param is None else nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _lm(config: Any, dtype: torch.dtype, seed: int) -> Any:
    """With fresh weights, on torch's current default device."""
    torch.manual_seed(seed)
    return _transformers().AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def _largest(lists: list[nn.ModuleList]) -> nn.ModuleList:
    """By parameters, not length: lists inside layers, of experts for example, may be longer."""
    sizes = [sum(param.numel() for param in one.parameters()) for one in lists]
    return lists[sizes.index(max(sizes))]


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"model.transformers expects the package transformers; found: {error}. Run `pip install transformers`, or "
            "use model.size."
        ) from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"model.transformers expects transformers {OLDEST[0]}.{OLDEST[1]} or later; found "
            f"{transformers.__version__}. Run `pip install --upgrade transformers`, or use model.size."
        )
    return transformers


def _config(transformers: Any, named: str) -> Any:
    """A path if there is one, else a model type."""
    file = description_of(named)
    if file is not None:
        if not file.is_file():  # the package would look for it in the network
            raise ConfigError(
                f"model.transformers and model.weights expect the folder of a transformers model; found no config.json "
                f"in {file.parent}. Give another folder, or model.transformers a config.json."
            )
        try:
            return transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)  # without asking
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"model.transformers expects the config.json of a transformers model; could not use {file}: {error}. "
                "Give the path of one, or a model type such as llama."
            ) from error
    try:
        return transformers.AutoConfig.for_model(named)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"model.transformers expects the path of a config.json, of its folder, or a model type such as llama; "
            f"found {named!r}, which is neither. Check the spelling."
        ) from error
