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
frontier          peak and time of hand-made mixes of keep, offload and recompute, and `layers="auto"` between them
with_state        together with `offload()` of the optimizer: each alone, and both
longest_sequence  the longest sequence that trains in 24 GiB, state offloaded; its tries are in the row
thousand          1,000 iterations with sequences of 1:8: does anything grow?
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from benchmarks.activation_limits import longest_sequence, thousand, with_state
from benchmarks.activation_loop import SIZES, WARM_UP, Bench, against
from benchmarks.anywhere import DEVICE, Row, at_least, at_most, is_met, options_of
from benchmarks.common import write_row
from benchmarks.overlap import gib

AUTO_WARM_UP = 8
"""`"auto"` measures, plans, and corrects its plan up to four times."""
LINK_FULL = ({"layers": 7}, {"layers": 8}, {"fraction": 0.2}, {"fraction": 0.24})
"""What may fill the link under forward. Of those that cost little enough, the one that moves most counts."""
MIXES = ((0, 0), (4, 0), (7, 0), (7, 8), (7, 16), (7, 24), (4, 27), (0, 31), (16, 15))
"""Blocks of 32 that offload, and that recompute with their inputs offloaded; the others keep."""
AUTO_SHARES = (0.12, 0.35, 0.6, 0.85)
"""Where `device_peak` lies between the lowest and the highest peak of the mixes."""


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
    for number, device_peak in enumerate(device_peaks(bench, mixes)):
        row = bench.measure(
            f"auto_{number + 1}",
            {"layers": "auto", "device_peak": device_peak},
            warm_up=AUTO_WARM_UP,
            iterations=min(4, bench.iterations),
        )
        if row is not None:
            row |= {"device_peak_gib": gib(device_peak), **on_frontier(row, mixes, gib(device_peak))}
            if bench.is_full:
                row["must"] = {
                    "ratio_to_frontier": at_most(1.03, row["ratio_to_frontier"]),
                    "peak_gib": at_most(gib(device_peak), row["peak_gib"]),
                }
        yield row


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


def device_peaks(bench: Bench, mixes: Sequence[Row]) -> list[int]:
    """Between the lowest and the highest peak of the mixes."""
    if DEVICE.type == "cuda":
        low, high = (int(2**30 * of(row["peak_gib"] for row in mixes)) for of in (min, max))
    else:  # nobody counts: weights, and what so many blocks save
        by_block = max(row["left_bytes"] // row["offloaded"] for row in mixes if is_only(row, "offloaded"))
        low = sum(param.nbytes for param in bench.loop.model.parameters()) + 3 * by_block
        high = low + bench.size.blocks * by_block
    return [low + int(part * (high - low)) for part in AUTO_SHARES]


def on_frontier(row: Row, mixes: Sequence[Row], peak_gib: float) -> Row:
    """The time of `row` over that of the mixes at `peak_gib`: by steps, and between the two nearest."""
    fastest: list[tuple[float, float]] = []
    for peak, median in sorted((mix["peak_gib"], mix["median_ms"]) for mix in mixes):
        if not fastest or median < fastest[-1][1]:
            fastest.append((peak, median))
    below = [point for point in fastest if point[0] <= peak_gib] or fastest[:1]
    above = [point for point in fastest if point[0] > peak_gib] or below[-1:]
    (left, slower), (right, faster) = below[-1], above[0]
    part = (peak_gib - left) / (right - left) if right > left else 0.0
    between = slower + min(1.0, max(0.0, part)) * (faster - slower)
    return {
        "frontier_ms": round(between, 1),
        "ratio_to_frontier": round(row["median_ms"] / between, 4),
        "ratio_to_steps": round(row["median_ms"] / slower, 4),
    }


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


def summary(row: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    found = {
        "x": row.get("ratio") or row.get("ratio_to_frontier"),
        "lower": row.get("peak_lower_share"),
        "times faster": row.get("times_faster"),
        "tokens": row.get("sequence"),
        "ms/1k": row.get("ms_per_1k_tokens"),
    }
    unmet = [name for name, verdict in row.get("must", {}).items() if not verdict["met"]]
    verdict = f"NOT MET: {', '.join(unmet)}" if unmet else "met" if row.get("must") else ""
    return (
        f"{row['case']:<32} {row['median_ms']:9.1f} ms  peak {row['peak_gib']:6.2f} GiB"
        f"  left {row.get('left_gib', 0):6.2f} GiB  "
        + "  ".join(f"{value:.3f} {name}" for name, value in found.items() if value is not None)
        + f"  {verdict}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Activations that wait on the host, against those that stay.")
    parser.add_argument("--iterations", type=int, help="measured after the warm-up; long cases take fewer")
    return options_of(parser, CASES, SIZES)


def main() -> None:
    options = arguments()
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
    bench = Bench(options.size, options.iterations or (6 if options.size == "full" else 2))
    rows: list[Row] = []
    for name in [name for name in CASES if not options.case or name in options.case]:
        bench.say(f"{name}:")
        try:
            for row in CASES[name](bench):
                if row is not None:
                    rows.append(row)
                    write_row("activations", row)
        except Exception:  # what compares rows may fail as well
            traceback.print_exc()
            bench.failed.append(name)
    bench.say("in all\n")
    print(*map(summary, rows), sep="\n")
    if bench.failed:
        raise SystemExit(f"failed: {', '.join(bench.failed)}")


if __name__ == "__main__":
    main()
