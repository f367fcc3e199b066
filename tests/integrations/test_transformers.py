# SPDX-License-Identifier: Apache-2.0
"""transformers' `Trainer`: the same run with us, with `fraction=0.0` and without us, to the same bits."""

import functools
import logging
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

import offstage
from offstage.integrations import transformers as adapter
from tests.support import hf
from tests.support.hf import FB, OFF, SMALL, B, F
from tests.support.training import lazily

engine = pytest.mark.engine
MODES = {"plain": SMALL, "forward": F, "backward": B, "both": FB, "weights on the host": {**FB, "weights": "host"}}
MAX_NORM = 1.5
"""Of the first steps' norms some are larger and some are not."""


@dataclass
class Trained:
    """What a run has left."""

    weights: dict[str, torch.Tensor]
    log: list[Any]
    receipt: Any = None
    trainer: Any = None


def train(settings, folder=None, *, resume=None, keep=False, **options):
    """`settings`: of `offload`, or `None` for `Trainer` as it is."""
    folder = folder or tempfile.mkdtemp(prefix="trainer-")
    trainer = hf.make_trainer(folder, **{"max_grad_norm": MAX_NORM, **options})
    if settings is not None:
        assert adapter.offload(trainer, **settings) is trainer
    trainer.train(resume_from_checkpoint=resume)
    weights = hf.weights_of(trainer.model)  # at once: a receipt waits for all updates
    receipt = adapter.optimizer_of(trainer).receipt() if settings is not None else None
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return Trained(weights, hf.logged(trainer), receipt, trainer)


@functools.cache
def reference(kind, **options):
    return train({"off": OFF, "plain": None}[kind], **options)


def assert_same(got, expected):
    for name, weight in expected.weights.items():
        assert torch.equal(got.weights[name], weight), name
    assert got.log == expected.log


def assert_off_the_device(receipt):
    assert receipt.total_bytes_fetched > 0
    assert receipt.host_state_bytes > 0
    assert receipt.net_saved_bytes > 0
    assert receipt.fallbacks == ()


@engine("transformers Trainer", "same bits", "accumulation", "clipping", "overlap_forward")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_state_that_stays(mode, micro_batches):
    """Weights, losses and norms in the log."""
    got = train(MODES[mode], gradient_accumulation_steps=micro_batches)
    assert_same(got, reference("off", gradient_accumulation_steps=micro_batches))
    assert_off_the_device(got.receipt)


@engine("transformers Trainer", "same bits")
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_trainer_without_us(mode):
    got = train({**MODES[mode], "rule": "torch"})
    assert_same(got, reference("plain"))
    assert_off_the_device(got.receipt)


OTHERS = {
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing, reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": (("use_reentrant", True),),
    },
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "another class": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "no clipping": {"max_grad_norm": 0.0},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "bf16": True},
}


@engine("transformers Trainer", "same bits")
@pytest.mark.parametrize("options", OTHERS)
def test_other_options_of_trainer(options):
    options = OTHERS[options]
    got, expected = train(FB, **options), reference("off", **options)
    if not options.get("max_grad_norm", 1.0):
        assert all(row.pop("grad_norm", None) is None for row in got.log)
        expected = Trained(expected.weights, [{"loss": row["loss"]} if row else {} for row in expected.log])
    assert_same(got, expected)
    assert got.receipt.total_bytes_fetched > 0


@engine("transformers Trainer", "update in backward, clipped")
def test_exact_clipping_hits_and_misses():
    receipt = train(FB).receipt
    norms = [row["grad_norm"] for row in reference("off").log[1:6]]
    misses = sum(norm > MAX_NORM for norm in norms)
    assert (receipt.speculation_hits, receipt.speculation_misses) == (5 - misses, misses)
    assert 0 < misses < 5


def test_a_norm_that_clips_nothing_costs_no_second_set(caplog):
    """With `max_grad_norm=0` Trainer wants the norm for its log only."""
    clipped, free = train(B).receipt, train(B, max_grad_norm=0.0).receipt
    assert clipped.host_state_bytes > 1.5 * free.host_state_bytes
    assert "grad_norm is not logged" in caplog.text


