"""A kernel made of torch-npu's operators: which of them it needs, and with which dtypes it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trivium.ops import Call
from trivium.plugin import Kernel
from trivium_ascend.chips import Chip

HALVES = ("bfloat16", "float16")
OWN = "own"


@dataclass(frozen=True)
class NpuKernel(Kernel):
    """`needs`: operators. `dtypes`: of activations, `kv_dtypes`: KV formats, OWN for the activations' dtype; None: all that the
    chip has."""

    needs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None

    def takes(self, dtype: str, kv_dtype: str) -> bool:
        """Whether it works in a session with these dtypes. `supports` is asked about a call, which doesn't say."""
        if self.dtypes is not None and dtype not in self.dtypes:
            return False
        return self.kv_dtypes is None or kv_dtype in self.kv_dtypes or (OWN in self.kv_dtypes and kv_dtype == dtype)

    def on(self, chip: Chip) -> NpuKernel:
        """The kernel as a chip has it: where it lacks an operator, it says so of every call."""
        lacking, limits = chip.lacks(*self.needs), self.supports
        return replace(self, supports=lambda call: lacking or limits(call))


def first(*limits: Callable[[Call], str | None]) -> Callable[[Call], str | None]:
    """The first reason that one of several limits gives."""
    return lambda call: next((reason for limit in limits if (reason := limit(call))), None)
