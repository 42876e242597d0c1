"""Every registered pattern: the fused kernel against the pattern run by the references.

Examples come from the pattern's own `cases`, else from the tiny models: wherever the pattern occurs in one of their Programs, the
shapes and attributes found there, with random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trivium.conformance.examples import Example, State, make_example
from trivium.conformance.formats import PLAIN, random_weight
from trivium.conformance.lab import Lab
from trivium.conformance.numbers import expect_relative
from trivium.conformance.operators import SEED, judge_cases, verdict
from trivium.conformance.report import Check, Mismatch, Verdict
from trivium.conformance.zoo import programs
from trivium.ops import Call, Case, LatentKV, PagedKV, PagedState, Pattern, Program, Recurrent, StateSpec, Value, rewrite
from trivium.ops.examples import STEPS, Rng, Sequences, normal, paged_state, recurrent_state
from trivium.plugin import WeightFormat
from trivium.plugin.select import accepts, patterns
from trivium.weights.formats import FORMATS

PROJECTIONS = 2
"""Products that follow one another in a fused kernel: as many times may it round, with weights below 32 bits."""
_STEPS = (STEPS[0], STEPS[3], STEPS[4])
"""One token; chunks and prefills together; decodes."""


def checks(lab: Lab) -> Iterator[Check]:
    """One check a pattern."""
    found = patterns(lab.kernels)
    if not found:
        yield Check("fusions", "none", lambda: Verdict("the backend registers no fused pattern", "skipped"))
    for pattern in found:
        yield Check("fusions", pattern.name, lambda pattern=pattern: judge_pattern(lab, pattern))  # type: ignore[misc]


def judge_pattern(lab: Lab, pattern: Pattern) -> Verdict:
    """All examples of the pattern in all dtypes; no example, or none that a kernel takes, is a failure."""
    rng = np.random.default_rng(SEED)
    found = list(pattern.cases(rng)) if pattern.cases is not None else list(harvest(lab, pattern, rng))
    if not found:
        raise Mismatch("no example: no tiny model contains the pattern in a form that its kernel takes; give the Pattern `cases`")
    judged = verdict(judge_cases(lab, pattern, found))
    if judged.status == "fallback":
        raise Mismatch(f"no kernel takes any of the examples: {judged.detail}")
    formats = [f.name for f in lab.capabilities.weight_formats if f.name != "float32" and judge_format(lab, pattern, found, f)]
    return Verdict(judged.detail + (f"; weights also in {', '.join(formats)}" if formats else ""))


def judge_format(lab: Lab, pattern: Pattern, cases: Sequence[Case], resident: WeightFormat) -> bool:
    """The first case whose matrices fit the format, with weights resident in it; False if there is none."""
    lossless = sorted(resident.lossless_from - set(PLAIN) & FORMATS.keys())
    storage = "float32" if resident.error_budget > 0 else next(iter(lossless), "bfloat16")
    block = FORMATS[storage].block_elements
    for case in cases:
        example = make_example(pattern, case, dtype=lab.dtypes[0], page_size=lab.page_size)
        names = matrices(example)
        fits = len(example.inputs["token_ids"]) <= lab.step_tokens
        if fits and names and all(example.constants[n].shape[-1] % max(block, 32) == 0 for n in names):
            _judge_weights(lab, pattern, example, names, storage, resident)
            return True
    return False


def matrices(example: Example) -> list[str]:
    """The constants that projections read."""
    return [v.name for call in example.program.calls if call.name == "linear" and (v := call.args[1]) is not None]


def _judge_weights(
    lab: Lab, pattern: Pattern, example: Example, names: Sequence[str], storage: str, resident: WeightFormat
) -> None:
    rng = np.random.default_rng(SEED)
    shapes = {name: example.constants[name].shape for name in names}
    weights = {name: (random_weight(rng, (shape[0], shape[1]), storage), resident.name) for name, shape in shapes.items()}
    budget = PROJECTIONS * resident.activation_budget
    outcome = lab.run(example, example.fused(pattern), dtype=lab.dtypes[0], weights=weights)
    for name, want in outcome.want.items():
        expect_relative(f"{name} with weights in {resident.name}", outcome.outputs[name], want, budget)
    for got, right in zip(outcome.states, outcome.want_states):
        if isinstance(got, PagedState) and isinstance(right, PagedState):
            expect_relative(f"keys with weights in {resident.name}", got.k, right.k, budget)
            expect_relative(f"values with weights in {resident.name}", got.v, right.v, budget)


def harvest(lab: Lab, pattern: Pattern, rng: Rng) -> Iterator[Case]:
    """One case for each different call of the pattern in the tiny models, at each of a few steps."""
    seen = set()
    for _, program in programs():
        fused = rewrite(program, [pattern], accept=lambda call: accepts(call, lab.kernels))
        specs = state_specs(fused)
        for call in fused.calls:
            key = call_key(call, specs)
            if call.op is pattern and key not in seen:
                seen.add(key)
                yield from (Case(tuple(_argument(v, fused, specs, step, rng) for v in call.args), call.attrs) for step in _STEPS)


def state_specs(program: Program) -> Mapping[Value, StateSpec]:
    """What each version of a state is a state of."""
    specs: dict[Value, StateSpec] = {s.value: s.spec for s in program.states}
    for call in program.calls:
        read = [v for v in call.args if v in specs]
        specs.update((new, specs[old]) for new, old in zip((r for r in call.results if r.kind == "state"), read) if old is not None)
    return specs


def call_key(call: Call, specs: Mapping[Value, StateSpec]) -> tuple[object, ...]:
    """Equal for calls that a kernel can't tell apart."""
    shapes = tuple(None if v is None else (v.shape, v.kind, specs.get(v)) for v in call.args)
    return shapes, tuple(sorted(call.attrs.items()))


def _argument(value: Value | None, program: Program, specs: Mapping[Value, StateSpec], step: Sequences, rng: Rng) -> object:
    if value is None:
        return None
    if value in specs:
        return random_state(specs[value], step, rng)
    if value.kind == "input":
        return _input(value.name, step)
    known = next((c.array for c in program.constants if c.value is value), None)
    if known is not None:
        return known
    sizes = [int(step.query_starts[-1]) if n == "tokens" else int(n) for n in value.shape if n != "rows"]
    rows = [int(step.query_starts[-1])] if "rows" in value.shape else []
    numbers = normal(rng, *rows, *sizes)
    return numbers / np.float32(np.sqrt(sizes[-1])) if value.kind == "constant" and len(sizes) > 1 else numbers


def _input(name: str, step: Sequences) -> object:
    tokens = int(step.query_starts[-1])
    if name in ("query_starts", "context_lens"):
        return getattr(step, name)
    first = step.context_lens - np.diff(step.query_starts)
    if name == "positions":
        return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(first, step.context_lens)])
    return np.arange(tokens, dtype=np.int32)


def random_state(spec: StateSpec, step: Sequences, rng: Rng) -> State:
    """A reference state of a spec, its sequences in the middle of `step`."""
    if isinstance(spec, PagedKV):
        shape = (spec.kv_heads, spec.head_dim)
        return paged_state(rng, step, shape, shape, window=spec.window)
    if isinstance(spec, LatentKV):
        return paged_state(rng, step, (1, spec.rank), (1, spec.rope_dim))
    assert isinstance(spec, Recurrent)
    return recurrent_state(rng, step, spec.shape)
