# SPDX-License-Identifier: Apache-2.0
"""The contract's section "Loop and environment", as far as one process without an accelerator can show it."""

import copy
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before a test replaces torch.Stream, which it needs while it is imported
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import offstage
from offstage import engine as engine_module
from offstage import optimizer as optimizer_module
from offstage.engine import Engine
from offstage.errors import StepLostError
from offstage.plan import Placement

from .support import (
    CLASSES,
    PLANS,
    SMALL,
    TORCH,
    adamw,
    assert_same,
    assert_same_tree,
    assert_same_weights,
    batch,
    chunk_count,
    lazily_offloaded,
    loss_of,
    make_model,
    offloaded_model,
    one_process_group,
    snapshot,
    train,
    twin,
    unchanged,
)

SOURCES = str(Path(offstage.__file__).parent.parent)


# Off is off


def test_off_is_off(monkeypatch):
    """“with `fraction=0.0` no hooks, streams, arenas or transfers exist”."""

    def forbidden(*args, **kwargs):
        raise AssertionError("off is not off")

    for owner, name in [
        (engine_module, "Arena"),
        (engine_module, "Pipeline"),
        (engine_module, "lanes_for"),
        (torch, "Stream"),
        (torch, "Event"),
        (torch.Tensor, "register_hook"),
        (torch.Tensor, "register_post_accumulate_grad_hook"),
        (nn.Module, "register_forward_hook"),
        (nn.Module, "register_forward_pre_hook"),
        (nn.Module, "register_full_backward_hook"),
        (nn.Module, "register_full_backward_pre_hook"),
        (nn.Module, "register_state_dict_post_hook"),
    ]:
        monkeypatch.setattr(owner, name, forbidden)
    plain_model, plain, model, optimizer = twin(fraction=0.0, rule="torch")
    train(plain_model, plain, 3)
    train(model, optimizer, 3)
    assert_same(plain_model, plain, model, optimizer)
    receipt = optimizer.receipt()
    assert receipt.steps == 3
    assert receipt.total_bytes_fetched == receipt.total_bytes_stored == receipt.host_state_bytes == 0
    assert receipt.lane_ms == {}
    assert set(optimizer.plan.placements) == {Placement.RESIDENT}
    assert optimizer.plan.slots == 0
    with pytest.raises(AssertionError, match="off is not off"):  # the traps do work
        offloaded_model(**SMALL)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_on_is_a_sequence_of_fetches_updates_and_stores(slots, seed):
    """“with it on, a test asserts the sequence of fetches, updates and stores”."""
    model, optimizer, lanes = lazily_offloaded(seed=seed, **SMALL, slots=slots)
    chunks = chunk_count(optimizer)
    assert chunks == 4
    lanes.log.clear()
    for number in range(3):
        train(model, optimizer, range(number, number + 1))
        letters = "".join(work[0] for work in lanes.log)
        # Each chunk in turn, between the update lane's own preparation and clean-up.
        assert re.fullmatch(r"u?(fus){4}u?", letters), letters
        lanes.log.clear()
    receipt = optimizer.receipt()
    state_bytes = sum(param.numel() for param in model.parameters()) * 8
    assert receipt.bytes_fetched == receipt.bytes_stored
    assert state_bytes <= receipt.bytes_fetched <= optimizer.plan.host_bytes
    assert receipt.total_bytes_fetched == 3 * receipt.bytes_fetched


def test_on_with_resident_parameters():
    """“the sequence of fetches, updates and stores”: resident parameters are updated once, without a transfer."""
    model, optimizer, lanes = lazily_offloaded(**SMALL, fraction=0.5)
    lanes.log.clear()
    train(model, optimizer, 1)
    trips = "fus" * chunk_count(optimizer)
    assert re.fullmatch(f"uu+{trips}u?", "".join(work[0] for work in lanes.log))
    resident = optimizer.plan.bytes_of(Placement.RESIDENT)
    streamed = optimizer.plan.bytes_of(Placement.STREAMED)
    assert resident > 0
    assert streamed <= optimizer.receipt().bytes_fetched < streamed + resident


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam amsgrad"])
def test_late_and_reordered_lanes_give_the_same_bits(name, seed):
    """“the sequence of fetches, updates and stores”: however late the lanes run, plain torch's bits come out."""
    plain_model = make_model()
    plain = CLASSES[name](plain_model.parameters())
    model, optimizer, _ = lazily_offloaded(CLASSES[name], seed=seed, **TORCH)
    train(plain_model, plain, 4)
    train(model, optimizer, 4)
    assert_same_weights(plain_model, model)
    assert_same(plain_model, plain, model, optimizer)


