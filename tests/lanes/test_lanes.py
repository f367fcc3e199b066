# SPDX-License-Identifier: Apache-2.0
"""Lanes that share the link: copies are cut, take turns on two streams, and let urgent ones go first."""

import functools
import itertools
import threading
import time
from typing import ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offstage.activations.offload import offload_activations
from offstage.lanes import lanes as copies
from offstage.lanes.host_threads import HostThreads
from offstage.lanes.lanes import Lane, copy_work
from offstage.lanes.link import use_lanes
from offstage.lanes.promises import Promise
from offstage.lanes.testing.checked import CheckedLanes
from offstage.lanes.testing.lazy import LazyLanes
from tests.support.lives import CPU, end_step, offloaded_stack
from tests.support.overlap import Net
from tests.support.params import equal, result
from tests.support.threaded_lanes import ThreadedLanes

# Streams that are written down


class Event:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number
        self.passed = threading.Event()
        self.passed.set()

    def query(self):
        return self.passed.is_set()

    def synchronize(self):
        assert self.passed.wait(10)


class Stream:
    """Runs work at once, and keeps a list of what it was given: ("run",), ("wait", event)."""

    current: ClassVar = []

    def __init__(self):
        self.given, self.events = [], []

    def __enter__(self):
        self.current.append(self)
        return self

    def __exit__(self, *_):
        self.current.pop()

    def wait_event(self, event):
        assert isinstance(event, Event)
        self.given.append(("wait", event))

    def record_event(self):
        self.events.append(Event(self, len(self.given)))
        return self.events[-1]

    def synchronize(self):
        self.given.append(("synchronized",))


class WrittenLanes(ThreadedLanes):
    """`AcceleratorLanes` whose streams are written down."""

    def __init__(self):
        super().__init__(CPU)
        for queue in self._queues.values():
            queue._streams.extend(Stream() for _ in range(len(queue._streams)))
            while not isinstance(queue._streams[0], Stream):
                queue._streams.popleft()
        self._only_caller = Stream()
        self.ran = []
        """(name, the stream it ran on), in the order in which the host gave it."""

    def streams(self, lane):
        return list(self._queues[lane]._streams)

    def work(self, name):
        return lambda: self.note(name)

    def note(self, name):
        stream = Stream.current[-1]
        self.ran.append((name, stream))
        stream.given.append(("run", name))


@pytest.fixture
def written():
    return WrittenLanes()


def comes_before(earlier, later):
    """Whether stream `later[0]`'s entry number `later[1]` waits for event `earlier`, by whatever chain of events."""
    stream, number = later
    if earlier.stream is stream:
        return earlier.number <= number
    waits = [entry[1] for entry in stream.given[:number] if entry[0] == "wait"]
    return any(comes_before(earlier, (event.stream, event.number)) for event in waits)


def place_of(name, lanes):
    stream = next(stream for done, stream in lanes.ran if done == name)
    return stream, stream.given.index(("run", name))


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.STORE])
def test_copies_alternate_between_two_streams_in_order(written, lane):
    """Each piece is on the other stream than the one before, and behind it."""
    marks = {}
    for number in range(4):
        pieces = [written.work(f"{number}.{piece}") for piece in range(1 + number % 3)]
        marks[number] = written.submit(lane, pieces, after={})
    names = [name for name, _ in written.ran]
    assert names == ["0.0", "1.0", "1.1", "2.0", "2.1", "2.2", "3.0"]
    used = [stream for _, stream in written.ran]
    assert len(set(used)) == 2
    assert all(a is not b for a, b in itertools.pairwise(used))
    for number, mark in marks.items():
        behind = [name for name in names if int(name[0]) > number]
        assert all(comes_before(mark, place_of(name, written)) for name in behind)
    for before, after in itertools.pairwise(names):  # and pieces of one work behind each other
        stream, place = place_of(before, written)
        done = next(event for event in stream.events if event.number > place)
        assert comes_before(done, place_of(after, written))


