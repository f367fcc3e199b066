# SPDX-License-Identifier: Apache-2.0
"""Settings for every test."""

import gc
import importlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from offstage.planning import host_weights
from tests.support.contract import one_process_group
from tests.support.ranks import Ranks

# What the tests measure of this machine is not for other programs.
_cache = tempfile.TemporaryDirectory(prefix="offstage-tests-")
os.environ["OFFSTAGE_CACHE"] = _cache.name

# Some virtual machines report AMX and do not allow it: oneDNN's bf16 matrix products then die of an illegal
# instruction. The tests need no fast matrix products.
torch.backends.mkldnn.enabled = False
torch.set_num_threads(1)


# A shell that starts the tests in the background has SIGINT ignored, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = ("fitting/test_simulated.py", "test_examples.py", "weights/test_replan_weights.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: at the end no process is left alone with one."""
    tests = Path(__file__).parent
    long = [tests / name for name in LONG]
    items.sort(key=lambda item: long.index(item.path) if item.path in long else len(long))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of every later garbage collection: they stay, and each would go through them all."""
    importlib.import_module("torch._dynamo")  # the first step of any optimizer imports it
    _keep_out_of_collections()


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_files_imported_stays() -> None:
    _keep_out_of_collections()


def _keep_out_of_collections() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real processes: `ranks.run(2, function)`."""
    with Ranks() as started:
        yield started


@pytest.fixture(scope="module")
def some_layers_are_late() -> Iterator[None]:
    """Of the few layers that test models have on the host, the next forward updates more than usual."""
    with mock.patch.object(host_weights, "LEFT_TO_FORWARD", 0.4):
        yield


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo process group of this process alone."""
    with one_process_group():
        yield
