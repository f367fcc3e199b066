# SPDX-License-Identifier: Apache-2.0
"""Settings of a run: from TOML, from a command line and from Python they mean the same, and mistakes are named."""

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch

from offstage import OffloadConfig
from offstage.config import descriptions
from offstage.errors import ConfigError
from offstage.train.config import (
    SECTIONS,
    ActivationSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RunSettings,
    SizeName,
    TrainConfig,
    build,
    load_config,
    read_toml,
    resolved,
    to_toml,
)
from offstage.train.fit_settings import passed_on
from offstage.train.settings import check, expected, field_types, from_text, nearest

# For every flag: words for it, what they come to, and what else has to be said with them.
SAMPLES = {
    "model.size": (["150M"], "150M"),
    "model.transformers": (["llama"], "llama"),
    "model.weights": (["llama-1b/"], "llama-1b/"),
    "model.layers": (["3"], 3),
    "model.width": (["64"], 64),
    "model.heads": (["2"], 2),
    "model.kv_heads": (["1"], 1),
    "model.hidden": (["96"], 96),
    "model.experts": (["4"], 4),
    "model.experts_per_token": (["2"], 2),
    "model.dtype": (["bfloat16"], "bfloat16"),
    "model.compile": ([], True),
    "lora.rank": (["8"], 8),
    "lora.alpha": (["16", "--lora.rank", "8"], 16.0),
    "lora.targets": (["q_proj", "v_proj", "--lora.rank", "8"], ("q_proj", "v_proj")),
    "data.paths": (["a.txt", "b"], ("a.txt", "b")),
    "data.column": (["text", "--data.paths", "a.jsonl"], "text"),
    "data.tokenizer": (["folder"], "folder"),
    "data.eos_token": (["</s>", "--data.tokenizer", "folder"], "</s>"),
    "data.sequence": (["128"], 128),
    "data.batch": (["2"], 2),
    "data.micro_batches": (["4"], 4),
    "data.eval_share": (["0.1"], 0.1),
    "optimizer.lr": (["3e-4"], 3e-4),
    "optimizer.betas": (["0.8", "0.9"], (0.8, 0.9)),
    "optimizer.eps": (["1e-6"], 1e-6),
    "optimizer.weight_decay": (["0"], 0.0),
    "optimizer.clip": (["0"], 0.0),
    "optimizer.warm_up": (["5"], 5),
    "optimizer.last_lr_share": (["1"], 1.0),
    "offload.fraction": (["0.5"], 0.5),
    "offload.device_budget": (["8GiB"], 8 << 30),
    "offload.device_peak": (["40GiB", "--offload.window", "auto"], 40 << 30),
    "offload.host_budget": (["123456"], 123456),
    "offload.min_bytes": (["0"], 0),
    "offload.weights": (["host"], "host"),
    "offload.update_on": (["auto"], "auto"),
    "offload.host_fraction": (["0.25"], 0.25),
    "offload.threads": (["2", "--offload.update-on", "host"], 2),
    "offload.rule": (["torch"], "torch"),
    "offload.window": (["all"], "all"),
    "offload.overlap_forward": (["true"], True),
    "offload.update_in_backward": (["on"], True),
    "offload.master_weights": (["none"], "none"),
    "offload.state_dtype": (["exp_avg=bfloat16,exp_avg_sq=float32"], {"exp_avg": "bfloat16", "exp_avg_sq": "float32"}),
    "offload.chunk_bytes": (["2MiB"], 2 << 20),
    "offload.slots": (["4"], 4),
    "offload.pin_memory": (["false"], False),
    "activations.mode": (["checkpoint_and_offload"], "checkpoint_and_offload"),
    "activations.fraction": (["0.5", "--activations.mode", "offload"], 0.5),
    "parallel.fsdp": (["false"], False),
    "parallel.stages": (["2", "--data.micro-batches", "2"], 2),
    "parallel.schedule": (["GPipe", "--parallel.stages", "2", "--data.micro-batches", "2"], "GPipe"),
    "run.folder": (["elsewhere"], "elsewhere"),
    "run.steps": (["7"], 7),
    "run.seed": (["1"], 1),
    "run.device": (["cpu"], "cpu"),
    "run.resume": (["no"], False),
    "run.fallback": (["true"], True),
    "run.save_every": (["0"], 0),
    "run.save_last": (["false"], False),
    "run.keep_checkpoints": (["1"], 1),
    "run.asynchronous_saves": (["false"], False),
    "run.eval_every": (["0"], 0),
    "run.eval_batches": (["1"], 1),
    "run.sample_every": (["10"], 10),
    "run.sample_bytes": (["50"], 50),
    "run.not_finite": (["stop"], "stop"),
    "run.most_not_finite": (["3"], 3),
    "run.progress": (["json"], "json"),
    "run.track": (["wandb", "tensorboard"], ("wandb", "tensorboard")),
    "run.tensorboard": (["true"], True),
    "run.observe_step": (["0"], 0),
    "run.memory_snapshot": (["true"], True),
    "run.deterministic": (["false"], False),
}
FLAGS = [f"{section}.{name}" for section, cls in SECTIONS.items() if section for name in field_types(cls)]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def value(config: TrainConfig, flag: str) -> object:
    section, name = flag.split(".")
    return getattr(getattr(config, section), name)


