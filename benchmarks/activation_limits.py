# SPDX-License-Identifier: Apache-2.0
"""Activations offloaded beside the optimizer's state, at a limit of memory, and for long. For `activations.py`."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import offstage
from benchmarks.activation_loop import (
    SMALL_TENSORS,
    Bench,
    Loop,
    Mixed,
    against,
    clean_up,
    moved,
    share,
)
from benchmarks.anywhere import (
    DEVICE,
    Row,
    allocated_bytes,
    at_least,
    at_most,
    peak_bytes,
    reset_peak,
    synchronize,
)
from benchmarks.checkpoints import SMALL_CHUNKS
from benchmarks.common import rss_bytes
from benchmarks.overlap import IN_BACKWARD, OVERLAP_FORWARD, RECEIPT_FIELDS, gib, rounded
from benchmarks.workload import Size, adamw, build, tokens
from offstage.activations.offload import offload_activations

DEVICE_LIMIT = 24 * 2**30
STEPS = {"full": 4096, "small": 16}
"""Sequences that are tried are multiples of it."""
MAX_TRIES = 8
STATES: Mapping[str, Mapping[str, Any]] = {
    "resident": {"fraction": 0.0, "master_weights": "fp32"},
    "in_backward": IN_BACKWARD,
    "window": {**OVERLAP_FORWARD, "window": "8GiB"},
}
THOUSAND = Size(blocks=4, width=512, hidden=1024, heads=4, vocabulary=1000, sequence=2048)


# Beside state


def offloaded_training(bench: Bench, config: Mapping[str, Any]) -> Loop:
    """The workload with every block checkpointed, under `offload()`."""
    if not bench.is_full:
        config = {**config, **SMALL_CHUNKS, **SMALL_TENSORS, **({"window": "256KiB"} if "window" in config else {})}
    model = build(bench.size, kind=Mixed)
    model.recomputed = frozenset(range(bench.size.blocks))
    return Loop(model, offstage.offload(adamw(model), model, **config))


def with_state(bench: Bench) -> Iterator[Row | None]:
    bench.drop_model()
    done: dict[tuple[str, bool], Row] = {}
    for state, config in STATES.items():
        loops: list[Loop] = []
        for leaves in (False, True):
            row = bench.attempt(
                f"{state}_state{'_and_activations' * leaves}",
                lambda state=state, config=config, leaves=leaves, loops=loops: (  # type: ignore[misc]
                    state_row(bench, state, config, leaves, loops)
                ),
            )
            if row is not None:
                done[state, leaves] = row
                if leaves:
                    row |= beside(bench, row, done)
            yield row
        while loops:  # no name may keep it beside the next case
            closed = loops.pop().optimizer
            assert closed is not None
            closed.close()
            del closed
        clean_up()


def state_row(bench: Bench, state: str, config: Mapping[str, Any], leaves: bool, loops: list[Loop]) -> Row:
    if not loops:
        clean_up()
        loops.append(offloaded_training(bench, config))
    loop = loops[0]
    assert loop.optimizer is not None
    begins_with = {"case": f"{state}_state{'_and_activations' * leaves}", "state": dict(config)}
    # Hook counts are learned, and a window opens, in the first iterations.
    row = bench.row(
        loop, begins_with, {} if leaves else None, warm_up=2 if leaves else 4, iterations=min(3, bench.iterations)
    )
    receipt = loop.optimizer.receipt()
    return {
        **row,
        "host_state_gib": gib(receipt.host_state_bytes),
        "receipt": {name: rounded(getattr(receipt, name, None)) for name in RECEIPT_FIELDS},
        "fallbacks": list(receipt.fallbacks),
    }


def beside(bench: Bench, row: Row, done: Mapping[tuple[str, bool], Row]) -> Row:
    """Both, over state alone; and whether each moved what it moves alone."""
    state = next(name for (name, leaves), other in done.items() if other is row)
    alone, resident = done.get((state, False)), done.get(("resident", False))
    result = against(row, alone)
    if resident is not None:
        result["ratio_to_resident"] = round(row["median_ms"] / resident["median_ms"], 4)
    activations = done.get(("resident", True))
    if not bench.is_full or alone is None or activations is None:
        return result
    fetched, fetched_alone = (one["receipt"]["bytes_fetched"] for one in (row, alone))
    result["must"] = {
        "left_gib": at_least(activations["left_gib"], row["left_gib"]),
        "state_bytes_fetched": at_least(fetched_alone, fetched),
    }
    if state == "in_backward":  # no gradient stays here, so the peak should be that of activations
        result["must"]["peak_lower_share"] = at_least(0.85, result["peak_lower_share"])
    return result


# At a limit of memory


def longest_sequence(bench: Bench) -> Iterator[Row | None]:
    bench.drop_model()
    without = bench.attempt("longest_checkpointed", lambda: longest(bench, "longest_checkpointed", None, ()))
    yield without
    # What was the longest without is a try as well: what does a token cost there?
    same = without["sequence"] if without is not None else 0
    first = (same // 2, same) if same > 2 * STEPS[bench.size_name] else ()
    ours = bench.attempt("longest_inputs_offloaded", lambda: longest(bench, "longest_inputs_offloaded", {}, first))
    if ours is not None and without is not None:
        ours |= {"times_longer": round(ours["sequence"] / without["sequence"], 3)}
        at_same = ours["tries"].get(str(same), {}).get("ms_per_1k_tokens")
        if at_same is not None:
            ours["ratio_at_the_same_length"] = round(at_same / without["ms_per_1k_tokens"], 4)
        if bench.is_full:
            ours["must"] = {"times_longer": at_least(1.0, ours["times_longer"])}
    yield ours


def longest(bench: Bench, name: str, config: Mapping[str, Any] | None, first: Sequence[int]) -> Row:
    """`first`, then doubling; then where two peaks say that it must end, and one step more."""
    step = STEPS[bench.size_name]
    tries: dict[int, Row] = {}
    wanted = [2 * step, *first]
    length: int | None = wanted.pop(0)
    trial: Trial | None = None
    with device_limit():
        while length is not None and len(tries) < MAX_TRIES:
            trial = trial or Trial(bench, config, 2 * step)
            tries[length] = trial.train(length)
            bench.say(f"    {length} tokens: {tries[length]}")
            if "failed" in tries[length]:
                trial.close()
                trial = None  # its step is lost
            length = wanted.pop(0) if wanted else next_length(tries, step)
        if trial is not None:
            trial.close()
    best = max(length for length, found in tries.items() if "failed" not in found)
    return {
        "case": name,
        "size": bench.size_name,
        "config": config,
        "state": dict(IN_BACKWARD),
        "device_limit_gib": gib(DEVICE_LIMIT),
        "sequence": best,
        **tries[best],
        "is_found": (best + step) in tries,
        "tries": {str(length): found for length, found in sorted(tries.items())},
    }


@contextlib.contextmanager
def device_limit() -> Iterator[None]:
    if DEVICE.type == "cpu":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(DEVICE_LIMIT / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def next_length(tries: Mapping[int, Row], step: int) -> int | None:
    """The sequence to try next; `None` when the longest is found."""
    good = sorted(length for length, found in tries.items() if "failed" not in found)
    bad = min((length for length, found in tries.items() if "failed" in found), default=None)
    if not good:
        return min(tries) // 2 // step * step or None
    if bad is None and good[-1] < 8 * step:
        return 2 * good[-1]
    if DEVICE.type == "cpu" or (bad is not None and bad - good[-1] <= step):
        return None  # a machine without a device has no limit to find
    guess = bad
    if len(good) > 1:
        one, two = (tries[length]["peak_gib"] for length in good[-2:])
        by_token = max(1e-9, (two - one) / (good[-1] - good[-2]))
        guess = good[-1] + int((0.98 * gib(DEVICE_LIMIT) - two) / by_token)  # the allocator needs a little as well
    if bad is not None and (guess is None or guess >= bad):
        guess = (good[-1] + bad) // 2
    assert guess is not None
    return max(min(guess, 2 * good[-1]) // step * step, good[-1] + step)


class Trial:
    """The workload in a limited device: state offloaded and updated in backward, one sequence at a time."""

    def __init__(self, bench: Bench, config: Mapping[str, Any] | None, learning_length: int) -> None:
        clean_up()
        self._bench = bench
        self._loop = offloaded_training(bench, IN_BACKWARD)
        self._handle = None if config is None else bench.offload_activations(self._loop.model, config)
        for _ in range(4):  # hook counts are learned in the first iterations, in which gradients stay
            self._loop.iterate(self._batch(learning_length))

    def _batch(self, length: int) -> torch.Tensor:
        generator = torch.Generator(DEVICE).manual_seed(length)
        vocabulary = self._bench.size.vocabulary
        return torch.randint(vocabulary, (1, length), generator=generator, device=DEVICE)

    def train(self, length: int) -> Row:
        """Two iterations, the second of which is timed."""
        try:
            return self._train(length)
        except (torch.OutOfMemoryError, offstage.OffstageError) as error:
            return {"failed": f"{type(error).__name__}: {str(error)[:80]}"}

    def _train(self, length: int) -> Row:
        clean_up()
        batch = self._batch(length)
        for _ in range(2):
            synchronize()
            start = time.perf_counter()
            self._loop.iterate(batch)
            synchronize()
            ms = 1e3 * (time.perf_counter() - start)
        left = 0 if self._handle is None else self._handle.receipt().bytes_offloaded
        return {
            "median_ms": round(ms, 1),
            "ms_per_1k_tokens": round(ms / length * 1e3, 3),
            "peak_gib": gib(peak_bytes()),
            "left_gib": gib(left),
        }

    def close(self) -> None:
        assert self._loop.optimizer is not None
        ends = (
            [self._loop.optimizer.close] if self._handle is None else [self._handle.remove, self._loop.optimizer.close]
        )
        for end in ends:
            with contextlib.suppress(offstage.OffstageError, RuntimeError):  # of an iteration that has failed
                end()
        del end, ends  # or clean_up() would find them held
        del self._loop, self._handle
        clean_up()


# Growth


def thousand(bench: Bench) -> Iterator[Row | None]:
    bench.drop_model()
    yield bench.attempt("thousand", lambda: varying_lengths(bench))


def varying_lengths(bench: Bench) -> Row:
    """Sequences of 1:8 in no order; what is held after a tenth, a half, and all of the iterations."""
    size, total = (THOUSAND, 1000) if bench.is_full else (bench.size, 60)
    looks = (total // 10, total // 2, total)
    start_bytes = clean_up()
    loop = Loop(build(size, kind=Mixed))
    batch = tokens(size, 2, 0)
    lengths = random.Random(0)
    held = []
    start = time.perf_counter()
    with (
        # Others compile something for every new length, which would take most of the time.
        sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
        offload_activations(loop.model, keep_last=0, min_bytes="64KiB" if bench.is_full else "1KiB") as handle,
    ):
        for number in range(1, total + 1):
            length = lengths.randint(size.sequence // 8, size.sequence) if number > 1 else size.sequence
            loop.iterate(batch[:, :length])
            if number in looks:
                synchronize()
                bench.say(f"    {number} iterations")
                held.append(
                    {
                        "iterations": number,
                        "host_pool_bytes": handle.host_bytes,
                        "allocated_bytes": allocated_bytes(),
                        "peak_bytes": peak_bytes(),
                        "reserved_bytes": torch.cuda.memory_reserved() if DEVICE.type == "cuda" else 0,
                        "rss_gib": gib(rss_bytes()),
                    }
                )
                reset_peak()
        counted = moved(handle)
    seconds = time.perf_counter() - start
    row = {
        "case": "thousand",
        "size": bench.size_name,
        "iterations": total,
        "median_ms": round(1e3 * seconds / total, 1),
        "lengths": [size.sequence // 8, size.sequence],
        "allocated_at_start_gib": gib(start_bytes),
        "peak_gib": gib(max(look["peak_bytes"] for look in held)),
        **counted,
        "held": held,
        "growth": {name: share(held[-1][name], held[0][name]) for name in ("host_pool_bytes", "allocated_bytes")},
        "peak_growth": share(held[-1]["peak_bytes"], held[0]["peak_bytes"]),
    }
    if bench.is_full:
        grown = row["growth"]
        row["must"] = {
            "host_pool_growth": at_most(1.0, grown["host_pool_bytes"]),
            "allocated_growth": at_most(1.01, grown["allocated_bytes"]),
            "peak_growth": at_most(1.01, row["peak_growth"]),
        }
    return row
