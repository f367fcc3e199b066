# SPDX-License-Identifier: Apache-2.0
"""The receipt: what was really moved, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offstage.config import format_size
from offstage.engine.timer import StepTimer
from offstage.engine.timer import exposed_ms as exposed_of
from offstage.engine.transport import Moved
from offstage.lanes.lanes import Lane
from offstage.optimizer.runtime import Runtime

_ALWAYS = (Lane.FETCH, Lane.UPDATE, Lane.STORE)
"""Lanes that are shown whether they had work or not."""


@dataclass(frozen=True)
class Receipt:
    """Counted where the copies are made, not where they are planned."""

    steps: int
    """Steps counted so far."""
    bytes_fetched: int
    """Host → device, in the last step: state, and weights that the CPU has updated or that live on the host, and
    gradients that had left."""
    bytes_stored: int
    """Device → host, in the last step: state, and weights and gradients for updates by the CPU or that live there."""
    total_bytes_fetched: int
    total_bytes_stored: int
    device_state_bytes: int
    """State on the device now: resident state and slots."""
    host_state_bytes: int
    """Arenas, alignment included, and staging buffers."""
    host_weight_bytes: int = 0
    """Weights that live on the host, and the second set of them that speculative updates need."""
    host_gradient_bytes: int = 0
    """Host memory for gradients that leave the device."""
    device_weight_bytes: int = 0
    """The most of these weights that is on the device at once, if layers run one after the other."""
    moved: Moved = field(default_factory=Moved)
    """The last step's bytes by what they were: state, weights, gradients, each up and down."""
    net_saved_bytes: int = 0
    """Device memory that all state would take if it were resident, less what state, slots and window take there. Slots
    count from the beginning, though the first step allocates them."""
    lane_ms: dict[str, float] = field(default_factory=dict)
    """For how long each lane was busy with its own work for the last step: waiting does not count, and what runs at the
    same time counts once. Fetch, update and store; also lower, host and raise if the CPU updates. Devices add up."""
    host_update_ms: float | None = None
    """For how long the CPU was updating, in the last step: the time of the host lane."""
    exposed_ms: float | None = None
    """How long the last step held up the caller, in `step()` and wherever else it waited for updates: its stream; or,
    without an accelerator and for weights that live on the host, its thread, which does the lanes' work itself."""
    hidden_ms: float | None = None
    """How much of the transfers, at the link's measured rate, and of the CPU's updates ran under something else."""
    link_measured_gb_per_s: float | None = None
    """Each way with both directions busy, measured before the first step."""
    weights_written_by_others: int = 0
    """Elements whose weight no longer belonged to its master: the weight won."""
    skipped_steps: int = 0
    """Steps that changed nothing because the gradients' norm was not finite."""
    speculation_hits: int = 0
    """Steps whose updates in backward could stay, because nothing had to be clipped."""
    speculation_misses: int = 0
    """Steps that were made again with clipped gradients."""
    fallbacks: tuple[str, ...] = ()
    """What does not happen as it was asked for, and why."""
    advice: str | None = None
    """What would hide more, if anything would."""
    lane_bytes: dict[str, int] = field(default_factory=dict)
    """What each lane that copies has carried for the last step."""

    @property
    def link_gb_per_s(self) -> dict[str, float]:
        """What each lane that copies carried over the time in which it was busy.

        Without an accelerator, and for weights that live on the host, the copies are within host memory.
        """
        return {
            lane: size / self.lane_ms[lane] / 1e6 for lane, size in self.lane_bytes.items() if self.lane_ms.get(lane)
        }

    def _weight_rows(self) -> list[tuple[str, str]]:
        if not self.host_weight_bytes:
            return []
        moved = self.moved
        kinds = {
            "state": (moved.state_up, moved.state_down),
            "weights": (moved.weights_up, moved.weights_down),
            "gradients": (moved.gradients_up, moved.gradients_down),
        }
        return [
            ("weights on the host", format_size(self.host_weight_bytes)),
            ("of them on the device", f"at most {format_size(self.device_weight_bytes)}"),
            ("gradients on the host", format_size(self.host_gradient_bytes)),
            *((f"{kind} up / down", f"{format_size(up)} / {format_size(down)}") for kind, (up, down) in kinds.items()),
        ]

    def __str__(self) -> str:
        rows = [
            ("steps", f"{self.steps}"),
            ("fetched / stored, last step", f"{format_size(self.bytes_fetched)} / {format_size(self.bytes_stored)}"),
            ("state on the device", format_size(self.device_state_bytes)),
            ("state on the host", format_size(self.host_state_bytes)),
            *self._weight_rows(),
            ("saved on the device, net", format_size(self.net_saved_bytes)),
        ]
        rates = self.link_gb_per_s
        for lane, milliseconds in self.lane_ms.items():
            if lane == Lane.HOST.value:
                continue  # below
            rate = f", {rates[lane]:.1f} GB/s" if lane in rates else ""
            rows.append((f"{lane} lane", f"{milliseconds:.2f} ms{rate}"))
        if self.host_update_ms is not None:
            rows.append(("updates on the host", f"{self.host_update_ms:.2f} ms"))
        if self.link_measured_gb_per_s:
            rows.append(("link, measured at start", f"{self.link_measured_gb_per_s:.1f} GB/s each way"))
        if self.exposed_ms is not None:
            hidden = f", hidden {self.hidden_ms:.2f} ms" if self.hidden_ms is not None else ""
            rows.append(("exposed", f"{self.exposed_ms:.2f} ms{hidden}"))
        if self.speculation_hits or self.speculation_misses:
            rows.append(("speculation", f"{self.speculation_hits} hits, {self.speculation_misses} misses"))
        if self.skipped_steps:
            rows.append(("skipped, norm not finite", f"{self.skipped_steps} steps"))
        if self.weights_written_by_others:
            rows.append(("weights written by others", f"{self.weights_written_by_others} elements"))
        rows += [("not as asked for", text) for text in self.fallbacks]
        if self.advice:
            rows.append(("advice", self.advice))
        return "\n".join(f"{name:<28} {value}" for name, value in rows)


