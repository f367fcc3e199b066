# SPDX-License-Identifier: Apache-2.0
"""`FittedRun`: a run within `device_peak`: `fit` decides, the folder keeps the plan, and a resumed run begins with it.

fit_plan.json is what `FitPlan.to_json` wrote; run.json has, as `fit`, what the plan was made for. A plan that was made
for something else is not used: the run says so and measures again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offstage import ConfigError, FitPlan, Machine, OffloadConfig, OffloadedOptimizer, fit, measure_machine
from offstage.config import exact_size, format_size
from offstage.fitting.fitted import Fitted
from offstage.optimizer.optimizer import runtime_of
from offstage.train.config import TrainConfig
from offstage.train.fit_settings import passed_on
from offstage.train.metrics import Row
from offstage.train.parallel import Parallel
from offstage.train.reading import BadFileError, read_bytes
from offstage.train.run_folder import RunFolder, named
from offstage.train.run_info import identity, machine, places

Say = Callable[..., None]


class FittedRun:
    """One run that decides by itself."""

    def __init__(
        self, config: TrainConfig, parallel: Parallel, folder: RunFolder, say: Say, *, vocabulary: int
    ) -> None:
        """Before anything is allocated: this measures the machine, if that was never done."""
        self._config, self._folder, self._say = config, folder, say
        self._machine: Machine = measure_machine(parallel.device)
        self.made_for = made_for(config, parallel, vocabulary)
        self._known = self._found()
        self._written: FitPlan | None = None
        self._optimizer: OffloadedOptimizer | None = None

    # Beginning #

    def _found(self) -> FitPlan | None:
        """The plan in the folder, if it was made for this run."""
        try:
            text = read_bytes(self._folder.fit_plan).decode("utf-8", errors="replace")
            plan = _checked(FitPlan.from_json(text))
        except FileNotFoundError:
            return None
        except (BadFileError, ConfigError) as error:
            self._measures_again(f"could not be read ({error})")
            return None
        then = self._folder.read_json(self._folder.run).get("fit")
        then = then if isinstance(then, dict) else {}
        differs = [name for name in self.made_for if then.get(name) != self.made_for[name]]
        if differs:
            listed = ", ".join(f"{name} {_shown(then.get(name))} then" for name in differs)
            now = ", ".join(_shown(self.made_for[name]) for name in differs)
            self._measures_again(f"was made for another run ({listed}; now {now})")
            return None
        return plan

    def _measures_again(self, why: str) -> None:
        name = self._folder.fit_plan.name
        self._say(f"{name} {why}: it is not used, and the run measures itself again", fit="measures again")

    def take_over(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> OffloadedOptimizer:
        """The optimizer to use, which begins with the plan in the folder, or measures."""
        settings, limits = passed_on(self._config.offload), self._config.fit
        wanted: dict[str, Any] = {"machine": self._machine, **settings}
        try:
            made = fit(model, optimizer, limits.peak_bytes, limits.host_budget, plan=self._known, **wanted)
        except ConfigError as error:
            if self._known is None:
                raise
            # Nothing has been taken over: such a plan is refused first. If another setting is wrong, it raises again.
            self._measures_again(f"does not fit ({error})")
            self._known = None
            made = fit(model, optimizer, limits.peak_bytes, limits.host_budget, **wanted)
        self._optimizer, self._written = made, made.fitted
        return made

    def begin(self) -> None:
        """The run has been accepted: what is not used goes, and it is said how the run begins."""
        peak = format_size(self._config.fit.peak_bytes)
        if self._known is None:
            with named(self._folder.fit_plan):
                self._folder.fit_plan.unlink(missing_ok=True)
            self._say(f"device_peak {peak}: the first steps are measured, with all on the host that can be there")
        else:
            self._say(f"device_peak {peak}, as decided before: {self._known.summary()}", fit="as before")

    # Deciding #

    def after_step(self, step: int) -> None:
        """Write a plan that is new, which hardly any step has, and say what it decides."""
        assert self._optimizer is not None
        plan, before = self._optimizer.fitted, self._written
        if plan is None or plan is before:
            return
        self._written = plan
        self._folder.write_text(self._folder.fit_plan, plan.to_json() + "\n")
        if before is None or before.setting != plan.setting:
            about = self._folder.read_json(self._folder.run)
            self._folder.write_json(self._folder.run, {**about, **places(self._optimizer)})
            self._say(f"decided after step {step}: {plan.summary()}", fit="decided", step=step)
            for line in str(plan).splitlines() if before is None else ():
                self._say(f"  {line}")

    @property
    def plan(self) -> FitPlan | None:
        """What was decided last."""
        return self._written

    def summary(self, last: Row | None) -> str:
        """One line for the end of the run: what was decided and predicted, and what the `last` step measured."""
        if self._written is None:
            return f"device_peak {exact_size(self._config.fit.peak_bytes)}: the run ended before it had decided"
        if last is None:
            return f"device_peak: {self._written.summary()}"
        peak = "" if last.device_peak_bytes is None else f", {format_size(last.device_peak_bytes)} on the device"
        return f"device_peak: {self._written.summary()}; measured {last.step_ms:.1f} ms{peak}"

    def close(self) -> None:
        """Decide nothing more."""
        watcher = None if self._optimizer is None else runtime_of(self._optimizer).watcher
        if isinstance(watcher, Fitted):
            watcher.remove()


def fitted_run(
    config: TrainConfig, parallel: Parallel, folder: RunFolder, say: Say, *, vocabulary: int
) -> FittedRun | None:
    """`None` if the settings decide."""
    return FittedRun(config, parallel, folder, say, vocabulary=vocabulary) if config.fit.decides else None


def made_for(config: TrainConfig, parallel: Parallel, vocabulary: int) -> dict[str, Any]:
    """What a plan depends on, as plain values: with another one of these it is made again."""
    data, here = config.data, machine(parallel.device)
    found = {
        "device_peak": config.fit.peak_bytes,
        "host_budget": config.fit.host_budget,
        "model": identity(config, parallel.device, vocabulary),
        "micro-batch": [data.batch, data.sequence],
        "micro-batches": data.micro_batches,
        "offload": passed_on(config.offload),
        "machine": {name: value for name, value in here.items() if name != "host"},
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it is read back
    return plain


def _checked(plan: FitPlan) -> FitPlan:
    """Raise for what `fit` does not expect in a plan of its own: the file may have been edited."""
    names = {one.name for one in dataclasses.fields(OffloadConfig)}
    strange = [name for name in plan.overrides if name not in names]
    if strange or len(plan.setting.choices) != len(plan.loop.layers):
        raise ConfigError(
            f"expected settings of offload() and a choice for each of {len(plan.loop.layers)} layers, found "
            f"{strange[0] if strange else len(plan.setting.choices)}"
        )
    return plan


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
