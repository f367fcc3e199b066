# SPDX-License-Identifier: Apache-2.0
"""`device_peak` in transformers' `Trainer`, TRL and PEFT: `fit()` watches, switches and settles, to the same bits."""

import functools
import tempfile

import datasets
import peft
import pytest
import torch
import transformers
import trl

import offstage
from offstage.fitting.fitted import Stage
from offstage.integrations import transformers as adapter
from offstage.integrations.settings import Settings
from offstage.optimizer.optimizer import runtime_of
from offstage.weights.host_weights import host_weight_of
from tests.support import hf
from tests.support.hf import OFF
from tests.support.machines import machine
from tests.support.training import lazily

engine = pytest.mark.engine
STEPS = 14
"""Two are watched; the others are of at least one plan."""
SMALL = {"machine": machine(), "min_bytes": 0, "chunk_bytes": "16KiB"}
PEAKS = {"least": "330KiB", "some": "450KiB", "all": "2MiB"}
"""Of a job that takes 702 KiB with everything on the device, and 324 KiB with as little as can be."""
SLOW_LINK = machine(link_up_gb_per_s=0.02, link_down_gb_per_s=0.02, link_duplex_gb_per_s=0.02)
IN_BACKWARD = {
    **SMALL,
    "machine": SLOW_LINK,
    "overlap_forward": False,
    "update_on_host": False,
    "device_peak": "510KiB",
}
"""State has to leave, and its way over the link takes so long that it is worth hiding in backward."""
LOOP = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "max_grad_norm": 1.5, "lr_scheduler_type": "cosine"}


def peak(kind, **more):
    return {**SMALL, "device_peak": PEAKS[kind], **more}


def make(folder=None, **options):
    model = hf.make_model(num_hidden_layers=4)
    return hf.make_trainer(folder or tempfile.mkdtemp(prefix="fit-"), model=model, **{**LOOP, **options})


def train(settings, folder=None, *, seed=None, resume=None, **options):
    trainer = make(folder, **options)
    with lazily(seed):
        adapter.offload(trainer, **settings)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@functools.cache
def reference(**options):
    return train(OFF, **options)


