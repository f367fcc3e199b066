# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with `OffloadCallback`: the bits of `fraction=0`, and of plain torch where these are promised."""

import importlib
import sys
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

import offstage
from offstage.errors import ConfigError, OffstageError
from offstage.integrations import packages
from offstage.integrations.lightning import OffloadCallback
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import assert_same_tree, assert_same_weights
from tests.support.lightning_runs import BOTH, LAZY, MAX_NORM, PLANS, SMALL, Module, Stopped, adamw, fit, ours


def receipt_of(trainer):
    receipt = trainer.optimizers[0].receipt()
    assert receipt.fallbacks == ()
    return receipt


# The same bits


@pytest.mark.engine("Lightning", "same bits", "clipping")
@pytest.mark.parametrize("plan", PLANS)
def test_same_bits(plan):
    reference, _ = fit(ours(), gradient_clip_val=MAX_NORM)
    module, trainer = fit(ours(**PLANS[plan]), [OffloadCallback()], gradient_clip_val=MAX_NORM)
    assert_same_weights(module, reference)
    receipt = receipt_of(trainer)
    assert receipt.steps == 18
    assert receipt.host_state_bytes > 0


@pytest.mark.engine("Lightning", "same bits")
@pytest.mark.parametrize("plan", ["all", "forward, backward"])
def test_torchs_own_arithmetic(plan):
    """With `rule="torch"` the bits are those of a Trainer that knows nothing of offstage."""
    reference, plain = fit(adamw, gradient_clip_val=MAX_NORM)
    module, trainer = fit(ours(**PLANS[plan], rule="torch"), [OffloadCallback()], gradient_clip_val=MAX_NORM)
    assert_same_weights(module, reference)
    assert_same_tree(trainer.optimizers[0].state_dict()["state"], plain.optimizers[0].state_dict()["state"])
    assert receipt_of(trainer).host_state_bytes > 0


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_bf16(masters):
    reference, _ = fit(ours(fraction=0.0, master_weights=masters), precision="bf16-true")
    module, trainer = fit(ours(**BOTH, master_weights=masters), [OffloadCallback()], precision="bf16-true")
    assert next(module.parameters()).dtype == torch.bfloat16
    assert_same_weights(module, reference)
    assert receipt_of(trainer).host_state_bytes > 0


class Norms(Callback):
    """What is logged as the norm, batch by batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(float(trainer.callback_metrics["norm"]))


class PlainNorms(Module):
    norms: list

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        self.norms.append(float(norm))


@pytest.mark.engine("Lightning", "update in backward, clipped")
@pytest.mark.parametrize("lazy_seed", [None, *LAZY])
def test_clipped_updates_in_backward(lazy_seed):
    """Some norms are within the limit, so that updates stay, and some are not, so that they are taken back."""
    PlainNorms.norms = []
    fit(ours(), kind=PlainNorms, gradient_clip_val=MAX_NORM)
    reference, _ = fit(ours(), gradient_clip_val=MAX_NORM)
    norms = Norms()
    callbacks = [OffloadCallback(log_norm="norm", non_readers=[Norms]), norms]
    module, trainer = fit(ours(**BOTH), callbacks, gradient_clip_val=MAX_NORM, lazy_seed=lazy_seed)
    assert_same_weights(module, reference)
    assert norms.seen == PlainNorms.norms
    receipt = receipt_of(trainer)
    assert receipt.speculation_hits > 2
    assert receipt.speculation_misses > 2


def test_norm_without_clipping():
    norms = Norms()
    callbacks = [OffloadCallback(log_norm="norm"), norms]
    module, trainer = fit(ours(**BOTH), callbacks, gradient_clip_val=float("inf"))
    reference, _ = fit(ours())
    assert_same_weights(module, reference)
    assert len(norms.seen) == 18
    assert receipt_of(trainer).speculation_misses == 0


class OneBadBatch(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("inf") if self.global_step == 7 else 1.0)


@pytest.mark.parametrize("plan", ["off", "all", "forward, backward"])
def test_norm_that_is_not_finite(plan):
    """The step changes nothing; Lightning alone would go on with weights that are not numbers."""
    config = {"off": {"fraction": 0.0}, **PLANS}[plan]
    module, trainer = fit(ours(**config), [OffloadCallback()], kind=OneBadBatch, gradient_clip_val=MAX_NORM)
    assert all(param.isfinite().all() for param in module.parameters())
    assert trainer.optimizers[0].receipt().skipped_steps == 1


@pytest.mark.engine("Lightning", "accumulation")
@pytest.mark.parametrize("clip", [None, MAX_NORM])
def test_accumulation(clip):
    """Of four batches, and at an epoch's end of the two that are left."""
    options = {"accumulate_grad_batches": 4, "gradient_clip_val": clip, "max_epochs": 4}
    reference, _ = fit(ours(), **options)
    module, trainer = fit(ours(**BOTH), [OffloadCallback()], **options)
    assert_same_weights(module, reference)
    receipt = receipt_of(trainer)
    assert receipt.steps == trainer.global_step == 8
    assert chosen_in_backward(trainer)


