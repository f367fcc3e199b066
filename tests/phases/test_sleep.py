# SPDX-License-Identifier: Apache-2.0
"""What sleeps and what stays; what can be read meanwhile; what is refused, and how."""

import copy
import gc
import itertools
import pickle
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import offstage
from offstage import asleep, checkpoint, sleep, wake
from offstage.errors import ConfigError, HostMemoryError, OffstageError, StepLostError
from offstage.lanes.lanes import ImmediateLanes
from offstage.lanes.link import link_for, use_lanes
from offstage.optimizer.optimizer import runtime_of
from offstage.phases.parking import Lot, lot_for
from tests.support.training import lazily, same_bits

CPU = torch.device("cpu")
SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}


def make(config=None, layers=3, width=64):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if config is not None:
        optimizer = offstage.offload(optimizer, model, **{**SMALL, **config})
    backward(model)
    optimizer.step()
    return model, optimizer


def backward(model, number=0):
    width = model[0].in_features
    model(torch.randn(4, width, generator=torch.Generator().manual_seed(number))).pow(2).mean().backward()


def storage_bytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def clones(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def all_same(a, b):
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=[None, 0], ids=["at_once", "lazily"])
def lanes(request):
    chosen = lazily(request.param) if request.param is not None else use_lanes(ImmediateLanes)
    with chosen, mock.patch("offstage.phases.parking._SMALL", 0):
        yield


# What goes, and what comes back


def test_memory_goes_and_objects_stay(lanes):
    model, optimizer = make()
    params = list(model.parameters())
    state = [value for values in optimizer.state.values() for value in values.values()]
    kept = params + [param.grad for param in params] + state
    expected = clones(kept)
    report = sleep(model, optimizer)
    assert storage_bytes(kept) == 0
    assert report.freed_bytes == report.devices[0].parked_bytes == sum(one.nbytes for one in expected)
    assert "asleep on cpu" in str(report)
    woken = wake(model, optimizer)
    assert woken.nbytes == report.freed_bytes
    assert list(map(id, model.parameters())) == list(map(id, params))
    assert all(param.grad is grad for param, grad in zip(params, kept[len(params) :], strict=False))
    assert all_same(kept, expected)
    assert {type(tensor) for tensor in kept} == {nn.Parameter, torch.Tensor}
    assert not any("_offstage_away" in vars(tensor) for tensor in kept)
    woken.wait()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(param._backward_hooks for param in params)


def test_views_and_ties(lanes):
    model = nn.Module()
    flat = torch.arange(200.0)
    model.a, model.b = nn.Parameter(flat[:100]), nn.Parameter(flat[100:])
    model.tied = model.a
    model.register_buffer("alias", flat[50:150])
    expected = clones([model.a, model.b, model.alias])
    report = sleep(model)
    assert report.freed_bytes == flat.nbytes  # once
    wake(model)
    assert all_same([model.a, model.b, model.alias], expected)
    with torch.no_grad():
        model.a[60] = -1.0
    assert model.alias[10] == -1.0 == flat[60]


def test_a_view_that_nothing_knows_of_is_waited_for(lanes):
    model, _ = make()
    hidden = model[1].weight.detach()
    expected = hidden.clone()
    sleep(model)
    wake(model)
    link_for(CPU)
    assert torch.equal(hidden.view(-1).add(0), expected.view(-1))


def test_any_use_waits(lanes):
    model, optimizer = make()
    expected = clones(model.parameters())
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    sleep(model, optimizer)
    wake(model, optimizer)
    assert torch.equal(model[2].weight.sum(), expected[4].sum())
    assert nn.utils.get_total_norm([param.grad for param in model.parameters()]) == norm
    assert all_same(model.state_dict().values(), expected)


def test_a_module_waits_for_its_own():
    """The first layer runs while the last one is still to come."""
    with lazily(0), mock.patch.multiple("offstage.phases.parking", _SMALL=0, _BATCH=1):
        model, optimizer = make()
        sleep(model, optimizer, drop=("gradients",))
        wake(model, optimizer)
        model[0](torch.ones(1, 64))
        assert type(model[0].weight) is nn.Parameter
        assert type(model[2].weight) is not nn.Parameter


