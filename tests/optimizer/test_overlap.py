# SPDX-License-Identifier: Apache-2.0
"""Overlap changes when things happen, never a bit of the result.

Every combination of the settings, on lanes that run work at once or on lazy ones with the happens-before checker,
against the plain step with torch's own clipping. Each run also has to prove that it did overlap.
"""

import functools
import itertools

import pytest
import torch
from torch import nn

from tests.support.overlap import WIDTH, train
from tests.support.runs import differences
from tests.support.training import groups_of, lazily

SETTINGS = [
    {"window": window, "overlap_forward": overlap_forward, "update_in_backward": update_in_backward}
    for window, overlap_forward, update_in_backward in itertools.product(
        [0, "40KiB", "all"], [False, True], [False, True]
    )
    if window or overlap_forward or update_in_backward
]
CLIPS = ["none", "never", "sometimes", "always"]
CHECKPOINTING = ["none", "reentrant", "non-reentrant"]
LOOPS = [
    {"clip": clip, "micro_batches": micro_batches, "checkpointing": checkpointing}
    for clip, micro_batches, checkpointing in itertools.product(CLIPS, [1, 3], CHECKPOINTING)
]
STEPS = 4


def name(case):
    return " ".join(str(key) if value is True else f"{value}" for key, value in case.items() if value is not False)


