"""This backend's kernels by operator and pattern; whatever they do not support falls to trivium_torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import Call, Pattern
from trivium.plugin import Kernel
from trivium_cuda import eights
from trivium_cuda.kernels import activations, adapters, attention, experts, norms, recurrent, rotary
from trivium_cuda.kernels.products import product
from trivium_cuda.kernels.rotary import Store
from trivium_cuda.sampler import sample
from trivium_cuda.session import CudaSession, DeviceCarried, DevicePaged
from trivium_torch.kernels import FUSED_KERNELS, dense
from trivium_torch.kernels.dense import Args, Attrs
from trivium_cuda.weights import W8A8, matrix_of
from trivium_torch.pages import Eights, Floats

PRIORITY = 10
WIDEST_HEAD = 256
"""Numbers of a head that attention's tiles hold."""


def stores(kv: DevicePaged) -> tuple[Store, Store]:
    """Keys and values (latents and rotated parts) of a layer as kernels take them."""
    return _store(kv.k), _store(kv.v)


def _store(floats: Floats) -> Store:
    numbers, *scales = floats.parts
    kept = numbers.view(torch.float8_e4m3fn) if isinstance(floats, Eights) else numbers
    return Store(kept, scales[0] if scales else None)


# Products and look-ups, by what a weight is.


