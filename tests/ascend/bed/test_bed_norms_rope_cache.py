"""Emulated norms, activation, rotary embeddings, page writes and logit masks against plain formulas, and their limits violated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trivium.ops import OPERATORS

ops: Any = torch.ops.npu
HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-3) -> None:
    torch.testing.assert_close(found.cpu().float(), wanted.float(), atol=tolerance, rtol=tolerance)


def rms(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    found = OPERATORS["rms_norm"].reference(x.float().numpy(), gamma.float().numpy(), eps=epsilon)
    return torch.from_numpy(found)


# ---- norms ----


@pytest.mark.parametrize("dtype", [HALF, BF16, F32])
def test_rms_norm(npu, dtype):
    x, gamma = rand(3, 4, 64, dtype=dtype), rand(64, seed=1, dtype=dtype)
    y, rstd = ops.npu_rms_norm(x.npu(), gamma.npu(), 1e-5)
    close(y, rms(x, gamma, 1e-5), 2e-2 if dtype == BF16 else 2e-3)
    assert rstd.shape == (3, 4, 1) and rstd.dtype == F32


def test_add_rms_norm_gives_the_norm_and_the_sum(npu):
    x, residual, gamma = rand(5, 64), rand(5, 64, seed=1), rand(64, seed=2)
    y, _, total = ops.npu_add_rms_norm(x.npu(), residual.npu(), gamma.npu(), 1e-6)
    assert torch.equal(total.cpu(), x + residual)
    close(y, rms(x + residual, gamma, 1e-6))


def test_add_rms_norm_in_place(npu):
    x, residual, gamma = rand(5, 64), rand(5, 64, seed=1), rand(64, seed=2)
    a, b = x.npu(), residual.npu()
    ops.npu_add_rms_norm_v2(a, b, gamma.npu(), 1e-6)
    assert torch.equal(b.cpu(), x + residual)
    close(a, rms(x + residual, gamma, 1e-6))


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_add_rms_norm_quantises_with_given_scales(npu, dtype):
    x, residual, gamma = rand(5, 64, dtype=dtype), rand(5, 64, seed=1, dtype=dtype), rand(64, seed=2, dtype=dtype)
    scale = (rand(64, seed=3).abs() * 0.02 + 0.01).to(F32 if dtype == HALF else BF16)
    zero = torch.full((64,), 3).to(torch.int32 if dtype == HALF else BF16)
    y, _, total = ops.npu_add_rms_norm_quant(x.npu(), residual.npu(), gamma.npu(), scale.npu(), zero.npu())
    wanted = np.clip(np.rint(rms(total.cpu(), gamma, 1e-6).numpy() / scale.float().numpy() + 3), -128, 127)
    assert np.abs(y.cpu().numpy().astype(int) - wanted).max() <= 1 and torch.equal(total.cpu(), x + residual)
    assert (y.cpu().numpy() == wanted).mean() > 0.98


def test_add_rms_norm_quantises_per_token(npu):
    x, residual, gamma = rand(5, 64), rand(5, 64, seed=1), rand(64, seed=2)
    y, _, total, scale, _ = ops.npu_add_rms_norm_dynamic_quant(x.npu(), residual.npu(), gamma.npu())
    wanted = rms(total.cpu(), gamma, 1e-6)
    close(scale, wanted.abs().amax(-1) / 127, 1e-4)
    assert ((y.cpu().float() * scale.cpu()[:, None] - wanted).abs() <= scale.cpu()[:, None] * 0.51).all()


def test_swiglu(npu):
    x = rand(5, 64)
    gate, up = x.float().chunk(2, -1)
    close(ops.npu_swiglu(x.npu()), torch.nn.functional.silu(gate) * up)


QUANT = {"x1": rand(5, 64), "x2": rand(5, 64), "gamma": rand(64), "scales1": rand(64).float(), "zero_points1": None}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("npu_rms_norm", {"input": rand(5, 64), "gamma": rand(32)}, "gamma .32,. must be the trailing dimensions"),
        ("npu_rms_norm", {"input": rand(5, 64), "gamma": rand(64, dtype=BF16)}, "does not go with x"),
        ("npu_rms_norm", {"input": rand(5, 64, dtype=F32), "gamma": rand(64)}, "does not go with x"),
        ("npu_add_rms_norm", {"x1": rand(5, 64), "x2": rand(5, 64), "gamma": rand(64).float()}, "have one dtype"),
        ("npu_add_rms_norm", {"x1": rand(5, 64), "x2": rand(4, 64), "gamma": rand(64)}, "one shape|same shape|shape"),
        ("npu_add_rms_norm", {"x1": rand(0, 64), "x2": rand(0, 64), "gamma": rand(64)}, "x1 is not empty"),
        ("npu_add_rms_norm_quant", {**QUANT, "axis": 0}, "axis only support -1"),
        ("npu_add_rms_norm_quant", {**QUANT, "scales1": rand(64)}, "scales1 is torch.float32"),
        ("npu_add_rms_norm_quant", {**QUANT, "scales1": rand(32).float()}, "scales1 is torch.float32 of the shape"),
        ("npu_add_rms_norm_quant", {**QUANT, "zero_points1": rand(64)}, "zero_points1 is torch.int32"),
        ("npu_add_rms_norm_quant", {**QUANT, "scales1": torch.zeros(64)}, "scales that divide are not 0"),
        ("npu_swiglu", {"input": rand(5, 63)}, "even"),
        ("npu_swiglu", {"input": rand(0, 64)}, "not empty"),
        ("npu_swiglu", {"input": rand(5, 64).double()}, "float16, bfloat16 or float32|not support"),
    ],
)
def test_norms_beyond_a_limit_are_refused(npu, name, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(ops, name)(**moved(arguments))


def test_swiglu_reads_contiguous_memory(npu):
    with pytest.raises(RuntimeError, match="x is contiguous"):
        ops.npu_swiglu(rand(64, 5).npu().t())


def test_gamma_on_another_device_is_refused_by_the_host_code(npu):
    with pytest.raises(RuntimeError, match="same device"):
        ops.npu_rms_norm(rand(5, 64).npu(), rand(64))


# ---- rotary embeddings ----


def tables(width: int, positions: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, width / 2]."""
    angles = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width)
    return angles.cos(), angles.sin()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
    """Each pair as a complex number times cos + i sin; x [T, heads, width], cos and sin [T, width / 2]."""
    pairs = torch.stack(x.double().chunk(2, -1), -1) if halves else x.double().unflatten(-1, (-1, 2))
    product = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())[:, None]
    parts = torch.view_as_real(product)
    return torch.cat(parts.unbind(-1), -1) if halves else parts.flatten(-2)