@pytest.mark.parametrize("lane", [Lane.UPDATE, Lane.GRADIENTS_DOWN, Lane.WEIGHTS_UP])
def test_other_lanes_have_one_stream(written, lane):
    for number in range(4):
        written.submit(lane, written.work(number), after={})
    assert len({stream for _, stream in written.ran}) == 1
    assert not any(entry[0] == "wait" for entry in written.streams(lane)[0].given)


def test_marks_are_waited_for_by_the_first_piece(written):
    """On whichever of the two streams that is; all that follow come behind it."""
    ready = written.submit(Lane.UPDATE, written.work("update"), after={})
    for number in range(3):
        written.submit(Lane.STORE, [written.work((number, piece)) for piece in range(3)], after={"ready": ready})
        for piece in range(3):
            assert comes_before(ready, place_of((number, piece), written))


def test_a_mark_is_behind_all_pieces(written):
    mark = written.submit(Lane.FETCH, [written.work(piece) for piece in range(5)], after={})
    written.submit(Lane.UPDATE, written.work("update"), after={"fetched": mark})
    place = place_of("update", written)
    for piece in range(5):
        stream, number = place_of(piece, written)
        done = next(event for event in stream.events if event.number > number)
        assert comes_before(done, place)


def test_work_without_pieces_is_a_mark_in_its_place(written):
    first = written.submit(Lane.FETCH, written.work("first"), after={})
    empty = written.submit(Lane.FETCH, [], after={})
    written.submit(Lane.FETCH, written.work("second"), after={})
    assert comes_before(first, (empty.stream, empty.number))
    assert comes_before(empty, place_of("second", written))


def test_the_order_holds_after_a_piece_that_failed(written):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        written.submit(Lane.FETCH, [written.work("before"), fail, written.work("never")], after={})
    done = written.submit(Lane.FETCH, written.work("after"), after={})
    assert [name for name, _ in written.ran] == ["before", "after"]
    stream, place = place_of("before", written)
    before = next(event for event in stream.events if event.number > place)
    assert comes_before(before, place_of("after", written))
    assert comes_before(done, (done.stream, done.number))


def test_synchronize_waits_for_both_streams(written):
    written.submit(Lane.FETCH, written.work("one"), after={})
    written.synchronize("all")
    for lane in (Lane.FETCH, Lane.STORE):
        assert all(stream.given[-1] == ("synchronized",) for stream in written.streams(lane))


# Urgent copies


def beside(lanes):
    """Lanes of another user of the same link."""
    made = WrittenLanes()
    made.priority = lanes.priority
    return made


def waits_of(name, lanes):
    stream, place = place_of(name, lanes)
    return [entry[1] for entry in stream.given[:place] if entry[0] == "wait"]


def test_what_can_wait_goes_behind_what_was_announced(written):
    """The other copies, and other lanes, do not."""
    state = beside(written)
    urgent = written.submit(Lane.FETCH, written.work("activation"), after={})
    written.prioritise(urgent)
    state.submit(Lane.FETCH, state.work("patient"), after={}, low_priority=True)
    state.submit(Lane.STORE, state.work("store"), after={})
    state.submit(Lane.UPDATE, state.work("update"), after={})
    assert urgent in waits_of("patient", state)
    assert waits_of("store", state) == []
    assert waits_of("update", state) == []
    other = beside(written)
    other.submit(Lane.FETCH, other.work("plain"), after={})
    assert waits_of("plain", other) == []


def test_only_the_last_announcement_counts(written):
    marks = [written.submit(Lane.FETCH, written.work(number), after={}) for number in range(3)]
    for mark in marks:
        written.prioritise(mark)
    state = beside(written)
    state.submit(Lane.FETCH, state.work("patient"), after={}, low_priority=True)
    assert waits_of("patient", state) == [marks[2]]  # which is behind the others


