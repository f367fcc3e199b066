# SPDX-License-Identifier: Apache-2.0
"""The real megatron-core on CPUs with gloo: all that tests patch in it, and a tiny GPT trained as Megatron trains.

    with megatron.session():                          # or session(tp=2), pp=2, ep=2, in a rank of `ranks`
        chunks = megatron.make_model(torch.bfloat16)  # GPTModel in Megatron's DDP, one per pipeline chunk
        optimizer = megatron.make_optimizer(chunks, use_distributed_optimizer=True)
        losses = megatron.train(chunks, optimizer, range(3))

megatron-core is imported only inside these functions. `ranks.run(2, work, megatron.LOADED)` imports it once in the
server of the ranks rather than in each of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

VOCABULARY = 64
LENGTH = 8
"""Tokens in one sequence."""
SEQUENCES = 2
"""In one micro-batch."""


# Importing it

_MODULES = [
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
]


def load() -> Any:
    """`megatron.core`, imported with the stand-ins that its import needs on a machine without a GPU.

    - `triton`, if it is missing: megatron-core decorates kernels with it at import. None of them runs here, and torch,
      which looks for triton too, must not see the stand-in: it goes again.
    - `torch.compile` leaves functions as they are: its fusions would need a compiler, and minutes.
    - `torch.storage._load_from_bytes`, which it replaces for the whole process, is put back: what a rank returns is
      unpickled in a process without megatron-core.
    """
    if "megatron.core" in sys.modules:
        return sys.modules["megatron.core"]
    import torch._dynamo  # it looks for triton when it is imported

    with contextlib.ExitStack() as during:
        during.enter_context(mock.patch.object(torch, "compile", _undecorated))
        during.enter_context(mock.patch.object(torch.storage, "_load_from_bytes", torch.storage._load_from_bytes))
        during.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # about Transformer Engine, Apex and others that it goes on without
        try:
            import triton  # noqa: F401
        except ImportError:
            during.enter_context(mock.patch.dict(sys.modules, _triton()))
        for name in _MODULES:
            importlib.import_module(name)
        # The end of the stand-in would take every new module with it.
        imported = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "triton"}
    sys.modules.update(imported)
    return sys.modules["megatron.core"]


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else _undecorated


def _triton() -> dict[str, types.ModuleType]:
    """Modules every name of which is a decorator that changes nothing."""

    def stand_in(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _undecorated

    modules = {name: types.ModuleType(name) for name in ("triton", "triton.language")}
    for module in modules.values():
        module.__getattr__ = stand_in  # type: ignore[method-assign]
    modules["triton"].language = modules["triton.language"]  # type: ignore[attr-defined]
    modules["triton"].__version__ = "3.0.0"  # type: ignore[attr-defined]  # one whose kernels it does not use on CPUs
    return modules


class _Loaded:
    """Imports megatron-core in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return _loaded, ()


def _loaded() -> _Loaded:
    load()
    return LOADED


LOADED = _Loaded()


# Patches


class _CpuForCuda(TorchFunctionMode):
    """Factories asked for CUDA tensors make CPU tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if any(map(_is_cuda, args)):  # Tensor.to("cuda")
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
        return function(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None and not args and not kwargs:
        return "torch.cuda." + _TYPE(tensor).rpartition(".")[2]
    return _TYPE(tensor, dtype, *args, **kwargs)


_TYPE = torch.Tensor.type


def _as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    return value


class _Queue:
    """A stream or an event of a device whose work is done when it is submitted."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = wait = record = record_event = synchronize = nothing

    def query(self) -> bool:
        return True


def _set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _patches() -> list[tuple[Any, str, Any]]:
    """Where megatron-core insists on CUDA, and what stands there on CPUs. With `_CpuForCuda` this is everything."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writing
    import megatron.core.tensor_parallel.random as random

    def on_one_device(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return [
        # its optimizers tell 16-bit parameters from others by the name of a CUDA type
        (torch.Tensor, "type", _type),
        # buffers, losses and messages between stages are made on "the current device"
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.Tensor, "cuda", _as_it_is),
        (torch.nn.Module, "cuda", _as_it_is),
        # gradient reduction and pipeline messages order themselves with streams and events
        (torch.cuda, "Stream", _Queue),
        (torch.cuda, "Event", _Queue),
        (torch.cuda, "current_stream", _Queue),
        (torch.cuda, "default_stream", _Queue),
        (torch.cuda, "stream", on_one_device),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "set_device", nothing),
        (torch.cuda, "empty_cache", nothing),
        # its tracker keeps several states of the device's random numbers: here of the CPU's
        (torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
        (torch.cuda.random, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (random, "_set_cuda_rng_state", _set_rng_state),
        # a save hands its results on through a process of its own, which ranks may not start: here it writes in threads
        (writing, "get_write_results_queue", lambda mp_mode="spawn": queue.SimpleQueue()),
    ]


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """megatron-core imported, and every patch in force inside."""
    load()
    with contextlib.ExitStack() as during:
        for owner, name, value in _patches():
            during.enter_context(mock.patch.object(owner, name, value))
        during.enter_context(_CpuForCuda())
        yield


@contextlib.contextmanager
def session(*, tp: int = 1, pp: int = 1, ep: int = 1, virtual: int | None = None) -> Iterator[None]:
    """Megatron's process groups over the default group, which must exist, and everything `patched`."""
    with patched():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=virtual,
            expert_model_parallel_size=ep,
        )
        try:
            model_parallel_cuda_manual_seed(123, force_reset_rng=True)
            yield
        finally:
            parallel_state.destroy_model_parallel()


