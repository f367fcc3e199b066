# SPDX-License-Identifier: Apache-2.0
"""What a plan costs: bytes, milliseconds, and which resource limits it. Pure arithmetic.

[Note: fluid model] The model treats state as spread evenly along the network, from position 0 (used first in forward)
to 1. Resident state is at the beginning. Everything after it is moved and updated at one rate, that of the slowest
resource: the link in either direction, the CPU, host memory. Forward passes the positions upwards, backward downwards.
`exposed_ms` is how much longer an iteration takes than its forwards and backwards alone. It is never predicted below
the update's own time on the device, which is what resident state takes. With that floor, more resident state can only
shorten an iteration, and so can every faster rate. docs/internals/planner.md derives each formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offstage.config import OffloadConfig, parse_size
from offstage.errors import ConfigError
from offstage.memory.cpus import beside_a_loop
from offstage.planning.machine import Machine
from offstage.planning.sizes import ParamSize

CHOSEN = "chosen"
LEFT_TO_STEP = 0.25
"""`update_in_backward` with `overlap_forward`: share of the state that is left to `step()` until a backward has been
measured."""
COLLECTED = 1 / 8
"""`update_in_backward`: share of all gradients whose updates begin together at the latest."""
GRADIENTS_IN_FLIGHT = 0.25
"""`update_in_backward`: share of all gradients that may wait for their update during backward. If more wait, the
allocator returns their memory only after the updates, which then delay backward. Updates fall that far behind only
where the link is much too slow."""
OLD_WEIGHTS_ON_HOST = 0.25
"""`update_in_backward` with clipping: share of the old weights that is kept on the host instead of the device. They are
the weights whose gradients come last, when the device is fullest."""

HOST_CHUNK = 3
"""Chunks that the CPU updates are this many times larger than others: every chunk costs a thread some time under the
GIL, and in a staging buffer a chunk takes only a third of what its state takes."""
LEAST_LEAVING = 64 * 1024
"""Bytes of a gradient of resident state that waits on the host in the first iteration of `update_in_backward`."""
LINK_IN_BACKWARD = 0.95
"""Share of its rate that the link reaches during backward, where chunks wait for the last of their gradients."""
_CPU_IN_BACKWARD = 0.85
"""Share of its rate that the CPU reaches during backward, where pieces wait for the last of their gradients."""
_FORWARD_LAUNCHES, _BACKWARD_LAUNCHES = 0.35, 0.45
"""Shares of a forward and of a backward in which the host launches its kernels, where the workload does not say."""
_SUBMITS_PER_PARAM, _SUBMITS_PER_CHUNK, _SUBMITS_PER_HOST_CHUNK = 6.0, 10.0, 30.0
"""What an update in backward costs autograd's thread, in units of `Machine.submit_us`: of a parameter, whose hooks are
called and whose kernel is launched; of a chunk's trip; of a chunk that goes to the CPU, whose thread takes the GIL from
the loop's."""
_TOGETHER = 0.9
"""Share of its bandwidth that host memory reaches for copies and updates together: measured."""
HOST_MS_PER_CHUNK = 0.1
"""With clipping, the host waits for the norm before it queues the rest of the step: measured, per chunk."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the device does besides updates. Every field is optional; updates hide only behind times that are given."""

    forward_ms: float = 0.0
    """Time of one forward, of one micro-batch."""
    backward_ms: float = 0.0
    """Time of one backward, with what checkpointing recomputes."""
    micro_batches: int = 1
    """Forwards and backwards per step."""
    other_bytes: int | str = 0
    """Device memory at the peak that is neither weights, gradients nor state: activations, workspaces."""
    forward_launch_ms: float | None = None
    """The host's time to launch one forward: how long it takes with hardly any data. `None`: 35% of it."""
    backward_launch_ms: float | None = None
    """The same for one backward. `None`: 45% of it."""
    activation_bytes: int | str = 0
    """Device memory at the peak beside weights and state if each gradient were freed as it comes: with
    `update_in_backward` the peak is never lower."""
    clips: bool = False
    """Whether `optimizer.clip_grad_norm_` clips the gradients."""
    active_experts: float = 1.0
    """Share of the routed experts that get a gradient in a step. With large batches it is 1.0."""

    def __post_init__(self) -> None:
        for field in ("other_bytes", "activation_bytes"):
            object.__setattr__(self, field, parse_size(getattr(self, field), field))
        launches = (self.forward_launch_ms or 0.0, self.backward_launch_ms or 0.0)
        if min(self.forward_ms, self.backward_ms, *launches) < 0 or self.micro_batches < 1:
            raise ConfigError(
                "Workload expects times of at least 0 ms and at least one micro-batch; found "
                f"forward_ms={self.forward_ms}, backward_ms={self.backward_ms}, "
                f"forward_launch_ms={self.forward_launch_ms}, backward_launch_ms={self.backward_launch_ms}, "
                f"micro_batches={self.micro_batches}."
            )
        if not 0.0 <= self.active_experts <= 1.0:
            raise ConfigError(f"active_experts expects a share from 0.0 to 1.0; found {self.active_experts!r}.")

    @property
    def launch_ms(self) -> tuple[float, float]:
        """Of one forward and one backward; no longer than these take."""
        forward, backward = self.forward_launch_ms, self.backward_launch_ms
        return (
            min(self.forward_ms, _FORWARD_LAUNCHES * self.forward_ms if forward is None else forward),
            min(self.backward_ms, _BACKWARD_LAUNCHES * self.backward_ms if backward is None else backward),
        )

    @property
    def compute_ms(self) -> float:
        """All forwards and backwards of a step."""
        return self.micro_batches * (self.forward_ms + self.backward_ms)


