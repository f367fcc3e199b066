# SPDX-License-Identifier: Apache-2.0
"""Megatron's offload flags, in its own config objects, become offstage's settings, or raise: none does nothing."""

import argparse
import dataclasses
import re
import types
from pathlib import Path

import pytest
import torch

from offstage import ActivationConfig, ConfigError, OffloadConfig, OffloadIneffectiveError
from offstage.integrations.megatron import config_from_megatron, offload, parts, switch_off
from offstage.integrations.megatron.reading import BESIDE, SWITCHES
from tests.support import megatron

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

FLAGS = {*SWITCHES, *(flag for flags in BESIDE.values() for flag in flags)}
DEVELOPMENT = {
    "offload_optimizer_states",
    "chunked_optimizer_state_offload",
    "optimizer_state_offload_fraction",
    "optimizer_state_offload_chunk_size_mb",
}
"""Flags that 0.19.2 does not have."""


@pytest.fixture(scope="module", autouse=True)
def imported():
    megatron.load()


def optimizer(**fields):
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(**{"lr": 0.1, "use_distributed_optimizer": True, "bf16": True, **fields})


def transformer(**fields):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(**{"num_layers": 8, "hidden_size": 16, "num_attention_heads": 2, **fields})


def arguments(**fields):
    """What Megatron's command line leaves in its namespace, with its defaults (`test_the_defaults_of_...`)."""
    defaults = {
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 1.0,
        "use_torch_optimizer_for_cpu_offload": False,
        "overlap_cpu_optimizer_d2h_h2d": False,
        "pin_cpu_grads": True,
        "pin_cpu_params": True,
        "cpu_offloading_num_layers": 0,
        "fine_grained_activation_offloading": False,
        "offload_modules": [],
        "rl_offload_optimizer_during_inference": False,
        "optimizer": "adam",
        "num_layers": 8,
        "bf16": True,
    }
    return argparse.Namespace(**{**defaults, **fields})


def command_line():
    """The source of its argument parser, which imports on Python 3.12 only."""
    return (Path(megatron.load().__file__).parents[1] / "training" / "arguments.py").read_text()


# Names and defaults


def test_every_flag_is_one_of_the_installed_version_or_of_the_development_branch():
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    fields = {field.name for cls in (OptimizerConfig, TransformerConfig) for field in dataclasses.fields(cls)}
    assert FLAGS - fields == {*DEVELOPMENT, "rl_offload_optimizer_during_inference"}
    assert "--rl-offload-optimizer-during-inference" in command_line()


def test_every_offload_flag_of_the_installed_version_is_known():
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    fields = {field.name for cls in (OptimizerConfig, TransformerConfig) for field in dataclasses.fields(cls)}
    named = {name for name in fields if "offload" in name or name.startswith("pin_cpu")}
    assert named - FLAGS == {"_cpu_offloading_context"}


@pytest.mark.parametrize(
    "text",
    [
        r"'--optimizer-offload-fraction', type=float, default=1.0",
        r"'--optimizer-cpu-offload', action='store_true'",
        r"if args.cpu_offloading_num_layers > 0:\s+args.cpu_offloading = True",
        r"'--no-pin-cpu-grads', action='store_false', dest='pin_cpu_grads'",
    ],
)
def test_the_defaults_of_the_command_line(text):
    assert re.search(text, command_line())


@pytest.mark.parametrize("make", [optimizer, transformer, arguments])
def test_with_nothing_set_nothing_is_asked_for(make):
    flags = config_from_megatron(make())
    assert (flags.state, flags.activations, flags.modules, flags.sleeps, flags.became) == (None, None, (), (), ())
    assert str(flags) == "no offload flag of Megatron is set"


def test_arguments_and_configs_together():
    flags = config_from_megatron(arguments(), optimizer(), transformer())
    assert flags.state is None
    assert flags.activations is None


# Optimizer state


