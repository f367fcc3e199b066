# SPDX-License-Identifier: Apache-2.0
"""One observed iteration: the same bits, every byte with its owner, every lane's work, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import offstage
from offstage.errors import OffstageError
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from offstage.train.memory_by_owner import OWNERS, MemoryByOwner
from offstage.train.observe import Observer
from offstage.train.timeline import DeviceTrace, busy_ms, link_use, merged, spans_of
from tests.support.contract import assert_same_weights
from tests.support.lives import end_step
from tests.support.training import same_bits

CPU = torch.device("cpu")
WIDTH, LAYERS, BATCH, TOKENS = 32, 3, 4, 16
TOKEN_BYTES = 4 * BATCH * TOKENS  # of one feature
CONFIGS: list[dict[str, Any]] = [
    {"fraction": 0.0},
    {},
    {"fraction": 0.5, "window": "16KiB"},
    {"overlap_forward": True, "window": "all"},
    {"host_fraction": 0.5, "threads": 2},
    {"update_in_backward": True},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64)
        self._checkpoints = checkpoints

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpoints else block(x)
        return self.head(x)


class Training:
    """A small real training loop over a fixed corpus: the bytes of this file."""

    def __init__(
        self, config: dict[str, Any] | None = None, *, checkpoints: bool = False, sharded: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model = Model(checkpoints=checkpoints)
        for module in (*self.model.blocks, self.model) if sharded else ():
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        config = {"min_bytes": 0, "chunk_bytes": "16KiB", **(config or {})}
        self.optimizer: OffloadedOptimizer = offstage.offload(adamw, self.model, **config)
        with open(__file__, "rb") as file:
            self._tokens = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long() % 64
        self._at = 0

    def iterate(self, mark: Callable[[str], None] = lambda _: None) -> None:
        size = BATCH * (TOKENS + 1)
        tokens = self._tokens[self._at : self._at + size].view(BATCH, TOKENS + 1)
        self._at += size
        mark("forward")
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        mark("backward")
        loss.backward()
        mark("step")
        end_step(self.optimizer)

    def iterate_times(self, steps: int) -> Training:
        for _ in range(steps):
            self.iterate()
        return self

    def observed(self, steps: int = 3) -> tuple[Observer, dict[str, Any]]:
        self.iterate_times(steps)
        with Observer(self.model, self.optimizer, CPU, step=steps + 1) as observer:
            self.iterate(observer.mark)
        return observer, observer.observed()


def at(observed: dict[str, Any], where: str, owner: str) -> int:
    """The bytes of `owner` at the first moment called `where`."""
    memory = observed["memory"]
    return int(memory["bytes"][owner][memory["where"].index(where)])


# Bits


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_an_observed_iteration_computes_the_same_bits(config):
    plain, looked_at = Training(config), Training(config)
    plain.iterate_times(6)
    looked_at.observed()
    looked_at.iterate_times(2)
    for training in (plain, looked_at):
        training.optimizer.synchronize()
    assert_same_weights(plain.model, looked_at.model)


# Memory


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_byte_has_its_owner(config):
    training = Training(config)
    _, observed = training.observed()
    nbytes = sum(param.nbytes for param in training.model.parameters())
    assert observed["notes"] == []
    assert set(observed["memory"]["bytes"]) == set(OWNERS)
    assert set(observed["memory"]["bytes"]["weights"]) == {nbytes}
    plan = training.optimizer.plan
    resident = plan.bytes_of(offstage.config.Placement.RESIDENT)
    assert at(observed, "begin", "state") == resident
    assert at(observed, "begin", "slots") == plan.slots * plan.slot_bytes
    if config.get("update_in_backward"):  # taken as they come
        assert at(observed, "step", "gradients") < nbytes
    else:
        assert at(observed, "step", "gradients") == nbytes
    window = {"16KiB": plan.slot_bytes, "all": observed["memory"]["bytes"]["window"][-1]}.get(config.get("window"), 0)
    assert at(observed, "step", "window") == window
    assert bool(window) == ("window" in config)


def test_activations_are_what_backward_needs():
    _, observed = Training().observed()
    embedded, of_block = WIDTH * TOKEN_BYTES, 5 * WIDTH * TOKEN_BYTES  # what relu and the block have put out
    for layer in range(LAYERS):
        assert at(observed, f"layer {layer} forward", "activations") == embedded + layer * of_block
        assert at(observed, f"layer {layer} forward ends", "activations") == embedded + (layer + 1) * of_block
        # And gradients that travel: along the residual and through the block.
        left = at(observed, f"layer {layer} backward", "activations") - embedded - (layer + 1) * of_block
        assert 0 <= left < 3 * WIDTH * TOKEN_BYTES
    assert at(observed, "backward", "activations") > at(observed, "layer 2 forward ends", "activations")
    assert at(observed, "end", "activations") == 0


def test_checkpoints_show_what_is_made_again():
    _, plain = Training().observed()
    _, observed = Training(checkpoints=True).observed()
    assert at(observed, "backward", "activations") < 0.5 * at(plain, "backward", "activations")
    where, sizes = observed["memory"]["where"], observed["memory"]["bytes"]["activations"]
    again = [i for i, name in enumerate(where) if name == "layer 1 forward ends"]
    assert len(again) == 2  # in forward, and in backward
    reached = where.index("layer 1 backward")
    assert sizes[again[1]] >= sizes[reached] + 4 * WIDTH * TOKEN_BYTES


def test_late_updates_keep_gradients_and_window_into_the_next_forward():
    _, observed = Training({"overlap_forward": True, "window": "all"}).observed()
    for owner in ("gradients", "window"):
        found = [at(observed, f"layer {layer} forward ends", owner) for layer in range(LAYERS)]
        assert at(observed, "begin", owner) > found[0] > found[1] > found[2] > 0


def _sharded(observing_rank: int) -> tuple[dict[str, Any] | None, list[torch.Tensor], int]:
    """What the observing rank has seen, everybody's weights, and the bytes of a whole layer. Runs on a rank."""
    training = Training(sharded=True)
    seen = None
    if dist.get_rank() == observing_rank:
        _, seen = training.observed()
    else:
        training.iterate_times(4)
    layer = sum(param.numel() * param.itemsize for param in training.model.blocks[0].parameters())
    return seen, [param.full_tensor().detach() for param in training.model.parameters()], layer


