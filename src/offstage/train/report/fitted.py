# SPDX-License-Identifier: Apache-2.0
"""What a run has decided within `device_peak`: fit_plan.json, and its predictions beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from offstage import ConfigError, FitPlan
from offstage.config import format_size
from offstage.planning.choosing import Limits, Predicted
from offstage.planning.loop import Loop
from offstage.train.reading import BadFileError, read_object
from offstage.train.report.shapes import Shape, list_of, mapping, number, plain, record, shapes_of, text, whole

_PREDICTED = record(shapes_of(Predicted))
_PLAN: dict[str, Shape] = {
    "predicted": _PREDICTED,
    "overrides": mapping(plain(0)),
    "limits": record(shapes_of(Limits)),
    "loop": record(shapes_of(Loop), shapes_of(Loop).keys()),
    "num_params": whole(),
    "state_bytes": whole(),
    "unseen_bytes": whole(-(2**62)),
    "slowdowns": mapping(number()),
    "considered": list_of(record({"name": text(), "predicted": _PREDICTED, "verdict": text()})),
    "notes": list_of(text()),
}
"""fit_plan.json, as `FitPlan.to_json` writes it."""


def read_plan(path: Path, problems: list[str]) -> FitPlan | None:
    """The plan; `None` if there is none, or with a problem if it cannot be read."""
    try:
        return FitPlan.from_json(json.dumps(record(_PLAN)(read_object(path), path.name)))
    except FileNotFoundError:
        return None
    except (BadFileError, ConfigError) as error:
        problems.append(f"{path.name} could not be read ({error}); what the run has decided is not known.")
        return None


def against_measured(plan: FitPlan, step_ms: float | None, peak: float | None) -> list[tuple[str, str, str, str]]:
    """(name, limit, predicted, measured) of time and memory."""

    def shown(show: Callable[[float], str], value: float | None) -> str:
        return "not measured" if value is None else show(value)

    predicted, limits = plan.predicted, plan.limits
    return [
        ("iteration", "–", _ms(predicted.iteration_ms), shown(_ms, step_ms)),
        (
            "peak on the device",
            format_size(limits.device),
            format_size(predicted.device_bytes),
            shown(format_size, peak),
        ),
        ("host", format_size(limits.host), format_size(predicted.host_bytes), "see the receipt"),
    ]


def _ms(value: float) -> str:
    return f"{value:,.1f} ms"
