"""Attention over pages: those sequences together that have as many queries and keys of like number.

Each such span gathers its keys and values from the pool (2 * K * kv_heads * n numbers a sequence, read once and written once)
and is one batched matrix product for scores and one for values, 4 * Q * K * heads * n operations a sequence. The query heads that
share a key head are rows of one product. Computed in float32 whatever the dtypes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops import Call
from trivium_torch.kernels.dense import F32, Args, Attrs, full_rows
from trivium_torch.kernels.moe import best
from trivium_torch.pages import Floats, Paged, Span, alike
from trivium_torch.session import TorchSession


def store(pool: Floats, kv: Paged, x: Tensor) -> None:
    """Writes rows[tokens, heads, n] to the step's slots."""
    kept, slots = kv.step.writes()
    pool.write(slots, x if kept is None else x[kept])


def kv_write(session: TorchSession, args: Args, attrs: Attrs) -> Paged:
    kv: Paged = args[0]
    store(kv.k, kv, args[1])
    store(kv.v, kv, args[2])
    return kv


def latent_write(session: TorchSession, args: Args, attrs: Attrs) -> Paged:
    kv: Paged = args[0]
    store(kv.k, kv, args[1][:, None])
    store(kv.v, kv, args[2][:, None])
    return kv


def queries(q: Tensor, span: Span, kv_heads: int) -> Tensor:
    """q[tokens, heads, n] as [kv_heads, N, repeat * Q, n]."""
    n, count = span.rows.shape
    found = q[span.rows].view(n, count, kv_heads, -1, q.shape[-1])
    return found.permute(2, 0, 3, 1, 4).reshape(kv_heads, n, -1, q.shape[-1])


def answers(y: Tensor, span: Span) -> Tensor:
    """[kv_heads, N, repeat * Q, n] as [N * Q, heads, n]."""
    kv_heads, (n, count), width = len(y), span.rows.shape, y.shape[-1]
    return y.view(kv_heads, n, -1, count, width).permute(1, 3, 0, 2, 4).reshape(n * count, -1, width)


