# SPDX-License-Identifier: Apache-2.0
"""`config_from_megatron`: what Megatron's own offload flags ask for, as settings of offstage.

Megatron is not imported: its argument namespace, its config objects and those of Megatron Bridge are read by the names
of their fields, and a field that the installed version does not have reads as off. A flag that would do nothing raises,
and so does what offstage cannot do; what only Megatron's own offload cannot do is allowed and listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offstage import ActivationConfig, ConfigError, OffloadConfig, OffloadIneffectiveError
from offstage.integrations.megatron.reading import (
    BESIDE,
    DEFAULT_ELEMENTS,
    Became,
    Flags,
    assign,
    fp32_like,
    value_of,
)

_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
)
"""What `offload_modules` may name."""

_DISCARDING = ("layernorm", "mla_up_proj", "moe_act", "gdn_norm_out")
"""Values of `recompute_modules` with which Megatron empties the storage of an output that autograd has saved."""

_FORMATS = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}

# What was asked for


@dataclass(frozen=True, kw_only=True)
class MegatronFlags:
    """What Megatron's flags ask for. `print()` shows what became of each."""

    state: OffloadConfig | None
    """For `offload(megatron_optimizer, flags.state)`; `None`: state stays on the device."""
    activations: ActivationConfig | None
    """For `offload_activations(model_chunks, flags.activations, modules=flags.modules)`; `None`: they stay."""
    modules: tuple[str, ...]
    """Parts of each layer whose saved tensors leave, by Megatron's names; none: whole layers."""
    sleeps: tuple[str, ...]
    """What shall sleep while other work has the device: ``"optimizer"`` during inference."""
    became: tuple[Became, ...]
    """Every flag that was set, in the order in which they were read."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.became)) if self.became else "no offload flag of Megatron is set"


def config_from_megatron(*configs: Any) -> MegatronFlags:
    """What the offload flags in `configs` ask for, before anything is built from them.

    Each is Megatron's argument namespace, an `OptimizerConfig`, a `TransformerConfig` or `ModelParallelConfig`, a
    mapping of the same names, or a container of Megatron Bridge (`.optimizer`, `.model`).
    """
    flags = Flags(configs)
    state = _state(flags)
    activations, modules = _activations(flags)
    sleeps: tuple[str, ...] = ()
    if flags.on("rl_offload_optimizer_during_inference"):
        flags.became("rl_offload_optimizer_during_inference", "sleep() before inference and wake() after it, by itself")
        sleeps = ("optimizer",)
    return MegatronFlags(
        state=state, activations=activations, modules=modules, sleeps=sleeps, became=tuple(flags.mapped)
    )


def switch_off(*configs: Any) -> None:
    """Set Megatron's own offload flags in `configs` to off, so that it builds the plain optimizer and layers.

    Read them with `config_from_megatron` first. Call this before Megatron builds anything from them. What it calls in
    its RL loop stays: an optimizer that was given to `offload()` sleeps there.
    """
    flags = Flags(configs)
    asks_for_state = _asks_for_state(flags)
    for source in flags.sources:
        for switch in (*BESIDE, "offload_optimizer_states"):
            assign(source, switch, False)
            for flag, neutral in BESIDE.get(switch, {}).items():
                assign(source, flag, type(neutral[0])(neutral[0]) if neutral else None)
        if asks_for_state:
            # Without Megatron's own offload it would need Transformer Engine's optimizer, which keeps the masters.
            assign(source, "use_precision_aware_optimizer", False)
            assign(source, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
            for flag in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
                assign(source, flag, fp32_like(value_of(source, flag)))


# Optimizer state


def _asks_for_state(flags: Flags) -> bool:
    switches = ("optimizer_cpu_offload", "offload_optimizer_states", "chunked_optimizer_state_offload")
    return any(True in flags.values(name) for name in switches)


def _state(flags: Flags) -> OffloadConfig | None:
    by_host = flags.on("optimizer_cpu_offload")
    windowed = flags.on("offload_optimizer_states")
    chunked = flags.on("chunked_optimizer_state_offload")
    if not by_host:
        flags.refuse_idle("optimizer_cpu_offload")
    if not chunked and not windowed:  # on the development branch the second is another name of the first
        flags.refuse_idle("chunked_optimizer_state_offload")
    if not _asks_for_state(flags):
        return None
    _refuse_beside_state(flags)
    settings: dict[str, Any] = {}
    if windowed or chunked:
        settings |= _streamed(flags, windowed=windowed)
    if by_host:
        settings |= _updated_by_host(flags, beside_streams=windowed or chunked)
    return OffloadConfig(**settings | _formats(flags))


def _refuse_beside_state(flags: Flags) -> None:
    """What the update of offloaded state cannot work with."""
    for name in ("fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather"):
        flags.refuse(
            name, (False,), "offloaded state belongs to parameters in fp32, bf16 or fp16; expected them. Leave it out."
        )
    flags.refuse(
        "optimizer_cuda_graph",
        (False,),
        "a captured step cannot move state between host and device; expected a step without a graph. Leave it out.",
    )
    if flags.get("async_save"):
        flags.became("async_save", "works: a save has copies of the state, which the next step does not change")


def _streamed(flags: Flags, *, windowed: bool) -> dict[str, Any]:
    """State that the device updates."""
    settings: dict[str, Any] = {}
    if windowed:
        flags.became("offload_optimizer_states", "window='all': back for the step, away during forward and backward")
        settings["window"] = "all"
    else:
        flags.became("chunked_optimizer_state_offload", "state passes through a few slots, cut also within parameters")
    if flags.has("optimizer_state_offload_fraction"):
        fraction = flags.share("optimizer_state_offload_fraction")
        if fraction == 0.0:
            raise OffloadIneffectiveError(
                "optimizer_state_offload_fraction=0.0 offloads nothing although state offload is switched on. Set it "
                "to 1.0 for all state, or switch chunked_optimizer_state_offload off."
            )
        flags.became("optimizer_state_offload_fraction", f"fraction={fraction}, a share of bytes")
        settings["fraction"] = fraction
    megabytes = flags.whole("optimizer_state_offload_chunk_size_mb")
    if megabytes:
        if windowed:
            raise ConfigError(
                f"offload_optimizer_states brings all state back at once; found chunks of {megabytes} MB as well. Use "
                "chunked_optimizer_state_offload instead of it, or leave optimizer_state_offload_chunk_size_mb out."
            )
        flags.became("optimizer_state_offload_chunk_size_mb", f"chunk_bytes='{megabytes}MiB'")
        settings["chunk_bytes"] = f"{megabytes}MiB"
    return settings


def _updated_by_host(flags: Flags, *, beside_streams: bool) -> dict[str, Any]:
    """State that the CPU updates, as `HybridDeviceOptimizer` has it."""
    fraction = flags.share("optimizer_offload_fraction")
    if fraction == 0.0:
        raise OffloadIneffectiveError(
            "optimizer_cpu_offload=True with optimizer_offload_fraction=0.0 offloads nothing. 0.0 is the default of "
            "Megatron's OptimizerConfig; its command line has 1.0. Set optimizer_offload_fraction=1.0, or the share "
            "of state that shall leave the device."
        )
    if beside_streams and fraction == 1.0:
        raise OffloadIneffectiveError(
            "optimizer_cpu_offload=True with optimizer_offload_fraction=1.0 lets the CPU update all state, so that "
            "none is left for the other state offload to bring back. Lower optimizer_offload_fraction to the share "
            "that the CPU shall update, or switch one of the two off."
        )
    settings: dict[str, Any] = {}
    if beside_streams:
        flags.became("optimizer_cpu_offload", "update_on='auto': the CPU updates a part, the device the rest")
        flags.became("optimizer_offload_fraction", f"host_fraction={fraction} of what leaves")
        settings["host_fraction"] = fraction
    else:
        flags.became("optimizer_cpu_offload", "update_on='host'")
        flags.became("optimizer_offload_fraction", f"fraction={fraction}, a share of bytes")
        settings |= {"update_on": "host", "fraction": fraction}
    if flags.on("overlap_cpu_optimizer_d2h_h2d"):
        flags.became("overlap_cpu_optimizer_d2h_h2d", "always: copies and updates of different chunks overlap")
    if flags.on("use_torch_optimizer_for_cpu_offload"):
        flags.became("use_torch_optimizer_for_cpu_offload", "rule='torch'")
        settings["rule"] = "torch"
    for name in ("pin_cpu_grads", "pin_cpu_params"):
        if flags.get(name) is False:
            flags.became(name, "pin_memory=False, for all host memory of state")
            settings["pin_memory"] = False
    return settings


def _formats(flags: Flags) -> dict[str, Any]:
    """Masters and moments as the precision-aware optimizer has them."""
    if not flags.on("use_precision_aware_optimizer"):
        return {}
    settings: dict[str, Any] = {}
    masters = _format(flags, "main_params_dtype")
    if masters not in (None, "float32"):
        raise ConfigError(
            f"main_params_dtype={flags.get('main_params_dtype')!r}: masters here are fp32, whole or split without "
            "loss; expected fp32. Leave main_params_dtype out."
        )
    splits = flags.on("store_param_remainders") and flags.on("bf16") and not flags.on("optimizer_cpu_offload")
    if splits:
        flags.became("store_param_remainders", "master_weights='split'")
        settings["master_weights"] = "split"
    moments = {}
    for key in ("exp_avg", "exp_avg_sq"):
        found = _format(flags, f"{key}_dtype")
        if found not in (None, "float32", "bfloat16"):
            raise ConfigError(
                f"{key}_dtype={flags.get(f'{key}_dtype')!r}: moments here are fp32 or bf16; expected one of them. "
                f"Set {key}_dtype to bf16."
            )
        if found == "bfloat16":
            flags.became(f"{key}_dtype", f"state_dtype={{'{key}': 'bfloat16'}}")
            moments[key] = found
    if moments:
        settings["state_dtype"] = moments
    flags.became("use_precision_aware_optimizer", "off: masters and moments live with offstage, in these formats")
    return settings


def _format(flags: Flags, name: str) -> str | None:
    """Of a dtype of torch, or of a word of the command line; itself if it is neither fp32 nor bf16."""
    value = flags.get(name)
    if value is None:
        return None
    word = str(value).removeprefix("torch.")
    return _FORMATS.get(word, word)


# Activations


def _activations(flags: Flags) -> tuple[ActivationConfig | None, tuple[str, ...]]:
    num_layers = flags.whole("cpu_offloading_num_layers")
    # The command line has only the number of layers, from which Megatron derives the switch.
    whole_layers = flags.on("cpu_offloading") or (num_layers > 0 and not flags.has("cpu_offloading"))
    parts = flags.on("fine_grained_activation_offloading")
    if not whole_layers:
        flags.refuse_idle("cpu_offloading")
    if not parts:
        flags.refuse_idle("fine_grained_activation_offloading")
    if not whole_layers and not parts:
        return None, ()
    if whole_layers and parts:
        raise ConfigError(
            "cpu_offloading and fine_grained_activation_offloading both choose which saved tensors leave; expected one "
            "of them. Switch one off: cpu_offloading for whole layers, the other for parts of them."
        )
    refuse_beside_activations(flags)
    if whole_layers:
        for name in ("pipeline_model_parallel_size", "recompute_granularity"):
            if flags.get(name, 1) != 1:
                flags.became(name, "works beside activation offload, which Megatron's own refuses")
        return _of_layers(flags, num_layers), ()
    return _of_modules(flags)


def refuse_beside_activations(flags: Flags) -> None:
    """What saved tensors that leave cannot work with."""
    flags.refuse(
        "cuda_graph_impl",
        ("none",),
        "saved tensors cannot leave from a captured graph; expected 'none' beside activation offload. Leave it out.",
    )
    for name in ("enable_cuda_graph", "external_cuda_graph", "delay_offload_until_cuda_graph"):
        flags.refuse(name, (False,), "saved tensors cannot leave from a captured graph. Leave it out.")
    flags.refuse(
        "moe_paged_stash",
        (False,),
        "it takes the same saved tensors as activation offload does; expected one of them. Switch one off.",
    )
    flags.refuse(
        "overlap_moe_expert_parallel_comm",
        (False,),
        "its schedule runs parts of layers and never calls the model, so that no saved tensor would be seen. Leave it "
        "out, or switch activation offload off.",
    )
    flags.refuse(
        "distribute_saved_activations",
        (False,),
        "it replaces the inputs that recomputed layers save by parts of them; expected them whole. Leave it out.",
    )
    if flags.get("recompute_granularity") == "selective":
        for name in flags.get("recompute_modules") or ():
            if name in _DISCARDING:
                raise ConfigError(
                    f"recompute_modules has {name!r}, with which Megatron empties tensors that autograd has saved, "
                    "also while they are being copied to the host; expected 'core_attn', 'mlp', 'moe' or "
                    "'shared_experts' beside activation offload. Leave it out, or use recompute_granularity='full'."
                )


def _of_layers(flags: Flags, num_layers: int) -> ActivationConfig:
    if num_layers == 0:
        raise OffloadIneffectiveError(
            "cpu_offloading=True with cpu_offloading_num_layers=0 offloads nothing. Set cpu_offloading_num_layers to "
            "the number of layers whose saved tensors shall leave."
        )
    most = flags.whole("num_layers", num_layers)
    if num_layers > most:
        raise ConfigError(
            f"cpu_offloading_num_layers={num_layers}: the model has {most} layers; expected at most as many. Lower it."
        )
    if flags.get("cpu_offloading_activations", True) is False:
        raise OffloadIneffectiveError(
            "cpu_offloading=True with cpu_offloading_activations=False leaves saved tensors on the device, and weights "
            "cannot leave (Megatron's DDP keeps all of them in one buffer there). Set cpu_offloading_activations."
        )
    flags.refuse(
        "cpu_offloading_weights",
        (False,),
        "Megatron's DDP keeps every weight in one buffer on the device, so that copies on the host would free nothing. "
        "Leave it out. In a loop without that DDP, offstage.offload(weights='host') moves weights.",
    )
    flags.became("cpu_offloading_num_layers", f"layers={num_layers} of each model chunk, spread over it")
    if flags.on("cpu_offloading_double_buffering"):
        flags.became("cpu_offloading_double_buffering", "always: prefetch=1")
    if flags.on("cpu_offloading_retain_pinned_cpu_buffers"):
        flags.became("cpu_offloading_retain_pinned_cpu_buffers", "always: a pool of pinned memory")
    return ActivationConfig(layers=num_layers)


def _of_modules(flags: Flags) -> tuple[ActivationConfig, tuple[str, ...]]:
    modules = tuple(flags.get("offload_modules") or ())
    if not modules:
        raise OffloadIneffectiveError(
            "fine_grained_activation_offloading=True without offload_modules offloads nothing. Set offload_modules to "
            f"some of {', '.join(_MODULES)}."
        )
    if unknown := [name for name in modules if name not in _MODULES]:
        raise ConfigError(f"offload_modules expects names out of {', '.join(_MODULES)}; found {unknown[0]!r}. Mend it.")
    if "moe_act" in modules:
        raise ConfigError(
            "offload_modules has 'moe_act', a function inside the experts; expected modules. Use 'fused_group_mlp' for "
            "all that the experts save, or 'expert_fc1' for the input of their first linear."
        )
    if flags.get("recompute_granularity") == "full":
        raise OffloadIneffectiveError(
            "recompute_granularity='full' beside offload_modules: recomputed layers save nothing inside, only their "
            "inputs. Use cpu_offloading with cpu_offloading_num_layers, which offloads these."
        )
    inside = {"expert_fc1", "fused_group_mlp"} & {*modules}
    if len(inside) > 1:
        raise ConfigError(
            "offload_modules has 'fused_group_mlp' and 'expert_fc1', which is a part of it; expected one of them. "
            "Leave 'expert_fc1' out."
        )
    if inside and "moe" in (flags.get("recompute_modules") or ()) and flags.get("recompute_granularity"):
        raise OffloadIneffectiveError(
            f"recompute_modules has 'moe' beside {min(inside)!r} in offload_modules: a recomputed MoE saves nothing "
            "inside. Leave one of the two out."
        )
    flags.refuse(
        "delta_offload_bytes_across_pp_ranks",
        (0,),
        "stages here offload by shares, not by bytes; expected 0. Leave it out and lower fraction on later stages: "
        "offload_activations(chunks, flags.activations, modules=flags.modules, fraction=...).",
    )
    flags.became("offload_modules", "modules: their saved tensors leave, their inputs among them")
    return ActivationConfig(**_sizes(flags)), modules


def _sizes(flags: Flags) -> dict[str, Any]:
    """Settings of `ActivationConfig` beside its layers."""
    settings: dict[str, Any] = {}
    fraction = flags.share("activation_offload_fraction") if flags.has("activation_offload_fraction") else 1.0
    if fraction == 0.0:
        raise OffloadIneffectiveError(
            "activation_offload_fraction=0.0 offloads nothing although activation offload is switched on. Raise it, or "
            "switch fine_grained_activation_offloading off."
        )
    if fraction != 1.0:
        flags.became("activation_offload_fraction", f"fraction={fraction} of their bytes")
        settings["fraction"] = fraction
    width = 2 if flags.on("bf16") or flags.on("fp16") else 4
    elements = flags.whole("min_offloaded_tensor_size", DEFAULT_ELEMENTS)
    settings["min_bytes"] = width * elements
    flags.became("min_offloaded_tensor_size", f"min_bytes={width * elements}: elements there, bytes here")
    if flags.get("fine_grained_offloading_max_inflight_offloads") is not None:
        most = max(1, flags.whole("fine_grained_offloading_max_inflight_offloads"))
        flags.became("fine_grained_offloading_max_inflight_offloads", f"prefetch={most}: how many may be leaving")
        settings["prefetch"] = most
    return settings
