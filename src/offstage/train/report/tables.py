# SPDX-License-Identifier: Apache-2.0
"""The report's tables: the run, its receipt, and the plan against measurements."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from offstage import Plan
from offstage.config import Placement, format_size
from offstage.optimizer.receipt import Receipt
from offstage.train.report.recorded import Recorded, is_number

Rows = list[tuple[str, str]]


def tiles(run: Recorded) -> Rows:
    """Numbers of the run beside the headline's."""
    found: list[tuple[str, str | None]] = [
        ("parameters", _count(run.run.get("parameters"))),
        ("steps", f"{run.rows[-1]['step']:,}" if run.rows else None),
        ("loss", _decimals(run.last("loss"))),
        ("evaluation", _decimals(run.last("eval_loss"))),
        ("tokens per second", _whole(run.usual("tokens_per_s"))),
        ("step", _ms(run.usual("step_ms"))),
        ("host, most", _size(run.most("host_rss_bytes"))),
        ("state off the device", _size(run.receipt.get("host_state_bytes"))),
        ("weights off the device", _size((run.run.get("weights") or {}).get("host_bytes"))),
    ]
    return [(name, value) for name, value in found if value is not None]


def about(run: Recorded) -> Rows:
    """Command, machine, versions: what is needed to repeat the run."""
    values = run.run
    found: list[tuple[str, Any]] = [
        ("command", values.get("command")),
        ("started", moment(values.get("started"))),
        ("machine", values.get("machine")),
        ("versions", values.get("versions")),
        ("processes", values.get("world")),
        ("tokens per step", _whole(values.get("tokens_per_step"))),
        ("weights", _weights(values.get("weights"))),
        ("observed step", run.observed.get("step")),
    ]
    return [(name, _plain(value)) for name, value in found if value not in (None, "", {}, [])]


def _weights(weights: Mapping[str, Any] | None) -> str:
    """Where they live, if some live on the host."""
    if not weights:
        return ""
    host, device = (format_size(weights[name]) for name in ("host_bytes", "device_bytes"))
    return f"those of {weights['layers']} layers live on the host, {host}; at most {device} of them are on the device"


def receipt(run: Recorded) -> Rows:
    """The receipt as `Receipt` prints it."""
    if not run.receipt:
        return []
    known = {field.name for field in fields(Receipt)}
    try:
        found = Receipt(**{name: value for name, value in run.receipt.items() if name in known})
        return [(line[:28].strip(), line[28:].strip()) for line in str(found).splitlines()]
    except (TypeError, ValueError, AttributeError):  # of another version: shown as it is
        return [(name.replace("_", " "), _plain(value)) for name, value in run.receipt.items()]


def plan_against_measured(run: Recorded) -> list[tuple[str, str, str, str]]:
    """Planned and measured values, and their ratio."""
    if run.plan is None:
        return []
    found = []
    for name, planned, measured, kind in _compared(run, run.plan):
        if planned is None and measured is None:
            continue
        show = _size if kind == "bytes" else _ms
        ratio = f"{measured / planned:.2f}" if planned and measured is not None else "–"
        found.append((name, show(planned) or "not predicted", show(measured) or "not measured", ratio))
    return found


def _compared(run: Recorded, plan: Plan) -> list[tuple[str, float | None, float | None, str]]:
    expected = plan.prediction
    # Without a prediction the plan itself still tells what moves: streamed state both ways, and for updates on the
    # host weights and gradients down and weights up.
    streamed = plan.bytes_of(Placement.STREAMED)
    weights = sum(s.weight_bytes for s, p in zip(plan.sizes, plan.placements, strict=True) if p is Placement.HOST)
    up, down = float(streamed + weights), float(streamed + 2 * weights)
    on_host = [run.receipt.get("host_state_bytes")]
    if expected:
        up, down = expected.bytes_up, expected.bytes_down
        on_host += [run.receipt.get(name) for name in ("host_weight_bytes", "host_gradient_bytes")]
    hosted = bool(run.receipt.get("host_weight_bytes"))
    moves = expected or not hosted  # the plan alone does not know of weights
    return [
        (
            "state on the device",
            float(expected.device_state_bytes if expected else plan.device_bytes),
            _float(run.receipt.get("device_state_bytes")),
            "bytes",
        ),
        (
            "state, weights and gradients on the host" if expected and hosted else "state and buffers on the host",
            float(expected.host_bytes if expected else plan.host_bytes),
            float(sum(one for one in on_host if is_number(one))) if is_number(on_host[0]) else None,
            "bytes",
        ),
        ("peak on the device", _float(expected and expected.device_peak_bytes), run.most("device_peak_bytes"), "bytes"),
        ("to the device, per step", up if moves else None, run.usual("bytes_fetched"), "bytes"),
        ("to the host, per step", down if moves else None, run.usual("bytes_stored"), "bytes"),
        ("updates, waited for", _float(expected and expected.exposed_ms), run.usual("exposed_ms"), "ms"),
        ("step", _float(expected and expected.iteration_ms), run.usual("step_ms"), "ms"),
    ]


def _float(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _size(value: Any) -> str | None:
    return format_size(value) if is_number(value) else None


def _ms(value: Any) -> str | None:
    if not is_number(value):
        return None
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.2f} ms"


def _whole(value: Any) -> str | None:
    return f"{value:,.0f}" if is_number(value) else None


def _decimals(value: Any) -> str | None:
    return f"{value:.4f}" if is_number(value) else None


def _count(value: Any) -> str | None:
    """``1234567`` → ``1.23M``."""
    if not is_number(value):
        return None
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}"


def moment(value: Any) -> str:
    """A readable date and time; other values unchanged."""
    try:
        found = datetime.datetime.fromisoformat(str(value))
    except ValueError:
        return str(value or "")
    return f"{found:%Y-%m-%d %H:%M} {found.tzname() or ''}".strip()


def _plain(value: Any) -> str:
    """Values of run.json in readable form."""
    if isinstance(value, Mapping):
        return ", ".join(_named(name, one) for name, one in value.items() if one is not None)
    if isinstance(value, (list, tuple)):
        return shlex.join(str(one) for one in value)
    return str(value)


def _named(name: str, value: Any) -> str:
    if name.endswith("_bytes") and is_number(value):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} memory {format_size(value)}"
    return f"{name.replace('_', ' ')} {_plain(value)}"
