"""RMS norms, alone and fused with quantisation, and the gated activation. Limits: the operators' documents."""

from __future__ import annotations

import torch
from emulated_cann.chips import chip
from emulated_cann.registry import Arguments, UnemulatedError, need, operator

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GAMMAS = {  # dtype of x -> dtypes of gamma
    torch.float16: (torch.float16, torch.float32),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float32: (torch.float32,),
}


def trailing(x: torch.Tensor, gamma: torch.Tensor) -> bool:
    return 0 < gamma.dim() <= x.dim() and x.shape[x.dim() - gamma.dim() :] == gamma.shape


def check_floats(name: str, x: torch.Tensor) -> None:
    need(x.dtype in FLOATS, f"{name} is {x.dtype}: float16, bfloat16 or float32")
    need(chip().bfloat16 or x.dtype != torch.bfloat16, f"{name}: no bfloat16 on {chip().name}")


def check_rms_norm(a: Arguments) -> None:
    check_floats("x", a.x)
    need(a.gamma.dtype in GAMMAS[a.x.dtype], f"gamma {a.gamma.dtype} does not go with x {a.x.dtype}")
    need(chip().mixed_norms or a.gamma.dtype == a.x.dtype, f"gamma and x have one dtype on {chip().name}")
    need(trailing(a.x, a.gamma), f"gamma {tuple(a.gamma.shape)} must be the trailing dimensions of x {tuple(a.x.shape)}")
    need(a.x.shape[-1] * a.x.element_size() >= chip().norm_bytes, f"the last dimension has at least {chip().norm_bytes} bytes")


