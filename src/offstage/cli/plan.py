# SPDX-License-Identifier: Apache-2.0
"""`offstage plan`: the planner for a model, a budget and a number of devices, which may belong to another machine.

Nothing is allocated: the model is built on the meta device, and the machine's rates can come from a file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from offstage import (
    ConfigError,
    HostMemoryError,
    Machine,
    OffloadConfig,
    Plan,
    Workload,
    World,
    make_plan,
    measure_machine,
)
from offstage.cli.remedies import Asked, what_fits
from offstage.cli.within import Described, Within, WithinOptions, within
from offstage.config import exact_size
from offstage.memory.arena import round_up
from offstage.planning.plan import plan_placements
from offstage.planning.presets import MACHINES, Preset
from offstage.planning.sizes import Source, param_sizes
from offstage.train.config import (
    BYTE_SETTINGS,
    DataSettings,
    ModelSettings,
    TrainConfig,
    build,
    read_toml,
)
from offstage.train.flags import parse_sections, positional
from offstage.train.memory_needs import parameters_on_meta
from offstage.train.model import SIZES
from offstage.train.published_models import PUBLISHED
from offstage.train.settings import nearest

PROG = "offstage plan"
HELP = """\
What fits, what it costs, and who should update: asked before anything is allocated.

  offstage plan 1B --machine rtx4090 --device-peak 8GiB 16GiB
                                                    what `offstage train --device-peak` would decide: state, weights
                                                    and activations together, for an estimated loop
  offstage plan 1B --budget 8GiB                    state alone: one device, 8 GiB of it for the whole process
  offstage plan 7B --weights host --budget 24GiB    weights, too, live on the host, and come layer by layer
  offstage plan 7B --devices 8 --budget 40GiB       one of eight, which divide weights and state (FSDP2)
  offstage plan run.toml                            the model and the settings of a training run
  offstage plan path/to/config.json                 a model of the transformers package
  offstage plan --model llama-3.1-8b --machine rtx4090 --devices 4
                                                    a published model, and machines that are not here
  offstage plan 70b.json --machine node.json        shapes ({"layers.0.weight": [4096, 4096], ...}), and a machine
                                                    that is not here (saved there by: offstage doctor --json)

The machine is measured once, in a few seconds, and the rates are cached. Settings given as --offload flags are kept;
the others are searched. The last part of the table shows the other candidates, and why they were not taken."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(WithinOptions):
    """Arguments of `offstage plan`."""

    model: str | None = positional(None)
    """A size of offstage train (1M to 20B), a published model (llama-3.1-8b, qwen3-8b, mixtral-8x7b, …; an unknown name
    lists them), a training run's .toml, a transformers config.json or its folder, or a .json file with a shape or a
    number of elements for each name. Also as --model NAME."""

    devices: int | None = None
    """How many devices train together. They divide weights, gradients and state, unless --world says otherwise;
    without --world.ranks-per-host, up to 8 of them share a host."""

    budget: int | str | None = None
    """Device memory for the whole process, such as 24GiB: what weights, gradients and --workload.other-bytes leave of
    it is for state. The same as --offload.device-peak. Without it, everything leaves the device."""

    weights: float | int | str | None = None
    """Where the layers' weights live: device, host, a share such as 0.5, or the most device memory for them. The same
    as --offload.weights."""

    dtype: Literal["bfloat16", "float32"] | None = None
    """Format of the weights; by default that of the .toml, with auto as offstage train resolves it, or bfloat16."""

    machine: str | None = None
    """A machine that is not here: a name (rtx4090, a100-80g, h100-80g, gh200, …; an unknown name lists them), whose
    rates are assumed from data sheets and shown, or a file that `offstage doctor --json` wrote there. Without it: this
    machine."""

    json: bool = False
    """Print the plan as JSON, which Plan.from_json reads, and nothing else."""


_SECTIONS: dict[str, type] = {"": PlanOptions, "offload": OffloadConfig, "world": World, "workload": Workload}


