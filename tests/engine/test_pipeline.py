# SPDX-License-Identifier: Apache-2.0
"""The ring and the trip of a chunk, checked exhaustively for small cases."""

import functools
import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from offstage.engine.arenas import HostState
from offstage.engine.pipeline import ChunkState, Pipeline, Ring, Trip
from offstage.lanes.lanes import ImmediateLanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.memory.arena import Arena
from offstage.planning.layout import make_layout
from offstage.rules.rule import ParamState
from tests.support.lives import fail_at

CPU = torch.device("cpu")
LEGAL = {
    (ChunkState.ASIDE, ChunkState.FETCHING),
    (ChunkState.FETCHING, ChunkState.STAGED),
    (ChunkState.STAGED, ChunkState.UPDATING),
    (ChunkState.STAGED, ChunkState.ASIDE),
    (ChunkState.UPDATING, ChunkState.STORING),
    (ChunkState.STORING, ChunkState.ASIDE),
}


def copy_of(ring: Ring, num_slots: int) -> Ring:
    other = Ring(num_slots)
    other.free, other.slot_of, other._state = ring.free.copy(), dict(ring.slot_of), dict(ring._state)
    return other


def key_of(ring: Ring, chunks: range) -> tuple:
    return tuple(ring.free), tuple((ring.state(c), ring.slot_of.get(c)) for c in chunks)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
def test_every_interleaving_keeps_the_ring_sound(num_chunks, num_slots):
    """All reachable states, from each every transition: legal ones keep the invariants, illegal ones raise."""
    chunks = range(num_chunks)
    seen, stack = set(), [Ring(num_slots)]
    while stack:
        ring = stack.pop()
        key = key_of(ring, chunks)
        if key in seen:
            continue
        seen.add(key)
        away = [chunk for chunk in chunks if ring.state(chunk) is not ChunkState.ASIDE]
        assert sorted(ring.slot_of) == away  # exactly the chunks on a trip hold a slot
        assert sorted([*ring.free, *ring.slot_of.values()]) == list(range(num_slots))  # each slot once
        moves = 0
        for chunk, to in itertools.product(chunks, ChunkState):
            after = copy_of(ring, num_slots)
            legal = (ring.state(chunk), to) in LEGAL and not (to is ChunkState.FETCHING and not ring.free)
            if legal:
                after.advance(chunk, to)
                moves += 1
                stack.append(after)
            else:
                with pytest.raises(AssertionError):
                    after.advance(chunk, to)
        assert moves > 0  # never stuck
    away_together = max(sum(state is not ChunkState.ASIDE for state, _ in states) for _, states in seen)
    assert away_together == min(num_chunks, num_slots)


@functools.cache
def layout_and_arenas(num_chunks):
    numel = 2048 * num_chunks
    layout = make_layout([{"a": numel, "b": numel}], {"a": 4, "b": 4}, [numel], chunk_bytes=16 * 1024, split=True)
    assert len(layout.chunks) == num_chunks
    return layout, {key: Arena(numel, torch.float32, CPU, pin=False) for key in ("a", "b")}


def state_of(numel):
    return ParamState(torch.empty(numel), "p", (), rule=None)


def make_pipeline(lanes, num_chunks, num_slots):
    layout, arenas = layout_and_arenas(num_chunks)
    pipeline = Pipeline(lanes, num_slots=num_slots, slot_bytes=layout.slot_bytes)
    pipeline.prepare()
    return pipeline, HostState(layout, arenas, [state_of(layout.extents[0]["a"])])


Order = list[tuple[str, int]]
AFTER = {"fetch": "staged", "update": "updating", "store": "end", "discard": "end"}


def moves(progress: list[str], num_slots: int) -> Order:
    """What may come next: (move, chunk), with at most `num_slots` chunks away at once."""
    away = sum(p not in ("begin", "end") for p in progress)
    allowed = {"begin": ["fetch"] if away < num_slots else [], "staged": ["update", "discard"], "updating": ["store"]}
    return [(move, chunk) for chunk, p in enumerate(progress) for move in allowed.get(p, [])]


