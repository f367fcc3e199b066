# SPDX-License-Identifier: Apache-2.0
"""`TrainedModel`: the model whose parameters an optimizer trains, as far as it is known.

It gives parameters their names, and notices when they are no longer in the model, or not trained any more.
"""

from __future__ import annotations

import logging
import weakref

import torch

from offstage.errors import OffstageError
from offstage.optimizer.places import NOTHING_TRAINS, Groups, Places
from offstage.tensors import reshard

logger = logging.getLogger("offstage")


class TrainedModel:
    """The model of one optimizer, or none. It does not keep the model alive."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._ref = weakref.ref(model) if model is not None else None
        self._seen: set[torch.Tensor] = set()
        """Parameters of the optimizer that were in it."""
        self._has_new = False
        """Parameters are new, and it was not looked at since."""
        self._said_idle = False

    @property
    def model(self) -> torch.nn.Module | None:
        """While it is alive."""
        return self._ref() if self._ref is not None else None

    def look(self, places: Places, groups: Groups) -> None:
        """Take the names of the parameters that `groups` have and the model has, too. Not in backward: it reshards."""
        if (model := self.model) is not None:
            reshard(model)
            named = {param: name for name, param in model.named_parameters()}
            ours = {param for group in groups for param in group["params"]} & named.keys()
            places.rename({param: named[param] for param in ours})
            self._seen |= ours
        self._has_new = False

    def look_at_new(self, places: Places, groups: Groups) -> None:
        """The same, if parameters are new."""
        if self._has_new:
            self.look(places, groups)

    def placed(self, places: Places) -> None:
        """The optimizer has other parameters than before."""
        self._seen &= places.states.keys()
        self._has_new = not places.states.keys() <= self._seen

    def check(self, places: Places, groups: Groups) -> None:
        """Raise if trained parameters have left it: they get no gradients, and nothing would change, silently."""
        if (model := self.model) is not None:
            reshard(model)
            left = self._seen - set(model.parameters())
            gone = [one for p, one in places.states.items() if p in left and p.requires_grad and p.grad is None]
            if gone:
                raise OffstageError(
                    f"{len(gone)} parameters (first: {gone[0].name!r}) are no longer in the model; expected those that "
                    "were there at offload(). Was fully_shard() or another wrapper applied after it? Shard the model "
                    "first, then build the optimizer and call offload()."
                )
        if not self._said_idle and trains_nothing(groups):
            self._said_idle = True
            logger.warning("step() changes nothing: %s", NOTHING_TRAINS)


def trains_nothing(groups: Groups) -> bool:
    """Whether `groups` have parameters and none of them can change."""
    params = [param for group in groups for param in group["params"]]
    return bool(params) and not any(param.requires_grad or param.grad is not None for param in params)
