"""abacus, a simulated accelerator: memory of its own, a queue, keys and values laid out for its kernels, int8 weights."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import CapacityError, InvalidRequestError, UnsupportedError
from trivium.ops import Batch, Call, KVSpec, PagedKV, Pages, Pattern, Program, Sampled, StateSpec, Weight
from trivium.plugin import (
    Backend, Capabilities, Device, EagerExecutable, Executable, Kernel, Memory, Probe, Session, Step, WeightFormat, hookimpl,
)  # fmt: skip

Array = npt.NDArray[Any]
OPTIONS = frozenset({"dtype", "max_batched_tokens", "max_seqs", "max_model_len", "strict"})
PLAIN = frozenset({"float32", "float16", "bfloat16"})
MEMORY = 2 << 30
PAGE = 32


class Beads:
    """A tensor in the chip's memory: the host can pass it on, and nothing else."""

    __slots__ = ("cells",)

    def __init__(self, cells: Array) -> None:
        self.cells = cells


class Rods:
    """A weight. float32: as it is. int8: whole numbers within ±127 and a scale for each row of the last dimension."""

    __slots__ = ("cells", "scales")

    def __init__(self, weight: Array, format: str) -> None:
        self.scales: Array | None = None
        self.cells = np.array(weight, np.float32)
        if format == "int8":
            size = np.abs(self.cells).max(axis=-1, keepdims=True) / np.float32(127)
            self.scales = np.where(size > 0, size, np.float32(1))
            self.cells = np.rint(self.cells / self.scales).astype(np.int8)

    @property
    def nbytes(self) -> int:
        return self.cells.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def plain(self) -> Array:
        return self.cells if self.scales is None else self.cells * self.scales

    def product(self, x: Array) -> Array:
        """x · weightᵀ, each row by itself, so that it does not depend on its neighbours; scales come last."""
        y = np.matmul(x[..., None, :], self.cells.T.astype(np.float32))[..., 0, :]
        return y if self.scales is None else y * self.scales[..., 0]


class Layer(NamedTuple):
    """A layer's keys [pages, heads, head_dim, 32], so that a query meets 32 tokens in one sweep, and values
    [pages, heads, 32, head_dim], with the step's tables."""

    keys: Array
    values: Array
    table: Array
    slots: Array


def linear(session: Any, args: Sequence[Any], attrs: Mapping[str, Any]) -> Beads:
    x, weight, bias = args
    y = weight.product(x.cells)
    return Beads(y if bias is None else y + bias.plain())


def add(session: Any, args: Sequence[Any], attrs: Mapping[str, Any]) -> Beads:
    return Beads(args[0].cells + args[1].cells)


def rms_norm(session: Any, args: Sequence[Any], attrs: Mapping[str, Any]) -> Beads:
    x, weight = args
    y = x.cells / np.sqrt(np.mean(x.cells * x.cells, axis=-1, keepdims=True) + np.float32(attrs["eps"]))
    return Beads(y if weight is None else y * (np.float32(attrs["offset"]) + weight.plain()))


def kv_write(session: Any, args: Sequence[Any], attrs: Mapping[str, Any]) -> Layer:
    layer, k, v = args
    kept = layer.slots >= 0
    page, offset = np.divmod(layer.slots[kept], PAGE)
    layer.keys[page, :, :, offset] = k.cells[kept]
    layer.values[page, :, offset] = v.cells[kept]
    return layer


