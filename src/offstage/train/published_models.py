# SPDX-License-Identifier: Apache-2.0
"""Published models as shapes of their parameters, computed from the numbers of their configurations. No tensor is made.

Names and order are those of the transformers package, except that every expert has parameters of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder with RMSNorm, rotary positions, grouped-query attention, and gated MLPs or experts."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    head_width: int = 128
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """Per block."""
    experts: int = 0
    """With experts, `hidden` is that of each."""

    def shapes(self) -> Shapes:
        found: Shapes = {"model.embed_tokens.weight": (self.vocabulary, self.width)}
        for layer in range(self.layers):
            found |= {f"model.layers.{layer}.{name}": shape for name, shape in self._block()}
        found["model.norm.weight"] = (self.width,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.width)
        return found

    def _block(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"self_attn.{name}_proj.weight", (size, self.width)
            if self.qkv_bias:
                yield f"self_attn.{name}_proj.bias", (size,)
        yield "self_attn.o_proj.weight", (self.width, queries)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_width,)
            yield "self_attn.k_norm.weight", (self.head_width,)
        if self.experts:
            yield "mlp.gate.weight", (self.experts, self.width)
        for part in [f"experts.{i}." for i in range(self.experts)] or [""]:
            yield f"mlp.{part}gate_proj.weight", (self.hidden, self.width)
            yield f"mlp.{part}up_proj.weight", (self.hidden, self.width)
            yield f"mlp.{part}down_proj.weight", (self.width, self.hidden)
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        yield from ((f"{name}_layernorm.weight", (self.width,)) for name in names[: self.norms])


def _gpt2(width: int, layers: int) -> Shapes:
    """GPT-2: learned positions, LayerNorm, biases everywhere, a head that is the embedding."""
    found: Shapes = {"transformer.wte.weight": (50_257, width), "transformer.wpe.weight": (1024, width)}
    products = {"attn.c_attn": 3 * width, "attn.c_proj": width, "mlp.c_fc": 4 * width, "mlp.c_proj": width}
    for layer in range(layers):
        block = f"transformer.h.{layer}."
        for norm in ("ln_1", "ln_2"):
            found |= {f"{block}{norm}.weight": (width,), f"{block}{norm}.bias": (width,)}
        for name, out in products.items():
            inputs = 4 * width if name == "mlp.c_proj" else width
            found |= {f"{block}{name}.weight": (inputs, out), f"{block}{name}.bias": (out,)}
    return found | {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}


def _llama3(width: int, layers: int, heads: int, hidden: int, head_width: int = 128, tied: bool = False) -> Decoder:
    return Decoder(
        vocabulary=128_256, width=width, layers=layers, heads=heads, kv_heads=8, hidden=hidden, head_width=head_width,
        tied=tied,
    )  # fmt: skip


def _llama2(width: int, layers: int, heads: int, kv_heads: int, hidden: int, experts: int = 0) -> Decoder:
    return Decoder(
        vocabulary=32_000, width=width, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden,
        head_width=width // heads, experts=experts,
    )  # fmt: skip


def _qwen2(vocabulary: int, width: int, layers: int, heads: int, kv_heads: int, hidden: int, tied: bool) -> Decoder:
    return Decoder(
        vocabulary=vocabulary, width=width, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden,
        head_width=width // heads, tied=tied, qkv_bias=True,
    )  # fmt: skip


def _qwen3(
    width: int, layers: int, heads: int, kv_heads: int, hidden: int, tied: bool = False, experts: int = 0
) -> Decoder:
    return Decoder(
        vocabulary=151_936, width=width, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden, tied=tied,
        qk_norm=True, experts=experts,
    )  # fmt: skip


def _gemma2(width: int, layers: int, heads: int, kv_heads: int, hidden: int) -> Decoder:
    return Decoder(
        vocabulary=256_000, width=width, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden, head_width=256,
        tied=True, norms=4,
    )  # fmt: skip


PUBLISHED: dict[str, Callable[[], Shapes]] = {
    "gpt2": partial(_gpt2, 768, 12),
    "gpt2-xl": partial(_gpt2, 1600, 48),
    "tinyllama-1.1b": _llama2(2048, 22, 32, 4, 5632).shapes,
    "llama-2-7b": _llama2(4096, 32, 32, 32, 11_008).shapes,
    "llama-2-13b": _llama2(5120, 40, 40, 40, 13_824).shapes,
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, head_width=64, tied=True).shapes,
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, tied=True).shapes,
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336).shapes,
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672).shapes,
    "mistral-7b": _llama2(4096, 32, 32, 8, 14_336).shapes,
    "mixtral-8x7b": _llama2(4096, 32, 32, 8, 14_336, experts=8).shapes,
    "qwen2.5-0.5b": _qwen2(151_936, 896, 24, 14, 2, 4864, tied=True).shapes,
    "qwen2.5-1.5b": _qwen2(151_936, 1536, 28, 12, 2, 8960, tied=True).shapes,
    "qwen2.5-7b": _qwen2(152_064, 3584, 28, 28, 4, 18_944, tied=False).shapes,
    "qwen2.5-32b": _qwen2(152_064, 5120, 64, 40, 8, 27_648, tied=False).shapes,
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True).shapes,
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied=True).shapes,
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288).shapes,
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 4, 768, experts=128).shapes,
    "gemma-2-2b": _gemma2(2304, 26, 8, 4, 9216).shapes,
    "gemma-2-9b": _gemma2(3584, 42, 16, 8, 14_336).shapes,
}
"""Shapes by the name of a model."""
