"""Experts, packed or not, against the operator's reference."""

import numpy as np
import pytest
from triton_cases import DTYPES, OPERATORS, cases, near, rng, rounded, tensor, torch

from trivium_cuda.kernels import experts, fp8, int4, int8

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


def eights(kind, count, out, inputs, seed):
    """(a matrix of each expert in 8 bits, its numbers)."""
    draw = rng(seed)
    shape = {"int8": (out, 1), "fp8": (out, 1), "fp8 for all": (1, 1), "fp8 blocks": (-(-out // 128), -(-inputs // 128))}[kind]
    scales = draw.uniform(0.5, 2, (count, *shape)).astype(np.float32) / 60 / inputs**0.5
    if kind == "int8":
        numbers = draw.integers(-127, 128, (count, out, inputs)).astype(np.int8)
        return int8.matrix(tensor(numbers), tensor(scales)), numbers * scales
    codes = tensor(draw.normal(0, 60, (count, out, inputs)).astype(np.float32)).to(torch.float8_e4m3fn)
    wide = scales.repeat(128, 1)[:, :out].repeat(128, 2)[:, :, :inputs] if kind == "fp8 blocks" else scales
    return fp8.matrix(codes, tensor(scales)), codes.float().numpy() * wide


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8 for all", "fp8 blocks"])
def test_experts_of_eight_bits(kind):
    draw = rng(1)
    matrices, plain = zip(*(eights(kind, 3, *shape, seed=i) for i, shape in enumerate(((140, 160), (140, 160), (160, 140)))))
    for tokens in (4, 40):
        x, chosen = draw.normal(0, 1, (tokens, 160)).astype(np.float32), draw.uniform(0, 1, (tokens, 2)).astype(np.float32)
        ids = np.array([draw.permutation(3)[:2] for _ in range(tokens)], np.int32)
        got = experts.moe_experts(tensor(x), tensor(chosen), tensor(ids), *matrices)
        near(got, MOE(x, chosen, ids, *plain), "float32", "moe_experts")


def test_packed_experts_each_with_inputs_in_an_order_of_its_own():
    draw = rng(7)
    orders = np.stack([draw.permutation(64) for _ in range(3)]).astype(np.int32)
    weights = [packed(3, 48, 64, 2)._replace(order=tensor(orders)), packed(3, 48, 64, 3), packed(3, 64, 64, 4)._replace(inputs=48)]
    plain = [int4.unpack(w._replace(order=None), torch.float32).numpy() for w in weights]
    turned = np.empty_like(plain[0])
    for expert in range(3):
        turned[expert][:, orders[expert]] = plain[0][expert]
    np.testing.assert_array_equal(int4.unpack(weights[0], torch.float32).numpy(), turned)
    x, chosen, ids = (
        draw.normal(0, 1, (6, 64)).astype(np.float32),
        np.ones((6, 1), np.float32),
        np.arange(6, dtype=np.int32)[:, None] % 3,
    )
    got = experts.moe_experts(tensor(x), tensor(chosen), tensor(ids), *weights)
    near(got, MOE(x, chosen, ids, turned, *plain[1:]), "float32", "moe_experts")


def test_every_choice_has_one_place_in_a_block_of_its_expert():
    ids = rng(6).integers(0, 5, (30, 3)).astype(np.int32)
    plan = experts.routes(tensor(ids), 7, 16)
    rows, owners = plan.rows.numpy().reshape(-1, 16), plan.experts.numpy()
    real = rows < ids.size
    assert sorted(rows[real]) == list(range(ids.size))
    assert all((ids.flatten()[rows[b][real[b]]] == owners[b]).all() for b in range(len(owners)))
    assert (real.any(axis=1) == (owners >= 0)).all()
