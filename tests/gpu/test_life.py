# SPDX-License-Identifier: Apache-2.0
"""Two kinds of device in one optimizer, fork, exit and garbage collection with copies in flight."""

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import offstage
from tests.support.params import equal, make_params


def test_parameters_on_two_devices() -> None:
    def train(config: dict) -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(300, 100).to(d)) for d in ("cpu", "cuda", "cpu", "cuda")]
        optimizer = offstage.offload(torch.optim.AdamW(params), min_bytes=0, chunk_bytes="64KiB", **config)
        for _ in range(5):
            for param in params:
                param.grad = torch.randn(300, 100).to(param.device)
            optimizer.step()
        return [p.detach().cpu() for p in params]

    assert equal(train({}), train({"fraction": 0.0}))


def test_a_forked_child_does_not_disturb_the_arenas() -> None:
    def train(fork: bool) -> list[torch.Tensor]:
        params = make_params(shapes=((512, 512),) * 4, device="cuda")
        optimizer = offstage.offload(torch.optim.AdamW(params), chunk_bytes="1MiB")
        child = 0
        for step in range(6):
            if fork and step == 2:
                child = os.fork()
                if child == 0:
                    del optimizer
                    gc.collect()
                    os._exit(0)
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        if child:
            assert os.waitpid(child, 0)[1] == 0
        return [p.detach().cpu() for p in params]

    assert equal(train(True), train(False))


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )


BUILD = """
import torch, offstage
params = [torch.nn.Parameter(torch.randn(2048, 2048, device="cuda")) for _ in range(16)]
optimizer = offstage.offload(torch.optim.AdamW(params), chunk_bytes="4MiB")
for param in params:
    param.grad = torch.randn_like(param)
optimizer.step()
optimizer.step()
"""


@pytest.mark.parametrize("drop", ["", "import gc\ndel optimizer\ngc.collect()\ntorch.cuda.synchronize()\n"])
def test_exit_and_garbage_collection_with_copies_in_flight(drop: str) -> None:
    done = _run(BUILD + drop + "print('fine')\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_an_exception_with_copies_in_flight() -> None:
    done = _run(BUILD + "raise KeyboardInterrupt\n")
    assert done.returncode != 0
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert "offstage" not in done.stderr


def test_state_can_be_read_after_close() -> None:
    param = torch.nn.Parameter(torch.randn(512, 512, device="cuda"))
    optimizer = offstage.offload(torch.optim.AdamW([param]), chunk_bytes="64KiB")
    param.grad = torch.randn_like(param)
    optimizer.step()
    kept = optimizer.state[param]["exp_avg"]
    copy = kept.clone()
    optimizer.close()
    assert torch.equal(kept, copy)