# Reruns


def test_a_forward_and_backward_that_is_run_again_counts_once():
    """“A forward/backward that is run again before step (reruns, line search) counts once”."""
    reference_model, reference = offloaded_model()
    model, optimizer = offloaded_model()
    train(reference_model, reference, 3)
    for number in range(3):
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
        optimizer.step()
    assert [float(state["step"]) for state in optimizer.state.values()] == [3.0] * 4
    assert optimizer.receipt().total_bytes_fetched == reference.receipt().total_bytes_fetched
    assert_same(reference_model, reference, model, optimizer)


def test_a_line_search_closure():
    """“(reruns, line search) counts once”: a closure that runs backward several times makes one step."""
    plain_model, plain, model, optimizer = twin()
    for one_model, one in ((plain_model, plain), (model, optimizer)):

        def closure(one_model=one_model, one=one):
            for part in range(3):
                one.zero_grad()
                loss = loss_of(one_model, part)
                loss.backward()
            return loss

        for _ in range(2):
            one.step(closure)
    assert [float(state["step"]) for state in optimizer.state.values()] == [2.0] * 4
    assert_same(plain_model, plain, model, optimizer)


# Between steps


def test_evaluation_between_steps():
    """“Evaluation, generation and idle phases between steps”: they see the new weights and change nothing."""
    plain_model = make_model()
    plain = adamw(plain_model.parameters())
    model, optimizer, _ = lazily_offloaded(**TORCH)
    for number in range(3):
        outputs = []
        for one_model, one in ((plain_model, plain), (model, optimizer)):
            train(one_model, one, range(number, number + 1))
            one_model.eval()
            with torch.inference_mode():
                first = one_model(batch(100)[0])
            with torch.no_grad():
                outputs.append((first, one_model(first)))
            one_model.train()
            optimizer.synchronize()
        assert_same_tree(*outputs)
    assert_same(plain_model, plain, model, optimizer)


def test_idle_phase_moves_nothing():
    """“idle phases between steps”: forwards, backwards and steps without gradients move no state."""
    model, optimizer, lanes = lazily_offloaded()
    train(model, optimizer, 2)
    optimizer.zero_grad()
    optimizer.synchronize()
    lanes.log.clear()
    with unchanged(model, optimizer):
        for number in range(3):
            loss_of(model, number).backward()
            optimizer.zero_grad()
            optimizer.step()
    assert lanes.log == []


def test_several_optimizers_and_models_in_one_process():
    """“several optimizers and models in one process; no globals keyed by class”: interleaved, each as if alone."""
    makes = {
        "own": (adamw, SMALL),
        "torch": (adamw, TORCH),
        "other settings": (lambda params: adamw(params, lr=0.1, amsgrad=True), {**SMALL, "slots": 1}),
        "off": (adamw, {"fraction": 0.0}),
        "sgd": (CLASSES["SGD"], SMALL),
        "plain": (adamw, None),
    }

    def build(make, config):
        model = make_model()
        optimizer = make(model.parameters())
        return model, optimizer if config is None else offstage.offload(optimizer, model, **config)

    alone = {name: build(*how) for name, how in makes.items()}
    for model, optimizer in alone.values():
        train(model, optimizer, 3)
    together = {name: build(*how) for name, how in makes.items()}
    for number in range(3):
        for model, optimizer in together.values():
            train(model, optimizer, range(number, number + 1))
    for name, (model, optimizer) in together.items():
        assert_same(*alone[name], model, optimizer)


