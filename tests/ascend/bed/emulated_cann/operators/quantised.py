"""Quantisation, and products with quantised operands. Limits: the operators' documents."""

from __future__ import annotations

import torch
from emulated_cann.chips import chip
from emulated_cann.formats import int4_values, plain
from emulated_cann.registry import Arguments, UnemulatedError, need, operator

HALVES = (torch.float16, torch.bfloat16)
F16, BF16, F32, I8, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64
MAX_INNER = 65535


# ---- activations ----


def check_dynamic_quant(a: Arguments) -> None:
    need(a.x.dtype in HALVES, f"x is float16 or bfloat16, not {a.x.dtype}")
    need(a.x.dim() >= 2, "x has at least 2 dimensions")
    need(a.smooth is None or a.smooth.dtype == a.x.dtype, "smooth_scales have the dtype of x")
    if a.y.dtype != I8 or getattr(a, "group_index", None) is not None:
        raise UnemulatedError("npu_dynamic_quant to 4 bits or with group_index")
    need(a.smooth is None or tuple(a.smooth.shape) == (a.x.shape[-1],), f"smooth_scales are [{a.x.shape[-1]}]")


def dynamic_quant(a: Arguments) -> None:
    """Per token: scale = max |x| / 127."""
    x = a.x.float() if a.smooth is None else a.x.float() * a.smooth.float()
    scale = x.abs().amax(-1) / 127
    a.scale.copy_(scale)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    a.y.copy_((x / safe[..., None]).round().clamp(-128, 127))


operator("aclnnDynamicQuant", "x smooth y scale", check_dynamic_quant)(dynamic_quant)
operator("aclnnDynamicQuantV2", "x smooth group_index dst_type:I y scale offset", check_dynamic_quant)(dynamic_quant)


def check_ascend_quant(a: Arguments) -> None:
    need(a.x.dtype in (*HALVES, F32), f"x is a float, not {a.x.dtype}")
    need(a.scale.dtype == a.x.dtype, f"npu_quantize with div_mode False takes scales of {a.x.dtype}, not {a.scale.dtype}")
    need(a.zero is None or a.zero.dtype == a.scale.dtype, "zero_points have the dtype of the scales")
    check_static_quant(a)


def check_static_quant(a: Arguments) -> None:
    need(a.scale.numel() in (1, a.x.shape[-1]), f"scales have 1 or {a.x.shape[-1]} elements")
    need(a.zero is None or a.zero.shape == a.scale.shape, "zero_points have the shape of the scales")
    if a.y.dtype != I8:
        raise UnemulatedError(f"npu_quantize to {a.y.dtype}")


def static_quant(a: Arguments, divides: bool) -> None:
    x = a.x.float() / a.scale.float() if divides else a.x.float() * a.scale.float()
    x = x if a.zero is None else x + a.zero.float()
    a.y.copy_(x.round().clamp(-128, 127))


@operator("aclnnAscendQuantV3", "x scale zero sqrt_mode:b rounding:s dtype:I axis:I y", check_ascend_quant)
def ascend_quant(a: Arguments) -> None:
    """npu_quantize with div_mode False: x * scale + zero point."""
    static_quant(a, divides=False)


def check_quantize(a: Arguments) -> None:
    need(a.x.dtype in (*HALVES, F32) and a.scale.dtype in (F32, BF16), "x is a float, and scales are float32 or bfloat16")
    zeros = (I8, torch.uint8, I32, *((BF16,) if chip().bfloat16 else ()))
    need(a.zero is None or a.zero.dtype in zeros, f"zero_points are {zeros}, not {a.zero.dtype if a.zero is not None else None}")
    need(a.x.dim() >= 1 and a.axis < a.x.dim(), f"axis {a.axis} is a dimension of x")
    check_static_quant(a)


@operator("aclnnQuantize", "x scale zero dtype:I axis:I y", check_quantize)
def quantize(a: Arguments) -> None:
    """npu_quantize with div_mode True: x / scale + zero point."""
    static_quant(a, divides=True)


# ---- the scale of a product as the cube unit takes it ----