# Flags #


@pytest.mark.parametrize("flag", FLAGS)
def test_every_setting_has_a_flag(flag):
    words, found = SAMPLES[flag]
    assert value(TrainConfig(), flag) != found, "a sample that is the default shows nothing"
    config = load_config(None, [f"--{flag.replace('_', '-')}", *words])
    assert value(config, flag) == found
    assert type(value(config, flag)) is type(found)


@pytest.mark.parametrize(("name", "size"), [("device_peak", 24 * 2**30), ("host_budget", 90 * 2**30)])
def test_limits_are_above_all_sections(name, size, tmp_path):
    """As flags without a prefix, and in a file before the first table."""
    words = ["--device-peak", "24GiB", "--host-budget=90GiB"]
    config = load_config(None, words)
    assert getattr(config.fit, name) == size
    assert to_toml(config).startswith('device_peak = "24GiB"\nhost_budget = "90GiB"\n\n[model]')
    assert load_config(written(tmp_path, to_toml(config)), []) == config
    assert load_config(written(tmp_path, to_toml(config)), [f"--{name.replace('_', '-')}=7TiB"]).fit != config.fit
    assert len(descriptions(SECTIONS[""])[name]) > 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--device-peak=0", "device_peak expects more than 0 bytes; found 0"),
        ("--device-peak=lots", "device_peak expects a number of bytes or a size such as '8GiB'"),
        ("--host-budget=1GiB", "host_budget=1GiB is a limit beside device_peak; found no device_peak"),
        ("--device-peak=1GiB --offload.fraction=0.5", "contradicts offload.fraction=0.5. Leave that out"),
        ("--device-peak=1GiB --offload.weights=host", "contradicts offload.weights='host'"),
        ("--device-peak=1GiB --offload.window=all", "contradicts offload.window='all'"),
        ("--device-peak=1GiB --offload.host-budget=1GiB", "for the host's memory use host_budget"),
        (
            "--device-peak=1GiB --offload.overlap-forward --offload.update-in-backward --offload.update-on=auto",
            "contradicts offload.update_on='auto', offload.overlap_forward=True, offload.update_in_backward=True",
        ),
        ("--device-peak=1GiB --activations.mode=checkpoint", "contradicts activations.mode='checkpoint'"),
        ("--device-peak=1GiB --parallel.stages=2 --data.micro-batches=2", "one process.*found parallel.stages=2"),
        ("--device-peak=1GiB --parallel.fsdp=true", "one process.*found parallel.fsdp=true"),
        ("--activations.mode=auto", "found 'auto'. Use --device-peak"),
        ("--offload.device-peak=1GiB", "Use --device-peak"),
    ],
)
def test_what_contradicts_a_limit(words, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, words.split())


def test_formats_go_with_a_limit():
    words = "--device-peak=1GiB --offload.master-weights=split --offload.state-dtype=bfloat16 --offload.min-bytes=0"
    assert passed_on(load_config(None, words.split()).offload) == {
        "master_weights": "split",
        "state_dtype": "bfloat16",
        "min_bytes": 0,
    }