def test_shards_and_gathered_weights_on_one_observing_rank(ranks):
    (seen, looked_at, layer), (nothing, others, _) = ranks.run(2, _sharded, 0)
    (_, plain, _), _ = ranks.run(2, _sharded, 2)
    assert nothing is None
    assert seen["notes"] == []
    assert all(same_bits(a, b) and same_bits(a, c) for a, b, c in zip(plain, looked_at, others, strict=True))
    shards = at(seen, "begin", "weights")
    whole = sum(weight.nbytes for weight in plain)
    assert whole / 2 <= shards <= whole / 2 + 4096
    assert at(seen, "layer 1 forward", "weights") >= shards + layer
    assert at(seen, "step", "weights") == shards
    assert at(seen, "step", "gradients") == shards


def test_a_plain_torch_optimizer_is_observed_too():
    training = Training()
    model = training.model
    plain = torch.optim.AdamW(model.parameters())
    training.optimizer = plain  # type: ignore[assignment]
    _, observed = training.observed()
    params = list(model.parameters())
    assert at(observed, "end", "state") == sum(2 * param.nbytes for param in params) + 4 * len(params)  # and its steps
    assert set(observed["lanes"]) == {"model"}


# Lanes


def test_lanes_carry_what_the_receipt_counts():
    training = Training({"host_fraction": 0.4, "threads": 2})
    _, observed = training.observed()
    receipt, lanes = training.optimizer.receipt(), observed["lanes"]
    assert set(lanes) == {"model", "fetch", "update", "store", "lower", "host", "raise"}
    carried = {lane: sum(span[2] for span in spans) for lane, spans in lanes.items()}
    assert carried["fetch"] + carried["raise"] == receipt.bytes_fetched
    assert carried["store"] + carried["lower"] == receipt.bytes_stored
    assert sum(observed["link"]["up_bytes"]) == pytest.approx(
        receipt.bytes_fetched, abs=len(observed["link"]["up_bytes"])
    )
    assert sum(observed["link"]["down_bytes"]) == pytest.approx(receipt.bytes_stored, abs=200)
    start, stop = next((p["start_ms"], p["stop_ms"]) for p in observed["phases"] if p["name"] == "step")
    assert all(start <= span[0] <= span[1] <= stop for lane in ("fetch", "store", "host") for span in lanes[lane])


