# SPDX-License-Identifier: Apache-2.0
"""A run's folder that is damaged, or that a stranger made: each ends in a page or in one message, and nothing else."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offstage.cli import main as cli
from offstage.config import format_size
from offstage.errors import ConfigError, OffstageError
from offstage.train.metrics import MetricsFile
from offstage.train.reading import MOST_LINE_BYTES, MOST_LINES_BYTES, MOST_OBJECT_BYTES
from offstage.train.report import write_report
from offstage.train.report.parts import MOST_PAGE_BYTES
from offstage.train.report.recorded import MOST_ROWS, Recorded, counting
from tests.train.test_report import FILES, Page, train

JSON = ("run.json", "receipt.json", "observed.json")
SECRET = "the content of a file outside of the folder"
SCRIPT = "</style></pre></title><script>alert('1')</script><img src=x onerror=alert(1)>\" onload=\"x"
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 2**62, 10**19, -0.5, 1e-320, 1e59, 1e308, -1e308, "", "1", SCRIPT, "\ud800", "\x00\x1b[31m",
    "x" * 3000, "\u202e\ufeff", [], [[]], [None], {}, {"": {}}, {"a": [1, {"b": [[[[2]]]]}]}, [1e30] * 3, ["a"] * 120,
    [0] * 120,
)  # fmt: skip
RAW = (
    b"", b"\n", b"\x00" * 5000, b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"{}", b"[]", b"null", b"NaN", b'"text"',
    b"{", b"[" * 100_000, b'{"a":' * 100_000, b'{"step": ' + b"9" * 401 + b"}", b'{"step": ' + b"9" * 5000 + b"}",
    b'{"version": 1, "step": 1e999, "phases": Infinity, "end_ms": -Infinity}', b'{"version": 1, "version": 2}',
    b"--- step 1 ---\n" * 3000, b"\r\n\x0b\x0c\x85" * 50, bytes(range(256)) * 8,
    b'{"plan": {"sizes": [], "placements": []}}',
    b'{"step": 1, "loss": 1e400}\n{"step": 1}\n{"step": -1}\n{"step": true}\n{"step": 2.0}\n{"step": "3"}\n' * 20,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has everything: a prediction and candidates in its plan, and every field in its rows."""
    folder = train(tmp_path_factory.mktemp("runs") / "small", fraction=0.8, window="16KiB", host_fraction=0.3)
    about = json.loads((folder / "run.json").read_text())
    prediction = {
        "device_state_bytes": 1024, "device_peak_bytes": 4096, "host_bytes": 2048, "bytes_up": 512, "bytes_down": 256,
        "exposed_ms": 4.0, "iteration_ms": 23.0, "busy_ms": {"CPU": 1.0}, "bottleneck": "CPU",
    }  # fmt: skip
    one = {"name": "all", "host_fraction": 0.5, "resident_bytes": 7, "prediction": prediction, "verdict": "chosen"}
    about["plan"] |= {"prediction": prediction, "candidates": [one], "notes": ["a note"]}
    about["world"] = {"ranks": 1}
    (folder / "run.json").write_text(json.dumps(about))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    extra = {"lr": 1e-3, "tokens_per_s": 5.0, "device_bytes": 7, "device_peak_bytes": 9, "host_rss_bytes": 2**30}
    extra |= {"exposed_ms": 0.5, "hidden_ms": 1.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**row, **extra}) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def look(folder: Path) -> Page | None:
    """The page, harmless and small; `None` for one message."""
    before = {path.name for path in folder.iterdir()}
    try:
        path = write_report(folder)
    except ConfigError:
        assert {path.name for path in folder.iterdir()} == before
        return None
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}
    assert path.stat().st_size <= MOST_PAGE_BYTES
    page = Page(path)
    assert {tag for tag, _, _ in page.attributes}.isdisjoint(("script", "img", "iframe", "object", "embed", "a"))
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert SECRET not in page.source
    return page


# Mutations #


