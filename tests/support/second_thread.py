# SPDX-License-Identifier: Apache-2.0
"""A second thread that calls an optimizer's methods while a loop trains, and what it calls."""

import contextlib
import contextvars
import faulthandler
import sys
import threading

import torch

from offstage.errors import OffstageError
from tests.support.contract import snapshot


def first(model):
    return next(model.parameters())


def read_all_state(model, optimizer):
    return {param: dict(values) for param, values in optimizer.state.items()}


def move(model, optimizer):
    optimizer.replan(fraction=0.5)
    optimizer.replan(fraction=1.0)


READS = {
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "state": read_all_state,
    "state[p]": lambda model, optimizer: optimizer.state[first(model)].get("exp_avg"),
    "len(state)": lambda model, optimizer: len(optimizer.state),
    "in state": lambda model, optimizer: first(model) in optimizer.state,
    "receipt": lambda model, optimizer: str(optimizer.receipt()),
    "fitted": lambda model, optimizer: optimizer.fitted,
    "plan": lambda model, optimizer: optimizer.plan.summary(),
    "config": lambda model, optimizer: optimizer.config.fraction,
    "repr": lambda model, optimizer: repr(optimizer),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "prefetch": lambda model, optimizer: optimizer.prefetch(),
    "attach": lambda model, optimizer: optimizer.attach(model),
    "evict": lambda model, optimizer: optimizer.evict(),
    "replan": move,
    "weights": lambda model, optimizer: model.state_dict(),
    "evaluation": lambda model, optimizer: torch.no_grad()(model[0])(torch.zeros_like(model[0].weight)),
}
"""What leaves the result as it is."""


def write_state(model, optimizer):
    optimizer.state[first(model)]["exp_avg"] = torch.zeros_like(first(model))


def clear_state(model, optimizer):
    optimizer.state = {}


def accumulate(model, optimizer):
    with optimizer.accumulate():
        pass


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones_like(first(model)[0]))]})


WRITES = {
    "step": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zero_grad in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "clip_grad_norm_": lambda model, optimizer: optimizer.clip_grad_norm_(1.0),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(snapshot(optimizer)),
    "add_param_group": add_group,
    "accumulate": accumulate,
    "state[p][name] =": write_state,
    "state =": clear_state,
    "load weights": lambda model, optimizer: model.load_state_dict(
        {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    ),
    "close": lambda model, optimizer: optimizer.close(),
}
"""What changes the result, from whichever thread it is called."""


REMOVES_GRADIENTS = ("step", "zero_grad", "zero_grad in place", "clip_grad_norm_")
"""Not in the middle of a backward: autograd adds to a gradient without a lock, and with any optimizer, plain ones too,
the process may end if the gradient goes meanwhile."""
in_backward = threading.Lock()
"""Held by the loop in its backward, and by these calls."""


@contextlib.contextmanager
def second_thread(calls, model, optimizer):
    """Within, another thread makes `calls` over and over. Yields what it got: a list of (name, error or None)."""
    found, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            for name, call in calls.items():
                try:
                    with in_backward if name in REMOVES_GRADIENTS else contextlib.nullcontext():
                        call(model, optimizer)
                    found.append((name, None))
                except BaseException as error:
                    found.append((name, error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(20)
        sys.setswitchinterval(before)
        if thread.is_alive():  # where it stands, and where the others do
            faulthandler.dump_traceback(sys.__stderr__)
        assert not thread.is_alive()


AUTOGRADS_OWN = (
    "modified by an inplace operation",
    "pack hook is modifying its input in place",
)
"""Where a step was made or a weight written since forward."""


def assert_clear(found):
    """Each call came to its end, or raised one of our errors."""
    strange = [(name, repr(error)) for name, error in found if not isinstance(error, OffstageError | None)]
    assert not [one for one in strange if one[0] != "iterate" or not any(words in one[1] for words in AUTOGRADS_OWN)]