STATE = {
    "all by the CPU": ({"optimizer_cpu_offload": True}, {"update_on": "host", "fraction": 1.0}),
    "a share": (
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25, "overlap_cpu_optimizer_d2h_h2d": True},
        {"update_on": "host", "fraction": 0.25},
    ),
    "torch's own": (
        {"optimizer_cpu_offload": True, "use_torch_optimizer_for_cpu_offload": True},
        {"update_on": "host", "fraction": 1.0, "rule": "torch"},
    ),
    "pageable": (
        {"optimizer_cpu_offload": True, "pin_cpu_grads": False, "pin_cpu_params": False},
        {"update_on": "host", "fraction": 1.0, "pin_memory": False},
    ),
    "window": ({"offload_optimizer_states": True}, {"window": "all"}),
    "chunks": ({"chunked_optimizer_state_offload": True}, {}),
    "chunks of a size": (
        {
            "chunked_optimizer_state_offload": True,
            "optimizer_state_offload_fraction": 0.5,
            "optimizer_state_offload_chunk_size_mb": 32,
        },
        {"fraction": 0.5, "chunk_bytes": "32MiB"},
    ),
    "window and CPU": (
        {"offload_optimizer_states": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25},
        {"window": "all", "host_fraction": 0.25},
    ),
    "formats": (
        {
            "chunked_optimizer_state_offload": True,
            "use_precision_aware_optimizer": True,
            "store_param_remainders": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "fp32",
        },
        {"master_weights": "split", "state_dtype": {"exp_avg": "bfloat16"}},
    ),
    "formats on the CPU": (
        {
            "optimizer_cpu_offload": True,
            "use_precision_aware_optimizer": True,
            "store_param_remainders": True,
            "exp_avg_sq_dtype": torch.bfloat16,
        },
        {"update_on": "host", "fraction": 1.0, "state_dtype": {"exp_avg_sq": "bfloat16"}},
    ),
}


@pytest.mark.parametrize("case", STATE)
def test_state(case):
    fields, settings = STATE[case]
    flags = config_from_megatron(arguments(**fields))
    assert flags.state == OffloadConfig(**settings)
    assert flags.activations is None
    told = {one.flag: one.value for one in flags.became}
    on = {name: value for name, value in fields.items() if value is not False and value not in ("fp32",)}
    assert told.items() >= {name: v for name, v in on.items() if name != "store_param_remainders"}.items()
    assert all(one.flag in str(flags) and one.here in str(flags) for one in flags.became)


@pytest.mark.parametrize("case", STATE)
def test_what_the_flags_become_trains_in_megatrons_optimizer(process_group, case):
    """Small enough for this model, and with the state where they say."""
    fields, settings = STATE[case]
    state = config_from_megatron(arguments(**fields)).state
    with megatron.session():
        chunks = megatron.make_model(torch.bfloat16, ddp={"use_distributed_optimizer": True})
        optimizer = megatron.make_optimizer(chunks)
        offload(optimizer, dataclasses.replace(state, min_bytes=0, chunk_bytes="16KiB"), model=chunks)
        megatron.train(chunks, optimizer, 2)
        receipts = [part.receipt() for part in parts(optimizer)]
    moved = sum(receipt.total_bytes_fetched + receipt.total_bytes_stored for receipt in receipts)
    assert moved > 0
    by_host = any(receipt.host_update_ms is not None for receipt in receipts)
    assert by_host == ("update_on" in settings or "host_fraction" in settings)


def test_the_optimizer_config_itself():
    flags = config_from_megatron(optimizer(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5))
    assert flags.state == OffloadConfig(update_on="host", fraction=0.5)


def test_the_default_of_the_optimizer_config_offloads_nothing_and_raises():
    with pytest.raises(OffloadIneffectiveError, match=r"optimizer_offload_fraction=0\.0 offloads nothing.*Set"):
        config_from_megatron(optimizer(optimizer_cpu_offload=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer_offload_fraction": 0.5}, "optimizer_cpu_offload is off"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "optimizer_cpu_offload is off"),
        ({"use_torch_optimizer_for_cpu_offload": True}, "optimizer_cpu_offload is off"),
        ({"pin_cpu_grads": False}, "optimizer_cpu_offload is off"),
        ({"optimizer_state_offload_fraction": 0.5}, "chunked_optimizer_state_offload is off"),
        ({"chunked_optimizer_state_offload": True, "optimizer_state_offload_fraction": 0.0}, "offloads nothing"),
        ({"offload_optimizer_states": True, "optimizer_cpu_offload": True}, "none is left"),
    ],
)
def test_state_flags_that_would_do_nothing(fields, message):
    with pytest.raises(OffloadIneffectiveError, match=message):
        config_from_megatron(arguments(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer_offload_fraction": 1.5}, "from 0 to 1; found 1.5"),
        ({"optimizer_cpu_offload": 1}, "True or False; found 1"),
        ({"fp8_param_gather": True}, "fp8_param_gather=True: .*fp32, bf16 or fp16"),
        ({"optimizer_cuda_graph": True}, "optimizer_cuda_graph=True: a captured step"),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}, "main_params_dtype='fp16'"),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8"}, "exp_avg_dtype='fp8'.*fp32 or bf16"),
        (
            {
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": "bf16",
                "use_torch_optimizer_for_cpu_offload": True,
            },
            "rule='torch'",
        ),
    ],
)
def test_state_flags_that_cannot_be_used(fields, message):
    with pytest.raises(ConfigError, match=message):
        config_from_megatron(arguments(**{"optimizer_cpu_offload": True, **fields}))