def attend(
    session: TorchSession, q: Tensor, k: Tensor, v: Tensor, span: Span, *, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale · q · kᵀ) · v of q[g, N, R, n], k[g, N, K, n], v[g, N, K, m], all float32; sinks[g, R]."""
    wide = full_rows(session, q)
    scores = torch.matmul(wide, k.transpose(-1, -2))[:, :, : q.shape[2]] * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if span.mask is not None:
        scores = scores.masked_fill(~span.mask, -torch.inf)
    weights = scores.softmax(dim=-1) if sinks is None else with_sink(scores, sinks)
    return torch.matmul(full_rows(session, weights), v)[:, :, : q.shape[2]]


def with_sink(scores: Tensor, sinks: Tensor) -> Tensor:
    """softmax over the scores and one more, sinks[g, R], that carries no value."""
    first = sinks[:, None, :, None].expand(*scores.shape[:-1], 1)
    return torch.cat([first, scores], dim=-1).softmax(dim=-1)[..., 1:]


def spread_sinks(sinks: Tensor, kv_heads: int, queries: int) -> Tensor:
    """sinks[heads] as [kv_heads, repeat * queries] in float32."""
    return sinks.to(F32).view(kv_heads, -1, 1).expand(-1, -1, queries).reshape(kv_heads, -1)


def paged_attention(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    q, kv, _, _, sinks = args
    kv_heads = kv.k.parts[0].shape[0]

    def one(span: Span) -> Tensor:
        k, v = kv.k.read(span.slots).to(F32), kv.v.read(span.slots).to(F32)
        rows = None if sinks is None else spread_sinks(sinks, kv_heads, span.rows.shape[1])
        return attend(
            session, queries(q, span, kv_heads).to(F32), k, v, span, scale=attrs["scale"], softcap=attrs["softcap"], sinks=rows
        )

    return over_spans(q, kv, kv_heads, kv.v, attrs, one)


def chunked_attention(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """The spans of a step are those of its chunks; all else is as in paged_attention."""
    return paged_attention(session, [*args, None], {**attrs, "softcap": None})


def over_spans(q: Tensor, kv: Paged, kv_heads: int, values: Floats, attrs: Attrs, one: Callable[[Span], Tensor]) -> Tensor:
    """What `one` answers to each of the step's spans, in the rows of its tokens; [tokens, heads, n] in q's dtype."""
    y = torch.zeros((*q.shape[:2], values.parts[0].shape[-1]), dtype=q.dtype, device=q.device)
    for span in kv.step.spans(attrs.get("window"), attrs.get("causal", True), q.shape[1] // kv_heads, attrs.get("chunk")):
        y.index_copy_(0, span.rows.flatten(), answers(one(span), span).to(q.dtype))
    return y


def sdpa_supports(call: Call) -> str | None:
    """Why torch's own attention can't run a call."""
    if call.attrs["softcap"] is not None:
        return "it has no soft cap"
    return None if call.args[4] is None else "it has no sinks"


def sdpa(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """By torch's fused attention, which keeps no scores: for what it can, and where a row's last bits may depend on the others."""
    q, kv, *_ = args
    if session.invariant:
        return paged_attention(session, args, attrs)
    kv_heads = kv.k.parts[0].shape[0]

    def one(span: Span) -> Tensor:
        k, v = kv.k.read(span.slots).to(q.dtype), kv.v.read(span.slots).to(q.dtype)
        return F.scaled_dot_product_attention(queries(q, span, kv_heads), k, v, span.mask, scale=attrs["scale"])

    return over_spans(q, kv, kv_heads, kv.v, attrs, one)


def latent_attention(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """All heads read the same rows: one key head."""
    q_latent, q_rope, kv, *_ = args
    q = torch.cat([q_latent, q_rope], dim=-1)

    def one(span: Span) -> Tensor:
        latent, turned = kv.k.read(span.slots).to(F32), kv.v.read(span.slots).to(F32)
        k = torch.cat([latent, turned], dim=-1)
        return attend(session, queries(q, span, 1).to(F32), k, latent, span, scale=attrs["scale"])

    return over_spans(q, kv, 1, kv.k, attrs, one)


class Whole(NamedTuple):
    """Sequences of a step, padded to one length T: `span` with their rows as keys, too; kept: int64[real tokens], which of the
    N * T rows are no padding; tokens: int64[real tokens], what they are in the step."""

    span: Span
    kept: Tensor
    tokens: Tensor


def wholes(session: TorchSession, query_starts: Tensor, window: int | None, repeat: int) -> list[Whole]:
    """The sequences that start and end in a step, those of like length together; worked out once for all layers."""

    def make() -> list[Whole]:
        starts = session.once(("starts", id(query_starts)), lambda: query_starts.cpu().numpy().astype(np.int64))
        counts = np.diff(starts)
        return [_whole(session, starts[seqs], counts[seqs], window, repeat) for seqs in alike(np.minimum(counts, 1), counts)]

    return session.once(("wholes", id(query_starts), window, repeat), make)  # type: ignore[no-any-return]


def _whole(
    session: TorchSession, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], window: int | None, repeat: int
) -> Whole:
    at = np.arange(int(counts.max()))
    real = at < counts[:, None]
    rows = starts[:, None] + np.where(real, at, 0)
    near = abs(at[:, None] - at) <= (len(at) if window is None else window)
    seen = real[:, None] & (near | ~real[..., None])  # padding sees something, too: a softmax over nothing is no number
    mask = None if seen.all() else session.upload(np.tile(seen, (1, repeat, 1)))
    kept, index = np.flatnonzero(real), session.upload(rows)
    return Whole(Span(index, index, mask), session.upload(kept), session.upload(rows.flatten()[kept]))


def over_wholes(session: TorchSession, args: Args, attrs: Attrs, one: Callable[[Tensor, Tensor, Tensor, Span], Tensor]) -> Tensor:
    """What `one` makes of queries[kv_heads, N, repeat * T, n], keys and values[kv_heads, N, T, n] of the step's sequences."""
    q, k, v, query_starts = args
    y, kv_heads = torch.zeros_like(q), k.shape[1]
    for span, kept, tokens in wholes(session, query_starts, attrs["window"], q.shape[1] // kv_heads):
        keys, values = (x[span.slots].permute(2, 0, 1, 3) for x in (k, v))
        found = answers(one(queries(q, span, kv_heads), keys, values, span), span)
        y.index_copy_(0, tokens, found[kept].to(q.dtype))
    return y


def bidirectional_attention(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    def one(q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
        return attend(session, q.to(F32), k.to(F32), v.to(F32), span, scale=attrs["scale"])

    return over_wholes(session, args, attrs, one)


def bidirectional_sdpa(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """As sdpa(), of whole sequences."""
    if session.invariant:
        return bidirectional_attention(session, args, attrs)

    def one(q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, span.mask, scale=attrs["scale"])

    return over_wholes(session, args, attrs, one)


def top_positions(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """Scores of a token and all keys are one product, heads as rows; they and their order in float32."""
    q, weights, keys, *_ = args
    top = attrs["top_k"]
    found = torch.full((len(q), top), -1, dtype=torch.int32, device=q.device)
    for span in keys.step.spans(None, True, 1, None):
        key = torch.cat([keys.k.read(span.slots), keys.v.read(span.slots)], dim=-1)[0].to(F32)
        n, count = span.rows.shape
        rows = q[span.rows].to(F32).view(n, -1, q.shape[-1])
        similar = torch.matmul(full_rows(session, rows), key.transpose(-1, -2))[:, : rows.shape[1]].relu()
        worth = (weights[span.rows].to(F32)[..., None] * similar.view(n, count, q.shape[1], -1)).sum(dim=2)
        worth = worth if span.mask is None else worth.masked_fill(~span.mask, -torch.inf)
        order = best(worth, top)
        order = order.masked_fill(worth.gather(-1, order) == -torch.inf, -1).to(torch.int32)
        found[span.rows.flatten(), : order.shape[-1]] = order.flatten(0, 1)
    return found


def sparse_latent_attention(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """latent_attention where a query sees its positions only; scores of all keys are made, and most of them are masked."""
    q_latent, q_rope, kv, _, _, chosen = args
    q, heads = torch.cat([q_latent, q_rope], dim=-1), q_latent.shape[1]

    def one(span: Span) -> Tensor:
        latent, turned = kv.k.read(span.slots).to(F32), kv.v.read(span.slots).to(F32)
        at, keys = chosen[span.rows].long(), span.slots.shape[1]
        seen = torch.zeros((*at.shape[:2], keys + 1), dtype=torch.bool, device=at.device)
        seen = seen.scatter_(-1, torch.where(at < 0, keys, at), True)[..., :keys]
        sight = span._replace(mask=seen.repeat(1, heads, 1))
        k = torch.cat([latent, turned], dim=-1)
        return attend(session, queries(q, span, 1).to(F32), k, latent, sight, scale=attrs["scale"])

    return over_spans(q_latent, kv, 1, kv.k, attrs, one)


TORCH_FUSED = (sdpa, bidirectional_sdpa)
"""Those that call torch's fused attention."""

KERNELS: Mapping[str, Callable[[TorchSession, Args, Attrs], Any]] = {
    "kv_write": kv_write, "latent_write": latent_write, "paged_attention": paged_attention, "latent_attention": latent_attention,
    "chunked_attention": chunked_attention, "bidirectional_attention": bidirectional_attention,
    "top_positions": top_positions, "sparse_latent_attention": sparse_latent_attention,
}  # fmt: skip
