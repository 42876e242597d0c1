"""How far each operator is from the machine's ceilings: `trivium conformance NAME --performance --ceiling bytes=2e11 ...`.

A backend whose Executable.profile times its operations is asked to, over whole steps of a model of realistic width. For any other,
each operator runs as a Program of its own, and what the same Program takes without it is subtracted.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trivium.conformance.examples import Example, make_example
from trivium.conformance.lab import Lab, make_batch, prepare
from trivium.conformance.models import fuse, whole_model
from trivium.conformance.zoo import CONFIGS
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.models import build
from trivium.ops import OPERATORS, Case, Program
from trivium.ops.examples import Sequences, normal, paged_state, sequences
from trivium.plugin import Executable, OperatorTime

HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 1024, 2816, 16, 8, 64, 32000, 512
"""The sizes of a layer of a small model; each sequence has CONTEXT tokens."""
MODEL: Mapping[str, Any] = {
    **CONFIGS["llama"], "hidden_size": HIDDEN, "intermediate_size": INTER, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
    "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 2 * CONTEXT,
}  # fmt: skip
REPEATS = 7


class Performance(NamedTuple):
    """`source`: who timed: "profile" (the backend) or "timed" (the kit). `ceilings`: a second, by kind."""

    backend: str
    device: str
    tokens: int
    source: str
    ceilings: Mapping[str, float]
    operators: Sequence[OperatorTime]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `share`: of the ceiling that is reached, None where nothing is known to be needed."""
        rows = [{**o._asdict(), "share": share(o)} for o in self.operators]
        return {**self._asdict(), "ceilings": dict(self.ceilings), "operators": rows}

    def __str__(self) -> str:
        """A page in Markdown."""
        stated = ", ".join(f"{kind} {rate:.3g}/s" for kind, rate in self.ceilings.items())
        how = "as the backend profiles it" if self.source == "profile" else "each as a Program of its own, medians"
        lines = [
            f"# {self.backend} on {self.device}: shares of the ceilings", "",
            f"{self.tokens} sequences of {CONTEXT} tokens, one token each, {how}. Ceilings: {stated}.", "",
            "| operator | calls | µs a call | MB | Mop | share |", "| --- | --- | --- | --- | --- | --- |",
        ]  # fmt: skip
        return "\n".join([*lines, *map(_line, self.operators)])


def share(o: OperatorTime) -> float | None:
    """The part of its time that an operator would need at the ceilings."""
    return o.floor_s / o.seconds if o.seconds > 0 and o.floor_s > 0 else None


def _line(o: OperatorTime) -> str:
    part = share(o)
    cells = (o.name, o.calls, f"{1e6 * o.seconds / max(o.calls, 1):.1f}", f"{o.bytes / o.calls / 1e6:.3g}",
             f"{o.operations / o.calls / 1e6:.3g}", "-" if part is None else f"{part:.1%}")  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def measure(lab: Lab, ceilings: Mapping[str, float], tokens: int) -> Performance:
    """Times a backend on steps of `tokens` decoding sequences. `ceilings`: stated ones, which replace measured ones. Raises
    InvalidRequestError where neither are there, or for ceilings or tokens that make no sense."""
    if any(isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < np.inf for rate in ceilings.values()):
        raise InvalidRequestError(f"a ceiling is a number above 0, a second, not {dict(ceilings)}", param="ceiling")
    if tokens > lab.step_tokens:
        raise InvalidRequestError(f"{tokens} tokens are more than the backend's steps have ({lab.step_tokens})", param="tokens")
    step = sequences([1] * tokens, [CONTEXT] * tokens)
    try:
        operators, known = _profiled(lab, step)
        source = "profile"
    except UnsupportedError as e:
        if not ceilings:
            message = "this backend does not measure its ceilings; state them: --ceiling bytes=2e11 --ceiling float32=1e12"
            raise InvalidRequestError(message, param="ceiling") from e
        operators, known, source = _timed(lab, step), {}, "timed"
    if ceilings:
        operators = [o._replace(floor_s=_floor(o, ceilings)) for o in operators]
    return Performance(lab.backend.name, lab.device.name, tokens, source, ceilings or known, operators)


def _floor(o: OperatorTime, ceilings: Mapping[str, float]) -> float:
    fastest = max((rate for kind, rate in ceilings.items() if kind != "bytes"), default=np.inf)
    return max(o.bytes / ceilings.get("bytes", np.inf), o.operations / fastest)


