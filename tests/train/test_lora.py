# SPDX-License-Identifier: Apache-2.0
"""Adapters are all that is trained; peft and merged weights compute the same."""

import json

import pytest
import torch
from safetensors.torch import save_file

from offstage.errors import ConfigError
from offstage.train.config import ModelSettings, build
from offstage.train.lora import adapter_config, adapter_state, add_adapters, is_adapter, merged
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


def test_peft_and_merged_weights(tmp_path):
    """peft loads the adapter and gives the same bits; a plain model of transformers gives nearly the same."""
    import peft
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(stand_in.LLAMA))
    values = values_of(tmp_path / "run", run={"steps": 3}, **LORA)
    values["model"] = {"transformers": str(tmp_path)}
    state = weights_of(train_there(values).checkpoint)
    settings, prefix = build(values).lora, "lm."

    def model(adapted: bool):
        lm = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
        own = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
        if adapted:
            own = {name: merged(name, tensor, state, settings.scale) for name, tensor in own.items()}
        lm.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in own.items()})
        return lm.eval()

    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(dict(adapter_state(state, prefix)), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(adapter_config(state, settings, base=str(tmp_path), prefix=prefix))
    ours = build_model(ModelSettings(transformers=str(tmp_path)), device="cpu", dtype=torch.float32, sequence=16)
    add_adapters(ours, settings)
    ours.load_state_dict(state)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = ours.eval().logits(tokens)
        assert torch.equal(peft.PeftModel.from_pretrained(model(False), folder)(tokens).logits, expected)
        torch.testing.assert_close(model(True)(tokens).logits, expected)
        assert not torch.allclose(model(False)(tokens).logits, expected)


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
