# SPDX-License-Identifier: Apache-2.0
"""Exact clipping with `update_in_backward`: whatever backward guessed, the result is clip-then-step, bit for bit."""

import contextlib
import copy
import functools
import logging

import pytest
import torch
from torch import nn

import offstage
from offstage.errors import OffstageError
from offstage.lanes.lanes import ImmediateLanes
from offstage.lanes.link import use_lanes
from offstage.memory import arena as host_memory
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from tests.support.contract import SMALL, TORCH, adamw, assert_same, assert_same_tree, assert_same_weights, snapshot
from tests.support.lives import CPU, end_step, fail_at, loss_of, stack
from tests.support.training import lazily

BACKWARD = {**SMALL, "update_in_backward": True}
BOTH = {**BACKWARD, "overlap_forward": True}
MODES = {
    "plain": SMALL,
    "window": {**SMALL, "window": "all"},
    "overlap_forward": {**SMALL, "overlap_forward": True},
    "update_in_backward": BACKWARD,
    "both": BOTH,
    "all three": {**BOTH, "window": "64KiB"},
    "half resident": {**BOTH, "fraction": 0.5},
}
INFINITY = float("inf")
LAYERS = 6


class Life:
    """A model and its optimizer, with torch's own clipping or with the optimizer's."""

    def __init__(self, config, *, dtype=torch.float32, make=adamw, by_torch=None):
        self.model = stack(LAYERS, dtype)
        self.optimizer = make(self.model.parameters())
        if config is not None:
            self.optimizer = offstage.offload(self.optimizer, self.model, **config)
        in_backward = config is not None and config.get("update_in_backward")
        self.by_torch = not in_backward if by_torch is None else by_torch
        self.norms = []

    def backward(self, number, scale=1.0):
        (loss_of(self.model, number) * scale).backward()

    def clip(self, max_norm, norm_type=2.0):
        if self.by_torch:
            self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type))
        else:
            self.norms.append(self.optimizer.clip_grad_norm_(max_norm, norm_type))

    def step(self):
        end_step(self.optimizer)

    def train(self, max_norms, *, first=0, norm_type=2.0):
        for number, max_norm in enumerate(max_norms, start=first):
            self.backward(number)
            if max_norm is not None:
                self.clip(max_norm, norm_type)
            self.step()
        return self

    def settled(self):
        if isinstance(self.optimizer, offstage.OffloadedOptimizer):
            self.optimizer.synchronize()
        return self

    @property
    def receipt(self):
        return self.optimizer.receipt()


def assert_same_life(expected, got):
    got.settled()
    expected.settled()
    assert_same(expected.model, expected.optimizer, got.model, got.optimizer)
    assert_same_tree([norm.clone() for norm in expected.norms], [norm.clone() for norm in got.norms])


def assert_same_told(live, config, seeds, plain=SMALL):
    """`live(config)` ends like `live(plain)` on every kind of lanes. Returns the former lives."""
    expected, told = live(plain), []
    for seed in seeds:
        with lazily(seed):
            got = live(config)
            assert_same_life(expected, got)
        told.append(got)
    return told


OVER, WITHIN = 1e-4, 1e4
PATTERNS = {
    "hits": [WITHIN] * 6,
    "misses": [OVER] * 6,
    "mixed": [WITHIN, WITHIN, OVER, WITHIN, OVER, OVER, WITHIN, WITHIN],
    "a bound that changes": [1.0, 0.5, 0.02, 1e9, 0.1, 0.01, 3.0],
    "clipping now and then": [WITHIN, WITHIN, None, OVER, None, None, WITHIN, OVER],
}


