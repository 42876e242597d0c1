"""Masking of logits by top-k and top-p."""

from __future__ import annotations

import torch
from emulated_cann.registry import Arguments, need, operator

MAX_K = 1024


def check_top_k_top_p(a: Arguments) -> None:
    batch = a.logits.shape[0]
    need(a.logits.dim() == 2, "logits are [batch, vocabulary]")
    need(a.p is None or (a.p.dtype == a.logits.dtype and a.p.shape == (batch,)), "p is [batch] in the dtype of the logits")
    need(a.k is None or (a.k.dtype == torch.int32 and a.k.shape == (batch,)), "k is int32 [batch]")


def inspect_top_k_top_p(a: Arguments) -> None:
    most = min(MAX_K, a.logits.shape[1])
    need(a.k is None or (int(a.k.min()) >= 1 and int(a.k.max()) <= most), f"k lies in 1..{most}")
    need(a.p is None or (float(a.p.min()) >= 0 and float(a.p.max()) <= 1), "p lies in 0..1")


@operator("aclnnApplyTopKTopP", "logits p k out", check_top_k_top_p, inspect_top_k_top_p)
def top_k_top_p(a: Arguments) -> None:
    """Ascending order: what is below the k-th largest goes, then the tail whose cumulated probability is at most 1 - p."""
    values, order = a.logits.float().sort(dim=-1, stable=True)
    minus_infinity = float("-inf")
    if a.k is not None:
        kth = values.gather(1, (values.shape[-1] - a.k.long())[:, None])
        values = values.masked_fill(values < kth, minus_infinity)
    if a.p is not None:
        tail = values.softmax(-1).cumsum(-1) <= 1 - a.p.float()[:, None]
        tail[:, -1] = False
        values = values.masked_fill(tail, minus_infinity)
    a.out.copy_(torch.empty_like(values).scatter_(1, order, values))
