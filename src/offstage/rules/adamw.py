# SPDX-License-Identifier: Apache-2.0
"""`AdamRule`: Adam and AdamW with one formula on both sides of the link.

Triton for accelerator tensors, numba for host tensors; both give the bits of `torch.optim.AdamW(fused=True)` on CUDA.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.lanes.host_threads import Kernel, NativeSlice, Slice
from offstage.lanes.lanes import on_device
from offstage.memory.interrupts import deferred_interrupts
from offstage.rules.rule import (
    MASTER_KEY,
    MASTER_LOW_KEY,
    Hyperparameters,
    ParamState,
    ParamUpdate,
    PieceUpdate,
    Rule,
    StateKey,
)

_PRINTS = 256  # fingerprints allocated at once
_ROWS = 8  # coefficients for as many (group, step) at first
_SLICE = 1 << 21  # elements that one thread updates at a time: a few milliseconds

_Cells = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AdamRule(Rule):
    """Adam (`decoupled=False`) or AdamW (`decoupled=True`)."""

    rate_is_known = True
    needs_memory = False
    names = frozenset({MASTER_KEY, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
    counts_from = 0.0

    def __init__(self, config: OffloadConfig, *, decoupled: bool) -> None:
        self._config = config
        self._decoupled = decoupled
        self._scratch: dict[torch.device, _Scratch] = {}
        self._making = threading.Lock()
        self._found = torch.zeros(1, dtype=torch.int64, device="cpu")

    def keys(self, param: torch.Tensor, group: dict[str, Any]) -> tuple[StateKey, ...]:
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"offstage's Adam and AdamW update float32, bfloat16 and float16 parameters; found {param.dtype}. "
                "Use rule='torch'."
            )
        keys = [StateKey("exp_avg", self._config.dtype_of("exp_avg"))]
        keys.append(StateKey("exp_avg_sq", self._config.dtype_of("exp_avg_sq")))
        if group["amsgrad"]:
            keys.append(StateKey("max_exp_avg_sq", self._config.dtype_of("max_exp_avg_sq")))
        kind = self._config.master_weights
        if param.dtype == torch.float32 or kind == "none":
            return tuple(keys)
        if kind == "split":
            if param.dtype != torch.bfloat16:
                raise ConfigError(
                    f"master_weights='split' needs bfloat16 parameters; found {param.dtype}. Use master_weights='fp32'."
                )
            return (StateKey(MASTER_LOW_KEY, torch.int16), *keys)
        return (StateKey(MASTER_KEY, torch.float32), *keys)

    def required(self, param: torch.Tensor, group: dict[str, Any]) -> frozenset[str]:
        return frozenset({"step", "exp_avg", "exp_avg_sq"})

    def signature(self, group: dict[str, Any]) -> Any:
        return bool(group["amsgrad"])

    def next_step(self, state: ParamState) -> int:
        step = state.scalars.get("step")
        return 1 if step is None else int(step) + 1

    def splits(self, device: torch.device) -> bool:
        return True

    def begin(self, device: torch.device, updates: Sequence[ParamUpdate]) -> None:
        """Bias corrections and lr are turned into coefficients here, on the device, one row per (group, step)."""
        scratch = self._scratch_of(device)
        scratch.follow(updates[0].iteration)
        for update in updates:
            if update.on_host and update.of.master_kind == "split":
                scratch.observe(update)
        groups = {(update.group_number, update.step): update.group for update in updates}
        new = [key for key in groups if key not in scratch.rows]
        if new:
            self._add_rows(scratch, {key: groups[key] for key in new})
        if any(update.on_host for update in updates):
            scratch.lower_rows()

    def _add_rows(self, scratch: _Scratch, groups: dict[tuple[int, int], dict[str, Any]]) -> None:
        scratch.kernels.coefficients(
            scratch.inputs_for(len(groups)),
            scratch.add_rows(list(groups)),
            [
                Hyperparameters(
                    lr=_lr_on(group["lr"], scratch.device),
                    beta1=float(group["betas"][0]),
                    beta2=float(group["betas"][1]),
                    weight_decay=float(group["weight_decay"]),
                    step=step,
                )
                for (_, step), group in groups.items()
            ],
        )

    def observe(self, device: torch.device, updates: Sequence[ParamUpdate]) -> None:
        self.begin(device, updates)
        self._observe(updates)

    def _observe(self, updates: Iterable[ParamUpdate]) -> None:
        """Take the fingerprints of weights as they are now, where nobody has yet and something is expected."""
        looked = [
            one for one in updates if not (one.observed or one.updated or one.fresh) and one.of.master_kind == "split"
        ]
        self._fingerprint(looked, 1)
        for update in looked:
            update.observed = True

    def _fingerprint(self, updates: Sequence[ParamUpdate], cell: int) -> None:
        """Of each weight, in the cell of that number."""
        by_device: dict[torch.device, list[ParamUpdate]] = {}
        for update in updates:
            if update.weight.numel():
                by_device.setdefault(update.weight.device, []).append(update)
        for device, ones in by_device.items():
            scratch = self._scratch_of(device)
            scratch.kernels.fingerprints([one.weight for one in ones], [scratch.prints(one.of)[cell] for one in ones])

    def update(self, pieces: Sequence[PieceUpdate]) -> None:
        pieces = [piece for piece in pieces if piece.stop > piece.start]
        self._observe(piece.update for piece in pieces)
        for piece in pieces:
            self._update(piece)
        updates = dict.fromkeys(piece.update for piece in pieces if piece.update.of.master_kind == "split")
        self._fingerprint([one for one in updates if one.updated == one.weight.numel()], 0)

    def _update(self, piece: PieceUpdate) -> None:
        update, state = piece.update, piece.state
        group, weight = update.group, piece.weight
        scratch = self._scratch_of(weight.device)
        kind = update.of.master_kind
        prints = scratch.prints(update.of) if kind == "split" else None
        update.updated += weight.numel()
        scratch.kernels.update(
            weight,
            piece.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["max_exp_avg_sq"] if group["amsgrad"] else None,
            state.get(MASTER_KEY, state.get(MASTER_LOW_KEY)),
            master_kind=kind,
            coefficients=scratch.rows[update.group_number, update.step],
            prints=prints[:2] if prints is not None else None,
            foreign=scratch.foreign,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=group["maximize"],
            decoupled=self._decoupled or group["decoupled_weight_decay"],
            fresh=update.fresh,
        )

    def slices(self, pieces: Sequence[PieceUpdate]) -> Sequence[Slice]:
        return [
            NativeSlice(once, start, min(start + _SLICE, piece.stop - piece.start))
            for piece in pieces
            for once in (_Once(functools.partial(self._prepare, piece)),)
            for start in range(0, piece.stop - piece.start, _SLICE)
        ]

    def _prepare(self, piece: PieceUpdate) -> Kernel:
        """The update of `piece` on the host. The coefficients are the device's own floats."""
        from offstage.rules import adamw_host

        update, state, group = piece.update, piece.state, piece.update.group
        scratch = self._scratch_of(update.of.device)
        kind = update.of.master_kind
        return adamw_host.prepare(
            piece.weight,
            piece.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["max_exp_avg_sq"] if group["amsgrad"] else None,
            state.get(MASTER_KEY, state.get(MASTER_LOW_KEY)),
            master_kind=kind,
            coefficients=scratch.host_row(update),
            prints=scratch.host_prints(update.of)[:2] if kind == "split" else None,
            found=self._found,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=bool(group["maximize"]),
            decoupled=bool(self._decoupled or group["decoupled_weight_decay"]),
            fresh=update.fresh,
            scale=piece.scale,
            after=scratch.host_prints(update.of)[2] if kind == "split" and piece.is_in_place else None,
            first=piece.start,
        )

    def looks(self, updates: Sequence[ParamUpdate]) -> Sequence[Slice]:
        return [
            NativeSlice(once, start, min(start + _SLICE, update.weight.numel()))
            for update in updates
            if update.of.master_kind == "split"
            for once in (_Once(functools.partial(self._prepare_look, update)),)
            for start in range(0, update.weight.numel(), _SLICE)
        ]

    def _prepare_look(self, update: ParamUpdate) -> Kernel:
        from offstage.rules import adamw_host

        return adamw_host.prepare_fingerprint(update.weight, self._scratch_of(update.of.device).begin_look(update))

    @property
    def external_on_host(self) -> int:
        return int(self._found)

    def weights_up(self, device: torch.device, update: ParamUpdate) -> None:
        if update.of.master_kind == "split":
            scratch = self._scratch_of(device)
            if update.of.hosted is not None:
                scratch.raise_print(update)
            else:
                scratch.kernels.fingerprint(update.weight, scratch.prints(update.of)[0])

    def finish(self, updates: Sequence[ParamUpdate]) -> None:
        for update in updates:
            state = update.of
            if "step" not in state.scalars:
                state.scalars["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state.scalars["step"].fill_(
                update.step
            )  # in place: a state dict that was handed out counts on, as in torch
            # There may be room for more than the options use: a load that asked for it was taken back.
            unused = frozenset() if update.group["amsgrad"] else frozenset({"max_exp_avg_sq"}) - state.present
            state.present = frozenset(key.name for key in state.keys) - unused

    def remember(self, device: torch.device, update: ParamUpdate) -> None:
        scratch = self._scratch_of(device)
        if scratch.remembered != update.iteration:
            scratch.foreign_before.copy_(scratch.foreign)
            scratch.remembered = update.iteration
        if update.of.master_kind == "split":
            expected, _, before = scratch.prints(update.of)
            before.copy_(expected)

    def revert(self, device: torch.device, updates: Sequence[ParamUpdate]) -> None:
        scratch = self._scratch_of(device)
        scratch.foreign.copy_(scratch.foreign_before)
        for update in updates:
            if update.of.master_kind == "split":
                expected, _, before = scratch.prints(update.of)
                expected.copy_(before)

    def rest(self, device: torch.device) -> None:
        if device in self._scratch:
            self._scratch[device].rest()

    def external_writes(self, device: torch.device) -> torch.Tensor | None:
        return self._scratch[device].foreign if device in self._scratch else None

    def expect_weight(self, state: ParamState, weights: Iterable[tuple[int | torch.Tensor, torch.Tensor]]) -> None:
        from offstage.rules import adamw_host

        total = torch.zeros(1, dtype=torch.int64, device="cpu")
        for place, weight in weights:
            total += adamw_host.fingerprint_from(place, weight.reshape(-1))
        with self._making:  # parameters are loaded by several threads
            self._scratch_of(state.device).prints(state)[0].copy_(total)

    def adopt(self, state: ParamState, other: ParamState) -> None:
        if state.master_kind == "split":
            scratch = self._scratch_of(state.device)
            for mine, theirs in zip(scratch.prints(state), scratch.prints(other), strict=True):
                mine.copy_(theirs)

    def wrote(self, state: ParamState, weight: torch.Tensor) -> bool:
        found = self._scratch.get(state.device)
        expected, observed = found.at_rest(state) if found is not None else None, None
        if expected is None:
            expected, observed, _ = self._scratch_of(state.device).prints(state)
        if observed is None or observed.device != weight.device:  # it lives on the host, or sleeps there
            observed = torch.zeros(1, dtype=torch.int64, device=weight.device)
        with on_device(weight.device):
            _kernels_for(weight.device).fingerprint(weight, observed)
        return bool(expected.to(observed.device) == observed)

    def _scratch_of(self, device: torch.device) -> _Scratch:
        if device not in self._scratch:
            self._scratch[device] = _Scratch(device)
        scratch = self._scratch[device]
        if scratch.rests:
            scratch.resume()
        return scratch


