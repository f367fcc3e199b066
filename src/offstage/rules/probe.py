# SPDX-License-Identifier: Apache-2.0
"""What an optimizer class does, found out by running it on a toy parameter; or a refusal that says what was seen.

The class runs on the same elements as a matrix, in four dimensions, flat, in two halves and beside other parameters,
and with other values in half of its elements. All runs must give the elements in question the same bits at every step:
the first ones, and some with large step counts, because a class may do something else every so often.

[Note: what a probe can miss] A probe is no proof. It cannot see what a class does only at a step number, a magnitude or
an option that it was not shown. State that appears later raises when it does; options are probed again as they change.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn, optim

from offstage.errors import ConfigError
from offstage.rules.behaviour import Behaviour, Scalar
from offstage.rules.rule import StateKey
from offstage.rules.shell import on_host, run_step
from offstage.rules.subject import Subject, describe, different, refuse, same, watched_randomness
from offstage.rules.toy import NUMEL, Counts, Group, Run, Seen, Toy, Values, options_of
from offstage.tensors import number_in

_MATRIX, _BOX, _LINE = (16, 16), (4, 4, 4, 4), (NUMEL,)
_LARGE, _TIMES = (128, 256), 128
"""The same elements many times: as large as torch's CPU loops take without threads, which round differently."""
_CONSECUTIVE = 8
_JUMPS = (99, 999, 1023, 9999, 100799)
"""Step counts are set to these. The step that follows has a number that many others divide."""
_LAST_JUMP = 720719
"""Before the last step, whose number all numbers up to 16 divide."""
_OTHER_LR = 1e-2
_LOSSES = (5.0, 0.1, 40.0)
_NOT_CALLED = "it was called without a closure and without other arguments"