@engine("transformers Trainer", "activation offload")
def test_activations_that_leave():
    expected = reference("off")
    trainer = hf.make_trainer(tempfile.mkdtemp(), max_grad_norm=MAX_NORM)
    adapter.offload(trainer, **FB)
    handle = offstage.offload_activations(trainer.model, min_bytes=0)
    trainer.train()
    assert handle.receipt().total_bytes_returned > 0
    assert_same(Trained(hf.weights_of(trainer.model), hf.logged(trainer)), expected)


# Save and resume


class Stop(transformers.TrainerCallback):
    """The run ends after the checkpoint of step 3, as if it had been killed then."""

    reads_weights = False

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 3:
            control.should_training_stop = True


RESUMED = {
    "ours": ("off", FB, FB),
    "ours, on the host": ("off", F, {**SMALL, "update_on": "host"}),
    "ours to off": ("off", B, OFF),
    "plain to ours": ("plain", None, {**FB, "rule": "torch"}),
    "ours to plain": ("plain", {**F, "rule": "torch"}, None),
}


@engine("transformers Trainer", "save and resume")
@pytest.mark.parametrize("case", RESUMED)
def test_killed_and_resumed(case, tmp_path):
    kind, before, after = RESUMED[case]
    options = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine"}
    whole = reference(kind, lr_scheduler_type="cosine")
    killed = train(before, tmp_path, callbacks=[Stop()], keep=True, **options)
    assert len([row for row in killed.log if row]) == 3
    got = train(after, tmp_path, resume=True, keep=True, **options)
    assert_same(got, whole)


def test_a_checkpoint_is_loaded_to_the_host(tmp_path, monkeypatch):
    """On several ranks Trainer loads to each device; here that device could hold no value."""
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    train(SMALL, tmp_path, keep=True, **options)
    trainer = hf.make_trainer(tmp_path, **options)
    adapter.offload(trainer, **SMALL)
    trainer._prepare_for_training(3, trainer.get_train_dataloader(), None)
    monkeypatch.setattr(transformers.TrainingArguments, "device", torch.device("meta"))
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    trainer._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-3"))
    state = adapter.optimizer_of(trainer).state_dict()["state"]
    assert all(one["step"] == 3 and one["exp_avg_sq"].any() for one in state.values())
    assert trainer.args.device.type == "meta"  # it is the trainer's own again


# Optimizers that are made in other ways


MADE = {
    "class": {"optimizer_cls_and_kwargs": (offstage.optim.AdamW, {"lr": 1e-2, **SMALL})},
    "class, in backward": {"optimizer_cls_and_kwargs": (offstage.optim.AdamW, {"lr": 1e-2, **B})},
    "class, forward": {"optimizer_cls_and_kwargs": (offstage.optim.AdamW, {"lr": 1e-2, **FB})},
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("bound", [True, False])
def test_a_class_of_ours(made, bound):
    """`Trainer` makes it; settings that need nothing of the loop work without an adapter."""
    named = MADE[made]
    if not bound and made != "class":
        missing = {"class, in backward": "update_in_backward=True", "class, forward": r"attach\(model\)"}[made]
        with pytest.raises(offstage.OffstageError, match=missing):
            train(None, named=named)
        return
    trainer = hf.make_trainer(tempfile.mkdtemp(), max_grad_norm=MAX_NORM, named=named)
    if bound:
        adapter.bind(trainer)
    trainer.train()
    assert_same(Trained(hf.weights_of(trainer.model), hf.logged(trainer)), reference("off"))
    assert_off_the_device(adapter.optimizer_of(trainer).receipt())


@pytest.mark.parametrize("bound", [True, False])
def test_an_optimizer_that_was_offloaded_by_hand(bound):
    model = hf.make_model()
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **(FB if bound else F))
    trainer = hf.make_trainer(tempfile.mkdtemp(), model=model, named={"optimizers": (optimizer, None)})
    if bound:
        adapter.bind(trainer)
    trainer.train()
    optimizer.synchronize()
    off = hf.make_model()
    plain = offstage.offload(torch.optim.AdamW(off.parameters(), lr=1e-2), off, **OFF)
    other = hf.make_trainer(tempfile.mkdtemp(), model=off, named={"optimizers": (plain, None)})
    other.train()
    assert_same(Trained(hf.weights_of(model), hf.logged(trainer)), Trained(hf.weights_of(off), hf.logged(other)))


