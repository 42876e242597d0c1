"""A compiled Program: the tape, and the calls between its stretches that run on the host."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import BackendError, InvalidRequestError, UnsupportedError
from trivium.ops import Batch, Call, Program, Sampled, Shape, Value
from trivium.plugin import Executable, Profile, Session, Step, run_on_host
from trivium_cpu.lowering import Lowering, Segment
from trivium_cpu.places import Place
from trivium_cpu.profile import Meter

_ENLARGING = 32e-3
"""Seconds before a step, at most, to make pages huge where that had to wait."""
_ENLARGING_SHARE = 1 / 3
"""Of the time, for that: small pages cost decode a sixth, so a short answer should not wait for all of them."""


class TapeStep(Step):
    """A step that ran to its end inside run(). Outputs live in the tape's memory until the next step."""

    def __init__(self, executable: TapeExecutable, sampled: Sampled, sizes: Mapping[str, int]) -> None:
        self._executable = executable
        self._sampled = sampled
        self._sizes = sizes
        self._number = executable.steps

    def tokens(self) -> Sampled:
        return self._sampled

    def output(self, name: str) -> npt.NDArray[np.float32]:
        if self._number != self._executable.steps:
            raise BackendError(f"the output {name!r} of a step must be read before the next step runs")
        return self._executable.output(name, self._sizes)


class TapeExecutable(Executable):
    """Runs a Program's tape; see Lowering."""

    def __init__(self, session: Session, low: Lowering) -> None:
        self._session = session
        self._low = low
        self._tape = low.tape
        self._program: Program = low.program
        self._segments: Sequence[Segment] = tuple(low.segments)
        self._whole = len(self._segments) == 1 and self._segments[0].call is None
        self._outputs = {name: (value, low.place(value)) for name, value in self._program.outputs.items()}
        self._host_places = {v: low.place(v) for s in self._segments if s.call for v in _tensors(s.call)}
        self._process = os.getpid()
        matrices = [w.matrix for w in low.weights.values() if w.matrix is not None]
        self._meter = Meter(low.tape, low.runtime, low.costs, matrices)
        self.operations, self.barriers = len(low.tape), low.barriers
        self.steps = 0
        self._small_pages = low.runtime.small_bytes > 0
        self._enlarged, self._enlarging = time.perf_counter(), 0.0

    def _enlarge_pages(self) -> None:
        """For its share of the time since the last time, if a page is likely to be made in that."""
        start = time.perf_counter()
        share = _ENLARGING_SHARE * (start - self._enlarged)
        if share >= self._enlarging:
            self._small_pages = self._low.runtime.enlarge_pages(min(share, _ENLARGING))
            self._enlarged = time.perf_counter()
            self._enlarging = self._enlarged - start

    def run(self, batch: Batch) -> TapeStep:
        if os.getpid() != self._process:
            raise BackendError("this model was loaded before a fork, which kept none of its threads; load it in the new process")
        self.steps += 1
        if self._small_pages and self.steps > 1:  # the first token must not wait
            self._enlarge_pages()
        sizes = {"tokens": batch.tokens, "rows": len(batch.sample_rows), "pooled": len(batch.pool_rows), "seqs": batch.seqs}
        if self._meter.on:
            self._meter.step(sizes, batch)
        try:
            sampled = self._run_whole(batch) if self._whole and "logits" in self._outputs else self._run_parts(batch, sizes)
        except IndexError as e:
            raise InvalidRequestError(str(e)) from e
        return TapeStep(self, sampled, sizes)

    def output(self, name: str, sizes: Mapping[str, int]) -> npt.NDArray[Any]:
        """One of the outputs of the step that ran last."""
        if name not in self._outputs:
            raise UnsupportedError(f"this Program has no output {name!r}; it has {', '.join(self._outputs)}")
        value, place = self._outputs[name]
        return self._read(value, place, sizes)

    def profile(self, on: bool) -> Profile:
        return self._meter.switch(on)

    def _run_whole(self, batch: Batch) -> Sampled:
        value, place = self._outputs["logits"]
        return Sampled(*self._tape.run(batch, place.ref, int(value.shape[-1]), self._vocab(value)))

    def _run_parts(self, batch: Batch, sizes: Mapping[str, int]) -> Sampled:
        self._tape.begin(batch)
        for segment in self._segments:
            if segment.call is None:
                self._tape.run_range(segment.first, segment.last)
            else:
                began = time.perf_counter()
                self._run_on_host(segment.call, batch, sizes)
                self._meter.host(segment.call.name, time.perf_counter() - began)
        if "logits" not in self._outputs:
            return Sampled(np.zeros(0, np.int32))
        value, place = self._outputs["logits"]
        return Sampled(*self._tape.sample(place.ref, int(value.shape[-1]), self._vocab(value)))

    def _vocab(self, logits: Value) -> int:
        return self._program.vocab_size or int(logits.shape[-1])

    def _run_on_host(self, call: Call, batch: Batch, sizes: Mapping[str, int]) -> None:
        low = self._low
        args = [None if v is None or v.kind == "state" else self._argument(v, sizes) for v in call.args]
        results = run_on_host(self._session, low.spec, call, args, batch, low.state_index(call))
        for value, result in zip(call.results, results, strict=True):
            if result is None:
                continue
            if value.dtype == "float":
                self._tape.write_floats(self._host_places[value].ref, np.ascontiguousarray(result, np.float32))
            else:
                self._tape.write_ints(self._host_places[value].ref, np.ascontiguousarray(result, np.int32))

    def _argument(self, value: Value, sizes: Mapping[str, int]) -> Any:
        """What the host reference reads: arrays, and loaded weights as they are."""
        return self._low.weights[value] if value.kind == "constant" else self._read(value, self._host_places[value], sizes)

    def _read(self, value: Value, place: Place, sizes: Mapping[str, int]) -> npt.NDArray[Any]:
        shape = _resolved(value.shape, sizes)
        read = self._tape.read_floats if value.dtype == "float" else self._tape.read_ints
        return np.asarray(read(place.ref, shape))


def _tensors(call: Call) -> list[Value]:
    return [v for v in (*call.args, *call.results) if v is not None and v.kind in ("call", "input")]


def _resolved(shape: Shape, sizes: Mapping[str, int]) -> list[int]:
    return [d if isinstance(d, int) else sizes[d.removesuffix("+1")] + d.endswith("+1") for d in shape]