@functools.cache
def plain_life(max_norms, skipped=()):
    """The plain step's life with a bound for each step, of which none may change it any more."""
    life = Life(SMALL)
    for number, max_norm in enumerate(max_norms):
        if number not in skipped:
            life.train([max_norm], first=number)
    return life


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INFINITY])
def test_the_bits_of_torch(pattern, norm_type):
    """Against torch's own optimizer and torch's own clipping, nothing of ours in between."""
    expected = Life(None).train(PATTERNS[pattern], norm_type=norm_type)
    for seed in (None, 0, 1):
        with lazily(seed):
            got = Life({**TORCH, "update_in_backward": True, "overlap_forward": True})
            got.train(PATTERNS[pattern], norm_type=norm_type)
            assert_same_life(expected, got)
        hits, misses = got.receipt.speculation_hits, got.receipt.speculation_misses
        assert hits + misses == len(PATTERNS[pattern]) - 1
        if pattern in ("hits", "misses", "mixed"):
            assert (hits > 0, misses > 0) == (pattern != "misses", pattern != "hits")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain"])
def test_the_bits_of_the_plain_step(pattern, mode):
    """The same with our rule, in every mode; the optimizer's clipping is torch's also where nothing is speculative."""
    with lazily(0):
        assert_same_life(
            plain_life(tuple(PATTERNS[pattern])), Life(MODES[mode], by_torch=False).train(PATTERNS[pattern])
        )


