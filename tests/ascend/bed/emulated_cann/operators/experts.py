"""Mixture of experts: choosing experts, sorting tokens by expert, grouped products, and back. Limits: the operators' documents."""

from __future__ import annotations

import torch
from emulated_cann.chips import chip
from emulated_cann.formats import plain
from emulated_cann.operators.quantised import scale_and_offset, weight_values
from emulated_cann.registry import Arguments, UnemulatedError, need, operator

F16, BF16, F32, I8, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64

# ---- choosing experts ----


def check_top_k(a: Arguments) -> None:
    """npu_moe_gating_top_k."""
    experts = a.x.shape[1]
    need(experts <= 2048, f"at most 2048 experts, not {experts}")
    need(a.renorm == 0, f"renorm is 0, not {a.renorm}")
    need(a.norm_type in (0, 1), f"norm_type {a.norm_type} is 0 (softmax) or 1 (sigmoid)")
    need(a.select_mode in (0, 1), f"group_select_mode {a.select_mode} is 0 or 1")
    need(a.groups > 0 and experts % a.groups == 0 and experts // a.groups > 2, "groups divide the experts into more than 2 each")
    per_group = experts // a.groups
    need(-(-per_group // 32) * 32 * a.groups <= 2048, "experts of a group, rounded up to 32, times groups are at most 2048")
    need(1 <= a.k_groups <= a.groups, f"k_group {a.k_groups} is in 1..{a.groups}")
    need(1 <= a.k <= per_group * a.k_groups, f"k {a.k} is in 1..{per_group * a.k_groups}")
    need(a.bias is None or a.bias.dtype == a.x.dtype, "bias has the dtype of x")


@operator(
    "aclnnMoeGatingTopK",
    "x bias k:i k_groups:i groups:i select_mode:i renorm:i norm_type:i out_flag:b scale:d epsilon:d y experts norm",
    check_top_k,
)
def top_k(a: Arguments) -> None:
    """Scores choose with the bias, weigh without it; sigmoid scores are normalised over the chosen. Ties: the lower index."""
    scores = a.x.float().softmax(-1) if a.norm_type == 0 else a.x.float().sigmoid()
    choice = within_groups(a, scores if a.bias is None else scores + a.bias.float())
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : a.k]
    weights = scores.gather(1, chosen)
    if a.norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + a.epsilon)
    a.y.copy_(weights * a.scale)
    a.experts.copy_(chosen)
    if a.out_flag:
        a.norm.copy_(scores)


def within_groups(a: Arguments, choice: torch.Tensor) -> torch.Tensor:
    """-inf outside the best k_groups groups, by their best expert or the sum of their two best."""
    if a.groups == 1:
        return choice
    grouped = choice.unflatten(-1, (a.groups, -1))
    worth = grouped.amax(-1) if a.select_mode == 0 else grouped.topk(2, -1).values.sum(-1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : a.k_groups]
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[..., None], float("-inf")).flatten(-2)


def check_softmax_top_k(a: Arguments) -> None:
    need(1 <= a.k <= min(1024, a.x.shape[-1]), f"k {a.k} is at most 1024 and the number of experts")
    if a.finished is not None:
        raise UnemulatedError("npu_moe_gating_top_k_softmax with finished")


@operator("aclnnMoeGatingTopKSoftmax", "x finished k:i y experts rows", check_softmax_top_k)
def softmax_top_k(a: Arguments) -> None:
    values, experts = a.x.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    tokens = a.x.shape[0]
    a.y.copy_(values[..., : a.k])
    a.experts.copy_(experts[..., : a.k])
    a.rows.copy_(torch.arange(a.k)[None] * tokens + torch.arange(tokens)[:, None])


# ---- sorting tokens by expert ----


def check_init_routing(a: Arguments) -> None:
    need(a.expert_ids.dtype == I32, f"expert_idx is int32, not {a.expert_ids.dtype}")
    need(a.expert_ids.dim() == 2 and a.expert_ids.shape[0] == a.x.shape[0], "expert_idx is [tokens, k]")
    need(a.x.dtype in (F16, BF16, F32, I8), f"no x of {a.x.dtype}")
    need(a.count_type in (0, 1, 2), f"expert_tokens_num_type {a.count_type} is 0, 1 or 2")
    need(a.row_type in (0, 1), f"row_idx_type {a.row_type} is 0 or 1")
    first, last = a.active
    need(0 <= first < last <= a.experts <= 10240, f"active_expert_range {a.active} lies within {a.experts} experts")
    need(a.active_num >= -1, "active_num is at least -1")
    check_routing_quantisation(a)
    if a.drop_pad or a.count_type == 2 or a.active_num not in (-1, 0, a.expert_ids.numel()):
        raise UnemulatedError("npu_moe_init_routing_v2 with capacity, key and value counts or a part of the rows")


