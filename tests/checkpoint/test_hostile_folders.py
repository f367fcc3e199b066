# SPDX-License-Identifier: Apache-2.0
"""Folders from strangers and from bad disks: no class changed, no memory for a few bytes, no process ended."""

import os
import resource
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path, PurePosixPath

import pytest
import torch
from torch import nn

import offstage
from offstage import checkpoint
from offstage.checkpoint.stored import Stored
from offstage.errors import CheckpointError
from tests.checkpoint.test_stored import full_box, read, refused, save_stock, write_folder
from tests.support import crafted

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(("module", "name"), [one for one in crafted.CLASSES if "torch" not in one[0]])
def test_metadata_changes_no_class(module, name, tmp_path):
    """A right `.metadata` that first sets an attribute of a class which the format has."""
    folder = write_folder(tmp_path / "folder", {"w": torch.ones(3)}, {})
    path = folder / ".metadata"
    path.write_bytes(crafted.metadata_with(crafted.build_on(module, name, "suffix"))(path.read_bytes()))
    refused(lambda: Stored(folder), ".metadata", f"changes {module}.{name}")
    assert PurePosixPath("a.b").suffix == ".b"


@pytest.mark.parametrize("name", ["memo of 2 GiB", "memo of 4 GiB", "string of 8 EiB", "references, doubled 60 times"])
def test_a_few_bytes_of_metadata_take_no_memory(name, tmp_path):
    (tmp_path / ".metadata").write_bytes(crafted.pickles(tmp_path / "ran")[name])
    assert (tmp_path / ".metadata").stat().st_size < 1000
    tracemalloc.start()
    try:
        refused(lambda: Stored(tmp_path), ".metadata")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("maker", "argument"), [(("builtins", "bytearray"), 2**28), (("torch", "FloatTensor"), 2**26)])
def test_a_few_bytes_of_an_object_take_no_memory(maker, argument, tmp_path):
    """`torch.load(weights_only=True)` makes both."""
    number = b"\x8a\x05" + argument.to_bytes(5, "little")
    content = crafted.zipped({"data.pkl": b"\x80\x02" + crafted.call(*maker, number) + b"."})
    folder = write_folder(tmp_path / "folder", {}, {}, {"x": 1}, files=1)
    crafted.put_item(folder, "x", content)
    with Stored(folder) as opened:
        refused(lambda: opened.object("x"), "'x'", ".distcp", "found")


def test_a_metadata_file_that_is_too_large(tmp_path):
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(2**40)
    refused(lambda: Stored(tmp_path), ".metadata", "at most")


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    """In a process of its own: reading a mapping beyond the file's end would end it."""
    write_folder(tmp_path / "folder", {"w": torch.arange(2.0**20)}, {}, files=1)
    script = """
        import os, sys, torch
        from pathlib import Path
        from offstage.checkpoint.parts import Box
        from offstage.checkpoint.stored import Stored
        from offstage.errors import CheckpointError

        folder = Path(sys.argv[1])
        with Stored(folder) as opened:
            opened.read("w", Box((0,), (9,)), torch.empty(9))
            os.truncate(folder / "__0_0.distcp", 2**16)
            for dtype in (torch.float32, torch.float64):
                try:
                    opened.read("w", Box((0,), (2**20,)), torch.empty(2**20, dtype=dtype))
                except CheckpointError as error:
                    sys.stdout.write(str(error))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "folder")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result
    assert result.stdout.count("The file is truncated") == 2


def test_more_files_than_a_process_may_open(tmp_path):
    tensors = {f"t{number}": torch.full((3,), float(number)) for number in range(120)}
    folder = write_folder(tmp_path / "folder", tensors, {}, files=120)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
    try:
        with Stored(folder) as opened:
            for name, tensor in tensors.items():
                assert torch.equal(read(opened, name), tensor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_missing_is_found_before_the_first_write(tmp_path):
    """The last file of a stock folder is truncated: the first tensors could have been loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), min_bytes=0)
    weights = {f"model.{name}": torch.ones_like(value) for name, value in model.state_dict().items()}
    folder = save_stock(tmp_path / "folder", weights)
    before = [param.detach().clone() for param in model.parameters()]
    path = next(folder.glob("*.distcp"))
    os.truncate(path, path.stat().st_size - 1)
    refused(lambda: checkpoint.load(folder, model), str(path), "truncated")
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    optimizer.close()


def test_a_link_that_leaves_the_folder(tmp_path):
    folder = write_folder(tmp_path / "folder", {"w": torch.ones(3)}, {}, files=1)
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with Stored(folder) as opened:
        refused(lambda: read(opened, "w"), "a link to", str(tmp_path / "elsewhere"), "Copy")
    (tmp_path / "link").symlink_to(folder)
    (folder / "__0_0.distcp").unlink()
    (tmp_path / "elsewhere").rename(folder / "real")
    (folder / "__0_0.distcp").symlink_to("real")
    with Stored(tmp_path / "link") as opened:  # the folder may be a link
        assert torch.equal(read(opened, "w"), torch.ones(3))


def test_a_box_of_a_chunk_is_checked_without_reading_it(tmp_path):
    folder = write_folder(tmp_path / "folder", {"w": torch.ones(3)}, {}, files=1)
    with Stored(folder) as opened:
        opened.check("w", full_box(torch.ones(3)))
        (folder / "__0_0.distcp").unlink()
        opened.close()
        with pytest.raises(CheckpointError, match="No such file"):
            opened.check("w", full_box(torch.ones(3)))
