# SPDX-License-Identifier: Apache-2.0
"""`replan` switches `overlap_forward` and `update_in_backward` between steps: the bits stay, what was learned stays,
and what does not have to move does not. Also `hold_updates` and `gradient_uses`, by which a planner watches a loop.
"""

import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import offstage
from offstage.config import Placement
from offstage.engine import arenas as engine_arenas
from offstage.engine import named_state
from offstage.errors import ConfigError, OffstageError
from offstage.memory.arena import Arena
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.optimizer.overlap.left_gradient import LeftGradient
from tests.support.contract import SMALL, adamw, assert_same, assert_same_tree
from tests.support.refusals import refused
from tests.support.replanned import CLIPS, FORMATS, iterate, loss_of, made, net, plainly_trained, replanned
from tests.support.training import lazily

BOTH = {"overlap_forward": True, "update_in_backward": True}
NONE = {"overlap_forward": False, "update_in_backward": False}
CUES = [dict(zip(BOTH, pair, strict=True)) for pair in itertools.product([False, True], repeat=2)]


def cues_only(rng):
    return rng.choice(CUES)


def cues_and_places(rng):
    changes = dict(rng.choice(CUES)) if rng.random() < 0.7 else {}
    if rng.random() < 0.5:
        changes["fraction"] = rng.choice([0.4, 0.7, 1.0])
    if rng.random() < 0.4:
        changes["update_on"] = rng.choice(["host", "device"])
    return changes


@pytest.mark.parametrize("change", [cues_only, cues_and_places])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_bits_stay(kind, micro_batches, clip, change):
    run = {"kind": kind, "micro_batches": micro_batches, "clip": clip}
    number = [*FORMATS].index(kind) + 3 * [*CLIPS].index(clip) + 12 * (micro_batches - 1)
    for lanes, seed in ((number, 100 + number), (None, number))[: 1 if change is cues_only else 2]:
        assert_same_tree(replanned(change, lanes=lanes, seed=seed, **run), plainly_trained(**run))


@pytest.mark.parametrize("seed", range(4))
def test_the_bits_stay_on_many_lanes(seed):
    run = {"kind": "split masters", "micro_batches": 2, "clip": "both"}
    assert_same_tree(replanned(cues_and_places, lanes=seed, seed=seed, **run), plainly_trained(**run))


# What stays


def hooks_of(model):
    found = []
    for module in model.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                found += hooks.values()
    for param in model.parameters():
        found += [*(param._post_accumulate_grad_hooks or {}).values(), *(param._backward_hooks or {}).values()]
    return found


def test_off_is_off_and_on_is_on():
    model, optimizer = made()
    assert hooks_of(model) == []
    for cues in (*CUES, NONE, BOTH, NONE):
        optimizer.replan(**cues)
        assert bool(hooks_of(model)) == any(cues.values())
        iterate(model, optimizer)
        assert bool(hooks_of(model)) == any(cues.values())
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert bool(hooks_of(model)) == any(cues.values())


def test_one_hook_of_each_kind():
    model, optimizer = made(**BOTH)
    once = len(hooks_of(model))
    for cues in (NONE, BOTH, {"overlap_forward": False}, BOTH):
        optimizer.replan(**cues)
    assert len(hooks_of(model)) == once


def what_backward_left(model, number=0):
    loss_of(model, number).backward()
    return {type(param.grad) for param in model.parameters()}


def test_what_was_learned_survives():
    model, optimizer = made(**BOTH)
    for number in range(2):
        iterate(model, optimizer, number)
    optimizer.replan(**NONE)
    assert what_backward_left(model) == {torch.Tensor}
    optimizer.step()
    optimizer.zero_grad()
    optimizer.replan(update_in_backward=True)
    assert DroppedGradient in what_backward_left(model)
    optimizer.step()


def test_hooks_that_count_without_updates_are_enough():
    model, optimizer = made(overlap_forward=True)
    iterate(model, optimizer)
    optimizer.replan(update_in_backward=True, overlap_forward=False)
    found = what_backward_left(model)
    assert DroppedGradient in found
    assert LeftGradient not in found
    optimizer.step()


def test_without_hooks_before_the_first_iteration_learns():
    model, optimizer = made()
    iterate(model, optimizer)
    optimizer.replan(update_in_backward=True)
    assert what_backward_left(model) == {LeftGradient}
    optimizer.step()
    optimizer.zero_grad()
    assert DroppedGradient in what_backward_left(model)
    optimizer.step()


