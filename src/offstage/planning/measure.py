# SPDX-License-Identifier: Apache-2.0
"""`measure_machine`: the rates of this machine, measured once and kept in a file; what is free is always read anew."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from offstage.errors import ConfigError
from offstage.lanes.accelerator import device_free_bytes
from offstage.memory import cpus
from offstage.memory.arena import cgroup_available, mem_available
from offstage.planning.machine import Machine

logger = logging.getLogger("offstage")

_METHOD = 2  # increased when the measuring changes, so that older files are not used
_PATIENCE_SECONDS = 60.0  # how long to wait for another rank that is measuring

_measured: dict[str, Machine] = {}
_measuring = threading.Lock()


def measure_machine(device: torch.device | None = None, *, refresh: bool = False) -> Machine:
    """The rates of this machine, from its file or measured in a few seconds, and the memory that is free now.

    `device`: the current accelerator by default. `refresh` measures again even if there is a file.
    """
    device = _resolve(device)
    key = _identity(device)
    name = _file_name(key)
    with _measuring:
        if refresh or name not in _measured:
            _measured[name] = _read_or_measure(device, key, cache_folder() / name, refresh)
        machine = _measured[name]
    return dataclasses.replace(machine, **_momentary(device))


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
    """Everything that changes the rates. Two hosts of the same kind may share a file."""
    folder = cpus.pci_folder(device)
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
        "threads": cpus.usable_cpus(),
        "numa_nodes": cpus.num_nodes(),
        "host_bytes": host_bytes(),
    }


def _digest(module: str) -> str:
    """A digest of a module's source, without importing it: numba is slow to import."""
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
    """The first processor's name; where it has none (Arm), its identification numbers."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), open(cpuinfo) as lines:
        for line in itertools.takewhile(str.strip, lines):  # the first processor only: the kernel is slow to write all
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
    """Total memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _momentary(device: torch.device) -> dict[str, Any]:
    """The fields that are read at every call."""
    left = [size for size in (mem_available(), cgroup_available()) if size is not None]
    host = device_free = min(left, default=host_bytes())
    if device.type != "cpu":
        device_free = device_free_bytes(device)
    return {
        "host_free_bytes": host,
        "device_free_bytes": device_free,
        "ranks_on_host": cpus.ranks_on_this_host(),
    }


# The file #


def cache_folder() -> Path:
    """``$OFFSTAGE_CACHE``, or ``offstage`` in the user's cache folder."""
    if own := os.environ.get("OFFSTAGE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "offstage"


def _file_name(key: dict[str, Any]) -> str:
    return f"machine-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _read_or_measure(device: torch.device, key: dict[str, Any], path: Path, refresh: bool) -> Machine:
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
    from offstage.planning.rates import measure_rates  # numba is slow to import

    start = time.perf_counter()
    momentary = _momentary(device)
    rates = measure_rates(device, key["threads"], momentary["host_free_bytes"], momentary["device_free_bytes"])
    machine = Machine(
        device_name=key["device"],
        device_bytes=key["host_bytes"] if device.type == "cpu" else torch.accelerator.get_memory_info(device.index)[1],
        host_bytes=key["host_bytes"],
        threads=key["threads"],
        numa_nodes=key["numa_nodes"],
        **momentary,
        **rates,
    )
    logger.info("measured this machine in %.1f s", time.perf_counter() - start)
    return machine


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let only one rank of the host measure at a time: they would slow each other down, and the next finds the file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "a")  # noqa: SIM115
    except OSError as error:
        logger.info("the machine's rates cannot be saved in %s (%s)", folder, error)
        yield
        return
    with file:  # closing it releases the lock
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
            raise ValueError("it describes another machine")
        return Machine.from_json(json.dumps(content["machine"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("%s is not used (%s); the machine is measured again", path, error)
        return None


def _write(path: Path, key: dict[str, Any], machine: Machine) -> None:
    """Replace the file in one operation: readers see the old content or the new one."""
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
        logger.info("the machine's rates cannot be saved in %s (%s)", path, error)
