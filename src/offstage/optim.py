# SPDX-License-Identifier: Apache-2.0
"""Ready-made classes for engines that make the optimizer: `offstage.optim.AdamW(params, lr=1e-3, fraction=0.5)`.

Each takes the options of the class of that name in `torch.optim` and, as keywords, the settings of `OffloadConfig`. An
engine that knows parameters only leaves out `model` and may give it later: `optimizer.attach(model)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch

from offstage.config import OffloadConfig, documents, format_size
from offstage.errors import ConfigError
from offstage.optimizer.optimizer import OffloadedOptimizer, checked_config

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]

_SETTINGS = frozenset(field.name for field in dataclasses.fields(OffloadConfig))


class _ReadyMade(OffloadedOptimizer):
    """An optimizer of `torch_class` that is offloaded from the beginning."""

    torch_class: ClassVar[type[torch.optim.Optimizer]]

    def __init__(
        self,
        params: Iterable[Any],
        *options: Any,
        model: torch.nn.Module | None = None,
        config: OffloadConfig | None = None,
        **named: Any,
    ) -> None:
        known = inspect.signature(self.torch_class).parameters.keys()
        self._refuse_unknown(named.keys() - known - _SETTINGS, known)
        settings = {name: value for name, value in named.items() if name not in known}
        self._refuse_peak(OffloadConfig.build(config, settings))
        optimizer = self.torch_class(params, *options, **{name: named[name] for name in named.keys() & known})
        super().__init__(optimizer, model, checked_config(optimizer, model, config, settings), model_later=True)

    def _refuse_unknown(self, unknown: Collection[str], known: Collection[str]) -> None:
        for name in sorted(unknown):
            near = difflib.get_close_matches(name, [*known, *sorted(_SETTINGS)], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"torch's options are {', '.join(known)}."
            raise ConfigError(
                f"{type(self).__name__} has no option or setting {name!r}; expected those of "
                f"torch.optim.{self.torch_class.__name__} and fields of OffloadConfig; {hint}"
            )

    def _refuse_peak(self, config: OffloadConfig) -> None:
        if config.device_peak is not None and config.window != "auto":
            name = self.torch_class.__name__
            raise ConfigError(
                f"{type(self).__name__} was given device_peak={format_size(int(config.device_peak))}, which is for a "
                "model and its optimizer together; expected offstage.fit(), found parameters. Use offstage.fit(model, "
                f"torch.optim.{name}(params), device_peak=...), or give device_peak to the offload() of your engine in "
                "offstage.integrations."
            )

    def __init_subclass__(cls) -> None:
        """The help and the signature have the options of both."""
        if "torch_class" not in vars(cls):  # a wrapper that is of the class it wraps
            return
        given = inspect.signature(cls.torch_class)
        kinds = inspect.Parameter
        ours = [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in ("model", "config", *sorted(_SETTINGS))]
        cls.__signature__ = given.replace(parameters=[*given.parameters.values(), *ours])  # type: ignore[attr-defined]
        cls.__doc__ = (
            f"`torch.optim.{cls.torch_class.__name__}`, with its options, and its state off the device. `model` and "
            "`config` as in `offstage.offload()`; further keywords are these fields of `OffloadConfig`:"
        )
        documents(OffloadConfig)(cls)


class Adadelta(_ReadyMade):
    torch_class = torch.optim.Adadelta


class Adafactor(_ReadyMade):
    torch_class = torch.optim.Adafactor


class Adagrad(_ReadyMade):
    torch_class = torch.optim.Adagrad


class Adam(_ReadyMade):
    torch_class = torch.optim.Adam


class Adamax(_ReadyMade):
    torch_class = torch.optim.Adamax


class AdamW(_ReadyMade):
    torch_class = torch.optim.AdamW


class ASGD(_ReadyMade):
    torch_class = torch.optim.ASGD


class Muon(_ReadyMade):
    torch_class = torch.optim.Muon


class NAdam(_ReadyMade):
    torch_class = torch.optim.NAdam


class RAdam(_ReadyMade):
    torch_class = torch.optim.RAdam


class RMSprop(_ReadyMade):
    torch_class = torch.optim.RMSprop


class Rprop(_ReadyMade):
    torch_class = torch.optim.Rprop


class SGD(_ReadyMade):
    torch_class = torch.optim.SGD
