# SPDX-License-Identifier: Apache-2.0
"""The cost model against what was measured, and where it must not go: more of anything never predicts slower."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workload import GPT, Size
from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.planning.machine import Machine
from offstage.planning.plan import plan_placements
from offstage.planning.planner import make_plan
from offstage.planning.predict import Load, Shares, Totals, Workload, exposed, rates_of
from offstage.planning.sizes import param_sizes
from tests.support.machines import GIB, machine, machines, node

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "overlap.jsonl"
PLANS = ROWS.with_name("plans.jsonl")
WINDOWS_ARE_OPEN_SINCE = "2026-11-15T09:41"
"""Before, `benchmarks.plans` began to measure after one iteration, in which a window does not open yet."""
FORWARD_SHARE = 0.25
"""Of forward and backward together: every block is checkpointed, so backward computes the forward again and then twice
as much. The rows agree: with `overlap_forward`, the mean over n iterations, the last of which nothing hides, is above
the median by about a quarter of forward and backward over n."""
RESIDENT_UPDATE_MS = 30 * 2.7e9 / 3560e6
"""fp32 masters: 30 bytes of device memory traffic per parameter."""


def measured() -> dict[str, dict]:
    """The newest row of each case with state off the device."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    return {row["case"]: row for row in rows if not row["case"].startswith("resident")}


def workload_model() -> GPT:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return GPT(Size())
    finally:
        torch.set_default_dtype(previous)


def predicted(row: dict):
    receipt, batches = row["receipt"], row["micro_batches"]
    moved_ms = (receipt["exposed_ms"] or 0) + (receipt["hidden_ms"] or 0)  # at the link's rate before the first step
    link = receipt["bytes_fetched"] / moved_ms / 1e6 if moved_ms else 50.0
    both = (row["resident_ms"] - RESIDENT_UPDATE_MS) / batches
    off = {"update_in_backward": False} if row["case"] == "clip_always_active" else {}  # speculation is off there
    return make_plan(
        workload_model(),
        machine(link_duplex_gb_per_s=link),
        OffloadConfig(**{**row["config"], **off}),
        workload=Workload(
            forward_ms=FORWARD_SHARE * both,
            backward_ms=(1 - FORWARD_SHARE) * both,
            micro_batches=batches,
            other_bytes="1.8GiB",
            clips=row["clip"] == "optimizer" and not off,
        ),
    ).prediction


@pytest.mark.parametrize("case", measured())
def test_iterations_are_predicted(case):
    """`median_ms` is the steady state; the mean also holds the last step, which no forward hides."""
    row = measured()[case]
    assert predicted(row).iteration_ms == pytest.approx(row["median_ms"], rel=0.15)


