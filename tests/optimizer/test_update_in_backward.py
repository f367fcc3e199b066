# SPDX-License-Identifier: Apache-2.0
"""`update_in_backward`: a gradient is freed as soon as it is used; code that reads it later gets an error."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import offstage
from offstage.errors import ConfigError, OffstageError, StepLostError
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from tests.support.contract import SMALL, adamw, assert_same, one_process_group, snapshot
from tests.support.lives import assert_same_lives, clip_to, end_step, fail_at, inputs, iterate, loss_of, stack
from tests.support.training import lazily

BACKWARD = {**SMALL, "update_in_backward": True}
BOTH = {**BACKWARD, "overlap_forward": True}
LAYERS = 8
CLIPS = pytest.mark.parametrize("clip", [None, 1e4, 1e-6], ids=["no clipping", "hits", "misses"])
CONFIGS = pytest.mark.parametrize("config", [BACKWARD, BOTH], ids=["update_in_backward", "both"])


def trained(config, steps=3, clip=None, **options):
    """A model after some steps, so that the next backward updates everything."""
    model = stack()
    optimizer = offstage.offload(adamw(model.parameters(), **options), model, **config)
    iterate(model, optimizer, range(steps), clip)
    return model, optimizer


@functools.cache
def plainly_trained(steps, clip=None):
    """To compare with: no test may change it."""
    return trained(SMALL, steps, clip)


def saved_copy(model, optimizer):
    return copy.deepcopy(model.state_dict()), snapshot(optimizer)


def dropped(model):
    """Which parameters have a gradient that was used and freed."""
    return [isinstance(param.grad, DroppedGradient) for param in model.parameters()]


def between(config=None, clip=None):
    """The same, between backward and step()."""
    model, optimizer = trained(BACKWARD if config is None else config, clip=clip)
    loss_of(model, 3).backward()
    assert isinstance(model[-1].weight.grad, DroppedGradient)
    return model, optimizer


# Dropped gradients


def scaler():
    made = torch.amp.GradScaler("cpu")
    made.scale(torch.zeros(()))
    return made


USES = {
    "total_norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "total_norm_one_by_one": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "clip_values": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "unscale": lambda _, optimizer: scaler().unscale_(optimizer),
    "scaled_step": lambda _, optimizer: scaler().step(optimizer),
    "log_norm": lambda model, _: model[0].weight.grad.norm(),
    "look_for_nan": lambda model, _: torch.isnan(model[0].weight.grad).any(),
    "copy_to_host": lambda model, _: model[0].weight.grad.to("cpu", torch.float64),
    "scale_in_place": lambda model, _: [param.grad.mul_(0.5) for param in model.parameters()],
    "flatten": lambda model, _: nn.utils.parameters_to_vector([param.grad for param in model.parameters()]),
    "zero_in_place": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "second_backward": lambda model, _: (model[0].weight * 2).sum().backward(),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_a_dropped_gradient_is_told(use):
    """Nothing computes a norm of 0, clips nothing or adds to nothing: it raises, and says what to do instead."""
    model, optimizer = between()
    with pytest.raises(OffstageError) as info:
        USES[use](model, optimizer)
    message = str(info.value)
    expected = ["optimizer.clip_grad_norm_(max_norm)", "optimizer.accumulate()", "update_in_backward=False", "step()"]
    for fragment in [*expected, ".weight'"]:
        assert fragment in message


@pytest.mark.parametrize("use", ["tolist", "numpy", "item"])
def test_a_dropped_gradient_has_no_numbers(use):
    """Where torch itself refuses before offstage can say why: still an error, never a number."""
    model, _ = between()
    with pytest.raises(RuntimeError):
        getattr(model[0].bias.grad, use)()


@pytest.mark.parametrize("use", ["total_norm", "clip_values", "unscale", "log_norm"])
def test_the_step_can_still_be_made_after_such_a_raise(use):
    """It is the use that failed, not the update."""
    model, optimizer = between()
    with pytest.raises(OffstageError):
        USES[use](model, optimizer)
    optimizer.step()
    iterate(model, optimizer, range(4, 6))
    assert_same(*plainly_trained(6), model, optimizer)


def test_a_dropped_gradient_looks_like_the_gradient_it_was():
    """Shape, dtype and device are known; it prints without its values."""
    model, _ = between()
    gradient = model[2].weight.grad
    assert (gradient.shape, gradient.dtype, gradient.device) == ((48, 48), torch.float32, torch.device("cpu"))
    assert repr(gradient) == "DroppedGradient('2.weight')"


@CONFIGS
@CLIPS
def test_after_step_there_are_no_dropped_gradients(config, clip):
    """`step()` takes them away: `p.grad` is None, or a gradient that clipping gave back."""
    model, optimizer = between(config, clip)
    clip_to(optimizer, clip)
    optimizer.step()
    assert not any(dropped(model))
    if clip != 1e-6:
        assert all(param.grad is None for param in model.parameters())


def test_the_first_iteration_keeps_its_gradients():
    """It is a plain one: it counts how often each parameter's gradient arrives."""
    model, optimizer = trained(BACKWARD, 0)
    loss_of(model, 0).backward()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)) > 0
    end_step(optimizer)
    loss_of(model, 1).backward()
    assert any(dropped(model))


