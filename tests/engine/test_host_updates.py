# SPDX-License-Identifier: Apache-2.0
"""Updates on the host: the bits of the plain step, whatever the CPU's share, the overlap, the formats and the threads.

On lanes that run work at once, on lazy ones with the happens-before checker, and on threaded ones, where real threads
update while the caller goes on.
"""

import copy
import functools
import logging
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import offstage
from offstage.config import Placement
from offstage.errors import OffstageError
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.optimizer.optimizer import runtime_of
from offstage.planning.plan import HOST_SLOTS
from tests.support import overlap as overlap_training
from tests.support.contract import assert_same_tree, one_process_group, saved_and_loaded
from tests.support.lives import CPU, end_step
from tests.support.params import (
    ON_HOST,
    RESIDENT,
    SMALL,
    WHERE,
    copy_weights,
    equal,
    make_params,
    offloaded,
    resident_after,
    result,
    steps,
)
from tests.support.random_lives import Iterations, Steps, assert_same_ends, events_of
from tests.support.runs import differences
from tests.support.threaded_lanes import host_threads, with_threads
from tests.support.torch_classes import CASES, assert_masters_equal, same_class_run, shapes_for, train_class
from tests.support.training import THREADED, lazily

# The matrix

FORMATS = {
    "fp32": {},
    "bf16, fp32 masters": {"dtype": torch.bfloat16, "base": {"master_weights": "fp32"}},
    "bf16, split masters": {"dtype": torch.bfloat16, "base": {"master_weights": "split"}},
    "bf16, no masters": {"dtype": torch.bfloat16, "base": {"master_weights": "none", "state_dtype": "bfloat16"}},
}
SETTINGS = {
    "in step": {},
    "overlap_forward": {"overlap_forward": True},
    "window": {"window": "40KiB"},
    "window all": {"window": "all"},
    "in backward": {"update_in_backward": True},
    "in backward, overlap_forward": {"update_in_backward": True, "overlap_forward": True},
    "everything": {"update_in_backward": True, "overlap_forward": True, "window": "40KiB"},
}
CLIPS = ["none", "never", "sometimes", "always"]
SHARES = [0.4, 1.0]
STEPS = 4


def form_of(name):
    """The dtype of the weights, and the settings."""
    return FORMATS[name].get("dtype", torch.float32), FORMATS[name].get("base", {})


def loops_of(form, setting, share):
    """(clip, micro-batches): all clips for one format, two for the others.

    Micro-batches take turns over settings, shares and clips, so that each meets each.
    """
    turn = list(SETTINGS).index(setting) + SHARES.index(share)
    clips = CLIPS if form == "fp32" else ["none", "sometimes"]
    return [(clip, 1 + (turn + number) % 2) for number, clip in enumerate(clips)]


def train(config, form, clip="none", micro_batches=1, **arguments):
    form = FORMATS[form]
    base = {**form.get("base", {}), **({"fraction": 0.0} if config is None else {})}
    form = {**form, "base": base, "clip": clip, "micro_batches": micro_batches, "steps": STEPS}
    return overlap_training.train(config, **{**form, **arguments})


@functools.cache
def plain(form, clip="none", micro_batches=1, checkpointing="none"):
    """Everything resident, updated in step(), torch's own clipping."""
    return train(None, form, clip, micro_batches, checkpointing=checkpointing)


