# SPDX-License-Identifier: Apache-2.0
"""The window: how much state waits on the device, when its memory comes and goes, and that none of it is stale."""

import contextlib
import logging
import warnings

import pytest
import torch
from torch import nn

import offstage
from offstage.errors import ConfigError
from offstage.lanes.lanes import ImmediateLanes
from offstage.lanes.link import use_lanes
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import SMALL, adamw, assert_same, snapshot
from tests.support.lives import CPU, assert_same_lives, end_step, fail_at, iterate, loss_of, stack
from tests.support.lives import offloaded_stack as offloaded
from tests.support.training import lazily

LAYERS = 8
SLOT = 16 * 1024
SEEDS = pytest.mark.parametrize("seed", [None, 0, 1, 2])


def pipeline_of(optimizer):
    return runtime_of(optimizer).places.engines[CPU].transport.pipeline


def num_chunks(optimizer):
    return runtime_of(optimizer).places.engines[CPU].arenas.num_streamed_chunks


# How wide, and when


@pytest.mark.parametrize(("window", "warned"), [("64KiB", 1), ("all", 0), (0, 0)])
def test_a_size_is_deprecated(window, warned):
    """At equal peak a lower fraction does as well in every row of benchmarks/results/window.jsonl."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        offloaded(window=window)
    texts = [str(one.message) for one in found if one.category is DeprecationWarning]
    assert len(texts) == warned
    assert all("lower fraction" in text for text in texts)


def test_it_opens_with_backward():
    """In proportion to how far backward has come, from the second iteration on; never before a gradient is there."""
    model, optimizer = offloaded(window="all")
    pipeline, widths = pipeline_of(optimizer), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: widths.append(pipeline.window_slots))
    iterate(model, optimizer, range(1))
    assert set(widths) == {0}
    widths.clear()
    loss_of(model, 1).backward()
    cues, chunks = 2 * LAYERS, num_chunks(optimizer)
    assert widths == [cue * chunks // cues for cue in range(1, cues + 1)]
    assert len(pipeline.staged) == chunks  # all state is on the device for the step


def test_all_leaves_again_under_the_next_forward():
    """In proportion too; when the forward is over the slots of the ring are all that is left."""
    model, optimizer = offloaded(window="all")
    pipeline, widths = pipeline_of(optimizer), []
    iterate(model, optimizer, range(2))
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: widths.append(pipeline.window_slots))
    assert pipeline.window_slots == num_chunks(optimizer)
    loss_of(model, 2)
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) > LAYERS / 2
    assert widths[-1] == 0
    assert optimizer.receipt().device_state_bytes == 3 * pipeline.slot_bytes


def test_a_window_of_a_size_is_kept():
    """As many slots as fit into it, and not more."""
    model, optimizer = offloaded(window=3 * SLOT + 100)
    iterate(model, optimizer, range(4))
    pipeline = pipeline_of(optimizer)
    assert pipeline.slot_bytes == SLOT
    assert pipeline.window_slots == 3
    loss_of(model, 4)
    assert pipeline.window_slots == 3
    assert optimizer.receipt().device_state_bytes == 6 * SLOT


def test_it_is_not_wider_than_there_are_chunks():
    model, optimizer = offloaded(window="1GiB")
    iterate(model, optimizer, range(3))
    assert pipeline_of(optimizer).window_slots == num_chunks(optimizer)


@pytest.mark.parametrize("window", [SLOT, 5 * SLOT, "all"])
@pytest.mark.parametrize("update_in_backward", [False, True])
def test_memory_does_not_grow(window, update_in_backward):
    """After the first iterations every one has the same peak and the same bytes on the device."""
    made = []
    with use_lanes(lambda device: made.append(Metered(device)) or made[-1]):
        model, optimizer = offloaded(window=window, update_in_backward=update_in_backward)
        iterate(model, optimizer, range(4))
        settled = made[0].peak
        iterate(model, optimizer, range(4, 20))
    assert made[0].peak == settled
    assert made[0].allocated == pipeline_of(optimizer).device_bytes


# Following `device_peak`


class Metered(ImmediateLanes):
    """Lanes of a device whose memory is counted: what offstage takes, and what the model pretends to take."""

    def __init__(self, device, limit=None):
        super().__init__(device)
        self.allocated = 0
        self.peak = 0
        self.limit = limit
        self.refused = 0

    def use(self, nbytes):
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def empty(self, nbytes):
        if self.limit is not None and self.allocated + nbytes > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(f"no room for {nbytes}")
        self.use(nbytes)
        return super().empty(nbytes)

    def release(self, tensor, after, reason):
        self.use(-tensor.nbytes)

    def drop(self, tensor):
        self.use(-tensor.nbytes)

    def peak_bytes(self):
        return self.peak


class Metering:
    """A model whose layers take activation memory in forward and give it back in backward."""

    def __init__(self, activation_bytes=4 * SLOT, *, limit=None, **config):
        self.activation_bytes = activation_bytes
        self.model = stack()
        made = []
        for layer in self.model:
            layer.register_forward_hook(lambda *_: made[0].use(self.activation_bytes))
            layer.weight.register_post_accumulate_grad_hook(lambda _: made[0].use(-self.activation_bytes))
        with use_lanes(lambda device: made.append(Metered(device, limit)) or made[-1]):
            _, self.optimizer = offloaded(self.model, **config)
        self.lanes = made[0]

    def train(self, numbers):
        iterate(self.model, self.optimizer, numbers)
        return self


def plain_peak(activation_bytes=4 * SLOT):
    return Metering(activation_bytes).train(range(3)).lanes.peak


@pytest.mark.parametrize("room", [0, SLOT // 2, SLOT, 3 * SLOT + 7, 100 * SLOT])
def test_auto_stays_under_device_peak(room):
    """It takes what `device_peak` leaves above the peak without a window, in whole slots, and nothing more."""
    device_peak = plain_peak() + room
    run = Metering(window="auto", device_peak=device_peak).train(range(10))
    assert run.lanes.peak <= device_peak
    expected = min(room // SLOT, num_chunks(run.optimizer))
    assert pipeline_of(run.optimizer).window_slots == expected


def test_auto_does_nothing_while_it_measures():
    """The window opens after two plain steps."""
    run = Metering(window="auto", device_peak="1GiB").train(range(2))
    assert pipeline_of(run.optimizer).window_slots == 0
    run.train(range(2, 3))
    assert pipeline_of(run.optimizer).window_slots == num_chunks(run.optimizer)


def test_auto_under_a_peak_that_is_too_small():
    """No room at all: no window, and training goes on."""
    run = Metering(window="auto", device_peak=plain_peak() // 2).train(range(5))
    assert pipeline_of(run.optimizer).window_slots == 0


def test_auto_gives_room_to_activations_that_grow():
    """Longer sequences later: the window shrinks until the peak is under `device_peak` again."""
    device_peak = plain_peak() + 8 * SLOT
    run = Metering(window="auto", device_peak=device_peak).train(range(5))
    assert pipeline_of(run.optimizer).window_slots == 8
    run.activation_bytes += SLOT // 2  # four slots over all layers
    run.train(range(5, 8))
    assert pipeline_of(run.optimizer).window_slots <= 4
    run.lanes.peak = 0
    run.train(range(8, 12))
    assert run.lanes.peak <= device_peak


def test_auto_gives_the_bits_of_the_plain_step():
    plain_model, plain = offloaded()
    iterate(plain_model, plain, range(8))
    run = Metering(window="auto", device_peak=plain_peak() + 5 * SLOT).train(range(8))
    assert_same(plain_model, plain, run.model, run.optimizer)


# Running out of memory


@pytest.mark.parametrize("window", ["all", 6 * SLOT])
def test_out_of_memory_while_it_opens_is_a_warning(window, caplog):
    """One message with the numbers; a smaller window, the same bits."""
    plain_model, plain = offloaded()
    iterate(plain_model, plain, range(6))
    with caplog.at_level(logging.WARNING, logger="offstage"):
        run = Metering(0, limit=5 * SLOT, window=window).train(range(6))
    assert_same(plain_model, plain, run.model, run.optimizer)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "2 window slots of 16.0 KiB" in told[0]
    assert "chunks are fetched later" in told[0]
    assert run.lanes.peak <= 5 * SLOT


@pytest.mark.parametrize("window", ["all", 6 * SLOT])
def test_out_of_memory_while_it_opens_is_found_out_once(window):
    """A failing allocation empties the allocator's cache and waits for the device: none in later iterations."""
    run = Metering(0, limit=5 * SLOT, window=window).train(range(6))
    assert run.lanes.refused == 1
    loss_of(run.model, 6).backward()
    assert pipeline_of(run.optimizer).window_slots == 2  # what there is memory for is still used
    fallbacks = run.optimizer.receipt().fallbacks
    assert ["2 window slots of 16.0 KiB" in text for text in fallbacks] == [True]
    assert fallbacks[0] in str(run.optimizer.receipt())


