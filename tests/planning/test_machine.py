# SPDX-License-Identifier: Apache-2.0
"""The machine: measured rates that make sense, data that survives JSON, and a file that is used when it may be."""

import dataclasses
import json
import logging
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from offstage.errors import ConfigError
from offstage.lanes.lanes import ImmediateLanes, Lane
from offstage.lanes.link import use_lanes
from offstage.memory import cpus as host_cpus
from offstage.memory.arena import Arena
from offstage.planning import measure
from offstage.planning import rates as machine_rates
from offstage.planning.machine import UPDATE_BYTES_PER_PARAM, Machine
from offstage.planning.measure import measure_machine
from tests.support.machines import machine as reference_machine

CPU = torch.device("cpu")
GIB = 2**30
MOMENTARY = {"host_free_bytes", "device_free_bytes", "ranks_on_host"}


def by_hand(**changes) -> Machine:
    """The reference machine, more or less."""
    rates = {
        "link_down_gb_per_s": 55.0,
        "link_duplex_gb_per_s": 50.6,
        "dram_gb_per_s": 127.0,
        "device_gb_per_s": 4000.0,
    }
    fields = {"host_bytes": 125 * GIB, "host_update_gb_per_s": {16: 126.0, 1: 15.0, 4: 60.0}, **rates}
    return reference_machine(**(fields | changes))


def rates(found: Machine) -> dict:
    return {name: value for name, value in dataclasses.asdict(found).items() if name not in MOMENTARY}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFSTAGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "_measured", {})
    return tmp_path / "cache"


@pytest.fixture
def passes(monkeypatch):
    """Passes that take no time, each with other rates; the list says which were made."""
    made = []

    def measure_rates(device, threads, host_free, device_free):
        made.append(threads)
        names = {field.name for field in dataclasses.fields(Machine) if "_per_s" in field.name}
        numbers = dict.fromkeys(names | {"host_update_gparam_limit"}, len(made) + 1 / 3)
        return numbers | {"host_update_gb_per_s": {1: len(made) + 0.1, 2: 7.0}}

    monkeypatch.setattr(machine_rates, "measure_rates", measure_rates)
    return made


# Measuring #


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """This machine, measured once with nothing made smaller, and the seconds that took."""
    tiny = Arena(1 << 20, torch.uint8, CPU, pin=False)
    machine_rates._update(machine_rates._adamw_state(tiny))  # compile: that is not measuring
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFSTAGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(measure, "_measured", {})
        start = time.perf_counter()
        found = measure_machine(CPU)
        return found, time.perf_counter() - start


def test_measured_rates_are_plausible(measured):
    found, seconds = measured
    assert seconds < 12  # a few on an idle machine
    assert found.device_name == "cpu"
    assert found.threads == host_cpus.usable_cpus() == max(found.host_update_gb_per_s)
    assert list(found.host_update_gb_per_s) == machine_rates.thread_counts(found.threads)
    assert found.device_bytes == found.host_bytes >= found.host_free_bytes == found.device_free_bytes > 0
    assert found.dram_gb_per_s >= max(found.host_update_gb_per_s.values())
    assert 0.5 < found.dram_gb_per_s < 5000
    # Here both ways take turns on the same threads: half of one way, and far from more than it under any noise.
    assert found.link_duplex_gb_per_s < 1.5 * max(found.link_up_gb_per_s, found.link_down_gb_per_s)
    assert max(found.link_up_gb_per_s, found.link_down_gb_per_s) > found.dram_gb_per_s / 50
    # Data in the cache is no slower than data in memory.
    alone = found.host_update_gb_per_s[1] / UPDATE_BYTES_PER_PARAM
    assert alone / 3 < found.host_update_gparam_limit < 20
    assert 0.01 < found.pin_gib_per_s < 1000


