# SPDX-License-Identifier: Apache-2.0
"""Bad input and bad luck: one clear message, an exit status that is not 0, and nothing lost."""

import contextlib
import dataclasses
import errno
import fcntl
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offstage import checkpoint
from offstage.checkpoint import writer
from offstage.cli.main import main
from offstage.errors import CheckpointError, OffstageError
from offstage.train import passes
from offstage.train.config import build, to_toml
from offstage.train.model_sizes import SIZES
from tests.support.ranks import RankError
from tests.support.trainer import differences, files_of, rows_of, train, train_there, values_of


@pytest.fixture
def folder(tmp_path):
    """A run of 4 steps, saved after each second."""
    train(tmp_path / "run", run={"steps": 4, "save_every": 2})
    return tmp_path / "run"


def saved(folder):
    """What must not be lost."""
    return {name: data for name, data in files_of(folder).items() if name.startswith("checkpoints")}


def attempt(capsys, folder, plan="streamed", **sections):
    """`offstage train` with these settings: the exit status, and the one line on stderr."""
    sections.setdefault("run", {}).setdefault("steps", 8)
    settings = folder.parent / "settings.toml"
    values = values_of(folder, plan, **sections)
    settings.write_text("\n".join(line for name, one in values.items() for line in _section(name, one)))
    status = main(["train", "--config", str(settings)])
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1, said
    return status, said


def refused(capsys, folder, status, *expected, keeps=files_of, **sections):
    """An attempt that ends with this status and a line with all of `expected`, and changes no file that counts."""
    before = keeps(folder)
    found, said = attempt(capsys, folder, **sections)
    assert found == status
    assert [one for one in expected if not re.search(one, said)] == [], said
    assert keeps(folder) == before


def _section(name, values):
    yield f"[{name}]"
    for key, value in values.items():
        yield f"{key} = {_toml(value)}"


def _toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def test_the_settings_of_these_tests_are_good(folder, capsys):
    """Or all of the below would fail for a reason of its own."""
    values = values_of(folder, run={"steps": 6})
    assert build(values) == build({**values, "run": {**values["run"], "seed": 0}})
    (folder.parent / "good.toml").write_text(to_toml(build(values)))
    assert main(["train", "--config", str(folder.parent / "good.toml")]) == 0
    assert capsys.readouterr().err == ""


# Data

DATA = {
    "missing": ({"paths": ("nowhere/at/all.txt",)}, r"data\.paths expects files.*nowhere/at/all\.txt is not there"),
    "empty": ({"paths": ("{empty}",)}, r"Expected text in .*without a single byte"),
    "too short": ({"paths": ("{short}",)}, r"Expected data of at least one sequence of 16 bytes"),
    "nothing to evaluate": ({"eval_share": 0.0001}, r"at least one sequence of 16 bytes.*Give more data"),
    "other data": ({"paths": ("{other}",)}, r"of other data.*Give the same data"),
    "other sequences": ({"sequence": 8}, r"of other data.*sequence=16.*found 8"),
}


@pytest.mark.parametrize("case", DATA)
def test_data(case, folder, capsys):
    data, expected = DATA[case]
    files = {"empty": "", "short": "ab", "other": "other text " * 500}
    for name, text in files.items():
        (folder.parent / name).write_text(text)
    names = {name: str(folder.parent / name) for name in files}
    data = {
        key: tuple(one.format(**names) for one in value) if key == "paths" else value for key, value in data.items()
    }
    run = {"eval_every": 5} if case == "nothing to evaluate" else {}
    refused(capsys, folder, 2, expected, keeps=saved, data=data, run=run)


# Models and checkpoints


OTHER_MODELS = {
    "sizes": (
        {"model": {"layers": 3, "hidden": 128}},
        ["is of another model: layers 2 then and 3 now, hidden 64 then and 128 now", "choose another run.folder"],
    ),
    "format": ({"model": {"dtype": "bfloat16"}}, ["dtype float32 then and bfloat16 now"]),
    "a new run in an old folder": (
        {"run": {"resume": False}},
        [r"run\.resume=false.*step-00000004 is of an old one.*another run\.folder"],
    ),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_another_model(case, folder, capsys):
    sections, expected = OTHER_MODELS[case]
    refused(capsys, folder, 2, *expected, **{name: dict(section) for name, section in sections.items()})


def test_another_model_whose_run_left_no_settings(folder, capsys):
    (folder / "run.json").unlink()
    expected = r"step-00000004: Tensor 'blocks\.0\..*' of the model: expected shape .*, found "
    refused(capsys, folder, 1, expected, "choose another run.folder", model={"hidden": 128})


def test_another_vocabulary(folder, capsys, monkeypatch):
    monkeypatch.setitem(SIZES, "1M", dataclasses.replace(SIZES["1M"], vocabulary=300))
    refused(capsys, folder, 2, "vocabulary 256 then and 300 now")


def test_a_damaged_checkpoint(folder, capsys):
    """It is refused, and the one before it takes over once it is removed."""
    newest = checkpoint.latest(folder / "checkpoints")
    (data, *_) = sorted(newest.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    offers = r"step-00000002 is intact: run\.fallback=true continues from there"
    refused(capsys, folder, 1, rf"step-00000004: .*{data.name}.*{offers}")
    shutil.rmtree(newest)
    done = train(folder, run={"steps": 8})
    whole = train(folder.parent / "whole", run={"steps": 8})
    assert differences(done.checkpoint, whole.checkpoint) == []
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 9))


