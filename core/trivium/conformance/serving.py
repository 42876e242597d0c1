"""What serving asks of a backend beyond right numbers: requests that are cancelled, steps that fail, requests that move between
backends, captured steps, arrays that belong to the engine again, and memory that neither grows nor stays behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trivium.conformance.lab import Lab, as_weight, reference_lab, spoil
from trivium.conformance.models import BUDGETS, GREEDY, MAX_LEN, SEED, SEQS, Numbers, Request, expect_ids, generate, open_model
from trivium.conformance.report import Check, Mismatch, Verdict
from trivium.conformance.zoo import CONFIGS
from trivium.engine import Engine, EngineConfig, RequestOutput
from trivium.engine.migration import RequestState
from trivium.ops import Batch, Group, KVSpec, PagedKV, Sampled
from trivium.plugin import Executable, Session, Step
from trivium.plugin.hostinfo import available_memory
from trivium.sampling import SamplingParams

MODEL = CONFIGS["llama"]
SMALL: Mapping[str, Any] = {**MODEL, "num_hidden_layers": 1}
BUDGET = 16
"""Tokens a step: a long prompt takes several."""
SHORT_REQUESTS = 1000
PART = 250
"""Short requests after which memory is looked at: caches fill in the first parts, leaks go on in all of them."""
BLOCKS_A_REQUEST = 0.4
"""Python objects that a request may leave behind on the average: whatever is kept for each step of two has half of one."""
ROUNDS = 8
ROUND_BYTES = 8 << 20
"""Bytes of pages that each of ROUNDS sessions holds, and is to give back."""
MARK = 77
"""A token id that makes a step fail."""

Wrap = Callable[[Executable], Executable]


def checks(lab: Lab) -> Iterator[Check]:
    """One check a promise."""
    judges: Mapping[str, Callable[[Lab], Verdict]] = {
        "cancelled while prefilling": lambda lab: judge_abort(lab, decoding=False),
        "cancelled while decoding": lambda lab: judge_abort(lab, decoding=True),
        "a step that fails once": judge_failure,
        "a request that always fails": judge_lasting_failure,
        "arrays overwritten after run()": judge_arrays,
        "moved to another session": lambda lab: judge_move(lab, lab, lab),
        "moved from reference": lambda lab: judge_move(lab, reference_lab(lab), lab),
        "moved to reference": lambda lab: judge_move(lab, lab, reference_lab(lab)),
        "captured = eager": judge_graphs,
        "captured drafts = eager": judge_captured_drafts,
        f"{SHORT_REQUESTS} requests leave nothing": judge_growth,
        "close() gives memory back": judge_close,
    }
    for name, judge in judges.items():
        yield Check("serving", name, lambda judge=judge: judge(lab))  # type: ignore[misc]


@contextlib.contextmanager
def serving(
    lab: Lab, *, config: Mapping[str, Any] = MODEL, wrap: Wrap = lambda executable: executable, budget: int = BUDGET,
    share: float = 1.0, dtype: str | None = None, kv_dtype: str | None = None, graphs: Sequence[int] | None = None,
    drafts: int = 0,
) -> Iterator[Engine]:  # fmt: skip
    """An engine with a tiny model. share: pages, as a share of what SEQS sequences of MAX_LEN tokens need (at least a few). drafts:
    tokens that are drafted at a time, from those before."""
    budget = min(budget, lab.step_tokens)
    pages = max(int(SEQS * share * MAX_LEN) // lab.page_size, MAX_LEN // lab.page_size + 1, SEQS) + 1
    with lab.session(dtype=dtype, tokens=budget, seqs=SEQS, length=MAX_LEN, graphs=graphs, queries=1 + drafts) as session:
        model = open_model(lab, session, config, lambda program: pages, kv_dtype=kv_dtype)
        model = replace(model, executable=wrap(model.executable))
        how = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1, "adaptive": False}
        yield Engine(model, cast(Any, Numbers()), EngineConfig(SEQS, budget, speculative=how if drafts else None))


def greedy(lengths: Sequence[int], max_tokens: int, *, avoid: int = -1) -> list[Request]:
    """Prompts of random tokens, none of them `avoid`."""
    rng = np.random.default_rng(SEED)
    prompts = [[int(t) + (t == avoid) for t in rng.integers(0, MODEL["vocab_size"] - 1, n)] for n in lengths]
    return [Request(prompt, SamplingParams(max_tokens=max_tokens, **GREEDY)) for prompt in prompts]


def finish(engine: Engine) -> dict[int, RequestOutput]:
    """Runs to the end; then every page must be back."""
    done: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        done.update((out.request_id, out) for out in engine.step() if out.finished)
    engine.check()
    if engine.kv.pool.available != engine.kv.pool.pages:
        raise Mismatch(f"{engine.kv.pool.pages - engine.kv.pool.available} pages are not back")
    return done


def tokens_of(done: Mapping[int, RequestOutput], numbers: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """The ids of each request, which must have come to its end."""
    outputs = [done[n].outputs[0] for n in numbers]
    ended = {str(o.finish_reason) for o in outputs} - {"length"}
    if ended:
        raise Mismatch(f"a request ended with {', '.join(ended)}: {[done[n].error for n in numbers if done[n].error]}")
    return [(o.token_ids, []) for o in outputs]


def plain(lab: Lab, wanted: Sequence[Request], **options: Any) -> list[tuple[list[int], list[float]]]:
    """What the requests say if nothing happens to them."""
    with serving(lab, **options) as engine:
        return [(ids, []) for ids, _ in undisturbed(engine, wanted)]


def undisturbed(engine: Engine, wanted: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
    """What the requests say; no step may fail, though the engine would run it again."""
    made = generate(engine, wanted)
    if engine.stats.failed_steps:
        raise Mismatch(f"{engine.stats.failed_steps} steps failed and had to be run again")
    return made


def judge_abort(lab: Lab, *, decoding: bool) -> Verdict:
    """A long prompt is cancelled halfway, or an output after its third token; its pages serve another request."""
    neighbours, late = greedy((1, 3, 8), 30), greedy((60,), 10)
    victim = Request(greedy((9 if decoding else 90,), 1)[0].prompt, SamplingParams(max_tokens=30, **GREEDY))
    want = plain(lab, [*neighbours, *late])
    with serving(lab, share=0.0) as engine:
        numbers = [engine.add_request(r.prompt, r.params) for r in neighbours]
        seen = len(engine.step())
        number = engine.add_request(victim.prompt, victim.params, stream=True, priority=-1)  # it comes first in a step
        for step in range(MAX_LEN):
            seen += sum(len(out.outputs[0].token_ids) for out in engine.step() if out.request_id == number)
            if (seen >= 3) if decoding else step == 2:
                break
        else:
            raise Mismatch(f"only {seen} tokens came within {MAX_LEN} steps")
        if not decoding and seen:
            raise Mismatch("the prompt was computed before it could be cancelled")
        out = engine.abort(number)
        if out is None or out.outputs[0].finish_reason != "abort":
            raise Mismatch(f"the cancelled request reports {out}")
        numbers += [engine.add_request(r.prompt, r.params) for r in late]
        expect_ids(tokens_of(finish(engine), numbers), want, "those without the cancelled request")
    return Verdict(f"{len(want)} others go on as without it; all pages are back")


class _Fault(RuntimeError):
    """An injected fault."""


@dataclass(eq=False)
class _Wrapped(Executable):
    """An executable around which something happens. `before(batch)` may give another batch, which is spoilt as soon as run() has
    returned; `after(batch)` and `at_tokens(batch)` may raise, once the step has run and been waited for."""

    inner: Executable
    before: Callable[[Batch], Batch] = lambda batch: batch
    after: Callable[[Batch], None] = lambda batch: None
    at_tokens: Callable[[Batch], None] = lambda batch: None

    def run(self, batch: Batch) -> Step:
        given = self.before(batch)
        step = self.inner.run(given)
        if given is not batch:
            spoil(given)
        try:
            self.after(batch)
        except _Fault:
            step.tokens()
            raise
        return _WrappedStep(step, lambda: self.at_tokens(batch))


@dataclass(eq=False)
class _WrappedStep(Step):
    inner: Step
    at_tokens: Callable[[], None]

    def tokens(self) -> Sampled:
        sampled = self.inner.tokens()
        self.at_tokens()
        return sampled

    def output(self, name: str) -> npt.NDArray[np.float32]:
        return self.inner.output(name)


@dataclass(eq=False)
class _Nth:
    """Raises in the steps of these numbers, counted from 0."""

    steps: frozenset[int]
    count: int = field(default=-1)

    def __call__(self, batch: Batch) -> None:
        self.count += 1
        if self.count in self.steps:
            raise _Fault(f"injected into step {self.count}")


def judge_failure(lab: Lab) -> Verdict:
    """Steps fail after they have run, in run() or in tokens(): they run again, and nothing of the first time is left."""
    wanted = greedy((5, 40, 1, 17), 20)
    want = plain(lab, wanted)
    for place in ("after", "at_tokens"):
        fault = _Nth(frozenset((1, 9, 15)))
        with serving(lab, wrap=lambda inner, p=place, f=fault: _Wrapped(inner, **{p: f})) as engine:  # type: ignore[misc]
            numbers = [engine.add_request(r.prompt, r.params) for r in wanted]
            expect_ids(tokens_of(finish(engine), numbers), want, f"those without a fault ({place})")
            if not engine.stats.failed_steps:
                raise Mismatch("no step failed although a fault was injected")
    return Verdict("faults in run() and in tokens(): the same ids as without")


def judge_lasting_failure(lab: Lab) -> Verdict:
    """Every step with a certain token fails: its request ends with the fault, the others go on, and all pages come back. The token
    stands far behind what one step computes, so that a backend with large pages computes several steps again before it."""
    neighbours = greedy((5, 20, 1), 20, avoid=MARK)
    want = plain(lab, neighbours)

    def fail(batch: Batch) -> None:
        if MARK in batch.token_ids:
            raise _Fault("injected")

    with serving(lab, wrap=lambda inner: _Wrapped(inner, after=fail)) as engine:
        numbers = [engine.add_request(r.prompt, r.params) for r in neighbours]
        for _ in range(6):
            engine.step()
        prompt = [*greedy((3 * BUDGET,), 1, avoid=MARK)[0].prompt, MARK]
        victim = engine.add_request(prompt, SamplingParams(max_tokens=20, **GREEDY))
        done = finish(engine)
        if done[victim].outputs[0].finish_reason != "error":
            raise Mismatch("the request whose steps fail did not end with an error")
        unharmed = [i for i, n in enumerate(numbers) if done[n].outputs[0].finish_reason == "length"]
        if not unharmed:
            raise Mismatch("every neighbour ended with the fault")
        expect_ids(tokens_of(done, [numbers[i] for i in unharmed]), [want[i] for i in unharmed], "those without the fault")
    return Verdict(f"the request ends with its fault; {len(unharmed)} others go on; all pages are back")


def judge_arrays(lab: Lab) -> Verdict:
    """The step's arrays hold nonsense as soon as run() has returned."""
    wanted = greedy((5, 40, 1, 17), 20)
    want = plain(lab, wanted)
    got = plain(lab, wanted, wrap=lambda inner: _Wrapped(inner, before=copy.deepcopy))
    return expect_ids(got, want, "those with arrays that stay")


