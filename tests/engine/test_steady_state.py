# SPDX-License-Identifier: Apache-2.0
"""Which calls of a trace `benchmarks.steady_state` holds against a step: the selection alone, on made-up traces."""

import threading

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.steady_state import HOST_WAIT, IN_BACKWARD_PASS, LOOP, forbidden_calls, threads_of_the_loop

CALLER, BACKWARD, FEEDER, STREAM = 100, 200, 300, 7


def event(name: str, where: int, device: DeviceType = DeviceType.CPU) -> FunctionEvent:
    """`thread` is the same for all, as it is in a real trace for calls that no operator encloses."""
    return FunctionEvent(id=0, name=name, thread=1, start_us=0, end_us=1, device_type=device, device_resource_id=where)


SPANS = [event(LOOP, CALLER), event(LOOP, STREAM, DeviceType.CUDA), event(f"{IN_BACKWARD_PASS}: Mm", BACKWARD)]


def test_the_loop_runs_in_the_callers_thread_and_in_autograds():
    assert threads_of_the_loop(SPANS) == {CALLER, BACKWARD}


@pytest.mark.parametrize(("where", "counted"), [(CALLER, 3), (BACKWARD, 3), (FEEDER, 0)])
def test_waits_count_in_the_loops_threads(where, counted):
    found = forbidden_calls([*SPANS, *[event(HOST_WAIT, where)] * 3])
    assert found[HOST_WAIT] == counted


@pytest.mark.parametrize("where", [CALLER, BACKWARD, FEEDER])
@pytest.mark.parametrize("name", ["cudaMalloc", "cudaFree", "cudaStreamSynchronize", "cudaDeviceSynchronize"])
def test_other_calls_count_in_every_thread(name, where):
    assert forbidden_calls([*SPANS, event(name, where)]) == {name: 1}


@pytest.mark.parametrize("name", ["cudaLaunchKernel", "cudaEventRecord", "Activity Buffer cudaMalloc"])
def test_what_is_allowed(name):
    assert forbidden_calls([*SPANS, event(name, CALLER)]) == {}


def test_a_trace_without_the_loop_is_no_proof():
    with pytest.raises(AssertionError, match="one thread"):
        forbidden_calls([event(HOST_WAIT, CALLER)])


def test_spans_name_the_thread_that_opened_them():
    weight = torch.nn.Parameter(torch.ones(8))
    with profile(activities=[ProfilerActivity.CPU]) as trace, record_function(LOOP):
        weight.sum().backward()
    assert any(one.name.startswith(IN_BACKWARD_PASS) for one in trace.events())
    assert threads_of_the_loop(trace.events()) == {threading.get_native_id()}