@dataclass(frozen=True)
class Question:
    """What is planned, and for which machine and settings."""

    model: str
    sizes: Source
    machine: Machine
    config: OffloadConfig
    world: World
    workload: Workload | None
    json: bool
    dtype: torch.dtype
    """The format of the weights."""
    as_trained: bool
    """Whether that is what `offstage train` takes without being told."""
    preset: Preset | None = None
    """Where the machine is from, if it is neither measured nor from a file."""
    within: Within | None = None
    """With --device-peak: what is planned instead."""
    flags: tuple[str, ...] = ()
    """Of `offstage train`, for the loop that was estimated."""

    @property
    def num_parameters(self) -> int:
        return sum(size.numel for size in param_sizes(self.sizes, self.config))

    def answer(self) -> Plan:
        try:
            return make_plan(self.sizes, self.machine, self.config, world=self.world, workload=self.workload)
        except (ConfigError, HostMemoryError) as error:
            asked = Asked(self.sizes, self.machine, self.config, self.world, self.workload)
            raise type(error)(f"{error}{what_fits(asked, self.preset)}") from None

    def about_machine(self) -> str:
        """The rates of a machine that is only known by name, with their sources."""
        if self.preset is None:
            return ""
        text = self.preset.explain(self.machine.ranks_on_host)
        return f"{text if self.within is None else text.replace('--offload.host-budget', '--host-budget')}\n\n"


def parse(arguments: Sequence[str], measure: Callable[[], Machine] = measure_machine) -> Question:
    """The question on a command line; `measure` is called if no file describes the machine."""
    arguments = _model_by_position(arguments)
    values = parse_sections(_SECTIONS, {}, arguments, prog=PROG, description=HELP)
    options = PlanOptions(**values.pop("", {}))
    if options.model is None:
        raise ConfigError(
            f"{PROG} expects a model; found none. Give a size ({', '.join(SIZES)}) or a file, as the first word. See "
            f"{PROG} --help."
        )
    model = options.model
    if options.weights is not None:
        if "weights" in values.get("offload", {}):
            raise ConfigError("--weights and --offload.weights are the same thing; expected one, found both.")
        values.setdefault("offload", {})["weights"] = options.weights
    run, training = _of_training(options)
    for section, fields in training.items():
        if not section:
            continue
        values[section] = {**fields, **values.get(section, {})}
    options = _with_limits(options, training.get("", {}))
    options.refuse_alone()
    if options.budget is not None:
        if options.device_peak:
            raise ConfigError(
                f"--budget={options.budget} plans the state alone and --device-peak everything together; expected one "
                "of them, found both. Leave --budget out."
            )
        if "device_peak" in values.get("offload", {}):
            raise ConfigError("--budget and --offload.device-peak are the same thing; expected one, found both.")
        values.setdefault("offload", {})["device_peak"] = options.budget
    config, machine = _section(OffloadConfig, values, "offload"), _machine(options)
    trained = run.model.dtype_on(_device(run, machine))
    said: torch.dtype = getattr(torch, options.dtype or "bfloat16")
    dtype = trained if options.dtype is None and Path(model).suffix == ".toml" else said
    sizes = _sizes(model, run, dtype)
    if machine is None:  # last: it may take seconds
        machine = measure() if run.run.device == "auto" else measure_machine(run.run.torch_device())
    question = Question(
        model=model,
        sizes=sizes,
        machine=machine,
        config=config,
        world=_world(options, values.get("world", {}), machine),
        workload=_section(Workload, values, "workload") if values.get("workload") else None,
        json=options.json,
        preset=MACHINES.get(options.machine or ""),
        dtype=dtype,
        as_trained=dtype == trained,
    )
    return _within(question, options, run, values.get("workload", {})) if options.device_peak else question


def _with_limits(options: PlanOptions, of_run: Mapping[str, Any]) -> PlanOptions:
    """The limits of a training run count where the command line has none."""
    if options.device_peak or options.budget is not None or "device_peak" not in of_run:
        return options
    host = of_run.get("host_budget")
    return dataclasses.replace(
        options,
        device_peak=(str(of_run["device_peak"]),),
        host_budget=str(host) if options.host_budget is None and host is not None else options.host_budget,
    )


