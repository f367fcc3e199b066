# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on a device, as one rank: the bits of fused AdamW, state that stays on the host, checkpoints while training."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import offstage
from benchmarks.overlap_bits import (
    MAX_NORMS,
    SMALL,
    Checked,
    Gates,
    Size,
    batches,
    delayed_lanes,
    groups_of,
    offloaded,
)
from offstage import checkpoint
from offstage.errors import CheckpointError, ConfigError
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.tensors import local_of
from tests.support.gates import DeviceMemory
from tests.support.lives import end_step
from tests.support.training import same_bits

DEVICE, BACKEND = "cuda", "nccl"
STEPS = 8
PLANS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "window, in backward": {"window": "some", "update_in_backward": True},
    "half by the host": {"host_fraction": 0.5},
}
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16, fp32 masters": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16, split masters": (torch.bfloat16, {"master_weights": "split"}),
}
BF16 = [name for name, (dtype, _) in FORMATS.items() if dtype == torch.bfloat16]
LARGE = Size(gates=6, window=2**21)
"""State of about 12 MiB, so that device memory that grows by a part of it is seen."""
SLACK = 512 * 1024
"""What may come and go on the device without being state: counters, coefficients, rounding by the allocator."""


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, which needs no network."""
    for library in ("NCCL", "GLOO"):
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", "lo")
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Training


def sharded(dtype: torch.dtype, size: Size, **options: Any) -> Gates:
    """Elementwise, so that nothing but the updates decides its bits. Its first gate is called twice."""
    torch.manual_seed(0)
    model = Gates(size).to(dtype).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (1,))
    for gate in model.gates:
        fully_shard(gate, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


class Job:
    """A sharded model and its optimizer; without a config it is torch's own, fused."""

    def __init__(self, config: dict[str, Any] | None, form: str, *, clip: str = "none", size: Size = SMALL) -> None:
        dtype, formats = FORMATS[form]
        self.model = sharded(dtype, size)
        self.optimizer: Any
        if config is None:
            options = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
            self.optimizer = torch.optim.AdamW(groups_of(self.model), **options, fused=True)
        else:
            self.optimizer = offloaded(self.model, size, {**formats, **config})
        self.norms: list[torch.Tensor] = []
        self.updated_in_backward = 0
        self._clip = clip
        data = batches(size, DEVICE, 2 * STEPS)
        self._data = iter([(x.to(dtype), gradient.to(dtype)) for x, gradient in data])

    def train(self, steps: int = STEPS) -> "Job":
        for x, gradient in [next(self._data) for _ in range(steps)]:
            self.model(x).backward(gradient)
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            self.updated_in_backward += sum(isinstance(param.grad, DroppedGradient) for param in params)
            if self._clip != "none":
                self._clip_gradients(params)
            end_step(self.optimizer)
        return self

    def skip(self, steps: int) -> "Job":
        """The data of `steps` steps was trained on by another job."""
        for _ in range(steps):
            next(self._data)
        return self

    def _clip_gradients(self, params: list[torch.Tensor]) -> None:
        max_norm = MAX_NORMS[self._clip]
        if isinstance(self.optimizer, offstage.OffloadedOptimizer):
            self.norms.append(self.optimizer.clip_grad_norm_(max_norm))
        else:
            self.norms.append(nn.utils.clip_grad_norm_(params, max_norm).full_tensor())

    def kept(self) -> dict[str, torch.Tensor]:
        """Weights, state and norms, copied to the host."""
        found = {f"weight {name}": local_of(param.detach()) for name, param in self.model.named_parameters()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"{name} {index}": local_of(torch.as_tensor(value)) for name, value in values.items()}
        found |= {f"norm {step}": norm for step, norm in enumerate(self.norms)}
        return {name: tensor.cpu().clone() for name, tensor in found.items()}


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert all(tensor.isfinite().all() for tensor in ours.values())
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not same_bits(ours[name], theirs[name])]


@functools.cache
def fused(clip: str) -> dict[str, torch.Tensor]:
    """fp32 parameters with `torch.optim.AdamW(fused=True)`, under FSDP2."""
    return Job(None, "fp32", clip=clip).train().kept()


@functools.cache
def resident(form: str, clip: str) -> dict[str, torch.Tensor]:
    """Nothing offloaded, under FSDP2."""
    return Job({"fraction": 0.0}, form, clip=clip).train().kept()


def assert_did_as_planned(job: Job, plan: str) -> None:
    """The run cannot have been one of another plan."""
    receipt = job.optimizer.receipt()
    assert receipt.total_bytes_fetched > 0
    assert (job.updated_in_backward > 0) == PLANS[plan].get("update_in_backward", False)
    assert (receipt.host_update_ms is not None) == ("host_fraction" in PLANS[plan])
    assert receipt.fallbacks == ()