@dataclass(frozen=True)
class Prediction:
    """What a plan costs one rank."""

    device_state_bytes: int
    """Resident state, slots and window."""
    device_peak_bytes: int
    """State, weights, gradients and the workload's other bytes: an upper bound, from the second iteration on."""
    host_bytes: int
    """State, staging buffers, and the second copies that clipping with `update_in_backward` keeps; weights that live on
    the host, and gradients that leave for it."""
    bytes_up: int
    """Over the link to the device in one step."""
    bytes_down: int
    """Over the link to the host in one step."""
    exposed_ms: float
    """How much longer an iteration takes than its forwards and backwards alone."""
    iteration_ms: float | None
    """`None` without a workload."""
    busy_ms: Mapping[str, float]
    """How long each resource works for one step."""
    bottleneck: str
    """The resource that is busy longest; ``"device"`` where nothing moves."""


@dataclass(frozen=True)
class Candidate:
    """One plan that was considered."""

    name: str
    host_fraction: float
    resident_bytes: int
    prediction: Prediction
    verdict: str
    """``"chosen"``, or the reason why not."""


@dataclass(frozen=True)
class Rates:
    """One rank's part of the machine: bytes per millisecond."""

    up: float
    down: float
    duplex: float
    """Each way, with both ways busy."""
    cpu: float
    """Parameters per millisecond."""
    dram: float
    device: float
    submit_ms: float = 0.0
    """The host's time to give a lane one piece of work."""