@pytest.mark.parametrize("config", CONFIGS[1:], ids=str)
def test_lanes_are_busy_for_as_long_as_the_receipt_says(config):
    training = Training(config)
    _, observed = training.observed()
    receipt = training.optimizer.receipt()
    busy = {lane: ms for lane, ms in observed["busy_ms"].items() if lane != "model"}
    assert busy == pytest.approx({lane: ms for lane, ms in receipt.lane_ms.items() if ms}, abs=1e-3)


def test_updates_in_backward_are_seen_there():
    training = Training({"update_in_backward": True})
    _, observed = training.observed()
    start, stop = next((p["start_ms"], p["stop_ms"]) for p in observed["phases"] if p["name"] == "backward")
    early = [span for span in observed["lanes"]["fetch"] if start <= span[0] and span[1] <= stop]
    assert early
    model = observed["lanes"]["model"]
    assert len(model) > len(early) / 2  # the thread that computes the model does it in between
    busy = [span for lane, spans in observed["lanes"].items() if lane != "model" for span in spans]
    assert not any(a[0] < b[1] and b[0] < a[1] for a in model for b in busy if min(a[1], b[1]) - max(a[0], b[0]) > 1e-3)


def test_phases_follow_each_other_to_the_end():
    _, observed = Training().observed()
    phases = observed["phases"]
    assert [one["name"] for one in phases] == ["forward", "backward", "step"]
    assert all(a["stop_ms"] == b["start_ms"] for a, b in pairwise(phases))
    assert phases[-1]["stop_ms"] == observed["end_ms"]
    assert observed["step"] == 4


def test_an_observer_that_is_kept_open_ends_with_the_next_forward():
    training = Training({"overlap_forward": True}).iterate_times(3)
    observer = Observer(training.model, training.optimizer, CPU).__enter__()
    training.iterate(observer.mark)
    training.iterate(observer.mark)
    assert_nothing_left(training)
    seen = len(observer.observed()["memory"]["where"])
    observer.__exit__(None, None, None)
    observed = observer.observed()
    assert [one["name"] for one in observed["phases"]] == ["forward", "backward", "step", "forward"]
    assert len(observed["memory"]["where"]) == seen


def test_an_iteration_without_marks_is_seen_too():
    training = Training().iterate_times(3)
    with Observer(training.model, training.optimizer, CPU) as observer:
        training.iterate()
    observed = observer.observed()
    assert observed["phases"] == []
    assert "layer 2 backward" in observed["memory"]["where"]
    assert observed["lanes"]["fetch"]


def test_cpu_use_covers_the_iteration():
    _, observed = Training().observed()
    cpu = observed["cpu"]
    assert len(cpu["ms"]) == len(cpu["cores"]) + 1
    assert cpu["ms"] == sorted(cpu["ms"])
    assert cpu["ms"][-1] >= observed["end_ms"]
    assert cpu["available"] >= 1


# Nothing left, nothing broken


def assert_nothing_left(training: Training) -> None:
    for block in training.model.blocks:
        assert not block._forward_hooks
        assert not block._forward_pre_hooks or training.optimizer.config.overlaps
    for engine in runtime_of(training.optimizer).engines:
        assert "empty" not in vars(engine.transport.lanes)
        assert len(engine.transport.lanes.logs) == 1  # of the optimizer's own timer
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not training.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("config", [{}, {"overlap_forward": True, "window": "all"}], ids=str)
def test_nothing_is_left_behind(config):
    training = Training(config)
    training.observed()
    assert_nothing_left(training)


def test_an_iteration_that_fails_leaves_nothing_behind():
    training = Training()
    observer = Observer(training.model, training.optimizer, CPU)
    with pytest.raises(IndexError), observer:
        training.model(torch.full((1, 1), 64))  # there are 64 words
    assert_nothing_left(training)


