# SPDX-License-Identifier: Apache-2.0
"""`torch.set_default_dtype` and `torch.set_default_device` change what user code creates, and nothing of ours."""

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import offstage
from offstage import checkpoint
from tests.support.contract import CLASSES, SMALL, TORCH, assert_same_tree
from tests.support.params import WHERE

HOUSE = Path(offstage.__file__).parent
DTYPES = [torch.bfloat16, torch.float64]
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
"""Functions of torch that take dtype and device from the defaults if they are not given."""


@contextlib.contextmanager
def defaults(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or before)
        torch.set_default_device(device)
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(i, shape, dtype)) for i, shape in enumerate(((3, 5), (7,)))]


def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> dict:
    for step in range(steps):
        for param in params:
            param.grad = numbers(step, tuple(param.shape), param.dtype)
        optimizer.step()
    return {"weights": [param.detach() for param in params], **optimizer.state_dict()}


def with_plain_steps(result: dict) -> dict:
    """`step` as a number: plain classes count in fp64 if that is the default."""
    return {**result, "state": [{**one, "step": float(one.get("step", 0))} for one in result["state"].values()]}


@pytest.mark.parametrize("place", WHERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adam_counts_on_with_any_default_dtype(dtype, place):
    def adam() -> dict:
        params = make_params()
        made = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "amsgrad": True}], lr=0.01)
        return run(params, offstage.offload(made, **{**SMALL, **WHERE[place]}), 300)

    expected = adam()
    with defaults(dtype):
        found = adam()
    assert float(found["state"][0]["step"]) == 300
    assert_same_tree(found, expected)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_classes_do_with_a_default_dtype_what_plain_ones_do(dtype, name):
    with defaults(dtype):
        plain, ours, on_host = make_params(), make_params(), make_params()
        expected = run(plain, CLASSES[name](plain), 5)
        found = run(ours, offstage.offload(CLASSES[name](ours), **TORCH), 5)
        updated_by_host = run(on_host, offstage.offload(CLASSES[name](on_host), **TORCH, update_on="host"), 5)
    assert_same_tree(with_plain_steps(found), with_plain_steps(expected))
    assert_same_tree(with_plain_steps(updated_by_host), with_plain_steps(expected))


@pytest.mark.parametrize("place", WHERE)
@pytest.mark.parametrize("name", sorted({"Adam amsgrad", "AdamW", *CLASSES} - {"Adagrad"}))
def test_steps_with_a_default_device(name, place):
    """Adagrad makes `step` in its constructor, on the default device."""

    def steps() -> dict:
        params = make_params(torch.bfloat16)
        return run(params, offstage.offload(CLASSES[name](params), **{**SMALL, **WHERE[place]}), 3)

    expected = steps()
    with defaults(device="meta"):
        found = steps()
    assert_same_tree(found, expected)


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_a_life_with_a_default_device(tmp_path, masters):
    """Clipping, activations, a changed plan, checkpoints of both kinds, and state that is loaded."""
    data = numbers(0, (4, 48), torch.bfloat16)

    def life(folder: Path) -> dict:
        model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48)).to_empty(device="cpu")
        model.to(torch.bfloat16).requires_grad_(True)
        with torch.no_grad():
            for i, param in enumerate(model.parameters()):
                param.copy_(numbers(i, tuple(param.shape)))
        config = {**SMALL, "master_weights": masters, "update_in_backward": True}
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=0.01), model, **config)

        def train(steps: int) -> None:
            for _ in range(steps):
                model(data).square().mean().backward()
                optimizer.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()

        with offstage.offload_activations(model, min_bytes=0):
            train(3)
        optimizer.replan(fraction=0.5, host_fraction=0.5)
        train(2)
        checkpoint.save(folder / "blocking", model, optimizer, extra={"tensor": data})
        checkpoint.async_save(folder / "background", model, optimizer).result()
        train(1)
        extra = checkpoint.load(folder / "blocking", model, optimizer)
        train(1)
        optimizer.load_state_dict(optimizer.state_dict())
        train(1)
        assert optimizer.receipt().weights_written_by_others == 0
        return {"weights": [param.detach() for param in model.parameters()], **optimizer.state_dict(), "extra": extra}

    expected = life(tmp_path / "plain")
    with defaults(device="meta"):
        found = life(tmp_path / "meta")
    assert_same_tree(found, expected)


def test_every_tensor_is_made_with_its_dtype_and_device():
    found = []
    for path in sorted(HOUSE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
                continue
            given = {keyword.arg for keyword in node.keywords}
            if ast.unparse(node.func)[len("torch.") :] in FACTORIES and not (
                None in given or given >= {"dtype", "device"}
            ):
                found.append(f"{path.relative_to(HOUSE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)
