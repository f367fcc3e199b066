# SPDX-License-Identifier: Apache-2.0
"""No synchronisation and no allocation in a steady-state step; slots bound the device memory of state."""

import threading

import pytest
import torch

import offstage
from benchmarks.steady_state import CASES, HOST_WAIT, calls_beyond_the_profilers, loop_trace, steady_state
from tests.support.gates import DeviceMemory
from tests.support.params import make_params, set_gradients


@pytest.mark.parametrize("name", CASES)
def test_no_synchronisation_and_no_allocation(name: str) -> None:
    result = steady_state(*CASES[name], steps=5)
    assert result["allocations"] == 0
    assert result["forbidden_calls"] == {}


def test_a_wait_of_the_loop_is_counted_and_that_of_another_thread_is_not() -> None:
    """The control of the test before: three waits, of which the loop makes two."""

    def wait(*_: torch.Tensor) -> None:
        torch.cuda.current_stream().record_event().synchronize()

    weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
    weight.register_post_accumulate_grad_hook(wait)
    other = threading.Thread(target=wait)
    with loop_trace() as trace:
        wait()
        weight.sum().backward()
        other.start()
        other.join()
    assert sum(event.name == HOST_WAIT for event in trace.events()) >= 3
    assert calls_beyond_the_profilers(trace)[HOST_WAIT] == 2


def test_slots_bound_device_memory() -> None:
    params = make_params(shapes=((4096, 4096),) * 4, device="cuda")
    for param in params:
        param.grad = torch.zeros_like(param)
    memory = DeviceMemory()
    optimizer = offstage.offload(torch.optim.AdamW(params), chunk_bytes="8MiB", slots=3)
    for _ in range(2):
        optimizer.step()
    assert memory.peak_growth() <= 3 * 8 * 2**20 + 64 * 1024
    optimizer.close()
    assert memory.growth() <= 64 * 1024


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_taking_over_state_causes_no_device_spike(fraction: float) -> None:
    params = make_params(shapes=((2048, 2048),) * 8, device="cuda")
    plain = torch.optim.AdamW(params, fused=True)
    set_gradients(params, 0)
    plain.step()
    expected = [plain.state[param]["exp_avg"].cpu() for param in params]
    memory = DeviceMemory()
    optimizer = offstage.offload(plain, fraction=fraction)
    assert memory.peak_growth() <= 64 * 1024
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(optimizer.state[param]["exp_avg"].cpu(), value)


def test_loading_causes_no_device_spike() -> None:
    params = make_params(torch.bfloat16, ((2048, 2048),) * 8, "cuda")
    optimizer = offstage.offload(torch.optim.AdamW(params), chunk_bytes="4MiB", master_weights="split")
    set_gradients(params, 0)
    optimizer.step()
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state_dict()["state"][0].items()}
    state_dict = optimizer.state_dict()
    memory = DeviceMemory()
    optimizer.load_state_dict(state_dict)
    assert memory.peak_growth() <= 64 * 1024
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, saved[name])
