# SPDX-License-Identifier: Apache-2.0
"""The processes that distributed tests run on: what went wrong on one of them is seen, and soon."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError

ROOT = Path(__file__).parent.parent.parent


def total(start):
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    return value, dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"], torch.get_num_threads()


def raise_on_last():
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("no such luck")
    dist.barrier()


def raise_everywhere():
    raise ValueError(f"rank {dist.get_rank()} is unlucky")


def hang_without_the_last():
    if dist.get_rank() < dist.get_world_size() - 1:
        print("waiting in vain")  # noqa: T201
        dist.barrier()


def kill_itself():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def leave_a_mark():
    torch.manual_seed(dist.get_rank())
    before, torch._left_behind = getattr(torch, "_left_behind", None), True
    return before, os.getpid()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_rank_answers_in_its_place(ranks, num_ranks):
    expected = sum(range(5, 5 + num_ranks))
    for rank, (value, *rest) in enumerate(ranks.run(num_ranks, total, 5)):
        assert value == expected
        assert rest == [rank, num_ranks, str(num_ranks), 1]


def test_a_run_knows_nothing_of_the_one_before(ranks):
    first, second = ranks.run(2, leave_a_mark), ranks.run(2, leave_a_mark)
    assert [before for before, _ in first + second] == [None] * 4
    assert len({pid for _, pid in first + second}) == 4


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (raise_on_last, ["raised: rank 2", "ended when another failed: rank 0, 1", "no such luck", "in barrier"]),
        (raise_everywhere, ["raised: rank 0, 1, 2", "rank 0 is unlucky", "rank 2 is unlucky"]),
        (hang_without_the_last, ["hung for 5 s: rank 0, 1", "returned: rank 2", "waiting in vain", "in barrier"]),
        (kill_itself, ["died: rank 0", "SIGSEGV", "in kill_itself"]),
    ],
)
def test_failures_are_shown_soon_and_the_next_run_works(ranks, function, says):
    ranks.run(1, total, 0)  # the server has started
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(3, function, timeout=5)
    assert time.monotonic() - start < 20
    for fragment in says:
        assert fragment in str(caught.value)
    assert ranks.run(2, total, 0)[1][0] == 1


def test_nothing_is_left_when_the_session_is_killed():
    """kill -9 of the session in the middle of a run: the server and its ranks go too."""
    script = (
        "from tests.support.ranks import Ranks\n"
        "from tests.distributed import test_ranks\n"
        "if __name__ == '__main__':\n"
        "    Ranks().run(2, test_ranks.tell_and_hang)\n"
    )
    session = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with session:
        pids = [int(session.stdout.readline()) for _ in range(3)]
        session.kill()
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} are left: {[pid for pid in pids if _lives(pid)]}"
        time.sleep(0.05)


def tell_and_hang():
    # The output of ranks goes to files; that of their server is the session's.
    with open(f"/proc/{os.getppid()}/fd/1", "w") as output:
        output.write(f"{os.getpid()}\n" + (f"{os.getppid()}\n" if dist.get_rank() == 0 else ""))
    time.sleep(60)


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
