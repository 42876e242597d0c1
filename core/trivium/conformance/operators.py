"""Every operator of the set, run by the backend and by its reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trivium.conformance.examples import Example, make_example
from trivium.conformance.lab import Lab, Outcome
from trivium.conformance.numbers import EXACT, expect_close, round_to, tolerance
from trivium.conformance.report import Check, Mismatch, Verdict
from trivium.ops import OPERATORS, Case, Operator, Pattern, PagedState, Program, Tolerance
from trivium.ops.examples import STALE
from trivium.plugin.select import Choice, choose, kernel_name

SEED = 20240
COLLECTIVES = frozenset({"all_reduce", "all_gather", "send", "recv"})


def checks(lab: Lab) -> Iterator[Check]:
    """One check an operator; `sample` has an area of its own."""
    for op in OPERATORS.values():
        if op.name != "sample":
            yield Check("operators", op.name, lambda op=op: judge_operator(lab, op))  # type: ignore[misc]


def judge_operator(lab: Lab, op: Operator) -> Verdict:
    """All the operator's cases in all dtypes of the backend, and in all its KV dtypes where the operator has a paged state."""
    if op.name in COLLECTIVES and not lab.capabilities.collectives:
        return Verdict(lab.capabilities.unsupported.get("collectives", "the backend has no collectives"), "skipped")
    return verdict(judge_cases(lab, op, list(op.cases(np.random.default_rng(SEED)))))


def judge_cases(lab: Lab, op: Operator | Pattern, cases: Sequence[Case]) -> list[Choice]:
    """All cases that fit into a step, in all dtypes; those with a paged state in all KV dtypes and some page sizes too."""
    judged = [
        judge_case(lab, op, case, setting, f"case {number}")
        for dtype in lab.dtypes
        for number, case in enumerate(cases)
        for setting in settings(lab, case, dtype)
    ]
    return [choice for choice in judged if choice is not None]


class Setting(NamedTuple):
    """How a case is run."""

    dtype: str
    kv_dtype: str
    page_size: int


def settings(lab: Lab, case: Case, dtype: str) -> Iterator[Setting]:
    """The KV dtypes and page sizes to try a case with."""
    paged = any(isinstance(a, PagedState) for a in case.args)
    for kv_dtype in lab.kv_dtypes(dtype) if paged else lab.kv_dtypes(dtype)[:1]:
        for page_size in lab.page_sizes if paged else (lab.page_size,):
            yield Setting(dtype, kv_dtype, page_size)


def judge_case(lab: Lab, op: Operator | Pattern, case: Case, setting: Setting, what: str) -> Choice | None:
    """Runs one case and compares results and states; returns the kernel that ran it, or raises Mismatch. None: it has more tokens
    than the backend takes in a step."""
    example = make_example(op, case, dtype=setting.dtype, page_size=setting.page_size)
    if len(example.inputs["token_ids"]) > lab.step_tokens:
        return None
    program = example.fused(op) if isinstance(op, Pattern) else example.program
    choice = chosen(lab, program, example, op)
    dtypes = {setting.dtype, setting.kv_dtype} if program.states else {setting.dtype}
    pages = f", KV in {setting.kv_dtype} on pages of {setting.page_size}" if program.states else ""
    where = f"{what} in {setting.dtype}{pages} {shapes(case)}:"
    try:
        outcome = lab.run(example, program, **setting._asdict())
    except Exception as e:
        raise Mismatch(f"{where} {type(e).__name__}: {e}") from e
    compare(where, outcome, tolerance(op, dtypes))
    if op.name in ("kv_write", "latent_write"):
        _expect_kept(where, outcome, setting.kv_dtype)
    return choice


def _expect_kept(where: str, outcome: Outcome, kv_dtype: str) -> None:
    """Keys and values that were only stored are those that the KV dtype keeps, to the last bit; what a format of the backend's own
    keeps is unknown."""
    if kv_dtype not in EXACT:
        return
    for got, right in zip(outcome.states, outcome.want_states):
        assert isinstance(got, PagedState) and isinstance(right, PagedState)
        for part in ("k", "v"):
            want = round_to(getattr(right, part), kv_dtype)
            expect_close(f"{where} stored {part}", getattr(got, part), want, Tolerance(0, 0))


def chosen(lab: Lab, program: Program, example: Example, op: Operator | Pattern) -> Choice:
    """Which kernel would run the call that is judged."""
    for call in program.calls:
        if call.op is op and example.results[0] in call.results:
            return choose(call, lab.kernels)
    raise Mismatch("the pattern does not match what its own function builds")


def shapes(case: Case) -> str:
    """The arguments' shapes and the attributes, for messages."""
    sizes = [str(list(a.shape)) if isinstance(a, np.ndarray) else "none" if a is None else "state" for a in case.args]
    return f"({', '.join(sizes)}{''.join(f', {k}={v!r}' for k, v in case.attrs.items())})"


def compare(what: str, outcome: Outcome, allowed: Tolerance) -> None:
    """Outputs and states within the tolerance; integers exactly."""
    for name, want in outcome.want.items():
        exact = Tolerance(0, 0) if np.issubdtype(want.dtype, np.integer) else allowed
        expect_close(f"{what} {name}", outcome.outputs[name], want, exact)
    for got, right in zip(outcome.states, outcome.want_states):
        for part in ("k", "v", "data"):
            if hasattr(right, part):
                want, made = getattr(right, part), getattr(got, part)
                made = np.where(_nobodys(right)[:, :, None, None], want, made) if isinstance(right, PagedState) else made
                expect_close(f"{what} state {part}", made, want, allowed)


def _nobodys(state: PagedState) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool[pages, page_size]: slots behind the last token of a page that the step writes to. A backend may clear them, for nobody
    reads them before they are written."""
    stale = np.abs(state.k).min(axis=(2, 3)) > STALE / 2
    written = np.zeros(len(state.k), bool)
    written[state.slots[state.slots >= 0] // state.k.shape[1]] = True
    return np.asarray(stale & written[:, None])


def verdict(choices: Sequence[Choice]) -> Verdict:
    """Passed if a kernel ran at least one of the cases, fallback if the host ran all of them."""
    if not choices:
        return Verdict("no case is as short as the backend's steps", "skipped")
    kernels = Counter(kernel_name(c.kernel) for c in choices if c.kernel is not None)
    reasons = {reason for c in choices if c.kernel is None for _, reason in c.refused}
    host = sum(c.kernel is None for c in choices)
    ran = [f"{n} x {name}" for name, n in kernels.items()] + ([f"{host} x on the host"] if host else [])
    because = f" ({'; '.join(sorted(reasons))})" if reasons else ""
    return Verdict(f"{len(choices)} cases: {', '.join(ran)}{because}", "passed" if kernels else "fallback")
