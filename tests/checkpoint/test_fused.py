# SPDX-License-Identifier: Apache-2.0
"""Fused parameters: the parts of any shard are the parts of the whole tensor, sliced."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard

from offstage.checkpoint.fused import (
    Fused,
    by_map,
    by_metadata,
    fused_of,
    fused_parts,
    gdn,
    qkv,
    split_as,
    split_name,
    swiglu,
)
from offstage.checkpoint.parts import Box, row_major, whole
from offstage.errors import ConfigError


@st.composite
def fused_shapes(draw):
    """A logical shape, the dim its parts are along (counted from either end), and their sizes."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    shape[dim] = sum(sizes)
    names = tuple((f"p{number}", size) for number, size in enumerate(sizes))
    return tuple(shape), names, draw(st.sampled_from([dim, dim - len(shape)]))


def split_of(full: torch.Tensor, parts, dim: int) -> dict[str, torch.Tensor]:
    """The oracle: torch's own split."""
    pieces = full.split([size for _, size in parts], dim)
    return {f"m.{name}.weight": piece for (name, _), piece in zip(parts, pieces, strict=True)}


def collect(shapes, shards) -> dict[str, torch.Tensor]:
    """Put every shard's parts into whole tensors; every element must come exactly once."""
    out = {name: torch.full(shape, -1) for name, shape in shapes.items()}
    for parts, line in shards:
        for part in parts:
            assert part.shape == shapes[part.name]
            target = out[part.name][tuple(slice(a, a + n) for a, n in zip(part.box.offset, part.box.size, strict=True))]
            assert target.shape == part.box.size
            assert target.eq(-1).all()
            target.copy_(part.of(line))
    return out


def check(full, parts, dim, shards):
    expected = split_of(full, parts, dim)
    found = collect({name: tuple(tensor.shape) for name, tensor in expected.items()}, shards)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


@given(fused_shapes(), st.data())
@settings(deadline=None, max_examples=200)
def test_shards_of_a_shaped_parameter(case, data):
    """Any sharding along any dim, local shards in any order of dims (as a transposed parameter has)."""
    shape, parts, dim = case
    full = torch.arange(math.prod(shape)).view(shape)
    shard_dim = data.draw(st.integers(0, len(shape) - 1))
    ranks = data.draw(st.integers(1, 5))
    transposed = data.draw(st.booleans())
    fused = Fused(parts, dim)
    shards, start = [], 0
    for local in full.tensor_split(ranks, shard_dim):  # uneven and empty ones
        offset = [0] * len(shape)
        offset[shard_dim] = start
        start += local.shape[shard_dim]
        size = tuple(local.shape)
        strides = tuple(reversed(row_major(size[::-1]))) if transposed else row_major(size)
        line = torch.full((local.numel(),), -1)
        line.as_strided(size, strides).copy_(local)
        shards.append((fused_parts("m.fused.weight", fused, whole("", shape, Box(tuple(offset), size), strides)), line))
    check(full, parts, dim, shards)


@given(fused_shapes(), st.data())
@settings(deadline=None, max_examples=300)
def test_ranges_of_a_flat_parameter(case, data):
    """Stored as one line and cut anywhere, parts along any dim of the logical shape."""
    shape, parts, dim = case
    full = torch.arange(math.prod(shape)).view(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, full.numel()), max_size=4)))
    stride = data.draw(st.integers(1, 3))  # elements of a range that lie apart in the line
    fused = Fused(parts, dim, shape)
    shards = []
    for start, stop in zip([0, *cuts], [*cuts, full.numel()], strict=True):
        line = torch.full(((stop - start) * stride,), -1)
        line[::stride] = full.flatten()[start:stop]
        local = whole("", (full.numel(),), Box((start,), (stop - start,)), (stride,))
        shards.append((fused_parts("m.fused.weight", fused, local), line))
    check(full, parts, dim, shards)


def test_parts_along_dim_0_of_a_flat_range_are_few():
    """A flat shard of consecutive parts stays in a few boxes: what a checkpoint's metadata lists."""
    fused = Fused((("gate", 512), ("up", 512)), 0, (1024, 256))
    parts = fused_parts("w13", fused, whole("", (1024 * 256,), Box((100,), (200_000,))))
    assert [(part.name, part.box) for part in parts] == [
        ("w13.gate", Box((0, 100), (1, 156))),
        ("w13.gate", Box((1, 0), (511, 256))),
        ("w13.up", Box((0, 0), (269, 256))),
        ("w13.up", Box((269, 0), (1, 164))),
    ]


def test_names():
    assert split_name("layers.0.mlp.gate_up.weight", "gate") == "layers.0.mlp.gate.weight"
    assert split_name("layers.0.attn.qkv.bias", "q") == "layers.0.attn.q.bias"
    assert split_name("layers.0.w13", "gate") == "layers.0.w13.gate"
    assert split_name("weight", "up") == "up.weight"
    assert split_name("w13", "up") == "w13.up"


