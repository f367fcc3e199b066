# SPDX-License-Identifier: Apache-2.0
"""What a report says first, its limits and values at the pointer, two runs in one page, and the trace."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from offstage.cli import main as cli
from offstage.config import format_size
from offstage.errors import ConfigError
from offstage.train.config import RunSettings
from offstage.train.report import write_comparison, write_report, write_trace
from offstage.train.report.chart import Chart, bytes_axis, time_axis
from offstage.train.report.parts import MOST_PAGE_BYTES
from offstage.train.report.style import css
from tests.train.test_report import OBSERVED, STEPS, Page, train

SCRIPT = "</style><script>alert(1)</script>\" onload='x'"
PEAK, SIZE = 600 * 2**10, 2**20


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "offloaded", fraction=0.8, window="16KiB")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy, as if of an accelerator, with a peak."""
    shutil.copytree(finished, tmp_path / "run")
    change_rows(tmp_path / "run", device_peak_bytes=PEAK, exposed_ms=0.5)
    return tmp_path / "run"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_rows(folder: Path, **values: Any) -> None:
    path = folder / "metrics.jsonl"
    rows = [{**json.loads(line), **values} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def headline(folder: Path) -> dict[str, tuple[str, str]]:
    """The cells before everything else, by their first words."""
    source = Page(write_report(folder)).source
    found = re.search(r"</h1>\n<p[^>]*>[^<]*</p>\n<dl class=\"headline\">(.*?)</dl>", source)
    assert found is not None
    cells = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd><dd>([^<]*)</dd>", found[1])
    return {name: (value, note) for name, value, note in cells}


# The first line


def test_the_first_line_has_peaks_cost_and_net(run):
    change(run / "receipt.json", net_saved_bytes=SIZE)
    found = headline(run)
    assert list(found) == ["Peak on the device", "Cost per step", "Net saving"]
    assert found["Peak on the device"][0] == format_size(PEAK)
    assert found["Peak on the device"][1].startswith(f"without offload {format_size(PEAK + SIZE)}, calculated")
    assert found["Cost per step"] == ("0.50 ms", "waited for updates: 4.3% of a step of 12 ms")  # of 11.5 ms
    assert found["Net saving"][0] == format_size(SIZE)
    assert f"{SIZE / (PEAK + SIZE):.0%} of the peak without offload" in found["Net saving"][1]


def test_a_receipt_without_the_net_saving_still_tells_it(run):
    receipt, plan = (json.loads((run / name).read_text()) for name in ("receipt.json", "run.json"))
    receipt.pop("net_saved_bytes", None)
    plan.pop("net_saved_bytes", None)
    (run / "receipt.json").write_text(json.dumps(receipt))
    (run / "run.json").write_text(json.dumps(plan))
    state = sum(size["state_bytes"] for size in plan["plan"]["sizes"])
    assert headline(run)["Net saving"][0] == format_size(state - receipt["device_state_bytes"])
    change(run / "run.json", net_saved_bytes=3 * SIZE)  # as it was planned
    assert headline(run)["Net saving"][0] == format_size(3 * SIZE)


def test_offload_that_costs_memory_is_marked(run):
    change(run / "receipt.json", net_saved_bytes=-SIZE)
    value, note = headline(run)["Net saving"]
    assert value == f"−{format_size(SIZE)}"
    assert "take more of the device" in note
    assert "<div class=bad>" in (run / "report.html").read_text()


def test_a_run_without_offload_is_a_measurement_of_it(run):
    about = json.loads((run / "run.json").read_text())
    about["plan"] |= {"placements": ["resident"] * len(about["plan"]["sizes"]), "slots": 0}
    (run / "run.json").write_text(json.dumps(about))
    found = headline(run)
    assert found["Peak on the device"] == (format_size(PEAK), "measured without offload: all state is resident")
    assert found["Net saving"][0] == found["Cost per step"][0] == "none"


def test_advice_stands_above_the_figures(run):
    change(run / "receipt.json", advice="a lower fraction", fallbacks=["the window was cut", SCRIPT])
    page = Page(write_report(run))
    for text in ("a lower fraction", "the window was cut", SCRIPT):
        assert page.text.index(text) < page.text.index("Loss")
    assert "<script" not in page.source


# Limits


def test_budgets_are_lines_in_the_memory_figure(run):
    sizes = json.loads((run / "observed.json").read_text())["memory"]["bytes"]
    most, weights = max(map(sum, zip(*sizes.values(), strict=True))), max(sizes["weights"])
    budget = most - weights - 2048
    (run / "config.toml").write_text(f'[offload]\ndevice_budget = {budget}\ndevice_peak = "700KiB"\n')
    change(run / "run.json", machine={"device_bytes": 100 * PEAK})
    page = Page(write_report(run))
    figure = page.figure("Device memory by owner")
    heights = {}
    for path in figure.iter("path"):
        color = re.fullmatch(r"stroke:var\(--(warn|quiet)\)", path.get("style") or "")
        if color:
            heights[color[1], path.get("stroke-dasharray") is not None] = float((path.get("d") or "").split()[1])
    phases = json.loads((run / "observed.json").read_text())["phases"]
    names = [(one["name"], one["start_ms"], one["stop_ms"]) for one in phases]
    chart = Chart(time_axis("", phases[-1]["stop_ms"]), bytes_axis("", [700 * 2**10]), height=330, names=names)
    expected = {("warn", True): weights + budget, ("warn", False): 700 * 2**10}
    assert heights == {key: pytest.approx(chart.at_y(height), abs=0.2) for key, height in expected.items()}
    assert re.search(r"device_budget, for state above the weights\s+" + format_size(budget), page.text)
    assert "the device’s memory, above this figure" in page.text


@pytest.mark.parametrize("text", ["[" * 5000, "offload = 3", "[offload]\ndevice_budget = '9e999TiB'", "a = 1" * 20_000])
def test_a_config_that_is_none_has_no_limits(text, run):
    (run / "config.toml").write_text(text)
    assert "device_budget, for" not in Page(write_report(run)).text


# Values at the pointer


def test_every_figure_tells_its_values_without_scripts(run):
    page = Page(write_report(run))
    assert page.source.count('class="plot"') == page.source.count('class="hover"') >= 6
    assert 'type="radio"' in page.source
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    strips = dict(page.strips)
    assert dict(strips["step 3"])  # the last figure over steps
    losses = {title: dict(values) for title, values in page.strips if "training" in dict(values)}
    assert losses == {
        f"step {row['step']}": {"training": f"{row['loss']:.4f}"}
        | ({"evaluation": f"{row['eval_loss']:.4f}"} if "eval_loss" in row else {})
        for row in rows
    }
    memory = [dict(values) for _, values in page.strips if "together" in dict(values)]
    totals = zip(*json.loads((run / "observed.json").read_text())["memory"]["bytes"].values(), strict=True)
    assert [one["together"] for one in memory] == [format_size(sum(sizes)) for sizes in totals]
    groups = re.findall(r'<div class="hover" role="radiogroup" aria-label="([^"]*)"', page.source)
    assert len(set(groups)) == len(groups) == len(set(re.findall(r'type="radio" name="([^"]*)"', page.source)))


def test_long_runs_have_few_strips_with_ranges(run):
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": {i % 10}}}\n' for i in range(1, 2001)))
    strips = [(title, dict(values)) for title, values in Page(write_report(run)).strips if "training" in dict(values)]
    assert 60 <= len(strips) <= 72
    assert strips[0][0] == "steps 1 to 28"
    assert strips[0][1]["training"].endswith("(0.0000 to 9.0000)")


def test_nothing_is_wider_than_a_phone(run):
    """Every large figure has a narrow drawing; no rule asks for more than 19rem; wide tables scroll by themselves."""
    page = Page(write_report(run))
    assert page.source.count('<div class="narrow"><svg') == page.source.count('<div class="wide"><svg') == 3
    wide = [float(size) for size in re.findall(r"(?:[;{] *min-width:|minmax\(|columns:) *([\d.]+)rem", css())]
    assert max(wide) <= 19.0
    assert "min(19rem, 100%)" in css()
    for table in re.findall(r'<div class="scroll"[^>]*><table|<table class="grid"', page.source):
        assert table.startswith('<div class="scroll"')


# Two runs


@pytest.fixture
def pair(run: Path, tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(run, tmp_path / "other")
    return run, tmp_path / "other"


def test_two_equal_runs(pair):
    path = write_comparison(*pair)
    assert path == pair[0] / "compare.html"
    page = Page(path)
    assert f"Bit-identical losses in all {STEPS} steps" in page.text
    assert "No setting differs." in page.text
    assert {path.name for path in pair[1].iterdir()}.isdisjoint(("compare.html", "report.html"))
    assert len(page.svgs) >= 6


def test_what_differs_is_listed(pair):
    a, b = pair
    change_rows(b, step_ms=23.0, tokens_per_s=50.0)
    change_rows(a, tokens_per_s=100.0)
    rows = (b / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    rows[-1] = json.dumps({**last, "loss": last["loss"] + 0.25})
    (b / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (b / "config.toml").write_text('[model]\nsize = "2M"\n\n[run]\nfolder = "elsewhere"\nsteps = 12\n')
    change(b / "run.json", versions={"torch": SCRIPT})
    page = Page(write_comparison(a, b))
    assert f"first differ at step {STEPS}, and most at step {STEPS}, by 0.25" in page.text
    cells = re.findall(r'<tr><th scope="row">([^<]*)</th>((?:<td[^>]*>[^<]*</td>)+)</tr>', page.source)
    table = {name: re.findall(r"<td[^>]*>([^<]*)</td>", values) for name, values in cells}
    assert table["step"] == ["11.50 ms", "23.00 ms", "+11.50 ms (+100.0%)"]
    assert table["tokens per second"] == ["100", "50", "−50 (−50.0%)"]
    assert table["peak on the device"][2] == "equal"
    assert table["model.size"] == ["1M", "2M"]
    assert table["run.steps"] == ["not set", "12"]
    assert "run.folder" not in table
    assert "versions.torch" in table
    assert "<script" not in page.source
    assert SCRIPT in page.text


def test_a_measured_peak_without_offload(pair):
    a, b = pair
    about = json.loads((b / "run.json").read_text())
    about["plan"] |= {"placements": ["resident"] * len(about["plan"]["sizes"]), "slots": 0}
    (b / "run.json").write_text(json.dumps(about))
    change_rows(b, device_peak_bytes=2 * PEAK)
    said = f"{format_size(PEAK)} with offload, {format_size(2 * PEAK)} without. Both are measured."
    assert said in Page(write_comparison(a, b)).text


def test_two_runs_of_strangers(pair):
    """Whatever one of the files holds, there is one page of bounded size, and no script in it."""
    a, b = pair
    for name in ("config.toml", "run.json", "receipt.json", "observed.json", "metrics.jsonl"):
        kept = (b / name).read_bytes()
        for content in (
            b"",
            b"[1]",
            b"\xff" * 99,
            SCRIPT.encode(),
            b'{"step": 1, "loss": 1e59}\n',
            kept[: len(kept) // 2],
        ):
            (b / name).write_bytes(content)
            page = Page(write_comparison(a, b))
            assert "<script" not in page.source
            assert len(page.source.encode()) < MOST_PAGE_BYTES
        (b / name).write_bytes(kept)
    (b / "config.toml").write_text("[model]\n" + "".join(f"x{i} = {i}\n" for i in range(3000)))
    assert "and 2,96" in Page(write_comparison(a, b)).text  # more settings than are shown


# The trace


def test_the_trace_has_every_lane_phase_and_step(run, tmp_path):
    path = write_trace(run, tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    observed = json.loads((run / "observed.json").read_text())
    tracks = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    spans: dict[str, list[Any]] = {name: [] for name in tracks.values()}
    for one in events:
        if one["ph"] == "X":
            spans[tracks[one["tid"]]].append(one)
    assert [one["name"] for one in spans["steps"]] == [f"step {OBSERVED}"]
    assert [one["name"] for one in spans["phases"]] == ["forward", "backward", "step"]
    fetched = spans["fetch: host → device"]
    assert [(one["ts"], one["ts"] + one["dur"], one["args"]["bytes"]) for one in fetched] == [
        (pytest.approx(1e3 * start), pytest.approx(1e3 * stop), size)
        for start, stop, size in observed["lanes"]["fetch"]
    ]
    memory = [one["args"] for one in events if one["name"] == "device memory, bytes"]
    assert [one["weights"] for one in memory] == observed["memory"]["bytes"]["weights"]


def test_the_next_forward_is_the_next_step(run, tmp_path):
    observed = json.loads((run / "observed.json").read_text())
    last = observed["phases"][-1]["stop_ms"]
    observed["phases"].append({"name": "forward", "start_ms": last, "stop_ms": last + 5.0})
    (run / "observed.json").write_text(json.dumps({**observed, "end_ms": last + 5.0}))
    events = json.loads(write_trace(run, tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [(one["name"], one["ts"]) for one in events if one["ph"] == "X" and one["name"].startswith("step ")]
    assert steps == [(f"step {OBSERVED}", 0.0), (f"step {OBSERVED + 1}", pytest.approx(1e3 * last))]


def test_a_run_that_was_not_observed_has_no_trace(run, tmp_path):
    (run / "observed.json").unlink()
    with pytest.raises(ConfigError, match=r"expects an observed step; found none in .* Train for at least"):
        write_trace(run, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


# Commands


def test_the_documented_commands_exist(pair, monkeypatch, capsys):
    """Those of the page about the report, on two runs with the names that it uses."""
    monkeypatch.chdir(pair[0].parent)
    Path("runs").mkdir()
    for folder, name in ((pair[0], "default"), (pair[1], "a"), (pair[0], "b")):
        shutil.copytree(folder, Path("runs") / name)
    text = (Path(__file__).parents[2] / "docs/report.md").read_text()
    lines = [line.split() for line in re.findall(r"^offstage (.*)$", text, re.MULTILINE)]
    assert {words[0] for words in lines} == {"report", "train"}
    for command, *words in lines:
        assert cli.main([command, *words, *(["--show"] if command == "train" else [])]) == 0
    assert "memory_snapshot = true" in capsys.readouterr().out


def test_the_command(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = map(str, pair)
    trace = tmp_path / "trace.json"
    assert cli.main(["report", a, "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.split() == [str(trace), f"{a}/report.html"]
    assert cli.main(["report", a, b]) == 0
    assert capsys.readouterr().out.split() == [f"{a}/compare.html"]
    for words, message in (
        ([a, b, a], "expects the folder of a run, or of two; found 3"),
        ([a, b, "--trace", "x"], "expects one folder with --trace; found 2"),
        ([a, f"{b}/none"], f"found nothing at {b}/none"),
        ([a, "--trace", f"{tmp_path}/no/x.json"], "could not be written: No such file or directory"),
        ([a, "--trace", "."], "could not be written"),
    ):
        assert cli.main(["report", *words]) in (1, 2)
        found = capsys.readouterr()
        assert message in found.err
        assert found.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run", "trace.json"]


def test_a_memory_snapshot_is_refused_where_there_is_none(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["--run.folder", str(folder), "--run.device", "cpu", "--run.memory-snapshot"]
    assert cli.main(["train", *words]) == 2
    assert "run.memory_snapshot expects a CUDA device" in capsys.readouterr().err
    assert not folder.exists()
    with pytest.raises(ConfigError, match=r"expected run\.observe_step from 1 to run\.steps=300; found 0"):
        RunSettings(memory_snapshot=True, observe_step=0)
