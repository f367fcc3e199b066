# SPDX-License-Identifier: Apache-2.0
"""Hooks that offload() binds by itself, that find every read of a weight, and that leave without a trace."""

import contextlib
import copy
import gc
import io
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import offstage
from offstage.errors import OffstageError
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import SMALL, adamw, assert_same, assert_same_optimizer, assert_same_weights
from tests.support.lives import CPU, assert_same_lives, end_step, inputs, iterate
from tests.support.overlap import Net
from tests.support.training import lazily

FORWARD = {**SMALL, "overlap_forward": True}
BACKWARD = {**SMALL, "update_in_backward": True}
BOTH = {**SMALL, "overlap_forward": True, "update_in_backward": True}
EVERYTHING = [FORWARD, BACKWARD, BOTH, {**SMALL, "window": "all"}, {**BOTH, "window": "64KiB"}]
NAMES = ["overlap_forward", "update_in_backward", "both", "window", "all three"]
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Mlp(nn.Module):
    """Some layers; `used` says which of them run, in which order."""

    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(layers))
        self.used = range(layers)

    def forward(self, x):
        for number in self.used:
            x = x + torch.tanh(self.layers[number](x))
        return x


def mlp(seed=0, layers=3):
    torch.manual_seed(seed)
    return Mlp(layers)


def plain(model, steps):
    """The same training in `step()` alone."""
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL)
    iterate(model, optimizer, range(steps))
    return optimizer


def offloaded(config, steps=0, **arguments):
    """A model after some steps."""
    model = mlp(**arguments)
    optimizer = offstage.offload(adamw(model.parameters()), model, **config)
    iterate(model, optimizer, range(steps))
    return model, optimizer


def num_pending(optimizer):
    """How many updates are left to the next forward."""
    return sum(len(engine.pending) for engine in runtime_of(optimizer).places.engines.values())


def hooks_of(model):
    """Every hook on any module and any parameter."""
    found = [hook for module in model.modules() for name in HOOKS for hook in vars(module)[name].values()]
    for param in model.parameters():
        found += (param._post_accumulate_grad_hooks or {}).values()
        found += (param._backward_hooks or {}).values()
    return found


# Binding


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_close_takes_all_hooks_off(config):
    """offload() binds the hooks by itself; close() leaves the model as it was, hooks of others included."""
    model = mlp()
    model.layers[0].register_forward_pre_hook(lambda module, args: None)
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda param: None)
    before = hooks_of(model)
    assert len(before) == 2
    optimizer = offstage.offload(adamw(model.parameters()), model, **config)
    iterate(model, optimizer, range(1))
    assert len(hooks_of(model)) > len(before)
    optimizer.close()
    assert hooks_of(model) == before
    model(inputs(0)).sum().backward()  # and the model works on


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_a_dropped_optimizer_leaves_no_hooks(config):
    """No call of close() is needed."""
    model, optimizer = offloaded(config, 3)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert hooks_of(model) == []


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_a_dropped_optimizer_frees_its_memory_at_once(config):
    """Pinned memory of tens of GiB does not wait for the garbage collector: there is no reference cycle."""
    model = mlp()
    gc.collect()
    gc.disable()
    try:
        optimizer = offstage.offload(adamw(model.parameters()), model, **config)
        iterate(model, optimizer, range(3))
        host = runtime_of(optimizer).places.engines[CPU].arenas.sets[0]
        gone = [weakref.ref(one) for one in (optimizer, *host.arenas.values())]
        del optimizer, host
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_dropped_optimizer_has_made_its_last_update(seed):
    """Without a synchronize() before it, also for a parameter that has gaps in memory."""

    def life(settings):
        model = mlp()
        model.layers[0].weight = nn.Parameter((torch.randn(48, 96) / 7)[:, ::2])
        iterate(model, offstage.offload(adamw(model.parameters()), model, **settings), range(4))
        gc.collect()
        return model

    expected = life(SMALL)
    with lazily(seed):
        assert_same_weights(expected, life(FORWARD))


