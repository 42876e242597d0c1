"""Thousands of random requests through a tiny model whose cache is too small for them: what must hold, counted.

Requests differ in length, sampling, grammar, adapter, priority, tenant, n and stops; some are aborted at a random step. Every one
must end, with the ids it has when it runs alone (an aborted one, or one that a fault has hit twice, with a prefix of them); no page
may be lost and the invariants must hold whenever they are looked at. All of them run three times: as they are; with a fault in one
of fifty runs of the device, raised before it, after it, or as nonsense for an answer; and with speculation and a tier for pages.

    python benchmarks/soak_engine.py --requests 10000 [--json] [--backend cpu] [--seed 0] [--speculative METHOD]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trivium.engine import Engine, EngineConfig, RequestOutput
from trivium.engine.loader import Loaded, LoadOptions, load
from trivium.ops import Batch, Sampled
from trivium.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from peft_adapters import make_adapter
from tiny_checkpoints import make_checkpoint

FAULTS_ONE_IN = 50
IDS = 256  # the byte tokens; the tiny model's others are special


class Job(NamedTuple):
    """One request. abort_after: engine steps after which it is given up."""

    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]
    abort_after: int | None


Result = list[tuple[list[int], str, str | None]]
"""Ids, text and finish reason of each output."""


class Fault(RuntimeError):
    """Injected."""


class Faulty:
    """An executable that fails now and then."""

    def __init__(self, executable: Any, rng: random.Random) -> None:
        self._executable = executable
        self._rng = rng
        self.injected = 0

    def run(self, batch: Batch) -> Any:
        kind = self._rng.randrange(3 * FAULTS_ONE_IN)
        self.injected += kind < 3
        if kind == 0:
            raise Fault("before the run")
        step = self._executable.run(batch)
        return _Broken(kind) if kind < 3 else step


class _Broken:
    def __init__(self, kind: int) -> None:
        self._kind = kind

    def tokens(self) -> Sampled:
        if self._kind == 1:
            raise Fault("after the run")
        return Sampled(np.full(7, 10**6, np.int32))


def make_jobs(count: int, seed: int, adapters: Sequence[str]) -> list[Job]:
    """Random requests; a third of them begin with one of eight shared prefixes."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(IDS) for _ in range(rng.randrange(16, 80))] for _ in range(8)]
    return [_job(rng, prefixes, adapters) for _ in range(count)]


def _job(rng: random.Random, prefixes: list[list[int]], adapters: Sequence[str]) -> Job:
    head = rng.choice(prefixes) if rng.random() < 0.35 else []
    prompt = head + [rng.randrange(IDS) for _ in range(rng.randrange(1, 24))]
    options: dict[str, Any] = {"priority": rng.choice([0, 0, 0, 1, 2]), "cache_salt": rng.choice(["", "", "tenant"])}
    if adapters and rng.random() < 0.3:
        options["adapter"] = rng.choice(adapters)
    return Job(prompt, _params(rng), options, rng.randrange(1, 30) if rng.random() < 0.1 else None)


