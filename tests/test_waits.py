# SPDX-License-Identifier: Apache-2.0
"""Every wait is needed: each is dropped in turn on the lazy backend, and each must be caught.

`pytest tests/test_waits.py -o log_cli=true -o log_cli_level=INFO` lists the waits and what caught each.
"""

import logging

import pytest
import torch
from torch import nn

import offstage
from offstage.errors import OffstageError, StepLostError
from offstage.lazy_lanes import WaitLog
from tests.training import lazily

SEEDS = range(6)


def make(params=6, size=900, **config):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size).bfloat16()) for _ in range(params)]
    settings = {"min_bytes": 0, "chunk_bytes": "16KiB", "slots": 2, **config}
    return weights, offstage.offload(torch.optim.AdamW(weights, lr=0.1), **settings)


def steps(weights, optimizer, count=3):
    for step in range(count):
        for i, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 0.01 * (i + step + 1))
        optimizer.step()
        optimizer.zero_grad()


def result(weights, optimizer):
    state = optimizer.state_dict()["state"]
    return [w.detach().clone() for w in weights] + [v.clone() for s in state.values() for v in s.values()]


def many_chunks():
    weights, optimizer = make()
    steps(weights, optimizer)
    return result(weights, optimizer)


def fewer_chunks_than_slots():
    """A chunk comes back into another slot than it left from: only its own store mark orders the two."""
    weights, optimizer = make(params=1, slots=3)
    steps(weights, optimizer)
    return result(weights, optimizer)


def part_resident():
    weights, optimizer = make(fraction=0.5)
    steps(weights, optimizer)
    return result(weights, optimizer)


def only_reads_weights():
    weights, optimizer = make()
    steps(weights, optimizer)
    return [w.detach().clone() for w in weights]


def larger_slots_needed_later():
    """A group added between steps needs larger slots: the old ones go behind their last store."""
    weights, optimizer = make(params=1, size=200)
    steps(weights, optimizer, 2)
    more = nn.Parameter(torch.randn(1500).bfloat16())
    optimizer.add_param_group({"params": [more]})
    steps([*weights, more], optimizer, 2)
    return result([*weights, more], optimizer)


def closed():
    weights, optimizer = make()
    steps(weights, optimizer)
    optimizer.close()
    return [w.detach().clone() for w in weights]


def loaded_in_between():
    weights, optimizer = make()
    steps(weights, optimizer, 2)
    _, other = make()
    optimizer.load_state_dict(other.state_dict())
    steps(weights, optimizer, 2)
    return result(weights, optimizer)


def lost_and_loaded():
    """A step that fails half-way, then a checkpoint."""
    weights, optimizer = make()
    saved = optimizer.state_dict()
    steps(weights, optimizer, 1)
    update, calls = optimizer.rule.update, []

    def fail(shares):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        update(shares)

    optimizer.rule.update = fail
    with pytest.raises(StepLostError):
        steps(weights, optimizer, 1)
    optimizer.rule.update = update
    optimizer.load_state_dict(saved)
    steps(weights, optimizer, 2)
    return result(weights, optimizer)[len(weights) :]  # the weights of the lost step are anyone's guess


SCENARIOS = [
    many_chunks,
    fewer_chunks_than_slots,
    part_resident,
    only_reads_weights,
    larger_slots_needed_later,
    closed,
    loaded_in_between,
    lost_and_loaded,
]


def all_waits() -> list[str]:
    log = WaitLog()
    for scenario in SCENARIOS:
        with lazily(0, log):
            scenario()
    return sorted(log.seen)


WAITS = all_waits()


def test_the_waits_are_these():
    """The list, so that a new wait is a decision someone made."""
    assert WAITS == [
        "close: the last copies are done",
        "close: the slot's last store is done",
        "fetch: the chunk's last store is done",
        "fetch: the slot is free",
        "host: all stores are done",
        "place: the lanes are drained",
        "reset: nothing is under way",
        "step: the weights are ready",
        "store: the state is updated",
        "update: the gradients are ready",
        "update: the state is fetched",
    ]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_nothing_is_caught_when_nothing_is_missing(scenario):
    expected = scenario()
    for seed in SEEDS:
        with lazily(seed):
            got = scenario()
        if scenario is not lost_and_loaded:
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def caught_by(wait: str) -> list[str]:
    caught = []
    for scenario in SCENARIOS:
        expected = None if scenario is lost_and_loaded else scenario()
        for seed in SEEDS:
            try:
                with lazily(seed, WaitLog(drop=wait)):
                    got = scenario()
            except OffstageError as error:
                caught.append(f"{scenario.__name__}: {type(error.__cause__ or error).__name__}")
                break
            if expected is not None and not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
                caught.append(f"{scenario.__name__}: other bits")
                break
    return caught


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_caught(wait):
    caught = caught_by(wait)
    logging.getLogger("tests").info("%s: caught by %s", wait, "; ".join(caught))
    assert caught, f"nothing noticed that {wait!r} was missing: it is redundant and should go"