def test_most_iterations_are_predicted_closely():
    errors = sorted(abs(predicted(row).iteration_ms / row["median_ms"] - 1) for row in measured().values())
    assert errors[len(errors) // 2] < 0.02


@pytest.mark.parametrize("case", measured())
def test_bytes_are_predicted(case):
    row = measured()[case]
    found = predicted(row)
    assert found.bytes_up == pytest.approx(row["receipt"]["bytes_fetched"], rel=0.02)
    assert found.bytes_down == pytest.approx(row["receipt"]["bytes_stored"], rel=0.02)
    if case != "clip_always_active":  # there the second set is allocated and not used
        assert found.host_bytes == pytest.approx(row["host_state_gib"] * GIB, rel=0.02)
    in_backward = row["config"].get("update_in_backward")
    if not in_backward and row["micro_batches"] == 1:  # elsewhere the peak is that of activations
        assert found.device_peak_bytes == pytest.approx(row["peak_gib"] * GIB, rel=0.02)


def plans_measured() -> dict[str, dict]:
    """The newest row of each plan of `benchmarks.plans`, as far as a steady state was measured."""
    newest = {}
    for row in map(json.loads, PLANS.read_text().splitlines()):
        if "window" not in row["config"] or row["date"] >= WINDOWS_ARE_OPEN_SINCE:
            newest[f"{row['plan_name']}, {row.get('device_budget', 'no budget')}"] = row
    return newest


def as_it_ran(row: dict) -> OffloadConfig:
    """The row's configuration. Where it leaves the CPU's share open, with the share that gives the row's plan."""
    config = OffloadConfig(**row["config"])
    if config.update_on != "auto" or config.host_fraction is not None:
        return config
    sizes = param_sizes(workload_model(), config)
    shares = (dataclasses.replace(config, host_fraction=percent / 100) for percent in range(101))
    return next(one for one in shares if plan_placements(sizes, one).summary() == row["plan"])


def predicted_where_it_ran(row: dict):
    rates, work = Machine.from_json(json.dumps(row["measured_machine"])), Workload(**row["workload"])
    return make_plan(workload_model(), rates, as_it_ran(row), workload=work).prediction


@pytest.mark.parametrize("name", plans_measured())
def test_plans_are_predicted_from_the_machine_they_ran_on(name):
    """Bytes within 2% and iterations within 15%, by the arithmetic as it is now."""
    row = plans_measured()[name]
    found = predicted_where_it_ran(row)
    assert found.iteration_ms == pytest.approx(row["measured_ms"], rel=0.15)
    assert found.device_state_bytes == pytest.approx(row["device_state_bytes"][0], rel=0.02)
    assert found.host_bytes == pytest.approx(row["host_bytes"][0], rel=0.02)
    assert found.bytes_up == pytest.approx(row["bytes_to_device"][0], rel=0.02)
    assert found.bytes_down == pytest.approx(row["bytes_to_host"][0], rel=0.02)
    if not row["config"].get("update_in_backward"):  # there the peak is that of activations
        assert found.device_peak_bytes == pytest.approx(row["peak_gib"][0] * GIB, rel=0.02)


def test_most_plans_are_predicted_closely():
    errors = {
        name: abs(predicted_where_it_ran(row).iteration_ms / row["measured_ms"] - 1)
        for name, row in plans_measured().items()
    }
    assert statistics.median(errors.values()) < 0.04


TOTALS = Totals(state=32.4e9, weights=5.4e9, params=2.7e9)


def step_ms(share: float, **changes) -> float:
    rates = rates_of(machine(**changes), 1, None, 30)
    return exposed(TOTALS, Shares(0.0, share), rates, OffloadConfig(), Workload()).exposed_ms


def test_both_sides_together_beat_either():
    """In billions of parameters a second: streaming 4.1 and the CPU alone 4.9 were measured; together they do more."""
    rates = {share: 2.7e3 / step_ms(share) for share in (0.0, 0.25, 1.0)}
    assert rates[0.0] == pytest.approx(4.1, rel=0.05)
    assert rates[0.25] > 1.05 * max(rates[0.0], rates[1.0])
    assert rates[1.0] == pytest.approx(4.9, rel=0.15)


def test_each_direction_of_the_link_counts():
    rates = rates_of(machine(), 1, None, 30)
    both = Load(up=50e9, down=50e9)
    assert both.ms(rates) == pytest.approx(1000)
    assert Load(up=55.1e9).ms(rates) == pytest.approx(1000)
    assert Load(up=50e9, down=50e9 + 55.1e9).ms(rates) == pytest.approx(2000)


def test_ranks_share_memory_and_threads_but_not_the_link():
    alone, shared = rates_of(node(), 1, None, 30), rates_of(node(), 8, None, 30)
    assert shared.duplex == alone.duplex
    assert shared.dram == pytest.approx(alone.dram / 8)
    assert shared.cpu == pytest.approx(alone.cpu / 8)


def test_threads_are_the_users_choice():
    few, all_of_them = rates_of(machine(), 1, 4, 30), rates_of(machine(), 1, None, 30)
    assert few.cpu == pytest.approx(1e6 * 57 / 30)
    assert all_of_them.cpu == pytest.approx(1e6 * machine().host_update_rate(14), rel=1e-6)  # two are the loop's


def test_a_window_is_fetched_under_backward_only():
    rates, config = rates_of(machine(), 1, None, 30), OffloadConfig(window="8GiB")

    def with_backward(ms: float) -> float:
        shares = Shares(0.0, 0.0, window=8 * GIB)
        return exposed(TOTALS, shares, rates, config, Workload(backward_ms=ms)).exposed_ms

    assert with_backward(0.0) == pytest.approx(648)
    assert with_backward(1000.0) == pytest.approx((32.4e9 - 8 * GIB) / 50e6)


def test_what_backward_leaves_is_met_by_the_next_forward():
    rates = rates_of(machine(), 1, None, 30)
    work = Workload(forward_ms=160, backward_ms=480)
    both = OffloadConfig(overlap_forward=True, update_in_backward=True)
    whole_ms = 648 / 0.95
    left = 1 - 480 / whole_ms
    found = exposed(TOTALS, Shares(0.0, 0.0), rates, both, work)
    assert found.left == pytest.approx(left)
    assert found.exposed_ms == pytest.approx(left * 648 - left * 160)
    waiting = exposed(TOTALS, Shares(0.0, 0.0), rates, OffloadConfig(update_in_backward=True), work)
    assert waiting.exposed_ms == pytest.approx(left * 648)


def test_with_clipping_the_hosts_part_waits_for_step():
    rates, shares = rates_of(machine(), 1, None, 30), Shares(0.0, 1.0)
    config = OffloadConfig(update_on="host", update_in_backward=True)

    def with_clipping(clips: bool) -> float:
        return exposed(TOTALS, shares, rates, config, Workload(backward_ms=2000, clips=clips)).exposed_ms

    assert with_clipping(False) < 30
    assert with_clipping(True) == pytest.approx(step_ms(1.0))


def test_experts_without_gradients_do_not_move():
    few = Totals(32.4e9, 5.4e9, 2.7e9, moved=0.25)
    rates = rates_of(machine(), 1, None, 30)
    found = exposed(few, Shares(0.0, 0.0), rates, OffloadConfig(), Workload())
    assert found.work.up == pytest.approx(32.4e9 / 4)


SETTINGS = st.builds(
    OffloadConfig,
    overlap_forward=st.booleans(),
    update_in_backward=st.booleans(),
    window=st.sampled_from([0, "4GiB"]),
)
WORKLOADS = st.builds(
    Workload,
    forward_ms=st.sampled_from([0.0, 20.0, 160.0, 2000.0]),
    backward_ms=st.sampled_from([0.0, 10.0, 480.0, 6000.0]),
    clips=st.booleans(),
)
SHARES = st.floats(0.0, 1.0)


@given(machines(), SETTINGS, WORKLOADS, SHARES, SHARES, SHARES)
def test_more_resident_is_never_slower(simulated, config, work, host, one, other):
    rates = rates_of(simulated, simulated.ranks_on_host, None, 30)

    def at(resident: float) -> float:
        chunk = min(64 << 20, (1 - resident) * TOTALS.state)
        return exposed(TOTALS, Shares(resident, host, 4 * GIB, chunk), rates, config, work).exposed_ms

    assert at(max(one, other)) <= at(min(one, other)) * (1 + 1e-9)


@given(
    machines(),
    SETTINGS,
    WORKLOADS,
    SHARES,
    SHARES,
    st.sampled_from(["link", "dram_gb_per_s", "threads", "device_gb_per_s"]),
    st.floats(1.0, 20.0),
)
def test_a_faster_machine_is_never_slower(simulated, config, work, resident, host, what, factor):
    changes = {what: factor * getattr(simulated, what, 0)}
    if what == "link":
        changes = {
            f"link_{way}_gb_per_s": factor * getattr(simulated, f"link_{way}_gb_per_s") for way in ("up", "down")
        }
        changes["link_duplex_gb_per_s"] = factor * simulated.link_duplex_gb_per_s
    elif what == "threads":
        more = int(factor * simulated.threads)
        rate = simulated.host_update_gb_per_s[simulated.threads]
        # A measured rate that falls with more threads must not fool the planner.
        changes = {"threads": more, "host_update_gb_per_s": {**simulated.host_update_gb_per_s, more + 1: 0.9 * rate}}

    def on(this) -> float:
        rates = rates_of(this, this.ranks_on_host, None, 30)
        return exposed(TOTALS, Shares(resident, host, 4 * GIB, 64 << 20), rates, config, work).exposed_ms

    fields = {name: getattr(simulated, name) for name in type(simulated).__dataclass_fields__}
    assert on(machine(**{**fields, **changes})) <= on(simulated) * (1 + 1e-9)


@pytest.mark.parametrize(
    "fields", [{"forward_ms": -1.0}, {"micro_batches": 0}, {"active_experts": 1.5}, {"other_bytes": "much"}]
)
def test_workloads_that_cannot_be(fields):
    with pytest.raises(ConfigError, match="expects"):
        Workload(**fields)
