# SPDX-License-Identifier: Apache-2.0
"""What offload gave and what it cost: peak with and without, time per step, net saving, and the limits of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from offstage.config import Placement, format_size, parse_size
from offstage.errors import ConfigError
from offstage.train.report.recorded import Recorded, is_number

_IN_VIEW = 2.0
"""A limit of more than so many times the highest data is named, and not drawn: the data would be flat."""


class Cell(NamedTuple):
    """One of the first numbers of the page."""

    name: str
    value: str
    note: str
    is_bad: bool = False


@dataclass(frozen=True)
class Limit:
    """A line in the figure of the memory."""

    text: str
    nbytes: float
    height: float
    """Where it lies: a budget of state begins above the weights."""
    color: str
    dashed: bool
    is_drawn: bool


def offloads(run: Recorded) -> bool:
    """Whether some state was placed off the device; taken for granted where the plan is not known."""
    return run.plan is None or any(place is not Placement.RESIDENT for place in run.plan.placements)


def peak_bytes(run: Recorded) -> float | None:
    """The peak on the device: of the whole run if the allocator counted it, otherwise of the observed step."""
    return _first(run.most("device_peak_bytes"), observed_peak(run))


def observed_peak(run: Recorded) -> float | None:
    """The most that was seen at once in the observed step."""
    sizes = (run.observed.get("memory") or {}).get("bytes") or {}
    return max((float(sum(at_once)) for at_once in zip(*sizes.values(), strict=True)), default=None)


def net_saved_bytes(run: Recorded) -> float | None:
    """All state's bytes, less what state, slots and window take on the device. Below 0, offload took more than it gave.

    From the receipt; of a run without one, as it was planned; of older runs, the plan's bytes less the receipt's. The
    same for weights that live on the host, less their copies on the device.
    """
    if not offloads(run):
        return 0.0
    for recorded in (run.receipt.get("net_saved_bytes"), run.run.get("net_saved_bytes")):
        if is_number(recorded):
            return float(recorded) + _weights_saved(run)
    on_device = run.receipt.get("device_state_bytes")
    if run.plan is None or not is_number(on_device):
        return None
    return float(sum(size.state_bytes for size in run.plan.sizes) - on_device)


def _weights_saved(run: Recorded) -> float:
    weights = run.run.get("weights") or {}
    return float(weights.get("host_bytes", 0) - weights.get("device_bytes", 0))


def exposed_ms(run: Recorded) -> float | None:
    """How long a usual step waited for updates."""
    recorded = run.receipt.get("exposed_ms")
    return _first(run.usual("exposed_ms"), float(recorded) if is_number(recorded) else None)


def headline(run: Recorded) -> list[Cell]:
    """Peak with and without offload, cost per step, net saving."""
    peak, net = peak_bytes(run), net_saved_bytes(run)
    without = None if peak is None or net is None else peak + net
    return [cell for cell in (_peak(run, peak, without), _cost(run), _net(run, net, without)) if cell is not None]


def _peak(run: Recorded, peak: float | None, without: float | None) -> Cell | None:
    if peak is None:
        return None
    where = "" if run.most("device_peak_bytes") is not None else ", in the observed step"
    if not offloads(run):
        return Cell(f"Peak on the device{where}", format_size(peak), "measured without offload: all state is resident")
    note = "without offload: not known, no receipt"
    if without is not None:
        note = f"without offload {format_size(without)}, calculated: this peak plus the net saving"
    return Cell(f"Peak on the device{where}", format_size(peak), note)


def _cost(run: Recorded) -> Cell | None:
    if not offloads(run):
        return Cell("Cost per step", "none", "nothing is offloaded")
    exposed, step = exposed_ms(run), run.usual("step_ms")
    if exposed is None:
        return None
    shown = f"{exposed:,.0f} ms" if exposed >= 100 else f"{exposed:.2f} ms"
    if not step or exposed > 100 * step:
        return Cell("Cost per step", shown, "waited for updates")
    return Cell("Cost per step", shown, f"waited for updates: {exposed / step:.1%} of a step of {step:,.0f} ms")


def _net(run: Recorded, net: float | None, without: float | None) -> Cell | None:
    if net is None:
        return None
    if not offloads(run):
        return Cell("Net saving", "none", "nothing is offloaded")
    if net < 0:
        note = "state, slots and window take more of the device than all state would if it were resident"
        return Cell("Net saving", f"−{format_size(-net)}", note, is_bad=True)
    share = f"{net / without:.0%} of the peak without offload: " if without else ""
    what = "all state and the weights on the host" if run.run.get("weights") else "all state"
    return Cell("Net saving", format_size(net), f"{share}{what}, less what of it, slots and window take on the device")


# Limits #


def limits_of(run: Recorded, highest: float) -> list[Limit]:
    """What the device's memory had to keep to. `highest`: of the data in the figure."""
    weights = max(((run.observed.get("memory") or {}).get("bytes") or {}).get("weights") or [0])
    capacity = (run.run.get("machine") or {}).get("device_bytes") if isinstance(run.run.get("machine"), dict) else None
    found = [
        ("device_budget, for state above the weights", _size(run, "device_budget"), weights, "warn", True),
        ("device_peak", _size(run, "device_peak"), 0, "warn", False),
        ("the device’s memory", capacity, 0, "quiet", False),
    ]
    return [
        Limit(text, nbytes, base + nbytes, color, dashed, base + nbytes <= _IN_VIEW * highest)
        for text, nbytes, base, color, dashed in found
        if is_number(nbytes) and nbytes
    ]


def _size(run: Recorded, name: str) -> int | None:
    value = run.settings.get("", {}).get(name, run.settings.get("offload", {}).get(name))
    try:
        found = None if value is None else parse_size(value, name)
    except (ConfigError, OverflowError):  # the text of a stranger, or of another version
        return None
    return found if found is None or found < 2**62 else None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