def _profiled(lab: Lab, step: Sequences) -> tuple[Sequence[OperatorTime], Mapping[str, float]]:
    """Whole decode steps of a model, each operation timed by the backend."""
    example = _last_row(whole_model(build(MODEL, max_model_len=2 * CONTEXT), step, lab.page_size))
    with lab.session(tokens=len(step.context_lens), seqs=len(step.context_lens), length=2 * CONTEXT) as session:
        executable, ids = prepare(lab, session, example, fuse(lab, example.program))
        executable.profile(True)
        executable.profile(False)
        executable.run(make_batch(example, ids)).tokens()
        executable.profile(True)
        for _ in range(REPEATS):
            executable.run(make_batch(example, ids)).tokens()
        found = executable.profile(False)
    return found.operators, found.ceilings


class Work(NamedTuple):
    """A case of an operator, and what it can't help moving and computing."""

    name: str
    case: Case
    bytes: int
    operations: int


def _timed(lab: Lab, step: Sequences) -> list[OperatorTime]:
    """Each operator alone."""
    found = []
    for name, work in works(step):
        example = make_example(OPERATORS[name], work.case, dtype=lab.dtypes[0], page_size=lab.page_size)
        seconds = _seconds(lab, example) - _seconds(lab, _without(lab, work.case))
        found.append(
            OperatorTime(work.name, REPEATS, max(seconds, 0.0) * REPEATS, REPEATS * work.bytes, REPEATS * work.operations, 0.0)
        )
    return found


def works(step: Sequences) -> Iterator[tuple[str, Work]]:
    """The operators of a decoder layer at realistic sizes, and the output projection. Weights and activations are float32."""
    rng, t = np.random.default_rng(0), len(step.context_lens)
    for n_in, n_out in ((HIDDEN, INTER), (INTER, HIDDEN), (HIDDEN, VOCAB)):
        case = Case((normal(rng, t, n_in), normal(rng, n_out, n_in), None))
        yield "linear", Work(f"linear {n_in} to {n_out}", case, 4 * (n_in * n_out + t * (n_in + n_out)), 2 * t * n_in * n_out)
    x, y = normal(rng, t, HIDDEN), normal(rng, t, INTER)
    yield "rms_norm", Work("rms_norm", Case((x, normal(rng, HIDDEN)), {"eps": 1e-6, "offset": 0.0}), 8 * x.size, 4 * x.size)
    yield "add", Work("add", Case((x, x)), 12 * x.size, x.size)
    yield "gated", Work("gated", Case((y, y), {"kind": "silu"}), 12 * y.size, 8 * y.size)
    k = normal(rng, t, KV_HEADS, HEAD_DIM)
    state = paged_state(rng, step, k.shape[1:], k.shape[1:])
    yield "kv_write", Work("kv_write", Case((state, k, k)), 16 * k.size, 0)
    q = normal(rng, t, HEADS, HEAD_DIM)
    case = Case((q, state, step.query_starts, step.context_lens, None), {"scale": HEAD_DIM**-0.5})
    pairs = t * CONTEXT
    yield "paged_attention", Work("paged_attention", case, 8 * pairs * k[0].size + 8 * q.size, 4 * pairs * q[0].size)


def _without(lab: Lab, case: Case) -> Example:
    """The Program of a case without its operator: the same activations come in, one row goes out."""
    rows = [a.reshape(len(a), -1) for a in case.args if isinstance(a, np.ndarray) and a.dtype == np.float32]
    tokens = min(map(len, rows))
    wide = np.concatenate([a for a in rows if len(a) == tokens], axis=1)
    return make_example(OPERATORS["scale"], Case((wide,), {"factor": 1.0}), dtype=lab.dtypes[0], page_size=lab.page_size)


def _last_row(example: Example) -> Example:
    """One row is sampled: sampling is not what is timed."""
    rows = example.inputs["sample_rows"][-1:]
    return dataclasses.replace(example, inputs={**example.inputs, "sample_rows": rows, "pool_rows": rows[:0]})


def _seconds(lab: Lab, example: Example) -> float:
    """Median time of a step."""
    example = _last_row(example)
    program: Program = example.program
    with lab.session(
        tokens=len(example.inputs["token_ids"]), seqs=len(example.inputs["context_lens"]), length=2 * CONTEXT
    ) as session:
        executable, ids = prepare(lab, session, example, program)
        return statistics.median(_one(executable, example, ids) for _ in range(REPEATS))


def _one(executable: Executable, example: Example, ids: Sequence[Sequence[int]]) -> float:
    batch = make_batch(example, ids)
    began = time.perf_counter()
    executable.run(batch).tokens()
    return time.perf_counter() - began
