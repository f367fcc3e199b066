# SPDX-License-Identifier: Apache-2.0
"""A loop of accelerate with the one added line: accumulation, clipping, save and resume, in the fast mode.

    python -m examples.accelerate_loop
    torchrun --nproc-per-node 2 -m examples.accelerate_loop       DDP: without update_in_backward

The run is stopped half way, its accelerator and everything else is built anew, and it ends with the bits of one that
was not stopped and whose state stayed on the device. Needs `pip install accelerate`.
"""

from __future__ import annotations

import sys
import tempfile

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState

import offstage.integrations.accelerate
from examples.gpt import GPT, Shape, make_repeatable, stdlib_bytes

STEPS, MICRO_BATCHES, BATCH = 8, 2, 4
SHAPE = Shape(width=64, blocks=3, context=32)


class Run:
    """A model, its optimizer and its schedule, as accelerate prepares them."""

    def __init__(self, *, fast: bool) -> None:
        AcceleratorState._reset_state(reset_partial_state=False)  # this process has had another accelerator
        GradientState._reset_state()
        on_cpu = not torch.accelerator.is_available()
        self.accelerator = accelerate.Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=on_cpu)
        in_backward = self.accelerator.num_processes == 1  # DDP reduces gradients after backward has made them
        settings = {"overlap_forward": True, "update_in_backward": in_backward, "chunk_bytes": "128KiB"}
        settings = settings if fast else {"fraction": 0.0}
        self.offload = offstage.integrations.accelerate.offload(self.accelerator, **settings)  # the one added line
        torch.manual_seed(0)
        model = GPT(SHAPE, activations=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)

    def train(self, steps: range) -> Run:
        data = stdlib_bytes()
        for number in range(steps.start * MICRO_BATCHES, steps.stop * MICRO_BATCHES):
            first = (number * self.accelerator.num_processes + self.accelerator.process_index) * BATCH
            rows = [data[row * SHAPE.context :][: SHAPE.context + 1] for row in range(first, first + BATCH)]
            tokens = torch.stack(rows).long().to(self.accelerator.device)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(tokens[:, :-1], tokens[:, 1:]))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        self.offload.synchronize()  # the weights are read outside a forward
        return self


def main() -> int:
    make_repeatable(torch.accelerator.current_accelerator() or torch.device("cpu"))
    whole = Run(fast=False).train(range(STEPS))
    with tempfile.TemporaryDirectory() as folder:
        stopped = Run(fast=True).train(range(STEPS // 2))
        folder = accelerate.utils.broadcast_object_list([folder])[0]  # every rank reads what the first one wrote
        stopped.accelerator.save_state(folder)
        resumed = Run(fast=True)
        resumed.accelerator.wait_for_everyone()
        resumed.accelerator.load_state(folder)
        resumed.accelerator.wait_for_everyone()
    resumed.train(range(STEPS // 2, STEPS))
    pairs = list(zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
    different = sum(int((ours.view(torch.int16) != theirs.view(torch.int16)).sum()) for ours, theirs in pairs)
    resumed.accelerator.print(resumed.offload.optimizers[0].receipt())
    resumed.accelerator.print(f"elements that differ from the run that was not stopped: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
