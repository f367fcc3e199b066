# SPDX-License-Identifier: Apache-2.0
"""What does it cost, and what does it save, when activations wait for backward on the host?

    python -m benchmarks.activations                        every case, about five minutes on one H200
    python -m benchmarks.activations checkpointed plain     these cases
    python -m benchmarks.activations --size small           a few seconds on any machine: does every case run?

The 2.70B workload, 8 x 2048 tokens, and the same without checkpointing. Unless a case says otherwise, no gradient
stays: each is used when it comes, by SGD on the device. So the link carries activations only, and the peak is theirs.
`ratio` is the median time of an iteration over that of the same without offload, in the same process;
`peak_lower_share` is by how much the peak is lower, over the bytes that left in a forward, and
`forward_end_lower_share` the same at the end of forward; `must` is what a row has to reach, and whether it did.

checkpointed      every block checkpointed, and the same with the blocks' inputs offloaded
plain             nothing checkpointed, and as much offloaded as the link carries under forward
everything        all saved tensors offloaded, against `torch.autograd.graph.save_on_cpu(pin_memory=True)`
frontier          peak and time of mixes of keep, offload and recompute
with_state        together with `offload()` of the optimizer: each alone, and both
longest_sequence  the longest sequence that trains in 24 GiB, state offloaded; its tries are in the row
thousand          1,000 iterations with sequences of 1:8: does anything grow?
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import common, harness
from benchmarks.activation_loop import DEVICE_LIMIT, WARM_UP, Bench, Loop, Trial, against, device_limit, moved
from benchmarks.common import ON_GPU, Row, gib, synchronize
from benchmarks.harness import Case, at_least, at_most, is_met, say
from benchmarks.workload import IN_BACKWARD, OVERLAP_FORWARD, RESIDENT, Size, build, tokens
from offstage.activations.offload import offload_activations

LINK_FULL = ({"layers": 7}, {"layers": 8}, {"fraction": 0.2}, {"fraction": 0.24})
"""What may fill the link under forward. Of those that cost little enough, the one that moves most counts."""
MIXES = ((0, 0), (4, 0), (7, 0), (7, 8), (7, 16), (7, 24), (4, 27), (0, 31), (16, 15))
"""Blocks of 32 that offload, and that recompute with their inputs offloaded; the others keep."""
STEPS = {"full": 4096, "small": 16}
"""Sequences that are tried are multiples of it."""
MAX_TRIES = 8
STATES: Mapping[str, Mapping[str, Any]] = {
    "resident": RESIDENT,
    "in_backward": IN_BACKWARD,
    "window": {**OVERLAP_FORWARD, "window": "8GiB"},
}
THOUSAND = Size(blocks=4, width=512, hidden=1024, heads=4, vocabulary=1000, sequence=2048)


# The cases without an optimizer


def checkpointed(bench: Bench) -> Iterator[Row | None]:
    every = range(bench.size.blocks)
    first = bench.measure("checkpointed", recomputed=every, warm_up=WARM_UP + 1)
    yield first
    ours = bench.measure("checkpointed_inputs_offloaded", {}, recomputed=every)
    second = bench.measure("checkpointed_again", recomputed=every)
    yield second
    if ours is not None:
        ours |= against(ours, first, second)
        if bench.is_full and "ratio" in ours:
            ours["must"] = {
                "ratio": at_most(1.02, ours["ratio"]),
                "peak_lower_share": at_least(0.85, ours["peak_lower_share"]),
            }
    yield ours


def plain(bench: Bench) -> Iterator[Row | None]:
    first = bench.measure("plain")
    yield first
    tries = []
    for config in LINK_FULL:
        row = bench.measure("plain_offloaded", config)
        if row is not None:
            row |= against(row, first)
            tries.append(row)
        yield row
    compared = [{**row, "must": link_full(row)} for row in tries if "ratio" in row]
    if compared and bench.is_full:
        # Those that have reached everything first, and of them the one that moved most; or else the fastest.
        best = max(compared, key=lambda row: (is_met(row), row["left_gib"] if is_met(row) else -row["ratio"]))
        yield {**best, "case": "plain_link_full"}


def link_full(row: Row) -> Row:
    return {
        "ratio": at_most(1.05, row["ratio"]),
        "left_gib": at_least(7, row["left_gib"]),
        "peak_lower_share": at_least(0.6, row["peak_lower_share"]),
    }


def everything(bench: Bench) -> Iterator[Row | None]:
    ours = bench.measure("everything", {"keep_last": 0, "min_bytes": 0}, warm_up=2, iterations=3)
    theirs = bench.measure("save_on_cpu", warm_up=1, iterations=1, around=lambda: save_on_cpu(pin_memory=True))
    yield theirs
    if ours is not None and theirs is not None:
        ours |= {
            "save_on_cpu_ms": theirs["median_ms"],
            "save_on_cpu_peak_gib": theirs["peak_gib"],
            "times_faster": round(theirs["median_ms"] / ours["median_ms"], 4),
        }
        if bench.is_full:
            ours["must"] = {
                "times_faster": at_least(1.5, ours["times_faster"]),
                "peak_gib": at_most(theirs["peak_gib"], ours["peak_gib"]),
            }
    yield ours


# The frontier


def frontier(bench: Bench) -> Iterator[Row | None]:
    mixes = []
    for mix in MIXES:
        row = measure_mix(bench, *mix)
        if row is not None:
            mixes.append(row)
        yield row
    bench.failed += wrong_mixes(mixes)


def measure_mix(bench: Bench, offloaded: int, recomputed: int) -> Row | None:
    """So many blocks of 32, spread over the model: the offloaded ones evenly, of the rest the first recompute."""
    num_blocks = bench.size.blocks
    free = num_blocks - 1  # backward needs the last one at once
    num_away = min(free, round(offloaded * num_blocks / 32))
    away = {number * free // num_away for number in range(num_away)}
    others = [number for number in range(free) if number not in away]
    again = others[: round(recomputed * num_blocks / 32)]
    chosen = sorted({*away, *again})
    row = bench.measure(
        f"mix_{offloaded}_{recomputed}",
        {} if chosen else None,
        layers=[bench.blocks[number] for number in chosen] if chosen else None,
        recomputed=again,
        warm_up=1 if chosen else 2,
        iterations=min(3, bench.iterations),
    )
    return row and {**row, "offloaded": len(away), "kept": num_blocks - len(chosen)}


def wrong_mixes(mixes: Sequence[Row]) -> list[str]:
    """A mix that moves or makes again more or less than it says is none."""
    by_block = statistics.median([not_kept(row) / row["offloaded"] for row in mixes if is_only(row, "offloaded")])
    by_input = statistics.median([not_kept(row) / row["recomputed"] for row in mixes if is_only(row, "recomputed")])
    wrong = []
    for row in mixes:
        expected = row["offloaded"] * by_block + row["recomputed"] * by_input
        found = not_kept(row)
        if abs(found - expected) > 0.03 * expected:
            wrong.append(
                f"{row['case']}: {expected / 2**20:.1f} MiB should have left or been made again, found "
                f"{found / 2**20:.1f} MiB"
            )
    return wrong


def not_kept(row: Row) -> int:
    """Bytes. How much of them leaves and how much is made again depends on what the link has to carry."""
    return int(row.get("left_bytes", 0) + row.get("remade_bytes", 0))


def is_only(row: Row, what: str) -> bool:
    return bool(row[what]) and row["offloaded"] + row["recomputed"] == row[what]


# Beside state


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
        common.clean_up()


def state_row(bench: Bench, state: str, config: Mapping[str, Any], leaves: bool, loops: list[Loop]) -> Row:
    if not loops:
        common.clean_up()
        loops.append(bench.offloaded_training(config))
    loop = loops[0]
    assert loop.optimizer is not None
    # Hook counts are learned, and a window opens, in the first iterations.
    row = bench.row(loop, {} if leaves else None, 2 if leaves else 4, min(3, bench.iterations))
    about = {"case": f"{state}_state{'_and_activations' * leaves}", "state": dict(config)}
    return about | row | loop.counted()


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
            say(f"    {length} tokens: {tries[length]}")
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


def next_length(tries: Mapping[int, Row], step: int) -> int | None:
    """The sequence to try next; `None` when the longest is found."""
    good = sorted(length for length, found in tries.items() if "failed" not in found)
    bad = min((length for length, found in tries.items() if "failed" in found), default=None)
    if not good:
        return min(tries) // 2 // step * step or None
    if bad is None and good[-1] < 8 * step:
        return 2 * good[-1]
    if not ON_GPU or (bad is not None and bad - good[-1] <= step):
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


# Growth


def thousand(bench: Bench) -> Iterator[Row | None]:
    bench.drop_model()
    yield bench.attempt("thousand", lambda: varying_lengths(bench))


def varying_lengths(bench: Bench) -> Row:
    """Sequences of 1:8 in no order; what is held after a tenth, a half, and all of the iterations."""
    size, total = (THOUSAND, 1000) if bench.is_full else (bench.size, 60)
    looks = (total // 10, total // 2, total)
    start_bytes = common.clean_up()
    loop = Loop(build(size), size)
    loop.model.recomputed = ()
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
            loop.iterate_on(batch[:, :length])
            if number in looks:
                synchronize()
                say(f"    {number} iterations")
                held.append(
                    {
                        "iterations": number,
                        "host_pool_bytes": handle.host_bytes,
                        "allocated_bytes": common.allocated_bytes(),
                        "peak_bytes": common.peak_bytes(),
                        "reserved_bytes": torch.cuda.memory_reserved() if ON_GPU else 0,
                        "rss_gib": gib(common.rss_bytes()),
                    }
                )
                common.reset_peak()
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
        "growth": {
            name: common.share(held[-1][name], held[0][name]) for name in ("host_pool_bytes", "allocated_bytes")
        },
        "peak_growth": common.share(held[-1]["peak_bytes"], held[0]["peak_bytes"]),
    }
    if bench.is_full:
        grown = row["growth"]
        row["must"] = {
            "host_pool_growth": at_most(1.0, grown["host_pool_bytes"]),
            "allocated_growth": at_most(1.01, grown["allocated_bytes"]),
            "peak_growth": at_most(1.01, row["peak_growth"]),
        }
    return row


# The command


CASES: dict[str, Callable[[Bench], Iterator[Row | None]]] = {
    "checkpointed": checkpointed,
    "plain": plain,
    "everything": everything,
    "frontier": frontier,
    "with_state": with_state,
    "longest_sequence": longest_sequence,
    "thousand": thousand,
}
"""In this order: what matters most comes first."""


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--iterations", type=int, help="measured after the warm-up; long cases take fewer")
    options = harness.parse(parser, harness.cases_of(CASES))
    bench = Bench(options.size, options.iterations or (6 if options.size == "full" else 2))

    def measure(case: Case) -> Iterator[Row | None]:
        return CASES[case.name](bench)

    harness.run("activations", options.cases, measure, failed=bench.failed)


if __name__ == "__main__":
    main()
