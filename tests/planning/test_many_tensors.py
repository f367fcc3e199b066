# SPDX-License-Identifier: Apache-2.0
"""Plans of very many tensors: how long they take, and that arrays place them as plain loops do."""

import random as random_module
import time

import pytest

from offstage.config import OffloadConfig, Placement
from offstage.errors import ConfigError
from offstage.planning.plan import plan_placements
from offstage.planning.planner import make_plan
from offstage.planning.predict import Totals, Workload
from offstage.planning.sizes import Columns, ParamSize
from tests.support.machines import GIB, machine

MANY = 60_000
MIN, CHUNK = 10_000, 1 << 16


@pytest.mark.parametrize("changes", [{}, {"update_on": "auto", "device_budget": "1GiB"}], ids=["streamed", "auto"])
def test_a_plan_of_very_many_tensors(changes):
    """With all candidates; 20 passes over the tensors per candidate took ten times as long."""
    shapes = {f"layers.{i // 10}.{i % 10}.weight": (64 * (1 + i % 7), 64) for i in range(MANY)}
    start = time.process_time()
    plan = make_plan(
        shapes,
        machine(host_free_bytes=1000 * GIB),
        OffloadConfig(min_bytes=0, **changes),
        workload=Workload(forward_ms=100, backward_ms=200),
    )
    assert time.process_time() - start < 2.0  # about 0.2 s; the limit is for a busy machine
    assert len(plan.placements) == MANY
    assert sum(size.numel for size in plan.sizes) == sum(64 * 64 * (1 + i % 7) for i in range(MANY))
    assert len(plan.candidates) > 3


def _random_sizes(random):
    return [
        ParamSize("x", "cpu", state, -(-state // 256) * 256, random.random() < 0.7, state, state, random.random() < 0.2)
        for state in random.choices(range(200_000), k=random.randrange(30))
    ]


def test_arrays_place_as_loops_do():
    random, places = random_module.Random(0), set()
    for _ in range(500):
        sizes, budget, share = (
            _random_sizes(random),
            random.randrange(1, 3_000_000),
            random.choice([0.0, 0.3, 0.6, 1.0]),
        )
        placed = {i: random.choice(list(Placement)) for i in range(len(sizes)) if random.random() < 0.1}
        config = OffloadConfig(min_bytes=MIN, device_budget=budget, host_fraction=share, chunk_bytes=CHUNK)
        try:
            plan = plan_placements(sizes, config, placed)
        except ConfigError:  # slots and small parameters do not fit
            continue
        assert plan.placements == _by_loops(sizes, budget, share, placed)
        places |= set(plan.placements)
    assert places == set(Placement)


def _by_loops(sizes, budget, share, placed):
    where = {i: Placement.RESIDENT for i, size in enumerate(sizes) if size.state_bytes < MIN} | placed
    leaving = [size for i, size in enumerate(sizes) if where.get(i) is not Placement.RESIDENT]
    used = sum(size.state_bytes for i, size in enumerate(sizes) if where.get(i) is Placement.RESIDENT)
    slot = max(
        [min(CHUNK, sum(size.padded_bytes for size in leaving)), *(s.padded_bytes for s in leaving if not s.splits)]
    )
    everything = sum(size.state_bytes for size in sizes)
    room = everything if everything <= budget else budget - (0 if share == 1.0 else 3 * slot)
    for i, size in enumerate(sizes):
        if i not in where and used + size.state_bytes <= room:
            where[i] = Placement.RESIDENT
            used += size.state_bytes
    total = on_host = 0
    for i, size in enumerate(sizes):
        if where.get(i) is Placement.RESIDENT:
            continue
        total += size.state_bytes
        if i not in where:
            wanted = share > 0 and on_host + size.state_bytes / 2 <= share * total
            where[i] = Placement.HOST if wanted else Placement.STREAMED
        on_host += size.state_bytes if where[i] is Placement.HOST else 0
    return tuple(where[i] for i in range(len(sizes)))


def test_two_summed_parameters_stand_for_all():
    sizes = _random_sizes(random_module.Random(1))
    assert Totals.of(Columns.of(sizes).summed(), 0.5, sum(size.state_bytes > 0 for size in sizes)) == Totals.of(
        sizes, 0.5
    )
