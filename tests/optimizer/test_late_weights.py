# SPDX-License-Identifier: Apache-2.0
"""Weights whose update is late (`overlap_forward`): code that uses one outside a forward gets the new values.

Every read comes right after `step()`, without `synchronize()`. On lazy lanes nothing of the step has run by then unless
something waits for it, so that a read which does not wait sees old weights.
"""

import contextlib
import copy
import ctypes
import gc
import io
import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

import offstage
from offstage.engine.late import LateWeights
from offstage.errors import OffstageError, StepLostError
from offstage.memory.guarded import GuardedTensor, unguarded
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import SMALL, TORCH, Blocks, adamw, assert_same_weights
from tests.support.lives import CPU, assert_same_lives, clip_to, end_step, fail_at, inputs, iterate, loss_of
from tests.support.training import lazily

FORWARD = {**SMALL, "overlap_forward": True}
BOTH = {**FORWARD, "update_in_backward": True}
CONFIGS = {
    "forward": FORWARD,
    "both": BOTH,
    "both, clipped": BOTH,
    "half": {**FORWARD, "fraction": 0.5},
    "on the host": {**FORWARD, "update_on": "host"},
    "torch's rule": {**FORWARD, "rule": "torch"},
    "fp32 masters": {**FORWARD, "master_weights": "fp32"},
    "split masters": {**BOTH, "master_weights": "split"},
    "hosted": {**FORWARD, "weights": "host"},
    "hosted, both": {**BOTH, "weights": "host"},
    "hosted, both, clipped": {**BOTH, "weights": "host"},
}
SEEDS = (None, 0, 1)
STEPS = 3


def clip_of(name):
    return 1e4 if "clipped" in name else None


def dtype_of(name):
    return torch.bfloat16 if "masters" in name else torch.float32


def trained(config, *, name="", steps=STEPS):
    model = Blocks().to(dtype_of(name))
    optimizer = offstage.offload(adamw(model.parameters()), model, **config)
    iterate(model, optimizer, range(steps), clip_of(name))
    return model, optimizer


def reference(config, **arguments):
    """The same training with all updates in `step()`."""
    plain = {key: value for key, value in config.items() if key not in ("overlap_forward", "update_in_backward")}
    return trained(plain, **arguments)[0]


def is_late(param):
    return isinstance(param, GuardedTensor)


def num_late(model):
    return sum(map(is_late, model.parameters()))


def num_pending(optimizer):
    return sum(len(engine.unsettled) for engine in runtime_of(optimizer).engines)


# Reads


def params_of(model):
    """From the last one on: a read of the first must not have helped it."""
    return list(model.parameters())[::-1]


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return params_of(average.module)


def storage_values(param):
    flat = torch.empty(0, dtype=param.dtype).set_(param.untyped_storage())
    return flat[param.storage_offset() :][: param.numel()].view(param.shape)


def by_address(param):
    """As a kernel would that is given the address."""
    memory = (ctypes.c_byte * param.nbytes).from_address(param.data_ptr())
    return torch.frombuffer(memory, dtype=param.dtype)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