def assert_on_host(run, setting, share, clip):
    """The run cannot have been a plain one."""
    config, plan = SETTINGS[setting], run.optimizer.plan
    on_host = plan.bytes_of(Placement.HOST)
    assert (on_host > 0) == (share > 0)
    assert (plan.bytes_of(Placement.STREAMED) > 0) == (share < 1)
    assert runtime_of(run.optimizer).places.engines[CPU].transport.bytes_updated_on_host == STEPS * on_host
    assert (run.left_to_forward > 0) == bool(config.get("overlap_forward"))
    # Updates on the host are not speculative: with clipping, step() makes them.
    early = config.get("update_in_backward") and (share < 1 or clip == "none")
    assert (run.updated_in_backward > 0) == bool(early)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_combination_gives_the_bits_of_the_plain_step(setting, share, form):
    """Weights, all state and all norms; every loop on lazy lanes, some also on lanes that run at once."""
    start = list(SETTINGS).index(setting) + list(FORMATS).index(form) + SHARES.index(share)
    for number, (clip, micro_batches) in enumerate(loops_of(form, setting, share), start):
        for kind in [number % 9, None] if number % 3 == 0 else [number % 9]:
            with lazily(kind):
                run = train({**SETTINGS[setting], "host_fraction": share}, form, clip, micro_batches)
            assert differences(plain(form, clip, micro_batches), run) == [], (clip, micro_batches, kind)
            assert_on_host(run, setting, share, clip)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_without_a_share_nothing_is_updated_on_the_host(setting, form):
    number = list(SETTINGS).index(setting)
    with lazily([number, None][number % 2]):
        run = train({**SETTINGS[setting], "host_fraction": 0.0}, form, "sometimes")
    assert differences(plain(form, "sometimes"), run) == []
    assert_on_host(run, setting, 0.0, "sometimes")


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("setting", SETTINGS)
def test_real_threads_give_the_bits_of_the_plain_step(setting, share):
    form = list(FORMATS)[list(SETTINGS).index(setting) % len(FORMATS)]
    for clip in ("none", "sometimes"):
        with with_threads():
            run = train({**SETTINGS[setting], "host_fraction": share, "threads": 4}, form, clip)
        assert differences(plain(form, clip), run) == [], clip
        assert_on_host(run, setting, share, clip)


@pytest.mark.parametrize("kind", [None, 0, 1, THREADED])
@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("setting", ["in step", "overlap_forward", "in backward, overlap_forward"])
def test_checkpointing(setting, share, kind):
    with lazily(kind):
        config = {**SETTINGS[setting], "host_fraction": share}
        run = train(config, "bf16, split masters", checkpointing="reentrant")
    assert differences(plain("bf16, split masters", checkpointing="reentrant"), run) == []


@settings(deadline=None, max_examples=30)
@given(
    events_of(Steps, fewest=3, most=14),
    st.sampled_from(Steps.FORMATS),
    st.sampled_from([1.0, 0.6]),
    st.sampled_from([0.3, 0.6, 1.0]),
    st.integers(0, 1000),
)
def test_lives_with_the_cpu_and_without_are_the_same(events, kind, fraction, share, seed):
    dtype, config = kind
    with lazily(seed):
        ours = Steps(seed, dtype, {**config, **SMALL, "fraction": fraction, "host_fraction": share})
    assert_same_ends(ours, Steps(seed, dtype, {**config, "fraction": 0.0}), events)


@settings(deadline=None, max_examples=30)
@given(
    events_of(Iterations, fewest=4, most=14),
    st.sampled_from(Iterations.FORMATS),
    st.sampled_from([0.4, 1.0]),
    st.sampled_from(list(SETTINGS.values())),
    st.sampled_from(Iterations.CLIPS),
    st.sampled_from(Iterations.IN_BETWEEN),
    st.integers(0, 1000),
)
def test_overlapped_lives_with_the_cpu_and_plain_ones_are_the_same(events, kind, share, overlap, clip, moment, seed):
    dtype, config = kind
    with lazily(seed):
        ours = Iterations(seed, dtype, {**config, **overlap, "host_fraction": share}, clip, moment)
    assert_same_ends(ours, Iterations(seed, dtype, config, clip, "nothing"), events)


# Parameters set by hand


