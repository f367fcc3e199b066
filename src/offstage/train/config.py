# SPDX-License-Identifier: Apache-2.0
"""`TrainConfig`: all settings of a run, validated on creation, with one section per part of the trainer.

    config = load_config(Path("run.toml"), ["--run.steps", "500", "--offload.fraction", "0.5"])
    Path("runs/default/config.toml").write_text(to_toml(config))

A section is a table of the TOML file and the prefix of its flags: `steps` under `[run]` is `--run.steps`. The command
line overrides the file, and the file the defaults. Settings are checked together, after both are read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offstage import ConfigError, OffloadConfig
from offstage.config import exact_size
from offstage.train.fit_settings import FitSettings, check_decided
from offstage.train.flags import Values, parse_sections
from offstage.train.lora_settings import LoraSettings
from offstage.train.run_settings import RunSettings
from offstage.train.settings import at_least, check, checked, expected, field_types, nearest

if TYPE_CHECKING:  # functions that use torch import it: it takes seconds, and `offstage train --help` needs none
    import torch

SizeName = Literal["1M", "10M", "50M", "150M", "500M", "1B", "2.7B", "7B", "13B", "18B", "20B"]
"""The names of `train.model.SIZES`."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is trained: a decoder-only transformer of a named size, or a causal language model of transformers."""

    size: SizeName = "1M"
    """Which of the named sizes, about so many parameters: RMSNorm, RoPE, SwiGLU, grouped-query attention."""

    transformers: str | None = None
    """A causal language model of the transformers package instead, with random weights: the path of a config.json or of
    its folder, or a model type such as llama. Needs `pip install transformers`."""

    weights: str | None = None
    """The folder of a transformers model, whose safetensors the run begins with. Without model.transformers, the model
    is the one its config.json describes. A run that is resumed does not read it again."""

    layers: int | None = None
    """Blocks, instead of the size's."""

    width: int | None = None
    """Features of a token between blocks, instead of the size's."""

    heads: int | None = None
    """Attention heads, instead of the size's. They divide the width."""

    kv_heads: int | None = None
    """Heads of keys and values, instead of the size's. They divide the heads; fewer means grouped-query attention."""

    hidden: int | None = None
    """Features inside a block's SwiGLU, instead of the size's."""

    experts: int | None = None
    """Experts per block, instead of one SwiGLU: a mixture of experts."""

    experts_per_token: int | None = None
    """Experts that each token goes to."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Format of weights and activations. auto: bfloat16 on an accelerator, float32 on the CPU, in whichever format
    model.weights are stored. With bfloat16 the optimizer keeps fp32 masters (offload.master_weights)."""

    compile: bool = False
    """torch.compile every block. The first step takes longer."""

    def __post_init__(self) -> None:
        checked(self, "model")
        own = ("layers", "width", "heads", "kv_heads", "hidden", "experts", "experts_per_token")
        given = [name for name in own if getattr(self, name) is not None]
        for name in given:
            at_least(0 if name == "experts" else 1, getattr(self, name), f"model.{name}")
        if self.described_by is not None and (given or self.size != "1M"):
            other, of = given[0] if given else "size", "weights" if self.transformers is None else "transformers"
            raise ConfigError(
                f"model.{of}={self.described_by!r} takes all sizes from its own configuration, which "
                f"contradicts model.{other}={getattr(self, other)!r}. Leave one of the two out; sizes of a "
                "transformers model are changed in its config.json."
            )
        if None not in (self.experts, self.experts_per_token) and self.experts_per_token > self.experts:  # type: ignore[operator]
            raise ConfigError(
                f"model.experts_per_token expects at most the {self.experts} of model.experts; found "
                f"{self.experts_per_token}. Lower it, or raise model.experts."
            )

    @property
    def described_by(self) -> str | None:
        """What says which transformers model it is; `None` for offstage's own."""
        return self.weights if self.transformers is None else self.transformers

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """The format on `device`, with "auto" resolved."""
        import torch

        automatic = "float32" if device.type == "cpu" else "bfloat16"
        dtype: torch.dtype = getattr(torch, automatic if self.dtype == "auto" else self.dtype)
        return dtype


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What it is trained on: text as bytes or tokens, in sequences that are shuffled, each once per epoch."""

    paths: tuple[str, ...] = ()
    """Text files, or folders of them; with column, files of rows. Without any: the source of Python's standard
    library, which is on every machine."""

    column: str | None = None
    """The column that has the text: paths are then .json, .jsonl, .csv, .tsv, .parquet or .txt files, or folders that
    save_to_disk wrote, and each row is a document. Needs `pip install 'offstage[datasets]'`."""

    tokenizer: str | None = None
    """A tokenizer.json of Hugging Face, or the folder that has it. Without it, tokens are bytes. Needs
    `pip install 'offstage[hf]'`."""

    eos_token: str | None = None
    """The token after each document, such as <|endoftext|>. Without it: what the tokenizer's folder names."""

    sequence: int = 256
    """Tokens per sequence; without a tokenizer, a token is a byte."""

    batch: int = 8
    """Sequences per micro-batch and rank."""

    micro_batches: int = 1
    """Micro-batches per optimizer step. More of them use the same memory and make updates rarer."""

    eval_share: float = 0.05
    """Share of the data that is only evaluated on."""

    @property
    def tokenizes(self) -> bool:
        """Whether the data is made into a file of tokens first; otherwise the bytes of the files are the tokens."""
        return self.tokenizer is not None or self.column is not None

    def __post_init__(self) -> None:
        checked(self, "data")
        for name in ("sequence", "batch", "micro_batches"):
            at_least(1, getattr(self, name), f"data.{name}")
        if self.column is not None and not self.paths:
            raise ConfigError(
                f"data.column={self.column!r} names a column of data.paths; found no paths. Give data.paths, or leave "
                "column out for the standard library's source."
            )
        if self.eos_token is not None and self.tokenizer is None:
            raise ConfigError(
                f"data.eos_token={self.eos_token!r} is a token of data.tokenizer; found no tokenizer. Give "
                "data.tokenizer, or leave eos_token out: a zero byte is between documents of bytes."
            )
        if not 0.0 <= self.eval_share < 1.0:
            raise ConfigError(
                f"data.eval_share expects a share from 0.0 to less than 1.0; found {self.eval_share}. Leave it out for "
                "0.05."
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """How it is trained: AdamW with warm-up, cosine and clipping."""

    lr: float = 1e-3
    """The highest learning rate, reached after the warm-up."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.1
    """Of matrices; norms and other vectors have none."""

    clip: float = 1.0
    """Largest norm of all gradients together. 0: no clipping."""

    warm_up: int = 20
    """Steps in which the learning rate rises from 0."""

    last_lr_share: float = 0.1
    """The cosine ends at this share of lr, in the last step."""

    def __post_init__(self) -> None:
        checked(self, "optimizer")
        for name, least in (("lr", 0.0), ("eps", 0.0), ("weight_decay", 0.0), ("clip", 0.0), ("warm_up", 0)):
            at_least(least, getattr(self, name), f"optimizer.{name}")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(
                f"optimizer.betas expects two numbers from 0.0 to less than 1.0; found {list(self.betas)}. Leave it "
                "out for 0.9 and 0.95."
            )
        if not 0.0 <= self.last_lr_share <= 1.0:
            raise ConfigError(
                f"optimizer.last_lr_share expects a share from 0.0 to 1.0; found {self.last_lr_share}. Use 1.0 for a "
                "learning rate that stays, or leave it out for 0.1."
            )

    def learning_rate(self, step: int, steps: int) -> float:
        """Of `step`, counted from 1, of `steps`: warm-up, then a cosine down to `last_lr_share` in the last step."""
        if step <= self.warm_up:
            return self.lr * step / self.warm_up
        progress = min(1.0, (step - self.warm_up) / max(1, steps - self.warm_up))
        return self.lr * (self.last_lr_share + (1 - self.last_lr_share) * (1 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True, kw_only=True)
class ActivationSettings:
    """What happens to the tensors that forward saves for backward."""

    mode: Literal["keep", "checkpoint", "offload", "checkpoint_and_offload"] = "keep"
    """keep: they stay on the device. checkpoint: a block keeps its input and recomputes the rest, a third more time.
    offload: they are stored in host memory. checkpoint_and_offload: blocks recompute from inputs stored in host
    memory."""

    fraction: float = 1.0
    """For offload and checkpoint_and_offload: the share of the saved bytes that leaves."""

    def __post_init__(self) -> None:
        checked(self, "activations")
        if not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(
                f"activations.fraction expects a share from 0.0 to 1.0; found {self.fraction}. Leave it out for 1.0."
            )
        if self.fraction != 1.0 and not self.offloads:
            raise ConfigError(
                f"activations.fraction={self.fraction} is a share of what leaves the device, which contradicts "
                f"activations.mode={self.mode!r}. Use activations.mode='offload', or leave fraction out."
            )

    @property
    def offloads(self) -> bool:
        return self.mode in ("offload", "checkpoint_and_offload")

    @property
    def checkpoints(self) -> bool:
        return self.mode in ("checkpoint", "checkpoint_and_offload")


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How several ranks, started by torchrun, share the work."""

    fsdp: Literal["auto"] | bool = "auto"
    """FSDP2: the ranks of a stage divide weights, gradients and state. auto: if there is more than one of them."""

    stages: int = 1
    """Pipeline stages: consecutive blocks, on different ranks. They divide the number of ranks."""

    schedule: Literal["1F1B", "GPipe", "Interleaved1F1B"] = "1F1B"
    """Order of the micro-batches in a pipeline."""

    def __post_init__(self) -> None:
        checked(self, "parallel")
        at_least(1, self.stages, "parallel.stages")
        if self.stages == 1 and self.schedule != "1F1B":
            raise ConfigError(
                f"parallel.schedule={self.schedule!r} is the order of micro-batches in a pipeline, which contradicts "
                "parallel.stages=1. Use at least 2 stages, or leave schedule out."
            )

    def shards(self, ranks_per_stage: int) -> bool:
        """Whether FSDP2 is used, with "auto" resolved."""
        return ranks_per_stage > 1 if self.fsdp == "auto" else bool(self.fsdp)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. Each section has its own table in TOML and its own prefix on the command line."""

    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    activations: ActivationSettings = field(default_factory=ActivationSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    run: RunSettings = field(default_factory=RunSettings)
    fit: FitSettings = field(default_factory=FitSettings)
    """Its settings are in no table, and their flags have no prefix."""

    def __post_init__(self) -> None:
        for section, cls in SECTIONS.items():
            found = section_of(self, section)
            if not isinstance(found, cls):
                raise ConfigError(
                    f"TrainConfig expects {cls.__name__} for {section or 'fit'}; found {type(found).__name__}."
                )
        if self.run.eval_every and not self.data.eval_share:
            raise ConfigError(
                f"run.eval_every={self.run.eval_every} needs data to evaluate on, which contradicts "
                "data.eval_share=0. Use run.eval_every=0 too, or leave eval_share out."
            )
        if self.parallel.stages > 1 or self.parallel.fsdp is True:
            divided = f"parallel.stages={self.parallel.stages}" if self.parallel.stages > 1 else "parallel.fsdp=true"
            self.refuse_divided_weights(divided)
        if self.parallel.stages > 1:
            self._check_pipeline()
        self._check_fit()
        if self.offload.device_peak is not None and self.offload.window != "auto":
            raise ConfigError(
                f"offload.device_peak={exact_size(int(self.offload.device_peak))} is the limit of offload.window="
                f"'auto'; found window={self.offload.window}, with which a run does not use it. Use --device-peak (in "
                "a file: device_peak, above all tables), with which the run decides everything by itself, or "
                "offload.device_budget, which `offstage plan --budget` derives from a peak."
            )
        if self.model.dtype == "float32" and self.offload.master_weights == "split":
            raise ConfigError(
                "offload.master_weights='split' splits fp32 masters of bf16 weights, which contradicts "
                "model.dtype='float32'. Use model.dtype='bfloat16', or leave master_weights out."
            )

    def refuse_divided_weights(self, found: str) -> None:
        """Raise if weights live on the host of a run that ranks share; `found` is how they do."""
        if self.offload.moves_weights:
            raise ConfigError(
                f"offload.weights={self.offload.weights!r} keeps weights on the host of one device, which updates all "
                f"of them; expected one process without FSDP2 and stages, found {found}. Leave offload.weights out: "
                "ranks divide the weights. Or start one process, without parallel settings."
            )

    def _check_fit(self) -> None:
        activations, default = self.activations, ActivationSettings()
        check_decided(
            self.fit,
            self.offload,
            activations_mode=(activations.mode, default.mode),
            activations_fraction=(activations.fraction, default.fraction),
        )
        if self.parallel.stages > 1 or self.parallel.fsdp is True:
            divided = f"parallel.stages={self.parallel.stages}" if self.parallel.stages > 1 else "parallel.fsdp=true"
            self.refuse_fit_of_ranks(divided)

    def refuse_fit_of_ranks(self, found: str) -> None:
        """Raise if the run is to decide by itself and ranks share it; `found` is how they do."""
        if self.fit.decides:
            raise ConfigError(
                f"device_peak={exact_size(self.fit.peak_bytes)} decides for one device, and ranks of one run would "
                f"decide differently; expected one process without FSDP2 and stages, found {found}. Start one process, "
                "or leave device_peak out: `offstage plan --devices N --budget SIZE` finds settings for every rank."
            )

    def _check_pipeline(self) -> None:
        stages, batches = self.parallel.stages, self.data.micro_batches
        if batches < stages:
            raise ConfigError(
                f"parallel.stages={stages} expects at least as many micro-batches, or stages stand idle; found "
                f"data.micro_batches={batches}. Use data.micro_batches={stages} or more."
            )
        if self.offload.update_in_backward:
            raise ConfigError(
                f"offload.update_in_backward cannot know which backward is the last in a pipeline, which contradicts "
                f"parallel.stages={stages}. Use offload.overlap_forward, or one stage."
            )


SECTIONS: dict[str, type] = {
    "": FitSettings,
    "model": ModelSettings,
    "lora": LoraSettings,
    "data": DataSettings,
    "optimizer": OptimizerSettings,
    "offload": OffloadConfig,
    "activations": ActivationSettings,
    "parallel": ParallelSettings,
    "run": RunSettings,
}
BYTE_SETTINGS = ("device_budget", "device_peak", "host_budget", "min_bytes", "chunk_bytes", "window", "weights")
"""Settings that are sizes, or may be; whole numbers are written with a unit."""


def section_of(config: TrainConfig, section: str) -> Any:
    """The settings of a section; ``""`` has those above all tables of a file."""
    return getattr(config, section or "fit")


def load_config(toml: Path | None, arguments: Sequence[str]) -> TrainConfig:
    """The configuration of a TOML file, if there is one, with the flags of a command line over it."""
    values = read_toml(toml) if toml is not None else {}
    return build(parse_sections(SECTIONS, values, arguments, prog="offstage train") if arguments else values)


def build(values: Mapping[str, Mapping[str, Any]]) -> TrainConfig:
    """Defaults, with `values` over them."""
    sections = {}
    for name, fields in values.items():
        try:
            sections[name] = SECTIONS[name](**fields)
        except ConfigError as error:
            # The trainer's own sections name their section in messages; OffloadConfig does not know it.
            raise ConfigError(f"offload: {error}") if name == "offload" else error from None
    return TrainConfig(**{name or "fit": section for name, section in sections.items()})


def read_toml(path: Path) -> Values:
    """The values in a file, with names and types checked."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"A configuration is expected at {path}; found {error.strerror or error}. Give the path of a TOML file, or "
            "leave it out for the defaults."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is expected to be TOML, such as '[run]' and then 'steps = 300'; found: {error}. Mend that line."
        ) from None
    values: Values = {}
    above = {name: content.pop(name) for name in field_types(FitSettings) if name in content}
    for section, fields in [("", above), *content.items()]:
        if section not in SECTIONS:
            known = [*filter(None, SECTIONS), *field_types(FitSettings)]
            raise ConfigError(f"{path} has an unknown section [{section}]. {nearest(section, known)}")
        if not isinstance(fields, dict):
            raise ConfigError(
                f"{path}: {section} expects a table, '[{section}]' and a line for each setting; found {fields!r}."
            )
        types = field_types(SECTIONS[section])
        for name, value in fields.items():
            if name not in types:
                raise ConfigError(f"{path} has an unknown setting {section}.{name}. {_near(section, name)}")
            shown = f"{section}.{name}" if section else name
            values.setdefault(section, {})[name] = check(value, types[name], f"{path}: {shown}")
    return values


