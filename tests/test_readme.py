# SPDX-License-Identifier: Apache-2.0
"""Every command and every line of Python in the README runs as it is written there."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands(first: str) -> list[list[str]]:
    """The commands of shell blocks that begin with the word `first`, without comments."""
    lines = [line for language, text in BLOCKS if language == "" for line in text.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [command for command in found if command and command[0] == first]


def test_every_shell_line_is_known():
    words = {
        shlex.split(line, comments=True)[0]
        for language, text in BLOCKS
        if language == ""
        for line in text.splitlines()
        if line
    }
    assert words == {"make", "offstage"}


def test_offstage_commands_run(tmp_path):
    """In the order of the README, in one folder: the report is of the run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    environment["OFFSTAGE_CACHE"] = str(tmp_path / "cache")
    assert len(commands("offstage")) >= 4
    for _, *arguments in commands("offstage"):
        command = [sys.executable, "-m", "offstage", *arguments]
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == 0, (arguments, found.stdout[-2000:], found.stderr[-2000:])
    assert (tmp_path / "runs/default/report.html").stat().st_size > 10_000


@pytest.mark.parametrize("command", commands("make"), ids=" ".join)
def test_make_commands_exist(command):
    """CI runs them: here, whether make knows them."""
    found = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language in ("python", "diff")])
def test_python_is_python(text):
    """With the lines that a diff adds and keeps."""
    lines = [re.sub(r"^[+ ]", "", line) if text.startswith("+") else line for line in text.splitlines()]
    ast.parse("\n".join(lines))
    named = re.findall(r"offstage\.(\w+)", text)
    import offstage

    assert all(hasattr(offstage, name) for name in named)
