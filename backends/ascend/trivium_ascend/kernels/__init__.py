"""The kernels of torch-npu's fused operators, as one chip has them. What none of them supports, trivium_torch's run."""

from __future__ import annotations

from trivium.plugin import Kernel
from trivium_ascend.chips import Chip


def kernels_for(chip: Chip) -> tuple[Kernel, ...]:
    """All of them, each with its limits and the chip's."""
    from trivium_ascend.kernels import activations, attention, experts, gathered, norms, products, rope

    tables = (norms, rope, activations, products, attention, gathered, experts)
    return tuple(kernel.on(chip) for table in tables for kernel in table.KERNELS)