# Without a window


def test_without_a_window_no_cue_looks_for_chunks():
    """It would be work for every chunk in every cue, and nothing could be fetched anyway."""
    model, optimizer = offloaded(overlap_forward=True)
    engine = runtime_of(optimizer).places.engines[CPU]
    ahead = engine._ahead
    iterate(model, optimizer, range(3))
    assert engine._ahead is ahead
    assert engine.pending


# By hand


@SEEDS
def test_prefetch_and_evict(seed):
    """The trips placed by a framework: all state is there after prefetch(), none after evict()."""

    def life(model, optimizer):
        pipeline = pipeline_of(optimizer)
        if optimizer.config.window == 0:
            return iterate(model, optimizer, range(5))
        for number in range(5):
            loss_of(model, number).backward()
            optimizer.prefetch()
            assert len(pipeline.staged) == (num_chunks(optimizer) if number else len(pipeline.staged))
            end_step(optimizer)
            optimizer.evict()
            assert pipeline.window_slots == 0
            assert not pipeline.staged

    assert_same_lives(life, {"window": "all"}, seeds=[seed])


@SEEDS
def test_prefetch_right_after_step(seed):
    """What is fetched is the state that step() is still storing."""

    def life(model, optimizer):
        for number in range(5):
            iterate(model, optimizer, [number])
            if optimizer.config.window:
                optimizer.prefetch()
                assert len(pipeline_of(optimizer).staged) == num_chunks(optimizer)

    assert_same_lives(life, {"window": "all", "overlap_forward": True}, seeds=[seed])


