"""The process of one rank: an opened device that does what messages say.

    python -m trivium_torch.ranks.worker FD

FD: of a socket; the first message says which backend, device, options and group. An error is an answer, not an end: the other side
decides. The process ends when the socket is closed.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist

from trivium.errors import BackendError, TriviumError, UnsupportedError
from trivium.ops import Call, KVSpec, Pattern, Weight, rewrite
from trivium.plugin import Executable, Session, Step, select_kernels
from trivium_torch.collectives import EVERYONE, Team, teams
from trivium_torch.ranks import data
from trivium_torch.ranks.data import Array, Message
from trivium_torch.ranks.wire import Gone, Wire
from trivium_torch.session import TorchSession


def float32_of(format: str) -> Callable[[Array], Array]:
    """The decoder of a float format; bfloat16 is uint16 bit patterns."""
    if format == "bfloat16":
        return lambda bits: (bits.astype(np.uint32) << 16).view(np.float32)
    return lambda numbers: numbers.astype(np.float32)


class Rank:
    """The device of one rank and what is loaded on it."""

    def __init__(self, hello: Message) -> None:
        head = hello.head
        self._folder = Path(head["store"].removeprefix("file://")).parent
        module, _, name = head["backend"].partition(":")
        backend = getattr(importlib.import_module(module), name)()
        device = backend.probe().devices[head["index"]]
        collective = head["collective"]
        dist.init_process_group(collective, init_method=head["store"], rank=head["rank"], world_size=head["ranks"])
        self._kernels = tuple(backend.kernels(device))
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in head["options"].items()}
        self._session: Session = backend.open(device, options)
        team = teams(head["ranks"], head["stride"])
        if team is not EVERYONE:
            self._join(team)
        self._weights: dict[str, Any] = {}
        self._spec = KVSpec(1, "float32", ())
        self._executable: Executable | None = None
        self._step: Step | None = None

    def _join(self, team: Team) -> None:
        if not isinstance(self._session, TorchSession):
            raise UnsupportedError("its session is not trivium_torch's: it has no way to meet some of the ranks only")
        self._session.team = team

    def answer(self, message: Message) -> Message:
        """Does what a message says."""
        return getattr(self, f"_{message.head['do']}")(message)  # type: ignore[no-any-return]

    def _nothing(self, message: Message) -> Message:
        return Message({})

    def _memory(self, message: Message) -> Message:
        return Message({"memory": list(self._session.memory())})

    def _page_bytes(self, message: Message) -> Message:
        return Message({"bytes": self._session.page_bytes(data.spec_of(message.head["spec"]))})

    def _load(self, message: Message) -> Message:
        head, [array] = message.head, message.arrays
        weight = Weight(head["name"], tuple(head["shape"]), head["stored"], array, float32_of(head["stored"]), head["origin"])
        loaded = self._session.load(weight, head["format"])
        self._weights.update(dict.fromkeys(head["names"], loaded))
        return Message({})

    def _kv_store(self, message: Message) -> Message:
        self._spec = data.spec_of(message.head["spec"])
        self._session.kv_store(self._spec, message.head["pages"])
        return Message({})

    def _compile(self, message: Message) -> Message:
        traced = data.program_of(message)
        for c in traced.constants:
            if c.value.name not in self._weights and c.array is not None:
                own = Weight(c.value.name, c.array.shape, "float32", c.array, float32_of("float32"))
                self._weights[c.value.name] = self._session.load(own, "float32")
        patterns = tuple(dict.fromkeys(k.op for k in self._kernels if isinstance(k.op, Pattern)))

        def accept(call: Call) -> bool:
            return select_kernels(replace(traced, calls=(call,)), self._kernels)[0].kernel is not None

        self._executable = self._session.compile(rewrite(traced, patterns, accept=accept), self._weights)
        return Message({})

    def _run(self, message: Message) -> Message:
        if self._executable is None:
            raise BackendError("there is no Program yet")
        self._step = self._executable.run(data.batch_of(message))
        return data.sampled_message(self._step.tokens())

    def _output(self, message: Message) -> Message:
        if self._step is None:
            raise BackendError("no step was run yet")
        return Message({}, [self._step.output(message.head["name"])])

    def _copy_pages(self, message: Message) -> Message:
        self._session.copy_pages(message.head["src"], message.head["dst"])
        return Message({})

    def _export_pages(self, message: Message) -> Message:
        return Message({}, data.page_arrays(self._session.export_pages(message.head["group"], message.head["ids"])))

    def _import_pages(self, message: Message) -> Message:
        group, ids = message.head["group"], message.head["ids"]
        self._session.import_pages(group, ids, data.pages_of(self._spec, group, message.arrays))
        return Message({})

    def close(self) -> None:
        """Gives everything back; the group's folder too, for who made it may have been killed. The process group is left to the
        end of the process: a rank that takes it down opens the store's file once more, makes it again where another rank has
        removed it, and waits for minutes where its folder is gone."""
        try:
            self._session.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def failure(error: Exception) -> Message:
    """An error as an answer."""
    kind = type(error).__name__ if isinstance(error, TriviumError) else "BackendError"
    text = str(error) if isinstance(error, TriviumError) else f"{type(error).__name__}: {error}"
    return Message({"error": kind, "message": text, "param": getattr(error, "param", None)})


def serve(wire: Wire) -> None:
    """Answers until nobody asks."""
    rank: Rank | None = None
    try:
        while True:
            message = wire.recv()
            try:
                if rank is None:
                    rank, answer = Rank(message), Message({})
                else:
                    answer = rank.answer(message)
            except Exception as error:
                answer = failure(error)
            wire.send(answer)
    except Gone:
        if rank is not None:
            rank.close()


def main() -> NoReturn:
    code = 1
    try:
        serve(Wire(socket.socket(fileno=int(sys.argv[1]))))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # what the interpreter would take down at its end is the process group: see Rank.close


if __name__ == "__main__":
    main()
