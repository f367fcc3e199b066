# SPDX-License-Identifier: Apache-2.0
"""Every place that starts a thread or a process, or waits for one, survives Ctrl-C at its steps and a limit on threads.

The places are found by reading the source. Waits for the device are not among them: they are named, and the matter of
`test_waits.py`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import gc
import io
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import offstage
from offstage import checkpoint
from offstage.cli import main as cli
from offstage.errors import OffstageError
from offstage.lanes.host_threads import HostThreads
from offstage.memory import arena
from offstage.optimizer.optimizer import runtime_of
from offstage.planning import rates
from offstage.train.metrics import Row
from offstage.train.progress import Rich
from offstage.train.timeline import CpuUse
from tests.support import threaded_lanes
from tests.support.hurdles import SOURCE, HangError, Steps, thread_limit, within
from tests.support.params import ON_HOST, RESIDENT, equal, make_params, offloaded, resident_after, result, steps
from tests.support.threaded_lanes import wait_until, with_threads
from tests.support.training import same_bits

SECONDS = 10.0
"""More than any of these takes, and less than a test may."""
MOST_STEPS, MOST_ELSEWHERE = 9, 3
"""How many steps of a scenario get Ctrl-C: in the files of its places, and in all others."""

STARTS = {
    "DataLoader", "HostThreads", "Popen", "Process", "ProcessPoolExecutor", "Thread", "ThreadPoolExecutor", "Timer",
    "fork", "forkpty", "posix_spawn", "start_new_thread", "start_some", "system", "together",
}  # fmt: skip
WAITS = {"acquire", "communicate", "get", "join", "result", "wait", "wait_for"}

PLACES = {
    "checkpoint/saving.py:AsyncSave._start": "save in the background",
    "checkpoint/saving.py:AsyncSave.result": "save in the background",
    "checkpoint/saving.py:AsyncSave.wait": "save in the background",
    "checkpoint/saving.py:_write_alone": "save",
    "checkpoint/saving.py:async_save": "save in the background",
    "checkpoint/threads.py:in_threads": "save",
    "cli/main.py:_ask": "bench",
    "engine/snapshot.py:Snapshot.wait": "save in the background",
    "engine/transport.py:_threads_near": "offload",
    "lanes/accelerator.py:AcceleratorLanes.__init__": "offload",
    "lanes/accelerator.py:AcceleratorLanes.synchronize": "full lanes",
    "lanes/host_threads.py:HostThreads._run": "step",
    "lanes/host_threads.py:HostThreads._start": "overlapped step",
    "lanes/host_threads.py:_Jobs._begin_next": "overlapped step",
    "lanes/host_threads.py:_Jobs.next": "overlapped step",
    "lanes/host_threads.py:_join": "drop threads",
    "lanes/native_threads.py:NativeThreads.__init__": "step",
    "lanes/promises.py:Promise.mark": "overlapped step",
    "lanes/promises.py:Promise.wait": "overlapped step",
    "memory/arena.py:_first_touch": "offload",
    "memory/threads.py:Crew._work": "offload",
    "memory/threads.py:Crew.start": "offload",
    "memory/threads.py:Crew.wait": "offload",
    "memory/threads.py:Latch.wait": "offload",
    "memory/threads.py:start_some": "offload",
    "memory/threads.py:together": "offload",
    "optimizer/places.py:Places.wait_for_snapshots": "save in the background",
    "optimizer/runtime.py:Runtime.keep_or_revert": "clipped step",
    "planning/rates.py:_per_second": "measure",
    "train/progress.py:Rich.begin": "bar",
    "train/timeline.py:CpuUse._run": "cpu use",
    "train/timeline.py:CpuUse.start": "cpu use",
    "train/timeline.py:CpuUse.stop": "cpu use",
}
OTHERS = {
    "lanes/testing/simulated.py:SimulatedLanes.wait": "a clock that is moved",
    "engine/engine.py:Engine.take": "a stopwatch",
    "lanes/link.py:link_for": "a context variable",
    "memory/threads.py:Latch.__init__": "a lock that no other thread knows yet",
    "train/checkpoints.py:Checkpoints.finish": "result() of a save; the trainer's Ctrl-C is a request (test_resume.py)",
    "train/observe.py:Observer.__enter__": "torch's profiler, with a device only",
    "train/observe.py:Observer._begin": "a stopwatch",
    "train/signals.py:StopRequests.end_step": "a collective of gloo; Ctrl-C is a request there",
    "train/timeline.py:DeviceTrace.start": "torch's profiler, with a device only",
}


def found() -> set[str]:
    """`file:function` of every call that starts a thread or a process, or waits for one."""
    places = set()

    def visit(node: ast.AST, file: str, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            within = (*names, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else names
            if isinstance(child, ast.Call) and (_starts(child) or _waits(child)):
                places.add(f"{file}:{'.'.join(within)}")
            visit(child, file, within)

    for path in SOURCE.rglob("*.py"):
        visit(ast.parse(path.read_text()), str(path.relative_to(SOURCE)), ())
    return places


def _starts(call: ast.Call) -> bool:
    name = _name(call)
    of_subprocess = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "subprocess"
    return name in STARTS or of_subprocess or (name == "start" and not call.args)


def _waits(call: ast.Call) -> bool:
    """Not the named waits of lanes, which have a reason, nor the methods of strings and dictionaries."""
    if not isinstance(call.func, ast.Attribute) or _name(call) not in WAITS or len(call.args) > 1:
        return False
    if _name(call) == "get":
        return not call.args
    of_a_string = isinstance(call.func.value, ast.Constant)
    return _name(call) != "join" or not call.args or (ast.unparse(call.args[0]).isupper() and not of_a_string)


def _name(call: ast.Call) -> str | None:
    return getattr(call.func, "id", None) or getattr(call.func, "attr", None)


def test_every_place_in_the_source_is_here():
    assert found() == PLACES.keys() | OTHERS.keys()


# Scenarios: what is prepared, what is interrupted, and what must hold afterwards


class Scenario:
    """One life of one object. `check` goes on with it after `act`, whatever that has raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def act(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError


class Offload(Scenario):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.params = make_params()
        self.inner = torch.optim.AdamW(self.params, lr=0.1, weight_decay=0.1)
        self.optimizer: Any = None

    def act(self) -> None:
        with mock.patch.object(arena, "_TOUCH_BYTES", 4096), with_threads():
            self.optimizer = offstage.offload(self.inner, **ON_HOST)

    def check(self) -> None:
        if hasattr(self.inner, "_offstage_consumed") and self.optimizer is None:  # interrupted when all was done
            with pytest.raises(OffstageError, match="offload"):
                offstage.offload(self.inner, **ON_HOST)
            return
        if self.optimizer is None:
            self.act()
        steps(self.params, self.optimizer, range(2))
        assert equal(result(self.params, self.optimizer), _resident(2))


@functools.cache
def _resident(count: int) -> list[torch.Tensor]:
    return resident_after(range(count))


class Step(Scenario):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.params = make_params()
        self.optimizer = offloaded(self.params, threads=3)

    def act(self) -> None:
        steps(self.params, self.optimizer, range(1))

    def check(self) -> None:
        steps(self.params, self.optimizer, range(runtime_of(self.optimizer).steps, 3))
        assert equal(result(self.params, self.optimizer), _resident(3))


def make_model(**config: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with with_threads():
        return model, offstage.offload(inner, model, **{**ON_HOST, "threads": 2, **config})


def iterate(model: nn.Module, optimizer: Any, number: int, max_norm: float | None = None) -> None:
    optimizer.zero_grad()
    model(torch.full((3, 40), 0.1 * (number + 1))).pow(2).mean().backward()
    if max_norm is not None:
        optimizer.clip_grad_norm_(max_norm)
    optimizer.step()


@functools.cache
def _plain(count: int, max_norm: float | None = None) -> list[torch.Tensor]:
    model, optimizer = make_model(**RESIDENT)
    for number in range(count):
        iterate(model, optimizer, number, max_norm)
    return result(model.parameters(), optimizer)


class OverlappedStep(Scenario):
    config: dict[str, Any] = {"overlap_forward": True}  # noqa: RUF012
    max_norm: float | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model, self.optimizer = make_model(**self.config)
        slices_of = runtime_of(self.optimizer).rule.slices

        def late(piece: Callable[[], None]) -> None:  # so that there is something to wait for
            time.sleep(1e-3)
            piece()

        runtime_of(self.optimizer).rule.slices = lambda pieces: [
            functools.partial(late, piece) for piece in slices_of(pieces)
        ]

    def act(self) -> None:
        for number in range(2):
            iterate(self.model, self.optimizer, number, self.max_norm)
        self.optimizer.synchronize()

    def check(self) -> None:
        for number in range(runtime_of(self.optimizer).steps, 3):
            iterate(self.model, self.optimizer, number, self.max_norm)
        self.optimizer.synchronize()
        assert equal(result(self.model.parameters(), self.optimizer), _plain(3, self.max_norm))


class ClippedStep(OverlappedStep):
    max_norm = 0.01


class FullLanes(OverlappedStep):
    """Streams have room for one piece of work: another thread gives them the others."""

    config = {"update_on": "device", "threads": None, "overlap_forward": True, "slots": 2}  # noqa: RUF012

    def act(self) -> None:
        with (
            mock.patch("offstage.lanes.accelerator._MOST_UNDER_WAY", 1),
            mock.patch.object(threaded_lanes._Passed, "query", return_value=False),
        ):
            super().act()
            self.optimizer.synchronize()


class Drop(OverlappedStep):
    """The last reference goes while threads are updating. Python swallows what finalizers raise."""

    def act(self) -> None:
        iterate(self.model, self.optimizer, 0)
        self.optimizer = None

    def check(self) -> None:
        if self.optimizer is not None:  # interrupted before
            del self.optimizer
        weights = [param.detach() for param in self.model.parameters()]
        begun = [_plain(count)[: len(weights)] for count in (0, 1)]
        assert wait_until(lambda: any(all(map(same_bits, weights, one)) for one in begun))


class DropThreads(Scenario):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.threads: HostThreads | None = HostThreads(3)
        self.ran: list[int] = []

    def act(self) -> None:
        assert self.threads is not None
        for number in range(3):
            slices = [functools.partial(self.late, 3 * number + piece) for piece in range(3)]
            self.threads.give(slices, wait=lambda: None, done=lambda error: None)
        self.threads = None

    def late(self, number: int) -> None:
        time.sleep(1e-3)
        self.ran.append(number)

    def check(self) -> None:
        assert wait_until(lambda: len(self.ran) in (0, 3, 6, 9) and (self.threads is not None or len(self.ran) == 9))
        assert len(set(self.ran)) == len(self.ran)
        self.threads = None


class Save(Scenario):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model, self.optimizer = make_model()
        iterate(self.model, self.optimizer, 0)

    def act(self) -> None:
        checkpoint.save(self.folder / "first", self.model, self.optimizer)

    def check(self) -> None:
        checkpoint.save(self.folder / "second", self.model, self.optimizer)
        self.check_loaded("second")
        if checkpoint.is_complete(self.folder / "first"):
            self.check_loaded("first")

    def check_loaded(self, name: str) -> None:
        model, optimizer = make_model()
        checkpoint.load(self.folder / name, model, optimizer)
        for number in range(1, 2):
            iterate(model, optimizer, number)
        assert equal(result(model.parameters(), optimizer), _plain(2))


class SaveInBackground(Save):
    def act(self) -> None:
        saving = checkpoint.async_save(self.folder / "first", self.model, self.optimizer)
        self.optimizer.step()  # the snapshot is copied first
        checkpoint.async_save(self.folder / "third", self.model, self.optimizer).result()
        saving.result()

    def check(self) -> None:
        model, optimizer = make_model()
        iterate(model, optimizer, 0)
        checkpoint.async_save(self.folder / "second", model, optimizer).result()
        self.check_loaded("second")
        if checkpoint.is_complete(self.folder / "first"):
            self.check_loaded("first")


class Load(Save):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        checkpoint.save(self.folder / "first", self.model, self.optimizer)
        self.model, self.optimizer = make_model()

    def act(self) -> None:
        checkpoint.load(self.folder / "first", self.model, self.optimizer)

    def check(self) -> None:
        checkpoint.load(self.folder / "first", self.model, self.optimizer)
        iterate(self.model, self.optimizer, 1)
        assert equal(result(self.model.parameters(), self.optimizer), _plain(2))


class Verify(Load):
    def act(self) -> None:
        checkpoint.verify(self.folder / "first", threads=3)

    def check(self) -> None:
        checkpoint.verify(self.folder / "first", threads=3)


class Measure(Scenario):
    def act(self) -> None:
        with mock.patch.object(rates, "_WINDOW_SECONDS", 1e-3):
            assert rates._per_second(3, [time.perf_counter] * 3) > 0

    check = act


class Watch(Scenario):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.watch = CpuUse()

    def act(self) -> None:
        self.watch.start(time.perf_counter())
        self.watch.stop()

    def check(self) -> None:
        self.watch.stop()
        self.watch = CpuUse()
        self.act()
        assert len(self.watch.used()["cores"]) >= 1


class Bar(Scenario):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bar = Rich(io.StringIO())

    def act(self) -> None:
        self.bar.begin(0, 2)
        self.bar.end()

    def check(self) -> None:
        self.bar.end()
        stream = io.StringIO()
        bar = Rich(stream)
        bar.begin(0, 2)
        bar.show(Row(**{field.name: 1 for field in dataclasses.fields(Row)}))
        bar.end()
        assert "1/2" in stream.getvalue()


class Bench(Scenario):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "benchmarks").mkdir()
        (folder / "benchmarks" / "__init__.py").touch()
        (folder / "benchmarks" / "one.py").write_text('"""Does it end?"""\n')

    def act(self) -> None:
        assert cli._ask(self.folder, ["one"]) == 0

    check = act


SCENARIOS: dict[str, type[Scenario]] = {
    "bar": Bar,
    "bench": Bench,
    "clipped step": ClippedStep,
    "cpu use": Watch,
    "drop": Drop,
    "drop threads": DropThreads,
    "full lanes": FullLanes,
    "load": Load,
    "measure": Measure,
    "offload": Offload,
    "overlapped step": OverlappedStep,
    "save": Save,
    "save in the background": SaveInBackground,
    "step": Step,
    "verify": Verify,
}


# The tests


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """No thread stays: neither one that waits for ever nor one of an object that is gone."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    HostThreads(1)  # ends those whose finalizer was interrupted
    assert wait_until(lambda: not any(thread not in before and thread.is_alive() for thread in threading.enumerate()))


class Life:
    """Scenarios of one name, each in a folder of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder, self._count = name, folder, 0

    def run(self, hurdle: contextlib.AbstractContextManager[Any]) -> BaseException | None:
        """What the scenario raised behind `hurdle`; what must hold afterwards is checked."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        scenario, raised = SCENARIOS[self.name](folder), None
        try:
            with within(SECONDS), hurdle:
                scenario.act()
        except HangError:
            raise
        except (KeyboardInterrupt, OffstageError) as error:
            raised = error.with_traceback(None)
        with within(SECONDS):
            scenario.check()
        return raised


def is_ctrl_c(error: BaseException | None) -> bool:
    """It, or an error that says what it has left behind."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or is_ctrl_c(error.__cause__ or error.__context__)
    )