def test_two_optimizers_for_one_model():
    """“several optimizers”: two halves of one model under optimizers of the same class."""
    plain_model, model = make_model(), make_model()
    plain = [adamw(plain_model[0].parameters()), adamw(plain_model[2].parameters(), lr=0.1)]
    ours = [
        offstage.offload(adamw(model[0].parameters()), model, **TORCH),
        offstage.offload(adamw(model[2].parameters(), lr=0.1), model, **TORCH),
    ]
    for number in range(3):
        for one_model, optimizers in ((plain_model, plain), (model, ours)):
            one_model.zero_grad()
            loss_of(one_model, number).backward()
            for optimizer in optimizers:
                optimizer.step()
    for theirs, own in zip(plain, ours, strict=True):
        assert_same(plain_model, theirs, model, own)


def test_dropped_optimizers_give_their_memory_back():
    """“several optimizers … in one process; no globals”: nothing keeps a dropped optimizer or its arenas alive."""

    model, optimizer = offloaded_model()
    train(model, optimizer, 1)
    watch = [weakref.ref(optimizer), *(weakref.ref(held.host) for held in optimizer.all_held())]
    del model, optimizer  # no garbage collection: nothing refers to itself in a circle
    assert all(ref() is None for ref in watch)


# Compiled models, checkpointing, autocast, DDP


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend):
    """“torch.compile'd … forward/backward keep working (parameter addresses never change)”: one compilation."""
    torch._dynamo.reset()
    plain_model, plain, model, optimizer = twin()
    compilations = []
    inner = torch._dynamo.lookup_backend(backend)

    def counting(graph, inputs):
        compilations.append(graph)
        return inner(graph, inputs)

    compiled = torch.compile(model, backend=counting)
    addresses = [param.data_ptr() for param in model.parameters()]
    for number in range(3):
        train(plain_model, plain, range(number, number + 1))
        train(compiled, optimizer, range(number, number + 1))
        assert [param.data_ptr() for param in model.parameters()] == addresses
    assert len(compilations) == 1
    assert_same(plain_model, plain, model, optimizer)


def test_compiled_before_offload():
    """“torch.compile'd”: the compiled module may also be what is given to offload()."""
    torch._dynamo.reset()
    plain_model, model = make_model(), make_model()
    plain = adamw(plain_model.parameters())
    compiled = torch.compile(model, backend="eager")
    optimizer = offstage.offload(adamw(compiled.parameters()), compiled, **TORCH)
    train(plain_model, plain, 2)
    train(compiled, optimizer, 2)
    assert_same(plain_model, plain, model, optimizer)


class Checkpointed(nn.Module):
    """Each layer recomputes its activations in backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = make_model()
        self.use_reentrant = use_reentrant

    def forward(self, inputs):
        hidden = inputs.requires_grad_()
        for _ in range(2):  # the weights are used twice: their gradients arrive in parts
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)
        return hidden


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    """“activation checkpointing”, reentrant and not."""
    plain_model, plain, model, optimizer = twin(model=Checkpointed(use_reentrant))
    train(plain_model, plain, 3)
    train(model, optimizer, 3)
    assert_same(plain_model, plain, model, optimizer)


def test_autocast():
    """“autocast”: fp32 parameters, bf16 arithmetic in forward and backward."""
    plain_model, plain, model, optimizer = twin()
    for one_model, one in ((plain_model, plain), (model, optimizer)):
        for number in range(3):
            one.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inputs, target = batch(number)
                outputs = one_model(inputs)
                assert outputs.dtype == torch.bfloat16
                loss = nn.functional.mse_loss(outputs.float(), target)
            loss.backward()
            one.step()
    assert_same(plain_model, plain, model, optimizer)


def test_autocast_around_step():
    """“autocast”: a step inside the context is the same step."""
    reference_model, reference = offloaded_model(**TORCH)
    model, optimizer = offloaded_model(**TORCH)
    train(reference_model, reference, 2)
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert_same(reference_model, reference, model, optimizer)


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("offload_first", [False, True])
def test_ddp(bucket_view, offload_first):
    """“DDP”: with gradients of its own or as views of its buckets, wrapped before or after offload()."""
    with one_process_group():
        plain_model, model = make_model(), make_model()
        plain_ddp = DistributedDataParallel(plain_model, gradient_as_bucket_view=bucket_view)
        plain = adamw(plain_ddp.parameters())
        if offload_first:
            optimizer = offstage.offload(adamw(model.parameters()), model, **TORCH)
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        else:
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
            optimizer = offstage.offload(adamw(ddp.parameters()), ddp, **TORCH)
        for one_ddp, one in ((plain_ddp, plain), (ddp, optimizer)):
            for number in range(3):
                one.zero_grad()
                with one_ddp.no_sync():
                    loss_of(one_ddp, number).backward()
                loss_of(one_ddp, number + 10).backward()
                one.step()
        assert_same(plain_model, plain, model, optimizer)


# Exit, exceptions, Ctrl-C


def run_python(code):
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


PREAMBLE = """
import torch, offstage
from offstage.lanes import use_lanes
from offstage.lazy_lanes import LazyLanes
made = []
def lanes(device):
    made.append(LazyLanes(device, seed=0))
    return made[-1]
