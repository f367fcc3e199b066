# SPDX-License-Identifier: Apache-2.0
"""The examples run as they stand, on a machine without an accelerator."""

import pytest

from tests.support.template import Template

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


@pytest.fixture(scope="module")
def template():
    with Template() as started:
        yield started


@pytest.mark.parametrize(("name", "says"), SAYS.items())
def test_example(name, says, tmp_path, template):
    found = template.run(f"examples.{name}".split(), tmp_path, {"OFFSTAGE_CACHE": str(tmp_path)})
    assert found.returncode == 0, found.stderr
    assert says in found.stdout