def test_prefetch_takes_no_more_than_the_window():
    model, optimizer = offloaded(window=2 * SLOT)
    iterate(model, optimizer, range(2))
    for _ in range(3):
        optimizer.prefetch()
        assert len(pipeline_of(optimizer).staged) == 2


@pytest.mark.parametrize("when", ["after backward", "after step"])
@SEEDS
def test_evict_at_any_time(when, seed):
    """State that was fetched and not used is dropped, and fetched again by step()."""

    def life(model, optimizer):
        evict = optimizer.evict if optimizer.config.window else lambda: None
        for number in range(5):
            loss_of(model, number).backward()
            if when == "after backward":
                evict()
            end_step(optimizer)
            if when == "after step":
                evict()

    assert_same_lives(life, {"window": 4 * SLOT, "overlap_forward": True}, seeds=[seed])


def test_prefetch_without_a_window_is_refused():
    for config in ({}, {"overlap_forward": True}):
        _, optimizer = offloaded(**config)
        with pytest.raises(ConfigError, match=r"window=0.*window='all'"):
            optimizer.prefetch()
        optimizer.evict()  # there is nothing to give back


# What waits in the window is never stale


@SEEDS
def test_skipped_steps_keep_what_was_fetched(seed):
    """A step that is not made (an overflow) leaves the staged chunks valid, and they are not fetched again."""

    fetched = []

    def life(model, optimizer):
        for number in range(7):
            loss_of(model, number).backward()
            if number not in (2, 4, 5):
                optimizer.step()
            optimizer.zero_grad()
        fetched.append(optimizer)

    assert_same_lives(life, {"window": "all"}, seeds=[seed])
    assert len({optimizer.receipt().total_bytes_fetched for optimizer in fetched}) == 1