def every_order(progress: list[str], num_slots: int) -> Iterator[Order]:
    if all(p == "end" for p in progress):
        yield []
    for move, chunk in moves(progress, num_slots):
        for rest in every_order([*progress[:chunk], AFTER[move], *progress[chunk + 1 :]], num_slots):
            yield [(move, chunk), *rest]


def random_order(seed: int, num_chunks: int, num_slots: int) -> Order:
    chance, progress, order = random.Random(seed), ["begin"] * num_chunks, []
    while options := moves(progress, num_slots):
        order.append(chance.choice(options))
        progress[order[-1][1]] = AFTER[order[-1][0]]
    return order


def check_bytes(order: Order, num_chunks: int, num_slots: int, seed: int) -> None:
    """Run `order` on lazy lanes: an update adds 1 to `a` and doubles `b`, a discard changes nothing."""
    pipeline, host = make_pipeline(LazyLanes(CPU, seed=seed), num_chunks, num_slots)
    start = torch.arange(host.arenas["a"].numel, dtype=torch.float32)
    for arena in host.arenas.values():
        arena.flat.copy_(start)
    trips = [Trip(chunk, chunk.pieces) for chunk in host.chunks]
    expected = {key: start.clone() for key in ("a", "b")}
    for move, chunk in order:
        trip = trips[chunk]
        if move == "update":

            def work(trip=trip):
                trip.staged["a"].add_(1)
                trip.staged["b"].mul_(2)

            pipeline.update(trip, work)
            low, high = trip.chunk.ranges["a"]
            expected["a"][low:high] += 1
            expected["b"][low:high] *= 2
        else:
            getattr(pipeline, move)(trip)
    pipeline.close()
    pipeline.lanes.synchronize("test")
    for key in ("a", "b"):
        assert torch.equal(host.arenas[key].flat, expected[key]), order


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_every_interleaving_gives_the_right_bytes(num_chunks, num_slots):
    """All orders of fetch, update, store and discard, on the lazy backend with its checker."""
    for seed, order in enumerate(every_order(["begin"] * num_chunks, num_slots)):
        check_bytes(order, num_chunks, num_slots, seed)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_random_interleavings_of_four_chunks_give_the_right_bytes(num_slots):
    for seed in range(300):
        check_bytes(random_order(seed, 4, num_slots), 4, num_slots, seed)


def test_only_pieces_with_gradients_move():
    sizes = [1000, 3000, 500, 2000]
    extents = [{"a": n} for n in sizes]
    layout = make_layout(extents, {"a": 4}, sizes, chunk_bytes=64 * 1024, split=True)
    arenas = {"a": Arena(layout.arena_numel["a"], torch.float32, CPU, pin=False)}
    chunk = HostState(layout, arenas, [state_of(size) for size in sizes]).chunks[0]
    pipeline = Pipeline(ImmediateLanes(CPU), num_slots=1, slot_bytes=layout.slot_bytes)
    pipeline.prepare()
    trip = Trip(chunk, [chunk.pieces[1], chunk.pieces[2]])
    assert trip.runs("a") == [(1024, 1024 + 3008 + 564 - 64)]  # neighbours in one copy
    trip = Trip(chunk, [chunk.pieces[0], chunk.pieces[3]])
    assert len(trip.runs("a")) == 2
    pipeline.fetch(trip)
    assert pipeline.bytes_fetched == (1000 + 2000) * 4


def test_a_ring_whose_slots_did_not_all_fit_is_completed_later():
    lanes = ImmediateLanes(CPU)
    pipeline = Pipeline(lanes, num_slots=3, slot_bytes=1024)
    undo = fail_at(2, lanes, "empty", torch.OutOfMemoryError("the second slot"))
    with pytest.raises(torch.OutOfMemoryError):
        pipeline.prepare()
    pipeline.reset()
    undo()
    pipeline.prepare()
    assert sorted(pipeline.ring.free) == sorted(pipeline._slots) == [0, 1, 2]
