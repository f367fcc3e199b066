# SPDX-License-Identifier: Apache-2.0
"""`fit` on a real device: the bits of everything resident, and never more than `device_peak`."""

import pytest
import torch
from torch import nn

import offstage
from tests.support.training import Block, same_bits

WIDTH, LAYERS, ROWS = 1024, 8, 4096


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, 4) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trained(device_peak: str | None, *, clip: bool, steps: int = 14) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """The most that was allocated counts over the whole life, though `fit` resets the statistics."""
    model = Model().to("cuda", torch.bfloat16)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if device_peak is None:
        optimizer = offstage.offload(plain, model, fraction=0.0)
    else:
        optimizer = offstage.fit(model, plain, device_peak, host_budget="24GiB")
    generator = torch.Generator("cuda").manual_seed(1)
    most = 0
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
        model(x).float().square().mean().backward()
        most = max(most, torch.cuda.max_memory_allocated())
        if clip:
            optimizer.clip_grad_norm_(1e-2)
        optimizer.step()
        most = max(most, torch.cuda.max_memory_allocated())
        optimizer.zero_grad()
    optimizer.synchronize()
    return model, optimizer, most


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("device_peak", ["1200MiB", "2GiB", "40GiB"])
def test_the_bits_and_the_limit(device_peak: str, clip: bool) -> None:
    offstage.measure_machine()  # before: it takes memory of its own
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ours, optimizer, most = trained(device_peak, clip=clip)
        theirs, _, _ = trained(None, clip=clip)
    finally:
        torch.use_deterministic_algorithms(False)
    assert optimizer.fitted is not None
    assert most <= optimizer.fitted.limits.device
    assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
