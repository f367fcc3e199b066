# SPDX-License-Identifier: Apache-2.0
"""`device_peak` in accelerate, Lightning, Fabric and torchtitan: `fit()` watches, switches and settles, same bits."""

import contextlib
import functools

import accelerate
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed.utils import clip_grad_norm_

import offstage
from offstage.fitting.fitted import Stage
from offstage.integrations import accelerate as adapter
from offstage.integrations import torchtitan as titan
from offstage.integrations.lightning import OffloadCallback, OffloadFabric
from offstage.optimizer.optimizer import runtime_of
from tests.support import hf
from tests.support import lightning_runs as lit
from tests.support.contract import assert_same_tree, assert_same_weights, one_process_group
from tests.support.hf import OFF
from tests.support.machines import machine
from tests.support.training import Block, lazily

engine = pytest.mark.engine
STEPS = 14
MADE_UP = {"machine": machine(), "min_bytes": 0, "chunk_bytes": "16KiB"}


def assert_decided(optimizer, *, leaves=True):
    found = optimizer.fitted
    assert found is not None
    assert found.predicted.device_bytes <= found.limits.device
    assert runtime_of(optimizer).watcher.stage is not Stage.WATCHING
    assert (optimizer.receipt().host_state_bytes > 0) == leaves
    return found


# accelerate


