"""An opened device of torch.cuda: asynchronous copies, the arrays of a step on the device, and faults that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import BackendError, CapacityError, UnsupportedError
from trivium.ops import Batch, KVSpec, Pages, Program, Weight
from trivium.plugin import Executable, Kernel
from trivium_cuda import transfer
from trivium_cuda.device import DeviceApi
from trivium_cuda.formats import has_triton_kernels, weight_formats
from trivium_cuda.staging import Download, Pinned, arrays_of, upload
from trivium_torch.pages import Carried, Paged
from trivium_torch.session import TorchSession
from trivium_torch.weights import make_resident

if TYPE_CHECKING:
    from trivium_cuda.executor import QueuedExecutable
    from trivium_cuda.tuning import Tuned

LARGE = 1 << 24
"""Bytes from which an array is copied at once, without a page-locked block in between that would stay."""
GRAPH_SHARE = 20
"""Captured graphs may take a part of the device's memory as small as this unless the option graph_memory says otherwise."""


@dataclass(frozen=True)
class Reads:
    """What the sequences of a step read and write in one group of layers, on the device.

    block_tables: int32[seqs, blocks]; slots: int64[tokens]; query_starts: int32[seqs + 1]; context_lens: int32[seqs]. max_query and
    max_context: of the step's sequences, known to the host; in a graph, the most that it may be replayed with."""

    block_tables: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    max_query: int
    max_context: int


@dataclass(frozen=True)
class DevicePaged(Paged):
    """A paged state, as trivium_torch's kernels get it and with `reads` for this backend's. page_size: tokens."""

    reads: Reads
    page_size: int


@dataclass(frozen=True)
class DeviceCarried(Carried):
    """A recurrent state, as trivium_torch's kernels get it and with `reads` for this backend's."""

    reads: Reads


