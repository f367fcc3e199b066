# SPDX-License-Identifier: Apache-2.0
"""What a run writes down and shows: rows, files, progress in its three ways."""

import io
import json
import logging
import os
import re
import signal
import sys
import time

import pytest
import torch

from offstage.errors import OffstageError
from offstage.lanes import accelerator
from offstage.train import loop, progress, run_info, signals
from offstage.train.metrics import Row
from offstage.train.passes import sample_tokens
from offstage.train.progress import progress_for
from offstage.train.run_folder import RunFolder
from offstage.train.signals import FAILED, StopRequests
from tests.support.machines import machine
from tests.support.trainer import rows_of, train

CPU = torch.device("cpu")
KEYS = {
    "step", "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "device_bytes", "device_peak_bytes", "host_rss_bytes",
    "exposed_ms", "hidden_ms", "bytes_fetched", "bytes_stored", "skipped",
}  # fmt: skip


def row(step, **values):
    found = dict.fromkeys(KEYS, 0.5) | {"device_bytes": None, "device_peak_bytes": 3 * 2**30, "skipped": False}
    return Row(**{**found, "host_rss_bytes": 2**20, "tokens_per_s": 12345.6, "step": step, **values})


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    run = {"eval_every": 4, "eval_batches": 1, "sample_every": 6, "sample_bytes": 9, "observe_step": 3, "save_every": 5}
    return train(tmp_path_factory.mktemp("run"), "forward", run=run)


# Files


def test_every_step_has_a_row(looked_at):
    rows = rows_of(looked_at.folder)
    assert [one["step"] for one in rows] == list(range(1, 13))
    assert all(one.keys() - {"eval_loss"} == KEYS for one in rows)
    assert [one["step"] for one in rows if "eval_loss" in one] == [4, 8, 12]
    for one in rows:
        assert one["tokens_per_s"] == pytest.approx(2 * 16 / one["step_ms"] * 1e3, rel=1e-3)
        assert one["host_rss_bytes"] > 2**24
        assert one["grad_norm"] > 0
        assert one["bytes_fetched"] > 0


def test_the_folder(looked_at):
    folder = looked_at.folder
    about = json.loads((folder / "run.json").read_text())
    assert about["parameters"] == sum(size["numel"] for size in about["plan"]["sizes"])
    assert about["tokens_per_step"] == 32
    assert about["world"] == {"ranks": 1, "stages": 1, "sharded": False}
    assert about["versions"]["torch"] == torch.__version__
    receipt = json.loads((folder / "receipt.json").read_text())
    assert receipt["steps"] == 12
    assert receipt["bytes_stored"] == rows_of(folder)[-1]["bytes_stored"]
    observed = json.loads((folder / "observed.json").read_text())
    assert observed["step"] == 3
    # The updates end under the forward of the next step, which is seen too, and nothing beyond it.
    assert [phase["name"] for phase in observed["phases"]] == ["forward", "backward", "step", "forward"]
    assert 'dtype = "float32"' in (folder / "config.toml").read_text()  # what auto came to
    assert re.findall(r"--- step (\d+) ---", (folder / "samples.txt").read_text()) == ["6", "12"]


def test_a_failing_write_says_what_to_do(tmp_path):
    train(tmp_path, run={"steps": 1})
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OffstageError, match=r"metrics.jsonl could not be written: .*run the same command again"):
        train(tmp_path, run={"steps": 2})


def test_a_prediction_for_the_report(tmp_path, monkeypatch):
    """What the planner says about the run as it is, on a machine of a known speed."""
    found = []
    finish = loop.Training._finish

    def look(self, stopped):
        done = finish(self, stopped)
        found.extend(
            (self.optimizer.plan, run_info.predicted_plan(self.optimizer, self.config, self.meter, CPU), self.meter)
        )
        return done

    monkeypatch.setattr(loop.Training, "_finish", look)
    monkeypatch.setattr(run_info, "measure_machine", lambda device: machine())
    train(tmp_path, "some by the host", data={"micro_batches": 2})
    placed, predicted, meter = found
    assert predicted.placements == placed.placements
    assert predicted.prediction.bytes_up == rows_of(tmp_path)[-1]["bytes_fetched"]
    compute = meter.phase_ms("forward") + meter.phase_ms("backward")
    assert 0.5 * compute < predicted.prediction.iteration_ms < 1.5 * compute + 10
    assert meter.phase_ms("step") > 0


# The host does not wait for the step it has just queued


def test_numbers_come_a_step_late(tmp_path, monkeypatch):
    """When a step is queued, the row of the one before is read, and no other."""
    seen = []
    end = loop.Meter.end

    def look(self, step, *args, **kwargs):
        found = end(self, step, *args, **kwargs)
        seen.append((step, found.step if found is not None else None))
        return found

    monkeypatch.setattr(loop.Meter, "end", look)
    train(tmp_path, run={"steps": 5, "save_every": 3})
    assert seen == [(1, None), (2, 1), (3, 2), (4, None), (5, 4)]  # saving waits for step 3


# Progress


def test_json(tmp_path, capsys):
    train(tmp_path, run={"progress": "json", "steps": 4, "eval_every": 2, "eval_batches": 1})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one for one in lines if "loss" in one and "event" not in one] == rows_of(tmp_path)
    assert {"event": "begin", "step": 0, "steps": 4} in lines
    assert lines[-1]["checkpoint"].endswith("step-00000004")


