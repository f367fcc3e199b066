# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: plain `torch.distributed.checkpoint` folders, from any plan and world size to any other.

`save`, `async_save` and `load`; docs/state_dict.md describes the format. Read `saving.py` first.
"""

from offstage.checkpoint.fused import Fused, by_map, by_metadata, gdn, qkv, split_as, swiglu
from offstage.checkpoint.loading import load
from offstage.checkpoint.manifest import is_complete, latest, verify
from offstage.checkpoint.saving import AsyncSave, async_save, save

__all__ = [
    "AsyncSave",
    "Fused",
    "async_save",
    "by_map",
    "by_metadata",
    "gdn",
    "is_complete",
    "latest",
    "load",
    "qkv",
    "save",
    "split_as",
    "swiglu",
    "verify",
]
