# SPDX-License-Identifier: Apache-2.0
"""From a folder of safetensors and back to one: the same bits, no second copy, one message for what does not fit."""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offstage import CheckpointError, ConfigError, OffstageError
from offstage.cli import main as cli
from offstage.train import causal_lm, loop, tensor_files
from offstage.train import export as exporting
from offstage.train.config import ModelSettings
from offstage.train.config import build as build_config
from offstage.train.export import export
from offstage.train.model import build
from offstage.train.parallel import started
from offstage.train.pretrained import PretrainedWeights
from offstage.train.progress import progress_for
from offstage.train.run_folder import RunFolder
from offstage.train.signals import StopRequests
from tests.support import stand_in
from tests.support.trainer import differences, tensors_of, train, values_of

TOKENS = torch.arange(32).view(2, 16) * 7 % 256
FLAT = {"optimizer": {"warm_up": 0, "last_lr_share": 1.0}}


@pytest.fixture(scope="module")
def transformers():
    return importlib.import_module("transformers")


def saved(transformers, folder, *, tied=False, dtype=torch.float32, **saving):
    """A folder that `save_pretrained` wrote, and the model in it."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**stand_in.LLAMA, "tie_word_embeddings": tied})
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    lm.save_pretrained(folder, **saving)
    return lm


def with_weights(folder, source, plan="streamed", *, dtype="auto", **sections):
    return {**values_of(folder, plan, **sections), "model": {"weights": str(source), "dtype": dtype}}


def trained_logits(values):
    """Of the trained model itself, before anything is saved and loaded."""
    config = build_config(values)
    folder = RunFolder(config.run.folder)
    with started(config.parallel, torch.device("cpu")) as parallel, folder.locked():
        training = loop.Training(config, parallel, folder, progress_for("quiet", first=True))
        try:
            training.run(StopRequests(parallel.host_group))
            training.optimizer.synchronize()
            with training.passes.evaluating():
                return training.passes.logits(TOKENS).clone()
        finally:
            training.close()


# There and back


@pytest.mark.parametrize(
    ("tied", "dtype", "shards"),
    [(False, "float32", "1GB"), (True, "bfloat16", "20KB")],
    ids=["one file", "shards, tied, rounded"],
)
def test_train_export_and_load(transformers, tmp_path, tied, dtype, shards):
    """The logits of the trained model and of the exported one have the same bits."""
    lm = saved(transformers, tmp_path / "source", tied=tied, max_shard_size=shards)
    assert len(list((tmp_path / "source").glob("*.safetensors"))) == (1 if shards == "1GB" else 6)
    values = with_weights(tmp_path / "run", tmp_path / "source", "backward", dtype=dtype, run={"steps": 3})
    expected = trained_logits(values)
    done = export(tmp_path / "run", tmp_path / "out", shard_bytes=2**30 if shards == "1GB" else 20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == (1 if shards == "1GB" else 4)
    assert done.parameters == sum(param.numel() for param in lm.parameters())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == getattr(torch, dtype)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, expected)
        assert not torch.equal(lm(TOKENS).logits.to(expected.dtype), expected)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == json.loads(
        (tmp_path / "source/generation_config.json").read_text()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_begins_with_the_weights(transformers, tmp_path, dtype):
    """Rounded as torch rounds, and buffers that no file holds are computed."""
    saved(transformers, tmp_path, tied=True)
    lm = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    model = build(ModelSettings(weights=str(tmp_path)), device="cpu", dtype=dtype, sequence=16).eval()
    with torch.no_grad():
        assert torch.equal(model.logits(TOKENS), lm(TOKENS).logits)
    assert model.lm.get_output_embeddings().weight is model.lm.get_input_embeddings().weight


def test_a_resumed_run_does_not_need_the_folder(transformers, tmp_path, capsys):
    saved(transformers, tmp_path / "source")
    run = with_weights(tmp_path / "whole", tmp_path / "source", "half", run={"steps": 4}, **FLAT)
    expected = loop.run(build_config(run))
    values = with_weights(tmp_path / "run", tmp_path / "source", "half", run={"steps": 2}, **FLAT)
    loop.run(build_config(values))
    shutil.rmtree(tmp_path / "source")
    values["run"]["steps"] = 4
    found = loop.run(build_config(values))
    assert differences(found.checkpoint, expected.checkpoint) == []
    assert "from " + str(found.checkpoint.parent / "step-00000002; model.weights is not read again") in (
        capsys.readouterr().out
    )
    export(tmp_path / "run", tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 32


def test_a_new_run_replaces_what_an_old_one_kept(transformers, tmp_path):
    """In a folder without a checkpoint, where another model was begun."""
    saved(transformers, tmp_path / "source")
    (tmp_path / "run/model").mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "run/model" / name).write_text('{"model_type": "gpt2"}')
    (tmp_path / "source/generation_config.json").unlink()
    loop.run(build_config(with_weights(tmp_path / "run", tmp_path / "source", run={"steps": 1})))
    assert (tmp_path / "run/model/config.json").read_text() == (tmp_path / "source/config.json").read_text()
    assert os.listdir(tmp_path / "run/model") == ["config.json"]


def test_what_a_run_says_about_its_weights(transformers, tmp_path, capsys):
    saved(transformers, tmp_path / "source", dtype=torch.bfloat16)
    loop.run(build_config(with_weights(tmp_path / "run", tmp_path / "source", run={"steps": 1})))
    said = capsys.readouterr().out
    assert (
        f"beginning with the weights in {tmp_path}/source: 30 tensors, 77.4 KiB in bfloat16, held in float32 " in said
    )
    assert "(model.dtype=auto on cpu)" in said
    values = values_of(tmp_path / "other", run={"steps": 1})
    loop.run(build_config({**values, "model": {"transformers": str(tmp_path / "source")}}))
    said = capsys.readouterr().out
    assert f"beginning with random weights: model.transformers={tmp_path}/source gives the model's shape only. " in said
    assert f"holds weights (model.safetensors): add --model.weights {tmp_path}/source to begin with them" in said


def test_conversions_of_the_package_are_refused(transformers, tmp_path):
    """A model that transformers stores in another form than it computes with; converted once, it is loaded."""
    config = transformers.MixtralConfig(**{**stand_in.LLAMA, "model_type": "mixtral"}, num_local_experts=2)
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    lm.save_pretrained(tmp_path / "stored")
    settings = ModelSettings(weights=str(tmp_path / "stored"))
    with pytest.raises(
        ConfigError, match=r"stores 21 tensors of MixtralForCausalLM in a form .*experts\.0\.w1\.weight"
    ):
        build(settings, device="cpu", dtype=torch.float32, sequence=16)
    lm.save_pretrained(tmp_path / "converted", save_original_format=False)
    settings = ModelSettings(weights=str(tmp_path / "converted"))
    model = build(settings, device="cpu", dtype=torch.float32, sequence=16).eval()
    with torch.no_grad():
        assert torch.equal(model.logits(TOKENS), lm(TOKENS).logits)


# What does not fit the model


@pytest.fixture
def stand_in_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", stand_in)


def spoil(tensors):
    del tensors["layers.0.norm.bias"], tensors["layers.2.parts.4.weight"]
    tensors["layers.3.norm.bias"] = torch.zeros(32)
    tensors["layers.1.norm.bias"] = torch.zeros(33)
    tensors["embedding.weight"] = tensors["embedding.weight"].to(torch.float8_e4m3fn)


def test_tensors_that_do_not_fit(stand_in_package, tmp_path):
    """All of them in one message, before anything is written."""
    stand_in.save_weights(tmp_path / "source", spoil)
    with pytest.raises(ConfigError) as refused:
        train(tmp_path / "run", model={"weights": str(tmp_path / "source"), **dict.fromkeys(values_of("")["model"])})
    message = str(refused.value)
    assert "2 missing: layers.0.norm.bias, layers.2.parts.4.weight; " in message
    assert "1 not in the model: layers.3.norm.bias; " in message
    assert "2 of another shape or format: layers.1.norm.bias (expected (32,), found (33,) in float32)" in message or (
        "2 of another shape or format: embedding.weight (expected (256, 32), found (256, 32) in float8_e4m3fn)"
        in message
    )
    assert not (tmp_path / "run/config.toml").exists()


def test_tied_tensors_that_differ(stand_in_package, tmp_path):
    def untie(tensors):
        tensors["head.weight"] = tensors["embedding.weight"] + 1

    stand_in.save_weights(tmp_path / "source", untie)
    with pytest.raises(
        ConfigError, match=r"'embedding\.weight' and 'head\.weight' differ, and the model has one tensor"
    ):
        build(ModelSettings(weights=str(tmp_path / "source")), device="cpu", dtype=torch.float32, sequence=16)


def test_quantized_weights(stand_in_package, tmp_path):
    stand_in.save_weights(tmp_path / "source", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=r"the configuration of .* says that they are quantized"):
        build(ModelSettings(weights=str(tmp_path / "source")), device="meta", dtype=torch.float32, sequence=16)


# Where they go


class Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta and not func.is_view and result is not args[0]:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


class Sum(Largest):
    """Bytes of all tensors that are made."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before, self.nbytes = self.nbytes, 0
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.nbytes += before
        return result


