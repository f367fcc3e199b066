# SPDX-License-Identifier: Apache-2.0
"""`run`: the training loop. Read this first.

`Training` combines the parts (`passes.py`: the model, `data.py`: batches, `checkpoints.py`: saves, `metrics.py`:
measurements) and makes one step after the other. The host waits for a step's numbers after the next step has been
queued, and for the device nowhere else, except where `optimizer.step()` must know the gradients' norm.

A run that is stopped, by a signal, an error or kill -9, continues with the same command and ends with the same bits as
one that was never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offstage import ConfigError, FitPlan, OffloadedOptimizer, OffstageError, measure_machine, offload
from offstage.checkpoint.ranks import Ranks
from offstage.config import format_size
from offstage.memory.allocation_history import AllocationHistory
from offstage.optimizer.optimizer import runtime_of
from offstage.train.adamw import adamw_for
from offstage.train.checkpoints import Checkpoints, rng_states, set_rng_states
from offstage.train.config import DataSettings, TrainConfig, resolved, to_toml
from offstage.train.data import Batches, Feed
from offstage.train.description import first_weights, keep, with_tokenizer, without_weights
from offstage.train.determinism import deterministic, explained_errors
from offstage.train.extras import check_packages
from offstage.train.fitted_run import fitted_run
from offstage.train.memory_needs import check_host_weights, check_memory
from offstage.train.metrics import Meter, MetricsFile, Row
from offstage.train.observe import Observer
from offstage.train.parallel import Parallel, started
from offstage.train.passes import Passes, activation_mode, passes_for, sample_tokens
from offstage.train.progress import Progress, progress_for, warnings_to_progress
from offstage.train.run_folder import RunFolder, named
from offstage.train.run_info import identity, num_parameters_of, predicted_plan, run_info
from offstage.train.signals import FAILED, StopRequests
from offstage.train.tokenizer import HuggingFaceEncoder, encoder_for
from offstage.train.tokens import corpus_for
from offstage.train.trackers import Tracker, open_trackers
from offstage.weights.moving import describe

logger = logging.getLogger("offstage")
_PROMPT = 64
"""Tokens before a sample."""


class NotFiniteError(OffstageError):
    """The loss or a gradient is NaN or infinite, and the run must end."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    """The last step made."""
    steps: int
    """The number of steps configured."""
    loss: float | None
    """Of the last step; `None` if no step was made."""
    eval_loss: float | None
    """Of the last evaluation."""
    checkpoint: Path | None
    """The last one: of `step`, unless `run.save_last` is off."""
    skipped: int
    """Steps left out in this process because a gradient was not finite."""
    stopped_by: str | None = None
    """The signal that ended it early, such as SIGINT."""
    fitted: FitPlan | None = None
    """What the run has decided within `device_peak`."""


def run(config: TrainConfig) -> Result:
    """Train with `config`, from the newest checkpoint in its folder if there is one. Every rank calls it."""
    check_packages(config)
    with contextlib.ExitStack() as open_until_end:
        parallel = open_until_end.enter_context(started(config.parallel, config.run.torch_device()))
        check_host_weights(config, parallel)
        open_until_end.enter_context(deterministic(config, parallel.device))
        history = AllocationHistory(parallel.device) if config.run.memory_snapshot else None
        folder = RunFolder(config.run.folder)
        with Ranks(None).failing_together("Opening the run's folder"):
            progress = progress_for(config.run.progress, first=parallel.first)
            if parallel.first:
                open_until_end.enter_context(folder.locked())
        stop_requests = open_until_end.enter_context(StopRequests(parallel.host_group).listening())
        open_until_end.enter_context(warnings_to_progress(progress))
        if history is not None:
            open_until_end.enter_context(history)  # before the model, whose blocks then have their stacks
        training = Training(config, parallel, folder, progress, check=stop_requests.check)
        training.history = history
        open_until_end.callback(training.close)
        with explained_errors(config):
            return training.run(stop_requests)


class Training:
    """One run on one rank."""

    # Initialization #

    def __init__(
        self,
        config: TrainConfig,
        parallel: Parallel,
        folder: RunFolder,
        progress: Progress,
        *,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """`check` is called while data is prepared, which may take long; what it raises ends that."""
        self.config, self.parallel, self.folder, self._progress = config, parallel, folder, progress
        self.step = 0
        self.eval_loss: float | None = None
        self._skipped_in_a_row = 0
        self._observer: Observer | None = None
        self.history: AllocationHistory | None = None
        """Saved when the observed step has ended."""
        self._last_row: Row | None = None
        self._sinks: list[MetricsFile | Tracker] = []
        self.checkpoints = Checkpoints(
            folder.checkpoints,
            keep=config.run.keep_checkpoints,
            asynchronous=config.run.asynchronous_saves,
            first=parallel.first,
            fallback=config.run.fallback,
        )
        ranks = Ranks(None)
        with contextlib.ExitStack() as open_until_closed:
            to_build = self._to_build()
            with ranks.failing_together("Checking the memory"):
                self.encoder = encoder_for(to_build.data)
                # All ranks have claimed theirs before one of them takes any.
                claim = open_until_closed.enter_context(check_memory(to_build, parallel, self.encoder.vocabulary))
            with ranks.failing_together("Reading the data"):
                self.feed, self._eval_data = self._open_data(to_build.data, check)
            self.fitted = fitted_run(config, parallel, folder, progress.say, vocabulary=self.encoder.vocabulary)
            if self._predicts:
                measure_machine(parallel.device)  # now, while the device is empty; the result is cached
            with ranks.failing_together("Building the model"), explained_errors(config, building=True):
                self.passes: Passes = passes_for(to_build, parallel, self.encoder.vocabulary)
                claim.release()  # the optimizer claims what is left to take
                self.optimizer = self._make_optimizer()
                open_until_closed.callback(self.optimizer.close)
                if self.fitted is not None:
                    open_until_closed.callback(self.fitted.close)
                modes = activation_mode(config.activations, self.passes)
                self.activations = open_until_closed.enter_context(modes)
            tokens = config.data.sequence * config.data.batch * config.data.micro_batches * parallel.data_ranks
            self.meter = Meter(self.optimizer, parallel.device, tokens)
            self._open = open_until_closed.pop_all()

    def _open_data(self, data: DataSettings, check: Callable[[], object]) -> tuple[Feed, Any]:
        parallel = self.parallel
        # Any rank may be the one that prepares the data.
        reporting = self._progress if parallel.first else progress_for(self.config.run.progress, first=True)
        corpus = corpus_for(data, self.folder.path, reporting.say, check)
        training, held_out = corpus.split(data.eval_share)
        batches = Batches(
            training, data.sequence, data.batch, self.config.run.seed, parallel.data_rank, parallel.data_ranks
        )
        if self.config.run.eval_every:
            self._eval_batches(held_out)  # raises now if there is too little data
        return Feed(batches, data.micro_batches, parallel.device), held_out

    def _eval_batches(self, held_out: Any) -> Batches:
        """From the beginning: every evaluation uses the same sequences."""
        data, parallel = self.config.data, self.parallel
        return Batches(held_out, data.sequence, data.batch, 0, parallel.data_rank, parallel.data_ranks)

    def _to_build(self) -> TrainConfig:
        """A checkpoint brings all weights: what model.weights names is not read, and need not be there any more."""
        config, folder = self.config, self.folder
        if self.checkpoints.to_resume() is None:
            return config
        model, data = without_weights(config.model, folder), with_tokenizer(config.data, folder)
        return dataclasses.replace(config, model=model, data=data)

    def _make_optimizer(self) -> OffloadedOptimizer:
        model = self.passes.model
        adamw = adamw_for(model, self.config.optimizer)
        if self.fitted is not None:
            return self.fitted.take_over(adamw, model)
        return offload(adamw, model, self.config.offload)

    # Runtime #

    def run(self, stop_requests: StopRequests) -> Result:
        """Train until the last step, a signal, or an error."""
        config = self.config.run
        self._resume()
        with Ranks(None).failing_together("Opening the records"):
            self._open_sinks()
        self.folder.begun = True  # from here on, what is in the folder stays
        self._write_about()
        if self.history is not None and self.step >= config.observe_step:
            logger.warning("no memory snapshot: step %d, the observed one, was made before", config.observe_step)
        self._progress.begin(self.step, config.steps)
        stopped = 0
        try:
            while self.step < config.steps and not stopped:
                stop_requests.begin_step(failed=self.checkpoints.poll())
                self._make_step()
                stopped = stop_requests.end_step()
                if stopped != FAILED:
                    self._after_step(last=bool(stopped) or self.step == config.steps)
            self.checkpoints.finish()  # raises the error of a failed save
            if stopped == FAILED:
                raise OffstageError("A save has failed on another rank, whose message says why.")
            return self._finish(stopped)
        finally:
            self._progress.end()

    def _make_step(self) -> None:
        step, optimizer = self.step + 1, self.optimizer
        self._begin_observing(step)
        self.meter.begin()
        lr = self.config.optimizer.learning_rate(step, self.config.run.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr  # before backward, which may already update
        loss = self.passes.gradients(self.feed.take(), optimizer, self._mark)
        self.feed.prepare()
        skipped_before = runtime_of(optimizer).skipped_steps
        norm = self._clip()
        self._mark("step")
        optimizer.step()
        optimizer.zero_grad()
        if self.fitted is not None:
            self.fitted.after_step(step)
        skipped = runtime_of(optimizer).skipped_steps > skipped_before
        self.step = step
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._show(self.meter.end(step, self.parallel.mean(loss), norm, lr, skipped=skipped))
        if not optimizer.config.overlap_forward:
            self._end_observing()

    def _clip(self) -> torch.Tensor | None:
        """Clip by the norm of all gradients and return it; the step is skipped if it is not finite."""
        settings = self.config.optimizer
        if not settings.clip and self.fitted is None and self.config.offload.update_in_backward:
            return None  # backward has already used the gradients: only the loss shows NaN
        return self.optimizer.clip_grad_norm_(settings.clip or math.inf, group=self.parallel.stage_group)

    def _after_step(self, *, last: bool) -> None:
        """Evaluate, sample and save between two steps; each waits for the step's numbers."""
        config, step = self.config.run, self.step
        evaluates = bool(config.eval_every) and (step % config.eval_every == 0 or step == config.steps)
        saves = (last and config.save_last) or bool(config.save_every and step % config.save_every == 0)
        samples = bool(config.sample_every) and step % config.sample_every == 0
        given_up = self._skipped_in_a_row and (
            config.not_finite == "stop" or self._skipped_in_a_row >= config.most_not_finite
        )
        if evaluates or saves or samples or given_up or last:
            row = self.meter.flush()
            if row is not None and evaluates:
                row.eval_loss = self.eval_loss = self._evaluate()
            self._show(row)
        if samples:
            self._sample()
        if saves or (given_up and config.save_last):
            self._save(wait=last or bool(given_up))
        if given_up:
            raise NotFiniteError(
                f"{_times(self._skipped_in_a_row)} in a row up to step {step} had gradients that are NaN or infinite "
                f"(run.not_finite={config.not_finite!r}, run.most_not_finite={config.most_not_finite}). None of them "
                f"changed a weight; the newest checkpoint is {self.checkpoints.newest() or 'none'}. Lower "
                "optimizer.lr, or look at the data; the same command continues from there."
            )

    def _show(self, row: Row | None) -> None:
        """Check, show and write a row."""
        if row is None:
            return
        self._last_row = row
        for sink in self._sinks:
            sink.write(row)
        self._progress.show(row)
        if row.skipped:
            self._progress.say(f"step {row.step} changed nothing: its gradients are not finite", step=row.step)
        elif row.loss is None:
            self.checkpoints.finish()
            newest = self.checkpoints.newest()
            raise NotFiniteError(
                f"The loss of step {row.step} is not finite, and backward has used its gradients already: with "
                "offload.update_in_backward and without clipping they are not checked first. Nothing was saved since. "
                f"The newest checkpoint is {newest or 'none'}: resume from it with optimizer.clip=1.0, which "
                "skips such steps, or with a lower optimizer.lr."
            )

    # Evaluation and samples #

    def _evaluate(self) -> float:
        """The mean loss of the evaluation batches."""
        batches = self._eval_batches(self._eval_data)
        with self.passes.evaluating():
            losses = [
                self.passes.loss(batches.next().to(self.parallel.device)) for _ in range(self.config.run.eval_batches)
            ]
            found = float(self.parallel.mean(torch.stack(losses).mean()))
        self._progress.say(f"step {self.step}: loss {found:.4f} on data that was held out", step=self.step, loss=found)
        return found

    def _sample(self) -> None:
        config = self.config
        prompt = self._eval_data.read(0, min(_PROMPT, config.data.sequence // 2)).tolist()
        prompt = prompt or self.encoder.encode(["\n"])[0]
        with self.passes.evaluating():
            written = sample_tokens(
                lambda window: self.passes.logits(window.to(self.parallel.device)),
                prompt,
                config.run.sample_bytes,
                vocabulary=self.encoder.vocabulary,
                sequence=config.data.sequence,
                seed=config.run.seed,
            )
        if self.parallel.first:
            self.folder.append_sample(self.step, self.encoder.decode(prompt), self.encoder.decode(written))

    # Observing one step #

    def _begin_observing(self, step: int) -> None:
        if step == self.config.run.observe_step and self.parallel.first:
            layers = self.passes.layers()
            observer = Observer(self.passes.model, self.optimizer, self.parallel.device, layers=layers, step=step)
            self._observer = observer.__enter__()

    def _mark(self, phase: str) -> None:
        # With `overlap_forward` the updates of a step run under the next forward, which is observed too.
        if phase == "backward" and self.step == self.config.run.observe_step:
            self._end_observing()
        self.meter.mark(phase)
        if self._observer is not None:
            self._observer.mark(phase)

    def _end_observing(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.__exit__(None, None, None)
            observer.save(self.folder.observed)
            if self.history is not None:
                self.history.save(self.folder.memory_snapshot)

    # Saving and resuming #

    def _save(self, *, wait: bool) -> Path:
        extra = {
            "step": self.step,
            "skipped_in_a_row": self._skipped_in_a_row,
            "data": self.feed.position,
            "ranks": self.parallel.ranks,
            **rng_states(self.parallel.rank, self.parallel.device),
        }
        self._write_receipt()  # so that a killed run has one too
        return self.checkpoints.save(self.step, self.passes.model, self.optimizer, extra, wait=wait)

    def _resume(self) -> None:
        newest = self.checkpoints.to_resume()
        torch.manual_seed(self.config.run.seed + self.parallel.rank)
        if newest is None:
            return
        if not self.config.run.resume:
            raise ConfigError(
                f"run.resume=false begins a new run, and {newest} is of an old one; expected a folder without "
                "checkpoints. Choose another run.folder, or remove this one."
            )
        self._check_model(newest)
        newest, extra = self.checkpoints.load(newest, self.passes.model, self.optimizer)
        self._restore_options()
        self.feed.go_to(extra["data"])
        self.checkpoints.set_aside()
        self.step, self._skipped_in_a_row = extra["step"], extra["skipped_in_a_row"]
        if not set_rng_states(extra, self.parallel.rank, self.parallel.device):
            logger.warning(
                "%s has no random state for this rank: it was saved by %d ranks", newest, extra.get("ranks", 1)
            )
        unread = "" if self.config.model.weights is None else "; model.weights is not read again"
        self._progress.say(f"resuming after step {self.step}, from {newest}{unread}", step=self.step, checkpoint=newest)

    def _check_model(self, newest: Path) -> None:
        """Raise if the run in this folder has another model; the message names settings, not tensors."""
        then = self.folder.read_json(self.folder.run).get("model")
        then = then if isinstance(then, dict) else {}
        now = identity(self.config, self.parallel.device, self.encoder.vocabulary)
        differs = [name for name in {**then, **now} if then and then.get(name) != now.get(name)]
        if differs:
            listed = ", ".join(f"{name} {then.get(name)} then and {now.get(name)} now" for name in differs[:3])
            raise ConfigError(
                f"{newest} is of another model: {listed}. Nothing was changed. Give the model's settings as they were, "
                "or choose another run.folder."
            )

    def _restore_options(self) -> None:
        """Replace the options that the checkpoint brought by those of this run's settings."""
        settings = self.config.optimizer
        for group in self.optimizer.param_groups:
            decays = any(param.dim() > 1 for param in group["params"])
            group.update(betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay if decays else 0.0)

    # Records #

    def _write_about(self) -> None:
        model = self.passes.model
        counted = (self.parallel.stage, num_parameters_of(model), num_parameters_of(model, trained=True))
        of_stages = set(Ranks(None).gather(counted))
        parameters, trained = (sum(one[kind] for one in of_stages) for kind in (1, 2))
        if self.parallel.first:
            ranks_per_stage = self.parallel.data_ranks
            settings = resolved(self.config, device=self.parallel.device, ranks_per_stage=ranks_per_stage)
            self.folder.write_text(self.folder.config, to_toml(settings))
            self._keep_what_describes_it()
            vocabulary = self.encoder.vocabulary
            about = run_info(self.config, self.parallel, self.optimizer, parameters=parameters, vocabulary=vocabulary)
            if self.fitted is not None:
                self.fitted.begin()
                about["fit"] = self.fitted.made_for
            self.folder.write_json(self.folder.run, about)
            frozen = f", of which {trained:,} in adapters are trained," if trained < parameters else ""
            plan = self.optimizer.plan
            saved = f": {format_size(plan.net_saved_bytes)} saved on the device, net" if plan.host_bytes else ""
            weights = runtime_of(self.optimizer).weights
            saved += "" if weights is None else f"; {describe(weights)}"
            self._progress.say(
                f"{parameters:,} parameters{frozen} in {settings.model.dtype} on {self.parallel.device}, "
                f"{plan.summary()}{saved}",
                parameters=parameters,
                net_saved_bytes=plan.net_saved_bytes,
            )
            tokenizer = self.config.data.tokenizer
            begins = first_weights(self.config.model, self.passes.model, self.parallel.device, tokenizer=tokenizer)
            if not self.step and begins is not None:
                self._progress.say(begins)

    def _keep_what_describes_it(self) -> None:
        """For exports, and for a run that is resumed when the originals are gone."""
        keep(self.folder, self.config.model, self.passes.model, resumed=self.step > 0)
        if isinstance(self.encoder, HuggingFaceEncoder):
            with named(self.folder.tokenizer):
                self.encoder.copy_to(self.folder.tokenizer)

    def _open_sinks(self) -> None:
        if self.parallel.first:
            # Trackers first: they may be refused, and the file of metrics removes rows.
            self._sinks += open_trackers(self.config, self.folder, after_step=self.step)
            metrics = MetricsFile(self.folder.metrics, after_step=self.step)
            self._sinks.append(metrics)
            if metrics.dropped:
                self._progress.say(metrics.dropped, step=self.step)

    def _write_receipt(self) -> None:
        if self.parallel.first and runtime_of(self.optimizer).steps:
            self.folder.write_json(self.folder.receipt, dataclasses.asdict(self.optimizer.receipt()))

    @property
    def _predicts(self) -> bool:
        """Not on the CPU, where lanes do not overlap, nor with several ranks, whose times differ, nor where fit did."""
        alone = self.parallel.ranks == 1 and self.fitted is None
        return alone and self.parallel.device.type != "cpu" and self.config.offload.fraction != 0.0

    def _write_prediction(self) -> None:
        """Add the planner's prediction, given the measured forward and backward, for the report."""
        if self._predicts and runtime_of(self.optimizer).steps:
            plan = predicted_plan(self.optimizer, self.config, self.meter, self.parallel.device)
            if plan is not None:
                about = self.folder.read_json(self.folder.run)
                self.folder.write_json(self.folder.run, {**about, "plan": json.loads(plan.to_json())})

    def _finish(self, stopped: int) -> Result:
        name = signal.Signals(stopped).name if stopped else None
        newest = self.checkpoints.newest()
        self._write_receipt()
        self._write_prediction()
        if self.fitted is not None:
            self._progress.say(self.fitted.summary(self._last_row), fit="decided")
        where = f"the newest checkpoint is {newest or 'none'}"
        if name is not None:
            self._progress.say(
                f"stopped by {name} after step {self.step}, {where}: the same command continues", signal=name
            )
        else:
            self._progress.say(f"all {self.step} steps are done, {where}", checkpoint=newest)
        return Result(
            folder=self.folder.path,
            step=self.step,
            steps=self.config.run.steps,
            loss=self._last_row.loss if self._last_row is not None else None,
            eval_loss=self.eval_loss,
            checkpoint=newest,
            skipped=runtime_of(self.optimizer).skipped_steps,
            stopped_by=name,
            fitted=None if self.fitted is None else self.fitted.plan,
        )

    def close(self) -> None:
        """Release everything. With one process, a save under way is completed first."""
        if self.parallel.ranks == 1:
            with contextlib.suppress(OffstageError):
                self.checkpoints.finish()
        self._end_observing()
        for sink in self._sinks:
            sink.close()
        self._open.close()


def _times(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"
