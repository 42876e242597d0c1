"""Between the host's arrays and the device: one page-locked block and one copy a step, in each direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.ops import Batch
from trivium_cuda.device import DeviceApi, Event

Array = npt.NDArray[Any]
ALIGNMENT = 16
"""Bytes; kernels may assume that an array begins at a multiple of it."""
SMALLEST = 1 << 12

_TORCH = {
    np.dtype(name): getattr(torch, name)
    for name in ("int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
}
_TORCH |= {np.dtype("uint32"): torch.int32, np.dtype("uint64"): torch.int64}  # bit patterns: torch computes little with these


class Pinned:
    """Page-locked blocks, used again as soon as the device has done with them."""

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self._free: list[Tensor] = []
        self._busy: deque[tuple[Event, Tensor]] = deque()

    def take(self, nbytes: int) -> Tensor:
        """uint8[at least nbytes] that nobody uses."""
        while self._busy and self._busy[0][0].done():
            self._free.append(self._busy.popleft()[1])
        fitting = [i for i, block in enumerate(self._free) if len(block) >= nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        return self._api.pinned(max(SMALLEST, 1 << (nbytes - 1).bit_length()))

    def give(self, block: Tensor) -> None:
        """Nothing that is queued uses the block any more."""
        self._free.append(block)

    def give_after(self, event: Event, block: Tensor) -> None:
        """What is queued up to `event` may still use the block."""
        self._busy.append((event, block))


class Field(NamedTuple):
    """Where an array lies in a block."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Layout:
    """Arrays in one block of memory. `shapes`: (shape, dtype) by name."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self.fields: dict[str, Field] = {}
        at = 0
        for name, (shape, dtype) in shapes.items():
            stop = at + int(np.prod(shape)) * dtype.itemsize
            self.fields[name] = Field(at, stop, shape, dtype)
            at = -(-stop // ALIGNMENT) * ALIGNMENT
        self.nbytes = max(at, ALIGNMENT)

    def on_host(self, block: Tensor) -> dict[str, Array]:
        """The arrays in page-locked memory, to be written."""
        memory = block.numpy()
        return {name: memory[f.start : f.stop].view(f.dtype).reshape(f.shape) for name, f in self.fields.items()}

    def on_device(self, block: Tensor) -> dict[str, Tensor]:
        """The arrays as tensors; unsigned ones as the signed integers of their bits."""
        return {name: block[f.start : f.stop].view(_TORCH[f.dtype]).view(f.shape) for name, f in self.fields.items()}


_ARRAYS = (
    "token_ids", "positions", "query_starts", "context_lens", "block_tables", "slot_mapping", "sample_rows", "pool_rows",
    "adapters",
)  # fmt: skip
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "position", "repetition", "presence", "frequency", "score_ids",
)  # fmt: skip
"""Columns of SampleInputs that the sampler reads on the device, a number a sampled row."""


def arrays_of(batch: Batch) -> dict[str, Array]:
    """The arrays of a step by name; columns of its sampling as "sampling.NAME"."""
    sampling = {f"sampling.{name}": getattr(batch.sampling, name) for name in SAMPLING}
    return {**{name: getattr(batch, name) for name in _ARRAYS}, **sampling}


def upload(api: DeviceApi, pinned: Pinned, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """All arrays on the device, by one copy that is queued."""
    layout = Layout({name: (array.shape, array.dtype) for name, array in arrays.items()})
    block = pinned.take(layout.nbytes)
    for name, place in layout.on_host(block).items():
        place[...] = arrays[name]
    target = torch.empty(layout.nbytes, dtype=torch.uint8, device=api.device)
    api.copy(target, block[: layout.nbytes])
    pinned.give_after(api.record(), block)
    return layout.on_device(target)


class Download:
    """A copy to the host that is queued; `tensor`: any dtype but bfloat16."""

    def __init__(self, api: DeviceApi, pinned: Pinned, tensor: Tensor) -> None:
        source = tensor.contiguous()
        self._pinned, self._block = pinned, pinned.take(source.nbytes)
        self._place = self._block[: source.nbytes].view(source.dtype).view(source.shape)
        if source.nbytes:
            api.copy(self._place, source)
        self._event = api.record()

    def wait(self) -> Array:
        """The numbers, once; a fault of the device is raised here."""
        self._event.wait()
        array: Array = self._place.numpy().copy()
        self._pinned.give(self._block)
        return array
