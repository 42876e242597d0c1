"""Tiny models from end to end: logits against the reference, and generation through the engine under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from trivium.conformance.examples import Example, repage
from trivium.conformance.fusions import random_state, state_specs
from trivium.conformance.lab import Lab, as_weight, reference_lab
from trivium.conformance.numbers import expect_relative
from trivium.conformance.report import Check, Mismatch, Verdict
from trivium.conformance.zoo import CONFIGS, random_constants
from trivium.engine import Engine, EngineConfig, Model, RequestOutput, PoolingParams
from trivium.kv import Layout, plan_groups
from trivium.models import build
from trivium.ops import PagedState, Program, rewrite
from trivium.ops.examples import STEPS, Sequences
from trivium.plugin import Session
from trivium.plugin.select import accepts, patterns
from trivium.sampling import BACKEND_PARAMS, SamplingParams

BUDGETS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative error of logits that computing a tiny model in a dtype may make; 0.1 for any other KV dtype."""
SCHEDULED = ("llama", "gemma3", "qwen3")
"""Models that are run through the engine."""
GREEDY: dict[str, Any] = {"temperature": 0.0}
MAX_LEN = 128
SEQS = 16
SEED = 7


def checks(lab: Lab) -> Iterator[Check]:
    """Logits of every tiny model; then the schedules of a few."""
    for name in CONFIGS:
        yield Check("models", f"{name}, logits", lambda name=name: judge_logits(lab, name))  # type: ignore[misc]
    for name in SCHEDULED:
        runs = Generations(lab, name)
        for check in (runs.batched, runs.chunked, runs.preempted, runs.repeated, runs.as_reference):
            yield Check("models", f"{name}, {(check.__doc__ or '').rstrip('.')}", check)


def fuse(lab: Lab, program: Program) -> Program:
    """The Program as the loader would fuse it."""
    return rewrite(program, patterns(lab.kernels), accept=lambda call: accepts(call, lab.kernels))


def judge_logits(lab: Lab, name: str) -> Verdict:
    """One step of each kind in the middle of random pages, fused, in all dtypes."""
    program = build(CONFIGS[name], max_model_len=MAX_LEN)
    fused = fuse(lab, program)
    errors = []
    for dtype in lab.dtypes:
        for kv_dtype in lab.kv_dtypes(dtype):
            for step in (s for s in STEPS[1:] if s.query_starts[-1] <= lab.step_tokens):
                example = whole_model(program, step, lab.page_size)
                outcome = lab.run(example, fused, dtype=dtype, kv_dtype=kv_dtype)
                budget = max(BUDGETS.get(d, 0.1) for d in (dtype, kv_dtype))
                where = f"logits in {dtype}, KV in {kv_dtype}"
                errors.append(expect_relative(where, outcome.outputs["logits"], outcome.want["logits"], budget))
    return Verdict(f"{len(program.calls)} calls, {len(fused.calls)} fused; relative error up to {max(errors):.2g}")


def whole_model(program: Program, step: Sequences, page_size: int) -> Example:
    """A model's Program with random weights, tokens and pages."""
    rng = np.random.default_rng(SEED)
    tokens, first = int(step.query_starts[-1]), step.context_lens - np.diff(step.query_starts)
    inputs = {
        "token_ids": rng.integers(0, program.vocab_size, tokens, dtype=np.int32),
        "positions": np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(first, step.context_lens)]),
        "query_starts": step.query_starts, "context_lens": step.context_lens, "sample_rows": np.arange(tokens, dtype=np.int32),
        "pool_rows": np.arange(0, tokens, 2, dtype=np.int32),
    }  # fmt: skip
    specs = state_specs(program)
    states = [random_state(specs[s.value], step, rng) for s in program.states]
    paged = [repage(s, *step, page_size) if isinstance(s, PagedState) else s for s in states]
    constants = random_constants(program, rng)
    return Example(program, (program.outputs["logits"],), inputs, constants, tuple(paged))


