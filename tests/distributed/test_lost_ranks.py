# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed in a save: the others raise within the timeout of the process group."""

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import offstage
from offstage import checkpoint
from offstage.checkpoint import saving
from offstage.checkpoint.ranks import timeout_of
from offstage.errors import CheckpointError
from offstage.train.config import ParallelSettings
from offstage.train.parallel import started
from tests.support.ranks import RankError

TIMEOUT_S = 3.0
SLACK_S = 15.0
"""For a busy machine; torch's own timeout is half an hour."""


def kill_this(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def lose_one(root, moment):
    """Rank 1 is killed in its first asynchronous save. Rank 0 writes what it raised, and after how long."""
    _set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), model, min_bytes=0)
    if dist.get_rank() == 1:
        if moment == "before the second group":
            saving.host_group = kill_this
        elif moment == "while it prepares":
            saving.AsyncSave._prepare = kill_this
        else:
            saving.Writer.write_data = kill_this
    begun = time.monotonic()
    try:
        checkpoint.async_save(root / "saved", model, optimizer).result()
    except Exception as error:
        took = time.monotonic() - begun
        (root / "raised").write_text(f"{type(error).__name__} {took} {error}")


@pytest.mark.parametrize("moment", ["before the second group", "while it prepares", "while it writes"])
def test_a_rank_is_killed_in_the_first_asynchronous_save(ranks, tmp_path, moment):
    with pytest.raises(RankError, match="returned: rank 0"):
        ranks.run(2, lose_one, tmp_path, moment, grace=TIMEOUT_S + SLACK_S)
    kind, took, message = (tmp_path / "raised").read_text().split(" ", 2)
    assert kind == CheckpointError.__name__
    assert "Start all ranks again" in message
    assert float(took) < TIMEOUT_S + SLACK_S
    assert not checkpoint.is_complete(tmp_path / "saved")


def timeouts_of_groups(seconds):
    """The groups that a save and the trainer make."""
    _set_pg_timeout(datetime.timedelta(seconds=seconds))
    with started(ParallelSettings(stages=2), torch.device("cpu")) as parallel:
        groups = [
            parallel.host_group,
            parallel.stage_group,
            *parallel.mesh.get_all_groups(),
            saving._background_group(),
        ]
        return [timeout_of(group).total_seconds() for group in groups]


def test_new_groups_take_the_timeout_of_the_group_they_are_made_from(ranks):
    assert ranks.run(2, timeouts_of_groups, 17.0) == [[17.0] * 5] * 2
