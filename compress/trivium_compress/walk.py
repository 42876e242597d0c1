"""A Program run layer by layer on the host, so that the weights of one layer alone are in memory and its inputs can be looked at.

The text is cut into windows, each a sequence of its own. All windows go through a layer before the next layer is touched; between
two layers only what the next ones read is kept. Operators are the numpy reference's, but projections of all rows are one product,
and so are a head's scores: nothing here depends on the last bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import UnsupportedError
from trivium.ops import Call, Constant, Operator, PagedState, Program, StateDecl, Value
from trivium.ops.state import state_of

Array = npt.NDArray[Any]
Live = dict[Value, Any]
"""What one window has computed and somebody still reads."""
LAYER = re.compile(r"\blayers?\.(\d+)\.")
Load = Callable[[Constant], Any]
"""The numbers of a constant: float32 of its shape, or Rows."""


@dataclass(frozen=True)
class Rows:
    """A table of which a step reads a few rows: `read(ids)` gives float32[len(ids), columns]."""

    read: Callable[[Array], Array]


@dataclass(frozen=True)
class Segment:
    """The calls of one layer (-1: what comes before the first), the constants they read, and the values others read later."""

    layer: int
    calls: tuple[Call, ...]
    constants: tuple[Constant, ...]
    kept: frozenset[Value]


@dataclass
class Inputs:
    """What has been seen of one value that projections read. moments: the sum of x xᵀ, float64[n, n], or of x² alone, float64[n];
    size: the sum of |x|, float64[n]."""

    moments: Array
    size: Array
    count: int = 0

    @classmethod
    def of(cls, width: int, whole: bool) -> Inputs:
        return cls(np.zeros((width, width) if whole else width), np.zeros(width))

    @property
    def squares(self) -> Array:
        """The sum of x², float64[n]."""
        return np.asarray(np.diag(self.moments) if self.moments.ndim == 2 else self.moments)

    def add(self, x: Array) -> None:
        """Rows more: float32[..., n]."""
        x = x.reshape(-1, x.shape[-1])
        self.moments += x.T @ x if self.moments.ndim == 2 else np.einsum("ti,ti->i", x, x)
        self.size += np.abs(x).sum(0)
        self.count += len(x)


@dataclass(frozen=True)
class Walk:
    """A Program cut into layers, for windows of at most `window` tokens."""

    program: Program
    window: int
    segments: tuple[Segment, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(_cut(self.program)))

    def start(self, tokens: Sequence[Array]) -> list[Live]:
        """The windows before the first layer: the Program's inputs. tokens: int32[n] each."""
        return [{v: _inputs(ids)[v.name] for v in self.program.inputs} for ids in tokens]

    def observe(self, segment: Segment, windows: Sequence[Live], load: Load, taps: Mapping[Value, Inputs]) -> None:
        """Adds what the values `taps` are in all windows to what is known of them; the windows stay as they are."""
        calls = _needed(segment.calls, frozenset(taps))
        weights = _loaded(calls, segment.constants, load)
        for window in windows:
            env = {**window, **weights, **self._states(calls, window)}
            for value, inputs in taps.items():
                if value in env:
                    inputs.add(env[value])
            for call in _running(calls, env, frozenset()):
                for value in call.results:
                    if value in taps:
                        taps[value].add(env[value])

    def advance(self, segment: Segment, windows: list[Live], load: Load) -> None:
        """Takes all windows through the segment."""
        calls = _needed(segment.calls, segment.kept)
        weights = _loaded(calls, segment.constants, load)
        for i, window in enumerate(windows):
            env = {**window, **weights, **self._states(calls, window)}
            for _ in _running(calls, env, segment.kept):
                pass
            windows[i] = {v: env[v] for v in (*self.program.inputs, *segment.kept)}

    def _states(self, calls: Sequence[Call], window: Live) -> dict[Value, Any]:
        read = {v for call in calls for v in call.args if v is not None}
        length = len(next(x for v, x in window.items() if v.name == "token_ids"))
        return {s.value: _new_state(s, length) for s in self.program.states if s.value in read and s.value not in window}

    def _bytes_of_states(self, calls: Sequence[Call]) -> int:
        read = {v for call in calls for v in call.args}
        return sum(_state_bytes(s, self.window) for s in self.program.states if s.value in read)

    def bytes_kept(self, segment: Segment, lengths: Sequence[int]) -> int:
        """Of what all windows hold after the segment."""
        return sum(_bytes(v, n) for n in lengths for v in segment.kept)

    def bytes_of_a_run(self, segment: Segment, read: frozenset[Value]) -> int:
        """Of the values of one window while it runs through, and of what the operators need beside their results. read: what is
        observed."""
        calls, known = _needed(segment.calls, segment.kept | read), set[Value]()
        last = {v: i for i, call in enumerate(calls) for v in (*call.args, *call.results) if v is not None}
        most = 0
        for i, call in enumerate(calls):
            known.update(v for v in call.results if v.kind == "call")
            now = sum(_bytes(v, self.window) for v in known)
            most = max(most, now + 4 * max((_bytes(v, self.window) for v in (*call.args, *call.results) if _moves(v)), default=0))
            known -= {v for v in known if last[v] == i and v not in segment.kept}
        scores = 24 * self.window**2  # of one head, see _attention
        return (
            most + scores + sum(_state_bytes(s, self.window) for s in self.program.states if any(s.value in c.args for c in calls))
        )