def test_tied_weights_have_memory_once():
    with torch.device("meta"):
        lm = stand_in.CausalLM(stand_in.AutoConfig.for_model("llama"), torch.float32)
    with Sum() as made:
        causal_lm.allocate(lm, "cpu")
    assert lm.head.weight is lm.embedding.weight
    assert made.nbytes == sum(one.nbytes for one in (*lm.parameters(), *lm.buffers()))


def test_no_second_copy(stand_in_package, tmp_path, monkeypatch):
    """Neither reading a tensor, beside the model itself, nor exporting takes more than a block of memory."""
    lm = stand_in.save_weights(tmp_path / "source")
    stored = PretrainedWeights(tmp_path / "source").tensors["embedding.weight"]
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 512)
    monkeypatch.setattr(exporting, "BLOCK_BYTES", 512)
    found = torch.empty(stored.shape, dtype=torch.bfloat16)
    with Largest() as made, tensor_files.open_file(stored.file) as (descriptor, _):
        tensor_files.read_tensor(descriptor, stored, 0, found.view(-1))
    assert 0 < made.nbytes <= 512
    assert torch.equal(found, lm.embedding.weight.bfloat16())
    train(tmp_path / "run", run={"steps": 1})
    with Largest() as made:
        export(tmp_path / "run", tmp_path / "out")
    assert 0 < made.nbytes <= 512


