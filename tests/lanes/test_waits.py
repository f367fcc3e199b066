# SPDX-License-Identifier: Apache-2.0
"""Every wait is needed: each is dropped in turn on the lazy backend, and each must be caught.

`pytest tests/test_waits.py -o log_cli=true -o log_cli_level=INFO` lists the waits and what caught each.
"""

import contextlib
import functools
import gc
import logging
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import offstage
from offstage.activations.device import measure_link
from offstage.activations.offload import offload_activations
from offstage.engine.pipeline import Trip
from offstage.errors import OffstageError, StepLostError
from offstage.lanes.lanes import lanes_for
from offstage.lanes.testing.lazy import WaitLog
from offstage.memory.pool import HostPool
from tests.support.training import lazily

SEEDS = range(6)


def make(params=6, size=900, **config):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size).bfloat16()) for _ in range(params)]
    settings = {"min_bytes": 0, "chunk_bytes": "16KiB", "slots": 2, **config}
    return weights, offstage.offload(torch.optim.AdamW(weights, lr=0.1), **settings)


def steps(weights, optimizer, count=3):
    for step in range(count):
        for i, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 0.01 * (i + step + 1))
        optimizer.step()
        optimizer.zero_grad()


def result(weights, optimizer):
    state = optimizer.state_dict()["state"]
    return [w.detach().clone() for w in weights] + [v.clone() for s in state.values() for v in s.values()]


def many_chunks():
    weights, optimizer = make()
    steps(weights, optimizer)
    return result(weights, optimizer)


def fewer_chunks_than_slots():
    """A chunk comes back into another slot than it left from: only its own store mark orders the two."""
    weights, optimizer = make(params=1, slots=3)
    steps(weights, optimizer)
    return result(weights, optimizer)


def part_resident():
    weights, optimizer = make(fraction=0.5)
    steps(weights, optimizer)
    return result(weights, optimizer)


def only_reads_weights():
    weights, optimizer = make()
    steps(weights, optimizer)
    return [w.detach().clone() for w in weights]


def larger_slots_needed_later():
    """A group added between steps needs larger slots: the old ones go behind their last store."""
    weights, optimizer = make(params=1, size=200)
    steps(weights, optimizer, 2)
    more = nn.Parameter(torch.randn(1500).bfloat16())
    optimizer.add_param_group({"params": [more]})
    steps([*weights, more], optimizer, 2)
    return result([*weights, more], optimizer)


def closed():
    weights, optimizer = make()
    steps(weights, optimizer)
    optimizer.close()
    return [w.detach().clone() for w in weights]


def loaded_in_between():
    weights, optimizer = make()
    steps(weights, optimizer, 2)
    _, other = make()
    optimizer.load_state_dict(other.state_dict())
    steps(weights, optimizer, 2)
    return result(weights, optimizer)


def lost_and_loaded():
    """A step that fails half-way, then a checkpoint."""
    weights, optimizer = make()
    saved = optimizer.state_dict()
    steps(weights, optimizer, 1)
    update, calls = optimizer.rule.update, []

    def fail(shares):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        update(shares)

    optimizer.rule.update = fail
    with pytest.raises(StepLostError):
        steps(weights, optimizer, 1)
    optimizer.rule.update = update
    optimizer.load_state_dict(saved)
    steps(weights, optimizer, 2)
    return result(weights, optimizer)[len(weights) :]  # the weights of the lost step are anyone's guess


def make_model(**config):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    settings = {"min_bytes": 0, "chunk_bytes": "16KiB", "slots": 2, **config}
    return model, offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.01), model, **settings)


def backward(model, step):
    model(torch.full((3, 40), 0.1 * (step + 1))).pow(2).mean().backward()


def iterate(model, optimizer, steps=range(4), clip=None):
    for step in steps:
        backward(model, step)
        if clip is not None:
            optimizer.clip_grad_norm_(clip[step % len(clip)])
        optimizer.step()
        optimizer.zero_grad()


def model_result(model, optimizer):
    optimizer.synchronize()
    return result(list(model.parameters()), optimizer)


def overlapped_forward():
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer)
    return model_result(model, optimizer)


