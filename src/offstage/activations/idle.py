# SPDX-License-Identifier: Apache-2.0
"""`IdleWatch`: enabled and idle is an error, as the user expects memory to be free that is not."""

from __future__ import annotations

from collections.abc import Sequence

from offstage.activations.forward_pass import ForwardPass
from offstage.config import ActivationConfig, format_size
from offstage.errors import OffloadIneffectiveError
from offstage.planning.choices import Choice

_IDLE_FORWARDS = 3
"""Forwards after which something must have moved."""


class IdleWatch:
    """Looks at the first forwards after the layers' choices were made."""

    def __init__(self, config: ActivationConfig, num_layers: int) -> None:
        self._config, self._num_layers = config, num_layers
        self._num_forwards = self._moved = 0

    def restart(self, num_forwards: int, moved: int) -> None:
        """The choices are new. So far: `num_forwards`, in which `moved` bytes have left or were remade."""
        self._num_forwards, self._moved = num_forwards, moved

    def check(self, choices: Sequence[Choice], num_forwards: int, moved: int, last: ForwardPass | None) -> None:
        """Raise if nothing has moved although layers offload, with what `last`, the forward before, says of it."""
        # A layer that recomputes or remakes frees memory, even if all that is left is too small to leave.
        wanted = Choice.OFFLOAD in choices and self._config.fraction > 0 and self._config.activations
        is_idle = num_forwards == self._num_forwards + _IDLE_FORWARDS and moved == self._moved
        if not wanted or not is_idle or last is None:
            return
        raise OffloadIneffectiveError(
            f"offload_activations() has moved nothing in {_IDLE_FORWARDS} forwards of {self._num_layers} layers: "
            f"{self._why(last)}, or leave out offload_activations()."
        )

    def _why(self, last: ForwardPass) -> str:
        if not last.num_calls:
            return "the forward of none of them was seen. Name the modules that run, as in layers=[...]"
        if last.seen_bytes:
            return f"fraction={self._config.fraction} of what they save is less than any tensor of it. Raise fraction"
        if least := int(self._config.min_bytes):
            return f"what they save is smaller than min_bytes={format_size(least)}. Lower min_bytes"
        return "they save nothing but parameters and tensor subclasses. Name other modules, as in layers=[...]"
