# SPDX-License-Identifier: Apache-2.0
"""What a rule is: the arithmetic of one optimizer family on pieces of parameters."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offstage.config import Placement
from offstage.errors import ConfigError
from offstage.lanes.host_threads import Slice
from offstage.memory.guarded import Guard
from offstage.tensors import home_of, local_of, order_of, readable

MASTER_KEY = "master_weight"
"""fp32 masters: the key of their arena, and the name under which any master appears in a state dict."""
MASTER_LOW_KEY = "master_low"
"""Split masters: the 16 bits that the bf16 weight lacks. Never shown; `state_dict` joins them."""


@dataclass(frozen=True)
class StateKey:
    """One thing an optimizer keeps for a parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    """`None`: one element per element of the parameter."""

    def numel(self, param: torch.Tensor) -> int:
        return param.numel() if self.shape is None else torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Hyperparameters:
    """What Adam's coefficients are made of, for one group at one step."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    weight_decay: float
    step: int


class HostedWeight(Protocol):
    """A weight that lives on the host and comes to the device with its layer."""

    @property
    def host(self) -> torch.Tensor:
        """Where it lives, flat."""

    @property
    def spare(self) -> torch.Tensor | None:
        """Where speculative updates of it go."""

    @property
    def layer(self) -> HostedLayer:
        """What it comes with."""

    def on_device(self) -> torch.Tensor:
        """Its copy on the device, flat."""

    @property
    def is_here(self) -> bool:
        """Whether its layer is on the device, or on its way."""

    def bring(self) -> None:
        """Its layer is on the device afterwards, or on its way."""

    def flip(self) -> None:
        """What was stored to the spare memory is the weight from now on."""

    def was_updated(self) -> None:
        """The parameter's version has moved on because of an update."""

    def was_speculated(self, start: int, stop: int) -> None:
        """Elements `[start, stop)` are stored to the spare memory."""

    def unspeculate(self) -> None:
        """What was stored to the spare memory does not count."""

    def hold_back(self, guard: Guard, *, late: bool) -> None:
        """Outside its layer `guard` is asked until the host alone has the newest values.

        `late`: they are not made yet.
        """

    def was_settled(self) -> None:
        """The caller's stream has waited for its update."""

    def let_go(self, guard: Guard) -> None:
        """`guard` is asked no more."""


class HostedLayer(Protocol):
    """The weights of one layer."""

    @property
    def fetched(self) -> Any:
        """The mark behind which the copy is there."""

    @property
    def host_bytes(self) -> int:
        """What they take there, with a second set if there is one."""

    @property
    def is_on_host(self) -> bool:
        """Whether the host has waited for the last store."""

    def was_stored(self, mark: Any) -> None:
        """A part of the copy goes to the host behind `mark`."""

    def was_updated(self, mark: Any) -> None:
        """Behind `mark` the CPU has updated all of the weights that it was given so far, where they live."""

    @property
    def read(self) -> Any:
        """The mark behind which no copy reads the weights on the host."""

    @property
    def updated(self) -> Any:
        """What `was_updated` was last called with."""

    def drop(self) -> None:
        """Let go of the copy."""

    def forget(self) -> None:
        """Nothing is under way, and what was may have failed."""


class StateHome(Protocol):
    """Where state that is off the device is kept."""

    def tensor(self, index: int, key: str) -> torch.Tensor:
        """The flat tensor of `key` of the parameter at position `index`, in a storage of its own size."""


@dataclass(eq=False)
class ParamState:
    """One parameter's state: which keys it has, which of them hold values, and where they are kept."""

    param: torch.Tensor
    name: str
    keys: tuple[StateKey, ...]
    rule: Rule = field(kw_only=True)
    scalars: dict[str, Any] = field(default_factory=dict)
    """State that is one number per parameter: `step`, `mu_product`, … On the host for Adam and AdamW."""
    present: frozenset[str] = frozenset()
    """The keys that hold values. A key that torch has not created yet stays absent."""
    placement: Placement = Placement.RESIDENT
    resident: dict[str, torch.Tensor] = field(default_factory=dict)
    """RESIDENT: one flat device tensor per key."""
    home: StateHome | None = None
    index: int = 0
    """STREAMED, HOST: its position in its home."""
    hosted: HostedWeight | None = None
    """The weight, if it lives on the host, too."""
    frozen: bool = False
    """Nothing trains it and it has no state: there is no room for any until it is trained, or gets a gradient."""

    def __post_init__(self) -> None:
        self.device = home_of(self.param)
        """Where it is updated, unless the CPU does that."""
        self._made_for = _kind(self.param)
        _alive.add(self)

    @property
    def local(self) -> torch.Tensor:
        """What of the parameter is on this rank: all of it, or its shard ([Note: the life of a sharded state])."""
        return readable(local_of(self.param))

    @property
    def master_kind(self) -> str | None:
        for key in self.keys:
            if key.name == MASTER_KEY:
                return "fp32"
            if key.name == MASTER_LOW_KEY:
                return "split"
        return None

    @property
    def nbytes(self) -> int:
        return sum(key.numel(self.local) * key.dtype.itemsize for key in self.keys)

    def raw(self, name: str) -> torch.Tensor:
        """The flat tensor in which `name` is kept, without a copy and with a storage of its own size."""
        return readable(self.resident[name]) if self.home is None else self.home.tensor(self.index, name)

    def check_unmoved(self) -> None:
        """Raise if the parameter is no longer what the state was made for."""
        now = _kind(self.param)
        if now != self._made_for:
            raise ConfigError(
                f"Parameter {self.name!r} was {_describe(*self._made_for)} at offload() and is {_describe(*now)} now. "
                "Move and convert the model first (model.to(...)), then build the optimizer and call offload()."
            )


