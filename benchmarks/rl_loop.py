# SPDX-License-Identifier: Apache-2.0
"""What share of an iteration does switching take in a reinforcement learning loop: `offstage.sleep()`, or `.to()`?

    python -m benchmarks.rl_loop                 examples/rl_loop.py with 1.5B parameters, each way, on one GPU
    python -m benchmarks.rl_loop sleep to        these cases
    python -m benchmarks.rl_loop --size small    a minute on any machine: does every case run?

Each case is the example in a process of its own: cycles of generation and one step of training, ten of them, but three
where `.to()` switches, which takes that long.

sleep, to, none    generator and trainer are one model: gradients and the optimizer's state leave for generation
elsewhere_...      another process generates: the weights leave, too, and reach it through host memory

`share` is the time of leaving and coming back, also the part that training did not wait for, over all cycles but the
first; `iteration_ms` is the mean of these cycles.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.common import ON_GPU, Row
from benchmarks.harness import at_most

SIZES = {"full": "large", "small": "small"}
TIMEOUT_S = 240
CYCLE = re.compile(r"cycle +\d+ .*freed +(.+?)  switching +([\d.]+) of +([\d.]+) ms")
END = re.compile(r"switch \w+: ([\d.]+)% of an iteration, (\d+) ms")


@dataclass(frozen=True, kw_only=True)
class Case(harness.Case):
    switch: str
    is_elsewhere: bool = False


CASES = [
    *(Case(name=switch, switch=switch) for switch in ("sleep", "to", "none")),
    *(Case(name=f"elsewhere_{switch}", switch=switch, is_elsewhere=True) for switch in ("sleep", "to")),
]


def measure(case: Case, options: argparse.Namespace, done: dict[str, Row]) -> Row:
    arguments = ["--size", SIZES[options.size], "--switch", case.switch]
    arguments += ["--second-process"] if case.is_elsewhere else []
    num_cycles = 3 if case.switch == "to" else 10
    arguments += ["--cycles", str(num_cycles)]
    command = [sys.executable, "-m", "examples.rl_loop", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {ended.returncode}: {ended.stderr[-500:]}")
    end = END.search(ended.stdout)
    assert end is not None, ended.stdout
    cycles = [(float(ms), float(whole)) for _, ms, whole in CYCLE.findall(ended.stdout)][1:num_cycles]
    row: Row = {
        **harness.described(case, "switch", "is_elsewhere"),
        "size": options.size,
        "share": float(end[1]) / 100,
        "iteration_ms": float(end[2]),
        "switching_ms": round(sum(ms for ms, _ in cycles) / len(cycles), 1),
        "cycles": num_cycles,
        "freed": CYCLE.findall(ended.stdout)[num_cycles - 1][0],
    }
    if case.switch == "to" and (mine := done.get(case.name.replace("to", "sleep"))):
        row["sleep_times_less"] = round(row["switching_ms"] / mine["switching_ms"], 2)
        if ON_GPU:
            row["must"] = {"share_of_sleep": at_most(row["share"], mine["share"])}
    done[case.name] = row
    return row


def main() -> None:
    options = harness.parse(harness.command(__doc__), CASES)
    done: dict[str, Row] = {}
    harness.run("rl_loop", options.cases, lambda case: measure(case, options, done))


if __name__ == "__main__":
    main()
