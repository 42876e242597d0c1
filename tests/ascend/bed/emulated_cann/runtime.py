"""The C functions of the runtime that concern the device's work: operators' two phases, copies, events, synchronisation."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

from emulated_cann.chips import chip
from emulated_cann.device import (
    BAD_ARGUMENT,
    DEVICE,
    INTERNAL_FORMATS,
    KERNEL_FAULT,
    OK,
    Call,
    Event,
    Task,
    guarded,
    refused,
)
from emulated_cann.registry import INT, POINTER, SIZE, Operator, function, need

# What torch-npu calls by itself between strides and dtypes: logged with torch's operations, not with the fused ones
COPIES = {"aclnnInplaceCopy": "copy_", "aclnnCast": "_to_copy"}
UINT = c.c_uint32

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
    DEVICE.emit(task.name, task.body, stream)


# ---- memory ----


def within(n: int, capacity: int) -> int:
    if n > capacity:
        raise ValueError(f"{n} bytes for a memory of {capacity}")
    return n


@function(POINTER, SIZE, POINTER, SIZE, INT, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtMemcpyAsync(target: int, capacity: int, source: int, n: int, kind: int, stream: int) -> None:
    size = within(n, capacity)
    DEVICE.emit("memcpy", lambda: c.memmove(target, source, size), stream)


@function(POINTER, SIZE, POINTER, SIZE, INT)
@guarded(BAD_ARGUMENT)
def aclrtMemcpy(target: int, capacity: int, source: int, n: int, kind: int) -> int:
    if code := refused("a synchronous copy"):
        return code
    DEVICE.flush()
    c.memmove(target, source, within(n, capacity))
    return OK


@function(POINTER, SIZE, INT, SIZE)
@guarded(BAD_ARGUMENT)
def aclrtMemset(target: int, capacity: int, value: int, n: int) -> int:
    if code := refused("a synchronous fill"):
        return code
    DEVICE.flush()
    c.memset(target, value, within(n, capacity))
    return OK


@function(POINTER, SIZE, INT, SIZE, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtMemsetAsync(target: int, capacity: int, value: int, n: int, stream: int) -> None:
    size = within(n, capacity)
    DEVICE.emit("memset", lambda: c.memset(target, value, size), stream)


@function(POINTER)
@guarded(BAD_ARGUMENT)
def aclrtFree(address: int) -> None:
    DEVICE.flush()
    DEVICE.release(c.c_void_p(address))


# ---- synchronisation ----


def synchronise(what: str, stream: int | None = None) -> int:
    if code := refused(what):
        return code
    DEVICE.flush(stream)
    return OK


@function(POINTER)
@guarded(KERNEL_FAULT)
def aclrtSynchronizeStream(stream: int) -> int:
    return synchronise("synchronising a stream", stream)


@function(POINTER, c.c_int32)
@guarded(KERNEL_FAULT)
def aclrtSynchronizeStreamWithTimeout(stream: int, ms: int) -> int:
    return synchronise("synchronising a stream", stream)


@function()
@guarded(KERNEL_FAULT)
def aclrtSynchronizeDevice() -> int:
    return synchronise("synchronising the device")


@function(c.c_int32)
@guarded(KERNEL_FAULT)
def aclrtSynchronizeDeviceWithTimeout(ms: int) -> int:
    return synchronise("synchronising the device")


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtStreamQuery(stream: int, status: int) -> None:
    answer(status, not DEVICE.streams.get(stream))


# ---- events ----


def create(address: int) -> None:
    key = next(DEVICE.ids)
    DEVICE.events[key] = Event()
    c.c_uint64.from_address(address).value = key


@function(POINTER, UINT)
@guarded(BAD_ARGUMENT)
def aclrtCreateEventExWithFlag(address: int, flags: int) -> None:
    create(address)


@function(POINTER, UINT)
@guarded(BAD_ARGUMENT)
def aclrtCreateEventWithFlag(address: int, flags: int) -> None:
    create(address)


@function(POINTER)
@guarded(BAD_ARGUMENT)
def aclrtCreateEvent(address: int) -> None:
    create(address)


@function(POINTER)
@guarded(BAD_ARGUMENT)
def aclrtDestroyEvent(event: int) -> None:
    del DEVICE.events[event]


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtRecordEvent(event: int, stream: int) -> None:
    DEVICE.record(DEVICE.events[event], stream)


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtStreamWaitEvent(stream: int, event: int) -> None:
    DEVICE.wait(DEVICE.events[event], stream)


# An event that a graph waits for and others record is a number in device memory.


@function(POINTER, c.c_uint64, UINT, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtValueWrite(address: int, value: int, flags: int, stream: int) -> None:
    number = c.c_uint64.from_address(address)
    DEVICE.emit("write value", lambda: setattr(number, "value", value), stream)


@function(POINTER, c.c_uint64, UINT, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtValueWait(address: int, value: int, flags: int, stream: int) -> None:
    number = c.c_uint64.from_address(address)
    DEVICE.emit("wait for value", lambda: None, stream, lambda: number.value == value)


@function(POINTER)
@guarded(KERNEL_FAULT)
def aclrtSynchronizeEvent(event: int) -> int:
    if code := refused("waiting for an event"):
        return code
    DEVICE.advance(lambda: reached(event))
    if not reached(event):
        raise RuntimeError("the device waits for ever: an event is not reached")
    return OK


def reached(event: int) -> bool:
    found = DEVICE.events[event]
    return found.done >= found.records


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


@function(POINTER, POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclrtEventElapsedTime(ms: int, start: int, end: int) -> None:
    c.c_float.from_address(ms).value = DEVICE.events[end].ms - DEVICE.events[start].ms
