"""An opened NPU: trivium_torch's session with Ascend's pages, and what kernels keep for its lifetime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import Batch, Program, StateSpec
from trivium.plugin import Executable, Kernel
from trivium_ascend.chips import chip_of
from trivium_ascend.kernels.table import NpuKernel
from trivium_ascend.pages import Blocks, TokenMajor
from trivium_torch.kernels.dense import linear
from trivium_torch.pages import Carried, Layer, Paged
from trivium_torch.session import TorchSession


class AscendSession(TorchSession):
    """See trivium_torch.session. chip: what the device has; max_len: the longest sequence."""

    def __init__(self, backend: str, device: str, kernels: Sequence[Kernel], options: Mapping[str, Any]) -> None:
        super().__init__(backend, device, kernels, options)
        module = torch.get_device_module("npu")
        module.set_device(self.device)
        self.chip = chip_of(str(module.get_device_name(self.device)))
        self.max_len = int(options.get("max_model_len") or 0)
        self._kept: dict[Any, tuple[Any, Any]] = {}
        self._all_kernels = kernels

    def kept(self, owner: Any, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for a weight or other object that lives as long as the session."""
        at = id(owner), key
        if at not in self._kept:
            self._kept[at] = owner, make()
        return self._kept[at][1]

    def joined(self, a: Any, b: Any) -> Any:
        """The one weight of which `a` and then `b` are the rows, or None if they don't lie together."""
        return None

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """The operator `linear`."""
        return linear(self, (x, weight, bias), {})

    def causal_mask(self) -> Tensor:
        """int8[2048, 2048], 1 above the diagonal: the form in which the attention operator takes every causal or banded mask."""
        return self.kept(self, "mask", lambda: torch.ones(2048, 2048).triu(1).to(torch.int8).to(self.device))  # type: ignore[no-any-return]

    def make_layer(self, state: StateSpec) -> Layer:
        return TokenMajor(state, self.spec.page_size, self.spec.dtype, self._pages, self.allocate, self.scratch_pages())

    def scratch_pages(self) -> int:
        """Pages into which captured steps write the keys and values of their padding."""
        return 0

    def step_state(self, state: int, batch: Batch) -> Paged | Carried:
        made = super().step_state(state, batch)
        if isinstance(made, Carried):
            return made
        layer = self._places[state][1]
        assert isinstance(layer, TokenMajor)
        return Blocks(made.k, made.v, made.step, tuple(layer.blocks))

    def compile(self, program: Program, weights: Mapping[str, Any]) -> Executable:
        dtypes = self.options["dtype"], self.spec.dtype
        self.kernels = [k for k in self._all_kernels if not isinstance(k, NpuKernel) or k.takes(*dtypes)]
        return super().compile(program, weights)

    def close(self) -> None:
        self._kept.clear()
        super().close()