def linear(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    """Floats by torch's own product, whose library is the vendor's and chooses by the number of rows, unless rows must not depend
    on each other. x is Rounded only where rounding.py found that the weight takes it."""
    x, weight, bias = args
    if isinstance(weight, W8A8):
        return eights.linear(session, x, weight, bias)
    if isinstance(weight, Tensor) and not session.batch_invariant:
        return dense.linear(session, args, attrs)
    w = matrix_of(weight)
    tile = session.tuned.tile(w, x.numel() // w.k) if session.tuned else None
    y = product(x, w, bias, x.dtype, invariant=session.batch_invariant, tile=tile)
    return y.view(*x.shape[:-1], y.shape[-1])


def embedding(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    ids, weight = args
    if isinstance(weight, Tensor):
        return dense.embedding(session, args, attrs)
    rows: Tensor = weight[ids].to(dense.F32)
    return torch.mul(rows, attrs["scale"]).to(session.dtype)


def moe_experts(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    """All experts in one launch a matrix, with activations as they come: W8A8 experts, too, have their weights alone in 8 bits."""
    x, weights, ids, *matrices = args
    gate, up, down = (matrix_of(m) for m in matrices[:3])
    return experts.moe_experts(
        x, weights, ids, gate, up, down, *matrices[3:], **attrs, invariant=session.batch_invariant
    )  # fmt: skip


def lora(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    return adapters.lora(*args)


# State along a sequence.


def gated_delta_rule(session: CudaSession, args: Args, attrs: Attrs) -> tuple[Tensor, DeviceCarried]:
    q, k, v, g, beta, s, *_ = args
    r = s.reads
    where = r.block_tables, r.query_starts, r.context_lens
    y = recurrent.gated_delta_rule(q, k, v, g, beta, s.data, *where, **attrs, max_queries=r.max_query)
    return y, s


# Norms and activations.


def rms_norm(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    return norms.rms_norm(args[0], args[1], attrs["eps"], attrs["offset"])


def add_norm(session: CudaSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    return norms.add_rms_norm(args[0], args[1], args[2], attrs["eps"], attrs["offset"])


def gated(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    return activations.gated(args[0], args[1], **attrs)


def gate_up(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    x, wg, bg, wu, bu = args
    return activations.gated(linear(session, (x, wg, bg), {}), linear(session, (x, wu, bu), {}), **attrs)


# Attention.


def rope(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    return rotary.rope(*args, **attrs)


def kv_write(session: CudaSession, args: Args, attrs: Attrs) -> DevicePaged:
    kv: DevicePaged = args[0]
    rotary.kv_write(*stores(kv), args[1], args[2], kv.reads.slots)
    return kv


def latent_write(session: CudaSession, args: Args, attrs: Attrs) -> DevicePaged:
    kv: DevicePaged = args[0]
    rotary.latent_write(*stores(kv), args[1], args[2], kv.reads.slots)
    return kv


def rope_write(session: CudaSession, args: Args, attrs: Attrs) -> tuple[Tensor, DevicePaged]:
    q, k, v, positions, inv_freq, kv = args
    return rotary.rope_write(q, k, v, positions, inv_freq, *stores(kv), kv.reads.slots, **attrs), kv


def norm_rope_write(session: CudaSession, args: Args, attrs: Attrs) -> tuple[Tensor, DevicePaged]:
    q, k, v, q_weight, k_weight, positions, inv_freq, kv = args
    keys, values = stores(kv)
    turned = rotary.norm_rope_write(
        q, k, v, q_weight, k_weight, positions, inv_freq, keys, values, kv.reads.slots, **attrs
    )  # fmt: skip
    return turned, kv


def _norm_rope_write(
    b: Any, q: Any, k: Any, v: Any, q_weight: Any, k_weight: Any, positions: Any, inv_freq: Any, kv: Any,
    *, eps: float, offset: float, interleaved: bool, scale: float,
) -> Any:  # fmt: skip
    """Norm and rotation of each head of queries and keys, and storing keys and values."""
    turned = b.rope(b.rms_norm(q, q_weight, eps=eps, offset=offset), positions, inv_freq, interleaved=interleaved, scale=scale)
    key = b.rope(b.rms_norm(k, k_weight, eps=eps, offset=offset), positions, inv_freq, interleaved=interleaved, scale=scale)
    return turned, b.kv_write(kv, key, v)


def per_head(call: Call) -> str | None:
    """Why the norm before a rotation is not of heads whose weights are all alike."""
    q, weight = call.args[0], call.args[3]
    assert q is not None and weight is not None
    return None if len(q.shape) == 3 and weight.shape == q.shape[-1:] else "it takes one norm for all heads"


def paged_attention(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    q, kv, _, _, sinks = args
    r = kv.reads
    return attention.paged_attention(
        q, *stores(kv), r.block_tables, r.query_starts, r.context_lens, sinks, page_size=kv.page_size, max_queries=r.max_query,
        max_context=r.max_context, **attrs,
    )  # fmt: skip


def narrow_heads(call: Call) -> str | None:
    """Why a call's heads do not fit."""
    q = call.args[0]
    assert q is not None
    width = q.shape[-1]
    return None if isinstance(width, int) and width <= WIDEST_HEAD else f"heads of {width} numbers are over its {WIDEST_HEAD}"


def latent_attention(session: CudaSession, args: Args, attrs: Attrs) -> Tensor:
    q_latent, q_rope, kv, *_ = args
    r = kv.reads
    return attention.latent_attention(
        q_latent, q_rope, *stores(kv), r.block_tables, r.query_starts, r.context_lens, page_size=kv.page_size,
        max_queries=r.max_query, max_context=r.max_context, **attrs,
    )  # fmt: skip


def _kernels() -> Sequence[Kernel]:
    shared = {k.op.name: k.op for k in FUSED_KERNELS if isinstance(k.op, Pattern)}
    return (
        Kernel(Pattern("norm_rope_write", _norm_rope_write), norm_rope_write, "triton norm_rope_write", PRIORITY, per_head),
        Kernel(shared["rope_write"], rope_write, "triton rope_write", PRIORITY),
        Kernel(shared["add_norm"], add_norm, "triton add_rms_norm", PRIORITY),
        Kernel(shared["gate_up"], gate_up, "linear, linear, triton gated", PRIORITY),
        Kernel("linear", linear, "linear by format: cuBLAS or triton int4, fp8, int8, w8a8", PRIORITY),
        Kernel("embedding", embedding, "embedding by format", PRIORITY),
        Kernel("rms_norm", rms_norm, "triton rms_norm", PRIORITY),
        Kernel("gated", gated, "triton gated", PRIORITY),
        Kernel("rope", rope, "triton rope", PRIORITY),
        Kernel("kv_write", kv_write, "triton kv_write", PRIORITY),
        Kernel("latent_write", latent_write, "triton latent_write", PRIORITY),
        Kernel("paged_attention", paged_attention, "triton paged_attention", PRIORITY, narrow_heads),
        Kernel("latent_attention", latent_attention, "triton latent_attention", PRIORITY),
        Kernel("moe_experts", moe_experts, "triton moe_experts", PRIORITY),
        Kernel("lora", lora, "triton lora", PRIORITY),
        Kernel("gated_delta_rule", gated_delta_rule, "triton gated_delta_rule", PRIORITY),
        Kernel("sample", sample, "queued sample", PRIORITY),
    )


KERNELS: tuple[Kernel, ...] = tuple(_kernels())
