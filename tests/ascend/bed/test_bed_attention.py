"""Emulated fused attention against trivium's numpy reference of attention, and each documented limit violated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from trivium.ops.attention import attend

BLOCK = 128
Q_LENS, KV_LENS = [1, 5, 3], [200, 130, 3]  # a decode over two pages, a chunk of a longer prompt, a whole prompt
BLOCKS = 8
TABLE = torch.tensor([[3, 5], [7, 1], [2, 0]], dtype=torch.int32)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def upper() -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def causal(q: int, kv: int, window: int | None = None) -> np.ndarray:
    """What a query sees whose tokens are the last of the sequence."""
    i, j = np.arange(kv - q, kv)[:, None], np.arange(kv)[None]
    return (j <= i) & (j > i - (window or kv + 1))


def gathered(pages: torch.Tensor, row: int, length: int) -> np.ndarray:
    """[length, KV, D] of pages [blocks, block, KV, D]."""
    return pages[TABLE[row].long()].flatten(0, 1)[:length].float().numpy()


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None = None, sink: Any = None
) -> torch.Tensor:
    """Attention of packed queries [T, N, D] over pages, sequence by sequence, by trivium's reference."""
    parts, start = [], 0
    for row, (q, kv) in enumerate(zip(Q_LENS, KV_LENS)):
        k, v = gathered(key, row, kv), gathered(value, row, kv)
        x = query[start : start + q].float().numpy()
        parts.append(attend(x, k, v, causal(q, kv, window), query.shape[-1] ** -0.5, None, sink))
        start += q
    return torch.from_numpy(np.concatenate(parts))


class Packed:
    """A TND call over pages: tensors, and the call with some of its arguments changed."""

    def __init__(self, heads: int = 8, kv_heads: int = 2, dim: int = 128, dtype: torch.dtype = torch.float16) -> None:
        self.query = rand(sum(Q_LENS), heads, dim, dtype=dtype)
        self.key, self.value = (rand(BLOCKS, BLOCK, kv_heads, dim, seed=s, dtype=dtype) for s in (1, 2))
        self.arguments = {
            "num_query_heads": heads, "num_key_value_heads": kv_heads, "softmax_scale": dim**-0.5, "input_layout": "TND",
            "block_table": TABLE.npu(), "block_size": BLOCK, "actual_seq_qlen": np.cumsum(Q_LENS).tolist(),
            "actual_seq_kvlen": KV_LENS, "atten_mask": upper().npu(), "sparse_mode": 3,
        }  # fmt: skip

    def __call__(self, query: Any = None, key: Any = None, value: Any = None, **changes: Any) -> list[torch.Tensor]:
        flat = (t.flatten(-2) for t in (self.key, self.value))
        query, key, value = (given if given is not None else own for given, own in zip((query, key, value), (self.query, *flat)))
        call = torch.ops.npu.npu_fused_infer_attention_score_v2
        return [t.cpu() for t in call(query.npu(), key.npu(), value.npu(), **{**self.arguments, **changes})]


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-3) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("heads", "kv_heads", "heads_first"), [(8, 2, False), (8, 2, True), (4, 4, False)])
def test_packed_queries_over_pages(npu, heads, kv_heads, heads_first):
    call = Packed(heads, kv_heads)
    pages = [t.transpose(1, 2).contiguous() for t in (call.key, call.value)] if heads_first else [None, None]
    close(call(None, *pages)[0], expected(call.query, call.key, call.value))
    assert npu.log.names == ["aclnnFusedInferAttentionScoreV4"]


def test_packed_keys_without_pages(npu):
    call = Packed()
    key, value = (
        torch.cat([torch.from_numpy(gathered(t, r, n)) for r, n in enumerate(KV_LENS)]).half() for t in (call.key, call.value)
    )
    found = call(None, key, value, block_table=None, block_size=0, actual_seq_kvlen=np.cumsum(KV_LENS).tolist())
    close(found[0], expected(call.query, call.key, call.value))


def test_a_band_is_a_sliding_window(npu):
    call = Packed()
    found = call(sparse_mode=4, pre_tokens=15, next_tokens=0)
    close(found[0], expected(call.query, call.key, call.value, window=16))


def test_learnable_sinks_take_their_share(npu):
    call = Packed(dtype=torch.bfloat16)
    sink = rand(8, seed=5, dtype=torch.bfloat16)
    close(call(learnable_sink=sink.npu())[0], expected(call.query, call.key, call.value, sink=sink.float().numpy()), 2e-2)


