# SPDX-License-Identifier: Apache-2.0
"""Rules: the arithmetic of one optimizer family on a chunk. `choose_rule` picks the one for an optimizer."""

from __future__ import annotations

from torch import optim

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.rules.adamw import AdamRule
from offstage.rules.rule import Rule
from offstage.rules.shell import shell_of
from offstage.rules.torch_rule import ELEMENTWISE, WHOLE, TorchRule

_REFUSED = {
    optim.LBFGS: "it evaluates the closure several times per step and keeps its history in one list",
    optim.SparseAdam: "it updates only the rows of sparse gradients",
}


def choose_rule(optimizer: optim.Optimizer, config: OffloadConfig) -> Rule:
    """The rule for `optimizer`'s class, or a `ConfigError` that says why there is none."""
    kind = type(optimizer)
    if kind in _REFUSED:
        raise ConfigError(
            f"{kind.__name__} cannot be offloaded: {_REFUSED[kind]}. Use it without offstage, or another optimizer."
        )
    if kind in (optim.Adam, optim.AdamW) and config.rule == "auto":
        return AdamRule(config, decoupled=kind is optim.AdamW)
    if kind in ELEMENTWISE or kind in WHOLE:
        if config.state_dtype != "float32":
            raise ConfigError(
                f"state_dtype is a choice of offstage's own Adam and AdamW rules; {kind.__name__} keeps its state as "
                "torch does. Remove state_dtype."
            )
        if config.threads is not None:
            raise ConfigError(
                f"threads={config.threads} are for offstage's own Adam and AdamW rules; {kind.__name__} updates with "
                "torch's threads. Use torch.set_num_threads, and leave threads out."
            )
        return TorchRule(config, optimizer)
    paged = " It pages its own state already, and must not be offloaded twice." if hasattr(kind, "is_paged") else ""
    supported = ", ".join(sorted(cls.__name__ for cls in (*ELEMENTWISE, *WHOLE)))
    raise ConfigError(
        f"offload() expects an optimizer of exactly one of these torch.optim classes: {supported}; found "
        f"{kind.__module__}.{kind.__qualname__}.{paged} Pass one of these."
    )


__all__ = ["Rule", "choose_rule", "shell_of"]
