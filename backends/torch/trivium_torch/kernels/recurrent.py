"""State along each sequence, for all sequences of like length at once and many tokens a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trivium_torch.kernels.dense import ACTIVATIONS, F32, Args, Attrs
from trivium_torch.pages import Carried, Lane
from trivium_torch.session import TorchSession

CHUNK = 32
"""Tokens that the delta rule solves for together."""


def begun(s: Carried, lane: Lane) -> Tensor:
    """The state of each sequence before the step: zeros for those that start in it."""
    past = s.data[lane.pages]
    return torch.where(lane.fresh.view(-1, *[1] * (past.dim() - 1)), 0.0, past)


def taken(x: Tensor, lane: Lane) -> Tensor:
    """x[tokens, heads, n] as float32[N, heads, T, n], zeros at the padding."""
    return (x[lane.rows].to(F32) * lane.real[..., None, None]).transpose(1, 2)


def delta_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """(y, state after) of a chunk of C tokens; state[N, H, dk, dv], q, k[N, H, C, dk], v[N, H, C, dv], g, beta[N, H, C, 1].

    With G the running sum of g and u_t = beta_t · (v_t - exp(g_t) · S_{t-1}ᵀ k_t), the recurrence is S_t = exp(g_t) · S_{t-1} +
    k_t ⊗ u_t, so that S_t = exp(G_t) · S_0 + sum over j <= t of exp(G_t - G_j) · k_j ⊗ u_j. Put into the definition of u this is a
    triangular system for all u of the chunk (Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024).
    """
    run = g.cumsum(dim=2)
    decay = torch.exp(torch.tril(run - run.transpose(2, 3))).tril()
    system = torch.tril(beta * decay * (k @ k.transpose(2, 3)), -1)
    u = torch.linalg.solve_triangular(system, beta * (v - torch.exp(run) * (k @ state)), upper=False, unitriangular=True)
    y = torch.exp(run) * (q @ state) + (decay * (q @ k.transpose(2, 3))) @ u
    last = run[:, :, -1:]
    return y, torch.exp(last) * state + (k * torch.exp(last - run)).transpose(2, 3) @ u


def gated_delta_rule(session: TorchSession, args: Args, attrs: Attrs) -> tuple[Tensor, Carried]:
    q, k, v, g, beta, s, *_ = args
    y = torch.zeros_like(v)
    for lane in s.lanes():
        inputs = [taken(x if x.dim() == 3 else x[..., None], lane) for x in (q, k, v, g, beta)]
        state, found = begun(s, lane), []
        for chunk in zip(*(torch.split(x, CHUNK, dim=2) for x in inputs), strict=True):
            part, state = delta_chunk(state, *chunk)
            found.append(part)
        s.data[lane.pages] = state
        rows = torch.cat(found, dim=2).transpose(1, 2) * attrs["scale"]
        y[lane.rows[lane.real]] = rows[lane.real].to(y.dtype)
    return y, s


def scan_chunk(a: Tensor, state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """(S · c, state after) of a chunk of C tokens; a[H, 1, 1], state[N, H, dv, dk], x[N, H, C, dv], dt[N, H, C, 1], b, c[N, H,
    C, dk].

    With G the running sum of dt · a, S_t = exp(G_t) · S_0 + sum over j <= t of exp(G_t - G_j) · dt_j · x_j ⊗ b_j (Dao and Gu,
    "Transformers are SSMs", 2024, section 6).
    """
    run, moved = (dt * a).cumsum(dim=2), dt * x
    decay = torch.exp(torch.tril(run - run.transpose(2, 3))).tril()
    y = torch.exp(run) * (c @ state.transpose(2, 3)) + (decay * (c @ b.transpose(2, 3))) @ moved
    last = run[:, :, -1:]
    return y, torch.exp(last) * state + (moved * torch.exp(last - run)).transpose(2, 3) @ b


def selective_scan(session: TorchSession, args: Args, attrs: Attrs) -> tuple[Tensor, Carried]:
    x, dt, a, b, c, d, s, *_ = args
    dt = dt.to(F32).clamp(*attrs["dt_limits"])
    y, rates, heads = torch.zeros_like(x), a.to(F32).view(-1, 1, 1), x.shape[1]
    for lane in s.lanes():
        inputs = [taken(t if t.dim() == 3 else t[..., None], lane) for t in (x, dt, b, c)]
        inputs = [t[:, :, None].expand(-1, -1, heads // t.shape[1], -1, -1).flatten(1, 2) for t in inputs]
        state, found = begun(s, lane), []
        for chunk in zip(*(torch.split(t, CHUNK, dim=2) for t in inputs), strict=True):
            part, state = scan_chunk(rates, state, *chunk)
            found.append(part + d.to(F32).view(-1, 1, 1) * chunk[0])
        s.data[lane.pages] = state
        rows = torch.cat(found, dim=2).transpose(1, 2)
        y[lane.rows[lane.real]] = rows[lane.real].to(y.dtype)
    return y, s


def short_conv(session: TorchSession, args: Args, attrs: Attrs) -> tuple[Tensor, Carried]:
    x, weight, bias, s, *_ = args
    y, taps = torch.zeros_like(x), weight.to(F32).T
    for lane in s.lanes():
        inputs = torch.cat([begun(s, lane), x[lane.rows].to(F32)], dim=1)
        count = lane.rows.shape[1]
        found = torch.stack([taps[i] * inputs[:, i : i + count] for i in range(len(taps))]).sum(dim=0)
        found = found if bias is None else found + bias.to(F32)
        found = found if attrs["kind"] is None else ACTIVATIONS[attrs["kind"]](found)
        y[lane.rows[lane.real]] = found[lane.real].to(y.dtype)
        last = lane.lengths[:, None] + torch.arange(len(taps) - 1, device=x.device)
        s.data[lane.pages] = inputs.gather(1, last[..., None].expand(-1, -1, x.shape[-1]))
    return y, s


KERNELS: Mapping[str, Callable[[TorchSession, Args, Attrs], Any]] = {
    "gated_delta_rule": gated_delta_rule, "selective_scan": selective_scan, "short_conv": short_conv,
}  # fmt: skip
