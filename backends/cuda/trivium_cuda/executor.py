"""Steps: the arrays go to the device in one copy, the kernels are queued, and nobody waits but for the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import UnsupportedError
from trivium.ops import Batch, KVSpec, Program, Sampled
from trivium.ops.sample import plain_inputs
from trivium.plugin import Executable, Step
from trivium_cuda import sampler
from trivium_cuda.session import CudaSession
from trivium_cuda.tape import Tape


class QueuedStep(Step):
    """A step whose work is queued. It keeps what was sampled, so that tokens() may be asked again."""

    def __init__(self, session: CudaSession, outputs: Mapping[str, Tensor], pending: sampler.Pending, batch: Batch) -> None:
        self._session, self._outputs, self._pending = session, outputs, pending
        self._size = batch.tokens, batch.seqs
        self._sampled: Sampled | None = None

    def tokens(self) -> Sampled:
        if self._sampled is None:
            with self._session.faults(*self._size):
                self._sampled = self._pending.wait()
        return self._sampled

    def output(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self._outputs:
            raise UnsupportedError(f"this Program has no output {name!r}; it has {', '.join(self._outputs)}")
        return np.asarray(self._session.get(self._outputs[name]), np.float32)


class QueuedExecutable(Executable):
    """Runs a tape call by call."""

    def __init__(self, session: CudaSession, tape: Tape, program: Program) -> None:
        self._session, self.tape, self.program = session, tape, program

    def run(self, batch: Batch) -> Step:
        session = self._session
        with session.faults(batch.tokens, batch.seqs), session.api.active(), torch.inference_mode():
            arrays = session.stage(batch)
            session.begin(arrays, *extents(batch))
            return self.finish(self.tape.run(arrays, batch), batch, arrays)

    def finish(self, outputs: Mapping[str, Tensor], batch: Batch, arrays: Mapping[str, Tensor]) -> Step:
        """The step whose outputs are queued, with the sampling of its logits queued behind them."""
        pending = sampler.start(self._session, outputs["logits"], batch.sampling, {"vocab_size": self.program.vocab_size}, arrays)
        return QueuedStep(self._session, outputs, pending, batch)


def extents(batch: Batch) -> tuple[int, int]:
    """(most queries, longest context) of the step's sequences."""
    return int(np.diff(batch.query_starts).max(initial=0)), int(batch.context_lens.max(initial=0))


def rehearse(session: CudaSession, eager: QueuedExecutable, program: Program) -> None:
    """Runs a step as large as there will be any, of a model that reads token ids: kernels are compiled now, and what memory it
    takes is taken now, so that a lack of it is CapacityError on load. Nothing is stored: its tokens have no slots, and recurrent
    states, of which it uses the first, are put back."""
    tokens, length = session.options.get("max_batched_tokens"), session.options.get("max_model_len")
    if not tokens or not length or not any(v.name == "token_ids" for v in program.inputs) or eager.tape.on_host:
        return
    held = [data[0].clone() for data in session.recurrent()]
    eager.run(largest_step(tokens, length, session.spec, adapters=has_adapters(program))).tokens()
    for data, before in zip(session.recurrent(), held, strict=True):
        data[0].copy_(before)


def step_bytes(session: CudaSession, program: Program, weights: Mapping[str, Any]) -> int:
    """Most bytes that the largest step takes at a time. The session has a page by now; the executable is kept for compile()."""
    eager = session.eager = QueuedExecutable(session, Tape(session, program, weights), program)
    return session.api.peak(lambda: rehearse(session, eager, program))


def largest_step(tokens: int, length: int, spec: KVSpec, *, adapters: bool) -> Batch:
    """Prompts of up to `length` tokens, `tokens` in all, that read the first page throughout."""
    starts = np.append(np.arange(0, tokens, length), tokens).astype(np.int32)
    contexts = np.diff(starts).astype(np.int32)
    positions = (np.arange(tokens) % length).astype(np.int32)
    tables = np.zeros((len(spec.groups), len(contexts), -(-int(contexts.max()) // spec.page_size)), np.int32)
    slots = np.full((len(spec.groups), tokens), -1, np.int64)
    rows = (starts[1:] - 1).astype(np.int32)
    return Batch(
        positions * 0, positions, starts, contexts, tables, slots, rows, plain_inputs(len(rows)), rows[:0],
        np.full(tokens if adapters else 0, -1, np.int32),
    )  # fmt: skip


def has_adapters(program: Program) -> bool:
    """Whether a Program was made for adapters."""
    return any(v.name == "adapters" for v in program.inputs)


def compile_program(session: CudaSession, program: Program, weights: Mapping[str, Any]) -> Executable:
    """An executable for a fused Program, with graphs for the sizes that the session was opened with."""
    eager, session.eager = session.eager, None
    if eager is None or eager.program is not program:
        eager = QueuedExecutable(session, Tape(session, program, weights), program)
    rehearse(session, eager, program)
    if not session.graph_sizes or eager.tape.on_host:
        session.graphs_are_captured()
        return eager
    from trivium_cuda.graphs import GraphExecutable

    return GraphExecutable(session, eager, adapters=has_adapters(program))
