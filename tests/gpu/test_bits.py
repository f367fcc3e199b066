# SPDX-License-Identifier: Apache-2.0
"""The bits of `torch.optim.AdamW(fused=True)` on CUDA, whatever the plan, with delays in each lane."""

import itertools

import pytest
import torch

from benchmarks.bits import CASES, Case, DelayedLanes, mismatches
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from offstage.rules.rule import Hyperparameters
from tests.support.training import same_bits

STEPS = 30
OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "maximize": False, "fresh": False}
DELAYED = ("fp32", "bf16, fp32 masters", "bf16, split masters")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_fused_adamw(case: Case) -> None:
    assert set(mismatches(case, STEPS).values()) == {0}


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.UPDATE, Lane.STORE], ids=lambda lane: lane.value)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in DELAYED], ids=lambda case: case.name)
def test_delays_change_nothing(case: Case, lane: Lane) -> None:
    with use_lanes(lambda device: DelayedLanes(device, lane)):
        assert set(mismatches(case, 10).values()) == {0}


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.99), (0.0, 0.5)])
def test_coefficients_are_the_fused_kernels(betas: tuple[float, float]) -> None:
    """The fused kernel takes fp32 powers of a device step tensor; so do our coefficients, for every step."""
    from offstage.rules import adamw_triton

    steps = range(1, 2000)
    rows = [Hyperparameters(1e-3, *betas, weight_decay=0.1, step=step) for step in steps]
    inputs, out = torch.empty(5, len(rows), device="cuda"), torch.empty(len(rows), 3, device="cuda")
    adamw_triton.coefficients(inputs, out, rows)
    step = torch.arange(1, 2000, device="cuda", dtype=torch.float32)
    lr, decay = (torch.tensor(x, device="cuda", dtype=torch.float32) for x in (1e-3, 0.1))
    assert torch.equal(out[:, 0], (lr * decay).expand(len(rows)))
    assert torch.equal(out[:, 1], lr / (1 - torch.pow(torch.tensor(betas[0], device="cuda"), step)))
    assert torch.equal(out[:, 2], torch.sqrt(1 - torch.pow(torch.tensor(betas[1], device="cuda"), step)))


def test_triton_and_numba_agree() -> None:
    """One formula on both sides of the link: given the same coefficients, the same bits."""
    from offstage.rules import adamw_host, adamw_triton

    torch.manual_seed(0)
    n = 100_003
    cases = ((torch.float32, None), (torch.bfloat16, "fp32"), (torch.float16, "fp32"), (torch.bfloat16, "split"))
    for (dtype, kind), decoupled in itertools.product(cases, (True, False)):
        weight = torch.randn(n).to(dtype)
        master = {None: None, "fp32": weight.float(), "split": torch.zeros(n, dtype=torch.int16)}[kind]
        seen = torch.rand(n) > 0.2  # some elements never had a gradient
        grad = torch.where(seen, torch.randn(n), 0.0).to(dtype)
        host = [weight, grad, torch.randn(n) * 1e-3 * seen, torch.rand(n) * 1e-6 * seen, None, master]
        device = [None if t is None else t.cuda() for t in host]
        for step in range(1, 6):
            coefficients = torch.tensor([3e-4, 1e-3 / step, 0.3 * step])
            for kernels, tensors in ((adamw_host, host), (adamw_triton, device)):
                where = tensors[0].device
                prints = tuple(torch.zeros(1, dtype=torch.int64, device=where) for _ in range(2))
                kernels.update(
                    *tensors,
                    master_kind=kind,
                    coefficients=coefficients.to(where),
                    prints=prints if kind == "split" else None,
                    foreign=torch.zeros(1, dtype=torch.int64, device=where),
                    weight_decay=0.1,
                    decoupled=decoupled,
                    **OPTIONS,
                )
            for ours, theirs in zip(host, device, strict=True):
                if ours is not None:
                    assert same_bits(ours, theirs.cpu())


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_every_tie_survives_on_the_device(moments: torch.dtype) -> None:
    """Masters half-way between two bf16, with exp_avg_sq 0 or not: the bit in its sign is kept, step after step."""
    from offstage.rules import adamw_triton
    from offstage.rules.master_weights import join, split

    bits = torch.arange(2**16, dtype=torch.int32) << 16 | 0x8000
    master = bits.view(torch.float32)
    master = master[master.isfinite() & (master.abs() < 1e30)]
    for square in (0.0, 1e-8):
        weight, low, signed = split(master, torch.full_like(master, square))
        tensors = [weight, torch.zeros_like(weight), torch.zeros_like(master).to(moments), signed.to(moments)]
        device = [tensor.cuda() for tensor in tensors]
        low_device = low.cuda()
        for _ in range(3):  # nothing to do: the gradient is 0, and there is no weight decay
            adamw_triton.update(
                *device,
                None,
                low_device,
                master_kind="split",
                coefficients=torch.tensor([0.0, 1e-3, 1.0], device="cuda"),
                prints=(torch.zeros(1, dtype=torch.int64, device="cuda"),) * 2,
                foreign=torch.zeros(1, dtype=torch.int64, device="cuda"),
                weight_decay=0.0,
                decoupled=True,
                **OPTIONS,
            )
            joined, _ = join(device[0].cpu(), low_device.cpu(), device[3].cpu().float())
            assert same_bits(joined, master)


def test_fingerprints_agree() -> None:
    from offstage.rules import adamw_host, adamw_triton

    weight = torch.randn(123_457).bfloat16()
    host, device = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64, device="cuda")
    adamw_host.fingerprint(weight, host)
    adamw_triton.fingerprint(weight.cuda(), device)
    assert int(host) == int(device)