def check_routing_quantisation(a: Arguments) -> None:
    need(a.quant_mode in (-1, 0, 1), f"quant_mode {a.quant_mode} is -1, 0 or 1")
    shape = None if a.scale is None else tuple(a.scale.shape)
    first, last = a.active
    allowed = {-1: (None, (a.x.shape[0],)), 0: ((1,),), 1: (None, (last - first, a.x.shape[1]), (1, a.x.shape[1]))}
    need(shape in allowed[a.quant_mode], f"quant_mode {a.quant_mode} takes a scale of shape {allowed[a.quant_mode]}, not {shape}")
    need((a.offset is not None) == (a.quant_mode == 0), "offset goes with quant_mode 0 only")
    if a.quant_mode == 0:
        raise UnemulatedError("npu_moe_init_routing_v2 with static quantisation")


def inspect_init_routing(a: Arguments) -> None:
    inside = int(a.expert_ids.min()) >= 0 and int(a.expert_ids.max()) < a.experts
    need(inside, f"expert_idx lies in 0..{a.experts - 1}")


@operator(
    "aclnnMoeInitRoutingV3",
    "x expert_ids scale offset active_num:i capacity:i experts:i drop_pad:i count_type:i counts_wanted:b quant_mode:i active:A"
    " row_type:i sorted_x sorted_rows counts sorted_scale",
    check_init_routing,
    inspect_init_routing,
)
def init_routing(a: Arguments) -> None:
    """Rows of active experts first, by expert and then by token; what follows them is not written."""
    flat = a.expert_ids.flatten().long()
    order, chosen = active_order(flat, *a.active)
    count = len(order)
    tokens = order // a.expert_ids.shape[1]
    x = a.x[tokens]
    if a.quant_mode == 1:
        x = quantised_rows(a, x, chosen)
    elif a.scale is not None:
        a.sorted_scale[:count] = a.scale[tokens]
    a.sorted_x[:count] = x
    write_rows(a.sorted_rows, order, a.row_type)
    if a.counts_wanted:
        first, last = a.active
        counts = torch.bincount(chosen - first, minlength=last - first)
        a.counts.copy_(counts if a.count_type == 1 else counts.cumsum(0))