@pytest.mark.parametrize("mode", ["plain", "window", "overlap_forward"])
@pytest.mark.parametrize("max_norm", [OVER, WITHIN])
def test_without_speculation_gradients_are_clipped_in_place(mode, max_norm):
    """As torch does it: a loop that logs gradients after clipping sees clipped ones."""
    expected, got = Life(SMALL), Life(MODES[mode], by_torch=False)
    for life in (expected, got):
        life.train([1.0])
        life.backward(1)
        life.clip(max_norm)
    for a, b in zip(expected.model.parameters(), got.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(expected.norms[1], got.norms[1])


def test_without_gradients_there_is_nothing_to_clip():
    for mode in MODES.values():
        life = Life(mode, by_torch=False)
        life.clip(1.0)
        assert float(life.norms[0]) == 0.0
        life.step()
        assert life.receipt.steps == 0


def test_two_calls_in_one_iteration():
    """The second sees what the first left, as with torch: a call with a bound of infinity only measures."""
    calls = [(OVER, INFINITY), (WITHIN, INFINITY), (INFINITY, OVER), (1.0, 0.5), (0.01, 0.02)]

    def live(config):
        life = Life(config)
        for number, bounds in enumerate(calls):
            life.backward(number)
            for bound in bounds:
                life.clip(bound)
            life.step()
        return life

    assert_same_told(live, BOTH, (None, 0, 1, 2))


@pytest.mark.parametrize("scale", [1e6, float("nan")], ids=["too large", "not a number"])
@pytest.mark.parametrize("zeroed_by", ["optimizer", "model"])
def test_an_iteration_that_the_loop_gives_up_after_clipping(scale, zeroed_by):
    """Its norm goes with its gradients: the next ones are clipped by their own, and no step was skipped."""

    def live(config):
        life = Life(config)
        for number in range(7):
            life.backward(number, scale if number == 4 else 1.0)
            life.clip(1e3)
            if life.norms[-1] <= 1e3:
                life.optimizer.step()
            (life.optimizer if zeroed_by == "optimizer" else life.model).zero_grad()
        return life

    for got in assert_same_told(live, BOTH, (None, 0)):
        assert (got.receipt.steps, got.receipt.skipped_steps) == (6, 0)
        assert got.receipt.speculation_hits > 0


def more_state(life, saved):
    life.optimizer.param_groups[0]["amsgrad"] = True


def load_state(life, saved):
    life.optimizer.load_state_dict(saved)


def add_group(life, saved):
    life.model.append(nn.Linear(48, 48, bias=False))
    weight = life.model[-1].weight
    with torch.no_grad():
        weight.copy_(torch.eye(48))
    weight.grad = torch.ones(48, 48)  # not there at the call, so not clipped
    life.optimizer.add_param_group({"params": [weight]})


def replace_gradient(life, saved):
    life.model[3].weight.grad = torch.ones(48, 48)  # another one than was clipped


@pytest.mark.parametrize("change", [more_state, load_state, add_group, replace_gradient], ids=lambda f: f.__name__)
def test_updates_taken_back_after_clipping_are_made_again_with_clipped_gradients(change):
    """Whatever makes them be taken back between clip and step(): torch has clipped by then, and only what was there."""

    def live(config):
        life = Life(config).train([WITHIN] * 3)
        saved = snapshot(life.optimizer)
        life.train([WITHIN], first=3)
        life.backward(4)
        life.clip(OVER)
        change(life, saved)
        life.step()
        return life.train([WITHIN] * 2, first=5)

    for got in assert_same_told(live, BOTH, (None, 0)):
        assert got.receipt.speculation_hits > 0


def sgd(params):
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def test_a_float64_norm_just_over_the_bound_clips():
    """A coefficient of 1 - 1e-9 is not 1, though float32 would say so."""

    bounds = []

    def live(config):
        life = Life(config, dtype=torch.float64, make=sgd)
        for number in range(5):
            life.backward(number)
            norm = nn.utils.get_total_norm([p.grad for p in life.model.parameters()]) if not bounds[4:] else None
            bounds.extend([] if norm is None else [float(norm) * (1 - 1e-9) + 1e-6])
            life.clip(bounds[number])
            life.step()
        return life

    for got in assert_same_told(live, {**TORCH, "update_in_backward": True}, (None, 0), plain=None):
        assert (got.receipt.speculation_hits, got.receipt.speculation_misses) == (0, 4)


@pytest.mark.parametrize("mode", ["plain", "update_in_backward"])
def test_a_float64_norm_that_float32_cannot_hold_is_finite(mode):
    """No step is skipped for it."""

    def live(config):
        life = Life(config, dtype=torch.float64, make=sgd, by_torch=config is None)
        for _ in range(4):
            (life.model(torch.ones(1, 48, dtype=torch.float64)).pow(2).mean() * 1e45).backward()
            life.clip(1.0)
            life.step()
        return life

    got = live({**MODES[mode], "rule": "torch"})
    assert float(got.norms[0]) > 1e39
    assert_same_life(live(None), got)
    assert (got.receipt.steps, got.receipt.skipped_steps) == (4, 0)


# Non-finite gradients


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [INFINITY, -INFINITY, float("nan")])
@pytest.mark.parametrize("where", ["everywhere", "one element"])
def test_non_finite_gradients_leave_everything_as_it_was(mode, value, where, caplog):
    """No weight, no state, no step count; counted and logged. Training goes on as if the iteration had not been."""
    with lazily(0), caplog.at_level(logging.WARNING, logger="offstage"):
        life = Life(MODES[mode], by_torch=False).train([1.0] * 3)
        life.settled()
        weights, state = copy.deepcopy(life.model.state_dict()), snapshot(life.optimizer)
        if where == "everywhere":
            life.backward(3, scale=value)
        else:

            def spoil(gradient):
                spoiled = gradient.clone()
                spoiled.view(-1)[5] = value
                return spoiled

            handle = life.model[2].weight.register_hook(spoil)
            life.backward(3)
            handle.remove()
        life.clip(1.0)
        assert not torch.isfinite(life.norms[-1])
        life.step()
        assert_same_tree(dict(life.model.state_dict()), dict(weights))
        assert_same_tree(life.optimizer.state_dict(), state)
        receipt = life.receipt
        assert (receipt.steps, receipt.skipped_steps) == (3, 1)
        assert len([r for r in caplog.records if "step() changes nothing" in r.getMessage()]) == 1
        life.train([1.0] * 3, first=4)
        life.settled()
    expected = plain_life((1.0,) * 7, skipped=(3,))
    assert_same(expected.model, expected.optimizer, life.model, life.optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 1], [2, 3, 4]], ids=str)
def test_non_finite_gradients_at_any_time(mode, bad):
    """Also before speculation is armed, and several times in a row."""
    expected = plain_life((0.5,) * 7, tuple(bad))
    for seed in (None, 0, 1):
        with lazily(seed):
            life = Life(MODES[mode], by_torch=False)
            for number in range(7):
                life.backward(number, scale=float("nan") if number in bad else 1.0)
                life.clip(0.5)
                life.step()
            life.settled()
        assert_same(expected.model, expected.optimizer, life.model, life.optimizer)
        assert life.receipt.skipped_steps == len(bad)


