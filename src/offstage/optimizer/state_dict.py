# SPDX-License-Identifier: Apache-2.0
"""Plain-torch state in and out, from any plan to any plan.

The format is torch's own: `{"state": {index: {name: value}}, "param_groups": [...]}`, tensors on the host, with one
extra name, `master_weight`, where fp32 masters exist. Host tensors are handed out without a copy where they are kept
in their public form; each owns a storage of its own size, so that saving one does not save its arena.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch

from offstage.engine import named_state
from offstage.errors import ConfigError, UnknownParameterError
from offstage.memory.interrupts import deferred_interrupts
from offstage.optimizer.checks import check_saved_options
from offstage.optimizer.runtime import Runtime
from offstage.rules import torch_class_of
from offstage.rules.rule import ParamState
from offstage.tensors import is_divided


class StateView(MutableMapping[Any, Any]):
    """`optimizer.state`: parameter → its state under torch's names. Reading drains, writing writes through.

    Keys that are not tensors are the user's own, as in plain torch: what is kept there is in `state_dict()` too, and
    reading one that is not there makes an empty dict. Plain torch does that for tensors that are not its parameters as
    well, and fails in `state_dict()`; here they raise at once.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.turn, self._own = runtime, runtime.turn, runtime.own_state

    def __getitem__(self, key: Any) -> Any:
        with self.turn:
            if not isinstance(key, torch.Tensor):
                return self._own.setdefault(key, {})
            state = self._state_of(key)
            self._runtime.drain_state()
            return _ParamView(self, key, named_state.export(state))

    def __setitem__(self, key: Any, values: Any) -> None:
        runtime = self._runtime
        with self.turn:
            if not isinstance(key, torch.Tensor):
                self._own[key] = values
                return
            named_state.check_names(self._state_of(key), values)
            group = runtime.group_of()[key]
            runtime.places.check_value(key, values, group)
            runtime.drain_state()
            runtime.before_overwrite()
            runtime.make_room([key] if values else [])
            with deferred_interrupts():
                named_state.load(self._state_of(key), values, group)

    def assign(self, key: torch.Tensor, name: str, value: Any) -> None:
        """`state[key][name] = value`: writes what is kept under `name`, and nothing else.

        A parameter that has had no update gets the rest of its state, too: what it would begin with.
        """
        runtime = self._runtime
        with self.turn:
            state = self._state_of(key)
            runtime.drain_state()  # an update that is under way makes state, too
            if not state.present and not state.scalars:
                wanted = runtime.places.with_room(key, runtime.group_of()[key])
                named_state.check_names(wanted, {name: value})
                self[key] = {**named_state.export_first(wanted), name: value}
            elif named_state.is_alone(state, name):
                named_state.check_names(state, {name: value})
                named_state.check_one(state, name, value)
                runtime.before_overwrite()
                with deferred_interrupts():
                    named_state.load_one(state, name, value, runtime.group_of()[key])
            else:
                self[key] = {**self[key], name: value}

    def __delitem__(self, key: Any) -> None:
        with self.turn:
            if isinstance(key, torch.Tensor):
                self[key] = {}
            else:
                del self._own[key]

    def __iter__(self) -> Iterator[Any]:
        with self.turn:
            self._runtime.settle()
            there = [state.param for state in self._runtime.all_states() if state.present or state.scalars]
            return iter([*there, *self._own])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        with self.turn:
            if not isinstance(key, torch.Tensor):
                return key in self._own
            try:
                state = self._state_of(key)
            except UnknownParameterError:
                return False
            self._runtime.settle()
            return bool(state.present or state.scalars)

    # A mapping's own ask `self[key]`, which makes what is not there.

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        return super().pop(key)

    def replace(self, values: Mapping[Any, Any]) -> None:
        """`optimizer.state = values`: what torch code does to reset an optimizer."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"optimizer.state expects a dict from parameters to their state; found {type(values).__name__}. Assign "
                "an empty dict to reset it."
            )
        with self.turn:
            self._replace(values)

    def _replace(self, values: Mapping[Any, Any]) -> None:
        runtime = self._runtime
        group_of = runtime.group_of()
        own = {key: value for key, value in values.items() if not isinstance(key, torch.Tensor)}
        of_params = {param: value for param, value in values.items() if isinstance(param, torch.Tensor)}
        states = {param: self._state_of(param) for param in of_params}
        runtime.check_values(of_params)
        for param, state in states.items():
            named_state.check_names(state, of_params[param])
        runtime.drain_state()
        runtime.before_overwrite()
        runtime.make_room([param for param, given in of_params.items() if given])
        with deferred_interrupts():
            runtime.own_state.clear()
            runtime.own_state.update(own)
            for param, group in group_of.items():
                named_state.load(runtime.state_of(param), of_params.get(param, {}), group)

    def _state_of(self, param: torch.Tensor) -> ParamState:
        try:
            return self._runtime.state_of(param)
        except KeyError:
            raise UnknownParameterError(
                f"optimizer.state has no entry for a tensor of shape {tuple(param.shape)} that is not a parameter of "
                "this optimizer; expected one of its own. Add it with add_param_group(), or ask the optimizer that has "
                "it."
            ) from None


class _ParamView(dict[str, Any]):
    """One parameter's state. Assigning to it changes the state where it is kept, or raises.

    Its tensors are the state itself, except with split masters: there `master_weight` and `exp_avg_sq` are joined
    copies, and only assigning them writes them back. With `update_in_backward` and clipping they are the state only
    until the next step: its speculative updates go to a second set of arenas, which then is the state.
    """

    def __init__(self, view: StateView, param: torch.Tensor, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._view, self._param = view, param

    def __setitem__(self, name: str, value: Any) -> None:
        with self._view.turn:
            self._view.assign(self._param, name, value)
            dict.clear(self)
            dict.update(self, self._view[self._param])

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _write_through(name: str) -> Callable[..., Any]:
    change = getattr(dict, name)

    def changed(self: _ParamView, *args: Any, **kwargs: Any) -> Any:
        with self._view.turn:
            values = dict(self._view[self._param])  # as it is now, which may be steps later
            result = change(values, *args, **kwargs)
            self._view[self._param] = values
            dict.clear(self)
            dict.update(self, self._view[self._param])
        return result

    return changed


for _name in ("__delitem__", "__ior__", "update", "setdefault", "pop", "popitem", "clear"):
    setattr(_ParamView, _name, _write_through(_name))


def save(optimizer: torch.optim.Optimizer, runtime: Runtime) -> dict[str, Any]:
    """`optimizer.state_dict()`."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    runtime.check_not_lost()
    runtime.drain_state()
    index = {param: i for i, param in enumerate(_params(optimizer))}
    groups = []
    for group in optimizer.param_groups:
        packed = {name: value for name, value in group.items() if name != "params"}
        packed["params"] = [index[param] for param in group["params"]]
        groups.append(packed)
    state = {}
    for param, i in index.items():  # one after the other: split masters that are resident are joined on the device
        if exported := named_state.export(runtime.state_of(param)):
            state[i] = {name: _on_host(value) for name, value in exported.items()}
    if state:
        # Ranks gather these name by name: all that have any state have the same names, whichever got which gradients.
        # Where a rank has none at all, torch's own functions make a first step for it.
        group_of = runtime.group_of()
        missing = {i: p for p, i in index.items() if i not in state and is_divided(p) and p.requires_grad}
        first = {i: named_state.export_first(runtime.places.with_room(p, group_of[p])) for i, p in missing.items()}
        state = dict(sorted({**state, **{i: values for i, values in first.items() if values}}.items()))
    result: dict[str, Any] = {"state": {**state, **runtime.own_state}, "param_groups": groups}
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = post_hook(optimizer, result)
        result = result if replaced is None else replaced
    return result