def _near(section: str, name: str) -> str:
    """The nearest setting; of the same name in another section, if there is one."""
    everything = {one: [f"{one}.{key}" for key in field_types(cls)] for one, cls in SECTIONS.items() if one}
    elsewhere = [key for keys in everything.values() for key in keys if key.endswith(f".{name}")]
    return nearest(f"{section}.{name}", elsewhere or everything[section])


def to_toml(config: TrainConfig) -> str:
    """All settings, so that `load_config` reads the same configuration even if defaults change.

    Those that are not set are comments that say what each expects.
    """
    return "\n".join(line for name in SECTIONS for line in _section_lines(name, section_of(config, name)))


def _section_lines(name: str, section: Any) -> Iterator[str]:
    if name:
        yield f"[{name}]"
    for one in dataclasses.fields(section):
        value = getattr(section, one.name)
        if value is not None:
            yield f"{one.name} = {_toml_value(one.name, value)}"
        else:  # TOML has no null; None is always a default
            words = expected(field_types(section.__class__)[one.name]).removeprefix("none or ")
            yield f"# {one.name} = ({'a size such as 8GiB, in quotes' if one.name in BYTE_SETTINGS else words})"
    yield ""


def _toml_value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {json.dumps(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(name, one) for one in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # JSON strings are TOML strings, except for DEL
    if name in BYTE_SETTINGS and isinstance(value, int) and value:
        return json.dumps(exact_size(value))
    return repr(value)


def resolved(config: TrainConfig, *, device: torch.device, ranks_per_stage: int = 1) -> TrainConfig:
    """`config` with "auto" resolved for this machine, except for `run.progress`."""
    import torch

    dtype: Literal["bfloat16", "float32"] = "bfloat16" if config.model.dtype_on(device) == torch.bfloat16 else "float32"
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype=dtype),
        parallel=dataclasses.replace(config.parallel, fsdp=config.parallel.shards(ranks_per_stage)),
        run=dataclasses.replace(config.run, device=device.type if config.run.device == "auto" else config.run.device),
    )