def test_the_hooks_do_not_keep_the_model_alive():
    model, optimizer = offloaded(BOTH, 1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert optimizer.state_dict()["state"]


@pytest.mark.parametrize("config", [SMALL, {"fraction": 0.0}], ids=["plain", "off"])
def test_without_overlap_there_are_no_hooks(config):
    model, _optimizer = offloaded(config, 1)
    assert hooks_of(model) == []


def test_hooks_run_before_those_of_others():
    """A user's pre-hook that reads the weight (weight norm, quantisation) must see the new one."""
    with lazily(0):
        model = mlp()
        read = []
        model.layers[1].register_forward_pre_hook(lambda module, args: read.append(module.weight.detach().clone()))
        optimizer = offstage.offload(adamw(model.parameters()), model, **FORWARD)
        iterate(model, optimizer, range(1))
        model(inputs(0))
    reference = mlp()
    plain(reference, 1)
    assert torch.equal(read[1], reference.layers[1].weight)


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_a_group_added_later_gets_hooks(config):
    """Parameters of a group that comes after some steps overlap like the others."""

    def life(settings):
        model = mlp()
        first, last = [*model.layers[:2].parameters()], [*model.layers[2].parameters()]
        optimizer = offstage.offload(adamw(first), model, **settings)
        iterate(model, optimizer, range(2))
        before = len(hooks_of(model))
        optimizer.add_param_group({"params": last})
        after = len(hooks_of(model))
        iterate(model, optimizer, range(2, 6))
        optimizer.synchronize()
        return model, optimizer, after - before

    expected = life(SMALL)
    for seed in range(3):
        with lazily(seed):
            got = life(config)
        assert got[2] > expected[2] == 0
        assert_same(*expected[:2], *got[:2])


# Several models and optimizers


@pytest.mark.parametrize("seed", range(3))
def test_two_models_with_an_optimizer_each(seed):
    """Neither hears the cues of the other."""
    with lazily(seed):
        models = [mlp(0), mlp(1)]
        optimizers = [
            offstage.offload(adamw(m.parameters()), m, **c) for m, c in zip(models, [BOTH, FORWARD], strict=True)
        ]
        for number in range(5):
            first = models[0](inputs(number))
            models[1](first).pow(2).mean().backward()  # one backward through both
            for optimizer in optimizers[:: 1 if number % 2 else -1]:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.synchronize()
    expected = [mlp(0), mlp(1)]
    plains = [offstage.offload(adamw(m.parameters()), m, **SMALL) for m in expected]
    for number in range(5):
        expected[1](expected[0](inputs(number))).pow(2).mean().backward()
        for optimizer in plains:
            end_step(optimizer)
    for a, b, c, d in zip(expected, plains, models, optimizers, strict=True):
        assert_same(a, b, c, d)
    optimizers[0].close()
    assert hooks_of(models[0]) == []
    assert hooks_of(models[1])


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_two_optimizers_of_one_model(config):
    """Each has its own parameters, and waits for its own updates."""

    def life(settings):
        model = mlp()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        both = [
            offstage.offload(adamw(matrices), model, **settings),
            offstage.offload(torch.optim.SGD(others, lr=0.1, momentum=0.9), model, **settings),
        ]
        for number in range(5):
            model(inputs(number)).pow(2).mean().backward()
            for optimizer in both:
                optimizer.step()
            for optimizer in both:
                optimizer.zero_grad()
        for optimizer in both:
            optimizer.synchronize()
        return model, both

    model, both = life(SMALL)
    for seed in range(3):
        with lazily(seed):
            other, others = life(config)
        assert_same(model, both[0], other, others[0])
        assert_same_optimizer(both[1], others[1])
        others[0].close()
        assert hooks_of(other)
        others[1].close()
        assert hooks_of(other) == []


def test_two_optimizers_of_one_compiled_model_can_be_closed_in_any_order():
    """The call of a module compiled in place is wrapped by both; taking one off leaves the other's cue."""
    for order in (slice(None), slice(None, None, -1)):
        with lazily(0):
            model = mlp()
            for layer in model.layers:
                layer.compile(backend="eager")
            original = [layer._compiled_call_impl for layer in model.layers]
            weights = [p for p in model.parameters() if p.dim() > 1]
            biases = [p for p in model.parameters() if p.dim() == 1]
            pair = [offstage.offload(adamw(params), model, **FORWARD) for params in (weights, biases)]
            for number in range(2):
                model(inputs(number)).pow(2).mean().backward()
                for optimizer in pair:
                    optimizer.step()
            first, second = pair[order]
            first.close()
            assert runtime_of(second).places.engines[CPU].pending
            iterate(model, second, [2])
            second.synchronize()
            second.close()
        assert [layer._compiled_call_impl for layer in model.layers] == original
        assert hooks_of(model) == []
    torch.compiler.reset()


# How modules are used


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
@pytest.mark.parametrize(
    "uses",
    [
        [[0, 1, 2, 0]] * 6,
        [[0, 0, 0]] * 6,
        [[0, 1], [1, 2], [2, 0], [0], [2, 1, 0], [1]],
        [[0, 1, 2], [2], [2], [0], [1, 0, 2]],
    ],
    ids=["one twice", "only one", "varying", "skipped for a while"],
)
def test_modules_called_several_times_or_skipped(config, uses):
    """A module that does not run, or runs again, changes nothing."""

    def life(model, optimizer):
        for number, used in enumerate(uses):
            model.used = used
            iterate(model, optimizer, [number])

    assert_same_lives(life, config, model=mlp)


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_tied_parameters(config):
    """One parameter of two modules: either's forward waits."""

    def tied():
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"table": nn.Embedding(48, 48), "head": nn.Linear(48, 48, bias=False), "mid": nn.Linear(48, 48)}
        )
        model["head"].weight = model["table"].weight
        return model

    def life(model, optimizer):
        for number in range(6):
            # In the fourth step only the second of the two.
            x = inputs(number) if number == 3 else model["table"](torch.arange(number, number + 5))
            model["head"](model["mid"](x)).pow(2).mean().backward()
            end_step(optimizer)

    assert_same_lives(life, config, model=tied)


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_multihead_attention(config):
    """It reads the weight of its `out_proj` without calling it: its own forward waits for that one, too."""

    def life(settings):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(48, 4, batch_first=True)
        optimizer = offstage.offload(adamw(model.parameters()), model, **settings)
        pending = set()
        for number in range(5):
            x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(number))
            model(x, x, x)[0].pow(2).mean().backward()
            optimizer.step()
            pending |= {
                held.name for engine in runtime_of(optimizer).places.engines.values() for held in engine.pending
            }
            optimizer.zero_grad()
        optimizer.synchronize()
        return model, optimizer, pending

    expected = life(SMALL)
    for seed in range(3):
        with lazily(seed):
            got = life(config)
        assert_same(*expected[:2], *got[:2])
        names = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
        assert got[2] == (names if config.get("overlap_forward") else set())
        assert got[1].receipt().fallbacks == expected[1].receipt().fallbacks


