# SPDX-License-Identifier: Apache-2.0
"""The simulated device against numbers computed by hand: its clocks, its memory, and the library on top of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offstage
from offstage.lanes.host_threads import HostThreads
from offstage.lanes.lanes import Lane
from offstage.lanes.link import link_for
from offstage.lanes.testing.simulated import SimulatedDevice, SimulatedLanes
from offstage.lanes.testing.virtual_time import Timeline
from offstage.memory.arena import Arena

CPU = torch.device("cpu")
MS = 1_000_000
"""Bytes: at 1 GB/s they take a millisecond."""
GIB = 1 << 30


def make(**others: Any) -> SimulatedDevice:
    """Up 1 GB/s, down 2, device memory 4, host updates 0.5; 1e9 floating-point operations take a millisecond."""
    rates = {"up_gb_per_s": 1.0, "down_gb_per_s": 2.0, "device_gb_per_s": 4.0, "tflops": 1.0}
    return SimulatedDevice(**{"memory_bytes": GIB, "host_update_gb_per_s": 0.5, **rates, **others})


def buffer(nbytes: int = MS) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def send(lanes: SimulatedLanes, lane: Lane, nbytes: int = MS, after: float | None = None, **others: Any) -> float:
    return lanes.submit(lane, [], after={"test: it may begin": after}, writes=[buffer(nbytes)], **others)


# The clocks of lanes


@pytest.mark.parametrize(
    ("lane", "ms"), [(Lane.FETCH, 1.0), (Lane.WEIGHTS_UP, 1.0), (Lane.STORE, 0.5), (Lane.GRADIENTS_DOWN, 0.5)]
)
def test_a_copy_takes_its_bytes_over_the_rate_of_its_direction(lane, ms):
    device = make()
    assert send(device.make_lanes(CPU), lane) == pytest.approx(ms)
    assert device.now_ms() == 0.0  # the caller's stream has waited for nothing


def test_copies_of_one_lane_follow_each_other_and_the_directions_overlap():
    lanes = make().make_lanes(CPU)
    assert [send(lanes, Lane.FETCH), send(lanes, Lane.FETCH)] == pytest.approx([1.0, 2.0])
    assert send(lanes, Lane.STORE) == pytest.approx(0.5)


def test_the_work_is_done_when_it_is_submitted():
    lanes, target = make().make_lanes(CPU), buffer(1000)
    lanes.submit(Lane.FETCH, lambda: target.fill_(7), after={}, writes=[target])
    assert target.eq(7).all()


def test_users_share_the_link():
    device = make()
    state, activations = device.make_lanes(CPU), device.make_lanes(CPU)
    assert send(state, Lane.FETCH) == pytest.approx(1.0)
    assert send(activations, Lane.FETCH) == pytest.approx(2.0)
    assert send(activations, Lane.WEIGHTS_UP) == pytest.approx(3.0)
    assert send(activations, Lane.STORE) == pytest.approx(0.5)


def test_an_update_takes_its_traffic():
    """Gradients are read, state is read and written."""
    device = make()
    lanes = device.make_lanes(CPU)
    grad, state = buffer(MS), buffer(2 * MS)
    assert lanes.submit(Lane.UPDATE, [], after={}, reads=[grad], writes=[state]) == pytest.approx(5 / 4)
    lanes.threads = HostThreads(1)
    ran: list[int] = []
    marks = [
        lanes.submit_on_host([lambda: ran.append(1)], after={}, reads=[grad], writes=[state]),
        device.make_lanes(CPU).submit(Lane.HOST, [], after={}),
        lanes.submit_on_host([lambda: ran.append(2)], after={}, reads=[grad]),
    ]
    assert ran == [1, 2]
    assert marks == pytest.approx([10.0, 0.0, 12.0])  # the threads are one thing that all updates share


def test_waiting():
    device = make()
    lanes = device.make_lanes(CPU)
    fetched = send(lanes, Lane.FETCH)
    lanes.wait(fetched, "test: it is here")
    assert device.now_ms() == lanes.mark() == lanes.stamp(Lane.CALLER) == fetched
    assert not lanes.passed(fetched)  # the host runs ahead
    assert send(lanes, Lane.STORE) == pytest.approx(0.5)
    lanes.wait_on_host(fetched, "test: the host needs it")
    assert lanes.passed(fetched)
    assert send(lanes, Lane.STORE) == pytest.approx(1.5)
    stored = send(lanes, Lane.STORE)
    lanes.release(buffer(), stored, "test: it was stored")
    assert device.now_ms() == stored == pytest.approx(2.0)
    last = send(lanes, Lane.FETCH, 4 * MS)
    lanes.synchronize("test: all is done")
    assert lanes.passed(last)
    assert device.now_ms() == last == pytest.approx(5.0)


def test_launches_take_the_hosts_time():
    device = make(launch_us=100.0)
    lanes = device.make_lanes(CPU)
    assert [send(lanes, Lane.FETCH, 0) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    with device:
        x = torch.zeros(10, dtype=torch.uint8)
        assert device.now_ms() == pytest.approx(0.4 + 10 / 4e6)
        x.view(2, 5)
    assert device.clock.host == pytest.approx(0.4)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=30))
def test_a_timeline_serves_one_at_a_time_and_wastes_nothing(asked):
    timeline = Timeline()
    taken: set[int] = set()
    for ready, duration in asked:
        begin, end = timeline.take(float(ready), float(duration))
        free = (moment for moment in range(ready, 1000) if moment not in taken)
        expected = [next(free) for _ in range(duration)]  # moment by moment
        taken.update(expected)
        assert (begin, end) == ((expected[0], expected[-1] + 1) if expected else (ready, ready))


# The caller's stream


def timed(device: SimulatedDevice, act: Any) -> float:
    start = device.now_ms()
    act()
    return device.now_ms() - start


def test_operations_take_flops_or_bytes():
    device = make()
    with device:
        a, b = torch.zeros(100, 200), torch.zeros(200, 50)
        nbytes = a.nbytes
        row = torch.zeros(200)
        assert timed(device, lambda: a @ b) == pytest.approx(2 * 100 * 200 * 50 / 1e9)
        assert timed(device, lambda: torch.addmm(torch.empty(50), a, b)) == pytest.approx(2 * 100 * 200 * 50 / 1e9)
        assert timed(device, lambda: a + a) == pytest.approx(3 * nbytes / 4e6)
        assert timed(device, lambda: a.add_(a)) == pytest.approx(3 * nbytes / 4e6)
        assert timed(device, lambda: torch._foreach_mul_([a], 2.0)) == pytest.approx(2 * nbytes / 4e6)
        assert timed(device, lambda: a.zero_()) == pytest.approx(nbytes / 4e6)
        assert timed(device, lambda: a.copy_(row.expand(100, 200))) == pytest.approx((nbytes + row.nbytes) / 4e6)
        assert timed(device, lambda: a.view(-1, 20).t().detach()[3:]) == 0.0
        assert timed(device, lambda: torch.empty_like(a)) == 0.0


def test_attention_and_layers_in_inference_mode_take_their_flops():
    device = make()
    with device, torch.inference_mode():
        q = torch.zeros(2, 4, 32, 8)
        attention = 2 * (2 * 4 * 32 * 32 * 8) * 2
        assert timed(device, lambda: F.scaled_dot_product_attention(q, q, q)) == pytest.approx(attention / 1e9)
        x, weight, bias = torch.zeros(5, 30), torch.zeros(20, 30), torch.zeros(20)
        assert timed(device, lambda: F.linear(x, weight, bias)) == pytest.approx(2 * 5 * 30 * 20 / 1e9)


def test_copies_overlap_compute_until_something_waits():
    device = make()
    with device:
        a = torch.zeros(1000, 500)
        lanes = device.make_lanes(CPU)
        start = device.now_ms()
        fetched = send(lanes, Lane.FETCH, after=start)
        assert timed(device, lambda: a @ a.t()) == pytest.approx(1.0)
        lanes.wait(fetched, "test: it is here")
        assert device.now_ms() == pytest.approx(start + 1.0)
        fetched = send(lanes, Lane.FETCH, 3 * MS, after=device.now_ms())
        assert timed(device, lambda: a @ a.t()) == pytest.approx(1.0)
        assert timed(device, lambda: lanes.wait(fetched, "test: it is here")) == pytest.approx(2.0)


def test_operations_of_lanes_take_no_time_of_the_callers_stream():
    device = make()
    with device:
        x = torch.zeros(MS)
        start = device.now_ms()
        device.make_lanes(CPU).submit(Lane.UPDATE, lambda: x.add_(1), after={}, writes=[x])
        assert device.now_ms() == start


def test_reading_a_value_and_blocking_copies_make_the_host_wait():
    device = make()
    with device:
        x = torch.zeros(MS // 4)
        host = Arena(MS // 4, torch.float32, CPU, pin=False).flat
        assert device.clock.host == 0.0
        x[0].item()
        assert device.clock.host == device.now_ms() > 0.0
        start = device.now_ms()
        x.copy_(host, non_blocking=True)
        assert device.clock.host == start
        assert device.now_ms() == pytest.approx(start + 1.0)  # over the link
        host.copy_(x)
        assert device.clock.host == device.now_ms() == pytest.approx(start + 1.5)
        assert timed(device, lambda: host.add_(1)) == 0.0


# Memory


def test_memory_is_counted_in_blocks_until_its_storage_dies():
    device = make()
    with device:
        x = torch.empty(1000, dtype=torch.uint8)
        assert device.allocated_bytes == 1024
        half = x[500:]
        del x
        assert device.allocated_bytes == 1024  # a view keeps it
        x = torch.zeros_like(half)
        assert device.allocated_bytes == 1536
        half.untyped_storage().resize_(0)
        assert device.allocated_bytes == 512
        half.untyped_storage().resize_(2000)
        assert device.allocated_bytes == 2560
        torch.add(x, 1, out=(out := torch.empty(0, dtype=torch.uint8)))
        assert device.allocated_bytes == 3072
        assert device.peak_bytes == 3072
        del half, x, out
        device.reset_peak()
        assert device.allocated_bytes == device.peak_bytes == 0
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


def test_host_memory_does_not_count():
    device = make()
    arena = Arena(4096, torch.uint8, CPU, pin=False)
    outside = torch.zeros(1024)
    with device:
        lanes = device.make_lanes(CPU)
        clone = arena.tensor(0, 2048).clone() + 1
        alias = torch.empty(0, dtype=torch.uint8).set_(arena.flat.untyped_storage(), 0, (8,), (1,))
        assert device.allocated_bytes == 0
        device.adopt(outside)
        assert device.allocated_bytes == 4096
        memory = lanes.empty(1024)
        assert lanes.allocated_bytes() == lanes.peak_bytes() == 5120
        assert lanes.free_bytes() == GIB - 5120
        assert lanes.device_memory() == (GIB - 5120, 0, GIB)
        on_device = clone + memory[0]
        assert device.allocated_bytes == 5120 + 2048
        assert alias.numel() + on_device.numel() == 2056


SIDE, DEPTH = 64, 8
ACT = SIDE * SIDE * 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, every: int = 0) -> None:
        """`every`: so many layers are checkpointed together."""
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.every = every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.every:
            return nn.Sequential(*self.layers)(x)
        for first in range(0, DEPTH, self.every):
            part = nn.Sequential(*self.layers[first : first + self.every])
            x = checkpoint(part, x, use_reentrant=False)
        return x


def test_activations_are_counted_exactly():
    with make() as device:
        model, x = Stack(), torch.randn(SIDE, SIDE)
        assert device.allocated_bytes == (DEPTH + 1) * ACT  # the weights and the batch
        device.reset_peak()
        loss = model(x).sum()
        assert device.allocated_bytes == (2 * DEPTH + 1) * ACT + 512  # each tanh, and the loss
        assert device.peak_bytes == (2 * DEPTH + 2) * ACT  # and the last layer's product
        device.reset_peak()
        loss.backward()
        # A layer's backward has 2: the product's gradient, and the weight's or the input's. Nothing was freed before.
        assert device.peak_bytes == (2 * DEPTH + 1) * ACT + 2 * ACT + 1024
        assert device.allocated_bytes == (2 * DEPTH + 1) * ACT + 512  # activations went, gradients came


def test_checkpointed_activations_are_counted_exactly():
    with make() as device:
        model, x = Stack(every=2), torch.randn(SIDE, SIDE)
        loss = model(x).sum()
        # One result of two layers each, of which the last is not kept: it is saved by nobody.
        assert device.allocated_bytes == (DEPTH + 1 + DEPTH // 2 - 1) * ACT + 512
        assert device.peak_bytes == (DEPTH + 1 + DEPTH // 2 - 1 + 3) * ACT
        loss.backward()
        assert device.allocated_bytes == (2 * DEPTH + 1) * ACT + 512


def test_running_out_of_memory_and_going_on():
    with make(memory_bytes=(2 * DEPTH + 2) * ACT + 1024) as device:
        model = Stack()
        x = torch.randn(SIDE, SIDE)
        before = device.allocated_bytes
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32\.0 KiB"):
            model(torch.randn(2 * SIDE, SIDE))
        assert device.allocated_bytes == before
        assert device.peak_bytes <= device.memory.limit
        loss = model(x).sum()
        with pytest.raises(torch.OutOfMemoryError):  # backward needs one more
            loss.backward()
        del loss
        assert model(x[:32]).sum().backward() is None


# The library


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


WIDTH, BATCH, STEPS = 32, 64, 5
FLOPS = 3 * 2 * BATCH * 6 * 8 * WIDTH * WIDTH
"""Of forward and backward; the first layer needs no gradient of its input."""
COMPUTE_MS = (FLOPS - 2 * BATCH * 4 * WIDTH * WIDTH) / 1e9


class Run:
    """A few iterations: the weights, the device, and what the last one took."""

    def __init__(self, activations: dict[str, Any] | None = None, *, simulate: bool = True, **config: Any) -> None:
        torch.manual_seed(0)
        # Its memory is so fast that nothing but products takes time.
        self.device = make(device_gb_per_s=1e6, up_gb_per_s=2.0, launch_us=0.0)
        if simulate:
            with self.device:
                self._train(activations, config)
        else:
            self._train(activations, config)

    def _train(self, activations: dict[str, Any] | None, config: dict[str, Any]) -> None:
        model, x = Model(WIDTH), torch.randn(BATCH, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.state_bytes = 2 * sum(p.nbytes for p in model.parameters())
        if config:
            optimizer = offstage.offload(optimizer, model, **{"min_bytes": 0, "chunk_bytes": "16KiB", **config})
        if activations is not None:
            offstage.offload_activations(model, min_bytes=0, **activations)
        self.losses = []
        for _ in range(STEPS):
            start = self.device.now_ms()
            self.device.reset_peak()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.ms, self.peak = self.device.now_ms() - start, self.device.peak_bytes
            self.losses.append(loss.item())
            del loss
        self.receipt = optimizer.receipt() if config else None
        self.weights = [p.detach().clone() for p in model.parameters()]


HOW = {
    "streamed": {"fraction": 1.0},
    "half": {"fraction": 0.5},
    "overlap": {"overlap_forward": True},
    "backward": {"update_in_backward": True},
    "both": {"overlap_forward": True, "update_in_backward": True},
    "host": {"update_on": "host"},
    "weights": {"weights": "host"},
    "weights, both": {"weights": "host", "overlap_forward": True, "update_in_backward": True},
}
_runs: dict[tuple[str, bool], Run] = {}


def run(how: str, *, activations: bool = False) -> Run:
    key = (how, activations)
    if key not in _runs:
        _runs[key] = Run({} if activations else None, **HOW.get(how, {}))
    return _runs[key]


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_bits_are_those_of_training_without_it(how, activations):
    without = Run(simulate=False, **HOW[how])
    found = run(how, activations=activations)
    assert found.losses == without.losses
    assert all(torch.equal(a, b) for a, b in zip(found.weights, without.weights, strict=True))


def test_bits_are_those_of_plain_torch():
    plain, found = Run(simulate=False), Run({}, rule="torch", overlap_forward=True, update_in_backward=True)
    assert found.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(found.weights, plain.weights, strict=True))


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_no_iteration_is_shorter_than_its_compute(how, activations):
    assert run(how, activations=activations).ms >= COMPUTE_MS


def test_plain_training_takes_its_compute():
    assert run("plain").ms == pytest.approx(COMPUTE_MS, rel=1e-2)


def test_a_step_takes_its_state_over_the_rate():
    found = run("streamed")
    fetched_ms = found.state_bytes / 2e6
    assert found.ms == pytest.approx(COMPUTE_MS + fetched_ms, rel=0.02)
    assert found.receipt is not None
    assert found.receipt.exposed_ms == pytest.approx(fetched_ms, rel=0.02)
    assert found.receipt.lane_ms["fetch"] == pytest.approx(fetched_ms, rel=0.01)
    assert found.receipt.lane_ms["store"] == pytest.approx(fetched_ms, rel=0.01)


def test_overlap_hides_some_of_it():
    streamed = run("streamed").ms
    for how in ("overlap", "backward", "both"):
        assert run(how).ms < streamed - 0.2 * COMPUTE_MS


def test_less_state_on_the_host_takes_less_time_and_more_memory():
    ms = [Run(fraction=fraction).ms for fraction in (1.0, 0.75)] + [run("half").ms, Run(fraction=0.25).ms]
    assert ms == sorted(ms, reverse=True)
    assert len(set(ms)) == 4
    assert run("half").peak > run("streamed").peak


def test_updates_on_the_host_take_their_traffic():
    found = run("host")
    params = found.state_bytes // 8
    assert found.receipt is not None
    assert found.receipt.host_update_ms == pytest.approx(28 * params / 0.5e6)  # fp32: 7 words


def test_what_leaves_the_device_lowers_the_peak():
    plain = run("streamed").peak
    assert run("weights").peak < plain
    assert run("streamed", activations=True).peak < plain
    assert run("weights, both", activations=True).peak < min(
        run("weights").peak, run("streamed", activations=True).peak
    )


def test_weights_that_return_are_device_memory_again():
    with make() as device:
        model = Model(WIDTH)
        device.adopt(model)
        everything = device.allocated_bytes
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, weights="host", min_bytes=0)
        assert device.allocated_bytes < everything
        optimizer.replan(weights="device")
        assert all(device.memory.holds(param.untyped_storage()) for param in model.parameters())


def test_times_and_peaks_are_the_same_every_time():
    found, again = run("weights, both", activations=True), Run({}, **HOW["weights, both"])
    assert (found.ms, found.peak, found.receipt) == (again.ms, again.peak, again.receipt)


def test_the_link_is_known_without_measuring():
    with make() as device:
        lanes = device.make_lanes(CPU)
        assert link_for(CPU).gb_per_s(lanes) == 1.0
        assert device.peak_bytes == 0


def test_machine():
    machine = make(launch_us=5.0).machine(offstage.Machine, host_free_bytes=123)
    assert (machine.device_bytes, machine.device_free_bytes, machine.host_free_bytes) == (GIB, GIB, 123)
    assert (machine.link_up_gb_per_s, machine.link_down_gb_per_s, machine.submit_us) == (1.0, 2.0, 5.0)
    assert machine.host_update_rate(8) == pytest.approx(0.5 / 30)
    assert make().machine(offstage.Machine).host_free_bytes > 0


def test_a_device_is_entered_once_at_a_time():
    device = make()
    with device:
        x = torch.zeros(MS)
        with pytest.raises(offstage.OffstageError, match="entered already"):
            device.__enter__()
        assert timed(device, lambda: x.zero_()) == pytest.approx(1.0)
    with device:  # its time and its memory go on
        assert device.now_ms() == pytest.approx(2.0)
        assert device.allocated_bytes == 4 * MS + 256
    y = torch.zeros(MS)
    assert y.numel() == MS
    assert device.allocated_bytes == 4 * MS + 256


def test_rates_must_be_positive():
    with pytest.raises(offstage.ConfigError, match=r"found \{'tflops': 0\}"):
        make(tflops=0)
    with pytest.raises(offstage.ConfigError, match="launch_us"):
        make(launch_us=-1.0)
