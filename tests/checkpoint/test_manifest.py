# SPDX-License-Identifier: Apache-2.0
"""The manifest: a folder is complete with it and only with it, and every change to a file is seen."""

import functools
import json
import logging
import os
import re
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offstage.checkpoint import manifest
from offstage.checkpoint.manifest import (
    MANIFEST,
    FileSum,
    is_complete,
    latest,
    read_manifest,
    sum_of,
    verify,
    write_manifest,
)
from offstage.errors import CheckpointError
from tests.support import refusals

refused = functools.partial(refusals.refused, CheckpointError)
FILES = {
    ".metadata": b"\x80\x04metadata",
    "__0_0.distcp": bytes(range(100)),
    "__1_0.distcp": b"",
    "__2_0.distcp": b"\0",
}
ABOUT = {"number": 3, "world": [2, 2], "model": "größer", "loss": 0.25, "none": None}


def make(folder: Path, files=FILES, about=ABOUT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_manifest(folder, {name: sum_of(folder / name) for name in files}, about=about)
    return folder


# Complete or not #


def test_what_is_written_is_read(tmp_path):
    before = time.time_ns()
    folder = make(tmp_path / "a")
    found = read_manifest(folder)
    assert found.files == {name: FileSum(len(content), zlib.crc32(content)) for name, content in FILES.items()}
    assert found.about == ABOUT
    assert before <= found.saved_at <= time.time_ns()
    assert is_complete(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, MANIFEST])  # no temporary file
    verify(folder)
    verify(folder, checksums=False)


def test_what_is_said_about_a_checkpoint_is_plain_data(tmp_path):
    """Tuples become lists and keys strings before the checksum is taken; what JSON cannot say is refused."""
    folder = make(tmp_path / "a", about={"shape": (2, 3), 10: "ten", 9: "nine"})
    assert read_manifest(folder).about == {"shape": [2, 3], "10": "ten", "9": "nine"}
    for about in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            make(tmp_path / "b", about=about)
        assert not is_complete(tmp_path / "b")


def test_a_checksum_of_a_file_of_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_READ_BYTES", 100)
    content = os.urandom(1001)
    (tmp_path / "x").write_bytes(content)
    assert sum_of(tmp_path / "x") == FileSum(1001, zlib.crc32(content))


def test_without_a_manifest_a_folder_is_incomplete(tmp_path):
    folder = make(tmp_path / "a")
    (folder / MANIFEST).unlink()
    assert not is_complete(folder)
    assert not is_complete(tmp_path / "nowhere")
    refused(
        lambda: read_manifest(folder), str(folder / MANIFEST), "incomplete", "interrupted or is not over", "another"
    )
    refused(lambda: verify(folder), "incomplete")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_save_interrupted_before_the_rename_is_incomplete(call, tmp_path, monkeypatch):
    """What the last step would do is in a file of another name; writing again succeeds."""
    folder = tmp_path / "a"

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(folder)
    assert not is_complete(folder)
    make(folder)
    verify(folder)


