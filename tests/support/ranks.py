# SPDX-License-Identifier: Apache-2.0
"""`Ranks`: real processes with a gloo process group, for tests of distributed training.

    def total(start):
        value = torch.tensor([start + dist.get_rank()])
        dist.all_reduce(value)
        return value

    def test_total(ranks):
        assert ranks.run(2, total, 5) == [torch.tensor([11])] * 2

One server process per test session has imported everything and compiled what it can, and starts no threads. Each `run`
forks it, so a rank costs milliseconds and knows nothing of the runs before: neither their process groups nor the
meshes in DTensor's caches. A rank that raises, dies or hangs ends the run at once, with everybody's stack in the
message, and the next run is not touched by it.

The processes end with the session, however it ends: the server when its pipe closes, the ranks with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

_START_S = 180.0
"""Importing torch on a machine that is busy with something else takes a while."""
_GRACE_S = 2.0
"""After the first failure: time for the other ranks to fail too, and for stacks to be written."""
_PR_SET_PDEATHSIG = 1


class RankError(AssertionError):
    """A run that did not end well on all ranks."""


@dataclass(frozen=True)
class _Settings:
    """What `conftest.py` has set in this process and ranks need too; the environment they inherit."""

    threads: int
    mkldnn: bool


@dataclass(frozen=True)
class _Task:
    num_ranks: int
    work: bytes
    """The function and its arguments."""
    timeout: float
    grace: float


@dataclass(frozen=True)
class _Outcome:
    """How it ended on one rank."""

    kind: str
    """``"done"``, ``"raised"``, ``"died"`` or ``"hung"``."""
    value: bytes = b""
    text: str = ""


class Ranks:
    """Runs functions on n processes at once. The server starts with the first run."""

    def __init__(self) -> None:
        self._server: Any = None
        self._pipe: Connection | None = None

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Result],
        *args: Any,
        timeout: float = 60.0,
        grace: float = _GRACE_S,
        **kwargs: Any,
    ) -> list[Result]:
        """What `function(*args, **kwargs)` returned on each of `num_ranks` ranks, in their order.

        After the first failure the other ranks have `grace` seconds to end too.

        The function is one that can be imported; arguments and results are pickled. On the ranks the default process
        group is gloo's, of `num_ranks` processes, and the environment is as under torchrun.
        """
        __tracebackhide__ = True
        try:
            outcomes = self._ask(_Task(num_ranks, pickle.dumps((function, args, kwargs)), timeout, grace))
        except BaseException:  # Ctrl-C too: what is in the pipe is not known
            self.close()
            raise
        if any(outcome.kind != "done" for outcome in outcomes):
            raise RankError(_describe(function, outcomes, timeout))
        return [pickle.loads(outcome.value) for outcome in outcomes]

    def close(self) -> None:
        """End all processes."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._server is not None:
            self._server.join(_GRACE_S)
            self._server.kill()  # if it does not listen; the ranks die with it
            self._server.join()
            self._server = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, task: _Task) -> list[_Outcome]:
        pipe = self._started()
        pipe.send(task)
        if not pipe.poll(task.timeout + 10 * _GRACE_S):
            raise RankError(f"The server of the ranks did not answer within {task.timeout + 10 * _GRACE_S:.0f} s")
        outcomes: list[_Outcome] = pipe.recv()
        return outcomes

    def _started(self) -> Connection:
        if self._pipe is None or not self._server.is_alive():
            self.close()
            spawn = multiprocessing.get_context("spawn")
            self._pipe, theirs = spawn.Pipe()
            settings = _Settings(torch.get_num_threads(), torch.backends.mkldnn.enabled)
            self._server = spawn.Process(target=_serve, args=(theirs, settings), daemon=True)
            self._server.start()
            theirs.close()
            if not self._pipe.poll(_START_S):
                raise RankError(f"The server of the ranks did not start within {_START_S:.0f} s")
            self._pipe.recv()
        return self._pipe


def _describe(function: Callable[..., Any], outcomes: list[_Outcome], timeout: float) -> str:
    """Who did what. A failure's own stack comes before those of ranks that only waited for it."""
    order = ("raised", "died", "hung", "done")
    kinds = {kind: [rank for rank, outcome in enumerate(outcomes) if outcome.kind == kind] for kind in order}
    if kinds["raised"] or kinds["died"]:
        words = {"raised": "raised", "died": "died", "hung": "had not ended when another failed", "done": "returned"}
    else:
        words = {"hung": f"hung for {timeout:.0f} s", "done": "returned"}
    lines = [f"{getattr(function, '__name__', function)} on {len(outcomes)} ranks:"]
    lines += [f"  {words[kind]}: rank {', '.join(map(str, ranks))}" for kind, ranks in kinds.items() if ranks]
    for kind in order:
        lines += [f"\n--- rank {rank} {kind} ---\n{outcomes[rank].text}" for rank in kinds[kind] if outcomes[rank].text]
    return "\n".join(lines)


# The server