def test_thread_counts():
    counts = machine_rates.thread_counts
    assert [counts(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]
    assert counts(96) == [1, 2, 4, 8, 16, 32, 64, 96]


def test_little_memory_is_taken_where_little_is_free(monkeypatch):
    """No more than an eighth of what is free at any time; and the rates are there all the same."""
    sizes, live = [], []

    class Counted(Arena):
        def __init__(self, numel, *args, **kwargs):
            live.append(numel)
            sizes.append(sum(live))
            super().__init__(numel, *args, **kwargs)

        def close(self):
            live.remove(self.numel)
            super().close()

    monkeypatch.setattr(machine_rates, "Arena", Counted)
    monkeypatch.setattr(machine_rates, "_WINDOW_SECONDS", 0.002)
    found = machine_rates.measure_rates(CPU, 3, host_free=64 << 20, device_free=2 << 20)
    assert sizes
    assert max(sizes) <= 8 << 20
    assert not live
    assert list(found["host_update_gb_per_s"]) == [1, 2, 3]
    assert by_hand(**found).dram_gb_per_s > 0


def test_more_threads_than_slices(monkeypatch):
    """Every thread has parameters of its own, however many there are."""
    monkeypatch.setattr(machine_rates, "_WINDOW_SECONDS", 0.002)
    arena = Arena(1 << 20, torch.uint8, CPU, pin=False)  # 65,536 parameters, less than one slice
    found, limit = machine_rates._host_updates(arena, 24)
    assert list(found) == [1, 2, 4, 8, 16, 24]
    assert min(found.values()) > 0 < limit


class LinkOf(ImmediateLanes):
    """A link of known speed and a clock of its own; what is queued is not copied. Both ways at once go slower."""

    def __init__(self, up, down, both):
        super().__init__(CPU)
        self.alone, self.both = {Lane.FETCH: up, Lane.STORE: down}, both
        self.now, self.queued = 0.0, []

    def submit(self, lane, work, **kwargs):
        self.queued.append((lane, work.args[0].nbytes))

    def stamp(self, lane):
        """The milliseconds at which all that was queued on `lane` is done."""
        busy = {lane for lane, _ in self.queued}
        speed = {lane: self.both[lane] if len(busy) == 2 else self.alone[lane] for lane in busy}
        return self.now + sum(nbytes / 1e6 / speed[lane] for queue, nbytes in self.queued if queue is lane)

    def elapsed_ms(self, start, stop):
        self.now, self.queued = max(self.now, stop), []
        return stop - start


@pytest.mark.parametrize(("up_busy", "down_busy"), [(30.0, 30.0), (30.0, 20.0), (20.0, 30.0)])
def test_link_rates_are_bytes_each_way_over_time(up_busy, down_busy):
    arena = Arena(1 << 20, torch.uint8, CPU, pin=False)
    link = LinkOf(50.0, 40.0, {Lane.FETCH: up_busy, Lane.STORE: down_busy})
    found = machine_rates._link_and_device(link, arena, 1 << 18)
    assert found == {
        "link_up_gb_per_s": pytest.approx(50.0),
        "link_down_gb_per_s": pytest.approx(40.0),
        "link_duplex_gb_per_s": pytest.approx(min(up_busy, down_busy)),  # until both are done
    }


class Clock(threading.local):
    """Time that advances only where the work says so, separately in each thread: load cannot slow it down."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_update_traffic_is_counted_per_second(monkeypatch):
    """A rule that takes 4 ms per call of 16,384 parameters: 30 bytes each, on as many threads as there are."""
    clock = Clock()
    monkeypatch.setattr(machine_rates, "time", clock)
    monkeypatch.setattr(
        machine_rates, "_prepare", lambda state: lambda start, stop: clock.spend(0.004 * (stop - start == 16384))
    )
    monkeypatch.setattr(machine_rates, "_SLICE", 16384)
    arena = Arena(1 << 22, torch.uint8, CPU, pin=False)
    found, _ = machine_rates._host_updates(arena, 4)
    assert found[1] == pytest.approx(16384 * 30 / 0.004 / 1e9)
    assert found[4] == pytest.approx(4 * 16384 * 30 / 0.004 / 1e9)


def test_no_two_threads_work_on_the_same_piece(monkeypatch):
    """Two updates of one piece at once would share its cache lines, and be slower than training is."""
    clock, seen = Clock(), {}
    monkeypatch.setattr(machine_rates, "time", clock)

    def work(piece):
        seen.setdefault(piece, set()).add(threading.get_ident())
        clock.spend(0.001)

    rate = machine_rates._per_second(3, [partial(work, piece) for piece in range(8)])
    assert sorted(seen) == list(range(8))
    assert all(len(threads) == 1 for threads in seen.values())
    assert len(set.union(*seen.values())) == 3
    assert rate == pytest.approx(3 / 0.001)


def test_the_update_pass_is_the_rules_own_and_stays_finite():
    state = machine_rates._adamw_state(Arena(1 << 16, torch.uint8, CPU, pin=False))
    assert [tensor.dtype for tensor in state] == [torch.bfloat16] * 2 + [torch.float32] * 3
    assert {tensor.numel() for tensor in state} == {(1 << 16) // 16}
    before = state[4].clone()
    for _ in range(100):
        machine_rates._update(state)
    assert (state[4] < before).all()
    assert torch.equal(state[0], state[4].bfloat16())
    assert (state[3] > 1e-6).all()  # no denormals, which would be slow


def test_lanes_of_a_test_are_not_timed(monkeypatch):
    monkeypatch.setattr(machine_rates, "_WINDOW_SECONDS", 0.002)

    def never(device):
        raise AssertionError("these lanes were asked for")

    with use_lanes(never):
        assert machine_rates.measure_rates(CPU, 1, host_free=16 << 20, device_free=1 << 20)["link_up_gb_per_s"] > 0


def test_a_device_that_is_not_here():
    found = torch.accelerator.current_accelerator(check_available=True)
    sees = "no accelerator" if found is None else f"'{found.type}'"
    with pytest.raises(ConfigError, match=f"found device 'hpu:1', and torch sees {sees}"):
        measure_machine(torch.device("hpu", 1))


def test_what_the_allocator_has_in_reserve_is_free(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda index: {3: (70 * GIB, 80 * GIB)}[index])
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda index: {3: 9 * GIB}[index])
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda index: {3: 5 * GIB}[index])
    assert measure._momentary(torch.device("cuda", 3))["device_free_bytes"] == 74 * GIB


# The file #


def test_remembered_in_the_process_and_in_the_file(passes, own_cache):
    first = measure_machine(CPU)
    assert rates(measure_machine(CPU)) == rates(first)
    measure._measured.clear()  # another process
    start = time.perf_counter()
    assert rates(measure_machine(CPU)) == rates(first)
    assert time.perf_counter() - start < 0.5
    assert len(passes) == 1
    assert len(list(own_cache.glob("machine-*.json"))) == 1


def test_refresh_measures_again_and_replaces_the_file(passes):
    old = measure_machine(CPU)
    new = measure_machine(CPU, refresh=True)
    assert rates(new) != rates(old)
    measure._measured.clear()
    assert rates(measure_machine(CPU)) == rates(new)
    assert len(passes) == 2


def test_what_is_free_is_read_every_time(passes, monkeypatch):
    monkeypatch.setattr(measure, "cgroup_available", lambda: 3 * GIB)
    for left, clear in ((2 * GIB, False), (1 * GIB, False), (GIB // 2, True), (5 * GIB, False)):
        monkeypatch.setattr(measure, "mem_available", lambda left=left: left)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(left // GIB + 1))
        if clear:
            measure._measured.clear()
        found = measure_machine(CPU)
        assert found.host_free_bytes == found.device_free_bytes == min(left, 3 * GIB)
        assert found.ranks_on_host == left // GIB + 1
    assert len(passes) == 1


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (host_cpus, "usable_cpus", lambda: 77),
        (host_cpus, "num_nodes", lambda: 8),
        (measure, "host_bytes", lambda: 77 * GIB),
        (measure, "_cpu_model", lambda: "Another CPU"),
        (measure, "_device_name", lambda device: "Another device"),
        (measure, "_digest", lambda module: "another rule"),
        (measure, "_METHOD", 77),
        (torch, "__version__", "77.0"),
        (torch, "get_num_threads", lambda: 77),
        (measure, "_first_line", lambda path: "driver 77"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_change_of_the_machine_is_measured(passes, monkeypatch, where, name, value):
    before = measure_machine(CPU)
    monkeypatch.setattr(where, name, value)
    changed = measure_machine(CPU)
    assert len(passes) == 2
    assert rates(changed) != rates(before)


def test_the_slot_is_part_of_the_machine(tmp_path, monkeypatch):
    """The same accelerator behind eight lanes is another machine than behind sixteen."""
    monkeypatch.setattr(host_cpus, "pci_folder", lambda device: tmp_path)
    monkeypatch.setattr(measure, "_device_name", lambda device: "one")
    keys = []
    for width in (8, 16):
        (tmp_path / "current_link_width").write_text(f"{width}\n")
        keys.append(measure._identity(torch.device("cuda", 0)))
    assert [key.pop("link_width") for key in keys] == ["8", "16"]
    assert keys[0] == keys[1]


def another_machine(text: str) -> str:
    content = json.loads(text)
    content["key"]["cpu"] = "Another CPU"
    return json.dumps(content)


def broken_rate(text: str) -> str:
    content = json.loads(text)
    content["machine"]["link_up_gb_per_s"] = -1.0
    return json.dumps(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "null",
        lambda text: "\x00" * 100,
        lambda text: text.replace("link_up", "link_sideways"),
        another_machine,
        broken_rate,
    ],
)
def test_a_file_that_cannot_be_used_is_replaced(passes, own_cache, caplog, spoil):
    measure_machine(CPU)
    (path,) = own_cache.glob("*.json")
    path.write_text(spoil(path.read_text()))
    measure._measured.clear()
    with caplog.at_level(logging.INFO, "offstage"):
        found = measure_machine(CPU)
    assert "the machine is measured again" in caplog.text
    assert len(passes) == 2
    measure._measured.clear()
    assert rates(measure_machine(CPU)) == rates(found)
    assert len(passes) == 2


def test_a_file_that_is_not_text(passes, own_cache):
    measure_machine(CPU)
    (path,) = own_cache.glob("*.json")
    path.write_bytes(bytes(range(256)))
    measure._measured.clear()
    assert measure_machine(CPU)
    assert len(passes) == 2


def test_no_place_for_a_file_is_no_error(passes, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("OFFSTAGE_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.INFO, "offstage"):
        found = measure_machine(CPU)
    assert "cannot be saved" in caplog.text
    assert rates(measure_machine(CPU)) == rates(found)  # the process remembers
    assert len(passes) == 1


def test_a_write_that_fails_leaves_nothing(own_cache, caplog):
    own_cache.mkdir()
    (own_cache / "machine-x.json").mkdir()  # in the way of the rename
    with caplog.at_level(logging.INFO, "offstage"):
        measure._write(own_cache / "machine-x.json", {}, by_hand())
    assert "cannot be saved" in caplog.text
    assert [path.name for path in own_cache.iterdir()] == ["machine-x.json"]


def test_where_the_file_is(tmp_path, monkeypatch):
    assert measure.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("OFFSTAGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert measure.cache_folder() == tmp_path / "xdg/offstage"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert measure.cache_folder() == tmp_path / "home/.cache/offstage"


def test_many_writers_never_show_half_a_file(own_cache):
    own_cache.mkdir()
    path, key = own_cache / "machine-x.json", {"cpu": "x"}
    known = [by_hand(link_up_gb_per_s=10.0**i) for i in range(1, 9)]
    measure._write(path, key, known[0])
    done = threading.Event()

    def write(mine: Machine) -> None:
        while not done.is_set():
            measure._write(path, key, mine)

    writers = [threading.Thread(target=write, args=(mine,)) for mine in known]
    for writer in writers:
        writer.start()
    try:
        seen = [measure._read(path, key) for _ in range(300)]
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert all(found in known for found in seen)
    assert len({found.link_up_gb_per_s for found in seen}) > 1
    assert [path.name for path in own_cache.iterdir()] == ["machine-x.json"]


def test_ranks_measure_one_at_a_time_and_the_others_read(passes, own_cache):
    """While one rank measures, another waits, and then finds the file."""
    found = []
    with measure._alone(own_cache):
        other = threading.Thread(target=lambda: found.append(measure_machine(CPU)))
        other.start()
        time.sleep(0.2)
        assert other.is_alive()
        assert not passes
        key = measure._identity(CPU)
        mine = measure._measure(CPU, key)
        measure._write(own_cache / measure._file_name(key), key, mine)
    other.join(10)
    assert rates(found[0]) == rates(mine)
    assert len(passes) == 1


def test_a_rank_that_never_ends_is_not_waited_for(passes, own_cache, monkeypatch):
    monkeypatch.setattr(measure, "_PATIENCE_SECONDS", 0.1)
    with measure._alone(own_cache):
        assert measure_machine(CPU)
    assert len(passes) == 1


# The data #


def test_json_round_trip(measured):
    for one in (by_hand(), by_hand(ranks_on_host=8, numa_nodes=2), measured[0]):
        assert Machine.from_json(one.to_json()) == one
        assert hash(Machine.from_json(one.to_json())) == hash(one)


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"threads": 4}', by_hand().to_json().replace('"16"', '"x"')])
def test_json_of_something_else(text):
    with pytest.raises(ConfigError, match=r"expects what Machine\.to_json wrote"):
        Machine.from_json(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("link_up_gb_per_s", 0.0),
        ("dram_gb_per_s", -1.0),
        ("device_gb_per_s", float("nan")),
        ("device_free_bytes", -1),
        ("threads", 0),
        ("host_update_gb_per_s", {}),
        ("host_update_gb_per_s", {0: 1.0}),
        ("host_update_gb_per_s", {1: 0.0}),
    ],
)
def test_impossible_machines_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        by_hand(**{field: value})


def test_nothing_free_is_possible():
    assert by_hand(device_free_bytes=0, host_free_bytes=0).device_free_bytes == 0


def test_update_rate_by_threads_and_format():
    one = by_hand()
    assert one.host_update_rate(1) == pytest.approx(0.5)  # 15 GB/s over 30 bytes
    assert one.host_update_rate(16) == pytest.approx(4.2)
    assert one.host_update_rate(10) == pytest.approx((60 + 126) / 2 / 30)  # halfway between 4 and 16
    assert one.host_update_rate(0) == one.host_update_rate(1)
    assert one.host_update_rate(500) == one.host_update_rate(16)
    assert one.host_update_rate(16, 60) == pytest.approx(2.1)
    # 6 bytes per parameter would be 21 Gparam/s of traffic; the arithmetic stops at 0.6 per thread.
    assert one.host_update_rate(16, 6) == pytest.approx(9.6)
    assert one.host_update_rate(1, 6) == pytest.approx(0.6)
    assert one.host_update_rate(500, 6) == pytest.approx(9.6)
    assert by_hand(host_update_gb_per_s={16: 128.0}).host_update_rate(8) == pytest.approx(64 / 30)


def test_more_threads_of_a_machine_that_scales_are_never_slower():
    one = by_hand()
    for traffic in (6, 14, 30, 60):
        assert (np.diff([one.host_update_rate(threads, traffic) for threads in range(1, 40)]) >= 0).all()


def test_table():
    assert str(by_hand(ranks_on_host=8, numa_nodes=2)).splitlines() == [
        "device             NVIDIA H200, 139.0 GiB, 138.0 GiB free",
        "host               16 threads on 2 NUMA nodes, shared by 8 ranks, 125.0 GiB, 120.0 GiB free",
        "link up                55.1 GB/s",
        "link down              55.0 GB/s",
        "link both ways         50.6 GB/s each way",
        "device memory        4000.0 GB/s",
        "host memory           127.0 GB/s",
        "pinning                17.0 GiB/s",
        "AdamW, 1 thread        15.0 GB/s = 0.50 Gparam/s",
        "AdamW, 4 threads       60.0 GB/s = 2.00 Gparam/s",
        "AdamW, 16 threads     126.0 GB/s = 4.20 Gparam/s",
        "giving work            25.0 us of the host's time",
        "AdamW in cache         0.60 Gparam/s per thread",
    ]
