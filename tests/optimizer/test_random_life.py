# SPDX-License-Identifier: Apache-2.0
"""Random lives of an optimizer: whatever happens between steps, streamed state has the bits of resident state.

The streamed one runs on lazy lanes with the happens-before checker; both live through the same events.
"""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offstage
from tests.support.training import lazily, same_bits

SHAPES = [(40, 33), (1500,), (3, 7, 11), (1,), (64, 64), (0, 3), (257,)]
EVENTS = ("step", "step", "step", "read", "save and load", "write a weight", "lr", "add a group", "amsgrad", "drain")
FORMATS = [
    (torch.float32, {}),
    (torch.bfloat16, {"master_weights": "fp32"}),
    (torch.bfloat16, {"master_weights": "split"}),
    (torch.bfloat16, {"master_weights": "none", "state_dtype": "bfloat16"}),
]


class Life:
    """An optimizer and what happens to it. Two lives with the same seed see the same gradients."""

    def __init__(self, seed: int, dtype: torch.dtype, config: dict) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.params = [nn.Parameter(self.draw(shape).to(dtype)) for shape in SHAPES]
        options = {"lr": 3e-3, "weight_decay": 0.1}
        self.optimizer = offstage.offload(torch.optim.AdamW(self.params, **options), **config)

    def draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def live(self, event: str, number: int) -> None:
        optimizer, params = self.optimizer, self.params
        chosen = params[number % len(params)]
        if event == "step":
            for i, param in enumerate(params):
                grad = self.draw(tuple(param.shape)).to(param.dtype)
                param.grad = grad if (number >> i % 8) & 1 else None
            optimizer.step()
            optimizer.zero_grad()
        elif event == "read":
            assert set(optimizer.state[chosen]) <= {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_weight"}
        elif event == "save and load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif event == "write a weight":
            chosen.data.copy_(self.draw(tuple(chosen.shape)))
        elif event == "lr":
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number % 5)
        elif event == "add a group" and len(optimizer.param_groups) < 4:
            params.append(nn.Parameter(self.draw((number % 300 + 1, 9)).to(params[0].dtype)))
            optimizer.add_param_group({"params": [params[-1]], "lr": 1e-2})
        elif event == "amsgrad":
            optimizer.param_groups[0]["amsgrad"] = not optimizer.param_groups[0]["amsgrad"]
        elif event == "drain":
            optimizer.synchronize()

    def end(self) -> list[torch.Tensor]:
        states = self.optimizer.state_dict()["state"]
        return [p.detach() for p in self.params] + [v for s in states.values() for _, v in sorted(s.items())]


@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 255)), min_size=3, max_size=14),
    st.sampled_from(FORMATS),
    st.sampled_from(["16KiB", "24KiB", "1MiB"]),
    st.integers(1, 4),
    st.sampled_from([1.0, 0.6]),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=120)
def test_streamed_and_resident_lives_are_the_same(events, kind, chunk_bytes, slots, fraction, seed):
    dtype, config = kind
    with lazily(seed):
        plan = {"min_bytes": 0, "chunk_bytes": chunk_bytes, "slots": slots, "fraction": fraction}
        streamed = Life(seed, dtype, {**config, **plan})
    resident = Life(seed, dtype, {**config, "fraction": 0.0})
    for event, number in events:
        streamed.live(event, number)
        resident.live(event, number)
    ends = streamed.end(), resident.end()
    assert len(ends[0]) == len(ends[1])
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))
