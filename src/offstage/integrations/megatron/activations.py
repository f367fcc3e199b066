# SPDX-License-Identifier: Apache-2.0
"""`offload_activations`: saved tensors of Megatron's transformer layers wait for backward in host memory.

The layers are those of every `TransformerBlock` in every model chunk of this rank. Beside pipelines and recompute, too:
autograd hands over what it saves, whichever schedule calls the layers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

import offstage
from offstage import ActivationConfig, ConfigError, OffloadIneffectiveError
from offstage.integrations.megatron.flags import refuse_beside_activations
from offstage.integrations.megatron.package import megatron_core
from offstage.integrations.megatron.reading import Flags

if TYPE_CHECKING:
    from offstage.activations.offload import ActivationOffload
    from offstage.activations.receipt import ActivationReceipt
    from offstage.config import ActivationSettings

logger = logging.getLogger("offstage")

_WHERE = {
    "attn_norm": "input_layernorm",
    "qkv_linear": "self_attention.linear_qkv",
    "core_attn": "self_attention.core_attention",
    "attn_proj": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "expert_fc1": "mlp.experts.linear_fc1",
    "fused_group_mlp": "mlp.experts",
}
"""Megatron's names of parts of a layer, in the order in which they run, and where they are in it."""


class ActivationOffloads:
    """What `offload_activations()` returns: the handles of all chunks. A context manager that removes the hooks."""

    def __init__(self, handles: Sequence[ActivationOffload]) -> None:
        self.handles = tuple(handles)
        """One for each model chunk that has something to offload."""

    def remove(self) -> None:
        """Take the hooks off and give host memory back. Forwards that wait for their backward go on."""
        for handle in self.handles:
            handle.remove()

    def receipts(self) -> tuple[ActivationReceipt, ...]:
        """What was really moved, for each of the handles."""
        return tuple(handle.receipt() for handle in self.handles)

    @property
    def bytes_offloaded(self) -> int:
        """Device → host, so far, by all of them."""
        return sum(handle.bytes_offloaded for handle in self.handles)

    @property
    def bytes_returned(self) -> int:
        """Host → device, so far, by all of them."""
        return sum(handle.bytes_returned for handle in self.handles)

    @property
    def host_bytes(self) -> int:
        return sum(handle.host_bytes for handle in self.handles)

    def __enter__(self) -> ActivationOffloads:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def offload_activations(
    model_chunks: nn.Module | Sequence[nn.Module],
    config: ActivationConfig | None = None,
    *,
    modules: Sequence[str] = (),
    **overrides: Unpack[ActivationSettings],
) -> ActivationOffloads:
    """Let saved tensors of the transformer layers in `model_chunks` wait for backward in host memory.

    `layers` is a number for each chunk; `keep_last` counts only where the pipeline ends, because backward comes later
    to other stages. `modules`: names that `offload_modules` of Megatron takes, for parts of layers. Other settings, and
    what they do, are those of `offstage.offload_activations`. Gradients are the same, bit for bit.
    """
    block = megatron_core(
        "megatron.core.transformer.transformer_block", why="offstage.integrations.megatron.offload_activations()"
    ).TransformerBlock
    chosen = ActivationConfig.build(config, overrides)
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    _check(chosen, modules, chunks)
    selected = [(model, _selected(model, block, chosen, modules)) for model in map(_unwrapped, chunks)]
    if not any(layers for _, layers in selected):
        _refuse_nothing(selected, modules, chosen)
    handles: list[ActivationOffload] = []
    try:
        for model, layers in selected:
            if layers:
                listed = dataclasses.replace(chosen, layers=layers, keep_last=1)  # a list says itself what leaves
                handles.append(offstage.offload_activations(model, listed))
    except BaseException:
        ActivationOffloads(handles).remove()
        raise
    return ActivationOffloads(handles)


