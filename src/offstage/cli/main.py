# SPDX-License-Identifier: Apache-2.0
"""The command `offstage`, which is `python -m offstage` too: train, doctor, plan, report, bench.

Each command is a function from its arguments to an exit status. What a user can cause (a wrong setting, a full disk, a
model that does not fit) ends with one message on stderr and no traceback; OFFSTAGE_TRACEBACK=1 shows it all the same.

    0           done
    1           failed, or `doctor` found something broken
    2           a setting, a name or a file that cannot be used
    130, 143    stopped by Ctrl-C or SIGTERM; a training run has saved and goes on with the same command
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offstage import ConfigError, OffstageError, __version__
from offstage.train.flags import missing_extra, parse_sections, positional
from offstage.train.settings import nearest

if TYPE_CHECKING:
    from offstage.cli.doctor import Finding
    from offstage.planning.machine import Machine

EXTRA = ("matplotlib", "rich", "tyro")
"""The packages of the extra `cli`."""

OVERVIEW = """\
offstage keeps training state off the accelerator until it is needed.

usage: offstage COMMAND [ARGUMENTS]      offstage COMMAND --help explains one

  doctor    what this machine can do, what is wrong with it, and how to mend that
  plan      what fits, what it costs and who should update, before anything is allocated
  train     train a transformer on text: one process, or many under torchrun
  report    one HTML page about a run
  bench     the questions of benchmarks/, in a checkout

A first run, which needs no GPU and no data:

  offstage doctor
  offstage train --run.steps 100
  offstage report runs/default
"""

TRAIN_HELP = """\
Train a decoder-only transformer on the bytes of text files, with its optimizer state off the device.

  offstage train                                     1M parameters, 300 steps, the standard library's source
  offstage train --data.paths books/ --model.size 150M --activations.mode checkpoint
  offstage train --offload.overlap-forward --offload.update-in-backward
  offstage train --offload.fraction 0                everything stays on the device
  offstage train --show > run.toml                   all settings, to edit
  offstage train --config run.toml --run.steps 500   a file, and flags over it
  torchrun --nproc-per-node 2 -m offstage train      FSDP2; --parallel.stages 2 for a pipeline

