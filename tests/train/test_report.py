# SPDX-License-Identifier: Apache-2.0
"""The report: one page that needs nothing else, whatever a run has left behind, and that says what it does not know."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offstage
from offstage.config import Placement
from offstage.errors import ConfigError
from offstage.optimizer.optimizer import runtime_of
from offstage.train.observe import Observer
from offstage.train.report import write_report
from offstage.train.report.chart import (
    Chart,
    bytes_axis,
    steps_axis,
    text_width,
    thinned,
    tick_text,
    time_axis,
    value_axis,
)
from offstage.train.report.recorded import Recorded, counting
from offstage.train.report.style import DARK, LIGHT
from tests.support.lives import end_step

STEPS, OBSERVED = 12, 6
FILES = ("config.toml", "run.json", "metrics.jsonl", "receipt.json", "observed.json", "samples.txt")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def train(folder: Path, **config: Any) -> Path:
    """A small real run over the bytes of this file, which leaves what `offstage train` leaves."""
    torch.manual_seed(0)
    folder.mkdir()
    model = Model()
    settings = {"min_bytes": 0, "chunk_bytes": "16KiB", **config}
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters(), lr=3e-3), model, **settings)
    tokens = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = []
    observer = Observer(model, optimizer, torch.device("cpu"), step=OBSERVED)
    for step in range(1, STEPS + 1):
        part = tokens[step * 260 : (step + 1) * 260].view(4, 65)
        if step == OBSERVED:
            observer.__enter__()
        observer.mark("forward")
        loss = nn.functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        observer.mark("backward")
        loss.backward()
        observer.mark("step")
        norm = optimizer.clip_grad_norm_(1.0)
        end_step(optimizer)
        if step == OBSERVED:
            observer.__exit__(None, None, None)
            observer.save(folder / "observed.json")
        last = runtime_of(optimizer).last_moved
        fetched, stored = last.up, last.down
        rows.append({"step": step, "loss": loss.item(), "grad_norm": norm.item(), "bytes_fetched": fetched})
        rows[-1] |= {"bytes_stored": stored, "skipped": False, "device_peak_bytes": None, "step_ms": 2.0 + step}
        if step % 4 == 0:
            rows[-1]["eval_loss"] = loss.item() + 0.1
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "receipt.json").write_text(json.dumps(dataclasses.asdict(optimizer.receipt())))
    about = {"command": ["offstage", "train", "--run.steps", str(STEPS)], "started": "2026-01-02T03:04:05+00:00"}
    about |= {"parameters": sum(p.numel() for p in model.parameters()), "tokens_per_step": 256}
    about |= {"versions": {"torch": torch.__version__}, "machine": {"device": "cpu", "host_bytes": 2**34}}
    about |= {"plan": json.loads(optimizer.plan.to_json())}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "config.toml").write_text('[model]\nsize = "1M"\n\n[run]\nfolder = "runs/<b>"\n')
    (folder / "samples.txt").write_text("--- step 4 ---\n[a]b\n\n--- step 8 ---\n[def]f & <g>\n\n")
    optimizer.close()
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "small", fraction=0.8, window="16KiB", host_fraction=0.3)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy, to be broken."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


TEXT = r'([^<>"]*)'
STRIP = re.compile(
    r'<label(?: class="left")? style="--x:[\d.]+%;flex:[\d.]+"><input type="radio" name="[a-z-]+"><span>'
    rf"<strong>{TEXT}</strong>((?:<em class=\"[a-z-]+\">{TEXT}</em><b>{TEXT}</b>)*)</span></label>"
)
"""One strip over a figure, in the only form that it may have: without markup in its texts."""


class Page(HTMLParser):
    """What a browser would find, as far as the tests need it."""

    VOID = ("meta", "link", "br", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str, str | None]] = []
        # Strips are taken out first: they are many, and Python's parser is slow.
        self.strips = [
            (found[1], re.findall(f"<em[^>]*>{TEXT}</em><b>{TEXT}</b>", found[2]))
            for found in STRIP.finditer(self.source)
        ]
        self.feed(STRIP.sub("", self.source))
        self.close()
        assert self.open == []
        self.svgs = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "

    def figure(self, label: str) -> ElementTree.Element:
        return next(svg for svg in self.svgs if label in (svg.get("aria-label") or ""))


def page_of(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path)


# A whole run


def test_the_page_needs_nothing_else(finished):
    page = page_of(finished)
    assert not [tag for tag, _, _ in page.attributes if tag in ("script", "img", "iframe", "object", "embed")]
    assert "<script" not in page.source
    links = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert links == ["data:,"]  # the icon that browsers would ask for
    assert not re.search(r"https?://|url\(|@import", page.source)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_every_part_of_a_run_is_there(finished):
    page = page_of(finished)
    labels = [svg.get("aria-label") for svg in page.svgs]
    for part in ("Loss", "Device memory by owner", "When each lane worked", "Use of the link", "Cores busy"):
        assert any(part in (label or "") for label in labels), part
    for owner in ("weights", "state", "slots", "window", "gradients", "activations"):
        assert re.search(rf"{owner}\s", page.text)
        assert f"fill:var(--{owner})" in page.source
    for lane in ("fetch: host → device", "update", "store: device → host", "updates on the host"):
        assert lane in page.text
    assert "missing" not in re.sub(r"<style>.*?</style>", "", page.source, flags=re.DOTALL)
    assert "Not complete" not in page.text


def test_numbers_are_those_of_the_run(finished):
    page, recorded = page_of(finished), Recorded.read(finished)
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    receipt = json.loads((finished / "receipt.json").read_text())
    assert f"{rows[-1]['loss']:.4f}" in page.text
    assert f"{rows[-1]['eval_loss']:.4f}" in page.text
    assert offstage.config.format_size(receipt["host_state_bytes"]) in page.text
    assert recorded.usual("step_ms") == 2.0 + 9.5  # the median of steps 7 to 12
    assert "11.50 ms" in page.text
    assert "2026-01-02 03:04 UTC" in page.text
    assert "offstage train --run.steps 12" in page.text
    assert "host memory 16.0 GiB" in page.text


def test_the_plan_is_held_against_what_was_measured(finished):
    page, recorded = page_of(finished), Recorded.read(finished)
    plan = recorded.plan
    assert plan is not None
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th>((?:<td class="number">[^<]*</td>)+)</tr>', page.source)
    table = {name: re.findall(r'<td class="number">([^<]*)</td>', cells) for name, cells in rows}
    size = offstage.config.format_size
    host = [s.weight_bytes for s, p in zip(plan.sizes, plan.placements, strict=True) if p is Placement.HOST]
    streamed = plan.bytes_of(Placement.STREAMED)
    assert host
    assert streamed
    assert table["state on the device"] == [size(plan.device_bytes), size(plan.device_bytes), "1.00"]
    assert table["to the device, per step"][0] == size(streamed + sum(host))
    assert table["to the device, per step"][2] == "1.00"
    assert table["to the host, per step"][2] == "1.00"
    assert table["step"] == ["not predicted", "11.50 ms", "–"]


def test_a_prediction_is_compared_too(run):
    about = json.loads((run / "run.json").read_text())
    about["plan"]["prediction"] = {
        "device_state_bytes": 1024, "device_peak_bytes": 4096, "host_bytes": 2048, "bytes_up": 512, "bytes_down": 256,
        "exposed_ms": 4.0, "iteration_ms": 23.0, "busy_ms": {"CPU": 1.0}, "bottleneck": "CPU",
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(about))
    page = page_of(run)
    assert '>23.00 ms</td><td class="number">11.50 ms</td><td class="number">0.50<' in page.source
    assert "no workload was known" not in page.text


def test_text_of_the_run_is_text(run):
    (run / "config.toml").write_text("[data]\npaths = ['<script>alert(1)</script>', \"a & b\"]\n")
    page = page_of(run)
    assert "<script" not in page.source
    assert "<script>alert(1)</script>" in page.text
    assert "[def]f & <g>" in page.text
    assert "--- step 4 ---" not in page.text  # the last sample alone


# Figures


def _boxes(svg: ElementTree.Element) -> Iterator[tuple[str, float, float, float, float]]:
    for text in svg.iter("text"):
        words = "".join(text.itertext())
        width, x, y = text_width(words), float(text.get("x") or 0), float(text.get("y") or 0)
        left = x - {"middle": width / 2, "end": width}.get(text.get("text-anchor") or "", 0.0)
        yield words, left, left + width, y - 9.0, y + 2.0


@pytest.mark.parametrize(
    "config",
    [{}, {"fraction": 0.0}, {"update_in_backward": True}, {"overlap_forward": True, "window": "all"}],
    ids=str,
)
def test_no_text_stands_on_another_or_outside(config, tmp_path):
    if config.get("update_in_backward"):
        config = {**config, "host_fraction": 0.5}
    page = page_of(train(tmp_path / "run", **config))
    assert len(page.svgs) >= 5
    assert_texts_are_apart(page)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e2, 1e4, 1e6], ids=str)
def test_no_text_stands_on_another_however_long_an_iteration_takes(factor, run):
    observed = json.loads((run / "observed.json").read_text())

    def longer(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value if name in ("bytes", "cores") else longer(value) for name, value in values.items()}
        if isinstance(values, list):
            return [longer(value) for value in values]
        return factor * values if isinstance(values, float) else values

    (run / "observed.json").write_text(json.dumps(longer(observed)))
    assert_texts_are_apart(page_of(run))


def assert_texts_are_apart(page: Page) -> None:
    for svg in page.svgs:
        _, _, width, height = (float(part) for part in (svg.get("viewBox") or "").split())
        boxes = list(_boxes(svg))
        for words, left, right, top, bottom in boxes:
            assert left >= -3.0, words
            assert right <= width, words
            assert top >= 0.0, words
            assert bottom <= height, words
        for a, b in combinations(boxes, 2):
            assert a[2] <= b[1] or b[2] <= a[1] or a[4] <= b[3] or b[4] <= a[3], (a[0], b[0])


def test_axes_have_units(finished):
    page = page_of(finished)
    for svg in page.svgs:
        labels = ["".join(text.itertext()) for text in svg.iter("text") if text.get("class") == "label"]
        assert labels
        assert all(
            label == "step" or re.search(r", (ms|s|B|KiB|MiB|GiB)$|GB/s|nats|norm|cores", label) for label in labels
        )


def test_the_memory_figure_is_as_high_as_the_sum_of_its_owners(finished):
    observed = json.loads((finished / "observed.json").read_text())
    totals = [sum(sizes) for sizes in zip(*observed["memory"]["bytes"].values(), strict=True)]
    axis = bytes_axis("device memory", [max(totals)])
    assert axis.high >= max(totals)
    assert axis.high - max(totals) <= 0.25 * axis.high
    highest = min(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", _area(page_of(finished), "activations")))
    names = [(one["name"], one["start_ms"], one["stop_ms"]) for one in observed["phases"]]  # in one line or in two
    chart = Chart(time_axis("", observed["end_ms"]), axis, height=330, names=names)
    assert highest == pytest.approx(chart.at_y(max(totals)), abs=0.2)


def _area(page: Page, owner: str) -> str:
    svg = page.figure("Device memory by owner")
    return next(path.get("d") or "" for path in svg.iter("path") if f"--{owner})" in (path.get("style") or ""))


@pytest.mark.parametrize("low", [0.0, 1.3, 97.4, -5.0])
@pytest.mark.parametrize("length", [1e-4, 0.37, 1.0, 2.6, 9.99, 1234.5, 8e9])
def test_axes_end_on_round_numbers_around_all_values(low, length):
    axis = value_axis("x", [low, low + length])
    ticks = axis.ticks(axis.parts + 1)
    assert axis.low <= low <= low + length <= axis.high + 1e-9 * abs(axis.high)
    assert 3 <= len(ticks) <= 8
    shown = [tick_text(tick, ticks) for tick in ticks]
    assert len(set(shown)) == len(shown)
    assert [float(text.replace(",", "")) for text in shown] == pytest.approx(ticks, rel=1e-6, abs=1e-12)
    gaps = [b - a for a, b in pairwise(ticks)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps))


def test_axes_of_nothing_and_of_one_value():
    assert value_axis("x", [0.0], zero=True).high == 1.0
    axis = value_axis("x", [3.0, 3.0])
    assert axis.low < 3.0 < axis.high
    one = steps_axis([7.0])
    assert one.low < 7.0 < one.high
    assert all(tick == int(tick) for tick in steps_axis([1.0, 3.0]).ticks(9))


def test_many_points_become_few_and_keep_their_extremes():
    points = [(float(i), float((i * 7919) % 1000)) for i in range(10_000)]
    thin = thinned(points, 100)
    assert len(thin) == 100
    assert min(low for _, _, low, _ in thin) == 0.0
    assert max(high for _, _, _, high in thin) == 999.0
    assert sum(mean for _, mean, _, _ in thin) / 100 == pytest.approx(sum(y for _, y in points) / 10_000)
    assert thinned(points[:3], 100) == [(x, y, y, y) for x, y in points[:3]]


def _luminance(color: str) -> float:
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read_on_every_ground(colors):
    """Contrasts as the web's guidelines ask for: 4.5 for text, 3 for graphics (as far as they carry meaning alone)."""

    def contrast(a: str, b: str) -> float:
        lighter, darker = sorted((_luminance(colors[a]), _luminance(colors[b])), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    for ink in ("ink", "quiet"):
        for ground in ("ground", "panel"):
            assert contrast(ink, ground) >= 4.5, (ink, ground)
    for line in ("train", "eval", "fetch", "store", "update", "model", "lower", "host", "raise", "collectives"):
        assert contrast(line, "panel") >= 3.0, line
        for phase in ("forward", "backward", "step"):
            assert contrast(line, f"phase-{phase}") >= 2.5, (line, phase)


# Runs that are not whole


@pytest.mark.parametrize("gone", [*((name,) for name in FILES), FILES[2:], FILES[:2] + FILES[3:]], ids=str)
def test_whatever_is_missing_the_rest_is_shown(gone, run):
    for name in gone:
        (run / name).unlink()
    page = page_of(run)
    assert ("observed.json" in gone) == ("The run has no observed.json" in page.text)
    assert ("receipt.json" in gone) == ("no receipt.json" in page.text)
    assert ("metrics.jsonl" in gone) == ("wrote no step" in page.text)
    assert ("run.json" in gone) == ("no plan in run.json" in page.text)
    assert ("config.toml" in gone) == ("There is no config.toml" in page.text)


@pytest.mark.parametrize("name", ["run.json", "receipt.json", "observed.json"])
def test_a_file_that_is_cut_off_is_named(name, run):
    text = (run / name).read_text()
    (run / name).write_text(text[: len(text) // 2])
    page = page_of(run)
    assert f"{name} could not be read" in page.text


def test_a_run_that_crashed_while_writing_its_first_row(run):
    for name in ("receipt.json", "observed.json", "samples.txt"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "lo')
    page = page_of(run)
    assert "wrote no step" in page.text
    assert "is not a row" not in page.text


def test_one_row_is_enough(run):
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5, "tokens_per_s": 100.0}\n')
    page = page_of(run)
    assert page.figure("Loss").find(".//circle") is not None
    assert "5.5000" in page.text


def test_values_that_are_no_numbers_are_left_out(run):
    lines = [
        '{"step": 1, "loss": 5.0}',
        '{"step": 2, "loss": NaN, "skipped": true}',
        '{"step": 3, "loss": null, "skipped": true}',
        "what is this",
        '{"step": 4, "loss": 4.0, "eval_loss": Infinity}',
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = page_of(run)
    assert "2 steps were skipped" in page.text
    assert "Line 4 of metrics.jsonl is not a row" in page.text
    assert Recorded.read(run).series("loss") == [(1.0, 5.0), (4.0, 4.0)]
    assert not re.search(r"\bnan\b|\binf\b", page.source)


def test_a_run_whose_every_loss_is_not_finite(run):
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": null}\n')
    assert "No step of this run has a finite loss yet" in page_of(run).text


def test_rows_of_steps_that_were_made_again_do_not_count():
    """Killed after step 7, gone on after step 4, killed after step 6, gone on after 4 again, and now at 5."""
    rows = [
        {"step": step, "run": number} for number, steps in enumerate(((1, 8), (5, 7), (5, 6))) for step in range(*steps)
    ]
    assert counting(rows) == ([{"step": step, "run": 0} for step in (1, 2, 3, 4)] + [{"step": 5, "run": 2}], 1)


def test_a_resumed_run_shows_the_later_rows(run):
    first = [json.dumps({"step": step, "loss": 9.0}) for step in range(1, 9)]
    later = [json.dumps({"step": step, "loss": 3.0 - 0.1 * step}) for step in range(5, 8)]
    (run / "metrics.jsonl").write_text("\n".join([*first, *later]) + "\n")
    recorded = Recorded.read(run)
    assert [row["step"] for row in recorded.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert recorded.last("loss") == pytest.approx(2.3)
    assert "2.3000" in page_of(run).text


def test_notes_of_the_observer_are_shown(run):
    observed = json.loads((run / "observed.json").read_text())
    observed |= {"notes": ["torch's profiler did not start"], "lanes": {}, "link": None, "cpu": None}
    (run / "observed.json").write_text(json.dumps(observed))
    page = page_of(run)
    assert "While observing: torch's profiler did not start." in page.text
    assert "No lane worked" in page.text
    assert "Nothing moved in the observed step" in page.text
    assert "The CPU was not watched" in page.text


def test_an_observation_of_another_version_is_not_guessed_at(run):
    (run / "observed.json").write_text('{"version": 7, "lanes": 5}')
    assert "observed.json has version 7" in page_of(run).text


def test_a_receipt_of_another_version_is_shown_as_it_is(run):
    (run / "receipt.json").write_text(json.dumps({"bytes_fetched": 7, "tea_cups": 3}))
    page = page_of(run)
    assert re.search(r"tea cups\s+3", page.text)


def test_what_is_not_a_run_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for folder, found in (
        (tmp_path, "a folder without them"),
        (tmp_path / "notes.txt", "a file"),
        (tmp_path / "x", "nothing"),
    ):
        with pytest.raises(ConfigError, match=f"found {found}"):
            write_report(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_a_report_is_written_again_over_the_old_one(run):
    first = page_of(run).source
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.25}\n')
    assert page_of(run).source != first
    assert not [path for path in run.iterdir() if path.name.endswith(".tmp")]
