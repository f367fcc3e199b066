# SPDX-License-Identifier: Apache-2.0
"""Rules of the code base that a linter does not know."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PYTHON = [*SOURCES, *sorted(p for d in ("tests", "benchmarks", "examples") for p in (ROOT / d).rglob("*.py"))]
KNOW_CUDA = {"allocation_history.py", "arena.py", "accelerator.py", "adamw_triton.py"}


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_spdx_header(path):
    assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_only_some_modules_know_cuda(path):
    """Other accelerators use `torch.accelerator`: `torch.cuda` stays in the modules that know a backend."""
    uses = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert path.name in KNOW_CUDA or not uses


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_modules_say_their_job(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_public_names():
    import offstage

    assert set(offstage.__all__) == {
        "ActivationConfig",
        "CheckpointError",
        "ConfigError",
        "FitPlan",
        "HostMemoryError",
        "Machine",
        "OffloadConfig",
        "OffloadIneffectiveError",
        "OffloadedOptimizer",
        "OffstageError",
        "Plan",
        "StepLostError",
        "Workload",
        "World",
        "__version__",
        "asleep",
        "checkpoint",
        "fit",
        "make_plan",
        "measure_machine",
        "offload",
        "offload_activations",
        "optim",
        "sleep",
        "wake",
    }
    assert issubclass(offstage.ConfigError, ValueError)
    assert issubclass(offstage.ConfigError, offstage.OffstageError)


def test_public_names_come_with_the_package():
    """`import offstage` imports none of them yet: each is found when it is used, `offstage.checkpoint` too."""
    import offstage

    for name in set(offstage.__all__) - {"__version__"}:
        found = offstage.__getattr__(name)
        assert found is getattr(offstage, name)
        assert found.__name__ == (f"offstage.{name}" if name in ("checkpoint", "optim") else name)
    assert offstage.checkpoint.save.__module__ == "offstage.checkpoint.saving"
    assert set(offstage.__all__) <= set(dir(offstage))
    with pytest.raises(AttributeError, match="no attribute 'oflfoad'"):
        offstage.oflfoad  # noqa: B018


def test_the_optimizer_has_torchs_methods_and_the_public_ones():
    import torch

    import offstage

    public = {
        "accumulate",
        "attach",
        "clip_grad_norm_",
        "close",
        "config",
        "evict",
        "fitted",
        "plan",
        "prefetch",
        "receipt",
        "replan",
    }
    public |= {"synchronize", "state"}
    found = {name for name in dir(offstage.OffloadedOptimizer) if not name.startswith("_")}
    torchs = {name for name in dir(torch.optim.Optimizer) if not name.startswith("_")}
    assert found == torchs | public
    params = [torch.nn.Parameter(torch.zeros(4))]
    optimizer = offstage.offload(torch.optim.AdamW(params), min_bytes=0)
    plain = torch.optim.AdamW(params)
    assert vars(optimizer).keys() - vars(plain).keys() == {"_runtime"}