def test_quiet(tmp_path, capsys):
    train(tmp_path, run={"progress": "quiet", "steps": 4})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # what it is, the last step, where it is
    assert re.match(r"step 4/4  loss \d\.\d{4}  tokens/s [\d,]+  memory [\d.]+ [MG]iB  exposed [\d.]+ ms$", lines[1])


def test_quiet_shows_a_line_now_and_then(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = progress_for("quiet", first=True, stream=stream)
    shown.begin(0, 1000)
    for step in range(1, 11):
        clock[0] += 4.0
        shown.show(row(step))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["4/1000", "8/1000"]
    assert lines[1].endswith("1:06:08 left")


def test_rich():
    stream = io.StringIO()
    shown = progress_for("rich", first=True, stream=stream)
    shown.begin(5, 10)
    shown.say("something [odd] happened")
    for step in (6, 7):
        shown.show(row(step, loss=1.25, eval_loss=2.5, exposed_ms=3.25))
    shown.end()
    text = re.sub(r"\x1b\[[\d;?]*\w", "", stream.getvalue())
    assert "something [odd] happened" in text
    last = text.splitlines()[-1]
    assert re.match(r" *7/10 loss 1\.2500  tokens/s 12,346  memory 3\.0 GiB  exposed 3\.2 ms", last)
    assert len(last) <= 80


def test_warnings_do_not_tear_the_bar(monkeypatch):
    """They are said, a line each, unless logging is configured."""
    logger = logging.getLogger("offstage")
    monkeypatch.setattr(logger, "propagate", False)
    stream = io.StringIO()
    with progress.warnings_to_progress(progress_for("json", first=True, stream=stream)):
        logger.info("not worth a line")
        logger.error("the save to %s failed:\nTraceback and so on", "there")
    logger.handlers.append(logging.NullHandler())
    with progress.warnings_to_progress(progress_for("json", first=True, stream=stream)):
        logger.warning("where it was configured to go")
    logger.handlers.pop()
    assert json.loads(stream.getvalue()) == {"event": "error: the save to there failed", "level": "ERROR"}


def test_other_ranks_are_silent(capsys):
    shown = progress_for("json", first=False)
    shown.begin(0, 1)
    shown.show(row(1))
    shown.say("hello")
    shown.end()
    assert capsys.readouterr().out == ""


def test_auto_depends_on_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert isinstance(progress_for("auto", first=True, stream=io.StringIO()), progress.Quiet)
    assert isinstance(progress_for("auto", first=True, stream=Terminal()), progress.Rich)
    monkeypatch.setattr(progress, "_has_rich", lambda: False)
    assert isinstance(progress_for("auto", first=True, stream=Terminal()), progress.Quiet)


def test_rich_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(OffstageError, match=r"run.progress='rich' needs the rich package.*quiet"):
        progress_for("rich", first=True, stream=io.StringIO())


def test_a_loss_that_is_not_finite_is_valid_json():
    assert json.loads(row(1, loss=None, grad_norm=None).to_json())["loss"] is None
    assert ("loss", "not finite") in progress.cells(row(1, loss=None))


# Samples


def test_samples_follow_the_model():
    """A model that is sure of the next letter of an alphabet, whatever the window, and of nothing behind it."""

    def logits_of(window):
        assert window.shape == (1, 8)
        nonsense = torch.full((1, 8, 300), 50.0)  # a vocabulary may be larger than bytes are
        nonsense[..., :256] = -50.0
        return nonsense.scatter(2, ((window + 1) % 256).unsqueeze(-1), 50.0)

    assert sample_tokens(logits_of, b"abc", 12, vocabulary=256, sequence=8, seed=0) == list(b"defghijklmno")


def test_samples_are_repeatable_and_leave_random_numbers_alone(tmp_path):
    state = torch.get_rng_state()
    flat = lambda window: torch.zeros(1, 8, 256)  # noqa: E731
    drawn = [sample_tokens(flat, b"x", 20, vocabulary=256, sequence=8, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), state)
    broken = lambda window: torch.full((1, 8, 256), torch.nan)  # noqa: E731
    assert sample_tokens(broken, b"x", 5, vocabulary=256, sequence=8, seed=0) == []
    RunFolder(tmp_path).append_sample(7, b"a", b"b\xff")
    assert RunFolder(tmp_path).samples.read_text() == "--- step 7 ---\n[a]b\\xff\n\n"


# Signals


def test_a_signal_is_a_request(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests().listening() as asked:
        asked.begin_step()
        assert asked.end_step() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        asked.begin_step()
        assert asked.end_step() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_ends_it_at_once(monkeypatch):
    with StopRequests().listening() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # torchrun passes on what the terminal has sent already
        monkeypatch.setattr(signals, "IMPATIENT_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        asked.begin_step()
        assert asked.end_step() == signal.SIGINT


def test_a_failure_counts_more_than_a_signal():
    asked = StopRequests()
    asked.ask(signal.SIGINT)
    asked.begin_step(failed=True)
    assert asked.end_step() == FAILED


def test_a_peak_is_remembered_when_statistics_are_reset(monkeypatch):
    """`fit` resets them to see what parts of an iteration take."""
    device, now = torch.device("cuda:0"), {"peak": 700}
    monkeypatch.setattr(accelerator, "_HIGHEST", {})
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: now["peak"])
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda index: now.update(peak=100))
    lanes = object.__new__(accelerator.AcceleratorLanes)  # without streams
    lanes.device = device
    lanes.reset_peak()
    assert accelerator.highest_peak(device) == 700
    assert now["peak"] == 100
    now["peak"] = 900
    assert accelerator.highest_peak(device) == 900
