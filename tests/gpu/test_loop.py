# SPDX-License-Identifier: Apache-2.0
"""Training loops on the device: CUDA graphs, compiled models and GradScaler around an offloaded step."""

import pytest
import torch
from torch import nn

import offstage
from tests.support.gates import steps_on_three_streams
from tests.support.lives import end_step
from tests.support.params import equal, make_params

STREAMED = {"fraction": 1.0, "min_bytes": 0, "chunk_bytes": "64KiB"}
RESIDENT = {"fraction": 0.0}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)).cuda()


def _graphed(config: dict) -> list[torch.Tensor]:
    """Forward and backward captured once and replayed; gradients stay at their addresses, so do the weights."""
    model = _model()
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, **config)
    x = torch.randn(32, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
    for _ in range(8):
        graph.replay()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def _compiled(config: dict) -> list[torch.Tensor]:
    model = _model()
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, **config)
    compiled = torch.compile(model, backend="aot_eager")
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(5):
        compiled(torch.randn(32, 128, device="cuda", generator=generator)).square().mean().backward()
        end_step(optimizer)
    return [p.detach().cpu() for p in model.parameters()]


def _scaled(config: dict) -> list[torch.Tensor]:
    """fp16 autocast with a scale that overflows at first: skipped steps change and move nothing."""
    model = _model()
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, **config)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    generator = torch.Generator("cuda").manual_seed(1)
    skipped = 0
    for _ in range(40):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(32, 128, device="cuda", generator=generator)).square().mean()
        moved, scale = optimizer.receipt().total_bytes_fetched, scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < scale:
            skipped += 1
            assert optimizer.receipt().total_bytes_fetched == moved
    assert 0 < skipped < 40
    assert optimizer.receipt().steps == 40 - skipped
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("train", [_graphed, _compiled, _scaled], ids=["CUDA graph", "compiled", "GradScaler"])
def test_the_loop_works_and_the_bits_are_those_of_resident_state(train) -> None:
    assert equal(train(STREAMED), train(RESIDENT))


def test_the_caller_may_change_streams_and_free_gradients() -> None:
    """Each step from another stream, gradients freed and their memory overwritten at once."""

    def train(config: dict) -> list[torch.Tensor]:
        params = make_params(shapes=((512, 512),) * 4, device="cuda")
        steps_on_three_streams(params, offstage.offload(torch.optim.AdamW(params), **config), 12)
        return [p.detach().cpu() for p in params]

    assert equal(train(STREAMED), train(RESIDENT))
