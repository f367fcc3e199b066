# SPDX-License-Identifier: Apache-2.0
"""Toy parameters for probes: their values, and a run of the class under watch over them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offstage.rules.shell import run_step
from offstage.rules.subject import Subject, refuse

Group = dict[str, Any]

NUMEL = 256
"""A multiple of every vector width, and so are its halves: torch's loops round the rest of a line differently."""
NOT_OPTIONS = ("params", "param_names")
_NUMBERS = (bool, int, float, type(None))
_SEED = 20


def options_of(group: Mapping[str, Any]) -> Group:
    """The options of `group`, copied: nothing that is done to them changes the user's."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name not in NOT_OPTIONS}


@dataclass(frozen=True, eq=False)
class Values:
    """What toy parameters are made of, flat. `other`: values that half of the elements get in some runs."""

    weight: torch.Tensor
    other_weight: torch.Tensor
    grads: Sequence[torch.Tensor]
    other_grads: Sequence[torch.Tensor]
    """Of each step; the last ones are not finite, or as large as can be."""
    mask: torch.Tensor
    """The elements that get other values."""

    @classmethod
    def make(cls, steps: int, dtype: torch.dtype, device: torch.device) -> Values:
        generator = torch.Generator("cpu").manual_seed(_SEED)

        def normal() -> torch.Tensor:
            return torch.randn(NUMEL, generator=generator, device="cpu", dtype=torch.float32)

        def uniform(low: float, high: float) -> torch.Tensor:
            share = torch.rand(NUMEL, generator=generator, device="cpu", dtype=torch.float32)
            return low + share * (high - low)

        def here(values: torch.Tensor) -> torch.Tensor:
            return values.to(device, dtype)

        narrow = dtype == torch.float16  # squares must be finite
        some = uniform(0, 1) > 0.125
        kinds = [
            lambda: normal() * some,
            lambda: normal() * 1e-3,
            lambda: torch.zeros(NUMEL, device="cpu", dtype=torch.float32),
            lambda: normal() * 10 ** (uniform(-3, 1) if narrow else uniform(-6, 2)),
            lambda: normal() * 30,
        ]
        others = [normal() * 10 ** uniform(0, 1.5 if narrow else 3) for _ in range(steps - 1)]
        ends = [float("nan"), float("inf"), float("-inf"), torch.finfo(dtype).max]
        extreme = torch.tensor(ends, dtype=torch.float64, device="cpu")
        return cls(
            weight=here(normal() * 10 ** uniform(-3, 0) * some.flip(0)),
            other_weight=here(normal() * 10),
            grads=[here(kinds[step % len(kinds)]()) for step in range(steps)],
            other_grads=[here(one) for one in (*others, extreme.repeat(NUMEL // 4))],
            mask=(uniform(0, 1) > 0.5).to(device),
        )


class Toy(nn.Parameter):
    """A parameter that remembers which attributes it was asked for and does not have."""

    def __getattr__(self, name: str) -> Any:
        vars(self).setdefault("_asked", set()).add(name)
        raise AttributeError(f"'Parameter' object has no attribute {name!r}")


@dataclass(eq=False)
class Seen:
    """Everything about the toy parameter that is looked at, after one step."""

    weight: torch.Tensor
    elements: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    group: Group
    shared: dict[Any, Any]


@dataclass(frozen=True)
class Counts:
    """Names of numbers that grow by one at every step: of a parameter, of a group, and for all parameters together."""

    scalars: frozenset[str] = frozenset()
    group: frozenset[str] = frozenset()
    shared: frozenset[Any] = frozenset()


@dataclass(eq=False)
class Run:
    """The class at work on toy parameters, of which `param`, in the last group, is looked at."""

    subject: Subject
    groups: list[Group]
    param: Toy
    state: defaultdict[Any, Any] = field(default_factory=lambda: defaultdict(dict))

    def step(
        self,
        grads: Mapping[torch.Tensor, torch.Tensor | None],
        rates: Sequence[float],
        closure: Callable[[], Any] | None = None,
    ) -> None:
        """One step with these gradients and, unless the class has none, these learning rates of the groups."""
        for group, rate in zip(self.groups, rates, strict=False):
            old = group["lr"]
            group["lr"] = torch.full_like(old, rate) if isinstance(old, torch.Tensor) else rate
        for param, grad in grads.items():
            param.grad = grad
        self.subject.check_instance(run_step(self.subject.shell, self.groups, self.state, closure))

    def seen(self) -> Seen:
        """What there is now; raises if some state is of no kind that can be kept elsewhere."""
        state = self.state.get(self.param, {})  # asking for it would make it, and some classes look for that
        if type(state) is not dict:
            refuse(self.subject.title, f"it keeps the state of a parameter as a {type(state).__name__}")
        elements, scalars = {}, {}
        for name, value in state.items():
            if is_number(value):
                scalars[name] = copy.deepcopy(value)
            else:
                self._check_element(name, value)
                elements[name] = value.detach().clone().view(-1)
        shared = {key: copy.deepcopy(value) for key, value in self.state.items() if not isinstance(key, torch.Tensor)}
        return Seen(self.param.detach().clone().view(-1), elements, scalars, options_of(self.groups[-1]), shared)

    def _check_element(self, name: str, value: Any) -> None:
        title, param = self.subject.title, self.param
        if not isinstance(value, torch.Tensor):
            refuse(title, f"its state {name!r} is a {type(value).__name__}; expected a number or a tensor")
        if type(value) not in (torch.Tensor, nn.Parameter):
            refuse(title, f"its state {name!r} is a {type(value).__name__}; expected a plain tensor")
        if value.shape != param.shape:
            refuse(
                title,
                f"its state {name!r} has shape {tuple(value.shape)} for a parameter of shape {tuple(param.shape)}; "
                "expected one number per element, or one per parameter",
            )
        if not value.is_floating_point():
            refuse(title, f"its state {name!r} is kept as {value.dtype}; expected floating point numbers")
        if value.device != param.device:
            refuse(title, f"its state {name!r} is on {value.device} already, and its parameter on {param.device}")
        others = [one for other, one in self.state[param].items() if isinstance(one, torch.Tensor) and other != name]
        memory = [one.untyped_storage().data_ptr() for one in (param, *others)]
        if value.untyped_storage().data_ptr() in memory:
            refuse(title, f"its state {name!r} has no memory of its own: it is the weight, or other state, too")

    def jump(self, counts: Counts, number: int) -> None:
        """Step counts are this from now on."""
        places: list[tuple[dict[Any, Any], frozenset[Any]]] = [(self.state, counts.shared)]
        places += [(group, counts.group) for group in self.groups]
        places += [(self.state.get(param, {}), counts.scalars) for group in self.groups for param in group["params"]]
        for place, names in places:
            for name in names & place.keys():
                old = place[name]
                place[name] = torch.full_like(old, number) if isinstance(old, torch.Tensor) else type(old)(number)


def is_number(value: Any) -> bool:
    """Whether `value` is one number, in a tensor or not, or `None`. A toy parameter has more than one element."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() == 1 and not value.is_complex()
    return type(value) in _NUMBERS
