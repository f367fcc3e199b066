# SPDX-License-Identifier: Apache-2.0
"""How much of what leaves and returns is on the device at once."""

import pytest
import torch
from torch import nn

from offstage.activations import traffic as activation_traffic
from offstage.activations.offload import offload_activations
from offstage.activations.storage import SavedStorage
from tests.activations.test_offload import SEEDS, WIDTH, Stack, on_lanes
from tests.activations.test_remaking import FLOAT, TOKENS, Gated

INPUT = TOKENS * WIDTH * FLOAT  # a layer's input
GATE_UP = 8 * INPUT


class Wide(nn.Module):
    """Saves as much as the linear layers of `Gated` do, but nothing that could be remade."""

    def forward(self, x):
        return x.cos() + x.repeat(1, 1, 8).sin().unflatten(-1, (8, -1)).sum(-2)


def passed(monkeypatch, layer=Gated, **config):
    """Bytes of saved tensors on the device: when the head begins, and whenever backward has asked for one."""
    torch.manual_seed(0)
    model = Stack(layer, 5)
    handle = offload_activations(model, min_bytes=0, **config)
    at_head, in_backward = [], []
    ask = SavedStorage.bytes_for_backward

    def asked(storage):
        in_backward.append(storage.device.here_bytes)
        return ask(storage)

    model.last.register_forward_pre_hook(lambda *_: at_head.append(next(iter(handle._devices.values())).here_bytes))
    monkeypatch.setattr(SavedStorage, "bytes_for_backward", asked)
    for _ in range(3):
        in_backward.clear()
        model(torch.randn(1, TOKENS, WIDTH, requires_grad=True)).backward()
    return at_head, max(in_backward)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_left_behind_the_last_layer(seed, monkeypatch):
    """A head and a loss may need more memory than any layer."""
    with on_lanes(seed):
        at_head, _ = passed(monkeypatch, keep_last=0)
        assert at_head == [0] * 3
        at_head, _ = passed(monkeypatch)  # the last layer stays, and what it makes of what it saves as well
        assert at_head == [INPUT + GATE_UP + GATE_UP // 2 + GATE_UP // 2] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_layers_that_run_twice(seed):
    """The last layer is the one that ran last in the forward before."""
    with on_lanes(seed):
        torch.manual_seed(0)
        model = Stack(Gated, 3)
        model.call = lambda layer, x: layer(layer(x))
        handle = offload_activations(model, min_bytes=0, keep_last=0)
        at_head = []
        model.last.register_forward_pre_hook(lambda *_: at_head.append(next(iter(handle._devices.values())).here_bytes))
        for _ in range(3):
            model(torch.randn(1, TOKENS, WIDTH, requires_grad=True)).backward()
        assert at_head[1:] == [0, 0]


def test_only_named_layers_leave():
    """What the layers between them save may lie where an input of theirs was, and is not theirs."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gated = nn.RMSNorm(WIDTH), Gated()

        def forward(self, x):
            return self.gated(self.norm(x.float()).to(x.dtype))

    torch.manual_seed(0)
    model = Stack(Normed, 9).bfloat16()
    handle = offload_activations(model, min_bytes=0, layers=[model.layers[number] for number in (0, 3, 6)])
    left = []
    for _ in range(8):
        model(torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16)).backward()
        left.append(handle.receipt().bytes_offloaded)
    assert len(set(left[1:])) == 1  # in the first forward everything leaves, and is remade beside it for the proof


@pytest.mark.parametrize("seed", SEEDS)
def test_named_layers_are_not_waited_for_in_the_middle(seed, monkeypatch):
    """The last one of those that leave is not the model's last: what it sends has until the head, or longer."""
    with on_lanes(seed):
        waits = []
        torch.manual_seed(0)
        model = Stack(Gated, 5)
        handle = offload_activations(model, min_bytes=0, layers=[model.layers[0], model.layers[2]])
        model.layers[3].register_forward_pre_hook(
            lambda *_: waits.append(next(iter(handle._devices.values())).here_bytes)
        )
        for _ in range(2):
            model(torch.randn(1, TOKENS, WIDTH, requires_grad=True)).backward()
        assert waits[-1] == INPUT + GATE_UP  # its own


def test_removed_its_host_memory_is_given_back():
    model = Stack(Gated, 5)
    handle = offload_activations(model, min_bytes=0)
    model(torch.randn(1, TOKENS, WIDTH)).backward()
    loss = model(torch.randn(1, TOKENS, WIDTH))
    assert handle.host_bytes
    handle.remove()
    assert handle.host_bytes  # a backward is still to come
    loss.backward()
    handle.remove()
    del loss
    handle.remove()
    assert handle.host_bytes == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("busy", "prefetch", "most"),
    [
        (0, 1, GATE_UP + INPUT),  # the next one in any case
        (INPUT, 2, GATE_UP + INPUT),
        (GATE_UP + INPUT, 1, 2 * GATE_UP + INPUT),
        (GATE_UP + 2 * INPUT, 1, 2 * GATE_UP + INPUT),  # one more would be too much
    ],
)
def test_what_returns_ahead_is_no_more_than_keeps_the_link_busy(busy, prefetch, most, seed, monkeypatch):
    monkeypatch.setattr(activation_traffic, "_KEEPS_THE_LINK_BUSY", busy)
    with on_lanes(seed):
        _, in_backward = passed(monkeypatch, Wide, keep_last=0, prefetch=prefetch)
        assert in_backward == most
