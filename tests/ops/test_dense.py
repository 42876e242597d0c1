"""Row-wise operators against formulas written out number by number, in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from trivium import ops
from trivium.errors import ProgramError

RNG = np.random.default_rng(0)


def close(got, want, tol=1e-5):
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", sorted(ops.OPERATORS))
def test_every_operator_is_documented_and_its_cases_have_the_promised_shapes(name):
    op = ops.OPERATORS[name]
    assert len(op.reference.__doc__) >= 15
    assert {"float32", "bfloat16", "float16"} <= set(op.tolerances)
    count = 0
    for case in op.cases(np.random.default_rng(1)):
        count += 1
        attrs = {**op.attrs, **case.attrs}
        shapes = [None if a is None or not hasattr(a, "shape") else a.shape for a in case.args]
        results = op(*case.args, **attrs)
        results = results if isinstance(results, tuple) else (results,)
        arrays = [r for r, arg in zip(results, op.signature.results) if not arg.is_state]
        symbolic = name == "reshape" and ("tokens", *shapes[0][1:])
        want = op.result_shapes([symbolic or shapes[0], *shapes[1:]], attrs)
        for array, shape, arg in zip(arrays, want, [r for r in op.signature.results if not r.is_state]):
            assert array.shape == tuple(array.shape[0] if d == "tokens" else d for d in shape)
            assert array.dtype == (np.float32 if arg.dtype == "float" else np.int32)
            assert np.isfinite(array).all()
    assert count >= 3


def test_embedding_picks_rows_and_scales():
    close(
        ops.OPERATORS["embedding"](np.array([2, 0], np.int32), np.arange(6, dtype=np.float32).reshape(3, 2), scale=3.0),
        [[12, 15], [0, 3]],
    )


def test_linear_equals_sums_of_products():
    x, w, b = RNG.normal(size=(2, 3)), RNG.normal(size=(4, 3)), RNG.normal(size=4)
    want = [[sum(x[t, i] * w[o, i] for i in range(3)) + b[o] for o in range(4)] for t in range(2)]
    close(ops.OPERATORS["linear"](*(a.astype(np.float32) for a in (x, w, b))), want)


def test_head_linear_projects_each_head_with_its_own_matrix():
    x, w = RNG.normal(size=(3, 2, 4)).astype(np.float32), RNG.normal(size=(2, 5, 4)).astype(np.float32)
    close(ops.OPERATORS["head_linear"](x, w), np.einsum("thi,hoi->tho", x, w))


def test_rms_norm_with_offset():
    x, w = [3.0, 4.0], [0.5, -1.0]
    rms = math.sqrt((9 + 16) / 2 + 1e-3)
    want = [[3 / rms * 1.5, 0.0]]
    close(ops.OPERATORS["rms_norm"](np.array([x], np.float32), np.array(w, np.float32), eps=1e-3, offset=1.0), want)
    close(
        ops.OPERATORS["rms_norm"](np.array([x], np.float32), None, eps=0.0, offset=1.0),
        [[3 / math.sqrt(12.5), 4 / math.sqrt(12.5)]],
    )


def test_layer_norm_uses_the_biased_variance():
    x = np.array([[1.0, 2.0, 6.0]], np.float32)
    sd = math.sqrt((4 + 1 + 9) / 3 + 1e-5)
    got = ops.OPERATORS["layer_norm"](x, np.full(3, 2, np.float32), np.full(3, 0.5, np.float32))
    close(got, [[2 * -2 / sd + 0.5, 2 * -1 / sd + 0.5, 2 * 3 / sd + 0.5]])


@pytest.mark.parametrize(
    ("kind", "f"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("relu", lambda x: max(x, 0.0)),
        ("relu2", lambda x: max(x, 0.0) ** 2),
        ("quick_gelu", lambda x: x / (1 + math.exp(-1.702 * x))),
        ("sigmoid", lambda x: 1 / (1 + math.exp(-x))),
        ("tanh", math.tanh),
        ("softplus", lambda x: math.log(1 + math.exp(x))),
    ],
)
def test_activation_equals_its_formula(kind, f):
    points = [-20.0, -3.0, -0.5, 0.0, 0.1, 1.0, 4.0, 20.0]
    close(ops.OPERATORS["activation"](np.array(points, np.float32), kind=kind), [f(x) for x in points])


def test_silu_of_a_very_negative_number_is_zero_without_a_warning():
    with np.errstate(all="raise", under="ignore"):
        assert ops.OPERATORS["activation"](np.array([-1e5], np.float32), kind="silu") == 0


def test_gated_clips_as_gpt_oss():
    gate, up = np.array([3.0, -9.0, 0.5], np.float32), np.array([-9.0, 9.0, 0.25], np.float32)
    want = [g / (1 + math.exp(-1.702 * g)) * (u + 1) for g, u in [(2.0, -2.0), (-9.0, 2.0), (0.5, 0.25)]]
    close(ops.OPERATORS["gated"](gate, up, limit=2.0, alpha=1.702, up_offset=1.0), want)


def test_rope_is_a_complex_rotation_in_both_layouts():
    x = RNG.normal(size=(2, 1, 6)).astype(np.float32)
    inv_freq, positions = np.array([1.0, 0.25], np.float32), np.array([3, 7], np.int32)
    for interleaved, pairs in [(False, [(0, 2), (1, 3)]), (True, [(0, 1), (2, 3)])]:
        got = ops.OPERATORS["rope"](x, positions, inv_freq, interleaved=interleaved, scale=2.0)
        for t, p in enumerate(positions):
            for f, (i, j) in zip(inv_freq, pairs):
                z = complex(x[t, 0, i], x[t, 0, j]) * 2 * complex(math.cos(p * f), math.sin(p * f))
                close([got[t, 0, i], got[t, 0, j]], [z.real, z.imag])
        np.testing.assert_array_equal(got[..., 4:], x[..., 4:])


def test_softcap_scale_gather_slice_concat_reshape():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    o = ops.OPERATORS
    close(o["softcap"](x, cap=2.0), [[2 * math.tanh(v / 2) for v in row] for row in x.tolist()])
    close(o["scale"](x, factor=-2.0), [[0, -2, -4], [-6, -8, -10]])
    close(o["gather_rows"](x, np.array([1, 1, 0], np.int32)), [[3, 4, 5], [3, 4, 5], [0, 1, 2]])
    close(o["slice"](x, start=1, stop=3), [[1, 2], [4, 5]])
    close(o["concat"](x, x[:, :1]), [[0, 1, 2, 0], [3, 4, 5, 3]])
    close(o["reshape"](x, shape=("tokens", 3, 1)), [[[0], [1], [2]], [[3], [4], [5]]])
    close(o["add"](x, x), 2 * x)
    close(o["mul"](x, x), [[0, 1, 4], [9, 16, 25]])


@pytest.mark.parametrize(
    "make",
    [
        lambda b, x: b.reshape(x, shape=("tokens", 7)),
        lambda b, x: b.reshape(x, shape=(8,)),
        lambda b, x: b.slice(x, start=4, stop=9),
        lambda b, x: b.slice(x, start=4, stop=4),
        lambda b, x: b.activation(x, kind="swish"),
        lambda b, x: b.gated(x, x, kind="gelu", alpha=1.7),
        lambda b, x: b.gated(x, b.slice(x, start=0, stop=4)),
        lambda b, x: b.concat(x, b.gather_rows(x, b.input("sample_rows"))),
        lambda b, x: b.linear(x, b.weight("w", (3, 9))),
    ],
)
def test_calls_that_do_not_fit_are_refused_when_the_program_is_built(make):
    b = ops.new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (10, 8)))
    with pytest.raises(ProgramError):
        make(b, x)


def test_segments_are_counted_by_the_separators_before_a_token_in_its_own_sequence():
    op = ops.OPERATORS["segment_embedding"]
    for case in op.cases(np.random.default_rng(2)):
        token_ids, table, starts = case.args
        got = op(*case.args, **case.attrs)
        for begin, end in itertools.pairwise(starts):
            for t in range(begin, end):
                before = token_ids[begin:t].tolist().count(case.attrs["separator"])
                np.testing.assert_array_equal(got[t], table[min(before, len(table) - 1)])
