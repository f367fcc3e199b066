# SPDX-License-Identifier: Apache-2.0
"""Machines that are not here, from data sheets: what `offstage plan --machine NAME` plans for.

No rate of these machines was measured, except the `h200`'s. A data sheet gives peaks; the share of each peak that is
reached is assumed to be the one that was measured on the reference machine: one H200, PCIe 5 x16, 16 threads
(benchmarks/results/plans.jsonl). How many threads and how much memory a host has is assumed, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from offstage.config import format_size
from offstage.planning.machine import UPDATE_BYTES_PER_PARAM, Machine

_GIB = 1 << 30

# Shares of a peak, measured on the reference machine.
_DEVICE = 4061 / 4800
_COMPUTE = 537 / 989
"""Of bf16 matrix products, by the forward of the reference workload: 91.4e12 operations in 170.1 ms."""
_LINK_ONE_WAY = 55.0 / 63.0
_LINK_BOTH_WAYS = 50.0 / 63.0
_UPDATE = 149.8 / 165.8
"""Of the host memory's rate, for AdamW on all threads."""

# Rates, measured on the reference machine.
_DRAM_PER_THREAD = 165.8 / 16
_UPDATE_ONE_THREAD = 14.7
_UPDATE_IN_CACHE = 0.56
_PIN_GIB_PER_S = 17.0

# Assumed.
_DRAM = 0.75
"""Of the peak of all memory channels."""
_DEVICE_MEMORY = 0.985
"""Of the nominal GiB; the driver keeps the rest."""
_HOST_FREE = 0.95

_LINKS = {"PCIe 4 x16": 31.5, "PCIe 5 x16": 63.0, "NVLink-C2C": 450.0}
"""Peak in GB/s each way: 16 or 32 GT/s on 16 lanes with 128b/130b encoding; half of NVIDIA's 900 GB/s."""


@dataclass(frozen=True)
class Host:
    """One host with all its devices."""

    name: str
    devices: int
    """Devices that share it. A plan for fewer of them gets their part of threads and memory."""
    threads: int
    gib: int
    dram_gb_per_s: float
    """Peak of all memory channels."""
    dram: str
    """The channels, in words."""


_DESKTOP = Host("a desktop", 1, 16, 128, 89.6, "2 channels of DDR5-5600")
_DDR4_SERVER = Host("a server with 8 devices", 8, 128, 2048, 409.6, "16 channels of DDR4-3200")
_DDR5_SERVER = Host("a server with 8 devices", 8, 112, 2048, 614.4, "16 channels of DDR5-4800")
_REFERENCE = Host("a server with 8 devices", 8, 128, 1007, 614.4, "16 channels of DDR5-4800")
_GRACE = Host("a Grace CPU", 1, 72, 447, 384.0, "480 GB of LPDDR5X, 384 GB/s")


