"""Runs an Example on a backend and on the reference, and compares everything that comes out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trivium.conformance.examples import Example, State
from trivium.conformance.numbers import Array
from trivium.ops import (
    Batch, Group, KVSpec, LatentKV, PagedState, Program, RecurrentState, Sampled, SampleInputs, Value, Weight,
)  # fmt: skip
from trivium.ops.patterns import run_calls
from trivium.ops.sample import plain_inputs
from trivium.plugin import Backend, Capabilities, Device, Executable, HostFallbackWarning, Kernel, Pages, Session, resolve


class Outcome(NamedTuple):
    """What a backend made of an Example, and what the reference makes of the same numbers."""

    outputs: Mapping[str, Array]
    states: Sequence[State]
    sampled: Sampled
    want: Mapping[str, Array]
    want_states: Sequence[State]


@dataclass(frozen=True)
class Lab:
    """A backend on the bench. `options` go to every open()."""

    backend: Backend
    device: Device
    capabilities: Capabilities
    kernels: Sequence[Kernel]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Activation dtypes to judge: the one asked for, else all."""
        return (self.options["dtype"],) if "dtype" in self.options else self.capabilities.dtypes

    def kv_dtypes(self, dtype: str) -> tuple[str, ...]:
        """KV formats that go with an activation dtype."""
        return tuple(kv for kv in self.capabilities.kv_dtypes if self.capabilities.kv_refused(dtype, kv) is None)

    @property
    def kv_dtype(self) -> str:
        """The KV format that goes best with what session() computes in if no dtype is asked for."""
        return self.kv_dtypes(self.dtypes[0])[0]

    @property
    def page_size(self) -> int:
        """A small page size, so that short examples cross pages."""
        return min((size for size in self.capabilities.page_sizes if size >= 4), default=max(self.capabilities.page_sizes))

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Page sizes that attention is tried with: a small one and the one that the backend likes best."""
        return tuple(dict.fromkeys((self.page_size, self.capabilities.page_sizes[0])))

    @property
    def step_tokens(self) -> int:
        """Most tokens that a step may have."""
        return self.capabilities.max_batched_tokens or sys.maxsize

    @property
    def exact(self) -> bool:
        """Whether it can compute in float32 from end to end, so that its ids are the reference's."""
        return "float32" in self.dtypes and "float32" in self.capabilities.kv_dtypes

    @property
    def logprobs(self) -> int | None:
        """The parameter of a request that asks for logprobs, if the backend has them."""
        return 1 if self.capabilities.sampling is None or "logprobs" in self.capabilities.sampling else None

    @contextlib.contextmanager
    def session(
        self, *, dtype: str | None = None, tokens: int = 64, seqs: int = 16, length: int = 256,
        graphs: Sequence[int] | None = None, queries: int = 1,
    ) -> Iterator[Session]:  # fmt: skip
        """An open session; host fallbacks are reported in rows, not as warnings. graphs: batch sizes to capture, where it can;
        queries: tokens of a sequence in a captured step, where it captures several."""
        limits: dict[str, Any] = {"max_batched_tokens": min(tokens, self.step_tokens), "max_seqs": seqs, "max_model_len": length}
        if self.capabilities.graph_capture and self.backend.api_version > 1:
            limits["graph_sizes"] = (4, seqs) if graphs is None else tuple(graphs)
            limits |= {"graph_queries": queries} if self.capabilities.graph_drafts else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HostFallbackWarning)
            session = self.backend.open(self.device, {"dtype": dtype or self.dtypes[0], **limits, **self.options})
            try:
                yield session
            finally:
                session.close()

    def run(
        self, example: Example, program: Program, *, dtype: str, kv_dtype: str | None = None, page_size: int | None = None,
        weights: Mapping[str, tuple[Weight, str]] | None = None, sampling: SampleInputs | None = None,
    ) -> Outcome:  # fmt: skip
        """Runs `program` (the Example's, fused or not) on the backend and the Example's by the references.

        weights: constants to be loaded from a storage format into a resident format, instead of float32; the reference then uses
        the numbers that the backend holds. Likewise the reference starts from the pages as the backend holds them.
        """
        inputs = example.inputs
        length = int(inputs["context_lens"].max()) + (page_size or self.page_size)
        with self.session(dtype=dtype, tokens=len(inputs["token_ids"]), seqs=len(inputs["context_lens"]), length=length) as session:
            loaded, numbers = _load(session, example, weights or {})
            spec = _spec(program, page_size or self.page_size, kv_dtype or self.kv_dtypes(dtype)[0])
            ids = _fill(session, spec, example.states)
            before = _exported(session, spec, ids, example.states)
            executable = session.compile(program, loaded)
            batch = make_batch(example, ids, sampling)
            step = executable.run(batch)
            spoil(batch)
            sampled = step.tokens()
            outputs = {name: np.asarray(step.output(name)) for name in program.outputs}
            after = _exported(session, spec, ids, example.states)
        want = interpret(example.program, inputs, numbers, before)
        return Outcome(outputs, after, sampled, want, before)


def reference_lab(lab: Lab) -> Lab:
    """The reference on the bench, with page sizes and sampling parameters as `lab` has them."""
    backend, device = resolve("reference")
    can = lab.capabilities
    able = dataclasses.replace(backend.capabilities(device), sampling=can.sampling, page_sizes=can.page_sizes)
    return Lab(backend, device, able, backend.kernels(device))