def test_a_failure_in_looking_is_told_and_training_goes_on(monkeypatch, caplog):
    plain, training = Training().iterate_times(4), Training()
    calls = []

    def fails(self: MemoryByOwner) -> dict[str, dict[int, int]]:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("the driver is gone")
        return {"weights": {}, "gradients": {}, "state": {}}

    monkeypatch.setattr(MemoryByOwner, "owned", fails)
    with caplog.at_level(logging.WARNING, "offstage"):
        _, observed = training.observed()
    assert_same_weights(plain.model, training.model)
    assert len(observed["memory"]["where"]) == 3
    assert [note for note in observed["notes"] if "the driver is gone" in note]
    assert len([record for record in caplog.records if "the driver is gone" in record.getMessage()]) == 1
    assert observed["lanes"]["fetch"]


def test_what_is_saved_is_what_was_seen(tmp_path):
    observer, observed = Training().observed()
    observer.save(tmp_path / "observed.json")
    assert json.loads((tmp_path / "observed.json").read_text()) == json.loads(json.dumps(observed))
    assert [path.name for path in tmp_path.iterdir()] == ["observed.json"]


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    observer, _ = Training().observed()
    with caplog.at_level(logging.WARNING, "offstage"):
        observer.save(tmp_path / "no such folder" / "observed.json")
    assert "observed.json could not be written" in caplog.text


def test_a_clock_that_fails_ends_no_run(monkeypatch, tmp_path):
    plain, training = Training().iterate_times(4), Training()

    def fails(self: object) -> float:
        raise RuntimeError("no events here")

    monkeypatch.setattr("offstage.train.observe._Clock.stamp", fails)
    observer, observed = training.observed()
    assert any("no events here" in note for note in observed["notes"])
    observer.save(tmp_path / "observed.json")
    assert_nothing_left(training)
    assert_same_weights(plain.model, training.model)


def test_saving_before_the_end_is_refused(tmp_path):
    training = Training()
    observer = Observer(training.model, training.optimizer, CPU)
    with pytest.raises(OffstageError, match="Leave the context first"), observer:
        observer.save(tmp_path / "observed.json")
    assert not list(tmp_path.iterdir())


def test_layers_compiled_in_place_are_looked_at_and_given_back():
    plain, training = Training(), Training()
    for training_ in (plain, training):
        for block in training_.model.blocks:
            block.compile(backend="eager")
    calls = [block._compiled_call_impl for block in training.model.blocks]
    plain.iterate_times(4)
    _, observed = training.observed()
    assert [block._compiled_call_impl for block in training.model.blocks] == calls
    assert "layer 1 backward" in observed["memory"]["where"]
    assert "activations" not in observed["memory"]["bytes"]
    assert any("compiled" in note for note in observed["notes"])
    assert_same_weights(plain.model, training.model)


def test_a_model_compiled_as_a_whole_is_looked_at_from_outside():
    training = Training()
    training.model.compile(backend="eager")
    _, observed = training.observed()
    assert observed["memory"]["where"][:3] == ["begin", "forward", "backward"]
    assert at(observed, "step", "gradients") > 0
    assert_nothing_left(training)


# The profiler's trace


def test_the_profiler_writes_what_is_read():
    """On this machine there is no device work in it; the beginning, by the profiler's own clock, is."""
    trace = DeviceTrace(CPU)
    trace.start()
    trace.begin()
    torch.ones(8).sum()
    trace.stop()
    assert trace.spans() == {}


def _kernel(name: str, stream: int, ts: float, dur: float, correlation: int, **args: Any) -> dict[str, Any]:
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    arguments = {"stream": stream, "correlation": correlation, **args}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": stream, "args": arguments}


def _launch(thread: int, ts: float, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": ts,
        "dur": 1,
        "tid": thread,
        "args": args,
    }


def _span(name: str, thread: int, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "tid": thread, "args": {}}