param = torch.nn.Parameter(torch.ones(8192))
with use_lanes(lanes):
    optimizer = offstage.offload(torch.optim.SGD([param], momentum=0.9, lr=0.1), min_bytes=0, chunk_bytes="16KiB")
param.grad = torch.ones_like(param)
optimizer.step()
assert made[0]._pending, "nothing is in flight"
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("raise SystemExit(7)", 7), ("raise ZeroDivisionError", 1), ("del optimizer, param", 0)],
    ids=["end of the program", "sys.exit", "exception", "dropped"],
)
def test_interpreter_exit_with_copies_in_flight(ending, code):
    """“Interpreter exit, exceptions … with copies in flight neither hang nor crash”."""
    result = run_python(PREAMBLE + ending)
    assert result.returncode == code, result.stderr
    if "ZeroDivisionError" in ending:
        assert result.stderr.strip().endswith("ZeroDivisionError")
    else:
        assert result.stderr == ""


def test_ctrl_c_from_outside():
    """“Ctrl-C with copies in flight”: a program that is interrupted between steps dies of KeyboardInterrupt, once."""
    result = run_python(PREAMBLE + "import signal\nsignal.raise_signal(signal.SIGINT)")
    assert result.returncode == -signal.SIGINT, result.stderr
    assert result.stderr.strip().endswith("KeyboardInterrupt")
    assert result.stderr.count("Traceback") == 1


def interrupt_update(monkeypatch, optimizer, at, action):
    """Make the `at`-th update of the next steps run `action` first."""
    update, calls = optimizer.rule.update, itertools.count(1)

    def interrupted(shares):
        if next(calls) == at:
            action()
        update(shares)

    monkeypatch.setattr(optimizer.rule, "update", interrupted)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("config", [SMALL, {**SMALL, "fraction": 0.5}, TORCH], ids=["all", "half", "torch rule"])
def test_ctrl_c_inside_a_step(monkeypatch, config, at):
    """“Ctrl-C”: inside a step it is raised after the step is complete, and training can go on."""
    reference_model, reference = offloaded_model(**config)
    model, optimizer = offloaded_model(**config)
    updates = chunk_count(optimizer) + any(p is Placement.RESIDENT for p in optimizer.plan.placements)
    at = min(at, updates)
    train(reference_model, reference, 2)
    train(model, optimizer, 1)
    interrupt_update(monkeypatch, optimizer, at, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1, 2))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(reference_model, reference, model, optimizer)
    assert optimizer.receipt().steps == 2
    train(reference_model, reference, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert_same(reference_model, reference, model, optimizer)


def test_ctrl_c_reaches_the_users_own_handler(monkeypatch):
    """“Ctrl-C”: a handler that the program installed is called after the step, and is still installed."""
    model, optimizer = offloaded_model()
    seen = []

    def handler(number, frame):
        seen.append((number, [float(state["step"]) for state in optimizer.state.values()]))

    interrupt_update(monkeypatch, optimizer, 2, lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, handler)
    try:
        train(model, optimizer, 1)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [(signal.SIGINT, [1.0] * 4)]


def test_steps_in_another_thread():
    """“Ctrl-C”: only the main thread may set signal handlers; a step elsewhere works all the same."""
    reference_model, reference = offloaded_model()
    train(reference_model, reference, 2)
    model, optimizer = offloaded_model()
    failures = []

    def work():
        try:
            train(model, optimizer, 2)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert_same(reference_model, reference, model, optimizer)


def test_an_exception_before_the_first_update_changes_nothing(monkeypatch):
    """“exceptions … with copies in flight”: before the first update all is as before; the step can be retried."""
    reference_model, reference = offloaded_model()
    model, optimizer = offloaded_model()
    train(reference_model, reference, 3)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    loss_of(model, 2).backward()

    def fail(*_):
        raise torch.OutOfMemoryError("no room for a slot")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "prepare", fail)
        with unchanged(model, optimizer), pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.step()
    assert_same(reference_model, reference, model, optimizer)


