# SPDX-License-Identifier: Apache-2.0
"""Rules: the arithmetic of one optimizer family on a chunk. `choose_rule` picks the one for an optimizer."""

from __future__ import annotations

from torch import optim

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.rules.adamw import AdamRule
from offstage.rules.probed_rule import ProbedRule
from offstage.rules.rule import Rule
from offstage.rules.shell import own_step, shell_of
from offstage.rules.torch_rule import ELEMENTWISE, WHOLE, TorchRule

_REFUSED = {
    optim.LBFGS: "it evaluates the closure several times per step and keeps its history in one list",
    optim.SparseAdam: "it updates only the rows of sparse gradients",
}


_HARMLESS = frozenset(
    {"__module__", "__qualname__", "__doc__", "__annotations__", "__dict__", "__weakref__", "__init__", "__repr__"}
    | {"__str__", "__firstlineno__", "__static_attributes__", "__annotate__", "__annotations_cache__", "__slots__"}
    | {"__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__", "__type_params__", "__hash__"}
)
"""What a subclass may define and still do what its base does."""


def choose_rule(optimizer: optim.Optimizer, config: OffloadConfig) -> Rule:
    """The rule for `optimizer`'s class, or a `ConfigError` that says why there is none."""
    kind = torch_class_of(optimizer)
    name = type(optimizer).__name__
    if getattr(optimizer, "is_paged", False):  # bitsandbytes, where the base of all classes has it on the instance
        raise ConfigError(
            f"{name} pages its own state between device and host already, and must not be offloaded twice; expected an "
            "optimizer that keeps its state on the device. Use it without offstage, or an optimizer that does not page."
        )
    if kind in _REFUSED:
        raise ConfigError(
            f"{name} cannot be offloaded: {_REFUSED[kind]}. Use it without offstage, or another optimizer."
        )
    if kind in (optim.Adam, optim.AdamW) and config.rule == "auto":
        return AdamRule(config, decoupled=kind is optim.AdamW)
    if config.state_dtype != "float32":
        raise ConfigError(
            f"state_dtype is a choice of offstage's own Adam and AdamW rules; {name} keeps its state in its own "
            "formats. Remove state_dtype."
        )
    if config.threads is not None:
        raise ConfigError(
            f"threads={config.threads} are for offstage's own Adam and AdamW rules; {name} updates with torch's "
            "threads. Use torch.set_num_threads, and leave threads out."
        )
    return ProbedRule(config, optimizer) if kind is None else TorchRule(config, optimizer, kind)


def torch_class_of(optimizer: optim.Optimizer) -> type[optim.Optimizer] | None:
    """The class of `torch.optim` whose `step` and everything that it uses `optimizer` has, if there is one.

    A subclass that only has another name, constructor or methods that its base does not know is its base.
    """
    known = {*ELEMENTWISE, *WHOLE, *_REFUSED}
    for base in type(optimizer).__mro__:
        if base in known:
            replaced = [name for name in vars(optimizer) if callable(vars(optimizer)[name]) and hasattr(base, name)]
            return base if set(replaced) <= {"step"} else None  # schedulers wrap the instance's step
        own = vars(base).keys() - _HARMLESS
        if own_step(base) is own_step(base.__mro__[1]):  # torch puts hooks around the one that it inherits
            own -= {"step"}
        if any(hasattr(optim.Optimizer, name) or _is_in_torch(base, name) for name in own):
            return None
    return None


def _is_in_torch(kind: type, name: str) -> bool:
    """Whether a base of `kind` that is torch's has `name` too."""
    return any(name in vars(base) for base in kind.__mro__ if base.__module__.startswith("torch.optim"))


__all__ = ["Rule", "choose_rule", "shell_of", "torch_class_of"]