def lanes_of(config, loop):
    """Immediate lanes for a third of the cases, for the others a lazy seed out of nine that go round.

    The sum makes both kinds meet every setting with every clip, every number of micro-batches and every checkpointing.
    """
    clip, checkpointing = CLIPS.index(loop["clip"]), CHECKPOINTING.index(loop["checkpointing"])
    if (SETTINGS.index(config) + clip + loop["micro_batches"] // 2 + checkpointing) % 3 == 0:
        return None
    return (SETTINGS.index(config) + LOOPS.index(loop)) % 9


@functools.cache
def plain(clip, micro_batches, checkpointing):
    return train(None, clip=clip, micro_batches=micro_batches, checkpointing=checkpointing, steps=STEPS)


def assert_overlapped(run, config, clip):
    """The run cannot have been a plain one."""
    early = config.get("update_in_backward")
    assert (run.updated_in_backward > 0) == bool(early)
    assert (run.fetched_in_backward > 0) == bool(config.get("window") and not early)
    assert (run.left_to_forward > 0) == bool(config.get("overlap_forward"))
    receipt = run.receipt
    assert (receipt.speculation_hits > 0) == bool(early and clip in ("never", "sometimes"))
    assert (receipt.speculation_misses > 0) == bool(early and clip in ("sometimes", "always"))


@pytest.mark.parametrize("loop", LOOPS, ids=name)
@pytest.mark.parametrize("config", SETTINGS, ids=name)
def test_every_combination_gives_the_bits_of_the_plain_step(config, loop):
    """Weights, all state and all norms."""
    seed = lanes_of(config, loop)
    with lazily(seed):
        run = train(config, steps=STEPS, **loop)
    assert differences(plain(**loop), run) == [], f"seed {seed}"
    assert_overlapped(run, config, loop["clip"])


def test_both_kinds_of_lanes_meet_every_pair():
    """Of a setting and anything of the loop, and of any two things of the loop."""
    met = {kind: set() for kind in ("immediate", "lazy")}
    for config, loop in itertools.product(SETTINGS, LOOPS):
        values = [("config", SETTINGS.index(config)), *loop.items()]
        met["immediate" if lanes_of(config, loop) is None else "lazy"].update(itertools.combinations(values, 2))
    assert met["immediate"] == met["lazy"]
    assert len(met["lazy"]) == len(SETTINGS) * (4 + 2 + 3) + 4 * 2 + 4 * 3 + 2 * 3


def test_the_loops_clip_as_their_names_say():
    """Otherwise the matrix would not cover hits and misses."""
    for loop in LOOPS:
        run = plain(**loop)
        over = [bool(norm > {"never": 1e4, "sometimes": 1.0, "always": 1e-4}[loop["clip"]]) for norm in run.norms]
        expected = {"none": set(), "never": {False}, "sometimes": {False, True}, "always": {True}}
        assert set(over) == expected[loop["clip"]], loop


# Formats and rules

FORMATS = {
    "bf16, fp32 masters": {"dtype": torch.bfloat16, "base": {"master_weights": "fp32"}},
    "bf16, split masters": {"dtype": torch.bfloat16, "base": {"master_weights": "split"}},
    "bf16, no masters": {"dtype": torch.bfloat16, "base": {"master_weights": "none"}},
    "bf16 moments": {"dtype": torch.bfloat16, "base": {"master_weights": "split", "state_dtype": "bfloat16"}},
    "half resident": {"base": {"fraction": 0.5}},
    "half resident, split masters": {"dtype": torch.bfloat16, "base": {"fraction": 0.5, "master_weights": "split"}},
    "one slot": {"base": {"slots": 1}},
    "one chunk": {"base": {"chunk_bytes": "1MiB"}},
    "SGD": {
        "base": {"rule": "torch"},
        "make": torch.optim.SGD,
        "options": {"lr": 3e-3, "momentum": 0.9, "weight_decay": 0.1},
    },
    "SGD bf16, fp32 masters": {
        "dtype": torch.bfloat16,
        "base": {"rule": "torch", "master_weights": "fp32"},
        "make": torch.optim.SGD,
        "options": {"lr": 3e-3, "momentum": 0.9},
    },
    "torch's AdamW": {"base": {"rule": "torch"}},
    "amsgrad": {"options": {"lr": 3e-3, "amsgrad": True}},
    "tensor lr, which the scheduler writes right after step()": {
        "options": {"lr": torch.tensor(3e-3), "weight_decay": 0.1}
    },
}
HANDFUL = [
    ({"overlap_forward": True}, "none"),
    ({"overlap_forward": True, "window": "all"}, "sometimes"),
    ({"update_in_backward": True}, "none"),
    ({"update_in_backward": True, "overlap_forward": True}, "sometimes"),
    ({"update_in_backward": True, "overlap_forward": True, "window": "64KiB"}, "always"),
]
SOME = pytest.mark.parametrize(
    ("config", "clip"), HANDFUL, ids=lambda value: value if isinstance(value, str) else name(value)
)


def fresh(arguments):
    """A tensor lr is written by the scheduler: each run needs its own."""
    options = arguments.get("options")
    if options is None:
        return arguments
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    return {**arguments, "options": copied}


@functools.cache
def plain_format(form, clip):
    return train(None, clip=clip, steps=STEPS, **fresh(FORMATS[form]))


@pytest.mark.parametrize("form", FORMATS)
@SOME
def test_every_format_and_rule(config, clip, form):
    """Whatever is kept per parameter, and wherever: the bits are those of the plain step in the same format."""
    lazy = (list(FORMATS).index(form) + HANDFUL.index((config, clip))) % 9
    if form == "one chunk" and "window" in config:
        config = {**config, "window": "1MiB"}
    for seed in (None, lazy):
        with lazily(seed):
            run = train(config, clip=clip, steps=STEPS, **fresh(FORMATS[form]))
        assert differences(plain_format(form, clip), run) == [], f"seed {seed}"
        if form != "one chunk":
            assert_overlapped(run, config, clip)


class Odd(nn.Module):
    """Parameters whose memory is not one line, some that get no gradient in some steps, one that never does."""

    def __init__(self, checkpointing="none"):
        super().__init__()
        self.step = 0
        self.embedding = nn.Embedding(50, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 7)  # another order in memory
        self.gaps = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gaps.weight = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH) / 7)[:, ::2])  # gaps in memory
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.scalar = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + torch.tanh(self.first(x)) * self.scalar + torch.tanh(self.gaps(x))
        for number in (self.step % 4, (self.step + 1) % 4):
            x = x + torch.tanh(self.experts[number](x))
        return self.head(x + self.frozen(x)) + self.empty.sum()


BASES = {"own rule": {}, "torch's": {"rule": "torch"}, "half": {"fraction": 0.5}}


def train_odd(config, base, clip):
    return train(config, make_model=Odd, groups=groups_of, base=BASES[base], clip=clip, steps=7)


@functools.cache
def plain_odd(base, clip):
    return train_odd(None, base, clip)


@pytest.mark.parametrize("base", BASES)
@SOME
def test_odd_parameters_in_two_groups(config, clip, base):
    """Non-contiguous, skipped, frozen, empty and scalar parameters under two learning rates."""
    for seed in (None, 3 * list(BASES).index(base) + HANDFUL.index((config, clip))):
        with lazily(seed):
            run = train_odd(config, base, clip)
        assert differences(plain_odd(base, clip), run) == [], f"seed {seed}"
        assert_overlapped(run, config, clip)