@pytest.mark.parametrize("form", FORMATS)
def test_any_number_of_threads_gives_the_same_bits(form, monkeypatch):
    monkeypatch.setattr("offstage.rules.adamw._SLICE", 1000)
    dtype, base = form_of(form)
    shapes = ((11_003,), (40, 50), (7,))

    def run(kind, **config):
        with lazily(kind):
            params = make_params(dtype, shapes)
            optimizer = offloaded(params, **base, **config)
        rule, seen = runtime_of(optimizer).rule, set()
        slices_of = rule.slices

        def noted(piece):
            seen.add(threading.get_ident())
            time.sleep(1e-4)  # lets the others in
            piece()

        rule.slices = lambda pieces: [functools.partial(noted, piece) for piece in slices_of(pieces)]
        steps(params, optimizer)
        return result(params, optimizer), len(seen)

    expected, _ = run(None, **RESIDENT)
    for threads in range(1, 9):
        for kind in (None, THREADED):
            got, used = run(kind, threads=threads)
            assert equal(got, expected), (threads, kind)
            assert used <= threads
            assert (used > 1) == (threads > 1)


# Placement


@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.4, 0.5, 0.9])
def test_the_cpus_share_is_met_within_one_parameter(share, fraction):
    random = torch.Generator().manual_seed(round(100 * share))
    shapes = [(int(n),) for n in torch.randint(100, 3000, (40,), generator=random)]
    plan = offloaded(make_params(shapes=shapes), update_on="auto", host_fraction=share, fraction=fraction).plan
    largest = max(size.state_bytes for size in plan.sizes)
    away = plan.bytes_of(Placement.HOST) + plan.bytes_of(Placement.STREAMED)
    assert abs(plan.bytes_of(Placement.HOST) - share * away) <= largest
    # Evenly: after any number of parameters the share is met within one.
    so_far = on_host = 0
    for size, placement in zip(plan.sizes, plan.placements, strict=True):
        so_far += size.state_bytes * (placement is not Placement.RESIDENT)
        on_host += size.state_bytes * (placement is Placement.HOST)
        assert abs(on_host - share * so_far) <= largest


def lanes_used(**config):
    made = []
    params = make_params()
    with use_lanes(lambda device: made.append(LazyLanes(device, seed=1)) or made[-1]):
        optimizer = offloaded(params, **config)
    steps(params, optimizer)
    return optimizer, {lane for one in made for lane in one.log}


def test_all_on_the_host_needs_nothing_on_the_device():
    optimizer, used = lanes_used()
    plan, receipt = optimizer.plan, optimizer.receipt()
    assert set(plan.placements) == {Placement.HOST}
    assert (plan.slots, plan.slot_bytes, plan.window, plan.device_bytes) == (0, 0, 0, 0)
    assert receipt.device_state_bytes == 0
    assert runtime_of(optimizer).places.engines[CPU].transport.pipeline.num_slots == 0
    assert used == {"update", "lower", "host", "raise"}  # "update": the rule's coefficients
    assert all(not held.resident for held in runtime_of(optimizer).all_states())


@pytest.mark.parametrize("config", [{"update_on": "auto", "host_fraction": 0.0}, {"update_on": "device"}])
def test_no_share_is_off(config):
    optimizer, used = lanes_used(**config)
    assert used == {"fetch", "update", "store"}
    assert (optimizer.plan.host_slots, optimizer.plan.host_slot_bytes) == (0, 0)
    assert runtime_of(optimizer).places.engines[CPU].transport.host_updates.nbytes == 0
    assert optimizer.receipt().host_update_ms is None
    assert "updated on the host" not in repr(optimizer)
    with with_threads():
        params = make_params()
        threads = {"threads": 3} if config["update_on"] == "auto" else {}
        optimizer = offloaded(params, **threads, **config)
    before = host_threads()
    steps(params, optimizer)
    assert host_threads() == before


def test_off_is_off():
    optimizer, used = lanes_used(**RESIDENT)
    assert used == set()
    assert not runtime_of(optimizer).places.engines[CPU].transport.is_open


def test_both_work_at_once():
    optimizer, used = lanes_used(**WHERE["mixed"])
    assert used == {"fetch", "update", "store", "lower", "host", "raise"}
    assert set(optimizer.plan.placements) == set(Placement)


