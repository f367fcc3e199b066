# SPDX-License-Identifier: Apache-2.0
"""Every other `torch.optim` class on the device: split into chunks, with the bits of running it whole."""

import pytest
import torch

import offstage
from tests.support.training import same_bits

CASES = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Muon, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "capturable": True}),
]
SHAPES = [(257, 129), (64, 300), (1000, 33)]


def _train(cls: type, options: dict, dtype: torch.dtype, config: dict | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SHAPES]
    optimizer = cls(params, **options)
    if config is not None:
        optimizer = offstage.offload(optimizer, min_bytes=0, chunk_bytes="64KiB", rule="torch", **config)
    for _ in range(6):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    tensors = [v.cpu() for s in state.values() for k, v in sorted(s.items()) if isinstance(v, torch.Tensor)]
    return [p.detach().cpu() for p in params] + tensors


@pytest.mark.parametrize(("cls", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_the_plain_class(cls: type, options: dict, dtype: torch.dtype) -> None:
    plain = _train(cls, options, dtype, None)
    for config in ({"fraction": 1.0}, {"fraction": 0.5}):
        ours = _train(cls, options, dtype, {"master_weights": "none", **config})
        assert len(ours) == len(plain)
        assert all(same_bits(a, b) for a, b in zip(ours, plain, strict=True))
