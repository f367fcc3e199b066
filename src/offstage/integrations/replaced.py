# SPDX-License-Identifier: Apache-2.0
"""`Replaced`: methods of one object of another engine that are replaced on that object alone, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from offstage import ConfigError


class Replaced:
    """The replaced methods of one object."""

    def __init__(self, owner: Any, why: str) -> None:
        """`why` names what asks for it, in messages."""
        self._owner, self._why = owner, why
        self._found: dict[str, tuple[bool, Any]] = {}

    def replace(self, name: str, own: Callable[..., Any]) -> None:
        """Put `own` in place of the method of that name, which it gets as its first argument."""
        found = getattr(self._owner, name, None)
        if not callable(found):
            self.restore()
            raise ConfigError(
                f"{self._why} expects {type(self._owner).__name__}.{name}(); found none. This version of "
                f"{type(self._owner).__module__.partition('.')[0]} is another one than those it knows."
            )
        self._found[name] = (name in vars(self._owner), found)
        setattr(self._owner, name, functools.partial(own, found))

    def restore(self) -> None:
        """All methods are those that were there before."""
        for name, (own, found) in self._found.items():
            if own:
                setattr(self._owner, name, found)
            else:
                delattr(self._owner, name)
        self._found.clear()