def normalise(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, 1 / rms) in float32 (Zhang and Sennrich, 2019)."""
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.float().pow(2).mean(dims, keepdim=True) + epsilon)
    return x.float() * rstd * gamma.float(), rstd


@operator("aclnnRmsNorm", "x gamma epsilon:d y rstd", check_rms_norm)
def rms_norm(a: Arguments) -> None:
    y, rstd = normalise(a.x, a.gamma, a.epsilon)
    a.y.copy_(y)
    a.rstd.copy_(rstd.reshape(a.rstd.shape))


def check_add_rms_norm(a: Arguments) -> None:
    check_floats("x1", a.x1)
    need(a.x1.dtype == a.x2.dtype == a.gamma.dtype, "x1, x2 and gamma have one dtype")
    need(a.x1.shape == a.x2.shape and 1 <= a.x1.dim() <= 8, "x1 and x2 have one shape of 1 to 8 dimensions")
    need(a.x1.numel() > 0, "x1 is not empty")
    need(trailing(a.x1, a.gamma), f"gamma {tuple(a.gamma.shape)} must be the trailing dimensions of x1 {tuple(a.x1.shape)}")


def added(a: Arguments) -> torch.Tensor:
    """x1 + x2 as it is stored: the norm sees the rounded sum."""
    return (a.x1.float() + a.x2.float()).to(a.x1.dtype)


@operator("aclnnAddRmsNorm", "x1 x2 gamma epsilon:d y rstd x", check_add_rms_norm)
def add_rms_norm(a: Arguments) -> None:
    total = added(a)
    y, rstd = normalise(total, a.gamma, a.epsilon)
    a.x.copy_(total)
    a.y.copy_(y)
    if chip().rstd_of_add:
        a.rstd.copy_(rstd.reshape(a.rstd.shape))


@operator("aclnnInplaceAddRmsNorm", "x1 x2 gamma epsilon:d rstd", check_add_rms_norm)
def inplace_add_rms_norm(a: Arguments) -> None:
    """The norm is left in x1, the sum in x2."""
    total = added(a)
    y, rstd = normalise(total, a.gamma, a.epsilon)
    a.x1.copy_(y)
    a.x2.copy_(total)
    a.rstd.copy_(rstd.reshape(a.rstd.shape))


def check_add_rms_norm_quant(a: Arguments) -> None:
    check_add_rms_norm(a)
    need(a.axis == -1, f"axis is -1, not {a.axis}")
    need(a.y1.dtype == torch.int8, f"the emulation quantises to int8, not {a.y1.dtype}")
    half = a.x1.dtype == torch.float16
    scale, zero = (torch.float32, torch.int32) if half else (torch.bfloat16, torch.bfloat16)
    for name, x, dtype in (("scales1", a.scales1, scale), ("scales2", a.scales2, scale), ("zero_points1", a.zeros1, zero),
                           ("zero_points2", a.zeros2, zero)):  # fmt: skip
        need(x is None or (x.dtype == dtype and x.shape == a.gamma.shape), f"{name} is {dtype} of the shape of gamma")
    need(a.x1.shape[-1] >= chip().quant_norm_elements, f"the last dimension has at least {chip().quant_norm_elements} elements")


def inspect_add_rms_norm_quant(a: Arguments) -> None:
    for scales in (a.scales1, a.scales2):
        need(not a.div_mode or scales is None or bool((scales != 0).all()), "scales that divide are not 0")


def add_rms_norm_quant(a: Arguments) -> None:
    total = added(a)
    y, _ = normalise(total, a.gamma, a.epsilon)
    y = y if getattr(a, "beta", None) is None else y + a.beta.float()
    a.x.copy_(total)
    for out, scales, zeros in ((a.y1, a.scales1, a.zeros1), (a.y2, a.scales2, a.zeros2)):
        if scales is not None:
            scaled = y / scales.float() if a.div_mode else y * scales.float()
            scaled = scaled if zeros is None else scaled + zeros.float()
            out.copy_(scaled.round().clamp(-128, 127))


QUANT = "x1 x2 gamma scales1 scales2 zeros1 zeros2"
for _name, _signature in (
    ("aclnnAddRmsNormQuant", f"{QUANT} axis:i epsilon:d div_mode:b y1 y2 x"),
    ("aclnnAddRmsNormQuantV2", f"{QUANT} beta axis:i epsilon:d div_mode:b y1 y2 x norm"),
):
    operator(_name, _signature, check_add_rms_norm_quant, inspect_add_rms_norm_quant)(add_rms_norm_quant)


def check_add_rms_norm_dynamic(a: Arguments) -> None:
    check_add_rms_norm(a)
    need(a.x1.dtype in (torch.float16, torch.bfloat16), f"x1 is float16 or bfloat16, not {a.x1.dtype}")
    need(a.x1.dim() >= 2, "x1 has at least 2 dimensions")
    need(a.smooth1 is None or a.smooth1.shape == a.gamma.shape, "smooth_scale1 has the shape of gamma")
    need(a.smooth2 is None or a.smooth1 is not None, "smooth_scale2 goes with smooth_scale1")
    if a.y1.dtype != torch.int8 or a.mask is not None:
        raise UnemulatedError("npu_add_rms_norm_dynamic_quant with y_dtype or output_mask")


@operator(
    "aclnnAddRmsNormDynamicQuantV2",
    "x1 x2 gamma smooth1 smooth2 beta epsilon:d mask:p y1 y2 x scale1 scale2",
    check_add_rms_norm_dynamic,
)
def add_rms_norm_dynamic_quant(a: Arguments) -> None:
    total = added(a)
    y, _ = normalise(total, a.gamma, a.epsilon)
    y = y if a.beta is None else y + a.beta.float()
    a.x.copy_(total)
    for out, scale, smooth in ((a.y1, a.scale1, a.smooth1), (a.y2, a.scale2, a.smooth2)):
        if out is a.y1 or smooth is not None:
            smoothed = y if smooth is None else y * smooth.float()
            found = smoothed.abs().amax(-1) / 127
            scale.copy_(found)
            out.copy_((smoothed / found[..., None]).round().clamp(-128, 127))


def check_swiglu(a: Arguments) -> None:
    check_floats("x", a.x)
    need(a.x.numel() > 0, "x is not empty")
    need(a.x.is_contiguous(), "x is contiguous")
    need(a.x.shape[a.dim] % 2 == 0, f"the size of dimension {a.dim} is even, not {a.x.shape[a.dim]}")


@operator("aclnnSwiGlu", "x dim:i y", check_swiglu)
def swiglu(a: Arguments) -> None:
    gate, up = a.x.float().chunk(2, a.dim)
    a.y.copy_(gate * torch.sigmoid(gate) * up)
