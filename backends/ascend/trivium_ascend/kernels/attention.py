"""Attention over pages by npu_fused_infer_attention_score_v2, in two layouts.

TND takes all sequences of a step in one call, with heads of 128 numbers (192; 64 where no head is shared). BSH takes every head
size of a multiple of 16, sequences with equally many queries in one call: decode in one, prefill in one for each length.

A decode step reads each page once, 4 * K * kv_heads * n bytes a sequence in 16 bits, and does 4 * K * heads * n operations.
Masks are the compressed 2048 by 2048 triangle; where single queries have a window, it is a mask of the few keys that the first
page holds before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trivium.ops import Call
from trivium_ascend.kernels.table import HALVES, OWN, NpuKernel, first
from trivium_ascend.pages import Blocks, Reads, by_length, pieces, whole
from trivium_ascend.session import AscendSession
from trivium_torch.kernels.attention import paged_attention as plain
from trivium_torch.kernels.dense import Args, Attrs

FIA = "npu_fused_infer_attention_score_v2"
RIGHT_DOWN, BAND = 3, 4
IN_PAGES = 5
"""The quantisation mode of a scale for each token and head, float32[blocks, heads, block_size]."""
ALL = 2147483647
HEADS, SHARED, WIDTH, PIECE = 256, 64, 65535, 16
"""Most query heads, in all and to one key head; numbers of all heads of a token in BSH stay below WIDTH; queries of a latent
call."""


def flat(block: Tensor) -> Tensor:
    """[blocks, page_size, heads * n], the form that both layouts take."""
    return block.flatten(2)


def options(kv: Blocks, q: Tensor, attrs: Attrs) -> dict[str, Any]:
    """What every call says alike."""
    k = kv.blocks[0]
    return {
        "num_query_heads": q.shape[1], "num_key_value_heads": k.shape[2], "softmax_scale": attrs["scale"],
        "block_size": k.shape[1],
    }  # fmt: skip


def masked(session: AscendSession, attrs: Attrs) -> dict[str, Any]:
    """The mask of queries that are not single ones."""
    if not attrs["causal"]:
        return {"sparse_mode": 0}
    if attrs["window"] is None:
        return {"sparse_mode": RIGHT_DOWN, "atten_mask": session.causal_mask()}
    window = {"pre_tokens": attrs["window"] - 1, "next_tokens": 0}
    return {"sparse_mode": BAND, "atten_mask": session.causal_mask(), **window}


def packed(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """TND: all sequences of the step, whatever their numbers of queries. Single queries have no mask, so none with a window
    either."""
    q, kv, _, _, sinks = args
    parts = whole(kv.step, attrs["window"])
    if any(seen.widest == 1 and seen.hidden is not None for seen in parts):
        return (apart if sinks is None else plain)(session, args, attrs)
    sink = None if sinks is None else session.kept(sinks, "sinks", lambda: as_sinks(sinks))
    if sinks is not None and sink is None:
        return plain(session, args, attrs)

    def one(q: Tensor, seen: Reads) -> Tensor:
        return session.attention(
            q.contiguous(), *map(flat, kv.blocks), actual_seq_qlen=seen.ends, actual_seq_kvlen=seen.lengths, block_table=seen.table,
            input_layout="TND", learnable_sink=sink, **options(kv, q, attrs), **masked(session, attrs),
        )  # fmt: skip

    return over(parts, (q,), one)


def over(parts: list[Reads], queries: tuple[Tensor, ...], one: Callable[..., Tensor]) -> Tensor:
    """What `one` answers to each part of a step, in the rows of its tokens, shaped as the first of `queries`."""
    if len(parts) == 1 and parts[0].rows is None:
        return one(*queries, parts[0])
    y = torch.empty_like(queries[0])
    for seen in parts:
        assert seen.rows is not None
        y.index_copy_(0, seen.rows, one(*(q[seen.rows] for q in queries), seen))
    return y


def as_sinks(sinks: Tensor) -> Tensor | None:
    """Sinks in bfloat16, which is how the operator takes them; None if that would change them."""
    rounded = sinks.to(torch.bfloat16)
    return rounded if torch.equal(rounded.to(torch.float32), sinks.to(torch.float32)) else None


def apart(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """BSH: a call for each number of queries."""
    q, kv, *_ = args
    return over(by_length(kv.step, attrs["window"]), (q,), lambda some, seen: alike(session, some, kv, seen, attrs))


def alike(session: AscendSession, q: Tensor, kv: Blocks, seen: Reads, attrs: Attrs) -> Tensor:
    """Sequences with equally many queries: q[S * queries, heads, n] in the layout [S, queries, heads * n]."""
    count = len(seen.lengths)
    mask = single_mask(kv, seen) if seen.widest == 1 else masked(session, attrs)
    y = session.attention(
        q.reshape(count, seen.widest, -1), *map(flat, kv.blocks), actual_seq_qlen=[seen.widest] * count,
        actual_seq_kvlen=seen.lengths, block_table=seen.table, input_layout="BSH", **options(kv, q, attrs), **mask,
        **scaled(kv),
    )  # fmt: skip
    return y.view(*q.shape[:2], -1)


def scaled(kv: Blocks) -> dict[str, Any]:
    """How int8 pages become numbers: a scale for each token and head, which lies in pages, too."""
    if not kv.scales:
        return {}
    key, value = kv.scales
    modes = {"key_quant_mode": IN_PAGES, "value_quant_mode": IN_PAGES}
    return {"dequant_scale_key": key, "dequant_scale_value": value, **modes}


def single_mask(kv: Blocks, seen: Reads) -> dict[str, Any]:
    """bool[S, keys], true for the keys before the window: such queries see all others, so without a window there is no mask."""
    hidden = seen.hidden
    if hidden is None:
        return {"sparse_mode": 0}

    def make() -> Tensor:
        keys = seen.table.shape[1] * kv.step.page_size
        return torch.arange(keys, device=hidden.device) < hidden[:, None]

    return {"sparse_mode": 0, "atten_mask": kv.step.once(("single", id(seen)), make)}


def plain_scores(call: Call) -> str | None:
    if call.attrs["softcap"] is not None:
        return "the operator has no soft cap"
    if not call.attrs["causal"] and call.attrs["window"] is not None:
        return "the operator has no window that looks ahead"
    return None


def packed_fits(call: Call) -> str | None:
    heads, width = _sizes(call)
    if width != 128:  # 192 and, where no head is shared, 64 would do, but not with the pages that are kept here
        return f"the layout TND takes heads of 128 numbers, not {width}"
    return None if heads <= HEADS else f"the operator takes {HEADS} heads, not {heads}"


def apart_fits(call: Call) -> str | None:
    heads, width = _sizes(call)
    if width % 16 or width > 512:
        return f"the operator takes heads of multiples of 16 up to 512 numbers, not {width}"
    if heads > HEADS or heads * width >= WIDTH:
        return f"the layout BSH takes {HEADS} heads and less than {WIDTH} numbers a token, not {heads} of {width}"
    return None if call.args[4] is None else "the layout BSH has no sinks"


def eights_fit(call: Call) -> str | None:
    """In bytes, heads are in steps of 32."""
    width = _sizes(call)[1]
    return f"over int8 pages the operator takes heads of multiples of 32 numbers, not {width}" if width % 32 else None


def _sizes(call: Call) -> tuple[int, int]:
    """Query heads, and numbers a head. How many heads share a key head, a call doesn't say: see `shared`."""
    q: Any = call.args[0]
    return q.shape[1], q.shape[2]


