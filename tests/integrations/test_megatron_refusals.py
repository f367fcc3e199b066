# SPDX-License-Identifier: Apache-2.0
"""What cannot be had in Megatron: one message each that names the version or the setting, and nothing has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

import offstage
from offstage.integrations import packages
from offstage.integrations.megatron import offload, parts
from tests.integrations.test_megatron import Run, make
from tests.support import megatron
from tests.support.contract import TORCH, assert_same_tree, one_process_group

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with one_process_group(), megatron.session():
        yield


def assert_untouched(run: Run, kind: str) -> None:
    """It is the plain optimizer that it was."""
    assert parts(run.optimizer) == []
    assert not type(run.optimizer).__module__.startswith("offstage")
    expected = make(kind)
    expected.train(2)
    run.train(2)
    assert_same_tree(megatron.weights(run.chunks), megatron.weights(expected.chunks))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap_forward": True}, "overlap_forward=True .* gathers the weights"),
        ({"update_in_backward": True}, "update_in_backward=True .* after backward"),
        ({"weights": "host"}, "weights='host' .* owns the memory"),
        ({"device_peak": "24GiB"}, r"device_peak=24\.0 GiB cannot be had in Megatron: fit\(\) decides for one device"),
        ({"master_weights": "none"}, "master_weights='none' .* 'fp32' or 'split'"),
        ({"fraction": 0.5, "min_bytes": "1GiB"}, "min_bytes"),
        ({**TORCH, "host_budget": 1024}, "host"),
    ],
)
@pytest.mark.parametrize("kind", ["bf16", "distributed"])
def test_settings_of_offstage(kind: str, settings: dict[str, Any], message: str) -> None:
    run = make(kind)
    with pytest.raises(offstage.OffstageError, match=message):
        offload(run.optimizer, model=run.chunks, **settings)
    assert_untouched(run, kind)


@pytest.mark.parametrize(
    "name",
    [
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        "optimizer_cuda_graph",
        "reuse_grad_buf_for_mxfp8_param_ag",
    ],
)
def test_settings_of_megatrons_optimizer(name: str) -> None:
    run = make("distributed")
    setattr(run.optimizer.config, name, True)
    with pytest.raises(ValueError, match=f"OptimizerConfig.{name}=True .* {name}=False"):
        offload(run.optimizer)
    setattr(run.optimizer.config, name, False)
    assert_untouched(run, "distributed")


def test_its_hybrid_device_optimizer() -> None:
    chunks = megatron.make_model(torch.bfloat16, ddp={"use_distributed_optimizer": True})
    optimizer = megatron.make_optimizer(chunks, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    assert type(optimizer.chained_optimizers[0].optimizer).__name__ == "HybridDeviceOptimizer"
    with pytest.raises(ValueError, match="HybridDeviceOptimizer"):
        offload(optimizer)


def test_megatron_fsdp() -> None:
    run = make("distributed")
    run.optimizer.chained_optimizers[0].ddp_config.use_megatron_fsdp = True
    with pytest.raises(ValueError, match="use_megatron_fsdp=True"):
        offload(run.optimizer)


def test_qk_clip() -> None:
    run = make("bf16")
    run.chunks[0].config.qk_clip = True
    with pytest.raises(ValueError, match="qk_clip=True"):
        offload(run.optimizer, model=run.chunks)


def _layer_wise() -> Any:
    from megatron.core.optimizer import LayerWiseDistributedOptimizer

    return LayerWiseDistributedOptimizer.__new__(LayerWiseDistributedOptimizer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (_layer_wise, "LayerWiseDistributedOptimizer"),
        (lambda: torch.optim.AdamW([torch.zeros(1)]), "get_megatron_optimizer"),
        (lambda: None, "NoneType"),
    ],
)
def test_other_optimizers(given: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload(given())


def test_an_optimizer_that_is_offloaded_already() -> None:
    run = make("bf16", TORCH)
    with pytest.raises(ValueError, match="already offloaded"):
        offload(run.optimizer, **TORCH)
    run.train(1)


def test_what_was_inside_before() -> None:
    run = make("bf16")
    before = run.optimizer.optimizer
    offload(run.optimizer, **TORCH)
    with pytest.raises(offstage.OffstageError, match="took over"):
        before.step()
    with pytest.raises(ValueError, match="already offloaded"):
        offstage.offload(before)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_window_needs_the_model_whose_gradients_are_reduced(kind: str) -> None:
    run = make(kind)
    with pytest.raises(ValueError, match=r"window='all' .* found none.*model=model"):
        offload(run.optimizer, **TORCH, window="all")
    assert_untouched(run, kind)


def test_the_format_of_old_versions() -> None:
    """It would be written to 16-bit weights, and masters would lose their low bits."""
    run = make("distributed", TORCH)
    with pytest.raises(ValueError, match=r"update_legacy_format=True .* plain Megatron and save it again"):
        run.optimizer.chained_optimizers[0].load_parameter_state_from_dp_zero({}, update_legacy_format=True)


@pytest.mark.parametrize("found", ["0.18.1", "0.20.0"])
def test_another_version(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda package: found)
    with pytest.raises(ValueError, match=f"megatron-core from 0.19 .* 0.20.*found {found}"):
        offload(make("bf16").optimizer)


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(packages, "version", version)
    optimizer = make("bf16").optimizer
    offload(optimizer, **TORCH)  # a checkout on the path has no metadata and says its version itself
    optimizer = make("bf16").optimizer
    monkeypatch.setattr("megatron.core.__version__", "0.18.0")
    with pytest.raises(ValueError, match=r"found 0\.18\.0"):
        offload(optimizer)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ValueError, match="expects the package megatron-core; found none"):
        offload(optimizer)
