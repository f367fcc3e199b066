# SPDX-License-Identifier: Apache-2.0
"""Corners of sleep and wake: odd tensors, odd orders, and uses that torch does not announce."""

import contextlib
import copy
import functools
import gc
import itertools
import signal
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offstage
from offstage import asleep, sleep, wake
from offstage.engine import pipeline
from offstage.engine.gradients import HostGradients
from offstage.engine.timer import StepTimer
from offstage.errors import ConfigError, OffstageError
from offstage.lanes.lanes import ImmediateLanes
from offstage.lanes.link import use_lanes
from offstage.memory.pool import Range
from offstage.optimizer.optimizer import runtime_of
from offstage.phases import parking
from offstage.phases.parking import Lot, lot_for
from offstage.rules import adamw
from offstage.tensors import norm_of
from tests.phases.test_sleep import CPU, SMALL, all_same, backward, clones, make
from tests.support.training import lazily, same_bits


@pytest.fixture(autouse=True, params=[None, 0], ids=["at_once", "lazily"])
def _lanes(request, monkeypatch):
    for name, value in (("_SMALL", 0), ("_BATCH", 1)):
        monkeypatch.setattr(f"offstage.phases.parking.{name}", value)
    with lazily(request.param) if request.param is not None else use_lanes(ImmediateLanes):
        yield


def interrupted(function, at=1):
    """`function`, and Ctrl-C when its call number `at` is over."""
    calls = itertools.count(1)

    def call(*arguments):
        made = function(*arguments)
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return made

    return call


def test_conversions_need_values():
    layer = nn.Linear(8, 8)
    expected = layer.weight.detach().double()
    sleep(layer)
    for use in (lambda: layer.weight.type(torch.float64), lambda: layer.weight.double(), lambda: layer.weight.data):
        with pytest.raises(OffstageError, match="asleep"):
            use()
    wake(layer)
    assert torch.equal(layer.weight.type(torch.float64), expected)