def spread(numbers: list[int], most: int) -> list[int]:
    """At most so many of them, evenly."""
    return numbers if len(numbers) <= most else [numbers[i * len(numbers) // most] for i in range(most)]


@pytest.fixture
def quiet(caplog) -> None:
    caplog.set_level(logging.CRITICAL, "offstage")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a finalizer
@pytest.mark.parametrize("name", SCENARIOS)
def test_ctrl_c(name, tmp_path, quiet):
    life, seen = Life(name, tmp_path), Steps()
    assert life.run(seen) is None
    places = {place for place, scenario in PLACES.items() if scenario == name}
    assert places <= seen.called, "the scenario does not come to some of its places"
    files = {place.partition(":")[0] for place in places}
    near = [number for number, file in enumerate(seen.files) if file in files or file == "threading.py"]
    far = [number for number, file in enumerate(seen.files) if file not in files]
    interrupted = [
        life.run(Steps(interrupt_at=number)) for number in (*spread(near, MOST_STEPS), *spread(far, MOST_ELSEWHERE))
    ]
    assert any(isinstance(error, KeyboardInterrupt) for error in interrupted) or name.startswith("drop")
    assert [error for error in interrupted if error is not None and not is_ctrl_c(error)] == []


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "bench"])
def test_a_limit_on_threads(name, tmp_path, quiet):
    """The same comes of it with those threads that there are, whatever their number, or one clear error."""
    life = Life(name, tmp_path)
    with thread_limit(None) as starts:
        assert life.run(contextlib.nullcontext()) is None
    assert starts[0], "the scenario starts no thread"
    for allowed in range(min(starts[0], 6)):
        life.run(thread_limit(allowed))