def _params(rng: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "seed": rng.randrange(2**32)}
    fields["temperature"] = rng.choice([0.0, 0.7, 1.3])
    extras: list[dict[str, Any]] = [
        {}, {}, {}, {"top_k": rng.randrange(1, 50)}, {"top_p": rng.uniform(0.2, 1)}, {"min_p": rng.uniform(0, 0.5)},
        {"repetition_penalty": rng.uniform(0.7, 1.6)}, {"presence_penalty": rng.uniform(-2, 2)},
        {"frequency_penalty": rng.uniform(-2, 2)},
        {"logit_bias": {rng.randrange(IDS): rng.uniform(-20, 20) for _ in range(4)}},
        {"allowed_token_ids": rng.sample(range(IDS), 40)}, {"n": 2}, {"logprobs": rng.randrange(4)}, {"prompt_logprobs": 1},
        {"stop": [chr(97 + rng.randrange(26)), "the"]}, {"stop_token_ids": rng.sample(range(IDS), 5)}, {"ignore_eos": True},
        {"min_tokens": fields["max_tokens"] // 2}, {"bad_words": ["a", "no"]},
        {"dry_multiplier": 0.8}, {"typical_p": 0.8}, {"top_n_sigma": 1.5}, {"xtc_probability": 0.6, "xtc_threshold": 0.1},
        *({"structured_outputs": grammar} for grammar in _GRAMMARS),
    ]  # fmt: skip
    for extra in rng.sample(extras, rng.randrange(3)):
        fields |= extra
    if "structured_outputs" in fields:
        for clash in ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias", "stop", "stop_token_ids"):
            fields.pop(clash, None)
    return SamplingParams(**fields)


_GRAMMARS: Sequence[dict[str, Any]] = (
    {"regex": "[a-f]{3,9}(-[0-9]+)?"},
    {"choice": ["yes", "no", "perhaps", "per se"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}},
)


def result_of(output: RequestOutput) -> Result:
    return [(list(c.token_ids), c.text, c.finish_reason) for c in output.outputs]


def alone(engine: Engine, jobs: Sequence[Job]) -> Iterator[Result]:
    """Each request by itself."""
    for job in jobs:
        engine.add_request(job.prompt, job.params, **job.options)
        outputs: list[RequestOutput] = []
        while engine.has_unfinished():
            outputs += engine.step()
        yield result_of(outputs[-1])


class Crowd:
    """All requests together, in bursts."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], seed: int) -> None:
        self.engine = engine
        self.jobs = jobs
        self.results: dict[int, Result] = {}
        self.invariant_failures = 0
        self._rng = random.Random(seed)
        self._numbers: dict[int, int] = {}
        self._aborts: dict[int, list[int]] = {}

    def run(self) -> None:
        """Until every request has ended."""
        step = at = 0
        while at < len(self.jobs) or self.engine.has_unfinished():
            room = 150 - len(self._numbers)
            for _ in range(min(self._rng.choice([0, 0, 0, 3, 10, 60]), max(room, 0), len(self.jobs) - at)):
                self._add(at, step)
                at += 1
            if self.engine.has_unfinished():
                self._take(self.engine.step())
            for number in self._aborts.pop(step, ()):
                ended = self.engine.abort(number)
                self._take([] if ended is None else [ended])
            if step % 16 == 0 or not self.engine.has_unfinished():
                self._check()
            step += 1

    def _add(self, at: int, step: int) -> None:
        job = self.jobs[at]
        number = self.engine.add_request(job.prompt, job.params, **job.options)
        self._numbers[number] = at
        if job.abort_after is not None:
            self._aborts.setdefault(step + job.abort_after, []).append(number)

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.results[self._numbers.pop(output.request_id)] = result_of(output)

    def _check(self) -> None:
        try:
            self.engine.check()
        except AssertionError as failure:
            print(f"invariant: {failure}", file=sys.stderr)
            self.invariant_failures += 1


def matches(got: Result, want: Result) -> bool:
    """Equal, or cut short by an abort or an injected fault."""
    cut = ("abort", "error")
    return len(got) == len(want) and all(
        ids == other[: len(ids)] and theirs.startswith(text.rstrip("\ufffd"))
        if reason in cut
        else (ids, text, reason) == (other, theirs, why)
        for (ids, text, reason), (other, theirs, why) in zip(got, want)
    )


def measure(loaded: Loaded, config: EngineConfig, jobs: Sequence[Job], want: Sequence[Result], seed: int) -> dict[str, Any]:
    """One run of all requests and what it left behind."""
    engine = Engine(loaded, loaded.tokenizer, config)
    crowd = Crowd(engine, jobs, seed)
    began = time.perf_counter()
    crowd.run()
    seconds = time.perf_counter() - began
    wrong = [i for i, result in crowd.results.items() if not matches(result, want[i])]
    for i in wrong[:3]:
        print(f"request {i}: {jobs[i]}\n  together {crowd.results[i]}\n  alone    {want[i]}", file=sys.stderr)
    stats, pool = engine.stats, engine.kv.pool
    counters = ("steps", "failed_steps", "preemptions", "cached_tokens")
    return {
        "completed": len(crowd.results),
        "mismatches": len(wrong),
        "leaked_blocks": pool.pages - pool.available,
        "invariant_failures": crowd.invariant_failures,
        "seconds": round(seconds, 1),
        **{name: getattr(stats, name) for name in counters},
        "finish_reasons": dict(Counter(reason for result in crowd.results.values() for _, _, reason in result)),
    }


def open_model(model: str, backend: str, adapters: Mapping[str, Path], **sizes: Any) -> Loaded:
    """The tiny model with its adapters, of which two can run at a time."""
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    loaded = load(model, backend, LoadOptions(max_num_batched_tokens=48, max_model_len=160, **lora, **sizes))
    engine = Engine(loaded, loaded.tokenizer, EngineConfig(4, 48))
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return loaded


def soak(backend: str, requests: int, seed: int) -> dict[str, Any]:
    """All runs; their totals, and each by itself."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_checkpoint(Path(folder) / "model", "gemma3", tie_word_embeddings=False))
        adapters = {name: make_adapter(Path(folder) / name, "gemma3", seed=n) for n, name in enumerate(("red", "green", "blue"), 1)}
        jobs = make_jobs(requests, seed, list(adapters))
        single = open_model(model, backend, adapters, max_num_seqs=4, num_kv_blocks=256)
        want = list(alone(Engine(single, single.tokenizer, EngineConfig(4, 48, False)), jobs))
        single.session.close()
        loaded = open_model(model, backend, adapters, max_num_seqs=32, num_kv_blocks=72, num_speculative_tokens=3)
        runs = {}
        for name, extras in RUNS.items():
            faulty = Faulty(loaded.executable, random.Random(seed)) if name == "faults" else None
            engine_model = dataclasses.replace(loaded, executable=faulty) if faulty else loaded
            runs[name] = measure(engine_model, EngineConfig(32, 48, **extras), jobs, want, seed)
            if faulty:
                runs[name]["injected"] = faulty.injected
        loaded.session.close()
    names = ("completed", "mismatches", "leaked_blocks", "invariant_failures")
    totals = {n: sum(run[n] for run in runs.values()) for n in names}
    return {"backend": backend, "seed": seed, "requests": len(runs) * requests, **totals, **runs}


RUNS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "faults": {},
    "guessed": {"speculative": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}, "kv_host_bytes": 1 << 20},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Random requests by the thousand, together and alone.")
    parser.add_argument("--requests", type=int, default=1000, help="requests in each of the two runs")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    logging.getLogger("trivium").setLevel(logging.ERROR)  # each injected fault would be reported
    report = soak(args.backend, args.requests, args.seed)
    print(json.dumps(report, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
