"""A Program call by call: the kernel of every call is chosen once, and values live in numbered registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trivium.errors import BackendError
from trivium.ops import Batch, Call, Program, Value
from trivium.plugin import Choice, announce_fallbacks, run_on_host, select_kernels
from trivium_cuda.rounding import round_ahead

if TYPE_CHECKING:
    from trivium_cuda.session import CudaSession

NOTHING = 0
"""The register of arguments that are absent."""


class Line(NamedTuple):
    """One call. `results`: -1 for a state, which is written in place. `done`: registers that nobody reads afterwards. `run` None:
    the reference on the host, with the index of the call's state or -1."""

    run: Callable[..., Any] | None
    name: str
    call: Call
    args: tuple[int, ...]
    results: tuple[int, ...]
    done: tuple[int, ...]
    state: int


class Tape:
    """`weights`: every constant by name, as session.load gave it. Raises UnsupportedError for calls without a kernel if the session
    is strict, else warns of them."""

    def __init__(self, session: CudaSession, program: Program, weights: Mapping[str, Any]) -> None:
        self._session, self._program = session, program
        choices = select_kernels(program, session.kernels)
        missing = [(c.call.name, "; ".join(reason for _, reason in c.refused) or "no kernel") for c in choices if c.kernel is None]
        announce_fallbacks(session.backend, missing, strict=session.strict)
        self.on_host = tuple(dict.fromkeys(name for name, _ in missing))
        """Operators that run as the reference on the host."""
        self._registers: dict[Value, int] = {}
        self._states: dict[Value, int] = {s.value: i for i, s in enumerate(program.states)}
        self._state_places = [self._place(s.value) for s in program.states]
        self._input_places = [(v.name, self._place(v)) for v in program.inputs]
        constants = [(self._place(c.value), weights[c.value.name]) for c in program.constants]
        lines = [self._line(choice) for choice in choices]
        self._outputs = {name: self._place(value) for name, value in program.outputs.items()}
        self._lines = _with_ends(lines, {*self._outputs.values(), *self._state_places, *(r for r, _ in constants)})
        self._start: list[Any] = [None] * (len(self._registers) + 1)
        for register, weight in constants:
            self._start[register] = weight
        self._lines = round_ahead(self._lines, self._start)

    def _place(self, value: Value) -> int:
        return self._registers.setdefault(value, len(self._registers) + 1)

    def _line(self, choice: Choice) -> Line:
        call, kernel = choice.call, choice.kernel
        state = next((self._states[v] for v in call.args if v in self._states), -1)
        args = tuple(NOTHING if v is None else self._place(v) for v in call.args)
        results = []
        for value in call.results:
            if value.kind == "state":
                self._states[value] = state
                self._registers[value] = self._state_places[state]
            results.append(-1 if value.kind == "state" else self._place(value))
        name = "the host" if kernel is None else kernel.name or call.name
        return Line(None if kernel is None else kernel.run, name, call, args, tuple(results), (), state)

    def run(self, inputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Any]:
        """The outputs by name. `inputs`: those of the Program on the device."""
        session, values = self._session, list(self._start)
        for name, register in self._input_places:
            values[register] = inputs[name]
        for index, register in enumerate(self._state_places):
            values[register] = session.step_state(index, batch)
        for line in self._lines:
            try:
                self._play(line, values, batch)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:
                where = f"{line.name} in {line.call}"
                raise BackendError(f"backend {session.backend!r}: {where} failed: {type(e).__name__}: {e}") from e
        return {name: values[register] for name, register in self._outputs.items()}

    def _play(self, line: Line, values: list[Any], batch: Batch) -> None:
        args = [values[register] for register in line.args]
        if line.run is None:
            found: Sequence[Any] = self._on_host(line, args, batch)
        else:
            got = line.run(self._session, args, line.call.attrs)
            found = got if type(got) is tuple else (got,)
        for register, value in zip(line.results, found, strict=True):
            if register > 0:
                values[register] = value
        for register in line.done:
            values[register] = None

    def _on_host(self, line: Line, args: Sequence[Any], batch: Batch) -> list[Any]:
        session = self._session
        host = run_on_host(session, session.spec, line.call, args, batch, line.state)
        return [None if x is None else session.put(x) for x in host]


def _with_ends(lines: Sequence[Line], kept: set[int]) -> list[Line]:
    """The lines, each with the registers that it is the last to touch and that are not to be kept."""
    seen, found = {*kept, NOTHING, -1}, []
    for line in reversed(lines):
        touched = {*line.args, *line.results}
        found.append(line._replace(done=tuple(sorted(touched - seen))))
        seen |= touched
    return found[::-1]
