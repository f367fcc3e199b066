# SPDX-License-Identifier: Apache-2.0
"""accelerate: `offload(accelerator, **settings)`, after which `accelerator.prepare(model, optimizer)` offloads.

The optimizer is offloaded when `prepare` is done with it, so that its parameters and its model are the final ones:
moved, wrapped by DDP, sharded by FSDP2, compiled. The rest of the loop stays as it is; the accelerator's own methods
do what `update_in_backward` needs: `backward` runs under `accumulate()` unless gradients are final, and
`clip_grad_norm_` is the optimizer's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

import torch

from offstage import ConfigError, OffloadConfig, OffloadedOptimizer
from offstage.config import documents
from offstage.integrations.packages import require
from offstage.integrations.replaced import Replaced
from offstage.integrations.settings import (
    EngineSettings,
    Settings,
    is_fitted,
    may_update_in_backward,
    updates_in_backward,
)
from offstage.optimizer.optimizer import runtime_of

_package, _optimizers = (
    require(module, package="accelerate", at_least="1.15", below="2", why="offstage.integrations.accelerate")
    for module in ("accelerate", "accelerate.optimizer")
)

_BOUND = "_offstage_binding"
_REFUSED = {
    "DEEPSPEED": "DeepSpeed owns the optimizer",
    "MEGATRON_LM": "Megatron-LM owns the optimizer; use offstage.integrations.megatron there",
    "XLA": "there is no accelerator whose memory torch manages",
}


@documents(OffloadConfig)
def offload(accelerator: Any, config: OffloadConfig | None = None, **settings: Unpack[EngineSettings]) -> Binding:
    """Offload every optimizer that `accelerator` prepares, or has prepared already.

    Before or after `accelerator.prepare(model, optimizer)`, once. An optimizer that is offloaded already stays as it is
    if no settings are given here. With `device_peak="24GiB"` model and optimizer are given to `offstage.fit()`, and
    `settings` are its arguments; otherwise they are these fields of `OffloadConfig`:
    """
    return Binding(accelerator, Settings.of(config, settings))


def bind(accelerator: Any) -> Binding:
    """As `offload`, for optimizers that are offloaded already; it leaves all others alone."""
    return Binding(accelerator, Settings(None))


def optimizers_of(accelerator: Any) -> list[OffloadedOptimizer]:
    """Those that `accelerator` has prepared and that are offloaded."""
    found = (within(one) for one in accelerator._optimizers)
    return [one for one in found if isinstance(one, OffloadedOptimizer)]


def within(optimizer: Any) -> Any:
    """What accelerate has wrapped."""
    while isinstance(optimizer, _optimizers.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


class Binding:
    """One accelerator whose optimizers are offloaded. `remove()` gives it its own methods back."""

    def __init__(self, accelerator: Any, settings: Settings) -> None:
        """`settings`: for optimizers that are not offloaded yet."""
        _refuse(accelerator)
        settings.refuse_ranks(accelerator.num_processes, f"num_processes={accelerator.num_processes}")
        settings.refuse_compiled(accelerator.state.dynamo_plugin.backend.name != "NO", "the accelerator's model")
        self._of = weakref.ref(accelerator)
        self._settings = settings
        self._made: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()
        self._preparing = 0
        self.models: Callable[[], Iterable[torch.nn.Module]] = tuple
        """Models that are not prepared by the accelerator, if its optimizers are for them."""
        self.not_in_backward: Callable[[], str | None] = _nothing
        """Why `fit()` must not update weights in backward, if the loop around the accelerator forbids it."""
        self._replaced = Replaced(accelerator, "offstage.integrations.accelerate")
        self._replaced.replace("prepare", self._prepare)
        self._replaced.replace("prepare_optimizer", self._prepare_optimizer)
        self._replaced.replace("backward", self._backward)
        self._replaced.replace("accumulate", self._accumulate)
        self._replaced.replace("no_sync", self._no_sync)
        self._replaced.replace("clip_grad_norm_", self._clip_grad_norm_)
        self._replaced.replace("clip_grad_value_", self._clip_grad_value_)
        self._replaced.replace("load_state", self._load_state)
        setattr(accelerator, _BOUND, self)
        try:
            self._take()
        except BaseException:
            self.remove()
            raise

    @property
    def optimizers(self) -> list[OffloadedOptimizer]:
        """The offloaded ones, in the order in which they were prepared."""
        accelerator = self._of()
        return [] if accelerator is None else optimizers_of(accelerator)

    def synchronize(self) -> None:
        """As `OffloadedOptimizer.synchronize`: with `overlap_forward`, before weights are read outside a forward."""
        for optimizer in self.optimizers:
            optimizer.synchronize()

    def remove(self) -> None:
        """Give the accelerator its own methods back; what is offloaded stays so."""
        self._replaced.restore()
        accelerator = self._of()
        if accelerator is not None:
            delattr(accelerator, _BOUND)

    # In place of the accelerator's methods

    def _prepare(self, found: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._preparing += 1
        try:
            result = found(*args, **kwargs)
        finally:
            self._preparing -= 1
        self._take()
        return result

    def _prepare_optimizer(
        self, found: Callable[..., Any], optimizer: Any, device_placement: bool | None = None
    ) -> Any:
        """State that there is already must not go to the device, only to come back at once."""
        ours = self._settings.takes or isinstance(optimizer, OffloadedOptimizer)
        made = found(optimizer, device_placement=False if ours else device_placement)
        self._take()
        return made

    def _backward(self, found: Callable[..., Any], loss: Any, **kwargs: Any) -> Any:
        with self._not_final():
            return found(loss, **kwargs)

    @contextlib.contextmanager
    def _accumulate(self, found: Callable[..., Any], *models: Any) -> Iterator[None]:
        """Also for loops that call `loss.backward()` themselves."""
        with found(*models), self._not_final():
            yield

    @contextlib.contextmanager
    def _no_sync(self, found: Callable[..., Any], model: Any) -> Iterator[None]:
        """What loops that count micro-batches themselves put around all but the last."""
        with found(model), self._accumulating():
            yield

    @contextlib.contextmanager
    def _not_final(self) -> Iterator[None]:
        accelerator = self._of()
        assert accelerator is not None
        with contextlib.nullcontext() if accelerator.sync_gradients else self._accumulating():
            yield

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        with contextlib.ExitStack() as all_of_them:
            for optimizer in self.optimizers:
                all_of_them.enter_context(optimizer.accumulate())
            yield

    def _clip_grad_norm_(
        self, found: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        chosen = {one: _params_of(one) for one in self.optimizers if self._clips(one)}
        chosen = {one: params for one, params in chosen.items() if not params.isdisjoint(parameters)}
        given = {param for param in parameters if param.grad is not None}
        optimizer, params = next(iter(chosen.items()), (None, set()))
        is_its_own = given == {param for param in params if param.grad is not None}
        if optimizer is None or not (is_its_own or any(map(updates_in_backward, chosen))):
            # every gradient is there until step(): torch's own function is right, and fit() sees that it is used
            norm: torch.Tensor | None = found(parameters, max_norm, norm_type=norm_type)
            return norm
        if not is_its_own:
            raise ConfigError(
                "With update_in_backward=True, clip_grad_norm_() expects the parameters of one optimizer, all of them; "
                f"found {len(given)} parameters with gradients that are not those of one. Clip each optimizer's own, "
                "or use update_in_backward=False."
            )
        return optimizer.clip_grad_norm_(max_norm, norm_type, order=parameters)

    def _clips(self, optimizer: OffloadedOptimizer) -> bool:
        """Whether gradients are clipped where they are, instead of being brought back for it, if they can be."""
        accelerator = self._of()
        assert accelerator is not None
        return may_update_in_backward(optimizer) or (is_fitted(optimizer) and accelerator.scaler is None)

    def _clip_grad_value_(self, found: Callable[..., Any], parameters: Any, clip_value: float) -> None:
        if any(map(updates_in_backward, self.optimizers)):
            raise ConfigError(
                "clip_grad_value_() changes gradients before step(); with update_in_backward=True they are used in "
                "backward. Expected clip_grad_norm_(). Use it, or update_in_backward=False."
            )
        found(parameters, clip_value)

    def _load_state(self, found: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """On several devices accelerate would load all state to each of them; it lives on the host."""
        if self.optimizers and kwargs.get("map_location") is None:
            kwargs["map_location"] = "cpu"
        found(*args, **kwargs)

    # Optimizers

    def _take(self) -> None:
        """Offload what has been prepared, in its final form."""
        accelerator = self._of()
        if self._preparing or accelerator is None:
            return
        for wrapper in accelerator._optimizers:
            inner = within(wrapper)
            if isinstance(inner, OffloadedOptimizer):
                self._take_offloaded(inner)
            elif self._settings.takes:
                if self._settings.config is not None:
                    _refuse_scaler(accelerator, self._settings.config.update_in_backward)
                made = self._settings.take(inner, self._model_of(inner), self._not_in_backward(accelerator))
                self._made.add(made)
                _put_within(wrapper, made)

    def _not_in_backward(self, accelerator: Any) -> str | None:
        if accelerator.scaler is not None:
            return "a GradScaler unscales gradients behind it"
        return self.not_in_backward()

    def _take_offloaded(self, optimizer: OffloadedOptimizer) -> None:
        if optimizer in self._made:
            return
        if self._settings.given:
            raise ConfigError(
                "offstage.integrations.accelerate.offload() was given settings, and the optimizer is already offloaded "
                "with its own; expected them in one place. Leave them out here, or give prepare() the optimizer of "
                "torch.optim that it was made from."
            )
        accelerator = self._of()
        assert accelerator is not None
        _refuse_scaler(accelerator, may_update_in_backward(optimizer))
        model = self._model_of(optimizer)
        if model is not None and runtime_of(optimizer).model is None:
            optimizer.attach(model)
        self._made.add(optimizer)

    def _model_of(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """The prepared model that `optimizer` trains."""
        accelerator = self._of()
        assert accelerator is not None
        params = _params_of(optimizer)
        for model in (*accelerator._models, *self.models()):
            if not params.isdisjoint(model.parameters()):
                return model  # type: ignore[no-any-return]
        return None


def _nothing() -> None:
    """The loop around the accelerator forbids nothing."""


def _params_of(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def _put_within(wrapper: Any, optimizer: OffloadedOptimizer) -> None:
    """`wrapper` steps `optimizer` from now on, also where a GradScaler decides whether."""
    while isinstance(wrapper.optimizer, _optimizers.AcceleratedOptimizer):
        wrapper = wrapper.optimizer
    wrapper.optimizer = optimizer
    if wrapper.scaler is not None:
        wrapper._optimizer_original_step_method = optimizer.step
        wrapper._optimizer_patched_step_method = _optimizers.patch_optimizer_step(wrapper, optimizer.step)


def _refuse(accelerator: Any) -> None:
    """Raise if this accelerator's optimizers cannot be offloaded."""
    if not isinstance(accelerator, _package.Accelerator):
        raise ConfigError(
            f"offstage.integrations.accelerate expects an accelerate.Accelerator; found {type(accelerator).__name__}. "
            "Pass the accelerator; for a loop without one there is offstage.offload()."
        )
    if hasattr(accelerator, _BOUND):
        raise ConfigError(
            "This Accelerator was given to offstage.integrations.accelerate already; expected one call. Give all "
            "settings in that one, or remove() its result first."
        )
    kind = accelerator.distributed_type.name
    if kind in _REFUSED:
        raise ConfigError(
            "offstage.integrations.accelerate expects distributed_type NO, MULTI_GPU, MULTI_CPU or FSDP; found "
            f"{kind}: {_REFUSED[kind]}. Use an Accelerator without it."
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ConfigError(
            "offstage.integrations.accelerate expects FSDP2; found fsdp_version=1, whose parameters are views into "
            "flat ones. Use FullyShardedDataParallelPlugin(fsdp_version=2)."
        )


def _refuse_scaler(accelerator: Any, in_backward: bool) -> None:
    if in_backward and accelerator.scaler is not None:
        raise ConfigError(
            "update_in_backward=True uses gradients as autograd makes them; with mixed_precision='fp16' a GradScaler "
            "unscales them later. Expected no GradScaler. Use mixed_precision='bf16', or update_in_backward=False."
        )