@pytest.mark.parametrize("config", [SMALL, TORCH], ids=["own rule", "torch rule"])
def test_an_exception_in_the_first_fetch_changes_nothing(monkeypatch, config):
    """“exceptions … with copies in flight”: no update has been submitted yet, so the step is not lost."""
    reference_model, reference = offloaded_model(**config)
    model, optimizer = offloaded_model(**config)
    train(reference_model, reference, 3)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    loss_of(model, 2).backward()

    def fail(*_):
        raise RuntimeError("the first copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module.Pipeline, "fetch", fail)
        with unchanged(model, optimizer), pytest.raises(RuntimeError, match="the first copy failed") as info:
            optimizer.step()
    assert not isinstance(info.value, StepLostError)
    optimizer.step()
    assert_same(reference_model, reference, model, optimizer)


@pytest.mark.parametrize("config", [SMALL, TORCH, {"fraction": 0.0}], ids=["own rule", "torch rule", "off"])
def test_an_exception_between_updates_says_that_the_step_is_lost(monkeypatch, config):
    """“exceptions”: in the middle of a step the error says so and how to go on; a checkpoint brings training back."""
    reference_model, reference = offloaded_model(**config)
    model, optimizer = offloaded_model(**config)
    train(reference_model, reference, 4)
    train(model, optimizer, 2)
    saved, weights = snapshot(optimizer), copy.deepcopy(model.state_dict())

    def fail():
        raise ZeroDivisionError("in an update")

    with monkeypatch.context() as patch:
        interrupt_update(patch, optimizer, min(2, max(1, chunk_count(optimizer))), fail)
        with pytest.raises(StepLostError, match=r"in an update.*load_state_dict") as info:
            train(model, optimizer, range(2, 3))
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(StepLostError, match="load_state_dict"):
        train(model, optimizer, range(2, 3))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 4))
    assert_same(reference_model, reference, model, optimizer)


# Threads


def test_no_threads_of_its_own():
    """“Threads: respects `torch.get_num_threads`”: with one thread allowed, a step starts no other."""
    assert torch.get_num_threads() == 1
    model, optimizer = offloaded_model()
    train(model, optimizer, 1)
    before = len(os.listdir("/proc/self/task"))
    model, optimizer = offloaded_model()
    train(model, optimizer, 2)
    assert len(os.listdir("/proc/self/task")) == before


# fork


def arena_addresses(optimizer):
    return {
        arena.flat.data_ptr()
        for held in optimizer.all_held()
        if held.host is not None
        for arena in held.host.arenas.values()
    }


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False


def in_child(function):
    """The exit status of `function` in a forked child: 0 if it returned True."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_fork_does_not_copy_the_arenas():
    """“fork (DataLoader workers) neither copies nor corrupts the arenas”: the child does not have them at all."""
    reference_model, reference = offloaded_model()
    model, optimizer = offloaded_model()
    train(reference_model, reference, 4)
    train(model, optimizer, 2)
    addresses = arena_addresses(optimizer)
    assert len(addresses) == 2
    assert all(is_mapped(address) for address in addresses)
    assert in_child(lambda: not any(is_mapped(address) for address in addresses)) == 0
    assert in_child(lambda: any(is_mapped(address) for address in addresses)) == 1
    train(model, optimizer, range(2, 4))
    assert_same(reference_model, reference, model, optimizer)


def test_a_forked_child_may_drop_the_optimizer():
    """“fork neither copies nor corrupts the arenas”: also when the child's garbage collector finds them."""
    reference_model, reference = offloaded_model()
    train(reference_model, reference, 3)
    holder = list(offloaded_model())
    train(*holder, 2)

    def drop():
        holder.clear()
        gc.collect()
        return True

    assert in_child(drop) == 0
    train(*holder, range(2, 3))
    assert_same(reference_model, reference, *holder)