def load(model, optimizer, saved):
    optimizer.load_state_dict(saved)


def assign_state(model, optimizer, saved):
    for param in model.parameters():
        optimizer.state[param] = {"step": torch.tensor(2.0), "exp_avg": torch.ones_like(param), "exp_avg_sq": param**2}


def assign_key(model, optimizer, saved):
    for param in model.parameters():
        optimizer.state[param]["exp_avg"] = torch.full_like(param, 0.5)


def write_in_place(model, optimizer, saved):
    for param in model.parameters():
        optimizer.state[param]["exp_avg"].mul_(0.5)


def write_the_saved_one_in_place(model, optimizer, saved):
    for values in optimizer.state_dict()["state"].values():
        values["exp_avg_sq"].add_(1.0)


def start_anew(model, optimizer, saved):
    optimizer.state = {}


@SEEDS
@pytest.mark.parametrize(
    "change",
    [load, assign_state, assign_key, write_in_place, write_the_saved_one_in_place, start_anew],
    ids=lambda f: f.__name__,
)
def test_state_that_changes_while_a_copy_waits_in_the_window(change, seed):
    """Between backward and step(): the step uses what was loaded or written, not what was fetched before."""

    def life(model, optimizer):
        iterate(model, optimizer, range(2))
        saved = snapshot(optimizer)
        iterate(model, optimizer, range(2, 3))
        loss_of(model, 3).backward()
        assert bool(pipeline_of(optimizer).staged) == bool(optimizer.config.window)
        with torch.no_grad():
            change(model, optimizer, saved)
        end_step(optimizer)
        iterate(model, optimizer, range(4, 6))

    assert_same_lives(life, {"window": "all"}, seeds=[seed])


@SEEDS
def test_more_state_while_chunks_wait_in_the_window(seed):
    """An option that lays state out anew: the old chunks leave the window, which holds as many new ones as before."""

    def life(model, optimizer):
        iterate(model, optimizer, range(3))
        loss_of(model, 3).backward()
        optimizer.param_groups[0]["amsgrad"] = True
        end_step(optimizer)
        iterate(model, optimizer, range(4, 7))
        loss_of(model, 7).backward()
        assert len(pipeline_of(optimizer).staged) == (num_chunks(optimizer) if optimizer.config.window else 0)
        optimizer.step()

    assert_same_lives(life, {"window": "all"}, seeds=[seed])


@SEEDS
def test_a_group_added_while_chunks_wait_in_the_window(seed):
    """Also one that needs larger slots."""

    def life(**config):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 60)])
        model.forward = lambda x: model[1](model[0](x[:, :10]))
        optimizer = offstage.offload(adamw(model[0].parameters()), model, **{**SMALL, **config})
        iterate(model, optimizer, range(3))
        loss_of(model, 3).backward()
        optimizer.add_param_group({"params": [*model[1].parameters()]})
        end_step(optimizer)
        model[1].zero_grad()
        iterate(model, optimizer, range(4, 7))
        return model, optimizer

    expected = life()
    with lazily(seed):
        assert_same(*expected, *life(window="all"))


