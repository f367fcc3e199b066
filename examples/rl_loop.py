# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on one device: trainer and generator take turns, and training gets the same bits.

    python -m examples.rl_loop
    python -m examples.rl_loop --second-process
    python -m examples.rl_loop --size large --switch to

Ten cycles: the trainer's state leaves the device, a small GPT writes bytes with its keys and values in the memory that
is free now, the share of lower-case letters is their reward, and a policy gradient trains the GPT. With
`--second-process` another process generates, from the weights that the sleeping trainer has in host memory. `--switch`
compares `offstage.sleep()` with `.to("cpu")` and with staying. Uses the accelerator if there is one; without one the
CPU plays the device.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

import offstage
from examples.gpt import Block, Linear, RMSNorm, Shape, make_repeatable
from offstage.config import format_size
from offstage.phases.report import Wake
from offstage.phases.sharing import SharedWeights, WeightsOnHost

CYCLES, SAVED_IN, SAMPLES = 10, 4, 64
SHAPES = {
    "small": Shape(width=128, blocks=3, context=32),
    "large": Shape(width=2048, blocks=30, heads=16, context=128),  # 1.5 billion parameters
}
LEARNING_RATES = {"small": 1e-2, "large": 3e-4}


class CachingBlock(Block):
    kept: torch.Tensor | None = None
    """Keys and values of all bytes so far, while it generates: (2, B, H, T, D)."""

    def attend(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if self.kept is not None:
            until = hidden.shape[1]
            self.kept[:, :, :, until - length : until] = torch.stack([k, v])
            k, v = self.kept[:, :, :, :until]
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, width)


