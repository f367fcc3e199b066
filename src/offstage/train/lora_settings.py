# SPDX-License-Identifier: Apache-2.0
"""`LoraSettings`: the section `lora` of a run's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offstage import ConfigError
from offstage.train.settings import checked


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters: the model's own weights are frozen, and two small factors beside each matrix are trained."""

    rank: int = 0
    """Columns of the first factor and rows of the second. 0: no adapters; all weights are trained."""

    alpha: float | None = None
    """The adapters' product is multiplied by alpha / rank. Without it: twice the rank."""

    targets: tuple[str, ...] = ()
    """Names of the linear layers with adapters, such as q_proj v_proj. Without any: all of them in the blocks."""

    def __post_init__(self) -> None:
        checked(self, "lora")
        if self.rank < 0:
            raise ConfigError(
                f"lora.rank expects a whole number of at least 0; found {self.rank}. Leave it out for no adapters."
            )
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(
                f"lora.alpha expects a number above 0; found {self.alpha}. Leave it out for twice the rank."
            )
        if not self.rank and (self.alpha is not None or self.targets):
            name = "targets" if self.targets else "alpha"
            raise ConfigError(
                f"lora.{name} is for adapters, which contradicts lora.rank=0. Give a rank, such as 16, or leave it out."
            )

    @property
    def scale(self) -> float:
        """What the adapters' product is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / self.rank