def load(optimizer: torch.optim.Optimizer, runtime: Runtime, state_dict: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state_dict)`. Everything is checked before the old state is touched."""
    loaded = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = pre_hook(optimizer, loaded)
        loaded = loaded if replaced is None else replaced
    runtime.follow_groups()
    groups = _checked_groups(optimizer, runtime, loaded)
    saved_ids = list(chain.from_iterable(group["params"] for group in loaded["param_groups"]))
    own = {key: value for key, value in loaded["state"].items() if key not in saved_ids}
    known = runtime.rule.names | runtime.rule.scalars
    strays = [key for key, value in own.items() if isinstance(value, Mapping) and not known.isdisjoint(value)]
    if strays and len(own) == len(loaded["state"]):
        raise ConfigError(
            f"The state dict has state for {strays[:3]}, …, and groups with the parameters "
            f"{saved_ids[:3]}, …; expected the same names or numbers in both. Pass the state dict as it was saved."
        )
    values = {param: loaded["state"].get(saved, {}) for param, saved in zip(_params(optimizer), saved_ids, strict=True)}
    runtime.check_values(values, groups)
    runtime.drop_iteration()
    runtime.before_overwrite()
    runtime.make_room([param for param, given in values.items() if given])
    with deferred_interrupts():
        replace_groups(runtime, groups)
        for param, group in runtime.group_of().items():
            named_state.load(runtime.state_of(param), values[param], group)
        runtime.own_state.clear()
        runtime.own_state.update(own)
        runtime.forget_lost_step()
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def replace_groups(runtime: Runtime, groups: list[dict[str, Any]]) -> None:
    """Give every group its saved options, in place, and room for the state they need; or leave them as they were."""
    before = [dict(group) for group in runtime.groups]
    try:
        for group, new in zip(runtime.groups, groups, strict=True):
            kept: dict[str, Any] = {name: group[name] for name in ("params", "param_names") if name in group}
            group.clear()
            group.update({**kept, **new, "params": kept["params"]})
        runtime.follow_groups()
    except BaseException:
        for group, old in zip(runtime.groups, before, strict=True):
            group.clear()
            group.update(old)
        raise


def _checked_groups(
    optimizer: torch.optim.Optimizer, runtime: Runtime, loaded: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The saved groups with the defaults this torch version adds to old checkpoints."""
    if not isinstance(loaded, Mapping) or not {"state", "param_groups"} <= loaded.keys():
        found = sorted(map(str, loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise ConfigError(
            "load_state_dict() expects a dict with 'state' and 'param_groups', as state_dict() returns; found "
            f"{found}. Pass the optimizer's part of the checkpoint."
        )
    have, saved = optimizer.param_groups, loaded["param_groups"]
    if not _are_groups(saved) or not isinstance(loaded["state"], Mapping):
        raise ConfigError(
            "load_state_dict() expects 'state' as a dict by parameter and 'param_groups' as a list of dicts, each with "
            f"a list 'params', as state_dict() returns; found {type(loaded['state']).__name__} and "
            f"{type(saved).__name__} or other entries. Pass the optimizer's part of the checkpoint."
        )
    sizes, saved_sizes = [len(g["params"]) for g in have], [len(g["params"]) for g in saved]
    if sizes != saved_sizes:
        raise ConfigError(
            f"The optimizer has parameter groups of {sizes} parameters, the state dict of {saved_sizes}; expected the "
            "same. Load a checkpoint of this model, with the parameters grouped as they were when it was saved."
        )
    groups = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in saved])
    return completed_options(optimizer, runtime, groups)


def completed_options(
    optimizer: torch.optim.Optimizer, runtime: Runtime, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The options of saved groups, with the defaults this torch version adds to old checkpoints, and checked."""
    try:
        completed = runtime.with_class_defaults(groups)
    except KeyError as error:
        raise ConfigError(
            f"The saved parameter groups lack {error}; expected the options of this optimizer: "
            f"{', '.join(sorted(optimizer.defaults))}. Load a checkpoint of the same optimizer class."
        ) from error
    torchs = torch_class_of(runtime.shell)
    check_saved_options(torchs or type(runtime.shell), optimizer.defaults, completed, is_probed=torchs is None)
    return completed


def _are_groups(groups: Any) -> bool:
    """Whether they are parameter groups as `state_dict()` returns them."""
    return isinstance(groups, (list, tuple)) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    )


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _on_host(value: Any) -> Any:
    return value.to("cpu") if isinstance(value, torch.Tensor) else value