class Policy(nn.Module):
    """Byte tokens in, logits of the next byte out."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        self.shape, self.activations = shape, torch.float32 if device.type == "cpu" else torch.bfloat16
        self.tokens = nn.Embedding(shape.vocabulary, shape.width, dtype=torch.bfloat16)
        self.positions = nn.Embedding(shape.context, shape.width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(CachingBlock(shape) for _ in range(shape.blocks))
        self.norm, self.head = RMSNorm(shape.width), Linear(shape.width, shape.vocabulary)
        self.register_buffer("hidden", torch.ones(shape.context, shape.context, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        until = start + tokens.shape[1]
        where = torch.arange(start, until, device=tokens.device)
        x = (self.tokens(tokens) + self.positions(where)).to(self.activations)
        for block in self.blocks:
            x = block(x, self.hidden[start:until, :until])
        return self.head(self.norm(x)).float()


@torch.no_grad()
def sample(policy: Policy, cycle: int) -> torch.Tensor:
    """Sequences that begin with a newline. The same in every run that has the same weights then."""
    shape, device = policy.shape, policy.hidden.device
    for block in policy.blocks:
        size = (2, SAMPLES, shape.heads, shape.context, shape.width // shape.heads)
        block.kept = torch.empty(size, dtype=policy.activations, device=device)
    tokens = torch.full((SAMPLES, 1), ord("\n"), device=device)
    chance = torch.Generator(device).manual_seed(cycle)
    for start in range(shape.context - 1):
        likely = policy(tokens[:, -1:], start)[:, -1].softmax(-1)
        noise = torch.empty_like(likely).exponential_(generator=chance)
        tokens = torch.cat([tokens, (likely / noise).argmax(-1, keepdim=True)], dim=1)
    for block in policy.blocks:
        block.kept = None
    return tokens


def sample_elsewhere(shape: Shape, device: torch.device, cycle: int, weights: WeightsOnHost | dict) -> list[list[int]]:
    """In the other process, which has nothing on the device before and afterwards."""
    make_repeatable(device)
    with torch.device("meta"):
        policy = Policy(shape, device)
    found = weights.open() if isinstance(weights, WeightsOnHost) else weights
    policy.load_state_dict({name: tensor.to(device) for name, tensor in found.items()}, assign=True)
    tokens = sample(policy, cycle).tolist()
    del policy
    empty_cache()
    return tokens


class Masters(torch.optim.AdamW):
    """For `--switch to`: fp32 masters as one writes them without offstage."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        self.weights = weights
        super().__init__([weight.detach().float() for weight in weights], lr=lr, fused=True)

    def clip_grad_norm_(self, most: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.weights, most)

    @torch.no_grad()
    def step(self) -> None:
        masters = self.param_groups[0]["params"]
        for master, weight in zip(masters, self.weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        super().step()
        torch._foreach_copy_(self.weights, masters)

    def to(self, device: torch.device) -> None:
        moments = [tensor for state in self.state.values() for tensor in state.values() if tensor.dim()]
        for tensor in (*self.param_groups[0]["params"], *moments):
            tensor.data = tensor.data.to(device)


class Trainer:
    def __init__(self, size: str, device: torch.device, switch: str, *, wholly: bool) -> None:
        """`wholly`: the weights leave, too, since another process needs their memory."""
        torch.manual_seed(0)
        self.device, self.switch, self.wholly = device, switch, wholly
        with device:
            self.policy = Policy(SHAPES[size], device)
        params, lr = list(self.policy.parameters()), LEARNING_RATES[size]
        if switch == "to":
            self.optimizer = Masters(params, lr)
        else:  # on the device, with fp32 masters
            self.optimizer = offstage.offload(torch.optim.AdamW(params, lr=lr), self.policy, fraction=0.0)
        self.shared = SharedWeights(self.policy) if wholly and switch == "sleep" else None  # before the first sleep()

    def leave(self) -> int:
        """Returns the bytes of device memory that are free now."""
        if self.switch == "sleep":
            keep = () if self.wholly else ("weights", "buffers")
            return offstage.sleep(self.policy, self.optimizer, keep=keep, drop=("gradients",)).freed_bytes
        return self._move(torch.device("cpu")) if self.switch == "to" else 0

    def come_back(self) -> Wake | None:
        if self.switch == "sleep":
            return offstage.wake(self.policy, self.optimizer)  # training begins before all is back
        if self.switch == "to":
            self._move(self.device)
        return None

    def _move(self, device: torch.device) -> int:
        before = empty_cache()
        self.optimizer.to(device)
        if self.wholly:
            self.policy.to(device)
        return before - empty_cache()

    def weights(self) -> WeightsOnHost | dict[str, torch.Tensor]:
        """For the other process."""
        if self.shared:
            return self.shared.while_asleep()
        return {name: tensor.cpu() for name, tensor in self.policy.state_dict().items()}

    def learn(self, tokens: torch.Tensor) -> float:
        """One step of REINFORCE, with the mean as the baseline. Returns the mean reward."""
        written = tokens[:, 1:]
        rewards = ((written >= ord("a")) & (written <= ord("z"))).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        surprises = F.cross_entropy(self.policy(tokens[:, :-1]).flatten(0, 1), written.flatten(), reduction="none")
        self.optimizer.zero_grad()
        (advantages[:, None] * surprises.view_as(written)).mean().backward()
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()  # the gradients stay: sleep() drops them
        return rewards.mean().item()


def empty_cache() -> int:
    """Returns the bytes of tensors on the device."""
    if not torch.accelerator.is_available():
        return 0
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_allocated()


def run(trainer: Trainer, pool: ProcessPoolExecutor | None, folder: str, cycles: int) -> dict[str, torch.Tensor]:
    """So many cycles. Returns the weights."""
    rewards, switching, whole = [], [], []
    for cycle in range(cycles):
        started = time.perf_counter()
        freed = trainer.leave()
        leaving = time.perf_counter() - started
        if folder and cycle == SAVED_IN:
            offstage.checkpoint.save(folder, trainer.policy, trainer.optimizer)
            started = time.perf_counter() - leaving  # saving is no part of the cycle

        if pool is None:
            tokens = sample(trainer.policy, cycle)
        else:
            there = pool.submit(sample_elsewhere, trainer.policy.shape, trainer.device, cycle, trainer.weights())
            tokens = torch.tensor(there.result(), device=trainer.device)

        asked = time.perf_counter()
        woken = trainer.come_back()
        coming = time.perf_counter() - asked
        rewards.append(trainer.learn(tokens))
        whole.append(time.perf_counter() - started)
        switching.append(leaving + max(coming, woken.seconds if woken else 0.0))  # also what training did not wait for
        times = f"switching {1e3 * switching[-1]:6.1f} of {1e3 * whole[-1]:6.1f} ms"
        print(f"cycle {cycle + 1:2d}  reward {rewards[-1]:.3f}  freed {format_size(freed):>9}  {times}")
    share, mean = sum(switching[1:]) / sum(whole[1:]), sum(whole[1:]) / (cycles - 1)
    print(f"switch {trainer.switch}: {share:.1%} of an iteration, {1e3 * mean:.0f} ms from the second one on")
    print(f"reward: first {rewards[0]:.3f}, last {rewards[-1]:.3f}")
    if cycles >= CYCLES and rewards[-1] <= rewards[0]:
        sys.exit("The reward did not rise.")
    return {name: tensor.to("cpu", copy=True) for name, tensor in trainer.policy.state_dict().items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--switch", choices=("sleep", "to", "none"), default="sleep")
    parser.add_argument("--second-process", action="store_true", help="another process generates")
    parser.add_argument("--cycles", type=int, default=CYCLES, help="at least two; the first is not in the mean")
    args = parser.parse_args()
    if args.cycles < 2:
        parser.error(f"--cycles expects at least 2; found {args.cycles}")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    make_repeatable(device)
    is_checked = args.switch == "sleep" and args.size == "small" and args.cycles > SAVED_IN
    with contextlib.ExitStack() as stack:
        pool, folder = None, ""
        if args.second_process:
            pool = ProcessPoolExecutor(1, mp_context=torch.multiprocessing.get_context("spawn"))
            stack.enter_context(pool).submit(make_repeatable, device).result()  # it has started
        if is_checked:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="offstage-rl-"))
        found = run(Trainer(args.size, device, args.switch, wholly=args.second_process), pool, folder, args.cycles)
        if is_checked:
            offstage.checkpoint.verify(folder)
    if not is_checked:
        return 0
    expected = run(Trainer(args.size, device, "none", wholly=False), None, "", args.cycles)
    different = sum(int((found[name] != tensor).sum()) for name, tensor in expected.items())
    print(f"elements that differ from the run that never slept: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
