"""A session on onnxruntime's CUDA provider: float16, and pages that stay on the device.

Nothing here was run on a GPU: the tests run its models and pages with onnxruntime's CPU kernels, and PagedAttention in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import CapacityError, UnsupportedError
from trivium.ops import KVSpec, Program, Weight
from trivium.plugin import Executable, Kernel, Memory, Pages, Session, Tensor, announce_fallbacks, select_kernels
from trivium_onnxruntime import driver
from trivium_onnxruntime.device_pages import DevicePool, page_bytes
from trivium_onnxruntime.formats import Resident, load, rounded_to
from trivium_onnxruntime.graph import Common
from trivium_onnxruntime.paged import PagedExecutable
from trivium_onnxruntime.providers import CUDA, taken

F32 = npt.NDArray[np.float32]
DTYPE = "float16"
"""What PagedAttention takes there, other than bfloat16, which numpy lacks."""


class CudaSession(Session):
    """See plugin.Session. `index`: of the device among CUDA's. `options`: those of OnnxBackend.open, checked. `dtype`: of
    activations and pages."""

    def __init__(self, kernels: Sequence[Kernel], options: Mapping[str, Any], index: int, dtype: str = DTYPE) -> None:
        self._kernels, self._options, self._index, self._dtype = kernels, options, index, dtype
        self._loaded: dict[Any, tuple[Resident, Weight]] = {}
        self._spec = KVSpec(16, dtype, ())
        self._pool: DevicePool | None = None
        self._compiled = False

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        return np.array(array, self._dtype if np.issubdtype(array.dtype, np.floating) else array.dtype)

    def get(self, tensor: Tensor) -> npt.NDArray[Any]:
        array = tensor.numbers() if isinstance(tensor, Resident) else np.asarray(tensor)
        return array.astype(np.float32) if np.issubdtype(array.dtype, np.floating) else array

    def load(self, weight: Weight, format: str) -> Tensor:
        """Rearranges or rounds a weight, once. It is held on the host; a model that is opened has a copy on the device."""
        key = (weight.origin or weight.data.__array_interface__["data"][0], weight.nbytes, weight.shape, weight.format, format)
        if key not in self._loaded:
            self._loaded[key] = self._resident(weight, format), weight
        return self._loaded[key][0]

    def _resident(self, weight: Weight, format: str) -> Resident:
        if format == "float32":
            return load(weight, format)
        return rounded_to(load(weight, "float32" if format == self._dtype else format), self._dtype, weight.name)

    def read_weight(self, tensor: Tensor) -> F32:
        return tensor.numbers() if isinstance(tensor, Resident) else np.asarray(tensor, np.float32)

    def assign(self, tensor: Tensor, index: int, array: F32) -> None:
        tensor.array[index] = array

    def page_bytes(self, spec: KVSpec) -> int:
        return page_bytes(spec)

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        if spec.dtype != self._dtype:
            raise UnsupportedError(f"pages of {spec.dtype}: PagedAttention reads pages in {self._dtype} here", param="kv_dtype")
        self._pool = DevicePool(
            spec, pages, free=self.memory().free, place=self._place, open_model=lambda model: self._open(model, {})
        )
        self._spec = spec

    def _place(self, array: npt.NDArray[Any]) -> Any:
        import onnxruntime

        try:
            return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", self._index)
        except Exception as e:  # onnxruntime has no class of its own for memory that is not there
            raise CapacityError(f"{array.nbytes} bytes for pages could not be had on cuda:{self._index}: {e}") from e

    def memory(self) -> Memory:
        """Weights by their size on the host; onnxruntime copies them to the device when a Program is compiled, until when what they
        will take counts as not free. What it packs for itself is not known."""
        weights = sum(resident.nbytes for resident, _ in self._loaded.values())
        kv = self._pool.nbytes if self._pool else 0
        free = driver.free_bytes(self._index) - (0 if self._compiled else weights)
        return Memory(driver.total_bytes(self._index), max(0, free), weights, kv)

    def compile(self, program: Program, weights: Mapping[str, Tensor]) -> Executable:
        choices = select_kernels(program, self._kernels)
        missing = [(c.call.name, "; ".join(r for _, r in c.refused) or "no kernel") for c in choices if c.kernel is None]
        announce_fallbacks("onnxruntime:cuda", missing, strict=bool(self._options.get("strict")))
        positions = (self._options.get("max_model_len") or 8192) + (self._options.get("max_batched_tokens") or 512)
        common = Common(program, weights, self._spec, positions=positions, accuracy=0, dtype=self._dtype, paged=True)
        made = PagedExecutable(self, common, choices, self._pool, self._open)
        self._compiled = True
        return made

    def _open(self, model: bytes, weights: Mapping[str, npt.NDArray[Any]]) -> Any:
        """An InferenceSession all of whose nodes run on the device; onnxruntime refuses to open any other."""
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in weights.items()}
        settings.add_external_initializers(list(values), list(values.values()))
        provider = CUDA, {"device_id": str(self._index), "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
        return taken(onnxruntime.InferenceSession(model, settings, providers=[provider]), CUDA)

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        return self._pages().export(group, ids)

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        self._pages().import_(group, ids, pages)

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self._pages().copy(src, dst)

    def _pages(self) -> DevicePool:
        assert self._pool is not None
        return self._pool

    def close(self) -> None:
        self._pool = None
        self._loaded.clear()
