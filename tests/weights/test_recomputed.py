# SPDX-License-Identifier: Apache-2.0
"""Layers that are recomputed and whose weights live on the host: backward runs them with weights on the device."""

import pytest
import torch
from torch import nn

import offstage
from offstage.activations.offload import offload_activations
from offstage.modules import running_backward
from offstage.planning.choices import Choice
from offstage.weights.host_weights import host_weight_of
from tests.support.training import Block, lazily, same_bits

WIDTH = 32


class Watched(Block):
    """Notes which memory its weights are in when backward runs it again."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.again: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if running_backward() is not None:
            weight = host_weight_of(self.up.weight)
            assert weight is not None
            self.again.append(self.up.weight.data_ptr() != weight.host.data_ptr())
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Watched() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(config: dict, choices: list[Choice]) -> Model:
    model = Model()
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=1e-2), model, min_bytes=0, **config)
    if choices:
        offload_activations(model, min_bytes=0, keep_last=0).replan(choices)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        model(torch.randn(5, WIDTH, generator=generator)).square().mean().backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model


@pytest.mark.parametrize("lanes", [None, 0, 1, 2])
@pytest.mark.parametrize("cues", [{}, {"overlap_forward": True}, {"update_in_backward": True, "overlap_forward": True}])
def test_weights_are_on_the_device_when_backward_runs_a_layer_again(lanes, cues):
    config = {"weights": "host", "chunk_bytes": "16KiB", **cues}
    choices = [Choice.RECOMPUTE, Choice.RECOMPUTE, Choice.OFFLOAD, Choice.RECOMPUTE]
    with lazily(lanes):
        ours = trained(config, choices)
    for layer, choice in zip(ours.layers, choices, strict=True):
        assert layer.again == ([True] * 6 if choice is Choice.RECOMPUTE else [])
    theirs = trained({"fraction": 0.0}, [])
    assert all(same_bits(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
