# SPDX-License-Identifier: Apache-2.0
"""`make_plan`: from models, state dicts and numbers; on simulated machines; for one rank of many; as text and JSON."""

import dataclasses
import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import offstage
from offstage.config import OffloadConfig, Placement
from offstage.errors import ConfigError, HostMemoryError
from offstage.planning.plan import Plan, plan_placements
from offstage.planning.planner import choose_host_fraction, make_plan
from offstage.planning.predict import CHOSEN, Workload
from offstage.planning.sizes import ParamSize, World, param_sizes
from tests.support.machines import GIB, dense, dense_7b, dense_70b, desktop, machine, machines, mixture_671b, node

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "planning.md", DOCS / "internals" / "planner.md"]
MODEL = dense(4, 2048, 8192, 2048, 32_000)  # 0.4 billion parameters
AUTO = OffloadConfig(update_on="auto")


# What a plan can be made of


def small_model(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 300), nn.Linear(300, 100)).bfloat16()


@pytest.mark.parametrize("masters", ["auto", "split", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_are_those_of_the_optimizer(masters, dtype):
    config = OffloadConfig(master_weights=masters, state_dtype=dtype, min_bytes=0)
    model = small_model()
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, config)
    assert tuple(param_sizes(model, config)) == optimizer.plan.sizes


def test_a_model_a_state_dict_and_numbers_give_one_plan():
    model, config = small_model("meta"), OffloadConfig(min_bytes=0)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    numbers = {name: param.numel() for name, param in model.named_parameters()}
    plans = [
        make_plan(source, machine(), config)
        for source in (model, model.state_dict(), shapes, numbers, param_sizes(model, config))
    ]
    assert all(plan == plans[0] for plan in plans)


def test_only_trained_parameters_have_state():
    model = small_model("meta")
    model[0].weight.requires_grad_(False)
    frozen = param_sizes(model)[0]
    assert (frozen.state_bytes, frozen.weight_bytes) == (0, 100 * 64 * 2)
    plan = make_plan(model, machine(), OffloadConfig(min_bytes=0))
    trained = 2 * sum(param.numel() for param in model.parameters() if param.requires_grad)
    other = plan.prediction.device_peak_bytes - plan.prediction.device_state_bytes
    assert other == frozen.weight_bytes + 2 * trained  # weights and gradients


def test_tied_weights_and_counters_in_a_state_dict():
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100, bias=False), nn.BatchNorm1d(100))
    model[1].weight = model[0].weight
    names = [size.name for size in param_sizes(model.state_dict())]
    assert "1.weight" not in names
    assert "2.num_batches_tracked" not in names


def test_experts_are_found_by_name():
    sizes = param_sizes({"layers.3.mlp.experts.up": 100, "layers.3.mlp.shared_experts.up": 100, "experts": 5})
    assert [size.expert for size in sizes] == [True, False, True]
    assert param_sizes({"moe.w1": 100}, experts=r"^moe\.")[0].expert


@pytest.mark.parametrize("source", [{"weight": "large"}, {"weight": (4, -1)}, {"weight": True}, [1, 2]])
def test_sources_that_are_none(source):
    with pytest.raises(ConfigError, match="expects"):
        make_plan(source, machine())


def test_one_plan_is_for_one_device():
    sizes = param_sizes(MODEL)
    with pytest.raises(ConfigError, match="one device"):
        make_plan([*sizes, dataclasses.replace(sizes[0], device="cuda:1")], machine())


# What is chosen


def test_the_configuration_is_followed():
    for config, share in (
        (OffloadConfig(), 0.0),
        (OffloadConfig(update_on="host"), 1.0),
        (OffloadConfig(host_fraction=0.5), 0.5),
    ):
        plan = make_plan(MODEL, machine(), config)
        assert plan == plan_placements(param_sizes(MODEL), config)
        assert plan.host_share == pytest.approx(share, abs=0.09)  # to within the largest parameter
        assert plan.candidates[0].host_fraction == share


def test_the_planner_finds_the_best_share():
    work = Workload(forward_ms=1.0)
    plan = make_plan(MODEL, machine(), AUTO, workload=work)
    times = {
        share: make_plan(MODEL, machine(), OffloadConfig(host_fraction=share), workload=work).prediction.exposed_ms
        for share in (i / 20 for i in range(21))
    }
    assert plan.prediction.exposed_ms <= min(times.values())
    assert 0.1 < plan.host_share < 0.5


