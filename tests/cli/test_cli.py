# SPDX-License-Identifier: Apache-2.0
"""The command line: what it answers, what it refuses and how it says so, and that the docs' commands exist."""

import dataclasses
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offstage import OffloadConfig, make_plan
from offstage.cli import main as cli
from offstage.cli.plan import parse, usage
from offstage.config import ActivationConfig, Placement
from offstage.errors import ConfigError, HostMemoryError
from offstage.planning.plan import Plan
from offstage.train import loop
from offstage.train.config import SECTIONS, load_config
from offstage.train.model import SIZES, num_parameters
from offstage.train.settings import field_types
from tests.support.machines import desktop, machine, node

ROOT = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder with two machines in it."""
    monkeypatch.chdir(tmp_path)
    Path("node.json").write_text(node().to_json())
    Path("desktop.json").write_text(desktop().to_json())
    return tmp_path


@pytest.fixture
def trained(monkeypatch):
    """`offstage train` without training; the list has the configurations."""
    configs = []

    def run(config):
        configs.append(config)
        return SimpleNamespace(stopped_by=None)

    monkeypatch.setattr(loop, "run", run)
    return configs


def failing(monkeypatch, error):
    def run(config):
        raise error

    monkeypatch.setattr(loop, "run", run)


def status_of(words):
    """Of the process: `--help` ends it inside tyro."""
    try:
        return cli.main(words)
    except SystemExit as end:
        return end.code or 0


# Help #


def test_overview(capsys):
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == overview
    for command in cli.COMMANDS:
        assert re.search(rf"^  {command} ", overview, re.MULTILINE)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_examples(command, capsys):
    assert status_of([command, "--help"]) == 0
    found = capsys.readouterr().out
    assert f"offstage {command}" in found
    assert len(found.splitlines()) > 5


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    for section, cls in SECTIONS.items():
        for name in field_types(cls):
            assert f"--{section}.{name.replace('_', '-')} ".replace("--.", "--") in text
    assert "``" not in text
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
    assert "Continue from the newest complete checkpoint in the folder" in words


def test_help_shows_what_a_file_says(elsewhere, capsys):
    Path("run.toml").write_text("[run]\nsteps = 12345\n")
    with pytest.raises(SystemExit):
        cli.main(["train", "--config", "run.toml", "--help"])
    assert "(default: 12345)" in capsys.readouterr().out


def test_as_a_module():
    """`python -m offstage` is the command; what it refuses has no traceback."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = [sys.executable, "-m", "offstage", "trian"]
    found = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert (
        found.stderr == "offstage: error: offstage has no command 'trian'. Did you mean train? See offstage --help.\n"
    )
    assert found.stdout == ""


