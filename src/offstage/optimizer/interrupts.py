# SPDX-License-Identifier: Apache-2.0
"""Sections that Ctrl-C must not cut in two, under the name that the rooms above import them by."""

from __future__ import annotations

from offstage.memory.interrupts import deferred_interrupts

__all__ = ["deferred_interrupts"]