def test_the_plan_the_repr_and_the_receipt_tell():
    optimizer, _ = lanes_used(update_on="auto", host_fraction=0.5)
    plan, receipt = optimizer.plan, optimizer.receipt()
    on_host = "28.1 KiB updated on the host (4 parameters)"
    assert on_host in plan.summary()
    assert on_host in repr(optimizer)
    assert "28.1 KiB streamed (4)" in plan.summary()
    assert plan.summary() in str(plan)
    assert [line.split()[-1] for line in str(plan).splitlines() if "parameter" in line].count("host") == 4
    assert plan.host_share == 0.5
    assert plan.host_slots == HOST_SLOTS
    assert receipt.host_update_ms is not None
    assert "updates on the host" in str(receipt)
    # Weights or state, both ways, and gradients down.
    weights = sum(s.weight_bytes for s, p in zip(plan.sizes, plan.placements, strict=True) if p is Placement.HOST)
    state = sum(s.state_bytes for s, p in zip(plan.sizes, plan.placements, strict=True) if p is Placement.STREAMED)
    padded = sum(s.padded_bytes for s, p in zip(plan.sizes, plan.placements, strict=True) if p is Placement.STREAMED)
    assert weights + state <= receipt.bytes_fetched <= weights + padded
    assert receipt.bytes_stored == receipt.bytes_fetched + weights
    assert receipt.host_state_bytes == plan.host_bytes


def test_small_parameters_stay_on_the_device():
    shapes = ((20_000,), (10,), (20_000,))
    params = make_params(shapes=shapes)
    optimizer = offloaded(params, min_bytes="1KiB")
    assert [one.value for one in optimizer.plan.placements] == ["host", "resident", "host"]
    steps(params, optimizer)
    assert equal(result(params, optimizer), resident_after(range(3), shapes=shapes))


def test_a_device_budget_needs_no_slots():
    params = make_params(shapes=((1000,),) * 4)
    optimizer = offloaded(params, device_budget="16KiB")
    assert [one.value for one in optimizer.plan.placements] == ["resident", "resident", "host", "host"]
    assert optimizer.receipt().device_state_bytes == 16_000


def test_the_host_budget_counts_staging_buffers():
    with pytest.raises(OffstageError, match="host_budget"):
        offloaded(make_params(), host_budget=8 * 900 * 8 + 4000)
    optimizer = offloaded(make_params(), host_budget="256KiB")
    assert optimizer.receipt().host_state_bytes <= 256 * 1024


# State dicts


@pytest.mark.parametrize("form", ["fp32", "bf16, fp32 masters", "bf16, split masters"])
@pytest.mark.parametrize("after", WHERE)
@pytest.mark.parametrize("before", WHERE)
def test_state_goes_from_any_place_to_any_other(before, after, form):
    dtype, base = form_of(form)
    first_params = make_params(dtype)
    first = offloaded(first_params, **base, **WHERE[before])
    steps(first_params, first, range(2))
    saved = saved_and_loaded(first.state_dict())
    with lazily(4):
        params = [nn.Parameter(param.detach().clone()) for param in first_params]
        optimizer = offloaded(params, **base, **WHERE[after])
    steps(params, optimizer, range(7, 8))  # it has state of its own, and loading is in the middle of training
    copy_weights(params, first_params)
    optimizer.load_state_dict(saved)
    steps(params, optimizer, range(2, 4))
    assert equal(result(params, optimizer), resident_after(range(4), dtype, **base))


def plainly_after(numbers, make, shapes=((900,),) * 8, **options):
    """What the same steps come to with torch's own class."""
    params = make_params(shapes=shapes)
    optimizer = make(params, **options)
    steps(params, optimizer, numbers)
    return result(params, optimizer)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam], ids=lambda make: make.__name__)