def test_the_log_of_the_sum_of_exponentials(npu):
    call = Packed(4, 4)
    _, lse = call(return_softmax_lse=True)
    key = torch.from_numpy(gathered(call.key, 2, 3))
    scores = torch.einsum("qhd,khd->qhk", call.query[-3:].float(), key) / math.sqrt(128)
    scores = scores.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1)[:, None], -math.inf)
    close(lse[-3:, :, 0], scores.logsumexp(-1), 1e-3)


def padded(call: Packed, layout: str) -> torch.Tensor:
    """Queries of each sequence in [B, S, N, D] with S = 5, in a layout."""
    out = torch.zeros(3, max(Q_LENS), *call.query.shape[1:], dtype=call.query.dtype)
    for row, part in enumerate(call.query.split(Q_LENS)):
        out[row, : len(part)] = part
    return {"BSND": out, "BSH": out.flatten(2), "BNSD": out.transpose(1, 2).contiguous()}[layout]


@pytest.mark.parametrize("layout", ["BSND", "BSH", "BNSD", "BNSD_BSND"])
def test_padded_queries_over_pages(npu, layout):
    call = Packed(8, 2, 64)
    source, _, target = layout.partition("_")
    out = call(padded(call, source), input_layout=layout, actual_seq_qlen=Q_LENS)[0]
    rows = {"BSND": lambda t: t, "BSH": lambda t: t.unflatten(-1, (8, 64)), "BNSD": lambda t: t.transpose(1, 2)}[target or source](
        out
    )
    found = torch.cat([rows[i, :n] for i, n in enumerate(Q_LENS)])
    close(found, expected(call.query, call.key, call.value))


def decode(call: Packed, key: Any, value: Any, **changes: Any) -> torch.Tensor:
    """One query token a sequence in BNSD over pages [blocks, KV, block, D]: [B, N, D]."""
    query = call.query[:3, :, None]
    none = {"actual_seq_qlen": None, "atten_mask": None, "sparse_mode": 0, "input_layout": "BNSD"}
    return call(query, key, value, **{**none, **changes})[0][:, :, 0]