def chosen_in_backward(trainer):
    """The parameters that are updated in backward by now."""
    return runtime_of(trainer.optimizers[0]).overlap.selection.params


def test_accumulation_without_the_callback():
    """Otherwise the test above would not show what the callback is for."""
    _, trainer = fit(ours(**BOTH), accumulate_grad_batches=4)
    assert not chosen_in_backward(trainer)
    assert "accumulate()" in trainer.optimizers[0].receipt().fallbacks[0]


# Checkpoints


@pytest.mark.engine("Lightning", "save and resume")
@pytest.mark.parametrize("plan", ["all", "half", "forward, backward"])
def test_killed_and_resumed(plan, tmp_path):
    """Saved at an epoch's end, killed in the middle of the next one, resumed in a new process's objects."""
    make = ours(**PLANS[plan])
    reference, undisturbed = fit(ours(), gradient_clip_val=MAX_NORM)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}")
    fit(make, [saver, OffloadCallback()], gradient_clip_val=MAX_NORM, enable_checkpointing=True, fails_at=9)
    file = str(tmp_path / "epoch=0.ckpt")
    module, trainer = fit(make, [OffloadCallback()], gradient_clip_val=MAX_NORM, resume=file)
    assert_same_weights(module, reference)
    saved, expected = (one.optimizers[0].state_dict() for one in (trainer, undisturbed))
    assert_same_tree(saved, expected)
    assert receipt_of(trainer).host_state_bytes > 0
    assert receipt_of(trainer).steps == 12


@pytest.mark.engine("Lightning", "save and resume")
@pytest.mark.parametrize("turn", ["plain to ours", "ours to plain"])
def test_checkpoints_are_lightnings_own(turn, tmp_path):
    reference, _ = fit(adamw)
    offloaded = ours(**SMALL, rule="torch")
    first, second = (adamw, offloaded) if turn == "plain to ours" else (offloaded, adamw)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}")
    fit(first, [saver], enable_checkpointing=True, fails_at=9)
    module, _ = fit(second, resume=str(tmp_path / "epoch=0.ckpt"))
    assert_same_weights(module, reference)


# Failing


class FailsInBackward(Module):
    """In the middle of its backward, once weights are updated there."""

    def on_before_backward(self, loss):
        if self.global_step == 5:
            self.network[0].weight.register_hook(self._fail)

    def _fail(self, _):
        raise Stopped("in backward")


@pytest.mark.parametrize("clip", [None, MAX_NORM])
def test_the_first_error_is_the_one_that_is_raised(clip, caplog):
    """Lightning's teardown reads the state, which may be between two steps."""
    with pytest.raises(Stopped, match="in backward"):
        fit(ours(**BOTH), [OffloadCallback()], kind=FailsInBackward, gradient_clip_val=clip)
    assert ("between backward and step()" in caplog.text) == (clip is None)


def test_teardown_without_the_callback():
    """Otherwise the test above would not show what the callback is for."""
    with pytest.raises(OffstageError, match="between backward and step"):
        fit(ours(**BOTH), kind=FailsInBackward)


def test_updates_are_taken_back_where_that_is_possible(tmp_path):
    """With clipping, what is saved on an exception is the last whole step."""
    saver = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(Stopped):
        fit(
            ours(**BOTH),
            [OffloadCallback(), saver],
            kind=FailsInBackward,
            gradient_clip_val=MAX_NORM,
            enable_checkpointing=True,
        )
    (file,) = tmp_path.iterdir()
    saved = torch.load(file, weights_only=False)["state_dict"]
    reference, _ = fit(ours(), gradient_clip_val=MAX_NORM, max_epochs=1, limit_train_batches=5)
    assert_same_tree(dict(saved), dict(reference.state_dict()))


@pytest.mark.parametrize("fails_at", [None, 3])
def test_all_is_lightnings_again_afterwards(fails_at):
    _, trainer = fit(ours(**SMALL), [OffloadCallback()], max_epochs=1, fails_at=fails_at)
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)


class FailsInAMicroBatch(FailsInBackward):
    def on_before_backward(self, loss):
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == 7:
            self.network[0].weight.register_hook(self._fail)


def test_nothing_accumulates_after_an_exception():
    """The next backward's gradients are final again: the loop may go on without Lightning."""
    made = []

    def make(model):
        made.append(ours(**BOTH)(model))
        return made[0]

    with pytest.raises(Stopped, match="in backward"):
        fit(make, [OffloadCallback()], kind=FailsInAMicroBatch, accumulate_grad_batches=4)
    (optimizer,) = made
    module = runtime_of(optimizer).model
    module.network[0].weight._backward_hooks.clear()
    module.network(torch.ones(2, 48)).sum().backward()
    assert runtime_of(optimizer).iteration.early
    optimizer.step()


# Manual optimization