@pytest.mark.parametrize("to_plain", [False, True])
def test_state_goes_to_plain_torch_and_back(to_plain, make):
    plain_params, params = make_params(), make_params()
    sides = [(plain_params, make(plain_params, lr=0.1)), (params, offloaded(params, make, {"lr": 0.1}, rule="torch"))]
    source, target = sides[::-1] if to_plain else sides
    steps(*source, range(2))
    copy_weights(target[0], source[0])
    target[1].load_state_dict(saved_and_loaded(source[1].state_dict()))
    for side in sides:
        steps(*side, range(2, 4))
    assert equal(result(*target), result(*source))


def test_an_optimizer_with_state_is_taken_over():
    params = make_params()
    inner = torch.optim.NAdam(params)
    steps(params, inner, range(2))
    optimizer = offstage.offload(inner, **ON_HOST)
    steps(params, optimizer, range(2, 4))
    assert equal(result(params, optimizer), plainly_after(range(4), torch.optim.NAdam))


def test_distributed_checkpoints_of_an_optimizer_on_the_host():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30)).to(torch.bfloat16)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, offstage.offload(inner, model, **ON_HOST, master_weights="split")

    with one_process_group():
        model, optimizer = build()
        steps(list(model.parameters()), optimizer, range(2))
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        assert saved["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq", "master_weight"}
        other_model, other = build()
        other_model.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other_model, other, saved)
        for one, its in ((model, optimizer), (other_model, other)):
            steps(list(one.parameters()), its, range(2, 4))
        assert_same_tree(other.state_dict(), optimizer.state_dict())
        assert_same_tree(dict(other_model.state_dict()), dict(model.state_dict()))


def test_reads_are_without_a_copy():
    params = make_params()
    optimizer = offloaded(params)
    steps(params, optimizer)
    kept = optimizer.state[params[1]]["exp_avg"]
    assert kept.data_ptr() == optimizer.state_dict()["state"][1]["exp_avg"].data_ptr()
    assert kept.untyped_storage().nbytes() == kept.nbytes
    before = kept.clone()
    steps(params, optimizer, range(3, 4))
    assert not torch.equal(kept, before)  # it is the state
    reference_params = make_params()
    reference = offloaded(reference_params, **RESIDENT)
    steps(reference_params, reference, range(4))
    for one, its in ((params, optimizer), (reference_params, reference)):
        its.state[one[1]]["exp_avg"].mul_(0.5)
        steps(one, its, range(4, 5))
    assert equal(result(params, optimizer), result(reference_params, reference))


@pytest.mark.parametrize("kind", [None, 0, 2, THREADED])
@pytest.mark.parametrize("where", ["host", "mixed"])
@pytest.mark.parametrize("form", ["fp32", "bf16, split masters"])
def test_groups_are_added_and_options_switched_on_in_training(form, where, kind):
    dtype, base = form_of(form)

    def live(config, kind=None):
        with lazily(kind):
            params = make_params(dtype)
            optimizer = offloaded(params, **base, **config)
        steps(params, optimizer, range(2))
        torch.manual_seed(9)
        params.append(nn.Parameter(torch.randn(70, 90).to(dtype)))  # larger than anything before: buffers grow
        optimizer.add_param_group({"params": params[-1:], "lr": 0.01, "weight_decay": 0.0})
        steps(params, optimizer, range(2, 4))
        optimizer.param_groups[0]["amsgrad"] = True
        steps(params, optimizer, range(4, 6))
        optimizer.param_groups[0]["amsgrad"] = False
        optimizer.load_state_dict(saved_and_loaded(optimizer.state_dict()))
        steps(params, optimizer, range(6, 8))
        return optimizer, result(params, optimizer)

    optimizer, got = live(WHERE[where], kind)
    assert Placement.HOST in optimizer.plan.placements
    assert equal(got, live(RESIDENT)[1])


# Other optimizer classes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("make", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_other_classes_equal_the_plain_class(make, options, dtype):
    plain = train_class(make, options, dtype, None)
    host, half = {"update_on": "host"}, {"host_fraction": 0.5}
    for kind, config in ((None, host), (1, half), (THREADED, host), (THREADED, half)):
        with lazily(kind):
            got = train_class(make, options, dtype, {"master_weights": "none", **config})
        assert same_class_run(got, plain), (kind, config)