@pytest.mark.parametrize("clip", [None, 1e4])
def test_what_is_left_to_step(clip):
    """Some of what forward needs first, where forward waits for it; nothing where step() does."""
    for config in (BACKWARD, BOTH):
        model, optimizer = trained(config, steps=1, clip=clip)  # nothing is measured yet
        loss_of(model, 3).backward()
        left = [param for param in model.parameters() if not isinstance(param.grad, DroppedGradient)]
        assert bool(left) is (config is BOTH)
        assert all(param is kept for param, kept in zip(model.parameters(), left, strict=False))
        clip_to(optimizer, clip)
        optimizer.step()


def test_the_memory_of_gradients_is_given_back_during_backward():
    """At no time is there more than a part of all gradients; at the end of backward there is next to none."""
    model = stack()
    seen, most = [], []

    def look(param):
        seen.append(StorageWeakRef(param.grad.untyped_storage()))
        most.append(sum(not storage.expired() for storage in seen))

    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(look)
    optimizer = offstage.offload(adamw(model.parameters()), model, **BACKWARD)
    iterate(model, optimizer, range(1))
    assert max(most) <= LAYERS / 2  # they leave for the host while it is learned which are final
    iterate(model, optimizer, range(1, 3))
    seen.clear()
    most.clear()
    loss_of(model, 3).backward()
    assert len(most) == LAYERS
    assert max(most) <= LAYERS / 2
    assert sum(not storage.expired() for storage in seen) <= LAYERS / 4
    optimizer.step()
    assert all(storage.expired() for storage in seen)


def test_speculation_keeps_gradients_until_the_norm_is_known():
    model, optimizer = trained(BACKWARD, clip=1e4)
    loss_of(model, 3).backward()
    gradients = [StorageWeakRef(g.untyped_storage()) for g in runtime_of(optimizer).iteration.gradients.values()]
    assert len(gradients) == 2 * LAYERS
    optimizer.clip_grad_norm_(1e4)
    optimizer.step()
    assert all(storage.expired() for storage in gradients)


# Between backward and step()


def test_a_changed_hyperparameter_loses_the_step():
    """The updates in backward used the old one. The message says how to go on, and that works."""
    model, optimizer = trained(BACKWARD)
    weights, saved = saved_copy(model, optimizer)
    loss_of(model, 3).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StepLostError, match="hyperparameter changed between backward and step"):
        optimizer.step()
    for action in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StepLostError, match="load_state_dict"):
            action()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    iterate(model, optimizer, range(3, 6))
    assert_same(*plainly_trained(6), model, optimizer)


def test_a_changed_tensor_lr_loses_the_step():
    """Also where only the value in the tensor has changed."""
    model, optimizer = trained(BACKWARD, lr=torch.tensor(0.01))
    loss_of(model, 3).backward()
    optimizer.param_groups[0]["lr"].mul_(0.5)
    with pytest.raises(StepLostError, match="hyperparameter"):
        optimizer.step()


@pytest.mark.parametrize("clip", [1e4, 1e-6], ids=["within", "over"])
def test_a_changed_hyperparameter_with_clipping_is_no_loss(clip):
    """Speculative updates are taken back and made again with the new one."""

    def life(model, optimizer):
        iterate(model, optimizer, range(3), clip)
        loss_of(model, 3).backward()
        optimizer.clip_grad_norm_(clip)
        optimizer.param_groups[0]["lr"] = 0.5
        end_step(optimizer)
        iterate(model, optimizer, range(4, 6), clip)

    assert_same_lives(life, BOTH, seeds=range(3))


