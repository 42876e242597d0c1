"""An opened torch device: weights, the page pool, and the eager loop over kernels. What a vendor may want otherwise is a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import CapacityError, UnsupportedError
from trivium.ops import Batch, KVSpec, PagedKV, Pages, Program, StateSpec, Weight
from trivium.plugin import EagerExecutable, Executable, Kernel, Memory, Session, Step
from trivium_torch import collectives, devices
from trivium_torch.formats import FORMATS
from trivium_torch.pages import Carried, GroupStep, Layer, Paged, page_bytes
from trivium_torch.weights import Resident, make_resident


class TorchExecutable(EagerExecutable):
    """The eager loop, without autograd."""

    def __init__(self, session: TorchSession, program: Program, weights: Mapping[str, Any]) -> None:
        super().__init__(session, program, weights, session.kernels, session.spec, backend=session.backend, strict=session.strict)
        self._torch_session = session

    def run(self, batch: Batch) -> Step:
        with torch.inference_mode():
            self._torch_session.begin_step()
            return super().run(batch)


class TorchSession(Session):
    """See plugin.Session. For subclasses: upload, allocate, memory_info, synchronize, draws,
    make_weight, make_layer, kv_store, compile.

    backend: its name; device: torch's name; options: those of open(), with a definite "dtype".
    """

    def __init__(self, backend: str, device: str, kernels: Sequence[Kernel], options: Mapping[str, Any]) -> None:
        self.backend = backend
        self.device = torch.device(device)
        self.kernels = kernels
        self.options = options
        self.dtype: torch.dtype = getattr(torch, options["dtype"])
        self.strict = bool(options.get("strict"))
        self.invariant = self.device.type == "cpu" and self.dtype != torch.float32
        """Whether kernels see to it that a row's bits don't depend on how many rows are computed together. In float32 such
        differences are far below what decides a token; in less they are not, and a host's library keeps them out if it has one
        thread and is never given fewer than four rows."""
        self.team = collectives.EVERYONE
        """The ranks that it meets in collectives."""
        self.spec = KVSpec(16, "float32", ())
        self._layers: dict[tuple[int, StateSpec], Layer] = {}
        self._places: tuple[tuple[int, Layer], ...] = ()
        self._loaded: dict[Any, tuple[Resident, Weight]] = {}
        self._weight_bytes = self._kv_bytes = self._pages = 0
        self._steps: dict[Any, Any] = {}

    # What differs from device to device.

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy of a host array on the device."""
        return torch.tensor(array).to(self.device)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros on the device: memory of the page pool."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        return devices.memory_info(self.device)

    def synchronize(self) -> None:
        """Waits until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def draws(self) -> bool:
        """Whether tokens are drawn on the device rather than by the reference. It needs IEEE float32 and 64-bit whole numbers; the
        host itself is quicker without, for torch can only sort all of a vocabulary."""
        return self.device.type not in ("cpu", "mps")

    def make_weight(self, weight: Weight, format: str) -> Resident:
        """A weight in one of the formats that the backend declares."""
        if format not in [f.name for f in FORMATS]:
            raise UnsupportedError(f"{weight.name} can't be held as {format} on {self.backend}", param="quantize")
        return make_resident(weight, format, self.device)

    def compile(self, program: Program, weights: Mapping[str, Any]) -> Executable:
        return TorchExecutable(self, program, weights)

    # Arrays and weights.

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = self.upload(array)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def get(self, tensor: Any) -> npt.NDArray[Any]:
        if not isinstance(tensor, Tensor):
            return self.read_weight(tensor)
        return np.array(tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype).numpy())

    def load(self, weight: Weight, format: str) -> Resident:
        """The same matrix loaded twice in one format (tied embeddings) is kept once."""
        key = (weight.origin or weight.data.__array_interface__["data"][0], weight.nbytes, weight.shape, weight.format, format)
        if key in self._loaded:
            return self._loaded[key][0]
        resident = self.make_weight(weight, format)
        self._weight_bytes += resident.nbytes
        if len(weight.shape) == 2:
            self._loaded[key] = resident, weight  # the weight keeps its memory, so that the address stays its own
        return resident

    def read_weight(self, tensor: Resident) -> npt.NDArray[np.float32]:
        return np.array(tensor.to(torch.float32).cpu().numpy())

    def assign(self, tensor: Tensor, index: int, array: npt.NDArray[np.float32]) -> None:
        tensor[index].copy_(self.upload(array))

    def memory(self) -> Memory:
        free, total = self.memory_info()
        return Memory(total, free, self._weight_bytes, self._kv_bytes)

    # Pages.

    def page_bytes(self, spec: KVSpec) -> int:
        """Layers of equal geometry share their memory, in whichever group they are; unequal ones each have their own."""
        return sum(self.state_bytes(state, spec) for _, state in _geometries(spec))

    def state_bytes(self, state: StateSpec, spec: KVSpec) -> int:
        """Bytes of a page in one layer slot."""
        return page_bytes(state, spec.page_size, spec.dtype)

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        need, (free, total) = pages * self.page_bytes(spec), self.memory_info()
        room = total if self.device.type == "cpu" else free
        message = f"{pages} pages of {self.page_bytes(spec)} bytes need {need} bytes; there are {room}"
        if room and need > room:
            raise CapacityError(message)
        self.spec, self._pages = spec, pages
        try:
            for slot, state in _geometries(spec):
                self._layers[slot, state] = self.make_layer(state)
        except (RuntimeError, MemoryError) as e:  # torch's own refusal is a RuntimeError
            self._layers.clear()
            raise CapacityError(message) from e
        placed = (spec.group_of(i) for i in range(sum(len(g.states) for g in spec.groups)))
        self._places = tuple((group, self._layer(group, slot)) for group, slot in placed)
        self._kv_bytes = sum(t.nbytes for layer in self._layers.values() for t in layer.tensors())

    def drop_pages(self) -> None:
        """Gives back what kv_store() took."""
        self._layers.clear()
        self._steps.clear()
        self._places, self._pages, self._kv_bytes = (), 0, 0

    def make_layer(self, state: StateSpec) -> Layer:
        """The memory of one layer slot, for the pages that kv_store() was asked for."""
        return Layer(state, self.spec.page_size, self.spec.dtype, self._pages, self.allocate)

    def _layer(self, group: int, slot: int) -> Layer:
        return self._layers[slot, _geometry(self.spec.groups[group].spec)]

    def page_ids(self, ids: Sequence[int]) -> Tensor:
        """Numbers of pages on the device: int64[pages]."""
        return self.upload(np.array(ids, np.int64))

    def layers_of(self, group: int) -> list[Layer]:
        """The memory of a group's layers, in their order."""
        return [self._layer(group, slot) for slot in range(len(self.spec.groups[group].states))]

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        which, at = self.spec.groups[group], self.page_ids(ids)
        layers = (layer.read(at) for layer in self.layers_of(group))
        return Pages(which, self.spec.page_size, self.spec.dtype, tuple(tuple(self.get(t) for t in layer) for layer in layers))

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        at = self.page_ids(ids)
        for layer, tensors in zip(self.layers_of(group), pages.tensors, strict=True):
            layer.write(at, tuple(self.upload(np.asarray(t, np.float32)) for t in tensors))

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        a, b = self.page_ids(src), self.page_ids(dst)
        for tensor in (t for layer in self._layers.values() for t in layer.tensors()):
            tensor[:, b] = tensor[:, a]

    # Steps.

    def begin_step(self) -> None:
        """Forgets what was worked out for the step before."""
        self._steps.clear()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once a step: for what all layers need alike."""
        if key not in self._steps:
            self._steps[key] = make()
        return self._steps[key]

    def step_state(self, state: int, batch: Batch) -> Paged | Carried:
        group, layer = self._places[state]
        step = self.once(("group", group), lambda: GroupStep.of(batch, group, self.spec.page_size, self._pages, self.upload))
        return Paged(layer.stores[0], layer.stores[1], step) if layer.data is None else Carried(layer.data, step)

    def close(self) -> None:
        self._layers.clear()
        self._loaded.clear()
        self._steps.clear()
        self._places = ()

    # Collectives.

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return collectives.all_reduce(tensor, self.team)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return collectives.all_gather(tensor, dim, self.team)

    def send(self, tensor: Tensor, rank: int) -> None:
        collectives.send(tensor, rank, self.team)

    def recv(self, like: Tensor, rank: int) -> Tensor:
        return collectives.recv(like, rank, self.team)


def _geometries(spec: KVSpec) -> list[tuple[int, StateSpec]]:
    places = ((slot, _geometry(group.spec)) for group in spec.groups for slot in range(len(group.states)))
    return list(dict.fromkeys(places))


def _geometry(spec: StateSpec) -> StateSpec:
    """Layers that differ only in their window lie in the same memory."""
    return dataclasses.replace(spec, window=None) if isinstance(spec, PagedKV) else spec