POSITIONS = torch.tensor([3, 0, 31, 7, 7])


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(("head", "width"), [(64, 64), (128, 64)])
def test_rope_by_position(npu, head, width, mode):
    cos, sin = tables(width)
    q, k = rand(5, 4 * head, dtype=F32), rand(5, 2 * head, seed=1, dtype=F32)
    cache = torch.cat((cos, sin), -1)
    found = ops.npu_mrope(POSITIONS.npu(), q.npu(), k.npu(), cache.npu(), head, mrope_section=[0, 0, 0], rotary_mode=mode)
    for x, y in zip((q, k), found):
        heads = x.unflatten(-1, (-1, head))
        spun = turned(heads[..., :width], cos[POSITIONS], sin[POSITIONS], mode == "half")
        close(y.unflatten(-1, (-1, head)), torch.cat((spun, heads[..., width:].double()), -1), 1e-5)


def test_rope_of_three_positions(npu):
    sections, width = [16, 24, 24], 128
    cos, sin = tables(width)
    rows = torch.stack((POSITIONS, POSITIONS.flip(0), POSITIONS.roll(1)))
    pick = lambda t: torch.cat([part[rows[i]] for i, part in enumerate(t.split(sections, -1))], -1)
    q, k = rand(5, 256, dtype=F32), rand(5, 128, seed=1, dtype=F32)
    found = ops.npu_mrope(rows.npu(), q.npu(), k.npu(), torch.cat((cos, sin), -1).npu(), 128, mrope_section=sections)[0]
    close(found.unflatten(-1, (-1, 128)), turned(q.unflatten(-1, (-1, 128)), pick(cos), pick(sin), True), 1e-5)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rope_by_cos_and_sin(npu, mode):
    cos, sin = tables(64)
    x = rand(5, 4, 64, dtype=F32)
    full = (lambda t: torch.cat((t, t), -1)) if mode == "half" else (lambda t: t.repeat_interleave(2, -1))
    found = ops.npu_rotary_mul(x.npu(), full(cos[POSITIONS])[:, None].npu(), full(sin[POSITIONS])[:, None].npu(), mode)
    close(found, turned(x, cos[POSITIONS], sin[POSITIONS], mode == "half"), 1e-5)


