"""The emulated device: a queue of tasks, graphs that are recorded tasks, and a log of what was called and what ran."""

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

from emulated_cann.chips import chip
from emulated_cann.registry import INT, OPERATORS, POINTER, SIZE, Operator, function, need

# What torch-npu calls by itself between strides and dtypes: logged with torch's operations, not with the fused ones
COPIES = {"aclnnInplaceCopy": "copy_", "aclnnCast": "_to_copy"}
INTERNAL_FORMATS = frozenset({29, 50, 51, 52, 53, 54})  # FRACTAL_NZ and its variants by C0
# aclError codes: the wheel's include/acl/error_codes
OK, NO_STREAM, CAPTURED_SYNC, GROUP_MISMATCH, BAD_ARGUMENT, KERNEL_FAULT = 0, 207008, 107030, 107034, 161002, 561002


@dataclass(frozen=True)
class Call:
    """One call of an operator by the host, `args` by the names of the operator's declared signature."""

    name: str
    args: Any


@dataclass(frozen=True)
class Task:
    name: str
    body: Callable[[], object]


@dataclass(frozen=True)
class Event:
    """Reached when the device has done `position` tasks; `ms`: when the host recorded it."""

    position: int
    ms: float


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


@dataclass
class Device:
    """`lazy`: tasks wait until the host synchronises, as late as a real device may run them; else each runs at once.
    `fractals`: a tensor was cast to FRACTAL_NZ. `graph_limit`: captures that may be alive at a time: a real device runs out of
    streams."""

    log: Log = field(default_factory=Log)
    lazy: bool = False
    graph_limit: int = 1 << 30
    fractals: bool = False
    fault: Any = None
    release: Any = None
    queue: deque[Task] = field(default_factory=deque)
    graphs: dict[int, list[Task]] = field(default_factory=dict)
    groups: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    prepared: dict[int, Task] = field(default_factory=dict)
    events: dict[int, Event] = field(default_factory=dict)
    capturing: int | None = None
    group_start: int = 0
    updating: tuple[list[Task], deque[int]] | None = None
    queued: int = 0
    done: int = 0
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(0x1000))

    def emit(self, name: str, body: Callable[[], object]) -> None:
        """Runs a task, or queues it, or records it: into the graph being captured, or over a recorded task being updated."""
        task = Task(name, body)
        if self.updating is not None:
            self._replace(task)
        elif self.capturing is not None:
            self.graphs[self.capturing].append(task)
        else:
            self.queue.append(task)
            self.queued += 1
            if not self.lazy:
                self.flush()

    def _replace(self, task: Task) -> None:
        assert self.updating is not None
        tasks, positions = self.updating
        if not positions:
            raise RuntimeError(f"graph task update: {task.name} has no recorded task left to replace")
        position = positions.popleft()
        if tasks[position].name != task.name:
            raise RuntimeError(f"graph task update: {task.name} would replace {tasks[position].name}")
        tasks[position] = task

    def flush(self, until: int | None = None) -> None:
        """Runs what is queued, up to the task of that number."""
        while self.queue and (until is None or self.done < until):
            task = self.queue.popleft()
            self.done += 1
            self.run(task)

    def run(self, task: Task) -> None:
        self.log.ran.append(task.name)
        try:
            with torch.inference_mode():  # in which tensors made inside and outside of it may be written
                task.body()
        except Exception as e:
            raise RuntimeError(f"{task.name}: {type(e).__name__}: {e}") from e

    def say(self, fault: BaseException | str) -> None:
        """Sets what aclGetRecentErrMsg returns."""
        text = fault if isinstance(fault, str) else f"{type(fault).__name__}: {fault}"
        data = text.encode()[:4000] + b"\0"
        c.memmove(self.fault, data, len(data))


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


# ---- operators: phase one checks and prepares, phase two runs ----


def phase_one(op: Operator, convert: list[Callable[[Any], Any]]) -> Callable[..., int]:
    """xGetWorkspaceSize(arguments..., uint64_t *workspace, aclOpExecutor **executor)."""
    names = [name for name, _ in op.parameters]

    @guarded(BAD_ARGUMENT)
    def prepare(*raw: Any) -> None:
        arguments = type("Arguments", (), {})()
        arguments.__dict__.update((n, f(v)) for n, f, v in zip(names, convert, raw))
        if op.name in COPIES:
            DEVICE.log.aten[COPIES[op.name]] += 1
        else:
            DEVICE.log.calls.append(Call(op.name, arguments))
        check_everywhere(op, arguments)
        if op.check is not None:
            op.check(arguments)
        key = next(DEVICE.ids)
        DEVICE.prepared[key] = Task(op.name, lambda: execute(op, arguments))
        c.c_uint64.from_address(raw[-2]).value = 0
        c.c_void_p.from_address(raw[-1]).value = key

    return prepare


