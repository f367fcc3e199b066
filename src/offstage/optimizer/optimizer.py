# SPDX-License-Identifier: Apache-2.0
"""`offload()` and `OffloadedOptimizer`: the `torch.optim.Optimizer` contract over state that is elsewhere.

Read this first. The optimizer keeps torch's contract and the public methods, nothing else: everything it does is in its
`Runtime`, which `runtime_of` gives to the rest of offstage.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack, cast

import torch

from offstage.config import WINDOWS, OffloadConfig, OffloadSettings, documents, exact_size, format_size
from offstage.errors import ConfigError, OffstageError
from offstage.memory.interrupts import deferred_interrupts
from offstage.optimizer import state_dict as state_dicts
from offstage.optimizer.checks import check_initialised, check_model, check_no_duplicates, check_optimizer, check_param
from offstage.optimizer.clipping import clip_grad_norm_
from offstage.optimizer.places import Groups
from offstage.optimizer.receipt import Receipt, make_receipt
from offstage.optimizer.replanning import attach, replan, replanned_config
from offstage.optimizer.runtime import Runtime
from offstage.planning.fit_plan import FitPlan
from offstage.planning.plan import Plan
from offstage.rules import choose_rule, shell_of
from offstage.weights.moving import describe, refuse_host_weights

logger = logging.getLogger("offstage")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _in_turn(method: _Method) -> _Method:
    """`method`, which waits while another thread is in one: threads take turns."""

    @functools.wraps(method)
    def waiting(self: OffloadedOptimizer, *args: Any, **kwargs: Any) -> Any:
        with self._runtime.turn:
            return method(self, *args, **kwargs)

    return cast(_Method, waiting)


@documents(OffloadConfig)
def offload(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    config: OffloadConfig | None = None,
    **overrides: Unpack[OffloadSettings],
) -> OffloadedOptimizer:
    """Keep `optimizer`'s state in host memory and bring it to the device for its own update.

    The optimizer given is consumed: its class, groups, hooks and any state it has are taken over; from then on its
    `step`, `state_dict` and `load_state_dict` raise, through methods taken from it before too. `model` gives parameters
    their names in messages, and the hooks in forward that `overlap_forward` needs. `overrides` are these fields of
    `OffloadConfig`:
    """
    return OffloadedOptimizer(optimizer, model, checked_config(optimizer, model, config, overrides))


def checked_config(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    config: OffloadConfig | None,
    overrides: Mapping[str, Any],
) -> OffloadConfig:
    """`config` with `overrides`, for an optimizer that can be taken over."""
    check_optimizer(optimizer, model)
    built = OffloadConfig.build(config, overrides)
    if built.window and built.window not in WINDOWS:
        warnings.warn(
            f"window={format_size(int(built.window))}: a window of a given size is deprecated. A lower fraction takes "
            "the same device memory, is as fast and moves less. Use fraction, or window='all' where activations fill "
            "the device.",
            DeprecationWarning,
            stacklevel=3,
        )
    return built


class OffloadedOptimizer(torch.optim.Optimizer):
    """What `offload()` returns. Use it as the optimizer it was made from."""

    _offstage_consumed = True  # offload() refuses it
    _runtime: Runtime

    # Initialization

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        config: OffloadConfig,
        *,
        model_later: bool = False,
    ) -> None:
        """`model_later`: a model that the config needs may come by `attach()`, until the first step."""
        names = _names_of(optimizer, model)
        _check(optimizer, config, names)
        refuse_host_weights(optimizer.param_groups, model, names)
        rule = choose_rule(optimizer, config)
        shell = shell_of(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the user's list: schedulers made before offload() write to it
        runtime = Runtime(rule, shell, config, model, names, _groups_of(self), self.defaults)
        runtime.start(optimizer.state, model_later=model_later)
        self._runtime = runtime
        with deferred_interrupts():  # an optimizer whose state was taken over is never left as if it still had it
            runtime.take_over(optimizer.state)
            _consume(optimizer, self)
        logger.info("%s: %s", type(optimizer).__name__, self.plan.summary())
        if runtime.weights is not None:
            logger.info(describe(runtime.weights))
        runtime.places.log_fallbacks()

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of the optimizer this was made from. The host does not wait for the device.

        It waits until every update has been given to the device: with updates on the host, until they are made there.
        With `overlap_forward` not even for that.

        When it returns, whatever the caller's stream is given next sees the new weights. With `overlap_forward` each
        module's forward, and any other use of a weight through torch, waits for its update first; `.grad` is `None`
        afterwards.
        """
        self._runtime.check_not_lost()
        loss = None
        if closure is not None:
            self._runtime.rule.check_closure()
            with torch.enable_grad():  # and without the turn, which its backward takes in autograd's threads
                loss = closure()
        with self._runtime.turn:
            self._runtime.step()
        return loss

    @_in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients of an iteration that is given up take its updates with them, where that is possible."""
        self._runtime.drop_gradients()
        with self._runtime.uses.own():
            super().zero_grad(set_to_none)
        self._runtime.zero_taken_gradients(set_to_none)
        self._runtime.start_again()

    @_in_turn
    def synchronize(self) -> None:
        """Make the host and the caller's stream wait until all weights and state are new and where they live.

        Reading `state` or `state_dict()` does this itself, and weights wait for their own updates. With
        `overlap_forward`, code needs it that reads weights without torch's functions: by address, or in C++.
        """
        self._runtime.synchronize()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within: gradients are not final. For the backwards of all micro-batches but the last."""
        overlap = self._runtime.overlap
        with overlap.accumulate() if overlap is not None else contextlib.nullcontext():
            yield

    @_in_turn
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        order: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over this optimizer's parameters, with the same bits, in every mode.

        Returns the norm before clipping. If it is not finite, the next `step()` changes nothing. Shards count over all
        ranks of their mesh, and parameters may be on several meshes; every rank must call. `group`: ranks that train
        other parameters of the same model, such as the stages of a pipeline, whose gradients count too. `order`: the
        parameters in the order in which torch's function would get them, which decides the norm's last bit; otherwise
        that of `param_groups`.
        """
        return clip_grad_norm_(self._runtime, max_norm, norm_type, group, order)

    # Where state is

    @property
    def config(self) -> OffloadConfig:
        """The settings in force."""
        return self._runtime.config

    @property
    @_in_turn
    def plan(self) -> Plan:
        """Where each parameter's state lives, in the order of `param_groups`."""
        return self._runtime.plan

    @property
    @_in_turn
    def fitted(self) -> FitPlan | None:
        """What `fit()` has decided, and from which measurements; `None` until it has, and without it."""
        watcher = self._runtime.watcher
        return watcher.plan if watcher is not None else None

    @_in_turn
    @torch.no_grad()
    def replan(self, **changes: Unpack[OffloadSettings]) -> Plan:
        """Change settings between steps, bit for bit, and return the plan: state moves where they place it otherwise.

        `overlap_forward` and `update_in_backward` go on and off, with what was learned about the loop. `weights` move a
        layer at a time; parameters stay the same objects. `device_peak` stands for the `device_budget` that it leaves
        beside what training has taken so far. `threads` and `slots` are given up where updates move to a place that has
        none. While state moves, host memory holds both the old and the new arenas. If it fails, nothing has changed.
        Under `fit()`, which decides all of these, it raises.
        """
        self._runtime.check_not_lost()
        replan(self._runtime, replanned_config(self._runtime, changes))
        return self.plan

    @_in_turn
    def attach(self, model: torch.nn.Module) -> None:
        """Give an optimizer that was made without a model its model, between steps: its names, and its cues in forward.

        For engines that know parameters only when they make the optimizer.
        """
        check_model(self, model)
        attach(self._runtime, model)

    @_in_turn
    def prefetch(self) -> None:
        """Fetch as much state as `window` allows, now: for frameworks that place the trips by hand.

        What Megatron calls reloading optimizer states. Nothing needs it: backward does it by itself.
        """
        self._runtime.prefetch()

    @_in_turn
    def evict(self) -> None:
        """Give the window's memory back, behind the last stores. What was fetched and not used is dropped."""
        self._runtime.evict()

    @_in_turn
    def receipt(self) -> Receipt:
        """What was really moved, and what it cost. Waits for the device."""
        return make_receipt(self._runtime)

    @_in_turn
    def close(self) -> None:
        """Give back slots and pinned memory, after the last copy. State that was handed out stays readable."""
        self._runtime.close()

    # torch's state

    @property  # type: ignore[override]
    def state(self) -> state_dicts.StateView:
        """The state of every parameter under torch's names. Reading waits for copies under way."""
        return state_dicts.StateView(self._runtime)

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        if hasattr(self, "_runtime"):  # torch's own __init__ assigns an empty one first
            self.state.replace(value)

    @_in_turn
    def state_dict(self) -> dict[str, Any]:
        """A plain torch optimizer state dict, all tensors on the host, without a copy where that is possible."""
        return state_dicts.save(self, self._runtime)

    @_in_turn
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a plain torch optimizer state dict, from any plan or from none, into this plan."""
        state_dicts.load(self, self._runtime, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters are placed by the same configuration."""
        if not hasattr(self, "_runtime"):  # called by torch's own __init__
            super().add_param_group(param_group)
            return
        with self._runtime.turn:
            super().add_param_group(param_group)
            try:
                check_initialised(self.param_groups[-1:], self._runtime.places.names)
                check_no_duplicates(self.param_groups, self._runtime.places.names)
                self._runtime.place("add_param_group()")
            except BaseException:
                self.param_groups.pop()
                raise

    # Python

    @_in_turn
    def __repr__(self) -> str:
        inner = super().__repr__().removeprefix(type(self).__name__)
        return f"{type(self).__name__}[{type(self._runtime.shell).__name__}]{inner}\n{self.plan.summary()}"

    def __getstate__(self) -> dict[str, Any]:
        raise OffstageError(
            "An offloaded optimizer cannot be pickled or deep-copied: its state is host memory registered with this "
            "process's accelerator. Save optimizer.state_dict() instead, or build a second optimizer and load it there."
        )


