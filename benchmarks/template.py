# SPDX-License-Identifier: Apache-2.0
"""A process that has imported a script, from which the process of each case is forked: imports take seconds per case.

    python -m benchmarks.template MODULE [IMPORT ...]     for `harness.in_own_process`

It says whether it is of use, then reads a request per line and answers with how the case's process ended. It never
uses the device itself, since a process that does cannot fork one that may. Some library may have done so when it was
imported: one fork tries.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import Any

import torch

READY, UNUSABLE = "ready", "unusable"
POLL_S = 0.02


def main() -> None:
    name, *imports = sys.argv[1:]
    module, *_ = [importlib.import_module(one) for one in (name, *imports)]
    print(READY if can_fork() else UNUSABLE, flush=True)
    for line in sys.stdin:
        print(run(module, json.loads(line)), flush=True)


def can_fork() -> bool:
    """Whether a forked process may use the device."""
    pid = os.fork()
    if not pid:
        try:
            torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
        except Exception:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def run(module: ModuleType, request: Mapping[str, Any]) -> str:
    """The exit status of `module.main()` in a forked process, or that it did not end. All that it started ends, too."""
    pid = os.fork()
    if not pid:
        become(module, request)

    def end(*_: int | FrameType | None) -> None:
        os.killpg(pid, signal.SIGKILL)
        os._exit(1)

    previous = signal.signal(signal.SIGTERM, end)
    latest = time.monotonic() + request["timeout_s"]
    try:
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > latest:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return f"no end after {request['timeout_s']} s"
            time.sleep(POLL_S)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return str(os.waitstatus_to_exitcode(ended[1]))


def become(module: ModuleType, request: Mapping[str, Any]) -> None:
    """The process of one case: as if the script had been started with these arguments. Does not return."""
    try:
        os.setpgid(0, 0)
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file, number)
        sys.argv = [str(module.__file__), *request["words"]]
        module.main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
