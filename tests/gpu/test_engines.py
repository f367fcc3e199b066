# SPDX-License-Identifier: Apache-2.0
"""On the device: frozen parameters, a model that is attached later, and the adapters for Trainer and accelerate."""

import copy

import accelerate
import pytest
import torch
from torch import nn

import offstage
from offstage.integrations import accelerate as accelerate_adapter
from offstage.integrations import transformers as trainer_adapter
from tests.support import hf
from tests.support.contract import SMALL, adamw, assert_same, assert_same_weights

DEVICE = "cuda"

MODES = {
    "in step": {},
    "by the CPU": {"update_on": "host"},
    "window": {"window": "all"},
    "in forward": {"overlap_forward": True},
    "in backward": {"update_in_backward": True, "overlap_forward": True},
    "weights on the host": {"weights": "host", "overlap_forward": True},
}
in_every_mode = pytest.mark.parametrize("mode", MODES)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(256, 256, device=DEVICE) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def iterate(model, optimizer, steps):
    for number in steps:
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def thaw(model, optimizer):
    """Two layers are frozen first; then one of them is trained, and another one frozen."""
    iterate(model, optimizer, range(4))
    model.layers[1].requires_grad_(True)
    iterate(model, optimizer, range(4, 8))
    model.layers[3].requires_grad_(False)
    model.layers[0].requires_grad_(True)
    iterate(model, optimizer, range(8, 12))


@in_every_mode
def test_frozen_and_thawed(mode):
    plain_model = Blocks()
    for number in (0, 1):
        plain_model.layers[number].requires_grad_(False)
    model = copy.deepcopy(plain_model)
    plain = offstage.offload(adamw(plain_model.parameters()), plain_model, fraction=0.0)
    optimizer = offstage.offload(adamw(model.parameters()), model, **SMALL, **MODES[mode])
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert optimizer.receipt().host_state_bytes < 2.5 * trained
    thaw(plain_model, plain)
    thaw(model, optimizer)
    optimizer.synchronize()
    assert_same_weights(model, plain_model)
    assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()


@pytest.mark.parametrize("mode", ["in step", "in forward", "in backward", "window"])
def test_a_model_that_is_attached(mode):
    expected_model, model = Blocks(), Blocks()
    expected = offstage.offload(adamw(expected_model.parameters()), expected_model, **SMALL, **MODES[mode])
    optimizer = offstage.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **SMALL, **MODES[mode])
    optimizer.attach(model)
    for one in ((model, optimizer), (expected_model, expected)):
        iterate(*one, range(6))
        one[1].synchronize()
    assert_same(model, optimizer, expected_model, expected)


# Adapters


@pytest.fixture
def _repeatable(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


SETTINGS = {"plain": hf.SMALL, "in forward": hf.F, "in backward": hf.FB}


def trained(folder, settings, **options):
    model = hf.make_model(attn_implementation="eager")
    trainer = hf.make_trainer(folder, model=model, use_cpu=DEVICE == "cpu", gradient_accumulation_steps=2, **options)
    trainer_adapter.offload(trainer, **settings)
    trainer.train()
    return trainer


@pytest.mark.usefixtures("_repeatable")
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e4])
@pytest.mark.parametrize("mode", SETTINGS)
def test_trainer_has_the_bits_of_resident_state(mode, max_grad_norm, tmp_path):
    ours = trained(tmp_path, SETTINGS[mode], max_grad_norm=max_grad_norm)
    resident = trained(tmp_path, hf.OFF, max_grad_norm=max_grad_norm)
    assert hf.logged(ours) == hf.logged(resident)
    assert_same_weights(ours.model, resident.model)
    assert trainer_adapter.optimizer_of(ours).receipt().total_bytes_fetched > 0


@pytest.mark.usefixtures("_repeatable")
@pytest.mark.parametrize("mode", ["plain", "in forward"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate_has_the_bits_of_resident_state(mode, precision):
    """With fp16 a scaler unscales and, at first, skips."""
    models = []
    for settings in (SETTINGS[mode], hf.OFF):
        hf.reset()
        accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu", mixed_precision=precision)
        accelerate_adapter.offload(accelerator, **settings)
        model = hf.make_model(attn_implementation="eager")
        model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
        for number in range(8):
            batch = {name: value[None].to(DEVICE) for name, value in hf.Tokens()[number].items()}
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        accelerate_adapter.within(optimizer).synchronize()
        models.append(accelerator.unwrap_model(model))
    assert_same_weights(*models)
