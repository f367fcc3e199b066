# SPDX-License-Identifier: Apache-2.0
"""`OffloadConfig`, `ActivationConfig`: all settings of offstage, checked when the object is made."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, TypeVar

from offstage.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    DType = str | torch.dtype
else:
    # What a file or a command line can say. Functions that use torch import it: it takes seconds, and help needs none.
    DType = str

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", start=1)}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d+)?)\s*([A-Za-z]*)\s*")

MIN_CHUNK_BYTES = 16 * 1024
MAX_CHUNK_BYTES = 64 * 1024**2
"""The most that a plan chooses for a chunk by itself: larger copies are not faster."""
WINDOWS = ("auto", "all")
_STATE_DTYPES = ("float32", "bfloat16")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Placement(enum.Enum):
    """Where a parameter's state lives and is updated."""

    RESIDENT = "resident"  # lives and is updated on the device
    STREAMED = "streamed"  # lives on the host, is updated on the device
    HOST = "host"  # lives and is updated on the host


def parse_size(value: int | str, field: str, *, or_one_of: tuple[str, ...] = ()) -> int:
    """Bytes from an int or a string such as ``"8GiB"``. `or_one_of`: other values of the field, for the message."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2].upper() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    else:
        raise ConfigError(
            f"{field} expects {''.join(f'{other!r}, ' for other in or_one_of)}a number of bytes or a size such as "
            f"'8GiB' or '512MB'; found {value!r}. "
            "Write an int, or a number followed by B, KB, MB, GB, TB, KiB, MiB, GiB or TiB."
        )
    if size < 0:
        raise ConfigError(f"{field} expects a size of at least 0 bytes; found {value!r}. Leave it out for the default.")
    if size >= 2**63:
        raise ConfigError(
            f"{field} expects fewer bytes than 2**63; found a number of {size.bit_length()} bits. Lower it."
        )
    return size


def format_size(num_bytes: float, *, up: bool = False) -> str:
    """``1536`` → ``1.5 KiB``. `up` rounds up, for sizes that a message tells the user to set."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            digits = 0 if unit == "B" else 1
            break
        size /= 1024
    else:
        unit, digits = "TiB", 2
    size = math.ceil(size * 10**digits) / 10**digits if up else size
    return f"{size:.{digits}f} {unit}"


def exact_size(num_bytes: int) -> str:
    """``1536`` → ``"1.5KiB"``: a setting that `parse_size` reads back. In GiB or TiB only if four decimals suffice."""
    for unit, decimals in (("TiB", 4), ("GiB", 4), ("MiB", 20), ("KiB", 10)):
        # A division by a power of two is exact, and so is the way back.
        size = num_bytes / _UNITS[unit.upper()]
        if size >= 1 and round(size, decimals) == size:
            return f"{int(size) if size == int(size) else size}{unit}"
    return f"{num_bytes}B"


# The text under each field, where `help()` shows it #


@functools.cache
def descriptions(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, inherited ones too; nothing where its source is not installed."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_descriptions(base)
    return found


def _own_descriptions(cls: type) -> dict[str, str]:
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:
        return {}
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)):
            continue
        if isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant):
            found[field.target.id] = " ".join(inspect.cleandoc(str(text.value.value)).split())
    return found


Config = TypeVar("Config", "OffloadConfig", "ActivationConfig")
_Documented = TypeVar("_Documented", bound=Callable[..., Any])


def documents(cls: type) -> Callable[[_Documented], _Documented]:
    """A decorator: the docstring ends with every field of the dataclass `cls`, its type, its default and its text."""

    def extended(function: _Documented) -> _Documented:
        texts = descriptions(cls)
        fields = [
            f"{one.name}: {one.type} = {one.default!r}\n{_indented(texts[one.name])}"
            for one in dataclasses.fields(cls)
            if one.name in texts
        ]
        function.__doc__ = "\n\n".join([inspect.cleandoc(function.__doc__ or ""), *fields])
        return function

    return extended


def _documents_itself(cls: type[Config]) -> type[Config]:
    return documents(cls)(cls)


