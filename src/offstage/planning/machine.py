# SPDX-License-Identifier: Apache-2.0
"""`Machine`: the rates and sizes that decide a plan, as plain data; `measure_machine` finds them in a few seconds.

Measured once (`machine_rates.py`) and kept in a file per machine; what is free at the moment is always read anew.
Read by `plan.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offstage.config import format_size
from offstage.errors import ConfigError
from offstage.lanes.accelerator import device_free_bytes
from offstage.memory import cpus as host_cpus
from offstage.memory import numa
from offstage.memory.arena import cgroup_available, mem_available

logger = logging.getLogger("offstage")

UPDATE_BYTES_PER_PARAM = 30
"""Host memory traffic of AdamW with an fp32 master and 16-bit weights: gradient 2 read, weight 2 read and 2 written,
master and both moments 4 read and 4 written each."""

_METHOD = 1  # counts up when the measuring changes: older files are then not used
_PATIENCE_SECONDS = 60.0  # for another rank that is measuring

_measured: dict[str, Machine] = {}
_measuring = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host and one of its devices. Rates in GB/s are 1e9 bytes per second; sizes are bytes."""

    device_name: str
    """The accelerator's name; ``"cpu"`` where there is none: the link is then a copy within host memory."""
    device_bytes: int
    """Memory of the device in all (of the host, without an accelerator)."""
    device_free_bytes: int
    """What this process could still allocate there when it was asked."""
    host_bytes: int
    """Memory of the host in all."""
    host_free_bytes: int
    """What MemAvailable and the memory limits of the cgroup left when they were asked."""
    link_up_gb_per_s: float
    """Host to device, pinned, nothing coming down."""
    link_down_gb_per_s: float
    """Device to host, pinned, nothing going up."""
    link_duplex_gb_per_s: float
    """Each way with both ways busy."""
    dram_gb_per_s: float
    """Host memory traffic, read and written together, of the best streaming pass on all threads."""
    host_update_gb_per_s: Mapping[int, float] = dataclasses.field(hash=False)
    """Threads → host memory traffic of AdamW with an fp32 master, bf16 weight and gradient (30 bytes per parameter)."""
    host_update_gparam_limit: float
    """The arithmetic's own limit: 1e9 parameters per second and thread, on data in the cache."""
    pin_gib_per_s: float
    """How fast an arena is mapped, populated and registered, in GiB/s."""
    device_gb_per_s: float
    """Device memory traffic, read and written together, of an elementwise operation in place."""
    threads: int
    """CPUs this process may keep busy, before it shares them with the other ranks of the host."""
    ranks_on_host: int = 1
    """Processes that share this host's link, memory and CPUs."""
    numa_nodes: int = 1
    """Nodes that have CPUs."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value >= (0 if field.name.endswith("free_bytes") else 1e-9):
                raise ConfigError(
                    f"Machine expects a positive {field.name}; found {value!r}. Measure with measure_machine(), or "
                    "give the rate or size of the machine you mean."
                )
        rates = self.host_update_gb_per_s
        if not rates or not all(threads >= 1 and rate > 0 for threads, rate in rates.items()):
            raise ConfigError(
                f"host_update_gb_per_s expects thread counts of at least 1 with positive rates; found {dict(rates)!r}. "
                "Give one entry at least, such as {16: 120.0}."
            )
        object.__setattr__(self, "host_update_gb_per_s", dict(sorted(rates.items())))

    def host_update_rate(self, num_threads: int, bytes_per_param: float = UPDATE_BYTES_PER_PARAM) -> float:
        """1e9 parameters per second that the host updates in a format with this much memory traffic per parameter.

        Between measured thread counts the traffic is interpolated; beyond them nothing is gained.
        """
        counts = list(self.host_update_gb_per_s)
        threads = min(max(num_threads, 1), counts[-1])
        rates = [self.host_update_gb_per_s[count] for count in counts]
        # Fewer threads than were measured: in proportion.
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
        rows.append(("AdamW in cache", f"{self.host_update_gparam_limit:8.2f} Gparam/s per thread"))
        return "\n".join(f"{name:<18} {value}" for name, value in rows)


def measure_machine(device: torch.device | None = None, *, refresh: bool = False) -> Machine:
    """The rates of this machine, measured or remembered, and what is free right now.

    `device`: the current accelerator by default. `refresh` measures again whatever is remembered.
    """
    device = _resolve(device)
    key = _identity(device)
    name = _file_name(key)
    with _measuring:
        if refresh or name not in _measured:
            _measured[name] = _remembered_or_measured(device, key, cache_folder() / name, refresh)
        machine = _measured[name]
    return dataclasses.replace(machine, **_of_the_moment(device))


def _resolve(device: torch.device | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = accelerator or torch.device("cpu")
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        raise ConfigError(
            f"measure_machine expects the CPU or this machine's accelerator; found device {str(device)!r}, and torch "
            f"sees {f'{accelerator.type!r}' if accelerator else 'no accelerator'}. Leave device out."
        )
    return torch.device(device.type, torch.accelerator.current_device_index() if device.index is None else device.index)


def _identity(device: torch.device) -> dict[str, Any]:
    """Everything that changes the rates. Two hosts of the same make may share a file."""
    folder = numa.pci_folder(device)
    return {
        "method": _METHOD,
        "rule": _digest("offstage.rules.adamw_host"),
        "torch": str(torch.__version__),
        "numba": importlib.metadata.version("numba"),
        "driver": _first_line(Path("/proc/driver/nvidia/version")) or _first_line(Path("/sys/module/amdgpu/version")),
        "device": _device_name(device),
        # One host may have the same accelerator in slots of different width.
        "link_width": _first_line(folder / "current_link_width") if folder else None,
        # Without an accelerator, torch's threads do the copies.
        "torch_threads": torch.get_num_threads() if device.type == "cpu" else None,
        "cpu": _cpu_model(),
        "threads": host_cpus.usable_cpus(),
        "numa_nodes": numa.num_nodes(),
        "host_bytes": host_bytes(),
    }


def _digest(module: str) -> str:
    """Of a module's source, without importing it: numba takes a while."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    properties = torch.get_device_module(device).get_device_properties(device.index)
    return str(getattr(properties, "name", device.type))


