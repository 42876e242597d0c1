"""Experts, packed or not, against the operator's reference."""

import numpy as np
import pytest
from triton_cases import DTYPES, OPERATORS, cases, near, rng, rounded, tensor, torch

from trivium_cuda.kernels import experts, int4

MOE = OPERATORS["moe_experts"]


def one_by_one(x, weights, ids, gate, up, down, gate_bias, up_bias, down_bias, *, dtype, **attrs):
    """Choice by choice, with what the gate gives rounded to dtype, since that is what is multiplied again."""
    y, (inter, hidden) = np.zeros_like(x), (gate.shape[1], down.shape[1])
    sizes = ((gate_bias, inter), (up_bias, inter), (down_bias, hidden))
    gate_bias, up_bias, down_bias = (np.zeros((len(gate), n), np.float32) if b is None else b for b, n in sizes)
    for t, j in np.ndindex(ids.shape):
        e = ids[t, j]
        a = OPERATORS["gated"](gate[e] @ x[t] + gate_bias[e], up[e] @ x[t] + up_bias[e], **attrs)
        y[t] += weights[t, j] * (down[e] @ rounded(a, dtype) + down_bias[e])
    return y


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_every_example_are_the_references(dtype):
    for args, attrs in cases("moe_experts", dtype):
        got = experts.moe_experts(*(tensor(a, dtype) for a in args), **attrs)
        near(got, one_by_one(*args, dtype=dtype, **attrs), dtype, "moe_experts")
        if dtype == "float32":
            near(got, MOE(*args, **attrs), dtype, "moe_experts")


def packed(count, out, inputs, seed):
    draw = rng(seed)
    codes = draw.integers(0, 16, (count, out, inputs), np.uint8)
    scales = draw.uniform(0.05, 0.2, (count, out, inputs // 32)).astype(np.float32) / inputs**0.5
    points = draw.integers(0, 16, scales.shape, np.uint8)
    return int4.pack_int4(tensor(codes), tensor(scales), tensor(points))


@pytest.mark.parametrize("tokens", [20, 90])
def test_packed_experts_in_blocks_of_either_size(tokens):
    """90 tokens of 2 choices are more than 16 for each of 4 experts: the larger blocks."""
    draw, weights = rng(1), (packed(4, 48, 64, 2), packed(4, 48, 64, 3), packed(4, 40, 64, 4))
    weights = (*weights[:2], packed(4, 64, 64, 5)._replace(inputs=48))
    x, chosen = draw.normal(0, 1, (tokens, 64)).astype(np.float32), draw.uniform(0, 1, (tokens, 2)).astype(np.float32)
    ids = np.array([draw.permutation(4)[:2] for _ in range(tokens)], np.int32)
    plain = [int4.unpack(w, torch.float32).numpy() for w in weights]
    got = experts.moe_experts(tensor(x), tensor(chosen), tensor(ids), *weights)
    near(got, MOE(x, chosen, ids, *plain), "float32", "moe_experts")
    calm = experts.moe_experts(tensor(x), tensor(chosen), tensor(ids), *weights, invariant=True)
    assert torch.equal(calm[:1], experts.moe_experts(*(tensor(a[:1]) for a in (x, chosen, ids)), *weights, invariant=True))


def test_every_choice_has_one_place_in_a_block_of_its_expert():
    ids = rng(6).integers(0, 5, (30, 3)).astype(np.int32)
    plan = experts.routes(tensor(ids), 7, 16)
    rows, owners = plan.rows.numpy().reshape(-1, 16), plan.experts.numpy()
    real = rows < ids.size
    assert sorted(rows[real]) == list(range(ids.size))
    assert all((ids.flatten()[rows[b][real[b]]] == owners[b]).all() for b in range(len(owners)))
    assert (real.any(axis=1) == (owners >= 0)).all()
