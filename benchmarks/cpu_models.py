"""Experts and the gated delta rule of the CPU backend against their floors on this machine.

Experts: a router and `moe_experts` of a layer of Qwen3-30B-A3B (128 experts of 2048 x 768, 8 a token) in a resident format, for
some numbers of tokens. Floor: the weights of the experts that the tokens really chose at the bandwidth of a plain read of the same
memory, or the products at the rate of dot products on registers, whichever takes longer.
Delta rule: 24 layers of Qwen3-Next's (32 heads, states of 128 x 128), decode of some sequences and a prefill of one. Floor: every
state read and written once at that bandwidth, or four multiply-adds a number of the state and token at the rate of multiply-adds
on registers.
Ceilings are measured between the rounds; figures are medians of rounds.

    python benchmarks/cpu_models.py [--json] [--isa NAME] [--threads N] [--rounds N] [--steps N] [--quick] [--formats int4,int8]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from trivium.conformance.lab import as_weight
from trivium.ops import Batch, Group, KVSpec, Program, Recurrent, Weight, new_builder
from trivium.ops.sample import plain_inputs
from trivium_cpu.plugin import CpuBackend

BLOCKS = {"int4": ("q4_0", 18), "int8": ("q8_0", 34)}
"""The storage format of random blocks of 32 weights, and their bytes."""
Arrays = dict[str, Weight]


class Sizes(NamedTuple):
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    inter: int = 768
    heads: int = 32
    width: int = 128
    layers: int = 24


QUICK = Sizes(8, 2, 256, 96, 2, 32, 2)


def random_blocks(name: str, shape: tuple[int, ...], format: str, rng: np.random.Generator) -> Weight:
    """Any codes under scales of 0.01."""
    storage, size = BLOCKS[format]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // 32, size), dtype=np.uint8)
    blocks[:, :2] = np.float16([0.01]).view(np.uint8)
    return Weight(name, shape, storage, blocks.reshape(-1), lambda data: np.zeros(shape, np.float32))


def random_rows(b: Any, name: str, tokens: int, width: int, weights: Arrays, make: Callable[..., Any]) -> Any:
    """An activation [tokens, width], from a table."""
    weights[name] = as_weight(name, make((tokens, width)).astype(np.float32))
    return b.embedding(b.input("token_ids"), b.weight(name, (tokens, width)))


def experts_program(s: Sizes, format: str, tokens: int) -> tuple[Program, Arrays]:
    rng, weights, b = np.random.default_rng(1), Arrays(), new_builder()
    x = random_rows(b, "x", tokens, s.hidden, weights, rng.standard_normal)
    weights["router"] = as_weight("router", rng.standard_normal((s.experts, s.hidden), dtype=np.float32))
    shares, ids = b.moe_route(b.linear(x, b.weight("router", (s.experts, s.hidden)), None), None, top_k=s.top_k)
    matrices = []
    for name, shape in (("gate", (s.inter, s.hidden)), ("up", (s.inter, s.hidden)), ("down", (s.hidden, s.inter))):
        weights[name] = random_blocks(name, (s.experts, *shape), format, rng)
        matrices.append(b.weight(name, (s.experts, *shape)))
    y = b.moe_experts(x, shares, ids, *matrices, None, None, None)
    return b.finish({"logits": b.gather_rows(y, b.input("sample_rows")), "ids": ids}, vocab_size=s.hidden), weights


def delta_program(s: Sizes, tokens: int) -> tuple[Program, Arrays]:
    rng, weights, b = np.random.default_rng(2), Arrays(), new_builder()
    shape = ("tokens", s.heads, s.width)
    q, k, v = (b.reshape(random_rows(b, n, tokens, s.heads * s.width, weights, rng.standard_normal), shape=shape) for n in "qkv")
    k = b.rms_norm(k, None)
    k = b.scale(k, factor=s.width**-0.5)
    g = random_rows(b, "g", tokens, s.heads, weights, lambda size: -rng.uniform(0, 1, size))
    beta = random_rows(b, "beta", tokens, s.heads, weights, lambda size: rng.uniform(0, 1, size))
    ranges = b.input("query_starts"), b.input("context_lens")
    for layer in range(s.layers):
        state = b.state(f"state.{layer}", Recurrent((s.heads, s.width, s.width)))
        v, _ = b.gated_delta_rule(q, k, v, g, beta, state, *ranges, scale=1.0)
    y = b.reshape(v, shape=("tokens", s.heads * s.width))
    return b.finish({"logits": b.gather_rows(y, b.input("sample_rows"))}, vocab_size=s.heads * s.width), weights


def step_of(queries: Sequence[int], groups: int) -> Batch:
    """Sequences far into their contexts, each with a page of its own for its states; one row is sampled."""
    tokens, seqs = sum(queries), len(queries)
    ids = np.arange(tokens, dtype=np.int32)
    starts = np.cumsum([0, *queries]).astype(np.int32)
    tables = np.tile(np.arange(seqs, dtype=np.int32)[:, None], (groups, 1, 1))
    slots = np.full((groups, tokens), -1, np.int64)
    return Batch(ids, ids + 1000, starts, starts[1:] + 1000, tables, slots, ids[-1:], plain_inputs(1))


def timed(options: dict[str, Any], program: Program, weights: Arrays, format: str, queries: Sequence[int], wanted: str, rounds: int,
          steps: int) -> tuple[list[float], list[dict[str, float]], np.ndarray | None]:  # fmt: skip
    """(seconds of the operator `wanted` a step in each round, ceilings of each, the chosen experts)."""
    backend = CpuBackend()
    limits = {"max_batched_tokens": sum(queries), "max_seqs": len(queries)}
    session = backend.open(backend.probe().devices[0], {**limits, **options})
    states = program.states
    if states:
        groups = (Group(states[0].spec, tuple(range(len(states)))),)
        session.kv_store(KVSpec(16, "float32", groups), len(queries))
    loaded = {n: session.load(w, format if w.format.startswith("q") else "float32") for n, w in weights.items()}
    executable = session.compile(program, loaded)
    batch, seconds, ceilings = step_of(queries, 1 if states else 0), [], []
    chosen = None
    for _ in range(rounds):
        executable.run(batch)
        executable.profile(True)
        for _ in range(steps):
            step = executable.run(batch)
        seen = executable.profile(False)
        seconds.append(next(o.seconds for o in seen.operators if o.name == wanted) / steps)
        ceilings.append(dict(seen.ceilings))
        chosen = step.output("ids") if "ids" in program.outputs else None
    session.close()
    return seconds, ceilings, chosen


def against_floor(
    seconds: list[float], ceilings: list[dict[str, float]], nbytes: float, operations: float, unit: str
) -> dict[str, float]:
    floors = [max(nbytes / c["bytes"], operations / c[unit]) for c in ceilings]
    return {
        "microseconds": 1e6 * statistics.median(seconds), "floor_microseconds": 1e6 * statistics.median(floors),
        "of_floor": statistics.median(f / s for f, s in zip(floors, seconds, strict=True)),
        "gb_s": nbytes / 1e9 / statistics.median(seconds), "gops": operations / 1e9 / statistics.median(seconds),
    }  # fmt: skip


def measure_experts(s: Sizes, options: dict[str, Any], format: str, tokens: int, rounds: int, steps: int) -> dict[str, Any]:
    program, weights = experts_program(s, format, tokens)
    seconds, ceilings, ids = timed(options, program, weights, format, [1] * tokens, "experts", rounds, steps)
    assert ids is not None
    numbers, chosen = 3 * s.hidden * s.inter, len(np.unique(ids))
    figures = against_floor(seconds, ceilings, chosen * numbers * BLOCKS[format][1] / 32, 2 * tokens * s.top_k * numbers, "int8")
    return {"operator": "experts", "format": format, "tokens": tokens, "experts": chosen, **figures}


def measure_delta(s: Sizes, options: dict[str, Any], queries: Sequence[int], rounds: int, steps: int) -> dict[str, Any]:
    program, weights = delta_program(s, sum(queries))
    seconds, ceilings, _ = timed(options, program, weights, "float32", queries, "gated delta rule", rounds, steps)
    numbers = s.layers * s.heads * s.width * s.width
    figures = against_floor(seconds, ceilings, 8 * numbers * len(queries), 8 * numbers * sum(queries), "float32")
    return {"operator": "gated delta rule", "sequences": len(queries), "tokens": sum(queries), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description="Experts and the gated delta rule of the CPU backend against their floors.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--formats", default="int4,int8")
    args = parser.parse_args()
    s = QUICK if args.quick else Sizes()
    options = {"isa": args.isa, **({} if args.threads is None else {"threads": args.threads})}
    rows = (1, 8) if args.quick else (1, 8, 32, 512)
    results = [
        measure_experts(s, options, format, tokens, args.rounds, args.steps)
        for format in args.formats.split(",")
        for tokens in rows
    ]
    shapes: list[list[int]] = [[1], [1] * 8, [64 if args.quick else 512]]
    results += [measure_delta(s, options, queries, args.rounds, args.steps) for queries in shapes]
    if args.json:
        print(json.dumps({"sizes": s._asdict(), "isa": args.isa, "results": results}, indent=2))
        return
    for r in results:
        what = " ".join(str(v) for v in list(r.values())[:-5])
        print(f"{what:<32} {r['microseconds']:10.1f} us, floor {r['floor_microseconds']:10.1f} us ({r['of_floor']:.0%})")


if __name__ == "__main__":
    main()
