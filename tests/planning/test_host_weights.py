# SPDX-License-Identifier: Apache-2.0
"""Plans with weights on the host: the layers that `offload()` chooses, the bytes that it moves, and what they cost."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offstage
from offstage.config import OffloadConfig
from offstage.errors import ConfigError, HostMemoryError
from offstage.optimizer.optimizer import runtime_of
from offstage.planning.host_weights import may_leave
from offstage.planning.plan import Plan
from offstage.planning.planner import make_plan
from offstage.planning.predict import Workload
from offstage.planning.sizes import Columns, World, param_sizes
from offstage.weights.choosing import choose_weights
from tests.planning.test_predict import FORWARD_SHARE, RESIDENT_UPDATE_MS, workload_model
from tests.support.machines import GIB, dense, dense_7b, desktop, machine, machines

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "host_weights.jsonl"
MODEL = dense(8, 1024, 4096, 1024, 32_000)
WORK = Workload(forward_ms=20, backward_ms=60)


def host(**more) -> OffloadConfig:
    return OffloadConfig(**{"weights": "host", "master_weights": "split", **more})


# Which weights


class Net(nn.Module):
    """Layers of several sizes; the head is tied, and so is a weight of the second layer to one outside."""

    def __init__(self, layers=5, width=48, dtype=torch.bfloat16):
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 16 * (n + 2)), "down": nn.Linear(16 * (n + 2), width, bias=False)})
            for n in range(layers)
        )
        self.few = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.few[0].weight = self.layers[1]["up"].weight if layers > 1 else self.few[0].weight
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)


@pytest.mark.parametrize("weights", ["host", 0.3, 0.5, 0.99, 138_000, 145_000, 10**9])
@pytest.mark.parametrize("min_bytes", [0, 4000])
def test_the_layers_are_those_that_offload_chooses(weights, min_bytes):
    config, model = host(weights=weights, min_bytes=min_bytes), Net(layers=8)
    chosen = {name for params in choose_weights(model, config).values() for name in params}
    sizes = param_sizes(model, config)
    leaving = may_leave(Columns.of(sizes), config)
    assert {size.name for size, leaves in zip(sizes, leaving, strict=True) if leaves} == chosen


def test_names_and_models_give_the_same_layers():
    model, config = Net(), host()
    by_model = {size.name: size.layer for size in param_sizes(model, config)}
    by_name = {
        size.name: size.layer for size in param_sizes({n: p.numel() for n, p in model.named_parameters()}, config)
    }
    tied = "layers.1.up.weight"  # which plain names do not show
    assert {**by_model, tied: 1} == by_name
    assert by_model[tied] is by_model["embedding.weight"] is by_name["few.0.bias"] is None
    again = [dataclasses.replace(size, layer=None) for size in param_sizes(model, config)]  # as of an optimizer's plan
    assert {size.name: size.layer for size in param_sizes(again, config)} == by_name
    assert all(size.layer is None for size in param_sizes(model, OffloadConfig()))


@pytest.mark.parametrize(
    ("source", "config", "says"),
    [
        ({"embedding": 10**6, "head": 10**6}, host(), "with numbers in their names.*found none"),
        (dense(2, 64, 64, 64, 100), host(), "at least min_bytes=64.0 KiB"),
        (MODEL, host(weights="10MiB"), r"weights=10.0 MiB cannot hold what is not in .*Raise it to"),
    ],
)
def test_no_layers_and_too_little_room_are_refused(source, config, says):
    with pytest.raises(ConfigError, match=says):
        make_plan(source, machine(), config)


def test_ranks_that_divide_the_model_are_refused():
    with pytest.raises(ConfigError, match=r"weights='host' keeps a layer's weights .* expected one rank, found 8"):
        make_plan(MODEL, machine(), host(), world=World(data=8, shard_weights=True))


def test_state_that_stays_keeps_its_weights():
    """A budget that holds all state leaves no weight to move, and the plan says so."""
    plan = make_plan(MODEL, machine(), host(device_budget="8GiB"))
    assert plan.host_weight_bytes == 0
    assert any("moves none" in note for note in plan.notes)
    half = make_plan(MODEL, machine(), host(device_budget="1GiB"))
    everything = make_plan(MODEL, machine(), host())
    assert 0 < half.host_weight_bytes < everything.host_weight_bytes


# Bytes


def test_bytes_per_parameter():
    """12 where gradients are used at once, 14 where they leave, 26 with a second set; embedding and head stay."""
    params = sum(size.numel for size in param_sizes(MODEL) if "layers" in size.name)
    others = 10 * 2 * 32_000 * 1024
    for config, clips, expected in (
        (host(update_in_backward=True), False, 12),
        (host(overlap_forward=True), True, 14),
        (host(), False, 14),
        (host(update_in_backward=True), True, 26),
    ):
        found = make_plan(MODEL, machine(), config, workload=dataclasses.replace(WORK, clips=clips)).prediction
        twice = 1 + (expected == 26) * 1.05  # a quarter of old weights that stay
        assert (found.host_bytes - twice * others) / params == pytest.approx(expected, rel=0.01)
    tight = machine(host_free_bytes=int(14.9 * params) + others)
    found = make_plan(
        MODEL, tight, host(update_in_backward=True), workload=dataclasses.replace(WORK, clips=True)
    ).prediction
    assert (found.host_bytes - others) / params == pytest.approx(14, rel=0.01)  # no second set
    with pytest.raises(HostMemoryError):
        make_plan(MODEL, machine(host_free_bytes=int(11 * params)), host(), workload=WORK)


def test_the_device_holds_a_few_layers():
    model = dense_7b()
    there = make_plan(model, machine(), OffloadConfig(master_weights="split"), workload=WORK)
    plan = make_plan(model, machine(), host(update_in_backward=True), workload=WORK)
    layer = 2 * sum(size.numel for size in param_sizes(model) if size.name.startswith("layers.0."))
    others = 2 * 2 * 32_000 * 4096
    assert plan.host_weight_bytes == pytest.approx(32 * layer, rel=0.01)
    assert plan.device_weight_bytes == pytest.approx(others + 4 * layer, rel=0.01)
    slots = plan.slots * plan.slot_bytes
    assert plan.prediction.device_peak_bytes == pytest.approx(2 * others + 7 * layer + slots, rel=0.2)
    assert plan.prediction.device_peak_bytes < 0.25 * there.prediction.device_peak_bytes
    assert there.host_weight_bytes == there.device_weight_bytes == 0


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mode", ["step", "forward", "backward", "backward and forward"])
@pytest.mark.parametrize("by_cpu", [0.0, 0.5, 1.0])
def test_bytes_are_those_that_move(by_cpu, mode, clips, micro_batches):
    """Against what the receipt of a run counts."""
    flags = {"overlap_forward": "forward" in mode, "update_in_backward": "backward" in mode, "host_fraction": by_cpu}
    config = host(min_bytes=0, chunk_bytes="16KiB", **flags)
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))}).bfloat16()
    model.forward = lambda x: [x := layer(x) for layer in model["layers"]][-1]
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=1e-3), model, config)
    work = Workload(forward_ms=1, backward_ms=3, clips=clips, micro_batches=micro_batches)
    planned = make_plan(list(optimizer.plan.sizes), machine(), config, workload=work)
    for _ in range(4):
        for number in range(micro_batches):
            loss = model(torch.randn(4, 64, dtype=torch.bfloat16)).float().square().mean()
            if number < micro_batches - 1:
                with optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
        if clips:
            optimizer.clip_grad_norm_(1e6)
        optimizer.step()
        optimizer.zero_grad()
    moved = runtime_of(optimizer).last_moved
    assert planned.prediction.bytes_up == moved.up
    assert planned.prediction.bytes_down == moved.down
    held = runtime_of(optimizer)
    receipt = optimizer.receipt()
    host_bytes = receipt.host_state_bytes + receipt.host_weight_bytes + receipt.host_gradient_bytes
    assert planned.prediction.host_bytes == pytest.approx(host_bytes, rel=0.02)
    assert planned.host_weight_bytes == sum(weight.nbytes for weight in held.weights.weights)
    assert planned.device_weight_bytes == receipt.device_weight_bytes
    optimizer.close()


# Times


def test_each_phase_takes_its_compute_or_its_copies():
    """7B on a link of 21 GB/s each way: the arithmetic of docs/internals/planner.md."""
    layers = sum(size.numel for size in param_sizes(dense_7b()) if size.numel > 10**6 and "layers" in size.name)
    others = 2 * 32_000 * 4096
    short, long = Workload(forward_ms=100, backward_ms=300), Workload(forward_ms=9000, backward_ms=27_000)
    in_backward = make_plan(dense_7b(), desktop(), host(update_in_backward=True), workload=short).prediction
    forward = 2 * layers / 25e6
    backward = (12 * layers + 10 * others) / 21e6 / 0.95
    assert in_backward.iteration_ms == pytest.approx(forward + backward, rel=0.02)
    later = make_plan(dense_7b(), desktop(), host(overlap_forward=True), workload=short).prediction
    forward = (12 * layers + 10 * others) / 21e6 + 2 * layers / 25e6
    assert later.iteration_ms == pytest.approx(forward + 2 * layers / 21e6, rel=0.02)  # weights come, gradients leave
    for config in (host(update_in_backward=True), host(overlap_forward=True)):
        hidden = make_plan(dense_7b(), desktop(), config, workload=long).prediction
        assert hidden.exposed_ms < 500
    in_step = make_plan(dense_7b(), desktop(), host(), workload=long).prediction
    assert in_step.exposed_ms == pytest.approx(forward, rel=0.05)


def test_in_backward_is_the_fastest_and_step_the_slowest():
    times = [
        make_plan(dense_7b(), machine(), config, workload=Workload(forward_ms=400, backward_ms=1200)).prediction
        for config in (
            OffloadConfig(master_weights="split", update_in_backward=True, overlap_forward=True),
            host(update_in_backward=True, overlap_forward=True),
            host(update_in_backward=True),
            host(overlap_forward=True),
            host(),
        )
    ]
    assert [one.iteration_ms for one in times] == sorted(one.iteration_ms for one in times)


CONFIGS = st.builds(
    host,
    overlap_forward=st.booleans(),
    update_in_backward=st.booleans(),
    weights=st.sampled_from(["host", 0.2, 0.7]),
)
WORKLOADS = st.builds(
    Workload,
    forward_ms=st.sampled_from([0.0, 5.0, 500.0]),
    backward_ms=st.sampled_from([0.0, 15.0, 1500.0]),
    micro_batches=st.sampled_from([1, 4]),
    clips=st.booleans(),
)


def predicted(simulated, config, work) -> float | None:
    roomy = dataclasses.replace(simulated, device_bytes=192 * GIB, host_free_bytes=2048 * GIB)
    return make_plan(MODEL, roomy, config, workload=work).prediction.exposed_ms


@settings(max_examples=40, deadline=None)
@given(machines(), CONFIGS, WORKLOADS, st.sampled_from([0.1, 0.4, 0.8]))
def test_more_weights_on_the_device_are_never_slower(simulated, config, work, share):
    """But for the layers that are left to the next forward, of which there are fewer then: they may fit there well."""
    fewer = dataclasses.replace(config, weights=share)
    everything = dataclasses.replace(config, weights="host")
    with mock.patch("offstage.planning.host_weights.LEFT_TO_FORWARD", 0.0):
        assert predicted(simulated, fewer, work) <= predicted(simulated, everything, work) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    machines(), CONFIGS, WORKLOADS, st.integers(1, 16), st.sampled_from(["link", "dram_gb_per_s", "device_gb_per_s"])
)
def test_a_better_machine_is_never_slower(simulated, config, work, factor, what):
    names = [f"link_{way}_gb_per_s" for way in ("up", "down", "duplex")] if what == "link" else [what]
    better = dataclasses.replace(simulated, **{name: factor * getattr(simulated, name) for name in names})
    assert predicted(better, config, work) <= predicted(simulated, config, work) * (1 + 1e-9)


# Text and JSON


def test_a_plan_shows_the_weights_and_survives_json():
    plan = make_plan(dense_7b(), desktop(), host(overlap_forward=True), workload=WORK)
    assert "weights         12.1 GiB on the host, at most " in str(plan)
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert (back.host_weight_bytes, back.device_weight_bytes) == (plan.host_weight_bytes, plan.device_weight_bytes)
    assert str(back) == str(plan)
    old = json.loads(make_plan(MODEL, machine(), OffloadConfig(), workload=WORK).to_json())
    for name in ("host_weight_bytes", "device_weight_bytes"):
        del old[name]
    for size in old["sizes"]:
        del size["layer"]
    assert Plan.from_json(json.dumps(old)).host_weight_bytes == 0


def test_a_peak_becomes_a_budget():
    """What resident state leaves of it is kept, with its weights and gradients."""
    work = Workload(forward_ms=550, backward_ms=1650, other_bytes="3GiB", clips=True)
    plans = [
        make_plan(dense_7b(), desktop(), host(overlap_forward=True, device_peak=peak), workload=work)
        for peak in ("8GiB", "12GiB", "20GiB")
    ]
    for plan, peak in zip(plans, (8, 12, 20), strict=True):
        assert 0.9 * peak * GIB < plan.prediction.device_peak_bytes <= peak * GIB
    times = [plan.prediction.iteration_ms for plan in plans]
    assert times == sorted(times, reverse=True)
    with pytest.raises(
        ConfigError, match=r"device_peak of 5.0 GiB expects room for state; found weights of \d\.\d GiB"
    ):
        make_plan(dense_7b(), desktop(), host(device_peak="5GiB"), workload=work)


def test_too_little_device_memory_names_the_remedy():
    with pytest.raises(ConfigError, match=r"weights 762.*keep the layers' weights on the host \(weights='host'\)"):
        make_plan(dense(4, 2048, 8192, 2048, 32_000), machine(device_bytes=GIB))


# Measured

TIMES = ("a", "a_32k", "a_x4", "b", "c", "c_32k", "c_x4", "in_step")
PEAKS = ("a", "a_32k", "b", "c", "c_x4", "in_step")


def measured() -> dict[str, dict]:
    """The newest row of each case."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["case"]: row for row in rows if row.get("size") == "full" and "iteration_ms" in row}