def expected_decode(call: Packed, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    found = [
        attend(call.query[row : row + 1].float().numpy(), gathered(key, row, n), gathered(value, row, n), np.ones((1, n), bool),
               call.query.shape[-1] ** -0.5, None, None)
        for row, n in enumerate(KV_LENS)
    ]  # fmt: skip
    return torch.from_numpy(np.concatenate(found))


@pytest.mark.parametrize("dim", [64, 128])
def test_one_token_a_sequence_with_heads_before_tokens(npu, dim):
    call = Packed(8, 2, dim)
    key, value = (t.transpose(1, 2).contiguous() for t in (call.key, call.value))
    close(decode(call, key, value), expected_decode(call, call.key, call.value))


def quantised(dim: int, seed: int) -> torch.Tensor:
    return torch.randint(-127, 128, (BLOCKS, BLOCK, 2, dim), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


SCALES = {  # mode -> (shape, float32?, how it lies over pages [blocks, block, KV, D])
    0: ((1, 2, 1, 128), False, lambda s: s.reshape(1, 1, 2, 128)),
    2: ((2,), False, lambda s: s.reshape(1, 1, 2, 1)),
    4: ((BLOCKS, BLOCK), True, lambda s: s[:, :, None, None]),
    5: ((BLOCKS, 2, BLOCK), True, lambda s: s.transpose(1, 2)[..., None]),
}


@pytest.mark.parametrize("mode", SCALES)
def test_int8_pages_with_scales(npu, mode):
    shape, single, laid_out = SCALES[mode]
    call = Packed(8, 2, 128)
    key, value = quantised(128, 3), quantised(128, 4)
    scales = [(rand(*shape, seed=s).abs() * 0.01 + 0.005).to(torch.float32 if single else torch.float16) for s in (5, 6)]
    wanted = expected_decode(call, *(x.float() * laid_out(s.float()) for x, s in zip((key, value), scales)))
    found = decode(
        call, *(t.transpose(1, 2).contiguous() for t in (key, value)), dequant_scale_key=scales[0].npu(),
        dequant_scale_value=scales[1].npu(), key_quant_mode=mode, value_quant_mode=mode,
    )  # fmt: skip
    close(found, wanted, 4e-3)


def test_int8_pages_with_tokens_before_heads(npu):
    """Pages [blocks, block, KV*D] go with BSH, the scales of tokens and heads lying heads first all the same."""
    call = Packed(8, 2, 128)
    key, value = quantised(128, 3), quantised(128, 4)
    scales = [rand(BLOCKS, 2, BLOCK, seed=s).float().abs() * 0.01 + 0.005 for s in (5, 6)]
    wanted = expected_decode(call, *(x.float() * SCALES[5][2](s) for x, s in zip((key, value), scales)))
    found = call(
        call.query[:3].flatten(1)[:, None], key.flatten(2), value.flatten(2), input_layout="BSH", actual_seq_qlen=[1] * 3,
        atten_mask=None, sparse_mode=0, dequant_scale_key=scales[0].npu(), dequant_scale_value=scales[1].npu(), key_quant_mode=5,
        value_quant_mode=5,
    )[0]  # fmt: skip
    close(found[:, 0].unflatten(-1, (8, 128)), wanted, 4e-3)


@pytest.mark.parametrize("mode", [1, 3])
def test_int8_keys_with_a_scale_per_token(npu, mode):
    call, kv = Packed(8, 2, 128), 40
    key, value = (torch.randint(-127, 128, (3, 2, kv, 128), dtype=torch.int8) for _ in range(2))
    scale = [rand(*((1, 3, kv) if mode == 1 else (3, 2, kv)), seed=s).abs() * 0.01 for s in (1, 2)]
    scale = [s.float() for s in scale]
    lies = (lambda s: s.reshape(3, 1, kv, 1)) if mode == 1 else (lambda s: s[..., None])
    k, v = (t.float() * lies(s) for t, s in zip((key, value), scale))
    scores = (call.query[:3, :, None].float() @ k.repeat_interleave(4, 1).transpose(-1, -2)) * 128**-0.5
    wanted = (scores.softmax(-1) @ v.repeat_interleave(4, 1))[:, :, 0]
    found = decode(
        call, key, value, block_table=None, block_size=0, actual_seq_kvlen=None, dequant_scale_key=scale[0].npu(),
        dequant_scale_value=scale[1].npu(), key_quant_mode=mode, value_quant_mode=mode,
    )  # fmt: skip
    close(found, wanted, 4e-3)


def test_a_full_mask(npu):
    call = Packed(4, 4, 64)
    query, key, value = (rand(2, 4, n, 64, seed=s) for s, n in ((1, 5), (2, 9), (3, 9)))
    mask = torch.rand(1, 5, 9, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., 0] = False
    wanted = torch.nn.functional.scaled_dot_product_attention(query.float(), key.float(), value.float(), ~mask[:, None])
    found = call(
        query, key, value, input_layout="BNSD", block_table=None, block_size=0, actual_seq_qlen=None, actual_seq_kvlen=None,
        atten_mask=mask.npu(), sparse_mode=1,
    )  # fmt: skip
    close(found[0], wanted)


class Latent(Packed):
    """Multi-head latent attention: one compressed key head of 512, which is also the value, and rope keys of 64."""

    def __init__(self) -> None:
        super().__init__(4, 1, 512)
        self.query_rope = rand(sum(Q_LENS), 4, 64, seed=7)
        self.key_rope = rand(BLOCKS, BLOCK, 1, 64, seed=8)
        self.value = self.key
        self.arguments |= {"query_rope": self.query_rope.npu(), "key_rope": self.key_rope.flatten(-2).npu(), "softmax_scale": 0.05}


def test_latent_attention_over_pages(npu):
    call = Latent()
    query = torch.cat((call.query, call.query_rope), -1)
    key = torch.cat((call.key, call.key_rope), -1)
    parts, start = [], 0
    for row, (q, kv) in enumerate(zip(Q_LENS, KV_LENS)):
        x = query[start : start + q].float().numpy()
        parts.append(attend(x, gathered(key, row, kv), gathered(call.value, row, kv), causal(q, kv), 0.05, None, None))
        start += q
    close(call()[0], torch.from_numpy(np.concatenate(parts)), 4e-3)


def test_the_first_interface_gives_the_same(npu):
    call = Packed()
    key, value = (t.flatten(-2).npu() for t in (call.key, call.value))
    out = torch.ops.npu.npu_fused_infer_attention_score(
        call.query.npu(), key, value, num_heads=8, num_key_value_heads=2, scale=128**-0.5, input_layout="TND", sparse_mode=3,
        block_table=TABLE.npu(), block_size=BLOCK, actual_seq_lengths=np.cumsum(Q_LENS).tolist(), actual_seq_lengths_kv=KV_LENS,
        atten_mask=upper().npu(),
    )[0]  # fmt: skip
    assert npu.log.names == ["aclnnFusedInferAttentionScoreV3"]
    close(out.cpu(), expected(call.query, call.key, call.value))


# ---- limits ----

PACKED_LIMITS = {
    "block_size 17": ({"block_size": 17}, "block_size 17 is a multiple of 16"),
    "cumulative queries": ({"actual_seq_qlen": [6, 5, 9]}, "actual_seq_qlen is cumulative"),
    "all tokens": ({"actual_seq_qlen": [1, 6, 8]}, "the last actual_seq_qlen is T"),
    "lengths": ({"actual_seq_kvlen": None}, "takes both actual sequence lengths"),
    "lengths of all": ({"actual_seq_kvlen": [200, 130]}, "as many as the sequences"),
    "columns": ({"actual_seq_kvlen": [300, 130, 2]}, "block_table has 2 columns, the longest sequence 3"),
    "table dtype": ({"block_table": TABLE.long()}, "block_table is int32"),
    "table rows": ({"block_table": TABLE[:2]}, "block_table has 2 rows for 3 sequences"),
    "table ids": ({"block_table": TABLE + 5}, r"block_table names blocks in 0\.\.7"),
    "mask shape": ({"atten_mask": upper()[:512, :512].contiguous()}, "takes the mask of 2048 x 2048"),
    "mask values": ({"atten_mask": ~upper()}, "strictly upper triangular"),
    "mask dtype": ({"atten_mask": upper().half()}, "atten_mask is bool, int8 or uint8"),
    "mask missing": ({"atten_mask": None}, "sparse_mode 3 takes atten_mask"),
    "sparse_mode 5": ({"sparse_mode": 5}, "sparse_mode 5 is not implemented"),
    "tree mask": ({"sparse_mode": 9}, "sparse_mode 9 takes query_rope"),
    "head ratio": ({"num_key_value_heads": 3}, "num_heads 8 is a multiple of num_key_value_heads 3"),
    "heads": ({"num_query_heads": 4}, "num_heads 4 is the query's"),
    "inner_precise": ({"inner_precise": 4}, "inner_precise 4 is 0, 1, 2 or 3"),
    "sink dtype": ({"learnable_sink": torch.zeros(8)}, "learnable_sink is bfloat16"),
    "one rope": ({"query_rope": torch.zeros(9, 8, 64).half()}, "query_rope and key_rope come together"),
}


def on_device(value: Any) -> Any:
    return value.npu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", PACKED_LIMITS)
def test_a_packed_call_beyond_a_limit_is_refused(npu, name):
    changes, message = PACKED_LIMITS[name]
    with pytest.raises(RuntimeError, match=message):
        Packed()(**{k: on_device(v) for k, v in changes.items()})


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((8, 2, 64), {}, "64 without GQA"),
        ((8, 2, 96), {}, "TND takes head dimension 128"),
        ((4, 4, 128), {"inner_precise": 2}, "without GQA takes inner_precise"),
        ((4, 4, 128), {"sparse_mode": 2}, "without GQA takes sparse_mode 0, 3 or 4"),
        ((8, 2, 512), {}, "512 in TND takes query_rope"),
        ((300, 300, 128), {}, "at most 256 heads"),
        ((130, 2, 128), {}, "at most 64 times"),
        ((8, 2, 136), {}, "the head dimension 136 is a multiple of 16"),
    ],
)
def test_packed_head_shapes_beyond_a_limit_are_refused(npu, shape, changes, message):
    with pytest.raises(RuntimeError, match=message):
        Packed(*shape)(**changes)


