"""A device for trivium_cuda that is the host: its queue, events, graphs and page-locked memory behave as a GPU's do where that can
be seen. Triton's kernels run in its interpreter (TRITON_INTERPRET=1).

- A copy to the host arrives when its event is waited for; before that the memory holds nonsense.
- Page-locked memory that is overwritten before the device has read it is an error.
- A transfer happens as late as it may: when its event is waited for or followed. Until then its target holds nonsense, and a source
  that was written meanwhile is an error. Within queue_watched(), so is one that begins before its source is written.
- A graph keeps the tensors and numbers of its capture: a replay repeats the same operations and launches on the same memory.
- host_reads_forbidden() fails on whatever would wait for a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter
from trivium.plugin import Backend
from trivium_cuda.device import DeviceApi, Event, Graph
from trivium_cuda.plugin import CudaBackend

POISON = 0x7B


class EmulatedEvent(Event):
    def __init__(self, device: EmulatedDevice, point: int) -> None:
        self._device, self.point = device, point

    def done(self) -> bool:
        return self.point <= self._device.reached

    def wait(self) -> None:
        self._device.waits += 1
        self._device.run_to(self.point)


class SideEvent(Event):
    """The end of a transfer."""

    def __init__(self, device: EmulatedDevice, arrive: Callable[[], None]) -> None:
        self._device, self._arrive = device, arrive
        self._there = False

    def done(self) -> bool:
        return self._there

    def wait(self) -> None:
        self._device.waits += 1
        self.come()

    def come(self) -> None:
        if not self._there:
            self._there = True
            with torch.inference_mode():
                self._arrive()


class EmulatedDevice(DeviceApi):
    """`copies`: ("in" or "out", bytes) in order, `transfers` likewise; `waits`: how often an event was waited for; `captures`,
    `replays`: of graphs."""

    def __init__(self, capability: tuple[int, int] = (9, 0), total: int = 1 << 34) -> None:
        self.name, self.capability, self.device = "emulated", capability, torch.device("cpu")
        self.total = self.free = total
        self.copies: list[tuple[str, int]] = []
        self.waits = self.captures = self.replays = self.released = 0
        self.issued = self.reached = 0
        self._later: list[tuple[int, Callable[[], None]]] = []
        self._pinned: list[torch.Tensor] = []
        self.recorder: Recorder | None = None
        self.transfers: list[tuple[str, int]] = []
        self.written: dict[int, int] = {}
        """The point at which the memory at an address was written last, as far as the queue was watched."""

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._pinned.append(torch.full((nbytes,), POISON, dtype=torch.uint8))
        return self._pinned[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(p.data_ptr() <= tensor.data_ptr() < p.data_ptr() + p.nbytes for p in self._pinned)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.recorder is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.issued += 1
        if self.is_pinned(target):
            self._copy_out(target, source.clone())
        else:
            assert self.is_pinned(source), "a copy from memory that is not page-locked waits for the device"
            self._copy_in(target, source)

    def _copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        sent = source.clone()

        def unchanged() -> None:
            assert torch.equal(source, sent), "page-locked memory was overwritten before the device had read it"

        self.copies.append(("in", source.nbytes))
        self._later.append((self.issued, unchanged))

    def _copy_out(self, target: torch.Tensor, sent: torch.Tensor) -> None:
        target.view(torch.uint8).fill_(POISON)
        self.copies.append(("out", sent.nbytes))

        def arrive() -> None:
            target.copy_(sent)

        self._later.append((self.issued, arrive))

    def transfer(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        assert isinstance(after, EmulatedEvent)
        out = self.is_pinned(target)
        assert out != self.is_pinned(source), "a transfer is between page-locked memory and the device"
        if out:
            last = self.written.get(source.untyped_storage().data_ptr(), 0)
            assert after.point >= last, "the copy would read a page before it is written"
        sent = source.clone()
        target.view(torch.uint8).fill_(POISON)
        self.transfers.append(("out" if out else "in", source.nbytes))

        def arrive() -> None:
            assert torch.equal(source, sent), "memory was overwritten before a transfer had read it"
            target.copy_(sent)

        return SideEvent(self, arrive)

    def follow(self, event: Event) -> None:
        assert isinstance(event, SideEvent)
        event.come()

    def run_to(self, point: int) -> None:
        self.reached = max(self.reached, point)
        with torch.inference_mode():
            while self._later and self._later[0][0] <= self.reached:
                self._later.pop(0)[1]()

    def record(self) -> Event:
        self.issued += 1
        return EmulatedEvent(self, self.issued)

    def capture(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        self.captures += 1
        self.recorder = Recorder()
        try:
            with launches_recorded_by(self.recorder), host_reads_forbidden(self), self.recorder:
                found = run()
        finally:
            recorder, self.recorder = self.recorder, None
        return EmulatedGraph(self, recorder), found

    def memory_info(self) -> tuple[int, int]:
        return self.free, self.total

    def peak(self, run: Callable[[], None]) -> int:
        with Meter() as meter:
            run()
        return meter.most

    def release(self) -> None:
        self.released += 1

    def synchronize(self) -> None:
        self.run_to(self.issued)


class EmulatedGraph(Graph):
    def __init__(self, device: EmulatedDevice, recorder: Recorder) -> None:
        self._device, self._recorder = device, recorder

    def replay(self) -> None:
        self._device.replays += 1
        for repeat in self._recorder.repeats:
            repeat()


class Recorder(TorchDispatchMode):
    """Keeps operations with the tensors that they were called with, and how to repeat each into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.repeats: list[Callable[[], None]] = []
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.kept.append((args, kwargs, found))
        if not func.__name__.startswith("empty"):
            self.repeats.append(lambda: _repeat(func, args, kwargs, found))
        return found