def test_updates_in_backward_begin_although_the_first_iteration_was_skipped():
    """An overflow in the first step is common; it must not leave everything to step() for ever."""
    life = Life(BACKWARD)
    for number in range(4):
        life.backward(number, scale=float("nan") if number == 0 else 1.0)
        life.clip(WITHIN)
        life.step()
    assert life.receipt.speculation_hits > 0


def test_a_skipped_first_iteration_whose_gradients_the_model_zeroes_does_not_count(caplog):
    """Otherwise every gradient would seem to come in two parts, and nothing would be updated in backward."""
    life = Life(BACKWARD)
    with caplog.at_level(logging.WARNING, logger="offstage"):
        for number in range(4):
            life.backward(number, scale=float("nan") if number == 0 else 1.0)
            life.clip(WITHIN)
            life.optimizer.step()
            life.model.zero_grad()
    assert life.receipt.speculation_hits == 2
    assert ["changes nothing" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("mode", MODES)
def test_two_calls_in_one_iteration_skip_one_step(mode, caplog):
    """Counted once and said once, whichever call finds out."""
    with caplog.at_level(logging.WARNING, logger="offstage"):
        life = Life(MODES[mode], by_torch=False).train([WITHIN] * 3)
        life.backward(3, scale=float("nan"))
        life.clip(INFINITY)
        life.clip(1.0)
        life.step()
        life.train([WITHIN] * 2, first=4)
    assert (life.receipt.steps, life.receipt.skipped_steps) == (5, 1)
    assert len([r for r in caplog.records if "step() changes nothing" in r.getMessage()]) == 1


def test_a_skipped_step_is_no_miss():
    """Nothing was clipped, so it says nothing about whether speculation pays."""
    life = Life(BACKWARD).train([WITHIN] * 3)
    hits = life.receipt.speculation_hits
    life.backward(3, scale=float("nan"))
    life.clip(WITHIN)
    life.step()
    for param in life.model.parameters():
        param.grad = torch.ones_like(param)
    life.clip(1.0)  # nothing was updated in backward this time: clipped where it is
    assert all(float(param.grad.max()) < 1.0 for param in life.model.parameters())
    life.step()
    receipt = life.receipt
    assert receipt.speculation_hits == hits
    assert receipt.speculation_misses <= 1  # at most the skipped step itself, which was taken back


# When it does not pay, or is not possible


def test_it_turns_itself_off_and_on_again(caplog):
    """Always over: misses stop, with one message. Within again: hits come back, with another. The bits never change."""
    pattern = [OVER] * 14 + [WITHIN] * 10
    counted = []
    with lazily(0), caplog.at_level(logging.WARNING, logger="offstage"):
        got = Life(BOTH)
        for number, max_norm in enumerate(pattern):
            got.train([max_norm], first=number)
            counted.append((got.receipt.speculation_hits, got.receipt.speculation_misses))
        assert_same_life(Life(SMALL).train(pattern), got)
    hits, misses = zip(*counted, strict=True)
    assert 2 <= misses[13] < 12
    assert misses[10] == misses[13] == misses[-1]  # off
    assert hits[13] == 0
    assert hits[-1] >= 4  # on again
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "Clipping was active" in told[0]
    assert "not worth redoing" in told[0]
    assert "made again" in told[1]
    assert f"{misses[-1]} misses" in str(got.receipt)


def test_while_it_is_off_gradients_are_not_dropped():
    """External code may look at them, and they are clipped in place."""
    life = Life(BACKWARD).train([OVER] * 12)
    life.backward(12)
    assert not any(isinstance(param.grad, DroppedGradient) for param in life.model.parameters())
    life.clip(OVER)
    assert float(nn.utils.get_total_norm([p.grad for p in life.model.parameters()])) <= 1.01 * OVER


@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_host_memory_everything_is_done_in_step(pattern, caplog):
    """A budget for one set of state: one warning with the numbers, the same bits, and nothing speculative."""
    budget = Life(SMALL).receipt.host_state_bytes
    with caplog.at_level(logging.WARNING, logger="offstage"):
        got = Life({**BOTH, "host_budget": budget}).train(PATTERNS[pattern])
    assert_same_life(plain_life(tuple(PATTERNS[pattern])), got)
    receipt = got.receipt
    assert (receipt.speculation_hits, receipt.speculation_misses) == (0, 0)
    assert receipt.host_state_bytes == budget
    told = [r.getMessage() for r in caplog.records if "second copy of the state" in r.getMessage()]
    assert len(told) == 1
    assert "host_budget" in told[0]


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()], ids=["mmap", "Python"])
@pytest.mark.parametrize("arenas", [0, 1])
def test_a_second_set_that_cannot_be_allocated_loses_nothing(error, arenas, monkeypatch):
    """The step was complete by then. None of a part of it is kept, and the receipt says what is missing."""
    got = Life(BACKWARD)
    got.backward(0)
    got.clip(WITHIN)
    made, allocate = [], host_memory.map_exact

    def fail(nbytes):
        if len(made) == arenas:
            raise error
        made.append(nbytes)
        return allocate(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "map_exact", fail)
        got.step()
    assert len(made) == arenas
    got.train([WITHIN, OVER, WITHIN], first=1)
    assert_same_life(plain_life((WITHIN, WITHIN, OVER, WITHIN)), got)
    receipt = got.receipt
    assert receipt.host_state_bytes == Life(SMALL).receipt.host_state_bytes
    assert (receipt.speculation_hits, receipt.speculation_misses) == (0, 0)
    assert any("second copy of the state" in text for text in receipt.fallbacks)


