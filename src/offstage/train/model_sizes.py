# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the sizes of a transformer as plain numbers, and `SIZES`, the named ones.

No tensor is made here: `num_parameters` is a formula.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from offstage import ConfigError

BYTES = 256
"""The vocabulary of byte-level text."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU or a mixture of them, untied head."""

    layers: int
    """Blocks."""

    width: int
    """Features of a token between blocks."""

    heads: int
    """Attention heads; each has ``width / heads`` features."""

    kv_heads: int
    """Heads of keys and values. Each serves ``heads / kv_heads`` heads of queries."""

    hidden: int
    """Features inside a SwiGLU; with experts, inside each of them."""

    vocabulary: int = BYTES
    """Tokens that can be read and predicted."""

    experts: int = 0
    """SwiGLUs per block of which each token visits some. 0: one per block, and every token visits it."""

    experts_per_token: int = 2
    """How many it visits. Ignored without experts."""

    balance_weight: float = 0.01
    """Weight of the balancing loss. Ignored without experts."""

    rotary_base: float = 10_000.0
    """The slowest rotation of RoPE takes about ``2 π · rotary_base`` tokens."""

    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} expects at least 1; found {getattr(self, name)}. Leave it out.")
        if self.width % self.heads or self.head_width % 2:
            raise ConfigError(
                f"width expects an even number of features for each of the heads={self.heads}; found {self.width}. "
                f"Use {2 * self.heads * max(1, round(self.width / (2 * self.heads)))}, or another number of heads."
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"kv_heads expects a divisor of heads={self.heads}; found {self.kv_heads}. Use "
                f"{max(n for n in range(1, self.heads + 1) if not self.heads % n and n <= self.kv_heads)}."
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"experts_per_token expects a number from 1 to experts={self.experts}; found {self.experts_per_token}. "
                f"Use {min(2, self.experts)}."
            )
        if self.experts and (self.width % 8 or self.hidden % 8):
            raise ConfigError(
                f"With experts, width and hidden are expected to be multiples of 8, which grouped products need; found "
                f"{self.width} and {self.hidden}. Round them up."
            )

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads

    @property
    def qkv_width(self) -> int:
        """Features of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_width


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model, all experts included."""
    attention = config.width * config.qkv_width + config.width * config.width
    swiglu = 3 * config.width * config.hidden
    feed_forward = config.experts * (swiglu + config.width) if config.experts else swiglu  # experts and their router
    block = attention + feed_forward + 2 * config.width
    return config.layers * block + config.width + 2 * config.vocabulary * config.width


def num_active_parameters(config: ModelConfig) -> int:
    """Parameters that one token uses: all but the experts it does not visit."""
    idle = max(0, config.experts - config.experts_per_token)
    return num_parameters(config) - config.layers * idle * 3 * config.width * config.hidden


def _size(layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int = BYTES) -> ModelConfig:
    return ModelConfig(layers=layers, width=width, heads=heads, kv_heads=kv_heads, hidden=hidden, vocabulary=vocabulary)


SIZES: dict[str, ModelConfig] = {
    "1M": _size(4, 128, 4, 2, 512),
    "10M": _size(12, 256, 4, 2, 768),
    "50M": _size(16, 512, 8, 4, 1536),
    "150M": _size(24, 768, 12, 4, 2048),
    "500M": _size(20, 1536, 12, 4, 4096),
    "1B": _size(16, 2048, 16, 4, 8192),
    "2.7B": _size(32, 2560, 20, 20, 6912, vocabulary=32_000),  # the model of all measurements of whole iterations
    "7B": _size(32, 4096, 32, 8, 14_336),
    "13B": _size(48, 5120, 40, 8, 13_824),
    "18B": _size(64, 5120, 40, 8, 14_336),
    "20B": _size(64, 5120, 40, 8, 16_384),
}
"""By number of parameters. The vocabulary is that of bytes unless given."""


def with_overrides(config: ModelConfig, **overrides: int | None) -> ModelConfig:
    """`config` with the overrides that are not ``None``.

    If only the width or only the heads are given, the others follow: the features of a head and the ratio of heads to
    heads of keys and values stay the same.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    if "experts_per_token" in given and not given.get("experts", config.experts):
        raise ConfigError(
            f"experts_per_token={given['experts_per_token']} expects a model with experts; found one without. Give "
            "experts too, or leave it out."
        )
    if "width" in given and "heads" not in given:
        given["heads"] = max(1, given["width"] // config.head_width)
    if "heads" in given and "kv_heads" not in given:
        group = config.heads // config.kv_heads
        given["kv_heads"] = given["heads"] // group if not given["heads"] % group else given["heads"]
    if given.get("experts") and "experts_per_token" not in given:
        given["experts_per_token"] = min(config.experts_per_token, given["experts"])
    return dataclasses.replace(config, **given)  # type: ignore[arg-type]
