# SPDX-License-Identifier: Apache-2.0
"""Every wait is needed: each is dropped in turn on the lazy backend, and each must be caught.

`pytest tests/lanes/test_waits.py -o log_cli=true -o log_cli_level=INFO` lists the waits and what caught each first.
"""

import contextlib
import functools
import gc
import itertools
import logging
import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import offstage
from offstage.activations.offload import offload_activations
from offstage.engine.gradients import HostGradient
from offstage.engine.timer import StepTimer
from offstage.errors import OffstageError, StepLostError
from offstage.lanes.link import link_for, measure_duplex
from offstage.lanes.testing.lazy import WaitLog
from offstage.memory.pool import HostPool
from offstage.optimizer.optimizer import runtime_of
from tests.support.lives import end_step, fail_at
from tests.support.params import result
from tests.support.training import lazily

SEEDS = range(6)
ON_HOST, MIXED = {"update_on": "host"}, {"host_fraction": 0.5}
SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}


def make(params=6, size=900, **config):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size).bfloat16()) for _ in range(params)]
    settings = {**SMALL, **({} if config.get("update_on") == "host" else {"slots": 2}), **config}
    return weights, offstage.offload(torch.optim.AdamW(weights, lr=0.1), **settings)


def steps(weights, optimizer, count=3):
    for step in range(count):
        for i, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 0.01 * (i + step + 1))
        end_step(optimizer)


def weights_of(params):
    return [param.detach().clone() for param in params]


# Parameters without a model


def stepped(**config):
    weights, optimizer = make(**config)
    steps(weights, optimizer)
    return result(weights, optimizer)


def only_reads_weights(**config):
    weights, optimizer = make(**config)
    steps(weights, optimizer)
    return weights_of(weights)


def larger_slots_needed_later(more, **config):
    """A group added between steps needs larger slots: the old ones go behind their last store."""
    weights, optimizer = make(**config)
    steps(weights, optimizer, 2)
    weights.append(nn.Parameter(torch.randn(more).bfloat16()))
    optimizer.add_param_group({"params": weights[-1:]})
    steps(weights, optimizer, 2)
    return result(weights, optimizer)


def closed(**config):
    weights, optimizer = make(**config)
    steps(weights, optimizer)
    optimizer.close()
    return weights_of(weights)


def loaded_in_between(**config):
    weights, optimizer = make(**config)
    steps(weights, optimizer, 2)
    _, other = make(**config)
    optimizer.load_state_dict(other.state_dict())
    steps(weights, optimizer, 2)
    return result(weights, optimizer)


def lost_and_loaded(broken, **config):
    """A step that fails half-way, then a checkpoint. Its weights are not defined, so only the state counts."""
    weights, optimizer = make(**config)
    saved = optimizer.state_dict()
    steps(weights, optimizer, 1)
    undo = broken(runtime_of(optimizer).rule)
    with pytest.raises(StepLostError):
        steps(weights, optimizer, 1)
    undo()
    optimizer.load_state_dict(saved)
    steps(weights, optimizer, 2)
    return result(weights, optimizer)[len(weights) :]


def _raise(*_):
    raise ZeroDivisionError


def breaking_an_update(rule):
    return fail_at(3, rule, "update", ZeroDivisionError())


def breaking_a_slice(rule):
    slices, calls = rule.slices, []

    def some_fail(shares):
        calls.append(1)
        return [_raise] if len(calls) == 3 else slices(shares)

    rule.slices = some_fail
    return lambda: setattr(rule, "slices", slices)


def wider_gradients(**config):
    """In the middle of a step larger staging buffers take the place of those in use."""
    weights, optimizer = make(**config)
    for step in range(3):
        for i, weight in enumerate(weights):
            weight.grad_dtype = None
            dtype = torch.float32 if i == 3 and step == 1 else torch.bfloat16
            weight.grad = torch.full((4000,), 0.01 * (i + step + 1), dtype=dtype)
        end_step(optimizer)
    return result(weights, optimizer)


# Models


def make_model(**config):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    settings = {**SMALL, **({} if config.get("update_on") == "host" else {"slots": 2}), **config}
    return model, offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.01), model, **settings)


def backward(model, step):
    model(torch.full((3, 40), 0.1 * (step + 1))).pow(2).mean().backward()