class TwoOptimizers(Module):
    """Two parts in turn, each with an optimizer, two micro-batches each, clipped by hand."""

    automatic_optimization = False

    def configure_optimizers(self):
        halves = self.network[:2], self.network[2:]
        return [self.make(half) for half in halves]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                accumulate = getattr(optimizer, "accumulate", None)
                with accumulate():
                    self.manual_backward(self.loss(batch, batch_idx) / 2)
                self.manual_backward(self.loss(batch, batch_idx) / 2)
                self.clip_gradients(optimizer, gradient_clip_val=MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    def loss(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


@pytest.mark.engine("Lightning", "update in backward, clipped", "accumulation")
@pytest.mark.parametrize("lazy_seed", [None, 0])
def test_manual_optimization(lazy_seed):
    reference, _ = fit(ours(), [OffloadCallback()], kind=TwoOptimizers)
    module, trainer = fit(ours(**BOTH), [OffloadCallback()], kind=TwoOptimizers, lazy_seed=lazy_seed)
    assert_same_weights(module, reference)
    for optimizer in trainer.optimizers:
        receipt = optimizer.receipt()
        assert receipt.steps == 18
        assert receipt.speculation_hits > 2
        assert receipt.speculation_misses > 0
        assert receipt.host_state_bytes > 0


# Beside other parts of offstage


class Rests(Callback):
    """After each epoch the whole job is off the device for a while."""

    def on_train_epoch_end(self, trainer, pl_module):
        (optimizer,) = trainer.optimizers
        offstage.sleep(pl_module, optimizer)
        assert offstage.asleep(pl_module, optimizer)
        offstage.wake(pl_module, optimizer)


@pytest.mark.engine("Lightning", "sleep and wake")
def test_sleeping_between_epochs():
    reference, _ = fit(ours(), gradient_clip_val=MAX_NORM)
    module, trainer = fit(ours(**BOTH), [OffloadCallback(), Rests()], gradient_clip_val=MAX_NORM)
    assert_same_weights(module, reference)
    assert receipt_of(trainer).speculation_hits > 0


class WithActivations(Module):
    def on_fit_start(self):
        self.handle = offstage.offload_activations(self.network, min_bytes=0, keep_last=0)


@pytest.mark.engine("Lightning", "activation offload")
def test_activations():
    reference, _ = fit(ours(), gradient_clip_val=MAX_NORM)
    module, _ = fit(ours(**BOTH), [OffloadCallback()], kind=WithActivations, gradient_clip_val=MAX_NORM)
    assert_same_weights(module, reference)
    assert module.handle.receipt().bytes_offloaded > 0


@pytest.mark.parametrize("plan", ["all", "forward, backward"])
def test_weights_on_the_host(plan):
    reference, _ = fit(ours(), gradient_clip_val=MAX_NORM)
    module, trainer = fit(ours(**PLANS[plan], weights="host"), [OffloadCallback()], gradient_clip_val=MAX_NORM)
    assert_same_weights(module, reference)
    assert receipt_of(trainer).host_weight_bytes > 0


# Refusals


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (adamw, {}, r"expects an offloaded optimizer .* found AdamW"),
        (ours(**BOTH), {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "found .*algorithm='value'"),
        (ours(**SMALL), {"log_norm": "norm"}, r"log_norm='norm' .* gradient_clip_val=None"),
    ],
)
def test_refusals(make, options, says):
    callback = OffloadCallback(log_norm=options.pop("log_norm", None))
    with pytest.raises(ConfigError, match=says):
        fit(make, [callback], **options)


class Scaled(Callback):
    """As on a device, where precision='16-mixed' has a scaler."""

    def setup(self, trainer, pl_module, stage):
        trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu")


def test_clipping_by_norm_may_be_said():
    reference, _ = fit(ours(), gradient_clip_val=MAX_NORM)
    named, _ = fit(ours(**BOTH), [OffloadCallback()], gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
    assert_same_weights(named, reference)


def test_a_scaler_is_refused_with_updates_in_backward():
    with pytest.raises(ConfigError, match="precision='32-true'"):
        fit(ours(**BOTH), [OffloadCallback(), Scaled()])


@pytest.mark.parametrize("found", ["1.9.5", "2.7.0", None])
def test_another_version(found, monkeypatch):
    monkeypatch.delitem(sys.modules, "offstage.integrations.lightning")
    error = packages.PackageNotFoundError("lightning") if found is None else None
    if found is None:
        monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with (
        mock.patch.object(packages, "version", return_value=found, side_effect=error),
        pytest.raises(ConfigError, match=rf"lightning .*found {found or 'none'}.*pip install 'lightning>=2.6,<2.7'"),
    ):
        importlib.import_module("offstage.integrations.lightning")


class FSDPStrategy(SingleDeviceStrategy):
    """Of the name of Lightning's, which cannot be made without a device."""


def test_fsdp1_is_refused():
    strategy = FSDPStrategy(device="cpu", accelerator=CPUAccelerator())
    with pytest.raises(ConfigError, match=r"FSDPStrategy .* Use ModelParallelStrategy"):
        fit(ours(**SMALL), [OffloadCallback()], strategy=strategy, accelerator="auto")