def test_what_checkpointing_runs_again_is_known_before_updates_are_switched_on():
    """A module that is run again after its gradient has come must not be updated before; seen without the updates."""

    class Twice(nn.Module):
        """The gradient of `one` comes from its second call only, before checkpointing runs the first one again."""

        def __init__(self):
            super().__init__()
            self.one = nn.Linear(40, 40)
            self.two = nn.Linear(40, 40)

        def forward(self, x):
            hidden = checkpoint(lambda x: self.two(self.one(x).detach()), x, use_reentrant=False)
            return self.one(hidden)

    def run(change, **config):
        torch.manual_seed(0)
        model = Twice()
        optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, **config)
        for number in range(5):
            model(torch.full((2, 40), 0.1 * (number + 1))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if change and number == 1:
                optimizer.replan(update_in_backward=True, overlap_forward=False)
        optimizer.synchronize()
        return model, optimizer

    assert_same(*run(False, fraction=0.0), *run(True, overlap_forward=True))


def test_an_iteration_whose_first_gradients_were_not_seen_teaches_nothing():
    model, optimizer = made()
    loss_of(model, 0).backward()
    optimizer.replan(update_in_backward=True)
    loss_of(model, 1).backward()  # the hooks fire once, and the gradients came in two parts
    optimizer.step()
    optimizer.zero_grad()
    assert runtime_of(optimizer).overlap.selection.is_learning
    for _ in range(2):
        loss_of(model, 0).backward()
    optimizer.step()


# Nothing moves


def host_memory(optimizer):
    """Which arenas there are, and how large."""
    return [
        (key, id(arena), arena.flat.data_ptr(), arena.nbytes)
        for engine in runtime_of(optimizer).engines
        for host in engine.arenas.sets
        for key, arena in (*host.arenas.items(), *host.spare.items())
    ]


@pytest.mark.parametrize("place", [{}, {"fraction": 0.5}, {"update_on": "host"}, {"weights": "host"}], ids=str)
def test_nothing_moves_where_places_stay(place):
    model, optimizer = made(**place)
    iterate(model, optimizer)
    before, states = host_memory(optimizer), runtime_of(optimizer).all_states()
    weights = [param.data_ptr() for param in model.parameters()]
    with mock.patch.object(Arena, "__init__", side_effect=AssertionError("an arena was made")):
        for cues in (*CUES, NONE, BOTH):
            optimizer.replan(**cues)
            optimizer.replan(**cues, **place)  # said again: nothing changes
    assert host_memory(optimizer) == before
    assert runtime_of(optimizer).all_states() == states
    assert [param.data_ptr() for param in model.parameters()] == weights


def test_a_fraction_that_comes_to_the_same_moves_nothing():
    model, optimizer = made(fraction=0.5)
    iterate(model, optimizer)
    before = host_memory(optimizer)
    placements = optimizer.plan.placements
    optimizer.replan(fraction=0.50001, slots=2)
    assert optimizer.plan.placements == placements
    assert optimizer.config.slots == 2
    assert optimizer.plan.slots == 2
    assert host_memory(optimizer) == before
    iterate(model, optimizer)
    optimizer.replan(fraction=1.0)
    assert set(optimizer.plan.placements) == {Placement.STREAMED}
    assert host_memory(optimizer) != before


def test_places_are_made_anew_after_parameters_have_come():
    """A budget that new parameters did not find room in is divided again."""
    model, optimizer = made(fraction=0.5)
    iterate(model, optimizer)
    more = [nn.Parameter(torch.ones(3000)) for _ in range(4)]
    optimizer.add_param_group({"params": more})
    for param in more:
        param.grad = torch.ones_like(param)
    optimizer.step()
    told = optimizer.plan.host_bytes
    fresh = offstage.offload(adamw([*net().parameters(), *more]), **SMALL, fraction=0.5).plan.host_bytes
    optimizer.replan(fraction=0.5)
    assert optimizer.plan.host_bytes == fresh
    assert told != fresh


# Speculation


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("steps", [3, 4, 5])
def test_off_gives_the_second_set_back(weights, steps):
    """After an odd and after an even number of flips."""

    def run(switches, **config):
        model, optimizer = made(**config)
        plain = sum(engine.transport.host_bytes for engine in runtime_of(optimizer).engines)
        for number in range(steps):
            iterate(model, optimizer, number, clip=1e4)
        if switches:
            runtime = runtime_of(optimizer)
            assert runtime.speculation.possible
            optimizer.replan(update_in_backward=False)
            assert not any(engine.arenas.has_spare or engine.arenas.old_weights for engine in runtime.engines)
            assert not runtime.speculation.possible
            gradients = sum(engine.transport.gradients.nbytes for engine in runtime.engines)
            assert sum(engine.transport.host_bytes for engine in runtime.engines) == plain + gradients
            assert weights == "host" or not gradients
            for layer in runtime.weights.layers if weights == "host" else ():  # not in memory that was given back
                starts = [(arena.flat.data_ptr(), arena.nbytes) for arena in layer._arenas.values()]
                for weight in layer.weights:
                    assert any(0 <= weight.host.data_ptr() - start < size for start, size in starts)
                    assert weight.param.data_ptr() == weight.host.data_ptr()
        iterate(model, optimizer, 10, clip=1e4)
        if switches:
            optimizer.replan(update_in_backward=True)
            assert runtime.speculation.possible
            assert DroppedGradient in what_backward_left(model, 11)
            optimizer.clip_grad_norm_(1e-3)
            optimizer.step()
            optimizer.zero_grad()
        else:
            iterate(model, optimizer, 11, clip=1e-3)
        iterate(model, optimizer, 12, clip=1e4)
        optimizer.synchronize()
        return model, optimizer

    plain = run(False, fraction=0.0)
    for lanes in (None, 0, 1):
        with lazily(lanes):
            assert_same(*plain, *run(True, update_in_backward=True, weights=weights))


def test_a_loop_that_clipped_before_is_speculative_from_the_first_backward():
    model, optimizer = made(overlap_forward=True)
    for number in range(2):
        iterate(model, optimizer, number, clip=1e4)
    optimizer.replan(update_in_backward=True)
    loss_of(model, 2).backward()
    assert runtime_of(optimizer).iteration.speculative
    optimizer.clip_grad_norm_(1e4)
    optimizer.step()
    assert optimizer.receipt().speculation_hits == 1


# Gradients that have left


@pytest.mark.parametrize(
    "changes", [NONE, {**NONE, "fraction": 0.5}, {"update_in_backward": False, "update_on": "host"}]
)
@pytest.mark.parametrize("lanes", [None, 0, 1])
@pytest.mark.parametrize("ends", ["accumulated", "skipped"])
def test_gradients_that_have_left_are_not_lost(changes, lanes, ends):
    def run(switches, **config):
        model, optimizer = made(**config)
        loss_of(model, 0).backward()
        if ends == "skipped":
            optimizer.clip_grad_norm_(1e-3)
        if switches:
            assert all(isinstance(param.grad, LeftGradient) for param in model.parameters())
            optimizer.replan(**changes)
        if ends == "accumulated":
            loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        for number in range(2, 4):
            iterate(model, optimizer, number)
        optimizer.synchronize()
        return model, optimizer

    with lazily(lanes):
        model, optimizer = run(True, update_in_backward=True)
    assert_same(*run(False, fraction=0.0), model, optimizer)
    assert not any(engine.transport.gradients.nbytes for engine in runtime_of(optimizer).engines)


# Refused, and failed


def test_between_backward_and_step():
    model, optimizer = made(**BOTH)
    for number in range(2):
        iterate(model, optimizer, number)
    loss_of(model, 2).backward()
    refused(OffstageError, lambda: optimizer.replan(**NONE), "between backward and step")
    assert optimizer.config.update_in_backward
    optimizer.step()


def test_forward_cues_need_the_model():
    model = net()
    optimizer = offstage.offload(adamw(model.parameters()), **SMALL)
    refused(ConfigError, lambda: optimizer.replan(overlap_forward=True), "needs the model", "found no model")
    optimizer.replan(update_in_backward=True)
    assert optimizer.config.update_in_backward
    assert not optimizer.config.overlap_forward


@pytest.mark.usefixtures("process_group")
def test_ddp_is_refused():
    model = DistributedDataParallel(net())
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL)
    refused(
        ConfigError, lambda: optimizer.replan(update_in_backward=True), "DistributedDataParallel reduces them later"
    )
    assert hooks_of(model.module) == []
    iterate(model, optimizer)