@pytest.mark.parametrize("case", [case for case in TIMES if case in measured()])
def test_what_was_measured_is_predicted(case):
    row = measured()[case]
    batches, more = row["micro_batches"], row["batch"] / 8
    both = (row["resident_ms"] - RESIDENT_UPDATE_MS) / batches
    found = make_plan(
        workload_model(),
        machine(link_duplex_gb_per_s=row["receipt"].get("link_measured_gb_per_s") or 50.0),
        OffloadConfig(**row["config"]),
        workload=Workload(
            forward_ms=FORWARD_SHARE * both,
            backward_ms=(1 - FORWARD_SHARE) * both,
            micro_batches=batches,
            other_bytes=int(more * 1.8 * GIB),
            activation_bytes=int(more * 4.49 * GIB),  # checkpointed, in benchmarks/results/activations.jsonl
            clips=row["clip"] == "optimizer",
        ),
    ).prediction
    assert found.iteration_ms == pytest.approx(row["iteration_ms"], rel=0.15)
    if case in PEAKS:
        assert found.device_peak_bytes == pytest.approx(row["peak_gib"] * GIB, rel=0.05)


# The first iteration


@pytest.mark.parametrize(
    ("config", "work", "keeps"),
    [
        ({"device_budget": "1GiB"}, {}, False),
        ({"update_on": "host"}, {}, True),
        ({"device_budget": "1GiB"}, {"world": World(data=2, shard_weights=True)}, True),
    ],
)
def test_a_note_says_whether_the_first_iteration_is_larger(config, work, keeps):
    """Gradients leave in it; not those that the CPU needs, nor those of shards."""
    plan = make_plan(MODEL, machine(), OffloadConfig(update_in_backward=True, **config), workload=WORK, **work)
    assert any("the first iteration keeps more gradients" in note for note in plan.notes) == keeps
