# SPDX-License-Identifier: Apache-2.0
"""A run whose files were damaged goes on: nothing good is lost, and what was passed over is kept and named."""

import shutil

import pytest

from offstage import checkpoint
from offstage.errors import CheckpointError
from offstage.train.metrics import MetricsFile
from tests.support.trainer import differences, files_of, rows_of, train

MANIFEST = "manifest.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of 6 of 8 steps, with a checkpoint after each second."""
    folder = tmp_path_factory.mktemp("original") / "run"
    train(folder, run={"steps": 6, "save_every": 2, "keep_checkpoints": 3}, optimizer={"last_lr_share": 1.0})
    return folder


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def resumed(folder, **run):
    return train(folder, run={"steps": 8, **run}, optimizer={"last_lr_share": 1.0})


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage(folder, *steps, file="__0_0.distcp"):
    """Flip a bit in the checkpoint of each of these steps."""
    for step in steps:
        flip(folder / "checkpoints" / f"step-{step:08}" / file)


# Metrics #


@pytest.mark.parametrize(
    ("change", "dropped", "left"),
    [
        (lambda lines: lines[2].replace(b"0", b"\xff", 1), "line 3", [1, 2, 4, 5, 6]),
        (lambda lines: lines[2][:40] + b"\n", "line 3", [1, 2, 4, 5, 6]),
        (lambda lines: b"\0" * 200_000 + b"\n", "line 3", [1, 2, 4, 5, 6]),
        (lambda lines: lines[2].replace(b'"step": 3', b'"step": 33'), "line 3", [1, 2, 4, 5, 6]),
        (lambda lines: lines[2].rstrip(b"\n"), "line 3", [1, 2, 5, 6]),
    ],
    ids=["not UTF-8", "torn", "too long", "out of place", "two in one"],
)
def test_a_damaged_row(change, dropped, left, original, tmp_path):
    """In the middle: the good rows stay, and so does the whole file, under another name."""
    lines = (original / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = change(lines)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    before = path.read_bytes()
    file = MetricsFile(path, after_step=6)
    file.close()
    assert file.dropped == f"metrics.jsonl: {dropped} damaged and left out; the file as it was is kept as {ASIDE}"
    assert (tmp_path / ASIDE).read_bytes() == before
    assert [row["step"] for row in rows_of(tmp_path)] == left
    again = MetricsFile(path, after_step=5)  # rows of steps that are made again are no damage
    again.close()
    assert (again.dropped, len(rows_of(tmp_path))) == ("", len(left) - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ASIDE, "metrics.jsonl"]


ASIDE = "metrics.damaged-1.jsonl"


def test_a_run_with_damaged_rows_goes_on_and_says_so(folder, capsys):
    good = (folder / "metrics.jsonl").read_bytes()
    for number, damaged in enumerate((good.replace(b'"loss"', b'"lo\xc3s"', 1), good + b'{"step": 7, "lo'), start=1):
        (folder / "metrics.jsonl").write_bytes(damaged)
        assert resumed(folder, steps=6 + number).step == 6 + number
        said = f"damaged and left out; the file as it was is kept as metrics.damaged-{number}.jsonl"
        assert said in capsys.readouterr().out
        assert (folder / f"metrics.damaged-{number}.jsonl").read_bytes() == damaged
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6, 8]


# Checkpoints #


@pytest.mark.parametrize("file", ["__0_0.distcp", MANIFEST])
def test_a_damaged_checkpoint_is_an_error_that_names_the_way_out(file, folder):
    damage(folder, 6, file=file)
    before = files_of(folder)
    expected = rf"step-00000006.*{file}.*Nothing was changed\. .*step-00000004 is intact: run\.fallback=true continues"
    with pytest.raises(CheckpointError, match=expected):
        resumed(folder)
    assert files_of(folder) == before


@pytest.mark.parametrize(("steps", "file"), [((6,), MANIFEST), ((4, 6), "__0_0.distcp")])
def test_another_one_takes_over(steps, file, folder, original, caplog):
    """The newest that is not damaged; the steps since then are made again, and saved under the same names."""
    damage(folder, *steps, file=file)
    damaged = {step: files_of(folder / "checkpoints" / f"step-{step:08}") for step in steps}
    done = resumed(folder, fallback=True, save_every=2, keep_checkpoints=4)
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 9))
    for step in steps:
        name = f"step-{step:08}"
        assert files_of(folder / "checkpoints" / "damaged" / name) == damaged[step]
        assert f"{name} is kept as " in caplog.text
        checkpoint.verify(folder / "checkpoints" / name)
        assert differences(folder / "checkpoints" / name, original / "checkpoints" / name) == []
    assert f"continuing from {folder / 'checkpoints' / f'step-{min(steps) - 2:08}'} instead" in caplog.text
    assert checkpoint.latest(folder / "checkpoints", intact=True) == done.checkpoint
    assert done.checkpoint.name == "step-00000008"


def test_nothing_is_set_aside_where_that_does_not_help(folder):
    """All are damaged, or none is and the model is another one."""
    before = files_of(folder)
    (folder / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected shape.*Nothing was changed\. To train another model"):
        train(folder, run={"steps": 8, "fallback": True}, model={"hidden": 128})
    (folder / "run.json").write_bytes(before["run.json"])
    damage(folder, 2, 4, 6)
    damaged = files_of(folder)
    with pytest.raises(CheckpointError, match=r"No other checkpoint in .* is complete and intact"):
        resumed(folder, fallback=True)
    assert files_of(folder) == damaged
    assert checkpoint.latest(folder / "checkpoints", intact=True) is None