def probe(subject: Subject, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Behaviour:
    """What `subject` does with parameters of `dtype` on `device` and the options of `group`. Takes milliseconds."""
    with watched_randomness(subject.title, device) as check, torch.inference_mode(False), torch.no_grad():
        try:
            return _Probe(subject, group, dtype, device).run(check)
        finally:
            subject.restore_classes()


def advance(
    shell: optim.Optimizer, groups: Sequence[Mapping[str, Any]], shared: Mapping[Any, Any], device: torch.device
) -> tuple[list[Group], dict[Any, Any]]:
    """What one step makes of the numbers in `groups`, and of `shared`: neither depends on parameters."""
    made: list[Group] = []
    for group in groups:
        param = nn.Parameter(torch.zeros(NUMEL // 4, dtype=torch.float32, device=device))
        param.grad = torch.zeros_like(param)
        options = options_of(group)
        made.append({**(on_host(options) if device.type == "cpu" else options), "params": [param]})
    state: defaultdict[Any, Any] = defaultdict(dict, copy.deepcopy(dict(shared)))
    run_step(shell, made, state)
    return made, {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


@dataclass(frozen=True)
class _Claim:
    """What would be wrong if a run differed from the reference."""

    about: str
    when: str


_WHOLE = _Claim("looks at the whole parameter", "when the weights and gradients of other elements did")
_SHAPE = _Claim("looks at the shape of a parameter", "when it had four dimensions and not two")
_FLAT = _Claim("looks at the shape of a parameter", "when it was flat")
_SIZE = _Claim("looks at how many elements a parameter has", "in a piece with half of them")
_SMALL = _Claim("looks at how many elements a parameter has", "in a piece with three of them")
_MANY = _Claim("looks at how many elements a parameter has", f"in a parameter of shape {_LARGE}")
_BESIDE = _Claim("looks at other parameters", "beside others, in two groups")


class _Probe:
    """One probe: a run to compare with, and the others."""

    def __init__(self, subject: Subject, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._subject, self._title, self._dtype, self._device = subject, subject.title, dtype, device
        options = options_of(group)
        self._options = on_host(options) if device.type == "cpu" else options
        self._values = Values.make(_CONSECUTIVE + 2 * len(_JUMPS) + 1, dtype, device)
        self._jumps: list[int | None] = [None] * _CONSECUTIVE
        """Per step: what step counts are set to before it."""
        self._counts = Counts()
        self._counters: frozenset[str] = frozenset()
        self._makes_state_first = False
        self._writes_grad = False

    def run(self, check_randomness: Callable[[], None]) -> Behaviour:
        reference = self._reference()
        check_randomness()
        self._subject.check_classes()
        behaviour = self._describe(reference)
        kept = ~self._values.mask
        for shape, claim in ((_MATRIX, _WHOLE), (_BOX, _SHAPE)):
            self._compare(claim, reference, shape, mixed=True, kept=kept)
        self._compare(_FLAT, reference, _LINE)
        for half in (slice(0, NUMEL // 2), slice(NUMEL // 2, NUMEL)):
            self._compare(_SIZE, reference, (NUMEL // 2,), part=half)
        if self._device.type != "cpu":  # where parameters are split; on a CPU so few elements are rounded differently
            self._compare(_SMALL, reference, (3,), part=slice(1, 4))
        self._compare(_MANY, reference[:3], _LARGE, times=_TIMES)
        self._compare(_BESIDE, reference, _MATRIX, beside=True)
        self._check_without_gradient(reference)
        behaviour = dataclasses.replace(behaviour, with_closure=self._with_closure(reference))
        self._subject.check_classes()
        return behaviour

    # The run to compare with

    def _reference(self, most: float = math.inf) -> list[Seen]:
        """`most`: a step count at which the class has failed, as one that was made for so many steps does."""
        run, found = self._first_steps()
        self._counts = _counts(found[-2], found[-1])
        self._jumps = [None] * _CONSECUTIVE
        for jump in _JUMPS if self._counts != Counts() else ():
            self._jumps += [jump, None] if jump < most else []
        self._jumps.append(_LAST_JUMP if most > _LAST_JUMP else None)
        for step in range(_CONSECUTIVE, len(self._jumps)):
            try:
                found.append(self._observed_step(run, step))
            except ConfigError:
                raise
            except Exception as error:
                if (number := self._jumps[step] or self._jumps[step - 1]) is None:
                    self._refuse_failure(error)
                return self._reference(number)
        self._check_effect(found)
        self._asked: frozenset[str] = frozenset(vars(run.param).get("_asked", ()))
        return found

    def _first_steps(self) -> tuple[Run, list[Seen]]:
        run = self._new_run(_MATRIX)
        found: list[Seen] = []
        try:
            found.append(self._observed_step(run, 0))
        except ConfigError:
            raise
        except Exception as error:  # each class has its own way to miss its state, or a closure
            self._makes_state_first = True
            run = self._new_run(_MATRIX, error)
        try:
            found += [self._observed_step(run, step) for step in range(len(found), _CONSECUTIVE)]
        except ConfigError:
            raise
        except Exception as error:
            self._refuse_failure(error)
        return run, found

    def _observed_step(self, run: Run, step: int) -> Seen:
        """One step, with a look at everything that it may write to."""
        self._jump(run, step)
        before = run.seen()
        grad = self._grad(step)
        original = grad.clone()
        self._step(run, step, {run.param: grad})
        after = run.seen()
        if run.param.grad is not grad:
            refuse(self._title, "its step() replaces or removes the gradients of parameters")
        self._writes_grad |= bool(len(different(grad, original)))
        changed = {name for name, value in after.group.items() if name != "lr" and not _has(before.group, name, value)}
        changed |= before.group.keys() - after.group.keys()
        lr, rates = after.group.get("lr"), self._rates(step, run)
        if rates and not isinstance(lr, torch.Tensor) and lr != rates[-1]:
            refuse(self._title, "its step() changes the learning rate of its group")
        self._counters |= changed
        self._check_advance(run, before, after)
        return after

    def _check_advance(self, run: Run, before: Seen, after: Seen) -> None:
        """Raise unless what the class counts outside of parameters can be counted without them."""
        if not self._counters and not after.shared:
            return
        group = {**before.group, **({"lr": after.group["lr"]} if "lr" in after.group else {})}
        if self._makes_state_first:
            refuse(
                self._title, f"its step() changes {sorted(self._counters)} of the group, and needs state from before"
            )
        try:
            (advanced,), shared = advance(self._subject.shell, [group], before.shared, self._device)
        except Exception as error:
            refuse(self._title, f"its step() failed on a flat parameter of {NUMEL // 4} elements: {describe(error)}")
        for name in self._counters:
            if not _has(advanced, name, after.group.get(name)):
                refuse(self._title, f"its step() makes {name!r} of the group from weights, gradients or state")
        for key, value in after.shared.items():
            if not _has(shared, key, value):
                refuse(
                    self._title,
                    f"it keeps {key!r} in its state for all parameters together and makes it from weights or gradients",
                )

    def _check_effect(self, found: Sequence[Seen]) -> None:
        last = found[-1].weight
        if not len(different(last, self._values.weight)):
            refuse(self._title, "its step() changed no weight of a toy parameter, so that nothing can be said of it")
        if int(last.isfinite().sum()) < 0.75 * NUMEL:
            refuse(self._title, "most weights of a toy parameter were not finite after a few steps with these options")

    def _describe(self, found: Sequence[Seen]) -> Behaviour:
        dtypes: dict[str, torch.dtype] = {}
        kinds: dict[str, Scalar] = {}
        for seen in found:
            for name, value in seen.elements.items():
                if dtypes.setdefault(name, value.dtype) != value.dtype or name in kinds:
                    refuse(self._title, f"its state {name!r} is in one format at one step and in another at the next")
            for name, value in seen.scalars.items():
                kind = Scalar.like(value, self._device)
                if kinds.setdefault(name, kind) != kind or name in dtypes:
                    refuse(self._title, f"its state {name!r} is of one type at one step and of another at the next")
        return Behaviour(
            elements=tuple(StateKey(name, dtype) for name, dtype in dtypes.items()),
            scalars=tuple(kinds.items()),
            first=frozenset({*found[0].elements, *found[0].scalars}),
            counters=self._counters,
            shared=frozenset(found[-1].shared),
            writes_grad=self._writes_grad,
            asked=self._asked,
        )

    # Making runs

    def _new_run(
        self,
        shape: tuple[int, ...],
        missed: Exception | None = None,
        *,
        part: slice = slice(None),
        times: int = 1,
        mixed: bool = False,
        beside: bool = False,
    ) -> Run:
        """A run over `part` of the values, so many `times`, `mixed` with others, `beside` other parameters.

        `missed`: what a run whose state is not made beforehand has failed with.
        """
        weight = self._mixed(self._values.weight, self._values.other_weight) if mixed else self._values.weight
        param = Toy(weight[part].repeat(times).view(shape))
        groups: list[Group] = [{**copy.deepcopy(self._options), "params": [param]}]
        if beside:
            for place in (0, 1):  # before and behind it
                groups[0]["params"].insert(2 * place, Toy(self._values.other_weight[: 64 * (1 + place)].clone()))
            other = Toy(self._values.other_weight[64:192].clone().view(8, 16))
            groups.insert(0, {**copy.deepcopy(self._options), "params": [other]})
        run = Run(self._subject, groups, param)
        if self._makes_state_first:
            for group in groups:
                for one in group["params"]:
                    run.state[one] = self._first_state(one, missed)
        return run

    def _first_state(self, param: Toy, missed: Exception | None) -> dict[str, Any]:
        """The state that the class's constructor makes for `param`."""
        kind = self._subject.kind
        needed = inspect.signature(kind).parameters.values()
        options = {one.name: self._options[one.name] for one in needed if one.name in self._options}
        made: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # its own way to refuse options
            made = dict(kind([{**copy.deepcopy(self._options), "params": [param]}], **options).state.get(param, {}))
        if not made and missed is not None:
            self._refuse_failure(missed)
        return made

    def _refuse_failure(self, error: Exception) -> NoReturn:
        refuse(self._title, f"its step() failed on a parameter of shape {_MATRIX}: {describe(error)}; {_NOT_CALLED}")

    def _mixed(self, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return torch.where(self._values.mask, others, values)

    def _grad(
        self,
        step: int,
        part: slice = slice(None),
        shape: tuple[int, ...] = _MATRIX,
        *,
        times: int = 1,
        mixed: bool = False,
    ) -> torch.Tensor:
        number = -1 if self._is_extreme(step) else step
        grad = self._values.grads[step]
        grad = self._mixed(grad, self._values.other_grads[number]) if mixed else grad
        return grad[part].repeat(times).view(shape)

    def _is_extreme(self, step: int) -> bool:
        """Whether mixed runs get extreme values: at the last step only, because nothing can be seen after it."""
        return step >= _CONSECUTIVE and step == len(self._jumps) - 1

    def _rates(self, step: int, run: Run) -> list[float]:
        """The learning rates of the groups: the user's own and another in turn, never 0, which would hide all."""
        own = number_in(self._options.get("lr"))
        if own is None:
            return []
        rate = own if step % 2 == 0 and own else _OTHER_LR
        return [rate * (3 if number + 1 < len(run.groups) else 1) for number in range(len(run.groups))]

    def _jump(self, run: Run, step: int) -> None:
        if (number := self._jumps[step]) is not None:
            run.jump(self._counts, number)

    def _step(self, run: Run, step: int, grads: dict[torch.Tensor, torch.Tensor | None]) -> None:
        for param in (one for group in run.groups for one in group["params"] if one is not run.param):
            grads[param] = self._values.other_grads[step % _CONSECUTIVE][: param.numel()].clone().view(param.shape)
        run.step(grads, self._rates(step, run))

    # Comparing

    def _compare(
        self,
        claim: _Claim,
        reference: Sequence[Seen],
        shape: tuple[int, ...],
        *,
        part: slice = slice(None),
        times: int = 1,
        mixed: bool = False,
        kept: torch.Tensor | None = None,
        beside: bool = False,
    ) -> None:
        """Raise `claim` unless a run over `part` in `shape` gives the `kept` elements what the reference has."""
        run = self._new_run(shape, part=part, times=times, mixed=mixed, beside=beside)
        for step, expected in enumerate(reference):
            self._jump(run, step)
            try:
                self._step(run, step, {run.param: self._grad(step, part, shape, times=times, mixed=mixed)})
            except Exception as error:
                if mixed and self._is_extreme(step):
                    return  # a class may refuse gradients that are not finite
                refuse(self._title, f"its step() failed {claim.when}: {describe(error)}")
            difference = self._difference(expected, run.seen(), part, times, kept)
            if difference is not None:
                extreme = mixed and self._is_extreme(step)
                when = "when other elements were not finite" if extreme else claim.when
                refuse(self._title, f"its step() {claim.about}: {difference} {when}")

    def _difference(
        self,
        expected: Seen,
        found: Seen,
        part: slice = slice(None),
        times: int = 1,
        kept: torch.Tensor | None = None,
    ) -> str | None:
        """What differs first, in words."""
        pairs = [("the weight", expected.weight, found.weight)]
        for name in [*expected.elements, *(found.elements.keys() - expected.elements.keys())]:
            if name not in found.elements or name not in expected.elements:
                return f"state {name!r} was there or not"
            pairs.append((f"state {name!r}", expected.elements[name], found.elements[name]))
        for what, one, other in pairs:
            if one.dtype != other.dtype:
                return f"the format of {what} changed"
            places = different(one[part].repeat(times), other)
            if kept is not None:
                places = places[kept[places]]
            if len(places):
                return f"{what} of element {int(places[0])} changed"
        if not same(expected.scalars, found.scalars):
            name = _first_difference(expected.scalars, found.scalars)
            return f"state {name!r}, kept once per parameter, changed"
        if not same(
            {name: expected.group.get(name) for name in self._counters},
            {name: found.group.get(name) for name in self._counters},
        ):
            return f"{_first_difference(expected.group, found.group)!r} of the group changed"
        if not same(expected.shared, found.shared):
            return f"state {_first_difference(expected.shared, found.shared)!r} of all parameters changed"
        return None

    def _check_without_gradient(self, reference: Sequence[Seen]) -> None:
        """Raise unless a parameter without a gradient is left alone, while groups count on."""
        run = self._new_run(_MATRIX)
        for step, has_gradient in enumerate((False, True, False)):
            before = run.seen()
            grad = self._grad(step) if has_gradient else None
            try:
                self._step(run, step, {run.param: grad})
            except Exception as error:
                refuse(self._title, f"its step() failed on a parameter without a gradient: {describe(error)}")
            after = run.seen()
            if not has_gradient:
                if len(different(before.weight, after.weight)):
                    refuse(self._title, "its step() changes the weights of a parameter without a gradient")
                if not same(before.elements, after.elements) or not same(before.scalars, after.scalars):
                    refuse(self._title, "its step() changes or makes state of a parameter without a gradient")
            for name in self._counters:
                if not same(after.group.get(name), reference[step].group.get(name)):
                    refuse(self._title, f"its step() changes {name!r} of the group only if there are gradients")

    def _with_closure(self, reference: Sequence[Seen]) -> str | None:
        """What the class does with a closure, if it is more than to call it first."""
        run, calls = self._new_run(_MATRIX), 0
        for step, loss in enumerate(_LOSSES):
            grad = self._grad(step)

            def closure(grad: torch.Tensor = grad, loss: float = loss) -> torch.Tensor:
                nonlocal calls
                calls += 1
                run.param.grad = grad
                return torch.tensor(loss, dtype=torch.float32, device=self._device)

            try:
                run.step({run.param: None}, self._rates(step, run), closure)
            except Exception:
                return None  # it takes none, and what it would do with one cannot be expected
            if calls != step + 1:
                return f"calls the closure {calls - step} times in one step"
            if (difference := self._difference(reference[step], run.seen())) is not None:
                return f"looks at the loss, or works before it calls the closure: {difference}"
        return None


def _has(found: Mapping[Any, Any], name: Any, value: Any) -> bool:
    return name in found and same(found[name], value)


def _first_difference(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> Any:
    return next(name for name in [*one, *other] if not (name in one and _has(other, name, one[name])))


def _counts(before: Seen, after: Seen) -> Counts:
    """The numbers that have grown by one."""

    def grown(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> frozenset[Any]:
        pairs = {name: (number_in(old.get(name)), number_in(value)) for name, value in new.items()}
        return frozenset(name for name, (a, b) in pairs.items() if a is not None and b is not None and b - a == 1)

    return Counts(
        grown(before.scalars, after.scalars), grown(before.group, after.group), grown(before.shared, after.shared)
    )
