# SPDX-License-Identifier: Apache-2.0
"""The examples run as they stand, on a machine without an accelerator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


SAYS = {
    "accelerate_loop": "elements that differ from the run that was not stopped: 0",
    "activations": "weights that differ from those of the run in which activations stayed: 0",
    "fit": "weights that differ from those of the run with all state on the device: 0",
    "grpo": "elements that differ from the run with resident state: 0",
    "host_weights": "weights that differ from those of the run with all of them on the device: 0",
    "lightning_loop": "weights that differ from those of the run that was never killed: 0",
    "megatron": "weights that differ from those of the run with all of it on the device: 0",
    "minimal": "state",
    "overlap": "weights 0, average 0",
    "plan": "as planned at first: True; elements that differ from the plain run: 0",
    "rl_loop": "elements that differ from the run that never slept: 0",
    "rl_loop --second-process": "elements that differ from the run that never slept: 0",
    "torchtitan_config": "weights that differ from those of the resident run: 0",
    "trainer": "elements that differ from the run with resident state: 0",
}


@pytest.mark.parametrize(("name", "says"), SAYS.items())
def test_example(name, says, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OFFSTAGE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", *f"examples.{name}".split()]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert says in found.stdout
