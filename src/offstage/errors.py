# SPDX-License-Identifier: Apache-2.0
"""The exceptions of offstage. Each message says what was expected, what was found, and what to do."""


class OffstageError(RuntimeError):
    """Base of every error raised by offstage."""


class ConfigError(OffstageError, ValueError):
    """The given settings, parameters or gradients cannot be used. Raised before anything moved."""


class HostMemoryError(OffstageError, MemoryError):
    """Host memory does not suffice for the state. Raised before anything moved."""


class OffloadIneffectiveError(OffstageError):
    """Offloading was asked for, and nothing would leave (or left) the device."""


class StepLostError(OffstageError):
    """A step failed after some chunks were updated: the weights are between two steps."""


class RaceError(OffstageError):
    """Two accesses to one buffer that no chain of marks orders (raised by the checker only)."""


class CheckpointError(OffstageError):
    """A checkpoint is incomplete, damaged, or does not fit what it is loaded into. The message names the file."""