def _repeat(func: Any, args: Any, kwargs: Any, found: Any) -> None:
    held = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    for old, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in held:
            old.copy_(new)


@contextlib.contextmanager
def launches_recorded_by(recorder: Recorder) -> Iterator[None]:
    """Launches of Triton's kernels are not torch operations: they are kept as a whole."""
    launch = interpreter.GridExecutor.__call__

    def kept(self: Any, *args: Any, **kwargs: Any) -> None:
        recorder.repeats.append(lambda: _launch(launch, self, args, kwargs))
        _launch(launch, self, args, kwargs)

    interpreter.GridExecutor.__call__ = kept
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = launch


def _launch(launch: Any, executor: Any, args: Any, kwargs: Any) -> None:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        launch(executor, *args, **kwargs)


class Meter(TorchDispatchMode):
    """Counts the bytes of what operations make, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        self._live = {at: held for at, held in self._live.items() if not held[0].expired()}
        for storage in (t.untyped_storage() for t in tree_leaves(found) if isinstance(t, torch.Tensor)):
            if storage.data_ptr() not in before:
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return found


class QueueWatch(TorchDispatchMode):
    """Counts every operation as a point of the queue, and notes what memory it has written."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._device.issued += 1
        if not func.is_view:
            for tensor in (t for t in tree_leaves(found) if isinstance(t, torch.Tensor)):
                self._device.written[tensor.untyped_storage().data_ptr()] = self._device.issued
        return found


@contextlib.contextmanager
def queue_watched(device: EmulatedDevice) -> Iterator[None]:
    """Within it a transfer that is not behind the last write of its source is an error."""
    device.written.clear()
    with QueueWatch(device):
        yield


READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero, torch.nonzero, torch.unique, torch.masked_select,
}  # fmt: skip


class HostReads(TorchFunctionMode):
    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = func in READS and not self._device.is_pinned(args[0])
        masked = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in tree_leaves(args[1])
        )
        if read or masked:
            raise AssertionError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_reads_forbidden(device: EmulatedDevice) -> Iterator[None]:
    """AssertionError for what would wait for the device: a read of its tensors, or of how many there are of something."""
    launch, waits = interpreter.GridExecutor.__call__, device.waits
    interpreter.GridExecutor.__call__ = lambda self, *args, **kwargs: _unguarded(launch, self, args, kwargs)
    try:
        with HostReads(device):
            yield
    finally:
        interpreter.GridExecutor.__call__ = launch
    assert device.waits == waits, "an event was waited for"


def _unguarded(launch: Any, executor: Any, args: Any, kwargs: Any) -> None:
    with torch._C.DisableTorchFunction():
        launch(executor, *args, **kwargs)


class EmulatedBackend(CudaBackend):
    """The backend as it is, over emulated devices."""

    name = "cuda_emulated"
    priority = -300

    def __init__(self, devices: tuple[EmulatedDevice, ...] | None = None) -> None:
        super().__init__(lambda: DEVICES if devices is None else devices)


DEVICES = (EmulatedDevice(),)
"""The devices that the plugin of install() has; tests may put others."""


def backend() -> Backend:
    return EmulatedBackend(DEVICES)