# Damaged and hostile files


def rewritten(path, header, data=b"\0" * 16, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(start=0, stop=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


HOSTILE = {
    "nothing in it": (lambda path: path.write_bytes(b""), "found a file of 0"),
    "cut off": (lambda path: os.truncate(path, 80), "to end at byte 86; found that the file ends at 80"),
    "too long": (lambda path: rewritten(path, {"a": entry()}, b"\0" * 17), "expected 8[0-9] bytes, which its header"),
    "a header longer than the file": (lambda path: rewritten(path, {}, length=2**60), "expected a header of 1,152,92"),
    "no JSON": (lambda path: rewritten(path, b"\xff{"), "expected UTF-8; found byte 0xff"),
    "a list": (lambda path: rewritten(path, b"[]"), "expected an object; found a JSON list"),
    "nested": (lambda path: rewritten(path, b"[" * 9999), "nested too deeply"),
    "no shape": (lambda path: rewritten(path, {"a": 3}), "found 'None'"),
    "a negative size": (lambda path: rewritten(path, {"a": entry(shape=(-1, -4))}), "the shape and the bytes of 'a'"),
    "a size that is not its bytes": (lambda path: rewritten(path, {"a": entry(shape=(2**40,))}), "for 'a'; found 16"),
    "beyond the end": (lambda path: rewritten(path, {"a": entry(16, 32)}), "found that the file ends at"),
    "two in one place": (lambda path: rewritten(path, {"a": entry(), "b": entry()}), "expected 'b' at byte"),
    "a format": (lambda path: rewritten(path, {"a": entry(dtype="F4")}), "found 'F4'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path, name):
    path = tmp_path / "model.safetensors"
    rewritten(path, {"a": entry()})
    assert PretrainedWeights(tmp_path).tensors["a"].shape == (4,)
    change, message = HOSTILE[name]
    change(path)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: .*{message}"):
        PretrainedWeights(tmp_path)


INDEXES = {
    "another folder": (
        {"a": "../model-1.safetensors"},
        "names of .safetensors files of this folder; found '../model-1",
    ),
    "a missing file": ({"a": "b.safetensors"}, "b.safetensors: expected a file; found none"),
    "a missing tensor": (
        {"a": "model-1.safetensors", "z": "model-1.safetensors"},
        "expected 'z' in model-1.safetensors",
    ),
    "one in two files": ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, "'a' is in model-1.safetensors too"),
    "no map": (None, "expected an object 'weight_map'"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_hostile_indexes(tmp_path, name):
    placed, message = INDEXES[name]
    for number in (1, 2):
        rewritten(tmp_path / f"model-{number}.safetensors", {"a": entry()})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(ConfigError, match=message):
        PretrainedWeights(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="expected a regular file; found a pipe"):
        PretrainedWeights(tmp_path)


def test_links_of_a_download_cache_are_followed(tmp_path):
    rewritten(tmp_path / "blob", {"a": entry()})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blob")
    assert list(PretrainedWeights(tmp_path / "snapshot").tensors) == ["a"]


def test_a_file_that_is_cut_off_while_it_is_read(stand_in_package, tmp_path):
    """An error, where a mapped file would end the process."""
    stand_in.save_weights(tmp_path / "source")
    model = build(ModelSettings(weights=str(tmp_path / "source")), device="cpu", dtype=torch.float32, sequence=16)
    os.truncate(tmp_path / "source/model.safetensors", 6000)
    with pytest.raises(ConfigError, match=r"bytes from byte .* the file ends at 6,000\. The file is damaged"):
        model.weights.load(model.lm)


def test_folders_without_safetensors(tmp_path):
    with pytest.raises(ConfigError, match=f"found nothing at {tmp_path}/no"):
        PretrainedWeights(tmp_path / "no")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"found pytorch_model\.bin in .*save_pretrained"):
        PretrainedWeights(tmp_path)


def test_a_folder_without_a_description(stand_in_package, tmp_path):
    """The network is not asked for it."""
    stand_in.save_weights(tmp_path / "source")
    (tmp_path / "source/config.json").unlink()
    with pytest.raises(ConfigError, match=f"found no config.json in {tmp_path}/source"):
        build(ModelSettings(weights=str(tmp_path / "source")), device="cpu", dtype=torch.float32, sequence=16)


# Exporting


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """A run of offstage's own model, with two checkpoints."""
    folder = tmp_path_factory.mktemp("own") / "run"
    train(folder, run={"steps": 2, "save_every": 1})
    return folder


def test_export_of_our_own_model(own_run, tmp_path, capsys):
    from safetensors.torch import load_file

    assert cli.main(["export", str(own_run), str(tmp_path / "out"), "--step", "1"]) == 0
    assert "from_pretrained cannot load it, because the run's model is offstage's own" in capsys.readouterr().out
    found = load_file(tmp_path / "out/model.safetensors")
    expected = tensors_of(own_run / "checkpoints/step-00000001")
    expected = {name.removeprefix("model."): one for name, one in expected.items() if name.startswith("model.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "out/offstage.toml").read_text() == (own_run / "config.toml").read_text()


REFUSED = {
    "no run": (["nothing", "out"], "found no config.toml in"),
    "one word": (["nothing"], "found only nothing"),
    "no such step": (["RUN", "out", "--step", "7"], "found step-00000001, step-00000002"),
    "a full folder": (["RUN", "full"], "found a folder with files in it at full"),
    "a file": (["RUN", "full/file"], "found a file at full/file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_exports(own_run, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").touch()
    words, message = REFUSED[name]
    assert cli.main(["export", *(str(own_run) if word == "RUN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir() == ["full"]
    assert os.listdir("full") == ["file"]


def test_an_export_that_fails_leaves_nothing(own_run, tmp_path):
    shutil.copytree(own_run, tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(OffstageError, match="file/out could not be written: File exists"):
        export(tmp_path / "run", tmp_path / "file/out")
    (damaged,) = (tmp_path / "run/checkpoints/step-00000002").glob("__0_0.distcp")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CheckpointError, match="files are not what was saved"):
        export(tmp_path / "run", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["file", "run"]


def test_an_empty_folder_is_filled(own_run, tmp_path):
    (tmp_path / "out").mkdir()
    export(own_run, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "offstage.toml"]