def test_the_manifest_is_on_disk_before_its_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor):
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def watched_replace(path, target):
        assert (path.parent / path.name).stat().st_size > 0
        events.append(f"rename {Path(target).name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    make(tmp_path / "a")
    assert events == [f"sync .{MANIFEST}.tmp", f"rename {MANIFEST}", "sync a"]


# Damage #


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_seen(name, tmp_path):
    folder = make(tmp_path / "a")
    content = FILES[name]
    for length in range(len(content)):
        (folder / name).write_bytes(content[:length])
        for checksums in (True, False):
            refused(
                lambda checksums=checksums: verify(folder, checksums=checksums),
                f"{name}: expected {len(content)} bytes; found {length}.",
            )
    (folder / name).write_bytes(content + b"\0")
    refused(lambda: verify(folder, checksums=False), f"{name}: expected {len(content)} bytes")
    (folder / name).write_bytes(content)
    verify(folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make(tmp_path_factory.mktemp("sound") / "a")


@given(st.data())
@settings(deadline=None)
def test_flipped_bits_are_seen(sound, data):
    folder = sound
    name = data.draw(st.sampled_from([name for name, content in FILES.items() if content]))
    damaged = bytearray(FILES[name])
    for bit in data.draw(st.sets(st.integers(0, 8 * len(damaged) - 1), min_size=1, max_size=3)):
        damaged[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(damaged)
    message = str(refused(lambda: verify(folder), name, f"expected checksum {zlib.crc32(FILES[name]):08x}"))
    assert f"found {zlib.crc32(bytes(damaged)):08x}" in message
    verify(folder, checksums=False)  # sizes are as they were
    verify(folder, set(FILES) - {name})
    (folder / name).write_bytes(FILES[name])
    verify(folder)


def test_every_flipped_bit_of_the_manifest_is_seen(tmp_path):
    folder = make(tmp_path / "a")
    content = (folder / MANIFEST).read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / MANIFEST).write_bytes(damaged)
        refused(lambda: verify(folder), str(folder / MANIFEST))
        assert not is_complete(folder)


def test_every_truncated_manifest_is_seen(tmp_path):
    folder = make(tmp_path / "a")
    content = (folder / MANIFEST).read_bytes()
    for length in range(len(content) - 1):  # without the newline at its end it says the same
        (folder / MANIFEST).write_bytes(content[:length])
        refused(lambda: verify(folder), str(folder / MANIFEST), "damaged")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}", '{"crc32": 3}', "[" * 100_000, "\ud800", "NaN"])
def test_something_else_of_that_name_is_refused(text, tmp_path):
    folder = make(tmp_path / "a")
    (folder / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(lambda: read_manifest(folder), str(folder / MANIFEST), "damaged")


def rewrite(folder: Path, **changes) -> Path:
    """Change the manifest and make its checksum right."""
    content = json.loads((folder / MANIFEST).read_text()) | changes
    content["crc32"] = manifest._own_sum(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    return folder


def test_other_versions_and_files_outside_are_refused(tmp_path):
    folder = rewrite(make(tmp_path / "a"), version=2)
    refused(lambda: read_manifest(folder), MANIFEST, "expected version 1", "found version 2", "offstage that saved it")
    for name in ("../x", "/etc/passwd", "a/../../x"):
        folder = rewrite(make(tmp_path / "a"), files={name: {"bytes": 0, "crc32": 0}})
        refused(lambda: read_manifest(folder), MANIFEST, name, "no file of a checkpoint")  # noqa: B023
    folder = rewrite(make(tmp_path / "a"), files={"x": 3})
    refused(lambda: read_manifest(folder), MANIFEST, "damaged")


def test_another_layout_of_the_same_content_is_fine(tmp_path):
    folder = rewrite(make(tmp_path / "a"))
    assert "\n" not in (folder / MANIFEST).read_text()
    verify(folder)


def test_all_bad_files_are_named_up_to_five(tmp_path):
    files = {f"__{number}_0.distcp": b"x" * 10 for number in range(7)} | {".metadata": b"x" * 10}
    folder = make(tmp_path / "a", files)
    (folder / "__0_0.distcp").unlink()
    (folder / "__3_0.distcp").write_bytes(b"x" * 9)
    (folder / "__5_0.distcp").write_bytes(b"y" * 10)
    message = str(
        refused(
            lambda: verify(folder, threads=3),
            str(folder),
            "3 of 8 files",
            "__0_0.distcp: expected 10 bytes; found No such file",
            "__3_0.distcp: expected 10 bytes; found 9",
            "__5_0.distcp: expected checksum",
            "Use another checkpoint",
        )
    )
    assert "__1_0" not in message
    for name in files:
        (folder / name).write_bytes(b"")
    message = str(refused(lambda: verify(folder), "8 of 8 files", "And 3 more."))
    assert sum(name in message for name in files) == 5


def test_only_the_files_asked_for_are_looked_at(tmp_path):
    folder = make(tmp_path / "a")
    (folder / "__0_0.distcp").unlink()
    verify(folder, [".metadata", "__1_0.distcp"])
    verify(folder, [])
    refused(lambda: verify(folder, ["__0_0.distcp"]), "1 of 1 files", "__0_0.distcp")
    refused(lambda: verify(folder, ["other"]), "other: expected in manifest.json; found no entry")
    (folder / "__0_0.distcp").mkdir()
    refused(lambda: verify(folder), "__0_0.distcp")


def test_files_that_nobody_saved_do_not_matter(tmp_path):
    folder = make(tmp_path / "a")
    (folder / "notes.txt").write_text("mine")
    verify(folder)


# The newest #


def test_latest_is_the_newest_complete_one(tmp_path, caplog):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    for name in ("step-30", "step-4", "step-100"):  # neither the order of names nor of numbers
        make(tmp_path / name)
    assert latest(tmp_path) == tmp_path / "step-100"
    make(tmp_path / "step-4")
    os.utime(tmp_path / "step-4" / MANIFEST, (1, 1))  # what the manifest says, not what a copy's time says
    assert latest(tmp_path) == tmp_path / "step-4"
    interrupted = make(tmp_path / "step-5")
    (interrupted / MANIFEST).rename(interrupted / f".{MANIFEST}.tmp")
    (tmp_path / "notes.txt").write_text("not a folder")
    make(tmp_path / "kept" / "step-6")  # not directly under it
    with caplog.at_level(logging.WARNING, "offstage"):
        assert latest(tmp_path) == tmp_path / "step-4"
    assert not caplog.records
    damaged = make(tmp_path / "step-7")
    (damaged / MANIFEST).write_bytes((damaged / MANIFEST).read_bytes()[:-9])
    with caplog.at_level(logging.WARNING, "offstage"):
        assert latest(tmp_path) == tmp_path / "step-4"
    assert str(damaged) in caplog.text


def test_the_order_is_that_of_the_saves_even_if_the_clock_is_set_back(tmp_path, monkeypatch):
    make(tmp_path / "first")
    hour = 3600 * 10**9
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - hour)
    for name in ("second", "next"):  # neither the clock nor the names
        make(tmp_path / name)
        assert latest(tmp_path) == tmp_path / name
    assert manifest.complete_in(tmp_path) == [tmp_path / name for name in ("first", "second", "next")]


def test_a_clock_that_stands_at_the_end_of_time(tmp_path):
    rewrite(make(tmp_path / "a"), saved_at=2**63 - 1)
    make(tmp_path / "b")
    assert latest(tmp_path) == tmp_path / "b"


def test_a_relative_root_and_a_later_chdir(tmp_path, monkeypatch):
    folder = make(tmp_path / "root" / "a")
    monkeypatch.chdir(tmp_path)
    found = latest("root")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert found == folder
    verify(found)


# From others #

ENTRY = {"bytes": 3, "crc32": 0}
LISTED = {".metadata": ENTRY}
ODD = {
    "no files": {"files": {}},
    "only data files": {"files": {"__0_0.distcp": ENTRY}},
    "a list of files": {"files": [".metadata"]},
    "null": {"files": None},
    "another name": {"files": LISTED | {"notes.txt": ENTRY}},
    "the manifest itself": {"files": LISTED | {MANIFEST: ENTRY}},
    "a folder below": {"files": LISTED | {"a/__0_0.distcp": ENTRY}},
    "an entry without a checksum": {"files": {".metadata": {"bytes": 3}}},
    "an entry with more": {"files": {".metadata": ENTRY | {"more": 1}}},
    "a negative size": {"files": {".metadata": ENTRY | {"bytes": -1}}},
    "a size that is true": {"files": {".metadata": ENTRY | {"bytes": True}}},
    "half a byte": {"files": {".metadata": ENTRY | {"bytes": 0.5}}},
    "a checksum of 33 bits": {"files": {".metadata": ENTRY | {"crc32": 2**32}}},
    "a time that is text": {"saved_at": "now"},
    "a time before 1970": {"saved_at": -1},
    "a time after all": {"saved_at": 10**300},
    "about nothing": {"about": None},
    "a version that is text": {"version": "1"},
    "a version that is true": {"version": True},
    "one more field": {"more": 1},
}
MISSING = ["format", "version", "saved_at", "about", "files", "crc32"]


def odd(folder, how) -> Path:
    if how in ODD:
        return rewrite(make(folder), **ODD[how])
    path = make(folder) / MANIFEST
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != how}
    if how != "crc32":
        content["crc32"] = manifest._own_sum({key: value for key, value in content.items() if key != "crc32"})
    path.write_text(json.dumps(content))
    return folder


def put_there(path, what):
    """Something that is no manifest at all, under its name."""
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a device":
        path.symlink_to("/dev/zero")
    elif what == "a folder":
        path.mkdir()
    elif what == "a link in a circle":
        path.symlink_to(path.name)
    elif what == "a link to nothing":
        path.symlink_to("nothing")
    elif what == "a huge file":
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.write_bytes({"nothing": b"", "zeros": bytes(1000), "text": b"{" * 10_000, "digits": b"9" * 5000}[what])


THINGS = ["a pipe", "a device", "a folder", "a link in a circle", "a link to nothing", "a huge file"]
THINGS += ["nothing", "zeros", "text", "digits"]


@pytest.mark.parametrize("how", [*ODD, *MISSING, *THINGS])
def test_one_odd_folder_is_passed_over_and_named(how, tmp_path, caplog):
    """It is newer than the sound one, and neither hides it nor hangs nor takes much memory."""
    sound = make(tmp_path / "sound")
    folder = tmp_path / "odd"
    if how in THINGS:
        (make(folder) / MANIFEST).unlink()
        put_there(folder / MANIFEST, how)
    else:
        odd(folder, how)
    with caplog.at_level(logging.WARNING, "offstage"):
        assert latest(tmp_path) == sound
    assert re.search(f"passed over a checkpoint: {re.escape(str(folder / MANIFEST))}: expected", caplog.text)
    assert not is_complete(folder)
    message = str(refused(lambda: verify(folder), str(folder / MANIFEST)))
    assert len(message) < 1000
    make(tmp_path / "next")
    assert latest(tmp_path) == tmp_path / "next"


@pytest.mark.parametrize("what", ["a pipe", "a device", "a folder", "a link in a circle"])
def test_a_file_of_the_checkpoint_that_is_no_file(what, tmp_path):
    folder = make(tmp_path / "a")
    (folder / "__1_0.distcp").unlink()
    put_there(folder / "__1_0.distcp", what)
    for checksums in (True, False):
        refused(lambda checksums=checksums: verify(folder, checksums=checksums), "__1_0.distcp: expected", "found")


def test_what_is_no_path_is_refused(tmp_path, monkeypatch):
    for folder in (3, b"bytes", "null\0byte"):
        refused(lambda folder=folder: verify(folder), "Expected the path of a folder", repr(folder))
        refused(lambda folder=folder: latest(folder), "Expected the path of a folder", repr(folder))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused(lambda: latest("checkpoints"), "Expected the path of a folder", "'checkpoints'")


def test_a_root_that_cannot_be_listed(tmp_path, monkeypatch):
    def listdir(path):
        raise PermissionError(13, "Permission denied")

    make(tmp_path / "a")
    monkeypatch.setattr(os, "listdir", listdir)
    refused(lambda: latest(tmp_path), str(tmp_path), "Permission denied", "who may read it")