def module_skipped_in_the_next_iteration():
    """Nobody waits in forward for what did not run; backward may write into the gradients' memory."""
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer, range(2))
    model[0](torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()
    return model_result(model, optimizer)


def dropped_after_an_overlapped_step():
    """The optimizer goes while updates are under way: they end first."""
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer)
    del optimizer
    gc.collect()
    return [param.detach().clone() for param in model.parameters()]


def model_saved_after_step():
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer, range(2))
    return [value.clone() for value in model.state_dict().values()]


def state_asked_for_after_step():
    """Whether a parameter has state is known when its first update has been waited for."""
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer, range(1))
    return [torch.tensor([param in optimizer.state for param in model.parameters()])]


def weights_read_after_synchronize():
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer, range(2))
    optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def gradients_set_by_hand():
    """A step after which no module ran: the next one finds its updates still under way."""
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer, range(2))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model_result(model, optimizer)


def group_added_after_an_overlapped_step():
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer, range(2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3000))]})
    iterate(model, optimizer, range(2, 4))
    return model_result(model, optimizer)


def closed_after_an_overlapped_step():
    model, optimizer = make_model(overlap_forward=True)
    iterate(model, optimizer, range(2))
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def loaded_after_an_overlapped_step():
    model, optimizer = make_model(overlap_forward=True)
    _, other = make_model()
    iterate(model, optimizer, range(2))
    optimizer.load_state_dict(other.state_dict())
    iterate(model, optimizer, range(2, 4))
    return model_result(model, optimizer)


def window_of_all():
    """Chunks wait in the window from backward on; its slots go behind their stores in the next forward."""
    model, optimizer = make_model(window="all", overlap_forward=True)
    iterate(model, optimizer)
    return model_result(model, optimizer)


def window_evicted():
    """What was fetched ahead is dropped before it was used, and its slot is needed again."""
    model, optimizer = make_model(window="64KiB")
    for step in range(4):
        backward(model, step)
        if step == 2:
            optimizer.evict()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.evict()
    return model_result(model, optimizer)


def updated_in_backward():
    model, optimizer = make_model(update_in_backward=True)
    iterate(model, optimizer)
    return model_result(model, optimizer)


def updated_in_backward_and_overlapped():
    model, optimizer = make_model(update_in_backward=True, overlap_forward=True, window="64KiB")
    iterate(model, optimizer)
    return model_result(model, optimizer)


def clipped_now_and_then():
    """Speculative updates that stay, and some that are taken back."""
    model, optimizer = make_model(update_in_backward=True, overlap_forward=True)
    iterate(model, optimizer, range(6), clip=[1e4, 1e4, 1e-4])
    return model_result(model, optimizer)


def clipped_without_overlap():
    model, optimizer = make_model()
    iterate(model, optimizer, clip=[1e4, 1e-4])
    return model_result(model, optimizer)


def link_measured():
    """What the first step on an accelerator does: copies there and back that must change nothing."""
    model, optimizer = make_model()
    engine = optimizer._engines[torch.device("cpu")]
    pipeline = engine._pipeline
    pipeline.prepare()
    pipeline.lanes.elapsed_ms = lambda start, stop: 1.0
    host, _ = engine.host_side.states[0]
    pipeline.measure_link([Trip(host, chunk, chunk.pieces) for chunk in host.layout.chunks[:2]])
    iterate(model, optimizer, range(2))
    return model_result(model, optimizer)


# Updates on the host

ON_HOST = {"update_on": "host"}
MIXED = {"host_fraction": 0.5}


def host_and_device():
    """Chunks on both ways; more on the host than there are staging buffers."""
    weights, optimizer = make(params=12, size=4000, **MIXED)
    steps(weights, optimizer)
    return result(weights, optimizer)


def on_host():
    weights, optimizer = make(params=6, size=4000, **ON_HOST)
    steps(weights, optimizer)
    return result(weights, optimizer)


def on_host_with_split_masters():
    """The fingerprint of the weight is taken before and after."""
    weights, optimizer = make(params=6, size=4000, master_weights="split", **ON_HOST)
    steps(weights, optimizer)
    return result(weights, optimizer)


