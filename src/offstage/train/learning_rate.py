# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a step: warm-up, then a cosine. A formula of the step, so that there is nothing to save."""

from __future__ import annotations

import math

from offstage.train.config import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """For `step`, counted from 1, of `steps`: the highest one after the warm-up, the lowest one in the last step."""
    if step <= settings.warm_up:
        return settings.lr * step / settings.warm_up
    progress = min(1.0, (step - settings.warm_up) / max(1, steps - settings.warm_up))
    share = settings.last_lr_share + (1 - settings.last_lr_share) * (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * share
