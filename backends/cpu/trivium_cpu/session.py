"""An opened CPU: packed weights, the page pool, and compiling Programs to the tape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trivium.errors import CapacityError, UnsupportedError
from trivium.ops import Group, KVSpec, LatentKV, PagedKV, Program, Recurrent, StateSpec, Weight
from trivium.plugin import Executable, Kernel, Memory, Pages, Session, Tensor, announce_fallbacks, select_kernels
from trivium.plugin.hostinfo import available_memory, total_memory
from trivium_cpu import _native, numbers
from trivium_cpu.early_rows import gather_early
from trivium_cpu.executable import TapeExecutable
from trivium_cpu.formats import STORAGES
from trivium_cpu.lowering import Lowering, Resident

if TYPE_CHECKING:
    from trivium_cpu.weight_cache import WeightCache

_FLOATS = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}
_LINE = 64


class CpuSession(Session):
    """See plugin.Session. `options`: those of CpuBackend.open, checked."""

    def __init__(self, kernels: Sequence[Kernel], runtime: Any, options: Mapping[str, Any]) -> None:
        self._kernels = kernels
        self._runtime = runtime
        self._options = options
        self._spec = KVSpec(16, "float32", ())
        self._pool: Any = None
        self._offsets: dict[int, tuple[int, int]] = {}
        self._layers: dict[int, Any] = {}
        self._loaded: dict[Any, tuple[Resident, Weight]] = {}
        self._weight_bytes = 0
        self._cache: WeightCache | None = None
        self._reading: list[tuple[Path, Any, Weight, str, Any]] = []

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        return np.array(array, np.float32 if np.issubdtype(array.dtype, np.floating) else array.dtype)

    def get(self, tensor: Tensor) -> npt.NDArray[Any]:
        return self.read_weight(tensor) if isinstance(tensor, Resident) else np.asarray(tensor)

    def load(self, weight: Weight, format: str) -> Tensor:
        """Packs a weight, once: one of the same origin, or the same memory, that is loaded twice in one format (tied embeddings) is
        kept once. What lies in a mapped file and is only rearranged is packed in the background, to the end of compile()."""
        key = (weight.origin or weight.data.__array_interface__["data"][0], weight.nbytes, weight.shape, weight.format, format)
        if key not in self._loaded:
            resident = self._load(weight, format)
            self._loaded[key] = resident, weight  # the weight keeps its memory, so that the address stays its own
            self._weight_bytes += resident.nbytes
        return self._loaded[key][0]

    def _load(self, weight: Weight, format: str) -> Resident:
        if len(weight.shape) < 2 or (len(weight.shape) > 2 and format == "float32"):
            return Resident(weight.shape, array=np.array(weight.decode(), np.float32))
        rounds = weight.origin and not _native.linear.is_lossless(format, _storage(weight))
        cache = self._open_cache() if rounds else None
        return Resident(weight.shape, matrix=self._pack(weight, format) if cache is None else self._keep(cache, weight, format))

    def _keep(self, cache: WeightCache, weight: Weight, format: str) -> Any:
        """The packed weight, which is being read if it was rounded before."""
        path = cache.path(weight.origin, weight.shape, weight.format, format)
        if not path.exists():
            matrix = self._pack(weight, format)
            cache.write(path, matrix.packed)
            return matrix
        matrix = self._runtime.allocate(format, _storage(weight), math.prod(weight.shape[:-1]), weight.shape[-1])
        self._reading.append((path, self._runtime.read(matrix, str(path)), weight, format, matrix))
        return matrix

    def _pack(self, weight: Weight, format: str) -> Any:
        storage = _storage(weight)
        data = weight.data if storage == weight.format else weight.decode()
        if storage in _FLOATS:
            data = np.ascontiguousarray(data).view(_FLOATS[storage])
        rows = np.ascontiguousarray(data).reshape(math.prod(weight.shape[:-1]), -1).view(np.uint8)
        try:
            return self._runtime.pack(format, storage, weight.shape[-1], rows, _is_mapped(rows))
        except ValueError as e:
            raise UnsupportedError(f"{weight.name} ({weight.format}) can't be held as {format}: {e}") from e

    def _open_cache(self) -> WeightCache | None:
        """The cache that the option `weight_cache` asks for. A start that rounds nothing doesn't import it."""
        where = self._options.get("weight_cache", True)
        if self._cache is None and where is not False:
            from trivium_cpu.weight_cache import WeightCache, default_folder

            build = Path(_native.__file__).stat()
            folder = default_folder() if where is True else Path(where).expanduser()
            self._cache = WeightCache(folder, (build.st_size, build.st_mtime_ns))
        return self._cache

    def _finish_loading(self) -> None:
        """Waits until every weight is where it belongs; what was kept and is damaged is rounded again."""
        self._runtime.finish_packing()
        if self._cache is None:
            return
        for path, read, weight, format, matrix in self._reading:
            if not self._cache.is_whole(read, matrix.nbytes):
                import logging

                message = "%s, which keeps the rounded %s, is damaged; it is made again"
                logging.getLogger(__name__).warning(message, path, weight.name)
                matrix.packed[:] = self._pack(weight, format).packed
                self._cache.write(path, matrix.packed)
        self._reading.clear()
        self._cache.make_room()

    def _unpack(self, matrix: Any) -> npt.NDArray[np.float32]:
        """float32[out, in]: the numbers that a matrix holds."""
        self._finish_loading()
        return np.asarray(self._runtime.unpack(matrix))

    def read_weight(self, tensor: Tensor) -> npt.NDArray[np.float32]:
        if not isinstance(tensor, Resident):
            return np.asarray(tensor, np.float32)
        array = tensor.array if tensor.array is not None else self._unpack(tensor.matrix)
        return array.reshape(tensor.shape)

    def assign(self, tensor: Tensor, index: int, array: npt.NDArray[np.float32]) -> None:
        tensor.array[index] = array

    def page_bytes(self, spec: KVSpec) -> int:
        return max((sum(_slot_bytes(spec, g) for _ in g.states) for g in spec.groups), default=0)

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        each = self.page_bytes(spec)
        if pages * each > total_memory():
            raise CapacityError(f"{pages} pages of {each} bytes need {pages * each} bytes; there are {total_memory()}")
        try:
            self._pool = _native.KvPool(pages, max(each, _LINE), spec.page_size)
        except MemoryError as e:
            raise CapacityError(f"{pages} pages of {each} bytes can't be allocated") from e
        self._spec = spec
        for g, group in enumerate(spec.groups):
            for slot, state in enumerate(group.states):
                offset = slot * _slot_bytes(spec, group)
                self._offsets[state] = g, offset
                self._layers[state] = _layer(spec, group.spec, g, offset)

    def memory(self) -> Memory:
        kv = 0 if self._pool is None else self._pool.view().nbytes
        return Memory(total_memory(), available_memory(), self._weight_bytes, kv)

    def compile(self, program: Program, weights: Mapping[str, Tensor]) -> Executable:
        program = gather_early(program)
        choices = select_kernels(program, self._kernels)
        missing = [(c.call.name, "; ".join(r for _, r in c.refused) or "no kernel") for c in choices if c.kernel is None]
        announce_fallbacks("cpu", missing, strict=bool(self._options.get("strict")))
        low = Lowering(
            self._runtime, program, weights, spec=self._spec, layers=self._layers, pool=self._pool,
            unpack=self._unpack, threads=self._runtime.threads, max_model_len=self._options.get("max_model_len") or 8192,
        )  # fmt: skip
        low.run(choices)
        self._finish_loading()
        tokens, seqs = self._options.get("max_batched_tokens") or 512, self._options.get("max_seqs") or 64
        try:
            low.set_arenas(tokens, seqs)
        except MemoryError as e:
            message = f"a step of {tokens} tokens of {seqs} sequences is too large; lower max_num_batched_tokens or max_num_seqs"
            raise CapacityError(message) from e
        executable = TapeExecutable(self, low)
        if self._options.get("profile"):
            executable.profile(True)
        return executable

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        which = self._spec.groups[group]
        tensors = tuple(self._export(which, state, list(ids)) for state in which.states)
        return Pages(which, self._spec.page_size, self._spec.dtype, tensors)

    def _export(self, group: Group, state: int, ids: list[int]) -> tuple[npt.NDArray[np.float32], ...]:
        if isinstance(group.spec, PagedKV):
            k, v = self._pool.export_kv(self._runtime, self._layers[state], ids)
            return np.asarray(k), np.asarray(v)
        return tuple(numbers.decode(raw, dtype, shape) for raw, dtype, shape in self._plain_parts(group, state, ids))

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        which = self._spec.groups[group]
        for state, tensors in zip(which.states, pages.tensors, strict=True):
            self._import(which, state, list(ids), tensors)

    def _import(self, group: Group, state: int, ids: list[int], tensors: Sequence[npt.NDArray[np.float32]]) -> None:
        arrays = [np.ascontiguousarray(t, np.float32) for t in tensors]
        if isinstance(group.spec, PagedKV):
            self._pool.import_kv(self._runtime, self._layers[state], ids, *arrays)
            return
        view, at = self._pool.view(), self._offsets[state][1]
        for array, (dtype, shape) in zip(arrays, _plain_layout(self._spec, group), strict=True):
            raw = numbers.encode(array.reshape(len(ids), *shape), dtype)
            view[ids, at : at + raw.shape[1]] = raw
            at += numbers.nbytes(dtype, shape)

    def _plain_parts(self, group: Group, state: int, ids: list[int]) -> list[tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]]:
        """(bytes[ids, n], dtype, shape) of each array of a state that lies in a page as it is."""
        view, at, parts = self._pool.view(), self._offsets[state][1], []
        for dtype, shape in _plain_layout(self._spec, group):
            size = numbers.nbytes(dtype, shape)
            parts.append((view[ids, at : at + size], dtype, shape))
            at += size
        return parts

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self._pool.copy(list(src), list(dst))

    def close(self) -> None:
        self._pool = None
        self._runtime.forget_pages()
        self._layers.clear()
        self._loaded.clear()


