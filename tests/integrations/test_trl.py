# SPDX-License-Identifier: Apache-2.0
"""TRL's SFT, DPO and GRPO trainers and PEFT's LoRA: the same run with us and without us, to the same bits."""

import copy
import functools
import tempfile

import accelerate
import datasets
import peft
import pytest
import torch
import transformers
import trl

import offstage
from offstage.integrations import accelerate as accelerate_adapter
from offstage.integrations import transformers as adapter
from offstage.optimizer.optimizer import runtime_of
from tests.support import hf
from tests.support.hf import FB, OFF, SMALL, F
from tests.support.training import lazily

engine = pytest.mark.engine
STEPS = 4
MODES = {"plain": SMALL, "forward": F, "both": FB}


@pytest.fixture(autouse=True, scope="module")
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@functools.cache
def tokenizer():
    return hf.make_tokenizer()


def sft(folder, model=None, **options):
    args = trl.SFTConfig(output_dir=folder, max_length=16, **{**hf.QUIET, "max_steps": STEPS, **options})
    rows = datasets.Dataset.from_dict({"text": [hf.sentence(number, 9) for number in range(16)]})
    return trl.SFTTrainer(model or hf.make_model(), args=args, train_dataset=rows, processing_class=tokenizer())


def dpo(folder, model=None, **options):
    args = trl.DPOConfig(output_dir=folder, max_length=16, **{**hf.QUIET, "max_steps": STEPS, **options})
    rows = {
        "prompt": [hf.sentence(number, 4) for number in range(16)],
        "chosen": [" " + hf.sentence(2 * number, 4) for number in range(16)],
        "rejected": [" " + hf.sentence(3 * number + 1, 4) for number in range(16)],
    }
    model = model or hf.make_model()
    return trl.DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=args,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer(),
    )


def reward(completions, **_):
    return [sum(0.1 * (len(word) - 2) for word in completion.split()) for completion in completions]


class Watched(trl.GRPOTrainer):
    """Looks at the optimizer while it generates."""

    def _generate_single_turn(self, *args, **kwargs):
        found = accelerate_adapter.within(self.optimizer)
        if isinstance(found, offstage.OffloadedOptimizer):
            device = runtime_of(found).device_state_bytes(torch.device("cpu"))
            self.seen = [*getattr(self, "seen", ()), (offstage.asleep(found), device)]
        return super()._generate_single_turn(*args, **kwargs)


def grpo(folder, model=None, rollout_func=None, **options):
    options = {**hf.QUIET, "max_steps": STEPS, "per_device_train_batch_size": 4, **options}
    args = trl.GRPOConfig(output_dir=folder, num_generations=4, max_completion_length=6, **options)
    rows = datasets.Dataset.from_dict({"prompt": [hf.sentence(number) for number in range(16)]})
    return Watched(
        model or hf.make_model(),
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer(),
        rollout_func=rollout_func,
    )


TRAINERS = {"SFT": sft, "DPO": dpo, "GRPO": grpo}


def train(kind, settings, *, seed=None, sleeps=False, folder=None, resume=None, **options):
    """`settings`: of `offload`, or `None` for TRL as it is."""
    hf.reset()
    trainer = TRAINERS[kind](str(folder or tempfile.mkdtemp(prefix="trl-")), **options)
    with lazily(seed):
        if settings is not None:
            adapter.offload(trainer, sleep_while_generating=sleeps, **settings)
        trainer.train(resume_from_checkpoint=resume)
        if settings is not None and settings is not OFF:
            assert adapter.optimizer_of(trainer).receipt().total_bytes_fetched > 0
    return trainer


@functools.cache
def reference(kind, which, **options):
    return train(kind, {"off": OFF, "plain": None}[which], **options)