READS = {
    "data": lambda model: [p.data.clone() for p in params_of(model)],
    "detach": lambda model: [p.detach().clone() for p in params_of(model)],
    "an operation": lambda model: [p * 2 for p in params_of(model)],
    "another module's": lambda model: [
        nn.functional.linear(torch.eye(48).to(p.dtype), p) for p in params_of(model)[1::2]
    ],
    "a function": lambda model: [Doubled.apply(p) for p in params_of(model)],
    "item": lambda model: [p.float().norm().item() for p in params_of(model)],
    "numpy": lambda model: [p.detach().float().numpy().copy() for p in params_of(model)],
    "array": lambda model: [np.array(p.detach().float()) for p in params_of(model)],
    "tolist": lambda model: [p.tolist() for p in params_of(model)],
    "repr": lambda model: [repr(p) for p in params_of(model)],
    "vector": lambda model: [nn.utils.parameters_to_vector(params_of(model))],
    "foreach": lambda model: torch._foreach_mul(params_of(model), 3.0),
    "foreach norm": lambda model: torch._foreach_norm(params_of(model)),
    "stack": lambda model: [torch.cat([p.flatten() for p in params_of(model)])],
    "out": lambda model: [torch.add(p, 1, out=torch.empty_like(p)) for p in params_of(model)],
    "copied into": lambda model: [torch.zeros_like(p).copy_(p) for p in params_of(model)],
    "compared": lambda model: [p == p.detach() * 1 for p in params_of(model)] + [p > 0 for p in params_of(model)],
    "indexed": lambda model: [p[..., 0].clone() for p in params_of(model)],
    "to": lambda model: [p.to(torch.float64) for p in params_of(model)],
    "storage": lambda model: [storage_values(p).clone() for p in params_of(model)],
    "address": lambda model: [by_address(p).clone() for p in params_of(model)],
    "dlpack": lambda model: [torch.from_dlpack(p.detach()).clone() for p in params_of(model)],
    "deepcopy": lambda model: [copy.deepcopy(p) for p in params_of(model)],
    "copy": lambda model: [copy.copy(p) for p in params_of(model)],
    "deepcopy of the model": lambda model: params_of(copy.deepcopy(model)),
    "pickle": lambda model: [pickle.loads(pickle.dumps(p)) for p in params_of(model)],
    "save": lambda model: [saved(p) for p in params_of(model)],
    "save of the model": lambda model: params_of(saved(model)),
    "state dict": lambda model: list(saved(model.state_dict()).values()),
    "state dict of a part": lambda model: list(saved(model.layers[2].state_dict()).values()),
    "average": averaged,
    "a new parameter": lambda model: [nn.Parameter(p) for p in params_of(model)],
    "differentiated": lambda model: [
        torch.func.jvp(torch.sin, (p,), (torch.ones_like(p),))[0] for p in params_of(model)
    ],
    "class": lambda model: [type(p)(p.data.clone()) for p in params_of(model)],
    "functional call": lambda model: [
        functional_call(model, {n: p * 1 for n, p in model.named_parameters()}, inputs(0).to(params_of(model)[0].dtype))
    ],
}
WRITES = {
    "in place": lambda p: p.mul_(0.5),
    "through data": lambda p: p.data.add_(1.0),
    "copy to data": lambda p: p.data.copy_(p.data * 2),
    "new data": lambda p: setattr(p, "data", p.data * 3),
    "copy": lambda p: p.copy_(torch.full_like(p, 0.25)),
    "init": lambda p: nn.init.constant_(p, 0.125),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "slice": lambda p: p[:3].zero_(),
}


