# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with every mode: accumulation, exact clipping, an average of the weights, a kill and a resume.

    python -m examples.lightning_loop

A small GPT is trained three times: with resident state, then with updates under backward and forward until it is
killed, then from the last checkpoint to the end. The bits that differ are counted. Needs `pip install lightning`. Uses
the accelerator if there is one; without one the CPU plays the device.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import offstage
from examples.gpt import GPT, Shape, make_repeatable, stdlib_bytes
from offstage.integrations.lightning import OffloadCallback

SHAPE = Shape(width=64, blocks=2, context=32)
RESIDENT: dict[str, Any] = {"fraction": 0.0}
OVERLAPPED: dict[str, Any] = {"overlap_forward": True, "update_in_backward": True, "chunk_bytes": "128KiB"}


class Killed(Exception):
    """What ends a job in the middle of an epoch."""


class LitGPT(LightningModule):
    def __init__(self, settings: dict[str, Any], killed_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        on_device = torch.accelerator.is_available()
        self.gpt = GPT(SHAPE, activations=torch.bfloat16 if on_device else torch.float32)
        self.settings, self.killed_at = settings, killed_at

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        if self.global_step == self.killed_at:
            raise Killed
        tokens = batch[0].long()
        return self.gpt(tokens[:, :-1], tokens[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return offstage.optim.AdamW(self.parameters(), lr=1e-3, model=self, **self.settings)


def train(settings: dict[str, Any], folder: str, *, killed_at: int | None = None, resume: str | None = None) -> LitGPT:
    model = LitGPT(settings, killed_at)
    callback = OffloadCallback()
    trainer = Trainer(
        devices=1,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[EMAWeightAveraging(decay=0.9), ModelCheckpoint(folder, filename="{epoch}"), callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = stdlib_bytes(most=48 * (SHAPE.context + 1)).view(48, -1)
    with contextlib.suppress(Killed):
        trainer.fit(model, DataLoader(TensorDataset(data), batch_size=4), ckpt_path=resume)
    print(f"steps {trainer.global_step}", *callback.receipts, sep="\n")
    return model.cpu()


def main() -> int:
    make_repeatable(torch.accelerator.current_accelerator() or torch.device("cpu"))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as folder:
        resident = train(RESIDENT, f"{folder}/resident")
        train(OVERLAPPED, f"{folder}/ours", killed_at=10)
        resumed = train(OVERLAPPED, f"{folder}/ours", resume=f"{folder}/ours/epoch=0.ckpt")
    pairs = zip(resumed.parameters(), resident.parameters(), strict=True)
    different = sum(int((a.detach().view(torch.int16) != b.detach().view(torch.int16)).sum()) for a, b in pairs)
    print(f"averaged weights that differ from those of the run that was never killed: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
