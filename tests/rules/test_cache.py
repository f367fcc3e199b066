# SPDX-License-Identifier: Apache-2.0
"""numba's cache on disk is a convenience: where it cannot be made, read or written, updates are made all the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offstage
from offstage.lanes import compiled
from offstage.rules import adamw_host

STEP = """
import offstage, torch
weight = torch.nn.Parameter(torch.ones(1000))
optimizer = offstage.offload(torch.optim.AdamW([weight]), min_bytes=0)
for _ in range(2):
    weight.grad = torch.ones(1000)
    optimizer.step()
print(offstage.__file__, float(weight[0]))
"""


def test_a_read_only_install_without_a_home(tmp_path):
    """Files stand where the folders of the cache would be: that binds the superuser too."""
    source = tmp_path / "src" / "offstage"
    shutil.copytree(Path(offstage.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__"))
    for room in ("rules", "lanes"):
        (source / room / "__pycache__").touch()
    (tmp_path / "home").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": str(source.parent), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path / "home")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}
    done = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    file, weight = done.stdout.split()
    assert file == str(source / "__init__.py")
    assert float(weight) == pytest.approx(1 - 2e-3, abs=1e-4)
    assert done.stderr.count("cannot be kept on disk") == 1
    assert "NUMBA_CACHE_DIR" in done.stderr


class _Broken:
    def load_overload(self, *_):
        raise EOFError("Ran out of input")

    def save_overload(self, *_):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("use", "reason"), [("load_overload", "Ran out of input"), ("save_overload", "No space left")])
def test_a_cache_that_breaks_costs_no_step(use, reason, caplog):
    cache = compiled.DiskCache(_Broken())
    assert getattr(cache, use)("signature", "data") is None
    assert cache.load_overload("signature", "target") is None  # given up: nothing is tried again
    assert reason in caplog.text
    assert caplog.text.count("cannot be kept on disk") == 1


def test_the_cache_is_used_where_it_can_be():
    weight = torch.ones(8, dtype=torch.bfloat16)
    adamw_host.fingerprint(weight, torch.zeros(1, dtype=torch.int64))
    assert isinstance(adamw_host._fingerprint._cache, compiled.DiskCache)
    assert sum(adamw_host._fingerprint.stats.cache_hits.values()) + sum(
        adamw_host._fingerprint.stats.cache_misses.values()
    )