def test_work_belongs_to_the_lane_whose_stream_it_ran_on():
    """The fields are those of a trace of a CUDA device; a lane's two streams take turns (accelerator_lanes.py)."""
    events = [
        _span("offstage observes", 1, 1000.0, 2.0),
        _span("offstage: fetch", 1, 1010.0, 10.0),
        _launch(1, 1012.0, 1),
        _kernel("Memcpy HtoD (Pinned -> Device)", 20, 1100.0, 50.0, 1, bytes=500),
        _launch(1, 1018.0, 2),
        _kernel("Memcpy HtoD (Pinned -> Device)", 21, 1150.0, 50.0, 2, bytes=600),
        _launch(9, 1300.0, 3),  # another thread, in no span
        _kernel("Memcpy HtoD (Pinned -> Device)", 21, 1320.0, 30.0, 3, bytes=700),
        _span("offstage: raise", 1, 1400.0, 10.0),
        _launch(1, 1402.0, 4),
        _kernel("Memcpy HtoD (Pinned -> Device)", 22, 1410.0, 10.0, 4, bytes=80),
        _launch(1, 1500.0, 5),
        _kernel("adamw_kernel", 23, 1510.0, 40.0, 5),
        _launch(1, 1600.0, 6),
        _kernel("gemm", 7, 1600.0, 900.0, 6),
        _launch(1, 1610.0, 7),
        _kernel("Memcpy HtoD (Pageable -> Device)", 7, 2600.0, 5.0, 7, bytes=8),  # the batch
        _launch(1, 1700.0, 8),
        _kernel("ncclDevKernel_AllGather_RING_LL", 30, 1700.0, 9000.0, 8),
        _launch(9, 1800.0, 9),
        _kernel("Memcpy DtoH (Device -> Pinned)", 24, 1800.0, 20.0, 9, bytes=900),
        _kernel("chunk_cat", 31, 1900.0, 20.0, 10),
    ]
    found = spans_of(events)
    assert {lane: len(spans) for lane, spans in found.items()} == {
        "fetch": 3,
        "raise": 1,
        "update": 1,
        "model": 2,
        "collectives": 1,
        "store": 1,
        "other streams": 1,
    }
    assert found["fetch"] == [(0.1, pytest.approx(0.15), 500), (0.15, pytest.approx(0.2), 600), (0.32, 0.35, 700)]
    use = link_use(found, 10.0, num_bins=10)
    assert sum(use["up_bytes"]) == 500 + 600 + 700 + 80
    assert use["down_bytes"] == [900, *[0] * 9]


def test_merging_closes_the_shortest_gaps_and_keeps_bytes():
    spans = [(float(i), i + 0.5 + 0.01 * i, 10) for i in range(40)]
    found = merged(spans, 8)
    assert len(found) == 8
    assert sum(span[2] for span in found) == 400
    assert found[0][0] == 0.0
    assert found[-1][1] == spans[-1][1]
    assert found[0] == (0.0, 0.5, 10)  # the longest gaps are the first ones
    assert merged([], 8) == []
    overlapping = [(0.0, 5.0, 1), (1.0, 2.0, 1), (4.0, 6.0, 1)]
    assert merged(overlapping) == [(0.0, 6.0, 3)]
    assert busy_ms(overlapping) == 6.0
    assert busy_ms(spans) == pytest.approx(sum(stop - start for start, stop, _ in spans))


def test_the_observer_says_what_is_missing_without_a_profiler(monkeypatch, caplog):
    """The way of an accelerator, as far as it can be walked without one: a profiler that fails is told, not raised."""
    import offstage.train.observe as module

    training = Training().iterate_times(3)
    observer = Observer(training.model, training.optimizer, CPU)
    observer._on_host, observer._allocations = False, None

    class Broken:
        def __init__(self, device: torch.device) -> None:
            raise RuntimeError("CUPTI is in use by another process")

    monkeypatch.setattr(module, "DeviceTrace", Broken)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device=None: 10**6)
    with caplog.at_level(logging.WARNING, "offstage"), contextlib.ExitStack() as stack:
        stack.enter_context(observer)
        training.iterate(observer.mark)
    observed = observer.observed()
    assert any("CUPTI is in use" in note for note in observed["notes"])
    assert any("CUPTI is in use" in record.getMessage() for record in caplog.records)
    sums = [sum(sizes) for sizes in zip(*observed["memory"]["bytes"].values(), strict=True)]
    assert set(sums) == {10**6}  # all that the allocator has given out has an owner