def _serve(pipe: Connection, settings: _Settings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pipe
    torch.set_num_threads(settings.threads)
    torch.backends.mkldnn.enabled = settings.mkldnn
    _warm_up()
    with contextlib.suppress(EOFError, BrokenPipeError):
        pipe.send("ready")
        while True:
            pipe.send(_run(pipe.recv(), pipe))
    os._exit(0)  # there is nothing to tidy up


def _warm_up() -> None:
    """Import and compile here what every rank would otherwise import and compile for itself. Nothing with threads."""
    import torch._dynamo  # the first step of any optimizer imports it
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    import offstage

    for dtype, masters in ((torch.float32, "none"), (torch.bfloat16, "fp32"), (torch.bfloat16, "split")):
        param = torch.nn.Parameter(torch.ones(300, dtype=dtype))
        param.grad = torch.ones_like(param)
        offstage.offload(torch.optim.AdamW([param]), fraction=0.0, master_weights=masters).step()


def _run(task: _Task, caller: Connection) -> list[_Outcome]:
    """Fork the ranks and watch them."""
    try:
        work = pickle.loads(task.work)  # here, so that the test's module is imported once for all ranks and runs
    except BaseException:
        return [_Outcome("raised", text=traceback.format_exc())] * task.num_ranks
    with tempfile.TemporaryDirectory(prefix="offstage-ranks-") as name, socket.create_server(("127.0.0.1", 0)) as door:
        processes: list[_Process] = []
        try:
            for rank in range(task.num_ranks):
                processes.append(_fork(rank, task, work, door, Path(name)))
            return _watch(processes, task.timeout, task.grace, caller)
        finally:
            for process in processes:
                process.end()


@dataclass
class _Process:
    """A rank as the server sees it."""

    pid: int
    pipe: Connection
    stack: Path
    said: Path
    outcome: _Outcome | None = None

    def collect(self) -> None:
        """It has written its outcome, or will never."""
        try:
            self.outcome = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            _, status = os.waitpid(self.pid, 0)
            self.pid = 0
            ended = os.waitstatus_to_exitcode(status)
            how = f"signal {signal.Signals(-ended).name}" if ended < 0 else f"exit code {ended}"
            self.outcome = _Outcome("died", text=f"by {how}\n{self._last_words()}")

    def dump(self) -> None:
        """Let it write where it is."""
        if self.outcome is None and self.pid:
            os.kill(self.pid, signal.SIGUSR1)

    def give_up(self) -> None:
        if self.outcome is None:
            self.outcome = _Outcome("hung", text=self._last_words())

    def end(self) -> None:
        """With everything it has started."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.pipe.close()

    def _last_words(self) -> str:
        said, stack = (path.read_text(errors="replace").strip() for path in (self.said, self.stack))
        return "\n".join([*([f"said: {said[-4000:]}"] if said else []), stack])


def _watch(processes: list[_Process], timeout: float, grace: float, caller: Connection) -> list[_Outcome]:
    """Until all are done, or shortly after the first is not going to be."""
    deadline = time.monotonic() + timeout
    failed = False
    while waiting := {process.pipe: process for process in processes if process.outcome is None}:
        ready = wait([*waiting, caller], max(0.0, deadline - time.monotonic()))
        if caller in ready:  # it never speaks before it has an answer: it is gone
            raise EOFError
        if not ready:
            break
        for pipe in ready:
            waiting[pipe].collect()  # type: ignore[index]
        if not failed and any(process.outcome is not None and process.outcome.kind != "done" for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + grace)
    for process in waiting.values():
        process.dump()
    if waiting:
        time.sleep(_GRACE_S / 4)
    for process in waiting.values():
        process.give_up()
    return [process.outcome for process in processes if process.outcome is not None]


# A rank


def _fork(rank: int, task: _Task, work: Any, door: socket.socket, folder: Path) -> _Process:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    stack, said = folder / f"stack-{rank}", folder / f"said-{rank}"
    stack.touch()
    said.touch()
    server = os.getpid()
    with warnings.catch_warnings():
        # The only other threads here are those of a BLAS, which knows about forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the rank has done it itself
            os.setpgid(pid, pid)
        theirs.close()
        return _Process(pid, ours, stack, said)
    try:
        os.setpgid(0, 0)
        _die_with(server)
        ours.close()
        _redirect(said, stack)
        theirs.send_bytes(pickle.dumps(_outcome_of(rank, task, work, door)))
        signal.pause()  # others may still need this process's sockets; the server ends all ranks together
    finally:
        os._exit(1)


def _die_with(server: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # too late
        os._exit(1)


def _redirect(said: Path, stack: Path) -> None:
    """Output and stacks go to files, which are shown if something fails."""
    output = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = open(stack, "a")  # noqa: SIM115  # faulthandler keeps it
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _outcome_of(rank: int, task: _Task, work: Any, door: socket.socket) -> _Outcome:
    function, args, kwargs = work
    try:
        with _process_group(rank, task, door):
            return _Outcome("done", pickle.dumps(function(*args, **kwargs)))
    except BaseException:
        return _Outcome("raised", text=traceback.format_exc())


@contextlib.contextmanager
def _process_group(rank: int, task: _Task, door: socket.socket) -> Iterator[None]:
    """The default group, over a store that listens at `door`. It ends with the process."""
    port = door.getsockname()[1]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(task.num_ranks),
        LOCAL_WORLD_SIZE=str(task.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    first = rank == 0
    store = dist.TCPStore(
        "127.0.0.1", port, task.num_ranks, is_master=first, master_listen_fd=os.dup(door.fileno()) if first else None
    )
    # Longer than a run: a hang is shown with stacks, not with gloo's own message on some of the ranks.
    timeout = datetime.timedelta(seconds=2 * task.timeout + 60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.num_ranks, timeout=timeout)
    yield