def _layer(spec: KVSpec, state: StateSpec, group: int, offset: int) -> Any:
    """Where a state lies; of a recurrent one only that."""
    if isinstance(state, PagedKV):
        return _native.KvLayer(group, offset, spec.dtype, spec.page_size, state.kv_heads, state.head_dim)
    if isinstance(state, LatentKV):
        return _native.KvLayer(group, offset, spec.dtype, spec.page_size, 1, state.rank + state.rope_dim, state.rank)
    return _native.KvLayer(group, offset, "float32", spec.page_size, 0, 0)


def _storage(weight: Weight) -> str:
    """How a weight is handed to the packer: as it is stored, or decoded."""
    return weight.format if weight.format in STORAGES else "float32"


def _is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether the array is a view of a file's read-only map."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return isinstance(base, np.memmap) and base.mode == "r"


def _slot_bytes(spec: KVSpec, group: Group) -> int:
    """Bytes of one layer in a page, whole cache lines."""
    if isinstance(group.spec, PagedKV):
        size = int(_layer(spec, group.spec, 0, 0).nbytes)
    else:
        size = sum(numbers.nbytes(dtype, shape) for dtype, shape in _plain_layout(spec, group))
    return -(-size // _LINE) * _LINE


def _plain_layout(spec: KVSpec, group: Group) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(dtype, shape in a page) of the arrays of a state whose layout is the neutral one."""
    dtype = "float32" if isinstance(group.spec, Recurrent) else spec.dtype
    return tuple((dtype, shape) for shape in group.spec.page_shapes(spec.page_size))
