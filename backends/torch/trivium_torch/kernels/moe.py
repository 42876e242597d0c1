"""Mixture of experts: the router, and one pass over the experts that are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trivium_torch.kernels.dense import F32, Args, Attrs, gate, project
from trivium_torch.session import TorchSession


def best(x: Tensor, count: int) -> Tensor:
    """Indices of the largest of each row, best first, at equal values the lower one."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :count]


def in_best_groups(choice: Tensor, scoring: str, groups: int, top_groups: int) -> Tensor:
    """`choice` with -inf for all experts outside the best groups of each token."""
    grouped = choice.view(len(choice), groups, -1)
    top = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
    worth = top.sum(dim=-1) if scoring == "sigmoid" else top[..., 0]
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best(worth, top_groups), True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).view_as(choice)


def moe_route(session: TorchSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """The weights stay in float32, which is what moe_experts multiplies with."""
    logits, bias = args
    scoring, x = attrs["scoring"], logits.to(F32)
    p = x.softmax(dim=-1) if scoring == "softmax" else torch.sigmoid(x) if scoring == "sigmoid" else x
    choice = p if bias is None else p + bias.to(F32)
    if attrs["groups"] > 1:
        choice = in_best_groups(choice, scoring, attrs["groups"], attrs["top_groups"])
    ids = best(choice, attrs["top_k"])
    weights = p.gather(-1, ids)
    if scoring == "softmax_topk":
        weights = weights.softmax(dim=-1)
    elif attrs["normalize"]:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * attrs["scale"], ids.to(torch.int32)


def sparse_mixer_route(session: TorchSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """One choice after the other; the weights stay in float32."""
    logits: Tensor = args[0].to(F32)
    left, weights, ids = logits.clone(), list[Tensor](), list[Tensor]()
    for _ in range(attrs["top_k"]):
        chosen = best(left, 1)
        top = left.gather(-1, chosen)
        far = top - logits > 2 * attrs["jitter"] * torch.maximum(logits.abs(), top)
        weights.append(1 / torch.exp(left - top).masked_fill(far, 0).sum(dim=-1, keepdim=True))
        ids.append(chosen)
        left.scatter_(-1, chosen, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(ids, dim=-1).to(torch.int32)


def expert(session: TorchSession, x: Tensor, e: int, args: Args, attrs: Attrs) -> Tensor:
    """down[e] · gated(gate[e] · x, up[e] · x), with their biases; rounded in between only if the weights have less than 32 bits."""
    weights, biases = args[:3], [None if b is None else b[e].to(F32) for b in args[3:]]
    x = x.to(F32) if isinstance(weights[2], Tensor) and weights[2].dtype == F32 else x

    def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
        return y.to(F32) if bias is None else y.to(F32) + bias

    g, up = (with_bias(project(session, x, weights[i][e]), biases[i]) for i in (0, 1))
    return with_bias(project(session, gate(g, up, attrs).to(x.dtype), weights[2][e]), biases[2])


def moe_experts(session: TorchSession, args: Args, attrs: Attrs) -> Tensor:
    """Choices in the order of their experts; each expert that is used computes its own together."""
    x, weights, ids, *matrices = args
    order = ids.flatten().sort(stable=True).indices
    counts = torch.bincount(ids.flatten(), minlength=matrices[0].shape[0]).tolist()
    tokens, found, at = order // ids.shape[1], torch.empty((len(order), x.shape[1]), dtype=F32, device=x.device), 0
    for e, count in enumerate(counts):
        if count:
            mine = slice(at, at + count)
            found[order[mine]] = expert(session, x[tokens[mine]], e, matrices, attrs)
            at += count
    return torch.sum(found.view(*ids.shape, -1) * weights.to(F32)[..., None], dim=1).to(x.dtype)


KERNELS: Mapping[str, Callable[[TorchSession, Args, Attrs], Any]] = {
    "moe_route": moe_route, "sparse_mixer_route": sparse_mixer_route, "moe_experts": moe_experts,
}  # fmt: skip