def test_bookkeeping_in_a_group_is_nobodys_hyperparameter():
    """Entries that the optimizer's class does not know may change at any time, and need not even be comparable."""
    model, optimizer = trained(BACKWARD)
    group = optimizer.param_groups[0]
    group["seen"], group["curve"] = 0, [torch.zeros(3), torch.ones(3)]
    for number in range(3, 6):
        loss_of(model, number).backward()
        assert isinstance(model[-1].weight.grad, DroppedGradient)
        group["seen"] += 1
        group["curve"] = [torch.full((3,), float(number)), torch.ones(3)]
        end_step(optimizer)
    expected = plainly_trained(6)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected[0].parameters(), strict=True))


@CLIPS
def test_a_group_with_a_gradient_added_between_backward_and_step(clip):
    """What a parameter found in this backward takes part in the step after it."""

    def life(model, optimizer):
        iterate(model, optimizer, range(3), clip)
        more = nn.Parameter(torch.zeros(48))
        for number in range(3, 6):
            (loss_of(model, number) + more.sin().sum()).backward()
            if number == 3:
                optimizer.add_param_group({"params": [more]})
            end_step(optimizer, clip)
        optimizer.synchronize()
        return more.detach()

    assert_same_lives(life, BOTH, seeds=[None, 0])


def test_groups_changed_between_backward_and_step():
    """A group added in between leaves the step lost, or whole."""
    model, optimizer = between()
    more = nn.Parameter(torch.ones(100))
    optimizer.add_param_group({"params": [more]})
    try:
        optimizer.step()
    except StepLostError:
        return
    optimizer.synchronize()
    expected, _ = plainly_trained(4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert optimizer.state[more] == {}


@pytest.mark.parametrize("clip", [None, 1e4], ids=["no clipping", "clipping"])
@CONFIGS
def test_a_forward_between_backward_and_step_raises(config, clip):
    """Some weights are new and some are old. Names the module; the step can be made afterwards."""
    model, optimizer = between(config, clip)
    for context in (torch.enable_grad, torch.no_grad):
        with context(), pytest.raises(OffstageError) as info:
            loss_of(model, 4)
        for fragment in ("'0'", "between backward and step()", "optimizer.accumulate()", "step() first"):
            assert fragment in str(info.value)
    clip_to(optimizer, clip)
    optimizer.step()
    loss_of(model, 4)
    optimizer.synchronize()
    assert_same(*plainly_trained(4, clip), model, optimizer)


READS = {
    "save_optimizer": lambda _, optimizer: optimizer.state_dict(),
    "read_state": lambda model, optimizer: optimizer.state[model[0].weight],
    "save_model": lambda model, _: model.state_dict(),
    "save_layer": lambda model, _: model[3].state_dict(),
}


@CLIPS
@pytest.mark.parametrize("read", READS)
def test_reading_between_backward_and_step_raises(read, clip):
    """What would be saved is neither before nor after the step. The step itself is not harmed."""
    for seed in (None, 0, 1, 2):
        with lazily(seed):
            model, optimizer = between(clip=clip)
            with pytest.raises(OffstageError, match=r"between backward and step\(\).*Read them after step\(\)"):
                READS[read](model, optimizer)
            end_step(optimizer, clip)
            READS[read](model, optimizer)
            iterate(model, optimizer, range(4, 6), clip)
            optimizer.synchronize()
        assert_same(*plainly_trained(6, clip), model, optimizer)


@CLIPS
@pytest.mark.parametrize("action", ["synchronize", "receipt", "evict"])
@pytest.mark.parametrize("seed", range(3))
def test_waiting_between_backward_and_step_changes_nothing(action, clip, seed):
    """`synchronize()` and `receipt()` may be called anywhere."""
    with lazily(seed):
        model, optimizer = between(BOTH, clip=clip)
        getattr(optimizer, action)()
        clip_to(optimizer, clip)
        getattr(optimizer, action)()
        end_step(optimizer)
        getattr(optimizer, action)()
        iterate(model, optimizer, range(4, 6), clip)
        optimizer.synchronize()
    assert_same(*plainly_trained(6, clip), model, optimizer)


@CLIPS
@pytest.mark.parametrize("seed", range(3))
def test_loading_between_backward_and_step(clip, seed):
    """A checkpoint may be loaded anywhere, into model and optimizer: the backward before it is forgotten."""
    with lazily(seed):
        model, optimizer = trained(BOTH, clip=clip)
        weights, saved = saved_copy(model, optimizer)
        iterate(model, optimizer, range(3, 5), clip)
        loss_of(model, 5).backward()
        optimizer.load_state_dict(saved)
        model.load_state_dict(weights)
        optimizer.zero_grad()
        iterate(model, optimizer, range(3, 6), clip)
        optimizer.synchronize()
    assert_same(*plainly_trained(6, clip), model, optimizer)


@CLIPS
def test_closing_between_backward_and_step(clip):
    """Nothing hangs or crashes, under lanes that have done nothing yet."""
    with lazily(0):
        model, optimizer = between(BOTH, clip=clip)
        optimizer.close()
    assert all(torch.isfinite(param).all() for param in model.parameters())


@pytest.mark.parametrize("clip", [None, 1e4], ids=["no clipping", "clipping"])
def test_after_closing_between_backward_and_step(clip):
    """Half a step says so, a speculative one is taken back; another optimizer finds no dropped gradients."""
    model, optimizer = trained(BACKWARD, clip=clip)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 3).backward()
    optimizer.close()
    assert not any(dropped(model))
    if clip is None:
        for action in (optimizer.step, optimizer.state_dict):
            with pytest.raises(StepLostError, match="closed between backward and step"):
                action()
    else:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(before)
    model.zero_grad()
    other = offstage.offload(adamw(model.parameters()), model, **BACKWARD)
    iterate(model, other, range(3))


