# SPDX-License-Identifier: Apache-2.0
"""Gradients that have left for the host: other code has them, keeps them and writes them as any others."""

import copy
import io
import pickle
from unittest import mock

import numpy as np
import pytest
import torch

from offstage.engine.gradients import HostGradient
from offstage.errors import ConfigError
from offstage.optimizer.overlap.left_gradient import LeftGradient
from tests.support.lives import end_step, iterate, loss_of
from tests.support.training import lazily
from tests.weights.test_host_weights import MODES, net, offloaded, same

LEFT = pytest.mark.parametrize("mode", ["in step", "under forward"])


def left(mode, kind=None):
    """A model whose gradients have left, and a plain one with the same."""
    plain = net()
    loss_of(plain, 0).backward()
    model, optimizer = offloaded(config=MODES[mode])
    loss_of(model, 0).backward()
    assert isinstance(model.layers[0].up.weight.grad, LeftGradient)
    return model, optimizer, plain


@LEFT
def test_a_gradient_that_is_kept_stays_what_it_is(mode):
    """The gradient of the step before is added; it was not the memory of the next one."""

    def life(model, optimizer):
        before, found = None, []
        for number in range(5):
            loss_of(model, number).backward()
            kept = [param.grad for param in model.parameters()]
            views = [param.grad.detach() for param in model.parameters()]
            if before is not None:
                for param, one in zip(model.parameters(), before, strict=True):
                    param.grad = param.grad + 0.5 * one
                    found.append(one.clone())
            before = kept if number % 2 else views
            end_step(optimizer)
        return found

    same(life, mode)


@LEFT
def test_memory_of_gradients_that_are_not_kept_any_more_is_given_back(mode):
    for kind in (None, 0):
        with lazily(kind):
            model, optimizer = offloaded(config=MODES[mode])
            iterate(model, optimizer, range(2))
            expected, kept = optimizer.receipt().host_gradient_bytes, []
            for number in range(3):
                loss_of(model, number).backward()
                kept.append([param.grad for param in model.layers.parameters()])
                end_step(optimizer)
            assert optimizer.receipt().host_gradient_bytes == 3 * expected
            kept.clear()
            iterate(model, optimizer, range(3, 5))
            assert optimizer.receipt().host_gradient_bytes == expected


@LEFT
def test_a_gradient_that_is_written_after_the_step(mode):
    """The step was made with what it was, though its update may wait for the next forward."""

    def life(model, optimizer):
        for number in range(4):
            loss_of(model, number).backward()
            kept = [param.grad for param in model.layers.parameters()]
            end_step(optimizer)
            for one in kept:
                one.mul_(100.0)

    same(life, mode)


@LEFT
def test_a_factor_that_is_used_again(mode):
    """Scaling waits until the gradient is used; the factor does not."""

    def life(model, optimizer):
        factor = torch.ones(())
        for number in range(3):
            loss_of(model, number).backward()
            for place, param in enumerate(model.parameters()):
                param.grad.mul_(factor.fill_(0.5 + 0.1 * place))
            end_step(optimizer)

    same(life, mode)


@LEFT
def test_gradients_that_are_part_of_a_graph(mode):
    """A penalty on the gradients' norm: `create_graph=True` and a second backward."""

    def life(model, optimizer):
        for number in range(3):
            with optimizer.accumulate():
                loss_of(model, number).backward(create_graph=True)
            assert all(param.grad.requires_grad for param in model.parameters())
            penalty = sum(param.grad.pow(2).sum() for param in model.parameters())
            optimizer.zero_grad()
            penalty.backward()
            end_step(optimizer)

    same(life, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", [None, 1e4, 1e-3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_memory_is_allocated_when_nothing_is_kept(mode, clip, micro_batches):
    for kind in (None, 0):
        with lazily(kind):
            model, optimizer = offloaded(config=MODES[mode])

            def train(numbers, model=model, optimizer=optimizer):
                for number in numbers:
                    for _ in range(micro_batches - 1):
                        with optimizer.accumulate():
                            loss_of(model, number).backward()
                    loss_of(model, number).backward()
                    end_step(optimizer, clip)

            train(range(4))
            with mock.patch.object(HostGradient, "__init__", side_effect=AssertionError("a new one")):
                train(range(4, 8))


@LEFT
def test_what_torch_does_not_dispatch(mode):
    model, _, plain = left(mode)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        grad, data = found.grad, expected.grad.numpy()
        assert np.array_equal(grad.numpy(), data)
        assert np.array_equal(np.asarray(grad), data)
        assert np.array_equal(grad.cpu().numpy(), data)
        assert grad.tolist() == data.tolist()
        copied, pickled = copy.deepcopy(grad), pickle.loads(pickle.dumps(grad))
        assert type(copied) is type(pickled) is torch.Tensor
        assert torch.equal(copied, expected.grad)
        assert torch.equal(pickled, expected.grad)
        file = io.BytesIO()
        torch.save(grad, file)
        file.seek(0)
        assert torch.equal(torch.load(file), expected.grad)
        assert torch.equal(grad.data, expected.grad)


@LEFT
def test_data_that_is_assigned(mode):
    def life(model, optimizer):
        for number in range(3):
            loss_of(model, number).backward()
            for param in model.parameters():
                param.grad.data = torch.full_like(param, 0.01 * (number + 1))
            end_step(optimizer)

    same(life, mode)
    model, *_ = left(mode)
    with pytest.raises(ConfigError, match=r"is \(.*\) torch.float32; found \(3,\) torch.float32 for its data"):
        model.layers[0].up.weight.grad.data = torch.ones(3)


@LEFT
def test_code_that_asks_for_an_address_gets_an_error(mode):
    """Not address 0."""
    model, optimizer, _ = left(mode)
    with pytest.raises(RuntimeError):
        model.layers[0].up.weight.grad.data_ptr()
    end_step(optimizer)


def test_loading_state_after_a_step_keeps_the_step():
    """Its updates may wait for the next forward; the weights are not loaded."""

    def life(model, optimizer):
        iterate(model, optimizer, range(3), clip=1e-3)
        saved = copy.deepcopy(optimizer.state_dict())
        iterate(model, optimizer, range(3, 5), clip=1e-3)
        optimizer.load_state_dict(saved)
        iterate(model, optimizer, range(5, 7), clip=1e-3)

    for mode in MODES:
        same(life, mode)


@pytest.mark.parametrize("write", ["no_grad", "data"])
def test_weights_written_between_backward_and_step(write):
    """Without `overlap_forward`, also those of layers that are still on the device."""

    def life(model, optimizer):
        for number in range(3):
            loss_of(model, number).backward()
            with torch.no_grad():
                for param in model.parameters():
                    (param.data if write == "data" else param).mul_(0.9)
            end_step(optimizer)

    same(life, "in step")


def test_evaluation_in_inference_mode():
    """It may be the first forward after a step."""

    def life(model, optimizer):
        found = []
        for number in range(4):
            iterate(model, optimizer, [number])
            with torch.inference_mode():
                found.append(float(loss_of(model, number)))
        return found

    for mode in MODES:
        same(life, mode)
