"""What the backend needs of a device beyond torch's operations: order of work, graphs, page-locked memory, and what is free.

Everything a session queues on its device runs in the order in which it was queued, but for transfers, which have a queue of their
own; only Event.wait() and copies to the host that torch makes by itself wait for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Event(ABC):
    """A point in the queue of a device."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has come to it."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the host until it has. A fault of what was queued before is raised here."""


class Graph(ABC):
    """Operations that were captured, with the addresses and numbers that they had then."""

    @abstractmethod
    def replay(self) -> None:
        """Queues all of them."""


class DeviceApi(ABC):
    """One device. `name`: what it calls itself; `capability`: NVIDIA's compute capability, (9, 0) for sm_90."""

    name: str
    capability: tuple[int, int]
    device: torch.device

    @abstractmethod
    def active(self) -> AbstractContextManager[Any]:
        """Within it, kernels are launched on this device."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Tensor:
        """uint8[nbytes] of page-locked memory of the host."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queues a copy between page-locked memory and the device, in either direction."""

    @abstractmethod
    def transfer(self, target: Tensor, source: Tensor, after: Event) -> Event:
        """Queues a copy between page-locked memory and the device beside everything else, once the device has come to `after`, a
        point of the queue. Returns the point behind the copy; up to it neither tensor may be written."""

    @abstractmethod
    def follow(self, event: Event) -> None:
        """What is queued from here on waits on the device for the end of a transfer."""

    @abstractmethod
    def record(self) -> Event:
        """The point that the queue has reached now."""

    @abstractmethod
    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """What `run` queues as a graph, and what it returns; nothing is executed. All graphs share one pool of memory, so what one
        has put out is valid until another is replayed."""

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes; what torch holds in reserve counts as free."""

    @abstractmethod
    def peak(self, run: Callable[[], None]) -> int:
        """Most bytes that what `run` queues takes at a time, beyond those that are taken already; waits for it."""

    @abstractmethod
    def release(self) -> None:
        """Gives back what torch holds in reserve."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for everything that was queued."""


class CudaEvent(Event):
    """An event of torch.cuda."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaGraph(Graph):
    """A graph of torch.cuda."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice(DeviceApi):
    """A device of torch.cuda, on its current stream; transfers are on one more."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self.capability = torch.cuda.get_device_capability(index)
        self._pool: Any = None
        self._beside: torch.cuda.Stream | None = None

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def transfer(self, target: Tensor, source: Tensor, after: Event) -> Event:
        beside = self._beside = self._beside or torch.cuda.Stream(self.device)
        assert isinstance(after, CudaEvent)
        beside.wait_event(after.event)
        with torch.cuda.stream(beside):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(beside)  # or its memory would be another's before the copy is done
        event = torch.cuda.Event()
        event.record(beside)
        return CudaEvent(event)

    def follow(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        torch.cuda.current_stream(self.device).wait_event(event.event)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return CudaEvent(event)

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with self.active(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found = run()
        return CudaGraph(graph), found

    def memory_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + unused, total

    def peak(self, run: Callable[[], None]) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def release(self) -> None:
        with self.active():
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def find_devices() -> Sequence[DeviceApi]:
    """All that torch sees."""
    return [CudaDevice(index) for index in range(torch.cuda.device_count())]


def why_none() -> str:
    """One line on why find_devices() found nothing."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as e:
        return f"CUDA {torch.version.cuda} can't be started: {str(e).splitlines()[0]}"
    return f"torch {torch.__version__} sees no device; CUDA_VISIBLE_DEVICES may hide it"
