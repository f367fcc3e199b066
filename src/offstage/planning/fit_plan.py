# SPDX-License-Identifier: Apache-2.0
"""`FitPlan`: what `fit` has decided for a job, why, and from which measurements. Printable, and JSON and back.

`plan_job` is pure: the same job and the same limits give the same plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offstage.config import format_size
from offstage.errors import ConfigError
from offstage.planning.choices import Choice
from offstage.planning.choosing import Limits, Predicted, best_of_each, choose, least_memory, predict
from offstage.planning.job import Job, Setting
from offstage.planning.loop import LayerLoad, Loop
from offstage.planning.predict import CHOSEN

_WORTH_SAYING_MS = 1.0
"""What a loop forbids is said if it costs so much, and a hundredth of the iteration."""


@dataclass(frozen=True)
class Considered:
    """A setting that was compared."""

    name: str
    predicted: Predicted
    verdict: str
    """``"chosen"``, or the reason why not."""


@dataclass(frozen=True)
class FitPlan:
    """What was decided, and for what."""

    predicted: Predicted
    """The setting, and what it was predicted to take."""
    overrides: Mapping[str, object]
    """The fields of `OffloadConfig` that make the setting."""
    limits: Limits
    loop: Loop
    """The measurements."""
    num_params: int
    state_bytes: int
    """Of the optimizer, to recognise it."""
    unseen_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    slowdowns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    considered: tuple[Considered, ...] = dataclasses.field(default=(), compare=False)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What the loop forbids and what that costs; what could not be used."""

    @property
    def setting(self) -> Setting:
        return self.predicted.setting

    def summary(self) -> str:
        """One line, for logs."""
        found = self.predicted
        return (
            f"{describe(self.setting, self.overrides)}: predicted {found.iteration_ms:.1f} ms, "
            f"{format_size(found.device_bytes)} of {format_size(self.limits.device)} on the device, "
            f"{format_size(found.host_bytes)} on the host"
        )

    def __str__(self) -> str:
        return "\n".join(_rows(self))

    def to_json(self) -> str:
        """The whole plan as a JSON object."""
        return json.dumps(dataclasses.asdict(self), default=_plain)

    @classmethod
    def from_json(cls, text: str) -> FitPlan:
        """The inverse of `to_json`."""
        try:
            fields = json.loads(text)
            layers = tuple(LayerLoad(**layer) for layer in fields["loop"].pop("layers"))
            return cls(
                predicted=_predicted(fields.pop("predicted")),
                limits=Limits(**fields.pop("limits")),
                loop=Loop(layers=layers, **fields.pop("loop")),
                considered=tuple(
                    Considered(one["name"], _predicted(one["predicted"]), one["verdict"])
                    for one in fields.pop("considered")
                ),
                notes=tuple(fields.pop("notes")),
                **fields,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"FitPlan.from_json expects what FitPlan.to_json wrote; found {text[:80]!r} ({error!r}). Leave plan "
                "out: fit() makes it again in a few iterations."
            ) from error


def _plain(value: object) -> object:
    assert isinstance(value, Choice)
    return value.value


def _predicted(fields: dict[str, object]) -> Predicted:
    setting = dict(fields.pop("setting"))  # type: ignore[call-overload]
    choices = tuple(Choice(value) for value in setting.pop("choices"))
    return Predicted(Setting(choices=choices, **setting), **fields)  # type: ignore[arg-type]


# Making one #


def plan_job(job: Job, limits: Limits, setting: Setting | None = None) -> FitPlan:
    """The fastest plan that fits, or that of `setting`; raises with numbers if none fits."""
    each = best_of_each(job, limits)
    chosen = choose(job, limits, each) if setting is None else predict(job, setting)
    if chosen is None:
        raise ConfigError(refusal(least_memory(job, limits), limits))
    return FitPlan(
        predicted=chosen,
        overrides=job.overrides(chosen.setting),
        limits=limits,
        loop=job.loop,
        num_params=len(job.sizes),
        state_bytes=job.state,
        unseen_bytes=dict(job.unseen_bytes),
        slowdowns=dict(job.slowdowns),
        considered=tuple(_considered(job, limits, chosen, each)),
        notes=(*job.notes, *_notes(job, limits, chosen)),
    )


def refusal(least: Predicted, limits: Limits) -> str:
    """Why nothing fits: expected, found, remedy."""
    if least.device_bytes > limits.device:
        return (
            f"device_peak={format_size(limits.device)} is not enough: with all that can leave on the host this job "
            f"takes {format_size(least.device_bytes, up=True)} on the device. Raise device_peak to that, or use a "
            "smaller micro-batch or shorter sequences."
        )
    return (
        f"The host has {format_size(limits.host)} for this job, which takes {format_size(least.host_bytes, up=True)} "
        f"there if the device is to have no more than {format_size(limits.device)}. Raise host_budget or device_peak, "
        "or use master_weights='split' or state_dtype='bfloat16'."
    )