def test_autograd_grad_asks_for_values():
    """Checkpointing runs forward again within it."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    x = torch.randn(2, 16, requires_grad=True)

    def gradients():
        loss = checkpoint(model, x, use_reentrant=False).pow(2).sum()
        sleep(model)
        wake(model)
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    assert all_same(gradients(), expected)


@pytest.mark.parametrize("config", [None, {"fraction": 0.5}, {"fraction": 0.0}])
@pytest.mark.parametrize("keep", [(), ("gradients",), ("weights",)])
def test_a_step_while_only_the_model_sleeps(config, keep):
    """It is refused before it has begun; afterwards it is the step that it would have been."""
    runs = []
    for sleeps in (False, True):
        model, optimizer = make(config)
        backward(model, 1)
        if sleeps:
            sleep(model, keep=keep)
            with pytest.raises(OffstageError, match="asleep"):
                optimizer.step()
            wake(model)
        optimizer.step()
        state = [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
        runs.append(clones([*model.parameters(), *map(torch.as_tensor, state)]))
    assert all_same(*runs)


def test_the_first_step_of_all():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    sleep(model)
    with pytest.raises(OffstageError, match="asleep"):
        optimizer.step()
    assert not optimizer.state
    wake(model)
    optimizer.step()


def test_no_hook_on_steps_is_left():
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    model, optimizer = make()
    sleep(model, optimizer)
    wake(model, optimizer).wait()
    optimizer.step()
    assert not _global_optimizer_pre_hooks


def test_the_gradient_of_a_weight_that_was_frozen():
    layer = nn.Linear(8, 8)
    layer(torch.ones(1, 8)).sum().backward()
    layer.requires_grad_(False)
    sleep(layer, keep=("weights",))
    layer.requires_grad_(True)
    with pytest.raises(OffstageError, match="asleep"):
        layer(torch.ones(1, 8)).sum().backward()
    layer.requires_grad_(False)
    wake(layer)
    layer.requires_grad_(True)
    layer(torch.ones(1, 8)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 2.0))


def test_zeroed_while_asleep_and_used_again():
    model, optimizer = make()
    sleep(model, optimizer)
    model.zero_grad()
    wake(model, optimizer)
    backward(model, 3)
    assert model[0].weight.grad is not None


def test_zeroed_while_waking():
    model, optimizer = make()
    sleep(model, optimizer)
    wake(model, optimizer)
    model.zero_grad()
    backward(model, 3)
    optimizer.step()


def test_copied_while_waking():
    model, _ = make()
    expected = clones(model.parameters())
    sleep(model)
    wake(model)
    twin = copy.deepcopy(model)
    assert {type(param) for param in twin.parameters()} == {nn.Parameter}
    assert all_same(twin.parameters(), expected)
    twin(torch.ones(1, 64)).sum().backward()


def test_a_backbone_of_two_models_in_two_calls():
    backbone = nn.Linear(8, 8)
    first, second = nn.Sequential(backbone, nn.Linear(8, 8)), nn.Sequential(backbone, nn.Linear(8, 8))
    alias = nn.Linear(8, 8, bias=False)
    alias.weight = nn.Parameter(backbone.weight.data)
    expected = backbone.weight.detach().clone()
    sleep(first)
    sleep(second)
    sleep(alias)
    assert same_bits(alias.state_dict()["weight"], expected)
    wake(second)
    second(torch.ones(1, 8))
    wake(alias, first)
    alias(torch.ones(1, 8))
    first(torch.ones(1, 8))
    assert torch.equal(alias.weight, expected)
    assert alias.weight.data_ptr() == backbone.weight.data_ptr()


def test_a_part_sleeps_while_the_whole_is_waking():
    inner = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    outer = nn.Sequential(inner, nn.Linear(16, 16))
    x = torch.randn(2, 16)
    expected = outer(x)
    sleep(outer)
    wake(outer)
    assert sleep(inner).freed_bytes == sum(param.nbytes for param in inner.parameters())
    assert not any(param.untyped_storage().nbytes() for param in inner.parameters())
    with pytest.raises(OffstageError, match="asleep"):
        outer(x)
    wake(inner)
    assert same_bits(outer(x), expected)


@pytest.mark.parametrize("wakes", [False, True])
def test_an_optimizer_that_is_dropped(wakes):
    """While it sleeps, or wakes."""
    model, optimizer = make({"fraction": 0.5})
    expected = clones(model.parameters())
    with sleep(model, optimizer):
        woken = wake(model, optimizer) if wakes else None
        del optimizer
        gc.collect()
    if woken is not None:
        woken.wait()
    assert not asleep(model)
    assert all_same(model.parameters(), expected)


@pytest.mark.parametrize("size", [8, 5])
def test_one_of_two_views_gets_other_memory(size):
    model = nn.Module()
    flat = torch.randn(8)
    model.a, model.b = nn.Parameter(flat), nn.Parameter(flat)
    sleep(model)
    wake(model).wait()
    model.a.data = torch.randn(size)
    expected = clones([model.a, model.b])
    sleep(model)
    assert all_same(model.state_dict().values(), expected)
    wake(model)
    assert all_same([model.a, model.b], expected)


def test_what_was_read_asleep_stays_what_it_was():
    model, keeper = nn.Linear(32, 32), nn.Linear(4, 4)
    sleep(keeper)
    sleep(model)
    read = model.state_dict()
    expected = clones(read.values())
    del model
    gc.collect()
    other = nn.Linear(32, 32)
    sleep(other)
    assert all_same(read.values(), expected)
    del read
    wake(other)


def test_writes_to_what_was_read_asleep_do_not_come_back_with_the_next_sleep():
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    expected = layer.weight.detach().clone()
    sleep(layer)
    read = layer.state_dict()
    wake(layer).wait()
    read["weight"].zero_()
    sleep(layer)
    wake(layer)
    assert torch.equal(layer.weight, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_complements_differ(dtype):
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(64, dtype=dtype), requires_grad=False)
    for _ in range(2):
        sleep(layer)
        wake(layer).wait()
    layer.weight.data.view(torch.int32 if dtype == torch.float32 else torch.int64).bitwise_not_()
    expected = layer.weight.detach().clone()
    sleep(layer)
    wake(layer)
    assert same_bits(layer.weight.detach(), expected)


def test_odd_tensors():
    model = nn.Module()
    z = torch.randn(6, dtype=torch.complex64)
    model.register_buffer("conjugate", z.conj())
    model.register_buffer("negative", z.conj().imag)
    model.register_buffer("scalar", torch.tensor(3))
    model.register_buffer("nothing", torch.empty(0, 4))
    model.register_buffer("absent", None)
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("expanded", torch.ones(1, 5).expand(7, 5))
    model.lazy = nn.LazyLinear(4)
    with torch.inference_mode():
        model.reference = nn.Parameter(torch.ones(5), requires_grad=False)
    names = [name for name in model.state_dict() if not name.startswith("lazy") and name != "sparse"]
    expected = {name: model.state_dict()[name].resolve_conj().resolve_neg().clone() for name in names}
    for _ in range(2):
        sleep(model)
        found = model.state_dict()
        assert all(torch.equal(found[name].resolve_conj().resolve_neg(), expected[name]) for name in names)
        wake(model)
        assert all(torch.equal(model.state_dict()[name], expected[name]) for name in names)
    assert model.hidden.sum() == 3


def test_gradients_without_memory_of_their_own_are_dropped_too():
    model = nn.Embedding(5, 4, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    sleep(model, drop=("gradients",))
    assert model.weight.grad is None
    wake(model)


def test_modules_that_look_at_the_weights_inside():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = layer(x)
        for _ in range(2):
            sleep(layer)
            wake(layer)
            assert same_bits(layer(x), expected)


def test_scripted_modules_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match="ScriptModule"):
        sleep(model)
    assert not asleep(model)
    model(torch.ones(1, 4))


def test_a_report_keeps_nothing_alive():
    model = nn.Linear(32, 32)
    report = sleep(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with report:
        pass


def test_two_optimizers_of_one_model_and_one_of_two():
    torch.manual_seed(0)
    left, right = nn.Linear(16, 16), nn.Linear(16, 16)
    both = nn.Sequential(left, right)
    optimizers = [
        offstage.offload(torch.optim.AdamW(part.parameters()), part, **{**SMALL, "overlap_forward": True})
        for part in (left, right)
    ]
    twin = copy.deepcopy(both)
    plain = [offstage.offload(torch.optim.AdamW(part.parameters()), part, **SMALL) for part in twin]
    for number in range(4):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(number))
        for model, steps in ((both, optimizers), (twin, plain)):
            model(x).pow(2).mean().backward()
            for one in steps:
                one.step()
                one.zero_grad()
        sleep(both, *optimizers)
        wake(*optimizers)
        wake(both)
    for one in optimizers:
        one.synchronize()
    assert all_same(both.parameters(), twin.parameters())


def test_an_interrupt_between_the_copies_and_the_end(monkeypatch):
    """Whatever moment it comes at, nothing has changed: no guard is left, and graphs from before are good."""
    model = nn.Linear(16, 16)
    x = torch.randn(2, 16)
    expected = model(x).detach()
    for moment in range(1, 8):
        loss, calls, clock = model(x).pow(2).sum(), [], time.perf_counter

        def interrupted(calls=calls, moment=moment, clock=clock):
            calls.append(None)
            if len(calls) == moment:
                raise KeyboardInterrupt
            return clock()

        with monkeypatch.context() as during:
            during.setattr("offstage.phases.sleep.time.perf_counter", interrupted)
            try:
                sleep(model)
            except KeyboardInterrupt:
                assert (type(model.weight) is nn.Parameter) != asleep(model)
        if asleep(model):  # it came behind the copies
            wake(model)
        loss.backward()
        assert same_bits(model(x).detach(), expected)
        assert same_bits(model.state_dict()["weight"], model.weight.detach())


@pytest.mark.parametrize("is_read", [True, False])
def test_a_signal_while_the_copies_run(is_read, monkeypatch):
    """Its handler may save what it can read; a use is refused, and what left is guarded afterwards."""
    model = nn.Linear(16, 16)
    expected, seen = model.weight.detach().clone(), []

    def handler(*_):
        try:
            seen.append(model.state_dict()["weight"].clone() if is_read else model(torch.zeros(1, 16)))
        except OffstageError as error:
            seen.append(error)

    stores = Lot.store

    def store(lot, leaving, meanwhile):
        def then():
            meanwhile()
            signal.raise_signal(signal.SIGTERM)

        return stores(lot, leaving, then)

    monkeypatch.setattr(Lot, "store", store)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        sleep(model)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert same_bits(seen[0], expected) if is_read else isinstance(seen[0], OffstageError)
    with pytest.raises(OffstageError, match="asleep"):
        model.weight.sum()
    wake(model).wait()
    assert same_bits(model.weight.detach(), expected)


def test_what_a_signals_handler_has_read_stays(monkeypatch):
    """The memory that it was read from is given back."""
    model = nn.Linear(16, 16)
    expected, seen = clones(model.parameters()), []
    stores = Lot.store

    def store(lot, leaving, meanwhile):
        def then():
            meanwhile()
            seen.append(model.state_dict())  # as a handler would, here

        return stores(lot, leaving, then)

    monkeypatch.setattr(Lot, "store", store)
    sleep(model)
    assert [one.untyped_storage().nbytes() for one in seen[0].values()] == [one.nbytes for one in expected]
    assert all_same(seen[0].values(), expected)
    wake(model)


def test_an_interrupt_where_a_tensor_is_back(monkeypatch):
    """Its version has gone down once, and does not go down again."""
    model = nn.Linear(16, 16).requires_grad_(False)
    x = torch.randn(2, 16)
    expected, versions = model(x), [param._version for param in model.parameters()]
    sleep(model)
    with monkeypatch.context() as during:
        during.setattr("offstage.phases.parking.move_versions", interrupted(parking.move_versions))
        wake(model)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert same_bits(model(x), expected)
    assert [param._version for param in model.parameters()] == versions


@pytest.mark.parametrize("way", ["sleep", "return_slots"])
def test_an_interrupt_while_slots_are_given_back(way, monkeypatch):
    found = []
    for at in (None, 1):
        model, optimizer = make({})
        give_back = functools.partial(sleep, optimizer) if way == "sleep" else runtime_of(optimizer).return_slots
        with monkeypatch.context() as during:
            during.setattr("offstage.engine.pipeline.Ring", interrupted(pipeline.Ring, at))
            with pytest.raises(KeyboardInterrupt) if at is not None else contextlib.nullcontext():
                give_back()
        if asleep(optimizer):
            wake(optimizer)
        for number in range(2):
            backward(model, number)
            optimizer.step()
        optimizer.synchronize()
        found.append(clones(model.parameters()))
    assert all_same(*found)


def test_an_interrupt_while_the_rules_numbers_come_back(monkeypatch):
    """Otherwise some are on the device, and some on the host."""
    scratch, state = adamw._Scratch(CPU), nn.Module()  # as far as it asks
    scratch.prints(state)[0].fill_(7)
    scratch.rest()
    monkeypatch.setattr("offstage.rules.adamw._cells", interrupted(adamw._cells))
    with pytest.raises(KeyboardInterrupt):
        scratch.resume()
    assert not scratch.rests
    assert scratch.prints(state)[0] == 7


def test_an_interrupt_while_host_memory_is_used_again(monkeypatch):
    """That of gradients, each time of other ones."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    sizes = []
    for at in (None, 1, 1, 1):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with monkeypatch.context() as during:
            during.setattr(Range, "is_handed_out", property(interrupted(Range.is_handed_out.fget, at)))
            with contextlib.suppress(KeyboardInterrupt):
                sleep(model)
        sleep(model)
        sizes.append(lot_for(CPU).host_bytes)
        wake(model).wait()
        model.zero_grad()
    assert len(set(sizes)) == 1


