# SPDX-License-Identifier: Apache-2.0
"""The command `offstage`, also `python -m offstage`: train, doctor, plan, report, export, bench.

Each command is a function from its arguments to an exit status. Errors that a user can cause (a wrong setting, a full
disk, a model that does not fit) end with one message on stderr and no traceback; OFFSTAGE_TRACEBACK=1 shows it.

    0           done
    1           failed, or `doctor` found something broken
    2           a setting, a name or a file that cannot be used
    130, 143    stopped by Ctrl-C or SIGTERM; a training run has saved, and the same command continues it
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offstage import ConfigError, OffstageError, __version__
from offstage.train.fit_settings import FitSettings
from offstage.train.flags import missing_extra, parse_sections, positional
from offstage.train.settings import field_types, nearest

if TYPE_CHECKING:  # commands import what they use: torch takes seconds, and most help needs none
    from offstage import Machine
    from offstage.cli.doctor import Finding
    from offstage.cli.plan import Question

EXTRA = ("rich", "tyro")
"""The packages of the extra `cli`."""

OVERVIEW = """\
offstage keeps training state off the accelerator until it is needed.

usage: offstage COMMAND [ARGUMENTS]      offstage COMMAND --help explains one

  doctor    what this machine can do, what is wrong with it, and how to fix that
  plan      what fits, what it costs and who should update, before anything is allocated
  train     train a transformer on text: one process, or many under torchrun
  report    one HTML page about a run, or about two; a trace for Perfetto
  export    the weights of a run as safetensors, for transformers
  bench     the questions of benchmarks/, in a checkout

A first run, which needs no GPU and no data:

  offstage doctor
  offstage train --run.steps 100
  offstage report runs/default
"""

TRAIN_HELP = """\
Train a decoder-only transformer on text, as bytes or tokens, with its optimizer state off the device.

  offstage train                                     1M parameters, 300 steps, the standard library's source
  offstage train --data.paths books/ --model.size 150M --activations.mode checkpoint
  offstage train --model.size 1B --device-peak 24GiB in 24 GiB, as fast as that goes: it measures and decides
  offstage train --data.paths rows.jsonl --data.column text --data.tokenizer FOLDER
  offstage train --lora.rank 16                      adapters only; the model's own weights are frozen
  offstage train --run.track tensorboard wandb       metrics for these too
  offstage train --offload.overlap-forward --offload.update-in-backward
  offstage train --offload.fraction 0                everything stays on the device
  offstage train --model.weights llama-1b/           a transformers model, from its safetensors
  offstage train --show > run.toml                   all settings, to edit
  offstage train --config run.toml --run.steps 500   a file, and flags over it
  torchrun --nproc-per-node 2 -m offstage train      FSDP2; --parallel.stages 2 for a pipeline

A stopped run saves; started again with the same --run.folder, it continues from there, with the same bits."""

REPORT_HELP = """\
Write one self-contained HTML page about a run: what offload saved and cost, loss, memory by owner, lanes, link and CPU
use, receipt, plan. Of two runs: what differs in settings, time, memory and losses.

  offstage report runs/default                       writes runs/default/report.html
  offstage report runs/a runs/b                      both in one page: runs/a/compare.html
  offstage report runs/default --trace trace.json    the page, and the observed step for https://ui.perfetto.dev"""

EXPORT_HELP = """\
Write the weights of a run's newest checkpoint to a new folder, as safetensors.

  offstage export runs/default llama-tuned             AutoModelForCausalLM.from_pretrained("llama-tuned") loads it
  offstage export runs/default llama-tuned --step 200  of an earlier checkpoint

A run with --model.weights or --model.transformers gives a folder that transformers loads: config.json, weights, and the
tokenizer if one was used. A run with --model.size gives the weights and the run's settings; transformers has no such
model. Adapters of LoRA are added to their weights; of a run with --model.weights, adapter/ beside them has the adapters
alone, for peft. Needs no accelerator. The folder appears when it is complete."""

DOCTOR_HELP = """\
Look at accelerator, link, memory, pinning, CPUs, limits and versions; say what is wrong and how to fix it.

  offstage doctor                     the exit status is 1 if something is broken
  offstage doctor --json > node.json  the same for programs; `offstage plan --machine node.json` reads it"""


