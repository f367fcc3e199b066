# SPDX-License-Identifier: Apache-2.0
"""What does an iteration cost when the weights of every layer are on the host as well?

    python -m benchmarks.fetch_peers                  once, where there is a network, for the case zero3
    python -m benchmarks.host_weights                 every case, about seven minutes on one H200
    python -m benchmarks.host_weights offstage        without DeepSpeed and FSDP2 (group peers), under four minutes
    python -m benchmarks.host_weights a c_32k         these cases, and the baselines they are compared with
    python -m benchmarks.host_weights --size small    a few seconds on a tiny model: does every case run?

The 2.70B workload, 8 x 2048 tokens, split masters; weights and state of every block are on the host. Resident state
with fp32 masters, weights on the device and torch's own clipping is measured first, in the same process, with as many
tokens (`_32k`: 32,768) and micro-batches (`_x4`: four); `ratio` is the time over that. `must` holds what a case has to
reach, and whether it did.

a, a_32k, a_x4     updates in backward, no clipping
a_inputs           the same, and the inputs of the checkpointed blocks wait on the host, too
b                  updates in backward with exact clipping and a second set of state; every norm is within the limit
c, c_32k, c_x4     exact clipping without a second set: a layer is updated when the next forward fetches it
in_step            no overlap
first_iteration    weights on the device, updates in backward: the peak of the first iteration over the later ones'
zero3, fsdp2       DeepSpeed ZeRO-3 with parameters and optimizer on the host, and FSDP2's `CPUOffloadPolicy`: one rank,
                   each in a process of its own

`iteration_ms` is the mean over one span that begins and ends with an idle device. `peak_gib` is the most since the case
began; `built_peak_gib`, `first_iteration_peak_gib` and `steady_peak_gib` are the most until the first iteration, in it,
and in those that are timed; for peers `peak_gib` is that of the timed ones. `host_bytes_per_param` is what the receipt
counts in host memory, over the parameters that have state there; `rss_growth_gib` is by how much the process grew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import harness, overlap, peers
from benchmarks.common import Row, clean_up, times
from benchmarks.fetch_peers import environment
from benchmarks.overlap import case
from benchmarks.workload import IN_BACKWARD, IN_STEP, MAX_NORM, OVERLAP_FORWARD, RESIDENT, since_start

ON_HOST: Mapping[str, Any] = {"weights": "host"}
A = {**IN_BACKWARD, **ON_HOST}
C = {**OVERLAP_FORWARD, **ON_HOST}
WITHIN: Mapping[str, Any] = {"clip": "optimizer", "loss_scale": 1e-2}
"""Clipping that finds every norm within `MAX_NORM`."""
PEER_ITERATIONS = 4

Case = overlap.Case | peers.Case
CASES: list[Case] = [
    case("resident", RESIDENT, warm_up=2),
    case("resident_32k", RESIDENT, warm_up=2),
    case("resident_x4", RESIDENT, warm_up=1),
    case("a", A, "offstage", clip=None, at_most={"ratio": 1.30, "peak_gib": 7.5, "host_bytes_per_param": 12.3}),
    case("a_inputs", A, "offstage", clip=None, inputs_leave=True, at_most={"ratio": 1.35, "peak_gib": 5.5}),
    case("a_32k", A, "offstage", clip=None, at_most={"ratio": 1.12}),
    case("a_x4", A, "offstage", clip=None, warm_up=3, at_most={"ratio": 1.20}),
    case("b", A, "offstage", at_most={"ratio": 1.40, "largest_norm": MAX_NORM}, **WITHIN),
    case("c", C, "offstage", clip="optimizer", at_most={"ratio": 2.0, "host_bytes_per_param": 14.3}),
    case("c_32k", C, "offstage", clip="optimizer", warm_up=3, at_most={"ratio": 1.5}),
    case("c_x4", C, "offstage", clip="optimizer", warm_up=2, at_most={"ratio": 1.35}),
    case("in_step", {**IN_STEP, **ON_HOST}, "offstage", warm_up=2, short=True),
    case("first_iteration", IN_BACKWARD, "offstage", clip=None, short=True, at_most={"first_over_steady_peak": 1.05}),
    *peers.WEIGHTS_TOO,
]


def measure(case: overlap.Case, options: argparse.Namespace, done: Mapping[str, Row]) -> Row:
    row = since_start(overlap.measure(case, options.size, options.iterations))
    return overlap.compared(case, row, done)


def measure_peer(case: peers.Case, options: argparse.Namespace, done: Mapping[str, Row]) -> Row:
    clean_up()
    iterations = min(options.iterations, PEER_ITERATIONS)
    arguments = ["--size", options.size, "--iterations", str(iterations)]
    found = harness.in_own_process(case.name, arguments, variables=environment(), timeout_s=case.timeout_s)
    row = peers.about(case, options.size, iterations) | found
    resident = done.get("resident", {})
    if "error" not in row:
        row |= {"resident_ms": resident.get("iteration_ms"), "ratio": times(row, resident, "iteration_ms")}
    return row


def main() -> None:
    parser = harness.command(__doc__)
    parser.add_argument("--iterations", type=int, default=6, help="measured after the warm-up; long cases take half")
    options = harness.parse(parser, CASES)
    if options.result:
        peer = options.cases[-1]  # behind the one it needs
        harness.report(options.result, lambda: peers.measure(peer, options.size, options.iterations))
    done: dict[str, Row] = {}
    failed: list[str] = []

    def measured(case: Case) -> Iterator[Row]:
        is_peer = isinstance(case, peers.Case)
        done[case.name] = measure_peer(case, options, done) if is_peer else measure(case, options, done)
        failed.extend([case.name] if "error" in done[case.name] else [])
        yield done[case.name]

    harness.run("host_weights", options.cases, measured, failed=failed)


if __name__ == "__main__":
    main()
