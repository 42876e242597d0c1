"""An opened execution provider: weights, pages, and compiling Programs to ONNX models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trivium.ops import KVSpec, Program, Weight
from trivium.plugin import Executable, Kernel, Memory, Pages, Session, Tensor, announce_fallbacks, select_kernels
from trivium.plugin.hostinfo import available_memory, total_memory
from trivium_onnxruntime.executable import OnnxExecutable
from trivium_onnxruntime.formats import Resident, load
from trivium_onnxruntime.graph import Common
from trivium_onnxruntime.pages import Pool, page_bytes
from trivium_onnxruntime.providers import CPU, taken

if TYPE_CHECKING:
    import onnxruntime

F32 = npt.NDArray[np.float32]


class OnnxSession(Session):
    """See plugin.Session. `options`: those of OnnxBackend.open, checked."""

    def __init__(self, kernels: Sequence[Kernel], options: Mapping[str, Any]) -> None:
        self._kernels = kernels
        self._options = options
        self._loaded: dict[Any, tuple[Resident, Weight]] = {}
        self._spec = KVSpec(16, "float32", ())
        self._pool: Pool | None = None
        self._executables: list[OnnxExecutable] = []
        self._values: list[Mapping[str, Any]] = []

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        return np.array(array, np.float32 if np.issubdtype(array.dtype, np.floating) else array.dtype)

    def get(self, tensor: Tensor) -> npt.NDArray[Any]:
        return tensor.numbers() if isinstance(tensor, Resident) else np.asarray(tensor)

    def load(self, weight: Weight, format: str) -> Tensor:
        """Rearranges or rounds a weight, once: the same memory loaded twice in one format (tied embeddings) is kept once."""
        key = (weight.origin or weight.data.__array_interface__["data"][0], weight.nbytes, weight.shape, weight.format, format)
        if key not in self._loaded:
            self._loaded[key] = load(weight, format), weight  # the weight keeps its memory, so that the address stays its own
        return self._loaded[key][0]

    def read_weight(self, tensor: Tensor) -> F32:
        return tensor.numbers() if isinstance(tensor, Resident) else np.asarray(tensor, np.float32)

    def assign(self, tensor: Tensor, index: int, array: F32) -> None:
        tensor.array[index] = array

    def page_bytes(self, spec: KVSpec) -> int:
        return page_bytes(spec)

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        self._pool = Pool(spec, pages)
        self._spec = spec

    def memory(self) -> Memory:
        """The rows of the running sequences count as keys and values; what onnxruntime packs for itself is not known."""
        weights = sum(resident.nbytes for resident, _ in self._loaded.values())
        kv = sum(e.rows.nbytes for e in self._executables) + (self._pool.nbytes if self._pool else 0)
        return Memory(total_memory(), available_memory(), weights, kv)

    def compile(self, program: Program, weights: Mapping[str, Tensor]) -> Executable:
        choices = select_kernels(program, self._kernels)
        missing = [(c.call.name, "; ".join(r for _, r in c.refused) or "no kernel") for c in choices if c.kernel is None]
        announce_fallbacks("onnxruntime", missing, strict=bool(self._options.get("strict")))
        positions = (self._options.get("max_model_len") or 8192) + (self._options.get("max_batched_tokens") or 512)
        common = Common(program, weights, self._spec, positions=positions, accuracy=int(self._options.get("accuracy_level", 4)))
        budget = self._options.get("rows_bytes") or (self._pool.nbytes if self._pool else 0)
        made = OnnxExecutable(self, common, choices, self._pool, budget, self._open)
        self._executables.append(made)
        return made

    def _open(self, model: bytes, weights: Mapping[str, npt.NDArray[Any]]) -> onnxruntime.InferenceSession:
        """An InferenceSession whose weights lie where they were loaded."""
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = self._options["threads"]
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        settings.enable_cpu_mem_arena = bool(self._options.get("arena", True))
        settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(self._options.get("spinning", True))))
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in weights.items()}
        settings.add_external_initializers(list(values), list(values.values()))
        self._values.append(values)  # which keep the memory that the model reads
        return taken(onnxruntime.InferenceSession(model, settings, providers=[CPU]), CPU)

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        return self._pages().export(group, ids)

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        self._pages().import_(group, ids, pages)

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self._pages().copy(src, dst)

    def _pages(self) -> Pool:
        assert self._pool is not None
        return self._pool

    def close(self) -> None:
        self._pool = None
        self._executables.clear()
        self._values.clear()
        self._loaded.clear()
