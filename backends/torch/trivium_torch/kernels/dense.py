"""Row-wise arithmetic. Whatever is not a matrix product is computed in float32 and rounded once, to the activations' dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium_torch.session import TorchSession
from trivium_torch.weights import Int8, Resident

Args = Sequence[Any]
Attrs = Mapping[str, Any]
F32 = torch.float32

PART = 1 << 22
"""A weight that is not resident in the dtype of the product is converted in parts of so many numbers."""
FEW = 4
"""Fewer rows than these make libraries change to other kernels, with other last bits."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}  # fmt: skip


def full_rows(session: TorchSession, x: Tensor) -> Tensor:
    """x[..., rows, n] with its last row repeated up to FEW rows, where the session must be invariant."""
    if not session.invariant or x.shape[-2] >= FEW:
        return x
    return torch.cat([x, x[..., -1:, :].expand(*x.shape[:-2], FEW - x.shape[-2], x.shape[-1])], dim=-2)


def project(session: TorchSession, x: Tensor, weight: Resident) -> Tensor:
    """x[..., in] · weight[out, in]ᵀ in x's dtype; the product itself in float32 if the weight is."""
    if isinstance(weight, Tensor) and weight.dtype == x.dtype and not (session.invariant and x.dtype == F32):
        return F.linear(x, weight)
    wide = F32 if isinstance(weight, Tensor) and weight.dtype == F32 else x.dtype
    rows = x.reshape(-1, x.shape[-1])
    full = full_rows(session, rows.to(wide))
    step = max(1, PART // weight.shape[-1])
    parts = [F.linear(full, weight[i : i + step].to(wide)) for i in range(0, weight.shape[0], step)]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return y[: len(rows)].to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def linear(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    x, weight, bias = args
    if bias is not None and isinstance(weight, Tensor) and weight.dtype == bias.dtype == x.dtype:
        return F.linear(x, weight, bias)
    y = project(session, x, weight)
    return y if bias is None else (y + bias).to(x.dtype)


def head_linear(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """One product for all heads: [heads, tokens, in] · [heads, in, out]."""
    x, weight = args
    wide = torch.promote_types(x.dtype, weight.dtype) if isinstance(weight, Tensor) else x.dtype
    rows = full_rows(session, x.transpose(0, 1).to(wide))
    y = torch.bmm(rows, weight.to(wide).transpose(1, 2))
    return y[:, : len(x)].transpose(0, 1).to(x.dtype)


def embedding(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    ids, weight = args
    rows = weight[ids].to(F32) if isinstance(weight, Int8) else F.embedding(ids, weight)
    return rows.to(session.dtype) if attrs["scale"] == 1 else (rows.to(F32) * attrs["scale"]).to(session.dtype)


def add(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return torch.add(args[0], args[1])


def mul(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return torch.mul(args[0], args[1])


def scale(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return torch.mul(args[0], attrs["factor"])


def softcap(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    x: Tensor = args[0]
    return torch.mul(torch.tanh(x.to(F32) / attrs["cap"]), attrs["cap"]).to(x.dtype)


def norm(x: Tensor, weight: Resident | None, eps: float, offset: float) -> Tensor:
    """The arithmetic of rms_norm, by torch's own operation."""
    factor = None if weight is None else weight.to(F32)
    factor = factor + offset if factor is not None and offset else factor
    return F.rms_norm(x.to(F32), (x.shape[-1],), factor, eps).to(x.dtype)


def rms_norm(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return norm(args[0], args[1], attrs["eps"], attrs["offset"])


def layer_norm(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    x, *given = args
    weight, bias = (None if g is None else g.to(F32) for g in given)
    return F.layer_norm(x.to(F32), (x.shape[-1],), weight, bias, attrs["eps"]).to(x.dtype)


def activation(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    x: Tensor = args[0]
    return ACTIVATIONS[attrs["kind"]](x.to(F32)).to(x.dtype)


def gate(g: Tensor, up: Tensor, attrs: Attrs) -> Tensor:
    """The arithmetic of `gated`, in float32."""
    g, up, limit, alpha = g.to(F32), up.to(F32), attrs["limit"], attrs["alpha"]
    if limit is not None:
        g, up = g.clamp(max=limit), up.clamp(-limit, limit)
    y = ACTIVATIONS[attrs["kind"]](g) if alpha == 1 else g * torch.sigmoid(alpha * g)
    return y * (up + attrs["up_offset"] if attrs["up_offset"] else up)


def gated(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return gate(args[0], args[1], attrs).to(args[0].dtype)


def turns(session: TorchSession, positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [tokens, 1, half] in float32, once a step for all layers."""

    def make() -> tuple[Tensor, Tensor]:
        angles = (positions.to(F32)[:, None] * inv_freq.to(F32))[:, None]
        return torch.cos(angles) * factor, torch.sin(angles) * factor

    return session.once(("turns", id(positions), id(inv_freq), factor), make)  # type: ignore[no-any-return]


def turn(session: TorchSession, x: Tensor, positions: Tensor, inv_freq: Tensor, *, interleaved: bool, scale: float) -> Tensor:
    """The arithmetic of `rope`."""
    cos, sin = turns(session, positions, inv_freq, scale)
    half = inv_freq.shape[0]
    turned = x[..., : 2 * half].to(F32)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    parts = a * cos - b * sin, b * cos + a * sin
    y = (torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)).to(x.dtype)
    return y if 2 * half == x.shape[-1] else torch.cat([y, x[..., 2 * half :]], dim=-1)


def rope(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    return turn(session, *args, **attrs)


def segment_embedding(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    ids, weight, query_starts = args
    separators = (ids == attrs["separator"]).cumsum(0)
    before = F.pad(separators, (1, 0))
    counts = query_starts.diff()
    first = before[query_starts[:-1].long()].repeat_interleave(counts, output_size=len(ids))
    return embedding(session, [(before[:-1] - first).clamp(max=weight.shape[0] - 1), weight], {"scale": 1.0})


def position_scale(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """The factors are worked out once a step for all layers."""
    x: Tensor = args[0]
    positions: Tensor = args[1]
    beta, period, offset = attrs["beta"], attrs["period"], attrs["offset"]

    def make() -> Tensor:
        steps = torch.div(positions + offset, period, rounding_mode="floor").to(F32)
        factors: Tensor = 1 + beta * torch.log1p(steps)
        return factors[:, None, None]

    factor: Tensor = session.once(("position_scale", id(positions), beta, period, offset), make)
    return (x.to(F32) * factor).to(x.dtype)


def adapted(session: TorchSession, adapters: Tensor) -> list[tuple[int, Tensor]]:
    """(slot, its tokens) of the adapters of a step; looked up once for all layers."""

    def make() -> list[tuple[int, Tensor]]:
        used = sorted(set(adapters.tolist()) - {-1})
        return [(slot, torch.nonzero(adapters == slot).flatten()) for slot in used]

    return session.once(("adapted", id(adapters)), make)  # type: ignore[no-any-return]


def lora(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """A pair of small products for each adapter in use."""
    y, x, a, b, adapters = args
    z: Tensor = y
    for slot, rows in adapted(session, adapters):
        z = y.clone() if z is y else z
        wide = full_rows(session, x[rows].to(F32))
        more = (wide @ a[slot].to(F32).T @ b[slot].to(F32))[: len(rows)]
        z[rows] = (y[rows] + more).to(y.dtype)
    return z


KERNELS: Mapping[str, Callable[[TorchSession, Args, Attrs], Tensor]] = {
    "linear": linear, "head_linear": head_linear, "embedding": embedding, "add": add, "mul": mul, "scale": scale,
    "softcap": softcap, "rms_norm": rms_norm, "layer_norm": layer_norm, "activation": activation, "gated": gated, "rope": rope,
    "lora": lora, "segment_embedding": segment_embedding, "position_scale": position_scale,
}  # fmt: skip