def test_an_optimizer_and_a_schedule_of_the_user():
    """Made before the trainer, and offloaded by it."""
    runs = []
    for settings in (OFF, FB):
        model = hf.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)
        trainer = hf.make_trainer(tempfile.mkdtemp(), model=model, named={"optimizers": (optimizer, schedule)})
        adapter.offload(trainer, **settings).train()
        assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**6
        runs.append(Trained(hf.weights_of(model), hf.logged(trainer)))
    assert_same(*runs)


def test_a_second_training_and_a_second_model():
    """`train()` twice goes on with the same optimizer; `model_init` makes new ones."""
    weights = []
    for settings in (OFF, FB):
        trainer = hf.make_trainer(tempfile.mkdtemp(), max_steps=2)
        adapter.offload(trainer, **settings)
        trainer.train()
        first = adapter.optimizer_of(trainer)
        trainer.train()
        assert adapter.optimizer_of(trainer) is first
        assert first.receipt().steps == 4
        weights.append(hf.weights_of(trainer.model))
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    hf.reset()
    trainer = transformers.Trainer(
        model_init=lambda: hf.make_model(),
        args=transformers.TrainingArguments(output_dir=tempfile.mkdtemp(), **{**hf.QUIET, "max_steps": 2}),
        train_dataset=hf.Tokens(),
    )
    adapter.offload(trainer, **FB)
    found = []
    for _ in range(2):
        trainer.train()
        found.append(adapter.optimizer_of(trainer))
        assert found[-1].receipt().steps == 2
    assert found[0] is not found[1]


def test_a_new_accelerator_is_bound_too():
    """A search over hyperparameters makes one for each trial."""
    trainer = hf.make_trainer(tempfile.mkdtemp(), max_grad_norm=MAX_NORM)
    adapter.offload(trainer, **FB)
    hf.reset()
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    assert adapter.optimizer_of(trainer).receipt().speculation_hits > 0


# Callbacks that read weights