def same(expected, got):
    """Equal bits, of equal classes."""
    assert len(expected) == len(got)
    for one, other in zip(expected, got, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        elif isinstance(one, np.ndarray):
            assert (one == other).all()
        else:
            assert one == other


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("read", READS)
@torch.no_grad()
def test_every_read_sees_the_new_weights(name, read):
    config = CONFIGS[name]
    with torch.enable_grad():
        twin = reference(config, name=name)
    expected = READS[read](twin)
    for seed in SEEDS if name in ("forward", "hosted") else SEEDS[1:2]:
        with lazily(seed):
            with torch.enable_grad():
                model, optimizer = trained(config, name=name)
            assert num_late(model)
            assert num_pending(optimizer) or name.startswith("hosted, both")  # where updates end when a layer leaves
            same(expected, READS[read](model))
            with torch.enable_grad():  # and training goes on
                iterate(model, optimizer, [STEPS], clip_of(name))
            optimizer.synchronize()
    with torch.enable_grad():
        assert_same_weights(reference(config, name=name, steps=STEPS + 1), model)


@pytest.mark.parametrize("name", ["forward", "hosted"])
@pytest.mark.parametrize(
    "read", ["data", "an operation", "deepcopy", "save of the model", "foreach", "average", "storage"]
)
@torch.no_grad()
def test_without_the_guard_they_would_not(name, read):
    """So that the test above means something."""
    config = CONFIGS[name]
    with torch.enable_grad():
        expected = READS[read](reference(config))
    with lazily(0), mock.patch.object(LateWeights, "hold"):
        with torch.enable_grad():
            model, _optimizer = trained(config)
        assert not num_late(model)
        got = READS[read](model)
    assert not all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["forward", "both", "fp32 masters", "split masters", "hosted", "hosted, both"])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_comes_after_the_update(name, write, seed):
    """Training goes on with what was written, as if the update had been made in `step()`."""

    def life(settings):
        model, optimizer = trained(settings, name=name)
        with torch.no_grad():
            for param in params_of(model)[::2]:
                WRITES[write](param)
        found = [param.detach().clone() for param in params_of(model)]
        iterate(model, optimizer, range(STEPS, STEPS + 2))
        optimizer.synchronize()
        return found, model

    expected = life({key: value for key, value in CONFIGS[name].items() if key != "overlap_forward"})
    with lazily(seed):
        got = life(CONFIGS[name])
    same(expected[0], got[0])
    assert_same_weights(expected[1], got[1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("extra", [{}, {"update_in_backward": True}, {"weights": "host"}], ids=str)
def test_an_average_over_many_steps_has_plain_torchs_bits(extra, seed):
    """No call of synchronize() anywhere."""

    def life(model, optimizer):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        norms = []
        for number in range(20):
            iterate(model, optimizer, [number])
            average.update_parameters(model)
            norms.append(torch.stack(torch._foreach_norm(list(model.parameters()))).sum().item())
        return params_of(average.module), norms

    plain = Blocks()
    expected = life(plain, adamw(plain.parameters()))
    with lazily(seed):
        model = Blocks()
        got = life(model, offstage.offload(adamw(model.parameters()), model, overlap_forward=True, **TORCH, **extra))
    same(expected[0], got[0])
    assert expected[1] == got[1]


# What does not wait


def harmless(model, optimizer, scheduler):
    """What a loop does with parameters between two steps without using their values."""
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scheduler.step()
    seen = {}
    for name, param in model.named_parameters():
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, torch.Tensor)
        assert param is model.get_parameter(name)
        assert param in {param}
        assert hash(param) == id(param)
        assert param.grad is None
        param.grad = torch.zeros_like(param)
        del param.grad
        seen[param] = (param.shape, param.dtype, param.device, param.numel(), param.stride(), param.is_contiguous())
        assert (param.requires_grad, param.is_leaf, param.grad_fn, param.ndim) == (True, True, None, param.dim())
        param.requires_grad_(False).requires_grad_(True)
        param.register_hook(lambda grad: grad).remove()
        param.register_post_accumulate_grad_hook(lambda param: None).remove()
        assert (len(param), param.is_cuda, param.nbytes) == (param.shape[0], False, 4 * param.numel())
        assert param._version
        assert nn.Module().register_parameter("weight", param) is None
    assert sum(param.numel() for param in model.parameters() if param.requires_grad) == 3 * (48 * 48 + 48)


@pytest.mark.parametrize("config", [FORWARD, BOTH, CONFIGS["hosted"]], ids=["forward", "both", "hosted"])
def test_what_needs_no_values_does_not_wait(config):
    with lazily(0):
        model, optimizer = trained(config, steps=0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        iterate(model, optimizer, range(STEPS))
        late, pending = num_late(model), num_pending(optimizer)
        harmless(model, optimizer, scheduler)
        assert (num_late(model), num_pending(optimizer)) == (late, pending)
        assert late
        assert pending


@pytest.mark.parametrize(
    "make",
    [adamw, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), lambda p: torch.optim.Adafactor(p, lr=0.1)],
    ids=["AdamW", "SGD", "Adafactor"],
)
@pytest.mark.parametrize("extra", [{}, {"update_in_backward": True}, {"weights": "host"}, {"window": "all"}], ids=str)
def test_training_alone_asks_nothing(extra, make):
    """Neither offstage's own code nor modules do: asking means waiting, and updates would not be late."""

    def transposed():
        model = Blocks()
        model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach().t())  # another order in memory
        return model

    for seed in SEEDS:
        with lazily(seed), mock.patch.object(LateWeights, "before_use") as asked:
            model = transposed()
            optimizer = offstage.offload(make(model.parameters()), model, **FORWARD, **extra)
            for number in range(5):
                iterate(model, optimizer, [number], 1.0 if extra.get("update_in_backward") else None)
                optimizer.zero_grad(set_to_none=False)
        assert not asked.mock_calls
        optimizer.close()