def test_flags_may_have_underscores():
    assert load_config(None, ["--run.save_every", "3", "--data.micro_batches=4"]) == TrainConfig(
        run=RunSettings(save_every=3), data=DataSettings(micro_batches=4)
    )


def test_every_setting_survives_toml(tmp_path):
    needs = {
        "activations.fraction": {"mode": "offload"},
        "lora.alpha": {"rank": 8},
        "lora.targets": {"rank": 8},
        "data.column": {"paths": ("a.jsonl",)},
        "data.eos_token": {"tokenizer": "folder"},
        "offload.threads": {"update_on": "host"},
        "offload.device_peak": {"window": "auto"},
    }
    for flag, (_, found) in SAMPLES.items():
        section, name = flag.split(".")
        values = {section: {name: found, **needs.get(flag, {})}}
        if section == "parallel":
            values |= {"data": {"micro_batches": 2}, section: {"stages": 2, name: found}}
        config = build(values)
        assert value(config, flag) == found
        assert load_config(written(tmp_path, to_toml(config)), []) == config


def test_defaults_survive_toml(tmp_path):
    assert load_config(None, []) == TrainConfig()
    assert load_config(written(tmp_path, to_toml(TrainConfig())), []) == TrainConfig()


def test_strange_texts_survive_toml(tmp_path):
    paths = ('a "quoted" \\ path', "tab\tand\nline", "ünïcödé 🎭", "\x7f")
    config = TrainConfig(data=DataSettings(paths=paths), run=RunSettings(folder="it's #1"))
    assert load_config(written(tmp_path, to_toml(config)), []) == config


def test_what_toml_cannot_say_is_a_default():
    """TOML has no null: `to_toml` leaves `None` out, which is right only where it is the default."""
    for section, cls in SECTIONS.items():
        for one in dataclasses.fields(cls):
            if type(None) in get_args(field_types(cls)[one.name]):
                assert one.default is None, f"{section}.{one.name}"


@pytest.mark.parametrize("flag", FLAGS)
def test_every_setting_says_what_it_is(flag):
    section, name = flag.split(".")
    assert len(descriptions(SECTIONS[section])[name]) > 10


def test_flags_go_over_the_file_and_the_file_over_defaults(tmp_path):
    path = written(tmp_path, '[run]\nsteps = 10\nseed = 3\n[offload]\ndevice_budget = "1GiB"\n[optimizer]\nlr = 1\n')
    config = load_config(path, ["--run.steps", "20", "--offload.device-budget", "none"])
    assert (config.run.steps, config.run.seed, config.run.save_every) == (20, 3, 100)
    assert config.offload.device_budget is None
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)


def test_file_and_flags_are_checked_together(tmp_path):
    """A file that needs a flag is not refused before the flag was heard."""
    path = written(tmp_path, '[offload]\nwindow = "auto"\n')
    assert load_config(path, ["--offload.device-peak=8GiB"]).offload.window == "auto"
    with pytest.raises(ConfigError, match="device_peak"):
        load_config(path, [])


def test_the_last_of_two_counts():
    assert load_config(None, ["--run.steps=1", "--run.steps=2"]).run.steps == 2


def test_sizes_are_those_of_the_model():
    from offstage.train.model import SIZES

    assert get_args(SizeName) == tuple(SIZES)


# Mistakes #

