"""What the profile says of an operation, against counts made by hand and by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from trivium.conformance.lab import as_weight
from trivium.ops import Batch, new_builder
from trivium.ops.sample import plain_inputs
from trivium_cpu.plugin import CpuBackend
from trivium_cpu.profile import attention, both_ways, sparse

VOCAB, WIDTH = 64, 128


@pytest.fixture
def executable():
    backend = CpuBackend()
    session = backend.open(backend.probe().devices[0], {"threads": 2})
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (VOCAB, WIDTH)))
    wide = b.linear(x, b.weight("up", (2 * WIDTH, WIDTH)))
    y = b.linear(wide, b.weight("down", (WIDTH, 2 * WIDTH)))
    program = b.finish({"logits": b.gather_rows(y, b.input("sample_rows")), "all": y}, vocab_size=WIDTH)
    rng = np.random.default_rng(0)
    sizes = {"table": (VOCAB, WIDTH), "up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in sizes.items()}
    weights = {name: session.load(as_weight(name, a), "float32" if name != "up" else "int8") for name, a in arrays.items()}
    yield session.compile(program, weights)
    session.close()


def batch(queries, contexts):
    tokens = sum(queries)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    rows = np.arange(min(tokens, 2), dtype=np.int32)
    return Batch(
        np.zeros(tokens, np.int32), np.zeros(tokens, np.int32), starts, np.array(contexts, np.int32),
        np.zeros((0, len(queries), 0), np.int32), np.zeros((0, tokens), np.int64), rows, plain_inputs(len(rows)),
    )  # fmt: skip


def test_bytes_and_operations_are_those_of_the_shapes(executable):
    executable.profile(True)
    for tokens in (5, 3):
        executable.run(batch([tokens], [tokens]))
    found = executable.profile(False)
    by_name = {o.name: o for o in found.operators}
    assert set(by_name) == {"embedding", "linear", "gather rows"}
    linear = by_name["linear"]
    products, tokens = 2 * (2 * WIDTH * WIDTH), 5 + 3
    assert linear.calls == 4 and linear.operations == 2 * products * tokens
    # up: 8 bits and a 16-bit scale for each group of 32 weights; down: float32.
    weights = 2 * WIDTH * WIDTH * (1 + 2 / 32) + 2 * WIDTH * WIDTH * 4
    assert linear.bytes == 2 * weights + 4 * 2 * (WIDTH + 2 * WIDTH) * tokens
    assert by_name["gather rows"].bytes == 4 * 2 * (2 + 2) * WIDTH
    assert all(o.seconds > 0 and o.floor_s > 0 for o in found.operators)
    assert set(found.ceilings) == {"bytes", "int8", "float32"} and min(found.ceilings.values()) > 1e8


def test_a_profile_starts_from_zero_and_says_nothing_when_off(executable):
    executable.profile(True)
    executable.run(batch([4], [4]))
    executable.profile(True)
    executable.run(batch([1], [1]))
    assert {o.calls for o in executable.profile(False).operators} == {1, 2}
    executable.run(batch([1], [1]))
    assert executable.profile(False) == ((), {})


@pytest.mark.parametrize(
    ("window", "causal", "chunk"), [*itertools.product([0, 1, 7, 100], [True, False], [0]), (0, True, 4), (0, True, 16)]
)
def test_the_pairs_of_attention_are_those_that_brute_force_finds(window, causal, chunk):
    queries, contexts = [1, 5, 12, 3], [40, 5, 30, 9]

    def sees(query, key):
        near = query - key < window if window else query // chunk == key // chunk if chunk else True
        return near and (key <= query or not causal)

    pairs = keys = 0
    for n, context in zip(queries, contexts, strict=True):
        positions = range(context - n, context)
        seen = {p: [k for k in range(context) if sees(p, k)] for p in positions}
        pairs += sum(len(ks) for ks in seen.values())
        keys += len(set(itertools.chain(*seen.values())))
    work = attention(10.0, 7, window, causal, chunk)({}, batch(queries, contexts))
    assert work.operations == 2 * 7 * pairs
    assert work.bytes == 10 * keys


@pytest.mark.parametrize("window", [None, 0, 1, 4, 5, 11, 12, 100])
def test_the_pairs_of_attention_to_both_sides_are_those_that_brute_force_finds(window):
    lengths = [1, 5, 12, 3]
    near = [abs(i - j) <= (n if window is None else window) for n in lengths for i in range(n) for j in range(n)]
    assert both_ways(7, window)({}, batch(lengths, lengths)) == (0, 2 * 7 * sum(near))


@pytest.mark.parametrize("top_k", [1, 6, 100])
def test_chosen_positions_are_as_many_as_a_token_sees_and_at_most_those_asked_for(top_k):
    queries, contexts = [1, 5, 0, 12, 3], [40, 5, 20, 30, 9]
    seen = [min(p + 1, top_k) for n, context in zip(queries, contexts, strict=True) for p in range(context - n, context)]
    keys = sum(min(context, top_k) for n, context in zip(queries, contexts, strict=True) if n)
    assert sparse(10.0, 7, top_k)({}, batch(queries, contexts)) == (10 * keys, 2 * 7 * sum(seen))


def test_experts_are_read_as_often_as_tokens_are_likely_to_choose_them():
    """The first token reads two experts of four; the second, for all one knows, half of the others, the third half of the rest."""
    backend = CpuBackend()
    session = backend.open(backend.probe().devices[0], {"threads": 1})
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (VOCAB, WIDTH)))
    shares, ids = b.moe_route(b.linear(x, b.weight("router", (4, WIDTH)), None), None, top_k=2)
    matrices = [b.weight(name, (4, WIDTH, WIDTH)) for name in ("gate", "up", "down")]
    y = b.moe_experts(x, shares, ids, *matrices, None, None, None)
    program = b.finish({"logits": b.gather_rows(y, b.input("sample_rows")), "all": y}, vocab_size=WIDTH)
    weights = {
        c.value.name: session.load(as_weight(c.value.name, np.ones(c.value.shape, np.float32)), "float32")
        for c in program.constants
    }
    executable = session.compile(program, weights)
    executable.profile(True)
    executable.run(batch([3], [3]))
    found = {o.name: o for o in executable.profile(False).operators}["experts"]
    experts, products = 2 + 1 + 0.5, 3 * WIDTH * WIDTH
    assert found.operations == 2 * 3 * 2 * products
    assert found.bytes == 4 * (experts * products + 3 * (2 * WIDTH + 2 + 2))
    session.close()
