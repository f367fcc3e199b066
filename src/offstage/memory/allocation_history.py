# SPDX-License-Identifier: Apache-2.0
"""`AllocationHistory`: torch's record of what allocated each block of device memory, as a file for its viewer."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

import torch

from offstage.errors import ConfigError

logger = logging.getLogger("offstage")

_MOST_EVENTS = 100_000
"""The newest allocations and frees that are kept; each takes about a KiB of the file. Blocks in use are always kept."""


class AllocationHistory:
    """Within this context torch's allocator records a Python stack for each allocation. CUDA only."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(
                f"run.memory_snapshot expects a CUDA device, whose allocator can record its history; found "
                f"{str(device)!r}. Leave it out: the report shows memory by owner on every device."
            )

    def __enter__(self) -> AllocationHistory:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_EVENTS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def save(self, path: Path) -> None:
        """Write what was recorded so far. Training does not end because of a file that cannot be written."""
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            torch.cuda.memory._dump_snapshot(str(temporary))  # type: ignore[no-untyped-call]
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            logger.warning("%s could not be written: %s", path, error.strerror or error)