def test_multi_head_pages_have_tokens_before_heads_in_packed_calls(npu):
    call = Packed(4, 4)
    with pytest.raises(RuntimeError, match=r"takes pages \[blocks, block_size, KV\*D\] only"):
        call(None, *(t.transpose(1, 2).contiguous() for t in (call.key, call.value)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"query": rand(9, 8, 128, dtype=torch.float32)}, "query is float16 or bfloat16"),
        ({"query": rand(9, 128, 8).transpose(1, 2)}, "contiguous"),
        ({"key": rand(BLOCKS, BLOCK, 256, dtype=torch.bfloat16)}, "no key of|have the dtype of the query"),
        ({"key": quantised(128, 1).flatten(-2), "value": quantised(128, 2).flatten(-2)}, "takes no quantised key"),
        ({"key": rand(BLOCKS, 64, 256), "value": rand(BLOCKS, 64, 256)}, "pages of 3 dimensions are"),
        ({"key": rand(BLOCKS, BLOCK, 2, 128), "value": rand(BLOCKS, BLOCK, 2, 128)}, "pages of 4 dimensions are"),
        ({"key": rand(4, BLOCK, 256), "value": rand(4, BLOCK, 256)}, "the cache has 4 blocks, the sequences together 5"),
    ],
)
def test_packed_tensors_beyond_a_limit_are_refused(npu, tensors, message):
    with pytest.raises(RuntimeError, match=message):
        Packed()(**tensors)