def bytes_mutations(content: bytes, chance: random.Random) -> Iterator[bytes]:
    """Flipped, cut, grown, repeated."""
    for _ in range(14):
        flipped = bytearray(content)
        for _ in range(chance.choice((1, 1, 5, 50))):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        yield bytes(flipped)
    for _ in range(10):
        yield content[: chance.randrange(len(content))]
        at = chance.randrange(len(content))
        yield content[:at] + chance.choice((b"\x00", b"<script>", b"9" * 500, b"[" * 500, b"\n", b'"')) + content[at:]
    yield content + content
    yield content[::-1]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of a list, the first and the last."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, one in value.items():
            yield from places(one, (*path, name))
    elif isinstance(value, list) and value:
        for index in {0, len(value) - 1}:
            yield from places(value[index], (*path, index))


def with_value(text: str, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> str:
    found = json.loads(text)
    inner = found
    for step in path[:-1]:
        inner = inner[step]
    change(inner, path[-1])
    return json.dumps(found)


def value_mutations(text: str, chance: random.Random) -> Iterator[str]:
    """Each place with wrong values, gone, and one too many."""
    for path in places(json.loads(text)):
        for value in chance.sample(HOSTILE, 2):
            yield with_value(text, path, lambda inner, last, value=value: inner.__setitem__(last, value))
        yield with_value(text, path, lambda inner, last: inner.__delitem__(last))
    for value in HOSTILE:
        yield json.dumps({**json.loads(text), SCRIPT: value})


def special(path: Path, outside: Path) -> Iterator[str]:
    """Things that are not files."""
    for name in ("pipe", "link", "dangling", "loop", "folder", "device", "null"):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if name == "pipe":
            os.mkfifo(path)
        elif name == "folder":
            path.mkdir()
        else:
            to = {
                "link": outside,
                "dangling": outside / "none",
                "loop": path,
                "device": "/dev/zero",
                "null": "/dev/null",
            }
            path.symlink_to(to[name])
        yield name
    path.unlink()


@pytest.mark.parametrize("name", FILES)
def test_bytes(name, run):
    chance = random.Random(name)
    content = (run / name).read_bytes()
    num = 0
    for mutation in (*bytes_mutations(content, chance), *RAW, *((run / other).read_bytes() for other in FILES)):
        (run / name).write_bytes(mutation)
        assert look(run) is not None
        num += 1
    assert num >= 60


@pytest.mark.parametrize("name", JSON)
def test_values(name, run):
    num = 0
    for mutation in value_mutations((run / name).read_text(), random.Random(name)):
        (run / name).write_text(mutation)
        assert look(run) is not None
        num += 1
    assert num >= 70


def test_values_of_rows(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    num = 0
    for mutation in value_mutations(lines[-1], random.Random(0)):
        (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], mutation, lines[0], lines[-1]]) + "\n")
        assert look(run) is not None
        num += 1
    assert num >= 70


@pytest.mark.parametrize("name", FILES)
def test_what_is_not_a_file(name, run):
    outside = run.parent / "outside"
    outside.write_text(SECRET)
    for kind in special(run / name, outside):
        page = look(run)
        assert page is not None
        expected = "symbolic link" if kind not in ("pipe", "folder") else f"found a {kind}"
        assert f"{name} could not be read (expected a regular file" in page.text
        assert expected in page.text
    assert outside.read_text() == SECRET


