# SPDX-License-Identifier: Apache-2.0
"""Split masters are lossless, and a weight that was written from outside wins over its master."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offstage
from offstage.engine import named_state
from offstage.optimizer import state_dict
from offstage.rules.master_weights import join, split


def bits(values: list[int]) -> torch.Tensor:
    return torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32).view(torch.float32)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_split_and_join_are_inverse(values):
    """For any fp32 at all; NaNs become the bf16 NaN."""
    master = bits(values)
    weight, low, signed = split(master, torch.ones_like(master))
    joined, squares = join(weight, low, signed)
    nan = master.isnan()
    assert torch.equal(joined.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert joined[nan].isnan().all()
    assert not low[nan].any()
    assert torch.equal(squares, torch.ones_like(master))


def test_every_tie():
    """All fp32 values exactly half-way between two bf16: the ones 16 bits alone confuse."""
    high = torch.arange(2**16, dtype=torch.int32)
    master = ((high << 16) | 0x8000).view(torch.float32)
    master = master[~master.isnan()]
    weight, low, signed = split(master, torch.zeros_like(master))
    joined, _ = join(weight, low, signed)
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))
    without_tie_bit, _ = join(weight, low, signed.abs())
    assert not torch.equal(without_tie_bit.view(torch.int32), master.view(torch.int32))


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_the_rule_and_the_checkpoint_split_alike(moments):
    """A run that is saved, joined, split again and continued equals the run that was not."""

    def run(interrupt: bool) -> torch.Tensor:
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(5000).bfloat16())
        config = {"min_bytes": 0, "chunk_bytes": "16KiB", "master_weights": "split", "state_dtype": moments}
        optimizer = offstage.offload(torch.optim.AdamW([param]), **config)
        for step in range(20):
            param.grad = torch.randn_like(param)
            optimizer.step()
            if interrupt and step % 5 == 2:
                saved = {k: v.clone() for k, v in optimizer.state_dict()["state"][0].items()}
                assert (saved["exp_avg_sq"] >= 0).all()
                groups = optimizer.state_dict()["param_groups"]
                optimizer = offstage.offload(torch.optim.AdamW([param]), **config)
                optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
        return optimizer.state_dict()["state"][0]["master_weight"]

    assert torch.equal(run(True), run(False))


def weight_data(param: nn.Parameter) -> None:
    param.data.fill_(3.0)


def weight_no_grad(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.copy_(torch.full_like(param, 3.0))


def weight_load(param: nn.Parameter) -> None:
    holder = nn.ParameterList([param])
    holder.load_state_dict({"0": torch.full_like(param, 3.0)})


@pytest.mark.parametrize("write", [weight_data, weight_no_grad, weight_load])
@pytest.mark.parametrize("master_weights", ["fp32", "split"])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_weight_written_by_someone_else_wins(write, master_weights, fraction, caplog):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(3000).bfloat16())
    config = {"min_bytes": 0, "chunk_bytes": "16KiB", "master_weights": master_weights, "fraction": fraction}
    optimizer = offstage.offload(torch.optim.AdamW([param], lr=0.0, weight_decay=0.0), **config)
    for _ in range(2):
        param.grad = torch.randn_like(param)
        optimizer.step()
    assert optimizer.receipt().weights_written_by_others == 0
    write(param)
    for _ in range(2):
        optimizer.step()
    assert torch.equal(optimizer.state[param]["master_weight"], torch.full((3000,), 3.0))
    assert torch.equal(param.detach(), torch.full_like(param, 3.0))
    assert optimizer.receipt().weights_written_by_others == 3000
    warnings = [r for r in caplog.records if "written by someone else" in r.message]
    assert len(warnings) == 1  # counted every time, said once


@pytest.mark.parametrize("master_weights", ["fp32", "split"])
def test_an_ema_swap_and_back_changes_nothing(master_weights):
    def run(swap: bool) -> torch.Tensor:
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(3000).bfloat16())
        optimizer = offstage.offload(torch.optim.AdamW([param]), min_bytes=0, master_weights=master_weights)
        for _ in range(6):
            param.grad = torch.randn_like(param)
            optimizer.step()
            if swap:
                kept = param.detach().clone()
                param.data.zero_()
                param.data.copy_(kept)
        assert optimizer.receipt().weights_written_by_others == 0
        return optimizer.state[param]["master_weight"].clone()

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("master_weights", ["fp32", "split"])
def test_the_order_of_loading_model_and_optimizer_does_not_matter(master_weights, model_first):
    def make(seed: int):
        torch.manual_seed(seed)
        model = nn.Linear(40, 50).bfloat16()
        return model, offstage.offload(
            torch.optim.AdamW(model.parameters()), min_bytes=0, master_weights=master_weights
        )

    def steps(model, optimizer):
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            optimizer.step()

    model, optimizer = make(0)
    steps(model, optimizer)
    saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    other_model, other = make(1)
    for part in ("model", "optimizer") if model_first else ("optimizer", "model"):
        other_model.load_state_dict(saved[0]) if part == "model" else other.load_state_dict(saved[1])
    steps(model, optimizer)
    steps(other_model, other)
    assert other.receipt().weights_written_by_others == 0
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["master_weight"], other.state[b]["master_weight"])


def test_state_read_after_a_foreign_write_is_sane():
    """Split: low halves of other weights are not joined with the new ones."""
    param = nn.Parameter(torch.randn(500).bfloat16())
    optimizer = offstage.offload(torch.optim.AdamW([param]), min_bytes=0, master_weights="split")
    param.grad = torch.randn_like(param)
    optimizer.step()
    param.data.zero_()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_weight"], torch.zeros(500))


def test_a_state_dict_joins_one_parameter_at_a_time(monkeypatch):
    """Joined masters of resident state are on the device until they are copied: never those of all parameters."""
    params = [nn.Parameter(torch.randn(8, 8).to(torch.bfloat16)) for _ in range(3)]
    optimizer = offstage.offload(torch.optim.AdamW(params), fraction=0.0, master_weights="split")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    happened = []

    def exported(held, real=named_state.export):
        happened.append("export")
        return real(held)

    def on_host(value, real=state_dict._on_host):
        happened.append("to the host")
        return real(value)

    monkeypatch.setattr(named_state, "export", exported)
    monkeypatch.setattr(state_dict, "_on_host", on_host)
    optimizer.state_dict()
    assert happened == ["export", *["to the host"] * 4] * 3  # step, master, both moments