DECODE_LIMITS = {
    "pages of several tokens": ({"actual_seq_qlen": None, "block_size": 64}, "block_size 64 is a multiple of 128"),
    "lengths": ({"actual_seq_kvlen": None}, "block_table takes actual_seq_kvlen"),
    "number of lengths": ({"actual_seq_kvlen": [1, 1]}, "actual_seq_kvlen has 1 or at least 3"),
    "query lengths": ({"actual_seq_qlen": [9, 9, 9]}, "actual_seq_qlen is at most the query's length 5"),
}


@pytest.mark.parametrize("name", DECODE_LIMITS)
def test_a_padded_call_beyond_a_limit_is_refused(npu, name):
    changes, message = DECODE_LIMITS[name]
    call = Packed(8, 2, 64)
    with pytest.raises(RuntimeError, match=message):
        call(padded(call, "BNSD"), **{"input_layout": "BNSD", "actual_seq_qlen": Q_LENS, **changes})


def test_pages_with_heads_first_do_not_go_with_tokens_first_queries(npu):
    call = Packed(8, 2, 64)
    pages = [t.transpose(1, 2).contiguous() for t in (call.key, call.value)]
    with pytest.raises(RuntimeError, match="pages of 4 dimensions go with BNSD and TND"):
        call(padded(call, "BSND"), *pages, input_layout="BSND", actual_seq_qlen=Q_LENS)


QUANTISED_LIMITS = {
    "no scale": ({}, "int8 key and value take scales"),
    "one scale": ({"dequant_scale_key": torch.ones(2).half()}, "come together"),
    "scale shape": (dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), torch.ones(3).half()), "takes scales of shape"),
    "scale dtype": (dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), torch.ones(1)), "takes scales of torch.float16"),
    "mode": (
        {
            **dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), torch.ones(1).half()),
            "key_quant_mode": 7,
            "value_quant_mode": 7,
        },
        "no key_quant_mode 7",
    ),
    "page size": (
        {**dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), torch.ones(1).half()), "block_size": 16},
        "block_size 16 is a multiple of 32",
    ),
}


@pytest.mark.parametrize("name", QUANTISED_LIMITS)
def test_int8_pages_beyond_a_limit_are_refused(npu, name):
    changes, message = QUANTISED_LIMITS[name]
    call = Packed()
    pages = [quantised(128, s).transpose(1, 2).contiguous() for s in (1, 2)]
    with pytest.raises(RuntimeError, match=message):
        decode(call, *pages, **{k: on_device(v) for k, v in changes.items()})


def test_int8_pages_are_for_one_token_a_sequence(npu):
    call = Packed()
    pages = [quantised(128, s).transpose(1, 2).contiguous() for s in (1, 2)]
    scale = torch.ones(1).half().npu()
    with pytest.raises(RuntimeError, match="pages are not quantised for queries of several tokens"):
        call(
            padded(call, "BNSD"),
            *pages,
            input_layout="BNSD",
            actual_seq_qlen=Q_LENS,
            dequant_scale_key=scale,
            dequant_scale_value=scale,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_rope": rand(9, 4, 32)}, "query_rope has head dimension 64"),
        ({"sparse_mode": 2}, "takes sparse_mode 0, 3, 4 or 9"),
        ({"key_rope": rand(BLOCKS, BLOCK, 64, dtype=torch.bfloat16)}, "the ropes have the dtypes"),
        ({"block_size": 24}, "block_size 24 is a multiple of 16"),
    ],
)
def test_latent_attention_beyond_a_limit_is_refused(npu, changes, message):
    with pytest.raises(RuntimeError, match=message):
        Latent()(**{k: on_device(v) for k, v in changes.items()})