@pytest.mark.parametrize(
    ("make", "options"),
    [case for case in CASES if case[0] in (torch.optim.SGD, torch.optim.Adafactor, torch.optim.Muon)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_other_classes_with_masters(make, options):
    """The class runs on the fp32 masters, the weights are the masters rounded."""
    ours = make_params(torch.bfloat16, shapes_for(make))
    theirs = [nn.Parameter(param.detach().float()) for param in ours]
    optimizer, other = offloaded(ours, make, options, rule="torch"), make(theirs, **options)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator).bfloat16()
            b.grad = a.grad.float()
        optimizer.step()
        other.step()
    assert_masters_equal(ours, optimizer, theirs)


def test_capturable_is_for_the_device():
    """On the host it would be refused by torch; the arithmetic is the same without."""
    params = make_params()
    optimizer = offloaded(params, options={"lr": 0.1, "capturable": True}, rule="torch")
    steps(params, optimizer)
    assert equal(result(params, optimizer), plainly_after(range(3), torch.optim.AdamW, lr=0.1))


@pytest.mark.parametrize("config", [{"update_on": "host"}, {"update_on": "auto", "host_fraction": 0.5}])
def test_chunks_of_other_classes_are_updated_at_the_same_time(config):
    """Two threads run the user's class at once, and the caller too: none sees what belongs to another."""
    shapes = ((64, 64),) * 12
    expected = plainly_after(range(4), torch.optim.NAdam, shapes)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(15):
            with with_threads():
                params = make_params(shapes=shapes)
                optimizer = offloaded(params, torch.optim.NAdam, {}, rule="torch", **config)
            steps(params, optimizer, range(4))
            assert equal(result(params, optimizer), expected)
    finally:
        sys.setswitchinterval(interval)


# Who wrote the weight


def write_data(model, where):
    model[0].weight.data.copy_(torch.full_like(model[0].weight, 33.25))


def write_in_place(model, where):
    with torch.no_grad():
        model[0].weight.fill_(33.25)


def load_model(model, where):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["0.weight"].fill_(33.25)
    model.load_state_dict(state)


@pytest.mark.parametrize("write", [write_data, write_in_place, load_model])
@pytest.mark.parametrize("rule", ["auto", "torch"])
@pytest.mark.parametrize("form", ["fp32", "bf16, fp32 masters", "bf16, split masters"])
@pytest.mark.parametrize("where", ["host", "mixed"])
def test_a_weight_that_someone_else_wrote_wins(where, form, rule, write, caplog):
    dtype, base = form_of(form)
    if rule == "torch" and base.get("master_weights") == "split":
        base = {"master_weights": "fp32"}

    def live(config):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))).to(dtype)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = offstage.offload(inner, model, **{**ON_HOST, **base, "rule": rule, **config})
        params = list(model.parameters())
        steps(params, optimizer, range(2))
        write(model, where)
        steps(params, optimizer, range(2, 5))
        return optimizer, result(params, optimizer)

    with caplog.at_level(logging.WARNING, "offstage"):
        optimizer, got = live(WHERE["host"] if where == "host" else {"update_on": "auto", "host_fraction": 0.5})
    assert runtime_of(optimizer).all_states()[0].placement is Placement.HOST
    told = [record for record in caplog.records if "written by someone else" in record.getMessage()]
    masters = dtype == torch.bfloat16
    assert optimizer.receipt().weights_written_by_others == (1600 if masters else 0)
    assert len(told) == masters
    assert equal(got, live(RESIDENT)[1])


# Odd parameters and gradients


def odd_params(dtype):
    torch.manual_seed(0)
    values = [
        torch.randn(50, 30).t(),  # another order in memory
        torch.randn(40, 80)[:, ::2],  # gaps in memory
        torch.randn(()),
        torch.empty(0, 5),
        torch.randn(7, 3, 11),
        torch.randn(3000),
        torch.randn(2, 2),
    ]
    return [nn.Parameter(_with_strides_of(value, dtype)) for value in values]