def judge_move(lab: Lab, source: Lab, target: Lab) -> Verdict:
    """Requests leave one engine halfway, as bytes, and go on in the other with their pages."""
    alone = source.backend is target.backend
    if not alone and not lab.exact:
        return Verdict("the backend does not compute in float32, so ids may differ", "skipped")
    exact: dict[str, Any] = {} if alone else {"dtype": "float32", "kv_dtype": "float32"}
    wanted = greedy((5, 40, 1, 17), 24)
    want = plain(lab, wanted, **exact)
    with serving(source, **exact) as first, serving(target, **exact) as second:
        numbers = [first.add_request(r.prompt, r.params) for r in wanted]
        for _ in range(14):
            first.step()
        states = [first.export_request(n).to_bytes() for n in numbers]
        finish(first)
        moved = [second.import_request(RequestState.from_bytes(data)) for data in states]
        done = finish(second)
        expect_ids(tokens_of(done, moved), want, "those that stayed")
        if second.stats.computed_tokens >= sum(len(r.prompt) for r in wanted):
            raise Mismatch("the pages that came along were not used: everything was computed again")
    return Verdict(f"{len(wanted)} requests, {sum(map(len, states))} bytes, the same ids")


def judge_graphs(lab: Lab) -> Verdict:
    """Decode steps of every size from 1 up, with and without captures: the same ids and, within the dtype's budget, logprobs."""
    if not lab.capabilities.graph_capture or lab.backend.api_version < 2:
        return Verdict("the backend captures no graphs", "skipped")
    params = [SamplingParams(max_tokens=4 + 3 * i, **GREEDY, logprobs=lab.logprobs) for i in range(7)]
    wanted = [Request(r.prompt, p) for r, p in zip(greedy((1, 3, 17, 40, 8, 33, 5), 1), params)]
    runs = []
    for graphs in ((1, 4, SEQS), ()):
        with serving(lab, graphs=graphs) as engine:
            runs.append(undisturbed(engine, wanted))
    expect_ids(runs[0], runs[1], "those of eager steps")
    differences = [abs(a - b) for (_, mine), (_, theirs) in zip(*runs) for a, b in zip(mine, theirs, strict=True)]
    allowed = 10 * BUDGETS.get(lab.dtypes[0], 0.1)
    if max(differences, default=0.0) > allowed:
        raise Mismatch(f"logprobs of captured steps differ by up to {max(differences):.3g}")
    return Verdict(
        f"batches of 1 to 7, {sum(len(ids) for ids, _ in runs[0])} tokens; logprobs within {max(differences, default=0):.2g}"
    )