class CudaSession(TorchSession):
    """See plugin.Session. `options`: those of CudaBackend.open, checked."""

    def __init__(self, api: DeviceApi, backend: str, kernels: Sequence[Kernel], options: Mapping[str, Any]) -> None:
        super().__init__(backend, str(api.device), kernels, options)
        self.api = api
        self.invariant = False
        self.tuned: Tuned | None = None
        """Tiles that were timed, with the option autotune."""
        self.batch_invariant: bool = options.get("batch_invariant", False)
        self.has_triton = has_triton_kernels(api.capability)
        self.chip = 10 * api.capability[0] + api.capability[1]
        self.capturing = False
        """Whether what runs is to become part of a graph: nothing may then come from the host."""
        self.pinned = Pinned(api)
        self.page_blocks = Pinned(api)
        """Those of pages, whose copies are beside the steps and take longer."""
        self.arrays: Mapping[str, Tensor] = {}
        """The arrays of the step that runs, on the device."""
        self._extents = (0, 0)
        self.eager: QueuedExecutable | None = None
        """What was made to measure a step, until it is compiled."""
        sizes, total = options.get("graph_sizes", ()), api.memory_info()[1]
        self.graph_sizes: Sequence[int] = tuple(sizes)
        self.graph_memory: int = options.get("graph_memory", total // GRAPH_SHARE) if sizes else 0
        self.graph_queries: int = options.get("graph_queries", 1)
        """Most tokens of a sequence in a step that is captured."""
        self._graphs_to_come = self.graph_memory

    # Copies.

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        if self.capturing:
            raise UnsupportedError("it takes numbers from the host, which a graph can't")
        array = np.asarray(array)
        if array.nbytes > LARGE or not array.nbytes or array.dtype.kind == "u":
            return super().upload(array)
        return upload(self.api, self.pinned, {"": array})[""]

    def upload_all(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        """Copies on the device, by one copy that is queued; unsigned numbers as the signed ones of their bits."""
        return upload(self.api, self.pinned, arrays)

    def download(self, tensor: Tensor) -> Download:
        """A queued copy to the host."""
        return Download(self.api, self.pinned, tensor)

    # Weights.

    def make_weight(self, weight: Weight, format: str) -> Any:
        if format not in {f.name for f in weight_formats(self.api.capability)}:
            raise UnsupportedError(f"{weight.name} can't be held as {format} on {self.api.name}", param="quantize")
        if not self.has_triton:
            return make_resident(weight, format, self.device)
        from trivium_cuda.weights import make

        return make(weight, format, self.device)

    # Memory.

    def memory_info(self) -> tuple[int, int]:
        """What graphs that are still to be captured may take is not free."""
        free, total = self.api.memory_info()
        return max(free - self._graphs_to_come, 0), total

    def graphs_are_captured(self) -> None:
        """From here on what graphs take is part of what the device says."""
        self._graphs_to_come = 0

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        need, (free, _) = pages * self.page_bytes(spec), self.memory_info()
        if need > free:
            raise CapacityError(f"{pages} pages of {self.page_bytes(spec)} bytes need {need} bytes; {free} are free")
        super().kv_store(spec, pages)

    def step_bytes(self, program: Program, weights: Mapping[str, Any], spec: KVSpec) -> int:
        from trivium_cuda.executor import step_bytes

        self.kv_store(spec, 1)
        try:
            return step_bytes(self, program, weights)
        finally:
            self.drop_pages()
            self.api.release()

    def start_export(self, group: int, ids: Sequence[int]) -> Callable[[], Pages]:
        with self._memory_for(f"taking {len(ids)} pages out"), self.api.active():
            return transfer.start_export(self, group, self.layers_of(group), ids)

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        return self.start_export(group, ids)()

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        with self._memory_for(f"bringing {len(ids)} pages in"), self.api.active():
            transfer.start_import(self, self.layers_of(group), ids, pages)

    def recurrent(self) -> list[Tensor]:
        """The states of all recurrent layers, float32[pages, *shape] each."""
        return [layer.data for layer in self._layers.values() if layer.data is not None]

    def synchronize(self) -> None:
        self.api.synchronize()

    def draws(self) -> bool:
        return True

    # Steps.

    def compile(self, program: Program, weights: Mapping[str, Any]) -> Executable:
        from trivium_cuda.executor import compile_program

        if where := self.options.get("autotune"):
            from trivium_cuda.tuning import tune

            self.tuned = tune(self, weights.values(), where)
        return compile_program(self, program, weights)

    def stage(self, batch: Batch) -> Mapping[str, Tensor]:
        """The arrays of a step on the device, by one copy."""
        return upload(self.api, self.pinned, arrays_of(batch))

    def begin(self, arrays: Mapping[str, Tensor], max_query: int, max_context: int) -> None:
        """The arrays that the states of the step that follows refer to; max_query, max_context: as in Reads."""
        self.begin_step()
        self.arrays, self._extents = arrays, (max_query, max_context)

    def step_state(self, state: int, batch: Batch) -> Paged | Carried:
        group, _ = self._places[state]
        plain = super().step_state(state, batch)
        reads = self.once(("reads", group), lambda: self._reads(group))
        if isinstance(plain, Paged):
            return DevicePaged(plain.k, plain.v, plain.step, reads, self.spec.page_size)
        return DeviceCarried(plain.data, plain.step, reads)

    def _reads(self, group: int) -> Reads:
        a = self.arrays
        return Reads(
            a["block_tables"][group], a["slot_mapping"][group], a["query_starts"], a["context_lens"], *self._extents
        )  # fmt: skip

    @contextlib.contextmanager
    def faults(self, tokens: int, seqs: int) -> Iterator[None]:
        """Around the work of a step of so many: turns the device's faults into errors that say what to do."""
        try:
            with self._memory_for(f"a step of {tokens} tokens in {seqs} sequences"):
                yield
        except RuntimeError as e:
            raise BackendError(f"backend {self.backend!r}: the device failed: {e}") from e

    @contextlib.contextmanager
    def _memory_for(self, what: str) -> Iterator[None]:
        """A lack of memory is CapacityError. After one the next step may succeed."""
        try:
            yield
        except torch.OutOfMemoryError as e:
            self.api.release()
            free, total = self.api.memory_info()
            needs = f"{what} needs more memory than is free, {free} of {total} bytes"
            raise CapacityError(f"{needs}; give less max_num_batched_tokens or num_kv_blocks") from e

    def close(self) -> None:
        self.arrays = {}
        super().close()
        self.api.release()
