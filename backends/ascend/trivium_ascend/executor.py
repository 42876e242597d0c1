"""Steps that are started and waited for apart: a tape of kernels, sampling on the device, and ids copied to the host behind it
all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import BackendError, UnsupportedError
from trivium.ops import OPERATORS, Batch, Program, Sampled, SampleInputs, Value
from trivium.plugin import Choice, Executable, Step, announce_fallbacks, run_on_host, select_kernels
from trivium_ascend.rounding import Line, round_norms
from trivium_ascend.session import AscendSession
from trivium_torch.sampling import draw, edited, on_device


class Tape:
    """A Program's calls with their kernels, decided once; values live in numbered registers."""

    def __init__(self, session: AscendSession, program: Program, weights: Mapping[str, Any], *, announce: bool = True) -> None:
        self.session, self.program = session, program
        choices = select_kernels(program, session.kernels)
        missing = [(c.call.name, "; ".join(reason for _, reason in c.refused) or "no kernel") for c in choices if c.kernel is None]
        if announce:
            announce_fallbacks(session.backend, missing, strict=session.strict)
        self._register: dict[Value, int] = {}
        self._state = {s.value: i for i, s in enumerate(program.states)}
        self._constants = [(self._of(c.value), weights[c.value.name]) for c in program.constants]
        for value in (*program.inputs, *(s.value for s in program.states)):
            self._of(value)
        self.lines = round_norms(session, self._lines(choices), dict[int | None, Any](self._constants))

    def _of(self, value: Value) -> int:
        """A value's register. All versions of a state are the one that the step began with: it is written in place."""
        return self._register.setdefault(value, len(self._register))

    def _lines(self, choices: Sequence[Choice]) -> list[Line]:
        kept = {self._of(v) for v in self.program.outputs.values()} | {at for at, _ in self._constants}
        made = [self._line(choice) for choice in choices]
        last = {at: i for i, line in enumerate(made) for at in (*line.args, *line.results) if at is not None}
        dead: dict[int, list[int]] = {}
        for at, i in last.items():
            if at not in kept:
                dead.setdefault(i, []).append(at)
        return [line._replace(dead=tuple(dead.get(i, ()))) for i, line in enumerate(made)]

    def _line(self, choice: Choice) -> Line:
        call = choice.call
        state = next((self._state[v] for v in call.args if v in self._state), -1)
        for result in (r for r in call.results if r.kind == "state"):
            self._state[result] = state
            self._register[result] = self._of(self.program.states[state].value)
        return Line(
            choice, tuple(None if v is None else self._of(v) for v in call.args), tuple(map(self._of, call.results)), (), state
        )

    def run(self, inputs: Mapping[str, Tensor], states: Sequence[Any], batch: Batch | None) -> dict[str, Tensor]:
        """The Program's outputs. batch: for operators that run on the host."""
        values: list[Any] = [None] * len(self._register)
        for at, tensor in self._constants:
            values[at] = tensor
        for value in self.program.inputs:
            values[self._of(value)] = inputs[value.name]
        for declared, state in zip(self.program.states, states, strict=True):
            values[self._of(declared.value)] = state
        for line in self.lines:
            try:
                self._play(line, values, batch)
            except Exception as e:
                kernel = line.choice.kernel
                where = f"{kernel.name if kernel else 'the host'} in {line.choice.call}"
                raise BackendError(f"backend {self.session.backend!r}: {where} failed: {type(e).__name__}: {e}") from e
        return {name: values[self._of(v)] for name, v in self.program.outputs.items()}

    def _play(self, line: Line, values: list[Any], batch: Batch | None) -> None:
        args, choice = [None if at is None else values[at] for at in line.args], line.choice
        if choice.kernel is not None:
            got = choice.kernel.run(self.session, args, choice.call.attrs)
            made = list(got) if type(got) is tuple else [got]
        else:
            assert batch is not None
            host = run_on_host(self.session, self.session.spec, choice.call, args, batch, line.state)
            made = [values[at] if x is None else self.session.put(x) for at, x in zip(line.results, host, strict=True)]
        for at, value in zip(line.results, made, strict=True):
            values[at] = value
        for at in line.dead:
            values[at] = None


class Drawn:
    """Ids that the device is still to choose, on their way to pinned memory of the host."""

    def __init__(self, ids: Tensor, given: npt.NDArray[np.int32]) -> None:
        self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        self._host.copy_(ids, non_blocking=True)
        self._done = torch.Event(ids.device.type)
        self._done.record()
        self._given = np.array(given)

    def sampled(self) -> Sampled:
        self._done.synchronize()
        chosen = self._host.numpy().astype(np.int32)
        return Sampled(np.where(self._given >= 0, self._given, chosen))


def sample(session: AscendSession, logits: Tensor, inputs: SampleInputs, vocab_size: int) -> Drawn | Sampled:
    """Starts sampling where the device can do it all (see trivium_torch.sampling); else waits, and the reference draws."""
    if not on_device(session, inputs):
        return OPERATORS["sample"](session.get(logits), inputs, vocab_size=vocab_size)  # type: ignore[no-any-return]
    x = edited(session, logits[:, :vocab_size], inputs)
    ids = x.argmax(dim=-1) if len(x) else x.new_zeros(0, dtype=torch.int64)
    drawn = np.flatnonzero((inputs.temperature > 0) & (inputs.score_ids < 0))
    if len(drawn):
        rows = session.upload(drawn)
        ids = ids.index_copy(0, rows, draw(session, x[rows].to(torch.float32), ids[rows], inputs, drawn))
    return Drawn(ids, inputs.score_ids)


class AscendStep(Step):
    """A step under way."""

    def __init__(self, session: AscendSession, outputs: Mapping[str, Tensor], sampled: Drawn | Sampled) -> None:
        self._session, self._outputs, self._sampled = session, outputs, sampled

    def tokens(self) -> Sampled:
        if isinstance(self._sampled, Drawn):
            self._sampled = self._sampled.sampled()
        return self._sampled

    def output(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self._outputs:
            raise UnsupportedError(f"this Program has no output {name!r}; it has {', '.join(self._outputs)}")
        return np.asarray(self._session.get(self._outputs[name]), np.float32)


class AscendExecutable(Executable):
    """Every step call by call."""

    def __init__(self, session: AscendSession, program: Program, weights: Mapping[str, Any]) -> None:
        self._session, self._program = session, program
        self.tape = Tape(session, program, weights)

    def run(self, batch: Batch) -> Step:
        session = self._session
        with torch.inference_mode():
            session.begin_step()
            session.query_starts = batch.query_starts
            inputs = {v.name: session.put(getattr(batch, v.name)) for v in self._program.inputs}
            states = [session.step_state(i, batch) for i in range(len(self._program.states))]
            outputs = self.tape.run(inputs, states, batch)
            return AscendStep(session, outputs, sample(session, outputs["logits"], batch.sampling, self._program.vocab_size))