def judge_captured_drafts(lab: Lab) -> Verdict:
    """Drafts of up to three tokens of one to four sequences, right and wrong ones: the same ids as without drafts and captures."""
    if not lab.capabilities.graph_drafts:
        return Verdict("the backend captures no steps of several tokens a sequence", "skipped")
    params = [SamplingParams(max_tokens=12 + 3 * i, **GREEDY) for i in range(4)]
    wanted = [Request(r.prompt * 3, p) for r, p in zip(greedy((2, 5, 3, 9), 1), params)]  # what comes again and again is drafted
    want = plain(lab, wanted, graphs=())
    with serving(lab, graphs=(1, 4, BUDGET), drafts=3) as engine:
        found, stats = undisturbed(engine, wanted), engine.stats
    expect_ids(found, want, "those of eager steps without drafts")
    if not 0 < stats.accepted_tokens < stats.draft_tokens:
        raise Mismatch(f"of {stats.draft_tokens} drafts {stats.accepted_tokens} came true: the check wants some of both kinds")
    return Verdict(f"{stats.draft_tokens} drafts, {stats.accepted_tokens} of them right; the same ids")


def judge_growth(lab: Lab) -> Verdict:
    """Many short requests, some of them cancelled: memory(), pages and objects are those after the first of them."""
    with serving(lab, config=SMALL, budget=4 * SEQS, share=0.0) as engine:
        session: Session = engine.model.session
        held, blocks = [], []
        for start in range(0, SHORT_REQUESTS, PART):
            _serve_short(engine, range(start, start + PART))
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            held.append(_held(session))
        if held[-1] != held[0]:
            said = f"memory() said {held[0]} bytes of weights and pages after {PART} short requests"
            raise Mismatch(f"{said}, and {held[-1]} after {SHORT_REQUESTS}")
    growth = [b - a for a, b in itertools.pairwise(blocks)]
    if min(growth) > BLOCKS_A_REQUEST * PART:
        raise Mismatch(f"every {PART} short requests leave {min(growth)} Python objects or more behind")
    return Verdict(f"memory() and pages as before; at the end {max(growth[-1], 0)} Python objects more after {PART} requests")


