# SPDX-License-Identifier: Apache-2.0
"""The harness of every benchmark: cases, the command line, what a row has to reach, a process per case, the summary.

    options = parse(command(__doc__), CASES)          python -m benchmarks.QUESTION [CASE ...] [--size small]
    run("question", options.cases, measure)           a row, or several, for each case

A script describes its cases and measures one of them. The harness selects those that were asked for and those they
need, writes their rows, goes on when one of them fails, and ends with a line for each row.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import template
from benchmarks.common import ON_GPU, Row, main_module, write_row

SIZES = ("full", "small")
LAST_LINES = 15

_begin = time.perf_counter()


# Cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """What can be asked for by name."""

    name: str
    groups: tuple[str, ...] = ()
    """Names that stand for several cases."""
    needs: tuple[str, ...] = ()
    """Cases that it is compared with: they are measured, too."""


AnyCase = TypeVar("AnyCase", bound=Case)


def cases_of(names: Iterable[str], *, needs: Mapping[str, Sequence[str]] | None = None) -> list[Case]:
    """Cases that are nothing but their names."""
    return [Case(name=name, needs=tuple((needs or {}).get(name, ()))) for name in names]


def described(case: Case, *fields: str) -> Row:
    """The beginning of a row: the name, and what else says how the case differs from others."""
    return {"case": case.name, **{field: getattr(case, field) for field in fields}}


def select(cases: Sequence[AnyCase], wanted: Collection[str]) -> list[AnyCase]:
    """The cases asked for by name or group, or all; and those they need. In the order of `cases`."""
    chosen = [case for case in cases if not wanted or {case.name, *case.groups} & {*wanted}]
    needed = {name for case in chosen for name in (case.name, *case.needs)}
    return [case for case in cases if case.name in needed]


# The command line


def command(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse(parser: argparse.ArgumentParser, cases: Sequence[Case], *, needs_gpu: bool = True) -> argparse.Namespace:
    """What was asked for: `cases`, `size`, and the script's own arguments."""
    known = [*(case.name for case in cases), *sorted({group for case in cases for group in case.groups})]
    parser.add_argument("case", nargs="*", help=f"all of them unless named: {', '.join(known)}".replace("%", "%%"))
    parser.add_argument("--cases", nargs="+", default=[], help="the same, before or after other arguments")
    parser.add_argument("--size", choices=SIZES, default="full", help="anything but full runs in seconds, anywhere")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # of a case's own process
    options = parser.parse_args()
    wanted = [*options.case, *options.cases]
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    if not ON_GPU:
        if needs_gpu and options.size == "full":
            parser.error("--size full expects a GPU; found none. Add --size small.")
        torch.backends.mkldnn.enabled = False  # some virtual machines report matrix units that they do not allow
        torch.set_num_threads(1)
    options.cases = select(cases, wanted)
    return options


# What a row has to reach


def at_most(limit: float, found: float | None) -> Row:
    return {"at_most": limit, "found": found, "met": found is not None and found <= limit}


def at_least(limit: float, found: float | None) -> Row:
    return {"at_least": limit, "found": found, "met": found is not None and found >= limit}


def is_met(row: Mapping[str, Any]) -> bool:
    return all(one["met"] for one in row.get("must", {}).values())


def verdict(row: Mapping[str, Any]) -> str:
    """For the summary: nothing, `met`, or what was not met."""
    unmet = [name for name, one in row.get("must", {}).items() if not (one["met"] if isinstance(one, dict) else one)]
    return f"NOT MET: {', '.join(unmet)}" if unmet else "met" if row.get("must") else ""


# Running


def say(what: str) -> None:
    print(f"[{time.perf_counter() - _begin:4.0f} s] {what}", flush=True)


NAMED_BY = ("case", "variant", "plan_name", "setting", "format", "system", "slots")
SHOWN = {
    "iteration_ms": "ms",
    "median_ms": "ms median",
    "measured_ms": "ms",
    "step_ms": "ms step",
    "ratio": "x",
    "ratio_to_unsharded": "x unsharded",
    "ratio_to_frontier": "x frontier",
    "fraction_ratio_at_peak": "x fraction at that peak",
    "times_fraction": "x that",
    "times_faster": "times faster",
    "peak_gib": "GiB peak",
    "left_gib": "GiB left",
    "sequence": "tokens",
    "tokens_per_s": "tokens/s",
}
"""Fields of rows that are worth a place in the summary, and their units."""


