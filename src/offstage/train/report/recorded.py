# SPDX-License-Identifier: Apache-2.0
"""`Recorded`: the files of a run, which may be unfinished."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from offstage import ConfigError, FitPlan, Plan
from offstage.optimizer.receipt import Receipt
from offstage.train import metrics
from offstage.train.observe import VERSION
from offstage.train.reading import BadFileError, parse_object, read_bytes, read_lines, read_object, read_tail
from offstage.train.report.fitted import read_plan
from offstage.train.report.shapes import (
    Shape,
    fields_of,
    list_of,
    mapping,
    number,
    optional,
    plain,
    record,
    refuse,
    shapes_of,
    shown,
    text,
    whole,
)
from offstage.train.run_folder import RunFolder
from offstage.train.timeline import NUM_BINS

Row = dict[str, Any]
MOST_ROWS = 50_000
"""Kept of metrics.jsonl: of a longer run only each second row, each fourth, and so on."""
_MOST_SAMPLE_BYTES = 16 * 2**10
_SHOWN_LINES, _SHOWN_CHARACTERS = 5, 120
"""Of the lines that are no rows."""
_MOST_CONFIG = 64 * 2**10
"""Characters of config.toml that are parsed; `to_toml` writes a few thousand."""
_SAMPLE = re.compile(r"^(?=--- step \d+ ---$)", re.MULTILINE)
"""Where an entry of samples.txt begins."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The files of one run. Missing files are empty; unreadable ones are empty and in `problems`."""

    name: str
    config: str
    settings: dict[str, dict[str, Any]]
    """Of config.toml: section → name → value, those above all tables in ``""``; empty if it is not such a file."""
    run: dict[str, Any]
    rows: tuple[Row, ...]
    """One per step that counts, in order."""
    receipt: dict[str, Any]
    observed: dict[str, Any]
    plan: Plan | None
    fitted: FitPlan | None
    """What the run has decided within device_peak; `None` if it had none, or has not decided."""
    sample: str
    """The last sample of text."""
    problems: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        """Everything in `folder`."""
        files = RunFolder(folder)
        if not any(path.is_file() for path in (files.config, files.run, files.metrics)):
            found = "a folder without them" if folder.is_dir() else "a file" if folder.exists() else "nothing"
            raise ConfigError(
                f"{folder} is not the folder of a run: expected config.toml, run.json or metrics.jsonl in it; found "
                f"{found}. Name the folder that `offstage train` wrote (run.folder)."
            )
        problems: list[str] = []
        about = fields_of(_object(files.run, problems), _RUN, problems, files.run.name)
        receipt = _object(files.receipt, problems)
        config = _text(files.config, read_bytes, problems)
        return cls(
            name=folder.resolve().name,
            config=config,
            settings=_settings(config, problems),
            run=about,
            rows=tuple(_rows(files.metrics, problems)),
            receipt=fields_of(receipt, _RECEIPT, problems, files.receipt.name, others=plain()),
            observed=_observed(files.observed, problems),
            plan=_plan(about.get("plan"), problems),
            fitted=read_plan(files.fit_plan, problems) if about.get("fit") else None,
            sample=_SAMPLE.split(_text(files.samples, _read_sample, problems))[-1].strip(),
            problems=tuple(problems),
        )

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of all rows in which `name` is a number."""
        return [(float(row["step"]), float(row[name])) for row in self.rows if is_number(row.get(name))]

    def last(self, name: str) -> float | None:
        series = self.series(name)
        return series[-1][1] if series else None

    def usual(self, name: str) -> float | None:
        """The median of the second half of the run: the first steps compile and allocate."""
        values = [value for _, value in self.series(name)]
        return median(values[len(values) // 2 :]) if values else None

    def most(self, name: str) -> float | None:
        return max((value for _, value in self.series(name)), default=None)


def counting(rows: Iterable[Row], most: int = MOST_ROWS) -> tuple[list[Row], int]:
    """The rows that count, of a file to which resumed runs were appended, and of how many steps one was kept.

    A run resumed from a checkpoint repeats the steps after it: earlier rows of these steps, and of all later ones, no
    longer belong to the run. Of more than `most` rows, those of each second step go, and so on; evaluations, skipped
    steps and the last one stay as long as there is room.
    """
    kept: list[Row] = []
    every = 1

    def stays(row: Row) -> bool:
        return row["step"] % every == 0 or "eval_loss" in row or bool(row.get("skipped"))

    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        if kept and not stays(kept[-1]):
            kept.pop()
        kept.append(row)
        if len(kept) > most:
            every *= 2
            fewer = [one for one in kept[:-1] if stays(one)]
            kept = (fewer if len(fewer) <= 3 * most // 4 else fewer[::2]) + kept[-1:]
    return kept, every


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# Shapes #


def _memory(value: Any, where: str) -> Any:
    known = {"ms": list_of(number()), "bytes": mapping(list_of(whole())), "where": list_of(text())}
    found = record(known)(value, where)
    for name, sizes in {**found["bytes"], "where": found["where"]}.items():
        if len(sizes) != len(found["ms"]):
            raise refuse(f"{where}.{name}", f"a list of {len(found['ms'])}, like ms", sizes)
    return found


def _cpu(value: Any, where: str) -> Any:
    known = {"ms": list_of(number()), "cores": list_of(number()), "available": number(0, 1e9)}
    found = record(known)(value, where)
    times = found["ms"]
    if any(b < a for a, b in pairwise(times)) or len(times) != len(found["cores"]) + 1:
        raise refuse(f"{where}.ms", "times in order, one more than cores", times)
    return found


def _plan_fields(value: Any, where: str) -> Any:
    """With all its fields: `Plan.from_json` refuses those that it does not know."""
    record(shapes_of(Plan), shapes_of(Plan).keys())(value, where)
    return value


_NUMBER, _SIGNED, _WORDS = number(), whole(-(2**62)), text(200)
_PHASE = record({"name": _WORDS, "start_ms": _NUMBER, "stop_ms": _NUMBER})
_BINS = list_of(whole(), NUM_BINS)
_OBSERVED: dict[str, Shape] = {
    "step": optional(whole()),
    "device": _WORDS,
    "end_ms": _NUMBER,
    "phases": list_of(_PHASE),
    "memory": _memory,
    "lanes": mapping(list_of(list_of(_NUMBER, 3))),
    "busy_ms": mapping(_NUMBER),
    "link": optional(record({"bin_ms": number(1e-9), "up_bytes": _BINS, "down_bytes": _BINS})),
    "cpu": optional(_cpu),
    "notes": list_of(text()),
}
"""observed.json, as `Observer.observed` makes it."""
_RUN: dict[str, Shape] = {
    "command": plain(),
    "started": _WORDS,
    "versions": plain(),
    "machine": plain(),
    "world": plain(),
    "parameters": whole(),
    "tokens_per_step": whole(),
    "plan": _plan_fields,
    "net_saved_bytes": optional(_SIGNED),
    "fit": plain(),
    "weights": optional(record({"host_bytes": whole(), "device_bytes": whole(), "layers": whole()})),
}
"""run.json, as `run_info` makes it."""
_RECEIPT: dict[str, Shape] = {**shapes_of(Receipt), "net_saved_bytes": optional(_SIGNED)}
"""receipt.json: a `Receipt`. A saving below 0 is a loss."""
_ROW: dict[str, Shape] = {name: optional(shape) for name, shape in shapes_of(metrics.Row).items()}
_ROW["step"] = whole(0, 2**48)
"""A line of metrics.jsonl."""


# Files #


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except BadFileError as error:
        problems.append(f"{path.name} could not be read ({error}); its parts are missing here.")
        return {}


def _text(path: Path, read: Callable[[Path], bytes], problems: list[str]) -> str:
    try:
        return read(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except BadFileError as error:
        problems.append(f"{path.name} could not be read ({error}); it is missing here.")
        return ""


def _settings(config: str, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The tables of `config` and the plain values in them."""
    try:
        if len(config) > _MOST_CONFIG:
            raise BadFileError(f"expected at most {_MOST_CONFIG:,} characters; found {len(config):,}")
        return _plain_tables(tomllib.loads(config))
    except (BadFileError, ValueError, RecursionError) as error:
        problems.append(f"config.toml could not be parsed ({str(error)[:200]}): budgets and settings are not known.")
        return {}