@pytest.mark.parametrize("when", ["before backward", "after backward", "after clipping"])
@CLIPS
def test_a_gradient_set_by_hand_for_a_frozen_parameter(when, clip):
    """It shares its chunk with parameters that backward updates: it is updated all the same, and counted."""

    def frozen():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        model[1].requires_grad_(False)
        return model

    def life(model, optimizer):
        for number in range(6):
            if when == "before backward":
                model[1].weight.grad = torch.ones(8, 8)
            model(inputs(number, 8)).pow(2).mean().backward()
            if when == "after backward":
                model[1].weight.grad = torch.ones(8, 8)
            clip_to(optimizer, clip)
            if when == "after clipping":
                model[1].weight.grad = torch.ones(8, 8)
            end_step(optimizer)
        if not optimizer.config.update_in_backward:  # reading state waits for it
            assert float(optimizer.state[model[1].weight]["step"]) == 6

    assert_same_lives(life, BACKWARD, model=frozen, seeds=[None, 0])


def test_a_gradient_set_by_hand_after_its_update_raises():
    """It would be a second update of the same parameter in one step, or be ignored."""
    model, optimizer = between()
    model[3].weight.grad = torch.ones(48, 48)
    with pytest.raises(OffstageError, match=r"3\.weight"):
        optimizer.step()


# Between step() and backward


@CONFIGS
@CLIPS
def test_hyperparameters_changed_between_step_and_backward(config, clip):
    """The usual place. Also options that need more state (amsgrad): it is laid out before the first update."""

    def life(model, optimizer):
        iterate(model, optimizer, range(3), clip)
        optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.6))
        iterate(model, optimizer, range(3, 5), clip)
        optimizer.param_groups[0]["amsgrad"] = True
        iterate(model, optimizer, range(5, 8), clip)

    assert_same_lives(life, config, seeds=[None, 0, 1])


@CONFIGS
@pytest.mark.parametrize("clip", [None, 1e4], ids=["no clipping", "hits"])
def test_parameters_removed_from_their_group(config, clip):
    """`param_groups` is the truth: what is no longer in it is not updated, and its gradient is left alone."""

    def life(model, optimizer):
        iterate(model, optimizer, range(3), clip)
        removed = [id(param) for param in model[3].parameters()]
        group = optimizer.param_groups[0]
        group["params"] = [param for param in group["params"] if id(param) not in removed]
        for number in range(3, 6):
            loss_of(model, number).backward()
            clip_to(optimizer, clip)
            optimizer.step()
            model.zero_grad()

    assert_same_lives(life, config, seeds=[0])


# Which gradients are final