# A model, its optimizer, its loop


def make_model(
    dtype: torch.dtype = torch.float32,
    *,
    ddp: dict[str, Any] | None = None,
    full: Sequence[str] = (),
    **config: Any,
) -> list[Any]:
    """A GPT of two layers in Megatron's DDP, in as many chunks as this rank has of the pipeline.

    `config`: fields of `TransformerConfig`; `ddp`: of `DistributedDataParallelConfig`. The seed is always the same.
    `full`: what is in the names of parameters that stay in fp32.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "add_bias_linear": "num_moe_experts" not in config,  # experts have none
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer = TransformerConfig(**{**fields, **config})
    transformer.finalize_model_grads_func = finalize_model_grads
    wrapping = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **(ddp or {})})
    count = transformer.virtual_pipeline_model_parallel_size or 1
    return [_wrapped(transformer, wrapping, full, number) for number in range(count)]


def _wrapped(transformer: Any, wrapping: Any, full: Sequence[str], number: int) -> Any:
    """Chunk `number` of this stage as Megatron's `get_model` leaves it."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(7)
    chunk = _gpt(transformer, number)
    if transformer.params_dtype is not torch.float32:
        chunk = Float16Module(transformer, chunk)
    for name, param in chunk.named_parameters():
        if any(part in name for part in full):
            param.data = param.data.float()
    return DistributedDataParallel(transformer, wrapping, chunk, disable_bucketing=number > 0)


def _gpt(transformer: Any, number: int) -> Any:
    """The part of the GPT that chunk `number` of this stage has."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    several = transformer.virtual_pipeline_model_parallel_size is not None
    where = {"ignore_virtual": False, "vp_stage": number} if several else {}
    return GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=transformer.num_moe_experts),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=False,
        vp_stage=number if several else None,
    )


def make_optimizer(chunks: Sequence[Any], **config: Any) -> Any:
    """`get_megatron_optimizer` for these chunks. `config`: fields of `OptimizerConfig`; the model's dtype is theirs."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = chunks[0].config
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 0.01,
        "min_lr": 0.0,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "bf16": model.bf16,
        "fp16": model.fp16,
        "params_dtype": model.params_dtype,
        "use_distributed_optimizer": chunks[0].ddp_config.use_distributed_optimizer,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_megatron_optimizer(OptimizerConfig(**{**fields, **config}), list(chunks))


def make_scheduler(optimizer: Any, steps: int = 30) -> Any:
    """A learning rate that warms up and falls, and a weight decay that grows."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=3,
        lr_decay_steps=steps,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=steps,
        wd_incr_style="linear",
    )


def tokens(number: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one micro-batch of iteration `number`, different on each data-parallel rank."""
    from megatron.core import parallel_state

    seed = 1000 * number + 10 * micro_batch + parallel_state.get_data_parallel_rank()
    drawn = torch.randint(
        0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(seed), device="cpu"
    )
    return drawn[:, :-1], drawn[:, 1:]


def forward_step(batches: Iterator[Any], model: Any, *, scale: float = 1.0) -> Any:
    """A forward step as Megatron's schedules take it. `scale`: of the loss (`inf` spoils the gradients)."""
    inputs, labels = next(batches)
    positions = torch.arange(LENGTH).expand_as(inputs)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    output = model(inputs, positions, mask, labels=labels)

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean() * scale
        return loss, {"loss": loss.detach().clone()}

    return output, loss_function


def backward(chunks: Sequence[Any], number: int, *, micro_batches: int = 2, scale: float = 1.0) -> list[torch.Tensor]:
    """Forward and backward of one iteration through Megatron's schedule, which reduces gradients at its end."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def batches() -> Iterator[Any]:
        return iter([tokens(number, micro_batch) for micro_batch in range(micro_batches)])

    reduced = get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, scale=scale),
        data_iterator=[batches() for _ in chunks],
        model=list(chunks),
        num_microbatches=micro_batches,
        seq_length=LENGTH,
        micro_batch_size=SEQUENCES,
        forward_only=False,
    )
    return [entry["loss"] for entry in reduced]


def train(
    chunks: Sequence[Any],
    optimizer: Any,
    steps: range | int,
    *,
    scheduler: Any = None,
    spoiled: Sequence[int] = (),
    micro_batches: int = 2,
    after: Callable[[int], None] | None = None,
) -> list[tuple[list[torch.Tensor], bool, Any]]:
    """Iterations as in Megatron's training loop: the losses of each, whether it stepped, and the gradient's norm.

    The loss of the iterations in `spoiled` is infinite: with a loss scale their step is skipped.
    """
    model = chunks[0].config
    model.grad_scale_func = optimizer.scale_loss
    seen = []
    for number in range(steps) if isinstance(steps, int) else steps:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = backward(chunks, number, micro_batches=micro_batches, scale=float("inf") if number in spoiled else 1.0)
        stepped, norm, _ = optimizer.step()
        if stepped and scheduler is not None:
            scheduler.step(increment=1)
        seen.append((losses, stepped, norm))
        if after is not None:
            after(number)
    return seen


def weights(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """A copy of every weight."""
    return [param.detach().clone() for chunk in chunks for param in chunk.parameters()]
