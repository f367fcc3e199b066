# SPDX-License-Identifier: Apache-2.0
"""What a step of resident state launches before the host waits for the norm, and what it leaves as it was."""

import pytest
import torch

import offstage
from offstage.optimizer.overlap.speculation import Norm
from offstage.rules import adamw_host


@pytest.fixture
def calls(monkeypatch):
    """What is launched, and when the host waits, in order."""
    found = []

    def noted(name, function):
        def run(*arguments, **keywords):
            found.append(name)
            return function(*arguments, **keywords)

        return run

    monkeypatch.setattr(adamw_host, "update", noted("update", adamw_host.update))
    monkeypatch.setattr(adamw_host, "coefficients", noted("coefficients", adamw_host.coefficients))
    monkeypatch.setattr(adamw_host, "fingerprint", noted("fingerprint", adamw_host.fingerprint))
    monkeypatch.setattr(Norm, "wait", noted("wait", Norm.wait))
    return found


def made(count=5):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(8, 24).bfloat16()) for _ in range(count)]
    plain = torch.optim.AdamW(params, lr=1e-2)
    return params, offstage.offload(plain, None, fraction=0.0, master_weights="split")


def train(params, optimizer, value=1.0):
    for param in params:
        param.grad = torch.full_like(param, value)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_all_that_changes_nothing_is_launched_before_the_host_waits(calls):
    params, optimizer = made()
    train(params, optimizer)
    calls.clear()
    train(params, optimizer)
    # Behind the wait: all updates, so that the device has work, then the new fingerprints.
    assert calls == ["coefficients", *["fingerprint"] * 5, "wait", *["update"] * 5, *["fingerprint"] * 5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_the_norm_forbids_changes_nothing(bad, calls):
    """Nor does it count: the next one is the one that this would have been."""
    params, optimizer = made()
    others, expected = made()
    for gradients in ([1.0, bad, 2.0, bad, bad, 3.0], [1.0, 2.0, 3.0]):
        chosen = (params, optimizer) if bad in gradients else (others, expected)
        for value in gradients:
            train(*chosen, value)
    assert optimizer.receipt().skipped_steps == 3
    for mine, theirs in zip(params, others, strict=True):
        assert torch.equal(mine, theirs)
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, expected.state[theirs][name]), name


def test_a_weight_that_was_written_before_the_step_counts_as_written(calls):
    """Also between clipping and `step()`."""
    params, optimizer = made()
    train(params, optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.clip_grad_norm_(1.0)
    params[1].data.mul_(2.0)
    before = params[1].detach().clone()
    optimizer.step()
    assert optimizer.receipt().weights_written_by_others == params[1].numel()
    assert torch.allclose(params[1], before, atol=0.05)
