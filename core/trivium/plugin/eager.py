"""EagerExecutable: a loop over a backend's kernels, call by call: how a new backend starts, and all the reference needs.

An operator that a backend lacks runs as the numpy reference on the host: slow, exact, and announced.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import BackendError, UnsupportedError
from trivium.ops import OPERATORS, Batch, Call, KVSpec, Operator, PagedState, Pages, Program, RecurrentState, Sampled, Value
from trivium.ops.state import state_of
from trivium.plugin.contract import Executable, Kernel, Session, Step, Tensor
from trivium.plugin.select import Choice, kernel_name, select_kernels


class EagerStep(Step):
    """A step that ran to its end inside run()."""

    def __init__(self, session: Session, outputs: Mapping[str, Tensor], sampled: Sampled) -> None:
        self._session = session
        self._outputs = outputs
        self._sampled = sampled

    def tokens(self) -> Sampled:
        return self._sampled

    def output(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self._outputs:
            raise UnsupportedError(f"this Program has no output {name!r}; it has {', '.join(self._outputs)}")
        return np.asarray(self._session.get(self._outputs[name]), np.float32)


class EagerExecutable(Executable):
    """Runs a Program call by call. An operator without a kernel runs as the numpy reference on the host, with a warning
    (`strict`: UnsupportedError at once). `kernels` are the backend's; `weights` every constant by name as session.load gave it."""

    def __init__(
        self, session: Session, program: Program, weights: Mapping[str, Tensor], kernels: Sequence[Kernel], spec: KVSpec,
        *, backend: str, strict: bool = False,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._session = session
        self._program = program
        self._spec = spec
        self._constants = {c.value: weights[c.value.name] for c in program.constants}
        self._choices = select_kernels(program, kernels)
        self._last_use = _last_uses(program)
        self._state_of = _state_indices(program)
        kernels_args = (v for c in self._choices if c.kernel is not None for v in c.call.args)
        self._taken = {self._state_of[v] for v in kernels_args if v in self._state_of}
        self._sample = max((k for k in kernels if k.op == "sample"), key=lambda k: k.priority, default=None)
        missing = [(c.call.name, _why(c)) for c in self._choices if c.kernel is None]
        missing += [("sample", "no kernel")] if self._sample is None else []
        announce_fallbacks(backend, missing, strict=strict)

    def run(self, batch: Batch) -> Step:
        session, program = self._session, self._program
        env: dict[Value, Any] = dict(self._constants)
        env.update((v, session.put(getattr(batch, v.name))) for v in program.inputs)
        env.update((s.value, session.step_state(i, batch) if i in self._taken else None) for i, s in enumerate(program.states))
        for i, choice in enumerate(self._choices):
            try:
                self._run_call(choice, env, batch)
            except Exception as e:
                where = f"{kernel_name(choice.kernel) if choice.kernel else 'the host'} in {choice.call}"
                raise BackendError(f"backend {self._backend!r}: {where} failed: {type(e).__name__}: {e}") from e
            for value in self._last_use.get(i, ()):
                del env[value]
        outputs = {name: env[v] for name, v in program.outputs.items()}
        return EagerStep(session, outputs, self._draw(outputs["logits"], batch))

    def _run_call(self, choice: Choice, env: dict[Value, Any], batch: Batch) -> None:
        call = choice.call
        args = [None if v is None else env[v] for v in call.args]
        if choice.kernel is None:
            state = next((self._state_of[v] for v in call.args if v in self._state_of), -1)
            host = run_on_host(self._session, self._spec, call, args, batch, state)
            results = [None if x is None else self._session.put(x) for x in host]
        else:
            got = choice.kernel.run(self._session, args, call.attrs)
            results = list(got) if type(got) is tuple else [got]  # a tensor may be a NamedTuple
        for value, result in zip(call.results, results, strict=True):
            env[value] = env[self._program.states[self._state_of[value]].value] if value.kind == "state" else result

    def _draw(self, logits: Tensor, batch: Batch) -> Sampled:
        attrs = {"vocab_size": self._program.vocab_size}
        if self._sample is not None:
            return self._sample.run(self._session, [logits, batch.sampling], attrs)  # type: ignore[no-any-return]
        return OPERATORS["sample"](self._session.get(logits), batch.sampling, **attrs)  # type: ignore[no-any-return]


def _why(choice: Choice) -> str:
    return "; ".join(f"{kernel.name}: {reason}" for kernel, reason in choice.refused) or "no kernel"


def _state_indices(program: Program) -> dict[Value | None, int]:
    """The index of the state that each state value is a version of."""
    index: dict[Value | None, int] = {s.value: i for i, s in enumerate(program.states)}
    for call in program.calls:
        arguments = [v for v in call.args if v is not None and v.kind == "state"]
        results = [v for v in call.results if v.kind == "state"]
        index.update((r, index[a]) for r, a in zip(results, arguments, strict=False))
    return index


def _last_uses(program: Program) -> dict[int, list[Value]]:
    """For each call the values that nobody reads after it, so that their memory can go."""
    touched = ((i, v) for i, call in enumerate(program.calls) for v in (*call.args, *call.results) if v is not None)
    last = {v: i for i, v in touched if v.kind == "call"}
    gone: dict[int, list[Value]] = {}
    for value in last.keys() - set(program.outputs.values()):
        gone.setdefault(last[value], []).append(value)
    return gone


class HostFallbackWarning(RuntimeWarning):
    """An operator runs as the reference on the host because the backend has no kernel for it."""


def announce_fallbacks(backend: str, missing: Sequence[tuple[str, str]], *, strict: bool) -> None:
    """Warns of every (operator, reason) without a kernel; with `strict` raises UnsupportedError naming them all."""
    names = "; ".join(f"{name} ({reason})" for name, reason in dict(missing).items())
    if names and strict:
        raise UnsupportedError(f"backend {backend!r} has no kernel for {names}, and strict refuses the host fallback")
    if names:
        warnings.warn(f"backend {backend!r} runs on the host, slowly: {names}", HostFallbackWarning, stacklevel=3)


class HostState(NamedTuple):
    """A state's pages of one step on the host, with tables that count within them, and what is needed to write them back."""

    group: int
    ids: npt.NDArray[np.int64]
    pages: Pages
    state: PagedState | RecurrentState


def fetch_state(session: Session, spec: KVSpec, index: int, batch: Batch) -> HostState:
    """Exports the pages that state `index` can touch in this step."""
    group, slot = spec.group_of(index)
    table, slots = batch.block_tables[group], batch.slot_mapping[group]
    written = slots[slots >= 0] // spec.page_size
    ids = np.unique(np.concatenate([table[table >= 0].astype(np.int64), written]))
    pages = session.export_pages(group, ids.tolist())
    pages = pages._replace(tensors=tuple(tuple(np.array(t, np.float32, order="C") for t in layer) for layer in pages.tensors))
    local = np.where(table >= 0, np.searchsorted(ids, table), -1).astype(np.int32)
    page, offset = np.divmod(slots, spec.page_size)
    local_slots = np.where(slots >= 0, np.searchsorted(ids, page) * spec.page_size + offset, -1)
    return HostState(group, ids, pages, state_of(spec.groups[group].spec, pages.tensors[slot], local, local_slots))


def run_on_host(session: Session, spec: KVSpec, call: Call, args: Sequence[Any], batch: Batch, state: int = -1) -> list[Any]:
    """One call by its reference. `args`: the backend's tensors, weights as loaded, None; `state`: the index of the state argument.

    Returns host arrays for tensor results and None for a state result.
    """
    assert isinstance(call.op, Operator)
    fetched = fetch_state(session, spec, state, batch) if state >= 0 else None
    host = [_to_host(session, call, i, a, fetched) for i, a in enumerate(args)]
    results = call.op(*host, **call.attrs)
    if fetched is not None and any(r.is_state for r in call.op.signature.results):
        session.import_pages(fetched.group, fetched.ids.tolist(), fetched.pages)  # whose arrays the reference wrote into
    results = results if isinstance(results, tuple) else (results,)
    return [None if r.is_state else x for r, x in zip(call.op.signature.results, results, strict=True)]


def _to_host(session: Session, call: Call, i: int, arg: Any, fetched: HostState | None) -> Any:
    value = call.args[i]
    if value is None:
        return None
    if value.kind == "state":
        assert fetched is not None
        return fetched.state
    return session.read_weight(arg) if value.kind == "constant" else session.get(arg)
