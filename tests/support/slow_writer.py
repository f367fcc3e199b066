# SPDX-License-Identifier: Apache-2.0
"""`SlowWriter`: holds the writer of a checkpoint back, so that training gets ahead of it. For tests."""

import contextlib
import threading
from unittest import mock

from offstage.checkpoint import writer

LONGEST_S = 60.0
"""No wait of these tests takes so long, unless something hangs."""


class SlowWriter:
    """Stops a save before every tensor until it is let go on."""

    def __init__(self):
        self.reached = threading.Event()
        self.real = writer._blocks
        self._changed = threading.Condition()
        self._permits = 0.0

    def blocks(self, entry):
        self.reached.set()
        with self._changed:
            assert self._changed.wait_for(lambda: self._permits > 0, LONGEST_S), "the writer was not let go on"
            self._permits -= 1
        yield from self.real(entry)

    def let(self, tensors):
        with self._changed:
            self._permits += tensors
            self._changed.notify_all()

    def open(self):
        self.let(float("inf"))

    def finish(self, saving):
        self.open()
        saving.result(LONGEST_S)


@contextlib.contextmanager
def held_back():
    """Nothing is written until it may begin: by then every chunk can have been overwritten."""
    slow = SlowWriter()
    with mock.patch.object(writer, "_blocks", slow.blocks):
        try:
            yield slow
        finally:
            slow.open()  # whatever has failed: the writer ends