def shared(kernel: Callable[[AscendSession, Args, Attrs], Tensor]) -> Callable[[AscendSession, Args, Attrs], Tensor]:
    """A kernel that leaves to plain torch what the operator does not take: more than 64 query heads to a key head, and no query."""

    def run(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
        q, kv, *_ = args
        if not q.shape[0] or q.shape[1] > SHARED * kv.blocks[0].shape[2]:
            return plain(session, args, attrs)
        return kernel(session, args, attrs)

    return run


def latent(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """Multi-head latent attention: the stored rows are keys and values of one head. The operator takes 16 queries a sequence, so a
    longer one goes in pieces, each a sequence of its own that ends where its last query stands."""
    q_latent, q_rope, kv, *_ = args
    if not q_latent.shape[0]:
        return q_latent  # type: ignore[no-any-return]
    k, turned = map(flat, kv.blocks)

    def one(q: Tensor, rope: Tensor, seen: Reads) -> Tensor:
        mask = {"sparse_mode": 0} if seen.widest == 1 else {"sparse_mode": RIGHT_DOWN, "atten_mask": session.causal_mask()}
        return session.attention(
            q.contiguous(), k, k, query_rope=rope.contiguous(), key_rope=turned, actual_seq_qlen=seen.ends,
            actual_seq_kvlen=seen.lengths, block_table=seen.table, block_size=kv.step.page_size, input_layout="TND",
            num_query_heads=q.shape[1], num_key_value_heads=1, softmax_scale=attrs["scale"], **mask,
        )  # fmt: skip

    return over(pieces(kv.step, PIECE), (q_latent, q_rope), one)


def latent_fits(call: Call) -> str | None:
    q: Any = call.args[0]
    rope: Any = call.args[1]
    heads, rank, rope_dim = q.shape[1], q.shape[2], rope.shape[2]
    if (rank, rope_dim) != (512, 64):
        return f"the operator takes latent rows of 512 and 64 numbers, not {rank} and {rope_dim}"
    return None if heads in (1, 2, 4, 8, 16, 32, 64, 128) else f"the operator takes a power of two of heads up to 128, not {heads}"


KERNELS = (
    NpuKernel("paged_attention", shared(packed), f"{FIA} (TND)", 20, first(plain_scores, packed_fits), (FIA,), HALVES, (OWN,)),
    NpuKernel("paged_attention", shared(apart), f"{FIA} (BSH)", 15, first(plain_scores, apart_fits), (FIA,), HALVES, (OWN,)),
    NpuKernel("latent_attention", latent, f"{FIA} (latent)", 20, latent_fits, (FIA,), HALVES, (OWN,)),
)  # fmt: skip
