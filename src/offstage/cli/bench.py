# SPDX-License-Identifier: Apache-2.0
"""`offstage bench`: the questions of `benchmarks/`, which is part of a checkout and not of the package. Called by
`cli.py`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from offstage import ConfigError
from offstage.train.settings import nearest

PROG = "offstage bench"
HELP = """\
usage: offstage bench                          the questions there are
       offstage bench QUESTION [ARGUMENTS]     ask one; what follows is for it, such as --size small
       offstage bench all                      ask all of them, one after the other

Rows are appended to benchmarks/results, or to $OFFSTAGE_RESULTS. Most questions are about an accelerator; many have
--size small, which runs them on a tiny model anywhere, to see whether they run."""


def checkout() -> Path:
    """The folder that has `benchmarks/` in it: where offstage comes from, or where the command was given."""
    for folder in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (folder / "benchmarks/common.py").is_file():
            return folder
    raise ConfigError(
        f"{PROG} expects the folder benchmarks/ of a checkout, which the installed package does not have; found none "
        f"in {Path.cwd()}. Clone the repository and run it there."
    )


def questions(root: Path) -> dict[str, str]:
    """Modules of `benchmarks/` that ask something, with what they ask."""
    found = {}
    for path in sorted((root / "benchmarks").glob("*.py")):
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        if first.endswith("?"):
            found[path.stem] = " ".join(first.split())
    return found


def ask(root: Path, arguments: Sequence[str]) -> int:
    """Run one question, or all, and return the first exit status that is not 0."""
    name, *rest = arguments
    known = questions(root)
    if name != "all" and name not in known:
        raise ConfigError(f"{PROG} has no question {name!r}. {nearest(name, [*known, 'all'])}")
    if name == "all" and rest:
        raise ConfigError(f"{PROG} all expects nothing after it; found {rest[0]!r}. Ask one question to pass it on.")
    paths = [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for one in known if name == "all" else [name]:
        command = [sys.executable, "-m", f"benchmarks.{one}", *rest]
        status = subprocess.run(command, cwd=root, env=environment, check=False).returncode
        if status:
            return status
    return 0