def test_rope_in_place(npu):
    cos, sin = tables(64)
    q, k = rand(5, 4, 64, dtype=F32), rand(5, 2, 64, seed=1, dtype=F32)
    on_npu = q.npu(), k.npu()
    full = [torch.cat((t[POSITIONS], t[POSITIONS]), -1)[:, None].npu() for t in (cos, sin)]
    ops.npu_apply_rotary_pos_emb(*on_npu, *full, "TND")
    for x, y in zip((q, k), on_npu):
        close(y, turned(x, cos[POSITIONS], sin[POSITIONS], True), 1e-5)


MROPE = {"positions": POSITIONS, "query": rand(5, 256), "key": rand(5, 128), "cos_sin_cache": rand(32, 64), "head_size": 64,
         "mrope_section": [0, 0, 0]}  # fmt: skip
MUL = {"input": rand(5, 4, 64), "r1": rand(5, 1, 64), "r2": rand(5, 1, 64)}
APPLY = {"query": rand(5, 4, 64), "key": rand(5, 2, 64), "cos": rand(5, 1, 64), "sin": rand(5, 1, 64), "layout": "TND"}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("npu_mrope", {**MROPE, "positions": POSITIONS + 1}, r"positions 1\.\.32 lie within cos_sin_cache, 32 rows"),
        ("npu_mrope", {**MROPE, "positions": POSITIONS.float()}, "positions are int32 or int64|int"),
        ("npu_mrope", {**MROPE, "cos_sin_cache": rand(32, 64).float()}, "have one dtype"),
        ("npu_mrope", {**MROPE, "cos_sin_cache": rand(32, 48)}, "multiples of 32"),
        ("npu_mrope", {**MROPE, "cos_sin_cache": rand(32, 96)}, "rotary_dim 96 is at most head_size 64"),
        ("npu_mrope", {**MROPE, "mrope_section": [1, 1, 1]}, "mrope_section"),
        ("npu_mrope", {**MROPE, "rotary_mode": "interleaved"}, "only support half or interleave"),  # the document's own word
        ("npu_rotary_mul", {**MUL, "input": rand(5, 4, 1024), "r1": rand(5, 1, 1024), "r2": rand(5, 1, 1024)}, "below 896"),
        ("npu_rotary_mul", {**MUL, "r1": rand(5, 1, 32), "r2": rand(5, 1, 32)}, "as wide as x"),
        ("npu_rotary_mul", {**MUL, "rotary_mode": "quarter"}, "half or interleave"),
        ("npu_rotary_mul", {**MUL, "input": rand(5, 1200, 64)}, "below 1000"),
        ("npu_apply_rotary_pos_emb", {**APPLY, "rotary_mode": "interleave"}, "rotary_mode is half"),
        ("npu_apply_rotary_pos_emb", {**APPLY, "query": rand(5, 4, 32), "key": rand(5, 2, 32)}, "head dimension is 64 or 128"),
        ("npu_apply_rotary_pos_emb", {**APPLY, "cos": rand(5, 1, 32), "sin": rand(5, 1, 32)}, r"cos and sin are \[\.\.\., 1, D\]"),
    ],
)
def test_rope_beyond_a_limit_is_refused(npu, name, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(ops, name)(**moved(arguments))


# ---- pages ----


def test_keys_and_values_land_in_their_slots(npu):
    key, value = rand(5, 2, 16), rand(5, 2, 16, seed=1)
    caches = [torch.zeros(3, 4, 2, 16, dtype=HALF).npu() for _ in range(2)]
    slots = torch.tensor([11, 0, 5, 4, 7], dtype=torch.int32)
    ops.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *caches, slots.npu(), cache_mode="Norm")
    for x, cache in zip((key, value), caches):
        wanted = np.zeros((12, 2, 16), np.float16)
        for token, slot in enumerate(slots.tolist()):
            wanted[slot] = x[token].numpy()
        assert np.array_equal(cache.cpu().numpy().reshape(wanted.shape), wanted)


