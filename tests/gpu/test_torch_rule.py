# SPDX-License-Identifier: Apache-2.0
"""Every other class on the device, torch's and made-up ones: split into chunks, with the bits of running it whole."""

import pytest
import torch

import offstage
from tests.support import made_up
from tests.support.lives import end_step
from tests.support.params import equal, make_params, result
from tests.support.torch_classes import CASES as HOST_CASES

CASES = [
    *HOST_CASES,
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "capturable": True}),
    *((kind, {}) for kind in made_up.ELEMENTWISE if kind is not made_up.SharedCount),
    (made_up.Scaled, {"fused": True}),
]
SHAPES = [(257, 129), (64, 300), (1000, 33)]


def _train(cls: type, options: dict, dtype: torch.dtype, config: dict | None) -> list[torch.Tensor]:
    params = make_params(dtype, SHAPES, "cuda")
    optimizer = cls(params, **options)
    if config is not None:
        optimizer = offstage.offload(optimizer, min_bytes=0, chunk_bytes="64KiB", rule="torch", **config)
    for _ in range(6):
        for param in params:
            param.grad = torch.randn_like(param)
        end_step(optimizer)
    return result(params, optimizer)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_the_plain_class(cls: type, options: dict, dtype: torch.dtype) -> None:
    plain = _train(cls, options, dtype, None)
    for config in ({"fraction": 1.0}, {"fraction": 0.5}):
        assert equal(_train(cls, options, dtype, {"master_weights": "none", **config}), plain)