def test_the_receipt_says_what_clipping_prevents():
    """Without host memory, and while it is turned off; not before, and not any more when it is on again."""
    budget = Life(SMALL).receipt.host_state_bytes
    life = Life({**BACKWARD, "host_budget": budget})
    assert life.receipt.fallbacks == ()
    life.train([WITHIN] * 2)
    assert ["second copy of the state" in text for text in life.receipt.fallbacks] == [True]
    assert life.receipt.fallbacks[0] in str(life.receipt)

    life = Life(BACKWARD).train([WITHIN] * 2)
    assert life.receipt.fallbacks == ()
    life.train([OVER] * 16, first=2)
    assert ["clipping is active too often" in text for text in life.receipt.fallbacks] == [True]
    assert life.receipt.fallbacks[0] in str(life.receipt)
    life.train([WITHIN] * 8, first=18)
    assert life.receipt.fallbacks == ()


def test_a_budget_for_two_sets_is_enough():
    budget = Life(SMALL).receipt.host_state_bytes
    got = Life({**BACKWARD, "host_budget": 2 * budget}).train([WITHIN] * 4)
    assert got.receipt.speculation_hits == 3
    assert got.receipt.host_state_bytes == 2 * budget


def test_without_clipping_there_is_no_second_set():
    assert Life(BACKWARD).train([None] * 4).receipt.host_state_bytes == Life(SMALL).receipt.host_state_bytes


def test_clipping_that_begins_late_raises():
    """The updates of this backward were final. The message says when it is expected; the step itself can be made."""
    life = Life(BACKWARD).train([None] * 3)
    life.backward(3)
    with pytest.raises(OffstageError, match="in every iteration from the first on"):
        life.clip(1.0)
    life.step()
    expected = Life(SMALL).train([None] * 4)
    assert_same(expected.model, expected.optimizer, life.model, life.optimizer)


# The state in between


