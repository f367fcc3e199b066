# SPDX-License-Identifier: Apache-2.0
"""Adapters are all that is trained; peft and merged weights compute the same."""

import importlib
import json

import pytest
import torch
from safetensors.torch import load_file

from offstage.cli import main as cli
from offstage.errors import CheckpointError, ConfigError, OffstageError
from offstage.train.config import ModelSettings, build
from offstage.train.export import export
from offstage.train.lora import add_adapters, is_adapter
from offstage.train.lora_settings import LoraSettings
from offstage.train.model import build as build_model
from tests.support import stand_in
from tests.support.trainer import TINY, differences, losses_of, tensors_of, train, train_there, values_of

LORA = {"lora": {"rank": 4, "alpha": 12.0}}
WEIGHTS = "model."


def weights_of(folder):
    return {
        name.removeprefix(WEIGHTS): tensor for name, tensor in tensors_of(folder).items() if name.startswith(WEIGHTS)
    }


def test_only_adapters_are_trained(tmp_path):
    """They begin as nothing; the model's own weights keep their names and bits, and have no state."""
    plain = train(tmp_path / "plain", "off", run={"steps": 1}, optimizer={"lr": 0.0})
    run = {"steps": 4, "save_every": 2}
    adapted = train(tmp_path / "adapted", run=run, **LORA)
    assert losses_of(tmp_path / "adapted")[0] == losses_of(tmp_path / "plain")[0]
    before, after = weights_of(plain.checkpoint), weights_of(adapted.checkpoint)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    adapters = after.keys() - before.keys()
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in adapters} == {"qkv", "out", "gate_up", "down"}
    assert all(is_adapter(name) and bool(after[name].any()) for name in adapters)
    state = [name for name in tensors_of(adapted.checkpoint) if "exp_avg" in name]
    assert len(state) == 2 * len(adapters)
    planned = json.loads((tmp_path / "adapted/run.json").read_text())["plan"]["sizes"]
    assert {size["name"] for size in planned} == adapters


def test_a_run_resumes_with_the_same_bits(tmp_path):
    train(tmp_path / "run", "backward", run={"steps": 3}, **LORA)
    resumed = train(tmp_path / "run", "host", run={"steps": 6}, **LORA)
    train(tmp_path / "whole", "off", run={"steps": 3}, **LORA)  # the learning rate depends on the number of steps
    whole = train(tmp_path / "whole", "off", run={"steps": 6}, **LORA)
    assert differences(resumed.checkpoint, whole.checkpoint) == []
    with pytest.raises(ConfigError, match=r"of another model: lora rank 4, scale 3, all blocks then and rank 8, scale"):
        train(tmp_path / "run", run={"steps": 8}, lora={"rank": 8})


@pytest.fixture
def source(tmp_path):
    """A folder of transformers, with tied embeddings."""
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(**{**stand_in.LLAMA, "tie_word_embeddings": True})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_export(tmp_path, source, capsys):
    """Merged weights give nearly the logits of the run; the weights that it began with give its bits, with peft."""
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    values = {**values_of(tmp_path / "run", run={"steps": 3}, **LORA), "model": {"weights": str(source)}}
    state = weights_of(train_there(values).checkpoint)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "Adapters were added to 21 matrices." in capsys.readouterr().out
    ours = build_model(ModelSettings(transformers=str(source)), device="cpu", dtype=torch.float32, sequence=16)
    add_adapters(ours, build(values).lora)
    ours.load_state_dict(state)
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = ours.eval().logits(tokens)
        torch.testing.assert_close(load(tmp_path / "out").eval()(tokens).logits, expected)
        assert not torch.allclose(load(source).eval()(tokens).logits, expected)
        adapted = peft.PeftModel.from_pretrained(load(source), tmp_path / "out/adapter")
        assert torch.equal(adapted.eval()(tokens).logits, expected)


def test_export_of_our_own_model(tmp_path):
    checkpoint = train(tmp_path / "run", run={"steps": 2}, **LORA).checkpoint
    export(tmp_path / "run", tmp_path / "out")
    state, found = weights_of(checkpoint), load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == {name for name in state if not is_adapter(name)}
    layer = "blocks.0.feed_forward.down"
    product = 3.0 * state[f"{layer}.lora_B"] @ state[f"{layer}.lora_A"]
    torch.testing.assert_close(found[f"{layer}.weight"], state[f"{layer}.weight"] + product)
    settings = tmp_path / "run/config.toml"
    settings.write_text(settings.read_text().replace("rank = 4", "rank = 8"))
    with pytest.raises(CheckpointError, match=r"with an adapter of lora.rank=8.*found shapes .*\(4, "):
        export(tmp_path / "run", tmp_path / "other")


def test_an_adapter_of_a_tied_weight_is_not_added(tmp_path, source):
    values = {**values_of(tmp_path / "run", run={"steps": 1}), "model": {"weights": str(source)}}
    train_there({**values, "lora": {"rank": 4, "targets": ["lm_head"]}})
    with pytest.raises(OffstageError, match=r"is one tensor with 'lm_head.weight', and the adapter belongs to one of"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj",), r"names of linear layers; found q_proj. This model has: down, gate_up, out, qkv. Name some"),
        (("out", "ou"), r"names of linear layers; found ou. This model has: down"),
    ],
)
def test_targets(targets, message):
    model = build_model(ModelSettings(**TINY), device="meta", dtype=torch.float32, sequence=16)
    with pytest.raises(ConfigError, match=message):
        add_adapters(model, LoraSettings(rank=2, targets=targets))
    assert all(param.requires_grad for param in model.parameters())
    add_adapters(model, LoraSettings(rank=2, targets=("attention.out", "1.feed_forward.down")))
    assert [name for name, param in model.named_parameters() if param.requires_grad and name.endswith("A")] == [
        "blocks.0.attention.out.lora_A",
        "blocks.1.attention.out.lora_A",
        "blocks.1.feed_forward.down.lora_A",
    ]