class ReadsDirectly(nn.Module):
    """Sometimes calls its layer, sometimes reads its weight; then it can also be in a way that asks nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({"layer": nn.Linear(48, 48)})
        self.directly = False
        self.unasked = False

    def forward(self, x):
        layer = self.inner["layer"]
        if not self.directly:
            return layer(x)
        with torch._C.DisableTorchFunctionSubclass() if self.unasked else contextlib.nullcontext():
            return nn.functional.linear(x, layer.weight, layer.bias)


def test_a_weight_read_by_another_module_is_the_new_one():
    """It waits by itself, and the gradient that comes of it counts."""

    def life(model, optimizer):
        for number in range(6):
            model.directly = number % 2 == 1
            iterate(model, optimizer, [number])

    assert_same_lives(life, FORWARD, BOTH, model=ReadsDirectly)


@pytest.mark.parametrize("micro_batch", ["the last", "an earlier one"])
def test_a_weight_read_without_its_cue_raises_and_names_the_module(micro_batch):
    """The gradient would come from a weight that may be old.

    Also where that gradient is not final yet: the next micro-batch runs the module and would hide it.
    """
    with lazily(0):
        model = ReadsDirectly()
        optimizer = offstage.offload(adamw(model.parameters()), model, **FORWARD)
        iterate(model, optimizer, range(1))
        model.directly = model.unasked = True
        accumulating = contextlib.nullcontext() if micro_batch == "the last" else optimizer.accumulate()
        with pytest.raises(OffstageError) as info, accumulating:
            model(inputs(1)).sum().backward()
    named = ["'inner.layer.", "module 'inner.layer'", "synchronize()", "overlap_forward=False", "compile the model"]
    assert [fragment for fragment in named if fragment not in str(info.value)] == []


def test_a_weight_read_without_its_cue_after_synchronize_is_fine():
    """What the message advises works."""

    def life(model, optimizer):
        for number in range(6):
            model.directly = model.unasked = number % 2 == 1
            if model.directly:
                optimizer.synchronize()
            iterate(model, optimizer, [number])

    assert_same_lives(life, FORWARD, model=ReadsDirectly, seeds=[0])


def synchronize(model, optimizer):
    optimizer.synchronize()


def give_up(model, optimizer):
    optimizer.zero_grad()


def skip_step(model, optimizer):
    model.layers[0].weight.grad.fill_(float("nan"))
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    model.zero_grad()


@pytest.mark.parametrize("waited", [synchronize, give_up, skip_step], ids=lambda f: f.__name__)
def test_a_weight_whose_module_was_skipped_may_be_read_after_the_wait(waited):
    """A backward without the module has waited for its update; what comes after it reads the new weight."""

    def life(model, optimizer):
        iterate(model, optimizer, range(2))
        model.used = [0, 1]
        with optimizer.accumulate():
            model(inputs(2)).pow(2).mean().backward()
        waited(model, optimizer)
        (model(inputs(3)) @ model.layers[2].weight).pow(2).mean().backward()
        optimizer.step()

    assert_same_lives(life, FORWARD, model=mlp, seeds=[0])


def test_gradients_assigned_by_hand():
    """No hook fires and no module runs: step() makes the whole update, whatever the settings."""

    def life(model, optimizer):
        for number in range(5):
            if number in (1, 3):
                for param in model.parameters():
                    param.grad = torch.full_like(param, 0.1 * number)
            else:
                model(inputs(number)).pow(2).mean().backward()
            end_step(optimizer)

    assert_same_lives(life, *EVERYTHING, model=mlp, seeds=[0])


# Compiled modules


def compile_blocks(model, backend):
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend=backend)


def compile_blocks_in_place(model, backend):
    for layer in model.layers:
        layer.compile(backend=backend)


def compile_model_in_place(model, backend):
    model.compile(backend=backend)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "compiled", [compile_blocks, compile_blocks_in_place, compile_model_in_place], ids=lambda f: f.__name__
)
def test_compiled_before_offload(compiled, backend):
    """The cue stands at the boundary of the region and is for all weights within: updates are left to forward."""

    def life(settings, seed):
        model = mlp()
        compiled(model, backend)
        with lazily(seed):
            optimizer = offstage.offload(adamw(model.parameters()), model, **settings)
        left = 0
        for number in range(4):
            model(inputs(number)).pow(2).mean().backward()
            optimizer.step()
            left += num_pending(optimizer)
            optimizer.zero_grad()
        saved = copy.deepcopy(model.state_dict())
        return model, optimizer, left, saved

    expected = life(SMALL, 0)
    for config in (FORWARD, BACKWARD, BOTH):
        for seed in range(2):
            got = life(config, seed)
            assert_same(*expected[:2], *got[:2])
            assert (got[2] > 0) == bool(config.get("overlap_forward"))
            assert all(torch.equal(got[3][key], value) for key, value in expected[3].items())
            got[1].close()
            assert hooks_of(got[0]) == []


def evaluate_original(model):
    return model._orig_mod(inputs(9))


def evaluate_layer(model):
    return model._orig_mod.layers[1](inputs(9))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("evaluate", [evaluate_original, evaluate_layer], ids=lambda f: f.__name__)
@pytest.mark.parametrize("config", [FORWARD, BOTH], ids=["overlap_forward", "both"])
def test_modules_within_a_compiled_region_wait_when_they_are_called_by_themselves(config, evaluate):
    """Training goes through the compiled model, evaluation through the original or a part of it."""

    def life(settings):
        model = torch.compile(mlp(), backend="eager")
        optimizer = offstage.offload(adamw(model.parameters()), model, **settings)
        iterate(model, optimizer, range(3))
        with torch.no_grad():
            return num_pending(optimizer), evaluate(model)

    _, expected = life(SMALL)
    for seed in range(2):
        with lazily(seed):
            left, got = life(config)
        assert left
        assert torch.equal(expected, got)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("config", [FORWARD, BACKWARD, BOTH], ids=NAMES[:3])
def test_a_whole_model_compiled_before_offload(config):
    """`offload(optimizer, torch.compile(model))`."""

    def life(settings):
        model = torch.compile(mlp(), backend="aot_eager")
        optimizer = offstage.offload(adamw(model.parameters()), model, **settings)
        left = 0
        for number in range(4):
            model(inputs(number)).pow(2).mean().backward()
            optimizer.step()
            left += num_pending(optimizer)
            optimizer.zero_grad()
        return model, optimizer, left, copy.deepcopy(model.state_dict()), copy.deepcopy(model._orig_mod.state_dict())

    expected = life(SMALL)
    with lazily(0):
        got = life(config)
    assert_same(*expected[:2], *got[:2])
    assert (got[2] > 0) == bool(config.get("overlap_forward"))
    for before, after in zip(expected[3:], got[3:], strict=True):
        assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "in place"])
def test_compiled_after_offload(in_place, backend, caplog):
    """No cue comes out of such a region: step() waits, says so once, and the bits are right."""

    def life(model, optimizer):
        torch.compiler.reset()
        call = model
        if in_place:
            model.compile(backend=backend)
        else:
            call = torch.compile(model, backend=backend)
        caplog.clear()
        iterate(call, optimizer, range(4))

    for config in (FORWARD, BACKWARD, BOTH):
        with caplog.at_level(logging.WARNING, logger="offstage"):
            assert_same_lives(life, config, model=mlp, seeds=[0])
        told = [record for record in caplog.records if "compiled after offload()" in record.getMessage()]
        assert len(told) == (1 if config.get("overlap_forward") else 0)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_the_middle_of_training(backend):
    """The updates of the last eager step were left to forwards that now give no cue: the region's inputs wait."""

    def life(model, optimizer):
        torch.compiler.reset()
        iterate(model, optimizer, range(1))
        iterate(torch.compile(model, backend=backend), optimizer, range(1, 4))

    assert_same_lives(life, FORWARD, BOTH, model=mlp)


