"""Quantisation and products with quantised operands."""

from __future__ import annotations

import torch
from emulated_cann.registry import Arguments, need, operator

HALVES = (torch.float16, torch.bfloat16)
MAX_INNER = 65535
# documented rows of npu_quant_matmul: (scale dtypes, bias dtypes, per-token scale) for each output dtype
F16, BF16, F32, I8, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64


def check_dynamic_quant(a: Arguments) -> None:
    need(a.x.dtype in HALVES, f"x is float16 or bfloat16, not {a.x.dtype}")
    need(a.x.dim() >= 2, "x has at least 2 dimensions")
    need(a.smooth is None or a.smooth.dtype == a.x.dtype, "smooth_scales have the dtype of x")


@operator("aclnnDynamicQuant", "x smooth y scale", check_dynamic_quant)
def dynamic_quant(a: Arguments) -> None:
    x = a.x.float() if a.smooth is None else a.x.float() * a.smooth.float()
    scale = x.abs().amax(-1) / 127
    a.scale.copy_(scale)
    a.y.copy_((x / scale[..., None]).round().clamp(-128, 127))


def check_quant_matmul(a: Arguments) -> None:
    k, n = a.x2.shape[-2:]
    need(a.x1.dtype == a.x2.dtype == I8, "x1 and x2 are int8")
    need(a.x1.shape[-1] == k, f"x1 has K {a.x1.shape[-1]}, x2 {k}")
    need(a.x1.shape[-1] <= MAX_INNER and n <= MAX_INNER, f"the last dimensions are at most {MAX_INNER}")
    need(a.scale.numel() in (1, n), f"scale has 1 or {n} elements, not {a.scale.numel()}")
    need(a.per_token is None or a.per_token.shape == (a.x1.shape[-2],), f"pertoken_scale has {a.x1.shape[-2]} elements")
    need(a.bias is None or a.bias.shape[-1] == n, f"bias has {n} elements")
    check_quant_matmul_dtypes(a)


def check_quant_matmul_dtypes(a: Arguments) -> None:
    out, scale = a.out.dtype, a.scale.dtype
    bias, per_token = None if a.bias is None else a.bias.dtype, None if a.per_token is None else a.per_token.dtype
    rows = (
        (F16, (I64, F32), (None, I32), (None,)),
        (I8, (I64, F32), (None, I32), (None,)),
        (BF16, (F32, BF16), (None, I32, BF16, F32), (None, F32)),
        (F16, (F32,), (None, I32, F16, F32), (F32,)),
        (I32, (F32, BF16), (None, I32), (None,)),
    )
    need(any(out == o and scale in s and bias in b and per_token in p for o, s, b, p in rows),
         f"no documented row has scale {scale}, bias {bias}, pertoken_scale {per_token} and output {out}")  # fmt: skip


@operator(
    "aclnnQuantMatmulV5",
    "x1 x2 per_token scale y_scale x1_offset offset y_offset bias transpose1:b transpose2:b group_size:i out",
    check_quant_matmul,
)
def quant_matmul(a: Arguments) -> None:
    """Whole-number products are exact in float64: K * 127 * 127 is far below 2**53."""
    total = a.x1.double() @ a.x2.double()
    whole_bias = a.bias is not None and a.bias.dtype == I32
    if whole_bias:
        total = total + a.bias.double()
    result = total * a.scale.double()
    if a.per_token is not None:
        result = result * a.per_token.double()[..., None]
    if a.bias is not None and not whole_bias:
        result = result + a.bias.double()
    a.out.copy_(result)


def check_weight_quant(a: Arguments) -> None:
    k, n = a.weight.shape
    need(a.x.dtype in HALVES, f"x is float16 or bfloat16, not {a.x.dtype}")
    need(a.x.dim() == 2 and a.x.shape[1] == k, f"x is [M, {k}]")
    need(k <= MAX_INNER and n <= MAX_INNER, f"K and N are at most {MAX_INNER}")
    need(a.scale.dtype == a.x.dtype and (a.offset is None or a.offset.dtype == a.x.dtype), "scale and offset have the dtype of x")
    need(a.offset is None or a.offset.shape == a.scale.shape, "scale and offset have one shape")
    if a.group == 0:
        need(a.scale.numel() in (1, n), f"a scale per channel has {n} elements")
    else:
        need(32 <= a.group <= k - 1 and a.group % 32 == 0, f"antiquant_group_size {a.group} is a multiple of 32 in 32..{k - 1}")
        need(tuple(a.scale.shape) == (-(-k // a.group), n), f"a scale per group is [{-(-k // a.group)}, {n}]")


def spread(values: torch.Tensor, group: int, rows: int) -> torch.Tensor:
    return values.float().repeat_interleave(group, 0)[:rows] if group else values.float().reshape(1, -1)


@operator("aclnnWeightQuantBatchMatmulV2", "x weight scale offset quant_scale quant_offset bias group:i y", check_weight_quant)
def weight_quant_matmul(a: Arguments) -> None:
    """x @ ((weight + offset) * scale) + bias."""
    weight = a.weight.float()
    if a.offset is not None:
        weight = weight + spread(a.offset, a.group, len(weight))
    result = a.x.float() @ (weight * spread(a.scale, a.group, len(weight)))
    a.y.copy_(result if a.bias is None else result + a.bias.float())
