# SPDX-License-Identifier: Apache-2.0
"""`Recorded`: the files of a run, which may be unfinished."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offstage import ConfigError, Plan
from offstage.train.observe import VERSION
from offstage.train.run_folder import RunFolder

Row = dict[str, Any]
_SAMPLE = re.compile(r"^(?=--- step \d+ ---$)", re.MULTILINE)
"""Where an entry of samples.txt begins."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The files of one run. Missing files are empty; unreadable ones are empty and in `problems`."""

    name: str
    config: str
    run: dict[str, Any]
    rows: tuple[Row, ...]
    """One per step that counts, in order."""
    receipt: dict[str, Any]
    observed: dict[str, Any]
    plan: Plan | None
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
        run = _json(files.run, problems)
        return cls(
            name=folder.resolve().name,
            config=_text(files.config),
            run=run,
            rows=tuple(counting(_rows(files.metrics, problems))),
            receipt=_json(files.receipt, problems),
            observed=_observed(files.observed, problems),
            plan=_plan(run.get("plan"), problems),
            sample=_SAMPLE.split(_text(files.samples))[-1].strip(),
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


def counting(rows: Iterable[Row]) -> list[Row]:
    """The rows that count, of a file to which resumed runs were appended.

    A run resumed from a checkpoint repeats the steps after it: earlier rows of these steps, and of all later ones, no
    longer belong to the run.
    """
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read ({error}); its parts are missing here.")
        return {}
    return found if isinstance(found, dict) else {}


def _observed(path: Path, problems: list[str]) -> dict[str, Any]:
    found = _json(path, problems)
    if found and found.get("version") != VERSION:
        problems.append(f"{path.name} has version {found.get('version')!r}, and this page shows {VERSION}.")
        return {}
    return found


def _rows(path: Path, problems: list[str]) -> list[Row]:
    rows: list[Row] = []
    lines: Sequence[str] = _text(path).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # not the last one, in which a run may have been killed
                problems.append(f"Line {number} of {path.name} is not a row, and is left out.")
    return rows


def _plan(values: Any, problems: list[str]) -> Plan | None:
    if not values:
        return None
    try:
        return Plan.from_json(json.dumps(values))
    except ConfigError as error:
        problems.append(f"The plan in run.json could not be read ({error}).")
        return None