def test_one_read_waits_for_one_weight():
    """The others stay late."""
    with lazily(0):
        model, optimizer = trained(FORWARD)
        before = num_pending(optimizer)
        assert model.layers[1].weight.detach().isfinite().all()
        assert num_pending(optimizer) == before - 1
        assert [is_late(param) for param in model.layers[1].parameters()] == [False, True]


# The class comes back


def forward(model, optimizer):
    model(inputs(0))


def inference(model, optimizer):
    with torch.inference_mode():
        model(inputs(0))


def by_synchronize(model, optimizer):
    optimizer.synchronize()


def closed(model, optimizer):
    optimizer.close()


def asleep(model, optimizer):
    offstage.sleep(model, optimizer)
    offstage.wake(model, optimizer).wait()


def replanned(model, optimizer):
    optimizer.replan(fraction=0.5)


def read(model, optimizer):
    for param in model.parameters():
        assert param.data is not None


def optimizer_state(model, optimizer):
    optimizer.state_dict()


def loaded(model, optimizer):
    model.load_state_dict(Blocks().state_dict())


def hand_made(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with mock.patch.object(LateWeights, "hold"):
        optimizer.step()


ENDS = [forward, inference, by_synchronize, closed, asleep, read, optimizer_state, loaded, hand_made, replanned]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("end", "name"),
    [
        *((end, name) for end in ENDS for name in ("forward", "both")),
        # After a forward the newest values of these are on the device.
        *((end, name) for end in ENDS[2:7] for name in ("hosted", "hosted, both")),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_class_comes_back(end, name, seed):
    with lazily(seed):
        model, optimizer = trained(CONFIGS[name])
        assert num_late(model)
        end(model, optimizer)
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
        assert all("_offstage_guard" not in vars(param) for param in model.parameters())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["forward", "both", "torch's rule", "hosted", "hosted, both"])
def test_a_dropped_optimizer_leaves_ordinary_parameters(name, seed):
    """At once, and with the last update made."""
    expected = reference(CONFIGS[name])
    gc.disable()
    try:
        with lazily(seed):
            model, optimizer = trained(CONFIGS[name])
            assert num_late(model)
            del optimizer
            assert {type(param) for param in model.parameters()} == {nn.Parameter}
            assert_same_weights(expected, model)
    finally:
        gc.enable()


def test_copies_are_ordinary_and_stay_so():
    with lazily(0):
        model, optimizer = trained(FORWARD)
        twin = copy.deepcopy(model)
        iterate(model, optimizer, [9])
        assert num_late(model)
        assert {type(param) for param in twin.parameters()} == {nn.Parameter}
        assert all(vars(param) == {} for param in twin.parameters())


def test_another_process_gets_the_memory_and_not_a_copy():
    """As of any parameter: torch's reduction for queues and spawned processes is chosen by the class."""
    with lazily(0):
        model, _optimizer = trained(FORWARD)
        param = model.layers[0].weight
        assert is_late(param)
        ForkingPickler.dumps(param)
        assert param.is_shared()
        assert not is_late(param)


# Weights that live on the host


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["hosted", "hosted, both"])
def test_weights_on_the_host_are_new_after_their_layer_has_run(name, seed):
    """Their newest values are on the device then, and on their way."""
    expected = [param.detach().clone() for param in reference(CONFIGS[name]).parameters()]
    with lazily(seed):
        model, optimizer = trained(CONFIGS[name])
        loss = loss_of(model, STEPS)
        same(expected, [param.detach().clone() for param in model.parameters()])
        loss.backward()
        end_step(optimizer)
        optimizer.synchronize()
    assert_same_weights(reference(CONFIGS[name], steps=STEPS + 1), model)


