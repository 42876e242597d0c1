"""Rotation and the store of keys and values against the operators' references."""

import copy

import numpy as np
import pytest
from triton_cases import DTYPES, OPERATORS, cases, exact, held, near, numbers_of, rng, rounded, store_of, stores_of, tensor, torch

from trivium_cuda.kernels import rotary

ROPE, WRITE, NORM = OPERATORS["rope"], OPERATORS["kv_write"], OPERATORS["rms_norm"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_of_every_example_is_the_references(dtype):
    for (x, positions, inv_freq), attrs in cases("rope", dtype):
        got = rotary.rope(tensor(x, dtype), tensor(positions), tensor(inv_freq), **attrs)
        near(got, ROPE(x, positions, inv_freq, **attrs), dtype, "rope")


@pytest.mark.parametrize("kind", [*DTYPES, "int8"])
def test_rows_are_stored_where_the_reference_stores_them(kind):
    for (kv, k, v), _ in cases("kv_write", "float16"):
        keys, values = stores_of(kv, kind)
        before = numbers_of(keys, kv.k), numbers_of(values, kv.v)
        rotary.kv_write(keys, values, tensor(k, "float16"), tensor(v, "float16"), tensor(kv.slots))
        kv.k[:], kv.v[:] = before
        WRITE(kv, held(k, kind), held(v, kind))
        exact(torch.from_numpy(numbers_of(keys, kv.k)), kv.k)
        exact(torch.from_numpy(numbers_of(values, kv.v)), kv.v)


@pytest.mark.parametrize("kind", ["fp8", "fp8 given"])
def test_bytes_of_eight_bit_floats_are_torchs(kind):
    x = rng(5).normal(0, 2, (6, 3, 40)).astype(np.float32)
    slots = torch.tensor([4, 0, -1, 9, 7, 2])
    store = store_of(rng(6).normal(0, 1, (3, 4, 3, 40)).astype(np.float32), kind)
    scales = None if kind == "fp8" else store.scales.clone()
    rotary.kv_write(store, store_of(np.zeros((3, 4, 3, 40), np.float32), kind), tensor(x), tensor(x), slots)
    rows = tensor(x)[slots >= 0].transpose(0, 1)
    kept = slots[slots >= 0]
    want = (rows.abs().amax(dim=-1, keepdim=True) / 448).to(torch.bfloat16) if scales is None else scales[:, kept]
    assert torch.equal(store.scales[:, kept], want)
    bytes_ = (rows / want.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(store.numbers[:, kept].view(torch.uint8), bytes_.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows_are_stored_where_the_reference_stores_them(dtype):
    for (kv, latent, rope), _ in cases("latent_write", dtype):
        latents, ropes = stores_of(kv, dtype)
        kv.k[:], kv.v[:] = held(kv.k, dtype), held(kv.v, dtype)
        rotary.latent_write(latents, ropes, tensor(latent, dtype), tensor(rope, dtype), tensor(kv.slots))
        OPERATORS["latent_write"](kv, latent, rope)
        exact(torch.from_numpy(numbers_of(latents, kv.k)), kv.k)
        exact(torch.from_numpy(numbers_of(ropes, kv.v)), kv.v)


def drawn(kv, k, dtype):
    """Queries, positions and the table of angles for the keys of an example of kv_write; a head of 24 keeps 8 numbers unturned."""
    n = k.shape[2]
    half = max(1, n // 3 if n == 24 else n // 2)
    q = rounded(rng(7).normal(0, 1, (len(k), 2 * k.shape[1], n)).astype(np.float32), dtype)
    return q, rng(8).integers(0, 500, len(k)).astype(np.int32), (100.0 ** -(np.arange(half) / half)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", [*DTYPES, "int8"])
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_norm_and_store_in_one_pass_are_those_of_the_operators(norm, kind, interleaved):
    dtype = "float32" if kind == "float32" else "float16"
    for (kv, k, v), _ in cases("kv_write", dtype):
        q, positions, inv_freq = drawn(kv, k, dtype)
        weights = [rounded(rng(seed).normal(1, 0.2, k.shape[2]).astype(np.float32), dtype) for seed in (1, 2)]
        stores, attrs = stores_of(kv, kind), {"interleaved": interleaved, "scale": 1.25}
        turned = [x.copy() for x in (q, k)]
        if norm:
            turned = [rounded(NORM(x, w, eps=1e-5), dtype) for x, w in zip(turned, weights)]
        want_q, want_k = (ROPE(x, positions, inv_freq, **attrs) for x in turned)
        before = copy.deepcopy([store.numbers for store in stores])
        args = [*(tensor(x, dtype) for x in (q, k, v)), tensor(positions), tensor(inv_freq), *stores, tensor(kv.slots)]
        if norm:
            args[3:3] = [tensor(w, dtype) for w in weights]
            got = rotary.norm_rope_write(*args, eps=1e-5, **attrs)
        else:
            got = rotary.rope_write(*args, **attrs)
        near(got, want_q, dtype, "rope")
        check_rows(stores[0], rounded(want_k, dtype), kv.slots, kind, dtype)
        check_rows(stores[1], v, kv.slots, kind, dtype)
        others = np.setdiff1d(np.arange(before[0].shape[1]), kv.slots)
        assert torch.equal(stores[0].numbers[:, others], before[0][:, others])


def check_rows(store, want, slots, kind, dtype):
    """The stored rows; where a rounding in front of bytes differs by a unit in the last place, a byte may by one."""
    kept = slots >= 0
    got = numbers_of(store, np.zeros((store.numbers.shape[1], 1, *np.shape(want)[1:])))[slots[kept], 0]
    if kind == "int8":
        step = np.abs(want[kept]).max(axis=-1, keepdims=True) / 127
        assert (np.abs(got - held(want, kind)[kept]) <= 1.02 * step).all()
        assert (np.abs(got - held(want, kind)[kept]) <= 0.01 * step).mean() > 0.9
    else:
        rtol, atol = ROPE.tolerances[dtype]
        np.testing.assert_allclose(got, held(want, kind)[kept], rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_bytes_without_scales_are_refused(dtype):
    bare = rotary.Store(torch.zeros(2, 16, 8, dtype=dtype))
    k, slots = torch.zeros(1, 2, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="stored with scales"):
        rotary.kv_write(bare, bare, k, k, slots)