# Reads


def read_model(model):
    return model.state_dict()


def read_submodule(model):
    return {
        f"layers.{number}.{key}": v
        for number, layer in enumerate(model.layers)
        for key, v in layer.state_dict().items()
    }


@pytest.mark.parametrize("config", [FORWARD, BOTH], ids=["overlap_forward", "both"])
@pytest.mark.parametrize("read", [read_model, read_submodule], ids=lambda f: f.__name__)
def test_state_dict_right_after_step(config, read):
    """What is saved is the new weights, though nothing has been waited for."""
    for seed in range(3):
        with lazily(seed):
            model, optimizer = offloaded(config, 3, layers=8)
            assert runtime_of(optimizer).places.engines[CPU].pending
            saved = copy.deepcopy(read(model))
        reference = mlp(layers=8)
        plain(reference, 3)
        expected = reference.state_dict()
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[key], expected[key]) for key in expected)


@pytest.mark.parametrize("config", [FORWARD, BOTH], ids=["overlap_forward", "both"])
def test_load_state_dict_right_after_step(config):
    """An update under way does not overwrite what was loaded, in the model or in a part of it."""

    def life(model, optimizer):
        other = mlp(7)
        iterate(model, optimizer, range(3))
        model.load_state_dict(other.state_dict())
        loaded = [p.detach().clone() for p in model.parameters()]
        iterate(model, optimizer, range(3, 6))
        model.layers[1].load_state_dict(other.layers[1].state_dict())
        iterate(model, optimizer, range(6, 8))
        assert all(torch.equal(a, b) for a, b in zip(loaded, other.parameters(), strict=True))

    assert_same_lives(life, config, model=mlp)


