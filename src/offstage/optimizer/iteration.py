# SPDX-License-Identifier: Apache-2.0
"""`Iteration`: what one iteration knows, from its first gradient or norm to one of its three ends.

- `commit()`: the step is made;
- `revert()`: nothing of it counts; weights, state and gradients are as before it;
- `abandon(reason)`: it is given up where it is; if weights were updated that cannot be taken back, the step is lost.

An iteration stops being one nowhere else.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from offstage.config import Placement
from offstage.engine.engine import Engine
from offstage.engine.gradients import HostGradient
from offstage.errors import StepLostError
from offstage.memory.interrupts import deferred_interrupts
from offstage.modules import after_backward, running_backward
from offstage.optimizer.checks import check_grad, check_left_dtype
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.optimizer.overlap.left_gradient import LeftGradient
from offstage.optimizer.overlap.speculation import Norm
from offstage.optimizer.places import Groups, Places
from offstage.rules.rule import ParamState, ParamUpdate
from offstage.tensors import as_param, flat_like, local_gradient, norm_of

_RESUME = " Load a checkpoint into the model and this optimizer (load_state_dict) to go on."
_FAILED = (
    "A backward failed after update_in_backward=True had updated some weights and not others; expected it to come to "
    "its end."
)


class End(enum.Enum):
    """How an iteration has ended."""

    COMMITTED = "committed"
    REVERTED = "reverted"
    ABANDONED = "abandoned"


class Iteration:
    """One iteration of the training loop, as far as this optimizer has a part in it."""

    def __init__(
        self,
        number: int,
        places: Places,
        ended: weakref.WeakMethod[Callable[[Iteration], None]],
        norm: Norm | None = None,
    ) -> None:
        """`ended` is called at the end, whichever it is; weakly, because its owner owns the iteration."""
        self.number = number
        self.norm = norm
        """What `clip_grad_norm_` has found."""
        self.speculative = False
        """Its updates in backward stay only if the norm turns out to clip nothing."""
        self.early: dict[torch.Tensor, ParamState] = {}
        """Updated in backward."""
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        """Their gradients, as autograd made them; only while clipping may need them."""
        self.taken: dict[torch.Tensor, torch.dtype] = {}
        """Parameters whose gradient is `None` when the step is made, with the gradient's dtype."""
        self.took_back = False
        """Updates were made and do not count: copies of weights have values that are not theirs."""
        self.end: End | None = None
        self.lost: str | None = None
        """Abandoned between two steps: what to say from now on."""
        self._places, self._ended = places, ended
        self._groups: Groups = ()
        self._group_number: dict[torch.Tensor, int] = {}
        self._copies_lr = False
        self._shared: dict[Any, Any] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._fixed: dict[int, dict[str, Any]] = {}
        """The options that updates in backward were made with, comparable without waiting for a device."""
        self._unfinished: set[int] = set()
        """Backwards with updates that have not come to their end."""

    @property
    def _engines(self) -> list[Engine]:
        return list(self._places.engines.values())

    # What it updates

    def begin(self, groups: Groups, *, copies_lr: bool, shared: dict[Any, Any]) -> None:
        """Its first update is about to be made. `copies_lr`: lanes may read a tensor lr after it has changed.

        `shared`: what the class keeps for all parameters together.
        """
        self._copies_lr, self.speculative, self._shared = copies_lr, False, shared
        self._unfinished.clear()  # of backwards that failed before they had updated anything
        self._options.clear()
        self.number_groups(groups)

    def number_groups(self, groups: Groups) -> None:
        """The groups are these now."""
        self._groups = groups
        self._group_number = {p: number for number, group in enumerate(groups) for p in group["params"]}

    def has(self, param: torch.Tensor) -> bool:
        """Whether `param` is in a group, in this iteration."""
        return param in self._group_number

    def update_of(self, state: ParamState) -> ParamUpdate:
        """The update of a parameter whose gradient is final: all that could change before it is made, read now."""
        number = self._group_number[state.param]
        state.check_unmoved()
        grad, left = self._gradient_of(state)
        return ParamUpdate(
            state,
            self._options_of(number),
            number,
            step=state.rule.next_step(state),
            fresh=not state.present and not state.scalars,
            weight=_weight_of(state),
            grad=grad,
            left=left,
            iteration=self.number,
            shared=self._shared,
            on_host=state.placement is Placement.HOST,
        )

    def _gradient_of(self, state: ParamState) -> tuple[torch.Tensor, HostGradient | None]:
        """The gradient, flat, on the device; or, if it left, the one on the host."""
        param, local = state.param, state.local
        if isinstance(param.grad, LeftGradient):
            gradient = param.grad.gradient
            if state.hosted is not None and running_backward() is None:
                gradient.leave_again()
            elif state.placement is Placement.HOST:  # its state has moved since
                gradient.send_for()
            if (here := gradient.take_here()) is None:
                return torch.empty(0, dtype=gradient.dtype, device=state.device), gradient
            if state.hosted is None:  # it is an ordinary gradient again
                param.grad = as_param(here, local)
            return here, None
        grad = local_gradient(param, state.name)
        by_hand = state.hosted is not None and grad.device == local.device != state.device
        check_grad(state.device if not by_hand else local.device, grad, state.name)
        if by_hand:
            transport = self._places.engines[state.device].transport
            gradient = transport.gradients.of(state)
            gradient.set(flat_like(grad, local))
            return torch.empty(0, dtype=gradient.dtype, device=state.device), gradient
        if state.hosted is not None and state.placement is Placement.HOST:  # it has a graph, and did not leave
            check_left_dtype(grad, state)
            transport = self._places.engines[state.device].transport
            gradient = transport.gradients.leave(state, flat_like(grad, local).detach(), norm_of(grad, 2.0))
            return torch.empty(0, dtype=gradient.dtype, device=state.device), gradient
        return flat_like(grad, local), None

    def _options_of(self, number: int) -> dict[str, Any]:
        """A group's hyperparameters in this iteration; lanes read them later, so a tensor lr is copied."""
        if number not in self._options:
            options = {name: value for name, value in self._groups[number].items() if name != "params"}
            if isinstance(options.get("lr"), torch.Tensor) and self._copies_lr:
                options["lr"] = options["lr"].detach().clone()
            self._options[number] = options
        return self._options[number]

    def add_early(self, update: ParamUpdate, defaults: dict[str, Any], left: torch.Tensor | None = None) -> None:
        """`update` has been given to the lanes in backward: its gradient is dropped, or kept while it may be needed.

        `left`: the gradient, if it has left for the host.
        """
        param, number = update.of.param, update.group_number
        gradient, param.grad = param.grad if left is None else left, DroppedGradient(param, update.of.name)
        self.taken[param] = update.grad.dtype
        self.early[param] = update.of
        if number not in self._fixed:
            self._fixed[number] = _comparable(self._groups[number], defaults)
        if self.speculative:
            assert gradient is not None
            self.gradients[param] = gradient
        note_writes([update.of])

    def notice_end_of_backward(self) -> None:
        """Find out whether this backward comes to its end: if it fails, autograd does not call back."""
        task = running_backward()
        if task is not None and task not in self._unfinished:
            self._unfinished.add(task)
            after_backward(lambda: self._unfinished.discard(task))

    def what_changed(self, groups: Groups, defaults: dict[str, Any]) -> str | None:
        """Why the updates in backward are not those of this step, if so."""
        if self._unfinished:
            return _FAILED
        for param, state in self.early.items():
            if not isinstance(param.grad, DroppedGradient):
                return (
                    f"The gradient of {state.name!r} was set or zeroed after its update in backward. Expected step() "
                    "right after backward, with the gradients that autograd made."
                )
        if any(used != _comparable(groups[number], defaults) for number, used in self._fixed.items()):
            return (
                "A hyperparameter changed between backward and step(), after update_in_backward=True had updated "
                "weights with the old one; expected the same from the first gradient to step(). Call schedulers after "
                "step()."
            )
        return None

    # Its ends

    def commit(self, late: Collection[ParamState]) -> None:
        """The step is made: all its updates have been given to the lanes, and the caller's stream waits for them.

        `late`: not for these, which the next forward waits for.
        """
        for engine in self._engines:
            engine.settle([state for state in engine.pending if state not in late], "step: the weights are ready")
        self._drop_gradients()
        self._over(End.COMMITTED)

    def revert(self, *, drop_norm: bool = False) -> None:
        """Weights are again as before its speculative updates, and gradients as the loop has left them.

        Without `drop_norm` the step may still be made, with the same norm, by the iteration that follows.
        """
        assert self.speculative or not self.early
        self.norm = None if drop_norm else self.norm
        with deferred_interrupts(), torch.no_grad():
            self._undo()
            self._over(End.REVERTED)

    def abandon(self, reason: str | None) -> None:
        """Drain everything and forget what was under way.

        `reason`: the step is lost, and why. `None`: no weight was updated, or all are about to be replaced.
        """
        self.lost = None if reason is None else reason + _RESUME
        try:
            if self.speculative:
                with contextlib.suppress(StepLostError):
                    self._undo()
            self._places.give_up("load: the weights are ready")
            for engine in self._engines:
                engine.reset()
        finally:  # whatever fails, the step is lost
            self._drop_gradients()
            self._over(End.ABANDONED)

    def give_up(self, reason: str) -> None:
        """What backward has updated does not become a step: reverted where that is possible, otherwise lost."""
        if self.speculative:
            self.revert()
        elif self.early:
            self.abandon(reason)

    def _undo(self) -> None:
        if not self.speculative:
            return
        self.speculative, self.took_back = False, True
        for engine in self._engines:
            engine.revert()
        for param, gradient in self.gradients.items():
            if isinstance(param.grad, DroppedGradient):  # otherwise the loop has set it, or zeroed it, since
                param.grad = gradient
        self.early.clear()
        if self.norm is not None:
            self.norm.clip()

    def _drop_gradients(self) -> None:
        for param in self.early:
            if isinstance(param.grad, DroppedGradient):
                param.grad = None

    def _over(self, end: End) -> None:
        assert self.end is None
        self.end = end
        if (ended := self._ended()) is not None:
            ended(self)


def _weight_of(state: ParamState) -> torch.Tensor:
    """All of the weight, flat, where it is updated; nothing as long as it is on its way there."""
    if state.hosted is None:
        return flat_like(state.local, state.local)
    if state.placement is Placement.HOST:
        return state.hosted.host
    if state.hosted.is_here:
        return state.hosted.on_device()
    return torch.empty(0, dtype=state.local.dtype, device=state.device)


def _comparable(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters; tensors by identity and version."""
    return {
        name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name in defaults
    }


def note_writes(states: Collection[ParamState]) -> None:
    """Kernels write weights behind autograd's back; it must still notice a graph that saved the old ones."""
    torch.autograd.graph.increment_version([state.param for state in states])
    for state in states:
        if state.hosted is not None:
            state.hosted.was_updated()


def lost_by(error: BaseException, step: int) -> str:
    """The reason for `abandon` when `error` has ended step number `step` in the middle."""
    return (
        f"Step {step} failed after some weights had been updated ({type(error).__name__}: {error}); the weights and "
        "state are between two steps."
    )
