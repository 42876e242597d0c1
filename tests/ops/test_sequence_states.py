"""Latent attention, delta rule, short convolution and collectives against formulas written differently."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from trivium import ops
from trivium.errors import ProgramError, UnsupportedError
from trivium.ops.examples import STALE, sequences
from trivium.ops.state import RecurrentState

OPS = ops.OPERATORS


def row(pages, table, position):
    size = pages.shape[1]
    return pages[table[position // size], position % size, 0].astype(np.float64)


def test_latent_attention_equals_brute_force():
    for case in OPS["latent_attention"].cases(np.random.default_rng(1)):
        q_latent, q_rope, kv, starts, contexts = case.args
        got = OPS["latent_attention"](*case.args, **case.attrs)
        for s, context in enumerate(contexts):
            queries = starts[s + 1] - starts[s]
            for i in range(queries):
                t = starts[s] + i
                seen = range(context - queries + i + 1)
                latent = np.array([row(kv.k, kv.block_table[s], j) for j in seen])
                rope = np.array([row(kv.v, kv.block_table[s], j) for j in seen])
                for h in range(q_latent.shape[1]):
                    e = np.exp(case.attrs["scale"] * (latent @ q_latent[t, h] + rope @ q_rope[t, h]))
                    np.testing.assert_allclose(got[t, h], e / e.sum() @ latent, rtol=1e-4, atol=1e-5)


def test_top_positions_are_those_of_brute_force():
    for case in OPS["top_positions"].cases(np.random.default_rng(3)):
        q, weights, keys, starts, contexts = case.args
        got, top = OPS["top_positions"](*case.args, **case.attrs), case.attrs["top_k"]
        for s, context in enumerate(contexts):
            queries = starts[s + 1] - starts[s]
            for t, last in zip(range(starts[s], starts[s + 1]), range(context - queries, context)):
                key = [np.r_[row(keys.k, keys.block_table[s], j), row(keys.v, keys.block_table[s], j)] for j in range(last + 1)]
                worth = [sum(w * max(q[t, h] @ k, 0.0) for h, w in enumerate(weights[t])) for k in key]
                order = sorted(range(last + 1), key=lambda j: (-worth[j], j))[:top]
                assert got[t].tolist() == order + [-1] * (top - len(order))


def test_sparse_latent_attention_equals_brute_force_over_the_positions():
    for case in OPS["sparse_latent_attention"].cases(np.random.default_rng(1)):
        q_latent, q_rope, kv, starts, contexts, positions = case.args
        got = OPS["sparse_latent_attention"](*case.args, **case.attrs)
        for s in range(len(contexts)):
            for t in range(starts[s], starts[s + 1]):
                seen = [j for j in positions[t] if j >= 0]
                latent, rope = (np.array([row(part, kv.block_table[s], j) for j in seen]) for part in (kv.k, kv.v))
                for h in range(q_latent.shape[1]):
                    e = np.exp(case.attrs["scale"] * (latent @ q_latent[t, h] + rope @ q_rope[t, h]))
                    np.testing.assert_allclose(got[t, h], e / e.sum() @ latent, rtol=1e-4, atol=1e-5)


def test_latent_write_fills_both_parts_of_the_slot():
    case = next(iter(OPS["latent_write"].cases(np.random.default_rng(1))))
    kv, latent, rope = case.args
    OPS["latent_write"](kv, latent, rope)
    page, offset = divmod(int(kv.slots[0]), kv.k.shape[1])
    np.testing.assert_array_equal(kv.k[page, offset, 0], latent[0])
    np.testing.assert_array_equal(kv.v[page, offset, 0], rope[0])


def delta_by_products(q, k, v, g, beta, state, scale):
    """The state as a product of transition matrices: S_t = exp(g)(I - beta k kᵀ) S + beta k vᵀ."""
    out = []
    for t in range(len(q)):
        transition = math.exp(g[t]) * (np.eye(len(k[t])) - beta[t] * np.outer(k[t], k[t]))
        state = transition @ state + beta[t] * np.outer(k[t], v[t])
        out.append(scale * q[t] @ state)
    return np.array(out), state


def test_delta_rule_equals_products_of_transition_matrices():
    for case in OPS["gated_delta_rule"].cases(np.random.default_rng(2)):
        q, k, v, g, beta, s, starts, contexts = (
            np.float64(a) if isinstance(a, np.ndarray) and a.dtype == np.float32 else a for a in case.args
        )
        before = copy.deepcopy(s)
        y, after = OPS["gated_delta_rule"](*case.args, **case.attrs)
        for i, page in enumerate(s.table):
            span = slice(starts[i], starts[i + 1])
            fresh = contexts[i] == starts[i + 1] - starts[i]
            for h in range(q.shape[1]):
                state = np.zeros(before.data.shape[2:]) if fresh else before.data[page, h].astype(np.float64)
                want, state = delta_by_products(
                    q[span, h], k[span, h], v[span, h], g[span, h], beta[span, h], state, case.attrs["scale"]
                )
                np.testing.assert_allclose(y[span, h], want, rtol=1e-3, atol=1e-5)
                np.testing.assert_allclose(after.data[page, h], state, rtol=1e-3, atol=1e-5)
        unowned = np.setdiff1d(np.arange(len(s.data)), s.table)
        assert (after.data[unowned] == STALE).all()


def test_state_space_scan_equals_its_sum_over_all_earlier_tokens():
    """y_t = d · x_t + sum over j <= t of exp(a · (dt_j+1 + ... + dt_t)) · dt_j · (c_t · b_j) · x_j + the first state, faded."""
    for case in OPS["selective_scan"].cases(np.random.default_rng(5)):
        x, dt, a, b, c, d, s, starts, contexts = case.args
        before = copy.deepcopy(s)
        y, after = OPS["selective_scan"](*case.args, **case.attrs)
        dt = np.clip(dt, *case.attrs.get("dt_limits", (0, 1)))
        for i, page in enumerate(s.table):
            rows = range(starts[i], starts[i + 1])
            first = np.zeros_like(before.data[page]) if contexts[i] == len(rows) else before.data[page]
            for h, t in ((h, t) for h in range(x.shape[1]) for t in rows):
                group = h * b.shape[1] // x.shape[1]
                fade = [math.exp(a[h] * dt[j : t + 1, h].sum(dtype=np.float64)) for j in range(rows[0], t + 2)]
                want = d[h] * x[t, h] + fade[0] * first[h] @ c[t, group]
                for j in range(rows[0], t + 1):
                    want = want + fade[j + 1 - rows[0]] * dt[j, h] * (c[t, group] @ b[j, group]) * x[j, h]
                np.testing.assert_allclose(y[t, h], want, rtol=1e-3, atol=1e-4)
        unowned = np.setdiff1d(np.arange(len(s.data)), s.table)
        assert (after.data[unowned] == STALE).all()


def test_short_convolution_equals_numpy_convolution_of_the_whole_sequence():
    rng = np.random.default_rng(3)
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 3), (3, 4), (3,)))
    want = np.stack([np.convolve(x[:, c], weight[c, ::-1])[:9] + bias[c] for c in range(3)], axis=1)
    state = RecurrentState(np.full((2, 3, 3), STALE, np.float32), np.array([1], np.int32))
    got = []
    for start, stop in ((0, 1), (1, 3), (3, 9)):
        step = sequences([stop - start], [stop])
        y, state = OPS["short_conv"](x[start:stop], weight, bias, state, *step)
        got.append(y)
    np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state.data[1], x[6:])


def test_a_recurrent_state_carries_over_chunks():
    rng = np.random.default_rng(4)
    tensors = [rng.standard_normal(s).astype(np.float32) for s in ((7, 2, 4), (7, 2, 4), (7, 2, 5))]
    tensors += [-rng.uniform(0, 1, (7, 2)).astype(np.float32), rng.uniform(0, 1, (7, 2)).astype(np.float32)]
    run = lambda state, a, b: OPS["gated_delta_rule"](*(t[a:b] for t in tensors), state, *sequences([b - a], [b]), scale=0.5)[0]
    new = lambda: RecurrentState(np.full((1, 2, 4, 5), STALE, np.float32), np.zeros(1, np.int32))
    chunked = new()
    np.testing.assert_array_equal(np.concatenate([run(chunked, 0, 3), run(chunked, 3, 4), run(chunked, 4, 7)]), run(new(), 0, 7))


def test_collectives_of_one_rank():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for name, attrs in (("all_reduce", {}), ("all_gather", {"dim": 0}), ("send", {"rank": 0}), ("recv", {"rank": 0})):
        np.testing.assert_array_equal(OPS[name](x, **attrs), x)
    with pytest.raises(UnsupportedError, match="one rank"):
        OPS["all_gather"](x, dim=0, ranks=2)
    b = ops.new_builder()
    y = b.all_gather(b.embedding(b.input("token_ids"), b.weight("w", (4, 8))), dim=-1, ranks=2)
    assert y.shape == ("tokens", 16)
    with pytest.raises(ProgramError, match="no fixed size"):
        b.all_gather(y, dim=0, ranks=2)