def _advise(runtime: Runtime, exposed_ms: float | None, transfer_ms: float | None) -> str | None:
    """One line when something is left on the table: a tenth of the transfers, and a millisecond, are worth it."""
    if not exposed_ms or not transfer_ms or exposed_ms < 1.0 or exposed_ms < 0.1 * transfer_ms:
        return None
    config, found = runtime.config, f"{exposed_ms:.0f} ms of each step are waited for"
    if not config.overlap_forward:
        return f"{found}: overlap_forward=True lets the next forward begin during the updates"
    if not config.update_in_backward:
        return (
            f"{found}: a lower fraction, if there is device memory, or update_in_backward=True, if the loop allows it"
        )
    streamed = [state for state in runtime.all_states() if state.home is not None]
    if any(state.master_kind == "fp32" and state.param.dtype == torch.bfloat16 for state in streamed):
        return f"{found}: master_weights='split' moves a sixth less and loses nothing (Adam and AdamW)"
    return f"{found}: the link is the limit; lower fraction if there is device memory"


def make_receipt(runtime: Runtime) -> Receipt:
    """`optimizer.receipt()`. Waits for the device."""
    engines = runtime.engines
    runtime.synchronize()
    # With overlap the waits for a step end only in the iteration after it: the step before is the last complete one.
    late = runtime.config.overlap_forward or runtime.config.update_in_backward
    timers = [engine.transport.timer for engine in engines if engine.transport.is_open]
    timers = [timer for timer in timers if timer.has_times]
    lane_ms, lane_bytes = _lanes(timers)
    host_ms = lane_ms.get(Lane.HOST.value, 0.0)
    exposed = exposed_of(timers, last=not late) if timers else None
    link = min((engine.transport.link_gb_per_s for engine in engines if engine.transport.link_gb_per_s), default=None)
    moved, last, weights = runtime.moved(), runtime.last_moved, runtime.weights
    transfer = max(max(last.up, last.down) / link / 1e6, host_ms) if link else None
    counters = [runtime.rule.external_writes(engine.device) for engine in engines]
    on_device = sum(runtime.device_state_bytes(engine.device) for engine in engines)
    to_come = sum(engine.transport.pipeline.missing_bytes for engine in engines)
    return Receipt(
        steps=runtime.steps,
        bytes_fetched=last.up,
        bytes_stored=last.down,
        total_bytes_fetched=moved.up,
        total_bytes_stored=moved.down,
        device_state_bytes=on_device,
        host_state_bytes=sum(engine.transport.host_state_bytes for engine in engines),
        host_weight_bytes=weights.host_bytes if weights is not None else 0,
        host_gradient_bytes=sum(engine.transport.gradients.nbytes for engine in engines),
        device_weight_bytes=weights.most_device_bytes if weights is not None else 0,
        moved=last,
        net_saved_bytes=sum(state.nbytes for state in runtime.all_states()) - on_device - to_come,
        host_update_ms=host_ms if any(engine.arenas.updates_on_host for engine in engines) else None,
        lane_ms=lane_ms,
        exposed_ms=exposed,
        hidden_ms=None if transfer is None or exposed is None else max(0.0, transfer - exposed),
        link_measured_gb_per_s=link,
        weights_written_by_others=(
            sum(int(counter) for counter in counters if counter is not None) + runtime.rule.external_on_host
        ),
        skipped_steps=runtime.skipped_steps,
        speculation_hits=runtime.speculation.hits,
        speculation_misses=runtime.speculation.misses,
        fallbacks=tuple(runtime.fallbacks()),
        advice=_advise(runtime, exposed, transfer),
        lane_bytes=lane_bytes,
    )


def _lanes(timers: Sequence[StepTimer]) -> tuple[dict[str, float], dict[str, int]]:
    """For how long each lane was busy for the last step, and what it carried; empty before the first step."""
    times: Counter[Lane] = Counter()
    carried: Counter[Lane] = Counter()
    for timer in timers:
        times.update(timer.lane_ms())  # type: ignore[arg-type]
        carried.update(timer.lane_bytes())
    shown = [lane for lane in Lane if timers and (lane in _ALWAYS or lane in times)]
    return {lane.value: float(times[lane]) for lane in shown}, {lane.value: size for lane, size in carried.items()}