def _check(config: ActivationConfig, modules: Sequence[str], chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise ConfigError(
                f"offload_activations() expects Megatron's model chunks; found {type(chunk).__name__}. Pass the list "
                "that its get_model() returns, or a model."
            )
    if isinstance(config.layers, list):
        raise ConfigError(
            "offload_activations() of Megatron's chunks expects a number of layers, or none for all; found a list. Use "
            "offstage.offload_activations(chunk, ...) for a list of modules."
        )
    if config.weights:
        raise ConfigError(
            "weights=True moves weights to the host, which Megatron's DDP keeps in one buffer on the device; expected "
            "False. Leave weights out."
        )
    if modules and config.layers is not None:
        raise ConfigError(
            f"modules name the parts of layers that leave; found layers={config.layers} as well. Leave one of them out."
        )
    if unknown := [name for name in modules if name not in _WHERE]:
        raise ConfigError(f"modules expects names out of {', '.join(_WHERE)}; found {unknown[0]!r}. Mend it.")


def _unwrapped(chunk: nn.Module) -> nn.Module:
    """The model inside Megatron's DDP and Float16Module."""
    while isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


# Which modules


def _selected(model: nn.Module, block: Any, config: ActivationConfig, modules: Sequence[str]) -> list[nn.Module]:
    """The modules of `model` whose saved tensors leave, in the order in which they run."""
    blocks = [module for module in model.modules() if isinstance(module, block) and len(module.layers)]
    for one in blocks:
        _refuse_settings(one.config)
    found: list[nn.Module] = []
    for one in blocks:
        # Where the pipeline goes on, backward does not come back at once.
        ends_here = getattr(model, "post_process", True) and one is blocks[-1]
        layers = list(one.layers)
        movable = layers[: max(0, len(layers) - config.keep_last)] if ends_here else layers
        if modules:
            found += [part for layer in movable for name in _WHERE if name in modules for part in _parts(layer, name)]
        else:
            found += _spread(_saving(movable, one.config), config.layers, len(movable))
    return found


def _refuse_settings(settings: Any) -> None:
    """Raise for settings of the model beside which saved tensors cannot leave."""
    for switch in ("cpu_offloading", "fine_grained_activation_offloading"):
        if getattr(settings, switch, False):
            raise ConfigError(
                f"{switch} of Megatron is on, which moves saved tensors too; expected one of the two. Call "
                "switch_off(args) before the model is built."
            )
    refuse_beside_activations(Flags((settings,)))


def _saving(layers: list[nn.Module], settings: Any) -> list[nn.Module]:
    """Those of `layers` that save something: of layers recomputed together only the first one's inputs are saved."""
    if getattr(settings, "recompute_granularity", None) != "full" or settings.recompute_method != "uniform":
        return layers
    return layers[:: settings.recompute_num_layers or 1]


def _spread(layers: list[nn.Module], count: Any, num_layers: int) -> list[nn.Module]:
    """`count` of `num_layers` layers, evenly: copies then run all through forward. `None`: all of them.

    `layers` are fewer where some are recomputed together.
    """
    if count is None or count >= num_layers:
        return layers
    wanted = -(-count * len(layers) // num_layers)
    return [layers[number * len(layers) // wanted] for number in range(wanted)]


def _parts(layer: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules of `layer` that `name` stands for; none where it has no such part, or only an empty one."""
    part: Any = layer
    for step in _WHERE[name].split("."):
        if step == "linear_fc1" and hasattr(part, "local_experts"):  # experts that run one by one
            yield from (expert.linear_fc1 for expert in part.local_experts)
            return
        part = getattr(part, step, None)
    if isinstance(part, nn.Module) and type(part).__name__ != "IdentityOp":  # where the next linear has the norm inside
        yield part


def _refuse_nothing(
    selected: Sequence[tuple[nn.Module, Any]], modules: Sequence[str], config: ActivationConfig
) -> None:
    """Nothing would leave. On one stage of a pipeline that may be meant."""
    settings = [getattr(model, "config", None) for model, _ in selected]
    if any((getattr(one, "pipeline_model_parallel_size", 1) or 1) > 1 for one in settings):
        logger.warning("activations: no layer of this pipeline stage has anything that leaves")
        return
    what = f"no layer has a module of its own for {', '.join(modules)}" if modules else "no TransformerBlock has layers"
    raise OffloadIneffectiveError(
        f"offload_activations() would move nothing: {what} before the last {config.keep_last}, which stay. Norms may "
        "be part of the next linear: name that one. Lower keep_last, or call offstage.offload_activations(model, "
        "layers=[...]) for models without a TransformerBlock."
    )