@functools.cache
def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The first processor's name; where it has none (Arm), the numbers that stand for it."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), open(cpuinfo) as lines:
        for line in itertools.takewhile(str.strip, lines):  # the kernel is slow to write all of them
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    numbers = [fields.get(name, "") for name in ("CPU implementer", "CPU part", "CPU variant")]
    return fields.get("model name") or " ".join([platform.machine(), *numbers]).strip()


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_the_moment(device: torch.device) -> dict[str, Any]:
    """The fields that no file can know."""
    left = [size for size in (mem_available(), cgroup_available()) if size is not None]
    host = device_free = min(left, default=host_bytes())
    if device.type != "cpu":
        device_free = device_free_bytes(device)
    return {
        "host_free_bytes": host,
        "device_free_bytes": device_free,
        "ranks_on_host": host_cpus.ranks_on_this_host(),
    }


# The file #


def cache_folder() -> Path:
    if own := os.environ.get("OFFSTAGE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "offstage"


def _file_name(key: dict[str, Any]) -> str:
    return f"machine-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _remembered_or_measured(device: torch.device, key: dict[str, Any], path: Path, refresh: bool) -> Machine:
    found = None if refresh else _read(path, key)
    if found is not None:
        return found
    with _alone(path.parent):
        found = None if refresh else _read(path, key)  # another rank may have been first
        if found is None:
            found = _measure(device, key)
            _write(path, key, found)
    return found


def _measure(device: torch.device, key: dict[str, Any]) -> Machine:
    from offstage.planning.rates import measure_rates  # numba takes a while to import

    start = time.perf_counter()
    moment = _of_the_moment(device)
    rates = measure_rates(device, key["threads"], moment["host_free_bytes"], moment["device_free_bytes"])
    machine = Machine(
        device_name=key["device"],
        device_bytes=key["host_bytes"] if device.type == "cpu" else torch.accelerator.get_memory_info(device.index)[1],
        host_bytes=key["host_bytes"],
        threads=key["threads"],
        numa_nodes=key["numa_nodes"],
        **moment,
        **rates,
    )
    logger.info("measured this machine in %.1f s", time.perf_counter() - start)
    return machine


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Ranks of one host measure one at a time, so that they do not slow each other; the next finds the file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "a")  # noqa: SIM115
    except OSError as error:
        logger.info("the machine's rates cannot be kept in %s (%s)", folder, error)
        yield
        return
    with file:  # closing it lets the next one in
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError as error:  # a file system without locks
                logger.debug("no lock in %s (%s)", folder, error)
                break
        yield


def _read(path: Path, key: dict[str, Any]) -> Machine | None:
    try:
        content = json.loads(path.read_text())
        if content["key"] != key:
            raise ValueError("it is about another machine")
        return Machine.from_json(json.dumps(content["machine"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("%s is not used (%s); the machine is measured again", path, error)
        return None


def _write(path: Path, key: dict[str, Any], machine: Machine) -> None:
    """Whole or not at all: whoever reads meanwhile finds the old file or the new one."""
    content = json.dumps({"key": key, "machine": json.loads(machine.to_json())}, indent=2)
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, suffix=".new", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        logger.info("the machine's rates cannot be kept in %s (%s)", path, error)