class Sometimes(nn.Module):
    """Small parameters that share a chunk; `used` says which get a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(300) for _ in range(12))
        self.used = range(12)

    def forward(self, x):
        return torch.stack([self.parts[number].mul(x.sum()).tanh().sum() for number in self.used])


@SEEDS
@pytest.mark.parametrize("window", [SLOT, "all"])
def test_a_parameter_whose_neighbours_were_fetched_without_it(seed, window):
    """It had no gradient the last time; what the staged chunk lacks of it is fetched now."""
    few = [[0, 1, 5, 11], [0, 1, 2, 5, 10, 11], range(12), [3], [0, 3, 4, 9]]
    uses = [*few, range(0, 12, 2), range(1, 12, 2), range(12)]

    def life(model, optimizer):
        staged = 0
        for number, used in enumerate(uses):
            model.used = used
            loss_of(model, number).backward()
            staged += len(pipeline_of(optimizer).staged)
            end_step(optimizer)
        assert (staged > 0) == bool(optimizer.config.window)

    assert_same_lives(life, {"window": window}, model=Sometimes, seeds=[seed])


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("window", [3 * SLOT, "all"])
@pytest.mark.parametrize("how", ["backward", "accumulate", "prefetch", "accumulate, prefetch", "prefetch, early"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_chunks_that_wait_for_long_leave_room_for_the_others(slots, window, how, seed):
    """Experts in turns: what was fetched for one that then is not used does not take the ring's slots."""
    turns = [range(8), range(4), range(4), range(4, 8), range(4, 8), range(4), [7], [5, 6], range(8)]

    def life(experts, optimizer):
        for number, used in enumerate(turns):
            loss = loss_of(nn.Sequential(*(experts[i] for i in used)), number)
            # Under accumulate() no gradient starts anything.
            with optimizer.accumulate() if "accumulate" in how and number % 2 else contextlib.nullcontext():
                loss.backward()
            end_step(optimizer)
            if optimizer.config.window and "prefetch" in how:
                optimizer.prefetch()

    config = {"window": window, "slots": slots, "update_in_backward": "early" in how}
    _, optimizer = assert_same_lives(life, config, model=lambda: nn.ModuleList(stack()), seeds=[seed])
    assert optimizer.receipt().device_state_bytes <= (slots + num_chunks(optimizer)) * SLOT


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_closing_while_chunks_wait_in_the_window(overlap_forward):
    """Fetches under way are waited for before their slot's memory goes."""
    for seed in range(6):
        with lazily(seed):
            model, optimizer = offloaded(window="all", overlap_forward=overlap_forward)
            iterate(model, optimizer, range(2))
            loss_of(model, 2).backward()
            assert pipeline_of(optimizer).staged
            optimizer.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_failing_step_while_chunks_wait_in_the_window(seed):
    """Nothing of the lost step is in the window afterwards."""
    with lazily(seed):
        model, optimizer = offloaded(window="all")
        iterate(model, optimizer, range(2))
        weights, saved = {k: v.clone() for k, v in model.state_dict().items()}, snapshot(optimizer)
        loss_of(model, 2).backward()
        undo = fail_at(3, runtime_of(optimizer).rule, "update", ZeroDivisionError())
        with pytest.raises((offstage.OffstageError, ZeroDivisionError)):
            optimizer.step()
        undo()
        optimizer.load_state_dict(saved)
        model.load_state_dict(weights)
        optimizer.zero_grad()
        iterate(model, optimizer, range(2, 5))
    plain_model, plain = offloaded()
    iterate(plain_model, plain, range(5))
    assert_same(plain_model, plain, model, optimizer)


# Refusals


def test_a_window_smaller_than_a_slot_is_refused():
    """It could not hold a single chunk and would do nothing."""
    with pytest.raises(ConfigError, match=r"window=10\.0 KiB is smaller than one slot of 16\.0 KiB"):
        offloaded(window="10KiB")
    model, optimizer = offloaded(window="16KiB")  # the advice works
    iterate(model, optimizer, range(3))
    assert pipeline_of(optimizer).window_slots == 1


def test_a_group_whose_slots_no_longer_fit_the_window_is_refused():
    """And the optimizer goes on without it."""

    def life(**config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 10), nn.Linear(10, 48))
        optimizer = offstage.offload(adamw(model[0].parameters()), model, **{**SMALL, **config})
        iterate(model, optimizer, range(3))
        more = nn.Parameter(torch.zeros(20000))
        if config:
            with pytest.raises(ConfigError, match="smaller than one slot"):
                optimizer.add_param_group({"params": [more]})
        assert len(optimizer.param_groups) == 1
        iterate(model, optimizer, range(3, 6))
        return model, optimizer

    assert_same(*life(), *life(window="8KiB"))