def paged_attention(session: Any, args: Sequence[Any], attrs: Mapping[str, Any]) -> Beads:
    """One query at a time over whole pages; what it must not see counts as -inf."""
    q, layer, starts, contexts = args[0].cells, args[1], args[2].cells, args[3].cells
    out = np.empty((*q.shape[:2], layer.values.shape[-1]), np.float32)
    for seq, context in enumerate(contexts):
        for row in range(starts[seq], starts[seq + 1]):
            at = context - starts[seq + 1] + row
            first = 0 if attrs["window"] is None else max(0, at + 1 - attrs["window"])
            pages = layer.table[seq, first // PAGE : at // PAGE + 1]
            positions = np.arange(first // PAGE * PAGE, (at // PAGE + 1) * PAGE).reshape(-1, 1, 1, PAGE)
            out[row] = _attend(q[row], layer, pages, (positions >= first) & (positions <= at), attrs["scale"])
    return Beads(out)


def _attend(q: Array, layer: Layer, pages: Array, seen: Array, scale: float) -> Array:
    heads = layer.keys.shape[1]
    grouped = q.reshape(heads, -1, q.shape[-1])
    scores = np.where(seen, np.float32(scale) * np.matmul(grouped, layer.keys[pages]), -np.inf)
    weights = np.exp(scores - scores.max(axis=(0, 3), keepdims=True)).astype(np.float32)
    values = np.where(seen[:, :, 0, :, None], layer.values[pages], np.float32(0))
    total = np.matmul(weights, values).sum(axis=0) / weights.sum(axis=(0, 3))[..., None]
    return total.reshape(len(q), -1)


def plain_attention(call: Call) -> str | None:
    if call.args[4] is not None or call.attrs["softcap"] is not None:
        return "it has neither sinks nor softcap"
    return None if call.attrs.get("causal", True) else "it is causal only"


def _gated_mlp(b: Any, x: Any, gate: Any, up: Any, *, kind: str) -> Any:
    return b.gated(b.linear(x, gate), b.linear(x, up), kind=kind)


def gated_mlp(session: Any, args: Sequence[Any], attrs: Mapping[str, Any]) -> Beads:
    g = args[1].product(args[0].cells)
    return Beads(g / (np.float32(1) + np.exp(-g)) * args[2].product(args[0].cells))


def silu_only(call: Call) -> str | None:
    return None if call.attrs["kind"] == "silu" else f"it has no {call.attrs['kind']}"


KERNELS = (
    Kernel("linear", linear, "abacus linear"),
    Kernel("add", add, "abacus add"),
    Kernel("rms_norm", rms_norm, "abacus rms_norm"),
    Kernel("kv_write", kv_write, "abacus kv_write"),
    Kernel("paged_attention", paged_attention, "abacus paged_attention", supports=plain_attention),
    Kernel(Pattern("abacus_gated_mlp", _gated_mlp), gated_mlp, "abacus gated_mlp", supports=silu_only),
)


class Queue(Executable):
    """Steps run one after another on the chip's thread; run() returns at once."""

    def __init__(self, inner: Executable, submit: Callable[..., Future[Step]]) -> None:
        self._inner, self._submit = inner, submit

    def run(self, batch: Batch) -> Step:
        return Queued(self._submit(self._inner.run, copy.deepcopy(batch)))  # the arrays are the engine's again


class Queued(Step):
    def __init__(self, future: Future[Step]) -> None:
        self._future = future

    def tokens(self) -> Sampled:
        return self._future.result().tokens()

    def output(self, name: str) -> npt.NDArray[np.float32]:
        return self._future.result().output(name)


class AbacusSession(Session):
    def __init__(self, strict: bool) -> None:
        self._strict, self._spec, self._weights = strict, KVSpec(PAGE, "float32", ()), 0
        self._pool: list[Array] = []
        self._thread = ThreadPoolExecutor(1, "abacus")
        self._chip = self._thread.submit(threading.get_ident).result()

    def _drain(self) -> None:
        """Waits for the steps under way, unless it is one of them that asks."""
        if threading.get_ident() != self._chip:
            self._thread.submit(lambda: None).result()

    def put(self, array: Array) -> Beads:
        return Beads(np.array(array))

    def get(self, tensor: Beads) -> Array:
        self._drain()
        return tensor.cells.copy()

    def load(self, weight: Weight, format: str) -> Rods:
        if format not in ("float32", "int8"):
            raise UnsupportedError(f"abacus keeps weights as float32 or int8, not {format}", param="quantize")
        made = Rods(weight.decode(), format)
        self._weights += made.nbytes
        return made

    def read_weight(self, tensor: Rods) -> npt.NDArray[np.float32]:
        return np.array(tensor.plain(), np.float32)

    def assign(self, tensor: Rods, index: int, array: npt.NDArray[np.float32]) -> None:
        self._drain()
        tensor.cells[index] = array

    def page_bytes(self, spec: KVSpec) -> int:
        numbers = [sum(map(math.prod, group.spec.page_shapes(spec.page_size))) for group in spec.groups]
        return 4 * max(numbers, default=0) * max((len(group.states) for group in spec.groups), default=0)

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        size, free = self.page_bytes(spec), self.memory().free
        if pages * size > free:
            raise CapacityError(f"{pages} pages of {size} bytes need {pages * size} bytes; {free} are free")
        slots = max((len(group.states) for group in spec.groups), default=0)
        self._spec = spec
        self._pool = [np.zeros((pages, size // 4 // slots), np.float32) for _ in range(slots)]

    def memory(self) -> Memory:
        kv = sum(array.nbytes for array in self._pool)
        return Memory(MEMORY, MEMORY - kv - self._weights, self._weights, kv)

    def compile(self, program: Program, weights: Mapping[str, Any]) -> Executable:
        eager = EagerExecutable(self, program, weights, KERNELS, self._spec, backend="abacus", strict=self._strict)
        return Queue(eager, self._thread.submit)

    def step_state(self, state: int, batch: Batch) -> Layer:
        group, slot = self._spec.group_of(state)
        return Layer(*self._parts(group, slot), batch.block_tables[group], batch.slot_mapping[group])  # type: ignore[call-arg]

    def _parts(self, group: int, slot: int) -> tuple[Array, ...]:
        """A layer's arrays as the chip has them: views of the pool."""
        spec, start, parts = self._spec.groups[group].spec, 0, []
        for part, shape in enumerate(spec.page_shapes(self._spec.page_size)):
            own = tuple(shape[axis] for axis in _axes(spec, part, len(shape)))
            parts.append(self._pool[slot][:, start : start + math.prod(shape)].reshape(-1, *own))
            start += math.prod(shape)
        return tuple(parts)

    def _neutral(self, group: int, slot: int) -> tuple[Array, ...]:
        """The same in the neutral layout, [pages, page_size, ...], still views."""
        spec, parts = self._spec.groups[group].spec, self._parts(group, slot)
        return tuple(a.transpose(0, *(1 + np.argsort(_axes(spec, part, a.ndim - 1)))) for part, a in enumerate(parts))

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        self._drain()
        which, rows = self._spec.groups[group], list(ids)
        tensors = tuple(tuple(a[rows] for a in self._neutral(group, slot)) for slot in range(len(which.states)))
        return Pages(which, self._spec.page_size, self._spec.dtype, tensors)

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        self._drain()
        for slot, tensors in enumerate(pages.tensors):
            for mine, theirs in zip(self._neutral(group, slot), tensors, strict=True):
                mine[list(ids)] = theirs

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self._drain()
        for array in self._pool:
            array[list(dst)] = array[list(src)]

    def close(self) -> None:
        self._thread.shutdown()
        self._pool.clear()


def _axes(spec: StateSpec, part: int, count: int) -> tuple[int, ...]:
    """Where the chip keeps each axis of the neutral layout: keys [heads, head_dim, token], values [heads, token, head_dim]."""
    return ((1, 2, 0), (1, 0, 2))[part] if isinstance(spec, PagedKV) else tuple(range(count))


class Abacus(Backend):
    name = "abacus"
    api_version = 2
    version = "0.1.0"

    def probe(self) -> Probe:
        return Probe((Device(0, "beads", MEMORY, {"about": "simulated"}),))

    def capabilities(self, device: Device) -> Capabilities:
        return Capabilities(
            dtypes=("float32",), kv_dtypes=("float32",), page_sizes=(PAGE,), asynchronous=True,
            weight_formats=(WeightFormat("float32", 32.0, PLAIN), WeightFormat("int8", 8.1, error_budget=0.02)),
            unsupported={"bfloat16": "abacus counts in float32"},
        )  # fmt: skip

    def kernels(self, device: Device) -> Sequence[Kernel]:
        return KERNELS

    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        if unknown := sorted(options.keys() - OPTIONS):
            raise InvalidRequestError(f"abacus has no option {', '.join(unknown)}; it has {', '.join(sorted(OPTIONS))}")
        return AbacusSession(bool(options.get("strict")))


@hookimpl
def trivium_backend() -> Backend:
    return Abacus()