@pytest.mark.parametrize("link", [50.0, 40.0, 30.0, 25.0, 12.0, 6.0])
def test_in_a_loop_that_is_not_known_the_cpu_takes_part_only_where_it_gains_a_quarter(link):
    there = machine(link_up_gb_per_s=link, link_down_gb_per_s=link, link_duplex_gb_per_s=link)
    fastest = make_plan(MODEL, there, AUTO, workload=Workload(forward_ms=1.0))
    streaming = make_plan(MODEL, there, OffloadConfig(host_fraction=0.0))
    gains = fastest.prediction.exposed_ms < 0.75 * streaming.prediction.exposed_ms
    assert gains == (link < 45)
    expected = fastest if gains else streaming
    assert make_plan(MODEL, there, AUTO).placements == expected.placements
    share = choose_host_fraction(param_sizes(MODEL), there, AUTO)
    assert plan_placements(param_sizes(MODEL), OffloadConfig(host_fraction=share)) == expected


def test_a_slow_cpu_is_left_out_and_a_slow_link_gives_it_all():
    weak = machine(host_update_gb_per_s={1: 1.0}, threads=1, dram_gb_per_s=400.0)
    assert choose_host_fraction(param_sizes(MODEL), weak, AUTO) < 0.05
    far = machine(link_up_gb_per_s=1.0, link_down_gb_per_s=1.0, link_duplex_gb_per_s=0.9)
    assert choose_host_fraction(param_sizes(MODEL), far, AUTO) == 1.0


def test_updates_that_are_hidden_stay_on_the_device():
    work = Workload(forward_ms=1000, backward_ms=3000)
    plan = make_plan(MODEL, machine(), dataclasses.replace(AUTO, overlap_forward=True), workload=work)
    assert Placement.HOST not in plan.placements


def test_without_slots_the_budget_is_all_resident():
    config = OffloadConfig(update_on="host", device_budget="1GiB")
    plan = make_plan(MODEL, machine(), config)
    assert plan.slots == 0
    assert plan.device_bytes > GIB - 64 * 2**20  # a parameter of room is left at most
    assert (
        make_plan(MODEL, machine(), OffloadConfig(device_budget="1GiB")).bytes_of(Placement.RESIDENT)
        < GIB - 192 * 2**20
    )


def test_a_budget_without_room_for_slots_is_the_cpus():
    tight = dataclasses.replace(AUTO, device_budget="100MiB")
    assert make_plan(MODEL, machine(), tight).host_share == 1.0
    with pytest.raises(ConfigError, match="Raise it to"):
        make_plan(MODEL, machine(), OffloadConfig(device_budget="100MiB"))


def test_every_candidate_has_a_verdict():
    work = Workload(forward_ms=20, backward_ms=60)
    plan = make_plan(MODEL, machine(), OffloadConfig(device_budget="2GiB"), workload=work)
    verdicts = [one.verdict for one in plan.candidates]
    assert verdicts.count(CHOSEN) == 1
    assert all(verdicts)
    assert any("needs overlap_forward=True" in verdict for verdict in verdicts)
    assert any("needs update_on='auto'" in verdict for verdict in verdicts)
    assert any("over device_budget" in verdict for verdict in verdicts)
    assert all(one.prediction.iteration_ms == pytest.approx(80 + one.prediction.exposed_ms) for one in plan.candidates)


