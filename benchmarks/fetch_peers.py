# SPDX-License-Identifier: Apache-2.0
"""Fetches what `peers`, `host_update`, `host_weights`, `llama` and `megatron` compare with, into carry/peers.

    python -m benchmarks.fetch_peers                  for Python 3.12 on Linux x86-64
    python -m benchmarks.fetch_peers --python 3.13    for another one; Megatron-core needs 3.12 or newer

Nothing is installed: `environment()` puts the folder on the path of the processes that measure, so it can be carried to
a machine without a network. Parts that no measurement imports are left out: compiled extensions of torchao, GPU sources
of DeepSpeed, whose `cpu_adam` is compiled where it runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

PEERS = Path(__file__).parents[1] / "carry" / "peers"

WHEELS = {
    "torchao": "0.18.0",
    "megatron-core": "0.19.2",
    # What DeepSpeed and Megatron-core import; torch, numpy and packaging are there already.
    "annotated-types": "0.8.0",
    "einops": "0.8.2",
    "hjson": "3.1.0",
    "msgpack": "1.2.4",
    "ninja": "1.13.2",
    "nvidia-ml-py": "13.615.71",
    "psutil": "7.2.2",
    "py-cpuinfo": "9.0.0",
    "pydantic": "2.14.3",
    "pydantic-core": "2.50.4",
    "pyyaml": "6.0.3",
    "tqdm": "4.70.1",
    "typing-extensions": "4.16.0",
    "typing-inspection": "0.4.5",
}
SDIST = ("deepspeed", "0.19.8")  # there is no wheel, because its operators are compiled where they run
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")

LEFT_OUT = (
    "test/*",
    "example.py",
    "pydantic/v1/*",
    "torchao/*.so",
    "torchao/csrc/*",
    "torchao/_models/*",
    "torchao/experimental/*",
    "megatron/training/*",
    "megatron/core/*.so",
    "megatron/core/*.cpp",
    "*.cu",
    "*.cuh",
    "*.hip",
    "*.pyi",
    "*/tests/*",
)
"""Patterns of paths that no measurement needs. A `*` matches slashes too."""


def environment() -> dict[str, str]:
    """Variables of a process that finds the peers, and ninja for the operator that DeepSpeed compiles."""
    root = PEERS.parents[1]
    paths = {"PYTHONPATH": [PEERS, root / "src", root], "PATH": [PEERS / "bin"]}
    found = {}
    for name, folders in paths.items():
        present = [part for part in os.environ.get(name, "").split(os.pathsep) if part]
        ours = [str(folder) for folder in folders]
        found[name] = os.pathsep.join([*ours, *(part for part in present if part not in ours)])
    return found


def download(folder: Path, python: str) -> None:
    """The pinned archives. DeepSpeed's set-up script runs once, in isolation, for pip to read its metadata."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    wheels = [f"{name}=={version}" for name, version in WHEELS.items()]
    subprocess.run([*pip, "--only-binary=:all:", "--python-version", python, *platforms, *wheels], check=True)
    name, version = SDIST
    subprocess.run([*pip, "--no-binary", name, f"{name}=={version}"], check=True)


def wanted(path: str) -> bool:
    return not any(fnmatch(path, pattern) for pattern in LEFT_OUT)


def wheel_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Where each file of a wheel goes, relative to the target, and what is in it."""
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            script = name.partition(".data/scripts/")[2]
            if not name.endswith("/"):
                yield f"bin/{script}" if script else name, wheel.read(name)


def sdist_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Only the package itself: the sdist holds its sources a second time, outside of it."""
    with tarfile.open(archive) as sdist:
        for member in sdist:
            name = str(PurePosixPath(*PurePosixPath(member.name).parts[1:]))
            if member.isfile() and name.startswith("deepspeed/"):
                yield name, sdist.extractfile(member).read()  # type: ignore[union-attr]


def unpack(archives: Path, target: Path) -> int:
    """Write what is wanted of every archive into `target`; returns how many bytes."""
    total = 0
    for archive in sorted(archives.iterdir()):
        files = wheel_files(archive) if archive.suffix == ".whl" else sdist_files(archive)
        for name, content in files:
            if not wanted(name):
                continue
            path = target / name
            if not path.resolve().is_relative_to(target.resolve()):
                raise ValueError(f"{archive.name} holds {name}, which lies outside of {target}.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if path.parent.name == "bin":
                path.chmod(0o755)
            total += len(content)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Download and unpack the libraries that offstage is compared with.")
    parser.add_argument("--python", default="3.12", help="the version that will import them")
    parser.add_argument("--target", type=Path, default=PEERS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), options.python)
        shutil.rmtree(options.target, ignore_errors=True)
        size = unpack(Path(folder), options.target)
    print(f"{size / 2**20:.1f} MiB in {options.target}")


if __name__ == "__main__":
    main()