def test_a_background_writer_which_megatron_refuses_beside_state_in_chunks():
    flags = config_from_megatron(arguments(chunked_optimizer_state_offload=True, async_save=True))
    assert flags.state == OffloadConfig()
    assert "async_save=True: works" in str(flags)


# Activations


def test_layers():
    flags = config_from_megatron(transformer(cpu_offloading=True, cpu_offloading_num_layers=3))
    assert flags.activations == ActivationConfig(layers=3)
    assert flags.modules == ()
    assert flags.state is None


def test_the_command_line_has_only_the_number_of_layers():
    assert config_from_megatron(arguments(cpu_offloading_num_layers=3)).activations == ActivationConfig(layers=3)


def test_pipelines_and_recompute_which_megatron_refuses_beside_it():
    beside = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for fields, why in ((beside, "Pipeline parallelism"), (recompute, "recomputation")):
        with pytest.raises(ValueError, match=why):
            transformer(cpu_offloading=True, cpu_offloading_num_layers=3, **fields)
    flags = config_from_megatron(arguments(cpu_offloading_num_layers=3, **beside, **recompute))
    assert flags.activations == ActivationConfig(layers=3)
    told = {one.flag: one.here for one in flags.became}
    assert "Megatron's own refuses" in told["pipeline_model_parallel_size"]
    assert "Megatron's own refuses" in told["recompute_granularity"]


def test_parts_of_layers():
    flags = config_from_megatron(
        transformer(
            fine_grained_activation_offloading=True,
            offload_modules=["core_attn", "attn_proj"],
            activation_offload_fraction=0.5,
            min_offloaded_tensor_size=1000,
            fine_grained_offloading_max_inflight_offloads=2,
            bf16=True,
        )
    )
    assert flags.activations == ActivationConfig(fraction=0.5, min_bytes=2000, prefetch=2)
    assert flags.modules == ("core_attn", "attn_proj")


PARTS = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
LAYERS = {"cpu_offloading": True, "cpu_offloading_num_layers": 3}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cpu_offloading": True}, "cpu_offloading_num_layers=0 offloads nothing"),
        ({"cpu_offloading": False, "cpu_offloading_num_layers": 3}, "cpu_offloading is off"),
        ({"cpu_offloading_double_buffering": True}, "cpu_offloading is off"),
        ({**LAYERS, "cpu_offloading_activations": False}, "leaves saved tensors on the device"),
        ({"fine_grained_activation_offloading": True}, "without offload_modules offloads nothing"),
        ({"offload_modules": ["core_attn"]}, "fine_grained_activation_offloading is off"),
        ({"fine_grained_offloading_max_inflight_offloads": 1}, "fine_grained_activation_offloading is off"),
        ({**PARTS, "activation_offload_fraction": 0.0}, "offloads nothing"),
        ({**PARTS, "recompute_granularity": "full"}, "only their inputs"),
        (
            {
                **PARTS,
                "offload_modules": ["expert_fc1"],
                "recompute_granularity": "selective",
                "recompute_modules": ["moe"],
            },
            "saves nothing inside",
        ),
    ],
)
def test_activation_flags_that_would_do_nothing(fields, message):
    with pytest.raises(OffloadIneffectiveError, match=message):
        config_from_megatron(arguments(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**LAYERS, **PARTS}, "expected one of them"),
        ({**LAYERS, "cpu_offloading_num_layers": 9}, "the model has 8 layers"),
        ({**LAYERS, "cpu_offloading_weights": True}, "cpu_offloading_weights=True: Megatron's DDP"),
        ({**LAYERS, "cuda_graph_impl": "full_iteration"}, "cuda_graph_impl='full_iteration': saved tensors"),
        ({**LAYERS, "moe_paged_stash": True}, "moe_paged_stash=True: "),
        ({**LAYERS, "overlap_moe_expert_parallel_comm": True}, "never calls the model"),
        (
            {**LAYERS, "recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            "'layernorm', with which",
        ),
        ({**PARTS, "delay_offload_until_cuda_graph": True}, "captured graph"),
        ({**PARTS, "delta_offload_bytes_across_pp_ranks": 100}, "lower fraction on later stages"),
        ({**PARTS, "offload_modules": ["attention"]}, "found 'attention'"),
        ({**PARTS, "offload_modules": ["moe_act"]}, "a function inside the experts"),
        ({**PARTS, "offload_modules": ["expert_fc1", "fused_group_mlp"]}, "a part of it"),
    ],
)
def test_activation_flags_that_cannot_be_used(fields, message):
    with pytest.raises(ConfigError, match=message):
        config_from_megatron(arguments(**fields))


