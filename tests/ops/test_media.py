"""Operators that bring rows of images in, by brute force; what is left of a span; and a Program that gets a place for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from trivium.errors import ProgramError
from trivium.models.media import SLOT, with_media
from trivium.ops import OPERATORS, Span, Tile, new_builder

TILE = Tile(b"t" * 32, np.zeros((4, 3), np.uint8))


def test_rows_come_from_the_table_or_from_the_media_by_their_id():
    rng = np.random.default_rng(0)
    x, media = rng.normal(size=(6, 5)).astype(np.float32), rng.normal(size=(2, 3, 5)).astype(np.float32)
    ids = np.array([0, 10, 15, 9, 12, 13], np.int32)
    kept = x.copy()
    y = OPERATORS["media_rows"](ids, media, x, first=10)
    want = [x[0], media[0, 0], media[1, 2], x[3], media[0, 2], media[1, 0]]
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(x, kept)
    np.testing.assert_array_equal(OPERATORS["media_rows"](ids[1:3] - 10, media, first=0), [media[0, 0], media[1, 2]])


def test_ids_beyond_the_table_become_one_that_it_has():
    ids = np.array([0, 5, 6, 7, 900], np.int32)
    np.testing.assert_array_equal(OPERATORS["text_ids"](ids, vocab=7), [0, 5, 6, 6, 6])


@pytest.mark.oracles
def test_blocks_of_patches_are_pixel_shuffle():
    torch = pytest.importorskip("torch")
    n, side, scale = 5, 8, 2
    image = np.random.default_rng(1).normal(size=(n, side, side)).astype(np.float32)
    want = torch.nn.functional.pixel_unshuffle(torch.tensor(image)[None], scale)[0]  # [n * scale * scale, side / 2, side / 2]
    want = want.reshape(n, scale * scale, -1).permute(2, 1, 0).reshape(-1, scale * scale * n).numpy()
    blocks = image.reshape(n, side // scale, scale, side // scale, scale).transpose(1, 3, 2, 4, 0).reshape(-1, n)
    got = OPERATORS["gather_blocks"](blocks, np.arange(0, side * side, scale * scale), count=scale * scale)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "shapes", [(("tokens", 3, 4), ("pooled",)), (("tokens", "n"), ("pooled",)), (("tokens", 4), ("pooled", 2))]
)
def test_blocks_of_what_is_no_matrix_are_refused(shapes):
    with pytest.raises(ProgramError, match="gather_blocks"):
        OPERATORS["gather_blocks"].result_shapes(shapes, {"count": 2})
    with pytest.raises(ProgramError, match="count"):
        OPERATORS["gather_blocks"].result_shapes((("tokens", 4), ("pooled",)), {"count": 0})


@given(*[st.integers(0, 30)] * 5)
def test_a_cut_keeps_each_token_s_row(start, length, row, first, more):
    span = Span(start, start + length + 1, TILE, row)
    cut = span.cut(first, first + more)
    rows = {at: row + at - start for at in range(span.start, span.stop)}
    want = {at: r for at, r in rows.items() if first <= at < first + more}
    assert want == ({} if cut is None else {at: cut.row + at - cut.start for at in range(cut.start, cut.stop)})


def program(lookups: int):
    b = new_builder()
    xs = [b.embedding(b.input("token_ids"), b.weight(f"table.{i}", (11, 4))) for i in range(lookups)]
    return b.finish({"logits": b.gather_rows(xs[0] if xs else b.embedding(b.input("positions"), b.weight("p", (11, 4))),
                                             b.input("sample_rows"))}, vocab_size=11)  # fmt: skip


def test_a_program_gets_a_place_for_as_many_rows_as_a_step_has_tokens():
    made, first = with_media(program(1), 100)
    assert [call.name for call in made.calls] == ["text_ids", "embedding", "media_rows", "gather_rows"]
    assert first == 11 and made.constants[-1].value.shape == (2, SLOT, 4)
    assert not made.constants[-1].array.any()


def test_a_program_that_looks_up_its_tokens_twice_is_refused():
    with pytest.raises(ProgramError, match="one table"):
        with_media(program(2), 100)


def test_no_rows_make_no_blocks():
    assert OPERATORS["gather_blocks"](np.zeros((8, 3), np.float32), np.zeros(0, np.int32), count=4).shape == (0, 12)