def test_the_built_in_forms():
    weight = torch.nn.Parameter(torch.empty(8, 3))
    assert swiglu(weight) is weight
    assert fused_of(weight) == Fused((("gate", 4), ("up", 4)))
    assert fused_of(swiglu(torch.empty(24), dim=1, shape=(3, 8))) == Fused((("gate", 4), ("up", 4)), 1, (3, 8))
    assert fused_of(qkv(weight, q=4, k=2, v=2)) == Fused((("q", 4), ("k", 2), ("v", 2)))
    assert fused_of(qkv(torch.empty(8), q=4, k=2, v=2)) == Fused((("q", 4), ("k", 2), ("v", 2)))
    assert fused_of(gdn(weight, q=1, k=1, v=2, z=2, b=1, a=1)).parts == tuple(
        {"q": 1, "k": 1, "v": 2, "z": 2, "b": 1, "a": 1}.items()
    )
    assert fused_of(gdn(weight, q=2, k=2, v=2, z=2)).parts == (("q", 2), ("k", 2), ("v", 2), ("z", 2))
    assert fused_of(torch.empty(3)) is None


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda: split_as(torch.empty(8, 3), {"a": 4, "b": 3}), ("sum to 8", "4 (a) + 3 (b) = 7")),
        (lambda: split_as(torch.empty(8, 3), {"a": 8}, dim=2), ("a dim of the shape (8, 3)", "dim=2")),
        (lambda: split_as(torch.tensor(1.0), {"a": 1}), ("a dim of the shape ()",)),
        (lambda: split_as(torch.empty(8, 3), {}), ("unique names", "[]")),
        (lambda: split_as(torch.empty(8, 3), {"": 4, "b": 4}), ("not empty", "['', 'b']")),
        (lambda: split_as(torch.empty(8, 3), {"a.": 4, "b": 4}), ("not empty",)),
        (lambda: Fused((("a", 4), ("a", 4))), ("unique names", "['a', 'a']")),
        (lambda: split_as(torch.empty(8, 3), {"a": 8, "b": 0}), ("at least 1", "'b': 0", "Leave out")),
        (lambda: split_as(torch.empty(23), {"a": 4, "b": 4}, shape=(8, 3)), ("(8, 3), or 1-D with 24", "(23,)")),
        (lambda: split_as(torch.empty(3, 8), {"a": 4, "b": 4}, shape=(8, 3)), ("(8, 3), or 1-D with 24", "(3, 8)")),
        (lambda: swiglu(torch.empty(7, 3)), ("two equal halves along dim 0", "7", "split_as")),
        (lambda: swiglu(torch.empty(0, 3)), ("two equal halves along dim 0",)),
        (lambda: swiglu(torch.empty(8), dim=1), ("a dim of the shape (8,)", "shape=")),
    ],
)
def test_what_does_not_fit_is_refused(make, fragments):
    with pytest.raises(ConfigError) as raised:
        make()
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_a_refused_parameter_keeps_no_metadata():
    weight = torch.empty(7, 3)
    with pytest.raises(ConfigError):
        split_as(weight, {"a": 4, "b": 4})
    assert fused_of(weight) is None


def test_metadata_of_another_shape_names_the_parameter():
    with pytest.raises(ConfigError, match=r"The parts of layers\.3\.w13 expect to sum to 9"):
        fused_parts("layers.3.w13", Fused((("a", 4), ("b", 4))), whole("", (9, 2), Box((0, 0), (9, 2))))


def test_splitters():
    weight, other = swiglu(torch.empty(8, 3)), torch.empty(8, 3)
    named = Fused((("a", 2), ("b", 6)))
    assert by_metadata("x.weight", weight) == fused_of(weight)
    assert by_metadata("x.weight", other) is None
    split = by_map({"x.weight": named})
    assert split("x.weight", weight) == named  # the map decides where it has the name
    assert split("y.weight", weight) == fused_of(weight)
    assert split("y.weight", other) is None


def test_metadata_goes_on_after_fully_shard(process_group):
    """FSDP2 replaces parameters: the attribute goes on the sharded ones, and stays through forward and backward.

    If the first assertion fails, torch has begun to carry attributes over and the docstring can say so.
    """
    model = torch.nn.Linear(3, 8)
    swiglu(model.weight)
    fully_shard(model)
    assert fused_of(model.weight) is None
    swiglu(model.weight)
    assert fused_of(model.weight) == Fused((("gate", 4), ("up", 4)))
    model(torch.ones(2, 3)).sum().backward()
    assert fused_of(model.weight) == Fused((("gate", 4), ("up", 4)))
