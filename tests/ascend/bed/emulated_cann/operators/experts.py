"""Mixture of experts: choosing experts, sorting tokens by expert, grouped products, and back."""

from __future__ import annotations

import torch
from emulated_cann.registry import Arguments, need, operator


def check_grouped(a: Arguments) -> None:
    x, weight, groups = a.x[0], a.weight[0], a.group_list
    need(len(a.x) == len(a.weight) == 1, "the emulation has one x and one weight [experts, K, N]")
    need(groups is not None and groups.dtype == torch.int64, "group_list is int64")
    need(a.list_type in (0, 1), f"group_list_type {a.list_type} is 0 or 1")
    need(a.split_item in (2, 3) and a.group_type == 0, "one x and one weight take split_item 2 or 3 and group_type 0")
    need(weight.dim() == 3 and len(groups) == weight.shape[0], "group_list has a number for each expert of weight")
    need(x.shape[-1] == weight.shape[1], f"x has K {x.shape[-1]}, weight {weight.shape[1]}")
    need(max(x.shape[-1], weight.shape[-1]) < 65536, "inner dimensions are below 65536")
    needs_float32 = x.dtype == torch.bfloat16 and bool(a.bias)
    need(not needs_float32 or a.bias[0].dtype == torch.float32, "bias with bfloat16 x is float32")


def inspect_grouped(a: Arguments) -> None:
    groups, rows = a.group_list, a.x[0].shape[0]
    covered = int(groups.sum()) if a.list_type == 1 else int(groups[-1])
    need(bool((groups >= 0).all()), "group_list has no negative number")
    need(a.list_type == 1 or bool((groups.diff() >= 0).all()), "group_list of type 0 is cumulative")
    need(covered == rows, f"group_list covers {covered} of {rows} rows")


def grouped(a: Arguments) -> None:
    x, y, start = a.x[0], a.y[0], 0
    ends = a.group_list.cumsum(0) if a.list_type == 1 else a.group_list
    for expert, end in enumerate(ends.tolist()):
        result = x[start:end].float() @ a.weight[0][expert].float()
        if a.scale:
            result = result * a.scale[0][expert].float()
        if a.per_token:
            result = result * a.per_token[0][start:end].float()[:, None]
        if a.bias:
            result = result + a.bias[0][expert].float()
        y[start:end] = result.to(y.dtype)
        start = end


GROUPED = (
    "x:L weight:L bias:L scale:L offset:L antiquant_scale:L antiquant_offset:L per_token:L group_list"
    " activation_input:L activation_scale:L activation_offset:L split_item:i group_type:i list_type:i activation:i"
)
for version, tail in (("V4", "y:L features:L dynamic_scale:L"), ("V5", "tuning:A y:L features:L dynamic_scale:L")):
    operator(f"aclnnGroupedMatmul{version}", f"{GROUPED} {tail}", check_grouped, inspect_grouped)(grouped)


def check_softmax_top_k(a: Arguments) -> None:
    need(1 <= a.k <= min(1024, a.x.shape[-1]), f"k {a.k} is at most 1024 and the number of experts")


@operator("aclnnMoeGatingTopKSoftmax", "x finished k:i y experts rows", check_softmax_top_k)
def softmax_top_k(a: Arguments) -> None:
    values, experts = a.x.float().softmax(-1).topk(a.k, -1)
    tokens = a.x.shape[0]
    a.y.copy_(values)
    a.experts.copy_(experts)
    a.rows.copy_(torch.arange(a.k)[None] * tokens + torch.arange(tokens)[:, None])


def check_init_routing(a: Arguments) -> None:
    need(a.expert_ids.dtype == torch.int32, "expert_idx is int32")
    need(a.expert_ids.dim() == 2 and a.expert_ids.shape[0] == a.x.shape[0], "expert_idx is [tokens, k]")
    need(a.quant_mode in (-1, 0, 1), f"quant_mode {a.quant_mode} is -1, 0 or 1")
    need(a.quant_mode == -1 and a.drop_pad == 0, "the emulation routes without quantisation and without capacity")


@operator(
    "aclnnMoeInitRoutingV3",
    "x expert_ids scale offset active_num:i capacity:i experts:i drop_pad:i count_type:i counts_wanted:b quant_mode:i active:A"
    " row_type:i sorted_x sorted_rows counts sorted_scale",
    check_init_routing,
)
def init_routing(a: Arguments) -> None:
    flat = a.expert_ids.flatten().long()
    order = flat.sort(stable=True).indices
    a.sorted_x.copy_(a.x[order // a.expert_ids.shape[1]][: a.sorted_x.shape[0]])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    a.sorted_rows.copy_(inverse if a.row_type == 0 else order)
    if a.counts_wanted:
        counts = torch.bincount(flat, minlength=a.experts)
        a.counts.copy_(counts if a.count_type == 1 else counts.cumsum(0))


@operator("aclnnMoeTokenUnpermute", "x indices probs padded:b restore:A y")
def unpermute(a: Arguments) -> None:
    rows = a.x.float()[a.indices.long()].reshape(a.y.shape[0], -1, a.x.shape[-1])
    a.y.copy_((rows if a.probs is None else rows * a.probs.float()[..., None]).sum(1))
