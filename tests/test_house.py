# SPDX-License-Identifier: Apache-2.0
"""The rooms of `src/offstage` and who may import whom: every import counts, type-only and function-level ones too."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "src" / "offstage"
ORDER = [
    "errors",
    "config",
    "tensors",
    "modules",
    "memory",
    "lanes",
    "rules",
    "planning",
    "engine",
    "weights",
    "activations",
    "optimizer",
    "fitting",
    "phases",
    "checkpoint",
    "optim",
    "__init__",  # the public names: what follows uses the library as anyone would
    "integrations",
    "train",
    "cli",
    "__main__",
]
"""From the ground up: a room imports from itself and from those before it."""


def name_of(path: Path) -> str:
    """`src/offstage/lanes/link.py` → `lanes.link`; a package's own file is the package."""
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(HOUSE.rglob("*.py"))}


def imported(tree: ast.Module) -> Iterator[tuple[str, str | None, int]]:
    """(module, name, line) of every import of offstage; `name`: what is taken from the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "offstage":
                    yield _module(alias.name), None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute"
            if (node.module or "").split(".")[0] == "offstage":
                for alias in node.names:
                    inner = _module(f"{node.module}.{alias.name}")
                    yield (
                        (inner, None, node.lineno)
                        if inner in MODULES
                        else (_module(node.module), alias.name, node.lineno)
                    )
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            assert not (isinstance(node.args[0], ast.Constant) and str(node.args[0].value).startswith("offstage"))


def _module(name: str) -> str:
    return name.partition(".")[2] or "__init__"


@functools.cache
def imports() -> dict[str, list[tuple[str, str | None, int]]]:
    """Those of each module."""
    return {name: list(imported(ast.parse(path.read_text()))) for name, path in MODULES.items()}


def test_rooms():
    found = {path.name.removesuffix(".py") for path in HOUSE.iterdir() if path.name != "__pycache__"}
    assert found == {*ORDER, "py.typed"}
    assert len(found) <= 22


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name):
    room = name.split(".")[0]
    wrong = [
        f"line {line}: {module}"
        for module, _, line in imports()[name]
        if ORDER.index(module.split(".")[0]) > ORDER.index(room)
    ]
    assert not wrong


def test_no_module_is_part_of_a_cycle():
    """Within a room, too. What a package's own file hands on is its modules' business, not a cycle."""
    graph = {name: {module for module, _, _ in found if module != name} for name, found in imports().items()}
    for package in {name.rpartition(".")[0] for name in graph} & set(graph):
        for name, found in graph.items():
            if name.startswith(f"{package}."):
                assert package not in found, f"{name} imports from its own package's file"
    settled: set[str] = set()
    while free := {name for name, found in graph.items() if name not in settled and found <= settled}:
        settled |= free
    assert not graph.keys() - settled


@pytest.mark.parametrize("name", MODULES)
def test_underscore_names_stay_in_their_module(name):
    tree = ast.parse(MODULES[name].read_text())
    private = re.compile(r"_(?!_version__)")
    taken = [f"line {line}: {what}" for _, what, line in imports()[name] if what and private.match(what)]
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "offstage"
        for alias in node.names
        if _module(f"{node.module}.{alias.name}") in MODULES
    }
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and private.match(node.attr)]
    used = [ast.unparse(node) for node in attributes if isinstance(node.value, ast.Name) and node.value.id in modules]
    assert not taken + used