def _indented(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    ", break_long_words=False)


# Optimizer state #


@_documents_itself
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """How much optimizer state leaves the device, where and when it is updated, in which format, and how it moves.

    Sizes are bytes or strings such as ``"8GiB"``; after construction they are bytes.
    """

    # How much leaves

    fraction: float | None = None
    """Share of the state's bytes that leaves the device, met to within one parameter. ``None``: all of it, or
    as much as `device_budget` requires. ``0.0``: off, with no streams, arenas, transfers or hooks."""

    device_budget: int | str | None = None
    """The most device memory for state: resident state, slots and window together."""

    device_peak: int | str | None = None
    """The most device memory for the whole process. ``window="auto"`` stays below it; `make_plan` (with a workload)
    and `replan` (with the peak so far) derive a `device_budget` from it."""

    host_budget: int | str | None = None
    """The most host memory for state, and for weights and gradients that live there."""

    min_bytes: int | str = "64KiB"
    """Parameters with less state than this stay resident. ``None``: the default."""

    weights: float | int | str = "device"
    """Where the weights of the model's layers live. ``"device"``: where they are used. ``"host"``: in host memory, with
    their state; a layer's weights are copied to the device for its forward and its backward, and gradients leave for
    the host unless they are used at once. Needs the model. A number from 0.0 to 1.0: the share of the layers' weights
    that lives on the host. A size: the most device memory for weights. The first layers stay. A model that is on the
    CPU beside an accelerator goes the same way, and the rest of it is moved there."""

    # Where it is updated

    update_on: Literal["device", "host", "auto"] = "device"
    """Where state that left the device is updated. ``"device"``: it is copied back for its update. ``"host"``: the CPU
    updates it where it is; gradients are copied to the host and weights back. ``"auto"``: both at the same time, in the
    shares that `make_plan` finds fastest for this machine."""

    host_fraction: float | None = None
    """Share of the offloaded bytes that the CPU updates, met to within one parameter, or one layer where weights live
    on the host. Setting it implies ``update_on="auto"``; with ``"auto"`` and ``None`` the planner chooses it."""

    threads: int | None = None
    """CPU threads for updates on the host by offstage's own Adam and AdamW. ``None``: this rank's share of the CPUs
    that affinity and the cgroup's CPU limit allow. Other optimizers use torch's threads (`torch.set_num_threads`)."""

    rule: Literal["auto", "torch"] = "auto"
    """``"auto"``: offstage's own kernels update for Adam and AdamW, the optimizer's own class for all others.
    ``"torch"``: the optimizer's own class always updates."""

    # When

    window: int | str = 0
    """Extra device memory in which chunks may wait: fetched ahead during backward, stored during the next forward.
    ``"all"``: all state is on the device for the step and leaves again during the next forward, which pays where
    activations fill the device. ``"auto"``: the memory that `device_peak` leaves. A size is deprecated: a lower
    `fraction` takes the same device memory, is as fast, and moves less."""

    overlap_forward: bool = False
    """`step()` does not wait for the updates: each module's forward waits for its own weights only, and so does any
    other use of a weight through torch. Needs the model."""

    update_in_backward: bool = False
    """Update a chunk during backward, as soon as its gradients are final, and free these gradients at once. Clip with
    `optimizer.clip_grad_norm_`; run the backwards of earlier micro-batches under `optimizer.accumulate()`."""

    # Formats

    master_weights: Literal["auto", "none", "fp32", "split"] = "auto"
    """Precise copies of 16-bit parameters. ``"auto"`` and ``"fp32"``: fp32 masters. ``"none"``: no masters.
    ``"split"``: the bf16 weight plus 16 bits on the host, lossless, 10 bytes per parameter instead of 12 (Adam and
    AdamW)."""

    state_dtype: DType | Mapping[str, DType] = "float32"
    """Format of the moments for Adam and AdamW: ``"float32"``, ``"bfloat16"``, or a mapping per state key. Dtypes of
    torch are accepted too."""

    # Movement

    chunk_bytes: int | str | None = None
    """Size of a slot: all state keys of one chunk together. ``None``: 64 MiB, 128 MiB where weights live on the host,
    or less where the slots would together take more than a quarter of the state that streams through them."""

    slots: int | None = None
    """Number of staging buffers on the device. ``None``: 3, of which one is fetched, one updated, one stored. With
    `update_in_backward` under FSDP2, which delivers the gradients of a whole group at once, there are more, unless
    `device_budget` or `device_peak` is set."""

    pin_memory: bool = True
    """Pin the host memory of the state. Without it, copies run several times slower."""

    def __post_init__(self) -> None:
        _set_default(self, "min_bytes")
        for field in ("device_budget", "device_peak", "host_budget", "min_bytes", "chunk_bytes"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, parse_size(getattr(self, field), field))
        if not _is_one_of(self.window, WINDOWS):
            object.__setattr__(self, "window", parse_size(self.window, "window", or_one_of=WINDOWS))
        object.__setattr__(self, "weights", _where_weights_live(self.weights))
        object.__setattr__(self, "state_dtype", _named_dtypes(self.state_dtype))
        self._check_numbers()
        self._check_choices()
        self._check_contradictions()
        if self.host_fraction is not None and self.update_on == "device":
            object.__setattr__(self, "update_on", "auto")
        self._check_effects()

    @property
    def num_slots(self) -> int:
        """`slots`, or the fewest that keep the link busy."""
        return 3 if self.slots is None else self.slots

    @property
    def most_chunk_bytes(self) -> int:
        """`chunk_bytes`, or the most that a plan chooses: twice as much where layers come and go, too, because each
        trip takes time of the thread that runs backward."""
        if self.chunk_bytes is not None:
            return int(self.chunk_bytes)
        return 2 * MAX_CHUNK_BYTES if self.moves_weights else MAX_CHUNK_BYTES

    @property
    def overlaps(self) -> bool:
        """Whether any work happens outside `step()`. Only then are hooks registered."""
        return bool(self.window) or self.overlap_forward or self.update_in_backward or self.moves_weights

    @property
    def moves_weights(self) -> bool:
        """Whether weights live on the host."""
        return self.weights != "device"

    @classmethod
    def build(cls, config: OffloadConfig | None, overrides: Mapping[str, Any]) -> OffloadConfig:
        """`config` with `overrides` applied; an unknown field raises and names the nearest one."""
        return _built(cls, config, overrides, "offload(optimizer, model, fraction=0.5)")

    def dtype_of(self, key: str) -> torch.dtype:
        """The format of the moment `key`."""
        import torch

        name = self.state_dtype.get(key, "float32") if isinstance(self.state_dtype, Mapping) else self.state_dtype
        return torch.bfloat16 if name == "bfloat16" else torch.float32

    def _check_numbers(self) -> None:
        if not _is_share(self.fraction):
            raise ConfigError(
                f"fraction expects a number from 0.0 to 1.0 (a share of the state's bytes); found {self.fraction!r}. "
                "Use 1.0 to offload everything, 0.0 to switch offloading off."
            )
        if not _is_share(self.host_fraction):
            raise ConfigError(
                "host_fraction expects a number from 0.0 to 1.0 (a share of the offloaded bytes); found "
                f"{self.host_fraction!r}. Leave it out to let the planner choose with update_on='auto'."
            )
        if self.threads is not None and not _is_whole(self.threads, least=1):
            raise ConfigError(
                f"threads expects a whole number of at least 1; found {self.threads!r}. Leave it out: affinity, CPU "
                "limit and ranks per node decide."
            )
        if self.slots is not None and not _is_whole(self.slots, least=1):
            raise ConfigError(f"slots expects a whole number of at least 1; found {self.slots!r}. Leave it out.")
        if self.most_chunk_bytes < MIN_CHUNK_BYTES:
            raise ConfigError(
                f"chunk_bytes expects at least {format_size(MIN_CHUNK_BYTES)}; found "
                f"{format_size(self.most_chunk_bytes)}. Leave it out: small copies do not fill the link."
            )

    def _check_choices(self) -> None:
        choices = {
            "rule": ("auto", "torch"),
            "master_weights": ("auto", "none", "fp32", "split"),
            "update_on": ("device", "host", "auto"),
        }
        for field, allowed in choices.items():
            if not _is_one_of(getattr(self, field), allowed):
                default = type(self).__dataclass_fields__[field].default
                raise ConfigError(
                    f"{field} expects one of {allowed}; found {getattr(self, field)!r}. Leave it out for {default!r}."
                )
        _check_bools(self, ("overlap_forward", "update_in_backward", "pin_memory"))

    def _check_contradictions(self) -> None:
        if self.fraction == 0.0 and self.device_budget is not None:
            raise ConfigError(
                f"fraction=0.0 keeps all state on the device, which contradicts device_budget="
                f"{exact_size(int(self.device_budget))}. Give one of the two."
            )
        if self.update_on == "host" and self.host_fraction is not None:
            raise ConfigError(
                f"update_on='host' updates everything that left the device on the host, which contradicts "
                f"host_fraction={self.host_fraction}. Give one of the two; host_fraction alone implies "
                "update_on='auto'."
            )
        if self.fraction == 0.0 and (self.update_on != "device" or self.host_fraction is not None):
            raise ConfigError(
                "fraction=0.0 switches offloading off, which contradicts update_on and host_fraction: no state is on "
                "the host to be updated there. Leave them out, or raise fraction."
            )
        self._check_weights()
        self._check_overlap()
        if self.rule == "torch" and self.master_weights == "split":
            raise ConfigError(
                "master_weights='split' needs offstage's own Adam and AdamW rules, which contradicts rule='torch'. "
                "Use master_weights='fp32', or rule='auto'."
            )
        if self.rule == "torch" and self.state_dtype != "float32":
            raise ConfigError(
                "state_dtype needs offstage's own Adam and AdamW rules, which contradicts rule='torch', where the "
                "optimizer's own class decides. Remove state_dtype, or use rule='auto'."
            )

    def _check_overlap(self) -> None:
        if self.fraction == 0.0 and self.overlaps:
            raise ConfigError(
                "fraction=0.0 switches offloading off, which contradicts window, overlap_forward and "
                "update_in_backward: there are no transfers to overlap. Leave them out, or raise fraction."
            )
        if self.window == "auto" and self.device_peak is None:
            raise ConfigError(
                "window='auto' uses the memory that device_peak leaves; expected both, found no device_peak. Give "
                "device_peak='40GiB' (what the whole process may take), or leave window out."
            )
        if self.window in WINDOWS and self.device_budget is not None:
            raise ConfigError(
                f"window={self.window!r} decides how much state is on the device, which contradicts "
                f"device_budget={exact_size(int(self.device_budget))}. Leave one of the two out."
            )

    def _check_weights(self) -> None:
        if not self.moves_weights:
            return
        if self.fraction == 0.0:
            raise ConfigError(
                f"fraction=0.0 switches offloading off, which contradicts weights={self.weights!r}: weights live on "
                "the host where their state does. Leave one of the two out."
            )
        if self.window:
            raise ConfigError(
                f"weights={self.weights!r} sends for state with the layer it belongs to, which contradicts window="
                f"{self.window!r}. Leave window out."
            )

    def _check_effects(self) -> None:
        """Raise for settings that can have no effect beside the others, on any machine and with any model."""
        if self.threads is not None and self.update_on == "device":
            raise ConfigError(
                f"threads={self.threads} are for updates on the host; found update_on='device', with which there are "
                "none. Use update_on='host' or 'auto', or leave threads out."
            )
        if self.threads is not None and self.rule == "torch":
            raise ConfigError(
                f"threads={self.threads} are for offstage's own Adam and AdamW, which contradicts rule='torch': there "
                "the optimizer's own class updates, with torch's threads. Use torch.set_num_threads, or rule='auto'."
            )
        if self.slots is not None and self.update_on == "host":
            raise ConfigError(
                f"slots={self.slots} are for state that is copied to the device; found update_on='host', with which "
                "none is. Leave slots out, or use update_on='auto'."
            )


def _built(cls: type[Config], config: Config | None, overrides: Mapping[str, Any], example: str) -> Config:
    known = [field.name for field in dataclasses.fields(cls)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(known)}."
            raise ConfigError(f"{cls.__name__} has no field {name!r}; {hint}")
    if config is None:
        return cls(**overrides)
    if not isinstance(config, cls):
        raise ConfigError(
            f"config expects an {cls.__name__}; found {type(config).__name__}. "
            f"Pass single settings as keywords: {example}."
        )
    return dataclasses.replace(config, **overrides)


def _is_share(value: object) -> bool:
    """`None`, or a number from 0 to 1."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (is_number and 0.0 <= value <= 1.0)  # type: ignore[operator]


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_one_of(value: object, choices: Sequence[str]) -> bool:
    return isinstance(value, str) and value in choices  # comparing an array, say, gives no bool


def _check_bools(config: Any, fields: Sequence[str]) -> None:
    for field in fields:
        if not isinstance(getattr(config, field), bool):
            default = type(config).__dataclass_fields__[field].default
            raise ConfigError(
                f"{field} expects True or False; found {getattr(config, field)!r}. Leave it out for {default}."
            )


def _set_default(config: Any, field: str) -> None:
    """`None`, as programs that pass settings on write it, is the default."""
    if getattr(config, field) is None:
        object.__setattr__(config, field, type(config).__dataclass_fields__[field].default)


def _where_weights_live(value: object) -> str | float | int:
    """`weights`: ``"device"``, ``"host"``, a share, or bytes. Shares at the ends are words."""
    if isinstance(value, str) and value in ("device", "host"):
        return value
    if isinstance(value, float):
        if not _is_share(value):
            raise ConfigError(
                f"weights expects a share from 0.0 to 1.0, a size, 'device' or 'host'; found {value!r}. Use 'host' for "
                "all of them."
            )
        return {0.0: "device", 1.0: "host"}.get(value, value)
    size = parse_size(value, "weights", or_one_of=("device", "host"))  # type: ignore[arg-type]
    if size < MIN_CHUNK_BYTES:
        raise ConfigError(
            f"weights expects a share from 0.0 to 1.0, a size, 'device' or 'host'; found {value!r}, which is a size of "
            f"{size} bytes. Write {float(size) if size <= 1 else 1.0} for a share, or 'host'."
        )
    return size


def _named_dtypes(value: object) -> str | dict[str, str]:
    """`state_dtype` with the names of its dtypes, checked."""
    if not isinstance(value, Mapping):
        return _named_dtype(value, "state_dtype")
    for key in value:
        if not _is_one_of(key, _MOMENTS):
            raise ConfigError(
                f"state_dtype expects a mapping from moments, {', '.join(_MOMENTS)}, to their formats; found the key "
                f"{key!r}. Name these, or give one format for all."
            )
    return {key: _named_dtype(one, f"state_dtype[{key!r}]") for key, one in value.items()}


def _named_dtype(value: object, field: str) -> str:
    name = value if isinstance(value, str) else str(value).removeprefix("torch.")  # without importing torch
    if name not in _STATE_DTYPES or not (isinstance(value, str) or type(value).__name__ == "dtype"):
        raise ConfigError(f"{field} expects 'float32' or 'bfloat16'; found {value!r}. Leave it out for 'float32'.")
    return name


class OffloadSettings(TypedDict, total=False):
    """The fields of `OffloadConfig` as keywords: a type checker knows them in `offload(optimizer, model, slots=4)`."""

    fraction: float | None
    device_budget: int | str | None
    device_peak: int | str | None
    host_budget: int | str | None
    min_bytes: int | str | None
    weights: float | int | str
    update_on: Literal["device", "host", "auto"]
    host_fraction: float | None
    threads: int | None
    rule: Literal["auto", "torch"]
    window: int | str
    overlap_forward: bool
    update_in_backward: bool
    master_weights: Literal["auto", "none", "fp32", "split"]
    state_dtype: DType | Mapping[str, DType]
    chunk_bytes: int | str | None
    slots: int | None
    pin_memory: bool


# Activations #


@_documents_itself
@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Which saved tensors leave the device between forward and backward, and when they return."""

    layers: int | Sequence[nn.Module] | None = None
    """Number of layers whose tensors leave, spread over the model; or a list of the layers. ``None``: all but
    `keep_last`."""
    fraction: float = 1.0
    """Share of the chosen layers' saved bytes that leaves."""
    min_bytes: int | str = "1MiB"
    """Smaller tensors stay on the device. ``None``: the default."""
    keep_last: int = 1
    """Number of last layers whose tensors stay, because backward needs them first. Not used with a list of layers."""
    prefetch: int = 1
    """How many layers ahead tensors return in backward, and how many layers may be leaving at once; 1 is double
    buffering."""
    activations: bool = True
    """Whether saved tensors leave."""
    weights: bool = False
    """Whether the layers' parameters live on the host and are copied to the device for their forward and backward."""
    host_budget: int | str | None = None
    """The most host memory for tensors that left."""
    device_peak: InitVar[int | str | None] = None  # refused, with what to use now

    @classmethod
    def build(cls, config: ActivationConfig | None, overrides: Mapping[str, Any]) -> ActivationConfig:
        """`config` with `overrides` applied; an unknown field raises and names the nearest one."""
        if "device_peak" in overrides:
            _refuse_planning("device_peak", overrides["device_peak"])
        return _built(cls, config, overrides, "offload_activations(model, fraction=0.5)")

    def __post_init__(self, device_peak: int | str | None) -> None:
        if device_peak is not None:
            _refuse_planning("device_peak", device_peak)
        _set_default(self, "min_bytes")
        for name in ("min_bytes", "host_budget"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_size(getattr(self, name), name))
        self._check_layers()
        _check_bools(self, ("activations", "weights"))
        if not self.activations and not self.weights:
            raise ConfigError(
                "activations=False and weights=False leave nothing to offload; expected at least one of them to be "
                "True. Remove offload_activations() instead."
            )
        if self.fraction is None or not _is_share(self.fraction):
            raise ConfigError(f"fraction expects a number from 0 to 1; found {self.fraction!r}. Leave it out for 1.")
        for name, least in (("keep_last", 0), ("prefetch", 1)):
            if not _is_whole(getattr(self, name), least):
                raise ConfigError(
                    f"{name} expects a number of layers, at least {least}; found {getattr(self, name)!r}. Leave it "
                    "out for 1."
                )
        self._check_effects()

    def _check_layers(self) -> None:
        """Raise unless `layers` is a number, modules or `None`; modules become a list."""
        layers: Any = self.layers
        if layers is None:
            return
        if _is_one_of(layers, ("auto",)):
            _refuse_planning("layers", layers)
        if isinstance(layers, int) and not isinstance(layers, bool):
            if layers < 0:
                raise ConfigError(f"layers expects a number of at least 0; found {layers}. Leave it out for all.")
            return
        from torch import nn

        if isinstance(layers, (Sequence, nn.ModuleList, nn.Sequential)) and not isinstance(layers, str):
            layers = list(layers)
            if all(isinstance(one, nn.Module) for one in layers):
                object.__setattr__(self, "layers", layers)
                return
        raise ConfigError(
            f"layers expects a number of layers, or a list of modules; found {self.layers!r}. Leave it out for all but "
            "keep_last."
        )

    def _check_effects(self) -> None:
        """Raise for settings that can have no effect beside the others."""
        if isinstance(self.layers, list) and self.keep_last != 1:
            raise ConfigError(
                f"keep_last={self.keep_last} chooses among all layers; found a list of {len(self.layers)} layers, "
                "which says itself which tensors leave. Leave one of the two out."
            )
        if not self.activations and self.fraction != 1.0:
            raise ConfigError(
                f"fraction={self.fraction} is a share of the saved tensors, which stay with activations=False. Leave "
                "fraction out, or activations=False."
            )


def _refuse_planning(field: str, value: object) -> NoReturn:
    raise ConfigError(
        f"offload_activations() does what it is told and plans nothing; expected a number of layers or a list of them, "
        f"found {field}={value!r}. Use offstage.fit(model, optimizer, device_peak=...), which fits state, weights and "
        "activations together into that much device memory."
    )


class ActivationSettings(TypedDict, total=False):
    """The fields of `ActivationConfig` as keywords."""

    layers: int | Sequence[nn.Module] | None
    fraction: float
    min_bytes: int | str | None
    keep_last: int
    prefetch: int
    activations: bool
    weights: bool
    host_budget: int | str | None