# The same bits


@pytest.mark.parametrize("clip", ["none", "sometimes"])
@pytest.mark.parametrize("plan", PLANS)
def test_fp32_has_the_bits_of_fused_adamw(plan: str, clip: str) -> None:
    job = Job(PLANS[plan], "fp32", clip=clip).train()
    assert different(job.kept(), fused(clip)) == []
    assert_did_as_planned(job, plan)


@pytest.mark.parametrize("clip", ["none", "sometimes"])
@pytest.mark.parametrize("form", BF16)
@pytest.mark.parametrize("plan", PLANS)
def test_bf16_has_the_bits_of_resident_state(plan: str, form: str, clip: str) -> None:
    job = Job(PLANS[plan], form, clip=clip).train()
    assert different(job.kept(), resident(form, clip)) == []
    assert_did_as_planned(job, plan)


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.UPDATE, Lane.STORE], ids=lambda lane: lane.value)
@pytest.mark.parametrize("plan", PLANS)
def test_delays_change_nothing(plan: str, lane: Lane) -> None:
    """FSDP2 gathers the weights on a stream of its own, ahead of the modules that need them."""
    with delayed_lanes(lane):
        job = Job(PLANS[plan], "bf16, split masters").train()
        assert different(job.kept(), resident("bf16, split masters", "none")) == []


@pytest.mark.parametrize("plan", PLANS)
def test_the_checker_finds_nothing_on_real_streams(plan: str) -> None:
    lanes = Checked()
    with use_lanes(lanes):
        job = Job(PLANS[plan], "bf16, split masters", clip="sometimes").train()
        assert different(job.kept(), resident("bf16, split masters", "sometimes")) == []
    assert lanes.accesses > 500


def test_overlap_in_forward_is_left_to_step_and_said_so() -> None:
    job = Job({"overlap_forward": True}, "fp32").train()
    assert different(job.kept(), fused("none")) == []
    assert any("FSDP2" in text for text in job.optimizer.receipt().fallbacks)


def test_parameters_that_fsdp2_has_offloaded_are_refused() -> None:
    model = sharded(torch.float32, SMALL, offload_policy=CPUOffloadPolicy())
    for arguments in ((), (model,)):
        with pytest.raises(ConfigError, match="CPUOffloadPolicy"):
            offstage.offload(torch.optim.AdamW(model.parameters()), *arguments)


# State on the host


@pytest.mark.parametrize("form", FORMATS)
def test_state_is_handed_out_as_dtensors_in_host_memory(form: str) -> None:
    job = Job(PLANS["streamed"], form, size=LARGE).train(2)
    params = [param for group in job.optimizer.param_groups for param in group["params"]]
    memory = DeviceMemory()
    state = job.optimizer.state_dict()["state"]
    assert memory.peak_growth() <= SLACK
    tensors = [
        (params[index], value) for index, values in state.items() for name, value in values.items() if name != "step"
    ]
    assert len(tensors) == len(params) * (2 if form == "fp32" else 3)
    for param, value in tensors:
        assert isinstance(value, DTensor)
        assert value.shape == param.shape
        assert (value.device_mesh, value.placements) == (param.device_mesh, param.placements)
        assert value.device_mesh.device_type == DEVICE
        assert local_of(value).device.type == "cpu"


def test_state_that_is_handed_out_is_the_state_itself() -> None:
    """Not a copy: where nothing has to be joined, later steps show in it."""
    job = Job(PLANS["streamed"], "fp32").train(1)
    wide = max(job.model.parameters(), key=lambda param: param.numel())
    held = job.optimizer.state[wide]["exp_avg"]
    before = local_of(held).clone()
    job.train(1)
    assert same_bits(local_of(held), local_of(job.optimizer.state[wide]["exp_avg"]))
    assert not same_bits(local_of(held), before)


# torch's own checkpoints


def state_dicts(job: Job) -> dict[str, Any]:
    return {"model": get_model_state_dict(job.model), "optim": get_optimizer_state_dict(job.model, job.optimizer)}