@pytest.mark.parametrize("words", ["--help", "train --help"])
def test_help_needs_no_torch(words):
    """Importing it takes seconds of CPU."""
    code = (
        "import resource, sys\n"
        "from offstage.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('torch' in sys.modules, used.ru_utime + used.ru_stime, file=sys.stderr)\n"
    )
    run = [sys.executable, "-c", code, *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert "offstage train" in found.stdout
    imported, seconds = found.stderr.split()
    assert imported == "False"
    assert float(seconds) < 1.0  # torch alone takes more


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("offstage 0.")


# Errors #

REFUSED = {
    "an unknown flag": (["train", "--run.stps", "5"], "Did you mean --run.steps?"),
    "an unknown flag of doctor": (["doctor", "--jsno"], "Did you mean --json?"),
    "a wrong value": (["train", "--run.steps", "five"], "expects a whole number; found 'five'"),
    "a contradiction": (["train", "--offload.fraction=0", "--offload.window=1GiB"], "contradicts"),
    "no such file": (["train", "--config", "none.toml"], "No such file or directory"),
    "a file without a name": (["train", "--config"], "--config expects 1 value"),
    "no model": (["plan"], "expects a model; found none"),
    "an unknown model": (["plan", "2.7"], "Did you mean 2.7B?"),
    "two models": (["plan", "1M", "7B"], "at most 1 word without a flag; found '7B'"),
    "no run": (["report", "runs/none"], "found nothing at runs/none"),
    "no question": (["bench", "bit"], "Did you mean bits?"),
    "arguments for all": (["bench", "all", "--size", "small"], "expects no arguments"),
    "two budgets": (["plan", "1M", "--budget=1GiB", "--offload.device-peak=1GiB"], "are the same thing"),
    "two numbers of devices": (["plan", "1M", "--devices=2", "--world.data=2"], "contradicts --world.data=2"),
    "devices that do not divide": (["plan", "1M", "--devices=3", "--world.tensor=2"], "Use 4"),
    "no devices": (["plan", "1M", "--devices=0"], "--devices expects a whole number of at least 1"),
    "an impossible budget": (["plan", "7B", "--machine=desktop.json", "--budget=24GiB"], "Raise it above 26.1 GiB"),
    "a model too large": (["plan", "20B", "--machine=desktop.json"], "GiB of host memory per rank; found 120.0 GiB"),
    "no machine": (["plan", "1M", "--machine=none.json"], "could not read none.json"),
    "another file for a machine": (["plan", "1M", "--machine=shapes.json"], "expects what Machine.to_json wrote"),
    "not JSON": (["plan", "broken.json"], "broken.json is expected to be JSON"),
    "a wrong workload": (["plan", "1M", "--workload.micro-batches=0"], "workload: Workload expects"),
    "a wrong world": (["plan", "1M", "--world.tensor=0"], "world: World expects"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_message_and_no_traceback(name, elsewhere, capsys, monkeypatch):
    Path("broken.json").write_text("{")
    Path("shapes.json").write_text('{"weight": [4, 4]}')
    monkeypatch.setattr(cli, "_measured", lambda **_: desktop())
    words, says = REFUSED[name]
    status = cli.main(words)
    found = capsys.readouterr()
    assert says in found.err
    assert found.err.startswith("offstage: error: ")
    assert found.err.count("\n") == 1
    assert found.out == ""
    assert status == (1 if name == "a model too large" else 2)


def test_failures_of_a_run(trained, monkeypatch, capsys):
    for error, status, says in [
        (HostMemoryError("The state needs 3.0 TiB of host memory."), 1, "needs 3.0 TiB"),
        (ConfigError("data.paths expects files; found none."), 2, "data.paths expects files"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl"), 1, "runs/x/metrics.jsonl: No space"),
        (torch.OutOfMemoryError("Tried to allocate 2 GiB.\nmore lines"), 1, "Tried to allocate 2 GiB. Make room"),
        (KeyboardInterrupt(), 130, "stopped"),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), 2, "pip install 'offstage[cli]'"),
    ]:
        failing(monkeypatch, error)
        assert cli.main(["train"]) == status
        found = capsys.readouterr().err
        assert says in found
        assert found.count("\n") == 1


def test_notes_of_an_error_are_said(monkeypatch, capsys):
    error = torch.OutOfMemoryError("Tried to allocate 2 GiB.")
    error.add_note("Call optimizer.replan(device_budget='3GiB').")
    failing(monkeypatch, error)
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err.endswith("Tried to allocate 2 GiB. Call optimizer.replan(device_budget='3GiB').\n")


def test_errors_of_our_own_are_not_hidden(monkeypatch):
    failing(monkeypatch, ModuleNotFoundError("No module named 'offstage.nothing'", name="offstage.nothing"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train"])
    failing(monkeypatch, AssertionError("a defect"))
    with pytest.raises(AssertionError):
        cli.main(["train"])


def test_tracebacks_on_request(monkeypatch):
    monkeypatch.setenv("OFFSTAGE_TRACEBACK", "1")
    failing(monkeypatch, ConfigError("no"))
    with pytest.raises(ConfigError):
        cli.main(["train"])


def test_ranks_say_who_they_are(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert cli.main(["train", "--zzz"]) == 2
    assert capsys.readouterr().err.startswith("offstage (rank 3): error: ")


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["train", "--run.steps", "3"]) == 2
    assert "found no module 'tyro'" in capsys.readouterr().err


def test_nobody_reads_on(monkeypatch, capsys, tmp_path):
    """`offstage plan 7B | head` ends quietly."""

    def closed(text):
        raise BrokenPipeError

    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(cli, "_write", closed)
        assert cli.main(["--version"]) == 1
    assert capsys.readouterr().err == ""


# Train #


def test_train(trained, elsewhere):
    Path("run.toml").write_text("[run]\nsteps = 12\n[model]\nsize = '10M'\n")
    assert cli.main(["train", "--config", "run.toml", "--run.steps=34"]) == 0
    (config,) = trained
    assert (config.run.steps, config.model.size) == (34, "10M")


def test_show(trained, elsewhere, capsys):
    assert cli.main(["train", "--offload.fraction", "0.5", "--show"]) == 0
    Path("run.toml").write_text(capsys.readouterr().out)
    assert load_config(Path("run.toml"), []) == load_config(None, ["--offload.fraction", "0.5"])
    assert not trained


def test_show_names_every_setting(elsewhere, capsys):
    """Those that are not set are comments; with a value in place of what they expect, they are settings."""
    assert cli.main(["train", "--show"]) == 0
    shown = capsys.readouterr().out
    for section, cls in SECTIONS.items():
        begin = shown.index(f"[{section}]\n") if section else 0
        table = shown[begin:].split("\n\n")[0]
        for name, default in {one.name: one.default for one in dataclasses.fields(cls)}.items():
            assert re.search(rf"^{'# ' if default is None else ''}{name} = .+$", table, re.MULTILINE)
    assert "# device_budget = (a size such as 8GiB, in quotes)\n" in shown
    Path("run.toml").write_text(shown.replace("# layers = (a whole number)", "layers = 3"))
    assert load_config(Path("run.toml"), []) == load_config(None, ["--model.layers=3"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_runs_are_not_done(number, monkeypatch):
    monkeypatch.setattr(loop, "run", lambda config: SimpleNamespace(stopped_by=number.name))
    assert cli.main(["train"]) == 128 + number


def test_a_run_and_its_report(elsewhere, capsys):
    """Nothing replaced: two steps, and the page about them."""
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 40)
    words = "--model.layers 1 --model.width 32 --model.heads 2 --model.kv-heads 1 --model.hidden 32 --data.sequence 16"
    words += " --data.paths text.txt --run.steps 2 --run.observe-step 1 --run.folder it --run.eval-batches 1"
    words += " --offload.min-bytes 0 --offload.chunk-bytes 16KiB"
    assert cli.main(["train", *words.split()]) == 0
    assert len(Path("it/metrics.jsonl").read_text().splitlines()) == 2
    assert load_config(Path("it/config.toml"), []).run.steps == 2
    capsys.readouterr()
    assert cli.main(["report", "it"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


# Plan #


def test_plan(elsewhere, capsys):
    assert cli.main(["plan", "1B", "--machine", "desktop.json", "--budget", "8GiB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"1B for a 24 GiB card: {num_parameters(SIZES['1B']):,} parameters in bfloat16\n")
    for part in ("exposed", "considered", "To train with it:", "offstage.offload(optimizer, model, device_budget="):
        assert part in text


def test_plan_as_json(elsewhere, capsys):
    assert cli.main(["plan", "1B", "--machine", "desktop.json", "--budget", "8GiB", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    question = parse(["1B", "--machine", "desktop.json", "--offload.device-peak", "8GiB"])
    assert plan == question.answer()
    assert plan.prediction.device_peak_bytes <= 8 << 30
    assert plan.bytes_of(Placement.STREAMED) > 0


def test_plan_of_this_machine(elsewhere):
    question = parse(["1M"], lambda: machine(device_name="measured"))
    assert question.machine.device_name == "measured"
    assert question.world.ranks == 1


def test_plan_follows_settings(elsewhere):
    words = "7B --machine desktop.json --dtype float32 --offload.update-on host --workload.forward-ms 700 "
    words += "--workload.backward-ms 1500 --workload.clips"
    question = parse(words.split())
    assert (question.config.update_on, question.workload.clips, question.workload.forward_ms) == ("host", True, 700.0)
    assert {param.dtype for param in question.sizes.values()} == {torch.float32}
    assert parse(["7B", "--machine", "desktop.json"]).workload is None


def test_plan_for_devices(elsewhere):
    world = parse(["7B", "--machine=node.json", "--devices=16"]).world
    assert (world.data, world.ranks_per_host, world.shard_weights) == (16, 8, True)
    world = parse(["7B", "--machine=node.json", "--devices=16", "--world.pipeline=2", "--world.ranks-per-host=4"]).world
    assert (world.data, world.pipeline, world.ranks_per_host) == (8, 2, 4)
    world = parse(["7B", "--machine=node.json", "--devices=2", "--world.shard-state", "false"]).world
    assert (world.data, world.shard_state, world.shard_weights) == (2, False, False)
    alone = parse(["7B", "--machine=desktop.json", "--devices=1"]).world
    assert (alone.ranks, alone.shard_weights) == (1, False)


def test_plan_of_a_training_run(elsewhere):
    settings = '[model]\nsize = "50M"\ndtype = "float32"\n[offload]\nhost_budget = "1GiB"\nmin_bytes = 0\n'
    settings += "[data]\nmicro_batches = 4\n[parallel]\nstages = 2\n"
    Path("run.toml").write_text(settings)
    question = parse(["run.toml", "--machine=desktop.json", "--offload.min-bytes=1KiB", "--devices=2"])
    assert question.num_parameters == num_parameters(SIZES["50M"])
    assert (question.config.host_budget, question.config.min_bytes) == (1 << 30, 1024)
    assert (question.world.pipeline, question.world.data, question.workload.micro_batches) == (2, 1, 4)
    assert {param.dtype for param in question.sizes.values()} == {torch.float32}
    assert f"--config={'run.toml'}" in usage(question, question.answer())


def test_plan_of_shapes(elsewhere, capsys):
    shapes = {f"layers.{i}.weight": [4096, 4096] for i in range(8)} | {"norm": 4096}
    Path("shapes.json").write_text(json.dumps(shapes))
    words = ["shapes.json", "--machine=desktop.json", "--offload.master-weights=split"]
    question = parse(words)
    assert question.num_parameters == 8 * 4096**2 + 4096
    # 10 bytes of state: the settings' formats count for shapes too
    assert sum(size.state_bytes for size in question.answer().sizes) == 10 * question.num_parameters
    assert cli.main(["plan", *words]) == 0
    assert "offstage train" not in capsys.readouterr().out  # which has no such model


def test_plan_on_what_doctor_wrote(elsewhere):
    Path("doctor.json").write_text(json.dumps({"findings": [], "machine": dataclasses.asdict(node())}))
    assert parse(["1M", "--machine", "doctor.json"]).machine == node()


def test_usage_makes_the_plan(elsewhere):
    """What is printed to train with it gives the same placements."""
    question = parse(["1B", "--machine=desktop.json", "--budget=8GiB", "--offload.update-on=auto"])
    plan = question.answer()
    python, command = usage(question, plan).splitlines()
    keywords = eval(f"dict({python.removeprefix('offstage.offload(optimizer, model, ').removesuffix(')')})")
    again = make_plan(question.sizes, question.machine, OffloadConfig(**keywords))
    assert again.placements == plan.placements
    words = shlex.split(command)
    assert words[:2] == ["offstage", "train"]
    assert load_config(None, words[2:]).offload == OffloadConfig(**keywords)


def test_plan_with_weights_on_the_host(elsewhere, capsys):
    """7B in 24 GiB, where weights and gradients alone take more; what is printed makes the same plan."""
    words = ["7B", "--machine=desktop.json", "--workload.other-bytes=4GiB", "--offload.master-weights=split"]
    assert cli.main(["plan", *words]) == 2
    assert "--weights host" in capsys.readouterr().err
    assert cli.main(["plan", *words, "--weights", "host"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"weights +13\.0 GiB on the host, at most \d\.\d GiB on the device", text)
    assert "offstage.offload(optimizer, model, weights='host', master_weights='split')" in text
    assert "--offload.weights=host" in text
    for given, found in (("0.5", 0.5), ("8GiB", 8 << 30), ("device", "device")):
        question = parse([*words, "--weights", given])
        assert question.config.weights == found
        assert parse([*words, f"--offload.weights={given}"]).config == question.config
    question = parse([*words, "--weights=8GiB", "--budget=22GiB", "--offload.update-in-backward"])
    plan = question.answer()
    assert 0 < plan.host_weight_bytes < 13 << 30
    python, command = usage(question, plan).splitlines()
    assert "weights='8GiB'" in python
    assert load_config(None, shlex.split(command)[2:]).offload.weights == 8 << 30
    with pytest.raises(ConfigError, match=r"--weights and --offload.weights are the same thing"):
        parse([*words, "--weights=host", "--offload.weights=host"])
    with pytest.raises(ConfigError, match=r"expected one rank, found 2"):
        parse([*words, "--weights=host", "--devices=2"]).answer()


def test_plan_of_a_training_run_with_weights_on_the_host(elsewhere):
    Path("run.toml").write_text('[model]\nsize = "50M"\n[offload]\nweights = 0.5\n')
    question = parse(["run.toml", "--machine=desktop.json"])
    assert question.config.weights == 0.5
    assert 0 < question.answer().host_weight_bytes < 2 * num_parameters(SIZES["50M"])
    assert parse(["run.toml", "--machine=desktop.json", "--weights=host"]).config.weights == "host"


# Bench #


def test_questions(capsys):
    assert cli.main(["bench"]) == 0
    listed = capsys.readouterr().out
    known = cli.questions(ROOT)
    assert {"bits", "overlap", "plans"} <= set(known)
    assert not {"common", "workload", "plot"} & set(known)
    for name, text in known.items():
        assert name in listed
        assert text in listed


def test_asking(tmp_path, monkeypatch, capfd):
    """Arguments, the first failure, and nothing after it."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "common.py").write_text('"""Shared."""\n')
    (folder / "a.py").write_text('"""Is it?"""\nimport sys\nsys.stdout.write(f"a {sys.argv[1:]}")\n')
    (folder / "b.py").write_text('"""Or not?"""\nraise SystemExit(7)\n')
    (folder / "c.py").write_text('"""Asked after a failure?"""\nimport sys\nsys.stdout.write("c")\n')
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "x/y/z/v/w.py"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "a", "--size", "small"]) == 0
    assert capfd.readouterr().out == "a ['--size', 'small']"
    assert cli.main(["bench", "all"]) == 7
    assert capfd.readouterr().out == "a []"


def test_no_checkout(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(cli, "__file__", str(elsewhere / "x/y/z/v/w.py"))
    assert cli.main(["bench"]) == 2
    assert "Clone the repository" in capsys.readouterr().err


# Docs #

PAGES = ["quick_start.md", "cookbook.md", "flags.md", "training_data.md"]


def commands(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    return [line for line in lines if line.startswith("offstage ") or " -m offstage " in line]


DOCUMENTED = [command for page in PAGES for command in commands(page)]


def test_docs_have_commands():
    assert len(DOCUMENTED) > 10
    assert {shlex.split(command.split("offstage ", 1)[1])[0] for command in DOCUMENTED} >= {
        "doctor",
        "plan",
        "train",
        "report",
    }


@pytest.mark.parametrize("command", DOCUMENTED)
def test_documented_commands(command, trained, elsewhere, monkeypatch):
    """They parse, and what they plan fits a desktop; training and reports are not made here."""
    (toml,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/quick_start.md").read_text(), re.DOTALL)
    Path("run.toml").write_text(toml)
    Path("runs/default").mkdir(parents=True)
    monkeypatch.setattr(cli, "_measured", lambda **_: desktop())
    monkeypatch.setattr("offstage.train.report.write_report", lambda folder: folder / "report.html")
    words = shlex.split(command.split("offstage ", 1)[1])
    assert status_of(words) == 0


@pytest.mark.parametrize("page", PAGES)
def test_documented_flags(page):
    known = {f"--{section}.{name.replace('_', '-')}" for section, cls in SECTIONS.items() for name in field_types(cls)}
    sections = "|".join(filter(None, SECTIONS))
    named = set(re.findall(rf"--(?:{sections})\.[\w-]+", (ROOT / "docs" / page).read_text()))
    assert named
    assert named <= known


def test_every_offload_setting_is_on_the_page_of_names():
    """Users of other systems find all of our settings there, except those that only we have."""
    text = (ROOT / "docs/flags.md").read_text()
    ours_alone = {"device_budget", "device_peak", "host_budget", "host_fraction", "overlap_forward"}
    missing = {one.name for one in dataclasses.fields(OffloadConfig) if one.name not in text}
    assert missing <= ours_alone


def test_names_of_activation_settings():
    """What the pages pass to `offload_activations` is a field."""
    known = {one.name for one in dataclasses.fields(ActivationConfig)}
    text = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    named = {
        name
        for call in re.findall(r"offload_activations\(model, ([^)]*)\)", text)
        for name in re.findall(r"(\w+)=", call)
    }
    assert {"layers", "weights"} <= named <= known
