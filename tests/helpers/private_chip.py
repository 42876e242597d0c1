"""A chip with habits of its own: weights transposed and tiled, KV in float16 on pages of 128 tokens only, at most 64 tokens a step,
no top_p, a fused kernel, and steps that run on a thread."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
from day_one_chip import ChipSession, DayOne, Slab, add, rms_norm

from trivium.ops import Pattern
from trivium.plugin import Backend, Capabilities, Executable, Kernel, Session, Step, WeightFormat, hookimpl

TILE = 8
PLAIN = frozenset({"float32", "float16", "bfloat16"})
SAMPLING = frozenset({"temperature", "seed", "top_k", "logprobs", "min_tokens"})


class Tiled:
    """A matrix [out, in] as tiles [in/8, out/8, 8 (in), 8 (out)], padded with what must never be read."""

    def __init__(self, plain: Any) -> None:
        self.shape = plain.shape
        rows, cols = (-(-n // TILE) * TILE for n in plain.shape)
        padded = np.full((cols, rows), np.nan, np.float32)
        padded[: plain.shape[1], : plain.shape[0]] = plain.T
        self.tiles = np.ascontiguousarray(padded.reshape(cols // TILE, TILE, rows // TILE, TILE).swapaxes(1, 2))

    def transposed(self) -> Any:
        """[in, out]."""
        t = self.tiles
        whole = t.swapaxes(1, 2).reshape(t.shape[0] * TILE, t.shape[1] * TILE)
        return whole[: self.shape[1], : self.shape[0]]


def linear(session: Any, args: Any, attrs: Any) -> Slab:
    x, w, bias = (None if a is None else a._cells for a in args)
    y = x @ w.transposed()
    return Slab(y if bias is None else y + bias)


def _linear_add(b: Any, x: Any, w: Any, residual: Any) -> Any:
    return b.add(residual, b.linear(x, w))


def fused(session: Any, args: Any, attrs: Any) -> Slab:
    x, w, residual = (a._cells for a in args)
    return Slab(residual + x @ w.transposed())


LINEAR_ADD = Pattern("tiled_linear_add", _linear_add)


class Later(Step):
    """A step on a thread of its own."""

    def __init__(self, executable: Executable, batch: Any) -> None:
        self._executable, self._batch = executable, batch
        self._thread = threading.Thread(target=self._work)
        self._fault: BaseException | None = None
        self._thread.start()

    def _work(self) -> None:
        try:
            self._step = self._executable.run(self._batch)
        except BaseException as e:
            self._fault = e

    def _wait(self) -> Step:
        self._thread.join()
        if self._fault is not None:
            raise self._fault
        return self._step

    def tokens(self) -> Any:
        return self._wait().tokens()

    def output(self, name: str) -> Any:
        return self._wait().output(name)


class Threaded(Executable):
    """Copies the step's arrays, as it must, and returns at once."""

    def __init__(self, inner: Executable, limit: int) -> None:
        self._inner, self._limit = inner, limit

    def run(self, batch: Any) -> Step:
        assert batch.tokens <= self._limit, f"a step of {batch.tokens} tokens"
        return Later(self._inner, copy.deepcopy(batch))


class PrivateSession(ChipSession):
    cell = np.float16

    def load(self, weight: Any, format: str) -> Slab:
        plain = super().load(weight, format)._cells
        return Slab(Tiled(plain) if plain.ndim == 2 else [Tiled(m) for m in plain] if plain.ndim == 3 else plain)

    def assign(self, tensor: Slab, index: int, array: Any) -> None:
        tensor._cells[index] = Tiled(array)

    def read_weight(self, tensor: Slab) -> Any:
        cells = tensor._cells
        if isinstance(cells, list):
            return np.stack([m.transposed().T for m in cells])
        return np.ascontiguousarray(cells.transposed().T) if isinstance(cells, Tiled) else cells.copy()

    def compile(self, program: Any, weights: Any) -> Executable:
        return Threaded(super().compile(program, weights), 64)


class Private(DayOne):
    name = "private"

    def capabilities(self, device: Any) -> Capabilities:
        return Capabilities(
            dtypes=("float32",),
            weight_formats=(WeightFormat("tiled", 32.0, PLAIN), WeightFormat("float32", 32.0, PLAIN)),
            kv_dtypes=("float16",), page_sizes=(128,), max_batched_tokens=64, sampling=SAMPLING,
            unsupported={"top_p": "its sampler has no sort"}, asynchronous=True,
        )  # fmt: skip

    def kernels(self, device: Any) -> list[Kernel]:
        return [Kernel("linear", linear), Kernel("add", add), Kernel("rms_norm", rms_norm), Kernel(LINEAR_ADD, fused)]

    def open(self, device: Any, options: Any) -> Session:
        super().open(device, options)
        return PrivateSession(self.kernels(device), options)


@hookimpl
def trivium_backend() -> Backend:
    return Private()