Stopped, it saves; started again with the same --run.folder, it goes on from there, to the same bits."""

REPORT_HELP = """\
Write one self-contained HTML page about a run: loss, memory by owner, lanes, link and CPU use, receipt, plan.

  offstage report runs/default        writes runs/default/report.html"""

DOCTOR_HELP = """\
Look at accelerator, link, memory, pinning, CPUs, limits and versions; say what is wrong and how to mend it.

  offstage doctor                     the exit status is 1 if something is broken
  offstage doctor --json > node.json  the same for programs; `offstage plan --machine node.json` reads it"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Where the settings come from."""

    config: str | None = None
    """A TOML file with a table per section; flags go over it. `config.toml` in a run's folder is one."""
    show: bool = False
    """Print all settings as TOML and stop: nothing is trained."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What `offstage report` is asked."""

    folder: str = positional("runs/default")
    """The folder of a run."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What `offstage doctor` is asked."""

    json: bool = False
    """Print everything as JSON, the measured machine too."""
    quick: bool = False
    """Measure nothing and try nothing: only look."""
    refresh: bool = False
    """Measure again what was measured before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if os.environ.get("OFFSTAGE_TRACEBACK"):
        return _run(arguments)
    try:
        return _run(arguments)
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _say("stopped")
        return 130
    except ConfigError as error:
        _say(f"error: {error}")
        return 2
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        _say(f"error: {missing_extra(error)}")
        return 2
    except torch.OutOfMemoryError as error:
        # What the optimizer knows about a budget that was too large comes as a note.
        known = " ".join(getattr(error, "__notes__", ())) or (
            "Make room with a smaller data.batch, with activations.mode=checkpoint, or with less state on the device: "
            "`offstage plan` says what fits."
        )
        _say(f"error: The device is full: {_first_line(error)} {known}")
        return 1
    except OffstageError as error:
        _say(f"error: {error}")
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"error: {where}{error.strerror or error}")
        return 1


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _write(OVERVIEW)
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        _write(f"offstage {__version__}, torch {torch.__version__}\n")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        raise ConfigError(f"offstage has no command {command!r}. {nearest(command, COMMANDS)} See offstage --help.")
    return COMMANDS[command](rest)


# Commands #


def train(arguments: Sequence[str]) -> int:
    from offstage.train.config import SECTIONS, build, read_toml, to_toml

    path = _value_of("--config", arguments)  # first: what it says are the defaults that --help shows
    values = read_toml(Path(path)) if path else {}
    sections = {"": TrainOptions, **SECTIONS}
    values = parse_sections(sections, values, arguments, prog="offstage train", description=TRAIN_HELP)
    options = TrainOptions(**values.pop("", {}))
    config = build(values)
    if options.show:
        _write(to_toml(config))
        return 0
    from offstage.train.loop import run

    name = run(config).stopped_by
    return 128 + signal.Signals[name] if name else 0  # as shells count: whoever started it learns that more is to do


def doctor(arguments: Sequence[str]) -> int:
    from offstage.cli.doctor import judge, judge_rates, trial
    from offstage.cli.system_info import read_surroundings

    found = parse_sections({"": DoctorOptions}, {}, arguments, prog="offstage doctor", description=DOCTOR_HELP)
    options = DoctorOptions(**found.get("", {}))
    surroundings = read_surroundings()
    findings, machine = judge(surroundings), None
    if not options.quick:
        machine = _measured(refresh=options.refresh)
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        findings += [*judge_rates(machine, surroundings), trial(device)]
    if options.json:
        content = {
            "findings": [dataclasses.asdict(one) for one in findings],
            "machine": dataclasses.asdict(machine) if machine else None,
            "surroundings": dataclasses.asdict(surroundings),
        }
        _write(json.dumps(content, indent=2) + "\n")
    else:
        _show_findings(findings)
    return int(any(one.verdict == "broken" for one in findings))


def plan(arguments: Sequence[str]) -> int:
    from offstage.cli.plan import parse, usage

    question = parse(arguments, _measured)
    found = question.answer()
    if question.json:
        _write(found.to_json() + "\n")
        return 0
    whose = "" if question.world.ranks == 1 else f", the largest share of {question.world.ranks} ranks"
    _write(f"{question.model} for {question.machine.device_name}: {question.num_parameters:,} parameters{whose}\n\n")
    _write(f"{found}\n\nTo train with it:\n")
    _write("".join(f"  {line}\n" for line in usage(question, found).splitlines()))
    return 0


def report(arguments: Sequence[str]) -> int:
    found = parse_sections({"": ReportOptions}, {}, arguments, prog="offstage report", description=REPORT_HELP)
    options = ReportOptions(**found.get("", {}))
    if not Path(options.folder).is_dir():
        raise ConfigError(
            f"offstage report expects the folder of a run; found nothing at {options.folder}. Train first, or give the "
            "run.folder of that run."
        )
    from offstage.train.report import write_report

    _write(f"{write_report(Path(options.folder))}\n")
    return 0


def bench(arguments: Sequence[str]) -> int:
    from offstage.cli.bench import HELP, ask, checkout, questions

    if arguments and arguments[0] in ("-h", "--help"):
        _write(HELP + "\n")
        return 0
    root = checkout()
    if not arguments:
        known = questions(root)
        _write("".join(f"{name:<14} {text}\n" for name, text in known.items()))
        _write("\nAsk one: offstage bench QUESTION. See offstage bench --help.\n")
        return 0
    return ask(root, arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": doctor,
    "plan": plan,
    "train": train,
    "report": report,
    "bench": bench,
}


# Words in and out #


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The last value given for `flag`."""
    value = None
    for position, word in enumerate(arguments):
        if word == flag and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _measured(*, refresh: bool = False) -> Machine:
    """This machine, and a word to whoever waits for it."""
    from offstage.planning.machine import measure_machine

    if sys.stderr.isatty():
        sys.stderr.write("measuring this machine: a few seconds, the first time\n")
    return measure_machine(refresh=refresh)


def _say(text: str) -> None:
    """One message on stderr; ranks say who they are."""
    rank = (
        f" (rank {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ else ""
    )
    sys.stderr.write(f"offstage{rank}: {text}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _show_findings(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, table = Console(), Table(box=None, show_header=False, padding=(0, 1))
    marks = {"fine": "[green]fine[/]", "note": "[blue]note[/]", "slow": "[yellow]slow[/]", "broken": "[red]broken[/]"}
    for one in findings:
        text = Text(one.found)
        if one.advice:
            text.append(f"\n{one.advice}", style="dim" if one.verdict == "note" else "bold")
        table.add_row(marks[one.verdict], one.part, text)
    console.print(table)
    count = {verdict: sum(one.verdict == verdict for one in findings) for verdict in marks}
    if count["broken"]:
        console.print(f"\n{count['broken']} broken: see above.", style="red")
    elif count["slow"]:
        console.print(f"\nIt works. {count['slow']} slower than it could be: see above.", style="yellow")
    else:
        console.print("\nIt works.", style="green")
