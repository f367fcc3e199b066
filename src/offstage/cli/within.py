# SPDX-License-Identifier: Apache-2.0
"""`offstage plan --device-peak`: what `fit` would decide within some device memory, for a loop that is estimated.

Nothing is measured here but the machine: the loop's times and bytes come from shapes (`planning/estimate.py`), and the
answer says so. The plan that a run makes of its own measurements counts.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offstage import ConfigError, FitPlan, Machine, OffloadConfig, Workload, World
from offstage.config import exact_size, format_size, parse_size
from offstage.planning.choosing import Limits
from offstage.planning.estimate import EXPERTS_PER_TOKEN, Batch, estimated_loop
from offstage.planning.fit_plan import describe, plan_job
from offstage.planning.job import Job
from offstage.planning.presets import Preset
from offstage.planning.sizes import Source, param_sizes
from offstage.train.config import TrainConfig
from offstage.train.fit_settings import FitSettings, check_decided, passed_on
from offstage.train.transformer import LOSS_SLICE_BYTES

_HOST = 0.95
"""Of the host's free memory, where no budget is given."""
_SEQUENCES, _SEQUENCE = 8, 2048
"""Of a micro-batch, where nothing says it: the workload of the benchmarks."""
_SLICES = 3
"""Slices of logits at once in the loss of `offstage train`: in the weights' format, in fp32, and their gradient."""


@dataclass(frozen=True, kw_only=True)
class WithinOptions:
    """Flags that say how much memory there is, and what the loop is estimated from."""

    device_peak: tuple[str, ...] = ()
    """The most device memory of the whole process, such as 24GiB: state, weights and activations are placed together,
    as offstage.fit and offstage train --device-peak do. Several sizes give one line each. After the model's name."""

    host_budget: str | None = None
    """With --device-peak: the most host memory. Without it: what is free, less 5%."""

    batch: int | None = None
    """With --device-peak: sequences of one micro-batch; by default those of the .toml, or 8."""

    sequence: int | None = None
    """With --device-peak: tokens of one sequence; by default those of the .toml, or 2048."""

    tflops: float | None = None
    """With --device-peak: what the device reaches in matrix products, 1e12 operations per second. Known of machines by
    name; of others give it, or the times --workload.forward-ms and --workload.backward-ms, without recomputation."""

    def refuse_alone(self) -> None:
        """Raise for a flag that has no effect without --device-peak."""
        for one in dataclasses.fields(WithinOptions):
            if one.name != "device_peak" and getattr(self, one.name) is not None and not self.device_peak:
                raise ConfigError(
                    f"--{one.name.replace('_', '-')}={getattr(self, one.name)} is for plans with --device-peak; found "
                    "none. Give --device-peak, or leave it out."
                )


@dataclass(frozen=True)
class Within:
    """One job, and the limits that it is planned for."""

    job: Job
    batch: Batch
    limits: tuple[Limits, ...]
    estimates: tuple[str, ...]
    """What was estimated or assumed, in words."""

    def answers(self) -> list[FitPlan | ConfigError]:
        """A plan for each limit, or why there is none; raises if there is no plan at all."""
        found = [_answer(self.job, limits) for limits in self.limits]
        refused = [one for one in found if isinstance(one, ConfigError)]
        if len(refused) == len(found):
            raise refused[-1]
        return found

    def to_json(self) -> str:
        """The plan as `FitPlan.from_json` reads it; of several limits, a list. A limit without a plan has `refused`."""
        found = [_as_object(one, limits) for one, limits in zip(self.answers(), self.limits, strict=True)]
        return json.dumps(found[0] if len(found) == 1 else found)

    def __str__(self) -> str:
        found = self.answers()
        only = found[0]
        table = str(only) if len(found) == 1 else "\n".join(self._rows(found))
        return "\n".join([table, "", *(f"estimated  {text}" for text in self.estimates)])

    def _rows(self, found: Sequence[FitPlan | ConfigError]) -> Iterator[str]:
        yield f"{'device_peak':>12} {'iteration':>12} {'device':>10} {'host':>10}  decided"
        for one, limits in zip(found, self.limits, strict=True):
            peak = f"{format_size(limits.device):>12}"
            if isinstance(one, ConfigError):
                yield f"{peak} {'-':>12} {'-':>10} {'-':>10}  {str(one).partition('. ')[0]}"
                continue
            took = one.predicted
            yield (
                f"{peak} {took.iteration_ms:>9,.1f} ms {format_size(took.device_bytes):>10} "
                f"{format_size(took.host_bytes):>10}  {describe(one.setting, one.overrides)}"
            )


def _answer(job: Job, limits: Limits) -> FitPlan | ConfigError:
    try:
        return plan_job(job, limits)
    except ConfigError as error:
        return error


def _as_object(found: FitPlan | ConfigError, limits: Limits) -> dict[str, Any]:
    if isinstance(found, ConfigError):
        return {"limits": dataclasses.asdict(limits), "refused": str(found)}
    content: dict[str, Any] = json.loads(found.to_json())
    return content


@dataclass(frozen=True, kw_only=True)
class Described:
    """The model, the machine and what else the command line said."""

    sizes: Source
    machine: Machine
    preset: Preset | None
    config: OffloadConfig
    world: World
    workload: Mapping[str, Any]
    """Its fields that were given."""
    run: TrainConfig
    is_run: bool
    """`run` is a .toml; otherwise its settings are defaults."""
    is_own: bool
    """The model is one of `offstage train`."""
    dtype: torch.dtype


