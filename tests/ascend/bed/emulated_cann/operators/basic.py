"""What torch-npu itself calls for copies between strides and dtypes."""

from __future__ import annotations

from emulated_cann.registry import Arguments, operator


@operator("aclnnInplaceCopy", "target source")
def inplace_copy(a: Arguments) -> None:
    a.target.copy_(a.source)


@operator("aclnnCast", "x dtype:I y")
def cast(a: Arguments) -> None:
    a.y.copy_(a.x.to(a.y.dtype))
