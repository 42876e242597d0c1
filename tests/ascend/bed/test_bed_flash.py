"""The first attention operators on the emulated device: numbers of numpy, and the limits of their documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulated_cann import on_chip

ALL = 2147483647
HEADS, KV, N, SIZE, BLOCKS = 4, 2, 32, 16, 9


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def attention(q, k, v, hidden, scale=0.2):
    """q[S, heads, n] over k, v [K, kv_heads, n] in float64, head by head."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    out = np.empty(q.shape)
    for head in range(q.shape[1]):
        at = head * k.shape[1] // q.shape[1]
        scores = np.where(hidden, -np.inf, q[:, head] @ k[:, at].T * scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, at]
    return out


def prompt(q, k, v, **options):
    given = {"num_heads": HEADS, "scale_value": 0.2, "next_tokens": ALL, **options}
    return torch.ops.npu.npu_prompt_flash_attention(q.npu(), k.npu(), v.npu(), **given)


@pytest.mark.parametrize("kv", [KV, HEADS])
def test_prompts(npu, kv):
    q, k, v = rand(1, 8, HEADS * N), rand(1, 24, kv * N, seed=1), rand(1, 24, kv * N, seed=2)
    hidden = torch.arange(24) > torch.arange(8)[:, None] + 13
    y = prompt(q, k, v, atten_mask=hidden.npu(), num_key_value_heads=0 if kv == HEADS else kv).cpu()
    want = attention(*(x[0].unflatten(-1, (-1, N)) for x in (q, k, v)), hidden.numpy())
    np.testing.assert_allclose(y[0].float().numpy(), want.reshape(8, -1), atol=2e-3)


def test_next_tokens_hide_keys_counted_from_the_upper_left(npu):
    q, k, v = rand(1, 8, HEADS * N), rand(1, 8, HEADS * N, seed=1), rand(1, 8, HEADS * N, seed=2)
    y = prompt(q, k, v, atten_mask=torch.zeros(8, 8, dtype=torch.bool).npu(), next_tokens=0).cpu()
    hidden = np.arange(8) > np.arange(8)[:, None]
    want = attention(*(x[0].unflatten(-1, (-1, N)) for x in (q, k, v)), hidden)
    np.testing.assert_allclose(y[0].float().numpy(), want.reshape(8, -1), atol=2e-3)