def iterate(model, optimizer, steps=range(4), clip=None):
    for step in steps:
        backward(model, step)
        end_step(optimizer, None if clip is None else clip[step % len(clip)])


def model_result(model, optimizer):
    optimizer.synchronize()
    return result(model.parameters(), optimizer)


def iterated(numbers=range(4), clip=None, **config):
    model, optimizer = make_model(**config)
    iterate(model, optimizer, numbers, clip)
    return model_result(model, optimizer)


FORWARD = {"overlap_forward": True}


def overlapped(numbers=range(2), **config):
    """Updates of the last step are left to a forward."""
    model, optimizer = make_model(**FORWARD, **config)
    iterate(model, optimizer, numbers)
    return model, optimizer


def module_skipped(**config):
    """No forward waits for what did not run; backward may write into the gradients' memory."""
    model, optimizer = overlapped(**config)
    model[0](torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()
    return model_result(model, optimizer)


def dropped(**config):
    """The optimizer goes while updates are under way: they end first."""
    model, optimizer = overlapped(range(4), **config)
    del optimizer
    gc.collect()
    return weights_of(model.parameters())


def model_saved(**config):
    model, _optimizer = overlapped(**config)
    return [value.clone() for value in model.state_dict().values()]


def state_asked_for(**config):
    """Whether a parameter has state is known when its first update has been waited for."""
    model, optimizer = overlapped(range(1), **config)
    return [torch.tensor([param in optimizer.state for param in model.parameters()])]


def synchronized(**config):
    model, optimizer = overlapped(**config)
    optimizer.synchronize()
    return weights_of(model.parameters())


def first_iteration():
    """Its gradients leave, those of resident state, too, and return for their updates."""
    with mock.patch("offstage.optimizer.overlap.leaving.LEAST_LEAVING", 0):
        return iterated(range(3), update_in_backward=True, fraction=0.5)


def gradients_by_hand(**config):
    """A step after which no module ran: the next one finds its updates still under way."""
    model, optimizer = overlapped(**config)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model_result(model, optimizer)


def group_added(**config):
    model, optimizer = overlapped(**config)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3000))]})
    iterate(model, optimizer, range(2, 4))
    return model_result(model, optimizer)


def closed_after_a_step(**config):
    model, optimizer = overlapped(**config)
    optimizer.close()
    return weights_of(model.parameters())


def loaded_after_a_step(**config):
    model, optimizer = overlapped(**config)
    _, other = make_model(**config)
    optimizer.load_state_dict(other.state_dict())
    iterate(model, optimizer, range(2, 4))
    return model_result(model, optimizer)


AFTER_AN_OVERLAPPED_STEP = [
    module_skipped,
    dropped,
    model_saved,
    state_asked_for,
    synchronized,
    gradients_by_hand,
    group_added,
    closed_after_a_step,
    loaded_after_a_step,
]
"""Each of them where the device updates, and where the host does."""


def window_evicted():
    """What was fetched ahead is dropped before it was used, and its slot is needed again."""
    model, optimizer = make_model(window="64KiB")
    for step in range(4):
        backward(model, step)
        if step == 2:
            optimizer.evict()
        end_step(optimizer)
        optimizer.evict()
    return model_result(model, optimizer)


# Snapshots


def saved_meanwhile(optimizer, train_on):
    """What a writer reads of snapshots that `train_on` has overwritten."""
    lines = []
    runtime_of(optimizer).drain_state()
    snapshots = runtime_of(optimizer).take_snapshots()
    train_on()
    for held in runtime_of(optimizer).all_states():
        snapshot = snapshots[id(held.home)]
        for key in held.keys:
            line = torch.empty(key.numel(held.local), dtype=key.dtype)
            snapshot.read(held.index, key.name, 0, line.numel(), into=line)
            lines.append(line)
    return lines


def saved_while_training():
    weights, optimizer = make(size=4000)
    steps(weights, optimizer, 2)
    return saved_meanwhile(optimizer, lambda: steps(weights, optimizer, 2))


def on_host_saved_while_training():
    """The last updates, and with them the copies, are still to come when step() returns."""
    model, optimizer = overlapped(**ON_HOST)
    return saved_meanwhile(optimizer, lambda: iterate(model, optimizer, range(1)))