def runtime_of(optimizer: OffloadedOptimizer) -> Runtime:
    """What is behind `optimizer`, for checkpoints, reports and tests."""
    return optimizer._runtime


def _check(optimizer: torch.optim.Optimizer, config: OffloadConfig, names: dict[torch.Tensor, str]) -> None:
    """Raise if these parameters cannot be offloaded so. Nothing has moved yet."""
    check_initialised(optimizer.param_groups, names)
    check_no_duplicates(optimizer.param_groups, names)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        check_param(param, names.get(param, f"of shape {tuple(param.shape)}"))
    if config.device_peak is not None and config.window != "auto":
        raise ConfigError(
            f"device_peak={format_size(int(config.device_peak))} needs to know what training takes besides state, "
            "which offload() does not measure; expected window='auto' with it, found "
            f"window={config.window!r}. Use offstage.fit(model, optimizer, "
            f"device_peak={exact_size(int(config.device_peak))!r}), which fits state, weights and activations into it."
        )


def _groups_of(optimizer: OffloadedOptimizer) -> Callable[[], Groups]:
    """`optimizer.param_groups` as it is when asked; weakly, because the optimizer owns what asks."""
    owner = weakref.ref(optimizer)

    def groups() -> Groups:
        found = owner()
        assert found is not None
        return found.param_groups

    return groups