def pages(lengths, kv=KV):
    """q, both caches, the table and each sequence's keys and values."""
    k, v = (rand(BLOCKS, SIZE, kv * N, seed=seed) for seed in (3, 4))
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).int()
    table, used = torch.zeros(len(lengths), max(-(-n // SIZE) for n in lengths), dtype=torch.int32), 0
    for row, n in enumerate(lengths):
        count = -(-n // SIZE)
        table[row, :count], used = order[used : used + count], used + count
    return rand(len(lengths), 1, HEADS * N), k, v, table


def single(q, k, v, table, lengths, **options):
    given = {
        "num_heads": HEADS, "num_key_value_heads": KV, "scale_value": 0.2, "block_size": SIZE, "inner_precise": 0,
        "actual_seq_lengths": lengths, "block_table": table.npu(), **options,
    }  # fmt: skip
    return torch.ops.npu.npu_incre_flash_attention(q.npu(), k.npu(), v.npu(), **given)


def test_single_queries_read_pages(npu):
    lengths = [5, 33, 16]
    q, k, v, table = pages(lengths)
    y = single(q, k, v, table, lengths).cpu()
    for row, n in enumerate(lengths):
        found = [cache[table[row, : -(-n // SIZE)].long()].flatten(0, 1)[:n].unflatten(-1, (KV, N)) for cache in (k, v)]
        want = attention(q[row].unflatten(-1, (HEADS, N)), *found, np.zeros((1, n), bool))
        np.testing.assert_allclose(y[row].float().numpy(), want.reshape(1, -1), atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 17}, "pages are"),
        ({"actual_seq_lengths": [5, 33]}, "an actual_seq_length for each sequence"),
        ({"actual_seq_lengths": [5, 33, 60]}, "block_table has 3 columns"),
        ({"num_key_value_heads": 3}, "heads share"),
        ({"block_table": torch.zeros(3, 3, dtype=torch.int64)}, "block_table is int32"),
        ({"block_table": torch.full((3, 3), BLOCKS, dtype=torch.int32)}, "names blocks in 0..8"),
        ({"inner_precise": 2}, "inner_precise is 0 or 1"),
    ],
)
def test_limits_of_single_queries(npu, change, message):
    lengths = [5, 33, 16]
    q, k, v, table = pages(lengths)
    moved = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(RuntimeError, match=message):
        single(q, k, v, table, lengths, **moved).cpu()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(8, 23, dtype=torch.bool), "atten_mask is one of"),
        (torch.zeros(8, 24), "atten_mask is bool"),
        (torch.ones(8, 24, dtype=torch.bool), "hides every key"),
    ],
)
def test_limits_of_prompts(npu, mask, message):
    q, k, v = rand(1, 8, HEADS * N), rand(1, 24, HEADS * N, seed=1), rand(1, 24, HEADS * N, seed=2)
    with pytest.raises(RuntimeError, match=message):
        prompt(q, k, v, atten_mask=mask.npu()).cpu()


CARD_LIMITS = [
    ("p(8, 2, num_key_value_heads=2)", "num_key_value_heads is 0 on 310P"),
    ("p(8, 4, actual_seq_lengths_kv=[8])", "no actual_seq_lengths on 310P"),
    ("p(8, 4, next_tokens=4)", "next_tokens is 0 or"),
    ("p(8, 4, pre_tokens=4)", "all pre_tokens on 310P"),
    ("p(8, 4, batch=129)", "at most 128 sequences"),
    ("p(8, 4, kind=torch.float32)", "query is"),
    ("s(257)", "at most 256 sequences"),
]


def test_limits_of_inference_cards(npu):
    code = f"""
def rand(*shape):
    return torch.ones(*shape).half().npu()
def p(n, kv, batch=1, kind=torch.float16, **options):
    q, k = rand(batch, n, 128).to(kind), rand(batch, n, kv * 32).to(kind)
    torch.ops.npu.npu_prompt_flash_attention(q, k, k, num_heads=4, **options)
def s(batch):
    cache, table = rand(batch, 16, 64), torch.zeros(batch, 1, dtype=torch.int32).npu()
    torch.ops.npu.npu_incre_flash_attention(
        rand(batch, 1, 128), cache, cache, num_heads=4, num_key_value_heads=2, block_size=16, block_table=table,
        actual_seq_lengths=[1] * batch)
for call in {[call for call, _ in CARD_LIMITS]!r}:
    try:
        eval(call)
        print("no error")
    except RuntimeError as e:
        print(str(e).splitlines()[-1])
"""
    for line, (_, message) in zip(on_chip("310P", code).splitlines(), CARD_LIMITS, strict=True):
        assert message in line


@pytest.mark.parametrize(("chip", "name"), [("910C", "Incre"), ("950", "Prompt")])
def test_chips_without_them(npu, chip, name):
    code = """
q = torch.ones(1, 16, 128).half().npu()
for call in (lambda: torch.ops.npu.npu_incre_flash_attention(q[:, :1], q, q, num_heads=4, block_size=16,
                 block_table=torch.zeros(1, 1, dtype=torch.int32).npu(), actual_seq_lengths=[1]),
             lambda: torch.ops.npu.npu_prompt_flash_attention(q, q, q, num_heads=4)):
    try:
        call()
        print("no error")
    except RuntimeError as e:
        print(str(e).splitlines()[-1], str(e).splitlines()[0])
"""
    incre, prompts = on_chip(chip, code).splitlines()
    assert "no error" not in incre and ("no error" in prompts) == (name == "Incre")
