# SPDX-License-Identifier: Apache-2.0
"""The numba rule against the exact oracle: zero mismatches, over random and adversarial values."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from offstage.rules import adamw_host
from offstage.rules.rule import Hyperparameters
from tests.support import oracle

F32 = np.float32
ADVERSARIAL = np.array(
    [
        0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 1e-30, -1e-30, 1e-20, 3e-20, 1e-10, 2.0**-24, 0.1, 1.0,
        1.0 + 2.0**-23, 1.0 + 2.0**-8, 1.00390625, 1.01171875, -1.00390625, 3.0, 65504.0, 1e10, 1.8e19, 3e38,
        -3.4028235e38, np.inf, -np.inf, np.nan,
    ],
    dtype=F32,
)  # fmt: skip
COEFFICIENTS = [
    {"lr_decay": F32(1e-4) * F32(0.1), "step_size": F32(1e-4) / F32(0.1), "bias_correction2_sqrt": F32(0.2236)},
    {"lr_decay": F32(0.0), "step_size": F32(0.0), "bias_correction2_sqrt": F32(1.0)},
    {"lr_decay": F32(3e-5), "step_size": F32(2.7e-3), "bias_correction2_sqrt": F32(0.99987)},
]


def random_values(rng: np.random.Generator, n: int, low: float, high: float) -> np.ndarray:
    magnitude = 10.0 ** rng.uniform(low, high, n)
    return (rng.choice([-1.0, 1.0], n) * magnitude).astype(F32)


def inputs() -> tuple[np.ndarray, ...]:
    """(p, g, m, v): every adversarial value against every other, then random ones."""
    rng = np.random.default_rng(5)
    p, g = (a.ravel() for a in np.meshgrid(ADVERSARIAL, ADVERSARIAL))
    m = rng.permutation(np.resize(ADVERSARIAL, p.size))
    v = np.abs(rng.permutation(np.resize(ADVERSARIAL, p.size)))
    n = 30_000
    p = np.concatenate([p, random_values(rng, n, -6, 2)])
    g = np.concatenate([g, random_values(rng, n, -30, 3)])
    m = np.concatenate([m, random_values(rng, n, -30, 3)])
    v = np.concatenate([v, np.abs(random_values(rng, n, -40, 6))])
    return p, g, m, v


def same(a: np.ndarray, b: np.ndarray) -> bool:
    bits = a.view(np.uint32) == b.view(np.uint32) if a.dtype == F32 else a == b
    return bool(np.all(bits | (np.isnan(a) & np.isnan(b)) if a.dtype == F32 else bits))


def tensor(array: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(oracle.to_bf16(array).view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy()).to(dtype)


def as_fp32(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return oracle.from_bf16(tensor.view(torch.int16).numpy().view(np.uint16))
    return tensor.to(torch.float32).numpy()


def run(weight, grad, exp_avg, exp_avg_sq, largest, master, *, kind, coefficients, options, prints=None, fresh=False):
    foreign = torch.zeros(1, dtype=torch.int64)
    numbers = [coefficients[k] for k in ("lr_decay", "step_size", "bias_correction2_sqrt")]
    adamw_host.update(
        weight, grad, exp_avg, exp_avg_sq, largest, master,
        master_kind=kind, coefficients=torch.tensor(np.array(numbers)), prints=prints, foreign=foreign,
        fresh=fresh, **options,
    )  # fmt: skip
    return int(foreign)


@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=["early", "lr 0", "late"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize(
    ("decoupled", "weight_decay", "maximize"),
    [(True, 0.1, False), (True, 0.0, True), (False, 0.1, False), (False, 0.0, False)],
)
def test_fp32_equals_the_oracle(coefficients, amsgrad, decoupled, weight_decay, maximize):
    p, g, m, v = inputs()
    options = {"beta1": 0.9, "beta2": 0.95, "weight_decay": weight_decay, "eps": 1e-8}
    options |= {"maximize": maximize, "decoupled": decoupled}
    largest = np.abs(np.roll(v, 3)) if amsgrad else None
    ours = [tensor(x) for x in (p, g, m, v)] + [None if largest is None else tensor(largest)]
    run(*ours, None, kind=None, coefficients=coefficients, options=options)
    expected = oracle.adam(p, g, m, v, largest, **coefficients, **options)
    assert same(ours[0].numpy(), expected[0])
    assert same(ours[2].numpy(), expected[1])
    assert same(ours[3].numpy(), expected[2])
    if amsgrad:
        assert same(ours[4].numpy(), expected[3])


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_formats_equal_the_oracle(grad_dtype, moment_dtype, weight_dtype):
    """Widened exactly, computed in fp32, narrowed to nearest even."""
    options = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "maximize": False, "decoupled": True}
    p, g, m, v = inputs()
    dtypes = (weight_dtype, grad_dtype, moment_dtype, moment_dtype)
    ours = [tensor(x, dtype) for x, dtype in zip((p, g, m, v), dtypes, strict=True)]
    expected = oracle.adam(*(as_fp32(t) for t in ours), None, **COEFFICIENTS[0], **options)
    run(*ours, None, None, kind=None, coefficients=COEFFICIENTS[0], options=options)
    for i, j in ((0, 0), (2, 1), (3, 2)):
        if dtypes[i] == torch.bfloat16:
            assert np.array_equal(ours[i].view(torch.int16).numpy().view(np.uint16), oracle.to_bf16(expected[j]))
        else:
            assert same(as_fp32(ours[i]), tensor(expected[j], dtypes[i]).to(torch.float32).numpy())


@pytest.mark.parametrize("kind", ["fp32", "split"])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_masters_equal_the_oracle_over_many_steps(kind, moment_dtype):
    """Both kinds of master carry the fp32 weights of the plain computation, ties included, step after step."""
    rng = np.random.default_rng(11)
    options = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "maximize": False, "decoupled": True}
    p = oracle.from_bf16(oracle.to_bf16(random_values(rng, 50_000, -3, 1)))
    m, v = np.zeros_like(p), np.zeros_like(p)
    weight = tensor(p, torch.bfloat16)
    moments = [torch.zeros(p.size, dtype=moment_dtype) for _ in range(2)]
    master = torch.zeros(p.size, dtype=torch.float32 if kind == "fp32" else torch.int16)
    prints = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)) if kind == "split" else None
    ties = 0
    for step in range(8):
        g = oracle.from_bf16(oracle.to_bf16(random_values(rng, p.size, -8, 0)))
        run(weight, tensor(g, torch.bfloat16), *moments, None, master,
            kind=kind, coefficients=COEFFICIENTS[2], options=options, prints=prints, fresh=step == 0)  # fmt: skip
        p, m, v, _ = oracle.adam(p, g, m, v, None, **COEFFICIENTS[2], **options)
        if moment_dtype == torch.bfloat16:
            m, v = (oracle.from_bf16(oracle.to_bf16(x)) for x in (m, v))
        ties += int(np.sum((p.view(np.uint32) & 0xFFFF) == 0x8000))
        assert np.array_equal(weight.view(torch.int16).numpy().view(np.uint16), oracle.to_bf16(p))
        assert same(as_fp32(moments[0]), m)
        assert same(np.abs(as_fp32(moments[1])), v)
        if kind == "fp32":
            assert same(master.numpy(), p)
    assert ties > 0  # otherwise the tie bit was not tested


def test_weights_written_by_others_win_and_are_counted():
    rng = np.random.default_rng(2)
    options = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "eps": 1e-8, "maximize": False, "decoupled": True}
    master = random_values(rng, 1000, -2, 1)
    weight = tensor(master, torch.bfloat16)
    weight[10:13] = 7.0
    g, zeros = np.zeros(1000, F32), np.zeros(1000, F32)
    kept = tensor(master)
    foreign = run(weight, tensor(g), tensor(zeros), tensor(zeros), None, kept,
                  kind="fp32", coefficients=COEFFICIENTS[1], options=options)  # fmt: skip
    assert foreign == 3
    master[10:13] = 7.0
    assert same(kept.numpy(), master)


def test_the_oracle_is_exact():
    """Round-to-odd against rational arithmetic, on values chosen to make double rounding go wrong."""
    rng = np.random.default_rng(0)
    finite = ADVERSARIAL[np.isfinite(ADVERSARIAL)]
    triples = list(itertools.product(finite[::2], finite[1::3], finite[::3]))
    triples += list(zip(*(random_values(rng, 2000, -20, 4) for _ in range(3)), strict=True))
    half_way = [(F32(1 + i * 2.0**-23), F32(1 - 2.0**-24), F32(j * 2.0**-25)) for i in range(8) for j in range(-8, 8)]
    for a, b, c in triples + half_way:
        got, want = oracle.fma(np.array([a]), np.array([b]), np.array([c]))[0], oracle.fma_by_fractions(a, b, c)
        assert got == want, (a, b, c)


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 100_000])
def test_coefficients(step):
    """In fp32; the powers are the platform's, within one unit in the last place of the exact value."""
    inputs, out = torch.empty(5, 1), torch.empty(1, 3)
    adamw_host.coefficients(inputs, out, [Hyperparameters(3e-4, 0.9, 0.95, 0.1, step)])
    lr, beta1, beta2 = (Fraction(float(F32(x))) for x in (3e-4, 0.9, 0.95))
    assert out[0, 0] == oracle.round_to_fp32(lr * Fraction(float(F32(0.1))))
    exact = float(lr) / (1 - float(beta1) ** step), (1 - float(beta2) ** step) ** 0.5
    for got, want in zip(out[0, 1:].tolist(), exact, strict=True):
        assert abs(got - want) <= 2 * float(np.spacing(F32(want)))
