# SPDX-License-Identifier: Apache-2.0
"""Lightning: `OffloadCallback` for its Trainer and `OffloadFabric`, for the modes that need more than `step()`.

An offloaded optimizer trains in both as it is. These say to it what it cannot see there: which gradients are not final
(`accumulate()`), that the engine clips (`clip_grad_norm_`), and that weights are about to be read (`synchronize()`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from offstage import ConfigError, OffloadedOptimizer, OffstageError
from offstage.integrations.packages import require
from offstage.integrations.settings import (
    is_fitted,
    may_overlap_forward,
    may_update_in_backward,
    updates_in_backward,
)
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.receipt import Receipt

_WHY = "offstage.integrations.lightning"
require("lightning.pytorch", package="lightning", at_least="2.6", below="2.7", why=_WHY)

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import weight_averaging  # noqa: E402
from lightning.pytorch.utilities import GradClipAlgorithmType  # noqa: E402

__all__ = ["OffloadCallback", "OffloadFabric"]

logger = logging.getLogger("offstage")

_BETWEEN = ("on_train_batch_end", "on_train_batch_start")
"""Hooks between a step and the next forward, in every batch: with `overlap_forward`, weights may be old there."""


class OffloadCallback(Callback):
    """Gives offloaded optimizers what `overlap_forward` and `update_in_backward` need from Lightning's Trainer.

    `configure_optimizers` returns what `offstage.offload()` or a class of `offstage.optim` made, with `model=self`, or
    `offstage.fit(self, optimizer, device_peak="24GiB")`.

    - Backwards that `accumulate_grad_batches` does not let end in a step run under `optimizer.accumulate()`.
    - `gradient_clip_val`, and `self.clip_gradients()` by norm, clip with `optimizer.clip_grad_norm_`: the bits of
      Lightning's own clipping, in every mode. If the norm is not finite, the step changes nothing.
    - Weights are new before other callbacks and the module's own hooks can read them: before validation, when an epoch
      or training ends, and after every batch if something is there that may read them. (A checkpoint waits by itself.)
    - An exception between backward and `step()` is not covered by another one in Lightning's teardown.
    - `fit()` sees a module that has no `forward`: its `training_step` runs as one.

    `log_norm`: log the norm of the gradients under this name, before clipping; it needs `gradient_clip_val`, which may
    be infinite. `non_readers`: classes of callbacks whose batch hooks read no weights. Lightning's own are known.
    """

    def __init__(self, *, log_norm: str | None = None, non_readers: Sequence[type[Callback]] = ()) -> None:
        self.log_norm, self.non_readers = log_norm, tuple(non_readers)
        self._micro_batch = contextlib.ExitStack()
        """Of a backward whose gradients are not final."""
        self._routed = contextlib.ExitStack()
        """Lightning's clipping goes to the optimizer until this is closed."""
        self._readers: list[str] = []
        self.receipts: list[Receipt] = []
        """Of the optimizers, in their order, once training has ended."""

    # The beginning

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Weights are to be new when the hooks of other callbacks run: this one's run first."""
        trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = _offloaded(trainer.optimizers)
        if not optimizers:
            found = ", ".join(type(one).__name__ for one in trainer.optimizers) or "none"
            raise ConfigError(
                f"OffloadCallback expects an offloaded optimizer from configure_optimizers(); found {found}. Return "
                "offstage.offload(optimizer, self, ...) there, or leave the callback out."
            )
        self._refuse(trainer, pl_module, optimizers)
        self._readers = self._find_readers(trainer, pl_module)
        if self._readers and any(map(may_overlap_forward, optimizers)):
            logger.warning(
                "overlap_forward: the end of every batch waits for all weights, because %s may read them there. Name "
                "those that do not in OffloadCallback(non_readers=...).",
                ", ".join(self._readers),
            )
        self._route_clipping(trainer, pl_module)
        if pl_module.automatic_optimization and any(_is_fitted_to(one, pl_module) for one in optimizers):
            self._route_training_step(pl_module)

    def _refuse(self, trainer: Trainer, pl_module: LightningModule, optimizers: list[OffloadedOptimizer]) -> None:
        """Raise if a setting cannot work in this Trainer."""
        strategy, precision = trainer.strategy, trainer.precision_plugin
        _refuse_strategy(strategy, optimizers)
        if self.log_norm is not None and trainer.gradient_clip_val is None and not _clips_itself(pl_module):
            raise ConfigError(
                f"log_norm={self.log_norm!r} logs the norm that clipping finds; found gradient_clip_val=None. Use "
                "Trainer(gradient_clip_val=float('inf')) to log without clipping."
            )
        if getattr(precision, "scaler", None) is not None and any(map(may_update_in_backward, optimizers)):
            raise ConfigError(
                f"update_in_backward=True updates weights before a gradient scaler can unscale their gradients; found "
                f"precision={precision.precision!r}. Use precision='bf16-mixed', or update_in_backward=False."
            )
        by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        if trainer.gradient_clip_val is not None and by_value and any(map(updates_in_backward, optimizers)):
            raise ConfigError(
                "update_in_backward=True clips by the norm of all gradients; found gradient_clip_algorithm='value', "
                "which reads gradients after their update. Use gradient_clip_algorithm='norm', or "
                "update_in_backward=False."
            )

    def _find_readers(self, trainer: Trainer, pl_module: LightningModule) -> list[str]:
        """What has a hook between a step and the next forward, and is not known to read no weights."""
        others = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
        found = [type(one).__name__ for one in others if _may_read(one) and not isinstance(one, self.non_readers)]
        own = any(getattr(type(pl_module), name) is not getattr(LightningModule, name) for name in _BETWEEN)
        return [*found, *([type(pl_module).__name__] if own else [])]

    def _route_clipping(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning clips by norm through its precision plugin, whichever it is: offloaded optimizers do it here."""
        self._routed.close()
        precision = trainer.precision_plugin
        plain: Callable[..., None] = precision.clip_grad_by_norm

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            if not isinstance(optimizer, OffloadedOptimizer):
                plain(optimizer, clip_val)
                return
            norm = optimizer.clip_grad_norm_(clip_val)
            if self.log_norm is not None:
                pl_module.log(self.log_norm, norm)

        precision.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
        self._routed.callback(precision.__dict__.pop, "clip_grad_by_norm")

    def _route_training_step(self, pl_module: LightningModule) -> None:
        """Lightning calls `training_step`, and `fit()` looks at forwards: this one becomes the module's forward."""
        plain: Callable[..., Any] = pl_module.training_step

        def begun(*args: Any, **kwargs: Any) -> Any:
            del pl_module.forward  # `training_step` finds the module as it is
            return plain(*args, **kwargs)

        @functools.wraps(plain)  # Lightning reads its signature
        def training_step(*args: Any, **kwargs: Any) -> Any:
            pl_module.forward = begun  # type: ignore[method-assign]
            try:
                return pl_module(*args, **kwargs)
            finally:
                vars(pl_module).pop("forward", None)

        pl_module.training_step = training_step  # type: ignore[method-assign]
        self._routed.callback(vars(pl_module).pop, "training_step", None)

    # Gradients

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            for optimizer in _offloaded(trainer.optimizers):
                self._micro_batch.enter_context(optimizer.accumulate())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._micro_batch.close()

    # Readers of weights

    def _synchronize(self, trainer: Trainer) -> None:
        for optimizer in _offloaded(trainer.optimizers):
            if optimizer.config.overlap_forward:
                optimizer.synchronize()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._readers:
            self._synchronize(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._synchronize(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._synchronize(trainer)

    # The end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The receipts wait for all weights."""
        self.receipts = [optimizer.receipt() for optimizer in _offloaded(trainer.optimizers)]
        for receipt in self.receipts:
            logger.info("%s", receipt)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take back what backward has updated, where that is possible; what is lost must not stop the teardown."""
        self._micro_batch.close()
        self._routed.close()
        for optimizer in _offloaded(trainer.optimizers):
            optimizer.zero_grad()
            try:  # as the teardown reads it
                next(iter(optimizer.state.items()), None)
            except OffstageError as error:
                logger.error("%s stopped training between backward and step(): %s", type(exception).__name__, error)
                trainer.strategy.optimizers = [one for one in trainer.optimizers if one is not optimizer]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._routed.close()


class OffloadFabric(Fabric):
    """`lightning.Fabric` whose loop needs no change for `update_in_backward`.

    `no_backward_sync()` is `accumulate()` too, and `clip_gradients(max_norm=...)` clips with `clip_grad_norm_` of the
    offloaded optimizer. Set up the module first, then offload, then `setup_optimizers()`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offloaded: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()

    def setup(self, module: nn.Module, *optimizers: Any, move_to_device: bool = True, **options: Any) -> Any:
        """As Fabric's; refuses an optimizer that was offloaded before its parameters are on their device."""
        ours = _offloaded(optimizers)
        _refuse_strategy(self.strategy, ours)
        away = {param.device for one in ours for group in one.param_groups for param in group["params"]} - {self.device}
        if move_to_device and away:
            raise ConfigError(
                f"fabric.setup() would move parameters to {self.device} after offload(), which has made state for "
                f"{', '.join(sorted(map(str, away)))}. Expected the module first: model = fabric.setup_module(model), "
                "then offload(), then fabric.setup_optimizers(optimizer)."
            )
        made = super().setup(module, *optimizers, move_to_device=move_to_device, **options)
        self._offloaded.update(ours)
        return made

    def setup_optimizers(self, *optimizers: Any) -> Any:
        ours = _offloaded(optimizers)
        _refuse_strategy(self.strategy, ours)
        made = super().setup_optimizers(*optimizers)
        self._offloaded.update(ours)
        return made

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:
        """As Fabric's. Without `error_if_nonfinite`, the step after a norm that is not finite changes nothing."""
        options = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        if not isinstance(optimizer, OffloadedOptimizer) or (clip_val is not None) == (max_norm is not None):
            return super().clip_gradients(module, optimizer, clip_val, max_norm, **options)  # type: ignore[arg-type]
        if max_norm is None:
            if updates_in_backward(optimizer):
                raise ConfigError(
                    f"update_in_backward=True clips by the norm of all gradients; found clip_val={clip_val}, which "
                    "reads gradients after their update. Use max_norm=..., or update_in_backward=False."
                )
            return super().clip_gradients(module, optimizer, clip_val)
        self.strategy.precision.unscale_gradients(optimizer)
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be clipped. Use "
                "error_if_nonfinite=False: the next step() then changes nothing."
            )
        return norm

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        return self._accumulating(super().no_backward_sync(module, enabled), module if enabled else None)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _accumulating(self, inner: contextlib.AbstractContextManager[Any], module: nn.Module | None) -> Iterator[None]:
        """`inner`; optimizers of `module` take the gradients made within as not final."""
        with inner, contextlib.ExitStack() as stack:
            params = set(module.parameters()) if module is not None else set()
            for optimizer in list(self._offloaded):
                if any(param in params for group in optimizer.param_groups for param in group["params"]):
                    stack.enter_context(optimizer.accumulate())
            yield


def _offloaded(optimizers: Iterable[Any]) -> list[OffloadedOptimizer]:
    return [one for one in optimizers if isinstance(one, OffloadedOptimizer)]


def _is_fitted_to(optimizer: OffloadedOptimizer, pl_module: LightningModule) -> bool:
    """Whether `fit()` waits for forwards of `pl_module`, which has none."""
    has_forward = type(pl_module).forward is not LightningModule.forward
    return is_fitted(optimizer) and runtime_of(optimizer).model is pl_module and not has_forward


def _may_read(callback: Callback) -> bool:
    """Whether a hook of `callback` between a step and the next forward is not one of Lightning's that read nothing."""
    for name in _BETWEEN:
        if name in vars(callback):  # a LambdaCallback's
            return True
        owner = next(kind for kind in type(callback).__mro__ if name in vars(kind))
        is_lightnings = owner is Callback or owner.__module__.startswith("lightning.pytorch.callbacks.")
        if not is_lightnings or owner.__module__ == weight_averaging.__name__:
            return True
    return False


def _clips_itself(pl_module: LightningModule) -> bool:
    return type(pl_module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping


def _refuse_strategy(strategy: Any, optimizers: Sequence[OffloadedOptimizer]) -> None:
    """Raise if `optimizers` cannot train under `strategy`; the Trainer's and Fabric's classes have the same names."""
    kinds = {kind.__name__ for kind in type(strategy).__mro__}
    name = type(strategy).__name__
    if optimizers and not kinds.isdisjoint(("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy")):
        raise ConfigError(
            f"{name} keeps parameters and optimizer state in a form of its own; expected a single device, DDPStrategy "
            "or ModelParallelStrategy (FSDP2). Use ModelParallelStrategy."
        )
    if not kinds.isdisjoint(("DDPStrategy", "ModelParallelStrategy")) and any(map(is_fitted, optimizers)):
        raise ConfigError(
            f"fit() decides for one device, and ranks of one job would decide differently; expected a single device, "
            f"found {name}. Use offload() with the same settings on every rank."
        )
    if "DDPStrategy" in kinds and any(one.config.update_in_backward for one in optimizers):
        raise ConfigError(
            f"update_in_backward=True needs gradients that are final in backward; found {name}, which reduces them "
            "later. Use ModelParallelStrategy (FSDP2), or update_in_backward=False."
        )
