"""Graph capture: the aclmdlRI calls behind torch.npu.NPUGraph. A graph is the list of tasks recorded between begin and end."""

from __future__ import annotations

import ctypes as c
from collections import deque

from emulated_cann.device import BAD_ARGUMENT, DEVICE, GROUP_MISMATCH, KERNEL_FAULT, NO_STREAM, OK, guarded
from emulated_cann.registry import INT, POINTER, function


def store(address: int, value: int) -> None:
    c.c_uint64.from_address(address).value = value


@function(POINTER, INT)
@guarded(BAD_ARGUMENT)
def aclmdlRICaptureBegin(stream: int, mode: int) -> int:
    if len(DEVICE.graphs) >= DEVICE.graph_limit:
        DEVICE.say(f"no stream resource: {len(DEVICE.graphs)} graphs are alive")
        return NO_STREAM
    DEVICE.flush()
    DEVICE.capturing = next(DEVICE.ids)
    DEVICE.graphs[DEVICE.capturing] = []
    return OK


@function(POINTER, POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclmdlRICaptureGetInfo(stream: int, status: int, graph: int) -> None:
    c.c_int.from_address(status).value = int(DEVICE.capturing is not None)
    store(graph, DEVICE.capturing or 0)


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclmdlRICaptureEnd(stream: int, graph: int) -> None:
    if DEVICE.capturing is None:
        raise RuntimeError("no capture to end")
    store(graph, DEVICE.capturing)
    DEVICE.capturing = None


@function(POINTER)
@guarded(BAD_ARGUMENT)
def aclmdlRICaptureThreadExchangeMode(mode: int) -> None:
    """Puts the thread into a mode and gives back the one it had."""
    given = c.c_int.from_address(mode)
    DEVICE.mode, given.value = given.value, DEVICE.mode


@function(POINTER, POINTER)
@guarded(KERNEL_FAULT)
def aclmdlRIExecuteAsync(graph: int, stream: int) -> None:
    DEVICE.replay(graph, stream)


@function(POINTER)
@guarded(BAD_ARGUMENT)
def aclmdlRIDestroy(graph: int) -> None:
    DEVICE.flush()
    DEVICE.graphs.pop(graph)


@function(POINTER)
@guarded(BAD_ARGUMENT)
def aclmdlRICaptureTaskGrpBegin(stream: int) -> None:
    if DEVICE.capturing is None:
        raise RuntimeError("a task group outside a capture")
    DEVICE.group_start = len(DEVICE.graphs[DEVICE.capturing])


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclmdlRICaptureTaskGrpEnd(stream: int, handle: int) -> None:
    if DEVICE.capturing is None:
        raise RuntimeError("a task group outside a capture")
    key = next(DEVICE.ids)
    DEVICE.groups[key] = DEVICE.capturing, list(range(DEVICE.group_start, len(DEVICE.graphs[DEVICE.capturing])))
    store(handle, key)


@function(POINTER, POINTER)
@guarded(BAD_ARGUMENT)
def aclmdlRICaptureTaskUpdateBegin(stream: int, handle: int) -> None:
    graph, positions = DEVICE.groups[handle]
    DEVICE.updating = graph, deque(positions)


@function(POINTER)
@guarded(BAD_ARGUMENT)
def aclmdlRICaptureTaskUpdateEnd(stream: int) -> int:
    assert DEVICE.updating is not None
    left, DEVICE.updating = len(DEVICE.updating[1]), None
    if left:
        DEVICE.say(f"graph task update: {left} recorded tasks were not replaced")
        return GROUP_MISMATCH
    return OK
