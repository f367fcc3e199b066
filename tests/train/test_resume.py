# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped goes on, and ends with the bits of one that was not: kill -9, signals, other plans, ranks."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from offstage import checkpoint
from offstage.errors import CheckpointError, ConfigError
from offstage.train import loop
from offstage.train.config import build
from offstage.train.parallel import started
from offstage.train.progress import progress_for
from tests.support.ranks import RankError
from tests.support.trainer import (
    PLANS,
    differences,
    files_of,
    losses_of,
    rows_of,
    tensors_of,
    train,
    train_and_be_killed,
    train_and_be_told,
    train_there,
    values_of,
)

ROOT = Path(__file__).parents[2]
KILLS = 10


def every(steps, save_every=2, **run):
    return {"run": {"steps": steps, "save_every": save_every, **run}}


def test_killed_at_ten_random_steps(ranks, tmp_path):
    """kill -9 anywhere, each time going on with another plan: the same bits, and the same losses on the way."""
    dice = random.Random(7)
    data = {"data": {"micro_batches": 2}}  # gradients are accumulated and some are clipped
    plans = itertools.cycle(PLANS)
    began = []
    for _ in range(KILLS):
        values = values_of(tmp_path / "killed", next(plans), **every(70), **data)
        began.append(checkpoint.latest(tmp_path / "killed" / "checkpoints"))
        with pytest.raises(RankError, match="died"):
            ranks.run(1, train_and_be_killed, values, dice.randint(2, 12), dice.uniform(0, 0.03))
    assert len(set(began)) > KILLS // 2, "hardly any run got further than the one before"
    (killed,) = ranks.run(1, train_there, values_of(tmp_path / "killed", next(plans), **every(70), **data))
    (whole,) = ranks.run(1, train_there, values_of(tmp_path / "whole", "off", **every(70, 0), **data))
    assert (killed.step, whole.step) == (70, 70)
    assert differences(killed.checkpoint, whole.checkpoint) == []
    assert [row["step"] for row in rows_of(tmp_path / "killed")] == list(range(1, 71))
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")
    assert {row["grad_norm"] > 1.0 for row in rows_of(tmp_path / "whole")} == {False, True}


def test_two_ranks_are_killed(ranks, tmp_path):
    """FSDP2: one rank dies, and all go on with another plan."""
    dice = random.Random(3)
    for plan, who in (("streamed", 0), ("backward", 1), ("half", 0)):
        values = values_of(tmp_path / "killed", plan, **every(16))
        with pytest.raises(RankError, match=f"died: rank {who}"):
            ranks.run(2, train_and_be_killed, values, dice.randint(2, 5), dice.uniform(0, 0.03), who)
    assert checkpoint.latest(tmp_path / "killed" / "checkpoints") is not None
    killed = ranks.run(2, train_there, values_of(tmp_path / "killed", "some by the host", **every(16)))[0]
    whole = ranks.run(2, train_there, values_of(tmp_path / "whole", "off", **every(16, 0)))[0]
    assert differences(killed.checkpoint, whole.checkpoint) == []
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")


def test_a_pipeline_is_killed(ranks, tmp_path):
    """Two stages on each of two ranks, and a checkpoint with the names of the whole model."""
    model = {"model": {"layers": 4}, "data": {"micro_batches": 2}}
    stages = {"parallel": {"stages": 2, "schedule": "Interleaved1F1B"}, **model}
    values = values_of(tmp_path / "killed", "forward", **every(8), **stages)
    with pytest.raises(RankError, match="died: rank 1"):
        ranks.run(2, train_and_be_killed, values, 5, 0.01, 1)
    assert checkpoint.latest(tmp_path / "killed" / "checkpoints") is not None
    killed = ranks.run(2, train_there, values_of(tmp_path / "killed", "host", **every(8), **stages))[0]
    whole = ranks.run(2, train_there, values_of(tmp_path / "whole", "off", **every(8, 0), **stages))[0]
    assert differences(killed.checkpoint, whole.checkpoint) == []
    alone = train(tmp_path / "alone", "off", **every(8, 0), **model)
    far = far_apart(tensors_of(killed.checkpoint), tensors_of(alone.checkpoint))
    assert far == {}


def far_apart(found, expected):
    """Tensors that are not close, of runs that add in another order."""
    assert found.keys() == expected.keys()
    return {
        name: (tensor - expected[name]).abs().max()
        for name, tensor in found.items()
        if not torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-5)
    }


def test_other_ranks_go_on(ranks, tmp_path):
    """Two ranks begin and one process ends: the same sequences in every step, so nearly the same weights."""
    two = {"data": {"batch": 2}, **every(6, 0)}
    one = {"data": {"batch": 4}}
    ranks.run(2, train_there, values_of(tmp_path / "moved", **two))
    moved = train(tmp_path / "moved", **one, **every(10, 0))
    # The learning rate of a step depends on how many there are to be: here ten, there six and then ten.
    train(tmp_path / "alone", **one, **every(6, 0))
    alone = train(tmp_path / "alone", **one, **every(10, 0))
    assert far_apart(tensors_of(moved.checkpoint), tensors_of(alone.checkpoint)) == {}


