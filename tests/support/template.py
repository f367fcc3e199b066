# SPDX-License-Identifier: Apache-2.0
"""`Template`: programs that share one start of Python and one import of torch, each in a process of its own.

    with Template() as template:
        found = template.run("examples.fit", folder, {"OFFSTAGE_CACHE": ...})
        assert found.returncode == 0, found.stderr

A server has imported torch, what the first step of any optimizer imports, and numba, and starts no threads; nothing of
offstage is imported. It forks itself for each program, which runs as under `python -m` and ends as an interpreter does.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class Template:
    """Runs modules. The server starts with the `with` block and ends with it, or when its input closes."""

    def __enter__(self) -> Template:
        command = [sys.executable, "-m", "tests.support.template"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch reads it when it is imported
        self._server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """`command` is a module and its arguments. `folder` gets what it writes; `environment` is beside this one."""
        said = [folder / "stdout", folder / "stderr"]
        task = {"command": [*command], "said": [str(one) for one in said], "environment": dict(environment)}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(task), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess([*command], code, *(one.read_text() for one in said))


def _serve() -> dict[str, Any]:
    """Fork for each task. Returns in the children."""
    for name in ("numba", "torch._dynamo", "torch.distributed.tensor"):
        importlib.import_module(name)

    for line in sys.stdin:
        task: dict[str, Any] = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the only other threads are those of a BLAS
            pid = os.fork()
        if not pid:
            return task
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    sys.exit()


def _become(task: Mapping[str, Any]) -> None:
    """Be the process that runs `task`."""
    for number, path in enumerate(task["said"], start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.update(task["environment"])
    module, *arguments = task["command"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _become(_serve())