def test_the_order_is_that_of_the_last_forward():
    class Backwards(nn.Sequential):
        def forward(self, x):
            for layer in reversed(list(self)):
                x = layer(x)
            return x

    fetched = []
    with mock.patch.multiple("offstage.phases.parking", _SMALL=0, _BATCH=1):
        model = Backwards(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        for _ in range(2):
            sleep(model)
            with mock.patch.object(lot_for(CPU), "fetch", wraps=lot_for(CPU).fetch) as fetch:
                wake(model)
            fetched.append([one.label for one in fetch.call_args.args[0]])
            model(torch.ones(1, 8))
    names = [f"Parameter '{number}.weight'" for number in range(4)]
    assert fetched == [names, names[::-1]]


def test_weights_come_before_gradients_and_state():
    with mock.patch("offstage.phases.parking._SMALL", 0):
        model, optimizer = make()
        model.register_buffer("last", torch.ones(3))
        sleep(model, optimizer)
        with mock.patch.object(lot_for(CPU), "fetch", wraps=lot_for(CPU).fetch) as fetch:
            wake(optimizer, model)
    kinds = [one.kind for one in fetch.call_args.args[0]]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["buffers", "weights", "gradients", "state"]


def test_kinds(lanes):
    model, optimizer = make({"fraction": 0.5})
    resident = [tensor for state in runtime_of(optimizer).all_states() for tensor in state.resident.values()]
    grads = [param.grad for param in model.parameters()]
    assert storage_bytes(resident) > 0
    sleep(model, optimizer, keep=("weights", "gradients"))
    assert (storage_bytes(resident), storage_bytes(grads) > 0) == (0, True)
    model(torch.ones(1, 64))
    with pytest.raises(OffstageError, match="asleep"):
        optimizer.step()
    sleep(model, optimizer, keep=["weights"])
    assert storage_bytes(grads) == 0 < storage_bytes(model.parameters())
    model(torch.ones(1, 64))
    sleep(model, optimizer)
    assert storage_bytes(model.parameters()) == 0
    wake(model)  # weights for a weight sync, before the optimizer's state
    assert storage_bytes(model.parameters()) > 0 == storage_bytes(resident)
    assert asleep(optimizer)
    wake(optimizer)
    optimizer.step()


def test_need_parks_the_cheapest_first():
    model, optimizer = make({"fraction": 0.5})
    weights, grads = list(model.parameters()), [param.grad for param in model.parameters()]
    resident = [tensor for state in runtime_of(optimizer).all_states() for tensor in state.resident.values()]
    slots = runtime_of(optimizer).engines[0].transport.pipeline.device_bytes
    sizes = [slots, storage_bytes(grads), storage_bytes(resident), storage_bytes(weights)]
    assert all(sizes)
    assert sleep(model, optimizer, need=0).freed_bytes == 0
    assert not asleep(model)
    assert sleep(model, optimizer, need=slots).freed_bytes == slots
    assert (asleep(model), asleep(optimizer)) == (False, False)
    backward(model, 1)
    optimizer.step()  # makes new slots
    found = []
    for need in (slots + 1, sum(sizes[:2]) + 1, sum(sizes[:3]) + 1, sum(sizes)):
        sleep(model, optimizer, need=need)
        found.append([storage_bytes(kind) for kind in ([p.grad for p in weights], resident, weights)])
        wake(model, optimizer).wait()
        backward(model, 2)
        optimizer.step()
    assert 0 < found[0][0] < sizes[1]
    assert found[0][1:] == sizes[2:]
    assert (found[1][0], 0 < found[1][1] < sizes[2], found[1][2]) == (0, True, sizes[3])
    assert (found[2][:2], 0 < found[2][2] < sizes[3]) == ([0, 0], True)
    assert found[3] == [0, 0, 0]


def test_need_asks_the_device():
    """As much goes as the device lacks, and nothing if it has it."""
    free = [1000]

    class Counting(ImmediateLanes):
        def device_memory(self):
            return free[0], 0, 10**9

    with use_lanes(Counting):
        model, optimizer = make()
        assert sleep(model, optimizer, need=1000).freed_bytes == 0
        report = sleep(model, optimizer, need=1001, drop=("gradients",))
        assert 0 < report.freed_bytes < storage_bytes(model.parameters())
        assert model[0].weight.grad is None or model[2].weight.grad is None
        assert not asleep(model)


def test_state_on_the_host_does_not_move(lanes):
    model, optimizer = make({"weights": "host"})
    report = sleep(model, optimizer, drop=("gradients",))
    assert report.devices[0].parked_bytes == 0
    assert report.devices[0].freed_bytes > 0  # slots
    assert asleep(model, optimizer)
    with pytest.raises(OffstageError, match="asleep"):
        model(torch.ones(1, 64))
    wake(model, optimizer)
    backward(model)
    optimizer.step()


def test_host_memory_is_exact_and_used_again():
    model, optimizer = make(width=100)
    sizes = []
    for number in range(20):
        report = sleep(model, optimizer, drop=("gradients",) if number % 3 == 0 else ())
        sizes.append((report.devices[0].host_bytes, report.devices[0].parked_bytes))
        wake(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, number)
    assert len({host for host, _ in sizes[1:]}) == 1
    assert sizes[1][0] <= 1.02 * sizes[1][1] + 256 * 20


def test_frozen_weights_are_copied_once():
    model, optimizer = make()
    model[0].requires_grad_(False)
    frozen = storage_bytes(model[0].parameters())

    def copied():
        report = sleep(model, optimizer, drop=("gradients",))
        wake(model, optimizer).wait()
        return report.devices[0].parked_bytes - report.devices[0].copied_bytes

    assert copied() == 0
    assert copied() == frozen
    model[0].weight.data.add_(1.0)  # leaves no trace in the version counter
    expected = model[0].weight.detach().clone()
    assert copied() == storage_bytes([model[0].bias])
    assert torch.equal(model[0].weight, expected)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))
    assert copied() == storage_bytes([model[0].bias])
    assert torch.equal(model[0].weight, expected.flip(0))


