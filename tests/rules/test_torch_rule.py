# SPDX-License-Identifier: Apache-2.0
"""Every other `torch.optim` class: the same bits as the plain class, on both backends, in 32 and 16 bits."""

import pytest
import torch
from torch import nn

import offstage
from tests.support.training import lazily, same_bits

CASES = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.125}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Muon, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
]
MATRICES = [(67, 129), (64, 301), (100, 33), (3, 5)]
OTHERS = [(1000,), (), (0, 4), (1,)]


def shapes_for(make):
    if make is torch.optim.Muon:
        return MATRICES
    if make is torch.optim.Adafactor:  # divides by the number of elements
        return MATRICES + [shape for shape in OTHERS if 0 not in shape]
    return MATRICES + OTHERS


def train(make, options, dtype, config):
    torch.manual_seed(1)
    shapes = shapes_for(make)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    if make not in (torch.optim.Muon, torch.optim.Adafactor):
        params.append(nn.Parameter(torch.randn(40, 30).to(dtype).t()))  # not contiguous
    optimizer = make([{"params": params[:3]}, {"params": params[3:], "lr": 0.02}], **options)
    if config is not None:
        optimizer = offstage.offload(optimizer, min_bytes=0, chunk_bytes="16KiB", rule="torch", **config)
    for step in range(7):
        for i, param in enumerate(params):
            # Autograd gives a gradient its parameter's strides. One assigned by hand may have others: in 16 bits on the
            # CPU torch then takes another loop with other roundings, and its fused kernels mix the elements up.
            by_hand = dtype == torch.float32 and not options.get("fused")
            gradient = torch.randn(param.shape) if by_hand else torch.randn_like(param)
            param.grad = None if (i + step) % 4 == 0 else gradient  # some parameters start later, some pause
        optimizer.step()
    states = optimizer.state_dict()["state"]
    flat = {(i, k): torch.as_tensor(v) for i, s in states.items() for k, v in s.items()}
    return [p.detach() for p in params], flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("make", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_equals_the_plain_class(make, options, dtype):
    plain_weights, plain_state = train(make, options, dtype, None)
    runs = [train(make, options, dtype, {"master_weights": "none", "fraction": f}) for f in (1.0, 0.5, 0.0)]
    for seed in (0, 1):
        with lazily(seed):
            runs.append(train(make, options, dtype, {"master_weights": "none"}))
    for weights, state in runs:
        assert all(same_bits(a, b) for a, b in zip(weights, plain_weights, strict=True))
        assert state.keys() == plain_state.keys()
        assert all(same_bits(state[key], plain_state[key]) for key in state)


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
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert torch.equal(optimizer.state_dict()["state"][i]["master_weight"], b.detach())
        assert torch.equal(a.detach(), b.detach().bfloat16())


def test_global_hooks_fire_once_per_step():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    params = [nn.Parameter(torch.randn(64, 301)) for _ in range(4)]
    optimizer = offstage.offload(torch.optim.NAdam(params), min_bytes=0, chunk_bytes="16KiB")
    fired = []
    handle = register_optimizer_step_post_hook(lambda opt, args, kwargs: fired.append(opt))
    try:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    finally:
        handle.remove()
    assert fired == [optimizer]


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