def _plain_tables(tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each table, the values that are numbers, flags, texts, or lists and tables of these."""
    found: dict[str, dict[str, Any]] = {}
    above = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    for section, values in [("", above), *tables.items()]:
        for name, value in values.items() if isinstance(values, dict) else ():
            try:
                found.setdefault(text(200)(section, "a table"), {})[text(200)(name, section)] = plain()(value, name)
            except BadFileError:
                continue  # a date, or a text longer than any setting: config.toml is shown whole below
    return found


def _read_sample(path: Path) -> bytes:
    return read_tail(path, _MOST_SAMPLE_BYTES)


def _observed(path: Path, problems: list[str]) -> dict[str, Any]:
    found = _object(path, problems)
    if found and found.get("version") != VERSION:
        problems.append(f"{path.name} has version {shown(found.get('version'))}, and this page shows {VERSION}.")
        return {}
    return fields_of(found, _OBSERVED, problems, path.name)


def _rows(path: Path, problems: list[str]) -> list[Row]:
    """The rows that count; lines that are none are counted, and the first of them shown."""
    bad: list[str] = []
    num_bad = 0

    def rows() -> Iterator[Row]:
        nonlocal num_bad
        for position, line in enumerate(read_lines(path), 1):
            try:
                yield _row(parse_object(line))
            except BadFileError as error:
                if not line.endswith(b"\n"):
                    continue  # the last one, in which a run may have been killed
                num_bad += 1
                if num_bad <= _SHOWN_LINES:
                    start = line[: 4 * _SHOWN_CHARACTERS].decode("utf-8", errors="replace")[:_SHOWN_CHARACTERS].strip()
                    bad.append(f"Line {position} of {path.name} is not a row, and is left out ({error}): {start}")

    kept: list[Row] = []
    try:
        kept, every = counting(rows())
        if every > 1:
            problems.append(f"{path.name} has more than {MOST_ROWS:,} rows: of {every} steps one is shown.")
    except FileNotFoundError:
        pass
    except BadFileError as error:
        problems.append(f"{path.name} could not be read ({error}); its steps are missing here.")
    problems += bad
    if num_bad > len(bad):
        problems.append(f"{num_bad - len(bad):,} more lines of {path.name} are not rows, and are left out.")
    return kept


def _row(values: Mapping[str, Any]) -> Row:
    found = record(_ROW, _ROW.keys() - {"step"})(values, "row")
    return {name: value for name, value in found.items() if value is not None}


def _plan(values: Any, problems: list[str]) -> Plan | None:
    if not values:
        return None
    try:
        if len(values.get("sizes", ())) != len(values.get("placements", ())):
            raise refuse("plan.placements", "one for each of plan.sizes", values.get("placements"))
        return Plan.from_json(json.dumps(values))
    except (ConfigError, BadFileError) as error:
        problems.append(f"The plan in run.json could not be read ({error}).")
        return None
