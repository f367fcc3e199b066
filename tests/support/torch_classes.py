# SPDX-License-Identifier: Apache-2.0
"""The `torch.optim` classes whose arithmetic is torch's own, and a run of each."""

import torch
from torch import nn

import offstage
from tests.support.params import make_params
from tests.support.training import same_bits, state

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


def train_class(make, options, dtype, config):
    params = make_params(dtype, shapes_for(make))
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
    return [param.detach() for param in params], state(optimizer)


def same_class_run(ours, theirs):
    """Equal weights and equal state, bit for bit."""
    return all(same_bits(a, b) for a, b in zip(ours[0], theirs[0], strict=True)) and (
        ours[1].keys() == theirs[1].keys() and all(same_bits(ours[1][key], theirs[1][key]) for key in theirs[1])
    )


def assert_masters_equal(ours, optimizer, plain):
    """The class has run on the fp32 masters, and the weights are the masters rounded."""
    states = optimizer.state_dict()["state"]
    for number, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert same_bits(states[number]["master_weight"], b.detach())
        assert same_bits(a.detach(), b.detach().bfloat16())