def test_nothing_announced_is_nothing_to_wait_for(written):
    written.submit(Lane.FETCH, written.work("patient"), after={}, low_priority=True)
    assert waits_of("patient", written) == []


def test_an_announcement_that_is_still_promised_holds_nobody_up(written):
    """Only what its stream has been given goes first; as soon as it has, it does."""
    promise = Promise()
    written.prioritise(promise)
    state = beside(written)
    mark = state.submit(Lane.FETCH, state.work("too early"), after={}, low_priority=True)
    assert not isinstance(mark, Promise)
    assert waits_of("too early", state) == []
    event = Stream().record_event()
    promise.resolve(event)
    state.submit(Lane.FETCH, state.work("patient"), after={}, low_priority=True)
    assert event in waits_of("patient", state)


def test_an_announcement_that_failed_holds_nobody_up(written):
    """Going first is a matter of time only: work that can wait does not depend on it."""
    broken = Promise()
    written.prioritise(broken)
    state = beside(written)
    before = state.submit(Lane.FETCH, state.work("before it failed"), after={}, low_priority=True)
    broken.reject(ZeroDivisionError("a copy of activations"))
    after = state.submit(Lane.FETCH, state.work("after it failed"), after={}, low_priority=True)
    for mark in (before, after):
        state.wait(mark, "weights")
    assert [name for name, _ in state.ran] == ["before it failed", "after it failed"]


def test_lanes_of_tests_take_both():
    """Lazy and checked lanes have the same interface."""
    for made in (LazyLanes(CPU), CheckedLanes(CPU)):
        ran = []
        mark = made.submit(Lane.FETCH, [functools.partial(ran.append, number) for number in range(3)], after={})
        made.prioritise(mark)
        last = made.submit(Lane.FETCH, lambda ran=ran: ran.append("last"), after={}, low_priority=True)
        with made.blocking():
            made.wait(last, "weights")
        assert ran == [0, 1, 2, "last"]


# Patience


@pytest.fixture
def full(monkeypatch):
    """Lanes whose streams have room for three pieces of work; events pass when told."""
    monkeypatch.setattr("offstage.lanes.accelerator._MOST_UNDER_WAY", 3)
    made = WrittenLanes()
    for number in range(3):
        made.submit(Lane.FETCH, made.work(number), after={}).passed.clear()
    yield made
    for stream in made.streams(Lane.FETCH):
        for event in stream.events:
            event.passed.set()


def oldest(lanes):
    return lanes._under_way[Lane.FETCH][0]


def test_patiently_waits_instead_of_promising(full):
    """The caller is held up until the oldest work is done, and gives the work itself."""
    opener = threading.Timer(0.05, oldest(full).passed.set)
    started = time.perf_counter()
    opener.start()
    with full.blocking():
        mark = full.submit(Lane.FETCH, full.work("patient"), after={})
    assert time.perf_counter() - started >= 0.04
    assert not isinstance(mark, Promise)
    assert [name for name, _ in full.ran] == [0, 1, 2, "patient"]
    assert not full.has_promised()
    opener.join()


def test_without_patience_it_is_promised(full):
    first = oldest(full)
    mark = full.submit(Lane.FETCH, full.work("promised"), after={})
    assert isinstance(mark, Promise)
    assert [name for name, _ in full.ran] == [0, 1, 2]
    first.passed.set()
    full.wait(mark, "weights")
    assert [name for name, _ in full.ran] == [0, 1, 2, "promised"]


def test_patience_ends_with_its_context(full):
    """Also when something is raised in it; and an inner one does not end the outer."""
    with pytest.raises(ZeroDivisionError), full.blocking():
        raise ZeroDivisionError
    first = oldest(full)
    with full.blocking():
        with full.blocking():
            pass
        opener = threading.Timer(0.02, first.passed.set)
        opener.start()
        mark = full.submit(Lane.FETCH, full.work("patient"), after={})
        assert not isinstance(mark, Promise)
        opener.join()
    mark.passed.clear()
    assert isinstance(full.submit(Lane.FETCH, full.work("promised"), after={}), Promise)


