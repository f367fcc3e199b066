# SPDX-License-Identifier: Apache-2.0
"""`ForwardPass`: what one forward of a model has called and saved so far."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offstage.activations.layers import GraphLifetime, LayerCall
from offstage.activations.observer import LayerObserver
from offstage.activations.storage import SavedStorage, Storage
from offstage.activations.traffic import Traffic
from offstage.planning.choices import Choice
from offstage.weights.host_weights import HostWeights


class ForwardPass:
    """One forward of the model. Several may wait for their backward at once: micro-batches of a pipeline."""

    def __init__(self, choices: Sequence[Choice], traffic: Traffic) -> None:
        self.choices, self.traffic = choices, traffic
        self.observer: LayerObserver | None = None
        self.hooks: Any = None
        """On the tensors that autograd saves; `None` where it saves none: an evaluation."""
        self.lifetime = GraphLifetime()
        self.frame = next((frame for frame in frames() if frame.f_code.co_filename == nn.modules.module.__file__), None)
        """Of the model's call."""
        self.seen_bytes = 0
        """Saved by chosen layers so far."""
        self.offloaded_bytes = 0
        self.remade_bytes = 0
        self.has_new_proofs = False
        """Less has to leave than in the forward before."""
        self.num_calls = 0
        """Of layers."""
        self.calls_of: Counter[nn.Module] = Counter()
        """Of each of them."""
        self.call: LayerCall | None = None
        """The one under way."""
        self.previous: LayerCall | None = None
        """The one that ended last."""
        self.unclaimed: dict[int, SavedStorage] = {}
        """Saved since the last layer."""
        self.storages: dict[int, Storage] = {}
        self.weights: dict[int, StorageWeakRef] = {}
        self.host_weights: HostWeights | None = None
        """The weights of the model that live on the host, if any do."""


def frames() -> Iterator[FrameType]:
    """The frames of this thread's callers, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