def on_host_only_weights():
    weights, optimizer = make(params=6, size=4000, **ON_HOST)
    steps(weights, optimizer)
    return [w.detach().clone() for w in weights]


def on_host_group_added():
    weights, optimizer = make(params=6, size=1000, **ON_HOST)
    steps(weights, optimizer, 2)
    more = nn.Parameter(torch.randn(6000).bfloat16())
    optimizer.add_param_group({"params": [more]})
    steps([*weights, more], optimizer, 2)
    return result([*weights, more], optimizer)


def on_host_wider_gradients():
    """In the middle of a step larger staging buffers take the place of those in use."""
    weights, optimizer = make(params=6, size=4000, **ON_HOST)
    for step in range(3):
        for i, weight in enumerate(weights):
            weight.grad_dtype = None
            dtype = torch.float32 if i == 3 and step == 1 else torch.bfloat16
            weight.grad = torch.full((4000,), 0.01 * (i + step + 1), dtype=dtype)
        optimizer.step()
        optimizer.zero_grad()
    return result(weights, optimizer)


def on_host_closed():
    weights, optimizer = make(params=6, size=4000, **ON_HOST)
    steps(weights, optimizer)
    optimizer.close()
    return [w.detach().clone() for w in weights]


def on_host_loaded_in_between():
    weights, optimizer = make(params=6, size=4000, **ON_HOST)
    steps(weights, optimizer, 2)
    _, other = make(params=6, size=4000, **ON_HOST)
    optimizer.load_state_dict(other.state_dict())
    steps(weights, optimizer, 2)
    return result(weights, optimizer)


def on_host_lost_and_loaded():
    """A slice fails half-way, then a checkpoint."""
    weights, optimizer = make(params=8, size=4000, **ON_HOST)
    saved = optimizer.state_dict()
    steps(weights, optimizer, 1)
    slices, calls = optimizer.rule.slices, []

    def fail():
        raise ZeroDivisionError

    def some_fail(shares):
        calls.append(1)
        return [fail] if len(calls) == 3 else slices(shares)

    optimizer.rule.slices = some_fail
    with pytest.raises(StepLostError):
        steps(weights, optimizer, 1)
    optimizer.rule.slices = slices
    optimizer.load_state_dict(saved)
    steps(weights, optimizer, 2)
    return result(weights, optimizer)[len(weights) :]


def on_host_overlapped():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer)
    return model_result(model, optimizer)


def on_host_module_skipped():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer, range(2))
    model[0](torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()
    return model_result(model, optimizer)


def on_host_dropped():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer)
    del optimizer
    gc.collect()
    return [param.detach().clone() for param in model.parameters()]


def on_host_model_saved():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer, range(2))
    return [value.clone() for value in model.state_dict().values()]


def on_host_state_asked_for():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer, range(1))
    return [torch.tensor([param in optimizer.state for param in model.parameters()])]


def on_host_synchronized():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer, range(2))
    optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def on_host_gradients_by_hand():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer, range(2))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model_result(model, optimizer)


def on_host_group_added_after_an_overlapped_step():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer, range(2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3000))]})
    iterate(model, optimizer, range(2, 4))
    return model_result(model, optimizer)


def on_host_closed_after_an_overlapped_step():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer, range(2))
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def on_host_loaded_after_an_overlapped_step():
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    _, other = make_model(**ON_HOST)
    iterate(model, optimizer, range(2))
    optimizer.load_state_dict(other.state_dict())
    iterate(model, optimizer, range(2, 4))
    return model_result(model, optimizer)


def on_host_in_backward():
    model, optimizer = make_model(update_in_backward=True, **ON_HOST)
    iterate(model, optimizer)
    return model_result(model, optimizer)


def host_and_device_in_backward():
    model, optimizer = make_model(update_in_backward=True, overlap_forward=True, **MIXED)
    iterate(model, optimizer)
    return model_result(model, optimizer)


def host_and_device_clipped_now_and_then():
    model, optimizer = make_model(update_in_backward=True, overlap_forward=True, **MIXED)
    iterate(model, optimizer, range(6), clip=[1e4, 1e4, 1e-4])
    return model_result(model, optimizer)