def interpret(
    program: Program, inputs: Mapping[str, Any], constants: Mapping[str, Any], states: Sequence[Any] = ()
) -> dict[str, Any]:
    """Runs a Program, fused or not, by the references and returns its outputs.

    inputs: the step's arrays by name; constants: float32 arrays by name (those that carry an array may be left out); states: a
    PagedState or RecurrentState for each of program.states; they are written to.
    """
    env: dict[Value, Any] = {v: inputs[v.name] for v in program.inputs}
    env.update((c.value, constants[c.value.name] if c.array is None else c.array) for c in program.constants)
    env.update((s.value, state) for s, state in zip(program.states, states, strict=True))
    run_calls(program.calls, env, {})
    return {name: env[v] for name, v in program.outputs.items()}


def as_weight(name: str, array: Array) -> Weight:
    """A float32 array as a checkpoint tensor."""
    return Weight(name, array.shape, "float32", np.ascontiguousarray(array, np.float32), lambda data: data)


def prepare(lab: Lab, session: Session, example: Example, program: Program) -> tuple[Executable, list[list[int]]]:
    """A compiled Program with the Example's weights and pages, in float32; and the pages of each state."""
    loaded, _ = _load(session, example, {})
    ids = _fill(session, _spec(program, lab.page_size, lab.kv_dtype), example.states)
    return session.compile(program, loaded), ids


def _load(session: Session, example: Example, weights: Mapping[str, tuple[Weight, str]]) -> tuple[dict[str, Any], dict[str, Array]]:
    """The resident constants, and the numbers that they stand for."""
    loaded: dict[str, Any] = {}
    numbers = dict(example.constants)
    for constant in example.program.constants:
        name = constant.value.name
        array = example.constants[name] if constant.array is None else constant.array
        weight, format = weights.get(name, (as_weight(name, array), "float32"))
        loaded[name] = session.load(weight, format)
        if name in weights:
            numbers[name] = np.asarray(session.read_weight(loaded[name]), np.float32).reshape(weight.shape)
    return loaded, numbers


def _spec(program: Program, page_size: int, kv_dtype: str) -> KVSpec:
    """Every state in a group of its own: examples need not agree on their block tables."""
    return KVSpec(page_size, kv_dtype, tuple(Group(s.spec, (i,)) for i, s in enumerate(program.states)))


def _pages(state: State) -> int:
    return len(state.k) if isinstance(state, PagedState) else len(state.data)


def _fill(session: Session, spec: KVSpec, states: Sequence[State]) -> list[list[int]]:
    """Allocates the pool and writes the states into it; returns the pages of each."""
    if not states:
        return []
    starts = np.cumsum([0, *map(_pages, states)]).tolist()
    session.kv_store(spec, starts[-1])
    ids = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    for g, (state, own) in enumerate(zip(states, ids)):
        session.import_pages(g, own, Pages(spec.groups[g], spec.page_size, spec.dtype, (_neutral(spec.groups[g], state),)))
    return ids


def _neutral(group: Group, state: State) -> tuple[Array, ...]:
    if isinstance(state, RecurrentState):
        return (state.data,)
    if isinstance(group.spec, LatentKV):
        return state.k[:, :, 0], state.v[:, :, 0]
    return state.k, state.v


def _exported(session: Session, spec: KVSpec, ids: Sequence[Sequence[int]], states: Sequence[State]) -> list[State]:
    return [_read(session, spec, g, own, state) for g, (own, state) in enumerate(zip(ids, states))]


def _read(session: Session, spec: KVSpec, g: int, ids: Sequence[int], state: State) -> State:
    """The state as the backend holds it, tables as in `state`."""
    tensors = [np.array(t, np.float32, order="C") for t in session.export_pages(g, ids).tensors[0]]
    state = copy.copy(state)
    if isinstance(state, RecurrentState):
        state.data = tensors[0].reshape(state.data.shape)
    else:
        state.k, state.v = tensors[0].reshape(state.k.shape), tensors[1].reshape(state.v.shape)
    return state


def spoil(batch: Batch) -> None:
    """Overwrites the step's arrays: run() has returned, so nobody may read them any more."""
    for owner in (batch, batch.sampling):
        for f in dataclasses.fields(owner):
            array = getattr(owner, f.name)
            if isinstance(array, np.ndarray):
                array.fill(0)


def make_batch(example: Example, ids: Sequence[Sequence[int]], sampling: SampleInputs | None = None) -> Batch:
    """The step; page numbers of each state count from its first page in the pool."""
    inputs, seqs = example.inputs, len(example.inputs["context_lens"])
    blocks = max((s.block_table.shape[1] for s in example.states if isinstance(s, PagedState)), default=1)
    tables = np.full((len(ids), seqs, blocks), -1, np.int32)
    slots = np.full((len(ids), len(inputs["token_ids"])), -1, np.int64)
    for g, (own, state) in enumerate(zip(ids, example.states)):
        if isinstance(state, RecurrentState):
            tables[g, :, 0] = state.table + own[0]
        else:
            table = state.block_table
            tables[g, :, : table.shape[1]] = np.where(table < 0, -1, table + own[0])
            slots[g] = np.where(state.slots < 0, -1, state.slots + own[0] * state.k.shape[1])
    return Batch(
        **{name: np.array(inputs[name], np.int32) for name in inputs}, block_tables=tables, slot_mapping=slots,
        sampling=copy.deepcopy(sampling) if sampling else plain_inputs(len(inputs["sample_rows"])),
    )  # fmt: skip
