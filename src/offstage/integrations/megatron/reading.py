# SPDX-License-Identifier: Apache-2.0
"""`Flags`: Megatron's offload flags in all the objects that may hold them, read by name, and what became of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offstage import ConfigError, OffloadIneffectiveError

DEFAULT_ELEMENTS = 1024 * 1024
"""Megatron's default of `min_offloaded_tensor_size`."""

_PARTS = ("optimizer", "model", "ddp")
"""Fields of Megatron Bridge's container whose objects are read."""

BESIDE: dict[str, dict[str, tuple[Any, ...]]] = {
    "optimizer_cpu_offload": {
        "optimizer_offload_fraction": (0.0, 1.0),  # the defaults of its Python and of its command line
        "use_torch_optimizer_for_cpu_offload": (False,),
        "overlap_cpu_optimizer_d2h_h2d": (False,),
        "pin_cpu_grads": (True,),
        "pin_cpu_params": (True,),
    },
    "chunked_optimizer_state_offload": {
        "optimizer_state_offload_fraction": (1.0,),
        "optimizer_state_offload_chunk_size_mb": (0,),
    },
    "cpu_offloading": {
        "cpu_offloading_num_layers": (0,),
        "cpu_offloading_activations": (True,),
        "cpu_offloading_weights": (False,),
        "cpu_offloading_double_buffering": (False,),
        "cpu_offloading_retain_pinned_cpu_buffers": (False,),
    },
    "fine_grained_activation_offloading": {
        "offload_modules": ([], ()),
        "min_offloaded_tensor_size": (DEFAULT_ELEMENTS,),
        "delay_offload_until_cuda_graph": (False,),
        "delta_offload_bytes_across_pp_ranks": (0,),
        "activation_offload_fraction": (1.0,),
        "fine_grained_offloading_max_inflight_offloads": (),
    },
}
"""Each switch, and the flags that do nothing without it, with the values at which they ask for nothing."""

SWITCHES = (*BESIDE, "offload_optimizer_states", "rl_offload_optimizer_during_inference")
_KNOWN = frozenset((*SWITCHES, *(flag for flags in BESIDE.values() for flag in flags)))


@dataclass(frozen=True)
class Became:
    """One flag, its value, and what it is here."""

    flag: str
    value: Any
    here: str

    def __str__(self) -> str:
        return f"{self.flag}={self.value!r}: {self.here}"


class Flags:
    """The flags of all objects given, and what became of those that were set."""

    def __init__(self, configs: tuple[Any, ...]) -> None:
        self.sources = [source for config in configs for source in _sources(config)]
        if not any(_has(source, name) for source in self.sources for name in _KNOWN):
            found = ", ".join(type(config).__name__ for config in configs) or "nothing"
            raise ConfigError(
                "config_from_megatron() expects Megatron's arguments, an OptimizerConfig or a TransformerConfig; found "
                f"{found}, without any of their offload flags. Pass get_args(), or the config objects themselves."
            )
        self.mapped: list[Became] = []

    def has(self, name: str) -> bool:
        return any(_has(source, name) for source in self.sources)

    def values(self, name: str) -> list[Any]:
        """Different values of `name`; `None` is no value."""
        found: list[Any] = []
        for source in self.sources:
            value = value_of(source, name)
            if value is not None and value not in found:
                found.append(value)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        found = self.values(name)
        if len(found) > 1:
            raise ConfigError(
                f"The configs given disagree about {name}: found {' and '.join(map(repr, found))}; expected one value. "
                "Give the object that Megatron builds from, or set both alike."
            )
        return found[0] if found else default

    def on(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} expects True or False; found {value!r}. Set it as Megatron reads it.")
        return value

    def share(self, name: str) -> float:
        value = self.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name} expects a number from 0 to 1; found {value!r}. Set 1.0 for all.")
        return float(value)

    def whole(self, name: str, default: int = 0) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} expects a whole number of at least 0; found {value!r}. Leave it out.")
        return value

    def became(self, name: str, here: str) -> None:
        self.mapped.append(Became(name, self.get(name), here))

    def refuse_idle(self, switch: str) -> None:
        """Raise for a flag that does nothing because `switch` is off."""
        for name, neutral in BESIDE[switch].items():
            idle = [value for value in self.values(name) if value not in neutral]
            if idle:
                raise OffloadIneffectiveError(
                    f"{name}={idle[0]!r} has no effect: {switch} is off. Set {switch} as well, or leave {name} out."
                )

    def refuse(self, name: str, allowed: Collection[Any], why: str) -> None:
        """Raise if `name` has a value that is not in `allowed`."""
        for value in self.values(name):
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: {why}")


def _sources(config: Any) -> Iterator[Any]:
    """`config`, and the parts of a container."""
    if config is None or isinstance(config, (str, bytes, int, float)):
        return
    yield config
    for name in _PARTS:
        yield from _sources(value_of(config, name))


def _has(source: Any, name: str) -> bool:
    return name in source if isinstance(source, Mapping) else hasattr(source, name)


def value_of(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def assign(source: Any, name: str, value: Any) -> None:
    if not _has(source, name):
        return
    if isinstance(source, Mapping):
        source[name] = value  # type: ignore[index]
    else:
        setattr(source, name, value)


def fp32_like(value: Any) -> Any:
    """fp32 as `value` names its format: a dtype of torch, or a word of the command line."""
    if value is None or isinstance(value, str):
        return None if value is None else "fp32"
    import torch

    return torch.float32
