"""The emulated device: streams of tasks, events between them, graphs that are recorded tasks, and a log of all that."""

from __future__ import annotations

import ctypes as c
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

INTERNAL_FORMATS = frozenset({29, 50, 51, 52, 53, 54})  # FRACTAL_NZ and its variants by C0
# aclError codes: the wheel's include/acl/error_codes
OK, NO_STREAM, CAPTURED_SYNC, GROUP_MISMATCH, BAD_ARGUMENT, KERNEL_FAULT = 0, 207008, 107030, 107034, 161002, 561002
RELAXED = 2  # aclmdlRICaptureMode in which a thread may call what a capture otherwise refuses


@dataclass(frozen=True)
class Call:
    """One call of an operator by the host, `args` by the names of the operator's declared signature."""

    name: str
    args: Any


@dataclass
class Log:
    """What the host called since the last clear(): `calls` fused operators in order, `aten` plain torch operations on the device,
    `ran` the names of all tasks that the device executed (also by replay)."""

    calls: list[Call] = field(default_factory=list)
    aten: Counter[str] = field(default_factory=Counter)
    ran: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.calls.clear()
        self.aten.clear()
        self.ran.clear()

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def count(self, prefix: str) -> int:
        """Calls of operators whose name starts with the prefix: the V2, V3 ... that a CANN version selects count as one."""
        return sum(call.name.startswith(prefix) for call in self.calls)

    def last(self, prefix: str) -> Any:
        """The arguments of the latest call of such an operator."""
        return next(call.args for call in reversed(self.calls) if call.name.startswith(prefix))


@dataclass(frozen=True)
class Task:
    """`ready`: whether the device can run it yet (a wait for an event)."""

    name: str
    body: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    number: int = 0


@dataclass
class Event:
    """`records`: record calls of the host; `done`: the latest of them that the device has reached. `ms`: when the host recorded it
    last."""

    records: int = 0
    done: int = 0
    ms: float = 0.0