@dataclass(frozen=True)
class Preset:
    """A device as its data sheet describes it, and the host that is assumed."""

    name: str
    device: str
    gib: int
    gb_per_s: float
    """Peak of the device's memory."""
    peak_tflops: float
    """Peak of dense bf16 matrix products with fp32 sums."""
    link: str
    host: Host
    source: str
    """Where the figures of the device are from."""

    @property
    def measured(self) -> bool:
        return self.host is _REFERENCE

    @property
    def tflops(self) -> float:
        """What a transformer is assumed to reach."""
        return _COMPUTE * self.peak_tflops

    def explain_tflops(self) -> str:
        """The same with its source."""
        share = f"{_COMPUTE:.0%}, as measured on an H200, of {self.peak_tflops:g} ({self.source})"
        return f"{self.tflops:.0f} TFLOP/s: {share}"

    def machine(self, ranks: int = 1) -> Machine:
        """The machine for a plan in which `ranks` devices of one host take part."""
        part = min(1.0, ranks / self.host.devices)
        threads, host_bytes = max(1, int(part * self.host.threads)), int(part * self.host.gib * _GIB)
        dram = min(_DRAM * self.host.dram_gb_per_s, _DRAM_PER_THREAD * threads)
        peak, device_bytes = _LINKS[self.link], int(_DEVICE_MEMORY * self.gib * _GIB)
        return Machine(
            device_name=self.device,
            device_bytes=device_bytes,
            device_free_bytes=device_bytes - _GIB // 2,  # the process's own context
            host_bytes=host_bytes,
            host_free_bytes=int(_HOST_FREE * host_bytes),
            # Copies cannot be faster than host memory, of which both ways take twice as much.
            link_up_gb_per_s=min(_LINK_ONE_WAY * peak, dram),
            link_down_gb_per_s=min(_LINK_ONE_WAY * peak, dram),
            link_duplex_gb_per_s=min(_LINK_BOTH_WAYS * peak, dram / 2),
            dram_gb_per_s=dram,
            host_update_gb_per_s={1: min(_UPDATE_ONE_THREAD, _UPDATE * dram), threads: _UPDATE * dram},
            host_update_gparam_limit=_UPDATE_IN_CACHE,
            pin_gib_per_s=_PIN_GIB_PER_S,
            device_gb_per_s=_DEVICE * self.gb_per_s,
            threads=threads,
            ranks_on_host=ranks,
        )

    def explain(self, ranks: int = 1) -> str:
        """Every figure of `machine(ranks)` that matters, with its source."""
        made, host, update = self.machine(ranks), self.host, self.machine(ranks).host_update_gb_per_s
        kind = "measured with one device, 16 threads and 126 GiB" if self.measured else "assumed, not measured"
        part = "" if ranks >= host.devices else f"{ranks}/{host.devices} of "
        rows = [
            ("machine", f"{self.name}: {kind}. `offstage doctor --json` on a machine writes a file with its own rates"),
            ("device", f"{format_size(made.device_bytes)} of {self.gib} GiB, {made.device_gb_per_s:,.0f} GB/s: "
                       f"{_DEVICE:.0%}, as measured on an H200, of {self.gb_per_s:,.0f} ({self.source})"),
            ("link", f"{made.link_up_gb_per_s:.0f} GB/s, both ways {made.link_duplex_gb_per_s:.0f} each: {self.link}, "
                     f"{_LINK_ONE_WAY:.0%} and {_LINK_BOTH_WAYS:.0%} of {_LINKS[self.link]:.1f} as measured on PCIe 5, "
                     "or what host memory allows"),
            ("host", f"{part}{host.name}: {made.threads} threads, {format_size(made.host_bytes)}, "
                     f"{format_size(made.host_free_bytes)} of it free (lower it with --offload.host-budget)"),
            ("host memory", f"{made.dram_gb_per_s:.0f} GB/s: {_DRAM_PER_THREAD:.1f} per thread as measured, at most "
                            f"{_DRAM:.0%} of {host.dram}"),
            ("CPU updates", f"{max(update.values()) / UPDATE_BYTES_PER_PARAM:.1f} Gparam/s: {_UPDATE:.0%} of the host "
                            "memory's rate, as measured"),
        ]  # fmt: skip
        return "\n".join(f"{name:<15} {value}" for name, value in rows)


_NVIDIA = "NVIDIA data sheet"

MACHINES = {
    one.name: one
    for one in (
        Preset("rtx3090", "GeForce RTX 3090", 24, 936, 71, "PCIe 4 x16", _DESKTOP, _NVIDIA),
        Preset("rtx4090", "GeForce RTX 4090", 24, 1008, 165, "PCIe 4 x16", _DESKTOP, _NVIDIA),
        Preset("rtx5090", "GeForce RTX 5090", 32, 1792, 209, "PCIe 5 x16", _DESKTOP, _NVIDIA),
        Preset("a100-40g", "NVIDIA A100 40GB", 40, 1555, 312, "PCIe 4 x16", _DDR4_SERVER, _NVIDIA),
        Preset("l40s", "NVIDIA L40S", 48, 864, 362, "PCIe 4 x16", _DDR5_SERVER, _NVIDIA),
        Preset("a100-80g", "NVIDIA A100 80GB SXM", 80, 2039, 312, "PCIe 4 x16", _DDR4_SERVER, _NVIDIA),
        Preset("h100-80g", "NVIDIA H100 80GB SXM", 80, 3350, 989, "PCIe 5 x16", _DDR5_SERVER, _NVIDIA),
        Preset("gh200", "NVIDIA GH200 96GB", 96, 4000, 989, "NVLink-C2C", _GRACE, _NVIDIA),
        Preset("h200", "NVIDIA H200", 141, 4800, 989, "PCIe 5 x16", _REFERENCE, _NVIDIA),
        Preset("b200", "NVIDIA B200", 180, 8000, 2250, "PCIe 5 x16", _DDR5_SERVER, _NVIDIA),
        Preset("mi300x", "AMD Instinct MI300X", 192, 5300, 1307, "PCIe 5 x16", _DDR5_SERVER, "AMD data sheet"),
    )
}
"""By name, in the order of their memory."""