def test_a_share_that_fits_the_device_is_chosen():
    """Gradients that wait for step() take memory, and a faster share leaves fewer of them."""
    work = Workload(backward_ms=60)
    both = OffloadConfig(update_in_backward=True, overlap_forward=True, update_on="auto", chunk_bytes="32MiB")
    host = dataclasses.replace(both, update_on="host")
    peak = {
        config.update_on: make_plan(MODEL, machine(), config, workload=work).prediction.device_peak_bytes
        for config in (both, host)
    }
    assert peak["auto"] < peak["host"]
    tight = machine(device_bytes=(peak["auto"] + peak["host"]) // 2)
    plan = make_plan(MODEL, tight, both, workload=work)
    assert any(one.verdict.endswith("over device memory") for one in plan.candidates)
    with pytest.raises(ConfigError, match="cannot hold"):
        make_plan(MODEL, tight, host, workload=work)


def test_gradients_wait_for_step_only_where_forward_waits_for_the_weights():
    """Otherwise every update begins in backward, and only what is in flight is there."""
    work = Workload(backward_ms=60, forward_ms=30)
    config = OffloadConfig(update_in_backward=True, update_on="host", chunk_bytes="4MiB")
    waits = make_plan(MODEL, machine(), config, workload=work).prediction
    later = make_plan(MODEL, machine(), dataclasses.replace(config, overlap_forward=True), workload=work).prediction
    assert waits.device_peak_bytes < later.device_peak_bytes


def test_speculation_needs_a_second_set_and_does_without():
    config = OffloadConfig(update_in_backward=True, overlap_forward=True)
    work = Workload(forward_ms=30, backward_ms=90, clips=True)
    once = make_plan(MODEL, machine(), OffloadConfig(overlap_forward=True), workload=work).prediction
    twice = make_plan(MODEL, machine(), config, workload=work).prediction
    assert twice.host_bytes > 2 * once.host_bytes
    assert twice.exposed_ms < once.exposed_ms
    tight = make_plan(MODEL, machine(host_free_bytes=int(1.5 * once.host_bytes)), config, workload=work).prediction
    assert (tight.host_bytes, tight.exposed_ms) == (once.host_bytes, once.exposed_ms)


# What is refused


def test_too_little_host_memory_is_refused_with_numbers():
    with pytest.raises(HostMemoryError, match=r"needs 4\.\d GiB .* 2\.0 GiB free.*device_budget of") as refused:
        make_plan(MODEL, machine(host_free_bytes=2 * GIB))
    budget = re.search(r"device_budget of ([\d.]+ GiB)", str(refused.value))[1]
    larger = f"{float(budget.split()[0]) + 0.3}GiB"  # slots, and a parameter that does not fit
    make_plan(MODEL, machine(host_free_bytes=2 * GIB), OffloadConfig(device_budget=larger))
    with pytest.raises(HostMemoryError, match=r"host_budget=1\.0 GiB"):
        make_plan(MODEL, machine(), OffloadConfig(host_budget="1GiB"))
    with pytest.raises(HostMemoryError, match="for 8 ranks"):
        make_plan(MODEL, machine(host_free_bytes=16 * GIB, ranks_on_host=8))


def test_too_little_device_memory_is_refused_with_numbers():
    with pytest.raises(ConfigError, match=r"peak of 1\.7 GiB, of which weights 762\.0 MiB.*divide the model among"):
        make_plan(MODEL, machine(device_bytes=GIB))
    with pytest.raises(ConfigError, match="lower device_budget to 3"):
        make_plan(MODEL, machine(device_bytes=5 * GIB), OffloadConfig(device_budget="4GiB"))


# Simulated machines

BUDGETS = st.integers(1, 40).map(lambda tenths: tenths * GIB // 10)
CONFIGS = st.builds(
    OffloadConfig,
    update_on=st.sampled_from(["auto", "auto", "device", "host"]),
    overlap_forward=st.booleans(),
    update_in_backward=st.booleans(),
    chunk_bytes=st.sampled_from(["4MiB", "64MiB"]),
    min_bytes=st.sampled_from([0, "64KiB"]),
)
WORKLOADS = st.none() | st.builds(
    Workload,
    forward_ms=st.sampled_from([0.0, 5.0, 50.0]),
    backward_ms=st.sampled_from([0.0, 10.0, 200.0]),
    micro_batches=st.sampled_from([1, 4]),
    clips=st.booleans(),
)
NUMBERS = st.lists(st.integers(1, 60_000_000), min_size=1, max_size=12)


def exposed_or_none(sizes, simulated, config, workload) -> float | None:
    try:
        return make_plan(sizes, simulated, config, workload=workload).prediction.exposed_ms
    except (ConfigError, HostMemoryError):
        return None


@settings(max_examples=60, deadline=None)
@given(NUMBERS, machines(), CONFIGS, WORKLOADS, BUDGETS, BUDGETS)
def test_more_budget_never_predicts_slower(numbers, simulated, config, workload, one, other):
    sizes = {f"layers.{i}.weight": number for i, number in enumerate(numbers)}
    roomy = dataclasses.replace(simulated, device_bytes=192 * GIB)  # what is planned, not what is refused
    less, more = sorted((one, other))
    before = exposed_or_none(sizes, roomy, dataclasses.replace(config, device_budget=less), workload)
    assume(before is not None)
    after = exposed_or_none(sizes, roomy, dataclasses.replace(config, device_budget=more), workload)
    assert after is not None
    assert after <= before * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    NUMBERS,
    machines(),
    CONFIGS,
    WORKLOADS,
    st.sampled_from(["link", "dram_gb_per_s", "cores", "host_free_bytes"]),
    st.integers(1, 16),
)
def test_a_better_machine_never_predicts_slower(numbers, simulated, config, workload, what, factor):
    sizes = {f"layers.{i}.weight": number for i, number in enumerate(numbers)}
    if what == "link":
        fields = [f"link_{way}_gb_per_s" for way in ("up", "down", "duplex")]
        better = dataclasses.replace(simulated, **{field: factor * getattr(simulated, field) for field in fields})
    elif what == "cores":
        rates = {factor * count: factor * rate for count, rate in simulated.host_update_gb_per_s.items()}
        better = dataclasses.replace(
            simulated, threads=factor * simulated.threads, host_update_gb_per_s=simulated.host_update_gb_per_s | rates
        )
    else:
        better = dataclasses.replace(simulated, **{what: factor * getattr(simulated, what)})
    before = exposed_or_none(sizes, simulated, config, workload)
    assume(before is not None)
    assert exposed_or_none(sizes, better, config, workload) <= before * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(NUMBERS, machines(), CONFIGS, WORKLOADS, BUDGETS)
def test_plans_keep_their_word(numbers, simulated, config, workload, budget):
    """The same answer every time; budgets kept; bytes as placed; nothing slower was chosen."""
    sizes = {f"layers.{i}.weight": number for i, number in enumerate(numbers)}
    config = dataclasses.replace(config, device_budget=budget)
    try:
        plan = make_plan(sizes, simulated, config, workload=workload)
    except (ConfigError, HostMemoryError) as error:
        with pytest.raises(type(error), match=re.escape(str(error)[:60])):
            make_plan(sizes, simulated, config, workload=workload)
        return
    again = make_plan(sizes, simulated, config, workload=workload)
    assert (plan, plan.prediction, plan.candidates) == (again, again.prediction, again.candidates)
    assert plan.prediction.device_state_bytes == plan.device_bytes <= budget
    if not (workload and workload.clips):
        assert plan.prediction.host_bytes == plan.host_bytes
    assert plan.prediction.host_bytes <= simulated.host_free_bytes // simulated.ranks_on_host
    assert plan.prediction.device_peak_bytes <= simulated.device_bytes
    for one in plan.candidates:
        if one.verdict in ("slower", "no faster"):
            assert one.prediction.exposed_ms >= plan.prediction.exposed_ms
        if one.verdict == "gains less than a quarter":
            assert workload is None
            assert one.prediction.exposed_ms >= 0.75 * plan.prediction.exposed_ms


# Many ranks


def rank_bytes(sizes, world: World) -> tuple[int, int]:
    share = world.share_of(param_sizes(sizes))
    return sum(size.state_bytes for size in share.sizes), share.weight_bytes


def test_state_is_divided_among_all_ranks_and_weights_among_some():
    state, weights = rank_bytes(MODEL, World())
    for world, parts in (
        (World(data=8, tensor=4), (32, 4)),
        (World(data=8, shard_weights=True), (8, 8)),
        (World(data=8, shard_state=False), (1, 1)),
        (World(tensor=4), (4, 4)),
    ):
        here = rank_bytes(MODEL, world)
        assert here == (pytest.approx(state / parts[0], rel=1e-3), pytest.approx(weights / parts[1], rel=1e-3))


def test_experts_are_divided_by_experts():
    sizes = {"layers.0.experts.up": 64_000_000, "layers.0.attention": 64_000_000}
    _, weights = rank_bytes(sizes, World(data=16, tensor=2, expert=8))
    assert weights == 2 * (64_000_000 // 8 + 64_000_000 // 2)
    state, _ = rank_bytes(sizes, World(data=16, tensor=2, expert=8))
    assert state == 12 * 128_000_000 // 32


def test_a_stage_is_consecutive_layers():
    share = World(pipeline=3).share_of(param_sizes(dense(7, 64, 128, 64, 100)))
    assert share.stage == "layers 0 to 2"  # three layers and the embedding
    assert {size.name.split(".")[1] for size in share.sizes if "." in size.name} == {"0", "1", "2"}
    last = World(pipeline=3).share_of(param_sizes(dense(7, 64, 128, 64, 100_000) | {"embedding": 100}))
    assert {size.name for size in last.sizes} >= {"head", "norm", "layers.6.mlp.up"}
    with pytest.raises(ConfigError, match="pipeline=9"):
        World(pipeline=9).share_of(param_sizes(MODEL))


@pytest.mark.parametrize(
    "fields", [{"data": 0}, {"data": 4, "expert": 3}, {"tensor": True}, {"shard_state": False, "shard_weights": True}]
)
def test_worlds_that_cannot_be(fields):
    with pytest.raises(ConfigError):
        World(**fields)


def test_ranks_on_one_host_slow_each_other():
    alone = make_plan(MODEL, node(), world=World(data=8, ranks_per_host=1))
    together = make_plan(MODEL, node(), world=World(data=8, ranks_per_host=8))
    assert together.prediction.exposed_ms > 1.3 * alone.prediction.exposed_ms
    assert any("8 ranks share a host" in note for note in together.notes)


def test_only_experts_with_gradients_move():
    sizes = {"layers.0.experts.up": 90_000_000, "layers.0.attention": 10_000_000}
    every = make_plan(sizes, machine(), workload=Workload()).prediction
    few = make_plan(sizes, machine(), workload=Workload(active_experts=0.5)).prediction
    assert few.bytes_up == every.bytes_up - 12 * 45_000_000
    assert few.exposed_ms == pytest.approx(0.55 * every.exposed_ms, rel=0.05)
    assert few.host_bytes == every.host_bytes


# Text and JSON


def test_a_plan_survives_json():
    plan = make_plan(dense_7b(), machine(), AUTO, workload=Workload(forward_ms=100, backward_ms=300))
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert (back.prediction, back.candidates, back.notes) == (plan.prediction, plan.candidates, plan.notes)
    assert str(back) == str(plan)
    plain = plan_placements([ParamSize("p", "cpu", 100_000, 100_096, True)], OffloadConfig())
    assert Plan.from_json(plain.to_json()) == plain
    with pytest.raises(ConfigError, match="to_json"):
        Plan.from_json("{}")


def plan_7b() -> Plan:
    config = OffloadConfig(
        update_on="auto", master_weights="split", overlap_forward=True, update_in_backward=True, device_budget="1GiB"
    )
    work = Workload(forward_ms=550, backward_ms=1650, other_bytes="3GiB")
    return make_plan(dense_7b(), desktop(), config, workload=work)


def plan_70b() -> Plan:
    world = World(data=8, tensor=8, ranks_per_host=8)
    work = Workload(forward_ms=900, backward_ms=2700, micro_batches=2, other_bytes="20GiB")
    return make_plan(dense_70b(), node(), OffloadConfig(device_budget="6GiB"), world=world, workload=work)


def plan_671b() -> Plan:
    world = World(data=128, pipeline=16, expert=64, ranks_per_host=8)
    work = Workload(forward_ms=60, backward_ms=120, micro_batches=32, other_bytes="30GiB", active_experts=1.0)
    config = OffloadConfig(update_on="auto", overlap_forward=True, device_budget="1GiB")
    return make_plan(mixture_671b(), node(), config, world=world, workload=work)


EXAMPLES = {"7b": plan_7b, "70b": plan_70b, "671b": plan_671b}


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_models_are_planned_in_a_second_and_read_well(name):
    EXAMPLES[name]()  # what is imported once
    start = time.perf_counter()
    text = str(EXAMPLES[name]())
    assert time.perf_counter() - start < 1.0
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) < 50
    assert sum(line.startswith(">") for line in lines) == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documented_tables_are_what_is_printed(name):
    """To write them anew: `python -m tests.planning.test_make_plan`."""
    text = "".join(page.read_text() for page in PAGES)
    assert f"<!-- plan: {name} -->\n\n```\n{EXAMPLES[name]()}\n```\n" in text


def test_sizes_of_published_models():
    billions = [sum(size.numel for size in param_sizes(model())) / 1e9 for model in (dense_7b, dense_70b, mixture_671b)]
    assert billions == pytest.approx([6.74, 70.6, 671.0], rel=0.001)


def write_examples() -> None:
    for page in PAGES:
        text = page.read_text()
        for name, plan in EXAMPLES.items():
            block = f"<!-- plan: {name} -->\n\n```\n{plan()}\n```\n"
            text = re.sub(rf"<!-- plan: {name} -->\n\n```\n.*?\n```\n", lambda _, block=block: block, text, flags=re.S)
        page.write_text(text)


if __name__ == "__main__":
    write_examples()