def assert_same(got, expected):
    """Weights, losses and norms in the log."""
    ours = adapter.optimizer_of(got)
    ours.synchronize()
    for (name, left), (_, right) in zip(got.model.named_parameters(), expected.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert hf.logged(got) == hf.logged(expected)


def assert_decided(trainer, *, leaves=True):
    optimizer = adapter.optimizer_of(trainer)
    found = optimizer.fitted
    assert found is not None
    assert found.predicted.device_bytes <= found.limits.device
    assert found.loop.clips
    assert runtime_of(optimizer).watcher.stage is not Stage.WATCHING
    assert (optimizer.receipt().host_state_bytes > 0) == leaves
    return found


@engine("transformers Trainer", "device_peak")
@pytest.mark.parametrize("kind", PEAKS)
def test_the_bits_of_state_that_stays(kind):
    got = train(peak(kind))
    assert_same(got, reference())
    found = assert_decided(got, leaves=kind != "all")
    assert found.loop.micro_batches == 2
    assert adapter.optimizer_of(got).receipt().skipped_steps == 0


@engine("transformers Trainer", "device_peak")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_by_trainer_itself(reentrant):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": (("use_reentrant", reentrant),)}
    got = train(peak("some"), **options)
    assert_same(got, reference(**options))
    assert_decided(got)


@engine("transformers Trainer", "device_peak")
@pytest.mark.parametrize("seed", [0, 1])
def test_no_race_on_lazy_lanes(seed):
    got = train(peak("some"), seed=seed)
    assert_same(got, reference())
    assert_decided(got)


@engine("transformers Trainer", "device_peak")
def test_updates_in_backward_are_clipped_from_the_beginning():
    """The loop has been clipped by the optimizer before `fit()` knew that it would want that."""
    got = train(IN_BACKWARD)
    assert_same(got, reference())
    assert_decided(got)
    assert adapter.optimizer_of(got).receipt().speculation_hits > 0


def test_the_loop_allows_what_was_forbidden():
    got = train(peak("some", update_in_backward=False, overlap_forward=False, update_on_host=False))
    assert_same(got, reference())
    setting = assert_decided(got).setting
    assert not setting.update_in_backward
    assert not setting.overlap_forward
    assert adapter.optimizer_of(got).receipt().speculation_hits == 0


# Save and resume


class Stop(transformers.TrainerCallback):
    """The run ends after its first checkpoint, as if it had been killed then."""

    reads_weights = False

    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = True


@engine("transformers Trainer", "device_peak")
@pytest.mark.parametrize("kind", ["least", "some"])
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_killed_and_resumed(step, kind, tmp_path):
    """While `fit()` watches, at the switch, while it tries, and later."""
    options = {"save_strategy": "steps", "save_steps": step}
    killed = train(peak(kind), tmp_path, callbacks=[Stop()], **options)
    assert (adapter.optimizer_of(killed).fitted is None) == (step == 1)
    assert len([row for row in hf.logged(killed) if row]) == step
    got = train(peak(kind), tmp_path, resume=True, **options)
    assert_same(got, reference())
    assert_decided(got)


@pytest.mark.parametrize("kinds", [("fit", "off"), ("off", "fit")])
def test_a_checkpoint_is_trainers_own(kinds, tmp_path):
    settings = {"fit": peak("some"), "off": OFF}
    options = {"save_strategy": "steps", "save_steps": 7}
    train(settings[kinds[0]], tmp_path, callbacks=[Stop()], **options)
    assert_same(train(settings[kinds[1]], tmp_path, resume=True, **options), reference())


def test_a_plan_that_was_made_before():
    first = train(peak("least"))
    plan = adapter.optimizer_of(first).fitted
    again = train(peak("least", plan=plan.to_json()), max_steps=3)
    assert runtime_of(adapter.optimizer_of(again)).watcher.stage is Stage.TRYING
    assert adapter.optimizer_of(again).fitted.setting == plan.setting
    got = train(peak("least", plan=plan))
    assert_same(got, reference())


# What the trainer asks for meanwhile


def test_evaluation_and_a_callback_that_reads_weights():
    class Norms(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.seen.append(float(sum(param.detach().double().square().sum() for param in model.parameters())))

    runs, norms = [], []
    for settings in (OFF, peak("least")):
        norms.append(Norms())
        runs.append(train(settings, callbacks=[norms[-1]], eval_strategy="steps", eval_steps=1))
    assert_same(runs[1], runs[0])
    assert norms[1].seen == norms[0].seen
    assert len(norms[0].seen) == STEPS
    assert_decided(runs[1])


def test_a_callback_between_backward_and_step():
    """It may read weights there: `fit()` does not mix them."""

    class Between(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            model.lm_head.weight.grad.norm()

    got = train(peak("some"), callbacks=[Between()])
    assert_same(got, reference())
    assert not runtime_of(adapter.optimizer_of(got)).watcher.job.may_update_in_backward
    assert_decided(got)


def test_a_norm_that_nothing_is_clipped_by(caplog):
    caplog.set_level("INFO", "offstage")
    got, expected = train(IN_BACKWARD, max_grad_norm=0.0), reference(max_grad_norm=0.0)
    for left, right in zip(got.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert "grad_norm is not logged: with max_grad_norm=0, fit() may choose" in caplog.text
    assert not adapter.optimizer_of(got).fitted.loop.clips
    assert "fit: updates in backward" in caplog.text


def test_fitted_by_hand():
    runs = []
    for kind in ("off", "fit"):
        model = hf.make_model(num_hidden_layers=4, use_cache=False)
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made = offstage.fit(model, made, **IN_BACKWARD) if kind == "fit" else offstage.offload(made, model, **OFF)
        trainer = hf.make_trainer(tempfile.mkdtemp(), model=model, named={"optimizers": (made, None)}, **LOOP)
        adapter.bind(trainer)
        trainer.train()
        runs.append(trainer)
    assert_same(*reversed(runs))
    assert_decided(runs[1])
    assert adapter.optimizer_of(runs[1]).receipt().speculation_hits > 0


# TRL and PEFT


@pytest.fixture(autouse=True, scope="module")
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@functools.cache
def tokenizer():
    return hf.make_tokenizer()


def lora(model):
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def tune(settings, *, is_lora, seed=None, folder=None, resume=None, callbacks=(), **options):
    hf.reset()
    model = hf.make_model(num_hidden_layers=6)
    args = trl.SFTConfig(
        output_dir=str(folder or tempfile.mkdtemp(prefix="sft-")), max_length=16, **{**hf.QUIET, **LOOP, **options}
    )
    rows = datasets.Dataset.from_dict({"text": [hf.sentence(number, 9) for number in range(64)]})
    trainer = trl.SFTTrainer(
        lora(model) if is_lora else model,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )
    with lazily(seed):
        adapter.offload(trainer, **settings)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@functools.cache
def tuned(is_lora):
    return tune(OFF, is_lora=is_lora)


IN_STEP = {**SMALL, "update_on_host": False, "update_in_backward": False}
TUNED = {"TRL SFT": {**IN_STEP, "device_peak": "428KiB"}, "PEFT LoRA": {**IN_STEP, "device_peak": "300KiB"}}
"""A little less than with all weights on the device."""


@engine("TRL SFT", "device_peak")
@engine("PEFT LoRA", "device_peak")
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("kind", TUNED)
def test_fine_tuning(kind, seed):
    is_lora = kind == "PEFT LoRA"
    got = tune(TUNED[kind], is_lora=is_lora, seed=seed)
    assert_same(got, tuned(is_lora))
    assert assert_decided(got).setting.hosted > 0
    away = [name for name, param in got.model.named_parameters() if host_weight_of(param) is not None]
    assert any("lora" not in name for name in away)  # frozen ones, too


@engine("TRL SFT", "device_peak")
@engine("PEFT LoRA", "device_peak")
@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("kind", TUNED)
def test_fine_tuning_resumed(kind, step, tmp_path):
    settings, is_lora = TUNED[kind], kind == "PEFT LoRA"
    options = {"is_lora": is_lora, "folder": tmp_path, "save_strategy": "steps", "save_steps": step}
    tune(settings, callbacks=[Stop()], **options)
    got = tune(settings, resume=str(tmp_path / f"checkpoint-{step}"), **options)
    assert_same(got, tuned(is_lora))


# Refusals


def test_settings_that_fit_decides():
    for settings, name in (({"fraction": 0.5}, "fraction"), ({"weights": "host"}, "weights")):
        trainer = make()
        adapter.offload(trainer, **peak("some"), **settings)
        with pytest.raises(offstage.ConfigError, match=rf"fit\(\) decides {name} itself"):
            trainer.train()


def test_several_devices_are_refused_at_once(monkeypatch):
    trainer = make()
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    before = vars(trainer.accelerator).copy()
    with pytest.raises(offstage.ConfigError, match=r"decide for one device.*found num_processes=2"):
        adapter.offload(trainer, device_peak="24GiB")
    assert vars(trainer.accelerator) == before
    monkeypatch.undo()
    trainer.args._n_gpu = 2
    with pytest.raises(offstage.ConfigError, match=r"decide for one device.*found nn.DataParallel over 2 devices"):
        adapter.offload(trainer, device_peak="24GiB")


def test_a_compiled_model():
    trainer = make(torch_compile=True, torch_compile_backend="eager")
    with pytest.raises(offstage.ConfigError, match=r"layer by layer.*Leave the engine's torch_compile"):
        adapter.offload(trainer, **peak("some"))
    settings = Settings.of(None, peak("some"))
    model = torch.compile(hf.make_model(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(offstage.ConfigError, match=r"found a OptimizedModule compiled by torch.compile"):
        settings.take(optimizer, model)
    assert not hasattr(optimizer, "_offstage_consumed")  # it is as it was


def test_a_peak_that_is_too_small():
    trainer = make()
    adapter.offload(trainer, **{**SMALL, "device_peak": "100KiB"})
    with pytest.raises(offstage.ConfigError, match=r"device_peak=100\.0 KiB is not enough"):
        trainer.train()


def test_a_class_that_knows_parameters_only():
    named = {"optimizer_cls_and_kwargs": (offstage.optim.AdamW, {"lr": 1e-2, "device_peak": "24GiB"})}
    trainer = hf.make_trainer(tempfile.mkdtemp(), named=named)
    with pytest.raises(offstage.ConfigError, match=r"AdamW was given device_peak=24\.0 GiB.*offstage\.fit\(model, "):
        trainer.train()