def test_a_copy_that_failed_is_not_taken_for_one():
    with use_lanes(ImmediateLanes):
        model = nn.Linear(64, 64).requires_grad_(False)
        sleep(model)
        wake(model).wait()
        with torch.no_grad():
            model.weight.fill_(7.0)
        with (
            mock.patch("offstage.phases.parking.check_host_memory", side_effect=HostMemoryError("no room")),
            raises("no room", HostMemoryError),
        ):
            sleep(model)
        assert sleep(model).devices[0].copied_bytes == model.weight.nbytes
        wake(model)
        assert bool((model.weight == 7.0).all())


def test_a_copy_made_in_between_counts():
    """`.data` leaves no trace; the checksum is that of a copy that was overwritten since."""
    layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
    first = layer.weight.detach().clone()
    for trained, values in ((False, first), (True, 0 * first + 7.0), (False, first)):
        layer.requires_grad_(trained)
        layer.weight.data.copy_(values)
        sleep(layer)
        wake(layer).wait()
        assert torch.equal(layer.weight, values)


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: it never calls torch's `__init__`."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


def test_a_wrapper_of_an_optimizer():
    model, optimizer = make()
    wrapper = Wrapper(optimizer)
    sleep(model, wrapper)
    assert asleep(optimizer)
    wake(model, Wrapper(optimizer))
    optimizer.step()
    wrapper.optimizer = None
    with raises("Pass the optimizer that it wraps", ConfigError):
        sleep(model, wrapper)
    assert not asleep(model)


def test_two_models_that_share_a_weight():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    expected = first.weight.detach().clone()
    sleep(first)
    with pytest.raises(OffstageError, match="'weight' is asleep"):
        second(torch.ones(1, 8))
    sleep(second)
    wake(first)
    assert torch.equal(first.weight, expected)
    first(torch.ones(1, 8))
    assert asleep(second)
    wake(second)
    second(torch.ones(1, 8))


def test_dropped_while_asleep(lanes):
    model, optimizer = make()
    sleep(model, optimizer)
    lot = weakref.ref(lot_for(CPU))
    assert lot() is not None
    held, before = lot().host_bytes, lot()
    del before
    assert held > 0
    del model, optimizer
    gc.collect()
    assert lot() is None  # and with it its host memory


def test_dropped_while_waking(lanes):
    model, optimizer = make()
    sleep(model, optimizer)
    wake(model, optimizer)
    del model, optimizer
    gc.collect()


def test_gradients_zeroed_while_asleep(lanes):
    model, optimizer = make()
    sleep(model, optimizer)
    optimizer.zero_grad()
    woken = wake(model, optimizer)
    assert woken.nbytes == 3 * storage_bytes(model.parameters()) + 4 * len(list(model.parameters()))
    assert all(param.grad is None for param in model.parameters())