@pytest.mark.parametrize("form", FORMATS)
def test_a_stock_checkpoint_comes_back_without_device_memory(form: str, tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` on what `get_optimizer_state_dict` returns, into another plan and further on."""
    job = Job(PLANS["streamed"], form, size=LARGE).train(3)
    memory = DeviceMemory()
    dcp.save(state_dicts(job), checkpoint_id=tmp_path / "stock")
    assert memory.peak_growth() <= SLACK
    saved = job.kept()

    other = Job(PLANS["half by the host"], form, size=LARGE).train(1)
    memory = DeviceMemory()
    loaded = state_dicts(other)
    dcp.load(loaded, checkpoint_id=tmp_path / "stock")
    set_model_state_dict(other.model, loaded["model"])
    set_optimizer_state_dict(other.model, other.optimizer, loaded["optim"])
    assert memory.peak_growth() <= SLACK
    assert different(other.kept(), saved) == []
    assert different(other.skip(2).train(3).kept(), job.train(3).kept()) == []


@pytest.mark.parametrize("on_host", [False, True], ids=["full", "full, on the host"])
def test_full_state_dicts(on_host: bool) -> None:
    """Plain tensors of the global shape, out and in again."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=on_host)
    job = Job(PLANS["streamed"], "bf16, split masters").train(3)
    full = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    shapes = {name: param.shape for name, param in job.model.named_parameters()}
    for name, values in full["state"].items():
        for key in ("exp_avg", "exp_avg_sq", "master_weight"):
            assert not isinstance(values[key], DTensor)
            assert values[key].shape == shapes[name]
            assert not on_host or values[key].device.type == "cpu"
    assert full["state"].keys() == shapes.keys()

    other = Job(PLANS["streamed"], "bf16, split masters").train(1)
    set_model_state_dict(other.model, get_model_state_dict(job.model, options=options), options=options)
    set_optimizer_state_dict(other.model, other.optimizer, full, options=options)
    assert different(other.kept(), job.kept()) == []


# Our checkpoints


@pytest.mark.parametrize("trained", [0, 1], ids=["new", "trained"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_checkpoint_comes_back_without_device_memory(plan: str, form: str, trained: int, tmp_path: Path) -> None:
    """Into the next plan of the list, by an optimizer that is new or not, and further on as if nothing had happened."""
    job = Job(PLANS[plan], form, size=LARGE).train(3)
    memory = DeviceMemory()
    checkpoint.save(tmp_path / "saved", job.model, job.optimizer, extra={"steps": 3})
    assert memory.peak_growth() <= SLACK
    saved = job.kept()

    names = list(PLANS)
    other = Job(PLANS[names[(names.index(plan) + 1) % len(names)]], form, size=LARGE).train(trained)
    memory = DeviceMemory()
    assert checkpoint.load(tmp_path / "saved", other.model, other.optimizer) == {"steps": 3}
    assert memory.peak_growth() <= SLACK
    assert different(other.kept(), saved) == []
    assert different(other.skip(3 - trained).train(3).kept(), job.train(3).kept()) == []


DELAYS = [None, Lane.FETCH, Lane.UPDATE, Lane.STORE, Lane.HOST]


@pytest.mark.parametrize("lane", DELAYS, ids=lambda lane: lane.value if lane else "no delay")
@pytest.mark.parametrize("plan", PLANS)
def test_a_save_beside_training_holds_the_state_at_the_call(plan: str, lane: Lane | None, tmp_path: Path) -> None:
    """Training goes on while files are written; what is about to be overwritten is copied first."""
    form = "bf16, split masters"
    with delayed_lanes(lane) if lane is not None else contextlib.nullcontext():
        job = Job(PLANS[plan], form, size=LARGE).train(3)
        saved = job.kept()
        save = checkpoint.async_save(tmp_path / "beside", job.model, job.optimizer, extra={"steps": 3})
        job.train(5)
        save.result(timeout=60)
        trained = job.kept()
    assert different(trained, saved)  # or there would be nothing to tell apart
    host_bytes = job.optimizer.receipt().host_state_bytes
    weights = sum(param.nbytes for param in job.model.parameters())
    assert weights <= save.extra_bytes <= host_bytes + 2 * weights

    other = Job({"fraction": 0.0}, form, size=LARGE).train(1)
    assert checkpoint.load(tmp_path / "beside", other.model, other.optimizer) == {"steps": 3}
    assert different(other.kept(), saved) == []
    assert different(other.skip(2).train(5).kept(), trained) == []


def test_two_saves_beside_training(tmp_path: Path) -> None:
    job = Job(PLANS["streamed"], "fp32", size=LARGE).train(2)
    kept, saves = [], []
    for number in range(2):
        kept.append(job.kept())
        saves.append(checkpoint.async_save(tmp_path / str(number), job.model, job.optimizer))
        job.train(2)
    for save in saves:
        save.result(timeout=60)
    for number, expected in enumerate(kept):
        other = Job(PLANS["streamed"], "fp32", size=LARGE)
        checkpoint.load(tmp_path / str(number), other.model, other.optimizer)
        assert different(other.kept(), expected) == []


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    job = Job(PLANS["streamed"], "fp32").train(2)
    checkpoint.save(tmp_path / "saved", job.model, job.optimizer)
    largest = max((tmp_path / "saved").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    before = job.train(1).kept()
    with pytest.raises(CheckpointError, match=largest.name):
        checkpoint.load(tmp_path / "saved", job.model, job.optimizer)
    assert different(job.kept(), before) == []