def state_at(snapshots, optimizer):
    """What a writer reads of snapshots."""
    lines = []
    with mock.patch("offstage.engine.snapshot._LONGEST_WAIT_S", 0.01):
        for held in optimizer.all_held():
            snapshot = snapshots[id(held.host)]
            for key in held.keys:
                line = torch.empty(key.numel(held.local), dtype=key.dtype)
                snapshot.read(held.index, key.name, 0, line.numel(), into=line)
                lines.append(line)
    return lines


def saved_while_training(**config):
    """A snapshot is read when all of it has been overwritten."""
    weights, optimizer = make(params=6, size=4000, **config)
    steps(weights, optimizer, 2)
    optimizer.drain_state()
    snapshots = optimizer.take_snapshots()
    steps(weights, optimizer, 2)
    optimizer.settle_snapshots()
    return state_at(snapshots, optimizer)


def on_host_saved_while_training():
    """The last updates, and with them the copies, are still to come when step() returns."""
    model, optimizer = make_model(overlap_forward=True, **ON_HOST)
    iterate(model, optimizer, range(2))
    optimizer.drain_state()
    snapshots = optimizer.take_snapshots()
    iterate(model, optimizer, range(1))
    optimizer.settle_snapshots()
    return state_at(snapshots, optimizer)


def saved_with_speculation():
    """Steps go to the other set of arenas; the second of them to the one that is being saved."""
    model, optimizer = make_model(update_in_backward=True)
    iterate(model, optimizer, range(3), clip=[1e4])
    optimizer.drain_state()
    snapshots = optimizer.take_snapshots()
    iterate(model, optimizer, range(3), clip=[1e4])
    optimizer.settle_snapshots()
    return state_at(snapshots, optimizer)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


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


def _raise(*_):
    raise ZeroDivisionError


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


def link_measured_for_activations():
    """Copies there and back, into memory that is used for something else right after."""
    lanes = lanes_for(torch.device("cpu"))
    pool = HostPool(lanes.device, None)
    with (
        mock.patch("offstage.activations.device._MEASURED_BYTES", 4096),
        mock.patch.object(lanes, "elapsed_ms", return_value=1.0),
    ):
        for _ in range(2):
            assert measure_link(lanes) > 0
    assert pool.used_bytes == 0
    return []


ALL_ON_HOST = [
    on_host_saved_while_training,
    on_host,
    on_host_with_split_masters,
    on_host_only_weights,
    on_host_group_added,
    on_host_wider_gradients,
    on_host_closed,
    on_host_loaded_in_between,
    on_host_lost_and_loaded,
    on_host_overlapped,
    on_host_module_skipped,
    on_host_dropped,
    on_host_model_saved,
    on_host_state_asked_for,
    on_host_synchronized,
    on_host_gradients_by_hand,
    on_host_group_added_after_an_overlapped_step,
    on_host_closed_after_an_overlapped_step,
    on_host_loaded_after_an_overlapped_step,
    on_host_in_backward,
]
SCENARIOS = [
    *ALL_ON_HOST,
    saved_while_training,
    saved_with_speculation,
    activations_offloaded,
    activations_made_again,
    activations_of_a_forward_without_backward,
    weights_on_the_host,
    weights_sent_for_and_not_used,
    link_measured_for_activations,
    host_and_device,
    host_and_device_in_backward,
    host_and_device_clipped_now_and_then,
    many_chunks,
    fewer_chunks_than_slots,
    part_resident,
    only_reads_weights,
    larger_slots_needed_later,
    closed,
    loaded_in_between,
    lost_and_loaded,
    overlapped_forward,
    module_skipped_in_the_next_iteration,
    dropped_after_an_overlapped_step,
    model_saved_after_step,
    state_asked_for_after_step,
    weights_read_after_synchronize,
    gradients_set_by_hand,
    group_added_after_an_overlapped_step,
    closed_after_an_overlapped_step,
    loaded_after_an_overlapped_step,
    window_of_all,
    window_evicted,
    updated_in_backward,
    updated_in_backward_and_overlapped,
    clipped_now_and_then,
    clipped_without_overlap,
    link_measured,
]