class Numbers:
    """A tokenizer whose tokens are their numbers."""

    bos_id = None
    special_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()

    def token_text(self, token_id: int) -> str:
        return f" {token_id}"


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on."""

    prompt: list[int]
    params: SamplingParams


def requests(vocab_size: int, sampling: frozenset[str] | None = None) -> list[Request]:
    """Prompts of unequal length; greedy and seeded ones, as far as the backend declares the parameters; some share a prefix."""
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in (1, 3, 17, 40, 8, 33)]
    prompts += [[*prompts[3][:32], 5, 9], [*prompts[3], 1]]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9},
    ]  # fmt: skip
    lacking = set() if sampling is None else set(BACKEND_PARAMS) - sampling
    lacking |= {"temperature"} if "seed" in lacking else set()  # a draw without a seed could not be compared
    chosen = [{k: v for k, v in {**kind, "logprobs": 2}.items() if k not in lacking} for kind in kinds]
    return [Request(p, SamplingParams(max_tokens=24 + 4 * i, **GREEDY | chosen[i % 3])) for i, p in enumerate(prompts)]


Tokens = list[tuple[list[int], list[float]]]
"""Of each request: its token ids and their logprobs."""


@dataclass(frozen=True)
class Generations:
    """What a tiny model says under each schedule."""

    lab: Lab
    name: str
    _made: dict[str, Tokens] = field(default_factory=dict)

    def batched(self) -> Verdict:
        """batched = alone."""
        return self._expect(self._run(), "together")

    def chunked(self) -> Verdict:
        """chunked = whole."""
        return self._expect(self._run(budget=16), "in steps of 16 tokens")

    def preempted(self) -> Verdict:
        """preempted = not."""
        counts: list[int] = []
        tokens = self._run(share=0.25, preemptions=counts)
        if not counts[0]:
            return Verdict(f"pages of {self.lab.page_size} tokens leave nothing to preempt", "skipped")
        return self._expect(tokens, f"with a quarter of the pages, {counts[0]} preemptions")

    def repeated(self) -> Verdict:
        """repeated = once."""
        first, second = self._run(), self._run()
        if first != second:
            raise Mismatch("the same requests twice gave other tokens or other logprobs")
        return Verdict(f"{sum(len(ids) for ids, _ in first)} tokens, logprobs equal to the last bit")

    def as_reference(self) -> Verdict:
        """tokens = reference."""
        if not self.lab.exact:
            return Verdict("the backend does not compute in float32", "skipped")
        want = Generations(reference_lab(self.lab), self.name)._run()
        return expect_ids(self._run(dtype="float32", kv_dtype="float32"), want, "those of the reference")

    def _expect(self, tokens: Tokens, how: str) -> Verdict:
        if "alone" not in self._made:
            self._made["alone"] = self._run(one_by_one=True)
        return expect_ids(tokens, self._made["alone"], f"those of each request alone ({how})")

    def _run(
        self, *, budget: int = 256, share: float = 2.0, one_by_one: bool = False, page_size: int | None = None,
        dtype: str | None = None, kv_dtype: str | None = None, preemptions: list[int] | None = None,
    ) -> Tokens:  # fmt: skip
        """All requests through the engine: together or one by one, with a share of the pages that they need together."""
        budget = min(budget, self.lab.step_tokens)
        with self.lab.session(dtype=dtype, tokens=budget, seqs=SEQS, length=MAX_LEN) as session:
            size = page_size or self.lab.page_size
            model = open_model(self.lab, session, CONFIGS[self.name], partial(self.pages, size, share), size, kv_dtype)
            engine = Engine(model, cast(Any, Numbers()), EngineConfig(SEQS, budget))
            wanted = requests(model.vocab_size, self.lab.capabilities.sampling)
            rounds = [[r] for r in wanted] if one_by_one else [wanted]
            made = [tokens for some in rounds for tokens in generate(engine, some)]
            engine.check()
            if preemptions is not None:
                preemptions.append(engine.stats.preemptions)
            return made

    @staticmethod
    def pages(page_size: int, share: float, program: Program) -> int:
        """Pages of a group that are this share of what all requests need together, and enough for the longest."""
        lengths = [-(-(len(r.prompt) + int(r.params.max_tokens or 0)) // page_size) + 1 for r in requests(program.vocab_size)]
        return max(int(sum(lengths) * share), max(lengths) + 1)


def open_model(
    lab: Lab, session: Session, config: Mapping[str, Any], pages: Callable[[Program], int], page_size: int | None = None,
    kv_dtype: str | None = None,
) -> Model:  # fmt: skip
    """A tiny model with random weights in an open session. pages: of the pool, for each group of the Program's layers."""
    program = build(config, max_model_len=MAX_LEN)
    constants = random_constants(program, np.random.default_rng(SEED))
    arrays = {c.value.name: constants[c.value.name] if c.array is None else c.array for c in program.constants}
    weights = {name: session.load(as_weight(name, array), "float32") for name, array in arrays.items()}
    spec = plan_groups(program.states, page_size or lab.page_size, kv_dtype or lab.kv_dtype)
    count = len(spec.groups) * pages(program)
    session.kv_store(spec, count)
    executable = session.compile(fuse(lab, program), weights)
    return Model(
        lab.backend, lab.capabilities, session, executable, spec, count, program.vocab_size, MAX_LEN, frozenset(), "tiny",
        None, 0, PoolingParams("last", normalize=True), Layout("tiny", lab.backend.name, spec), None, None,
    )  # fmt: skip


def generate(engine: Engine, some: Sequence[Request]) -> Tokens:
    numbers = [engine.add_request(request.prompt, request.params) for request in some]
    finished: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        finished.update((out.request_id, out) for out in engine.step() if out.finished)
    outputs = [finished[n].outputs[0] for n in numbers]
    for number, output in zip(numbers, outputs):
        if output.finish_reason != "length":
            raise Mismatch(f"a request ended with {output.finish_reason!r}: {finished[number].error}")
    return [(out.token_ids, [next(iter(t.values())).logprob for t in out.logprobs or []]) for out in outputs]


def expect_ids(got: Tokens, want: Tokens, what: str) -> Verdict:
    for number, ((mine, _), (theirs, _)) in enumerate(zip(got, want, strict=True)):
        if mine != theirs:
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
            raise Mismatch(f"the tokens of request {number} differ from {what} from token {at} on")
    return Verdict(f"{len(want)} requests, {sum(len(ids) for ids, _ in want)} tokens equal {what}")