@dataclass
class Device:
    """`lazy`: tasks wait until the host synchronises, and streams that nothing orders run in the order least expected, the latest
    task first; else each task runs at once, or as soon as what its stream waits for is there. `mode`: of capture, see RELAXED.
    `fractals`: a tensor was cast to FRACTAL_NZ. `graph_limit`: captures that may be alive at a time: a real device runs out of
    streams."""

    log: Log = field(default_factory=Log)
    lazy: bool = False
    graph_limit: int = 1 << 30
    fractals: bool = False
    fault: Any = None
    release: Any = None
    streams: dict[int, deque[Task]] = field(default_factory=dict)
    events: dict[int, Event] = field(default_factory=dict)
    graphs: dict[int, list[Task]] = field(default_factory=dict)
    groups: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    prepared: dict[int, Task] = field(default_factory=dict)
    capturing: int | None = None
    mode: int = 0
    group_start: int = 0
    updating: tuple[int, deque[int]] | None = None
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(0x1000))

    # ---- what the host gives ----

    def emit(
        self, name: str, body: Callable[[], object], stream: int | None = None, ready: Callable[[], bool] | None = None
    ) -> None:
        """Runs a task, or queues it, or records it: into the graph being captured, or over a recorded task being updated."""
        task = Task(name, body, ready or Task.ready, next(self.ids))
        if self.updating is not None:
            self._replace(task, self._stream(stream))
        elif self.capturing is not None:
            self.graphs[self.capturing].append(task)
        else:
            self._queue(task, self._stream(stream))

    def _stream(self, stream: int | None) -> int:
        return torch.npu.current_stream().npu_stream if stream is None else stream

    def _queue(self, task: Task, stream: int) -> None:
        self.streams.setdefault(stream, deque()).append(task)
        if not self.lazy:
            self.advance()

    def _replace(self, task: Task, stream: int) -> None:
        """A graph task update: the recorded task changes when the updating stream gets there."""
        assert self.updating is not None
        graph, positions = self.updating
        if not positions:
            raise RuntimeError(f"graph task update: {task.name} has no recorded task left to replace")
        position = positions.popleft()
        if self.graphs[graph][position].name != task.name:
            raise RuntimeError(f"graph task update: {task.name} would replace {self.graphs[graph][position].name}")

        def update() -> None:
            self.graphs[graph][position] = task

        self._queue(Task("task update", update, number=next(self.ids)), stream)

    def replay(self, graph: int, stream: int) -> None:
        """Queues a graph's tasks, each as it will be when its turn comes."""
        if graph not in self.graphs:
            raise RuntimeError("a graph that was destroyed or never ended")
        recorded = self.graphs[graph]

        def again(position: int) -> Task:
            body, ready = lambda: recorded[position].body(), lambda: recorded[position].ready()
            return Task(recorded[position].name, body, ready, next(self.ids))

        for position in range(len(recorded)):
            self._queue(again(position), stream)

    # ---- what the device does ----

    def advance(self, until: Callable[[], bool] = lambda: False) -> None:
        """Runs what can run, the stream's tasks in their order, until a condition holds."""
        while not until():
            heads = [(queue[0].number, stream) for stream, queue in self.streams.items() if queue and queue[0].ready()]
            if not heads:
                return
            _, stream = max(heads) if self.lazy else min(heads)
            self._run(self.streams[stream].popleft())

    def _run(self, task: Task) -> None:
        self.log.ran.append(task.name)
        try:
            with torch.inference_mode():  # the tensors may have been made in it
                task.body()
        except Exception as e:
            raise RuntimeError(f"{task.name}: {type(e).__name__}: {e}") from e

    def flush(self, stream: int | None = None) -> None:
        """Waits for a stream, or for all; a RuntimeError where a real device would wait for ever."""
        over = self.idle if stream is None else lambda: not self.streams.get(stream)
        self.advance(over)
        if not over():
            waiting = sorted(queue[0].name for queue in self.streams.values() if queue)
            self.streams.clear()
            raise RuntimeError(f"the device waits for ever: nobody records the event of {', '.join(waiting)}")

    def idle(self) -> bool:
        return not any(self.streams.values())

    def say(self, fault: BaseException | str) -> None:
        """Sets what aclGetRecentErrMsg returns."""
        text = fault if isinstance(fault, str) else f"{type(fault).__name__}: {fault}"
        data = text.encode()[:4000] + b"\0"
        c.memmove(self.fault, data, len(data))

    # ---- events ----

    def record(self, event: Event, stream: int) -> None:
        event.records += 1
        event.ms = time.perf_counter() * 1e3
        number = event.records

        def reach() -> None:
            event.done = max(event.done, number)

        self.emit("record", reach, stream)

    def wait(self, event: Event, stream: int) -> None:
        """Inside a capture there is nothing to wait for: the order of the graph is that of its tasks."""
        record = event.records
        if self.capturing is None:
            self.emit("wait", lambda: None, stream, lambda: event.done >= record)


DEVICE = Device()


def guarded(code: int) -> Callable[[Callable[..., int | None]], Callable[..., int]]:
    """An exception can't cross C: it becomes an aclError with its text as the device's message."""

    def wrap(body: Callable[..., int | None]) -> Callable[..., int]:
        def guard(*args: Any) -> int:
            try:
                return body(*args) or OK
            except Exception as e:
                DEVICE.say(e)
                return code

        guard.__name__ = body.__name__
        return guard

    return wrap


def refused(what: str) -> int:
    """The error of what a capture refuses; OK where there is none, or the thread is relaxed."""
    if DEVICE.capturing is None or DEVICE.mode == RELAXED:
        return OK
    DEVICE.say(f"{what} during graph capture is not allowed")
    return CAPTURED_SYNC


@contextmanager
def recorded() -> Iterator[Log]:
    """A fresh log for the block: `with recorded() as log: ...; assert log.names == [...]`."""
    outer, DEVICE.log = DEVICE.log, Log()
    try:
        yield DEVICE.log
    finally:
        DEVICE.log = outer


@contextmanager
def late_device() -> Iterator[None]:
    """Inside, the device runs nothing before the host synchronises: what reads results or reuses pinned memory too early, shows,
    and so does a stream that relies on another without an event."""
    DEVICE.flush()
    DEVICE.lazy = True
    try:
        yield
    finally:
        DEVICE.lazy = False
        DEVICE.flush()