def test_weights_on_the_host_are_not_read_between_backward_and_step():
    """As state dicts are not: some are new and some are old."""
    with lazily(0):
        model, optimizer = trained(CONFIGS["hosted, both"])
        loss_of(model, STEPS).backward()
        with pytest.raises(OffstageError, match=r"between backward and step\(\)"):
            model.layers[0].weight.sum()
        end_step(optimizer)
        assert model.layers[0].weight.isfinite().all()


# Other code's ways of running modules


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_are_compiled_once(backend):
    """The cue stands before the compiler looks at the classes of its inputs."""

    def compiled():
        torch.compiler.reset()
        model = Blocks()
        for number, layer in enumerate(model.layers):
            model.layers[number] = torch.compile(layer, backend=backend)
        return model

    graphs = []

    def life(model, optimizer):
        for number in range(5):
            iterate(model, optimizer, [number])
            torch._foreach_norm(list(model.parameters())[::2])
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert len(set(graphs[-4:])) == 1

    assert_same_lives(life, FORWARD, BOTH, model=compiled)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_of_late_weights_is_right(backend):
    """It runs as it is written, without being compiled again and again."""

    def average(old, new):
        for one, other in zip(old, new, strict=True):
            one.lerp_(other, 0.1)

    def life(model, optimizer):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        run = torch.compile(average, backend=backend)
        kept = [param.detach().clone() for param in model.parameters()]
        frames = []
        for number in range(4):
            iterate(model, optimizer, [number])
            with torch.no_grad():
                run(kept, list(model.parameters()))
            frames.append(torch._dynamo.utils.counters["frames"]["total"])
        assert len(set(frames[1:])) == 1
        return kept

    assert_same_lives(life, FORWARD, model=Blocks)


def test_a_reader_that_counts_operations_counts_its_own():
    """The update is not the reader's work."""
    with lazily(0):
        model, _optimizer = trained(FORWARD)
        with FlopCounterMode(display=False) as counter:
            model.layers[0].weight @ torch.ones(48, 1)
    assert counter.get_total_flops() == 2 * 48 * 48


def test_attention_without_gradients_takes_the_same_path():
    """torch's modules look at the classes of their weights, and take another path if one is not its own."""

    def encoder():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(48, 4, 48, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    def life(model, optimizer):
        found = []
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        for number in range(3):
            x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(number))
            model(x, src_key_padding_mask=padding).pow(2).mean().backward()
            end_step(optimizer)
            with torch.no_grad():
                model.eval()
                found += [model(x, src_key_padding_mask=padding), model.layers[1].self_attn(x, x, x)[0]]
                model.train()
        return found

    hooked = {**SMALL, "window": "all"}  # hooks alone change the path, and these wait in step()
    assert_same_lives(life, FORWARD, model=encoder, plain=hooked)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("seed", SEEDS)
def test_dtensors(seed):
    """The local tensor can be had without an operation: it is guarded, too."""

    def life(settings):
        mesh = init_device_mesh("cpu", (1,))
        model = Blocks()
        for layer in model.layers:
            for name, param in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))
        optimizer = offstage.offload(adamw(model.parameters()), model, **settings)
        found = []
        for number in range(4):
            x = distribute_tensor(inputs(number), mesh, [Replicate()])
            model(x).pow(2).mean().backward()
            end_step(optimizer)
            late = [is_late(param) for param in model.parameters()]
            with torch.no_grad():
                local = [param.to_local().clone() for param in params_of(model)[:2]]
                whole = [param.full_tensor().clone() for param in params_of(model)[2:4]]
                products = [(param * 2).to_local() for param in params_of(model)[4:]]
            found += [*local, *whole, *products]
            assert not num_late(model)
            assert all(type(param.to_local()) is torch.Tensor for param in model.parameters())
        return found, late

    expected, _ = life(SMALL)
    with lazily(seed):
        got, late = life(FORWARD)
    assert all(late)
    same(expected, got)


# What fails, and other threads


