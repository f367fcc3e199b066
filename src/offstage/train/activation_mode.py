# SPDX-License-Identifier: Apache-2.0
"""What happens to activations: `activations.mode` applied to the layers of this rank. Called by `loop.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offstage.activations.offload import ActivationOffload, offload_activations
from offstage.errors import ConfigError
from offstage.train.config import ActivationSettings
from offstage.train.passes import Passes
from offstage.train.stages import Stage

_USABLE = 0.95
"""Of a device's memory: some is lost between allocations."""


@contextlib.contextmanager
def activation_mode(
    settings: ActivationSettings, passes: Passes, device: torch.device
) -> Iterator[list[ActivationOffload]]:
    """Within: layers keep, compute again or send away what `settings` say. Handles of what was offloaded."""
    handles: list[ActivationOffload] = []
    with contextlib.ExitStack() as open_until_end:
        if settings.checkpoints:
            for piece in passes.pieces:
                piece.checkpoint_layers()  # type: ignore[operator]
        for piece, choice in _offloaded(settings, passes, device):
            handles.append(open_until_end.enter_context(offload_activations(piece, **choice)))
        yield handles


def _offloaded(
    settings: ActivationSettings, passes: Passes, device: torch.device
) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Which modules get `offload_activations`, and how."""
    if settings.offloads:
        for piece in passes.pieces:
            if layers := _leaving(piece):
                yield piece, {"layers": layers, "fraction": settings.fraction}
    elif settings.mode == "auto" and (peak := _peak(settings, device)) is not None:
        for piece in passes.pieces:
            if isinstance(piece, Stage):
                raise ConfigError(
                    "activations.mode='auto' finds out what fits while the whole model runs; found pipeline stages, "
                    "which run in turns. Use 'checkpoint', 'offload' or 'checkpoint_and_offload'."
                )
            yield piece, {"layers": "auto", "device_peak": peak}


def _leaving(piece: nn.Module) -> list[nn.Module]:
    """All but the model's last layer, which backward needs at once."""
    layers: list[nn.Module] = piece.layers()  # type: ignore[operator]
    return layers if isinstance(piece, Stage) and not piece.last else layers[:-1]


def _peak(settings: ActivationSettings, device: torch.device) -> int | None:
    """The most bytes there may be; `None` where memory is the host's, and nobody has set a limit."""
    if settings.device_peak is not None:
        return int(settings.device_peak)
    if device.type == "cpu":
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    return int(_USABLE * (free + torch.accelerator.memory_reserved(device)))
