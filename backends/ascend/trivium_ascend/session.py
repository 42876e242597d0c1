"""An opened NPU: trivium_torch's session with Ascend's pages, and what kernels keep for its lifetime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt
import torch
from torch import Tensor

from trivium.ops import Batch, KVSpec, Program, StateSpec, Weight
from trivium.plugin import Executable, Kernel
from trivium_ascend.arrange import arrange
from trivium_ascend.chips import chip_of
from trivium_ascend.kernels.table import NpuKernel
from trivium_ascend.operators import npu
from trivium_ascend.pages import Blocks, TokenMajor, scale_bytes
from trivium_ascend.weights import Rounded, make_quantised
from trivium_torch.kernels.dense import linear as plain_linear
from trivium_torch.pages import Carried, GroupStep, Layer, Paged
from trivium_torch.session import TorchSession
from trivium_torch.weights import Resident

if TYPE_CHECKING:
    from trivium_ascend.graphs import Recorder

HALVES = (torch.float16, torch.bfloat16)
QUANTISED = ("int8", "w8a8", "int4")


class AscendSession(TorchSession):
    """See trivium_torch.session. chip: what the device has; max_len: the longest sequence; graph_sizes: batch sizes to capture;
    nz: whether numbers of 8 bits lie in tiles."""

    def __init__(self, backend: str, device: str, kernels: Sequence[Kernel], options: Mapping[str, Any]) -> None:
        super().__init__(backend, device, kernels, options)
        module = torch.get_device_module("npu")
        module.set_device(self.device)
        self.chip = chip_of(str(module.get_device_name(self.device)))
        self.max_len = int(options.get("max_model_len") or 0)
        self.graph_sizes = tuple(options.get("graph_sizes", ())) if self.max_len and options.get("graphs", True) else ()
        self.nz = bool(options.get("nz", self.chip.tiles)) and self.chip.lacks("npu_format_cast") is None
        if self.nz:
            module.config.allow_internal_format = True  # of the process: without it a cast to tiles gives rows
        self._kept: dict[Any, tuple[Any, Any]] = {}
        self._all_kernels = kernels
        self.recorder: Recorder | None = None
        self.graphs: list[Any] = []
        self._joined: dict[tuple[int, int], Any] = {}

    def kept(self, owner: Any, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for a weight or other object that lives as long as the session."""
        at = id(owner), key
        if at not in self._kept:
            self._kept[at] = owner, make()
        return self._kept[at][1]

    def joined(self, a: Any, b: Any) -> Any:
        """The one weight of which `a` and then `b` are the rows, or None if they don't lie together."""
        return self._joined.get((id(a), id(b)))

    def linear(self, x: Tensor | Rounded, weight: Any, bias: Tensor | None) -> Tensor:
        """The operator `linear`. x is Rounded only where rounding.py found that the weight takes it."""
        if isinstance(x, Rounded):
            whole: Tensor = weight.product(x)
            return whole if bias is None else (whole + bias).to(x.dtype)
        if isinstance(weight, Tensor):
            return plain_linear(self, (x, weight, bias), {})
        rows = x.reshape(-1, x.shape[-1])
        y = weight.product(rows) if x.dtype in HALVES and len(rows) else None
        if y is None:
            return plain_linear(self, (x, weight.to(x.dtype), bias), {})
        biased: Tensor = y if bias is None else (y + bias).to(x.dtype)
        return biased.view(*x.shape[:-1], -1)

    def make_weight(self, weight: Weight, format: str) -> Resident:
        if format not in QUANTISED:
            return super().make_weight(weight, format)
        return cast(Resident, make_quantised(weight, format, self.device, self.dtype, self.chip))

    def _replace(self, old: Any, new: Any) -> None:
        """A weight that compile() put into another form is found in it from now on."""
        for key, (resident, weight) in self._loaded.items():
            if resident is old:
                self._loaded[key] = new, weight

    def attention(self, *qkv: Tensor, **options: Any) -> Tensor:
        """npu_fused_infer_attention_score_v2's first result; a task group of its own while a step is captured."""
        if self.recorder is not None:
            return self.recorder.attention(*qkv, **options)
        return npu.npu_fused_infer_attention_score_v2(*qkv, **options)[0]  # type: ignore[no-any-return]

    def causal_mask(self) -> Tensor:
        """int8[2048, 2048], 1 above the diagonal: the form in which the attention operator takes every causal or banded mask."""
        return self.kept(self, "mask", lambda: torch.ones(2048, 2048).triu(1).to(torch.int8).to(self.device))  # type: ignore[no-any-return]

    def make_layer(self, state: StateSpec) -> Layer:
        return TokenMajor(state, self.spec.page_size, self.spec.dtype, self._pages, self.allocate, self.scratch_pages())

    def state_bytes(self, state: StateSpec, spec: KVSpec) -> int:
        return super().state_bytes(state, spec) + (scale_bytes(state, spec.page_size) if spec.dtype == "int8" else 0)

    def scratch_pages(self) -> int:
        """Pages into which captured steps write the keys and values of their padding."""
        largest = max(self.graph_sizes, default=0)
        return -(-largest // self.spec.page_size)

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self._pages

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Through pinned memory, behind what the device was given before; nobody waits."""
        return torch.tensor(array).pin_memory().to(self.device, non_blocking=True)

    def step_state(self, state: int, batch: Batch) -> Paged | Carried:
        made = super().step_state(state, batch)
        if isinstance(made, Carried):
            return made
        layer = self._places[state][1]
        assert isinstance(layer, TokenMajor)
        return Blocks(made.k, made.v, made.step, tuple(layer.blocks), tuple(layer.scales))

    def state_of(self, state: int, steps: Sequence[GroupStep]) -> Blocks:
        """A paged state in a captured step, of which `steps` says what each group reads and writes."""
        group, layer = self._places[state]
        assert isinstance(layer, TokenMajor)
        return Blocks(layer.stores[0], layer.stores[1], steps[group], tuple(layer.blocks), tuple(layer.scales))

    def forget_step(self) -> None:
        """What was worked out for a step is worked out again."""
        self.begin_step()

    def compile(self, program: Program, weights: Mapping[str, Any]) -> Executable:
        dtypes = self.options["dtype"], self.spec.dtype
        self.kernels = [k for k in self._all_kernels if not isinstance(k, NpuKernel) or k.takes(*dtypes)]
        arranged, self._joined = arrange(program, weights, self._replace, self.nz)
        from trivium_ascend.executor import AscendExecutable
        from trivium_ascend.graphs import GraphExecutable

        if self.graph_sizes:
            sizes = sorted({min(size, self._pages) for size in self.graph_sizes})  # each sequence writes to a page of its own
            return GraphExecutable(self, program, arranged, tuple(sizes))
        return AscendExecutable(self, program, arranged)

    def close(self) -> None:
        self.synchronize()
        for graph in self.graphs:
            graph.reset()  # gives its streams back, whoever still holds the executable
        self.graphs.clear()
        self._kept.clear()
        super().close()