def test_an_interrupt_where_the_collector_is_switched_off(monkeypatch):
    model = nn.Linear(8, 8)
    with monkeypatch.context() as during:
        during.setattr("offstage.phases.sleep.gc.disable", interrupted(gc.disable))
        with pytest.raises(KeyboardInterrupt):
            sleep(model)
    assert gc.isenabled()


def test_split_masters_are_read_in_inference_mode_after_waking():
    """The rule's fingerprints come back with a reader, and the next step writes them."""
    model = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2)))
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.1), model, master_weights="split", **SMALL)
    for number in range(3):
        model(torch.randn(2, 16, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sleep(optimizer)
        asleep_state = optimizer.state_dict() if number == 1 else None
        sleep(model, optimizer)
        wake(model, optimizer)
        with torch.inference_mode():
            state = optimizer.state_dict()
        assert optimizer.receipt().weights_written_by_others == 0
        if asleep_state is not None:
            assert all(
                same_bits(value["master_weight"], state["state"][key]["master_weight"])
                for key, value in asleep_state["state"].items()
            )


def test_gradients_of_a_skipped_step_do_not_stay_on_the_device():
    gradients = HostGradients(lanes := ImmediateLanes(torch.device("cpu")), StepTimer(lanes), pin=False)
    state = nn.Module()  # as far as gradients ask
    state.local, state.name, state.hosted = torch.zeros(1000), "weight", None
    gradient, kept = gradients.of(state), torch.randn(1000)
    gradient.keep(kept, norm_of(kept, 2.0))
    expected, kept = kept.clone(), weakref.ref(kept)
    gradients.rest()
    gc.collect()
    assert kept() is None
    assert same_bits(gradient.on_host(), expected)
