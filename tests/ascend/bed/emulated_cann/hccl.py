"""HCCL between processes with emulated NPUs: a process group under that name, whose collectives are gloo's on the device's memory.

Each is a task of the device: it comes behind what was queued before it, and is recorded while a graph is captured. Of HCCL itself
nothing is emulated: what is under test is who meets whom, with what, in which order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_cann.device import DEVICE
from emulated_cann.objects import host
from emulated_cann.registry import need

LOG = "EMULATED_HCCL_LOG"
"""A folder in which every rank notes its collectives: a file RANK with a line "name device dtype" each."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64)


class Done:
    """The device's queue says when it is: whoever reads a result waits for that."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class HostGroup(dist.ProcessGroup):
    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self._log = os.environ.get(LOG)
        self._device: torch.device | None = None

    def getBackendName(self) -> str:
        return "hccl"

    def _task(self, name: str, tensors: list[torch.Tensor], run: Callable[[list[torch.Tensor]], Any]) -> Done:
        for t in tensors:
            need(t.device.type == "npu" and t.is_contiguous(), f"hccl {name} takes contiguous npu tensors, not {t.device}")
            need(t.dtype in DTYPES, f"hccl {name} takes no {t.dtype}")
            need(self._device in (None, t.device), f"a rank has one device, {self._device}, not {t.device}, too")
            self._device = t.device
        views = [host(t) for t in tensors]
        DEVICE.emit(name, lambda: run(views).wait())
        if self._log:
            with (Path(self._log) / str(self.rank())).open("a") as log:
                print(name, tensors[0].device, tensors[0].dtype, file=log)
        return Done()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        given = opts or dist.AllreduceOptions()
        return self._task("allreduce", list(tensors), lambda views: self._gloo.allreduce(views, given))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Done:
        [parts], [own] = outputs, inputs
        return self._task("allgather", [own, *parts], lambda views: self._gloo.allgather([views[1:]], views[:1]))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Done:
        return self._task("send", list(tensors), lambda views: self._gloo.send(views, rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Done:
        return self._task("recv", list(tensors), lambda views: self._gloo.recv(views, rank, tag))


def install() -> None:
    """From now on torch.distributed's "hccl" is this one, in this process."""
    dist.Backend.register_backend("hccl_of_the_host", HostGroup, extended_api=True, devices=["npu"])
    dist.Backend._plugins["HCCL"] = dist.Backend._plugins.pop("HCCL_OF_THE_HOST")
