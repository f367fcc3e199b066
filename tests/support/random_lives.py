# SPDX-License-Identifier: Apache-2.0
"""Random lives of optimizers: two of them see the same events, and must come to the same bits."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import offstage
from offstage.errors import ConfigError, OffloadIneffectiveError, OffstageError
from tests.support.lives import end_step
from tests.support.training import same_bits


def events_of(life: type, most: int, fewest: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(life.EVENTS), st.integers(0, 255)), min_size=fewest, max_size=most)


def assert_same_ends(ours: Any, theirs: Any, events: list[tuple[str, int]]) -> None:
    for event, number in events:
        ours.live(event, number)
        theirs.live(event, number)
    assert all(same_bits(a, b) for a, b in zip(ours.end(), theirs.end(), strict=True))


WIDTH = 36
FORMATS = (
    (torch.float32, {}),
    (torch.bfloat16, {"master_weights": "fp32"}),
    (torch.bfloat16, {"master_weights": "split"}),
    (torch.bfloat16, {"master_weights": "none", "state_dtype": "bfloat16"}),
)


class Steps:
    """An optimizer and what happens to it. Two lives with the same seed see the same gradients."""

    SHAPES = ((40, 33), (1500,), (3, 7, 11), (1,), (64, 64), (0, 3), (257,))
    EVENTS = (
        "step",
        "step",
        "step",
        "read",
        "save and load",
        "write a weight",
        "lr",
        "add a group",
        "amsgrad",
        "drain",
    )
    FORMATS = FORMATS

    def __init__(self, seed: int, dtype: torch.dtype, config: dict) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.params = [nn.Parameter(self.draw(shape).to(dtype)) for shape in self.SHAPES]
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
            end_step(optimizer)
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


class Layers(nn.Module):
    """Layers of which any may be left out or run twice; the first and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[4].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor, used: list[int], rerun: bool | None = None) -> torch.Tensor:
        for number in used:
            layer = self.layers[number]
            y = layer(x) if rerun is None else checkpoint(layer, x, use_reentrant=rerun)
            x = x + torch.tanh(y)
        return x