# Reading meanwhile


@pytest.mark.parametrize("config", [None, {"fraction": 0.0}, {"fraction": 0.5}, {"master_weights": "split"}])
def test_state_dicts(config, lanes):
    model, optimizer = make(config)
    expected = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    sleep(model, optimizer)
    found = [model.state_dict(), optimizer.state_dict()]
    assert all_same(expected[0].values(), found[0].values())
    assert found[1]["param_groups"] == expected[1]["param_groups"]
    for index, values in expected[1]["state"].items():
        for name, value in values.items():
            assert same_bits(torch.as_tensor(value), torch.as_tensor(found[1]["state"][index][name]))
    assert len(pickle.dumps(found[0]["0.bias"])) < 2000  # not the whole host memory
    wake(model, optimizer)
    other, again = make(config)
    again.load_state_dict(found[1])
    other.load_state_dict(found[0])


def same_files(a, b):
    """Data files; the manifest has a date."""
    names = sorted(path.name for path in a.iterdir() if path.suffix == ".distcp")
    assert names
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


@pytest.mark.parametrize("config", [{"fraction": 0.5}, {"weights": "host"}, {"master_weights": "split"}])
def test_checkpoints(tmp_path, config, lanes):
    model, optimizer = make(config)
    checkpoint.save(tmp_path / "awake", model, optimizer)
    sleep(model, optimizer)
    checkpoint.save(tmp_path / "asleep", model, optimizer)
    checkpoint.async_save(tmp_path / "later", model, optimizer).result()
    wake(model, optimizer)
    assert same_files(tmp_path / "awake", tmp_path / "asleep")
    assert same_files(tmp_path / "awake", tmp_path / "later")


def test_a_save_that_was_under_way(tmp_path, lanes):
    """It reads what it has: not what sleeps, wakes and is trained on meanwhile."""
    model, optimizer = make({"fraction": 0.5})
    checkpoint.save(tmp_path / "before", model, optimizer)
    over = checkpoint.AsyncSave._run

    def later(self, ranks):
        sleep(model, optimizer)
        wake(model, optimizer)
        backward(model, 5)
        optimizer.step()
        sleep(model, optimizer)
        over(self, ranks)

    with mock.patch.object(checkpoint.AsyncSave, "_start", later):
        checkpoint.async_save(tmp_path / "during", model, optimizer).result()
    assert same_files(tmp_path / "before", tmp_path / "during")


# Misuse: one message each


def raises(match, kind=OffstageError):
    return pytest.raises(kind, match=match)


def test_uses_while_asleep():
    model, optimizer = make({"fraction": 0.5})
    twin, plain = make()
    sleep(model, optimizer, twin, plain)
    with raises("Sequential is asleep.*forward"):
        model(torch.ones(1, 64))
    with raises("Sequential's Linear is asleep"):
        model[1](torch.ones(1, 64))
    with raises("is asleep.*step"):
        optimizer.step()
    with raises("is asleep.*step"):
        plain.step()
    with raises("AdamW is asleep.*load_state_dict"):
        plain.load_state_dict(plain.state_dict())
    with raises("The gradient of '0.weight' is asleep"):
        model[0].weight.grad.norm()
    with raises("The gradient of '0.weight' is asleep"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with raises("is asleep"):
        optimizer.clip_grad_norm_(1.0)
    with raises("Parameter '0.weight' is asleep"):
        copy.deepcopy(model)
    with raises("Sequential is asleep.*load_state_dict"):
        model.load_state_dict(model.state_dict())
    with raises("is asleep"):
        pickle.dumps(model[0].weight)
    with raises("is asleep"):
        optimizer.load_state_dict(optimizer.state_dict())
    with raises("is asleep"):
        optimizer.replan(fraction=1.0)
    with raises("is asleep"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(8))]})
    assert len(optimizer.param_groups) == 1
    assert "Away" in repr(model[0].weight)
    assert model[0].weight.shape == (64, 64)
    wake(model, optimizer, twin, plain)
    backward(model, 1)
    optimizer.step()


def test_loading_a_checkpoint_asleep(tmp_path):
    model, optimizer = make({"fraction": 0.5})
    checkpoint.save(tmp_path / "one", model, optimizer)
    sleep(model, optimizer)
    with raises("asleep"):
        checkpoint.load(tmp_path / "one", model, optimizer)
    wake(model, optimizer)
    checkpoint.load(tmp_path / "one", model, optimizer)