@pytest.mark.parametrize("division", ["sharded", "pipeline"])
def test_divided_models_have_the_same_adapters(ranks, tmp_path, division):
    """Adapters get their first values after a model is cut or sharded: the same ones."""
    sections = {"data": {"batch": 2, "micro_batches": 2}, "lora": {"rank": 4}, **every(2, 0)}
    alone = train(tmp_path / "alone", "off", **sections)
    other = {"data": {"batch": 1, "micro_batches": 2}} if division == "sharded" else {"parallel": {"stages": 2}}
    divided = ranks.run(2, train_there, values_of(tmp_path / "divided", **{**sections, **other}))[0]
    assert far_apart(tensors_of(divided.checkpoint), tensors_of(alone.checkpoint)) == {}


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(ranks, tmp_path, number):
    values = values_of(tmp_path / "told", "backward", **every(9, 0))
    (told,) = ranks.run(1, train_and_be_told, values, 4, number)
    assert (told.step, told.stopped_by) == (4, number.name)
    assert told.checkpoint.name == "step-00000004"
    checkpoint.verify(told.checkpoint)
    (done,) = ranks.run(1, train_there, values)
    assert (done.step, done.stopped_by) == (9, None)
    assert differences(done.checkpoint, train(tmp_path / "whole", **every(9, 0)).checkpoint) == []


def test_all_ranks_stop_after_the_same_step(ranks, tmp_path):
    """Only one of them hears the signal."""
    values = values_of(tmp_path / "told", "forward", **every(50, 0))
    first, second = ranks.run(2, train_and_be_told, values, 3, signal.SIGTERM, 1)
    assert first.stopped_by == second.stopped_by == "SIGTERM"
    assert first.step == second.step
    assert 3 <= first.step <= 5
    checkpoint.verify(first.checkpoint)