class Iterations:
    """A model, its optimizer and what happens to them. Lives with the same seed see the same batches."""

    EVENTS = (
        *["iterate"] * 6, "two micro-batches", "checkpointed", "not finite", "by hand", "evaluate", "save and load",
        "load the model", "write a weight", "write state", "read", "lr", "amsgrad", "freeze", "add a group", "drain",
        "prefetch", "evict", "replan", *["replan cues", "replan weights", "sleep"] * 2,
    )  # fmt: skip
    IN_BETWEEN = (
        *["nothing"] * 3, "drain", "prefetch", "evict", "receipt", "replan", "replan cues", "replan weights", "sleep",
    )  # fmt: skip
    CUES = tuple({"overlap_forward": one, "update_in_backward": two} for one in (False, True) for two in (False, True))
    WEIGHTS = ("device", "host", 0.5)
    FORMATS = (*FORMATS, (torch.float32, {"fraction": 0.5}))
    PLACES = (
        *({"window": window} for window in (0, "16KiB", "48KiB", "all")),
        *[{"weights": "host"}] * 2,
        {"weights": 0.5},
        {"weights": "host", "host_fraction": 0.5},
    )
    """A window beside weights on the device, or weights on the host: half of the lives each."""
    CLIPS = (None, (1e4,), (1e-4,), (1e4, 1e-4), (1e4, 1e4, 1e-4, None))

    def __init__(self, seed: int, dtype: torch.dtype, config: dict, clip: tuple | None, in_between: str) -> None:
        self.random = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = Layers().to(dtype)
        options = {"lr": 3e-3, "weight_decay": 0.1}
        inner = torch.optim.AdamW(self.model.parameters(), **options)
        self.optimizer = offstage.offload(inner, self.model, min_bytes=0, chunk_bytes="16KiB", **config)
        self.config, self.clip, self.in_between = config, clip, in_between
        self.dtype, self.iterations = dtype, 0
        self.lanes = contextvars.copy_context()
        """Those it was built on: it sleeps on the same."""

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def loss(self, number: int, rerun: bool | None = None) -> torch.Tensor:
        used = [i % len(self.model.layers) for i in range(6) if (number >> i) & 1] or [0]
        if rerun:  # every weight once: reentrant checkpointing would bring the others' gradients in parts
            used = sorted(set(used) - {4}) or [1]
        x = self.draw(3, WIDTH).requires_grad_()  # also where all layers in use are frozen
        return self.model(x, used, rerun).float().pow(2).mean()

    def finish_iteration(self) -> None:
        max_norm = None if self.clip is None else self.clip[self.iterations % len(self.clip)]
        self.iterations += 1
        if max_norm is not None:
            self.optimizer.clip_grad_norm_(max_norm)
        self.move(self.in_between)
        end_step(self.optimizer)

    def move(self, what: str, number: int | None = None) -> None:
        """Things that may be done at any time and change nothing."""
        number = self.iterations if number is None else number
        if what == "drain":
            self.optimizer.synchronize()
        elif what == "receipt":
            self.optimizer.receipt()
        elif what == "prefetch" and self.config.get("window"):
            self.optimizer.prefetch()
        elif what == "evict":
            self.optimizer.evict()
        elif what == "sleep" and "slots" in self.config:  # the one that is compared with never sleeps
            with contextlib.suppress(OffstageError):  # where backward has updated some weights
                self.lanes.run(self.sleep)
        elif what in ("replan cues", "replan weights") and "slots" in self.config:  # the other one never changes
            changes = dict(self.CUES[number % 4]) if what == "replan cues" or number & 4 else {}
            if what == "replan weights":
                changes["weights"] = self.WEIGHTS[number % 3]
            try:
                self.optimizer.replan(**changes)
            except OffstageError as error:  # where backward has updated some weights, or there is a window
                if type(error) not in (OffstageError, ConfigError, OffloadIneffectiveError):
                    raise
        elif what == "replan":
            with contextlib.suppress(OffstageError):  # where backward has updated some weights
                self.optimizer.replan(fraction=1.0 if self.iterations % 2 else 0.5)

    def sleep(self) -> None:
        """One of several ways, and awake again; what comes back may still be on its way."""
        model, optimizer = self.model, self.optimizer
        way = self.iterations % 4
        if way == 0:
            offstage.sleep(model, optimizer)
        elif way == 1:
            offstage.sleep(model, keep=("weights",))
            offstage.sleep(model, optimizer)
        elif way == 2:
            offstage.sleep(model, optimizer, need="12KiB")
        else:
            offstage.sleep(optimizer)
        offstage.wake(*((model, optimizer) if way != 3 else (optimizer,)))

    def live(self, event: str, number: int) -> None:
        optimizer, model = self.optimizer, self.model
        params = [param for group in optimizer.param_groups for param in group["params"]]
        chosen = params[number % len(params)]
        if event == "iterate":
            self.loss(number).backward()
            self.finish_iteration()
        elif event in ("replan cues", "replan weights"):
            self.move(event, number)
        elif event == "two micro-batches":
            with optimizer.accumulate():
                self.loss(number).backward()
            self.loss(number ^ 63).backward()
            self.finish_iteration()
        elif event == "checkpointed":
            self.loss(number, rerun=bool(number & 64)).backward()
            self.finish_iteration()
        elif event == "not finite" and self.clip is not None:
            (self.loss(number) * float("nan")).backward()
            end_step(optimizer, 1.0)
        elif event == "by hand":
            for i, param in enumerate(params):
                param.grad = self.draw(*param.shape) if (number >> i % 8) & 1 else None
            self.finish_iteration()
        elif event == "evaluate":
            with torch.no_grad():
                self.loss(number)
        elif event == "save and load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif event == "load the model":
            model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
        elif event == "write a weight":
            optimizer.synchronize()
            chosen.data.copy_(self.draw(*chosen.shape))
        elif event == "write state" and "exp_avg" in optimizer.state[chosen]:
            optimizer.state[chosen]["exp_avg"].mul_(0.5)
        elif event == "read":
            assert (chosen in optimizer.state) == bool(optimizer.state[chosen])
        elif event == "lr":
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number % 5)
        elif event == "amsgrad":
            optimizer.param_groups[0]["amsgrad"] = not optimizer.param_groups[0]["amsgrad"]
        elif event == "freeze":
            model.layers[1 + number % 2].requires_grad_(bool(number & 4))
        elif event == "add a group" and len(optimizer.param_groups) < 3:
            layer = nn.Linear(WIDTH, WIDTH).to(self.dtype)
            with torch.no_grad():
                for param in layer.parameters():
                    param.copy_(self.draw(*param.shape) * 0.1)
            model.layers.append(layer)
            optimizer.add_param_group({"params": [*layer.parameters()], "lr": 1e-2})
        else:
            self.move(event)

    def end(self) -> list[torch.Tensor]:
        self.optimizer.synchronize()
        states = self.optimizer.state_dict()["state"]
        return [p.detach() for p in self.model.parameters()] + [
            v for s in states.values() for _, v in sorted(s.items())
        ]