MISTAKES = {
    "a letter missing": (["--run.stps", "5"], "no flag --run.stps. Did you mean --run.steps?"),
    "no section": (["--steps", "5"], "Did you mean --run.steps?"),
    "another section": (["--model.steps", "5"], "Did you mean --run.steps?"),
    "two sections have it": (["--fraction", "1"], "--offload.fraction or --activations.fraction"),
    "nothing like it": (["--zzz"], "See offstage train --help"),
    "not a number": (["--run.steps", "many"], "--run.steps expects a whole number; found 'many'"),
    "not a whole number": (["--run.steps", "1.5"], "--run.steps expects a whole number; found '1.5'"),
    "a choice misspelt": (["--model.dtype", "bfloat"], "Did you mean 'bfloat16'?"),
    "a size misspelt": (["--model.size", "2.7"], "Did you mean '2.7B'?"),
    "bytes misspelt": (["--offload.device-budget", "8 gigs"], "a size such as '8GiB'"),
    "no value": (["--run.steps"], "--run.steps expects 1 value after it; found 0"),
    "one value of two": (["--optimizer.betas", "0.9"], "--optimizer.betas expects 2 values after it; found 1"),
    "a value too many": (["--run.steps", "5", "6"], "found '6'"),
    "a word first": (["quickly"], "found 'quickly'"),
    "not true or false": (["--model.compile", "maybe"], "found 'maybe'"),
    "negative": (["--optimizer.lr", "-1"], "optimizer.lr expects a number of at least 0; found -1.0"),
    "not finite": (["--optimizer.lr", "nan"], "optimizer.lr expects a number of at least 0; found nan"),
    "no steps": (["--run.steps", "0"], "run.steps expects a whole number of at least 1; found 0"),
    "all data held out": (["--data.eval-share", "1"], "data.eval_share expects a share"),
    "betas of one": (["--optimizer.betas", "1", "1"], "optimizer.betas expects two numbers from 0.0 to less than 1.0"),
    "a share above one": (["--offload.fraction", "2"], "offload: fraction expects a number from 0.0 to 1.0"),
    "no such device": (["--run.device", "gpu"], "run.device expects auto or a device of torch"),
    "no such tracker": (
        ["--run.track", "tensorbord"],
        "--run.track expects a list, each one of 'tensorboard', 'wandb'",
    ),
    "a column of nothing": (
        ["--data.column", "text"],
        "data.column='text' names a column of data.paths; found no paths",
    ),
    "the end of no tokenizer": (["--data.eos-token", "x"], "is a token of data.tokenizer; found no tokenizer"),
    "a scale of nothing": (["--lora.rank", "4", "--lora.alpha", "0"], "lora.alpha expects a number above 0; found 0.0"),
    "a negative rank": (["--lora.rank", "-1"], "lora.rank expects a whole number of at least 0; found -1"),
    "no folder": (["--run.folder", ""], "run.folder expects the path of a folder"),
    "a growing cosine": (["--optimizer.last-lr-share", "2"], "optimizer.last_lr_share expects a share"),
}
CONTRADICTIONS = {
    "off and a budget": ["--offload.fraction", "0", "--offload.device-budget", "1GiB"],
    "off and a window": ["--offload.fraction", "0", "--offload.window", "1GiB"],
    "two kinds of model": ["--model.transformers", "llama", "--model.size", "1B"],
    "two sizes of model": ["--model.transformers", "llama", "--model.layers", "3"],
    "a size beside weights": ["--model.weights", "llama-1b", "--model.size", "1B"],
    "evaluation without data": ["--data.eval-share", "0"],
    "split masters of fp32": ["--model.dtype", "float32", "--offload.master-weights", "split"],
    "a schedule without stages": ["--parallel.schedule", "GPipe"],
    "stages without micro-batches": ["--parallel.stages", "4", "--data.micro-batches", "2"],
    "updates in a pipeline's backward": [
        *("--parallel.stages", "2", "--data.micro-batches", "2", "--offload.update-in-backward"),
    ],
    "targets of no adapters": ["--lora.targets", "out"],
    "a share of nothing": ["--activations.fraction", "0.5"],
    "more experts than there are": ["--model.experts", "2", "--model.experts-per-token", "3"],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_on_the_command_line(name):
    words, says = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions(name):
    with pytest.raises(ConfigError, match=r"contradicts|expects at (least|most)"):
        load_config(None, CONTRADICTIONS[name])


IN_FILES = {
    "an unknown section": ("[modle]\n", r"unknown section \[modle\]. Did you mean model\?"),
    "an unknown setting": ("[run]\nstep = 3\n", r"unknown setting run.step. Did you mean run.steps\?"),
    "the wrong section": ("[model]\nsteps = 3\n", r"unknown setting model.steps. Did you mean run.steps\?"),
    "no section": ("steps = 3\n", "unknown section"),
    "not a table": ("run = 3\n", "run expects a table"),
    "a text for a number": ('[run]\nsteps = "3"\n', "run.steps expects a whole number; found '3'"),
    "a truth for a number": ("[run]\nsteps = true\n", "run.steps expects a whole number; found True"),
    "a number for a text": ("[run]\nfolder = 3\n", "run.folder expects text; found 3"),
    "a number for a truth": ("[model]\ncompile = 1\n", "model.compile expects true or false; found 1"),
    "one path": ('[data]\npaths = "a"\n', "data.paths expects a list"),
    "three betas": ("[optimizer]\nbetas = [1, 2, 3]\n", "optimizer.betas expects 2 values"),
    "not TOML": ("[run\n", "is expected to be TOML"),
    "a wrong choice": ('[offload]\nupdate_on = "gpu"\n', "offload.update_on expects one of"),
}


@pytest.mark.parametrize("name", IN_FILES)
def test_mistakes_in_files(name, tmp_path):
    text, says = IN_FILES[name]
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(written(tmp_path, text), [])
    assert str(tmp_path / "run.toml") in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is expected to be TOML"):
        read_toml(tmp_path / "binary.toml")


def test_python_gets_the_same_checks():
    with pytest.raises(ConfigError, match=r"run.steps expects a whole number; found '3'"):
        RunSettings(steps="3")
    with pytest.raises(ConfigError, match=r"TrainConfig expects ModelSettings for model; found dict"):
        TrainConfig(model={"size": "1M"})
    assert DataSettings(paths=["a"]).paths == ("a",)
    assert OptimizerSettings(lr=1).lr == 1.0
    with pytest.raises(ConfigError, match=r"activations.mode expects one of .*; found 'auto'. Use --device-peak"):
        ActivationSettings(mode="auto")
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelSettings().stages = 2


# What auto comes to #


def test_resolved():
    config = TrainConfig()
    on_cpu = resolved(config, device=torch.device("cpu"), ranks_per_stage=1)
    assert (on_cpu.model.dtype, on_cpu.parallel.fsdp, on_cpu.run.device) == ("float32", False, "cpu")
    on_device = resolved(config, device=torch.device("cuda", 1), ranks_per_stage=2)
    assert (on_device.model.dtype, on_device.parallel.fsdp, on_device.run.device) == ("bfloat16", True, "cuda")
    chosen = TrainConfig(
        model=ModelSettings(dtype="float32"), parallel=ParallelSettings(fsdp=False), run=RunSettings(device="cuda:1")
    )
    assert resolved(chosen, device=torch.device("cuda", 1), ranks_per_stage=2) == chosen


def test_device(monkeypatch):
    assert RunSettings(device="cpu").torch_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert RunSettings().torch_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    assert RunSettings().torch_device() == torch.device("cuda")


# Values #


def test_types_in_words():
    types = field_types(OffloadConfig)
    assert expected(types["fraction"]) == "none or a number"
    assert expected(types["update_on"]) == "one of 'device', 'host', 'auto'"
    assert expected(types["state_dtype"]) == "a table from names to names or text"
    assert expected(field_types(ParallelSettings)["fsdp"]) == "'auto' or true or false"
    assert expected(field_types(OptimizerSettings)["betas"]) == "2 values, each a number"


def test_none_is_not_a_text():
    assert from_text(["none"], str | None, "x") is None
    assert from_text(["None"], int | str | None, "x") is None
    assert from_text(["12"], int | str | None, "x") == 12
    assert from_text(["12GiB"], int | str | None, "x") == "12GiB"


def test_truths_are_not_numbers():
    with pytest.raises(ConfigError):
        check(True, int, "x")
    with pytest.raises(ConfigError):
        check(True, float | None, "x")
    assert check(1, float, "x") == 1.0


def test_nearest():
    assert nearest("dcotor", ["doctor", "plan"]) == "Did you mean doctor?"
    assert nearest("zzz", ["doctor", "plan"]) == "Known: doctor, plan."
    assert nearest("zzz", [str(i) for i in range(100)]) == ""