def assert_same(got, expected):
    for (name, left), (_, right) in zip(got.model.named_parameters(), expected.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert hf.logged(got) == hf.logged(expected)


each_trainer = pytest.mark.parametrize("kind", TRAINERS)


@engine("TRL SFT", "same bits", "clipping", "overlap_forward", "accumulation")
@engine("TRL DPO", "same bits", "clipping", "overlap_forward", "accumulation")
@engine("TRL GRPO", "same bits", "clipping", "overlap_forward", "accumulation")
@each_trainer
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_state_that_stays(kind, mode):
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 1e-3}
    expected = reference(kind, "off", **options)
    assert_same(train(kind, MODES[mode], **options), expected)
    assert max(row["grad_norm"] for row in hf.logged(expected) if row) > 1e-3


@engine("TRL SFT", "same bits")
@engine("TRL DPO", "same bits")
@engine("TRL GRPO", "same bits")
@each_trainer
def test_the_bits_of_trl_without_us(kind):
    assert_same(train(kind, {**FB, "rule": "torch"}), reference(kind, "plain"))


@engine("TRL SFT", "update in backward, clipped")
@engine("TRL DPO", "update in backward, clipped")
@engine("TRL GRPO", "update in backward, clipped")
@each_trainer
def test_exact_clipping_hits_and_misses(kind):
    """A bound in the middle of the norms that come."""
    norms = sorted(row["grad_norm"] for row in hf.logged(reference(kind, "off", max_grad_norm=1e9)) if row)
    bound = sum(norms[1:3]) / 2
    got = train(kind, FB, max_grad_norm=bound)
    assert_same(got, reference(kind, "off", max_grad_norm=bound))
    receipt = adapter.optimizer_of(got).receipt()
    assert receipt.speculation_hits + receipt.speculation_misses == STEPS - 1
    assert receipt.speculation_misses > 0


@engine("TRL SFT", "lazy lanes")
@engine("TRL DPO", "lazy lanes")
@engine("TRL GRPO", "lazy lanes")
@each_trainer
@pytest.mark.parametrize("seed", [0, 1])
def test_no_race_on_lazy_lanes(kind, seed):
    assert_same(train(kind, FB, seed=seed), reference(kind, "off"))


