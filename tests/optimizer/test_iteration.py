# SPDX-License-Identifier: Apache-2.0
"""An iteration ends by `commit`, `revert` or `abandon`, whatever happens to it, and nowhere else."""

import ast
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import offstage
from offstage.errors import OffstageError, StepLostError
from offstage.optimizer.iteration import End, Iteration
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of

IN_BACKWARD = {"update_in_backward": True, "chunk_bytes": "16KiB", "min_bytes": 0}
LARGE, SMALL = 1e9, 1e-3
C, R, A = End.COMMITTED, End.REVERTED, End.ABANDONED


class Loop:
    """A model, its optimizer, and how the iterations so far have ended; those that knew nothing do not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).bfloat16()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer: OffloadedOptimizer = offstage.offload(optimizer, self.model, **settings)
        self.ends: list[End] = []
        self.last: Iteration | None = None
        for name in ("commit", "revert", "abandon"):
            monkeypatch.setattr(Iteration, name, self._recording(getattr(Iteration, name)))

    def _recording(self, end: Callable[..., None]) -> Callable[..., None]:
        def record(iteration: Iteration, *args, **options) -> None:
            knows = bool(iteration.early or iteration.norm is not None or iteration._group_number)
            try:
                end(iteration, *args, **options)
            finally:
                if knows and iteration is not self.last:
                    self.ends.append(iteration.end)
                    self.last = iteration

        return record

    def backward(self, scale: float = 1.0) -> torch.Tensor:
        loss = self.model(torch.ones(4, 32).bfloat16()).float().pow(2).mean() * scale
        loss.backward()
        return loss

    def step(self, max_norm: float | None = None, scale: float = 1.0) -> None:
        self.backward(scale)
        if max_norm is not None:
            self.optimizer.clip_grad_norm_(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def learn(self, max_norm: float | None = None) -> None:
        """Until updates are made in backward."""
        for _ in range(3):
            self.step(max_norm)
        self.backward()
        assert runtime_of(self.optimizer).iteration.early
        assert runtime_of(self.optimizer).iteration.speculative == (max_norm is not None)
        self.ends.clear()

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def plain_step(loop: Loop) -> None:
    loop.step()


def plain_clipped_step(loop: Loop) -> None:
    loop.step(SMALL)


def closure(loop: Loop) -> None:
    loop.optimizer.step(lambda: loop.backward())


def skipped_by_norm(loop: Loop) -> None:
    loop.step(LARGE, scale=float("nan"))


def in_backward(loop: Loop) -> None:
    loop.learn()
    loop.optimizer.step()


def closure_in_backward(loop: Loop) -> None:
    loop.learn()
    loop.optimizer.step()
    loop.optimizer.step(lambda: loop.backward())


def hit(loop: Loop) -> None:
    loop.learn(LARGE)
    loop.optimizer.clip_grad_norm_(LARGE)
    loop.optimizer.step()


def miss(loop: Loop) -> None:
    """The speculative iteration is reverted; the clipped step is another."""
    loop.learn(LARGE)
    loop.optimizer.clip_grad_norm_(SMALL)
    loop.optimizer.step()


def skipped_in_backward(loop: Loop) -> None:
    loop.learn(LARGE)
    loop.optimizer.zero_grad()
    loop.ends.clear()
    loop.step(LARGE, scale=float("inf"))


def zeroed_while_speculative(loop: Loop) -> None:
    loop.learn(LARGE)
    loop.optimizer.zero_grad()


def norm_without_a_step(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.clip_grad_norm_(LARGE)
    loop.optimizer.zero_grad()


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in backward")


def _fail_in_backward(loop: Loop) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.ends.clear()
    hidden = loop.model[1](loop.model[0](torch.ones(4, 32).bfloat16()))
    with pytest.raises(ValueError, match="in backward"):
        loop.model[2](_Failing.apply(hidden)).float().pow(2).mean().backward()
    assert runtime_of(loop.optimizer).iteration.early


def exception_in_backward(loop: Loop) -> None:
    loop.learn()
    _fail_in_backward(loop)
    with pytest.raises(StepLostError, match="A backward failed"):
        loop.optimizer.step()


def exception_in_speculative_backward(loop: Loop) -> None:
    """What was updated is taken back, and `step()` uses the gradients that there are."""
    loop.learn(LARGE)
    loop.optimizer.clip_grad_norm_(LARGE)
    _fail_in_backward(loop)
    loop.optimizer.step()


def options_changed(loop: Loop) -> None:
    loop.learn()
    loop.optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(StepLostError, match="hyperparameter changed"):
        loop.optimizer.step()


def options_changed_while_speculative(loop: Loop) -> None:
    loop.learn(LARGE)
    loop.optimizer.param_groups[0]["lr"] = 1.0
    loop.optimizer.step()


def state_loaded(loop: Loop) -> None:
    saved = loop.optimizer.state_dict()
    loop.learn()
    loop.optimizer.load_state_dict(saved)
    loop.ends.append("between")
    loop.optimizer.zero_grad()
    loop.step()


def model_loaded(loop: Loop) -> None:
    saved = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.learn()
    loop.model.load_state_dict(saved)
    with pytest.raises(StepLostError, match="model was loaded"):
        loop.optimizer.step()


def replanned(loop: Loop) -> None:
    """Between steps a plan may change; between backward and step it may not, and the iteration goes on."""
    loop.step()
    loop.optimizer.replan(fraction=0.5)
    loop.learn()
    with pytest.raises(OffstageError, match="between backward and step"):
        loop.optimizer.replan(fraction=1.0)
    loop.optimizer.step()


def closed(loop: Loop) -> None:
    loop.learn()
    loop.optimizer.close()


def interrupted(loop: Loop) -> None:
    """Ctrl-C during a step waits for its end."""
    engine = runtime_of(loop.optimizer).engines[0]
    run = engine.run

    def interrupting(*updates):
        signal.raise_signal(signal.SIGINT)
        run(*updates)

    engine.run = interrupting
    loop.backward()
    with pytest.raises(KeyboardInterrupt):
        loop.optimizer.step()
    del engine.run


def failed_before_an_update(loop: Loop) -> None:
    rule = runtime_of(loop.optimizer).rule
    _break(loop, rule, "begin", MemoryError)


def failed_after_an_update(loop: Loop) -> None:
    rule = runtime_of(loop.optimizer).rule
    _break(loop, rule, "update", StepLostError)


def _break(loop: Loop, broken: object, method: str, expected: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("none left")

    setattr(broken, method, fail)
    loop.backward()
    with pytest.raises(expected):
        loop.optimizer.step()
    delattr(broken, method)


CAUSES: list[tuple[Callable[[Loop], None], dict, list]] = [
    (plain_step, {}, [C]),
    (plain_clipped_step, {}, [C]),
    (closure, {}, [C]),
    (skipped_by_norm, {}, [R]),
    (in_backward, IN_BACKWARD, [C]),
    (closure_in_backward, IN_BACKWARD, [C, C]),
    (hit, IN_BACKWARD, [C]),
    (miss, IN_BACKWARD, [R, C]),
    (skipped_in_backward, IN_BACKWARD, [R, R]),
    (zeroed_while_speculative, IN_BACKWARD, [R]),
    (norm_without_a_step, {}, [R]),
    (exception_in_backward, IN_BACKWARD, [A]),
    (exception_in_speculative_backward, IN_BACKWARD, [R, C]),
    (options_changed, IN_BACKWARD, [A]),
    (options_changed_while_speculative, IN_BACKWARD, [R, C]),
    (state_loaded, IN_BACKWARD, [A, "between", C]),
    (model_loaded, IN_BACKWARD, [A]),
    (replanned, IN_BACKWARD, [C]),
    (closed, IN_BACKWARD, [A]),
    (interrupted, {}, [C]),
    (failed_before_an_update, {}, [A]),
    (failed_after_an_update, {}, [A]),
]


@pytest.mark.parametrize(("cause", "settings", "ends"), CAUSES, ids=[cause.__name__ for cause, _, _ in CAUSES])
def test_every_cause_leads_to_its_end(cause, settings, ends, monkeypatch):
    loop = Loop(monkeypatch, **{"min_bytes": 0, **settings})
    cause(loop)
    assert loop.ends == ends
    with contextlib.suppress(StepLostError, OffstageError):
        loop.optimizer.close()


@pytest.mark.parametrize("cause", [zeroed_while_speculative, skipped_in_backward, failed_before_an_update])
def test_what_is_reverted_leaves_nothing_behind(cause, monkeypatch):
    """Weights and state are those of the last step that was made."""
    loop = Loop(monkeypatch, **IN_BACKWARD if cause is not failed_before_an_update else {"min_bytes": 0})
    other = Loop(monkeypatch, min_bytes=0)
    for _ in range(3 if cause is not failed_before_an_update else 0):
        other.step(LARGE)
    cause(loop)
    for one, expected in zip(loop.weights(), other.weights(), strict=True):
        assert torch.equal(one, expected)
    loop.optimizer.zero_grad()
    for each in (loop, other):
        each.step(LARGE)
        each.optimizer.synchronize()
    for one, expected in zip(loop.weights(), other.weights(), strict=True):
        assert torch.equal(one, expected)


def test_a_step_is_lost_though_giving_it_up_fails_too(monkeypatch):
    loop = Loop(monkeypatch, **IN_BACKWARD)
    loop.learn()
    loop.optimizer.param_groups[0]["lr"] = 1.0
    engine = runtime_of(loop.optimizer).engines[0]
    engine.reset = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loop.optimizer.step()
    del engine.reset
    assert loop.ends == [A]
    with pytest.raises(StepLostError, match="hyperparameter changed"):
        loop.optimizer.step()


def test_an_iteration_stops_nowhere_else():
    """`Iteration._over` is called by the three ends, and only its callback makes the next iteration."""
    folder = Path(offstage.__file__).parent / "optimizer"
    callers, makers = set(), set()
    for path in sorted(folder.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
                callers |= {function.name} if "self._over" in calls else set()
                makers |= {function.name} if "Iteration" in calls else set()
    assert callers == {"commit", "revert", "abandon"}
    assert makers == {"__init__", "_ended"}