def within(options: WithinOptions, asked: Described) -> Within:
    """The question; raises for what cannot be asked."""
    peaks = sorted({parse_size(text, "--device-peak") for text in options.device_peak})
    _check(peaks, asked)
    batch = _batch(options, asked)
    host = int(_HOST * asked.machine.host_free_bytes)
    if options.host_budget is not None:
        host = parse_size(options.host_budget, "--host-budget")
    config = OffloadConfig(**passed_on(asked.config))
    assert isinstance(asked.sizes, Mapping)
    sizes = param_sizes(asked.sizes, dataclasses.replace(config, weights="host"))  # which know their layers
    shapes = {name: tuple(tensor.shape) for name, tensor in asked.sizes.items() if isinstance(tensor, torch.Tensor)}
    tflops, times = _speed(options, asked)
    loop = estimated_loop(
        shapes,
        {size.name: size.layer for size in sizes if size.layer is not None},
        batch,
        itemsize=asked.dtype.itemsize,
        tflops=tflops,
        times_ms=times,
        most_turn_bytes=_SLICES * LOSS_SLICE_BYTES if asked.is_own else None,
    )
    return Within(
        Job(sizes=tuple(sizes), loop=loop, machine=asked.machine, config=config),
        batch,
        tuple(Limits(peak, host) for peak in peaks),
        tuple(_estimates(asked, batch, options, tflops, any(size.expert for size in sizes))),
    )


def _check(peaks: Sequence[int], asked: Described) -> None:
    check_decided(FitSettings(device_peak=peaks[-1]), asked.config)
    if not peaks[0] or peaks[-1] > asked.machine.device_bytes:
        raise ConfigError(
            f"--device-peak expects more than 0 bytes and at most the {format_size(asked.machine.device_bytes)} of "
            f"{asked.machine.device_name}; found {exact_size(peaks[-1] if peaks[0] else 0)}. Choose a size between, or "
            "another --machine."
        )
    if asked.world.ranks > 1:
        raise ConfigError(
            f"--device-peak plans for one device, as fit() decides for one; found {asked.world.ranks} ranks. Leave "
            "--devices and --world out, or use --budget, which plans the state of one of several ranks."
        )


def _batch(options: WithinOptions, asked: Described) -> Batch:
    data, model = asked.run.data, asked.run.model
    sequences, sequence = (data.batch, data.sequence) if asked.is_run else (_SEQUENCES, _SEQUENCE)
    given: dict[str, int] = {
        "sequences": sequences if options.batch is None else options.batch,
        "sequence": sequence if options.sequence is None else options.sequence,
    }
    for flag, name in (("--batch", "sequences"), ("--sequence", "sequence")):
        if given[name] < 1:
            raise ConfigError(f"{flag} expects a whole number of at least 1; found {given[name]}. Leave it out.")
    return Batch(
        **given,
        micro_batches=asked.workload.get("micro_batches", 1),
        clips=asked.workload.get("clips", bool(asked.run.optimizer.clip)),
        experts_per_token=model.experts_per_token or EXPERTS_PER_TOKEN,
    )


def _speed(options: WithinOptions, asked: Described) -> tuple[float | None, tuple[float, float] | None]:
    """What the device reaches, or the times that were given."""
    work = Workload(**asked.workload)
    if options.tflops is not None and (work.forward_ms or work.backward_ms):
        raise ConfigError(
            f"--tflops={options.tflops:g} and --workload times both say how fast the device is; expected one of them. "
            "Leave --tflops out: times are more precise."
        )
    if work.forward_ms and work.backward_ms:
        return None, (work.forward_ms, work.backward_ms)
    if options.tflops is not None and not options.tflops > 0:
        raise ConfigError(f"--tflops expects more than 0; found {options.tflops:g}. Leave it out for a --machine NAME.")
    known = options.tflops if options.tflops is not None else asked.preset.tflops if asked.preset else None
    if known is None or work.forward_ms or work.backward_ms:
        raise ConfigError(
            "--device-peak needs to know how long forward and backward take, which no measurement of the machine says; "
            f"found forward {work.forward_ms:g} ms and backward {work.backward_ms:g} ms. Give --workload.forward-ms "
            "and --workload.backward-ms (of one micro-batch, without recomputation), or --tflops, or a --machine by "
            "name."
        )
    return known, None


def _estimates(
    asked: Described, batch: Batch, options: WithinOptions, tflops: float | None, has_experts: bool
) -> Iterator[str]:
    assumed = "" if asked.is_run or None not in (options.batch, options.sequence) else ", assumed"
    yield (
        f"the loop: {batch.sequences} sequences of {batch.sequence:,} tokens per micro-batch (--batch, --sequence"
        f"{assumed}); bytes from the shapes of matrices, 30% for what else layers save"
    )
    if tflops is None:
        yield "times of layers: parts of the given forward and backward, by their operations"
    else:
        preset = asked.preset if options.tflops is None else None
        yield f"times of layers: {preset.explain_tflops() if preset else f'{tflops:g} TFLOP/s, as given'}"
    if has_experts:
        yield f"a token visits {batch.experts_per_token} experts of each layer"
    yield "a run measures all of this itself: `offstage train --device-peak` and offstage.fit print their own plan"


def usage(model: str, flags: Sequence[str], found: Within, *, is_size: bool) -> str:
    """The call and the command that train within the largest limit."""
    peak = exact_size(found.limits[-1].device)
    given = ", ".join(f"{name}={value!r}" for name, value in passed_on(found.job.config).items())
    lines = [f"offstage.fit(model, optimizer, device_peak={peak!r}{f', {given}' if given else ''})"]
    formats = [f"--offload.{name.replace('_', '-')}={value}" for name, value in passed_on(found.job.config).items()]
    if is_size or model.endswith(".toml"):
        what = f"--model.size={model}" if is_size else f"--config={model}"
        lines.append(shlex.join(["offstage", "train", what, *flags, f"--device-peak={peak}", *formats]))
    return "\n".join(lines)
