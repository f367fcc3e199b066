# SPDX-License-Identifier: Apache-2.0
"""transformers and TRL: `offload(trainer, **settings)`, for `Trainer` and everything derived from it.

The trainer's own accelerator offloads the optimizer (`offstage.integrations.accelerate`). Here is what `Trainer` does
beside it: norms for the log, resuming, callbacks that read weights, and, for trainers that generate, the sleep of
optimizer state meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, Unpack

import torch

import offstage
from offstage import ConfigError, OffloadConfig, OffloadedOptimizer
from offstage.config import documents
from offstage.integrations import accelerate
from offstage.integrations.packages import require
from offstage.integrations.replaced import Replaced
from offstage.integrations.settings import EngineSettings, Settings, is_fitted, may_update_in_backward

_WHY = "offstage.integrations.transformers"
_package = require("transformers", package="transformers", at_least="5.17", below="6", why=_WHY)

logger = logging.getLogger("offstage")

_Trainer = TypeVar("_Trainer")
_BOUND = "_offstage_binding"
_BETWEEN = "on_pre_optimizer_step"
"""The event between backward and `step()`."""
_EVERY_STEP = ("on_step_begin", "on_optimizer_step", "on_step_end")


@documents(OffloadConfig)
def offload(
    trainer: _Trainer,
    config: OffloadConfig | None = None,
    *,
    sleep_while_generating: bool = False,
    **settings: Unpack[EngineSettings],
) -> _Trainer:
    """Offload the optimizer that `trainer` makes or was given, and return `trainer`. Before `trainer.train()`.

    `sleep_while_generating`: optimizer state, slots and gradients leave the device while the trainer generates (GRPO,
    RLOO), and come back behind it; with vLLM on the same device (`vllm_enable_sleep_mode`) the weights, too, when vLLM
    has copied them. An optimizer that is offloaded already, such as one of `offstage.optim` that
    `optimizer_cls_and_kwargs` names, stays as it is if no settings are given here. With `device_peak="24GiB"` model and
    optimizer are given to `offstage.fit()`, and `settings` are its arguments; otherwise they are these fields of
    `OffloadConfig`:
    """
    _TrainerBinding(trainer, Settings.of(config, settings), sleep_while_generating)
    return trainer


def bind(trainer: _Trainer, *, sleep_while_generating: bool = False) -> _Trainer:
    """As `offload`, for a trainer whose optimizer is offloaded already; it leaves any other alone."""
    _TrainerBinding(trainer, Settings(None), sleep_while_generating)
    return trainer


def optimizer_of(trainer: Any) -> OffloadedOptimizer:
    """The offloaded optimizer of `trainer`, for its receipt and plan."""
    found = accelerate.within(trainer.optimizer)
    if not isinstance(found, OffloadedOptimizer):
        raise ConfigError(
            f"optimizer_of() expects a trainer whose optimizer is offloaded; found {type(found).__name__}. A trainer "
            "makes its optimizer in train()."
        )
    return found


class _TrainerBinding:
    """One trainer whose optimizer is offloaded."""

    def __init__(self, trainer: Any, settings: Settings, sleeps: bool) -> None:
        _refuse(trainer, settings, sleeps)
        self._of = weakref.ref(trainer)
        self._settings = settings
        self._said: set[str] = set()
        binding = self._bind_accelerator(trainer)
        try:
            self._replace(trainer, sleeps)
        except BaseException:
            binding.remove()
            raise
        setattr(trainer, _BOUND, self)

    def _replace(self, trainer: Any, sleeps: bool) -> None:
        replaced = Replaced(trainer, _WHY)
        replaced.replace("create_accelerator_and_postprocess", self._create_accelerator)
        replaced.replace("_clip_grad_norm", self._clip_grad_norm)
        replaced.replace("_get_grad_norm", self._get_grad_norm)
        replaced.replace("_load_optimizer_and_scheduler", self._load_optimizer)
        if _generates(trainer):
            replaced.replace("_generate", self._generate if sleeps else self._generate_awake)
        if sleeps and _shares_with_vllm(trainer):
            Replaced(trainer.vllm_generation, _WHY).replace("generate", self._generate_by_vllm)
        Replaced(trainer.callback_handler, _WHY).replace("call_event", self._call_event)

    @property
    def optimizer(self) -> OffloadedOptimizer | None:
        """Once it is made and offloaded."""
        trainer = self._of()
        found = accelerate.within(trainer.optimizer) if trainer is not None else None
        return found if isinstance(found, OffloadedOptimizer) else None

    @property
    def _may_update_in_backward(self) -> bool:
        optimizer = self.optimizer
        return optimizer is not None and may_update_in_backward(optimizer)

    def _say_once(self, text: str) -> None:
        """Log `text` the first time."""
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)

    def _bind_accelerator(self, trainer: Any) -> accelerate.Binding:
        binding = accelerate.Binding(trainer.accelerator, self._settings)
        of = self._of
        # nn.DataParallel is not prepared by the accelerator
        binding.models = lambda: () if (found := of()) is None else (found.model_wrapped,)
        binding.not_in_backward = lambda: None if (found := of()) is None else _not_in_backward(found)
        return binding

    # In place of the trainer's methods

    def _create_accelerator(self, found: Callable[[], None]) -> None:
        """A search over hyperparameters makes a new one for each trial."""
        found()
        trainer = self._of()
        assert trainer is not None
        self._bind_accelerator(trainer)

    def _clip_grad_norm(self, found: Callable[[Any], Any], model: torch.nn.Module) -> Any:
        """Not over gradients of several meshes by hand, which `update_in_backward` has used: ours knows meshes."""
        trainer = self._of()
        if not self._may_update_in_backward or trainer is None:
            return found(model)
        return trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)

    def _get_grad_norm(self, found: Callable[..., Any], model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """For the log. A norm that nothing is clipped by is not worth a second set of state."""
        if grad_norm is None and self._may_update_in_backward:
            optimizer = self.optimizer
            how = "fit() may choose updates in backward, which drop"
            if optimizer is None or not is_fitted(optimizer):
                how = "update_in_backward=True drops"
            self._say_once(
                f"grad_norm is not logged: with max_grad_norm=0, {how} gradients before the norm of all of them is "
                "known. Set max_grad_norm to have it"
            )
            return None
        return found(model, grad_norm=grad_norm)

    def _load_optimizer(self, found: Callable[[Any], None], checkpoint: Any) -> None:
        """On several ranks `Trainer` loads all state to `args.device`; it lives on the host."""
        trainer = self._of()
        if trainer is None or self.optimizer is None:
            found(checkpoint)
            return
        args = trainer.args
        trainer.args = _OnHost(args)
        try:
            found(checkpoint)
        finally:
            trainer.args = args

    # Callbacks

    def _call_event(
        self, found: Callable[..., Any], event: str, args: Any, state: Any, *more: Any, **named: Any
    ) -> Any:
        """Callbacks are about to run: with `overlap_forward`, weights that they may read are waited for."""
        optimizer, trainer = self.optimizer, self._of()
        if optimizer is not None and trainer is not None:
            readers = [one for one in trainer.callback_handler.callbacks if _may_read(one, event)]
            if event == "on_train_begin" and may_update_in_backward(optimizer):
                _refuse_between(trainer.callback_handler.callbacks)
            due = [one for one in readers if _is_due(one, event, args, state)]
            if optimizer.config.overlap_forward and (due or event == "on_train_end"):
                self._say_who_waits(event, due)
                optimizer.synchronize()
        return found(event, args, state, *more, **named)

    def _say_who_waits(self, event: str, readers: list[Any]) -> None:
        unknown = [one for one in readers if not _is_of_trl(one, "SyncRefModelCallback")]
        if unknown and event in _EVERY_STEP:
            self._say_once(
                f"overlap_forward: every step waits for its updates, because the callback {type(unknown[0]).__name__} "
                f"has {event}() and may read weights there. If it does not, say `reads_weights = False` in its class"
            )

    # Generation

    def _generate(self, found: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._asleep():
            return found(*args, **kwargs)

    def _generate_awake(self, found: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Other engines, and transformers' own batching, read or convert weights outside of the model's forward."""
        if (optimizer := self.optimizer) is not None:
            optimizer.synchronize()
        return found(*args, **kwargs)

    @contextlib.contextmanager
    def _asleep(self) -> Iterator[None]:
        """State, slots and gradients are off the device; weights stay, as they generate."""
        trainer, optimizer = self._of(), self.optimizer
        if trainer is None or optimizer is None:  # an evaluation before training
            yield
            return
        with offstage.sleep(trainer.model, optimizer, keep=("weights", "buffers")):
            yield

    def _generate_by_vllm(self, found: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """vLLM has its own copy of the weights on this device: the trainer's leave, too, once they are copied."""
        trainer = self._of()
        assert trainer is not None
        if trainer.vllm_generation._llm_weights_sleeping:  # otherwise it would copy them within
            trainer.vllm_generation.sync_weights()
        with offstage.sleep(trainer.model):
            return found(*args, **kwargs)


class _OnHost:
    """Training arguments whose device is the host, for reading a checkpoint."""

    device = torch.device("cpu")

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def _may_read(callback: Any, event: str) -> bool:
    """Whether `callback` does something at `event`, and may read weights then.

    Those of transformers itself read weights in forwards and state dicts only, which wait by themselves.
    """
    found = getattr(type(callback), event, None)
    if event == _BETWEEN or found is None or found is getattr(_package.TrainerCallback, event, None):
        return False
    if type(callback).__module__.startswith("transformers.") or _is_of_trl(callback, "RichProgressCallback"):
        return False
    return bool(getattr(callback, "reads_weights", True))


def _is_of_trl(callback: Any, name: str) -> bool:
    return type(callback).__name__ == name and type(callback).__module__.startswith("trl.")


def _is_due(callback: Any, event: str, args: Any, state: Any) -> bool:
    """TRL's reference model is written every so many steps only."""
    if not _is_of_trl(callback, "SyncRefModelCallback") or event != "on_step_end":
        return True
    return bool(state.global_step % args.ref_model_sync_steps == 0)


def _generates(trainer: Any) -> bool:
    """Whether it is one of TRL's trainers that generate."""
    return callable(getattr(trainer, "_generate", None))


def _shares_with_vllm(trainer: Any) -> bool:
    """Whether vLLM generates on the trainer's device and gives its memory back in between."""
    generation = getattr(trainer, "vllm_generation", None) if getattr(trainer, "use_vllm", False) else None
    return generation is not None and generation.mode == "colocate" and bool(generation.enable_sleep_mode)


def _refuse(trainer: Any, settings: Settings, sleeps: bool) -> None:
    """Raise if this trainer's optimizer cannot be offloaded so."""
    if not isinstance(trainer, _package.Trainer):
        raise ConfigError(
            f"{_WHY} expects a transformers.Trainer; found {type(trainer).__name__}. In a loop of your own, use "
            "offstage.offload()."
        )
    if hasattr(trainer, _BOUND):
        raise ConfigError(
            f"This trainer was given to {_WHY} already; expected one call. Give all settings in that one."
        )
    if sleeps:
        require("trl", package="trl", at_least="1.16", below="2", why=f"sleep_while_generating=True of {_WHY}")
    if sleeps and not _generates(trainer):
        raise ConfigError(
            f"sleep_while_generating=True expects a trainer that generates, such as TRL's GRPOTrainer; found "
            f"{type(trainer).__name__}. Leave it out."
        )
    args = trainer.args
    settings.refuse_ranks(args.n_gpu, f"nn.DataParallel over {args.n_gpu} devices")
    found = accelerate.within(trainer.optimizer)
    in_backward = settings.config is not None and settings.config.update_in_backward
    if isinstance(found, OffloadedOptimizer):
        in_backward = may_update_in_backward(found)
    if not in_backward:
        return
    if args.auto_find_batch_size:
        raise ConfigError(
            "update_in_backward=True with auto_find_batch_size=True: a backward that runs out of memory may have "
            "updated weights already, and would be tried again. Expected a batch size that fits. Use "
            "auto_find_batch_size=False, or overlap_forward=True instead."
        )
    if args.parallel_mode.name == "DISTRIBUTED" and not trainer.is_fsdp_enabled:
        raise ConfigError(
            "update_in_backward=True uses gradients as autograd makes them; on several ranks Trainer uses "
            "DistributedDataParallel, which reduces them later. Expected one rank or FSDP2. Use overlap_forward=True."
        )


def _not_in_backward(trainer: Any) -> str | None:
    """Why `fit()` must not choose to update weights in backward, if something of this trainer forbids it."""
    if trainer.args.auto_find_batch_size:
        return "with auto_find_batch_size=True a backward that runs out of memory is tried again"
    for name in _between(trainer.callback_handler.callbacks):
        return f"the callback {name} has {_BETWEEN}(), and may read weights or gradients there"
    return None


def _between(callbacks: Iterable[Any]) -> list[str]:
    """Those of `callbacks` that run between backward and `step()`, when weights may be mixed and gradients used."""
    base = getattr(_package.TrainerCallback, _BETWEEN)
    found = (one for one in callbacks if getattr(type(one), _BETWEEN, base) is not base)
    return [type(one).__name__ for one in found if getattr(one, "reads_weights", True)]


def _refuse_between(callbacks: Iterable[Any]) -> None:
    for name in _between(callbacks):
        raise ConfigError(
            f"The callback {name} has {_BETWEEN}(), which runs between backward and step(), when "
            "update_in_backward=True has updated some weights and used their gradients. Expected no callback "
            "there. Remove it, say `reads_weights = False` in its class if it reads neither weights nor gradients, "
            "or use update_in_backward=False."
        )