@pytest.mark.parametrize("pattern", ["hits", "mixed"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_saving_after_every_step(pattern, seed):
    """Each state dict is the plain one, whichever set of arenas holds the state."""
    expected = Life(SMALL)
    with lazily(seed):
        got = Life(BOTH)
        for number, max_norm in enumerate(PATTERNS[pattern]):
            for life in (expected, got):
                life.train([max_norm], first=number)
            assert_same_tree(snapshot(got.optimizer), snapshot(expected.optimizer))
            got.settled()
            assert_same_weights(expected.model, got.model)


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_loading_after_hits(hits):
    """A checkpoint lands in the set that counts, and neither set's old contents come back."""

    def live(config):
        life = Life(config).train([WITHIN] * 2)
        saved, weights = snapshot(life.optimizer), copy.deepcopy(life.model.state_dict())
        life.train([WITHIN] * hits, first=2)
        life.optimizer.load_state_dict(saved)
        life.model.load_state_dict(weights)
        return life.train([WITHIN, OVER, WITHIN, WITHIN], first=9)

    assert_same_told(live, BOTH, (None, 0, 1))


def test_state_written_between_steps():
    """`optimizer.state[p][...]` is the state that counts, after a hit and after a miss."""

    def live(config):
        life = Life(config)
        for number, max_norm in enumerate([WITHIN, WITHIN, WITHIN, OVER, WITHIN, WITHIN]):
            life.train([max_norm], first=number)
            param = life.model[number % LAYERS].weight
            if number % 2:
                life.optimizer.state[param]["exp_avg"].mul_(0.5)
            else:
                life.optimizer.state[param]["exp_avg_sq"] = torch.full((48, 48), 0.01)
        return life

    assert_same_told(live, BOTH, (None, 0, 1))


@pytest.mark.parametrize("max_norm", [WITHIN, OVER])
def test_a_group_added_in_an_armed_loop(max_norm):
    """New state gets a second set too."""

    def live(config):
        life = Life(config).train([max_norm] * 3)
        extra = nn.Linear(48, 48)
        with torch.no_grad():
            for param in extra.parameters():
                param.fill_(0.01)
        life.model.append(extra)
        life.optimizer.add_param_group({"params": [*extra.parameters()], "lr": 0.02})
        return life.train([max_norm, WITHIN, OVER, WITHIN], first=3)

    assert_same_told(live, BOTH, (None, 0, 1))


def test_more_state_in_an_armed_loop():
    """An option that needs another key (amsgrad) lays the state out anew, second set included."""

    def live(config):
        life = Life(config).train([WITHIN] * 3)
        life.optimizer.param_groups[0]["amsgrad"] = True
        return life.train([WITHIN, OVER, WITHIN, WITHIN], first=3)

    assert_same_told(live, BOTH, (None, 0, 1))


def test_state_that_moves_in_an_armed_loop():
    """An option that changes between steps may make streamed state resident, which has no second set."""

    def live(config):
        life = Life({**config, "fraction": 0.5})
        life.train([OVER] * 3)
        placed = {held.param: held.placement for held in runtime_of(life.optimizer).all_states()}
        life.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(48, 48)), nn.Parameter(torch.ones(48))]})
        life.optimizer.param_groups[0]["amsgrad"] = True
        life.train([OVER, WITHIN, OVER], first=3)
        assert any(
            held.placement is not placed.get(held.param, held.placement)
            for held in runtime_of(life.optimizer).all_states()
        )
        return life

    assert_same_told(live, BOTH, (None, 0, 1))


@pytest.mark.parametrize("when", ["before backward", "before step", "after step"])
@pytest.mark.parametrize("pattern", ["hits", "mixed"])
def test_prefetch_in_an_armed_loop(when, pattern):
    """State fetched ahead by hand is of the set that counts when it is used."""

    def live(config):
        life = Life(config)
        fetch = life.optimizer.prefetch if config.get("window") else lambda: None
        for number, max_norm in enumerate(PATTERNS[pattern]):
            if when == "before backward" and number:
                fetch()
            life.backward(number)
            life.clip(max_norm)
            if when == "before step" and number:
                fetch()
            life.step()
            if when == "after step":
                fetch()
        return life

    assert_same_told(live, {**BOTH, "window": "all"}, (None, 0, 1))


# Failing, and memory


class Lending(ImmediateLanes):
    """Lanes that know which device memory they have lent, and can run out of it."""

    def __init__(self, device):
        super().__init__(device)
        self.lent = []
        self.until_failure = None

    def empty(self, nbytes):
        if self.until_failure is not None:
            self.until_failure -= 1
            if self.until_failure < 0:
                raise torch.OutOfMemoryError(f"no room for {nbytes}")
        self.lent.append(super().empty(nbytes))
        return self.lent[-1]

    def drop(self, tensor):
        self.lent = [one for one in self.lent if one.data_ptr() != tensor.data_ptr()]

    def release(self, tensor, after, reason):
        self.drop(tensor)