class Loop:
    """A user's loop, which knows nothing of us."""

    def __init__(self, settings, **options):
        hf.reset()
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        adapter.offload(self.accelerator, **settings)
        model = hf.make_model(tie_word_embeddings=False, num_hidden_layers=4, use_cache=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.norms = []

    def train(self, first=0, last=STEPS, *, clip="norm"):
        rows = hf.Tokens()
        for number in range(2 * first, 2 * last):
            with self.accelerator.accumulate(self.model):
                tokens = torch.stack([rows[(4 * number + row) % 64]["input_ids"] for row in range(2)])
                loss = self.model(input_ids=tokens, labels=tokens).loss
                self.accelerator.backward(loss * (0.05 if number // 2 % 3 else 1.0))
                if self.accelerator.sync_gradients and clip == "norm":
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
                elif self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_value_(self.model.parameters(), 1e-3)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    @property
    def ours(self):
        (found,) = adapter.optimizers_of(self.accelerator)
        return found

    def weights(self):
        self.ours.synchronize()
        return hf.weights_of(self.model)


PEAKS = {"least": "352KiB", "some": "500KiB", "all": "4MiB"}


def peak(kind, **more):
    return {**MADE_UP, "device_peak": PEAKS[kind], **more}


@functools.cache
def reference(clip="norm"):
    return Loop(OFF).train(clip=clip)


def assert_same(got, expected):
    assert_same_tree(got.weights(), expected.weights())
    assert got.norms == expected.norms


@engine("accelerate", "device_peak")
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("kind", PEAKS)
def test_accelerate(kind, seed):
    with lazily(seed):
        got = Loop(peak(kind)).train()
        assert_same(got, reference())
        found = assert_decided(got.ours, leaves=kind != "all")
    assert found.loop.clips
    assert found.loop.micro_batches == 2


@engine("accelerate", "device_peak")
@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_accelerate_saves_and_loads(step, tmp_path):
    """While `fit()` watches, at the switch, while it tries, and later; also into a job that is under way."""
    first = Loop(peak("least")).train(0, step)
    assert (first.ours.fitted is None) == (step == 1)
    first.accelerator.save_state(str(tmp_path))
    first.train(step, step + 2)  # lost
    first.accelerator.load_state(str(tmp_path))
    assert_same_tree(first.train(step).weights(), reference().weights())
    other = Loop(peak("some"))
    other.accelerator.load_state(str(tmp_path))
    assert_same_tree(other.train(step).weights(), reference().weights())
    assert_decided(other.ours)


def test_accelerate_clips_values():
    """That is not the optimizer's: `fit()` sees that gradients are read, and leaves them until `step()`."""
    got = Loop(peak("some")).train(clip="value")
    assert_same(got, reference(clip="value"))
    found = assert_decided(got.ours)
    assert found.loop.reads_gradients
    assert not found.setting.update_in_backward


def test_accelerate_clips_some_of_the_parameters():
    """As above; with updates in backward it would be refused."""

    def trained(settings):
        loop = Loop(settings)
        for number in range(6):
            tokens = hf.Tokens()[number]["input_ids"][None]
            loop.accelerator.backward(loop.model(input_ids=tokens, labels=tokens).loss)
            loop.norms.append(float(loop.accelerator.clip_grad_norm_([loop.model.lm_head.weight], 0.1)))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loop

    got = trained(peak("some"))
    assert_same(got, trained(OFF))
    assert got.ours.fitted.loop.reads_gradients


def test_a_scaler_keeps_updates_out_of_backward(monkeypatch):
    hf.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu"))
    adapter.offload(accelerator, **peak("some"))
    model = hf.make_model(use_cache=False)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    (made,) = adapter.optimizers_of(accelerator)
    assert not runtime_of(made).watcher.job.may_update_in_backward


def test_a_config_object_says_the_same():
    config = offstage.OffloadConfig(device_peak=PEAKS["some"], min_bytes=0, chunk_bytes="16KiB")
    hf.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    adapter.offload(accelerator, config, machine=machine())
    model = hf.make_model(use_cache=False, num_hidden_layers=4)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    (made,) = adapter.optimizers_of(accelerator)
    assert runtime_of(made).watcher.limits.device == 500 * 1024


def test_window_auto_keeps_its_own_limit():
    """As before: `device_peak` is then the window's."""
    hf.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    adapter.offload(accelerator, window="auto", device_peak="1GiB", min_bytes=0)
    model = hf.make_model()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    (made,) = adapter.optimizers_of(accelerator)
    assert runtime_of(made).watcher is None
    assert made.config.window == "auto"


def test_refusals_in_accelerate(monkeypatch):
    hf.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    with monkeypatch.context() as patch:
        patch.setattr(accelerate.Accelerator, "num_processes", 2)
        with pytest.raises(offstage.ConfigError, match=r"decide for one device.*found num_processes=2.*fraction"):
            adapter.offload(accelerator, device_peak="24GiB")
    adapter.offload(accelerator, **peak("some"))
    model = hf.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(offstage.ConfigError, match="Prepare them in one call"):
        accelerator.prepare(optimizer)
    with pytest.raises(offstage.ConfigError, match=r"config\.use_cache=True, whose layers would write to it twice"):
        accelerator.prepare(model)
    assert not hasattr(optimizer, "_offstage_consumed")


# Lightning and Fabric


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(lit.WIDTH, 2) for _ in range(4)))


class Module(lit.Module):
    """Has no forward of its own."""

    def __init__(self, make):
        super().__init__(make)
        self.network = network()


class WithForward(Module):
    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        if self.fails_at == self.trainer.fit_loop.epoch_loop.total_batch_idx:
            raise lit.Stopped
        return lit.loss_of(self(batch[0]), batch[1], batch_idx)


LIT_PEAKS = {"least": "340KiB", "some": "500KiB"}


def fitted(kind, **more):
    def make(model):
        made = {**MADE_UP, **more, "device_peak": LIT_PEAKS[kind]}
        return offstage.fit(model, lit.adamw(model), **made)

    return make


LIT = {"gradient_clip_val": lit.MAX_NORM, "accumulate_grad_batches": 2, "max_epochs": 5}


def lightning(make, callbacks=(), *, kind=Module, **options):
    return lit.fit(make, callbacks, kind=kind, **{**LIT, **options})


@engine("Lightning", "device_peak")
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("kind", [Module, WithForward])
@pytest.mark.parametrize("at", LIT_PEAKS)
def test_lightning(at, kind, seed):
    expected, _ = lightning(lit.ours(), kind=kind)
    module, trainer = lightning(fitted(at), [OffloadCallback()], kind=kind, lazy_seed=seed)
    assert_same_weights(module, expected)
    (optimizer,) = trainer.optimizers
    found = assert_decided(optimizer)
    assert found.loop.clips
    assert found.loop.micro_batches == 2
    assert optimizer.receipt().steps == 15
    assert not {"forward", "training_step"} & vars(module).keys()  # it is as it was


@engine("Lightning", "device_peak")
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_lightning_killed_and_resumed(step, tmp_path):
    """While `fit()` watches, at the switch, while it tries, and later. An epoch is a step."""
    epochs = {"limit_train_batches": 2, "max_epochs": STEPS}
    expected, undisturbed = lightning(lit.ours(), **epochs)
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    options = {"enable_checkpointing": True, "fails_at": 2 * step}
    lightning(fitted("least"), [saver, OffloadCallback()], **epochs, **options)
    assert len(list(tmp_path.iterdir())) == step
    file = str(tmp_path / f"epoch={step - 1}.ckpt")
    module, trainer = lightning(fitted("least"), [OffloadCallback()], resume=file, **epochs)
    assert_same_weights(module, expected)
    assert_same_tree(trainer.optimizers[0].state_dict(), undisturbed.optimizers[0].state_dict())
    assert_decided(trainer.optimizers[0])


def test_lightning_clips_values():
    options = {"gradient_clip_algorithm": "value", "gradient_clip_val": 1e-3}
    expected, _ = lightning(lit.ours(), **options)
    module, trainer = lightning(fitted("some"), [OffloadCallback()], **options)
    assert_same_weights(module, expected)
    assert trainer.optimizers[0].fitted.loop.reads_gradients


def start(make, seed=None):
    fabric = OffloadFabric(accelerator="cpu", devices=1)
    model = fabric.setup_module(network())
    with lazily(seed):
        optimizer = make(model)
    return fabric, model, fabric.setup_optimizers(optimizer)


def loop(fabric, model, optimizer, steps=range(STEPS)):
    data = lit.batches()
    for step in steps:
        for number in range(2):
            inputs, target = data[(step + number) % len(data)]
            with fabric.no_backward_sync(model, enabled=not number):
                fabric.backward(lit.loss_of(model(inputs), target, step))
        fabric.clip_gradients(model, optimizer, max_norm=lit.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model, optimizer


@engine("Fabric", "device_peak")
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("at", LIT_PEAKS)
def test_fabric(at, seed):
    expected, _ = loop(*start(lit.ours()))
    model, optimizer = loop(*start(fitted(at), seed))
    assert_same_weights(model, expected)
    found = assert_decided(optimizer)
    assert found.loop.clips
    assert found.loop.micro_batches == 2


@engine("Fabric", "device_peak")
@pytest.mark.parametrize("step", [1, 2, 6])
def test_fabric_saved_and_resumed(step, tmp_path):
    expected, undisturbed = loop(*start(lit.ours()))
    fabric, model, optimizer = start(fitted("least"))
    loop(fabric, model, optimizer, range(step))
    fabric.save(tmp_path / "state", {"model": model, "optimizer": optimizer})
    fabric, model, optimizer = start(fitted("least"))
    fabric.load(tmp_path / "state", {"model": model, "optimizer": optimizer})
    loop(fabric, model, optimizer, range(step, STEPS))
    assert_same_weights(model, expected)
    assert_same_tree(optimizer.state_dict(), undisturbed.state_dict())
    assert_decided(optimizer)


# torchtitan


def titans(settings, steps=range(STEPS), state=None, seed=None):
    """The loop of its `Trainer.train_step`; `state`: of a job before."""
    model = network()
    with lazily(seed):
        container = titan.offload(default_adamw(lr=0.01), **settings).build(model_parts=[model])
        if state is not None:
            model.load_state_dict(state["model"])
            container.load_state_dict(state["optimizers"])
        for step in steps:
            container.zero_grad()
            for micro_batch in range(2):
                inputs, target = lit.batches()[(step + micro_batch) % lit.BATCHES]
                lit.loss_of(model(inputs), target, step).backward()
            clip_grad_norm_(list(model.parameters()), lit.MAX_NORM, foreach=True)
            container.step()
        (optimizer,) = container.optimizers
        optimizer.synchronize()
    return model, container


TITAN = {"min_bytes": 0, "chunk_bytes": "16KiB", "device_peak": "500KiB"}


@engine("torchtitan", "device_peak")
@pytest.mark.parametrize("seed", [None, 0])
def test_torchtitan(seed):
    with one_process_group():
        expected, _ = titans(OFF)
        model, container = titans(TITAN, seed=seed)
    assert_same_weights(model, expected)
    (optimizer,) = container.optimizers
    found = assert_decided(optimizer)
    assert not found.setting.update_in_backward
    assert found.loop.reads_gradients or not found.setting.hosted


@engine("torchtitan", "device_peak")
@pytest.mark.parametrize("step", [1, 2, 6])
def test_torchtitan_resumed(step):
    with one_process_group():
        expected, _ = titans(OFF)
        model, container = titans(TITAN, range(step))
        state = {"model": model.state_dict(), "optimizers": container.state_dict()}
        model, container = titans(TITAN, range(step, STEPS), state)
    assert_same_weights(model, expected)
    assert_decided(container.optimizers[0])


def test_torchtitan_with_a_plan():
    _, container = titans(TITAN)
    plan = container.optimizers[0].fitted
    _, container = titans({**TITAN, "plan": plan.to_json()}, range(1))
    assert runtime_of(container.optimizers[0]).watcher.stage is Stage.WATCHING  # the plan follows


def test_torchtitan_refuses_what_fit_decides():
    with pytest.raises(offstage.ConfigError, match=r"fit\(\) decides fraction itself"):
        titans({**TITAN, "fraction": 0.5})


# Classes that know parameters only


@pytest.mark.parametrize("model", [False, True])
def test_ready_made_classes(model):
    made = network()
    with pytest.raises(offstage.ConfigError, match=r"AdamW was given device_peak=1\.0 GiB.*Use offstage\.fit\(model, "):
        offstage.optim.AdamW(made.parameters(), device_peak="1GiB", model=made if model else None)
    with contextlib.closing(
        offstage.optim.AdamW(made.parameters(), device_peak="1GiB", window="auto", min_bytes=0)
    ) as kept:
        assert kept.config.window == "auto"