def rates_of(machine: Machine, ranks: int, threads: int | None, update_bytes_per_param: float) -> Rates:
    """The part of one of `ranks` ranks, which share host memory and threads and have a link each."""
    mine = threads or max(1, machine.threads // ranks)
    if threads is None and machine.device_name != "cpu":
        mine = beside_a_loop(mine)

    def update_rate(num_threads: int) -> float:
        counts = [count for count in machine.host_update_gb_per_s if count < num_threads]
        # Where more threads are slower, fewer of them are used.
        return max(machine.host_update_rate(count, update_bytes_per_param) for count in (*counts, num_threads))

    alone = max(machine.dram_gb_per_s, *machine.host_update_gb_per_s.values())
    return Rates(
        up=1e6 * max(machine.link_up_gb_per_s, machine.link_duplex_gb_per_s),
        down=1e6 * max(machine.link_down_gb_per_s, machine.link_duplex_gb_per_s),
        duplex=1e6 * machine.link_duplex_gb_per_s,
        cpu=1e6 * min(update_rate(mine), update_rate(ranks * mine) / ranks),
        # Host memory carries at least what one link was measured to move in both directions.
        dram=1e6 * max(_TOGETHER * alone, 2 * machine.link_duplex_gb_per_s) / ranks,
        device=1e6 * machine.device_gb_per_s,
        submit_ms=1e-3 * machine.submit_us,
    )


@dataclass(frozen=True)
class Load:
    """Work for the link, the CPU and host memory: bytes, but parameters for the CPU."""

    up: float = 0.0
    down: float = 0.0
    cpu: float = 0.0
    dram: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def __mul__(self, factor: float) -> Load:
        return Load(*(factor * a for a in self.parts()))

    def parts(self) -> tuple[float, ...]:
        return (self.up, self.down, self.cpu, self.dram)

    def ms(self, rates: Rates) -> float:
        """Time until all is done. The resources work at the same time, so the slowest decides."""
        both, rest = min(self.up, self.down), max(self.up, self.down) - min(self.up, self.down)
        link = both / rates.duplex + rest / (rates.up if self.up > self.down else rates.down)
        return max(link, self.cpu / rates.cpu, self.dram / rates.dram)


@dataclass(frozen=True)
class Totals:
    """Sums over one rank's parameters."""

    state: float
    weights: float
    params: float
    """Elements."""
    tensors: float = 0.0
    moved: float = 1.0
    """Share of the state that gets gradients in a step."""

    @classmethod
    def of(cls, sizes: Sequence[ParamSize], active_experts: float = 1.0, tensors: int | None = None) -> Totals:
        """`tensors`: how many there are, where `sizes` are sums of several."""
        trained = [size for size in sizes if size.state_bytes]
        state = sum(size.state_bytes for size in trained)
        moved = sum(size.state_bytes * (active_experts if size.expert else 1.0) for size in trained)
        return cls(
            float(state),
            float(sum(size.weight_bytes for size in trained)),
            float(sum(size.numel for size in trained)),
            float(len(trained) if tensors is None else tensors),
            moved / state if state else 1.0,
        )

    @property
    def update_bytes(self) -> float:
        """Memory traffic of the update: state and weights read and written, gradients read."""
        return 2 * self.state + 3 * self.weights

    def streamed(self) -> Load:
        """Load if all state is fetched, updated on the device, and stored."""
        return Load(up=self.state, down=self.state, dram=2 * self.state)

    def on_host(self) -> Load:
        """Load if all state is updated on the host: gradients and weights come down, weights go up."""
        weights = self.weights
        return Load(up=weights, down=2 * weights, cpu=self.params, dram=self.update_bytes + 3 * weights)


@dataclass(frozen=True)
class Shares:
    """A plan as the fluid model sees it."""

    resident: float
    """Share of the state that is resident."""
    host: float
    """Share that the CPU updates, of the state that is not resident."""
    window: float = 0.0
    """Bytes."""
    chunk_bytes: float = 0.0
    """Updates begin when the first chunk has arrived."""


@dataclass(frozen=True)
class Times:
    """The result of `exposed`."""

    exposed_ms: float
    left: float
    """Share of the state whose update is left to `step()`."""
    work: Load
    """All work of one step."""


def exposed(totals: Totals, shares: Shares, rates: Rates, config: OffloadConfig, workload: Workload) -> Times:
    """How much longer the updates make an iteration: [Note: fluid model]."""
    in_backward = config.update_in_backward and workload.backward_ms > 0
    speculates = in_backward and workload.clips
    off = 1.0 - shares.resident
    # Speculative updates write a second set of state, which must be complete: they move all of it.
    streamed = totals.streamed() * (off * (1.0 - shares.host) * (1.0 if speculates else totals.moved))
    on_host = totals.on_host() * (off * shares.host * totals.moved)
    device_ms = totals.update_bytes * totals.moved / rates.device
    if off <= 0.0:
        return Times(device_ms, 0.0, Load())
    left, kept = 1.0, Load()
    if in_backward:
        if speculates:
            kept = Load(down=OLD_WEIGHTS_ON_HOST * off * (1.0 - shares.host) * totals.weights)
        # With speculation the CPU's updates are left to step().
        moving = streamed + kept if speculates else streamed + on_host
        needed_ms = moving.ms(rates) / LINK_IN_BACKWARD
        if not speculates:
            needed_ms = max(needed_ms, on_host.ms(rates) / _CPU_IN_BACKWARD)
        left = max(0.0, 1.0 - workload.backward_ms / needed_ms) if needed_ms else 0.0
    ahead = 1.0
    if not in_backward and streamed.up:  # a window is filled when step() begins
        fetched = min(shares.window, workload.backward_ms * rates.up)
        ahead = max(0.0, 1.0 - fetched / streamed.up)
    forward_ms = workload.forward_ms if config.overlap_forward else 0.0
    if shares.host and forward_ms:
        # A thread that waits for the CPU's updates cannot launch ahead: what forward launches is not hidden.
        forward_ms -= workload.launch_ms[0]
    resident_ms = device_ms * shares.resident if not in_backward or speculates else 0.0
    fill_ms = shares.chunk_bytes / rates.duplex
    reached = shares.resident + off * left  # position from which on backward has done the updates
    late = ((streamed * ahead + on_host) * left).ms(rates) - forward_ms * reached
    if speculates:
        late = max(late, (streamed * left + on_host).ms(rates) - forward_ms)
        fill_ms += HOST_MS_PER_CHUNK * streamed.up / shares.chunk_bytes if shares.chunk_bytes else 0.0
    exposed_ms = fill_ms + max(device_ms, resident_ms + late)
    if in_backward:
        exposed_ms += launches_delayed_ms(totals, shares, rates, workload, streamed)
    return Times(exposed_ms, left * off, streamed + on_host + kept)


def launches_delayed_ms(totals: Totals, shares: Shares, rates: Rates, workload: Workload, streamed: Load) -> float:
    """How much longer backward takes because its thread also gives work to the lanes."""
    submits = _SUBMITS_PER_PARAM * totals.tensors
    if shares.chunk_bytes:
        on_host = (1.0 - shares.resident) * shares.host * totals.state * totals.moved
        submits += _SUBMITS_PER_CHUNK * streamed.up / shares.chunk_bytes
        submits += _SUBMITS_PER_HOST_CHUNK * on_host / (HOST_CHUNK * shares.chunk_bytes)
    return max(0.0, submits * rates.submit_ms - (workload.backward_ms - workload.launch_ms[1]))


def busy_ms(work: Load, device_bytes: float, rates: Rates) -> dict[str, float]:
    """How long each resource works on `work`, and the device on `device_bytes` of memory traffic."""
    return {
        "link up": work.up / rates.duplex,
        "link down": work.down / rates.duplex,
        "CPU": work.cpu / rates.cpu,
        "host memory": work.dram / rates.dram,
        "device": device_bytes / rates.device,
    }


def gradient_share(config: OffloadConfig, workload: Workload, left: float, state_bytes: float) -> float:
    """Share of the gradients that exists at the peak.

    `left`: share of the model that is left to `step()`; `state_bytes`: of all of it.
    """
    if not config.update_in_backward or workload.clips or workload.micro_batches > 1:
        return 1.0
    if not config.overlap_forward:
        left = 0.0  # step() waits for all updates, so all of them are started in backward
    elif not workload.backward_ms:
        left = LEFT_TO_STEP
    collected = min(COLLECTED, config.most_chunk_bytes / max(state_bytes, 1.0))
    return left + (1.0 - left) * (GRADIENTS_IN_FLIGHT + collected)


def kept_weight_share(config: OffloadConfig, workload: Workload) -> tuple[float, float]:
    """Shares of the streamed weights whose old values speculative updates keep: on the device, on the host."""
    if not (config.update_in_backward and workload.clips):
        return 0.0, 0.0
    return 1.0 - OLD_WEIGHTS_ON_HOST, OLD_WEIGHTS_ON_HOST
