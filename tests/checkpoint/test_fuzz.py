# SPDX-License-Identifier: Apache-2.0
"""Hundreds of mutations of every file of a checkpoint: each is refused with one message or loaded right."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_mutations(tmp_path):
    """In a process of its own, whose memory is limited, and of which a crash is one failed test."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fuzz", str(tmp_path), "18", "6"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    last = tmp_path / "last"
    report = f"{result.stdout[-4000:]}{result.stderr[-4000:]} last: {last.read_text() if last.exists() else None}"
    found = re.search(r"^(\d+) mutations, 0 wrong", result.stdout, re.MULTILINE)
    assert result.returncode == 0, report
    assert found, report
    assert int(found[1]) >= 500