def _consume(optimizer: torch.optim.Optimizer, by: OffloadedOptimizer) -> None:
    """`by` has taken over `optimizer`'s state: its hooks go there too, and using it as an optimizer raises from now on.

    `add_param_group` and `zero_grad` remain: groups and parameters are those of `by`.
    """
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(by, name, hooks)
    # A bound method that was taken from it before does not see an attribute of the instance, and runs these.
    for name in ("step", "state_dict", "load_state_dict"):
        setattr(optimizer, f"_optimizer_{name}_pre_hooks", OrderedDict({0: _refuse_consumed}))
    optimizer.state.clear()
    optimizer._offstage_consumed = True  # type: ignore[attr-defined]
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler made before must not warn for ever
    optimizer.step = _refuse_consumed  # type: ignore[method-assign]


def _names_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> dict[torch.Tensor, str]:
    names: dict[torch.Tensor, str] = {}
    for group in optimizer.param_groups:
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    if model is not None:
        names.update((param, name) for name, param in model.named_parameters())
    return names


def _refuse_consumed(*args: Any, **kwargs: Any) -> Any:
    raise OffstageError(
        "This optimizer was given to offstage.offload(), which took over its state. Call step() on the optimizer that "
        "offload() returned, state_dict() and load_state_dict() too: optimizer = offstage.offload(optimizer, model)."
    )


_refuse_consumed._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or schedulers made before warn