def test_torchrun_and_ctrl_c(tmp_path):
    """The command as it is typed, and a terminal's Ctrl-C, which goes to everybody."""
    values = values_of(tmp_path / "run", **every(2000, 0, progress="json"))
    flags = [f"--{section}.{name}={_flag(value)}" for section, one in values.items() for name, value in one.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "src"}
    process = subprocess.Popen(
        [*command, "-m", "offstage", "train", *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("{") and json.loads(line).get("step", 0) >= 2 and "loss" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        said += process.communicate(timeout=60)
    finally:
        process.kill()
    text = "".join(filter(None, said))
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found is not None, text
    checkpoint.verify(found)
    assert "stopped by SIGINT" in text
    assert "Traceback" not in text.split("stopped by SIGINT")[0]


def _flag(value):
    return ",".join(value) if isinstance(value, tuple) else value


# What stays, and what goes


def test_old_checkpoints_go_after_the_new_one_is_complete(tmp_path, monkeypatch):
    """At every moment in which one is removed, `keep_checkpoints` newer ones are complete."""
    from offstage.train import checkpoints as own

    removed = []
    remove = own._remove

    def watch(folder):
        newer = [one for one in folder.parent.iterdir() if one > folder and checkpoint.is_complete(one)]
        removed.append((folder.name, len(newer)))
        for one in newer:
            checkpoint.verify(one)
        remove(folder)

    monkeypatch.setattr(own, "_remove", watch)
    train(tmp_path, **every(10, 2, keep_checkpoints=2))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000010"]
    assert [name for name, _ in removed] == ["step-00000002", "step-00000004", "step-00000006"]
    assert all(newer == 2 for _, newer in removed)


def test_what_an_interrupted_save_left_goes_too(tmp_path):
    left = tmp_path / "checkpoints" / "step-00000001"
    left.mkdir(parents=True)
    (left / ".offstage").touch()
    (left / "__0_0.distcp").write_bytes(b"half of it")
    strange = tmp_path / "checkpoints" / "step-00000000"
    strange.mkdir()
    (strange / "mine.txt").write_text("not a checkpoint")
    train(tmp_path, **every(3, 0))
    assert not left.exists()
    assert (strange / "mine.txt").exists()


def test_the_checkpoint_of_another_run_is_not_removed_through_a_link(tmp_path):
    """A run may go on from what a link leads to; it removes neither that nor the link."""
    other = train(tmp_path / "other", **every(2, 0)).checkpoint
    before = files_of(other)
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    (root / other.name).symlink_to(other)
    left = tmp_path / "left"
    left.mkdir()
    (left / ".offstage").touch()
    (root / "step-00000001").symlink_to(left)
    result = train(tmp_path / "run", **every(6, 1, keep_checkpoints=1))
    assert result.step == 6
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", other.name, "step-00000006"]
    assert files_of(other) == before
    assert (left / ".offstage").exists()


def test_what_is_saved_last_counts_even_if_the_clock_is_set_back(tmp_path, monkeypatch):
    """For resuming, and for what is removed."""
    train(tmp_path, **every(2, 0))
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 10**15)
    assert train(tmp_path, **every(4, 1, keep_checkpoints=3)).checkpoint.name == "step-00000004"
    assert train(tmp_path, **every(5, 0, keep_checkpoints=1)).checkpoint.name == "step-00000005"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_program_that_changes_folders_while_it_trains(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    end = loop.Meter.end

    def move(self, step, *args, **kwargs):
        monkeypatch.chdir(tmp_path / "elsewhere")
        return end(self, step, *args, **kwargs)

    monkeypatch.setattr(loop.Meter, "end", move)
    result = train("run", **every(4, 1))
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000004"
    checkpoint.verify(result.checkpoint)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_checkpoint_of_another_program_in_the_folder_of_a_run(tmp_path):
    train(tmp_path, **every(1, 0))
    config = build(values_of(tmp_path))
    with contextlib.ExitStack() as until_saved:
        parallel = until_saved.enter_context(started(config.parallel, torch.device("cpu")))
        training = loop.Training(config, parallel, loop.RunFolder(tmp_path), progress_for("quiet", first=True))
        until_saved.callback(training.close)
        checkpoint.save(
            tmp_path / "checkpoints" / "mine", training.passes.model, training.optimizer, extra={"epoch": 3}
        )
    with pytest.raises(
        CheckpointError, match=r"mine: expected a checkpoint of `offstage train`; found one without 'data'"
    ):
        train(tmp_path, **every(3, 0))


def test_a_finished_run_is_not_made_again(tmp_path):
    first = train(tmp_path, **every(4, 0))
    before = rows_of(tmp_path), (tmp_path / "receipt.json").read_text()
    again = train(tmp_path, **every(4, 0))
    assert (again.step, again.loss, again.checkpoint) == (4, None, first.checkpoint)
    assert (rows_of(tmp_path), (tmp_path / "receipt.json").read_text()) == before


def test_rows_of_steps_that_are_made_again_are_cut_off(tmp_path):
    train(tmp_path, **every(4, 0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')  # killed while it wrote
    train(tmp_path, **every(6, 0))
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert len(rows_of(tmp_path)[4]) > 2


def test_random_numbers_go_on(tmp_path, monkeypatch):
    """A model that draws: dropout, for one. Nothing of ours does."""
    from offstage.train.transformer import Transformer

    def forward(self, tokens, targets=None, original=Transformer.forward):
        found = original(self, tokens, targets)
        return found * (0.5 + torch.rand(())) if self.training else found

    monkeypatch.setattr(Transformer, "forward", forward)
    run = every(6, 0)
    constant = {"optimizer": {"last_lr_share": 1.0, "warm_up": 0}}
    whole = train(tmp_path / "whole", **run, **constant)
    train(tmp_path / "stopped", **every(3, 0), **constant)
    stopped = train(tmp_path / "stopped", **run, **constant)
    assert differences(whole.checkpoint, stopped.checkpoint) == []


def test_settings_that_changed_count(tmp_path):
    """A checkpoint brings the optimizer's options with it; the new run's go over them."""
    train(tmp_path / "changed", **every(3, 0))
    changed = train(tmp_path / "changed", **every(6, 0), optimizer={"weight_decay": 0.0, "betas": (0.5, 0.5)})
    train(tmp_path / "same", **every(3, 0))
    same = train(tmp_path / "same", **every(6, 0))
    assert differences(changed.checkpoint, same.checkpoint) != []


def test_other_data_is_refused(tmp_path):
    train(tmp_path / "run", **every(3, 0))
    (tmp_path / "other.txt").write_text("something else " * 1000)
    for data in ({"paths": (str(tmp_path / "other.txt"),)}, {"sequence": 8}):
        with pytest.raises(ConfigError, match=r"other data.*new run"):
            train(tmp_path / "run", **every(6, 0), data=data)
    assert train(tmp_path / "run", **every(6, 0)).step == 6


def test_saves_wait_where_the_host_has_no_room_for_copies(tmp_path, caplog):
    """An asynchronous save may copy all state. Without room for that the run saves all the same, and says so."""
    budget = {"offload": {"host_budget": "400KiB"}}
    done = train(tmp_path / "tight", **every(6), **budget)
    assert "training waits for each save" in caplog.text
    assert caplog.text.count("training waits") == 1
    assert differences(done.checkpoint, train(tmp_path / "roomy", **every(6)).checkpoint) == []


def test_a_save_is_asynchronous(tmp_path, monkeypatch):
    """Steps are made while it is under way."""
    from offstage.checkpoint import saving
    from offstage.train import loop

    steps_meanwhile = []
    write = saving._write

    def slowly(folder, *args):
        begin = made[0]
        deadline = time.monotonic() + 20
        while made[0] < begin + 2 and made[0] < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        steps_meanwhile.append(made[0] - begin)
        write(folder, *args)

    made = [0]
    end = loop.Meter.end

    def count(self, step, *args, **kwargs):
        made[0] = step
        return end(self, step, *args, **kwargs)

    monkeypatch.setattr(loop.Meter, "end", count)
    monkeypatch.setattr(saving, "_write", slowly)
    done = train(tmp_path / "slow", **every(8, 3))
    assert max(steps_meanwhile) >= 2
    monkeypatch.undo()
    assert differences(done.checkpoint, train(tmp_path / "quick", **every(8, 0)).checkpoint) == []
