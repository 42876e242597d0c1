"""A whole plugin as a stranger writes it on the first day: three kernels on a tensor type that the core can't look into.

It imports trivium.plugin, trivium.ops and trivium.errors only. Everything but the three operators runs on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trivium.errors import CapacityError, InvalidRequestError
from trivium.plugin import (
    API_VERSION, Backend, Capabilities, Device, EagerExecutable, Kernel, Memory, Pages, Probe, Session, WeightFormat, hookimpl,
)  # fmt: skip

TOTAL = 1 << 32
OPTIONS = {"dtype", "max_batched_tokens", "max_seqs", "max_model_len", "strict"}


class Slab:
    """Device memory. Anything but handing it around is an error."""

    __slots__ = ("_cells",)
    __array_ufunc__ = None

    def __init__(self, cells: Any) -> None:
        self._cells = cells

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("a Slab is on the device; use Session.get")

    __array__ = __len__ = __iter__ = __getitem__ = __bool__ = __float__ = __add__ = __eq__ = __repr__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Slab:
        raise TypeError("a Slab can't be copied by the host")


def linear(session: Any, args: Any, attrs: Any) -> Slab:
    x, w, bias = (None if a is None else a._cells for a in args)
    return Slab(x @ w.T if bias is None else x @ w.T + bias)


def add(session: Any, args: Any, attrs: Any) -> Slab:
    return Slab(args[0]._cells + args[1]._cells)


def rms_norm(session: Any, args: Any, attrs: Any) -> Slab:
    x, w = (None if a is None else a._cells for a in args)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(attrs["eps"]))
    return Slab(y if w is None else y * (np.float32(attrs["offset"]) + w))


class ChipSession(Session):
    """The pool is a dictionary of (page, layer slot)."""

    cell = np.float32

    def __init__(self, kernels: Any, options: Any) -> None:
        self.kernels, self.options = kernels, options
        self.pool: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.spec: Any = None
        self.kv_bytes = self.weight_bytes = 0

    def put(self, array: Any) -> Slab:
        return Slab(np.array(array))

    def get(self, tensor: Slab) -> Any:
        return tensor._cells.copy()

    def load(self, weight: Any, format: str) -> Slab:
        self.weight_bytes += 4 * int(np.prod(weight.shape))
        return Slab(weight.decode())

    def read_weight(self, tensor: Slab) -> Any:
        return self.get(tensor)

    def page_bytes(self, spec: Any) -> int:
        sizes = [len(g.states) * sum(int(np.prod(s)) for s in g.spec.page_shapes(spec.page_size)) for g in spec.groups]
        return max(sizes) * np.dtype(self.cell).itemsize

    def kv_store(self, spec: Any, pages: int) -> None:
        self.spec, self.kv_bytes = spec, pages * self.page_bytes(spec)
        if self.kv_bytes > TOTAL:
            raise CapacityError(f"{pages} pages need {self.kv_bytes} bytes; the chip has {TOTAL}")

    def memory(self) -> Memory:
        return Memory(TOTAL, TOTAL - self.kv_bytes - self.weight_bytes, self.weight_bytes, self.kv_bytes)

    def compile(self, program: Any, weights: Any) -> Any:
        strict = bool(self.options.get("strict"))
        return EagerExecutable(self, program, weights, self.kernels, self.spec, backend="dayone", strict=strict)

    def export_pages(self, group: int, ids: Any) -> Pages:
        which, size = self.spec.groups[group], self.spec.page_size
        shapes = which.spec.page_shapes(size)

        def column(slot: int, part: int) -> Any:
            cells = np.zeros((len(ids), *shapes[part]), np.float32)
            for row, page in enumerate(ids):
                held = self.pool.get((page, slot))
                if held is not None and held[part].shape == shapes[part]:
                    cells[row] = held[part]
            cells.flags.writeable = False
            return cells

        tensors = tuple(tuple(column(slot, part) for part in range(len(shapes))) for slot in range(len(which.states)))
        return Pages(which, size, self.spec.dtype, tensors)

    def import_pages(self, group: int, ids: Any, pages: Pages) -> None:
        for slot, tensors in enumerate(pages.tensors):
            for row, page in enumerate(ids):
                self.pool[page, slot] = tuple(np.array(t[row], self.cell) for t in tensors)

    def copy_pages(self, src: Any, dst: Any) -> None:
        copies = {(b, slot): held for a, b in zip(src, dst) for (page, slot), held in self.pool.items() if page == a}
        self.pool.update(copies)

    def close(self) -> None:
        self.pool.clear()


class DayOne(Backend):
    name = "dayone"
    api_version = API_VERSION
    version = "0.1"
    priority = -300

    def probe(self) -> Probe:
        return Probe((Device(0, "fake chip", TOTAL),))

    def capabilities(self, device: Device) -> Capabilities:
        plain = WeightFormat("float32", 32.0, frozenset({"float32", "float16", "bfloat16"}))
        return Capabilities(dtypes=("float32",), weight_formats=(plain,), kv_dtypes=("float32",))

    def kernels(self, device: Device) -> list[Kernel]:
        return [Kernel("linear", linear), Kernel("add", add), Kernel("rms_norm", rms_norm)]

    def open(self, device: Device, options: Any) -> Session:
        if options.keys() - OPTIONS:
            raise InvalidRequestError(f"{self.name} has no option {', '.join(options.keys() - OPTIONS)}")
        return ChipSession(self.kernels(device), options)


@hookimpl
def trivium_backend() -> Backend:
    return DayOne()