def check_trans_quant(a: Arguments) -> None:
    need(a.scale.dtype == F32 and a.scale.dim() in (1, 2), "scale is float32 of 1 or 2 dimensions")
    need(a.scale.is_contiguous() and a.scale.numel() > 0, "scale is contiguous and not empty")
    need(a.offset is None or a.offset.dtype == F32, "offset is float32")


def trans_quant(a: Arguments) -> None:
    """The upper 19 bits of the float32 scale in bits 0 to 31, bit 46 set, the offset in bits 37 to 45."""
    packed = (a.scale.view(I32).to(I64) & 0xFFFFE000) | (1 << 46)
    if a.offset is not None:
        offset = a.offset.round().clamp(-256, 255).to(I64)
        packed = (packed & 0x4000FFFFFFFF) | ((offset & 0x1FF) << 37)
    a.out.copy_(packed.reshape(a.out.shape))


operator("aclnnTransQuantParamV2", "scale offset out", check_trans_quant)(trans_quant)
operator("aclnnTransQuantParamV3", "scale offset round_mode:i out", check_trans_quant)(trans_quant)


def scale_and_offset(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """float32 scale and offset of a scale as it is given: float, or int64 of npu_trans_quant_param."""
    if scale.dtype != I64:
        return scale.float(), 0.0
    bits = scale & 0xFFFFFFFF
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(I32)
    offset = (scale >> 37) & 0x1FF
    return signed.view(F32), ((offset ^ 256) - 256).float()


# ---- int8 x int8 ----


def check_quant_matmul(a: Arguments) -> None:
    need(a.x1.dtype == a.x2.dtype == I8, f"x1 and x2 are int8, not {a.x1.dtype} and {a.x2.dtype}")
    need(a.x1.dim() >= 2 and a.x2.dim() >= 2, "x1 and x2 have at least 2 dimensions")
    k, n = a.x2.shape[-2:]
    need(a.x1.shape[-1] == k, f"x1 has K {a.x1.shape[-1]}, x2 {k}")
    need(k <= MAX_INNER and n <= MAX_INNER, f"the last dimensions are at most {MAX_INNER}")
    need(a.scale.numel() in (1, n), f"scale has 1 or {n} elements, not {a.scale.numel()}")
    need(a.per_token is None or tuple(a.per_token.shape) == (a.x1.shape[-2],), f"pertoken_scale is [{a.x1.shape[-2]}]")
    need(a.bias is None or a.bias.shape[-1] == n, f"bias has {n} elements")
    check_quant_matmul_row(a)


def check_quant_matmul_row(a: Arguments) -> None:
    """The document's table: output, scale, bias and pertoken_scale dtypes that go together. A float32 scale without pertoken_scale
    arrives as int64 for float16 and int8 outputs: torch-npu packs it."""
    out, scale = a.out.dtype, a.scale.dtype
    bias, per_token = (None if x is None else x.dtype for x in (a.bias, a.per_token))
    rows = (
        (F16, (I64, F32), (None, I32), (None,)),
        (I8, (I64, F32), (None, I32), (None,)),
        (BF16, (F32, BF16), (None, I32, BF16, F32), (None, F32)),
        (F16, (F32,), (None, I32, F16, F32), (F32,)),
        (I32, (F32, BF16), (None, I32), (None,)),
    )
    rows = rows if chip().per_token else rows[:2]
    known = any(out == o and scale in s and bias in b and per_token in p for o, s, b, p in rows)
    need(known, f"no documented row has scale {scale}, bias {bias}, pertoken_scale {per_token} and output {out}")


def quant_matmul(a: Arguments) -> None:
    """(x1 @ x2 + int32 bias) * scale * pertoken_scale + float bias. The whole-number part is exact in float64."""
    total = a.x1.double() @ plain(a.x2).double()
    whole_bias = a.bias is not None and a.bias.dtype == I32
    if whole_bias:
        total = total + a.bias.double()
    if a.out.dtype == I32:
        a.out.copy_(total)
        return
    scale, offset = scale_and_offset(a.scale)
    result = total * scale.double()
    if a.per_token is not None:
        result = result * a.per_token.double()[..., None]
    if a.bias is not None and not whole_bias:
        result = result + a.bias.double()
    a.out.copy_((result + offset).round().clamp(-128, 127) if a.out.dtype == I8 else result)


QUANT_MATMUL = "x1 x2 per_token scale y_scale x1_offset offset y_offset bias transpose1:b transpose2:b group_size:i out"
operator("aclnnQuantMatmulV5", QUANT_MATMUL, check_quant_matmul)(quant_matmul)
operator("aclnnQuantMatmulWeightNz", QUANT_MATMUL, check_quant_matmul, any_format=("x2",))(quant_matmul)


# ---- float x int8 or int4 ----


def check_weight_quant(a: Arguments) -> None:
    packed = a.weight.dtype == I32
    need(packed or a.weight.dtype == I8, f"weight is int8, or int4 in int32, not {a.weight.dtype}")
    need(not packed or chip().int4, f"weight is int8 on {chip().name}")
    need(a.x.dtype == F16 or chip().bfloat16, f"x is float16 on {chip().name}")
    need(a.x.dtype in HALVES, f"x is float16 or bfloat16, not {a.x.dtype}")
    need(a.x.dim() == a.weight.dim() == 2, "x and weight have 2 dimensions")
    n = a.y.shape[-1]
    k = a.x.shape[1]
    need(weight_size(a) == k * n, f"weight is [{k}, {n}], int4 packed along its inner dimension")
    need(k <= MAX_INNER and n <= MAX_INNER, f"K and N are at most {MAX_INNER}")
    need(a.scale.dtype == a.x.dtype and (a.offset is None or a.offset.dtype == a.x.dtype), "scale and offset have the dtype of x")
    need(a.offset is None or a.offset.shape == a.scale.shape, "scale and offset have one shape")
    bias = (F32,) if a.x.dtype == BF16 else (F16,)
    need(a.bias is None or (a.bias.dtype in bias and a.bias.shape[-1] == n), f"bias is {bias[0]} [{n}] with x {a.x.dtype}")
    if a.quant_scale is not None:
        raise UnemulatedError("npu_weight_quant_batchmatmul with quant_scale")
    check_weight_scales(a, k, n)


def weight_size(a: Arguments) -> int:
    return int(a.weight.numel()) * (8 if a.weight.dtype == I32 else 1)


def check_weight_scales(a: Arguments, k: int, n: int) -> None:
    shape = tuple(a.scale.shape)
    if a.group == 0:
        need(shape in ((1,), (n,), (1, n)), f"a scale is [1], or per channel [{n}] or [1, {n}], not {shape}")
        return
    groups = -(-k // a.group)
    need(32 <= a.group <= k - 1 and a.group % 32 == 0, f"antiquant_group_size {a.group} is a multiple of 32 in 32..{k - 1}")
    need(shape == (groups, n), f"a scale per group is [{groups}, {n}], not {shape}")


def weight_values(weight: torch.Tensor) -> torch.Tensor:
    """The whole numbers of a weight as float32 [K, N]; int4 lie packed along the inner dimension of the stored matrix."""
    values = plain(weight)
    if values.dtype != I32:
        return values.float()
    inner = values if values.stride(-1) == 1 else values.transpose(-1, -2)
    spread = int4_values(inner.contiguous()).float()
    return spread if values.stride(-1) == 1 else spread.transpose(-1, -2)


def by_group(values: torch.Tensor, group: int, rows: int) -> torch.Tensor:
    return values.float().repeat_interleave(group, 0)[:rows] if group else values.float().reshape(1, -1)


def weight_quant_matmul(a: Arguments) -> None:
    """x @ ((weight + offset) * scale) + bias."""
    weight = weight_values(a.weight)
    if a.offset is not None:
        weight = weight + by_group(a.offset, a.group, len(weight))
    result = a.x.float() @ (weight * by_group(a.scale, a.group, len(weight)))
    a.y.copy_(result if a.bias is None else result + a.bias.float())


WEIGHT_QUANT = "x weight scale offset quant_scale quant_offset bias group:I"
operator("aclnnWeightQuantBatchMatmulV2", f"{WEIGHT_QUANT} y", check_weight_quant)(weight_quant_matmul)
operator("aclnnWeightQuantBatchMatmulV3", f"{WEIGHT_QUANT} inner_precise:I y", check_weight_quant)(weight_quant_matmul)
operator("aclnnWeightQuantBatchMatmulNz", f"{WEIGHT_QUANT} y", check_weight_quant, any_format=("weight",))(weight_quant_matmul)
