"""Patterns that a backend may well have kernels for."""

from __future__ import annotations

from trivium.ops import Pattern


def qkv(b, x, wq, wk, wv, bq, bk, bv):
    """Three projections of one input."""
    return b.linear(x, wq, bq), b.linear(x, wk, bk), b.linear(x, wv, bv)


def gated_mlp(b, x, wg, wu, *, kind):
    """Gate and up projection with the activation."""
    return b.gated(b.linear(x, wg), b.linear(x, wu), kind=kind)


def add_norm(b, x, y, w, *, eps):
    """Residual sum and its norm."""
    total = b.add(x, y)
    return total, b.rms_norm(total, w, eps=eps)


def norm_qkv(b, x, norm, wq, wk, wv, bq, bk, bv, *, eps):
    """A norm and the three projections that read it."""
    h = b.rms_norm(x, norm, eps=eps)
    return qkv(b, h, wq, wk, wv, bq, bk, bv)


def norm_gated(b, x, norm, wg, wu, *, eps, kind):
    """A norm and the gated pair that reads it."""
    h = b.rms_norm(x, norm, eps=eps)
    return b.gated(b.linear(h, wg), b.linear(h, wu), kind=kind)


def qk_norm_rope_write(b, q, k, v, qn, kn, positions, inv_freq, kv, *, eps, scale, interleaved):
    """Norm and rotation of queries and keys, and the write of keys and values."""
    q = b.rope(b.rms_norm(q, qn, eps=eps), positions, inv_freq, scale=scale, interleaved=interleaved)
    k = b.rope(b.rms_norm(k, kn, eps=eps), positions, inv_freq, scale=scale, interleaved=interleaved)
    return q, b.kv_write(kv, k, v)


def linear_add(b, x, w, residual):
    """A projection onto a residual."""
    return b.add(residual, b.linear(x, w))


BIASES = frozenset({"bq", "bk", "bv"})
PATTERNS = {
    p.name: p
    for p in [
        Pattern("qkv", qkv, BIASES), Pattern("gated_mlp", gated_mlp), Pattern("add_norm", add_norm),
        Pattern("norm_qkv", norm_qkv, BIASES), Pattern("norm_gated", norm_gated),
        Pattern("qk_norm_rope_write", qk_norm_rope_write), Pattern("linear_add", linear_add),
    ]
}  # fmt: skip
