# SPDX-License-Identifier: Apache-2.0
"""Every other `torch.optim` class: the same bits as the plain class, on both backends, in 32 and 16 bits."""

import pytest
import torch
from torch import nn

import offstage
from tests.support.torch_classes import CASES, assert_masters_equal, same_class_run, shapes_for, train_class
from tests.support.training import lazily


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("make", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_equals_the_plain_class(make, options, dtype):
    plain = train_class(make, options, dtype, None)
    runs = [train_class(make, options, dtype, {"master_weights": "none", "fraction": f}) for f in (1.0, 0.5, 0.0)]
    for seed in (0, 1):
        with lazily(seed):
            runs.append(train_class(make, options, dtype, {"master_weights": "none"}))
    assert all(same_class_run(run, plain) for run in runs)


@pytest.mark.parametrize(("make", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_masters_equal_the_plain_class_on_fp32_copies(make, options):
    """bf16 parameters with fp32 masters: the class runs on the masters, the weights are the masters rounded."""
    torch.manual_seed(2)
    ours = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes_for(make)]
    plain = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer = offstage.offload(make(ours, **options), min_bytes=0, chunk_bytes="16KiB", rule="torch")
    other = make(plain, **options)
    for _ in range(5):
        for a, b in zip(ours, plain, strict=True):
            a.grad = torch.randn(a.shape).bfloat16()
            b.grad = a.grad.float()
        optimizer.step()
        other.step()
    assert_masters_equal(ours, optimizer, plain)


def test_a_foreign_weight_wins_over_its_master():
    param = nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = offstage.offload(torch.optim.SGD([param], lr=0.0, momentum=0.9), min_bytes=0)
    for value in (None, 3.0):
        if value is not None:
            param.data.fill_(value)
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(optimizer.state[param]["master_weight"], torch.full((64, 64), 3.0))
    assert optimizer.receipt().weights_written_by_others == 64 * 64
