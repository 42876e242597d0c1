"""Small Programs and the numbers to interpret them with."""

from __future__ import annotations

import numpy as np

from trivium import ops
from trivium.conformance.lab import interpret
from trivium.ops.state import PagedState

HIDDEN, HEADS, KV_HEADS, DIM, INTER, VOCAB, PAGE = 12, 4, 2, 6, 10, 11, 4


def layer(b, x, n, *, eps=1e-6):
    """One decoder layer in the order in which a model file would write it."""
    w = lambda name, *shape: b.weight(f"{n}.{name}", shape)
    positions, inv_freq = b.input("positions"), b.array("inv_freq", 100.0 ** (-np.arange(DIM // 2) / 3))
    h = b.rms_norm(x, w("norm1", HIDDEN), eps=eps)
    q = b.reshape(b.linear(h, w("q", HEADS * DIM, HIDDEN)), shape=("tokens", HEADS, DIM))
    k = b.reshape(b.linear(h, w("k", KV_HEADS * DIM, HIDDEN), w("k.bias", KV_HEADS * DIM)), shape=("tokens", KV_HEADS, DIM))
    v = b.reshape(b.linear(h, w("v", KV_HEADS * DIM, HIDDEN)), shape=("tokens", KV_HEADS, DIM))
    q = b.rope(b.rms_norm(q, w("qn", DIM), eps=eps), positions, inv_freq)
    k = b.rope(b.rms_norm(k, w("kn", DIM), eps=eps), positions, inv_freq)
    kv = b.kv_write(b.state(f"kv.{n}", ops.PagedKV(KV_HEADS, DIM)), k, v)
    y = b.paged_attention(q, kv, b.input("query_starts"), b.input("context_lens"), scale=0.4)
    x = b.add(x, b.linear(b.reshape(y, shape=("tokens", HEADS * DIM)), w("o", HIDDEN, HEADS * DIM)))
    h = b.rms_norm(x, w("norm2", HIDDEN), eps=eps)
    gated = b.gated(b.linear(h, w("gate", INTER, HIDDEN)), b.linear(h, w("up", INTER, HIDDEN)))
    return b.add(x, b.linear(gated, w("down", HIDDEN, INTER)))


def decoder(layers=2):
    b = ops.new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("embed", (VOCAB, HIDDEN)))
    for n in range(layers):
        x = layer(b, x, n)
    x = b.gather_rows(b.rms_norm(x, b.weight("norm", (HIDDEN,))), b.input("sample_rows"))
    return b.finish({"logits": b.linear(x, b.weight("embed", (VOCAB, HIDDEN)))}, vocab_size=VOCAB)


def step_inputs(rng, queries=(3, 1, 5)):
    tokens = sum(queries)
    return {
        "token_ids": rng.integers(0, VOCAB, tokens, dtype=np.int32),
        "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in queries]),
        "query_starts": np.cumsum([0, *queries], dtype=np.int32),
        "context_lens": np.asarray(queries, np.int32),
        "sample_rows": np.arange(tokens, dtype=np.int32),
    }


def constants(program, rng):
    return {c.value.name: rng.standard_normal(c.value.shape, dtype=np.float32) for c in program.constants if c.array is None}


def fresh_states(program, inputs):
    """Zeroed pages for sequences that start in this step."""
    table = np.arange(2 * len(inputs["context_lens"]), dtype=np.int32).reshape(-1, 2)
    starts = inputs["query_starts"]
    at = [np.arange(n) for n in np.diff(starts)]
    slots = np.concatenate([table[s][p // PAGE].astype(np.int64) * PAGE + p % PAGE for s, p in enumerate(at)])
    zeros = lambda spec: np.zeros((table.size, PAGE, spec.kv_heads, spec.head_dim), np.float32)
    return [PagedState(zeros(s.spec), zeros(s.spec), table, slots) for s in program.states]


def run(program, seed=0):
    """Outputs and final states for numbers that depend on the seed and the Program's constants only."""
    rng = np.random.default_rng(seed)
    inputs = step_inputs(rng)
    states = fresh_states(program, inputs)
    outputs = interpret(program, inputs, constants(program, rng), states)
    return outputs, states


def check_order(program):
    """Every value is defined once and before it is read, and a state version is not read after its successor exists."""
    known = {*program.inputs, *(c.value for c in program.constants), *(s.value for s in program.states)}
    replaced = set()
    for call in program.calls:
        arguments = [v for v in call.args if v is not None]
        assert known.issuperset(arguments), f"{call.name} reads a value that nobody has made yet"
        assert not replaced & set(arguments), f"{call.name} reads a state that has been overwritten"
        if any(r.kind == "state" for r in call.results):
            replaced.update(v for v in arguments if v.kind == "state")
        assert not known & set(call.results)
        known.update(call.results)
    assert known.issuperset(program.outputs.values())
