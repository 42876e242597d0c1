"""Formats, rectangles and rows of the onnxruntime backend, against independent sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.errors import CapacityError, UnsupportedError
from trivium.ops import Batch, Group, KVSpec, PagedKV, Weight
from trivium.ops.sample import plain_inputs
from trivium.plugin import Pages

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from trivium_onnxruntime.formats import joined, load
from trivium_onnxruntime.pages import Pool, numbers_of, stored
from trivium_onnxruntime.rectangles import cut, rectangle
from trivium_onnxruntime.rows import Rows


def plain(numbers: np.ndarray, name: str = "w") -> Weight:
    return Weight(name, numbers.shape, "float32", numbers, lambda data: data)


@pytest.mark.parametrize("storage, format", [("Q4_0", "int4"), ("Q4_1", "int4_min"), ("Q8_0", "int8")])
def test_gguf_blocks_are_held_exactly(storage, format):
    gguf = pytest.importorskip("gguf")
    numbers = np.random.default_rng(1).standard_normal((6, 96), dtype=np.float32)
    kind = gguf.GGMLQuantizationType[storage]
    raw = gguf.quants.quantize(numbers, kind)
    weight = Weight("w", (6, 96), storage.lower(), raw, lambda data: gguf.quants.dequantize(data, kind))
    held = load(weight, format)
    assert held.array is None
    np.testing.assert_array_equal(held.numbers(), gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("format, budget", [("int4", 0.12), ("int4_min", 0.12), ("int8", 0.01)])
def test_rounding_stays_within_its_budget_and_zeros_stay_zeros(format, budget):
    numbers = np.random.default_rng(2).standard_normal((8, 256), dtype=np.float32)
    numbers[3] = 0
    held = load(plain(numbers), format).numbers()
    assert np.sqrt(np.mean((held - numbers) ** 2) / np.mean(numbers**2)) < budget
    assert not held[3].any()


def test_rows_that_are_not_whole_blocks_are_refused_with_what_to_do():
    with pytest.raises(UnsupportedError, match=r"72 numbers.*float32"):
        load(plain(np.zeros((4, 72), np.float32)), "int4")


def test_joined_weights_are_the_parts_below_each_other_and_share_their_memory():
    rng = np.random.default_rng(3)
    parts = [load(plain(rng.standard_normal((n, 64), dtype=np.float32)), "int4_min") for n in (4, 2, 2)]
    want = np.concatenate([p.numbers() for p in parts])
    whole = joined(parts)
    assert whole is not None and whole.nbytes == sum(p.nbytes for p in parts)
    np.testing.assert_array_equal(whole.numbers(), want)
    np.testing.assert_array_equal(np.concatenate([p.numbers() for p in parts]), want)
    assert all(np.shares_memory(p.q, whole.q) for p in parts)
    assert joined([parts[0], load(plain(np.zeros((2, 64), np.float32)), "int8")]) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kv_formats_round_as_torch_does(dtype):
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(4).standard_normal(4000).astype(np.float32)
    want = torch.from_numpy(numbers).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(numbers_of(stored(numbers, dtype)), want)


def step(lengths: list[int], past: list[int]) -> Batch:
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    tokens, none = int(starts[-1]), np.zeros((1, len(lengths), 1), np.int32)
    contexts = (np.array(lengths) + past).astype(np.int32)
    zeros = np.zeros(tokens, np.int32)
    return Batch(zeros, zeros, starts, contexts, none, np.zeros((1, tokens), np.int64), zeros[:1], plain_inputs(1))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
@settings(deadline=None)
def test_rectangles_hold_every_token_once_with_little_padding(lengths):
    batch = step(lengths, [5] * len(lengths))
    rects = [rectangle(batch, seqs, 0) for seqs in cut(batch)]
    tokens = np.concatenate([r.tokens for r in rects]) if rects else np.zeros(0, int)
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    for r in rects:
        assert r.grid.size - len(r.tokens) <= 24
        row, position = r.places()
        assert position.tolist() == [5 + t - batch.query_starts[s] for s, t in zip(r.seqs[row], r.tokens)]
    assert len([r for r in rects if r.grid.shape[1] == 1]) <= 1


SPEC = KVSpec(4, "float32", (Group(PagedKV(2, 8), (0, 1)),))


def filled(pool: Pool, pages: list[int], seed: int) -> Pages:
    rng = np.random.default_rng(seed)
    layers = tuple(tuple(rng.standard_normal((len(pages), 4, 2, 8), dtype=np.float32) for _ in "kv") for _ in (0, 1))
    made = Pages(SPEC.groups[0], 4, "float32", layers)
    pool.import_(0, pages, made)
    return made


def held_by(rows: Rows, pool: Pool, row: int, pages: list[int]) -> bool:
    """Whether a row's first blocks equal the pages, keys and values of both layers."""
    exported = pool.export(0, pages)
    for layer, tensors in enumerate(exported.tensors):
        for part, tensor in enumerate(tensors):
            mine = rows.groups[0].data[layer, part, row, :, : 4 * len(pages)].transpose(1, 0, 2)
            if not np.array_equal(mine, tensor.reshape(-1, 2, 8)):
                return False
    return True


def test_a_row_is_copied_again_where_its_pages_were_written_by_others():
    pool = Pool(SPEC, 8)
    filled(pool, [5, 2, 7], 1)
    rows = Rows(pool, 1 << 20)
    rows.reserve(2, 16)
    table = np.array([[5, 2, 7, -1]], np.int32)
    group = rows.groups[0]
    group.fill(0, table, np.array([3]))
    assert held_by(rows, pool, 0, [5, 2, 7])
    for change in (lambda: filled(pool, [2], 9), lambda: pool.copy([5], [7])):
        change()
        assert not held_by(rows, pool, 0, [5, 2, 7])
        group.fill(0, table, np.array([3]))
        assert held_by(rows, pool, 0, [5, 2, 7])


def test_sequences_find_their_rows_again_in_another_order():
    pool = Pool(SPEC, 8)
    filled(pool, list(range(8)), 1)
    rows = Rows(pool, 1 << 20)
    rows.reserve(3, 16)
    tables = np.array([[0, 1], [2, 3], [4, 5]], np.int32)
    two = np.array([2, 2, 2])
    group = rows.groups[0]
    group.fill(0, tables, two)
    assert group.order(0, tables, two) is None
    order = group.order(0, tables[[2, 0, 1]], two)
    assert order is not None and tables[[2, 0, 1]][order].tolist() == tables.tolist()
    order = group.order(0, tables[[1, 2]], two[:2])  # the first sequence is gone
    assert order is not None and tables[[1, 2]][order][1].tolist() == [2, 3]


def test_stored_tokens_reach_their_slots_and_no_other():
    pool = Pool(SPEC, 4)
    filled(pool, [0, 1, 2, 3], 5)
    before = pool.export(0, [0, 1, 2, 3])
    rows = Rows(pool, 1 << 20)
    rows.reserve(1, 16)
    rows.groups[0].data[:] = 7
    rows.groups[0].keep(np.array([0, 0, 0]), np.array([4, 5, 6]), np.array([12, -1, 14]))
    after = pool.export(0, [0, 1, 2, 3])
    changed = np.argwhere((after.tensors[1][0] != before.tensors[1][0]).any(axis=(2, 3))).tolist()
    assert changed == [[3, 0], [3, 2]] and (after.tensors[1][0][3, 2] == 7).all()


def test_a_pool_that_does_not_fit_names_its_bytes():
    with pytest.raises(CapacityError, match="bytes"):
        Pool(SPEC, 1 << 50)
