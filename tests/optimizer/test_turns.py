# SPDX-License-Identifier: Apache-2.0
"""Between any two turns of the loop another thread may have its own: tried one by one, and the bits stay the same.

`test_second_thread` lets two threads race; here the loop stops where it gives up its turn, and goes on when the other
thread is done.
"""

import contextvars
import threading
import types
from unittest import mock

import pytest
import torch

from offstage.errors import OffstageError
from tests.optimizer.test_second_thread import MODES, iterate, made
from tests.support.second_thread import READS
from tests.support.training import lazily

CALLS = ["replan", "evaluation", "state_dict", "weights"]
LEARNED, WATCHED = 3, 2
"""Steps before the other thread has its turn, and steps within which it has it."""
TRIED = 10
"""Boundaries that are tried with each call, evenly spread."""


class Turn:
    """What the runtime takes for its lock: `call` is made, by another thread, where the loop has given it up for the
    `at`th time."""

    def __init__(self):
        self.given_up, self.at, self.call = 0, 0, None
        self._lock, self._depth, self._other = threading.RLock(), 0, None

    def __enter__(self):
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_):
        self._depth -= 1
        is_over = self._depth == 0 and threading.current_thread() is not self._other
        self._lock.release()
        if is_over:
            self.given_up += 1
            if self.given_up == self.at:
                self._other = threading.Thread(target=contextvars.copy_context().run, args=(self._work,))
                self._other.start()
                self._other.join()

    def _work(self):
        try:
            self.call()
        except OffstageError:  # it is told that it is not its turn
            pass
        except BaseException as error:
            self.failed = error

    failed = None


def trained(mode, kind, clip, call=None, at=0):
    """The weights after a few steps, and how often the loop gave up its turn in those that are watched."""
    turn = Turn()
    with lazily(kind), mock.patch("offstage.optimizer.runtime.threading", types.SimpleNamespace(RLock=lambda: turn)):
        model, optimizer, _ = made(mode)
        iterate(model, optimizer, range(LEARNED), clip)
        turn.given_up, turn.at, turn.call = 0, at, lambda: READS[call](model, optimizer)
        iterate(model, optimizer, range(LEARNED, LEARNED + WATCHED), clip)
        given_up, turn.at = turn.given_up, 0
        iterate(model, optimizer, range(LEARNED + WATCHED, LEARNED + 2 * WATCHED), clip)
        optimizer.synchronize()
        weights = [param.detach().clone() for param in model.parameters()]
        optimizer.close()
    if turn.failed is not None:
        raise turn.failed
    return weights, given_up


@pytest.mark.parametrize("clip", [None, 1e4, 1e-3])
@pytest.mark.parametrize("mode", ["in forward", "in backward, clipped", *(mode for mode in MODES if "weights" in mode)])
def test_another_thread_between_two_turns_changes_no_bit(mode, clip):
    expected, boundaries = trained(mode, None, clip)
    stride = max(1, boundaries // TRIED)
    for number, call in enumerate(CALLS):
        for at in range(1 + number * stride // len(CALLS), boundaries + 1, stride):
            found, _ = trained(mode, 0, clip, call, at)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (call, at)