def _considered(job: Job, limits: Limits, chosen: Predicted, each: Sequence[Predicted]) -> Iterator[Considered]:
    """The chosen one, the best with other cues, and what everybody tries first."""
    yield Considered(describe(chosen.setting, {}), chosen, CHOSEN)
    seen = {chosen.setting}
    simple = [Setting((Choice.KEEP,) * job.num_layers, resident=job.most_resident)]
    simple.append(dataclasses.replace(simple[0], resident=0))
    recomputed = tuple(Choice.RECOMPUTE if layer.can_recompute else Choice.KEEP for layer in job.loop.layers)
    if job.may_offload_activations:
        simple.append(dataclasses.replace(simple[0], choices=recomputed))
        simple.append(dataclasses.replace(simple[1], choices=recomputed))
    for one in [*each, *(predict(job, setting) for setting in simple)]:
        if one.setting not in seen:
            seen.add(one.setting)
            yield Considered(describe(one.setting, {}), one, _verdict(one, chosen, limits))


def _verdict(one: Predicted, chosen: Predicted, limits: Limits) -> str:
    for name, found, most in (
        ("device_peak", one.device_bytes, limits.device),
        ("host memory", one.host_bytes, limits.host),
    ):
        if found > most:
            return f"{format_size(found - most)} over {name}"
    slower = one.iteration_ms - chosen.iteration_ms
    return f"{slower:.1f} ms slower" if slower > 0.05 else "no faster"


def _notes(job: Job, limits: Limits, chosen: Predicted) -> Iterator[str]:
    """What would be faster if the loop allowed it."""
    if job.loop.reads_gradients:
        freed = dataclasses.replace(job, loop=dataclasses.replace(job.loop, reads_gradients=False, clips=True))
        other = choose(freed, limits)
        slower = chosen.iteration_ms - other.iteration_ms if other is not None else 0.0
        if slower > max(_WORTH_SAYING_MS, 0.01 * chosen.iteration_ms):
            yield (
                f"gradients are used between backward and step(): {slower:.0f} ms slower; use "
                "optimizer.clip_grad_norm_ instead of torch's, and log the norm that it returns"
            )


# A plan as a table #


def describe(setting: Setting, overrides: Mapping[str, object]) -> str:
    """A setting in words."""
    counts = [(choice, setting.choices.count(choice)) for choice in Choice]
    layers = ", ".join(f"{count} {choice.value}" for choice, count in counts if count and choice is not Choice.KEEP)
    weights = f"weights of {setting.hosted} layers on the host" if setting.hosted else ""
    cpu = f"{setting.host_share:.0%} by the CPU" if setting.host_share else ""
    when = {
        (False, False): "updates in step()",
        (True, False): "updates under forward",
        (False, True): "updates in backward",
        (True, True): "updates in backward and under forward",
    }[setting.overlap_forward, setting.update_in_backward]
    if overrides.get("fraction") == 0.0:
        when = "all state on the device"
    return "; ".join(part for part in (when, cpu, weights, f"layers: {layers}" if layers else "") if part)


def _rows(plan: FitPlan) -> Iterator[str]:
    found, limits, loop = plan.predicted, plan.limits, plan.loop
    given = {name: value for name, value in plan.overrides.items() if value not in (None, False)}
    shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in given.items()}
    keeps = " ".join(f"{name}={value!r}" for name, value in shown.items())
    rows = [
        ("decided", describe(plan.setting, plan.overrides)),
        ("iteration", f"{found.iteration_ms:.1f} ms predicted, {loop.compute_ms:.1f} ms of it compute if all is kept"),
        ("device", f"{format_size(found.device_bytes)} of {format_size(limits.device)} at the peak"),
        ("host", f"{format_size(found.host_bytes)} of {format_size(limits.host)}"),
        ("settings", keeps),
        ("loop", _loop(loop)),
        *(("note", text) for text in plan.notes),
    ]
    for name, value in rows:
        yield f"{name:<10} {value}"
    yield ""
    yield f"  {'iteration':>10} {'device':>10} {'host':>10}  considered"
    for one in plan.considered:
        mark = ">" if one.verdict == CHOSEN else " "
        size = one.predicted
        yield (
            f"{mark} {size.iteration_ms:>7.1f} ms {format_size(size.device_bytes):>10} "
            f"{format_size(size.host_bytes):>10}  {one.name}: {one.verdict}"
        )


def _loop(loop: Loop) -> str:
    saved = sum(layer.saved_bytes for layer in loop.layers)
    clips = "clips" if loop.clips else "uses gradients itself" if loop.reads_gradients else "does not clip"
    batches = f"{loop.micro_batches} micro-batch{'es' * (loop.micro_batches > 1)}"
    return f"{len(loop.layers)} layers that save {format_size(saved)}, {batches}, {clips}"