class SharedBlock(nn.Module):
    """A block that reentrant checkpointing runs backward through twice, and layers that it does not touch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(48, 48)
        self.others = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x):
        for other in self.others:
            x = torch.tanh(other(checkpoint(self.shared, x, use_reentrant=True)))
        return x


def test_parameters_that_fire_several_times_wait_for_step():
    """Their gradient is there, whole, until then; the others are updated at once. The bits are the plain ones."""

    def life(model, optimizer):
        for number in range(5):
            model(inputs(number).requires_grad_()).pow(2).mean().backward()
            if optimizer.config.update_in_backward and number > 1:
                assert not isinstance(model.shared.weight.grad, DroppedGradient)
                assert isinstance(model.others[1].weight.grad, DroppedGradient)
            end_step(optimizer)

    assert_same_lives(life, BACKWARD, model=SharedBlock)


def test_parameters_that_once_fired_several_times_wait_for_ever():
    """Also where that was not in the first iteration: a layer that joins later, and fires twice now and then."""

    def life(model, optimizer):
        for number, fires in enumerate((0, 2, 1, 2, 1, 2)):
            x = inputs(number)
            losses = [(model if fires else model[:-1])(x).pow(2).mean()]
            if fires == 2:
                losses.append(model[-1](x).pow(2).mean())
            for loss in losses:
                loss.backward()
            assert not isinstance(model[-1].weight.grad, DroppedGradient)
            end_step(optimizer)

    assert_same_lives(life, BACKWARD, seeds=[None])


class Target(nn.Module):
    """One layer is used with gradient outside a checkpointed part and, while `inside`, without one inside."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant, self.inside = use_reentrant, True
        self.first, self.layer = nn.Linear(128, 128), nn.Linear(128, 128)

    def part(self, x):
        with torch.no_grad():
            target = torch.tanh(self.layer(x)) if self.inside else x.tanh()
        return self.first(x) * target

    def forward(self, x):
        return self.layer(checkpoint(self.part, x, use_reentrant=self.use_reentrant))

    def train_once(self, optimizer, number, clip):
        self(inputs(number, 128).requires_grad_()).pow(2).mean().backward()
        end_step(optimizer, clip)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("clip", [None, 1e4], ids=["no clipping", "hits"])
def test_checkpointing_that_reads_a_weight_again_after_its_gradient(use_reentrant, clip):
    """The second forward reads what the first one read: the update waits for step()."""

    def life(model, optimizer):
        for number in range(5):
            model.train_once(optimizer, number, clip)

    assert_same_lives(life, BACKWARD, model=functools.partial(Target, use_reentrant), seeds=[None])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("clip", [None, 1e4], ids=["no clipping", "hits"])
def test_checkpointing_that_begins_to_read_an_updated_weight_raises(use_reentrant, clip):
    """Where that is not so from the first iteration on, the update has been made: names the module and what to do."""
    model = Target(use_reentrant)
    optimizer = offstage.offload(adamw(model.parameters()), model, **BACKWARD)
    model.inside = False
    for number in range(3):
        model.train_once(optimizer, number, clip)
    model.inside = True
    with pytest.raises(OffstageError, match=r"'layer' again.*update_in_backward=False"):
        model.train_once(optimizer, 3, clip)


def test_micro_batches_without_accumulate_in_the_first_iteration():
    """A loop that accumulates from the start without saying so has all updates in step(), with the right bits."""

    def life(model, optimizer):
        for number in range(4):
            for part in range(2):
                loss_of(model, 10 * number + part).backward()
            end_step(optimizer)

    assert_same_lives(life, BOTH, seeds=[0])


def test_a_backward_that_is_run_again_in_the_first_iteration_counts_once():
    """A rerun before the first step (line search, out of memory) does not make every gradient look unfinished."""
    model, optimizer = trained(BACKWARD, 0)
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    iterate(model, optimizer, range(3))
    loss_of(model, 3).backward()
    assert any(dropped(model))
    optimizer.step()
    assert_same(*plainly_trained(4), model, optimizer)


def test_everything_under_accumulate_is_left_to_step():
    """Forgetting the last backward outside accumulate() costs time, not bits."""
    model, optimizer = trained(BACKWARD, 0)
    for number in range(5):
        with optimizer.accumulate():
            loss_of(model, number).backward()
        assert not any(dropped(model))
        end_step(optimizer)
    assert_same(*plainly_trained(5), model, optimizer)


