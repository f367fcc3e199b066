# SPDX-License-Identifier: Apache-2.0
"""Callbacks and hooks of Lightning that read weights under `overlap_forward`, on lanes that run work late."""

import logging
from unittest import mock

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)

import offstage
from offstage.integrations.lightning import OffloadCallback
from tests.support.contract import assert_same_tree, assert_same_weights
from tests.support.lightning_runs import FORWARD, LAZY, Module, fit, ours


class Reader(Callback):
    """Keeps what it finds at the end of each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen.append([param.detach().clone() for param in pl_module.parameters()])


class SelfReader(Module):
    """A module whose own hook reads weights."""

    def on_fit_start(self):
        self.seen = []

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append([param.detach().clone() for param in self.parameters()])


def averages(*callbacks, **options):
    """A run on lazy lanes with callbacks that read weights, and the same run with everything resident."""
    reference = fit(ours(), [make() for make in callbacks[1:]], validate=True, **options)
    found = fit(ours(**FORWARD), [make() for make in callbacks], validate=True, lazy_seed=0, **options)
    return found, reference


@pytest.mark.engine("Lightning", "overlap_forward", "lazy lanes")
@pytest.mark.parametrize("lazy_seed", LAZY)
def test_readers_find_new_weights(lazy_seed):
    found, expected = Reader(), Reader()
    fit(ours(), [expected])
    fit(ours(**FORWARD), [found, OffloadCallback()], lazy_seed=lazy_seed)  # it goes before the reader by itself
    assert_same_tree(found.seen, expected.seen)


def test_the_modules_own_hooks():
    (found, _), (expected, _) = averages(OffloadCallback, kind=SelfReader)
    assert_same_tree(found.seen, expected.seen)


def ema():
    return EMAWeightAveraging(decay=0.9)


def swa():
    return StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)


@pytest.mark.engine("Lightning", "overlap_forward", "lazy lanes")
@pytest.mark.parametrize("make", [ema, swa])
def test_weight_averaging(make):
    """The averages become the model at the end; the first validates with them too."""
    (module, trainer), (expected, reference) = averages(OffloadCallback, make)
    assert_same_weights(module, expected)
    assert trainer.callback_metrics["loss"] == reference.callback_metrics["loss"]


HOOKS = ["on_validation_start", "on_train_epoch_end", "on_save_checkpoint", "on_train_end"]


def reader_at(hook, seen):
    """A callback that reads weights in one hook only."""

    def read(self, trainer, pl_module, *_):
        seen.append([param.detach().clone() for param in pl_module.parameters()])

    return type("ReaderThere", (Callback,), {hook: read})()


@pytest.mark.engine("Lightning", "overlap_forward", "lazy lanes")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_outside_batches(hook, tmp_path):
    seen = {"off": [], "ours": []}
    for name, make in (("off", ours()), ("ours", ours(**FORWARD))):
        callbacks = [reader_at(hook, seen[name]), OffloadCallback()]
        if hook == "on_save_checkpoint":  # in the middle of an epoch
            callbacks.append(ModelCheckpoint(tmp_path / name, every_n_train_steps=4))
        fit(
            make,
            callbacks,
            validate=hook == "on_validation_start",
            lazy_seed=None if name == "off" else 0,
            enable_checkpointing=hook == "on_save_checkpoint",
        )
    assert seen["off"]
    assert_same_tree(seen["ours"], seen["off"])


def test_weights_after_the_end():
    """`parameters()` after `fit()`, and what validation sees, without any reader in between."""
    (module, trainer), (expected, reference) = averages(OffloadCallback)
    assert_same_weights(module, expected)
    assert trainer.callback_metrics["loss"] == reference.callback_metrics["loss"]


def test_only_readers_are_waited_for(caplog):
    def runs(*callbacks, **options):
        caplog.clear()
        with mock.patch.object(offstage.OffloadedOptimizer, "synchronize", autospec=True) as synchronize:
            fit(ours(**FORWARD), callbacks, max_epochs=1, **options)
        return synchronize.call_count, [one.message for one in caplog.records if "may read" in one.message]

    caplog.set_level(logging.WARNING, "offstage")
    few, said = runs(OffloadCallback(), Timer(duration={"hours": 1}))
    assert not said
    assert few < 6  # batches
    many, said = runs(OffloadCallback(), Reader())
    assert many >= few + 6
    assert "Reader" in said[0]
    assert "non_readers" in said[0]
    assert runs(OffloadCallback(non_readers=[Reader]), Reader()) == (few, [])
    assert runs(OffloadCallback(), LambdaCallback(on_train_batch_end=lambda *_: None))[0] == many