_alive: weakref.WeakSet[ParamState] = weakref.WeakSet()


def has_state(param: torch.Tensor) -> bool:
    """Whether an offloaded optimizer keeps state of `param`."""
    return any(state.param is param for state in _alive)


def _kind(param: torch.Tensor) -> tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]]:
    local = local_of(param)
    return home_of(param), local.dtype, local.shape, order_of(local)


def _describe(device: torch.device, dtype: torch.dtype, shape: torch.Size, order: tuple[int, ...]) -> str:
    return f"{dtype} {tuple(shape)} on {device} (memory order {order})"


@dataclass(eq=False)
class ParamUpdate:
    """One parameter's part in one step: everything that could change before the update runs, taken at step()."""

    of: ParamState
    group: dict[str, Any]
    """The hyperparameters of its group at this step (without the parameters)."""
    group_number: int
    step: int
    """1 at the first update."""
    fresh: bool
    """There was no state before this step."""
    weight: torch.Tensor
    grad: torch.Tensor
    """All of the parameter and of its gradient, flat, in the parameter's memory order. A weight that lives on the host
    is bound when its layer is on the device; a gradient that left for the host is empty here."""
    left: Any = None
    """The gradient, if it left for the host."""
    iteration: int = 0
    """Which step of the optimizer, counting those that were taken back."""
    on_host: bool = False
    """The CPU updates it."""
    shared: dict[Any, Any] = field(default_factory=dict)
    """What the class keeps for all parameters together, as it is before this step."""
    updated: int = 0
    """How many elements have been updated, or sent up; counted on the lane that does it."""
    observed: bool = False
    """The rule has looked at the weight already (`observe`)."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """What the update made of the parameter's scalars."""
    created: frozenset[str] = frozenset()
    """The state keys that hold values after the update."""


