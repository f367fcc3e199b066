# SPDX-License-Identifier: Apache-2.0
"""Old weights of speculative updates that wait in host memory: it is given back behind the copies from it."""

import pytest

import offstage
from offstage.memory.arena import Arena
from offstage.optimizer.optimizer import runtime_of
from tests.support.contract import SMALL, adamw
from tests.support.lives import end_step, iterate, loss_of, stack
from tests.support.training import lazily


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_they_are_freed_behind_their_return(seed, monkeypatch):
    """To free memory is to write it: the caller's stream may still have to copy weights back, behind a step that was
    skipped. Where the step is made again, its updates come after that anyway."""
    model, closed = stack(), []
    with lazily(seed):
        optimizer = offstage.offload(
            adamw(model.parameters()), model, **SMALL, update_in_backward=True, overlap_forward=True
        )
        iterate(model, optimizer, range(5), clip=1e4)
        (engine,) = runtime_of(optimizer).engines
        (loss_of(model, 5) * float("nan")).backward()
        end_step(optimizer, 1.0)
        kept = {arena.flat.data_ptr() for arena in engine.arenas.old_weights.values()}
        close = Arena.close

        def close_checked(arena: Arena) -> None:
            if arena.flat.data_ptr() in kept:
                closed.append(arena)
                engine.transport.lanes.touch_on_host(writes=[arena.flat])
            close(arena)

        monkeypatch.setattr(Arena, "close", close_checked)
        optimizer.replan(update_in_backward=False)
        iterate(model, optimizer, range(6, 8), clip=1e4)
    assert optimizer.receipt().skipped_steps == 1
    assert len(closed) == len(kept) > 0
