# SPDX-License-Identifier: Apache-2.0
"""`Machine`: the rates and sizes that decide a plan, as plain data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from offstage.config import format_size
from offstage.errors import ConfigError

UPDATE_BYTES_PER_PARAM = 30
"""Host memory traffic of AdamW with an fp32 master and 16-bit weights: gradient 2 read, weight 2 read and 2 written,
master and both moments 4 read and 4 written each."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host and one of its devices. Sizes are bytes; 1 GB/s is 1e9 bytes per second."""

    device_name: str
    """The accelerator's name; ``"cpu"`` without one: the link is then a copy within host memory."""
    device_bytes: int
    """Total memory of the device (of the host, without an accelerator)."""
    device_free_bytes: int
    """Device memory that this process could still allocate at the time of the call."""
    host_bytes: int
    """Total memory of the host."""
    host_free_bytes: int
    """Host memory that MemAvailable and the cgroup's limits left at the time of the call."""
    link_up_gb_per_s: float
    """Pinned host memory to the device, with the other direction idle."""
    link_down_gb_per_s: float
    """The device to pinned host memory, with the other direction idle."""
    link_duplex_gb_per_s: float
    """Each direction, with both busy."""
    dram_gb_per_s: float
    """Host memory traffic, reads and writes together, of the best streaming pass on all threads."""
    host_update_gb_per_s: Mapping[int, float] = dataclasses.field(hash=False)
    """Threads → host memory traffic of AdamW with an fp32 master, bf16 weight and gradient (30 bytes per parameter)."""
    host_update_gparam_limit: float
    """Limit of the arithmetic itself: 1e9 parameters per second and thread, on data in the cache."""
    pin_gib_per_s: float
    """Rate at which an arena is mapped, populated and registered."""
    device_gb_per_s: float
    """Device memory traffic, reads and writes together, of an elementwise operation in place."""
    threads: int
    """CPUs that this process may keep busy, not yet divided among the ranks of the host."""
    ranks_on_host: int = 1
    """Processes that share this host's link, memory and CPUs."""
    numa_nodes: int = 1
    """NUMA nodes that have CPUs."""
    submit_us: float = 25.0
    """Microseconds of a host thread's time to give a lane one piece of work: how fast this host runs Python."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value >= (0 if field.name.endswith("free_bytes") else 1e-9):
                raise ConfigError(
                    f"Machine expects a positive {field.name}; found {value!r}. Measure with measure_machine(), or "
                    "give the rate or size of the machine to plan for."
                )
        rates = self.host_update_gb_per_s
        if not rates or not all(threads >= 1 and rate > 0 for threads, rate in rates.items()):
            raise ConfigError(
                f"host_update_gb_per_s expects thread counts of at least 1 with positive rates; found {dict(rates)!r}. "
                "Give one entry at least, such as {16: 120.0}."
            )
        object.__setattr__(self, "host_update_gb_per_s", dict(sorted(rates.items())))

    def host_update_rate(self, num_threads: int, bytes_per_param: float = UPDATE_BYTES_PER_PARAM) -> float:
        """1e9 parameters per second that the host updates, in a format with this much memory traffic per parameter.

        The traffic is interpolated between measured thread counts; beyond the largest it stays the same.
        """
        counts = list(self.host_update_gb_per_s)
        threads = min(max(num_threads, 1), counts[-1])
        rates = [self.host_update_gb_per_s[count] for count in counts]
        # Below the smallest measured count the rate is proportional to the threads.
        traffic = float(np.interp(threads, [0, *counts], [0.0, *rates]))
        return min(traffic / bytes_per_param, self.host_update_gparam_limit * threads)

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """The inverse of `to_json`."""
        try:
            fields = json.loads(text)
            rates = {int(threads): float(rate) for threads, rate in fields.pop("host_update_gb_per_s").items()}
            return cls(**fields, host_update_gb_per_s=rates)
        except ConfigError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Machine.from_json expects what Machine.to_json wrote; found {text[:80]!r} ({error!r}). "
                "Measure the machine again with measure_machine(refresh=True)."
            ) from error

    def __str__(self) -> str:
        nodes = "1 NUMA node" if self.numa_nodes == 1 else f"{self.numa_nodes} NUMA nodes"
        ranks = "" if self.ranks_on_host == 1 else f", shared by {self.ranks_on_host} ranks"
        memory = f"{format_size(self.host_bytes)}, {format_size(self.host_free_bytes)} free"
        rows = [
            ("device", f"{self.device_name}, {format_size(self.device_bytes)}, "
                       f"{format_size(self.device_free_bytes)} free"),
            ("host", f"{self.threads} threads on {nodes}{ranks}, {memory}"),
            ("link up", f"{self.link_up_gb_per_s:8.1f} GB/s"),
            ("link down", f"{self.link_down_gb_per_s:8.1f} GB/s"),
            ("link both ways", f"{self.link_duplex_gb_per_s:8.1f} GB/s each way"),
            ("device memory", f"{self.device_gb_per_s:8.1f} GB/s"),
            ("host memory", f"{self.dram_gb_per_s:8.1f} GB/s"),
            ("pinning", f"{self.pin_gib_per_s:8.1f} GiB/s"),
        ]  # fmt: skip
        for threads, rate in self.host_update_gb_per_s.items():
            speed = f"{rate:8.1f} GB/s = {rate / UPDATE_BYTES_PER_PARAM:.2f} Gparam/s"
            rows.append((f"AdamW, {threads} thread{'s' * (threads > 1)}", speed))
        rows.append(("giving work", f"{self.submit_us:8.1f} us of the host's time"))
        rows.append(("AdamW in cache", f"{self.host_update_gparam_limit:8.2f} Gparam/s per thread"))
        return "\n".join(f"{name:<18} {value}" for name, value in rows)
