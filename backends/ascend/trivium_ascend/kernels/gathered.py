"""Attention of prompts over keys and values that are gathered out of their pages first, where no operator reads the pages: those of
int8, and all on the inference cards.

Gathering reads and writes 2 * K * kv_heads * n numbers a sequence; attention does 4 * Q * K * heads * n operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium_ascend.kernels.attention import ALL, FIA, apart_fits, eights_fit, flat, masked, over, plain_scores, shared
from trivium_ascend.kernels.attention import alike as alike_in_pages
from trivium_ascend.kernels.table import HALVES, OWN, NpuKernel, first
from trivium_ascend.operators import npu
from trivium_ascend.pages import Blocks, Reads, by_length
from trivium_ascend.session import AscendSession
from trivium_torch.kernels.attention import paged_attention as plain
from trivium_torch.kernels.dense import Args, Attrs

PFA, IFA = "npu_prompt_flash_attention", "npu_incre_flash_attention"
SEQUENCES, LONGEST, ALIGNED = 256, 65535, 16
"""On the inference cards: sequences of a call of single queries, keys of a sequence, and what queries are filled up to."""


def keys_of(session: AscendSession, kv: Blocks, seen: Reads) -> tuple[Tensor, Tensor]:
    """Keys and values [S, keys, kv_heads, n] in the activations' dtype, from the first page of each row of the table on; behind a
    sequence's own stand others, or zeros."""
    size = kv.step.page_size
    at = (seen.table.to(torch.int64)[..., None] * size + torch.arange(size, device=seen.table.device)).flatten(1)
    k, v = (store.read(at).permute(1, 2, 0, 3).to(session.dtype).contiguous() for store in (kv.k, kv.v))
    return k, v


def of_bytes(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """BSH over int8 pages, 2 * K * kv_heads * (n + 4) bytes a sequence with a single query. The operator takes such pages from
    single queries only, so that those of prompts become numbers of 16 bits before."""
    q, kv, *_ = args

    def one(some: Tensor, seen: Reads) -> Tensor:
        return (alike_in_pages if seen.widest == 1 else alike)(session, some, kv, seen, attrs)

    return over(by_length(kv.step, attrs["window"]), (q,), one)


def alike(session: AscendSession, q: Tensor, kv: Blocks, seen: Reads, attrs: Attrs) -> Tensor:
    """Sequences with equally many queries, more than one: q[S * queries, heads, n] in the layout [S, queries, heads * n]."""
    count = len(seen.lengths)
    k, v = keys_of(session, kv, seen)
    y = session.attention(
        q.reshape(count, seen.widest, -1), k.flatten(2), v.flatten(2), actual_seq_qlen=[seen.widest] * count,
        actual_seq_kvlen=seen.lengths, input_layout="BSH", num_query_heads=q.shape[1], num_key_value_heads=k.shape[2],
        softmax_scale=attrs["scale"], **masked(session, attrs),
    )  # fmt: skip
    return y.view(*q.shape[:2], -1)


def on_inference_cards(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """Single queries read the pages, whole prompts are a call each. Masks of single queries are not documented."""
    q, kv, *_ = args
    parts = by_length(kv.step, attrs["window"])
    if any((seen.widest == 1 and seen.hidden is not None) or max(seen.lengths) > LONGEST for seen in parts):
        return plain(session, args, attrs)

    def one(some: Tensor, seen: Reads) -> Tensor:
        return (singles if seen.widest == 1 else prompts)(session, some, kv, seen, attrs)

    return over(parts, (q,), one)


def singles(session: AscendSession, q: Tensor, kv: Blocks, seen: Reads, attrs: Attrs) -> Tensor:
    """q[S, heads, n] over pages, so many sequences a call as the operator takes."""
    k, v = map(flat, kv.blocks)
    heads, shared_by = q.shape[1], kv.blocks[0].shape[2]

    def call(part: slice) -> Tensor:
        return npu.npu_incre_flash_attention(  # type: ignore[no-any-return]
            q[part].flatten(1)[:, None].contiguous(), k, v, actual_seq_lengths=seen.lengths[part],
            block_table=seen.table[part].contiguous(), num_heads=heads, num_key_value_heads=shared_by,
            scale_value=attrs["scale"], block_size=kv.step.page_size, inner_precise=0,
        )  # fmt: skip

    found = [call(slice(start, start + SEQUENCES)) for start in range(0, len(q), SEQUENCES)]
    return torch.cat(found).view(*q.shape[:2], -1)


def prompts(session: AscendSession, q: Tensor, kv: Blocks, seen: Reads, attrs: Attrs) -> Tensor:
    """q[S * queries, heads, n], a sequence a call."""
    k, v = keys_of(session, kv, seen)
    each = q.view(len(seen.lengths), seen.widest, *q.shape[1:])
    return torch.cat([prompt(*one, attrs) for one in zip(each, k, v, seen.lengths, strict=True)])


def prompt(q: Tensor, k: Tensor, v: Tensor, length: int, attrs: Attrs) -> Tensor:
    """q[queries, heads, n] over the first `length` of k, v [keys, kv_heads, n]. The operator has neither lengths nor shared heads
    here, so that the mask says what is there, and heads are repeated."""
    queries, heads, _ = q.shape
    wide = (x[:, :, None].expand(-1, -1, heads // k.shape[1], -1).reshape(1, len(k), -1) for x in (k, v))
    filled = F.pad(q.flatten(1), (0, 0, 0, -queries % ALIGNED))[None]
    y = npu.npu_prompt_flash_attention(
        filled, *wide, atten_mask=hidden(filled.shape[1], queries, len(k), length, attrs, q.device), num_heads=heads,
        scale_value=attrs["scale"], next_tokens=ALL,
    )  # fmt: skip
    return y[0, :queries].view(queries, heads, -1)  # type: ignore[no-any-return]


def hidden(rows: int, queries: int, keys: int, length: int, attrs: Attrs, device: Any) -> Tensor:
    """bool[rows, keys], true for keys that a query does not see. Rows that fill up see what the last query does: none may be all
    true."""
    last = (torch.arange(rows, device=device) + (length - queries)).clamp(max=length - 1)[:, None]
    at = torch.arange(keys, device=device)
    found: Tensor = (at > last) if attrs["causal"] else (at >= length).expand(rows, -1)
    return found if attrs["window"] is None else found | (at <= last - attrs["window"])


KERNELS = (
    NpuKernel(
        "paged_attention", shared(of_bytes), f"{FIA} (BSH, int8 pages)", 10, first(plain_scores, apart_fits, eights_fit), (FIA,),
        HALVES, ("int8",),
    ),
    NpuKernel(
        "paged_attention", shared(on_inference_cards), f"{PFA}, {IFA}", 10, first(plain_scores, apart_fits), (PFA, IFA),
        ("float16",), (OWN,),
    ),
)  # fmt: skip
