# SPDX-License-Identifier: Apache-2.0
"""The contract's section "Loop and environment", as far as one process without an accelerator can show it."""

import re
import weakref

import pytest
import torch
import torch._dynamo  # before a test replaces torch.Stream, which it needs while it is imported
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import offstage
from offstage.config import Placement
from offstage.engine import arenas, transport
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import (
    CLASSES,
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
    train,
    trained,
    trained_twins,
    twin,
    unchanged,
)

# Off is off


def test_off_is_off(monkeypatch):
    """“with `fraction=0.0` no hooks, streams, arenas or transfers exist”."""

    def forbidden(*args, **kwargs):
        raise AssertionError("off is not off")

    for owner, name in [
        (arenas, "Arena"),
        (transport.Pipeline, "_make_slot"),
        (transport, "link_for"),
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
    plain_model, plain, model, optimizer = trained_twins(3, fraction=0.0, rule="torch")
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
    reference_model, reference = trained(3)
    model, optimizer = offloaded_model()
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

    model, optimizer = trained(1)
    watch = [weakref.ref(optimizer), *(weakref.ref(held.home) for held in runtime_of(optimizer).all_states())]
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
    assert_same(*trained_twins(3, model=Checkpointed(use_reentrant)))


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
    model, optimizer = offloaded_model(**TORCH)
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert_same(*trained(2, **TORCH), model, optimizer)


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