def active_order(flat: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(places in token-major order, their experts) of the active experts' rows, sorted by expert."""
    order = flat.sort(stable=True).indices
    experts = flat[order]
    active = (experts >= first) & (experts < last)
    return order[active], experts[active]


def quantised_rows(a: Arguments, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    x = x.float()
    if a.scale is not None:
        x = x * (a.scale[chosen - a.active[0]] if len(a.scale) > 1 else a.scale)
    scale = x.abs().amax(-1) / 127
    a.sorted_scale[: len(x)] = scale
    return (x / torch.where(scale == 0, torch.ones_like(scale), scale)[:, None]).round().to(I8)


def write_rows(out: torch.Tensor, order: torch.Tensor, row_type: int) -> None:
    """Type 0: for each place its row, -1 for what is not active; type 1: for each row its place."""
    if row_type == 1:
        out[: len(order)] = order.int()
        return
    out.fill_(-1)
    out[order] = torch.arange(len(order), dtype=I32)


def check_init_routing_v2(a: Arguments) -> None:
    """What npu_moe_init_routing_v2 becomes on the 310P: no bfloat16, cumulated counts, no quantisation."""
    need(chip().bfloat16 or a.x.dtype != BF16, f"x: no bfloat16 on {chip().name}")
    need(a.expert_ids.dtype == I32, f"expert_idx is int32, not {a.expert_ids.dtype}")
    need(a.drop_pad == 0 and a.count_flag == 1, "the emulation has dropless routing with cumulated counts")


@operator(
    "aclnnMoeInitRoutingV2",
    "x expert_ids active_num:i capacity:i experts:i drop_pad:i count_flag:i before_flag:b sorted_x sorted_rows counts before",
    check_init_routing_v2,
)
def init_routing_v2(a: Arguments) -> None:
    flat = a.expert_ids.flatten().long()
    order, chosen = active_order(flat, 0, a.experts)
    a.sorted_x.copy_(a.x[order // a.expert_ids.shape[1]])
    write_rows(a.sorted_rows, order, 0)
    a.counts.copy_(torch.bincount(chosen, minlength=a.experts).cumsum(0))


# ---- grouped products ----


def check_grouped(a: Arguments) -> None:
    if len(a.x) != 1 or len(a.weight) != 1 or a.split_item not in (2, 3) or a.group_type != 0 or a.activation:
        raise UnemulatedError("npu_grouped_matmul but for one x, one weight, split_item 2 or 3, group_type 0, act_type 0")
    x, weight, groups = a.x[0], a.weight[0], a.group_list
    need(weight.dim() == 3 and x.dim() == 2, "x is [tokens, K] and weight [experts, K, N]")
    experts = weight.shape[0]
    need(groups is not None and groups.dtype == I64, "group_list is int64")
    need(a.list_type in (0, 1, 2), f"group_list_type {a.list_type} is 0, 1 or 2")
    if a.list_type == 2:
        raise UnemulatedError("npu_grouped_matmul with group_list_type 2")
    need(tuple(groups.shape) == (experts,), f"group_list has a number for each of {experts} experts")
    need(a.list_type == 0 or experts > 1, "group_list of type 1 has more than one number")
    need(x.shape[-1] == weight.shape[1], f"x has K {x.shape[-1]}, weight {weight.shape[1]}")
    need(max(x.shape[-1], a.y[0].shape[-1]) < 65536, "inner dimensions are below 65536")
    check_grouped_dtypes(a, experts)


def check_grouped_dtypes(a: Arguments, experts: int) -> None:
    """The document's table of dtypes that go together: x, weight, bias, scale, antiquant_scale, per_token_scale, y."""
    floats = [(t, t, b, None, None, None, t) for t, b in ((F16, F16), (BF16, F32), (F32, F32))]
    whole = [(I8, I8, I32, *rest) for rest in ((I64, None, None, I8), (BF16, None, None, BF16), (F32, None, None, F16),
                                                (BF16, None, F32, BF16), (F32, None, F32, F16))]  # fmt: skip
    weights = [(t, w, b, None, t, None, t) for t, b in ((F16, F16), (BF16, F32)) for w in (I8, I32)]
    given = tuple(first_dtype(x) for x in (a.x, a.weight, a.bias, a.scale, a.antiquant_scale, a.per_token, a.y))
    known = any(
        all(g == r or (g is None and i == 2) for i, (g, r) in enumerate(zip(given, row))) for row in floats + whole + weights
    )
    names = ("x", "weight", "bias", "scale", "antiquant_scale", "per_token_scale", "y")
    need(known, "no documented row has " + ", ".join(f"{n} {g}" for n, g in zip(names, given)))
    n, rows = a.y[0].shape[-1], a.x[0].shape[0]
    need(not a.scale or tuple(a.scale[0].shape) == (experts, n), f"scale is [{experts}, {n}]")
    need(not a.bias or tuple(a.bias[0].shape) == (experts, n), f"bias is [{experts}, {n}]")
    need(not a.per_token or tuple(a.per_token[0].shape) == (rows,), f"per_token_scale is [{rows}]")
    need(chip().grouped_quantised or given[1:6] == (F16, given[2], None, None, None), f"only float16 on {chip().name}")
    if a.antiquant_scale:
        check_grouped_groups(a, experts, n)


def check_grouped_groups(a: Arguments, experts: int, n: int) -> None:
    shape, k = tuple(a.antiquant_scale[0].shape), a.x[0].shape[1]
    per_group = a.weight[0].dtype == I32 and len(shape) == 3 and shape[::2] == (experts, n) and k % shape[1] == 0
    need(shape == (experts, n) or per_group, f"antiquant_scale is [{experts}, {n}], or for int4 [{experts}, groups, {n}]: {shape}")
    need(
        not a.antiquant_offset or a.antiquant_offset[0].shape == a.antiquant_scale[0].shape,
        "antiquant_offset has the scale's shape",
    )


def first_dtype(tensors: list[torch.Tensor] | None) -> torch.dtype | None:
    return tensors[0].dtype if tensors else None


def inspect_grouped(a: Arguments) -> None:
    groups, rows = a.group_list, a.x[0].shape[0]
    covered = int(groups.sum()) if a.list_type == 1 else int(groups[-1])
    need(bool((groups >= 0).all()), "group_list has no negative number")
    need(a.list_type == 1 or bool((groups.diff() >= 0).all()), "group_list of type 0 is cumulative")
    need(covered <= rows, f"group_list covers {covered} of {rows} rows")


def grouped(a: Arguments) -> None:
    """Rows behind the last group are not written: experts of other ranks have them."""
    x, y, start = a.x[0], a.y[0], 0
    ends = a.group_list.cumsum(0) if a.list_type == 1 else a.group_list
    weights = plain(a.weight[0])
    for expert, end in enumerate(ends.tolist()):
        part = x[start:end]
        result = part.double() @ expert_weight(a, weights[expert], expert).double()
        if a.bias and a.bias[0].dtype == I32:
            result = result + a.bias[0][expert].double()
        if a.scale:
            result = result * scale_and_offset(a.scale[0][expert])[0].double()
        if a.per_token:
            result = result * a.per_token[0][start:end].double()[:, None]
        if a.bias and a.bias[0].dtype != I32:
            result = result + a.bias[0][expert].double()
        y[start:end] = (result.round().clamp(-128, 127) if y.dtype == I8 else result).to(y.dtype)
        start = end


def expert_weight(a: Arguments, weight: torch.Tensor, expert: int) -> torch.Tensor:
    values = weight_values(weight) if a.antiquant_scale else weight
    if not a.antiquant_scale:
        return values
    k = len(values)
    scale = a.antiquant_scale[0][expert].float()
    per_row = lambda t: t.repeat_interleave(k // len(t), 0) if t.dim() == 2 else t[None]
    if a.antiquant_offset:
        values = values + per_row(a.antiquant_offset[0][expert].float())
    return values * per_row(scale)


GROUPED = (
    "x:L weight:L bias:L scale:L offset:L antiquant_scale:L antiquant_offset:L per_token:L group_list"
    " activation_input:L activation_scale:L activation_offset:L split_item:i group_type:i list_type:i activation:i"
)
OUTPUTS = "y:L features:L dynamic_scale:L"
operator("aclnnGroupedMatmulV4", f"{GROUPED} {OUTPUTS}", check_grouped, inspect_grouped)(grouped)
operator("aclnnGroupedMatmulV5", f"{GROUPED} tuning:A {OUTPUTS}", check_grouped, inspect_grouped)(grouped)
operator(
    "aclnnGroupedMatmulWeightNz",
    f"{GROUPED} tuning:A group_size:i {OUTPUTS}",
    check_grouped,
    inspect_grouped,
    any_format=("weight",),
)(grouped)


# ---- back to tokens ----


def check_unpermute(a: Arguments) -> None:
    need(a.indices.dtype == I32 and a.indices.dim() == 1, "sorted_indices are int32 [rows]")
    need(not a.padded, "padded_mode is False")
    need(a.probs is None or a.probs.dtype in (a.x.dtype, F32), "probs have the dtype of permuted_tokens, or float32")
    k = 1 if a.probs is None else a.probs.shape[1]
    need(k <= 512, f"at most 512 experts a token, not {k}")
    need(a.indices.numel() == a.y.shape[0] * k, "sorted_indices are tokens times experts a token")


def inspect_unpermute(a: Arguments) -> None:
    need(int(a.indices.min()) >= 0 and int(a.indices.max()) < a.x.shape[0], f"sorted_indices lie in 0..{a.x.shape[0] - 1}")


@operator("aclnnMoeTokenUnpermute", "x indices probs padded:b restore:A y", check_unpermute, inspect_unpermute)
def unpermute(a: Arguments) -> None:
    rows = a.x.float()[a.indices.long()].reshape(a.y.shape[0], -1, a.x.shape[-1])
    a.y.copy_((rows if a.probs is None else rows * a.probs.float()[..., None]).sum(1))
