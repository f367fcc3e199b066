# SPDX-License-Identifier: Apache-2.0
"""Functions compiled by numba, kept on disk where possible (`compiled`, `compiled_for_c`), and what they use."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core.caching import NullCache
from numba.extending import intrinsic

logger = logging.getLogger("offstage")


class DiskCache:
    """numba's cache on disk, as long as it can be read and written: it saves seconds and must not cost a step."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *args: Any) -> Any:
        return self._tried("load_overload", *args)

    def save_overload(self, *args: Any) -> None:
        self._tried("save_overload", *args)

    def _tried(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._cache, name)(*args)
        except Exception as error:  # a full disk, a folder that is gone, a file that is cut
            self._cache = NullCache()
            _log_no_cache(f"{type(error).__name__}: {error}")
            return None


@functools.cache
def _log_no_cache(reason: str) -> None:
    logger.warning(
        "what numba compiles for updates on the host cannot be kept on disk (%s): every process compiles it again, "
        "which takes a few seconds. Set NUMBA_CACHE_DIR to a folder that can be written",
        reason,
    )


def _reason(error: Exception) -> str:
    """The same for all functions, so that it is said once."""
    if isinstance(error, RuntimeError):
        return str(error).partition(":")[2].partition(" for file")[0].strip()
    return f"{type(error).__name__}: {error}"


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit`, kept on disk where that is possible."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        try:
            dispatcher.enable_caching()
        except RuntimeError as error:  # neither beside the source nor under the user's home
            _log_no_cache(_reason(error))
            return dispatcher
        dispatcher._cache = DiskCache(dispatcher._cache)
        return dispatcher

    return decorate


def compiled_for_c(signature: Any, function: Callable[..., Any]) -> Any:
    """`numba.cfunc`, the same way."""
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except Exception as error:  # no folder for the cache, or a cache that cannot be read or written
        _log_no_cache(_reason(error))
        return numba.cfunc(signature, error_model="numpy")(function)


@intrinsic
def atomic_add(typingctx: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at `address`, atomically. Returns what was there before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen
