# SPDX-License-Identifier: Apache-2.0
"""How fast is one AdamW update on the CPU alone?

    python -m benchmarks.host_update                              512 Mi parameters, every core
    python -m benchmarks.host_update --size small --threads 2     4 Mi, a few seconds: does every system run?

Offstage's pass, torch's fused CPU AdamW and DeepSpeed's compiled `cpu_adam`, each in the formats it has, over the same
memory: one flat parameter in huge pages, touched first by all threads. Where training is lossless and a system knows
fp32 only, converting the bf16 gradient before and the weight after is part of its update. A system that cannot be
imported, compiled or run gets a row that says why. The last rows hold the ratios, and offstage over thread counts.

`bytes_per_param` counts every read and write that the system's passes have to do, without the lines that a write
fetches first. DeepSpeed comes from `benchmarks.fetch_peers`.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import Row, write_row
from benchmarks.fetch_peers import environment
from benchmarks.harness import at_least, cases_of, command, parse, run
from offstage.lanes.host_threads import HostThreads, NativeSlice
from offstage.rules import adamw_host
from offstage.rules.master_weights import join

SLICE = 1 << 20
LR, BETAS, WEIGHT_DECAY, EPS = 1e-4, (0.9, 0.95), 0.1, 1e-8
CHECKED_PARAMS, CHECKED_STEPS = 1 << 16, 3
MIN_GPARAM_PER_S, MIN_OVER_TORCH, MIN_OVER_DEEPSPEED = 4.0, 1.6, 1.0


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one parameter is kept."""

    weight: torch.dtype
    moments: torch.dtype
    master: torch.dtype | None = None
    """fp32, or int16 for the low halves of split masters. Gradients come in the weight's dtype."""
    compared_with: str | None = None
    """The format of the peers' rows, where no peer has this one."""

    @property
    def master_kind(self) -> str | None:
        return {None: None, torch.float32: "fp32", torch.int16: "split"}[self.master]

    @property
    def bytes_per_param(self) -> int:
        """One pass that reads everything and writes all but the gradient."""
        kept = self.weight.itemsize + 2 * self.moments.itemsize + (self.master.itemsize if self.master else 0)
        return 2 * kept + self.weight.itemsize


FORMATS = {
    "lossless": Format(weight=torch.bfloat16, moments=torch.float32, master=torch.float32),
    "fp32": Format(weight=torch.float32, moments=torch.float32),
    "bf16_fp32_moments": Format(weight=torch.bfloat16, moments=torch.float32),
    "bf16": Format(weight=torch.bfloat16, moments=torch.bfloat16),
    "split": Format(weight=torch.bfloat16, moments=torch.float32, master=torch.int16, compared_with="lossless"),
}
CONVERSIONS = 2 + 4 + 4 + 2  # bf16 gradient → fp32 before, fp32 weight → bf16 after


class State:
    """The flat tensors of one format, touched by all of torch's threads."""

    def __init__(self, form: Format, num_params: int) -> None:
        self.form = form
        tile = torch.randn(min(SLICE, num_params), generator=torch.Generator().manual_seed(0))

        def filled(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            flat = torch.empty(num_params, dtype=dtype)
            flat.view(-1, len(values)).copy_(values)
            return flat

        self.weight = filled(0.02 * tile, form.weight)
        self.grad = filled(1e-3 * tile.flip(0), form.weight)
        self.exp_avg = filled(torch.zeros_like(tile), form.moments)
        self.exp_avg_sq = filled(torch.zeros_like(tile), form.moments)
        self.master = torch.empty(num_params, dtype=form.master) if form.master else None
        if form.master == torch.float32:
            self.master.copy_(self.weight)
        elif self.master is not None:
            self.master.zero_()  # the low halves of weights that are exactly bf16

    @property
    def result(self) -> torch.Tensor:
        """What was updated, in fp32; bf16 weights without a master differ from it by their rounding."""
        if self.form.master == torch.int16:
            return join(self.weight, self.master, self.exp_avg_sq)[0]
        return (self.weight if self.master is None else self.master).float()


# The systems


class Offstage:
    """The pass of `offstage.rules.adamw_host` over slices, on the threads that the optimizer uses."""

    def __init__(self, state: State, threads: int) -> None:
        self._steps = 0
        self._threads = HostThreads(threads)
        self._coefficients = torch.empty(3)
        self.bytes_per_param = state.form.bytes_per_param
        update = adamw_host.prepare(
            state.weight,
            state.grad,
            state.exp_avg,
            state.exp_avg_sq,
            None,
            state.master,
            master_kind=state.form.master_kind,
            coefficients=self._coefficients,
            prints=None,
            found=torch.zeros(1, dtype=torch.int64),
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            maximize=False,
            decoupled=True,
            fresh=False,
        )
        numel = state.weight.numel()
        self._slices = [NativeSlice(lambda: update, i, min(i + SLICE, numel)) for i in range(0, numel, SLICE)]

    def step(self) -> None:
        self._steps += 1
        lr, beta1, beta2, step = (torch.tensor(x, dtype=torch.float32) for x in (LR, *BETAS, self._steps))
        self._coefficients[:] = torch.stack([lr * WEIGHT_DECAY, lr / (1 - beta1**step), (1 - beta2**step).sqrt()])
        self._threads.run(self._slices)


class Peer:
    """An optimizer class over the state's memory, with conversions around it where it knows fp32 only."""

    def __init__(self, state: State, make: Callable[[torch.nn.Parameter], torch.optim.Optimizer], step: Any) -> None:
        self._state = state
        self._converts = state.form.master is not None
        self.bytes_per_param = state.form.bytes_per_param
        updated = state.weight
        if self._converts:
            assert state.master is not None
            updated = state.master
            self.bytes_per_param = 28 + CONVERSIONS
        self._param = torch.nn.Parameter(updated)
        self._param.grad = torch.zeros_like(updated) if self._converts else state.grad
        self._optimizer = make(self._param)
        self._optimizer.state[self._param] = {"step": step, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}

    @torch.no_grad()
    def step(self) -> None:
        if self._converts:
            self._param.grad.copy_(self._state.grad)  # type: ignore[union-attr]
        self._optimizer.step()
        if self._converts:
            self._state.weight.copy_(self._param)


def torch_fused(state: State, threads: int) -> Peer:
    if state.form.moments != state.form.weight and state.form.master is None:
        raise NotImplementedError("torch's fused AdamW keeps moments in the dtype of the weights")

    def make(param: torch.nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param], lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, eps=EPS, fused=True)

    return Peer(state, make, torch.tensor(0.0))


def deepspeed(state: State, threads: int) -> Peer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def make(param: torch.nn.Parameter) -> torch.optim.Optimizer:
        return DeepSpeedCPUAdam(
            [param],
            lr=LR,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            adamw_mode=True,
            fp32_optimizer_states=state.form.moments == torch.float32,
        )

    return Peer(state, make, 0)


SYSTEMS: Mapping[str, Callable[[State, int], Any]] = {
    "offstage": Offstage,
    "torch": torch_fused,
    "deepspeed": deepspeed,
}


# Measuring


def in_turns(systems: Mapping[str, Any], repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each system's steps. They take turns, so that a slow moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for i in range(warm_up + repeats):
        for name, system in systems.items():
            time.sleep(0.02)  # OpenMP's threads spin for a while after their last loop
            start = time.perf_counter()
            system.step()
            if i >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def rates(times: list[float], num_params: int, bytes_per_param: int) -> dict[str, Any]:
    rate = num_params / statistics.median(times)
    return {
        "ms": round(1e3 * statistics.median(times), 2),
        "fastest_and_slowest_ms": [round(1e3 * pick(times), 2) for pick in (min, max)],
        "gparam_per_s": round(rate / 1e9, 3),
        "bytes_per_param": bytes_per_param,
        "gb_per_s": round(rate * bytes_per_param / 1e9, 1),
    }


def largest_difference(name: str, form: Format) -> float:
    """After a few steps on a small state, from torch's fused AdamW in fp32 over the same numbers, relative to `LR`."""
    state = State(form, CHECKED_PARAMS)
    reference = torch.nn.Parameter(state.weight.float())
    reference.grad = state.grad.float()
    oracle = torch.optim.AdamW([reference], lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, eps=EPS, fused=True)
    system = SYSTEMS[name](state, 1)
    for _ in range(CHECKED_STEPS):
        system.step()
        oracle.step()
    return float((state.result - reference.detach()).abs().max()) / LR


def rows_of(form_name: str, options: argparse.Namespace, rows: dict[str, Row]) -> Iterator[Row]:
    """The row of each system, which is in `rows` as well."""
    form = FORMATS[form_name]
    state = State(form, options.params)
    running = {}
    for name in ("offstage",) if form.compared_with else SYSTEMS:
        row = rows[name] = {"format": form_name, "system": name, "params": options.params, "threads": options.threads}
        try:
            row["largest_difference_in_lr"] = float(f"{largest_difference(name, form):.3g}")
            running[name] = SYSTEMS[name](state, options.threads)
        except Exception as error:  # a peer that is not there must not cost the others their rows
            row["error"] = " ← ".join(repr(one)[-600:] for one in (error, error.__cause__) if one)
    for name, times in in_turns(running, options.repeats).items():
        rows[name] |= rates(times, options.params, running[name].bytes_per_param)
    for row in rows.values():
        yield row | {"repeats": options.repeats, "huge_pages_gib": huge_pages_gib()}
    if form_name == "lossless":
        yield scaling(state, options.threads)


def scaling(state: State, most: int) -> dict[str, Any]:
    """Offstage's rate over thread counts, up to the one that the other rows use."""
    found = {}
    for threads in [2**i for i in range(most.bit_length()) if 2**i < most] + [most]:
        system = Offstage(state, threads)
        times = in_turns({"offstage": system}, repeats=3, warm_up=1)["offstage"]
        found[threads] = rates(times, state.weight.numel(), system.bytes_per_param)["gparam_per_s"]
    return {"format": "lossless", "system": "offstage", "gparam_per_s_by_threads": found}


def summary(form_name: str, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Offstage over each peer, and whether that is enough."""
    ours = rows[form_name]["offstage"].get("gparam_per_s")
    peers = rows[FORMATS[form_name].compared_with or form_name]
    row: dict[str, Any] = {"format": form_name, "summary": True, "gparam_per_s": ours}
    for peer in ("torch", "deepspeed"):
        theirs = peers[peer].get("gparam_per_s")
        row[f"ratio_to_{peer}"] = round(ours / theirs, 3) if ours and theirs else None
    limits = {"ratio_to_deepspeed": MIN_OVER_DEEPSPEED}
    if form_name == "lossless":
        limits |= {"gparam_per_s": MIN_GPARAM_PER_S, "ratio_to_torch": MIN_OVER_TORCH}
    row["must"] = {name: at_least(limit, row[name]) for name, limit in limits.items()}
    return row


def huge_pages_gib() -> float:
    with open("/proc/self/smaps_rollup") as file:
        found = re.search(r"AnonHugePages:\s+(\d+) kB", file.read())
    return round(int(found[1]) / 2**20, 2) if found else 0.0


# The command


def count(text: str) -> int:
    """`4194304`, `4Mi` or `1Gi`, in whole slices."""
    number = int(float(text.rstrip("MGi")) * {"M": 2**20, "G": 2**30}.get(text.rstrip("i")[-1], 1))
    if number < SLICE or number % SLICE:
        raise argparse.ArgumentTypeError(f"expects a multiple of {SLICE} parameters; found {text}. Use 512Mi.")
    return number


def restart_with(variables: Mapping[str, str]) -> None:
    """OpenMP and torch's allocator read these once, when they are loaded: this process starts again with them."""
    if any(os.environ.get(name) != value for name, value in variables.items()):
        command = [sys.executable, "-m", "benchmarks.host_update", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **variables})


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--params", type=count, help="512Mi, or 4Mi with --size small")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=7)
    needs = {name: [form.compared_with] for name, form in FORMATS.items() if form.compared_with}
    options = parse(parser, cases_of(FORMATS, needs=needs), needs_gpu=False)
    options.params = options.params or count("512Mi" if options.size == "full" else "4Mi")
    restart_with({**environment(), "OMP_NUM_THREADS": str(options.threads), "THP_MEM_ALLOC_ENABLE": "1"})
    torch.set_num_threads(options.threads)
    rows: dict[str, dict[str, Row]] = {case.name: {} for case in options.cases}
    try:
        run("host_update", options.cases, lambda case: rows_of(case.name, options, rows[case.name]))
    finally:
        for name in rows:
            write_row("host_update", summary(name, rows))


if __name__ == "__main__":
    main()
