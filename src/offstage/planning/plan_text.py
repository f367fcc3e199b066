# SPDX-License-Identifier: Apache-2.0
"""A plan as a table to read and as JSON to keep. Called by `Plan`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence

from offstage.config import Placement, format_size
from offstage.errors import ConfigError
from offstage.planning.plan import ParamSize, Plan
from offstage.planning.predict import CHOSEN, Candidate, Prediction

_MOST_ROWS = 24
"""A plan with more parameters is shown by groups of them."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a dotted name that is a number."""


def plan_table(plan: Plan) -> str:
    """What is where; then, for a plan of `make_plan`, what that takes and what else was considered."""
    rows = list(_parameters(plan) if len(plan.sizes) <= _MOST_ROWS else _groups(plan))
    if plan.prediction is None:
        return "\n".join([*rows, plan.summary()])
    return "\n".join([*_facts(plan, plan.prediction), "", *rows, "", *_candidates(plan.candidates)])


def _parameters(plan: Plan) -> Iterator[str]:
    yield f"{'parameter':<40} {'state':>12}  placement"
    for size, placement in zip(plan.sizes, plan.placements, strict=True):
        yield f"{size.name:<40} {format_size(size.state_bytes):>12}  {placement.value}"


def _groups(plan: Plan) -> Iterator[str]:
    """Parameters whose names differ only in numbers are one row."""
    groups: dict[str, list[tuple[ParamSize, Placement]]] = {}
    for size, placement in zip(plan.sizes, plan.placements, strict=True):
        groups.setdefault(_NUMBER.sub("*", size.name), []).append((size, placement))
    yield f"{'parameters':<46} {'number':>7} {'state':>10} {'resident':>10} {'streamed':>10} {'on the host':>11}"
    for name, members in groups.items():
        sums = {placement: sum(s.state_bytes for s, p in members if p is placement) for placement in Placement}
        cells = [format_size(sums[placement]) if sums[placement] else "-" for placement in Placement]
        whole = format_size(sum(sums.values()))
        short = name if len(name) <= 46 else f"{name[:22]}…{name[-23:]}"
        yield f"{short:<46} {len(members):>7,} {whole:>10} {cells[0]:>10} {cells[1]:>10} {cells[2]:>11}"


def _facts(plan: Plan, found: Prediction) -> Iterator[str]:
    slots = f", {plan.slots} slots of {format_size(plan.slot_bytes)} among it" if plan.slots else ""
    whole = f", an iteration {_ms(found.iteration_ms)}" if found.iteration_ms is not None else ""
    rows = [
        ("state", plan.by_placement()),
        ("device", f"{format_size(found.device_state_bytes)} of state{slots}"),
        ("", f"{format_size(found.device_peak_bytes)} at the peak, with weights, gradients and the workload's bytes"),
        ("host", format_size(found.host_bytes)),
        ("moved per step", f"{format_size(found.bytes_up)} up, {format_size(found.bytes_down)} down"),
        ("exposed", f"{_ms(found.exposed_ms)}{whole}"),
        ("busy per step", ", ".join(f"{name} {_ms(time)}" for name, time in found.busy_ms.items())),
        *(("note", text) for text in plan.notes),
    ]
    for name, value in rows:
        yield f"{name:<15} {value}"


def _candidates(candidates: Sequence[Candidate]) -> Iterator[str]:
    yield (
        f"  {'considered':<25} {'CPU':>4} {'resident':>9} {'device':>9} {'host':>9} "
        f"{'exposed':>9} {'iteration':>9}  verdict"
    )
    for one in candidates:
        found = one.prediction
        iteration = _ms(found.iteration_ms) if found.iteration_ms is not None else "-"
        mark = ">" if one.verdict == CHOSEN else " "
        yield (
            f"{mark} {one.name:<25} {one.host_fraction:>4.0%} {format_size(one.resident_bytes):>9} "
            f"{format_size(found.device_state_bytes):>9} {format_size(found.host_bytes):>9} "
            f"{_ms(found.exposed_ms):>9} {iteration:>9}  {one.verdict}"
        )


def _ms(time: float) -> str:
    return f"{time:.1f} ms" if time < 100 else f"{time:,.0f} ms"


def plan_to_json(plan: Plan) -> str:
    """All fields, placements by name."""
    fields = dataclasses.asdict(plan)
    fields["placements"] = [placement.value for placement in plan.placements]
    return json.dumps(fields)


def plan_from_json(text: str) -> Plan:
    """The plan that `plan_to_json` wrote."""
    try:
        fields = json.loads(text)
        fields["sizes"] = tuple(ParamSize(**size) for size in fields["sizes"])
        fields["placements"] = tuple(Placement(value) for value in fields["placements"])
        fields["prediction"] = Prediction(**fields["prediction"]) if fields["prediction"] else None
        fields["candidates"] = tuple(
            Candidate(**{**one, "prediction": Prediction(**one["prediction"])}) for one in fields["candidates"]
        )
        fields["notes"] = tuple(fields["notes"])
        return Plan(**fields)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"Plan.from_json expects what Plan.to_json wrote; found {text[:80]!r} ({error!r}). Make the plan again."
        ) from error