def test_a_lost_step_is_told_once_and_can_be_loaded_over():
    """The reader is told; afterwards a checkpoint can be written over the weights."""
    with lazily(0):
        model, optimizer = trained(FORWARD)
        saved_model, saved_state = Blocks().state_dict(), copy.deepcopy(optimizer.state_dict())
        iterate(model, optimizer, [7])
        assert num_late(model)
        engine = runtime_of(optimizer).places.engines[CPU]
        undo = fail_at(1, engine.transport.lanes, "wait", ZeroDivisionError())
        with pytest.raises(StepLostError):
            model.layers[0].weight.sum()
        undo()
        assert not num_late(model)
        with pytest.raises(StepLostError):
            optimizer.step()
        model.load_state_dict(saved_model)
        optimizer.load_state_dict(saved_state)
        iterate(model, optimizer, range(2))
        assert num_late(model)


def test_an_interrupted_read_can_be_made_again():
    """Ctrl-C in the middle of a read leaves the weight late."""
    expected = reference(FORWARD)
    with lazily(0):
        model, optimizer = trained(FORWARD)
        engine = runtime_of(optimizer).places.engines[CPU]
        undo = fail_at(1, engine.transport.lanes, "wait", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            model.layers[0].weight.sum()
        undo()
        assert is_late(model.layers[0].weight)
        assert_same_weights(expected, model)


def test_a_thread_reads_while_another_trains():
    """Readers take turns with the loop, and see a state between two calls."""
    expected = [param.detach().clone() for param in reference(FORWARD, steps=30).parameters()]
    model = Blocks()
    optimizer = offstage.offload(adamw(model.parameters()), model, **FORWARD)
    failed, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            for param in model.parameters():
                try:
                    assert param.detach().isfinite().all()
                except BaseException as error:
                    failed.append(error)
                    return

    reader = threading.Thread(target=look)
    reader.start()
    try:
        iterate(model, optimizer, range(30))
    finally:
        stop.set()
        reader.join()
    assert failed == []
    same(expected, [param.detach() for param in model.parameters()])


def test_a_forked_child_reads():
    """It has a copy of the memory, and none of the locks."""
    model, _optimizer = trained(FORWARD)
    assert num_late(model)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os._exit(0 if all(bool(param.isfinite().all()) for param in model.parameters()) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert num_late(model)


def test_a_read_that_asks_nothing_is_found_by_its_gradient():
    """The check that there was before is for what bypasses the guard."""
    with lazily(0):
        model, _optimizer = trained(FORWARD)
        with unguarded():
            loss = nn.functional.linear(inputs(0), model.layers[1].weight).sum()
        with pytest.raises(OffstageError, match="nothing else has waited for its update"):
            loss.backward()


def test_clipping_by_hand_and_speculation_do_not_disturb_each_other():
    """Reads after steps that were kept and after steps that were taken back."""

    def life(model, optimizer):
        found = []
        for number in range(8):
            loss_of(model, number).backward()
            clip_to(optimizer, 1e-3 if number % 3 == 1 else 1e4)
            optimizer.step()
            optimizer.zero_grad()
            found += [param.detach().clone() for param in params_of(model)[number % 2 :: 2]]
        return found

    assert_same_lives(life, BOTH, CONFIGS["hosted, both"], model=Blocks)


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_where_a_guard_comes_off(name, before, seed):
    """The next forward waits once more, and a read no longer has to."""
    with lazily(seed):
        model, optimizer = trained(CONFIGS[name], name=name, steps=STEPS - 1)
        let_go = LateWeights._let_go

        def interrupted(self, state):
            patch.stop()
            if not before:
                let_go(self, state)
            raise KeyboardInterrupt

        patch = mock.patch.object(LateWeights, "_let_go", interrupted)
        patch.start()
        with contextlib.suppress(KeyboardInterrupt):
            loss_of(model, 0)
            optimizer.synchronize()  # where no forward takes it off
        mock.patch.stopall()
        iterate(model, optimizer, range(STEPS - 1, STEPS), clip_of(name))
        optimizer.synchronize()
        assert not num_late(model)
        assert_same_weights(model, reference(CONFIGS[name], name=name))