def _within(question: Question, options: PlanOptions, run: TrainConfig, workload: Mapping[str, Any]) -> Question:
    is_run = question.model.endswith(".toml")
    is_own = question.model in SIZES or (is_run and run.model.described_by is None)
    asked = Described(
        sizes=question.sizes,
        machine=question.machine,
        preset=question.preset,
        config=question.config,
        world=question.world,
        workload=workload,
        run=run,
        is_run=is_run,
        is_own=is_own,
        dtype=question.dtype,
    )
    found = within(options, asked)
    dtype = [] if question.as_trained else [f"--model.dtype={str(question.dtype).removeprefix('torch.')}"]
    batch = found.batch
    data = [f"--data.batch={batch.sequences}", f"--data.sequence={batch.sequence}"] if question.model in SIZES else []
    return dataclasses.replace(question, within=found, flags=(*dtype, *data))


def _model_by_position(arguments: Sequence[str]) -> list[str]:
    """`--model NAME` as `NAME`."""
    words = [word.removeprefix("--model=") if word.startswith("--model=") else word for word in arguments]
    return [word for i, word in enumerate(words) if word != "--model" or i + 1 == len(words)]


def _section(cls: Any, values: Mapping[str, Mapping[str, Any]], name: str) -> Any:
    try:
        return cls(**values.get(name, {}))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _of_training(options: PlanOptions) -> tuple[TrainConfig, dict[str, dict[str, Any]]]:
    """A training run, and its settings that matter to plans."""
    if options.model is None or Path(options.model).suffix != ".toml":
        return TrainConfig(), {}
    values = read_toml(Path(options.model))
    config = build(values)
    workload: dict[str, Any] = {}
    if config.data.micro_batches > 1:
        workload["micro_batches"] = config.data.micro_batches
    if config.offload.update_in_backward and config.optimizer.clip:
        workload["clips"] = True
    world = {"pipeline": config.parallel.stages} if config.parallel.stages > 1 else {}
    return config, {"": values.get("", {}), "offload": values.get("offload", {}), "world": world, "workload": workload}


def _machine(options: PlanOptions) -> Machine | None:
    if options.machine is None:
        return None
    if options.machine in MACHINES:
        preset = MACHINES[options.machine]
        return preset.machine(min(max(1, options.devices or 1), preset.host.devices))
    path = Path(options.machine)
    if not path.exists():
        raise ConfigError(
            f"--machine expects a name ({', '.join(MACHINES)}) or a file that `offstage doctor --json` wrote; "
            f"could not read {path}: it is neither. {_nearest(options.machine, MACHINES)} Without it: this machine."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--machine expects a file that `offstage doctor --json` wrote; could not read {path}: {error}. Write it "
            "there, or leave it out for this machine."
        ) from None
    # `offstage doctor --json` has the machine under a key; Machine.to_json is the machine itself.
    return Machine.from_json(json.dumps(content.get("machine", content) if isinstance(content, dict) else content))


def _device(run: TrainConfig, machine: Machine | None) -> torch.device:
    """The device that `offstage train` would use there; of another machine's accelerator only that it is one."""
    if machine is None or run.run.device != "auto":
        return run.run.torch_device()
    return torch.device("cpu" if machine.device_name == "cpu" else "cuda")