class Average(transformers.TrainerCallback):
    """Reads the weights after every step, in the way of an average of weights."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(torch.cat([param.detach().flatten().clone() for param in model.parameters()]))


class CarelessAverage(Average):
    reads_weights = False


def seen_by(callback, settings, seed=None):
    with lazily(seed):
        got = train(settings, callbacks=[callback], eval_strategy="steps", eval_steps=3)
    return got, torch.stack(callback.seen)


@engine("transformers Trainer", "lazy lanes")
@pytest.mark.parametrize("mode", ["forward", "both"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_race_and_no_old_weight_on_lazy_lanes(seed, mode, caplog):
    """Callbacks see the new weights, and so does what reads `parameters()` after training."""
    expected, old = seen_by(Average(), OFF)
    got, seen = seen_by(Average(), MODES[mode], seed)
    assert torch.equal(old, seen)
    assert_same(got, expected)
    assert "because the callback Average has on_step_end()" in caplog.text


def test_callbacks_of_transformers_do_not_wait(caplog):
    trainer = train(F, disable_tqdm=False).trainer
    assert "every step waits" not in caplog.text
    assert {type(one).__name__ for one in trainer.callback_handler.callbacks} >= {"ProgressCallback"}


@engine("transformers Trainer", "lazy lanes")
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_are_new_when_training_has_ended(seed):
    with lazily(seed):
        got = train(FB)
    assert_same(got, reference("off"))


@engine("transformers Trainer", "lazy lanes")
@pytest.mark.parametrize("seed", [0, 1])
def test_saving_and_the_best_model_on_lazy_lanes(seed, tmp_path):
    options = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
    expected = train(OFF, tmp_path / "off", **options)
    with lazily(seed):
        got = train(FB, tmp_path / "ours", **options)
    assert_same(got, expected)


# Refused, or said


class Between(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass


class HarmlessBetween(Between):
    reads_weights = False


def refused(match, make):
    with pytest.raises(offstage.ConfigError, match=match):
        make()


def test_what_is_refused():
    make = functools.partial(hf.make_trainer, tempfile.mkdtemp(), max_steps=1)
    refused("expects a transformers.Trainer; found Linear", lambda: adapter.offload(torch.nn.Linear(1, 1)))
    trainer = adapter.offload(make())
    refused("already; expected one call", lambda: adapter.offload(trainer))
    refused("found NoneType", lambda: adapter.optimizer_of(trainer))
    refused("auto_find_batch_size=False", lambda: adapter.offload(make(auto_find_batch_size=True), **B))
    refused("such as TRL's GRPOTrainer", lambda: adapter.offload(make(), sleep_while_generating=True))
    named = MADE["class"]
    refused("expected them in one place", adapter.offload(make(named=named), fraction=0.5).train)
    refused("Between has on_pre_optimizer_step", adapter.offload(make(callbacks=[Between()]), **B).train)
    adapter.offload(make(callbacks=[Between()]), **F).train()
    adapter.offload(make(callbacks=[HarmlessBetween()]), **B).train()


def test_settings_without_effect_are_said(caplog):
    """The window is not used where nothing streams."""
    caplog.set_level(logging.WARNING, logger="offstage")
    receipt = train({**SMALL, "update_on": "host", "window": "all"}).receipt
    assert "the window is not used" in caplog.text
    assert any("the window is not used" in text for text in receipt.fallbacks)


# Ranks


def sharded():
    hf.fsdp_on_the_cpu()
    config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "reshard_after_forward": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    return {"fsdp": True, "fsdp_config": config}


def on_ranks(kind, modes, folder):
    """The differences of each mode, and what a refusal says."""

    def run(settings, name="none", **more):
        options = sharded() if kind == "FSDP2" else {}
        options |= {"max_grad_norm": MAX_NORM, "max_steps": 4, "gradient_accumulation_steps": 2}
        model = hf.make_model(tie_word_embeddings=False)
        resume = more.pop("resume", None)
        trainer = hf.make_trainer(f"{folder}/{name}", model=model, **{**options, **more})
        if settings is not None:
            adapter.offload(trainer, **settings)
        trainer.train(resume_from_checkpoint=resume)
        weights = {n: getattr(p, "full_tensor", p.clone)().detach() for n, p in trainer.model.named_parameters()}
        receipt = adapter.optimizer_of(trainer).receipt() if settings is not None else None
        return Trained(weights, hf.logged(trainer), receipt)

    def differs(got, expected):
        found = [name for name, weight in got.weights.items() if not torch.equal(weight, expected.weights[name])]
        return found + ([] if got.log == expected.log else [(got.log, expected.log)])

    off, plain, found = run(OFF), run(None), {"moved": True}
    for name, mode in modes.items():
        for expected, settings in ((off, mode), (plain, {**mode, "rule": "torch"})):
            got = run(settings)
            found[f"{name}, {settings.get('rule')}"] = differs(got, expected)
            found["moved"] = found["moved"] and got.receipt.total_bytes_fetched > 0
    saving = {"save_strategy": "steps", "save_steps": 2}
    run(SMALL, "saved", callbacks=[StopAt2()], **saving)
    found["resumed"] = differs(run(F, "saved", resume=True, **saving), off)
    if kind == "DDP":
        try:
            run(FB)
        except offstage.ConfigError as error:
            found["refused"] = str(error)
    return found


class StopAt2(transformers.TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = True


@engine("transformers Trainer", "DDP", "save and resume")
def test_ddp(ranks, tmp_path):
    for found in ranks.run(2, on_ranks, "DDP", {"plain": SMALL, "forward": F}, str(tmp_path)):
        assert "Expected one rank or FSDP2" in found.pop("refused")
        assert found.pop("moved")
        assert {name: differs for name, differs in found.items() if differs} == {}


@engine("transformers Trainer", "FSDP2", "save and resume")
def test_fsdp2(ranks, tmp_path):
    for found in ranks.run(2, on_ranks, "FSDP2", {"plain": SMALL, "both": FB}, str(tmp_path)):
        assert found.pop("moved")
        assert {name: differs for name, differs in found.items() if differs} == {}