def test_data_loader_workers():
    """“fork (DataLoader workers)”: workers that start in the middle of training change nothing."""
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*(batch(number) for number in range(3)), strict=True)))
    plain_model, plain, model, optimizer = twin()
    for one_model, one, workers in ((plain_model, plain, 0), (model, optimizer, 2)):
        for _ in range(2):
            context = "fork" if workers else None
            for inputs, target in DataLoader(data, 16, num_workers=workers, multiprocessing_context=context):
                one.zero_grad()
                nn.functional.mse_loss(one_model(inputs), target).backward()
                one.step()
    assert_same(plain_model, plain, model, optimizer)


# OffloadIneffectiveError


@pytest.mark.parametrize(
    ("make", "config", "reason"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), SMALL, "no state"),
        (adamw, {}, "min_bytes"),
        (adamw, {"fraction": 0.9, "min_bytes": "1GiB"}, "min_bytes"),
    ],
    ids=["no state", "all small", "all small with a fraction"],
)
def test_nothing_to_offload_raises(make, config, reason):
    """“Nothing moved although something with a gradient should have: raise (`OffloadIneffectiveError`)”: at once."""
    model = make_model()
    inner = make(model.parameters())
    with pytest.raises(offstage.OffloadIneffectiveError, match=reason):
        offstage.offload(inner, model, **config)
    train(model, inner, 1)  # the optimizer given is still good


def test_a_budget_that_is_met_without_offloading_is_no_error():
    """“although something … should have”: with room for everything nothing should."""
    model, optimizer = offloaded_model(device_budget="1GiB", min_bytes=0)
    train(model, optimizer, 1)
    assert optimizer.receipt().total_bytes_fetched == 0


def test_a_step_that_moves_nothing_raises(monkeypatch):
    """“Nothing moved although something with a gradient should have: raise … with the reason”: at the step itself."""
    model, optimizer = offloaded_model()
    monkeypatch.setattr(optimizer_module.OffloadedOptimizer, "_moved_bytes", lambda self: (0, 0))
    with pytest.raises(offstage.OffloadIneffectiveError, match=r"0\.weight.*no byte moved"):
        train(model, optimizer, 1)


def test_a_step_without_streamed_gradients_moves_nothing_and_is_no_error():
    """“Nothing moved although something with a gradient should have”: here nothing should have."""
    model, optimizer = offloaded_model(**SMALL, fraction=0.5)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    before = optimizer.receipt()
    loss_of(model, 1).backward()
    for param, placement in zip(model.parameters(), optimizer.plan.placements, strict=True):
        if placement is Placement.STREAMED:
            param.grad = None
    optimizer.step()
    after = optimizer.receipt()
    assert after.steps == before.steps + 1
    assert after.total_bytes_fetched == before.total_bytes_fetched


@pytest.mark.parametrize("plan", PLANS)
def test_receipt_counts_what_moved(plan):
    """“Nothing moved …”: the receipt's bytes are those of the plan's streamed parameters, every step."""
    model, optimizer = offloaded_model(**PLANS[plan])
    train(model, optimizer, 2)
    receipt, streamed = optimizer.receipt(), optimizer.plan.bytes_of(Placement.STREAMED)
    assert streamed <= receipt.bytes_fetched <= optimizer.plan.host_bytes
    assert receipt.total_bytes_stored == 2 * receipt.bytes_stored == 2 * receipt.bytes_fetched


def test_receipt_totals_survive_larger_slots():
    """“Nothing moved …”: totals only grow, also when a group is added that needs larger slots."""
    small, large = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(8192))
    optimizer = offstage.offload(adamw([small]), **SMALL)
    small.grad = torch.ones(16)
    optimizer.step()
    first = optimizer.receipt()
    assert first.total_bytes_fetched == 128
    optimizer.add_param_group({"params": [large]})
    assert optimizer.receipt().total_bytes_fetched == 128
    large.grad = torch.ones(8192)
    optimizer.step()
    receipt = optimizer.receipt()
    assert receipt.bytes_fetched == 128 + 8192 * 8
    assert receipt.total_bytes_fetched == receipt.total_bytes_stored == 2 * 128 + 8192 * 8