def lending(config, **options):
    """A life whose lanes count, and those lanes."""
    made = []
    with use_lanes(lambda device: made.append(Lending(device)) or made[-1]):
        life = Life(config, **options)
    return life, made[0]


def num_slots(life):
    return len(runtime_of(life.optimizer).places.engines[CPU].transport.pipeline._slots)


@contextlib.contextmanager
def out_of_memory(life, lanes, where):
    """The third allocation for old weights fails, or the third call of the rule."""
    if where == "old weights":
        lanes.until_failure = 2
        yield
        lanes.until_failure = None
        return
    undo = fail_at(3, runtime_of(life.optimizer).rule, where, torch.OutOfMemoryError(where))
    yield
    undo()


@pytest.mark.parametrize("where", ["old weights", "begin", "update"])
@pytest.mark.parametrize("masters", ["split", "fp32"])
@pytest.mark.parametrize("config", [BACKWARD, BOTH], ids=["update_in_backward", "both"])
def test_out_of_memory_in_backward_is_recovered_from_with_zero_grad(where, masters, config):
    """As everywhere: except, zero_grad(), the next batch. Nothing of the failed backward stays, nor its memory."""
    options = {"dtype": torch.bfloat16}
    expected = Life({**SMALL, "master_weights": masters}, **options).train([WITHIN] * 7)
    got, lanes = lending({**config, "master_weights": masters}, **options)
    got.train([WITHIN] * 4)
    with out_of_memory(got, lanes, where), pytest.raises(torch.OutOfMemoryError):
        got.backward(99)
    got.optimizer.zero_grad()
    got.train([WITHIN] * 3, first=4)
    assert_same_life(expected, got)
    assert got.receipt.weights_written_by_others == 0
    assert got.receipt.speculation_hits == 6
    assert len(lanes.lent) == num_slots(got)


def test_old_weights_that_move_to_the_host_give_their_device_memory_back():
    """Layers that join later push others to the host, while an update with old weights on the device is pending."""
    life, lanes = lending(BOTH)
    everything, some = life.model, life.model[:3]
    for number in range(9):
        life.model = everything if number > 5 else some
        life.train([WITHIN], first=number)
    life.settled()
    assert runtime_of(life.optimizer).places.engines[CPU].arenas.old_weights
    assert len(lanes.lent) == num_slots(life)


# Masters

MASTERS = {
    "fp32": {"master_weights": "fp32"},
    "split": {"master_weights": "split"},
    "none": {"master_weights": "none"},
    "torch's rule": {"rule": "torch", "master_weights": "fp32"},
}


def write_some(model, number):
    """Foreign writes to weights between steps, one way or another."""
    with torch.no_grad():
        if number % 3 == 1:
            model[1].weight.data[3:7] += 0.5
        elif number % 3 == 2:
            model[4].weight.copy_(model[2].weight)
            model[0].bias.data.fill_(0.25)


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("pattern", ["hits", "misses", "mixed"])
@pytest.mark.parametrize("foreign", [False, True], ids=["own weights", "weights written by others"])
def test_masters(masters, pattern, foreign):
    """Masters follow foreign weights exactly as in the plain step, and are counted once, taken back or not."""

    def live(config):
        life = Life({**config, **MASTERS[masters]}, dtype=torch.bfloat16)
        for number, max_norm in enumerate(PATTERNS[pattern]):
            life.train([max_norm], first=number)
            if foreign:
                life.settled()
                write_some(life.model, number)
        return life

    expected = live(SMALL)
    counted = expected.receipt.weights_written_by_others
    assert (counted > 0) == (foreign and masters != "none")
    number = list(MASTERS).index(masters) + list(PATTERNS).index(pattern)
    for seed in (None, 2 * number + foreign):
        with lazily(seed):
            got = live(BOTH)
            assert_same_life(expected, got)
        assert got.receipt.weights_written_by_others == counted
