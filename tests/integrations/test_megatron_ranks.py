# SPDX-License-Identifier: Apache-2.0
"""Megatron on two ranks over gloo: data, tensor, pipeline and expert parallel, with the bits of plain Megatron."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from offstage import OffloadConfig
from offstage.integrations.megatron import offload, parts
from tests.support import megatron
from tests.support.contract import TORCH, assert_same_tree
from tests.support.ranks import Ranks

STEPS, SPOILED = {"DP sharded": 30}, (4,)
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: dict[str, dict[str, Any]] = {
    "DP": {"model": {}},
    "DP fp32": {"model": {}, "dtype": torch.float32, "optimizer": {}},
    "DP sharded": {"model": {"ddp": SHARDED}},
    "DP sharded, overlapped": {"model": {"ddp": OVERLAPPED}},
    "TP": {"groups": {"tp": 2}, "model": {"ddp": SHARDED}},
    "PP": {"groups": {"pp": 2}, "model": {"ddp": SHARDED}},
    "PP interleaved": {"groups": {"pp": 2, "virtual": 2}, "model": {"ddp": SHARDED, "num_layers": 4}},
    "PP interleaved, overlapped": {
        "groups": {"pp": 2, "virtual": 2},
        "model": {"ddp": OVERLAPPED, "num_layers": 4},
        "optimizer": {"overlap_param_gather_with_optimizer_step": True, "overlap_param_gather": True},
    },
    "EP": {"groups": {"ep": 2}, "model": {"ddp": SHARDED, "num_moe_experts": 2}},
}
PLANS: dict[str, dict[str, Any]] = {
    "off": {"rule": "torch", "fraction": 0.0},
    "streamed": TORCH,
    "half, window": {**TORCH, "fraction": 0.5, "window": "all"},
}


def _make(case: str, settings: dict[str, Any] | None) -> tuple[Any, Any]:
    one = CASES[case]
    chunks = megatron.make_model(one.get("dtype", torch.bfloat16), **one["model"])
    optimizer = megatron.make_optimizer(chunks, **one.get("optimizer", {"loss_scale": 64.0}))
    if settings is not None:
        offload(optimizer, model=chunks, **settings)
    return chunks, optimizer


def _trained(case: str, settings: dict[str, Any] | None) -> Any:
    chunks, optimizer = _make(case, settings)
    spoiled = SPOILED if CASES[case].get("optimizer") is None else ()
    steps = STEPS.get(case, 8)
    seen = megatron.train(chunks, optimizer, steps, scheduler=megatron.make_scheduler(optimizer), spoiled=spoiled)
    assert [number for number, (_, stepped, _) in enumerate(seen) if not stepped] == list(spoiled)
    return seen, megatron.weights(chunks)


def _same_bits(_: Any, case: str) -> int:
    """Under every plan what it is without offstage; how many optimizers there are in the chain."""
    logging.disable(logging.WARNING)
    with megatron.session(**CASES[case].get("groups", {})):
        expected = _trained(case, None)
        for settings in PLANS.values() if case == "DP sharded" else [PLANS["half, window"]]:
            assert_same_tree(_trained(case, settings), expected)
        return len(parts(_make(case, TORCH)[1]))


@pytest.mark.engine("Megatron-core", "same bits", "DDP")
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_plain_megatron(ranks: Ranks, case: str) -> None:
    chain = 2 if case in ("EP", "PP interleaved, overlapped") else 1  # experts, or the first chunk, have their own
    assert ranks.run(2, _same_bits, megatron.LOADED, case) == [chain, chain]


def _resharded(_: Any, folder: str, form: str) -> None:
    logging.disable(logging.WARNING)
    from megatron.core import dist_checkpointing

    with megatron.session():
        source = _make("DP sharded", TORCH)
        target = _make("DP sharded", {**TORCH, "fraction": 0.5})
        megatron.train(*source, 3)
        model = [chunks[0].module.module for chunks, _ in (source, target)]
        metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}

        def state(number: int, *, is_loading: bool) -> dict[str, Any]:
            own = model[number].sharded_state_dict()
            optimizer = (source, target)[number][1]
            return {"model": own, "optimizer": optimizer.sharded_state_dict(own, is_loading, metadata=metadata)}

        dist_checkpointing.save(state(0, is_loading=False), folder)
        loaded = dist_checkpointing.load(state(1, is_loading=True), folder)
        model[1].load_state_dict(loaded["model"])
        target[1].load_state_dict(loaded["optimizer"])
        for one in (source, target):
            megatron.train(*one, range(3, 5))
        assert_same_tree(megatron.weights(target[0]), megatron.weights(source[0]))


@pytest.mark.engine("Megatron-core", "save and resume")
@pytest.mark.parametrize("form", ["fully_reshardable", "dp_reshardable"])
def test_shards_of_two_ranks_are_saved_and_loaded(ranks: Ranks, tmp_path: Path, form: str) -> None:
    ranks.run(2, _resharded, megatron.LOADED, str(tmp_path), form)


def _chain(_: Any) -> tuple[list[int], list[str], int]:
    """Where all leaves but the experts' state is too small to leave."""
    with megatron.session(ep=2):
        chunks = megatron.make_model(torch.bfloat16, ddp=SHARDED, num_moe_experts=2)
        optimizer = megatron.make_optimizer(chunks)
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("offstage").addHandler(handler)
        largest = [max(p.numel() for p in one.get_parameters()) for one in optimizer.chained_optimizers]
        offload(optimizer, rule="torch", min_bytes=12 * min(largest) + 1, chunk_bytes="16KiB", window="all")
        megatron.train(chunks, optimizer, 2)
        bound = chunks[0].config.finalize_model_grads_func
        depth = 0
        while hasattr(bound, "__wrapped__"):
            bound, depth = bound.__wrapped__, depth + 1
        away = [one.receipt().host_state_bytes for one in parts(optimizer)]
        return away, [text for text in said if "stays on the device" in text], depth


def test_a_part_of_a_chain_in_which_nothing_can_leave_stays(ranks: Ranks) -> None:
    for away, said, depth in ranks.run(2, _chain, megatron.LOADED):
        assert sorted(bool(one) for one in away) == [False, True]
        assert len(said) == 1
        assert depth == 1, "one wrapper, however often an iteration begins"


def _budget(_: Any) -> str:
    with megatron.session(ep=2):
        chunks, optimizer = _make("EP", None)
        with pytest.raises(ValueError, match="fraction") as refused:
            offload(optimizer, OffloadConfig(device_budget="1MiB"))
        assert parts(optimizer) == []
        megatron.train(chunks, optimizer, 1)
        return str(refused.value)


def test_a_budget_cannot_be_kept_by_two_optimizers(ranks: Ranks) -> None:
    for message in ranks.run(2, _budget, megatron.LOADED):
        assert "device_budget" in message
        assert "2 optimizers" in message
