# SPDX-License-Identifier: Apache-2.0
"""The README and the docs: code and commands run as written, links lead somewhere, tables are whole, pages short."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
USER_PAGES = sorted((ROOT / "docs").glob("*.md"))


def commands(first: str) -> list[list[str]]:
    """The commands of shell blocks that begin with the word `first`, without comments."""
    lines = [line for language, text in BLOCKS if language == "" for line in text.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [command for command in found if command and command[0] == first]


def test_every_shell_line_is_known():
    words = {
        shlex.split(line, comments=True)[0]
        for language, text in BLOCKS
        if language == ""
        for line in text.splitlines()
        if line
    }
    assert words == {"make", "offstage"}


def test_offstage_commands_run(tmp_path):
    """In the order of the README, in one folder: the report is of the run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    environment["OFFSTAGE_CACHE"] = str(tmp_path / "cache")
    assert len(commands("offstage")) >= 4
    for _, *arguments in commands("offstage"):
        command = [sys.executable, "-m", "offstage", *arguments]
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == 0, (arguments, found.stdout[-2000:], found.stderr[-2000:])
    assert (tmp_path / "runs/default/report.html").stat().st_size > 10_000


@pytest.mark.parametrize("command", commands("make"), ids=" ".join)
def test_make_commands_exist(command):
    """CI runs them: here, whether make knows them."""
    found = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language in ("python", "diff")])
def test_python_is_python(text):
    """With the lines that a diff adds and keeps."""
    lines = [re.sub(r"^[+ ]", "", line) if text.startswith("+") else line for line in text.splitlines()]
    ast.parse("\n".join(lines))
    named = re.findall(r"offstage\.(\w+)", text)
    import offstage

    assert all(hasattr(offstage, name) for name in named)


# Pages: links, names, tables, length


def prose(page: Path) -> str:
    """Without code blocks, which may hold anything."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of headings: lower case, punctuation dropped, spaces to dashes."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page):
    """Sources, tests, examples and rows of measurements that a page names."""
    text = page.read_text()
    for path in re.findall(r"\b(?:src/offstage|tests|examples|benchmarks|docs)/[\w/.]*\w", text):
        assert (ROOT / path).exists(), path
    for rows in re.findall(r"`(\w+\.jsonl)`", text):
        assert (ROOT / "benchmarks" / "results" / rows).exists(), rows
    for module in re.findall(r"python -m ((?:benchmarks|examples|tests)\.[\w.]*\w)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_a_table_have_equal_cells(page):
    """A `|` inside code splits a cell too, unless it is escaped."""
    tables = re.findall(r"(?:^\|.*\n)+", prose(page), re.MULTILINE)
    for table in tables:
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(cells)) == 1, table
        assert re.fullmatch(r"\|(:?-+:?\|)+", table.splitlines()[1]), table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_name_the_actor(page):
    assert not re.findall(r"\b(?:whoever|nobody|somebody|someone|anybody|anyone)\b", page.read_text(), re.IGNORECASE)


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_a_page_for_users_fits_on_three_screens(page):
    assert len(page.read_text().splitlines()) <= 170


def test_the_readme_is_short_and_shows_every_folder():
    assert len(README.splitlines()) <= 200
    entries = {entry.name for entry in (ROOT / "src" / "offstage").iterdir() if not entry.name.startswith("_")}
    assert not {name for name in entries - {"py.typed"} if f"](src/offstage/{name})" not in README}


def test_the_readme_lists_every_page():
    assert not [page.name for page in USER_PAGES if f"](docs/{page.name}" not in README]


def test_pages_import_what_exists():
    for page in PAGES:
        for line in re.findall(r"^from offstage.*$", page.read_text(), re.MULTILINE):
            exec(line, {})


# Five trips


TRIPS = (ROOT / "docs" / "internals" / "five_trips.md").read_text().split("\n## ")[1:]


@pytest.mark.parametrize("trip", TRIPS, ids=[trip.splitlines()[0] for trip in TRIPS])
def test_a_trip_names_functions_that_exist_in_ten_modules_at_most(trip):
    rows = re.findall(r"\[`([\w.]+)`\]\(\.\./\.\./(src/offstage/[\w/]+\.py)\)", trip)
    assert len(rows) == trip.count("\n| ") - 1  # every row but the head names one
    for name, path in rows:
        found = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            (match,) = [node for node in found if getattr(node, "name", None) == part][-1:] or [None]
            assert match is not None, f"{path} has no {name}"
            found = match.body
    assert len({path for _, path in rows}) <= 10


def test_there_are_five_trips():
    assert len(TRIPS) == 5