def _held(session: Session) -> tuple[int, int]:
    memory = session.memory()
    return memory.weights, memory.kv


def _serve_short(engine: Engine, numbers: Sequence[int]) -> None:
    """Requests of one token, two at a time; each eleventh would have two and is cancelled after the first."""
    for first in numbers[::2]:
        params = {n: SamplingParams(max_tokens=1 + (n % 11 == 0), **GREEDY) for n in (first, first + 1)}
        made = {n: engine.add_request([n % 150, n % 7], p) for n, p in params.items()}
        engine.step()
        for n in made:
            if n % 11 == 0:
                engine.abort(made[n])
        finish(engine)


def judge_close(lab: Lab) -> Verdict:
    """Sessions with weights and pages that were written, one after another: each gives its memory back."""
    spec = KVSpec(lab.page_size, lab.kv_dtype, (Group(PagedKV(8, 128), (0, 1)),))
    resident, used = [], []
    for _ in range(ROUNDS):
        with lab.session() as session:
            used.append(available_memory() - session.memory().free)  # of the device's own: where it is the host's, others take some
            session.load(as_weight("w", np.ones((256, 1024), np.float32)), "float32")
            pages = ROUND_BYTES // session.page_bytes(spec) + 2
            session.kv_store(spec, pages)
            numbers = tuple(np.ones((1, *shape), np.float32) for shape in spec.groups[0].spec.page_shapes(spec.page_size))
            held = session.export_pages(0, [0])
            session.import_pages(0, [0], held._replace(tensors=(numbers, numbers)))
            session.copy_pages([0] * (pages - 1), range(1, pages))
        del session
        gc.collect()
        resident.append(_resident())
    for what, sizes in (("the process has grown", resident), ("the device's free memory has shrunk", used)):
        if _grows(sizes):
            raise Mismatch(f"{what} by {sizes[-1] - sizes[1]} bytes over {ROUNDS - 2} sessions that were closed")
    return Verdict(f"{ROUNDS} sessions of {ROUND_BYTES >> 20} MiB one after another")


def _grows(sizes: Sequence[int]) -> bool:
    """Whether every round but the first left at least half of its pages behind: a neighbour on the machine would not keep time."""
    return all(b - a > ROUND_BYTES // 2 for a, b in itertools.pairwise(sizes[1:]))


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system has no such file."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0
