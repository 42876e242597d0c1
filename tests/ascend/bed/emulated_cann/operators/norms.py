"""RMS norms and the gated activation. Limits: the operators' documents, section "constraints"."""

from __future__ import annotations

import torch
from emulated_cann.chips import chip
from emulated_cann.registry import Arguments, need, operator

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


@operator("aclnnAddRmsNorm", "x1 x2 gamma epsilon:d y rstd x", check_add_rms_norm)
def add_rms_norm(a: Arguments) -> None:
    total = (a.x1.float() + a.x2.float()).to(a.x.dtype)
    y, rstd = normalise(total, a.gamma, a.epsilon)
    a.x.copy_(total)
    a.y.copy_(y)
    if a.rstd is not None and chip().rstd_of_add:
        a.rstd.copy_(rstd.reshape(a.rstd.shape))


def check_swiglu(a: Arguments) -> None:
    check_floats("x", a.x)
    need(a.x.numel() > 0, "x is not empty")
    need(a.x.is_contiguous(), "x is contiguous")
    need(a.x.shape[a.dim] % 2 == 0, f"the size of dimension {a.dim} is even, not {a.x.shape[a.dim]}")


@operator("aclnnSwiGlu", "x dim:i y", check_swiglu)
def swiglu(a: Arguments) -> None:
    gate, up = a.x.float().chunk(2, a.dim)
    a.y.copy_(gate * torch.sigmoid(gate) * up)