def test_a_folder_of_nothing_but_pipes(tmp_path, capsys):
    for name in FILES:
        os.mkfifo(tmp_path / name)
    assert look(tmp_path) is None
    assert cli.main(["report", str(tmp_path)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert "is not the folder of a run: expected config.toml, run.json or metrics.jsonl in it" in found.err


# What the page shows #


def test_every_text_of_a_run_is_text(run):
    """All strings of all files, names included, are markup."""

    def hostile(value: Any, *, named: bool = False) -> Any:
        if isinstance(value, dict):
            return {(f"{SCRIPT}{key}" if named else key): hostile(one, named=named) for key, one in value.items()}
        if isinstance(value, list):
            return [hostile(one, named=named) for one in value]
        return SCRIPT if isinstance(value, str) and value not in ("resident", "streamed", "host") else value

    for name in JSON:
        found = json.loads((run / name).read_text())
        content = hostile(found)
        for field in ("machine", "versions", "world", "lane_ms"):
            if field in found:
                content[field] = hostile(found[field], named=True)
        (run / name).write_text(json.dumps({**content, SCRIPT: SCRIPT}))
    for name in ("config.toml", "samples.txt"):
        (run / name).write_text(SCRIPT)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + f"{SCRIPT}\n")
    (run.parent / SCRIPT.replace("/", "")).mkdir()
    page = look(run.rename(run.parent / SCRIPT.replace("/", "") / "<script>run"))
    assert page is not None
    assert page.text.count("<script>alert('1')</script>") >= 12


def test_bad_lines_are_counted_and_the_first_are_shown(run):
    good = (run / "metrics.jsonl").read_bytes()
    garbage = random.Random(0).randbytes(5_000_000).replace(b"\n", b"\xff\n<b>&") + b"\n"
    (run / "metrics.jsonl").write_bytes(garbage + good)
    usual = look(run)
    assert usual is not None
    assert len(usual.source) < 200_000
    assert usual.text.count("of metrics.jsonl is not a row") == 5
    others = garbage.count(b"\n") - 5
    assert f"{others:,} more lines of metrics.jsonl are not rows" in usual.text
    assert len(Recorded.read(run).rows) == good.count(b"\n")


def test_the_first_bad_line_says_what_was_expected(run):
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"step": "2", "loss": 1.5}\n{"step": 3, "loss": "x"}\n'
    )
    page = look(run)
    assert page is not None
    assert "Line 2 of metrics.jsonl is not a row, and is left out (row.step: expected a whole number" in page.text
    assert "row.loss: expected a finite number; found 'x')" in page.text


def test_a_line_that_is_too_long_is_one_bad_line(run):
    rows = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    long = b'{"step": 5, "text": "' + b"x" * (3 * MOST_LINE_BYTES) + b'"}\n'
    (run / "metrics.jsonl").write_bytes(b"".join([rows[0], long, *rows[1:], long[:-1]]))
    recorded = Recorded.read(run)
    assert [row["step"] for row in recorded.rows] == [json.loads(row)["step"] for row in rows]
    assert [text.split(",")[0] for text in recorded.problems] == [
        "Line 2 of metrics.jsonl is not a row", f"Line {len(rows) + 2} of metrics.jsonl is not a row"
    ]  # fmt: skip