def summary(row: Row) -> str:
    """One line for the terminal: what was measured, the numbers that matter, and whether it reached what it must."""
    name = " ".join(dict.fromkeys(str(row[field]) for field in NAMED_BY if row.get(field) is not None))
    numbers = [f"{row[field]:9.3f} {unit}" for field, unit in SHOWN.items() if isinstance(row.get(field), int | float)]
    error = row.get("error")  # why there are no numbers; predictions have errors in numbers
    why = " ".join(error.splitlines()[-2:]) if isinstance(error, str) else ""
    return f"{name:<40} {' '.join(numbers)}  {verdict(row)}{why}"


def run(
    question: str,
    cases: Iterable[AnyCase],
    measure: Callable[[AnyCase], Row | Iterable[Row | None]],
    *,
    failed: list[str] | None = None,
) -> list[Row]:
    """Write the row or rows of each case. A case that raises is named at the end, and costs the others nothing.

    `failed`: a list to which `measure` adds names itself.
    """
    rows: list[Row] = []
    failed = [] if failed is None else failed
    for case in cases:
        say(case.name)
        try:
            found = measure(case)
            for row in [found] if isinstance(found, dict) else found:
                if row is not None:
                    rows.append(row)
                    write_row(question, row)
        except Exception:
            traceback.print_exc()
            failed.append(case.name)
    say("in all")
    print("", *map(summary, rows), sep="\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    return rows


# A process per case


def in_own_process(
    name: str, arguments: Sequence[str], *, variables: Mapping[str, str], timeout_s: int, imports: Sequence[str] = ()
) -> Row:
    """What the case's process found, or why it found nothing. The process and all it started end with this call.

    `imports`: what cases import beside the script itself; once for all cases with the same `variables`.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        words = [name, "--result", str(result), *arguments]
        template = _template_for(tuple(sorted(variables.items())), tuple(imports))
        run = _run_anew if template is None else template.run
        status = run(words, variables, log, timeout_s)
        if result.exists():
            return json.loads(result.read_text())  # type: ignore[no-any-return]
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        print("\n".join(lines))
        # A row says what failed; where the files are on that machine is for the terminal.
        told = [line for line in lines if line.strip() and not line.startswith((" ", "Traceback"))]
        return {"error": "\n".join([*told, f"exit: {status}"])}


def _run_anew(words: Sequence[str], variables: Mapping[str, str], log: Path, timeout_s: int) -> str:
    """How the process of a case that imports everything itself ended."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", main_module(), *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that a compiler it started can be ended with it
        )
        try:
            return str(process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return f"no end after {timeout_s} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class _Template:
    """The other end of `benchmarks.template`."""

    def __init__(self, variables: Mapping[str, str], imports: Sequence[str]) -> None:
        # Torch asks NVML how many devices there are, and not the driver, which no fork could use afterwards.
        own = {"PYTHONUNBUFFERED": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", template.__name__, main_module(), *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables, **own},
            text=True,
            start_new_session=True,
        )
        atexit.register(self._process.terminate)  # and with it a case that is running
        self.is_usable = self._line() == template.READY

    def run(self, words: Sequence[str], variables: Mapping[str, str], log: Path, timeout_s: int) -> str:
        """How the case's process ended. It has had `variables` from the beginning."""
        assert self._process.stdin is not None
        log.touch()
        request = {"words": list(words), "log": str(log), "timeout_s": timeout_s}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._line() or "its template has died"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@functools.cache
def _template_for(variables: tuple[tuple[str, str], ...], imports: tuple[str, ...]) -> _Template | None:
    made = _Template(dict(variables), imports)
    return made if made.is_usable else None


def report(result: Path, work: Callable[[], Row]) -> None:
    """In the case's own process: leave what was found in the file that the parent named, and end."""
    status = 1
    try:
        result.write_text(json.dumps(work()) + "\n")
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # freeing tens of GiB of pinned memory piece by piece takes longer than the measurement