@engine("TRL SFT", "save and resume")
@engine("TRL DPO", "save and resume")
@engine("TRL GRPO", "save and resume")
@each_trainer
def test_killed_and_resumed(kind, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    resumed = []
    for name, settings in (("off", OFF), ("ours", FB)):
        killed = train(kind, settings, folder=tmp_path / name, **options)
        resumed.append(
            train(kind, settings, folder=tmp_path / name, resume=str(tmp_path / name / "checkpoint-2"), **options)
        )
        assert_same(resumed[-1], killed)
    assert_same(*resumed)


@engine("TRL SFT", "overlap_forward", "lazy lanes")
@engine("TRL DPO", "overlap_forward", "lazy lanes")
@engine("TRL GRPO", "overlap_forward", "lazy lanes")
@each_trainer
@pytest.mark.parametrize("seed", [None, 0])
def test_a_head_of_its_own(kind, seed):
    """TRL's losses read the head's weight outside its forward; a generation runs that forward, without gradients."""
    options = {"num_iterations": 2} if kind == "GRPO" else {}
    runs = [
        train(kind, settings, seed=lanes, model=hf.make_model(tie_word_embeddings=False), **options)
        for settings, lanes in ((OFF, None), (FB, seed))
    ]
    assert_same(*runs)


# Weights that a callback reads


@engine("TRL DPO", "lazy lanes", "overlap_forward")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reference_model_gets_new_weights(seed, caplog):
    """TRL's `SyncRefModelCallback` reads every weight after the steps that it names, and only then is waited for."""
    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    expected = reference("DPO", "off", **options)
    got = train("DPO", F, seed=seed, **options)
    assert_same(got, expected)
    for left, right in zip(got.ref_model.parameters(), expected.ref_model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert "every step waits" not in caplog.text


# Generation


@engine("TRL GRPO", "sleep and wake", "same bits")
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("mode", ["half", "both"])
def test_state_sleeps_while_the_trainer_generates(mode, seed):
    """Two optimizer steps for each generation, and forwards without gradients in between."""
    settings = {"half": {**SMALL, "fraction": 0.5}, "both": FB}[mode]
    options = {"num_iterations": 2, "max_steps": 6, "gradient_accumulation_steps": 2}
    got = train("GRPO", settings, seed=seed, sleeps=True, **options)
    assert_same(got, reference("GRPO", "off", **options))
    assert got.seen == [(True, 0)] * 3
    optimizer = adapter.optimizer_of(got)
    assert not offstage.asleep(optimizer)
    assert optimizer.receipt().device_state_bytes > 0
    awake = reference("GRPO", "off", **options).seen
    assert [asleep for asleep, _ in awake] == [False] * 3


def rolled_out(engine, prompts, trainer):
    """Another model generates, and has the device for itself."""
    engine.load_state_dict(trainer.model.state_dict())
    optimizer = accelerate_adapter.within(trainer.optimizer)
    with offstage.sleep(trainer.model, optimizer):
        assert offstage.asleep(trainer.model, optimizer)
        assert not any(param.untyped_storage().nbytes() for param in trainer.model.parameters())
        tokens = torch.tensor([tokenizer()(prompt)["input_ids"] for prompt in prompts])
        made = engine.generate(tokens, max_new_tokens=6, do_sample=True, pad_token_id=0)
    return {
        "prompt_ids": tokens.tolist(),
        "completion_ids": made[:, tokens.shape[1] :].tolist(),
        "logprobs": None,
    }


@engine("TRL GRPO", "sleep and wake")
@pytest.mark.parametrize("sleeps", [False, True])
def test_the_whole_trainer_sleeps_while_another_model_generates(sleeps, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    runs = []
    for settings in (OFF, FB):
        rollout = functools.partial(rolled_out, hf.make_model(seed=7).eval())
        runs.append(train("GRPO", settings, sleeps=sleeps, rollout_func=rollout))
    assert_same(*runs)


class Colocated:
    """Stands in for TRL's `VLLMGeneration` on one device, which needs a GPU: a copy of the model generates.

    Its weights are gone after every generation, as at vLLM's sleep level 2.
    """

    mode, enable_sleep_mode, _llm_weights_sleeping = "colocate", True, True

    def __init__(self, trainer):
        self.trainer, self.engine, self.seen = trainer, hf.make_model(seed=7).eval(), []

    def sync_weights(self):
        self._look("sync")
        for copied, param in zip(self.engine.parameters(), self.trainer.model.parameters(), strict=True):
            copied.data.copy_(param.data)
        self._llm_weights_sleeping = False

    def generate(self, prompts, **_):
        if self._llm_weights_sleeping:
            self.sync_weights()
        self._look("generate")
        tokens = torch.tensor(prompts)
        made = self.engine.generate(tokens, max_new_tokens=6, do_sample=True, pad_token_id=0)
        self._llm_weights_sleeping = True
        completions = made[:, tokens.shape[1] :].tolist()
        return prompts, completions, [[[-1.0] for _ in one] for one in completions], None

    def _look(self, what):
        optimizer = accelerate_adapter.within(self.trainer.optimizer)
        self.seen.append((what, offstage.asleep(optimizer), offstage.asleep(self.trainer.model)))


def with_vllm(settings, *, sleeps=False, seed=None):
    hf.reset()
    trainer = grpo(tempfile.mkdtemp(), vllm_importance_sampling_correction=False)
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Colocated(trainer), -1
    with lazily(seed):
        adapter.offload(trainer, sleep_while_generating=sleeps, **settings)
        trainer.train()
    return trainer


@pytest.mark.parametrize("seed", [None, 0])
def test_weights_sleep_while_vllm_generates_on_the_same_device(seed):
    """State leaves before the weights are copied to it, weights after that, and all is back for the next step."""
    got, expected = with_vllm(FB, sleeps=True, seed=seed), with_vllm(OFF)
    assert_same(got, expected)
    assert got.vllm_generation.seen == [("sync", True, False), ("generate", True, True)] * STEPS
    assert {what[1:] for what in expected.vllm_generation.seen} == {(False, False)}


@pytest.mark.parametrize("seed", [0, 1])
def test_vllm_gets_new_weights(seed):
    """It reads them outside any forward, with `overlap_forward` too."""
    assert_same(with_vllm(F, seed=seed), with_vllm(OFF))


# LoRA


def with_adapters(rank=8, dtype=torch.float32):
    torch.manual_seed(4)
    config = peft.LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    base = hf.make_model(dtype=dtype)
    torch.manual_seed(4)
    return peft.get_peft_model(base, config)


@engine("PEFT LoRA", "same bits", "accumulation", "clipping", "overlap_forward")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 base", "bf16 base"])
@pytest.mark.parametrize("mode", MODES)
def test_lora(mode, dtype):
    """Adapters train, the base stays frozen, and only adapters have state."""
    runs = [
        train("SFT", settings, model=with_adapters(dtype=dtype), gradient_accumulation_steps=2, max_grad_norm=1e-3)
        for settings in (OFF, MODES[mode])
    ]
    assert_same(*runs)
    assert max(row["grad_norm"] for row in hf.logged(runs[0]) if row) > 1e-3
    receipt = adapter.optimizer_of(runs[1]).receipt()
    state = sum(8 * param.numel() for param in runs[1].model.parameters() if param.requires_grad)
    assert 0 < receipt.net_saved_bytes < state
    assert state <= receipt.host_state_bytes / (2 if mode == "both" else 1) < 1.2 * state + 2**14


@engine("PEFT LoRA", "update in backward, clipped", "lazy lanes")
@pytest.mark.parametrize("seed", [0, 1])
def test_lora_on_lazy_lanes(seed):
    options = {"max_grad_norm": 0.05, "max_steps": 6}
    runs = [train("SFT", OFF, model=with_adapters(), **options)]
    runs.append(train("SFT", FB, model=with_adapters(), seed=seed, **options))
    assert_same(*runs)
    assert adapter.optimizer_of(runs[1]).receipt().speculation_misses > 0


@engine("PEFT LoRA", "save and resume")
def test_lora_killed_and_resumed(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = train("SFT", FB, model=with_adapters(), folder=tmp_path, **options)
    resumed = train("SFT", FB, model=with_adapters(), folder=tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    assert_same(resumed, whole)
    assert_same(whole, train("SFT", OFF, model=with_adapters()))


def test_adapters_too_small_to_save_anything():
    """All of their state is smaller than what would be kept resident anyway."""
    with pytest.raises(offstage.OffloadIneffectiveError):
        train("SFT", {"fraction": 1.0}, model=with_adapters(rank=1))


def test_frozen_weights_given_to_the_optimizer_take_no_memory():
    """Loops of accelerate often give `model.parameters()`, the frozen base included."""
    hf.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    binding = accelerate_adapter.offload(accelerator, **FB)
    model = with_adapters()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    tokens = torch.stack([hf.Tokens()[number]["input_ids"] for number in range(4)])
    for _ in range(3):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    receipt = binding.optimizers[0].receipt()
    state = sum(8 * param.numel() for param in model.parameters() if param.requires_grad)
    assert receipt.speculation_hits == 2
    assert receipt.host_state_bytes / 2 < 1.2 * state + 2**14
    assert receipt.net_saved_bytes > 0


def test_trainers_that_do_not_generate_do_not_sleep():
    hf.reset()
    with pytest.raises(offstage.ConfigError, match="a trainer that generates"):
        adapter.offload(sft(tempfile.mkdtemp()), sleep_while_generating=True)
    assert issubclass(trl.GRPOTrainer, transformers.Trainer)
