# SPDX-License-Identifier: Apache-2.0
"""Plain-torch state in and out, from any plan to any plan. Called by `optimizer.py`.

The format is torch's own: `{"state": {index: {name: value}}, "param_groups": [...]}`, tensors on the host, with one
extra name, `master_weight`, where fp32 masters exist. Host tensors are handed out without a copy where they are kept
in their public form; each owns a storage of its own size, so that saving one does not save its arena.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from offstage.errors import ConfigError
from offstage.optimizer.interrupts import deferred_interrupts
from offstage.tensors import is_divided

if TYPE_CHECKING:
    from offstage.optimizer.optimizer import OffloadedOptimizer


class StateView(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`optimizer.state`: parameter → its state under torch's names. Reading drains, writing writes through."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        held = self._optimizer.held(param)
        self._optimizer.drain_state()
        return _ParamView(self, param, held.export())

    def __setitem__(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        optimizer = self._optimizer
        held, group = optimizer.held(param), optimizer.group_of()[param]
        held.check(values)
        optimizer.drain_state()
        optimizer.before_overwrite()
        with deferred_interrupts():
            held.load(values, group)

    def __delitem__(self, param: torch.Tensor) -> None:
        self[param] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._optimizer.settle()
        return (held.param for held in self._optimizer.all_held() if held.present or held.scalars)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        try:
            held = self._optimizer.held(param)  # type: ignore[arg-type]
        except KeyError:
            return False
        self._optimizer.settle()
        return bool(held.present or held.scalars)

    def replace(self, values: Mapping[torch.Tensor, Any]) -> None:
        """`optimizer.state = values`: what torch code does to reset an optimizer."""
        optimizer = self._optimizer
        group_of = optimizer.group_of()
        for param in values:
            if param not in group_of:
                raise ConfigError(
                    f"The new state is for a tensor of shape {tuple(param.shape)} that is not a parameter of this "
                    "optimizer; expected its own parameters only. Remove that entry."
                )
        optimizer.check_values(values)
        optimizer.drain_state()
        optimizer.before_overwrite()
        with deferred_interrupts():
            for param, group in group_of.items():
                optimizer.held(param).load(values.get(param, {}), group)


class _ParamView(dict[str, Any]):
    """One parameter's state. Assigning to it changes the state where it is kept, or raises.

    Its tensors are the state itself, except with split masters: there `master_weight` and `exp_avg_sq` are joined
    copies, and only assigning them writes them back. With `update_in_backward` and clipping they are the state only
    until the next step: its speculative updates go to a second set of arenas, which then is the state.
    """

    def __init__(self, view: StateView, param: torch.Tensor, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._view, self._param = view, param

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _write_through(name: str) -> Callable[..., Any]:
    change = getattr(dict, name)

    def changed(self: _ParamView, *args: Any, **kwargs: Any) -> Any:
        values = dict(self._view[self._param])  # as it is now, which may be steps later
        result = change(values, *args, **kwargs)
        self._view[self._param] = values
        dict.clear(self)
        dict.update(self, self._view[self._param])
        return result

    return changed


for _name in ("__setitem__", "__delitem__", "__ior__", "update", "setdefault", "pop", "popitem", "clear"):
    setattr(_ParamView, _name, _write_through(_name))


def save(optimizer: OffloadedOptimizer) -> dict[str, Any]:
    """`optimizer.state_dict()`."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    optimizer.check_not_lost()
    optimizer.drain_state()
    index = {param: i for i, param in enumerate(_params(optimizer))}
    groups = []
    for group in optimizer.param_groups:
        packed = {name: value for name, value in group.items() if name != "params"}
        packed["params"] = [index[param] for param in group["params"]]
        groups.append(packed)
    state = {}
    for param, i in index.items():  # one after the other: split masters that are resident are joined on the device
        if exported := optimizer.held(param).export():
            state[i] = {name: _on_host(value) for name, value in exported.items()}
    if state:
        # Ranks gather these name by name: all that have any state have the same names, whoever got which gradients.
        # Where a rank has none at all, torch's own functions make a first step for it.
        missing = {i: param for param, i in index.items() if i not in state and is_divided(param)}
        first = {i: optimizer.held(param).export_first() for i, param in missing.items() if param.requires_grad}
        state = dict(sorted({**state, **{i: values for i, values in first.items() if values}}.items()))
    result: dict[str, Any] = {"state": state, "param_groups": groups}
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = post_hook(optimizer, result)
        result = result if replaced is None else replaced
    return result


def load(optimizer: OffloadedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state_dict)`. Everything is checked before the old state is touched."""
    loaded = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = pre_hook(optimizer, loaded)
        loaded = loaded if replaced is None else replaced
    optimizer.follow_groups()
    groups = _checked_groups(optimizer, loaded)
    saved_ids = list(chain.from_iterable(group["params"] for group in loaded["param_groups"]))
    values = {param: loaded["state"].get(saved, {}) for param, saved in zip(_params(optimizer), saved_ids, strict=True)}
    optimizer.check_values(values, groups)
    optimizer.drop_trips()
    optimizer.before_overwrite()
    with deferred_interrupts():
        replace_groups(optimizer, groups)
        for param, group in optimizer.group_of().items():
            optimizer.held(param).load(values[param], group)
        optimizer.forget_lost_step()
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def replace_groups(optimizer: OffloadedOptimizer, groups: list[dict[str, Any]]) -> None:
    """Give every group its saved options, in place, and room for the state they need; or leave them as they were."""
    before = [dict(group) for group in optimizer.param_groups]
    try:
        for group, new in zip(optimizer.param_groups, groups, strict=True):
            kept: dict[str, Any] = {name: group[name] for name in ("params", "param_names") if name in group}
            group.clear()
            group.update({**kept, **new, "params": kept["params"]})
        optimizer.follow_groups()
    except BaseException:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(old)
        raise


def _checked_groups(optimizer: OffloadedOptimizer, loaded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The saved groups with the defaults this torch version adds to old checkpoints."""
    if not isinstance(loaded, Mapping) or not {"state", "param_groups"} <= loaded.keys():
        found = sorted(map(str, loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise ConfigError(
            "load_state_dict() expects a dict with 'state' and 'param_groups', as state_dict() returns; found "
            f"{found}. Pass the optimizer's part of the checkpoint."
        )
    have, saved = optimizer.param_groups, loaded["param_groups"]
    sizes, saved_sizes = [len(g["params"]) for g in have], [len(g["params"]) for g in saved]
    if sizes != saved_sizes:
        raise ConfigError(
            f"The optimizer has parameter groups of {sizes} parameters, the state dict of {saved_sizes}; expected the "
            "same. Load a checkpoint of this model, with the parameters grouped as they were when it was saved."
        )
    groups = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in saved])
    try:
        return optimizer.with_class_defaults(groups)
    except KeyError as error:
        raise ConfigError(
            f"The state dict's parameter groups lack {error}; expected the options of this optimizer: "
            f"{', '.join(sorted(optimizer.defaults))}. Load a checkpoint of the same optimizer class."
        ) from error


def _params(optimizer: OffloadedOptimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _on_host(value: Any) -> Any:
    return value.to("cpu") if isinstance(value, torch.Tensor) else value