# Sleep, Bridge, objects that are something else


def test_sleep():
    flags = config_from_megatron(arguments(rl_offload_optimizer_during_inference=True))
    assert flags.sleeps == ("optimizer",)
    assert flags.state is None
    assert "sleep()" in str(flags)


def test_a_container_as_megatron_bridge_has_it():
    container = types.SimpleNamespace(
        optimizer=optimizer(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
        model=transformer(cpu_offloading=True, cpu_offloading_num_layers=2),
        ddp=types.SimpleNamespace(fp8_param_gather=False),
    )
    flags = config_from_megatron(container)
    assert flags.state == OffloadConfig(update_on="host", fraction=0.5)
    assert flags.activations == ActivationConfig(layers=2)
    container.ddp.fp8_param_gather = True
    with pytest.raises(ConfigError, match="fp8_param_gather=True"):
        config_from_megatron(container)


def test_a_mapping():
    settings = {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}}
    assert config_from_megatron(settings).state == OffloadConfig(update_on="host", fraction=1.0)


@pytest.mark.parametrize("given", [(), (None,), (torch.nn.Linear(1, 1),), ("adam",), ({"lr": 0.1},)])
def test_something_else(given):
    with pytest.raises(ConfigError, match=r"expects Megatron's arguments.*Pass get_args\(\)"):
        config_from_megatron(*given)


def test_configs_that_disagree():
    on = {"optimizer_cpu_offload": True}
    with pytest.raises(ConfigError, match=r"disagree about optimizer_offload_fraction: found 1\.0 and 0\.5"):
        config_from_megatron(arguments(**on), optimizer(**on, optimizer_offload_fraction=0.5))


# Off, so that Megatron builds what is offloaded here


def test_switched_off_megatron_builds_the_plain_optimizer(process_group):
    fields = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.bfloat16,
    }
    config = optimizer(**fields, bf16=False)
    flags = config_from_megatron(config)
    assert flags.state == OffloadConfig(update_on="host", fraction=0.5, state_dtype={"exp_avg": "bfloat16"})
    switch_off(config)
    assert config_from_megatron(config).state is None
    with megatron.session():
        from megatron.core.optimizer import get_megatron_optimizer

        chunks = megatron.make_model(ddp={"use_distributed_optimizer": True})
        built = get_megatron_optimizer(config, chunks)
        assert {type(one.optimizer) for one in built.chained_optimizers} == {torch.optim.AdamW}


def test_switched_off_arguments_ask_for_nothing():
    every = {"optimizer_cpu_offload": True, "offload_optimizer_states": True, "optimizer_offload_fraction": 0.5}
    every |= {"cpu_offloading_num_layers": 2, "exp_avg_dtype": "bf16"}
    args = arguments(**every)
    switch_off(args)
    assert config_from_megatron(args).became == ()
    assert args.exp_avg_dtype == "fp32"
    assert args.offload_modules == []
    assert not hasattr(args, "cpu_offloading")


def test_what_its_rl_loop_calls_stays_on():
    args = arguments(rl_offload_optimizer_during_inference=True)
    switch_off(args)
    assert config_from_megatron(args).sleeps == ("optimizer",)
