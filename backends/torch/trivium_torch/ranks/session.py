"""A Session over the ranks of a group: it holds no device itself, and tells each rank's process what to do."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from trivium import errors
from trivium.errors import BackendError, InvalidRequestError, TriviumError, UnsupportedError
from trivium.ops import Batch, KVSpec, Pages, Program, Sampled, Weight
from trivium.ops.sample import plain_inputs
from trivium.plugin import Device, Executable, Memory, Session, Step
from trivium_torch.formats import FORMATS
from trivium_torch.ranks import data
from trivium_torch.ranks.data import NOTHING, Array, Message
from trivium_torch.ranks.division import Division, Ways, divide, loads
from trivium_torch.ranks.wire import Gone, Wire

if TYPE_CHECKING:
    from trivium_torch.plugin import TorchBackend

START_SECONDS = 300.0
"""How long processes may take to import torch and to find each other."""
GRACE_SECONDS = 10.0
"""Once a rank has failed, how long the others may take to say that they did too. One that does not say so waits for it in a
collective, for good."""
_FLOATS = ("float32", "bfloat16", "float16")


def rank_devices(backend: TorchBackend, device: Device, ways: Ways) -> list[Device]:
    """The devices of the ranks: `device` and those that follow it, or on the host the same for all. Raises InvalidRequestError."""
    kind = backend.torch_device(device).partition(":")[0]
    if kind == "cpu":
        return [device] * ways.ranks
    same = [d for d in backend.probe().devices if backend.torch_device(d).partition(":")[0] == kind and d.index >= device.index]
    if len(same) < ways.ranks:
        message = f"{ways} needs as many devices of this machine from {device.name} on; there are {len(same)}"
        raise InvalidRequestError(message, param="tensor_parallel" if ways.tensor > 1 else "pipeline_parallel")
    return same[: ways.ranks]


@dataclass(eq=False)
class Pending:
    """A weight that no rank has yet: how it is cut is known once there is a Program."""

    weight: Weight
    format: str


@dataclass(eq=False)
class Ticket:
    """A message to all ranks, and their answers as far as they are here. meets: the ranks meet in collectives."""

    meets: bool
    answers: dict[int, Message] = field(default_factory=dict)


class RanksStep(Step):
    """A step under way on all ranks."""

    def __init__(self, session: RanksSession, ticket: Ticket) -> None:
        self._session, self._ticket = session, ticket

    def tokens(self) -> Sampled:
        return data.sampled_of(self._session.settle(self._ticket)[self._session.speaker])

    def output(self, name: str) -> npt.NDArray[np.float32]:
        self._session.settle(self._ticket)
        return np.asarray(self._session.ask_speaker({"do": "output", "name": name}).arrays[0])


class RanksExecutable(Executable):
    """The Program, cut, on all ranks."""

    def __init__(self, session: RanksSession) -> None:
        self._session = session

    def run(self, batch: Batch) -> Step:
        return RanksStep(self._session, self._session.start_step(batch))


class RanksSession(Session):
    """See plugin.Session. backend, devices: what each rank opens; options: of its open(), with a definite "dtype"; ways: how a
    model is shared out."""

    def __init__(self, backend: TorchBackend, devices: Sequence[Device], options: Mapping[str, Any], ways: Ways) -> None:
        self._ways = ways
        self._ranks, self._on_host = len(devices), backend.torch_device(devices[0]) == "cpu"
        self._folder = tempfile.TemporaryDirectory(prefix="trivium-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._wires: list[Wire] = []
        self._ends: list[socket.socket] = []
        self._sent: deque[Ticket] = deque()
        self._lost = ""
        self._pending: list[Pending] = []
        self._spec, self._pages = KVSpec(1, "float32", ()), 0
        self._division = Division((), 0)
        try:
            self._start(backend, devices, dict(options))
        except BaseException:
            self.close()
            raise

    # Processes and messages.

    def _start(self, backend: TorchBackend, devices: Sequence[Device], options: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        threads = max(1, torch.get_num_threads() // self._ranks) if self._on_host else 1  # else each would take all processors
        kind = torch.device(backend.torch_device(devices[0]))
        head = {
            "backend": f"{type(backend).__module__}:{type(backend).__qualname__}", "ranks": self._ranks, "options": options,
            "stride": self._ways.tensor,
            "collective": dist.get_default_backend_for_device(kind), "store": f"file://{Path(self._folder.name) / 'store'}",
        }  # fmt: skip
        for _ in devices:
            self._spawn(threads)
        ticket = self._post([
            Message({**head, "rank": rank, "index": d.index}) for rank, d in enumerate(devices)
        ], meets=True)  # fmt: skip
        self.settle(ticket, START_SECONDS)

    def _spawn(self, threads: int) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "trivium_torch.ranks.worker", str(theirs.fileno())]
            path = os.pathsep.join(p for p in sys.path if p)
            env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
            # A session of its own: Ctrl-C in a terminal is for who asked, and what it means is theirs to say.
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )  # fmt: skip
            self._processes.append(process)
        self._ends.append(mine)
        self._wires.append(Wire(mine))

    def _post(self, messages: Sequence[Message], *, meets: bool = False) -> Ticket:
        """Sends each rank its message."""
        if self._lost:
            raise BackendError(self._lost)
        ticket = Ticket(meets)
        self._sent.append(ticket)
        for rank, (wire, message) in enumerate(zip(self._wires, messages, strict=True)):
            with self._whole(rank):
                wire.send(message)
        return ticket

    def _tell(self, head: dict[str, Any], arrays: Sequence[Array] = (), *, meets: bool = False) -> Ticket:
        """Sends all ranks one message."""
        return self._post([Message(head, arrays)] * self._ranks, meets=meets)

    def ask(self, head: dict[str, Any], arrays: Sequence[Array] = ()) -> list[Message]:
        """The answers of all ranks to one message."""
        return self.settle(self._tell(head, arrays))

    def ask_speaker(self, head: dict[str, Any]) -> Message:
        """The answer of the rank whose tokens count."""
        messages = [NOTHING] * self._ranks
        messages[self.speaker] = Message(head)
        return self.settle(self._post(messages))[self.speaker]

    @property
    def speaker(self) -> int:
        """The rank whose tokens and outputs count."""
        return self._division.speaker

    def settle(self, ticket: Ticket, seconds: float | None = None) -> list[Message]:
        """Waits for the answers to a message, and to those before it. Raises what a rank raised, BackendError once one is lost."""
        if self._lost:
            raise BackendError(self._lost)
        while ticket in self._sent:
            self._receive(self._sent[0], seconds)
            self._sent.popleft()
        answers = [ticket.answers[rank] for rank in range(self._ranks)]
        for rank, answer in enumerate(answers):
            if "error" in answer.head:
                _raise(rank, answer.head)
        return answers

    def _receive(self, ticket: Ticket, seconds: float | None) -> None:
        with selectors.DefaultSelector() as ready:
            for rank, end in enumerate(self._ends):
                if rank not in ticket.answers:  # else, of a wait that was interrupted: what it says next is not for this ticket
                    ready.register(end, selectors.EVENT_READ, rank)
            deadline = None if seconds is None else time.monotonic() + seconds
            while len(ticket.answers) < self._ranks:
                found = ready.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if not found:
                    self._give_up(_first_error(ticket) or "the ranks don't answer")
                for key, _ in found:
                    self._take(ticket, key.data)
                    ready.unregister(key.fileobj)
                if deadline is None and ticket.meets and _first_error(ticket):
                    deadline = time.monotonic() + GRACE_SECONDS

    def _take(self, ticket: Ticket, rank: int) -> None:
        with self._whole(rank):
            ticket.answers[rank] = self._wires[rank].recv()

    @contextmanager
    def _whole(self, rank: int) -> Iterator[None]:
        """A message is under way: with half of one, as after Ctrl-C, nobody knows where the next begins."""
        try:
            yield
        except Gone:
            self._give_up(f"rank {rank} has ended")
        except BaseException:
            self._lose(f"a message of rank {rank} was cut off")
            raise

    def _give_up(self, reason: str) -> NoReturn:
        """A group that lacks a rank can't go on."""
        self._lose(reason)
        raise BackendError(self._lost)

    def _lose(self, reason: str) -> None:
        self._lost = f"the group of ranks is lost: {reason}; load the model again"
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    # Memory, weights and steps.

    def put(self, array: npt.NDArray[Any]) -> Any:
        raise UnsupportedError("a group of ranks has no tensors of its own")

    def get(self, tensor: Any) -> npt.NDArray[Any]:
        raise UnsupportedError("a group of ranks has no tensors of its own")

    def memory(self) -> Memory:
        """On the host that of the host, else of all devices; weights that are not loaded yet are taken off."""
        ranks = [Memory(*answer.head["memory"]) for answer in self.ask({"do": "memory"})]
        total, free = (
            (ranks[0].total, ranks[0].free) if self._on_host else (sum(m.total for m in ranks), sum(m.free for m in ranks))
        )
        bits = {f.name: f.bits for f in FORMATS}
        due = sum(int(bits[p.format] * np.prod(p.weight.shape)) // 8 for p in self._pending)
        return Memory(total, max(free - due, 0), sum(m.weights for m in ranks), sum(m.kv for m in ranks))

    def load(self, weight: Weight, format: str) -> Pending:
        if format not in [f.name for f in FORMATS]:
            message = f"{weight.name} can't be held as {format} by a group of ranks; it holds {', '.join(f.name for f in FORMATS)}"
            raise UnsupportedError(message, param="quantize")
        self._pending.append(Pending(weight, format))
        return self._pending[-1]

    def read_weight(self, tensor: Pending) -> npt.NDArray[np.float32]:
        return tensor.weight.decode()

    def page_bytes(self, spec: KVSpec) -> int:
        """Of all ranks, each of which has its share of the heads."""
        return int(self.ask({"do": "page_bytes", "spec": data.spec_data(spec)})[0].head["bytes"])

    def kv_store(self, spec: KVSpec, pages: int) -> None:
        self._spec, self._pages = spec, pages  # which states are cut is known once there is a Program

    def compile(self, program: Program, weights: Mapping[str, Any]) -> Executable:
        self._division = divide(program, self._spec, self._ways)
        pieces = [share.piece for share in self._division.shares]
        for pending, dim, names in loads(self._division, weights):
            self.settle(self._post(list(_load_messages(pending, dim, names, pieces))))
        self._pending.clear()
        stores = [{"do": "kv_store", "spec": data.spec_data(s.spec), "pages": self._pages} for s in self._division.shares]
        self.settle(self._post([Message(head) for head in stores]))
        messages = [data.program_message(s.program) for s in self._division.shares]
        self.settle(self._post([m._replace(head={"do": "compile", **m.head}) for m in messages], meets=True))
        return RanksExecutable(self)

    def start_step(self, batch: Batch) -> Ticket:
        """The step on all ranks. Only the speaker has to draw tokens."""
        rows = len(batch.sample_rows)
        quiet = replace(batch, sampling=replace(plain_inputs(rows), score_ids=np.zeros(rows, np.int32)))
        messages = [data.batch_message(quiet)] * self._ranks
        messages[self.speaker] = data.batch_message(batch)
        return self._post(messages, meets=True)

    # Pages.

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.ask({"do": "copy_pages", "src": [int(i) for i in src], "dst": [int(i) for i in dst]})

    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        """As one device would have them: of all heads and layers."""
        answers = self.ask({"do": "export_pages", "group": group, "ids": [int(i) for i in ids]})
        return data.pages_of(self._spec, group, self._division.joined(group, [a.arrays for a in answers]))

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        head = {"do": "import_pages", "group": group, "ids": [int(i) for i in ids]}
        parts = self._division.divided(group, data.page_arrays(pages), len(pages.tensors))
        self.settle(self._post([Message(head, part) for part in parts]))


def _first_error(ticket: Ticket) -> str:
    errors_ = (f"rank {rank}: {a.head['message']}" for rank, a in ticket.answers.items() if "error" in a.head)
    return next(errors_, "")


def _raise(rank: int, head: Mapping[str, Any]) -> NoReturn:
    kind: type[TriviumError] = getattr(errors, head["error"], BackendError)
    raise kind(f"rank {rank}: {head['message']}", param=head["param"])


def _load_messages(
    pending: Pending, dim: int | None, names: Sequence[list[str]], pieces: Sequence[tuple[int, int]]
) -> Iterator[Message]:
    """Each rank's part of a weight; floats go as they are stored, the rest as float32."""
    weight = pending.weight
    stored = weight.format if weight.format in _FLOATS else "float32"
    whole = np.asarray(weight.data if weight.format in _FLOATS else weight.decode()).reshape(weight.shape)
    for own, (which, count) in zip(names, pieces, strict=True):
        if not own:
            yield NOTHING
            continue
        array, origin = whole, weight.origin
        if dim is not None:
            size = weight.shape[dim] // count
            array = whole[(slice(None),) * dim + (slice(which * size, (which + 1) * size),)]
            origin = weight.origin and f"{weight.origin}/{dim}:{which} of {count}"
        head = {
            "do": "load", "names": own, "name": weight.name, "shape": list(array.shape), "stored": stored, "origin": origin,
            "format": pending.format,
        }  # fmt: skip
        yield Message(head, [array])