def test_a_backward_of_an_earlier_forward():
    model, optimizer = make()
    optimizer.zero_grad()
    twin, _ = make()
    twin.load_state_dict(model.state_dict())
    twin.zero_grad()
    x = torch.randn(4, 64)
    loss = model(x).pow(2).mean()
    sleep(model, optimizer)
    with raises("modified by an inplace operation|asleep", RuntimeError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    wake(model, optimizer).wait()
    loss.backward()
    twin(x).pow(2).mean().backward()
    assert all_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_what_cannot_sleep():
    model, optimizer = make()
    with raises("expects modules and optimizers; found none", ConfigError):
        sleep()
    with raises("found none", ConfigError):
        wake()
    with raises("found none", ConfigError):
        asleep()
    with raises("found list", ConfigError):
        sleep([model, optimizer])
    with raises("found 'weight'", ConfigError):
        sleep(model, keep=("weight",))
    with raises("drop expects kinds of gradients; found 'weights'", ConfigError):
        sleep(model, drop=("weights",))
    with raises("need", ConfigError):
        sleep(model, need="much")
    with raises("has never slept"):
        wake(model)
    assert not asleep(model)
    consumed = torch.optim.AdamW(model.parameters())
    offstage.offload(consumed, fraction=0.0)
    with raises("took over", ConfigError):
        sleep(consumed)


def test_in_a_backward():
    model, optimizer = make()
    handle = model[0].weight.register_hook(lambda grad: sleep(model, optimizer) and None)
    with raises("in a backward"):
        backward(model)
    handle.remove()
    assert not asleep(model)


def test_between_backward_and_step():
    model, optimizer = make({"update_in_backward": True})
    optimizer.zero_grad()
    for number in range(2):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    backward(model)
    with raises("backward"):
        sleep(model)
    with raises("backward"):
        sleep(optimizer)
    optimizer.step()
    sleep(model, optimizer)
    wake(model, optimizer)


def test_a_lost_step():
    model, optimizer = make({})
    runtime_of(optimizer).lose("A test has lost it.")
    with raises("A test has lost it", StepLostError):
        sleep(model, optimizer)


def test_too_little_host_memory(lanes):
    model, optimizer = make()
    kept = [*model.parameters(), *(param.grad for param in model.parameters())]
    expected = clones(kept)
    with (
        mock.patch("offstage.memory.arena.mem_available", return_value=1000),
        raises("Nothing has changed. Free host memory", HostMemoryError),
    ):
        sleep(model, optimizer)
    assert not asleep(model)
    assert lot_for(CPU).host_bytes == 0
    assert all_same(kept, expected)
    backward(model)
    optimizer.step()
    sleep(model, optimizer)


def test_the_host_memory_ends_on_the_way(lanes):
    """Of several slabs, one is refused."""
    model, optimizer = make()
    expected = clones(model.parameters())
    arena = offstage.memory.pool.Arena
    made = []

    def refuse(*args, **kwargs):
        made.append(args)
        if len(made) == 3:
            raise HostMemoryError("The driver refused to pin.")
        return arena(*args, **kwargs)

    with (
        mock.patch("offstage.memory.pool._LARGEST_SLAB", 4096),
        mock.patch("offstage.memory.pool.Arena", refuse),
        raises("refused to pin", HostMemoryError),
    ):
        sleep(model, optimizer)
    assert not asleep(model)
    assert all_same(model.parameters(), expected)
    backward(model)
    optimizer.step()
    sleep(model, optimizer)
    wake(model, optimizer)
    backward(model)


def test_the_host_memory_ends_in_a_later_round():
    """What has left in the first one comes back."""

    class Short(ImmediateLanes):
        def device_memory(self):
            return 1000, 10**8, 10**9  # whatever leaves, it is not enough

    with use_lanes(Short):
        model, optimizer = make()
        kept = [*model.parameters(), *(param.grad for param in model.parameters())]
        expected = clones(kept)
        check, calls = offstage.phases.parking.check_host_memory, []

        def refuse(*args, **kwargs):
            calls.append(args)
            if len(calls) == 3:
                raise HostMemoryError("no room")
            return check(*args, **kwargs)

        with mock.patch("offstage.phases.parking.check_host_memory", refuse), raises("no room", HostMemoryError):
            sleep(model, optimizer, need=1001)
        assert not asleep(model)
        assert {type(tensor) for tensor in kept} == {nn.Parameter, torch.Tensor}
        assert all_same(kept, expected)


def test_no_room_on_another_device(lanes):
    """What has come on the first one goes again."""
    model, optimizer = make()
    expected = clones(model.parameters())
    sleep(model, optimizer)
    lot = lot_for(CPU)
    away = [one for one in lot.parked.values() if one.stage.value == "away"]
    lot.fetch(away)
    lot.undo(away)
    assert storage_bytes(model.parameters()) == 0
    with raises("asleep"):
        model(torch.ones(1, 64))
    wake(model, optimizer)
    assert all_same(model.parameters(), expected)


@pytest.mark.parametrize("at", [1, 4])
def test_interrupted(at, lanes):
    """Ctrl-C in the middle of the copies: awake as before, asleep as before."""
    model, optimizer = make()
    expected = clones([*model.parameters(), *(param.grad for param in model.parameters())])
    for name, call, sleeps in (("_submit", sleep, False), ("_bring", wake, True)):
        if sleeps:
            sleep(model, optimizer)
        made = getattr(Lot, name)
        calls = itertools.count(1)

        def interrupted(self, one, made=made, calls=calls):
            if next(calls) == at:
                raise KeyboardInterrupt
            made(self, one)

        with (
            mock.patch.object(Lot, name, interrupted),
            mock.patch("offstage.phases.parking._BATCH", 1),
            pytest.raises(KeyboardInterrupt),
        ):
            call(model, optimizer)
        assert asleep(model) == sleeps
    wake(model, optimizer)
    assert all_same([*model.parameters(), *(param.grad for param in model.parameters())], expected)
    backward(model)
    optimizer.step()


class Full(ImmediateLanes):
    """A device whose memory another process holds."""

    free = 10**9

    def device_memory(self):
        return self.free, 0, 10**9


def test_the_device_is_full_at_wake():
    with use_lanes(Full):
        model, optimizer = make()
        expected = clones(model.parameters())
        sleep(model, optimizer)
        with (
            mock.patch.object(Full, "free", 1000),
            raises(r"wake\(\) needs .* found 1000 B free.*Nothing has changed.*call wake\(\) again"),
        ):
            wake(model, optimizer)
        assert asleep(model, optimizer)
        assert all_same(model.state_dict().values(), expected)
        wake(model, optimizer)
        assert all_same(model.parameters(), expected)


@pytest.mark.parametrize("segment", [1, 1 << 30])
def test_the_device_fills_on_the_way(segment, lanes, monkeypatch):
    monkeypatch.setattr("offstage.phases.parking._SEGMENT", segment)
    model, optimizer = make()
    expected = clones(model.parameters())
    sleep(model, optimizer)
    resize, calls = torch.UntypedStorage.resize_, []

    def full(self, nbytes):
        calls.append(nbytes)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("out of memory")
        return resize(self, nbytes)

    with mock.patch.object(torch.UntypedStorage, "resize_", full), raises("Nothing has changed"):
        wake(model, optimizer)
    assert storage_bytes(model.parameters()) == 0
    assert asleep(model, optimizer)
    wake(model, optimizer)
    assert all_same(model.parameters(), expected)
    backward(model)
    optimizer.step()


def test_compiled_modules_are_waited_for(lanes):
    """They run the hooks that there were when they were compiled."""
    model, optimizer = make()
    model[1].compile(backend="eager")
    model(torch.ones(1, 64))
    expected = clones([model(torch.ones(1, 64))])
    sleep(model, optimizer)
    wake(model, optimizer)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert all_same([model(torch.ones(1, 64))], expected)


def test_evaluated_in_another_thread_while_waking(lanes):
    from concurrent.futures import ThreadPoolExecutor

    model, optimizer = make()
    expected = model(torch.ones(1, 64)).detach()
    for _ in range(5):
        sleep(model, optimizer)
        wake(model, optimizer)
        with ThreadPoolExecutor(2) as pool, torch.no_grad():
            found = list(pool.map(lambda _: model(torch.ones(1, 64)).detach(), range(2)))
        assert all(torch.equal(one, expected) for one in found)