def test_accumulate_nests_and_ends_with_an_exception():
    model, optimizer = trained(BACKWARD)
    with pytest.raises(ZeroDivisionError), optimizer.accumulate(), optimizer.accumulate():
        raise ZeroDivisionError
    iterate(model, optimizer, range(3, 4))
    loss_of(model, 4).backward()
    assert isinstance(model[0].weight.grad, DroppedGradient)
    optimizer.step()
    assert_same(*plainly_trained(5), model, optimizer)


@CLIPS
@CONFIGS
def test_closure(config, clip):
    """`step(closure)`: the backward inside it updates like any other."""

    def life(model, optimizer):
        def closure(number):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            clip_to(optimizer, clip)
            return loss

        return [optimizer.step(functools.partial(closure, number)).detach() for number in range(5)]

    assert_same_lives(life, config)


@CONFIGS
def test_zeroing_in_place_after_step(config):
    """`zero_grad(set_to_none=False)` after step() leaves zeros to accumulate into, whatever step() has taken."""

    def life(model, optimizer):
        for number in range(5):
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    assert_same_lives(life, config)


@pytest.mark.parametrize("clip", [None, 1e-6], ids=["no clipping", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [BACKWARD, BOTH, {**SMALL, "overlap_forward": True}], ids=["backward", "both", "forward"]
)
def test_a_layer_that_is_skipped_after_zeroing_in_place_is_decayed_and_counted(config, dtype, clip):
    """It has a zero gradient then, as in plain torch; its moments shrink, its weights decay and its step counts."""

    def life(model, optimizer):
        for number in range(7):
            x = inputs(number).to(dtype)
            for layer in [layer for place, layer in enumerate(model) if (place + number) % 3 or number < 2]:
                x = layer(x)
            x.float().pow(2).mean().backward()
            clip_to(optimizer, clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 4)
        assert {int(optimizer.state[param]["step"]) for param in model.parameters()} == {6, 7}

    assert_same_lives(life, config, model=functools.partial(stack, dtype=dtype))


# Failing


class Interrupted(Exception):
    """Something of the user's that fails."""


def fail_in_backward(model, number):
    """A backward that raises after the gradients of about half the layers."""

    def fail(gradient):
        raise Interrupted

    handle = model[LAYERS // 2].weight.register_hook(fail)
    try:
        with pytest.raises(Interrupted):
            loss_of(model, number).backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_an_exception_in_backward_loses_the_step(seed):
    """Half of the weights are new: no step, no forward and no checkpoint passes that over; loading one helps."""
    with lazily(seed):
        model, optimizer = trained(BACKWARD)
        weights, saved = saved_copy(model, optimizer)
        fail_in_backward(model, 3)
        assert runtime_of(optimizer).iteration.early
        optimizer.zero_grad()
        with pytest.raises(OffstageError):
            loss_of(model, 3)
        with pytest.raises(OffstageError):
            optimizer.state_dict()
        with pytest.raises(StepLostError):
            optimizer.step()
        optimizer.load_state_dict(saved)
        model.load_state_dict(weights)
        iterate(model, optimizer, range(3, 6))
        optimizer.synchronize()
    assert_same(*plainly_trained(6), model, optimizer)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_checkpoint_is_loaded_in_any_order_after_a_failed_backward(first, seed):
    """Into the model first, too: it is what the message advises."""
    with lazily(seed):
        model, optimizer = trained(BACKWARD)
        weights, saved = saved_copy(model, optimizer)
        fail_in_backward(model, 3)
        if first == "model":
            model.load_state_dict(weights)
            with pytest.raises(StepLostError):
                optimizer.step()
        optimizer.load_state_dict(saved)
        if first == "optimizer":
            model.load_state_dict(weights)
        optimizer.zero_grad()
        iterate(model, optimizer, range(3, 6))
        optimizer.synchronize()
    assert_same(*plainly_trained(6), model, optimizer)


@pytest.mark.parametrize("where", ["take", "begin"])
@pytest.mark.parametrize("clip", [None, 1e4], ids=["no clipping", "clipping"])
def test_a_backward_that_fails_before_its_first_update_costs_nothing(where, clip):
    """Nothing was changed: zero_grad(), and the next iteration is a good one. No gradient of the failed one is used."""

    def life(model, optimizer):
        iterate(model, optimizer, range(3), clip)
        if optimizer.config.update_in_backward:
            runtime = runtime_of(optimizer)
            owner, name = (runtime.engines[0].transport, "prepare") if where == "take" else (runtime.rule, "begin")
            undo = fail_at(1, owner, name, torch.OutOfMemoryError(where))
            with pytest.raises(torch.OutOfMemoryError):
                loss_of(model, 99).backward()
            undo()
            assert not runtime_of(optimizer).iteration.early
            optimizer.zero_grad()
        iterate(model[:-1], optimizer, [3], clip)
        iterate(model, optimizer, range(4, 6), clip)

    assert_same_lives(life, BACKWARD, seeds=[None])


@pytest.mark.parametrize("clip", [1e4, 1e-6], ids=["hits", "misses"])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_an_exception_in_backward_with_clipping_never_leaves_half_a_step(clip, seed):
    """The old weights are still there: whatever goes on does so from them, or raises."""
    with lazily(seed):
        model, optimizer = trained(BACKWARD, clip=clip)
        weights, saved = saved_copy(model, optimizer)
        fail_in_backward(model, 3)
        optimizer.zero_grad()
        try:
            iterate(model, optimizer, range(3, 6), clip)
        except OffstageError:
            optimizer.load_state_dict(saved)
            model.load_state_dict(weights)
            optimizer.zero_grad()
            iterate(model, optimizer, range(3, 6), clip)
        optimizer.synchronize()
    assert_same(*plainly_trained(6, clip), model, optimizer)


def test_an_update_that_fails_in_backward_loses_the_step():
    """As in step(): the weights are between two steps, and nothing is saved or trained on."""
    model, optimizer = trained(BACKWARD)
    weights, saved = saved_copy(model, optimizer)
    undo = fail_at(3, runtime_of(optimizer).rule, "update", Interrupted())
    with pytest.raises((Interrupted, StepLostError)):
        loss_of(model, 3).backward()
    undo()
    with pytest.raises(OffstageError):
        optimizer.state_dict()
    with pytest.raises(StepLostError):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    iterate(model, optimizer, range(3, 6))
    assert_same(*plainly_trained(6), model, optimizer)


# Refusals


def test_ddp_is_refused():
    """It reduces gradients after they were used. Refused at offload(), or in the first forward of a later wrapping."""
    with one_process_group():
        wrapped = DistributedDataParallel(stack())
        with pytest.raises(ConfigError, match=r"DistributedDataParallel.*overlap_forward=True"):
            offstage.offload(adamw(wrapped.parameters()), wrapped, **BACKWARD)
        model, optimizer = trained(BACKWARD, 0)
        with pytest.raises(ConfigError, match=r"DistributedDataParallel.*overlap_forward=True"):
            loss_of(DistributedDataParallel(model), 0)
        optimizer.close()


def test_overlap_forward_and_window_work_with_ddp():
    """What the refusal advises."""

    def life(model, optimizer):
        iterate(model, optimizer, range(4))

    with one_process_group():
        config = {"overlap_forward": True, "window": "all"}
        assert_same_lives(life, config, model=lambda: DistributedDataParallel(stack()))


def test_gradients_of_several_streams_are_not_taken_together(monkeypatch):
    """The lanes wait for the stream on which the gradients are taken: it must be the one that made them."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(32)))
    config = {"update_in_backward": True, "min_bytes": 0, "chunk_bytes": "64KiB"}
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, **config)
    engine = runtime_of(optimizer).engines[0]
    place_of = {param: number % 2 for number, layer in enumerate(model) for param in layer.parameters()}
    now, taken = [0], []
    monkeypatch.setattr(engine.transport.lanes, "here", lambda: now[0])
    take = engine.take

    def noted(updates, **more):
        taken.append((now[0], [update.of.param for update in updates]))
        take(updates, **more)

    for param, place in place_of.items():
        param.register_hook(lambda grad, place=place: now.__setitem__(0, place))
    for number in range(4):
        if number == 3:
            monkeypatch.setattr(engine, "take", noted)
        model(torch.full((2, 16), 0.1 * (number + 1))).sum().backward()
        seen = list(taken)
        optimizer.step()
        optimizer.zero_grad()
    taken = seen  # in backward
    assert sum(len(params) for _, params in taken) >= 4
    assert {place for place, _ in taken} == {0, 1}
    assert all(place_of[param] == place for place, params in taken for param in params)
    assert any(len(params) > 1 for _, params in taken)