def saved_with_speculation():
    """Steps go to the other set of arenas; the second of them to the one that is being saved."""
    model, optimizer = make_model(update_in_backward=True)
    iterate(model, optimizer, range(3), clip=[1e4])
    return saved_meanwhile(optimizer, lambda: iterate(model, optimizer, range(3), clip=[1e4]))


# Activations, and weights on the host for other optimizers


class Layers(nn.Module):
    def __init__(self, layer=nn.Linear):
        super().__init__()
        self.layers = nn.ModuleList(layer(40, 40) for _ in range(6))

    def forward(self, x):
        x = x.to(next(self.parameters()).dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().pow(2).mean()


def activations_offloaded():
    torch.manual_seed(0)
    model = Layers()
    handle = offload_activations(model, min_bytes=0)
    for step in range(3):
        model(torch.full((3 + step, 40), 0.1 * (step + 1))).backward()
    del handle
    return [param.grad for param in model.parameters()]


def activations_made_again():
    """In the first iteration everything moves; then host memory that is not needed any more is given back."""
    torch.manual_seed(0)
    model = Layers()
    for number, layer in enumerate(model.layers):
        model.layers[number] = nn.Sequential(layer, nn.SiLU(), nn.Linear(40, 40))
    slabs = {"_SMALLEST_SLAB": 512, "_LARGEST_SLAB": 512}
    with mock.patch.multiple("offstage.memory.pool", **slabs):
        handle = offload_activations(model, min_bytes=0)
        host_bytes = []
        for _ in range(3):
            model(torch.full((3, 40), 0.1)).backward()
            host_bytes.append(handle.host_bytes)
    assert host_bytes[0] > host_bytes[1] == host_bytes[2]
    return [param.grad for param in model.parameters()]


def activations_of_a_forward_without_backward():
    """What has just left, and what has just come back, is dropped unused; its memory is used again."""
    torch.manual_seed(0)
    model = Layers()
    handle = offload_activations(model, min_bytes=0)
    x = torch.ones(3, 40, requires_grad=True)
    for _ in range(3):
        model(x)
        loss = model(x)
        model.layers[3].weight.register_hook(_raise)
        with contextlib.suppress(ZeroDivisionError):
            loss.backward()
        model.layers[3].weight._backward_hooks.clear()
        del loss
        model.zero_grad()
        model(x).backward()
    del handle
    return [param.grad for param in model.parameters()]


def make_host_weights(**config):
    torch.manual_seed(0)
    model = Layers()
    handle = offload_activations(model, min_bytes=0, weights=True, **config)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), handle