def _with_strides_of(value, dtype):
    """`to` would close the gaps."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True) if n)
    room = torch.zeros(max(size, 1), dtype=dtype)
    made = room.as_strided(value.shape, value.stride())
    return made.copy_(value)


@pytest.mark.parametrize("kind", [None, 0, 1, THREADED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_odd_parameters(dtype, kind):
    """Two groups, a tensor lr, parameters without a gradient now and then, one that never gets one."""

    def live(config, kind=None):
        with lazily(kind):
            params = odd_params(dtype)
            groups = [
                {"params": params[:4], "lr": torch.tensor(0.05)},
                {"params": params[4:], "betas": (0.8, 0.9), "maximize": True, "weight_decay": 0.0},
            ]
            inner = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
            optimizer = offstage.offload(inner, **{**ON_HOST, **config})
        untouched = params[-1].detach().clone()
        for step in range(6):
            optimizer.param_groups[0]["lr"].fill_(0.05 / (1 + step))
            generator = torch.Generator().manual_seed(step)
            for number, param in enumerate(params[:-1]):
                gradient = torch.randn(param.shape, generator=generator).to(dtype)
                param.grad = None if (number + step) % 4 == 0 else gradient
            optimizer.step()
        assert torch.equal(params[-1], untouched)
        assert params[-1] not in optimizer.state
        return optimizer, result(params, optimizer)

    optimizer, got = live({}, kind)
    assert Placement.STREAMED not in optimizer.plan.placements
    assert equal(got, live(RESIDENT)[1])


@pytest.mark.parametrize("kind", [None, 0, 1, THREADED])
def test_gradients_wider_than_their_weights(kind):
    """Staging buffers grow for fp32 gradients of bf16 parameters, in the middle of a step."""

    def live(config, kind=None):
        with lazily(kind):
            params = make_params(torch.bfloat16, ((6000,),) * 6)
            optimizer = offloaded(params, **config)
        for step in range(4):
            for number, param in enumerate(params):
                generator = torch.Generator().manual_seed(10 * step + number)
                param.grad_dtype = None
                wide = step >= 1 and number >= 3
                value = torch.randn(param.shape, generator=generator)
                param.grad = value if wide else value.bfloat16()
            end_step(optimizer)
        return optimizer, result(params, optimizer)

    optimizer, got = live({}, kind)
    assert equal(got, live(RESIDENT)[1])
    engine = runtime_of(optimizer).places.engines[CPU]
    trips = engine.transport.host_updates
    assert len(trips._slots) == HOST_SLOTS
    assert trips.nbytes > HOST_SLOTS * engine.arenas.staging_bytes
    assert optimizer.receipt().host_state_bytes == engine.arenas.nbytes + trips.nbytes


@pytest.mark.parametrize("kind", [None, 0, THREADED])
def test_a_step_that_the_scaler_skips_moves_nothing(kind):
    def live(config, kind=None):
        with lazily(kind):
            params = make_params()
            optimizer = offloaded(params, **config)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                value = torch.randn(param.shape, generator=generator) * (torch.inf if step == 2 else 1)
                (param * value).sum().mul(scaler.scale(torch.ones(()))).backward()
            moved = optimizer.receipt().total_bytes_stored
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if config == {}:
                assert (optimizer.receipt().total_bytes_stored > moved) == (step != 2)
        assert optimizer.receipt().steps == 3
        return result(params, optimizer)

    assert equal(live({}, kind), live(RESIDENT))


@pytest.mark.parametrize("kind", [None, 0, THREADED])
def test_a_closure(kind):
    def live(config, kind=None):
        with lazily(kind):
            params = make_params()
            optimizer = offloaded(params, **config)
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = sum((param**2).mean() for param in params)
            loss.backward()
            return loss

        for _ in range(3):
            losses.append(optimizer.step(closure).detach())
        return losses + result(params, optimizer)

    assert equal(live({}, kind), live(RESIDENT))
