# SPDX-License-Identifier: Apache-2.0
"""Trackers get every number of every row, and a run outlives them.

The packages are stood in for: what they are called with here is what W&B 0.31 and torch's SummaryWriter take.
"""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from offstage.errors import OffstageError
from tests.support.trainer import losses_of, rows_of, train

TRACK = {"run": {"steps": 3, "track": ("tensorboard", "wandb")}}


class Calls:
    """Every call to the packages; those named in `failing` raise."""

    def __init__(self) -> None:
        self.made: list[tuple] = []
        self.failing: set[str] = set()

    def note(self, name, *values) -> None:
        self.made.append((name, *values))
        if name in self.failing:
            raise ConnectionError("no route to host")

    def of(self, name) -> list[tuple]:
        return [values for made, *values in self.made if made == name]


@pytest.fixture
def calls(monkeypatch) -> Calls:
    calls = Calls()

    class SummaryWriter:
        def __init__(self, log_dir=None, comment="", purge_step=None, max_queue=10, flush_secs=120):
            calls.note("SummaryWriter", log_dir, purge_step)
            Path(log_dir).mkdir(exist_ok=True)
            (Path(log_dir) / "events").touch()

        def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
            calls.note("add_scalar", tag, scalar_value, global_step)

        def close(self):
            calls.note("close")

    class Run:
        def log(self, data, step=None, commit=None):
            calls.note("log", data, step)

        def finish(self, exit_code=None, quiet=None):
            calls.note("finish")

    def init(project=None, name=None, id=None, resume=None, dir=None, config=None, settings=None, **others):
        assert not others
        calls.note("init", id, resume, dir, config)
        return Run()

    board, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    board.SummaryWriter, wandb.init, wandb.Settings = SummaryWriter, init, dict
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return calls


def test_every_row(tmp_path, calls):
    train(tmp_path, **TRACK)
    expected = [{name: value for name, value in row.items() if value is not None} for row in rows_of(tmp_path)]
    for number, (values, step) in enumerate(calls.of("log")):
        assert {"step": step, **values} == expected[number]
    assert len(calls.of("log")) == 3
    losses = [value for tag, value, _ in calls.of("add_scalar") if tag == "loss"]
    assert losses == losses_of(tmp_path)
    assert [step for tag, _, step in calls.of("add_scalar") if tag == "loss"] == [1, 2, 3]
    assert (len(calls.of("close")), len(calls.of("finish"))) == (1, 1)
    (_, _, _, config) = calls.of("init")[0]
    assert config["run"]["steps"] == 3


def test_a_resumed_run_is_the_same_one(tmp_path, calls):
    """W&B finds it by its identity; TensorBoard hides rows after the checkpoint, which are made again."""
    train(tmp_path / "run", **TRACK)
    train(tmp_path / "run", run={"steps": 5, "track": ("tensorboard", "wandb")})
    train(tmp_path / "other", **TRACK)
    (first, *about), (second, *_), (other, *_) = calls.of("init")
    assert first == second != other
    assert about[:2] == ["allow", str(tmp_path / "run")]
    assert calls.of("SummaryWriter")[:2] == [
        [str(tmp_path / "run/tensorboard"), None],
        [str(tmp_path / "run/tensorboard"), 4],
    ]


@pytest.mark.parametrize("fails", ["log", "add_scalar", "finish", "close"])
def test_a_failure_is_reported_once_and_the_run_goes_on(tmp_path, calls, caplog, fails):
    calls.failing = {fails}
    assert train(tmp_path, **TRACK).step == 3
    assert len(calls.of(fails)) == 1
    (said,) = [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()]
    goes_on = ", and the run goes on without it" if fails in ("log", "add_scalar") else ""
    assert said.endswith(f"{goes_on}; metrics.jsonl has all rows: ConnectionError: no route to host")
    assert len(rows_of(tmp_path)) == 3
    if fails != "log":
        assert len(calls.of("log")) == 3


def test_a_tracker_that_cannot_begin(tmp_path, calls, caplog):
    """A new run is refused before its first step, and leaves nothing; one that is resumed goes on."""
    calls.failing = {"init"}
    with pytest.raises(
        OffstageError, match=r"run.track='wandb' expects .* found ConnectionError: no route.*wandb login"
    ):
        train(tmp_path, **TRACK)
    assert (len(calls.of("add_scalar")), len(calls.of("close"))) == (0, 1)
    assert list(tmp_path.iterdir()) == []
    calls.failing = set()
    train(tmp_path, **TRACK)
    calls.failing = {"init"}
    assert train(tmp_path, run={"steps": 4, "track": ("wandb",)}).step == 4
    assert "tracker wandb could not begin again, and the run goes on without it" in caplog.text


def test_the_older_setting(tmp_path, calls):
    train(tmp_path, run={"steps": 1, "tensorboard": True})
    assert [tag for tag, *_ in calls.of("add_scalar") if tag == "loss"] == ["loss"]
    assert calls.of("init") == []
