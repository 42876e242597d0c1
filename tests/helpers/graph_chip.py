"""The reference as a chip that captures decode steps for the batch sizes that the core names, each layer taking a stream."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from trivium.ops import Batch
from trivium.plugin import Backend, Capabilities, Device, Executable, Probe, Session, Step, hookimpl
from trivium_reference.plugin import ReferenceBackend, ReferenceSession

STREAMS = 100


class Captured(Executable):
    """Runs a step of one token a sequence padded to the next captured size. `log`: ("capture" or "replay" or "eager", size)."""

    def __init__(self, eager: Executable, sizes: tuple[int, ...], layers: int, fails: bool) -> None:
        self._eager = eager
        self.log: list[tuple[str, int]] = []
        self._sizes: list[int] = []
        left = STREAMS
        for size in sizes:
            left -= layers
            if left < 0 or fails:
                warnings.warn(f"batch size {size} could not be captured and runs eagerly", RuntimeWarning, stacklevel=2)
                continue
            self._sizes.append(size)
            self.log.append(("capture", size))

    def run(self, batch: Batch) -> Step:
        size = next((n for n in self._sizes if n >= batch.seqs), 0)
        if batch.tokens != batch.seqs or not size:
            self.log.append(("eager", batch.tokens))
            return self._eager.run(batch)
        self.log.append(("replay", size))
        return self._eager.run(padded(batch, size - batch.seqs))


def padded(batch: Batch, more: int) -> Batch:
    """With `more` sequences of one token that are stored nowhere and sampled by nobody."""

    def pad(array: Any, value: int, axis: int = 0) -> Any:
        widths = [(0, more if i == axis else 0) for i in range(array.ndim)]
        return np.pad(array, widths, constant_values=value)

    starts = np.arange(batch.tokens + more + 1, dtype=np.int32)
    return replace(
        batch, token_ids=pad(batch.token_ids, 0), positions=pad(batch.positions, 0), query_starts=starts,
        context_lens=pad(batch.context_lens, 1), block_tables=pad(batch.block_tables, 0, 1),
        slot_mapping=pad(batch.slot_mapping, -1, 1),
    )  # fmt: skip


class GraphSession(ReferenceSession):
    def __init__(self, kernels: Any, sizes: tuple[int, ...], fails: bool) -> None:
        super().__init__(kernels, strict=False)
        self._sizes, self._fails = sizes, fails

    def compile(self, program: Any, weights: Any) -> Executable:
        return Captured(super().compile(program, weights), self._sizes, len(program.states), self._fails)


class GraphChip(ReferenceBackend):
    name = "graphchip"

    def probe(self) -> Probe:
        return Probe((Device(0, "graphchip"),))

    def capabilities(self, device: Device) -> Capabilities:
        return replace(super().capabilities(device), graph_capture=True, max_graphs=STREAMS, graph_cost=lambda layers: layers)

    def open(self, device: Device, options: Any) -> Session:
        own = dict(options)
        sizes, fails = own.pop("graph_sizes", ()), own.pop("capture_fails", False)
        super().open(device, own)
        return GraphSession(self.kernels(device), sizes, fails)


@hookimpl
def trivium_backend() -> Backend:
    return GraphChip()