def test_averaging_after_synchronize():
    """An EMA reads all weights: after `synchronize()` it sees the new ones."""

    def life(model, optimizer):
        average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for number in range(4):
            iterate(model, optimizer, [number])
            optimizer.synchronize()
            average.update_parameters(model)
        return [param.detach() for param in average.parameters()]

    assert_same_lives(life, FORWARD, BOTH, model=mlp)


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_evaluation_between_steps(config):
    """Forwards without gradients, of the model or of a part, see the new weights and disturb nothing."""

    def life(model, optimizer):
        results = []
        for number in range(5):
            iterate(model, optimizer, [number])
            if number % 2:
                model.eval()
                with torch.no_grad():
                    results += [model(inputs(50)), model.layers[2](inputs(51))]
                model.train()
        return results

    assert_same_lives(life, config, model=mlp)


# Copies


def by_deepcopy(model):
    return copy.deepcopy(model)


def by_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle], ids=lambda f: f.__name__)
def test_copies_of_the_model_are_bound_to_nothing(config, copied):
    """A copy trains alone, with an optimizer of its own, and gives the original no cue."""
    with lazily(0):
        model, optimizer = offloaded(config, 2)
        optimizer.synchronize()
        twin = copied(model)
        assert_same_weights(model, twin)
        other = offstage.offload(adamw(twin.parameters()), twin, **config)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        running, fired = set(runtime_of(optimizer).overlap._running), runtime_of(optimizer).overlap._fired.total()
        iterate(twin, other, [2])
        assert set(runtime_of(optimizer).overlap._running) == running
        assert runtime_of(optimizer).overlap._fired.total() == fired
        iterate(twin, other, range(3, 5))
        iterate(model, optimizer, range(2, 5))
        other.synchronize()
        optimizer.synchronize()
        assert_same(model, optimizer, twin, other)


