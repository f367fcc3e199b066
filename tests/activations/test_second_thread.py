# SPDX-License-Identifier: Apache-2.0
"""Every public method of what `offload_activations()` returns, called from a second thread while the loop trains."""

import itertools
import threading

import pytest
import torch
from torch import nn

from offstage.activations.offload import ActivationOffload, offload_activations
from offstage.errors import OffstageError
from offstage.planning.choices import Choice
from tests.support.second_thread import assert_clear, second_thread
from tests.support.training import THREADED, Block, lazily

WIDTH = 16
READS = {
    "receipt": lambda model, handle: str(handle.receipt()),
    "host_bytes": lambda model, handle: handle.host_bytes,
    "config": lambda model, handle: handle.config,
    "layers": lambda model, handle: handle.layers,
    "choices": lambda model, handle: handle.choices,
}


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(WIDTH, 2) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def trained(steps, *, calls=None, handle=None, model=None):
    """Gradients of every step, and what the second thread got."""
    model = Stack() if model is None else model
    found = []

    def iterate():
        for number in range(steps):
            model.zero_grad()
            model(torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(number))).backward()
            found.extend(param.grad.clone() for param in model.parameters())

    if calls is None:
        iterate()
        return found, []
    with second_thread(calls, model, handle) as told:
        iterate()
    return found, told


@pytest.mark.parametrize("kind", [None, 0, 1, THREADED])
def test_reading_and_removing_while_the_loop_trains(kind):
    """`remove()` is refused in the middle of a forward, and else leaves the graphs that wait for their backward."""
    expected, _ = trained(30)
    with lazily(kind):
        model = Stack()
        handle = offload_activations(model, min_bytes=0)

        def again(model, _):
            """Take the hooks off and bind them anew."""
            model.handle[0].remove()
            model.handle[0] = offload_activations(model, min_bytes=0)

        model.handle = [handle]
        mixes = itertools.cycle([*Choice, *Choice, Choice.KEEP])  # another one each time
        calls = {
            **{name: (lambda model, _, call=call: call(model, model.handle[0])) for name, call in READS.items()},
            "replan": lambda model, _: model.handle[0].replan([next(mixes) for _ in model.layers]),
            "remove": again,
        }
        found, told = trained(30, calls=calls, handle=handle, model=model)
    assert_clear(told)
    for method in ("remove", "replan"):
        assert any(error is None for name, error in told if name == method)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_removing_and_replanning_while_a_forward_runs_are_refused():
    """Its end would not be seen: the tensors of other models would come here from then on."""
    model = Stack()
    handle = offload_activations(model, min_bytes=0)
    errors = []

    def replan():
        handle.replan([Choice.KEEP] * 5)

    def remove(*_):
        for name, method in (("remove", handle.remove), ("replan", replan)):
            for call in (method, lambda method=method: in_a_thread(method)):
                with pytest.raises(OffstageError, match=rf"^{name}\(\) .* while a forward of the model was") as info:
                    call()
                errors.append(info.value)

    def in_a_thread(call):
        raised = []

        def work():
            try:
                call()
            except OffstageError as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        raise raised[0]

    hook = model.layers[2].register_forward_hook(remove)
    expected, _ = trained(2)
    found, _ = trained(2, model=model)
    hook.remove()
    assert len(errors) == 8
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    handle.remove()
    assert not torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    kept = handle.receipt().passes
    Stack()(torch.zeros(1, 1, WIDTH)).backward()
    assert handle.receipt().passes == kept


def test_every_public_method_is_among_them():
    public = {name for name in vars(ActivationOffload) if not name.startswith("_")}
    # bytes_left is an old name of an attribute; begin_late is called by a hook of the forward that it begins
    assert public <= {*READS, "remove", "replan", "bytes_left", "begin_late"}