def check_everywhere(op: Operator, arguments: Any) -> None:
    """What holds for every operator: the chip has it, and only those that say so read FRACTAL_NZ."""
    need(not op.name.startswith(chip().absent), f"{op.name} is not documented for {chip().name}")
    for name, letter in op.parameters:
        value = getattr(arguments, name)
        found = [value] if letter == "T" else value if letter == "L" else []
        internal = any(getattr(t, "acl_format", 2) in INTERNAL_FORMATS for t in found or () if t is not None)
        need(not internal or name in op.any_format, f"{op.name} takes no FRACTAL_NZ as {name}")


def execute(op: Operator, arguments: Any) -> None:
    if op.inspect is not None:
        op.inspect(arguments)
    op.compute(arguments)


@guarded(KERNEL_FAULT)
def phase_two(workspace: int, size: int, executor: int, stream: int) -> None:
    task = DEVICE.prepared.pop(executor)
    DEVICE.emit(task.name, task.body)


# ---- memory ----


def move(target: int, capacity: int, source: int, n: int, kind: int) -> None:
    if n > capacity:
        raise ValueError(f"a copy of {n} bytes into {capacity}")
    DEVICE.emit("memcpy", lambda: c.memmove(target, source, n))


@function(POINTER, SIZE, POINTER, SIZE, INT, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtMemcpyAsync(target: int, capacity: int, source: int, n: int, kind: int, stream: int) -> None:
    move(target, capacity, source, n, kind)


@function(POINTER, SIZE, POINTER, SIZE, INT)
@guarded(BAD_ARGUMENT)
def aclrtMemcpy(target: int, capacity: int, source: int, n: int, kind: int) -> int:
    if DEVICE.capturing is not None:
        return captured_sync("a synchronous copy")
    move(target, capacity, source, n, kind)
    DEVICE.flush()
    return OK


@function(POINTER, SIZE, INT, SIZE)
@guarded(BAD_ARGUMENT)
def aclrtMemset(target: int, capacity: int, value: int, n: int) -> None:
    DEVICE.emit("memset", lambda: c.memset(target, value, n))
    DEVICE.flush()


@function(POINTER, SIZE, INT, SIZE, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtMemsetAsync(target: int, capacity: int, value: int, n: int, stream: int) -> None:
    DEVICE.emit("memset", lambda: c.memset(target, value, n))


@function(POINTER)
@guarded(BAD_ARGUMENT)
def aclrtFree(address: int) -> None:
    DEVICE.flush()
    DEVICE.release(c.c_void_p(address))


# ---- synchronisation ----


def captured_sync(what: str) -> int:
    DEVICE.say(f"{what} during graph capture is not allowed")
    return CAPTURED_SYNC


def synchronise(what: str) -> int:
    if DEVICE.capturing is not None:
        return captured_sync(what)
    DEVICE.flush()
    return OK


@function(POINTER)
@guarded(KERNEL_FAULT)
def aclrtSynchronizeStream(stream: int) -> int:
    return synchronise("synchronising a stream")


@function(POINTER, c.c_int32)
@guarded(KERNEL_FAULT)
def aclrtSynchronizeStreamWithTimeout(stream: int, ms: int) -> int:
    return synchronise("synchronising a stream")


@function()
@guarded(KERNEL_FAULT)
def aclrtSynchronizeDevice() -> int:
    return synchronise("synchronising the device")


@function(c.c_int32)
@guarded(KERNEL_FAULT)
def aclrtSynchronizeDeviceWithTimeout(ms: int) -> int:
    return synchronise("synchronising the device")


@function(POINTER)
@guarded(KERNEL_FAULT)
def aclrtSynchronizeEvent(event: int) -> int:
    if DEVICE.capturing is not None:
        return captured_sync("waiting for an event")
    if event in DEVICE.events:
        DEVICE.flush(DEVICE.events[event].position)
    return OK


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtRecordEvent(event: int, stream: int) -> None:
    DEVICE.events[event] = Event(DEVICE.queued, time.perf_counter() * 1e3)


@function(POINTER, POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtEventElapsedTime(ms: int, start: int, end: int) -> None:
    c.c_float.from_address(ms).value = DEVICE.events[end].ms - DEVICE.events[start].ms


def reached(event: int) -> bool:
    """An event that was never recorded counts as reached."""
    return event not in DEVICE.events or DEVICE.done >= DEVICE.events[event].position


def answer(address: int, done: bool) -> None:
    c.c_int.from_address(address).value = int(done)


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtQueryEventStatus(event: int, status: int) -> None:
    answer(status, reached(event))


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtQueryEventWaitStatus(event: int, status: int) -> None:
    answer(status, reached(event))


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtStreamQuery(stream: int, status: int) -> None:
    answer(status, not DEVICE.queue)


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
    """Inside, the device runs nothing before the host synchronises: what reads results or reuses pinned memory too early, shows."""
    DEVICE.flush()
    DEVICE.lazy = True
    try:
        yield
    finally:
        DEVICE.lazy = False
        DEVICE.flush()


def operator_names() -> list[str]:
    return list(OPERATORS)