BENCH_HELP = """\
usage: offstage bench                          the questions there are
       offstage bench QUESTION [ARGUMENTS]     ask one; what follows is for it, such as --size small
       offstage bench all                      ask all of them, one after the other

Rows are appended to benchmarks/results, or to $OFFSTAGE_RESULTS. Most questions are about an accelerator; many have
--size small, which runs them on a tiny model anywhere, to see whether they run."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(FitSettings):
    """How much memory the run may take, and where the settings come from."""

    config: str | None = None
    """A TOML file with a table per section; flags go over it. `config.toml` in a run's folder is one."""
    show: bool = False
    """Print all settings as TOML and stop: nothing is trained."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Arguments of `offstage report`."""

    folders: tuple[str, ...] = positional(("runs/default",))
    """The folder of a run, or of two runs to be compared."""
    trace: str | None = None
    """A file to write: the observed step as trace events, for Perfetto. Of one run."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Arguments of `offstage export`."""

    run: str | None = positional(None)
    """The folder of a run."""
    folder: str | None = positional(None)
    """The folder to write: a new one, or an empty one."""
    step: int | None = None
    """The checkpoint after this step. Without it: the newest."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Arguments of `offstage doctor`."""

    json: bool = False
    """Print everything as JSON, the measured machine too."""
    quick: bool = False
    """Skip the measurements and the trial steps."""
    refresh: bool = False
    """Measure again instead of using cached rates."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if os.environ.get("OFFSTAGE_TRACEBACK"):
        return _run(arguments)
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader of the output has closed it
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
    except OffstageError as error:
        _say(f"error: {error}")
        return 1
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        # The optimizer adds what it knows about a budget that was too large as a note.
        known = " ".join(getattr(error, "__notes__", ())) or (
            "Make room with a smaller data.batch, with activations.mode=checkpoint, or with less state on the device: "
            "`offstage plan` says what fits."
        )
        _say(f"error: The device is full: {_first_line(error)} {known}")
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
        import torch

        _write(f"offstage {__version__}, torch {torch.__version__}\n")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        raise ConfigError(f"offstage has no command {command!r}. {nearest(command, COMMANDS)} See offstage --help.")
    return COMMANDS[command](rest)


# Commands #


def train(arguments: Sequence[str]) -> int:
    from offstage.train.config import SECTIONS, build, read_toml, to_toml

    path = _value_of("--config", arguments)  # first: --help shows its values as defaults
    values = read_toml(Path(path)) if path else {}
    sections = {**SECTIONS, "": TrainOptions}
    values = parse_sections(sections, values, arguments, prog="offstage train", description=TRAIN_HELP)
    above = values.pop("", {})
    options = TrainOptions(**above)
    config = build({**values, "": {name: above[name] for name in field_types(FitSettings) if name in above}})
    if options.show:
        _write(to_toml(config))
        return 0
    from offstage.train.loop import run

    name = run(config).stopped_by
    return 128 + signal.Signals[name] if name else 0  # as shells report signals: the run is not finished


def doctor(arguments: Sequence[str]) -> int:
    found = parse_sections({"": DoctorOptions}, {}, arguments, prog="offstage doctor", description=DOCTOR_HELP)
    options = DoctorOptions(**found.get("", {}))
    import torch

    from offstage.cli.doctor import judge, judge_rates, trial
    from offstage.cli.system_info import read_system_info

    info = read_system_info()
    findings, machine = judge(info), None
    if not options.quick:
        machine = _measured(refresh=options.refresh)
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        findings += [*judge_rates(machine, info), trial(device)]
    if options.json:
        content = {
            "findings": [dataclasses.asdict(one) for one in findings],
            "machine": dataclasses.asdict(machine) if machine else None,
            "surroundings": dataclasses.asdict(info),
        }
        _write(json.dumps(content, indent=2) + "\n")
    else:
        _show_findings(findings)
    return int(any(one.verdict == "broken" for one in findings))


def plan(arguments: Sequence[str]) -> int:
    from offstage.cli.plan import parse, usage

    question = parse(arguments, _measured)
    if question.within is not None:
        return _plan_within(question)
    found = question.answer()
    if question.json:
        _write(found.to_json() + "\n")
        return 0
    whose = "" if question.world.ranks == 1 else f", the largest share of {question.world.ranks} ranks"
    parameters = f"{question.num_parameters:,} parameters in {str(question.dtype).removeprefix('torch.')}"
    _write(f"{question.model} for {question.machine.device_name}: {parameters}{whose}\n\n")
    _write(f"{question.about_machine()}{found}\n\nTo train with it:\n")
    _write("".join(f"  {line}\n" for line in usage(question, found).splitlines()))
    return 0


def _plan_within(question: Question) -> int:
    from offstage.cli.within import usage
    from offstage.train.model import SIZES

    found = question.within
    assert found is not None
    if question.json:
        _write(found.to_json() + "\n")
        return 0
    parameters = f"{question.num_parameters:,} parameters in {str(question.dtype).removeprefix('torch.')}"
    _write(f"{question.model} for {question.machine.device_name}: {parameters}\n\n{question.about_machine()}{found}\n")
    lines = usage(question.model, question.flags, found, is_size=question.model in SIZES).splitlines()
    _write("\nTo train with it:\n" + "".join(f"  {line}\n" for line in lines))
    return 0


def report(arguments: Sequence[str]) -> int:
    found = parse_sections({"": ReportOptions}, {}, arguments, prog="offstage report", description=REPORT_HELP)
    options = ReportOptions(**found.get("", {}))
    folders = [Path(folder) for folder in options.folders]
    if not 1 <= len(folders) <= 2 or (options.trace is not None and len(folders) > 1):
        takes = "one folder with --trace" if options.trace is not None else "the folder of a run, or of two"
        raise ConfigError(f"offstage report expects {takes}; found {len(folders)}. See offstage report --help.")
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"offstage report expects the folder of a run; found nothing at {folder}. Train first, or give the "
                "run.folder of that run."
            )
    from offstage.train import report as pages

    if len(folders) == 2:
        _write(f"{pages.write_comparison(*folders)}\n")
        return 0
    if options.trace is not None:
        _write(f"{pages.write_trace(folders[0], Path(options.trace))}\n")
    _write(f"{pages.write_report(folders[0])}\n")
    return 0


def export(arguments: Sequence[str]) -> int:
    found = parse_sections({"": ExportOptions}, {}, arguments, prog="offstage export", description=EXPORT_HELP)
    options = ExportOptions(**found.get("", {}))
    if options.run is None or options.folder is None:
        raise ConfigError(
            "offstage export expects the folder of a run and a folder to write, such as `offstage export runs/default "
            f"tuned`; found {'none' if options.run is None else f'only {options.run}'}."
        )
    from offstage.config import format_size
    from offstage.train.export import export as write

    done = write(Path(options.run), Path(options.folder), options.step)
    _write(
        f"{done.folder}: {done.parameters:,} parameters of {done.checkpoint}, {format_size(done.nbytes)} in "
        f"{', '.join(done.formats)}\n"
    )
    if done.merged:
        _write(f"Adapters were added to {done.merged} matrices.\n")
    if done.package is not None:
        _write(f"Load it: transformers.AutoModelForCausalLM.from_pretrained({str(done.folder)!r})\n")
        if done.adapter is not None:
            _write(f"The adapters alone: peft.PeftModel.from_pretrained(model, {str(done.adapter)!r})\n")
    else:
        _write(
            "It has the run's settings beside the weights; from_pretrained cannot load it, because the run's model is "
            "offstage's own. Train with --model.weights or --model.transformers for a model of transformers.\n"
        )
    return 0


def bench(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        _write(BENCH_HELP + "\n")
        return 0
    root = _checkout()
    if not arguments:
        known = questions(root)
        _write("".join(f"{name:<14} {text}\n" for name, text in known.items()))
        _write("\nAsk one: offstage bench QUESTION. See offstage bench --help.\n")
        return 0
    return _ask(root, arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": doctor,
    "plan": plan,
    "train": train,
    "report": report,
    "export": export,
    "bench": bench,
}


# Benchmarks #


def _checkout() -> Path:
    """The folder with `benchmarks/` in it: the checkout of this package, or the working directory."""
    for folder in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (folder / "benchmarks/common.py").is_file():
            return folder
    raise ConfigError(
        "offstage bench expects the folder benchmarks/ of a checkout, which the installed package does not have; found "
        f"none in {Path.cwd()}. Clone the repository and run it there."
    )


def questions(root: Path) -> dict[str, str]:
    """Modules of `benchmarks/` whose docstring is a question, and the question."""
    found = {}
    for path in sorted((root / "benchmarks").glob("*.py")):
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        if first.endswith("?"):
            found[path.stem] = " ".join(first.split())
    return found


def _ask(root: Path, arguments: Sequence[str]) -> int:
    """Run one question, or all, and return the first exit status that is not 0."""
    name, *rest = arguments
    known = questions(root)
    if name != "all" and name not in known:
        raise ConfigError(f"offstage bench has no question {name!r}. {nearest(name, [*known, 'all'])}")
    if name == "all" and rest:
        raise ConfigError(
            f"offstage bench all expects no arguments; found {rest[0]!r}. Ask one question to pass it on."
        )
    paths = [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for one in known if name == "all" else [name]:
        command = [sys.executable, "-m", f"benchmarks.{one}", *rest]
        status = subprocess.run(command, cwd=root, env=environment, check=False).returncode
        if status:
            return status
    return 0


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
    """This machine's rates; a message on a terminal says why it takes seconds."""
    if sys.stderr.isatty():
        sys.stderr.write("measuring this machine: a few seconds, the first time\n")
    from offstage import measure_machine

    return measure_machine(refresh=refresh)


def _say(text: str) -> None:
    """One message on stderr, with the rank if there are several."""
    rank = (
        f" (rank {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ else ""
    )
    sys.stderr.write(f"offstage{rank}: {text}\n")


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))  # paths may hold any bytes
    sys.stdout.flush()


def _is_out_of_memory(error: RuntimeError) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


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