def weights_on_the_host():
    """An optimizer on the host writes what was fetched; gradients of two micro-batches are added there."""
    model, optimizer, handle = make_host_weights()
    for step in range(3):
        for number in range(2):
            model(torch.full((3, 40), 0.1 * (step + number + 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    del handle
    return [param.detach().clone() for param in model.parameters()]


def weights_sent_for_and_not_used():
    """A forward that fails, and a backward that does: what was on its way is dropped."""
    model, optimizer, handle = make_host_weights(activations=False, prefetch=2)
    x = torch.ones(3, 40)
    for _ in range(3):
        model(x).backward()
        hook = model.layers[2].register_forward_pre_hook(_raise)
        with contextlib.suppress(ZeroDivisionError):
            model(x)
        hook.remove()
        hook = model.layers[3].weight.register_hook(_raise)
        with contextlib.suppress(ZeroDivisionError):
            model(x).backward()
        hook.remove()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return [param.detach().clone() for param in model.parameters()]


# Weights on the host


HOSTED = {"weights": "host"}


class Unbiased(nn.Linear):
    """Two chunks. Its bias may get a gradient, and gets none."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs + 16)
        self.outputs = outputs

    def forward(self, x):
        return nn.functional.linear(x, self.weight)[:, : self.outputs]


class Wide(nn.Module):
    """Some chunks, also of those that the CPU updates; one weight is in two of them."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 200, bias=False), nn.Linear(200, outputs)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def make_hosted(layer=nn.Linear, dtype=torch.float32, **config):
    torch.manual_seed(0)
    model = Layers(layer).to(dtype)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, offstage.offload(adamw, model, **{**SMALL, "slots": 2, **HOSTED, **config})


def hosted(numbers=range(3), clip=None, micro_batches=1, clip_grad_norm=None, before_step=None, between=None, **config):
    """A loop with weights on the host. `before_step` and `between` may return tensors."""
    model, optimizer = make_hosted(**config)
    found = []
    for step in numbers:
        for number in range(micro_batches):
            with optimizer.accumulate() if number < micro_batches - 1 else contextlib.nullcontext():
                model(torch.full((3, 40), 0.1 * (step + number + 1))).backward()
        if before_step is not None:
            found += before_step(model) or []
        if clip is not None:
            max_norm = clip[step % len(clip)]
            norm = (
                clip_grad_norm(model, max_norm) if clip_grad_norm is not None else optimizer.clip_grad_norm_(max_norm)
            )
            found.append(norm.clone())
        end_step(optimizer)
        if between is not None:
            found += between(model, optimizer) or []
    return found + model_result(model, optimizer)


def torchs_own(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def by_torch_in_parts(model, max_norm):
    """Two norms, which find two factors for gradients of one chunk."""
    large = [param for param in model.parameters() if param.dim() > 1]
    small = [param for param in model.parameters() if param.dim() == 1]
    return nn.utils.clip_grad_norm_(large, max_norm) + nn.utils.clip_grad_norm_(small, 0.5 * max_norm)


def run_a_layer(model):
    """The next one is sent for, and not used."""
    with torch.no_grad():
        model.layers[2](torch.ones(3, 40, dtype=model.layers[2].weight.dtype))


def hold_gradients(model):
    model.held = [param.grad for param in model.parameters()]


def use_held_gradients(model, optimizer):
    """Behind a step that still reads them: they come to the device, scaled, and go back."""
    return [gradient.norm() for gradient in model.held]


def read_gradients(model):
    """They stay on the host, where they are read."""
    return [param.grad.clone() for param in model.parameters()]


def write_gradients(model):
    """A norm that is not known brings them back; then they are written where they are."""
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters()], float("inf"))
    for param in model.parameters():
        param.grad.mul_(0.5).add_(torch.full_like(param, 0.01))
    return [norm]


def set_gradients(model):
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01)


def step_by_hand(model, optimizer):
    """A step without a forward: the one before may still wait for it."""
    set_gradients(model)
    end_step(optimizer)


def read_state_dict(model, optimizer):
    return [value.clone() for value in model.state_dict().values()]


def load_model(model, optimizer):
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


def write_weights(model, optimizer):
    optimizer.synchronize()
    for param in model.parameters():
        param.data.mul_(0.9)


def evaluate(model, optimizer):
    with torch.no_grad():
        return [model(torch.ones(3, 40)), model.layers[2](torch.ones(3, 40))]


def replan(model, optimizer):
    optimizer.replan(fraction=1.0)


def load_optimizer(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def hosted_closed(**config):
    model, optimizer = make_hosted(**config)
    for step in range(3):
        model(torch.full((3, 40), 0.1 * (step + 1))).backward()
        end_step(optimizer)
    optimizer.close()
    return weights_of(model.parameters())


def hosted_dropped(**config):
    """The optimizer goes while updates are under way: they end first."""
    model, optimizer = make_hosted(**config)
    for step in range(3):
        model(torch.full((3, 40), 0.1 * (step + 1))).backward()
        end_step(optimizer)
    del optimizer
    gc.collect()
    return weights_of(model.parameters())


def hosted_layers_skipped(**config):
    """Layers that did not run still have updates to come, and were sent for in vain."""
    model, optimizer = make_hosted(**config)
    for step in range(5):
        x = torch.full((3, 40), 0.1 * (step + 1))
        loss = model(x) if step % 2 == 0 else model.layers[4](model.layers[1](x)).pow(2).mean()
        loss.backward()
        end_step(optimizer)
    return model_result(model, optimizer)


def hosted_saved_while_training(**config):
    """The last updates, and with them the copies, are still to come when step() returns."""
    model, optimizer = make_hosted(**config)

    def train():
        for step in range(2):
            model(torch.full((3, 40), 0.1 * (step + 1))).backward()
            end_step(optimizer)

    train()
    return saved_meanwhile(optimizer, train)


def hosted_saved_with_speculation(**config):
    model, optimizer = make_hosted(update_in_backward=True, **config)

    def train():
        for step in range(3):
            model(torch.full((3, 40), 0.1 * (step + 1))).backward()
            end_step(optimizer, 1e4)

    train()
    return saved_meanwhile(optimizer, train)


# Sleep


def slept(numbers=range(4), micro_batches=2, before_step=None, **config):
    """Between micro-batches, and after the step: what comes back goes again, and is used in other orders."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if config:
        optimizer = offstage.offload(optimizer, model, **{**SMALL, **config})
    with mock.patch.multiple("offstage.phases.parking", _SMALL=0, _BATCH=1):
        for step in numbers:
            for number in range(micro_batches):
                backward(model, step + number)
                offstage.sleep(model, optimizer)
                offstage.wake(model, optimizer)
                if step % 2:
                    offstage.sleep(model, keep=("weights",))
                    offstage.wake(model)
            if before_step is not None:
                before_step(model)
            optimizer.step()
            optimizer.zero_grad()
            offstage.sleep(optimizer, model)
            offstage.wake(model, optimizer)
    return [*weights_of(model.parameters()), *(one.clone() for one in optimizer.state_dict()["state"][0].values())]


def slept_and_dropped():
    """The memory of what was on its way is used again when it has come."""
    for _ in range(3):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        backward(model, 0)
        with mock.patch.multiple("offstage.phases.parking", _SMALL=0, _BATCH=1):
            offstage.sleep(model)
            offstage.wake(model)
            found = weights_of(list(model.parameters())[:2])
        del model
        gc.collect()
    return found


def wake_refused():
    """The device fills up on the way: what has come is given back."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    resize = torch.UntypedStorage.resize_
    with mock.patch.multiple("offstage.phases.parking", _SMALL=0, _BATCH=1, _SEGMENT=1):
        for room in range(8):
            left = iter(range(room))
            offstage.sleep(model)

            def full(self, nbytes, left=left):
                if nbytes and next(left, None) is None:
                    raise torch.OutOfMemoryError
                return resize(self, nbytes)

            with mock.patch.object(torch.UntypedStorage, "resize_", full), pytest.raises(OffstageError) as refused:
                offstage.wake(model)
            if "Nothing has changed" not in str(refused.value):
                raise refused.value
            offstage.wake(model)
    return weights_of(model.parameters())


def gradient_set_by_hand():
    """A gradient on the host's side of the link, assigned over one that is leaving, or coming back."""
    lanes = link_for(torch.device("cpu")).lanes()
    gradient = HostGradient("weight", 100, torch.float32, lanes, StepTimer(lanes), pin=False)
    found = []
    for number in range(3):
        gradient.leave(torch.full((100,), float(number)))
        if number == 1:
            gradient.send_for()
        gradient.set(torch.full((100,), 10.0 + number))
        found.append(gradient.on_device().clone())
        gradient.forget()
    return found


def gradient_leaves_again():
    """The step between was skipped: the memory of the one before is used for something else."""
    lanes = link_for(torch.device("cpu")).lanes()
    gradient = HostGradient("weight", 100, torch.float32, lanes, StepTimer(lanes), pin=False)
    made = [torch.full((100,), float(number)) for number in range(3)]
    for before, grad in itertools.pairwise([None, *made]):
        gradient.leave(grad)
        if before is not None:
            lanes.touch(writes=[before])
    return [gradient.on_host().clone()]


def link_measured():
    """Copies there and back, into memory that is used for something else right after."""
    lanes = link_for(torch.device("cpu")).lanes()
    pool = HostPool(lanes.device, None)
    with (
        mock.patch("offstage.lanes.link._COPY_BYTES", 4096),
        mock.patch.object(lanes, "elapsed_ms", return_value=1.0),
    ):
        for _ in range(2):
            assert measure_duplex(lanes) > 0
    assert pool.used_bytes == 0
    return []


LARGE = {"size": 4000, **ON_HOST}
EARLY = {"update_in_backward": True}
NOW_AND_THEN = {"numbers": range(6), "clip": [1e4, 1e4, 1e-4]}
"""Speculative updates that stay, and some that are taken back."""
ALL_ON_HOST = {
    "on_host_saved_while_training": on_host_saved_while_training,
    "on_host": partial(stepped, **LARGE),
    # The fingerprint of the weight is taken before and after.
    "on_host_with_split_masters": partial(stepped, master_weights="split", **LARGE),
    "on_host_only_weights": partial(only_reads_weights, **LARGE),
    "on_host_larger_buffers_needed_later": partial(larger_slots_needed_later, 6000, size=1000, **ON_HOST),
    "on_host_wider_gradients": partial(wider_gradients, **LARGE),
    "on_host_closed": partial(closed, **LARGE),
    "on_host_loaded_in_between": partial(loaded_in_between, **LARGE),
    "on_host_lost_and_loaded": partial(lost_and_loaded, breaking_a_slice, params=8, **LARGE),
    "on_host_overlapped": partial(iterated, **FORWARD, **ON_HOST),
    "on_host_in_backward": partial(iterated, **EARLY, **ON_HOST),
    **{f"on_host_{one.__name__}": partial(one, **ON_HOST) for one in AFTER_AN_OVERLAPPED_STEP},
}
BOTH = {**EARLY, **FORWARD}
ACCUMULATED = {"micro_batches": 2}
BY_TORCH = {"clip": [1e4, 1e-4], "clip_grad_norm": torchs_own, **ACCUMULATED}
ALL_HOSTED = {
    "hosted_gradients_set": partial(hosted, before_step=set_gradients, **FORWARD),
    "hosted_gradients_written": partial(hosted, before_step=write_gradients, **ACCUMULATED),
    "hosted_in_step": partial(hosted, **BY_TORCH),
    "hosted_closed": partial(hosted_closed, **FORWARD),
    "hosted_postponed": partial(hosted, **FORWARD),
    "hosted_postponed_and_clipped": partial(hosted, **FORWARD, **BY_TORCH),
    "hosted_in_backward": partial(hosted, **EARLY),
    # The first chunk of a layer is updated before it leaves the device; the second one waits for the bias.
    "hosted_in_backward_in_part": partial(hosted, layer=Unbiased, **EARLY),
    "hosted_in_backward_and_accumulated": partial(hosted, **BOTH, **ACCUMULATED),
    "hosted_clipped_now_and_then": partial(hosted, **NOW_AND_THEN, **EARLY),
    "hosted_clipped_now_and_then_and_accumulated": partial(hosted, **NOW_AND_THEN, **BOTH, **ACCUMULATED),
    "hosted_gradients_read": partial(hosted, before_step=read_gradients, **FORWARD),
    "hosted_gradients_by_hand": partial(hosted, between=step_by_hand, **FORWARD),
    "hosted_model_saved": partial(hosted, between=read_state_dict, **FORWARD),
    "hosted_model_loaded": partial(hosted, between=load_model, **BOTH),
    "hosted_weights_written": partial(hosted, between=write_weights, **FORWARD),
    "hosted_evaluated": partial(hosted, between=evaluate, **FORWARD),
    "hosted_replanned": partial(hosted, between=replan, **FORWARD),
    "hosted_optimizer_loaded": partial(hosted, between=load_optimizer, **FORWARD),
    "hosted_dropped": partial(hosted_dropped, **EARLY),
    "hosted_dropped_and_postponed": partial(hosted_dropped, **FORWARD),
    "hosted_layers_skipped": partial(hosted_layers_skipped, **FORWARD),
    "hosted_saved_with_speculation": hosted_saved_with_speculation,
}
BY_CPU = {"host_fraction": 0.5}
SPLIT = {"layer": Wide, "dtype": torch.bfloat16, "master_weights": "split"}
ALL_HOSTED |= {
    "in_place": partial(hosted, layer=Wide, **BY_CPU, **FORWARD),
    # The fingerprint of a weight is taken before its first chunk is updated, and goes up behind the last.
    "in_place_with_split_masters": partial(hosted, **SPLIT, **BY_CPU, **FORWARD),
    "in_place_in_step": partial(hosted, layer=Wide, **BY_CPU, **BY_TORCH),
    "in_place_clipped_in_parts": partial(
        hosted, clip=[1e-4], clip_grad_norm=by_torch_in_parts, **BY_CPU, **FORWARD, **ACCUMULATED
    ),
    "in_place_clipped_now_and_then": partial(hosted, **NOW_AND_THEN, **BY_CPU, **BOTH),
    "in_place_in_backward": partial(hosted, layer=Wide, **BY_CPU, **EARLY),
    "in_place_a_layer_run_before_the_step": partial(hosted, before_step=run_a_layer, **BY_CPU, **FORWARD),
    "in_place_gradients_used_afterwards": partial(
        hosted, clip=[1e-4], before_step=hold_gradients, between=use_held_gradients, **BY_CPU, **FORWARD
    ),
    "in_place_gradients_by_hand": partial(hosted, between=step_by_hand, **BY_CPU, **FORWARD),
    "in_place_weights_written": partial(hosted, between=write_weights, **BY_CPU, **FORWARD),
    "in_place_evaluated": partial(hosted, between=evaluate, **BY_CPU, **FORWARD),
    "in_place_dropped": partial(hosted_dropped, **BY_CPU, **FORWARD),
    "in_place_closed": partial(hosted_closed, **BY_CPU, **FORWARD),
    "in_place_all": partial(hosted, update_on="host", slots=None, **FORWARD),
    "in_place_saved_while_training": partial(hosted_saved_while_training, **BY_CPU, **FORWARD),
}
OTHERS = [
    saved_while_training,
    saved_with_speculation,
    activations_offloaded,
    activations_made_again,
    activations_of_a_forward_without_backward,
    weights_on_the_host,
    weights_sent_for_and_not_used,
    only_reads_weights,
    closed,
    loaded_in_between,
    *AFTER_AN_OVERLAPPED_STEP,
    window_evicted,
    first_iteration,
    link_measured,
    gradient_leaves_again,
    gradient_set_by_hand,
    slept,
    slept_and_dropped,
    wake_refused,
]
SCENARIOS = {
    **ALL_ON_HOST,
    **{one.__name__: one for one in OTHERS},
    # Chunks on both ways; more on the host than there are staging buffers.
    "host_and_device": partial(stepped, params=12, size=4000, **MIXED),
    "host_and_device_in_backward": partial(iterated, **EARLY, **FORWARD, **MIXED),
    "host_and_device_clipped_now_and_then": partial(iterated, **NOW_AND_THEN, **EARLY, **FORWARD, **MIXED),
    "many_chunks": stepped,
    # A chunk comes back into another slot than it left from: only its own store mark orders the two.
    "fewer_chunks_than_slots": partial(stepped, params=1, slots=3),
    "part_resident": partial(stepped, fraction=0.5),
    "larger_slots_needed_later": partial(larger_slots_needed_later, 1500, params=1, size=200),
    "lost_and_loaded": partial(lost_and_loaded, breaking_an_update),
    "overlapped_forward": partial(iterated, **FORWARD),
    # Chunks wait in the window from backward on; its slots go behind their stores in the next forward.
    "window_of_all": partial(iterated, window="all", **FORWARD),
    "updated_in_backward": partial(iterated, **EARLY),
    "updated_in_backward_and_overlapped": partial(iterated, window="64KiB", **EARLY, **FORWARD),
    "clipped_now_and_then": partial(iterated, **NOW_AND_THEN, **EARLY, **FORWARD),
    "clipped_without_overlap": partial(iterated, clip=[1e4, 1e-4]),
    "slept_offloaded": partial(slept, fraction=0.5),
    **ALL_HOSTED,
}


WAITS = [
    "backward: the last update is done",
    "backward: the tensor is back",
    "backward: the update is done with the gradient",
    "bury: the copy that nobody needed is done",
    "close: the last copies are done",
    "close: the slot's last store is done",
    "close: the weights are ready",
    "drop: nothing is under way",
    "fetch: the chunk's last store is done",
    "fetch: the gradients are on the host",
    "fetch: the slot is free",
    "forward: the weights are ready",
    "gradient: it has left",
    "gradient: it has returned",
    "gradient: it is made",
    "gradient: it is on the host",
    "gradient: the CPU has used it",
    "gradient: the host may write it",
    "gradient: the host reads it",
    "gradient: the memory is free",
    "host: all stores are done",
    "host: no copy reads the weights",
    "host: the first gradients are used",
    "host: the gradients have left",
    "host: the snapshot has its copy",
    "host: the weights were looked at",
    "host: weights and gradients have come down",
    "host: what clipping found has come down",
    "leave: the tensor has left",
    "leave: the tensor is made",
    "load: the weights are ready",
    "look: so were those before",
    "look: the step has begun",
    "lower: clipping has found it",
    "lower: so has what it found before",
    "lower: the gradients are ready",
    "lower: the staging buffer is free",
    "measure: the copies are done",
    "measure: the memory is free",
    "place: the lanes are drained",
    "place: the staging buffers are not in use",
    "place: the weights are ready",
    "raise: so is what came before of its layer",
    "raise: the weights are updated",
    "read: the state is known",
    "read: the weights are ready",
    "redo: the old weights are back",
    "redo: the speculative updates are done",
    "reset: nothing is under way",
    "return: the memory is free",
    "sleep: the copies are made",
    "sleep: the last fetch is over",
    "sleep: the tensors are made",
    "step: the last update is done",
    "step: the norm is known",
    "step: the weights are ready",
    "store: the snapshot has its copy",
    "store: the state is updated",
    "synchronize: the weights are ready",
    "trim: the host memory is not in use",
    "update: the gradients are ready",
    "update: the gradients have returned",
    "update: the gradients were used",
    "update: the state is fetched",
    "update: the weights are fetched",
    "wake: the copies so far are made",
    "wake: the memory is free",
    "wake: the tensor is back",
    "weights: a part of the update is done",
    "weights: the CPU has updated them",
    "weights: the fetch is over",
    "weights: the gradient has left",
    "weights: the gradient is made",
    "weights: the gradient is on the host",
    "weights: the host may read",
    "weights: the host may write",
    "weights: the layer is here",
    "weights: the layer was stored",
    "weights: the memory is free",
    "weights: the update is done",
    "weights: the updates are done",
    "window: the slot's last store is done",
]
"""All of them, so that a new wait is a decision."""


@functools.cache
def seen() -> dict[str, set[str]]:
    """The waits of each scenario."""
    return {scenario: waits_of(scenario) for scenario in SCENARIOS}


def waits_of(scenario) -> set[str]:
    log = WaitLog()
    with lazily(0, log):
        SCENARIOS[scenario]()
    return log.seen


@functools.cache
def expected_of(scenario):
    """On lanes that run at once; of weights on the host, with weights on the device."""
    if "lost_and_loaded" in scenario:
        return None
    return SCENARIOS[scenario](weights="device") if scenario in ALL_HOSTED else SCENARIOS[scenario]()


def is_as_expected(scenario, got):
    expected = expected_of(scenario)
    return expected is None or all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_waits_are_these():
    assert sorted(set().union(*seen().values())) == WAITS


def test_every_wait_in_the_source_is_here():
    """No wait hides from this file behind a path that no scenario takes."""
    source = Path(offstage.__file__).parent
    pattern = re.compile(r'"([a-z]+: [a-z][^"%{}]*)"')
    rooms = ("activations", "engine", "lanes", "optimizer", "phases", "weights")
    files = [file for room in rooms for file in (source / room).rglob("*.py")]
    named = {name for file in files for name in pattern.findall(file.read_text())}
    assert set(WAITS) <= named
    assert named - set(WAITS) == set()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_caught_when_nothing_is_missing(scenario):
    for seed in SEEDS:
        with lazily(seed):
            got = SCENARIOS[scenario]()
        assert is_as_expected(scenario, got)


def notices(scenario: str, wait: str) -> str | None:
    """What noticed that `wait` was missing."""
    for seed in SEEDS:
        try:
            with lazily(seed, WaitLog(drop=wait)):
                got = SCENARIOS[scenario]()
        except OffstageError as error:
            return type(error.__cause__ or error).__name__
        if not is_as_expected(scenario, got):
            return "other bits"
    return None


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_caught(wait):
    """Where everything is updated on the host, if it is made there too: one name may stand for waits of both kinds."""
    made_by = [scenario for scenario in SCENARIOS if wait in seen()[scenario]]
    for scenario in [one for one in made_by if one in ALL_ON_HOST] or made_by:
        if found := notices(scenario, wait):
            logging.getLogger("tests").info("%s: caught by %s: %s", wait, scenario, found)
            return
    pytest.fail(f"nothing noticed that {wait!r} was missing in {made_by}: it is redundant there and should go")