def test_patience_keeps_the_order_behind_what_was_promised(full):
    """What was promised before is given first."""
    full.submit(Lane.FETCH, full.work("promised"), after={})
    opener = threading.Timer(0.02, lambda: [event.passed.set() for s in full.streams(Lane.FETCH) for event in s.events])
    opener.start()
    with full.blocking():
        mark = full.submit(Lane.FETCH, full.work("patient"), after={})
    full.wait(mark, "weights")
    assert [name for name, _ in full.ran] == [0, 1, 2, "promised", "patient"]
    opener.join()


def test_patience_with_room_does_not_wait(written):
    with written.blocking():
        mark = written.submit(Lane.FETCH, written.work("at once"), after={})
    assert isinstance(mark, Event)


# Copies


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=4),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(8, 64),
)
def test_long_copies_are_cut(sizes, dtype, longest):
    """Into pieces that are no longer than they may be, and together copy everything once."""
    pairs = [(torch.zeros(size, dtype=dtype), torch.arange(1, size + 1).to(dtype)) for size in sizes]
    with mock.patch.object(copies, "LONGEST_COPY", longest):
        work = copy_work(pairs)
    pieces = [-(-size * dtype.itemsize // (longest // dtype.itemsize * dtype.itemsize)) for size in sizes]
    assert len(work) == sum(max(1, number) for number in pieces)
    before = 0
    for piece in work:
        piece()
        copied = sum(int(target.count_nonzero()) for target, _ in pairs)
        assert (copied - before) * dtype.itemsize <= longest
        before = copied
    for target, source in pairs:
        assert torch.equal(target, source)


def test_a_long_copy_lets_others_in_between(written):
    """Pieces of 32 MiB: on two streams, so that the engine looks around after each."""
    assert copies.LONGEST_COPY == 32 * 1024 * 1024
    target, source = torch.empty(2, 80 * 1024 * 1024, dtype=torch.uint8)
    work = copy_work([(target, source)])
    assert len(work) == 3
    written.submit(Lane.FETCH, [functools.partial(written.note, number) for number in range(len(work))], after={})
    used = [stream for _, stream in written.ran]
    assert used[0] is not used[1]
    assert used[0] is used[2]


def test_lanes_that_take_turns_train_to_the_same_bits():
    """Activations and state on threaded lanes with copies of a few bytes."""

    def trained(activations):
        torch.manual_seed(0)
        model = Net(blocks=4)
        plan = {"update_in_backward": True, "overlap_forward": True, "window": "48KiB", "slots": 2}
        _, optimizer = offloaded_stack(model, **plan)
        handle = offload_activations(model, min_bytes=0) if activations else None
        losses = []
        for step in range(4):
            loss = model(torch.arange(12 + 3 * step).view(3, -1)).pow(2).mean()
            loss.backward()
            end_step(optimizer)
            losses.append(loss.detach())
        optimizer.synchronize()
        return losses + result(model.parameters(), optimizer), handle

    expected, _ = trained(activations=False)
    with mock.patch.object(copies, "LONGEST_COPY", 256), use_lanes(ThreadedLanes):
        found, handle = trained(activations=True)
    assert equal(found, expected)
    assert handle.bytes_returned > 0


def test_threads_of_the_host_are_not_needed():
    """Lanes for activations alone have none, and give work all the same."""
    made = ThreadedLanes(CPU)
    ran = []
    made.wait(made.submit(Lane.STORE, lambda: ran.append("store"), after={}), "left")
    assert ran == ["store"]
    made.threads = HostThreads(1)
    made.wait(made.submit_on_host([lambda: ran.append("slice")], after={}), "state")
    assert ran == ["store", "slice"]