def waits_of(scenario) -> set[str]:
    log = WaitLog()
    with lazily(0, log):
        scenario()
    return log.seen


SEEN = {scenario: waits_of(scenario) for scenario in SCENARIOS}
WAITS = sorted(set().union(*SEEN.values()))


@functools.cache
def expected_of(scenario):
    return None if scenario in (lost_and_loaded, on_host_lost_and_loaded) else scenario()


def test_the_waits_are_these():
    """The list, so that a new wait is a decision someone made."""
    assert WAITS == [
        "backward: the last update is done",
        "backward: the tensor is back",
        "backward: the update is done with the gradient",
        "bury: the copy that nobody needed is done",
        "close: the last copies are done",
        "close: the slot's last store is done",
        "close: the weights are ready",
        "drop: nothing is under way",
        "fetch: the chunk's last store is done",
        "fetch: the slot is free",
        "forward: the weights are ready",
        "host: all stores are done",
        "host: the snapshot has its copy",
        "host: weights and gradients have come down",
        "leave: the tensor has left",
        "leave: the tensor is made",
        "load: the weights are ready",
        "lower: the gradients are ready",
        "lower: the staging buffer is free",
        "measure: nothing is under way",
        "measure: the chunks are fetched",
        "measure: the copies are done",
        "measure: the memory is free",
        "place: the lanes are drained",
        "place: the staging buffers are not in use",
        "place: the weights are ready",
        "raise: the weights are updated",
        "read: the state is known",
        "read: the weights are ready",
        "redo: the speculative updates are done",
        "reset: nothing is under way",
        "return: the memory is free",
        "snapshot: the chunk is copied",
        "step: the last update is done",
        "step: the norm is known",
        "step: the weights are ready",
        "store: the snapshot has its copy",
        "store: the state is updated",
        "synchronize: the weights are ready",
        "trim: the host memory is not in use",
        "update: the gradients are ready",
        "update: the state is fetched",
        "weights: the fetch is over",
        "weights: the gradient has left",
        "weights: the gradient is made",
        "weights: the gradient is on the host",
        "weights: the memory is free",
        "weights: the optimizer may write",
        "weights: the weight is here",
        "window: the slot's last store is done",
    ]


def test_every_wait_in_the_source_is_here():
    """No wait hides from this file behind a path that no scenario takes."""
    source = Path(offstage.__file__).parent
    pattern = re.compile(r'"([a-z]+: [a-z][^"%{}]*)"')
    rooms = ("activations", "engine", "lanes", "optimizer")
    files = [file for room in rooms for file in (source / room).rglob("*.py")]
    named = {name for file in files for name in pattern.findall(file.read_text())}
    assert set(WAITS) <= named
    assert named - set(WAITS) == set()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_nothing_is_caught_when_nothing_is_missing(scenario):
    expected = expected_of(scenario)
    for seed in SEEDS:
        with lazily(seed):
            got = scenario()
        if expected is not None:
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def caught_by(wait: str) -> dict[Callable, str]:
    """Scenario → what noticed that `wait` was missing."""
    caught = {}
    for scenario in SCENARIOS:
        if wait not in SEEN[scenario]:
            continue
        expected = expected_of(scenario)
        for seed in SEEDS:
            try:
                with lazily(seed, WaitLog(drop=wait)):
                    got = scenario()
            except OffstageError as error:
                caught[scenario] = type(error.__cause__ or error).__name__
                break
            if expected is not None and not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
                caught[scenario] = "other bits"
                break
    return caught


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_caught(wait):
    """Also where everything is updated on the host, if it is made there: one name may stand for waits of both kinds."""
    caught = caught_by(wait)
    found = "; ".join(f"{scenario.__name__}: {how}" for scenario, how in caught.items())
    logging.getLogger("tests").info("%s: caught by %s", wait, found)
    assert caught, f"nothing noticed that {wait!r} was missing: it is redundant and should go"
    if any(wait in SEEN[scenario] for scenario in ALL_ON_HOST):
        assert caught.keys() & set(ALL_ON_HOST), f"{wait!r} is redundant where the host updates"
