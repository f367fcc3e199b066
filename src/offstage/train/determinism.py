# SPDX-License-Identifier: Apache-2.0
"""`deterministic`: kernels with repeatable bits; `explained_errors`: errors of the device with a remedy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from offstage import OffstageError
from offstage.train.config import TrainConfig


@contextlib.contextmanager
def deterministic(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Within: kernels that give the same bits every time, if configured; and none that the CPU cannot run."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    if device.type != "cpu" and config.run.deterministic:
        # cuBLAS is deterministic only with a fixed workspace, chosen before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # with warn_only, attention's backward would not be deterministic
        memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Some virtual machines report AMX and do not allow it: oneDNN's bf16 products then raise SIGILL.
    onednn, half = torch.backends.mkldnn.enabled, config.model.dtype_on(device) != torch.float32
    if device.type == "cpu" and half:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.mkldnn.enabled = onednn


@contextlib.contextmanager
def explained_errors(config: TrainConfig, *, building: bool = False) -> Iterator[None]:
    """Within: add the remedy to errors that torch raises about memory and the device. `building`: no step was made."""
    try:
        yield
    except OffstageError:
        raise
    except (RuntimeError, MemoryError) as error:
        if (explained := _explained(error, config, building=building)) is None:
            raise
        raise explained from error


def _explained(error: Exception, config: TrainConfig, *, building: bool) -> OffstageError | None:
    # torch has an exception for a full device, and for the host's memory a text.
    full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
    if full and building:
        return OffstageError(
            f"Memory ran out while the model was built: {_first_line(error)} It was free when it was looked at: end "
            "the other programs that take it, or choose a smaller model or more ranks. `offstage plan` shows what fits."
        )
    if full:
        return OffstageError(
            f"Device memory ran out: {_first_line(error)} In this order: activations.mode='checkpoint' (now "
            f"{config.activations.mode!r}), data.batch={max(1, config.data.batch // 2)} with more micro-batches "
            "(data.micro_batches), a smaller offload.device_budget, offload.update_in_backward with optimizer.clip=0. "
            "`offstage plan` shows what fits. Complete checkpoints are unchanged."
        )
    if "does not have a deterministic implementation" in str(error):
        return OffstageError(
            f"This model has an operation whose bits do not repeat: {_first_line(error)} Use run.deterministic=false; "
            "a resumed run then ends close to an uninterrupted one, and not with the same bits."
        )
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