@pytest.mark.parametrize("cumulative", [False, True])
def test_sequences_are_read_back_from_their_pages(npu, cumulative):
    caches = [rand(6, 4, 2, 16, seed=s) for s in (0, 1)]
    table, lengths = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32), [7, 3]
    out = [torch.zeros(10, 2, 16, dtype=HALF).npu() for _ in range(2)]
    given = torch.tensor([0, 7, 10] if cumulative else lengths, dtype=torch.int32)
    ops.npu_gather_pa_kv_cache(*(c.npu() for c in caches), table.npu(), given.npu(), *out, is_seq_lens_cumsum=cumulative)
    for cache, found in zip(caches, out):
        wanted = [cache[table[row, p // 4], p % 4] for row, n in enumerate(lengths) for p in range(n)]
        assert torch.equal(found.cpu(), torch.stack(wanted))


def test_rows_are_updated_in_place(npu):
    x, updates = rand(6, 3, 8), rand(2, 8, seed=1)
    on_npu = x.npu()
    ops.npu_scatter_nd_update_(on_npu, torch.tensor([[4, 2], [0, 1]]).npu(), updates.npu())
    x[4, 2], x[0, 1] = updates[0], updates[1]
    assert torch.equal(on_npu.cpu(), x)


SCATTER = {"key": rand(3, 2, 16), "value": rand(3, 2, 16), "key_cache": rand(3, 4, 2, 16), "value_cache": rand(3, 4, 2, 16),
           "slot_mapping": torch.tensor([1, 5, 2]), "cache_mode": "Norm"}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([1, -1, 2])}, r"slot_mapping lies in \[0, 11\]"),
        ({"slot_mapping": torch.tensor([1, 12, 2])}, r"slot_mapping lies in \[0, 11\]"),
        ({"slot_mapping": torch.tensor([1, 5, 1])}, "no slot twice"),
        ({"slot_mapping": torch.tensor([1.0, 5, 2])}, "slot_mapping is int32 or int64|[Ii]nt"),
        ({"key": rand(3, 2, 16).float()}, "one dtype"),
        ({"key": rand(3, 1, 16)}, "heads and dim are the cache's"),
        ({"key": rand(4, 2, 16)}, "one number of tokens"),
        ({"cache_mode": "PA_NZ"}, "the default mode is PA_NZ"),
        ({"cache_mode": "ND"}, "Norm or PA_NZ|cache_mode"),
        ({"key": rand(3, 16, 2).transpose(1, 2)}, "contiguous"),
    ],
)
def test_page_writes_beyond_a_limit_are_refused(npu, changes, message):
    with pytest.raises(RuntimeError, match=message):
        ops.npu_scatter_pa_kv_cache(**moved({**SCATTER, **changes}))


@pytest.mark.parametrize(
    ("indices", "updates", "message"),
    [
        (torch.tensor([[6, 0]]), rand(1, 8), "indices lie within input"),
        (torch.tensor([[0, 0]]), rand(1, 7), "updates have indices' shape"),
        (torch.tensor([[0, 0]]), rand(1, 8).float(), "updates have the dtype"),
    ],
)
def test_row_updates_beyond_a_limit_are_refused(npu, indices, updates, message):
    with pytest.raises(RuntimeError, match=message):
        ops.npu_scatter_nd_update_(rand(6, 3, 8).npu(), indices.npu(), updates.npu())


# ---- logits ----


def test_logits_outside_top_k_and_top_p_are_masked(npu):
    logits = rand(4, 50, dtype=F32)
    k, p = [5, 50, 1, 20], [1.0, 0.5, 1.0, 0.3]
    found = ops.npu_top_k_top_p(logits.npu(), torch.tensor(p).npu(), torch.tensor(k, dtype=torch.int32).npu()).cpu().numpy()
    for row in range(4):
        order = np.argsort(-logits[row].numpy(), kind="stable")[: k[row]]
        weights = np.exp(logits[row].numpy()[order].astype(np.float64))
        before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
        kept = set(order[before < p[row]].tolist())
        assert set(np.flatnonzero(np.isfinite(found[row])).tolist()) == kept
        assert np.array_equal(found[row][sorted(kept)], logits[row].numpy()[sorted(kept)])


@pytest.mark.parametrize(
    ("p", "k", "message"),
    [
        (torch.ones(2), torch.tensor([0, 5], dtype=torch.int32), r"k lies in 1\.\.50"),
        (torch.ones(2), torch.tensor([51, 5], dtype=torch.int32), r"k lies in 1\.\.50"),
        (torch.tensor([1.5, 1.0]), torch.tensor([1, 5], dtype=torch.int32), r"p lies in 0\.\.1"),
        (torch.ones(2), torch.tensor([1, 5]), "k is int32"),
        (torch.ones(2).half(), torch.tensor([1, 5], dtype=torch.int32), "p is .batch. in the dtype"),
        (torch.ones(3), torch.tensor([1, 5], dtype=torch.int32), "p is .batch.|batch|p"),
    ],
)
def test_masks_beyond_a_limit_are_refused(npu, p, k, message):
    with pytest.raises(RuntimeError, match=message):
        ops.npu_top_k_top_p(rand(2, 50, dtype=F32).npu(), p.npu(), k.npu())


def test_top_k_ends_at_1024(npu):
    with pytest.raises(RuntimeError, match=r"k lies in 1\.\.1024"):
        ops.npu_top_k_top_p(rand(1, 2000, dtype=F32).npu(), None, torch.tensor([1025], dtype=torch.int32).npu())