def _sizes(model: str, run: TrainConfig, dtype: torch.dtype) -> Source:
    path = Path(model)
    if path.suffix == ".toml":
        return parameters_on_meta(run, dtype)
    if model in SIZES:
        return parameters_on_meta(TrainConfig(model=ModelSettings(size=model)), dtype)  # type: ignore[arg-type]
    if path.suffix == ".json" and (shapes := _shapes(path)) is not None:
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    if path.exists():
        data = DataSettings(sequence=1)  # the length of a run's sequences is not known
        return parameters_on_meta(TrainConfig(model=ModelSettings(transformers=model), data=data), dtype)
    if model.lower() in PUBLISHED:
        return {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in PUBLISHED[model.lower()]().items()
        }
    raise ConfigError(
        f"{PROG} expects a size of offstage train ({', '.join(SIZES)}), a published model ({', '.join(PUBLISHED)}) or "
        f"a file; found {model!r}, which is none of them. {_nearest(model.lower(), [*SIZES, *PUBLISHED])}"
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    longer = [one for one in known if one.startswith(name)]  # h100 is h100-80g
    return f"Did you mean {' or '.join(longer)}?" if longer else nearest(name, known)


def _shapes(path: Path) -> dict[str, int | list[int]] | None:
    """Shapes by name; `None` for other JSON, such as the configuration of a model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is expected to be JSON; found: {error}. Fix it, or give another file.") from None
    if not isinstance(content, dict) or not content:
        return None
    is_shape = [
        isinstance(one, int) or (isinstance(one, list) and all(isinstance(dim, int) for dim in one))
        for one in content.values()
    ]
    return content if all(is_shape) else None


def _world(options: PlanOptions, given: Mapping[str, Any], machine: Machine) -> World:
    devices = options.devices
    if devices is None:
        world = _section(World, {"world": {"ranks_per_host": machine.ranks_on_host, **given}}, "world")
        assert isinstance(world, World)
        return world
    if devices < 1:
        raise ConfigError(f"--devices expects a whole number of at least 1; found {devices}. Leave it out for 1.")
    if "data" in given:
        raise ConfigError(
            f"--devices={devices} says how many ranks there are, which contradicts --world.data={given['data']}. Give "
            "one of the two."
        )
    others = given.get("tensor", 1) * given.get("pipeline", 1)
    if others < 1 or devices % others:
        raise ConfigError(
            f"--devices expects a multiple of the {others} ranks of tensor x pipeline; found {devices}. Use "
            f"{max(1, round(devices / max(1, others))) * others}."
        )
    sharded = {"shard_weights": True} if devices > 1 and given.get("shard_state", True) else {}
    per_host = machine.ranks_on_host if options.machine in MACHINES else min(devices, 8)
    world = {"data": devices // others, "ranks_per_host": per_host, **sharded, **given}
    found = _section(World, {"world": world}, "world")
    assert isinstance(found, World)
    return found


# The answer #


def usage(question: Question, plan: Plan) -> str:
    """The Python call and the command that train with `plan`."""
    changed = {
        one.name: getattr(question.config, one.name)
        for one in dataclasses.fields(OffloadConfig)
        if getattr(question.config, one.name) != getattr(OffloadConfig(), one.name)
    }
    if question.config.update_on == "auto" and plan.candidates:
        changed.pop("update_on", None)
        changed["host_fraction"] = plan.candidates[0].host_fraction
    if "device_peak" in changed and question.config.window != "auto":
        del changed["device_peak"]
        # A whole number of MiB is easier to read; it is a little more, and must not place anything differently.
        rounded = round_up(plan.device_bytes, 2**20)
        same = (
            plan_placements(plan.sizes, OffloadConfig(**changed, device_budget=rounded)).placements == plan.placements
        )
        changed["device_budget"] = rounded if same else plan.device_bytes
    changed |= {
        name: exact_size(value) for name, value in changed.items() if name in BYTE_SETTINGS and isinstance(value, int)
    }
    python = ", ".join(["optimizer", "model", *(f"{name}={value!r}" for name, value in changed.items())])
    lines = [f"offstage.offload({python})"]
    flags = [] if question.as_trained else [f"--model.dtype={str(question.dtype).removeprefix('torch.')}"]
    flags += [f"--offload.{name.replace('_', '-')}={_flag_value(value)}" for name, value in changed.items()]
    ranks = question.world.ranks
    start = "offstage" if ranks == 1 else f"torchrun --nproc-per-node={math.gcd(ranks, 8)} -m offstage"
    if ranks == 1 or question.world.tensor == 1:
        if question.model in SIZES:
            lines.append(shlex.join([*start.split(), "train", f"--model.size={question.model}", *flags]))
        elif question.model.endswith(".toml"):
            lines.append(shlex.join([*start.split(), "train", f"--config={question.model}", *flags]))
    return "\n".join(lines)


def _flag_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={one}" for name, one in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