@dataclass(eq=False)
class PieceUpdate:
    """A piece of one parameter with everything its update needs. All tensors are flat and in one place."""

    update: ParamUpdate
    start: int
    stop: int
    state: dict[str, torch.Tensor]
    host_copies: tuple[torch.Tensor, torch.Tensor] | None = None
    """Weight and gradient of the piece on the host, if it is updated there: copies, or where they live."""
    staged_grad: torch.Tensor | None = None
    """Its gradient in the slot, if that had left for the host."""
    scale: torch.Tensor | None = None
    """A number on the host by which the gradient has still to be multiplied, for clipping."""

    @property
    def weight(self) -> torch.Tensor:
        return self._mine(self.update.weight) if self.host_copies is None else self.host_copies[0]

    @property
    def grad(self) -> torch.Tensor:
        if self.staged_grad is not None:
            return self.staged_grad
        return self._mine(self.update.grad) if self.host_copies is None else self.host_copies[1]

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece of it. A slice takes the host some time."""
        return whole if self.start == 0 and self.stop == whole.numel() else whole[self.start : self.stop]

    @property
    def is_in_place(self) -> bool:
        """Whether it is updated on the host, where its weight lives, too."""
        return self.update.on_host and self.update.of.hosted is not None

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == self.update.weight.numel()


class Rule(ABC):
    """One optimizer family.

    `begin` and `update` run on the update lane, `slices` in threads of the host, `weights_up` on the raise lane.
    """

    rate_is_known = False
    """Whether `measure_machine` has measured how fast the host updates by this rule."""
    threads_itself = False
    """Whether one call of an update on the host uses several threads by itself."""
    whole = False
    """Whether it looks at whole parameters, so that a shard is not enough."""
    needs_memory = True
    """Whether an update takes temporary device memory, so that it is made of a few parameters at a time."""
    title = "this optimizer"

    names: frozenset[str] = frozenset({MASTER_KEY})
    """Everything this family may keep per element under any options, and masters."""
    counts_from: float | None = None
    """The `step` of a parameter that has had none; `None` where only the class knows what it would begin with."""
    scalars: frozenset[str] = frozenset({"step"})
    """The numbers that this family keeps once per parameter."""

    @abstractmethod
    def keys(self, param: torch.Tensor, group: dict[str, Any]) -> tuple[StateKey, ...]:
        """What is kept for `param`; raises `ConfigError` for parameters this rule cannot update."""

    @abstractmethod
    def splits(self, device: torch.device) -> bool:
        """Whether chunks may split parameters on `device` without changing a bit."""

    def begin(self, device: torch.device, updates: Sequence[ParamUpdate]) -> None:  # noqa: B027
        """Before the first update of `updates`. All updates of one step and device are of one `round`."""

    def observe(self, device: torch.device, updates: Sequence[ParamUpdate]) -> None:  # noqa: B027
        """All but certainly `begin` and `update` come next, in the same order of work: do of them what changes nothing.

        The host is about to wait for the device, and what is launched now does not have to be launched then.
        """

    @abstractmethod
    def update(self, pieces: Sequence[PieceUpdate]) -> None:
        """Update weights and state in place."""

    @abstractmethod
    def slices(self, pieces: Sequence[PieceUpdate]) -> Sequence[Slice]:
        """The update of `pieces`, whose weights and gradients are on the host, in parts for threads."""

    def looks(self, updates: Sequence[ParamUpdate]) -> Sequence[Slice]:
        """Before the first slice of `updates`, whose weights live on the host, too: what looks at these as a whole."""
        return ()

    @property
    def external_on_host(self) -> int:
        """How many weights were written from outside, as seen by updates on the host."""
        return 0

    def weights_up(self, device: torch.device, update: ParamUpdate) -> None:  # noqa: B027
        """After the last update of `update` on the host, on a lane of `device`: its weight is there again."""

    @abstractmethod
    def finish(self, updates: Sequence[ParamUpdate]) -> None:
        """Once per parameter and step, after its last update: advance what counts steps."""

    def remember(self, device: torch.device, update: ParamUpdate) -> None:  # noqa: B027
        """Before a speculative update, on the update lane: keep what the rule itself has on `device` for `update`."""

    def revert(self, device: torch.device, updates: Sequence[ParamUpdate]) -> None:  # noqa: B027
        """The speculative updates of `updates` do not count: bring back what was remembered."""

    @abstractmethod
    def required(self, param: torch.Tensor, group: dict[str, Any]) -> frozenset[str]:
        """What state of `param` that exists at all must have. Other keys may appear one by one."""

    def signature(self, group: dict[str, Any]) -> Any:
        """What of a group's hyperparameters decides which state is kept: if it changes, state is laid out anew."""
        return None

    def next_step(self, state: ParamState) -> int:
        """The number of the update that comes next, where the rule itself needs it."""
        return 0

    def shared(self, own_state: dict[Any, Any]) -> dict[Any, Any]:
        """What of `own_state`, kept under keys that are not parameters, the class itself uses: a copy."""
        return {}

    def stepped(self, groups: Sequence[dict[str, Any]], own_state: dict[Any, Any]) -> None:  # noqa: B027
        """A step has been made: advance what the class counts in its `groups` and in `own_state`."""

    def check_closure(self) -> None:  # noqa: B027
        """Raise if a step is another one when the closure is called before it, and not by the class itself."""

    def scalar(self, name: str, value: Any, device: torch.device) -> Any:
        """A loaded `value` as the class keeps `name`, on `device` if it is a tensor there."""
        if isinstance(value, torch.Tensor):
            value = local_of(value).detach().clone().to(device)
        # Very old checkpoints hold a plain number.
        return torch.as_tensor(value, dtype=torch.float32, device=device) if name == "step" else value

    def scalar_device(self, name: str, param: torch.Tensor, group: dict[str, Any]) -> torch.device:
        """Where the scalar `name` is kept."""
        return torch.device("cpu")

    def expect_weight(  # noqa: B027
        self, state: ParamState, weights: Iterable[tuple[int | torch.Tensor, torch.Tensor]]
    ) -> None:
        """Split masters were set from outside for these bf16 weights, host tensors.

        With each comes its place in the line: where it begins, or the place of every element.
        """

    def adopt(self, state: ParamState, other: ParamState) -> None:  # noqa: B027
        """`state` takes the place of `other`: take over what the rule itself keeps for it."""

    def wrote(self, state: ParamState, weight: torch.Tensor) -> bool:
        """Whether the weight that split masters were made for is still there. Waits for the device."""
        return True

    def rest(self, device: torch.device) -> None:  # noqa: B027
        """The job sleeps, and nothing is under way: the rule's own numbers on `device` wait on the host until used."""

    def external_writes(self, device: torch.device) -> torch.Tensor | None:
        """How many weights were written from outside between our steps ([Note: who wrote the weight]), on `device`."""
        return None