def test_ranks_go_back_to_the_same_checkpoint(ranks, folder):
    """With `run.fallback`: the first rank judges for all, and moves the damaged one."""
    (data, *_) = sorted((folder / "checkpoints" / "step-00000004").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    run = {"steps": 4, "fallback": True}
    found = ranks.run(2, train_there, values_of(folder, run=run, data={"batch": 1}))
    assert {(result.step, result.checkpoint.name) for result in found} == {(4, "step-00000004")}
    assert (folder / "checkpoints" / "damaged" / "step-00000004" / data.name).is_file()
    checkpoint.verify(folder / "checkpoints" / "step-00000004")
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4]


# Disks and folders


class Full(io.FileIO):
    """A disk with room for a little more."""

    def write(self, data):
        if self.tell() + len(data) > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk(asynchronous, folder, capsys, monkeypatch):
    """The run ends with the message, what was begun is given back, and the old checkpoints go on where they were."""
    run = {"asynchronous_saves": asynchronous, "save_every": 20, "steps": 80}
    monkeypatch.setattr(writer, "open", lambda path, mode: Full(path, "w"), raising=False)
    expected = [r"could not be written.*No space left on device", "checkpoints saved before are as they were"]
    refused(capsys, folder, 1, *expected, keeps=saved, run=run)
    assert rows_of(folder)[-1]["step"] < 40, "noticed only by the next save"
    monkeypatch.undo()
    assert train(folder, run={**run, "steps": 22}).step == 22


def test_the_last_save_on_a_full_disk(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(writer, "open", lambda path, mode: Full(path, "w"), raising=False)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(tmp_path, run={"steps": 2})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def fill_on_one_rank(values):
    if os.environ["RANK"] == "1":
        writer.open = lambda path, mode: Full(path, "w")
    return train_there(values)


def test_a_full_disk_under_one_of_two_ranks(ranks, folder):
    """All ranks end with the message, and none is left waiting."""
    before = saved(folder)
    with pytest.raises(RankError) as raised:
        ranks.run(2, fill_on_one_rank, values_of(folder, run={"steps": 80, "save_every": 20}, data={"batch": 1}))
    assert rows_of(folder)[-1]["step"] < 40
    assert "raised: rank 0, 1" in str(raised.value)
    assert str(raised.value).count("No space left on device") >= 2
    assert saved(folder) == before


def test_a_file_where_the_folder_should_be(tmp_path, capsys):
    (tmp_path / "run").write_text("a file of the user's")
    expected = r"run could not be written: (File exists|Not a directory)"
    refused(capsys, tmp_path / "run", 1, expected, keeps=Path.read_text)


def test_two_runs_in_one_folder(folder, capsys):
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        expected = r"Another process is training in .*run; expected one at a time"
        refused(capsys, folder, 1, expected, keeps=saved)


# Settings that cannot be

SETTINGS = {
    "device budget": (2, {"offload": {"device_budget": "1KiB"}}, r"device_budget.*1\.0 KiB.*slots"),
    "host budget": (2, {"offload": {"host_budget": "10KiB"}}, r"host_budget"),
    "device": (2, {"run": {"device": "xpu"}}, r"run\.device='xpu' expects such an accelerator; found none"),
    "stages": (
        2,
        {"parallel": {"stages": 2}, "data": {"micro_batches": 2}},
        r"parallel\.stages=2 expects.*ranks.*found 1",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case, folder, capsys):
    status, sections, expected = SETTINGS[case]
    sections = {name: dict(section) for name, section in sections.items()}
    refused(capsys, folder, status, expected, keeps=saved, **sections)


def test_a_model_of_a_package_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    values = {**values_of(tmp_path), "model": {"transformers": "llama"}}
    with pytest.raises(OffstageError, match=r"model\.transformers expects the package"):
        train_there(values)


def test_stages_that_ranks_cannot_be(ranks, tmp_path):
    with pytest.raises(RankError, match=r"parallel\.fsdp=false leaves 2 ranks per stage"):
        ranks.run(2, train_there, values_of(tmp_path, parallel={"fsdp": False}))
    stages = {"stages": 2, "schedule": "Interleaved1F1B"}
    with pytest.raises(RankError, match=r"Expected from 1 to 2 pipeline stages.*found 4"):
        ranks.run(2, train_there, values_of(tmp_path, parallel=stages, data={"micro_batches": 4}))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            torch.OutOfMemoryError("out of memory. Tried\nand more"),
            r"ran out: out of memory.*mode='checkpoint' \(now 'keep'",
        ),
        (RuntimeError("kthvalue does not have a deterministic implementation, but"), r"kthvalue.*deterministic=false"),
    ],
)
def test_what_torch_says_about_the_device(raised, expected, folder, capsys, monkeypatch):
    """With what can be done about it, in our settings."""

    def fail(*_):
        raise raised

    monkeypatch.setattr(passes.Whole, "gradients", fail)
    refused(capsys, folder, 1, expected, keeps=saved)


def test_missing_data_on_all_ranks(ranks, tmp_path):
    """A message on each rank, and no rank waits for another."""
    with pytest.raises(RankError, match=r"(?s)raised: rank 0, 1.*nowhere is not there") as raised:
        ranks.run(2, train_there, values_of(tmp_path, data={"paths": ("nowhere",)}))
    assert str(raised.value).count("nowhere is not there") >= 2


def test_the_command_itself(folder):
    """As it is typed: the message, the status, no traceback."""
    command = [sys.executable, "-m", "offstage", "train", "--run.folder", str(folder), "--model.layers", "3"]
    with contextlib.suppress(KeyError):
        del os.environ["OFFSTAGE_TRACEBACK"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith("offstage: error: ")
    assert "is of another model" in found.stderr
    assert found.stderr.count("\n") == 1
