# SPDX-License-Identifier: Apache-2.0
"""Text that the model writes, byte by byte. Called by `loop.py`, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable

import torch

BYTES = 256
TEMPERATURE = 0.8
"""A little less random than the model believes: short samples of a small model are easier to judge so."""


@torch.no_grad()
def write(
    logits_of: Callable[[torch.Tensor], torch.Tensor], prompt: bytes, length: int, *, sequence: int, seed: int
) -> bytes:
    """`length` bytes that follow `prompt`.

    `logits_of` takes [1, sequence] tokens and gives [1, sequence, vocabulary] on every rank. The window is always as
    long as in training, filled up behind with zeros, which a causal model does not see: one shape for compiled
    blocks and pipelines. The draw is the host's own, so training's random numbers are not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(length):
        seen = bytes(text[-sequence:])
        window = torch.zeros(1, sequence, dtype=torch.int64)
        window[0, : len(seen)] = torch.frombuffer(bytearray(seen), dtype=torch.uint8)
        logits = logits_of(window)[0, len(seen) - 1, :BYTES].float().cpu()
        if not logits.isfinite().all():
            break  # weights that are not finite write nothing
        chances = torch.softmax(logits / TEMPERATURE, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text[len(prompt) :])


def entry(step: int, prompt: bytes, written: bytes) -> str:
    """One sample in `samples.txt`: the prompt in brackets, and bytes that are no text as escapes."""
    shown = [part.decode("utf-8", errors="backslashreplace") for part in (prompt, written)]
    return f"--- step {step} ---\n[{shown[0]}]{shown[1]}\n\n"