def _cut(program: Program) -> Iterator[Segment]:
    """A call belongs to the layer of the last weight that was named before it."""
    sources = {c.value: c for c in program.constants}
    layers, now = list[int](), -1
    for call in program.calls:
        named = [int(m[1]) for v in call.args if v in sources and (m := LAYER.search(sources[v].source))]
        now = max([now, *named])
        layers.append(now)
    for layer in sorted(set(layers)):
        calls = tuple(c for c, at in zip(program.calls, layers, strict=True) if at == layer)
        read = {v for c in calls for v in c.args}
        later = {v for c, at in zip(program.calls, layers, strict=True) if at > layer for v in c.args if v is not None}
        made = {v for c, at in zip(program.calls, layers, strict=True) if at <= layer for v in c.results}
        kept = frozenset(v for v in made if v in later)
        if any(v.kind == "state" for v in kept):
            raise UnsupportedError("layers of this model share a state, so it can't be calibrated layer by layer; use --method rtn")
        yield Segment(layer, calls, tuple(c for c in program.constants if c.value in read), kept)


def _needed(calls: Sequence[Call], wanted: frozenset[Value]) -> list[Call]:
    """The calls without which some of `wanted` would not be there."""
    needed, found = set(wanted), list[Call]()
    for call in reversed(calls):
        if not needed.isdisjoint(call.results):
            needed.update(v for v in call.args if v is not None)
            found.append(call)
    return found[::-1]


def _loaded(calls: Sequence[Call], constants: Sequence[Constant], load: Load) -> dict[Value, Any]:
    read = {v for call in calls for v in call.args}
    return {c.value: load(c) for c in constants if c.value in read}


def _running(calls: Sequence[Call], env: dict[Value, Any], kept: frozenset[Value]) -> Iterator[Call]:
    """Runs the calls in `env`, which forgets what nobody reads any more; yields each when it has run."""
    last = {v: i for i, call in enumerate(calls) for v in (*call.args, *call.results) if v is not None and v.kind == "call"}
    for i, call in enumerate(calls):
        assert isinstance(call.op, Operator)
        run = _QUICK.get(call.name, call.op)
        found = run(*[None if v is None else env[v] for v in call.args], **call.attrs)
        env.update(zip(call.results, found if isinstance(found, tuple) else (found,), strict=True))
        yield call
        for value in {v for v in (*call.args, *call.results) if v is not None and last.get(v) == i} - kept:
            env.pop(value, None)


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y: Array = x @ weight.T
    return y if bias is None else y + bias


def _embedding(token_ids: Array, weight: Any, *, scale: float) -> Array:
    rows = weight.read(token_ids) if isinstance(weight, Rows) else weight[token_ids]
    return np.asarray(rows * np.float32(scale))


def _attention(
    q: Array, kv: PagedState, query_starts: Array, context_lens: Array, sinks: Array | None = None, *,
    scale: float, window: int | None, softcap: float | None, causal: bool,
) -> Array:  # fmt: skip
    """Of the one sequence that there is, whose one page holds all of it: head by head."""
    keys, values, tokens = kv.k[0], kv.v[0], len(q)
    at = np.arange(tokens)
    hidden = (at[:, None] < at) & causal
    if window is not None:
        hidden |= at[:, None] - at >= window
    out, share = np.empty((tokens, q.shape[1], values.shape[-1]), np.float32), q.shape[1] // keys.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ keys[:, head // share].T * np.float32(scale)
        scores = scores if softcap is None else np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        scores[hidden] = -np.inf
        sink = np.float32(-np.inf if sinks is None else sinks[head])
        top = np.maximum(scores.max(-1, keepdims=True), sink)
        weights = np.exp(scores - top)
        out[:, head] = weights / (weights.sum(-1, keepdims=True) + np.exp(sink - top)) @ values[:, head // share]
    return out


_QUICK: Mapping[str, Callable[..., Any]] = {"linear": _linear, "embedding": _embedding, "paged_attention": _attention}
"""Operators that are computed otherwise than by the reference."""


def _inputs(ids: Array) -> dict[str, Array]:
    """A Program's inputs for one sequence, all of whose rows are sampled."""
    n = len(ids)
    whole, none = np.arange(n, dtype=np.int32), np.zeros(0, np.int32)
    return {
        "token_ids": np.asarray(ids, np.int32), "positions": whole, "query_starts": np.array([0, n], np.int32),
        "context_lens": np.array([n], np.int32), "sample_rows": whole, "pool_rows": none, "adapters": np.full(n, -1, np.int32),
    }  # fmt: skip


def _new_state(state: StateDecl, tokens: int) -> Any:
    """One page that holds the whole window."""
    arrays = [np.zeros((1, *shape), np.float32) for shape in state.spec.page_shapes(tokens)]
    return state_of(state.spec, arrays, np.zeros((1, 1), np.int32), np.arange(tokens))


def _state_bytes(state: StateDecl, tokens: int) -> int:
    return sum(4 * int(np.prod(shape)) for shape in state.spec.page_shapes(tokens))


def _moves(value: Value | None) -> bool:
    return value is not None and value.kind == "call"


def _bytes(value: Value | None, tokens: int) -> int:
    assert value is not None
    return 4 * int(np.prod([tokens if isinstance(d, str) else d for d in value.shape]))
