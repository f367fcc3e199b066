# SPDX-License-Identifier: Apache-2.0
"""`offstage train` says how much device memory its settings save, in its first lines and in the run's folder."""

import json

import pytest

from offstage.config import format_size
from offstage.errors import OffloadIneffectiveError
from tests.support.trainer import train


def test_a_run_says_and_records_what_it_saves(tmp_path, capsys):
    train(tmp_path, offload={"chunk_bytes": None}, run={"steps": 1})
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    about = json.loads((tmp_path / "run.json").read_text())
    assert receipt["net_saved_bytes"] == pytest.approx(about["net_saved_bytes"], rel=0.02)
    assert receipt["net_saved_bytes"] > 0.7 * receipt["host_state_bytes"]
    shown = capsys.readouterr()
    assert f": {format_size(about['net_saved_bytes'])} saved on the device, net" in shown.out + shown.err


def test_a_run_that_would_save_nothing_is_refused(tmp_path):
    wide = {"width": 128, "hidden": 256}
    with pytest.raises(OffloadIneffectiveError, match="Leave out chunk_bytes"):
        train(tmp_path, model=wide, offload={"chunk_bytes": "4MiB"})