class _Scratch:
    """A device's few numbers: written and read on its update lane only, so the lane's order guards them.

    What updates on the host need of them is copied down on the same lane, when a step begins (`lower_rows`,
    `observe`), before any of its gradients come down. `weights_up` writes a fingerprint on the lane of weights that go
    up: the caller has waited for it before the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kernels = _kernels_for(device)
        self.foreign = torch.zeros(1, dtype=torch.int64, device=device)
        self.foreign_before = torch.zeros(1, dtype=torch.int64, device=device)
        self.remembered = -1
        self.rests = False
        self.rows: dict[tuple[int, int], torch.Tensor] = {}
        self._iteration = -1
        self._make_tables(_ROWS)
        self._unused_prints: list[torch.Tensor] = []
        self._prints: WeakKeyDictionary[ParamState, _Cells] = WeakKeyDictionary()
        self._rested: WeakKeyDictionary[ParamState, torch.Tensor] = WeakKeyDictionary()
        """Rows of `_prints` while it rests."""
        self._host_rows: dict[tuple[int, int], torch.Tensor] = {}
        self._unused_host_prints: list[torch.Tensor] = []
        self._host_prints: WeakKeyDictionary[ParamState, _Cells] = WeakKeyDictionary()

    def _make_tables(self, room: int) -> None:
        """Of one step: nothing in them outlives it."""
        self._coefficients = torch.empty(room, 3, dtype=torch.float32, device=self.device)
        self._inputs = torch.empty(5, room, dtype=torch.float32, device=self.device)

    def rest(self) -> None:
        """No device memory from now on. Nothing is under way."""
        if self.rests:
            return
        states = list(self._prints)
        everything = [self.foreign, self.foreign_before, *(cell for state in states for cell in self._prints[state])]
        numbers = torch.cat(everything).cpu()
        self.foreign, self.foreign_before = numbers[:1], numbers[1:2]
        self._rested.update(zip(states, numbers[2:].view(-1, 3), strict=True))
        self._prints.clear()
        self._unused_prints.clear()
        self.rows, self._host_rows, self._iteration = {}, {}, -1
        del self._coefficients, self._inputs
        self.rests = True

    @torch.inference_mode(False)  # a reader may bring it back, and the next step writes it
    def resume(self) -> None:
        """It is used again: everything comes back in one copy, for which the host does not wait."""
        with deferred_interrupts():
            states = list(self._rested)
            rows = [self._rested[state] for state in states]
            numbers = torch.cat([self.foreign, self.foreign_before, *rows])
            if self.device.type != "cpu":
                numbers = numbers.pin_memory().to(self.device, non_blocking=True)
            self.foreign, self.foreign_before = numbers[:1], numbers[1:2]
            self._prints.update(zip(states, map(_cells, numbers[2:].view(-1, 3)), strict=True))
            self._rested.clear()
            self._make_tables(_ROWS)
            self.rests = False

    def at_rest(self, state: ParamState) -> torch.Tensor | None:
        """The fingerprint that the weight of `state` should have, if it rests."""
        rested = self._rested.get(state)
        return None if rested is None else rested[:1]

    def follow(self, iteration: int) -> None:
        """Rows are of one step: the next one begins with none."""
        if iteration != self._iteration:
            self._iteration = iteration
            self.rows, self._host_rows = {}, {}

    def add_rows(self, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Room for the coefficients of `keys`. Grows rarely: groups usually step together."""
        first = len(self.rows)
        if first + len(keys) > len(self._coefficients):  # the rows in use keep the old table alive
            room = 2 * (first + len(keys))
            self._coefficients = torch.empty(room, 3, dtype=torch.float32, device=self.device)
        table = self._coefficients[first : first + len(keys)]
        self.rows.update(zip(keys, table, strict=True))
        return table

    def inputs_for(self, count: int) -> torch.Tensor:
        """Room for what `count` rows are made from."""
        if count > self._inputs.shape[1]:
            self._inputs = torch.empty(5, 2 * count, dtype=torch.float32, device=self.device)
        return self._inputs

    @torch.inference_mode(False)
    def prints(self, state: ParamState) -> _Cells:
        """Fingerprints of one parameter's weight: (expected, observed, expected before a speculative update)."""
        if state not in self._prints:
            if not self._unused_prints:  # many at once: the allocator takes 512 bytes for a tensor of 24
                self._unused_prints = list(torch.zeros(_PRINTS, 3, dtype=torch.int64, device=self.device))
            self._prints[state] = _cells(self._unused_prints.pop())
        return self._prints[state]

    # For updates on the host

    def lower_rows(self) -> None:
        """Rows that are new, as they are on the device."""
        new = [key for key in self.rows if key not in self._host_rows]
        if self.device.type == "cpu":
            self._host_rows = self.rows
        elif new:
            # Pinned memory of a step before may still be written to, so each has its own; torch reuses the memory.
            table = torch.empty(len(new), 3, dtype=torch.float32, device="cpu", pin_memory=True)
            table.copy_(torch.stack([self.rows[key] for key in new]), non_blocking=True)
            self._host_rows.update(zip(new, table, strict=True))

    def host_row(self, update: ParamUpdate) -> torch.Tensor:
        return self._host_rows[update.group_number, update.step]

    def observe(self, update: ParamUpdate) -> None:
        """Take the fingerprint of the weight as it is now, and bring it to the host with the expected one.

        That of a weight on the host is taken there, by `looks`.
        """
        expected, observed, _ = self.prints(update.of)
        if update.of.hosted is not None:
            self.host_prints(update.of)[0].copy_(expected, non_blocking=True)
            return
        if update.weight.numel():
            self.kernels.fingerprint(update.weight, observed)
        for cell, host in zip((expected, observed), self.host_prints(update.of), strict=False):
            host.copy_(cell, non_blocking=True)

    def begin_look(self, update: ParamUpdate) -> torch.Tensor:
        """The fingerprint of a weight that lives on the host is about to be summed up, in what this returns."""
        _, observed, after = self.host_prints(update.of)
        observed.zero_()
        after.zero_()
        return observed

    def raise_print(self, update: ParamUpdate) -> None:
        """All of a weight that lives on the host has been updated there."""
        self.prints(update.of)[0].copy_(self.host_prints(update.of)[2], non_blocking=True)

    def host_prints(self, state: ParamState) -> _Cells:
        """The cells of one parameter: expected, observed, and those of the new weight if that lives on the host."""
        if state not in self._host_prints:
            if not self._unused_host_prints:
                pin = self.device.type != "cpu"
                self._unused_host_prints = list(
                    torch.zeros(_PRINTS, 3, dtype=torch.int64, device="cpu", pin_memory=pin)
                )
            self._host_prints[state] = _cells(self._unused_host_prints.pop())
        return self._host_prints[state]


class _Once:
    """Prepared once for all slices of a piece: not before the round has begun on its lane."""

    def __init__(self, prepare: Callable[[], Kernel]) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._piece: Kernel | None = None

    def __call__(self) -> Kernel:
        with self._lock:
            if self._piece is None:
                self._piece = self._prepare()
            return self._piece


def _cells(row: torch.Tensor) -> _Cells:
    return row[:1], row[1:2], row[2:]


def _kernels_for(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        from offstage.rules import adamw_host

        return adamw_host
    try:
        from offstage.rules import adamw_triton
    except ImportError as error:
        raise ConfigError(
            f"offstage's Adam and AdamW need Triton for {device.type!r} tensors; it could not be imported ({error}). "
            "Install the Triton that belongs to this torch, or use rule='torch'."
        ) from error
    return adamw_triton


def _lr_on(lr: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """A tensor lr is read where it lives: on the host now, on the device by the kernel, without a sync."""
    if isinstance(lr, torch.Tensor) and (lr.device.type == "cpu" or device.type == "cpu"):
        return float(lr)
    return lr.to(device) if isinstance(lr, torch.Tensor) else lr