def test_the_largest_page(run):
    """As much of everything as is taken, in characters that become six when they are escaped."""
    quote = "'" * 2000
    observed = json.loads((run / "observed.json").read_text())
    moments = [float(i) for i in range(5_000)]
    observed["memory"] = {"ms": moments, "where": [""] * len(moments)}
    observed["memory"]["bytes"] = {
        owner: [i % 999 for i in range(len(moments))] for owner in ("weights", "state", "slots")
    }
    observed["lanes"] = {lane: [[i, i + 0.5, 1] for i in range(5_000)] for lane in observed["lanes"]}
    observed["phases"] = [{"name": quote[:200], "start_ms": i, "stop_ms": i + 1} for i in range(1000)]
    observed["notes"] = [quote] * 1000
    (run / "observed.json").write_text(json.dumps(observed))
    about = json.loads((run / "run.json").read_text())
    sizes = [{**about["plan"]["sizes"][0], "name": f"{quote[:1900]}{i:x}"} for i in range(1000)]
    about["plan"] |= {"sizes": sizes, "placements": ["streamed"] * len(sizes), "notes": [quote] * 100}
    about |= {"command": [quote] * 100, "machine": {quote[:200]: quote}, "versions": [quote] * 50, "world": quote}
    (run / "run.json").write_text(json.dumps(about))
    receipt = json.loads((run / "receipt.json").read_text())
    (run / "receipt.json").write_text(json.dumps({**receipt, "fallbacks": [quote] * 500, "advice": quote}))
    (run / "config.toml").write_text("'\n\n" * 200_000)
    (run / "samples.txt").write_text("'" * 1_000_000)
    rows = (
        {"step": step, "loss": 1.0 / step, "eval_loss": 1.0 / step, "skipped": step % 2 == 0}
        for step in range(1, 10_000)
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = look(run)
    assert page is not None
    assert "more characters)" in page.text
    assert len(page.source.encode()) > MOST_PAGE_BYTES // 4


def test_long_runs_are_thinned_evenly():
    rows = [{"step": step, "loss": 1.0} for step in range(1, 1001)]
    rows[6]["eval_loss"], rows[8]["skipped"] = 2.0, True
    kept, every = counting(rows, 100)
    assert every == 16
    assert [row["step"] for row in kept] == [7, 9, *range(16, 1001, 16), 1000]
    kept, _ = counting([{"step": step, "eval_loss": 1.0} for step in range(1, 1001)], 100)
    assert len(kept) <= 101
    assert kept[-1]["step"] == 1000
    again = [*rows, *({"step": step, "loss": 2.0} for step in range(500, 600))]
    assert [row["step"] for row in counting(again, 100)[0]] == [7, 9, *range(16, 600, 16), 599]


# Memory and the way out #


def test_memory_is_bounded(run, tmp_path):
    """Of a process of its own that reads three times as many rows as it keeps, and the largest file of objects."""
    row = json.dumps({"step": 0, "loss": 1.5, "grad_norm": 2.5, "tokens_per_s": 1e4, "step_ms": 3.5})
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(row.replace('"step": 0', f'"step": {step}') + "\n" for step in range(1, 3 * MOST_ROWS))
    (run / "observed.json").write_text("[" + "{}," * 5_000_000 + "{}]")
    code = (
        "import resource, sys, pathlib; from offstage.train.report import write_report; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; write_report(pathlib.Path(sys.argv[1])); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code, run], env=environment, capture_output=True, text=True, check=True
    )
    assert int(found.stdout) < 700 * 2**10
    page = Page(run / "report.html")
    assert f"more than {MOST_ROWS:,} rows: of 4 steps one is shown" in page.text
    assert f"{3 * MOST_ROWS - 1:,}" in page.text


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_too_large_is_not_read(name, run):
    most = MOST_LINES_BYTES if name in ("metrics.jsonl", "samples.txt") else MOST_OBJECT_BYTES
    os.truncate(run / name, most + 2**20)  # sparse
    page = look(run)
    assert page is not None
    assert f"{name} could not be read (expected at most {format_size(most)}" in page.text


def test_nothing_is_written_through_links(run):
    outside = run.parent / "outside"
    outside.write_text(SECRET)
    for name in (".report.html.tmp", "report.html"):
        (run / name).symlink_to(outside)
    page = Page(write_report(run))
    assert outside.read_text() == SECRET
    assert not (run / "report.html").is_symlink()
    assert "Loss" in page.text


def test_where_nothing_can_be_written(run, capsys):
    (run / "report.html").mkdir()
    (run / "report.html" / "x").write_text("")
    assert cli.main(["report", str(run)]) == 1
    found = capsys.readouterr()
    assert found.err.count("\n") == 1
    assert "report.html could not be written" in found.err


def test_names_that_are_not_utf8(run, capsysbinary):
    odd = Path(os.fsdecode(os.fsencode(run.parent) + b"/\xff\x1b"))
    run.rename(odd)
    assert cli.main(["report", str(odd)]) == 0
    assert b"report.html" in capsysbinary.readouterr().out


# The trainer reads the same files #


def test_a_run_continues_over_damaged_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "loss": 2.0}\n'
    bad = [
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"step": Infinity}\n',
        b'{"step": ' + b"9" * 5000 + b"}\n",
        b"[1]\n",
    ]
    path.write_bytes(good + b"".join(bad) + b'{"step": 2}\n{"step": 3}\n{"st')
    MetricsFile(path, after_step=2).close()
    assert path.read_bytes() == good + b'{"step": 2}\n'


def test_metrics_that_are_no_file(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OffstageError, match=r"expected a regular file; found a pipe\. Move it away"):
        MetricsFile(tmp_path / "metrics.jsonl", after_step=2)