def test_a_failure_changes_nothing():
    model, optimizer = made(update_in_backward=True)
    plain_model, plain = made(fraction=0.0)
    for number in range(3):
        iterate(model, optimizer, number, clip=1e4)
        iterate(plain_model, plain, number, clip=1e4)
    hooks, memory, config = hooks_of(model), host_memory(optimizer), optimizer.config
    with (
        mock.patch.object(named_state, "adopt", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        optimizer.replan(**NONE, fraction=0.5)
    assert (hooks_of(model), host_memory(optimizer), optimizer.config) == (hooks, memory, config)
    assert runtime_of(optimizer).speculation.possible
    assert DroppedGradient in what_backward_left(model, 3)
    optimizer.clip_grad_norm_(1e4)
    optimizer.step()
    iterate(plain_model, plain, 3, clip=1e4)
    assert_same(plain_model, plain, model, optimizer)


# A planner's view of the loop


@pytest.mark.parametrize("clip", [None, 1e4, 1e-3])
@pytest.mark.parametrize("lanes", [None, 0])
def test_updates_can_be_held(clip, lanes):
    model, optimizer = made(fraction=0.0)
    for number in range(9):
        iterate(model, optimizer, number, clip)
    with lazily(lanes):
        other, ours = made(update_in_backward=True)
        runtime = runtime_of(ours)
        for number in range(9):
            if number in (0, 5):
                runtime.hold_updates = True
                assert not any(engine.arenas.has_spare for engine in runtime.engines)
            if number in (3, 7):
                runtime.hold_updates = False
            loss_of(other, number).backward()
            found = {type(param.grad) for param in other.parameters()}
            if runtime.hold_updates:
                assert found == {LeftGradient}
            else:  # clipping that is always active is noticed while updates are held, too
                assert (DroppedGradient in found) == (not runtime.speculation.is_off)
            if clip is not None:
                ours.clip_grad_norm_(clip)
            ours.step()
            ours.zero_grad()
            assert runtime.hold_updates or runtime.speculation.possible == (clip is not None)
        ours.synchronize()
    assert_same(model, optimizer, other, ours)


def test_held_gradients_keep_their_memory():
    """A new arena for each gradient in each iteration would take longer than the iteration."""
    model, optimizer = made(update_in_backward=True)
    runtime_of(optimizer).hold_updates = True
    for number in range(2):
        iterate(model, optimizer, number)
    with (
        mock.patch.object(engine_arenas, "Arena", side_effect=AssertionError),
        mock.patch.object(Arena, "__init__", side_effect=AssertionError),
    ):
        iterate(model, optimizer, 2)
    runtime_of(optimizer).hold_updates = False
    for number in range(2):
        iterate(model, optimizer, number)
    assert not any(engine.transport.gradients.nbytes for engine in runtime_of(optimizer).engines)


def test_memory_of_held_gradients_goes_with_the_updates_in_backward():
    model, optimizer = made(update_in_backward=True)
    runtime_of(optimizer).hold_updates = True
    iterate(model, optimizer)
    assert all(engine.transport.gradients.nbytes for engine in runtime_of(optimizer).engines)
    optimizer.replan(update_in_backward=False)
    assert not any(engine.transport.gradients.nbytes for engine in runtime_of(optimizer).engines)


USES = {
    "torch's clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm": lambda model: model.first.weight.grad.norm(),
    "data": lambda model: model.first.weight.grad.data,
    "set data": lambda model: setattr(model.first.weight.grad, "data", torch.ones_like(model.first.weight)),
    "numpy": lambda model: model.first.weight.grad.numpy(),
    "item": lambda model: model.first.weight.grad.sum().item(),
    "tolist": lambda model: model.first.bias.grad.tolist(),
    "cpu": lambda model: model.first.weight.grad.cpu(),
    "in place": lambda model: model.first.weight.grad.mul_(2.0),
    "unscaling": lambda model: torch._amp_foreach_non_finite_check_and_unscale_(
        [model.first.weight.grad], torch.zeros(1), torch.ones(1)
    ),
}


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("use", USES)
def test_uses_of_gradients_are_counted(use, weights):
    model, optimizer = made(update_in_backward=True, weights=weights)
    runtime = runtime_of(optimizer)
    runtime.hold_updates = True
    loss_of(model, 0).backward()
    assert runtime.gradient_uses == 0
    USES[use](model)
    assert runtime.gradient_uses > 0
    runtime.gradient_uses = 0
    assert runtime.gradient_uses == 0


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("lanes", [None, 0])
def test_own_uses_are_not_counted(weights, lanes):
    with lazily(lanes):
        model, optimizer = made(update_in_backward=True, weights=weights)
    runtime = runtime_of(optimizer)
    runtime.hold_updates = True
    for number in range(4):
        with optimizer.accumulate():
            loss_of(model, number).backward()
        loss_of(model, number + 10).backward()
        loss_of(model, number + 20).backward()  # autograd adds to what has left
        assert all(isinstance(param.grad, LeftGradient) for param in model.parameters())
        optimizer.clip_grad_norm_((1e4, 1e-3)[number % 2])
        optimizer.clip_grad_norm_(1e-4, norm_type=float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        optimizer.state_dict()
        model.state_dict()
        optimizer.receipt()
    loss_of(model, 30).backward()
    optimizer.replan(fraction=0.5) if weights == "device" else optimizer.replan(overlap_forward=True)
    optimizer.step()
    assert runtime.gradient_uses == 0
