"""Mixture of experts: choosing by npu_moe_gating_top_k, then tokens sorted by expert, two grouped products, and back to tokens.

A step reads the weights of the experts that are used once, 2 bytes a number in 16 bits and 1 in 8, and each token's row 2 *
top_k times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trivium.ops import Call
from trivium_ascend.kernels.activations import swiglu
from trivium_ascend.kernels.table import NpuKernel
from trivium_ascend.operators import npu
from trivium_ascend.session import HALVES, AscendSession
from trivium_ascend.weights import Rows8
from trivium_torch.kernels.dense import F32, Args, Attrs, gate
from trivium_torch.kernels.moe import moe_experts as plain_experts

SORT, GROUPED, BACK = "npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_token_unpermute"
TOP_K, TOP_K_SOFTMAX = "npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax"
WIDEST = 65535


def route(session: AscendSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """The operator chooses, in float32, and gives all scores; the weights are made of those that were chosen, as `moe_route`
    says."""
    logits, bias = args
    sigmoid = attrs["scoring"] == "sigmoid"
    _, ids, scores = npu.npu_moe_gating_top_k(
        logits.to(F32), attrs["top_k"], bias=None if bias is None else bias.to(F32), k_group=attrs["top_groups"],
        group_count=attrs["groups"], group_select_mode=int(sigmoid), norm_type=int(sigmoid), out_flag=True,
    )  # fmt: skip
    weights = scores.gather(-1, ids.to(torch.int64))
    if attrs["normalize"]:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * attrs["scale"], ids


def route_logits(session: AscendSession, args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """softmax_topk: the order of the logits is that of their softmax; the weights are the softmax of the chosen."""
    logits = args[0].to(F32)
    _, ids, _ = npu.npu_moe_gating_top_k_softmax(logits, None, attrs["top_k"])
    return logits.gather(-1, ids.to(torch.int64)).softmax(dim=-1) * attrs["scale"], ids


def route_fits(call: Call) -> str | None:
    experts, groups = _experts(call), call.attrs["groups"]
    if call.attrs["scoring"] == "softmax_topk":
        return "the operator scores by softmax or sigmoid over all experts"
    each = experts // groups
    if experts > 2048 or each < 3 or -(-each // 32) * 32 * groups > 2048:
        return f"the operator takes up to 2048 experts, three or more to a group, not {experts} in {groups}"
    return None


def logits_fit(call: Call) -> str | None:
    if call.attrs["scoring"] != "softmax_topk" or call.args[1] is not None or call.attrs["groups"] > 1:
        return "this way is for softmax_topk without bias and groups"
    return None if call.attrs["top_k"] <= 1024 else "the operator chooses up to 1024 experts"


def _experts(call: Call) -> int:
    logits: Any = call.args[0]
    return int(logits.shape[1])


def experts(session: AscendSession, args: Args, attrs: Attrs) -> Tensor:
    """Both projections into the expert in one product where they lie together, then back; biases are added by the products."""
    x, weights, ids, first, second, down, *biases = args
    both = session.joined(first, second)
    into = (first, second) if both is None else (both,)
    if not x.shape[0] or any(
        not usable(x, weight, bias) for weight, bias in zip((*into, down), _biases(biases, both), strict=True)
    ):
        return plain_experts(session, args, attrs)
    rounds = isinstance(down, Rows8) and down.rounds
    count = down.shape[0]
    rows, places, counts, steps = npu.npu_moe_init_routing_v2(
        x, ids, active_num=ids.numel(), expert_num=count, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, count], quant_mode=1 if rounds else -1,
    )  # fmt: skip
    scales = steps if rounds else None
    joined = _biases(biases, both)
    parts = [grouped(rows, weight, counts, bias, scales, x.dtype) for weight, bias in zip(into, joined[:-1], strict=True)]
    inner = gated(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), attrs)
    found = grouped(inner, down, counts, joined[-1], None, x.dtype)
    return npu.npu_moe_token_unpermute(found, places, weights.to(F32))  # type: ignore[no-any-return]


def _biases(biases: list[Tensor | None], both: Any) -> list[Tensor | None]:
    """One for each product."""
    gates, ups, downs = biases
    if both is None:
        return [gates, ups, downs]
    return [None if gates is None or ups is None else torch.cat([gates, ups], dim=-1), downs]


def usable(x: Tensor, weight: Any, bias: Tensor | None) -> bool:
    """Whether the grouped product takes a weight as it is resident; 8-bit ones take no bias that is not a whole number."""
    if isinstance(weight, Tensor):
        return weight.dtype == x.dtype
    return isinstance(weight, Rows8) and x.dtype in HALVES and bias is None


def gated(both: Tensor, attrs: Attrs) -> Tensor:
    """`gated` of gate and up side by side."""
    if attrs["kind"] == "silu" and attrs["limit"] is None and attrs["alpha"] == 1 and not attrs["up_offset"]:
        return swiglu(both)
    first, second = both.chunk(2, dim=-1)
    return gate(first, second, attrs).to(both.dtype)


def grouped(x: Tensor, weight: Any, counts: Tensor, bias: Tensor | None, steps: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x[rows, in], sorted by expert, times weight[experts, out, in]ᵀ. steps: of rows that are rounded already."""
    options: dict[str, Any] = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts}
    if isinstance(weight, Tensor):
        wide = F32 if dtype == torch.bfloat16 else dtype  # as the operator wants its bias
        given = None if bias is None else [bias.to(wide)]
        return npu.npu_grouped_matmul([x], [weight.transpose(1, 2)], bias=given, **options)[0]  # type: ignore[no-any-return]
    numbers, scales = weight.numbers.transpose(1, 2), weight.scales[..., 0]
    if weight.rounds:
        x, steps = (x, steps) if steps is not None else npu.npu_dynamic_quant(x)
        scale = scales.to(torch.bfloat16) if dtype == torch.bfloat16 else scales
        options |= {"scale": [scale], "per_token_scale": [steps], "output_dtype": dtype}
    else:
        options |= {"antiquant_scale": [scales.to(dtype)], "antiquant_offset": [torch.zeros_like(scales, dtype=dtype)]}
    return npu.npu_grouped_matmul([x], [numbers], **options)[0]  # type: ignore[no-any-return]


def experts_fit(call: Call) -> str | None:
    down: Any = call.args[5]
    ids: Any = call.args[2]
    count, hidden, inter = down.shape
    if count < 2 or max(hidden, 2 * inter) > WIDEST:
        return f"the grouped product takes two or more experts and up to {WIDEST} numbers, not {count} of {hidden} and {2 * inter}"
    return None if ids.shape[1] <= 512 else f"{BACK} takes 512 experts a token, not {ids.shape[1]}"


KERNELS = (
    NpuKernel("moe_route", route, TOP_K, 10, route_fits, (TOP_K,)),
    NpuKernel("moe_route", route_logits, TOP_K_SOFTMAX, 9, logits_fit, (TOP_K_SOFTMAX,)),
    NpuKernel("moe_experts", experts, f"{SORT}, {GROUPED}, {BACK}", 10, experts_fit, (SORT, GROUPED, BACK, "npu_swiglu")),
)
