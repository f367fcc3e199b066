# SPDX-License-Identifier: Apache-2.0
"""The exceptions of offstage. Each message says what was expected, what was found, and what to do."""


class OffstageError(RuntimeError):
    """Base of every error raised by offstage."""


class ConfigError(OffstageError, ValueError):
    """Settings, parameters or gradients that cannot be used. Raised before any state has moved."""


class UnknownParameterError(ConfigError, KeyError):
    """State was asked for, or given, for a tensor that is not a parameter of the optimizer."""

    __str__ = Exception.__str__  # KeyError's shows the message in quotes


class HostMemoryError(OffstageError, MemoryError):
    """Not enough host memory. Raised before any state has moved."""


class OffloadIneffectiveError(OffstageError):
    """Offloading was asked for, but nothing would leave (or has left) the device, or leaving saves no memory there."""


class StepLostError(OffstageError):
    """A step failed after some chunks were updated: some weights are from before the step, some from after it."""


class RaceError(OffstageError):
    """Two accesses to one buffer that no chain of marks orders. Only the checker of `offstage.lanes` raises it."""


class CheckpointError(OffstageError):
    """A checkpoint is incomplete, damaged, or does not fit what it is loaded into. The message names the file."""
