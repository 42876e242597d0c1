"""Pages between the pool and page-locked memory of the host, by copies on a queue of their own, beside the steps.

Out: the pages are gathered into a block of the device in the order of the steps, so that a step may write them at once; the block
goes to the host while steps go on, as it is stored. In: the numbers are brought into their stored form in page-locked memory, go
into a block of the device beside the steps, and are put into the pages in their order; only what is queued afterwards waits for
the block, on the device. The host waits for nothing but pages that somebody asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trivium.ops import Pages
from trivium_cuda.staging import ALIGNMENT
from trivium_torch.pages import Layer

if TYPE_CHECKING:
    from trivium_cuda.session import CudaSession

MOST = 64 << 20
"""Bytes that come in by one copy: so much of the device, and of page-locked memory, more pages take no more than."""


class Shelf:
    """Some pages of a group in one block of bytes: of each tensor of each layer [heads or 1, pages, ...], as the pool has them."""

    def __init__(self, layers: Sequence[Layer], pages: int) -> None:
        self._layers, self._pages = layers, pages
        self.sources = [tensor for layer in layers for tensor in layer.tensors()]
        self._shapes = [(t.shape[0], pages, *t.shape[2:]) for t in self.sources]
        sizes = (prod(shape) * t.itemsize for shape, t in zip(self._shapes, self.sources, strict=True))
        ends = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)])
        self._starts, self.nbytes = ends[:-1].tolist(), int(ends[-1])

    def views(self, block: Tensor) -> list[Tensor]:
        """Where each tensor's pages lie in a block uint8[at least nbytes]."""
        places = zip(self._starts, self._shapes, self.sources, strict=True)
        return [block[at : at + prod(shape) * t.itemsize].view(t.dtype).view(shape) for at, shape, t in places]

    def on_host(self, block: Tensor) -> Iterator[Layer]:
        """The layers once more, with a block of the host as their memory, and the pages as pages 0, 1, ..."""
        parts = iter(self.views(block))
        for layer in self._layers:
            count = self._pages - layer.spec.paged  # which has one page of its own accord, for zeros
            yield Layer(layer.spec, layer.page_size, layer.dtype, count, lambda shape, dtype: next(parts).view(shape))


def start_export(session: CudaSession, group: int, layers: Sequence[Layer], ids: Sequence[int]) -> Callable[[], Pages]:
    """See plugin.Session."""
    shelf, at = Shelf(layers, len(ids)), session.page_ids(ids)
    with torch.inference_mode():
        block = torch.empty(shelf.nbytes, dtype=torch.uint8, device=session.device)
        for place, source in zip(shelf.views(block), shelf.sources, strict=True):
            torch.index_select(source, 1, at, out=place)
    host = session.page_blocks.take(shelf.nbytes)
    event = session.api.transfer(host[: shelf.nbytes], block, session.api.record())
    spec = session.spec

    def land() -> Pages:
        event.wait()
        with torch.inference_mode():
            every = torch.arange(len(ids))
            found = [tuple(np.array(t.to(torch.float32).numpy()) for t in layer.read(every)) for layer in shelf.on_host(host)]
        session.page_blocks.give(host)
        return Pages(spec.groups[group], spec.page_size, spec.dtype, tuple(found))

    return land


def start_import(session: CudaSession, layers: Sequence[Layer], ids: Sequence[int], pages: Pages) -> None:
    """See plugin.Session.import_pages; queued, in parts of MOST bytes."""
    each = max(1, MOST // max(Shelf(layers, 1).nbytes, 1))
    for low in range(0, len(ids), each):
        part = slice(low, min(low + each, len(ids)))
        tensors = [tuple(torch.from_numpy(np.array(t[part], np.float32)) for t in layer) for layer in pages.tensors]
        _bring(session, Shelf(layers, part.stop - part.start), ids[part], tensors)


def _bring(session: CudaSession, shelf: Shelf, ids: Sequence[int], tensors: Sequence[tuple[Tensor, ...]]) -> None:
    host = session.page_blocks.take(shelf.nbytes)
    with torch.inference_mode():
        every = torch.arange(len(ids))
        for layer, arrays in zip(shelf.on_host(host), tensors, strict=True):
            layer.write(every, arrays)
        block, at = torch.empty(shelf.nbytes, dtype=torch.uint8, device=session.device), session.page_ids(ids)
        arrived = session.api.transfer(block, host[: shelf.nbytes], session.api.record())
        session.page_blocks.give_after(arrived, host)
        session.api.follow(arrived)
        for place, target in zip(shelf.views(block), shelf.sources, strict=True):
            target.index_copy_(1, at, place)
