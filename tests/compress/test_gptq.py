"""GPTQ, AWQ's factors and pruning against what their papers say, written down plainly."""

from __future__ import annotations

import numpy as np
import pytest
from trivium_compress.awq import factors, output_error
from trivium_compress.gptq import DAMPING, gptq, inverse_factor, ordered
from trivium_compress.grids import Grid, Steps, Symmetric, ZeroPoint, meant, nearest
from trivium_compress.prune import Sparsity, kept
from trivium_compress.walk import Inputs

from trivium.errors import InvalidRequestError


def correlated(tokens: int, columns: int, seed: int = 0) -> np.ndarray:
    """Inputs that go together, some far larger than others."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, columns // 4)) @ rng.standard_normal((columns // 4, columns))
    return (mixed + 0.3 * rng.standard_normal((tokens, columns))) * np.exp(rng.standard_normal(columns))


def by_the_paper(w: np.ndarray, hessian: np.ndarray, grid: Grid, steps: Steps, mask: np.ndarray | None) -> np.ndarray:
    """Optimal brain quantisation in a fixed order: the explicit inverse Hessian of what is left, one column taken out at a time
    (equations 2 and 3 of the paper); float64[rows, columns]."""
    columns = w.shape[1]
    left, out = w.astype(np.float64).copy(), np.zeros_like(w, np.float64)
    inverse = np.linalg.inv(hessian + DAMPING * np.diag(hessian).mean() * np.eye(columns))
    for q in sorted(range(columns), key=lambda i: -hessian[i, i]):
        group = q // grid.size(columns)
        scale, offset = steps.scale[:, group].astype(np.float64), steps.offset[:, group].astype(np.float64)
        codes = np.clip(np.rint((left[:, q] - offset) / scale), grid.low, grid.high)
        out[:, q] = codes * scale + offset
        if mask is not None:
            out[~mask[:, q], q] = 0
        left -= np.outer((left[:, q] - out[:, q]) / inverse[q, q], inverse[q])
        inverse -= np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
        inverse[q, q] = np.inf  # never used again
        inverse[:q, q] = inverse[q + 1 :, q] = inverse[q, :q] = inverse[q, q + 1 :] = 0
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", [Symmetric(32, -8, 7), ZeroPoint(16, -8, 7), Symmetric(0, -127, 127)])
def test_columns_are_rounded_as_the_paper_says(grid: Grid, masked: bool):
    rng = np.random.default_rng(2)
    w = rng.standard_normal((24, 192)) * 0.05  # more than one block of columns
    x = correlated(400, 192)
    hessian, steps = x.T @ x, grid.fit(w)
    mask = rng.random(w.shape) < 0.6 if masked else None
    codes, _ = gptq(w, ordered(hessian), grid, steps, mask=mask)
    got = meant(grid, codes, steps)
    got = got if mask is None else np.where(mask, got, 0)
    np.testing.assert_allclose(got, by_the_paper(w, hessian, grid, steps, mask), atol=1e-6)


def test_the_outputs_are_nearer_than_by_rounding_to_nearest():
    w, x, grid = np.random.default_rng(4).standard_normal((32, 128)) * 0.05, correlated(600, 128), ZeroPoint(32, -8, 7)
    steps = grid.fit(w)
    ours, plain = meant(grid, gptq(w, ordered(x.T @ x), grid, steps)[0], steps), meant(grid, nearest(grid, w, steps), steps)
    error = {name: ((x @ (v - w).T) ** 2).sum() for name, v in (("ours", ours), ("plain", plain))}
    assert error["ours"] < 0.5 * error["plain"]


def test_an_input_that_is_always_0_does_no_harm():
    w, x, grid = np.random.default_rng(4).standard_normal((8, 64)) * 0.05, correlated(300, 64), Symmetric(32, -8, 7)
    x[:, [3, 40]] = 0
    steps = grid.fit(w)
    got = meant(grid, gptq(w, ordered(x.T @ x), grid, steps)[0], steps)
    assert np.isfinite(got).all() and ((x @ (got - w).T) ** 2).sum() < 0.05 * ((x @ w.T) ** 2).sum()
    nothing = gptq(w, ordered(np.zeros((64, 64))), grid, steps)[0]
    np.testing.assert_array_equal(nothing, nearest(grid, w, steps))


def test_the_factor_of_the_inverse_is_upper_triangular():
    x = correlated(200, 40)
    h = x.T @ x
    u = inverse_factor(h, 0.01)
    assert not np.tril(u, -1).any()
    np.testing.assert_allclose(u.T @ u @ (h + 0.01 * np.diag(h).mean() * np.eye(40)), np.eye(40), atol=1e-7)


def seen(x: np.ndarray, *, whole: bool = True) -> Inputs:
    inputs = Inputs.of(x.shape[1], whole)
    for part in np.array_split(x.astype(np.float32), 5):
        inputs.add(part)
    return inputs


def test_what_is_kept_of_inputs_is_their_moments():
    x = correlated(100, 16)
    whole, diagonal = seen(x), seen(x, whole=False)
    np.testing.assert_allclose(whole.moments, x.T @ x, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(diagonal.squares, (x * x).sum(0), rtol=1e-4)
    np.testing.assert_allclose(whole.squares, diagonal.squares, rtol=1e-4)
    np.testing.assert_allclose(whole.size, np.abs(x).sum(0), rtol=1e-4)
    assert whole.count == 100


def test_factors_on_inputs_make_outputs_nearer():
    x = correlated(500, 64)
    x[:, 7] *= 60  # the salient input of the paper
    w, grid = (np.random.default_rng(6).standard_normal((48, 64)) * 0.05).astype(np.float32), Symmetric(32, -8, 7)
    f = factors([w], grid, seen(x))

    def error(factor: np.ndarray) -> float:
        steps = grid.fit(w * factor, search=False)
        return float(((x @ (meant(grid, nearest(grid, w * factor, steps), steps) / factor - w).T) ** 2).sum())

    assert error(f) < 0.6 * error(np.ones(64, np.float32))
    assert f.argmax() == 7 and f.max() * f.min() == pytest.approx(1, rel=1e-3)


def test_the_error_of_outputs_is_that_of_the_inputs_themselves():
    x, miss = correlated(50, 8), np.random.default_rng(0).standard_normal((6, 8))
    assert output_error(miss, x.T @ x) == pytest.approx(((x @ miss.T) ** 2).sum())
    apart = sum(((x[:, i, None] * miss[:, i]) ** 2).sum() for i in range(8))
    assert output_error(miss, (x * x).sum(0)) == pytest.approx(apart)


def test_wanda_keeps_what_matters_in_each_row_and_magnitude_what_is_large():
    rng = np.random.default_rng(8)
    w, squares = rng.standard_normal((10, 24)).astype(np.float32), rng.random(24) * 9
    by_row = kept(w, Sparsity(share=0.25), squares)
    for row, mask in zip(w, by_row):
        score = [abs(v) * s**0.5 for v, s in zip(row, squares)]
        assert sorted(np.flatnonzero(~mask)) == sorted(sorted(range(24), key=score.__getitem__)[:6])
    whole = kept(w, Sparsity(share=0.25))
    assert (~whole).sum() == 60 and np.abs(w[whole]).min() >= np.abs(w[~whole]).max()
    pairs = kept(w, Sparsity(kept=2, of=4), squares)
    assert (pairs.reshape(-1, 4).sum(1) == 2).all()
    score = (np.abs(w) * np.sqrt(squares)).reshape(-1, 4)
    assert all(s[m].min() >= s[~m].max() for s, m in zip(score, pairs.reshape(-1, 4)))


def test_pruning_by_the_hessian_beats_leaving_the_rest_alone():
    w, x = np.random.default_rng(9).standard_normal((16, 64)), correlated(400, 64)
    mask = kept(w, Sparsity(kept=2, of=4), (x * x).sum(0))
    _, numbers = gptq(w, ordered(x.T @ x), None, None, mask=mask)
    assert not numbers[~mask].any()
    assert ((x @ (numbers - w).T) ** 2).sum() < 0.7 * ((x @ (np.where(mask, w, 0) - w).T) ** 2).sum()


@pytest.mark.parametrize("text", ["", "0", "1", "1.5", "-0.5", "nan", "4:2", "0:4", "2:2", "2:", "half"])
def test_a_sparsity_that_makes_no_sense_is_refused(text: str):
    with pytest.raises(InvalidRequestError, match="share between 0 and 1, or KEPT:OF"):
        Sparsity.parse(text)


def test_sparsities_are_read():
    assert Sparsity.parse("0.5") == Sparsity(share=0.5) and Sparsity.parse("2:4") == Sparsity(kept=2, of=4)
    with pytest.raises(InvalidRequestError, match="in groups of 4; a projection has 6"):
        kept(np.ones((2, 6), np.float32), Sparsity(kept=2, of=4))