# Graph capture


class CapturedLanes(LazyLanes):
    """Lanes that can say that the caller's stream is being captured."""

    now = False

    def capturing(self):
        return self.now

    def submit(self, *args, **kwargs):
        assert not self.now, "work was given to a lane during a capture"
        return super().submit(*args, **kwargs)

    def wait(self, *args, **kwargs):
        assert not self.now, "a captured stream waited for another"
        super().wait(*args, **kwargs)


@pytest.mark.parametrize("config", EVERYTHING, ids=NAMES)
def test_graph_capture_switches_overlap_off(config, caplog):
    """Replays give no cues: from the first capture on step() does everything, says so once, and the bits are right."""
    made = []
    with (
        use_lanes(lambda device: made.append(CapturedLanes(device, seed=0)) or made[-1]),
        caplog.at_level(logging.WARNING, logger="offstage"),
    ):
        model, optimizer = offloaded(config)
        engine = runtime_of(optimizer).places.engines[CPU]
        for number in range(5):
            if number >= 2:
                optimizer.synchronize()  # as torch.cuda.graph does
                made[0].now = True
            model(inputs(number)).pow(2).mean().backward()
            made[0].now = False
            if number >= 2:
                assert all(isinstance(p.grad, torch.Tensor) and p.grad.norm() > 0 for p in model.parameters())
                assert not engine.transport.pipeline.staged
            optimizer.step()
            if number >= 2:
                assert not engine.pending
                assert all(p.grad is not None for p in model.parameters())  # replays write to the same memory
            optimizer.zero_grad()
    told = [record for record in caplog.records if "graph capture" in record.getMessage()]
    assert len(told) == 1
    assert "graph was captured" in "".join(optimizer.receipt().fallbacks)
    reference = mlp()
    assert_same(reference, plain(reference, 5), model, optimizer)


class TimedLanes(CapturedLanes):
    """During a capture no event may be waited for: reading a time does that."""

    def elapsed_ms(self, start, stop):
        assert not self.now, "the host waited for an event during a capture"
        return 1.0


def test_nothing_is_measured_during_a_capture():
    """Warm-up iterations, then a capture, as torch advises: without the model its backward has the first cue."""
    made = []
    with use_lanes(lambda device: made.append(TimedLanes(device, seed=0)) or made[-1]):
        model = mlp()
        optimizer = offstage.offload(adamw(model.parameters()), **BACKWARD)
        runtime_of(optimizer).places.engines[CPU].link_gb_per_s = 10.0
        for number in range(5):
            if number == 3:
                optimizer.synchronize()
                made[0].now = True
            model(inputs(number)).pow(2).mean().backward()
            made[0].now = False
            end_step(optimizer)
    reference = mlp()
    assert_same(reference, plain(reference, 5), model, optimizer)


# Parameters that change


def test_a_parameter_unfrozen_later():
    """It had no hook when the others got theirs."""

    def frozen():
        model = mlp()
        model.layers[1].requires_grad_(False)
        return model

    def life(model, optimizer):
        for number in range(6):
            model.layers[1].requires_grad_(number >= 3)
            model.layers[0].requires_grad_(number < 4)
            iterate(model, optimizer, [number])

    assert_same_lives(life, *EVERYTHING, model=frozen, seeds=range(2))


def test_without_the_model_updates_in_backward_work():
    """`model` is for hooks in forward and for names; gradients have hooks of their own."""

    def life(settings):
        torch.manual_seed(0)
        model = Net()
        optimizer = offstage.offload(adamw(model.parameters()), **settings)
        for _ in range(4):
            model(torch.arange(12).view(2, 6)).pow(2).mean().backward()
            end_step(optimizer)
        return model, optimizer

    expected = life(SMALL)
    for seed in range(3):
        with lazily(seed):
            assert_same(*expected, *life(BACKWARD))
