# SPDX-License-Identifier: Apache-2.0
"""On the device: a second thread beside the loop, torch's default device and dtype, gradients zeroed in place."""

import contextlib

import pytest
import torch
from torch import nn

import offstage
from offstage import checkpoint
from tests.support.contract import SMALL, adamw, assert_same
from tests.support.second_thread import READS, assert_clear, second_thread

MODES = {
    "in step": {},
    "on the host": {"update_on": "host"},
    "in forward": {"overlap_forward": True, "window": "all"},
    "host, in forward": {"overlap_forward": True, "update_on": "host"},
    "in backward": {"update_in_backward": True, "overlap_forward": True},
    "in backward, clipped": {"update_in_backward": True, "clip": 1e4},
}


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(6)))


def made(mode: str) -> tuple[nn.Module, offstage.OffloadedOptimizer, float | None]:
    settings = dict(MODES[mode])
    clip = settings.pop("clip", None)
    model = stack()
    return model, offstage.offload(adamw(model.parameters()), model, **{**SMALL, **settings}), clip


def iterate(model, optimizer, numbers, clip=None, *, in_place=False, skip=False):
    for number in numbers:
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(number), dtype=torch.float32, device="cpu")
        x = x.to("cuda", torch.bfloat16)
        for place, layer in enumerate(model):
            if not skip or number < 2 or (place + number) % 3:
                x = layer(x)
        x.float().pow(2).mean().backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not in_place)


def reference(mode, steps, **options):
    model, optimizer, clip = made(mode)
    iterate(model, optimizer, range(steps), clip, **options)
    optimizer.synchronize()
    return model, optimizer


@pytest.mark.parametrize("side_stream", [False, True], ids=["", "side stream"])
@pytest.mark.parametrize("mode", MODES)
def test_reading_while_the_loop_trains_changes_no_bit(mode, side_stream):
    """Also where the loop runs on a stream of its own, which the thread that reads knows nothing of."""
    model, optimizer, clip = made(mode)
    torch.cuda.synchronize()
    stream = torch.cuda.stream(torch.cuda.Stream()) if side_stream else contextlib.nullcontext()
    with stream, second_thread(READS, model, optimizer) as found:
        iterate(model, optimizer, range(30), clip)
        for _ in range(1000):
            if len(found) < len(READS):
                optimizer.receipt()
    optimizer.synchronize()
    torch.cuda.synchronize()
    assert len(found) >= len(READS)
    assert_clear(found)
    assert_same(*reference(mode, 30), model, optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_layer_with_gradients_that_are_zeroed_in_place(mode):
    expected = reference("in step", 8, in_place=True, skip=True)
    assert_same(*expected, *reference(mode, 8, in_place=True, skip=True))


@contextlib.contextmanager
def defaults(device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_the_default_device_and_dtype_change_no_bit(tmp_path, mode, dtype):
    """`torch.set_default_device("cuda")` is common; host memory and counters must not follow it."""

    def life():
        model, optimizer, clip = made(mode)
        iterate(model, optimizer, range(3), clip)
        optimizer.replan(fraction=0.5)
        iterate(model, optimizer, range(3, 6), clip)
        optimizer.load_state_dict(optimizer.state_dict())
        iterate(model, optimizer, range(6, 8), clip)
        optimizer.synchronize()
        return model, optimizer

    expected = life()
    with defaults("cuda", dtype):
        found = life()
        checkpoint.save(tmp_path / "saved", *found)
        loaded = made(mode)[:2]
        checkpoint.load(tmp_path / "saved", *loaded)
    assert_same(*expected, *found)
    assert_same(*expected, *loaded)


@pytest.mark.parametrize("rule", ["auto", "torch"])
def test_steps_are_counted_beyond_256_with_a_default_of_sixteen_bits(rule):
    def life():
        param = nn.Parameter(torch.ones(64, device="cuda", dtype=torch.float32))
        optimizer = offstage.offload(adamw([param]), rule=rule, **SMALL)
        for number in range(300):
            param.grad = torch.full_like(param, 1.0 + number % 3)
            optimizer.step()
        return param.detach().clone(), optimizer.state[param]["step"]

    expected = life()
    with defaults("cuda", torch.bfloat16):
        found = life()
    assert torch.equal(expected[0], found[0])
    assert int(found[1]) == 300
