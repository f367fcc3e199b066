# SPDX-License-Identifier: Apache-2.0
"""What is no tensor, as bytes that `torch.load(weights_only=True)` reads. Used by `catalogue.py` and `writer.py`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from offstage.errors import ConfigError


def pickled(name: str, value: Any) -> bytes:
    """`value` as `torch.save` writes it. Raises where it could not be loaded again: a checkpoint must not be a trap."""
    buffer = io.BytesIO()
    try:
        torch.save(_plain(value), buffer)
        unpickled(buffer.getvalue())
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name!r} is a {type(value).__name__} that torch.load(weights_only=True) could not load again "
            f"({str(error).splitlines()[0]}); expected tensors, numbers, strings, and lists, tuples and dicts of them. "
            "Save what it consists of."
        ) from error
    return buffer.getvalue()


def unpickled(data: bytes) -> Any:
    """A new object of the same value."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's: schedules are often written with them."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict or (isinstance(value, Mapping) and type(value).__module__ == "builtins"):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(inner) for inner in value)
    return value
